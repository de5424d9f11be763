#pragma once
// Activation checkpointing of modules: their forward is run again in backward instead of being
// kept. The order of sharding and checkpointing is that of the calls:
//
//   fsdp::checkpoint_wrapper(block);  fsdp::fully_shard(block, {group});   // inside the unit
//   fsdp::fully_shard(block, {group});  fsdp::checkpoint_wrapper(block);   // around the unit
//
// Both give the same bits. A unit inside a region is gathered once for forward and once for
// backward, as without checkpointing, if its backward is what the region is recomputed for; of
// several units in one region all but the last are gathered a third time, for the second run
// (unless their strategy keeps them).

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "fsdp/module.h"
#include "fsdp/recomputation.h"

namespace fsdp {

/// Makes the module's forward a checkpointed region, whenever it is called through its holder or
/// by torch::nn::Sequential. Floating-point and integer buffers that forward writes (BatchNorm's
/// statistics) have their old values in the second run and their new ones after it, so that they
/// are counted once. Throws ShardingError: the module has no hooks (declare it with FSDP_MODULE, or
/// use checkpoint_wrapper on its holder). UsageError: it is a checkpointed region already.
void checkpoint_module(torch::nn::Module& module, RecomputationOptions options = {});

/// The same for a holder, which is returned; a holder of a module without hooks is wrapped
/// (fsdp::wrap) first. The names of parameters in the state do not change.
template <typename ModuleType>
auto checkpoint_wrapper(const torch::nn::ModuleHolder<ModuleType>& holder,
                        RecomputationOptions options = {}) {
  if constexpr (std::derived_from<ModuleType, HookableModule>) {
    checkpoint_module(*holder.ptr(), std::move(options));
    return HookedModuleHolder<ModuleType>(holder.ptr());
  } else {
    auto wrapped = wrap(holder);
    checkpoint_module(*wrapped, std::move(options));
    return wrapped;
  }
}

/// Makes a region of `model` and every module below it that check_fn picks, a module that is there
/// more than once one time, and names each by its plain name in the model. Regions may be nested.
/// Returns the names, in the order of named_modules(). Throws ShardingError, before anything is
/// changed, if one that is picked has no hooks; UsageError if none is picked.
using CheckFunction = std::function<bool(const torch::nn::Module& module)>;
std::vector<std::string> apply_activation_checkpointing(torch::nn::Module& model,
                                                        const CheckFunction& check_fn,
                                                        const RecomputationOptions& options = {});
template <typename ModuleType>
std::vector<std::string> apply_activation_checkpointing(
    const torch::nn::ModuleHolder<ModuleType>& model, const CheckFunction& check_fn,
    const RecomputationOptions& options = {}) {
  return apply_activation_checkpointing(*model.ptr(), check_fn, options);
}

/// Picks each k-th of the modules that `check_fn` picks: the first, the (k+1)-th, ...
CheckFunction every(int k, CheckFunction check_fn);

}  // namespace fsdp
