// What sharding costs: a training step of the main job's transformer with 2 in-process ranks,
// beside the same two micro-batches computed by two threads that each hold the whole model and do
// not speak to each other. Run it with
//   --benchmark_repetitions=20 --benchmark_enable_random_interleaving=true
//   --benchmark_report_aggregates_only=true
// so that both are measured in turns, and compare the medians.

#include <benchmark/benchmark.h>
#include <fsdp/fully_shard.h>
#include <fsdp/process_group.h>
#include <torch/torch.h>

#include <barrier>
#include <functional>
#include <thread>

#include "reference/data.h"
#include "reference/models.h"
#include "reference/scenario.h"

namespace shardproof {
namespace {

constexpr int kRanks = 2;

Scenario main_job() {
  Scenario scenario;
  scenario.world_size = kRanks;
  scenario.data.kind = "synthetic";
  return scenario;
}

/// Threads that wait, run one step all together when told, and wait again.
class RankThreads {
 public:
  /// `prepare` runs on each rank and returns that rank's step.
  explicit RankThreads(std::function<std::function<void(int)>(fsdp::RankContext&)> prepare)
      : gate_(kRanks + 1), thread_([this, prepare = std::move(prepare)] {
          fsdp::run_ranks(kRanks, [&](fsdp::RankContext& context) {
            const auto step = prepare(context);
            for (int count = 0;; ++count) {
              gate_.arrive_and_wait();
              if (stop_) {
                return;
              }
              step(count);
              gate_.arrive_and_wait();
            }
          });
        }) {}
  ~RankThreads() {
    stop_ = true;
    gate_.arrive_and_wait();
    thread_.join();
  }
  void step() {
    gate_.arrive_and_wait();
    gate_.arrive_and_wait();
  }

 private:
  std::barrier<> gate_;
  bool stop_ = false;
  std::thread thread_;
};

std::function<void(int)> trainer(fsdp::RankContext& context, bool sharded, bool with_optimizer) {
  const auto scenario = main_job();
  auto model = make_model(scenario);
  load_parameters(*model, initial_parameters(scenario));
  if (sharded) {
    for (const auto& layer : model->layers()) {
      fsdp::fully_shard(layer.module, {context.process_group});
    }
    fsdp::fully_shard(model, {context.process_group});
  }
  auto optimizer =
      std::make_shared<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(1e-3));
  auto data = std::make_shared<Dataset>(scenario);
  return [model, optimizer, data, rank = context.rank, sharded, with_optimizer](int step) mutable {
    const auto batch = data->batch(step, 0, rank);
    optimizer->zero_grad();
    model->loss(model(batch.input), batch.target).backward();
    if (!with_optimizer) {
      return;
    }
    if (sharded) {
      fsdp::clip_grad_norm_(*model, 1.0);
    } else {
      torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    }
    optimizer->step();
  };
}

void measure(benchmark::State& state, bool sharded, bool with_optimizer) {
  RankThreads threads(
      [&](fsdp::RankContext& context) { return trainer(context, sharded, with_optimizer); });
  threads.step();
  threads.step();
  for (auto _ : state) {
    threads.step();
  }
}

BENCHMARK_CAPTURE(measure, step_whole, false, true)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK_CAPTURE(measure, step_fsdp, true, true)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK_CAPTURE(measure, forward_backward_whole, false, false)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();
BENCHMARK_CAPTURE(measure, forward_backward_fsdp, true, false)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

}  // namespace
}  // namespace shardproof

BENCHMARK_MAIN();
