#include "model_tensors.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <set>
#include <unordered_map>

#include "fsdp/errors.h"
#include "fsdp/fully_shard.h"
#include "fsdp/module.h"
#include "sha256.h"

namespace fsdp {
namespace {

std::vector<ModelTensor> list_tensors(torch::nn::Module& module) {
  std::unordered_map<const void*, ShardPlacement> placements;
  for (auto& placement : shard_placements(module)) {
    placements.emplace(placement.parameter.unsafeGetTensorImpl(), placement);
  }
  std::vector<ModelTensor> found;
  std::unordered_map<const void*, std::size_t> known;
  const auto add = [&](const std::string& key, const at::Tensor& tensor) {
    const auto [entry, is_new] = known.emplace(tensor.unsafeGetTensorImpl(), found.size());
    if (!is_new) {
      found[entry->second].names.push_back(plain_name(key));
      return;
    }
    const auto placement = placements.find(tensor.unsafeGetTensorImpl());
    if (placement == placements.end()) {
      found.push_back(
          {{plain_name(key)}, tensor.sizes().vec(), 0, tensor.numel(), tensor, {}, true, {}});
    } else {
      const auto& held = placement->second;
      found.push_back({{plain_name(key)},
                       held.sizes,
                       held.begin,
                       held.numel,
                       tensor,
                       held.shard_group,
                       held.is_primary_replica,
                       held.ranges});
    }
  };
  for (const auto& entry : module.named_parameters()) {
    add(entry.key(), entry.value());
  }
  for (const auto& entry : module.named_buffers()) {
    if (entry.value().defined()) {
      add(entry.key(), entry.value());
    }
  }
  return found;
}

Ranks ranks_of(const std::vector<ModelTensor>& tensors, const BackendPtr& process_group,
               std::string_view function) {
  const auto device = tensors.empty() ? at::Device(at::kCPU) : tensors.front().tensor.device();
  if (process_group != nullptr) {
    return {process_group, device};
  }
  BackendPtr common;
  for (const auto& tensor : tensors) {
    if (tensor.is_replicated()) {
      continue;
    }
    if ((common != nullptr && common != tensor.group) || !tensor.is_primary) {
      throw UsageError(fmt::format(
          "rank {}: {}: parameter '{}' is {}; wanted: the backend of all ranks that train the "
          "model, as the process group of the options",
          tensor.group->getRank(), function, tensor.name(),
          tensor.is_primary ? "sharded over another process group than the first"
                            : "a copy of what another rank holds"));
    }
    common = tensor.group;
  }
  return {common, device};
}

void check_tensors(const std::vector<ModelTensor>& tensors) {
  std::set<std::string> names;
  for (const auto& tensor : tensors) {
    for (const auto& name : tensor.names) {
      if (!names.insert(name).second) {
        throw StateError(
            fmt::format("two different tensors of the model are called '{}' once wrappers are left "
                        "out of their "
                        "names; wanted: one; rename one of them",
                        name));
      }
    }
    if (!tensor.is_replicated() && tensor.tensor.sizes() != at::IntArrayRef({tensor.numel})) {
      throw StateError(
          fmt::format("parameter '{}' is whole at the moment, with shape {}; wanted: this rank's "
                      "piece, of shape "
                      "[{}]. Save and load outside of forward, backward and WholeParameters, and "
                      "after unshard() "
                      "call reshard()",
                      tensor.name(), shape_text(tensor.tensor.sizes()), tensor.numel));
    }
  }
}

std::string describe(const std::vector<ModelTensor>& tensors) {
  std::string text;
  for (const auto& tensor : tensors) {
    text += fmt::format("{} {} {} {}\n", fmt::join(tensor.names, " "), shape_text(tensor.sizes),
                        c10::toString(tensor.tensor.scalar_type()), tensor.is_replicated());
  }
  return text;
}

}  // namespace

Model open_model(torch::nn::Module& module, const BackendPtr& process_group,
                 std::string_view function) {
  auto tensors = list_tensors(module);
  const auto ranks = ranks_of(tensors, process_group, function);
  const auto digests = ranks.all_or_none([&] {
    check_tensors(tensors);
    return sha256_of(describe(tensors));
  });
  for (std::size_t i = 0; i < digests.size(); ++i) {
    if (digests[i] != digests.front()) {
      throw StateError(
          fmt::format("rank {}: {}: its model has other parameters or buffers (names, shapes, "
                      "dtypes) than that "
                      "of rank 0; wanted: the same model on every rank",
                      i, function));
    }
  }
  return {std::move(tensors), ranks};
}

at::Tensor gather_whole(const ModelTensor& tensor, const at::Tensor& piece) {
  if (tensor.is_replicated()) {
    return piece.detach().clone();
  }
  // A broadcast of each rank's piece where it belongs: pieces differ in size, and an all-gather
  // would need them padded to the largest.
  const auto options = piece.options().requires_grad(false);
  auto whole = at::empty({tensor.whole_numel()},
                         options.device(collective_device(tensor.group, piece.device())));
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (int rank = 0; rank < tensor.group->getSize(); ++rank) {
    const auto [begin, numel] = tensor.ranges[rank];
    auto part = whole.narrow(0, begin, numel);
    if (rank == tensor.group->getRank()) {
      part.copy_(piece.detach());
    }
    if (numel > 0 && tensor.group->getSize() > 1) {
      works.push_back(start_broadcast(tensor.group, part, rank));
    }
  }
  for (const auto& work : works) {
    work->wait();
  }
  return whole.view(tensor.sizes).to(piece.device());
}

std::string shape_text(at::IntArrayRef sizes) {
  return fmt::format("[{}]", fmt::join(sizes, ", "));
}

std::string names_text(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 5;
  std::string text;
  for (std::size_t i = 0; i < names.size() && i < kShown; ++i) {
    text += fmt::format("{}'{}'", i == 0 ? "" : i + 1 == names.size() ? " and " : ", ", names[i]);
  }
  if (names.size() > kShown) {
    text += fmt::format(" and {} more", names.size() - kShown);
  }
  return text;
}

}  // namespace fsdp
