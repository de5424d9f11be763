#include "conformance/cost_measurement.h"

#include <fsdp/process_group.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "conformance/operation_count.h"

namespace shardproof {

MeasuredStep measure_step(const StackSpec& spec, const CheckpointPolicy& policy, std::uint64_t seed,
                          int repeats) {
  MeasuredStep result;
  fsdp::run_ranks(1, [&](fsdp::RankContext&) {
    LayerStack stack(spec, policy, seed);
    const auto tokens = stack_tokens(spec, seed);
    {
      OperationCount count;
      stack(tokens).backward();
      result.operations = {count.operations(Phase::forward), count.operations(Phase::recomputation),
                           count.operations(Phase::backward)};
    }
    std::vector<double> times;
    for (int i = 0; i < repeats; ++i) {
      const auto start = std::chrono::steady_clock::now();
      stack(tokens).backward();
      const std::chrono::duration<double, std::milli> taken =
          std::chrono::steady_clock::now() - start;
      times.push_back(taken.count());
    }
    if (!times.empty()) {
      const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
      std::nth_element(times.begin(), middle, times.end());
      result.milliseconds = *middle;
    }
  });
  return result;
}

StepOperations expected_operations(const StackSpec& spec, const CheckpointPolicy& policy) {
  const auto one = stack_operations(spec);
  StepOperations expected;
  expected.forward = spec.layers * one.block + one.head;
  expected.backward = 2 * expected.forward;
  for (const auto layers : policy.regions(spec.layers)) {
    expected.recomputation += layers * one.block - (policy.early_stop ? one.down : 0);
  }
  return expected;
}

}  // namespace shardproof
