#include "fault_injection/catalogue.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "reference/models.h"

namespace shardproof {
namespace {

/// Every rank clips by the norm of its own shards: what an ordinary clip routine does to a sharded model (pytorch/pytorch#72548).
class LocalNormClipping : public StepObserver {
 public:
  void observe(const fsdp::Observation& seen) override {
    if (seen.point == fsdp::Point::local_square_sum) {
      local_ = seen.tensor.clone();
    } else if (seen.point == fsdp::Point::global_square_sum) {
      seen.tensor.copy_(local_);
    }
  }

 private:
  at::Tensor local_;
};

/// Gradients are summed over the ranks and never divided (pytorch/pytorch#162338).
class SumInsteadOfMean : public StepObserver {
 public:
  void observe(const fsdp::Observation& seen) override {
    if (seen.point == fsdp::Point::gradient_divide_factor) {
      seen.tensor.fill_(1.0);
    }
  }
};

/// The lowest mantissa bit of one element of one rank's gradient shard is inverted once: a device that computes almost right.
class FlippedBit : public StepObserver {
 public:
  FlippedBit(int step, std::string parameter) : strike_step_(step), parameter_(std::move(parameter)) {}

  void observe(const fsdp::Observation& seen) override {
    if (seen.point != fsdp::Point::sharded_gradient || step() != strike_step_ || done_) {
      return;
    }
    const auto chunk = seen.tensor.numel();
    const auto chunk_begin = seen.rank * chunk;
    for (const auto& slot : *seen.slots) {
      const auto begin = std::max(slot.offset, chunk_begin);
      const auto end = std::min(slot.offset + slot.numel, chunk_begin + chunk);
      if (slot.name == parameter_ && begin < end) {
        const auto at = (begin + end) / 2 - chunk_begin;
        const auto integer = seen.tensor.scalar_type() == at::kDouble ? at::kLong : at::kInt;
        seen.tensor.narrow(0, at, 1).view(integer).bitwise_xor_(1);
        done_ = true;
      }
    }
  }

 private:
  int strike_step_;
  std::string parameter_;
  bool done_ = false;
};

/// Nothing is planted on this rank.
class NoFault : public StepObserver {
 public:
  void observe(const fsdp::Observation&) override {}
};

/// The largest parameter, so that every rank of any usual world size holds a part of it; the first of them in name order.
std::string largest_parameter(const Scenario& scenario) {
  auto model = make_model(scenario);
  std::string name;
  std::int64_t numel = -1;
  for (const auto& parameter : model->named_parameters()) {
    if (parameter.value().numel() > numel) {
      name = parameter.key();
      numel = parameter.value().numel();
    }
  }
  return name;
}

/// The step and rank of a fault that strikes once: neither the first nor, if that can be, rank 0.
int strike_step(const Scenario& scenario) { return std::min(2, scenario.steps - 1); }
int strike_rank(const Scenario& scenario) { return scenario.world_size / 2; }

std::string last_parameter(const Scenario& scenario) {
  auto model = make_model(scenario);
  return model->named_parameters().back().key();
}

}  // namespace

const std::vector<Fault>& fault_catalogue() {
  static const std::vector<Fault> catalogue = {
      {"local_norm_clipping", "each rank clips by the norm of its own shards instead of the norm over all ranks",
       [](const Scenario&, int) { return std::make_unique<LocalNormClipping>(); },
       [](const Scenario&) {
         return FaultSite{0, Quantity::total_norm, "total_norm", kNoRank};
       }},
      {"sum_instead_of_mean", "gradients are summed over the ranks and not divided by their number",
       [](const Scenario&, int) { return std::make_unique<SumInsteadOfMean>(); },
       [](const Scenario& scenario) {
         return FaultSite{0, Quantity::gradient, last_parameter(scenario), kNoRank};
       }},
      {"flipped_bit", "the lowest mantissa bit of one gradient element on one rank is inverted, at one step",
       [](const Scenario& scenario, int rank) -> std::unique_ptr<StepObserver> {
         if (rank != strike_rank(scenario)) {
           return std::make_unique<NoFault>();
         }
         return std::make_unique<FlippedBit>(strike_step(scenario), largest_parameter(scenario));
       },
       [](const Scenario& scenario) {
         return FaultSite{strike_step(scenario), Quantity::gradient, largest_parameter(scenario),
                          strike_rank(scenario)};
       }},
  };
  return catalogue;
}

const Fault* find_fault(std::string_view name) {
  const auto& catalogue = fault_catalogue();
  const auto found = std::find_if(catalogue.begin(), catalogue.end(),
                                  [name](const Fault& fault) { return fault.name == name; });
  return found == catalogue.end() ? nullptr : &*found;
}

}  // namespace shardproof
