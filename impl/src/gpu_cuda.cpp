// The CUDA half of gpu.h: devices, and torch's ProcessGroupNCCL.

#include "gpu.h"

#include <c10/cuda/CUDAFunctions.h>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace fsdp {
namespace {

int count() {
  return c10::cuda::device_count();  // 0 without a driver
}

void select(int device) {
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(device));
}

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

const RegisterGpus cuda({count, select, make_nccl});

}  // namespace
}  // namespace fsdp
