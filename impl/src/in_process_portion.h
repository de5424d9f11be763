#pragma once
// The work of a collective, once every rank's call is known. It comes in portions that any threads
// may carry out in any order or at the same time, each once.

#include <vector>

#include "in_process_call.h"

namespace fsdp::in_process {

/// Does one portion of the work of these calls, one per rank, of which there are as many portions:
/// what rank `portion` takes, or for all_reduce and reduce, which have one result in common, an
/// even part of it. No two portions write the same memory, and none reads what another writes.
void carry_out_portion(const std::vector<Call>& calls, int portion);

/// The work of a send and the receive that it meets.
void carry_out_transfer(const Call& send, const Call& receive);

}  // namespace fsdp::in_process
