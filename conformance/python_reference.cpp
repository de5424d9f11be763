#include "conformance/python_reference.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "conformance/cleanup.h"
#include "conformance/trace_io.h"
#include "reference/wording.h"

#ifndef SHARDPROOF_PYTHON_REFERENCE
#define SHARDPROOF_PYTHON_REFERENCE ""
#endif

extern char** environ;

namespace shardproof {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kLongestAnswer = 1 << 20;
constexpr std::size_t kStderrLines = 20;

std::string errno_text(int error) {
  return std::generic_category().message(error);
}

std::string from_environment(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

bool is_executable(const fs::path& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored) && ::access(path.c_str(), X_OK) == 0;
}

/// The file that the shell would run for this name; nothing if there is none.
std::optional<fs::path> find_executable(const fs::path& name) {
  if (name.has_parent_path()) {
    return is_executable(name) ? std::optional(name) : std::nullopt;
  }
  const std::string folders = from_environment("PATH", "/usr/bin:/bin");
  std::string_view rest = folders;
  while (true) {
    const auto colon = rest.find(':');
    const fs::path folder = colon == 0 || rest.empty() ? "." : rest.substr(0, colon);
    if (is_executable(folder / name)) {
      return folder / name;
    }
    if (colon == std::string_view::npos) {
      return std::nullopt;
    }
    rest.remove_prefix(colon + 1);
  }
}

/// Closes itself.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor() { close(); }
  int get() const { return fd_; }
  void close() {
    if (fd_ >= 0) {
      ::close(std::exchange(fd_, -1));
    }
  }

 private:
  int fd_ = -1;
};

/// A folder of its own, removed with all that is in it.
class ScratchFolder {
 public:
  explicit ScratchFolder(const fs::path& parent) {
    std::error_code ignored;
    const auto base = parent.empty() ? fs::temp_directory_path(ignored) : parent;
    std::string name = (fs::absolute(base, ignored) / "shardproof-python-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) {
      throw PythonReferenceError(
          fmt::format("the Python reference needs a folder for the files that are exchanged, and "
                      "{} cannot be made: {}. Set TMPDIR to a folder that can be written",
                      name, errno_text(errno)));
    }
    path_ = name;
    if (!is_utf8(name)) {
      fs::remove(path_, ignored);
      throw PythonReferenceError(
          fmt::format("the Python reference is told paths in UTF-8, and {} is none. Set TMPDIR to "
                      "another folder",
                      name));
    }
  }
  ~ScratchFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

std::string last_lines(const fs::path& path, std::size_t count) {
  std::ifstream file(path);
  std::deque<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    lines.push_back("  " + line);
    if (lines.size() > count) {
      lines.pop_front();
    }
  }
  return fmt::format("{}", fmt::join(lines, "\n"));
}

/// What ended a process, as a sentence about "it".
std::string describe_end(int status) {
  if (WIFEXITED(status)) {
    return fmt::format("it exited with code {}", WEXITSTATUS(status));
  }
  if (WIFSIGNALED(status)) {
    const int signal = WTERMSIG(status);
    const char* hint = signal == SIGKILL ? "; the system may have run out of memory"
                       : signal == SIGTERM
                           ? "; if nobody sent that, the thread that started it ended"
                           : "";
    return fmt::format("it was killed by signal {} ({}){}", signal, ::strsignal(signal), hint);
  }
  return fmt::format("it ended with status {}", status);
}

/// A child process in a process group of its own, with orders going to its stdin and answers coming
/// from its stdout. Killed and reaped on destruction.
class Child {
 public:
  /// Throws PythonReferenceError with the system's reason if the program cannot be started.
  Child(const std::vector<std::string>& command, const fs::path& stderr_file);
  ~Child() { kill(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  /// False if the child no longer reads.
  bool send(std::string_view line);
  enum class Received { line, end, timeout, too_long };
  /// The next line of the child's stdout, without the newline. At `end` it holds what came without
  /// one.
  Received receive(std::string& line, Clock::time_point deadline);
  /// The exit status, or nothing if the child still runs at the deadline.
  std::optional<int> wait(Clock::time_point deadline);
  /// Kills the child and whatever it started, and reaps it.
  void kill() noexcept;

 private:
  ::pid_t pid_ = -1;
  std::optional<Leftover> leftover_;
  std::optional<int> status_;
  FileDescriptor orders_;  // a socket, because only a socket can be written without risking SIGPIPE
  FileDescriptor answers_;
  std::string buffer_;
};

[[noreturn]] void cannot_start(const char* what, int error) {
  throw PythonReferenceError(fmt::format("{}: {}", what, errno_text(error)));
}

struct Pipe {
  FileDescriptor read;
  FileDescriptor write;
};

Pipe make_pipe() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    cannot_start("pipe", errno);
  }
  return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
}

/// Everything between fork and exec. Other threads may have held any lock when this process was
/// forked, so only async-signal-safe functions are called, and nothing is allocated.
[[noreturn]] void become(char* const* arguments, char* const* environment, int in, int out, int err,
                         ::pid_t parent, int failure) {
  // In a group of its own it can be killed with its children, and the terminal's ^C comes to the
  // parent alone.
  ::setpgid(0, 0);
  ::sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  ::signal(SIGTERM, SIG_DFL);
  ::signal(SIGPIPE, SIG_DFL);
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  // The parent may have died before the line above.
  if (::getppid() == parent && ::dup2(in, STDIN_FILENO) >= 0 && ::dup2(out, STDOUT_FILENO) >= 0 &&
      ::dup2(err, STDERR_FILENO) >= 0) {
    ::execve(arguments[0], arguments, environment);
  }
  const int error = errno;
  [[maybe_unused]] const auto written = ::write(failure, &error, sizeof(error));
  ::_exit(127);
}

