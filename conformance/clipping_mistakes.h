#pragma once
// The ways in which clipping goes wrong that look like one another in a log, told apart by value:
// each on an example small enough to be worked out by hand.

#include <string>
#include <vector>

namespace shardproof {

/// What a run with a mistake logs and does on its example, beside what is right there.
struct ClippingMistake {
  std::string id;       // that of the planted fault, if there is one
  std::string mistake;  // a sentence
  std::string source;   // repo#number, or "" where none is known to us
  std::string example;  // the gradients it is worked out on
  double reported = 0;  // the norm that is logged (of rank 0, if ranks differ)
  double true_norm = 0;
  /// The norm of the whole gradient that the optimizer is given, in units of the unscaled gradient.
  double applied = 0;
  double right_applied = 0;
  std::string outside;  // how it looks in logs and in training
};

/// All gradients below are clipped to max_norm 1 unless their example says otherwise.
std::vector<ClippingMistake> clipping_mistakes();

// ---- The pieces, for tests. Gradients are float64, so that only what is meant rounds.

/// By rank: min(1, max_norm / (norm + epsilon)).
double clip_scale(double norm, double max_norm, double epsilon = 1e-6);
double norm_of(const std::vector<double>& values);
/// The norm on a mesh of replicas x shards that all hold parts of `values`, summed over the shard
/// group, or, wrongly, over all ranks: sqrt(replicas) times as much.
double mesh_norm(const std::vector<double>& values, int replicas, bool counts_replicas);
/// The norm with squares and their sum in float16.
double float16_norm(const std::vector<double>& values);
/// The norm of the groups' norms, each of which, as the result, is rounded to bfloat16.
double bfloat16_norm_of_norms(const std::vector<std::vector<double>>& groups);
/// sqrt(sum of (local norm + epsilon)^2): each rank adds the epsilon to its own norm.
double norm_with_epsilon_per_rank(const std::vector<double>& local_norms, double epsilon);

}  // namespace shardproof
