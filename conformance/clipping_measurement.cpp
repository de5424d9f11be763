#include "conformance/clipping_measurement.h"

#include <fmt/format.h>
#include <fsdp/exact_sum.h>
#include <fsdp/fully_shard.h>
#include <fsdp/process_group.h>
#include <fsdp/safetensors.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numbers>

#include "conformance/fsdp_subject.h"
#include "conformance/tolerance.h"
#include "reference/data.h"
#include "reference/models.h"
#include "reference/trainer.h"

namespace shardproof {
namespace {

using Whole = std::map<std::string, torch::Tensor>;

/// A rank's pieces of the gradients, by parameter.
struct Piece {
  std::string name;
  std::int64_t begin = 0;
  torch::Tensor values;
};

/// What one rank sees of a step.
struct RankStep {
  double local_norm = 0;
  double local_square = 0;
  std::int64_t elements = 0;
  std::int64_t tensors = 0;
  double true_norm = 0;
  std::vector<Piece> right;
  std::vector<Piece> wrong;
  double loss = 0;
  std::vector<Piece> parameters;
};

double scale_of(double max_norm, double norm) {
  return std::min(1.0, max_norm / (norm + 1e-6));
}

void shard(Model& model, const Scenario& scenario, const fsdp::RankContext& context) {
  fsdp::FullyShardOptions options;
  for (const auto strategy :
       {fsdp::ShardingStrategy::full_shard, fsdp::ShardingStrategy::shard_grad_op,
        fsdp::ShardingStrategy::no_shard, fsdp::ShardingStrategy::hybrid_shard,
        fsdp::ShardingStrategy::hybrid_shard_zero2}) {
    if (scenario.strategy == fsdp::to_string(strategy)) {
      options.strategy = strategy;
    }
  }
  if (scenario.strategy.starts_with("hybrid")) {
    options.mesh = fsdp::make_device_mesh(context.process_group, scenario.replicas);
  } else {
    options.process_group = context.process_group;
  }
  if (scenario.wrap == "layer") {
    for (const auto& layer : model->layers()) {
      fsdp::fully_shard(layer.module, options);
    }
  }
  fsdp::fully_shard(model, options);
}

std::vector<Piece> gradients_of(const std::vector<fsdp::ShardPlacement>& placements) {
  std::vector<Piece> pieces;
  for (const auto& placement : placements) {
    if (placement.parameter.grad().defined()) {
      pieces.push_back({placement.name, placement.begin, placement.parameter.grad().clone()});
    }
  }
  return pieces;
}

/// libtorch's own routine on copies of the shards: what a program that treats the sharded model as
/// an ordinary one does.
double clip_by_local_norm(std::vector<Piece>& pieces, double max_norm) {
  std::vector<torch::Tensor> parameters;
  for (auto& piece : pieces) {
    auto parameter = torch::empty_like(piece.values);
    parameter.mutable_grad() = piece.values;
    parameters.push_back(parameter);
  }
  return torch::nn::utils::clip_grad_norm_(parameters, max_norm);
}

/// The gradients that are there now, clipped both ways; afterwards the model has the right ones.
RankStep clip_both_ways(torch::nn::Module& model,
                        const std::vector<fsdp::ShardPlacement>& placements, double max_norm) {
  const torch::NoGradGuard no_grad;
  RankStep seen;
  seen.wrong = gradients_of(placements);
  fsdp::ExactSquareSum square;
  for (const auto& piece : seen.wrong) {
    square.add(piece.values);
    seen.elements += piece.values.numel();
    ++seen.tensors;
  }
  seen.local_square = square.value();
  seen.local_norm = clip_by_local_norm(seen.wrong, max_norm);
  seen.true_norm = fsdp::clip_grad_norm_(model, max_norm).item<double>();
  seen.right = gradients_of(placements);
  return seen;
}

/// The whole tensors from the pieces of the ranks that hold everything once, flattened.
Whole assemble_pieces(const std::vector<RankStep>& ranks, std::size_t shards,
                      std::vector<Piece> RankStep::*part) {
  std::map<std::string, std::vector<torch::Tensor>> pieces;
  for (std::size_t rank = 0; rank < shards; ++rank) {
    for (const auto& piece : ranks[rank].*part) {
      pieces[piece.name].push_back(piece.values.flatten());
    }
  }
  Whole whole;
  for (const auto& [name, list] : pieces) {
    whole[name] = torch::cat(list);
  }
  return whole;
}

torch::Tensor as_one(const Whole& whole) {
  std::vector<torch::Tensor> parts;
  for (const auto& [name, values] : whole) {
    parts.push_back(values.flatten().to(torch::kDouble));
  }
  return torch::cat(parts);
}

/// Degrees. Accurate for small angles too (Kahan: How futile are mindless assessments of roundoff,
/// 2006, section 12).
double angle_between(const torch::Tensor& a, const torch::Tensor& b) {
  const auto a_length = a.norm().item<double>();
  const auto b_length = b.norm().item<double>();
  if (a_length == 0 || b_length == 0) {
    return 0;
  }
  const auto x = a / a_length;
  const auto y = b / b_length;
  return 2 * std::atan2((x - y).norm().item<double>(), (x + y).norm().item<double>()) * 180 /
         std::numbers::pi;
}

std::int64_t differing_bits(const torch::Tensor& got, const torch::Tensor& want) {
  const auto bits = [](const torch::Tensor& tensor) {
    const auto size = tensor.element_size();
    return tensor.contiguous().view(size == 8   ? torch::kLong
                                    : size == 4 ? torch::kInt
                                                : torch::kShort);
  };
  return bits(got).ne(bits(want)).sum().item<std::int64_t>();
}

/// Fills in what comes from the ranks; what one device has is left.
ClippingStep step_of(const Scenario& scenario, const std::vector<RankStep>& ranks) {
  ClippingStep step;
  step.world_size = scenario.world_size;
  step.shards = layout_of(scenario).shards;
  step.dtype = scenario.dtype;
  step.max_norm = scenario.max_norm;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const auto& seen = ranks[rank];
    step.local_norms.push_back(seen.local_norm);
    step.local_squares.push_back(seen.local_square);
    step.local_scales.push_back(scale_of(scenario.max_norm, seen.local_norm));
    step.true_norms.push_back(seen.true_norm);
    step.most_elements = std::max(step.most_elements, seen.elements);
    step.most_tensors = std::max(step.most_tensors, seen.tensors);
  }
  step.true_scale = scale_of(scenario.max_norm, step.true_norm());
  const auto shards = static_cast<std::size_t>(step.shards);
  const auto right = as_one(assemble_pieces(ranks, shards, &RankStep::right));
  const auto wrong = as_one(assemble_pieces(ranks, shards, &RankStep::wrong));
  step.right_length = right.norm().item<double>();
  step.wrong_length = wrong.norm().item<double>();
  step.angle = angle_between(right, wrong);
  return step;
}

/// Every rank's clipped pieces beside those of one device.
void hold_to_one_device(ClippingStep& step, const std::vector<RankStep>& ranks, double norm,
                        const Whole& clipped) {
  step.single_norm = norm;
  for (const auto& rank : ranks) {
    for (const auto& piece : rank.right) {
      const auto want =
          clipped.at(piece.name).flatten().narrow(0, piece.begin, piece.values.numel());
      step.elements += piece.values.numel();
      step.differing += differing_bits(piece.values.flatten(), want);
    }
  }
}

Whole planted_gradients(const NamedTensors& parameters, PlantedGradients kind, std::uint64_t seed) {
  Whole whole;
  std::uint64_t number = 0;
  for (const auto& [name, parameter] : parameters) {
    auto gradient = torch::zeros(parameter.sizes(), torch::kDouble);
    auto* values = gradient.data_ptr<double>();
    const bool is_first_layer = name.starts_with("layers.0.");
    for (std::int64_t i = 0; i < gradient.numel(); ++i, ++number) {
      const auto hash = hash_counters(seed, {number});
      if (kind == PlantedGradients::even) {
        values[i] = (hash & 1) != 0 ? 0x1p-6 : -0x1p-6;
      } else if (kind == PlantedGradients::one_layer && is_first_layer) {
        // Box and Muller, from the two halves of the hash.
        const double u = (static_cast<double>(hash >> 32) + 0.5) * 0x1p-32;
        const double v = static_cast<double>(hash & 0xFFFFFFFF) * 0x1p-32;
        values[i] = std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v) * 0x1p-5;
      }
    }
    if (kind == PlantedGradients::one_element &&
        number == static_cast<std::uint64_t>(gradient.numel())) {
      values[0] = 2;
    }
    whole[name] = gradient.to(parameter.scalar_type());
  }
  return whole;
}

