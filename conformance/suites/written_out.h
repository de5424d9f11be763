#pragma once
// The models, losses and optimizers of reference/README.md once more, as functions of their
// weights, and what tests compare tensors with.

#include <gtest/gtest.h>

#include <torch/torch.h>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "reference/data.h"
#include "reference/scenario.h"
#include "reference/trace.h"

namespace shardproof::written_out {

using torch::Tensor;
using Tensors = std::map<std::string, Tensor>;

/// The message of the error that `act` throws.
template <typename Error>
inline std::string message_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

inline bool same_bits(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         std::memcmp(a.contiguous().const_data_ptr(), b.contiguous().const_data_ptr(),
                     a.nbytes()) == 0;
}

inline testing::AssertionResult equal_to_the_bit(const Tensor& got, const Tensor& want) {
  if (same_bits(got, want)) {
    return testing::AssertionSuccess();
  }
  if (got.sizes() != want.sizes() || got.scalar_type() != want.scalar_type()) {
    return testing::AssertionFailure() << "shapes or dtypes differ: " << got.toString()
                                       << got.sizes() << ", " << want.toString() << want.sizes();
  }
  return testing::AssertionFailure() << got.ne(want).sum().item<std::int64_t>() << " of "
                                     << got.numel() << " elements differ, by at most "
                                     << (got - want).abs().max().to(torch::kFloat64).item<double>();
}

/// |a - b| / |b| in the 2-norm.
inline double relative_distance(const Tensor& a, const Tensor& b) {
  const auto wide = b.to(torch::kFloat64);
  return ((a.to(torch::kFloat64) - wide).norm() / wide.norm()).item<double>();
}

inline Scenario small_transformer() {
  Scenario scenario;
  scenario.model.layers = 2;
  scenario.model.width = 16;
  scenario.model.heads = 4;
  scenario.model.context = 8;
  scenario.model.vocabulary = 32;
  scenario.data.kind = "synthetic";
  scenario.world_size = 3;
  // Not a power of two, so that it shows where a division stands.
  scenario.micro_batches = 3;
  scenario.batch = 2;
  scenario.max_norm = 0.5;
  scenario.steps = 3;
  scenario.seed = 11;
  return scenario;
}

inline Scenario small_mlp() {
  Scenario scenario;
  scenario.model.kind = "mlp";
  scenario.model.sizes = {6, 10, 4};
  scenario.data.kind = "synthetic";
  scenario.world_size = 3;
  scenario.micro_batches = 2;
  scenario.batch = 4;
  scenario.seed = 5;
  return scenario;
}

inline const Tensor& value_of(const StepTrace& trace, Quantity quantity, const std::string& name) {
  const auto* found = trace.find(quantity, name);
  if (found == nullptr) {
    throw std::runtime_error(std::string(to_string(quantity)) + " \"" + name +
                             "\" is not in the trace");
  }
  return found->pieces.at(0).values;
}

// The models once more, written as functions of their weights.

using Dropout = std::function<Tensor(const Tensor&)>;

inline Tensor no_dropout(const Tensor& x) {
  return x;
}

inline Tensor linear(const Tensors& weights, const std::string& name, const Tensor& x) {
  const auto bias = weights.find(name + ".bias");
  return torch::linear(x, weights.at(name + ".weight"),
                       bias == weights.end() ? Tensor() : bias->second);
}

/// In the dtype of its weight.
inline Tensor norm(const Tensors& weights, const std::string& name, const Tensor& x) {
  const auto& weight = weights.at(name + ".weight");
  return torch::layer_norm(x.to(weight.scalar_type()), {x.size(-1)}, weight,
                           weights.at(name + ".bias"), 1e-5)
      .to(x.scalar_type());
}

inline Tensor attention(const Tensors& weights, const std::string& name, const ModelSpec& spec,
                        const Tensor& x, const Dropout& dropout) {
  const auto batch = x.size(0);
  const auto time = x.size(1);
  const auto head = spec.width / spec.heads;
  const auto by_head = [&](const Tensor& part) {
    return part.view({batch, time, spec.heads, head}).transpose(1, 2);
  };
  const auto qkv = linear(weights, name + ".qkv", x).chunk(3, -1);
  auto scores = torch::matmul(by_head(qkv[0]), by_head(qkv[1]).transpose(-2, -1)) *
                (1.0 / std::sqrt(static_cast<double>(head)));
  const auto mask = torch::ones({time, time}, torch::kBool).triu(1);
  scores = scores.masked_fill(mask, -std::numeric_limits<float>::infinity());
  const auto mixed = torch::matmul(dropout(torch::softmax(scores, -1)), by_head(qkv[2]));
  return linear(weights, name + ".output",
                mixed.transpose(1, 2).reshape({batch, time, spec.width}));
}

inline Tensor transformer(const Tensors& weights, const ModelSpec& spec, const Tensor& ids,
                          const Dropout& dropout) {
  const auto positions = torch::arange(ids.size(1));
  auto x = dropout(torch::embedding(weights.at("token_embedding.weight"), ids) +
                   torch::embedding(weights.at("position_embedding.weight"), positions));
  for (std::int64_t i = 0; i < spec.layers; ++i) {
    const auto block = "blocks." + std::to_string(i) + ".";
    x = x + dropout(attention(weights, block + "attention", spec, norm(weights, block + "norm1", x),
                              dropout));
    const auto hidden =
        torch::gelu(linear(weights, block + "mlp.up", norm(weights, block + "norm2", x)));
    x = x + dropout(linear(weights, block + "mlp.down", hidden));
  }
  return linear(weights, "head", norm(weights, "norm", x));
}

inline Tensor mlp(const Tensors& weights, const ModelSpec& spec, const Tensor& input,
                  const Dropout& dropout) {
  auto x = input;
  for (std::size_t i = 0; i + 1 < spec.sizes.size(); ++i) {
    x = linear(weights, "layers." + std::to_string(i) + ".linear", x);
    if (i + 2 < spec.sizes.size()) {
      x = dropout(torch::gelu(x));
    }
  }
  return x;
}

inline Tensor loss_of(const Tensors& weights, const Scenario& scenario, const Batch& batch,
                      const Dropout& dropout = no_dropout) {
  if (scenario.model.kind == "mlp") {
    return torch::mse_loss(mlp(weights, scenario.model, batch.input, dropout), batch.target);
  }
  const auto output = transformer(weights, scenario.model, batch.input, dropout);
  return torch::nn::functional::cross_entropy(output.view({-1, scenario.model.vocabulary}),
                                              batch.target.view(-1));
}

inline Tensors leaves(const Tensors& values) {
  Tensors result;
  for (const auto& [name, value] : values) {
    result[name] = value.detach().clone().requires_grad_();
  }
  return result;
}

/// The optimizers as reference/README.md writes them, one parameter at a time.
class WrittenOut {
 public:
  explicit WrittenOut(OptimizerSpec spec) : spec_(std::move(spec)) {}

