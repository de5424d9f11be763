#pragma once
// The optimizer's state over all ranks: what they agree to hold, and loading it from a source of
// whole tensors.

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/state.h"
#include "model_tensors.h"
#include "optimizer_access.h"
#include "tensor_source.h"

namespace fsdp {

/// What one parameter's state consists of.
struct StateShape {
  std::map<std::string, std::int64_t> counts;
  std::vector<std::string> tensors;
};

/// An optimizer whose parameters have been found in the model.
struct OptimizerView {
  const OptimizerKind* kind = nullptr;
  std::vector<OptimizerState::Group> groups;
  std::vector<std::size_t> parameters;  // indices of model tensors; each once, ascending
  std::vector<std::vector<std::size_t>> group_parameters;  // the same by group
};
/// Throws UsageError if a parameter is not the model's, or an option not finite.
OptimizerView view_optimizer(const torch::optim::Optimizer& optimizer,
                             const std::vector<ModelTensor>& tensors);

/// The parameters, by index, that have state, and what it consists of: the same on every rank, also
/// on those whose share is empty. A collective. Throws StateError if the ranks do not agree.
std::map<std::size_t, StateShape> agree_on_states(const Model& model,
                                                  const torch::optim::Optimizer& optimizer,
                                                  const OptimizerView& view);

/// This rank's part of a state tensor; empty where this rank has no state because its share is
/// empty.
at::Tensor state_piece(const torch::optim::Optimizer& optimizer, const OptimizerKind& kind,
                       const ModelTensor& parameter, const std::string& tensor);

/// A saved optimizer, less the tensors. Those are named "KEY/PARAMETER" in their source.
struct SavedOptimizer {
  std::string type;
  std::vector<OptimizerState::Group> groups;
  std::map<std::string, std::map<std::string, std::int64_t>> counts;  // of parameters with state
};

/// What of a saved optimizer goes where.
struct OptimizerPlan {
  std::vector<std::size_t> groups;  // of the saved optimizer, by group of this one
  struct Entry {
    std::string name;  // in the source
    StateShape shape;
  };
  std::map<std::size_t, std::optional<Entry>> states;  // by model tensor; nothing: no state
};
/// Throws StateError if the saved optimizer does not fit.
OptimizerPlan plan_optimizer(const std::vector<ModelTensor>& tensors, const OptimizerView& view,
                             const SavedOptimizer& saved, const TensorSource& source);

using OptimizerPieces = std::map<std::size_t, std::optional<ParameterState>>;
OptimizerPieces read_optimizer(const std::vector<ModelTensor>& tensors, const OptimizerPlan& plan,
                               TensorSource& source);
void write_optimizer(torch::optim::Optimizer& optimizer, const std::vector<ModelTensor>& tensors,
                     const OptimizerView& view, const SavedOptimizer& saved,
                     const OptimizerPlan& plan, const OptimizerPieces& pieces);

}  // namespace fsdp
