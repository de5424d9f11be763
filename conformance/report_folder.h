#pragma once
// A folder that is written whole or not at all: into a hidden folder beside it, which is renamed
// into place at the end.

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "conformance/cleanup.h"

namespace shardproof {

/// By what a folder that this program wrote is known: a JSON file in it, whose `key` begins with
/// `family`.
struct ReportMark {
  std::string file;
  std::string key;
  std::string family;  // "shardproof.summary/"
};

class ReportFolder {
 public:
  /// Makes the hidden folder. Throws FileError (trace_io.h) if it cannot be made, or if `folder`
  /// exists and is neither empty nor a report of the same kind.
  ReportFolder(std::filesystem::path folder, ReportMark mark);
  /// Leaves nothing behind unless publish() was called, not even if a signal ends the program.
  ~ReportFolder();
  ReportFolder(const ReportFolder&) = delete;
  ReportFolder& operator=(const ReportFolder&) = delete;

  /// Where to write.
  const std::filesystem::path& partial() const { return partial_; }
  /// Puts it in the place of the folder. If that fails, the folder is as it was.
  void publish();
  /// Throws a FileError that names the folder.
  [[noreturn]] void fail(const std::string& what) const;

 private:
  /// Throws unless nothing is lost when the folder is replaced.
  void check_replaceable() const;
  bool is_ours() const;

  std::filesystem::path folder_;
  std::filesystem::path partial_;
  ReportMark mark_;
  std::optional<Leftover> leftover_;
};

}  // namespace shardproof
