#include "flat_parameter.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "fsdp/errors.h"
#include "storage_resize.h"

namespace fsdp {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

void check_shardable(const FlatParameter::NamedParameter& entry, const at::Tensor& first,
                     int rank) {
  const auto& parameter = entry.parameter;
  const auto refuse = [&](const std::string& seen, const std::string& wanted) {
    throw ShardingError(
        fmt::format("rank {}: parameter '{}' {}; wanted: {}", rank, entry.name, seen, wanted));
  };
  if (!parameter.defined()) {
    refuse("is undefined", "a tensor; register it before sharding, or leave it out");
  }
  if (parameter.layout() != at::kStrided) {
    refuse("is not dense", "a dense tensor");
  }
  if (!at::isFloatingType(parameter.scalar_type())) {
    refuse(fmt::format("has dtype {}", c10::toString(parameter.scalar_type())),
           "a floating-point dtype; register other tensors as buffers");
  }
  if (parameter.scalar_type() != first.scalar_type()) {
    refuse(fmt::format("has dtype {} while another parameter of the unit has {}",
                       c10::toString(parameter.scalar_type()), c10::toString(first.scalar_type())),
           "one dtype per unit; shard the submodules of another dtype as units of their own");
  }
  if (parameter.device() != first.device()) {
    refuse(fmt::format("is on {} while another parameter of the unit is on {}",
                       parameter.device().str(), first.device().str()),
           "one device per rank; move the module before sharding it");
  }
}

}  // namespace

FlatParameter::FlatParameter(const std::vector<NamedParameter>& parameters, int rank,
                             int world_size)
    : rank_(rank), world_size_(world_size) {
  if (parameters.empty()) {
    return;
  }
  const at::NoGradGuard no_grad;
  const auto& first = parameters.front().parameter;
  std::int64_t end = 0;
  for (const auto& entry : parameters) {
    check_shardable(entry, first, rank);
    const auto alignment = kAlignmentBytes / entry.parameter.element_size();
    const auto offset = round_up(end, alignment);
    slots_.push_back({entry.name, entry.parameter.sizes().vec(), entry.parameter.numel(), offset});
    parameters_.push_back(entry.parameter);
    end = offset + entry.parameter.numel();
  }
  chunk_numel_ = round_up(end, world_size) / world_size;

  gathered_ = at::zeros({padded_numel()}, first.options().requires_grad(false));
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    gathered_views_.push_back(
        gathered_.narrow(0, slots_[i].offset, slots_[i].numel).view(slots_[i].sizes));
    gathered_views_.back().copy_(parameters_[i].detach());
  }
  chunk_ = gathered_.narrow(0, rank * chunk_numel_, chunk_numel_).clone();
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    chunk_views_.push_back(piece_of(chunk_, i));
  }
  stashed_.resize(slots_.size());
  use_chunk();
  free_gathered();
}

FlatParameter::Held FlatParameter::held_of_rank(std::size_t index, int rank) const {
  const auto& slot = slots_[index];
  const auto chunk_start = rank * chunk_numel_;
  const auto begin = std::clamp(chunk_start, slot.offset, slot.offset + slot.numel);
  const auto end = std::clamp(chunk_start + chunk_numel_, slot.offset, slot.offset + slot.numel);
  return {begin - slot.offset, end - begin,
          std::clamp<std::int64_t>(begin - chunk_start, 0, chunk_numel_)};
}

at::Tensor FlatParameter::piece_of(const at::Tensor& chunk, std::size_t index) const {
  // Not a view: the optimizer's zero_grad calls detach_, which views do not allow.
  const auto part = held(index);
  const at::NoGradGuard no_grad;
  return at::empty({0}, chunk.options())
      .set_(chunk.storage(), chunk.storage_offset() + part.chunk_begin, {part.numel}, {1});
}

void FlatParameter::allocate_gathered() {
  resize_storage(gathered_, padded_numel() * gathered_.element_size());
}

void FlatParameter::free_gathered() {
  resize_storage(gathered_, 0);
}

void FlatParameter::use_gathered() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].set_data(gathered_views_[i]);
  }
}

void FlatParameter::use_chunk() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].set_data(chunk_views_[i]);
  }
}

at::Tensor FlatParameter::take_gradients() {
  const at::NoGradGuard no_grad;
  auto flat = at::empty({padded_numel()}, chunk_.options());
  std::int64_t end = 0;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const auto& slot = slots_[i];
    flat.narrow(0, end, slot.offset - end).zero_();
    auto& gradient = parameters_[i].mutable_grad();
    auto part = flat.narrow(0, slot.offset, slot.numel);
    if (gradient.defined()) {
      part.view(slot.sizes).copy_(gradient);
      gradient.reset();
    } else {
      part.zero_();
    }
    end = slot.offset + slot.numel;
  }
  flat.narrow(0, end, padded_numel() - end).zero_();
  return flat;
}

void FlatParameter::stash_sharded_gradients() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    stashed_[i] = std::exchange(parameters_[i].mutable_grad(), at::Tensor());
  }
}

void FlatParameter::restore_sharded_gradients() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].mutable_grad() = std::exchange(stashed_[i], at::Tensor());
  }
}

void FlatParameter::set_sharded_gradients(const at::Tensor& chunk_gradient) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].requires_grad()) {
      continue;
    }
    auto piece = piece_of(chunk_gradient, i);
    auto earlier = std::exchange(stashed_[i], at::Tensor());
    if (earlier.defined()) {
      piece = earlier.add_(piece);
    }
    parameters_[i].mutable_grad() = piece;
  }
}

}  // namespace fsdp
