#pragma once
// A rank's own random generator. In-process ranks are threads and would share libtorch's default
// CPU generator, so that their draws would interleave as the scheduler likes. Modules that draw
// (Dropout) therefore use the generator of the rank they run on.

#include <ATen/core/Generator.h>
#include <torch/nn/module.h>

#include <cstdint>

#include "fsdp/module.h"

namespace fsdp {

/// The generator of the rank that this thread runs: a CPU Mersenne Twister, made on first use with
/// seed 0.
at::Generator& rank_generator();

/// Seeds this thread's generator for `rank`: the seed is `seed + rank`, as users of PyTorch write
/// it.
void seed_rank_generator(std::uint64_t seed, int rank);

/// While it lives, this thread draws from `generator` instead of its own. The single-device
/// reference plays each rank in turn with it.
class GeneratorScope {
 public:
  explicit GeneratorScope(at::Generator generator);
  ~GeneratorScope();
  GeneratorScope(const GeneratorScope&) = delete;
  GeneratorScope& operator=(const GeneratorScope&) = delete;

 private:
  at::Generator previous_;
};

/// Dropout that draws from the rank's generator. Keeps each element with probability 1 - p and
/// scales the kept ones by 1/(1 - p): mask = bernoulli(1 - p) of x's shape and dtype, y = x * (mask
/// / (1 - p)). In eval mode, or with p = 0, y = x and nothing is drawn.
class DropoutImpl : public Module<DropoutImpl> {
 public:
  /// Throws UsageError unless 0 <= p < 1.
  explicit DropoutImpl(double p = 0.5);
  torch::Tensor forward(const torch::Tensor& input);
  void reset() override {}
  void pretty_print(std::ostream& stream) const override;
  double p() const { return p_; }

 private:
  double p_;
};
FSDP_MODULE(Dropout);

}  // namespace fsdp
