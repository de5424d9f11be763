// One rank of a launched program, as the tests of launching start it: joins the default group,
// calls one collective of each kind, holds the results to closed forms, prints a digest of them,
// and ends. Faults are asked for by options. Exit codes are the project's
// (conformance/exit_codes.h).

#include <fsdp/checking.h>
#include <fsdp/errors.h>
#include <fsdp/init.h>
#include <signal.h>
#include <unistd.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "conformance/exit_codes.h"

namespace shardproof {
namespace {

struct Options {
  std::string backend;
  std::string library;
  double timeout = 30;  // seconds
  int cycles = 1;       // of init and destroy
  std::string fault;    // what goes wrong
  int fault_rank = 1;   // on which rank
  bool pause = false;   // after the collectives, until a signal
  bool leaks = false;   // compare what the process holds after the first and the last cycle
  std::string tag;      // to be found by in the list of processes
};

using Tensors = std::vector<at::Tensor>;

class WrongResult : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// FNV-1a over the bytes of the results, in the order of the calls.
class Digest {
 public:
  void add(const at::Tensor& tensor) {
    const auto* bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
    for (std::size_t i = 0; i < tensor.nbytes(); ++i) {
      value_ = (value_ ^ bytes[i]) * 1099511628211ULL;
    }
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 14695981039346656037ULL;
};

void expect(const char* what, const at::Tensor& got, const at::Tensor& want) {
  if (!at::equal(got, want)) {
    throw WrongResult("rank " + std::to_string(fsdp::rank()) + ": " + what + ": got [" +
                      c10::str(got) + "], wanted [" + c10::str(want) + "]");
  }
}

void strike(const Options& options, const std::string& place) {
  const auto dash = options.fault.find('-');
  if (options.fault.substr(dash + 1) != place || fsdp::rank() != options.fault_rank) {
    return;
  }
  const auto what = options.fault.substr(0, dash);
  std::fflush(nullptr);
  if (what == "kill") {
    ::raise(SIGKILL);
  } else if (what == "stop") {
    ::raise(SIGSTOP);
  } else if (what == "leave") {
    ::_exit(0);  // a rank that finishes early
  }
}

/// One collective of each kind, on small whole numbers, so that sums are exact in any order.
/// Returns a digest that is the same on all ranks.
std::uint64_t run_collectives(const fsdp::BackendPtr& group, const Options& options) {
  const auto size = group->getSize();
  const auto rank = group->getRank();
  Digest digest;
  const auto ranks = at::arange(size, at::kFloat);

  // All-gather: rank r brings r + [0, 0.25, 0.5].
  auto mine = at::arange(3, at::kFloat) / 4 + rank;
  auto all = at::empty({size * 3}, at::kFloat);
  if (options.fault == "mismatch" && rank == options.fault_rank) {
    Tensors other{mine};
    group->allreduce(other, {})->wait();
  } else {
    group->_allgather_base(all, mine, {})->wait();
  }
  expect("all-gather", all,
         (ranks.repeat_interleave(3) + (at::arange(3, at::kFloat) / 4).repeat({size})));
  digest.add(all);
  strike(options, "collective");

  // Reduce-scatter: element i of rank r's input is r * i, so piece p is p * n(n-1)/2.
  auto input = at::arange(size, at::kFloat) * rank;
  auto piece = at::empty({1}, at::kFloat);
  c10d::ReduceScatterOptions reduce_scatter;
  group->_reduce_scatter_base(piece, input, reduce_scatter)->wait();
  expect("reduce-scatter", piece, at::full({1}, rank * size * (size - 1) / 2, at::kFloat));

  // All-reduce: the mean of r is (n - 1) / 2.
  Tensors mean{at::full({5}, rank, at::kDouble)};
  c10d::AllreduceOptions average;
  average.reduceOp = c10d::ReduceOp::AVG;
  group->allreduce(mean, average)->wait();
  expect("all-reduce", mean[0], at::full({5}, (size - 1) / 2.0, at::kDouble));
  digest.add(mean[0]);

  // Broadcast from the last rank.
  Tensors sent{at::full({4}, rank, at::kLong)};
  c10d::BroadcastOptions broadcast;
  broadcast.rootRank = size - 1;
  group->broadcast(sent, broadcast)->wait();
  expect("broadcast", sent[0], at::full({4}, size - 1, at::kLong));
  digest.add(sent[0]);

  group->barrier({})->wait();
  return digest.value();
}

void run_cycle(const Options& options) {
  if (options.fault == "kill-init" || options.fault == "stop-init") {
    const auto place = fsdp::read_placement();
    if (place.rank == options.fault_rank) {
      ::raise(options.fault == "kill-init" ? SIGKILL : SIGSTOP);
    }
  }
  fsdp::InitOptions init;
  init.backend = options.backend;
  init.backend_library = options.library;
  init.timeout = std::chrono::milliseconds(static_cast<long>(options.timeout * 1000));
  const auto group = fsdp::init_process_group(init);
  fsdp::set_device(fsdp::local_rank());
  strike(options, "ready");
  const auto digest = run_collectives(group, options);
  const auto& place = fsdp::placement();
  std::printf("rank %d of %d (local %d of %d, %s, %s): digest %016llx\n", place.rank,
              place.world_size, place.local_rank, place.local_world_size, place.launcher.c_str(),
              group->getBackendName().c_str(), static_cast<unsigned long long>(digest));
  std::fflush(stdout);
  if (options.pause) {
    std::this_thread::sleep_for(std::chrono::minutes(10));
  }
  strike(options, "destroy");
  fsdp::destroy_process_group();
}

/// Rank 0 may serve the store in which the others still read what went wrong.
void leave_in_good_order() {
  try {
    fsdp::destroy_process_group();
  } catch (const std::exception&) {
    // What came first was said.
  }
}

/// What a process holds; memory in pages.
struct Holdings {
  long files = 0;
  long threads = 0;
  long memory = 0;
};

long entries(const char* folder) {
  return std::distance(std::filesystem::directory_iterator(folder), {});
}

Holdings holdings() {
  Holdings now;
  std::ifstream("/proc/self/statm") >> now.memory >> now.memory;  // the second is what is resident
  now.files = entries("/proc/self/fd");
  now.threads = entries("/proc/self/task");
  return now;
}

void check_leaks(const Holdings& first) {
  constexpr long kPages = 8L << 20 >> 12;                // 8 MiB
  std::this_thread::sleep_for(std::chrono::seconds(1));  // threads end in their own time
  const auto last = holdings();
  if (last.files > first.files || last.threads > first.threads ||
      last.memory > first.memory + kPages) {
    throw WrongResult("files " + std::to_string(first.files) + " -> " + std::to_string(last.files) +
                      ", threads " + std::to_string(first.threads) + " -> " +
                      std::to_string(last.threads) + ", pages " + std::to_string(first.memory) +
                      " -> " + std::to_string(last.memory) + "; wanted: no more than at first");
  }
}

int run(const Options& options) {
  int code = kExitHeld;
  Holdings first;
  const auto say = [&](int ends_with, const char* what) {
    std::fprintf(stderr, "%s\n", what);
    code = ends_with;
  };
  try {
    for (int cycle = 0; cycle < options.cycles; ++cycle) {
      run_cycle(options);
      if (cycle == 0 && options.leaks) {
        std::this_thread::sleep_for(std::chrono::seconds(1));
        first = holdings();
      }
    }
    if (options.leaks) {
      check_leaks(first);
    }
    if (options.fault == "destroy-twice") {
      fsdp::destroy_process_group();
    } else if (options.fault == "use-after-destroy") {
      fsdp::default_process_group();
    }
  } catch (const WrongResult& error) {
    say(kExitFailed, error.what());
  } catch (const fsdp::UsageError& error) {
    say(kExitUsage, error.what());
  } catch (const fsdp::TimeoutError& error) {
    say(kExitTimedOut, error.what());
  } catch (const c10::Error& error) {
    say(kExitBroken, error.what_without_backtrace());
  } catch (const std::exception& error) {
    say(kExitBroken, error.what());
  }
  if (fsdp::is_initialized()) {
    leave_in_good_order();
  }
  return code;
}

}  // namespace
}  // namespace shardproof

int main(int argc, char** argv) {
  shardproof::Options options;
  CLI::App app{"One rank of a launched program"};
  app.add_option("--backend", options.backend);
  app.add_option("--backend-library", options.library);
  app.add_option("--timeout", options.timeout, "seconds");
  app.add_option("--cycles", options.cycles, "of init and destroy");
  app.add_option("--fault", options.fault,
                 "kill, stop or leave, then -init, -ready, -collective or -destroy; mismatch; "
                 "destroy-twice; use-after-destroy");
  app.add_option("--fault-rank", options.fault_rank);
  app.add_flag("--pause", options.pause, "wait for a signal after the collectives");
  app.add_flag("--leaks", options.leaks, "files, threads and memory must not grow over the cycles");
  app.add_option("--tag", options.tag, "to be found by in the list of processes");
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  const int code = shardproof::run(options);
  std::fflush(nullptr);
  // After an error a backend may be in the middle of something that never ends.
  if (code != shardproof::kExitHeld) {
    ::_exit(code);
  }
  return code;
}
