#pragma once
// Writes down a run's verdicts: results.jsonl (one line per verdict), summary.json, report.html,
// and the table for the terminal.

#include <filesystem>
#include <fstream>
#include <iosfwd>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "conformance/fault.h"
#include "conformance/report_folder.h"
#include "conformance/verdict.h"
#include "reference/scenario.h"

namespace shardproof {

/// One row of the table: every verdict of one reference and quantity.
struct SummaryRow {
  std::string reference;
  std::string quantity;
  std::int64_t tensors = 0;  // verdicts
  std::int64_t elements = 0;
  RuleKind rule{};
  std::uint64_t worst_ulp = 0;
  double worst_ratio = 0;  // bounded: share of the bound that was used, 1 is all
  std::int64_t failed = 0;
};

struct RunSummary {
  Scenario scenario;
  std::string fault;            // "" for none
  std::vector<Strike> strikes;  // where the fault struck, by step and rank
  double seconds = 0;
  /// Of all that every rank computed in every step (16 hex digits): equal for
  /// runs that are equal to the bit, whatever the ranks were and what they talked through.
  std::string trace_digest;
  std::vector<SummaryRow> rows;
  std::vector<Verdict> guards;
  bool has_divergence = false;
  Verdict first_divergence;
  Outcome outcome = Outcome::passed;
  std::vector<std::string> notes;                  // e.g. why a reference was not applicable
  std::map<std::string, std::string> environment;  // versions and hardware: "libtorch", "cpu", ...
};

std::vector<SummaryRow> summarise(const std::vector<Verdict>& verdicts);

/// The table, with the first divergence below it when there is one.
void print_table(std::ostream& out, const RunSummary& summary);

/// How often the planted fault struck and where first: "flipped_bit struck 1 time; first at step 2,
/// rank 1: gradient blocks.0.mlp.up.weight, element 12240".
std::string describe_strikes(const RunSummary& summary);

/// One cell of the strip that shows how a run went: the worst of a quantity at a step.
struct StepCell {
  std::string reference;
  Quantity quantity{};
  int step = 0;
  RuleKind rule{};
  std::uint64_t worst_ulp = 0;
  double worst_ratio = 0;
  std::int64_t failed = 0;  // verdicts
};

/// The page report.html: one file that needs nothing else, readable on paper. The cells are in any
/// order.
std::string render_html(const RunSummary& summary, const std::vector<StepCell>& cells);

/// A value as people and machines read it back: 9 significant digits if it is a float32, else 17,
/// and in hexadecimal, e.g. "0.100000001 (0x1.99999ap-4)".
std::string spell_value(double value);

/// A folder of results (ReportFolder): an unfinished report leaves nothing behind. Throws FileError
/// (trace_io.h) if the folder cannot be written.
class ReportWriter {
 public:
  explicit ReportWriter(std::filesystem::path folder);
  void add(const Verdict& verdict);
  void finish(const RunSummary& summary);

 private:
  ReportFolder folder_;
  std::ofstream results_;
  std::map<std::tuple<std::string, Quantity, int>, StepCell> cells_;
};

}  // namespace shardproof
