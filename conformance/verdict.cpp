#include "conformance/verdict.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

namespace shardproof {
namespace {

using nlohmann::json;

constexpr std::uint64_t kFurthest = std::numeric_limits<std::uint64_t>::max();

/// JSON has no numbers that are not finite.
json number(double value) {
  if (std::isfinite(value)) {
    return value;
  }
  if (std::isnan(value)) {
    return "nan";
  }
  return value > 0 ? "inf" : "-inf";
}

std::string where(const Verdict& verdict) {
  std::string place;
  if (verdict.rank != kNoRank) {
    place = fmt::format("rank {}, ", verdict.rank);
  }
  place += fmt::format("element {}", verdict.element);
  if (!verdict.index.empty()) {
    place += fmt::format(" [{}]", fmt::join(verdict.index, ", "));
  }
  return place;
}

std::string how_far(const Verdict& verdict) {
  const std::string ulp = verdict.ulp == kFurthest ? "a NaN against a number"
                                                   : fmt::format("{} ULP apart", verdict.ulp);
  if (verdict.rule == RuleKind::exact) {
    return fmt::format("{}, 0 allowed", ulp);
  }
  return fmt::format("{}, {:.3g} x the {:.3g} allowed", ulp, verdict.worst_ratio, verdict.allowed);
}

}  // namespace

std::string_view to_string(RuleKind kind) {
  switch (kind) {
    case RuleKind::exact:
      return "exact";
    case RuleKind::bounded:
      return "bounded";
    case RuleKind::guard:
      return "guard";
  }
  return "unknown";
}

std::string_view to_string(Outcome outcome) {
  switch (outcome) {
    case Outcome::passed:
      return "passed";
    case Outcome::failed:
      return "failed";
    case Outcome::not_applicable:
      return "not_applicable";
  }
  return "unknown";
}

json to_json(const Verdict& verdict) {
  return {{"check", verdict.check},
          {"reference", verdict.reference},
          {"step", verdict.step},
          {"quantity", to_string(verdict.quantity)},
          {"name", verdict.name},
          {"rule", to_string(verdict.rule)},
          {"rule_source", verdict.rule_source},
          {"outcome", to_string(verdict.outcome)},
          {"elements", verdict.elements},
          {"differing", verdict.differing},
          {"rank", verdict.rank},
          {"element", verdict.element},
          {"index", verdict.index},
          {"got", number(verdict.got)},
          {"want", number(verdict.want)},
          {"ulp", verdict.ulp},
          {"allowed", number(verdict.allowed)},
          {"worst_ratio", number(verdict.worst_ratio)},
          {"message", verdict.message}};
}

std::string check_name(const Scenario& scenario, std::string_view area, std::string_view behaviour,
                       std::string_view variant) {
  std::string name = fmt::format("fsdp.{}.{}.{}.w{}.{}_{}{}{}", area, behaviour, scenario.dtype,
                                 scenario.world_size, scenario.model.kind, scenario.optimizer.kind,
                                 variant.empty() ? "" : "_", variant);
  for (char& c : name) {
    if (!((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.')) {
      c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : '_';
    }
  }
  return name;
}

std::string holder_name(int rank) {
  return rank == kNoRank ? std::string("the single device") : fmt::format("rank {}", rank);
}

std::string describe(const Verdict& verdict) {
  if (verdict.rule == RuleKind::guard) {
    return fmt::format("{} {}: {}", verdict.check, to_string(verdict.outcome), verdict.message);
  }
  std::string text =
      fmt::format("{} {}: step {}, {} \"{}\"", verdict.check, to_string(verdict.outcome),
                  verdict.step, to_string(verdict.quantity), verdict.name);
  if (verdict.element >= 0) {
    text += fmt::format(", {}: got {:.17g}, want {:.17g}, {}; {} of {} elements outside the rule",
                        where(verdict), verdict.got, verdict.want, how_far(verdict),
                        verdict.differing, verdict.elements);
  }
  if (!verdict.message.empty()) {
    text += ": " + verdict.message;
  }
  return text;
}

}  // namespace shardproof
