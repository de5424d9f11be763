#include "conformance/report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <ostream>

#include "conformance/trace_io.h"

namespace shardproof {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::uint64_t kFurthest = std::numeric_limits<std::uint64_t>::max();
constexpr std::string_view kSummaryFormat = "shardproof.summary/1";
// Of any version: an old report of ours may be replaced by a new one.
constexpr std::string_view kSummaryFamily = "shardproof.summary/";

/// 3301888 as "3,301,888".
std::string grouped(std::int64_t number) {
  std::string text = std::to_string(number);
  for (auto at = static_cast<std::int64_t>(text.size()) - 3; at > 0; at -= 3) {
    text.insert(static_cast<std::size_t>(at), ",");
  }
  return text;
}

std::string worst_of(const SummaryRow& row) {
  if (row.rule == RuleKind::bounded) {
    return fmt::format("{:.2g} of bound", row.worst_ratio);
  }
  return row.worst_ulp == kFurthest ? std::string("NaN") : fmt::format("{} ULP", row.worst_ulp);
}

std::string verdict_of(const SummaryRow& row) {
  return row.failed == 0 ? std::string("passed") : fmt::format("FAILED {}", grouped(row.failed));
}

// ---- The table ----------------------------------------------------------------------------------

constexpr std::size_t kColumns = 7;
using Line = std::array<std::string, kColumns>;
constexpr std::array<bool, kColumns> kAlignsRight = {false, false, true, true, false, true, false};

void print_lines(std::ostream& out, const std::vector<Line>& lines) {
  std::array<std::size_t, kColumns> widths{};
  for (const Line& line : lines) {
    for (std::size_t i = 0; i < kColumns; ++i) {
      widths[i] = std::max(widths[i], line[i].size());
    }
  }
  for (std::size_t row = 0; row < lines.size(); ++row) {
    std::string text;
    for (std::size_t i = 0; i < kColumns; ++i) {
      text += kAlignsRight[i] ? fmt::format("{:>{}}  ", lines[row][i], widths[i])
                              : fmt::format("{:<{}}  ", lines[row][i], widths[i]);
    }
    text.erase(text.find_last_not_of(' ') + 1);
    out << text << '\n';
    if (row == 0) {
      out << std::string(text.size(), '-') << '\n';
    }
  }
}

void print_rows(std::ostream& out, const RunSummary& summary) {
  std::vector<Line> lines = {
      {"reference", "quantity", "tensors", "elements", "rule", "worst", "verdict"}};
  for (const SummaryRow& row : summary.rows) {
    lines.push_back({row.reference, row.quantity, grouped(row.tensors), grouped(row.elements),
                     std::string(to_string(row.rule)), worst_of(row), verdict_of(row)});
  }
  print_lines(out, lines);
}

void print_guards(std::ostream& out, const std::vector<Verdict>& guards) {
  if (guards.empty()) {
    return;
  }
  const auto count = [&](Outcome outcome) {
    return std::count_if(guards.begin(), guards.end(),
                         [&](const Verdict& guard) { return guard.outcome == outcome; });
  };
  out << fmt::format("guards: {} passed", count(Outcome::passed));
  if (const auto skipped = count(Outcome::not_applicable); skipped > 0) {
    out << fmt::format(", {} not applicable", skipped);
  }
  out << fmt::format(", {} failed\n", count(Outcome::failed));
  for (const Verdict& guard : guards) {
    if (guard.outcome == Outcome::failed) {
      out << fmt::format("  FAILED {}: {}\n", guard.name, guard.message);
    }
  }
}

std::string ulp_text(const Verdict& verdict) {
  return verdict.ulp == kFurthest ? std::string("a NaN against a number")
                                  : fmt::format("{} ULP", verdict.ulp);
}

void print_divergence(std::ostream& out, const Verdict& verdict) {
  const auto line = [&](std::string_view label, const std::string& text) {
    out << fmt::format("  {:<9} {}\n", label, text);
  };
  out << "\nFirst divergence\n";
  line("check", verdict.check);
  line("where",
       fmt::format("step {}, {} \"{}\"", verdict.step, to_string(verdict.quantity), verdict.name));
  if (verdict.element >= 0) {
    if (verdict.rank != kNoRank) {
      line("rank", std::to_string(verdict.rank));
    }
    line("element", fmt::format("{}, index [{}]", verdict.element, fmt::join(verdict.index, ", ")));
    line("got", spell_value(verdict.got));
    line("want", spell_value(verdict.want));
    line("distance", ulp_text(verdict));
    line("allowed", verdict.rule == RuleKind::exact
                        ? std::string("0 ULP")
                        : fmt::format("{:.3g}; {:.3g} x as much was seen", verdict.allowed,
                                      verdict.worst_ratio));
    line("extent", fmt::format("{} of {} elements are outside the rule", grouped(verdict.differing),
                               grouped(verdict.elements)));
  }
  line("rule", fmt::format("{}, held to {}: {}", to_string(verdict.rule), verdict.reference,
                           verdict.rule_source));
  if (!verdict.message.empty()) {
    line("note", verdict.message);
  }
}

std::string last_line(const RunSummary& summary) {
  std::int64_t tensors = 0;
  std::int64_t failed = 0;
  for (const SummaryRow& row : summary.rows) {
    tensors += row.tensors;
    failed += row.failed;
  }
  const std::string subject =
      dotted_name(summary.scenario) +
      (summary.fault.empty() ? "" : fmt::format(" with fault {}", summary.fault));
  switch (summary.outcome) {
    case Outcome::passed:
      return fmt::format("PASSED {}: {} checks in {:.1f} s", subject, grouped(tensors),
                         summary.seconds);
    case Outcome::not_applicable:
      return fmt::format("NOT APPLICABLE {}", subject);
    case Outcome::failed:
      break;
  }
  std::string reason = fmt::format("{} of {} checks failed", grouped(failed), grouped(tensors));
  if (summary.has_divergence) {
    const Verdict& first = summary.first_divergence;
    reason += first.rule == RuleKind::guard
                  ? fmt::format(", first guard {}", first.name)
                  : fmt::format(", first {} \"{}\" at step {}", to_string(first.quantity),
                                first.name, first.step);
  } else if (failed == 0) {
    reason = "a guard failed";
  }
  return fmt::format("FAILED {}: {}", subject, reason);
}

// ---- JSON ---------------------------------------------------------------------------------------

json number(double value) {
  if (std::isfinite(value)) {
    return value;
  }
  return std::isnan(value) ? "nan" : (value > 0 ? "inf" : "-inf");
}

json row_json(const SummaryRow& row) {
  return {{"reference", row.reference},
          {"quantity", row.quantity},
          {"tensors", row.tensors},
          {"elements", row.elements},
          {"rule", to_string(row.rule)},
          {"worst_ulp", row.worst_ulp},
          {"worst_ratio", number(row.worst_ratio)},
          {"failed", row.failed}};
}

json strikes_json(const std::vector<Strike>& strikes) {
  json first;
  if (!strikes.empty()) {
    const Strike& strike = strikes.front();
    first = {{"step", strike.step},
             {"rank", strike.rank},
             {"quantity", to_string(strike.quantity)},
             {"name", strike.name},
             {"element", strike.element}};
  }
  return {{"count", strikes.size()}, {"first", std::move(first)}};
}

json summary_json(const RunSummary& summary) {
  json rows = json::array();
  for (const SummaryRow& row : summary.rows) {
    rows.push_back(row_json(row));
  }
  json guards = json::array();
  for (const Verdict& guard : summary.guards) {
    guards.push_back(to_json(guard));
  }
  return {{"format", kSummaryFormat},
          {"name", dotted_name(summary.scenario)},
          {"scenario", to_json(summary.scenario)},
          {"fault", summary.fault},
          {"strikes", strikes_json(summary.strikes)},
          {"outcome", to_string(summary.outcome)},
          {"seconds", number(summary.seconds)},
          {"trace_digest", summary.trace_digest},
          {"rows", std::move(rows)},
          {"guards", std::move(guards)},
          {"first_divergence", summary.has_divergence ? to_json(summary.first_divergence) : json()},
          {"notes", summary.notes},
          {"environment", json(summary.environment)}};
}

/// Text that may stem from file names and other programs, so not all of it need be UTF-8.
std::string dump(const json& value, int indent) {
  return value.dump(indent, ' ', false, json::error_handler_t::replace);
}

}  // namespace

