// When the sharding library talks and what it holds: the collectives of one step in order, equal
// results whatever is gathered ahead, memory to the byte, and poison in everything that must not be
// read.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <fmt/format.h>
#include <fsdp/fully_shard.h>
#include <fsdp/observer.h>
#include <fsdp/recording.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <mutex>

namespace fsdp {
namespace {

using torch::Tensor;

constexpr int kLayers = 3;
constexpr std::int64_t kWidth = 21;  // so that there is padding between parameters

struct BlockImpl : Module<BlockImpl> {
  BlockImpl() : linear(register_module("linear", torch::nn::Linear(kWidth, kWidth))) {}
  Tensor forward(const Tensor& x) {
    if (log != nullptr) {
      log->push_back({"", "forward", "", x.scalar_type(), 0, ""});
    }
    return torch::tanh(linear(x));
  }
  torch::nn::Linear linear;
  std::shared_ptr<CollectiveLog> log;  // where a forward is written down, if anywhere
};
FSDP_MODULE(Block);

struct StackImpl : Module<StackImpl> {
  StackImpl() : head(register_module("head", torch::nn::Linear(kWidth, 4))) {
    for (int i = 0; i < kLayers; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block()));
    }
  }
  Tensor forward(Tensor x) {
    for (auto& block : blocks) {
      x = block(x);
    }
    return head(x);
  }
  torch::nn::Linear head;
  std::vector<Block> blocks;
};
FSDP_MODULE(Stack);

Stack make_stack() {
  Stack stack;
  const torch::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  for (auto& parameter : stack->parameters()) {
    parameter.copy_(torch::randn(parameter.sizes(), generator) * 0.3);
  }
  return stack;
}

Tensor input_of(int rank, int step) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(50 + rank + 100 * step);
  return torch::randn({8, kWidth}, generator);
}

void shard(Stack& stack, const FullyShardOptions& options) {
  for (auto& block : stack->blocks) {
    fully_shard(block, options);
  }
  fully_shard(stack, options);
}

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// Elements of a unit's flat parameter, each parameter at a multiple of 16 (64 bytes of float32),
/// over so many shards.
std::int64_t padded(const std::vector<std::int64_t>& numels, int shards) {
  std::int64_t end = 0;
  for (const auto numel : numels) {
    end = round_up(end, 16) + numel;
  }
  return round_up(end, shards);
}
std::int64_t block_numel(int shards) {
  return padded({kWidth * kWidth, kWidth}, shards);
}
std::int64_t root_numel(int shards) {
  return padded({4 * kWidth, 4}, shards);
}

// ---- Collectives
// --------------------------------------------------------------------------------------

struct Plan {
  ShardingStrategy strategy = ShardingStrategy::full_shard;
  int replicas = 1;
  int shards = 1;
  int reshard_after_forward = -1;
  int forward_prefetch = 0;
  BackwardPrefetch backward_prefetch = BackwardPrefetch::none;
};

