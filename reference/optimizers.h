#pragma once
// The reference's optimizers: libtorch's own, which compute to the bit what reference/README.md
// writes, with a state that can be read and put in place by parameter name. Private to the
// reference.

#include <torch/types.h>
#include <functional>
#include <memory>
#include <string>

#include "reference/models.h"
#include "reference/scenario.h"

namespace shardproof {

class ReferenceOptimizer {
 public:
  virtual ~ReferenceOptimizer() = default;
  /// Updates the parameters that have a gradient.
  virtual void step() = 0;
  /// Named "exp_avg/NAME" and so on, in parameter order, of the parameters that were updated; the
  /// optimizer's own tensors.
  virtual NamedTensors state() const = 0;
  /// Returns the value for a name of the state, of the parameter's shape and dtype, or an undefined
  /// tensor for a parameter that was not updated yet; the optimizer keeps it and writes to it.
  using Find =
      std::function<torch::Tensor(const std::string& name, const torch::Tensor& parameter)>;
  /// With steps_done 0, of the optimizer's own count, it starts anew and nothing is asked for.
  virtual void set_state(std::int64_t steps_done, const Find& find) = 0;
};

std::unique_ptr<ReferenceOptimizer> make_reference_optimizer(const OptimizerSpec& spec,
                                                             NamedTensors parameters);

}  // namespace shardproof
