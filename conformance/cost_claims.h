#pragma once
// The section on compute: what activation checkpointing is said to cost, held to counted operations
// (cost_measurement.h).

#include "conformance/claims.h"

namespace shardproof {

/// L = 2, 4, ..., 64 (quick: to 8) under each policy, to the end and stopping early.
ClaimsSection compute_section(const ClaimsOptions& options);

}  // namespace shardproof
