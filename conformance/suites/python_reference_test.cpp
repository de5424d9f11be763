// The Python reference and the C++ reference, written separately from one page, agree to the bit;
// and whatever goes wrong with the program is said.

#include "conformance/python_reference.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <optional>
#include <thread>
#include <vector>

#include "conformance/suites/temporary_folder.h"
#include "conformance/trace_io.h"
#include "reference/models.h"
#include "reference/trainer.h"

namespace shardproof {
namespace {

namespace fs = std::filesystem;

Scenario small_scenario(const std::string& model = "mlp") {
  Scenario scenario;
  scenario.model.kind = model;
  if (model == "mlp") {
    scenario.model.sizes = {12, 20, 7};
  } else {
    scenario.model.layers = 2;
    scenario.model.width = 16;
    scenario.model.heads = 2;
    scenario.model.context = 8;
    scenario.model.vocabulary = 32;
  }
  scenario.data.kind = "synthetic";
  scenario.seed = 11;
  scenario.world_size = 2;
  scenario.batch = 3;
  scenario.steps = 3;
  scenario.max_norm = 0.5;
  scenario.optimizer.lr = 1e-2;
  return scenario;
}

std::string label(const TraceTensor& tensor) {
  return fmt::format("{} {}", to_string(tensor.quantity), tensor.name);
}

/// The number of elements whose bits differ.
std::int64_t differing_bits(const at::Tensor& a, const at::Tensor& b) {
  const auto width = a.element_size();
  const auto* left = static_cast<const char*>(a.const_data_ptr());
  const auto* right = static_cast<const char*>(b.const_data_ptr());
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    count += std::memcmp(left + i * width, right + i * width, width) == 0 ? 0 : 1;
  }
  return count;
}

void expect_equal_bits(const StepTrace& python, const StepTrace& replay) {
  ASSERT_EQ(python.tensors.size(), replay.tensors.size());
  EXPECT_EQ(python.step, replay.step);
  for (std::size_t i = 0; i < replay.tensors.size(); ++i) {
    const auto& got = python.tensors[i];
    const auto& want = replay.tensors[i];
    SCOPED_TRACE(fmt::format("step {}, {}", replay.step, label(want)));
    ASSERT_EQ(label(got), label(want)) << "the execution orders differ";
    EXPECT_EQ(got.shape, want.shape);
    EXPECT_EQ(got.placement, want.placement);
    ASSERT_EQ(got.pieces.size(), want.pieces.size());
    for (std::size_t p = 0; p < want.pieces.size(); ++p) {
      EXPECT_EQ(got.pieces[p].rank, want.pieces[p].rank);
      ASSERT_EQ(got.pieces[p].values.scalar_type(), want.pieces[p].values.scalar_type());
      ASSERT_EQ(got.pieces[p].values.sizes(), want.pieces[p].values.sizes());
      const auto differing = differing_bits(got.pieces[p].values, want.pieces[p].values);
      ASSERT_EQ(differing, 0) << "of " << want.pieces[p].values.numel() << " elements, piece " << p;
    }
  }
}

// ---------------------------------------------------------------------------------------------

/// A state that neither of the two would have come to by itself.
TrainingState other_state(const StepTrace& trace) {
  auto state = state_after(trace);
  for (auto* tensors : {&state.parameters, &state.optimizer_state}) {
    for (auto& [name, value] : *tensors) {
      value = value * 1.25;
    }
  }
  return state;
}

// ---------------------------------------------------------------------------------------------

class PythonReferenceAgrees : public testing::TestWithParam<Scenario> {};

TEST_P(PythonReferenceAgrees, WithTheReplayToTheBitAtEveryStep) {
  at::set_num_threads(1);
  const auto& scenario = GetParam();
  const TemporaryFolder folder;
  const auto initial = initial_parameters(scenario);
  PythonReference::Options options;
  options.work_folder = folder.path();
  PythonReference python(scenario, initial, options);
  ReferenceTrainer replay(scenario, ReferenceMode::replay, initial);
  std::optional<TrainingState> state;  // the last step starts from a state that is put in place
  for (int step = 0; step < scenario.steps; ++step) {
    if (state) {
      replay.set_state(*state);
    }
    const auto want = replay.step(step);
    expect_equal_bits(python.step(step, state ? &*state : nullptr), want);
    if (HasFatalFailure()) {
      return;
    }
    if (step == scenario.steps - 2) {
      state = other_state(want);
    }
  }
  python.finish();
}

/// Meshes, precisions, accumulation, norms, scaling, and the quirks.
void add_wider_scenarios(std::vector<Scenario>& scenarios) {
  const auto add = [&scenarios](const std::string& model, auto change) {
    auto scenario = small_scenario(model);
    scenario.micro_batches = 2;
    scenario.max_norm = 1e-3;
    change(scenario);
    validate(scenario);
    scenarios.push_back(scenario);
  };
  int turn = 0;
  for (const auto* parameter : {"bfloat16", "float16", "float32"}) {
    for (const auto* accumulation : {"each", "last", "last_all_reduce"}) {
      add("transformer", [&](Scenario& scenario) {
        scenario.world_size = 4;
        scenario.strategy = "hybrid_shard";
        scenario.replicas = 2;
        scenario.accumulation = accumulation;
        scenario.precision.parameter = parameter;
        scenario.precision.reduce = turn % 2 == 0 ? "float32" : "";
        scenario.precision.output = turn % 3 == 1 ? "float32" : "";
        scenario.precision.exempt_norms = scenario.precision.parameter != "float32";
        scenario.loss_scale = scenario.precision.parameter == "float16" ? 1024 : 0;
        scenario.model.tied = turn % 2 == 1;
        scenario.norm_type = std::vector<double>{1, 3, 2.5}[turn % 3];
      });
      ++turn;
    }
  }
  add("transformer", [](Scenario& scenario) {
    scenario.strategy = "no_shard";
    scenario.world_size = 3;
    scenario.norm_type = std::numeric_limits<double>::infinity();
    scenario.divide = {3, 7};
  });
  add("transformer", [](Scenario& scenario) { scenario.dtype = "bfloat16"; });
  add("transformer", [](Scenario& scenario) {
    scenario.dtype = "float16";
    scenario.optimizer.eps = 1e-3;  // 1e-8 is zero in float16
  });
  for (const auto& quirk : quirk_names()) {
    add("quirks", [&](Scenario& scenario) {
      scenario.model = ModelSpec();
      scenario.model.kind = "quirks";
      scenario.model.quirks = {quirk};
      scenario.precision.parameter = "bfloat16";
    });
  }
  add("quirks", [](Scenario& scenario) {
    scenario.model = ModelSpec();
    scenario.model.kind = "quirks";
    scenario.model.depth = 4;
    scenario.model.quirks = {"tied_across", "twice", "unused",      "scalar",
                             "buffer",      "tuple", "two_forwards"};
    scenario.precision.parameter = "bfloat16";
    scenario.precision.buffer = "float16";
  });
}

std::vector<Scenario> agreeing_scenarios() {
  std::vector<Scenario> scenarios;
  const auto add = [&scenarios](const std::string& model, auto change) {
    auto scenario = small_scenario(model);
    change(scenario);
    validate(scenario);
    scenarios.push_back(scenario);
  };
  const auto use_sgd = [](Scenario& scenario) {
    scenario.optimizer = OptimizerSpec();
    scenario.optimizer.kind = "sgd";
    scenario.optimizer.lr = 0.1;
    scenario.optimizer.momentum = 0.9;
  };
  // Optimizer, dropout and micro-batches change from one to the next so that each model, dtype and
  // world size meets both of each.
  int turn = 0;
  for (const auto* model : {"mlp", "transformer"}) {
    for (const auto* dtype : {"float32", "float64"}) {
      for (const int world : {1, 2, 3}) {
        add(model, [&](Scenario& scenario) {
          if (turn % 2 == 1) {
            use_sgd(scenario);
          }
          scenario.dtype = dtype;
          scenario.world_size = world;
          scenario.micro_batches = 1 + turn / 2 % 2;
          scenario.model.dropout = (turn / 3 + world) % 3 == 0 ? 0 : 0.1;
        });
        ++turn;
      }
    }
  }
  add("mlp", [&](Scenario& scenario) {  // everything that can be left out
    use_sgd(scenario);
    scenario.optimizer.momentum = 0;
    scenario.optimizer.weight_decay = 0;
    scenario.max_norm = 0;
  });
  add("mlp", [](Scenario& scenario) { scenario.optimizer.weight_decay = 0; });
  add_wider_scenarios(scenarios);
  // Sizes whose products go through the blocked kernels, where it counts whether the bias is added
  // before or after.
  add("transformer", [](Scenario& scenario) {
    scenario.model = ModelSpec();
    scenario.model.layers = 1;
    scenario.model.dropout = 0.1;
    scenario.steps = 2;
  });
  return scenarios;
}

std::string test_name(const testing::TestParamInfo<Scenario>& info) {
  auto name = fmt::format("{}_{}", info.index, dotted_name(info.param));
  std::replace_if(
      name.begin(), name.end(), [](char c) { return std::isalnum(c) == 0; }, '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Scenarios, PythonReferenceAgrees, testing::ValuesIn(agreeing_scenarios()),
                         test_name);

// ---------------------------------------------------------------------------------------------
// Trouble, made by shell scripts in place of the program

/// Whether the process is there and not merely waiting to be reaped.
bool is_running(::pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  const std::string stat{std::istreambuf_iterator<char>(file), {}};
  const auto end_of_name = stat.rfind(')');
  return end_of_name != std::string::npos && stat.size() > end_of_name + 2 &&
         stat[end_of_name + 2] != 'Z';
}

template <typename Condition>
bool comes_true_within(std::chrono::seconds time, Condition condition) {
  const auto deadline = std::chrono::steady_clock::now() + time;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return true;
}

/// The numbers in a file, one per line, once there are `count`.
std::vector<int> wait_for_numbers(const fs::path& path, std::size_t count) {
  std::vector<int> numbers;
  comes_true_within(std::chrono::seconds(20), [&] {
    numbers.clear();
    std::ifstream file(path);
    for (std::string line; std::getline(file, line) && !file.eof();) {
      numbers.push_back(std::stoi(line));
    }
    return numbers.size() == count;
  });
  return numbers;
}

const fs::path kRealProgram =
    fs::path(__FILE__).parent_path().parent_path().parent_path() / "reference/python/reference.py";

class PythonReferenceTrouble : public testing::Test {
 protected:
  static constexpr const char* kReady = "echo '{\"ready\": true, \"torch\": \"VERSION\"}'\n";

  PythonReferenceTrouble() { fs::create_directory(work_folder()); }

  // A blank in the name shows that no shell takes the command line apart.
  fs::path work_folder() const { return folder_.path() / "work folder"; }
  fs::path pid_file() const { return folder_.path() / "pids"; }

  /// Options that run a shell script. VERSION stands for this torch, PIDS for pid_file(), and $out
  /// is the folder of the trace.
  PythonReference::Options fake(std::string script) const {
    const auto replace = [&script](const std::string& name, const std::string& value) {
      for (auto at = script.find(name); at != std::string::npos; at = script.find(name, at)) {
        script.replace(at, name.size(), value);
      }
    };
    replace("VERSION", fmt::format("{}.{}.0", TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR));
    replace("PIDS", pid_file().string());
    const auto path = folder_.path() / "fake.sh";
    std::ofstream(path) << "out=$6\nmkdir -p \"$out\"\n" << script;
    PythonReference::Options options;
    options.python = "sh";
    options.program = path;
    options.work_folder = work_folder();
    options.timeout = std::chrono::seconds(10);
    return options;
  }

  PythonReference::Options real() const {
    PythonReference::Options options;
    options.program = kRealProgram;
    options.work_folder = work_folder();
    return options;
  }

  static const Scenario& scenario() {
    static const auto scenario = small_scenario();
    return scenario;
  }
  static const std::map<std::string, torch::Tensor>& initial() {
    static const auto initial = initial_parameters(scenario());
    return initial;
  }

  /// The message of the error that `act` ends with. Nothing must be left behind.
  std::string message_of(const std::function<void()>& act) const {
    try {
      act();
    } catch (const PythonReferenceError& error) {
      EXPECT_TRUE(fs::is_empty(work_folder()));
      return error.what();
    }
    ADD_FAILURE() << "no PythonReferenceError";
    return "";
  }
  std::string failure_of_start(const PythonReference::Options& options) const {
    return message_of([&] { PythonReference(scenario(), initial(), options); });
  }
  std::string failure_of_step(const PythonReference::Options& options) const {
    return message_of([&] { PythonReference(scenario(), initial(), options).step(0, nullptr); });
  }

  TemporaryFolder folder_;
};

void expect_parts(const std::string& message, std::initializer_list<std::string> parts) {
  for (const auto& part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "no \"" << part << "\" in: " << message;
  }
}

TEST_F(PythonReferenceTrouble, AMissingProgramIsNamedAtOnce) {
  auto options = fake("");
  options.program = "/nowhere/reference.py";
  expect_parts(failure_of_start(options), {"there is no file \"/nowhere/reference.py\"",
                                           "It was run as: sh /nowhere/reference.py --scenario",
                                           "set SHARDPROOF_PYTHON_REFERENCE to"});
}

TEST_F(PythonReferenceTrouble, AMissingPythonIsNamedAtOnce) {
  auto options = fake("");
  options.python = "python_of_nowhere";
  expect_parts(failure_of_start(options),
               {"there is no program python_of_nowhere in PATH", "--python or SHARDPROOF_PYTHON"});
  options.python = "/nowhere/python3";
  expect_parts(failure_of_start(options), {"there is no program /nowhere/python3;"});
}

TEST_F(PythonReferenceTrouble, APythonThatTheSystemCannotRunIsNamedAtOnce) {
  auto options = fake("");
  options.python = folder_.path() / "broken";
  std::ofstream(options.python) << "\x7f"
                                << "ELF";
  fs::permissions(options.python, fs::perms::owner_all);
  expect_parts(failure_of_start(options), {"broken could not be started: exec: Exec format error"});
}

TEST_F(PythonReferenceTrouble, AWorkFolderThatIsNotThereIsNamedAtOnce) {
  auto options = fake("");
  options.work_folder = "/nowhere";
  expect_parts(failure_of_start(options), {"/nowhere/shardproof-python-", "cannot be made"});
}

TEST_F(PythonReferenceTrouble, AWorkFolderWhosePathCannotBeToldIsNamed) {
  auto options = fake("");
  options.work_folder = folder_.path() / "not\xffutf8";
  fs::create_directory(options.work_folder);
  expect_parts(failure_of_start(options), {"paths in UTF-8", "is none. Set TMPDIR to"});
  EXPECT_TRUE(fs::is_empty(options.work_folder));
}

TEST_F(PythonReferenceTrouble, AMissingTorchIsNamed) {
  // -S leaves out site-packages, and with them torch.
  const char* python = std::getenv("SHARDPROOF_PYTHON");
  const auto options =
      fake(fmt::format("exec '{}' -S -B '{}' \"$@\"\n", python == nullptr ? "python3" : python,
                       kRealProgram.string()));
  expect_parts(failure_of_step(options), {"cannot import torch", "SHARDPROOF_PYTHON"});
}

TEST_F(PythonReferenceTrouble, AnotherTorchIsNamed) {
  const auto message =
      failure_of_step(fake("echo '{\"ready\": true, \"torch\": \"1.13.1+cpu\"}'\nread line\n"));
  expect_parts(message, {"has torch 1.13.1+cpu and not that of this program",
                         "; wanted: a Python that has torch "});
}

TEST_F(PythonReferenceTrouble, ACrashNamesTheSignal) {
  expect_parts(failure_of_step(fake("kill -SEGV $$\n")),
               {"it was killed by signal 11 (Segmentation fault) without an answer"});
  const auto in_a_step = std::string(kReady) + "read line\nkill -KILL $$\n";
  expect_parts(
      failure_of_step(fake(in_a_step)),
      {"it was killed by signal 9 (Killed)", "out of memory",
       "wanted: {\"step\": 0, \"file\": PATH} as the answer to {\"state\":null,\"step\":0}"});
}

TEST_F(PythonReferenceTrouble, AnEndWithoutAnAnswerNamesTheExitCodeAndTheEndOfStderr) {
  const auto message = failure_of_step(
      fake("i=1; while [ $i -le 30 ]; do echo \"line $i of 30\" >&2; i=$((i+1)); done; exit 3\n"));
  expect_parts(message, {"sh exited with code 3 without an answer", "wanted: a Python that has",
                         "line 11 of 30", "line 30 of 30"});
  EXPECT_EQ(message.find("line 10 of 30"), std::string::npos);
}

TEST_F(PythonReferenceTrouble, AnEndInTheMiddleOfAnAnswerIsNamed) {
  expect_parts(failure_of_step(fake("printf '{\"ready\": tr'\n")),
               {"sh exited with code 0", "in the middle of a line: \"{\\\"ready\\\": tr\""});
}

TEST_F(PythonReferenceTrouble, WhetherAnotherPythonMayDoIsTold) {
  for (const auto& [script, may] : std::vector<std::pair<std::string, bool>>{
           {"exit 3\n", true},
           {"echo hello\nread line\n", true},
           {"echo '{\"ready\": true, \"torch\": \"1.13.1\"}'\nread line\n", true},
           {"echo '{\"error\": \"no torch\", \"unusable_python\": true}'\n", true},
           {"echo '{\"error\": \"the moon is full\"}'\n", false},
           {"kill -SEGV $$\n", false},
           {std::string(kReady) + "read line\nexit 3\n", false}}) {
    try {
      PythonReference(scenario(), initial(), fake(script)).step(0, nullptr);
      ADD_FAILURE() << "no error: " << script;
    } catch (const PythonUnusable& error) {
      EXPECT_TRUE(may) << script << error.what();
    } catch (const PythonReferenceError& error) {
      EXPECT_FALSE(may) << script << error.what();
    }
  }
}

TEST_F(PythonReferenceTrouble, AnErrorThatItReportsIsPassedOn) {
  expect_parts(failure_of_step(fake("echo '{\"error\": \"the moon is full\"}'; exit 70\n")),
               {"the Python reference failed: the moon is full; wanted: "});
}

TEST_F(PythonReferenceTrouble, AnAnswerThatIsNotJsonIsShown) {
  expect_parts(failure_of_step(fake("echo 'Hello, world'\nread line\n")),
               {"sh answered \"Hello, world\"", "nothing but JSON may go to its stdout"});
  expect_parts(failure_of_step(fake("echo '[1]'\nread line\n")), {"sh answered \"[1]\""});
  expect_parts(failure_of_step(fake("printf 'a\\377b\\n'\nread line\n")), {"sh answered \"a"});
  expect_parts(failure_of_step(fake(std::string(kReady) + "read line\necho done\nread line\n")),
               {"it answered \"done\"", "Only JSON may go to its stdout"});
}

TEST_F(PythonReferenceTrouble, AnAnswerWithoutAnEndIsCutOff) {
  expect_parts(failure_of_step(fake("while :; do printf 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
                                    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'\n"
                                    "done\n")),
               {"an answer without an end: \"aaaa"});
}

TEST_F(PythonReferenceTrouble, AnAnswerOfAnotherShapeIsShown) {
  expect_parts(failure_of_step(fake("echo '{\"ready\": \"yes\"}'\nread line\n")),
               {"it answered \"{\\\"ready\\\":\\\"yes\\\"}\"; wanted: {\"ready\": true"});
  const auto other_step =
      std::string(kReady) + "read line\necho '{\"step\": 1, \"file\": \"x\"}'\n";
  expect_parts(failure_of_step(fake(other_step + "read line\n")),
               {"it answered", "wanted: {\"step\": 0, \"file\": PATH}"});
}

TEST_F(PythonReferenceTrouble, AStepFileThatCannotBeReadIsNamed) {
  const auto answer = std::string(kReady) +
                      "read line\necho \"{\\\"step\\\": 0, \\\"file\\\": \\\"$out/step\\\"}\"\n";
  expect_parts(failure_of_step(fake(answer)), {"its step file cannot be read: ", "/trace/step"});
  expect_parts(failure_of_step(fake("printf 'short' > \"$out/step\"\n" + answer)),
               {"its step file cannot be read: ", "truncated: 5 bytes"});
}

TEST_F(PythonReferenceTrouble, AStepFileOfAnotherStepIsNamed) {
  const auto file = folder_.path() / "other";
  StepTrace other;
  other.step = 8;
  write_step(file, other);
  const auto script = fmt::format(
      "{}cp {} \"$out/step\"\nread line\n"
      "echo \"{{\\\"step\\\": 0, \\\"file\\\": \\\"$out/step\\\"}}\"\n",
      kReady, file.string());
  expect_parts(failure_of_step(fake(script)),
               {"its step file holds step 8; wanted: the trace of step 0"});
}

TEST_F(PythonReferenceTrouble, AFileThatIsNotItsOwnIsNotTouched) {
  const auto file = folder_.path() / "precious";
  std::ofstream(file) << "precious";
  const auto script =
      fmt::format("{}read line\necho '{{\"step\": 0, \"file\": \"{}\"}}'\n", kReady, file.string());
  expect_parts(failure_of_step(fake(script)), {"it names the step file", "wanted: a file in"});
  EXPECT_TRUE(fs::exists(file));
}

TEST_F(PythonReferenceTrouble, AfterATimeoutTheProgramAndItsChildrenAreGone) {
  auto options = fake("echo $$ > PIDS\nsleep 1000 &\necho $! >> PIDS\necho stuck >&2\nwait\n");
  options.timeout = std::chrono::seconds(2);
  expect_parts(failure_of_step(options), {"no answer within 2 s; wanted: {\"ready\": true",
                                          "The end of its stderr:\n  stuck"});
  const auto pids = wait_for_numbers(pid_file(), 2);
  ASSERT_EQ(pids.size(), 2U);
  for (const auto pid : pids) {
    EXPECT_TRUE(comes_true_within(std::chrono::seconds(5), [pid] { return !is_running(pid); }));
  }
}

TEST_F(PythonReferenceTrouble, OrdersToAProgramThatDoesNotReadDoNotKillUs) {
  // Writing to what nobody reads raises SIGPIPE, which ends a process by default. The script stops
  // reading before it says that it is ready, so that the order comes too late for certain.
  ASSERT_NE(::signal(SIGPIPE, SIG_DFL), SIG_ERR);
  const auto message = failure_of_step(fake(std::string("exec 0<&-\n") + kReady + "exit 4\n"));
  expect_parts(message, {"it exited with code 4 without an answer"});
}

TEST_F(PythonReferenceTrouble, AfterAnErrorEveryCallSaysWhy) {
  PythonReference python(scenario(), initial(), fake("exit 3\n"));
  EXPECT_THROW(python.step(0, nullptr), PythonReferenceError);
  for (const auto& act : std::vector<std::function<void()>>{[&] { python.step(1, nullptr); },
                                                            [&] { python.finish(); }}) {
    try {
      act();
      ADD_FAILURE() << "no error";
    } catch (const PythonReferenceError& error) {
      expect_parts(error.what(), {"runs no more: sh exited with code 3 without an answer"});
    }
  }
}

TEST_F(PythonReferenceTrouble, AnEndInBadOrderIsNamed) {
  const auto failure_of_finish = [this](const PythonReference::Options& options) {
    return message_of([&] { PythonReference(scenario(), initial(), options).finish(); });
  };
  const std::string ready = kReady;
  expect_parts(failure_of_finish(fake(ready + "read line\nexit 5\n")),
               {"it exited with code 5; wanted: exit code 0 after the last step"});
  expect_parts(failure_of_finish(fake(ready + "read line\necho '{\"error\": \"disk full\"}'\n")),
               {"failed: disk full; wanted: exit code 0"});
  auto slow = fake(ready + "read line\nexec sleep 1000\n");
  slow.timeout = std::chrono::seconds(2);
  expect_parts(failure_of_finish(slow), {"it did not end within 2 s"});
  auto quiet = fake(ready + "read line\nexec sleep 1000 >&-\n");
  quiet.timeout = std::chrono::seconds(2);
  expect_parts(failure_of_finish(quiet), {"it did not end within 2 s"});
}

TEST_F(PythonReferenceTrouble, TheDestructorEndsAProgramThatIsBusy) {
  {
    PythonReference python(scenario(), initial(), fake("echo $$ > PIDS\nexec sleep 1000\n"));
    ASSERT_EQ(wait_for_numbers(pid_file(), 1).size(), 1U);
  }
  EXPECT_FALSE(is_running(wait_for_numbers(pid_file(), 1).front()));
  EXPECT_TRUE(fs::is_empty(work_folder()));
}

TEST_F(PythonReferenceTrouble, AProgramDoesNotOutliveAParentThatIsKilled) {
  const auto options = fake("echo $$ > PIDS\nexec sleep 1000\n");
  const auto parent = ::fork();
  if (parent == 0) {
    const PythonReference python(scenario(), initial(), options);
    wait_for_numbers(pid_file(), 1);
    ::raise(SIGKILL);
  }
  ASSERT_EQ(::waitpid(parent, nullptr, 0), parent);
  const auto pids = wait_for_numbers(pid_file(), 1);
  ASSERT_EQ(pids.size(), 1U);
  EXPECT_TRUE(
      comes_true_within(std::chrono::seconds(5), [&] { return !is_running(pids.front()); }));
}

TEST_F(PythonReferenceTrouble, TheRealProgramRemovesTheFilesOfAParentThatIsKilled) {
  initial();  // made before the fork, so that the child need not compute
  const auto parent = ::fork();
  if (parent == 0) {
    PythonReference python(scenario(), initial(), real());
    python.step(0, nullptr);
    ::raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(parent, &status, 0), parent);
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << "status " << status;
  EXPECT_TRUE(
      comes_true_within(std::chrono::seconds(20), [&] { return fs::is_empty(work_folder()); }));
}

TEST_F(PythonReferenceTrouble, TheRealProgramsComplaintsArePassedOn) {
  TrainingState state;
  state.steps_done = 4;
  state.parameters = initial();
  const auto message = message_of([&] {
    PythonReference python(scenario(), initial(), real());
    python.step(0, nullptr);
    EXPECT_TRUE(fs::is_empty(fs::directory_iterator(work_folder())->path() / "trace"));
    python.step(1, &state);
  });
  expect_parts(message, {"the state lacks the tensor optimizer_state/exp_avg/",
                         "It was run as: ", "reference.py --scenario"});
}

TEST_F(PythonReferenceTrouble, SeveralLiveAtOnceAndEndInAnyOrder) {
  std::vector<std::unique_ptr<PythonReference>> several;
  // Each counts the sockets that it has: its own stdin, and nothing of the others.
  const auto options =
      fake("ls -l /proc/$$/fd | grep -c socket >> PIDS\n" + std::string(kReady) + "read line\n");
  for (int i = 0; i < 3; ++i) {
    several.push_back(std::make_unique<PythonReference>(scenario(), initial(), options));
  }
  EXPECT_EQ(wait_for_numbers(pid_file(), 3), (std::vector<int>{1, 1, 1}));
  several[0].reset();
  several[2]->finish();
  several[1]->finish();
  several.clear();
  EXPECT_TRUE(fs::is_empty(work_folder()));
}

}  // namespace
}  // namespace shardproof
