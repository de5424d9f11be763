// The proof that each fault is caught, at the place where it strikes, and that a clean run raises
// nothing.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "conformance/comparison.h"
#include "conformance/session.h"
#include "fault_injection/catalogue.h"

namespace shardproof {
namespace {

Scenario small_scenario(int world_size, const std::string& optimizer) {
  Scenario scenario;
  scenario.model.layers = 2;
  scenario.model.width = 32;
  scenario.model.heads = 2;
  scenario.model.context = 8;
  scenario.data.kind = "synthetic";
  scenario.world_size = world_size;
  scenario.batch = 2;
  scenario.steps = 4;
  scenario.max_norm = 0.1;
  scenario.optimizer.kind = optimizer;
  scenario.optimizer.momentum = optimizer == "sgd" ? 0.9 : 0;
  scenario.optimizer.lr = 0.01;
  return scenario;
}

RunSummary run_with(const Scenario& scenario, const Fault* fault) {
  SessionOptions options;
  options.scenario = scenario;
  options.fault = fault;
  options.python = false;
  options.timeout = std::chrono::seconds(60);
  return run_session(options);
}

class EachFault : public testing::TestWithParam<std::string> {};

TEST_P(EachFault, IsCaughtAtTheStepParameterRankAndElementWhereItStrikes) {
  const auto* fault = find_fault(GetParam());
  ASSERT_NE(fault, nullptr);
  for (const auto* optimizer : {"adamw", "sgd"}) {
    for (const int world_size : {2, 3, 8}) {
      auto scenario = small_scenario(world_size, optimizer);
      if (fault->adapt) {
        fault->adapt(scenario);
      }
      const auto summary = run_with(scenario, fault);
      EXPECT_EQ(summary.outcome, Outcome::failed) << optimizer << " on " << world_size << " ranks";
      ASSERT_TRUE(summary.has_divergence);
      const auto& first = summary.first_divergence;
      const auto text = describe(first);
      ASSERT_FALSE(summary.strikes.empty());
      const bool named =
          std::any_of(summary.strikes.begin(), summary.strikes.end(), [&](const Strike& strike) {
            // Of a region that ran again, the tensor is one of it.
            const bool is_it = strike.quantity == Quantity::recomputed_activation
                                   ? first.name.starts_with(strike.name + "/")
                                   : first.name == strike.name;
            return strike.step == first.step && strike.quantity == first.quantity && is_it &&
                   strike.rank == first.rank &&
                   (strike.element < 0 || strike.element == first.element);
          });
      EXPECT_TRUE(named) << "no strike where the first divergence is: " << text;
      const auto earliest =
          std::min_element(summary.strikes.begin(), summary.strikes.end(),
                           [](const Strike& a, const Strike& b) { return a.step < b.step; });
      EXPECT_EQ(first.step, earliest->step) << text;
      EXPECT_EQ(first.rule, RuleKind::exact) << text;
      EXPECT_NE(first.got, first.want) << text;
      if (GetParam() == "flipped_bit") {
        EXPECT_EQ(summary.strikes.size(), 1u);
        EXPECT_EQ(first.rank, world_size / 2) << text;
        EXPECT_EQ(first.step, 2) << text;
        EXPECT_EQ(first.ulp, 1u) << text;
        EXPECT_EQ(first.differing, 1) << text;
      } else if (GetParam().starts_with("recompute_")) {
        // Once the optimizer has moved the parameters, those of before are stale.
        EXPECT_EQ(first.step, GetParam() == "recompute_stale_parameters" ? 1 : 0) << text;
      } else {
        EXPECT_EQ(first.step, 0) << text;
      }
    }
  }
}

TEST(Catalogue, AFaultThatNeedsMoreThanRanksSaysWhatAndDoesNotStrikeWithoutIt) {
  int count = 0;
  for (const auto& fault : fault_catalogue()) {
    EXPECT_EQ(fault.needs.empty(), fault.adapt == nullptr) << fault.name;
    if (fault.needs.empty()) {
      continue;
    }
    ++count;
    try {
      run_with(small_scenario(2, "adamw"), &fault);
      ADD_FAILURE() << fault.name << " struck";
    } catch (const fsdp::UsageError& error) {
      EXPECT_NE(std::string(error.what()).find(fault.needs), std::string::npos) << error.what();
    }
  }
  EXPECT_GT(count, 0);
}

TEST(Catalogue, AFaultThatCannotStrikeIsRefusedAndNotTakenForAPass) {
  // On one rank the local norm is the global norm, and the sum is the mean.
  for (const auto* name : {"local_norm_clipping", "sum_instead_of_mean"}) {
    EXPECT_THROW(run_with(small_scenario(1, "adamw"), find_fault(name)), fsdp::UsageError) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Catalogue, EachFault, testing::ValuesIn([] {
                           std::vector<std::string> names;
                           for (const auto& fault : fault_catalogue()) {
                             names.push_back(fault.name);
                           }
                           return names;
                         }()),
                         [](const auto& info) { return info.param; });

TEST(Catalogue, ANormThatIsLoggedAndNotUsedIsCaughtInTheClippedGradientsAlone) {
  const auto summary = run_with(small_scenario(4, "sgd"), find_fault("norm_logged_not_used"));
  ASSERT_TRUE(summary.has_divergence);
  EXPECT_EQ(summary.first_divergence.quantity, Quantity::clipped_gradient);
  for (const auto& row : summary.rows) {
    if (row.reference == "replay" && (row.quantity == "gradient" || row.quantity == "total_norm")) {
      EXPECT_EQ(row.failed, 0) << row.quantity;
    }
  }
}

TEST(Catalogue, ReplicasCountedTwiceMakeTheNormTheRootOfTwoTimesTooLarge) {
  auto scenario = small_scenario(4, "sgd");
  const auto* fault = find_fault("replicas_counted_twice");
  fault->adapt(scenario);
  ASSERT_EQ(scenario.replicas, 2);
  const auto summary = run_with(scenario, fault);
  ASSERT_TRUE(summary.has_divergence);
  const auto& first = summary.first_divergence;
  EXPECT_EQ(first.quantity, Quantity::total_norm);
  EXPECT_FLOAT_EQ(static_cast<float>(first.got / first.want), std::sqrt(2.0F));
}

TEST(Catalogue, HoldsTheFaultsThatAreSpokenOf) {
  for (const auto* name :
       {"local_norm_clipping", "sum_instead_of_mean", "flipped_bit", "norm_logged_not_used",
        "replicas_counted_twice", "no_shard_counted_w_times", "epsilon_per_rank",
        "clipped_before_unscaling", "clipped_before_accumulation", "squares_in_float16",
        "one_group_only", "bfloat16_norm_of_norms", "recompute_draws_new_masks",
        "recompute_generator_offset", "recompute_in_bfloat16", "recompute_wrong_layer",
        "recompute_stale_parameters", "recompute_counted_twice"}) {
    EXPECT_NE(find_fault(name), nullptr) << name;
  }
  EXPECT_EQ(find_fault("no_such_fault"), nullptr);
}

TEST(Catalogue, ACleanRunRaisesNothing) {
  for (const auto* optimizer : {"adamw", "sgd"}) {
    for (const int world_size : {2, 3, 8}) {
      const auto summary = run_with(small_scenario(world_size, optimizer), nullptr);
      EXPECT_EQ(summary.outcome, Outcome::passed)
          << optimizer << " on " << world_size << " ranks: "
          << (summary.has_divergence ? describe(summary.first_divergence) : "a guard failed");
    }
  }
}

TEST(Catalogue, ASumInsteadOfAMeanIsCaughtAlthoughAdamHidesItsScale) {
  // Without clipping, AdamW's parameters hardly change when all gradients are scaled: the gradients
  // themselves must tell.
  auto scenario = small_scenario(2, "adamw");
  scenario.max_norm = 0;
  const auto summary = run_with(scenario, find_fault("sum_instead_of_mean"));
  ASSERT_TRUE(summary.has_divergence);
  EXPECT_EQ(summary.first_divergence.quantity, Quantity::gradient);
  EXPECT_DOUBLE_EQ(summary.first_divergence.got, 2 * summary.first_divergence.want);
}

}  // namespace
}  // namespace shardproof