/// One rank's training: a RankStep for each step.
std::vector<RankStep> train_rank(const Scenario& scenario, const Whole& initial, ClipBy clip_by,
                                 const fsdp::RankContext& context) {
  auto model = make_model(scenario);
  load_parameters(*model, initial);
  shard(model, scenario, context);
  const auto placements = fsdp::shard_placements(*model);
  std::vector<torch::Tensor> parameters;
  for (const auto& placement : placements) {
    parameters.push_back(placement.parameter);
  }
  const auto optimizer = make_optimizer(scenario.optimizer, parameters);
  const Dataset data(scenario);
  std::vector<RankStep> steps;
  for (int step = 0; step < scenario.steps; ++step) {
    optimizer->zero_grad();
    const auto batch = data.batch(step, 0, context.rank);
    const auto loss = model->loss(model(batch.input), batch.target);
    loss.backward();
    auto seen = clip_both_ways(*model, placements, scenario.max_norm);
    seen.loss = loss.item<double>();
    if (clip_by == ClipBy::local_norms) {
      for (const auto& placement : placements) {
        const auto piece =
            std::find_if(seen.wrong.begin(), seen.wrong.end(),
                         [&](const Piece& each) { return each.name == placement.name; });
        if (piece != seen.wrong.end()) {
          const torch::NoGradGuard no_grad;
          placement.parameter.mutable_grad().copy_(piece->values);
        }
      }
    }
    optimizer->step();
    for (const auto& placement : placements) {
      seen.parameters.push_back(
          {placement.name, placement.begin, placement.parameter.detach().clone()});
    }
    steps.push_back(std::move(seen));
  }
  return steps;
}

