#include "checkpoint_frame.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "backward_marker.h"
#include "current_operation.h"
#include "fsdp/observer.h"

namespace fsdp::detail {
namespace {

/// Thrown through the function when the last tensor that is needed is there. Not a std::exception,
/// so that a function that catches those does not take it for trouble of its own.
struct Enough {
  const CheckpointFrame* frame;
};

thread_local int second_runs = 0;

std::string described(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  return fmt::format("{} of shape [{}] on {}", c10::toString(dtype), fmt::join(sizes, ", "),
                     device.str());
}

}  // namespace

// ---- What autograd holds ----------------------------------------------------------------------

namespace {

class SlotHooks : public torch::autograd::SavedVariableHooks {
 public:
  explicit SlotHooks(CheckpointFrame& frame) : frame_(frame) {}
  void call_pack_hook(const at::Tensor& tensor) override { slot_ = frame_.save(tensor); }
  at::Tensor call_unpack_hook() override { return slot_->take(); }

 private:
  CheckpointFrame& frame_;  // only while packing; then the slot holds it
  std::shared_ptr<CheckpointFrame::Slot> slot_;
};

/// Of the graph of a second run, which nobody will run backward through unless the function itself
/// does.
class PlainHooks : public torch::autograd::SavedVariableHooks {
 public:
  explicit PlainHooks(std::function<void(const at::Tensor&)> on_save)
      : on_save_(std::move(on_save)) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    kept_ = tensor.detach();
    on_save_(kept_);
  }
  at::Tensor call_unpack_hook() override { return kept_; }

 private:
  std::function<void(const at::Tensor&)> on_save_;
  at::Tensor kept_;
};

class FirstRunContext : public SavedTensorContext {
 public:
  explicit FirstRunContext(CheckpointFrame& frame) : frame_(frame) {}
  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override {
    return std::make_unique<SlotHooks>(frame_);
  }

 private:
  CheckpointFrame& frame_;
};

}  // namespace

CheckpointFrame::Slot::Slot(std::shared_ptr<CheckpointFrame> frame, std::int64_t index,
                            const at::Tensor& tensor)
    : frame_(std::move(frame)),
      index_(index),
      sizes_(tensor.sizes().vec()),
      dtype_(tensor.scalar_type()),
      device_(tensor.device()) {}

at::Tensor CheckpointFrame::Slot::take() {
  if (!recomputed_.defined()) {
    frame_->recompute();
  }
  if (!recomputed_.defined()) {
    throw RecomputationError(fmt::format(
        "checkpointed region '{}': its second run saved fewer tensors than its first, so that "
        "number {} ({}) is missing; wanted: a function that does the same each time",
        frame_->name(), index_, described(sizes_, dtype_, device_)));
  }
  // With hooks, autograd leaves this check to us.
  if (recomputed_._version() != version_) {
    throw RecomputationError(fmt::format(
        "checkpointed region '{}': saved tensor {} ({}) was changed in place after it was saved; "
        "wanted: an operation that is not in place",
        frame_->name(), index_, described(sizes_, dtype_, device_)));
  }
  return std::exchange(recomputed_, at::Tensor());
}

// ---- First run --------------------------------------------------------------------------------

namespace {

RunState::Options state_options(const RecomputationOptions& options, torch::nn::Module* module,
                                const std::vector<at::Tensor>& inputs) {
  RunState::Options state;
  state.generators = options.preserve_rng_state;
  state.module = module;
  for (const auto& input : inputs) {
    if (input.defined()) {
      state.devices.push_back(input.device());
    }
  }
  return state;
}

}  // namespace

CheckpointFrame::CheckpointFrame(RecomputationOptions options, torch::nn::Module* module,
                                 const std::vector<at::Tensor>& inputs, SavedTensorContext* context)
    : options_(std::move(options)), state_(state_options(options_, module, inputs)) {
  if (options_.name.empty()) {
    options_.name = module == nullptr ? "a function" : module->name();
  }
  for (const auto& input : inputs) {
    inputs_.push_back(keep(input, context));
  }
}

