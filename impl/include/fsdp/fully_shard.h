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
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/module.h"
#include "fsdp/process_group.h"

namespace fsdp {

/// What is sharded, and over which ranks. (Names as in PyTorch's FSDP.)
enum class ShardingStrategy {
  full_shard,     // parameters, gradients and optimizer state, over all ranks; parameters are freed
                  // after forward and gathered again for backward (ZeRO-3)
  shard_grad_op,  // the same, but parameters stay gathered from forward to backward (ZeRO-2)
  no_shard,       // nothing: every rank keeps all, gradients are all-reduced (DDP)
  hybrid_shard,   // full_shard within the shard group, gradients all-reduced over the replicas
  hybrid_shard_zero2,  // shard_grad_op within the shard group, likewise
};
std::string_view to_string(ShardingStrategy strategy);

/// Dtypes of one unit. Unset ones are the dtype that its parameters have when they are sharded,
/// which is also that of the shards, of their gradients and of the optimizer's state.
struct MixedPrecision {
  std::optional<at::ScalarType> param_dtype;  // of gathered parameters: what the module computes in
  std::optional<at::ScalarType> reduce_dtype;  // gradients are summed over ranks in it; unset:
                                               // param_dtype
  std::optional<at::ScalarType> output_dtype;  // floating-point outputs are cast to it
  std::optional<at::ScalarType> buffer_dtype;  // floating-point buffers are cast to it, once and
                                               // for all, when the unit is made
  bool cast_forward_inputs = true;  // floating-point inputs are cast to param_dtype, if that is set
};

/// When parameters of units that come later are gathered ahead of their use. Changes no result.
enum class BackwardPrefetch {
  none,
  pre,   // the next unit is gathered before this one's gradients are computed: most overlap
  post,  // after this one's gradients are on their way: less memory
};

/// A unit's gradient on its way over the ranks.
struct GradientReduction {
  std::string_view unit;
  BackendPtr shard_group;
  BackendPtr replicate_group;  // null if there is one replica
  const at::Tensor& whole;     // [padded], reduce dtype, this rank's, padding 0; may be overwritten
  at::Tensor& shard;  // [padded / shards], reduce dtype: to be filled with the sum over ranks
};
/// Takes the place of reduce-scatter and all-reduce; the division stays FSDP's.
using CommHook = std::function<void(GradientReduction&)>;
/// Sums in bfloat16, for half the traffic of float32.
void bf16_compress_hook(GradientReduction& reduction);

struct FullyShardOptions {
  /// The ranks that share the parameters; for no_shard, the ranks among which they are the same.
  /// Required, unless `mesh` is given.
  BackendPtr process_group{};
  /// For the hybrid strategies, in place of process_group: make_device_mesh(world, replicas).
  DeviceMesh mesh{};
  ShardingStrategy strategy = ShardingStrategy::full_shard;
  /// Overrides what the strategy does with gathered parameters after forward: 0 keeps them, 1 frees
  /// them, a larger number g keeps them sharded over groups of g consecutive ranks of the shard
  /// group, which g must divide. Unset: the strategy's way, but the outermost unit, whose backward
  /// comes first, keeps them with every strategy.
  std::optional<int> reshard_after_forward{};
  MixedPrecision mixed_precision{};

  /// Gathers the next units, as many as this, when a unit starts its forward. The order is that of
  /// the last forward, so the first is without.
  int forward_prefetch = 0;
  BackwardPrefetch backward_prefetch = BackwardPrefetch::pre;
  /// Gathers ahead of use that may be under way or unused at the same time; 0: no limit.
  int limit_gathers = 0;

  /// The sum over ranks is divided by post; before it, each rank's gradient by pre. Both unset: pre
  /// is 1 and post the number of ranks (shards x replicas); for a reduce dtype of float16, both are
  /// about its root, so that sums neither overflow nor vanish (the rule of FSDP1: double pre while
  /// it divides the number of ranks and stays below the quotient).
  std::optional<double> gradient_predivide_factor{};
  std::optional<double> gradient_postdivide_factor{};
  CommHook comm_hook{};

  /// Parameters below the module that are left as they are: whole, and neither gathered nor
  /// reduced. Keeping them the same on all ranks is up to the caller; see unmanaged_parameters.
  std::vector<at::Tensor> ignored_parameters{};
  /// A parameter that is used in a step by some ranks only is an error (ShardingError) unless this
  /// is true; then ranks tell each other at the end of every backward which parameters had a
  /// gradient (for each unit an all-reduce of an int32 per parameter, over the shards and over the
  /// replicas), and those that had none anywhere get none.
  bool find_unused_parameters = false;

