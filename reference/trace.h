#pragma once
// What a run produced, step by step: the common language of references and subjects. Tensors here
// are detached, contiguous CPU copies that nobody else writes to.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace shardproof {

/// In the order in which a step produces them.
enum class Quantity {
  output,     // of a layer or the whole model, one per rank and micro-batch, named "blocks.0@m0",
              // "model@m0" (record_outputs says how further calls are named: "layers.0#2+1@m0")
  loss,       // of each rank: shape [micro_batches], mean over the rank's samples; name "loss"
  mean_loss,  // over all ranks and micro-batches, float64 scalar; name "mean_loss"
  // Of a checkpointed region, one per rank: what autograd saved of its first run, and what its
  // second run made of it. Named by region, number, operator and micro-batch:
  // "blocks.0/3:aten::gelu@m0"; "+1" after it if the region ran again. Values that are no
  // floating-point numbers are given as float64.
  saved_activation,
  recomputed_activation,
  gradient,  // after reduction over ranks and accumulation, before clipping; name of the parameter.
             // A frozen parameter and one that no rank had a gradient of have none.
  total_norm,        // scalar; every rank's own copy; name "total_norm"
  clipped_gradient,  // what the optimizer is given; equals gradient if nothing was clipped
  parameter,         // after the step
  optimizer_state,   // after the step; named "exp_avg/NAME", "exp_avg_sq/NAME",
                     // "momentum_buffer/NAME"
};
std::string_view to_string(Quantity quantity);
/// Throws std::invalid_argument for a name that is none.
Quantity quantity_from_string(std::string_view name);

enum class Placement {
  per_rank,    // each rank has its own value, all of the same shape
  replicated,  // each rank has its own copy of one value
  sharded,     // each rank has a run of the flattened elements; together they tile it, once or,
               // where several replicas are kept, once in each; runs may be empty
  single,      // one device made it: one piece, of rank kNoRank
};

inline constexpr int kNoRank = -1;

struct Piece {
  int rank = kNoRank;
  std::int64_t offset = 0;  // first element held, in the flattened tensor; 0 unless sharded
  at::Tensor values;        // 1-D for sharded pieces, else of the tensor's shape
};

struct TraceTensor {
  Quantity quantity{};
  std::string name;
  std::vector<std::int64_t> shape;  // of the whole tensor
  Placement placement = Placement::single;
  std::vector<Piece> pieces;  // in rank order
  /// Replay only, for gradients: the mean over ranks of |gradient|, from which the bound of a sum
  /// in unknown order follows (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.,
  /// section 4.2).
  at::Tensor magnitude;
};

struct StepTrace {
  int step = 0;  // from 0
  std::vector<TraceTensor>
      tensors;  // in execution order: gradients run from the last layer to the first

  /// nullptr if there is none.
  const TraceTensor* find(Quantity quantity, std::string_view name) const;
};

/// The state of a training run between two steps, whole tensors by plain parameter name.
struct TrainingState {
  std::int64_t steps_done = 0;
  std::map<std::string, at::Tensor> parameters;
  std::map<std::string, at::Tensor>
      optimizer_state;  // keys as in Quantity::optimizer_state; empty before step 0
  /// Of the steps done, those in which the optimizer did nothing (Scenario::loss_scale).
  std::int64_t left_out = 0;

  /// What the optimizer counts.
  std::int64_t optimizer_steps() const { return steps_done - left_out; }
};

/// Raised when a trace contradicts itself (pieces that overlap or leave a gap, a missing rank,
/// another shape or dtype).
struct TraceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The whole tensor: sharded pieces put in order and joined and reshaped (of ranks that hold the
/// same run, the first); rank 0's copy of a replicated one; the only piece of a single one. Throws
/// TraceError if the pieces do not tile the tensor, or for a per_rank tensor.
at::Tensor assemble(const TraceTensor& tensor);

/// The state after the step, from its parameters and optimizer state. `left_out`: in how many steps
/// so far, this one included, the optimizer did nothing.
TrainingState state_after(const StepTrace& trace, std::int64_t left_out = 0);

/// Whether an element of a gradient is not finite: what a run with a loss scale leaves a step out
/// for.
bool has_non_finite_gradient(const StepTrace& trace);

}  // namespace shardproof
