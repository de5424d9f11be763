#include "reference/models.h"

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace shardproof {
namespace {

/// A linear layer as PyTorch's torch.nn.Linear computes it. torch::nn::Linear adds the bias after
/// the product for inputs of three and more dimensions, which rounds otherwise.
class LinearImpl : public torch::nn::LinearImpl {
 public:
  using torch::nn::LinearImpl::LinearImpl;

  /// The weight is made contiguous, so that a transposed one runs the same kernel.
  torch::Tensor forward(const torch::Tensor& input) {
    return at::linear(input, weight.contiguous(), bias);
  }

  /// Takes a parameter of the same shape for its weight: another module's, or a transposed one.
  void set_weight(const torch::Tensor& value) {
    weight = value;
    parameters_["weight"] = value;
  }
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
    return torch::mse_loss(output, target.to(output.scalar_type()));
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

class BlockImpl : public fsdp::Module<BlockImpl> {
 public:
  explicit BlockImpl(const ModelSpec& spec)
      : norm1_(register_module("norm1", Norm(spec.width))),
        attention_(register_module("attention", Attention(spec.width, spec.heads, spec.dropout))),
        norm2_(register_module("norm2", Norm(spec.width))),
        mlp_(register_module("mlp", FeedForward(spec.width))),
        dropout_(register_module("dropout", fsdp::Dropout(spec.dropout))) {}

  torch::Tensor forward(const torch::Tensor& input) {
    const auto x = input + dropout_(attention_(norm1_(input)));
    return x + dropout_(mlp_(norm2_(x)));
  }

 private:
  Norm norm1_;
  Attention attention_;
  Norm norm2_;
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
    norm_ = register_module("norm", Norm(spec.width));
    head_ = register_module(
        "head", Linear(torch::nn::LinearOptions(spec.width, spec.vocabulary).bias(false)));
    if (spec.tied) {
      head_->set_weight(token_embedding_->weight);
    }
  }

  torch::Tensor forward(const torch::Tensor& input) override {
    const auto positions = torch::arange(input.size(1), input.options());
    auto x = dropout_(token_embedding_(input) + position_embedding_(positions));
    for (std::size_t begin = 0; begin < blocks_.size(); begin += layers_per_segment_) {
      const auto end = std::min(blocks_.size(), begin + layers_per_segment_);
      x = run_segment_(
          fmt::format("blocks.{}-{}", begin, end - 1),
          [this, begin, end](torch::Tensor y) {
            for (auto i = begin; i < end; ++i) {
              y = blocks_[i](y);
            }
            return y;
          },
          x);
    }
    return head_(norm_(x));
  }

  void run_in_segments(std::int64_t layers_per_segment, RunSegment run) override {
    layers_per_segment_ = static_cast<std::size_t>(layers_per_segment);
    run_segment_ = std::move(run);
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
  std::size_t layers_per_segment_ = 1;
  RunSegment run_segment_ = [](const std::string&, const Call& layers, const torch::Tensor& input) {
    return layers(input);
  };
  Norm norm_{nullptr};
  Linear head_{nullptr};
};

// ---------------------------------------------------------------------------------------------
// Quirks: what sharding stumbles over, in layers of one width

/// The part of a layer that all quirks share; what forward returns is the layer's own matter.
template <typename Derived>
class QuirkLayer : public fsdp::Module<Derived> {
 public:
  QuirkLayer(const Scenario& scenario, bool is_last) : is_last_(is_last) {
    const auto width = scenario.model.quirk_width;
    if (has_quirk(scenario, "scalar")) {
      gain_ = this->register_parameter("gain", torch::empty({}));
    }
    linear_ = this->register_module("linear", Linear(width, width));
    if (has_quirk(scenario, "transposed")) {
      linear_->set_weight(torch::empty({width, width}).t().set_requires_grad(true));
    }
    if (has_quirk(scenario, "tied_inside")) {
      twin_ =
          this->register_module("twin", Linear(torch::nn::LinearOptions(width, width).bias(false)));
      twin_->set_weight(linear_->weight);
    }
    if (has_quirk(scenario, "unused")) {
      this->register_parameter("spare", torch::empty({3}));
    }
    if (has_quirk(scenario, "buffer")) {
      shift_ = this->register_buffer("shift", torch::arange(1, width + 1, torch::kFloat64) / 64);
    }
    linear_->bias.set_requires_grad(!has_quirk(scenario, "frozen_bias"));
  }

  /// Makes the weight that of another layer.
  void share_weight_of(const Linear& other) {
    linear_->set_weight(other->weight);
    if (twin_) {
      twin_->set_weight(other->weight);
    }
  }
  const Linear& linear() const { return linear_; }

 protected:
  torch::Tensor compute(const torch::Tensor& input) {
    auto y = linear_(input);
    if (twin_) {
      y = twin_(y);
    }
    if (shift_.defined()) {
      y = y + shift_.to(y.scalar_type());
    }
    if (!is_last_) {
      y = torch::gelu(y);
    }
    return gain_.defined() ? y * gain_ : y;
  }

 private:
  torch::Tensor gain_;
  Linear linear_{nullptr};
  Linear twin_{nullptr};
  torch::Tensor shift_;
  bool is_last_;
};

class PlainQuirkLayerImpl : public QuirkLayer<PlainQuirkLayerImpl> {
 public:
  using QuirkLayer::QuirkLayer;
  torch::Tensor forward(const torch::Tensor& input) { return compute(input); }
};
FSDP_MODULE(PlainQuirkLayer);

class TupleQuirkLayerImpl : public QuirkLayer<TupleQuirkLayerImpl> {
 public:
  using QuirkLayer::QuirkLayer;
  std::tuple<torch::Tensor, std::vector<torch::Tensor>> forward(const torch::Tensor& input) {
    return {compute(input), {input * 0.5}};
  }
};
FSDP_MODULE(TupleQuirkLayer);

torch::Tensor run_layer(PlainQuirkLayer& layer, const torch::Tensor& input) {
  return layer(input);
}

torch::Tensor run_layer(TupleQuirkLayer& layer, const torch::Tensor& input) {
  const auto [output, extra] = layer(input);
  return output + extra.front();
}

template <typename LayerHolder>
class QuirksImpl : public ModelImpl {
 public:
  explicit QuirksImpl(const Scenario& scenario)
      : twice_(has_quirk(scenario, "twice")), two_forwards_(has_quirk(scenario, "two_forwards")) {
    const auto depth = scenario.model.depth;
    const auto list = register_module("layers", torch::nn::ModuleList());
    for (std::int64_t i = 0; i < depth; ++i) {
      layers_.emplace_back(LayerHolder(scenario, i + 1 == depth));
      list->push_back(layers_.back());
    }
    if (has_quirk(scenario, "tied_across")) {
      layers_.back()->share_weight_of(layers_.front()->linear());
    }
    if (has_quirk(scenario, "unused")) {
      spare_layer_ = register_module("spare_layer", LayerHolder(scenario, /*is_last=*/false));
    }
    if (has_quirk(scenario, "frozen_layer")) {
      for (auto& parameter : layers_[1]->parameters()) {
        parameter.set_requires_grad(false);
      }
    }
    if (has_quirk(scenario, "buffer")) {
      calls_ = register_buffer("calls", torch::zeros({}, torch::kInt64));
    }
  }

  torch::Tensor forward(const torch::Tensor& input) override {
    if (calls_.defined()) {
      calls_.add_(1);
    }
    auto x = input;
    for (auto& layer : layers_) {
      x = run_layer(layer, x);
      if (twice_ && &layer != &layers_.back()) {
        x = run_layer(layer, x);
      }
    }
    return x;
  }

  torch::Tensor loss(const torch::Tensor& output, const torch::Tensor& target) const override {
    return torch::mse_loss(output, target.to(output.scalar_type()));
  }

  torch::Tensor training_loss(const Call& call, const torch::Tensor& input,
                              const torch::Tensor& target) const override {
    const auto first = loss(call(input), target);
    return two_forwards_ ? first + loss(call(input * 0.5), target) : first;
  }
  int forwards_per_loss() const override { return two_forwards_ ? 2 : 1; }

  std::vector<Layer> layers() const override {
    std::vector<Layer> result;
    for (const auto& layer : layers_) {
      result.push_back({fmt::format("layers.{}", result.size()), layer.ptr()});
    }
    if (spare_layer_) {
      result.push_back({"spare_layer", spare_layer_.ptr()});
    }
    return result;
  }

 private:
  std::vector<LayerHolder> layers_;
  LayerHolder spare_layer_{nullptr};
  torch::Tensor calls_;
  bool twice_;
  bool two_forwards_;
};

std::shared_ptr<ModelImpl> build(const Scenario& scenario) {
  if (scenario.model.kind == "mlp") {
    return std::make_shared<MlpImpl>(scenario.model);
  }
  if (scenario.model.kind == "transformer") {
    return std::make_shared<TransformerImpl>(scenario.model);
  }
  if (has_quirk(scenario, "tuple")) {
    return std::make_shared<QuirksImpl<TupleQuirkLayer>>(scenario);
  }
  return std::make_shared<QuirksImpl<PlainQuirkLayer>>(scenario);
}

/// Factors start near 1, sums near 0. `leaf` is the parameter's name within its module.
bool starts_near_one(const torch::nn::Module& module, const std::string& leaf) {
  return leaf == "gain" ||
         (leaf == "weight" && dynamic_cast<const torch::nn::LayerNormImpl*>(&module) != nullptr);
}

}  // namespace

void ModelImpl::run_in_segments(std::int64_t /*layers_per_segment*/, RunSegment /*run*/) {
  throw std::logic_error("run_in_segments: only the transformer runs in segments");
}

NormImpl::NormImpl(std::int64_t width)
    : torch::nn::LayerNormImpl(torch::nn::LayerNormOptions({width}).eps(1e-5)) {}

torch::Tensor NormImpl::forward(const torch::Tensor& input) {
  return torch::nn::LayerNormImpl::forward(input.to(weight.scalar_type())).to(input.scalar_type());
}

torch::Dtype dtype_named(const std::string& name) {
  if (name == "float32") {
    return torch::kFloat32;
  }
  if (name == "float64") {
    return torch::kFloat64;
  }
  if (name == "bfloat16") {
    return torch::kBFloat16;
  }
  if (name == "float16") {
    return torch::kFloat16;
  }
  throw std::invalid_argument(fmt::format(
      "dtype \"{}\"; wanted: one of \"float32\", \"float64\", \"bfloat16\", \"float16\"", name));
}

NamedTensors parameters_of(const torch::nn::Module& module) {
  NamedTensors parameters;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters()) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) {
      parameters.emplace_back(item.key(), item.value());
    }
  }
  return parameters;
}