/// What a step must call, worked out from the strategy alone. Units: 0 to kLayers - 1 are the
/// blocks, in the order of use; kLayers is the root, whose parameters are gathered first and kept.
std::vector<std::string> expected_step(const Plan& plan) {
  std::vector<std::string> calls;
  const auto name = [](int unit) {
    return unit == kLayers ? std::string() : "block" + std::to_string(unit);
  };
  const auto numel = [&](int unit) {
    return unit == kLayers ? root_numel(plan.shards) : block_numel(plan.shards);
  };
  const auto gather = [&](int unit) {
    if (plan.shards > 1) {
      calls.push_back(fmt::format("all_gather shard Float {} for the parameters of unit '{}'",
                                  numel(unit), name(unit)));
    }
  };
  // Gathered units that nobody has waited for yet.
  std::set<int> ahead;
  const auto wait_for = [&](int unit) {
    if (plan.shards > 1 && ahead.erase(unit) > 0) {
      calls.push_back(fmt::format("gathered shard Float {} for the parameters of unit '{}'",
                                  numel(unit), name(unit)));
    }
  };
  const auto finish = [&](int unit) {
    if (plan.replicas > 1) {
      calls.push_back(
          fmt::format("all_reduce replicate sum Float {} for the gradients of unit '{}'",
                      numel(unit) / plan.shards, name(unit)));
    }
  };
  const auto reduce = [&](int unit) {
    if (plan.shards > 1) {
      calls.push_back(
          fmt::format("reduce_scatter shard sum Float {} for the gradients of unit '{}'",
                      numel(unit), name(unit)));
    }
  };
  // Forward: the root, then each block, gathered so many ahead as asked.
  std::vector<int> order = {kLayers};
  for (int unit = 0; unit < kLayers; ++unit) {
    order.push_back(unit);
  }
  std::set<int> gathered;
  const auto gather_once = [&](int unit) {
    if (gathered.insert(unit).second) {
      gather(unit);
      ahead.insert(unit);
    }
  };
  for (std::size_t at = 0; at < order.size(); ++at) {
    gather_once(order[at]);
    wait_for(order[at]);
    for (auto next = at + 1; next < order.size() && next <= at + plan.forward_prefetch; ++next) {
      gather_once(order[next]);
    }
    if (order[at] != kLayers) {
      calls.push_back("forward");
    }
  }
  // Backward: blocks from the last to the first, then the root's gradients.
  const bool keeps =
      plan.reshard_after_forward == 0 ||
      (plan.reshard_after_forward < 0 && plan.strategy != ShardingStrategy::full_shard &&
       plan.strategy != ShardingStrategy::hybrid_shard);
  if (!keeps) {
    gathered.clear();
    if (plan.reshard_after_forward < 0) {
      gathered.insert(kLayers);
    }
  }
  gather_once(kLayers);
  wait_for(kLayers);
  if (plan.backward_prefetch == BackwardPrefetch::pre) {
    gather_once(kLayers - 1);
  }
  int reducing = -1;
  const auto start_reduction = [&](int unit) {
    if (reducing >= 0) {
      finish(reducing);
    }
    reduce(unit);
    reducing = unit;
  };
  for (int unit = kLayers - 1; unit >= 0; --unit) {
    gather_once(unit);
    wait_for(unit);
    if (plan.backward_prefetch == BackwardPrefetch::pre && unit > 0) {
      gather_once(unit - 1);
    }
    // The first block's inputs need no gradient, so that the end of backward finds it, and the
    // root.
    if (unit > 0) {
      start_reduction(unit);
      if (plan.backward_prefetch == BackwardPrefetch::post) {
        gather_once(unit - 1);
      }
    }
  }
  start_reduction(kLayers);
  start_reduction(0);
  finish(reducing);
  return calls;
}

/// Adds to a log of collectives when parameters are there for use, and when a block runs: what is
/// gathered ahead shows in that order only.
class UseRecorder : public Observer {
 public:
  UseRecorder(Stack& stack, std::shared_ptr<CollectiveLog> log) : log_(std::move(log)) {
    for (auto& block : stack->blocks) {
      block->log = log_;
    }
  }
  void observe(const Observation& seen) override {
    if (seen.point == Point::unsharded_parameters && seen.shards > 1) {
      log_->push_back({"shard", "gathered", fmt::format("the parameters of unit '{}'", seen.unit),
                       seen.tensor.scalar_type(), seen.tensor.numel(), ""});
    }
  }

 private:
  std::shared_ptr<CollectiveLog> log_;
};

