#include "fsdp/fully_shard.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <unordered_map>
#include <unordered_set>

#include "fsdp/errors.h"
#include "materialize.h"
#include "unit.h"

namespace fsdp {
namespace {

using ModulePtr = std::shared_ptr<torch::nn::Module>;

const void* identity(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl();
}

// ---- Options ------------------------------------------------------------------------------------

struct Groups {
  BackendPtr sharers;  // as shard, but never null
  BackendPtr shard;
  BackendPtr replicate;
  int rank = 0;  // of all of them together
  int ranks = 1;
};

bool is_hybrid(ShardingStrategy strategy) {
  return strategy == ShardingStrategy::hybrid_shard ||
         strategy == ShardingStrategy::hybrid_shard_zero2;
}

/// For a rank that shares with nobody. One for all its units, so that they are seen to agree.
BackendPtr group_of_one() {
  thread_local const BackendPtr group = make_in_process_group(1).front();
  return group;
}

BackendPtr unless_alone(BackendPtr group) {
  return group != nullptr && group->getSize() == 1 ? nullptr : std::move(group);
}

Groups groups_of(const FullyShardOptions& options) {
  Groups groups;
  if (is_hybrid(options.strategy)) {
    if (options.mesh.shard == nullptr || options.mesh.replicate == nullptr) {
      throw UsageError(
          fmt::format("fully_shard: strategy {} without options.mesh; wanted: mesh = "
                      "make_device_mesh(world, replicas)",
                      to_string(options.strategy)));
    }
    const auto shards = options.mesh.shard->getSize();
    groups.rank = options.mesh.replicate->getRank() * shards + options.mesh.shard->getRank();
    groups.ranks = options.mesh.replicate->getSize() * shards;
    groups.sharers = options.mesh.shard;
    groups.shard = unless_alone(options.mesh.shard);
    groups.replicate = unless_alone(options.mesh.replicate);
    return groups;
  }
  if (options.mesh.shard != nullptr || options.mesh.replicate != nullptr) {
    throw UsageError(fmt::format(
        "fully_shard: options.mesh with strategy {}; wanted: hybrid_shard or hybrid_shard_zero2, "
        "or options.process_group instead",
        to_string(options.strategy)));
  }
  if (options.process_group == nullptr) {
    throw UsageError(
        "fully_shard: options.process_group is null; wanted: the backend of the ranks that "
        "share the parameters, for example from fsdp::make_in_process_group");
  }
  groups.rank = options.process_group->getRank();
  groups.ranks = options.process_group->getSize();
  if (options.strategy == ShardingStrategy::no_shard) {
    groups.sharers = groups.ranks == 1 ? options.process_group : group_of_one();
    groups.replicate = unless_alone(options.process_group);
  } else {
    groups.sharers = options.process_group;
    groups.shard = unless_alone(options.process_group);
  }
  return groups;
}

void set_divide_factors(const FullyShardOptions& options, int ranks, at::ScalarType reduce_dtype,
                        UnitOptions& unit) {
  const auto check = [&](const char* name, const std::optional<double>& factor) {
    if (factor && !(*factor > 0 && std::isfinite(*factor))) {
      throw UsageError(
          fmt::format("rank {}: fully_shard: {} is {}; wanted: a positive finite number",
                      unit.world_rank, name, *factor));
    }
  };
  check("gradient_predivide_factor", options.gradient_predivide_factor);
  check("gradient_postdivide_factor", options.gradient_postdivide_factor);
  if (options.gradient_predivide_factor || options.gradient_postdivide_factor) {
    unit.predivide = options.gradient_predivide_factor.value_or(1);
    unit.postdivide = options.gradient_postdivide_factor.value_or(ranks / unit.predivide);
    return;
  }
  unit.predivide = reduce_dtype == at::kHalf ? predivide_factor_for(ranks) : 1;
  unit.postdivide = ranks / unit.predivide;
}

void set_resharding(const FullyShardOptions& options, const Groups& groups, UnitOptions& unit) {
  if (!options.reshard_after_forward) {
    return;
  }
  const int parts = *options.reshard_after_forward;
  if (parts == 0 || parts == 1) {
    unit.reshard_after_forward = parts;
    return;
  }
  const int shards = groups.shard ? groups.shard->getSize() : 1;
  if (parts < 0 || parts > shards || shards % parts != 0) {
    throw UsageError(
        fmt::format("rank {}: fully_shard: reshard_after_forward is {}; wanted: 0, 1, or a number "
                    "of ranks that "
                    "divides the {} of the shard group",
                    unit.world_rank, parts, shards));
  }
  std::vector<int> members(parts);
  std::iota(members.begin(), members.end(), groups.shard->getRank() / parts * parts);
  unit.forward_group = split_group(groups.shard, members);
}

UnitOptions unit_options(const FullyShardOptions& options, const Groups& groups,
                         at::ScalarType dtype) {
  UnitOptions unit;
  unit.strategy = options.strategy;
  unit.sharers = groups.sharers;
  unit.shard_group = groups.shard;
  unit.replicate_group = groups.replicate;
  unit.world_rank = groups.rank;
  unit.mixed_precision = options.mixed_precision;
  unit.forward_prefetch = options.forward_prefetch;
  unit.backward_prefetch = options.backward_prefetch;
  unit.limit_gathers = options.limit_gathers;
  unit.comm_hook = options.comm_hook;
  unit.find_unused = options.find_unused_parameters;
  unit.offload = options.cpu_offload;
  if (options.forward_prefetch < 0 || options.limit_gathers < 0) {
    throw UsageError(fmt::format(
        "rank {}: fully_shard: forward_prefetch is {} and limit_gathers {}; wanted: 0 or more",
        groups.rank, options.forward_prefetch, options.limit_gathers));
  }
  for (const auto& [name, wanted] :
       {std::pair{"param_dtype", options.mixed_precision.param_dtype},
        std::pair{"reduce_dtype", options.mixed_precision.reduce_dtype},
        std::pair{"output_dtype", options.mixed_precision.output_dtype},
        std::pair{"buffer_dtype", options.mixed_precision.buffer_dtype}}) {
    if (wanted && !at::isFloatingType(*wanted)) {
      throw UsageError(
          fmt::format("rank {}: fully_shard: mixed_precision.{} is {}; wanted: a "
                      "floating-point dtype",
                      groups.rank, name, c10::toString(*wanted)));
    }
  }
  const auto param_dtype = options.mixed_precision.param_dtype.value_or(dtype);
  set_divide_factors(options, groups.ranks,
                     options.mixed_precision.reduce_dtype.value_or(param_dtype), unit);
  set_resharding(options, groups, unit);
  return unit;
}

// ---- Modules and parameters ------------------------------------------------------------------

void check_modules(const std::vector<ModulePtr>& modules, int rank) {
  if (modules.empty()) {
    throw UsageError(fmt::format("rank {}: fully_shard: no modules; wanted: one or more", rank));
  }
  for (const auto& module : modules) {
    if (module == nullptr || dynamic_cast<HookableModule*>(module.get()) == nullptr) {
      throw ShardingError(
          fmt::format("rank {}: fully_shard: module of type {} has no hooks; declare it with "
                      "FSDP_MODULE and derive it "
                      "from fsdp::Module, or give it hooks with fsdp::wrap",
                      rank, module ? module->name() : "(null)"));
    }
    if (unit_of(*module) != nullptr) {
      throw ShardingError(
          fmt::format("rank {}: fully_shard: module of type {} is a unit already; call "
                      "fully_shard once on each module",
                      rank, module->name()));
    }
  }
}

/// Parameters that a unit has and that `module` also reaches past that unit's modules: tied
/// weights. They move up, so that they are gathered wherever they are used.
void release_shared_parameters(torch::nn::Module& module) {
  const auto below = units_below(module);
  std::vector<std::pair<Unit*, at::Tensor>> strays;
  const std::function<void(torch::nn::Module&, std::vector<Unit*>)> walk =
      [&](torch::nn::Module& at, std::vector<Unit*> inside) {
        if (const auto unit = unit_of(at)) {
          inside.push_back(unit.get());
        }
        for (const auto& entry : at.named_parameters(/*recurse=*/false)) {
          auto* owner = entry.value().defined() ? owner_of(entry.value()) : nullptr;
          const auto is_owner = [owner](const auto& unit) { return &*unit == owner; };
          // Of a unit that is not below, a module further out will take care.
          if (owner != nullptr && std::none_of(inside.begin(), inside.end(), is_owner) &&
              std::any_of(below.begin(), below.end(), is_owner)) {
            strays.emplace_back(owner, entry.value());
          }
        }
        for (const auto& child : at.named_children()) {
          walk(*child.value(), inside);
        }
      };
  walk(module, {});
  for (const auto& [unit, parameter] : strays) {
    if (unit->has_run()) {
      throw ShardingError(fmt::format(
          "rank {}: a parameter is shared with unit '{}', which has run already; wanted: "
          "fully_shard on all modules before the first forward",
          unit->options().world_rank, unit->name()));
    }
    if (owner_of(parameter) == unit) {
      unit->release(parameter);
    }
  }
}

/// Adds the parameters at and below `module` that no unit has yet and that are not in `seen`, each
/// once. (A unit elsewhere may have one: then a module around both will move it up.)
void add_free_parameters(const torch::nn::Module& module, std::unordered_set<const void*>& seen,
                         std::vector<NamedParameter>& found) {
  for (const auto& entry : module.named_parameters()) {
    if (!entry.value().defined() ||
        (owner_of(entry.value()) == nullptr && seen.insert(identity(entry.value())).second)) {
      found.push_back({plain_name(entry.key()), entry.value()});
    }
  }
}

std::vector<NamedParameter> free_parameters(const torch::nn::Module& module) {
  std::unordered_set<const void*> seen;
  std::vector<NamedParameter> found;
  add_free_parameters(module, seen, found);
  return found;
}

/// Of all the modules together, without the ignored ones.
std::vector<NamedParameter> free_parameters(const std::vector<ModulePtr>& modules,
                                            const std::vector<at::Tensor>& ignored) {
  std::unordered_set<const void*> seen;
  for (const auto& parameter : ignored) {
    seen.insert(identity(parameter));
  }
  std::vector<NamedParameter> found;
  for (const auto& module : modules) {
    add_free_parameters(*module, seen, found);
  }
  return found;
}

/// Floating-point buffers at and below the modules, without those of inner units.
std::vector<at::Tensor> own_buffers(const std::vector<ModulePtr>& modules) {
  std::vector<at::Tensor> found;
  const std::function<void(torch::nn::Module&, bool)> walk = [&](torch::nn::Module& at,
                                                                 bool is_outermost) {
    if (!is_outermost && unit_of(at) != nullptr) {
      return;
    }
    for (const auto& entry : at.named_buffers(/*recurse=*/false)) {
      if (entry.value().defined()) {
        found.push_back(entry.value());
      }
    }
    for (const auto& child : at.named_children()) {
      walk(*child.value(), false);
    }
  };
  for (const auto& module : modules) {
    walk(*module, true);
  }
  return found;
}

void broadcast_from_first(const at::Tensor& tensor, const UnitOptions& unit) {
  // Along the rows of shards first, then down the columns of replicas.
  const at::NoGradGuard no_grad;
  auto values = tensor.detach().contiguous();
  for (const auto& group : {unit.shard_group, unit.replicate_group}) {
    if (group != nullptr) {
      std::vector<at::Tensor> tensors = {values};
      group->broadcast(tensors)->wait();
    }
  }
  tensor.detach().copy_(values);
}

}  // namespace

std::string_view to_string(ShardingStrategy strategy) {
  switch (strategy) {
    case ShardingStrategy::full_shard:
      return "full_shard";
    case ShardingStrategy::shard_grad_op:
      return "shard_grad_op";
    case ShardingStrategy::no_shard:
      return "no_shard";
    case ShardingStrategy::hybrid_shard:
      return "hybrid_shard";
    case ShardingStrategy::hybrid_shard_zero2:
      return "hybrid_shard_zero2";
  }
  return "unknown";
}

void fully_shard(const std::vector<ModulePtr>& modules, FullyShardOptions options) {
  const auto groups = groups_of(options);
  check_modules(modules, groups.rank);
  for (const auto& module : modules) {
    release_shared_parameters(*module);
    materialize(*module, options, groups.rank);
  }
  const auto parameters = free_parameters(modules, options.ignored_parameters);
  const auto dtype = parameters.empty() || !parameters.front().parameter.defined()
                         ? at::kFloat
                         : parameters.front().parameter.scalar_type();
  auto unit_settings = unit_options(options, groups, dtype);
  const auto buffers = own_buffers(modules);
  if (options.sync_module_states) {
    for (const auto& entry : parameters) {
      broadcast_from_first(entry.parameter, unit_settings);
    }
    for (const auto& buffer : buffers) {
      broadcast_from_first(buffer, unit_settings);
    }
  }
  if (const auto wanted = options.mixed_precision.buffer_dtype) {
    for (const auto& buffer : buffers) {
      if (at::isFloatingType(buffer.scalar_type())) {
        at::Tensor(buffer).set_data(buffer.to(*wanted));
      }
    }
  }
  std::shared_ptr<Unit> unit;
  try {
    unit = std::make_shared<Unit>(
        std::move(unit_settings),
        std::vector<std::weak_ptr<torch::nn::Module>>(modules.begin(), modules.end()), parameters);
  } catch (const ShardingError& error) {
    throw ShardingError(fmt::format("rank {}: {}", groups.rank, error.what()));
  }
  for (const auto& module : modules) {
    dynamic_cast<HookableModule&>(*module).add_forward_hook(unit);
  }
}

void fully_shard(const ModulePtr& module, FullyShardOptions options) {
  fully_shard(std::vector<ModulePtr>{module}, std::move(options));
}

std::vector<std::string> fully_shard_where(const ModulePtr& module, const WrapPredicate& predicate,
                                           const FullyShardOptions& options) {
  std::vector<std::string> names;
  std::unordered_set<const torch::nn::Module*> seen;
  const std::function<void(const ModulePtr&, const std::string&)> walk =
      [&](const ModulePtr& at, const std::string& name) {
        for (const auto& child : at->named_children()) {
          walk(child.value(), name.empty() ? child.key() : name + "." + child.key());
        }
        if (at == module || !seen.insert(at.get()).second || unit_of(*at) != nullptr) {
          return;
        }
        if (predicate(plain_name(name), *at)) {
          fully_shard(at, options);
          names.push_back(plain_name(name));
        }
      };
  walk(module, "");
  fully_shard(module, options);
  names.emplace_back();
  return names;
}

WrapPredicate at_least(std::int64_t min_numel) {
  return [min_numel](const std::string& /*name*/, torch::nn::Module& module) {
    if (dynamic_cast<HookableModule*>(&module) == nullptr) {
      return false;
    }
    std::int64_t numel = 0;
    for (const auto& entry : free_parameters(module)) {
      numel += entry.parameter.numel();
    }
    return numel >= min_numel;
  };
}

std::vector<ShardPlacement> shard_placements(torch::nn::Module& module) {
  std::unordered_map<const void*, std::pair<Unit*, std::size_t>> owners;
  const auto units = units_below(module);
  for (const auto& unit : units) {
    for (std::size_t i = 0; i < unit->flat().parameters().size(); ++i) {
      owners[identity(unit->flat().parameters()[i])] = {unit.get(), i};
    }
  }
  std::vector<ShardPlacement> placements;
  for (const auto& entry : module.named_parameters()) {
    const auto owner = owners.find(identity(entry.value()));
    if (owner == owners.end()) {
      continue;
    }
    const auto [unit, index] = owner->second;
    owners.erase(owner);  // a shared parameter is listed once, under its first name
    const auto held = unit->flat().held(index);
    ShardPlacement placement{plain_name(entry.key()), unit->flat().slots()[index].sizes, held.begin,
                             held.numel, entry.value()};
    placement.shard_group = unit->options().sharers;
    placement.is_primary_replica = unit->replica() == 0;
    for (int shard = 0; shard < unit->shards(); ++shard) {
      const auto part = unit->flat().held_by(index, shard);
      placement.ranges.emplace_back(part.begin, part.numel);
    }
    placements.push_back(std::move(placement));
  }
  return placements;
}

std::vector<std::string> unmanaged_parameters(torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& entry : free_parameters(module)) {
    names.push_back(entry.name);
  }
  return names;
}

