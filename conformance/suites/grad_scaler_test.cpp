// The gradient scaler: one verdict and one scale on all ranks, whatever rank a gradient overflowed
// on, and to the bit what torch.amp.GradScaler does in one process.

#include <fsdp/errors.h>
#include <fsdp/fully_shard.h>
#include <fsdp/grad_scaler.h>
#include <fsdp/process_group.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <map>
#include <mutex>

namespace fsdp {
namespace {

using testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
const std::vector<int> kWorldSizes = {1, 2, 3, 5, 8};

/// Ranks that disagree would wait for each other: here not for long.
void on_ranks(int world_size, const std::function<void(RankContext&)>& body) {
  RunRanksOptions options;
  options.group.timeout = std::chrono::seconds(60);
  run_ranks(world_size, body, options);
}

torch::Tensor numbers(std::vector<std::int64_t> sizes, std::uint64_t seed,
                      at::ScalarType dtype = at::kFloat) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return torch::randn(sizes, generator).to(dtype);
}

bool same_bits(const torch::Tensor& a, const torch::Tensor& b) {
  const auto bits = [](const torch::Tensor& tensor) {
    return tensor.contiguous().reshape({-1}).view(at::kByte);
  };
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         torch::equal(bits(a), bits(b));
}

torch::optim::AdamWOptions adamw() {
  return torch::optim::AdamWOptions(0.05).weight_decay(0.1).eps(1e-3);
}

/// A parameter with its gradient, and the optimizer that owns it.
struct Shard {
  explicit Shard(const torch::Tensor& values)
      : parameter(values.clone().requires_grad_()), optimizer({parameter}, adamw()) {}
  void set_gradient(const torch::Tensor& gradient) { parameter.mutable_grad() = gradient.clone(); }
  /// Parameter, exponential averages, step: copies.
  std::vector<torch::Tensor> snapshot() {
    std::vector<torch::Tensor> all = {parameter.detach().clone()};
    for (auto& [key, state] : optimizer.state()) {
      auto& adam = static_cast<torch::optim::AdamWParamState&>(*state);
      all.push_back(adam.exp_avg().clone());
      all.push_back(adam.exp_avg_sq().clone());
      all.push_back(torch::tensor(adam.step()));
    }
    return all;
  }

  torch::Tensor parameter;
  torch::optim::AdamW optimizer;
};

void expect_same_bits(const std::vector<torch::Tensor>& got, const std::vector<torch::Tensor>& want,
                      const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(same_bits(got[i], want[i])) << what << ": tensor " << i;
  }
}

/// torch.amp's rules for one process, written out: what _amp_update_scale_ and GradScaler do.
struct PlainScaler {
  float scale;
  double growth_factor;
  double backoff_factor;
  int growth_interval;
  int growth_tracker = 0;

  /// Returns whether to step.
  bool unscale(torch::Tensor& gradient) const {
    const bool finite = gradient.isfinite().all().item<bool>();
    const auto factor = static_cast<float>(1.0 / static_cast<double>(scale));
    const auto wide = gradient.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    gradient = (gradient.to(wide) * torch::full({}, factor, wide)).to(gradient.scalar_type());
    return finite;
  }
  void update(bool finite) {
    if (!finite) {
      scale = static_cast<float>(scale * backoff_factor);
      growth_tracker = 0;
    } else if (++growth_tracker == growth_interval) {
      scale = static_cast<float>(scale * growth_factor);
      growth_tracker = 0;
    }
  }
};

class GradScalerAtEveryWorldSize : public testing::TestWithParam<int> {};

