// The sharding library by itself: hooks, placements, what a unit does to parameters and gradients.

#include <fsdp/errors.h>
#include <fsdp/exact_sum.h>
#include <fsdp/fully_shard.h>
#include <fsdp/observer.h>
#include <fsdp/process_group.h>
#include <fsdp/random.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <mutex>

namespace fsdp {
namespace {

using testing::HasSubstr;

struct PairImpl : Module<PairImpl> {
  PairImpl(std::int64_t in, std::int64_t out) {
    linear = register_module("linear", torch::nn::Linear(in, out));
  }
  torch::Tensor forward(const torch::Tensor& x) { return torch::tanh(linear(x)); }
  torch::nn::Linear linear{nullptr};
};
FSDP_MODULE(Pair);

struct NetworkImpl : Module<NetworkImpl> {
  NetworkImpl() {
    first = register_module("first", Pair(5, 7));
    second = register_module("second", Pair(7, 3));
    scale = register_parameter("scale", torch::ones({3}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return second(first(x)) * scale; }
  Pair first{nullptr};
  Pair second{nullptr};
  torch::Tensor scale;
};
FSDP_MODULE(Network);

/// The same weights on every rank and in the reference.
template <typename ModuleType>
void fill_deterministically(ModuleType& module) {
  const torch::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(11);
  for (auto& parameter : module.parameters()) {
    parameter.copy_(torch::randn(parameter.sizes(), generator));
  }
}

torch::Tensor batch_of(int rank, std::int64_t features) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + rank);
  return torch::randn({4, features}, generator);
}

/// Runs a body on each rank, with assertions that survive threads: the first failure message is
/// rethrown.
void on_ranks(int world_size, const std::function<void(RankContext&)>& body) {
  RunRanksOptions options;
  options.group.timeout = std::chrono::seconds(60);
  run_ranks(world_size, body, options);
}

class RecordingHook : public ForwardHook {
 public:
  RecordingHook(std::vector<std::string>& log, std::string name)
      : log_(log), name_(std::move(name)) {}
  void pre_forward(torch::nn::Module&, const std::vector<at::Tensor*>& inputs) override {
    log_.push_back("pre " + name_ + " " + std::to_string(inputs.size()));
  }
  void post_forward(torch::nn::Module&, const std::vector<at::Tensor*>& outputs) override {
    log_.push_back("post " + name_ + " " + std::to_string(outputs.size()));
  }
  void forward_failed(torch::nn::Module&) noexcept override { log_.push_back("failed " + name_); }

