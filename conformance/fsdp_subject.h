#pragma once
// The subject that this project ships: a scenario trained by its own FSDP, step by step, on ranks
// that are threads of this process or processes of their own.

#include <fsdp/process_group.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "conformance/fault.h"
#include "reference/scenario.h"
#include "reference/trace.h"

namespace shardproof {

/// libtorch's optimizer of that kind over the parameters, which may be shards.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const OptimizerSpec& spec,
                                                        std::vector<torch::Tensor> parameters);

class FsdpSubject {
 public:
  struct Options {
    const Fault* fault = nullptr;
    /// Where the fault's strikes are written down, if anywhere.
    std::shared_ptr<StrikeLog> strikes;
    /// How long a rank waits for the others in one collective.
    std::chrono::milliseconds timeout = std::chrono::minutes(5);
    /// This process's part of a group of processes, which is rank 0's for an FsdpSubject; the
    /// others call follow(). Null: all ranks are threads of this process.
    fsdp::BackendPtr process_group{};
    /// Called on each rank's thread before each step; tests throw from it.
    std::function<void(int rank, int step)> before_step;
    /// Called on each rank's thread within the forward of each layer.
    std::function<void(int rank, int step)> in_forward;
    /// Steps that the ranks may be ahead of the reader.
    int steps_ahead = 2;
  };

  /// Starts the ranks.
  FsdpSubject(const Scenario& scenario, std::map<std::string, torch::Tensor> initial,
              Options options);
  FsdpSubject(const Scenario& scenario, std::map<std::string, torch::Tensor> initial)
      : FsdpSubject(scenario, std::move(initial), Options()) {}
  /// Stops the ranks if they still run.
  ~FsdpSubject();

  /// The next step's trace, waiting for it; nothing after the last step. Rethrows what a rank
  /// threw.
  std::optional<StepTrace> next();

  /// After the last step, with processes: tells the other ranks the code with which all are to end.
  void conclude(int code);

  /// What a rank other than 0 does: trains, sends its traces to rank 0, and returns the code that
  /// rank 0 concludes with. Throws what it itself meets, and fsdp::PeerError if another rank ends.
  static int follow(const Scenario& scenario, const std::map<std::string, torch::Tensor>& initial,
                    const Options& options);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace shardproof
