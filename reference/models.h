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
#include <vector>

#include "reference/scenario.h"

namespace shardproof {

/// What both models have in common: inputs to outputs, a loss, and the layers that sharding may
/// make units of.
class ModelImpl : public torch::nn::Module, public fsdp::HookableModule {
 public:
  /// mlp: [batch, sizes.front()] floating -> [batch, sizes.back()].
  /// transformer: [batch, context] int64 -> [batch, context, vocabulary].
  virtual torch::Tensor forward(const torch::Tensor& input) = 0;
  /// Mean over all elements (mlp: squared error) or all tokens (transformer: cross entropy).
  virtual torch::Tensor loss(const torch::Tensor& output, const torch::Tensor& target) const = 0;

  struct Layer {
    std::string name;                           // as in named_modules(), for example "blocks.0"
    std::shared_ptr<torch::nn::Module> module;  // has hooks (fsdp::HookableModule)
  };
  /// In execution order.
  virtual std::vector<Layer> layers() const = 0;
};
FSDP_MODULE(Model);

/// Builds the model of a validated scenario, in its dtype, with uninitialised weights.
Model make_model(const Scenario& scenario);

/// The weights that training starts from, by name, in the scenario's dtype. Depends on the model,
/// dtype and seed only. Drawn in parameter order from one CPU generator seeded with the scenario's
/// seed, as normal numbers in float64, and then cast, so that float32 and float64 runs start alike:
/// linear weights with deviation 1/sqrt(inputs), embeddings 0.02, biases 0.02, LayerNorm weights 1
/// + 0.02 n. Nothing starts at exactly 0 or 1, because a gradient that is wrong only for other
/// values would not show.
std::map<std::string, torch::Tensor> initial_parameters(const Scenario& scenario);

/// Copies values into the model's parameters in place. Throws ScenarioError if names, shapes or
/// dtypes differ, or a value is not finite, naming it.
void load_parameters(torch::nn::Module& model, const std::map<std::string, torch::Tensor>& values);

/// Calls `record(name, output)` with the output of each layer ("blocks.0") and of the whole model
/// ("model"), each time it runs in grad mode. The hooks stay for the life of the model.
void record_outputs(Model& model,
                    std::function<void(const std::string&, const torch::Tensor&)> record);

}  // namespace shardproof
