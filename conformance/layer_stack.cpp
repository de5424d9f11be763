#include "conformance/layer_stack.h"

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <fsdp/activation_checkpoint.h>

#include <cmath>

namespace shardproof {

using torch::Tensor;

namespace {

int segments_of(int layers) {
  return static_cast<int>(std::ceil(std::sqrt(static_cast<double>(layers))));
}

/// One product and the bias in it, for any number of dimensions (torch::nn::Linear adds the bias to
/// inputs of three dimensions afterwards).
Tensor product(const torch::nn::Linear& linear, const Tensor& input) {
  return at::linear(input, linear->weight, linear->bias);
}

torch::nn::LayerNorm make_norm(std::int64_t width) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}));
}

}  // namespace

std::string CheckpointPolicy::name() const {
  const std::string rest = keeps_random_state ? ", with random state" : "";
  if (segments) {
    return "sqrt segments" + rest;
  }
  if (every == 0) {
    return "none";
  }
  return (every == 1 ? "every layer"
                     : fmt::format("every {}{} layer", every, every == 2 ? "nd" : "th")) +
         rest;
}

std::vector<int> CheckpointPolicy::regions(int layers) const {
  if (!segments) {
    return std::vector<int>(every == 0 ? 0 : (layers + every - 1) / every, 1);
  }
  std::vector<int> sizes;
  const int count = segments_of(layers);
  for (int left = layers, i = 0; i < count - 1; ++i) {
    sizes.push_back(left / (count - i));
    left -= sizes.back();
  }
  return sizes;
}

fsdp::RecomputationOptions CheckpointPolicy::options() const {
  fsdp::RecomputationOptions options;
  options.early_stop = early_stop;
  options.preserve_rng_state = keeps_random_state;
  return options;
}

std::vector<CheckpointPolicy> checkpoint_policies() {
  return {{.every = 0}, {.every = 1}, {.every = 2}, {.every = 4}, {.segments = true}};
}

StackBlockImpl::StackBlockImpl(const StackSpec& spec)
    : norm1_(register_module("norm1", make_norm(spec.width))),
      qkv_(register_module("qkv", torch::nn::Linear(spec.width, 3 * spec.width))),
      output_(register_module("output", torch::nn::Linear(spec.width, spec.width))),
      norm2_(register_module("norm2", make_norm(spec.width))),
      up_(register_module("up", torch::nn::Linear(spec.width, 4 * spec.width))),
      down_(register_module("down", torch::nn::Linear(4 * spec.width, spec.width))),
      heads_(spec.heads) {}

Tensor StackBlockImpl::attention(const Tensor& input) const {
  const auto batch = input.size(0);
  const auto time = input.size(1);
  const auto width = input.size(2);
  auto parts = product(qkv_, input).chunk(3, -1);
  for (auto& part : parts) {
    part = part.view({batch, time, heads_, width / heads_}).transpose(1, 2);
  }
  const double scale = 1 / std::sqrt(static_cast<double>(width) / static_cast<double>(heads_));
  const auto weights = (torch::matmul(parts[0], parts[1].transpose(-2, -1)) * scale).softmax(-1);
  const auto mixed = torch::matmul(weights, parts[2]).transpose(1, 2);
  return product(output_, mixed.reshape({batch, time, width}));
}

Tensor StackBlockImpl::forward(const Tensor& input) {
  const auto x = input + attention(norm1_(input));
  return x + product(down_, torch::gelu(product(up_, norm2_(x))));
}

LayerStackImpl::LayerStackImpl(const StackSpec& spec, const CheckpointPolicy& policy,
                               std::uint64_t seed)
    : policy_(policy),
      embedding_(register_module("embedding", torch::nn::Embedding(spec.vocabulary, spec.width))),
      head_(register_module(
          "head",
          torch::nn::Linear(torch::nn::LinearOptions(spec.width, spec.vocabulary).bias(false)))) {
  for (int i = 0; i < spec.layers; ++i) {
    blocks_.push_back(register_module(fmt::format("block{}", i), StackBlock(spec)));
  }
  const torch::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  for (auto& parameter : parameters()) {
    parameter.normal_(0, 0.05, generator);
  }
  if (policy.every > 0) {
    fsdp::apply_activation_checkpointing(
        *this,
        fsdp::every(policy.every,
                    [](const torch::nn::Module& module) {
                      return dynamic_cast<const StackBlockImpl*>(&module) != nullptr;
                    }),
        policy.options());
  }
}

Tensor LayerStackImpl::forward(const Tensor& tokens) {
  auto x = embedding_(tokens);
  if (policy_.segments) {
    std::vector<fsdp::LayerFunction> layers;
    for (const auto& block : blocks_) {
      layers.emplace_back(
          [block = StackBlock(block)](const Tensor& input) mutable { return block(input); });
    }
    x = fsdp::checkpoint_sequential(
        layers, static_cast<std::size_t>(segments_of(static_cast<int>(blocks_.size()))), x,
        policy_.options());
  } else {
    for (auto& block : blocks_) {
      x = block(x);
    }
  }
  const auto scores = product(head_, x);
  return torch::cross_entropy_loss(scores.view({-1, scores.size(-1)}), tokens.view(-1));
}

Tensor stack_tokens(const StackSpec& spec, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return torch::randint(spec.vocabulary, {spec.batch, spec.time}, generator, torch::kLong);
}

StackOperations stack_operations(const StackSpec& spec) {
  const auto n = spec.tokens();
  const auto c = spec.width;
  return {.block = 24 * n * c * c + 4 * n * spec.time * c,
          .down = 8 * n * c * c,
          .head = 2 * n * c * spec.vocabulary};
}

StackBytes stack_bytes(const StackSpec& spec) {
  const auto input = 4 * spec.tokens() * spec.width;
  return {.input = input,
          .block = 16 * input + 4 * spec.batch * spec.heads * spec.time * spec.time +
                   16 * spec.tokens()};
}

}  // namespace shardproof
