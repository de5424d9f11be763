#include "unit.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <unordered_map>

#include "backward_marker.h"
#include "fsdp/errors.h"

namespace fsdp {

/// Lives as long as the autograd graph of one use, and tells the unit when that is gone.
class Unit::UseToken {
 public:
  UseToken(std::weak_ptr<Unit> unit, std::int64_t use) : unit_(std::move(unit)), use_(use) {}
  ~UseToken() {
    if (const auto unit = unit_.lock()) {
      unit->use_dropped(use_);
    }
  }
  UseToken(const UseToken&) = delete;
  UseToken& operator=(const UseToken&) = delete;

 private:
  std::weak_ptr<Unit> unit_;
  std::int64_t use_;
};

namespace {

/// Which unit has which parameter, for the ranks of this process: a parameter may be reached from
/// modules that lie beside the unit's.
class Owners {
 public:
  void add(const FlatParameter& flat, Unit* unit) {
    const std::lock_guard lock(mutex_);
    for (const auto& parameter : flat.parameters()) {
      units_[parameter.unsafeGetTensorImpl()] = unit;
    }
  }
  void remove(const FlatParameter& flat) {
    const std::lock_guard lock(mutex_);
    for (const auto& parameter : flat.parameters()) {
      units_.erase(parameter.unsafeGetTensorImpl());
    }
  }
  Unit* find(const at::Tensor& parameter) const {
    const std::lock_guard lock(mutex_);
    const auto found = units_.find(parameter.unsafeGetTensorImpl());
    return found == units_.end() ? nullptr : found->second;
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, Unit*> units_;
};

Owners& owners() {
  static Owners all;
  return all;
}

bool is_in_backward_pass() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

void append_once(std::vector<std::weak_ptr<Unit>>& units, const std::shared_ptr<Unit>& unit) {
  const auto same = [&](const std::weak_ptr<Unit>& each) { return each.lock() == unit; };
  if (std::none_of(units.begin(), units.end(), same)) {
    units.push_back(unit);
  }
}

/// The unit's place, or the end.
std::size_t place_of(const std::vector<std::weak_ptr<Unit>>& units, const Unit* unit) {
  const auto found =
      std::find_if(units.begin(), units.end(),
                   [unit](const std::weak_ptr<Unit>& each) { return each.lock().get() == unit; });
  return static_cast<std::size_t>(found - units.begin());
}

}  // namespace

Unit::Unit(UnitOptions options, std::vector<std::weak_ptr<torch::nn::Module>> modules,
           const std::vector<NamedParameter>& parameters)
    : options_(std::move(options)), modules_(std::move(modules)) {
  flat_.emplace(parameters, flat_options());
  owners().add(*flat_, this);
}

FlatParameter::Options Unit::flat_options() const {
  FlatParameter::Options flat;
  flat.shard = shard();
  flat.shards = shards();
  flat.param_dtype = options_.mixed_precision.param_dtype;
  flat.offload = options_.offload;
  return flat;
}

Unit::~Unit() {
  owners().remove(*flat_);
}

at::ScalarType Unit::param_dtype() const {
  return flat_->gathered().scalar_type();
}

at::ScalarType Unit::reduce_dtype() const {
  return options_.mixed_precision.reduce_dtype.value_or(param_dtype());
}

// ---- Root -------------------------------------------------------------------------------------

void Unit::become_root_if_first(torch::nn::Module& module) {
  if (root_ != nullptr) {
    return;
  }
  is_root_ = true;
  const auto root = std::make_shared<RootState>();
  for (const auto& below : module.named_modules("", /*include_self=*/true)) {
    const auto unit = unit_of(*below.value());
    if (unit == nullptr) {
      continue;
    }
    if (unit->root_ == nullptr) {
      unit->adopt(root, plain_name(below.key()));
    } else if (unit->root_ != root) {
      throw ShardingError(fmt::format(
          "rank {}: unit '{}' ran on its own before the module that contains it; wanted: "
          "the outermost module runs first, so that it becomes the root",
          options_.world_rank, plain_name(below.key())));
    }
    unit->name_parameters(below.key(), *below.value());
  }
  refuse_strays(module, "", {});
}

void Unit::refuse_strays(torch::nn::Module& module, const std::string& path,
                         std::vector<const Unit*> inside) const {
  if (const auto unit = unit_of(module)) {
    inside.push_back(unit.get());
  }
  for (const auto& entry : module.named_parameters(/*recurse=*/false)) {
    const auto* owner = entry.value().defined() ? owner_of(entry.value()) : nullptr;
    if (owner != nullptr && std::find(inside.begin(), inside.end(), owner) == inside.end()) {
      throw ShardingError(fmt::format(
          "rank {}: parameter '{}' belongs to {}, which does not contain it here, so that it would "
          "not be gathered; wanted: fully_shard on a module that contains both",
          options_.world_rank, plain_name(path.empty() ? entry.key() : path + "." + entry.key()),
          owner->name().empty() ? "another unit" : fmt::format("the unit '{}'", owner->name())));
    }
  }
  for (const auto& child : module.named_children()) {
    refuse_strays(*child.value(), path.empty() ? child.key() : path + "." + child.key(), inside);
  }
}

void Unit::adopt(const std::shared_ptr<RootState>& root, std::string name) {
  root_ = root;
  name_ = std::move(name);
  gather_label_ = fmt::format("the parameters of unit '{}'", name_);
  reduce_label_ = fmt::format("the gradients of unit '{}'", name_);
  root_->units.push_back(weak_from_this());
}

void Unit::name_parameters(const std::string& path, torch::nn::Module& module) {
  const auto prefix = path.empty() ? "" : path + ".";
  const auto parameters = module.named_parameters();
  for (std::size_t i = 0; i < flat_->parameters().size(); ++i) {
    for (const auto& parameter : parameters) {
      if (parameter.value().is_same(flat_->parameters()[i])) {
        flat_->rename(i, plain_name(prefix + parameter.key()));
        break;
      }
    }
  }
}

void Unit::begin_forward_of_root() {
  if (is_in_backward_pass()) {
    return;  // a checkpoint runs the forward again
  }
  reset_after_failure();
  for (const auto& weak : root_->units) {
    if (const auto unit = weak.lock()) {
      unit->free_overtaken_parameters();
    }
  }
  if (!root_->new_order.empty()) {
    root_->order = std::exchange(root_->new_order, {});
  }
}

void Unit::free_overtaken_parameters() {
  if (may_be_overtaken_) {
    reshard();
  }
}

void Unit::end_forward_of_root() {
  for (const auto& weak : root_->units) {
    const auto unit = weak.lock();
    if (unit == nullptr || unit->in_backward_) {
      continue;
    }
    // Modules of a unit of several that did not run this time, and what was gathered for nothing.
    if (!unit->modules_to_run_.empty()) {
      unit->modules_to_run_.clear();
      unit->after_forward();
    }
    if (unit->is_ahead_) {
      unit->reshard();
    }
  }
}

void Unit::reset_after_failure() {
  // The end of a backward pass that ended well would have taken this back.
  const bool has_failed = std::exchange(root_->end_queued, false);
  root_->finished.clear();
  for (const auto& weak : root_->units) {
    const auto unit = weak.lock();
    if (unit == nullptr) {
      continue;
    }
    unit->modules_to_run_.clear();
    const bool is_on_its_way = unit->reduction_ || !unit->maybe_unused_.empty();
    if (!unit->in_backward_ && !(is_on_its_way && has_failed)) {
      continue;
    }
    unit->in_backward_ = false;
    unit->backward_uses_.clear();
    unit->abandon_reduction();
    unit->abandon_gather();
    unit->reshard();
    unit->flat_->restore_sharded_gradients();
  }
}

void Unit::abandon_reduction() noexcept {
  if (reduction_ && reduction_->work) {
    try {
      reduction_->work->wait();  // others may still read from its buffers
    } catch (const std::exception&) {
      // The next collective says it again.
    }
  }
  reduction_.reset();
  maybe_unused_.clear();
}

// ---- Forward ----------------------------------------------------------------------------------

void Unit::pre_forward(torch::nn::Module& module, const std::vector<at::Tensor*>& inputs) {
  become_root_if_first(module);
  if (is_root_ && forward_uses_.empty()) {
    begin_forward_of_root();
  }
  if (!is_in_backward_pass()) {
    append_once(root_->new_order, shared_from_this());
  }
  if (modules_.size() > 1 && modules_to_run_.empty()) {
    for (const auto& each : modules_) {
      modules_to_run_.insert(each.lock().get());
    }
  }
  const auto use = next_use_++;
  forward_uses_.push_back(use);
  const auto& precision = options_.mixed_precision;
  if (precision.param_dtype && precision.cast_forward_inputs) {
    cast(inputs, *precision.param_dtype);
  }
  wait_for_parameters();
  prefetch_for_forward();
  std::weak_ptr<Unit> self = weak_from_this();
  mark_backward(inputs, [self, use] {
    if (const auto unit = self.lock()) {
      unit->after_backward(use);
    }
  });
}

void Unit::post_forward(torch::nn::Module& module, const std::vector<at::Tensor*>& outputs) {
  const auto use = forward_uses_.back();
  forward_uses_.pop_back();
  if (options_.mixed_precision.output_dtype) {
    cast(outputs, *options_.mixed_precision.output_dtype);
  }
  std::weak_ptr<Unit> self = weak_from_this();
  const auto token = std::make_shared<UseToken>(self, use);
  pending_uses_.insert(use);
  mark_backward(outputs, [self, use, token] {
    if (const auto unit = self.lock()) {
      unit->before_backward(use);
    }
  });
  if (token.use_count() == 1) {
    pending_uses_.erase(use);  // there is no backward of it
  }
  modules_to_run_.erase(&module);
  if (forward_uses_.empty() && !in_backward_ && modules_to_run_.empty()) {
    after_forward();
    if (!pending_uses_.empty()) {
      append_once(root_->finished, shared_from_this());
    }
  }
  if (is_root_ && forward_uses_.empty() && !is_in_backward_pass()) {
    end_forward_of_root();
  }
}

void Unit::forward_failed(torch::nn::Module& /*module*/) noexcept {
  if (!forward_uses_.empty()) {
    forward_uses_.pop_back();
  }
  modules_to_run_.clear();
  if (forward_uses_.empty() && !in_backward_) {
    abandon_gather();
    reshard();
  }
}

void Unit::abandon_gather() noexcept {
  if (gather_ && gather_->work) {
    try {
      gather_->work->wait();
    } catch (const std::exception&) {
      // The next collective says it again.
    }
    gather_->work.reset();
  }
}

void Unit::cast(const std::vector<at::Tensor*>& tensors, at::ScalarType dtype) const {
  for (auto* tensor : tensors) {
    if (at::isFloatingType(tensor->scalar_type())) {
      *tensor = tensor->to(dtype);
    }
  }
}

bool Unit::keeps_parameters_after_forward() const {
  if (options_.reshard_after_forward) {
    return *options_.reshard_after_forward == 0;
  }
  // The root's backward comes first of all, so its parameters would be gathered again at once.
  return is_root_ || options_.strategy == ShardingStrategy::shard_grad_op ||
         options_.strategy == ShardingStrategy::hybrid_shard_zero2 ||
         options_.strategy == ShardingStrategy::no_shard;
}

void Unit::after_forward() {
  if (flat_->empty()) {
    return;
  }
  if (pending_uses_.empty()) {
    reshard();
  } else if (options_.forward_group != nullptr) {
    keep_parameters_in_parts();
    reshard();
  } else if (keeps_parameters_after_forward()) {
    flat_->use_chunk();  // the gathered buffer stays for backward
  } else {
    reshard();
  }
}

void Unit::keep_parameters_in_parts() {
  const at::NoGradGuard no_grad;
  if (!gathered_version_) {
    return;
  }
  const auto parts = options_.forward_group->getSize();
  const auto numel = flat_->padded_numel() / parts;
  part_ = flat_->gathered().narrow(0, options_.forward_group->getRank() * numel, numel).clone();
  part_version_ = *gathered_version_;
}

// ---- Gathering --------------------------------------------------------------------------------

void Unit::start_unshard() {
  if (flat_->empty()) {
    return;
  }
  const auto version = flat_->version();
  if (gather_ && gather_->version != version) {
    reshard();  // the shards have changed since
  }
  if (gather_ || gathered_version_ == version) {
    return;
  }
  const at::NoGradGuard no_grad;
  gathered_version_.reset();
  may_be_overtaken_ = flat_->has_gradients();
  if (flat_->gathered_is_chunk()) {
    gather_ = Gather{nullptr, {}, version};
    return;
  }
  flat_->allocate_gathered();
  auto gathered = flat_->gathered();
  // Only for backward: until the next forward the parameters may be changed in any way.
  const bool from_parts = is_in_backward_pass() && part_.defined() && part_version_ == version;
  auto input = from_parts ? part_ : flat_->gather_input();
  const auto& group = from_parts ? options_.forward_group : options_.shard_group;
  if (group == nullptr) {
    gathered.copy_(input);
    gather_ = Gather{nullptr, {}, version};
    return;
  }
  const CollectiveLabel label(gather_label_);
  auto work = group->_allgather_base(gathered, input);
  gather_ = Gather{std::move(work), std::move(input), version};
}

void Unit::wait_for_parameters() {
  start_unshard();
  count_as_used();
  if (gather_) {
    if (gather_->work) {
      gather_->work->wait();
    }
    gathered_version_ = gather_->version;
    gather_.reset();
    part_.reset();
    auto gathered = flat_->gathered();
    const at::NoGradGuard no_grad;
    observe(Point::unsharded_parameters, gathered);
  }
  flat_->use_gathered();
}

void Unit::reshard() {
  count_as_used();
  if (gather_) {
    // The buffer must not go while others write into it.
    if (gather_->work) {
      gather_->work->wait();
    }
    gathered_version_ = gather_->version;
    gather_.reset();
  }
  flat_->use_chunk();
  if (gathered_version_) {
    flat_->free_gathered();
    gathered_version_.reset();
  }
}

void Unit::start_unshard_ahead() {
  if (gather_ || gathered_version_ == flat_->version() || flat_->empty()) {
    return;
  }
  if (options_.limit_gathers > 0 && root_->gathers_ahead >= options_.limit_gathers) {
    return;
  }
  start_unshard();
  is_ahead_ = true;
  ++root_->gathers_ahead;
}

void Unit::count_as_used() {
  if (is_ahead_) {
    is_ahead_ = false;
    --root_->gathers_ahead;
  }
}

void Unit::prefetch_for_forward() {
  if (options_.forward_prefetch == 0 || is_in_backward_pass()) {
    return;
  }
  const auto& order = root_->order;
  const auto place = place_of(order, this);
  for (auto next = place + 1;
       next < order.size() && next <= place + static_cast<std::size_t>(options_.forward_prefetch);
       ++next) {
    if (const auto unit = order[next].lock()) {
      unit->start_unshard_ahead();
    }
  }
}

void Unit::prefetch_for_backward() {
  const auto& finished = root_->finished;
  const auto place = place_of(finished, this);
  if (place == 0 || place == finished.size()) {
    return;
  }
  const auto next = finished[place - 1].lock();
  if (next != nullptr && !next->in_backward_ && !next->pending_uses_.empty()) {
    next->start_unshard_ahead();
  }
}

at::Tensor Unit::gather_whole() {
  const at::NoGradGuard no_grad;
  if (flat_->empty() || options_.shard_group == nullptr) {
    return flat_->chunk();
  }
  auto input = flat_->chunk().to(flat_->device());
  auto whole = at::empty({flat_->padded_numel()}, input.options());
  const CollectiveLabel label(gather_label_);
  options_.shard_group->_allgather_base(whole, input)->wait();
  return whole;
}

void Unit::release(const at::Tensor& parameter) {
  const at::NoGradGuard no_grad;
  const auto whole = gather_whole().clone();
  flat_->use_whole(whole);
  std::vector<NamedParameter> rest;
  for (std::size_t i = 0; i < flat_->parameters().size(); ++i) {
    const auto& own = flat_->parameters()[i];
    if (own.is_same(parameter)) {
      own.set_data(own.clone());
    } else {
      rest.push_back({flat_->slots()[i].name, own});
    }
  }
  owners().remove(*flat_);
  flat_.emplace(rest, flat_options());
  owners().add(*flat_, this);
}

// ---- Backward ---------------------------------------------------------------------------------

void Unit::use_dropped(std::int64_t use) {
  pending_uses_.erase(use);
}

void Unit::before_backward(std::int64_t use) {
  if (!root_->end_queued) {
    root_->end_queued = true;
    finish_reductions();  // of an earlier backward, if some were left on their way
    std::weak_ptr<Unit> self = weak_from_this();
    at_end_of_backward([self] {
      if (const auto unit = self.lock()) {
        unit->end_of_backward_of_root();
      }
    });
  }
  backward_uses_.insert(use);
  pending_uses_.erase(use);
  if (!in_backward_) {
    in_backward_ = true;
    wait_for_parameters();
    flat_->stash_sharded_gradients();
  }
  if (options_.backward_prefetch == BackwardPrefetch::pre) {
    prefetch_for_backward();
  }
}

void Unit::after_backward(std::int64_t use) {
  // Another use's backward may be still to come in this pass; its gradients belong to the same sum.
  if (backward_uses_.erase(use) > 0 && backward_uses_.empty() && pending_uses_.empty()) {
    finish_backward();
  }
}

void Unit::finish_backward() {
  in_backward_ = false;
  backward_uses_.clear();
  if (flat_->empty()) {
    return;
  }
  const at::NoGradGuard no_grad;
  const bool trains = flat_->trains();
  at::Tensor whole;
  if (trains) {
    whole = flat_->take_gradients(reduce_dtype(), used_);
  }
  if (reshard_after_backward) {
    reshard();
  } else {
    flat_->use_chunk();
  }
  if (!trains) {
    flat_->restore_sharded_gradients();
  } else if (!requires_gradient_sync) {
    flat_->restore_sharded_gradients();
    accumulate(std::move(whole));
  } else {
    if (whole_accumulated_.defined()) {
      whole = std::exchange(whole_accumulated_, at::Tensor()).add_(whole);
    }
    start_reduction(std::move(whole));
  }
  if (options_.backward_prefetch == BackwardPrefetch::post) {
    prefetch_for_backward();
  }
}

void Unit::accumulate(at::Tensor whole) {
  if (whole_accumulated_.defined()) {
    whole_accumulated_.add_(whole);
  } else {
    whole_accumulated_ = std::move(whole);
  }
}

void Unit::end_of_backward_of_root() {
  root_->end_queued = false;
  for (const auto& weak : root_->units) {
    const auto unit = weak.lock();
    if (unit != nullptr && unit->in_backward_) {
      unit->finish_backward();
    }
  }
  if (is_last_backward) {
    finish_reductions();
    root_->finished.clear();
  }
  for (const auto& weak : root_->units) {
    const auto unit = weak.lock();
    if (unit != nullptr && unit->forward_uses_.empty() && unit->reshard_after_backward &&
        (unit->gather_ || unit->gathered_version_)) {
      unit->reshard();
    }
  }
}

// ---- Reduction --------------------------------------------------------------------------------

void Unit::start_reduction(at::Tensor whole) {
  if (const auto unit = root_->reducing.lock()) {
    unit->finish_reduction();
  }
  observe(Point::unreduced_gradient, whole);
  if (options_.predivide != 1) {
    whole.div_(options_.predivide);
  }
  Reduction reduction;
  reduction.used = std::exchange(used_, {});
  reduction.all_reduce = requires_all_reduce;
  const CollectiveLabel label(reduce_label_);
  if (options_.comm_hook) {
    if (!reduction.all_reduce) {
      throw UsageError(fmt::format(
          "rank {}: unit '{}' has a comm_hook and set_requires_all_reduce(false); wanted: one of "
          "the two, since the hook sums over shards and replicas at once",
          options_.world_rank, name_));
    }
    reduction.shard = at::empty({flat_->chunk_numel()}, whole.options());
    GradientReduction hooked{name_, options_.shard_group, options_.replicate_group, whole,
                             reduction.shard};
    options_.comm_hook(hooked);
  } else if (options_.shard_group == nullptr) {
    reduction.shard = whole;
  } else {
    reduction.shard = at::empty({flat_->chunk_numel()}, whole.options());
    c10d::ReduceScatterOptions sum;
    sum.reduceOp = c10d::ReduceOp::SUM;
    reduction.work = options_.shard_group->_reduce_scatter_base(reduction.shard, whole, sum);
  }
  reduction.whole = std::move(whole);
  reduction_ = std::move(reduction);
  root_->reducing = weak_from_this();
}

void Unit::finish_reduction() {
  if (!reduction_) {
    return;
  }
  const at::NoGradGuard no_grad;
  root_->reducing.reset();
  if (reduction_->work) {
    reduction_->work->wait();
  }
  reduction_->whole.reset();
  auto shard = std::move(reduction_->shard);
  if (shard_accumulated_.defined()) {
    shard = std::exchange(shard_accumulated_, at::Tensor()).add_(shard);
  }
  if (!reduction_->all_reduce && options_.replicate_group != nullptr) {
    shard_accumulated_ = std::move(shard);
    used_ = std::move(reduction_->used);
    reduction_.reset();
    flat_->restore_sharded_gradients();
    return;
  }
  if (options_.replicate_group != nullptr && !options_.comm_hook) {
    const CollectiveLabel label(reduce_label_);
    std::vector<at::Tensor> tensors = {shard};
    options_.replicate_group->allreduce(tensors)->wait();
  }
  deliver(std::move(shard));
}

void Unit::deliver(at::Tensor shard) {
  auto divide_by = at::scalar_tensor(options_.postdivide, at::kDouble);
  observe(Point::gradient_divide_factor, divide_by);
  shard.div_(divide_by.item<double>());
  shard = shard.to(flat_->chunk().options());
  observe(Point::sharded_gradient, shard);
  const auto used = std::move(reduction_->used);
  reduction_.reset();
  may_be_overtaken_ = true;
  for (std::size_t i = 0; i < flat_->parameters().size(); ++i) {
    const auto& parameter = flat_->parameters()[i];
    auto piece = flat_->piece_of(shard, i);
    if (!parameter.requires_grad()) {
      piece.reset();
    } else if (options_.find_unused) {
      maybe_unused_.push_back({i, std::exchange(piece, at::Tensor()), used[i]});
      continue;
    } else if (!used[i]) {
      if (piece.count_nonzero().item<std::int64_t>() > 0) {
        throw ShardingError(fmt::format(
            "rank {}: parameter '{}' has no gradient on this rank, and other ranks gave it one; "
            "wanted: every rank uses the same parameters in a step, or "
            "find_unused_parameters = true",
            options_.world_rank, flat_->slots()[i].name));
      }
      piece.reset();
    }
    flat_->set_sharded_gradient(i, std::move(piece));
  }
}

void Unit::finish_reductions() {
  if (const auto unit = root_->reducing.lock()) {
    unit->finish_reduction();
  }
  settle_unused_parameters();
}

void Unit::settle_unused_parameters() {
  // Unit by unit, since units may have groups of their own.
  for (const auto& weak : root_->units) {
    const auto unit = weak.lock();
    if (unit == nullptr || unit->maybe_unused_.empty()) {
      continue;
    }
    const at::NoGradGuard no_grad;
    auto& entries = unit->maybe_unused_;
    std::vector<std::int32_t> flags;
    for (const auto& entry : entries) {
      flags.push_back(entry.used ? 1 : 0);
    }
    auto used = at::tensor(flags, at::kInt).to(unit->flat_->device());
    const CollectiveLabel label("the used parameters");
    for (const auto& group : {unit->options_.shard_group, unit->options_.replicate_group}) {
      if (group != nullptr) {
        std::vector<at::Tensor> tensors = {used};
        c10d::AllreduceOptions largest;
        largest.reduceOp = c10d::ReduceOp::MAX;
        group->allreduce(tensors, largest)->wait();
      }
    }
    used = used.cpu();
    for (std::size_t k = 0; k < entries.size(); ++k) {
      const bool anywhere = used[static_cast<std::int64_t>(k)].item<std::int32_t>() != 0;
      unit->flat_->set_sharded_gradient(entries[k].index,
                                        anywhere ? std::move(entries[k].piece) : at::Tensor());
    }
    entries.clear();
  }
}

void Unit::set_divide_factor(double factor) {
  options_.predivide = 1;
  if (reduce_dtype() == at::kHalf) {
    options_.predivide = predivide_factor_for(factor);
  }
  options_.postdivide = factor / options_.predivide;
}

void Unit::observe(Point point, at::Tensor& tensor) const {
  if (auto* listener = observer()) {
    listener->observe({point, name_, options_.world_rank, shards() * replicas(), tensor,
                       &flat_->slots(), shard(), shards(), is_in_backward_pass()});
  }
}

// ---- Finding units ----------------------------------------------------------------------------

double predivide_factor_for(double ranks) {
  double factor = 1;
  while (std::fmod(ranks, factor) == 0 && ranks / factor > factor) {
    factor *= 2;
  }
  return factor;
}

Unit* owner_of(const at::Tensor& parameter) {
  return owners().find(parameter);
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
