#pragma once
// The single-device reference. It uses plain libtorch and none of the sharding code: what it
// computes is what the subject is held to.

#include <torch/torch.h>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "reference/data.h"
#include "reference/models.h"
#include "reference/scenario.h"
#include "reference/trace.h"

namespace shardproof {

enum class ReferenceMode {
  replay,   // each rank's micro-batches one after another, gradients combined in rank order as
            // sharding prescribes: equal to the bit
  whole,    // all ranks' samples as one batch: equal within a bound
  float64,  // as whole, in float64, from the same weights: shows how far rounding alone carries a
            // run
};
std::string_view to_string(ReferenceMode mode);

/// Trains on the scenario's device. Results depend on the number of intra-op threads of the calling
/// thread, as kernels split their sums over them; a caller that wants the bits of
/// reference/README.md calls at::set_num_threads(1) first.
///
/// Frozen parameters, and those without a gradient on any rank, have no gradient, no
/// clipped_gradient and no optimizer_state in the trace. With a loss scale, a step whose gradient
/// is not finite leaves parameters and optimizer alone.
///
/// The whole and float64 modes compute in one precision: float64 ignores Scenario::precision, and
/// whole says something only where all dtypes are the scenario's.
///
/// With dropout, replay draws each rank's masks from that rank's generator, as sharded training
/// does. The other modes draw from one generator for the whole batch, so their masks are others,
/// and comparing them with a sharded run says nothing.
class ReferenceTrainer {
 public:
  /// `initial` are whole weights by name (initial_parameters, or read from a file), in the
  /// scenario's dtype in every mode. Throws ScenarioError if they do not fit the model.
  ReferenceTrainer(const Scenario& scenario, ReferenceMode mode,
                   const std::map<std::string, torch::Tensor>& initial);
  ~ReferenceTrainer();

  /// Puts parameters and optimizer state in place of its own: lockstep. The ranks' random
  /// generators go on. The state is in the scenario's dtype in every mode; with
  /// optimizer_steps() 0 the optimizer starts anew. A parameter of which the state has nothing is
  /// taken to have had no gradient yet. Throws ScenarioError for a parameter and TraceError for an
  /// optimizer state of which a part is missing or of another shape or dtype, naming it.
  void set_state(const TrainingState& state);
  /// Trains one step, on the data of that step. In replay mode the trace has outputs, each rank's
  /// loss, and gradient magnitudes; in the other modes mean_loss instead. Every tensor but outputs
  /// and losses is single. Gradients run from the last parameter to the first, parameters and
  /// optimizer state from the first to the last.
  StepTrace step(int step);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The norm that clipping uses: the p-th root of the exact sum of the p-th powers of all elements'
/// magnitudes; for p infinite, the largest magnitude. Powers are float64 (exact for p 1 and 2, else
/// pow of the C library), their sum is rounded to float64 once, and so are the root and, from
/// it, the result in the tensors' dtype. It does not
/// depend on the order or on the grouping of the elements. The sum is held as one integer of 4000
/// bits, so nothing is lost on the way, but the sum itself must fit a float64: above its range the
/// norm is infinite, and powers that are too small together give 0. NaN if an element is NaN, else
/// infinite if one is infinite; 0 for no elements (float32 for no tensors). Throws
/// std::invalid_argument if dtypes differ or p is not above 0. The result is on the first tensor's
/// device.
torch::Tensor exact_norm(const std::vector<torch::Tensor>& tensors, double p = 2);

}  // namespace shardproof
