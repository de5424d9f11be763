// The reference itself: scenarios, data, models, traces and the single-device trainer, held to
// closed forms, to training loops and formulas written out here, and to numbers computed by another
// program.

#include "reference/trainer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/CPUGeneratorImpl.h>
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <regex>
#include <set>

#include "conformance/suites/temporary_folder.h"
#include "conformance/suites/written_out.h"

namespace shardproof {
namespace {

using namespace written_out;
using nlohmann::json;
using testing::HasSubstr;

// ---------------------------------------------------------------------------------------------
// Helpers

void expect_equal_to_the_bit(const StepTrace& got, const StepTrace& want) {
  ASSERT_EQ(got.tensors.size(), want.tensors.size());
  for (std::size_t i = 0; i < got.tensors.size(); ++i) {
    const auto& a = got.tensors[i];
    const auto& b = want.tensors[i];
    ASSERT_EQ(a.quantity, b.quantity);
    ASSERT_EQ(a.name, b.name);
    ASSERT_EQ(a.pieces.size(), b.pieces.size());
    for (std::size_t j = 0; j < a.pieces.size(); ++j) {
      EXPECT_TRUE(equal_to_the_bit(a.pieces[j].values, b.pieces[j].values))
          << to_string(a.quantity) << " " << a.name << " rank " << a.pieces[j].rank;
    }
  }
}

/// Gradients of loss / divisor.
Tensors gradients_of(const Tensors& values, const Scenario& scenario, const Batch& batch,
                     int divisor, const Dropout& dropout = no_dropout) {
  const auto weights = leaves(values);
  auto loss = loss_of(weights, scenario, batch, dropout);
  if (divisor != 1) {
    loss = loss / divisor;
  }
  loss.backward();
  Tensors result;
  for (const auto& [name, weight] : weights) {
    result[name] = weight.grad();
  }
  return result;
}

std::vector<std::string> parameter_names(const Scenario& scenario) {
  return make_model(scenario)->named_parameters().keys();
}

// ---------------------------------------------------------------------------------------------
// Scenario

TEST(Scenario, DefaultsAreValidAndSurviveJson) {
  const Scenario defaults;
  EXPECT_NO_THROW(validate(defaults));
  EXPECT_EQ(scenario_from_json(json::object()), defaults);
  EXPECT_EQ(scenario_from_json(to_json(defaults)), defaults);
  EXPECT_EQ(to_json(defaults).at("schema"), "shardproof.scenario/1");
}

TEST(Scenario, NamesAreWhatTheDocumentationShows) {
  Scenario scenario;
  EXPECT_EQ(dotted_name(scenario), "transformer.adamw.float32.w4.full_shard_layer");
  scenario.model.layers = 2;
  scenario.optimizer.lr = 0.5;
  scenario.optimizer.eps = 1e-10;
  scenario.backend = "nccl";
  EXPECT_EQ(dotted_name(scenario),
            "transformer.adamw.float32.w4.full_shard_layer_layers2_lr0p5_eps1em10_backend_nccl");
  EXPECT_EQ(dotted_name(small_mlp()),
            "mlp.adamw.float32.w3.full_shard_layer_sizes6x10x4_micro_batches2");
}

/// A valid scenario with every field drawn anew now and then. Values are few, so that scenarios
/// often differ in one field only.
class RandomScenarios {
 public:
  Scenario draw() {
    Scenario s;
    s.model.kind = pick<std::string>({"mlp", "transformer", "quirks"});
    const bool is_transformer = s.model.kind == "transformer";
    s.data.kind = is_transformer ? pick<std::string>({"bytes", "synthetic"}) : "synthetic";
    if (s.model.kind == "mlp") {
      s.model.sizes = pick<std::vector<std::int64_t>>(
          {{16, 32, 32, 8}, {1, 1}, {11, 1}, {1, 11}, {1, 1, 1}, {16, 32}});
    } else if (s.model.kind == "quirks") {
      s.model.depth = pick<std::int64_t>({3, 4});
      s.model.quirk_width = pick<std::int64_t>({8, 1});
      for (const auto& quirk : quirk_names()) {
        if (pick<int>({0, 0, 1}) == 1) {
          s.model.quirks.push_back(quirk);
        }
      }
    } else {
      s.model.tied = pick<bool>({false, true});
      s.model.layers = pick<std::int64_t>({4, 1, 12});
      s.model.width = pick<std::int64_t>({256, 16, 24});
      s.model.heads = pick<std::int64_t>({8, 1, 2});
      s.model.context = pick<std::int64_t>({64, 1, 11});
      s.model.vocabulary = pick<std::int64_t>({256, 300});
    }
    if (s.model.kind != "quirks") {
      s.model.dropout = pick<double>({0, 0, 0.1, 0.5});
    }
    s.optimizer.kind = pick<std::string>({"adamw", "sgd"});
    s.optimizer.lr = number(1e-3);
    if (s.optimizer.kind == "sgd") {
      s.optimizer.momentum = number(0);
    } else {
      s.optimizer.beta1 = pick<double>({0.9, 0, 0.5});
      s.optimizer.beta2 = pick<double>({0.999, 0.9, 0.99});
      s.optimizer.eps = number(1e-8);
    }
    s.optimizer.weight_decay = number(0.01);
    s.seed = pick<std::uint64_t>({0, 1, std::numeric_limits<std::uint64_t>::max()});
    s.world_size = pick<int>({4, 1, 12, 512});
    s.wrap = pick<std::string>({"layer", "model"});
    s.dtype = dtype();
    s.max_norm = number(1);
    s.norm_type = pick<double>({2, 1, 2.5, std::numeric_limits<double>::infinity()});
    s.micro_batches = pick<int>({1, 2, 12});
    s.loss_scale = pick<double>({0, 0, 1, 1024});
    draw_sharding(s);
    draw_precision(s);
    s.batch = pick<std::int64_t>({4, 1, 2});
    s.steps = pick<int>({20, 2});
    // Names made to be mistaken for a field and its value.
    s.backend = pick<std::string>({"in_process", "mpi", "a", "a_device_b", "device", "steps2"});
    s.device = pick<std::string>({"cpu", "cuda", "b_device_c", "c", "device"});
    return s;
  }

 private:
  void draw_sharding(Scenario& s) {
    s.strategy = pick<std::string>(
        {"full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"});
    const bool is_hybrid = s.strategy.starts_with("hybrid");
    s.replicas = is_hybrid ? pick<int>({1, s.world_size}) : 1;
    if (s.micro_batches > 1) {
      s.accumulation = pick<std::string>({"each", "last", is_hybrid ? "last_all_reduce" : "last"});
    }
    s.divide.post = pick<double>({0, 0, 3, 0.5});
    s.divide.pre = s.divide.post > 0 ? pick<double>({0, 2}) : 0;
    s.schedule.reshard_after_forward = pick<int>({-1, 0, 1});
    s.schedule.forward_prefetch = pick<int>({0, 2});
    s.schedule.backward_prefetch = pick<std::string>({"pre", "post", "none"});
    s.schedule.limit_gathers = pick<int>({0, 2});
    s.construction = pick<std::string>({"plain", "meta", "sync"});
    s.checkpointing.layers = pick<std::string>({"none", "all", "alternate"});
    if (s.model.kind == "transformer" && pick<bool>({false, true})) {
      s.checkpointing.layers = "segments";
    }
    if (s.checkpointing.layers != "none") {
      s.checkpointing.early_stop = pick<bool>({false, true});
      const bool may_be_around = s.checkpointing.layers != "segments" && s.wrap == "layer";
      s.checkpointing.order = may_be_around ? pick<std::string>({"inside", "around"}) : "inside";
    }
  }
  void draw_precision(Scenario& s) {
    s.precision.parameter = pick<bool>({false, true}) ? dtype() : "";
    s.precision.reduce = pick<bool>({false, true}) ? dtype() : "";
    s.precision.output = pick<bool>({false, true}) ? dtype() : "";
    if (has_quirk(s, "buffer")) {
      s.precision.buffer = pick<bool>({false, true}) ? dtype() : "";
    }
    s.precision.exempt_norms =
        s.model.kind == "transformer" && parameter_dtype(s) != s.dtype && pick<bool>({false, true});
  }
  std::string dtype() { return pick<std::string>({"float32", "float64", "bfloat16", "float16"}); }
  template <typename T>
  T pick(const std::vector<T>& values) {
    return values[std::uniform_int_distribution<std::size_t>(0, values.size() - 1)(random_)];
  }
  /// Mostly a usual number, at times any finite one that is not negative.
  double number(double usual) {
    if (pick<int>({0, 0, 0, 1}) == 0) {
      return pick<double>({usual, usual, usual, 0.25, 1e-3, 1e16, 12.5});
    }
    const double any = std::fabs(std::bit_cast<double>(random_()));
    return std::isfinite(any) ? any : usual;
  }

