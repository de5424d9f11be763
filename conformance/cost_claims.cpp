#include "conformance/cost_claims.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "conformance/cost_measurement.h"
#include "conformance/html.h"
#include "conformance/plot.h"

namespace shardproof {
namespace {

using nlohmann::json;

struct Row {
  StackSpec spec;
  CheckpointPolicy policy;
  MeasuredStep measured;
  StepOperations expected;
  StepOperations stored;  // of the same stack without checkpointing, measured

  std::int64_t layers_in_regions() const {
    const auto sizes = policy.regions(spec.layers);
    return std::accumulate(sizes.begin(), sizes.end(), 0);
  }
  std::int64_t forward_of_regions() const {
    return layers_in_regions() * stack_operations(spec).block;
  }
  /// Of the layers in regions: forward and recomputation over forward. 1 if there are none.
  double layer_ratio() const {
    return forward_of_regions() == 0 ? 1
                                     : 1 + static_cast<double>(measured.operations.recomputation) /
                                               static_cast<double>(forward_of_regions());
  }
  double step_ratio() const {
    return static_cast<double>(measured.operations.total()) / static_cast<double>(stored.total());
  }
  double expected_step_ratio() const {
    const StackOperations one = stack_operations(spec);
    return static_cast<double>(expected.total()) /
           static_cast<double>(3 * (spec.layers * one.block + one.head));
  }
  std::string variant() const {
    std::string text =
        fmt::format("{}_l{}{}", policy.name(), spec.layers, policy.early_stop ? "_early_stop" : "");
    std::replace(text.begin(), text.end(), ' ', '_');
    return text;
  }
};

std::string spelled(const StepOperations& operations) {
  return fmt::format("forward {}, recomputation {}, backward {}", operations.forward,
                     operations.recomputation, operations.backward);
}

bool stores_all(const CheckpointPolicy& policy) {
  return policy.every == 0 && !policy.segments;
}

std::vector<Row> measure(const ClaimsOptions& options) {
  std::vector<Row> rows;
  for (int layers = 2; layers <= (options.quick ? 8 : 64); layers *= 2) {
    if (options.progress) {
      options.progress(fmt::format("compute: {} layers", layers));
    }
    StackSpec spec;
    spec.layers = layers;
    StepOperations stored;
    for (auto policy : checkpoint_policies()) {
      for (const bool early_stop : {false, true}) {
        if (stores_all(policy) && early_stop) {
          continue;
        }
        policy.early_stop = early_stop;
        Row row;
        row.spec = spec;
        row.policy = policy;
        row.measured = measure_step(spec, policy, options.seed, options.quick ? 3 : 7);
        row.expected = expected_operations(spec, policy);
        if (stores_all(policy)) {
          stored = row.measured.operations;
        }
        row.stored = stored;
        rows.push_back(row);
      }
    }
  }
  return rows;
}

std::vector<Check> checks_of(const std::vector<Row>& rows) {
  std::vector<Check> checks;
  for (const auto& row : rows) {
    const auto& got = row.measured.operations;
    checks.push_back({"claims.compute.operations.float32.w1." + row.variant(), got == row.expected,
                      fmt::format("counted {}; wanted {}", spelled(got), spelled(row.expected))});
    if (row.policy.every == 1 && !row.policy.early_stop) {
      // Between two measurements: a step grows by one forward of its layers, and no more.
      const auto more = got.total() - row.stored.total();
      const auto layers = row.stored.forward - stack_operations(row.spec).head;
      checks.push_back(
          {"claims.compute.one_more_forward.float32.w1." + row.variant(), more == layers,
           fmt::format("a step has {} operations more than without checkpointing; wanted the {} of "
                       "one forward of its layers",
                       more, layers)});
    }
  }
  return checks;
}

json data_of(const std::vector<Row>& rows) {
  json data = json::array();
  for (const auto& row : rows) {
    const auto& got = row.measured.operations;
    data.push_back({{"layers", row.spec.layers},
                    {"policy", row.policy.name()},
                    {"early_stop", row.policy.early_stop},
                    {"checkpointed_layers", row.layers_in_regions()},
                    {"forward", got.forward},
                    {"recomputation", got.recomputation},
                    {"backward", got.backward},
                    {"expected_recomputation", row.expected.recomputation},
                    {"checkpointed_forward_ratio", row.layer_ratio()},
                    {"step_ratio", row.step_ratio()},
                    {"expected_step_ratio", row.expected_step_ratio()},
                    {"milliseconds", row.measured.milliseconds}});
  }
  const StackSpec spec;
  return {{"width", spec.width}, {"heads", spec.heads},           {"time", spec.time},
          {"batch", spec.batch}, {"vocabulary", spec.vocabulary}, {"steps", std::move(data)}};
}

std::string table_of(const std::vector<Row>& rows) {
  std::string text =
      "<table><thead><tr><th class=\"n\">layers</th><th>checkpointed</th><th>second run</th><th "
      "class=\"n\">forward</th><th class=\"n\">recomputation</th><th class=\"n\">backward</th><th "
      "class=\"n\">forward of those layers</th><th class=\"n\">step</th><th "
      "class=\"n\">closed form</th><th class=\"n\">ms</th></tr></thead><tbody>\n";
  for (const auto& row : rows) {
    const auto& got = row.measured.operations;
    text += fmt::format(
        "<tr><td class=\"n\">{}</td><td>{}</td><td>{}</td><td class=\"n\">{}</td><td "
        "class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{:.3f}</td><td "
        "class=\"n\">{:.3f}</td><td class=\"n\">{:.3f}</td><td class=\"n\">{:.2f}</td></tr>\n",
        row.spec.layers, escaped(row.policy.name()),
        stores_all(row.policy)  ? "none"
        : row.policy.early_stop ? "stops early"
                                : "to the end",
        got.forward, got.recomputation, got.backward, row.layer_ratio(), row.step_ratio(),
        row.expected_step_ratio(), row.measured.milliseconds);
  }
  return text + "</tbody></table>\n";
}

std::string plot_of(const std::vector<Row>& rows) {
  Plot plot;
  plot.title = "Operations of a whole step, over those without checkpointing";
  plot.x = {"layers", AxisScale::log2};
  plot.y = {"ratio"};
  PlotSeries limit{"4/3", {}, true, false, true};
  for (const auto& policy : checkpoint_policies()) {
    for (const bool early_stop : {false, true}) {
      if (early_stop && policy.every != 1) {
        continue;
      }
      PlotSeries series;
      series.name = policy.name() + (early_stop ? ", stops early" : "");
      for (const auto& row : rows) {
        if (row.policy.name() == policy.name() &&
            (row.policy.early_stop == early_stop || stores_all(policy))) {
          series.points.emplace_back(row.spec.layers, row.step_ratio());
        }
      }
      plot.series.push_back(series);
    }
  }
  for (const auto& row : rows) {
    if (stores_all(row.policy)) {
      limit.points.emplace_back(row.spec.layers, 4.0 / 3);
    }
  }
  plot.series.push_back(limit);
  return render_svg(plot);
}

const Row& last_of(const std::vector<Row>& rows, int every, bool early_stop) {
  return *std::find_if(rows.rbegin(), rows.rend(), [&](const Row& row) {
    return row.policy.every == every && !row.policy.segments && row.policy.early_stop == early_stop;
  });
}

Claim claim_of(const std::vector<Row>& rows) {
  const auto& whole = last_of(rows, 1, false);
  const auto& early = last_of(rows, 1, true);
  return {.id = "compute.checkpointing_doubles",
          .sentence =
              "Activation checkpointing \"roughly doubles the compute for the checkpointed "
              "layers\".",
          .verdict = "true under a condition",
          .condition =
              "what doubles is the forward of those layers; their step goes from three units of "
              "one forward to four, 4/3, since a product's backward is two products, which are not "
              "done again",
          .evidence = fmt::format(
              "{} layers, each a region: the forward of those layers is {:.3f} times what it was "
              "({:.3f} if the second run stops early, for it leaves out a block's last product), "
              "and the step "
              "{:.3f} times ({:.3f}); the head, which is not checkpointed, keeps it below 4/3. "
              "Counted in operations of matrix products, equal to the closed form.",
              whole.spec.layers, whole.layer_ratio(), early.layer_ratio(), whole.step_ratio(),
              early.step_ratio())};
}

}  // namespace

ClaimsSection compute_section(const ClaimsOptions& options) {
  const auto rows = measure(options);
  ClaimsSection section;
  section.id = "compute";
  section.title = "What activation checkpointing costs";
  section.data = data_of(rows);
  section.claims = {claim_of(rows)};
  section.checks = checks_of(rows);
  section.html =
      "<p>A stack of transformer blocks with an embedding and a head. Operations are those of "
      "matrix products, 2 m n k each, counted operator by operator from the shapes of their "
      "inputs; forward is L F + H, backward twice that, and the second run of a region its layers' "
      "F each. So a step with every layer a region is 1 + L F / (3 (L F + H)) of one without: 4/3 "
      "but for the head; the embedding has no products. A region that stops early leaves out its "
      "last product. Times are medians on one "
      "thread, for what they are worth: nothing is asserted of them.</p>\n" +
      plot_of(rows) + table_of(rows);
  return section;
}

}  // namespace shardproof
