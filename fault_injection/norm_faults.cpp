#include "fault_injection/norm_faults.h"

#include <ATen/ATen.h>
#include <fsdp/exact_sum.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

namespace shardproof {
namespace {

/// Changes what the ranks' parts of the norm, their sum, the norm or the factor are, and says so
/// where that is another value. A changed norm strikes total_norm on this rank; a factor that is
/// changed behind the norm's back strikes every clipped gradient.
class NormFault : public StepObserver {
 public:
  void observe(const fsdp::Observation& seen) override {
    switch (seen.point) {
      case fsdp::Point::sharded_gradient:
        for (const auto& slot : *seen.slots) {
          names_.insert(slot.name);
        }
        gradient(seen);
        break;
      case fsdp::Point::local_square_sum:
        change(seen, local_square_sum(seen.tensor));
        break;
      case fsdp::Point::global_square_sum:
        change(seen, global_square_sum(seen.tensor, seen.world_size));
        break;
      case fsdp::Point::total_norm:
        norm_ = seen.tensor.clone();
        change(seen, total_norm(seen.tensor));
        break;
      case fsdp::Point::clip_coefficient:
        if (const auto changed = coefficient(seen.tensor, norm_, seen.world_size);
            !changed.equal(seen.tensor)) {
          seen.tensor.copy_(changed);
          for (const auto& name : names_) {
            struck(seen.rank, Quantity::clipped_gradient, name);
          }
        }
        gradients_over();
        break;
      default:
        break;
    }
  }

 protected:
  virtual void gradient(const fsdp::Observation&) {}
  virtual at::Tensor local_square_sum(const at::Tensor& words) { return words; }
  virtual at::Tensor global_square_sum(const at::Tensor& words, int) { return words; }
  virtual at::Tensor total_norm(const at::Tensor& norm) { return norm; }
  virtual at::Tensor coefficient(const at::Tensor& right, const at::Tensor&, int) { return right; }
  /// The step's gradients have been clipped.
  virtual void gradients_over() {}

 private:
  void change(const fsdp::Observation& seen, const at::Tensor& changed) {
    if (!changed.equal(seen.tensor)) {
      seen.tensor.copy_(changed);
      struck(seen.rank, Quantity::total_norm, "total_norm");
    }
  }

  std::set<std::string> names_;
  at::Tensor norm_;
};

/// The words of a sum that is this number.
at::Tensor words_of(double value) {
  fsdp::ExactSquareSum sum;
  sum.add_powers(at::scalar_tensor(value, at::kDouble), 1);
  return sum.words();
}

/// A fault of the rank's own part, made from the gradients' shards as they were reduced.
class ShardNormFault : public NormFault {
 protected:
  /// A run of a parameter's elements that this rank holds.
  struct Piece {
    std::vector<std::int64_t> sizes;  // of the whole parameter
    at::Tensor values;
    int micro_batch = 0;
  };

  void gradient(const fsdp::Observation& seen) override {
    const int micro_batch = micro_batches_[std::string(seen.unit)]++;
    const auto chunk_begin = seen.shard * seen.tensor.numel();
    const auto chunk_end = chunk_begin + seen.tensor.numel();
    for (const auto& slot : *seen.slots) {
      const auto begin = std::max(slot.offset, chunk_begin);
      const auto end = std::min(slot.offset + slot.numel, chunk_end);
      if (begin < end) {
        pieces_.push_back({slot.sizes,
                           seen.tensor.narrow(0, begin - chunk_begin, end - begin).clone(),
                           micro_batch});
      }
    }
  }
  void gradients_over() override {
    pieces_.clear();
    micro_batches_.clear();
  }
  const std::vector<Piece>& pieces() const { return pieces_; }

 private:
  std::vector<Piece> pieces_;
  std::map<std::string, int> micro_batches_;
};

/// The norm is computed and logged, and gradients are left as they are: what was corrected was the
/// norm in the log, after the optimizer had stepped (sgl-project/SpecForge#663).
class NormLoggedNotUsed : public NormFault {
  at::Tensor coefficient(const at::Tensor& right, const at::Tensor&, int) override {
    return at::ones_like(right);
  }
};

/// The sum of squares runs over the replicas too, and each of them holds every gradient
/// (ByteDance-Seed/VeOmni#184).
class ReplicasCountedTwice : public NormFault {
 public:
  explicit ReplicasCountedTwice(int replicas) : replicas_(replicas) {}

 private:
  at::Tensor global_square_sum(const at::Tensor& words, int) override { return words * replicas_; }
  int replicas_;
};

/// Units that are not sharded are summed over all ranks, as if each held a part
/// (pytorch/pytorch#88955).
class NoShardCountedWTimes : public NormFault {
 public:
  explicit NoShardCountedWTimes(bool is_no_shard) : is_no_shard_(is_no_shard) {}

 private:
  at::Tensor global_square_sum(const at::Tensor& words, int world_size) override {
    return is_no_shard_ ? words * world_size : words;
  }
  bool is_no_shard_;
};

/// The 1e-6 of the factor's divisor is added once by each rank (pytorch/pytorch#149768).
class EpsilonPerRank : public NormFault {
 public:
  explicit EpsilonPerRank(double max_norm) : max_norm_(max_norm) {}

