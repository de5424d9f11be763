// What the sharding library offers beyond plain full sharding, feature by feature, against values
// that are worked out here. (equivalence_test and covering_test hold whole training runs to the
// reference.)

#include <fsdp/errors.h>
#include <fsdp/fully_shard.h>
#include <fsdp/observer.h>
#include <fsdp/process_group.h>
#include <fsdp/recording.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <map>
#include <mutex>

namespace fsdp {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using torch::Tensor;

struct LayerImpl : Module<LayerImpl> {
  LayerImpl(std::int64_t in, std::int64_t out)
      : linear(register_module("linear", torch::nn::Linear(in, out))) {}
  Tensor forward(const Tensor& x) { return torch::tanh(linear(x)); }
  torch::nn::Linear linear;
};
FSDP_MODULE(Layer);

struct NetworkImpl : Module<NetworkImpl> {
  NetworkImpl()
      : first(register_module("first", Layer(5, 7))),
        second(register_module("second", Layer(7, 6))),
        third(register_module("third", Layer(6, 3))),
        scale(register_parameter("scale", torch::ones({3}))) {}
  Tensor forward(const Tensor& x) { return third(second(first(x))) * scale; }
  Layer first;
  Layer second;
  Layer third;
  Tensor scale;
};
FSDP_MODULE(Network);

template <typename ModuleType>
void fill(ModuleType& module, std::uint64_t seed = 11) {
  const torch::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  for (auto& parameter : module.parameters()) {
    parameter.copy_(torch::randn(parameter.sizes(), generator));
  }
}

Tensor batch(int rank, int micro_batch = 0, std::int64_t features = 5) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + rank + 1000 * micro_batch);
  return torch::randn({4, features}, generator);
}

Tensor loss_of(Network& network, int rank, int micro_batch = 0) {
  return network(batch(rank, micro_batch)).square().mean();
}

void on_ranks(int world_size, const std::function<void(RankContext&)>& body) {
  RunRanksOptions options;
  options.group.timeout = std::chrono::seconds(60);
  run_ranks(world_size, body, options);
}

std::string message_of(int world_size, const std::function<void(RankContext&)>& body) {
  try {
    on_ranks(world_size, body);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

void shard_layers(Network& network, const FullyShardOptions& options) {
  fully_shard(network->first, options);
  fully_shard(network->second, options);
  fully_shard(network->third, options);
  fully_shard(network, options);
}

/// A filled network, each of its layers and the rest a unit.
Network sharded_network(const RankContext& context, ShardingStrategy strategy) {
  Network network;
  fill(*network);
  FullyShardOptions options{context.process_group};
  options.strategy = strategy;
  shard_layers(network, options);
  return network;
}

using Gradients = std::map<std::string, Tensor>;

/// One rank's whole gradients by name, of the sum of its micro-batches' losses.
Gradients gradients_of_rank(int rank, int micro_batches = 1) {
  Network network;
  fill(*network);
  for (int m = 0; m < micro_batches; ++m) {
    loss_of(network, rank, m).backward();
  }
  Gradients gradients;
  for (const auto& parameter : network->named_parameters()) {
    gradients[parameter.key()] = parameter.value().grad();
  }
  return gradients;
}

/// The mean over replicas x shards: sums along a row first, then over the rows, then divided.
Gradients mean_over(int replicas, int shards, int micro_batches = 1, double divide = 0) {
  Gradients total;
  for (int i = 0; i < replicas; ++i) {
    Gradients row;
    for (int j = 0; j < shards; ++j) {
      for (const auto& [name, gradient] : gradients_of_rank(i * shards + j, micro_batches)) {
        row[name] = j == 0 ? gradient : row[name] + gradient;
      }
    }
    for (const auto& [name, sum] : row) {
      total[name] = i == 0 ? sum : total[name] + sum;
    }
  }
  for (auto& [name, sum] : total) {
    sum = sum / (divide > 0 ? divide : replicas * shards);
  }
  return total;
}

void expect_gradients(torch::nn::Module& module, const Gradients& want, const std::string& what) {
  std::size_t seen = 0;
  for (const auto& placement : shard_placements(module)) {
    ASSERT_TRUE(placement.parameter.grad().defined()) << what << ": " << placement.name;
    const auto part = want.at(placement.name).flatten().narrow(0, placement.begin, placement.numel);
    EXPECT_TRUE(torch::equal(placement.parameter.grad(), part)) << what << ": " << placement.name;
    ++seen;
  }
  EXPECT_EQ(seen, want.size()) << what;
}

FullyShardOptions hybrid(const RankContext& context, int replicas) {
  FullyShardOptions options;
  options.strategy = ShardingStrategy::hybrid_shard;
  options.mesh = make_device_mesh(context.process_group, replicas);
  return options;
}

// ---- Meshes
// ---------------------------------------------------------------------------------------

TEST(Mesh, GroupsAreRowsOfShardsAndColumnsOfReplicas) {
  on_ranks(6, [](RankContext& context) {
    const auto mesh = make_device_mesh(context.process_group, 2);
    EXPECT_EQ(mesh.shard->getSize(), 3);
    EXPECT_EQ(mesh.shard->getRank(), context.rank % 3);
    EXPECT_EQ(mesh.replicate->getSize(), 2);
    EXPECT_EQ(mesh.replicate->getRank(), context.rank / 3);
    auto row = torch::zeros({3});
    auto own = torch::full({1}, static_cast<float>(context.rank));
    mesh.shard->_allgather_base(row, own)->wait();
    EXPECT_EQ(row[0].item<int>(), context.rank / 3 * 3);
    EXPECT_EQ(row[2].item<int>(), context.rank / 3 * 3 + 2);
    std::vector<Tensor> sum = {own.clone()};
    mesh.replicate->allreduce(sum)->wait();
    EXPECT_EQ(sum[0].item<int>(), 2 * (context.rank % 3) + 3);
  });
}

TEST(Mesh, AnAxisOfOneIsAGroupOfOneAndTheOtherIsTheWorld) {
  on_ranks(3, [](RankContext& context) {
    const auto wide = make_device_mesh(context.process_group, 1);
    EXPECT_EQ(wide.shard.get(), context.process_group.get());
    EXPECT_EQ(wide.replicate->getSize(), 1);
    const auto tall = make_device_mesh(context.process_group, 3);
    EXPECT_EQ(tall.replicate.get(), context.process_group.get());
    EXPECT_EQ(tall.shard->getSize(), 1);
  });
}

TEST(Mesh, RefusesWhatDoesNotDivide) {
  EXPECT_THAT(message_of(4, [](RankContext& c) { make_device_mesh(c.process_group, 3); }),
              HasSubstr("3 replicas of 4 ranks"));
  EXPECT_THAT(message_of(2, [](RankContext& c) { make_device_mesh(c.process_group, 0); }),
              HasSubstr("0 replicas of 2 ranks"));
  EXPECT_THROW(make_device_mesh(nullptr, 1), UsageError);
  EXPECT_THAT(message_of(2, [](RankContext& c) { split_group(c.process_group, {1 - c.rank}); }),
              HasSubstr("leaves this rank out"));
  EXPECT_THAT(message_of(2,
                         [](RankContext& c) {
                           c.process_group->split(nullptr, {0, 7}, nullptr);
                         }),
              HasSubstr("wanted: different ranks in [0, 2)"));
}

TEST(Mesh, ARankThatLeavesEndsThoseWhoWaitInASplitOffGroup) {
  const auto started = std::chrono::steady_clock::now();
  EXPECT_ANY_THROW(on_ranks(4, [](RankContext& context) {
    const auto mesh = make_device_mesh(context.process_group, 2);
    if (context.rank == 3) {
      throw std::runtime_error("planted");
    }
    auto out = torch::zeros({2});
    auto in = torch::ones({1});
    mesh.shard->_allgather_base(out, in)->wait();
  }));
  EXPECT_LT(std::chrono::steady_clock::now() - started, std::chrono::seconds(30));
}

TEST(Mesh, ARankThatLeftBeforeTheSplitHasLeftThePartToo) {
  const auto started = std::chrono::steady_clock::now();
  EXPECT_ANY_THROW(on_ranks(2, [](RankContext& context) {
    if (context.rank == 1) {
      throw std::runtime_error("planted");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const auto part = split_group(context.process_group, {1, 0});
    std::vector<Tensor> tensors = {torch::ones({1})};
    part->allreduce(tensors)->wait();
  }));
  EXPECT_LT(std::chrono::steady_clock::now() - started, std::chrono::seconds(30));
}

// ---- Strategies
// -------------------------------------------------------------------------------------

struct Shape {
  int replicas;
  int shards;
};

class EachShape : public testing::TestWithParam<Shape> {};
INSTANTIATE_TEST_SUITE_P(Strategies, EachShape,
                         testing::Values(Shape{1, 1}, Shape{1, 2}, Shape{2, 1}, Shape{1, 3},
                                         Shape{2, 2}, Shape{4, 1}, Shape{1, 4}, Shape{2, 4},
                                         Shape{4, 2}, Shape{5, 1}, Shape{1, 5}),
                         [](const auto& info) {
                           return std::to_string(info.param.replicas) + "x" +
                                  std::to_string(info.param.shards);
                         });

TEST_P(EachShape, HybridGradientsAreTheMeanOverAllRanksOnEveryRank) {
  const auto [replicas, shards] = GetParam();
  const auto want = mean_over(replicas, shards);
  for (const auto strategy :
       {ShardingStrategy::hybrid_shard, ShardingStrategy::hybrid_shard_zero2}) {
    on_ranks(replicas * shards, [&, replicas = replicas](RankContext& context) {
      Network network;
      fill(*network);
      auto options = hybrid(context, replicas);
      options.strategy = strategy;
      shard_layers(network, options);
      loss_of(network, context.rank).backward();
      expect_gradients(*network, want, std::string(to_string(strategy)));
    });
  }
}

TEST_P(EachShape, WithoutSyncThenWithItGivesTheGradientOfAllMicroBatches) {
  const auto [replicas, shards] = GetParam();
  const auto want = mean_over(replicas, shards, 3);
  on_ranks(replicas * shards, [&, replicas = replicas](RankContext& context) {
    Network network;
    fill(*network);
    shard_layers(network, hybrid(context, replicas));
    for (int step = 0; step < 2; ++step) {  // at the first AND later steps
      {
        const NoSync no_sync(*network);
        loss_of(network, context.rank, 0).backward();
        loss_of(network, context.rank, 1).backward();
        for (const auto& parameter : network->parameters()) {
          EXPECT_FALSE(parameter.grad().defined());
        }
      }
      loss_of(network, context.rank, 2).backward();
      expect_gradients(*network, want, "step " + std::to_string(step));
      network->zero_grad();
    }
  });
}

TEST_P(EachShape, PuttingOffTheReplicasAddsEarlierMicroBatchesFirst) {
  // pytorch/pytorch#125484: earlier micro-batches must cross the replicas too.
  const auto [replicas, shards] = GetParam();
  Gradients want;
  for (int i = 0; i < replicas; ++i) {
    Gradients row;
    for (int m = 0; m < 2; ++m) {
      Gradients sum;
      for (int j = 0; j < shards; ++j) {
        Network network;
        fill(*network);
        loss_of(network, i * shards + j, m).backward();
        for (const auto& parameter : network->named_parameters()) {
          auto& into = sum[parameter.key()];
          into = j == 0 ? parameter.value().grad() : into + parameter.value().grad();
        }
      }
      for (const auto& [name, gradient] : sum) {
        row[name] = m == 0 ? gradient : gradient + row[name];
      }
    }
    for (const auto& [name, gradient] : row) {
      want[name] = i == 0 ? gradient : want[name] + gradient;
    }
  }
  for (auto& [name, gradient] : want) {
    gradient = gradient / (replicas * shards);
  }
  on_ranks(replicas * shards, [&, replicas = replicas](RankContext& context) {
    Network network;
    fill(*network);
    shard_layers(network, hybrid(context, replicas));
    set_requires_all_reduce(*network, replicas == 1);
    loss_of(network, context.rank, 0).backward();
    set_requires_all_reduce(*network, true);
    loss_of(network, context.rank, 1).backward();
    if (replicas > 1) {
      expect_gradients(*network, want, "put off");
    }
  });
}

TEST(Strategies, NoShardAndShardGradOpEqualFullShard) {
  const auto want = mean_over(1, 4);
  for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op,
                              ShardingStrategy::no_shard}) {
    on_ranks(4, [&](RankContext& context) {
      auto network = sharded_network(context, strategy);
      loss_of(network, context.rank).backward();
      expect_gradients(*network, want, std::string(to_string(strategy)));
    });
  }
}

TEST(Strategies, TheModeThatWasAskedForIsTheModeThatIsShown) {
  // A mode that is silently replaced for groups of one: pytorch/pytorch#90050,
  // verl-project/verl#7493.
  for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op,
                              ShardingStrategy::no_shard}) {
    on_ranks(1, [&](RankContext& context) {
      Network network;
      FullyShardOptions options{context.process_group};
      options.strategy = strategy;
      shard_layers(network, options);
      for (const auto& unit : describe_units(*network)) {
        EXPECT_EQ(unit.strategy, strategy);
      }
    });
  }
}

