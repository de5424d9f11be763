#include "conformance/claims.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <ostream>

#include "conformance/clipping_claims.h"
#include "conformance/cost_claims.h"
#include "conformance/environment.h"
#include "conformance/html.h"
#include "conformance/memory_claims.h"
#include "conformance/recomputation_claims.h"
#include "fsdp/errors.h"

namespace shardproof {

using nlohmann::json;

namespace {

std::int64_t failed_in(const ClaimsSection& section) {
  return std::count_if(section.checks.begin(), section.checks.end(),
                       [](const Check& check) { return !check.held; });
}

std::size_t checks_in(const ClaimsReport& report) {
  std::size_t count = 0;
  for (const auto& section : report.sections) {
    count += section.checks.size();
  }
  return count;
}

std::string claims_table(const ClaimsSection& section) {
  std::string text =
      "<table><thead><tr><th>it is "
      "said</th><th>verdict</th><th>measured</th></tr></thead><tbody>\n";
  for (const Claim& claim : section.claims) {
    text += fmt::format("<tr id=\"{}\"><td>{}</td><td><strong>{}</strong>{}</td><td>{}</td></tr>\n",
                        escaped(claim.id), escaped(claim.sentence), escaped(claim.verdict),
                        claim.condition.empty() ? "" : ": " + escaped(claim.condition),
                        escaped(claim.evidence));
  }
  return text + "</tbody></table>\n";
}

/// Those that failed one by one, the others by behaviour and number.
std::string checks_table(const ClaimsSection& section) {
  std::string text;
  std::vector<std::string> behaviours;
  std::map<std::string, std::pair<int, int>> counts;  // held, failed
  for (const Check& check : section.checks) {
    const auto begin = check.name.find('.', check.name.find('.') + 1) + 1;
    const auto behaviour = check.name.substr(begin, check.name.find('.', begin) - begin);
    if (!counts.contains(behaviour)) {
      behaviours.push_back(behaviour);
    }
    auto& [held, failed] = counts[behaviour];
    ++(check.held ? held : failed);
    if (!check.held) {
      text += fmt::format("<p class=\"failed\">{}: {}</p>\n", escaped(check.name),
                          escaped(check.message));
    }
  }
  text +=
      "<table><thead><tr><th>asserted</th><th class=\"n\">held</th><th class=\"n\">failed</th>"
      "</tr></thead><tbody>\n";
  for (const auto& behaviour : behaviours) {
    const auto& [held, failed] = counts[behaviour];
    text += fmt::format(
        "<tr><td><code>{}</code></td><td class=\"n\">{}</td><td class=\"n {}\">{}</td></tr>\n",
        escaped(behaviour), held, failed == 0 ? "passed" : "failed", failed);
  }
  return text + "</tbody></table>\n";
}

json section_json(const ClaimsSection& section) {
  json claims = json::array();
  for (const Claim& claim : section.claims) {
    claims.push_back({{"id", claim.id},
                      {"sentence", claim.sentence},
                      {"verdict", claim.verdict},
                      {"condition", claim.condition},
                      {"evidence", claim.evidence}});
  }
  json checks = json::array();
  for (const Check& check : section.checks) {
    checks.push_back({{"name", check.name}, {"held", check.held}, {"message", check.message}});
  }
  return {{"id", section.id},
          {"title", section.title},
          {"claims", std::move(claims)},
          {"checks", std::move(checks)},
          {"data", section.data},
          {"notes", section.notes}};
}

}  // namespace

const std::vector<ClaimsSectionEntry>& claims_sections() {
  static const std::vector<ClaimsSectionEntry> sections = {
      {"clipping", "gradient clipping by the norm of local shards", clipping_section},
      {"recomputation", "whether activation checkpointing recomputes what was stored",
       recomputation_section},
      {"compute", "what activation checkpointing costs, in counted operations", compute_section},
      {"memory", "what sharding and checkpointing do to memory, in counted bytes", memory_section},
  };
  return sections;
}

std::int64_t ClaimsReport::failed() const {
  std::int64_t count = 0;
  for (const auto& section : sections) {
    count += failed_in(section);
  }
  return count;
}

ClaimsReport measure_claims(const std::vector<std::string>& names, const ClaimsOptions& options) {
  const auto& known = claims_sections();
  for (const auto& name : names) {
    if (std::none_of(known.begin(), known.end(),
                     [&](const auto& each) { return each.id == name; })) {
      std::string list;
      for (const auto& each : known) {
        list += fmt::format("\n  {}: {}", each.id, each.summary);
      }
      throw fsdp::UsageError(
          fmt::format("--section {}: there is none of that name; wanted one of:{}", name, list));
    }
  }
  ClaimsReport report;
  report.options = options;
  report.environment = describe_environment();
  for (const auto& each : known) {
    if (names.empty() || std::find(names.begin(), names.end(), each.id) != names.end()) {
      report.sections.push_back(each.measure(options));
    }
  }
  return report;
}

void print_claims(std::ostream& out, const ClaimsReport& report) {
  std::size_t width = 7;
  for (const auto& section : report.sections) {
    for (const auto& claim : section.claims) {
      width = std::max(width, claim.verdict.size());
    }
  }
  out << fmt::format("{:<{}}  claim\n{}\n", "verdict", width, std::string(width + 40, '-'));
  for (const auto& section : report.sections) {
    for (const auto& claim : section.claims) {
      out << fmt::format("{:<{}}  {}\n", claim.verdict, width, claim.sentence);
      if (!claim.condition.empty()) {
        out << fmt::format("{:<{}}    {}\n", "", width, claim.condition);
      }
    }
    for (const auto& note : section.notes) {
      out << "note: " << note << "\n";
    }
  }
  for (const auto& section : report.sections) {
    for (const auto& check : section.checks) {
      if (!check.held) {
        out << fmt::format("  FAILED {}: {}\n", check.name, check.message);
      }
    }
  }
  const auto failed = report.failed();
  out << fmt::format("\n{}: {} of {} checks held\n", failed == 0 ? "PASSED" : "FAILED",
                     static_cast<std::int64_t>(checks_in(report)) - failed, checks_in(report));
}

json to_json(const ClaimsReport& report) {
  json sections = json::array();
  for (const auto& section : report.sections) {
    sections.push_back(section_json(section));
  }
  return {{"schema", "shardproof.claims/1"},
          {"seed", report.options.seed},
          {"quick", report.options.quick},
          {"python", report.options.with_python},
          {"outcome", report.failed() == 0 ? "passed" : "failed"},
          {"sections", std::move(sections)},
          {"environment", report.environment}};
}

std::string render_claims_html(const ClaimsReport& report) {
  std::string page = page_start_light_or_dark("Claims about fully sharded training, measured");
  const auto failed = report.failed();
  page += fmt::format(
      "<h1>Claims about fully sharded training, measured</h1>\n<p><span class=\"outcome {}\">{}"
      "</span> {} of {} checks held; seed {}{}.</p>\n",
      failed == 0 ? "passed" : "failed", failed == 0 ? "passed" : "failed",
      static_cast<std::int64_t>(checks_in(report)) - failed, checks_in(report), report.options.seed,
      report.options.quick ? "; a quick run, of fewer worlds and steps" : "");
  for (const auto& section : report.sections) {
    page += fmt::format("<h2 id=\"{}\">{}</h2>\n", escaped(section.id), escaped(section.title));
    page += claims_table(section);
    for (const auto& note : section.notes) {
      page += fmt::format("<p>{}</p>\n", escaped(note));
    }
    page += section.html + "<h3>Asserted</h3>\n" + checks_table(section);
  }
  page += "<h2>Environment</h2>\n<dl>\n";
  for (const auto& [key, value] : report.environment) {
    page += fmt::format("<dt>{}</dt><dd>{}</dd>\n", escaped(key), escaped(value));
  }
  return page + "</dl>\n" + page_end();
}

}  // namespace shardproof
