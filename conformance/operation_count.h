#pragma once
// Counts the floating-point operations of matrix products: exactly, from the shapes that each
// operator is called with, not from times or models of a machine. What grows with the width of a
// network is nearly all in them; elementwise operators are counted as calls only.

#include <ATen/record_function.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace shardproof {

/// What a step is doing when it calls an operator.
enum class Phase {
  forward,        // neither of the others
  recomputation,  // a checkpointed region runs again (fsdp::is_recomputing())
  backward,       // autograd's engine runs, and no region runs again
};
inline constexpr int kPhases = 3;
std::string_view to_string(Phase phase);

/// While it lives, counts what this thread calls: in a rank's body (fsdp::run_ranks) what that rank
/// calls, since backward of CPU tensors runs on the thread that asks for it.
///
/// A product of m x n by n x k is 2 m n k operations, with or without something added: mm, addmm,
/// bmm, baddbmm, addbmm, mv, addmv, dot. A convolution is 2 operations for each output element and
/// element of the weight that it meets; its backward the same for each of the gradients of input
/// and weight that is asked for. Attention as one operator is its two products, and its backward
/// five (one makes the scores anew); what a causal mask leaves out is counted, as in the composite
/// form. An operator that a counted one calls is part of it, and an operator that only calls others
/// (linear, matmul, einsum) is counted as those. Others (bilinear, recurrent layers in one
/// operator, quantized and sparse products) are not known, and count as calls only.
///
/// An operator that throws counts as nothing: activation checkpointing ends a second run by an
/// exception from within an operator, before its product is made.
class OperationCount {
 public:
  /// One at a time on a thread. Throws fsdp::UsageError if there is another.
  OperationCount();
  ~OperationCount();
  OperationCount(const OperationCount&) = delete;
  OperationCount& operator=(const OperationCount&) = delete;

  std::int64_t operations(Phase phase) const { return operations_[static_cast<int>(phase)]; }
  /// Of all phases.
  std::int64_t operations() const;
  /// Floating-point operations by operator ("aten::addmm"), those that are counted only.
  const std::map<std::string, std::int64_t>& by_operator() const { return by_operator_; }
  /// Calls of every operator that returned, composite ones and those that they call too.
  const std::map<std::string, std::int64_t>& calls(Phase phase) const {
    return calls_[static_cast<int>(phase)];
  }
  void reset();

 private:
  struct Call;
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function);
  static void end(const at::RecordFunction& function, at::ObserverContext* context);

  std::array<std::int64_t, kPhases> operations_{};
  std::array<std::map<std::string, std::int64_t>, kPhases> calls_;
  std::map<std::string, std::int64_t> by_operator_;
  int depth_ = 0;  // counted operators that are running
  at::CallbackHandle handle_;
};

}  // namespace shardproof