std::string spell_value(double value) {
  const bool is_float32 = static_cast<double>(static_cast<float>(value)) == value;
  return fmt::format("{:.{}g} ({:a})", value, is_float32 ? 9 : 17, value);
}

std::vector<SummaryRow> summarise(const std::vector<Verdict>& verdicts) {
  // References in the order in which they come up, quantities in the order of a step.
  std::vector<std::string> references;
  std::map<std::pair<std::size_t, Quantity>, SummaryRow> rows;
  for (const Verdict& verdict : verdicts) {
    if (verdict.rule == RuleKind::guard) {
      continue;
    }
    const auto found = std::find(references.begin(), references.end(), verdict.reference);
    const auto place = static_cast<std::size_t>(found - references.begin());
    if (found == references.end()) {
      references.push_back(verdict.reference);
    }
    SummaryRow& row = rows[{place, verdict.quantity}];
    row.reference = verdict.reference;
    row.quantity = to_string(verdict.quantity);
    row.rule = verdict.rule;
    row.tensors += 1;
    row.elements += verdict.elements;
    row.worst_ulp = std::max(row.worst_ulp, verdict.ulp);
    row.worst_ratio = std::max(row.worst_ratio, verdict.worst_ratio);
    row.failed += verdict.outcome == Outcome::failed ? 1 : 0;
  }
  std::vector<SummaryRow> result;
  for (auto& [key, row] : rows) {
    result.push_back(std::move(row));
  }
  return result;
}