std::vector<UnitDescription> describe_units(torch::nn::Module& module) {
  std::vector<UnitDescription> descriptions;
  for (const auto& unit : units_below(module)) {
    UnitDescription description;
    description.name = unit->name();
    description.strategy = unit->options().strategy;
    description.shards = unit->shards();
    description.replicas = unit->replicas();
    description.predivide_factor = unit->options().predivide;
    description.postdivide_factor = unit->options().postdivide;
    description.is_gathered = unit->is_gathered();
    if (!unit->flat().empty()) {
      for (const auto& slot : unit->flat().slots()) {
        description.parameters.push_back(slot.name);
      }
      description.padded_numel = unit->flat().padded_numel();
      description.dtype = unit->flat().dtype();
      description.param_dtype = unit->param_dtype();
      description.reduce_dtype = unit->reduce_dtype();
    }
    descriptions.push_back(std::move(description));
  }
  return descriptions;
}

// ---- Finer control ---------------------------------------------------------------------------

namespace {

std::shared_ptr<Unit> own_unit(torch::nn::Module& module, const char* caller) {
  auto unit = unit_of(module);
  if (unit == nullptr) {
    throw UsageError(
        fmt::format("{}: module of type {} is no unit; wanted: one that fully_shard was called on",
                    caller, module.name()));
  }
  return unit;
}

template <typename F>
void for_units_below(torch::nn::Module& module, const char* caller, F&& f) {
  const auto units = units_below(module);
  if (units.empty()) {
    throw UsageError(fmt::format(
        "{}: nothing at or below the module of type {} is sharded; wanted: fully_shard first",
        caller, module.name()));
  }
  for (const auto& unit : units) {
    f(*unit);
  }
}

}  // namespace

