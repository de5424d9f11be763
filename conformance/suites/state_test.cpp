// Saving and loading: what goes on after a load goes on as if nothing had been interrupted, at any
// number of ranks; files are those of PyTorch; what is damaged or does not fit is refused on every
// rank, and nothing is changed. Names such as pytorch/torchtitan#1136 are reports of users.

#include <fsdp/errors.h>
#include <fsdp/fully_shard.h>
#include <fsdp/process_group.h>
#include <fsdp/random.h>
#include <fsdp/safetensors.h>
#include <fsdp/state.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <csignal>
#include <cstring>
#include <fstream>
#include <mutex>
#include <random>
#include <set>

#include "temporary_folder.h"

namespace fsdp {
namespace {

namespace fs = std::filesystem;
using shardproof::TemporaryFolder;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

constexpr std::int64_t kRows = 10;
constexpr std::int64_t kWidth = 4;

// ---- A model with everything that can be saved --------------------------------------------------

struct BlockImpl : Module<BlockImpl> {
  BlockImpl() {
    linear = register_module("linear", torch::nn::Linear(kWidth, kWidth));
    dropout = register_module("dropout", Dropout(0.25));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x + dropout(torch::tanh(linear(x))); }
  torch::nn::Linear linear{nullptr};
  Dropout dropout{nullptr};
};
FSDP_MODULE(Block);

/// Uses a weight that belongs to another module too.
struct HeadImpl : Module<HeadImpl> {
  explicit HeadImpl(const torch::Tensor& shared) { weight = register_parameter("weight", shared); }
  torch::Tensor forward(const torch::Tensor& x) { return torch::matmul(x, weight.t()); }
  torch::Tensor weight;
};
FSDP_MODULE(Head);

struct NetworkImpl : Module<NetworkImpl> {
  explicit NetworkImpl(std::int64_t rows = kRows) {
    embedding = register_module("embedding", torch::nn::Embedding(rows, kWidth));
    first = register_module("first", Block());
    second = register_module("second", Block());
    head = register_module("head", Head(embedding->weight));
    gain = register_parameter("gain", torch::ones({}));
    frozen = register_parameter("frozen", torch::ones({3}), /*requires_grad=*/false);
    mean = register_buffer("mean", torch::zeros({kWidth}));
    calls = register_buffer("calls", torch::zeros({}, torch::kLong));
  }
  torch::Tensor forward(const torch::Tensor& ids) {
    const auto x = second(first(torch::embedding(embedding->weight, ids))) * gain;
    mean.mul_(0.9).add_(x.detach().mean(0), 0.1);  // of this rank's data only
    calls.add_(1);
    return head(x) * frozen.sum();
  }
  torch::nn::Embedding embedding{nullptr};
  Block first{nullptr};
  Block second{nullptr};
  Head head{nullptr};
  torch::Tensor gain;
  torch::Tensor frozen;
  torch::Tensor mean;
  torch::Tensor calls;
};
FSDP_MODULE(Network);

const std::vector<std::string> kNames = {
    "calls", "embedding.weight",   "first.linear.bias",   "first.linear.weight", "frozen", "gain",
    "mean",  "second.linear.bias", "second.linear.weight"};

/// The same values on every rank.
void fill(torch::nn::Module& module, std::uint64_t seed) {
  const torch::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  for (auto& parameter : module.parameters()) {
    parameter.copy_(torch::randn(parameter.sizes(), generator).mul_(0.3));
  }
}

Network sharded_network(const BackendPtr& group, std::uint64_t seed = 1,
                        at::ScalarType dtype = at::kFloat) {
  Network network;
  fill(*network, seed);
  network->to(dtype);
  network->calls.set_data(network->calls.to(torch::kLong));
  fully_shard(network->first, {group});
  fully_shard(network->second, {group});
  fully_shard(network, {group});
  return network;
}

/// Each parameter once, though a shared one has two names.
std::vector<torch::Tensor> distinct_parameters(torch::nn::Module& module) {
  std::vector<torch::Tensor> found;
  std::set<const void*> seen;
  for (const auto& parameter : module.parameters()) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) {
      found.push_back(parameter);
    }
  }
  return found;
}

enum class Kind { sgd, adam, adamw, adagrad, rmsprop };
constexpr std::array kKinds = {Kind::sgd, Kind::adam, Kind::adamw, Kind::adagrad, Kind::rmsprop};

std::unique_ptr<torch::optim::Optimizer> make_optimizer(Kind kind,
                                                        std::vector<torch::Tensor> parameters) {
  switch (kind) {
    case Kind::sgd:
      return std::make_unique<torch::optim::SGD>(
          std::move(parameters), torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
    case Kind::adam:
      return std::make_unique<torch::optim::Adam>(std::move(parameters),
                                                  torch::optim::AdamOptions(0.01).amsgrad(true));
    case Kind::adamw:
      return std::make_unique<torch::optim::AdamW>(std::move(parameters),
                                                   torch::optim::AdamWOptions(0.01));
    case Kind::adagrad:
      return std::make_unique<torch::optim::Adagrad>(
          std::move(parameters), torch::optim::AdagradOptions(0.05).lr_decay(0.1));
    case Kind::rmsprop:
      return std::make_unique<torch::optim::RMSprop>(
          std::move(parameters), torch::optim::RMSpropOptions(0.01).momentum(0.5).centered(true));
  }
  throw std::logic_error("no such kind");
}

/// One step on this rank's data of that step. Draws dropout masks from the rank's generator.
template <typename ModuleHolder>
void train_step(ModuleHolder& model, torch::optim::Optimizer& optimizer, int rank, int step,
                std::int64_t rows = kRows) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(1000 * (step + 1) + rank);
  const auto ids = torch::randint(rows, {6}, generator, torch::kLong);
  optimizer.zero_grad();
  model(ids).square().mean().backward();
  optimizer.step();
}

// ---- Comparing ----------------------------------------------------------------------------------

bool same_bits(const torch::Tensor& a, const torch::Tensor& b) {
  const auto x = a.detach().contiguous();
  const auto y = b.detach().contiguous();
  return x.scalar_type() == y.scalar_type() && x.sizes() == y.sizes() &&
         (x.numel() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0);
}

void expect_same(const StateDict& got, const StateDict& want, const std::string& where) {
  std::vector<std::string> got_names;
  std::vector<std::string> want_names;
  for (const auto& [name, tensor] : got)
    got_names.push_back(name);
  for (const auto& [name, tensor] : want)
    want_names.push_back(name);
  ASSERT_EQ(got_names, want_names) << where;
  for (const auto& [name, tensor] : want) {
    EXPECT_TRUE(same_bits(got.at(name), tensor)) << where << ": " << name << "\n"
                                                 << got.at(name) << "\n"
                                                 << tensor;
  }
}

void expect_same(const OptimizerState& got, const OptimizerState& want, const std::string& where) {
  EXPECT_EQ(got.type, want.type) << where;
  ASSERT_EQ(got.groups.size(), want.groups.size()) << where;
  for (std::size_t i = 0; i < want.groups.size(); ++i) {
    EXPECT_EQ(got.groups[i].options, want.groups[i].options) << where;
    EXPECT_THAT(got.groups[i].parameters,
                testing::UnorderedElementsAreArray(want.groups[i].parameters))
        << where;
  }
  ASSERT_EQ(got.state.size(), want.state.size()) << where;
  for (const auto& [name, values] : want.state) {
    ASSERT_TRUE(got.state.contains(name)) << where << ": " << name;
    expect_same(got.state.at(name), values, where + ": " + name);
  }
}

/// All that training depends on, on this rank. A collective.
struct Snapshot {
  StateDict model;
  std::map<std::string, torch::Tensor> buffers;  // this rank's own
  OptimizerState optimizer;
  torch::Tensor generator;
};

Snapshot snapshot(torch::nn::Module& module, const torch::optim::Optimizer& optimizer,
                  const BackendPtr& group = nullptr) {
  Snapshot taken;
  taken.model = full_state_dict(module, {group});
  for (const auto& buffer : module.named_buffers()) {
    taken.buffers[buffer.key()] = buffer.value().clone();
  }
  taken.optimizer = full_optimizer_state(module, optimizer, {group});
  taken.generator = rank_generator().get_state();
  return taken;
}

void expect_same(const Snapshot& got, const Snapshot& want, const std::string& where) {
  expect_same(got.model, want.model, where + ": model");
  expect_same(got.buffers, want.buffers, where + ": buffers");
  expect_same(got.optimizer, want.optimizer, where + ": optimizer");
  EXPECT_TRUE(same_bits(got.generator, want.generator)) << where << ": generator";
}

void on_ranks(int world_size, const std::function<void(RankContext&)>& body) {
  RunRanksOptions options;
  options.group.timeout = std::chrono::seconds(60);
  options.seed = 7;
  run_ranks(world_size, body, options);
}

