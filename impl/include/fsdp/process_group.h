#pragma once
// Process groups. A process group is a c10d::Backend: the interface that libtorch, NCCL and every
// vendor's collective library already speak. This header makes the one that needs nothing installed
// and no launcher: in_process, whose ranks are threads of this process.

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace fsdp {

using Backend = c10d::Backend;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

/// The largest world size of an in_process group.
inline constexpr int kMaxInProcessRanks = 512;

struct InProcessOptions {
  /// How long a rank waits in one collective for the others before it gives up.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  /// Appears in messages.
  std::string name = "world";
};

/// One backend per rank, [world_size] of them, that together form a group. Each is to be used by one
/// thread at a time. getBackendName() is "in_process".
///
/// Collectives: all-gather, reduce-scatter, all-reduce, broadcast, all-to-all, gather, scatter, reduce,
/// barrier, send, recv, in the list and in the flat ("_base", "_into_tensor") forms, for every
/// floating-point and integer dtype and bool, on CPU and CUDA tensors.
/// Reductions: sum, mean (AVG), min, max, product; they combine the ranks' values in rank order
/// (((x0 + x1) + x2) + ...), in an accumulation dtype: float for Half and BFloat16, else the tensor's
/// own; the result is rounded to the tensor's dtype once. AVG divides the sum by the world size in the
/// accumulation dtype, and is refused for integers. NaN propagates through min and max.
///
/// Every collective is asynchronous: it returns a Work, and the tensors may be read or written only
/// after wait() returned. A rank that waits also does the pending share of ranks that are busy.
///
/// Errors. UsageError: world_size is not in [1, kMaxInProcessRanks]. From a collective or its wait():
/// MismatchError on every rank if the ranks' calls do not match, TimeoutError if some rank did not arrive in
/// time (the message names the ranks that are missing), PeerError if a rank left (see `leave_group`). After
/// any of these the group is broken and every further call fails with the same error.
std::vector<BackendPtr> make_in_process_group(int world_size, InProcessOptions options = {});

/// Tells the others of an in_process group that this rank will take no further part, and why. Their pending and
/// later collectives end with a PeerError that names this rank and the reason. Harmless for a rank that the others
/// no longer wait for. Does nothing for other backends.
void leave_group(Backend& backend, const std::string& reason);

/// What a rank's body is given by `run_ranks`.
struct RankContext {
  int rank = 0;
  int world_size = 1;
  BackendPtr process_group;
};

struct RunRanksOptions {
  InProcessOptions group;
  /// Threads that an operator may use inside one rank. Kernels split sums over threads, so this decides bits.
  int intra_op_threads = 1;
  /// The rank's own random generator (see random.h) is seeded from this and the rank.
  std::uint64_t seed = 0;
};

/// Runs `body` once per rank, each on a thread of its own, and returns when all have ended. Each thread has
/// its intra-op thread count, its autograd (backward runs on the rank's own thread for every device) and its own
/// random generator. If a body throws, the others are told by `leave_group`; once all ended, the first exception in time
/// (the cause, not its echoes) is rethrown with its type kept, and its message preceded by "rank R: " if it is an fsdp::Error or
/// a std::exception that does not name the rank yet.
void run_ranks(int world_size, const std::function<void(RankContext&)>& body,
               const RunRanksOptions& options = {});

}  // namespace fsdp
