#pragma once
// The main job: trains a scenario with the subject, holds every step to every reference, and sums
// up.

#include <torch/types.h>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "conformance/fault.h"
#include "conformance/report.h"
#include "conformance/verdict.h"
#include "reference/scenario.h"

namespace shardproof {

struct SessionOptions {
  Scenario scenario;
  /// Weights to start from (safetensors); made from the seed if empty.
  std::filesystem::path weights;
  const Fault* fault = nullptr;
  bool python = true;                       // hold to the Python reference too
  std::filesystem::path python_executable;  // empty: as PythonReference::Options says
  /// References start each step from the subject's own state, so that a difference does not grow
  /// into later steps. Without it each runs freely from the initial weights.
  bool lockstep = true;
  std::chrono::seconds timeout{300};  // of one collective, and of one step of the Python reference
  /// Where the results go; nothing is written if empty.
  std::filesystem::path report;
  /// Called after each step.
  std::function<void(int step, int steps, std::int64_t failed)> progress;
};

/// Runs it. The summary's outcome is failed if any check or guard failed. Throws what stops the
/// run: ScenarioError, FileError, NonFiniteError, PythonReferenceError, and whatever a rank threw.
RunSummary run_session(const SessionOptions& options);

}  // namespace shardproof
