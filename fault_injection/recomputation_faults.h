#pragma once
// Faults of activation checkpointing.

#include <vector>

#include "conformance/fault.h"

namespace shardproof {

std::vector<Fault> recomputation_faults();

}  // namespace shardproof