Model make_model(const Scenario& scenario) {
  auto model = build(scenario);
  // Module::to would cast integer buffers too.
  const auto dtype = dtype_named(scenario.dtype);
  for (auto& [name, parameter] : parameters_of(*model)) {
    parameter.set_data(parameter.to(dtype));
  }
  for (auto& buffer : model->buffers()) {
    if (buffer.is_floating_point()) {
      buffer.set_data(buffer.to(dtype));
    }
  }
  return Model(std::move(model));
}

std::map<std::string, torch::Tensor> initial_parameters(const Scenario& scenario) {
  const auto model = make_model(scenario);
  auto generator = at::detail::createCPUGenerator(scenario.seed);
  const auto modules = model->named_modules();
  std::map<std::string, torch::Tensor> values;
  for (const auto& [name, like] : parameters_of(*model)) {
    const auto dot = name.rfind('.');
    const auto& module = *modules[name.substr(0, dot)];
    double mean = 0;
    double deviation = 0.02;
    if (dynamic_cast<const torch::nn::LinearImpl*>(&module) != nullptr && like.dim() == 2) {
      deviation = 1 / std::sqrt(static_cast<double>(like.size(1)));
    } else if (starts_near_one(module, name.substr(dot + 1))) {
      mean = 1;
    }
    values[name] = torch::empty(like.sizes(), torch::kFloat64)
                       .normal_(mean, deviation, generator)
                       .to(like.scalar_type());
  }
  return values;
}

