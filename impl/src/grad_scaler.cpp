#include "fsdp/grad_scaler.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "fsdp/errors.h"

namespace fsdp {
namespace {

/// What the gradients are multiplied by: rounded to float32 once, from float64.
float inverse(float scale) {
  return static_cast<float>(1.0 / static_cast<double>(scale));
}

bool usable(float scale) {
  return scale > 0 && std::isfinite(scale) && std::isfinite(inverse(scale));
}

/// Gradients that one call of the kernel can take.
struct Bucket {
  at::Device device;
  at::ScalarType dtype;
  std::vector<at::Tensor> gradients;
};

std::vector<Bucket> buckets_of(torch::optim::Optimizer& optimizer, const std::string& prefix) {
  std::vector<Bucket> buckets;
  for (auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto& gradient = parameter.grad();
      if (!gradient.defined()) {
        continue;
      }
      if (gradient.layout() != at::kStrided) {
        throw UsageError(fmt::format(
            "{}the gradient of a parameter with {} elements has layout {}; wanted: dense "
            "gradients. Make the layer that it comes from give dense ones (sparse(false))",
            prefix, parameter.numel(), c10::str(gradient.layout())));
      }
      auto bucket = std::find_if(buckets.begin(), buckets.end(), [&](const Bucket& each) {
        return each.device == gradient.device() && each.dtype == gradient.scalar_type();
      });
      if (bucket == buckets.end()) {
        buckets.push_back({gradient.device(), gradient.scalar_type(), {}});
        bucket = std::prev(buckets.end());
      }
      bucket->gradients.push_back(gradient);
    }
  }
  return buckets;
}

/// Where the ranks' verdicts are combined: on the accelerator if there is one, since its process
/// groups refuse CPU tensors, also where gradients were moved to the CPU. A rank without gradients
/// must come to the same answer, so it is not they that are asked.
at::Device verdict_device(torch::optim::Optimizer& optimizer, at::Device loss_device) {
  auto device = loss_device;
  for (auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      if (device.is_cpu()) {
        device = parameter.device();
      }
    }
  }
  return device;
}

/// Unscales in place; not zero if a gradient is not finite: float32, scalar, on `device`.
at::Tensor unscale_gradients(const std::vector<Bucket>& buckets, float inverse_scale,
                             at::Device device) {
  auto found = at::zeros({}, at::TensorOptions(at::kFloat).device(device));
  for (const auto& bucket : buckets) {
    const auto options = at::TensorOptions(at::kFloat).device(bucket.device);
    auto found_here = at::zeros({}, options);
    at::_amp_foreach_non_finite_check_and_unscale_(bucket.gradients, found_here,
                                                   at::full({}, inverse_scale, options));
    if (inverse_scale > 1) {
      // The kernel looks at what it reads, and this multiplication may itself overflow.
      at::_amp_foreach_non_finite_check_and_unscale_(bucket.gradients, found_here,
                                                     at::ones({}, options));
    }
    found.add_(found_here.to(device));
  }
  return found;
}

}  // namespace

GradScaler::GradScaler(GradScalerOptions options, BackendPtr process_group)
    : options_(options), process_group_(std::move(process_group)) {
  if (!options_.enabled) {
    return;
  }
  if (process_group_ == nullptr) {
    throw UsageError(
        "GradScaler: process_group is null; wanted: the group of all ranks that train the model. "
        "Pass the one that was given to fsdp::fully_shard, or set enabled = false");
  }
  const auto require = [this](bool held, const char* name, double seen, const char* wanted) {
    if (!held) {
      throw UsageError(fmt::format("{}{} is {}; wanted: {}", prefix(), name, seen, wanted));
    }
  };
  require(options_.growth_factor > 1 && std::isfinite(options_.growth_factor), "growth_factor",
          options_.growth_factor, "a number above 1");
  require(options_.backoff_factor > 0 && options_.backoff_factor < 1, "backoff_factor",
          options_.backoff_factor, "a number between 0 and 1");
  require(options_.growth_interval >= 1, "growth_interval",
          static_cast<double>(options_.growth_interval), "at least 1 step");
  set_scale(options_.init_scale, "init_scale");
}

torch::Tensor GradScaler::scale(const torch::Tensor& loss) {
  if (!options_.enabled) {
    return loss;
  }
  if (!loss.defined() || !at::isFloatingType(loss.scalar_type())) {
    throw UsageError(fmt::format(
        "{}scale() was given {}; wanted: a floating-point loss", prefix(),
        loss.defined() ? fmt::format("a tensor of dtype {}", c10::toString(loss.scalar_type()))
                       : "an undefined tensor"));
  }
  loss_device_ = loss.device();
  // A float16 loss is multiplied in float32, because a scale of 65536 is itself beyond float16.
  const auto factor = at::full({}, scale_, at::TensorOptions(at::kFloat).device(loss.device()));
  const auto wide = at::promote_types(loss.scalar_type(), at::kFloat);
  return (loss.to(wide) * factor).to(loss.scalar_type());
}

