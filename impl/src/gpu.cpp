#include "gpu.h"

namespace fsdp {
namespace {
const Gpus* registered = nullptr;
}

const Gpus* gpus() {
  return registered;
}

RegisterGpus::RegisterGpus(const Gpus& implementation) {
  static const Gpus kept = implementation;
  registered = &kept;
}

}  // namespace fsdp
