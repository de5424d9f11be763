#include "conformance/environment.h"

#include <ATen/Context.h>
#include <ATen/Version.h>
#include <fmt/format.h>
#include <torch/version.h>

#include <fstream>
#include <thread>

namespace shardproof {
namespace {

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("model name")) {
      const auto colon = line.find(": ");
      return colon == std::string::npos ? line : line.substr(colon + 2);
    }
  }
  return "unknown";
}

}  // namespace

std::map<std::string, std::string> describe_environment() {
  return {
      {"shardproof", SHARDPROOF_VERSION},
      {"libtorch", TORCH_VERSION},
      {"cpu", cpu_model()},
      {"cores", std::to_string(std::thread::hardware_concurrency())},
      {"cpu_capability", at::get_cpu_capability()},
      {"blas", at::hasMKL() ? "MKL" : "other"},
      {"compiler", fmt::format("{} {}", SHARDPROOF_COMPILER, __VERSION__)},
  };
}

}  // namespace shardproof
