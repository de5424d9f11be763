#pragma once
// The models that scenarios train, the weights they start from, and the loss. They are plain
// libtorch modules, but for the hooks header: the same classes are trained by the reference and by
// the subject.

#include <fsdp/module.h>
#include <fsdp/random.h>

#include <torch/torch.h>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "reference/scenario.h"

namespace shardproof {

using NamedTensors = std::vector<std::pair<std::string, torch::Tensor>>;

/// What the models have in common: inputs to outputs, a loss, and the layers that sharding may
/// make units of.
class ModelImpl : public torch::nn::Module, public fsdp::HookableModule {
 public:
  /// mlp: [batch, sizes.front()] floating -> [batch, sizes.back()]. quirks: [batch, quirk_width]
  /// floating -> the same.
  /// transformer: [batch, context] int64 -> [batch, context, vocabulary].
  virtual torch::Tensor forward(const torch::Tensor& input) = 0;
  /// Mean over all elements (mlp, quirks: squared error) or all tokens (transformer: cross
  /// entropy). A floating target is cast to the output's dtype.
  virtual torch::Tensor loss(const torch::Tensor& output, const torch::Tensor& target) const = 0;

  /// Runs the model on an input: through its hooks, with whatever casts belong to the run.
  using Call = std::function<torch::Tensor(const torch::Tensor& input)>;
  /// The loss of one micro-batch. Training calls the model through this, because one loss may take
  /// several forwards.
  virtual torch::Tensor training_loss(const Call& call, const torch::Tensor& input,
                                      const torch::Tensor& target) const {
    return loss(call(input), target);
  }
  /// How often training_loss runs the model.
  virtual int forwards_per_loss() const { return 1; }

  /// Runs some of the layers, one after another, on an input; named after the first and the last.
  using RunSegment = std::function<torch::Tensor(const std::string& name, const Call& layers,
                                                 const torch::Tensor& input)>;
  /// From now on forward calls `run` with so many layers at a time, for whoever wants to treat them
  /// as one. Only the transformer can: the others throw std::logic_error.
  virtual void run_in_segments(std::int64_t layers_per_segment, RunSegment run);

  struct Layer {
    std::string name;                           // as in named_modules(), for example "blocks.0"
    std::shared_ptr<torch::nn::Module> module;  // has hooks (fsdp::HookableModule)
  };
  /// In execution order; a layer that never runs comes last.
  virtual std::vector<Layer> layers() const = 0;
};
FSDP_MODULE(Model);

/// LayerNorm over the last dimension, eps 1e-5, in the dtype of its weight: the input is cast to it
/// and the output back, so that it may be kept in another dtype than the rest.
class NormImpl : public torch::nn::LayerNormImpl, public fsdp::HookableModule {
 public:
  explicit NormImpl(std::int64_t width);
  torch::Tensor forward(const torch::Tensor& input);
};
FSDP_MODULE(Norm);

/// "float32", "float64", "bfloat16", "float16". Throws std::invalid_argument for another name.
torch::Dtype dtype_named(const std::string& name);

/// The module's parameters in the order of named_parameters, a tied one once, under its first name.
/// (libtorch's own lists in C++ have it under each.)
NamedTensors parameters_of(const torch::nn::Module& module);

/// Builds the model of a validated scenario, with uninitialised weights, parameters and
/// floating-point buffers in the scenario's dtype. Frozen parameters have requires_grad false.
Model make_model(const Scenario& scenario);

/// The weights that training starts from, by name, in the scenario's dtype. Depends on the model,
/// dtype and seed only. Drawn in parameter order from one CPU generator seeded with the scenario's
/// seed, as normal numbers in float64, and then cast, so that float32 and float64 runs start alike:
/// linear weights with deviation 1/sqrt(inputs), embeddings 0.02, biases 0.02, LayerNorm weights
/// and gains 1 + 0.02 n. A tied parameter is drawn once, as what its first name says. Nothing
/// starts at exactly 0 or 1, because a gradient that is wrong only for other values would not show.
std::map<std::string, torch::Tensor> initial_parameters(const Scenario& scenario);

/// Copies values into the model's parameters in place, by the names of parameters_of. Throws
/// ScenarioError if names, shapes or dtypes differ, or a value is not finite, naming it.
void load_parameters(torch::nn::Module& model, const std::map<std::string, torch::Tensor>& values);

/// Calls `record(name, output)` with the output of each layer ("blocks.0") and of the whole model
/// ("model"), each time it runs in grad mode, but for second runs of a checkpointed region; of
/// several outputs, the first. A layer that a forward runs again is named "layers.0+1", the second
/// forward of a loss "layers.0#2", both "layers.0#2+1". The hooks stay for the life of the model.
/// Hooks that are added later see an output before this one does.
void record_outputs(Model& model,
                    std::function<void(const std::string&, const torch::Tensor&)> record);

}  // namespace shardproof
