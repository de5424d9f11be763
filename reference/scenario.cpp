#include "reference/scenario.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
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
struct Identifier {};  // a name that others may add to: a backend, a device
struct Sizes {
  std::size_t least_count;
  Whole each;
};
struct Anything {};

/// Calls visit(field, value, limits) for every field, in the order in which they are written.
/// `S` is Scenario or const Scenario.
template <typename S, typename Visitor>
void visit_fields(S& s, Visitor&& visit) {
  constexpr std::int64_t kMany = 1 << 20;
  visit(Field{"model.kind", "", ""}, s.model.kind, Choice{{"mlp", "transformer"}});
  visit(Field{"model.layers", "layers", "transformer"}, s.model.layers, Whole{1, 4096});
  visit(Field{"model.width", "width", "transformer"}, s.model.width, Whole{1, kMany});
  visit(Field{"model.heads", "heads", "transformer"}, s.model.heads, Whole{1, kMany});
  visit(Field{"model.context", "context", "transformer"}, s.model.context, Whole{1, kMany});
  visit(Field{"model.vocabulary", "vocabulary", "transformer"}, s.model.vocabulary,
        Whole{2, kMany});
  visit(Field{"model.sizes", "sizes", "mlp"}, s.model.sizes, Sizes{2, {1, kMany}});
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
  visit(Field{"strategy", "", ""}, s.strategy, Choice{{"full_shard"}});
  visit(Field{"wrap", "", ""}, s.wrap, Choice{{"layer", "model"}});
  visit(Field{"dtype", "", ""}, s.dtype, Choice{{"float32", "float64"}});
  visit(Field{"max_norm", "max_norm", ""}, s.max_norm, Real{0});
  visit(Field{"micro_batches", "micro_batches", ""}, s.micro_batches, Whole{1, kMany});
  visit(Field{"batch", "batch", ""}, s.batch, Whole{1, kMany});
  visit(Field{"steps", "steps", ""}, s.steps, Whole{1, 1'000'000'000});
  visit(Field{"backend", "backend_", ""}, s.backend, Identifier{});
  visit(Field{"device", "device_", ""}, s.device, Identifier{});
}

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

void check_together(const Scenario& scenario) {
  const auto& model = scenario.model;
  if (model.kind == "transformer" && model.width % model.heads != 0) {
    refuse("model.heads", fmt::format("{}", model.heads),
           fmt::format("a divisor of model.width, which is {}", model.width));
  }
  if (scenario.data.kind == "bytes") {
    if (model.kind != "transformer") {
      refuse("data.kind", "\"bytes\"",
             fmt::format("\"synthetic\", because model.kind is \"{}\"", model.kind));
    }
    if (model.vocabulary < 256) {
      refuse("model.vocabulary", fmt::format("{}", model.vocabulary),
             "at least 256, because data.kind is \"bytes\"");
    }
  }
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

std::vector<std::string> known_paths() {
  std::vector<std::string> paths = {"schema", "model", "data", "optimizer"};
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

/// Sees the keys of a JSON text as they are parsed, remembers the last one, and throws at one that an object has twice, of
/// which the parser would silently keep the last.
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

}  // namespace

void validate(const Scenario& scenario) {
  visit_fields(scenario, [](const Field& field, const auto& value, const auto& limits) {
    check(field.path, value, limits);
  });
  check_belongs(scenario);
  check_together(scenario);
}

std::string dotted_name(const Scenario& scenario) {
  std::string variant = fmt::format("{}_{}", scenario.strategy, scenario.wrap);
  // The mlp knows synthetic data only, so that saying it would say nothing.
  if (scenario.model.kind == "transformer" && scenario.data.kind != DataSpec().kind) {
    variant += "_" + scenario.data.kind;
  }
  std::vector<std::string> defaults;
  std::vector<std::string> values;
  const auto spell_into = [](std::vector<std::string>& out) {
    return [&out](const Field& field, const auto& value, const auto&) {
      if constexpr (!std::is_same_v<decltype(value), const std::vector<std::string>&> &&
                    !std::is_same_v<decltype(value), const std::uint64_t&>) {
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
  visit_fields(scenario, [&root](const Field& field, const auto& value, const auto&) {
    const auto object = std::string(object_of(field.path));
    (object.empty() ? root : root[object])[std::string(leaf_of(field.path))] = value;
  });
  return root;
}

Scenario scenario_from_json(const json& root) {
  refuse_unknown_fields(root, "");
  check_schema(root);
  for (const auto* object : {"model", "data", "optimizer"}) {
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
