#pragma once
// What a collective does with slices that are not in host memory: tensor operations on the current
// stream of the thread that carries the work out, and events that put it in order with the streams
// of the ranks whose tensors they are. Works for any device that libtorch has a guard for.

#include <c10/core/Event.h>

#include <memory>
#include <span>
#include <vector>

#include "in_process_call.h"

namespace fsdp::in_process {

using EventPtr = std::shared_ptr<c10::Event>;

/// A mark in this thread's current stream of `device`; null for the CPU, which has no streams.
EventPtr record_current_stream(at::Device device);

/// This thread's current stream of `device` goes on only after the events, of which some may be
/// null.
void order_current_stream_after(at::Device device, const std::vector<EventPtr>& events);

/// Lets the allocator know that this thread's current stream uses the tensors of the call, so that
/// their memory is not handed out again before the stream is done with it.
void note_use_on_current_stream(const Call& call);

/// Copies on the current streams; counts as no change for autograd.
void copy_on_device(const Slice& from, const Slice& to);

/// As `reduce_in_order`, on the device of the first target.
void reduce_on_device(c10d::ReduceOp::RedOpType reduction, std::span<const Slice> sources,
                      std::span<const Slice> targets);

}  // namespace fsdp::in_process
