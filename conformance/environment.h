#pragma once
// What a run ran on: recorded with every result, since bits may depend on it.

#include <map>
#include <string>

namespace shardproof {

/// Keys: "shardproof", "libtorch", "cpu" (model name), "cpu_capability" (what kernels were chosen),
/// "compiler", "blas".
std::map<std::string, std::string> describe_environment();

}  // namespace shardproof