TEST_P(GradScalerAtEveryWorldSize, ANonFiniteGradientOnAnyOneRankSkipsTheStepOnAll) {
  const int world_size = GetParam();
  on_ranks(world_size, [&](RankContext& context) {
    for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble}) {
      Shard shard(numbers({37}, context.rank, dtype));
      shard.set_gradient(numbers({37}, 50, dtype));
      GradScaler scaler({}, context.process_group);
      scaler.scale(torch::ones({}));
      ASSERT_TRUE(scaler.step(shard.optimizer));
      scaler.update();
      float scale = 65536;
      for (int culprit = 0; culprit < world_size; ++culprit) {
        for (const float value : {kInfinity, -kInfinity, kNaN}) {
          const auto what = std::string(c10::toString(dtype)) + ", " + std::to_string(value) +
                            " on rank " + std::to_string(culprit) + ", seen on rank " +
                            std::to_string(context.rank);
          auto gradient = numbers({37}, 51, dtype);
          if (context.rank == culprit) {
            gradient[36] = value;
          }
          shard.set_gradient(gradient);
          const auto before = shard.snapshot();
          ASSERT_EQ(before.size(), 4u);
          EXPECT_FALSE(scaler.step(shard.optimizer)) << what;
          expect_same_bits(shard.snapshot(), before, what);
          scaler.update();
          EXPECT_EQ(scaler.get_scale(), scale /= 2) << what;
        }
      }
      shard.set_gradient(numbers({37}, 52, dtype));
      EXPECT_TRUE(scaler.step(shard.optimizer)) << "the verdict is not carried on";
    }
  });
}

TEST_P(GradScalerAtEveryWorldSize, FollowsTheSingleProcessAlgorithmToTheBit) {
  // Factors whose products round; overflows on ever another rank; intervals that are interrupted.
  const int world_size = GetParam();
  constexpr int kSteps = 60;
  // Of each rank's shard. What vector instructions leave over may round otherwise, in the
  // optimizer's 16-bit kernels; a multiple of 64 leaves nothing over, in the whole or in the
  // shards.
  constexpr int kLength = 64;
  const GradScalerOptions options{
      .init_scale = 3000, .growth_factor = 1.7, .backoff_factor = 0.3, .growth_interval = 4};
  for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble}) {
    const auto gradient_of_step = [&](int step) {
      auto gradient = numbers({world_size * kLength}, 1000 + step, dtype) * 100;
      if (step % 7 == 3 || step % 11 == 5) {
        gradient[(step * 31) % gradient.numel()] = step % 2 == 0 ? kInfinity : kNaN;
      }
      return gradient;
    };
    const auto start = numbers({world_size * kLength}, 7, dtype);
    std::vector<torch::Tensor> parameters;
    std::vector<float> scales;
    std::vector<bool> steps;
    Shard whole(start);
    PlainScaler plain{3000, 1.7, 0.3, 4};
    for (int step = 0; step < kSteps; ++step) {
      auto gradient = gradient_of_step(step);
      steps.push_back(plain.unscale(gradient));
      whole.set_gradient(gradient);
      if (steps.back()) {
        whole.optimizer.step();
      }
      plain.update(steps.back());
      parameters.push_back(whole.parameter.detach().clone());
      scales.push_back(plain.scale);
    }
    ASSERT_LT(scales.back(), 3000);
    ASSERT_THAT(steps, testing::AllOf(testing::Contains(true), testing::Contains(false)));
    ASSERT_TRUE(parameters.back().isfinite().all().item<bool>());

    on_ranks(world_size, [&](RankContext& context) {
      const auto mine = [&](const torch::Tensor& all) {
        return all.narrow(0, context.rank * kLength, kLength);
      };
      Shard shard(mine(start));
      GradScaler scaler(options, context.process_group);
      scaler.scale(torch::ones({}));
      for (int step = 0; step < kSteps; ++step) {
        shard.set_gradient(mine(gradient_of_step(step)));
        EXPECT_EQ(scaler.step(shard.optimizer), steps[step]) << "step " << step;
        scaler.update();
        EXPECT_EQ(scaler.get_scale(), scales[step]) << "step " << step;
        ASSERT_TRUE(same_bits(shard.parameter.detach(), mine(parameters[step])))
            << c10::toString(dtype) << ", rank " << context.rank << ", step " << step;
      }
    });
  }
}

