#include "conformance/python_reference.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/wait.h>
#include <torch/version.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "conformance/python_process.h"
#include "conformance/trace_io.h"

#ifndef SHARDPROOF_PYTHON_REFERENCE
#define SHARDPROOF_PYTHON_REFERENCE ""
#endif

namespace shardproof {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kStderrLines = 20;

std::string sentence_of(const json& error) {
  return error.is_string() ? error.get<std::string>() : error.dump();
}

std::string torch_version() {
  return fmt::format("{}.{}", TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR);
}

}  // namespace

// ---------------------------------------------------------------------------------------------

struct PythonReference::Impl {
  Impl(const Scenario& scenario, const std::map<std::string, torch::Tensor>& initial,
       Options asked);

  StepTrace step(int step, const TrainingState* state);
  void finish();

  /// Sends an order and returns the answer, which has no "error" in it.
  json ask(const json& order, std::string_view wanted);
  json await_answer(std::string_view wanted);
  /// Before the first order.
  void await_start();
  StepTrace take_step(const json& answer, int step);
  /// Ends the program and throws.
  [[noreturn]] void fail(const std::string& seen, std::string_view wanted, std::string_view cure);
  /// The same where the interpreter is to blame.
  [[noreturn]] void refuse_python(const std::string& seen);
  void require_running() const;

  Options options;
  PythonFolder scratch;
  fs::path stderr_file;
  std::vector<std::string> command;
  std::unique_ptr<Child> child;
  bool started = false;
  std::string ended;  // why the program no longer runs
};

namespace {

PythonReference::Options with_defaults(PythonReference::Options options) {
  if (options.python.empty()) {
    options.python = default_python();
  }
  if (options.program.empty()) {
    options.program = from_environment("SHARDPROOF_PYTHON_REFERENCE", SHARDPROOF_PYTHON_REFERENCE);
  }
  return options;
}

constexpr std::string_view kCureProgram =
    "If the sources were moved since this was built, set SHARDPROOF_PYTHON_REFERENCE to their "
    "reference/python/reference.py";
constexpr std::string_view kCureSpace = "Free some space, or set TMPDIR to another folder";
constexpr std::string_view kCureTime = "Allow more time (--timeout), or see what it waits for";
constexpr std::string_view kCureStderr =
    "What it wrote to stderr says why; run the command by hand to see it again";

}  // namespace

PythonReference::Impl::Impl(const Scenario& scenario,
                            const std::map<std::string, torch::Tensor>& initial, Options asked)
    : options(with_defaults(std::move(asked))),
      scratch(options.work_folder),
      stderr_file(scratch.path() / "stderr.txt") {
  const auto& folder = scratch.path();
  command = {options.python.string(),
             options.program.string(),
             "--scenario",
             (folder / "scenario.json").string(),
             "--initial",
             (folder / "initial.safetensors").string(),
             "--output",
             (folder / "trace").string(),
             "--lockstep",
             "--torch-version",
             torch_version(),
             "--scratch",
             folder.string()};
  std::error_code ignored;
  if (!fs::is_regular_file(options.program, ignored)) {
    fail(fmt::format("there is no file {}", shown(options.program.string())), "the Python program",
         kCureProgram);
  }
  const auto python = find_executable(options.python);
  if (!python) {
    refuse_python(fmt::format("there is no program {}{}", options.python.string(),
                              options.python.has_parent_path() ? "" : " in PATH"));
  }
  command.front() = python->string();

  try {
    write_safetensors(folder / "initial.safetensors", {initial, {}});
    std::ofstream file(folder / "scenario.json");
    file << to_json(scenario).dump(2) << '\n';
    if (!file.flush()) {
      throw FileError(
          fmt::format("{}: {}", (folder / "scenario.json").string(), errno_text(errno)));
    }
  } catch (const FileError& error) {
    fail(fmt::format("its input could not be written: {}", error.what()), "room for the files",
         kCureSpace);
  }
  try {
    child = std::make_unique<Child>(command, stderr_file);
  } catch (const PythonReferenceError& error) {
    refuse_python(
        fmt::format("{} could not be started: {}", options.python.string(), error.what()));
  }
}

