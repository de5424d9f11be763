#pragma once
// A Python program beside this one: found, started, heard with a deadline, and ended for certain,
// with whatever it started. Private to the conformance suite.

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "conformance/cleanup.h"
#include "conformance/python_reference.h"
#include "conformance/scratch_folder.h"

namespace shardproof {

std::string errno_text(int error);
/// `otherwise` if it is not set or empty.
std::string from_environment(const char* name, const char* otherwise);
/// What PythonReference::Options::python stands for when it is empty.
std::filesystem::path default_python();
/// The file that the shell would run for this name; nothing if there is none.
std::optional<std::filesystem::path> find_executable(const std::filesystem::path& name);

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

/// A folder of its own for a Python program.
class PythonFolder {
 public:
  /// In `parent`, or the system's temporary folder if that is empty. Throws PythonReferenceError if
  /// it cannot be made, or its name is one that Python cannot be told.
  explicit PythonFolder(const std::filesystem::path& parent);
  const std::filesystem::path& path() const { return folder_->path(); }

 private:
  std::optional<ScratchFolder> folder_;
};

std::string last_lines(const std::filesystem::path& path, std::size_t count);
/// What ended a process, as a sentence about "it".
std::string describe_end(int status);
/// Foreign text as a JSON string, cut where it is long.
std::string shown(std::string_view text);

/// A child process in a process group of its own, with orders going to its stdin and answers coming
/// from its stdout. Killed and reaped on destruction.
class Child {
 public:
  /// Throws PythonReferenceError with the system's reason if the program cannot be started.
  Child(const std::vector<std::string>& command, const std::filesystem::path& stderr_file);
  ~Child() { kill(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  /// False if the child no longer reads.
  bool send(std::string_view line);
  enum class Received { line, end, timeout, too_long };
  /// The next line of the child's stdout, without the newline. At `end` it holds what came without
  /// one.
  Received receive(std::string& line, std::chrono::steady_clock::time_point deadline);
  /// The exit status, or nothing if the child still runs at the deadline.
  std::optional<int> wait(std::chrono::steady_clock::time_point deadline);
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

}  // namespace shardproof
