#pragma once
// A verdict is the outcome of one check of one tensor at one step: never a bare "not close", always
// where, what was seen, what was wanted, how far apart they are, what was allowed, and by which
// rule.

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "reference/scenario.h"
#include "reference/trace.h"

namespace shardproof {

enum class RuleKind {
  exact,    // bit for bit; 0 ULP. Zeros of either sign differ, and a NaN equals only a NaN of the
            // same bits
  bounded,  // within a bound computed from the data, element by element
  guard,    // something about the run that must be so for the other checks to mean anything
};
std::string_view to_string(RuleKind kind);

enum class Outcome { passed, failed, not_applicable };
std::string_view to_string(Outcome outcome);

struct Verdict {
  std::string check;      // dotted: fsdp.<area>.<behaviour>.<dtype>.<world>.<variant>
  std::string reference;  // what it was held to: "replay", "python", "whole", "float64", or "guard"
  int step = 0;
  Quantity quantity{};
  std::string name;  // parameter or layer
  RuleKind rule{};
  std::string rule_source;  // why this much is allowed, in one line
  Outcome outcome{};
  std::int64_t elements = 0;   // compared
  std::int64_t differing = 0;  // elements outside the rule
  // The worst element; rank and element are -1 if nothing was compared.
  int rank = kNoRank;
  std::int64_t element = -1;        // flattened index in the whole tensor
  std::vector<std::int64_t> index;  // the same in each dimension
  double got = 0;
  double want = 0;
  std::uint64_t ulp = 0;   // distance in units in the last place of the checked dtype; the largest
                           // number for NaN against a number
  double allowed = 0;      // absolute difference that was allowed at this element; 0 for exact
  double worst_ratio = 0;  // bounded: the largest |got - want| / allowed
  std::string message;     // for guards and malformed traces: a sentence
};

/// The dotted name of a check,
/// fsdp.<area>.<behaviour>.<dtype>.w<world>.<model>_<optimizer>_<variant>.
std::string check_name(const Scenario& scenario, std::string_view area, std::string_view behaviour,
                       std::string_view variant);

/// "rank 3", or "the single device" for kNoRank.
std::string holder_name(int rank);

/// One line of results.jsonl (conformance/results.schema.json). Non-finite numbers become strings
/// "nan", "inf", "-inf".
nlohmann::json to_json(const Verdict& verdict);

/// One sentence on a failed verdict, for people.
std::string describe(const Verdict& verdict);

}  // namespace shardproof
