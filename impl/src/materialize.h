#pragma once
// Gives memory and values to parameters and buffers that are on the meta device.

#include <torch/nn/module.h>

#include "fsdp/fully_shard.h"

namespace fsdp {

/// Does what options.device and options.param_init_fn ask for, below `module` but not inside of
/// units. Does nothing without meta tensors. Throws UsageError if there are some and the options do
/// not say what to do.
void materialize(torch::nn::Module& module, const FullyShardOptions& options, int rank);

}  // namespace fsdp
