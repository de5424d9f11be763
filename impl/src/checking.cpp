#include "fsdp/checking.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <utility>

#include "fsdp/errors.h"
#include "ranks.h"
#include "wrapping_backend.h"

namespace fsdp {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;
using std::chrono::milliseconds;

enum class Operation : std::int32_t {
  all_gather,
  reduce_scatter,
  all_reduce,
  broadcast,
  reduce,
  gather,
  scatter,
  all_to_all,
  barrier,
};

const char* to_string(Operation operation) {
  constexpr std::array kNames = {"all_gather", "reduce_scatter", "all_reduce",
                                 "broadcast",  "reduce",         "gather",
                                 "scatter",    "all_to_all",     "barrier"};
  const auto index = static_cast<std::size_t>(operation);
  return index < kNames.size() ? kNames[index] : "an unknown operation";
}

constexpr std::int32_t kNone = -1;

/// What a rank is about to call, as the ranks exchange it: plain bytes of one size, equal if the
/// calls match.
struct Call {
  std::uint64_t number = 0;
  std::int64_t numel = kNone;  // kNone: not compared
  std::int64_t root = kNone;
  Operation operation{};
  std::int32_t dtype = kNone;
  std::int32_t reduction = kNone;
  std::uint32_t label_size = 0;
  std::uint64_t label_hash = 0;
  std::uint64_t tensors = 0;
  std::array<char, 200> label{};
};
static_assert(sizeof(Call) == 256 && std::has_unique_object_representations_v<Call>);

bool operator==(const Call& a, const Call& b) {
  return std::memcmp(&a, &b, sizeof(Call)) == 0;
}

std::string reduction_name(std::int32_t reduction) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(reduction)) {
    case c10d::ReduceOp::SUM:
      return "sum";
    case c10d::ReduceOp::AVG:
      return "avg";
    case c10d::ReduceOp::MIN:
      return "min";
    case c10d::ReduceOp::MAX:
      return "max";
    case c10d::ReduceOp::PRODUCT:
      return "product";
    default:
      return fmt::format("reduction {}", reduction);
  }
}

/// "call 3: all_reduce of 12 float elements, sum, for 'unit a'"
std::string describe(const Call& call) {
  auto text = fmt::format("call {}: {}", call.number, to_string(call.operation));
  if (call.dtype != kNone) {
    const auto* dtype = c10::toString(static_cast<at::ScalarType>(call.dtype));
    text += call.numel == kNone ? fmt::format(" of {}", dtype)
                                : fmt::format(" of {} {}", call.numel, dtype);
  }
  if (call.tensors > 1) {
    text += fmt::format(" in {} tensors", call.tensors);
  }
  if (call.reduction != kNone) {
    text += ", " + reduction_name(call.reduction);
  }
  if (call.root != kNone) {
    text += fmt::format(", root {}", call.root);
  }
  const auto shown = std::min<std::size_t>(call.label_size, call.label.size());
  if (shown > 0) {
    text += ", for " + std::string(call.label.data(), shown);
  }
  if (call.label_size > shown) {
    text += fmt::format("... ({} bytes, hash {:016x})", call.label_size, call.label_hash);
  }
  return text;
}

/// FNV-1a, so that labels that differ only behind their first bytes differ here too.
std::uint64_t hash_of(std::string_view text) {
  std::uint64_t hash = 14695981039346656037ULL;
  for (const char letter : text) {
    hash = (hash ^ static_cast<unsigned char>(letter)) * 1099511628211ULL;
  }
  return hash;
}

void set_label(Call& call, std::string_view label) {
  call.label_size = static_cast<std::uint32_t>(label.size());
  call.label_hash = hash_of(label);
  std::memcpy(call.label.data(), label.data(), std::min(label.size(), call.label.size()));
}

/// Who differs from what most ranks called (of equally many, from what the lowest rank called), and
/// what each called.
std::string describe_mismatch(const std::vector<Call>& calls) {
  struct Camp {
    Call call;
    std::vector<int> ranks;
  };
  std::vector<Camp> camps;
  for (int rank = 0; rank < static_cast<int>(calls.size()); ++rank) {
    const auto camp = std::find_if(camps.begin(), camps.end(),
                                   [&](const Camp& other) { return other.call == calls[rank]; });
    if (camp == camps.end()) {
      camps.push_back({calls[rank], {rank}});
    } else {
      camp->ranks.push_back(rank);
    }
  }
  const auto most = std::max_element(camps.begin(), camps.end(), [](const Camp& a, const Camp& b) {
    return a.ranks.size() < b.ranks.size();
  });
  std::vector<int> differing;
  std::vector<std::string> said;
  for (const auto& camp : camps) {
    if (&camp != &*most) {
      differing.insert(differing.end(), camp.ranks.begin(), camp.ranks.end());
    }
    said.push_back(fmt::format("rank{} {}: {}", camp.ranks.size() == 1 ? "" : "s",
                               fmt::join(camp.ranks, ", "), describe(camp.call)));
  }
  std::sort(differing.begin(), differing.end());
  return fmt::format(
      "the ranks' collectives do not match; rank{} {} differ{}: {}; wanted: the same operation, "
      "dtype, size, reduction, root and label on all ranks, in the same order",
      differing.size() == 1 ? "" : "s", fmt::join(differing, ", "),
      differing.size() == 1 ? "s" : "", fmt::join(said, "; "));
}