  std::mt19937_64 random_{20240607};
};

TEST(Scenario, ValidScenariosThatDifferHaveDifferentNames) {
  RandomScenarios random;
  std::map<std::string, Scenario> seen;
  const std::regex form("[a-z0-9_]+\\.[a-z0-9_]+\\.[a-z0-9_]+\\.w[0-9]+\\.[a-z0-9_]+");
  for (int i = 0; i < 20000; ++i) {
    auto scenario = random.draw();
    ASSERT_NO_THROW(validate(scenario));
    const auto name = dotted_name(scenario);
    ASSERT_TRUE(std::regex_match(name, form)) << name;
    scenario.seed = 0;  // the name leaves it out
    const auto held = seen.emplace(name, scenario).first;
    ASSERT_EQ(held->second, scenario) << name << "\n"
                                      << to_json(held->second) << "\n"
                                      << to_json(scenario);
  }
  // Two scenarios that differ in the two free words only, where a careless name would join them
  // alike.
  Scenario one;
  one.backend = "a_device_b";
  one.device = "c";
  Scenario other;
  other.backend = "a";
  other.device = "b_device_c";
  EXPECT_NE(dotted_name(one), dotted_name(other));
  // And two numbers that are neighbours.
  one.optimizer.lr = 0.1;
  other = one;
  other.optimizer.lr = std::nextafter(0.1, 1);
  EXPECT_NE(dotted_name(one), dotted_name(other));
}

TEST(Scenario, ChangingAnyOneFieldChangesTheName) {
  // Every field of the JSON form but seed and corpus, with a value other than the default.
  const std::vector<std::pair<json, std::string>> changes = {
      {{{"layers", 3}}, "model"},
      {{{"width", 64}}, "model"},
      {{{"heads", 4}}, "model"},
      {{{"context", 9}}, "model"},
      {{{"vocabulary", 300}}, "model"},
      {{{"dropout", 0.1}}, "model"},
      {{{"tied", true}}, "model"},
      {{{"kind", "synthetic"}}, "data"},
      {{{"kind", "sgd"}}, "optimizer"},
      {{{"lr", 1e-4}}, "optimizer"},
      {{{"beta1", 0.8}}, "optimizer"},
      {{{"beta2", 0.9}}, "optimizer"},
      {{{"eps", 1e-6}}, "optimizer"},
      {{{"weight_decay", 0}}, "optimizer"},
      {{{"world_size", 5}}, ""},
      {{{"wrap", "model"}}, ""},
      {{{"dtype", "float64"}}, ""},
      {{{"max_norm", 0}}, ""},
      {{{"micro_batches", 2}}, ""},
      {{{"batch", 2}}, ""},
      {{{"steps", 2}}, ""},
      {{{"backend", "mpi"}}, ""},
      {{{"device", "cuda"}}, ""},
      {{{"dtype", "bfloat16"}}, ""},
      {{{"dtype", "float16"}}, ""},
      {{{"strategy", "shard_grad_op"}}, ""},
      {{{"strategy", "no_shard"}}, ""},
      {{{"strategy", "hybrid_shard"}}, ""},
      {{{"strategy", "hybrid_shard_zero2"}}, ""},
      {{{"strategy", "hybrid_shard"}, {"replicas", 2}}, ""},
      {{{"strategy", "hybrid_shard"}, {"replicas", 2}, {"micro_batches", 2}}, ""},
      {{{"strategy", "hybrid_shard"},
        {"replicas", 2},
        {"micro_batches", 2},
        {"accumulation", "last_all_reduce"}},
       ""},
      {{{"micro_batches", 2}, {"accumulation", "last"}}, ""},
      {{{"norm_type", 1}}, ""},
      {{{"norm_type", "inf"}}, ""},
      {{{"loss_scale", 8}}, ""},
      {{{"construction", "meta"}}, ""},
      {{{"construction", "sync"}}, ""},
      {{{"parameter", "bfloat16"}}, "precision"},
      {{{"parameter", "bfloat16"}, {"exempt_norms", true}}, "precision"},
      {{{"reduce", "bfloat16"}}, "precision"},
      {{{"output", "bfloat16"}}, "precision"},
      {{{"post", 4}}, "divide"},
      {{{"pre", 4}, {"post", 4}}, "divide"},
      {{{"reshard_after_forward", 0}}, "schedule"},
      {{{"reshard_after_forward", 1}}, "schedule"},
      {{{"reshard_after_forward", 2}}, "schedule"},
      {{{"forward_prefetch", 1}}, "schedule"},
      {{{"backward_prefetch", "none"}}, "schedule"},
      {{{"limit_gathers", 1}}, "schedule"},
      {{{"layers", "all"}}, "checkpointing"},
      {{{"layers", "alternate"}}, "checkpointing"},
      {{{"layers", "segments"}}, "checkpointing"},
      {{{"layers", "all"}, {"order", "around"}}, "checkpointing"},
      {{{"layers", "all"}, {"early_stop", false}}, "checkpointing"},
  };
  std::set<std::string> names = {dotted_name(Scenario())};
  for (const auto& [change, object] : changes) {
    const auto scenario = scenario_from_json(object.empty() ? change : json{{object, change}});
    EXPECT_TRUE(names.insert(dotted_name(scenario)).second) << change;
  }
  Scenario quirks;
  quirks.model.kind = "quirks";
  quirks.data.kind = "synthetic";
  EXPECT_TRUE(names.insert(dotted_name(quirks)).second);
  for (const auto& quirk : quirk_names()) {
    auto one = quirks;
    one.model.quirks = {quirk};
    EXPECT_TRUE(names.insert(dotted_name(one)).second) << quirk;
  }
  auto deep = quirks;
  deep.model.depth = 4;
  EXPECT_TRUE(names.insert(dotted_name(deep)).second);
  auto wide = quirks;
  wide.model.quirk_width = 9;
  EXPECT_TRUE(names.insert(dotted_name(wide)).second);
  auto buffers = quirks;
  buffers.model.quirks = {"buffer"};
  buffers.precision.buffer = "float32";
  EXPECT_TRUE(names.insert(dotted_name(buffers)).second);

  Scenario sgd;
  sgd.optimizer.kind = "sgd";
  auto momentum = sgd;
  momentum.optimizer.momentum = 0.9;
  EXPECT_NE(dotted_name(sgd), dotted_name(momentum));
  auto seed = sgd;
  seed.seed = 3;
  seed.data.corpus = {"elsewhere"};
  EXPECT_EQ(dotted_name(sgd), dotted_name(seed));
}

TEST(Scenario, SurvivesJsonWhateverItsValues) {
  RandomScenarios random;
  for (int i = 0; i < 2000; ++i) {
    const auto scenario = random.draw();
    // Through text too: numbers must read back as the same ones.
    ASSERT_EQ(scenario_from_json(json::parse(to_json(scenario).dump())), scenario);
  }
}

TEST(Scenario, QuirksStandInTheirOwnOrder) {
  const auto scenario = scenario_from_json(json::parse(
      R"({"model": {"kind": "quirks", "quirks": ["tuple", "twice", "scalar"]},
          "data": {"kind": "synthetic"}, "norm_type": "inf"})"));
  EXPECT_THAT(scenario.model.quirks, testing::ElementsAre("twice", "scalar", "tuple"));
  EXPECT_TRUE(std::isinf(scenario.norm_type));
  EXPECT_EQ(to_json(scenario).at("norm_type"), "inf");
  auto shuffled = scenario;
  shuffled.model.quirks = {"tuple", "scalar", "twice"};
  EXPECT_NO_THROW(validate(shuffled));
  EXPECT_EQ(to_json(shuffled), to_json(scenario));
  EXPECT_EQ(dotted_name(shuffled), dotted_name(scenario));
  EXPECT_EQ(dotted_name(scenario),
            "quirks.adamw.float32.w4.full_shard_layer_quirks_twice_scalar_tuple_norm_typeinf");
  EXPECT_TRUE(has_quirk(scenario, "twice"));
  EXPECT_FALSE(has_quirk(scenario, "unused"));
}

struct Factors {
  int world_size;
  double pre;
  double post;
};

TEST(Scenario, Float16IsDividedBeforeAndAfterTheSum) {
  // As PyTorch's FSDP: powers of two that divide the world size, up to its root.
  for (const auto& want :
       {Factors{1, 1, 1}, Factors{2, 2, 1}, Factors{3, 2, 1.5}, Factors{4, 2, 2},
        Factors{6, 4, 1.5}, Factors{8, 4, 2}, Factors{64, 8, 8}, Factors{5, 2, 2.5}}) {
    Scenario scenario;
    scenario.world_size = want.world_size;
    EXPECT_EQ(divide_factors(scenario), (DivideSpec{1, static_cast<double>(want.world_size)}));
    scenario.precision.reduce = "float16";
    EXPECT_EQ(divide_factors(scenario), (DivideSpec{want.pre, want.post})) << want.world_size;
    scenario.divide.post = 3;
    EXPECT_EQ(divide_factors(scenario), (DivideSpec{1, 3}));
    scenario.divide.pre = 5;
    EXPECT_EQ(divide_factors(scenario), (DivideSpec{5, 3}));
  }
}

TEST(Scenario, LayoutAndDtypesFollowFromTheFields) {
  Scenario scenario;
  scenario.world_size = 6;
  EXPECT_EQ(layout_of(scenario).replicas, 1);
  EXPECT_EQ(layout_of(scenario).shards, 6);
  scenario.strategy = "no_shard";
  EXPECT_EQ(layout_of(scenario).replicas, 6);
  EXPECT_EQ(layout_of(scenario).shards, 1);
  scenario.strategy = "hybrid_shard_zero2";
  scenario.replicas = 2;
  EXPECT_EQ(layout_of(scenario).replicas, 2);
  EXPECT_EQ(layout_of(scenario).shards, 3);
  EXPECT_EQ(parameter_dtype(scenario), "float32");
  EXPECT_EQ(reduce_dtype(scenario), "float32");
  scenario.precision.parameter = "bfloat16";
  EXPECT_EQ(parameter_dtype(scenario), "bfloat16");
  EXPECT_EQ(reduce_dtype(scenario), "bfloat16");
  scenario.precision.reduce = "float64";
  EXPECT_EQ(reduce_dtype(scenario), "float64");
}

struct BadScenario {
  std::string what;
  std::string text;
  std::vector<std::string> words;  // the message has all of them
};

TEST(Scenario, WhatCannotBeIsRefusedByName) {
  const std::vector<BadScenario> cases = {
      {"not an object", R"([1])", {"the scenario", "[1]", "object"}},
      {"unknown field", R"({"worldsize": 2})", {"worldsize", "\"world_size\""}},
      {"unknown nested field", R"({"model": {"layer": 2}})", {"model.layer\"", "\"model.layers\""}},
      {"field in the wrong object", R"({"lr": 1})", {"\"lr\"", "\"optimizer.lr\""}},
      {"dotted key", R"({"model.layers": 1})", {"model.layers", "model {"}},
      {"another version",
       R"({"schema": "shardproof.scenario/2"})",
       {"schema", "scenario/2", "scenario/1"}},
      {"version of the wrong type", R"({"schema": 1})", {"schema", "scenario/1"}},
      {"nested value is no object", R"({"optimizer": "adamw"})", {"optimizer", "object"}},
      {"null is no value", R"({"seed": null})", {"seed", "null", "integer"}},
      {"text for a number", R"({"steps": "3"})", {"steps", "\"3\"", "integer"}},
      {"not an integer", R"({"steps": 2.5})", {"steps", "2.5", "integer"}},
      {"integer with a point", R"({"batch": 4.0})", {"batch", "4.0", "integer"}},
      {"a truth value is no number",
       R"({"micro_batches": true})",
       {"micro_batches", "true", "integer"}},
      {"no ranks", R"({"world_size": 0})", {"world_size", "0", "1 to 512"}},
      {"too many ranks", R"({"world_size": 513})", {"world_size", "513", "1 to 512"}},
      {"more than an int holds", R"({"world_size": 4294967300})", {"world_size", "4294967300"}},
      {"more than 64 bits hold",
       R"({"steps": 18446744073709551615})",
       {"steps", "18446744073709551615"}},
      {"negative seed", R"({"seed": -1})", {"seed", "-1", "2^64"}},
      {"heads do not divide",
       R"({"model": {"width": 10, "heads": 3}})",
       {"model.heads", "3", "model.width", "10"}},
      {"no layers", R"({"model": {"layers": 0}})", {"model.layers", "0"}},
      {"dropout of 1", R"({"model": {"dropout": 1}})", {"model.dropout", "below 1"}},
      {"negative dropout", R"({"model": {"dropout": -0.1}})", {"model.dropout", "-0.1"}},
      {"number as text", R"({"optimizer": {"lr": "fast"}})", {"optimizer.lr", "fast", "number"}},
      {"negative rate", R"({"optimizer": {"lr": -1e-3}})", {"optimizer.lr", "-0.001"}},
      {"beta of 1", R"({"optimizer": {"beta2": 1.0}})", {"optimizer.beta2", "below 1"}},
      {"negative norm", R"({"max_norm": -1})", {"max_norm", "-1"}},
      {"unknown model",
       R"({"model": {"kind": "rnn"}})",
       {"model.kind", "rnn", "\"mlp\", \"transformer\""}},
      {"unknown dtype", R"({"dtype": "float8"})", {"dtype", "float8", "\"float32\""}},
      {"dtype that is not set", R"({"dtype": ""})", {"dtype is \"\"", "\"float32\""}},
      {"unknown strategy", R"({"strategy": "zero9"})", {"strategy", "zero9", "full_shard"}},
      {"unknown wrap", R"({"wrap": "all"})", {"wrap", "all", "\"layer\""}},
      {"upper case", R"({"backend": "NCCL"})", {"backend", "NCCL", "lower-case"}},
      {"device with an index", R"({"device": "cuda:0"})", {"device", "cuda:0", "lower-case"}},
      {"one size",
       R"({"model": {"kind": "mlp", "sizes": [4]}, "data": {"kind": "synthetic"}})",
       {"model.sizes", "1", "at least 2"}},
      {"size of zero",
       R"({"model": {"kind": "mlp", "sizes": [4, 0]}, "data": {"kind": "synthetic"}})",
       {"model.sizes[1]", "0"}},
      {"sizes are no list", R"({"model": {"sizes": 4}})", {"model.sizes", "4", "list"}},
      {"size is no integer", R"({"model": {"sizes": [4, "8"]}})", {"model.sizes[1]", "\"8\""}},
      {"sizes of a transformer",
       R"({"model": {"sizes": [4, 8]}})",
       {"model.sizes", "[4,8]", "mlp"}},
      {"layers of an mlp",
       R"({"model": {"kind": "mlp", "layers": 3}, "data": {"kind": "synthetic"}})",
       {"model.layers", "3", "transformer"}},
      {"momentum of adamw",
       R"({"optimizer": {"momentum": 0.9}})",
       {"optimizer.momentum", "0.9", "sgd"}},
      {"beta of sgd",
       R"({"optimizer": {"kind": "sgd", "beta1": 0.5}})",
       {"optimizer.beta1", "0.5", "adamw"}},
      {"bytes into an mlp", R"({"model": {"kind": "mlp"}})", {"data.kind", "synthetic", "mlp"}},
      {"bytes that are no token",
       R"({"model": {"vocabulary": 255}})",
       {"model.vocabulary", "255", "256"}},
      {"corpus that nobody reads",
       R"({"data": {"kind": "synthetic", "corpus": ["a"]}})",
       {"data.corpus", "bytes"}},
      {"replicas without a hybrid",
       R"({"replicas": 2})",
       {"replicas is 2", "full_shard", "hybrid"}},
      {"replicas of no_shard",
       R"({"strategy": "no_shard", "replicas": 4})",
       {"replicas is 4", "1", "no_shard"}},
      {"replicas that do not divide",
       R"({"strategy": "hybrid_shard", "replicas": 3})",
       {"replicas is 3", "divisor of world_size", "4"}},
      {"groups that do not divide",
       R"({"strategy": "hybrid_shard", "replicas": 2, "schedule": {"reshard_after_forward": 4}})",
       {"schedule.reshard_after_forward is 4", "divisor", "2"}},
      {"prefetch too far",
       R"({"schedule": {"forward_prefetch": 9}})",
       {"schedule.forward_prefetch", "9", "0 to 8"}},
      {"unknown parameter dtype",
       R"({"precision": {"parameter": "half"}})",
       {"precision.parameter", "half", "float16"}},
      {"no norm to exempt",
       R"({"model": {"kind": "mlp"}, "data": {"kind": "synthetic"},
           "precision": {"parameter": "bfloat16", "exempt_norms": true}})",
       {"precision.exempt_norms", "LayerNorm", "mlp"}},
      {"nothing to exempt from",
       R"({"precision": {"exempt_norms": true}})",
       {"precision.exempt_norms", "precision.parameter", "same as dtype"}},
      {"truth value as text",
       R"({"precision": {"exempt_norms": "yes"}})",
       {"precision.exempt_norms", "yes", "true or false"}},
      {"no buffer to cast",
       R"({"precision": {"buffer": "float32"}})",
       {"precision.buffer", "float32", "\"buffer\""}},
      {"accumulation of one micro-batch",
       R"({"accumulation": "last"})",
       {"accumulation is \"last\"", "\"each\"", "micro_batches is 1"}},
      {"one stage cannot wait",
       R"({"accumulation": "last_all_reduce", "micro_batches": 2})",
       {"accumulation is \"last_all_reduce\"", "\"last\"", "full_shard"}},
      {"division before only",
       R"({"divide": {"pre": 2}})",
       {"divide.post is 0", "divide.pre is 2"}},
      {"negative factor", R"({"divide": {"post": -2}})", {"divide.post", "-2"}},
      {"negative scale", R"({"loss_scale": -1})", {"loss_scale", "-1"}},
      {"scale that float32 does not hold",
       R"({"loss_scale": 1e39})",
       {"loss_scale is 1e+39", "float32"}},
      {"scale without a reciprocal", R"({"loss_scale": 1e-39})", {"loss_scale is 1e-39", "recip"}},
      {"norm of order zero",
       R"({"norm_type": 0})",
       {"norm_type is 0", "from 0.1 to 64", "\"inf\""}},
      {"norm of a large order", R"({"norm_type": 100})", {"norm_type is 100", "from 0.1 to 64"}},
      {"scale that float32 rounds", R"({"loss_scale": 3.3})", {"loss_scale is 3.3", "exactly"}},
      {"norm of another word", R"({"norm_type": "max"})", {"norm_type is \"max\"", "\"inf\""}},
      {"quirks of a transformer",
       R"({"model": {"quirks": ["twice"]}})",
       {"model.quirks", "twice", "\"quirks\""}},
      {"tied mlp",
       R"({"model": {"kind": "mlp", "tied": true}, "data": {"kind": "synthetic"}})",
       {"model.tied", "true", "transformer"}},
      {"unknown quirk",
       R"({"model": {"kind": "quirks", "quirks": ["twice", "odd"]}, "data": {"kind": "synthetic"}})",
       {"model.quirks[1]", "odd", "\"tied_inside\""}},
      {"quirk twice",
       R"({"model": {"kind": "quirks", "quirks": ["twice", "twice"]}, "data": {"kind": "synthetic"}})",
       {"model.quirks[1]", "\"twice\" once more", "at most once"}},
      {"quirk of a layer that is not there",
       R"({"model": {"kind": "quirks", "depth": 1, "quirks": ["frozen_layer"]},
           "data": {"kind": "synthetic"}})",
       {"model.depth is 1", "at least 2", "frozen_layer"}},
      {"a last layer both tied and frozen",
       R"({"model": {"kind": "quirks", "depth": 2, "quirks": ["frozen_layer", "tied_across"]},
           "data": {"kind": "synthetic"}})",
       {"model.depth is 2", "at least 3", "tied_across"}},
      {"dropout of quirks",
       R"({"model": {"kind": "quirks", "dropout": 0.5}, "data": {"kind": "synthetic"}})",
       {"model.dropout", "0.5", "quirks"}},
      {"bytes into quirks", R"({"model": {"kind": "quirks"}})", {"data.kind", "quirks"}},
      {"unknown field of precision",
       R"({"precision": {"param": "float32"}})",
       {"precision.param\"", "precision.parameter"}},
      {"corpus is one text", R"({"data": {"corpus": "a"}})", {"data.corpus", "list"}},
      {"corpus of numbers", R"({"data": {"corpus": ["a", 1]}})", {"data.corpus[1]", "string"}},
      {"corpus without a name", R"({"data": {"corpus": [""]}})", {"data.corpus[0]", "empty"}},
  };
  for (const auto& bad : cases) {
    const auto message =
        message_of<ScenarioError>([&bad] { scenario_from_json(json::parse(bad.text)); });
    for (const auto& word : bad.words) {
      EXPECT_THAT(message, HasSubstr(word)) << bad.what;
    }
  }
}

