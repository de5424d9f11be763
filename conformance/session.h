#pragma once
// The main job: trains a scenario with the subject, holds every step to every reference, and sums
// up.

#include <fsdp/process_group.h>
#include <torch/types.h>

#include <chrono>
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
  /// This process's part of a group of processes, one for each rank; null: all ranks are threads of
  /// this process.
  fsdp::BackendPtr process_group{};
  std::chrono::seconds timeout{300};  // of one collective, and of one step of the Python reference
  /// Where the results go; nothing is written if empty.
  std::filesystem::path report;
  /// Called after each step.
  std::function<void(int step, int steps, std::int64_t failed)> progress;
  /// Called when all is compared and written, while the other ranks still wait: what it returns is
  /// what follow_session returns there. Default: 0 if all checks held, else 1.
  std::function<int(const RunSummary&)> conclude;
};

/// Runs it. The summary's outcome is failed if any check or guard failed. Throws what stops the
/// run: ScenarioError, FileError, NonFiniteError, PythonReferenceError, and whatever a rank threw.
///
/// With a process group, rank 0 calls run_session, which collects every rank's tensors, and the
/// others follow_session; before the first step all ranks tell each other what they are to train,
/// and a difference is a UsageError on each of them, naming rank and field. Whoever stops tells the
/// others why.
RunSummary run_session(const SessionOptions& options);

/// A rank other than 0: trains, and returns rank 0's conclusion. Nothing is compared or written
/// here.
int follow_session(const SessionOptions& options);

}  // namespace shardproof
