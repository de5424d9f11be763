// `shardproof claims`: the page, the JSON file and the codes that it ends with; and the plots.

#include "conformance/claims.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>

#include "conformance/exit_codes.h"
#include "conformance/plot.h"
#include "conformance/suites/json_schema.h"
#include "conformance/suites/run_command.h"
#include "conformance/suites/temporary_folder.h"
#include "fsdp/errors.h"

namespace shardproof {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;

Ended claims(const std::string& arguments, const std::string& before = "") {
  return shardproof("claims " + arguments, before);
}

std::string slurp(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::size_t times(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

class ClaimsCommand : public testing::Test {
 protected:
  std::string report() const { return (folder_.path() / "out").string(); }
  TemporaryFolder folder_;
};

TEST_F(ClaimsCommand, WritesAPageAndJsonThatFitsItsSchema) {
  const auto ended = claims("--quick --no-python --seed 3 --report " + report());
  ASSERT_EQ(ended.code, kExitHeld) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("true under a condition  The local norm is 1/sqrt(W)"));
  EXPECT_THAT(ended.text, HasSubstr("PASSED: "));
  EXPECT_THAT(ended.text, HasSubstr("note: PyTorch's own FSDP was not run"));

  const auto written = json::parse(slurp(fs::path(report()) / "claims.json"));
  const auto schema = schema_named("claims.schema.json");
  EXPECT_EQ(misfit(schema, written, schema, "claims"), "");
  EXPECT_EQ(written.at("seed"), 3);
  EXPECT_EQ(written.at("outcome"), "passed");
  ASSERT_EQ(written.at("sections").size(), claims_sections().size());

  const auto page = slurp(fs::path(report()) / "claims.html");
  for (const auto& section : claims_sections()) {
    EXPECT_THAT(page, HasSubstr("<h2 id=\"" + section.id + "\">"));
  }
  for (const auto& section : written.at("sections")) {
    EXPECT_FALSE(section.at("checks").empty());
    for (const auto& claim : section.at("claims")) {
      EXPECT_THAT(page, HasSubstr("id=\"" + claim.at("id").get<std::string>() + "\""));
    }
  }
  EXPECT_EQ(times(page, "<svg "), 9U);
  // One file that needs nothing else.
  for (const auto* outside : {"http:", "https:", "<script", "<img", "<link", "@import", "url("}) {
    EXPECT_THAT(page, Not(HasSubstr(outside)));
  }
  EXPECT_FALSE(page.find(">nan<") != std::string::npos);
}

TEST_F(ClaimsCommand, MeasuresTheSameTwice) {
  // The section on compute shows times.
  const std::string sections = "--quick --no-python --section clipping --section memory --report ";
  ASSERT_EQ(claims(sections + report() + "1").code, kExitHeld);
  ASSERT_EQ(claims(sections + report() + "2").code, kExitHeld);
  for (const auto* file : {"claims.json", "claims.html"}) {
    EXPECT_EQ(slurp(fs::path(report() + "1") / file), slurp(fs::path(report() + "2") / file))
        << file;
  }
}

TEST_F(ClaimsCommand, RefusesNonsense) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "--report is not given"},
      {"--report " + report() + " --section no_such", "--section no_such: there is none"},
      {"--report " + report() + " --section", "--section"},
      {"--report " + report() + " --seed -1", "--seed is -1"},
      {"--report " + report() + " --seed 1.5", "--seed is 1.5"},
      {"--report " + report() + " --timeout 0", "--timeout is 0"},
      {"--report " + report() + " --quik", "perhaps --quick is meant"},
      {"--report " + report() + " --quick=no", "takes no value"},
      {"--report " + report() + " stray", "\"stray\" belongs to no option"},
      {"--report " + report() + " --no-python --python python3", "contradict"},
      {"--report " + report() + " --world 4", "there is no option --world"},
  };
  for (const auto& [arguments, wanted] : cases) {
    const auto ended = claims(arguments);
    EXPECT_EQ(ended.code, kExitUsage) << arguments << "\n" << ended.text;
    EXPECT_THAT(ended.text, HasSubstr(wanted)) << arguments;
    EXPECT_FALSE(fs::exists(report())) << arguments;
  }
}

TEST_F(ClaimsCommand, IsNotStartedByALauncher) {
  const auto ended = claims("--quick --no-python --report " + report(),
                            "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 "
                            "MASTER_ADDR=127.0.0.1 MASTER_PORT=1 ");
  EXPECT_EQ(ended.code, kExitUsage) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("without a launcher"));
}

TEST_F(ClaimsCommand, ReplacesNothingButItsOwn) {
  fs::create_directory(report());
  std::ofstream(fs::path(report()) / "diary.txt") << "mine";
  const auto ended = claims("--quick --no-python --report " + report());
  EXPECT_EQ(ended.code, kExitUsage) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("shardproof.claims"));
  EXPECT_EQ(slurp(fs::path(report()) / "diary.txt"), "mine");
}

