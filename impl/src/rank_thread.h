#pragma once
// What a thread knows about being a rank.

namespace fsdp {

/// Whether other ranks are threads of this process, so that what libtorch keeps for the process
/// (its default random generators) is not this rank's own.
bool shares_process();
void set_shares_process(bool shares);

}  // namespace fsdp
