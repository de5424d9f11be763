#include "optimizer_access.h"

#include <ATen/ATen.h>
#include <c10/util/Type.h>
#include <fmt/format.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <array>
#include <typeinfo>

#include "fsdp/errors.h"

namespace fsdp {
namespace {

using namespace torch::optim;  // NOLINT: the names below are all from there

// Each visits the fields of a struct in place: v.option(name, double or bool), v.count(name,
// int64), v.tensor(name, tensor, whether every state has it).

template <typename V>
void visit(SGDOptions& options, V&& v) {
  v.option("lr", options.lr());
  v.option("momentum", options.momentum());
  v.option("dampening", options.dampening());
  v.option("weight_decay", options.weight_decay());
  v.option("nesterov", options.nesterov());
}
template <typename V>
void visit(SGDParamState& state, V&& v) {
  v.tensor("momentum_buffer", state.momentum_buffer(), true);
}

template <typename Options, typename V>
void visit_adam_options(Options& options, V&& v) {
  v.option("lr", options.lr());
  v.option("beta1", std::get<0>(options.betas()));
  v.option("beta2", std::get<1>(options.betas()));
  v.option("eps", options.eps());
  v.option("weight_decay", options.weight_decay());
  v.option("amsgrad", options.amsgrad());
}
template <typename State, typename V>
void visit_adam_state(State& state, V&& v) {
  v.count("step", state.step());
  v.tensor("exp_avg", state.exp_avg(), true);
  v.tensor("exp_avg_sq", state.exp_avg_sq(), true);
  v.tensor("max_exp_avg_sq", state.max_exp_avg_sq(), false);
}
template <typename V>
void visit(AdamOptions& options, V&& v) {
  visit_adam_options(options, v);
}
template <typename V>
void visit(AdamParamState& state, V&& v) {
  visit_adam_state(state, v);
}
template <typename V>
void visit(AdamWOptions& options, V&& v) {
  visit_adam_options(options, v);
}
template <typename V>
void visit(AdamWParamState& state, V&& v) {
  visit_adam_state(state, v);
}

template <typename V>
void visit(AdagradOptions& options, V&& v) {
  v.option("lr", options.lr());
  v.option("lr_decay", options.lr_decay());
  v.option("weight_decay", options.weight_decay());
  v.option("initial_accumulator_value", options.initial_accumulator_value());
  v.option("eps", options.eps());
}
template <typename V>
void visit(AdagradParamState& state, V&& v) {
  v.count("step", state.step());
  v.tensor("sum", state.sum(), true);
}

template <typename V>
void visit(RMSpropOptions& options, V&& v) {
  v.option("lr", options.lr());
  v.option("alpha", options.alpha());
  v.option("eps", options.eps());
  v.option("weight_decay", options.weight_decay());
  v.option("momentum", options.momentum());
  v.option("centered", options.centered());
}
template <typename V>
void visit(RMSpropParamState& state, V&& v) {
  v.count("step", state.step());
  v.tensor("square_avg", state.square_avg(), true);
  v.tensor("momentum_buffer", state.momentum_buffer(), false);
  v.tensor("grad_avg", state.grad_avg(), false);
}

struct OptionReader {
  std::map<std::string, double> values;
  template <typename T>
  void option(const char* name, T& value) {
    values[name] = static_cast<double>(value);
  }
};

struct OptionWriter {
  const std::map<std::string, double>& values;
  void option(const char* name, double& value) { value = values.at(name); }
  void option(const char* name, bool& value) { value = values.at(name) != 0; }
};

struct StateReader {
  ParameterState values;
  void count(const char* name, std::int64_t& value) { values.counts[name] = value; }
  void tensor(const char* name, at::Tensor& value, bool /*always*/) {
    if (value.defined()) {
      values.tensors[name] = value;
    }
  }
};

struct StateWriter {
  const ParameterState& values;
  void count(const char* name, std::int64_t& value) { value = values.counts.at(name); }
  void tensor(const char* name, at::Tensor& value, bool /*always*/) {
    if (const auto found = values.tensors.find(name); found != values.tensors.end()) {
      value = found->second;
    }
  }
};

struct NameReader {
  OptimizerKind& kind;
  void count(const char* name, std::int64_t& /*value*/) { kind.counts.emplace_back(name); }
  void tensor(const char* name, at::Tensor& /*value*/, bool always) {
    (always ? kind.tensors : kind.optional_tensors).emplace_back(name);
  }
};

template <typename OptimizerType, typename Options, typename State>
OptimizerKind make_kind(std::string_view type) {
  OptimizerKind kind;
  kind.type = type;
  // A type derived from it may keep more than is known here.
  kind.is = [](const Optimizer& optimizer) { return typeid(optimizer) == typeid(OptimizerType); };
  kind.options = [](const OptimizerOptions& options) {
    auto copy = dynamic_cast<const Options&>(options);
    OptionReader reader;
    visit(copy, reader);
    return reader.values;
  };
  kind.set_options = [](OptimizerOptions& options, const std::map<std::string, double>& values) {
    visit(dynamic_cast<Options&>(options), OptionWriter{values});
  };
  kind.state = [](const OptimizerParamState& state) {
    auto copy = dynamic_cast<const State&>(state);
    StateReader reader;
    visit(copy, reader);
    return reader.values;
  };
  kind.make_state = [](const ParameterState& values) -> std::unique_ptr<OptimizerParamState> {
    auto state = std::make_unique<State>();
    visit(*state, StateWriter{values});
    return state;
  };
  State names;
  visit(names, NameReader{kind});
  return kind;
}

const std::array<OptimizerKind, 5>& kinds() {
  static const std::array<OptimizerKind, 5> known = {
      make_kind<SGD, SGDOptions, SGDParamState>("SGD"),
      make_kind<Adam, AdamOptions, AdamParamState>("Adam"),
      make_kind<AdamW, AdamWOptions, AdamWParamState>("AdamW"),
      make_kind<Adagrad, AdagradOptions, AdagradParamState>("Adagrad"),
      make_kind<RMSprop, RMSpropOptions, RMSpropParamState>("RMSprop"),
  };
  return known;
}

}  // namespace

const OptimizerKind& kind_of(const Optimizer& optimizer) {
  for (const auto& kind : kinds()) {
    if (kind.is(optimizer)) {
      return kind;
    }
  }
  throw UsageError(fmt::format(
      "the optimizer is a {}, whose state is not known; wanted: torch::optim::SGD, Adam, AdamW, "
      "Adagrad or RMSprop. Save the model without it, or its state by your own means",
      c10::demangle(typeid(optimizer).name())));
}

std::optional<ParameterState> state_of(const Optimizer& optimizer, const OptimizerKind& kind,
                                       const at::Tensor& parameter) {
  const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
  if (found == optimizer.state().end()) {
    return std::nullopt;
  }
  return kind.state(*found->second);
}

void set_state(Optimizer& optimizer, const OptimizerKind& kind, const at::Tensor& parameter,
               const std::optional<ParameterState>& state) {
  void* key = parameter.unsafeGetTensorImpl();
  if (state.has_value()) {
    optimizer.state()[key] = kind.make_state(*state);
  } else {
    optimizer.state().erase(key);
  }
}

}  // namespace fsdp
