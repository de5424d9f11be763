#pragma once
// Process groups. A process group is a c10d::Backend: the interface that libtorch, NCCL and every
// vendor's collective library already speak. This header makes the one that needs nothing installed
// and no launcher: in_process, whose ranks are threads of this process.

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
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

/// One backend per rank, [world_size] of them, that together form a group. Each is to be used by
/// one thread at a time. getBackendName() is "in_process".
///
/// Collectives: all-gather, reduce-scatter, all-reduce, broadcast, all-to-all, gather, scatter,
/// reduce, barrier, send, recv, in the list and in the flat ("_base", "_into_tensor") forms, for
/// every floating-point and integer dtype and bool, on dense contiguous CPU and CUDA tensors. What
/// only moves values takes every dtype; what reduces takes no floating-point type under 16 bits.
/// UInt16, UInt32 and UInt64 are reduced on the CPU only.
/// Reductions: sum, mean (AVG), min, max, product; they combine the ranks' values in rank order
/// (((x0 + x1) + x2) + ...), in an accumulation dtype: float for Half and BFloat16, else the
/// tensor's own; the result is rounded to the tensor's dtype once. AVG divides the sum by the world
/// size in the accumulation dtype, and is refused for integers and bool. Integers wrap around; for
/// bool, sum and max are "or", product and min are "and". NaN propagates through min and max. Other
/// reductions are refused.
///
/// Backend::split makes a group of some of the ranks; its members call it with the same list (the
/// store and the options are not used). Who leaves a group leaves those that were split from it.
///
/// Every collective is asynchronous: it returns a Work, and the tensors may be read or written only
/// after wait() returned. A rank that waits also does the pending share of ranks that are busy. A
/// Work may be dropped without a wait. Autograd does not see the tensors change. A rank's results
/// may lie over its own inputs: where both are the rank's own piece (the in-place all-gather and
/// reduce-scatter), at no cost, anywhere else for the price of a copy of the inputs.
///
/// Errors. UsageError: world_size is not in [1, kMaxInProcessRanks], or the timeout is not
/// positive. From a collective, on the rank that calls it and with nothing posted: UsageError if
/// its arguments are wrong by themselves (sizes, dtypes, a root that does not exist, ...). From a
/// collective or its wait(): MismatchError on every rank if the ranks' calls do not match (the
/// message says who called what), TimeoutError if some rank did not arrive in time (the message
/// names the ranks that are missing), PeerError if a rank left (see `leave_group`). After any of
/// these three the group is broken and every further call fails with the same error. The time runs
/// from the start of wait(); for a Work that is only polled, from the call.
std::vector<BackendPtr> make_in_process_group(int world_size, InProcessOptions options = {});

/// Tells the others of a group that this rank will take no further part, and why. Their
/// pending and later collectives that need it end with a PeerError that names this rank and the
/// reason; what it posted before is still done. Harmless for a rank that the others no longer wait
/// for. Destroying a backend and its shutdown() do the same. Does nothing for backends that are not
/// of this library (in_process, store, mpi).
void leave_group(Backend& backend, const std::string& reason);

/// While it lives, this thread's collectives bear a label. The ranks of this library's groups must
/// agree on it as on sizes and dtypes, and messages show it, so that two collectives of the same
/// size that belong to different modules are never mixed up (the fault of pytorch/pytorch#75902).
/// Other backends do not see it. The text must outlive the scope.
class CollectiveLabel {
 public:
  explicit CollectiveLabel(std::string_view text);
  ~CollectiveLabel();
  CollectiveLabel(const CollectiveLabel&) = delete;
  CollectiveLabel& operator=(const CollectiveLabel&) = delete;
  /// The innermost label of this thread, or "".
  static std::string_view current();

 private:
  std::string_view previous_;
};

/// Replicas x shards: world rank i * S + j is replica i of shard j. One rank's view of it.
struct DeviceMesh {
  BackendPtr replicate;  // the ranks with the same shard, in order of their replica
  BackendPtr shard;      // the ranks with the same replica, in order of their shard
};

/// Cuts `world` into `replicas` groups that shard and their counterparts that replicate, by
/// Backend::split; sizes of 1 are allowed on both axes. Every rank of `world` must call it. Throws
/// UsageError: world is null, cannot be split, or its size is no multiple of `replicas`.
DeviceMesh make_device_mesh(const BackendPtr& world, int replicas);

/// The group of these ranks of `world`, which must all call it with the same list; the calling
/// rank's number in it is its place in the list. A list of all ranks in order gives `world` itself.
/// Throws UsageError if the calling rank is not in the list.
BackendPtr split_group(const BackendPtr& world, const std::vector<int>& ranks);

/// What a rank's body is given by `run_ranks`.
struct RankContext {
  int rank = 0;
  int world_size = 1;
  BackendPtr process_group;
};

struct RunRanksOptions {
  InProcessOptions group;
  /// Threads that an operator may use inside one rank. Kernels split sums over threads, so this
  /// decides bits.
  int intra_op_threads = 1;
  /// The rank's own random generator (see random.h) is seeded from this and the rank.
  std::uint64_t seed = 0;
  /// Lets the process keep freed memory for the next step instead of giving it back to the system
  /// (glibc's mallopt, for the whole process and for good). Measured on a 3.3 million parameter
  /// transformer with 2 ranks: a step goes from 1.14 to 1.05 times that of two threads without
  /// sharding.
  bool keep_freed_memory = true;
};

/// Runs `body` once per rank, each on a thread of its own, and returns when all have ended. Each
/// thread has its intra-op thread count, its autograd (backward runs on the rank's own thread for
/// every device) and its own random generator. If a body throws or returns, the others are told by
/// `leave_group`. Once all ended, the first exception in time is rethrown with its type kept; a
/// PeerError, which is the echo of another rank's end, only if there is nothing else. If the
/// message does not name the rank, "rank R: " is put before that of an fsdp::Error or a standard
/// exception, and "rank R" is added to the context of a c10::Error; other types are rethrown as
/// they are.
void run_ranks(int world_size, const std::function<void(RankContext&)>& body,
               const RunRanksOptions& options = {});

/// Runs `body` on this thread as one rank of a group whose other ranks run elsewhere, in other
/// processes or threads: it is set up, ended and its exception named as `run_ranks` does for each
/// of its ranks. `options.group` is not used. Throws UsageError if the group is null.
void run_rank(const BackendPtr& group, const std::function<void(RankContext&)>& body,
              const RunRanksOptions& options = {});

}  // namespace fsdp
