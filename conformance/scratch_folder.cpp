#include "conformance/scratch_folder.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "conformance/trace_io.h"

namespace shardproof {

ScratchFolder::ScratchFolder(const std::filesystem::path& parent, const std::string& name) {
  std::error_code error;
  const auto base = parent.empty() ? std::filesystem::temp_directory_path(error) : parent;
  if (error) {
    throw FileError(
        "there is no folder for temporary files; set TMPDIR to one that can be written");
  }
  auto pattern = (std::filesystem::absolute(base, error) / (name + "-XXXXXX")).string();
  const auto whole = uninterrupted();
  if (mkdtemp(pattern.data()) == nullptr) {
    throw FileError(fmt::format(
        "the temporary folder {} cannot be made: {}; set TMPDIR to a folder that can be written",
        pattern, std::error_code(errno, std::generic_category()).message()));
  }
  path_ = pattern;
  leftover_.emplace(path_);
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace shardproof