void PythonReference::Impl::fail(const std::string& seen, std::string_view wanted,
                                 std::string_view cure) {
  child.reset();
  ended = seen;
  const auto written = last_lines(stderr_file, kStderrLines);
  throw PythonReferenceError(
      fmt::format("the Python reference failed: {}; wanted: {}. {}.\nIt was run as: {}\n{}", seen,
                  wanted, cure, fmt::join(command, " "),
                  written.empty() ? "It wrote nothing to stderr."
                                  : fmt::format("The end of its stderr:\n{}", written)));
}

void PythonReference::Impl::refuse_python(const std::string& seen) {
  child.reset();
  ended = seen;
  const auto written = last_lines(stderr_file, kStderrLines);
  throw PythonUnusable(fmt::format(
      "the Python reference cannot be run: {}; wanted: a Python that has torch {}, numpy and "
      "safetensors. Name one with --python or SHARDPROOF_PYTHON, or go without with --no-python{}",
      seen, torch_version(), written.empty() ? "" : ".\nThe end of its stderr:\n" + written));
}

void PythonReference::Impl::require_running() const {
  if (!ended.empty()) {
    throw PythonReferenceError(
        fmt::format("the Python reference runs no more: {}. Make another one", ended));
  }
}

json PythonReference::Impl::await_answer(std::string_view wanted) {
  const auto deadline = Clock::now() + options.timeout;
  std::string line;
  switch (child->receive(line, deadline)) {
    case Child::Received::line:
      break;
    case Child::Received::timeout:
      try {
        fail(fmt::format("no answer within {} s", options.timeout.count()), wanted, kCureTime);
      } catch (const PythonReferenceError& error) {
        throw PythonReferenceTimeout(error.what());
      }
    case Child::Received::too_long:
      fail(fmt::format("an answer without an end: {}", shown(line)), wanted, kCureStderr);
    case Child::Received::end: {
      // Its stdout can be closed a moment before it ends.
      const auto status = child->wait(Clock::now() + std::chrono::seconds(1));
      const auto how = status ? describe_end(*status) : "it closed its stdout";
      const auto rest =
          line.empty() ? "" : fmt::format(" in the middle of a line: {}", shown(line));
      if (!started && status && WIFEXITED(*status)) {
        refuse_python(fmt::format("{} exited with code {} without an answer{}",
                                  options.python.string(), WEXITSTATUS(*status), rest));
      }
      fail(fmt::format("{} without an answer{}", how, rest), wanted, kCureStderr);
    }
  }
  const json answer = json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!answer.is_object()) {
    if (!started) {
      refuse_python(fmt::format("{} answered {}, where nothing but JSON may go to its stdout",
                                options.python.string(), shown(line)));
    }
    fail(fmt::format("it answered {}", shown(line)), wanted,
         "Only JSON may go to its stdout; whatever else it prints must go to stderr");
  }
  if (const auto error = answer.find("error"); error != answer.end()) {
    if (answer.value("unusable_python", json()) == json(true)) {
      child.reset();
      ended = sentence_of(*error);
      throw PythonUnusable("the Python reference cannot be run: " + ended);
    }
    fail(sentence_of(*error), wanted, "Put right what it complains of");
  }
  return answer;
}

void PythonReference::Impl::await_start() {
  const auto wanted = fmt::format("{{\"ready\": true, \"torch\": \"{}...\"}}", torch_version());
  const json answer = await_answer(wanted);
  const auto torch = answer.find("torch");
  const bool ready =
      answer.value("ready", json()) == json(true) && torch != answer.end() && torch->is_string();
  if (!ready) {
    fail(fmt::format("it answered {}", shown(answer.dump())), wanted, kCureProgram);
  }
  if (!torch->get<std::string>().starts_with(torch_version() + ".")) {
    refuse_python(
        fmt::format("{} has torch {} and not that of this program, on whose kernels the "
                    "bits depend",
                    options.python.string(), torch->get<std::string>()));
  }
  started = true;
}