TEST(Scenario, NumbersThatAreNotFiniteAreRefused) {
  for (const double bad :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    const json object = {{"optimizer", {{"weight_decay", bad}}}};
    EXPECT_THAT(message_of<ScenarioError>([&] { scenario_from_json(object); }),
                HasSubstr("optimizer.weight_decay"));
    Scenario scenario;
    scenario.max_norm = bad;
    EXPECT_THAT(message_of<ScenarioError>([&] { validate(scenario); }), HasSubstr("max_norm"));
  }
  const json not_an_integer = {{"steps", std::numeric_limits<double>::quiet_NaN()}};
  EXPECT_THAT(message_of<ScenarioError>([&] { scenario_from_json(not_an_integer); }),
              HasSubstr("steps is nan"));
}

class ScenarioFile : public testing::Test {
 protected:
  std::filesystem::path write(const std::string& text) {
    const auto path = folder_.path() / "scenario.json";
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }
  std::string refusal(const std::string& text) {
    return message_of<ScenarioError>([&] { load_scenario(write(text)); });
  }
  TemporaryFolder folder_;
};

TEST_F(ScenarioFile, IsReadBackAsWritten) {
  EXPECT_EQ(load_scenario(write(to_json(small_mlp()).dump(2))), small_mlp());
}

TEST_F(ScenarioFile, MalformedTextIsRefusedWithLineAndColumn) {
  EXPECT_THAT(refusal("{\n  \"seed\": 1,\n  \"steps\" 2\n}"), HasSubstr("line 3, column 11:"));
  EXPECT_THAT(refusal("?"), HasSubstr("line 1, column 1:"));
  EXPECT_THAT(refusal("{\"seed\": NaN}"), HasSubstr("line 1, column 10:"));
  EXPECT_THAT(refusal("{\"seed\": 1"), HasSubstr("line 1, column 11:"));
  EXPECT_THAT(refusal(""), HasSubstr("line 1, column 1:"));
  EXPECT_THAT(refusal("{\"max_norm\": 1e999}"), HasSubstr("too large for a double"));
}

TEST_F(ScenarioFile, AFieldThatStandsTwiceIsRefused) {
  EXPECT_THAT(refusal(R"({"seed": 1, "model": {"layers": 1, "layers": 2}})"),
              HasSubstr("\"layers\" stands there twice"));
  // The same name in two objects is fine.
  EXPECT_NO_THROW(load_scenario(write(R"({"model": {"kind": "transformer"},
      "data": {"kind": "bytes"}, "optimizer": {"kind": "sgd"}})")));
}

TEST_F(ScenarioFile, EveryErrorNamesTheFile) {
  EXPECT_THAT(refusal("{"), HasSubstr("scenario.json"));
  EXPECT_THAT(refusal(R"({"steps": 0})"), HasSubstr("scenario.json"));
  const auto missing = folder_.path() / "none.json";
  EXPECT_THAT(message_of<ScenarioError>([&] { load_scenario(missing); }),
              testing::AllOf(HasSubstr("none.json"), HasSubstr("No such file")));
  EXPECT_THAT(message_of<ScenarioError>([&] { load_scenario(folder_.path()); }),
              HasSubstr("is a directory"));
}

class Schema : public testing::Test {
 protected:
  static json load() {
    // Relative to this file, so that it is the schema of these sources.
    const auto path =
        std::filesystem::path(__FILE__).parent_path() / "../../reference/scenario.schema.json";
    std::ifstream file(path);
    return json::parse(file);
  }
  /// A scenario of the right kinds for the field, with the field set to a value.
  static json with(const std::string& object, const std::string& name, const json& value) {
    json scenario = {{"data", {{"kind", "synthetic"}}}};
    if (name == "sizes") {
      scenario["model"]["kind"] = "mlp";
    } else if (name == "depth" || name == "quirk_width" || name == "quirks" || name == "buffer") {
      scenario["model"]["kind"] = "quirks";
      scenario["model"]["quirks"] = {"buffer"};
    } else if (name == "replicas") {
      scenario["strategy"] = "hybrid_shard";
      scenario["world_size"] = 512;
    } else if (name == "accumulation") {
      scenario["strategy"] = "hybrid_shard";
      scenario["micro_batches"] = 2;
    } else if (name == "reshard_after_forward") {
      scenario["world_size"] = 512;
    } else if (name == "momentum") {
      scenario["optimizer"]["kind"] = "sgd";
    } else if (name == "corpus") {
      scenario["data"]["kind"] = "bytes";
    }
    if (name == "width") {
      scenario["model"]["heads"] = 1;
    }
    (object.empty() ? scenario : scenario[object])[name] = value;
    return scenario;
  }
  /// Holds the program to the schema's limits of one field.
  static void compare_limits(const std::string& object, const std::string& name,
                             const json& property) {
    const auto accepts = [&](const json& value) {
      try {
        scenario_from_json(with(object, name, value));
        return true;
      } catch (const ScenarioError&) {
        return false;
      }
    };
    if (property.value("type", "") == "boolean") {
      EXPECT_TRUE(accepts(false)) << name;
      EXPECT_FALSE(accepts(0)) << name;
    }
    // It needs divide.post.
    if (name == "pre") {
      return;
    }
    if (property.contains("minimum")) {
      EXPECT_TRUE(accepts(property["minimum"])) << name;
      EXPECT_FALSE(accepts(property["minimum"].get<std::int64_t>() - 1)) << name;
    }
    if (property.contains("exclusiveMaximum")) {
      EXPECT_FALSE(accepts(property["exclusiveMaximum"])) << name;
      EXPECT_TRUE(accepts(std::nextafter(property["exclusiveMaximum"].get<double>(), 0))) << name;
    }
    // 2^64 is no integer to the parser, and heads must divide the width.
    if (property.contains("maximum") && name != "seed") {
      EXPECT_EQ(accepts(property["maximum"]), name != "heads") << name;
      EXPECT_FALSE(accepts(property["maximum"].get<std::int64_t>() + 1)) << name;
    }
    if (property.contains("enum")) {
      for (const auto& value : property["enum"]) {
        EXPECT_TRUE(accepts(value)) << name << " " << value;
      }
      EXPECT_FALSE(accepts("none_of_them")) << name;
    }
    if (property.contains("pattern")) {
      const std::regex pattern(property["pattern"].get<std::string>());
      for (const std::string word :
           {"a", "a1_b2", "a_1", "", "_a", "a_", "a__b", "1a", "A", "a-b"}) {
        EXPECT_EQ(accepts(word), std::regex_match(word, pattern)) << name << " " << word;
      }
    }
  }
};

TEST_F(Schema, HasTheFieldsDefaultsAndLimitsOfTheProgram) {
  const auto schema = load();
  const auto defaults = to_json(Scenario());
  const auto compare = [&](const std::string& object, const json& part, const json& values) {
    EXPECT_EQ(part.at("additionalProperties"), false);
    for (const auto& item : values.items()) {
      EXPECT_TRUE(part.at("properties").contains(item.key())) << object << " " << item.key();
    }
    for (const auto& item : part.at("properties").items()) {
      ASSERT_TRUE(values.contains(item.key())) << object << " " << item.key();
      EXPECT_FALSE(item.value().at("description").get<std::string>().empty()) << item.key();
      if (item.value().contains("properties")) {
        continue;
      }
      EXPECT_EQ(item.value().at("default"), values.at(item.key())) << object << " " << item.key();
      compare_limits(object, item.key(), item.value());
    }
  };
  EXPECT_EQ(
      schema.at("properties").at("model").at("properties").at("quirks").at("items").at("enum"),
      json(quirk_names()));
  compare("", schema, defaults);
  for (const auto* object : {"model", "data", "optimizer", "precision", "divide", "schedule"}) {
    compare(object, schema.at("properties").at(object), defaults.at(object));
  }
}

// ---------------------------------------------------------------------------------------------
// Data

TEST(Data, TheHashGivesKnownAnswers) {
  // The second and third are the first outputs of SplitMix64 with seeds 0 and 1, as published; the
  // others were computed in Python.
  EXPECT_EQ(hash_counters(1, {}), 0x5692161d100b05e5);
  EXPECT_EQ(hash_counters(0, {0}), 0xe220a8397b1dcdaf);
  EXPECT_EQ(hash_counters(0, {1}), 0x910a2dec89025cc1);
  EXPECT_EQ(hash_counters(42, {1, 2, 3, 4, 5}), 0x3afc98adb659db28);
  EXPECT_EQ(hash_counters(123456789, {2, 0, 0, 1, 7, 63}), 0x34d73414d8545d18);
  constexpr auto kLargest = std::numeric_limits<std::uint64_t>::max();
  EXPECT_EQ(hash_counters(kLargest, {kLargest}), 0x8b9045b13d695068);
}

TEST(Data, SyntheticTokensAreAsWrittenInTheSpecification) {
  auto scenario = small_transformer();
  scenario.seed = 7;
  scenario.model.vocabulary = 300;
  scenario.model.context = 5;
  const auto batch = Dataset(scenario).batch(/*step=*/5, /*micro_batch=*/0, /*rank=*/2);
  // Computed in Python: hash(7, 2, 5, 0, 2, 1, i) mod 300.
  EXPECT_TRUE(torch::equal(batch.input[1], torch::tensor({10, 271, 26, 24, 232}, torch::kInt64)));
  EXPECT_TRUE(torch::equal(batch.target[1], torch::tensor({271, 26, 24, 232, 258}, torch::kInt64)));
}

TEST(Data, SyntheticNumbersAreAsWrittenInTheSpecification) {
  auto scenario = small_mlp();
  scenario.seed = 7;
  scenario.model.sizes = {4, 3, 2};
  // Computed in Python from hash(7, 3 or 4, 2, 1, 3, 1, i).
  const auto input = torch::tensor({-0.533203125, -0.06640625, 0.6865234375, 0.0771484375});
  const auto target = torch::tensor({-0.9775390625, -0.546875});
  for (const auto* dtype : {"float32", "float64"}) {
    scenario.dtype = dtype;
    const auto batch = Dataset(scenario).batch(/*step=*/2, /*micro_batch=*/1, /*rank=*/3);
    EXPECT_EQ(batch.input.sizes(), at::IntArrayRef({4, 4}));
    EXPECT_EQ(batch.target.sizes(), at::IntArrayRef({4, 2}));
    EXPECT_TRUE(equal_to_the_bit(batch.input[1], input.to(batch.input.scalar_type()))) << dtype;
    EXPECT_TRUE(equal_to_the_bit(batch.target[1], target.to(batch.input.scalar_type()))) << dtype;
  }
}

TEST(Data, EverySampleOfARunIsAnother) {
  for (const auto& scenario : {small_transformer(), small_mlp()}) {
    const Dataset data(scenario);
    std::vector<Tensor> samples;
    for (int step = 0; step < 2; ++step) {
      for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
        for (int rank = 0; rank < 3; ++rank) {
          const auto batch = data.batch(step, micro_batch, rank);
          for (std::int64_t b = 0; b < scenario.batch; ++b) {
            samples.push_back(batch.input[b]);
          }
        }
      }
    }
    auto reseeded = scenario;
    reseeded.seed += 1;
    samples.push_back(Dataset(reseeded).batch(0, 0, 0).input[0]);
    for (std::size_t i = 0; i < samples.size(); ++i) {
      for (std::size_t j = 0; j < i; ++j) {
        EXPECT_FALSE(torch::equal(samples[i], samples[j])) << i << " " << j;
      }
    }
  }
}