 private:
  std::vector<std::string>& log_;
  std::string name_;
};

TEST(Hooks, RunAroundACallThroughTheHolderInNestingOrder) {
  std::vector<std::string> log;
  Pair pair(2, 2);
  pair->add_forward_hook(std::make_shared<RecordingHook>(log, "a"));
  pair->add_forward_hook(std::make_shared<RecordingHook>(log, "b"));
  pair(torch::ones({1, 2}));
  EXPECT_THAT(log, testing::ElementsAre("pre a 1", "pre b 1", "post b 1", "post a 1"));
}

TEST(Hooks, RunWhenTorchSequentialCallsTheModule) {
  std::vector<std::string> log;
  Pair pair(2, 2);
  pair->add_forward_hook(std::make_shared<RecordingHook>(log, "pair"));
  auto wrapped = wrap(torch::nn::Linear(2, 3));
  wrapped->add_forward_hook(std::make_shared<RecordingHook>(log, "linear"));
  torch::nn::Sequential sequential(pair, torch::nn::ReLU(), wrapped);
  EXPECT_EQ(sequential->forward(torch::ones({1, 2})).size(1), 3);
  EXPECT_THAT(log,
              testing::ElementsAre("pre pair 1", "post pair 1", "pre linear 1", "post linear 1"));
}

TEST(Hooks, AreToldOfAForwardThatThrew) {
  std::vector<std::string> log;
  Pair pair(2, 2);
  pair->add_forward_hook(std::make_shared<RecordingHook>(log, "pair"));
  EXPECT_THROW(pair(torch::ones({1, 5})), c10::Error);
  EXPECT_THAT(log, testing::ElementsAre("pre pair 1", "failed pair"));
}

TEST(Hooks, SeeTheTensorsInsideContainers) {
  auto value = std::make_tuple(torch::ones({1}),
                               std::vector<torch::Tensor>{torch::ones({2}), torch::Tensor()},
                               std::optional<torch::Tensor>(torch::ones({3})), 4, std::string("x"),
                               std::make_pair(torch::ones({5}), 1.5));
  std::vector<std::int64_t> sizes;
  for (const auto* tensor : tensors_in(value)) {
    sizes.push_back(tensor->numel());
  }
  EXPECT_THAT(sizes, testing::ElementsAre(1, 2, 3, 5));
}

TEST(Hooks, AreNotCopiedToAClone) {
  std::vector<std::string> log;
  Pair pair(2, 2);
  pair->add_forward_hook(std::make_shared<RecordingHook>(log, "pair"));
  const PairImpl copy = *pair;
  EXPECT_TRUE(copy.forward_hooks().empty());
}

TEST(Names, LeaveTheWrapperOutAndNothingElse) {
  EXPECT_EQ(plain_name("_fsdp_wrapped_module.weight"), "weight");
  EXPECT_EQ(plain_name("a._fsdp_wrapped_module.b._fsdp_wrapped_module.weight"), "a.b.weight");
  EXPECT_EQ(plain_name("a._fsdp_wrapped_module"), "a");
  EXPECT_EQ(plain_name("my_fsdp_wrapped_module.weight"), "my_fsdp_wrapped_module.weight");
}

TEST(Placement, ShardsTileEveryParameterExactlyOnceForEveryWorldSize) {
  for (const int world_size : {1, 2, 3, 4, 5, 7, 8, 16, 64}) {
    std::mutex mutex;
    std::map<std::string, std::map<std::int64_t, std::int64_t>> runs;
    std::map<std::string, std::int64_t> whole;
    on_ranks(world_size, [&](RankContext& context) {
      Network network;
      fully_shard(network->first, {context.process_group});
      fully_shard(network, {context.process_group});
      for (const auto& placement : shard_placements(*network)) {
        const std::lock_guard lock(mutex);
        ASSERT_EQ(placement.parameter.numel(), placement.numel);
        if (placement.numel > 0) {
          ASSERT_TRUE(runs[placement.name].emplace(placement.begin, placement.numel).second)
              << placement.name;
        }
        whole[placement.name] = c10::multiply_integers(placement.sizes);
      }
    });
    EXPECT_EQ(whole.size(), 5u);
    for (const auto& [name, numel] : whole) {
      std::int64_t next = 0;
      for (const auto& [begin, length] : runs[name]) {
        EXPECT_EQ(begin, next) << name << " at world size " << world_size;
        next = begin + length;
      }
      EXPECT_EQ(next, numel) << name << " at world size " << world_size;
    }
  }
}

TEST(Placement, NamesAreThoseOfThePlainModel) {
  on_ranks(2, [](RankContext& context) {
    torch::nn::Sequential plain(wrap(torch::nn::Linear(4, 3)), torch::nn::ReLU(),
                                torch::nn::Linear(3, 2));
    const FullyShardedDataParallel model(plain, {context.process_group});
    std::vector<std::string> names;
    for (const auto& placement : model.shard_placements()) {
      names.push_back(placement.name);
    }
    EXPECT_THAT(names, testing::UnorderedElementsAre("0.weight", "0.bias", "2.weight", "2.bias"));
  });
}

TEST(FullyShard, ParametersKeepTheirIdentityAndHoldOnlyTheirShare) {
  on_ranks(4, [](RankContext& context) {
    Pair pair(16, 16);
    const auto weight = pair->linear->weight;
    fully_shard(pair, {context.process_group});
    EXPECT_TRUE(pair->linear->weight.is_same(weight));
    std::int64_t held = 0;
    for (const auto& parameter : pair->parameters()) {
      EXPECT_EQ(parameter.dim(), 1);
      held += parameter.numel();
    }
    EXPECT_LE(held, (16 * 16 + 16 + 3) / 4);
    pair(torch::ones({2, 16})).sum().backward();
    EXPECT_TRUE(pair->linear->weight.is_same(weight));
    EXPECT_EQ(weight.dim(), 1);
    EXPECT_EQ(weight.sizes(), weight.grad().sizes());
  });
}

/// Trains one step whole, on one device: the mean over the ranks of each rank's gradient, added up
/// in rank order.
std::map<std::string, torch::Tensor> mean_gradients(int world_size) {
  Network network;
  fill_deterministically(*network);
  std::map<std::string, torch::Tensor> sum;
  for (int rank = 0; rank < world_size; ++rank) {
    network->zero_grad();
    network(batch_of(rank, 5)).square().mean().backward();
    for (const auto& parameter : network->named_parameters()) {
      auto& into = sum[parameter.key()];
      into = into.defined() ? into + parameter.value().grad() : parameter.value().grad().clone();
    }
  }
  for (auto& [name, gradient] : sum) {
    gradient.div_(world_size);
  }
  return sum;
}

void expect_shards_equal(NetworkImpl& network, const std::map<std::string, torch::Tensor>& want,
                         double factor, const std::string& what) {
  for (const auto& placement : shard_placements(network)) {
    const auto part =
        want.at(placement.name).flatten().narrow(0, placement.begin, placement.numel) * factor;
    EXPECT_TRUE(torch::equal(placement.parameter.grad(), part)) << what << ": " << placement.name;
  }
}

TEST(FullyShard, GradientsAreTheMeanOverTheRanksBitForBit) {
  for (const int world_size : {1, 2, 3, 5, 8}) {
    const auto want = mean_gradients(world_size);
    on_ranks(world_size, [&](RankContext& context) {
      Network network;
      fill_deterministically(*network);
      fully_shard(network->first, {context.process_group});
      fully_shard(network, {context.process_group});
      network(batch_of(context.rank, 5)).square().mean().backward();
      expect_shards_equal(*network, want, 1, "world size " + std::to_string(world_size));
    });
  }
}

TEST(FullyShard, AUnitUsedTwiceInOneForwardSumsItsGradients) {
  const int world_size = 2;
  std::map<std::string, torch::Tensor> want;
  {
    Pair pair(4, 4);
    fill_deterministically(*pair);
    for (int rank = 0; rank < world_size; ++rank) {
      pair->zero_grad();
      pair(pair(batch_of(rank, 4))).sum().backward();
      for (const auto& parameter : pair->named_parameters()) {
        auto& into = want[parameter.key()];
        into = into.defined() ? into + parameter.value().grad() : parameter.value().grad().clone();
      }
    }
  }
  on_ranks(world_size, [&](RankContext& context) {
    torch::nn::Sequential both;
    Pair pair(4, 4);
    fill_deterministically(*pair);
    fully_shard(pair, {context.process_group});
    both->push_back(pair);
    both->push_back(pair);
    both->forward(batch_of(context.rank, 4)).sum().backward();
    for (const auto& placement : shard_placements(*pair)) {
      const auto part =
          want.at(placement.name).flatten().narrow(0, placement.begin, placement.numel) / 2;
      EXPECT_TRUE(torch::allclose(placement.parameter.grad(), part, 1e-5, 1e-6)) << placement.name;
    }
  });
}

TEST(FullyShard, TwoBranchesOfOneUnitAreBothCounted) {
  // Both uses are in backward at the same time: the unit must stay gathered until the second ends.
  const auto input = [](int rank, int branch) {
    return batch_of(10 * branch + rank, 4).requires_grad_(true);
  };
  const int world_size = 2;
  std::map<std::string, torch::Tensor> want;
  {
    Pair pair(4, 4);
    fill_deterministically(*pair);
    for (int rank = 0; rank < world_size; ++rank) {
      pair->zero_grad();
      (pair(input(rank, 0)) * pair(input(rank, 1))).sum().backward();
      for (const auto& parameter : pair->named_parameters()) {
        auto& into = want[parameter.key()];
        into = into.defined() ? into + parameter.value().grad() : parameter.value().grad().clone();
      }
    }
  }
  on_ranks(world_size, [&](RankContext& context) {
    Pair pair(4, 4);
    fill_deterministically(*pair);
    fully_shard(pair, {context.process_group});
    (pair(input(context.rank, 0)) * pair(input(context.rank, 1))).sum().backward();
    for (const auto& placement : shard_placements(*pair)) {
      const auto part =
          want.at(placement.name).flatten().narrow(0, placement.begin, placement.numel) / 2;
      EXPECT_TRUE(torch::allclose(placement.parameter.grad(), part, 1e-5, 1e-6)) << placement.name;
    }
  });
}

TEST(FullyShard, GradientsOfSeveralBackwardsAddUpUntilTheyAreZeroed) {
  const auto want = mean_gradients(3);
  on_ranks(3, [&](RankContext& context) {
    Network network;
    fill_deterministically(*network);
    fully_shard(network->second, {context.process_group});
    fully_shard(network, {context.process_group});
    for (int times = 1; times <= 3; times *= 2) {
      network(batch_of(context.rank, 5)).square().mean().backward();
      if (times == 2) {
        network(batch_of(context.rank, 5)).square().mean().backward();
        // 1 + 1 + 1: three equal addends sum to thrice the value, rounded once at the end only if
        // 2x is exact, which it is.
      }
    }
    std::map<std::string, torch::Tensor> tripled;
    for (const auto& [name, gradient] : want) {
      tripled[name] = gradient + gradient + gradient;
    }
    expect_shards_equal(*network, tripled, 1, "three backwards");
    network->zero_grad();
    network(batch_of(context.rank, 5)).square().mean().backward();
    expect_shards_equal(*network, want, 1, "after zero_grad");
  });
}

TEST(FullyShard, AForwardWithoutGradLeavesEverythingSharded) {
  on_ranks(2, [](RankContext& context) {
    Network network;
    fill_deterministically(*network);
    fully_shard(network->first, {context.process_group});
    fully_shard(network, {context.process_group});
    {
      const torch::NoGradGuard no_grad;
      network(batch_of(0, 5));
    }
    for (const auto& parameter : network->parameters()) {
      EXPECT_EQ(parameter.dim(), 1);
    }
  });
}

TEST(FullyShard, AStepAfterAFailedOneIsClean) {
  const auto want = mean_gradients(2);
  on_ranks(2, [&](RankContext& context) {
    Network network;
    fill_deterministically(*network);
    fully_shard(network->first, {context.process_group});
    fully_shard(network->second, {context.process_group});
    fully_shard(network, {context.process_group});
    EXPECT_THROW(network(batch_of(0, 6)), c10::Error);
    // Backward fails half-way, after the second unit has been reduced.
    auto output = network->first(batch_of(context.rank, 5));
    output.register_hook(
        [](const torch::Tensor&) -> torch::Tensor { throw std::runtime_error("planted"); });
    EXPECT_THROW((network->second(output) * network->scale.sum()).sum().backward(), std::exception);
  });
}

TEST(FullyShard, AnExceptionInBackwardIsForgottenByTheNextStep) {
  const auto want = mean_gradients(2);
  on_ranks(2, [&](RankContext& context) {
    Network network;
    fill_deterministically(*network);
    fully_shard(network->first, {context.process_group});
    fully_shard(network->second, {context.process_group});
    fully_shard(network, {context.process_group});
    auto input = batch_of(context.rank, 5).requires_grad_(true);
    auto poisoned = input * 1;
    poisoned.register_hook(
        [](const torch::Tensor&) -> torch::Tensor { throw std::runtime_error("planted"); });
    EXPECT_ANY_THROW(network(poisoned).square().mean().backward());
    network->zero_grad();
    network(batch_of(context.rank, 5)).square().mean().backward();
    expect_shards_equal(*network, want, 1, "the step after");
  });
}

TEST(FullyShard, PaddingIsInert) {
  // Everything that is not a parameter's element in the flat gradient is zero, however the buffer
  // was before.
  class PaddingCheck : public Observer {
   public:
    void observe(const Observation& seen) override {
      if (seen.point != Point::unreduced_gradient && seen.point != Point::unsharded_parameters) {
        return;
      }
      auto rest = seen.tensor.clone();
      for (const auto& slot : *seen.slots) {
        rest.narrow(0, slot.offset, slot.numel).zero_();
        padded += slot.offset % 16 == 0;
      }
      EXPECT_EQ(rest.abs().sum().item<double>(), 0) << to_string(seen.point) << " of " << seen.unit;
    }
    int padded = 0;
  };
  on_ranks(3, [](RankContext& context) {
    Network network;
    fill_deterministically(*network);
    fully_shard(network, {context.process_group});
    PaddingCheck check;
    const ObserverScope scope(&check);
    network(batch_of(context.rank, 5)).sum().backward();
    EXPECT_EQ(check.padded, 10);  // two points, five parameters, each starting at 64 bytes
  });
}

TEST(FullyShard, OptimizersOfLibtorchTrainTheShardsUnchanged) {
  // Parameter groups included: no weight decay on biases.
  const auto train = [](NetworkImpl& network, const std::function<void()>& backward) {
    std::vector<torch::Tensor> decayed;
    std::vector<torch::Tensor> plain;
    for (const auto& parameter : network.named_parameters()) {
      (parameter.key().find("bias") == std::string::npos ? decayed : plain)
          .push_back(parameter.value());
    }
    torch::optim::AdamW optimizer(
        {torch::optim::OptimizerParamGroup(decayed,
                                           std::make_unique<torch::optim::AdamWOptions>(
                                               torch::optim::AdamWOptions(0.1).weight_decay(0.5))),
         torch::optim::OptimizerParamGroup(plain,
                                           std::make_unique<torch::optim::AdamWOptions>(
                                               torch::optim::AdamWOptions(0.1).weight_decay(0)))},
        torch::optim::AdamWOptions(0.1));
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      backward();
      optimizer.step();
    }
  };
  Network reference;
  fill_deterministically(*reference);
  train(*reference, [&] { reference(batch_of(0, 5)).square().mean().backward(); });
  on_ranks(2, [&](RankContext& context) {
    Network network;
    fill_deterministically(*network);
    fully_shard(network->first, {context.process_group});
    fully_shard(network, {context.process_group});
    // The same data on both ranks: (g + g) / 2 is g.
    train(*network, [&] { network(batch_of(0, 5)).square().mean().backward(); });
    const auto want = reference->named_parameters();
    for (const auto& placement : shard_placements(*network)) {
      EXPECT_TRUE(torch::equal(placement.parameter, want[placement.name].flatten().narrow(
                                                        0, placement.begin, placement.numel)))
          << placement.name;
    }
  });
}

TEST(FullyShard, PlainModulesTrainThroughTheWrapper) {
  const auto make = [] {
    torch::nn::Sequential sequential(torch::nn::Linear(5, 6), torch::nn::Tanh(),
                                     torch::nn::Linear(6, 2));
    fill_deterministically(*sequential);
    return sequential;
  };
  auto reference = make();
  reference->forward(batch_of(3, 5)).sum().backward();
  on_ranks(3, [&](RankContext& context) {
    auto plain = make();
    FullyShardedDataParallel model(plain, {context.process_group});
    model(batch_of(3, 5)).sum().backward();
    const auto want = reference->named_parameters();
    for (const auto& placement : model.shard_placements()) {
      const auto part =
          want[placement.name].grad().flatten().narrow(0, placement.begin, placement.numel);
      EXPECT_TRUE(torch::allclose(placement.parameter.grad(), part, 1e-6, 1e-7)) << placement.name;
    }
    EXPECT_EQ(model->parameters().size(), 4u);
  });
}

TEST(ClipGradNorm, EqualsTheNormOfTheWholeGradientOnEveryRank) {
  for (const int world_size : {1, 2, 3, 8}) {
    const auto want = mean_gradients(world_size);
    ExactSquareSum sum;
    for (const auto& [name, gradient] : want) {
      sum.add(gradient);
    }
    const auto norm = static_cast<float>(std::sqrt(sum.value()));
    const float coefficient = std::min(1.0f, 0.01f / (norm + 1e-6f));
    on_ranks(world_size, [&](RankContext& context) {
      Network network;
      fill_deterministically(*network);
      fully_shard(network->first, {context.process_group});
      fully_shard(network, {context.process_group});
      network(batch_of(context.rank, 5)).square().mean().backward();
      EXPECT_EQ(clip_grad_norm_(*network, 0.01).item<float>(), norm) << world_size;
      expect_shards_equal(*network, want, coefficient,
                          "clipped at world size " + std::to_string(world_size));
    });
  }
}

TEST(ClipGradNorm, WithOneElementPerRankSeesThreeAndFourAsFive) {
  // The smallest case of pytorch/pytorch#72548: shards (3) and (4), limit 1; a local norm would
  // scale by 1/3 and 1/4.
  on_ranks(2, [](RankContext& context) {
    auto linear = torch::nn::Linear(torch::nn::LinearOptions(32, 1).bias(false));
    FullyShardedDataParallel model(linear, {context.process_group});
    auto input = torch::zeros({1, 32});
    input[0][0] = 3;
    input[0][16] = 4;
    model(input).sum().backward();
    EXPECT_EQ(model.clip_grad_norm_(1.0).item<float>(), 5.0f);
    const auto gradient = model->weight.grad();
    EXPECT_FLOAT_EQ(gradient.sum().item<float>(), context.rank == 0 ? 0.6f : 0.8f);
  });
}

TEST(ClipGradNorm, OtherNormsAndNonFiniteOnes) {
  on_ranks(2, [](RankContext& context) {
    auto linear = torch::nn::Linear(torch::nn::LinearOptions(32, 1).bias(false));
    FullyShardedDataParallel model(linear, {context.process_group});
    auto input = torch::zeros({1, 32});
    input[0][0] = 3;
    input[0][16] = -4;
    model(input).sum().backward();
    EXPECT_EQ(model.clip_grad_norm_(100, 1.0).item<float>(), 7.0f);
    EXPECT_EQ(model.clip_grad_norm_(100, std::numeric_limits<double>::infinity()).item<float>(),
              4.0f);
    EXPECT_NEAR(model.clip_grad_norm_(100, 3.0).item<double>(), std::cbrt(91.0), 1e-6);
    EXPECT_THROW(model.clip_grad_norm_(-1), UsageError);
    EXPECT_THROW(model.clip_grad_norm_(1, 0), UsageError);
    model->zero_grad();
    input[0][16] = std::numeric_limits<float>::infinity();
    model(input).sum().backward();
    EXPECT_THROW(model.clip_grad_norm_(1, 2.0, true), NonFiniteError);
  });
}

TEST(FullyShard, RefusesWhatItCannotShardByName) {
  const auto message = [](const std::function<void(RankContext&)>& body) {
    std::string text = "no error";
    try {
      run_ranks(1, body);
    } catch (const Error& error) {
      text = error.what();
    }
    return text;
  };
  EXPECT_THAT(message([](RankContext&) { fully_shard(Pair(2, 2), {}); }),
              HasSubstr("process_group is null"));
  EXPECT_THAT(message([](RankContext& context) {
                fully_shard(torch::nn::Linear(2, 2), {context.process_group});
              }),
              HasSubstr("has no hooks"));
  EXPECT_THAT(message([](RankContext& context) {
                Pair pair(2, 2);
                fully_shard(pair, {context.process_group});
                fully_shard(pair, {context.process_group});
              }),
              HasSubstr("is a unit already"));
  EXPECT_THAT(message([](RankContext& context) {
                Pair pair(2, 2);
                pair->linear->bias.set_data(pair->linear->bias.to(torch::kDouble));
                fully_shard(pair, {context.process_group});
              }),
              HasSubstr("'linear.bias' has dtype Double"));
  EXPECT_THAT(message([](RankContext&) { clip_grad_norm_(*Pair(2, 2), 1.0); }),
              HasSubstr("not sharded"));
}

TEST(Dropout, DrawsFromTheRanksOwnGenerator) {
  std::vector<torch::Tensor> masks(3);
  RunRanksOptions options;
  options.seed = 5;
  run_ranks(
      3,
      [&](RankContext& context) {
        Dropout dropout(0.5);
        masks[context.rank] = dropout(torch::ones({64}));
      },
      options);
  for (int rank = 0; rank < 3; ++rank) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(5 + rank);
    const auto want = torch::empty({64}).bernoulli_(0.5, generator).div_(0.5);
    EXPECT_TRUE(torch::equal(masks[rank], want)) << "rank " << rank;
  }
  EXPECT_THROW(Dropout(1.0), UsageError);
  EXPECT_THROW(Dropout(-0.1), UsageError);
}

TEST(Dropout, DoesNothingInEvalMode) {
  Dropout dropout(0.5);
  dropout->eval();
  const auto input = torch::randn({8});
  EXPECT_TRUE(dropout(input).is_same(input));
}

}  // namespace
}  // namespace fsdp