FullyShardOptions options_of(const Plan& plan, const RankContext& context,
                             const std::shared_ptr<CollectiveLog>& log) {
  FullyShardOptions options;
  options.strategy = plan.strategy;
  const bool is_hybrid = plan.strategy == ShardingStrategy::hybrid_shard ||
                         plan.strategy == ShardingStrategy::hybrid_shard_zero2;
  if (is_hybrid) {
    options.mesh = make_device_mesh(context.process_group, plan.replicas);
    if (log != nullptr) {
      options.mesh.shard = record_collectives(options.mesh.shard, "shard", log);
      options.mesh.replicate = record_collectives(options.mesh.replicate, "replicate", log);
    }
  } else {
    const bool whole = plan.strategy == ShardingStrategy::no_shard;
    options.process_group = log == nullptr ? context.process_group
                                           : record_collectives(context.process_group,
                                                                whole ? "replicate" : "shard", log);
  }
  if (plan.reshard_after_forward >= 0) {
    options.reshard_after_forward = plan.reshard_after_forward;
  }
  options.forward_prefetch = plan.forward_prefetch;
  options.backward_prefetch = plan.backward_prefetch;
  return options;
}

std::vector<std::string> spelled(const CollectiveLog& log) {
  std::vector<std::string> calls;
  for (const auto& call : log) {
    calls.push_back(call.operation == "forward" ? call.operation : describe(call));
  }
  return calls;
}

class EachPlan : public testing::TestWithParam<Plan> {};

std::string name_of(const Plan& plan) {
  return fmt::format("{}_{}x{}_raf{}_fp{}_bp{}", to_string(plan.strategy), plan.replicas,
                     plan.shards,
                     plan.reshard_after_forward < 0 ? std::string("own")
                                                    : std::to_string(plan.reshard_after_forward),
                     plan.forward_prefetch, static_cast<int>(plan.backward_prefetch));
}

std::vector<Plan> all_plans() {
  using S = ShardingStrategy;
  std::vector<Plan> plans;
  const std::vector<std::tuple<S, int, int>> shapes = {
      {S::full_shard, 1, 1},        {S::full_shard, 1, 2},   {S::full_shard, 1, 3},
      {S::shard_grad_op, 1, 2},     {S::no_shard, 2, 1},     {S::no_shard, 3, 1},
      {S::hybrid_shard, 2, 2},      {S::hybrid_shard, 4, 1}, {S::hybrid_shard, 1, 4},
      {S::hybrid_shard_zero2, 2, 2}};
  for (const auto& [strategy, replicas, shards] : shapes) {
    for (const auto backward :
         {BackwardPrefetch::none, BackwardPrefetch::pre, BackwardPrefetch::post}) {
      for (const int forward : {0, 1, 2}) {
        plans.push_back({strategy, replicas, shards, -1, forward, backward});
      }
    }
    plans.push_back({strategy, replicas, shards, 0, 0, BackwardPrefetch::pre});
    plans.push_back({strategy, replicas, shards, 1, 0, BackwardPrefetch::pre});
  }
  return plans;
}

INSTANTIATE_TEST_SUITE_P(Collectives, EachPlan, testing::ValuesIn(all_plans()),
                         [](const auto& info) { return name_of(info.param); });

TEST_P(EachPlan, AStepCallsWhatTheStrategySaysInThatOrderAndTheBitsAreThose) {
  const auto& plan = GetParam();
  const int world_size = plan.replicas * plan.shards;
  // The same mesh without any gathering ahead is what the gradients are held to.
  Plan plain = plan;
  plain.forward_prefetch = 0;
  plain.backward_prefetch = BackwardPrefetch::none;
  plain.reshard_after_forward = -1;
  std::vector<std::vector<Tensor>> want(world_size);
  for (const bool is_plain : {true, false}) {
    run_ranks(world_size, [&](RankContext& context) {
      auto log = std::make_shared<CollectiveLog>();
      auto stack = make_stack();
      UseRecorder uses(stack, log);
      const ObserverScope scope(&uses);
      shard(stack, options_of(is_plain ? plain : plan, context, log));
      torch::optim::SGD optimizer(stack->parameters(), 0.1);
      for (int step = 0; step < 3; ++step) {
        log->clear();
        optimizer.zero_grad();
        stack(input_of(context.rank, step)).square().mean().backward();
        optimizer.step();
        // The first forward does not know the order yet.
        if (!is_plain && (step > 0 || plan.forward_prefetch == 0)) {
          EXPECT_EQ(spelled(*log), expected_step(plan))
              << "rank " << context.rank << ", step " << step;
        }
      }
      const auto parameters = stack->parameters();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        const auto& parameter = parameters[i];
        if (is_plain) {
          want[context.rank].push_back(parameter.detach().clone());
        } else {
          EXPECT_TRUE(torch::equal(parameter, want[context.rank][i])) << i;
        }
      }
    });
  }
}