TEST_P(GradScalerAtEveryWorldSize, ARankWithoutElementsOrGradientsFollowsTheCommonVerdict) {
  // pytorch/pytorch#99174. Rank 0 has elements and the last rank nothing, in three ways of having
  // nothing: an empty shard, no gradient, no parameter.
  const int world_size = GetParam();
  on_ranks(world_size, [&](RankContext& context) {
    for (const int way : {0, 1, 2}) {
      const bool nothing = context.rank > 0 && context.rank == world_size - 1;
      Shard shard(numbers({nothing && way == 0 ? 0 : 5}, 3));
      if (nothing && way == 2) {
        shard.optimizer.param_groups()[0].params().clear();
      }
      GradScaler scaler({}, context.process_group);
      scaler.scale(torch::ones({}));
      for (const bool overflow : {true, false, true}) {
        auto gradient = torch::ones_like(shard.parameter);
        if (overflow && context.rank == 0) {
          gradient[2] = kInfinity;
        }
        if (!nothing || way == 0) {
          shard.set_gradient(gradient);
        }
        EXPECT_EQ(scaler.step(shard.optimizer), !overflow)
            << "rank " << context.rank << ", way " << way;
        scaler.update();
      }
      EXPECT_EQ(scaler.get_scale(), 16384);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, GradScalerAtEveryWorldSize, testing::ValuesIn(kWorldSizes),
                         testing::PrintToStringParamName());

/// Runs one rank by itself, for what needs no others.
void alone(const std::function<void(const BackendPtr&)>& body) {
  on_ranks(1, [&](RankContext& context) { body(context.process_group); });
}

TEST(GradScaler, RulesOfTheTestAreThoseOfTorchsOwnKernel) {
  PlainScaler plain{3000, 1.7, 0.3, 4};
  auto scale = torch::full({}, 3000.0f);
  auto tracker = torch::zeros({}, at::kInt);
  for (int step = 0; step < 60; ++step) {
    const bool finite = step % 9 != 3;
    plain.update(finite);
    at::_amp_update_scale_(scale, tracker, torch::full({}, finite ? 0.0f : 1.0f), 1.7, 0.3, 4);
    EXPECT_EQ(plain.scale, scale.item<float>()) << step;
    EXPECT_EQ(plain.growth_tracker, tracker.item<int>()) << step;
  }
}

TEST(GradScaler, GrowsAfterExactlyTheIntervalAndNeverBeyondFloat32) {
  alone([](const BackendPtr& group) {
    Shard shard(torch::ones({3}));
    GradScaler scaler({.init_scale = 0x1p125, .growth_interval = 3}, group);
    scaler.scale(torch::ones({}));
    std::vector<float> scales;
    for (int step = 0; step < 12; ++step) {
      shard.set_gradient(torch::ones({3}));
      EXPECT_TRUE(scaler.step(shard.optimizer));
      scaler.update();
      scales.push_back(scaler.get_scale());
    }
    EXPECT_THAT(scales,
                testing::ElementsAre(0x1p125f, 0x1p125f, 0x1p126f, 0x1p126f, 0x1p126f, 0x1p127f,
                                     0x1p127f, 0x1p127f, 0x1p127f, 0x1p127f, 0x1p127f, 0x1p127f));
  });
}

TEST(GradScaler, ScalesALossInItsOwnDtypeAndItsGradientsWithIt) {
  alone([](const BackendPtr& group) {
    GradScaler scaler({.init_scale = 1024}, group);
    for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble}) {
      const auto x = torch::full({}, 3, dtype).requires_grad_();
      const auto scaled = scaler.scale(x * x);
      EXPECT_EQ(scaled.scalar_type(), dtype);
      EXPECT_EQ(scaled.item<double>(), 9216);
      scaled.backward();
      EXPECT_EQ(x.grad().item<double>(), 6144) << dtype;
    }
    const auto both =
        scaler.scale(std::vector<torch::Tensor>{torch::ones({}), torch::full({2}, 2, at::kHalf)});
    EXPECT_EQ(both[0].item<float>(), 1024);
    EXPECT_TRUE(torch::equal(both[1], torch::full({2}, 2048, at::kHalf)));
  });
}

TEST(GradScaler, AFloat16LossTimesAScaleBeyondFloat16IsRoundedOnce) {
  alone([](const BackendPtr& group) {
    GradScaler scaler({.init_scale = 131072}, group);
    const auto losses = torch::tensor({0x1p-10f, 0.25f}).to(at::kHalf);
    EXPECT_TRUE(
        torch::equal(scaler.scale(losses), torch::tensor({128.0f, 32768.0f}).to(at::kHalf)));
    EXPECT_EQ(scaler.scale(losses[0]).item<float>(), 128);
  });
}

TEST(GradScaler, ADivisionThatOverflowsIsFoundToo) {
  // A scale under 1 enlarges: 60,000 times 2 is beyond float16. torch.amp would let it pass.
  alone([](const BackendPtr& group) {
    Shard shard(torch::ones({2}, at::kHalf));
    GradScaler scaler({.init_scale = 0.5}, group);
    scaler.scale(torch::ones({}));
    shard.set_gradient(torch::tensor({1.0f, 60000.0f}).to(at::kHalf));
    EXPECT_FALSE(scaler.step(shard.optimizer));
  });
}

TEST(GradScaler, EachOptimizerHasItsOwnVerdictAndTheScaleFollowsTheWorst) {
  on_ranks(3, [](RankContext& context) {
    Shard first(torch::ones({4}));
    Shard second(torch::ones({4}, at::kHalf));
    GradScaler scaler({}, context.process_group);
    scaler.scale(torch::ones({}));
    first.set_gradient(torch::ones({4}));
    second.set_gradient(torch::full({4}, context.rank == 1 ? kNaN : 1.0f, at::kHalf));
    EXPECT_TRUE(scaler.step(first.optimizer));
    EXPECT_FALSE(scaler.step(second.optimizer));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 32768);
  });
}

