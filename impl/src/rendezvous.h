#pragma once
// Where the ranks of a launched program meet: the store at the master address, and the roll call
// in it, which finds ranks that are missing, given twice, or of another mind about the job.

#include <chrono>
#include <cstdint>
#include <string>

#include "bounded_store.h"
#include "launch_environment.h"

namespace fsdp {

/// Connects to the store at the master address; rank 0 serves it first, unless torchrun's agent
/// does. An address that is not there yet is tried again until the timeout. The store never waits
/// longer than its timeout (bounded_store.h).
///
/// Throws UsageError: no address is told, no name service knows it (until the timeout), the port is
/// taken. TimeoutError: nobody listens there, or what listens is no store.
StorePtr connect_store(const LaunchEnvironment& environment, std::chrono::milliseconds timeout);

/// What the ranks of a group must agree on, and this rank's part in it.
struct RollCall {
  int rank = 0;
  int world_size = 1;
  std::string settings;           // must be equal on all ranks: "backend=store checking=0"
  bool one_node_assumed = false;  // then all hosts must be the same
  bool agent_store = false;       // else rank 0 serves the store, and it ends with rank 0's process
  bool serves_store() const { return rank == 0 && !agent_store; }
};

/// Waits until every rank is there. `store` must be fresh for this group (prefixed).
///
/// Throws UsageError on every rank that is there: ranks differ in world size or settings, a rank is
/// given twice or too large, or ranks that take themselves to be on one node are on several.
/// TimeoutError: ranks are missing; they are named. PeerError: the store's server went away.
void meet(const StorePtr& store, const RollCall& mine, std::chrono::milliseconds timeout);

/// Says that this rank needs the store no more. A rank that serves the store waits for the others.
/// Once all have left, the keys of meet() and leave() are gone. Throws as destroy_process_group
/// does.
void leave(const StorePtr& store, const RollCall& mine, std::chrono::milliseconds timeout);

}  // namespace fsdp
