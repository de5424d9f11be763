// The CUDA half of storage_resize.h. Compiled only where a CUDA toolkit is found; loaded into
// programs that link fsdp::cuda.

#include <ATen/native/cuda/Resize.h>

#include "storage_resize.h"

namespace fsdp {
namespace {

const RegisterStorageResizer cuda(c10::DeviceType::CUDA, [](const c10::Storage& storage,
                                                            std::int64_t bytes) {
  at::native::resize_bytes_cuda(storage.unsafeGetStorageImpl(), static_cast<std::size_t>(bytes));
});

}  // namespace
}  // namespace fsdp
