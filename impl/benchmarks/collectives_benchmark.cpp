// The time of an all-gather and a reduce-scatter between the ranks of an in_process group, beside
// that of copying as many bytes as they move with as many threads: the collectives should take no
// more than twice as long for large sizes. The size is that of the whole tensor (an all-gather's
// output, a reduce-scatter's input) on each rank.
//
// A benchmark is several batches of many rounds by all ranks, so that starting the threads does not
// count. It reports the time of a round in the fastest batch, which other load disturbs the least;
// bytes_per_second is what all ranks' inputs or outputs of that size make up.

#include <benchmark/benchmark.h>
#include <torch/torch.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstring>
#include <functional>
#include <limits>

#include "fsdp/process_group.h"

namespace {

using fsdp::RankContext;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kSmallest = 1 << 10;
constexpr std::int64_t kLargest = 64 << 20;

constexpr int kBatches = 7;

int rounds_for(std::int64_t bytes) {
  return static_cast<int>(std::clamp<std::int64_t>((128 << 20) / bytes, 2, 2000));
}

// Makes the buffers of one rank, and what it does with them in a round.
using MakeRound = std::function<std::function<void()>(RankContext&, std::int64_t bytes)>;

double seconds_per_round(int world_size, std::int64_t bytes, const MakeRound& make_round) {
  std::barrier together(world_size);
  const int rounds = rounds_for(bytes);
  double best = std::numeric_limits<double>::infinity();
  fsdp::run_ranks(world_size, [&](RankContext& context) {
    const auto round = make_round(context, bytes);
    round();  // touches the memory
    for (int batch = 0; batch < kBatches; ++batch) {
      together.arrive_and_wait();
      const auto start = Clock::now();
      for (int i = 0; i < rounds; ++i) {
        round();
      }
      together.arrive_and_wait();
      const std::chrono::duration<double> taken = Clock::now() - start;
      if (context.rank == 0) {
        best = std::min(best, taken.count() / rounds);
      }
    }
  });
  return best;
}

void measure(benchmark::State& state, const MakeRound& make_round) {
  const auto bytes = state.range(0);
  const auto world_size = static_cast<int>(state.range(1));
  for (auto _ : state) {
    state.SetIterationTime(seconds_per_round(world_size, bytes, make_round));
  }
  state.SetBytesProcessed(state.iterations() * bytes * world_size);
}

std::int64_t piece_of(std::int64_t bytes, const RankContext& context) {
  return bytes / static_cast<std::int64_t>(sizeof(float)) / context.world_size;
}

std::function<void()> all_gather_round(RankContext& context, std::int64_t bytes) {
  const auto piece = piece_of(bytes, context);
  auto input = torch::full({piece}, 1.0F);
  auto output = torch::zeros({piece * context.world_size});
  return [&group = *context.process_group, input, output]() mutable {
    group._allgather_base(output, input)->wait();
  };
}

std::function<void()> reduce_scatter_round(RankContext& context, std::int64_t bytes) {
  const auto piece = piece_of(bytes, context);
  auto input = torch::full({piece * context.world_size}, 1.0F);
  auto output = torch::zeros({piece});
  return [&group = *context.process_group, input, output]() mutable {
    group._reduce_scatter_base(output, input)->wait();
  };
}

std::function<void()> reduce_scatter_bfloat16_round(RankContext& context, std::int64_t bytes) {
  const auto piece = piece_of(bytes, context) * 2;
  auto input = torch::full({piece * context.world_size}, 1.0F, torch::kBFloat16);
  auto output = torch::zeros({piece}, torch::kBFloat16);
  return [&group = *context.process_group, input, output]() mutable {
    group._reduce_scatter_base(output, input)->wait();
  };
}

std::function<void()> memcpy_round(RankContext&, std::int64_t bytes) {
  auto input = torch::full({bytes}, 1, torch::kByte);
  auto output = torch::zeros({bytes}, torch::kByte);
  return [input, output, bytes] {
    std::memcpy(output.mutable_data_ptr(), input.const_data_ptr(), static_cast<std::size_t>(bytes));
    benchmark::ClobberMemory();
  };
}

void add(const char* name, const MakeRound& make_round) {
  benchmark::RegisterBenchmark(
      name, [make_round](benchmark::State& state) { measure(state, make_round); })
      ->ArgNames({"bytes", "ranks"})
      ->ArgsProduct({benchmark::CreateRange(kSmallest, kLargest, 16), {2, 4}})
      ->Iterations(1)
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond);
}

}  // namespace

int main(int argc, char** argv) {
  add("memcpy", memcpy_round);
  add("all_gather", all_gather_round);
  add("reduce_scatter", reduce_scatter_round);
  add("reduce_scatter_bfloat16", reduce_scatter_bfloat16_round);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 1;
  }
  benchmark::RunSpecifiedBenchmarks();
}
