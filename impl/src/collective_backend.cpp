#include "collective_backend.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "fsdp/errors.h"
#include "fsdp/process_group.h"
#include "reduce_kernels.h"
#include "wrapping_backend.h"

namespace fsdp {

using c10d::OpType;
using in_process::Call;
using in_process::Operation;
using in_process::Slots;
using in_process::Transfer;
using std::chrono::milliseconds;

Call CollectiveBackend::make_call(Operation operation) const {
  Call call;
  call.rank = rank_;
  call.operation = operation;
  call.label = CollectiveLabel::current();
  return call;
}

Call CollectiveBackend::make_rooted_call(Operation operation, std::int64_t root) const {
  auto call = make_call(operation);
  if (root < 0 || root >= size_) {
    refuse(call, fmt::format("rank {} does not exist; wanted is one in [0, {})", root, size_));
  }
  call.root = static_cast<int>(root);
  return call;
}

Call CollectiveBackend::make_reducing_call(Operation operation,
                                           const c10d::ReduceOp& reduction) const {
  auto call = make_call(operation);
  call.reduction = reduction.op_;
  return call;
}

void CollectiveBackend::refuse(const Call& call, const std::string& problem) const {
  throw UsageError(
      fmt::format("rank {}: {}: {}", rank_, in_process::operation_name(call.operation), problem));
}

void CollectiveBackend::check_tensor(const Call& call, const at::Tensor& tensor) const {
  if (!tensor.defined()) {
    refuse(call, "a tensor is undefined; give it one of the right size");
  }
  if (tensor.layout() != at::kStrided || !tensor.is_contiguous()) {
    refuse(call, fmt::format("a tensor of sizes {} is not dense and contiguous; call contiguous() "
                             "on it first",
                             c10::str(tensor.sizes())));
  }
  const auto needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size();
  if (tensor.numel() > 0 && static_cast<std::int64_t>(tensor.storage().nbytes()) < needed) {
    refuse(call, fmt::format("a tensor of sizes {} has a storage of {} bytes and needs {}; its "
                             "memory was released (by resharding?) and must be allocated first",
                             c10::str(tensor.sizes()), tensor.storage().nbytes(), needed));
  }
}

// All tensors of a transfer have one dtype and one device.
void CollectiveBackend::check_alike(const Call& call, const Transfer& transfer) const {
  const at::Tensor* first = nullptr;
  for (const auto* slots : {&transfer.from, &transfer.to}) {
    for (const auto& tensor : slots->tensors()) {
      check_tensor(call, tensor);
      first = first == nullptr ? &tensor : first;
      if (tensor.scalar_type() != first->scalar_type()) {
        refuse(call, fmt::format("dtypes {} and {} in one call; all its tensors must have the same",
                                 c10::toString(first->scalar_type()),
                                 c10::toString(tensor.scalar_type())));
      }
      if (tensor.device() != first->device()) {
        refuse(call, fmt::format("tensors on {} and {} in one call; put them on one device",
                                 first->device().str(), tensor.device().str()));
      }
    }
  }
}

void CollectiveBackend::check_slots(const Call& call, const Slots& slots,
                                    std::int64_t numel) const {
  for (int slot = 0; slot < slots.size(); ++slot) {
    if (slots[slot].numel != numel) {
      refuse(call, fmt::format("the tensor for rank {} has {} elements; wanted {}, as many as this "
                               "rank's own",
                               slot, slots[slot].numel, numel));
    }
  }
}

void CollectiveBackend::check_count(const Call& call, const char* what, std::size_t seen,
                                    std::size_t wanted) const {
  if (seen != wanted) {
    refuse(call, fmt::format("{} {}; wanted {}", seen, what, wanted));
  }
}

// In the flat forms one tensor holds what the other side has for every rank.
void CollectiveBackend::check_flat(const Call& call, const at::Tensor& part,
                                   const at::Tensor& whole) const {
  if (!part.defined() || !whole.defined() || whole.numel() != part.numel() * size_) {
    refuse(call, fmt::format("a tensor of {} elements for {} ranks' {}; wanted {}",
                             whole.defined() ? whole.numel() : 0, size_,
                             part.defined() ? part.numel() : 0,
                             part.defined() ? part.numel() * size_ : 0));
  }
}

void CollectiveBackend::check_reduction(const Call& call) const {
  for (const auto& transfer : call.transfers) {
    // libtorch's own operators, which do the work on other devices, cannot add these.
    if (c10::isBarebonesUnsignedType(transfer.dtype) && !call.device().is_cpu()) {
      refuse(call, fmt::format("no {} of {} on {}; convert the tensor to a signed integer",
                               in_process::reduction_name(call.reduction),
                               c10::toString(transfer.dtype), call.device().str()));
    }
    if (!in_process::is_reducible(call.reduction, transfer.dtype)) {
      refuse(call, fmt::format("no {} of {}; sum, product, min and max take floating-point numbers "
                               "of 16 bits and more, integers and bool, and mean takes "
                               "floating-point numbers",
                               in_process::reduction_name(call.reduction),
                               c10::toString(transfer.dtype)));
    }
  }
}

Transfer CollectiveBackend::make_transfer(const Call& call, Slots from, Slots to,
                                          std::int64_t numel) const {
  Transfer transfer;
  transfer.from = std::move(from);
  transfer.to = std::move(to);
  transfer.numel = numel;
  check_alike(call, transfer);
  const auto& tensors = transfer.from.size() > 0 ? transfer.from.tensors() : transfer.to.tensors();
  transfer.dtype = tensors.front().scalar_type();
  return transfer;
}

Transfer CollectiveBackend::gathering(const Call& call, const at::Tensor& input,
                                      const at::Tensor& output) const {
  check_flat(call, input, output);
  return make_transfer(call, Slots::whole(input), Slots::equal(output, size_), input.numel());
}

Transfer CollectiveBackend::scattering(const Call& call, const at::Tensor& input,
                                       const at::Tensor& output) const {
  check_flat(call, output, input);
  return make_transfer(call, Slots::equal(input, size_), Slots::whole(output), output.numel());
}

WorkPtr CollectiveBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  auto call = make_rooted_call(Operation::kBroadcast, options.rootRank);
  check_count(call, "tensors", tensors.size(), 1);
  check_tensor(call, tensors[0]);
  const auto slots = Slots::whole(tensors[0]);
  call.transfers = {rank_ == call.root ? make_transfer(call, slots, {}, tensors[0].numel())
                                       : make_transfer(call, {}, slots, tensors[0].numel())};
  return submit(std::move(call), OpType::BROADCAST, options.timeout);
}

