#pragma once
// What the pages have in common: one file each, no network, no script.

#include <string>
#include <string_view>

namespace shardproof {

/// Fit to stand in text and in quoted attributes of HTML and SVG.
std::string escaped(std::string_view text);

/// Everything before the first heading, with the style sheet; the title is plain text.
std::string page_start(std::string_view title);
/// The same, and dark where the reader's system is; for pages whose graphics can bear it.
std::string page_start_light_or_dark(std::string_view title);
std::string page_end();

}  // namespace shardproof