fsdp::RunRanksOptions rank_options(std::chrono::seconds timeout, std::uint64_t seed) {
  fsdp::RunRanksOptions options;
  options.group.timeout = timeout;
  options.seed = seed;
  return options;
}

std::string variant_of(const Scenario& scenario) {
  return fmt::format("{}.w{}.{}{}_{}", scenario.dtype, scenario.world_size, scenario.strategy,
                     scenario.replicas > 1 ? fmt::format("_replicas{}", scenario.replicas) : "",
                     scenario.wrap);
}

Check check_of(const ClippingStep& step, std::string_view behaviour, bool held,
               std::string message) {
  return {fmt::format("claims.clipping.{}.{}.step{}", behaviour, step.name, step.step), held,
          std::move(message)};
}

}  // namespace

std::string_view to_string(PlantedGradients gradients) {
  switch (gradients) {
    case PlantedGradients::even:
      return "even";
    case PlantedGradients::one_layer:
      return "one_layer";
    case PlantedGradients::one_element:
      return "one_element";
  }
  return "";
}

double ClippingStep::largest_ratio() const {
  return *std::max_element(local_norms.begin(), local_norms.end()) / true_norm();
}

double ClippingStep::smallest_ratio() const {
  return *std::min_element(local_norms.begin(), local_norms.end()) / true_norm();
}

double ClippingStep::combined_norm() const {
  double sum = 0;
  for (int rank = 0; rank < shards; ++rank) {
    const auto norm = local_norms[static_cast<std::size_t>(rank)];
    sum += norm * norm;
  }
  return std::sqrt(sum);
}

// libtorch's norm of n elements is computed in float32 at least and rounded to the dtype: whatever
// the order of its sum, the sum of squares is off by at most gamma(n) (Higham 2002, section 4.2:
// n - 1 additions and a squaring), its root by half of that and u, and the rounding to the dtype
// adds v. The norm of k such norms adds gamma(k) and u and v again, and the true norm has one
// rounding to the dtype, v. Combining the ranks' norms in float64 keeps the largest of their
// errors.
double ClippingStep::combined_bound() const {
  const double u = unit_roundoff(dtype == "float64" ? torch::kDouble : torch::kFloat);
  const double v = unit_roundoff(dtype_named(dtype));
  return gamma(most_elements + most_tensors + 2, u) + gamma(3, v) +
         gamma(shards + 2, unit_roundoff(torch::kDouble));
}