TEST(GradScaler, OneOptimizerMayOwnGradientsOfSeveralDtypes) {
  on_ranks(2, [](RankContext& context) {
    std::vector<torch::Tensor> parameters;
    for (const auto dtype : {at::kHalf, at::kFloat, at::kDouble, at::kHalf}) {
      parameters.push_back(torch::zeros({2}, dtype).requires_grad_());
      parameters.back().mutable_grad() = torch::full({2}, 512, dtype);
    }
    torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(1));
    GradScaler scaler({.init_scale = 256}, context.process_group);
    scaler.scale(torch::ones({}));
    EXPECT_TRUE(scaler.step(optimizer));
    for (const auto& parameter : parameters) {
      EXPECT_TRUE(torch::equal(parameter, torch::full_like(parameter, -2)));
    }
    scaler.update();
    for (const auto& culprit : parameters) {
      for (auto& parameter : parameters) {
        parameter.mutable_grad().fill_(1);
      }
      culprit.mutable_grad()[1] = context.rank == 1 ? kInfinity : 1.0f;
      EXPECT_FALSE(scaler.step(optimizer)) << culprit.scalar_type();
      scaler.update();
    }
  });
}

/// A group that counts, and passes all-reduces on.
class CountingGroup : public c10d::Backend {
 public:
  explicit CountingGroup(BackendPtr inner)
      : c10d::Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    EXPECT_EQ(options.reduceOp, c10d::ReduceOp::MAX);
    ++calls;
    return inner_->allreduce(tensors, options);
  }
  int calls = 0;

 private:
  BackendPtr inner_;
};

TEST(GradScaler, SpeaksToTheOthersOnceForAStepAndOnlyInTheGivenGroup) {
  on_ranks(2, [](RankContext& context) {
    const auto group = c10::make_intrusive<CountingGroup>(context.process_group);
    Shard shard(torch::ones({4}));
    shard.set_gradient(torch::ones({4}));
    GradScaler scaler({}, group);
    scaler.scale(torch::ones({}));
    EXPECT_EQ(group->calls, 0);
    scaler.unscale_(shard.optimizer);
    EXPECT_EQ(group->calls, 1);
    scaler.step(shard.optimizer);
    scaler.update();
    EXPECT_EQ(group->calls, 1);
  });
}

