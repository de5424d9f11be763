#pragma once
// A scenario says everything about one training run: model, data, seed, world size, optimizer,
// clipping, steps. It is a plain value with one JSON form (reference/scenario.schema.json) and one
// dotted name. What the fields mean to the bit stands in reference/README.md, which the Python
// reference follows too.

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "fsdp/errors.h"

namespace shardproof {

/// A scenario is malformed or impossible. The message names the field, what was seen, what is
/// wanted.
struct ScenarioError : fsdp::UsageError {
  using UsageError::UsageError;
};

struct ModelSpec {
  std::string kind = "transformer";  // "mlp" or "transformer"
  // transformer: byte-level language model, pre-norm, causal attention, GELU, untied output.
  std::int64_t layers = 4;
  std::int64_t width = 256;
  std::int64_t heads = 8;  // divides width
  std::int64_t context = 64;
  std::int64_t vocabulary = 256;  // at least 256 when the data are bytes
  // mlp: Linear, GELU, ..., Linear. Sizes from input to output; at least two.
  std::vector<std::int64_t> sizes = {16, 32, 32, 8};
  double dropout = 0;  // in [0, 1)
  bool operator==(const ModelSpec&) const = default;
};

struct DataSpec {
  std::string kind =
      "bytes";  // "bytes": windows of the corpus; "synthetic": computed from the seed
  std::vector<std::string> corpus;  // files, read in this order and joined; only for "bytes"
  bool operator==(const DataSpec&) const = default;
};

struct OptimizerSpec {
  std::string kind = "adamw";  // "adamw" or "sgd"
  double lr = 1e-3;
  double momentum = 0;  // sgd
  double beta1 = 0.9;   // adamw
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
  bool operator==(const OptimizerSpec&) const = default;
};

struct Scenario {
  ModelSpec model;
  DataSpec data;
  OptimizerSpec optimizer;
  std::uint64_t seed = 0;
  int world_size = 4;  // 1 to 512
  std::string strategy = "full_shard";
  std::string wrap = "layer";     // "layer": every layer is a unit, and the rest; "model": one unit
  std::string dtype = "float32";  // "float32" or "float64"
  double max_norm = 1.0;          // gradient clipping; 0 is none
  int micro_batches = 1;          // gradients are reduced after each, and added up
  std::int64_t batch = 4;         // samples per rank and micro-batch
  int steps = 20;
  std::string backend = "in_process";
  std::string device = "cpu";
  bool operator==(const Scenario&) const = default;
};

/// Throws ScenarioError naming the first field that is out of range or does not fit the others. A
/// field that belongs to another kind of model, data or optimizer (model.sizes of a transformer)
/// must have its default, so that scenarios that differ train differently. Files of the corpus are
/// not looked at, and may still be missing from the list: the Dataset asks for them.
void validate(const Scenario& scenario);

/// The dotted name, made of lower-case letters, digits and underscores between dots:
/// <model>.<optimizer>.<dtype>.w<world>.<variant>, for example
/// "transformer.adamw.float32.w4.full_shard_layer". The variant tells everything that differs from
/// the defaults, so different valid scenarios have different names (corpus and seed excepted):
/// "_layers2_lr0p5_backend_nccl", where p is the point and m the minus of a number.
std::string dotted_name(const Scenario& scenario);

/// To and from the JSON form. Missing fields take their defaults; an unknown field, a wrong type or
/// a number out of range throws ScenarioError naming it with its path, e.g. "model.layers".
/// from_json validates. to_json writes every field, and "schema": "shardproof.scenario/1";
/// from_json refuses another version.
nlohmann::json to_json(const Scenario& scenario);
Scenario scenario_from_json(const nlohmann::json& json);
/// Reads a file. Errors name the file, and for malformed JSON the line and column. A field that an
/// object has twice is an error too.
Scenario load_scenario(const std::filesystem::path& path);

}  // namespace shardproof