TEST(Strategies, ContradictingOptionsAreRefused) {
  const auto refuse = [](const std::function<void(FullyShardOptions&, RankContext&)>& change) {
    return message_of(2, [&](RankContext& context) {
      FullyShardOptions options{context.process_group};
      change(options, context);
      fully_shard(Layer(2, 2), options);
    });
  };
  EXPECT_THAT(refuse([](auto& o, auto&) { o.strategy = ShardingStrategy::hybrid_shard; }),
              HasSubstr("hybrid_shard without options.mesh"));
  EXPECT_THAT(refuse([](auto& o, auto& c) { o.mesh = make_device_mesh(c.process_group, 1); }),
              HasSubstr("options.mesh with strategy full_shard"));
  EXPECT_THAT(refuse([](auto& o, auto&) { o.reshard_after_forward = 3; }),
              HasSubstr("reshard_after_forward is 3"));
  EXPECT_THAT(refuse([](auto& o, auto&) { o.mixed_precision.param_dtype = at::kInt; }),
              HasSubstr("mixed_precision.param_dtype is Int"));
  EXPECT_THAT(refuse([](auto& o, auto&) { o.forward_prefetch = -1; }),
              HasSubstr("forward_prefetch is -1"));
  EXPECT_THAT(refuse([](auto& o, auto&) { o.gradient_predivide_factor = 0.0; }),
              HasSubstr("gradient_predivide_factor is 0"));
}

// ---- Division and dtypes of the reduction
// -----------------------------------------------------------

TEST(Division, ACustomFactorMeansTheSameOnEveryMeshAndAtWorldSizeOne) {
  // pytorch/pytorch#155903 (mesh shapes), pytorch/pytorch#167178 (groups of one).
  for (const auto& shape : {Shape{1, 4}, Shape{2, 2}, Shape{4, 1}, Shape{1, 1}}) {
    const auto want = mean_over(shape.replicas, shape.shards, 1, 300);
    on_ranks(shape.replicas * shape.shards, [&](RankContext& context) {
      Network network;
      fill(*network);
      shard_layers(network, hybrid(context, shape.replicas));
      set_gradient_divide_factor(*network, 300);
      loss_of(network, context.rank).backward();
      expect_gradients(*network, want, "factor 300");
    });
  }
}

/// One weight of `numel` elements whose gradient is the input.
struct DotImpl : Module<DotImpl> {
  explicit DotImpl(std::int64_t numel, at::ScalarType dtype = at::kFloat)
      : weight(register_parameter("weight", torch::zeros({numel}, dtype))) {}
  Tensor forward(const Tensor& x) { return (weight * x).sum(); }
  Tensor weight;
};
FSDP_MODULE(Dot);

double first_gradient(int replicas, int shards, const MixedPrecision& precision,
                      at::ScalarType dtype, const std::function<double(int rank)>& value) {
  double seen = 0;
  std::mutex mutex;
  on_ranks(replicas * shards, [&](RankContext& context) {
    Dot dot(1, dtype);
    auto options = hybrid(context, replicas);
    options.mixed_precision = precision;
    fully_shard(dot, options);
    dot(torch::full({1}, value(context.rank), precision.param_dtype.value_or(dtype))).backward();
    for (const auto& placement : shard_placements(*dot)) {
      if (placement.numel == 1) {
        const std::lock_guard lock(mutex);
        seen = placement.parameter.grad().item<double>();
      }
    }
  });
  return seen;
}

