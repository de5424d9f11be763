#pragma once
// Faults of the gradient norm and of clipping by it.

#include <vector>

#include "conformance/fault.h"

namespace shardproof {

std::vector<Fault> norm_faults();

}  // namespace shardproof
