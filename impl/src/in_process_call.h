#pragma once
// One rank's call of a collective, as the other ranks need to see it: what it gives, what it takes,
// and what has to be the same on every rank.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

namespace fsdp::in_process {

enum class Operation {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kReduce,
  kGather,
  kScatter,
  kAllToAll,
  kBarrier,
  kSend,
  kReceive,
};

/// As in torch.distributed: "all_gather", "reduce_scatter", ...
const char* operation_name(Operation operation);

/// A run of elements of a contiguous tensor.
struct Slice {
  const at::Tensor* tensor = nullptr;
  std::int64_t offset = 0;
  std::int64_t numel = 0;

  /// The address of the first element; whatever the tensor has for one if there are none.
  char* data() const;
  std::int64_t nbytes() const { return numel * tensor->element_size(); }
};

/// What a rank gives or takes, in slots: in an all-gather's output, slot i is what rank i gave; in
/// a reduce-scatter's input, slot i is what rank i is to get. The slots are pieces of one tensor,
/// or tensors of their own.
class Slots {
 public:
  Slots() = default;
  /// One slot: the tensor.
  static Slots whole(at::Tensor tensor);
  /// A tensor per slot.
  static Slots list(std::vector<at::Tensor> tensors);
  /// `count` slots of the same size, end to end.
  static Slots equal(at::Tensor tensor, int count);
  /// Slots of these sizes, in elements, end to end.
  static Slots split(at::Tensor tensor, const std::vector<std::int64_t>& sizes);

  int size() const;
  Slice operator[](int slot) const;
  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  /// Copies in memory of their own.
  Slots clone() const;
  /// The same slots of other tensors, one for each of these.
  Slots with(std::vector<at::Tensor> tensors) const;

 private:
  std::vector<at::Tensor> tensors_;
  int equal_slots_ = 0;             // of tensors_[0], if it is cut evenly
  std::vector<std::int64_t> ends_;  // of the slots of tensors_[0], if it is cut unevenly
};

/// One tensor's share of a call. The coalesced forms have several.
struct Transfer {
  Slots from;
  Slots to;
  /// The elements that every rank must agree on: of a slot, or of the whole tensor if there are
  /// none. -1 for an all-to-all, whose ranks must agree in pairs.
  std::int64_t numel = -1;
  c10::ScalarType dtype = c10::kFloat;
};

struct Call {
  int rank = 0;  // the caller
  Operation operation = Operation::kBarrier;
  c10d::ReduceOp::RedOpType reduction = c10d::ReduceOp::UNUSED;
  /// Of broadcast, reduce, gather, scatter; for send and receive the other rank; else -1.
  int root = -1;
  int tag = 0;
  /// See CollectiveLabel.
  std::string label;
  std::vector<Transfer> transfers;
  /// Where the tensors are said to be, if it is not where they are: a call from another process has
  /// none here, and one that is staged has copies in host memory.
  std::optional<at::Device> stated_device;

  /// Where its tensors are. The CPU if it has none.
  at::Device device() const;
  /// A send or receive, which concerns two ranks; else a collective.
  bool is_transfer() const {
    return operation == Operation::kSend || operation == Operation::kReceive;
  }
};

/// "all_reduce(sum, Float, 4 elements)"
std::string describe(const Call& call);

/// "rank 3", "ranks 0-2, 5"
std::string describe_ranks(const std::vector<int>& ranks);

/// Says which of these ranks' calls of a collective do not match. Empty if all match.
std::string find_mismatch(const std::vector<Call>& calls, const std::vector<int>& ranks);

/// The same for a send and the receive that it meets.
std::string find_transfer_mismatch(const Call& send, const Call& receive);

/// If this rank takes into memory that it also gives, and the others might find it overwritten,
/// the call is made to give copies. Left alone are the in-place forms that need no copy: a rank's
/// own slot given and taken at the same address, which no other portion of the work reads or
/// writes.
void separate_overlapping_memory(Call& call);

}  // namespace fsdp::in_process