TEST_F(ClaimsCommand, APythonThatCannotBeUsedEndsItAndLeavesNothing) {
  const auto ended = claims("--quick --quiet --python /no/such/python --report " + report());
  EXPECT_EQ(ended.code, kExitUsage) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("/no/such/python"));
  EXPECT_THAT(ended.text, HasSubstr("--no-python"));
  EXPECT_TRUE(fs::is_empty(folder_.path()));
}

TEST_F(ClaimsCommand, HelpHasAnExample) {
  const auto ended = claims("--help");
  EXPECT_EQ(ended.code, kExitHeld);
  // Of its own, not that of the whole command.
  EXPECT_THAT(ended.text, HasSubstr("shardproof claims --report out --section clipping --quick"));
}

TEST(ClaimsReport, AFailedCheckIsSeenInTheTableTheJsonAndThePage) {
  ClaimsSection section;
  section.id = "clipping";
  section.title = "Title <b>";
  section.claims = {{"clipping.a", "It is <so>.", "false", "", "1 & 2"}};
  section.checks = {{"claims.clipping.a.float32.w2.x", true, "as wanted"},
                    {"claims.clipping.b.float32.w2.x", false, "saw 1; wanted: <2>"}};
  ClaimsReport report;
  report.sections = {section};
  EXPECT_EQ(report.failed(), 1);
  std::ostringstream table;
  print_claims(table, report);
  EXPECT_THAT(table.str(), HasSubstr("FAILED claims.clipping.b.float32.w2.x: saw 1; wanted: <2>"));
  EXPECT_THAT(table.str(), HasSubstr("FAILED: 1 of 2 checks held"));
  EXPECT_EQ(to_json(report).at("outcome"), "failed");
  const auto page = render_claims_html(report);
  EXPECT_THAT(page, HasSubstr("claims.clipping.b.float32.w2.x: saw 1; wanted: &lt;2&gt;"));
  EXPECT_THAT(page, HasSubstr("It is &lt;so&gt;."));
  EXPECT_THAT(page, HasSubstr("Title &lt;b&gt;"));
}

TEST(ClaimsReport, AnUnknownSectionIsRefusedBeforeAnythingIsMeasured) {
  EXPECT_THROW(measure_claims({"clipping", "no_such"}, {}), fsdp::UsageError);
}

// ---- Plots --------------------------------------------------------------------------------------

Plot plot_of(std::vector<std::pair<double, double>> points) {
  return {"a < b & c", {"x"}, {"y"}, {{"\"name\"", std::move(points)}}};
}

TEST(Plots, EscapeTextAndAreTheSameEachTime) {
  const auto svg = render_svg(plot_of({{0, 1}, {1, 2}}));
  EXPECT_THAT(svg, HasSubstr("a &lt; b &amp; c"));
  EXPECT_THAT(svg, HasSubstr("&quot;name&quot;"));
  EXPECT_THAT(svg, Not(HasSubstr("a < b")));
  EXPECT_EQ(svg, render_svg(plot_of({{0, 1}, {1, 2}})));
}

TEST(Plots, LeaveOutWhatHasNoPlaceAndBreakTheLineThere) {
  const double inf = std::numeric_limits<double>::infinity();
  auto plot = plot_of({{1, 1}, {2, inf}, {4, 10}, {8, 0}, {16, 100}, {32, std::nan("")}});
  plot.x.scale = AxisScale::log2;
  plot.y.scale = AxisScale::log10;
  const auto svg = render_svg(plot);
  EXPECT_EQ(times(svg, "<circle"), 4U);  // three points and the legend
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
  EXPECT_THAT(svg, Not(HasSubstr("inf")));
  const auto path = svg.substr(svg.rfind("<path d=\"", svg.find("stroke=\"#0072b2\"")));
  EXPECT_EQ(times(path.substr(0, path.find("\" ")), "M"), 3U);
}

TEST(Plots, HaveTicksAtPowersOnLogarithmicAxes) {
  auto plot = plot_of({{2, 0.01}, {64, 1}});
  plot.x.scale = AxisScale::log2;
  plot.y.scale = AxisScale::log10;
  const auto svg = render_svg(plot);
  for (const auto* tick : {">2<", ">4<", ">64<", ">0.01<", ">0.1<", ">1<"}) {
    EXPECT_THAT(svg, HasSubstr(tick));
  }
}

TEST(Plots, OfNothingAndOfAFlatLineAreDrawn) {
  EXPECT_THAT(render_svg(plot_of({})), HasSubstr("</svg>"));
  for (const double level : {0.0, 5.0}) {
    const auto svg = render_svg(plot_of({{1, level}, {2, level}}));
    EXPECT_THAT(svg, Not(HasSubstr("nan")));
    EXPECT_EQ(times(svg, "<circle"), 3U);
  }
  Plot empty{"none", {"x", AxisScale::log2}, {"y", AxisScale::log10}, {}};
  EXPECT_THAT(render_svg(empty), Not(HasSubstr("nan")));
}

}  // namespace
}  // namespace shardproof
