#include "shared_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

namespace fsdp {

void* find_in_library(
    const std::filesystem::path& library, const char* function, const char* header,
    const std::function<void(const std::string& seen, const std::string& wanted)>& refuse) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(library, error)) {
    refuse("there is no such file", "the path of a shared library");
  }
  // An absolute path, because dlopen looks for a bare name in the system's folders.
  const auto path = std::filesystem::absolute(library);
  // Never closed: threads, vtables and functions of its own may live on.
  void* handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    refuse(fmt::format("it cannot be loaded: {}", ::dlerror()),
           "a shared library whose own libraries are found (see ldd), for the libtorch of this "
           "program");
  }
  auto* const found = ::dlsym(handle, function);
  if (found == nullptr) {
    refuse(fmt::format("it has no function {}", function),
           fmt::format("one with C linkage, exported, as {} declares it", header));
  }
  return found;
}

}  // namespace fsdp
