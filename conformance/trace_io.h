#pragma once
// Traces on disk: a folder with trace.json and one safetensors file per step, so that any program
// in any language can be a subject or a reference. The format is described in
// conformance/trace-format.md.

#include <fsdp/errors.h>
#include <fsdp/safetensors.h>

#include <filesystem>
#include <string>
#include <string_view>

#include "reference/scenario.h"
#include "reference/trace.h"

namespace shardproof {

using fsdp::FileError;
using fsdp::read_safetensors;
using fsdp::SafetensorsFile;
using fsdp::write_file;
using fsdp::write_safetensors;

/// "per_rank", "replicated", "sharded", "single".
std::string_view to_string(Placement placement);

/// A step as one file and back. Both check that every piece fits its tensor (ranks ascend, shapes
/// agree, a run lies inside the tensor); whether the pieces tile it, and whether a rank is missing,
/// is for the comparison to say. write_step throws TraceError, read_step FileError.
void write_step(const std::filesystem::path& path, const StepTrace& step);
StepTrace read_step(const std::filesystem::path& path);

/// A state as one file and back: keys "parameter/NAME" and "optimizer_state/KIND/NAME", metadata
/// "steps_done" and "optimizer_steps" (read as steps_done if it is missing).
void write_state(const std::filesystem::path& path, const TrainingState& state);
TrainingState read_state(const std::filesystem::path& path);

/// The folder: `trace.json` holds the scenario, the producer and the number of steps; step k is
/// step-0000k.safetensors. trace.json is written last, by finish(): a folder without it is a run
/// that did not end.
class TraceWriter {
 public:
  /// Makes the folder; a trace that is already there is removed, trace.json first.
  TraceWriter(std::filesystem::path folder, const Scenario& scenario, std::string producer);
  /// Steps come in order, from 0; TraceError otherwise.
  void add(const StepTrace& step);
  void finish();

 private:
  std::filesystem::path folder_;
  Scenario scenario_;
  std::string producer_;
  int steps_ = 0;
};

class TraceReader {
 public:
  explicit TraceReader(std::filesystem::path folder);
  const Scenario& scenario() const { return scenario_; }
  int steps() const { return steps_; }
  StepTrace step(int index) const;

 private:
  std::filesystem::path folder_;
  Scenario scenario_;
  int steps_ = 0;
};

}  // namespace shardproof