UnshardHandle unshard(torch::nn::Module& module, bool async) {
  const auto unit = own_unit(module, "unshard");
  unit->start_unshard();
  UnshardHandle handle([unit] { unit->wait_for_parameters(); });
  if (!async) {
    handle.wait();
  }
  return handle;
}

void reshard(torch::nn::Module& module) {
  own_unit(module, "reshard")->reshard();
}

void set_requires_gradient_sync(torch::nn::Module& module, bool required) {
  for_units_below(module, "set_requires_gradient_sync",
                  [=](Unit& unit) { unit.requires_gradient_sync = required; });
}

void set_requires_all_reduce(torch::nn::Module& module, bool required) {
  for_units_below(module, "set_requires_all_reduce",
                  [=](Unit& unit) { unit.requires_all_reduce = required; });
}

void set_is_last_backward(torch::nn::Module& module, bool is_last) {
  for_units_below(module, "set_is_last_backward",
                  [=](Unit& unit) { unit.is_last_backward = is_last; });
}

void set_reshard_after_forward(torch::nn::Module& module, bool reshard) {
  for_units_below(module, "set_reshard_after_forward",
                  [=](Unit& unit) { unit.set_reshard_after_forward(reshard); });
}

void set_reshard_after_backward(torch::nn::Module& module, bool reshard) {
  for_units_below(module, "set_reshard_after_backward",
                  [=](Unit& unit) { unit.reshard_after_backward = reshard; });
}

