#include "conformance/clipping_mistakes.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace shardproof {
namespace {

double rounded_to_bfloat16(double value) {
  return static_cast<double>(c10::BFloat16(static_cast<float>(value)));
}

// Rank 0 holds a gradient of 3 and rank 1 one of 4: the true norm is 5.
const std::vector<double>& three_and_four() {
  static const std::vector<double> values = {3, 4};
  return values;
}
constexpr const char* kThreeAndFour = "rank 0 holds 3, rank 1 holds 4";

ClippingMistake of_three_and_four(std::string id, std::string mistake, std::string source,
                                  double reported, double applied, std::string outside) {
  ClippingMistake made;
  made.id = std::move(id);
  made.mistake = std::move(mistake);
  made.source = std::move(source);
  made.example = kThreeAndFour;
  made.reported = reported;
  made.true_norm = norm_of(three_and_four());
  made.applied = applied;
  made.right_applied = made.true_norm * clip_scale(made.true_norm, 1);
  made.outside = std::move(outside);
  return made;
}

ClippingMistake local_norm() {
  const double a = 3 * clip_scale(3, 1);
  const double b = 4 * clip_scale(4, 1);
  return of_three_and_four(
      "local_norm_clipping", "each rank clips by the norm of its own shards",
      "pytorch/pytorch#72548", 3, norm_of({a, b}),
      "the logged norm differs between ranks and falls with more ranks, about as 1/sqrt(W); "
      "updates "
      "are up to sqrt(W) times max_norm, and turned where ranks scale differently");
}

ClippingMistake norm_not_used() {
  return of_three_and_four("norm_logged_not_used", "the norm is computed and logged, and not used",
                           "sgl-project/SpecForge#663", 5, 5,
                           "the log is right in every digit; only the gradients that the optimizer "
                           "is given are not clipped, so spikes of the loss pass through");
}

ClippingMistake replicas_twice() {
  const double seen = mesh_norm(three_and_four(), 2, true);
  auto made = of_three_and_four(
      "replicas_counted_twice", "the sum of squares runs over replicas as well as shards",
      "ByteDance-Seed/VeOmni#184", seen, 5 * clip_scale(seen, 1),
      "the norm is sqrt(replicas) too large: 1.414 times on a 2x2 mesh, right on 1x4, twice on 4x1 "
      "(replicas x shards); clipping bites too early");
  made.example = "2 replicas of 2 shards that hold 3 and 4";
  return made;
}

ClippingMistake unsharded_many_times() {
  const double seen = mesh_norm(three_and_four(), 2, true);
  auto made = of_three_and_four(
      "no_shard_counted_w_times",
      "every rank adds the whole norm of a unit that is not sharded: it counts W times",
      "pytorch/pytorch#88955", seen, 5 * clip_scale(seen, 1),
      "the norm grows as sqrt(W) with the number of ranks, for no_shard units only");
  made.example = "2 ranks that both hold 3 and 4, of a no_shard unit";
  return made;
}

ClippingMistake epsilon_per_rank() {
  const double seen = norm_with_epsilon_per_rank({3, 4}, 1e-6);
  return of_three_and_four(
      "epsilon_per_rank", "each rank adds 1e-6 to its own norm before they are combined",
      "pytorch/pytorch#149768", seen, 5 * clip_scale(seen, 1, 0),
      "the last digits depend on the number of ranks; seen only by an exact comparison, or where "
      "gradients are as small as 1e-6");
}

ClippingMistake before_unscaling() {
  const double seen = 5 * 1024;
  auto made = of_three_and_four(
      "clipped_before_unscaling", "gradients are clipped while they bear the loss scale", "", seen,
      5 * clip_scale(seen, 1),
      "the logged norm is the loss scale times too large and jumps when the scale changes; updates "
      "are almost nothing, and training stands still");
  made.example = "rank 0 holds 3, rank 1 holds 4; the loss scale is 1024";
  return made;
}

ClippingMistake before_accumulation() {
  // After the first micro-batch: norm 3, clipped to 1. The second adds 4 on the other rank.
  const double applied = norm_of({3 * clip_scale(3, 1), 4});
  auto made = of_three_and_four("clipped_before_accumulation",
                                "clipped after the first of two micro-batches", "", 3, applied,
                                "the logged norm is that of one micro-batch; the gradient that the "
                                "optimizer is given exceeds "
                                "max_norm");
  made.example = "the first micro-batch gives rank 0 its 3, the second rank 1 its 4";
  return made;
}

ClippingMistake squares_in_float16() {
  ClippingMistake made;
  made.id = "squares_in_float16";
  made.mistake = "squares are taken and summed in float16, whose largest number is 65504";
  made.source = "facebookresearch/fairscale#263";
  made.example = "a gradient of one element, 5000";
  made.true_norm = 5000;
  made.reported = float16_norm({5000});
  made.applied = 5000 * clip_scale(made.reported, 1);
  made.right_applied = 5000 * clip_scale(5000, 1);
  made.outside =
      "the norm is inf although no gradient is, and every clipped gradient is 0; small gradients, "
      "below 2^-12.5, vanish from the norm instead";
  return made;
}

ClippingMistake one_group() {
  return of_three_and_four(
      "one_group_only",
      "only the parameters of one group are counted (say those with weight decay)", "", 3,
      5 * clip_scale(3, 1),
      "the norm is too small by the part of the other groups, the same on every rank and for every "
      "number of ranks");
}

ClippingMistake bfloat16_norms() {
  ClippingMistake made;
  made.id = "bfloat16_norm_of_norms";
  made.mistake = "norms of tensors are rounded to bfloat16, and their norm again";
  made.source = "pytorch/torchtitan#4135";
  made.example = "elements 1, 1, 6 as tensors {1}, {1, 6}; as {1, 1}, {6} the norm is 6.15625";
  made.true_norm = norm_of({1, 1, 6});
  made.reported = bfloat16_norm_of_norms({{1}, {1, 6}});
  made.applied = made.true_norm * clip_scale(made.reported, 1);
  made.right_applied = made.true_norm * clip_scale(made.true_norm, 1);
  made.outside =
      "the norm has 3 digits and depends on how elements are grouped into tensors and ranks, so it "
      "changes with the world size";
  return made;
}

}  // namespace

