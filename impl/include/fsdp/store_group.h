#pragma once
// Process groups of processes that have nothing in common but a c10d::Store, such as the TCPStore
// that torchrun starts: for launch tests and small jobs on CPUs, where neither MPI nor NCCL is.
// Every byte goes through the process that holds the store, so this is not the way to train fast.

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "fsdp/process_group.h"

namespace fsdp {

struct StoreGroupOptions {
  /// How long a rank waits in one collective for the others before it gives up; also how long it
  /// waits here for the others to join.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  /// Appears in messages, and in the keys of the store ("fsdp/NAME/..."). Groups that exist at the
  /// same time over one store need different names.
  std::string name = "world";
};

/// The backend of one rank of a group, once all `world_size` ranks have asked for theirs. Each is
/// to be used by one thread at a time. getBackendName() is "store".
///
/// It has the collectives, dtypes and reductions of an in_process group (process_group.h) with the
/// same results to the bit, and the same errors; `leave_group`, labels, make_device_mesh and
/// Backend::split work as there. A thread of its own moves the data, so collectives go on while the
/// program computes, and any number may be on their way in any number of groups. CUDA tensors are
/// copied to pinned host memory and back.
///
/// A timeout also ends a collective that all have called but in which a rank was stopped before its
/// data was sent. After the store was lost, calls end with a PeerError.
///
/// The store is used through a clone of it, by that thread alone: a TCPStore's connection is not
/// for two. Values are at most 2 MB, for a TCPStore takes no more than 8 MB in one. Each is removed
/// when it is read, and what nobody read when the last rank destroys its backend; one small key
/// stays for each name and size, which counts these groups, so that one can be made again over the
/// same store (after an error in this function, under another name). With a store that has no
/// queues (FileStore, a TCPStore without libuv), a rank that is killed at the wrong moment can make
/// ranks look missing whose messages came after its own.
///
/// The destructor finishes the collectives that this rank has called, for at most the timeout, and
/// tells the others that it left. The process that holds the store must outlive them.
///
/// Throws UsageError: the store is null, the rank is not in [0, world_size), the timeout is not
/// positive, another process has this rank, or the ranks were told different world sizes.
/// TimeoutError: some ranks did not join; the message names them.
BackendPtr make_store_group(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
                            StoreGroupOptions options = {});

}  // namespace fsdp
