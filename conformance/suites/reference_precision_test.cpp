// What the reference does beyond plain float32: dtypes, two stages of summation, accumulation,
// divide factors, quirks of models, loss scaling. Held to loops over scalars and to models and
// optimizers written out as functions.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>

#include "conformance/suites/written_out.h"
#include "reference/reduction.h"
#include "reference/trainer.h"

namespace shardproof {
namespace {

using namespace written_out;
using testing::HasSubstr;

const double kInfinity = std::numeric_limits<double>::infinity();

// ---------------------------------------------------------------------------------------------
// Reduction of scalars, written out

double rounded(double value, const std::string& dtype) {
  if (dtype == "float64") {
    return value;
  }
  const auto narrow = static_cast<float>(value);
  if (dtype == "bfloat16") {
    return static_cast<float>(c10::BFloat16(narrow));
  }
  return dtype == "float16" ? static_cast<float>(c10::Half(narrow)) : narrow;
}

/// A way to sum, in the words of reference/README.md: Q, the factors, replicas and shards.
struct Reduction {
  explicit Reduction(const Scenario& scenario, int replicas)
      : q(scenario.precision.reduce),
        d(scenario.dtype),
        accumulation(q == "float64" ? "float64" : "float32"),
        factors(divide_factors(scenario)),
        replica_count(replicas),
        shard_count(scenario.world_size / replicas) {}

  double sum(const std::vector<double>& terms) const {
    double total = terms.at(0);
    for (std::size_t i = 1; i < terms.size(); ++i) {
      total = rounded(total + terms[i], accumulation);
    }
    return rounded(total, q);
  }
  double divided(double value, double factor) const {
    return rounded(rounded(value / factor, accumulation), q);
  }
  /// Of each replica.
  std::vector<double> over_shards(const std::vector<double>& of_ranks) const {
    std::vector<double> sums;
    for (int i = 0; i < replica_count; ++i) {
      std::vector<double> terms;
      for (int j = 0; j < shard_count; ++j) {
        terms.push_back(
            divided(of_ranks.at(static_cast<std::size_t>(i * shard_count + j)), factors.pre));
      }
      sums.push_back(sum(terms));
    }
    return sums;
  }
  double over_replicas(const std::vector<double>& of_replicas) const {
    return rounded(divided(sum(of_replicas), factors.post), d);
  }