TEST(Division, Float16NeitherOverflowsNorVanishes) {
  // facebookresearch/fairscale#565, 8 ranks: one division at either side fails one of the two.
  EXPECT_EQ(first_gradient(1, 8, {}, at::kHalf, [](int) { return 16384; }), 16384);
  const double tiny = std::ldexp(1, -23);
  EXPECT_EQ(first_gradient(1, 8, {}, at::kHalf, [=](int) { return 4 * tiny; }), 4 * tiny);
  EXPECT_EQ(first_gradient(2, 4, {}, at::kHalf, [](int) { return 16384; }), 16384);
}

TEST(Division, ReduceDtypeHoldsForBothStagesOfAMesh) {
  // pytorch/pytorch#190626: 1 + 2^-9 needs float32.
  MixedPrecision precision;
  precision.param_dtype = at::kBFloat16;
  precision.reduce_dtype = at::kFloat;
  const auto value = [](int rank) { return rank == 0 ? 1 : std::ldexp(1, -9); };
  const double mean = (1 + std::ldexp(1, -9)) / 2;
  EXPECT_EQ(first_gradient(1, 2, precision, at::kFloat, value), mean);
  EXPECT_EQ(first_gradient(2, 1, precision, at::kFloat, value), mean);
}

TEST(Division, TheSumOfSixteenBitsIsRoundedOnce) {
  // Four ranks: 1 and three times 2^-8, half a unit in the last place of bfloat16. Added one by one
  // in bfloat16 the three would vanish.
  MixedPrecision precision;
  precision.param_dtype = at::kBFloat16;
  const auto value = [](int rank) { return rank == 0 ? 1 : std::ldexp(1, -8); };
  EXPECT_EQ(first_gradient(1, 4, precision, at::kFloat, value), (1 + std::ldexp(1, -6)) / 4);
}

TEST(Division, CommHookTakesThePlaceOfTheReductionAndTheDivisionStays) {
  for (const int replicas : {1, 2}) {
    on_ranks(4, [&](RankContext& context) {
      Network network;
      fill(*network);
      shard_layers(network, hybrid(context, replicas));
      register_comm_hook(*network, bf16_compress_hook);
      loss_of(network, context.rank).backward();
      Gradients sum;
      const int shards = 4 / replicas;
      for (int i = 0; i < replicas; ++i) {
        Gradients row;
        for (int j = 0; j < shards; ++j) {
          for (const auto& [name, g] : gradients_of_rank(i * shards + j)) {
            const auto rounded = g.to(at::kBFloat16).to(at::kFloat);
            row[name] = j == 0 ? rounded : row[name] + rounded;
          }
        }
        for (const auto& [name, g] : row) {
          const auto rounded = g.to(at::kBFloat16).to(at::kFloat);
          sum[name] = i == 0 ? rounded : sum[name] + rounded;
        }
      }
      for (auto& [name, g] : sum) {
        g = g.to(at::kBFloat16).to(at::kFloat) / 4;
      }
      expect_gradients(*network, sum, "bf16 hook");
    });
  }
}

// ---- Mixed precision
// ----------------------------------------------------------------------------------

struct SeeingImpl : Module<SeeingImpl> {
  SeeingImpl() : weight(register_parameter("weight", torch::ones({4}))) {
    shift = register_buffer("shift", torch::ones({4}));
    count = register_buffer("count", torch::zeros({1}, torch::kLong));
  }
  Tensor forward(const Tensor& x) {
    input = x.scalar_type();
    parameter = weight.scalar_type();
    buffer = shift.scalar_type();
    return x * weight + shift;
  }
  Tensor weight, shift, count;
  at::ScalarType input{}, parameter{}, buffer{};
};
FSDP_MODULE(Seeing);

TEST(Precision, EachDtypeIsWhereThePolicyPutsIt) {
  on_ranks(2, [](RankContext& context) {
    Seeing module;
    FullyShardOptions options{context.process_group};
    options.mixed_precision = {at::kBFloat16, at::kFloat, at::kDouble, at::kHalf};
    fully_shard(module, options);
    const auto output = module(torch::ones({2, 4}));
    EXPECT_EQ(module->input, at::kBFloat16);
    EXPECT_EQ(module->parameter, at::kBFloat16);
    EXPECT_EQ(module->buffer, at::kHalf);
    EXPECT_EQ(output.scalar_type(), at::kDouble);
    output.sum().backward();
    EXPECT_EQ(module->weight.scalar_type(), at::kFloat);  // the shard keeps full precision
    EXPECT_EQ(module->weight.grad().scalar_type(), at::kFloat);
    EXPECT_EQ(module->count.scalar_type(), at::kLong);
  });
}

TEST(Precision, WithoutAPolicyNothingIsCast) {
  on_ranks(2, [](RankContext& context) {
    Seeing module;
    fully_shard(module, {context.process_group});
    EXPECT_EQ(module(torch::ones({2, 4})).scalar_type(), at::kFloat);
    EXPECT_EQ(module->buffer, at::kFloat);
  });
}

// ---- Schedule
// -----------------------------------------------------------------------------------------

TEST(Schedule, ExplicitUnshardAndReshardChangeNothing) {
  const auto want = mean_over(1, 3);
  for (const bool async : {false, true}) {
    on_ranks(3, [&](RankContext& context) {
      Network network;
      fill(*network);
      shard_layers(network, {context.process_group});
      auto handle = unshard(*network->second, async);
      if (!async) {
        EXPECT_EQ(network->second->linear->weight.dim(), 2);
      }
      handle.wait();
      EXPECT_EQ(network->second->linear->weight.dim(), 2);
      reshard(*network->second);
      EXPECT_EQ(network->second->linear->weight.dim(), 1);
      unshard(*network->third, async);
      loss_of(network, context.rank).backward();
      expect_gradients(*network, want, "explicit");
    });
  }
}

/// Ways in which parameters may stay gathered until after an optimizer's step.
struct WayToKeep {
  std::string name;
  std::function<void(FullyShardOptions&)> choose;
  std::function<void(Network&)> before_backward;
  std::function<void(Network&)> after_backward;
};

void PrintTo(const WayToKeep& way, std::ostream* out) {
  *out << way.name;
}

using WayAndOptimizer = std::tuple<WayToKeep, std::string>;

class KeptGathered : public testing::TestWithParam<WayAndOptimizer> {};

TEST_P(KeptGathered, IsNotUsedAfterTheOptimizersStep) {
  const auto& [way, optimizer_name] = GetParam();
  on_ranks(4, [&, optimizer_name = optimizer_name](RankContext& context) {
    Network network;
    fill(*network);
    FullyShardOptions options{context.process_group};
    way.choose(options);
    shard_layers(network, options);
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    if (optimizer_name == "sgd") {  // writes through data(), so that no version tells of it
      optimizer = std::make_unique<torch::optim::SGD>(network->parameters(), 0.5);
    } else {
      optimizer = std::make_unique<torch::optim::AdamW>(network->parameters(), 0.5);
    }
    loss_of(network, context.rank).backward();
    optimizer->step();
    optimizer->zero_grad();
    if (way.before_backward) {
      way.before_backward(network);
    }
    loss_of(network, context.rank).backward();
    Tensor dangling;  // its graph stays alive
    if (way.after_backward) {
      way.after_backward(network);
    } else {
      dangling = loss_of(network, context.rank);
    }
    optimizer->step();
    optimizer->zero_grad();
    Tensor seen;
    {
      const torch::NoGradGuard no_grad;
      seen = network(batch(0));
    }
    Network plain;
    const WholeParameters whole(*network);
    const torch::NoGradGuard no_grad;
    for (const auto& parameter : plain->named_parameters()) {
      parameter.value().copy_(network->named_parameters()[parameter.key()]);
    }
    plain->to(seen.scalar_type());
    EXPECT_TRUE(torch::equal(seen, plain(batch(0).to(seen.scalar_type()))));
  });
}

