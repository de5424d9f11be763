#pragma once
// The reference's optimizers: libtorch's own, which compute to the bit what reference/README.md
// writes, with a state that can be read and put in place by parameter name. Private to the
// reference.

#include <torch/types.h>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "reference/scenario.h"

namespace shardproof {

using NamedTensors = std::vector<std::pair<std::string, torch::Tensor>>;

class ReferenceOptimizer {
 public:
  virtual ~ReferenceOptimizer() = default;
  /// Updates the parameters from their gradients, every one of which must be there.
  virtual void step() = 0;
  /// Named "exp_avg/NAME" and so on, in parameter order; the optimizer's own tensors. Only after a
  /// step or set_state.
  virtual NamedTensors state() const = 0;
  /// Returns the value for a name of the state, of the parameter's shape and dtype; the optimizer
  /// keeps it and writes to it.
  using Find =
      std::function<torch::Tensor(const std::string& name, const torch::Tensor& parameter)>;
  /// With steps_done 0 the optimizer starts anew and nothing is asked for.
  virtual void set_state(std::int64_t steps_done, const Find& find) = 0;
};

std::unique_ptr<ReferenceOptimizer> make_reference_optimizer(const OptimizerSpec& spec,
                                                             NamedTensors parameters);

}  // namespace shardproof
