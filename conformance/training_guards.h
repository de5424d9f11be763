#pragma once
// Asks of a whole run whether its checks could have shown anything.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "conformance/verdict.h"
#include "reference/scenario.h"
#include "reference/trace.h"

namespace shardproof {

/// Guards: did the run train, and were the checks able to see anything? Fed with each step of the
/// subject; the verdicts come at the end: losses are finite and moved; no parameter's gradient was
/// zero in every step; parameters moved, and those that are frozen or have no gradient did not;
/// clipping bit at least once if it was asked for; every checkpointed region ran again in every
/// step, if there are any; every rank had its own data (losses differ over ranks); no single copy
/// stood for all ranks; every quantity was there at every step, and every step of the scenario. A
/// step that was left out because a scaled gradient was not finite counts for none of them.
class TrainingGuards {
 public:
  /// `start`: the weights before the first step, so that what the first step does to them counts.
  explicit TrainingGuards(const Scenario& scenario, std::map<std::string, at::Tensor> start = {});
  ~TrainingGuards();
  void observe(const StepTrace& subject);
  std::vector<Verdict> verdicts() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace shardproof
