#pragma once
// What torch.nn.utils.clip_grad_norm_ does to models that PyTorch itself has sharded: the answer of
// reference/python/clipping_peers.py, which runs FSDP1 and FSDP2 on gloo.

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "conformance/claims.h"

namespace shardproof {

struct PeerWay {
  std::string way;   // "fsdp1_flat", "fsdp1_orig" (use_orig_params) or "fsdp2"
  std::string clip;  // "plain": torch.nn.utils.clip_grad_norm_; "own": the model's clip_grad_norm_
  std::vector<double> returned;  // by rank: the norm that the call returned there
  std::int64_t elements = 0;     // most that a rank sums up, and in how many tensors
  std::int64_t tensors = 0;
  double after = 0;  // norm of the whole clipped gradient
};

struct PeerWorld {
  int world_size = 0;
  double single = 0;  // the norm on one device
  std::vector<PeerWay> ways;
};

struct PeerClipping {
  std::string torch;  // its version
  double max_norm = 0;
  std::vector<PeerWorld> worlds;
};

struct PeerOptions {
  std::vector<int> world_sizes = {2, 4};
  std::uint64_t seed = 0;
  std::filesystem::path python;   // empty: as PythonReference::Options says
  std::filesystem::path program;  // empty: clipping_peers.py where it lay when this was compiled
  std::chrono::seconds timeout{300};  // for all of it
};

/// Runs the program, and ends it and all its ranks. Throws PythonUnusable, PythonReferenceTimeout
/// or PythonReferenceError (python_reference.h).
PeerClipping run_clipping_peers(const PeerOptions& options);

/// Plain is local on FSDP1 and right on FSDP2; FSDP1's own is global. Norms that are computed twice
/// may differ by what rounding allows, gamma(elements + tensors + ranks) in float32.
std::vector<Check> check_peers(const PeerClipping& peers);

}  // namespace shardproof
