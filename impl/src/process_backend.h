#pragma once
// The backend of a rank that is a process, over any transport.

#include <chrono>
#include <memory>
#include <string>

#include "fsdp/process_group.h"
#include "transport.h"

namespace fsdp {

/// The backend of one rank of a new group of processes. `name` appears in messages. Its destructor
/// finishes what the rank has posted, for at most the timeout, and tells the others that it left.
BackendPtr make_process_backend(std::unique_ptr<processes::Transport> transport, int rank,
                                int world_size, std::chrono::milliseconds timeout,
                                const std::string& name);

}  // namespace fsdp
