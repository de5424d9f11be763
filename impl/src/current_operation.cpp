#include "current_operation.h"

#include <ATen/record_function.h>

#include <memory>
#include <vector>

namespace fsdp {
namespace {

std::vector<const char*>& operations() {
  thread_local std::vector<const char*> stack;
  return stack;
}

/// Tells an operator that was followed from its beginning from one that began before the scope.
struct Began : at::ObserverContext {};

// Of a thread's scopes, one within the other, only the outermost has a callback.
thread_local std::vector<at::CallbackHandle> handles;

}  // namespace

OperationScope::OperationScope() {
  if (!handles.empty()) {
    handles.push_back(at::INVALID_CALLBACK_HANDLE);
    return;
  }
  handles.push_back(at::addThreadLocalCallback(
      at::RecordFunctionCallback(
          [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
            operations().push_back(function.name());
            return std::make_unique<Began>();
          },
          [](const at::RecordFunction&, at::ObserverContext* began) {
            if (began != nullptr && !operations().empty()) {
              operations().pop_back();
            }
          })
          .scopes({at::RecordScope::FUNCTION})));
}

OperationScope::~OperationScope() {
  if (handles.back() != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(handles.back());
    operations().clear();
  }
  handles.pop_back();
}

std::string current_operation() {
  return operations().empty() ? "" : operations().back();
}

}  // namespace fsdp
