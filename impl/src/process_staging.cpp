#include "process_staging.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace fsdp::processes {
namespace {

at::Tensor pinned_like(const at::Tensor& tensor) {
  return at::empty(
      tensor.sizes(),
      at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU).pinned_memory(true));
}

}  // namespace

Staging::Staging(in_process::Call& call) : device_(call.device()) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::DeviceGuard guard(device_);
  call.stated_device = device_;
  for (auto& transfer : call.transfers) {
    std::vector<at::Tensor> given;
    for (const auto& tensor : transfer.from.tensors()) {
      given.push_back(pinned_like(tensor));
      given.back().copy_(tensor, /*non_blocking=*/true);
    }
    transfer.from = transfer.from.with(std::move(given));
    std::vector<at::Tensor> taken;
    for (const auto& tensor : transfer.to.tensors()) {
      taken.push_back(pinned_like(tensor));
      taken_.push_back({taken.back(), tensor});
    }
    transfer.to = transfer.to.with(std::move(taken));
  }
  copied_ = in_process::record_current_stream(device_);
}

bool Staging::is_ready() const {
  return copied_->query();
}

in_process::EventPtr Staging::copy_back() const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::DeviceGuard guard(device_);
  const c10::impl::VirtualGuardImpl device(device_.type());
  const auto stream = device.getStream(device_);
  // What the program did with these tensors before the call comes first.
  copied_->block(stream);
  for (const auto& [staged, wanted] : taken_) {
    wanted.copy_(staged, /*non_blocking=*/true);
    device.recordDataPtrOnStream(wanted.storage().data_ptr(), stream);
  }
  return in_process::record_current_stream(device_);
}

}  // namespace fsdp::processes
