#include "conformance/memory_claims.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "conformance/html.h"
#include "conformance/line_fit.h"
#include "conformance/memory_measurement.h"
#include "conformance/plot.h"

namespace shardproof {
namespace {

using nlohmann::json;

std::string joined(std::string text) {
  std::replace(text.begin(), text.end(), ' ', '_');
  return text;
}

// ---- Activations over layers

struct Point {
  int layers = 0;
  std::int64_t peak = 0;
};
struct Curve {
  CheckpointPolicy policy;
  Growth growth;
  std::vector<Point> points;
  int large = 0;  // the fit begins here
  LineFit fit;    // of ln(peak) over ln(L), for large L

  std::vector<Point> large_points() const {
    std::vector<Point> found;
    std::copy_if(points.begin(), points.end(), std::back_inserter(found),
                 [this](const Point& point) { return point.layers >= large; });
    return found;
  }
  /// What does not grow: peak - slope * x.
  double constant() const {
    return static_cast<double>(points.front().peak -
                               growth.slope * growth.steps(points.front().layers));
  }
  double slope() const { return static_cast<double>(growth.slope) / growth.per; }
  double predicted(int layers) const {
    return constant() + slope() * std::pow(layers, growth.exponent);
  }
  std::pair<double, double> exponents() const {
    return exponents_between(constant(), slope(), growth.exponent, large_points().front().layers,
                             points.back().layers);
  }
};

Curve measure_curve(const CheckpointPolicy& policy, const ClaimsOptions& options) {
  const StackSpec spec;
  Curve curve;
  curve.policy = policy;
  curve.growth = expected_growth(spec, policy);
  curve.large = options.quick ? 8 : 64;
  for (const int layers : {4, 8, 9, 16, 25, 32, 36, 64, 100, 128, 144, 256, 400, 576}) {
    // Squares for the segments, so that each has as many layers as there are segments.
    const bool is_wanted = policy.segments
                               ? curve.growth.fits(layers)
                               : layers % 4 == 0 && layers != 36 && layers != 100 && layers != 144;
    if (!is_wanted || (options.quick && layers > 36)) {
      continue;
    }
    StackSpec deep = spec;
    deep.layers = layers;
    curve.points.push_back({layers, measure_memory(deep, policy, 0, options.seed).front().peak});
  }
  std::vector<std::pair<double, double>> points;
  for (const auto& [layers, peak] : curve.large_points()) {
    points.emplace_back(layers, static_cast<double>(peak));
  }
  curve.fit = fit_power(points);
  return curve;
}

void check_curve(const Curve& curve, std::vector<Check>& checks) {
  const auto policy = joined(curve.policy.name());
  for (std::size_t i = 1; i < curve.points.size(); ++i) {
    const auto& before = curve.points[i - 1];
    const auto& after = curve.points[i];
    const auto want =
        curve.growth.slope * (curve.growth.steps(after.layers) - curve.growth.steps(before.layers));
    checks.push_back(
        {fmt::format("claims.memory.growth.float32.w1.{}_l{}_to_l{}", policy, before.layers,
                     after.layers),
         after.peak - before.peak == want,
         fmt::format("the peak grows by {} bytes; wanted {}", after.peak - before.peak, want)});
  }
  const auto [least, most] = curve.exponents();
  // What rounding in a few logarithms may do.
  constexpr double kRounding = 1e-12;
  checks.push_back(
      {fmt::format("claims.memory.exponent.float32.w1.{}", policy),
       curve.fit.slope >= least - kRounding && curve.fit.slope <= most + kRounding,
       fmt::format("the exponent from {} layers on is {:.4f}; wanted one from {:.4f} to {:.4f}, "
                   "the slopes of the closed form there",
                   curve.large_points().front().layers, curve.fit.slope, least, most)});
}

// ---- Sharding and checkpointing together

struct Corner {
  int shards = 0;  // 0: not sharded
  CheckpointPolicy policy;
  std::vector<MemoryUse> ranks;