void print_table(std::ostream& out, const RunSummary& summary) {
  print_rows(out, summary);
  print_guards(out, summary.guards);
  for (const std::string& note : summary.notes) {
    out << "note: " << note << '\n';
  }
  if (summary.has_divergence) {
    print_divergence(out, summary.first_divergence);
  }
  out << '\n' << last_line(summary) << '\n';
}

std::string describe_strikes(const RunSummary& summary) {
  const std::size_t count = summary.strikes.size();
  std::string text =
      fmt::format("{} struck {} time{}", summary.fault, count, count == 1 ? "" : "s");
  if (count > 0) {
    const Strike& first = summary.strikes.front();
    text += fmt::format("; first at step {}, rank {}: {}", first.step, first.rank,
                        to_string(first.quantity));
    text += first.name.empty() ? "" : " " + first.name;
    text += first.element < 0 ? "" : fmt::format(", element {}", first.element);
  }
  return text;
}

ReportWriter::ReportWriter(fs::path folder)
    : folder_(std::move(folder), {"summary.json", "format", std::string(kSummaryFamily)}),
      results_(folder_.partial() / "results.jsonl", std::ios::binary) {
  if (!results_) {
    folder_.fail("cannot be written");
  }
}

void ReportWriter::add(const Verdict& verdict) {
  results_ << dump(to_json(verdict), -1) << '\n';
  if (!results_) {
    folder_.fail("results.jsonl cannot be written: the disk may be full");
  }
  if (verdict.rule == RuleKind::guard) {
    return;
  }
  StepCell& cell = cells_[{verdict.reference, verdict.quantity, verdict.step}];
  cell.reference = verdict.reference;
  cell.quantity = verdict.quantity;
  cell.step = verdict.step;
  cell.rule = verdict.rule;
  cell.worst_ulp = std::max(cell.worst_ulp, verdict.ulp);
  cell.worst_ratio = std::max(cell.worst_ratio, verdict.worst_ratio);
  cell.failed += verdict.outcome == Outcome::failed ? 1 : 0;
}

void ReportWriter::finish(const RunSummary& summary) {
  results_.close();
  if (!results_) {
    folder_.fail("results.jsonl cannot be written: the disk may be full");
  }
  std::vector<StepCell> cells;
  for (const auto& [key, cell] : cells_) {
    cells.push_back(cell);
  }
  const std::string html = render_html(summary, cells);
  const std::string text = dump(summary_json(summary), 2) + "\n";
  write_file(folder_.partial() / "report.html", {html});
  write_file(folder_.partial() / "summary.json", {text});
  folder_.publish();
}

}  // namespace shardproof
