#include "fsdp/activation_checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_set>

#include "unit.h"

namespace fsdp {
namespace {

HookableModule& hookable(torch::nn::Module& module, const std::string& name) {
  auto* found = dynamic_cast<HookableModule*>(&module);
  if (found == nullptr) {
    throw ShardingError(fmt::format(
        "activation checkpointing: module '{}' of type {} has no hooks, so that its forward cannot "
        "be run again; declare it with FSDP_MODULE and derive it from fsdp::Module, or give its "
        "holder hooks with fsdp::checkpoint_wrapper or fsdp::wrap",
        name, module.name()));
  }
  if (found->activation_checkpoint() != nullptr) {
    throw UsageError(fmt::format(
        "activation checkpointing: module '{}' of type {} is a checkpointed region already; "
        "wanted: each module once",
        name, module.name()));
  }
  return *found;
}

/// A unit that the module is lies inside the region, with the hooks that came after it.
std::size_t hooks_outside(const HookableModule& module) {
  const auto& hooks = module.forward_hooks();
  const auto unit = std::find_if(hooks.begin(), hooks.end(), [](const auto& hook) {
    return std::dynamic_pointer_cast<Unit>(hook) != nullptr;
  });
  return static_cast<std::size_t>(unit - hooks.begin());
}

void make_region(HookableModule& module, RecomputationOptions options) {
  module.checkpoint_forward(std::make_shared<const RecomputationOptions>(std::move(options)),
                            hooks_outside(module));
}

}  // namespace

void checkpoint_module(torch::nn::Module& module, RecomputationOptions options) {
  make_region(hookable(module, options.name), std::move(options));
}

std::vector<std::string> apply_activation_checkpointing(torch::nn::Module& model,
                                                        const CheckFunction& check_fn,
                                                        const RecomputationOptions& options) {
  std::vector<std::string> names;
  std::vector<HookableModule*> picked;
  std::unordered_set<const torch::nn::Module*> seen;
  const std::function<void(const std::string&, torch::nn::Module&)> walk =
      [&](const std::string& name, torch::nn::Module& module) {
        if (!seen.insert(&module).second) {
          return;
        }
        const auto children = module.named_children();
        // A wrapper stands for what it wraps: it is the one of them that can be run again.
        const auto* wrapped = children.find(kWrappedModuleName);
        if (check_fn(module) || (wrapped != nullptr && check_fn(**wrapped))) {
          picked.push_back(&hookable(module, plain_name(name)));
          names.push_back(plain_name(name));
        }
        for (const auto& child : children) {
          if (&child.value() == wrapped) {
            for (const auto& below : (*wrapped)->named_children()) {
              walk(name.empty() ? below.key() : name + "." + below.key(), *below.value());
            }
          } else {
            walk(name.empty() ? child.key() : name + "." + child.key(), *child.value());
          }
        }
      };
  walk("", model);
  if (picked.empty()) {
    throw UsageError(fmt::format(
        "apply_activation_checkpointing: check_fn picks none of the {} modules of the model; "
        "wanted: at least one",
        seen.size()));
  }
  for (std::size_t i = 0; i < picked.size(); ++i) {
    auto own = options;
    own.name = names[i];
    make_region(*picked[i], std::move(own));
  }
  return names;
}

CheckFunction every(int k, CheckFunction check_fn) {
  if (k < 1) {
    throw UsageError(fmt::format("every({}, ...): wanted: 1 or more", k));
  }
  return [k, check_fn = std::move(check_fn), count = 0](const torch::nn::Module& module) mutable {
    return check_fn(module) && count++ % k == 0;
  };
}

}  // namespace fsdp
