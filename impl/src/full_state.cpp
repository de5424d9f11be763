// The model's state as a whole, in memory and in one file.

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "fsdp/errors.h"
#include "fsdp/safetensors.h"
#include "fsdp/state.h"
#include "tensor_source.h"

namespace fsdp {
namespace {

StateDict full_state_of(const Model& model, const StateOptions& options) {
  const at::NoGradGuard no_grad;
  const bool wanted = !options.rank0_only || model.ranks.rank() == 0;
  StateDict state;
  for (const auto& tensor : model.tensors) {
    const auto whole = gather_whole(tensor, tensor.tensor);
    if (wanted) {
      state[tensor.name()] = options.cpu_offload ? whole.cpu() : whole;
    }
  }
  return state;
}

void load(const Model& model, TensorSource& source, bool strict) {
  ModelPlan plan;
  model.ranks.all_or_none([&] {
    plan = plan_model(model.tensors, source, strict);
    return "";
  });
  std::vector<at::Tensor> pieces;
  model.ranks.all_or_none([&] {
    pieces = read_model(model.tensors, plan, source);
    return "";
  });
  write_model(model.tensors, pieces);
}

}  // namespace

StateDict full_state_dict(torch::nn::Module& module, const StateOptions& options) {
  return full_state_of(open_model(module, options.process_group, "full_state_dict"), options);
}

void load_full_state_dict(torch::nn::Module& module, const StateDict& state,
                          const LoadStateOptions& options) {
  const auto model = open_model(module, options.process_group, "load_full_state_dict");
  const std::string origin = "load_full_state_dict: the state";
  std::unique_ptr<TensorSource> source;
  if (options.broadcast_from_rank0) {
    source = std::make_unique<BroadcastSource>(state, origin, model.ranks);
  } else {
    model.ranks.all_or_none([&] {
      source = std::make_unique<DictSource>(state, origin);
      return "";
    });
  }
  load(model, *source, options.strict);
}

void write_full_state(const std::filesystem::path& path, torch::nn::Module& module,
                      BackendPtr process_group) {
  const auto model = open_model(module, process_group, "write_full_state");
  SafetensorsFile file;
  file.tensors = full_state_of(model, {process_group, /*rank0_only=*/true, /*cpu_offload=*/true});
  // As safetensors.torch.save_model writes them: what wrote the file, and for each further name of
  // a shared tensor the one that it is kept under.
  file.metadata["format"] = "pt";
  for (const auto& tensor : model.tensors) {
    for (std::size_t i = 1; i < tensor.names.size(); ++i) {
      file.metadata[tensor.names[i]] = tensor.name();
    }
  }
  model.ranks.all_or_none([&] {
    if (model.ranks.rank() == 0) {
      write_safetensors(path, file);
    }
    return "";
  });
}

void load_full_state(const std::filesystem::path& path, torch::nn::Module& module,
                     const LoadStateOptions& options) {
  const auto model = open_model(module, options.process_group, "load_full_state");
  if (options.broadcast_from_rank0) {
    StateDict state;
    model.ranks.all_or_none([&] {
      if (model.ranks.rank() == 0) {
        state = read_safetensors(path).tensors;
      }
      return "";
    });
    BroadcastSource source(state, path.string(), model.ranks);
    load(model, source, options.strict);
    return;
  }
  std::unique_ptr<TensorSource> source;
  model.ranks.all_or_none([&] {
    source = std::make_unique<FileSource>(path);
    return "";
  });
  load(model, *source, options.strict);
}

}  // namespace fsdp