CheckpointFrame::Input CheckpointFrame::keep(const at::Tensor& tensor,
                                             SavedTensorContext* context) const {
  Input input;
  if (!tensor.defined()) {
    return input;
  }
  input.requires_grad = tensor.requires_grad();
  const at::NoGradGuard no_grad;
  if (context != nullptr) {
    // An activation of the region around this one, which does not keep it either.
    input.saved = context->make_hooks();
    input.saved->call_pack_hook(tensor.detach());
    return input;
  }
  input.version = tensor._version();
  input.tensor = tensor;
  const auto& elsewhere = options_.keep_inputs_on;
  if (elsewhere && *elsewhere != tensor.device() && tensor.is_floating_point()) {
    input.device = tensor.device();
    const bool pin = elsewhere->is_cpu() && tensor.is_cuda();
    input.tensor = at::empty(tensor.sizes(), tensor.options().device(*elsewhere).pinned_memory(pin))
                       .copy_(tensor.detach(), /*non_blocking=*/pin);
    input.version = input.tensor._version();
  }
  return input;
}

std::shared_ptr<CheckpointFrame::Slot> CheckpointFrame::save(const at::Tensor& tensor) {
  auto slot =
      std::make_shared<Slot>(shared_from_this(), static_cast<std::int64_t>(slots_.size()), tensor);
  if (keeps_values()) {
    slot->operation_ = current_operation();
    slot->stored_ = tensor.detach().clone();
  }
  slots_.push_back(slot);
  return slot;
}

// ---- Second run -------------------------------------------------------------------------------

/// The context of a second run: gives its tensors to the slots.
class CheckpointFrame::SecondRun : public SavedTensorContext {
 public:
  explicit SecondRun(CheckpointFrame& frame) : frame_(frame) {
    for (const auto& weak : frame.slots_) {
      const auto slot = weak.lock();
      missing_ += slot != nullptr && !slot->recomputed_.defined() ? 1 : 0;
    }
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override {
    return std::make_unique<PlainHooks>([this](const at::Tensor& tensor) { see(tensor); });
  }
  std::size_t saved() const { return next_; }

 private:
  void see(const at::Tensor& tensor) {
    const auto index = next_++;
    if (index >= frame_.slots_.size()) {
      throw RecomputationError(
          fmt::format("checkpointed region '{}': its first run saved {} tensors, and its second "
                      "saves more: {}; "
                      "wanted: a function that does the same each time",
                      frame_.name(), frame_.slots_.size(),
                      described(tensor.sizes(), tensor.scalar_type(), tensor.device())));
    }
    const auto slot = frame_.slots_[index].lock();
    if (slot == nullptr || slot->recomputed_.defined()) {
      return;
    }
    frame_.fill(*slot, tensor);
    if (--missing_ == 0 && frame_.options_.early_stop) {
      throw Enough{&frame_};
    }
  }

  CheckpointFrame& frame_;
  std::size_t next_ = 0;
  std::int64_t missing_ = 0;
};

std::vector<at::Tensor> CheckpointFrame::inputs_again() const {
  std::vector<at::Tensor> inputs;
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    const auto& kept = inputs_[i];
    auto input = kept.saved != nullptr ? kept.saved->call_unpack_hook() : kept.tensor;
    if (!input.defined()) {
      inputs.emplace_back();
      continue;
    }
    if (kept.saved == nullptr && input._version() != kept.version) {
      throw RecomputationError(fmt::format(
          "checkpointed region '{}': its input {} ({}) was changed in place since the first run; "
          "wanted: inputs that stay as they were until backward",
          name(), i, described(input.sizes(), input.scalar_type(), input.device())));
    }
    input = kept.device ? input.detach().to(*kept.device) : input.detach();
    if (auto* listener = observer()) {
      listener->observe({.point = Point::recomputation_input, .unit = name(), .tensor = input});
    }
    inputs.push_back(kept.requires_grad ? input.detach().requires_grad_() : input);
  }
  return inputs;
}

