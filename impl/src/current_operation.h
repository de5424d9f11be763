#pragma once
// The name of the operator that this thread is running, such as "aten::gelu", while somebody asks.

#include <string>

namespace fsdp {

/// While it lives, this thread's operators are followed. They cost a little more then.
class OperationScope {
 public:
  OperationScope();
  ~OperationScope();
  OperationScope(const OperationScope&) = delete;
  OperationScope& operator=(const OperationScope&) = delete;
};

/// The innermost that runs; "" if there is none.
std::string current_operation();

}  // namespace fsdp
