// A report says what was found, where and by how much, in forms for machines, terminals and paper,
// and is never half written nor written over something else.

#include "conformance/report.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "conformance/suites/json_schema.h"
#include "conformance/suites/temporary_folder.h"
#include "conformance/trace_io.h"

namespace shardproof {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::string slurp(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::size_t lines_in(const std::string& text) {
  return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
}

Verdict passed_verdict() {
  Verdict verdict;
  verdict.check = "fsdp.equivalence.gradient.float32.w4.transformer_adamw_replay";
  verdict.reference = "replay";
  verdict.step = 0;
  verdict.quantity = Quantity::gradient;
  verdict.name = "blocks.0.norm1.weight";
  verdict.rule = RuleKind::exact;
  verdict.rule_source = "the same operations in the same order";
  verdict.outcome = Outcome::passed;
  verdict.elements = 1256;
  verdict.rank = 0;
  verdict.element = 0;
  verdict.index = {0, 0};
  verdict.got = verdict.want = 0.5;
  return verdict;
}

Verdict failed_verdict() {
  Verdict verdict = passed_verdict();
  verdict.step = 3;
  verdict.name = "blocks.<0>.norm1.weight";
  verdict.outcome = Outcome::failed;
  verdict.differing = 2;
  verdict.rank = 2;
  verdict.element = 130;
  verdict.index = {1, 2};
  verdict.got = static_cast<double>(0.1F);
  verdict.want = static_cast<double>(std::nextafter(0.1F, 0.0F));
  verdict.ulp = 1;
  verdict.message = "rank 2's piece is rank 3's";
  return verdict;
}

Verdict bounded_verdict() {
  Verdict verdict = passed_verdict();
  verdict.reference = "float64";
  verdict.quantity = Quantity::parameter;
  verdict.rule = RuleKind::bounded;
  verdict.ulp = 12;
  verdict.allowed = 1e-6;
  verdict.worst_ratio = 0.25;
  return verdict;
}

Verdict guard_verdict(Outcome outcome) {
  Verdict verdict;
  verdict.check = "fsdp.guard.clipping_bit.float32.w4.transformer_adamw";
  verdict.reference = "guard";
  verdict.rule = RuleKind::guard;
  verdict.name = "clipping_bit";
  verdict.outcome = outcome;
  verdict.message = "norms from 0.1 to 0.2, max_norm 1";
  return verdict;
}

RunSummary summary_of(const std::vector<Verdict>& verdicts) {
  RunSummary summary;
  summary.rows = summarise(verdicts);
  summary.seconds = 1.5;
  summary.trace_digest = "0123456789abcdef";
  for (const Verdict& verdict : verdicts) {
    if (verdict.outcome == Outcome::failed && !summary.has_divergence) {
      summary.has_divergence = true;
      summary.first_divergence = verdict;
      summary.outcome = Outcome::failed;
    }
  }
  return summary;
}

std::string table_of(const RunSummary& summary) {
  std::ostringstream out;
  print_table(out, summary);
  return out.str();
}

// ---- Verdicts -----------------------------------------------------------------------------------

TEST(VerdictJson, HasStringsWhereJsonHasNoNumbers) {
  Verdict verdict = failed_verdict();
  verdict.got = std::nan("");
  verdict.want = -std::numeric_limits<double>::infinity();
  verdict.worst_ratio = std::numeric_limits<double>::infinity();
  verdict.ulp = std::numeric_limits<std::uint64_t>::max();
  const json back = json::parse(to_json(verdict).dump());
  EXPECT_EQ(back["got"], "nan");
  EXPECT_EQ(back["want"], "-inf");
  EXPECT_EQ(back["worst_ratio"], "inf");
  EXPECT_EQ(back["ulp"].get<std::uint64_t>(), std::numeric_limits<std::uint64_t>::max());
}

TEST(VerdictJson, KeepsEveryDigit) {
  Verdict verdict = failed_verdict();
  verdict.got = 0.1 + 0.2;
  EXPECT_EQ(json::parse(to_json(verdict).dump())["got"].get<double>(), 0.1 + 0.2);
}

TEST(VerdictText, NamesEverythingInOneSentence) {
  const std::string text = describe(failed_verdict());
  for (const char* part :
       {"fsdp.equivalence.gradient", "failed", "step 3", "gradient \"blocks.<0>.norm1.weight\"",
        "rank 2", "element 130 [1, 2]", "got 0.10000000149011612", "want 0.099999994039535522",
        "1 ULP apart, 0 allowed", "2 of 1256 elements", "rank 2's piece is rank 3's"}) {
    EXPECT_TRUE(contains(text, part)) << part << " is not in: " << text;
  }
  EXPECT_TRUE(contains(describe(bounded_verdict()), "0.25 x the 1e-06 allowed"));
  EXPECT_TRUE(contains(describe(guard_verdict(Outcome::failed)), "norms from 0.1 to 0.2"));
}

TEST(SpellValue, GivesAsManyDigitsAsTheValueNeeds) {
  EXPECT_EQ(spell_value(static_cast<double>(0.1F)), "0.100000001 (0x1.99999ap-4)");
  EXPECT_EQ(spell_value(0.1), "0.10000000000000001 (0x1.999999999999ap-4)");
  EXPECT_EQ(spell_value(std::numeric_limits<double>::infinity()), "inf (inf)");
}

// ---- Schemas ------------------------------------------------------------------------------------

TEST(Schemas, FitTheirOwnExamples) {
  for (const char* name : {"results.schema.json", "summary.schema.json", "claims.schema.json"}) {
    const json schema = schema_named(name);
    for (const json& example : schema.at("examples")) {
      EXPECT_EQ(misfit(schema, example, schema, "example"), "") << name;
    }
  }
}

Strike strike_at(int step, int rank, std::int64_t element) {
  return {step, rank, Quantity::gradient, "blocks.<0>.norm1.weight", element};
}

TEST(Strikes, AreInOrderWhicheverRankCameFirst) {
  StrikeLog log;
  for (const auto& strike : {strike_at(1, 0, 5), strike_at(0, 3, 6), strike_at(0, 1, 8),
                             strike_at(0, 1, 7), strike_at(1, 0, 4)}) {
    log.add(strike);
  }
  std::vector<std::int64_t> elements;
  for (const auto& strike : log.strikes()) {
    elements.push_back(strike.element);
  }
  EXPECT_EQ(elements, (std::vector<std::int64_t>{8, 7, 6, 5, 4}));
}

TEST(Strikes, AreOneSentence) {
  RunSummary summary;
  summary.fault = "flipped_bit";
  EXPECT_EQ(describe_strikes(summary), "flipped_bit struck 0 times");
  summary.strikes = {strike_at(2, 1, 12240)};
  EXPECT_EQ(describe_strikes(summary),
            "flipped_bit struck 1 time; first at step 2, rank 1: gradient blocks.<0>.norm1.weight, "
            "element 12240");
  summary.strikes = {strike_at(2, 1, -1), strike_at(3, 0, 5)};
  EXPECT_EQ(describe_strikes(summary),
            "flipped_bit struck 2 times; first at step 2, rank 1: gradient "
            "blocks.<0>.norm1.weight");
  summary.strikes.front().name = "";
  EXPECT_EQ(describe_strikes(summary),
            "flipped_bit struck 2 times; first at step 2, rank 1: gradient");
}

TEST(Schemas, RefuseWhatDoesNotFit) {
  const json schema = schema_named("results.schema.json");
  json verdict = to_json(failed_verdict());
  EXPECT_EQ(misfit(schema, verdict, schema, "verdict"), "");
  verdict["step"] = "3";
  EXPECT_NE(misfit(schema, verdict, schema, "verdict"), "");
  verdict = to_json(failed_verdict());
  verdict.erase("want");
  EXPECT_NE(misfit(schema, verdict, schema, "verdict"), "");
  verdict = to_json(failed_verdict());
  verdict["extra"] = 1;
  EXPECT_NE(misfit(schema, verdict, schema, "verdict"), "");
  verdict = to_json(failed_verdict());
  verdict["got"] = "NaN";
  EXPECT_NE(misfit(schema, verdict, schema, "verdict"), "");
}

// ---- Table --------------------------------------------------------------------------------------

TEST(Summary, HasOneRowForEachReferenceAndQuantity) {
  Verdict second = failed_verdict();
  second.elements = 44;
  Verdict loss = passed_verdict();
  loss.quantity = Quantity::loss;
  const std::vector<SummaryRow> rows = summarise(
      {second, passed_verdict(), bounded_verdict(), loss, guard_verdict(Outcome::failed)});
  ASSERT_EQ(rows.size(), 3U) << "guards have no row";
  EXPECT_EQ(rows[0].quantity, "loss") << "quantities in the order of a step";
  EXPECT_EQ(rows[1].reference, "replay");
  EXPECT_EQ(rows[1].quantity, "gradient");
  EXPECT_EQ(rows[1].tensors, 2);
  EXPECT_EQ(rows[1].elements, 1300);
  EXPECT_EQ(rows[1].worst_ulp, 1U);
  EXPECT_EQ(rows[1].failed, 1);
  EXPECT_EQ(rows[2].reference, "float64");
  EXPECT_EQ(rows[2].worst_ratio, 0.25);
  EXPECT_EQ(rows[2].failed, 0);
}

TEST(Table, OfARunThatPassedIsShortAndAligned) {
  RunSummary summary = summary_of({passed_verdict(), bounded_verdict()});
  summary.guards = {guard_verdict(Outcome::passed), guard_verdict(Outcome::not_applicable)};
  summary.scenario.world_size = 4;
  const std::string text = table_of(summary);
  std::istringstream lines(text);
  std::string header, rule, first, second;
  std::getline(lines, header);
  std::getline(lines, rule);
  std::getline(lines, first);
  std::getline(lines, second);
  EXPECT_EQ(header, "reference  quantity   tensors  elements  rule             worst  verdict");
  EXPECT_EQ(rule, std::string(header.size(), '-'));
  EXPECT_EQ(first, "replay     gradient         1     1,256  exact            0 ULP  passed");
  EXPECT_EQ(second, "float64    parameter        1     1,256  bounded  0.25 of bound  passed");
  EXPECT_TRUE(contains(text, "guards: 1 passed, 1 not applicable, 0 failed\n"));
  EXPECT_FALSE(contains(text, "max_norm")) << "a guard that passed needs no line";
  EXPECT_TRUE(contains(text, "\nPASSED transformer.adamw.float32.w4"));
}

TEST(Table, OfARunThatFailedSaysWhereItFirstDiverged) {
  RunSummary summary = summary_of({passed_verdict(), failed_verdict()});
  summary.fault = "stale_shard";
  summary.notes = {"python: not installed"};
  const std::string text = table_of(summary);
  for (const char* part :
       {"FAILED 1\n", "First divergence\n",
        "check     fsdp.equivalence.gradient.float32.w4.transformer_adamw_replay\n",
        "where     step 3, gradient \"blocks.<0>.norm1.weight\"\n", "rank      2\n",
        "element   130, index [1, 2]\n", "got       0.100000001 (0x1.99999ap-4)\n",
        "want      0.099999994 (0x1.999998p-4)\n", "distance  1 ULP\n", "allowed   0 ULP\n",
        "extent    2 of 1,256 elements are outside the rule\n",
        "rule      exact, held to replay: the same operations in the same order\n",
        "note      rank 2's piece is rank 3's\n", "note: python: not installed\n",
        "with fault stale_shard: 1 of 2 checks failed, first gradient"}) {
    EXPECT_TRUE(contains(text, part)) << part << " is not in:\n" << text;
  }
}

TEST(Table, HasALineForEachGuardThatFailed) {
  RunSummary summary = summary_of({passed_verdict()});
  summary.guards = {guard_verdict(Outcome::failed)};
  summary.outcome = Outcome::failed;
  const std::string text = table_of(summary);
  EXPECT_TRUE(contains(
      text,
      "guards: 0 passed, 1 failed\n  FAILED clipping_bit: norms from 0.1 to 0.2, max_norm 1\n"));
  EXPECT_TRUE(contains(text, "a guard failed"));
}

TEST(Table, SpellsANanAsOne) {
  Verdict verdict = failed_verdict();
  verdict.ulp = std::numeric_limits<std::uint64_t>::max();
  verdict.got = std::nan("");
  const std::string text = table_of(summary_of({verdict}));
  EXPECT_TRUE(contains(text, "NaN  FAILED 1"));
  EXPECT_TRUE(contains(text, "distance  a NaN against a number\n"));
}

// ---- The folder ---------------------------------------------------------------------------------

class Report : public ::testing::Test {
 protected:
  fs::path folder() const { return temporary_.path() / "report"; }
  fs::path parent() const { return temporary_.path(); }

  void write(const std::vector<Verdict>& verdicts) const {
    ReportWriter writer(folder());
    for (const Verdict& verdict : verdicts) {
      writer.add(verdict);
    }
    writer.finish(summary_of(verdicts));
  }
  std::size_t entries() const {
    return static_cast<std::size_t>(
        std::distance(fs::directory_iterator(parent()), fs::directory_iterator()));
  }

 private:
  TemporaryFolder temporary_;
};

TEST_F(Report, HasEveryVerdictAndASummaryThatFitTheirSchemas) {
  RunSummary summary = summary_of({passed_verdict(), failed_verdict(), bounded_verdict()});
  summary.guards = {guard_verdict(Outcome::passed)};
  summary.environment = {{"libtorch", "2.11.0"}};
  {
    ReportWriter writer(folder());
    for (const Verdict& verdict : {passed_verdict(), failed_verdict(), bounded_verdict()}) {
      writer.add(verdict);
    }
    writer.finish(summary);
  }
  const json line_schema = schema_named("results.schema.json");
  std::ifstream results(folder() / "results.jsonl");
  std::vector<json> lines;
  for (std::string line; std::getline(results, line);) {
    lines.push_back(json::parse(line));
    EXPECT_EQ(misfit(line_schema, lines.back(), line_schema, "line"), "");
  }
  ASSERT_EQ(lines.size(), 3U);
  EXPECT_EQ(lines[1]["name"], "blocks.<0>.norm1.weight");
  const json schema = schema_named("summary.schema.json");
  const json written = json::parse(slurp(folder() / "summary.json"));
  EXPECT_EQ(misfit(schema, written, schema, "summary"), "");
  EXPECT_EQ(written["outcome"], "failed");
  EXPECT_EQ(written["first_divergence"], to_json(failed_verdict()));
  EXPECT_EQ(written["environment"]["libtorch"], "2.11.0");
  EXPECT_EQ(entries(), 1U) << "only the report is left";
}

TEST_F(Report, TellsWhereThePlantedFaultStruck) {
  RunSummary summary = summary_of({failed_verdict()});
  summary.fault = "flipped_bit";
  summary.strikes = {strike_at(2, 1, 12240), strike_at(3, 0, -1)};
  ReportWriter(folder()).finish(summary);
  const json schema = schema_named("summary.schema.json");
  const json written = json::parse(slurp(folder() / "summary.json"));
  EXPECT_EQ(misfit(schema, written, schema, "summary"), "");
  EXPECT_EQ(written.at("strikes"), json::parse(R"({
    "count": 2,
    "first": {"step": 2, "rank": 1, "quantity": "gradient", "name": "blocks.<0>.norm1.weight", "element": 12240}
  })"));
  EXPECT_TRUE(contains(slurp(folder() / "report.html"),
                       "planted: <code>flipped_bit struck 2 times; first at step 2, rank 1: "
                       "gradient blocks.&lt;0&gt;.norm1.weight, element 12240</code></p>"));
}

TEST_F(Report, HasNoStrikesWithoutAFault) {
  write({passed_verdict()});
  const json schema = schema_named("summary.schema.json");
  json written = json::parse(slurp(folder() / "summary.json"));
  EXPECT_EQ(written.at("strikes"), json::parse(R"({"count": 0, "first": null})"));
  EXPECT_FALSE(contains(slurp(folder() / "report.html"), "planted"));
  written.erase("strikes");
  EXPECT_NE(misfit(schema, written, schema, "summary"), "");
}

TEST_F(Report, HasAPageThatShowsTheDivergenceAndNeedsNoNetwork) {
  write({passed_verdict(), failed_verdict(), bounded_verdict()});
  const std::string page = slurp(folder() / "report.html");
  for (const char* part :
       {"First divergence", "blocks.&lt;0&gt;.norm1.weight", "0.100000001 (0x1.99999ap-4)",
        "0.099999994 (0x1.999998p-4)", "130, index [1, 2]", "rank 2&#39;s piece is rank 3&#39;s",
        "<svg", "step 3, gradient: 1 ULP, 1 failed", "</html>"}) {
    EXPECT_TRUE(contains(page, part)) << part;
  }
  for (const char* part : {"<0>", "http:", "https:", "<script", "src=", "@import", "url("}) {
    EXPECT_FALSE(contains(page, part)) << part;
  }
}

TEST_F(Report, ReplacesAnOlderReport) {
  write({passed_verdict(), failed_verdict()});
  std::ofstream(folder() / "old.txt") << "old";
  write({passed_verdict()});
  EXPECT_EQ(lines_in(slurp(folder() / "results.jsonl")), 1U);
  EXPECT_FALSE(fs::exists(folder() / "old.txt"));
  EXPECT_EQ(entries(), 1U);
}

TEST_F(Report, ReplacesAnEmptyFolderAndTakesATrailingSlash) {
  fs::create_directory(folder());
  ReportWriter writer(folder() / "");
  writer.finish(summary_of({}));
  EXPECT_TRUE(fs::exists(folder() / "summary.json"));
  EXPECT_EQ(entries(), 1U);
}

TEST_F(Report, DoesNotReplaceAFolderOfAnythingElse) {
  fs::create_directory(folder());
  std::ofstream(folder() / "thesis.tex") << "years of work";
  EXPECT_THROW(ReportWriter{folder()}, FileError);
  std::ofstream(folder() / "summary.json") << R"({"format": "another/1"})";
  EXPECT_THROW(ReportWriter{folder()}, FileError);
  std::ofstream(folder() / "summary.json") << "{";
  EXPECT_THROW(ReportWriter{folder()}, FileError);
  EXPECT_EQ(slurp(folder() / "thesis.tex"), "years of work");
  EXPECT_EQ(entries(), 1U);
}

TEST_F(Report, DoesNotReplaceAFolderThatCameInBetween) {
  ReportWriter writer(folder());
  fs::create_directory(folder());
  std::ofstream(folder() / "thesis.tex") << "years of work";
  EXPECT_THROW(writer.finish(summary_of({})), FileError);
  EXPECT_TRUE(fs::exists(folder() / "thesis.tex"));
}

TEST_F(Report, DoesNotReplaceAFile) {
  std::ofstream(folder()) << "text";
  EXPECT_THROW(ReportWriter{folder()}, FileError);
  EXPECT_EQ(slurp(folder()), "text");
}

TEST_F(Report, ThatIsNotFinishedLeavesTheOldOneAndNothingElse) {
  write({passed_verdict()});
  {
    ReportWriter writer(folder());
    writer.add(failed_verdict());
    writer.add(failed_verdict());
  }
  EXPECT_EQ(lines_in(slurp(folder() / "results.jsonl")), 1U);
  EXPECT_EQ(entries(), 1U);
}

TEST_F(Report, OnAFullDiskIsAnErrorAndLeavesNothing) {
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  rlimit limit = before;
  limit.rlim_cur = 2000;  // less than the page alone
  ::setrlimit(RLIMIT_FSIZE, &limit);
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  EXPECT_THROW(write({passed_verdict(), failed_verdict()}), FileError);
  // Many verdicts: results.jsonl itself does not fit.
  EXPECT_THROW(write(std::vector<Verdict>(1000, passed_verdict())), FileError);
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(entries(), 0U);
}

TEST_F(Report, InAPlaceThatCannotBeWrittenIsAnErrorAtOnce) {
  EXPECT_THROW(ReportWriter{"/proc/report"}, FileError);
  EXPECT_THROW(ReportWriter{"/"}, FileError);
}

}  // namespace
}  // namespace shardproof
