#pragma once
// What a signal that ends the program must not leave behind: folders of temporary or half-written
// files, and child processes.

#include <sys/types.h>

#include <filesystem>
#include <mutex>
#include <string>

namespace shardproof {

/// From here on SIGINT, SIGTERM and SIGHUP end the program in good order: every Leftover is
/// removed, one line on stderr says so, and the program ends by that signal, as whoever sent it
/// expects. A signal that was ignored before stays ignored. A second one, from half a second later
/// on, ends the program at once.
///
/// Call it before there is another thread: threads inherit which signals are blocked.
void clean_up_when_signalled();

/// While this is held, only a second signal ends the program: for what must be done wholly or not
/// at all. Whoever asks for it once the program is being ended waits for the end.
using Uninterrupted = std::unique_lock<std::recursive_mutex>;
[[nodiscard]] Uninterrupted uninterrupted();

/// A folder or a process that goes if a signal ends the program while this lives. Destroy it only
/// after the folder is removed or renamed.
class Leftover {
 public:
  /// `loss` is what the line on stderr says of it, for example "no report was written".
  explicit Leftover(std::filesystem::path folder, std::string loss = "");
  /// A child that leads a process group of its own.
  explicit Leftover(::pid_t group);
  ~Leftover();
  Leftover(const Leftover&) = delete;
  Leftover& operator=(const Leftover&) = delete;

  /// Kills the process, or removes the folder; what could not be done, or "".
  std::string remove() const;
  bool is_process() const { return group_ > 0; }
  const std::string& loss() const { return loss_; }

 private:
  std::filesystem::path folder_;
  ::pid_t group_ = -1;
  std::string loss_;
};

}  // namespace shardproof
