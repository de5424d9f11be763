#include "reference/scenario.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>

#include "reference/wording.h"

namespace shardproof {
namespace {

using nlohmann::json;

constexpr const char* kSchema = "shardproof.scenario/1";

// ---------------------------------------------------------------------------------------------
// The fields. Everything below (JSON, ranges, names) is read off this one table.

struct Field {
  std::string_view path;      // "model.layers"
  std::string_view token;     // how a value other than the default begins in the dotted name
  std::string_view only_for;  // the kind of its object that it belongs to; empty for every kind
};

struct Whole {  // least <= value <= most
  std::int64_t least;
  std::int64_t most;
};
struct Real {  // least <= value, or least < value if `least_excluded`; value < below
  double least;
  double below = std::numeric_limits<double>::infinity();
  bool least_excluded = false;
};
struct Choice {
  std::initializer_list<std::string_view> names;
};
struct Power {};       // the p of a norm: 0.1 to 64, or infinity, which JSON writes as "inf"
struct Words {};       // names of quirk_names(), each at most once
struct Identifier {};  // a name that others may add to: a backend, a device
struct Sizes {
  std::size_t least_count;
  Whole each;
};
struct Anything {};

struct Dtype {  // a dtype's name; also "", not set, if it may be
  bool may_be_unset = false;
};

/// Calls visit(field, value, limits) for every field, in the order in which they are written.
/// `S` is Scenario or const Scenario.
template <typename S, typename Visitor>
void visit_fields(S& s, Visitor&& visit) {
  constexpr std::int64_t kMany = 1 << 20;
  visit(Field{"model.kind", "", ""}, s.model.kind, Choice{{"mlp", "transformer", "quirks"}});
  visit(Field{"model.layers", "layers", "transformer"}, s.model.layers, Whole{1, 4096});
  visit(Field{"model.width", "width", "transformer"}, s.model.width, Whole{1, kMany});
  visit(Field{"model.heads", "heads", "transformer"}, s.model.heads, Whole{1, kMany});
  visit(Field{"model.context", "context", "transformer"}, s.model.context, Whole{1, kMany});
  visit(Field{"model.vocabulary", "vocabulary", "transformer"}, s.model.vocabulary,
        Whole{2, kMany});
  visit(Field{"model.tied", "tied", "transformer"}, s.model.tied, Anything{});
  visit(Field{"model.sizes", "sizes", "mlp"}, s.model.sizes, Sizes{2, {1, kMany}});
  visit(Field{"model.depth", "depth", "quirks"}, s.model.depth, Whole{1, 4096});
  visit(Field{"model.quirk_width", "quirk_width", "quirks"}, s.model.quirk_width, Whole{1, kMany});
  visit(Field{"model.quirks", "quirks", "quirks"}, s.model.quirks, Words{});
  visit(Field{"model.dropout", "dropout", ""}, s.model.dropout, Real{0, 1});
  visit(Field{"data.kind", "", ""}, s.data.kind, Choice{{"bytes", "synthetic"}});
  visit(Field{"data.corpus", "", "bytes"}, s.data.corpus, Anything{});
  visit(Field{"optimizer.kind", "", ""}, s.optimizer.kind, Choice{{"adamw", "sgd"}});
  visit(Field{"optimizer.lr", "lr", ""}, s.optimizer.lr, Real{0});
  visit(Field{"optimizer.momentum", "momentum", "sgd"}, s.optimizer.momentum, Real{0});
  visit(Field{"optimizer.beta1", "beta1_", "adamw"}, s.optimizer.beta1, Real{0, 1});
  visit(Field{"optimizer.beta2", "beta2_", "adamw"}, s.optimizer.beta2, Real{0, 1});
  visit(Field{"optimizer.eps", "eps", "adamw"}, s.optimizer.eps, Real{0});
  visit(Field{"optimizer.weight_decay", "weight_decay", ""}, s.optimizer.weight_decay, Real{0});
  visit(Field{"seed", "", ""}, s.seed, Anything{});
  visit(Field{"world_size", "", ""}, s.world_size, Whole{1, 512});
  visit(Field{"strategy", "", ""}, s.strategy,
        Choice{{"full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"}});
  visit(Field{"replicas", "replicas", ""}, s.replicas, Whole{1, 512});
  visit(Field{"wrap", "", ""}, s.wrap, Choice{{"layer", "model"}});
  visit(Field{"dtype", "", ""}, s.dtype, Dtype{});
  visit(Field{"precision.parameter", "parameter_", ""}, s.precision.parameter, Dtype{true});
  visit(Field{"precision.reduce", "reduce_", ""}, s.precision.reduce, Dtype{true});
  visit(Field{"precision.output", "output_", ""}, s.precision.output, Dtype{true});
  visit(Field{"precision.buffer", "buffers_", ""}, s.precision.buffer, Dtype{true});
  visit(Field{"precision.exempt_norms", "exempt_norms", ""}, s.precision.exempt_norms, Anything{});
  visit(Field{"max_norm", "max_norm", ""}, s.max_norm, Real{0});
  visit(Field{"norm_type", "norm_type", ""}, s.norm_type, Power{});
  visit(Field{"micro_batches", "micro_batches", ""}, s.micro_batches, Whole{1, kMany});
  visit(Field{"batch", "batch", ""}, s.batch, Whole{1, kMany});
  visit(Field{"accumulation", "accumulation_", ""}, s.accumulation,
        Choice{{"each", "last", "last_all_reduce"}});
  visit(Field{"divide.pre", "divide_pre", ""}, s.divide.pre, Real{0});
  visit(Field{"divide.post", "divide_post", ""}, s.divide.post, Real{0});
  visit(Field{"loss_scale", "loss_scale", ""}, s.loss_scale, Real{0});
  visit(Field{"schedule.reshard_after_forward", "reshard", ""}, s.schedule.reshard_after_forward,
        Whole{-1, 512});
  visit(Field{"schedule.forward_prefetch", "forward_prefetch", ""}, s.schedule.forward_prefetch,
        Whole{0, 8});
  visit(Field{"schedule.backward_prefetch", "backward_prefetch_", ""}, s.schedule.backward_prefetch,
        Choice{{"pre", "post", "none"}});
  visit(Field{"schedule.limit_gathers", "limit_gathers", ""}, s.schedule.limit_gathers,
        Whole{0, kMany});
  visit(Field{"checkpointing.layers", "checkpointing_", ""}, s.checkpointing.layers,
        Choice{{"none", "all", "alternate", "segments"}});
  visit(Field{"checkpointing.order", "order_", ""}, s.checkpointing.order,
        Choice{{"inside", "around"}});
  visit(Field{"checkpointing.early_stop", "early_stop", ""}, s.checkpointing.early_stop,
        Anything{});
  visit(Field{"construction", "construction_", ""}, s.construction,
        Choice{{"plain", "meta", "sync"}});
  visit(Field{"steps", "steps", ""}, s.steps, Whole{1, 1'000'000'000});
  visit(Field{"backend", "backend_", ""}, s.backend, Identifier{});
  visit(Field{"device", "device_", ""}, s.device, Identifier{});
}

constexpr std::array<const char*, 7> kObjects = {"model",  "data",     "optimizer",    "precision",
                                                 "divide", "schedule", "checkpointing"};

/// "model" of "model.layers"; "" of "seed".
std::string_view object_of(std::string_view path) {
  const auto dot = path.find('.');
  return dot == std::string_view::npos ? std::string_view() : path.substr(0, dot);
}

std::string_view leaf_of(std::string_view path) {
  const auto dot = path.find('.');
  return dot == std::string_view::npos ? path : path.substr(dot + 1);
}

std::string join_path(std::string_view object, std::string_view leaf) {
  return object.empty() ? std::string(leaf) : fmt::format("{}.{}", object, leaf);
}

/// The kind of the object that a field lives in.
std::string_view kind_of(const Scenario& scenario, std::string_view path) {
  const auto object = object_of(path);
  if (object == "model") {
    return scenario.model.kind;
  }
  return object == "data" ? scenario.data.kind : scenario.optimizer.kind;
}

bool belongs(const Scenario& scenario, const Field& field) {
  return field.only_for.empty() || field.only_for == kind_of(scenario, field.path);
}

// ---------------------------------------------------------------------------------------------
// Ranges

[[noreturn]] void refuse(std::string_view path, std::string_view seen, std::string_view wanted) {
  throw ScenarioError(fmt::format("{} is {}; wanted: {}", path, seen, wanted));
}

void check(std::string_view path, std::int64_t value, const Whole& limits) {
  if (value < limits.least || value > limits.most) {
    refuse(path, fmt::format("{}", value),
           fmt::format("an integer from {} to {}", limits.least, limits.most));
  }
}

void check(std::string_view path, double value, const Real& limits) {
  const bool enough = limits.least_excluded ? value > limits.least : value >= limits.least;
  if (std::isfinite(value) && enough && value < limits.below) {
    return;
  }
  const auto below =
      std::isfinite(limits.below) ? fmt::format(" and below {}", limits.below) : std::string();
  refuse(path, fmt::format("{}", value),
         fmt::format("a finite number, {} {}{}", limits.least_excluded ? "above" : "at least",
                     limits.least, below));
}

void check(std::string_view path, const std::string& value, const Choice& choice) {
  if (std::find(choice.names.begin(), choice.names.end(), value) == choice.names.end()) {
    refuse(path, fmt::format("\"{}\"", value),
           fmt::format("one of \"{}\"", fmt::join(choice.names, "\", \"")));
  }
}

void check(std::string_view path, const std::string& value, const Dtype& limits) {
  if (!value.empty() || !limits.may_be_unset) {
    check(path, value, Choice{{"float32", "float64", "bfloat16", "float16"}});
  }
}

void check(std::string_view path, double value, const Power&) {
  // Powers of gradients beyond these leave the range of float64 for ordinary gradients.
  if (!(value >= 0.1 && value <= 64) && value != std::numeric_limits<double>::infinity()) {
    refuse(path, fmt::format("{}", value), "a number from 0.1 to 64, or \"inf\"");
  }
}

void check(std::string_view path, const std::vector<std::string>& value, const Words&) {
  const auto& known = quirk_names();
  for (std::size_t i = 0; i < value.size(); ++i) {
    const auto element = fmt::format("{}[{}]", path, i);
    if (std::find(known.begin(), known.end(), value[i]) == known.end()) {
      refuse(element, fmt::format("\"{}\"", value[i]),
             fmt::format("one of \"{}\"", fmt::join(known, "\", \"")));
    }
    if (std::find(value.begin(), value.begin() + static_cast<std::ptrdiff_t>(i), value[i]) !=
        value.begin() + static_cast<std::ptrdiff_t>(i)) {
      refuse(element, fmt::format("\"{}\" once more", value[i]), "each quirk at most once");
    }
  }
}

// Underscores stand alone and inside only, because the dotted name doubles them to tell them from
// its separators.
void check(std::string_view path, const std::string& value, const Identifier&) {
  const auto is_letter = [](char c) { return c >= 'a' && c <= 'z'; };
  const auto is_other = [](char c) { return (c >= '0' && c <= '9') || c == '_'; };
  const bool good =
      !value.empty() && is_letter(value.front()) && value.back() != '_' &&
      value.find("__") == std::string::npos &&
      std::all_of(value.begin(), value.end(), [&](char c) { return is_letter(c) || is_other(c); });
  if (!good) {
    refuse(path, fmt::format("\"{}\"", value),
           "lower-case letters and digits, words joined by single underscores, a letter first");
  }
}

void check(std::string_view path, const std::vector<std::int64_t>& value, const Sizes& limits) {
  if (value.size() < limits.least_count) {
    refuse(path, fmt::format("a list of {}", value.size()),
           fmt::format("at least {} sizes", limits.least_count));
  }
  for (std::size_t i = 0; i < value.size(); ++i) {
    check(fmt::format("{}[{}]", path, i), value[i], limits.each);
  }
}

void check(std::string_view path, const std::vector<std::string>& value, const Anything&) {
  for (std::size_t i = 0; i < value.size(); ++i) {
    if (value[i].empty()) {
      refuse(fmt::format("{}[{}]", path, i), "empty", "the path of a file");
    }
  }
}

void check(std::string_view, std::uint64_t, const Anything&) {}
void check(std::string_view, bool, const Anything&) {}

std::string shown(const json& value) {
  if (value.is_number_float() && !std::isfinite(value.get<double>())) {
    return fmt::format("{}", value.get<double>());
  }
  constexpr std::size_t kLongest = 80;
  auto text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() > kLongest) {
    text = text.substr(0, kLongest) + "...";
  }
  return text;
}

/// A field of another kind of model, data or optimizer must be left alone: a value that nobody
/// reads would make two scenarios differ that train alike.
void check_belongs(const Scenario& scenario) {
  std::vector<Field> strangers;
  const auto collect = [&](const Field& field, const auto&, const auto&) {
    if (!belongs(scenario, field)) {
      strangers.push_back(field);
    }
  };
  visit_fields(scenario, collect);
  const json values = to_json(scenario);
  const json usual = to_json(Scenario());
  for (const auto& stranger : strangers) {
    const auto object = std::string(object_of(stranger.path));
    const auto leaf = std::string(leaf_of(stranger.path));
    if (values[object][leaf] != usual[object][leaf]) {
      refuse(stranger.path, shown(values[object][leaf]),
             fmt::format("nothing, because only {}.kind \"{}\" has it and {}.kind is \"{}\"",
                         object, stranger.only_for, object, kind_of(scenario, stranger.path)));
    }
  }
}

bool is_hybrid(const Scenario& scenario) {
  return scenario.strategy == "hybrid_shard" || scenario.strategy == "hybrid_shard_zero2";
}

void check_model(const Scenario& scenario) {
  const auto& model = scenario.model;
  if (model.kind == "transformer" && model.width % model.heads != 0) {
    refuse("model.heads", fmt::format("{}", model.heads),
           fmt::format("a divisor of model.width, which is {}", model.width));
  }
  if (model.kind == "quirks" && model.dropout != 0) {
    refuse("model.dropout", fmt::format("{}", model.dropout),
           "0, because model.kind is \"quirks\", which drops nothing");
  }
  // A quirk of a layer that is not there would do nothing. A first layer's weight that is also the
  // weight of the frozen one would leave it unclear whether it is frozen.
  const auto check_depth = [&](std::string_view quirk, std::int64_t least) {
    if (has_quirk(scenario, quirk) && model.depth < least) {
      refuse("model.depth", fmt::format("{}", model.depth),
             fmt::format("at least {} with the quirk \"{}\"", least, quirk));
    }
  };
  check_depth("tied_across", has_quirk(scenario, "frozen_layer") ? 3 : 2);
  check_depth("twice", 2);
  check_depth("frozen_layer", 2);
}

void check_data(const Scenario& scenario) {
  const auto& model = scenario.model;
  if (scenario.data.kind != "bytes") {
    return;
  }
  if (model.kind != "transformer") {
    refuse("data.kind", "\"bytes\"",
           fmt::format("\"synthetic\", because model.kind is \"{}\"", model.kind));
  }
  if (model.vocabulary < 256) {
    refuse("model.vocabulary", fmt::format("{}", model.vocabulary),
           "at least 256, because data.kind is \"bytes\"");
  }
}

void check_strategy(const Scenario& scenario) {
  if (!is_hybrid(scenario) && scenario.replicas != 1) {
    refuse("replicas", fmt::format("{}", scenario.replicas),
           fmt::format("1, because strategy is \"{}\"; only \"hybrid_shard\" and "
                       "\"hybrid_shard_zero2\" choose it",
                       scenario.strategy));
  }
  if (scenario.world_size % scenario.replicas != 0) {
    refuse("replicas", fmt::format("{}", scenario.replicas),
           fmt::format("a divisor of world_size, which is {}", scenario.world_size));
  }
  const auto shards = layout_of(scenario).shards;
  const auto group = scenario.schedule.reshard_after_forward;
  if (group > 1 && shards % group != 0) {
    refuse("schedule.reshard_after_forward", fmt::format("{}", group),
           fmt::format("-1, 0, 1, or a divisor of the number of shards, which is {}", shards));
  }
}

void check_precision(const Scenario& scenario) {
  const auto& precision = scenario.precision;
  if (precision.exempt_norms && scenario.model.kind != "transformer") {
    refuse("precision.exempt_norms", "true",
           fmt::format("false, because model.kind \"{}\" has no LayerNorm", scenario.model.kind));
  }
  if (precision.exempt_norms && parameter_dtype(scenario) == scenario.dtype) {
    refuse("precision.exempt_norms", "true",
           "false, because precision.parameter is the same as dtype, so that there is nothing to "
           "exempt from");
  }
  if (!precision.buffer.empty() && !has_quirk(scenario, "buffer")) {
    refuse("precision.buffer", fmt::format("\"{}\"", precision.buffer),
           "\"\", because the model has no floating-point buffer; the quirk \"buffer\" makes some");
  }
}

void check_reduction(const Scenario& scenario) {
  const auto scale = static_cast<float>(scenario.loss_scale);
  const auto inverse = static_cast<float>(1 / scenario.loss_scale);
  // The loss and the gradients are scaled by float32 numbers, whatever their own dtype.
  if (scenario.loss_scale > 0 && (static_cast<double>(scale) != scenario.loss_scale ||
                                  !std::isnormal(scale) || !std::isnormal(inverse))) {
    refuse(
        "loss_scale", fmt::format("{}", scenario.loss_scale),
        "0, or a number that float32 holds exactly, and whose reciprocal it holds as a normal one");
  }
  if (scenario.accumulation != "each" && scenario.micro_batches == 1) {
    refuse("accumulation", fmt::format("\"{}\"", scenario.accumulation),
           "\"each\", because micro_batches is 1");
  }
  if (scenario.accumulation == "last_all_reduce" && !is_hybrid(scenario)) {
    refuse(
        "accumulation", "\"last_all_reduce\"",
        fmt::format("\"each\" or \"last\", because strategy is \"{}\", which does not sum in two "
                    "stages",
                    scenario.strategy));
  }
  if (scenario.divide.pre > 0 && scenario.divide.post == 0) {
    refuse(
        "divide.post", "0",
        fmt::format("a number above 0, because divide.pre is {}; or both 0", scenario.divide.pre));
  }
}

void check_checkpointing(const Scenario& scenario) {
  const auto& checkpointing = scenario.checkpointing;
  if (checkpointing.layers == "segments" && scenario.model.kind != "transformer") {
    refuse("checkpointing.layers", "\"segments\"",
           fmt::format("\"none\", \"all\" or \"alternate\", because model.kind is \"{}\"; only "
                       "\"transformer\" runs in segments",
                       scenario.model.kind));
  }
  if (checkpointing.order == "around") {
    if (checkpointing.layers != "all" && checkpointing.layers != "alternate") {
      refuse("checkpointing.order", "\"around\"",
             fmt::format("\"inside\", because checkpointing.layers is \"{}\"; only \"all\" and "
                         "\"alternate\" choose it",
                         checkpointing.layers));
    }
    if (scenario.wrap != "layer") {
      refuse("checkpointing.order", "\"around\"",
             fmt::format("\"inside\", because wrap is \"{}\", so that no layer is a unit",
                         scenario.wrap));
    }
  }
  if (!checkpointing.early_stop && checkpointing.layers == "none") {
    refuse("checkpointing.early_stop", "false",
           "true, because checkpointing.layers is \"none\", so that nothing runs again");
  }
}

void check_together(const Scenario& scenario) {
  check_model(scenario);
  check_data(scenario);
  check_strategy(scenario);
  check_precision(scenario);
  check_reduction(scenario);
  check_checkpointing(scenario);
}

// ---------------------------------------------------------------------------------------------
// JSON

template <typename T>
void read_integer(std::string_view path, const json& value, T& into, std::int64_t least,
                  std::int64_t most) {
  if (!value.is_number_integer()) {
    refuse(path, shown(value), fmt::format("an integer from {} to {}", least, most));
  }
  if (value.is_number_unsigned() &&
      value.get<std::uint64_t>() > std::uint64_t{std::numeric_limits<std::int64_t>::max()}) {
    refuse(path, shown(value), fmt::format("an integer from {} to {}", least, most));
  }
  const auto wide = value.get<std::int64_t>();
  check(path, wide, Whole{least, most});
  into = static_cast<T>(wide);
}

void read(std::string_view path, const json& value, std::int64_t& into, const Whole& limits) {
  read_integer(path, value, into, limits.least, limits.most);
}

void read(std::string_view path, const json& value, int& into, const Whole& limits) {
  read_integer(path, value, into, limits.least, limits.most);
}

void read(std::string_view path, const json& value, std::uint64_t& into, const Anything&) {
  const bool negative =
      value.is_number_integer() && !value.is_number_unsigned() && value.get<std::int64_t>() < 0;
  if (!value.is_number_integer() || negative) {
    refuse(path, shown(value), "an integer from 0 to 2^64 - 1");
  }
  into = value.get<std::uint64_t>();
}

void read(std::string_view path, const json& value, double& into, const Real&) {
  if (!value.is_number()) {
    refuse(path, shown(value), "a number");
  }
  into = value.get<double>();
}

void read(std::string_view path, const json& value, double& into, const Power&) {
  if (value.is_string() && value.get<std::string>() == "inf") {
    into = std::numeric_limits<double>::infinity();
    return;
  }
  if (!value.is_number()) {
    refuse(path, shown(value), "a number from 0.1 to 64, or \"inf\"");
  }
  into = value.get<double>();
}

void read(std::string_view path, const json& value, bool& into, const Anything&) {
  if (!value.is_boolean()) {
    refuse(path, shown(value), "true or false");
  }
  into = value.get<bool>();
}

template <typename Limits>
void read(std::string_view path, const json& value, std::string& into, const Limits&) {
  if (!value.is_string()) {
    refuse(path, shown(value), "a string");
  }
  into = value.get<std::string>();
}

template <typename T, typename Limits>
void read(std::string_view path, const json& value, std::vector<T>& into, const Limits& limits) {
  if (!value.is_array()) {
    refuse(path, shown(value), "a list");
  }
  into.assign(value.size(), T());
  for (std::size_t i = 0; i < value.size(); ++i) {
    const auto element = fmt::format("{}[{}]", path, i);
    if constexpr (std::is_same_v<Limits, Sizes>) {
      read(element, value[i], into[i], limits.each);
    } else {
      read(element, value[i], into[i], limits);
    }
  }
}

/// The quirks in the order of quirk_names().
std::vector<std::string> in_order(const std::vector<std::string>& quirks) {
  std::vector<std::string> ordered;
  for (const auto& name : quirk_names()) {
    if (std::find(quirks.begin(), quirks.end(), name) != quirks.end()) {
      ordered.push_back(name);
    }
  }
  return ordered;
}

void read(std::string_view path, const json& value, std::vector<std::string>& into, const Words&) {
  read(path, value, into, Anything{});
  check(path, into, Words{});
  into = in_order(into);
}

template <typename T, typename Limits>
json written(const T& value, const Limits&) {
  return value;
}
json written(double value, const Power&) {
  return std::isinf(value) ? json("inf") : json(value);
}
json written(const std::vector<std::string>& quirks, const Words&) {
  return in_order(quirks);
}

std::vector<std::string> known_paths() {
  std::vector<std::string> paths = {"schema"};
  paths.insert(paths.end(), kObjects.begin(), kObjects.end());
  const Scenario defaults;
  visit_fields(defaults, [&](const Field& field, const auto&, const auto&) {
    paths.emplace_back(field.path);
  });
  return paths;
}

/// The known field that whoever wrote `path` most likely meant: one of that name in another object,
/// else the most similar one in the same object.
std::string nearest_field(const std::string& path) {
  const auto known = known_paths();
  for (const auto& candidate : known) {
    if (leaf_of(candidate) == leaf_of(path)) {
      return candidate;
    }
  }
  const std::string* nearest = nullptr;
  for (const auto& candidate : known) {
    if (object_of(candidate) == object_of(path) &&
        (nearest == nullptr || edit_distance(candidate, path) < edit_distance(*nearest, path))) {
      nearest = &candidate;
    }
  }
  return *nearest;
}

void refuse_unknown_fields(const json& object, std::string_view name) {
  if (!object.is_object()) {
    refuse(name.empty() ? "the scenario" : name, shown(object), "an object");
  }
  const auto known = known_paths();
  for (const auto& item : object.items()) {
    const auto path = join_path(name, item.key());
    // A key with a dot in it must not pass for the path of a nested field.
    const bool has_dot = item.key().find('.') != std::string::npos;
    if (has_dot || std::find(known.begin(), known.end(), path) == known.end()) {
      throw ScenarioError(
          fmt::format("unknown field \"{}\"; did you mean \"{}\"?", path,
                      has_dot ? std::string(object_of(path)) + " { ... }" : nearest_field(path)));
    }
  }
}

void check_schema(const json& root) {
  const auto found = root.find("schema");
  if (found == root.end()) {
    return;
  }
  if (!found->is_string() || found->get<std::string>() != kSchema) {
    refuse("schema", shown(*found),
           fmt::format("\"{}\", the only version that this program reads", kSchema));
  }
}

const json* find_field(const json& root, std::string_view path) {
  const json* object = &root;
  if (!object_of(path).empty()) {
    const auto found = root.find(std::string(object_of(path)));
    if (found == root.end()) {
      return nullptr;
    }
    object = &*found;
  }
  const auto found = object->find(std::string(leaf_of(path)));
  return found == object->end() ? nullptr : &*found;
}

/// Sees the keys of a JSON text as they are parsed, remembers the last one, and throws at one that
/// an object has twice, of which the parser would silently keep the last.
class Keys {
 public:
  bool operator()(int, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) {
      seen_.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      seen_.pop_back();
    } else if (event == json::parse_event_t::key) {
      last_ = parsed.get<std::string>();
      if (!seen_.back().insert(last_).second) {
        throw ScenarioError(fmt::format("field \"{}\" stands there twice in one object", last_));
      }
    }
    return true;
  }
  const std::string& last() const { return last_; }

 private:
  std::vector<std::set<std::string>> seen_;
  std::string last_;
};

std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file || std::filesystem::is_directory(path)) {
    const auto reason =
        file ? std::string("is a directory") : std::generic_category().message(errno);
    throw ScenarioError(fmt::format("scenario {}: cannot be read ({})", path.string(), reason));
  }
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

json parse_text(const std::string& text) {
  Keys keys;
  try {
    return json::parse(text, std::ref(keys));
  } catch (const json::parse_error& error) {
    const auto before = std::min<std::size_t>(error.byte > 0 ? error.byte - 1 : 0, text.size());
    const auto line = 1 + std::count(text.begin(), text.begin() + before, '\n');
    const auto newline = before == 0 ? std::string::npos : text.rfind('\n', before - 1);
    const auto column = before - (newline == std::string::npos ? 0 : newline + 1) + 1;
    throw ScenarioError(
        fmt::format("line {}, column {}: not valid JSON: {}", line, column, json_reason(error)));
  } catch (const json::exception& error) {  // a number that is too large; this error has no place
    throw ScenarioError(keys.last().empty()
                            ? json_reason(error)
                            : fmt::format("field \"{}\": {}", keys.last(), json_reason(error)));
  }
}

// ---------------------------------------------------------------------------------------------
// Names

/// Shortest digits that read back as the same number, in letters, digits: 0.5 is 0p5, 1e-08 is
/// 1em08.
std::string spelled(double value) {
  std::string name;
  for (const char c : fmt::format("{}", value + 0.0)) {  // + 0.0: -0.0 equals 0.0
    if (c == '.') {
      name += 'p';
    } else if (c == '-') {
      name += 'm';
    } else if (c != '+') {
      name += c;
    }
  }
  return name;
}

std::string spelled(std::int64_t value) {
  return fmt::format("{}", value);
}
std::string spelled(int value) {
  return fmt::format("{}", value);
}

/// Underscores are doubled, because single ones stand between words of the variant.
std::string spelled(const std::string& value) {
  std::string name;
  for (const char c : value) {
    name.append(c == '_' ? 2 : 1, c);
  }
  return name;
}

std::string spelled(const std::vector<std::int64_t>& sizes) {
  return fmt::format("{}", fmt::join(sizes, "x"));
}

std::string spelled(bool value) {
  return value ? "" : "0";
}
std::string spelled(const std::vector<std::string>& quirks) {
  std::string name;
  for (const auto& quirk : in_order(quirks)) {
    name += "_" + spelled(quirk);
  }
  return name;
}

}  // namespace

