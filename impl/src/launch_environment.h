#pragma once
// What the environment tells of a rank: its place, and how the ranks meet.

#include <cstdint>
#include <string>

#include "fsdp/init.h"

namespace fsdp {

struct LaunchEnvironment {
  Placement placement;
  bool agent_store = false;        // torchrun's agent serves the store, and no rank does
  std::string run_id;              // torchrun's; "" elsewhere
  std::int64_t restart_count = 0;  // how often torchrun has started the ranks again
  bool one_node_assumed = false;   // nobody told the local rank
};

LaunchEnvironment read_launch_environment(const EnvironmentLookup& lookup);

/// getenv.
const char* process_environment(const char* name);

/// The first host of a Slurm node list: "n[003-010,12],m7" gives "n003"; "" if it is none.
std::string first_host(const std::string& node_list);

/// How many tasks the node of number `node` has, by a Slurm list: "4(x2),3" gives 4, 4, 3; -1 if
/// the list has no such node or is none.
int tasks_on_node(const std::string& tasks_per_node, int node);

}  // namespace fsdp
