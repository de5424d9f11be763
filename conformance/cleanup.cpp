#include "conformance/cleanup.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

namespace shardproof {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::array<int, 3> kSignals = {SIGINT, SIGTERM, SIGHUP};

/// timeout(1) and a closing terminal send a signal to the process and to its group, so that it
/// comes twice where it is meant once.
constexpr std::chrono::milliseconds kSameSignal{500};

struct Registry {
  std::recursive_mutex mutex;
  std::set<const Leftover*> leftovers;
};

/// Never destroyed: the thread that waits for signals outlives main().
Registry& registry() {
  static auto& registry = *new Registry;
  return registry;
}

const char* name_of(int signal) {
  return signal == SIGINT ? "SIGINT" : signal == SIGTERM ? "SIGTERM" : "SIGHUP";
}

bool is_ignored(int signal) {
  struct sigaction action {};
  return ::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

/// The other threads go on until the end. Under another name the folder gets no new files from
/// them, but for one that was being opened just then.
std::error_code remove_folder(const std::filesystem::path& folder) {
  auto renamed = folder;
  renamed += ".removed";
  std::error_code error;
  std::filesystem::rename(folder, renamed, error);
  const auto& left = error ? folder : renamed;
  for (int attempt = 0; attempt < 10; ++attempt) {
    std::filesystem::remove_all(left, error);
    if (!error) {
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return error;
}

/// Waits until it is dead, so that it writes no more, and leaves it to be reaped by whoever does.
void kill_group(::pid_t leader) {
  ::siginfo_t ignored{};
  if (::waitid(P_PID, leader, &ignored, WEXITED | WNOHANG | WNOWAIT) != 0) {
    return;  // it was reaped, and its number may be somebody else's by now
  }
  ::kill(-leader, SIGKILL);
  while (::waitid(P_PID, leader, &ignored, WEXITED | WNOWAIT) != 0 && errno == EINTR) {
  }
}

[[noreturn]] void end_by(int signal) {
  // Never unlocked: what the others do now, the exceptions included that this brings about, comes
  // to nothing where they give up a Leftover.
  registry().mutex.lock();
  std::string line = fmt::format("{}shardproof: ended by {}", ::isatty(STDERR_FILENO) ? "\n" : "",
                                 name_of(signal));
  // Processes first, which write into the folders.
  for (const bool processes : {true, false}) {
    for (const auto* leftover : registry().leftovers) {
      if (leftover->is_process() != processes) {
        continue;
      }
      const auto trouble = leftover->remove();
      for (const auto& part : {leftover->loss(), trouble}) {
        line += part.empty() ? "" : "; " + part;
      }
    }
  }
  line += "\n";
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
  ::sigset_t only;
  ::sigemptyset(&only);
  ::sigaddset(&only, signal);
  ::pthread_sigmask(SIG_UNBLOCK, &only, nullptr);
  ::raise(signal);
  ::_exit(128 + signal);
}

void wait_for_signals(const ::sigset_t& signals) {
  int signal = 0;
  while (::sigwait(&signals, &signal) != 0) {
  }
  std::thread(end_by, signal).detach();
  for (auto left = kSameSignal; left.count() > 0;) {
    const auto before = Clock::now();
    const ::timespec wait{0, std::chrono::nanoseconds(left).count()};
    ::sigtimedwait(&signals, nullptr, &wait);
    left -= std::chrono::ceil<std::chrono::milliseconds>(Clock::now() - before);
  }
  ::pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  while (true) {
    ::pause();
  }
}

}  // namespace

void clean_up_when_signalled() {
  ::sigset_t signals;
  ::sigemptyset(&signals);
  for (const int signal : kSignals) {
    // A signal that is blocked is queued even if it is ignored, so it must not be waited for.
    if (!is_ignored(signal)) {
      ::sigaddset(&signals, signal);
    }
  }
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::thread([signals] { wait_for_signals(signals); }).detach();
}

Uninterrupted uninterrupted() {
  return Uninterrupted(registry().mutex);
}

Leftover::Leftover(std::filesystem::path folder, std::string loss)
    : folder_(std::move(folder)), loss_(std::move(loss)) {
  const auto whole = uninterrupted();
  registry().leftovers.insert(this);
}

Leftover::Leftover(::pid_t group) : group_(group) {
  const auto whole = uninterrupted();
  registry().leftovers.insert(this);
}

Leftover::~Leftover() {
  const auto whole = uninterrupted();
  registry().leftovers.erase(this);
}

std::string Leftover::remove() const {
  if (is_process()) {
    kill_group(group_);
    return "";
  }
  const auto error = remove_folder(folder_);
  return error ? fmt::format("{} could not be removed: {}", folder_.string(), error.message()) : "";
}

}  // namespace shardproof