TEST(GradScaler, GoesOnFromItsStateAsIfNothingHadHappened) {
  alone([](const BackendPtr& group) {
    const auto steps = [](GradScaler& scaler, Shard& shard, int from, int to) {
      std::vector<float> scales;
      for (int step = from; step < to; ++step) {
        scaler.scale(torch::ones({}));
        shard.set_gradient(torch::full({2}, step % 5 == 1 ? kInfinity : 1.0f));
        scaler.step(shard.optimizer);
        scaler.update();
        scales.push_back(scaler.get_scale());
      }
      return scales;
    };
    const GradScalerOptions options{.init_scale = 100, .growth_factor = 3, .growth_interval = 2};
    Shard shard(torch::ones({2}));
    GradScaler unbroken(options, group);
    steps(unbroken, shard, 0, 5);
    const auto state = unbroken.state_dict();
    ASSERT_EQ(state.growth_tracker, 1) << "in the middle of an interval";
    GradScaler resumed({}, group);
    resumed.load_state_dict(state);
    EXPECT_EQ(resumed.get_scale(), unbroken.get_scale());
    EXPECT_EQ(steps(resumed, shard, 5, 20), steps(unbroken, shard, 5, 20));
  });
}

TEST(GradScaler, DisabledItLeavesEverythingAlone) {
  Shard shard(torch::ones({2}));
  GradScaler scaler({.enabled = false}, nullptr);
  const auto loss = torch::ones({});
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  shard.set_gradient(torch::full({2}, 4.0f));
  scaler.unscale_(shard.optimizer);
  scaler.unscale_(shard.optimizer);
  EXPECT_EQ(shard.parameter.grad()[0].item<float>(), 4);
  EXPECT_TRUE(scaler.step(shard.optimizer));
  EXPECT_NE(shard.parameter[0].item<float>(), 1);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 1);
  EXPECT_FALSE(scaler.state_dict().enabled);
}

// ---- Misuse ----

template <typename ErrorType>
std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const ErrorType& error) {
    return error.what();
  }
  return "no such error";
}

TEST(GradScaler, MisuseIsRefusedWithItsCure) {
  alone([](const BackendPtr& group) {
    Shard shard(torch::ones({2}));
    GradScaler scaler({}, group);
    const auto refused = [](const std::function<void()>& action) {
      return message_of<UsageError>(action);
    };
    const auto unscale = [&] { scaler.unscale_(shard.optimizer); };
    const auto step = [&] { scaler.step(shard.optimizer); };
    const auto update = [&] { scaler.update(); };
    shard.set_gradient(torch::full({2}, 65536.0f));
    EXPECT_THAT(refused(unscale), HasSubstr("scaler.scale(loss).backward() before"));
    EXPECT_THAT(refused(step), HasSubstr("rank 0: GradScaler: no loss has been scaled"));
    EXPECT_THAT(refused(update), HasSubstr("step(optimizer) first"));
    scaler.scale(torch::ones({}));
    unscale();
    EXPECT_THAT(refused(unscale), HasSubstr("unscale_() is called after unscale_()"));
    EXPECT_EQ(shard.parameter.grad()[0].item<float>(), 1) << "a refused call changes nothing";
    step();
    EXPECT_THAT(refused(unscale), HasSubstr("unscale_() is called after step()"));
    EXPECT_THAT(refused(step), HasSubstr("a second time"));
    update();
    EXPECT_THAT(refused(update), HasSubstr("step(optimizer) first"));
    EXPECT_THAT(refused([&] { scaler.scale(torch::ones({}, at::kLong)); }), HasSubstr("Long"));
    EXPECT_THAT(refused([&] { scaler.scale(torch::Tensor()); }), HasSubstr("undefined"));
    for (const double scale : {0.0, -1.0, 1e39, 1e-39, std::nan("")}) {
      EXPECT_THAT(refused([&] { scaler.update(scale); }), HasSubstr("new_scale is")) << scale;
    }
    EXPECT_EQ(scaler.get_scale(), 65536);
    scaler.update(512.0);
    EXPECT_EQ(scaler.get_scale(), 512);
  });
}

