#include "fsdp/recomputation.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "run_state.h"

namespace fsdp {

torch::Tensor checkpoint_sequential(const std::vector<LayerFunction>& layers, std::size_t segments,
                                    torch::Tensor input, const RecomputationOptions& options) {
  if (segments < 1 || segments > layers.size()) {
    throw UsageError(fmt::format(
        "checkpoint_sequential: {} segments of {} layers; wanted: 1 or more, and no more than "
        "there are layers",
        segments, layers.size()));
  }
  const auto run = [](const std::vector<LayerFunction>& part, torch::Tensor x) {
    for (const auto& layer : part) {
      x = layer(x);
    }
    return x;
  };
  auto begin = layers.begin();
  for (std::size_t segment = 0; segment < segments; ++segment) {
    // Of sizes that differ by one at most.
    const auto left = static_cast<std::size_t>(layers.end() - begin);
    const auto end = begin + static_cast<std::ptrdiff_t>(left / (segments - segment));
    const std::vector<LayerFunction> part(begin, end);
    begin = end;
    if (segment + 1 == segments) {
      input = run(part, input);
    } else {
      auto own = options;
      own.name += fmt::format("{}segment {}", own.name.empty() ? "" : ", ", segment);
      input = checkpoint(
          own, [run, part](const torch::Tensor& x) { return run(part, x); }, input);
    }
  }
  return input;
}

RecomputationOptions reporting_to(RecomputationReport& report, RecomputationOptions options) {
  options.early_stop = false;
  options.check = RecomputationCheck::metadata;
  options.on_recomputed = [&report,
                           others = options.on_recomputed](const RecomputedActivation& seen) {
    ++report.tensors;
    report.bytes += seen.stored.numel() * static_cast<std::int64_t>(seen.stored.element_size());
    const bool comparable = seen.stored.sizes() == seen.recomputed.sizes() &&
                            seen.stored.scalar_type() == seen.recomputed.scalar_type();
    if (comparable && !has_same_bits(seen.stored, seen.recomputed)) {
      const auto difference = bit_difference(seen.stored, seen.recomputed);
      report.differences.push_back(
          {seen.index, seen.operation, difference.text, difference.elements});
    }
    if (others) {
      others(seen);
    }
  };
  return options;
}

namespace detail {

void run_backward_into(RecomputationReport& report, const std::vector<at::Tensor*>& results) {
  at::Tensor sum;
  for (const auto* result : results) {
    if (result->is_floating_point() && result->requires_grad()) {
      const auto part = result->to(at::kDouble).sum();
      sum = sum.defined() ? sum + part : part;
    }
  }
  if (!sum.defined()) {
    report.error = "no result of the function needs a gradient, so that nothing is recomputed";
    return;
  }
  try {
    sum.backward();
  } catch (const RecomputationError& error) {
    report.error = error.what();
  }
}

}  // namespace detail
}  // namespace fsdp
