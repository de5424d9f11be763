#include "reference/models.h"

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <limits>
#include <utility>

namespace shardproof {
namespace {

torch::Dtype dtype_of(const Scenario& scenario) {
  return scenario.dtype == "float64" ? torch::kFloat64 : torch::kFloat32;
}

/// A linear layer as PyTorch's torch.nn.Linear computes it. torch::nn::Linear adds the bias after
/// the product for inputs of three and more dimensions, which rounds otherwise.
class LinearImpl : public torch::nn::LinearImpl {
 public:
  using torch::nn::LinearImpl::LinearImpl;

  torch::Tensor forward(const torch::Tensor& input) { return at::linear(input, weight, bias); }
};
TORCH_MODULE(Linear);

// ---------------------------------------------------------------------------------------------
// Multi-layer perceptron

/// A linear layer; all but the last one of a model go through GELU and dropout.
class MlpLayerImpl : public fsdp::Module<MlpLayerImpl> {
 public:
  MlpLayerImpl(std::int64_t inputs, std::int64_t outputs, bool is_last, double dropout)
      : linear_(register_module("linear", Linear(inputs, outputs))),
        dropout_(register_module("dropout", fsdp::Dropout(dropout))),
        is_last_(is_last) {}

  torch::Tensor forward(const torch::Tensor& input) {
    const auto output = linear_(input);
    return is_last_ ? output : dropout_(torch::gelu(output));
  }

 private:
  Linear linear_;
  fsdp::Dropout dropout_;
  bool is_last_;
};
FSDP_MODULE(MlpLayer);

class MlpImpl : public ModelImpl {
 public:
  explicit MlpImpl(const ModelSpec& spec) {
    const auto count = spec.sizes.size() - 1;
    const auto list = register_module("layers", torch::nn::ModuleList());
    for (std::size_t i = 0; i < count; ++i) {
      layers_.emplace_back(
          MlpLayer(spec.sizes[i], spec.sizes[i + 1], i + 1 == count, spec.dropout));
      list->push_back(layers_.back());
    }
  }

  torch::Tensor forward(const torch::Tensor& input) override {
    auto x = input;
    for (auto& layer : layers_) {
      x = layer(x);
    }
    return x;
  }

  torch::Tensor loss(const torch::Tensor& output, const torch::Tensor& target) const override {
    return torch::mse_loss(output, target);
  }

  std::vector<Layer> layers() const override {
    std::vector<Layer> result;
    for (const auto& layer : layers_) {
      result.push_back({fmt::format("layers.{}", result.size()), layer.ptr()});
    }
    return result;
  }

 private:
  std::vector<MlpLayer> layers_;
};

// ---------------------------------------------------------------------------------------------
// Transformer

class AttentionImpl : public fsdp::Module<AttentionImpl> {
 public:
  AttentionImpl(std::int64_t width, std::int64_t heads, double dropout)
      : qkv_(register_module("qkv", Linear(width, 3 * width))),
        output_(register_module("output", Linear(width, width))),
        dropout_(register_module("dropout", fsdp::Dropout(dropout))),
        heads_(heads) {}

  /// [batch, time, width] -> the same; position i sees positions 0 to i.
  torch::Tensor forward(const torch::Tensor& input) {
    const auto batch = input.size(0);
    const auto time = input.size(1);
    const auto width = input.size(2);
    const auto head_width = width / heads_;
    auto parts = qkv_(input).chunk(3, -1);
    for (auto& part : parts) {
      part = part.view({batch, time, heads_, head_width}).transpose(1, 2);
    }
    const double scale = 1 / std::sqrt(static_cast<double>(head_width));
    const auto scores = torch::matmul(parts[0], parts[1].transpose(-2, -1)) * scale;
    const auto later = torch::ones({time, time}, input.options().dtype(torch::kBool)).triu(1);
    const auto masked = scores.masked_fill(later, -std::numeric_limits<double>::infinity());
    const auto weights = dropout_(masked.softmax(-1));
    return output_(torch::matmul(weights, parts[2]).transpose(1, 2).reshape({batch, time, width}));
  }