class CheckingBackend : public WrappingBackend {
 public:
  explicit CheckingBackend(BackendPtr inner) : WrappingBackend(std::move(inner)) {}

  std::uint64_t getSequenceNumberForGroup() override { return number_; }
  BackendPtr split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                   const c10::intrusive_ptr<Options>& options) override {
    auto group = inner_->split(store, ranks, options);
    return group == nullptr ? nullptr : check_collectives(std::move(group));
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    check(Operation::all_gather, {&input, 1}, options.timeout);
    return inner_->_allgather_base(output, input, options);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    check(Operation::all_gather, inputs, options.timeout);
    return inner_->allgather(outputs, inputs, options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    check(Operation::all_gather, inputs, options.timeout);
    return inner_->allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    check_reducing(Operation::reduce_scatter, {&output, 1}, options);
    return inner_->_reduce_scatter_base(output, input, options);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    check_reducing(Operation::reduce_scatter, outputs, options);
    return inner_->reduce_scatter(outputs, inputs, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    check_reducing(Operation::reduce_scatter, outputs, options);
    return inner_->reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    check_reducing(Operation::all_reduce, tensors, options);
    return inner_->allreduce(tensors, options);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    check_reducing(Operation::all_reduce, tensors, options);
    return inner_->allreduce_coalesced(tensors, options);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    check_reducing(Operation::reduce, tensors, options, options.rootRank);
    return inner_->reduce(tensors, options);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    check(Operation::broadcast, tensors, options.timeout, kNone, options.rootRank);
    return inner_->broadcast(tensors, options);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    check(Operation::gather, inputs, options.timeout, kNone, options.rootRank);
    return inner_->gather(outputs, inputs, options);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    check(Operation::scatter, outputs, options.timeout, kNone, options.rootRank);
    return inner_->scatter(outputs, inputs, options);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<std::int64_t>& output_sizes,
                        std::vector<std::int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override {
    check(Operation::all_to_all, {&input, 1}, options.timeout);
    return inner_->alltoall_base(output, input, output_sizes, input_sizes, options);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override {
    check(Operation::all_to_all, inputs, options.timeout);
    return inner_->alltoall(outputs, inputs, options);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    check(Operation::barrier, {}, options.timeout);
    return inner_->barrier(options);
  }
  WorkPtr send(Tensors& tensors, int receiver, int tag) override {
    return inner_->send(tensors, receiver, tag);
  }
  WorkPtr recv(Tensors& tensors, int sender, int tag) override {
    return inner_->recv(tensors, sender, tag);
  }

 private:
  template <typename ReducingOptions>
  void check_reducing(Operation operation, at::ArrayRef<at::Tensor> pieces,
                      const ReducingOptions& options, std::int64_t root = kNone) {
    check(operation, pieces, options.timeout, static_cast<std::int32_t>(options.reduceOp.op_),
          root);
  }

  /// `pieces`: the tensors that say how much this rank moves.
  void check(Operation operation, at::ArrayRef<at::Tensor> pieces, milliseconds timeout,
             std::int32_t reduction = kNone, std::int64_t root = kNone) {
    if (!mismatch_.empty()) {
      throw MismatchError(mismatch_);
    }
    Call call;
    call.number = number_++;
    call.operation = operation;
    call.reduction = reduction;
    call.root = root;
    call.tensors = pieces.size();
    set_label(call, CollectiveLabel::current());
    // What is wrong with a call by itself is for the backend to say.
    if (!pieces.empty() && pieces[0].defined()) {
      call.dtype = static_cast<std::int32_t>(pieces[0].scalar_type());
      if (operation != Operation::all_to_all) {
        call.numel = 0;
        for (const auto& piece : pieces) {
          call.numel += piece.defined() ? piece.numel() : 0;
        }
      }
    }
    const auto calls = exchange(call, timeout);
    if (std::any_of(calls.begin(), calls.end(),
                    [&](const Call& other) { return !(other == calls.front()); })) {
      mismatch_ = fmt::format("rank {}: {}", rank_, describe_mismatch(calls));
      throw MismatchError(mismatch_);
    }
  }

  /// What every rank is about to call, in rank order.
  std::vector<Call> exchange(const Call& mine, milliseconds timeout) {
    const auto bytes = at::TensorOptions().dtype(at::kByte);
    const auto device = collective_device(inner_, at::kCPU);
    constexpr auto kSize = static_cast<std::int64_t>(sizeof(Call));
    auto input = at::empty({kSize}, bytes);
    std::memcpy(input.data_ptr(), &mine, sizeof(Call));
    input = input.to(device);
    auto output = at::empty({kSize * size_}, bytes.device(device));
    c10d::AllgatherOptions options;
    options.timeout = timeout;
    {
      // The labels are what is compared; the exchange itself must match whatever they are.
      const CollectiveLabel label("the check of the next collective");
      inner_->_allgather_base(output, input, options)->wait();
    }
    const auto on_host = output.cpu();
    std::vector<Call> calls(size_);
    std::memcpy(calls.data(), on_host.data_ptr(), sizeof(Call) * calls.size());
    return calls;
  }

  std::uint64_t number_ = 0;
  std::string mismatch_;  // once there was one
};

}  // namespace

BackendPtr check_collectives(BackendPtr group) {
  if (group == nullptr) {
    throw UsageError("check_collectives: the group is null; wanted: a process group");
  }
  return c10::make_intrusive<CheckingBackend>(std::move(group));
}

}  // namespace fsdp
