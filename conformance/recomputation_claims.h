#pragma once
// The section on what activation checkpointing recomputes: is it what was stored, and does the
// order of sharding and checkpointing matter?

#include "conformance/claims.h"

namespace shardproof {

/// Trains a small transformer with dropout on 1 to 8 ranks (quick: to 2), with regions inside their
/// units, around them and around several, and holds it to a device that stores everything.
ClaimsSection recomputation_section(const ClaimsOptions& options);

}  // namespace shardproof
