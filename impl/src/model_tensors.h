#pragma once
// The parameters and buffers of a model as saving and loading see them: names, whole shapes, and
// which elements this rank holds. What is known of the sharding comes from shard_placements.

#include <torch/nn/module.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ranks.h"

namespace fsdp {

struct ModelTensor {
  std::vector<std::string> names;  // the first is the one it is saved under
  std::vector<std::int64_t> sizes;
  std::int64_t begin = 0;  // the elements that this rank holds
  std::int64_t numel = 0;
  at::Tensor tensor;       // the parameter or buffer itself
  BackendPtr group;        // the ranks that share it; null: every rank has all of it
  bool is_primary = true;  // of the ranks that hold the same elements, this one saves them
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges;  // (begin, numel) by rank of the group

  const std::string& name() const { return names.front(); }
  bool is_replicated() const { return group == nullptr; }
  std::int64_t whole_numel() const { return c10::multiply_integers(sizes); }
};

struct Model {
  std::vector<ModelTensor> tensors;
  Ranks ranks;
};

/// Finds the ranks that hold the model (`process_group`, or else the one group that its parameters
/// are sharded over), and makes sure that they hold the same model and hold it sharded. `function`
/// is for messages.
Model open_model(torch::nn::Module& module, const BackendPtr& process_group,
                 std::string_view function);

/// [sizes]: the whole of what every rank holds a piece of. A collective of the tensor's group, on
/// the piece's device; a copy where every rank has all of it.
at::Tensor gather_whole(const ModelTensor& tensor, const at::Tensor& piece);

/// "[2, 3]"
std::string shape_text(at::IntArrayRef sizes);
/// "'a', 'b' and 3 more"
std::string names_text(const std::vector<std::string>& names);

}  // namespace fsdp