WorkPtr CollectiveBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  auto call = make_reducing_call(Operation::kAllReduce, options.reduceOp);
  check_count(call, "tensors", tensors.size(), 1);
  check_tensor(call, tensors[0]);
  const auto slots = Slots::whole(tensors[0]);
  call.transfers = {make_transfer(call, slots, slots, tensors[0].numel())};
  return submit(std::move(call), OpType::ALLREDUCE, options.timeout);
}

WorkPtr CollectiveBackend::allreduce_coalesced(Tensors& tensors,
                                               const c10d::AllreduceCoalescedOptions& options) {
  auto call = make_reducing_call(Operation::kAllReduce, options.reduceOp);
  for (const auto& tensor : tensors) {
    check_tensor(call, tensor);
    const auto slots = Slots::whole(tensor);
    call.transfers.push_back(make_transfer(call, slots, slots, tensor.numel()));
  }
  return submit(std::move(call), OpType::ALLREDUCE_COALESCED, options.timeout);
}

WorkPtr CollectiveBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  auto call = make_rooted_call(Operation::kReduce, options.rootRank);
  call.reduction = options.reduceOp.op_;
  check_count(call, "tensors", tensors.size(), 1);
  check_tensor(call, tensors[0]);
  const auto slots = Slots::whole(tensors[0]);
  call.transfers = {
      make_transfer(call, slots, rank_ == call.root ? slots : Slots(), tensors[0].numel())};
  return submit(std::move(call), OpType::REDUCE, options.timeout);
}

WorkPtr CollectiveBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& options) {
  auto call = make_call(Operation::kAllGather);
  check_count(call, "input tensors", inputs.size(), 1);
  check_count(call, "lists of output tensors", outputs.size(), 1);
  check_count(call, "output tensors", outputs[0].size(), size_);
  call.transfers = {make_transfer(call, Slots::whole(inputs[0]), Slots::list(outputs[0]),
                                  inputs[0].defined() ? inputs[0].numel() : 0)};
  check_slots(call, call.transfers[0].to, inputs[0].numel());
  return submit(std::move(call), OpType::ALLGATHER, options.timeout);
}

