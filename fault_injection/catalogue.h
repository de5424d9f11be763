#pragma once
// The catalogue of faults. Each is a mistake that real sharded training has had, planted in a
// correct run from the outside, to show that a suite catches it.

#include <vector>

#include "conformance/fault.h"

namespace shardproof {

const std::vector<Fault>& fault_catalogue();
/// nullptr if there is none of that name.
const Fault* find_fault(std::string_view name);

}  // namespace shardproof