TEST(GradScaler, AnUnfitOptionOrStateIsRefusedByName) {
  alone([](const BackendPtr& group) {
    const auto refused = [&](GradScalerOptions options) {
      return message_of<UsageError>([&] { GradScaler(options, group); });
    };
    EXPECT_THAT(refused({.init_scale = 0}), HasSubstr("init_scale is 0"));
    EXPECT_THAT(refused({.growth_factor = 1}), HasSubstr("growth_factor is 1"));
    EXPECT_THAT(refused({.backoff_factor = 1}), HasSubstr("backoff_factor is 1"));
    EXPECT_THAT(refused({.growth_interval = 0}), HasSubstr("growth_interval is 0"));
    EXPECT_THAT(message_of<UsageError>([] { GradScaler({}, nullptr); }),
                HasSubstr("process_group is null"));
    GradScaler scaler({}, group);
    const auto unfit = [&](const GradScalerState& state) {
      return message_of<UsageError>([&] { scaler.load_state_dict(state); });
    };
    EXPECT_THAT(unfit({.enabled = false}), HasSubstr("was not enabled"));
    EXPECT_THAT(unfit({.scale = kNaN}), HasSubstr("scale is nan"));
    EXPECT_THAT(unfit({.growth_tracker = 2000}), HasSubstr("growth_tracker"));
    EXPECT_EQ(scaler.get_scale(), 65536);
  });
}

TEST(GradScaler, SparseGradientsAreRefused) {
  alone([](const BackendPtr& group) {
    Shard shard(torch::ones({2}));
    shard.parameter.mutable_grad() = torch::ones({2}).to_sparse();
    GradScaler scaler({}, group);
    scaler.scale(torch::ones({}));
    EXPECT_THAT(message_of<UsageError>([&] { scaler.unscale_(shard.optimizer); }),
                HasSubstr("wanted: dense"));
  });
}

TEST(GradScaler, RanksWithDifferentScalesAreToldSoOnEveryRank) {
  std::vector<std::string> messages(3);
  on_ranks(3, [&](RankContext& context) {
    Shard shard(torch::ones({2}));
    shard.set_gradient(torch::ones({2}));
    GradScaler scaler({.init_scale = context.rank == 1 ? 32768.0 : 65536.0}, context.process_group);
    scaler.scale(torch::ones({}));
    messages[context.rank] = message_of<MismatchError>([&] { scaler.step(shard.optimizer); });
  });
  for (const auto& message : messages) {
    EXPECT_THAT(message, HasSubstr("between 32768 and 65536 over the 3 ranks"));
  }
}

// ---- With a sharded model: the faults that users met ----

struct LayerImpl : Module<LayerImpl> {
  LayerImpl(int in, int out) { linear = register_module("linear", torch::nn::Linear(in, out)); }
  torch::Tensor forward(const torch::Tensor& x) { return torch::tanh(linear(x)); }
  torch::nn::Linear linear{nullptr};
};
FSDP_MODULE(Layer);

struct NetImpl : Module<NetImpl> {
  NetImpl() {
    first = register_module("first", Layer(6, 40));
    last = register_module("last", torch::nn::Linear(40, 3));
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(first(x)); }
  Layer first{nullptr};
  torch::nn::Linear last{nullptr};
};
FSDP_MODULE(Net);

Net sharded_net(RankContext& context, at::ScalarType dtype) {
  Net net;
  const torch::NoGradGuard no_grad;
  for (auto& parameter : net->named_parameters()) {
    parameter.value().copy_(numbers(parameter.value().sizes().vec(), parameter.key().size()) / 4);
  }
  net->to(dtype);
  fully_shard(net->first, {context.process_group});
  fully_shard(net, {context.process_group});
  return net;
}

torch::Tensor loss_of(Net& net, int step, int rank, at::ScalarType dtype) {
  return net(numbers({4, 6}, 100 * step + rank, dtype)).to(at::kFloat).square().mean();
}

/// The last gradient element that this rank holds.
void overflow_own_shard(NetImpl& net) {
  for (auto& placement : shard_placements(net)) {
    if (placement.numel > 0) {
      const torch::NoGradGuard no_grad;
      placement.parameter.mutable_grad()[-1] = kInfinity;
      return;
    }
  }
  FAIL() << "the rank holds nothing";
}