/// What `action` throws, or "".
template <typename Action>
std::string refusal(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// ---- Files --------------------------------------------------------------------------------------

std::string slurp(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void spit(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// Writes SHA256SUMS anew, as somebody who changes a checkpoint on purpose would.
void sum_again(const fs::path& folder) {
  std::string lines;
  for (const auto& name : names_in(folder)) {
    if (name != "SHA256SUMS") {
      std::string digest;
      const auto bytes = slurp(folder / name);
      write_file(folder / name, {bytes}, {.sync = false, .sha256 = &digest});
      lines += digest + "  " + name + "\n";
    }
  }
  spit(folder / "SHA256SUMS", lines);
}

void replace_in(const fs::path& path, const std::string& from, const std::string& to) {
  auto text = slurp(path);
  const auto at = text.find(from);
  ASSERT_NE(at, std::string::npos) << from << " is not in " << path;
  spit(path, text.replace(at, from.size(), to));
}

class State : public testing::Test {
 protected:
  fs::path path(const std::string& name) const { return folder_.path() / name; }

  /// Runs a program of Python; its output.
  std::string python(const std::string& program) const {
    spit(path("program.py"), "import sys\n" + program);
    const char* set = std::getenv("SHARDPROOF_PYTHON");
    const std::string command =
        "'" + std::string(set == nullptr ? SHARDPROOF_DEFAULT_PYTHON : set) + "' -B '" +
        path("program.py").string() + "' '" + folder_.path().string() + "' 2>&1";
    std::FILE* pipe = ::popen(command.c_str(), "r");
    std::string output;
    std::array<char, 4096> buffer{};
    while (const auto got = std::fread(buffer.data(), 1, buffer.size(), pipe)) {
      output.append(buffer.data(), got);
    }
    EXPECT_EQ(::pclose(pipe), 0) << output;
    return output;
  }

 private:
  TemporaryFolder folder_;
};

// ---- Going on -----------------------------------------------------------------------------------

/// Trains, saves, trains on; then loads into a model that has other weights and an optimizer that
/// has taken other steps, trains on, and expects the same.
void expect_unbroken(const fs::path& folder, Kind kind, int world_size,
                     at::ScalarType dtype = at::kFloat) {
  on_ranks(world_size, [&](RankContext& context) {
    const auto where = "kind " + std::to_string(static_cast<int>(kind)) + ", world size " +
                       std::to_string(world_size) + ", rank " + std::to_string(context.rank);
    auto network = sharded_network(context.process_group, 1, dtype);
    const auto optimizer = make_optimizer(kind, distinct_parameters(*network));
    train_step(network, *optimizer, context.rank, 0);
    train_step(network, *optimizer, context.rank, 1);
    save_checkpoint(folder, *network, optimizer.get(), {{}, {{"step", "2"}}});
    train_step(network, *optimizer, context.rank, 2);
    train_step(network, *optimizer, context.rank, 3);
    const auto unbroken = snapshot(*network, *optimizer);

    auto resumed = sharded_network(context.process_group, 99, dtype);
    const auto resumed_optimizer = make_optimizer(kind, distinct_parameters(*resumed));
    train_step(resumed, *resumed_optimizer, context.rank, 50);
    const auto loaded = load_checkpoint(folder, *resumed, resumed_optimizer.get());
    EXPECT_EQ(loaded.world_size, world_size);
    EXPECT_TRUE(loaded.same_world_size);
    EXPECT_EQ(loaded.metadata.at("step"), "2");
    train_step(resumed, *resumed_optimizer, context.rank, 2);
    train_step(resumed, *resumed_optimizer, context.rank, 3);
    expect_same(snapshot(*resumed, *resumed_optimizer), unbroken, where);
  });
}

TEST_F(State, TrainingGoesOnToTheBitWithEveryOptimizerAtEveryWorldSize) {
  for (const auto kind : kKinds) {
    for (const int world_size : {1, 2, 3, 4, 5, 8}) {
      expect_unbroken(path("checkpoint"), kind, world_size);
      EXPECT_THAT(names_in(path("")), ElementsAre("checkpoint"));
    }
  }
}

TEST_F(State, TrainingGoesOnToTheBitInBfloat16) {
  expect_unbroken(path("checkpoint"), Kind::adamw, 3, at::kBFloat16);
  expect_unbroken(path("checkpoint"), Kind::sgd, 8, at::kBFloat16);
}

// pytorch/torchtitan#1136: the loss changed after a resume where rows do not divide by the ranks.
TEST_F(State, AnEmbeddingOfTenRowsOverFourRanksGoesOnToTheBit) {
  on_ranks(4, [&](RankContext& context) {
    const auto make = [&](std::uint64_t seed) {
      auto embedding = wrap(torch::nn::Embedding(10, 4));
      fill(*embedding, seed);
      fully_shard(embedding, {context.process_group});
      return embedding;
    };
    auto embedding = make(1);
    const auto optimizer = make_optimizer(Kind::adam, embedding->parameters());
    for (int step = 0; step < 10; ++step) {
      train_step(embedding, *optimizer, context.rank, step);
    }
    save_checkpoint(path("at10"), *embedding, optimizer.get());
    auto resumed = make(2);
    const auto resumed_optimizer = make_optimizer(Kind::adam, resumed->parameters());
    load_checkpoint(path("at10"), *resumed, resumed_optimizer.get());
    for (int step = 10; step < 20; ++step) {
      train_step(embedding, *optimizer, context.rank, step);
      train_step(resumed, *resumed_optimizer, context.rank, step);
      expect_same(full_state_dict(*resumed), full_state_dict(*embedding),
                  "step " + std::to_string(step));
    }
  });
}

// huggingface/transformers#48237: a rank with an empty share failed to load, and the others waited
// for ever. Here ranks 4 to 7 hold nothing, and then all but rank 0.
TEST_F(State, RanksThatHoldNothingSaveAndLoadLikeTheRest) {
  for (const std::int64_t width : {2, 1}) {
    on_ranks(8, [&](RankContext& context) {
      const auto make = [&](std::uint64_t seed) {
        auto linear = wrap(torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
        fill(*linear, seed);
        fully_shard(linear, {context.process_group});
        return linear;
      };
      const auto step = [&](auto& linear, auto& optimizer) {
        optimizer.zero_grad();
        linear(torch::full({3, width}, 1.0 + context.rank)).square().sum().backward();
        optimizer.step();
      };
      auto linear = make(1);
      EXPECT_EQ(shard_placements(*linear)[0].numel, context.rank < width * width ? 1 : 0);
      const auto optimizer = make_optimizer(Kind::adamw, linear->parameters());
      step(linear, *optimizer);
      save_checkpoint(path("checkpoint"), *linear, optimizer.get());
      const auto whole = full_state_dict(*linear, {nullptr, true, true});
      const auto whole_optimizer = full_optimizer_state(*linear, *optimizer);
      step(linear, *optimizer);

      auto resumed = make(2);
      const auto resumed_optimizer = make_optimizer(Kind::adamw, resumed->parameters());
      load_checkpoint(path("checkpoint"), *resumed, resumed_optimizer.get());
      step(resumed, *resumed_optimizer);
      expect_same(snapshot(*resumed, *resumed_optimizer), snapshot(*linear, *optimizer), "files");

      LoadStateOptions from_rank0;
      from_rank0.broadcast_from_rank0 = true;
      load_full_state_dict(*resumed, whole, from_rank0);
      load_full_optimizer_state(*resumed, *resumed_optimizer, whole_optimizer);
      step(resumed, *resumed_optimizer);
      expect_same(snapshot(*resumed, *resumed_optimizer), snapshot(*linear, *optimizer), "memory");
    });
  }
}

TEST_F(State, ACheckpointOfAnyWorldSizeLoadsAtAnyOther) {
  for (const int saved_size : {1, 2, 3, 5, 8}) {
    StateDict model;
    OptimizerState optimizer_state;
    on_ranks(saved_size, [&](RankContext& context) {
      auto network = sharded_network(context.process_group);
      const auto optimizer = make_optimizer(Kind::adamw, distinct_parameters(*network));
      train_step(network, *optimizer, context.rank, 0);
      train_step(network, *optimizer, context.rank, 1);
      save_checkpoint(path("checkpoint"), *network, optimizer.get());
      auto whole = full_state_dict(*network, {nullptr, /*rank0_only=*/true});
      auto whole_optimizer = full_optimizer_state(*network, *optimizer, {nullptr, true});
      if (context.rank == 0) {
        model = std::move(whole);
        optimizer_state = std::move(whole_optimizer);
      }
    });
    for (const int size : {1, 2, 3, 5, 8}) {
      const auto where = std::to_string(saved_size) + " to " + std::to_string(size);
      on_ranks(size, [&](RankContext& context) {
        auto network = sharded_network(context.process_group, 5);
        const auto optimizer = make_optimizer(Kind::adamw, distinct_parameters(*network));
        const auto generator = rank_generator().get_state();
        const auto loaded = load_checkpoint(path("checkpoint"), *network, optimizer.get());
        EXPECT_EQ(loaded.world_size, saved_size);
        EXPECT_EQ(loaded.same_world_size, size == saved_size);
        EXPECT_EQ(same_bits(generator, rank_generator().get_state()), size != saved_size) << where;
        auto seen = full_state_dict(*network);
        if (size == saved_size) {
          seen["mean"] = model["mean"];  // each rank's own came back
        }
        expect_same(seen, model, where);
        expect_same(full_optimizer_state(*network, *optimizer), optimizer_state, where);

        // The same by way of memory takes the same next step, so no state landed at a wrong place.
        seed_rank_generator(3, context.rank);
        train_step(network, *optimizer, context.rank, 2);
        auto other = sharded_network(context.process_group, 6);
        const auto other_optimizer = make_optimizer(Kind::adamw, distinct_parameters(*other));
        load_full_state_dict(*other, model);
        load_full_optimizer_state(*other, *other_optimizer, optimizer_state);
        seed_rank_generator(3, context.rank);
        train_step(other, *other_optimizer, context.rank, 2);
        auto got = full_state_dict(*network);
        auto want = full_state_dict(*other);
        if (size == saved_size) {
          got["mean"] = want["mean"];
        }
        expect_same(got, want, where + ", next step");
        expect_same(full_optimizer_state(*network, *optimizer),
                    full_optimizer_state(*other, *other_optimizer), where + ", next step");
      });
    }
  }
}

// Running statistics are each rank's own; rank 0's for all would be another run.
TEST_F(State, EachRankGetsItsOwnVersionOfABufferBackAndRank0sAtAnotherWorldSize) {
  const auto own = [](int rank) { return torch::full({kWidth}, rank == 2 ? 5.0 : 1.0); };
  on_ranks(3, [&](RankContext& context) {
    auto network = sharded_network(context.process_group);
    network->mean.copy_(own(context.rank));
    save_checkpoint(path("checkpoint"), *network, nullptr);
    network->mean.zero_();
    load_checkpoint(path("checkpoint"), *network, nullptr);
    EXPECT_TRUE(same_bits(network->mean, own(context.rank)));
  });
  EXPECT_TRUE(
      read_safetensors(path("checkpoint/rank-00002.safetensors")).tensors.contains("model/mean"));
  EXPECT_FALSE(
      read_safetensors(path("checkpoint/rank-00001.safetensors")).tensors.contains("model/mean"))
      << "the same as rank 0's, so it need not be there twice";
  on_ranks(4, [&](RankContext& context) {
    auto network = sharded_network(context.process_group);
    load_checkpoint(path("checkpoint"), *network, nullptr);
    EXPECT_TRUE(same_bits(network->mean, own(0)));
  });
}

TEST_F(State, APlainModelLoadsTheCheckpointOfAShardedOne) {
  StateDict want;
  on_ranks(3, [&](RankContext& context) {
    auto network = sharded_network(context.process_group);
    save_checkpoint(path("checkpoint"), *network, nullptr);
    auto whole = full_state_dict(*network, {nullptr, true});
    if (context.rank == 0)
      want = std::move(whole);
  });
  Network plain;
  load_checkpoint(path("checkpoint"), *plain, nullptr);
  expect_same(full_state_dict(*plain), want, "plain");
  EXPECT_TRUE(plain->head->weight.is_same(plain->embedding->weight));
}

// ---- Whole states in memory ---------------------------------------------------------------------

// pytorch/pytorch#117399: names carried parts of wrappers.
TEST_F(State, NamesAreThoseOfThePlainModelForWeightsAndOptimizerState) {
  on_ranks(2, [](RankContext& context) {
    torch::nn::Sequential inner(wrap(torch::nn::Linear(4, 3)), torch::nn::ReLU(),
                                torch::nn::Linear(3, 2));
    FullyShardedDataParallel model(inner, {context.process_group});
    const auto optimizer = make_optimizer(Kind::adam, model->parameters());
    model(torch::ones({2, 4})).sum().backward();
    optimizer->step();
    std::vector<std::string> names;
    for (const auto& [name, tensor] : full_state_dict(model.root())) {
      names.push_back(name);
    }
    EXPECT_THAT(names, ElementsAre("0.bias", "0.weight", "2.bias", "2.weight"));
    names.clear();
    for (const auto& [name, state] : full_optimizer_state(model.root(), *optimizer).state) {
      names.push_back(name);
    }
    EXPECT_THAT(names, ElementsAre("0.bias", "0.weight", "2.bias", "2.weight"));
  });
}

TEST_F(State, AFullStateHasEveryTensorOnceWholeAndApartFromTheModel) {
  on_ranks(3, [](RankContext& context) {
    Network plain;
    fill(*plain, 1);
    auto network = sharded_network(context.process_group, 1);
    auto state = full_state_dict(*network);
    std::vector<std::string> names;
    for (const auto& [name, tensor] : state) {
      names.push_back(name);
      tensor.detach().zero_();
    }
    EXPECT_EQ(names, kNames);
    state = full_state_dict(*network);
    EXPECT_TRUE(same_bits(state.at("embedding.weight"), plain->embedding->weight));
    EXPECT_TRUE(same_bits(state.at("second.linear.bias"), plain->second->linear->bias));
    EXPECT_TRUE(same_bits(state.at("gain"), plain->gain));
    EXPECT_FALSE(state.at("gain").requires_grad());

    StateOptions options;
    options.rank0_only = true;
    EXPECT_EQ(full_state_dict(*network, options).empty(), context.rank != 0);
  });
}

// pytorch/pytorch#98817: gathering failed where gradients were kept as zeros.
TEST_F(State, AFullStateIsTheSameWhetherGradientsAreNoneZeroOrSet) {
  on_ranks(2, [](RankContext& context) {
    auto network = sharded_network(context.process_group);
    const auto none = full_state_dict(*network);
    const auto with_buffers = [&] {
      auto state = full_state_dict(*network);
      state["mean"] = none.at("mean");
      state["calls"] = none.at("calls");
      return state;
    };
    network(torch::arange(6)).sum().backward();
    expect_same(with_buffers(), none, "set");
    for (auto& parameter : network->parameters()) {
      if (parameter.grad().defined())
        parameter.mutable_grad().zero_();
    }
    expect_same(with_buffers(), none, "zero");
  });
}

// pytorch/pytorch#105840 and #178569: only rank 0 has the weights, and buffers too must reach all.
TEST_F(State, AStateThatOnlyRank0HasReachesEveryRank) {
  StateDict known;
  Network plain;
  fill(*plain, 42);
  plain->mean.copy_(torch::arange(1, 5));
  for (const auto& [name, tensor] : full_state_dict(*plain)) {
    known[name] = tensor;
  }
  on_ranks(4, [&](RankContext& context) {
    auto network = sharded_network(context.process_group, 100 + context.rank);
    LoadStateOptions options;
    options.broadcast_from_rank0 = true;
    load_full_state_dict(*network, context.rank == 0 ? known : StateDict{}, options);
    expect_same(full_state_dict(*network), known, "rank " + std::to_string(context.rank));
    EXPECT_TRUE(same_bits(network->mean, known.at("mean")));
  });
}

TEST_F(State, AnOptimizerStateThatOnlyRank0HasReachesEveryRank) {
  for (const auto kind : kKinds) {
    on_ranks(3, [&](RankContext& context) {
      auto network = sharded_network(context.process_group);
      const auto optimizer = make_optimizer(kind, distinct_parameters(*network));
      train_step(network, *optimizer, context.rank, 0);
      const auto want = full_optimizer_state(*network, *optimizer);
      StateOptions only;
      only.rank0_only = true;
      const auto state = full_optimizer_state(*network, *optimizer, only);
      EXPECT_EQ(state.state.empty(), context.rank != 0);

      auto fresh = make_optimizer(kind, distinct_parameters(*network));
      fresh->param_groups()[0].options().set_lr(7);
      LoadStateOptions options;
      options.broadcast_from_rank0 = true;
      load_full_optimizer_state(*network, *fresh, state, options);
      expect_same(full_optimizer_state(*network, *fresh), want, want.type);
    });
  }
}

// pytorch/pytorch#113673: state matched by position went to another weight of the same shape.
TEST_F(State, OptimizerStateFollowsTheNameNotThePosition) {
  on_ranks(2, [&](RankContext& context) {
    const auto parameters_in = [](Network& network, bool swapped) {
      return swapped ? std::vector{network->second->linear->weight, network->first->linear->weight}
                     : std::vector{network->first->linear->weight, network->second->linear->weight};
    };
    auto network = sharded_network(context.process_group);
    const auto optimizer = make_optimizer(Kind::adam, parameters_in(network, false));
    train_step(network, *optimizer, context.rank, 0);
    save_checkpoint(path("checkpoint"), *network, optimizer.get());
    const auto want = full_optimizer_state(*network, *optimizer);
    EXPECT_FALSE(same_bits(want.state.at("first.linear.weight").at("exp_avg"),
                           want.state.at("second.linear.weight").at("exp_avg")));

    const auto swapped = make_optimizer(Kind::adam, parameters_in(network, true));
    load_checkpoint(path("checkpoint"), *network, swapped.get());
    expect_same(full_optimizer_state(*network, *swapped), want, "files");
    const auto again = make_optimizer(Kind::adam, parameters_in(network, true));
    load_full_optimizer_state(*network, *again, want);
    expect_same(full_optimizer_state(*network, *again), want, "memory");
  });
}

TEST_F(State, GroupsKeepTheirOptionsAndMayComeInAnotherOrder) {
  on_ranks(3, [&](RankContext& context) {
    auto network = sharded_network(context.process_group);
    const auto group = [&](const std::vector<torch::Tensor>& parameters, double rate,
                           double decay) {
      return torch::optim::OptimizerParamGroup(
          parameters, std::make_unique<torch::optim::AdamWOptions>(
                          torch::optim::AdamWOptions(rate).weight_decay(decay).betas(
                              std::make_tuple(0.8, 0.95))));
    };
    const auto decayed = std::vector{network->first->linear->weight, network->embedding->weight};
    const auto plain = std::vector{network->first->linear->bias, network->gain, network->frozen};
    torch::optim::AdamW optimizer(std::vector{group(decayed, 0.01, 0.1), group(plain, 0.02, 0.0)});
    train_step(network, optimizer, context.rank, 0);
    save_checkpoint(path("checkpoint"), *network, &optimizer);
    const auto saved = full_optimizer_state(*network, optimizer);
    EXPECT_FALSE(saved.state.contains("frozen")) << "it was never stepped";
    EXPECT_EQ(saved.groups[1].options.at("lr"), 0.02);
    EXPECT_EQ(saved.groups[0].options.at("beta1"), 0.8);

    torch::optim::AdamW other(std::vector{group(plain, 1, 1), group(decayed, 1, 1)});
    load_checkpoint(path("checkpoint"), *network, &other);
    const auto loaded = full_optimizer_state(*network, other);
    EXPECT_EQ(loaded.groups[0].options, saved.groups[1].options);
    EXPECT_EQ(loaded.groups[1].options, saved.groups[0].options);
    expect_same(loaded.state.at("gain"), saved.state.at("gain"), "gain");

    torch::optim::AdamW merged(
        std::vector{group({network->first->linear->weight, network->first->linear->bias}, 1, 1),
                    group({network->embedding->weight, network->gain, network->frozen}, 1, 1)});
    EXPECT_THAT(refusal([&] { load_checkpoint(path("checkpoint"), *network, &merged); }),
                AllOf(HasSubstr("no group of the saved optimizer has exactly"),
                      HasSubstr("'first.linear.weight' and 'first.linear.bias'")));
  });
}

// pytorch/pytorch#129252: one name of a shared weight was saved, and an entry for each expected.
TEST_F(State, ASharedWeightIsSavedOnceAndStaysShared) {
  on_ranks(2, [&](RankContext& context) {
    auto network = sharded_network(context.process_group);
    // As users write it: parameters() has the shared weight twice.
    const auto optimizer = make_optimizer(Kind::adam, network->parameters());
    train_step(network, *optimizer, context.rank, 0);
    save_checkpoint(path("checkpoint"), *network, optimizer.get());
    const auto state = full_optimizer_state(*network, *optimizer);
    EXPECT_TRUE(state.state.contains("embedding.weight"));
    EXPECT_FALSE(state.state.contains("head.weight"));

    auto resumed = sharded_network(context.process_group, 3);
    const auto resumed_optimizer = make_optimizer(Kind::adam, resumed->parameters());
    load_checkpoint(path("checkpoint"), *resumed, resumed_optimizer.get());
    EXPECT_TRUE(resumed->head->weight.is_same(resumed->embedding->weight));
    seed_rank_generator(3, context.rank);
    train_step(network, *optimizer, context.rank, 1);
    seed_rank_generator(3, context.rank);
    train_step(resumed, *resumed_optimizer, context.rank, 1);
    expect_same(snapshot(*resumed, *resumed_optimizer), snapshot(*network, *optimizer), "tied");
  });
}

TEST_F(State, ASharedWeightIsTakenUnderAnyOfItsNames) {
  on_ranks(2, [&](RankContext& context) {
    auto network = sharded_network(context.process_group);
    auto state = full_state_dict(*network);
    state["head.weight"] = state.at("embedding.weight") + 1;
    EXPECT_THAT(refusal([&] { load_full_state_dict(*network, state); }),
                AllOf(HasSubstr("'embedding.weight' and 'head.weight' are one shared tensor"),
                      HasSubstr("different values")));
    const auto wanted = state.at("head.weight");
    state.erase("embedding.weight");
    load_full_state_dict(*network, state);
    EXPECT_TRUE(same_bits(full_state_dict(*network).at("embedding.weight"), wanted));
  });
}

// huggingface/transformers#34530: a checkpoint after a text was generated in the middle was wrong.
TEST_F(State, InferenceBetweenStepsDoesNotChangeWhatIsSaved) {
  on_ranks(2, [&](RankContext& context) {
    std::vector<StateDict> saved;
    for (const bool infers : {false, true}) {
      seed_rank_generator(4, context.rank);
      auto network = sharded_network(context.process_group);
      const auto optimizer = make_optimizer(Kind::adamw, distinct_parameters(*network));
      train_step(network, *optimizer, context.rank, 0);
      if (infers) {
        const torch::NoGradGuard no_grad;
        const auto mean = network->mean.clone();
        network->eval();
        network(torch::arange(5));
        network->train();
        network->mean.copy_(mean);
        network->calls.sub_(1);
      }
      train_step(network, *optimizer, context.rank, 1);
      const auto name = infers ? "with" : "without";
      save_checkpoint(path(name), *network, optimizer.get());
    }
  });
  for (const std::string name : {"SHA256SUMS", "index.json", "rank-00000.safetensors"}) {
    EXPECT_EQ(slurp(path("with") / name), slurp(path("without") / name)) << name;
  }
}

// pytorch/pytorch#117421: a state that was loaded between forward and backward was ignored.
TEST_F(State, BetweenForwardAndBackwardSavingWorksAndLoadingIsNotSilent) {
  on_ranks(2, [&](RankContext& context) {
    auto network = sharded_network(context.process_group);
    // Without the buffers, which every forward moves.
    const auto parameters = [&] {
      auto state = full_state_dict(*network);
      for (const auto& buffer : network->named_buffers()) {
        state.erase(plain_name(buffer.key()));
      }
      return state;
    };
    const auto state = parameters();
    auto output = network(torch::arange(4));
    expect_same(parameters(), state, "between forward and backward");
    save_checkpoint(path("checkpoint"), *network, nullptr);
    load_full_state_dict(*network, full_state_dict(*network));
    // As on one device: the graph holds the weights that were there before.
    EXPECT_THROW(output.sum().backward(), c10::Error);
    network(torch::arange(4)).sum().backward();
    expect_same(parameters(), state, "after backward");
  });
}

// ---- Process groups -----------------------------------------------------------------------------

TEST_F(State, UnitsOverSeveralProcessGroupsNeedTheGroupOfAllRanks) {
  const auto second_group = make_in_process_group(2);
  on_ranks(2, [&](RankContext& context) {
    const auto make = [&](std::uint64_t seed) {
      Network network;
      fill(*network, seed);
      fully_shard(network->first, {second_group[context.rank]});
      fully_shard(network, {context.process_group});
      return network;
    };
    auto network = make(1);
    const auto optimizer = make_optimizer(Kind::adam, distinct_parameters(*network));
    train_step(network, *optimizer, context.rank, 0);
    EXPECT_THAT(refusal([&] { save_checkpoint(path("checkpoint"), *network, nullptr); }),
                AllOf(HasSubstr("sharded over another process group"), HasSubstr("of all ranks")));
    save_checkpoint(path("checkpoint"), *network, optimizer.get(), {context.process_group, {}});
    const auto want = snapshot(*network, *optimizer, context.process_group);
    auto other = make(2);
    const auto other_optimizer = make_optimizer(Kind::adam, distinct_parameters(*other));
    load_checkpoint(path("checkpoint"), *other, other_optimizer.get(), context.process_group);
    expect_same(snapshot(*other, *other_optimizer, context.process_group), want, "several groups");
  });
}

TEST_F(State, ElementsThatTwoRanksWouldSaveAreRefused) {
  const auto low = make_in_process_group(2);
  const auto high = make_in_process_group(2);
  on_ranks(4, [&](RankContext& context) {
    const auto& pair = context.rank < 2 ? low : high;
    auto linear = wrap(torch::nn::Linear(4, 4));
    fill(*linear, 1);
    fully_shard(linear, {pair[context.rank % 2]});
    EXPECT_THAT(
        refusal([&] {
          save_checkpoint(path("checkpoint"), *linear, nullptr, {context.process_group, {}});
        }),
        AllOf(HasSubstr("rank 0: model/"), HasSubstr("held by several ranks")));
  });
  EXPECT_THAT(names_in(path("")), IsEmpty());
}

TEST_F(State, RanksWithDifferentModelsOrOptimizersAreRefused) {
  on_ranks(2, [&](RankContext& context) {
    auto linear = wrap(torch::nn::Linear(4, 4));
    fully_shard(linear, {context.process_group});
    linear->register_buffer("extra", torch::zeros({context.rank + 1}));
    EXPECT_THAT(
        refusal([&] { save_checkpoint(path("checkpoint"), *linear, nullptr); }),
        AllOf(HasSubstr("rank 1: save_checkpoint"), HasSubstr("other parameters or buffers")));
  });
  on_ranks(2, [&](RankContext& context) {
    auto network = sharded_network(context.process_group);
    const auto optimizer = make_optimizer(Kind::adam, distinct_parameters(*network));
    optimizer->param_groups()[0].options().set_lr(0.1 * (1 + context.rank));
    EXPECT_THAT(refusal([&] { save_checkpoint(path("checkpoint"), *network, optimizer.get()); }),
                AllOf(HasSubstr("rank 1: its optimizer has"), HasSubstr("other options")));
  });
  on_ranks(2, [&](RankContext& context) {
    auto network = sharded_network(context.process_group);
    const auto optimizer = make_optimizer(Kind::adam, distinct_parameters(*network));
    train_step(network, *optimizer, context.rank, 0);
    if (context.rank == 1)
      optimizer->step();
    EXPECT_THAT(refusal([&] { save_checkpoint(path("checkpoint"), *network, optimizer.get()); }),
                AllOf(HasSubstr("rank 1: the optimizer's state of parameter"),
                      HasSubstr("\"step\":2"), HasSubstr("\"step\":1")));
  });
  EXPECT_THAT(names_in(path("")), IsEmpty());
}

TEST_F(State, OptimizersThatCannotBeSavedAreRefused) {
  on_ranks(2, [&](RankContext& context) {
    auto network = sharded_network(context.process_group);
    torch::optim::LBFGS unknown(distinct_parameters(*network));
    EXPECT_THAT(refusal([&] { save_checkpoint(path("checkpoint"), *network, &unknown); }),
                AllOf(HasSubstr("torch::optim::LBFGS"), HasSubstr("wanted: torch::optim::SGD")));
    const auto stray = make_optimizer(Kind::sgd, {torch::ones({2}, torch::requires_grad())});
    EXPECT_THAT(refusal([&] { save_checkpoint(path("checkpoint"), *network, stray.get()); }),
                HasSubstr("parameter 0 of optimizer group 0 is not in the model"));
    Network late;
    const auto early = make_optimizer(Kind::adagrad, distinct_parameters(*late));
    fully_shard(late, {context.process_group});
    EXPECT_THAT(refusal([&] { save_checkpoint(path("checkpoint"), *late, early.get()); }),
                HasSubstr("must be made after its model is sharded"));
  });
  EXPECT_THAT(names_in(path("")), IsEmpty());
}

// ---- States that do not fit ---------------------------------------------------------------------

TEST_F(State, AStateThatDoesNotFitIsRefusedOnEveryRankAndNothingIsChanged) {
  struct Case {
    std::function<void(StateDict&)> change;
    std::vector<std::string> parts;
  };
  const std::vector<Case> cases = {
      {[](StateDict& s) { s.erase("gain"); }, {"it lacks 'gain'"}},
      {[](StateDict& s) { s.erase("calls"); }, {"it lacks 'calls'"}},
      {[](StateDict& s) { s["more"] = torch::ones({1}); }, {"the model has no 'more'"}},
      {[](StateDict& s) { s["first.linear.bias"] = torch::ones({5}); },
       {"'first.linear.bias' has shape [5]; wanted: [4]"}},
      {[](StateDict& s) { s["first.linear.weight"] = torch::ones({16}); },
       {"has shape [16]; wanted: [4, 4]"}},
      {[](StateDict& s) { s["mean"] = s["mean"].to(torch::kHalf); },
       {"'mean' has dtype Half; wanted: Float"}},
      {[](StateDict& s) { s["gain"] = torch::Tensor(); }, {"'gain' is undefined"}},
      {[](StateDict& s) { s["mean"] = s["mean"].to_sparse(); }, {"'mean' is not dense"}},
  };
  on_ranks(3, [&](RankContext& context) {
    auto network = sharded_network(context.process_group);
    const auto before = full_state_dict(*network);
    for (const auto& item : cases) {
      for (const bool broadcast : {false, true}) {
        StateDict state;
        for (const auto& [name, tensor] : before)
          state[name] = tensor + 1;
        // One rank with a state that does not fit is enough.
        if (context.rank == (broadcast ? 0 : 2))
          item.change(state);
        LoadStateOptions options;
        options.broadcast_from_rank0 = broadcast;
        const auto message = refusal([&] { load_full_state_dict(*network, state, options); });
        for (const auto& part : item.parts)
          EXPECT_THAT(message, HasSubstr(part));
        EXPECT_THAT(message, HasSubstr(broadcast ? "rank 0: load_full" : "rank 2: load_full"));
        expect_same(full_state_dict(*network), before, item.parts.front());
      }
    }
  });
}

TEST_F(State, WithoutStrictnessWhatIsThereIsLoadedAndTheRestStays) {
  on_ranks(2, [](RankContext& context) {
    auto network = sharded_network(context.process_group);
    auto want = full_state_dict(*network);
    LoadStateOptions options;
    options.strict = false;
    for (const bool broadcast : {false, true}) {
      want["gain"] = want["gain"] + 1;
      options.broadcast_from_rank0 = broadcast;
      load_full_state_dict(*network, {{"gain", want["gain"]}, {"more", torch::ones({2})}}, options);
      expect_same(full_state_dict(*network), want, "not strict");
    }
    EXPECT_THAT(refusal([&] {
                  load_full_state_dict(*network, {{"gain", torch::ones({2})}}, options);
                }),
                HasSubstr("'gain' has shape [2]"));
  });
}

TEST_F(State, AnOptimizerStateThatDoesNotFitIsRefusedOnEveryRankAndNothingIsChanged) {
  struct Case {
    std::function<void(OptimizerState&)> change;
    std::string part;
  };
  const std::vector<Case> cases = {
      {[](OptimizerState& s) { s.type = "SGD"; }, "the saved optimizer is 'SGD'; wanted: AdamW"},
      {[](OptimizerState& s) { s.groups.clear(); }, "has 0 groups; wanted: 1"},
      {[](OptimizerState& s) { s.groups[0].parameters.pop_back(); }, "has exactly the parameters"},
      {[](OptimizerState& s) { s.groups[0].parameters.emplace_back("other"); },
       "has parameter 'other', which the model has not"},
      {[](OptimizerState& s) { s.groups[0].options.erase("lr"); }, "has options"},
      {[](OptimizerState& s) { s.state.at("gain").erase("step"); },
       "has counts (); wanted: (step)"},
      {[](OptimizerState& s) { s.state.at("gain").erase("exp_avg_sq"); },
       "the state of parameter 'gain' lacks exp_avg_sq"},
      {[](OptimizerState& s) { s.state.at("gain")["momentum"] = torch::ones({}); },
       "optimizer tensor 'momentum/gain' is nothing that AdamW keeps"},
      {[](OptimizerState& s) { s.state.at("gain")["exp_avg"] = torch::ones({2}); },
       "exp_avg of parameter 'gain' has shape [2] and dtype Float; wanted: []"},
      {[](OptimizerState& s) { s.state.at("gain")["exp_avg"] = torch::ones({}, torch::kDouble); },
       "dtype Double; wanted: [] and Float"},
      {[](OptimizerState& s) { s.state.at("gain")["step"] = torch::ones({}); },
       "'step' of parameter 'gain' is of shape [] and dtype Float"},
      {[](OptimizerState& s) { s.state["other"] = s.state.at("gain"); },
       "there is optimizer state for 'other'"},
  };
  on_ranks(3, [&](RankContext& context) {
    auto network = sharded_network(context.process_group);
    const auto optimizer = make_optimizer(Kind::adamw, distinct_parameters(*network));
    train_step(network, *optimizer, context.rank, 0);
    const auto before = full_optimizer_state(*network, *optimizer);
    for (const auto& item : cases) {
      for (const bool broadcast : {false, true}) {
        auto state = before;
        for (auto& [name, values] : state.state)
          values["exp_avg"] = values["exp_avg"] + 1;
        if (context.rank == (broadcast ? 0 : 1))
          item.change(state);
        LoadStateOptions options;
        options.broadcast_from_rank0 = broadcast;
        EXPECT_THAT(
            refusal([&] { load_full_optimizer_state(*network, *optimizer, state, options); }),
            HasSubstr(item.part));
        expect_same(full_optimizer_state(*network, *optimizer), before, item.part);
      }
    }
  });
}

// ---- Damage -------------------------------------------------------------------------------------

/// A checkpoint of two ranks, and what a load says of a damaged copy of it.
class Damage : public State {
 protected:
  void SetUp() override {
    for (const auto* name : {"good", "other"}) {
      on_ranks(2, [&](RankContext& context) {
        auto network = sharded_network(context.process_group, std::string(name) == "good" ? 1 : 2);
        const auto optimizer = make_optimizer(Kind::adamw, distinct_parameters(*network));
        train_step(network, *optimizer, context.rank, 0);
        save_checkpoint(path(name), *network, optimizer.get());
      });
    }
  }

  fs::path copy() {
    fs::remove_all(path("copy"));
    fs::copy(path("good"), path("copy"));
    return path("copy");
  }

  /// The message, the same on every rank; checks that nothing was changed.
  std::string load_refusal(int world_size = 3, Kind kind = Kind::adamw) {
    std::mutex mutex;
    std::set<std::string> messages;
    on_ranks(world_size, [&](RankContext& context) {
      auto network = sharded_network(context.process_group, 8);
      const auto optimizer = make_optimizer(kind, distinct_parameters(*network));
      train_step(network, *optimizer, context.rank, 0);
      const auto before = snapshot(*network, *optimizer);
      const auto message =
          refusal([&] { load_checkpoint(path("copy"), *network, optimizer.get()); });
      expect_same(snapshot(*network, *optimizer), before, message);
      const std::lock_guard lock(mutex);
      messages.insert(message);
    });
    EXPECT_EQ(messages.size(), 1u) << "ranks differ";
    return *messages.begin();
  }
};

TEST_F(Damage, AnUndamagedCopyIsTaken) {
  copy();
  on_ranks(3, [&](RankContext& context) {
    auto network = sharded_network(context.process_group, 8);
    const auto optimizer = make_optimizer(Kind::adamw, distinct_parameters(*network));
    load_checkpoint(path("copy"), *network, optimizer.get());
  });
  sum_again(copy());
  EXPECT_EQ(slurp(path("copy/SHA256SUMS")), slurp(path("good/SHA256SUMS")));
}

TEST_F(Damage, AMissingFileIsNamed) {
  EXPECT_THAT(load_refusal(), AllOf(HasSubstr("rank 0: "), HasSubstr("copy/SHA256SUMS: "),
                                    HasSubstr("No such file")));
  for (const auto& name : names_in(path("good"))) {
    fs::remove(copy() / name);
    EXPECT_THAT(load_refusal(), AllOf(HasSubstr("copy/" + name + ": "), HasSubstr("No such file")));
  }
}

TEST_F(Damage, AFileThatWasCutShortIsNamed) {
  for (const auto& name : names_in(path("good"))) {
    const auto size = fs::file_size(path("good") / name);
    for (const auto kept : {std::uintmax_t{0}, std::uintmax_t{9}, size / 2, size - 1}) {
      fs::resize_file(copy() / name, kept);
      EXPECT_THAT(load_refusal(), HasSubstr("copy/" + name + ": ")) << kept;
    }
  }
}

TEST_F(Damage, AFlippedBitAnywhereIsFound) {
  std::mt19937 random(5);
  for (const auto& name : names_in(path("good"))) {
    const auto bytes = slurp(path("good") / name);
    for (int i = 0; i < 12; ++i) {
      auto damaged = bytes;
      const auto at = i == 0 ? 0 : i == 1 ? bytes.size() - 1 : random() % bytes.size();
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << (random() % 8)));
      spit(copy() / name, damaged);
      // A bit in the list of sums makes it the sum of another file.
      EXPECT_THAT(load_refusal(), HasSubstr(name == "SHA256SUMS" ? "copy/" : "copy/" + name + ": "))
          << "byte " << at;
    }
  }
}

TEST_F(Damage, AFileOfAnotherCheckpointIsNamed) {
  for (const std::string name : {"rank-00000.safetensors", "rank-00001.safetensors"}) {
    fs::copy_file(path("other") / name, copy() / name, fs::copy_options::overwrite_existing);
    EXPECT_THAT(load_refusal(),
                AllOf(HasSubstr("copy/" + name + ": "), HasSubstr("of another checkpoint")));
  }
  copy();
  fs::copy_file(path("good/rank-00001.safetensors"), path("copy/rank-00000.safetensors"),
                fs::copy_options::overwrite_existing);
  EXPECT_THAT(load_refusal(), HasSubstr("copy/rank-00000.safetensors: "));
}

TEST_F(Damage, AnIndexThatSaysSomethingElseIsRefusedAtItsPlace) {
  struct Case {
    std::string from;
    std::string to;
    std::vector<std::string> parts;
  };
  const std::vector<Case> cases = {
      {"\"version\": 1", "\"version\": 2", {"index.version: 2", "version 1"}},
      {"\"fsdp.checkpoint\"", "\"other.checkpoint\"", {"index.format", "\"fsdp.checkpoint\""}},
      {"\"format\"", "\"formal\"", {"index: \"format\" is missing"}},
      {"\"world_size\": 2", "\"world_size\": 3", {"index.world_size: 3", "2, the number of files"}},
      {"\"rank-00001.safetensors\"", "\"../secret\"", {"index.files[1].name", "rank-00001"}},
      {"\"dtype\": \"F32\"", "\"dtype\": \"F31\"", {"index.tensors.", ".dtype: \"F31\""}},
      {"\"dtype\": \"I64\"", "\"dtype\": \"I32\"", {"'calls' has dtype Int; wanted: Long"}},
      {"\"begin\": 0", "\"begin\": 1", {"pieces[0]", "a piece from element 0 on"}},
      {"\"file\": 1", "\"file\": 2", {".file: 2", "a file of 0 to 1"}},
      {"\"model/gain\"", "\"model/pain\"", {"it lacks 'gain', and the model has no 'pain'"}},
      {"\"model/gain\"", "\"gain\"", {"index.tensors.gain: neither model/NAME nor optimizer"}},
      {"\"optimizer/exp_avg/gain\"",
       "\"optimizer/exp_avg/pain\"",
       {"the state of parameter 'gain' lacks exp_avg"}},
      {"\"type\": \"AdamW\"",
       "\"type\": \"Adam\"",
       {"the saved optimizer is 'Adam'; wanted: AdamW"}},
      {"\"lr\": 0.01", "\"lr\": \"high\"", {"options.lr: \"high\" where a number"}},
      {"\"step\": 1", "\"step\": -1", {".step: -1", "at least 0"}},
      {"\"optimizer\": {", "\"optimizer\": null, \"unused\": {", {"saved without an optimizer"}},
      {"\"metadata\": {}", "\"metadata\": {\"a\": 1}", {"index.metadata.a: 1 where a string"}},
      {"\"metadata\": {}", "\"metadata\": {", {"not valid JSON"}},
  };
  for (const auto& item : cases) {
    replace_in(copy() / "index.json", item.from, item.to);
    sum_again(path("copy"));
    const auto message = load_refusal();
    EXPECT_THAT(message, HasSubstr("copy/index.json: ")) << item.to;
    for (const auto& part : item.parts)
      EXPECT_THAT(message, HasSubstr(part));
  }
}

TEST_F(Damage, AFileThatContradictsTheIndexIsNamed) {
  const std::string name = "rank-00001.safetensors";
  const auto bytes_in_index = [&](const std::string& folder) {
    return "\"bytes\": " + std::to_string(fs::file_size(path(folder) / name));
  };
  const auto refusal_with = [&](const std::function<void(SafetensorsFile&)>& change) {
    auto file = read_safetensors(copy() / name);
    change(file);
    write_safetensors(path("copy") / name, file);
    replace_in(path("copy/index.json"), bytes_in_index("good"), bytes_in_index("copy"));
    sum_again(path("copy"));
    return load_refusal(2);
  };
  ASSERT_NE(fs::file_size(path("good") / name), fs::file_size(path("good/rank-00000.safetensors")));
  EXPECT_THAT(refusal_with([](auto& file) {
                file.tensors.at("generator") = torch::zeros({5}, torch::kByte);
              }),
              AllOf(HasSubstr("copy/" + name + ": "), HasSubstr("\"generator\" has shape [5]")));
  EXPECT_THAT(refusal_with([](auto& file) { file.tensors.erase("generator"); }),
              AllOf(HasSubstr("copy/" + name + ": "), HasSubstr("no tensor \"generator\"")));
  const std::string key = "model/second.linear.weight";
  EXPECT_THAT(refusal_with([&](auto& file) { file.tensors.erase(key); }),
              AllOf(HasSubstr("copy/" + name + ": tensor \"" + key), HasSubstr("is not there")));
  EXPECT_THAT(
      refusal_with([&](auto& file) { file.tensors.at(key) = torch::ones({1}); }),
      AllOf(HasSubstr("copy/" + name + ": tensor \"" + key), HasSubstr("another dtype or size")));
}

TEST_F(Damage, AnotherModelOrOptimizerIsRefused) {
  copy();
  EXPECT_THAT(load_refusal(2, Kind::sgd), HasSubstr("the saved optimizer is 'AdamW'; wanted: SGD"));
  on_ranks(2, [&](RankContext& context) {
    Network larger(11);
    fully_shard(larger, {context.process_group});
    EXPECT_THAT(refusal([&] { load_checkpoint(path("copy"), *larger, nullptr); }),
                AllOf(HasSubstr("copy/index.json: "),
                      HasSubstr("'embedding.weight' has shape [10, 4]; wanted: [11, 4]")));
    auto half = sharded_network(context.process_group, 1, at::kBFloat16);
    EXPECT_THAT(refusal([&] { load_checkpoint(path("copy"), *half, nullptr); }),
                HasSubstr("has dtype Float; wanted: BFloat16"));
    auto linear = wrap(torch::nn::Linear(4, 4));
    fully_shard(linear, {context.process_group});
    EXPECT_THAT(
        refusal([&] { load_checkpoint(path("copy"), *linear, nullptr); }),
        AllOf(HasSubstr("it lacks 'weight' and 'bias'"),
              HasSubstr("the model has no 'calls', 'embedding.weight'"), HasSubstr("and 4 more")));
  });
}

TEST_F(Damage, RanksThatSeeDifferentCheckpointsUnderOneNameAreRefused) {
  on_ranks(2, [&](RankContext& context) {
    auto network = sharded_network(context.process_group);
    EXPECT_THAT(refusal([&] {
                  load_checkpoint(path(context.rank == 0 ? "good" : "other"), *network, nullptr);
                }),
                AllOf(HasSubstr("rank 1: "), HasSubstr("another checkpoint under this name")));
  });
}

// ---- Writing that fails -------------------------------------------------------------------------

/// No file of this process may grow beyond so many bytes.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(std::size_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_{};
  void (*handler_)(int);
};

TEST_F(State, AFullDiskOnOneRankEndsAllWithItsMessageAndLeavesWhatWasThere) {
  std::mutex mutex;
  std::vector<std::string> messages;
  on_ranks(2, [&](RankContext& context) {
    auto network = sharded_network(context.process_group);
    save_checkpoint(path("checkpoint"), *network, nullptr);
  });
  const auto before = slurp(path("checkpoint/SHA256SUMS"));
  // Buffers are in rank 0's file only, so there is a size that is enough for rank 1's.
  const auto enough = fs::file_size(path("checkpoint/rank-00001.safetensors"));
  ASSERT_LT(enough, fs::file_size(path("checkpoint/rank-00000.safetensors")));
  {
    const FileSizeLimit limit(enough);
    on_ranks(2, [&](RankContext& context) {
      auto network = sharded_network(context.process_group, 2);
      for (const auto* name : {"checkpoint", "new"}) {
        const auto message = refusal([&] { save_checkpoint(path(name), *network, nullptr); });
        const std::lock_guard lock(mutex);
        messages.push_back(message);
        EXPECT_FALSE(fs::exists(path("." + std::string(name) + ".partial")));
      }
    });
  }
  ASSERT_EQ(messages.size(), 4u);
  for (const auto& message : messages) {
    EXPECT_THAT(message, AllOf(HasSubstr("rank 0: "), HasSubstr("rank-00000.safetensors"),
                               HasSubstr("File too large")));
  }
  EXPECT_THAT(names_in(path("")), ElementsAre("checkpoint"));
  EXPECT_EQ(slurp(path("checkpoint/SHA256SUMS")), before);
}

// Each node has a disk of its own: rank 1 does not see the folder that rank 0 made.
TEST_F(State, ARankThatDoesNotSeeTheFolderEndsAllAndNothingIsLeft) {
  fs::create_directory(path("disk0"));
  fs::create_directory(path("disk1"));
  on_ranks(3, [&](RankContext& context) {
    auto network = sharded_network(context.process_group);
    const auto folder = path(context.rank == 1 ? "disk1/checkpoint" : "disk0/checkpoint");
    EXPECT_THAT(refusal([&] { save_checkpoint(folder, *network, nullptr); }),
                AllOf(HasSubstr("rank 1: "), HasSubstr("disk1/.checkpoint.partial"),
                      HasSubstr("No such file")));
    EXPECT_THAT(names_in(path("disk0")), IsEmpty());
  });
  EXPECT_THAT(names_in(path("disk1")), IsEmpty());
}

TEST_F(State, ARankThatIsGoneEndsTheOthersAndNothingIsLeft) {
  EXPECT_THAT(refusal([&] {
                on_ranks(3, [&](RankContext& context) {
                  auto network = sharded_network(context.process_group);
                  if (context.rank == 2)
                    throw Error("the power went");
                  save_checkpoint(path("checkpoint"), *network, nullptr);
                });
              }),
              HasSubstr("the power went"));
  EXPECT_THAT(names_in(path("")), IsEmpty());
}

TEST_F(State, ACheckpointIsReplacedAndAnythingElseIsNot) {
  fs::create_directories(path("papers"));
  spit(path("papers/thesis.tex"), "years of work");
  spit(path("file"), "bytes");
  fs::create_directories(path(".checkpoint.partial"));  // of a run that was killed
  spit(path(".checkpoint.partial/rank-00000.safetensors"), "half");
  on_ranks(2, [&](RankContext& context) {
    auto network = sharded_network(context.process_group, 1);
    for (const auto* name : {"papers", "file"}) {
      EXPECT_THAT(refusal([&] { save_checkpoint(path(name), *network, nullptr); }),
                  AllOf(HasSubstr(name), HasSubstr("exists and is not a checkpoint")));
    }
    save_checkpoint(path("checkpoint"), *network, nullptr);
    auto newer = sharded_network(context.process_group, 2);
    save_checkpoint(path("checkpoint/"), *newer, nullptr, {{}, {{"age", "newer"}}});
    EXPECT_EQ(load_checkpoint(path("checkpoint"), *network, nullptr).metadata.at("age"), "newer");
    expect_same(full_state_dict(*network), full_state_dict(*newer), "newer");
    save_checkpoint(path("a/new/folder"), *network, nullptr);
  });
  EXPECT_EQ(slurp(path("papers/thesis.tex")), "years of work");
  EXPECT_THAT(names_in(path("")), ElementsAre("a", "checkpoint", "file", "papers"));
}

// ---- Safetensors and SHA-256 --------------------------------------------------------------------

// The examples of FIPS 180 (NIST, "SHA-256 examples"), and the empty text.
TEST_F(State, Sha256GivesThePublishedDigests) {
  const std::vector<std::pair<std::string, std::string>> known = {
      {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
      {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
      {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
       "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
      {std::string(1'000'000, 'a'),
       "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"}};
  for (const auto& [text, want] : known) {
    for (const std::size_t first : {std::size_t{0}, text.size() / 3, text.size()}) {
      std::string digest;
      const std::string_view view = text;
      write_file(path("text"), {view.substr(0, first), view.substr(first)}, {true, &digest});
      EXPECT_EQ(digest, want) << text.size() << " bytes, cut at " << first;
    }
  }
}

TEST_F(State, Sha256AgreesWithPythonAtEveryLengthUpToThreeBlocks) {
  std::string ours;
  for (int length = 0; length <= 192; ++length) {
    std::string digest;
    const std::string text(static_cast<std::size_t>(length), 'x');
    write_file(path("text"), {text}, {false, &digest});
    ours += digest + "\n";
  }
  EXPECT_EQ(python("import hashlib\n"
                   "for n in range(193): print(hashlib.sha256(b'x' * n).hexdigest())\n"),
            ours);
}

TEST_F(State, RangesOfATensorAreReadWithoutTheRest) {
  SafetensorsFile file;
  file.tensors["matrix"] = torch::arange(12, torch::kInt).view({3, 4});
  file.tensors["flags"] = torch::tensor({true, false, true});
  file.tensors["empty"] = torch::empty({0, 3}, torch::kDouble);
  file.tensors["scalar"] = torch::tensor(2.5).to(torch::kBFloat16);
  file.metadata["a"] = "b";
  write_safetensors(path("file"), file);
  const SafetensorsReader reader(path("file"));
  EXPECT_EQ(reader.metadata().at("a"), "b");
  EXPECT_EQ(reader.entries().at("scalar").dtype, torch::kBFloat16);
  for (const auto& [name, tensor] : file.tensors) {
    EXPECT_TRUE(same_bits(reader.read(name), tensor)) << name;
    for (std::int64_t begin = 0; begin <= tensor.numel(); ++begin) {
      for (std::int64_t numel = 0; numel <= tensor.numel() - begin; ++numel) {
        EXPECT_TRUE(same_bits(reader.read(name, begin, numel),
                              tensor.reshape({-1}).narrow(0, begin, numel)));
      }
    }
  }
  for (const auto& [begin, numel] : {std::pair{-1, 2}, {0, 13}, {13, 0}, {5, -1}}) {
    EXPECT_THROW(reader.read("matrix", begin, numel), FileError);
  }
  EXPECT_THAT(refusal([&] { reader.read("other"); }), HasSubstr("has no tensor \"other\""));
}

// ---- PyTorch ------------------------------------------------------------------------------------

const std::string kPythonNetwork = R"(
import torch
from safetensors.torch import load_file, load_model, save_file
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
class Head(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 4)
        self.first, self.second = Block(), Block()
        self.head = Head(self.embedding.weight)
        self.gain = torch.nn.Parameter(torch.ones(()))
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer('mean', torch.zeros(4))
        self.register_buffer('calls', torch.zeros((), dtype=torch.long))
folder = sys.argv[1] + '/'
def doubled(state):
    return {name: values * 2 for name, values in state.items()}
)";

/// What Python wrote, and what it should have.
StateDict doubled(const StateDict& state) {
  StateDict result;
  for (const auto& [name, tensor] : state) {
    result[name] = tensor * 2;
  }
  return result;
}

TEST_F(State, PythonLoadsTheFullStateIntoThePlainModelAndItsFilesAreLoadedInTurn) {
  for (const int world_size : {1, 3}) {
    StateDict whole;
    on_ranks(world_size, [&](RankContext& context) {
      auto network = sharded_network(context.process_group);
      network->calls.fill_(1234567890123);
      write_full_state(path("model.safetensors"), *network);
      auto state = full_state_dict(*network);
      if (context.rank == 0)
        whole = std::move(state);
    });
    EXPECT_EQ(python(kPythonNetwork + R"(
state = load_file(folder + 'model.safetensors')
network = Network()
missing, unexpected = load_model(network, folder + 'model.safetensors')
for name, values in state.items():
    assert torch.equal(network.state_dict()[name], values), name
assert network.head.weight is network.embedding.weight
save_file(doubled(state), folder + 'doubled.safetensors')
print(len(missing), len(unexpected), sorted(set(network.state_dict()) - set(state)), network.calls.item())
)"),
              "0 0 ['head.weight'] 1234567890123\n");
    on_ranks(world_size + 1, [&](RankContext& context) {
      for (const bool broadcast : {false, true}) {
        auto network = sharded_network(context.process_group, 9);
        LoadStateOptions options;
        options.broadcast_from_rank0 = broadcast;
        load_full_state(path("doubled.safetensors"), *network, options);
        expect_same(full_state_dict(*network), doubled(whole), "from Python");
      }
    });
  }
}

// pytorch/torchtitan#1483: rows were permuted when a whole file was loaded into a sharded weight.
TEST_F(State, RowsOfAFileThatPythonWroteArriveInTheirPlace) {
  python(
      "import torch\nfrom safetensors.torch import save_file\n"
      "save_file({'weight': torch.arange(13.).repeat(5, 1).t().contiguous(),"
      " 'bias': torch.arange(13.)}, sys.argv[1] + '/rows.safetensors')\n");
  for (const int world_size : {1, 2, 3, 4, 8}) {
    on_ranks(world_size, [&](RankContext& context) {
      auto linear = wrap(torch::nn::Linear(5, 13));
      fully_shard(linear, {context.process_group});
      load_full_state(path("rows.safetensors"), *linear);
      const auto rows = torch::arange(13).to(torch::kFloat);
      expect_same(full_state_dict(*linear),
                  StateDict{{"weight", rows.view({13, 1}).expand({13, 5})}, {"bias", rows}},
                  "world size " + std::to_string(world_size));
    });
  }
}

TEST_F(State, AFullStateFileThatIsMissingOrDamagedIsRefusedOnEveryRank) {
  on_ranks(2, [&](RankContext& context) {
    auto network = sharded_network(context.process_group);
    write_full_state(path("model.safetensors"), *network);
  });
  spit(path("short"), slurp(path("model.safetensors")).substr(0, 300));
  on_ranks(2, [&](RankContext& context) {
    auto network = sharded_network(context.process_group, 2);
    const auto before = full_state_dict(*network);
    for (const bool broadcast : {false, true}) {
      LoadStateOptions options;
      options.broadcast_from_rank0 = broadcast;
      EXPECT_THAT(refusal([&] { load_full_state(path("nothing"), *network, options); }),
                  AllOf(HasSubstr("rank 0: "), HasSubstr("nothing: No such file")));
      EXPECT_THAT(refusal([&] { load_full_state(path("short"), *network, options); }),
                  HasSubstr("short: truncated"));
    }
    EXPECT_THAT(refusal([&] { write_full_state(path("no/such/folder"), *network); }),
                AllOf(HasSubstr("rank 0: "), HasSubstr("cannot be written")));
    expect_same(full_state_dict(*network), before, "after refusals");
  });
}

StateDict tensors_of_every_dtype() {
  StateDict state;
  for (const auto dtype :
       {torch::kDouble, torch::kFloat, torch::kHalf, torch::kBFloat16, torch::kLong, torch::kInt,
        torch::kShort, torch::kChar, torch::kByte, torch::kBool}) {
    state["values." + std::string(c10::toString(dtype))] =
        torch::arange(6).sub(dtype == torch::kByte ? 0 : 3).to(dtype).view({2, 3});
  }
  state["scalar"] = torch::tensor(3);
  state["empty"] = torch::empty({0, 2});
  state["view"] = torch::arange(100).narrow(0, 10, 5);
  state["transposed"] = torch::arange(6).view({2, 3}).t();
  return state;
}

TEST_F(State, TorchLoadsWhatIsSavedWithWeightsOnlyAndTheReverse) {
  const auto state = tensors_of_every_dtype();
  save_torch(path("ours.pt"), state);
  python(R"(
import collections, torch
folder = sys.argv[1] + '/'
state = torch.load(folder + 'ours.pt', weights_only=True)
assert type(state) is dict
assert state['view'].untyped_storage().nbytes() == 40, 'the whole storage of a view was written'
torch.save(state, folder + 'dict.pt')
torch.save(collections.OrderedDict(state), folder + 'ordered.pt')
model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
model[0].weight.data = torch.arange(6.).view(2, 3).t()
torch.save(model.state_dict(), folder + 'model.pt')
torch.save({name: torch.nn.Parameter(values) for name, values in model.named_parameters()},
           folder + 'parameters.pt')
base = torch.arange(10)
torch.save({'first': base[2:5], 'second': base[3:]}, folder + 'shared.pt')
torch.save({'big': torch.zeros(70000), 'n' * 300: torch.ones(1)}, folder + 'long.pt')
torch.save({'model': model.state_dict(), 'step': 3}, folder + 'nested.pt')
torch.save(torch.ones(2), folder + 'tensor.pt')
torch.save(model, folder + 'module.pt')
torch.save({'c': torch.ones(2, dtype=torch.complex64)}, folder + 'complex.pt')
torch.save({'s': torch.ones(2, 2).to_sparse()}, folder + 'sparse.pt')
)");
  expect_same(load_torch(path("ours.pt")), state, "ours");
  expect_same(load_torch(path("dict.pt")), state, "dict");
  expect_same(load_torch(path("ordered.pt")), state, "ordered");
  const auto model = load_torch(path("model.pt"));
  EXPECT_EQ(model.size(), 7u);
  EXPECT_TRUE(same_bits(model.at("0.weight"),
                        torch::arange(6).to(torch::kFloat).view({2, 3}).t().contiguous()));
  EXPECT_TRUE(same_bits(model.at("1.num_batches_tracked"), torch::zeros({}, torch::kLong)));
  EXPECT_TRUE(same_bits(load_torch(path("parameters.pt")).at("0.weight"), model.at("0.weight")));
  expect_same(load_torch(path("shared.pt")),
              StateDict{{"first", torch::arange(2, 5)}, {"second", torch::arange(3, 10)}},
              "shared");
  EXPECT_EQ(load_torch(path("long.pt")).at("big").numel(), 70000);

  const auto message = [&](const std::string& name) {
    return refusal([&] { load_torch(path(name)); });
  };
  EXPECT_THAT(message("nested.pt"), HasSubstr("the value of 'model' is no tensor"));
  EXPECT_THAT(message("tensor.pt"), HasSubstr("where a dictionary of tensors was expected"));
  EXPECT_THAT(message("module.pt"), HasSubstr("data.pkl: byte"));
  EXPECT_THAT(message("complex.pt"), HasSubstr("ComplexFloatStorage"));
  EXPECT_THAT(message("sparse.pt"), HasSubstr("a call of torch"));
  EXPECT_THAT(message("program.py"), HasSubstr("program.py: not an archive"));
  EXPECT_THAT(message("nothing"), HasSubstr("nothing: No such file"));
}

// Bytes within a tensor's data may change unnoticed, as in PyTorch; anything else is refused or
// means tensors, and the process lives.
TEST_F(State, ADamagedTorchFileIsRefusedOrMeansTensors) {
  save_torch(path("good.pt"), {{"a", torch::arange(20)}, {"b", torch::ones({3, 3})}});
  const auto bytes = slurp(path("good.pt"));
  std::mt19937 random(3);
  int refused = 0;
  for (int i = 0; i < 400; ++i) {
    auto damaged = bytes;
    if (i % 4 == 0) {
      damaged.resize(random() % bytes.size());
    } else {
      damaged[random() % bytes.size()] = static_cast<char>(random());
    }
    spit(path("damaged.pt"), damaged);
    try {
      load_torch(path("damaged.pt"));
      EXPECT_NE(i % 4, 0) << "cut at " << damaged.size();
    } catch (const FileError& error) {
      EXPECT_THAT(error.what(), HasSubstr("damaged.pt: "));
      ++refused;
    }
  }
  EXPECT_GT(refused, 100);
}

// The same for the pickle alone, in archives that are whole.
TEST_F(State, ADamagedPickleIsRefusedOrMeansTensors) {
  python(R"(
import random, torch, zipfile
folder = sys.argv[1] + '/'
model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
torch.save(model.state_dict(), folder + 'model.pt')
source = zipfile.ZipFile(folder + 'model.pt')
random.seed(1)
for i in range(400):
    with zipfile.ZipFile(folder + f'{i}.pt', 'w') as target:
        for name in source.namelist():
            data = bytearray(source.read(name))
            if name.endswith('data.pkl'):
                if i % 4 == 0:
                    del data[random.randrange(len(data)):]
                else:
                    data[random.randrange(len(data))] = random.randrange(256)
            target.writestr(name, bytes(data))
)");
  int refused = 0;
  for (int i = 0; i < 400; ++i) {
    try {
      load_torch(path(std::to_string(i) + ".pt"));
    } catch (const FileError& error) {
      EXPECT_THAT(error.what(), HasSubstr(".pt: data.pkl: byte "));
      ++refused;
    }
  }
  EXPECT_GT(refused, 100);
}

TEST_F(State, TheSumsOfACheckpointAreThoseOfSha256sum) {
  on_ranks(2, [&](RankContext& context) {
    auto network = sharded_network(context.process_group);
    save_checkpoint(path("checkpoint"), *network, nullptr);
  });
  EXPECT_EQ(python("import hashlib, json\n"
                   "folder = sys.argv[1] + '/checkpoint/'\n"
                   "for line in open(folder + 'SHA256SUMS'):\n"
                   "    digest, name = line.rstrip('\\n').split('  ')\n"
                   "    data = open(folder + name, 'rb').read()\n"
                   "    print(name, hashlib.sha256(data).hexdigest() == digest)\n"),
            "index.json True\nrank-00000.safetensors True\nrank-00001.safetensors True\n");
}

}  // namespace
}  // namespace fsdp