void CheckpointFrame::recompute() {
  if (is_recomputing_) {
    throw RecomputationError(fmt::format(
        "checkpointed region '{}' needs a tensor of its own while it runs again; wanted: a "
        "function that does not run backward through its own earlier run",
        name()));
  }
  struct Mark {
    explicit Mark(bool& flag) : flag_(flag) {
      flag_ = true;
      ++second_runs;
    }
    ~Mark() {
      flag_ = false;
      --second_runs;
    }
    Mark(const Mark&) = delete;
    Mark& operator=(const Mark&) = delete;
    bool& flag_;
  };
  const auto inputs = inputs_again();
  const Mark mark(is_recomputing_);
  const auto see = [this](at::Tensor& state) {
    if (auto* listener = observer()) {
      listener->observe({.point = Point::recomputation_generator, .unit = name(), .tensor = state});
    }
  };
  try {
    state_.replay(see, [&] {
      const at::AutoGradMode grad(true);
      SecondRun run(*this);
      const SavedTensorContextScope scope(run);
      std::optional<OperationScope> operations;
      if (keeps_values()) {
        operations.emplace();
      }
      try {
        again_(inputs);
      } catch (const Enough& enough) {
        if (enough.frame != this) {
          throw;
        }
        return;
      }
      if (!options_.early_stop && run.saved() != slots_.size()) {
        throw RecomputationError(fmt::format(
            "checkpointed region '{}': its first run saved {} tensors, and its second {}; wanted: "
            "a function that does the same each time",
            name(), slots_.size(), run.saved()));
      }
    });
  } catch (...) {
    forget_recomputed();
    throw;
  }
  if (torch::autograd::get_current_graph_task_id() != -1) {
    // What backward did not ask for would stay as long as the graph.
    at_end_of_backward([weak = weak_from_this()] {
      if (const auto frame = weak.lock()) {
        frame->forget_recomputed();
      }
    });
  }
}

void CheckpointFrame::fill(Slot& slot, at::Tensor tensor) {
  if (auto* listener = observer()) {
    listener->observe({.point = Point::recomputed_activation, .unit = name(), .tensor = tensor});
  }
  check(slot, tensor);
  slot.version_ = tensor._version();
  slot.recomputed_ = std::move(tensor);
}

void CheckpointFrame::check(const Slot& slot, const at::Tensor& tensor) const {
  const bool is_alike = tensor.sizes() == slot.sizes_ && tensor.scalar_type() == slot.dtype_ &&
                        tensor.device() == slot.device_;
  if (options_.check != RecomputationCheck::none && !is_alike) {
    throw RecomputationError(fmt::format(
        "checkpointed region '{}': saved tensor {}{} was {} and is {} when recomputed; wanted: a "
        "function that does the same each time",
        name(), slot.index_, slot.operation_.empty() ? "" : " (" + slot.operation_ + ")",
        described(slot.sizes_, slot.dtype_, slot.device_),
        described(tensor.sizes(), tensor.scalar_type(), tensor.device())));
  }
  if (options_.on_recomputed) {
    options_.on_recomputed({name(), slot.index_, slot.operation_, slot.stored_, tensor});
  }
  if (options_.check == RecomputationCheck::values && !has_same_bits(slot.stored_, tensor)) {
    throw RecomputationError(fmt::format(
        "checkpointed region '{}': saved tensor {} ({}) is another when recomputed: {}; wanted: "
        "the same bits. Does the function draw random numbers of its own, or read something that "
        "changed since?",
        name(), slot.index_, slot.operation_, bit_difference(slot.stored_, tensor).text));
  }
}

void CheckpointFrame::forget_recomputed() {
  for (const auto& weak : slots_) {
    if (const auto slot = weak.lock()) {
      slot->recomputed_.reset();
    }
  }
}

// ---- The template's part ----------------------------------------------------------------------

struct FirstRun::Open {
  explicit Open(CheckpointFrame& frame) : context(frame), scope(context) {
    if (frame.keeps_values()) {
      operations.emplace();
    }
  }
  FirstRunContext context;
  SavedTensorContextScope scope;
  std::optional<OperationScope> operations;
};

FirstRun::FirstRun(const RecomputationOptions& options, torch::nn::Module* module,
                   const std::vector<at::Tensor*>& inputs) {
  for (auto* input : inputs) {
    inputs_.push_back(std::exchange(*input, at::Tensor()));
  }
  frame_ = std::make_shared<CheckpointFrame>(options, module, inputs_, saved_tensor_context());
}

FirstRun::~FirstRun() = default;

std::vector<at::Tensor> FirstRun::begin(
    std::function<void(const std::vector<at::Tensor>&)> run_again) {
  frame_->run_again_by(std::move(run_again));
  open_ = std::make_unique<Open>(*frame_);
  return std::exchange(inputs_, {});
}

void FirstRun::end() {
  open_.reset();
  frame_->end_first_run();
}

}  // namespace fsdp::detail

namespace fsdp {

bool is_recomputing() {
  return detail::second_runs > 0;
}

}  // namespace fsdp
