// The main job under real launchers, a process for each rank: the command is the same, the trace is
// that of ranks that are threads, to the bit, and what goes wrong ends every rank.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "conformance/exit_codes.h"
#include "conformance/suites/temporary_folder.h"

namespace shardproof {
namespace {

using testing::AllOf;
using testing::HasSubstr;

const std::string kSmall =
    " run --layers 2 --width 16 --heads 2 --context 8 --data synthetic --steps 3 --batch 2 --lr "
    "0.01 --max-norm 0.1 --timeout 60";

struct Ended {
  int code = -1;
  std::string text;
};

Ended run(const std::string& command) {
  Ended ended;
  auto* pipe = ::popen(("timeout -s KILL 280 " + command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) {
    ADD_FAILURE() << "popen failed";
    return ended;
  }
  std::array<char, 4096> buffer{};
  while (const auto got = std::fread(buffer.data(), 1, buffer.size(), pipe)) {
    ended.text.append(buffer.data(), got);
  }
  const int status = ::pclose(pipe);
  ended.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return ended;
}

struct Launch {
  std::string name;
  std::string with;  // ci/launch --with
  int ranks = 1;
  std::string backend;  // that the run must have used
  std::string arguments{};
  std::string nodes{};
  std::string only_launched{};  // arguments for the processes
};

void PrintTo(const Launch& launch, std::ostream* out) {
  *out << launch.name;
}

Ended launched(const Launch& launch, const std::string& more) {
  return run(std::string(SHARDPROOF_SOURCE_FOLDER) + "/ci/launch --with " + launch.with + " -n " +
             std::to_string(launch.ranks) + " " + launch.nodes + " --timeout 240 -- " +
             SHARDPROOF_COMMAND + kSmall + " " + launch.arguments + " " + launch.only_launched +
             " " + more);
}

nlohmann::json summary_in(const std::filesystem::path& report) {
  std::ifstream in(report / "summary.json");
  return nlohmann::json::parse(in, nullptr, /*allow_exceptions=*/false);
}

class LaunchedRun : public testing::TestWithParam<Launch> {};

TEST_P(LaunchedRun, IsExactAndItsTraceIsThatOfThreads) {
  const auto& launch = GetParam();
  const TemporaryFolder folder;
  const auto threads = folder.path() / "threads";
  const auto processes = folder.path() / "processes";
  const auto want =
      run(SHARDPROOF_COMMAND + kSmall + " " + launch.arguments + " --no-python --world " +
          std::to_string(launch.ranks) + " --backend in_process --report " + threads.string());
  ASSERT_EQ(want.code, kExitHeld) << want.text;
  const auto got = launched(launch, "--report " + processes.string());
  if (got.code == kExitSkipped) {
    GTEST_SKIP() << "not possible here: " << got.text;
  }
  ASSERT_EQ(got.code, kExitHeld) << got.text;
  EXPECT_THAT(got.text, AllOf(HasSubstr("backend " + launch.backend), HasSubstr("PASSED")));
  const auto summary = summary_in(processes);
  EXPECT_EQ(summary["scenario"]["world_size"], launch.ranks);
  EXPECT_EQ(summary["scenario"]["backend"], launch.backend);
  EXPECT_EQ(summary["trace_digest"], summary_in(threads)["trace_digest"]);
}

INSTANTIATE_TEST_SUITE_P(
    Each, LaunchedRun,
    testing::Values(
        Launch{"torchrun_1", "torchrun", 1, "store"},
        Launch{"torchrun_8", "torchrun", 8, "store", "--strategy hybrid_shard --replicas 2"},
        Launch{"torchrun_4_nodes_of_8", "torchrun", 32, "store", "--no-python", "--nodes 4"},
        Launch{"variables_3", "none", 3, "store",
               "--strategy shard_grad_op --checkpointing segments --no-python"},
        Launch{"openmpi_1", "openmpi", 1, "mpi", "--no-python"},
        Launch{"openmpi_3", "openmpi", 3, "mpi",
               "--micro-batches 2 --checkpointing all --no-python"},
        Launch{"openmpi_8", "openmpi", 8, "mpi", "--strategy hybrid_shard --replicas 4"},
        Launch{"mpich_2", "mpich", 2, "mpi",
               "--param-dtype bfloat16 --checkpointing alternate --checkpointing-order around "
               "--no-python"},
        Launch{"mpich_5", "mpich", 5, "mpi", "--optimizer sgd --momentum 0.9 --no-python"},
        Launch{"mpich_8", "mpich", 8, "mpi"},
        Launch{"slurm_4", "slurm", 4, "store", "--no-python", "", "--backend store"}),
    [](const auto& info) { return info.param.name; });

TEST(LaunchedRuns, AFaultIsCaughtAndEveryRankEndsWithOne) {
  const Launch launch{"", "none", 3, "store", "--no-python"};
  const auto ended = launched(launch, "--fault flipped_bit");
  EXPECT_EQ(ended.code, kExitFailed) << ended.text;
  EXPECT_THAT(ended.text,
              AllOf(HasSubstr("FAILED"), HasSubstr("planted: flipped_bit struck 1 time")));
}

TEST(LaunchedRuns, ThatCannotBeAreRefusedOnEveryRank) {
  const Launch launch{"", "none", 3, "store", "--no-python"};
  auto ended = launched(launch, "--world 4");
  EXPECT_EQ(ended.code, kExitUsage) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("world_size is 4; wanted: 3, the number of ranks started"));
  ended = launched(launch, "--backend in_process");
  EXPECT_EQ(ended.code, kExitUsage) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("in_process"));
}

TEST(LaunchedRuns, RanksGivenOtherOptionsAreNamed) {
  const auto ended = run(std::string(SHARDPROOF_SOURCE_FOLDER) +
                         "/ci/launch --with none -n 3 --timeout 100 -- sh -c 'test $RANK = 2 && "
                         "more=\"--seed 5\"; exec " +
                         SHARDPROOF_COMMAND + kSmall + " --no-python $more'");
  EXPECT_EQ(ended.code, kExitUsage) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("rank 2: /seed is 5, and rank 0's is "));
}

TEST(LaunchedRuns, WithoutALauncherTheBackendIsRefused) {
  const auto ended = run(SHARDPROOF_COMMAND + kSmall + " --no-python --backend store");
  EXPECT_EQ(ended.code, kExitUsage) << ended.text;
  EXPECT_THAT(ended.text, AllOf(HasSubstr("--backend store"), HasSubstr("torchrun --no-python")));
}

}  // namespace
}  // namespace shardproof
