#pragma once
// The section on clipping: what is said of torch.nn.utils.clip_grad_norm_ on sharded models, held
// to measurements of this library's shards and of PyTorch's own.

#include "conformance/claims.h"

namespace shardproof {

ClaimsSection clipping_section(const ClaimsOptions& options);

}  // namespace shardproof
