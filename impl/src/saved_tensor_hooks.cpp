#include "saved_tensor_hooks.h"

#include <torch/csrc/autograd/engine.h>

#include <mutex>
#include <typeinfo>
#include <vector>

#include "fsdp/errors.h"

namespace fsdp {
namespace {

using torch::autograd::Engine;

std::vector<SavedTensorContext*>& contexts() {
  thread_local std::vector<SavedTensorContext*> stack;
  return stack;
}

class AskingEngine : public Engine {
 public:
  ~AskingEngine() override { stop(); }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    auto* context = saved_tensor_context();
    return context == nullptr ? nullptr : context->make_hooks();
  }
};

Engine& asking_engine() {
  // Never destroyed: its threads, if any, may outlive main.
  static auto* const engine = new AskingEngine();
  return *engine;
}

void install_engine() {
  static std::once_flag once;
  std::call_once(once, [] {
    const auto& present = Engine::get_default_engine();
    if (typeid(present) == typeid(Engine)) {
      torch::autograd::set_default_engine_stub(asking_engine);
    }
  });
  if (&Engine::get_default_engine() != &asking_engine()) {
    throw UsageError(
        "activation checkpointing: another library has put its own autograd engine into this "
        "program (Python's torch does); wanted: libtorch's own, or in Python "
        "torch.utils.checkpoint");
  }
}

}  // namespace

SavedTensorContext* saved_tensor_context() {
  return contexts().empty() ? nullptr : contexts().back();
}

SavedTensorContextScope::SavedTensorContextScope(SavedTensorContext& context) {
  install_engine();
  contexts().push_back(&context);
}

SavedTensorContextScope::~SavedTensorContextScope() {
  contexts().pop_back();
}

}  // namespace fsdp
