// Trains a language model of bytes on a text file: nested units, parameter groups, clipping.
// Usage: fsdp_train [FILE [RANKS [STEPS]]]; without FILE it learns this text. Exit code 1: the loss
// did not fall; 2: wrong usage.

#include <fsdp/fully_shard.h>
#include <fsdp/process_group.h>
#include <fsdp/random.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <iostream>
#include <iterator>

constexpr int kContext = 32, kBatch = 8, kWidth = 64, kBytes = 256;

/// Each position is told the mean of those up to itself.
struct BlockImpl : fsdp::Module<BlockImpl> {
  BlockImpl() { mix = register_module("mix", torch::nn::Linear(2 * kWidth, kWidth)); }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto past = x.cumsum(1) / torch::arange(1, kContext + 1).view({kContext, 1});
    return x + torch::gelu(mix(torch::cat({x, past}, -1)));
  }
  torch::nn::Linear mix{nullptr};
};
FSDP_MODULE(Block);

struct LanguageModelImpl : fsdp::Module<LanguageModelImpl> {
  LanguageModelImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(kBytes, kWidth));
    first = register_module("first", Block());
    second = register_module("second", Block());
    head = register_module("head", torch::nn::Linear(kWidth, kBytes));
    auto generator = at::make_generator<at::CPUGeneratorImpl>(1);  // the same weights everywhere
    const torch::NoGradGuard no_grad;
    for (auto& parameter : parameters()) {
      parameter.normal_(0, parameter.dim() > 1 ? 0.1 : 0.0, generator);
    }
  }
  torch::Tensor forward(const torch::Tensor& x) { return head(second(first(embedding(x)))); }
  torch::nn::Embedding embedding{nullptr};
  Block first{nullptr}, second{nullptr};
  torch::nn::Linear head{nullptr};
};
FSDP_MODULE(LanguageModel);

/// Whether the loss, averaged over the ranks, is lower in the last step than in the first.
bool train(fsdp::RankContext& rank, const torch::Tensor& text, int steps) {
  LanguageModel model;
  std::vector<torch::Tensor> matrices, biases;  // only matrices decay
  for (const auto& parameter : model->parameters()) {
    (parameter.dim() > 1 ? matrices : biases).push_back(parameter);
  }
  fsdp::fully_shard(model->first, {rank.process_group});  // inner units first
  fsdp::fully_shard(model->second, {rank.process_group});
  fsdp::fully_shard(model, {rank.process_group});
  torch::optim::AdamW optimizer(matrices, torch::optim::AdamWOptions(3e-3).weight_decay(0.1));
  optimizer.add_param_group({biases, std::make_unique<torch::optim::AdamWOptions>(
                                         torch::optim::AdamWOptions(3e-3).weight_decay(0))});
  std::vector<float> losses;
  for (int step = 0; step < steps; ++step) {
    const auto start = std::chrono::steady_clock::now();
    const auto begin =  // each rank draws its own windows of the text
        torch::randint(text.size(0) - kContext, {kBatch, 1}, fsdp::rank_generator(), torch::kLong);
    const auto window = text.index({begin + torch::arange(kContext + 1)});
    const auto output = model(window.narrow(1, 0, kContext)).flatten(0, 1);
    auto loss = torch::cross_entropy_loss(output, window.narrow(1, 1, kContext).flatten());
    optimizer.zero_grad();
    loss.backward();
    fsdp::clip_grad_norm_(*model, 1.0);
    optimizer.step();
    std::vector<torch::Tensor> mean = {loss.detach()};
    rank.process_group->allreduce(mean, {c10d::ReduceOp::AVG})->wait();
    losses.push_back(mean[0].item<float>());
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    if (rank.rank == 0) {
      std::cout << "step " << step << ": loss " << losses.back() << ", "
                << int(rank.world_size * kBatch * kContext / seconds.count()) << " tokens/s\n";
    }
  }
  return losses.back() < losses.front();
}

int main(int count, char** arguments) {
  std::ifstream file(count > 1 ? arguments[1] : __FILE__, std::ios::binary);
  const std::vector<std::uint8_t> bytes(std::istreambuf_iterator<char>(file), {});
  const int ranks = count > 2 ? std::stoi(arguments[2]) : 2;
  const int steps = count > 3 ? std::stoi(arguments[3]) : 40;
  if (bytes.size() <= kContext || steps < 2) {
    std::cerr << "wanted: more than " << kContext << " bytes of text, and 2 steps or more\n";
    return 2;
  }
  const auto text = torch::tensor(bytes, torch::kLong);
  std::atomic<int> failed = 0;
  fsdp::run_ranks(ranks, [&](fsdp::RankContext& rank) { failed += !train(rank, text, steps); });
  return failed == 0 ? 0 : 1;
}