const std::vector<std::string>& quirk_names() {
  static const std::vector<std::string> names = {
      "tied_inside", "tied_across", "twice",  "frozen_bias", "frozen_layer", "unused",
      "scalar",      "transposed",  "buffer", "tuple",       "two_forwards"};
  return names;
}

bool has_quirk(const Scenario& scenario, std::string_view name) {
  const auto& quirks = scenario.model.quirks;
  return std::find(quirks.begin(), quirks.end(), name) != quirks.end();
}

Layout layout_of(const Scenario& scenario) {
  const int replicas = scenario.strategy == "no_shard" ? scenario.world_size : scenario.replicas;
  return {replicas, scenario.world_size / replicas};
}

std::int64_t layers_per_segment(const Scenario& scenario) {
  const auto layers = scenario.model.layers;
  const auto segments = std::llround(std::sqrt(static_cast<double>(layers)));
  return (layers + segments - 1) / segments;
}

std::string parameter_dtype(const Scenario& scenario) {
  return scenario.precision.parameter.empty() ? scenario.dtype : scenario.precision.parameter;
}

std::string reduce_dtype(const Scenario& scenario) {
  return scenario.precision.reduce.empty() ? parameter_dtype(scenario) : scenario.precision.reduce;
}

// float16 overflows at 65504 and underflows below 2^-24, so that half of the division comes before
// the sum and half after it: the factor of PyTorch's FSDP, a power of two near the root of the
// world size (torch/distributed/fsdp/_common_utils.py, _get_gradient_predivide_factor).
DivideSpec divide_factors(const Scenario& scenario) {
  if (scenario.divide.post > 0) {
    return {scenario.divide.pre > 0 ? scenario.divide.pre : 1, scenario.divide.post};
  }
  const double world = scenario.world_size;
  double pre = 1;
  if (reduce_dtype(scenario) == "float16") {
    while (std::fmod(world, pre) == 0 && world / pre > pre) {
      pre *= 2;
    }
  }
  return {pre, world / pre};
}