Child::Child(const std::vector<std::string>& command, const fs::path& stderr_file) {
  std::array<int, 2> sockets{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets.data()) != 0) {
    cannot_start("socketpair", errno);
  }
  orders_ = FileDescriptor(sockets[0]);
  const FileDescriptor child_in(sockets[1]);
  Pipe out = make_pipe();
  Pipe failure = make_pipe();
  const FileDescriptor err(
      ::open(stderr_file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  if (err.get() < 0) {
    cannot_start("open", errno);
  }

  std::vector<char*> arguments;
  for (const auto& argument : command) {
    arguments.push_back(const_cast<char*>(argument.c_str()));  // execve does not write to them
  }
  arguments.push_back(nullptr);
  std::vector<char*> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    environment.push_back(*entry);
  }
  std::string no_bytecode = "PYTHONDONTWRITEBYTECODE=1";  // no __pycache__ in the source tree
  environment.push_back(no_bytecode.data());
  environment.push_back(nullptr);

  const ::pid_t parent = ::getpid();
  auto whole = uninterrupted();
  pid_ = ::fork();
  if (pid_ == 0) {
    become(arguments.data(), environment.data(), child_in.get(), out.write.get(), err.get(), parent,
           failure.write.get());
  }
  if (pid_ < 0) {
    cannot_start("fork", errno);
  }
  ::setpgid(pid_, pid_);  // whichever of the two processes comes first
  leftover_.emplace(pid_);
  whole.unlock();
  answers_ = std::move(out.read);
  out.write.close();
  failure.write.close();
  int error = 0;
  ::ssize_t got = 0;
  do {
    got = ::read(failure.read.get(), &error, sizeof(error));
  } while (got < 0 && errno == EINTR);
  if (got == sizeof(error)) {
    kill();
    cannot_start("exec", error);
  }
}

bool Child::send(std::string_view line) {
  while (!line.empty()) {
    const auto sent = ::send(orders_.get(), line.data(), line.size(), MSG_NOSIGNAL);
    if (sent >= 0) {
      line.remove_prefix(static_cast<std::size_t>(sent));
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

int milliseconds_until(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1'000'000'000));
}

Child::Received Child::receive(std::string& line, Clock::time_point deadline) {
  while (true) {
    if (const auto newline = buffer_.find('\n'); newline != std::string::npos) {
      line = buffer_.substr(0, newline);
      buffer_.erase(0, newline + 1);
      return Received::line;
    }
    if (buffer_.size() > kLongestAnswer) {
      line = buffer_;
      return Received::too_long;
    }
    ::pollfd waiting{answers_.get(), POLLIN, 0};
    const int ready = ::poll(&waiting, 1, milliseconds_until(deadline));
    if (ready == 0) {
      line = buffer_;
      return Received::timeout;
    }
    std::array<char, 4096> bytes{};
    const auto got = ready < 0 ? -1 : ::read(answers_.get(), bytes.data(), bytes.size());
    if (got > 0) {
      buffer_.append(bytes.data(), static_cast<std::size_t>(got));
    } else if (got == 0 || errno != EINTR) {
      line = std::exchange(buffer_, {});
      return Received::end;
    }
  }
}

std::optional<int> Child::wait(Clock::time_point deadline) {
  while (!status_ && pid_ > 0) {
    int status = 0;
    const auto reaped = ::waitpid(pid_, &status, WNOHANG);
    if (reaped == pid_) {
      status_ = status;
    } else if (reaped < 0 && errno != EINTR) {
      status_ = 0;  // somebody else reaped it: how it ended is not known
    } else if (Clock::now() >= deadline) {
      break;
    } else {
      ::usleep(2000);
    }
  }
  return status_;
}

void Child::kill() noexcept {
  if (pid_ <= 0) {
    return;
  }
  // The group outlives its first process if that left children behind.
  ::kill(-pid_, SIGKILL);
  leftover_.reset();
  if (!status_) {
    ::kill(pid_, SIGKILL);
    int status = 0;
    while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    status_ = status;
  }
  pid_ = -1;
}

std::string shown(std::string_view text) {
  constexpr std::size_t kShown = 200;
  const bool cut = text.size() > kShown;
  return fmt::format(
      "{}{}",
      json(std::string(text.substr(0, kShown))).dump(-1, ' ', true, json::error_handler_t::replace),
      cut ? "..." : "");
}

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
  ScratchFolder scratch;
  fs::path stderr_file;
  std::vector<std::string> command;
  std::unique_ptr<Child> child;
  bool started = false;
  std::string ended;  // why the program no longer runs
};

namespace {

PythonReference::Options with_defaults(PythonReference::Options options) {
  if (options.python.empty()) {
    options.python = from_environment("SHARDPROOF_PYTHON", SHARDPROOF_DEFAULT_PYTHON);
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
