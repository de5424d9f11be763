// Real launches: torchrun, mpirun, srun and plain variables start a small program as several
// processes (rank_program.cpp), which holds one collective of each kind to closed forms. And what
// happens when the environment is wrong, or a rank dies, stops or leaves: every rank ends within
// twice its timeout, with the message and the code that belong to it, and no process is left.

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <string>
#include <thread>

#include "conformance/exit_codes.h"

namespace shardproof {
namespace {

using Clock = std::chrono::steady_clock;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

/// The ranks' own timeout in tests of what goes wrong, in seconds.
constexpr int kTimeout = 5;
/// Starting three processes on a busy machine.
constexpr double kStart = 6;

struct Ended {
  int code = -1;  // 1000 + signal if killed
  std::string text;
  double seconds = 0;

  /// The lines of one rank.
  std::string of_rank(int rank) const {
    const auto prefix = "[" + std::to_string(rank) + "] ";
    std::string lines;
    std::istringstream all(text);
    for (std::string line; std::getline(all, line);) {
      if (line.rfind(prefix, 0) == 0) {
        lines += line.substr(prefix.size()) + "\n";
      }
    }
    return lines;
  }
};

std::string new_tag() {
  static int count = 0;
  return "launch-test-" + std::to_string(::getpid()) + "-" + std::to_string(count++);
}

/// Living processes whose command line has the tag.
int processes_with(const std::string& tag) {
  int count = 0;
  std::error_code gone;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", gone)) {
    std::ifstream file(entry.path() / "cmdline", std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    count += text.find(tag) != std::string::npos ? 1 : 0;
  }
  return count;
}

/// Runs a shell command, whose whole tree is in the way of a hang: ci/launch has a watchdog, and
/// this one has another, that ends with 137.
Ended run(const std::string& command) {
  Ended ended;
  const auto start = Clock::now();
  auto* pipe = ::popen(("timeout -s KILL 200 " + command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) {
    ADD_FAILURE() << "popen failed";
    return ended;
  }
  char buffer[4096];
  while (const auto got = std::fread(buffer, 1, sizeof buffer, pipe)) {
    ended.text.append(buffer, got);
  }
  const int status = ::pclose(pipe);
  ended.code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  ended.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return ended;
}

std::string launcher(const std::string& with, int ranks, const std::string& more = "") {
  return std::string(SHARDPROOF_SOURCE_FOLDER) + "/ci/launch --with " + with + " -n " +
         std::to_string(ranks) + " " + more + " ";
}

/// `ranks` processes of the program by a launcher; none may be left.
Ended launch(const std::string& with, int ranks, const std::string& arguments = "",
             const std::string& more = "--timeout 150") {
  const auto tag = new_tag();
  const auto ended = run(launcher(with, ranks, more) + "-- " + SHARDPROOF_RANK_PROGRAM + " --tag " +
                         tag + " " + arguments);
  EXPECT_EQ(processes_with(tag), 0) << "left behind\n" << ended.text;
  return ended;
}

/// As launch, by plain variables, after each rank's shell has done `before` ("" for nothing): it
/// makes one rank's environment wrong. The ranks' timeout is kTimeout.
Ended launch_spoilt(int ranks, const std::string& before, const std::string& arguments = "") {
  const auto tag = new_tag();
  const auto ended = run(launcher("none", ranks, "--timeout 40") + "-- sh -c '" + before +
                         " exec " + SHARDPROOF_RANK_PROGRAM + " --tag " + tag + " --timeout " +
                         std::to_string(kTimeout) + " " + arguments + "'");
  EXPECT_EQ(processes_with(tag), 0) << "left behind\n" << ended.text;
  EXPECT_LE(ended.seconds, 2 * kTimeout + kStart) << ended.text;
  return ended;
}

std::set<std::string> digests(const Ended& ended, int& count) {
  std::set<std::string> found;
  const std::regex pattern("digest ([0-9a-f]{16})");
  count = 0;
  for (std::sregex_iterator at(ended.text.begin(), ended.text.end(), pattern), end; at != end;
       ++at) {
    found.insert((*at)[1]);
    ++count;
  }
  return found;
}

/// All ranks were there, and all have the same results.
void expect_whole(const Ended& ended, int ranks, const std::string& launcher_name,
                  const std::string& backend) {
  EXPECT_EQ(ended.code, kExitHeld) << ended.text;
  int count = 0;
  EXPECT_EQ(digests(ended, count).size(), 1U) << ended.text;
  EXPECT_EQ(count, ranks) << ended.text;
  const auto said = "fsdp: backend " + backend + ", " + std::to_string(ranks) +
                    (ranks == 1 ? " rank" : " ranks") + ", started by " + launcher_name + "\n";
  EXPECT_THAT(ended.of_rank(0), HasSubstr(said));
  for (int rank = 1; rank < ranks; ++rank) {
    EXPECT_THAT(ended.of_rank(rank), Not(HasSubstr("fsdp: backend"))) << "rank 0 alone says it";
  }
}

#define SKIP_IF_IMPOSSIBLE(ended)                          \
  if ((ended).code == kExitSkipped) {                      \
    GTEST_SKIP() << "not possible here: " << (ended).text; \
  }

// ---- Launchers ----

TEST(Launch, WithoutALauncherIsOneInProcessRank) {
  const auto ended = run(SHARDPROOF_RANK_PROGRAM);
  EXPECT_EQ(ended.code, kExitHeld) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("fsdp: backend in_process, 1 rank, started by no launcher"));
}

TEST(Launch, TorchrunStartsOneTwoAndEightRanks) {
  for (const int ranks : {1, 2, 8}) {
    expect_whole(launch("torchrun", ranks), ranks, "torchrun", "store");
  }
}

TEST(Launch, PlainVariablesStartOneAndFourRanks) {
  for (const int ranks : {1, 4}) {
    expect_whole(launch("none", ranks), ranks, "environment", "store");
  }
}

TEST(Launch, OpenMpisMpirunStartsRanksOfTheStore) {
  const auto ended = launch("openmpi", 4, "--backend store");
  SKIP_IF_IMPOSSIBLE(ended);
  expect_whole(ended, 4, "openmpi", "store");
}

TEST(Launch, MpichsMpirunStartsRanksOfTheStore) {
  const auto ended = launch("mpich", 4, "--backend store");
  SKIP_IF_IMPOSSIBLE(ended);
  expect_whole(ended, 4, "mpich", "store");
}

TEST(Launch, SrunStartsFourRanksOnASlurmOfItsOwn) {
  const auto ended = launch("slurm", 4, "--backend store");
  SKIP_IF_IMPOSSIBLE(ended);
  expect_whole(ended, 4, "slurm", "store");
}

TEST(Launch, TorchrunOnFourNodesOfTwoRanksInAnyOrder) {
  const auto ended = launch("torchrun", 8, "--timeout 60", "--nodes 4 --timeout 150");
  SKIP_IF_IMPOSSIBLE(ended);
  expect_whole(ended, 8, "torchrun", "store");
  EXPECT_THAT(ended.text, HasSubstr("rank 7 of 8 (local 1 of 2, torchrun"));
}

TEST(Launch, OpenMpiOnTwoNodes) {
  const auto ended =
      launch("openmpi", 4, "--backend store --timeout 60", "--nodes 2 --timeout 150");
  SKIP_IF_IMPOSSIBLE(ended);
  expect_whole(ended, 4, "openmpi", "store");
  EXPECT_THAT(ended.text, HasSubstr("rank 3 of 4 (local 1 of 2, openmpi"));
}

TEST(Launch, AVendorsBackendComesFromItsLibrary) {
  const std::string plugin = SHARDPROOF_BACKEND_PLUGIN;
  const auto ended = launch("torchrun", 3, "--backend-library " + plugin);
  expect_whole(ended, 3, "torchrun", plugin);
  EXPECT_THAT(ended.text, HasSubstr("torchrun, example_plugin)"));
}

TEST(Launch, InitAndDestroyManyTimesLeavesNothing) {
  for (const std::string with : {"none", "torchrun"}) {
    const auto ended = launch(with, 2, "--cycles 1000 --leaks");
    EXPECT_EQ(ended.code, kExitHeld) << ended.text.substr(ended.text.size() / 2);
    int count = 0;
    EXPECT_EQ(digests(ended, count).size(), 1U);
    EXPECT_EQ(count, 2000);
  }
}

// ---- Environments that are wrong ----

struct Bad {
  const char* name;
  std::string before;               // what each of three ranks' shells does first
  int code;                         // the largest of the ranks'
  std::vector<std::string> wanted;  // of each rank: part of its message; "" if it says nothing
  std::string arguments = "";
};

std::ostream& operator<<(std::ostream& out, const Bad& bad) {
  return out << bad.before;
}

const std::string kRank1 = "if [ $RANK = 1 ]; then ";
const std::string kMissing1 = "rank 1 of 3 did not arrive within 5000 ms";

const std::vector<Bad> kBad = {
    {"MissingVariable",
     kRank1 + "unset MASTER_ADDR; fi;",
     kExitTimedOut,
     {kMissing1, "MASTER_ADDR is missing", kMissing1}},
    {"EmptyVariable",
     kRank1 + "export WORLD_SIZE=; fi;",
     kExitTimedOut,
     {kMissing1, "WORLD_SIZE is ''", kMissing1}},
    {"NotANumber",
     kRank1 + "export MASTER_PORT=abc; fi;",
     kExitTimedOut,
     {kMissing1, "rank 1: MASTER_PORT is 'abc'; wanted: a port", kMissing1}},
    {"RankTooLarge",
     kRank1 + "export RANK=3; fi;",
     kExitTimedOut,
     {kMissing1, "RANK is '3'; wanted: a whole number from 0 to 2", kMissing1}},
    {"EveryRankOfOneMind",
     "unset WORLD_SIZE;",
     kExitUsage,
     {"WORLD_SIZE is missing", "WORLD_SIZE is missing", "WORLD_SIZE is missing"}},
    {"WorldSizesDiffer",
     kRank1 + "export WORLD_SIZE=4; fi;",
     kExitUsage,
     {"has WORLD_SIZE=", "has WORLD_SIZE=", "has WORLD_SIZE="}},
    {"RankGivenTwice",
     "if [ $RANK = 2 ]; then export RANK=1; fi;",
     kExitUsage,
     {"rank 0: rank 1 is given twice: RANK=1 in process", "rank 1: rank 1 is given twice",
      "rank 1: rank 1 is given twice"}},
    {"NobodyListens",
     "[ $RANK != 0 ] || exit 0;",
     kExitTimedOut,
     {"", "rank 1: nobody listened at MASTER_ADDR=127.0.0.1 MASTER_PORT=",
      "rank 2: nobody listened at"}},
    {"RankMissing",
     kRank1 + "exit 0; fi;",
     kExitTimedOut,
     {"rank 0: " + kMissing1, "", "rank 2: " + kMissing1}},
    {"UnknownHost",
     kRank1 + "export MASTER_ADDR=no-such-host.invalid; fi;",
     kExitTimedOut,
     {kMissing1, "rank 1: MASTER_ADDR is 'no-such-host.invalid', which no name service knew",
      kMissing1}},
    {"SettingsDiffer",
     kRank1 + "export FSDP_CHECK_COLLECTIVES=1; fi;",
     kExitUsage,
     {"settings differ", "settings differ", "settings differ"}},
    {"CheckingNeither0Nor1",
     "export FSDP_CHECK_COLLECTIVES=yes;",
     kExitUsage,
     {"FSDP_CHECK_COLLECTIVES is 'yes'", "FSDP_CHECK_COLLECTIVES is 'yes'", "rank 2: "}},
    {"UnknownBackend",
     "",
     kExitUsage,
     {"rank 0: init_process_group: backend 'gloo'; wanted: nccl, mpi, store or in_process",
      "backend 'gloo'", "backend 'gloo'"},
     "--backend gloo"},
    {"InProcessForSeveral",
     "",
     kExitUsage,
     {"'in_process' for 3 processes", "'in_process' for 3 processes", "rank 2: "},
     "--backend in_process"},
    {"NcclWithoutGpus",
     "export CUDA_VISIBLE_DEVICES=;",
     kExitUsage,
     {"rank 0: init_process_group: backend 'nccl', but", "rank 1: ", "rank 2: "},
     "--backend nccl"},
    {"MpiWithoutMpirun",
     "",
     kExitUsage,
     {"started by 'environment'; wanted: mpirun", "wanted: mpirun", "wanted: mpirun"},
     "--backend mpi"},
    {"LibraryThatIsNotThere",
     "",
     kExitUsage,
     {"rank 0: backend library /no/lib.so: there is no such file", "rank 1: ", "rank 2: "},
     "--backend-library /no/lib.so"},
    {"TwoBackends",
     "",
     kExitUsage,
     {"wanted: one of them", "wanted: one of them", "wanted: one of them"},
     "--backend-library /no/lib.so --backend store"},
};

class BadEnvironment : public testing::TestWithParam<Bad> {};

TEST_P(BadEnvironment, EndsEveryRankWithItsMessage) {
  const auto& bad = GetParam();
  const auto ended = launch_spoilt(3, bad.before, bad.arguments);
  EXPECT_EQ(ended.code, bad.code) << ended.text;
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_THAT(ended.of_rank(rank), HasSubstr(bad.wanted[rank])) << "rank " << rank;
    if (!bad.wanted[rank].empty()) {
      EXPECT_THAT(ended.of_rank(rank), HasSubstr("wanted: ")) << "rank " << rank;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Launch, BadEnvironment, testing::ValuesIn(kBad),
                         [](const auto& info) { return std::string(info.param.name); });

/// A port of this host that somebody has who never says a word.
class TakenPort {
 public:
  TakenPort() : file_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = ::htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    auto* const plain = reinterpret_cast<sockaddr*>(&address);
    if (::bind(file_, plain, size) != 0 || ::listen(file_, 16) != 0 ||
        ::getsockname(file_, plain, &size) != 0) {
      throw std::runtime_error("no port");
    }
    port_ = ::ntohs(address.sin_port);
  }
  ~TakenPort() { ::close(file_); }
  TakenPort(const TakenPort&) = delete;
  TakenPort& operator=(const TakenPort&) = delete;
  int port() const { return port_; }

 private:
  int file_;
  int port_ = 0;
};

TEST(Launch, APortThatIsTakenIsNamed) {
  const TakenPort taken;
  const auto port = std::to_string(taken.port());
  const auto ended = launch_spoilt(3, "export MASTER_PORT=" + port + ";");
  EXPECT_EQ(ended.code, kExitTimedOut) << ended.text;
  EXPECT_THAT(ended.of_rank(0),
              HasSubstr("rank 0: cannot listen at MASTER_ADDR=127.0.0.1 MASTER_PORT=" + port +
                        ": another process listens there; wanted: a free port"));
  for (const int rank : {1, 2}) {
    EXPECT_THAT(ended.of_rank(rank), HasSubstr("is no store that this program can use"));
  }
}

// ---- Ranks that die, stop or leave ----

struct Fault {
  const char* name;
  std::string fault;
  int rank;
  int code;
  std::vector<std::string> wanted;  // of each rank: a regular expression; "" for anything
};

std::ostream& operator<<(std::ostream& out, const Fault& fault) {
  return out << fault.fault << " on rank " << fault.rank;
}

const std::vector<Fault> kFaults = {
    {"KilledBeforeInit", "kill-init", 1, kExitTimedOut, {kMissing1, "", kMissing1}},
    {"MasterKilledBeforeInit",
     "kill-init",
     0,
     kExitTimedOut,
     {"", "nobody listened", "nobody listened"}},
    {"MasterKilledInDestroy", "kill-destroy", 0, kExitBroken, {"", "", ""}},
    {"KilledInDestroy",
     "kill-destroy",
     1,
     kExitTimedOut,
     {"rank 0: destroy_process_group: rank 1 did not come to it within 5000 ms", "", ""}},
    {"StoppedInDestroy",
     "stop-destroy",
     2,
     kExitTimedOut,
     {"rank 0: destroy_process_group: rank 2 did not come to it within 5000 ms", "digest", ""}},
    {"KilledInACollective", "kill-collective", 2, kExitTimedOut, {"rank 0", "rank 1", ""}},
    {"MasterKilledInACollective", "kill-collective", 0, kExitBroken, {"", "rank 1", "rank 2"}},
    {"StoppedInACollective", "stop-collective", 1, kExitTimedOut, {"rank 0", "", "rank 2"}},
    {"MasterStoppedInACollective", "stop-collective", 0, kExitTimedOut, {"", "rank 1", "rank 2"}},
    {"LeavesEarly", "leave-collective", 1, kExitTimedOut, {"rank 0", "", "rank 2"}},
    {"DestroysTwice",
     "destroy-twice",
     0,
     kExitUsage,
     {"destroy_process_group: there is no default process group, it was destroyed",
      "it was destroyed", "it was destroyed"}},
    {"UsesItAfterwards",
     "use-after-destroy",
     0,
     kExitUsage,
     {"default_process_group: there is no default process group, it was destroyed",
      "it was destroyed", "it was destroyed"}},
};

class Faults : public testing::TestWithParam<Fault> {};

TEST_P(Faults, EndEveryOtherRankInTime) {
  const auto& fault = GetParam();
  const auto tag = new_tag();
  // A rank that is stopped never ends by itself; its watchdog comes at three times the timeout.
  const bool stops = fault.fault.rfind("stop", 0) == 0;
  const auto ended =
      run(launcher("none", 3, "--timeout " + std::to_string(stops ? 3 * kTimeout : 40)) + "-- " +
          SHARDPROOF_RANK_PROGRAM + " --tag " + tag + " --timeout " + std::to_string(kTimeout) +
          " --fault " + fault.fault + " --fault-rank " + std::to_string(fault.rank));
  EXPECT_EQ(processes_with(tag), 0) << "left behind\n" << ended.text;
  EXPECT_LE(ended.seconds, (stops ? 3 : 2) * kTimeout + kStart) << ended.text;
  // Which of its errors a backend raises for a lost rank is its own affair; that it raises one is
  // not.
  if (fault.code == kExitTimedOut && !stops) {
    EXPECT_THAT(ended.code, testing::AnyOf(kExitTimedOut, kExitBroken)) << ended.text;
  } else {
    EXPECT_EQ(ended.code, fault.code) << ended.text;
  }
  for (int rank = 0; rank < 3; ++rank) {
    if (!fault.wanted[rank].empty()) {
      EXPECT_THAT(ended.of_rank(rank), ContainsRegex(fault.wanted[rank])) << ended.text;
    }
  }
  if (stops) {
    EXPECT_THAT(ended.text, HasSubstr("not over after 15 s")) << "only the watchdog ends it";
  }
}
INSTANTIATE_TEST_SUITE_P(Launch, Faults, testing::ValuesIn(kFaults),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Launch, RanksThatCallDifferentCollectivesAreNamedOnEachOfThem) {
  const auto ended =
      launch_spoilt(3, "export FSDP_CHECK_COLLECTIVES=1;", "--fault mismatch --fault-rank 2");
  EXPECT_EQ(ended.code, kExitBroken) << ended.text;
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_THAT(ended.of_rank(rank),
                AllOf(HasSubstr("rank 2 differs"), HasSubstr("all_gather of 3 Float"),
                      HasSubstr("rank 2: call 0: all_reduce of 3 Float, sum")));
  }
}

// ---- ci/launch itself ----

TEST(Launch, EndsWithTheLargestCodeAndNeverACount) {
  const auto with = [](const std::string& program) {
    return run(launcher("none", 4, "--timeout 20") + "-- sh -c '" + program + "'");
  };
  EXPECT_EQ(with("exit 0").code, 0);
  EXPECT_EQ(with("exit 1").code, 1) << "four failures";
  EXPECT_EQ(with("exit $RANK").code, 3);
  EXPECT_EQ(with("[ $RANK = 2 ] || exit 1; exit 70").code, 70);
  EXPECT_EQ(with("exit 55").code, 70) << "no code of ours";
  EXPECT_EQ(with("[ $RANK != 3 ] || kill -SEGV $$; exit 0").code, 70);
  EXPECT_EQ(with("exit 77").code, 77) << "all of them skip";
  EXPECT_EQ(with("exit $((RANK == 1 ? 77 : 0))").code, 70) << "one of them skips";
}

TEST(Launch, TheWatchdogEndsTheWholeTree) {
  const auto tag = new_tag();
  // A grandchild in a session of its own, deaf to SIGTERM.
  const auto ended = run(launcher("torchrun", 2, "--timeout 6") +
                         "-- sh -c 'setsid sh -c \"trap : TERM; while :; do sleep 1; done\" " +
                         tag + " & sleep 100'");
  EXPECT_EQ(ended.code, kExitTimedOut) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("not over after 6 s"));
  EXPECT_LT(ended.seconds, 20);
  EXPECT_EQ(processes_with(tag), 0) << ended.text;
}

