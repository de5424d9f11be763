#pragma once
// One run of a checkpointed function: what autograd saved of it, by number instead of by value, and
// how to make it anew.

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/recomputation.h"
#include "run_state.h"
#include "saved_tensor_hooks.h"

namespace fsdp::detail {

class CheckpointFrame : public std::enable_shared_from_this<CheckpointFrame> {
 public:
  /// A tensor that autograd saved in the first run. It is held by the graph, and holds the frame.
  class Slot {
   public:
    Slot(std::shared_ptr<CheckpointFrame> frame, std::int64_t index, const at::Tensor& tensor);
    /// The recomputed tensor, which is then forgotten here.
    at::Tensor take();

   private:
    friend class CheckpointFrame;
    std::shared_ptr<CheckpointFrame> frame_;
    std::int64_t index_;
    std::vector<std::int64_t> sizes_;
    at::ScalarType dtype_;
    at::Device device_;
    std::string operation_;
    at::Tensor stored_;
    at::Tensor recomputed_;
    std::int64_t version_ = 0;  // of the recomputed tensor when it was saved
  };

  /// Takes the inputs over. `context` is the one around the region, which is given the inputs to
  /// save; null for none.
  CheckpointFrame(RecomputationOptions options, torch::nn::Module* module,
                  const std::vector<at::Tensor>& inputs, SavedTensorContext* context);

  void run_again_by(std::function<void(const std::vector<at::Tensor>&)> again) {
    again_ = std::move(again);
  }
  std::shared_ptr<Slot> save(const at::Tensor& tensor);
  /// The first run is over.
  void end_first_run() { state_.forget_unwritten_buffers(); }

  const std::string& name() const { return options_.name; }
  bool keeps_values() const {
    return options_.check == RecomputationCheck::values || options_.on_recomputed != nullptr;
  }

 private:
  class SecondRun;
  struct Input {
    at::Tensor tensor;  // undefined if it was, or if it is saved elsewhere
    std::unique_ptr<torch::autograd::SavedVariableHooks> saved;  // by the region around this one
    std::optional<at::Device> device;  // where it was, if it has been moved
    std::int64_t version = 0;
    bool requires_grad = false;
  };

  Input keep(const at::Tensor& tensor, SavedTensorContext* context) const;
  std::vector<at::Tensor> inputs_again() const;
  /// Runs the function again and fills the slots that the graph still holds.
  void recompute();
  void fill(Slot& slot, at::Tensor tensor);
  void check(const Slot& slot, const at::Tensor& tensor) const;
  void forget_recomputed();

  RecomputationOptions options_;
  RunState state_;
  std::vector<Input> inputs_;
  std::function<void(const std::vector<at::Tensor>&)> again_;
  std::vector<std::weak_ptr<Slot>> slots_;
  bool is_recomputing_ = false;
};

}  // namespace fsdp::detail