TEST(Collectives, WithoutSyncThereAreGathersOnly) {
  run_ranks(2, [](RankContext& context) {
    auto log = std::make_shared<CollectiveLog>();
    auto stack = make_stack();
    shard(stack, {record_collectives(context.process_group, "shard", log)});
    const NoSync no_sync(*stack);
    stack(input_of(context.rank, 0)).square().mean().backward();
    EXPECT_EQ(log->size(), 1u + 2 * kLayers);
    for (const auto& call : *log) {
      EXPECT_EQ(call.operation, "all_gather");
    }
  });
}

TEST(Collectives, ALimitHoldsBackGathersAhead) {
  run_ranks(2, [](RankContext& context) {
    auto log = std::make_shared<CollectiveLog>();
    auto stack = make_stack();
    UseRecorder uses(stack, log);
    const ObserverScope scope(&uses);
    FullyShardOptions options{record_collectives(context.process_group, "shard", log)};
    options.forward_prefetch = 3;
    options.limit_gathers = 1;
    options.backward_prefetch = BackwardPrefetch::none;
    shard(stack, options);
    Plan one_ahead;
    one_ahead.shards = 2;
    one_ahead.forward_prefetch = 1;
    for (int step = 0; step < 2; ++step) {
      log->clear();
      stack(input_of(context.rank, step)).square().mean().backward();
    }
    EXPECT_EQ(spelled(*log), expected_step(one_ahead));
  });
}

TEST(Collectives, PartsBetweenForwardAndBackwardComeFromTheSmallGroup) {
  run_ranks(4, [](RankContext& context) {
    auto log = std::make_shared<CollectiveLog>();
    auto stack = make_stack();
    FullyShardOptions options{record_collectives(context.process_group, "shard", log)};
    options.reshard_after_forward = 2;
    options.backward_prefetch = BackwardPrefetch::none;
    shard(stack, options);
    stack(input_of(context.rank, 0)).square().mean().backward();
    // In forward every unit is gathered from all four; in backward from two, which is not recorded.
    const auto gathers = std::count_if(
        log->begin(), log->end(), [](const auto& call) { return call.operation == "all_gather"; });
    EXPECT_EQ(gathers, kLayers + 1);
  });
}

// ---- Memory
// ---------------------------------------------------------------------------------------------

/// Bytes that this thread's tensors hold, as the allocator reports them.
class Meter : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* /*pointer*/, std::int64_t size, std::size_t /*allocated*/,
                         std::size_t /*reserved*/, c10::Device /*device*/) override {
    held_ += size;
    peak_ = std::max(peak_, held_);
  }
  bool memoryProfilingEnabled() const override { return true; }
  std::int64_t held() const { return held_; }
  std::int64_t take_peak() { return std::exchange(peak_, held_); }

 private:
  std::int64_t held_ = 0;
  std::int64_t peak_ = 0;
};

class Memory : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Schedule, Memory, testing::Values(1, 2, 4, 8),
                         [](const auto& info) { return "W" + std::to_string(info.param); });

