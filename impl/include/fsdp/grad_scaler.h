#pragma once
// Loss scaling for float16. Small gradients would round to zero in float16, so the loss is
// multiplied by a large scale before backward, and gradients are divided by it before the
// optimizer's step. When a gradient overflows, the step is left out and the scale lowered; after
// long enough without one it is raised. (Micikevicius et al., Mixed Precision Training,
// arXiv:1710.03740; the rules and their rounding are those of torch.amp.GradScaler.)
//
// Each rank sees only its own shards, so the verdict is the ranks' in common: all step or none
// does, and the scale is the same everywhere.
//
//   fsdp::GradScaler scaler({}, group);
//   scaler.scale(loss).backward();
//   scaler.unscale_(optimizer);               // only where gradients are looked at or clipped
//   fsdp::clip_grad_norm_(*model, 1.0);
//   scaler.step(optimizer);
//   scaler.update();
//   optimizer.zero_grad();

#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/process_group.h"

namespace fsdp {

struct GradScalerOptions {
  /// The first scale: positive, and both it and 1/scale within float32.
  double init_scale = 65536;
  /// The scale is multiplied by it after `growth_interval` steps in a row without overflow; > 1.
  double growth_factor = 2;
  /// The scale is multiplied by it after a step with an overflow; between 0 and 1.
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;
  /// False: losses and gradients are left alone, every step is taken, and there are no collectives.
  bool enabled = true;
};

/// Everything to go on from, for a checkpoint. Take it after update().
struct GradScalerState {
  bool enabled = true;
  float scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;
  std::int64_t growth_tracker = 0;  // steps without overflow since the scale last changed
};

class GradScaler {
 public:
  /// `process_group`: all ranks that train one model together, those that shard it and those that
  /// replicate it. Every rank must give the same options. Throws UsageError: an option is out of
  /// range, or there is no process group.
  GradScaler(GradScalerOptions options, BackendPtr process_group);

  /// The loss times the scale, of the loss's dtype and shape, on any device; autograd follows it.
  /// Throws UsageError if it is not a floating-point tensor.
  torch::Tensor scale(const torch::Tensor& loss);
  std::vector<torch::Tensor> scale(const std::vector<torch::Tensor>& losses);

  /// Multiplies the gradients of the optimizer's parameters, of any floating dtype, by the float32
  /// number 1/scale, as at::_amp_foreach_non_finite_check_and_unscale_ does (in float64 for
  /// float64, else in float32), and finds out if any rank has one that is infinite or NaN, before
  /// or after. One all-reduce (maximum) of three numbers. Every rank must call it once per step and
  /// optimizer, after the last backward(); a rank without elements or gradients takes part too
  /// (pytorch/pytorch#99174). Throws UsageError: called twice for the optimizer since update(),
  /// called after step(), scale() was never called, or a gradient is sparse. MismatchError on every
  /// rank: ranks have different scales.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Calls optimizer.step() if every rank's gradients were finite; unscales first if that was not
  /// done. Returns whether it stepped: the same on every rank. Throws UsageError: called twice for
  /// the optimizer since update(); and what unscale_ throws.
  bool step(torch::optim::Optimizer& optimizer);

  /// Ends the step: lowers the scale if any optimizer's gradients were not finite, else counts, and
  /// raises it when it is time. It is not raised beyond float32. With `new_scale` the scale is set
  /// to that instead, the same on every rank, and the count stays. No communication. Throws
  /// UsageError: neither unscale_() nor step() was called since the last update(), or new_scale is
  /// out of range. NonFiniteError on every rank: the scale was lowered until 1/scale is no float32,
  /// so that it is not the scale that makes gradients overflow.
  void update(std::optional<double> new_scale = std::nullopt);

  /// 1 if not enabled.
  float get_scale() const { return options_.enabled ? scale_ : 1.0f; }
  bool is_enabled() const { return options_.enabled; }

  GradScalerState state_dict() const;
  /// Does nothing if not enabled. Throws UsageError if the state is out of range, or is that of a
  /// scaler that was not enabled.
  void load_state_dict(const GradScalerState& state);

 private:
  enum class Stage { unscaled, stepped };
  struct Progress {
    Stage stage = Stage::unscaled;
    bool found_nonfinite = false;  // on any rank
  };

  bool found_on_any_rank(const torch::Tensor& found) const;
  void set_scale(double scale, const std::string& what);
  std::string prefix() const;

  GradScalerOptions options_;
  BackendPtr process_group_;
  float scale_ = 1;
  std::int64_t growth_tracker_ = 0;
  std::optional<at::Device> loss_device_;                        // of the last loss that was scaled
  std::map<const torch::optim::Optimizer*, Progress> progress_;  // since the last update
};

}  // namespace fsdp
