#pragma once
// Helps to say in plain words what is wrong with what was given.

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace shardproof {

/// The number of single-letter changes from one word to the other (Levenshtein).
std::size_t edit_distance(std::string_view a, std::string_view b);

/// What is wrong with a JSON text, without the library's name for it and its idea of the place.
/// Bytes that are no printable ASCII are spelled in hexadecimal.
std::string json_reason(const nlohmann::json::exception& error);

/// Whether it can stand in a JSON text.
bool is_utf8(const std::string& text);

}  // namespace shardproof
