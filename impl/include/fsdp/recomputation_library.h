#pragma once
// Modules of one's own, from a shared library, for `shardproof checkpoint-check`: is what they do
// the same when they run again? The library has one C function, and brings libfsdp along.
//
//   extern "C" void fsdp_recomputation_cases(std::vector<fsdp::RecomputationCase>* cases) {
//     cases->push_back({"block", [](const fsdp::RecomputationOptions& options) {
//       Block block(64);
//       return fsdp::check_recomputation(
//           options, [block](const torch::Tensor& x) mutable { return block(x); },
//           torch::randn({8, 64}).requires_grad_());
//     }});
//   }

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "fsdp/recomputation.h"

namespace fsdp {

struct RecomputationCase {
  std::string name;
  /// Runs the module and says how its second run compares; what it throws is told to the user.
  std::function<RecomputationReport(const RecomputationOptions& options)> check;
};

/// The library's cases. It is never unloaded. Throws UsageError that names the file: it is not
/// there, is no library or lacks something it needs, has no fsdp_recomputation_cases, let an
/// exception through, or gave no case, one without a name or function, or two of one name.
std::vector<RecomputationCase> load_recomputation_library(const std::filesystem::path& library);

}  // namespace fsdp

extern "C" {
/// The name to look for: "fsdp_recomputation_cases". Adds cases to the list. It must have been
/// built against the libtorch that the program runs with.
void fsdp_recomputation_cases(std::vector<fsdp::RecomputationCase>* cases);
using FsdpRecomputationCases = decltype(&fsdp_recomputation_cases);
}
