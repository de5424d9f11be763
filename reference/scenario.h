#pragma once
// A scenario says everything about one training run: model, data, seed, world size, optimizer,
// clipping, steps. It is a plain value with one JSON form (reference/scenario.schema.json) and one
// dotted name. What the fields mean to the bit stands in reference/README.md, which the Python
// reference follows too.

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/errors.h"

namespace shardproof {

/// A scenario is malformed or impossible. The message names the field, what was seen, what is
/// wanted.
struct ScenarioError : fsdp::UsageError {
  using UsageError::UsageError;
};

struct ModelSpec {
  std::string kind = "transformer";  // "mlp", "transformer" or "quirks"
  // transformer: byte-level language model, pre-norm, causal attention, GELU.
  std::int64_t layers = 4;
  std::int64_t width = 256;
  std::int64_t heads = 8;  // divides width
  std::int64_t context = 64;
  std::int64_t vocabulary = 256;  // at least 256 when the data are bytes
  bool tied = false;              // head.weight is token_embedding.weight, the same parameter
  // mlp: Linear, GELU, ..., Linear. Sizes from input to output; at least two.
  std::vector<std::int64_t> sizes = {16, 32, 32, 8};
  // quirks: layers of quirk_width to quirk_width, with what sharding stumbles over: names of
  // quirk_names(), each at most once.
  std::int64_t depth = 3;
  std::int64_t quirk_width = 8;
  std::vector<std::string> quirks;
  double dropout = 0;  // in [0, 1); the quirks have none
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

/// Mixed precision. Each dtype is a name as in Scenario::dtype, or "": not set.
struct PrecisionSpec {
  std::string parameter;      // of forward and backward; "": Scenario::dtype
  std::string reduce;         // of gradients while they are summed over ranks; "": as parameter
  std::string output;         // that the model's output is cast to; "": as it comes
  std::string buffer;         // of floating-point buffers; "": Scenario::dtype
  bool exempt_norms = false;  // LayerNorms compute in Scenario::dtype
  bool operator==(const PrecisionSpec&) const = default;
};

/// What gradients are divided by before and after they are summed over ranks. Both 0: by the world
/// size after it; for float16 by two factors (divide_factors). post alone: pre is 1.
struct DivideSpec {
  double pre = 0;
  double post = 0;
  bool operator==(const DivideSpec&) const = default;
};

/// When the subject gathers and frees parameters. Changes no bits.
struct ScheduleSpec {
  int reshard_after_forward = -1;  // -1: the strategy's own; 0: never; 1: always; g > 1: to groups
                                   // of g ranks
  int forward_prefetch = 0;        // units gathered ahead in forward, 0 to 8
  std::string backward_prefetch = "pre";  // "pre", "post" or "none"
  int limit_gathers = 0;                  // gathers under way at once; 0: no limit
  bool operator==(const ScheduleSpec&) const = default;
};

/// Which layers the subject runs again in backward instead of keeping their activations. Changes no
/// bits.
struct CheckpointingSpec {
  // "none"; "all": every layer is a region; "alternate": the first, the third, ...; "segments"
  // (transformer): about sqrt(layers) regions of several layers each, the last included.
  std::string layers = "none";
  std::string order = "inside";  // "inside" the layer's unit, or "around" it
  bool early_stop = true;        // a second run ends at the last tensor that is needed
  bool operator==(const CheckpointingSpec&) const = default;
};

struct Scenario {
  ModelSpec model;
  DataSpec data;
  OptimizerSpec optimizer;
  std::uint64_t seed = 0;
  int world_size = 4;  // 1 to 512
  // "full_shard", "shard_grad_op", "no_shard", "hybrid_shard" or "hybrid_shard_zero2"
  std::string strategy = "full_shard";
  int replicas = 1;            // hybrids: groups of ranks that each hold the whole model
  std::string wrap = "layer";  // "layer": every layer is a unit, and the rest; "model": one unit
  // Of the parameters that are kept and optimised: "float32", "float64", "bfloat16" or "float16".
  std::string dtype = "float32";
  PrecisionSpec precision;
  double max_norm = 1.0;   // gradient clipping; 0 is none
  double norm_type = 2;    // above 0; infinity ("inf" in JSON) for the largest element
  int micro_batches = 1;   // batches that a rank goes through in a step
  std::int64_t batch = 4;  // samples per rank and micro-batch
  // When gradients are summed over ranks: "each": after each micro-batch; "last": after the last;
  // "last_all_reduce": over shards after each, over replicas after the last.
  std::string accumulation = "each";
  DivideSpec divide;
  double loss_scale = 0;  // the loss is multiplied by it before backward; 0 is none
  ScheduleSpec schedule;
  CheckpointingSpec checkpointing;
  // "plain"; "meta": parameters are made without storage; "sync": only rank 0 has the weights.
  // Changes no bits.
  std::string construction = "plain";
  int steps = 20;
  std::string backend = "in_process";
  std::string device = "cpu";
  bool operator==(const Scenario&) const = default;
};

/// The names that model.quirks may have, in the order in which JSON and the dotted name give them.
/// What each does stands in reference/README.md.
const std::vector<std::string>& quirk_names();
bool has_quirk(const Scenario& scenario, std::string_view name);

/// world_size = replicas * shards; rank = replica * shards + shard.
struct Layout {
  int replicas = 1;
  int shards = 1;
};
/// Of a validated scenario: no_shard is world_size replicas of one shard.
Layout layout_of(const Scenario& scenario);

/// Layers of each region of checkpointing.layers "segments": ceil(L / s) of L layers, s being
/// sqrt(L) rounded to the nearest; the last region has the rest.
std::int64_t layers_per_segment(const Scenario& scenario);

/// Names of the dtypes that forward and backward run in, and that gradients are summed in.
std::string parameter_dtype(const Scenario& scenario);
std::string reduce_dtype(const Scenario& scenario);
/// The factors that gradients are divided by before and after their sum over ranks; 1 for none.
DivideSpec divide_factors(const Scenario& scenario);

/// Throws ScenarioError naming the first field that is out of range or does not fit the others. A
/// field that belongs to another kind of model, data or optimizer (model.sizes of a transformer)
/// must have its default, and one that would have no effect (replicas without a hybrid strategy)
/// too, so that scenarios that differ train differently. Files of the corpus are not looked at, and
/// may still be missing from the list: the Dataset asks for them.
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
