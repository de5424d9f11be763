// The CUDA half of gpu.h: devices, and torch's ProcessGroupNCCL where NCCL's header was found.

#include <c10/cuda/CUDAFunctions.h>

#include "gpu.h"

#ifdef SHARDPROOF_WITH_NCCL
#define USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

namespace fsdp {
namespace {

int count() {
  return c10::cuda::device_count();  // 0 without a driver
}

void select(int device) {
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(device));
}

#ifdef SHARDPROOF_WITH_NCCL
BackendPtr make_nccl(const StorePtr& store, int rank, int world_size, int device,
                     std::chrono::milliseconds timeout) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  auto group = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, world_size, options);
  // The communicator is made now, where all ranks are known to be here, and on the device that
  // was meant: made at the first collective it would take whatever device is current then.
  group->eagerConnectSingleDevice(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device)));
  return group;
}
#else
constexpr decltype(Gpus::make_nccl) make_nccl = nullptr;
#endif

const RegisterGpus cuda({count, select, make_nccl});

}  // namespace
}  // namespace fsdp
