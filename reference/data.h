#pragma once
// The data of a scenario: a pure function of (seed, step, micro-batch, rank, sample), so that any
// process can make any rank's batch without reading the others'.

#include <torch/types.h>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "reference/scenario.h"

namespace shardproof {

/// Samples along dimension 0, on the CPU. mlp: [batch, sizes.front()] and [batch, sizes.back()] in
/// the scenario's dtype (in bfloat16 rounded). quirks: both [batch, quirk_width], likewise.
/// transformer: [batch, context] int64 tokens, the target being the input's next tokens.
struct Batch {
  torch::Tensor input;
  torch::Tensor target;
};

/// The counter-based generator: h = mix(seed), then h = mix(h ^ (v + 0x9E3779B97F4A7C15)) for each
/// v, where mix is the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
std::uint64_t hash_counters(std::uint64_t seed, std::initializer_list<std::uint64_t> counters);

class Dataset {
 public:
  /// Reads the corpus. Throws ScenarioError naming a file that is missing or unreadable, or a
  /// corpus that is too short for the context (wanted: more than `context` bytes).
  explicit Dataset(const Scenario& scenario);

  /// The batch of one rank: [batch, ...].
  Batch batch(int step, int micro_batch, int rank) const;
  /// All ranks' and micro-batches' batches of one step, joined along dimension 0: micro-batch by
  /// micro-batch, rank by rank.
  Batch whole_batch(int step) const;
  std::size_t corpus_bytes() const { return corpus_ ? corpus_->size() : 0; }
  /// The joined corpus; nullptr for synthetic data.
  const std::string* corpus() const { return corpus_.get(); }

 private:
  Scenario scenario_;
  std::shared_ptr<const std::string> corpus_;
};

}  // namespace shardproof