const auto kWaysToKeep = testing::Values(
    WayToKeep{"unshard",
              [](FullyShardOptions&) {},
              {},
              [](Network& network) {
                unshard(*network->first, /*async=*/true);
                unshard(*network, /*async=*/true);
              }},
    WayToKeep{"reshard_after_backward_false", [](FullyShardOptions&) {},
              [](Network& network) { set_reshard_after_backward(*network, false); },
              [](Network&) {}},
    WayToKeep{
        "forward_of_shard_grad_op",
        [](FullyShardOptions& options) { options.strategy = ShardingStrategy::shard_grad_op; },
        {},
        {}},
    WayToKeep{"forward_that_keeps_parts",
              [](FullyShardOptions& options) { options.reshard_after_forward = 2; },
              {},
              {}},
    WayToKeep{"cast_copy_of_no_shard",
              [](FullyShardOptions& options) {
                options.strategy = ShardingStrategy::no_shard;
                options.mixed_precision.param_dtype = at::kBFloat16;
              },
              [](Network& network) { set_reshard_after_backward(*network, false); },
              [](Network&) {}});

INSTANTIATE_TEST_SUITE_P(EachWay, KeptGathered,
                         testing::Combine(kWaysToKeep, testing::Values("sgd", "adamw")),
                         [](const auto& info) {
                           return std::get<0>(info.param).name + "_" + std::get<1>(info.param);
                         });

TEST(Schedule, WhatWasGatheredBeforeShardsWereEditedIsNotUsedAfterIt) {
  for (const bool is_on_its_way : {false, true}) {
    on_ranks(2, [&](RankContext& context) {
      auto network = sharded_network(context, ShardingStrategy::shard_grad_op);
      const auto dangling = network(batch(0));
      if (is_on_its_way) {
        for (auto layer : {network->first, network->second, network->third}) {
          reshard(*layer);
          unshard(*layer, /*async=*/true);
        }
      }
      const torch::NoGradGuard no_grad;
      for (const auto& parameter : network->parameters()) {
        parameter.mul_(2);
      }
      const auto seen = network(batch(0));
      Network plain;
      fill(*plain);
      for (const auto& parameter : plain->parameters()) {
        parameter.mul_(2);
      }
      EXPECT_TRUE(torch::equal(seen, plain(batch(0)))) << is_on_its_way;
    });
  }
}

TEST(Schedule, AForwardWithoutBackwardLeavesNothingGathered) {
  for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op}) {
    on_ranks(2, [&](RankContext& context) {
      auto network = sharded_network(context, strategy);
      const torch::NoGradGuard no_grad;
      network(batch(0));
      for (const auto& unit : describe_units(*network)) {
        EXPECT_FALSE(unit.is_gathered) << unit.name;
      }
    });
  }
}

TEST(Schedule, AForwardBeforeTheOptimizerIsMadeDoesNotFreezeTheParameters) {
  // pytorch/pytorch#149205.
  for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op}) {
    on_ranks(2, [&](RankContext& context) {
      auto network = sharded_network(context, strategy);
      const auto dangling = loss_of(network, context.rank);  // its graph stays alive
      torch::optim::SGD optimizer(network->parameters(), 0.5);
      loss_of(network, context.rank).backward();
      std::map<std::string, Tensor> before;
      for (const auto& placement : shard_placements(*network)) {
        before[placement.name] = placement.parameter.detach().clone();
      }
      optimizer.step();
      const auto want = mean_over(1, 2);
      for (const auto& placement : shard_placements(*network)) {
        const auto gradient =
            want.at(placement.name).flatten().narrow(0, placement.begin, placement.numel);
        EXPECT_TRUE(torch::equal(placement.parameter, before[placement.name] - 0.5 * gradient))
            << placement.name;
      }
      // The next forward must see the new weights, whatever was kept from the first.
      const torch::NoGradGuard no_grad;
      const auto seen = network(batch(0));
      const WholeParameters whole(*network);
      Network plain;
      for (const auto& parameter : plain->named_parameters()) {
        parameter.value().copy_(network->named_parameters()[parameter.key()]);
      }
      EXPECT_TRUE(torch::equal(seen, plain(batch(0))));
    });
  }
}

TEST(Schedule, LastBackwardFalseLeavesTheReductionOnItsWay) {
  const auto want = mean_over(1, 2, 1);
  on_ranks(2, [&](RankContext& context) {
    Network network;
    fill(*network);
    shard_layers(network, {context.process_group});
    loss_of(network, context.rank);  // makes the root
    set_is_last_backward(*network, false);
    loss_of(network, context.rank, 0).backward();
    set_is_last_backward(*network, true);
    loss_of(network, context.rank, 0).backward();
    Gradients twice;
    for (const auto& [name, gradient] : want) {
      twice[name] = gradient + gradient;
    }
    expect_gradients(*network, twice, "two backwards");
  });
}

TEST(Schedule, LastBackwardFalseHoldsFromTheFirstBackwardOn) {
  on_ranks(2, [](RankContext& context) {
    auto network = sharded_network(context, ShardingStrategy::full_shard);
    set_is_last_backward(*network, false);
    loss_of(network, context.rank).backward();
    const auto on_their_way = [&] {
      const auto parameters = network->parameters();
      return std::count_if(parameters.begin(), parameters.end(),
                           [](const auto& parameter) { return !parameter.grad().defined(); });
    };
    EXPECT_GT(on_their_way(), 0);
    set_is_last_backward(*network, true);
    loss_of(network, context.rank).backward();
    EXPECT_EQ(on_their_way(), 0);
  });
}

TEST(Schedule, ReshardAfterBackwardFalseKeepsTheParameters) {
  on_ranks(2, [](RankContext& context) {
    Network network;
    fill(*network);
    shard_layers(network, {context.process_group});
    set_reshard_after_backward(*network, false);
    loss_of(network, context.rank).backward();
    for (const auto& unit : describe_units(*network)) {
      EXPECT_TRUE(unit.is_gathered) << unit.name;
    }
    EXPECT_EQ(network->first->linear->weight.dim(), 1);  // what the optimizer sees is the shard
    set_reshard_after_backward(*network, true);
    loss_of(network, context.rank).backward();
    for (const auto& unit : describe_units(*network)) {
      EXPECT_FALSE(unit.is_gathered) << unit.name;
    }
  });
}

// ---- Parameters
// -----------------------------------------------------------------------------------------

/// A linear layer that may be given another's weight.
struct BorrowerImpl : Module<BorrowerImpl> {
  explicit BorrowerImpl(std::int64_t width, const Tensor& shared = {})
      : bias(register_parameter("bias", torch::zeros({width}))),
        weight(register_parameter("weight",
                                  shared.defined() ? shared : torch::zeros({width, width}))) {}
  Tensor forward(const Tensor& x) { return torch::tanh(torch::linear(x, weight, bias)); }
  Tensor bias;
  Tensor weight;
};
FSDP_MODULE(Borrower);

struct TiedImpl : Module<TiedImpl> {
  TiedImpl()
      : first(register_module("first", Borrower(4))),
        middle(register_module("middle", Borrower(4))),
        last(register_module("last", Borrower(4, first->weight))) {}
  Tensor forward(const Tensor& x) { return last(middle(first(x))); }
  Borrower first;
  Borrower middle;
  Borrower last;
};
FSDP_MODULE(Tied);

TEST(Parameters, AWeightTiedAcrossUnitsMovesUpAndTrainsAsOne) {
  // NVIDIA/Megatron-LM#844, deepspeedai/DeepSpeed#966, pytorch/pytorch#83052: whichever is wrapped
  // first.
  for (const int order : {0, 1}) {
    for (const int world_size : {1, 2, 3}) {
      std::map<std::string, Tensor> reference;
      {
        Tied tied;
        fill(*tied);
        torch::optim::SGD optimizer({tied->first->weight, tied->first->bias, tied->middle->weight,
                                     tied->middle->bias, tied->last->bias},
                                    0.25);
        for (int step = 0; step < 6; ++step) {
          Gradients sum;
          for (int rank = 0; rank < world_size; ++rank) {
            tied->zero_grad();
            tied(batch(rank, step, 4)).square().mean().backward();
            for (const auto& parameter : tied->named_parameters()) {
              auto& into = sum[parameter.key()];
              const auto& gradient = parameter.value().grad();
              into = rank == 0 ? gradient.clone() : into + gradient;
            }
          }
          for (const auto& parameter : tied->named_parameters()) {
            parameter.value().mutable_grad() = sum[parameter.key()] / world_size;
          }
          optimizer.step();
        }
        for (const auto& parameter : tied->named_parameters()) {
          reference[parameter.key()] = parameter.value().detach().clone();
        }
      }
      on_ranks(world_size, [&](RankContext& context) {
        Tied tied;
        fill(*tied);
        fully_shard(order == 0 ? tied->first : tied->last, {context.process_group});
        fully_shard(tied->middle, {context.process_group});
        fully_shard(order == 0 ? tied->last : tied->first, {context.process_group});
        fully_shard(tied, {context.process_group});
        std::vector<Tensor> once;
        for (const auto& placement : shard_placements(*tied)) {
          once.push_back(placement.parameter);
        }
        EXPECT_EQ(once.size(), 5u);
        torch::optim::SGD optimizer(once, 0.25);
        for (int step = 0; step < 6; ++step) {
          optimizer.zero_grad();
          tied(batch(context.rank, step, 4)).square().mean().backward();
          optimizer.step();
        }
        EXPECT_TRUE(tied->last->weight.is_same(tied->first->weight));
        const WholeParameters whole(*tied);
        for (const auto& parameter : tied->named_parameters()) {
          EXPECT_TRUE(torch::equal(parameter.value(), reference[parameter.key()]))
              << parameter.key() << ", " << world_size << " ranks, order " << order;
        }
      });
    }
  }
}

