#pragma once
// Modules with forward hooks. libtorch's C++ modules have none, and sharding needs to act just
// before and just after a module runs. A module declared with FSDP_MODULE instead of TORCH_MODULE
// runs its hooks when it is called through its holder (`layer(x)`) or by torch::nn::Sequential;
// `layer->forward(x)` is the bare function. `wrap` gives hooks to a module that was declared with
// TORCH_MODULE.

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/recomputation.h"
#include "fsdp/visit_tensors.h"

namespace fsdp {

/// Acts around a module's forward. Pointers lead to the tensors among the arguments (a copy of the
/// argument list, the caller's own variables are untouched) and in the result; a hook may put other
/// tensors in their place.
class ForwardHook {
 public:
  virtual ~ForwardHook() = default;
  /// Runs before the module. Hooks run in the order in which they were added.
  virtual void pre_forward(torch::nn::Module& module, const std::vector<at::Tensor*>& inputs) = 0;
  /// Runs after the module. Hooks run in the reverse of the order in which they were added.
  virtual void post_forward(torch::nn::Module& module, const std::vector<at::Tensor*>& outputs) = 0;
  /// Runs instead of post_forward when the module, or a hook added after this one, threw.
  virtual void forward_failed(torch::nn::Module& /*module*/) noexcept {}
};

/// What a module needs to have hooks. A copy or clone of a module starts without hooks.
class HookableModule {
 public:
  HookableModule() = default;
  HookableModule(const HookableModule&) {}
  HookableModule& operator=(const HookableModule&) { return *this; }
  virtual ~HookableModule() = default;

  /// The innermost hook but for those within a checkpointed region, if there is one.
  void add_forward_hook(std::shared_ptr<ForwardHook> hook) {
    hooks_.insert(hooks_.begin() + static_cast<std::ptrdiff_t>(hooks_outside()), std::move(hook));
    ++hooks_outside_;
  }
  /// Does nothing if the hook is not there.
  void remove_forward_hook(const ForwardHook* hook) {
    const auto found = std::find_if(hooks_.begin(), hooks_.end(),
                                    [hook](const auto& held) { return held.get() == hook; });
    if (found != hooks_.end()) {
      hooks_outside_ -=
          found - hooks_.begin() < static_cast<std::ptrdiff_t>(hooks_outside_) ? 1 : 0;
      hooks_.erase(found);
    }
  }
  const std::vector<std::shared_ptr<ForwardHook>>& forward_hooks() const { return hooks_; }

  /// Makes forward a checkpointed region (activation_checkpoint.h), with the hooks from number
  /// `hooks_outside` on inside it: those run again when the region does.
  void checkpoint_forward(std::shared_ptr<const RecomputationOptions> options,
                          std::size_t hooks_outside) {
    checkpoint_ = std::move(options);
    hooks_outside_ = hooks_outside;
  }
  /// Null if forward is no checkpointed region.
  const std::shared_ptr<const RecomputationOptions>& activation_checkpoint() const {
    return checkpoint_;
  }
  std::size_t hooks_outside() const { return hooks_outside_; }