  /// Before sharding, parameters and buffers are overwritten by those of rank 0 (of shard 0 of
  /// replica 0). Broadcasts one by one.
  bool sync_module_states = false;
  /// Parameters and buffers that are on the meta device get memory on this device, and
  /// param_init_fn is called once with each module that has any of its own, to fill them in.
  std::optional<at::Device> device{};
  std::function<void(torch::nn::Module&)> param_init_fn{};

  /// Shards, their gradients and the optimizer's state live on the CPU, pinned if the module is on
  /// another device.
  bool cpu_offload = false;
};

/// Makes `module` a unit of all its parameters that no inner unit has taken. Every rank must call
/// it on the same modules in the same order, with the same parameter values (or
/// sync_module_states). Parameters keep their identity, so an optimizer may be made before or
/// after. Outside of forward and backward, a parameter is its piece of this rank's share,
/// one-dimensional and possibly empty, with zero-dimensional parameters counted as one element and
/// non-contiguous ones made contiguous. A parameter that an inner unit has taken and that is also
/// reachable by another way (tied weights) moves to this unit, so that it is gathered wherever it
/// is used. Throws UsageError: no process group, or options that contradict each other.
/// ShardingError: the module has no hooks (declare it with FSDP_MODULE, or use fsdp::wrap), is a
/// unit already, has run before, or has a parameter that cannot be sharded; the message names it.
void fully_shard(const std::shared_ptr<torch::nn::Module>& module, FullyShardOptions options);

/// Makes several modules one unit, gathered when the first of them runs and freed when all have
/// run.
void fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
                 FullyShardOptions options);

template <typename ModuleType>
void fully_shard(const torch::nn::ModuleHolder<ModuleType>& holder, FullyShardOptions options) {
  fully_shard(std::static_pointer_cast<torch::nn::Module>(holder.ptr()), std::move(options));
}

/// Makes units of the modules strictly below `module` that the predicate picks, innermost first,
/// and then of `module` itself. Returns the plain names of the units, in that order.
using WrapPredicate = std::function<bool(const std::string& name, torch::nn::Module& module)>;
std::vector<std::string> fully_shard_where(const std::shared_ptr<torch::nn::Module>& module,
                                           const WrapPredicate& predicate,
                                           const FullyShardOptions& options);
/// Picks a module whose parameters that no unit below it has are at least `min_numel` elements.
WrapPredicate at_least(std::int64_t min_numel);

/// Which elements of which parameter this rank holds.
struct ShardPlacement {
  std::string name;                 // in the plain model
  std::vector<std::int64_t> sizes;  // of the whole parameter
  std::int64_t begin = 0;           // first element held, in the flattened parameter
  std::int64_t numel = 0;           // elements held, 0 or more
  at::Tensor parameter;             // the parameter itself
  BackendPtr shard_group{};         // the ranks that share it; of size 1 if none do
  bool is_primary_replica = true;   // false where another rank holds the same elements and writes
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges{};  // (begin, numel) by shard rank
};

/// The placements of all sharded parameters below `module`, in the order of named_parameters().
std::vector<ShardPlacement> shard_placements(torch::nn::Module& module);
/// Names of the parameters below `module` that no unit has: they stay whole and are not reduced.
std::vector<std::string> unmanaged_parameters(torch::nn::Module& module);

/// What a unit does, as it stands now.
struct UnitDescription {
  std::string name;  // "" for the root
  ShardingStrategy strategy{};
  int shards = 1;
  int replicas = 1;
  std::vector<std::string> parameters;
  std::int64_t padded_numel = 0;  // of the flat parameter
  at::ScalarType dtype{};         // of the shards
  at::ScalarType param_dtype{};
  at::ScalarType reduce_dtype{};
  double predivide_factor = 1;
  double postdivide_factor = 1;
  bool is_gathered = false;  // the whole parameters are in memory
};
/// Of all units at and below `module`, in the order of modules().
std::vector<UnitDescription> describe_units(torch::nn::Module& module);

/// Takes the memory of the parameters and buffers below `module` away: they go to the meta device
/// and keep their shapes, dtypes and identity. Build a large model block by block with it, then let
/// fully_shard fill each unit in (options.device, options.param_init_fn), so that never more than
/// one block is whole.
void to_meta(torch::nn::Module& module);

// ---- Finer control. Each acts on the units at and below `module`; every rank must do the same.

