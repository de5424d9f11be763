// Every feature with every other: a covering array. Each row is one scenario; every pair of levels
// of two different factors that can be combined stands in at least one row, and every row is held
// to the single-device replay bit for bit, over two micro-batches and two steps. The rows are the
// cases' names.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "conformance/suites/equal_to_one_device.h"
#include "reference/scenario.h"

namespace shardproof {
namespace {

struct Level {
  std::string name;
  std::function<void(Scenario&)> apply;
};
struct Factor {
  std::string name;
  std::vector<Level> levels;
};

Level layout(const std::string& name, const std::string& strategy, int world_size, int replicas) {
  return {name, [=](Scenario& s) {
            s.strategy = strategy;
            s.world_size = world_size;
            s.replicas = replicas;
          }};
}

Level quirk(const std::string& name) {
  return {name, [=](Scenario& s) {
            s.model = ModelSpec();
            s.model.kind = "quirks";
            s.model.quirks = {name};
          }};
}

void small_transformer(Scenario& s) {
  s.model = ModelSpec();
  s.model.layers = 2;
  s.model.width = 16;
  s.model.heads = 2;
  s.model.context = 6;
  s.model.vocabulary = 16;  // so that a loss in bfloat16 moves
}

const std::vector<Factor>& factors() {
  static const std::vector<Factor> all = {
      {"layout",
       {layout("w2", "full_shard", 2, 1), layout("w1", "full_shard", 1, 1),
        layout("w3", "full_shard", 3, 1), layout("w4", "full_shard", 4, 1),
        layout("w5", "full_shard", 5, 1), layout("w8", "full_shard", 8, 1),
        layout("grad_op_w3", "shard_grad_op", 3, 1), layout("no_shard_w2", "no_shard", 2, 1),
        layout("no_shard_w5", "no_shard", 5, 1), layout("hybrid_2x2", "hybrid_shard", 4, 2),
        layout("hybrid_2x4", "hybrid_shard", 8, 2), layout("hybrid_1x4", "hybrid_shard", 4, 1),
        layout("hybrid_4x1", "hybrid_shard", 4, 4), layout("hybrid_1x1", "hybrid_shard", 1, 1),
        layout("zero2_2x2", "hybrid_shard_zero2", 4, 2),
        layout("zero2_4x2", "hybrid_shard_zero2", 8, 4)}},
      {"model",
       {{"mlp",
         [](Scenario& s) {
           s.model = ModelSpec();
           s.model.kind = "mlp";
           s.model.sizes = {5, 7, 3};
         }},
        {"transformer", small_transformer},
        {"tied",
         [](Scenario& s) {
           small_transformer(s);
           s.model.tied = true;
         }},
        {"dropout",
         [](Scenario& s) {
           small_transformer(s);
           s.model.dropout = 0.25;
         }},
        quirk("tied_inside"),
        quirk("tied_across"),
        quirk("twice"),
        quirk("frozen_bias"),
        quirk("frozen_layer"),
        quirk("unused"),
        quirk("scalar"),
        quirk("transposed"),
        quirk("buffer"),
        quirk("tuple"),
        quirk("two_forwards"),
        {"many_quirks",
         [](Scenario& s) {
           s.model = ModelSpec();
           s.model.kind = "quirks";
           s.model.depth = 4;
           s.model.quirks = {"tied_across", "twice", "unused", "scalar", "buffer", "two_forwards"};
         }}}},
      {"precision",
       {{"float32", [](Scenario&) {}},
        {"float64", [](Scenario& s) { s.dtype = "float64"; }},
        {"bf16_reduce32",
         [](Scenario& s) {
           s.precision.parameter = "bfloat16";
           s.precision.reduce = "float32";
         }},
        {"bf16", [](Scenario& s) { s.precision.parameter = "bfloat16"; }},
        {"fp16_scaled",
         [](Scenario& s) {
           s.precision.parameter = "float16";
           s.loss_scale = 1024;
         }},
        {"bf16_output32",
         [](Scenario& s) {
           s.precision.parameter = "bfloat16";
           s.precision.output = "float32";
         }},
        {"buffers16",
         [](Scenario& s) {
           s.precision.parameter = "bfloat16";
           s.precision.buffer = "float16";
         }},
        {"norms_exempt",
         [](Scenario& s) {
           s.precision.parameter = "bfloat16";
           s.precision.exempt_norms = true;
         }}}},
      {"accumulation",
       {{"each", [](Scenario& s) { s.accumulation = "each"; }},
        {"last", [](Scenario& s) { s.accumulation = "last"; }},
        {"last_all_reduce", [](Scenario& s) { s.accumulation = "last_all_reduce"; }}}},
      {"optimizer",
       {{"sgd",
         [](Scenario& s) {
           s.optimizer.kind = "sgd";
           s.optimizer.momentum = 0.9;
           s.optimizer.lr = 20;  // gradients are clipped to 0.001
         }},
        {"adamw", [](Scenario& s) { s.optimizer.lr = 0.1; }}}},
      {"wrap",
       {{"layer", [](Scenario& s) { s.wrap = "layer"; }},
        {"model", [](Scenario& s) { s.wrap = "model"; }}}},
      {"reshard",
       {{"own", [](Scenario&) {}},
        {"never", [](Scenario& s) { s.schedule.reshard_after_forward = 0; }},
        {"always", [](Scenario& s) { s.schedule.reshard_after_forward = 1; }},
        {"pairs", [](Scenario& s) { s.schedule.reshard_after_forward = 2; }}}},
      {"prefetch",
       {{"pre", [](Scenario&) {}},
        {"none", [](Scenario& s) { s.schedule.backward_prefetch = "none"; }},
        {"post_and_2",
         [](Scenario& s) {
           s.schedule.backward_prefetch = "post";
           s.schedule.forward_prefetch = 2;
         }},
        {"limited",
         [](Scenario& s) {
           s.schedule.forward_prefetch = 3;
           s.schedule.limit_gathers = 1;
         }}}},
      {"checkpointing",
       {{"stored", [](Scenario&) {}},
        {"inside", [](Scenario& s) { s.checkpointing.layers = "all"; }},
        {"around",
         [](Scenario& s) {
           s.checkpointing.layers = "all";
           s.checkpointing.order = "around";
         }},
        {"alternate_to_the_end",
         [](Scenario& s) {
           s.checkpointing.layers = "alternate";
           s.checkpointing.early_stop = false;
         }},
        {"segments", [](Scenario& s) { s.checkpointing.layers = "segments"; }}}},
      {"construction",
       {{"plain", [](Scenario&) {}},
        {"meta", [](Scenario& s) { s.construction = "meta"; }},
        {"sync", [](Scenario& s) { s.construction = "sync"; }}}},
      {"norm",
       {{"p2", [](Scenario&) {}},
        {"p1", [](Scenario& s) { s.norm_type = 1; }},
        {"p3", [](Scenario& s) { s.norm_type = 3; }},
        {"pinf", [](Scenario& s) { s.norm_type = std::numeric_limits<double>::infinity(); }},
        {"unclipped",
         [](Scenario& s) {
           s.max_norm = 0;
           s.optimizer.lr = std::min(s.optimizer.lr, 0.1);
         }}}},
      {"divide",
       {{"by_ranks", [](Scenario&) {}},
        {"by_3_and_7",
         [](Scenario& s) {
           s.divide.pre = 3;
           s.divide.post = 7;
         }}}},
  };
  return all;
}

using Row = std::vector<std::size_t>;  // level by factor

Scenario scenario_of(const Row& row) {
  Scenario scenario;
  scenario.data.kind = "synthetic";
  scenario.batch = 2;
  scenario.micro_batches = 2;
  scenario.steps = 3;
  scenario.max_norm = 1e-3;
  for (std::size_t f = 0; f < row.size(); ++f) {
    factors()[f].levels[row[f]].apply(scenario);
  }
  return scenario;
}

bool is_possible(const Row& row) {
  try {
    validate(scenario_of(row));
    return true;
  } catch (const ScenarioError&) {
    return false;
  }
}

using Choice = std::pair<std::size_t, std::size_t>;  // factor, level
using Pair = std::pair<Choice, Choice>;

std::set<Pair> pairs_of(const Row& row) {
  std::set<Pair> pairs;
  for (std::size_t a = 0; a < row.size(); ++a) {
    for (std::size_t b = a + 1; b < row.size(); ++b) {
      pairs.insert({{a, row[a]}, {b, row[b]}});
    }
  }
  return pairs;
}

/// A row in which both choices stand and that is possible; empty if there is none. The other
/// factors have their first level, but for layout and model, which have the first levels that go
/// with the two.
Row row_with(const Pair& pair) {
  const auto levels = [&](std::size_t factor) -> std::size_t {
    const bool is_given = factor == pair.first.first || factor == pair.second.first;
    return is_given ? 1 : factors()[factor].levels.size();
  };
  for (std::size_t layout_level = 0; layout_level < levels(0); ++layout_level) {
    for (std::size_t model_level = 0; model_level < levels(1); ++model_level) {
      Row row(factors().size(), 0);
      row[0] = layout_level;
      row[1] = model_level;
      row[pair.first.first] = pair.first.second;
      row[pair.second.first] = pair.second.second;
      if (is_possible(row)) {
        return row;
      }
    }
  }
  return {};
}

std::vector<Pair> find_possible_pairs() {
  std::vector<Pair> pairs;
  for (std::size_t a = 0; a < factors().size(); ++a) {
    for (std::size_t b = a + 1; b < factors().size(); ++b) {
      for (std::size_t i = 0; i < factors()[a].levels.size(); ++i) {
        for (std::size_t j = 0; j < factors()[b].levels.size(); ++j) {
          const Pair pair{{a, i}, {b, j}};
          if (!row_with(pair).empty()) {
            pairs.push_back(pair);
          }
        }
      }
    }
  }
  return pairs;
}

const std::vector<Pair>& possible_pairs() {
  static const auto pairs = find_possible_pairs();
  return pairs;
}

/// Greedy: each row starts from a pair that no row has yet, and takes for every other factor the
/// level that covers the most.
std::vector<Row> covering_rows() {
  const auto& all = possible_pairs();
  std::set<Pair> missing(all.begin(), all.end());
  std::vector<Row> rows;
  for (const auto& pair : all) {
    if (!missing.contains(pair)) {
      continue;
    }
    auto row = row_with(pair);
    const auto gain = [&](const Row& candidate) {
      std::size_t covered = 0;
      for (const auto& each : pairs_of(candidate)) {
        covered += missing.count(each);
      }
      return covered;
    };
    for (std::size_t f = 0; f < row.size(); ++f) {
      if (f == pair.first.first || f == pair.second.first) {
        continue;
      }
      auto best = row;
      for (std::size_t level = 0; level < factors()[f].levels.size(); ++level) {
        auto candidate = row;
        candidate[f] = level;
        if (gain(candidate) > gain(best) && is_possible(candidate)) {
          best = candidate;
        }
      }
      row = best;
    }
    for (const auto& each : pairs_of(row)) {
      missing.erase(each);
    }
    rows.push_back(row);
  }
  return rows;
}

std::string name_of(const Row& row) {
  std::string name;
  for (std::size_t f = 0; f < row.size(); ++f) {
    name += (f == 0 ? "" : "__") + factors()[f].levels[row[f]].name;
  }
  return name;
}

const std::vector<Row>& rows() {
  static const std::vector<Row> all = covering_rows();
  return all;
}

TEST(CoveringArray, HasEveryPairThatIsPossible) {
  std::set<Pair> covered;
  for (const auto& row : rows()) {
    EXPECT_TRUE(is_possible(row)) << name_of(row);
    covered.merge(pairs_of(row));
  }
  const auto& possible = possible_pairs();
  for (const auto& pair : possible) {
    EXPECT_TRUE(covered.contains(pair))
        << factors()[pair.first.first].levels[pair.first.second].name << " with "
        << factors()[pair.second.first].levels[pair.second.second].name;
  }
  EXPECT_GT(possible.size(), 1000u);
}

TEST(CoveringArray, LeavesOutOnlyPairsThatContradictEachOther) {
  std::set<std::string> impossible;
  const auto& possible = possible_pairs();
  const std::set<Pair> known(possible.begin(), possible.end());
  for (std::size_t a = 0; a < factors().size(); ++a) {
    for (std::size_t b = a + 1; b < factors().size(); ++b) {
      for (std::size_t i = 0; i < factors()[a].levels.size(); ++i) {
        for (std::size_t j = 0; j < factors()[b].levels.size(); ++j) {
          if (!known.contains({{a, i}, {b, j}})) {
            impossible.insert(factors()[a].levels[i].name + " + " + factors()[b].levels[j].name);
          }
        }
      }
    }
  }
  // Groups of two ranks need an even number of shards; putting off the replicas needs replicas.
  std::set<std::string> expected;
  for (const auto& odd :
       {"w1", "w3", "w5", "grad_op_w3", "no_shard_w2", "no_shard_w5", "hybrid_4x1", "hybrid_1x1"}) {
    expected.insert(std::string(odd) + " + pairs");
  }
  for (const auto& flat :
       {"w2", "w1", "w3", "w4", "w5", "w8", "grad_op_w3", "no_shard_w2", "no_shard_w5"}) {
    expected.insert(std::string(flat) + " + last_all_reduce");
  }
  // Only a transformer has norms to exempt, only some models have buffers to cast.
  for (const auto& level : factors()[1].levels) {
    const std::set<std::string> with_norms = {"transformer", "tied", "dropout"};
    const std::set<std::string> with_buffers = {"buffer", "many_quirks"};
    if (!with_norms.contains(level.name)) {
      expected.insert(level.name + " + norms_exempt");
    }
    if (!with_buffers.contains(level.name)) {
      expected.insert(level.name + " + buffers16");
    }
  }
  // Only a transformer runs in segments; only a unit can have a region around it.
  for (const auto& level : factors()[1].levels) {
    const std::set<std::string> with_segments = {"transformer", "tied", "dropout"};
    if (!with_segments.contains(level.name)) {
      expected.insert(level.name + " + segments");
    }
  }
  expected.insert("model + around");
  expected.insert("buffers16 + segments");
  EXPECT_THAT(impossible, testing::ContainerEq(expected));
}

class EachRow : public testing::TestWithParam<Row> {};
INSTANTIATE_TEST_SUITE_P(Covering, EachRow, testing::ValuesIn(rows()),
                         [](const auto& info) { return name_of(info.param); });

TEST_P(EachRow, EqualsOneDeviceToTheBit) {
  expect_equal_to_one_device(scenario_of(GetParam()));
}

}  // namespace
}  // namespace shardproof
