#pragma once
// The Python reference (reference/python/reference.py) as an object: a program beside this one that
// trains the same scenario in plain PyTorch and answers with a trace of each step. It shares no
// code with the C++ reference, so that what both agree on is not one mistake made once.

#include <torch/types.h>
#include <chrono>
#include <filesystem>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>

#include "reference/scenario.h"
#include "reference/trace.h"

namespace shardproof {

/// The program could not be run, gave no answer in time, or gave a wrong one. The message names
/// what was run, what was seen and wanted, the end of what it wrote to stderr, and what to do.
struct PythonReferenceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// What is named as the interpreter is none that can be used: it is not there, cannot be started,
/// lacks a package, or does not answer as the program would.
struct PythonUnusable : PythonReferenceError {
  using PythonReferenceError::PythonReferenceError;
};

/// It gave no answer in time.
struct PythonReferenceTimeout : PythonReferenceError {
  using PythonReferenceError::PythonReferenceError;
};

class PythonReference {
 public:
  struct Options {
    /// Looked up in PATH if it has no slash. Empty: what SHARDPROOF_PYTHON says, else
    /// the one that was found at configuration (that of ci/setup, else python3).
    std::filesystem::path python;
    /// Empty: what SHARDPROOF_PYTHON_REFERENCE says, else reference.py where it lay when this was
    /// compiled.
    std::filesystem::path program;
    /// Files are exchanged in a folder of their own in here. Empty: the system's temporary folder.
    std::filesystem::path work_folder;
    /// How long one answer may take: the start (awaited by the first step), each step, the end.
    std::chrono::seconds timeout{120};
  };

  /// Starts the program without waiting for it. Throws PythonReferenceError if it cannot be
  /// started.
  ///
  /// The program is ended when the thread that calls this ends (Linux knows of parent threads
  /// only), so that it cannot outlive a process that is killed. Call it on a thread that outlives
  /// this object; steps may be asked for on others.
  PythonReference(const Scenario& scenario, const std::map<std::string, torch::Tensor>& initial,
                  Options options);
  /// Ends the program, if finish() has not, and removes the files.
  ~PythonReference();
  PythonReference(const PythonReference&) = delete;
  PythonReference& operator=(const PythonReference&) = delete;

  /// Trains one step from `state`, or from the program's own if that is nullptr. Steps of its own
  /// come one after another from 0, and a state must have `step` steps done. After an error, the
  /// program is gone and every further call throws.
  StepTrace step(int step, const TrainingState* state);
  /// Ends the program in good order: throws unless it exits with code 0.
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace shardproof
