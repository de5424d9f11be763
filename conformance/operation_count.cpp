#include "conformance/operation_count.h"

#include <ATen/core/ivalue.h>
#include <fsdp/errors.h>
#include <fsdp/recomputation.h>
#include <torch/csrc/autograd/graph_task.h>

#include <exception>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

namespace shardproof {
namespace {

thread_local OperationCount* counting = nullptr;

Phase phase_now() {
  if (fsdp::is_recomputing()) {
    return Phase::recomputation;
  }
  return torch::autograd::get_current_graph_task_id() != -1 ? Phase::backward : Phase::forward;
}

using Inputs = c10::ArrayRef<const c10::IValue>;

at::IntArrayRef sizes_of(Inputs inputs, std::size_t i) {
  return inputs[i].toTensor().sizes();
}

/// Of two matrices, or two batches of matrices.
std::int64_t product(at::IntArrayRef a, at::IntArrayRef b) {
  return 2 * c10::multiply_integers(a) * b.back();
}
/// Of a matrix or vector and a vector.
std::int64_t product_with_vector(at::IntArrayRef a) {
  return 2 * c10::multiply_integers(a);
}

/// Each element of the smaller side ([batch, channels, ...]: the output, or the input if
/// transposed) meets the weight of one of its channels.
std::int64_t convolution(at::IntArrayRef input, at::IntArrayRef output, at::IntArrayRef weight,
                         bool transposed) {
  const auto side = transposed ? input : output;
  return 2 * c10::multiply_integers(side) * c10::multiply_integers(weight.slice(1));
}

/// Query [batch, heads, times, width], key [batch, heads, others, width], value of value's width.
struct Attention {
  std::int64_t with_width;
  std::int64_t with_value_width;
};
Attention attention(at::IntArrayRef query, at::IntArrayRef key, at::IntArrayRef value) {
  const auto scores = query[0] * query[1] * query[2] * key[2];
  return {2 * scores * query[3], 2 * scores * value[3]};
}

/// [batch, channels, ...] of a convolution's output, when it is not transposed.
std::vector<std::int64_t> convolved(at::IntArrayRef input, at::IntArrayRef weight,
                                    const std::vector<std::int64_t>& stride,
                                    const std::vector<std::int64_t>& padding,
                                    const std::vector<std::int64_t>& dilation) {
  std::vector<std::int64_t> output = {input[0], weight[0]};
  for (std::size_t d = 2; d < input.size(); ++d) {
    const auto at = [d](const std::vector<std::int64_t>& each) {
      return each.size() == 1 ? each[0] : each[d - 2];
    };
    output.push_back(
        (input[d] + 2 * at(padding) - at(dilation) * (weight[d] - 1) - 1) / at(stride) + 1);
  }
  return output;
}

/// Operations of the operator, known before it runs; nothing if it is none of those that are
/// counted.
std::optional<std::int64_t> operations_of(std::string_view name, Inputs inputs) {
  if (name.ends_with('_')) {  // in place
    name.remove_suffix(1);
  }
  if (name == "aten::mm" || name == "aten::bmm") {
    return product(sizes_of(inputs, 0), sizes_of(inputs, 1));
  }
  if (name == "aten::addmm" || name == "aten::baddbmm" || name == "aten::addbmm" ||
      name == "aten::_addmm_activation") {
    return product(sizes_of(inputs, 1), sizes_of(inputs, 2));
  }
  if (name == "aten::mv" || name == "aten::dot") {
    return product_with_vector(sizes_of(inputs, 0));
  }
  if (name == "aten::addmv") {
    return product_with_vector(sizes_of(inputs, 1));
  }
  if (name == "aten::_scaled_dot_product_flash_attention_for_cpu") {
    const auto one = attention(sizes_of(inputs, 0), sizes_of(inputs, 1), sizes_of(inputs, 2));
    return one.with_width + one.with_value_width;
  }
  if (name == "aten::_scaled_dot_product_flash_attention_for_cpu_backward") {
    // The scores, and the gradients of query and key; the gradients of weights and value.
    const auto one = attention(sizes_of(inputs, 1), sizes_of(inputs, 2), sizes_of(inputs, 3));
    return 3 * one.with_width + 2 * one.with_value_width;
  }
  if (name == "aten::convolution") {
    // (input, weight, bias, stride, padding, dilation, transposed, ...)
    const auto input = sizes_of(inputs, 0);
    const auto weight = sizes_of(inputs, 1);
    const bool transposed = inputs[6].toBool();
    return transposed ? convolution(input, {}, weight, true)
                      : convolution(input,
                                    convolved(input, weight, inputs[3].toIntVector(),
                                              inputs[4].toIntVector(), inputs[5].toIntVector()),
                                    weight, false);
  }
  if (name == "aten::convolution_backward") {
    // (gradient, input, weight, bias sizes, stride, padding, dilation, transposed, output padding,
    // groups, which gradients)
    const auto one = convolution(sizes_of(inputs, 1), sizes_of(inputs, 0), sizes_of(inputs, 2),
                                 inputs[7].toBool());
    const auto wanted = inputs[10].toBoolList();
    return one * (static_cast<int>(wanted[0]) + static_cast<int>(wanted[1]));
  }
  return std::nullopt;
}

}  // namespace

std::string_view to_string(Phase phase) {
  switch (phase) {
    case Phase::forward:
      return "forward";
    case Phase::recomputation:
      return "recomputation";
    case Phase::backward:
      return "backward";
  }
  return "";
}

/// One call of an operator, from its start to its end.
struct OperationCount::Call : at::ObserverContext {
  OperationCount* count = nullptr;
  Phase phase{};
  int exceptions = 0;                      // under way when it began
  std::optional<std::int64_t> operations;  // if it is counted
};

OperationCount::OperationCount() {
  if (counting != nullptr) {
    throw fsdp::UsageError(
        "OperationCount: this thread counts already; wanted: one count at a time (end the other)");
  }
  counting = this;
  handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&begin, &end)
                                           .needsInputs(true)
                                           .scopes({at::RecordScope::FUNCTION}));
}

OperationCount::~OperationCount() {
  at::removeCallback(handle_);
  counting = nullptr;
}

std::int64_t OperationCount::operations() const {
  return std::accumulate(operations_.begin(), operations_.end(), std::int64_t{0});
}

void OperationCount::reset() {
  operations_ = {};
  calls_ = {};
  by_operator_.clear();
}

std::unique_ptr<at::ObserverContext> OperationCount::begin(const at::RecordFunction& function) {
  auto call = std::make_unique<Call>();
  call->count = counting;
  call->phase = phase_now();
  call->exceptions = std::uncaught_exceptions();
  if (counting->depth_ == 0) {
    call->operations = operations_of(function.name(), function.inputs());
  }
  counting->depth_ += call->operations || counting->depth_ > 0 ? 1 : 0;
  return call;
}

void OperationCount::end(const at::RecordFunction& function, at::ObserverContext* context) {
  auto& call = *static_cast<Call*>(context);
  auto& count = *call.count;
  count.depth_ -= count.depth_ > 0 ? 1 : 0;
  if (std::uncaught_exceptions() > call.exceptions) {
    return;
  }
  const auto phase = static_cast<std::size_t>(call.phase);
  ++count.calls_[phase][function.name()];
  if (!call.operations) {
    return;
  }
  count.operations_[phase] += *call.operations;
  count.by_operator_[function.name()] += *call.operations;
}

}  // namespace shardproof
