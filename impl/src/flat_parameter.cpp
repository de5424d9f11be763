#include "flat_parameter.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "fsdp/errors.h"
#include "storage_resize.h"

namespace fsdp {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

void check_shardable(const NamedParameter& entry, const at::Tensor& first) {
  const auto& parameter = entry.parameter;
  const auto refuse = [&](const std::string& seen, const std::string& wanted) {
    throw ShardingError(fmt::format("parameter '{}' {}; wanted: {}", entry.name, seen, wanted));
  };
  if (!parameter.defined()) {
    refuse("is undefined", "a tensor; register it before sharding, or leave it out");
  }
  if (parameter.is_meta()) {
    refuse("is on the meta device, where it has no values",
           "options.device and options.param_init_fn, which give it memory and values");
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

FlatParameter::FlatParameter(const std::vector<NamedParameter>& parameters, const Options& options)
    : options_(options) {
  if (parameters.empty()) {
    return;
  }
  const at::NoGradGuard no_grad;
  lay_out(parameters);
  const auto own = parameters_.front().options().requires_grad(false);
  const auto chunk_options = options_.offload ? own.device(at::kCPU) : own;
  const auto gathered_options =
      own.dtype(options_.param_dtype.value_or(parameters_.front().scalar_type()));
  gathered_is_chunk_ = options_.shards == 1 && gathered_options.dtype() == own.dtype() &&
                       chunk_options.device() == own.device();
  {
    auto whole = at::zeros({padded_numel()}, own);
    const auto views = views_of(whole);
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      views[i].copy_(parameters_[i].detach());
    }
    const auto chunk = whole.narrow(0, options_.shard * chunk_numel_, chunk_numel_);
    if (gathered_is_chunk_) {
      chunk_ = whole;
    } else {
      chunk_ = at::empty({chunk_numel_},
                         chunk_options.pinned_memory(chunk_options.device() != own.device()));
      chunk_.copy_(chunk);
    }
  }
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    chunk_views_.push_back(piece_of(chunk_, i));
  }
  stashed_.resize(slots_.size());
  accumulators_.resize(slots_.size());
  use_chunk();
  gathered_ = gathered_is_chunk_ ? chunk_ : at::empty({padded_numel()}, gathered_options);
  gathered_views_ = views_of(gathered_);
  free_gathered();
}

void FlatParameter::lay_out(const std::vector<NamedParameter>& parameters) {
  const auto& first = parameters.front().parameter;
  std::int64_t end = 0;
  for (const auto& entry : parameters) {
    check_shardable(entry, first);
    const auto narrowest = std::min<std::int64_t>(
        entry.parameter.element_size(),
        c10::elementSize(options_.param_dtype.value_or(entry.parameter.scalar_type())));
    const auto alignment = kAlignmentBytes / narrowest;
    const auto offset = round_up(end, alignment);
    slots_.push_back({entry.name, entry.parameter.sizes().vec(), entry.parameter.numel(), offset});
    parameters_.push_back(entry.parameter);
    end = offset + entry.parameter.numel();
  }
  chunk_numel_ = round_up(end, options_.shards) / options_.shards;
}

std::vector<at::Tensor> FlatParameter::views_of(const at::Tensor& whole) const {
  std::vector<at::Tensor> views;
  for (const auto& slot : slots_) {
    views.push_back(whole.narrow(0, slot.offset, slot.numel).view(slot.sizes));
  }
  return views;
}

bool FlatParameter::trains() const {
  return std::any_of(parameters_.begin(), parameters_.end(),
                     [](const at::Tensor& parameter) { return parameter.requires_grad(); });
}

std::int64_t FlatParameter::version() const {
  std::int64_t changes = 0;
  for (const auto& parameter : parameters_) {
    changes += parameter._version();
  }
  return changes;
}

bool FlatParameter::has_gradients() const {
  return std::any_of(parameters_.begin(), parameters_.end(),
                     [](const at::Tensor& parameter) { return parameter.grad().defined(); });
}

FlatParameter::Held FlatParameter::held_by(std::size_t index, int shard) const {
  const auto& slot = slots_[index];
  const auto chunk_start = shard * chunk_numel_;
  const auto begin = std::clamp(chunk_start, slot.offset, slot.offset + slot.numel);
  const auto end = std::clamp(chunk_start + chunk_numel_, slot.offset, slot.offset + slot.numel);
  return {begin - slot.offset, end - begin,
          std::clamp<std::int64_t>(begin - chunk_start, 0, chunk_numel_)};
}

at::Tensor FlatParameter::piece_of(const at::Tensor& chunk_like, std::size_t index) const {
  // Not a view: the optimizer's zero_grad calls detach_, which views do not allow.
  const auto part = held(index);
  const at::NoGradGuard no_grad;
  return at::empty({0}, chunk_like.options())
      .set_(chunk_like.storage(), chunk_like.storage_offset() + part.chunk_begin, {part.numel},
            {1});
}

void FlatParameter::allocate_gathered() {
  if (!gathered_is_chunk_) {
    resize_storage(gathered_, padded_numel() * gathered_.element_size());
  }
}

void FlatParameter::free_gathered() {
  if (!gathered_is_chunk_) {
    resize_storage(gathered_, 0);
  }
}

void FlatParameter::use_gathered() {
  using torch::autograd::impl::set_grad_accumulator;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const bool changes_dtype = parameters_[i].scalar_type() != gathered_.scalar_type();
    parameters_[i].set_data(gathered_views_[i]);
    if (changes_dtype) {
      set_grad_accumulator(parameters_[i], accumulators_[i]);
    }
  }
}

void FlatParameter::use_chunk() {
  using torch::autograd::impl::try_get_grad_accumulator;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].scalar_type() != chunk_.scalar_type()) {
      accumulators_[i] = try_get_grad_accumulator(parameters_[i]);
    }
    parameters_[i].set_data(chunk_views_[i]);
  }
}

void FlatParameter::use_whole(const at::Tensor& whole) {
  const auto views = views_of(whole);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].set_data(views[i]);
  }
}

at::Tensor FlatParameter::take_gradients(at::ScalarType dtype, std::vector<bool>& used) {
  const at::NoGradGuard no_grad;
  auto flat = at::empty({padded_numel()}, gathered_.options().dtype(dtype));
  used.resize(slots_.size());
  std::int64_t end = 0;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const auto& slot = slots_[i];
    flat.narrow(0, end, slot.offset - end).zero_();
    auto& gradient = parameters_[i].mutable_grad();
    auto part = flat.narrow(0, slot.offset, slot.numel);
    if (gradient.defined()) {
      part.view(slot.sizes).copy_(gradient);
      gradient.reset();
      used[i] = true;
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

void FlatParameter::set_sharded_gradient(std::size_t index, at::Tensor piece) {
  const at::NoGradGuard no_grad;
  auto earlier = std::exchange(stashed_[index], at::Tensor());
  if (earlier.defined() && piece.defined()) {
    earlier.add_(piece);
  }
  parameters_[index].mutable_grad() = earlier.defined() ? std::move(earlier) : std::move(piece);
}

}  // namespace fsdp