void validate(const Scenario& scenario) {
  visit_fields(scenario, [](const Field& field, const auto& value, const auto& limits) {
    check(field.path, value, limits);
  });
  check_belongs(scenario);
  check_together(scenario);
}

std::string dotted_name(const Scenario& scenario) {
  std::string variant = fmt::format("{}_{}", scenario.strategy, scenario.wrap);
  // The others know synthetic data only, so that saying it would say nothing.
  if (scenario.model.kind == "transformer" && scenario.data.kind != DataSpec().kind) {
    variant += "_" + scenario.data.kind;
  }
  std::vector<std::string> defaults;
  std::vector<std::string> values;
  const auto spell_into = [](std::vector<std::string>& out) {
    return [&out](const Field& field, const auto& value, const auto&) {
      if constexpr (!std::is_same_v<decltype(value), const std::uint64_t&>) {
        if (!field.token.empty()) {
          out.push_back(std::string(field.token) + spelled(value));
        }
      }
    };
  };
  const Scenario default_scenario;
  visit_fields(default_scenario, spell_into(defaults));
  visit_fields(scenario, spell_into(values));
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i] != defaults[i]) {
      variant += "_" + values[i];
    }
  }
  return fmt::format("{}.{}.{}.w{}.{}", scenario.model.kind, scenario.optimizer.kind,
                     scenario.dtype, scenario.world_size, variant);
}

json to_json(const Scenario& scenario) {
  json root = {{"schema", kSchema}};
  visit_fields(scenario, [&root](const Field& field, const auto& value, const auto& limits) {
    const auto object = std::string(object_of(field.path));
    (object.empty() ? root : root[object])[std::string(leaf_of(field.path))] =
        written(value, limits);
  });
  return root;
}

Scenario scenario_from_json(const json& root) {
  refuse_unknown_fields(root, "");
  check_schema(root);
  for (const auto* object : kObjects) {
    if (root.contains(object)) {
      refuse_unknown_fields(root[object], object);
    }
  }
  Scenario scenario;
  visit_fields(scenario, [&root](const Field& field, auto& value, const auto& limits) {
    if (const json* found = find_field(root, field.path)) {
      read(field.path, *found, value, limits);
    }
  });
  validate(scenario);
  return scenario;
}

Scenario load_scenario(const std::filesystem::path& path) {
  const auto text = read_text(path);
  try {
    return scenario_from_json(parse_text(text));
  } catch (const ScenarioError& error) {
    throw ScenarioError(fmt::format("scenario {}: {}", path.string(), error.what()));
  }
}

}  // namespace shardproof
