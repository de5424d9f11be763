#include "fsdp/strict_json.h"

#include <fmt/format.h>

#include <set>

#include "fsdp/errors.h"

namespace fsdp {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kMaxJsonDepth = 32;

[[noreturn]] void fail_at(const fs::path& path, std::string_view place, const std::string& what) {
  throw FileError(fmt::format("{}: {}: {}", path.string(), place, what));
}

std::string brief(const json& value) {
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  return text.size() <= 60 ? text : text.substr(0, 57) + "...";
}

}  // namespace

json parse_json(const fs::path& path, std::string_view place, std::string_view text) {
  std::vector<std::set<std::string>> keys_of_open_objects;
  const json::parser_callback_t check = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth > kMaxJsonDepth) {
      fail_at(path, place, fmt::format("nested deeper than {} levels", kMaxJsonDepth));
    }
    if (event == json::parse_event_t::object_start) {
      keys_of_open_objects.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      keys_of_open_objects.pop_back();
    } else if (event == json::parse_event_t::key) {
      if (!keys_of_open_objects.back().insert(parsed.get<std::string>()).second) {
        fail_at(path, place, fmt::format("key {} occurs twice", parsed.dump()));
      }
    }
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), check);
  } catch (const json::parse_error& error) {
    fail_at(path, place,
            fmt::format("not valid JSON at byte {}: {}", error.byte, json_reason(error)));
  } catch (const json::exception& error) {  // a number that is too large; this error has no place
    fail_at(path, place, json_reason(error));
  }
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

JsonField JsonField::at(const std::string& key) const {
  if (!value_.is_object()) {
    wrong("an object");
  }
  const auto found = value_.find(key);
  if (found == value_.end()) {
    fail(fmt::format("\"{}\" is missing", key));
  }
  return {path_, fmt::format("{}.{}", place_, key), *found};
}

std::vector<JsonField> JsonField::items() const {
  if (!value_.is_array()) {
    wrong("an array");
  }
  std::vector<JsonField> fields;
  for (std::size_t i = 0; i < value_.size(); ++i) {
    fields.emplace_back(path_, fmt::format("{}[{}]", place_, i), value_[i]);
  }
  return fields;
}

std::vector<std::pair<std::string, JsonField>> JsonField::members() const {
  if (!value_.is_object()) {
    wrong("an object");
  }
  std::vector<std::pair<std::string, JsonField>> fields;
  for (const auto& [key, value] : value_.items()) {
    fields.emplace_back(key, JsonField(path_, fmt::format("{}.{}", place_, key), value));
  }
  return fields;
}

std::string JsonField::text() const {
  if (!value_.is_string()) {
    wrong("a string");
  }
  return value_.get<std::string>();
}

std::int64_t JsonField::integer(std::int64_t least) const {
  const bool fits = value_.is_number_integer() &&
                    !(value_.is_number_unsigned() &&
                      value_.get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX)) &&
                    value_.get<std::int64_t>() >= least;
  if (!fits) {
    wrong(fmt::format("an integer of at least {}", least));
  }
  return value_.get<std::int64_t>();
}

double JsonField::number() const {
  if (!value_.is_number()) {
    wrong("a number");
  }
  return value_.get<double>();
}

std::vector<std::int64_t> JsonField::sizes() const {
  std::vector<std::int64_t> result;
  for (const JsonField& item : items()) {
    result.push_back(item.integer(0));
  }
  return result;
}

void JsonField::wrong(const std::string& wanted) const {
  fail(fmt::format("{} where {} was expected", brief(value_), wanted));
}

void JsonField::fail(const std::string& what) const {
  fail_at(path_, place_, what);
}

}  // namespace fsdp
