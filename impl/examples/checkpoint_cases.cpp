// Modules of one's own, checked for activation checkpointing by
//   shardproof checkpoint-check --library libfsdp_checkpoint_cases.so
// The first is fit for it. The second is not: its noise comes from a generator that nobody sets
// back, so that the second run does not see what the first saw.

#include <fsdp/module.h>
#include <fsdp/random.h>
#include <fsdp/recomputation_library.h>
#include <torch/torch.h>

#include <random>

namespace {

struct BlockImpl : fsdp::Module<BlockImpl> {
  BlockImpl()
      : linear(register_module("linear", torch::nn::Linear(32, 32))),
        dropout(register_module("dropout", fsdp::Dropout(0.1))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x + dropout(torch::gelu(linear(x))); }
  torch::nn::Linear linear;
  fsdp::Dropout dropout;
};
FSDP_MODULE(Block);

struct NoisyImpl : fsdp::Module<NoisyImpl> {
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::tanh(x * std::normal_distribution<double>(1, 0.1)(generator));
  }
  std::mt19937 generator;
};
FSDP_MODULE(Noisy);

template <typename Module>
fsdp::RecomputationReport check(Module module, const fsdp::RecomputationOptions& options) {
  return fsdp::check_recomputation(
      options, [module](const torch::Tensor& x) mutable { return module(x); },
      torch::ones({4, 32}).requires_grad_());
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void fsdp_recomputation_cases(
    std::vector<fsdp::RecomputationCase>* cases) {
  cases->push_back({"block", [](const auto& options) { return check(Block(), options); }});
  cases->push_back({"noisy", [](const auto& options) { return check(Noisy(), options); }});
}