TEST_P(Memory, PersistentBytesAreTheFormulaToTheByteAndThePeakIsWithinFivePercentOfIts) {
  const int shards = GetParam();
  run_ranks(shards, [&](RankContext& context) {
    const auto meter = std::make_shared<Meter>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
    auto stack = make_stack();
    FullyShardOptions options{context.process_group};
    options.backward_prefetch = BackwardPrefetch::none;
    shard(stack, options);
    const std::int64_t chunk = (kLayers * block_numel(shards) + root_numel(shards)) / shards;
    // Float32 shards of the parameters; at world size 1 the shard is the whole.
    EXPECT_EQ(meter->held(), 4 * chunk);

    torch::optim::AdamW optimizer(stack->parameters());
    const auto input = input_of(context.rank, 0);
    const auto step = [&] {
      stack(input).square().mean().backward();
      optimizer.step();
    };
    step();
    // Shards of gradients, with their padding; and the two moments, without.
    std::int64_t moments = 0;
    for (const auto& parameter : stack->parameters()) {
      moments += 2 * parameter.numel();
    }
    const std::int64_t input_bytes = 4 * input.numel();
    EXPECT_EQ(meter->held(), 4 * (2 * chunk + moments) + input_bytes);

    optimizer.zero_grad();
    const auto before = meter->held();
    meter->take_peak();
    stack(input).square().mean().backward();
    const auto peak = meter->take_peak() - before;
    // Two moments can be the peak. In the middle of backward: the root and one block are gathered,
    // the block before is on its way (its flat gradient and the result), this block's gradients are
    // being copied from autograd's into its flat gradient, the root's gradients wait for the end.
    // At the end: all blocks but the one whose inputs need no gradient have delivered theirs, the
    // root is on its way. At world size 1 nothing is gathered and a flat gradient is its own
    // result.
    const auto block = block_numel(shards);
    const auto root = root_numel(shards);
    const bool alone = shards == 1;
    const std::int64_t own_gradients = kWidth * kWidth + kWidth;
    const std::int64_t root_gradients = 4 * kWidth + 4;
    const std::int64_t activations = 2 * 8 * kWidth;  // an input, and the gradient of another
    const auto middle = (alone ? 0 : root + block + block / shards) + 2 * block + own_gradients +
                        root_gradients + activations;
    const auto end = (kLayers - 1) * block / shards + (alone ? 0 : block + root / shards) + block +
                     own_gradients + root;
    const auto formula = static_cast<double>(4 * std::max(middle, end));
    EXPECT_NEAR(static_cast<double>(peak), formula, 0.05 * formula) << shards << " shards";
  });
}

// ---- Poison
// -----------------------------------------------------------------------------------------------

