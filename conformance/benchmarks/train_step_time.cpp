// Times training steps of a scenario on in-process ranks, for ci/peers.
// Usage: train_step_time SCENARIO.json WARM_UP_STEPS WEIGHTS; writes the weights that training
// starts from to the file WEIGHTS, for torch.load, and prints a line of JSON:
//   {"parameters": 3307008, "loss": 5.6, "seconds": [0.31, ...]}
// `loss` is rank 0's in the last step; `seconds` has one entry for each step after the warm-up,
// from the moment when all ranks are ready to the moment when all are done: zero_grad, forward,
// backward, clipping, the optimizer's step. Making the batch is left out.

#include <fsdp/fully_shard.h>
#include <fsdp/process_group.h>
#include <torch/torch.h>

#include <chrono>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "reference/data.h"
#include "reference/models.h"
#include "reference/scenario.h"

namespace shardproof {
namespace {

struct Timing {
  std::int64_t parameters = 0;
  double loss = 0;
  std::vector<double> seconds;
};

/// Refuses what this program, and the peers' one, would silently leave out.
void require_supported(const Scenario& scenario) {
  if (scenario.optimizer.kind != "adamw" || scenario.micro_batches != 1 || scenario.max_norm == 0 ||
      scenario.model.dropout != 0) {
    throw ScenarioError(
        "train_step_time: wanted: adamw, one micro-batch, clipping and no dropout, which is what "
        "the peers' program does");
  }
}

Timing time_rank(fsdp::RankContext& context, const Scenario& scenario, int warm_up) {
  Timing timing;
  auto model = make_model(scenario);
  load_parameters(*model, initial_parameters(scenario));
  for (const auto& parameter : model->parameters()) {
    timing.parameters += parameter.numel();
  }
  if (scenario.wrap == "layer") {
    for (const auto& layer : model->layers()) {
      fsdp::fully_shard(layer.module, {context.process_group});
    }
  }
  fsdp::fully_shard(model, {context.process_group});
  const auto& settings = scenario.optimizer;
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(settings.lr)
                                                         .betas({settings.beta1, settings.beta2})
                                                         .eps(settings.eps)
                                                         .weight_decay(settings.weight_decay));
  const Dataset data(scenario);
  for (int step = 0; step < warm_up + scenario.steps; ++step) {
    const auto batch = data.batch(step, 0, context.rank);
    context.process_group->barrier()->wait();
    const auto start = std::chrono::steady_clock::now();
    optimizer.zero_grad();
    auto loss = model->loss(model(batch.input), batch.target);
    loss.backward();
    fsdp::clip_grad_norm_(*model, scenario.max_norm);
    optimizer.step();
    context.process_group->barrier()->wait();
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
    if (step >= warm_up) {
      timing.seconds.push_back(passed.count());
    }
    timing.loss = loss.item<double>();
  }
  return timing;
}

void save_weights(const Scenario& scenario, const std::string& path) {
  c10::Dict<std::string, torch::Tensor> weights;
  for (const auto& [name, value] : initial_parameters(scenario)) {
    weights.insert(name, value);
  }
  const auto bytes = torch::pickle_save(weights);
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file) {
    throw fsdp::UsageError("train_step_time: cannot write " + path);
  }
}

int main_program(int count, char** arguments) {
  if (count != 4) {
    std::cerr << "usage: train_step_time SCENARIO.json WARM_UP_STEPS WEIGHTS\n";
    return 2;
  }
  const auto scenario = load_scenario(arguments[1]);
  require_supported(scenario);
  save_weights(scenario, arguments[3]);
  const int warm_up = std::stoi(arguments[2]);
  Timing timing;
  fsdp::run_ranks(scenario.world_size, [&](fsdp::RankContext& context) {
    auto mine = time_rank(context, scenario, warm_up);
    if (context.rank == 0) {
      timing = std::move(mine);
    }
  });
  std::cout << nlohmann::json{{"parameters", timing.parameters},
                              {"loss", timing.loss},
                              {"seconds", timing.seconds}}
            << "\n";
  return 0;
}

}  // namespace
}  // namespace shardproof

int main(int count, char** arguments) {
  try {
    return shardproof::main_program(count, arguments);
  } catch (const fsdp::UsageError& error) {
    std::cerr << error.what() << "\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "train_step_time: " << error.what() << "\n";
    return 70;
  }
}
