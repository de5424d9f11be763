#include "reference/reduction.h"

#include "reference/models.h"

namespace shardproof {
namespace {

using torch::Tensor;

/// 16-bit numbers are added up in float32 and rounded once.
torch::Dtype accumulation_dtype(torch::Dtype reduce) {
  return reduce == torch::kFloat64 ? torch::kFloat64 : torch::kFloat32;
}

/// Starts a sum with its first term, or adds another one in place.
void accumulate(Tensor& sum, const Tensor& term) {
  if (sum.defined()) {
    sum.add_(term);
  } else {
    sum = term.clone();
  }
}

}  // namespace

GradientReduction::GradientReduction(const Scenario& scenario)
    : scenario_(scenario),
      layout_(layout_of(scenario)),
      divide_(divide_factors(scenario)),
      dtype_(dtype_named(scenario.dtype)),
      reduce_(dtype_named(reduce_dtype(scenario))),
      accumulation_(accumulation_dtype(reduce_)),
      waiting_(static_cast<std::size_t>(scenario.world_size)) {}

void GradientReduction::add(const Tensor& gradient) {
  const bool is_last_rank = rank_ + 1 == scenario_.world_size;
  auto own = gradient.detach().to(reduce_);
  if (scenario_.accumulation == "last") {
    auto& sum = waiting_[static_cast<std::size_t>(rank_)];
    accumulate(sum, own);
    own = sum;
  }
  if (scenario_.accumulation != "last" || micro_batch_ + 1 == scenario_.micro_batches) {
    add_shard(own);
  }
  rank_ = is_last_rank ? 0 : rank_ + 1;
  micro_batch_ += is_last_rank ? 1 : 0;
}

void GradientReduction::add_shard(const Tensor& term) {
  const auto divided = divide_.pre == 1 ? term : term.div(divide_.pre);
  accumulate(over_shards_, divided.to(accumulation_));
  if ((rank_ + 1) % layout_.shards != 0) {
    return;
  }
  auto sum = over_shards_.to(reduce_);
  over_shards_ = Tensor();
  if (scenario_.accumulation == "last_all_reduce") {
    auto& earlier = waiting_[static_cast<std::size_t>(rank_ / layout_.shards)];
    accumulate(earlier, sum);
    sum = earlier;
  }
  if (scenario_.accumulation != "last_all_reduce" || micro_batch_ + 1 == scenario_.micro_batches) {
    add_replica(sum);
  }
}

void GradientReduction::add_replica(const Tensor& term) {
  accumulate(over_replicas_, term.to(accumulation_));
  if (rank_ + 1 < scenario_.world_size) {
    return;
  }
  auto sum = over_replicas_.to(reduce_);
  over_replicas_ = Tensor();
  if (divide_.post != 1 || scenario_.world_size == 1) {
    sum = sum.div(divide_.post);
  }
  accumulate(total_, sum.to(dtype_));
}

}  // namespace shardproof