/// Fills memory with NaN when it is handed out and when it is given back.
class PoisoningAllocator : public c10::Allocator {
 public:
  explicit PoisoningAllocator(c10::Allocator& inner) : inner_(inner) {}
  c10::DataPtr allocate(std::size_t bytes) override {
    auto data = inner_.allocate(bytes);
    if (bytes == 0) {
      return data;
    }
    poison(data.get(), bytes);
    auto* context = new Block{std::move(data), bytes};
    return {context->data.get(), context, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

 private:
  struct Block {
    c10::DataPtr data;
    std::size_t bytes;
  };
  static void poison(void* data, std::size_t bytes) { std::memset(data, 0xFF, bytes); }
  static void release(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    poison(block->data.get(), block->bytes);
  }
  c10::Allocator& inner_;
};

class AllocatorGuard {
 public:
  AllocatorGuard() : before_(c10::GetCPUAllocator()), poisoning_(new PoisoningAllocator(*before_)) {
    c10::SetCPUAllocator(poisoning_, 1);
  }
  // The poisoning one is never destroyed: tensors may outlive the test.
  ~AllocatorGuard() { c10::SetCPUAllocator(before_, 1); }
  AllocatorGuard(const AllocatorGuard&) = delete;
  AllocatorGuard& operator=(const AllocatorGuard&) = delete;

 private:
  c10::Allocator* before_;
  PoisoningAllocator* poisoning_;
};

/// Where a unit's flat parameter is padding.
Tensor padding_of(const Observation& seen) {
  auto mask = torch::ones({seen.tensor.numel()}, torch::kBool);
  for (const auto& slot : *seen.slots) {
    mask.narrow(0, slot.offset, slot.numel).fill_(false);
  }
  return mask;
}

/// Writes NaN over all padding as soon as there is some.
class PaddingPoisoner : public Observer {
 public:
  void observe(const Observation& seen) override {
    const bool has_padding =
        seen.point == Point::unsharded_parameters || seen.point == Point::unreduced_gradient;
    if (!has_padding) {
      return;
    }
    const auto mask = padding_of(seen);
    seen.tensor.masked_fill_(mask, std::nan(""));
    poisoned += mask.sum().item<std::int64_t>();
  }
  std::int64_t poisoned = 0;
};

std::vector<std::vector<Tensor>> train(const Plan& plan, bool poison) {
  const int world_size = plan.replicas * plan.shards;
  std::vector<std::vector<Tensor>> results(world_size);
  run_ranks(world_size, [&](RankContext& context) {
    PaddingPoisoner poisoner;
    const ObserverScope scope(poison ? &poisoner : nullptr);
    auto stack = make_stack();
    shard(stack, options_of(plan, context, nullptr));
    torch::optim::AdamW optimizer(stack->parameters());
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      for (int m = 0; m < 2; ++m) {
        stack(input_of(context.rank, 2 * step + m)).square().mean().backward();
      }
      results[context.rank].push_back(clip_grad_norm_(*stack, 0.5));
      optimizer.step();
    }
    for (const auto& parameter : stack->parameters()) {
      results[context.rank].push_back(parameter.detach().clone());
    }
    if (poison) {
      EXPECT_GT(poisoner.poisoned, 0);
    }
  });
  return results;
}

TEST(Poison, InPaddingAndInFreedAndFreshMemoryChangesNothing) {
  for (const Plan& plan :
       {Plan{ShardingStrategy::full_shard, 1, 3, -1, 1, BackwardPrefetch::pre},
        Plan{ShardingStrategy::shard_grad_op, 1, 3}, Plan{ShardingStrategy::no_shard, 3, 1},
        Plan{ShardingStrategy::hybrid_shard, 2, 5, 1, 2, BackwardPrefetch::post}}) {
    const auto want = train(plan, /*poison=*/false);
    const AllocatorGuard guard;
    ASSERT_TRUE(std::isnan(torch::empty({1}).item<float>())) << "the poison does not work";
    const auto got = train(plan, /*poison=*/true);
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t rank = 0; rank < want.size(); ++rank) {
      for (std::size_t i = 0; i < want[rank].size(); ++i) {
        EXPECT_TRUE(torch::equal(got[rank][i], want[rank][i]))
            << name_of(plan) << ", rank " << rank << ", tensor " << i;
      }
    }
  }
}

/// Keeps the padding of gradients.
class PaddingCollector : public Observer {
 public:
  void observe(const Observation& seen) override {
    if (seen.point == Point::unreduced_gradient) {
      padding.push_back(seen.tensor.masked_select(padding_of(seen)));
    }
  }
  std::vector<Tensor> padding;
};

TEST(Poison, FreshMemoryDoesNotReachTheHookThatReducesGradients) {
  const AllocatorGuard guard;
  run_ranks(4, [&](RankContext& context) {
    PaddingCollector collector;
    const ObserverScope scope(&collector);
    auto stack = make_stack();
    shard(stack, {context.process_group});
    stack(input_of(context.rank, 0)).square().mean().backward();
    ASSERT_EQ(collector.padding.size(), kLayers + 1U);
    for (const auto& padding : collector.padding) {
      EXPECT_GT(padding.numel(), 7);  // between weight and bias, and at the end
      EXPECT_EQ(padding.count_nonzero().item<std::int64_t>(), 0);
    }
  });
}

}  // namespace
}  // namespace fsdp