 private:
  std::vector<std::shared_ptr<ForwardHook>> hooks_;
  std::size_t hooks_outside_ = 0;  // of a checkpointed region; all hooks if there is none
  std::shared_ptr<const RecomputationOptions> checkpoint_;
};

/// The base of a module that can have hooks:
///   struct BlockImpl : fsdp::Module<BlockImpl> { ... torch::Tensor forward(torch::Tensor x); };
///   FSDP_MODULE(Block);
template <typename Derived>
class Module : public torch::nn::Cloneable<Derived>, public HookableModule {
 public:
  using torch::nn::Cloneable<Derived>::Cloneable;
  /// Cloning builds the module's parameters anew by calling this; override it where cloning is
  /// wanted.
  void reset() override {}
};

namespace detail {

/// Which of a module's hooks: [begin, end).
struct HookRange {
  std::size_t begin = 0;
  std::size_t end = 0;
};
/// Runs the hooks' pre_forward; `entered` is the end of those that were begun, so that they can be
/// told of a failure.
void run_pre_forward(torch::nn::Module& module, const HookableModule& hookable, HookRange range,
                     const std::vector<at::Tensor*>& inputs, std::size_t& entered);
void run_post_forward(torch::nn::Module& module, const HookableModule& hookable, HookRange range,
                      const std::vector<at::Tensor*>& outputs);
void tell_failed(torch::nn::Module& module, const HookableModule& hookable, std::size_t begin,
                 std::size_t entered) noexcept;

/// Calls `body()` within the hooks; `arguments` is the tuple that they may change before it.
template <typename ModuleType, typename Arguments, typename Body>
auto within_hooks(ModuleType& module, HookRange range, Arguments& arguments, Body&& body) {
  std::size_t entered = range.begin;
  try {
    run_pre_forward(module, module, range, tensors_in(arguments), entered);
    auto result = body();
    run_post_forward(module, module, range, tensors_in(result));
    return result;
  } catch (...) {
    tell_failed(module, module, range.begin, entered);
    throw;
  }
}

template <typename ModuleType, typename... Args>
auto call_checkpointed(ModuleType& module, const std::tuple<Args...>& arguments) {
  using Result = std::decay_t<decltype(module.forward(std::declval<Args&>()...))>;
  // The graph may outlive the caller's hold on the module.
  const auto keep = module.weak_from_this().lock();
  return run_checkpointed(
      *module.activation_checkpoint(), &module,
      [&module, keep](auto&... each) -> Result {
        auto held = std::tie(each...);
        const HookRange inside{module.hooks_outside(), module.forward_hooks().size()};
        return within_hooks(module, inside, held,
                            [&]() -> Result { return module.forward(each...); });
      },
      arguments);
}

}  // namespace detail

/// Calls `module.forward(args...)` with its hooks, and as a checkpointed region if it is one.
template <typename ModuleType, typename... Args>
auto call(ModuleType& module, Args&&... args) {
  using Result = std::decay_t<decltype(module.forward(std::forward<Args>(args)...))>;
  if (module.forward_hooks().empty() && module.activation_checkpoint() == nullptr) {
    return Result(module.forward(std::forward<Args>(args)...));
  }
  std::tuple<std::decay_t<Args>...> held(std::forward<Args>(args)...);
  return detail::within_hooks(module, {0, module.hooks_outside()}, held, [&]() -> Result {
    if (module.activation_checkpoint() != nullptr) {
      if constexpr ((std::copy_constructible<std::decay_t<Args>> && ...)) {
        return detail::call_checkpointed(module, held);
      } else {
        throw UsageError(module.name() +
                         " is checkpointed, and has an argument that cannot be copied; wanted: "
                         "arguments that can be kept for the second run");
      }
    }
    return std::apply([&module](auto&... each) -> Result { return module.forward(each...); }, held);
  });
}

/// A module holder whose call operator runs the hooks.
template <typename Contained>
class HookedModuleHolder : public torch::nn::ModuleHolder<Contained> {
 public:
  using torch::nn::ModuleHolder<Contained>::ModuleHolder;

  template <typename... Args>
  auto operator()(Args&&... args) {
    return call(*this->get(), std::forward<Args>(args)...);
  }
};

/// Declares the holder `Name` of `NameImpl`, as TORCH_MODULE does, with hooks.
#define FSDP_MODULE(Name)                                             \
  class Name : public ::fsdp::HookedModuleHolder<Name##Impl> {        \
   public:                                                            \
    using ::fsdp::HookedModuleHolder<Name##Impl>::HookedModuleHolder; \
    using Impl [[maybe_unused]] = Name##Impl;                         \
  }

