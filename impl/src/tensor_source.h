#pragma once
// Where whole tensors are loaded from, by ranges: a dictionary, rank 0's dictionary, a safetensors
// file, a checkpoint (checkpoint.cpp). Loading a model from any of them.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "fsdp/safetensors.h"
#include "fsdp/state.h"
#include "model_tensors.h"

namespace fsdp {

struct TensorInfo {
  at::ScalarType dtype{};
  std::vector<std::int64_t> shape;
};

class TensorSource {
 public:
  TensorSource() = default;
  TensorSource(const TensorSource&) = delete;
  TensorSource& operator=(const TensorSource&) = delete;
  virtual ~TensorSource() = default;
  const std::map<std::string, TensorInfo>& tensors() const { return tensors_; }
  const TensorInfo* find(const std::string& name) const;
  /// For messages: "the state", a path.
  const std::string& origin() const { return origin_; }
  /// [numel]: elements of the flattened tensor, on any device. May be a collective, so every rank
  /// must ask for the same tensors in the same order, also where it needs no element.
  virtual at::Tensor read(const std::string& name, std::int64_t begin, std::int64_t numel) = 0;

 protected:
  std::string origin_;
  std::map<std::string, TensorInfo> tensors_;
};

class DictSource : public TensorSource {
 public:
  /// Keeps a reference to the dictionary. Throws StateError if a tensor is undefined or sparse.
  DictSource(const StateDict& state, std::string origin);
  at::Tensor read(const std::string& name, std::int64_t begin, std::int64_t numel) override;

 private:
  const StateDict& state_;
};

class BroadcastSource : public TensorSource {
 public:
  /// `state` is looked at on rank 0 only. A collective.
  BroadcastSource(const StateDict& state, std::string origin, const Ranks& ranks);
  at::Tensor read(const std::string& name, std::int64_t begin, std::int64_t numel) override;

 private:
  const StateDict& state_;
  const Ranks& ranks_;
};

class FileSource : public TensorSource {
 public:
  explicit FileSource(const std::filesystem::path& path);
  at::Tensor read(const std::string& name, std::int64_t begin, std::int64_t numel) override;

 private:
  SafetensorsReader reader_;
};

/// For each tensor of the model, the names under which the source has it. Throws StateError if
/// shapes or dtypes differ, or, if strict, if the source lacks one or has one too many.
using ModelPlan = std::vector<std::vector<std::string>>;
ModelPlan plan_model(const std::vector<ModelTensor>& tensors, const TensorSource& source,
                     bool strict);
/// This rank's elements of each; undefined where the source has none. Throws StateError if the
/// source has a shared tensor under two names with different values.
std::vector<at::Tensor> read_model(const std::vector<ModelTensor>& tensors, const ModelPlan& plan,
                                   TensorSource& source);
void write_model(const std::vector<ModelTensor>& tensors, const std::vector<at::Tensor>& pieces);

}  // namespace fsdp
