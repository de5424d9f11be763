#pragma once
// A function from a shared library, or in plain words why there is none.

#include <filesystem>
#include <functional>
#include <string>

namespace fsdp {

/// Loads the library for good, and finds the function. `refuse(seen, wanted)` must throw; `header`
/// is where users find the function's declaration.
void* find_in_library(
    const std::filesystem::path& library, const char* function, const char* header,
    const std::function<void(const std::string& seen, const std::string& wanted)>& refuse);

}  // namespace fsdp
