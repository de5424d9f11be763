#pragma once
// What sharding does to persistent bytes, and checkpointing to activations: counted to the byte
// (memory_account.h), and the closed forms of both for the stack of layer_stack.h.

#include <cstdint>
#include <utility>
#include <vector>

#include "conformance/layer_stack.h"

namespace shardproof {

/// What stays from step to step.
struct PersistentBytes {
  std::int64_t parameters = 0;
  std::int64_t gradients = 0;
  std::int64_t optimizer_state = 0;  // AdamW's two moments

  std::int64_t total() const { return parameters + gradients + optimizer_state; }
  bool operator==(const PersistentBytes&) const = default;
};

/// One rank's.
struct MemoryUse {
  PersistentBytes persistent;
  /// The most that is held in forward and backward above what is persistent: activations, gradients
  /// under way, and with sharding the units that are gathered.
  std::int64_t peak = 0;
};

/// By rank. shards 0: without fully_shard, one rank. Else each block is a unit, and the rest.
/// Float32, AdamW. Gradients are there before the step that is measured (zero_grad without setting
/// them to none), so that they count as persistent and not as activations.
std::vector<MemoryUse> measure_memory(const StackSpec& spec, const CheckpointPolicy& policy,
                                      int shards, std::uint64_t seed);

/// By rank, the closed form. Without sharding 4, 4 and 8 bytes for each element. With W shards,
/// each unit's parameters at multiples of 64 bytes, and their end rounded up to W elements: a share
/// of 1/W for parameters and gradients; the moments are those of a rank's elements without padding.
/// (Rajbhandari et al., ZeRO, arXiv:1910.02054, stage 3.)
std::vector<PersistentBytes> expected_persistent(const StackSpec& spec, int shards);

/// How a policy's peak grows: peak = a + slope * x, to the byte, over the numbers of layers that
/// `fits`, on one rank. Chen et al., arXiv:1604.06174: x is L, or sqrt(L) for about sqrt(L)
/// segments.
struct Growth {
  double exponent = 1;     // x = L^exponent
  std::int64_t slope = 0;  // bytes for each `per` of x
  int per = 1;

  bool fits(int layers) const;
  /// x over `per`; for numbers that fit.
  std::int64_t steps(int layers) const;
};
Growth expected_growth(const StackSpec& spec, const CheckpointPolicy& policy);

/// The least and the largest slope of ln(a + b x) over ln(L) for L in [first, last]. A line by
/// least squares through such points has a slope between them, since it is a mean, of positive
/// weights, of the slopes between pairs of points.
std::pair<double, double> exponents_between(double a, double b, double exponent, double first,
                                            double last);

}  // namespace shardproof