  /// Of the rank that holds most.
  MemoryUse worst() const {
    return *std::max_element(ranks.begin(), ranks.end(), [](const auto& a, const auto& b) {
      return a.persistent.total() + a.peak < b.persistent.total() + b.peak;
    });
  }
  std::int64_t sum() const { return worst().persistent.total() + worst().peak; }
  std::string name() const {
    return fmt::format("{}, {}", shards == 0 ? "not sharded" : fmt::format("{} shards", shards),
                       policy.every == 0 && !policy.segments ? "stored" : "checkpointed");
  }
};

/// Widths that leave padding between parameters; enough tokens for activations to matter.
StackSpec corner_spec(const ClaimsOptions& options) {
  return {.layers = options.quick ? 4 : 16,
          .width = 36,
          .heads = 2,
          .time = 32,
          .batch = options.quick ? 2 : 8,
          .vocabulary = 61};
}

std::vector<Corner> measure_corners(const ClaimsOptions& options) {
  std::vector<Corner> corners;
  for (const int shards : {0, 1, 2, 4, 8}) {
    for (const int every : {0, 1}) {
      Corner corner;
      corner.shards = shards;
      corner.policy.every = every;
      corner.ranks = measure_memory(corner_spec(options), corner.policy, shards, options.seed);
      corners.push_back(corner);
    }
  }
  return corners;
}

const Corner& corner_of(const std::vector<Corner>& corners, int shards, int every) {
  return *std::find_if(corners.begin(), corners.end(), [&](const Corner& corner) {
    return corner.shards == shards && corner.policy.every == every;
  });
}

std::string spelled(const PersistentBytes& bytes) {
  return fmt::format("parameters {}, gradients {}, optimizer state {}", bytes.parameters,
                     bytes.gradients, bytes.optimizer_state);
}

void check_corners(const std::vector<Corner>& corners, const StackSpec& spec,
                   std::vector<Check>& checks) {
  for (const auto& corner : corners) {
    const auto want = expected_persistent(spec, corner.shards);
    for (std::size_t rank = 0; rank < corner.ranks.size(); ++rank) {
      const auto& got = corner.ranks[rank].persistent;
      checks.push_back(
          {fmt::format("claims.memory.persistent.float32.w{}.{}_{}_rank{}",
                       std::max(1, corner.shards), corner.shards == 0 ? "whole" : "full_shard",
                       joined(corner.policy.name()), rank),
           got == want[rank],
           fmt::format("rank {} holds {}; wanted {} bytes", rank, spelled(got),
                       spelled(want[rank]))});
    }
  }
  const auto sum = [&](int shards, int every) { return corner_of(corners, shards, every).sum(); };
  const auto neither = sum(0, 0);
  for (const int shards : {2, 4, 8}) {
    const auto sharded = sum(shards, 0);
    const auto checkpointed = sum(0, 1);
    const auto both = sum(shards, 1);
    checks.push_back(
        {fmt::format("claims.memory.both.float32.w{}.every_layer", shards),
         both < std::min(sharded, checkpointed) && std::max(sharded, checkpointed) < neither,
         fmt::format("neither {}, sharded {}, checkpointed {}, both {} bytes; wanted "
                     "both below either, and either below neither",
                     neither, sharded, checkpointed, both)});
  }
}

// ---- The page

const Curve& curve_of(const std::vector<Curve>& curves, const std::string& name) {
  return *std::find_if(curves.begin(), curves.end(),
                       [&](const Curve& curve) { return curve.policy.name() == name; });
}

/// The number of layers from which about sqrt(L) segments peak below a region for each layer: where
/// a1 + N L = a2 + b sqrt(L).
double crossing(const Curve& each, const Curve& segments) {
  const double n = each.slope();
  const double b = segments.slope();
  const double c = each.constant() - segments.constant();
  const double root = (b + std::sqrt(std::max(0.0, b * b - 4 * n * c))) / (2 * n);
  return root * root;
}

std::string plot_of(const std::vector<Curve>& curves) {
  Plot plot;
  plot.title = "Peak of activations in a step";
  plot.x = {"layers", AxisScale::log2};
  plot.y = {"bytes", AxisScale::log10};
  for (const auto& curve : curves) {
    PlotSeries measured;
    measured.name = curve.policy.name();
    PlotSeries predicted;
    predicted.name = curve.policy.name() + ", closed form";
    predicted.has_marks = false;
    predicted.is_dashed = true;
    for (const auto& [layers, peak] : curve.points) {
      measured.points.emplace_back(layers, static_cast<double>(peak));
      predicted.points.emplace_back(layers, curve.predicted(layers));
    }
    measured.has_line = false;
    plot.series.push_back(measured);
    // The others lie between; more lines would hide them.
    if (curve.policy.every <= 1 && !curve.policy.keeps_random_state) {
      plot.series.push_back(predicted);
    }
  }
  return render_svg(plot);
}

std::string plot_of(const std::vector<Corner>& corners) {
  Plot plot;
  plot.title = "Bytes of one rank: persistent, and with the peak of a step";
  plot.x = {"ranks", AxisScale::log2};
  plot.y = {"bytes", AxisScale::log10};
  for (const bool with_peak : {true, false}) {
    for (const bool is_sharded : {false, true}) {
      for (const int every : {0, 1}) {
        if (!with_peak && every == 1) {
          continue;  // persistent bytes are the same
        }
        PlotSeries series;
        series.name = fmt::format("{}{}{}", is_sharded ? "sharded" : "not sharded",
                                  !with_peak ? ", persistent" : "",
                                  !with_peak   ? ""
                                  : every == 0 ? ", stored"
                                               : ", checkpointed");
        series.is_dashed = !with_peak;
        for (const int ranks : {1, 2, 4, 8}) {
          const auto& corner = corner_of(corners, is_sharded ? ranks : 0, every);
          series.points.emplace_back(
              ranks,
              static_cast<double>(with_peak ? corner.sum() : corner.worst().persistent.total()));
        }
        plot.series.push_back(series);
      }
    }
  }
  return render_svg(plot);
}

std::string table_of(const std::vector<Curve>& curves) {
  std::string text =
      "<table><thead><tr><th>checkpointed</th><th class=\"n\">bytes</th><th>for each</th><th "
      "class=\"n\">exponent</th><th class=\"n\">95 %</th><th class=\"n\">closed form</th><th "
      "class=\"n\">without constant</th></tr></thead><tbody>\n";
  for (const auto& curve : curves) {
    const auto [least, most] = curve.exponents();
    std::vector<std::pair<double, double>> growing;
    for (const auto& [layers, peak] : curve.large_points()) {
      growing.emplace_back(layers, static_cast<double>(peak) - curve.constant());
    }
    const std::string each = curve.growth.exponent != 1 ? "sqrt(layers)"
                             : curve.growth.per == 1    ? "layer"
                                                     : fmt::format("{} layers", curve.growth.per);
    text += fmt::format(
        "<tr><td>{}</td><td class=\"n\">{}</td><td>{}</td><td class=\"n\">{:.3f}</td><td "
        "class=\"n\">&#177; {:.3f}</td><td class=\"n\">{:.3f} to {:.3f}</td><td "
        "class=\"n\">{:.3f}</td></tr>\n",
        escaped(curve.policy.name()), curve.growth.slope, each, curve.fit.slope,
        curve.fit.half_width, least, most, fit_power(growing).slope);
  }
  return text + "</tbody></table>\n";
}

std::string table_of(const std::vector<Corner>& corners) {
  std::string text =
      "<table><thead><tr><th>one rank</th><th class=\"n\">parameters</th><th "
      "class=\"n\">gradients</th><th class=\"n\">optimizer</th><th class=\"n\">persistent</th><th "
      "class=\"n\">peak of a step</th><th class=\"n\">sum</th></tr></thead><tbody>\n";
  for (const auto& corner : corners) {
    const auto use = corner.worst();
    text += fmt::format("<tr><td>{}</td>", escaped(corner.name()));
    for (const auto bytes :
         {use.persistent.parameters, use.persistent.gradients, use.persistent.optimizer_state,
          use.persistent.total(), use.peak, corner.sum()}) {
      text += fmt::format("<td class=\"n\">{}</td>", bytes);
    }
    text += "</tr>\n";
  }
  return text + "</tbody></table>\n";
}

json data_of(const std::vector<Curve>& curves, const std::vector<Corner>& corners) {
  json data;
  for (const auto& curve : curves) {
    json points = json::array();
    for (const auto& [layers, peak] : curve.points) {
      points.push_back({{"layers", layers}, {"peak", peak}});
    }
    const auto [least, most] = curve.exponents();
    data["activations"].push_back({{"policy", curve.policy.name()},
                                   {"points", std::move(points)},
                                   {"bytes_per_layer", curve.slope()},
                                   {"constant", curve.constant()},
                                   {"fitted_from_layers", curve.large},
                                   {"exponent", curve.fit.slope},
                                   {"half_width_95", curve.fit.half_width},
                                   {"exponent_least", least},
                                   {"exponent_most", most}});
  }
  for (const auto& corner : corners) {
    for (std::size_t rank = 0; rank < corner.ranks.size(); ++rank) {
      const auto& use = corner.ranks[rank];
      data["ranks"].push_back({{"shards", corner.shards},
                               {"policy", corner.policy.name()},
                               {"rank", rank},
                               {"parameters", use.persistent.parameters},
                               {"gradients", use.persistent.gradients},
                               {"optimizer_state", use.persistent.optimizer_state},
                               {"peak", use.peak}});
    }
  }
  return data;
}

Claim root_claim(const std::vector<Curve>& curves) {
  const auto& none = curve_of(curves, "none");
  const auto& each = curve_of(curves, "every layer");
  const auto& segments = curve_of(curves, "sqrt segments");
  const auto& random = curve_of(curves, "every layer, with random state");
  return {
      .id = "memory.square_root",
      .sentence =
          "With checkpointing \"activation memory is O(sqrt(L)) instead of O(L)\", L the "
          "number of layers.",
      .verdict = "true under a condition",
      .condition =
          "the layers are cut into about sqrt(L) segments. With every layer a region it is "
          "still O(L), for each keeps its input; only the slope is less (Chen et al., "
          "arXiv:1604.06174)",
      .evidence = fmt::format(
          "bytes for each layer: {} without, {} with every layer a region (its input, to the "
          "byte; {} if the generators' states are kept for each, as is the default); with sqrt(L) "
          "segments {} for each sqrt(L). Exponents from {} layers on: {:.3f}, {:.3f} and {:.3f}; "
          "1, "
          "1 and 0.5 once what does not grow is taken off. By the closed form the segments peak "
          "lower than a region for each layer only above {:.0f} layers of this model.",
          none.growth.slope, each.growth.slope, random.growth.slope, segments.growth.slope,
          none.large, none.fit.slope, each.fit.slope, segments.fit.slope,
          crossing(each, segments))};
}

Claim both_claim(const std::vector<Corner>& corners) {
  const auto& neither = corner_of(corners, 0, 0);
  const auto& sharded = corner_of(corners, 8, 0);
  const auto& checkpointed = corner_of(corners, 0, 1);
  const auto& both = corner_of(corners, 8, 1);
  return {
      .id = "memory.both",
      .sentence =
          "Sharding cuts what is persistent (parameters, gradients, optimizer state) to 1/W, "
          "checkpointing the peak of activations in backward; together they cut both.",
      .verdict = "true",
      .condition = "",
      .evidence = fmt::format(
          "persistent bytes of a rank go from {} to {} over 8 ranks, the formula to the byte on "
          "every rank (1/W of each unit, padding included; Rajbhandari et al., arXiv:1910.02054), "
          "and are the same with "
          "checkpointing; the peak above them goes from {} to {} without sharding and from {} "
          "to {} with it, where the gathered units are part of it; the sum from {} to {}.",
          neither.worst().persistent.total(), sharded.worst().persistent.total(),
          neither.worst().peak, checkpointed.worst().peak, sharded.worst().peak, both.worst().peak,
          neither.sum(), both.sum())};
}

}  // namespace

ClaimsSection memory_section(const ClaimsOptions& options) {
  const auto say = [&](const std::string& part) {
    if (options.progress) {
      options.progress("memory: " + part);
    }
  };
  std::vector<Curve> curves;
  auto policies = checkpoint_policies();
  policies.push_back({.every = 1, .keeps_random_state = true});
  for (const auto& policy : policies) {
    say("activations, " + policy.name());
    curves.push_back(measure_curve(policy, options));
  }
  say("sharding and checkpointing");
  const auto corners = measure_corners(options);

  ClaimsSection section;
  section.id = "memory";
  section.title = "What sharding and checkpointing do to memory";
  section.claims = {root_claim(curves), both_claim(corners)};
  for (const auto& curve : curves) {
    check_curve(curve, section.checks);
  }
  check_corners(corners, corner_spec(options), section.checks);
  section.data = data_of(curves, corners);
  section.html =
      "<p>Bytes are those that tensors asked of the allocator and had not given back; what malloc "
      "keeps or the system counts is not in them. The peak of a step is above what is persistent, "
      "which gradients are part of.</p>\n" +
      plot_of(curves) +
      "<p>Points are measured, dashed lines are a + b L (for the segments a + b sqrt(L)) with b "
      "from the closed form and a from the first point; every point is on its line to the byte. "
      "The exponent is that of a power law through the large L by least squares, with Student's "
      "interval; the residuals are the bend that a causes and no noise, so the interval is shown "
      "and the check is another: the exponent lies between the slopes that the closed form has at "
      "both ends. Without a it is exact.</p>\n" +
      table_of(curves) + plot_of(corners) +
      "<p>The rank that holds most. With sharding, the peak contains the units that are gathered "
      "and the gradients on their way.</p>\n" +
      table_of(corners);
  return section;
}

}  // namespace shardproof
