#pragma once
// A process group that compares every collective over all ranks before it runs it, so that ranks
// that call different things are told who differs, and neither hang nor mix up their data. A
// decorator: it wraps any other backend. It costs a small all-gather for each collective.

#include "fsdp/process_group.h"

namespace fsdp {

/// A backend that is `group`, but before each collective all ranks exchange what they are about to
/// call: operation, number of the call, dtype, elements, reduction, root, and label
/// (CollectiveLabel; of long ones the first 200 bytes and a hash). All ranks of the group must be
/// wrapped. The exchange is an all-gather over `group` itself, of 256 bytes from each rank, which
/// the call waits for.
///
/// Throws MismatchError on every rank if they differ: the message names the ranks that differ from
/// most, and what each rank called. Every later call fails with the same error. What the exchange
/// throws (TimeoutError, PeerError) comes through.
///
/// Elements are those of the rank's own piece: the input of all-gather, gather and the reductions,
/// the output of scatter and reduce-scatter. They are not compared for all-to-all, whose ranks may
/// differ. send and recv are passed on unchecked, since they concern two ranks only. Groups made by
/// split are checked, too.
BackendPtr check_collectives(BackendPtr group);

}  // namespace fsdp