 private:
  Linear qkv_;
  Linear output_;
  fsdp::Dropout dropout_;
  std::int64_t heads_;
};
FSDP_MODULE(Attention);

class FeedForwardImpl : public fsdp::Module<FeedForwardImpl> {
 public:
  explicit FeedForwardImpl(std::int64_t width)
      : up_(register_module("up", Linear(width, 4 * width))),
        down_(register_module("down", Linear(4 * width, width))) {}

  torch::Tensor forward(const torch::Tensor& input) { return down_(torch::gelu(up_(input))); }

 private:
  Linear up_;
  Linear down_;
};
FSDP_MODULE(FeedForward);

torch::nn::LayerNorm layer_norm(std::int64_t width) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}).eps(1e-5));
}

class BlockImpl : public fsdp::Module<BlockImpl> {
 public:
  explicit BlockImpl(const ModelSpec& spec)
      : norm1_(register_module("norm1", layer_norm(spec.width))),
        attention_(register_module("attention", Attention(spec.width, spec.heads, spec.dropout))),
        norm2_(register_module("norm2", layer_norm(spec.width))),
        mlp_(register_module("mlp", FeedForward(spec.width))),
        dropout_(register_module("dropout", fsdp::Dropout(spec.dropout))) {}

  torch::Tensor forward(const torch::Tensor& input) {
    const auto x = input + dropout_(attention_(norm1_(input)));
    return x + dropout_(mlp_(norm2_(x)));
  }

 private:
  torch::nn::LayerNorm norm1_;
  Attention attention_;
  torch::nn::LayerNorm norm2_;
  FeedForward mlp_;
  fsdp::Dropout dropout_;
};
FSDP_MODULE(Block);

class TransformerImpl : public ModelImpl {
 public:
  explicit TransformerImpl(const ModelSpec& spec)
      : token_embedding_(
            register_module("token_embedding", torch::nn::Embedding(spec.vocabulary, spec.width))),
        position_embedding_(
            register_module("position_embedding", torch::nn::Embedding(spec.context, spec.width))),
        dropout_(register_module("dropout", fsdp::Dropout(spec.dropout))) {
    const auto list = register_module("blocks", torch::nn::ModuleList());
    for (std::int64_t i = 0; i < spec.layers; ++i) {
      blocks_.emplace_back(Block(spec));
      list->push_back(blocks_.back());
    }
    norm_ = register_module("norm", layer_norm(spec.width));
    head_ = register_module(
        "head", Linear(torch::nn::LinearOptions(spec.width, spec.vocabulary).bias(false)));
  }

  torch::Tensor forward(const torch::Tensor& input) override {
    const auto positions = torch::arange(input.size(1), input.options());
    auto x = dropout_(token_embedding_(input) + position_embedding_(positions));
    for (auto& block : blocks_) {
      x = block(x);
    }
    return head_(norm_(x));
  }

  torch::Tensor loss(const torch::Tensor& output, const torch::Tensor& target) const override {
    return torch::cross_entropy_loss(output.view({-1, output.size(-1)}), target.view(-1));
  }

  std::vector<Layer> layers() const override {
    std::vector<Layer> result;
    for (const auto& block : blocks_) {
      result.push_back({fmt::format("blocks.{}", result.size()), block.ptr()});
    }
    return result;
  }

 private:
  torch::nn::Embedding token_embedding_;
  torch::nn::Embedding position_embedding_;
  fsdp::Dropout dropout_;
  std::vector<Block> blocks_;
  torch::nn::LayerNorm norm_{nullptr};
  Linear head_{nullptr};
};

}  // namespace

Model make_model(const Scenario& scenario) {
  std::shared_ptr<ModelImpl> model;
  if (scenario.model.kind == "mlp") {
    model = std::make_shared<MlpImpl>(scenario.model);
  } else {
    model = std::make_shared<TransformerImpl>(scenario.model);
  }
  model->to(dtype_of(scenario));
  return Model(std::move(model));
}

