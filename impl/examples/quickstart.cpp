// Sharded training in one file: four in-process ranks, a small network, AdamW, clipping.

#include <fsdp/fully_shard.h>
#include <fsdp/process_group.h>
#include <fsdp/random.h>
#include <torch/torch.h>

#include <iostream>

struct BlockImpl : fsdp::Module<BlockImpl> {
  explicit BlockImpl(int width) {
    linear = register_module("linear", torch::nn::Linear(width, width));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x + torch::gelu(linear(x)); }
  torch::nn::Linear linear{nullptr};
};
FSDP_MODULE(Block);

int main() {
  fsdp::run_ranks(4, [](fsdp::RankContext& rank) {
    torch::nn::Sequential layers;
    auto generator =
        at::make_generator<at::CPUGeneratorImpl>(/*seed=*/1);  // the same weights on every rank
    for (int i = 0; i < 3; ++i) {
      Block block(64);
      torch::NoGradGuard no_grad;
      block->linear->weight.normal_(0, 0.1, generator);
      block->linear->bias.zero_();
      fsdp::fully_shard(block, {rank.process_group});  // each block is a unit
      layers->push_back(block);
    }
    fsdp::FullyShardedDataParallel model(layers, {rank.process_group});
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
    for (int step = 0; step < 5; ++step) {
      const auto x =
          torch::randn({8, 64}, fsdp::rank_generator());  // each rank has data of its own
      optimizer.zero_grad();
      const auto loss = torch::mse_loss(model(x), -x);
      loss.backward();
      const auto norm = model.clip_grad_norm_(1.0);
      optimizer.step();
      if (rank.rank == 0) {
        std::cout << "step " << step << ": loss " << loss.item<float>() << ", norm "
                  << norm.item<float>() << "\n";
      }
    }
  });
}