TEST(Data, TheWholeBatchGoesMicroBatchByMicroBatchAndRankByRank) {
  for (const auto& scenario : {small_transformer(), small_mlp()}) {
    const Dataset data(scenario);
    const auto whole = data.whole_batch(4);
    ASSERT_EQ(whole.input.size(0), scenario.batch * scenario.micro_batches * 3);
    std::int64_t start = 0;
    for (int micro_batch = 0; micro_batch < scenario.micro_batches; ++micro_batch) {
      for (int rank = 0; rank < 3; ++rank) {
        const auto part = data.batch(4, micro_batch, rank);
        const auto end = start + scenario.batch;
        EXPECT_TRUE(torch::equal(whole.input.slice(0, start, end), part.input));
        EXPECT_TRUE(torch::equal(whole.target.slice(0, start, end), part.target));
        start = end;
      }
    }
  }
}

class Corpus : public testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& bytes) {
    const auto path = folder_.path() / name;
    std::ofstream(path, std::ios::binary) << bytes;
    return path.string();
  }
  static Scenario scenario(std::vector<std::string> files) {
    auto result = small_transformer();
    result.data.kind = "bytes";
    result.data.corpus = std::move(files);
    result.model.vocabulary = 256;
    result.seed = 7;
    return result;
  }
  TemporaryFolder folder_;
};

TEST_F(Corpus, SamplesAreWindowsOfTheJoinedFiles) {
  std::string bytes;
  for (int i = 0; i < 1000; ++i) {
    bytes += static_cast<char>(hash_counters(3, {static_cast<std::uint64_t>(i)}) % 256);
  }
  const Dataset data(
      scenario({write("one", bytes.substr(0, 300)), write("two", bytes.substr(300))}));
  EXPECT_EQ(data.corpus_bytes(), 1000U);
  const auto batch = data.batch(/*step=*/5, /*micro_batch=*/0, /*rank=*/2);
  const std::int64_t start = 254;  // computed in Python: hash(7, 1, 5, 0, 2, 1) mod (1000 - 8)
  for (std::int64_t i = 0; i < 8; ++i) {
    const auto at = [&](std::int64_t j) {
      return static_cast<std::int64_t>(
          static_cast<unsigned char>(bytes[static_cast<std::size_t>(start + j)]));
    };
    EXPECT_EQ(batch.input[1][i].item<std::int64_t>(), at(i));
    EXPECT_EQ(batch.target[1][i].item<std::int64_t>(), at(i + 1));
  }
}

TEST_F(Corpus, OneByteMoreThanTheContextIsEnough) {
  const auto batch = Dataset(scenario({write("nine", "abcdefghi")})).batch(0, 0, 0);
  EXPECT_EQ(batch.input[0][0].item<std::int64_t>(), 'a');
  EXPECT_EQ(batch.target[1][7].item<std::int64_t>(), 'i');
  EXPECT_THAT(
      message_of<ScenarioError>([&] { Dataset too_short(scenario({write("eight", "abcdefgh")})); }),
      testing::AllOf(HasSubstr("8 bytes"), HasSubstr("more than model.context")));
}

TEST_F(Corpus, FilesThatCannotBeReadAreNamed) {
  EXPECT_THAT(message_of<ScenarioError>([&] { Dataset none(scenario({})); }),
              HasSubstr("data.corpus names no file"));
  const auto good = write("good", std::string(100, 'a'));
  EXPECT_THAT(message_of<ScenarioError>([&] {
                Dataset missing(scenario({good, folder_.path() / "gone"}));
              }),
              testing::AllOf(HasSubstr("gone"), HasSubstr("No such file")));
  EXPECT_THAT(message_of<ScenarioError>([&] { Dataset folder(scenario({folder_.path()})); }),
              HasSubstr("is a directory"));
}

// ---------------------------------------------------------------------------------------------
// Models

std::int64_t count_parameters(const Model& model) {
  std::int64_t count = 0;
  for (const auto& parameter : model->parameters()) {
    count += parameter.numel();
  }
  return count;
}

TEST(Models, TheDefaultTransformerHasOverThreeMillionParameters) {
  // Per block: norms 4w, qkv 3w(w+1), output w(w+1), up 4w(w+1), down w(4w+1); besides: (vocabulary
  // + context + vocabulary) w + 2w.
  const std::int64_t w = 256;
  const std::int64_t block =
      4 * w + 3 * w * (w + 1) + w * (w + 1) + 4 * w * (w + 1) + w * (4 * w + 1);
  const std::int64_t whole = 4 * block + (256 + 64 + 256) * w + 2 * w;
  EXPECT_EQ(count_parameters(make_model(Scenario())), whole);
  EXPECT_GT(whole, 3'000'000);
}

TEST(Models, ParametersHaveTheNamesAndOrderOfTheSpecification) {
  auto scenario = small_transformer();
  scenario.model.layers = 1;
  EXPECT_THAT(parameter_names(scenario),
              testing::ElementsAre(
                  "token_embedding.weight", "position_embedding.weight", "blocks.0.norm1.weight",
                  "blocks.0.norm1.bias", "blocks.0.attention.qkv.weight",
                  "blocks.0.attention.qkv.bias", "blocks.0.attention.output.weight",
                  "blocks.0.attention.output.bias", "blocks.0.norm2.weight", "blocks.0.norm2.bias",
                  "blocks.0.mlp.up.weight", "blocks.0.mlp.up.bias", "blocks.0.mlp.down.weight",
                  "blocks.0.mlp.down.bias", "norm.weight", "norm.bias", "head.weight"));
  EXPECT_THAT(parameter_names(small_mlp()),
              testing::ElementsAre("layers.0.linear.weight", "layers.0.linear.bias",
                                   "layers.1.linear.weight", "layers.1.linear.bias"));
}

TEST(Models, LayersAreNamedModulesThatHaveHooks) {
  for (const auto& scenario : {small_transformer(), small_mlp()}) {
    const auto model = make_model(scenario);
    const auto modules = model->named_modules();
    const auto layers = model->layers();
    ASSERT_EQ(layers.size(), 2U);
    for (const auto& layer : layers) {
      EXPECT_EQ(modules[layer.name].get(), layer.module.get());
      EXPECT_NE(dynamic_cast<fsdp::HookableModule*>(layer.module.get()), nullptr) << layer.name;
    }
  }
}

TEST(Models, ComputeWhatTheSpecificationSays) {
  for (auto scenario : {small_transformer(), small_mlp()}) {
    for (const auto* dtype : {"float32", "float64"}) {
      scenario.dtype = dtype;
      auto model = make_model(scenario);
      const auto weights = initial_parameters(scenario);
      load_parameters(*model, weights);
      const auto batch = Dataset(scenario).batch(0, 0, 0);
      const auto output = model(batch.input);
      EXPECT_TRUE(
          equal_to_the_bit(model->loss(output, batch.target), loss_of(weights, scenario, batch)));
    }
  }
}

TEST(Models, AttentionSeesEarlierTokensAndNoLaterOnes) {
  const auto scenario = small_transformer();
  auto model = make_model(scenario);
  load_parameters(*model, initial_parameters(scenario));
  const auto input = Dataset(scenario).batch(0, 0, 0).input;
  const torch::NoGradGuard no_grad;
  const auto before = model(input);
  ASSERT_TRUE(before.isfinite().all().item<bool>());
  for (std::int64_t changed = 0; changed < scenario.model.context; ++changed) {
    auto other = input.clone();
    other.select(1, changed).add_(1).remainder_(scenario.model.vocabulary);
    const auto after = model(other);
    for (std::int64_t i = 0; i < scenario.model.context; ++i) {
      EXPECT_EQ(same_bits(before.select(1, i), after.select(1, i)), i < changed)
          << "token " << changed << " changed, output " << i;
    }
  }
}

