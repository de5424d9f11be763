// The page report.html. One file, no network, no script: it must be as readable in an archive or on
// paper as on the day it was made.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "conformance/html.h"
#include "conformance/report.h"

namespace shardproof {
namespace {

using nlohmann::json;

constexpr std::uint64_t kFurthest = std::numeric_limits<std::uint64_t>::max();

std::string ulp_text(std::uint64_t ulp) {
  return ulp == kFurthest ? std::string("NaN") : fmt::format("{} ULP", ulp);
}

std::string worst_text(RuleKind rule, std::uint64_t ulp, double ratio) {
  return rule == RuleKind::bounded ? fmt::format("{:.2g} of bound", ratio) : ulp_text(ulp);
}

/// A definition list of a JSON object; objects inside it are lists of "key = value".
std::string definitions(const json& object) {
  std::string text = "<dl>\n";
  for (const auto& [key, value] : object.items()) {
    std::string shown;
    if (value.is_string()) {
      shown = value.get<std::string>();
    } else if (value.is_object()) {
      std::vector<std::string> parts;
      for (const auto& [name, part] : value.items()) {
        parts.push_back(
            fmt::format("{} = {}", name, part.is_string() ? part.get<std::string>() : part.dump()));
      }
      shown = fmt::format("{}", fmt::join(parts, ", "));
    } else {
      shown = value.dump();
    }
    text += fmt::format("<dt>{}</dt><dd>{}</dd>\n", escaped(key), escaped(shown));
  }
  return text + "</dl>\n";
}

std::string heading(const RunSummary& summary) {
  const std::string_view outcome = to_string(summary.outcome);
  std::string text =
      fmt::format("<h1>{}</h1>\n<p><span class=\"outcome {}\">{}</span> in {:.1f} s",
                  escaped(dotted_name(summary.scenario)), outcome, outcome, summary.seconds);
  if (!summary.fault.empty()) {
    text += fmt::format("; planted: <code>{}</code>", escaped(describe_strikes(summary)));
  }
  return text + "</p>\n";
}

std::string divergence(const Verdict& verdict) {
  std::string text = "<h2>First divergence</h2>\n<div class=\"divergence\"><dl>\n";
  const auto line = [&](std::string_view label, const std::string& value) {
    text += fmt::format("<dt>{}</dt><dd class=\"mono\">{}</dd>\n", label, escaped(value));
  };
  line("check", verdict.check);
  line("held to", verdict.reference);
  line("step", std::to_string(verdict.step));
  line("quantity", std::string(to_string(verdict.quantity)));
  line("name", verdict.name);
  if (verdict.element >= 0) {
    if (verdict.rank != kNoRank) {
      line("rank", std::to_string(verdict.rank));
    }
    line("element", fmt::format("{}, index [{}]", verdict.element, fmt::join(verdict.index, ", ")));
    line("got", spell_value(verdict.got));
    line("want", spell_value(verdict.want));
    line("distance", ulp_text(verdict.ulp));
    line("allowed", verdict.rule == RuleKind::exact
                        ? std::string("0 ULP")
                        : fmt::format("{:.3g}; {:.3g} x as much was seen", verdict.allowed,
                                      verdict.worst_ratio));
    line("extent", fmt::format("{} of {} elements", verdict.differing, verdict.elements));
  }
  line("rule", fmt::format("{}: {}", to_string(verdict.rule), verdict.rule_source));
  if (!verdict.message.empty()) {
    line("note", verdict.message);
  }
  return text + "</dl></div>\n";
}

std::string table(const std::vector<SummaryRow>& rows) {
  std::string text =
      "<h2>Checks</h2>\n<table><thead><tr><th>reference</th><th>quantity</th><th "
      "class=\"n\">tensors</th>"
      "<th class=\"n\">elements</th><th>rule</th><th "
      "class=\"n\">worst</th><th>verdict</th></tr></thead><tbody>\n";
  for (const SummaryRow& row : rows) {
    text += fmt::format(
        "<tr><td>{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td>{}</td><td "
        "class=\"n\">{}</td>"
        "<td class=\"{}\">{}</td></tr>\n",
        escaped(row.reference), escaped(row.quantity), row.tensors, row.elements,
        to_string(row.rule), worst_text(row.rule, row.worst_ulp, row.worst_ratio),
        row.failed == 0 ? "passed" : "failed",
        row.failed == 0 ? std::string("passed") : fmt::format("{} failed", row.failed));
  }
  return text + "</tbody></table>\n";
}

/// Green for nothing seen, through yellow to the edge of what is allowed, red beyond.
std::string colour_of(const StepCell& cell) {
  if (cell.failed > 0) {
    return "#c62828";
  }
  const double share = cell.rule == RuleKind::bounded ? std::clamp(cell.worst_ratio, 0.0, 1.0) : 0;
  return fmt::format("hsl({:.0f} 55% 72%)", 130 - 80 * share);
}

/// One strip per reference: quantities down, steps across. Failed cells also bear a cross, for
/// paper without colour.
std::string strip(const std::string& reference, const std::vector<StepCell>& cells) {
  constexpr int kLabel = 130;
  constexpr int kRow = 18;
  std::set<Quantity> quantities;
  int last_step = 0;
  for (const StepCell& cell : cells) {
    quantities.insert(cell.quantity);
    last_step = std::max(last_step, cell.step);
  }
  std::map<Quantity, int> row_of;
  for (const Quantity quantity : quantities) {
    row_of.emplace(quantity, static_cast<int>(row_of.size()));
  }
  const double cell_width = std::clamp(760.0 / (last_step + 1), 2.0, 36.0);
  const double width = kLabel + cell_width * (last_step + 1) + 1;
  const int height = kRow * (static_cast<int>(quantities.size()) + 1);
  std::string text = fmt::format(
      "<h3>{}</h3>\n<svg viewBox=\"0 0 {:.0f} {}\" width=\"{:.0f}\" role=\"img\" "
      "font-family=\"sans-serif\" font-size=\"11\">\n"
      "<title>Worst distance from {} by quantity and step</title>\n",
      escaped(reference), width, height, width, escaped(reference));
  for (const auto& [quantity, row] : row_of) {
    text += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\n", kLabel - 6,
                        row * kRow + 13, to_string(quantity));
  }
  for (const StepCell& cell : cells) {
    const double x = kLabel + cell_width * cell.step;
    const int y = row_of.at(cell.quantity) * kRow;
    text += fmt::format(
        "<rect x=\"{:.1f}\" y=\"{}\" width=\"{:.1f}\" height=\"{}\" fill=\"{}\" "
        "stroke=\"#fff\"><title>step {}, {}: {}{}</title></rect>\n",
        x, y, cell_width, kRow, colour_of(cell), cell.step, to_string(cell.quantity),
        worst_text(cell.rule, cell.worst_ulp, cell.worst_ratio),
        cell.failed > 0 ? fmt::format(", {} failed", cell.failed) : "");
    if (cell.failed > 0) {
      text += fmt::format(
          "<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\" fill=\"#fff\">&#215;</text>\n",
          x + cell_width / 2, y + 13);
    }
  }
  text += fmt::format(
      "<text x=\"{}\" y=\"{}\">step 0</text><text x=\"{:.0f}\" y=\"{}\" "
      "text-anchor=\"end\">{}</text>\n</svg>\n",
      kLabel, height - 4, width - 1, height - 4,
      last_step > 2 ? std::to_string(last_step) : std::string());
  return text;
}

std::string strips(const std::vector<StepCell>& cells) {
  std::vector<std::string> references;
  std::map<std::string, std::vector<StepCell>> by_reference;
  for (const StepCell& cell : cells) {
    by_reference[cell.reference].push_back(cell);
  }
  std::string text =
      "<h2>Worst distance at each step</h2>\n<p>Green: equal to the bit, or far inside the bound; "
      "yellow: near the bound; red with a cross: outside the rule.</p>\n";
  for (const auto& [reference, own_cells] : by_reference) {
    text += strip(reference, own_cells);
  }
  return text;
}

std::string guards(const std::vector<Verdict>& verdicts) {
  std::string text =
      "<h2>Guards</h2>\n<table><thead><tr><th>guard</th><th>outcome</th><th>seen</th></tr></"
      "thead><tbody>\n";
  for (const Verdict& verdict : verdicts) {
    text += fmt::format("<tr><td>{}</td><td class=\"{}\">{}</td><td>{}</td></tr>\n",
                        escaped(verdict.name), to_string(verdict.outcome),
                        to_string(verdict.outcome), escaped(verdict.message));
  }
  return text + "</tbody></table>\n";
}

std::string notes(const std::vector<std::string>& lines) {
  std::string text = "<h2>Notes</h2>\n<ul>\n";
  for (const std::string& line : lines) {
    text += fmt::format("<li>{}</li>\n", escaped(line));
  }
  return text + "</ul>\n";
}

}  // namespace

std::string render_html(const RunSummary& summary, const std::vector<StepCell>& cells) {
  std::string page =
      page_start(fmt::format("{}: {}", to_string(summary.outcome), dotted_name(summary.scenario)));
  page += heading(summary);
  if (summary.has_divergence) {
    page += divergence(summary.first_divergence);
  }
  page += table(summary.rows);
  if (!cells.empty()) {
    page += strips(cells);
  }
  if (!summary.guards.empty()) {
    page += guards(summary.guards);
  }
  if (!summary.notes.empty()) {
    page += notes(summary.notes);
  }
  page += "<h2>Scenario</h2>\n" + definitions(to_json(summary.scenario));
  if (!summary.environment.empty()) {
    page += "<h2>Environment</h2>\n" + definitions(summary.environment);
  }
  return page + page_end();
}

}  // namespace shardproof
