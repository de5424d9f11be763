#include "conformance/memory_measurement.h"

#include <fsdp/fully_shard.h>
#include <fsdp/process_group.h>
#include <torch/optim.h>

#include <algorithm>
#include <cmath>

#include "conformance/memory_account.h"

namespace shardproof {
namespace {

/// Bytes of the state of a CPU generator (at::Generator::get_state), and how many are kept for a
/// region on the only rank of a process: its own and libtorch's default one.
constexpr std::int64_t kGeneratorState = 5056;
constexpr std::int64_t kGenerators = 2;

/// Numbers of elements of each parameter, unit by unit, in the order of the flat parameters.
std::vector<std::vector<std::int64_t>> units_of(const StackSpec& spec) {
  const auto c = spec.width;
  const std::vector<std::int64_t> block = {c, c, 3 * c * c, 3 * c, c * c,     c,
                                           c, c, 4 * c * c, 4 * c, 4 * c * c, c};
  std::vector<std::vector<std::int64_t>> units(static_cast<std::size_t>(spec.layers), block);
  units.push_back({spec.vocabulary * c, c * spec.vocabulary});
  return units;
}

std::int64_t rounded_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// Elements in both [a, b) and [c, d).
std::int64_t overlap(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d) {
  return std::max<std::int64_t>(0, std::min(b, d) - std::max(a, c));
}

}  // namespace

std::vector<MemoryUse> measure_memory(const StackSpec& spec, const CheckpointPolicy& policy,
                                      int shards, std::uint64_t seed) {
  const MemoryAccount first;  // before the ranks' threads
  std::vector<MemoryUse> uses(static_cast<std::size_t>(std::max(1, shards)));
  fsdp::run_ranks(std::max(1, shards), [&](fsdp::RankContext& context) {
    MemoryAccount account;
    const MemoryScope scope(account);
    const auto tokens = stack_tokens(spec, seed + static_cast<std::uint64_t>(context.rank));
    auto before = account.held();
    const auto grown = [&] { return account.held() - std::exchange(before, account.held()); };
    auto& use = uses[static_cast<std::size_t>(context.rank)];

    LayerStack stack(spec, policy, seed);
    if (shards > 0) {
      for (const auto& block : stack->blocks()) {
        fsdp::fully_shard(block, {context.process_group});
      }
      fsdp::fully_shard(stack, {context.process_group});
    }
    use.persistent.parameters = grown();
    torch::optim::AdamW optimizer(stack->parameters());
    stack(tokens).backward();
    use.persistent.gradients = grown();
    optimizer.step();
    use.persistent.optimizer_state = grown();

    optimizer.zero_grad(/*set_to_none=*/false);
    account.reset_peak();
    stack(tokens).backward();
    use.peak = account.peak() - before;
  });
  return uses;
}

std::vector<PersistentBytes> expected_persistent(const StackSpec& spec, int shards) {
  constexpr std::int64_t kElement = 4;
  constexpr std::int64_t kAligned = 64 / kElement;
  const auto units = units_of(spec);
  std::vector<PersistentBytes> ranks(static_cast<std::size_t>(std::max(1, shards)));
  for (const auto& unit : units) {
    std::vector<std::pair<std::int64_t, std::int64_t>> slots;  // begin and end
    for (const auto numel : unit) {
      const auto begin = slots.empty() ? 0 : rounded_up(slots.back().second, kAligned);
      slots.emplace_back(begin, begin + numel);
    }
    if (shards == 0) {
      for (const auto numel : unit) {
        ranks[0].parameters += kElement * numel;
        ranks[0].gradients += kElement * numel;
        ranks[0].optimizer_state += 2 * kElement * numel;
      }
      continue;
    }
    const auto chunk = rounded_up(slots.back().second, shards) / shards;
    for (int rank = 0; rank < shards; ++rank) {
      auto& bytes = ranks[static_cast<std::size_t>(rank)];
      bytes.parameters += kElement * chunk;
      bytes.gradients += kElement * chunk;
      for (const auto& [begin, end] : slots) {
        bytes.optimizer_state +=
            2 * kElement * overlap(begin, end, rank * chunk, (rank + 1) * chunk);
      }
    }
  }
  return ranks;
}

bool Growth::fits(int layers) const {
  if (exponent == 1) {
    return layers % per == 0;
  }
  const auto root = std::lround(std::sqrt(layers));
  return root * root == layers;
}

std::int64_t Growth::steps(int layers) const {
  return exponent == 1 ? layers / per : std::lround(std::sqrt(layers));
}

Growth expected_growth(const StackSpec& spec, const CheckpointPolicy& policy) {
  const auto [input, block] = stack_bytes(spec);
  const auto region = input + (policy.keeps_random_state ? kGenerators * kGeneratorState : 0);
  if (policy.segments) {
    // One more segment keeps its input, and one more layer is stored while a segment's backward
    // runs.
    return {.exponent = 0.5, .slope = region + block};
  }
  if (policy.every == 0) {
    return {.slope = block};
  }
  // Of so many layers one keeps its input, the others all.
  return {.slope = region + (policy.every - 1) * block, .per = policy.every};
}

std::pair<double, double> exponents_between(double a, double b, double exponent, double first,
                                            double last) {
  const auto at = [&](double layers) {
    const double growing = b * std::pow(layers, exponent);
    return exponent * growing / (a + growing);
  };
  return std::minmax(at(first), at(last));
}

}  // namespace shardproof
