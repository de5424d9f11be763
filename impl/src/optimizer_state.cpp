#include "optimizer_state.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_map>

#include "fsdp/errors.h"
#include "sha256.h"

namespace fsdp {
namespace {

using nlohmann::json;

// How a rank stands to a parameter's state. A rank whose share is empty may lack what others have.
constexpr char kHasState = 's';
constexpr char kHasNone = '-';
constexpr char kHasNoElements = 'e';

StateShape shape_of(const ParameterState& state) {
  StateShape shape;
  shape.counts = state.counts;
  for (const auto& [key, tensor] : state.tensors) {
    shape.tensors.push_back(key);
  }
  return shape;
}

void check_local_state(const ModelTensor& parameter, const ParameterState& state) {
  for (const auto& [key, tensor] : state.tensors) {
    if (tensor.sizes() != parameter.tensor.sizes() ||
        tensor.scalar_type() != parameter.tensor.scalar_type()) {
      throw StateError(fmt::format(
          "{} of parameter '{}' has shape {} and dtype {}; wanted: {} and {}, those of this rank's "
          "piece. An optimizer that has state must be made after its model is sharded",
          key, parameter.name(), shape_text(tensor.sizes()), c10::toString(tensor.scalar_type()),
          shape_text(parameter.tensor.sizes()), c10::toString(parameter.tensor.scalar_type())));
    }
  }
}

json to_json(const StateShape& shape) {
  return {{"counts", shape.counts}, {"tensors", shape.tensors}};
}

std::string describe(const OptimizerView& view) {
  json groups = json::array();
  for (const auto& group : view.groups) {
    groups.push_back({group.options, group.parameters});
  }
  return fmt::format("{} {}", view.kind->type, groups.dump());
}

/// The rank that has the state of each parameter of the optimizer, -1 if none has.
std::vector<int> find_owners(const Model& model, const OptimizerView& view,
                             const std::vector<std::string>& standings) {
  std::vector<int> owners;
  for (std::size_t i = 0; i < view.parameters.size(); ++i) {
    int owner = -1;
    int lacking = -1;
    for (int rank = 0; rank < model.ranks.size(); ++rank) {
      if (standings[rank][i] == kHasState && owner < 0) {
        owner = rank;
      } else if (standings[rank][i] == kHasNone) {
        lacking = rank;
      }
    }
    if (owner >= 0 && lacking >= 0) {
      throw StateError(fmt::format(
          "rank {}: the optimizer has no state for parameter '{}', of which the rank has elements; "
          "rank {} has state for it; wanted: the same steps on every rank",
          lacking, model.tensors[view.parameters[i]].name(), owner));
    }
    owners.push_back(owner);
  }
  return owners;
}

std::map<std::string, std::size_t> indices_by_name(const std::vector<ModelTensor>& tensors) {
  std::map<std::string, std::size_t> indices;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    for (const auto& name : tensors[i].names) {
      indices[name] = i;
    }
  }
  return indices;
}

template <typename Map>
std::vector<std::string> keys_of(const Map& map) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : map) {
    keys.push_back(key);
  }
  return keys;
}

std::set<std::size_t> as_set(const std::vector<std::size_t>& values) {
  return {values.begin(), values.end()};
}

