#pragma once
// What a fault is: a small named object that strikes at the library's observation points. The
// catalogue is in fault_injection/; the command takes one by name.

#include <fsdp/observer.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "reference/scenario.h"
#include "reference/trace.h"

namespace shardproof {

/// Where a fault has changed something: what the first divergence must name.
struct Strike {
  int step = 0;
  int rank = 0;
  Quantity quantity{};
  std::string name;  // of the parameter, or "total_norm", or the region of a recomputed activation;
                     // empty if it touched all parameters
  std::int64_t element = -1;  // in the flattened parameter; -1 if it touched more than one
};

/// The strikes of all ranks.
class StrikeLog {
 public:
  void add(Strike strike) {
    const std::lock_guard lock(mutex_);
    strikes_.push_back(std::move(strike));
  }
  /// Those since the last call.
  std::vector<Strike> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(strikes_, {});
  }
  /// By step and rank, whichever rank's thread came first; those of a rank as they happened.
  std::vector<Strike> strikes() const {
    const std::lock_guard lock(mutex_);
    auto sorted = strikes_;
    std::stable_sort(sorted.begin(), sorted.end(), [](const Strike& a, const Strike& b) {
      return std::tie(a.step, a.rank) < std::tie(b.step, b.rank);
    });
    return sorted;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<Strike> strikes_;
};

/// An observer that is told which step it is, and tells where it struck. A fault that found nothing
/// to change says nothing, so that it can be told from one that was missed.
class StepObserver : public fsdp::Observer {
 public:
  void begin_step(int step) { step_ = step; }
  void log_to(std::shared_ptr<StrikeLog> log) { log_ = std::move(log); }

 protected:
  int step() const { return step_; }
  void struck(int rank, Quantity quantity, std::string name, std::int64_t element = -1) {
    if (log_ != nullptr) {
      log_->add({step_, rank, quantity, std::move(name), element});
    }
  }

 private:
  int step_ = 0;
  std::shared_ptr<StrikeLog> log_;
};

/// Nothing is planted on this rank.
class NoFault : public StepObserver {
 public:
  void observe(const fsdp::Observation& /*seen*/) override {}
};

struct Fault {
  std::string name;
  std::string summary;  // one sentence, for --help
  /// The observer of one rank.
  std::function<std::unique_ptr<StepObserver>(const Scenario&, int rank)> make_observer;
  /// What a scenario must have for the fault to strike in it, as options of the command, for
  /// example "--checkpointing all --dropout 0.1"; "" where any scenario with clipping on more than
  /// one shard will do.
  std::string needs{};
  /// Changes a scenario into one that has it, as little as that takes; null if nothing is needed.
  std::function<void(Scenario&)> adapt{};
};

}  // namespace shardproof
