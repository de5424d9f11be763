#pragma once
// The section on memory: what sharding and activation checkpointing are said to save, held to
// counts of bytes (memory_measurement.h).

#include "conformance/claims.h"

namespace shardproof {

/// Peaks of L = 4 to 576 (quick: to 36) under each policy; persistent bytes and peaks of each rank
/// of 1, 2, 4 and 8, with and without sharding and checkpointing.
ClaimsSection memory_section(const ClaimsOptions& options);

}  // namespace shardproof