TEST(Models, InitialWeightsDependOnModelSeedAndDtypeOnly) {
  auto scenario = small_transformer();
  const auto weights = initial_parameters(scenario);
  scenario.world_size = 7;
  scenario.batch = 9;
  for (const auto& [name, value] : initial_parameters(scenario)) {
    EXPECT_TRUE(equal_to_the_bit(value, weights.at(name))) << name;
  }
  scenario.dtype = "float64";
  for (const auto& [name, value] : initial_parameters(scenario)) {
    EXPECT_EQ(value.scalar_type(), torch::kFloat64);
    EXPECT_TRUE(equal_to_the_bit(value.to(torch::kFloat32), weights.at(name))) << name;
  }
  scenario.seed += 1;
  for (const auto& [name, value] : initial_parameters(scenario)) {
    EXPECT_FALSE(same_bits(value.to(torch::kFloat32), weights.at(name))) << name;
  }
}

TEST(Models, InitialWeightsAreSpreadAsDocumented) {
  const auto weights = initial_parameters(Scenario());
  const auto expect = [&weights](const std::string& name, double mean, double deviation) {
    const auto value = weights.at(name).to(torch::kFloat64);
    // Five standard errors of a mean and of a deviation.
    const double allowed = 5 * deviation / std::sqrt(static_cast<double>(value.numel()));
    EXPECT_NEAR(value.mean().item<double>(), mean, allowed) << name;
    EXPECT_NEAR(value.std().item<double>(), deviation, allowed) << name;
  };
  expect("token_embedding.weight", 0, 0.02);
  expect("blocks.1.attention.qkv.weight", 0, 1.0 / 16);
  expect("blocks.1.mlp.down.weight", 0, 1.0 / 32);
  expect("blocks.1.mlp.down.bias", 0, 0.02);
  expect("blocks.1.norm2.weight", 1, 0.02);
  expect("norm.bias", 0, 0.02);
  expect("head.weight", 0, 1.0 / 16);
}

TEST(Models, WeightsThatDoNotFitAreRefusedByNameAndChangeNothing) {
  const auto scenario = small_mlp();
  auto model = make_model(scenario);
  const auto good = initial_parameters(scenario);
  load_parameters(*model, good);
  const std::string name = "layers.1.linear.bias";
  const auto refusal = [&](const std::function<void(Tensors&)>& spoil) {
    auto bad = good;
    bad["layers.0.linear.weight"] = torch::zeros_like(good.at("layers.0.linear.weight"));
    spoil(bad);
    return message_of<ScenarioError>([&] { load_parameters(*model, bad); });
  };
  EXPECT_THAT(refusal([&](Tensors& bad) { bad.erase(name); }), HasSubstr(name));
  EXPECT_THAT(refusal([&](Tensors& bad) { bad["stranger"] = torch::zeros({1}); }),
              testing::AllOf(HasSubstr("stranger"), HasSubstr(name)));
  EXPECT_THAT(refusal([&](Tensors& bad) { bad[name] = torch::zeros({5}); }),
              testing::AllOf(HasSubstr(name), HasSubstr("[5]"), HasSubstr("[4]")));
  EXPECT_THAT(refusal([&](Tensors& bad) { bad[name] = torch::zeros({4}, torch::kFloat64); }),
              testing::AllOf(HasSubstr(name), HasSubstr("Double"), HasSubstr("Float")));
  EXPECT_THAT(refusal([&](Tensors& bad) {
                bad[name] = torch::tensor({0.F, NAN, INFINITY, 0.F});
              }),
              testing::AllOf(HasSubstr(name), HasSubstr("2 values"), HasSubstr("finite")));
  for (const auto& parameter : model->named_parameters()) {
    EXPECT_TRUE(equal_to_the_bit(parameter.value().detach(), good.at(parameter.key())));
  }
}

TEST(Models, OutputsAreRecordedInExecutionOrderAndInGradModeOnly) {
  const auto scenario = small_transformer();
  auto model = make_model(scenario);
  load_parameters(*model, initial_parameters(scenario));
  std::vector<std::pair<std::string, Tensor>> seen;
  record_outputs(model, [&seen](const std::string& name, const Tensor& output) {
    seen.emplace_back(name, output);
  });
  const auto input = Dataset(scenario).batch(0, 0, 0).input;
  {
    const torch::NoGradGuard no_grad;
    model(input);
  }
  EXPECT_TRUE(seen.empty());
  const auto output = model(input);
  ASSERT_EQ(seen.size(), 3U);
  EXPECT_EQ(seen[0].first, "blocks.0");
  EXPECT_EQ(seen[1].first, "blocks.1");
  EXPECT_EQ(seen[2].first, "model");
  EXPECT_EQ(seen[1].second.sizes(), at::IntArrayRef({2, 8, 16}));
  EXPECT_TRUE(equal_to_the_bit(seen[2].second, output));
}

// ---------------------------------------------------------------------------------------------
// Trace

TraceTensor sharded(std::vector<std::pair<std::int64_t, std::int64_t>> runs) {
  TraceTensor tensor;
  tensor.quantity = Quantity::gradient;
  tensor.name = "layer.weight";
  tensor.shape = {2, 5};
  tensor.placement = Placement::sharded;
  const auto all = torch::arange(20, torch::kFloat32);
  for (std::size_t rank = 0; rank < runs.size(); ++rank) {
    const auto [begin, end] = runs[rank];
    tensor.pieces.push_back({static_cast<int>(rank), begin, all.slice(0, begin, end)});
  }
  return tensor;
}

TEST(Trace, EveryQuantityHasANameThatReadsBack) {
  for (const auto quantity : {Quantity::output, Quantity::loss, Quantity::mean_loss,
                              Quantity::gradient, Quantity::total_norm, Quantity::clipped_gradient,
                              Quantity::parameter, Quantity::optimizer_state}) {
    EXPECT_EQ(quantity_from_string(to_string(quantity)), quantity);
  }
  EXPECT_EQ(to_string(Quantity::clipped_gradient), "clipped_gradient");
  EXPECT_EQ(to_string(Quantity::optimizer_state), "optimizer_state");
  EXPECT_THAT(message_of<std::invalid_argument>([] { quantity_from_string("gradients"); }),
              testing::AllOf(HasSubstr("gradients"), HasSubstr("clipped_gradient")));
}

TEST(Trace, FindsByQuantityAndName) {
  StepTrace trace;
  trace.tensors = {sharded({{0, 10}}), sharded({{0, 10}})};
  trace.tensors[1].quantity = Quantity::parameter;
  EXPECT_EQ(trace.find(Quantity::parameter, "layer.weight"), &trace.tensors[1]);
  EXPECT_EQ(trace.find(Quantity::parameter, "layer.bias"), nullptr);
  EXPECT_EQ(trace.find(Quantity::loss, "layer.weight"), nullptr);
}

TEST(Trace, ShardsAreJoinedWhereverTheirPlaceAndHoweverEmpty) {
  const auto want = torch::arange(10, torch::kFloat32).reshape({2, 5});
  EXPECT_TRUE(equal_to_the_bit(assemble(sharded({{0, 4}, {4, 8}, {8, 10}})), want));
  EXPECT_TRUE(equal_to_the_bit(assemble(sharded({{6, 10}, {0, 6}})), want));
  EXPECT_TRUE(equal_to_the_bit(assemble(sharded({{0, 0}, {0, 10}, {10, 10}, {3, 3}})), want));
  auto empty = sharded({{0, 0}, {0, 0}});
  empty.shape = {0, 5};
  EXPECT_EQ(assemble(empty).sizes(), at::IntArrayRef({0, 5}));
  auto scalar = sharded({{0, 0}, {0, 1}});
  scalar.shape = {};
  EXPECT_EQ(assemble(scalar).dim(), 0);
}

TEST(Trace, ReplicatedAndSingleTensorsAreTakenAsTheyAre) {
  auto tensor = sharded({});
  tensor.placement = Placement::replicated;
  tensor.pieces = {{0, 0, torch::ones({2, 5})}, {1, 0, torch::zeros({2, 5})}};
  EXPECT_TRUE(equal_to_the_bit(assemble(tensor), torch::ones({2, 5})));
  tensor.placement = Placement::single;
  tensor.pieces = {{kNoRank, 0, torch::ones({2, 5})}};
  EXPECT_TRUE(equal_to_the_bit(assemble(tensor), torch::ones({2, 5})));
}

TEST(Trace, TensorsThatContradictThemselvesAreRefusedWithThePlace) {
  const auto refusal = [](const TraceTensor& tensor) {
    const auto message = message_of<TraceError>([&tensor] { assemble(tensor); });
    EXPECT_THAT(message, HasSubstr("gradient \"layer.weight\" of shape [2, 5]"));
    return message;
  };
  EXPECT_THAT(refusal(sharded({{0, 4}, {5, 10}})),
              HasSubstr("no rank holds elements [4, 5), between rank 0 and rank 1"));
  EXPECT_THAT(refusal(sharded({{1, 10}})), HasSubstr("[0, 1), between the beginning and rank 0"));
  EXPECT_THAT(refusal(sharded({{0, 4}, {4, 9}})), HasSubstr("[9, 10), between rank 1 and the end"));
  EXPECT_THAT(refusal(sharded({{0, 0}})), HasSubstr("[0, 10)"));
  EXPECT_THAT(refusal(sharded({{0, 6}, {4, 10}})),
              HasSubstr("elements [4, 6) are held by both rank 0 and rank 1"));
  EXPECT_THAT(refusal(sharded({{0, 4}, {4, 12}})),
              HasSubstr("rank 1 holds elements [4, 12), but there are 10"));

  auto missing_rank = sharded({{0, 4}, {4, 10}});
  missing_rank.pieces[1].rank = 2;
  EXPECT_THAT(refusal(missing_rank), HasSubstr("rank 1 is missing"));
  auto wrong_dtype = sharded({{0, 4}, {4, 10}});
  wrong_dtype.pieces[1].values = wrong_dtype.pieces[1].values.to(torch::kFloat64);
  EXPECT_THAT(refusal(wrong_dtype), HasSubstr("rank 1 has dtype Double, but rank 0 has Float"));
  auto not_flat = sharded({{0, 10}});
  not_flat.pieces[0].values = not_flat.pieces[0].values.reshape({2, 5});
  EXPECT_THAT(refusal(not_flat), HasSubstr("rank 0 has 2 dimensions"));
  auto undefined = sharded({{0, 4}, {4, 10}});
  undefined.pieces[1].values = Tensor();
  EXPECT_THAT(refusal(undefined), HasSubstr("rank 1 holds no tensor"));
  EXPECT_THAT(refusal(sharded({})), HasSubstr("no pieces"));

  auto whole = sharded({});
  whole.placement = Placement::replicated;
  whole.pieces = {{0, 0, torch::ones({2, 5})}, {1, 0, torch::ones({5, 2})}};
  EXPECT_THAT(refusal(whole), HasSubstr("rank 1 holds a tensor of shape [5, 2]"));
  whole.placement = Placement::single;
  EXPECT_THAT(refusal(whole), HasSubstr("2 pieces"));
  whole.placement = Placement::per_rank;
  EXPECT_THAT(refusal(whole), HasSubstr("each rank has a value of its own"));
}

TEST(Trace, TheStateAfterAStepIsItsParametersAndOptimizerState) {
  StepTrace trace;
  trace.step = 6;
  trace.tensors = {sharded({{0, 10}}), sharded({{0, 3}, {3, 10}}), sharded({{0, 10}})};
  trace.tensors[1].quantity = Quantity::parameter;
  trace.tensors[2].quantity = Quantity::optimizer_state;
  trace.tensors[2].name = "exp_avg/layer.weight";
  const auto state = state_after(trace);
  EXPECT_EQ(state.steps_done, 7);
  ASSERT_EQ(state.parameters.size(), 1U);
  EXPECT_EQ(state.parameters.at("layer.weight").sizes(), at::IntArrayRef({2, 5}));
  ASSERT_EQ(state.optimizer_state.size(), 1U);
  EXPECT_EQ(state.optimizer_state.count("exp_avg/layer.weight"), 1U);
  EXPECT_EQ(state.optimizer_steps(), 7);
  EXPECT_EQ(state_after(trace, 2).steps_done, 7);
  EXPECT_EQ(state_after(trace, 2).optimizer_steps(), 5);
  EXPECT_FALSE(has_non_finite_gradient(trace));
  trace.tensors[1].pieces[1].values = torch::full({7}, INFINITY);
  EXPECT_FALSE(has_non_finite_gradient(trace));  // that is a parameter
  trace.tensors[0].pieces[0].values = torch::full({10}, NAN);
  EXPECT_TRUE(has_non_finite_gradient(trace));
}

