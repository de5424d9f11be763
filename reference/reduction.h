#pragma once
// How the gradients of the ranks become the gradient of the step: reference/README.md, "Gradients",
// written as plain sums. Private to the reference.

#include <torch/types.h>
#include <vector>

#include "reference/scenario.h"

namespace shardproof {

/// One parameter's gradient over a step. Fed micro-batch by micro-batch and within one rank by
/// rank, in order, so that no more than the sums are held.
class GradientReduction {
 public:
  /// `scenario` must outlive it.
  explicit GradientReduction(const Scenario& scenario);

  /// The gradient of the next rank, in any floating dtype and on any device; zeros where a rank has
  /// none.
  void add(const torch::Tensor& gradient);
  /// After the last: in Scenario::dtype.
  torch::Tensor result() const { return total_; }

 private:
  /// The sums so far of the ranks of one micro-batch, both in the accumulation dtype.
  void add_shard(const torch::Tensor& term);
  void add_replica(const torch::Tensor& term);

  const Scenario& scenario_;
  const Layout layout_;
  const DivideSpec divide_;
  const torch::Dtype dtype_;
  const torch::Dtype reduce_;
  const torch::Dtype accumulation_;
  int micro_batch_ = 0;
  int rank_ = 0;
  torch::Tensor over_shards_;    // of the replica that is being summed
  torch::Tensor over_replicas_;  // of the replicas so far
  torch::Tensor total_;
  // What waits for the last micro-batch: of each rank ("last") or of each replica
  // ("last_all_reduce").
  std::vector<torch::Tensor> waiting_;
};

}  // namespace shardproof