ClippingStep measure_planted(const ClippingCase& clipping_case) {
  Scenario scenario = clipping_scenario(clipping_case.world_size, "sgd", 1, clipping_case.seed);
  scenario.strategy = clipping_case.strategy;
  scenario.replicas = clipping_case.replicas;
  scenario.wrap = clipping_case.wrap;
  scenario.max_norm = clipping_case.max_norm;
  validate(scenario);
  // After validate: scenarios of 16-bit parameters are refused for their optimizers, and none is
  // run here.
  scenario.dtype = clipping_case.dtype;
  const auto initial = initial_parameters(scenario);
  const auto gradients = planted_gradients(parameters_of(*make_model(scenario)),
                                           clipping_case.gradients, clipping_case.seed);
  std::vector<RankStep> ranks(static_cast<std::size_t>(scenario.world_size));
  fsdp::run_ranks(
      scenario.world_size,
      [&](fsdp::RankContext& context) {
        auto model = make_model(scenario);
        load_parameters(*model, initial);
        shard(model, scenario, context);
        const auto placements = fsdp::shard_placements(*model);
        for (const auto& placement : placements) {
          torch::Tensor parameter = placement.parameter;
          parameter.mutable_grad() = gradients.at(placement.name)
                                         .flatten()
                                         .narrow(0, placement.begin, placement.numel)
                                         .clone()
                                         .view_as(parameter);
        }
        ranks[static_cast<std::size_t>(context.rank)] =
            clip_both_ways(*model, placements, scenario.max_norm);
      },
      rank_options(clipping_case.timeout, clipping_case.seed));

  auto step = step_of(scenario, ranks);
  step.name = fmt::format("{}.{}", to_string(clipping_case.gradients), variant_of(scenario));
  std::vector<torch::Tensor> list;
  fsdp::ExactSquareSum square;
  for (const auto& [name, gradient] : gradients) {
    list.push_back(gradient);
    square.add(gradient);
  }
  step.true_square = square.value();
  // What one device does (reference/README.md, "Clipping").
  const auto norm = exact_norm(list);
  const auto coefficient =
      torch::full_like(norm, scenario.max_norm).div_(norm + 1e-6).clamp_(std::nullopt, 1.0);
  Whole clipped;
  for (const auto& [name, gradient] : gradients) {
    clipped[name] = gradient * coefficient;
  }
  hold_to_one_device(step, ranks, norm.item<double>(), clipped);
  return step;
}

Scenario clipping_scenario(int world_size, const std::string& optimizer, int steps,
                           std::uint64_t seed) {
  Scenario scenario;
  scenario.model.kind = "mlp";
  scenario.model.sizes = {64, 64, 64, 64};  // 3 times 4160 elements: 65 for each of 64 ranks
  scenario.data.kind = "synthetic";
  scenario.world_size = world_size;
  scenario.batch = 4;
  scenario.steps = steps;
  scenario.seed = seed;
  scenario.optimizer.kind = optimizer;
  scenario.optimizer.lr = optimizer == "sgd" ? 0.5 : 3e-3;
  scenario.optimizer.momentum = optimizer == "sgd" ? 0.9 : 0;
  scenario.max_norm = 0.02;
  return scenario;
}

Scenario drift_scenario(int world_size, const std::string& optimizer, int steps, std::uint64_t seed,
                        const std::filesystem::path& folder) {
  const auto text = folder / "sums.txt";
  std::string sums;
  for (std::uint64_t i = 0; i < 4000; ++i) {
    const auto hash = hash_counters(seed, {i});
    const auto a = hash % 10;
    const auto b = hash / 10 % 10;
    sums += fmt::format("{} and {} make {}.\n", a, b, a + b);
  }
  fsdp::write_file(text, {sums});
  Scenario scenario;
  scenario.model.layers = 1;
  scenario.model.width = 32;
  scenario.model.heads = 2;
  scenario.model.context = 32;
  scenario.data.corpus = {text.string()};
  scenario.world_size = world_size;
  scenario.batch = 2;
  scenario.steps = steps;
  scenario.seed = seed;
  scenario.optimizer.kind = optimizer;
  scenario.optimizer.lr = optimizer == "sgd" ? 0.1 : 3e-3;
  scenario.optimizer.momentum = optimizer == "sgd" ? 0.9 : 0;
  scenario.max_norm = 0.3;
  return scenario;
}