 private:
  at::Tensor coefficient(const at::Tensor&, const at::Tensor& norm, int world_size) override {
    return at::full_like(norm, max_norm_).div_(norm + 1e-6 * world_size).clamp_(c10::nullopt, 1.0);
  }
  double max_norm_;
};

/// Gradients are clipped while they bear the loss scale, and unscaled afterwards: the norm is that
/// of the scaled gradients. (PyTorch's notes on automatic mixed precision, "Gradient clipping",
/// warn of it.)
class ClippedBeforeUnscaling : public NormFault {
 public:
  explicit ClippedBeforeUnscaling(double scale) : scale_(scale > 0 ? scale : 1) {}

 private:
  at::Tensor total_norm(const at::Tensor& norm) override { return norm * scale_; }
  double scale_;
};

/// The norm is taken after the first micro-batch, and used for the sum of all.
class NormBeforeAccumulation : public ShardNormFault {
  at::Tensor local_square_sum(const at::Tensor&) override {
    fsdp::ExactSquareSum sum;
    for (const auto& piece : pieces()) {
      if (piece.micro_batch == 0) {
        sum.add(piece.values);
      }
    }
    return sum.words();
  }
};

/// Squares are taken and summed in float16: those below 2^-25 vanish, those above 65504 overflow
/// (facebookresearch/fairscale#263).
class SquaresInFloat16 : public ShardNormFault {
  at::Tensor local_square_sum(const at::Tensor&) override {
    auto sum = at::zeros({}, at::kHalf);
    for (const auto& piece : pieces()) {
      sum += piece.values.to(at::kHalf).square().sum();
    }
    return words_of(sum.item<double>());
  }
};

/// Only the parameters of one group are counted: here those with weight decay, which are those of
/// two dimensions and more.
class OneGroupOnly : public ShardNormFault {
  at::Tensor local_square_sum(const at::Tensor&) override {
    fsdp::ExactSquareSum sum;
    for (const auto& piece : pieces()) {
      if (piece.sizes.size() >= 2) {
        sum.add(piece.values);
      }
    }
    return sum.words();
  }
};

/// Each tensor's norm is rounded to bfloat16 before they are combined, and so is the result, so
/// that it depends on how elements are grouped (pytorch/torchtitan#4135).
class BFloat16NormOfNorms : public ShardNormFault {
  at::Tensor local_square_sum(const at::Tensor&) override {
    fsdp::ExactSquareSum sum;
    for (const auto& piece : pieces()) {
      sum.add(piece.values.norm().to(at::kBFloat16));
    }
    return sum.words();
  }
  at::Tensor total_norm(const at::Tensor& norm) override {
    return norm.to(at::kBFloat16).to(norm.scalar_type());
  }
};

template <typename F>
auto made(F make) {
  return [make](const Scenario& scenario, int) -> std::unique_ptr<StepObserver> {
    return make(scenario);
  };
}

/// As few replicas as can be more than one.
void with_replicas(Scenario& scenario) {
  scenario.strategy = "hybrid_shard";
  scenario.replicas = 2;
  while (scenario.world_size % scenario.replicas != 0) {
    ++scenario.replicas;
  }
}

}  // namespace

std::vector<Fault> norm_faults() {
  return {
      {"norm_logged_not_used", "the norm is computed and logged, and no gradient is clipped",
       made([](const Scenario&) { return std::make_unique<NormLoggedNotUsed>(); })},
      {"replicas_counted_twice", "the norm sums over replicas as well as shards",
       made([](const Scenario& scenario) {
         return std::make_unique<ReplicasCountedTwice>(scenario.replicas);
       }),
       "--strategy hybrid_shard --replicas 2", with_replicas},
      {"no_shard_counted_w_times", "units that are not sharded count once for each rank",
       made([](const Scenario& scenario) {
         return std::make_unique<NoShardCountedWTimes>(scenario.strategy == "no_shard");
       }),
       "--strategy no_shard", [](Scenario& scenario) { scenario.strategy = "no_shard"; }},
      {"epsilon_per_rank", "each rank adds the 1e-6 of the clip factor's divisor",
       made([](const Scenario& scenario) {
         return std::make_unique<EpsilonPerRank>(scenario.max_norm);
       })},
      {"clipped_before_unscaling", "gradients are clipped while they bear the loss scale",
       made([](const Scenario& scenario) {
         return std::make_unique<ClippedBeforeUnscaling>(scenario.loss_scale);
       }),
       "--loss-scale 1024", [](Scenario& scenario) { scenario.loss_scale = 1024; }},
      {"clipped_before_accumulation", "the norm is that of the first micro-batch",
       made([](const Scenario&) { return std::make_unique<NormBeforeAccumulation>(); }),
       "--micro-batches 2", [](Scenario& scenario) { scenario.micro_batches = 2; }},
      {"squares_in_float16", "gradients are squared and summed in float16",
       made([](const Scenario&) { return std::make_unique<SquaresInFloat16>(); })},
      {"one_group_only", "only parameters of two dimensions and more count for the norm",
       made([](const Scenario&) { return std::make_unique<OneGroupOnly>(); })},
      {"bfloat16_norm_of_norms",
       "norms of tensors are rounded to bfloat16 before they are combined",
       made([](const Scenario&) { return std::make_unique<BFloat16NormOfNorms>(); })},
  };
}

}  // namespace shardproof
