#pragma once
// A process group that writes down what is called: which collectives, in which order, of what size,
// dtype and reduction. A decorator: it wraps any other backend and passes everything on.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/process_group.h"

namespace fsdp {

struct RecordedCollective {
  std::string group;  // as given to record_collectives
  std::string
      operation;      // "all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier", ...
  std::string label;  // see CollectiveLabel
  at::ScalarType dtype{};
  std::int64_t numel = 0;  // of the larger of input and output, 0 without tensors
  std::string reduction;   // "sum", "avg", "max", ...; "" if it reduces nothing
  bool operator==(const RecordedCollective&) const = default;
};
/// "all_gather world float32 192 for the parameters of unit 'first'"
std::string describe(const RecordedCollective& collective);

/// One rank's collectives in the order of their calls. Not for use by several threads at once.
using CollectiveLog = std::vector<RecordedCollective>;

/// A backend that is `group` and adds each call to `log` first. all-gather and reduce-scatter in
/// their flat forms, all-reduce, broadcast, barrier and split are passed on (a split-off group is
/// not recorded); others throw as c10d::Backend does.
BackendPtr record_collectives(BackendPtr group, std::string name,
                              std::shared_ptr<CollectiveLog> log);

}  // namespace fsdp
