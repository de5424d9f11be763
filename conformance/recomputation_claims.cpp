#include "conformance/recomputation_claims.h"

#include <fmt/format.h>

#include <algorithm>

#include "conformance/html.h"
#include "conformance/session.h"

namespace shardproof {
namespace {

using nlohmann::json;

struct Wrapping {
  const char* id;
  const char* words;
  const char* layers;
  const char* order;
};
constexpr Wrapping kWrappings[] = {
    {"inside", "every layer, inside its unit", "all", "inside"},
    {"around", "every layer, around its unit", "all", "around"},
    {"segments", "segments of several layers, around their units", "segments", "inside"},
};

struct Row {
  Wrapping wrapping;
  int world_size = 1;
  std::int64_t tensors = 0;  // recomputed, of all ranks, micro-batches and steps
  std::int64_t elements = 0;
  std::int64_t differing = 0;    // tensors that are not what was stored
  std::int64_t from_device = 0;  // gradients, parameters and the like that are not one device's
};

Row measure(const Wrapping& wrapping, int world_size, const ClaimsOptions& options) {
  SessionOptions session;
  auto& scenario = session.scenario;
  scenario.model.layers = 4;
  scenario.model.width = 32;
  scenario.model.heads = 4;
  scenario.model.context = 16;
  scenario.model.dropout = 0.1;
  scenario.data.kind = "synthetic";
  scenario.seed = options.seed;
  scenario.world_size = world_size;
  scenario.max_norm = 0.1;
  scenario.steps = 3;
  scenario.checkpointing.layers = wrapping.layers;
  scenario.checkpointing.order = wrapping.order;
  session.python = false;  // python_reference_test holds the two references to each other
  session.timeout = options.timeout;
  const auto summary = run_session(session);
  Row row{wrapping, world_size};
  for (const auto& each : summary.rows) {
    if (each.reference == "stored") {
      row.tensors += each.tensors * world_size;
      row.elements += each.elements;
      row.differing += each.failed;
    } else if (each.reference == "replay") {
      row.from_device += each.failed;
    }
  }
  return row;
}

Check check_of(const Row& row, const char* what, std::int64_t differing, const std::string& seen) {
  return {
      fmt::format("claims.recomputation.{}.float32.w{}.{}", what, row.world_size, row.wrapping.id),
      differing == 0 && row.tensors > 0, seen};
}

std::string table_of(const std::vector<Row>& rows) {
  std::string html =
      "<p>A transformer of four layers with dropout, three steps of AdamW with clipping. Every "
      "tensor that autograd saved in a region is kept beside its recomputation and compared, bit "
      "by bit; outputs, gradients, norms, parameters and optimizer states are held to one device "
      "that stores everything.</p>\n<table><thead><tr><th>regions</th><th class=\"n\">ranks</th>"
      "<th class=\"n\">tensors recomputed</th><th class=\"n\">elements</th><th class=\"n\">not as "
      "stored</th><th class=\"n\">not as one device</th></tr></thead><tbody>\n";
  for (const auto& row : rows) {
    html += fmt::format(
        "<tr><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>"
        "<td class=\"n\">{}</td><td class=\"n\">{}</td></tr>\n",
        escaped(row.wrapping.words), row.world_size, row.tensors, row.elements, row.differing,
        row.from_device);
  }
  return html + "</tbody></table>\n";
}

}  // namespace

ClaimsSection recomputation_section(const ClaimsOptions& options) {
  ClaimsSection section;
  section.id = "recomputation";
  section.title = "What activation checkpointing recomputes";
  std::vector<Row> rows;
  std::int64_t tensors = 0;
  std::int64_t elements = 0;
  std::int64_t differing = 0;
  std::int64_t from_device = 0;
  for (const auto& wrapping : kWrappings) {
    for (const int world_size : {1, 2, 4, 8}) {
      if (options.quick && world_size > 2) {
        continue;
      }
      if (options.progress) {
        options.progress(fmt::format("recomputation: {}, {} ranks", wrapping.words, world_size));
      }
      rows.push_back(measure(wrapping, world_size, options));
      const auto& row = rows.back();
      tensors += row.tensors;
      elements += row.elements;
      differing += row.differing;
      from_device += row.from_device;
      section.checks.push_back(
          check_of(row, "as_stored", row.differing,
                   fmt::format("{} of {} recomputed tensors are not what was stored; wanted: none",
                               row.differing, row.tensors)));
      section.checks.push_back(check_of(
          row, "as_one_device", row.from_device,
          fmt::format("{} tensors of the steps are not those of one device that stores; wanted: "
                      "none",
                      row.from_device)));
      section.data["runs"].push_back({{"regions", wrapping.id},
                                      {"world_size", world_size},
                                      {"tensors", row.tensors},
                                      {"elements", row.elements},
                                      {"not_as_stored", row.differing},
                                      {"not_as_one_device", row.from_device}});
    }
  }
  section.claims.push_back(
      {"recomputation.as_stored", "Recomputed activations are the stored ones.",
       differing == 0 ? "true under a condition" : "false",
       differing == 0 ? "the second run has the first one's inputs, parameters, buffers and random "
                        "numbers, and reads nothing else that changes; `shardproof "
                        "checkpoint-check` asks a module"
                      : "",
       fmt::format("{} of {} tensors ({} elements) differ in any bit, dropout included", differing,
                   tensors, elements)});
  section.claims.push_back(
      {"recomputation.either_order",
       "Checkpointing may be wrapped around layers before or after they are sharded.",
       from_device == 0 ? "true" : "false", "",
       fmt::format("inside the units, around them and around several, on 1 to {} ranks: {} tensors "
                   "of the steps differ from one device that stores everything",
                   rows.back().world_size, from_device)});
  section.html = table_of(rows);
  return section;
}

}  // namespace shardproof