/// The saved group for each group of the optimizer.
std::vector<std::size_t> match_groups(const std::vector<ModelTensor>& tensors,
                                      const OptimizerView& view, const SavedOptimizer& saved,
                                      const std::string& origin) {
  const auto indices = indices_by_name(tensors);
  std::vector<std::set<std::size_t>> sets;
  for (const auto& group : saved.groups) {
    auto& set = sets.emplace_back();
    for (const auto& name : group.parameters) {
      const auto found = indices.find(name);
      if (found == indices.end()) {
        throw StateError(
            fmt::format("{}: optimizer group {} has parameter '{}', which the model has not",
                        origin, sets.size() - 1, name));
      }
      set.insert(found->second);
    }
  }
  if (sets.size() != view.groups.size()) {
    throw StateError(fmt::format("{}: the saved optimizer has {} groups; wanted: {}, as this one",
                                 origin, sets.size(), view.groups.size()));
  }
  std::vector<std::size_t> match;
  std::vector<bool> used(sets.size());
  for (std::size_t i = 0; i < view.groups.size(); ++i) {
    const auto wanted = as_set(view.group_parameters[i]);
    std::size_t j = 0;
    while (j < sets.size() && (used[j] || sets[j] != wanted)) {
      ++j;
    }
    if (j == sets.size()) {
      throw StateError(fmt::format(
          "{}: no group of the saved optimizer has exactly the parameters of group {}: {}; wanted: "
          "the same groups",
          origin, i, names_text(view.groups[i].parameters)));
    }
    used[j] = true;
    if (keys_of(saved.groups[j].options) != keys_of(view.groups[i].options)) {
      throw StateError(fmt::format("{}: optimizer group {} has options {}; wanted: {}", origin, j,
                                   names_text(keys_of(saved.groups[j].options)),
                                   names_text(keys_of(view.groups[i].options))));
    }
    match.push_back(j);
  }
  return match;
}

/// The tensors of the saved state of `name`, held to what the optimizer needs.
StateShape plan_state(const ModelTensor& parameter, const std::string& name,
                      const OptimizerKind& kind, const SavedOptimizer& saved,
                      const TensorSource& source) {
  StateShape shape;
  shape.counts = saved.counts.at(name);
  const auto counts = keys_of(shape.counts);
  if (counts != kind.counts) {
    throw StateError(fmt::format(
        "{}: the state of parameter '{}' has counts ({}); wanted: ({}) for {}", source.origin(),
        name, fmt::join(counts, ", "), fmt::join(kind.counts, ", "), kind.type));
  }
  const auto add = [&](const std::string& key, bool always) {
    const auto* info = source.find(key + "/" + name);
    if (info == nullptr) {
      if (always) {
        throw StateError(
            fmt::format("{}: the state of parameter '{}' lacks {}; wanted: all that "
                        "{} keeps",
                        source.origin(), name, key, kind.type));
      }
      return;
    }
    if (info->shape != parameter.sizes || info->dtype != parameter.tensor.scalar_type()) {
      throw StateError(fmt::format(
          "{}: {} of parameter '{}' has shape {} and dtype {}; wanted: {} and {}, "
          "those of the parameter",
          source.origin(), key, name, shape_text(info->shape), c10::toString(info->dtype),
          shape_text(parameter.sizes), c10::toString(parameter.tensor.scalar_type())));
    }
    shape.tensors.push_back(key);
  };
  for (const auto& key : kind.tensors) {
    add(key, true);
  }
  for (const auto& key : kind.optional_tensors) {
    add(key, false);
  }
  return shape;
}

/// Refuses what the plan does not use.
void check_nothing_left(const OptimizerPlan& plan, const OptimizerKind& kind,
                        const SavedOptimizer& saved, const TensorSource& source) {
  std::set<std::string> used_counts;
  std::set<std::string> used_tensors;
  for (const auto& [index, entry] : plan.states) {
    if (entry.has_value()) {
      used_counts.insert(entry->name);
      for (const auto& key : entry->shape.tensors) {
        used_tensors.insert(key + "/" + entry->name);
      }
    }
  }
  for (const auto& [name, counts] : saved.counts) {
    if (!used_counts.contains(name)) {
      throw StateError(
          fmt::format("{}: there is optimizer state for '{}', which is no parameter "
                      "of this optimizer, or another name of one that has state",
                      source.origin(), name));
    }
  }
  for (const auto& [key, info] : source.tensors()) {
    if (!used_tensors.contains(key)) {
      throw StateError(fmt::format("{}: optimizer tensor '{}' is nothing that {} keeps",
                                   source.origin(), key, kind.type));
    }
  }
}

