// The shardproof command as a user meets it: what it prints, what it ends with, and what it says
// about bad input.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torch/torch.h>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "conformance/exit_codes.h"
#include "conformance/suites/temporary_folder.h"
#include "conformance/trace_io.h"
#include "reference/models.h"
#include "reference/scenario.h"

namespace shardproof {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

struct Ended {
  int code = -1;     // exit code; 1000 + signal if killed
  std::string text;  // stdout and stderr
};

/// Runs the command through the shell with a deadline, so that a hang is a failure (124) and not a
/// wait. A deadline of ours that expires ends with 137, which no run of ours does.
Ended shardproof(const std::string& arguments, const std::string& before = "") {
  const auto command =
      before + " timeout -s KILL 120 " + SHARDPROOF_COMMAND + " " + arguments + " 2>&1";
  Ended ended;
  auto* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) {
    ADD_FAILURE() << "popen failed";
    return ended;
  }
  char buffer[4096];
  while (const auto got = fread(buffer, 1, sizeof buffer, pipe)) {
    ended.text.append(buffer, got);
  }
  const int status = pclose(pipe);
  ended.code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  return ended;
}

/// A run that takes a second.
const std::string kTiny =
    "run --layers 1 --width 16 --heads 2 --context 8 --data synthetic --batch 2 --world 2 --steps "
    "3 --max-norm 0.1 --no-python --quiet ";

class Command : public testing::Test {
 protected:
  fs::path write(const std::string& name, const std::string& text) {
    const auto path = folder_.path() / name;
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }
  TemporaryFolder folder_;
};

TEST_F(Command, HoldsForACleanRunAndPrintsATable) {
  const auto ended = shardproof(kTiny);
  EXPECT_EQ(ended.code, kExitHeld) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("clipped_gradient"));
  EXPECT_THAT(ended.text, HasSubstr("exact"));
}

TEST_F(Command, HoldsWithThePythonReference) {
  const auto ended = shardproof(
      "run --layers 1 --width 16 --heads 2 --context 8 --data synthetic --batch 2 --world 2 "
      "--steps 3 "
      "--max-norm 0.1 --quiet");
  EXPECT_EQ(ended.code, kExitHeld) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("python"));
}

TEST_F(Command, NamesThePlaceOfAFlippedBit) {
  const auto ended = shardproof(kTiny + "--fault flipped_bit");
  EXPECT_EQ(ended.code, kExitFailed) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("gradient"));
  EXPECT_THAT(ended.text, testing::ContainsRegex("step +2"));
  EXPECT_THAT(ended.text, testing::ContainsRegex("rank +1"));
  EXPECT_THAT(
      ended.text,
      HasSubstr("planted: flipped_bit struck 1 time; first at step 2, rank 1: gradient blocks.0."));
}

TEST_F(Command, EndsOneForEachPlantedFault) {
  for (const std::string fault : {"local_norm_clipping", "sum_instead_of_mean", "flipped_bit"}) {
    EXPECT_EQ(shardproof(kTiny + "--fault " + fault).code, kExitFailed) << fault;
  }
}

TEST_F(Command, ASecondRunFromAPrintedScenarioIsTheSame) {
  const auto printed = shardproof(kTiny + "--print-scenario");
  ASSERT_EQ(printed.code, kExitHeld) << printed.text;
  const auto file = write("scenario.json", printed.text);
  const auto again = shardproof("run --print-scenario --scenario " + file.string());
  EXPECT_EQ(again.text, printed.text);
  const auto changed = shardproof("run --print-scenario --world 7 --scenario " + file.string());
  EXPECT_THAT(changed.text, HasSubstr("\"world_size\": 7"));
}

TEST_F(Command, WritesResultsThatEachNameTheirCheckAndRule) {
  const auto report = folder_.path() / "report";
  const auto ended = shardproof(kTiny + "--report " + report.string());
  ASSERT_EQ(ended.code, kExitHeld) << ended.text;
  std::ifstream results(report / "results.jsonl");
  int lines = 0;
  for (std::string line; std::getline(results, line); ++lines) {
    const auto verdict = nlohmann::json::parse(line);
    EXPECT_TRUE(verdict.contains("check") && verdict.contains("rule") &&
                verdict.contains("outcome"))
        << line;
    EXPECT_EQ(verdict.at("check").get<std::string>().rfind("fsdp.", 0), 0u) << line;
  }
  EXPECT_GT(lines, 100);
  std::ifstream summary(report / "summary.json");
  EXPECT_EQ(nlohmann::json::parse(summary).at("outcome"), "passed");
  EXPECT_TRUE(fs::exists(report / "report.html"));
}

TEST_F(Command, HelpShowsExamplesAndExitCodes) {
  const auto help = shardproof("run --help");
  EXPECT_EQ(help.code, kExitHeld);
  EXPECT_THAT(help.text, HasSubstr("Examples:"));
  EXPECT_THAT(help.text, HasSubstr("124 timed out"));
  EXPECT_EQ(shardproof("--version").code, kExitHeld);
}

