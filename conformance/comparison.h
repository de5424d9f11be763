#pragma once
// Holds a subject's step to a reference's: pairs the tensors, reassembles shards, applies the rule,
// and says where they differ. Knows nothing of FSDP.

#include <string>
#include <vector>

#include "conformance/verdict.h"
#include "reference/scenario.h"
#include "reference/trace.h"

namespace shardproof {

/// Distance between two values of the same floating dtype in units in the last place: the number of
/// representable values from one to the other; 0 for equal bits; +0 and -0 are 1 apart; the largest
/// number if exactly one is NaN.
std::uint64_t ulp_distance(double a, double b, at::ScalarType dtype);

/// What `compare_step` holds the subject to.
struct Expectation {
  std::string reference;  // "replay", "python", "whole", "float64"
  const StepTrace* want = nullptr;
  /// Bounded only ("whole", "float64"), and required there: the same step by the trusted
  /// single-device run (the replay, whose sums are as long as the subject's) and in float64, both
  /// from `start`, the whole state in which the subject began the step. The bounds follow from
  /// their distance and the optimizer's formula; see tolerance.h.
  const StepTrace* trusted = nullptr;
  const StepTrace* float64 = nullptr;
  const TrainingState* start = nullptr;
};

/// Compares every tensor of the expectation with the subject's, every rank's own copy or piece, and
/// returns a verdict for each, in the subject's execution order. A tensor that is missing on either
/// side, has another shape or dtype, or whose pieces do not tile it is a failed verdict with a
/// message. Sharded pieces tile the tensor once in each replica of layout_of(scenario). The rule
/// comes from tolerance.h.
std::vector<Verdict> compare_step(const Scenario& scenario, const StepTrace& subject,
                                  const Expectation& expectation);

/// Compares what the subject's checkpointed regions saved with what they recomputed, every rank's
/// own, to the bit. Empty if it has neither.
std::vector<Verdict> compare_recomputation(const Scenario& scenario, const StepTrace& subject);

/// The first failed verdict in execution order: the earliest step, then the order of quantities in
/// a step, then the order in the trace. nullptr if none failed.
const Verdict* first_divergence(const std::vector<Verdict>& verdicts);

}  // namespace shardproof
