#include "reference/trainer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "reference/optimizers.h"
#include "reference/reduction.h"

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
    scenario.precision = PrecisionSpec();
  }
  return scenario;
}

/// The model that forward and backward run in: parameters that are not exempt in the parameter
/// dtype, floating-point buffers in theirs.
Model make_compute_model(const Scenario& scenario) {
  auto model = make_model(scenario);
  const auto dtype = dtype_named(parameter_dtype(scenario));
  for (const auto& module : model->modules()) {
    const bool is_norm = dynamic_cast<const NormImpl*>(module.get()) != nullptr;
    if (scenario.precision.exempt_norms && is_norm) {
      continue;
    }
    for (auto& parameter : module->parameters(/*recurse=*/false)) {
      parameter.set_data(parameter.to(dtype));
    }
  }
  if (!scenario.precision.buffer.empty()) {
    for (auto& buffer : model->buffers()) {
      if (buffer.is_floating_point()) {
        buffer.set_data(buffer.to(dtype_named(scenario.precision.buffer)));
      }
    }
  }
  return model;
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
        kept(make_model(scenario)),
        model(make_compute_model(scenario)),
        divide(divide_factors(scenario)) {
    kept->to(device);
    model->to(device);
    parameters = parameters_of(*kept);
    leaves = parameters_of(*model);
    for (auto& [name, parameter] : parameters) {
      // In 16 bits libtorch's add with a factor rounds its last elements otherwise, so that it
      // matters in what order a transposed parameter lies: what is optimised lies as it is written.
      parameter.set_data(parameter.contiguous());
    }
    load(initial);
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
    const bool is_model = name.starts_with("model");
    entry->second.push_back(copied(is_model ? in_output_dtype(output) : output));
  }

  /// In float64 mode a run starts from, and is set to, weights in the scenario's own dtype.
  Tensor in_own_dtype(const Tensor& value) const {
    return mode == ReferenceMode::float64 ? value.to(torch::kFloat64) : value;
  }

  Tensor in_output_dtype(const Tensor& output) const {
    const auto& dtype = scenario.precision.output;
    return dtype.empty() ? output : output.to(dtype_named(dtype));
  }

  void load(const std::map<std::string, Tensor>& values) {
    std::map<std::string, Tensor> own;
    for (const auto& [name, value] : values) {
      own[name] = in_own_dtype(value);
    }
    load_parameters(*kept, own);
  }

  void set_optimizer_state(const TrainingState& state) {
    const auto has = [&state](const std::string& name) {
      return state.optimizer_state.count(name) > 0;
    };
    optimizer->set_state(state.optimizer_steps(), [&](const std::string& name,
                                                      const Tensor& parameter) {
      const auto found = state.optimizer_state.find(name);
      if (found == state.optimizer_state.end()) {
        const auto owner = name.substr(name.find('/') + 1);
        if (!has("exp_avg/" + owner) && !has("exp_avg_sq/" + owner)) {
          return Tensor();
        }
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

  /// Casts the kept parameters into those that forward and backward run with.
  void cast_parameters() {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      leaves[i].second.copy_(parameters[i].second);
    }
  }

  /// Forward and backward of one batch; the loss, before the division. Gradients are left in the
  /// leaves.
  Tensor run_batch(const Batch& batch, int divisor) {
    for (auto& [name, leaf] : leaves) {
      leaf.mutable_grad() = Tensor();
    }
    const auto dtype = dtype_named(parameter_dtype(scenario));
    const auto call = [&](const Tensor& input) {
      return in_output_dtype(model(input.is_floating_point() ? input.to(dtype) : input));
    };
    const auto loss = model->training_loss(call, batch.input.to(device), batch.target.to(device));
    const auto divided = divisor == 1 ? loss : loss / divisor;
    (scenario.loss_scale > 0 ? divided * scenario.loss_scale : divided).backward();
    return loss.detach();
  }

  /// The step's gradients in parameter order, in the dtype of the parameters; undefined where there
  /// is none. Magnitudes, of the replay: the mean over ranks of the terms' magnitudes.
  struct Reduced {
    std::vector<Tensor> gradients;
    std::vector<Tensor> magnitudes;
  };

  /// What is collected of one parameter during a step.
  struct Collected {
    explicit Collected(const Scenario& scenario) : reduction(scenario) {}
    GradientReduction reduction;
    Tensor magnitude;
    bool has_gradient = false;
  };

  void collect_gradients(std::vector<Collected>& collected) const {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      const auto& leaf = leaves[i].second;
      if (!leaf.requires_grad()) {
        continue;
      }
      auto& own = collected[i];
      own.has_gradient = own.has_gradient || leaf.grad().defined();
      const auto gradient = leaf.grad().defined() ? leaf.grad() : torch::zeros_like(leaf);
      own.reduction.add(gradient);
      const auto magnitude = gradient.abs().to(wide_dtype());
      own.magnitude = own.magnitude.defined() ? own.magnitude.add_(magnitude) : magnitude;
    }
  }

  /// That magnitudes are kept in.
  torch::Dtype wide_dtype() const {
    return scenario.dtype == "float64" ? torch::kFloat64 : torch::kFloat32;
  }

  /// Gradients of the step. Outputs and losses go into the trace.
  Reduced replay_gradients(StepTrace& trace) {
    std::vector<Collected> collected(parameters.size(), Collected(scenario));
    std::vector<std::vector<Tensor>> losses(static_cast<std::size_t>(scenario.world_size));
    for (int micro_batch = 0; micro_batch < scenario.micro_batches; ++micro_batch) {
      outputs.clear();
      for (int rank = 0; rank < scenario.world_size; ++rank) {
        const auto index = static_cast<std::size_t>(rank);
        const fsdp::GeneratorScope scope(generators[index]);
        losses[index].push_back(
            run_batch(data.batch(trace.step, micro_batch, rank), scenario.micro_batches));
        collect_gradients(collected);
      }
      for (const auto& [name, values] : outputs) {
        trace.tensors.push_back(
            per_rank(Quantity::output, fmt::format("{}@m{}", name, micro_batch), values));
      }
    }
    std::vector<Tensor> rows;
    for (const auto& row : losses) {
      rows.push_back(copied(torch::stack(row)));
    }
    trace.tensors.push_back(per_rank(Quantity::loss, "loss", rows));
    Reduced reduced;
    for (auto& own : collected) {
      reduced.gradients.push_back(own.has_gradient ? own.reduction.result().contiguous()
                                                   : Tensor());
      reduced.magnitudes.push_back(own.has_gradient ? own.magnitude.div_(divide.pre * divide.post)
                                                    : Tensor());
    }
    return reduced;
  }

  Reduced whole_gradients(StepTrace& trace) {
    const fsdp::GeneratorScope scope(generators.front());
    const auto loss = run_batch(data.whole_batch(trace.step), 1);
    trace.tensors.push_back(
        single(Quantity::mean_loss, "mean_loss", copied(loss.to(torch::kFloat64))));
    // The loss is the mean over all samples; factors of one's own make the gradient something else.
    const double factor = scenario.world_size / (divide.pre * divide.post);
    Reduced reduced;
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      auto gradient = leaves[i].second.grad();
      if (gradient.defined()) {
        gradient = gradient.detach()
                       .to(parameters[i].second.scalar_type())
                       .clone(at::MemoryFormat::Contiguous);
        gradient = factor == 1 ? gradient : gradient.mul_(factor);
      }
      reduced.gradients.push_back(gradient);
    }
    return reduced;
  }

  /// Undoes the loss scale.
  void unscale(const Reduced& reduced) const {
    if (scenario.loss_scale == 0) {
      return;
    }
    // As a tensor: libtorch's mul_(Scalar) would round the number to a 16-bit dtype first.
    const auto inverse = torch::tensor(static_cast<float>(1 / scenario.loss_scale));
    for (const auto* list : {&reduced.gradients, &reduced.magnitudes}) {
      for (const auto& tensor : *list) {
        if (tensor.defined()) {
          tensor.mul_(inverse);
        }
      }
    }
  }

  /// Adds a tensor of each parameter that has one, from the last to the first.
  void write_gradients(Quantity quantity, const Reduced& reduced, StepTrace& trace) const {
    for (std::size_t i = parameters.size(); i-- > 0;) {
      if (!reduced.gradients[i].defined()) {
        continue;
      }
      trace.tensors.push_back(single(quantity, parameters[i].first, copied(reduced.gradients[i])));
      if (quantity == Quantity::gradient && !reduced.magnitudes.empty()) {
        trace.tensors.back().magnitude = copied(reduced.magnitudes[i]);
      }
    }
  }

  /// Clips the gradients, hands them to the optimizer, and writes down both and the norm.
  void clip(const Reduced& reduced, StepTrace& trace) {
    const torch::NoGradGuard no_grad;
    std::vector<Tensor> present;
    std::copy_if(reduced.gradients.begin(), reduced.gradients.end(), std::back_inserter(present),
                 [](const Tensor& gradient) { return gradient.defined(); });
    write_gradients(Quantity::gradient, reduced, trace);
    const auto norm = exact_norm(present, scenario.norm_type);
    trace.tensors.push_back(single(Quantity::total_norm, "total_norm", copied(norm)));
    if (scenario.max_norm > 0) {
      const auto coefficient =
          torch::full_like(norm, scenario.max_norm).div_(norm + 1e-6).clamp_max_(1);
      for (const auto& gradient : present) {
        gradient.mul_(coefficient);
      }
    }
    write_gradients(Quantity::clipped_gradient, reduced, trace);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].second.mutable_grad() = reduced.gradients[i];
    }
  }

  /// A step whose scaled gradient is not finite is left out.
  bool leaves_out(const StepTrace& trace) const {
    return scenario.loss_scale > 0 && has_non_finite_gradient(trace);
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
  Model kept;   // holds what is optimised
  Model model;  // what forward and backward run
  DivideSpec divide;
  NamedTensors parameters;  // of the kept model
  NamedTensors leaves;      // of the other, in the same order
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
  impl_->cast_parameters();
  const auto gradients = impl_->mode == ReferenceMode::replay ? impl_->replay_gradients(trace)
                                                              : impl_->whole_gradients(trace);
  impl_->unscale(gradients);
  impl_->clip(gradients, trace);
  if (!impl_->leaves_out(trace)) {
    impl_->optimizer->step();
  }
  impl_->write_state(trace);
  return trace;
}

}  // namespace shardproof
