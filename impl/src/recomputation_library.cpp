#include "fsdp/recomputation_library.h"

#include <fmt/format.h>

#include <exception>
#include <set>

#include "fsdp/errors.h"
#include "shared_library.h"

namespace fsdp {

std::vector<RecomputationCase> load_recomputation_library(const std::filesystem::path& library) {
  const auto refuse = [&library](const std::string& seen, const std::string& wanted) {
    throw UsageError(
        fmt::format("recomputation library {}: {}; wanted: {}", library.string(), seen, wanted));
  };
  constexpr const char* kFunction = "fsdp_recomputation_cases";
  const auto function = reinterpret_cast<FsdpRecomputationCases>(
      find_in_library(library, kFunction, "fsdp/recomputation_library.h", refuse));
  std::vector<RecomputationCase> cases;
  try {
    function(&cases);
  } catch (const std::exception& error) {
    refuse(fmt::format("{} let an exception through: {}", kFunction, error.what()), "none");
  } catch (...) {
    refuse(
        fmt::format("{} let an exception through, of a type that is no std::exception", kFunction),
        "none");
  }
  if (cases.empty()) {
    refuse(fmt::format("{} gave no case", kFunction), "one or more");
  }
  std::set<std::string> names;
  for (const auto& each : cases) {
    if (each.name.empty() || each.check == nullptr) {
      refuse(fmt::format("a case has no {}", each.name.empty() ? "name" : "function"), "both");
    }
    if (!names.insert(each.name).second) {
      refuse(fmt::format("two cases are named {}", each.name), "different names");
    }
  }
  return cases;
}

}  // namespace fsdp
