#pragma once
// Helps to say in plain words what is wrong with what was given.

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "fsdp/strict_json.h"

namespace shardproof {

/// The number of single-letter changes from one word to the other (Levenshtein).
std::size_t edit_distance(std::string_view a, std::string_view b);

using fsdp::json_reason;

/// Whether it can stand in a JSON text.
bool is_utf8(const std::string& text);

}  // namespace shardproof