/// Joins what every rank holds to whole parameters, by name.
class Collected {
 public:
  void add(NetImpl& net) {
    const std::lock_guard lock(mutex_);
    for (const auto& placement : shard_placements(net)) {
      auto& whole = whole_[placement.name];
      if (!whole.defined()) {
        whole = torch::full({c10::multiply_integers(placement.sizes)}, kNaN,
                            placement.parameter.scalar_type());
      }
      whole.narrow(0, placement.begin, placement.numel).copy_(placement.parameter.detach());
    }
  }
  const std::map<std::string, torch::Tensor>& whole() const { return whole_; }

 private:
  std::mutex mutex_;
  std::map<std::string, torch::Tensor> whole_;
};

void expect_equal(const Collected& got, const Collected& want, const std::string& what) {
  ASSERT_EQ(got.whole().size(), 4u);
  for (const auto& [name, value] : want.whole()) {
    EXPECT_TRUE(value.isfinite().all().item<bool>()) << what << ": " << name;
    EXPECT_TRUE(same_bits(got.whole().at(name), value)) << what << ": " << name;
  }
}

TEST(GradScalerWithSharding, AndClippingIsTrainingWithoutAScalerMinusTheSkippedSteps) {
  // A power of two scales without rounding, so with float32 the two runs must be equal to the bit;
  // the norms too, which shows that clipping saw unscaled gradients.
  constexpr int kSteps = 6;
  constexpr int kSkipped = 2;
  for (const int world_size : {2, 3}) {
    for (int culprit = 0; culprit < world_size; ++culprit) {
      Collected plain;
      Collected scaled;
      std::map<int, float> norms;
      on_ranks(world_size, [&](RankContext& context) {
        auto net = sharded_net(context, at::kFloat);
        torch::optim::AdamW optimizer(net->parameters(), adamw());
        for (int step = 0; step < kSteps; ++step) {
          if (step == kSkipped) {
            continue;
          }
          optimizer.zero_grad();
          loss_of(net, step, context.rank, at::kFloat).backward();
          const auto norm = clip_grad_norm_(*net, 0.05).item<float>();
          optimizer.step();
          if (context.rank == 0) {
            norms[step] = norm;
          }
        }
        plain.add(*net);
      });
      on_ranks(world_size, [&](RankContext& context) {
        auto net = sharded_net(context, at::kFloat);
        torch::optim::AdamW optimizer(net->parameters(), adamw());
        GradScaler scaler({.init_scale = 1024}, context.process_group);
        for (int step = 0; step < kSteps; ++step) {
          optimizer.zero_grad();
          scaler.scale(loss_of(net, step, context.rank, at::kFloat)).backward();
          if (step == kSkipped && context.rank == culprit) {
            overflow_own_shard(*net);
          }
          scaler.unscale_(optimizer);
          const auto norm = clip_grad_norm_(*net, 0.05).item<float>();
          EXPECT_EQ(scaler.step(optimizer), step != kSkipped);
          if (step == kSkipped) {
            EXPECT_FALSE(std::isfinite(norm)) << norm;
          } else {
            EXPECT_EQ(norm, norms.at(step)) << "step " << step;
          }
          scaler.update();
          EXPECT_EQ(scaler.get_scale(), step < kSkipped ? 1024 : 512);
        }
        scaled.add(*net);
      });
      expect_equal(scaled, plain,
                   "W = " + std::to_string(world_size) + ", rank " + std::to_string(culprit));
    }
  }
}

TEST(GradScalerWithSharding, AnOverflowOfRank0IsSeenByAllAtEachStepItHappens) {
  // pytorch/pytorch#115710, as far as CPUs can show it: infinity in rank 0's gradient at steps 0
  // and 2, here from its loss, so that it goes through the reduction.
  on_ranks(2, [](RankContext& context) {
    auto net = sharded_net(context, at::kFloat);
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
    GradScaler scaler({.init_scale = 64, .growth_interval = 2}, context.process_group);
    std::vector<float> scales;
    std::vector<bool> stepped;
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      auto loss = loss_of(net, step, context.rank, at::kFloat);
      if (context.rank == 0 && (step == 0 || step == 2)) {
        loss = loss * kInfinity;
      }
      scaler.scale(loss).backward();
      stepped.push_back(scaler.step(optimizer));
      scaler.update();
      scales.push_back(scaler.get_scale());
    }
    EXPECT_THAT(stepped, testing::ElementsAre(false, true, false, true, true));
    EXPECT_THAT(scales, testing::ElementsAre(32, 32, 16, 16, 32));
  });
}

