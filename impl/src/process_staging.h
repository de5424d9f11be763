#pragma once
// Tensors that are not in host memory travel by way of pinned copies that are.

#include <vector>

#include "in_process_call.h"
#include "in_process_device.h"

namespace fsdp::processes {

class Staging {
 public:
  /// Makes the call one of copies in pinned host memory. What it gives is copied on this thread's
  /// current stream.
  explicit Staging(in_process::Call& call);

  /// Whether the copies of what is given are there.
  bool is_ready() const;
  /// Starts copying what was taken to where it was wanted. The event is that of the last copy.
  in_process::EventPtr copy_back() const;

 private:
  at::Device device_;
  in_process::EventPtr copied_;
  struct Copy {
    at::Tensor staged;
    at::Tensor wanted;
  };
  std::vector<Copy> taken_;
};

}  // namespace fsdp::processes
