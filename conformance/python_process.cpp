#include "conformance/python_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>

#include "conformance/trace_io.h"
#include "reference/wording.h"

extern char** environ;

namespace shardproof {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kLongestAnswer = 1 << 20;

bool is_executable(const fs::path& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored) && ::access(path.c_str(), X_OK) == 0;
}

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

int milliseconds_until(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1'000'000'000));
}

}  // namespace

std::string errno_text(int error) {
  return std::generic_category().message(error);
}

std::string from_environment(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

fs::path default_python() {
  return from_environment("SHARDPROOF_PYTHON", SHARDPROOF_DEFAULT_PYTHON);
}

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

PythonFolder::PythonFolder(const fs::path& parent) {
  try {
    folder_.emplace(parent, "shardproof-python");
  } catch (const FileError& error) {
    throw PythonReferenceError(error.what());
  }
  if (!is_utf8(path().string())) {
    throw PythonReferenceError(
        fmt::format("Python programs are told paths in UTF-8, and {} is none. Set TMPDIR to "
                    "another folder",
                    path().string()));
  }
}

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

}  // namespace shardproof
