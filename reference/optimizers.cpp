#include "reference/optimizers.h"

#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

namespace shardproof {
namespace {

using torch::Tensor;

std::vector<Tensor> values_of(const NamedTensors& named) {
  std::vector<Tensor> values;
  for (const auto& [name, value] : named) {
    values.push_back(value);
  }
  return values;
}

class ReferenceAdamW : public ReferenceOptimizer {
 public:
  ReferenceAdamW(const OptimizerSpec& spec, NamedTensors parameters)
      : parameters_(std::move(parameters)), optimizer_(values_of(parameters_), options(spec)) {}

  void step() override { optimizer_.step(); }

  NamedTensors state() const override {
    NamedTensors result;
    for (const auto& [name, parameter] : parameters_) {
      const auto held = optimizer_.state().find(parameter.unsafeGetTensorImpl());
      if (held == optimizer_.state().end()) {
        continue;
      }
      const auto& moments = static_cast<const torch::optim::AdamWParamState&>(*held->second);
      result.emplace_back("exp_avg/" + name, moments.exp_avg());
      result.emplace_back("exp_avg_sq/" + name, moments.exp_avg_sq());
    }
    return result;
  }

  void set_state(std::int64_t steps_done, const Find& find) override {
    optimizer_.state().clear();
    if (steps_done == 0) {
      return;
    }
    for (const auto& [name, parameter] : parameters_) {
      auto moments = std::make_unique<torch::optim::AdamWParamState>();
      moments->step(steps_done);
      moments->exp_avg(find("exp_avg/" + name, parameter));
      moments->exp_avg_sq(find("exp_avg_sq/" + name, parameter));
      if (!moments->exp_avg().defined()) {
        continue;
      }
      optimizer_.state()[parameter.unsafeGetTensorImpl()] = std::move(moments);
    }
  }

 private:
  static torch::optim::AdamWOptions options(const OptimizerSpec& spec) {
    return torch::optim::AdamWOptions(spec.lr)
        .betas({spec.beta1, spec.beta2})
        .eps(spec.eps)
        .weight_decay(spec.weight_decay);
  }

  NamedTensors parameters_;
  torch::optim::AdamW optimizer_;
};

class ReferenceSgd : public ReferenceOptimizer {
 public:
  ReferenceSgd(const OptimizerSpec& spec, NamedTensors parameters)
      : parameters_(std::move(parameters)),
        optimizer_(values_of(parameters_), torch::optim::SGDOptions(spec.lr)
                                               .momentum(spec.momentum)
                                               .weight_decay(spec.weight_decay)),
        has_momentum_(spec.momentum != 0) {}

  void step() override { optimizer_.step(); }

  NamedTensors state() const override {
    NamedTensors result;
    for (const auto& [name, parameter] : parameters_) {
      const auto held = optimizer_.state().find(parameter.unsafeGetTensorImpl());
      if (has_momentum_ && held != optimizer_.state().end()) {
        result.emplace_back(
            "momentum_buffer/" + name,
            static_cast<const torch::optim::SGDParamState&>(*held->second).momentum_buffer());
      }
    }
    return result;
  }

  void set_state(std::int64_t steps_done, const Find& find) override {
    optimizer_.state().clear();
    if (steps_done == 0 || !has_momentum_) {
      return;
    }
    for (const auto& [name, parameter] : parameters_) {
      auto buffer = std::make_unique<torch::optim::SGDParamState>();
      buffer->momentum_buffer(find("momentum_buffer/" + name, parameter));
      if (!buffer->momentum_buffer().defined()) {
        continue;
      }
      optimizer_.state()[parameter.unsafeGetTensorImpl()] = std::move(buffer);
    }
  }

 private:
  NamedTensors parameters_;
  torch::optim::SGD optimizer_;
  bool has_momentum_;
};

}  // namespace

std::unique_ptr<ReferenceOptimizer> make_reference_optimizer(const OptimizerSpec& spec,
                                                             NamedTensors parameters) {
  if (spec.kind == "sgd") {
    return std::make_unique<ReferenceSgd>(spec, std::move(parameters));
  }
  return std::make_unique<ReferenceAdamW>(spec, std::move(parameters));
}

}  // namespace shardproof
