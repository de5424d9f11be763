#include "materialize.h"

#include <ATen/ATen.h>
#include <c10/core/TensorImpl.h>
#include <fmt/format.h>

#include <functional>

#include "fsdp/errors.h"
#include "fsdp/module.h"
#include "unit.h"

namespace fsdp {
namespace {

/// Modules and optimizers hold a parameter by its tensor object, so that one has to change its
/// device in place. Tensor::set_data does this between devices with memory, but not to or from
/// meta.
struct TensorImplAccess : c10::TensorImpl {
  static void become(c10::TensorImpl& to, const c10::TensorImpl& from) {
    copy_tensor_metadata(&from, &to, to.version_counter(), to.allow_tensor_metadata_change());
  }
};

void move_in_place(const at::Tensor& tensor, at::Device device) {
  const auto moved = at::empty_strided(tensor.sizes(), tensor.strides(),
                                       tensor.options().device(device).requires_grad(false));
  TensorImplAccess::become(*tensor.unsafeGetTensorImpl(), *moved.unsafeGetTensorImpl());
}

/// The module's own tensors that are on the meta device.
std::vector<at::Tensor> meta_tensors(torch::nn::Module& module) {
  std::vector<at::Tensor> found;
  for (const auto& own :
       {module.named_parameters(/*recurse=*/false), module.named_buffers(/*recurse=*/false)}) {
    for (const auto& entry : own) {
      if (entry.value().defined() && entry.value().is_meta()) {
        found.push_back(entry.value());
      }
    }
  }
  return found;
}

/// While it lives, the module's parameters that a unit has already (tied weights) are whole and of
/// no consequence, so that filling in the module neither fails on a shard nor changes it.
class SpareParameters {
 public:
  explicit SpareParameters(torch::nn::Module& module) {
    for (const auto& entry : module.named_parameters(/*recurse=*/false)) {
      auto* owner = entry.value().defined() ? owner_of(entry.value()) : nullptr;
      if (owner == nullptr) {
        continue;
      }
      owners_.push_back(owner);
      for (std::size_t i = 0; i < owner->flat().parameters().size(); ++i) {
        if (owner->flat().parameters()[i].is_same(entry.value())) {
          at::Tensor(entry.value())
              .set_data(at::empty(owner->flat().slots()[i].sizes, entry.value().options()));
        }
      }
    }
  }
  ~SpareParameters() {
    for (auto* owner : owners_) {
      owner->flat().use_chunk();
    }
  }
  SpareParameters(const SpareParameters&) = delete;
  SpareParameters& operator=(const SpareParameters&) = delete;

 private:
  std::vector<Unit*> owners_;
};

}  // namespace

void to_meta(torch::nn::Module& module) {
  for (const auto& own : {module.named_parameters(), module.named_buffers()}) {
    for (const auto& entry : own) {
      if (entry.value().defined() && !entry.value().is_meta()) {
        move_in_place(entry.value(), at::kMeta);
      }
    }
  }
}

void materialize(torch::nn::Module& module, const FullyShardOptions& options, int rank) {
  const std::function<void(torch::nn::Module&, const std::string&)> walk = [&](torch::nn::Module&
                                                                                   at,
                                                                               const std::string&
                                                                                   name) {
    for (const auto& child : at.named_children()) {
      if (unit_of(*child.value()) == nullptr) {
        walk(*child.value(), name.empty() ? child.key() : name + "." + child.key());
      }
    }
    const auto tensors = meta_tensors(at);
    if (tensors.empty()) {
      return;
    }
    if (!options.device || !options.param_init_fn) {
      throw UsageError(fmt::format(
          "rank {}: fully_shard: module '{}' of type {} has tensors on the meta device; wanted: "
          "options.device and options.param_init_fn, which give them memory and values",
          rank, plain_name(name), at.name()));
    }
    for (const auto& tensor : tensors) {
      move_in_place(tensor, *options.device);
    }
    const at::NoGradGuard no_grad;
    const SpareParameters spare(at);
    options.param_init_fn(at);
  };
  walk(module, "");
}

}  // namespace fsdp
