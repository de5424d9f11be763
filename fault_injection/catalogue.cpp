#include "fault_injection/catalogue.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "fault_injection/norm_faults.h"
#include "fault_injection/recomputation_faults.h"

namespace shardproof {
namespace {

/// Every rank clips by the norm of its own shards: what an ordinary clip routine does to a sharded
/// model (pytorch/pytorch#72548).
class LocalNormClipping : public StepObserver {
 public:
  void observe(const fsdp::Observation& seen) override {
    if (seen.point == fsdp::Point::local_square_sum) {
      local_ = seen.tensor.clone();
    } else if (seen.point == fsdp::Point::global_square_sum && !seen.tensor.equal(local_)) {
      seen.tensor.copy_(local_);
      struck(seen.rank, Quantity::total_norm, "total_norm");
    }
  }

 private:
  at::Tensor local_;
};

/// Gradients are summed over the ranks and never divided (pytorch/pytorch#162338).
class SumInsteadOfMean : public StepObserver {
 public:
  void observe(const fsdp::Observation& seen) override {
    if (seen.point == fsdp::Point::gradient_divide_factor && seen.world_size > 1) {
      seen.tensor.fill_(1.0);
      for (const auto& slot : *seen.slots) {
        struck(seen.rank, Quantity::gradient, slot.name);
      }
    }
  }
};

/// The lowest mantissa bit of one element of one rank's gradient shard is inverted once: a device
/// that computes almost right. It is the middle element of the first non-empty shard that this rank
/// reduces in that step.
class FlippedBit : public StepObserver {
 public:
  explicit FlippedBit(int strike_step) : strike_step_(strike_step) {}

  void observe(const fsdp::Observation& seen) override {
    if (seen.point != fsdp::Point::sharded_gradient || step() != strike_step_ || done_) {
      return;
    }
    const auto chunk_begin = seen.shard * seen.tensor.numel();
    const auto chunk_end = chunk_begin + seen.tensor.numel();
    for (const auto& slot : *seen.slots) {
      const auto begin = std::max(slot.offset, chunk_begin);
      const auto end = std::min(slot.offset + slot.numel, chunk_end);
      if (begin >= end) {
        continue;
      }
      const auto at = (begin + end) / 2;
      const auto integer = seen.tensor.scalar_type() == at::kDouble ? at::kLong : at::kInt;
      seen.tensor.narrow(0, at - chunk_begin, 1).view(integer).bitwise_xor_(1);
      struck(seen.rank, Quantity::gradient, slot.name, at - slot.offset);
      done_ = true;
      return;
    }
  }

 private:
  int strike_step_;
  bool done_ = false;
};

}  // namespace

const std::vector<Fault>& fault_catalogue() {
  static const std::vector<Fault> catalogue = [] {
    std::vector<Fault> faults = {
        {"local_norm_clipping",
         "each rank clips by the norm of its own shards instead of the norm over all ranks",
         [](const Scenario&, int) { return std::make_unique<LocalNormClipping>(); }},
        {"sum_instead_of_mean",
         "gradients are summed over the ranks and not divided by their number",
         [](const Scenario&, int) { return std::make_unique<SumInsteadOfMean>(); }},
        {"flipped_bit",
         "the lowest mantissa bit of one gradient element on one rank is inverted, at one step",
         [](const Scenario& scenario, int rank) -> std::unique_ptr<StepObserver> {
           // Neither the first step nor, if that can be, rank 0: a check that looks only there must
           // not pass.
           if (rank != scenario.world_size / 2) {
             return std::make_unique<NoFault>();
           }
           return std::make_unique<FlippedBit>(std::min(2, scenario.steps - 1));
         }},
    };
    for (const auto& more : {norm_faults(), recomputation_faults()}) {
      faults.insert(faults.end(), more.begin(), more.end());
    }
    return faults;
  }();
  return catalogue;
}

const Fault* find_fault(std::string_view name) {
  const auto& catalogue = fault_catalogue();
  const auto found = std::find_if(catalogue.begin(), catalogue.end(),
                                  [name](const Fault& fault) { return fault.name == name; });
  return found == catalogue.end() ? nullptr : &*found;
}

}  // namespace shardproof
