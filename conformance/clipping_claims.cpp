#include "conformance/clipping_claims.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "conformance/clipping_measurement.h"
#include "conformance/clipping_mistakes.h"
#include "conformance/clipping_peers.h"
#include "conformance/html.h"
#include "conformance/plot.h"
#include "conformance/scratch_folder.h"

namespace shardproof {
namespace {

using nlohmann::json;

/// One kind of gradient over the world sizes.
struct Family {
  std::string name;  // for legends
  std::vector<ClippingStep> steps;
};

/// The same training with either clipping.
struct Drift {
  std::string optimizer;
  int world_size = 0;
  double max_norm = 0;
  ClippingRun right;
  ClippingRun wrong;

  /// |wrong - right| / |right| of all parameters after a step.
  double of_parameters(std::size_t step) const {
    double apart = 0;
    double size = 0;
    for (std::size_t i = 0; i < right.parameters[step].size(); ++i) {
      const double difference = wrong.parameters[step][i] - right.parameters[step][i];
      apart += difference * difference;
      size += right.parameters[step][i] * right.parameters[step][i];
    }
    return std::sqrt(apart / size);
  }
};

struct Measured {
  std::vector<Family> planted;
  Family training;
  std::vector<Drift> drifts;
  std::optional<PeerClipping> peers;
};

Measured measure(const ClaimsOptions& options) {
  const auto say = [&](const std::string& part) {
    if (options.progress) {
      options.progress("clipping: " + part);
    }
  };
  const std::vector<int> worlds =
      options.quick ? std::vector<int>{2, 4, 8} : std::vector<int>{2, 4, 8, 16, 32, 64};
  Measured measured;
  const auto plant = [&](std::string name, PlantedGradients gradients, const std::string& wrap) {
    Family family{std::move(name), {}};
    for (const int world_size : worlds) {
      ClippingCase each;
      each.world_size = world_size;
      each.gradients = gradients;
      each.wrap = wrap;
      each.seed = options.seed;
      each.timeout = options.timeout;
      family.steps.push_back(measure_planted(each));
    }
    measured.planted.push_back(std::move(family));
  };
  say(fmt::format("gradients set by hand, {} to {} ranks", worlds.front(), worlds.back()));
  plant("spread evenly", PlantedGradients::even, "layer");
  plant("in one layer of three, each a unit", PlantedGradients::one_layer, "layer");
  plant("in one layer of three, one unit of all", PlantedGradients::one_layer, "model");
  plant("in one element", PlantedGradients::one_element, "layer");
  measured.training.name = "from training";
  for (const int world_size : worlds) {
    say(fmt::format("training on {} ranks, held to one device", world_size));
    const auto run =
        measure_training(clipping_scenario(world_size, "sgd", options.quick ? 2 : 3, options.seed),
                         ClipBy::true_norm, options.timeout);
    measured.training.steps.push_back(run.steps.back());
  }
  const ScratchFolder scratch;
  for (const auto* optimizer : {"sgd", "adamw"}) {
    const auto scenario =
        drift_scenario(8, optimizer, options.quick ? 10 : 100, options.seed, scratch.path());
    say(fmt::format("{} steps of {} on {} ranks, clipped either way", scenario.steps, optimizer,
                    scenario.world_size));
    measured.drifts.push_back({optimizer, scenario.world_size, scenario.max_norm,
                               measure_training(scenario, ClipBy::true_norm, options.timeout),
                               measure_training(scenario, ClipBy::local_norms, options.timeout)});
  }
  if (options.with_python) {
    say("PyTorch's own FSDP1 and FSDP2");
    PeerOptions peers;
    peers.world_sizes = options.quick ? std::vector<int>{2} : std::vector<int>{2, 4};
    peers.seed = options.seed;
    peers.python = options.python;
    peers.timeout = options.timeout;
    measured.peers = run_clipping_peers(peers);
  }
  return measured;
}

std::vector<Check> check(const Measured& measured) {
  std::vector<Check> checks;
  const auto add = [&](std::vector<Check> more) {
    checks.insert(checks.end(), std::make_move_iterator(more.begin()),
                  std::make_move_iterator(more.end()));
  };
  for (const auto& family : measured.planted) {
    for (const auto& step : family.steps) {
      add(check_clipping(step));
    }
  }
  // Evenly spread, the local norm is 1/sqrt(W) of the true one, but for the rounding of both.
  for (const auto& step : measured.planted.front().steps) {
    const double want = 1 / std::sqrt(step.world_size);
    const double allowed = want * step.combined_bound();
    add({{fmt::format("claims.clipping.even_is_root_of_world.{}.step{}", step.name, step.step),
          std::fabs(step.largest_ratio() - want) <= allowed &&
              std::fabs(step.smallest_ratio() - want) <= allowed,
          fmt::format("local / true is {:.9g} to {:.9g}; wanted: {:.9g} within {:.3g}",
                      step.smallest_ratio(), step.largest_ratio(), want, allowed)}});
  }
  for (const auto& step : measured.training.steps) {
    add(check_clipping(step));
  }
  for (const auto& drift : measured.drifts) {
    for (const auto& step : drift.right.steps) {
      add(check_clipping(step));
    }
  }
  if (measured.peers) {
    add(check_peers(*measured.peers));
  }
  return checks;
}

// ---- Claims -------------------------------------------------------------------------------------

const PeerWay* find_way(const PeerWorld& world, std::string_view way, std::string_view clip) {
  const auto found = std::find_if(world.ways.begin(), world.ways.end(), [&](const PeerWay& each) {
    return each.way == way && each.clip == clip;
  });
  return found == world.ways.end() ? nullptr : &*found;
}

std::optional<Claim> claim_of_plain_function(const Measured& measured,
                                             const std::vector<Check>& checks) {
  if (!measured.peers || measured.peers->worlds.empty()) {
    return std::nullopt;
  }
  const auto holds = [&](std::string_view behaviour, std::string_view way) {
    return std::all_of(checks.begin(), checks.end(), [&](const Check& each) {
      return each.held || each.name.find(behaviour) == std::string::npos ||
             each.name.find(way) == std::string::npos;
    });
  };
  const bool is_local_on_fsdp1 = holds("pytorch_plain_is_local", "fsdp1");
  const bool is_right_on_fsdp2 = holds("pytorch_is_global", "fsdp2");
  const auto& world = measured.peers->worlds.back();
  const auto* flat = find_way(world, "fsdp1_flat", "plain");
  const auto* dtensor = find_way(world, "fsdp2", "plain");
  Claim claim;
  claim.id = "clipping.plain_function_is_local";
  claim.sentence = "torch.nn.utils.clip_grad_norm_ sees only the local shards.";
  claim.verdict = is_local_on_fsdp1 ? (is_right_on_fsdp2 ? "too general" : "true") : "false";
  if (claim.verdict == "too general") {
    claim.condition =
        "true of FSDP1, with use_orig_params or without, and wherever shards are plain tensors; on "
        "FSDP2, whose gradients are DTensors, the same call is right";
  }
  if (flat != nullptr && dtensor != nullptr) {
    claim.evidence = fmt::format(
        "PyTorch {}, {} ranks: on one device {:.6g}; on FSDP1 it returned {:.6g} and left a "
        "gradient of norm {:.4g} for max_norm {:g}; on FSDP2 it returned {:.6g} and left {:.4g}",
        measured.peers->torch, world.world_size, world.single, fmt::join(flat->returned, ", "),
        flat->after, measured.peers->max_norm, fmt::join(dtensor->returned, ", "), dtensor->after);
  }
  return claim;
}

std::vector<Claim> claims_of(const Measured& measured, const std::vector<Check>& checks) {
  std::vector<Claim> claims;
  if (auto claim = claim_of_plain_function(measured, checks)) {
    claims.push_back(*claim);
  }
  const auto& even = measured.planted.at(0).steps.back();
  const auto& one_layer = measured.planted.at(1).steps.back();
  const auto& one_unit = measured.planted.at(2).steps.back();
  const auto& trained = measured.training.steps.back();
  const auto right = [](const Check& check) {
    return check.name.find("true_norm_is_that_of_one_device") != std::string::npos ||
           check.name.find("clipped_gradients_are_those_of_one_device") != std::string::npos;
  };
  const auto compared = std::count_if(checks.begin(), checks.end(), right);
  const auto as_one_device = std::count_if(
      checks.begin(), checks.end(), [&](const Check& check) { return right(check) && check.held; });
  const bool is_right = as_one_device == compared;
  claims.push_back(
      {"clipping.model_clips_right",
       "The sharded model's own clip_grad_norm_(max_norm) clips by the norm over all ranks.",
       is_right ? "true" : "false", "",
       fmt::format("its norm and every clipped gradient element are those of one device, to the "
                   "bit, in {} of {} comparisons on 2 to 64 ranks",
                   as_one_device, compared)});
  claims.push_back(
      {"clipping.local_is_wrong", "Clipping by the norm of local shards is wrong.",
       "true under a condition",
       "more than one rank holds a gradient, and the true norm exceeds max_norm",
       fmt::format("{} ranks, a gradient of training of norm {:.4g}, max_norm {:g}: local norms "
                   "{:.4g} to {:.4g} of it, and an update {:.3g} times as long as the right one",
                   trained.world_size, trained.true_norm(), trained.max_norm,
                   trained.smallest_ratio(), trained.largest_ratio(),
                   trained.wrong_length / trained.right_length)});
  claims.push_back(
      {"clipping.root_of_world", "The local norm is 1/sqrt(W) of the true norm.",
       "true under a condition", "the sum of squares is spread evenly over the ranks",
       fmt::format("{} ranks, 1/sqrt(W) = {:.4g}: spread evenly {:.4g} on every rank; one layer, "
                   "each layer a unit {:.4g} to {:.4g}; one layer, one unit of all {:.4g} to "
                   "{:.4g}; training {:.4g} to {:.4g}",
                   even.world_size, 1 / std::sqrt(even.world_size), even.largest_ratio(),
                   one_layer.smallest_ratio(), one_layer.largest_ratio(), one_unit.smallest_ratio(),
                   one_unit.largest_ratio(), trained.smallest_ratio(), trained.largest_ratio())});
  double worst = 0;
  double most_allowed = 0;
  const auto look_at = [&](const ClippingStep& step) {
    const double error = std::fabs(step.combined_norm() / step.true_norm() - 1);
    if (error > worst) {
      worst = error;
      most_allowed = step.combined_bound();
    }
  };
  for (const auto& family : measured.planted) {
    std::for_each(family.steps.begin(), family.steps.end(), look_at);
  }
  std::for_each(measured.training.steps.begin(), measured.training.steps.end(), look_at);
  claims.push_back(
      {"clipping.squares_add_up",
       "The true norm is the root of the sum of the local norms' squares.",
       "true under a condition",
       "every gradient element is counted once, however many replicas hold it",
       fmt::format("the two differ by at most {:.2g} of the norm; rounding allows {:.2g} "
                   "there",
                   worst, most_allowed)});
  double angle = 0;
  int angle_world = 0;
  for (const auto* steps : {&measured.training.steps, &measured.planted.at(2).steps}) {
    for (const auto& step : *steps) {
      if (step.angle > angle) {
        angle = step.angle;
        angle_world = step.world_size;
      }
    }
  }
  claims.push_back(
      {"clipping.only_length", "Clipping by local norms changes only the length of the update.",
       "too general", "true where every rank multiplies by the same",
       fmt::format("the angle to the right update is {:.3f} degrees with an even gradient, and up "
                   "to {:.3g} degrees, on {} ranks, with others",
                   even.angle, angle, angle_world)});
  const auto& sgd = measured.drifts.at(0);
  const auto& adamw = measured.drifts.at(1);
  const auto last = sgd.right.losses.size() - 1;
  const double drift = adamw.of_parameters(last);
  claims.push_back(
      {"clipping.adam_hides_it",
       "Adam hides wrong clipping, because its updates do not depend on the gradient's scale.",
       drift > 0 ? "too general" : "true",
       drift > 0
           ? "true of one factor for all ranks and steps; local norms change from step to step"
           : "",
       fmt::format("{} ranks, {} steps from the same weights on the same data: parameters are "
                   "{:.2g} of their norm apart with AdamW and {:.2g} with SGD; the loss is {:.4g} "
                   "for {:.4g} and {:.4g} for {:.4g}",
                   adamw.world_size, last + 1, drift, sgd.of_parameters(last),
                   adamw.wrong.losses[last], adamw.right.losses[last], sgd.wrong.losses[last],
                   sgd.right.losses[last])});
  return claims;
}

// ---- Figures ------------------------------------------------------------------------------------

json step_json(const ClippingStep& step) {
  return {{"name", step.name},
          {"step", step.step},
          {"world_size", step.world_size},
          {"dtype", step.dtype},
          {"max_norm", step.max_norm},
          {"local_norms", step.local_norms},
          {"local_scales", step.local_scales},
          {"true_norm", step.true_norm()},
          {"true_scale", step.true_scale},
          {"combined_norm", step.combined_norm()},
          {"combined_bound", step.combined_bound()},
          {"elements", step.elements},
          {"differing", step.differing},
          {"right_length", step.right_length},
          {"wrong_length", step.wrong_length},
          {"angle_degrees", step.angle}};
}

json data_of(const Measured& measured) {
  json data = {{"planted", json::object()}, {"training", json::array()}, {"drift", json::array()}};
  for (const auto& family : measured.planted) {
    auto& steps = data["planted"][family.name] = json::array();
    for (const auto& step : family.steps) {
      steps.push_back(step_json(step));
    }
  }
  for (const auto& step : measured.training.steps) {
    data["training"].push_back(step_json(step));
  }
  for (const auto& drift : measured.drifts) {
    json apart = json::array();
    for (std::size_t step = 0; step < drift.right.losses.size(); ++step) {
      apart.push_back(drift.of_parameters(step));
    }
    data["drift"].push_back({{"optimizer", drift.optimizer},
                             {"world_size", drift.world_size},
                             {"max_norm", drift.max_norm},
                             {"parameters", std::move(apart)},
                             {"right_losses", drift.right.losses},
                             {"wrong_losses", drift.wrong.losses}});
  }
  if (measured.peers) {
    for (const auto& world : measured.peers->worlds) {
      for (const auto& way : world.ways) {
        data["peers"].push_back({{"world_size", world.world_size},
                                 {"single", world.single},
                                 {"way", way.way},
                                 {"clip", way.clip},
                                 {"returned", way.returned},
                                 {"after", way.after}});
      }
    }
  }
  for (const auto& mistake : clipping_mistakes()) {
    data["mistakes"].push_back(
        {{"id", mistake.id},
         {"source", mistake.source},
         {"reported", std::isfinite(mistake.reported) ? json(mistake.reported) : json("inf")},
         {"true_norm", mistake.true_norm},
         {"applied", mistake.applied},
         {"right_applied", mistake.right_applied}});
  }
  return data;
}

std::string figure(const Plot& plot, std::string_view caption) {
  return fmt::format("<figure>{}<figcaption>{}</figcaption></figure>\n", render_svg(plot),
                     escaped(caption));
}

template <typename F>
PlotSeries over_worlds(const Family& family, F value) {
  PlotSeries series;
  series.name = family.name;
  for (const auto& step : family.steps) {
    series.points.emplace_back(step.world_size, value(step));
  }
  return series;
}

std::string plots_over_worlds(const Measured& measured) {
  const PlotAxis worlds{"ranks", AxisScale::log2};
  std::vector<Family> families = {measured.planted.begin(), measured.planted.begin() + 3};
  families.push_back(measured.training);
  Plot ratio{
      "Largest local norm, of the true norm", worlds, {"local / true", AxisScale::log10}, {}};
  Plot length{"Length of the wrong update, of the right one", worlds, {"wrong / right"}, {}};
  Plot angle{"Angle between the wrong and the right update", worlds, {"degrees"}, {}};
  for (const auto& family : families) {
    ratio.series.push_back(
        over_worlds(family, [](const ClippingStep& step) { return step.largest_ratio(); }));
    length.series.push_back(over_worlds(
        family, [](const ClippingStep& step) { return step.wrong_length / step.right_length; }));
    angle.series.push_back(
        over_worlds(family, [](const ClippingStep& step) { return step.angle; }));
  }
  auto root = over_worlds(measured.planted.front(),
                          [](const ClippingStep& step) { return 1 / std::sqrt(step.world_size); });
  root.name = "1/sqrt(ranks), predicted for an even spread";
  root.has_marks = false;
  root.is_dashed = true;
  ratio.series.push_back(root);
  auto capped = over_worlds(measured.planted.front(), [](const ClippingStep& step) {
    return std::min(std::sqrt(step.world_size), step.true_norm() / step.max_norm);
  });
  capped.name = "min(sqrt(ranks), norm / max_norm), predicted for an even spread";
  capped.has_marks = false;
  capped.is_dashed = true;
  length.series.push_back(capped);
  return figure(ratio,
                "What each rank takes for the norm. Where a layer is a unit of its own, every rank "
                "holds a part of it; in one unit of all, a few ranks hold most of it.") +
         figure(length,
                "Each rank clips its own shard to max_norm, so that up to sqrt(W) times max_norm "
                "gets through; where no local norm exceeds max_norm, nothing is clipped.") +
         figure(angle, "Ranks that multiply by different factors turn the update.");
}

std::string plots_of_drift(const Measured& measured) {
  Plot apart{"Parameters with wrong clipping from those with right clipping",
             {"step"},
             {"|difference| / |parameters|", AxisScale::log10},
             {}};
  std::string losses;
  for (const auto& drift : measured.drifts) {
    PlotSeries series{drift.optimizer, {}, true, false, false};
    PlotSeries right{"clipped by the true norm", {}, true, false, false};
    PlotSeries wrong{"clipped by local norms", {}, true, false, true};
    for (std::size_t step = 0; step < drift.right.losses.size(); ++step) {
      series.points.emplace_back(step + 1, drift.of_parameters(step));
      right.points.emplace_back(step, drift.right.losses[step]);
      wrong.points.emplace_back(step, drift.wrong.losses[step]);
    }
    apart.series.push_back(series);
    losses += figure({"Loss, " + drift.optimizer, {"step"}, {"mean loss"}, {right, wrong}},
                     fmt::format("{} ranks, max_norm {:g}. A lower loss is no merit of the wrong "
                                 "way: it takes longer steps than it was told to.",
                                 drift.world_size, drift.max_norm));
  }
  return figure(apart, "The same weights and data; only the norm that is clipped by differs.") +
         losses;
}

std::string table_of_steps(const Measured& measured) {
  std::string text =
      "<h3>Norms and factors</h3>\n<table><thead><tr><th>gradient</th><th "
      "class=\"n\">ranks</th><th class=\"n\">true norm</th><th class=\"n\">local norms</th><th "
      "class=\"n\">right factor</th><th class=\"n\">factors of ranks</th><th "
      "class=\"n\">wrong / right length</th><th class=\"n\">angle</th></tr></thead><tbody>\n";
  auto families = measured.planted;
  families.push_back(measured.training);
  const auto range = [](const std::vector<double>& values) {
    const auto [low, high] = std::minmax_element(values.begin(), values.end());
    return fmt::format("{:.4g} to {:.4g}", *low, *high);
  };
  for (const auto& family : families) {
    for (const auto& step : family.steps) {
      text += fmt::format(
          "<tr><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{:.6g}</td><td "
          "class=\"n\">{}</td><td class=\"n\">{:.4g}</td><td class=\"n\">{}</td><td "
          "class=\"n\">{:.4g}</td><td class=\"n\">{:.3f}&#176;</td></tr>\n",
          escaped(family.name), step.world_size, step.true_norm(), range(step.local_norms),
          step.true_scale, range(step.local_scales), step.wrong_length / step.right_length,
          step.angle);
    }
  }
  return text + "</tbody></table>\n";
}

std::string table_of_peers(const PeerClipping& peers) {
  std::string text = fmt::format(
      "<h3>PyTorch {} itself</h3>\n<p>The same batch on every rank, so that the gradient is that "
      "of "
      "one device; max_norm {:g}.</p>\n<table><thead><tr><th "
      "class=\"n\">ranks</th><th>sharded by</th><th>call</th><th class=\"n\">norm on one "
      "device</th><th class=\"n\">returned by rank</th><th class=\"n\">norm "
      "left</th></tr></thead><tbody>\n",
      escaped(peers.torch), peers.max_norm);
  for (const auto& world : peers.worlds) {
    for (const auto& way : world.ways) {
      text += fmt::format(
          "<tr><td class=\"n\">{}</td><td>{}</td><td><code>{}</code></td><td "
          "class=\"n\">{:.6g}</td><td class=\"n\">{:.6g}</td><td class=\"n\">{:.4g}</td></tr>\n",
          world.world_size,
          way.way == "fsdp2"        ? "FSDP2"
          : way.way == "fsdp1_orig" ? "FSDP1, use_orig_params"
                                    : "FSDP1",
          way.clip == "plain" ? "torch.nn.utils.clip_grad_norm_" : "model.clip_grad_norm_",
          world.single, fmt::join(way.returned, ", "), way.after);
    }
  }
  return text + "</tbody></table>\n";
}

std::string table_of_mistakes() {
  std::string text =
      "<h3>Mistakes that look alike</h3>\n<p>Each on gradients small enough to work out by hand, "
      "max_norm 1: what is logged, and the norm of what the optimizer is given.</p>\n"
      "<table><thead><tr><th>mistake</th><th>example</th><th class=\"n\">logged</th><th "
      "class=\"n\">true norm</th><th class=\"n\">given</th><th class=\"n\">right</th><th>from "
      "outside</th></tr></thead><tbody>\n";
  for (const auto& mistake : clipping_mistakes()) {
    text += fmt::format(
        "<tr><td>{}{}</td><td>{}</td><td class=\"n\">{:.8g}</td><td class=\"n\">{:.8g}</td><td "
        "class=\"n\">{:.8g}</td><td class=\"n\">{:.8g}</td><td>{}</td></tr>\n",
        escaped(mistake.mistake),
        mistake.source.empty() ? "" : " (" + escaped(mistake.source) + ")",
        escaped(mistake.example), mistake.reported, mistake.true_norm, mistake.applied,
        mistake.right_applied, escaped(mistake.outside));
  }
  return text + "</tbody></table>\n";
}

}  // namespace

ClaimsSection clipping_section(const ClaimsOptions& options) {
  const auto measured = measure(options);
  ClaimsSection section;
  section.id = "clipping";
  section.title = "Gradient clipping";
  section.checks = check(measured);
  section.claims = claims_of(measured, section.checks);
  section.data = data_of(measured);
  section.html = plots_over_worlds(measured) + plots_of_drift(measured) + table_of_steps(measured) +
                 (measured.peers ? table_of_peers(*measured.peers) : "") + table_of_mistakes();
  if (!measured.peers) {
    section.notes.push_back(
        "PyTorch's own FSDP was not run (--no-python), so nothing is said of "
        "torch.nn.utils.clip_grad_norm_ on it.");
  }
  return section;
}

}  // namespace shardproof
