#include "fsdp/fully_shard.h"

#include <fmt/format.h>

#include <unordered_map>
#include <unordered_set>

#include "fsdp/errors.h"
#include "unit.h"

namespace fsdp {
namespace {

/// The parameters below `module` that no unit has yet, each once.
std::vector<FlatParameter::NamedParameter> free_parameters(torch::nn::Module& module) {
  std::unordered_set<const void*> seen;
  for (const auto& unit : units_below(module)) {
    for (const auto& parameter : unit->flat().parameters()) {
      seen.insert(parameter.unsafeGetTensorImpl());
    }
  }
  std::vector<FlatParameter::NamedParameter> found;
  for (const auto& entry : module.named_parameters()) {
    if (!entry.value().defined() || seen.insert(entry.value().unsafeGetTensorImpl()).second) {
      found.push_back({plain_name(entry.key()), entry.value()});
    }
  }
  return found;
}

}  // namespace

void fully_shard(const std::shared_ptr<torch::nn::Module>& module, FullyShardOptions options) {
  if (options.process_group == nullptr) {
    throw UsageError(
        "fully_shard: options.process_group is null; wanted: the backend of the ranks that "
        "share the parameters, for example from fsdp::make_in_process_group");
  }
  const auto rank = options.process_group->getRank();
  auto* hookable = dynamic_cast<HookableModule*>(module.get());
  if (hookable == nullptr) {
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
  hookable->add_forward_hook(
      std::make_shared<Unit>(module, std::move(options.process_group), free_parameters(*module)));
}

std::vector<ShardPlacement> shard_placements(torch::nn::Module& module) {
  std::unordered_map<const void*, std::pair<Unit*, std::size_t>> owners;
  const auto units = units_below(module);
  for (const auto& unit : units) {
    for (std::size_t i = 0; i < unit->flat().parameters().size(); ++i) {
      owners[unit->flat().parameters()[i].unsafeGetTensorImpl()] = {unit.get(), i};
    }
  }
  std::vector<ShardPlacement> placements;
  for (const auto& entry : module.named_parameters()) {
    const auto owner = owners.find(entry.value().unsafeGetTensorImpl());
    if (owner == owners.end()) {
      continue;
    }
    const auto& [unit, index] = owner->second;
    const auto held = unit->flat().held(index);
    placements.push_back({plain_name(entry.key()), unit->flat().slots()[index].sizes, held.begin,
                          held.numel, entry.value()});
  }
  return placements;
}

}  // namespace fsdp
