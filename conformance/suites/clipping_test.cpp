// Clipping by the norm of local shards is wrong, by how much and when; and the norm of this library
// is that of one device, however gradients are spread and sharded.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <limits>
#include <thread>

#include "conformance/clipping_measurement.h"
#include "conformance/clipping_mistakes.h"
#include "conformance/clipping_peers.h"
#include "conformance/python_reference.h"
#include "conformance/suites/temporary_folder.h"

namespace shardproof {
namespace {

void expect_held(const std::vector<Check>& checks) {
  ASSERT_FALSE(checks.empty());
  for (const auto& check : checks) {
    EXPECT_TRUE(check.held) << check.name << ": " << check.message;
  }
}

/// The check of that behaviour.
bool held(const ClippingStep& step, const std::string& behaviour) {
  for (const auto& check : check_clipping(step)) {
    if (check.name.starts_with("claims.clipping." + behaviour + ".")) {
      return check.held;
    }
  }
  ADD_FAILURE() << "there is no check " << behaviour;
  return false;
}

ClippingCase case_of(int world_size, PlantedGradients gradients,
                     const std::string& wrap = "layer") {
  ClippingCase made;
  made.world_size = world_size;
  made.gradients = gradients;
  made.wrap = wrap;
  made.seed = 7;
  made.timeout = std::chrono::seconds(60);
  return made;
}

class EachWorld : public testing::TestWithParam<int> {};

TEST_P(EachWorld, EvenGradientsGiveEachRankOneOverTheRootOfTheWorld) {
  const int world_size = GetParam();
  const auto step = measure_planted(case_of(world_size, PlantedGradients::even));
  expect_held(check_clipping(step));
  // 12480 elements of 2^-6.
  EXPECT_FLOAT_EQ(static_cast<float>(step.true_norm()),
                  static_cast<float>(std::sqrt(12480.0) * 0x1p-6));
  // 65 elements for each of 64 ranks: shares are equal where the ranks divide 64.
  if (64 % world_size == 0) {
    const double want = 1 / std::sqrt(world_size);
    EXPECT_NEAR(step.largest_ratio(), want, want * step.combined_bound());
    EXPECT_NEAR(step.smallest_ratio(), want, want * step.combined_bound());
    // Each rank clips to 1, or, below that, not at all.
    const double length = std::min(std::sqrt(world_size), step.true_norm());
    EXPECT_NEAR(step.wrong_length, length, length * 1e-5);  // the 1e-6 that is added to norms
    EXPECT_LT(step.angle, 1e-5);
  }
}

TEST_P(EachWorld, OneLayerLiesWithAFewRanksWhereTheModelIsOneUnit) {
  const int world_size = GetParam();
  const auto spread = measure_planted(case_of(world_size, PlantedGradients::one_layer, "layer"));
  const auto lumped = measure_planted(case_of(world_size, PlantedGradients::one_layer, "model"));
  expect_held(check_clipping(spread));
  expect_held(check_clipping(lumped));
  EXPECT_EQ(spread.true_norm(), lumped.true_norm());
  if (world_size >= 2) {
    EXPECT_GT(spread.smallest_ratio(), 0);
    EXPECT_EQ(lumped.smallest_ratio(), 0);
    EXPECT_GE(lumped.largest_ratio(), spread.largest_ratio());
  }
}

TEST_P(EachWorld, OneElementIsHeldByOneRankWhoseNormIsTheTrueOne) {
  const auto step = measure_planted(case_of(GetParam(), PlantedGradients::one_element));
  expect_held(check_clipping(step));
  EXPECT_EQ(step.true_norm(), 2);
  EXPECT_EQ(step.largest_ratio(), 1);
  EXPECT_EQ(std::count(step.local_norms.begin(), step.local_norms.end(), 0.0), GetParam() - 1);
  EXPECT_EQ(step.wrong_length, step.right_length);
}

TEST_P(EachWorld, Bfloat16ShardsAreClippedAsOnOneDevice) {
  auto each = case_of(GetParam(), PlantedGradients::one_layer);
  each.dtype = "bfloat16";
  const auto step = measure_planted(each);
  EXPECT_NE(step.name.find("bfloat16"), std::string::npos);
  expect_held(check_clipping(step));
}

TEST_P(EachWorld, TrainingIsClippedAsOnOneDeviceAtEveryStep) {
  const auto run = measure_training(clipping_scenario(GetParam(), "adamw", 3, 7), ClipBy::true_norm,
                                    std::chrono::seconds(60));
  ASSERT_EQ(run.steps.size(), 3U);
  for (const auto& step : run.steps) {
    expect_held(check_clipping(step));
    EXPECT_GT(step.true_norm(), step.max_norm) << "nothing was clipped";
  }
}

INSTANTIATE_TEST_SUITE_P(Clipping, EachWorld, testing::Values(1, 2, 3, 4, 5, 8));

class EachStrategy : public testing::TestWithParam<std::pair<std::string, int>> {};

TEST_P(EachStrategy, HoldsAndCountsEveryElementOnce) {
  const auto& [strategy, replicas] = GetParam();
  const auto whole = measure_planted(case_of(4, PlantedGradients::one_layer));
  for (const auto* dtype : {"float32", "bfloat16"}) {
    auto each = case_of(4, PlantedGradients::one_layer);
    each.strategy = strategy;
    each.replicas = replicas;
    each.dtype = dtype;
    const auto step = measure_planted(each);
    expect_held(check_clipping(step));
    if (step.dtype == "float32") {
      EXPECT_EQ(step.true_norm(), whole.true_norm());
    }
    EXPECT_EQ(step.shards, strategy == "no_shard" ? 1 : 4 / replicas);
  }
}

INSTANTIATE_TEST_SUITE_P(Clipping, EachStrategy,
                         testing::Values(std::pair("full_shard", 1), std::pair("shard_grad_op", 1),
                                         std::pair("no_shard", 1), std::pair("hybrid_shard", 2),
                                         std::pair("hybrid_shard", 4),
                                         std::pair("hybrid_shard_zero2", 2)),
                         [](const auto& info) {
                           return info.param.first + "_replicas" +
                                  std::to_string(info.param.second);
                         });

TEST(Clipping, TheChecksSeeWhatIsWrong) {
  const auto step = measure_planted(case_of(4, PlantedGradients::one_layer));
  auto larger = step;
  larger.local_squares[2] = std::nextafter(step.true_square, 1e9);
  EXPECT_FALSE(held(larger, "local_at_most_true"));
  auto equal = step;
  equal.local_squares[3] = step.true_square;
  EXPECT_TRUE(held(equal, "local_at_most_true"));
  EXPECT_FALSE(held(equal, "equal_only_where_one_rank_holds_everything"));
  auto twice = step;
  for (auto& norm : twice.local_norms) {
    norm *= 1 + 2 * step.combined_bound();
  }
  EXPECT_FALSE(held(twice, "squares_of_local_norms_add_up"));
  auto other = step;
  other.true_norms[3] = std::nextafter(step.true_norm(), 0.0);
  EXPECT_FALSE(held(other, "true_norm_is_that_of_one_device"));
  auto bit = step;
  bit.differing = 1;
  EXPECT_FALSE(held(bit, "clipped_gradients_are_those_of_one_device"));
  auto nothing = step;
  nothing.elements = 0;
  EXPECT_FALSE(held(nothing, "clipped_gradients_are_those_of_one_device"));
}

TEST(Clipping, LocalNormsTurnTheUpdateAndLeadTrainingElsewhere) {
  for (const auto* optimizer : {"sgd", "adamw"}) {
    const auto scenario = clipping_scenario(4, optimizer, 5, 7);
    const auto right = measure_training(scenario, ClipBy::true_norm);
    const auto wrong = measure_training(scenario, ClipBy::local_norms);
    EXPECT_EQ(right.losses.front(), wrong.losses.front());
    EXPECT_NE(right.losses.back(), wrong.losses.back()) << optimizer;
    EXPECT_NE(right.parameters.back(), wrong.parameters.back()) << optimizer;
    // Both clip the same first gradient; the wrong way lets more through, and turned.
    const auto& first = wrong.steps.front();
    EXPECT_EQ(first.true_norm(), right.steps.front().true_norm());
    EXPECT_GT(first.wrong_length, 1.5 * first.right_length);
    EXPECT_GT(first.angle, 1);
  }
}

// ---- Mistakes that look alike -------------------------------------------------------------------

const ClippingMistake& mistake(const std::vector<ClippingMistake>& all, const std::string& id) {
  for (const auto& each : all) {
    if (each.id == id) {
      return each;
    }
  }
  throw std::runtime_error("there is no mistake " + id);
}

TEST(ClippingMistakes, ReportAndDoWhatIsWorkedOutByHand) {
  const auto all = clipping_mistakes();
  const auto near = [&](const std::string& id, double reported, double applied) {
    const auto& each = mistake(all, id);
    EXPECT_NEAR(each.reported, reported, 1e-9 + 1e-9 * reported) << id;
    // The 1e-6 that is added to norms changes no more than that.
    EXPECT_NEAR(each.applied, applied, 1e-6 + 1e-6 * applied) << id;
    EXPECT_NEAR(each.right_applied, 1, 1e-6) << id;
    EXPECT_FALSE(each.outside.empty()) << id;
  };
  near("local_norm_clipping", 3, std::sqrt(2));
  near("norm_logged_not_used", 5, 5);
  near("replicas_counted_twice", 5 * std::sqrt(2), 1 / std::sqrt(2));
  near("no_shard_counted_w_times", 5 * std::sqrt(2), 1 / std::sqrt(2));
  near("epsilon_per_rank", 5 + 1.4e-6, 1);
  near("clipped_before_unscaling", 5120, 1.0 / 1024);
  near("clipped_before_accumulation", 3, std::sqrt(17));
  near("one_group_only", 3, 5.0 / 3);
  near("bfloat16_norm_of_norms", 6.1875, std::sqrt(38) / 6.1875);
  const auto& overflowing = mistake(all, "squares_in_float16");
  EXPECT_EQ(overflowing.reported, std::numeric_limits<double>::infinity());
  EXPECT_EQ(overflowing.applied, 0);
  EXPECT_EQ(all.size(), 10U);
}

TEST(ClippingMistakes, AMeshHasOneNormAndCountingReplicasHasThree) {
  const std::vector<double> values = {3, 4};
  for (const int replicas : {1, 2, 4}) {  // 1x4, 2x2, 4x1
    EXPECT_EQ(mesh_norm(values, replicas, false), 5);
    EXPECT_DOUBLE_EQ(mesh_norm(values, replicas, true), 5 * std::sqrt(replicas));
  }
}

TEST(ClippingMistakes, Float16LosesLargeSquaresAndSmallOnes) {
  EXPECT_EQ(float16_norm({5000}), std::numeric_limits<double>::infinity());
  EXPECT_EQ(float16_norm({255}), std::sqrt(65024));  // 65025 is below 65504, and is rounded
  EXPECT_EQ(float16_norm({0x1p-13}), 0);
  EXPECT_EQ(float16_norm({0x1p-12}), 0x1p-12);
}

TEST(ClippingMistakes, Bfloat16NormsDependOnTheGrouping) {
  EXPECT_EQ(bfloat16_norm_of_norms({{1}, {1, 6}}), 6.1875);
  EXPECT_EQ(bfloat16_norm_of_norms({{1, 1}, {6}}), 6.15625);
  EXPECT_DOUBLE_EQ(norm_of({1, 1, 6}), std::sqrt(38.0));
}

// ---- PyTorch itself -----------------------------------------------------------------------------

TEST(ClippingPeers, ThePlainFunctionIsLocalOnFsdp1AndRightOnFsdp2) {
  PeerOptions options;
  options.world_sizes = {2};
  options.timeout = std::chrono::seconds(120);
  const auto peers = run_clipping_peers(options);
  ASSERT_EQ(peers.worlds.size(), 1U);
  ASSERT_EQ(peers.worlds[0].ways.size(), 5U);
  expect_held(check_peers(peers));
  for (const auto& way : peers.worlds[0].ways) {
    if (way.way != "fsdp2" && way.clip == "plain") {
      EXPECT_NE(way.returned[0], way.returned[1]) << way.way;
      EXPECT_GT(way.after, 1.4 * peers.max_norm) << way.way;
    }
  }
}

TEST(ClippingPeers, TheChecksSeeALocalNormThatIsNot) {
  PeerClipping peers;
  peers.max_norm = 1;
  peers.worlds = {{2,
                   5,
                   {{"fsdp1_flat", "plain", {3, 4}, 10, 1, std::sqrt(2.0)},
                    {"fsdp2", "plain", {5, 5}, 10, 1, 1}}}};
  expect_held(check_peers(peers));
  const auto failures = [](const PeerClipping& changed) {
    const auto checks = check_peers(changed);
    return std::count_if(checks.begin(), checks.end(), [](const Check& c) { return !c.held; });
  };
  auto global = peers;
  global.worlds[0].ways[0].returned = {5, 5};
  EXPECT_EQ(failures(global), 1);
  auto lost = peers;
  lost.worlds[0].ways[0].returned = {3, 3};
  EXPECT_EQ(failures(lost), 1);
  auto local = peers;
  local.worlds[0].ways[1].returned = {3, 4};
  EXPECT_EQ(failures(local), 1);
  auto unclipped = peers;
  unclipped.worlds[0].ways[1].after = 1.4;
  EXPECT_EQ(failures(unclipped), 1);
}

class BrokenPeers : public testing::Test {
 protected:
  /// What comes of running this as the program.
  std::string error_of(const std::string& text, int seconds = 60) {
    const auto program = folder_.path() / "program.py";
    std::ofstream(program) << text;
    PeerOptions options;
    options.program = program;
    options.timeout = std::chrono::seconds(seconds);
    try {
      run_clipping_peers(options);
    } catch (const PythonReferenceTimeout& error) {
      return std::string("timeout: ") + error.what();
    } catch (const PythonUnusable& error) {
      return std::string("unusable: ") + error.what();
    } catch (const PythonReferenceError& error) {
      return std::string("error: ") + error.what();
    }
    return "no error";
  }
  TemporaryFolder folder_;
};

TEST_F(BrokenPeers, AMissingPythonIsUnusable) {
  PeerOptions options;
  options.python = "/no/such/python";
  try {
    run_clipping_peers(options);
    FAIL() << "nothing was thrown";
  } catch (const PythonUnusable& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("/no/such/python"));
    EXPECT_THAT(error.what(), testing::HasSubstr("--no-python"));
  }
}

TEST_F(BrokenPeers, APythonWithoutTorchIsUnusable) {
  EXPECT_THAT(
      error_of("print('{\"error\": \"ModuleNotFoundError: No module named torch\"}')"),
      testing::AllOf(testing::StartsWith("unusable"), testing::HasSubstr("No module named torch")));
}

TEST_F(BrokenPeers, AProgramThatDiesSaysHowAndWhatItWrote) {
  EXPECT_THAT(error_of("import sys; sys.exit('the reason')"),
              testing::AllOf(testing::StartsWith("error"), testing::HasSubstr("exited with code 1"),
                             testing::HasSubstr("the reason")));
}

TEST_F(BrokenPeers, NonsenseAndMissingFieldsAreNamed) {
  EXPECT_THAT(error_of("print('hello')"), testing::HasSubstr("it answered \"hello\""));
  EXPECT_THAT(error_of("print('{\"torch\": \"2.11\"}')"), testing::HasSubstr("fields"));
}

TEST_F(BrokenPeers, AHangingProgramIsEndedWithItsChildren) {
  const auto pid_file = folder_.path() / "pid";
  const auto error = error_of(
      "import subprocess, time\n"
      "child = subprocess.Popen(['sleep', '1000'])\n"
      "open('" +
          pid_file.string() +
          "', 'w').write(str(child.pid))\n"
          "time.sleep(1000)\n",
      3);
  EXPECT_THAT(error, testing::StartsWith("timeout"));
  EXPECT_THAT(error, testing::HasSubstr("within 3 s"));
  std::string pid;
  std::ifstream(pid_file) >> pid;
  ASSERT_FALSE(pid.empty());
  // It is killed a moment later, and perhaps not reaped by whoever inherits it.
  std::string status;
  for (int i = 0; i < 500; ++i) {
    std::ifstream stat("/proc/" + pid + "/stat");
    status.clear();
    std::getline(stat, status);
    if (status.empty() || status.find(") Z ") != std::string::npos) {
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  ADD_FAILURE() << "process " << pid << " still runs: " << status;
}

}  // namespace
}  // namespace shardproof