struct OddImpl : Module<OddImpl> {
  OddImpl()
      : gain(register_parameter("gain", torch::tensor(1.5f))),
        weight(register_parameter("weight", torch::arange(12, torch::kFloat).view({3, 4}).t())) {}
  Tensor forward(const Tensor& x) { return torch::mm(x, weight) * gain; }
  Tensor gain;
  Tensor weight;
};
FSDP_MODULE(Odd);

TEST(Parameters, ZeroDimensionalAndNonContiguousOnesAreSharded) {
  Odd plain;
  plain(batch(0, 0, 4)).sum().backward();
  on_ranks(3, [&](RankContext& context) {
    Odd odd;
    ASSERT_FALSE(odd->weight.is_contiguous());
    fully_shard(odd, {context.process_group});
    odd(batch(0, 0, 4)).sum().backward();
    const auto placements = shard_placements(*odd);
    ASSERT_EQ(placements.size(), 2u);
    EXPECT_TRUE(placements[0].sizes.empty());
    for (const auto& placement : placements) {
      const auto& want = placement.name == "gain" ? plain->gain : plain->weight;
      const auto part =
          want.grad().contiguous().flatten().narrow(0, placement.begin, placement.numel);
      EXPECT_TRUE(torch::allclose(placement.parameter.grad(), part, 1e-6, 1e-6)) << placement.name;
    }
    const WholeParameters whole(*odd);
    EXPECT_EQ(odd->gain.dim(), 0);
    EXPECT_TRUE(torch::equal(odd->weight, plain->weight));
  });
}

TEST(Parameters, FrozenOnesNeitherMoveNorGetAGradient) {
  // facebookresearch/fairscale#721 and #610: frozen trunk, trainable head; and a bias frozen alone.
  const auto want = mean_over(1, 2);
  on_ranks(2, [&](RankContext& context) {
    Network network;
    fill(*network);
    for (auto& parameter : network->first->parameters()) {
      parameter.set_requires_grad(false);
    }
    network->second->linear->bias.set_requires_grad(false);
    shard_layers(network, {context.process_group});
    std::map<std::string, Tensor> start;
    for (const auto& placement : shard_placements(*network)) {
      start[placement.name] = placement.parameter.detach().clone();
    }
    std::vector<Tensor> trained;
    for (const auto& parameter : network->parameters()) {
      if (parameter.requires_grad()) {
        trained.push_back(parameter);
      }
    }
    torch::optim::AdamW optimizer(trained);
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      loss_of(network, context.rank).backward();
      if (step == 0) {
        for (const auto& placement : shard_placements(*network)) {
          const bool frozen =
              placement.name.starts_with("first") || placement.name == "second.linear.bias";
          ASSERT_EQ(placement.parameter.grad().defined(), !frozen) << placement.name;
          if (!frozen) {
            EXPECT_TRUE(torch::equal(
                placement.parameter.grad(),
                want.at(placement.name).flatten().narrow(0, placement.begin, placement.numel)))
                << placement.name;
          }
        }
      }
      optimizer.step();
    }
    for (const auto& placement : shard_placements(*network)) {
      const bool frozen =
          placement.name.starts_with("first") || placement.name == "second.linear.bias";
      if (placement.numel > 0) {
        EXPECT_EQ(torch::equal(placement.parameter, start[placement.name]), frozen)
            << placement.name;
      }
    }
    for (const auto& unit : describe_units(*network)) {
      EXPECT_FALSE(unit.is_gathered) << unit.name;
    }
  });
}

struct TwoInputsImpl : Module<TwoInputsImpl> {
  TwoInputsImpl() : linear(register_module("linear", torch::nn::Linear(4, 4))) {}
  Tensor forward(const Tensor& used, const Tensor& /*unused*/) { return linear(used); }
  torch::nn::Linear linear;
};
FSDP_MODULE(TwoInputs);

TEST(Parameters, AFrozenUnitWithAnUnusedInputThatNeedsAGradientRuns) {
  // pytorch/pytorch#117510.
  on_ranks(2, [](RankContext& context) {
    TwoInputs module;
    fill(*module);
    for (auto& parameter : module->parameters()) {
      parameter.set_requires_grad(false);
    }
    TwoInputs plain;
    fill(*plain);
    fully_shard(module, {context.process_group});
    auto used = batch(0, 0, 4).requires_grad_(true);
    auto unused = batch(1, 0, 4).requires_grad_(true);
    module(used, unused).sum().backward();
    auto again = batch(0, 0, 4).requires_grad_(true);
    plain->forward(again, unused).sum().backward();
    EXPECT_TRUE(torch::allclose(used.grad(), again.grad()));
    EXPECT_FALSE(unused.grad().defined());
    EXPECT_FALSE(describe_units(*module)[0].is_gathered);
  });
}

struct ChoosingImpl : Module<ChoosingImpl> {
  ChoosingImpl()
      : left(register_parameter("left", torch::ones({3}))),
        right(register_parameter("right", torch::ones({3}))),
        never(register_parameter("never", torch::ones({3}))) {}
  Tensor forward(const Tensor& x, bool use_left) { return (x * (use_left ? left : right)).sum(); }
  Tensor left, right, never;
};
FSDP_MODULE(Choosing);

TEST(Parameters, OnesThatOnlySomeRanksUseAreRefusedOrZeroFilledAsAsked) {
  // pytorch/pytorch#158719.
  const auto run = [](bool find_unused) {
    on_ranks(2, [&](RankContext& context) {
      Choosing module;
      FullyShardOptions options{context.process_group};
      options.find_unused_parameters = find_unused;
      fully_shard(module, options);
      module(torch::full({3}, 1.0f + context.rank), context.rank == 0).backward();
      for (const auto& placement : shard_placements(*module)) {
        if (placement.name == "never") {
          EXPECT_FALSE(placement.parameter.grad().defined());
        } else {
          ASSERT_TRUE(placement.parameter.grad().defined()) << placement.name;
          EXPECT_TRUE(
              torch::equal(placement.parameter.grad(),
                           torch::full({placement.numel}, placement.name == "left" ? 0.5f : 1.0f)))
              << placement.name;
        }
      }
    });
  };
  run(true);
  EXPECT_THAT(message_of(2,
                         [](RankContext& context) {
                           Choosing module;
                           fully_shard(module, {context.process_group});
                           module(torch::ones({3}), context.rank == 0).backward();
                         }),
              HasSubstr("other ranks gave it one"));
}

TEST(Parameters, UnusedOnesGetNoGradientSoThatTheOptimizerLeavesThemAlone) {
  on_ranks(2, [](RankContext& context) {
    Choosing module;
    fully_shard(module, {context.process_group});
    torch::optim::AdamW optimizer(module->parameters(),
                                  torch::optim::AdamWOptions(0.1).weight_decay(0.5));
    module(torch::ones({3}), true).backward();
    optimizer.step();
    const WholeParameters whole(*module);
    EXPECT_TRUE(torch::equal(module->never, torch::ones({3})));
    EXPECT_TRUE(torch::equal(module->right, torch::ones({3})));
    EXPECT_FALSE(torch::equal(module->left, torch::ones({3})));
  });
}

