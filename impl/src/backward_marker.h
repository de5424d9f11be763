#pragma once
// Marks a place in the autograd graph: an identity whose backward calls a function. Put on a unit's
// outputs it runs before the unit's backward; put on its inputs, after it.

#include <torch/types.h>

#include <functional>
#include <vector>

namespace fsdp {

/// Replaces each tensor that requires a gradient by an identical one. `on_backward` runs in each
/// backward pass that reaches any of them, once all their gradients are there. Returns false, and
/// does nothing, if none requires a gradient or grad mode is off.
bool mark_backward(const std::vector<at::Tensor*>& tensors, std::function<void()> on_backward);

/// Calls `function` when the backward pass that is now running on this thread has ended without an
/// error.
void at_end_of_backward(std::function<void()> function);

}  // namespace fsdp
