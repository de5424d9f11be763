#pragma once
// The subject that this project ships: a scenario trained by its own FSDP on in-process ranks, step
// by step.

#include <torch/types.h>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "conformance/fault.h"
#include "reference/scenario.h"
#include "reference/trace.h"

namespace shardproof {

class FsdpSubject {
 public:
  struct Options {
    const Fault* fault = nullptr;
    /// Where the fault's strikes are written down, if anywhere.
    std::shared_ptr<StrikeLog> strikes;
    /// How long a rank waits for the others in one collective.
    std::chrono::milliseconds timeout = std::chrono::minutes(5);
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

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace shardproof