  std::string q, d, accumulation;
  DivideSpec factors;
  int replica_count, shard_count;
};

using Terms = std::vector<std::vector<double>>;  // by micro-batch, then rank

double reduced(const Scenario& scenario, int replicas, const Terms& terms) {
  const Reduction reduction(scenario, replicas);
  auto in_q = terms;
  for (auto& row : in_q) {
    for (auto& term : row) {
      term = rounded(term, reduction.q);
    }
  }
  if (scenario.accumulation == "last") {
    auto sums = in_q[0];
    for (std::size_t m = 1; m < in_q.size(); ++m) {
      for (std::size_t r = 0; r < sums.size(); ++r) {
        sums[r] = rounded(sums[r] + in_q[m][r], reduction.q);
      }
    }
    return reduction.over_replicas(reduction.over_shards(sums));
  }
  if (scenario.accumulation == "last_all_reduce") {
    auto sums = reduction.over_shards(in_q[0]);
    for (std::size_t m = 1; m < in_q.size(); ++m) {
      const auto more = reduction.over_shards(in_q[m]);
      for (std::size_t i = 0; i < sums.size(); ++i) {
        sums[i] = rounded(more[i] + sums[i], reduction.q);
      }
    }
    return reduction.over_replicas(sums);
  }
  double total = 0;
  for (std::size_t m = 0; m < in_q.size(); ++m) {
    const double part = reduction.over_replicas(reduction.over_shards(in_q[m]));
    total = m == 0 ? part : rounded(total + part, reduction.d);
  }
  return total;
}

/// What the reference makes of the terms, which every parameter dtype here holds.
double reference_reduced(const Scenario& scenario, const Terms& terms) {
  GradientReduction reduction(scenario);
  for (const auto& row : terms) {
    for (const double term : row) {
      reduction.add(
          torch::full({1}, term, torch::kFloat64).to(dtype_named(parameter_dtype(scenario))));
    }
  }
  EXPECT_EQ(reduction.result().scalar_type(), dtype_named(scenario.dtype));
  return reduction.result().item<double>();
}

Scenario reduction_scenario(int world_size, int replicas, const std::string& dtype) {
  Scenario scenario = small_mlp();
  scenario.world_size = world_size;
  scenario.strategy = replicas == 1 ? "full_shard" : "hybrid_shard";
  scenario.replicas = replicas;
  scenario.micro_batches = 1;
  scenario.precision.parameter = dtype;
  scenario.precision.reduce = dtype;
  return scenario;
}

TEST(Reduction, SixteenBitNumbersAreAddedInFloat32AndRoundedOnce) {
  auto scenario = reduction_scenario(4, 1, "bfloat16");
  scenario.divide.post = 1;
  // bfloat16 has 8 bits: 256 + 1 would be 256 again and again; 259 lies between 258 and 260.
  EXPECT_EQ(reference_reduced(scenario, {{256, 1, 1, 1}}), 260);
  // Two replicas: each pair is rounded first, 257 to 256.
  scenario.strategy = "hybrid_shard";
  scenario.replicas = 2;
  EXPECT_EQ(reference_reduced(scenario, {{256, 1, 1, 1}}), 258);
  // Four replicas of one shard: one stage again.
  scenario.replicas = 4;
  EXPECT_EQ(reference_reduced(scenario, {{256, 1, 1, 1}}), 260);
  scenario.strategy = "no_shard";
  scenario.replicas = 1;
  EXPECT_EQ(reference_reduced(scenario, {{256, 1, 1, 1}}), 260);
}

TEST(Reduction, TheReduceDtypeHoldsAtBothStages) {
  // pytorch#190626: gradients of bfloat16 reduced in float32, of which one stage forgot the dtype:
  // 1 + 2^-9 is 1 in bfloat16.
  for (const int replicas : {1, 2}) {
    auto scenario = reduction_scenario(2, replicas, "bfloat16");
    scenario.precision.reduce = "float32";
    scenario.divide.post = 1;
    EXPECT_EQ(reference_reduced(scenario, {{1, 0x1p-9}}), 1.001953125);
    // And when the sum waits for the last micro-batch.
    scenario.micro_batches = 2;
    for (const auto* accumulation : {"each", "last", "last_all_reduce"}) {
      scenario.accumulation = accumulation;
      EXPECT_EQ(reference_reduced(scenario, {{1, 0}, {0, 0x1p-9}}), 1.001953125);
      EXPECT_EQ(reference_reduced(scenario, {{1, 0}, {0x1p-9, 0}}), 1.001953125);
    }
  }
}

TEST(Reduction, Float16SurvivesWhatADivisionAtOneSideDoesNot) {
  // fairscale#565. Eight ranks: 8 x 30000 is more than float16 holds, and 2^-22 / 8 is less.
  auto scenario = reduction_scenario(8, 1, "float16");
  const Terms large = {std::vector<double>(8, 30000)};
  const Terms small = {std::vector<double>(8, 0x1p-22)};
  EXPECT_EQ(reference_reduced(scenario, large), 30000);
  EXPECT_EQ(reference_reduced(scenario, small), 0x1p-22);
  scenario.divide.post = 8;
  EXPECT_EQ(reference_reduced(scenario, large), kInfinity);
  scenario.divide = {8, 1};
  EXPECT_EQ(reference_reduced(scenario, small), 0);
  // Factors of one's own, before and after.
  scenario.divide = {2, 16};
  EXPECT_EQ(reference_reduced(scenario, {std::vector<double>(8, 1024)}), 256);
}

TEST(Reduction, MicroBatchesAreAddedWhereTheModeSays) {
  auto scenario = reduction_scenario(4, 2, "bfloat16");
  scenario.divide.post = 1;
  scenario.micro_batches = 2;
  const Terms terms = {{256, 0, 1, 0}, {1, 1, 0, 1}};
  // Each: 256 + 1 = 257 -> 256 and 2 + 1 = 3, added in float32: 259.
  EXPECT_EQ(reference_reduced(scenario, terms), 259);
  // Last: ranks hold 256 (257 rounded), 1, 1, 1; pairs make 256 (257 rounded) and 2.
  scenario.accumulation = "last";
  EXPECT_EQ(reference_reduced(scenario, terms), 258);
  // Sums over shards: 256 + 2 = 258 and 1 + 1 = 2.
  scenario.accumulation = "last_all_reduce";
  EXPECT_EQ(reference_reduced(scenario, terms), 260);
}

TEST(Reduction, EqualsTheLoopOverScalarsWhateverTheScenario) {
  std::uint64_t seed = 0;
  std::set<std::string> apart;  // modes that made a difference somewhere
  for (const auto& [world_size, replicas] : {std::pair(1, 1), std::pair(3, 1), std::pair(4, 2),
                                             std::pair(6, 3), std::pair(8, 4), std::pair(8, 8)}) {
    for (const std::string parameter : {"float32", "bfloat16", "float16"}) {
      for (const std::string reduce : {"float32", "float64", "bfloat16", "float16"}) {
        for (const std::string accumulation : {"each", "last", "last_all_reduce"}) {
          for (const auto& divide : {DivideSpec{0, 0}, DivideSpec{0, 7}, DivideSpec{3, 5}}) {
            auto scenario = reduction_scenario(world_size, replicas, parameter);
            scenario.strategy = "hybrid_shard";
            scenario.dtype = ++seed % 3 == 0 ? "bfloat16" : "float32";
            scenario.precision.reduce = reduce;
            scenario.micro_batches = 3;
            scenario.accumulation = accumulation;
            scenario.divide = divide;
            ASSERT_NO_THROW(validate(scenario));
            Terms terms(3, std::vector<double>(static_cast<std::size_t>(world_size)));
            std::uint64_t count = 0;
            for (auto& row : terms) {
              for (auto& term : row) {
                const auto bits = hash_counters(seed, {count++}) >> 40;
                term = rounded((static_cast<double>(bits) - 0x1p23) / 0x1p20, parameter);
              }
            }
            const double want = reduced(scenario, replicas, terms);
            EXPECT_EQ(reference_reduced(scenario, terms), want) << dotted_name(scenario);
            auto other = scenario;
            other.accumulation = accumulation == "each" ? "last" : "each";
            if (reduced(other, replicas, terms) != want) {
              apart.insert(accumulation + " " + reduce);
            }
            if (reduced(scenario, 1, terms) != want) {
              apart.insert("stages " + reduce);
            }
          }
        }
      }
    }
  }
  for (const std::string reduce : {"float32", "bfloat16", "float16"}) {
    for (const std::string what : {"each ", "last ", "last_all_reduce ", "stages "}) {
      EXPECT_EQ(apart.count(what + reduce), 1U) << "never made a difference: " << what << reduce;
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Models in mixed precision, written out

bool is_norm(const std::string& name) {
  return name.find("norm") != std::string::npos;
}

bool is_frozen(const Scenario& scenario, const std::string& name) {
  return (has_quirk(scenario, "frozen_bias") && name.ends_with("linear.bias")) ||
         (has_quirk(scenario, "frozen_layer") && name.starts_with("layers.1."));
}

/// What forward and backward run with.
Tensors cast_leaves(const Scenario& scenario, const Tensors& values) {
  Tensors result;
  for (const auto& [name, value] : values) {
    const bool exempt = scenario.precision.exempt_norms && is_norm(name);
    result[name] = value.detach()
                       .to(dtype_named(exempt ? scenario.dtype : parameter_dtype(scenario)),
                           /*non_blocking=*/false, /*copy=*/true)
                       .requires_grad_(!is_frozen(scenario, name));
  }
  return result;
}

using Outputs = std::vector<std::pair<std::string, Tensor>>;

struct QuirkModel {
  const Scenario& scenario;
  const Tensors& weights;

  bool has(const char* quirk) const { return has_quirk(scenario, quirk); }

  Tensor layer(std::int64_t i, const Tensor& x) const {
    const auto depth = scenario.model.depth;
    const auto own = "layers." + std::to_string(i) + ".";
    const auto& weight =
        weights.at((has("tied_across") && i + 1 == depth ? "layers.0." : own) + "linear.weight");
    auto y = torch::linear(x, weight, weights.at(own + "linear.bias"));
    if (has("tied_inside")) {
      y = torch::linear(y, weight);
    }
    if (has("buffer")) {
      const auto& dtype = scenario.precision.buffer;
      const auto shift = (torch::arange(1, scenario.model.quirk_width + 1, torch::kFloat64) / 64)
                             .to(dtype_named(scenario.dtype))
                             .to(dtype_named(dtype.empty() ? scenario.dtype : dtype));
      y = y + shift.to(y.scalar_type());
    }
    if (i + 1 < depth) {
      y = torch::gelu(y);
    }
    return has("scalar") ? y * weights.at(own + "gain") : y;
  }

  Tensor forward(Tensor x, const std::string& mark, Outputs& outputs) const {
    for (std::int64_t i = 0; i < scenario.model.depth; ++i) {
      const int times = has("twice") && i + 1 < scenario.model.depth ? 2 : 1;
      for (int t = 0; t < times; ++t) {
        const auto y = layer(i, x);
        outputs.emplace_back("layers." + std::to_string(i) + mark + (t == 1 ? "+1" : ""), y);
        x = has("tuple") ? y + x * 0.5 : y;
      }
    }
    return x;
  }
};

struct Pass {
  Tensor loss;
  Outputs outputs;
  Tensors gradients;  // of those that have one
};

/// One rank's micro-batch.
Pass run_pass(const Scenario& scenario, const Tensors& values, const Batch& batch) {
  const auto weights = cast_leaves(scenario, values);
  Pass pass;
  const auto& dtype = scenario.precision.output;
  const auto cast_output = [&](const Tensor& output) {
    return dtype.empty() ? output : output.to(dtype_named(dtype));
  };
  if (scenario.model.kind == "transformer") {
    auto all = weights;
    if (scenario.model.tied) {
      all["head.weight"] = weights.at("token_embedding.weight");
    }
    const auto output = cast_output(transformer(all, scenario.model, batch.input, no_dropout));
    pass.outputs.emplace_back("model", output);
    pass.loss = torch::nn::functional::cross_entropy(output.view({-1, scenario.model.vocabulary}),
                                                     batch.target.view(-1));
  } else {
    const auto forward = [&](const Tensor& input, const std::string& mark) {
      const auto x = input.to(dtype_named(parameter_dtype(scenario)));
      const auto output =
          cast_output(scenario.model.kind == "mlp"
                          ? mlp(weights, scenario.model, x, no_dropout)
                          : QuirkModel{scenario, weights}.forward(x, mark, pass.outputs));
      pass.outputs.emplace_back("model" + mark, output);
      return torch::mse_loss(output, batch.target.to(output.scalar_type()));
    };
    pass.loss = forward(batch.input, "");
    if (has_quirk(scenario, "two_forwards")) {
      pass.loss = pass.loss + forward(batch.input * 0.5, "#2");
    }
  }
  auto scaled = scenario.micro_batches == 1 ? pass.loss : pass.loss / scenario.micro_batches;
  if (scenario.loss_scale > 0) {
    scaled = scaled * scenario.loss_scale;
  }
  scaled.backward();
  for (const auto& [name, weight] : weights) {
    if (weight.grad().defined()) {
      pass.gradients[name] = weight.grad();
    }
  }
  return pass;
}

Tensors start_of(const Scenario& scenario) {
  return initial_parameters(scenario);
}

/// Holds a step of the replay, begun with `values`, to passes written out and scalars reduced one
/// by one: outputs, losses and gradients.
void expect_replayed(const Scenario& scenario, int replicas, const Tensors& values,
                     const StepTrace& trace) {
  const Dataset data(scenario);
  std::map<std::string, std::vector<std::vector<Tensor>>> gradients;
  for (int m = 0; m < scenario.micro_batches; ++m) {
    for (int rank = 0; rank < scenario.world_size; ++rank) {
      const auto index = static_cast<std::size_t>(rank);
      const auto pass = run_pass(scenario, values, data.batch(trace.step, m, rank));
      EXPECT_TRUE(equal_to_the_bit(trace.find(Quantity::loss, "loss")->pieces.at(index).values[m],
                                   pass.loss.detach()))
          << dotted_name(scenario);
      for (const auto& [name, output] : pass.outputs) {
        const auto* got = trace.find(Quantity::output, name + "@m" + std::to_string(m));
        ASSERT_NE(got, nullptr) << name;
        EXPECT_TRUE(equal_to_the_bit(got->pieces.at(index).values, output.detach()))
            << dotted_name(scenario) << " " << name;
      }
      for (const auto& [name, gradient] : pass.gradients) {
        auto& rows = gradients[name];
        rows.resize(static_cast<std::size_t>(scenario.micro_batches));
        rows[static_cast<std::size_t>(m)].push_back(gradient);
      }
    }
  }
  auto full = scenario;
  full.precision.reduce = reduce_dtype(scenario);
  for (const auto& [name, value] : values) {
    const auto* got = trace.find(Quantity::gradient, name);
    ASSERT_EQ(got != nullptr, gradients.count(name) == 1) << dotted_name(scenario) << " " << name;
    if (got == nullptr) {
      continue;
    }
    auto want = torch::empty(value.sizes(), torch::kFloat64);
    for (std::int64_t e = 0; e < want.numel(); ++e) {
      Terms terms;
      for (const auto& row : gradients[name]) {
        terms.emplace_back();
        for (const auto& gradient : row) {
          terms.back().push_back(gradient.reshape({-1})[e].to(torch::kFloat64).item<double>());
        }
      }
      double element = reduced(full, replicas, terms);
      if (scenario.loss_scale > 0) {
        element = rounded(rounded(element * static_cast<float>(1 / scenario.loss_scale), "float32"),
                          scenario.dtype);
      }
      want.view({-1})[e] = element;
    }
    EXPECT_TRUE(equal_to_the_bit(got->pieces.at(0).values, want.to(dtype_named(scenario.dtype))))
        << dotted_name(scenario) << " " << name << " step " << trace.step;
  }
}

/// Two steps, each from the state that the one before left.
void expect_trained(const Scenario& scenario, int replicas) {
  ASSERT_NO_THROW(validate(scenario)) << dotted_name(scenario);
  auto values = start_of(scenario);
  ReferenceTrainer trainer(scenario, ReferenceMode::replay, values);
  for (int step = 0; step < 2; ++step) {
    const auto trace = trainer.step(step);
    expect_replayed(scenario, replicas, values, trace);
    values = state_after(trace).parameters;
  }
}

struct Precision {
  const char* dtype;
  const char* parameter;
  const char* reduce;
  const char* output;
};

const std::vector<Precision> kPrecisions = {{"float32", "bfloat16", "float32", ""},
                                            {"float32", "bfloat16", "", "float32"},
                                            {"float32", "float16", "", ""},
                                            {"float32", "", "bfloat16", ""},
                                            {"bfloat16", "", "", ""},
                                            {"float16", "", "float32", "float32"},
                                            {"float64", "float32", "float64", ""},
                                            {"bfloat16", "float32", "", "bfloat16"}};

void set(Scenario& scenario, const Precision& precision) {
  scenario.dtype = precision.dtype;
  scenario.precision.parameter = precision.parameter;
  scenario.precision.reduce = precision.reduce;
  scenario.precision.output = precision.output;
  scenario.optimizer.kind = "sgd";  // AdamW's eps is 0 in float16
  scenario.optimizer.lr = 0.05;
}

TEST(Precision, ReplayEqualsPassesWrittenOutAndScalarsReducedOneByOne) {
  for (const auto& precision : kPrecisions) {
    for (const auto& [replicas, accumulation] :
         {std::pair(1, "each"), std::pair(1, "last"), std::pair(2, "each"), std::pair(2, "last"),
          std::pair(2, "last_all_reduce")}) {
      auto scenario = small_mlp();
      set(scenario, precision);
      scenario.world_size = 4;
      scenario.strategy = replicas == 1 ? "shard_grad_op" : "hybrid_shard_zero2";
      scenario.replicas = replicas;
      scenario.micro_batches = 3;
      scenario.accumulation = accumulation;
      expect_trained(scenario, replicas);
    }
  }
}

TEST(Precision, FactorsOfOnesOwnAndNoShardingAreWrittenOutToo) {
  auto scenario = small_mlp();
  set(scenario, kPrecisions[0]);
  scenario.divide = {3, 0.5};
  expect_trained(scenario, 1);
  scenario.divide = {};
  scenario.strategy = "no_shard";
  expect_trained(scenario, 3);
  scenario.world_size = 1;
  expect_trained(scenario, 1);
}

TEST(Precision, ATransformerKeepsItsNormsWhereTheyAreExempt) {
  for (const char* parameter : {"bfloat16", "float16"}) {
    std::vector<Tensor> outputs;
    for (const bool exempt : {false, true}) {
      auto scenario = small_transformer();
      scenario.world_size = 2;
      scenario.micro_batches = 2;
      scenario.precision.parameter = parameter;
      scenario.precision.exempt_norms = exempt;
      expect_trained(scenario, 1);
      const auto trace =
          ReferenceTrainer(scenario, ReferenceMode::replay, start_of(scenario)).step(0);
      outputs.push_back(value_of(trace, Quantity::output, "model@m0"));
      EXPECT_EQ(value_of(trace, Quantity::output, "blocks.0@m0").scalar_type(),
                dtype_named(parameter));
      EXPECT_EQ(value_of(trace, Quantity::gradient, "norm.weight").scalar_type(), torch::kFloat32);
    }
    EXPECT_FALSE(same_bits(outputs[0], outputs[1])) << "the exemption changed nothing";
  }
}

TEST(Precision, ATiedTransformerHasOneParameterWithBothGradients) {
  auto scenario = small_transformer();
  scenario.model.tied = true;
  scenario.world_size = 2;
  expect_trained(scenario, 1);
  const auto model = make_model(scenario);
  const auto parameters = parameters_of(*model);
  EXPECT_EQ(parameters.front().first, "token_embedding.weight");
  EXPECT_EQ(parameters.back().first, "norm.bias");
  auto untied = scenario;
  untied.model.tied = false;
  const auto one = start_of(scenario);
  const auto other = start_of(untied);
  EXPECT_EQ(one.size() + 1, other.size());
  EXPECT_TRUE(equal_to_the_bit(one.at("norm.bias"), other.at("norm.bias")));
  EXPECT_THAT(message_of<ScenarioError>([&] { load_parameters(*make_model(scenario), other); }),
              HasSubstr("\"head.weight\" is not one of the model"));
}

TEST(Precision, DataAreRoundedToTheScenariosDtypeOnce) {
  auto scenario = small_mlp();
  const auto exact = Dataset(scenario).batch(1, 0, 2);
  for (const char* dtype : {"bfloat16", "float16"}) {
    scenario.dtype = dtype;
    const auto batch = Dataset(scenario).batch(1, 0, 2);
    EXPECT_TRUE(equal_to_the_bit(batch.input, exact.input.to(dtype_named(dtype))));
    EXPECT_TRUE(equal_to_the_bit(batch.target, exact.target.to(dtype_named(dtype))));
    const bool is_exact = torch::equal(batch.input.to(torch::kFloat32), exact.input);
    EXPECT_EQ(is_exact, std::string(dtype) == "float16");
  }
}

TEST(Precision, InitialWeightsAreTheSameNumbersInEveryDtype) {
  for (auto scenario : {small_mlp(), small_transformer()}) {
    scenario.dtype = "float64";
    const auto wide = start_of(scenario);
    for (const char* dtype : {"float32", "bfloat16", "float16"}) {
      scenario.dtype = dtype;
      for (const auto& [name, value] : start_of(scenario)) {
        EXPECT_TRUE(equal_to_the_bit(value, wide.at(name).to(dtype_named(dtype)))) << name;
      }
    }
  }
}

TEST(Precision, OptimizersAndClippingRunInTheKeptDtype) {
  OptimizerSpec adamw;
  adamw.lr = 0.01;
  adamw.eps = 1e-3;
  OptimizerSpec sgd;
  sgd.kind = "sgd";
  sgd.momentum = 0.9;
  sgd.lr = 0.1;
  sgd.weight_decay = 0.1;
  for (const auto& spec : {adamw, sgd}) {
    for (const char* dtype : {"bfloat16", "float16"}) {
      for (const double p : {1.0, 2.0, 3.0, 2.5, kInfinity}) {
        auto scenario = small_mlp();
        scenario.optimizer = spec;
        scenario.dtype = dtype;
        scenario.norm_type = p;
        scenario.max_norm = 0.05;
        auto parameters = start_of(scenario);
        ReferenceTrainer trainer(scenario, ReferenceMode::replay, parameters);
        std::map<std::string, Tensors> states;
        for (int step = 0; step < 3; ++step) {
          const auto trace = trainer.step(step);
          std::vector<Tensor> gradients;
          for (const auto& [name, value] : parameters) {
            gradients.push_back(value_of(trace, Quantity::gradient, name));
          }
          const auto norm = exact_norm(gradients, p);
          EXPECT_TRUE(equal_to_the_bit(value_of(trace, Quantity::total_norm, "total_norm"), norm));
          const auto factor = (torch::full_like(norm, 0.05) / (norm + 1e-6)).clamp_max(1);
          EXPECT_LT(factor.item<double>(), 1) << "the limit never bit";
          for (auto& [name, parameter] : parameters) {
            const auto& clipped = value_of(trace, Quantity::clipped_gradient, name);
            EXPECT_TRUE(
                equal_to_the_bit(clipped, value_of(trace, Quantity::gradient, name) * factor));
            WrittenOut(spec).step(step + 1, parameter, clipped, states[name]);
            EXPECT_TRUE(equal_to_the_bit(value_of(trace, Quantity::parameter, name), parameter))
                << dotted_name(scenario) << " " << name << " step " << step;
          }
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Quirks

Scenario quirk_scenario(std::vector<std::string> quirks) {
  Scenario scenario;
  scenario.model.kind = "quirks";
  scenario.model.quirk_width = 4;
  scenario.model.quirks = std::move(quirks);
  scenario.data.kind = "synthetic";
  scenario.world_size = 2;
  scenario.micro_batches = 2;
  scenario.batch = 3;
  scenario.optimizer.lr = 0.01;
  scenario.seed = 5;
  return scenario;
}

TEST(Quirks, EachAndAllComputeWhatTheSpecificationSays) {
  std::vector<std::vector<std::string>> sets = {{}, quirk_names()};
  for (const auto& quirk : quirk_names()) {
    sets.push_back({quirk});
  }
  for (const auto& quirks : sets) {
    expect_trained(quirk_scenario(quirks), 1);
  }
  auto mixed = quirk_scenario(quirk_names());
  mixed.precision.parameter = "bfloat16";
  mixed.precision.reduce = "float32";
  mixed.precision.buffer = "float16";
  mixed.precision.output = "float32";
  mixed.strategy = "hybrid_shard";
  mixed.replicas = 2;
  mixed.accumulation = "last_all_reduce";
  expect_trained(mixed, 2);
}

std::vector<std::string> names_of(const Scenario& scenario) {
  std::vector<std::string> names;
  for (const auto& [name, parameter] : parameters_of(*make_model(scenario))) {
    names.push_back(name);
  }
  return names;
}

TEST(Quirks, ParametersHaveTheNamesAndOrderOfTheSpecification) {
  EXPECT_THAT(names_of(quirk_scenario(quirk_names())),
              testing::ElementsAre("layers.0.gain", "layers.0.spare", "layers.0.linear.weight",
                                   "layers.0.linear.bias", "layers.1.gain", "layers.1.spare",
                                   "layers.1.linear.weight", "layers.1.linear.bias",
                                   "layers.2.gain", "layers.2.spare", "layers.2.linear.bias",
                                   "spare_layer.gain", "spare_layer.spare",
                                   "spare_layer.linear.weight", "spare_layer.linear.bias"));
  EXPECT_THAT(names_of(quirk_scenario({})),
              testing::ElementsAre("layers.0.linear.weight", "layers.0.linear.bias",
                                   "layers.1.linear.weight", "layers.1.linear.bias",
                                   "layers.2.linear.weight", "layers.2.linear.bias"));
  const auto model = make_model(quirk_scenario(quirk_names()));
  const auto buffers = model->named_buffers();
  EXPECT_EQ(buffers["calls"].scalar_type(), torch::kInt64);
  EXPECT_TRUE(
      torch::equal(buffers["layers.1.shift"], torch::tensor({1.0F, 2.0F, 3.0F, 4.0F}) / 64));
  EXPECT_FALSE(model->named_parameters()["layers.1.linear.weight"].is_contiguous());
  EXPECT_EQ(model->layers().back().name, "spare_layer");
}

TEST(Quirks, InitialWeightsAreSpreadAsDocumentedAndTheSameTransposed) {
  auto scenario = quirk_scenario({"scalar", "unused"});
  scenario.model.depth = 400;
  scenario.model.quirk_width = 16;
  const auto values = start_of(scenario);
  const auto expect = [&](const std::string& leaf, double mean, double deviation) {
    std::vector<Tensor> all;
    for (int i = 0; i < 400; ++i) {
      all.push_back(values.at("layers." + std::to_string(i) + "." + leaf).reshape({-1}));
    }
    const auto joined = torch::cat(all).to(torch::kFloat64);
    const double allowed = 5 * deviation / std::sqrt(static_cast<double>(joined.numel()));
    EXPECT_NEAR(joined.mean().item<double>(), mean, allowed) << leaf;
    EXPECT_NEAR(joined.std().item<double>(), deviation, allowed) << leaf;
  };
  expect("linear.weight", 0, 0.25);
  expect("linear.bias", 0, 0.02);
  expect("gain", 1, 0.02);
  expect("spare", 0, 0.02);
  const auto plain = start_of(quirk_scenario({}));
  for (const auto& [name, value] : start_of(quirk_scenario({"transposed"}))) {
    EXPECT_TRUE(equal_to_the_bit(value, plain.at(name))) << name;
  }
}

TEST(Quirks, ABufferCountsForwards) {
  const auto scenario = quirk_scenario({"buffer", "two_forwards"});
  auto model = make_model(scenario);
  load_parameters(*model, start_of(scenario));
  const auto batch = Dataset(scenario).batch(0, 0, 0);
  const auto call = [&](const Tensor& input) { return model(input); };
  model->training_loss(call, batch.input, batch.target);
  EXPECT_EQ(model->named_buffers()["calls"].item<std::int64_t>(), 2);
}

TEST(Quirks, WhatIsFrozenOrUnusedStaysToTheBitAndHasNoState) {
  for (const char* optimizer : {"adamw", "sgd"}) {
    auto scenario = quirk_scenario({"frozen_bias", "frozen_layer", "unused", "scalar"});
    scenario.optimizer.kind = optimizer;
    scenario.optimizer.weight_decay = 0.5;  // which would move what has no gradient
    scenario.optimizer.momentum = std::string(optimizer) == "sgd" ? 0.9 : 0;
    const auto start = start_of(scenario);
    ReferenceTrainer trainer(scenario, ReferenceMode::replay, start);
    const std::set<std::string> trained = {"layers.0.gain", "layers.0.linear.weight",
                                           "layers.2.gain", "layers.2.linear.weight"};
    for (int step = 0; step < 3; ++step) {
      const auto trace = trainer.step(step);
      std::set<std::string> with_state;
      for (const auto& tensor : trace.tensors) {
        if (tensor.quantity == Quantity::optimizer_state) {
          with_state.insert(tensor.name.substr(tensor.name.find('/') + 1));
        }
      }
      EXPECT_EQ(with_state, trained);
      for (const auto& [name, value] : start) {
        const bool moves = trained.count(name) == 1;
        EXPECT_EQ(same_bits(value_of(trace, Quantity::parameter, name), value), !moves) << name;
        for (const auto quantity : {Quantity::gradient, Quantity::clipped_gradient}) {
          EXPECT_EQ(trace.find(quantity, name) != nullptr, moves) << name;
        }
      }
      // In lockstep too.
      trainer.set_state(state_after(trace));
    }
  }
}

TEST(Quirks, ATransposedWeightIsOptimisedAsItIsWritten) {
  // In 16 bits libtorch rounds some elements otherwise if parameter and gradient lie in another
  // order.
  for (const char* dtype : {"bfloat16", "float16"}) {
    std::vector<StepTrace> last;
    for (const auto& quirks : {std::vector<std::string>{}, {"transposed"}}) {
      auto scenario = quirk_scenario(quirks);
      scenario.model.quirk_width = 20;
      scenario.dtype = dtype;
      scenario.optimizer.eps = 1e-3;
      ReferenceTrainer trainer(scenario, ReferenceMode::replay, start_of(scenario));
      trainer.step(0);
      trainer.step(1);
      last.push_back(trainer.step(2));
    }
    for (const auto& tensor : last[0].tensors) {
      EXPECT_TRUE(equal_to_the_bit(value_of(last[1], tensor.quantity, tensor.name),
                                   tensor.pieces[0].values))
          << to_string(tensor.quantity) << " " << tensor.name;
    }
  }
}

TEST(Quirks, TheWholeBatchEqualsReplayWithinRounding) {
  std::vector<Scenario> scenarios;
  for (const auto& quirk : quirk_names()) {
    scenarios.push_back(quirk_scenario({quirk}));
  }
  scenarios.push_back(quirk_scenario(quirk_names()));
  auto hybrid = small_transformer();
  hybrid.model.tied = true;
  hybrid.strategy = "hybrid_shard";
  hybrid.replicas = 3;
  hybrid.accumulation = "last_all_reduce";
  scenarios.push_back(hybrid);
  hybrid.accumulation = "last";
  hybrid.divide = {2, 5};
  hybrid.norm_type = 3;
  scenarios.push_back(hybrid);
  for (auto& scenario : scenarios) {
    scenario.optimizer.kind = "sgd";  // AdamW makes much of a gradient that is all rounding
    const auto weights = start_of(scenario);
    const auto replay = ReferenceTrainer(scenario, ReferenceMode::replay, weights).step(0);
    for (const auto mode : {ReferenceMode::whole, ReferenceMode::float64}) {
      const auto whole = ReferenceTrainer(scenario, mode, weights).step(0);
      for (const auto& [name, value] : weights) {
        for (const auto quantity : {Quantity::gradient, Quantity::parameter}) {
          const auto* got = whole.find(quantity, name);
          ASSERT_EQ(got == nullptr, replay.find(quantity, name) == nullptr) << name;
          if (got != nullptr) {
            EXPECT_LT(relative_distance(got->pieces[0].values, value_of(replay, quantity, name)),
                      1e-5)
                << dotted_name(scenario) << " " << name << " " << to_string(quantity);
          }
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Loss scaling

Scenario scaled_scenario() {
  auto scenario = small_mlp();
  scenario.precision.parameter = "float16";
  scenario.precision.output = "float32";  // so that the loss itself does not overflow
  scenario.world_size = 1;
  scenario.micro_batches = 1;
  scenario.optimizer.lr = 0.01;
  scenario.loss_scale = 1;
  return scenario;
}

TEST(LossScale, GradientsAreScaledBeforeBackwardAndBackAfterTheReduction) {
  auto scenario = small_mlp();
  for (const char* dtype : {"float32", "bfloat16"}) {
    for (const double scale : {1024.0, 3.0}) {
      scenario.dtype = dtype;
      scenario.precision.parameter = "bfloat16";
      scenario.loss_scale = scale;
      expect_trained(scenario, 1);
    }
  }
}

TEST(LossScale, AStepThatOverflowsIsLeftOutAndNotCounted) {
  auto scenario = scaled_scenario();
  // A scale for which the largest gradient of some steps, but not of others, overflows float16.
  scenario.optimizer.kind = "sgd";
  scenario.optimizer.lr = 0;
  ReferenceTrainer probe(scenario, ReferenceMode::replay, start_of(scenario));
  std::vector<double> largest;
  for (int step = 0; step < 8; ++step) {
    double most = 0;
    for (const auto& tensor : probe.step(step).tensors) {
      if (tensor.quantity == Quantity::gradient) {
        most = std::max(most, tensor.pieces[0].values.abs().max().item<double>());
      }
    }
    largest.push_back(most);
  }
  auto sorted = largest;
  std::sort(sorted.begin(), sorted.end());
  scenario.optimizer = OptimizerSpec();
  scenario.optimizer.lr = 1e-5;  // the weights hardly move, so that the measure holds
  scenario.loss_scale = 65504 * 2 / (sorted[3] + sorted[4]);

  auto parameters = start_of(scenario);
  ReferenceTrainer trainer(scenario, ReferenceMode::replay, parameters);
  std::map<std::string, Tensors> states;
  std::string pattern;
  int counted = 0;
  for (int step = 0; step < 8; ++step) {
    const auto trace = trainer.step(step);
    const bool left_out = has_non_finite_gradient(trace);
    pattern += left_out ? '-' : '+';
    counted += left_out ? 0 : 1;
    for (auto& [name, parameter] : parameters) {
      if (!left_out) {
        WrittenOut(scenario.optimizer)
            .step(counted, parameter, value_of(trace, Quantity::clipped_gradient, name),
                  states[name]);
      }
      EXPECT_TRUE(equal_to_the_bit(value_of(trace, Quantity::parameter, name), parameter))
          << name << " step " << step;
      for (const auto& [kind, value] : states[name]) {
        EXPECT_TRUE(
            equal_to_the_bit(value_of(trace, Quantity::optimizer_state, kind + "/" + name), value))
            << name << " step " << step;
      }
      EXPECT_EQ(trace.find(Quantity::optimizer_state, "exp_avg/" + name) == nullptr, counted == 0);
    }
    // In lockstep too: the state says how many steps count.
    const auto state = state_after(trace, step + 1 - counted);
    EXPECT_EQ(state.optimizer_steps(), counted);
    trainer.set_state(state);
  }
  EXPECT_THAT(pattern, testing::AllOf(HasSubstr("+-"), HasSubstr("-+")));
}

TEST(LossScale, WithoutItAGradientThatIsNotFiniteIsUsed) {
  auto scenario = scaled_scenario();
  scenario.loss_scale = 0;
  auto weights = start_of(scenario);
  weights.at("layers.0.linear.weight").mul_(1e30);  // infinite in float16
  const auto trace = ReferenceTrainer(scenario, ReferenceMode::replay, weights).step(0);
  EXPECT_TRUE(has_non_finite_gradient(trace));
  EXPECT_TRUE(
      value_of(trace, Quantity::parameter, "layers.1.linear.bias").isnan().any().item<bool>());
  scenario.loss_scale = 1;
  const auto kept = ReferenceTrainer(scenario, ReferenceMode::replay, weights).step(0);
  EXPECT_TRUE(equal_to_the_bit(value_of(kept, Quantity::parameter, "layers.1.linear.bias"),
                               weights.at("layers.1.linear.bias")));
}

}  // namespace
}  // namespace shardproof