double clip_scale(double norm, double max_norm, double epsilon) {
  return std::min(1.0, max_norm / (norm + epsilon));
}

double norm_of(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) {
    sum += value * value;
  }
  return std::sqrt(sum);
}

double mesh_norm(const std::vector<double>& values, int replicas, bool counts_replicas) {
  const double norm = norm_of(values);
  return std::sqrt((counts_replicas ? replicas : 1) * norm * norm);
}

double float16_norm(const std::vector<double>& values) {
  c10::Half sum = 0;
  for (const double value : values) {
    const auto half = static_cast<c10::Half>(static_cast<float>(value));
    sum += half * half;
  }
  return std::sqrt(static_cast<double>(sum));
}

double bfloat16_norm_of_norms(const std::vector<std::vector<double>>& groups) {
  std::vector<double> norms;
  for (const auto& group : groups) {
    norms.push_back(rounded_to_bfloat16(norm_of(group)));
  }
  return rounded_to_bfloat16(norm_of(norms));
}

double norm_with_epsilon_per_rank(const std::vector<double>& local_norms, double epsilon) {
  auto norms = local_norms;
  for (double& norm : norms) {
    norm += epsilon;
  }
  return norm_of(norms);
}

std::vector<ClippingMistake> clipping_mistakes() {
  return {local_norm(),       norm_not_used(),    replicas_twice(),      unsharded_many_times(),
          epsilon_per_rank(), before_unscaling(), before_accumulation(), squares_in_float16(),
          one_group(),        bfloat16_norms()};
}

}  // namespace shardproof