TEST(Launch, WhatRanksLeaveBehindIsEndedAndIsAFailure) {
  const auto tag = new_tag();
  const auto ended =
      run(launcher("none", 1, "--timeout 20") + "-- sh -c 'setsid sh -c \"sleep 60; :\" " + tag +
          " >/dev/null 2>&1 & exit 0'");
  EXPECT_EQ(ended.code, kExitBroken) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("processes behind"));
  EXPECT_EQ(processes_with(tag), 0);
}

TEST(Launch, ControlCEndsAllRanks) {
  for (const std::string with : {"none", "torchrun"}) {
    const auto tag = new_tag();
    const auto command = launcher(with, 2, "--timeout 60") + "-- " + SHARDPROOF_RANK_PROGRAM +
                         " --pause --tag " + tag + " >/dev/null 2>&1";
    const auto child = ::fork();
    if (child == 0) {
      ::setpgid(0, 0);
      ::execl("/bin/sh", "sh", "-c", ("exec " + command).c_str(), nullptr);
      ::_exit(127);
    }
    // ci/launch, the launcher, two wrappers and two ranks bear the tag; two seconds for the rest.
    const auto deadline = Clock::now() + std::chrono::seconds(40);
    while (processes_with(tag) < 5 && Clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    std::this_thread::sleep_for(std::chrono::seconds(2));
    ::kill(-child, SIGINT);
    int status = 0;
    const auto start = Clock::now();
    while (::waitpid(child, &status, WNOHANG) == 0 &&
           Clock::now() < start + std::chrono::seconds(30)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 130) << with << ": " << status;
    EXPECT_EQ(processes_with(tag), 0) << with;
    ::kill(-child, SIGKILL);
  }
}

TEST(Launch, WrongUsageIsRefused) {
  for (const std::string arguments :
       {"--with nothing -n 1 -- true", "-n 1 -- true", "--with none -n 0 -- true",
        "--with none -n x -- true", "--with none -n 3 --nodes 2 -- true", "--with none -n 1"}) {
    EXPECT_EQ(run(std::string(SHARDPROOF_SOURCE_FOLDER) + "/ci/launch " + arguments).code,
              kExitUsage)
        << arguments;
  }
  EXPECT_EQ(run(launcher("none", 1) + "-- /no/such/program").code, kExitUsage);
}

}  // namespace
}  // namespace shardproof