TEST(Trace, ReplicasOfAShardStandOnce) {
  const auto want = torch::arange(10, torch::kFloat32).reshape({2, 5});
  auto twice = sharded({{0, 4}, {4, 10}, {0, 4}, {4, 10}});
  twice.pieces[2].values = torch::full({4}, -1.0F);  // the first replica is taken
  EXPECT_TRUE(equal_to_the_bit(assemble(twice), want));
}

// ---------------------------------------------------------------------------------------------
// Norm

/// Numbers that Python makes too: spread over `spread` powers of two.
std::vector<double> scattered(std::uint64_t kind, int count, std::uint64_t spread) {
  std::vector<double> values;
  for (int i = 0; i < count; ++i) {
    const auto at = static_cast<std::uint64_t>(i);
    const auto mantissa = static_cast<double>((hash_counters(9, {kind, at}) >> 11) + 1);
    const auto exponent =
        static_cast<int>(hash_counters(9, {kind, at, 1}) % spread) - static_cast<int>(spread / 2);
    values.push_back(std::ldexp(mantissa, exponent - 53));
  }
  return values;
}

double norm_of(const std::vector<double>& values) {
  return exact_norm({torch::tensor(values, torch::kFloat64)}).item<double>();
}

TEST(Norm, EqualsTheExactSumRoundedOnce) {
  // math.sqrt(float(sum of Fraction(x)**2)) in Python. A float64 sum in order differs in the last
  // digits of all but the last.
  EXPECT_EQ(norm_of(scattered(0, 1000, 1)), 0x1.1d264cf081e0bp+4);
  EXPECT_EQ(norm_of(scattered(1, 1000, 40)), 0x1.b8cb067aa3c97p+20);
  EXPECT_EQ(norm_of(scattered(2, 1000, 120)), 0x1.35dd291ea6b9dp+60);
  EXPECT_EQ(norm_of(scattered(3, 300, 900)), 0x1.010d40a8a1be0p+446);
}

TEST(Norm, OfFloat32IsRoundedToFloat32AtTheEnd) {
  // math.sqrt(math.fsum(x * x)), the x rounded to float32 first, so that their squares are exact;
  // then rounded to float32.
  const std::vector<std::tuple<std::uint64_t, std::uint64_t, double, double>> cases = {
      {4, 1, 0x1.1f262b3c98db5p+4, 0x1.1f262cp+4},
      {5, 40, 0x1.cb80bea16d27bp+20, 0x1.cb80bep+20},
      {6, 100, 0x1.201e3b6a0fc62p+50, 0x1.201e3cp+50}};
  for (const auto& [kind, spread, wide, narrow] : cases) {
    const auto values =
        torch::tensor(scattered(kind, 1000, spread), torch::kFloat64).to(torch::kFloat32);
    const auto norm = exact_norm({values});
    EXPECT_EQ(norm.scalar_type(), torch::kFloat32);
    EXPECT_EQ(norm.dim(), 0);
    EXPECT_EQ(norm.item<float>(), static_cast<float>(narrow));
    EXPECT_EQ(exact_norm({values.to(torch::kFloat64)}).item<double>(), wide);
  }
}

TEST(Norm, KeepsWhatAFloatingPointSumLoses) {
  // 1e16 + 1000 ones: each one is lost when added to 1e16 alone, and the exact sum is 1e16 + 1000.
  std::vector<double> values(1001, 1.0);
  values[0] = 1e8;
  EXPECT_EQ(norm_of(values), std::sqrt(1e16 + 1000));
  EXPECT_NE(norm_of(values), 1e8);
}

TEST(Norm, RoundsTheSumToNearestAndTiesToEven) {
  // 2^55 + 4k, k odd, lies halfway between two float64 numbers, which are 8 apart there. Which of
  // the two was taken shows in the root.
  const auto with_twos = [](std::size_t k, double more) {
    std::vector<double> values(k, 2.0);
    values.insert(values.end(), {std::ldexp(1, 27), std::ldexp(1, 27), more});
    return norm_of(values);
  };
  EXPECT_EQ(with_twos(3, 0), std::sqrt(std::ldexp(1, 55) + 16));
  EXPECT_NE(with_twos(3, 0), std::sqrt(std::ldexp(1, 55) + 8));
  EXPECT_EQ(with_twos(5, 0), std::sqrt(std::ldexp(1, 55) + 16));
  EXPECT_EQ(with_twos(5, 1e-150), std::sqrt(std::ldexp(1, 55) + 24));  // a little more than half
  EXPECT_NE(with_twos(5, 0), with_twos(5, 1e-150));
}

TEST(Norm, DoesNotDependOnOrderOrGrouping) {
  auto values = scattered(2, 1000, 120);
  const auto want = norm_of(values);
  std::mt19937 random(1);
  for (int i = 0; i < 20; ++i) {
    std::shuffle(values.begin(), values.end(), random);
    EXPECT_EQ(norm_of(values), want);
  }
  const auto all = torch::tensor(values, torch::kFloat64);
  EXPECT_EQ(exact_norm({all.slice(0, 0, 0), all.slice(0, 0, 7), all.slice(0, 7).reshape({3, 331})})
                .item<double>(),
            want);
  EXPECT_EQ(exact_norm({all.reshape({2, 500}).t()}).item<double>(), want);
}

TEST(Norm, HoldsAtTheEndsOfTheRange) {
  // From Python's fractions: sums that are subnormal, where digits end at 2^-1074.
  EXPECT_EQ(norm_of({3e-162, 1e-162}), 0x1.6a09e667f3bcdp-537);
  EXPECT_EQ(norm_of({0x1.8p-530, 0x1p-531, 0x1p-537}), 0x1.94c6c77e5a533p-530);
  // 2^-1060 + 2^-1074 + a little less than half of 2^-1074: rounding to 53 digits first would make
  // it a half, and round up.
  EXPECT_EQ(norm_of({0x1p-530, 0x1p-537, 0x1.6a09e667f3bccp-538}), 0x1.0001fffe0004p-530);
  EXPECT_EQ(norm_of({std::numeric_limits<double>::denorm_min()}), 0);
  EXPECT_EQ(norm_of(std::vector<double>(3, 0x1.0000000000001p-500)), 0x1.bb67ae8584cacp-500);
  EXPECT_EQ(norm_of({1e154, 1e153}), 0x1.7fc5899cb7693p+511);
  EXPECT_EQ(norm_of({1.3e154, 1.3e154}), std::numeric_limits<double>::infinity());
  EXPECT_EQ(norm_of({1e200, 1}), std::numeric_limits<double>::infinity());
  const auto largest = std::numeric_limits<double>::max();
  EXPECT_EQ(norm_of({largest, largest}), std::numeric_limits<double>::infinity());
  // The smallest and the largest float32 are ordinary numbers here.
  const auto smallest = torch::full({4}, std::numeric_limits<float>::denorm_min());
  EXPECT_EQ(exact_norm({smallest}).item<float>(), 2 * std::numeric_limits<float>::denorm_min());
  EXPECT_EQ(exact_norm({torch::full({1}, std::numeric_limits<float>::max())}).item<float>(),
            std::numeric_limits<float>::max());
}

TEST(Norm, OfOtherOrdersSumsTheExactPowers) {
  // From Python: math.pow(math.fsum(math.pow(x, p)), 1 / p). Sums in order differ in the last
  // digits.
  const auto norm = [](std::uint64_t kind, int count, std::uint64_t spread, double p) {
    auto values = scattered(kind, count, spread);
    for (std::size_t i = 0; i < values.size(); i += 2) {
      values[i] = -values[i];  // signs do not count
    }
    return exact_norm({torch::tensor(values, torch::kFloat64)}, p).item<double>();
  };
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(norm(1, 1000, 40, 1), 0x1.a21e1e8e7cc6bp+23);
  EXPECT_EQ(norm(1, 1000, 40, 2), 0x1.b8cb067aa3c97p+20);
  EXPECT_EQ(norm(1, 1000, 40, 3), 0x1.f9f52cc58a378p+19);
  EXPECT_EQ(norm(1, 1000, 40, 2.5), 0x1.3879c8037db22p+20);
  EXPECT_EQ(norm(1, 1000, 40, 0.5), 0x1.9d45eb5e5d4f1p+30);
  EXPECT_EQ(norm(1, 1000, 40, infinity), 0x1.f45188843fa4ep+18);
  EXPECT_EQ(norm(3, 300, 900, 1), 0x1.7d9de35945519p+446);
  EXPECT_EQ(norm(3, 300, 900, 0.5), 0x1.213de5e5b3a3ep+448);
  EXPECT_EQ(norm(3, 300, 900, 3), infinity);  // a power above the range of float64
  EXPECT_EQ(norm(3, 300, 900, infinity), 0x1.930f60f75f002p+445);
}

TEST(Norm, OfEveryOrderIsRoundedToEachDtypeOnce) {
  // Sums in extended precision: far closer than a rounding of 24 or fewer bits.
  for (const auto dtype : {torch::kFloat32, torch::kBFloat16, torch::kFloat16}) {
    const auto values =
        (torch::tensor(scattered(4, 1000, 6), torch::kFloat64) - 0.5).to(dtype).reshape({50, 20});
    for (const double p : {1.0, 2.0, 3.0, 2.5}) {
      long double sum = 0;
      for (const auto& row : values.unbind()) {
        for (std::int64_t i = 0; i < row.numel(); ++i) {
          sum += std::pow(std::fabs(static_cast<long double>(row[i].item<double>())), p);
        }
      }
      const auto want = static_cast<double>(std::pow(sum, 1.0L / p));
      const auto got = exact_norm({values}, p);
      EXPECT_TRUE(equal_to_the_bit(got, torch::tensor(want, torch::kFloat64).to(dtype)))
          << "p " << p << " " << got.item<double>() << " " << want;
    }
    EXPECT_TRUE(equal_to_the_bit(exact_norm({values}, std::numeric_limits<double>::infinity()),
                                 values.abs().max()));
  }
}

TEST(Norm, IsNotRoundedTwiceOnTheWayTo16Bits) {
  // Sums (p = 1) at and a little above halfway between two numbers, by less than float32 sees.
  const auto sum = [](std::vector<double> values, torch::Dtype dtype) {
    return exact_norm({torch::tensor(values, torch::kFloat64).to(dtype)}, 1).item<double>();
  };
  EXPECT_EQ(sum({1, 0x1p-8}, torch::kBFloat16), 1);
  EXPECT_EQ(sum({1, 0x1p-8, 0x1p-40}, torch::kBFloat16), 1 + 0x1p-7);
  EXPECT_EQ(sum({1, 0x1.8p-7}, torch::kBFloat16), 1 + 0x1p-6);
  EXPECT_EQ(sum({1 + 0x1p-7, 0x1p-9, 0x1.fep-10, 0x1p-40}, torch::kBFloat16), 1 + 0x1p-7);
  EXPECT_EQ(sum({1, 0x1p-11}, torch::kFloat16), 1);
  EXPECT_EQ(sum({2048, 1}, torch::kFloat16), 2048);
  EXPECT_EQ(sum({2048, 1, 0x1p-24}, torch::kFloat16), 2050);
  EXPECT_EQ(sum({65504, 15.992}, torch::kFloat16), 65504);
  EXPECT_EQ(sum({65504, 16}, torch::kFloat16), std::numeric_limits<double>::infinity());
}

TEST(Norm, OfEveryOrderTellsWhatIsNotFinite) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double p : {0.5, 1.0, 2.0, 2.5, infinity}) {
    const auto norm = [p](const std::vector<double>& values) {
      return exact_norm({torch::tensor(values, torch::kFloat64)}, p).item<double>();
    };
    EXPECT_EQ(norm({1, -infinity, 2}), infinity) << p;
    EXPECT_TRUE(std::isnan(norm({infinity, NAN, 1}))) << p;
    EXPECT_TRUE(std::isnan(norm({1, NAN, 2}))) << p;
    EXPECT_EQ(norm({}), 0) << p;
    EXPECT_EQ(norm({0.0, -0.0}), 0) << p;
    EXPECT_EQ(norm({-4}), 4) << p;
  }
  for (const double p : {0.0, -1.0, static_cast<double>(NAN)}) {
    EXPECT_THAT(message_of<std::invalid_argument>([p] { exact_norm({torch::ones({1})}, p); }),
                HasSubstr("above 0"));
  }
}

