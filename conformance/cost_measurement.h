#pragma once
// The operations of a training step of the stack of layer_stack.h: counted (operation_count.h), and
// their closed form.

#include <cstdint>

#include "conformance/layer_stack.h"

namespace shardproof {

/// Floating-point operations of the matrix products of one training step (operation_count.h),
/// without the optimizer, which has none.
struct StepOperations {
  std::int64_t forward = 0;
  std::int64_t recomputation = 0;
  std::int64_t backward = 0;

  std::int64_t total() const { return forward + recomputation + backward; }
  bool operator==(const StepOperations&) const = default;
};

struct MeasuredStep {
  StepOperations operations;
  double milliseconds = 0;  // median of the repeats, on one thread. Shown, never asserted
};
/// On one rank without sharding; `repeats` steps are timed, none is if it is 0.
MeasuredStep measure_step(const StackSpec& spec, const CheckpointPolicy& policy, std::uint64_t seed,
                          int repeats);

/// The closed form, with F, D and H of stack_operations. forward: L F + H; backward: twice that,
/// for each product's two gradients; recomputation: F for each layer of a region, less D for each
/// region that stops early, within its last product, whose factors are the last tensors that
/// backward needs.
StepOperations expected_operations(const StackSpec& spec, const CheckpointPolicy& policy);

}  // namespace shardproof
