// Where a rank finds its place: each launcher's variables, which wins, and what is said of bad
// ones.

#include <fsdp/errors.h>
#include <fsdp/init.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

namespace fsdp {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

Placement placed(const Variables& variables) {
  return read_placement([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

std::string refusal(const Variables& variables) {
  try {
    placed(variables);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "it was taken";
}

Variables with(Variables variables, const Variables& changes) {
  for (const auto& [name, value] : changes) {
    variables[name] = value;
  }
  return variables;
}

Variables without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

const Variables kTorchrun = {{"RANK", "5"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "4"},
                             {"MASTER_ADDR", "10.0.0.1"},
                             {"MASTER_PORT", "29500"},
                             {"TORCHELASTIC_RUN_ID", "none"},
                             {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "2"},
                            {"OMPI_COMM_WORLD_SIZE", "3"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}};
const Variables kHydra = {
    {"PMI_RANK", "3"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};
const Variables kSlurm = {{"SLURM_PROCID", "9"},
                          {"SLURM_STEP_NUM_TASKS", "11"},
                          {"SLURM_LOCALID", "1"},
                          {"SLURM_NODEID", "2"},
                          {"SLURM_JOB_ID", "1000"},
                          {"SLURM_STEP_ID", "2"},
                          {"SLURM_STEP_TASKS_PER_NODE", "4(x2),3"},
                          {"SLURM_STEP_NODELIST", "gpu[003-004,9],cpu1"}};

void expect_place(const Placement& place, const std::string& launcher, int rank, int size,
                  int local_rank, int local_size) {
  EXPECT_EQ(place.launcher, launcher);
  EXPECT_EQ(place.rank, rank);
  EXPECT_EQ(place.world_size, size);
  EXPECT_EQ(place.local_rank, local_rank);
  EXPECT_EQ(place.local_world_size, local_size);
}

TEST(Placement, IsOneRankAloneWithoutALauncher) {
  expect_place(placed({}), "none", 0, 1, 0, 1);
}

TEST(Placement, IsReadFromTorchrun) {
  const auto place = placed(kTorchrun);
  expect_place(place, "torchrun", 5, 8, 1, 4);
  EXPECT_EQ(place.master_addr, "10.0.0.1");
  EXPECT_EQ(place.master_port, 29500);
}

TEST(Placement, IsReadFromPlainVariablesAndTakenForOneNode) {
  const auto place =
      placed({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "here"}, {"MASTER_PORT", "1"}});
  expect_place(place, "environment", 1, 2, 1, 2);
}

TEST(Placement, IsReadFromOpenMpi) {
  const auto place = placed(kOpenMpi);
  expect_place(place, "openmpi", 2, 3, 0, 1);
  EXPECT_EQ(place.master_addr, "") << "nobody told";
  EXPECT_EQ(place.master_port, 0);
  EXPECT_EQ(placed(with(kOpenMpi, {{"MASTER_PORT", "7"}})).master_port, 7);
}

TEST(Placement, IsReadFromMpich) {
  expect_place(placed(kHydra), "mpich", 3, 4, 1, 2);
}

TEST(Placement, IsReadFromASlurmStep) {
  const auto place = placed(kSlurm);
  // The third node of 4, 4 and 3 tasks.
  expect_place(place, "slurm", 9, 11, 1, 3);
  EXPECT_EQ(place.master_addr, "gpu003");
  EXPECT_EQ(place.master_port, 15000 + (31 * 1000 + 2) % 14000) << "as init.h says";
}

TEST(Placement, TakesTheFirstHostOfAnyNodeList) {
  const auto host = [](const std::string& list) {
    return placed(with(kSlurm, {{"SLURM_STEP_NODELIST", list}})).master_addr;
  };
  EXPECT_EQ(host("single"), "single");
  EXPECT_EQ(host("a,b"), "a");
  EXPECT_EQ(host("n[7]"), "n7");
  EXPECT_EQ(host("rack[1-2]node[08-09].cluster"), "rack1node08.cluster");
  for (const std::string bad : {"n[", "n[]", "]n"}) {
    EXPECT_THAT(refusal(with(kSlurm, {{"SLURM_STEP_NODELIST", bad}})),
                HasSubstr("SLURM_STEP_NODELIST is '" + bad + "'"));
  }
}

TEST(Placement, OfABatchScriptThatIsNoStepIsOneRankAlone) {
  expect_place(placed(without(kSlurm, "SLURM_STEP_ID")), "none", 0, 1, 0, 1);
}

// ---- Which launcher wins ----

TEST(Placement, ExplicitVariablesWinOverEveryLauncher) {
  auto all = with(with(kOpenMpi, kHydra), kSlurm);
  expect_place(placed(with(all, kTorchrun)), "torchrun", 5, 8, 1, 4);
}

TEST(Placement, AnMpirunInsideASlurmJobWins) {
  expect_place(placed(with(kSlurm, kOpenMpi)), "openmpi", 2, 3, 0, 1);
  expect_place(placed(with(kSlurm, kHydra)), "mpich", 3, 4, 1, 2);
}

TEST(Placement, SrunsOwnPmi2VariablesAreSlurms) {
  expect_place(placed(with(kSlurm, {{"PMI_RANK", "9"}, {"PMI_SIZE", "11"}})), "slurm", 9, 11, 1, 3);
}

TEST(Placement, TwoMpirunsAreRefused) {
  EXPECT_THAT(refusal(with(kOpenMpi, kHydra)), AllOf(HasSubstr("two launchers"), HasSubstr("OMPI"),
                                                     HasSubstr("PMI_"), HasSubstr("unset")));
}

// ---- Bad values ----

TEST(Placement, NamesEachVariableThatIsMissing) {
  for (const auto* whole : {&kOpenMpi, &kHydra, &kSlurm}) {
    for (const auto& [name, value] : *whole) {
      if (name == "SLURM_STEP_ID" || name == "SLURM_PROCID") {
        continue;  // without them it is no step
      }
      const auto wanted = name == "SLURM_STEP_NUM_TASKS" ? "SLURM_NTASKS" : name;
      EXPECT_THAT(refusal(without(*whole, name)), HasSubstr(wanted + " is missing"));
    }
  }
  for (const std::string name :
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    EXPECT_THAT(refusal(without(kTorchrun, name)),
                AllOf(HasSubstr("rank"), HasSubstr(name + " is missing"), HasSubstr("wanted")));
  }
  EXPECT_THAT(refusal({{"RANK", "0"}}),
              HasSubstr("WORLD_SIZE, MASTER_ADDR, MASTER_PORT are missing"));
  EXPECT_THAT(refusal({{"LOCAL_RANK", "0"}}), HasSubstr("RANK, WORLD_SIZE, MASTER_ADDR"));
}

TEST(Placement, NamesTheVariableThatIsEmptyOrNoNumberOrOutOfRange) {
  const std::vector<std::pair<const Variables*, std::vector<std::string>>> numbers = {
      {&kTorchrun, {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"}},
      {&kOpenMpi,
       {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE"}},
      {&kHydra, {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"}},
      {&kSlurm,
       {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID",
        "SLURM_STEP_ID"}},
  };
  for (const auto& [whole, names] : numbers) {
    for (const auto& name : names) {
      for (const std::string bad :
           {"", " ", "abc", "1x", "1.5", "-1", "+1", "99999999999999999999"}) {
        EXPECT_THAT(refusal(with(*whole, {{name, bad}})),
                    AllOf(HasSubstr(name + " is '" + bad + "'"), HasSubstr("wanted: ")));
      }
    }
  }
  EXPECT_THAT(refusal(with(kTorchrun, {{"MASTER_ADDR", ""}})), HasSubstr("MASTER_ADDR is ''"));
}

TEST(Placement, SaysWhatTheLargestValueIs) {
  EXPECT_THAT(refusal(with(kTorchrun, {{"RANK", "8"}})),
              HasSubstr("RANK is '8'; wanted: a whole number from 0 to 7, since WORLD_SIZE=8"));
  EXPECT_THAT(refusal(with(kTorchrun, {{"LOCAL_RANK", "4"}})),
              AllOf(HasSubstr("rank 5: LOCAL_RANK is '4'"), HasSubstr("0 to 3")));
  EXPECT_THAT(refusal(with(kTorchrun, {{"LOCAL_WORLD_SIZE", "9"}})), HasSubstr("from 1 to 8"));
  EXPECT_THAT(refusal(with(kTorchrun, {{"WORLD_SIZE", "0"}})), HasSubstr("WORLD_SIZE is '0'"));
  for (const std::string port : {"0", "65536"}) {
    EXPECT_THAT(refusal(with(kTorchrun, {{"MASTER_PORT", port}})), HasSubstr("from 1 to 65535"));
  }
  EXPECT_THAT(refusal(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "yes"}})),
              HasSubstr("True or False"));
  for (const std::string list : {"4", "4(x", "x", "4(x3)extra", "0(x3)"}) {
    EXPECT_THAT(refusal(with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", list}, {"SLURM_NODEID", "3"}})),
                HasSubstr("SLURM_STEP_TASKS_PER_NODE is"));
  }
}

}  // namespace
}  // namespace fsdp
