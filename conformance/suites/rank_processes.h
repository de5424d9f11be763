#pragma once
// Starts the ranks of a test as processes, and sees to it that none is left when the test ends: all
// that they started in turn is found by a mark in its environment.

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "conformance/suites/temporary_folder.h"

extern char** environ;

namespace shardproof {

/// What became of a process.
struct Ended {
  int exit_code = -1;  // or 128 + the signal that ended it
  std::string output;  // of both streams
  bool was_late = false;
  std::chrono::milliseconds after{};
};

class RankProcesses {
 public:
  using Clock = std::chrono::steady_clock;
  using Variables = std::map<std::string, std::string>;

  RankProcesses() : mark_("SHARDPROOF_TEST_RUN=" + folder_.path().string()) {}
  ~RankProcesses() {
    for (auto& process : processes_) {
      if (!process.is_over) {
        ::kill(process.pid, SIGKILL);
        ::waitpid(process.pid, nullptr, 0);
      }
    }
    for (const auto pid : left_behind()) {
      ::kill(pid, SIGKILL);
    }
  }
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  /// Starts a program with these variables added to the environment. Returns its number here.
  int start(const std::vector<std::string>& command, const Variables& variables) {
    const auto number = static_cast<int>(processes_.size());
    Process process;
    process.output_file = (folder_.path() / std::to_string(number)).string();
    // Between fork and exec a program that has threads may do next to nothing, so all is made here.
    std::vector<std::string> settings = {mark_};
    for (const auto& [name, value] : variables) {
      settings.push_back(name + "=" + value);
    }
    for (char** entry = environ; *entry != nullptr; ++entry) {
      const std::string text = *entry;
      if (!variables.contains(text.substr(0, text.find('=')))) {
        settings.push_back(text);
      }
    }
    auto arguments = command;
    auto argv = pointers(arguments);
    auto envp = pointers(settings);
    process.pid = ::fork();
    if (process.pid == 0) {
      const int file = ::open(process.output_file.c_str(), O_CREAT | O_WRONLY | O_APPEND, 0600);
      ::dup2(file, 1);
      ::dup2(file, 2);
      ::execvpe(argv[0], argv.data(), envp.data());
      ::_exit(127);
    }
    process.started = Clock::now();
    processes_.push_back(process);
    return number;
  }

  int count() const { return static_cast<int>(processes_.size()); }
  pid_t pid(int number) const { return processes_[number].pid; }

  /// What it has written so far.
  std::string output(int number) const {
    std::ifstream file(processes_[number].output_file);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  /// False if it does not write this in time.
  bool wait_for_output(int number, const std::string& text, std::chrono::milliseconds timeout) {
    const auto deadline = Clock::now() + timeout;
    while (output(number).find(text) == std::string::npos) {
      if (Clock::now() > deadline) {
        return false;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return true;
  }

  /// Waits until all have ended. Those that have not in time are called late, and killed.
  std::vector<Ended> wait(std::chrono::milliseconds timeout) {
    const auto deadline = Clock::now() + timeout;
    const auto collect_all = [&] {
      bool all = true;
      for (auto& process : processes_) {
        all = collect(process) && all;
      }
      return all;
    };
    while (!collect_all() && Clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    std::vector<Ended> all;
    for (std::size_t i = 0; i < processes_.size(); ++i) {
      auto& process = processes_[i];
      if (!process.is_over) {
        ::kill(process.pid, SIGKILL);
        ::waitpid(process.pid, nullptr, 0);
        process.is_over = true;
        process.ended.was_late = true;
      }
      process.ended.output = output(static_cast<int>(i));
      all.push_back(process.ended);
    }
    return all;
  }

  /// Processes that bear the mark of this test and still run.
  std::vector<pid_t> left_behind() const {
    std::vector<pid_t> pids;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored)) {
      const auto name = entry.path().filename().string();
      if (name.find_first_not_of("0123456789") != std::string::npos) {
        continue;
      }
      std::ifstream file(entry.path() / "environ", std::ios::binary);
      const std::string text{std::istreambuf_iterator<char>(file), {}};
      if (text.find(mark_) != std::string::npos) {
        pids.push_back(static_cast<pid_t>(std::stol(name)));
      }
    }
    return pids;
  }

 private:
  struct Process {
    pid_t pid = 0;
    std::string output_file;
    Clock::time_point started;
    bool is_over = false;
    Ended ended;
  };

  static std::vector<char*> pointers(std::vector<std::string>& texts) {
    std::vector<char*> result;
    for (auto& text : texts) {
      result.push_back(text.data());
    }
    result.push_back(nullptr);
    return result;
  }

  static bool collect(Process& process) {
    int status = 0;
    if (!process.is_over && ::waitpid(process.pid, &status, WNOHANG) == process.pid) {
      process.is_over = true;
      process.ended.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      process.ended.after =
          std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - process.started);
    }
    return process.is_over;
  }

  TemporaryFolder folder_;
  std::string mark_;
  std::vector<Process> processes_;
};

}  // namespace shardproof
