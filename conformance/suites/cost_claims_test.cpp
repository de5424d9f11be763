// What the sections on compute and memory count, and the closed forms that they hold it to.

#include "conformance/cost_claims.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "conformance/cost_measurement.h"
#include "conformance/line_fit.h"
#include "conformance/memory_claims.h"
#include "conformance/memory_measurement.h"

namespace shardproof {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(CheckpointPolicies, RegionsAreThoseOfTheirNames) {
  const auto policies = checkpoint_policies();
  ASSERT_EQ(policies.size(), 5u);
  EXPECT_THAT(policies[0].regions(7), IsEmpty());
  EXPECT_THAT(policies[1].regions(3), ElementsAre(1, 1, 1));
  EXPECT_THAT(policies[2].regions(5), ElementsAre(1, 1, 1));
  EXPECT_THAT(policies[3].regions(5), ElementsAre(1, 1));
  // The last segment is stored.
  EXPECT_THAT(policies[4].regions(9), ElementsAre(3, 3));
  EXPECT_THAT(policies[4].regions(8), ElementsAre(2, 3));
}

/// Written out for 2 samples of 3 tokens, width 4, a vocabulary of 5: n = 6.
TEST(ComputeClaim, TheClosedFormOfABlockIsTheSumOfItsProducts) {
  const auto one =
      stack_operations({.width = 4, .heads = 2, .time = 3, .batch = 2, .vocabulary = 5});
  const std::int64_t qkv = 2 * 6 * 4 * 12;
  const std::int64_t scores = 2 * (2 * 2) * 3 * 3 * 2;  // samples and heads, of width 2
  const std::int64_t output = 2 * 6 * 4 * 4;
  const std::int64_t up = 2 * 6 * 4 * 16;
  EXPECT_EQ(one.block, qkv + 2 * scores + output + 2 * up);
  EXPECT_EQ(one.down, up);
  EXPECT_EQ(one.head, 2 * 6 * 4 * 5);
}

TEST(ComputeClaim, EveryPolicyAndDepthCountsItsClosedForm) {
  for (const int layers : {2, 5, 9}) {
    StackSpec spec;
    spec.layers = layers;
    spec.width = 12;
    spec.time = 5;
    for (auto policy : checkpoint_policies()) {
      for (const bool early_stop : {false, true}) {
        policy.early_stop = early_stop;
        EXPECT_EQ(measure_step(spec, policy, 1, 0).operations, expected_operations(spec, policy))
            << policy.name() << ", " << layers << " layers, early stop " << early_stop;
      }
    }
  }
}

TEST(ComputeClaim, TheForwardOfCheckpointedLayersDoublesAndAStepGrowsByOneForward) {
  StackSpec spec;
  const auto one = stack_operations(spec);
  const auto layers = spec.layers * one.block;
  const auto stored = measure_step(spec, {.every = 0}, 1, 0).operations;
  const auto again = measure_step(spec, {.every = 1, .early_stop = false}, 1, 0).operations;
  EXPECT_EQ(stored.total(), 3 * (layers + one.head));
  EXPECT_EQ(again.recomputation, layers);
  EXPECT_EQ(again.total(), 4 * layers + 3 * one.head);
  EXPECT_EQ(again.forward, stored.forward);
  EXPECT_EQ(again.backward, stored.backward);
}

TEST(MemoryClaim, PersistentBytesAreTheFormulaOnEveryRank) {
  // 20 elements leave padding at 64 bytes, and the units' ends at most numbers of ranks.
  const StackSpec spec = {
      .layers = 2, .width = 20, .heads = 2, .time = 4, .batch = 2, .vocabulary = 13};
  for (const int shards : {0, 1, 2, 3, 4, 8}) {
    const auto want = expected_persistent(spec, shards);
    for (const int every : {0, 1}) {
      const auto got = measure_memory(spec, {.every = every}, shards, 1);
      ASSERT_EQ(got.size(), want.size());
      for (std::size_t rank = 0; rank < got.size(); ++rank) {
        EXPECT_EQ(got[rank].persistent.parameters, want[rank].parameters) << shards << " " << rank;
        EXPECT_EQ(got[rank].persistent.gradients, want[rank].gradients) << shards << " " << rank;
        EXPECT_EQ(got[rank].persistent.optimizer_state, want[rank].optimizer_state)
            << shards << " " << rank;
      }
    }
  }
}

TEST(MemoryClaim, TheFormulaOfPersistentBytesIsThatOfASmallStackByHand) {
  // One block of width 1 and its heads: 12 + 6 elements of weights and biases and so on; each at a
  // multiple of 16.
  const StackSpec spec = {.layers = 1, .width = 1, .heads = 1, .vocabulary = 20};
  // norm1 1 1, qkv 3 3, output 1 1, norm2 1 1, up 4 4, down 4 1; embedding 20, head 20.
  const std::int64_t elements = 25 + 40;
  const auto whole = expected_persistent(spec, 0);
  EXPECT_EQ(whole[0].parameters, 4 * elements);
  EXPECT_EQ(whole[0].total(), 16 * elements);
  // Flat: 11 * 16 + 1 = 177, and 32 + 20 = 52; over 2: 89 (178) and 26.
  const auto halves = expected_persistent(spec, 2);
  EXPECT_EQ(halves[0].parameters, 4 * (89 + 26));
  EXPECT_EQ(halves[1].gradients, 4 * (89 + 26));
  // The first 89 are parameters 0 to 5 (10 elements): one at 80; then 15 others. Of the 40, the
  // embedding's 20 and the head from 32 on.
  EXPECT_EQ(halves[0].optimizer_state, 8 * (10 + 20));
  EXPECT_EQ(halves[1].optimizer_state, 8 * (15 + 20));
}

class EachPolicy : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(MemoryClaim, EachPolicy, testing::Range(0, 6));

TEST_P(EachPolicy, ThePeakOfActivationsIsOnItsLineToTheByte) {
  auto policies = checkpoint_policies();
  policies.push_back({.every = 1, .keeps_random_state = true});
  const auto policy = policies[static_cast<std::size_t>(GetParam())];
  StackSpec spec = {.width = 12, .heads = 3, .time = 7, .batch = 2, .vocabulary = 19};
  const auto growth = expected_growth(spec, policy);
  std::int64_t constant = 0;
  for (const int layers : {4, 16, 36}) {
    ASSERT_TRUE(growth.fits(layers));
    spec.layers = layers;
    const auto peak = measure_memory(spec, policy, 0, 1).front().peak;
    const auto rest = peak - growth.slope * growth.steps(layers);
    if (layers > 4) {
      EXPECT_EQ(rest, constant) << policy.name() << ", " << layers << " layers";
    }
    constant = rest;
  }
  EXPECT_GT(constant, 0);
}

TEST(MemoryClaim, ALayerKeepsItsInputOnlyWhereItIsARegion) {
  const StackSpec spec = {.width = 12, .heads = 3, .time = 7, .batch = 2};
  const std::int64_t input = 4 * 14 * 12;
  EXPECT_EQ(expected_growth(spec, {.every = 1}).slope, input);
  const auto state = at::globalContext().defaultGenerator(at::kCPU).get_state();
  EXPECT_EQ(expected_growth(spec, {.every = 1, .keeps_random_state = true}).slope,
            input + 2 * static_cast<std::int64_t>(state.nbytes()));
  EXPECT_EQ(expected_growth(spec, {}).slope, 16 * input + 4 * (2 * 3) * 7 * 7 + 2 * 8 * 14);
}

TEST(MemoryClaim, ExponentsOfAFitLieBetweenTheClosedFormsSlopes) {
  for (const double exponent : {1.0, 0.5}) {
    for (const double a : {-5.0, 0.0, 700.0}) {
      std::vector<std::pair<double, double>> points;
      for (const double layers : {16.0, 25.0, 64.0, 256.0}) {
        points.emplace_back(layers, a + 30 * std::pow(layers, exponent));
      }
      const auto [least, most] = exponents_between(a, 30, exponent, 16, 256);
      const auto fit = fit_power(points);
      EXPECT_LE(least, fit.slope + 1e-12);
      EXPECT_GE(most, fit.slope - 1e-12);
      if (a == 0) {
        EXPECT_NEAR(fit.slope, exponent, 1e-12);
        EXPECT_NEAR(fit.half_width, 0, 1e-6);
      }
    }
  }
}

TEST(LineFit, SlopeAndIntervalAreThoseOfATextbook) {
  // Anscombe 1973, the first set: slope 0.500 with standard error 0.1179, 9 degrees of freedom.
  const auto fit = fit_line({{10, 8.04},
                             {8, 6.95},
                             {13, 7.58},
                             {9, 8.81},
                             {11, 8.33},
                             {14, 9.96},
                             {6, 7.24},
                             {4, 4.26},
                             {12, 10.84},
                             {7, 4.82},
                             {5, 5.68}});
  EXPECT_NEAR(fit.slope, 0.5001, 1e-4);
  EXPECT_NEAR(fit.intercept, 3.0001, 1e-4);
  EXPECT_NEAR(fit.half_width, 2.2622 * 0.1179, 1e-4);
  EXPECT_NEAR(student_t_975(1), 12.7062, 1e-4);
  EXPECT_NEAR(student_t_975(3), 3.1824, 1e-4);
  EXPECT_NEAR(student_t_975(30), 2.0423, 1e-4);
  EXPECT_THROW(fit_line({{1, 2}, {2, 3}}), std::invalid_argument);
  EXPECT_THROW(fit_line({{1, 2}, {1, 3}, {1, 4}}), std::invalid_argument);
}

TEST(Sections, HoldAllTheirChecksAndNameTheirFigures) {
  ClaimsOptions options;
  options.quick = true;
  std::set<std::string> parts;
  options.progress = [&](const std::string& part) { parts.insert(part); };
  for (const auto section : {compute_section, memory_section}) {
    const auto result = section(options);
    EXPECT_FALSE(result.checks.empty());
    std::set<std::string> names;
    for (const auto& check : result.checks) {
      EXPECT_TRUE(check.held) << check.name << ": " << check.message;
      EXPECT_TRUE(names.insert(check.name).second) << check.name;
      EXPECT_TRUE(check.name.starts_with("claims." + result.id + ".")) << check.name;
    }
    for (const auto& claim : result.claims) {
      EXPECT_TRUE(claim.id.starts_with(result.id + ".")) << claim.id;
      EXPECT_FALSE(claim.evidence.empty());
      EXPECT_EQ(claim.condition.empty(), claim.verdict == "true" || claim.verdict == "false");
    }
    EXPECT_THAT(result.html, testing::HasSubstr("<svg"));
    EXPECT_FALSE(result.data.empty());
  }
  EXPECT_GE(parts.size(), 5u);
}

}  // namespace
}  // namespace shardproof
