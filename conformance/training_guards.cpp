#include "conformance/training_guards.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <torch/torch.h>
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "conformance/comparison.h"
#include "conformance/float_format.h"
#include "reference/models.h"

namespace shardproof {
namespace {

/// Of a tensor's bytes; equal for equal bytes.
std::uint64_t digest(const at::Tensor& tensor, std::uint64_t seed) {
  const at::Tensor values = plain(tensor);
  const auto* bytes = static_cast<const char*>(values.const_data_ptr());
  std::size_t left = values.nbytes();
  std::uint64_t hash = seed ^ left;
  while (left > 0) {
    std::uint64_t word = 0;
    const std::size_t taken = std::min(left, sizeof(word));
    std::memcpy(&word, bytes, taken);
    hash = std::rotl(hash ^ word, 29) * 0x9E37'79B9'7F4A'7C15ULL;
    bytes += taken;
    left -= taken;
  }
  return hash ^ (hash >> 32);
}

bool has_nonzero(const at::Tensor& tensor) {
  const at::Tensor values = plain(tensor);
  return with_format(values.scalar_type(), [&]<typename T>(auto, const T*) {
    const T* data = values.const_data_ptr<T>();
    return std::any_of(data, data + values.numel(),
                       [](T value) { return !(static_cast<float>(value) == 0.0F); });
  });
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  // An empty tensor has no address, which memcmp must not be given.
  return a.nbytes() == b.nbytes() &&
         (a.nbytes() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

bool same_values(const TraceTensor& a, const TraceTensor& b) {
  if (a.pieces.size() != b.pieces.size()) {
    return false;
  }
  for (std::size_t i = 0; i < a.pieces.size(); ++i) {
    if (!same_bits(plain(a.pieces[i].values), plain(b.pieces[i].values))) {
      return false;
    }
  }
  return true;
}

/// "a, b, c and 4 more".
std::string listed(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 3;
  if (names.size() <= kShown) {
    return fmt::format("{}", fmt::join(names, ", "));
  }
  return fmt::format("{} and {} more", fmt::join(names.begin(), names.begin() + kShown, ", "),
                     names.size() - kShown);
}

}  // namespace

struct TrainingGuards::Impl {
  Impl(const Scenario& asked, std::map<std::string, at::Tensor> asked_start)
      : scenario(asked), start(std::move(asked_start)) {
    for (const auto& [name, parameter] : parameters_of(*make_model(asked))) {
      if (!parameter.requires_grad()) {
        frozen.insert(name);
      }
    }
  }

  Scenario scenario;
  std::map<std::string, at::Tensor> start;  // the weights before the first step, if known
  std::set<std::string> frozen;
  int left_out = 0;          // steps whose scaled gradient was not finite
  bool is_left_out = false;  // the step that is being observed
  int steps = 0;
  int last_step = -1;
  std::vector<double> losses;                 // the mean at each step
  std::string first_nonfinite;                // where a loss was not finite
  std::vector<std::uint64_t> rank_histories;  // digests of each rank's losses and outputs
  std::vector<double> last_rank_losses;
  std::map<std::string, bool> gradient_seen;  // whether it was ever not zero
  std::map<std::string, std::uint64_t> first_parameters;
  std::map<std::string, bool> parameter_moved;
  double least_norm = std::numeric_limits<double>::infinity();
  double largest_norm = -std::numeric_limits<double>::infinity();
  bool has_clipped = false;
  std::set<std::string> first_tensors;
  std::string irregularity;           // the first step that lacks something
  std::set<std::string> regions;      // that ran again, over all steps
  std::string not_again;              // the first that did not, and when
  std::set<std::string> not_by_rank;  // quantities of which only one copy was recorded

  void observe(const StepTrace& trace) {
    is_left_out = scenario.loss_scale > 0 && has_non_finite_gradient(trace);
    left_out += is_left_out ? 1 : 0;
    observe_steps(trace);
    for (const TraceTensor& tensor : trace.tensors) {
      observe(tensor, trace);
    }
    observe_regions(trace);
    ++steps;
    last_step = trace.step;
  }

  void observe(const TraceTensor& tensor, const StepTrace& trace) {
    if (tensor.placement == Placement::single && tensor.quantity != Quantity::mean_loss) {
      not_by_rank.insert(std::string(to_string(tensor.quantity)));
    }
    switch (tensor.quantity) {
      case Quantity::loss:
        observe_loss(tensor, trace.step);
        break;
      case Quantity::output:
        // The layers' outputs would say no more.
        if (tensor.name.starts_with("model@")) {
          observe_ranks(tensor);
        }
        break;
      case Quantity::gradient:
        observe_gradient(tensor, trace);
        break;
      case Quantity::total_norm:
        observe_norm(tensor);
        break;
      case Quantity::parameter:
        observe_parameter(tensor);
        break;
      default:
        break;
    }
  }

  void observe_steps(const StepTrace& trace) {
    if (irregularity.empty() && trace.step != last_step + 1) {
      irregularity = fmt::format("step {} follows step {}", trace.step, last_step);
    }
    std::set<std::string> tensors;
    std::set<Quantity> quantities;
    for (const TraceTensor& tensor : trace.tensors) {
      quantities.insert(tensor.quantity);
      // The optimizer has no state before the first step that it is not left out of.
      if (tensor.quantity != Quantity::optimizer_state || scenario.loss_scale == 0) {
        tensors.insert(fmt::format("{} \"{}\"", to_string(tensor.quantity), tensor.name));
      }
    }
    if (irregularity.empty()) {
      irregularity = missing_quantity(trace.step, quantities);
    }
    if (steps == 0) {
      first_tensors = std::move(tensors);
    } else if (irregularity.empty() && tensors != first_tensors) {
      std::vector<std::string> changed;
      std::set_symmetric_difference(tensors.begin(), tensors.end(), first_tensors.begin(),
                                    first_tensors.end(), std::back_inserter(changed));
      irregularity = fmt::format("step {} and the first step do not have the same tensors: {}",
                                 trace.step, listed(changed));
    }
  }

  /// The regions that a step must run again: those that are there and whose layers ran.
  std::set<std::string> expected_regions(const StepTrace& trace) const {
    std::set<std::string> expected;
    const auto layers = make_model(scenario)->layers();
    if (scenario.checkpointing.layers == "segments") {
      const auto count = static_cast<std::int64_t>(layers.size());
      const auto size = layers_per_segment(scenario);
      for (std::int64_t begin = 0; begin < count; begin += size) {
        expected.insert(fmt::format("blocks.{}-{}", begin, std::min(begin + size, count) - 1));
      }
      return expected;
    }
    const std::size_t each = scenario.checkpointing.layers == "alternate" ? 2 : 1;
    for (std::size_t i = 0; i < layers.size(); i += each) {
      if (trace.find(Quantity::output, layers[i].name + "@m0") != nullptr) {
        expected.insert(layers[i].name);
      }
    }
    return expected;
  }

  void observe_regions(const StepTrace& trace) {
    if (scenario.checkpointing.layers == "none") {
      return;
    }
    std::set<std::string> again;
    for (const TraceTensor& tensor : trace.tensors) {
      if (tensor.quantity == Quantity::recomputed_activation) {
        again.insert(tensor.name.substr(0, tensor.name.find('/')));
      }
    }
    for (const auto& region : expected_regions(trace)) {
      if (not_again.empty() && !again.contains(region)) {
        not_again = fmt::format("{} at step {}", region, trace.step);
      }
    }
    regions.merge(again);
  }

  std::string missing_quantity(int step, const std::set<Quantity>& seen) const {
    std::vector<Quantity> required = {Quantity::output,           Quantity::loss,
                                      Quantity::gradient,         Quantity::total_norm,
                                      Quantity::clipped_gradient, Quantity::parameter};
    const bool has_state = scenario.optimizer.kind != "sgd" || scenario.optimizer.momentum != 0;
    if (has_state && left_out <= steps) {
      required.push_back(Quantity::optimizer_state);
    }
    for (const Quantity quantity : required) {
      if (!seen.contains(quantity)) {
        return fmt::format("step {} has no {}", step, to_string(quantity));
      }
    }
    return "";
  }

  void observe_loss(const TraceTensor& tensor, int step) {
    observe_ranks(tensor);
    last_rank_losses.clear();
    double sum = 0;
    for (const Piece& piece : tensor.pieces) {
      const double loss = piece.values.to(at::kDouble).mean().item<double>();
      if (first_nonfinite.empty() && !std::isfinite(loss)) {
        first_nonfinite = fmt::format("step {}, {}: {}", step, holder_name(piece.rank), loss);
      }
      last_rank_losses.push_back(loss);
      sum += loss;
    }
    losses.push_back(sum / static_cast<double>(tensor.pieces.size()));
  }

  void observe_ranks(const TraceTensor& tensor) {
    rank_histories.resize(std::max(rank_histories.size(), tensor.pieces.size()));
    for (std::size_t i = 0; i < tensor.pieces.size(); ++i) {
      rank_histories[i] = digest(tensor.pieces[i].values, rank_histories[i]);
    }
  }

  void observe_gradient(const TraceTensor& gradient, const StepTrace& trace) {
    bool& seen = gradient_seen[gradient.name];
    // Of a gradient that is not finite neither its size nor clipping says anything.
    if (is_left_out) {
      return;
    }
    for (const Piece& piece : gradient.pieces) {
      seen = seen || has_nonzero(piece.values);
    }
    if (!has_clipped && scenario.max_norm > 0) {
      const TraceTensor* clipped = trace.find(Quantity::clipped_gradient, gradient.name);
      has_clipped = clipped != nullptr && !same_values(gradient, *clipped);
    }
  }

  void observe_norm(const TraceTensor& tensor) {
    for (const Piece& piece : tensor.pieces) {
      const double norm = piece.values.to(at::kDouble).max().item<double>();
      least_norm = std::min(least_norm, norm);
      largest_norm = std::max(largest_norm, norm);
    }
  }

  void observe_parameter(const TraceTensor& tensor) {
    std::uint64_t hash = 0;
    for (const Piece& piece : tensor.pieces) {
      hash = digest(piece.values, hash);
    }
    const auto [first, is_new] = first_parameters.emplace(tensor.name, hash);
    bool& moved = parameter_moved[tensor.name];
    moved = moved || (is_new ? has_left_start(tensor) : first->second != hash);
  }

  bool has_left_start(const TraceTensor& tensor) const {
    const auto found = start.find(tensor.name);
    if (found == start.end()) {
      return false;
    }
    try {
      const at::Tensor now = plain(assemble(tensor));
      const at::Tensor before = plain(found->second);
      return now.scalar_type() != before.scalar_type() || !same_bits(now, before);
    } catch (const TraceError&) {
      return true;  // pieces that make no whole; the comparison says so
    }
  }

  /// Frozen, or without a gradient in every step.
  bool must_stay(const std::string& parameter) const {
    return frozen.contains(parameter) || !gradient_seen.contains(parameter);
  }

  Verdict verdict(std::string_view name, Quantity quantity, Outcome outcome,
                  std::string message) const {
    Verdict result;
    result.check = check_name(scenario, "guard", name, "");
    result.reference = "guard";
    result.step = std::max(last_step, 0);
    result.quantity = quantity;
    result.name = name;
    result.rule = RuleKind::guard;
    result.rule_source = "without it the other checks could not have failed";
    result.outcome = outcome;
    result.message = std::move(message);
    return result;
  }

  static Outcome passed_if(bool condition) { return condition ? Outcome::passed : Outcome::failed; }

  Verdict losses_finite() const {
    if (losses.empty()) {
      return verdict("losses_finite", Quantity::loss, Outcome::failed, "no loss was seen");
    }
    return verdict("losses_finite", Quantity::loss, passed_if(first_nonfinite.empty()),
                   first_nonfinite.empty()
                       ? fmt::format("the mean loss is finite in all {} steps, {} at the last",
                                     losses.size(), losses.back())
                       : "a loss is not finite: " + first_nonfinite);
  }

  Verdict losses_moved() const {
    if (losses.size() < 2) {
      return verdict("losses_moved", Quantity::loss, Outcome::not_applicable,
                     fmt::format("{} steps; it takes two", losses.size()));
    }
    const auto [least, largest] = std::minmax_element(losses.begin(), losses.end());
    return verdict(
        "losses_moved", Quantity::loss, passed_if(*least != *largest),
        *least != *largest
            ? fmt::format("the mean loss went from {} to {}", losses.front(), losses.back())
            : fmt::format("the mean loss is {} in all {} steps", losses.front(), losses.size()));
  }

  Verdict gradients_not_zero() const {
    std::vector<std::string> zero;
    for (const auto& [name, seen] : gradient_seen) {
      if (!seen) {
        zero.push_back(name);
      }
    }
    if (gradient_seen.empty()) {
      return verdict("gradients_not_zero", Quantity::gradient, Outcome::failed,
                     "no gradient was seen");
    }
    return verdict(
        "gradients_not_zero", Quantity::gradient, passed_if(zero.empty()),
        zero.empty()
            ? fmt::format("each of {} gradients was not zero at least once", gradient_seen.size())
            : fmt::format("{} of {} gradients were zero in all {} steps: {}", zero.size(),
                          gradient_seen.size(), steps, listed(zero)));
  }

  Verdict parameters_moved() const {
    if (steps < 2) {
      return verdict("parameters_moved", Quantity::parameter, Outcome::not_applicable,
                     fmt::format("{} steps; it takes two", steps));
    }
    std::vector<std::string> still;
    std::size_t trained = 0;
    for (const auto& [name, moved] : parameter_moved) {
      trained += must_stay(name) ? 0 : 1;
      if (!moved && !must_stay(name)) {
        still.push_back(name);
      }
    }
    if (parameter_moved.empty()) {
      return verdict("parameters_moved", Quantity::parameter, Outcome::failed,
                     "no parameter was seen");
    }
    return verdict(
        "parameters_moved", Quantity::parameter, passed_if(still.empty()),
        still.empty() ? fmt::format("each of {} parameters changed", trained)
                      : fmt::format("{} of {} parameters are the same after each of {} steps{}: {}",
                                    still.size(), trained, steps,
                                    left_out == 0 ? ""
                                                  : fmt::format(" ({} were left out because a "
                                                                "scaled gradient was not finite)",
                                                                left_out),
                                    listed(still)));
  }

  Verdict frozen_parameters_stayed() const {
    constexpr std::string_view kName = "frozen_parameters_stayed";
    std::vector<std::string> moved_ones;
    std::size_t count = 0;
    for (const auto& [name, moved] : parameter_moved) {
      count += must_stay(name) ? 1 : 0;
      if (moved && must_stay(name)) {
        moved_ones.push_back(name);
      }
    }
    for (const auto& name : frozen) {
      if (gradient_seen.contains(name)) {
        moved_ones.push_back(name + " (it has a gradient)");
      }
    }
    if (count == 0) {
      return verdict(kName, Quantity::parameter, Outcome::not_applicable,
                     "every parameter has a gradient");
    }
    return verdict(
        kName, Quantity::parameter, passed_if(moved_ones.empty()),
        moved_ones.empty()
            ? fmt::format("each of {} parameters that are frozen or have no gradient stayed", count)
            : fmt::format(
                  "{} of {} parameters that are frozen or have no gradient changed; wanted: "
                  "the same bits after each of {} steps: {}",
                  moved_ones.size(), count, steps, listed(moved_ones)));
  }

  Verdict clipping_bit() const {
    if (scenario.max_norm == 0) {
      return verdict("clipping_bit", Quantity::clipped_gradient, Outcome::not_applicable,
                     "no clipping was asked for");
    }
    const std::string seen = fmt::format("norms from {} to {}, max_norm {}", least_norm,
                                         largest_norm, scenario.max_norm);
    return verdict("clipping_bit", Quantity::clipped_gradient, passed_if(has_clipped),
                   has_clipped ? "gradients were clipped: " + seen
                               : "clipping was asked for and never exercised, every clipped "
                                 "gradient equals the gradient: " +
                                     seen);
  }

  Verdict ranks_had_different_data() const {
    constexpr std::string_view kName = "ranks_had_different_data";
    if (scenario.world_size == 1) {
      return verdict(kName, Quantity::loss, Outcome::not_applicable, "there is one rank");
    }
    if (rank_histories.size() != static_cast<std::size_t>(scenario.world_size)) {
      return verdict(kName, Quantity::loss, Outcome::failed,
                     fmt::format("{} ranks' losses were seen, the world size is {}",
                                 rank_histories.size(), scenario.world_size));
    }
    std::map<std::uint64_t, std::size_t> first_with;
    for (std::size_t rank = 0; rank < rank_histories.size(); ++rank) {
      const auto [other, is_new] = first_with.emplace(rank_histories[rank], rank);
      if (!is_new) {
        return verdict(
            kName, Quantity::loss, Outcome::failed,
            fmt::format(
                "ranks {} and {} have the same losses and outputs in all {} steps, {} at the last",
                other->second, rank, steps,
                rank < last_rank_losses.size() ? last_rank_losses[rank] : NAN));
      }
    }
    return verdict(
        kName, Quantity::loss, Outcome::passed,
        fmt::format("no two of {} ranks have the same losses and outputs", rank_histories.size()));
  }

  Verdict regions_ran_again() const {
    return verdict(
        "regions_ran_again", Quantity::recomputed_activation,
        passed_if(not_again.empty() && !regions.empty()),
        not_again.empty()
            ? fmt::format("each of {} checkpointed regions ran again in every step", regions.size())
            : "checkpointing was asked for, and nothing was recomputed of " + not_again);
  }

  Verdict every_step_complete() const {
    std::string problem = irregularity;
    if (problem.empty() && steps != scenario.steps) {
      problem = fmt::format("{} steps were seen, the scenario has {}", steps, scenario.steps);
    }
    return verdict("every_step_complete", Quantity::output, passed_if(problem.empty()),
                   problem.empty() ? fmt::format("each of {} steps has the same {} tensors", steps,
                                                 first_tensors.size())
                                   : problem);
  }

  Verdict every_rank_recorded() const {
    constexpr std::string_view kName = "every_rank_recorded";
    if (scenario.world_size == 1) {
      return verdict(kName, Quantity::parameter, Outcome::not_applicable, "there is one rank");
    }
    return verdict(
        kName, Quantity::parameter, passed_if(not_by_rank.empty() && steps > 0),
        not_by_rank.empty()
            ? fmt::format("every tensor says which of {} ranks holds what", scenario.world_size)
            : fmt::format(
                  "one copy stands for all {} ranks, so the others were not compared, of: {}",
                  scenario.world_size, fmt::join(not_by_rank, ", ")));
  }
};

TrainingGuards::TrainingGuards(const Scenario& scenario, std::map<std::string, at::Tensor> start)
    : impl_(std::make_unique<Impl>(scenario, std::move(start))) {}
TrainingGuards::~TrainingGuards() = default;

void TrainingGuards::observe(const StepTrace& subject) {
  impl_->observe(subject);
}

std::vector<Verdict> TrainingGuards::verdicts() const {
  std::vector<Verdict> verdicts = {impl_->losses_finite(),
                                   impl_->losses_moved(),
                                   impl_->gradients_not_zero(),
                                   impl_->parameters_moved(),
                                   impl_->frozen_parameters_stayed(),
                                   impl_->clipping_bit(),
                                   impl_->ranks_had_different_data(),
                                   impl_->every_rank_recorded(),
                                   impl_->every_step_complete()};
  if (impl_->scenario.checkpointing.layers != "none") {
    verdicts.push_back(impl_->regions_ran_again());
  }
  return verdicts;
}

}  // namespace shardproof
