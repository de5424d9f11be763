#pragma once
// What torch::optim's optimizers keep, by name: options of groups, and per parameter counts and
// tensors.

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp {

/// The state of one parameter. Only defined tensors are there.
struct ParameterState {
  std::map<std::string, std::int64_t> counts;
  std::map<std::string, at::Tensor> tensors;
};

struct OptimizerKind {
  std::string_view type;
  bool (*is)(const torch::optim::Optimizer& optimizer);
  std::map<std::string, double> (*options)(const torch::optim::OptimizerOptions& options);
  /// The names must be those that `options` gives.
  void (*set_options)(torch::optim::OptimizerOptions& options,
                      const std::map<std::string, double>& values);
  ParameterState (*state)(const torch::optim::OptimizerParamState& state);
  std::unique_ptr<torch::optim::OptimizerParamState> (*make_state)(const ParameterState& state);
  std::vector<std::string> counts;
  std::vector<std::string> tensors;           // that every state has
  std::vector<std::string> optional_tensors;  // that depend on options
};

/// Throws UsageError for an optimizer of another type.
const OptimizerKind& kind_of(const torch::optim::Optimizer& optimizer);

/// The parameter's state; nothing if it was never stepped.
std::optional<ParameterState> state_of(const torch::optim::Optimizer& optimizer,
                                       const OptimizerKind& kind, const at::Tensor& parameter);
void set_state(torch::optim::Optimizer& optimizer, const OptimizerKind& kind,
               const at::Tensor& parameter, const std::optional<ParameterState>& state);

}  // namespace fsdp
