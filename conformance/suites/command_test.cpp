// The shardproof command as a user meets it: what it prints, what it ends with, and what it says
// about bad input.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torch/torch.h>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "conformance/exit_codes.h"
#include "conformance/suites/run_command.h"
#include "conformance/suites/temporary_folder.h"
#include "conformance/trace_io.h"
#include "reference/models.h"
#include "reference/scenario.h"

namespace shardproof {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;

std::string slurp(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
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

TEST_F(Command, WritesIntoTheReportWhereAFaultStruck) {
  const auto report = folder_.path() / "report";
  const auto ended = shardproof(kTiny + "--fault sum_instead_of_mean --report " + report.string());
  ASSERT_EQ(ended.code, kExitFailed) << ended.text;
  std::ifstream file(report / "summary.json");
  const auto summary = nlohmann::json::parse(file);
  EXPECT_EQ(summary.at("fault"), "sum_instead_of_mean");
  const auto& strikes = summary.at("strikes");
  EXPECT_GT(strikes.at("count").get<int>(), 3 * 2) << "in 3 steps on 2 ranks";
  const auto& first = strikes.at("first");
  EXPECT_EQ(first.at("step"), 0);
  EXPECT_EQ(first.at("rank"), 0) << "of the ranks that a step struck, the first";
  EXPECT_EQ(first.at("quantity"), "gradient");
  EXPECT_EQ(first.at("element"), -1) << "all elements";
  // What is said on the terminal is said on the page.
  const auto said = "sum_instead_of_mean struck " + strikes.at("count").dump() +
                    " times; first at step 0, rank 0: gradient " +
                    first.at("name").get<std::string>();
  EXPECT_THAT(ended.text, HasSubstr("planted: " + said + "\n"));
  EXPECT_THAT(slurp(report / "report.html"), HasSubstr(said));
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
  const auto written = nlohmann::json::parse(summary);
  EXPECT_EQ(written.at("outcome"), "passed");
  EXPECT_EQ(written.at("strikes"), nlohmann::json::parse(R"({"count": 0, "first": null})"));
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
    write("large_number.json", R"({"model": {"dropout": 0}, "max_norm": 1e999})");
    write("array.json", "[1, 2]");
    write("cut_short.json", "{\"seed\": 1");
    write("not_utf8.json", "{\"device\": \"\xff\"}");
    write("other_schema.json", R"({"schema": "shardproof.scenario/999"})");
    write("foreign.safetensors", "this is no safetensors file, not at all");
    write("truncated.safetensors", std::string("\xff\xff\x00\x00\x00\x00\x00\x00{", 9));
    write("report_file", "a file where a folder is wanted");
    write("not\xffutf8", std::string(1000, 'a'));
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
  EXPECT_THAT(ended.text, Not(HasSubstr("json.exception"))) << "the library's words";
}

const std::string kSmall =
    "--layers 1 --width 16 --heads 2 --context 8 --data synthetic --batch 2 --world 2 --steps 3 "
    "--max-norm 0.1 ";

INSTANTIATE_TEST_SUITE_P(
    Each, BadInputs,
    testing::Values(
        BadInput{"UnknownOption", "--wrold 4", {"no option --wrold, perhaps --world is meant"}},
        BadInput{"UnknownOptionWithAValue",
                 "--sceanrio=FOLDER/x",
                 {"no option --sceanrio, perhaps --scenario is meant; see shardproof run --help"}},
        BadInput{"UnknownOptionLikeNone", "--verbose", {"no option --verbose; see"}},
        BadInput{"StrayWord", "transformer", {"\"transformer\" belongs to no option; see"}},
        BadInput{
            "OptionTwice", "--seed 1 --seed 2", {"--seed is given 2 times; wanted: once; see"}},
        BadInput{"OptionTwiceByTwoNames",
                 "--world 2 --world-size 2",
                 {"--world or --world-size is given 2 times; wanted: once; see"}},
        BadInput{"OptionWithoutAValue",
                 "--world",
                 {"--world has no value after it; wanted: a value (ranks, 1 to 512); see"}},
        BadInput{"FlagWithAValue", "--quiet=no", {"--quiet takes no value; see"}},
        BadInput{"NumberTooLargeInAScenario",
                 "--scenario FOLDER/large_number.json",
                 {"scenario FOLDER/large_number.json: field \"max_norm\": the number 1e999 is too "
                  "large for a double; wanted: "}},
        BadInput{"ScenarioIsAnArray",
                 "--scenario FOLDER/array.json",
                 {"scenario FOLDER/array.json: the scenario is [1,2]; wanted: an object\n"}},
        BadInput{"ScenarioCutShort",
                 "--scenario FOLDER/cut_short.json",
                 {"line 1, column 11: not valid JSON: unexpected end of input; expected"}},
        BadInput{"ScenarioNotUtf8",
                 "--scenario FOLDER/not_utf8.json",
                 {"line 1, column 13: not valid JSON", "\\xff"}},
        BadInput{"FileNameNotUtf8",
                 "--print-scenario --corpus FOLDER/$(printf 'not\\377utf8')",
                 {"data.corpus has the file", "whose name is not UTF-8; wanted: another name"}},
        BadInput{"TextForAnMlp",
                 "--model mlp --data bytes",
                 {"data.kind is \"bytes\"; wanted: \"synthetic\", because model.kind is \"mlp\""}},
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
        BadInput{"WorldSizeNoNumber",
                 "--world four",
                 {"--world is four; wanted: a whole number (ranks, 1 to 512)\n"}},
        BadInput{"WorldSizeNotWhole",
                 "--world 1.5",
                 {"--world is 1.5; wanted: a whole number (ranks, 1 to 512)\n"}},
        BadInput{"WorldSizePastEveryNumber", "--world 99999999999", {"--world is 99999999999"}},
        BadInput{"SizesNoNumber", "--model mlp --sizes 3 x", {"--sizes is x; wanted: a whole"}},
        BadInput{"LearningRateNoNumber", "--lr fast", {"--lr is fast; wanted: a number"}},
        BadInput{"LearningRatePastEveryNumber", "--lr 1e999", {"--lr is 1e999; wanted: a number"}},
        BadInput{"TimeoutZero", "--timeout 0", {"--timeout is 0; wanted: from 1 to 86400 s"}},
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

TEST_F(Command, WithoutACommandItSaysWhichThereAre) {
  for (const auto& [arguments, wanted] : std::vector<std::pair<std::string, std::string>>{
           {"",
            "no command is given; wanted: shardproof run, shardproof claims or shardproof "
            "checkpoint-check"},
           {"foo",
            "there is no command foo; wanted: shardproof run, shardproof claims or shardproof "
            "checkpoint-check"},
           {"x --sceanrio a",
            "there is no command x; wanted: shardproof run, shardproof claims or shardproof "
            "checkpoint-check"},
           {"--quiet", "--quiet stands where a command is wanted: shardproof run --quiet ..."}}) {
    const auto ended = shardproof(arguments);
    EXPECT_EQ(ended.code, kExitUsage) << arguments;
    EXPECT_EQ(ended.text, "shardproof: " + wanted + "; see shardproof --help\n");
  }
  const auto ended = shardproof("run run --print-scenario");
  EXPECT_EQ(ended.code, kExitUsage) << ended.text;
}

TEST_F(Command, AByteOrderMarkDoesNoHarm) {
  const auto file = write("marked.json", "\xef\xbb\xbf{\"world_size\": 3}");
  const auto ended = shardproof("run --print-scenario --scenario " + file.string());
  EXPECT_EQ(ended.code, kExitHeld) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("\"world_size\": 3"));
}

TEST_F(Command, APythonThatCannotBeUsedIsOneClearMessage) {
  const auto none = (folder_.path() / "no_python").string();
  const auto without_packages = write("bare", "#!/bin/sh\nexec python3 -S \"$@\"\n").string();
  fs::permissions(without_packages, fs::perms::owner_all);
  const std::string wanted = "; wanted: a Python that has torch ";
  const std::string cure =
      "Name one with --python or SHARDPROOF_PYTHON, or go without with --no-python\n";
  for (const auto& [python, parts] : std::vector<std::pair<std::string, std::vector<std::string>>>{
           {none, {"there is no program " + none + wanted, cure}},
           {"/bin/true", {"/bin/true exited with code 0 without an answer" + wanted, cure}},
           {"/bin/echo", {"/bin/echo answered \"/", wanted, cure}},
           {without_packages,
            {" cannot import torch (",
             "name a Python that has them with --python or SHARDPROOF"}}}) {
    const auto ended = shardproof("run --quiet --python " + python + " " + kSmall);
    EXPECT_EQ(ended.code, kExitUsage) << ended.text;
    for (const auto& part : parts) {
      EXPECT_THAT(ended.text, HasSubstr(part));
    }
    EXPECT_EQ(ended.text.rfind("shardproof: the Python reference cannot be run: ", 0), 0u)
        << ended.text;
    EXPECT_EQ(std::count(ended.text.begin(), ended.text.end(), '\n'), 1) << ended.text;
  }
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

// ---- Ended by a signal --------------------------------------------------------------------------

std::vector<std::string> entries_of(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  return names;
}

/// Processes whose command line has the text in it.
int processes_with(const std::string& text) {
  int count = 0;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const auto name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") == std::string::npos &&
        slurp(entry.path() / "cmdline").find(text) != std::string::npos) {
      ++count;
    }
  }
  return count;
}

bool comes_true(const std::function<bool()>& condition, std::chrono::seconds within) {
  const auto deadline = std::chrono::steady_clock::now() + within;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return true;
}

struct SentSignal {
  int number;
  const char* name;
  bool python;
};

std::ostream& operator<<(std::ostream& out, const SentSignal& sent) {
  return out << sent.name;
}

class SignalledCommand : public Command, public testing::WithParamInterface<SentSignal> {
 protected:
  fs::path temporary() const { return folder_.path() / "temporary"; }
  fs::path results() const { return folder_.path() / "results"; }
  std::string said() const { return slurp(folder_.path() / "said"); }

  void SetUp() override {
    fs::create_directory(temporary());
    fs::create_directory(results());
  }

  /// Starts a run that would take minutes. `before` is shell text.
  void start(const std::string& arguments, const std::string& before = "") {
    const auto line =
        before + " TMPDIR=" + temporary().string() + " exec " + SHARDPROOF_COMMAND +
        " run --layers 1 --width 16 --heads 2 --context 8 --data synthetic --batch 2 --world 2 "
        "--max-norm 0.1 --steps 200000 --report " +
        (results() / "report").string() + " " + arguments + " >" +
        (folder_.path() / "said").string() + " 2>&1";
    pid_ = ::fork();
    if (pid_ == 0) {
      for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
        ::signal(signal, SIG_DFL);
      }
      ::execl("/bin/sh", "sh", "-c", line.c_str(), static_cast<char*>(nullptr));
      ::_exit(127);
    }
    ASSERT_TRUE(comes_true([&] { return said().find("step 2/") != std::string::npos; },
                           std::chrono::seconds(60)))
        << said();
  }
  bool has_ended(std::chrono::seconds within) {
    return comes_true(
        [&] {
          int status = 0;
          if (!status_ && ::waitpid(pid_, &status, WNOHANG) == pid_) {
            status_ = status;
          }
          return status_.has_value();
        },
        within);
  }
  void TearDown() override {
    if (pid_ > 0 && !status_) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
  }

  ::pid_t pid_ = -1;
  std::optional<int> status_;
};

TEST_P(SignalledCommand, LeavesNothingBehindAndEndsByTheSignal) {
  const auto& sent = GetParam();
  start(sent.python ? "" : "--no-python");
  if (HasFatalFailure()) {
    return;
  }
  // What must go is there.
  ASSERT_EQ(entries_of(temporary()).size(), 1u);
  ASSERT_EQ(entries_of(results()), std::vector{".report.partial-" + std::to_string(pid_)});
  ASSERT_EQ(processes_with(temporary().string()), sent.python ? 1 : 0);

  ::kill(pid_, sent.number);
  ASSERT_TRUE(has_ended(std::chrono::seconds(20))) << said();
  EXPECT_TRUE(WIFSIGNALED(*status_)) << *status_;
  EXPECT_EQ(WTERMSIG(*status_), sent.number);
  EXPECT_EQ(entries_of(temporary()), std::vector<std::string>());
  EXPECT_EQ(entries_of(results()), std::vector<std::string>());
  EXPECT_EQ(processes_with(temporary().string()), 0);
  const auto text = said();
  const auto last =
      "\nshardproof: ended by " + std::string(sent.name) + "; no report was written\n";
  EXPECT_TRUE(text.ends_with(last))
      << text.substr(text.size() - std::min<std::size_t>(text.size(), 1000));
  EXPECT_EQ(text.find("shardproof: "), text.size() - last.size() + 1) << "it says more than that";
}

INSTANTIATE_TEST_SUITE_P(
    Each, SignalledCommand,
    testing::Values(SentSignal{SIGINT, "SIGINT", true}, SentSignal{SIGTERM, "SIGTERM", true},
                    SentSignal{SIGHUP, "SIGHUP", true}, SentSignal{SIGINT, "SIGINT", false},
                    SentSignal{SIGTERM, "SIGTERM", false}, SentSignal{SIGHUP, "SIGHUP", false}),
    [](const auto& info) {
      return std::string(info.param.name) + (info.param.python ? "WithPython" : "WithoutPython");
    });

}  // namespace
}  // namespace shardproof