WorkPtr CollectiveBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::AllgatherOptions& options) {
  auto call = make_call(Operation::kAllGather);
  call.transfers = {gathering(call, input, output)};
  return submit(std::move(call), OpType::_ALLGATHER_BASE, options.timeout);
}

WorkPtr CollectiveBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::AllgatherOptions& options) {
  auto call = make_call(Operation::kAllGather);
  check_count(call, "output tensors", outputs.size(), inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    call.transfers.push_back(gathering(call, inputs[i], outputs[i]));
  }
  return submit(std::move(call), OpType::COALESCED, options.timeout);
}

WorkPtr CollectiveBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                  const c10d::GatherOptions& options) {
  auto call = make_rooted_call(Operation::kGather, options.rootRank);
  check_count(call, "input tensors", inputs.size(), 1);
  check_tensor(call, inputs[0]);
  Slots to;
  if (rank_ == call.root) {
    check_count(call, "lists of output tensors", outputs.size(), 1);
    check_count(call, "output tensors", outputs[0].size(), size_);
    to = Slots::list(outputs[0]);
  } else {
    check_count(call, "lists of output tensors on a rank that is not the root", outputs.size(), 0);
  }
  call.transfers = {make_transfer(call, Slots::whole(inputs[0]), to, inputs[0].numel())};
  check_slots(call, to, inputs[0].numel());
  return submit(std::move(call), OpType::GATHER, options.timeout);
}

WorkPtr CollectiveBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                   const c10d::ScatterOptions& options) {
  auto call = make_rooted_call(Operation::kScatter, options.rootRank);
  check_count(call, "output tensors", outputs.size(), 1);
  check_tensor(call, outputs[0]);
  Slots from;
  if (rank_ == call.root) {
    check_count(call, "lists of input tensors", inputs.size(), 1);
    check_count(call, "input tensors", inputs[0].size(), size_);
    from = Slots::list(inputs[0]);
  } else {
    check_count(call, "lists of input tensors on a rank that is not the root", inputs.size(), 0);
  }
  call.transfers = {make_transfer(call, from, Slots::whole(outputs[0]), outputs[0].numel())};
  check_slots(call, from, outputs[0].numel());
  return submit(std::move(call), OpType::SCATTER, options.timeout);
}

WorkPtr CollectiveBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                          const c10d::ReduceScatterOptions& options) {
  auto call = make_reducing_call(Operation::kReduceScatter, options.reduceOp);
  check_count(call, "output tensors", outputs.size(), 1);
  check_count(call, "lists of input tensors", inputs.size(), 1);
  check_count(call, "input tensors", inputs[0].size(), size_);
  call.transfers = {make_transfer(call, Slots::list(inputs[0]), Slots::whole(outputs[0]),
                                  outputs[0].defined() ? outputs[0].numel() : 0)};
  check_slots(call, call.transfers[0].from, outputs[0].numel());
  return submit(std::move(call), OpType::REDUCE_SCATTER, options.timeout);
}

WorkPtr CollectiveBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::ReduceScatterOptions& options) {
  auto call = make_reducing_call(Operation::kReduceScatter, options.reduceOp);
  call.transfers = {scattering(call, input, output)};
  return submit(std::move(call), OpType::_REDUCE_SCATTER_BASE, options.timeout);
}

WorkPtr CollectiveBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  auto call = make_reducing_call(Operation::kReduceScatter, options.reduceOp);
  check_count(call, "output tensors", outputs.size(), inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    call.transfers.push_back(scattering(call, inputs[i], outputs[i]));
  }
  return submit(std::move(call), OpType::COALESCED, options.timeout);
}

// As in PyTorch the sizes are of the first dimension, and no sizes mean even ones.
Slots CollectiveBackend::cut(const Call& call, const at::Tensor& tensor,
                             const std::vector<std::int64_t>& sizes) const {
  check_tensor(call, tensor);
  const auto rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (sizes.empty()) {
    if (rows % size_ != 0) {
      refuse(call, fmt::format("a first dimension of {} cannot be cut evenly for {} ranks; give "
                               "split sizes",
                               rows, size_));
    }
    return Slots::equal(tensor, size_);
  }
  check_count(call, "split sizes", sizes.size(), size_);
  const auto row = rows == 0 ? 0 : tensor.numel() / rows;
  std::int64_t total = 0;
  std::vector<std::int64_t> slots;
  for (const auto size : sizes) {
    if (size < 0) {
      refuse(call, fmt::format("a split size of {}; wanted 0 or more", size));
    }
    total += size;
    slots.push_back(size * row);
  }
  if (total != rows) {
    refuse(call, fmt::format("split sizes that add up to {}; wanted the first dimension, {}", total,
                             rows));
  }
  return Slots::split(tensor, slots);
}

