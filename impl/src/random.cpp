#include "fsdp/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <torch/types.h>

#include <mutex>
#include <utility>

#include "fsdp/errors.h"
#include "rank_thread.h"

namespace fsdp {
namespace {
thread_local bool process_is_shared = false;
}  // namespace

bool shares_process() {
  return process_is_shared;
}
void set_shares_process(bool shares) {
  process_is_shared = shares;
}

at::Generator& rank_generator() {
  thread_local at::Generator generator = at::detail::createCPUGenerator(0);
  return generator;
}

void seed_rank_generator(std::uint64_t seed, int rank) {
  auto& generator = rank_generator();
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(seed + static_cast<std::uint64_t>(rank));
}

GeneratorScope::GeneratorScope(at::Generator generator)
    : previous_(std::exchange(rank_generator(), std::move(generator))) {}

GeneratorScope::~GeneratorScope() {
  rank_generator() = std::move(previous_);
}

DropoutImpl::DropoutImpl(double p) : p_(p) {
  if (!(p >= 0 && p < 1)) {
    throw UsageError(fmt::format("Dropout: p is {}; wanted: 0 <= p < 1", p));
  }
}

torch::Tensor DropoutImpl::forward(const torch::Tensor& input) {
  if (!is_training() || p_ == 0) {
    return input;
  }
  const double keep = 1 - p_;
  const auto mask = torch::empty_like(input, torch::TensorOptions().requires_grad(false))
                        .bernoulli_(keep, rank_generator())
                        .div_(keep);
  return input * mask;
}

void DropoutImpl::pretty_print(std::ostream& stream) const {
  stream << "fsdp::Dropout(p=" << p_ << ")";
}

}  // namespace fsdp
