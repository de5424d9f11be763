#pragma once
// What one rank of a group of processes sends to and takes from the others in a call, and what it
// does with it: in one phase, or for large sums in two.

#include <cstdint>
#include <deque>
#include <vector>

#include "in_process_call.h"
#include "transport.h"

namespace fsdp::processes {

class Plan {
 public:
  /// `call` is this rank's own, and outlives the plan. `is_native`: the transport reduces.
  Plan(const in_process::Call& call, int world_size, bool is_native);

  int phases() const { return in_parts_ ? 2 : 1; }
  /// What the transport is to reduce; nothing if it does not.
  std::vector<NativeReduction> native();
  /// What goes to `peer`, another rank.
  std::vector<in_process::Slice> outgoing(int phase, int peer) const;
  /// Where to put what comes from `peer`, which has the same sizes as its `outgoing`.
  std::vector<in_process::Slice> incoming(int phase, int peer);
  /// Does this rank's work with what has come, once it is all there.
  void finish(int phase);

 private:
  bool reduces() const { return call_.reduction != c10d::ReduceOp::UNUSED; }
  bool is_root() const { return call_.root == call_.rank; }
  in_process::Slice share_of(const in_process::Transfer& transfer, int rank) const;
  in_process::Slice part_of_result(const in_process::Transfer& transfer, int rank) const;
  in_process::Slice given_to(const in_process::Transfer& transfer, int peer) const;
  in_process::Slice taken_from(const in_process::Transfer& transfer, int peer) const;
  in_process::Slice result_of(std::size_t transfer);
  const at::Tensor& set_aside(std::int64_t numel, c10::ScalarType dtype);
  void reduce(std::size_t transfer);
  void copy_own(const in_process::Transfer& transfer) const;
  void finish_native(std::size_t transfer);

  const in_process::Call& call_;
  const int world_size_;
  const bool is_native_;
  // A large all_reduce or reduce: each rank reduces a part, and the parts are put together.
  const bool in_parts_;
  std::deque<at::Tensor> aside_;                             // what only this plan uses
  std::vector<std::vector<in_process::Slice>> contributed_;  // by transfer and rank
  // Of a reduce in parts, on a rank that is not the root; of a native reduce-scatter or reduce.
  std::vector<in_process::Slice> results_;
};

}  // namespace fsdp::processes
