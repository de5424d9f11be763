#include "reference/trace.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <stdexcept>

namespace shardproof {
namespace {

// In the order of the enumeration.
constexpr std::array<std::string_view, 10> kQuantityNames = {
    "output",   "loss",       "mean_loss",        "saved_activation", "recomputed_activation",
    "gradient", "total_norm", "clipped_gradient", "parameter",        "optimizer_state"};

std::int64_t elements_of(const TraceTensor& tensor) {
  std::int64_t count = 1;
  for (const auto size : tensor.shape) {
    count *= size;
  }
  return count;
}

[[noreturn]] void refuse(const TraceTensor& tensor, std::string_view what) {
  throw TraceError(fmt::format("{} \"{}\" of shape [{}]: {}", to_string(tensor.quantity),
                               tensor.name, fmt::join(tensor.shape, ", "), what));
}

std::string owner(const Piece& piece) {
  return piece.rank == kNoRank ? std::string("the single device")
                               : fmt::format("rank {}", piece.rank);
}

void check_dtypes(const TraceTensor& tensor) {
  const auto& first = tensor.pieces.front();
  for (const auto& piece : tensor.pieces) {
    if (!piece.values.defined()) {
      refuse(tensor, fmt::format("the piece of {} holds no tensor", owner(piece)));
    }
    if (piece.values.scalar_type() != first.values.scalar_type()) {
      refuse(tensor, fmt::format("{} has dtype {}, but {} has {}", owner(piece),
                                 c10::toString(piece.values.scalar_type()), owner(first),
                                 c10::toString(first.values.scalar_type())));
    }
  }
}

void check_ranks(const TraceTensor& tensor) {
  for (std::size_t i = 0; i < tensor.pieces.size(); ++i) {
    const int rank = tensor.pieces[i].rank;
    if (rank != static_cast<int>(i)) {
      refuse(tensor, fmt::format("rank {} is missing; where its piece should be stands that of {}",
                                 i, owner(tensor.pieces[i])));
    }
  }
}

void check_whole_shapes(const TraceTensor& tensor) {
  for (const auto& piece : tensor.pieces) {
    if (piece.values.sizes() != at::IntArrayRef(tensor.shape)) {
      refuse(tensor, fmt::format("{} holds a tensor of shape [{}]", owner(piece),
                                 fmt::join(piece.values.sizes(), ", ")));
    }
  }
}

/// The non-empty pieces in the order of their elements, which are known to tile the tensor. A run
/// that several ranks hold stands there once.
std::vector<const Piece*> tiles(const TraceTensor& tensor) {
  std::vector<const Piece*> pieces;
  for (const auto& piece : tensor.pieces) {
    if (piece.values.dim() != 1) {
      refuse(tensor, fmt::format("the shard of {} has {} dimensions; wanted: 1", owner(piece),
                                 piece.values.dim()));
    }
    if (piece.values.numel() > 0) {
      pieces.push_back(&piece);
    }
  }
  std::stable_sort(pieces.begin(), pieces.end(),
                   [](const Piece* a, const Piece* b) { return a->offset < b->offset; });
  const auto same_run = [](const Piece* a, const Piece* b) {
    return a->offset == b->offset && a->values.numel() == b->values.numel();
  };
  pieces.erase(std::unique(pieces.begin(), pieces.end(), same_run), pieces.end());

  const auto count = elements_of(tensor);
  std::int64_t reached = 0;
  std::string holder = "the beginning";
  for (const auto* piece : pieces) {
    const auto end = piece->offset + piece->values.numel();
    if (piece->offset < 0 || end > count) {
      refuse(tensor, fmt::format("{} holds elements [{}, {}), but there are {}", owner(*piece),
                                 piece->offset, end, count));
    }
    if (piece->offset < reached) {
      refuse(tensor, fmt::format("elements [{}, {}) are held by both {} and {}", piece->offset,
                                 std::min(reached, end), holder, owner(*piece)));
    }
    if (piece->offset > reached) {
      refuse(tensor, fmt::format("no rank holds elements [{}, {}), between {} and {}", reached,
                                 piece->offset, holder, owner(*piece)));
    }
    reached = end;
    holder = owner(*piece);
  }
  if (reached < count) {
    refuse(tensor, fmt::format("no rank holds elements [{}, {}), between {} and the end", reached,
                               count, holder));
  }
  return pieces;
}

at::Tensor join_shards(const TraceTensor& tensor) {
  std::vector<at::Tensor> values;
  for (const auto* piece : tiles(tensor)) {
    values.push_back(piece->values);
  }
  if (values.empty()) {
    return at::empty(tensor.shape, tensor.pieces.front().values.options());
  }
  return at::cat(values).reshape(tensor.shape);
}

}  // namespace

std::string_view to_string(Quantity quantity) {
  return kQuantityNames.at(static_cast<std::size_t>(quantity));
}

Quantity quantity_from_string(std::string_view name) {
  const auto found = std::find(kQuantityNames.begin(), kQuantityNames.end(), name);
  if (found == kQuantityNames.end()) {
    throw std::invalid_argument(fmt::format("\"{}\" is no quantity; wanted: one of {}", name,
                                            fmt::join(kQuantityNames, ", ")));
  }
  return static_cast<Quantity>(found - kQuantityNames.begin());
}

const TraceTensor* StepTrace::find(Quantity quantity, std::string_view name) const {
  const auto found = std::find_if(tensors.begin(), tensors.end(), [&](const TraceTensor& tensor) {
    return tensor.quantity == quantity && tensor.name == name;
  });
  return found == tensors.end() ? nullptr : &*found;
}

at::Tensor assemble(const TraceTensor& tensor) {
  if (tensor.placement == Placement::per_rank) {
    refuse(tensor, "each rank has a value of its own, so that there is no whole tensor");
  }
  if (tensor.pieces.empty()) {
    refuse(tensor, "it has no pieces");
  }
  check_dtypes(tensor);
  if (tensor.placement == Placement::single) {
    if (tensor.pieces.size() != 1) {
      refuse(tensor, fmt::format("one device made it, but it has {} pieces", tensor.pieces.size()));
    }
    check_whole_shapes(tensor);
    return tensor.pieces.front().values;
  }
  check_ranks(tensor);
  if (tensor.placement == Placement::replicated) {
    check_whole_shapes(tensor);
    return tensor.pieces.front().values;
  }
  return join_shards(tensor);
}

bool has_non_finite_gradient(const StepTrace& trace) {
  for (const auto& tensor : trace.tensors) {
    if (tensor.quantity != Quantity::gradient) {
      continue;
    }
    for (const auto& piece : tensor.pieces) {
      if (!piece.values.isfinite().all().item<bool>()) {
        return true;
      }
    }
  }
  return false;
}

TrainingState state_after(const StepTrace& trace, std::int64_t left_out) {
  TrainingState state;
  state.steps_done = trace.step + 1;
  state.left_out = left_out;
  for (const auto& tensor : trace.tensors) {
    if (tensor.quantity == Quantity::parameter) {
      state.parameters[tensor.name] = assemble(tensor);
    } else if (tensor.quantity == Quantity::optimizer_state) {
      state.optimizer_state[tensor.name] = assemble(tensor);
    }
  }
  return state;
}

}  // namespace shardproof
