#pragma once
// Runs the shardproof command as a user does.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <string>

namespace shardproof {

struct Ended {
  int code = -1;     // exit code; 1000 + signal if killed
  std::string text;  // stdout and stderr
};

/// Runs the command through the shell with a deadline, so that a hang is a failure (124) and not a
/// wait. A deadline of ours that expires ends with 137, which no run of ours does.
inline Ended shardproof(const std::string& arguments, const std::string& before = "") {
  const auto command =
      before + " timeout -s KILL 120 " + SHARDPROOF_COMMAND + " " + arguments + " 2>&1";
  Ended ended;
  auto* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) {
    ADD_FAILURE() << "popen failed";
    return ended;
  }
  char buffer[4096];
  while (const auto got = fread(buffer, 1, sizeof buffer, pipe)) {
    ended.text.append(buffer, got);
  }
  const int status = pclose(pipe);
  ended.code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  return ended;
}

}  // namespace shardproof
