#pragma once
// A folder of temporary files that is gone when its owner is, or when a signal ends the program.

#include <filesystem>
#include <optional>
#include <string>

#include "conformance/cleanup.h"

namespace shardproof {

class ScratchFolder {
 public:
  /// "NAME-XXXXXX" in `parent`, or in the system's temporary folder if that is empty. Throws
  /// FileError if it cannot be made.
  explicit ScratchFolder(const std::filesystem::path& parent = {},
                         const std::string& name = "shardproof");
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  std::optional<Leftover> leftover_;
};

}  // namespace shardproof