void set_gradient_divide_factor(torch::nn::Module& module, double factor) {
  if (!(factor > 0 && std::isfinite(factor))) {
    throw UsageError(fmt::format(
        "set_gradient_divide_factor: the factor is {}; wanted: a positive finite number", factor));
  }
  for_units_below(module, "set_gradient_divide_factor",
                  [=](Unit& unit) { unit.set_divide_factor(factor); });
}

void register_comm_hook(torch::nn::Module& module, CommHook hook) {
  for_units_below(module, "register_comm_hook", [&](Unit& unit) { unit.set_comm_hook(hook); });
}

void bf16_compress_hook(GradientReduction& reduction) {
  auto whole = reduction.whole.to(at::kBFloat16);
  auto shard = whole;
  if (reduction.shard_group != nullptr) {
    shard = at::empty(reduction.shard.sizes(), whole.options());
    reduction.shard_group->_reduce_scatter_base(shard, whole)->wait();
  }
  if (reduction.replicate_group != nullptr) {
    std::vector<at::Tensor> tensors = {shard};
    reduction.replicate_group->allreduce(tensors)->wait();
  }
  reduction.shard.copy_(shard);
}

struct WholeParameters::Impl {
  struct Held {
    std::shared_ptr<Unit> unit;
    at::Tensor whole;
  };
  std::vector<Held> held;
};

WholeParameters::WholeParameters(torch::nn::Module& module) : impl_(std::make_unique<Impl>()) {
  for_units_below(module, "WholeParameters", [&](Unit& unit) {
    unit.reshard();
    if (!unit.flat().empty()) {
      impl_->held.push_back({unit.shared_from_this(), unit.gather_whole()});
      unit.flat().use_whole(impl_->held.back().whole);
    }
  });
}

WholeParameters::~WholeParameters() {
  const at::NoGradGuard no_grad;
  for (const auto& [unit, whole] : impl_->held) {
    auto& flat = unit->flat();
    flat.use_chunk();
    const auto numel = flat.chunk_numel();
    const auto own = whole.narrow(0, unit->shard() * numel, numel);
    if (!own.is_alias_of(flat.chunk())) {
      flat.chunk().copy_(own);
    }
  }
}

}  // namespace fsdp