struct BadInput {
  const char* name;
  std::string arguments;            // after "run"; FOLDER stands for the test's folder
  std::vector<std::string> wanted;  // in the message
  int code = kExitUsage;
};

std::ostream& operator<<(std::ostream& out, const BadInput& bad) {
  return out << bad.arguments;
}

class BadInputs : public Command, public testing::WithParamInterface<BadInput> {
 protected:
  void SetUp() override {
    write("empty.txt", "");
    write("short.txt", "ten bytes.");
    write("unknown_field.json", R"({"world_sise": 4})");
    write("unknown_inner.json", R"({"model": {"layres": 4}})");
    write("wrong_type.json", R"({"world_size": "four"})");
    write("not_json.json", "{\n  \"seed\": 1,,\n}");
    write("other_schema.json", R"({"schema": "shardproof.scenario/999"})");
    write("foreign.safetensors", "this is no safetensors file, not at all");
    write("truncated.safetensors", std::string("\xff\xff\x00\x00\x00\x00\x00\x00{", 9));
    write("report_file", "a file where a folder is wanted");
    fs::create_directory(folder_.path() / "not_ours");
    write("not_ours/summary.json", "{}");
    Scenario scenario;
    scenario.model.layers = 1;
    scenario.model.width = 16;
    scenario.model.heads = 2;
    scenario.model.context = 8;
    scenario.data.kind = "synthetic";
    SafetensorsFile weights{initial_parameters(scenario), {}};
    weights.tensors["head.weight"] = weights.tensors["head.weight"].clone();
    weights.tensors["head.weight"][3][5] = std::numeric_limits<float>::quiet_NaN();
    write_safetensors(folder_.path() / "nan.safetensors", weights);
    weights.tensors["head.weight"] = torch::zeros({2, 2});
    write_safetensors(folder_.path() / "misshapen.safetensors", weights);
    weights.tensors.erase("head.weight");
    write_safetensors(folder_.path() / "missing.safetensors", weights);
  }

  std::string filled(std::string text) const {
    for (auto at = text.find("FOLDER"); at != std::string::npos; at = text.find("FOLDER")) {
      text.replace(at, 6, folder_.path().string());
    }
    return text;
  }
};

TEST_P(BadInputs, EndsWithOneClearMessageAndTheRightCode) {
  const auto& bad = GetParam();
  const auto ended = shardproof(filled("run --no-python --quiet " + bad.arguments));
  EXPECT_EQ(ended.code, bad.code) << ended.text;
  for (const auto& wanted : bad.wanted) {
    EXPECT_THAT(ended.text, HasSubstr(filled(wanted)));
  }
  EXPECT_EQ(ended.text.rfind("shardproof: ", 0), 0u) << ended.text;
  EXPECT_LT(std::count(ended.text.begin(), ended.text.end(), '\n'), 12) << ended.text;
}

const std::string kSmall =
    "--layers 1 --width 16 --heads 2 --context 8 --data synthetic --batch 2 --world 2 --steps 3 "
    "--max-norm 0.1 ";

