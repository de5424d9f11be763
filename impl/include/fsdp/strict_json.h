#pragma once
// JSON from files that may be damaged: nothing is taken that does not say what it should, and every
// complaint names the file and the place in it. The one header here that needs nlohmann-json.

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fsdp {

/// Parses JSON, refusing what nlohmann-json would let pass: a key that occurs twice (it keeps the
/// last) and nesting without end. Throws FileError, like everything below.
nlohmann::json parse_json(const std::filesystem::path& path, std::string_view place,
                          std::string_view text);

/// What is wrong with a JSON text, without the library's name for it and its idea of the place.
/// Bytes that are no printable ASCII are spelled in hexadecimal.
std::string json_reason(const nlohmann::json::exception& error);

/// A JSON value with the place it stands at. It refers to the path and the value; both must outlive
/// it.
class JsonField {
 public:
  JsonField(const std::filesystem::path& path, std::string place, const nlohmann::json& value)
      : path_(path), place_(std::move(place)), value_(value) {}

  JsonField at(const std::string& key) const;
  /// The elements of an array.
  std::vector<JsonField> items() const;
  /// The members of an object, in the order of their keys.
  std::vector<std::pair<std::string, JsonField>> members() const;
  std::string text() const;
  /// An integer from `least` to the largest int64.
  std::int64_t integer(std::int64_t least) const;
  double number() const;
  std::vector<std::int64_t> sizes() const;
  bool is_null() const { return value_.is_null(); }
  const nlohmann::json& value() const { return value_; }
  const std::string& place() const { return place_; }
  [[noreturn]] void wrong(const std::string& wanted) const;
  [[noreturn]] void fail(const std::string& what) const;

 private:
  const std::filesystem::path& path_;
  std::string place_;
  const nlohmann::json& value_;
};

}  // namespace fsdp