ClippingRun measure_training(const Scenario& scenario, ClipBy clip_by,
                             std::chrono::seconds timeout) {
  validate(scenario);
  const auto initial = initial_parameters(scenario);
  std::vector<std::vector<RankStep>> by_rank(static_cast<std::size_t>(scenario.world_size));
  fsdp::run_ranks(
      scenario.world_size,
      [&](fsdp::RankContext& context) {
        by_rank[static_cast<std::size_t>(context.rank)] =
            train_rank(scenario, initial, clip_by, context);
      },
      rank_options(timeout, scenario.seed));

  ClippingRun run;
  ReferenceTrainer reference(scenario, ReferenceMode::replay, initial);
  for (int step = 0; step < scenario.steps; ++step) {
    std::vector<RankStep> ranks;
    double loss = 0;
    for (auto& steps : by_rank) {
      ranks.push_back(std::move(steps[static_cast<std::size_t>(step)]));
      loss += ranks.back().loss / scenario.world_size;
    }
    auto seen = step_of(scenario, ranks);
    seen.step = step;
    seen.name = fmt::format("training_{}.{}", scenario.optimizer.kind, variant_of(scenario));
    const auto shards = static_cast<std::size_t>(seen.shards);
    if (clip_by == ClipBy::true_norm) {
      const auto trace = reference.step(step);
      Whole clipped;
      fsdp::ExactSquareSum square;
      for (const auto& tensor : trace.tensors) {
        if (tensor.quantity == Quantity::clipped_gradient) {
          clipped[tensor.name] = assemble(tensor);
        } else if (tensor.quantity == Quantity::gradient) {
          square.add(assemble(tensor));
        }
      }
      seen.true_square = square.value();
      hold_to_one_device(seen, ranks,
                         assemble(*trace.find(Quantity::total_norm, "total_norm")).item<double>(),
                         clipped);
    }
    run.losses.push_back(loss);
    const auto whole = as_one(assemble_pieces(ranks, shards, &RankStep::parameters));
    run.parameters.emplace_back(whole.data_ptr<double>(), whole.data_ptr<double>() + whole.numel());
    run.steps.push_back(std::move(seen));
  }
  return run;
}

std::vector<Check> check_clipping(const ClippingStep& step) {
  std::vector<Check> checks;
  const auto first = step.local_squares.begin();
  const auto holders = std::count_if(first, first + step.shards, [](double s) { return s > 0; });
  bool at_most = true;
  bool strictly = true;
  std::size_t worst = 0;
  for (std::size_t rank = 0; rank < step.local_squares.size(); ++rank) {
    at_most = at_most && step.local_squares[rank] <= step.true_square;
    strictly = strictly && step.local_squares[rank] < step.true_square;
    if (step.local_squares[rank] > step.local_squares[worst]) {
      worst = rank;
    }
  }
  const auto largest =
      fmt::format("rank {} has the largest local norm, {:.9g}; the true norm is {:.9g}", worst,
                  std::sqrt(step.local_squares[worst]), std::sqrt(step.true_square));
  checks.push_back(check_of(step, "local_at_most_true", at_most, largest));
  checks.push_back(check_of(
      step, "equal_only_where_one_rank_holds_everything", holders > 1 ? strictly : !strictly,
      fmt::format("{} of {} ranks that hold everything once hold a gradient that is not zero; {}",
                  holders, step.shards, largest)));
  const double error = std::fabs(step.combined_norm() - step.true_norm());
  const double allowed = step.combined_bound() * step.true_norm();
  checks.push_back(check_of(
      step, "squares_of_local_norms_add_up", error <= allowed,
      fmt::format(
          "sqrt(sum of local^2) is {:.9g}, the true norm {:.9g}; apart {:.3g}, allowed {:.3g}",
          step.combined_norm(), step.true_norm(), error, allowed)));
  const auto other = std::find_if(step.true_norms.begin(), step.true_norms.end(),
                                  [&](double norm) { return norm != step.single_norm; });
  checks.push_back(
      check_of(step, "true_norm_is_that_of_one_device", other == step.true_norms.end(),
               other == step.true_norms.end()
                   ? fmt::format("{:.9g} on every rank and on one device", step.single_norm)
                   : fmt::format("rank {} has {:.17g}; wanted: {:.17g}, as on one device",
                                 other - step.true_norms.begin(), *other, step.single_norm)));
  checks.push_back(check_of(step, "clipped_gradients_are_those_of_one_device",
                            step.elements > 0 && step.differing == 0,
                            fmt::format("{} of {} elements differ from one device's in any bit",
                                        step.differing, step.elements)));
  return checks;
}

}  // namespace shardproof