std::map<std::string, torch::Tensor> initial_parameters(const Scenario& scenario) {
  const auto model = make_model(scenario);
  auto generator = at::detail::createCPUGenerator(scenario.seed);
  const auto draw = [&generator](const torch::Tensor& like, double mean, double deviation) {
    return torch::empty(like.sizes(), torch::kFloat64).normal_(mean, deviation, generator);
  };

  std::map<std::string, torch::Tensor> values;
  for (const auto& item : model->named_modules()) {
    const auto* module = item.value().get();
    for (const auto& parameter : item.value()->named_parameters(/*recurse=*/false)) {
      const auto& like = parameter.value();
      double mean = 0;
      double deviation = 0.02;
      if (dynamic_cast<const torch::nn::LinearImpl*>(module) != nullptr && like.dim() == 2) {
        deviation = 1 / std::sqrt(static_cast<double>(like.size(1)));
      } else if (dynamic_cast<const torch::nn::LayerNormImpl*>(module) != nullptr &&
                 parameter.key() == "weight") {
        mean = 1;
      }
      values[item.key() + "." + parameter.key()] =
          draw(like, mean, deviation).to(dtype_of(scenario));
    }
  }
  return values;
}

void load_parameters(torch::nn::Module& model, const std::map<std::string, torch::Tensor>& values) {
  const auto parameters = model.named_parameters();
  for (const auto& [name, value] : values) {
    if (parameters.find(name) == nullptr) {
      throw ScenarioError(fmt::format("parameter \"{}\" is not one of the model, which has: {}",
                                      name, fmt::join(parameters.keys(), ", ")));
    }
  }
  // All of them are looked at before the first one is written, so that a refusal changes nothing.
  for (const auto& parameter : parameters) {
    const auto& name = parameter.key();
    const auto& own = parameter.value();
    const auto found = values.find(name);
    if (found == values.end() || !found->second.defined()) {
      throw ScenarioError(fmt::format("parameter \"{}\" has no value", name));
    }
    const auto& value = found->second;
    if (value.sizes() != own.sizes()) {
      throw ScenarioError(fmt::format("parameter \"{}\" has a value of shape [{}]; wanted: [{}]",
                                      name, fmt::join(value.sizes(), ", "),
                                      fmt::join(own.sizes(), ", ")));
    }
    if (value.scalar_type() != own.scalar_type()) {
      throw ScenarioError(fmt::format("parameter \"{}\" has a value of dtype {}; wanted: {}", name,
                                      c10::toString(value.scalar_type()),
                                      c10::toString(own.scalar_type())));
    }
    if (!value.isfinite().all().item<bool>()) {
      throw ScenarioError(fmt::format("parameter \"{}\" has {} values that are not finite", name,
                                      value.isfinite().logical_not().sum().item<std::int64_t>()));
    }
  }
  torch::NoGradGuard no_grad;
  for (const auto& parameter : parameters) {
    torch::Tensor own = parameter.value();
    own.copy_(values.at(parameter.key()));
  }
}

namespace {

class OutputRecorder : public fsdp::ForwardHook {
 public:
  using Record = std::function<void(const std::string&, const torch::Tensor&)>;
  OutputRecorder(std::string name, Record record)
      : name_(std::move(name)), record_(std::move(record)) {}

  void pre_forward(torch::nn::Module&, const std::vector<at::Tensor*>&) override {}
  void post_forward(torch::nn::Module&, const std::vector<at::Tensor*>& outputs) override {
    if (torch::GradMode::is_enabled()) {
      record_(name_, *outputs.front());
    }
  }

 private:
  std::string name_;
  Record record_;
};

}  // namespace

void record_outputs(Model& model,
                    std::function<void(const std::string&, const torch::Tensor&)> record) {
  for (const auto& layer : model->layers()) {
    auto& hookable = dynamic_cast<fsdp::HookableModule&>(*layer.module);
    hookable.add_forward_hook(std::make_shared<OutputRecorder>(layer.name, record));
  }
  model->add_forward_hook(std::make_shared<OutputRecorder>("model", std::move(record)));
}

}  // namespace shardproof
