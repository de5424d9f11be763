#include "unit.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "backward_marker.h"
#include "fsdp/errors.h"

namespace fsdp {

Unit::Unit(std::shared_ptr<torch::nn::Module> /*module*/, BackendPtr process_group,
           const std::vector<FlatParameter::NamedParameter>& parameters)
    : process_group_(std::move(process_group)),
      flat_(parameters, process_group_->getRank(), process_group_->getSize()) {}

void Unit::pre_forward(torch::nn::Module& module, const std::vector<at::Tensor*>& inputs) {
  become_root_if_first(module);
  if (is_root_) {
    reset_after_failure();
  }
  const auto use = next_use_++;
  forward_uses_.push_back(use);
  unshard();
  std::weak_ptr<Unit> self = weak_from_this();
  mark_backward(inputs, [self, use] {
    if (const auto unit = self.lock()) {
      unit->after_backward(use);
    }
  });
}

void Unit::post_forward(torch::nn::Module& /*module*/, const std::vector<at::Tensor*>& outputs) {
  const auto use = forward_uses_.back();
  forward_uses_.pop_back();
  std::weak_ptr<Unit> self = weak_from_this();
  const bool backward_will_come = mark_backward(outputs, [self, use] {
    if (const auto unit = self.lock()) {
      unit->before_backward(use);
    }
  });
  // The root's backward comes first of all, so its parameters would be gathered again at once.
  if (!(is_root_ && backward_will_come) && forward_uses_.empty() && !in_backward_) {
    reshard();
  }
}

void Unit::forward_failed(torch::nn::Module& /*module*/) noexcept {
  if (!forward_uses_.empty()) {
    forward_uses_.pop_back();
  }
  if (forward_uses_.empty() && !in_backward_) {
    reshard();
  }
}

void Unit::become_root_if_first(torch::nn::Module& module) {
  if (root_ != nullptr) {
    return;
  }
  is_root_ = true;
  root_ = std::make_shared<RootState>();
  for (const auto& below : module.named_modules("", /*include_self=*/true)) {
    const auto unit = unit_of(*below.value());
    if (unit == nullptr) {
      continue;
    }
    if (unit->root_ != nullptr && unit.get() != this) {
      throw ShardingError(
          fmt::format("rank {}: unit '{}' ran on its own before the module that contains it; "
                      "wanted: the outermost "
                      "module runs first, so that it becomes the root",
                      process_group_->getRank(), plain_name(below.key())));
    }
    unit->root_ = root_;
    unit->name_ = plain_name(below.key());
    root_->units.push_back(unit);
    const auto parameters = below.value()->named_parameters();
    for (std::size_t i = 0; i < unit->flat_.parameters().size(); ++i) {
      for (const auto& parameter : parameters) {
        if (parameter.value().is_same(unit->flat_.parameters()[i])) {
          const auto prefix = below.key().empty() ? "" : below.key() + ".";
          unit->flat_.rename(i, plain_name(prefix + parameter.key()));
        }
      }
    }
  }
}

void Unit::reset_after_failure() {
  root_->end_queued = false;
  for (const auto& weak : root_->units) {
    const auto unit = weak.lock();
    if (unit == nullptr || !unit->in_backward_) {
      continue;
    }
    unit->in_backward_ = false;
    unit->backward_uses_.clear();
    unit->reshard();
    unit->flat_.restore_sharded_gradients();
  }
}

void Unit::unshard() {
  if (unsharded_ || flat_.empty()) {
    return;
  }
  const at::NoGradGuard no_grad;
  flat_.allocate_gathered();
  auto gathered = flat_.gathered();
  auto chunk = flat_.chunk();
  process_group_->_allgather_base(gathered, chunk)->wait();
  observe(Point::unsharded_parameters, gathered);
  flat_.use_gathered();
  unsharded_ = true;
}

void Unit::reshard() {
  if (!unsharded_) {
    return;
  }
  flat_.use_chunk();
  flat_.free_gathered();
  unsharded_ = false;
}

void Unit::before_backward(std::int64_t use) {
  if (!root_->end_queued) {
    root_->end_queued = true;
    at_end_of_backward([root = root_] {
      root->end_queued = false;
      for (const auto& weak : root->units) {
        if (const auto unit = weak.lock()) {
          unit->end_of_backward();
        }
      }
    });
  }
  backward_uses_.insert(use);
  if (in_backward_) {
    return;
  }
  in_backward_ = true;
  unshard();
  flat_.stash_sharded_gradients();
}

void Unit::after_backward(std::int64_t use) {
  if (backward_uses_.erase(use) > 0 && backward_uses_.empty()) {
    end_of_backward();
  }
}

void Unit::end_of_backward() {
  backward_uses_.clear();
  if (!in_backward_) {
    return;
  }
  in_backward_ = false;
  reduce_gradients();
}

void Unit::reduce_gradients() {
  const at::NoGradGuard no_grad;
  if (flat_.empty()) {
    return;
  }
  const bool any =
      std::any_of(flat_.parameters().begin(), flat_.parameters().end(),
                  [](const at::Tensor& parameter) { return parameter.requires_grad(); });
  if (!any) {
    reshard();
    return;
  }
  auto whole = flat_.take_gradients();
  reshard();
  observe(Point::unreduced_gradient, whole);
  auto shard = at::empty({flat_.chunk_numel()}, whole.options());
  c10d::ReduceScatterOptions options;
  options.reduceOp = c10d::ReduceOp::SUM;
  process_group_->_reduce_scatter_base(shard, whole, options)->wait();
  auto divide_by = at::scalar_tensor(static_cast<double>(process_group_->getSize()), at::kDouble);
  observe(Point::gradient_divide_factor, divide_by);
  shard.div_(divide_by.item<double>());
  observe(Point::sharded_gradient, shard);
  flat_.set_sharded_gradients(shard);
}

void Unit::observe(Point point, at::Tensor& tensor) const {
  if (auto* listener = observer()) {
    listener->observe({point, name_, process_group_->getRank(), process_group_->getSize(), tensor,
                       &flat_.slots()});
  }
}

std::shared_ptr<Unit> unit_of(torch::nn::Module& module) {
  if (const auto* hookable = dynamic_cast<HookableModule*>(&module)) {
    for (const auto& hook : hookable->forward_hooks()) {
      if (auto unit = std::dynamic_pointer_cast<Unit>(hook)) {
        return unit;
      }
    }
  }
  return nullptr;
}

std::vector<std::shared_ptr<Unit>> units_below(torch::nn::Module& module) {
  std::vector<std::shared_ptr<Unit>> units;
  // modules() would need shared ownership of `module` itself to include it.
  if (auto unit = unit_of(module)) {
    units.push_back(std::move(unit));
  }
  for (const auto& below : module.modules(/*include_self=*/false)) {
    auto unit = unit_of(*below);
    if (unit != nullptr && std::find(units.begin(), units.end(), unit) == units.end()) {
      units.push_back(std::move(unit));
    }
  }
  return units;
}

}  // namespace fsdp