TEST(Norm, TellsWhatIsNotFiniteAndWhatIsNotThere) {
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(norm_of({1, -infinity, 2}), infinity);
  EXPECT_TRUE(std::isnan(norm_of({1, infinity, NAN})));
  EXPECT_EQ(norm_of({}), 0);
  EXPECT_EQ(norm_of({0.0, -0.0}), 0);
  EXPECT_EQ(exact_norm({}).item<float>(), 0);
  EXPECT_EQ(exact_norm({torch::empty({0}, torch::kFloat64)}).scalar_type(), torch::kFloat64);
  EXPECT_THAT(message_of<std::invalid_argument>([] {
                exact_norm({torch::zeros({1}), torch::zeros({1}, torch::kFloat64)});
              }),
              HasSubstr("Float and Double"));
}

// ---------------------------------------------------------------------------------------------
// Reference

TEST(Reference, ReplayOfOneRankEqualsATrainingLoopWrittenOut) {
  auto scenario = small_transformer();
  scenario.world_size = 1;
  scenario.micro_batches = 1;
  scenario.max_norm = 1.0;
  const Dataset data(scenario);
  const auto names = parameter_names(scenario);
  const auto weights = leaves(initial_parameters(scenario));
  std::vector<Tensor> list;
  for (const auto& name : names) {
    list.push_back(weights.at(name));
  }
  torch::optim::AdamW optimizer(
      list, torch::optim::AdamWOptions(1e-3).betas({0.9, 0.999}).eps(1e-8).weight_decay(0.01));
  ReferenceTrainer trainer(scenario, ReferenceMode::replay, initial_parameters(scenario));
  bool clipped = false;

  for (int step = 0; step < 3; ++step) {
    const auto trace = trainer.step(step);
    optimizer.zero_grad();
    const auto loss = loss_of(weights, scenario, data.batch(step, 0, 0));
    loss.backward();
    EXPECT_TRUE(equal_to_the_bit(value_of(trace, Quantity::loss, "loss"), loss.detach().view(1)));
    double squares = 0;
    std::vector<Tensor> gradients;
    for (const auto& name : names) {
      const auto& gradient = weights.at(name).grad();
      EXPECT_TRUE(equal_to_the_bit(value_of(trace, Quantity::gradient, name), gradient)) << name;
      squares += gradient.to(torch::kFloat64).square().sum().item<double>();
      gradients.push_back(gradient);
    }
    const auto norm = exact_norm(gradients);
    EXPECT_NEAR(norm.item<float>(), std::sqrt(squares), 1e-6);
    EXPECT_TRUE(equal_to_the_bit(value_of(trace, Quantity::total_norm, "total_norm"), norm));
    const auto coefficient = (torch::full_like(norm, 1.0) / (norm + 1e-6)).clamp_max(1.0);
    clipped = clipped || coefficient.item<float>() < 1;
    for (auto& gradient : gradients) {
      gradient.mul_(coefficient);
    }
    optimizer.step();
    for (const auto& name : names) {
      EXPECT_TRUE(equal_to_the_bit(value_of(trace, Quantity::clipped_gradient, name),
                                   weights.at(name).grad()));
      EXPECT_TRUE(
          equal_to_the_bit(value_of(trace, Quantity::parameter, name), weights.at(name).detach()))
          << name << " step " << step;
    }
  }
  EXPECT_TRUE(clipped) << "the limit never bit, so clipping was not tested";
}

/// ((g_0 + g_1) + ...) / W for each micro-batch, added up, the ranks taken in `order`.
Tensors combined_gradients(const Scenario& scenario, const Tensors& weights, int step,
                           const std::vector<int>& order) {
  const Dataset data(scenario);
  Tensors total;
  for (int micro_batch = 0; micro_batch < scenario.micro_batches; ++micro_batch) {
    Tensors sum;
    for (const int rank : order) {
      const auto own = gradients_of(weights, scenario, data.batch(step, micro_batch, rank),
                                    scenario.micro_batches);
      for (const auto& [name, gradient] : own) {
        sum[name] = sum.count(name) == 0 ? gradient : sum[name] + gradient;
      }
    }
    for (const auto& [name, gradient] : sum) {
      const auto mean = gradient / static_cast<double>(scenario.world_size);
      total[name] = total.count(name) == 0 ? mean : total[name] + mean;
    }
  }
  return total;
}

TEST(Reference, ReplayAddsRanksInOrderDividesAndAddsMicroBatches) {
  for (const auto& scenario : {small_transformer(), small_mlp()}) {
    const auto weights = initial_parameters(scenario);
    const auto trace = ReferenceTrainer(scenario, ReferenceMode::replay, weights).step(0);
    const auto want = combined_gradients(scenario, weights, 0, {0, 1, 2});
    const auto reversed = combined_gradients(scenario, weights, 0, {2, 1, 0});
    bool order_matters = false;
    for (const auto& [name, gradient] : want) {
      EXPECT_TRUE(equal_to_the_bit(value_of(trace, Quantity::gradient, name), gradient)) << name;
      order_matters = order_matters || !same_bits(gradient, reversed.at(name));
    }
    EXPECT_TRUE(order_matters) << "no rounding differed, so the order was not tested";
  }
}

TEST(Reference, ReplayKeepsEachRanksLossOutputsAndMeanMagnitude) {
  const auto scenario = small_transformer();
  const auto weights = initial_parameters(scenario);
  const auto trace = ReferenceTrainer(scenario, ReferenceMode::replay, weights).step(1);
  const Dataset data(scenario);
  std::map<std::string, Tensor> magnitude;
  for (int rank = 0; rank < 3; ++rank) {
    const auto index = static_cast<std::size_t>(rank);
    for (int micro_batch = 0; micro_batch < scenario.micro_batches; ++micro_batch) {
      const auto batch = data.batch(1, micro_batch, rank);
      const auto loss = loss_of(weights, scenario, batch);
      const auto output = transformer(weights, scenario.model, batch.input, no_dropout);
      const auto* losses = trace.find(Quantity::loss, "loss");
      const auto* outputs = trace.find(Quantity::output, "model@m" + std::to_string(micro_batch));
      ASSERT_NE(losses, nullptr);
      ASSERT_NE(outputs, nullptr);
      EXPECT_EQ(losses->shape, std::vector<std::int64_t>{3});
      EXPECT_EQ(losses->pieces.at(index).rank, rank);
      EXPECT_EQ(outputs->pieces.at(index).rank, rank);
      EXPECT_TRUE(equal_to_the_bit(losses->pieces.at(index).values[micro_batch], loss));
      EXPECT_TRUE(equal_to_the_bit(outputs->pieces.at(index).values, output));
      for (const auto& [name, gradient] : gradients_of(weights, scenario, batch, 3)) {
        const auto part = gradient.abs() / 3;
        magnitude[name] = magnitude.count(name) == 0 ? part : magnitude[name] + part;
      }
    }
  }
  for (const auto& [name, value] : magnitude) {
    const auto* tensor = trace.find(Quantity::gradient, name);
    EXPECT_LT(relative_distance(tensor->magnitude, value), 1e-6) << name;
    EXPECT_TRUE(
        (tensor->magnitude * (1 + 1e-5) >= tensor->pieces[0].values.abs()).all().item<bool>());
  }
}

TEST(Reference, TracesAreInExecutionOrderAndStayAsTheyWere) {
  auto scenario = small_mlp();
  ReferenceTrainer trainer(scenario, ReferenceMode::replay, initial_parameters(scenario));
  const auto trace = trainer.step(0);
  std::vector<std::string> order;
  for (const auto& tensor : trace.tensors) {
    order.push_back(std::string(to_string(tensor.quantity)) + " " + tensor.name);
    const bool by_rank = tensor.quantity == Quantity::output || tensor.quantity == Quantity::loss;
    EXPECT_EQ(tensor.placement, by_rank ? Placement::per_rank : Placement::single);
    EXPECT_EQ(tensor.pieces.size(), by_rank ? 3U : 1U);
    EXPECT_EQ(tensor.pieces[0].rank, by_rank ? 0 : kNoRank);
    for (const auto& piece : tensor.pieces) {
      EXPECT_EQ(piece.values.sizes(), at::IntArrayRef(tensor.shape)) << order.back();
      EXPECT_FALSE(piece.values.requires_grad());
      EXPECT_TRUE(piece.values.is_contiguous());
    }
  }
  const std::string first = "layers.0.linear.";
  const std::string second = "layers.1.linear.";
  const std::vector<std::string> backward = {second + "bias", second + "weight", first + "bias",
                                             first + "weight"};
  std::vector<std::string> want = {"output layers.0@m0", "output layers.1@m0", "output model@m0",
                                   "output layers.0@m1", "output layers.1@m1", "output model@m1",
                                   "loss loss"};
  for (const auto& name : backward) {
    want.push_back("gradient " + name);
  }
  want.push_back("total_norm total_norm");
  for (const auto& name : backward) {
    want.push_back("clipped_gradient " + name);
  }
  for (auto name = backward.rbegin(); name != backward.rend(); ++name) {
    want.push_back("parameter " + *name);
  }
  for (auto name = backward.rbegin(); name != backward.rend(); ++name) {
    want.push_back("optimizer_state exp_avg/" + *name);
    want.push_back("optimizer_state exp_avg_sq/" + *name);
  }
  EXPECT_EQ(order, want);

  const auto kept = value_of(trace, Quantity::parameter, first + "weight").clone();
  const auto gradient = value_of(trace, Quantity::clipped_gradient, first + "weight").clone();
  trainer.step(1);
  EXPECT_TRUE(equal_to_the_bit(value_of(trace, Quantity::parameter, first + "weight"), kept));
  EXPECT_TRUE(
      equal_to_the_bit(value_of(trace, Quantity::clipped_gradient, first + "weight"), gradient));
}

TEST(Reference, TheWholeBatchEqualsReplayWithinRounding) {
  for (auto scenario : {small_transformer(), small_mlp()}) {
    for (const auto* dtype : {"float32", "float64"}) {
      scenario.dtype = dtype;
      const double allowed = scenario.dtype == "float32" ? 2e-6 : 2e-15;
      const auto weights = initial_parameters(scenario);
      const auto replay = ReferenceTrainer(scenario, ReferenceMode::replay, weights).step(0);
      const auto whole = ReferenceTrainer(scenario, ReferenceMode::whole, weights).step(0);
      double mean_loss = 0;
      for (const auto& piece : replay.find(Quantity::loss, "loss")->pieces) {
        mean_loss += piece.values.to(torch::kFloat64).mean().item<double>() / 3;
      }
      EXPECT_NEAR(value_of(whole, Quantity::mean_loss, "mean_loss").item<double>(), mean_loss,
                  allowed * mean_loss);
      EXPECT_EQ(value_of(whole, Quantity::mean_loss, "mean_loss").scalar_type(), torch::kFloat64);
      EXPECT_EQ(whole.find(Quantity::loss, "loss"), nullptr);
      EXPECT_EQ(whole.find(Quantity::output, "model@m0"), nullptr);
      for (const auto& name : parameter_names(scenario)) {
        EXPECT_LT(relative_distance(value_of(whole, Quantity::gradient, name),
                                    value_of(replay, Quantity::gradient, name)),
                  allowed)
            << name;
        EXPECT_FALSE(whole.find(Quantity::gradient, name)->magnitude.defined());
      }
    }
  }
}