INSTANTIATE_TEST_SUITE_P(
    Each, BadInputs,
    testing::Values(
        BadInput{"UnknownOption", "--wrold 4", {"--wrold"}},
        BadInput{"UnknownField",
                 "--scenario FOLDER/unknown_field.json",
                 {"world_sise", "unknown_field.json"}},
        BadInput{"UnknownInnerField", "--scenario FOLDER/unknown_inner.json", {"model.layres"}},
        BadInput{"WrongType", "--scenario FOLDER/wrong_type.json", {"world_size"}},
        BadInput{"MalformedJson", "--scenario FOLDER/not_json.json", {"not_json.json", "line 2"}},
        BadInput{"OtherSchema", "--scenario FOLDER/other_schema.json", {"shardproof.scenario/999"}},
        BadInput{"MissingScenario", "--scenario FOLDER/nowhere.json", {"FOLDER/nowhere.json"}},
        BadInput{"WorldSizeZero", "--world 0", {"world_size", "0"}},
        BadInput{"WorldSizeTooLarge", "--world 513", {"world_size", "513", "512"}},
        BadInput{"WorldSizeNoNumber", "--world four", {"four"}},
        BadInput{"NegativeSteps", "--steps -1", {"steps", "-1"}},
        BadInput{"HeadsDoNotDivide", "--width 30 --heads 4", {"heads", "30"}},
        BadInput{"DropoutOne", "--dropout 1", {"dropout"}},
        BadInput{"NegativeNorm", "--max-norm -1", {"max_norm"}},
        BadInput{"NanLearningRate", "--lr nan", {"lr"}},
        BadInput{"EmptyValue", "--fault ''", {"--fault", "empty"}},
        BadInput{"NegativeSeed", "--seed=-1", {"-1", "2^64"}},
        BadInput{"SeedTooLarge", "--seed 18446744073709551616", {"18446744073709551616"}},
        BadInput{"NormTooSmallForTheDtype", "--max-norm 1e-45", {"max_norm", "float32"}},
        BadInput{"LearningRateTooLargeForTheDtype", "--lr 1e38", {"optimizer.lr", "float32"}},
        BadInput{"CorpusIsADevice", "--corpus /dev/zero", {"/dev/zero"}},
        BadInput{"UnknownModel", "--model resnet", {"resnet", "transformer"}},
        BadInput{"UnknownOptimizer", "--optimizer lion", {"lion", "adamw"}},
        BadInput{"UnknownStrategy", "--strategy zero_nine", {"zero_nine", "full_shard"}},
        BadInput{"UnknownBackend", "--backend carrier_pigeon", {"carrier_pigeon", "in_process"}},
        BadInput{"UnknownFault", kSmall + "--fault gremlin", {"gremlin", "flipped_bit"}},
        BadInput{"CorpusMissing", "--corpus FOLDER/nowhere.txt", {"FOLDER/nowhere.txt"}},
        BadInput{"CorpusEmpty", "--corpus FOLDER/empty.txt", {"0 bytes"}},
        BadInput{"CorpusTooShort", "--corpus FOLDER/short.txt", {"10 bytes", "64"}},
        BadInput{"WeightsMissing",
                 kSmall + "--weights FOLDER/nowhere.safetensors",
                 {"FOLDER/nowhere.safetensors"}},
        BadInput{"WeightsForeign",
                 kSmall + "--weights FOLDER/foreign.safetensors",
                 {"FOLDER/foreign.safetensors"}},
        BadInput{"WeightsTruncated",
                 kSmall + "--weights FOLDER/truncated.safetensors",
                 {"FOLDER/truncated.safetensors"}},
        BadInput{"WeightsNan",
                 kSmall + "--weights FOLDER/nan.safetensors",
                 {"FOLDER/nan.safetensors", "head.weight", "nan"}},
        BadInput{"WeightsMisshapen",
                 kSmall + "--weights FOLDER/misshapen.safetensors",
                 {"head.weight", "[2, 2]"}},
        BadInput{
            "WeightsIncomplete", kSmall + "--weights FOLDER/missing.safetensors", {"head.weight"}},
        BadInput{"ReportIsAFile", kSmall + "--report FOLDER/report_file", {"FOLDER/report_file"}},
        BadInput{"ReportIsAnotherFolder", kSmall + "--report FOLDER/not_ours", {"FOLDER/not_ours"}},
        BadInput{"ReportUnwritable",
                 kSmall + "--report /proc/shardproof_report",
                 {"/proc/shardproof_report"}},
        BadInput{"TrainingBlowsUp",
                 "--layers 1 --width 16 --heads 2 --context 8 --data synthetic --steps 3 "
                 "--optimizer sgd --lr 1e17 --max-norm 0",
                 {"the loss of step", "rank"}}),
    [](const auto& info) { return info.param.name; });

TEST_F(Command, APythonThatDoesNotAnswerIsATimeout) {
  const auto program = write("sleeper", "#!/bin/sh\nexec sleep 100\n");
  fs::permissions(program, fs::perms::owner_all);
  const auto ended =
      shardproof("run --quiet --timeout 1 --python " + program.string() + " " + kSmall);
  EXPECT_EQ(ended.code, kExitTimedOut) << ended.text;
}

TEST_F(Command, OutputThatCannotBeWrittenIsNoPass) {
  const auto ended = shardproof(kTiny + "2>&1 >/dev/full");
  EXPECT_EQ(ended.code, kExitBroken) << ended.text;
}

TEST_F(Command, MissingPythonIsOneClearMessage) {
  const auto ended =
      shardproof("run --quiet --python " + (folder_.path() / "no_python").string() + " " + kSmall);
  EXPECT_EQ(ended.code, kExitBroken) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("no_python"));
}

TEST_F(Command, ADiskThatIsFullLosesNothingHalfWritten) {
  const auto mount = folder_.path() / "disk";
  fs::create_directory(mount);
  const auto mounted =
      std::system(("mount -t tmpfs -o size=64k tmpfs " + mount.string() + " 2>/dev/null").c_str());
  if (mounted != 0) {
    GTEST_SKIP() << "mounting a small disk needs root";
  }
  const auto ended = shardproof(kTiny + "--report " + (mount / "report").string());
  const bool left_over = fs::exists(mount / "report") || !fs::is_empty(mount);
  std::system(("umount " + mount.string()).c_str());
  EXPECT_EQ(ended.code, kExitUsage) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("report"));
  EXPECT_FALSE(left_over);
}

}  // namespace
}  // namespace shardproof
