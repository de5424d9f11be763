#include "storage_resize.h"

#include <ATen/native/Resize.h>
#include <fmt/format.h>

#include <array>

#include "fsdp/errors.h"

namespace fsdp {
namespace {

using Resizers =
    std::array<StorageResizer,
               static_cast<std::size_t>(c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES)>;

Resizers& resizers() {
  static Resizers registered{};
  return registered;
}

}  // namespace

RegisterStorageResizer::RegisterStorageResizer(c10::DeviceType device, StorageResizer resizer) {
  resizers()[static_cast<std::size_t>(device)] = resizer;
}

namespace {
const RegisterStorageResizer cpu(c10::DeviceType::CPU,
                                 [](const c10::Storage& storage, std::int64_t bytes) {
                                   at::native::resize_bytes_nocuda(storage, bytes);
                                 });
}  // namespace

void resize_storage(const at::Tensor& tensor, std::int64_t bytes) {
  const auto resizer = resizers()[static_cast<std::size_t>(tensor.device().type())];
  if (resizer == nullptr) {
    throw ShardingError(
        fmt::format("cannot resize storage on device {}: this build has no implementation for it; "
                    "build with the "
                    "toolkit of that device (for CUDA: nvcc on PATH)",
                    tensor.device().str()));
  }
  resizer(tensor.storage(), bytes);
}

}  // namespace fsdp
