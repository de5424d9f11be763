#pragma once
// What the default group asks of GPUs. The CUDA half of the library registers an implementation;
// programs that do not link it have no GPUs.

#include <chrono>

#include "bounded_store.h"
#include "fsdp/process_group.h"

namespace fsdp {

struct Gpus {
  int (*count)();
  void (*select)(int device);
  /// Null if it was built without NCCL.
  BackendPtr (*make_nccl)(const StorePtr& store, int rank, int world_size, int device,
                          std::chrono::milliseconds timeout);
};

/// Null without the CUDA half.
const Gpus* gpus();

struct RegisterGpus {
  explicit RegisterGpus(const Gpus& implementation);
};

}  // namespace fsdp