std::vector<torch::Tensor> GradScaler::scale(const std::vector<torch::Tensor>& losses) {
  std::vector<torch::Tensor> scaled;
  for (const auto& loss : losses) {
    scaled.push_back(scale(loss));
  }
  return scaled;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) {
    return;
  }
  if (!loss_device_) {
    throw UsageError(fmt::format(
        "{}no loss has been scaled; wanted: scaler.scale(loss).backward() before unscale_() and "
        "step()",
        prefix()));
  }
  if (const auto seen = progress_.find(&optimizer); seen != progress_.end()) {
    throw UsageError(fmt::format(
        "{}unscale_() is called after {} of the same optimizer; wanted: once per step, after the "
        "last backward() and before step(). Call update() at the end of each step",
        prefix(), seen->second.stage == Stage::stepped ? "step()" : "unscale_()"));
  }
  const at::NoGradGuard no_grad;
  const auto device = verdict_device(optimizer, *loss_device_);
  const auto found = unscale_gradients(buckets_of(optimizer, prefix()), inverse(scale_), device);
  progress_[&optimizer] = {Stage::unscaled, found_on_any_rank(found)};
}

/// The scale and its negative go along with the verdict: their maxima are those of equal numbers
/// only if all ranks have the same.
bool GradScaler::found_on_any_rank(const torch::Tensor& found) const {
  auto verdict =
      at::tensor({0.0f, scale_, -scale_}, at::TensorOptions(at::kFloat)).to(found.device());
  verdict[0].copy_(found);
  std::vector<at::Tensor> tensors = {verdict};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  process_group_->allreduce(tensors, options)->wait();
  const auto combined = verdict.cpu();
  const auto highest = combined[1].item<float>();
  const auto lowest = -combined[2].item<float>();
  if (highest != lowest) {
    throw MismatchError(fmt::format(
        "{}the scale is {} here, and between {} and {} over the {} ranks; wanted: one scale. Give "
        "every rank the same options, and load the same state on all",
        prefix(), scale_, lowest, highest, process_group_->getSize()));
  }
  return combined[0].item<float>() > 0;
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) {
    optimizer.step();
    return true;
  }
  auto seen = progress_.find(&optimizer);
  if (seen != progress_.end() && seen->second.stage == Stage::stepped) {
    throw UsageError(fmt::format(
        "{}step() is called a second time for the same optimizer; wanted: once per step. Call "
        "update() at the end of each step",
        prefix()));
  }
  if (seen == progress_.end()) {
    unscale_(optimizer);
    seen = progress_.find(&optimizer);
  }
  seen->second.stage = Stage::stepped;
  if (seen->second.found_nonfinite) {
    return false;
  }
  optimizer.step();
  return true;
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!options_.enabled) {
    return;
  }
  if (new_scale) {
    set_scale(*new_scale, "new_scale");
    progress_.clear();
    return;
  }
  if (progress_.empty()) {
    throw UsageError(fmt::format(
        "{}update() is called though no gradients were looked at since the last; wanted: "
        "step(optimizer) first, for each optimizer of the step. To set the scale, pass it",
        prefix()));
  }
  const bool found = std::any_of(progress_.begin(), progress_.end(),
                                 [](const auto& each) { return each.second.found_nonfinite; });
  progress_.clear();
  if (found) {
    growth_tracker_ = 0;
    const auto lowered = static_cast<float>(scale_ * options_.backoff_factor);
    if (!usable(lowered)) {
      throw NonFiniteError(fmt::format(
          "{}gradients were infinite or NaN at every step until the scale was down to {}; wanted: "
          "finite ones at some scale. Look for a loss, an input or a parameter that is itself not "
          "finite",
          prefix(), scale_));
    }
    scale_ = lowered;
    return;
  }
  if (++growth_tracker_ == options_.growth_interval) {
    growth_tracker_ = 0;
    const auto raised = static_cast<float>(scale_ * options_.growth_factor);
    scale_ = usable(raised) ? raised : scale_;
  }
}

GradScalerState GradScaler::state_dict() const {
  return {options_.enabled,         get_scale(),    options_.growth_factor, options_.backoff_factor,
          options_.growth_interval, growth_tracker_};
}

void GradScaler::load_state_dict(const GradScalerState& state) {
  if (!options_.enabled) {
    return;
  }
  if (!state.enabled) {
    throw UsageError(fmt::format(
        "{}the state to load is that of a scaler that was not enabled; wanted: one that was. Keep "
        "the options that this one was made with, and load nothing",
        prefix()));
  }
  if (state.growth_tracker < 0 || state.growth_tracker >= state.growth_interval) {
    throw UsageError(
        fmt::format("{}growth_tracker of the state to load is {}; wanted: 0 or more, and below its "
                    "growth_interval, {}",
                    prefix(), state.growth_tracker, state.growth_interval));
  }
  GradScaler loaded({state.scale, state.growth_factor, state.backoff_factor, state.growth_interval},
                    process_group_);
  options_ = loaded.options_;
  scale_ = loaded.scale_;
  growth_tracker_ = state.growth_tracker;
}

void GradScaler::set_scale(double scale, const std::string& what) {
  const auto rounded = static_cast<float>(scale);
  if (!usable(rounded)) {
    throw UsageError(
        fmt::format("{}{} is {}; wanted: a positive number that float32 holds, and its inverse too",
                    prefix(), what, scale));
  }
  scale_ = rounded;
}

std::string GradScaler::prefix() const {
  return fmt::format("rank {}: GradScaler: ", process_group_->getRank());
}

}  // namespace fsdp