SavedOptimizer header_of(const OptimizerState& state, const std::string& origin) {
  SavedOptimizer saved{state.type, state.groups, {}};
  for (const auto& [name, values] : state.state) {
    auto& counts = saved.counts[name];
    for (const auto& [key, tensor] : values) {
      if (key != "step") {
        continue;
      }
      if (!tensor.defined() || tensor.scalar_type() != at::kLong || tensor.numel() != 1) {
        throw StateError(fmt::format(
            "{}: 'step' of parameter '{}' is {}; wanted: one int64", origin, name,
            tensor.defined() ? fmt::format("of shape {} and dtype {}", shape_text(tensor.sizes()),
                                           c10::toString(tensor.scalar_type()))
                             : "undefined"));
      }
      counts[key] = tensor.item<std::int64_t>();
    }
  }
  return saved;
}

StateDict tensors_of(const OptimizerState& state) {
  StateDict tensors;
  for (const auto& [name, values] : state.state) {
    for (const auto& [key, tensor] : values) {
      if (key != "step") {
        tensors[key + "/" + name] = tensor;
      }
    }
  }
  return tensors;
}

std::string pack(const SavedOptimizer& saved) {
  json groups = json::array();
  for (const auto& group : saved.groups) {
    groups.push_back({group.options, group.parameters});
  }
  return json{saved.type, groups, saved.counts}.dump();
}

SavedOptimizer unpack(const std::string& text) {
  const auto packed = json::parse(text);
  SavedOptimizer saved;
  saved.type = packed[0].get<std::string>();
  for (const auto& group : packed[1]) {
    saved.groups.push_back(
        {group[0].get<std::map<std::string, double>>(), group[1].get<std::vector<std::string>>()});
  }
  saved.counts = packed[2].get<decltype(saved.counts)>();
  return saved;
}

}  // namespace

OptimizerView view_optimizer(const torch::optim::Optimizer& optimizer,
                             const std::vector<ModelTensor>& tensors) {
  std::unordered_map<const void*, std::size_t> indices;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    indices[tensors[i].tensor.unsafeGetTensorImpl()] = i;
  }
  OptimizerView view;
  view.kind = &kind_of(optimizer);
  std::set<std::size_t> seen;
  for (const auto& group : optimizer.param_groups()) {
    auto& members = view.group_parameters.emplace_back();
    for (std::size_t i = 0; i < group.params().size(); ++i) {
      const auto found = indices.find(group.params()[i].unsafeGetTensorImpl());
      if (found == indices.end()) {
        throw UsageError(fmt::format(
            "parameter {} of optimizer group {} is not in the model; wanted: an optimizer over "
            "module.parameters()",
            i, view.groups.size()));
      }
      // A tied weight is listed once for each of its names.
      if (std::find(members.begin(), members.end(), found->second) == members.end()) {
        members.push_back(found->second);
      }
      seen.insert(found->second);
    }
    OptimizerState::Group described{view.kind->options(group.options()), {}};
    for (const auto& [name, value] : described.options) {
      if (!std::isfinite(value)) {
        throw UsageError(
            fmt::format("option {} of optimizer group {} is {}; wanted: a finite "
                        "number",
                        name, view.groups.size(), value));
      }
    }
    for (const auto index : members) {
      described.parameters.push_back(tensors[index].name());
    }
    view.groups.push_back(std::move(described));
  }
  view.parameters.assign(seen.begin(), seen.end());
  return view;
}