TEST(Parameters, IgnoredOnesStayWholeAndAreListed) {
  on_ranks(2, [](RankContext& context) {
    Network network;
    fill(*network);
    FullyShardOptions options{context.process_group};
    options.ignored_parameters = {network->scale, network->first->linear->bias};
    fully_shard(network, options);
    EXPECT_THAT(unmanaged_parameters(*network),
                testing::UnorderedElementsAre("scale", "first.linear.bias"));
    EXPECT_EQ(network->scale.numel(), 3);
    loss_of(network, context.rank).backward();
    // Not reduced: each rank has its own gradient.
    EXPECT_TRUE(torch::equal(network->scale.grad(), gradients_of_rank(context.rank)["scale"]));
  });
}

TEST(Parameters, EditsOfWholeParametersAreKept) {
  // pytorch/pytorch#107081.
  for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op,
                              ShardingStrategy::no_shard}) {
    on_ranks(3, [&](RankContext& context) {
      auto network = sharded_network(context, strategy);
      {
        const WholeParameters whole(*network);
        const torch::NoGradGuard no_grad;
        EXPECT_EQ(network->first->linear->weight.sizes(), (std::vector<std::int64_t>{7, 5}));
        network->first->linear->weight.mul_(torch::arange(35).view({7, 5}) % 2);
      }
      EXPECT_EQ(network->first->linear->weight.dim(), 1);
      const WholeParameters whole(*network);
      EXPECT_EQ(network->first->linear->weight.flatten()[0].item<float>(), 0);
      EXPECT_EQ(network->first->linear->weight.flatten()[34].item<float>(), 0);
      EXPECT_NE(network->first->linear->weight.flatten()[33].item<float>(), 0);
    });
  }
}

TEST(Parameters, AnOptimizerThatWasMadeFirstTrainsEveryOne) {
  // huggingface/accelerate#3256: the optimizer holds what the model holds, before wrapping and
  // after.
  on_ranks(2, [](RankContext& context) {
    Network network;
    fill(*network);
    torch::optim::SGD optimizer(network->parameters(), 0.5);
    shard_layers(network, {context.process_group});
    std::map<std::string, Tensor> start;
    for (const auto& placement : shard_placements(*network)) {
      start[placement.name] = placement.parameter.detach().clone();
    }
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      loss_of(network, context.rank, step).backward();
      optimizer.step();
    }
    for (const auto& placement : shard_placements(*network)) {
      if (placement.numel > 0) {
        EXPECT_FALSE(torch::equal(placement.parameter, start[placement.name])) << placement.name;
      }
    }
  });
}

struct CrossedImpl : Module<CrossedImpl> {
  CrossedImpl()
      : a(register_module("a", Layer(4, 4))),
        b(register_module("b", Layer(4, 4))),
        c(register_module("c", Layer(4, 4))) {}
  Tensor forward(const Tensor& x) { return b(c(a(x))); }  // not in the order of registration
  Layer a, b, c;
};
FSDP_MODULE(Crossed);

TEST(Schedule, GatheringAheadUsesTheWeightsOfTheLastUpdateInWhateverOrderLayersRun) {
  // NVIDIA/Megatron-LM#950.
  std::vector<Tensor> want;
  for (const int ahead : {0, 1, 2}) {
    on_ranks(2, [&](RankContext& context) {
      Crossed module;
      fill(*module);
      FullyShardOptions options{context.process_group};
      options.forward_prefetch = ahead;
      fully_shard(module->a, options);
      fully_shard(module->b, options);
      fully_shard(module->c, options);
      fully_shard(module, options);
      torch::optim::SGD optimizer(module->parameters(), 0.5);
      for (int step = 0; step < 5; ++step) {
        optimizer.zero_grad();
        module(batch(context.rank, step, 4)).square().mean().backward();
        optimizer.step();
      }
      const WholeParameters whole(*module);
      const auto parameters = module->parameters();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        if (ahead > 0) {
          EXPECT_TRUE(torch::equal(parameters[i], want[i])) << i;
        } else if (context.rank == 0) {
          want.push_back(parameters[i].detach().clone());
        }
      }
    });
  }
}

TEST(Schedule, FrozenUnitsDoNotPileUpInBackward) {
  // pytorch/pytorch#101982.
  class MostGathered : public Observer {
   public:
    explicit MostGathered(torch::nn::Module& module) : module_(module) {}
    void observe(const Observation& seen) override {
      if (seen.point == Point::unsharded_parameters) {
        int now = 0;
        for (const auto& unit : describe_units(module_)) {
          now += unit.is_gathered ? 1 : 0;
        }
        most = std::max(most, now);
      }
    }
    int most = 0;

   private:
    torch::nn::Module& module_;
  };
  on_ranks(2, [](RankContext& context) {
    torch::nn::Sequential layers;
    for (int i = 0; i < 9; ++i) {
      Layer layer(4, 4);
      fill(*layer, i);
      if (i > 0) {
        for (auto& parameter : layer->parameters()) {
          parameter.set_requires_grad(false);
        }
      }
      fully_shard(layer, {context.process_group});
      layers->push_back(layer);
    }
    FullyShardedDataParallel model(layers, {context.process_group});
    MostGathered most(model.root());
    const ObserverScope scope(&most);
    model(batch(context.rank, 0, 4)).sum().backward();
    EXPECT_LE(most.most, 3);  // one at work, one ahead, and the root, which has nothing
    for (const auto& unit : describe_units(model.root())) {
      EXPECT_FALSE(unit.is_gathered) << unit.name;
    }
  });
}

// ---- Making modules
// -------------------------------------------------------------------------------------

TEST(Making, OneUnitOfSeveralModulesGathersOnceForAll) {
  const auto want = mean_over(1, 2);
  on_ranks(2, [&](RankContext& context) {
    Network network;
    fill(*network);
    auto log = std::make_shared<CollectiveLog>();
    const auto group = record_collectives(context.process_group, "world", log);
    FullyShardOptions options{group};
    fully_shard({network->first.ptr(), network->second.ptr()}, options);
    fully_shard(network, options);
    for (int step = 0; step < 2; ++step) {
      log->clear();
      network->zero_grad();
      loss_of(network, context.rank).backward();
      expect_gradients(*network, want, "several modules");
      const auto gathers = std::count_if(log->begin(), log->end(), [](const auto& each) {
        return each.operation == "all_gather";
      });
      EXPECT_EQ(gathers, 3);  // root once, the pair in forward and in backward
    }
    EXPECT_THAT(describe_units(*network)[1].parameters,
                ElementsAre("first.linear.weight", "first.linear.bias", "second.linear.weight",
                            "second.linear.bias"));
  });
}

TEST(Making, WrapsByPredicateAndBySizeInnermostFirst) {
  on_ranks(2, [](RankContext& context) {
    Network network;
    const auto names = fully_shard_where(
        network.ptr(),
        [](const std::string& name, auto&) { return name == "second" || name == "first"; },
        {context.process_group});
    EXPECT_THAT(names, ElementsAre("first", "second", ""));
    Network by_size;
    EXPECT_THAT(fully_shard_where(by_size.ptr(), at_least(40), {context.process_group}),
                ElementsAre("first", "second", ""));  // 42, 48 and 21 elements
    EXPECT_TRUE(unmanaged_parameters(*by_size).empty());
  });
}

TEST(Making, RankZerosStatesReachEveryRank) {
  for (const int replicas : {1, 2, 4}) {
    Network first;
    fill(*first, 500);
    on_ranks(4, [&](RankContext& context) {
      Network network;
      fill(*network, 500 + context.rank);
      auto options = hybrid(context, replicas);
      options.sync_module_states = true;
      shard_layers(network, options);
      const WholeParameters whole(*network);
      for (const auto& parameter : network->named_parameters()) {
        EXPECT_TRUE(torch::equal(parameter.value(), first->named_parameters()[parameter.key()]))
            << parameter.key() << " on rank " << context.rank;
      }
    });
  }
}

TEST(Making, BuffersAreSentAlong) {
  on_ranks(3, [](RankContext& context) {
    Seeing module;
    module->shift.fill_(context.rank + 1.0);
    module->count.fill_(context.rank + 7);
    FullyShardOptions options{context.process_group};
    options.sync_module_states = true;
    fully_shard(module, options);
    EXPECT_EQ(module->shift[0].item<float>(), 1);
    EXPECT_EQ(module->count[0].item<int>(), 7);
  });
}

