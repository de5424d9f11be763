#pragma once
// Trains a scenario sharded, and expects every quantity of every step to equal one device to the
// bit.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <set>
#include <string>

#include "conformance/comparison.h"
#include "conformance/session.h"

namespace shardproof {

inline void expect_equal_to_one_device(const Scenario& scenario) {
  SessionOptions options;
  options.scenario = scenario;
  options.python = false;  // python_reference_test holds the two references to each other
  options.timeout = std::chrono::seconds(120);
  const auto summary = run_session(options);
  std::string why;
  for (const auto& guard : summary.guards) {
    why += guard.outcome == Outcome::failed ? guard.message + "\n" : "";
  }
  if (summary.has_divergence) {
    why += describe(summary.first_divergence);
  }
  EXPECT_EQ(summary.outcome, Outcome::passed) << dotted_name(scenario) << ": " << why;
  std::set<std::string> exact;
  for (const auto& row : summary.rows) {
    if (row.reference == "replay") {
      EXPECT_EQ(row.rule, RuleKind::exact) << row.quantity;
      EXPECT_EQ(row.worst_ulp, 0u) << row.quantity;
      EXPECT_GT(row.elements, 0) << row.quantity;
      exact.insert(row.quantity);
    }
  }
  EXPECT_THAT(exact, testing::IsSupersetOf({"output", "loss", "gradient", "total_norm",
                                            "clipped_gradient", "parameter"}));
}

}  // namespace shardproof
