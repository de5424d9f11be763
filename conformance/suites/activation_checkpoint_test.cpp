// Checkpointed regions and sharded units, one within the other in either order: the same bits as
// storing, and the number of all-gathers that the order of wrapping says.

#include <fmt/format.h>
#include <fsdp/activation_checkpoint.h>
#include <fsdp/fully_shard.h>
#include <fsdp/observer.h>
#include <fsdp/random.h>
#include <fsdp/recording.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace fsdp {
namespace {

using torch::Tensor;

constexpr int kLayers = 4;
constexpr std::int64_t kWidth = 13;

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         std::memcmp(a.contiguous().const_data_ptr(), b.contiguous().const_data_ptr(),
                     a.nbytes()) == 0;
}

struct BlockImpl : Module<BlockImpl> {
  BlockImpl()
      : up(register_module("up", torch::nn::Linear(kWidth, 2 * kWidth))),
        down(register_module("down", torch::nn::Linear(2 * kWidth, kWidth))),
        drop(register_module("drop", Dropout(0.25))) {}
  Tensor forward(const Tensor& x, const Tensor& table) {
    ++runs;
    return x + drop(down(torch::gelu(up(x + table.to(x.scalar_type())))));
  }
  torch::nn::Linear up;
  torch::nn::Linear down;
  Dropout drop;
  int runs = 0;
};
FSDP_MODULE(Block);

bool is_block(const torch::nn::Module& module) {
  return dynamic_cast<const BlockImpl*>(&module) != nullptr;
}

struct StackImpl : Module<StackImpl> {
  StackImpl() : head(register_module("head", torch::nn::Linear(kWidth, 5))) {
    for (int i = 0; i < kLayers; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block()));
    }
    // A table that is made outside of the blocks and given to them (radixark/miles_diffusion#15).
    table = register_buffer("table", torch::arange(kWidth, torch::kFloat) / 64);
  }
  Tensor forward(Tensor x) {
    const auto run = [this](Tensor y, int begin, int end) {
      for (int i = begin; i < end; ++i) {
        y = blocks[i](y, table);
      }
      return y;
    };
    const int step = layers_per_segment == 0 ? kLayers : layers_per_segment;
    for (int begin = 0; begin < kLayers; begin += step) {
      x = layers_per_segment == 0
              ? run(x, begin, begin + step)
              : checkpoint(
                    [run, begin, step](const Tensor& y) { return run(y, begin, begin + step); }, x);
    }
    return head(x);
  }
  std::vector<Block> blocks;
  torch::nn::Linear head;
  Tensor table;
  int layers_per_segment = 0;  // 0: no regions of several layers
};
FSDP_MODULE(Stack);

enum class Order { store, inside, around, both_ways, segments };
const char* name_of(Order order) {
  switch (order) {
    case Order::store:
      return "store";
    case Order::inside:
      return "inside";
    case Order::around:
      return "around";
    case Order::both_ways:
      return "both_ways";
    case Order::segments:
      return "segments";
  }
  return "";
}

struct Setting {
  Order order = Order::store;
  int ranks = 2;
  ShardingStrategy strategy = ShardingStrategy::full_shard;
  int replicas = 1;
  std::optional<at::ScalarType> param_dtype{};
  bool early_stop = true;
  bool two_forwards = false;
  BackwardPrefetch prefetch = BackwardPrefetch::pre;
};

struct Result {
  std::map<std::string, Tensor> shards;  // gradients and parameters after three steps
  CollectiveLog log;                     // of the last step
  int runs = 0;                          // of the first block, in the last step
};