WorkPtr CollectiveBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                         std::vector<std::int64_t>& output_sizes,
                                         std::vector<std::int64_t>& input_sizes,
                                         const c10d::AllToAllOptions& options) {
  auto call = make_call(Operation::kAllToAll);
  call.transfers = {
      make_transfer(call, cut(call, input, input_sizes), cut(call, output, output_sizes), -1)};
  return submit(std::move(call), OpType::ALLTOALL_BASE, options.timeout);
}

WorkPtr CollectiveBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                    const c10d::AllToAllOptions& options) {
  auto call = make_call(Operation::kAllToAll);
  check_count(call, "output tensors", outputs.size(), size_);
  check_count(call, "input tensors", inputs.size(), size_);
  call.transfers = {make_transfer(call, Slots::list(inputs), Slots::list(outputs), -1)};
  return submit(std::move(call), OpType::ALLTOALL, options.timeout);
}

WorkPtr CollectiveBackend::barrier(const c10d::BarrierOptions& options) {
  return submit(make_call(Operation::kBarrier), OpType::BARRIER, options.timeout);
}

WorkPtr CollectiveBackend::send(Tensors& tensors, int receiver, int tag) {
  return exchange_with(Operation::kSend, tensors, receiver, tag, OpType::SEND);
}

WorkPtr CollectiveBackend::recv(Tensors& tensors, int sender, int tag) {
  return exchange_with(Operation::kReceive, tensors, sender, tag, OpType::RECV);
}

WorkPtr CollectiveBackend::exchange_with(Operation operation, Tensors& tensors, int peer, int tag,
                                         OpType type) {
  auto call = make_rooted_call(operation, peer);
  call.tag = tag;
  check_count(call, "tensors", tensors.size(), 1);
  check_tensor(call, tensors[0]);
  const auto slots = Slots::whole(tensors[0]);
  const bool sends = operation == Operation::kSend;
  call.transfers = {sends ? make_transfer(call, slots, {}, tensors[0].numel())
                          : make_transfer(call, {}, slots, tensors[0].numel())};
  return submit(std::move(call), type, c10d::kUnsetTimeout);
}

WorkPtr CollectiveBackend::submit(Call call, OpType type, milliseconds timeout) {
  if (call.reduction != c10d::ReduceOp::UNUSED) {
    check_reduction(call);
  }
  in_process::separate_overlapping_memory(call);
  return post(std::move(call), type, timeout > kNoTimeout ? timeout : timeout_);
}

BackendPtr CollectiveBackend::split(const c10::intrusive_ptr<c10d::Store>& /*store*/,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<c10d::Backend::Options>& /*options*/) {
  auto seen = ranks;
  std::sort(seen.begin(), seen.end());
  if (ranks.empty() || seen.front() < 0 || seen.back() >= size_ ||
      std::adjacent_find(seen.begin(), seen.end()) != seen.end()) {
    throw UsageError(fmt::format(
        "rank {}: split into the ranks [{}]; wanted: different ranks in [0, {}), one or more",
        rank_, fmt::join(ranks, ", "), size_));
  }
  const auto place = std::find(ranks.begin(), ranks.end(), rank_);
  if (place == ranks.end()) {
    return nullptr;
  }
  return split_into(ranks, static_cast<int>(place - ranks.begin()));
}

Tensors results_of(const Call& call) {
  Tensors results;
  for (const auto& transfer : call.transfers) {
    const auto& tensors = transfer.to.tensors();
    results.insert(results.end(), tensors.begin(), tensors.end());
  }
  return results;
}

void leave_group(Backend& backend, const std::string& reason) {
  if (const auto* wrapping = dynamic_cast<const WrappingBackend*>(&backend)) {
    leave_group(wrapping->inner(), reason);
  } else if (auto* group = dynamic_cast<CollectiveBackend*>(&backend)) {
    group->leave(reason);
  }
}

}  // namespace fsdp
