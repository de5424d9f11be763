#pragma once
// Fully sharded data parallelism. `fully_shard(module, {process_group})` makes the module one unit:
// between uses, each rank holds a 1/W share of its parameters, gradients and optimizer state; the
// whole parameters are gathered just before the module runs forward or backward and freed after,
// and gradients are reduce-scattered and averaged. (Rajbhandari et al., ZeRO, arXiv:1910.02054;
// Zhao et al., PyTorch FSDP, arXiv:2304.11277.)
//
//   auto model = ...;                          // whole parameters, the same on every rank
//   for (auto& block : model->blocks) fsdp::fully_shard(block, {group});   // inner units first
//   fsdp::fully_shard(model, {group});         // the rest
//   torch::optim::AdamW optimizer(model->parameters(), ...);
//   auto loss = ...model(input)...; loss.backward();
//   fsdp::clip_grad_norm_(*model, 1.0);
//   optimizer.step(); optimizer.zero_grad();

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/module.h"
#include "fsdp/process_group.h"

namespace fsdp {

struct FullyShardOptions {
  /// The ranks that share the parameters. Required.
  BackendPtr process_group;
};

/// Makes `module` a unit of all its parameters that no inner unit has taken. Every rank must call
/// it on the same modules in the same order, with the same parameter values. Parameters keep their
/// identity, so an optimizer may be made before or after. Outside of forward and backward, a
/// parameter is its piece of this rank's share, one-dimensional and possibly empty. Throws
/// UsageError: no process group. ShardingError: the module has no hooks (declare it with
/// FSDP_MODULE, or use fsdp::wrap), is a unit already, or has a parameter that cannot be sharded;
/// the message names it.
void fully_shard(const std::shared_ptr<torch::nn::Module>& module, FullyShardOptions options);

template <typename ModuleType>
void fully_shard(const torch::nn::ModuleHolder<ModuleType>& holder, FullyShardOptions options) {
  fully_shard(std::static_pointer_cast<torch::nn::Module>(holder.ptr()), std::move(options));
}

/// Which elements of which parameter this rank holds.
struct ShardPlacement {
  std::string name;                 // in the plain model
  std::vector<std::int64_t> sizes;  // of the whole parameter
  std::int64_t begin = 0;           // first element held, in the flattened parameter
  std::int64_t numel = 0;           // elements held, 0 or more
  at::Tensor parameter;             // the parameter itself
};

/// The placements of all sharded parameters below `module`, in the order of named_parameters().
std::vector<ShardPlacement> shard_placements(torch::nn::Module& module);

/// Scales all gradients below a sharded module so that their norm over all ranks is at most
/// `max_norm`, and returns the norm before scaling: a scalar of the gradients' dtype, equal on
/// every rank. Every rank must call it, between backward() and the optimizer's step. For norm_type
/// 2 the norm is the exact sum of squares of every gradient element of every rank, rounded to
/// float64 once, its root rounded to the dtype: it does not depend on the world size or on how
/// parameters are sharded. Other p: sum of |g|^p in float64, in rank order; infinity: the maximum.
/// Gradients are multiplied by min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_
/// does. One all-reduce. Throws NonFiniteError on every rank if error_if_nonfinite and the norm is
/// not finite; gradients are then left as they are. UsageError: max_norm is negative or NaN,
/// norm_type is not positive, or `module` is not sharded.
torch::Tensor clip_grad_norm_(torch::nn::Module& module, double max_norm, double norm_type = 2.0,
                              bool error_if_nonfinite = false);

/// The norm alone.
torch::Tensor grad_norm(torch::nn::Module& module, double norm_type = 2.0);

/// Owns a model and makes it one unit (plus the units that its submodules already are). Works for
/// modules with hooks and for plain ones.
///   fsdp::FullyShardedDataParallel model(torch::nn::Sequential(...), {group});
///   model(x);  model.clip_grad_norm_(1.0);  torch::optim::SGD sgd(model->parameters(), 0.1);
template <typename ModuleType>
class FullyShardedDataParallel {
 public:
  FullyShardedDataParallel(const torch::nn::ModuleHolder<ModuleType>& holder,
                           FullyShardOptions options)
      : module_(holder.ptr()), hooked_(with_hooks(holder)) {
    fully_shard(std::static_pointer_cast<torch::nn::Module>(hooked_), std::move(options));
  }

  template <typename... Args>
  auto operator()(Args&&... args) {
    return call(*hooked_, std::forward<Args>(args)...);
  }
  ModuleType* operator->() const { return module_.get(); }
  ModuleType& module() const { return *module_; }
  /// As fsdp::shard_placements of the whole model.
  std::vector<ShardPlacement> shard_placements() const { return fsdp::shard_placements(*hooked_); }
  torch::Tensor clip_grad_norm_(double max_norm, double norm_type = 2.0,
                                bool error_if_nonfinite = false) {
    return fsdp::clip_grad_norm_(*hooked_, max_norm, norm_type, error_if_nonfinite);
  }

 private:
  static constexpr bool kHookable = std::derived_from<ModuleType, HookableModule>;
  static auto with_hooks(const torch::nn::ModuleHolder<ModuleType>& holder) {
    if constexpr (kHookable) {
      return holder.ptr();
    } else {
      return wrap(holder).ptr();
    }
  }
  using Hooked = std::remove_reference_t<decltype(*with_hooks(
      std::declval<const torch::nn::ModuleHolder<ModuleType>&>()))>;

  std::shared_ptr<ModuleType> module_;
  std::shared_ptr<Hooked> hooked_;
};

template <typename Holder>
requires requires {
  typename Holder::ContainedType;
}
FullyShardedDataParallel(const Holder&, FullyShardOptions)
    ->FullyShardedDataParallel<typename Holder::ContainedType>;

}  // namespace fsdp
