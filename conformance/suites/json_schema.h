#pragma once
// Holding JSON to our schemas.

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace shardproof {

using nlohmann::json;

/// The part of JSON Schema that our schemas use. Returns what is wrong, or "".
inline std::string misfit(const json& schema, const json& value, const json& root,
                          const std::string& place) {
  if (schema.contains("$ref")) {
    const auto reference = schema["$ref"].get<std::string>();
    return misfit(root.at(json::json_pointer(reference.substr(1))), value, root, place);
  }
  if (schema.contains("oneOf")) {
    std::size_t fitting = 0;
    for (const json& choice : schema["oneOf"]) {
      fitting += misfit(choice, value, root, place).empty() ? 1 : 0;
    }
    return fitting == 1 ? "" : place + ": fits " + std::to_string(fitting) + " of oneOf";
  }
  if (schema.contains("const") && value != schema["const"]) {
    return place + ": is not " + schema["const"].dump();
  }
  if (schema.contains("enum") &&
      std::find(schema["enum"].begin(), schema["enum"].end(), value) == schema["enum"].end()) {
    return place + ": is not one of " + schema["enum"].dump();
  }
  const std::string type = schema.value("type", "");
  const bool fits =
      type.empty() || (type == "object" && value.is_object()) ||
      (type == "array" && value.is_array()) || (type == "string" && value.is_string()) ||
      (type == "integer" && value.is_number_integer()) || (type == "number" && value.is_number()) ||
      (type == "boolean" && value.is_boolean()) || (type == "null" && value.is_null());
  if (!fits) {
    return place + ": is no " + type;
  }
  if (schema.contains("minimum") && value.is_number() &&
      value.get<double>() < schema["minimum"].get<double>()) {
    return place + ": is below the minimum";
  }
  for (const auto& name : schema.value("required", json::array())) {
    if (!value.contains(name.get<std::string>())) {
      return place + ": lacks " + name.dump();
    }
  }
  if (value.is_object() && schema.contains("properties")) {
    for (const auto& [key, part] : value.items()) {
      if (schema["properties"].contains(key)) {
        if (std::string wrong = misfit(schema["properties"][key], part, root, place + "." + key);
            !wrong.empty()) {
          return wrong;
        }
      } else if (!schema.value("additionalProperties", true)) {
        return place + ": has " + key + ", which the schema does not know";
      }
    }
  }
  if (value.is_array() && schema.contains("items")) {
    for (const json& part : value) {
      if (std::string wrong = misfit(schema["items"], part, root, place + "[]"); !wrong.empty()) {
        return wrong;
      }
    }
  }
  return "";
}

inline json schema_named(const std::string& name) {
  // The suites' sources lie beside the schemas.
  const std::filesystem::path path =
      std::filesystem::path(__FILE__).parent_path().parent_path() / name;
  std::ifstream file(path, std::ios::binary);
  return json::parse(file);
}

}  // namespace shardproof