void load_parameters(torch::nn::Module& model, const std::map<std::string, torch::Tensor>& values) {
  auto parameters = parameters_of(model);
  std::vector<std::string> names;
  for (const auto& [name, own] : parameters) {
    names.push_back(name);
  }
  for (const auto& [name, value] : values) {
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      throw ScenarioError(fmt::format("parameter \"{}\" is not one of the model, which has: {}",
                                      name, fmt::join(names, ", ")));
    }
  }
  // All of them are looked at before the first one is written, so that a refusal changes nothing.
  for (const auto& [name, own] : parameters) {
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
  for (auto& [name, own] : parameters) {
    own.copy_(values.at(name));
  }
}

namespace {

using Record = std::function<void(const std::string&, const torch::Tensor&)>;

/// Where a run is: the forward of a loss, and how often each layer ran in it.
struct Forward {
  explicit Forward(int per_loss) : count(per_loss), number(per_loss - 1) {}

  void begin() {
    number = (number + 1) % count;
    calls.clear();
  }
  /// The name of the output that comes now.
  std::string name_of(const std::string& module) {
    const int call = calls[module]++;
    return module + (number > 0 ? fmt::format("#{}", number + 1) : "") +
           (call > 0 ? fmt::format("+{}", call) : "");
  }

  int count;
  int number;
  std::map<std::string, int> calls;
};

class OutputRecorder : public fsdp::ForwardHook {
 public:
  OutputRecorder(std::string name, bool is_model, std::shared_ptr<Forward> forward, Record record)
      : name_(std::move(name)),
        is_model_(is_model),
        forward_(std::move(forward)),
        record_(std::move(record)) {}

  void pre_forward(torch::nn::Module&, const std::vector<at::Tensor*>&) override {
    if (is_model_ && is_recorded()) {
      forward_->begin();
    }
  }
  void post_forward(torch::nn::Module&, const std::vector<at::Tensor*>& outputs) override {
    if (is_recorded()) {
      record_(forward_->name_of(name_), *outputs.front());
    }
  }

 private:
  static bool is_recorded() { return torch::GradMode::is_enabled() && !fsdp::is_recomputing(); }

  std::string name_;
  bool is_model_;
  std::shared_ptr<Forward> forward_;
  Record record_;
};

}  // namespace

void record_outputs(Model& model, Record record) {
  const auto forward = std::make_shared<Forward>(model->forwards_per_loss());
  for (const auto& layer : model->layers()) {
    auto& hookable = dynamic_cast<fsdp::HookableModule&>(*layer.module);
    hookable.add_forward_hook(
        std::make_shared<OutputRecorder>(layer.name, /*is_model=*/false, forward, record));
  }
  model->add_forward_hook(
      std::make_shared<OutputRecorder>("model", /*is_model=*/true, forward, std::move(record)));
}

}  // namespace shardproof
