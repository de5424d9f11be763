#pragma once
// Gives a tensor's storage bytes or takes them away, while the storage itself stays.

#include <ATen/core/Tensor.h>

namespace fsdp {

/// Resizes the storage of `tensor` to `bytes`; the contents are lost. Throws ShardingError for a
/// device that has no implementation in this build.
void resize_storage(const at::Tensor& tensor, std::int64_t bytes);

using StorageResizer = void (*)(const c10::Storage& storage, std::int64_t bytes);
/// A device file registers its implementation with this.
struct RegisterStorageResizer {
  RegisterStorageResizer(c10::DeviceType device, StorageResizer resizer);
};

}  // namespace fsdp