/// Gathers the parameters of `module`'s own unit ahead of its forward. With `async`, returns at
/// once, and wait() (or the forward) waits. Until they are resharded, parameters have their whole
/// shape. Best after zero_grad: what was gathered while a parameter had a gradient is gathered
/// again by the next forward, since an optimizer may have stepped meanwhile (torch::optim::SGD
/// writes through data(), which leaves no trace).
class UnshardHandle {
 public:
  explicit UnshardHandle(std::function<void()> wait) : wait_(std::move(wait)) {}
  void wait() { wait_(); }

 private:
  std::function<void()> wait_;
};
UnshardHandle unshard(torch::nn::Module& module, bool async = false);
/// Frees the gathered parameters of `module`'s own unit.
void reshard(torch::nn::Module& module);

/// With false, backward keeps this rank's whole gradients and does not reduce; the next backward
/// with true reduces their sum. Costs the memory of whole gradients, which zero_grad does not
/// touch: what was kept goes into the next reduction.
void set_requires_gradient_sync(torch::nn::Module& module, bool required);
/// Only with replicas: with false, backward sums over the shards and keeps that; the next backward
/// with true sums over the replicas too.
void set_requires_all_reduce(torch::nn::Module& module, bool required);
/// With false, the next backwards do not wait for their reductions to end; the last must have true.
void set_is_last_backward(torch::nn::Module& module, bool is_last);
/// As FullyShardOptions::reshard_after_forward; only 0 and 1.
void set_reshard_after_forward(torch::nn::Module& module, bool reshard);
/// With false, gathered parameters stay until the next backward with true, or reshard(), or the
/// next forward after a backward that reduced gradients, since an optimizer may have stepped.
void set_reshard_after_backward(torch::nn::Module& module, bool reshard);
/// The sum over ranks is divided by `factor` instead of the number of ranks.
void set_gradient_divide_factor(torch::nn::Module& module, double factor);
void register_comm_hook(torch::nn::Module& module, CommHook hook);

/// set_requires_gradient_sync(module, false) for a scope.
class NoSync {
 public:
  explicit NoSync(torch::nn::Module& module) : module_(module) {
    set_requires_gradient_sync(module_, false);
  }
  ~NoSync() { set_requires_gradient_sync(module_, true); }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  torch::nn::Module& module_;
};

/// While it lives, every parameter below `module` is whole, in the shards' dtype, on every rank,
/// and may be read and, the same on every rank, written; edits are kept. Not in forward or
/// backward. Costs the memory of the whole model.
class WholeParameters {
 public:
  explicit WholeParameters(torch::nn::Module& module);
  ~WholeParameters();
  WholeParameters(const WholeParameters&) = delete;
  WholeParameters& operator=(const WholeParameters&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Scales all gradients below a sharded module so that their norm over all ranks is at most
/// `max_norm`, and returns the norm before scaling: a scalar on the CPU of the gradients' dtype
/// (the widest, if they differ), equal on every rank. Every rank must call it, between backward()
/// and the optimizer's step. Each gradient element counts once, however many replicas hold it. For
/// norm_type 2 the norm is the exact sum of squares of every element, rounded to float64 once, its
/// root rounded to the dtype; for another p the exact sum of |g|^p, each power computed in float64
/// by the C library's pow, and its p-th root; infinity: the maximum. So it does not depend on the
/// world size or on how parameters are sharded. Gradients are multiplied by min(1, max_norm / (norm
/// + 1e-6)), as torch.nn.utils.clip_grad_norm_ does. Collectives: one all-reduce for each different
/// shard group with more than one rank: none for no_shard, one for everything else unless units
/// have groups of their own. Throws NonFiniteError on every rank if error_if_nonfinite and the norm
/// is not finite; gradients are then left as they are. UsageError: max_norm is negative or NaN,
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
  /// What fsdp's functions of a sharded module take, such as save_checkpoint: the module that is
  /// the unit, which is the wrapper of a plain one.
  torch::nn::Module& root() const { return *hooked_; }
  /// As fsdp::shard_placements of the whole model.
  std::vector<ShardPlacement> shard_placements() const { return fsdp::shard_placements(*hooked_); }
  torch::Tensor clip_grad_norm_(double max_norm, double norm_type = 2.0,
                                bool error_if_nonfinite = false) {
    return fsdp::clip_grad_norm_(*hooked_, max_norm, norm_type, error_if_nonfinite);
  }
  /// While it lives, backward does not reduce; see set_requires_gradient_sync.
  NoSync no_sync() { return NoSync(*hooked_); }

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
