#include "conformance/report_folder.h"

#include <fmt/format.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "conformance/trace_io.h"

namespace shardproof {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

[[noreturn]] void fail_at(const fs::path& path, const std::string& what) {
  throw FileError(fmt::format("{}: {}", path.string(), what));
}

/// Without a trailing slash or links, so that it can be renamed.
fs::path plain_path(const fs::path& folder) {
  std::error_code error;
  fs::path path = fs::weakly_canonical(fs::absolute(folder), error);
  if (error) {
    fail_at(folder, "is no usable path: " + error.message());
  }
  if (!path.has_filename()) {
    path = path.parent_path();
  }
  if (!path.has_filename()) {
    fail_at(folder, "is the root of the file system, not a folder for a report");
  }
  return path;
}

fs::path hidden_beside(const fs::path& folder, std::string_view what) {
  return folder.parent_path() /
         fmt::format(".{}.{}-{}", folder.filename().string(), what, ::getpid());
}

/// Puts `fresh` where `folder` is. If that fails, `folder` is as it was.
void replace_folder(const fs::path& fresh, const fs::path& folder) {
  const fs::path old = hidden_beside(folder, "old");
  std::error_code error;
  const bool had_old = fs::exists(folder, error);
  if (had_old) {
    fs::rename(folder, old, error);
  }
  if (!error) {
    fs::rename(fresh, folder, error);
    if (error && had_old) {
      std::error_code ignored;
      fs::rename(old, folder, ignored);
    }
  }
  if (error) {
    fail_at(folder, "cannot be replaced: " + error.message());
  }
  if (had_old) {
    fs::remove_all(old, error);
  }
}

}  // namespace

ReportFolder::ReportFolder(fs::path folder, ReportMark mark)
    : folder_(plain_path(folder)),
      partial_(hidden_beside(folder_, "partial")),
      mark_(std::move(mark)) {
  check_replaceable();
  const auto whole = uninterrupted();
  std::error_code error;
  fs::remove_all(partial_, error);
  fs::create_directories(partial_, error);
  if (error) {
    fail("cannot be written: " + error.message());
  }
  leftover_.emplace(partial_, "no report was written");
}

ReportFolder::~ReportFolder() {
  if (leftover_) {
    std::error_code ignored;
    fs::remove_all(partial_, ignored);
  }
}

void ReportFolder::publish() {
  check_replaceable();
  const auto whole = uninterrupted();
  replace_folder(partial_, folder_);
  leftover_.reset();
}

void ReportFolder::fail(const std::string& what) const {
  fail_at(folder_, what);
}

bool ReportFolder::is_ours() const {
  std::ifstream file(folder_ / mark_.file);
  const json content = json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!content.is_object() || !content.contains(mark_.key) || !content[mark_.key].is_string()) {
    return false;
  }
  return content[mark_.key].get<std::string>().starts_with(mark_.family);
}

void ReportFolder::check_replaceable() const {
  std::error_code error;
  const fs::file_status status = fs::symlink_status(folder_, error);
  if (!fs::exists(status)) {
    return;
  }
  if (!fs::is_directory(status)) {
    fail("exists and is not a folder; name another one for the report");
  }
  if (!fs::is_empty(folder_, error) && !is_ours()) {
    fail(fmt::format(
        "exists and is no report of this program (it has no {} of the format {}), so it is not "
        "replaced; remove it or name another folder",
        mark_.file, mark_.family.substr(0, mark_.family.find('/'))));
  }
}

}  // namespace shardproof
