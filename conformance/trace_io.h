#pragma once
// Traces on disk: a folder with trace.json and one safetensors file per step, so that any program
// in any language can be a subject or a reference. The format is described in
// conformance/trace-format.md. Also safetensors files by themselves, for weights and states.

#include <torch/types.h>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "reference/scenario.h"
#include "reference/trace.h"

namespace shardproof {

/// A file is missing, truncated, malformed or of another version; the message names the file, the
/// place, and how to make it again.
struct FileError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct SafetensorsFile {
  std::map<std::string, torch::Tensor> tensors;
  std::map<std::string, std::string> metadata;
};

/// Reads the whole file. Every length and offset is checked against the file before it is used.
SafetensorsFile read_safetensors(const std::filesystem::path& path);
/// Writes beside and renames, so that a reader never sees half a file; on failure (disk full)
/// nothing is left behind and a FileError is thrown.
void write_safetensors(const std::filesystem::path& path, const SafetensorsFile& file);

/// Writes the parts one after another into a hidden file beside `path` and renames it into place.
/// On failure (no such folder, disk full) the hidden file is removed, what `path` named before is
/// untouched, and a FileError is thrown.
void write_file(const std::filesystem::path& path, const std::vector<std::string_view>& parts);

/// "per_rank", "replicated", "sharded", "single".
std::string_view to_string(Placement placement);

/// A step as one file and back. Both check that every piece fits its tensor (ranks ascend, shapes
/// agree, a run lies inside the tensor); whether the pieces tile it, and whether a rank is missing,
/// is for the comparison to say. write_step throws TraceError, read_step FileError.
void write_step(const std::filesystem::path& path, const StepTrace& step);
StepTrace read_step(const std::filesystem::path& path);

/// A state as one file and back: keys "parameter/NAME" and "optimizer_state/KIND/NAME", metadata
/// "steps_done".
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
