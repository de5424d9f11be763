#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "fsdp/errors.h"
#include "fsdp/exact_sum.h"
#include "fsdp/fully_shard.h"
#include "unit.h"

namespace fsdp {
namespace {

/// Gradients below a module, by the ranks that share them.
struct Gradients {
  struct Group {
    BackendPtr ranks;                // null if no other rank has other elements
    std::vector<at::Tensor> shards;  // of the parameters that have a gradient
    at::Device device = at::kCPU;    // where collectives are done
  };
  std::vector<Group> groups;
  int rank = 0;
  int ranks = 1;
  at::ScalarType dtype = at::kFloat;  // the widest
};

Gradients::Group& group_of(Gradients& gradients, Unit& unit) {
  auto group = std::find_if(
      gradients.groups.begin(), gradients.groups.end(),
      [&](const Gradients::Group& each) { return each.ranks == unit.options().shard_group; });
  if (group == gradients.groups.end()) {
    group = gradients.groups.insert(gradients.groups.end(), {unit.options().shard_group, {}});
  }
  return *group;
}

Gradients sharded_gradients(torch::nn::Module& module) {
  const auto units = units_below(module);
  if (units.empty()) {
    throw UsageError(
        "clip_grad_norm_: the module is not sharded; call fsdp::fully_shard first, or use "
        "torch::nn::utils::clip_grad_norm_ for a module that is whole");
  }
  Gradients found;
  std::optional<at::ScalarType> dtype;
  for (const auto& unit : units) {
    unit->finish_reduction();
    found.rank = unit->options().world_rank;
    found.ranks = std::max(found.ranks, unit->shards() * unit->replicas());
    if (unit->flat().empty()) {
      continue;
    }
    dtype = dtype ? c10::promoteTypes(*dtype, unit->flat().dtype()) : unit->flat().dtype();
    auto& group = group_of(found, *unit);
    group.device = unit->flat().device();
    for (const auto& parameter : unit->flat().parameters()) {
      if (parameter.grad().defined()) {
        group.shards.push_back(parameter.grad());
      }
    }
  }
  found.dtype = dtype.value_or(at::kFloat);
  return found;
}

void observe(Point point, const Gradients& gradients, at::Tensor& tensor) {
  if (auto* listener = observer()) {
    listener->observe({point, "", gradients.rank, gradients.ranks, tensor, nullptr});
  }
}

void all_reduce(const Gradients::Group& group, at::Tensor& tensor, c10d::ReduceOp op) {
  if (group.ranks == nullptr) {
    return;
  }
  auto there = tensor.to(group.device);
  std::vector<at::Tensor> tensors = {there};
  c10d::AllreduceOptions options;
  options.reduceOp = std::move(op);
  const CollectiveLabel label("the gradient norm");
  group.ranks->allreduce(tensors, options)->wait();
  tensor = there.cpu();
}

double summed_norm(const Gradients& gradients, double p) {
  auto total = at::zeros({ExactSquareSum::kWords}, at::kLong);
  for (const auto& group : gradients.groups) {
    ExactSquareSum sum;
    for (const auto& shard : group.shards) {
      if (p == 2) {
        sum.add(shard);
      } else {
        sum.add_powers(shard, p);
      }
    }
    auto words = sum.words();
    observe(Point::local_square_sum, gradients, words);
    all_reduce(group, words, c10d::ReduceOp::SUM);
    observe(Point::global_square_sum, gradients, words);
    total += words;
  }
  const double sum = ExactSquareSum::from_words(total).value();
  return p == 2 ? std::sqrt(sum) : p == 1 ? sum : std::pow(sum, 1 / p);
}

double maximum_norm(const Gradients& gradients) {
  // The second says whether there was a NaN: not every backend's maximum keeps it.
  auto total = at::zeros({2}, at::kDouble);
  for (const auto& group : gradients.groups) {
    auto largest = at::zeros({2}, at::kDouble);
    for (const auto& shard : group.shards) {
      if (shard.numel() > 0) {
        const auto size = shard.abs().max().to(at::kDouble).cpu();
        const bool is_nan = size.isnan().item<bool>();
        largest = at::maximum(largest, at::stack({is_nan ? at::zeros_like(size) : size,
                                                  at::full_like(size, is_nan ? 1.0 : 0.0)}));
      }
    }
    all_reduce(group, largest, c10d::ReduceOp::MAX);
    total = at::maximum(total, largest);
  }
  return total[1].item<double>() > 0 ? std::nan("") : total[0].item<double>();
}

at::Tensor norm_of(const Gradients& gradients, double norm_type) {
  if (!(norm_type > 0)) {
    throw UsageError(fmt::format(
        "rank {}: clip_grad_norm_: norm_type is {}; wanted: a positive number or infinity",
        gradients.rank, norm_type));
  }
  const at::NoGradGuard no_grad;
  const double norm =
      std::isinf(norm_type) ? maximum_norm(gradients) : summed_norm(gradients, norm_type);
  auto rounded = at::scalar_tensor(norm, at::kDouble).to(gradients.dtype);
  observe(Point::total_norm, gradients, rounded);
  return rounded;
}

}  // namespace

torch::Tensor grad_norm(torch::nn::Module& module, double norm_type) {
  return norm_of(sharded_gradients(module), norm_type);
}

torch::Tensor clip_grad_norm_(torch::nn::Module& module, double max_norm, double norm_type,
                              bool error_if_nonfinite) {
  const auto gradients = sharded_gradients(module);
  const auto rank = gradients.rank;
  if (!(max_norm >= 0)) {
    throw UsageError(fmt::format("rank {}: clip_grad_norm_: max_norm is {}; wanted: zero or more",
                                 rank, max_norm));
  }
  const at::NoGradGuard no_grad;
  auto norm = norm_of(gradients, norm_type);
  if (error_if_nonfinite && !std::isfinite(norm.item<double>())) {
    throw NonFiniteError(
        fmt::format("rank {}: clip_grad_norm_: the gradient norm over all ranks is {}; wanted: a "
                    "finite number. Look for "
                    "a loss that overflowed, or pass error_if_nonfinite = false to go on",
                    rank, norm.item<double>()));
  }
  auto coefficient = at::full_like(norm, max_norm).div_(norm + 1e-6).clamp_(c10::nullopt, 1.0);
  observe(Point::clip_coefficient, gradients, coefficient);
  for (const auto& group : gradients.groups) {
    for (const auto& shard : group.shards) {
      shard.mul_(coefficient);  // a scalar on the CPU goes with a tensor on any device
    }
  }
  return norm;
}

}  // namespace fsdp
