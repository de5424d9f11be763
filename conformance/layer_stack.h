#pragma once
// A stack of L transformer blocks whose costs have closed forms, and the ways to checkpoint it:
// what the claims on compute and memory are measured on.
//
// n = batch * time tokens; C is the width, T the time, V the vocabulary, H the heads. A block is
// x1 = x + output(attention(qkv(norm1(x)))), x1 + down(gelu(up(norm2(x1)))), as in the reference's
// transformer, but attention sees all positions.

#include <fsdp/module.h>
#include <fsdp/recomputation.h>
#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

namespace shardproof {

struct StackSpec {
  int layers = 4;
  std::int64_t width = 32;
  std::int64_t heads = 2;  // divides width
  std::int64_t time = 16;
  std::int64_t batch = 2;
  std::int64_t vocabulary = 64;

  std::int64_t tokens() const { return batch * time; }
};

/// Which layers run again in backward.
struct CheckpointPolicy {
  int every = 0;  // the first of each `every` layers is a region of its own; 0: none is
  /// Instead: about sqrt(L) regions of several layers, fsdp::checkpoint_sequential over
  /// ceil(sqrt(L)) segments. The last segment is stored.
  bool segments = false;
  bool early_stop = true;
  /// The states of the generators are kept for each region, as is the library's default. The stack
  /// draws no random numbers, so nothing depends on it but memory.
  bool keeps_random_state = false;

  std::string name() const;  // "none", "every layer", "every 2nd layer", "sqrt segments"
  fsdp::RecomputationOptions options() const;
  /// Number of layers of each region of a stack.
  std::vector<int> regions(int layers) const;
};
/// none, every layer, every 2nd, every 4th, sqrt segments.
std::vector<CheckpointPolicy> checkpoint_policies();

class StackBlockImpl : public fsdp::Module<StackBlockImpl> {
 public:
  explicit StackBlockImpl(const StackSpec& spec);
  /// [batch, time, width] -> the same.
  torch::Tensor forward(const torch::Tensor& input);

 private:
  torch::Tensor attention(const torch::Tensor& input) const;

  torch::nn::LayerNorm norm1_;
  torch::nn::Linear qkv_;
  torch::nn::Linear output_;
  torch::nn::LayerNorm norm2_;
  torch::nn::Linear up_;
  torch::nn::Linear down_;
  std::int64_t heads_;
};
FSDP_MODULE(StackBlock);

class LayerStackImpl : public fsdp::Module<LayerStackImpl> {
 public:
  /// Float32 weights that depend on the spec and the seed only. The policy is in force.
  LayerStackImpl(const StackSpec& spec, const CheckpointPolicy& policy, std::uint64_t seed);
  /// [batch, time] int64 -> the mean cross entropy of telling each token from itself.
  torch::Tensor forward(const torch::Tensor& tokens);

  const std::vector<StackBlock>& blocks() const { return blocks_; }

 private:
  CheckpointPolicy policy_;
  torch::nn::Embedding embedding_;
  std::vector<StackBlock> blocks_;
  torch::nn::Linear head_;
};
FSDP_MODULE(LayerStack);

/// [batch, time] int64.
torch::Tensor stack_tokens(const StackSpec& spec, std::uint64_t seed);

// ---- Closed forms

/// Floating-point operations of matrix products.
struct StackOperations {
  std::int64_t block = 0;  // forward of one block: 24 n C^2 + 4 n T C
  std::int64_t down = 0;   // of it, its last product: 8 n C^2
  std::int64_t head = 0;   // 2 n C V
};
StackOperations stack_operations(const StackSpec& spec);

/// Bytes of float32 that autograd keeps of the forward of one block.
struct StackBytes {
  std::int64_t input = 0;  // of one layer: 4 n C. What a region keeps
  /// Input, both norms' results, query, key and value, attention's result, x1, and eight more of
  /// the MLP: 16 inputs; the softmax's result, 4 batch H T^2; both norms' mean and deviation, 16 n.
  std::int64_t block = 0;
};
StackBytes stack_bytes(const StackSpec& spec);

}  // namespace shardproof
