// A backend library that does what the variable BROKEN_BACKEND says.

#include <fsdp/backend_library.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace {
class Empty : public c10d::Backend {
 public:
  using c10d::Backend::Backend;
  const std::string getBackendName() const override { return "empty"; }
};
}  // namespace

extern "C" __attribute__((visibility("default"))) c10d::Backend* fsdp_make_backend(
    const fsdp::BackendRequest* request, char* error, std::size_t error_size) {
  const std::string how = std::getenv("BROKEN_BACKEND");
  if (how == "throws") {
    throw std::runtime_error("thrown through C");
  }
  if (how == "throws_an_int") {
    throw 1;
  }
  if (how == "says_why") {
    std::strncpy(error, "no such device", error_size);
  }
  if (how == "no_final_zero") {
    std::memset(error, 'x', error_size);
  }
  if (how == "other_rank") {
    return c10::make_intrusive<Empty>(request->rank + 1, request->world_size).release();
  }
  if (how == "well") {
    return c10::make_intrusive<Empty>(request->rank, request->world_size).release();
  }
  return nullptr;
}