std::map<std::size_t, StateShape> agree_on_states(const Model& model,
                                                  const torch::optim::Optimizer& optimizer,
                                                  const OptimizerView& view) {
  const auto digests = model.ranks.all_or_none([&] { return sha256_of(describe(view)); });
  for (std::size_t rank = 0; rank < digests.size(); ++rank) {
    if (digests[rank] != digests.front()) {
      throw StateError(
          fmt::format("rank {}: its optimizer has another type, other groups or other "
                      "options than that of rank 0; wanted: the same on every rank",
                      rank));
    }
  }
  std::vector<std::optional<ParameterState>> mine;
  const auto standings = model.ranks.all_or_none([&] {
    std::string standing;
    for (const auto index : view.parameters) {
      const auto& parameter = model.tensors[index];
      mine.push_back(state_of(optimizer, *view.kind, parameter.tensor));
      if (mine.back().has_value()) {
        check_local_state(parameter, *mine.back());
      }
      standing += mine.back().has_value() ? kHasState
                  : parameter.numel == 0  ? kHasNoElements
                                          : kHasNone;
    }
    return standing;
  });
  const auto owners = find_owners(model, view, standings);
  const auto described = model.ranks.all_or_none([&]() -> std::string {
    json shapes = json::object();
    for (std::size_t i = 0; i < owners.size(); ++i) {
      if (owners[i] == model.ranks.rank()) {
        shapes[std::to_string(i)] = to_json(shape_of(*mine[i]));
      }
    }
    return shapes.empty() ? "" : shapes.dump();
  });
  std::map<std::size_t, StateShape> agreed;
  model.ranks.all_or_none([&] {
    std::vector<json> parsed(described.size());
    for (std::size_t i = 0; i < owners.size(); ++i) {
      if (owners[i] < 0) {
        continue;
      }
      auto& said = parsed[owners[i]];
      if (said.is_null()) {
        said = json::parse(described[owners[i]]);
      }
      const auto& shape = said.at(std::to_string(i));
      if (mine[i].has_value() && to_json(shape_of(*mine[i])) != shape) {
        throw StateError(
            fmt::format("the optimizer's state of parameter '{}' is {}, that of rank {} is {}; "
                        "wanted: the same "
                        "steps on every rank",
                        model.tensors[view.parameters[i]].name(),
                        to_json(shape_of(*mine[i])).dump(), owners[i], shape.dump()));
      }
      agreed[view.parameters[i]] = {shape["counts"].get<std::map<std::string, std::int64_t>>(),
                                    shape["tensors"].get<std::vector<std::string>>()};
    }
    return "";
  });
  return agreed;
}

at::Tensor state_piece(const torch::optim::Optimizer& optimizer, const OptimizerKind& kind,
                       const ModelTensor& parameter, const std::string& tensor) {
  const auto state = state_of(optimizer, kind, parameter.tensor);
  return state.has_value() ? state->tensors.at(tensor)
                           : at::empty({0}, parameter.tensor.options().requires_grad(false));
}

OptimizerPlan plan_optimizer(const std::vector<ModelTensor>& tensors, const OptimizerView& view,
                             const SavedOptimizer& saved, const TensorSource& source) {
  if (saved.type != view.kind->type) {
    throw StateError(fmt::format("{}: the saved optimizer is '{}'; wanted: {}, as this one",
                                 source.origin(), saved.type, view.kind->type));
  }
  OptimizerPlan plan;
  plan.groups = match_groups(tensors, view, saved, source.origin());
  for (const auto index : view.parameters) {
    auto& entry = plan.states[index];
    for (const auto& name : tensors[index].names) {
      if (!entry.has_value() && saved.counts.contains(name)) {
        entry = {name, plan_state(tensors[index], name, *view.kind, saved, source)};
      }
    }
  }
  check_nothing_left(plan, *view.kind, saved, source);
  return plan;
}

