#pragma once
// What is said of fully sharded training, measured: each section takes sentences that are told as
// facts, runs what they speak of, and says how far each is true. `shardproof claims` writes the
// sections as one page and one JSON file (conformance/claims.schema.json).

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iosfwd>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace shardproof {

struct Claim {
  std::string id;         // "clipping.local_norm": section, then lower-case letters and underscores
  std::string sentence;   // as it is told
  std::string verdict;    // "true", "true under a condition", "too general" or "false"
  std::string condition;  // when it holds; empty for "true" and "false"
  std::string evidence;   // what was measured, in a sentence with figures
};

/// A figure that is asserted, not only shown.
struct Check {
  std::string name;  // dotted: claims.<section>.<behaviour>.<dtype>.w<world>.<variant>
  bool held = false;
  std::string message;  // what was seen and wanted, whether it held or not
};

struct ClaimsSection {
  std::string id;  // lower-case letters: --section, and the anchor on the page
  std::string title;
  nlohmann::json data;  // every figure behind the plots and tables
  std::string html;     // below the claims: plots, tables, what they show
  std::vector<Claim> claims;
  std::vector<Check> checks;
  std::vector<std::string> notes;  // what was left out, and why
};

struct ClaimsOptions {
  std::uint64_t seed = 0;
  /// Fewer worlds and steps: to see that all works, not to quote from.
  bool quick = false;
  /// Without it what needs PyTorch itself is left out, and a note says so.
  bool with_python = true;
  std::filesystem::path python;       // empty: as PythonReference::Options says
  std::chrono::seconds timeout{300};  // of one collective, and of the Python program
  /// Called before each part, with what it is.
  std::function<void(const std::string& part)> progress;
};

struct ClaimsSectionEntry {
  std::string id;
  std::string summary;  // for --help
  ClaimsSection (*measure)(const ClaimsOptions&);
};
/// The one list of sections, in the order of the page.
const std::vector<ClaimsSectionEntry>& claims_sections();

struct ClaimsReport {
  ClaimsOptions options;
  std::vector<ClaimsSection> sections;
  std::map<std::string, std::string> environment;  // describe_environment()

  std::int64_t failed() const;  // checks
};

/// Measures the named sections, in the order of the page; all if none is named. Throws UsageError
/// for a name that is none, before anything is measured.
ClaimsReport measure_claims(const std::vector<std::string>& names, const ClaimsOptions& options);

/// Claims and verdicts, then the checks that failed, then one line on all of them.
void print_claims(std::ostream& out, const ClaimsReport& report);
nlohmann::json to_json(const ClaimsReport& report);
std::string render_claims_html(const ClaimsReport& report);

}  // namespace shardproof
