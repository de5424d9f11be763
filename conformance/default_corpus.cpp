#include "conformance/default_corpus.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "reference/scenario.h"

namespace shardproof {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> files_below(const fs::path& folder) {
  std::vector<std::string> files;
  for (auto entry = fs::recursive_directory_iterator(folder);
       entry != fs::recursive_directory_iterator(); ++entry) {
    const auto name = entry->path().filename().string();
    if (name.starts_with(".") || name == "__pycache__") {
      if (entry->is_directory()) {
        entry.disable_recursion_pending();
      }
    } else if (entry->is_regular_file()) {
      files.push_back(entry->path().string());
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

std::vector<std::string> expand_corpus(const std::vector<std::string>& paths) {
  std::vector<std::string> files;
  for (const auto& path : paths) {
    if (fs::is_directory(path)) {
      const auto below = files_below(path);
      if (below.empty()) {
        throw ScenarioError(
            fmt::format("corpus: folder {} has no files; wanted: text files", path));
      }
      files.insert(files.end(), below.begin(), below.end());
    } else if (fs::exists(path) && !fs::is_regular_file(path)) {
      throw ScenarioError(
          fmt::format("corpus: {} is neither a file nor a folder; wanted: text files", path));
    } else if (fs::exists(path)) {
      files.push_back(path);
    } else {
      throw ScenarioError(
          fmt::format("corpus: {} does not exist; wanted: a file or a folder", path));
    }
  }
  return files;
}

std::vector<std::string> default_corpus() {
  const fs::path source = SHARDPROOF_SOURCE_FOLDER;
  // Only text: the suites may keep binary files beside.
  static const std::set<std::string> text = {".h",   ".cpp",  ".py",    ".md",
                                             ".txt", ".json", ".cmake", ""};
  std::vector<std::string> files;
  for (const auto* part :
       {"README.md", "ci", "conformance", "fault_injection", "impl", "reference"}) {
    const auto path = source / part;
    if (!fs::exists(path)) {
      continue;
    }
    for (const auto& file : expand_corpus({path.string()})) {
      if (text.count(fs::path(file).extension().string()) > 0) {
        files.push_back(file);
      }
    }
  }
  if (files.empty()) {
    throw ScenarioError(
        fmt::format("corpus: the source folder {} that this program was built from is gone; "
                    "wanted: --corpus FILE...",
                    source.string()));
  }
  return files;
}

}  // namespace shardproof
