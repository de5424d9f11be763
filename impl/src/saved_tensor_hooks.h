#pragma once
// What autograd does with a tensor that it saves for backward on this thread. libtorch asks its
// engine, whose answer in C++ programs is nothing; this library puts an engine in its place that
// asks the innermost context of the thread.

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace fsdp {

class SavedTensorContext {
 public:
  virtual ~SavedTensorContext() = default;
  /// Called for each tensor, just before it is saved.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() = 0;
};

/// The innermost of this thread; null if there is none.
SavedTensorContext* saved_tensor_context();

/// Makes `context` the innermost while it lives. Throws UsageError if the program has another
/// engine that would not ask (that of Python).
class SavedTensorContextScope {
 public:
  explicit SavedTensorContextScope(SavedTensorContext& context);
  ~SavedTensorContextScope();
  SavedTensorContextScope(const SavedTensorContextScope&) = delete;
  SavedTensorContextScope& operator=(const SavedTensorContextScope&) = delete;
};

}  // namespace fsdp