json PythonReference::Impl::ask(const json& order, std::string_view wanted) {
  if (!started) {
    await_start();
  }
  // If it reads no more, its last words or its exit code say why.
  child->send(order.dump() + "\n");
  return await_answer(wanted);
}

StepTrace PythonReference::Impl::step(int step, const TrainingState* state) {
  require_running();
  const auto state_file = scratch.path() / "state.safetensors";
  json order = {{"step", step}, {"state", nullptr}};
  if (state != nullptr) {
    try {
      write_state(state_file, *state);
    } catch (const FileError& error) {
      fail(fmt::format("the state for step {} could not be written: {}", step, error.what()),
           "room for the files", kCureSpace);
    }
    order["state"] = state_file.string();
  }
  const json answer = ask(order, fmt::format("{{\"step\": {}, \"file\": PATH}} as the answer to {}",
                                             step, order.dump()));
  std::error_code ignored;
  fs::remove(state_file, ignored);
  return take_step(answer, step);
}

StepTrace PythonReference::Impl::take_step(const json& answer, int step) {
  const auto wanted = fmt::format("the trace of step {}", step);
  const auto file = answer.find("file");
  if (answer.value("step", json()) != json(step) || file == answer.end() || !file->is_string()) {
    fail(fmt::format("it answered {}", shown(answer.dump())),
         fmt::format("{{\"step\": {}, \"file\": PATH}}", step), kCureProgram);
  }
  const fs::path path = file->get<std::string>();
  // It is going to be deleted, so it must not be a file of somebody else's.
  if (fs::path(path).lexically_normal().parent_path() != scratch.path() / "trace") {
    fail(fmt::format("it names the step file {}", shown(path.string())),
         fmt::format("a file in {}", (scratch.path() / "trace").string()), kCureProgram);
  }
  StepTrace trace;
  try {
    trace = read_step(path);
  } catch (const std::runtime_error& error) {  // FileError, TraceError
    fail(fmt::format("its step file cannot be read: {}", error.what()), wanted,
         "Check that the disk is not full, and that the program is the one that belongs to this");
  }
  if (trace.step != step) {
    fail(fmt::format("its step file holds step {}", trace.step), wanted, kCureProgram);
  }
  std::error_code ignored;
  fs::remove(path, ignored);
  return trace;
}

void PythonReference::Impl::finish() {
  require_running();
  if (!started) {
    await_start();
  }
  child->send(json({{"end", true}}).dump() + "\n");
  const auto deadline = Clock::now() + options.timeout;
  const std::string_view wanted = "exit code 0 after the last step";
  std::string line;
  const auto received = child->receive(line, deadline);
  if (received == Child::Received::line || received == Child::Received::too_long) {
    const json answer = json::parse(line, nullptr, /*allow_exceptions=*/false);
    const bool complains = answer.is_object() && answer.contains("error");
    fail(complains ? sentence_of(answer["error"]) : fmt::format("it answered {}", shown(line)),
         wanted, kCureStderr);
  }
  const auto status = child->wait(deadline);
  if (!status) {
    fail(fmt::format("it did not end within {} s", options.timeout.count()), wanted, kCureTime);
  }
  if (*status != 0) {
    fail(describe_end(*status), wanted, kCureStderr);
  }
  child.reset();
  ended = "it has finished";
}

PythonReference::PythonReference(const Scenario& scenario,
                                 const std::map<std::string, torch::Tensor>& initial,
                                 Options options)
    : impl_(std::make_unique<Impl>(scenario, initial, std::move(options))) {}

PythonReference::~PythonReference() = default;

StepTrace PythonReference::step(int step, const TrainingState* state) {
  return impl_->step(step, state);
}

void PythonReference::finish() {
  impl_->finish();
}

}  // namespace shardproof
