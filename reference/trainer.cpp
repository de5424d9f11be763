#include "reference/trainer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "reference/optimizers.h"

namespace shardproof {
namespace {

using torch::Tensor;

Tensor copied(const Tensor& tensor) {
  return tensor.detach().to(tensor.options().device(torch::kCPU), /*non_blocking=*/false,
                            /*copy=*/true, at::MemoryFormat::Contiguous);
}

TraceTensor single(Quantity quantity, std::string name, Tensor values) {
  TraceTensor tensor;
  tensor.quantity = quantity;
  tensor.name = std::move(name);
  tensor.shape = values.sizes().vec();
  tensor.placement = Placement::single;
  tensor.pieces = {{kNoRank, 0, std::move(values)}};
  return tensor;
}

/// One value per rank, in rank order.
TraceTensor per_rank(Quantity quantity, std::string name, const std::vector<Tensor>& values) {
  TraceTensor tensor;
  tensor.quantity = quantity;
  tensor.name = std::move(name);
  tensor.shape = values.front().sizes().vec();
  tensor.placement = Placement::per_rank;
  for (std::size_t rank = 0; rank < values.size(); ++rank) {
    tensor.pieces.push_back({static_cast<int>(rank), 0, values[rank]});
  }
  return tensor;
}

torch::Device device_of(const Scenario& scenario) {
  try {
    return torch::Device(scenario.device);
  } catch (const c10::Error& error) {
    throw ScenarioError(
        fmt::format("device is \"{}\"; wanted: a device type of libtorch, for example \"cpu\": {}",
                    scenario.device, error.what_without_backtrace()));
  }
}

Scenario in_mode(Scenario scenario, ReferenceMode mode) {
  if (mode == ReferenceMode::float64) {
    scenario.dtype = "float64";
  }
  return scenario;
}

}  // namespace

std::string_view to_string(ReferenceMode mode) {
  switch (mode) {
    case ReferenceMode::replay:
      return "replay";
    case ReferenceMode::whole:
      return "whole";
    case ReferenceMode::float64:
      return "float64";
  }
  throw std::invalid_argument("to_string: no such ReferenceMode");
}

struct ReferenceTrainer::Impl {
  Impl(const Scenario& asked, ReferenceMode asked_mode,
       const std::map<std::string, Tensor>& initial)
      : scenario(in_mode(asked, asked_mode)),
        mode(asked_mode),
        device(device_of(asked)),
        data(scenario),
        model(make_model(scenario)) {
    model->to(device);
    load(initial);
    for (const auto& parameter : model->named_parameters()) {
      parameters.emplace_back(parameter.key(), parameter.value());
    }
    optimizer = make_reference_optimizer(scenario.optimizer, parameters);
    for (int rank = 0; rank < scenario.world_size; ++rank) {
      generators.push_back(
          at::detail::createCPUGenerator(scenario.seed + static_cast<std::uint64_t>(rank)));
    }
    if (mode == ReferenceMode::replay) {
      record_outputs(
          model, [this](const std::string& name, const Tensor& output) { record(name, output); });
    }
  }

  /// Called rank by rank within a micro-batch, so that the values of a name are in rank order.
  void record(const std::string& name, const Tensor& output) {
    auto entry = std::find_if(outputs.begin(), outputs.end(),
                              [&name](const auto& held) { return held.first == name; });
    if (entry == outputs.end()) {
      entry = outputs.insert(outputs.end(), {name, {}});
    }
    entry->second.push_back(copied(output));
  }

  /// In float64 mode a run starts from, and is set to, weights in the scenario's own dtype.
  Tensor in_own_dtype(const Tensor& value) const {
    return mode == ReferenceMode::float64 ? value.to(torch::kFloat64) : value;
  }

  void load(const std::map<std::string, Tensor>& values) {
    std::map<std::string, Tensor> own;
    for (const auto& [name, value] : values) {
      own[name] = in_own_dtype(value);
    }
    load_parameters(*model, own);
  }

  void set_optimizer_state(const TrainingState& state) {
    optimizer->set_state(state.steps_done, [&](const std::string& name, const Tensor& parameter) {
      const auto found = state.optimizer_state.find(name);
      if (found == state.optimizer_state.end()) {
        throw TraceError(
            fmt::format("the state after {} steps has no \"{}\"", state.steps_done, name));
      }
      const auto value = in_own_dtype(found->second);
      if (value.sizes() != parameter.sizes() || value.scalar_type() != parameter.scalar_type()) {
        throw TraceError(fmt::format("\"{}\" of the state after {} steps is {}; wanted: {}", name,
                                     state.steps_done, described(value), described(parameter)));
      }
      return value.to(device, value.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    });
  }

  static std::string described(const Tensor& tensor) {
    return fmt::format("{} of shape [{}]", c10::toString(tensor.scalar_type()),
                       fmt::join(tensor.sizes(), ", "));
  }

  /// Forward and backward of one batch; the loss, before the division. Gradients are left in the
  /// parameters.
  Tensor run_batch(const Batch& batch, int divisor) {
    for (auto& [name, parameter] : parameters) {
      parameter.mutable_grad() = Tensor();
    }
    const auto output = model(batch.input.to(device));
    const auto loss = model->loss(output, batch.target.to(device));
    (divisor == 1 ? loss : loss / divisor).backward();
    return loss.detach();
  }

  Tensor gradient_of(const Tensor& parameter) const {
    return parameter.grad().defined() ? parameter.grad() : torch::zeros_like(parameter);
  }

  /// A micro-batch's gradients, ((g_0 + g_1) + ...) / W, and the mean of their magnitudes, in
  /// parameter order.
  struct Reduced {
    std::vector<Tensor> gradients;
    std::vector<Tensor> magnitudes;
  };

  Reduced reduce_micro_batch(int step, int micro_batch, std::vector<std::vector<Tensor>>& losses) {
    Reduced sums;
    outputs.clear();
    for (int rank = 0; rank < scenario.world_size; ++rank) {
      const auto index = static_cast<std::size_t>(rank);
      const fsdp::GeneratorScope scope(generators[index]);
      losses[index].push_back(
          run_batch(data.batch(step, micro_batch, rank), scenario.micro_batches));
      add_gradients(sums);
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      sums.gradients[i].div_(scenario.world_size);
      sums.magnitudes[i].div_(scenario.world_size);
    }
    return sums;
  }

  void add_gradients(Reduced& sums) const {
    const torch::NoGradGuard no_grad;
    const bool is_first = sums.gradients.empty();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto gradient = gradient_of(parameters[i].second);
      if (is_first) {
        sums.gradients.push_back(gradient.clone());
        sums.magnitudes.push_back(gradient.abs());
      } else {
        sums.gradients[i].add_(gradient);
        sums.magnitudes[i].add_(gradient.abs());
      }
    }
  }