TEST(GradScalerWithSharding, Float16ShardThatOverflowsOnOneRankKeepsAllRanksTogether) {
  // facebookresearch/fairscale#180: some ranks stepped and others did not, and the next collective
  // never matched. After the skipped step training goes on, to the weights of a run without it.
  for (int culprit = 0; culprit < 2; ++culprit) {
    std::array<Collected, 2> runs;
    for (const bool overflow : {false, true}) {
      on_ranks(2, [&](RankContext& context) {
        auto net = sharded_net(context, at::kHalf);
        torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.5));
        GradScaler scaler({.init_scale = overflow ? 256.0 : 128.0}, context.process_group);
        for (int step = overflow ? -1 : 0; step < 3; ++step) {
          optimizer.zero_grad();
          scaler.scale(loss_of(net, std::max(step, 0), context.rank, at::kHalf)).backward();
          if (step == -1 && context.rank == culprit) {
            overflow_own_shard(*net);
          }
          EXPECT_EQ(scaler.step(optimizer), step != -1);
          scaler.update();
        }
        EXPECT_EQ(scaler.get_scale(), 128);
        runs[overflow].add(*net);
      });
    }
    expect_equal(runs[1], runs[0], "overflow on rank " + std::to_string(culprit));
  }
}

TEST(GradScalerWithSharding, ALossThatIsNaNOnOneRankStopsAllAndItsNormIsNotZero) {
  // NVIDIA-NeMo/Automodel#1527: a NaN loss was reported beside a norm of 0.0, and the run went on.
  std::mutex mutex;
  std::vector<int> ended;
  on_ranks(2, [&](RankContext& context) {
    auto net = sharded_net(context, at::kFloat);
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
    GradScaler scaler({.init_scale = 4, .backoff_factor = 1e-6}, context.process_group);
    int step = 0;
    const auto message = message_of<NonFiniteError>([&] {
      for (;; ++step) {
        ASSERT_LT(step, 50);
        optimizer.zero_grad();
        auto loss = loss_of(net, 0, context.rank, at::kFloat);
        scaler.scale(context.rank == 1 ? loss * kNaN : loss).backward();
        scaler.unscale_(optimizer);
        EXPECT_TRUE(std::isnan(clip_grad_norm_(*net, 1.0).item<float>()));
        EXPECT_FALSE(scaler.step(optimizer));
        scaler.update();
      }
    });
    EXPECT_THAT(message, HasSubstr("Look for a loss"));
    const std::lock_guard lock(mutex);
    ended.push_back(step);
  });
  // 4, 4e-6, ..., 4e-36, and the next is too small.
  EXPECT_THAT(ended, testing::ElementsAre(6, 6));
}

TEST(GradScalerWithSharding, RanksThatOwnNoElementOfAModelOfTwoWeightsTakePart) {
  // pytorch/pytorch#99174: four ranks, one Linear(1, 2), two steps.
  for (const auto dtype : {at::kFloat, at::kHalf}) {
    on_ranks(4, [&](RankContext& context) {
      torch::nn::Linear linear(torch::nn::LinearOptions(1, 2).bias(false));
      linear->to(dtype);
      FullyShardedDataParallel model(linear, {context.process_group});
      torch::optim::AdamW optimizer(model->parameters(), adamw());
      GradScaler scaler({.init_scale = 16}, context.process_group);
      for (const bool overflow : {true, false}) {
        optimizer.zero_grad();
        const auto input = torch::full({1, 1}, overflow ? kInfinity : 1.0f, dtype);
        scaler.scale(model(input).to(at::kFloat).sum()).backward();
        scaler.unscale_(optimizer);
        model.clip_grad_norm_(1.0);
        EXPECT_EQ(scaler.step(optimizer), !overflow) << "rank " << context.rank;
        scaler.update();
        EXPECT_EQ(scaler.get_scale(), 8);
      }
    });
  }
}

}  // namespace
}  // namespace fsdp