  void step(int t, Tensor& p, Tensor g, Tensors& state) const {
    if (spec_.kind == "adamw") {
      adamw(t, p, g, state);
    } else {
      sgd(p, std::move(g), state);
    }
  }

 private:
  /// As libtorch's mul_(Scalar): the factor is rounded to the dtype first.
  static Tensor scaled(const Tensor& tensor, double factor) {
    return tensor.mul(torch::full({}, factor, tensor.options()));
  }
  void sgd(Tensor& p, Tensor g, Tensors& state) const {
    if (spec_.weight_decay != 0) {
      g = g.add(p, spec_.weight_decay);
    }
    if (spec_.momentum != 0) {
      auto& buffer = state["momentum_buffer"];
      buffer = buffer.defined() ? scaled(buffer, spec_.momentum).add(g) : g.clone();
      g = buffer;
    }
    p = p.add(g, -spec_.lr);
  }
  void adamw(int t, Tensor& p, const Tensor& g, Tensors& state) const {
    if (t == 1) {
      state["exp_avg"] = torch::zeros_like(p);
      state["exp_avg_sq"] = torch::zeros_like(p);
    }
    if (spec_.weight_decay != 0) {
      p = scaled(p, 1 - spec_.lr * spec_.weight_decay);
    }
    state["exp_avg"] = scaled(state["exp_avg"], spec_.beta1).add(g, 1 - spec_.beta1);
    state["exp_avg_sq"] = scaled(state["exp_avg_sq"], spec_.beta2).addcmul(g, g, 1 - spec_.beta2);
    const auto denominator =
        (state["exp_avg_sq"].sqrt() / std::sqrt(1 - std::pow(spec_.beta2, t))).add(spec_.eps);
    p = p.addcdiv(state["exp_avg"], denominator, -spec_.lr / (1 - std::pow(spec_.beta1, t)));
  }

  OptimizerSpec spec_;
};

}  // namespace shardproof::written_out