/// Trains three steps; what each rank ends with.
std::vector<Result> train(const Setting& setting) {
  std::vector<Result> results(static_cast<std::size_t>(setting.ranks));
  run_ranks(setting.ranks, [&](RankContext& context) {
    Stack stack;
    {
      const torch::NoGradGuard no_grad;
      auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
      for (auto& parameter : stack->parameters()) {
        parameter.copy_(torch::randn(parameter.sizes(), generator) * 0.3);
      }
    }
    const auto log = std::make_shared<CollectiveLog>();
    FullyShardOptions options;
    options.strategy = setting.strategy;
    options.backward_prefetch = setting.prefetch;
    options.mixed_precision.param_dtype = setting.param_dtype;
    if (setting.replicas > 1) {
      options.mesh = make_device_mesh(context.process_group, setting.replicas);
      options.mesh.shard = record_collectives(options.mesh.shard, "shard", log);
    } else {
      options.process_group = record_collectives(context.process_group, "shard", log);
    }
    RecomputationOptions checking;
    checking.check = RecomputationCheck::values;
    checking.early_stop = setting.early_stop;
    if (setting.order == Order::inside || setting.order == Order::both_ways) {
      apply_activation_checkpointing(
          stack,
          [&](const auto& module) {
            return is_block(module) &&
                   (setting.order == Order::inside || &module == stack->blocks[1].get());
          },
          checking);
    }
    for (auto& block : stack->blocks) {
      fully_shard(block, options);
    }
    fully_shard(stack, options);
    if (setting.order == Order::around || setting.order == Order::both_ways) {
      apply_activation_checkpointing(
          stack,
          [&](const auto& module) {
            return is_block(module) &&
                   (setting.order == Order::around || &module != stack->blocks[1].get());
          },
          checking);
    }
    stack->layers_per_segment = setting.order == Order::segments ? 2 : 0;
    torch::optim::SGD optimizer(stack->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    auto& result = results[static_cast<std::size_t>(context.rank)];
    for (int step = 0; step < 3; ++step) {
      log->clear();
      const int before = stack->blocks[0]->runs;
      optimizer.zero_grad();
      auto generator = at::make_generator<at::CPUGeneratorImpl>(50 + context.rank + 100 * step);
      const auto x = torch::randn({6, kWidth}, generator);
      auto loss = stack(x).to(at::kFloat).square().mean();
      if (setting.two_forwards) {
        loss = loss + stack(x * 0.5).to(at::kFloat).square().mean();
      }
      loss.backward();
      for (const auto& placement : shard_placements(*stack)) {
        result.shards[fmt::format("gradient {} {}", step, placement.name)] =
            placement.parameter.grad().clone();
      }
      optimizer.step();
      result.runs = stack->blocks[0]->runs - before;
    }
    for (const auto& placement : shard_placements(*stack)) {
      result.shards["parameter " + placement.name] = placement.parameter.detach().clone();
    }
    result.log = *log;
  });
  return results;
}

void expect_as_storing(Setting setting) {
  const auto got = train(setting);
  setting.order = Order::store;
  const auto want = train(setting);
  for (std::size_t rank = 0; rank < want.size(); ++rank) {
    ASSERT_EQ(got[rank].shards.size(), want[rank].shards.size());
    EXPECT_EQ(want[rank].shards.size(), 4u * (4u * kLayers + 2u));
    for (const auto& [name, tensor] : want[rank].shards) {
      EXPECT_TRUE(same_bits(got[rank].shards.at(name), tensor)) << "rank " << rank << ": " << name;
    }
    EXPECT_GT(got[rank].runs, want[rank].runs) << "nothing was recomputed";
  }
}

/// All-gathers of each unit in a step.
std::map<std::string, int> gathers(const Result& result) {
  std::map<std::string, int> counts;
  for (const auto& call : result.log) {
    if (call.operation == "all_gather") {
      ++counts[call.label];
    }
  }
  return counts;
}

std::string unit(int i) {
  return fmt::format("the parameters of unit 'block{}'", i);
}

class EachOrder : public testing::TestWithParam<std::tuple<Order, int>> {};
INSTANTIATE_TEST_SUITE_P(ActivationCheckpoint, EachOrder,
                         testing::Combine(testing::Values(Order::inside, Order::around,
                                                          Order::both_ways, Order::segments),
                                          testing::Values(1, 2, 3, 5, 8)),
                         [](const auto& info) {
                           return fmt::format("{}_W{}", name_of(std::get<0>(info.param)),
                                              std::get<1>(info.param));
                         });

TEST_P(EachOrder, TrainsToTheBitsOfStoring) {
  Setting setting;
  std::tie(setting.order, setting.ranks) = GetParam();
  expect_as_storing(setting);
}

TEST_P(EachOrder, RunningToTheEndTrainsToTheSameBits) {
  Setting setting;
  std::tie(setting.order, setting.ranks) = GetParam();
  setting.early_stop = false;
  expect_as_storing(setting);
}

TEST_P(EachOrder, TwoForwardsBeforeOneBackwardTrainToTheSameBits) {
  Setting setting;
  std::tie(setting.order, setting.ranks) = GetParam();
  setting.two_forwards = true;
  expect_as_storing(setting);
}

TEST_P(EachOrder, ComputingInBfloat16TrainsToTheSameBits) {
  Setting setting;
  std::tie(setting.order, setting.ranks) = GetParam();
  setting.param_dtype = at::kBFloat16;
  expect_as_storing(setting);
}

class EachStrategy : public testing::TestWithParam<ShardingStrategy> {};
INSTANTIATE_TEST_SUITE_P(ActivationCheckpoint, EachStrategy,
                         testing::Values(ShardingStrategy::full_shard,
                                         ShardingStrategy::shard_grad_op,
                                         ShardingStrategy::no_shard, ShardingStrategy::hybrid_shard,
                                         ShardingStrategy::hybrid_shard_zero2),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST_P(EachStrategy, TrainsToTheBitsOfStoringInEveryOrder) {
  for (const auto order : {Order::inside, Order::around, Order::both_ways, Order::segments}) {
    SCOPED_TRACE(name_of(order));
    Setting setting;
    setting.order = order;
    setting.ranks = 4;
    setting.strategy = GetParam();
    setting.replicas = std::string(to_string(GetParam())).starts_with("hybrid") ? 2 : 1;
    expect_as_storing(setting);
  }
}

TEST_P(EachStrategy, GathersAsOftenAsTheOrderOfWrappingSays) {
  // A unit that is freed after forward is gathered for forward and for backward, whatever is around
  // or inside it. In a region of several units each but the last is also gathered when the region
  // runs again: its own backward is still to come. (A third gather for each, as of PyTorch's
  // reentrant checkpoint around a unit, pytorch/pytorch#82203, is not needed.)
  const bool frees =
      GetParam() == ShardingStrategy::full_shard || GetParam() == ShardingStrategy::hybrid_shard;
  for (const auto order :
       {Order::store, Order::inside, Order::around, Order::both_ways, Order::segments}) {
    for (const auto prefetch : {BackwardPrefetch::none, BackwardPrefetch::pre}) {
      SCOPED_TRACE(fmt::format("{} {}", name_of(order), static_cast<int>(prefetch)));
      Setting setting;
      setting.order = order;
      setting.ranks = 4;
      setting.strategy = GetParam();
      setting.replicas = std::string(to_string(GetParam())).starts_with("hybrid") ? 2 : 1;
      setting.prefetch = prefetch;
      const auto results = train(setting);
      for (const auto& result : results) {
        std::map<std::string, int> want;
        if (GetParam() != ShardingStrategy::no_shard) {
          want["the parameters of unit ''"] = 1;
          for (int i = 0; i < kLayers; ++i) {
            const bool again = order == Order::segments && i % 2 == 0;
            want[unit(i)] = frees ? (again ? 3 : 2) : 1;
          }
        }
        EXPECT_EQ(gathers(result), want);
      }
    }
  }
}

TEST(ActivationCheckpoint, WhatARegionKeepsIsItsInputBeforeTheUnitsCastIfItIsAroundTheUnit) {
  struct Inputs : Observer {
    void observe(const Observation& seen) override {
      if (seen.point == Point::recomputation_input && seen.tensor.dim() == 2) {
        dtypes.push_back(seen.tensor.scalar_type());
      }
    }
    std::vector<at::ScalarType> dtypes;
  };
  for (const bool is_around : {false, true}) {
    run_ranks(2, [&](RankContext& context) {
      Block block;
      FullyShardOptions options;
      options.process_group = context.process_group;
      options.mixed_precision.param_dtype = at::kBFloat16;
      if (!is_around) {
        checkpoint_wrapper(block);
      }
      fully_shard(block, options);
      if (is_around) {
        checkpoint_wrapper(block);
      }
      Inputs inputs;
      const ObserverScope scope(&inputs);
      block(torch::ones({2, kWidth}), torch::ones({kWidth})).sum().backward();
      EXPECT_THAT(inputs.dtypes, testing::ElementsAre(is_around ? at::kFloat : at::kBFloat16));
    });
  }
}

TEST(ActivationCheckpoint, GradientsAreReducedOnce) {
  for (const auto order : {Order::inside, Order::around, Order::segments}) {
    Setting setting;
    setting.order = order;
    for (const auto& result : train(setting)) {
      const auto reductions =
          std::count_if(result.log.begin(), result.log.end(),
                        [](const auto& call) { return call.operation == "reduce_scatter"; });
      EXPECT_EQ(reductions, kLayers + 1) << name_of(order);
    }
  }
}

TEST(ActivationCheckpoint, ARankThatThrowsInItsSecondRunNamesItselfAndAllEnd) {
  for (const auto order : {Order::inside, Order::around}) {
    std::string message;
    try {
      run_ranks(3, [&](RankContext& context) {
        Stack stack;
        const auto wrap = [&] {
          RecomputationOptions options;
          options.on_recomputed = [&](const RecomputedActivation& seen) {
            if (context.rank == 1 && seen.region == "block2") {
              throw std::runtime_error("planted in the second run");
            }
          };
          apply_activation_checkpointing(stack, is_block, options);
        };
        if (order == Order::inside) {
          wrap();
        }
        for (auto& block : stack->blocks) {
          fully_shard(block, {context.process_group});
        }
        fully_shard(stack, {context.process_group});
        if (order == Order::around) {
          wrap();
        }
        stack(torch::ones({2, kWidth})).sum().backward();
      });
    } catch (const std::exception& error) {
      message = error.what();
    }
    EXPECT_THAT(message, testing::HasSubstr("planted in the second run")) << name_of(order);
    EXPECT_THAT(message, testing::HasSubstr("rank 1")) << name_of(order);
  }
}

TEST(ActivationCheckpoint, AfterASecondRunThatThrewTheNextStepIsAsIfNothingHadBeen) {
  for (const auto order : {Order::inside, Order::around}) {
    std::vector<std::vector<Tensor>> gradients;
    for (const bool fails : {true, false}) {
      std::mutex mutex;
      std::map<int, Tensor> of_rank;
      run_ranks(3, [&](RankContext& context) {
        Stack stack;
        {
          const torch::NoGradGuard no_grad;
          auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
          for (auto& parameter : stack->parameters()) {
            parameter.copy_(torch::randn(parameter.sizes(), generator) * 0.3);
          }
        }
        bool throws = fails;
        RecomputationOptions options;
        options.on_recomputed = [&](const RecomputedActivation& seen) {
          if (throws && seen.region == "block2") {
            throw std::runtime_error("planted in the second run");
          }
        };
        if (order == Order::inside) {
          apply_activation_checkpointing(stack, is_block, options);
        }
        for (auto& block : stack->blocks) {
          fully_shard(block, {context.process_group});
        }
        fully_shard(stack, {context.process_group});
        if (order == Order::around) {
          apply_activation_checkpointing(stack, is_block, options);
        }
        const auto x = torch::ones({2, kWidth}) * (context.rank + 1);
        if (fails) {
          EXPECT_THROW(stack(x).sum().backward(), std::runtime_error);
          throws = false;
          seed_rank_generator(0, context.rank);
        }
        stack->zero_grad();
        stack(x).sum().backward();
        const std::lock_guard lock(mutex);
        of_rank[context.rank] = stack->blocks[0]->up->weight.grad().clone();
      });
      gradients.emplace_back();
      for (const auto& [rank, gradient] : of_rank) {
        gradients.back().push_back(gradient);
      }
    }
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_TRUE(same_bits(gradients[0][rank], gradients[1][rank]))
          << name_of(order) << " rank " << rank;
    }
  }
}

}  // namespace
}  // namespace fsdp