TEST(Making, MetaParametersAreFilledInUnitByUnitAndKeepTheirIdentity) {
  const auto want = mean_over(1, 2);
  on_ranks(2, [&](RankContext& context) {
    Network source;
    fill(*source);
    Network network;
    const auto weight = network->first->linear->weight;
    to_meta(*network);
    EXPECT_TRUE(weight.is_meta());
    std::vector<std::string> filled;
    FullyShardOptions options{context.process_group};
    options.device = at::kCPU;
    options.param_init_fn = [&](torch::nn::Module& module) {
      for (const auto& candidate : network->named_modules()) {
        if (candidate.value().get() == &module) {
          filled.push_back(candidate.key());
          for (const auto& own : module.named_parameters(/*recurse=*/false)) {
            const auto name =
                candidate.key().empty() ? own.key() : candidate.key() + "." + own.key();
            own.value().copy_(source->named_parameters()[name]);
          }
        }
      }
    };
    // The set that is ignored is the one that was named, after materialising too:
    // pytorch/pytorch#117924.
    shard_layers(network, options);
    EXPECT_THAT(filled, ElementsAre("first.linear", "second.linear", "third.linear", ""));
    EXPECT_TRUE(weight.is_same(network->first->linear->weight));
    EXPECT_TRUE(weight.requires_grad());
    loss_of(network, context.rank).backward();
    expect_gradients(*network, want, "from meta");
  });
  EXPECT_THAT(message_of(1,
                         [](RankContext& context) {
                           Layer layer(2, 2);
                           to_meta(*layer);
                           fully_shard(layer, {context.process_group});
                         }),
              HasSubstr("on the meta device"));
}

TEST(Parameters, WhichWereUsedIsNotForgottenWhenALaterMicroBatchFails) {
  on_ranks(2, [](RankContext& context) {
    Choosing module;
    fully_shard(module, {context.process_group});
    {
      const NoSync no_sync(*module);
      module(torch::ones({3}), /*use_left=*/true).backward();
    }
    const auto hook = module->left.register_hook(
        [](const Tensor&) -> Tensor { throw std::runtime_error("planted"); });
    EXPECT_ANY_THROW(module(torch::ones({3}), true).backward());
    module->left.remove_hook(hook);
    // The first micro-batch's gradient of `left` is still to be reduced, and it is not unused.
    module(torch::ones({3}), /*use_left=*/false).backward();
    for (const auto& placement : shard_placements(*module)) {
      EXPECT_EQ(placement.parameter.grad().defined(), placement.name != "never") << placement.name;
    }
  });
}

TEST(Parameters, AWeightTiedToAUnitElsewhereIsRefused) {
  EXPECT_THAT(message_of(2,
                         [](RankContext& context) {
                           Borrower first(4);
                           Borrower last(4, first->weight);
                           fully_shard(first, {context.process_group});
                           fully_shard(last, {context.process_group});
                           last(batch(0, 0, 4));
                         }),
              AllOf(HasSubstr("rank "), HasSubstr("parameter 'weight' belongs to another unit"),
                    HasSubstr("wanted: fully_shard on a module that contains both")));
}

TEST(Parameters, UnusedOnesAreSettledWhenTheLastBackwardComesLater) {
  on_ranks(2, [](RankContext& context) {
    Choosing module;
    FullyShardOptions options{context.process_group};
    options.find_unused_parameters = true;
    fully_shard(module, options);
    for (const bool is_last : {true, false, false, true}) {
      set_is_last_backward(*module, is_last);
      module(torch::ones({3}), true).backward();
    }
    for (const auto& placement : shard_placements(*module)) {
      ASSERT_EQ(placement.parameter.grad().defined(), placement.name == "left") << placement.name;
    }
    const auto parameters = module->named_parameters();
    EXPECT_TRUE(
        torch::equal(parameters["left"].grad(), torch::full_like(parameters["left"].grad(), 4)));
  });
}

TEST(Parameters, UnusedOnesAreSettledAnewAfterABackwardThatFailed) {
  on_ranks(2, [](RankContext& context) {
    struct ThreeImpl : Module<ThreeImpl> {
      Tensor forward(const Tensor& x, bool fail) {
        auto y = x * a(x, true);
        if (fail) {
          y.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("planted"); });
        }
        const auto of_b = b(y, true);
        // First in backward: when b's gradients leave, c's have come and wait for the end.
        return of_b + c(y.detach().requires_grad_(), true);
      }
      Choosing a = register_module("a", Choosing());
      Choosing b = register_module("b", Choosing());
      Choosing c = register_module("c", Choosing());
    };
    const auto three = std::make_shared<ThreeImpl>();
    FullyShardOptions options{context.process_group};
    options.find_unused_parameters = true;
    for (auto& part : {three->a, three->b, three->c}) {
      fully_shard(part, options);
    }
    fully_shard(three, options);
    call(*three, torch::ones({3}), false).backward();
    EXPECT_ANY_THROW(call(*three, torch::ones({3}), true).backward());
    call(*three, torch::ones({3}), false).backward();
    for (const auto& placement : shard_placements(*three)) {
      const bool is_used = placement.name.ends_with("left");
      ASSERT_EQ(placement.parameter.grad().defined(), is_used) << placement.name;
      if (is_used) {
        const auto& gradient = placement.parameter.grad();
        EXPECT_TRUE(torch::equal(gradient, torch::full_like(gradient, 6)))
            << placement.name << gradient;
      }
    }
  });
}

// ---- Several forwards and backwards
// ---------------------------------------------------------------------

TEST(Uses, TwoForwardsAndTwoBackwardsInEitherOrder) {
  // pytorch/pytorch#136861.
  Gradients want;
  for (int rank = 0; rank < 2; ++rank) {
    for (const auto& [name, gradient] : gradients_of_rank(rank, 1)) {
      want[name] = rank == 0 ? gradient : want[name] + gradient;
    }
  }
  for (auto& [name, gradient] : want) {
    gradient = gradient / 2 + gradient / 2;
  }
  for (const bool reversed : {false, true}) {
    for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op}) {
      on_ranks(2, [&](RankContext& context) {
        auto network = sharded_network(context, strategy);
        auto one = loss_of(network, context.rank);
        auto two = loss_of(network, context.rank);
        (reversed ? two : one).backward();
        (reversed ? one : two).backward();
        expect_gradients(*network, want, "two backwards");
      });
    }
  }
}

TEST(Uses, TwoForwardsOfOneLossAreReducedOnce) {
  on_ranks(2, [](RankContext& context) {
    Network network;
    fill(*network);
    auto log = std::make_shared<CollectiveLog>();
    shard_layers(network, {record_collectives(context.process_group, "world", log)});
    (loss_of(network, context.rank, 0) + loss_of(network, context.rank, 1)).backward();
    const auto reductions = std::count_if(log->begin(), log->end(), [](const auto& each) {
      return each.operation == "reduce_scatter";
    });
    EXPECT_EQ(reductions, 4);
  });
}

struct Answer {
  Tensor value;
  std::vector<Tensor> extras;
};
template <typename F>
void visit_tensors(Answer& answer, F&& f) {
  f(answer.value);
  for (auto& extra : answer.extras) {
    f(extra);
  }
}
struct AnsweringImpl : Module<AnsweringImpl> {
  AnsweringImpl() : layer(register_module("layer", Layer(4, 4))) {}
  Answer forward(const Tensor& x) {
    const auto y = layer(x);
    return {y * 2, {y + 1, y.detach()}};
  }
  Layer layer;
};
FSDP_MODULE(Answering);

TEST(Uses, StructsOfTensorsAndUnusedOutputsWork) {
  // pytorch/pytorch#83129: an output that the loss does not use leaves nothing gathered.
  for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op}) {
    on_ranks(2, [&](RankContext& context) {
      Answering module;
      fill(*module);
      FullyShardOptions options{context.process_group};
      options.strategy = strategy;
      fully_shard(module->layer, options);
      fully_shard(module, options);
      const auto kept = module(batch(context.rank, 0, 4));
      kept.extras[0].sum().backward();
      for (const auto& unit : describe_units(*module)) {
        EXPECT_FALSE(unit.is_gathered) << unit.name;
      }
      Answering plain;
      fill(*plain);
      Gradients want;
      for (int rank = 0; rank < 2; ++rank) {
        plain->zero_grad();
        plain(batch(rank, 0, 4)).extras[0].sum().backward();
        for (const auto& parameter : plain->named_parameters()) {
          auto& into = want[parameter.key()];
          into = rank == 0 ? parameter.value().grad().clone() : into + parameter.value().grad();
        }
      }
      for (auto& [name, gradient] : want) {
        gradient = gradient / 2;
      }
      expect_gradients(*module, want, "struct");
    });
  }
}

