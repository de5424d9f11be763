#include "process_plan.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>

#include "reduce_kernels.h"

namespace fsdp::processes {
namespace {

using in_process::Call;
using in_process::Operation;
using in_process::Slice;
using in_process::Transfer;

// Up to here every rank sends the others the whole tensor and each adds all of it up, which takes
// one exchange of messages; beyond it each adds up a part, which takes two and moves less.
constexpr std::int64_t kMaxWholeBytes = 16 * 1024;

// Parts are cut no finer, so that small ones are not sent about in crumbs.
constexpr std::int64_t kGrain = 1024;

bool wants_parts(const Call& call) {
  if (call.operation != Operation::kAllReduce && call.operation != Operation::kReduce) {
    return false;
  }
  std::int64_t bytes = 0;
  for (const auto& transfer : call.transfers) {
    bytes += transfer.numel * static_cast<std::int64_t>(c10::elementSize(transfer.dtype));
  }
  return bytes > kMaxWholeBytes;
}

Slice part_of(const Slice& whole, int part, int parts) {
  const auto even = (whole.numel + parts - 1) / parts;
  const auto length = (even + kGrain - 1) / kGrain * kGrain;
  const auto begin = std::min(part * length, whole.numel);
  const auto end = std::min(begin + length, whole.numel);
  return {whole.tensor, whole.offset + begin, end - begin};
}

void copy(const Slice& from, const Slice& to) {
  if (to.numel > 0 && from.data() != to.data()) {
    std::memcpy(to.data(), from.data(), static_cast<std::size_t>(to.nbytes()));
  }
}

}  // namespace

Plan::Plan(const Call& call, int world_size, bool is_native)
    : call_(call),
      world_size_(world_size),
      is_native_(is_native && call.reduction != c10d::ReduceOp::UNUSED),
      in_parts_(!is_native && wants_parts(call)) {
  if (!reduces()) {
    return;
  }
  if (is_native_) {
    results_.resize(call_.transfers.size());
    return;
  }
  for (const auto& transfer : call_.transfers) {
    auto& contributions = contributed_.emplace_back(world_size_);
    contributions[call_.rank] = share_of(transfer, call_.rank);
    results_.emplace_back();
  }
}

// What this rank has of that which `rank` reduces.
Slice Plan::share_of(const Transfer& transfer, int rank) const {
  if (call_.operation == Operation::kReduceScatter) {
    return transfer.from[rank];
  }
  if (in_parts_) {
    return part_of(transfer.from[0], rank, world_size_);
  }
  const bool takes_part = call_.operation == Operation::kAllReduce || rank == call_.root;
  return takes_part ? transfer.from[0] : Slice{&transfer.from.tensors()[0], 0, 0};
}

Slice Plan::part_of_result(const Transfer& transfer, int rank) const {
  return part_of(transfer.to[0], rank, world_size_);
}

// In a call that moves values about.
Slice Plan::given_to(const Transfer& transfer, int peer) const {
  switch (call_.operation) {
    case Operation::kAllGather:
      return transfer.from[0];
    case Operation::kGather:
    case Operation::kSend:
      return peer == call_.root ? transfer.from[0] : Slice();
    case Operation::kBroadcast:
      return is_root() ? transfer.from[0] : Slice();
    case Operation::kScatter:
      return is_root() ? transfer.from[peer] : Slice();
    case Operation::kAllToAll:
      return transfer.from[peer];
    default:
      return {};
  }
}

Slice Plan::taken_from(const Transfer& transfer, int peer) const {
  switch (call_.operation) {
    case Operation::kAllGather:
    case Operation::kAllToAll:
      return transfer.to[peer];
    case Operation::kGather:
      return is_root() ? transfer.to[peer] : Slice();
    case Operation::kBroadcast:
    case Operation::kScatter:
    case Operation::kReceive:
      return peer == call_.root ? transfer.to[0] : Slice();
    default:
      return {};
  }
}

std::vector<Slice> Plan::outgoing(int phase, int peer) const {
  std::vector<Slice> slices;
  if (is_native_) {
    return slices;
  }
  for (std::size_t i = 0; i < call_.transfers.size(); ++i) {
    const auto& transfer = call_.transfers[i];
    Slice slice;
    if (phase == 1) {
      if (call_.operation == Operation::kAllReduce) {
        slice = part_of_result(transfer, call_.rank);
      } else if (peer == call_.root) {
        slice = results_[i];
      }
    } else {
      slice = reduces() ? share_of(transfer, peer) : given_to(transfer, peer);
    }
    if (slice.numel > 0) {
      slices.push_back(slice);
    }
  }
  return slices;
}

std::vector<Slice> Plan::incoming(int phase, int peer) {
  std::vector<Slice> slices;
  if (is_native_) {
    return slices;
  }
  for (std::size_t i = 0; i < call_.transfers.size(); ++i) {
    const auto& transfer = call_.transfers[i];
    Slice slice;
    if (phase == 1) {
      if (call_.operation == Operation::kAllReduce || is_root()) {
        slice = part_of_result(transfer, peer);
      }
    } else if (reduces()) {
      const auto numel = contributed_[i][call_.rank].numel;
      slice = {&set_aside(numel, transfer.dtype), 0, numel};
      contributed_[i][peer] = slice;
    } else {
      slice = taken_from(transfer, peer);
    }
    if (slice.numel > 0) {
      slices.push_back(slice);
    }
  }
  return slices;
}

void Plan::finish(int phase) {
  if (phase == 1) {
    return;
  }
  for (std::size_t i = 0; i < call_.transfers.size(); ++i) {
    if (is_native_) {
      finish_native(i);
    } else {
      reduces() ? reduce(i) : copy_own(call_.transfers[i]);
    }
  }
}

// What a rank gives to itself.
void Plan::copy_own(const Transfer& transfer) const {
  const int rank = call_.rank;
  switch (call_.operation) {
    case Operation::kAllGather:
      return copy(transfer.from[0], transfer.to[rank]);
    case Operation::kAllToAll:
      return copy(transfer.from[rank], transfer.to[rank]);
    case Operation::kGather:
      return is_root() ? copy(transfer.from[0], transfer.to[rank]) : void();
    case Operation::kScatter:
      return is_root() ? copy(transfer.from[rank], transfer.to[0]) : void();
    default:
      return;
  }
}

Slice Plan::result_of(std::size_t index) {
  const auto& transfer = call_.transfers[index];
  if (call_.operation == Operation::kReduce && !is_root()) {
    const auto numel = contributed_[index][call_.rank].numel;
    results_[index] = {&set_aside(numel, transfer.dtype), 0, numel};
    return results_[index];
  }
  return in_parts_ ? part_of_result(transfer, call_.rank) : transfer.to[0];
}

void Plan::reduce(std::size_t index) {
  const auto& contributions = contributed_[index];
  const auto numel = contributions[call_.rank].numel;
  if (numel == 0) {
    return;
  }
  std::vector<const void*> sources;
  for (const auto& contribution : contributions) {
    sources.push_back(contribution.data());
  }
  const std::vector<void*> targets = {result_of(index).data()};
  in_process::reduce_in_order(call_.reduction, call_.transfers[index].dtype, sources, targets,
                              numel);
}

std::vector<NativeReduction> Plan::native() {
  using Kind = NativeReduction::Kind;
  std::vector<NativeReduction> reductions;
  const auto as_stretch = [](const Slice& slice) {
    return Stretch{slice.data(), static_cast<std::size_t>(slice.nbytes()),
                   std::make_shared<at::Tensor>(*slice.tensor)};
  };
  for (std::size_t i = 0; is_native_ && i < call_.transfers.size(); ++i) {
    const auto& transfer = call_.transfers[i];
    NativeReduction native;
    native.reduction =
        call_.reduction == c10d::ReduceOp::AVG ? c10d::ReduceOp::SUM : call_.reduction;
    native.dtype = transfer.dtype;
    native.root = call_.root;
    native.numel = transfer.numel;
    if (transfer.numel == 0) {
      continue;
    }
    if (call_.operation == Operation::kAllReduce) {
      native.from = as_stretch(transfer.to[0]);
      native.to = native.from;
    } else {
      // MPI wants the results apart from what is given, and that in one piece.
      const auto& result = set_aside(transfer.numel, transfer.dtype);
      results_[i] = {&result, 0, transfer.numel};
      native.to = as_stretch(results_[i]);
      if (call_.operation == Operation::kReduce) {
        native.kind = Kind::kReduce;
        native.from = as_stretch(transfer.from[0]);
      } else {
        native.kind = Kind::kReduceScatter;
        const auto& given = set_aside(transfer.numel * world_size_, transfer.dtype);
        for (int rank = 0; rank < world_size_; ++rank) {
          copy(transfer.from[rank], {&given, rank * transfer.numel, transfer.numel});
        }
        native.from = as_stretch({&given, 0, given.numel()});
      }
    }
    reductions.push_back(std::move(native));
  }
  return reductions;
}

// The transport has added up: what is left is the division of a mean, and to put it into place.
void Plan::finish_native(std::size_t index) {
  const auto& transfer = call_.transfers[index];
  if (transfer.numel == 0 || (call_.operation == Operation::kReduce && !is_root())) {
    return;
  }
  const auto to = transfer.to[0];
  if (call_.operation != Operation::kAllReduce) {
    copy(results_[index], to);
  }
  if (call_.reduction != c10d::ReduceOp::AVG) {
    return;
  }
  const auto divide = [&](auto* values) {
    for (std::int64_t i = 0; i < to.numel; ++i) {
      values[i] /= static_cast<std::remove_reference_t<decltype(*values)>>(world_size_);
    }
  };
  if (transfer.dtype == c10::kDouble) {
    divide(reinterpret_cast<double*>(to.data()));
  } else {
    TORCH_INTERNAL_ASSERT(transfer.dtype == c10::kFloat);
    divide(reinterpret_cast<float*>(to.data()));
  }
}

const at::Tensor& Plan::set_aside(std::int64_t numel, c10::ScalarType dtype) {
  return aside_.emplace_back(at::empty({numel}, dtype));
}

}  // namespace fsdp::processes
