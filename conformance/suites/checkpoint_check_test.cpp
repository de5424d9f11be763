// `shardproof checkpoint-check` and what is behind it: modules that may be checkpointed, modules
// that may not, and libraries that are none.

#include <fsdp/errors.h>
#include <fsdp/recomputation_library.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <sstream>

#include "conformance/checkpoint_check.h"
#include "conformance/exit_codes.h"
#include "conformance/suites/run_command.h"

namespace shardproof {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::string refusal(const std::string& library, const std::vector<std::string>& only = {}) {
  try {
    check_library(library, only);
  } catch (const fsdp::UsageError& error) {
    return error.what();
  }
  return "it was taken";
}

std::string refusal_of_broken(const char* how) {
  ::setenv("BROKEN_CASES", how, 1);
  return refusal(SHARDPROOF_BROKEN_CASES);
}

TEST(CheckpointCheck, ALibraryThatIsNoneIsSaidInPlainWords) {
  EXPECT_THAT(refusal("/nowhere/libx.so"),
              HasSubstr("recomputation library /nowhere/libx.so: there is no such file; wanted: "));
  EXPECT_THAT(refusal(SHARDPROOF_BROKEN_BACKEND),
              AllOf(HasSubstr("it has no function fsdp_recomputation_cases"),
                    HasSubstr("fsdp/recomputation_library.h")));
  EXPECT_THAT(refusal_of_broken("throws"), HasSubstr("let an exception through: thrown through C"));
  EXPECT_THAT(refusal_of_broken("throws_an_int"), HasSubstr("of a type that is no std::exception"));
  EXPECT_THAT(refusal_of_broken("none"), HasSubstr("gave no case; wanted: one or more"));
  EXPECT_THAT(refusal_of_broken("unnamed"), HasSubstr("a case has no name"));
  EXPECT_THAT(refusal_of_broken("empty"), HasSubstr("a case has no function"));
  EXPECT_THAT(refusal_of_broken("twice"), HasSubstr("two cases are named same"));
  EXPECT_THAT(refusal(SHARDPROOF_CHECKPOINT_CASES, {"block", "blok"}),
              HasSubstr("has no case blok; wanted: block, noisy"));
}

TEST(CheckpointCheck, WhatAModuleThrowsIsItsOwnTroubleAndNoPass) {
  ::setenv("BROKEN_CASES", "well", 1);
  const auto regions = check_library(SHARDPROOF_BROKEN_CASES, {});
  ASSERT_EQ(regions.size(), 1u);
  EXPECT_FALSE(regions[0].holds());
  EXPECT_EQ(regions[0].trouble, "thrown by the module");
  std::ostringstream out;
  print_regions(out, regions);
  EXPECT_THAT(out.str(), AllOf(HasSubstr("failed"), HasSubstr("thrown by the module")));
}

TEST(CheckpointCheck, EveryLayerOfEveryModelRecomputesWhatItStored) {
  for (const auto* kind : {"transformer", "mlp", "quirks"}) {
    for (const auto* dtype : {"float32", "bfloat16"}) {
      Scenario scenario;
      scenario.model.kind = kind;
      scenario.model.width = scenario.model.kind == "transformer" ? 16 : scenario.model.width;
      scenario.model.heads = scenario.model.kind == "transformer" ? 2 : scenario.model.heads;
      scenario.model.dropout = scenario.model.kind == "quirks" ? 0 : 0.25;
      scenario.data.kind = "synthetic";
      scenario.dtype = dtype;
      const auto regions = check_layers(scenario);
      EXPECT_GE(regions.size(), 3u) << kind;
      for (const auto& region : regions) {
        EXPECT_TRUE(region.holds()) << kind << " " << region.name << region.trouble;
        EXPECT_GT(region.report.bytes, 0) << kind << " " << region.name;
      }
    }
  }
}

TEST(CheckpointCheck, ALayerThatNeverRunsShowsNothingAndIsNoPass) {
  Scenario scenario;
  scenario.model.kind = "quirks";
  scenario.model.quirks = {"unused"};
  scenario.data.kind = "synthetic";
  const auto regions = check_layers(scenario);
  EXPECT_EQ(regions.back().name, "spare_layer");
  EXPECT_FALSE(regions.back().holds());
  std::ostringstream out;
  print_regions(out, regions);
  EXPECT_THAT(out.str(), HasSubstr("nothing saved"));
}

TEST(CheckpointCheckCommand, PassesTheModelAndNamesTheModuleThatDiffers) {
  const auto model = shardproof("checkpoint-check --width 16 --heads 2 --dropout 0.1");
  EXPECT_EQ(model.code, kExitHeld) << model.text;
  EXPECT_THAT(model.text, HasSubstr("PASSED: 4 of 4 regions recompute what they stored"));
  const std::string library =
      std::string("checkpoint-check --library ") + SHARDPROOF_CHECKPOINT_CASES;
  const auto both = shardproof(library);
  EXPECT_EQ(both.code, kExitFailed) << both.text;
  EXPECT_THAT(both.text,
              AllOf(HasSubstr("noisy\n  saved tensor 0 (aten::tanh): element 0 of [4, 32] was "),
                    HasSubstr("128 of 128 elements differ"), HasSubstr("FAILED: 1 of 2 regions")));
  const auto one = shardproof(library + " --case block");
  EXPECT_EQ(one.code, kExitHeld) << one.text;
}

TEST(CheckpointCheckCommand, RefusesNonsense) {
  for (const auto& [arguments, wanted] : std::vector<std::pair<std::string, std::string>>{
           {"--case block", "--case is given without --library"},
           {"--librari x",
            "there is no option --librari, perhaps --library is meant; see "
            "shardproof checkpoint-check --help"},
           {"--library", "--library has no value after it"},
           {"--dtype float8", "dtype is \"float8\""},
           {"--world 2", "there is no option --world"},
           {"words", "\"words\" belongs to no option"}}) {
    const auto ended = shardproof("checkpoint-check " + arguments);
    EXPECT_EQ(ended.code, kExitUsage) << arguments << ": " << ended.text;
    EXPECT_THAT(ended.text, HasSubstr(wanted)) << arguments;
  }
}

}  // namespace
}  // namespace shardproof