TEST(Uses, RanksThatRunUnitsOfEqualSizeInAnotherOrderAreTold) {
  // pytorch/pytorch#75902: sizes match, so nothing but the label tells them apart.
  const auto message = message_of(2, [](RankContext& context) {
    torch::nn::Sequential model(Layer(4, 4), Layer(4, 4));
    Network network;
    struct PairImpl : Module<PairImpl> {
      PairImpl() : a(register_module("a", Layer(4, 4))), b(register_module("b", Layer(4, 4))) {}
      Tensor forward(const Tensor& x, bool swapped) { return swapped ? a(b(x)) : b(a(x)); }
      Layer a, b;
    };
    const auto pair = std::make_shared<PairImpl>();
    fully_shard(pair->a, {context.process_group});
    fully_shard(pair->b, {context.process_group});
    fully_shard(pair, {context.process_group});
    call(*pair, batch(0, 0, 4), context.rank == 1);
  });
  EXPECT_THAT(message, HasSubstr("unit 'a'"));
  EXPECT_THAT(message, HasSubstr("unit 'b'"));
}

// ---- The norm
// --------------------------------------------------------------------------------------------

double exact_norm_of(const Gradients& gradients, double p) {
  long double sum = 0;
  double largest = 0;
  for (const auto& [name, gradient] : gradients) {
    const auto flat = gradient.flatten().to(at::kDouble);
    for (std::int64_t i = 0; i < flat.numel(); ++i) {
      const double size = std::abs(flat[i].item<double>());
      sum += std::pow(static_cast<long double>(size), static_cast<long double>(p));
      largest = std::max(largest, size);
    }
  }
  return std::isinf(p) ? largest
                       : static_cast<double>(std::pow(sum, 1 / static_cast<long double>(p)));
}

TEST(Norm, CountsEveryElementOnceOnEveryMeshAndForEveryPower) {
  // ByteDance-Seed/VeOmni#184: 4x1, 2x2 and 1x4 must agree. pytorch/pytorch#88955: whole units too.
  const auto gradients = mean_over(1, 4);
  for (const double p : {1.0, 2.0, 3.0, 2.5, 0.5, std::numeric_limits<double>::infinity()}) {
    std::map<int, float> norms;
    for (const int replicas : {1, 2, 4}) {
      std::mutex mutex;
      const auto on_mesh = mean_over(replicas, 4 / replicas);
      const auto want = static_cast<float>(exact_norm_of(on_mesh, p));
      on_ranks(4, [&](RankContext& context) {
        Network network;
        fill(*network);
        shard_layers(network, hybrid(context, replicas));
        loss_of(network, context.rank).backward();
        const auto norm = clip_grad_norm_(*network, 0.01, p).item<float>();
        const std::lock_guard lock(mutex);
        EXPECT_NEAR(norm, want, want * 1.2e-7) << "p = " << p << ", " << replicas << " replicas";
        EXPECT_TRUE(norms.emplace(replicas, norm).first->second == norm) << "ranks differ";
        const float coefficient = std::min(1.0f, 0.01f / (norm + 1e-6f));
        for (const auto& placement : shard_placements(*network)) {
          const auto part =
              on_mesh.at(placement.name).flatten().narrow(0, placement.begin, placement.numel) *
              coefficient;
          EXPECT_TRUE(torch::equal(placement.parameter.grad(), part)) << placement.name;
        }
      });
    }
  }
}

TEST(Norm, OfUnitsWithDifferentStrategiesIsOneNumber) {
  const auto gradients = mean_over(1, 4);
  const auto want = static_cast<float>(exact_norm_of(gradients, 2));
  on_ranks(4, [&](RankContext& context) {
    Network network;
    fill(*network);
    auto log = std::make_shared<CollectiveLog>();
    FullyShardOptions sharded{record_collectives(context.process_group, "world", log)};
    auto whole = sharded;
    whole.strategy = ShardingStrategy::no_shard;
    fully_shard(network->first, sharded);
    fully_shard(network->second, whole);
    fully_shard(network, sharded);
    loss_of(network, context.rank).backward();
    log->clear();
    EXPECT_NEAR(grad_norm(*network).item<float>(), want, want * 1.2e-7);
    EXPECT_EQ(log->size(), 1u);
  });
}

TEST(Norm, OfOnlyWholeUnitsNeedsNoCollective) {
  on_ranks(2, [](RankContext& context) {
    Network network;
    fill(*network);
    auto log = std::make_shared<CollectiveLog>();
    FullyShardOptions options{record_collectives(context.process_group, "world", log)};
    options.strategy = ShardingStrategy::no_shard;
    shard_layers(network, options);
    loss_of(network, context.rank).backward();
    log->clear();
    grad_norm(*network);
    EXPECT_TRUE(log->empty());
  });
}

TEST(Norm, OfHealthyHalfGradientsIsFinite) {
  // facebookresearch/fairscale#263: 5000 squared leaves float16.
  on_ranks(2, [](RankContext& context) {
    Dot dot(64, at::kHalf);
    fully_shard(dot, {context.process_group});
    auto x = torch::zeros({64}, at::kHalf);
    x[0] = 5000;
    x[63] = 5000;
    dot(x).backward();
    const auto norm = clip_grad_norm_(*dot, 1.0);
    EXPECT_EQ(norm.scalar_type(), at::kHalf);
    EXPECT_NEAR(norm.item<double>(), 7071, 4);
    double kept = 0;
    for (const auto& placement : shard_placements(*dot)) {
      kept += placement.parameter.grad().abs().sum().item<double>();
    }
    EXPECT_GT(kept, 0);
  });
}

TEST(Norm, TheSmallConstantIsAddedOnce) {
  // pytorch/pytorch#149768.
  on_ranks(4, [](RankContext& context) {
    Dot dot(64);
    fully_shard(dot, {context.process_group});
    dot(torch::full({64}, 1e-6f / 8)).backward();  // norm 1e-6
    const auto norm = clip_grad_norm_(*dot, 1e-6).item<float>();
    EXPECT_FLOAT_EQ(norm, 1e-6f);
    const float coefficient = 1e-6f / (norm + 1e-6f);
    for (const auto& placement : shard_placements(*dot)) {
      EXPECT_TRUE(torch::equal(placement.parameter.grad(),
                               torch::full({placement.numel}, 1e-6f / 8 * coefficient)));
    }
  });
}

TEST(Norm, DoesNotDependOnHowSixteenBitGradientsAreGrouped) {
  // pytorch/torchtitan#4135.
  std::map<int, double> norms;
  for (const int world_size : {1, 2, 4}) {
    std::mutex mutex;
    on_ranks(world_size, [&](RankContext& context) {
      Dot dot(256, at::kBFloat16);
      fully_shard(dot, {context.process_group});
      auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
      dot(torch::randn({256}, generator).exp().to(at::kBFloat16)).backward();
      const auto norm = grad_norm(*dot).item<double>();
      const std::lock_guard lock(mutex);
      norms[world_size] = norm;
    });
  }
  EXPECT_EQ(norms[1], norms[2]);
  EXPECT_EQ(norms[1], norms[4]);
}

TEST(Norm, NonFiniteGradientsGiveANonFiniteNormForEveryPowerOnEveryRank) {
  for (const double bad : {std::numeric_limits<double>::infinity(), std::nan("")}) {
    for (const double p : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
      on_ranks(3, [&](RankContext& context) {
        Dot dot(48);
        fully_shard(dot, {context.process_group});
        auto x = torch::ones({48});
        x[20] = bad;
        dot(x).backward();
        const auto norm = grad_norm(*dot, p).item<double>();
        EXPECT_EQ(std::isnan(norm), std::isnan(bad)) << p;
        EXPECT_FALSE(std::isfinite(norm));
        EXPECT_THROW(clip_grad_norm_(*dot, 1.0, p, /*error_if_nonfinite=*/true), NonFiniteError);
      });
    }
  }
}

}  // namespace
}  // namespace fsdp
