#pragma once
// What lies where in a checkpoint: index.json and SHA256SUMS. For example
//
//   {"format": "fsdp.checkpoint", "version": 1, "world_size": 2,
//    "files": [{"name": "rank-00000.safetensors", "bytes": 5400}, ...],
//    "tensors": {"model/weight": {"dtype": "F32", "shape": [3, 4], "own": [],
//                                 "pieces": [{"file": 0, "begin": 0, "numel": 8},
//                                            {"file": 1, "begin": 8, "numel": 4}]},
//                "optimizer/exp_avg/weight": ...},
//    "optimizer": {"type": "AdamW", "groups": [{"options": {"lr": 0.001, ...},
//                  "parameters": ["weight"]}], "counts": {"weight": {"step": 7}}},
//    "metadata": {}}
//
// A piece is the tensor of that name in the rank's file, one-dimensional; a tensor that is the same
// on all ranks is one piece, in its own shape. "own" lists ranks whose files hold a version of
// their own. Each file also has the rank's random generator, as "generator".

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "optimizer_state.h"

namespace fsdp {

inline constexpr const char* kIndexName = "index.json";
inline constexpr const char* kSumsName = "SHA256SUMS";
inline constexpr const char* kGeneratorKey = "generator";
inline constexpr const char* kModelPrefix = "model/";
inline constexpr const char* kOptimizerPrefix = "optimizer/";

std::string rank_file_name(int rank);

struct IndexedTensor {
  struct Piece {
    int file = 0;
    std::int64_t begin = 0;
    std::int64_t numel = 0;
  };
  TensorInfo info;
  std::vector<Piece> pieces;  // ascending; together they are the tensor
  std::vector<int> own;
};

struct CheckpointIndex {
  int world_size = 1;
  std::vector<std::int64_t> file_bytes;  // by rank
  std::map<std::string, IndexedTensor> tensors;
  std::optional<SavedOptimizer> optimizer;
  std::map<std::string, std::string> metadata;
};

using Checksums = std::map<std::string, std::string>;  // SHA-256 by file name

/// Writes both files into the folder. `sums` are those of the ranks' files.
void write_index(const std::filesystem::path& folder, const CheckpointIndex& index, Checksums sums);

struct ReadIndex {
  CheckpointIndex index;
  Checksums sums;
  std::string digest;  // of SHA256SUMS, and so of the whole checkpoint
};
/// Reads and checks both files. Throws FileError.
ReadIndex read_index(const std::filesystem::path& folder);

}  // namespace fsdp
