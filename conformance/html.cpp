#include "conformance/html.h"

#include <fmt/format.h>

namespace shardproof {
namespace {

constexpr const char* kStyle = R"(
body { font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #ddd; vertical-align: top; }
th { border-bottom: 2px solid #888; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
code, .mono { font-family: ui-monospace, monospace; font-size: .88em; overflow-wrap: anywhere; }
.outcome { display: inline-block; padding: .2rem .7rem; border-radius: .3rem; font-weight: 600; border: 2px solid; }
.passed { color: #14532d; } .failed { color: #991b1b; font-weight: 600; } .not_applicable { color: #555; }
dl { display: grid; grid-template-columns: 8rem 1fr; gap: .2rem 1rem; margin: 0; }
dt { color: #555; } dd { margin: 0; overflow-wrap: anywhere; }
.divergence { border: 2px solid #991b1b; border-radius: .4rem; padding: .8rem 1rem; }
svg { max-width: 100%; height: auto; }
figure { margin: 1rem 0; }
figcaption { color: #555; font-size: .9rem; }
@media print { body { max-width: none; margin: 0; font-size: 11px; } h2 { break-after: avoid; } table, svg, .divergence { break-inside: avoid; }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact; } }
)";

// Beside kStyle, on a screen only: paper is light.
constexpr const char* kDark = R"(
@media screen and (prefers-color-scheme: dark) {
  body { color: #e4e4e4; background: #16181c; } th, td { border-color: #3a3d44; } th { border-color: #888; }
  dt, figcaption, .not_applicable { color: #a6a6a6; } .passed { color: #86dba6; } .failed { color: #ff9c9c; }
}
)";

std::string start(std::string_view title, std::string_view more_style) {
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<title>{}</title>\n<style>{}{}</style>\n</head>\n<body>\n",
      escaped(title), kStyle, more_style);
}

}  // namespace

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      case '\'':
        result += "&#39;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

std::string page_start(std::string_view title) {
  return start(title, "");
}

std::string page_start_light_or_dark(std::string_view title) {
  return start(title, kDark);
}

std::string page_end() {
  return "</body>\n</html>\n";
}

}  // namespace shardproof
