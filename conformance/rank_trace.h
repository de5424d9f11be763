#pragma once
// One rank's part of a step's trace, on its way to where the parts are joined.

#include <string>
#include <vector>

#include "conformance/fault.h"
#include "reference/trace.h"

namespace shardproof {

/// What one rank contributes to a step: tensors with one piece each, in execution order, the same
/// on every rank.
struct RankTrace {
  std::vector<TraceTensor> tensors;
  std::vector<Strike> strikes;  // of a planted fault, in this step
};

/// As bytes for another process of the same build, and back. `unpack` throws TraceError if they are
/// cut short.
std::string pack(const RankTrace& trace);
RankTrace unpack(const std::string& bytes);

/// The step's trace from those of the ranks, in rank order. Throws TraceError naming the rank whose
/// tensors are not those of rank 0: other quantities, names, shapes or placements, or another
/// number or order of them.
StepTrace join(int step, std::vector<RankTrace> ranks);

}  // namespace shardproof
