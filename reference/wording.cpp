#include "reference/wording.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace shardproof {

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j < row.size(); ++j) {
    row[j] = j;
  }
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

std::string json_reason(const nlohmann::json::exception& error) {
  // "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error while parsing
  // value - invalid literal; last read: 'x'"
  std::string_view reason = error.what();
  const auto cut_through = [&reason](std::string_view end) {
    if (const auto at = reason.find(end); at != std::string_view::npos) {
      reason.remove_prefix(at + end.size());
    }
  };
  cut_through("] ");
  if (reason.starts_with("number overflow parsing '")) {
    cut_through("'");
    reason = reason.substr(0, reason.find('\''));
    return fmt::format("the number {} is too large for a double; wanted: at most 1.8e308", reason);
  }
  if (reason.starts_with("parse error")) {
    cut_through(" - ");
  }
  std::string text;
  for (const char c : reason) {
    text += c >= ' ' && c <= '~' ? std::string(1, c)
                                 : fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
  }
  return text;
}

bool is_utf8(const std::string& text) {
  try {
    static_cast<void>(nlohmann::json(text).dump());
    return true;
  } catch (const nlohmann::json::exception&) {
    return false;
  }
}

}  // namespace shardproof
