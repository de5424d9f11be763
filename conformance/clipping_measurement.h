#pragma once
// Clipping by the norm of local shards beside clipping by the true norm, on the same gradients of
// the same sharded model: libtorch's torch::nn::utils::clip_grad_norm_ on each rank's own shards,
// and fsdp::clip_grad_norm_.

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "conformance/claims.h"
#include "reference/scenario.h"

namespace shardproof {

/// Gradients that are set by hand, of a model of three equal layers whose elements 64 ranks share
/// evenly.
enum class PlantedGradients {
  even,         // every element 2^-6 or -2^-6: each rank holds 1/W of the sum of squares
  one_layer,    // normal numbers of norm about 2 in the first layer, zeros in the others
  one_element,  // a single element 2: one rank holds everything
};
std::string_view to_string(PlantedGradients gradients);

struct ClippingCase {
  int world_size = 4;
  PlantedGradients gradients = PlantedGradients::even;
  std::string strategy = "full_shard";
  int replicas = 1;            // hybrids
  std::string wrap = "layer";  // "layer": each layer is a unit; "model": one unit of all
  std::string dtype = "float32";
  double max_norm = 1;
  std::uint64_t seed = 0;
  std::chrono::seconds timeout{300};
};

/// One step's gradients, clipped both ways. All norms before clipping.
struct ClippingStep {
  std::string name;  // dotted, the end of a check's name: <gradients>.<dtype>.w<world>.<variant>
  int step = 0;
  int world_size = 1;
  int shards = 1;  // ranks 0 to shards - 1 hold everything once
  std::string dtype;
  double max_norm = 0;

  std::vector<double> local_norms;    // by rank: what libtorch's routine returns
  std::vector<double> local_squares;  // by rank: the exact sum of squares, rounded to float64 once
  std::vector<double> local_scales;   // by rank: min(1, max_norm / (local norm + 1e-6))
  std::int64_t most_elements = 0;     // that a rank sums up, and in how many tensors
  std::int64_t most_tensors = 0;
  std::vector<double> true_norms;  // by rank: what fsdp::clip_grad_norm_ returns
  double true_square = 0;          // exact, rounded to float64 once
  double true_scale = 1;

  double single_norm = 0;      // of the same gradients on one device: the reference's
  std::int64_t elements = 0;   // clipped gradients compared with one device's, over all ranks
  std::int64_t differing = 0;  // in any bit
  double right_length = 0;     // norms of the whole clipped gradient
  double wrong_length = 0;
  double angle = 0;  // degrees between the two; 0 if one is zero

  double true_norm() const { return true_norms.front(); }
  /// Of the rank that is nearest to it, and farthest from it.
  double largest_ratio() const;
  double smallest_ratio() const;
  /// sqrt(sum of the local norms' squares over the ranks that hold everything once).
  double combined_norm() const;
  /// How far combined_norm() may be from the true norm, relatively: both are right but for
  /// rounding. See clipping_measurement.cpp.
  double combined_bound() const;
};

/// Throws ScenarioError for a case that is none.
ClippingStep measure_planted(const ClippingCase& clipping_case);

/// A run of training, and what clipping either way would make of its gradients at each step.
struct ClippingRun {
  std::vector<ClippingStep> steps;
  std::vector<double> losses;                   // mean over ranks, at each step
  std::vector<std::vector<double>> parameters;  // after each step, whole, by name one after another
};
enum class ClipBy { true_norm, local_norms };

/// Trains a scenario with the given clipping. With true_norm, each step's norm and clipped
/// gradients are held to the replay reference's, free-running; with local_norms the steps' fields
/// of one device are not filled.
ClippingRun measure_training(const Scenario& scenario, ClipBy clip_by,
                             std::chrono::seconds timeout = std::chrono::seconds(300));
/// What the section trains on many worlds: an mlp of three layers of 64, 4 samples a rank, on
/// noise.
Scenario clipping_scenario(int world_size, const std::string& optimizer, int steps,
                           std::uint64_t seed);
/// What it trains for long: a transformer of 34,000 parameters on sums in words, which it can
/// learn. Writes the text into `folder`, which must outlive the run.
Scenario drift_scenario(int world_size, const std::string& optimizer, int steps, std::uint64_t seed,
                        const std::filesystem::path& folder);

/// What must hold of every step, whatever the gradients: local <= true on every rank; strictly
/// below where more than one rank holds a gradient that is not zero, and equal only where one rank
/// holds everything; sqrt(sum of local^2) is the true norm within combined_bound(); the true norm
/// on every rank and all clipped gradients are those of one device, to the bit.
std::vector<Check> check_clipping(const ClippingStep& step);

}  // namespace shardproof
