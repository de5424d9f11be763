#include "fsdp/backend_library.h"

#include <fmt/format.h>

#include <array>
#include <exception>

#include "fsdp/errors.h"
#include "shared_library.h"

namespace fsdp {
namespace {

constexpr const char* kFunction = "fsdp_make_backend";

class Loader {
 public:
  Loader(const std::filesystem::path& library, const BackendRequest& request)
      : library_(library), request_(request) {}

  FsdpMakeBackend find() const {
    return reinterpret_cast<FsdpMakeBackend>(find_in_library(
        library_, kFunction, "fsdp/backend_library.h",
        [this](const std::string& seen, const std::string& wanted) { refuse(seen, wanted); }));
  }

  c10::intrusive_ptr<c10d::Backend> make(FsdpMakeBackend function) const {
    std::array<char, 4096> said{};
    c10d::Backend* made = nullptr;
    try {
      made = function(&request_, said.data(), said.size());
    } catch (const std::exception& error) {
      refuse(fmt::format("{} let an exception through: {}", kFunction, error.what()),
             "null and a text, since C functions do not throw");
    } catch (...) {
      refuse(fmt::format("{} let an exception through, of a type that is no std::exception",
                         kFunction),
             "null and a text, since C functions do not throw");
    }
    said.back() = '\0';  // whatever it wrote
    if (made == nullptr) {
      refuse(fmt::format("{} made no backend: {}", kFunction,
                         said[0] == '\0' ? "it did not say why" : said.data()),
             "a backend; see what the library needs");
    }
    auto backend = c10::intrusive_ptr<c10d::Backend>::reclaim(made);
    if (backend->getRank() != request_.rank || backend->getSize() != request_.world_size) {
      refuse(fmt::format("its backend is rank {} of {}", backend->getRank(), backend->getSize()),
             fmt::format("rank {} of {}; was the program started by the launcher that the library "
                         "belongs to?",
                         request_.rank, request_.world_size));
    }
    return backend;
  }

 private:
  [[noreturn]] void refuse(const std::string& seen, const std::string& wanted) const {
    throw UsageError(fmt::format("rank {}: backend library {}: {}; wanted: {}", request_.rank,
                                 library_.string(), seen, wanted));
  }

  const std::filesystem::path& library_;
  const BackendRequest& request_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> load_backend_library(const std::filesystem::path& library,
                                                       const BackendRequest& request) {
  const Loader loader(library, request);
  return loader.make(loader.find());
}

}  // namespace fsdp
