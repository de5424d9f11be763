#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cmath>

#include "fsdp/errors.h"
#include "fsdp/exact_sum.h"
#include "fsdp/fully_shard.h"
#include "unit.h"

namespace fsdp {
namespace {

struct Gradients {
  std::vector<at::Tensor> shards;  // of the parameters that have a gradient on this rank
  BackendPtr process_group;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
};

Gradients sharded_gradients(torch::nn::Module& module) {
  Gradients found;
  for (const auto& unit : units_below(module)) {
    if (found.process_group == nullptr) {
      found.process_group = unit->process_group();
    } else if (found.process_group != unit->process_group()) {
      throw UsageError(
          fmt::format("rank {}: clip_grad_norm_: units '{}' is sharded over another process group "
                      "than the first; "
                      "wanted: one process group below the module",
                      found.process_group->getRank(), unit->name()));
    }
    for (const auto& parameter : unit->flat().parameters()) {
      found.dtype = parameter.scalar_type();
      found.device = parameter.device();
      if (parameter.grad().defined()) {
        found.shards.push_back(parameter.grad());
      }
    }
  }
  if (found.process_group == nullptr) {
    throw UsageError(
        "clip_grad_norm_: the module is not sharded; call fsdp::fully_shard first, or use "
        "torch::nn::utils::clip_grad_norm_ for a module that is whole");
  }
  return found;
}

void observe(Point point, const BackendPtr& group, at::Tensor& tensor) {
  if (auto* listener = observer()) {
    listener->observe({point, "", group->getRank(), group->getSize(), tensor, nullptr});
  }
}

void all_reduce(const BackendPtr& group, const at::Tensor& tensor, c10d::ReduceOp op) {
  std::vector<at::Tensor> tensors = {tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = std::move(op);
  group->allreduce(tensors, options)->wait();
}

double euclidean_norm(const Gradients& gradients) {
  ExactSquareSum sum;
  for (const auto& shard : gradients.shards) {
    sum.add(shard);
  }
  auto words = sum.words().to(gradients.device);
  observe(Point::local_square_sum, gradients.process_group, words);
  all_reduce(gradients.process_group, words, c10d::ReduceOp::SUM);
  observe(Point::global_square_sum, gradients.process_group, words);
  return std::sqrt(ExactSquareSum::from_words(words).value());
}

double maximum_norm(const Gradients& gradients) {
  auto largest = at::zeros({1}, at::TensorOptions(at::kDouble).device(gradients.device));
  for (const auto& shard : gradients.shards) {
    if (shard.numel() > 0) {
      largest = at::maximum(largest, shard.abs().max().to(at::kDouble));
    }
  }
  all_reduce(gradients.process_group, largest, c10d::ReduceOp::MAX);
  return largest.item<double>();
}

double power_norm(const Gradients& gradients, double p) {
  auto sum = at::zeros({1}, at::TensorOptions(at::kDouble).device(gradients.device));
  for (const auto& shard : gradients.shards) {
    sum += shard.to(at::kDouble).abs().pow(p).sum();
  }
  all_reduce(gradients.process_group, sum, c10d::ReduceOp::SUM);
  return std::pow(sum.item<double>(), 1 / p);
}

at::Tensor norm_of(const Gradients& gradients, double norm_type) {
  if (!(norm_type > 0)) {
    throw UsageError(fmt::format(
        "rank {}: clip_grad_norm_: norm_type is {}; wanted: a positive number or infinity",
        gradients.process_group->getRank(), norm_type));
  }
  const at::NoGradGuard no_grad;
  const double norm = norm_type == 2.0        ? euclidean_norm(gradients)
                      : std::isinf(norm_type) ? maximum_norm(gradients)
                                              : power_norm(gradients, norm_type);
  auto rounded = at::scalar_tensor(norm, at::TensorOptions(at::kDouble).device(gradients.device))
                     .to(gradients.dtype);
  observe(Point::total_norm, gradients.process_group, rounded);
  return rounded;
}

}  // namespace

torch::Tensor grad_norm(torch::nn::Module& module, double norm_type) {
  return norm_of(sharded_gradients(module), norm_type);
}

torch::Tensor clip_grad_norm_(torch::nn::Module& module, double max_norm, double norm_type,
                              bool error_if_nonfinite) {
  const auto gradients = sharded_gradients(module);
  const auto rank = gradients.process_group->getRank();
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
  observe(Point::clip_coefficient, gradients.process_group, coefficient);
  for (const auto& shard : gradients.shards) {
    shard.mul_(coefficient);
  }
  return norm;
}

}  // namespace fsdp
