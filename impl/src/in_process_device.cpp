#include "in_process_device.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace fsdp::in_process {
namespace {

using RedOpType = c10d::ReduceOp::RedOpType;

c10::Stream current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

at::Tensor view_of(const Slice& slice) {
  return slice.tensor->view({-1}).narrow(0, slice.offset, slice.numel);
}

at::ScalarType accumulation_dtype(at::ScalarType dtype) {
  return at::isReducedFloatingType(dtype) ? at::kFloat : dtype;
}

void combine(RedOpType reduction, at::Tensor& accumulator, const at::Tensor& value) {
  switch (reduction) {
    case RedOpType::PRODUCT:
      accumulator.mul_(value);
      return;
    case RedOpType::MIN:
      accumulator = at::minimum(accumulator, value);
      return;
    case RedOpType::MAX:
      accumulator = at::maximum(accumulator, value);
      return;
    default:
      accumulator.add_(value);
      return;
  }
}

}  // namespace

EventPtr record_current_stream(at::Device device) {
  if (device.is_cpu()) {
    return nullptr;
  }
  const auto event = std::make_shared<c10::Event>(device.type());
  event->record(current_stream(device));
  return event;
}

void order_current_stream_after(at::Device device, const std::vector<EventPtr>& events) {
  for (const auto& event : events) {
    if (event != nullptr) {
      event->block(current_stream(device));
    }
  }
}

void note_use_on_current_stream(const Call& call) {
  for (const auto& transfer : call.transfers) {
    for (const auto* slots : {&transfer.from, &transfer.to}) {
      for (const auto& tensor : slots->tensors()) {
        const auto device = tensor.device();
        c10::impl::VirtualGuardImpl(device.type())
            .recordDataPtrOnStream(tensor.storage().data_ptr(), current_stream(device));
      }
    }
  }
}

void copy_on_device(const Slice& from, const Slice& to) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::DeviceGuard guard(to.tensor->device());
  view_of(to).copy_(view_of(from), /*non_blocking=*/true);
}

void reduce_on_device(RedOpType reduction, std::span<const Slice> sources,
                      std::span<const Slice> targets) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto device = targets[0].tensor->device();
  const c10::DeviceGuard guard(device);
  const auto dtype = accumulation_dtype(targets[0].tensor->scalar_type());
  const auto load = [&](const Slice& slice) {
    return view_of(slice).to(device, dtype, /*non_blocking=*/true, /*copy=*/false);
  };
  at::Tensor accumulator = load(sources[0]).clone();
  for (const auto& source : sources.subspan(1)) {
    combine(reduction, accumulator, load(source));
  }
  if (reduction == RedOpType::AVG) {
    // By a tensor: division by a number is done as a multiplication by its rounded reciprocal.
    accumulator.div_(at::full({}, static_cast<double>(sources.size()), accumulator.options()));
  }
  for (const auto& target : targets) {
    view_of(target).copy_(accumulator, /*non_blocking=*/true);
  }
}

}  // namespace fsdp::in_process