namespace detail {

/// The signature that a wrapper's forward must have: that of the module inside.
template <typename Function>
struct Signature;
template <typename M, typename R, typename... A>
struct Signature<R (M::*)(A...)> {
  using Result = std::decay_t<R>;
  using Arguments = std::tuple<A...>;
};
template <typename M, typename R, typename... A>
struct Signature<R (M::*)(A...) const> : Signature<R (M::*)(A...)> {};
template <typename ModuleType>
struct SignatureOf : Signature<decltype(&ModuleType::forward)> {};
template <>
struct SignatureOf<torch::nn::SequentialImpl> {
  using Result = at::Tensor;
  using Arguments = std::tuple<const at::Tensor&>;
};

}  // namespace detail

/// What a wrapper's child is registered as. Names given out by this library leave it out, so that a
/// wrapped model has the names of the plain one.
inline constexpr const char* kWrappedModuleName = "_fsdp_wrapped_module";

/// Gives hooks to a module that has none of its own.
template <typename ModuleType, typename Result = typename detail::SignatureOf<ModuleType>::Result,
          typename Arguments = typename detail::SignatureOf<ModuleType>::Arguments>
class WrappedImpl;
template <typename ModuleType, typename Result, typename... Args>
class WrappedImpl<ModuleType, Result, std::tuple<Args...>>
    : public Module<WrappedImpl<ModuleType, Result, std::tuple<Args...>>> {
 public:
  explicit WrappedImpl(std::shared_ptr<ModuleType> wrapped)
      : module(this->register_module(kWrappedModuleName, std::move(wrapped))) {}
  Result forward(Args... args) { return module->forward(std::forward<Args>(args)...); }

  std::shared_ptr<ModuleType> module;
};

template <typename ModuleType>
class Wrapped : public HookedModuleHolder<WrappedImpl<ModuleType>> {
 public:
  using HookedModuleHolder<WrappedImpl<ModuleType>>::HookedModuleHolder;
  using Impl [[maybe_unused]] = WrappedImpl<ModuleType>;
};

/// `wrap(torch::nn::Linear(4, 2))`: the same module with hooks; usable alone or as an element of a
/// Sequential.
template <typename ModuleType>
Wrapped<ModuleType> wrap(const torch::nn::ModuleHolder<ModuleType>& holder) {
  return Wrapped<ModuleType>(std::make_shared<WrappedImpl<ModuleType>>(holder.ptr()));
}

/// A parameter's or module's name as it would be in the plain model.
std::string plain_name(const std::string& name);

}  // namespace fsdp

namespace torch::nn {

// torch::nn::Sequential calls its elements through this class, which would go past the hooks.
template <typename ModuleType, typename... ArgumentTypes>
requires std::derived_from<ModuleType, fsdp::HookableModule>
struct AnyModuleHolder<ModuleType, ArgumentTypes...> : public AnyModulePlaceholder {
  explicit AnyModuleHolder(std::shared_ptr<ModuleType>&& held)
      : AnyModulePlaceholder(typeid(ModuleType)), module(std::move(held)) {}

  AnyValue forward(std::vector<AnyValue>&& arguments) override {
    if (module->_forward_has_default_args()) {
      arguments = module->_forward_populate_default_args(std::move(arguments));
    }
    TORCH_CHECK(arguments.size() == sizeof...(ArgumentTypes), c10::demangle(type_info.name()),
                "'s forward() takes ", sizeof...(ArgumentTypes), " argument(s), but received ",
                arguments.size());
    return call_with(arguments, std::index_sequence_for<ArgumentTypes...>{});
  }
  std::shared_ptr<Module> ptr() override { return module; }
  std::unique_ptr<AnyModulePlaceholder> copy() const override {
    return std::make_unique<AnyModuleHolder>(*this);
  }
  std::unique_ptr<AnyModulePlaceholder> clone_module(std::optional<Device> device) const override {
    return std::make_unique<AnyModuleHolder>(
        std::dynamic_pointer_cast<ModuleType>(module->clone(device)));
  }

  std::shared_ptr<ModuleType> module;

 private:
  template <std::size_t... I>
  AnyValue call_with(std::vector<AnyValue>& arguments, std::index_sequence<I...>) {
    return AnyValue(fsdp::call(
        *module, std::move(arguments[I].template get<std::decay_t<ArgumentTypes>>())...));
  }
};

}  // namespace torch::nn
