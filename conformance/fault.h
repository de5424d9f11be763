#pragma once
// What a fault is: a small named object that strikes at the library's observation points. The
// catalogue is in fault_injection/; the command takes one by name.

#include <fsdp/observer.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "reference/scenario.h"
#include "reference/trace.h"

namespace shardproof {

/// An observer that is told which step it is.
class StepObserver : public fsdp::Observer {
 public:
  void begin_step(int step) { step_ = step; }

 protected:
  int step() const { return step_; }

 private:
  int step_ = 0;
};

/// Where a fault strikes first, hence what the first divergence must name.
struct FaultSite {
  int step = 0;
  Quantity quantity{};
  std::string name;    // parameter; empty if it strikes all
  int rank = kNoRank;  // kNoRank if it strikes all
};

struct Fault {
  std::string name;
  std::string summary;  // one sentence, for --help
  /// The observer of one rank.
  std::function<std::unique_ptr<StepObserver>(const Scenario&, int rank)> make_observer;
  std::function<FaultSite(const Scenario&)> site;
};

}  // namespace shardproof
