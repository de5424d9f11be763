// Mistakes of activation checkpointing: a second run that is not the first one again, and gradients
// that count it. All strike on one rank that is not the first, in every step in which they can.

#include "fault_injection/recomputation_faults.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <map>
#include <type_traits>
#include <utility>

namespace shardproof {
namespace {

/// Puts another tensor in place of what an observation point of the second run shows.
class SecondRunFault : public StepObserver {
 public:
  SecondRunFault(int rank, fsdp::Point point) : rank_(rank), point_(point) {}

  void observe(const fsdp::Observation& seen) override {
    if (seen.point != point_) {
      return;
    }
    auto other = change(seen.tensor, std::string(seen.unit));
    if (other.defined() && !other.equal(seen.tensor)) {
      seen.tensor = std::move(other);
      struck(rank_, Quantity::recomputed_activation, std::string(seen.unit));
    }
  }

 private:
  /// Undefined: nothing.
  virtual at::Tensor change(const at::Tensor& tensor, const std::string& region) = 0;

  int rank_;
  fsdp::Point point_;
};

/// Dropout masks are drawn anew (allenai/OLMo-core#828).
class FreshMasks : public SecondRunFault {
 public:
  explicit FreshMasks(int rank) : SecondRunFault(rank, fsdp::Point::recomputation_generator) {}

 private:
  at::Tensor change(const at::Tensor& /*state*/, const std::string& /*region*/) override {
    return at::make_generator<at::CPUGeneratorImpl>(++drawn_).get_state();
  }
  std::uint64_t drawn_ = 1'000'000;
};

/// The generator is set back to one number too late: whoever saved its state had drawn already.
class LateState : public SecondRunFault {
 public:
  explicit LateState(int rank) : SecondRunFault(rank, fsdp::Point::recomputation_generator) {}

 private:
  at::Tensor change(const at::Tensor& state, const std::string& /*region*/) override {
    auto generator = at::make_generator<at::CPUGeneratorImpl>();
    generator.set_state(state);
    at::rand({1}, generator);
    return generator.get_state();
  }
};

/// The input went through bfloat16: a cast of the policy that the second run makes and the first
/// does not (pytorch/pytorch#159359 is the other way round).
class NarrowInput : public SecondRunFault {
 public:
  explicit NarrowInput(int rank) : SecondRunFault(rank, fsdp::Point::recomputation_input) {}

 private:
  at::Tensor change(const at::Tensor& input, const std::string& /*region*/) override {
    return input.is_floating_point() ? input.to(at::kBFloat16).to(input.scalar_type())
                                     : at::Tensor();
  }
};

/// A layer is recomputed from the input of the layer after it, which ran again just before.
class WrongLayer : public SecondRunFault {
 public:
  explicit WrongLayer(int rank) : SecondRunFault(rank, fsdp::Point::recomputation_input) {}

 private:
  at::Tensor change(const at::Tensor& input, const std::string& /*region*/) override {
    auto other = std::exchange(last_, input);
    return other.defined() && other.sizes() == input.sizes() ? other : at::Tensor();
  }
  at::Tensor last_;
};

/// What is gathered for backward are the parameters of the step before: a copy that nobody threw
/// away.
class StaleParameters : public StepObserver {
 public:
  explicit StaleParameters(int rank) : rank_(rank) {}

  void observe(const fsdp::Observation& seen) override {
    if (seen.point != fsdp::Point::unsharded_parameters || !seen.in_backward) {
      return;
    }
    const std::string unit(seen.unit);
    auto now = seen.tensor.clone();
    const auto before = before_.find(unit);
    if (before != before_.end() && !before->second.equal(now)) {
      seen.tensor.copy_(before->second);
      struck(rank_, Quantity::recomputed_activation, unit);
    }
    before_.insert_or_assign(unit, std::move(now));
  }

 private:
  int rank_;
  std::map<std::string, at::Tensor> before_;
};

/// A region's gradients are there twice, once for each run of it.
class CountedTwice : public StepObserver {
 public:
  explicit CountedTwice(int /*rank*/) {}

  void observe(const fsdp::Observation& seen) override {
    if (seen.point != fsdp::Point::unreduced_gradient || seen.unit.empty()) {
      return;
    }
    seen.tensor.mul_(2);
    for (const auto& slot : *seen.slots) {
      // Every shard of it is wrong, on whichever rank.
      for (int rank = 0; rank < seen.world_size; ++rank) {
        struck(rank, Quantity::gradient, slot.name);
      }
    }
  }
};

template <typename Observer>
Fault on_one_rank(std::string name, std::string summary, std::string needs,
                  std::function<void(Scenario&)> adapt) {
  return {std::move(name), std::move(summary),
          [](const Scenario& scenario, int rank) -> std::unique_ptr<StepObserver> {
            // Where nothing is drawn, a generator in another state changes nothing.
            const bool needs_draws =
                std::is_same_v<Observer, FreshMasks> || std::is_same_v<Observer, LateState>;
            if (rank != scenario.world_size / 2 || scenario.checkpointing.layers == "none" ||
                (needs_draws && scenario.model.dropout == 0)) {
              return std::make_unique<NoFault>();
            }
            return std::make_unique<Observer>(rank);
          },
          std::move(needs), std::move(adapt)};
}

}  // namespace

std::vector<Fault> recomputation_faults() {
  const std::string regions = "--checkpointing all";
  const std::string dropout = regions + " --dropout 0.25";
  const auto with_regions = [](Scenario& scenario) { scenario.checkpointing.layers = "all"; };
  const auto with_dropout = [](Scenario& scenario) {
    scenario.checkpointing.layers = "all";
    scenario.model.dropout = 0.25;
  };
  return {
      on_one_rank<FreshMasks>("recompute_draws_new_masks",
                              "a checkpointed layer draws other dropout masks when it runs again",
                              dropout, with_dropout),
      on_one_rank<LateState>(
          "recompute_generator_offset",
          "a layer that runs again takes its random numbers from one place too late", dropout,
          with_dropout),
      on_one_rank<NarrowInput>("recompute_in_bfloat16",
                               "a layer runs again on an input that was rounded to bfloat16",
                               regions, with_regions),
      on_one_rank<WrongLayer>("recompute_wrong_layer",
                              "a layer runs again on the input of the layer after it", regions,
                              with_regions),
      on_one_rank<StaleParameters>("recompute_stale_parameters",
                                   "a layer runs again with its parameters of the step before",
                                   regions, with_regions),
      on_one_rank<CountedTwice>("recompute_counted_twice",
                                "the gradients of a layer that ran twice are counted twice",
                                regions, with_regions),
  };
}

}  // namespace shardproof