  /// Gradients of the step in parameter order. Outputs and losses go into the trace.
  Reduced replay_gradients(StepTrace& trace) {
    Reduced total;
    std::vector<std::vector<Tensor>> losses(static_cast<std::size_t>(scenario.world_size));
    for (int micro_batch = 0; micro_batch < scenario.micro_batches; ++micro_batch) {
      auto part = reduce_micro_batch(trace.step, micro_batch, losses);
      for (const auto& [name, values] : outputs) {
        trace.tensors.push_back(
            per_rank(Quantity::output, fmt::format("{}@m{}", name, micro_batch), values));
      }
      if (micro_batch == 0) {
        total = std::move(part);
        continue;
      }
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        total.gradients[i].add_(part.gradients[i]);
        total.magnitudes[i].add_(part.magnitudes[i]);
      }
    }
    std::vector<Tensor> rows;
    for (const auto& row : losses) {
      rows.push_back(copied(torch::stack(row)));
    }
    trace.tensors.push_back(per_rank(Quantity::loss, "loss", rows));
    return total;
  }

  Reduced whole_gradients(StepTrace& trace) {
    const fsdp::GeneratorScope scope(generators.front());
    const auto loss = run_batch(data.whole_batch(trace.step), 1);
    trace.tensors.push_back(
        single(Quantity::mean_loss, "mean_loss", copied(loss.to(torch::kFloat64))));
    Reduced result;
    for (const auto& [name, parameter] : parameters) {
      result.gradients.push_back(gradient_of(parameter).clone());
    }
    return result;
  }

  /// Clips the gradients, hands them to the optimizer, and writes down both and the norm.
  void clip(const Reduced& reduced, StepTrace& trace) {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = parameters.size(); i-- > 0;) {
      trace.tensors.push_back(
          single(Quantity::gradient, parameters[i].first, copied(reduced.gradients[i])));
      if (!reduced.magnitudes.empty()) {
        trace.tensors.back().magnitude = copied(reduced.magnitudes[i]);
      }
    }
    const auto norm = exact_norm(reduced.gradients);
    trace.tensors.push_back(single(Quantity::total_norm, "total_norm", copied(norm)));
    if (scenario.max_norm > 0) {
      const auto coefficient =
          torch::full_like(norm, scenario.max_norm).div_(norm + 1e-6).clamp_max_(1);
      for (const auto& gradient : reduced.gradients) {
        gradient.mul_(coefficient);
      }
    }
    for (std::size_t i = parameters.size(); i-- > 0;) {
      parameters[i].second.mutable_grad() = reduced.gradients[i];
      trace.tensors.push_back(
          single(Quantity::clipped_gradient, parameters[i].first, copied(reduced.gradients[i])));
    }
  }

  void write_state(StepTrace& trace) const {
    for (const auto& [name, parameter] : parameters) {
      trace.tensors.push_back(single(Quantity::parameter, name, copied(parameter)));
    }
    for (const auto& [name, value] : optimizer->state()) {
      trace.tensors.push_back(single(Quantity::optimizer_state, name, copied(value)));
    }
  }

  Scenario scenario;
  ReferenceMode mode;
  torch::Device device;
  Dataset data;
  Model model;
  NamedTensors parameters;
  std::unique_ptr<ReferenceOptimizer> optimizer;
  std::vector<at::Generator> generators;  // of each rank
  // Of the micro-batch that ran last, by name in execution order, then by rank; replay only.
  std::vector<std::pair<std::string, std::vector<Tensor>>> outputs;
};

ReferenceTrainer::ReferenceTrainer(const Scenario& scenario, ReferenceMode mode,
                                   const std::map<std::string, torch::Tensor>& initial)
    : impl_(std::make_unique<Impl>(scenario, mode, initial)) {}

ReferenceTrainer::~ReferenceTrainer() = default;

void ReferenceTrainer::set_state(const TrainingState& state) {
  impl_->load(state.parameters);
  impl_->set_optimizer_state(state);
}

StepTrace ReferenceTrainer::step(int step) {
  StepTrace trace;
  trace.step = step;
  const auto gradients = impl_->mode == ReferenceMode::replay ? impl_->replay_gradients(trace)
                                                              : impl_->whole_gradients(trace);
  impl_->clip(gradients, trace);
  impl_->optimizer->step();
  impl_->write_state(trace);
  return trace;
}

}  // namespace shardproof
