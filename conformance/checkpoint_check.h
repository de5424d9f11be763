#pragma once
// Asks modules whether activation checkpointing changes nothing in them: each is run, run again in
// backward, and every tensor that autograd saved is compared with its recomputation, to the bit.

#include <fsdp/recomputation.h>

#include <filesystem>
#include <iosfwd>
#include <string>
#include <vector>

#include "reference/scenario.h"

namespace shardproof {

struct CheckedRegion {
  std::string name;
  fsdp::RecomputationReport report;
  std::string trouble;  // what it threw instead, "" for nothing

  bool holds() const { return trouble.empty() && report.is_equal(); }
};

/// The layers of the scenario's model ("blocks.0"), each by itself in training mode, on the values
/// that rank 0's first micro-batch gives it.
std::vector<CheckedRegion> check_layers(const Scenario& scenario);

/// The cases of a library (fsdp/recomputation_library.h). `only`: their names; empty for all.
/// Throws UsageError for what is wrong with the library, or a name that it does not have.
std::vector<CheckedRegion> check_library(const std::filesystem::path& library,
                                         const std::vector<std::string>& only);

/// A table, and below it the first differences of each region that has any.
void print_regions(std::ostream& out, const std::vector<CheckedRegion>& regions);

}  // namespace shardproof