TEST(Reference, Float64StartsFromTheSameWeightsAndDiffersByRounding) {
  const auto scenario = small_transformer();
  const auto weights = initial_parameters(scenario);
  const auto narrow = ReferenceTrainer(scenario, ReferenceMode::whole, weights).step(0);
  const auto wide = ReferenceTrainer(scenario, ReferenceMode::float64, weights).step(0);
  ASSERT_EQ(narrow.tensors.size(), wide.tensors.size());
  for (std::size_t i = 0; i < wide.tensors.size(); ++i) {
    const auto& name = wide.tensors[i].name;
    EXPECT_EQ(wide.tensors[i].pieces[0].values.scalar_type(), torch::kFloat64) << name;
    EXPECT_EQ(narrow.tensors[i].name, name);
  }
  for (const auto& name : parameter_names(scenario)) {
    const auto distance = relative_distance(value_of(narrow, Quantity::gradient, name),
                                            value_of(wide, Quantity::gradient, name));
    EXPECT_LT(distance, 2e-6) << name;
    EXPECT_GT(distance, 1e-9) << name;
  }
}

TEST(Reference, ALinearLayerHasTheGradientOfTheClosedForm) {
  // L = mean of (W x + b - t)^2 over B samples and outputs, averaged over ranks and micro-batches:
  // dL/dW = 2 / (B outputs W M) sum of (W x + b - t) x^T. Weights are made small multiples of 1/8
  // and counts powers of two, so that nothing is ever rounded.
  auto scenario = small_mlp();
  scenario.dtype = "float64";
  scenario.model.sizes = {3, 2};
  scenario.world_size = 4;
  Tensors weights = {{"layers.0.linear.weight",
                      torch::tensor({1, -2, 3, 4, -5, 6}, torch::kFloat64).view({2, 3}) / 8},
                     {"layers.0.linear.bias", torch::tensor({-1, 7}, torch::kFloat64) / 8}};
  const auto whole = Dataset(scenario).whole_batch(0);
  double weight[2][3] = {};
  double bias[2] = {};
  const auto samples = whole.input.size(0);
  for (std::int64_t s = 0; s < samples; ++s) {
    for (int o = 0; o < 2; ++o) {
      double error =
          weights["layers.0.linear.bias"][o].item<double>() - whole.target[s][o].item<double>();
      for (int i = 0; i < 3; ++i) {
        error += weights["layers.0.linear.weight"][o][i].item<double>() *
                 whole.input[s][i].item<double>();
      }
      const double factor = 2 * error / static_cast<double>(2 * samples);
      bias[o] += factor;
      for (int i = 0; i < 3; ++i) {
        weight[o][i] += factor * whole.input[s][i].item<double>();
      }
    }
  }
  for (const auto mode : {ReferenceMode::replay, ReferenceMode::whole, ReferenceMode::float64}) {
    const auto trace = ReferenceTrainer(scenario, mode, weights).step(0);
    for (int o = 0; o < 2; ++o) {
      EXPECT_EQ(value_of(trace, Quantity::gradient, "layers.0.linear.bias")[o].item<double>(),
                bias[o]);
      for (int i = 0; i < 3; ++i) {
        EXPECT_EQ(
            value_of(trace, Quantity::gradient, "layers.0.linear.weight")[o][i].item<double>(),
            weight[o][i])
            << to_string(mode);
      }
    }
  }
}

TEST(Reference, DropoutDrawsFromEachRanksOwnGeneratorSeededOnce) {
  for (auto scenario : {small_mlp(), small_transformer()}) {
    scenario.model.dropout = 0.25;
    scenario.optimizer.kind = "sgd";
    scenario.optimizer.lr = 0;  // the weights stay, so that only the masks change from step to step
    const auto weights = initial_parameters(scenario);
    ReferenceTrainer trainer(scenario, ReferenceMode::replay, weights);
    std::vector<at::Generator> generators;
    for (int rank = 0; rank < scenario.world_size; ++rank) {
      generators.push_back(
          at::detail::createCPUGenerator(scenario.seed + static_cast<std::uint64_t>(rank)));
    }
    const Dataset data(scenario);
    for (int step = 0; step < 2; ++step) {
      const auto trace = trainer.step(step);
      for (int micro_batch = 0; micro_batch < scenario.micro_batches; ++micro_batch) {
        for (int rank = 0; rank < scenario.world_size; ++rank) {
          const auto index = static_cast<std::size_t>(rank);
          const auto dropout = [&](const Tensor& x) {
            const auto mask = torch::empty_like(x).bernoulli_(0.75, generators[index]).div_(0.75);
            return x * mask;
          };
          const auto loss =
              loss_of(weights, scenario, data.batch(step, micro_batch, rank), dropout);
          EXPECT_TRUE(equal_to_the_bit(
              trace.find(Quantity::loss, "loss")->pieces[index].values[micro_batch], loss))
              << "step " << step << " micro-batch " << micro_batch << " rank " << rank;
        }
      }
    }
  }
}

struct Clipping {
  double max_norm;
  bool bites;
};

TEST(Reference, ClippingScalesEveryGradientByTheSameFactor) {
  for (const auto& [max_norm, bites] :
       {Clipping{0, false}, Clipping{1e-3, true}, Clipping{1e6, false}}) {
    auto scenario = small_transformer();
    scenario.max_norm = max_norm;
    const auto trace =
        ReferenceTrainer(scenario, ReferenceMode::replay, initial_parameters(scenario)).step(0);
    const auto norm = value_of(trace, Quantity::total_norm, "total_norm").item<float>();
    ASSERT_GT(norm, 1e-3);
    float factor = 1;
    if (bites) {
      factor = static_cast<float>(max_norm) / (norm + static_cast<float>(1e-6));
    }
    double squares = 0;
    for (const auto& name : parameter_names(scenario)) {
      const auto& clipped = value_of(trace, Quantity::clipped_gradient, name);
      const auto& gradient = value_of(trace, Quantity::gradient, name);
      EXPECT_TRUE(equal_to_the_bit(clipped, gradient * torch::tensor(factor))) << name;
      squares += clipped.to(torch::kFloat64).square().sum().item<double>();
    }
    EXPECT_NEAR(std::sqrt(squares), bites ? max_norm : norm, 1e-2 * (bites ? max_norm : norm));
  }
}

std::vector<OptimizerSpec> optimizers() {
  OptimizerSpec adamw;
  OptimizerSpec heavy = adamw;
  heavy.weight_decay = 0.3;
  heavy.beta1 = 0.7;
  heavy.beta2 = 0.95;
  heavy.lr = 0.02;
  OptimizerSpec no_decay = adamw;
  no_decay.weight_decay = 0;
  OptimizerSpec sgd;
  sgd.kind = "sgd";
  sgd.lr = 0.1;
  sgd.weight_decay = 0;
  OptimizerSpec decayed = sgd;
  decayed.weight_decay = 0.1;
  OptimizerSpec momentum = decayed;
  momentum.momentum = 0.9;
  return {adamw, heavy, no_decay, sgd, decayed, momentum};
}

TEST(Reference, OptimizersEqualTheirFormulasWrittenOut) {
  for (const auto& spec : optimizers()) {
    for (auto scenario : {small_mlp(), small_transformer()}) {
      scenario.optimizer = spec;
      auto parameters = initial_parameters(scenario);
      std::map<std::string, Tensors> states;
      ReferenceTrainer trainer(scenario, ReferenceMode::replay, parameters);
      const WrittenOut written_out(spec);
      for (int step = 0; step < 3; ++step) {
        const auto trace = trainer.step(step);
        std::size_t compared = 0;
        for (auto& [name, parameter] : parameters) {
          auto& state = states[name];
          written_out.step(step + 1, parameter, value_of(trace, Quantity::clipped_gradient, name),
                           state);
          EXPECT_TRUE(equal_to_the_bit(value_of(trace, Quantity::parameter, name), parameter))
              << dotted_name(scenario) << " " << name << " step " << step;
          for (const auto& [kind, value] : state) {
            EXPECT_TRUE(equal_to_the_bit(
                value_of(trace, Quantity::optimizer_state, kind + "/" + name), value))
                << dotted_name(scenario) << " " << kind << " " << name << " step " << step;
            ++compared;
          }
        }
        EXPECT_EQ(compared, state_after(trace).optimizer_state.size());
      }
    }
  }
}

TEST(Reference, AStepFromAnotherRunsStateEqualsTheRunThatWentOn) {
  for (const auto& spec : optimizers()) {
    for (const auto mode : {ReferenceMode::replay, ReferenceMode::whole}) {
      auto scenario = small_transformer();
      scenario.optimizer = spec;
      ReferenceTrainer unbroken(scenario, mode, initial_parameters(scenario));
      const auto start = TrainingState{0, initial_parameters(scenario), {}};
      const auto first = unbroken.step(0);
      const auto second = unbroken.step(1);
      const auto third = unbroken.step(2);

      auto elsewhere = scenario;
      elsewhere.seed += 1;
      ReferenceTrainer other(scenario, mode, initial_parameters(elsewhere));
      other.step(0);
      other.set_state(state_after(second));
      expect_equal_to_the_bit(other.step(2), third);
      other.set_state(start);  // back to before the first step: no optimizer state at all
      expect_equal_to_the_bit(other.step(0), first);
      other.set_state(state_after(first));
      expect_equal_to_the_bit(other.step(1), second);
    }
  }
}

TEST(Reference, SettingAStateCopiesItAndFloat64WidensIt) {
  const auto scenario = small_mlp();
  ReferenceTrainer replay(scenario, ReferenceMode::replay, initial_parameters(scenario));
  const auto state = state_after(replay.step(0));
  const auto kept = state.optimizer_state.at("exp_avg/layers.0.linear.bias").clone();
  ReferenceTrainer wide(scenario, ReferenceMode::float64, initial_parameters(scenario));
  wide.set_state(state);
  const auto trace = wide.step(1);
  replay.set_state(state);
  const auto narrow = replay.step(1);
  EXPECT_TRUE(equal_to_the_bit(state.optimizer_state.at("exp_avg/layers.0.linear.bias"), kept));
  for (const auto* name : {"layers.0.linear.weight", "layers.1.linear.bias"}) {
    EXPECT_LT(relative_distance(value_of(narrow, Quantity::parameter, name),
                                value_of(trace, Quantity::parameter, name)),
              1e-6);
  }
}

TEST(Reference, StatesThatDoNotFitAreRefusedByName) {
  const auto scenario = small_mlp();
  ReferenceTrainer trainer(scenario, ReferenceMode::replay, initial_parameters(scenario));
  const auto good = state_after(trainer.step(0));
  const std::string name = "exp_avg_sq/layers.1.linear.bias";
  auto missing = good;
  missing.optimizer_state.erase(name);
  EXPECT_THAT(message_of<TraceError>([&] { trainer.set_state(missing); }), HasSubstr(name));
  auto reshaped = good;
  reshaped.optimizer_state[name] = torch::zeros({2, 2});
  EXPECT_THAT(message_of<TraceError>([&] { trainer.set_state(reshaped); }),
              testing::AllOf(HasSubstr(name), HasSubstr("[2, 2]"), HasSubstr("[4]")));
  auto strange = good;
  strange.parameters["stranger"] = torch::zeros({1});
  EXPECT_THAT(message_of<ScenarioError>([&] { trainer.set_state(strange); }),
              HasSubstr("stranger"));
  auto device = scenario;
  device.device = "abacus";
  EXPECT_THAT(message_of<ScenarioError>([&] {
                ReferenceTrainer(device, ReferenceMode::replay, initial_parameters(scenario));
              }),
              HasSubstr("abacus"));
}

TEST(Reference, TwoRunsAreEqualToTheBit) {
  const auto scenario = small_transformer();
  for (const auto mode : {ReferenceMode::replay, ReferenceMode::whole, ReferenceMode::float64}) {
    ReferenceTrainer one(scenario, mode, initial_parameters(scenario));
    ReferenceTrainer other(scenario, mode, initial_parameters(scenario));
    for (int step = 0; step < 2; ++step) {
      expect_equal_to_the_bit(one.step(step), other.step(step));
    }
  }
}

TEST(Reference, TrainingLowersTheLoss) {
  auto scenario = small_mlp();
  scenario.optimizer.lr = 0.01;
  ReferenceTrainer trainer(scenario, ReferenceMode::whole, initial_parameters(scenario));
  const auto loss = [](const StepTrace& trace) {
    return value_of(trace, Quantity::mean_loss, "mean_loss").item<double>();
  };
  const auto first = loss(trainer.step(0));
  for (int i = 0; i < 50; ++i) {
    trainer.step(0);  // the same data every time
  }
  EXPECT_LT(loss(trainer.step(0)), 0.7 * first);
}

}  // namespace
}  // namespace shardproof