OptimizerPieces read_optimizer(const std::vector<ModelTensor>& tensors, const OptimizerPlan& plan,
                               TensorSource& source) {
  OptimizerPieces pieces;
  for (const auto& [index, entry] : plan.states) {
    auto& piece = pieces[index];
    if (!entry.has_value()) {
      continue;
    }
    const auto& parameter = tensors[index];
    piece.emplace();
    piece->counts = entry->shape.counts;
    for (const auto& key : entry->shape.tensors) {
      piece->tensors[key] = source.read(key + "/" + entry->name, parameter.begin, parameter.numel)
                                .to(parameter.tensor.device(), parameter.tensor.scalar_type(),
                                    /*non_blocking=*/false, /*copy=*/true)
                                .view(parameter.tensor.sizes());
    }
  }
  return pieces;
}

void write_optimizer(torch::optim::Optimizer& optimizer, const std::vector<ModelTensor>& tensors,
                     const OptimizerView& view, const SavedOptimizer& saved,
                     const OptimizerPlan& plan, const OptimizerPieces& pieces) {
  for (std::size_t i = 0; i < plan.groups.size(); ++i) {
    view.kind->set_options(optimizer.param_groups()[i].options(),
                           saved.groups[plan.groups[i]].options);
  }
  for (const auto& [index, state] : pieces) {
    set_state(optimizer, *view.kind, tensors[index].tensor, state);
  }
}

OptimizerState full_optimizer_state(torch::nn::Module& module,
                                    const torch::optim::Optimizer& optimizer,
                                    const StateOptions& options) {
  const at::NoGradGuard no_grad;
  const auto model = open_model(module, options.process_group, "full_optimizer_state");
  OptimizerView view;
  model.ranks.all_or_none([&] {
    view = view_optimizer(optimizer, model.tensors);
    return "";
  });
  const auto states = agree_on_states(model, optimizer, view);
  const bool wanted = !options.rank0_only || model.ranks.rank() == 0;
  OptimizerState result;
  for (const auto& [index, shape] : states) {
    const auto& parameter = model.tensors[index];
    std::map<std::string, at::Tensor> values;
    for (const auto& [key, count] : shape.counts) {
      values[key] = at::full({}, count, at::kLong);
    }
    for (const auto& key : shape.tensors) {
      const auto whole =
          gather_whole(parameter, state_piece(optimizer, *view.kind, parameter, key));
      if (wanted) {
        values[key] = options.cpu_offload ? whole.cpu() : whole;
      }
    }
    if (wanted) {
      result.state[parameter.name()] = std::move(values);
    }
  }
  if (wanted) {
    result.type = view.kind->type;
    result.groups = view.groups;
  }
  return result;
}

void load_full_optimizer_state(torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                               const OptimizerState& state, const LoadStateOptions& options) {
  const auto model = open_model(module, options.process_group, "load_full_optimizer_state");
  const std::string origin = "load_full_optimizer_state: the state";
  const bool looks = !options.broadcast_from_rank0 || model.ranks.rank() == 0;
  OptimizerView view;
  SavedOptimizer saved;
  StateDict tensors;
  const auto headers = model.ranks.all_or_none([&]() -> std::string {
    view = view_optimizer(optimizer, model.tensors);
    if (looks) {
      saved = header_of(state, origin);
      tensors = tensors_of(state);
    }
    return options.broadcast_from_rank0 && model.ranks.rank() == 0 ? pack(saved) : "";
  });
  std::unique_ptr<TensorSource> source;
  if (options.broadcast_from_rank0) {
    saved = unpack(headers.front());
    source = std::make_unique<BroadcastSource>(tensors, origin, model.ranks);
  } else {
    model.ranks.all_or_none([&] {
      source = std::make_unique<DictSource>(tensors, origin);
      return "";
    });
  }
  OptimizerPlan plan;
  model.ranks.all_or_none([&] {
    plan = plan_optimizer(model.tensors, view, saved, *source);
    return "";
  });
  OptimizerPieces pieces;
  model.ranks.all_or_none([&] {
    pieces = read_optimizer(model.tensors, plan, *source);
    return "";
  });
  write_optimizer(optimizer, model.tensors, view, saved, plan, pieces);
}

}  // namespace fsdp
