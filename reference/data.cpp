#include "reference/data.h"

#include <ATen/ops/cat.h>
#include <fmt/format.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

#include "reference/models.h"

namespace shardproof {
namespace {

// What the first counter of a hash says the number is for.
constexpr std::uint64_t kCorpusStream = 1;
constexpr std::uint64_t kTokenStream = 2;
constexpr std::uint64_t kInputStream = 3;
constexpr std::uint64_t kTargetStream = 4;

std::uint64_t mix(std::uint64_t z) {
  z ^= z >> 30;
  z *= 0xBF58476D1CE4E5B9;
  z ^= z >> 27;
  z *= 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

/// The hash with one more counter.
std::uint64_t extend(std::uint64_t hash, std::uint64_t counter) {
  return mix(hash ^ (counter + 0x9E3779B97F4A7C15));
}

std::string read_corpus(const Scenario& scenario) {
  if (scenario.data.corpus.empty()) {
    throw ScenarioError(
        "data.corpus names no file; wanted: at least one, because data.kind is \"bytes\" "
        "(or set data.kind to \"synthetic\")");
  }
  std::string bytes;
  for (const auto& path : scenario.data.corpus) {
    std::ifstream file(path, std::ios::binary);
    if (!file || std::filesystem::is_directory(path)) {
      const auto reason =
          file ? std::string("is a directory") : std::generic_category().message(errno);
      throw ScenarioError(
          fmt::format("data.corpus: file \"{}\" cannot be read ({})", path, reason));
    }
    bytes.append(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  const auto context = static_cast<std::uint64_t>(scenario.model.context);
  if (bytes.size() <= context) {
    throw ScenarioError(
        fmt::format("data.corpus holds {} bytes; wanted: more than model.context, which is {}",
                    bytes.size(), context));
  }
  return bytes;
}

/// Where a sample stands in a run, hashed: what all its numbers start from.
struct SampleKey {
  std::uint64_t seed;
  std::uint64_t step;
  std::uint64_t micro_batch;
  std::uint64_t rank;
  std::uint64_t sample;

  std::uint64_t hash(std::uint64_t stream) const {
    return hash_counters(seed, {stream, step, micro_batch, rank, sample});
  }
};

/// Input and target rows of one sample of a language model: `token(i)` for i in [0, context], and
/// one later.
template <typename Token>
void fill_tokens(std::int64_t context, std::int64_t* input, std::int64_t* target, Token token) {
  std::int64_t next = token(0);
  for (std::int64_t i = 0; i < context; ++i) {
    input[i] = next;
    next = token(i + 1);
    target[i] = next;
  }
}

/// Multiples of 1/1024 in [-1, 1), which every floating dtype with 11 bits of significand holds
/// exactly (bfloat16, with 8, does not).
template <typename Value>
void fill_dyadic(std::uint64_t hash, std::int64_t size, Value* values) {
  for (std::int64_t i = 0; i < size; ++i) {
    const auto bits = extend(hash, static_cast<std::uint64_t>(i)) >> 53;
    values[i] = static_cast<Value>(static_cast<std::int64_t>(bits) - 1024) / 1024;
  }
}

template <typename Value>
Batch dyadic_batch(const Scenario& scenario, SampleKey key) {
  const auto options = torch::TensorOptions().dtype(c10::CppTypeToScalarType<Value>());
  const auto& model = scenario.model;
  const auto inputs = model.kind == "mlp" ? model.sizes.front() : model.quirk_width;
  const auto targets = model.kind == "mlp" ? model.sizes.back() : model.quirk_width;
  Batch batch{torch::empty({scenario.batch, inputs}, options),
              torch::empty({scenario.batch, targets}, options)};
  auto* input = batch.input.mutable_data_ptr<Value>();
  auto* target = batch.target.mutable_data_ptr<Value>();
  for (std::int64_t b = 0; b < scenario.batch; ++b) {
    key.sample = static_cast<std::uint64_t>(b);
    fill_dyadic(key.hash(kInputStream), inputs, input + b * inputs);
    fill_dyadic(key.hash(kTargetStream), targets, target + b * targets);
  }
  return batch;
}

Batch token_batch(const Scenario& scenario, const std::string* corpus, SampleKey key) {
  const auto context = scenario.model.context;
  const auto vocabulary = static_cast<std::uint64_t>(scenario.model.vocabulary);
  Batch batch{torch::empty({scenario.batch, context}, torch::kInt64),
              torch::empty({scenario.batch, context}, torch::kInt64)};
  auto* inputs = batch.input.mutable_data_ptr<std::int64_t>();
  auto* targets = batch.target.mutable_data_ptr<std::int64_t>();
  for (std::int64_t b = 0; b < scenario.batch; ++b) {
    key.sample = static_cast<std::uint64_t>(b);
    auto* input = inputs + b * context;
    auto* target = targets + b * context;
    if (corpus != nullptr) {
      const auto windows = corpus->size() - static_cast<std::uint64_t>(context);
      const char* start = corpus->data() + key.hash(kCorpusStream) % windows;
      fill_tokens(context, input, target,
                  [start](std::int64_t i) { return static_cast<unsigned char>(start[i]); });
    } else {
      const auto hash = key.hash(kTokenStream);
      fill_tokens(context, input, target, [hash, vocabulary](std::int64_t i) {
        return static_cast<std::int64_t>(extend(hash, static_cast<std::uint64_t>(i)) % vocabulary);
      });
    }
  }
  return batch;
}

}  // namespace

std::uint64_t hash_counters(std::uint64_t seed, std::initializer_list<std::uint64_t> counters) {
  std::uint64_t hash = mix(seed);
  for (const auto counter : counters) {
    hash = extend(hash, counter);
  }
  return hash;
}

Dataset::Dataset(const Scenario& scenario) : scenario_(scenario) {
  if (scenario.data.kind == "bytes") {
    corpus_ = std::make_shared<const std::string>(read_corpus(scenario));
  }
}

Batch Dataset::batch(int step, int micro_batch, int rank) const {
  const SampleKey key{scenario_.seed, static_cast<std::uint64_t>(step),
                      static_cast<std::uint64_t>(micro_batch), static_cast<std::uint64_t>(rank), 0};
  if (scenario_.model.kind == "transformer") {
    return token_batch(scenario_, corpus_.get(), key);
  }
  if (scenario_.dtype == "float64") {
    return dyadic_batch<double>(scenario_, key);
  }
  // Exact in float32, so that a 16-bit dtype rounds once.
  const auto dtype = dtype_named(scenario_.dtype);
  auto batch = dyadic_batch<float>(scenario_, key);
  return {batch.input.to(dtype), batch.target.to(dtype)};
}

Batch Dataset::whole_batch(int step) const {
  std::vector<torch::Tensor> inputs;
  std::vector<torch::Tensor> targets;
  for (int micro_batch = 0; micro_batch < scenario_.micro_batches; ++micro_batch) {
    for (int rank = 0; rank < scenario_.world_size; ++rank) {
      auto part = batch(step, micro_batch, rank);
      inputs.push_back(std::move(part.input));
      targets.push_back(std::move(part.target));
    }
  }
  return {at::cat(inputs), at::cat(targets)};
}

}  // namespace shardproof
