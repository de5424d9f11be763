// The in_process group: what each collective computes, that ranks cannot corrupt each other's
// memory, and that every way to get out of step ends every rank with an error that says who and
// what.
//
// Values are small integers that depend on the rank, the case and the element, so that sums are
// exact in every dtype and any stale, misplaced or unwritten element shows. Expectations are
// computed in int64 or float64 from all ranks' inputs, by plain tensor operations on the main
// thread.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <limits>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "fsdp/errors.h"
#include "fsdp/process_group.h"

namespace {

using namespace std::chrono_literals;
using c10d::ReduceOp;
using fsdp::RankContext;
using std::chrono::milliseconds;
using std::chrono::steady_clock;
using torch::Tensor;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

const std::vector<torch::ScalarType> kEveryDtype = {
    torch::kFloat,  torch::kDouble, torch::kHalf, torch::kBFloat16, torch::kByte,
    torch::kChar,   torch::kShort,  torch::kInt,  torch::kLong,     torch::kUInt16,
    torch::kUInt32, torch::kUInt64, torch::kBool};
const std::vector<int> kWorldSizes = {1, 2, 3, 4, 5, 7, 8, 16, 64};
const std::vector<ReduceOp::RedOpType> kReductions = {
    ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX};

// The tensors are small, and threads that wait for each other to add them up are slow on busy
// cores.
class OneIntraOpThread : public testing::Environment {
  void SetUp() override { at::set_num_threads(1); }
};
const auto* const kOneIntraOpThread = testing::AddGlobalTestEnvironment(new OneIntraOpThread);

// Nothing here takes long; a hang is to end as a TimeoutError.
fsdp::RunRanksOptions quick_options(milliseconds timeout = 30s) {
  fsdp::RunRanksOptions options;
  options.group.timeout = timeout;
  return options;
}

void run(int world_size, const std::function<void(RankContext&)>& body,
         milliseconds timeout = 30s) {
  fsdp::run_ranks(world_size, body, quick_options(timeout));
}

// ---- The collectives, with values for arguments -------------------------------------------------

WorkPtr all_gather(const RankContext& rank, Tensor output, Tensor input) {
  return rank.process_group->_allgather_base(output, input);
}

WorkPtr all_gather_list(const RankContext& rank, Tensors outputs, Tensor input) {
  std::vector<Tensors> output_lists = {std::move(outputs)};
  Tensors inputs = {std::move(input)};
  return rank.process_group->allgather(output_lists, inputs);
}

WorkPtr reduce_scatter(const RankContext& rank, Tensor output, Tensor input,
                       ReduceOp::RedOpType reduction = ReduceOp::SUM) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = reduction;
  return rank.process_group->_reduce_scatter_base(output, input, options);
}

WorkPtr reduce_scatter_list(const RankContext& rank, Tensor output, Tensors inputs,
                            ReduceOp::RedOpType reduction) {
  Tensors outputs = {std::move(output)};
  std::vector<Tensors> input_lists = {std::move(inputs)};
  c10d::ReduceScatterOptions options;
  options.reduceOp = reduction;
  return rank.process_group->reduce_scatter(outputs, input_lists, options);
}

WorkPtr all_reduce(const RankContext& rank, Tensor tensor,
                   ReduceOp::RedOpType reduction = ReduceOp::SUM,
                   milliseconds timeout = c10d::kUnsetTimeout) {
  Tensors tensors = {std::move(tensor)};
  c10d::AllreduceOptions options;
  options.reduceOp = reduction;
  options.timeout = timeout;
  return rank.process_group->allreduce(tensors, options);
}

WorkPtr broadcast(const RankContext& rank, Tensor tensor, int root) {
  Tensors tensors = {std::move(tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  return rank.process_group->broadcast(tensors, options);
}

WorkPtr reduce(const RankContext& rank, Tensor tensor, int root,
               ReduceOp::RedOpType reduction = ReduceOp::SUM) {
  Tensors tensors = {std::move(tensor)};
  c10d::ReduceOptions options;
  options.rootRank = root;
  options.reduceOp = reduction;
  return rank.process_group->reduce(tensors, options);
}

WorkPtr gather(const RankContext& rank, Tensors outputs, Tensor input, int root) {
  std::vector<Tensors> output_lists;
  if (rank.rank == root) {
    output_lists.push_back(std::move(outputs));
  }
  Tensors inputs = {std::move(input)};
  c10d::GatherOptions options;
  options.rootRank = root;
  return rank.process_group->gather(output_lists, inputs, options);
}

WorkPtr scatter(const RankContext& rank, Tensor output, Tensors inputs, int root) {
  std::vector<Tensors> input_lists;
  if (rank.rank == root) {
    input_lists.push_back(std::move(inputs));
  }
  Tensors outputs = {std::move(output)};
  c10d::ScatterOptions options;
  options.rootRank = root;
  return rank.process_group->scatter(outputs, input_lists, options);
}

WorkPtr all_to_all(const RankContext& rank, Tensor output, Tensor input,
                   std::vector<std::int64_t> output_sizes = {},
                   std::vector<std::int64_t> input_sizes = {}) {
  return rank.process_group->alltoall_base(output, input, output_sizes, input_sizes);
}

WorkPtr send(const RankContext& rank, Tensor tensor, int receiver, int tag = 0) {
  Tensors tensors = {std::move(tensor)};
  return rank.process_group->send(tensors, receiver, tag);
}

WorkPtr receive(const RankContext& rank, Tensor tensor, int sender, int tag = 0) {
  Tensors tensors = {std::move(tensor)};
  return rank.process_group->recv(tensors, sender, tag);
}

// ---- Values, and tensors that notice writes beyond their ends
// ------------------------------------

std::string reduction_name(ReduceOp::RedOpType reduction) {
  static const std::vector<std::string> names = {"sum", "mean", "product", "min", "max"};
  return names.at(reduction);
}

bool is_floating(torch::ScalarType dtype) {
  return c10::isFloatingType(dtype);
}

// [world_size, numel] in int64: row r is what rank r puts in. Below 5, so that the sum of 64 is at
// most 256, which BFloat16 still holds exactly.
Tensor values(int world_size, std::int64_t numel, int salt) {
  const auto ranks = torch::arange(world_size, torch::kLong).unsqueeze(1);
  const auto elements = torch::arange(numel, torch::kLong).unsqueeze(0);
  return (3 * ranks + 2 * elements + elements.div(7, "floor") * ranks + salt).remainder(5);
}

// For products, in which all but one rank have a 1: it stays small for any number of ranks.
Tensor factors(int world_size, std::int64_t numel, int salt) {
  const auto ranks = torch::arange(world_size, torch::kLong).unsqueeze(1);
  const auto elements = torch::arange(numel, torch::kLong).unsqueeze(0);
  const auto has_turn = (elements + salt).remainder(world_size) == ranks;
  return torch::where(has_turn, 1 + (elements + salt).remainder(3), torch::ones_like(elements));
}

Tensor values_for(ReduceOp::RedOpType reduction, torch::ScalarType dtype, int world_size,
                  std::int64_t numel, int salt) {
  const auto all = reduction == ReduceOp::PRODUCT ? factors(world_size, numel, salt)
                                                  : values(world_size, numel, salt);
  // As a bool nearly every sum would be true and nearly every product false.
  return dtype == torch::kBool ? (all == 1).to(torch::kLong) : all;
}

// Of the rows of `all`. Exact, so that the order of summation does not matter.
Tensor reduced(const Tensor& all, ReduceOp::RedOpType reduction, torch::ScalarType dtype) {
  switch (reduction) {
    case ReduceOp::PRODUCT:
      return all.prod(0).to(dtype);
    case ReduceOp::MIN:
      return all.amin(0).to(dtype);
    case ReduceOp::MAX:
      return all.amax(0).to(dtype);
    case ReduceOp::AVG: {
      const auto accumulation = dtype == torch::kDouble ? torch::kDouble : torch::kFloat;
      return (all.sum(0).to(accumulation) / static_cast<double>(all.size(0))).to(dtype);
    }
    default:
      return all.sum(0).to(dtype);
  }
}

// A tensor in the middle of a larger one, whose other elements must stay as they are.
class GuardedTensor {
 public:
  GuardedTensor(std::int64_t numel, torch::ScalarType dtype)
      : numel_(numel), whole_(torch::full({numel + 2 * kGuards}, 77, torch::kLong).to(dtype)) {}

  Tensor tensor() const { return whole_.narrow(0, kGuards, numel_); }
  bool guards_are_intact() const {
    const auto guards =
        torch::cat({whole_.narrow(0, 0, kGuards), whole_.narrow(0, kGuards + numel_, kGuards)});
    return torch::equal(
        guards.to(torch::kDouble),
        torch::full({2 * kGuards}, 77, torch::kLong).to(whole_.scalar_type()).to(torch::kDouble));
  }

 private:
  static constexpr std::int64_t kGuards = 3;
  std::int64_t numel_;
  Tensor whole_;
};

// Compares bit for bit in value, and says what, where and how a difference is.
void expect_equal(const Tensor& got, const Tensor& want, const std::string& what, int rank) {
  ASSERT_EQ(got.scalar_type(), want.scalar_type()) << what;
  ASSERT_EQ(got.numel(), want.numel()) << what << " on rank " << rank;
  const auto bytes = [](const Tensor& tensor) {
    return tensor.contiguous().view({-1}).view(torch::kByte);
  };
  if (got.numel() == 0 || torch::equal(bytes(got), bytes(want))) {
    return;
  }
  const auto wide = is_floating(got.scalar_type()) ? torch::kDouble : torch::kLong;
  const auto got_wide = got.contiguous().view({-1}).to(wide);
  const auto want_wide = want.contiguous().view({-1}).to(wide);
  for (std::int64_t i = 0; i < got.numel(); ++i) {
    const auto seen = got_wide[i].item<double>();
    const auto wanted = want_wide[i].item<double>();
    if (!(seen == wanted)) {
      ADD_FAILURE() << what << ", rank " << rank << ", element " << i << " of " << got.numel()
                    << ": got " << seen << ", want " << wanted;
      return;
    }
  }
}

struct Case {
  std::string name;
  torch::ScalarType dtype;
  std::int64_t numel;  // of one rank's piece
  ReduceOp::RedOpType reduction = ReduceOp::SUM;
  Tensor inputs;  // [world_size, ...] in dtype, row r is rank r's
  Tensor want;    // of all ranks together, flat
};

std::vector<std::int64_t> sizes_for(int world_size) {
  // The largest is more than one block and more than one part of the reduction, and not a multiple.
  return world_size <= 8 ? std::vector<std::int64_t>{0, 1, 7, 5003}
                         : std::vector<std::int64_t>{0, 1, 37};
}

std::string case_name(const std::string& operation, torch::ScalarType dtype, std::int64_t numel,
                      int world_size) {
  return operation + " of " + c10::toString(dtype) + ", " + std::to_string(numel) +
         " elements, world size " + std::to_string(world_size);
}

// Cases that move values about: inputs of `width(numel)` elements per rank.
std::vector<Case> moving_cases(const std::string& operation, int world_size, bool piece_per_rank) {
  std::vector<Case> cases;
  for (const auto dtype : kEveryDtype) {
    for (const auto numel : sizes_for(world_size)) {
      Case test{
          case_name(operation, dtype, numel, world_size), dtype, numel, ReduceOp::SUM, {}, {}};
      const auto width = piece_per_rank ? numel * world_size : numel;
      test.inputs = values(world_size, width, static_cast<int>(cases.size())).to(dtype);
      cases.push_back(std::move(test));
    }
  }
  return cases;
}

std::vector<Case> reducing_cases(const std::string& operation, int world_size,
                                 bool piece_per_rank) {
  std::vector<Case> cases;
  for (const auto reduction : kReductions) {
    for (const auto dtype : kEveryDtype) {
      if (reduction == ReduceOp::AVG && !is_floating(dtype)) {
        continue;
      }
      for (const auto numel : sizes_for(world_size)) {
        Case test{case_name(operation + " " + reduction_name(reduction), dtype, numel, world_size),
                  dtype,
                  numel,
                  reduction,
                  {},
                  {}};
        const auto width = piece_per_rank ? numel * world_size : numel;
        const auto all =
            values_for(reduction, dtype, world_size, width, static_cast<int>(cases.size()));
        test.inputs = all.to(dtype);
        test.want = reduced(all, reduction, dtype);
        cases.push_back(std::move(test));
      }
    }
  }
  return cases;
}

// The list forms of many ranks make so many little tensors that one dtype of them is enough.
bool wants_list_form(const Case& test, int world_size) {
  return world_size <= 8 || test.dtype == torch::kFloat;
}

// A rank's own input, apart from the other ranks' and with its guards.
GuardedTensor guarded_copy(const Tensor& values) {
  GuardedTensor copy(values.numel(), values.scalar_type());
  copy.tensor().copy_(values.reshape({-1}));
  return copy;
}

Tensors pieces_of(const Tensor& flat, int count) {
  const auto numel = flat.numel() / count;
  Tensors pieces;
  for (int i = 0; i < count; ++i) {
    pieces.push_back(flat.narrow(0, i * numel, numel));
  }
  return pieces;
}

// The message of the E that `action` throws; a failure if it throws none.
template <typename E>
std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another exception: " << error.what();
    return {};
  }
  ADD_FAILURE() << "no exception";
  return {};
}

void expect_says(const std::string& message, const std::vector<std::string>& parts) {
  for (const auto& part : parts) {
    EXPECT_NE(message.find(part), std::string::npos)
        << "wanted \"" << part << "\" in \"" << message << "\"";
  }
}

// Threads that are not under run_ranks, for what happens when nobody calls leave_group.
void on_threads(int world_size, milliseconds timeout,
                const std::function<void(RankContext&)>& body) {
  const auto group = fsdp::make_in_process_group(world_size, {timeout, "test"});
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      RankContext context{rank, world_size, group[rank]};
      body(context);
    });
  }
}

// ---- What the collectives compute
// ----------------------------------------------------------------

TEST(ProcessGroup, AllGatherConcatenatesTheInputsInRankOrder) {
  for (const int world_size : kWorldSizes) {
    const auto cases = moving_cases("all_gather", world_size, /*piece_per_rank=*/false);
    run(world_size, [&](RankContext& context) {
      for (const auto& test : cases) {
        const auto input = guarded_copy(test.inputs[context.rank]);
        const GuardedTensor output(test.numel * world_size, test.dtype);
        const GuardedTensor listed(test.numel * world_size, test.dtype);
        all_gather(context, output.tensor(), input.tensor())->wait();
        const auto want = test.inputs.reshape({-1});
        expect_equal(output.tensor(), want, test.name, context.rank);
        if (wants_list_form(test, world_size)) {
          all_gather_list(context, pieces_of(listed.tensor(), world_size), input.tensor())->wait();
          expect_equal(listed.tensor(), want, test.name + " (list)", context.rank);
        }
        expect_equal(input.tensor(), test.inputs[context.rank], test.name + " input", context.rank);
        EXPECT_TRUE(input.guards_are_intact() && output.guards_are_intact() &&
                    listed.guards_are_intact())
            << test.name << " on rank " << context.rank;
      }
    });
  }
}

TEST(ProcessGroup, ReduceScatterGivesEachRankItsPieceOfTheReduction) {
  for (const int world_size : kWorldSizes) {
    const auto cases = reducing_cases("reduce_scatter", world_size, /*piece_per_rank=*/true);
    run(world_size, [&](RankContext& context) {
      for (const auto& test : cases) {
        const auto input = guarded_copy(test.inputs[context.rank]);
        const GuardedTensor output(test.numel, test.dtype);
        const GuardedTensor listed(test.numel, test.dtype);
        reduce_scatter(context, output.tensor(), input.tensor(), test.reduction)->wait();
        const auto want = test.want.narrow(0, context.rank * test.numel, test.numel);
        expect_equal(output.tensor(), want, test.name, context.rank);
        if (wants_list_form(test, world_size)) {
          reduce_scatter_list(context, listed.tensor(), pieces_of(input.tensor(), world_size),
                              test.reduction)
              ->wait();
          expect_equal(listed.tensor(), want, test.name + " (list)", context.rank);
        }
        expect_equal(input.tensor(), test.inputs[context.rank], test.name + " input", context.rank);
        EXPECT_TRUE(input.guards_are_intact() && output.guards_are_intact() &&
                    listed.guards_are_intact())
            << test.name << " on rank " << context.rank;
      }
    });
  }
}

TEST(ProcessGroup, AllReduceGivesEveryRankTheReduction) {
  for (const int world_size : kWorldSizes) {
    const auto cases = reducing_cases("all_reduce", world_size, /*piece_per_rank=*/false);
    run(world_size, [&](RankContext& context) {
      for (const auto& test : cases) {
        const auto tensor = guarded_copy(test.inputs[context.rank]);
        all_reduce(context, tensor.tensor(), test.reduction)->wait();
        expect_equal(tensor.tensor(), test.want, test.name, context.rank);
        EXPECT_TRUE(tensor.guards_are_intact()) << test.name << " on rank " << context.rank;
      }
    });
  }
}

TEST(ProcessGroup, ReduceGivesTheRootTheReductionAndLeavesTheOthersTensorsAlone) {
  for (const int world_size : kWorldSizes) {
    const auto cases = reducing_cases("reduce", world_size, /*piece_per_rank=*/false);
    run(world_size, [&](RankContext& context) {
      for (std::size_t i = 0; i < cases.size(); ++i) {
        const auto& test = cases[i];
        const int root = static_cast<int>(i) % world_size;
        const auto tensor = guarded_copy(test.inputs[context.rank]);
        reduce(context, tensor.tensor(), root, test.reduction)->wait();
        expect_equal(tensor.tensor(), context.rank == root ? test.want : test.inputs[context.rank],
                     test.name, context.rank);
        EXPECT_TRUE(tensor.guards_are_intact()) << test.name << " on rank " << context.rank;
      }
    });
  }
}

TEST(ProcessGroup, BroadcastGivesEveryRankTheRootsTensor) {
  for (const int world_size : kWorldSizes) {
    const auto cases = moving_cases("broadcast", world_size, /*piece_per_rank=*/false);
    run(world_size, [&](RankContext& context) {
      for (std::size_t i = 0; i < cases.size(); ++i) {
        const auto& test = cases[i];
        const int root = static_cast<int>(i) % world_size;
        const auto tensor = guarded_copy(test.inputs[context.rank]);
        broadcast(context, tensor.tensor(), root)->wait();
        expect_equal(tensor.tensor(), test.inputs[root], test.name, context.rank);
        EXPECT_TRUE(tensor.guards_are_intact()) << test.name << " on rank " << context.rank;
      }
    });
  }
}

TEST(ProcessGroup, GatherConcatenatesOnTheRootOnly) {
  for (const int world_size : kWorldSizes) {
    const auto cases = moving_cases("gather", world_size, /*piece_per_rank=*/false);
    run(world_size, [&](RankContext& context) {
      for (std::size_t i = 0; i < cases.size(); ++i) {
        const auto& test = cases[i];
        const int root = static_cast<int>(i) % world_size;
        const auto input = guarded_copy(test.inputs[context.rank]);
        const GuardedTensor output(test.numel * world_size, test.dtype);
        const auto before = output.tensor().clone();
        gather(context, pieces_of(output.tensor(), world_size), input.tensor(), root)->wait();
        expect_equal(output.tensor(), context.rank == root ? test.inputs.reshape({-1}) : before,
                     test.name, context.rank);
        expect_equal(input.tensor(), test.inputs[context.rank], test.name + " input", context.rank);
        EXPECT_TRUE(output.guards_are_intact()) << test.name << " on rank " << context.rank;
      }
    });
  }
}

TEST(ProcessGroup, ScatterGivesEachRankItsTensorOfTheRoots) {
  for (const int world_size : kWorldSizes) {
    const auto cases = moving_cases("scatter", world_size, /*piece_per_rank=*/true);
    run(world_size, [&](RankContext& context) {
      for (std::size_t i = 0; i < cases.size(); ++i) {
        const auto& test = cases[i];
        const int root = static_cast<int>(i) % world_size;
        const auto input = guarded_copy(test.inputs[context.rank]);
        const GuardedTensor output(test.numel, test.dtype);
        scatter(context, output.tensor(), pieces_of(input.tensor(), world_size), root)->wait();
        expect_equal(output.tensor(), pieces_of(test.inputs[root], world_size)[context.rank],
                     test.name, context.rank);
        expect_equal(input.tensor(), test.inputs[context.rank], test.name + " input", context.rank);
        EXPECT_TRUE(output.guards_are_intact()) << test.name << " on rank " << context.rank;
      }
    });
  }
}

TEST(ProcessGroup, AllToAllTransposesThePieces) {
  for (const int world_size : kWorldSizes) {
    const auto cases = moving_cases("all_to_all", world_size, /*piece_per_rank=*/true);
    run(world_size, [&](RankContext& context) {
      for (const auto& test : cases) {
        const auto input = guarded_copy(test.inputs[context.rank]);
        const GuardedTensor output(test.numel * world_size, test.dtype);
        const GuardedTensor listed(test.numel * world_size, test.dtype);
        all_to_all(context, output.tensor(), input.tensor())->wait();
        // Piece s of rank d is piece d of rank s.
        const auto want =
            test.inputs.view({world_size, world_size, test.numel}).select(1, context.rank);
        expect_equal(output.tensor(), want.reshape({-1}), test.name, context.rank);
        if (wants_list_form(test, world_size)) {
          auto outputs = pieces_of(listed.tensor(), world_size);
          auto inputs = pieces_of(input.tensor(), world_size);
          context.process_group->alltoall(outputs, inputs)->wait();
          expect_equal(listed.tensor(), want.reshape({-1}), test.name + " (list)", context.rank);
        }
        expect_equal(input.tensor(), test.inputs[context.rank], test.name + " input", context.rank);
        EXPECT_TRUE(output.guards_are_intact() && listed.guards_are_intact())
            << test.name << " on rank " << context.rank;
      }
    });
  }
}

TEST(ProcessGroup, AllToAllTakesSplitSizesInRowsOfTheFirstDimension) {
  constexpr int kRanks = 4;
  // Rank s gives rank d s + d rows (rank 0 gives itself none) of 3 elements, all 10 s + d.
  run(kRanks, [](RankContext& context) {
    const int me = context.rank;
    std::vector<std::int64_t> input_sizes;
    std::vector<std::int64_t> output_sizes;
    Tensors input;
    Tensors want;
    for (int other = 0; other < kRanks; ++other) {
      input_sizes.push_back(me + other);
      output_sizes.push_back(other + me);
      input.push_back(torch::full({me + other, 3}, 10.0 * me + other));
      want.push_back(torch::full({other + me, 3}, 10.0 * other + me));
    }
    const auto output = torch::full_like(torch::cat(want), -1);
    all_to_all(context, output, torch::cat(input), output_sizes, input_sizes)->wait();
    expect_equal(output, torch::cat(want), "all_to_all with split sizes", me);
  });
}

TEST(ProcessGroup, CoalescedFormsDoEveryTensor) {
  constexpr int kRanks = 3;
  run(kRanks, [](RankContext& context) {
    const std::vector<std::int64_t> sizes = {5, 0, 4001};
    Tensors whole;
    Tensors pieces;
    Tensors shared;
    for (const auto size : sizes) {
      whole.push_back(torch::zeros({size * kRanks}));
      pieces.push_back(torch::full({size}, context.rank + 1.0));
      shared.push_back(torch::full({size}, context.rank + 1.0));
    }
    context.process_group->allgather_into_tensor_coalesced(whole, pieces)->wait();
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const auto want = torch::arange(1, kRanks + 1, torch::kFloat).repeat_interleave(sizes[i]);
      expect_equal(whole[i], want, "coalesced all_gather", context.rank);
    }
    context.process_group->reduce_scatter_tensor_coalesced(pieces, whole)->wait();
    context.process_group->allreduce_coalesced(shared)->wait();
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      // Every rank gathered the same, so rank r's piece is kRanks times (r + 1); and 1 + 2 + 3 = 6.
      expect_equal(pieces[i], torch::full({sizes[i]}, kRanks * (context.rank + 1.0)),
                   "coalesced reduce_scatter", context.rank);
      expect_equal(shared[i], torch::full({sizes[i]}, 6.0), "coalesced all_reduce", context.rank);
    }
  });
}

TEST(ProcessGroup, LargeTensorsAreRightToTheLastElement) {
  constexpr std::int64_t kNumel = 3'000'017;
  for (const int world_size : {2, 3}) {
    run(world_size, [&](RankContext& context) {
      const auto index = torch::arange(kNumel, torch::kInt);
      const auto tensor = index + context.rank;
      all_reduce(context, tensor)->wait();
      // The sum over r of (i + r) is W i + W (W - 1) / 2.
      expect_equal(tensor, index * world_size + world_size * (world_size - 1) / 2, "all_reduce",
                   context.rank);
      const auto gathered = torch::zeros({kNumel * world_size}, torch::kInt);
      all_gather(context, gathered, index + context.rank)->wait();
      for (int source = 0; source < world_size; ++source) {
        expect_equal(gathered.narrow(0, source * kNumel, kNumel), index + source, "all_gather",
                     context.rank);
      }
      const auto scattered = torch::zeros({kNumel}, torch::kInt);
      reduce_scatter(context, scattered, gathered)->wait();
      expect_equal(scattered, (index + context.rank) * world_size, "reduce_scatter", context.rank);
    });
  }
}

TEST(ProcessGroup, SendAndReceiveMatchBySenderAndTagInOrder) {
  run(3, [](RankContext& context) {
    // To rank 2 from each of the others: with tag 7 first 10 r + 1 then 10 r + 2, with tag 8
    // 10 r + 3. Rank 2 receives in another order than they were sent in.
    if (context.rank < 2) {
      const double base = 10.0 * context.rank;
      std::vector<WorkPtr> works = {send(context, torch::full({3}, base + 1), 2, 7),
                                    send(context, torch::full({3}, base + 2), 2, 7),
                                    send(context, torch::full({3}, base + 3), 2, 8)};
      for (const auto& work : works) {
        work->wait();
      }
      return;
    }
    for (const int sender : {1, 0}) {
      const auto third = torch::zeros({3});
      const auto first = torch::zeros({3});
      const auto second = torch::zeros({3});
      receive(context, third, sender, 8)->wait();
      receive(context, first, sender, 7)->wait();
      receive(context, second, sender, 7)->wait();
      expect_equal(first, torch::full({3}, 10.0 * sender + 1), "first with tag 7", 2);
      expect_equal(second, torch::full({3}, 10.0 * sender + 2), "second with tag 7", 2);
      expect_equal(third, torch::full({3}, 10.0 * sender + 3), "with tag 8", 2);
    }
  });
}

TEST(ProcessGroup, BarrierReturnsAfterEveryRankHasEntered) {
  for (const int world_size : {1, 2, 5, 64}) {
    std::atomic<int> entered = 0;
    run(world_size, [&](RankContext& context) {
      for (int round = 1; round <= 20; ++round) {
        ++entered;
        context.process_group->barrier()->wait();
        EXPECT_GE(entered.load(), round * world_size);
        context.process_group->barrier()->wait();
      }
    });
  }
}

// ---- Arithmetic
// ----------------------------------------------------------------------------------

// In float 1e8 + 1 is 1e8 again, so that the sum of 1e8, 1, -1e8 is 0 or 1 depending on the order.
TEST(ProcessGroup, SumsAreTakenInRankOrder) {
  std::vector<float> numbers = {-1e8F, 1.0F, 1e8F, 3.0F};
  do {
    float want = numbers[0];
    for (std::size_t rank = 1; rank < numbers.size(); ++rank) {
      want += numbers[rank];
    }
    run(static_cast<int>(numbers.size()), [&](RankContext& context) {
      const auto mine = numbers[context.rank];
      // Longer than a block, so that the vectorised and the remaining elements are both looked at.
      const auto tensor = torch::full({2500}, mine);
      all_reduce(context, tensor)->wait();
      expect_equal(tensor, torch::full({2500}, want), "all_reduce", context.rank);
      const auto output = torch::zeros({2500});
      reduce_scatter(context, output, torch::full({2500 * context.world_size}, mine))->wait();
      expect_equal(output, torch::full({2500}, want), "reduce_scatter", context.rank);
      const auto rooted = torch::full({2500}, mine);
      reduce(context, rooted, 2)->wait();
      expect_equal(rooted, torch::full({2500}, context.rank == 2 ? want : mine), "reduce",
                   context.rank);
    });
  } while (std::next_permutation(numbers.begin(), numbers.end()));
}

// 256 + 1 is 256 in BFloat16 (8 significant bits), and 2048 + 1 is 2048 in Half (11); so a sum that
// is rounded after every addition stays there, and one that is rounded at the end does not.
TEST(ProcessGroup, SumsOfHalfAndBFloat16AreRoundedOnce) {
  const std::vector<std::pair<torch::ScalarType, double>> cases = {{torch::kBFloat16, 256},
                                                                   {torch::kHalf, 2048}};
  for (const auto& [dtype, large] : cases) {
    run(3, [&, dtype = dtype, large = large](RankContext& context) {
      const auto tensor = torch::full({3000}, context.rank == 0 ? large : 1.0, dtype);
      all_reduce(context, tensor)->wait();
      expect_equal(tensor, torch::full({3000}, large + 2, dtype), c10::toString(dtype),
                   context.rank);
    });
  }
}

// 1 + 2^-8 + 2^-8: each alone is half a unit in the last place of 1 and rounded away, together a
// whole one. Then a tie, 1 + 2^-8, which goes to the even neighbour, 1; and 1 + 3 * 2^-8 goes up.
TEST(ProcessGroup, BFloat16RoundsToNearestEven) {
  const std::vector<std::pair<std::vector<double>, double>> cases = {
      {{1, 0.00390625, 0.00390625}, 1.0078125},
      {{1, 0.00390625, 0}, 1},
      {{1, 0.01171875, 0}, 1.015625}};
  for (const auto& [numbers, want] : cases) {
    run(3, [&numbers = numbers, want = want](RankContext& context) {
      const auto tensor = torch::full({5}, numbers[context.rank], torch::kBFloat16);
      all_reduce(context, tensor)->wait();
      expect_equal(tensor, torch::full({5}, want, torch::kBFloat16), "sum", context.rank);
    });
  }
}

// Three ranks: a third is not a dyadic number, so a multiplication by the rounded reciprocal
// instead of a division would show, for example as 7 * fl(1/3) != fl(7/3) for some of these
// numerators.
TEST(ProcessGroup, MeanIsTheSumDividedByTheWorldSize) {
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16}) {
    run(3, [&](RankContext& context) {
      const auto numerators = torch::arange(1, 101, torch::kLong);
      const auto tensor =
          (context.rank == 1 ? numerators : torch::zeros_like(numerators)).to(dtype);
      all_reduce(context, tensor, ReduceOp::AVG)->wait();
      const auto accumulation = dtype == torch::kDouble ? torch::kDouble : torch::kFloat;
      const auto want = (numerators.to(accumulation) / torch::full({}, 3, accumulation)).to(dtype);
      expect_equal(tensor, want, c10::toString(dtype), context.rank);
    });
  }
}

TEST(ProcessGroup, MeanIsTakenOfAnOverflowingHalfSumWithoutOverflow) {
  run(4, [](RankContext& context) {
    const auto tensor = torch::full({9}, 60000.0, torch::kHalf);
    all_reduce(context, tensor, ReduceOp::AVG)->wait();
    expect_equal(tensor, torch::full({9}, 60000.0, torch::kHalf), "mean", context.rank);
  });
}

TEST(ProcessGroup, IntegerSumsAndProductsWrapAround) {
  run(2, [](RankContext& context) {
    const auto largest = torch::full({3}, std::numeric_limits<std::int32_t>::max(), torch::kInt);
    const auto sum = largest.clone();
    all_reduce(context, sum)->wait();
    expect_equal(sum, torch::full({3}, -2, torch::kInt), "sum", context.rank);
    const auto bytes = torch::full({3}, 100, torch::kChar);
    all_reduce(context, bytes)->wait();
    expect_equal(bytes, torch::full({3}, 200 - 256, torch::kChar), "sum of bytes", context.rank);
    const auto product = largest.clone();
    all_reduce(context, product, ReduceOp::PRODUCT)->wait();
    expect_equal(product, torch::ones({3}, torch::kInt), "product", context.rank);
  });
}

TEST(ProcessGroup, NotANumberWinsInMinAndMaxWhicheverRankHasIt) {
  const auto nan = std::numeric_limits<double>::quiet_NaN();
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16}) {
    for (const auto reduction : {ReduceOp::MIN, ReduceOp::MAX, ReduceOp::SUM}) {
      for (int owner = 0; owner < 3; ++owner) {
        run(3, [&](RankContext& context) {
          const auto tensor =
              torch::full({2100}, context.rank == owner ? nan : context.rank - 1.0, dtype);
          all_reduce(context, tensor, reduction)->wait();
          EXPECT_TRUE(tensor.isnan().all().item<bool>())
              << reduction_name(reduction) << " of " << dtype << ", NaN on rank " << owner;
        });
      }
    }
  }
}

TEST(ProcessGroup, InfinitiesSurvive) {
  const auto infinity = std::numeric_limits<double>::infinity();
  for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16}) {
    run(2, [&](RankContext& context) {
      const auto tensor = torch::full({5}, context.rank == 0 ? infinity : 1.0, dtype);
      all_reduce(context, tensor)->wait();
      expect_equal(tensor, torch::full({5}, infinity, dtype), c10::toString(dtype), context.rank);
    });
  }
}

// ---- Memory
// --------------------------------------------------------------------------------------

TEST(ProcessGroup, AllGatherInPlaceTakesItsInputFromItsPlaceInTheOutput) {
  constexpr std::int64_t kNumel = 5000;
  for (const int world_size : {1, 2, 3, 8}) {
    run(world_size, [&](RankContext& context) {
      for (int round = 0; round < 20; ++round) {
        const auto all = values(world_size, kNumel, round).to(torch::kFloat);
        const auto output = torch::full({world_size * kNumel}, -1.0F);
        const auto input = output.narrow(0, context.rank * kNumel, kNumel);
        input.copy_(all[context.rank]);
        all_gather(context, output, input)->wait();
        expect_equal(output, all.reshape({-1}), "all_gather in place", context.rank);
      }
    });
  }
}

TEST(ProcessGroup, ReduceScatterInPlacePutsItsOutputInItsPlaceInTheInput) {
  constexpr std::int64_t kNumel = 5000;
  for (const int world_size : {1, 2, 3, 8}) {
    run(world_size, [&](RankContext& context) {
      for (int round = 0; round < 20; ++round) {
        const auto all = values(world_size, world_size * kNumel, round);
        const auto input = all[context.rank].to(torch::kFloat);
        const auto output = input.narrow(0, context.rank * kNumel, kNumel);
        reduce_scatter(context, output, input)->wait();
        expect_equal(
            output, pieces_of(reduced(all, ReduceOp::SUM, torch::kFloat), world_size)[context.rank],
            "reduce_scatter in place", context.rank);
      }
    });
  }
}

// Overlaps that no in-place form has: a rank's result lies over values that others have yet to
// read.
TEST(ProcessGroup, ResultsMayLieOverAnyOfTheRanksInputs) {
  constexpr std::int64_t kNumel = 4000;
  for (const int world_size : {2, 3, 8}) {
    run(world_size, [&](RankContext& context) {
      for (int round = 0; round < 20; ++round) {
        const int next = (context.rank + 1) % world_size;
        const auto wide = values(world_size, world_size * kNumel, round);
        const auto narrow = values(world_size, kNumel, round);

        const auto scattered = wide[context.rank].to(torch::kFloat);
        const auto piece = scattered.narrow(0, next * kNumel, kNumel);
        reduce_scatter(context, piece, scattered)->wait();
        expect_equal(
            piece, pieces_of(reduced(wide, ReduceOp::SUM, torch::kFloat), world_size)[context.rank],
            "reduce_scatter over another's piece", context.rank);

        const auto shifted = wide[context.rank].to(torch::kFloat);
        const auto odd =
            shifted.narrow(0, context.rank == 0 ? 1 : context.rank * kNumel - 1, kNumel);
        reduce_scatter(context, odd, shifted)->wait();
        expect_equal(
            odd, pieces_of(reduced(wide, ReduceOp::SUM, torch::kFloat), world_size)[context.rank],
            "reduce_scatter over two pieces", context.rank);

        const auto gathered = torch::zeros({world_size * kNumel});
        const auto input = gathered.narrow(0, next * kNumel, kNumel);
        input.copy_(narrow[context.rank]);
        all_gather(context, gathered, input)->wait();
        expect_equal(gathered, narrow.to(torch::kFloat).reshape({-1}),
                     "all_gather from another's place", context.rank);

        const auto exchanged = wide[context.rank].to(torch::kFloat);
        all_to_all(context, exchanged, exchanged)->wait();
        expect_equal(exchanged,
                     wide.view({world_size, world_size, kNumel})
                         .select(1, context.rank)
                         .reshape({-1})
                         .to(torch::kFloat),
                     "all_to_all in place", context.rank);
      }
    });
  }
}

TEST(ProcessGroup, RanksMayGiveOneTensorInCommon) {
  const auto shared = torch::arange(3000, torch::kFloat);
  run(3, [&](RankContext& context) {
    const auto output = torch::zeros({1000});
    reduce_scatter(context, output, shared)->wait();
    expect_equal(output, 3 * shared.narrow(0, context.rank * 1000, 1000), "reduce_scatter",
                 context.rank);
    const auto gathered = torch::zeros({9000});
    all_gather(context, gathered, shared)->wait();
    expect_equal(gathered, shared.repeat({3}), "all_gather", context.rank);
  });
}

TEST(ProcessGroup, AutogradSeesNoChangeOfTheTensors) {
  run(3, [](RankContext& context) {
    const auto input = torch::ones({6}, torch::requires_grad());
    const auto output = torch::zeros({18});
    const auto piece = torch::zeros({2});
    const auto shared = torch::ones({4}, torch::requires_grad());
    const auto saved = torch::ones({4}, torch::requires_grad());
    const auto square = saved * saved;  // saves `saved`, and would refuse a newer version of it
    all_gather(context, output, input)->wait();
    reduce_scatter(context, piece, input)->wait();
    all_reduce(context, shared)->wait();
    broadcast(context, saved, 0)->wait();
    for (const auto& tensor : {input, output, piece, shared, saved}) {
      EXPECT_EQ(tensor._version(), 0);
      EXPECT_FALSE(tensor.grad_fn());
    }
    square.sum().backward();
    expect_equal(saved.grad(), torch::full({4}, 2.0), "gradient", context.rank);
  });
}

TEST(ProcessGroup, TensorsAreLetGoOnceTheCollectiveIsDone) {
  run(2, [](RankContext& context) {
    const auto input = torch::ones({6});
    const auto output = torch::zeros({12});
    auto work = all_gather(context, output, input);
    work->wait();
    EXPECT_EQ(input.use_count(), 1U);
    EXPECT_EQ(work->result().size(), 1U);
    EXPECT_TRUE(work->result()[0].is_same(output));
    work.reset();
    EXPECT_EQ(output.use_count(), 1U);
  });
}

TEST(ProcessGroup, TensorsMayGoOutOfScopeBeforeTheCollectiveIsDone) {
  run(4, [](RankContext& context) {
    const auto output = torch::zeros({4 * 1000});
    auto work = all_gather(context, output, torch::full({1000}, context.rank + 1.0));
    const auto reuse = torch::full({1000}, -5.0);  // likely where the input was
    work->wait();
    expect_equal(output, torch::arange(1, 5, torch::kFloat).repeat_interleave(1000), "all_gather",
                 context.rank);
  });
}

// ---- Asynchrony
// ----------------------------------------------------------------------------------

TEST(ProcessGroup, WorksMayBeWaitedForInAnyOrder) {
  run(4, [](RankContext& context) {
    for (int round = 0; round < 50; ++round) {
      const auto first = torch::full({100}, context.rank + 1.0 + round);
      const auto second = torch::zeros({400});
      const auto third = torch::full({10}, context.rank * 2.0);
      auto first_work = all_reduce(context, first);
      auto second_work =
          all_gather(context, second, torch::full({100}, 1.0 * context.rank + round));
      auto third_work = all_reduce(context, third, ReduceOp::MAX);
      EXPECT_LT(first_work->getSequencenumber(), second_work->getSequencenumber());
      if (context.rank % 2 == 0) {
        third_work->wait();
        second_work->wait();
        first_work->wait();
      } else {
        second_work->wait();
        first_work->wait();
        third_work->wait();
      }
      expect_equal(first, torch::full({100}, 10.0 + 4 * round), "all_reduce", context.rank);
      expect_equal(second, (torch::arange(4, torch::kFloat) + round).repeat_interleave(100),
                   "all_gather", context.rank);
      expect_equal(third, torch::full({10}, 6.0), "max", context.rank);
    }
  });
}

TEST(ProcessGroup, ARankThatDoesNotWaitHoldsNobodyUp) {
  std::atomic<bool> others_are_done = false;
  std::atomic<int> done = 0;
  run(3, [&](RankContext& context) {
    const auto output = torch::zeros({30});
    auto work = all_gather(context, output, torch::full({10}, context.rank + 1.0));
    if (context.rank == 1) {
      // Its own portion is done by the others, and it sees so without having waited.
      while (!others_are_done) {
        std::this_thread::sleep_for(1ms);
      }
      EXPECT_TRUE(work->isSuccess());
    } else {
      work->wait();
      others_are_done = ++done == 2;
    }
    expect_equal(output, torch::arange(1, 4, torch::kFloat).repeat_interleave(10), "all_gather",
                 context.rank);
  });
}

TEST(ProcessGroup, ACollectiveWhoseWorksAreAllDroppedIsDoneAllTheSame) {
  std::vector<Tensor> tensors;
  for (int rank = 0; rank < 4; ++rank) {
    tensors.push_back(torch::full({1000}, rank + 1.0));
  }
  run(4, [&](RankContext& context) { all_reduce(context, tensors[context.rank]); });
  for (int rank = 0; rank < 4; ++rank) {
    expect_equal(tensors[rank], torch::full({1000}, 10.0), "all_reduce", rank);
  }
}

TEST(ProcessGroup, PollingAloneMakesProgress) {
  run(3, [](RankContext& context) {
    const auto tensor = torch::full({5000}, context.rank + 1.0);
    const auto work = all_reduce(context, tensor);
    while (!work->isCompleted()) {
      std::this_thread::yield();
    }
    EXPECT_TRUE(work->isSuccess());
    EXPECT_EQ(work->exception(), nullptr);
    expect_equal(tensor, torch::full({5000}, 6.0), "all_reduce", context.rank);
    EXPECT_TRUE(work->wait());
    EXPECT_TRUE(work->wait()) << "a second wait";
  });
}

TEST(ProcessGroup, IsCompletedIsFalseWhileARankIsMissing) {
  std::atomic<bool> looked = false;
  run(2, [&](RankContext& context) {
    if (context.rank == 0) {
      const auto work = context.process_group->barrier();
      EXPECT_FALSE(work->isCompleted());
      EXPECT_FALSE(work->isSuccess());
      looked = true;
      work->wait();
      EXPECT_TRUE(work->isCompleted());
    } else {
      while (!looked) {
        std::this_thread::sleep_for(1ms);
      }
      context.process_group->barrier()->wait();
    }
  });
}

TEST(ProcessGroup, ARankMayRunAheadByManyCollectives) {
  run(3, [](RankContext& context) {
    std::vector<WorkPtr> works;
    Tensors tensors;
    for (int i = 0; i < 100; ++i) {
      tensors.push_back(torch::full({17}, i + context.rank));
      works.push_back(all_reduce(context, tensors.back()));
      if (context.rank == 2) {
        works.back()->wait();
      }
    }
    for (int i = 99; i >= 0; --i) {
      works[i]->wait();
      expect_equal(tensors[i], torch::full({17}, 3 * i + 3), "all_reduce", context.rank);
    }
    EXPECT_EQ(context.process_group->getSequenceNumberForGroup(), 100U);
  });
}

TEST(ProcessGroup, RanksMayBelongToSeveralGroups) {
  // Ranks 0..3 as a 2 x 2 mesh: a group for each row and one for each column.
  std::vector<std::vector<fsdp::BackendPtr>> rows;
  std::vector<std::vector<fsdp::BackendPtr>> columns;
  for (int i = 0; i < 2; ++i) {
    rows.push_back(fsdp::make_in_process_group(2, {30s, "row " + std::to_string(i)}));
    columns.push_back(fsdp::make_in_process_group(2, {30s, "column " + std::to_string(i)}));
  }
  run(4, [&](RankContext& context) {
    const int row = context.rank / 2;
    const int column = context.rank % 2;
    for (int round = 0; round < 100; ++round) {
      const auto tensor = torch::full({8}, context.rank + 1.0 + round);
      all_reduce({column, 2, rows[row][column]}, tensor)->wait();
      // Rows 0 and 1 hold 1 + 2 and 3 + 4.
      expect_equal(tensor, torch::full({8}, 4.0 * row + 3 + 2 * round), "row", context.rank);
      all_reduce({row, 2, columns[column][row]}, tensor)->wait();
      expect_equal(tensor, torch::full({8}, 10.0 + 4 * round), "column", context.rank);
    }
  });
}

TEST(ProcessGroup, ThousandsOfSmallCollectivesAreAllRight) {
  run(8, [](RankContext& context) {
    for (int round = 0; round < 2000; ++round) {
      const auto tensor = torch::full({3}, round + context.rank, torch::kInt);
      all_reduce(context, tensor)->wait();
      ASSERT_EQ(tensor[2].item<int>(), 8 * round + 28) << "round " << round;
    }
  });
}

TEST(ProcessGroup, FiveHundredAndTwelveRanksMeet) {
  constexpr int kRanks = fsdp::kMaxInProcessRanks;
  run(kRanks, [](RankContext& context) {
    context.process_group->barrier()->wait();
    const auto tensor = torch::full({5}, context.rank, torch::kInt);
    all_reduce(context, tensor)->wait();
    EXPECT_TRUE(tensor.eq(kRanks * (kRanks - 1) / 2).all().item<bool>()) << context.rank;
    const auto output = torch::zeros({kRanks}, torch::kInt);
    all_gather(context, output, torch::full({1}, context.rank, torch::kInt))->wait();
    EXPECT_TRUE(torch::equal(output, torch::arange(kRanks, torch::kInt))) << context.rank;
    const auto piece = torch::zeros({1}, torch::kInt);
    reduce_scatter(context, piece, output)->wait();
    EXPECT_EQ(piece.item<int>(), kRanks * context.rank);
    context.process_group->barrier()->wait();
  });
}

// ---- Calls that do not match
// ---------------------------------------------------------------------

struct Mismatch {
  std::string name;
  std::function<WorkPtr(RankContext&)> odd_one;  // what rank 1 of 4 calls
  std::vector<std::string> says;
};

TEST(ProcessGroup, CallsThatDoNotMatchEndEveryRankWithAMismatchError) {
  // The others call all_reduce(sum, Float, 4 elements).
  const std::vector<Mismatch> mismatches = {
      {"operation",
       [](RankContext& context) { return broadcast(context, torch::ones({4}), 0); },
       {"rank 1 called broadcast(Float, 4 elements, root 0)"}},
      {"operation alone",
       [](RankContext& context) {
         return reduce_scatter(context, torch::zeros({4}), torch::ones({16}));
       },
       {"rank 1 called reduce_scatter(sum, Float, 4 elements)"}},
      {"no tensor",
       [](RankContext& context) { return context.process_group->barrier(); },
       {"rank 1 called barrier()"}},
      {"dtype",
       [](RankContext& context) { return all_reduce(context, torch::ones({4}, torch::kHalf)); },
       {"rank 1 called all_reduce(sum, Half, 4 elements)"}},
      {"size",
       [](RankContext& context) { return all_reduce(context, torch::ones({5})); },
       {"rank 1 called all_reduce(sum, Float, 5 elements)"}},
      {"reduction",
       [](RankContext& context) { return all_reduce(context, torch::ones({4}), ReduceOp::AVG); },
       {"rank 1 called all_reduce(mean, Float, 4 elements)"}},
  };
  for (const auto& mismatch : mismatches) {
    std::atomic<int> caught = 0;
    run(4, [&](RankContext& context) {
      const auto tensor = torch::full({4}, context.rank + 1.0);
      const auto action = [&] {
        (context.rank == 1 ? mismatch.odd_one(context) : all_reduce(context, tensor))->wait();
      };
      const auto message = message_of<fsdp::MismatchError>(action);
      expect_says(message, mismatch.says);
      expect_says(message, {"rank " + std::to_string(context.rank) + ":",
                            "ranks 0, 2-3 called all_reduce(sum, Float, 4 elements)"});
      expect_equal(tensor, torch::full({4}, context.rank + 1.0), mismatch.name + ": tensor",
                   context.rank);
      // The group is broken, and says why.
      const auto again =
          message_of<fsdp::MismatchError>([&] { context.process_group->barrier()->wait(); });
      expect_says(again, mismatch.says);
      ++caught;
    });
    EXPECT_EQ(caught.load(), 4) << mismatch.name;
  }
}

TEST(ProcessGroup, RootsThatDifferAreAMismatch) {
  run(3, [](RankContext& context) {
    const auto message = message_of<fsdp::MismatchError>(
        [&] { broadcast(context, torch::ones({2}), context.rank == 2 ? 1 : 0)->wait(); });
    expect_says(message, {"rank 2 called broadcast(Float, 2 elements, root 1)",
                          "ranks 0-1 called broadcast(Float, 2 elements, root 0)"});
  });
}

TEST(ProcessGroup, SplitSizesThatDifferAreAMismatch) {
  run(2, [](RankContext& context) {
    const auto message = message_of<fsdp::MismatchError>([&] {
      if (context.rank == 0) {
        all_to_all(context, torch::ones({3}), torch::ones({3}), {1, 2}, {1, 2})->wait();
      } else {
        all_to_all(context, torch::ones({4}), torch::ones({4}), {1, 3}, {2, 2})->wait();
      }
    });
    expect_says(message, {"rank 0 gives rank 1 2 elements", "rank 1 takes 1"});
  });
}

TEST(ProcessGroup, ASendAndAReceiveOfDifferentSizesAreAMismatch) {
  run(2, [](RankContext& context) {
    const auto message = message_of<fsdp::MismatchError>([&] {
      (context.rank == 0 ? send(context, torch::ones({3}), 1)
                         : receive(context, torch::ones({4}), 0))
          ->wait();
    });
    expect_says(message, {"rank 0 called send(Float, 3 elements, to rank 1, tag 0)",
                          "rank 1 called recv(Float, 4 elements, from rank 0, tag 0)"});
  });
}

TEST(ProcessGroup, TheListAndTheFlatFormMatch) {
  run(2, [](RankContext& context) {
    const auto output = torch::zeros({4});
    const auto input = torch::full({2}, context.rank + 1.0);
    (context.rank == 0 ? all_gather(context, output, input)
                       : all_gather_list(context, pieces_of(output, 2), input))
        ->wait();
    expect_equal(output, torch::tensor({1.0F, 1.0F, 2.0F, 2.0F}), "all_gather", context.rank);
  });
}

// ---- Calls that are wrong by themselves
// ----------------------------------------------------------

struct Misuse {
  std::function<void(RankContext&)> call;
  std::vector<std::string> says;
};

TEST(ProcessGroup, WrongArgumentsAreRefusedOnTheRankThatGaveThem) {
  const auto ones = [](std::int64_t numel) { return torch::ones({numel}); };
  const std::vector<Misuse> misuses = {
      {[&](RankContext& c) { broadcast(c, ones(2), 2); }, {"broadcast", "rank 2", "[0, 2)"}},
      {[&](RankContext& c) { broadcast(c, ones(2), -1); }, {"broadcast", "rank -1"}},
      {[&](RankContext& c) { send(c, ones(2), 5); }, {"send", "rank 5"}},
      {[&](RankContext& c) { all_gather(c, ones(5), ones(2)); }, {"all_gather", "5", "wanted 4"}},
      {[&](RankContext& c) { reduce_scatter(c, ones(2), ones(3)); },
       {"reduce_scatter", "3", "wanted 4"}},
      {[&](RankContext& c) { all_gather_list(c, {ones(2)}, ones(2)); }, {"all_gather", "wanted 2"}},
      {[&](RankContext& c) {
         all_gather_list(c, {ones(2), ones(3)}, ones(2));
       },
       {"all_gather", "rank 1 has 3 elements", "wanted 2"}},
      {[&](RankContext& c) { all_gather(c, torch::ones({4}, torch::kHalf), ones(2)); },
       {"all_gather", "Float", "Half"}},
      {[&](RankContext& c) {
         all_reduce(c, torch::ones({2, 3}).t());
       },
       {"all_reduce", "[3, 2]", "contiguous()"}},
      {[&](RankContext& c) { all_reduce(c, torch::ones({2}).to_sparse()); }, {"dense"}},
      {[&](RankContext& c) { all_reduce(c, Tensor()); }, {"undefined"}},
      {[&](RankContext& c) { all_gather(c, ones(4), Tensor()); }, {"all_gather"}},
      {[&](RankContext& c) { all_reduce(c, torch::ones({2}, torch::kInt), ReduceOp::AVG); },
       {"mean", "Int"}},
      {[&](RankContext& c) { all_reduce(c, torch::ones({2}, torch::kBool), ReduceOp::AVG); },
       {"mean", "Bool"}},
      {[&](RankContext& c) { all_reduce(c, torch::ones({2}, torch::kInt), ReduceOp::BAND); },
       {"bitwise and"}},
      {[&](RankContext& c) { all_reduce(c, torch::ones({2}, torch::kInt), ReduceOp::BOR); },
       {"bitwise or"}},
      {[&](RankContext& c) { all_reduce(c, torch::ones({2}, torch::kInt), ReduceOp::BXOR); },
       {"bitwise xor"}},
      {[&](RankContext& c) {
         Tensors tensors = {ones(2)};
         c10d::AllreduceOptions options;
         options.reduceOp = c10d::makeNCCLPreMulSum(2.0);
         c.process_group->allreduce(tensors, options);
       },
       {"pre-multiplied sum"}},
      {[&](RankContext& c) { all_reduce(c, torch::ones({2}, torch::kComplexFloat)); },
       {"ComplexFloat"}},
      {[&](RankContext& c) {
         Tensors tensors = {ones(2), ones(2)};
         c.process_group->allreduce(tensors);
       },
       {"2 tensors", "wanted 1"}},
      {[&](RankContext& c) { all_to_all(c, ones(3), ones(3)); },
       {"all_to_all", "3", "split sizes"}},
      {[&](RankContext& c) {
         all_to_all(c, ones(4), ones(4), {1, 2}, {2, 2});
       },
       {"add up to 3", "4"}},
      {[&](RankContext& c) {
         all_to_all(c, ones(4), ones(4), {4}, {2, 2});
       },
       {"1 split sizes", "wanted 2"}},
      {[&](RankContext& c) {
         all_to_all(c, ones(4), ones(4), {5, -1}, {2, 2});
       },
       {"-1"}},
      {[&](RankContext& c) {
         const auto freed = ones(4);
         freed.storage().unsafeGetStorageImpl()->set_nbytes(0);
         all_reduce(c, freed);
       },
       {"0 bytes"}},
  };
  run(2, [&](RankContext& context) {
    for (const auto& misuse : misuses) {
      if (context.rank == 1) {
        const auto message = message_of<fsdp::UsageError>([&] { misuse.call(context); });
        expect_says(message, misuse.says);
        expect_says(message, {"rank 1: "});
      }
    }
    // A refused call is not posted, so both ranks are still in step.
    const auto tensor = torch::ones({2});
    all_reduce(context, tensor)->wait();
    expect_equal(tensor, torch::full({2}, 2.0), "all_reduce", context.rank);
  });
}

TEST(ProcessGroup, ImpossibleGroupsAreRefused) {
  for (const int world_size : {0, -1, fsdp::kMaxInProcessRanks + 1}) {
    expect_says(message_of<fsdp::UsageError>([&] { fsdp::make_in_process_group(world_size); }),
                {std::to_string(world_size), "1 to 512"});
    EXPECT_THROW(fsdp::run_ranks(world_size, [](RankContext&) {}), fsdp::UsageError);
  }
  EXPECT_THROW(fsdp::make_in_process_group(2, {0ms, "world"}), fsdp::UsageError);
  auto options = quick_options();
  options.intra_op_threads = 0;
  EXPECT_THROW(fsdp::run_ranks(
                   2, [](RankContext&) {}, options),
               fsdp::UsageError);
}

TEST(ProcessGroup, ABackendKnowsItsNameItsRankAndItsSize) {
  const auto group = fsdp::make_in_process_group(3);
  ASSERT_EQ(group.size(), 3U);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(group[rank]->getBackendName(), "in_process");
    EXPECT_EQ(group[rank]->getRank(), rank);
    EXPECT_EQ(group[rank]->getSize(), 3);
  }
}

// ---- Ranks that do not come
// ----------------------------------------------------------------------

TEST(ProcessGroup, ATimeoutNamesTheRanksThatAreMissing) {
  std::atomic<int> caught = 0;
  const auto start = steady_clock::now();
  on_threads(5, 200ms, [&](RankContext& context) {
    context.process_group->barrier()->wait();
    if (context.rank == 1 || context.rank == 3) {
      return;
    }
    const auto message =
        message_of<fsdp::TimeoutError>([&] { all_reduce(context, torch::ones({4}))->wait(); });
    expect_says(message, {"rank " + std::to_string(context.rank) + ": ",
                          "all_reduce(sum, Float, 4 elements)", "number 1", "group \"test\"",
                          "ranks 1, 3 did not arrive within 200 ms"});
    const auto again =
        message_of<fsdp::TimeoutError>([&] { context.process_group->barrier()->wait(); });
    expect_says(again, {"ranks 1, 3 did not arrive within 200 ms"});
    ++caught;
  });
  EXPECT_EQ(caught.load(), 3);
  EXPECT_LT(steady_clock::now() - start, 5s);
}

TEST(ProcessGroup, ARankThatComesTooLateGetsTheSameTimeoutError) {
  std::atomic<bool> expired = false;
  on_threads(2, 200ms, [&](RankContext& context) {
    if (context.rank == 1) {
      while (!expired) {
        std::this_thread::sleep_for(1ms);
      }
    }
    const auto message =
        message_of<fsdp::TimeoutError>([&] { context.process_group->barrier()->wait(); });
    expect_says(message, {"rank 1 did not arrive"});
    expired = true;
  });
}

TEST(ProcessGroup, ATimeoutAlsoSaysIfTheRanksThatCameDoNotAgree) {
  on_threads(3, 200ms, [&](RankContext& context) {
    if (context.rank == 2) {
      return;
    }
    const auto message = message_of<fsdp::TimeoutError>(
        [&] { all_reduce(context, torch::ones({1 + context.rank}))->wait(); });
    expect_says(message,
                {"rank 2 did not arrive", "rank 0 called all_reduce(sum, Float, 1 element)",
                 "rank 1 called all_reduce(sum, Float, 2 elements)"});
  });
}

TEST(ProcessGroup, TheTimeoutOfACallOverridesThatOfTheGroup) {
  const auto start = steady_clock::now();
  on_threads(2, 60s, [&](RankContext& context) {
    if (context.rank == 0) {
      const auto message = message_of<fsdp::TimeoutError>(
          [&] { all_reduce(context, torch::ones({4}), ReduceOp::SUM, 150ms)->wait(); });
      expect_says(message, {"within 150 ms"});
    }
  });
  on_threads(2, 60s, [&](RankContext& context) {
    if (context.rank == 0) {
      context.process_group->setTimeout(150ms);
      const auto message =
          message_of<fsdp::TimeoutError>([&] { all_reduce(context, torch::ones({4}))->wait(); });
      expect_says(message, {"within 150 ms"});
    }
  });
  on_threads(2, 60s, [&](RankContext& context) {
    if (context.rank == 0) {
      const auto message = message_of<fsdp::TimeoutError>(
          [&] { all_reduce(context, torch::ones({4}))->wait(150ms); });
      expect_says(message, {"within 150 ms"});
    }
  });
  EXPECT_LT(steady_clock::now() - start, 10s);
}

TEST(ProcessGroup, AReceiveWithoutASendTimesOut) {
  on_threads(3, 200ms, [&](RankContext& context) {
    if (context.rank == 0) {
      const auto message =
          message_of<fsdp::TimeoutError>([&] { receive(context, torch::ones({4}), 2)->wait(); });
      expect_says(message,
                  {"recv(Float, 4 elements, from rank 2, tag 0)", "rank 2 did not arrive"});
    }
  });
}

TEST(ProcessGroup, PollingEndsWithTheTimeoutToo) {
  on_threads(2, 200ms, [&](RankContext& context) {
    if (context.rank == 0) {
      const auto work = context.process_group->barrier();
      while (!work->isCompleted()) {
        std::this_thread::sleep_for(1ms);
      }
      EXPECT_FALSE(work->isSuccess());
      EXPECT_THROW(std::rethrow_exception(work->exception()), fsdp::TimeoutError);
      EXPECT_THROW(work->wait(), fsdp::TimeoutError);
    }
  });
}

// ---- Ranks that leave
// ----------------------------------------------------------------------------

TEST(ProcessGroup, ARankThatLeavesEndsTheCollectivesThatWaitForIt) {
  std::atomic<int> caught = 0;
  const auto start = steady_clock::now();
  on_threads(4, 60s, [&](RankContext& context) {
    context.process_group->barrier()->wait();
    if (context.rank == 2) {
      std::this_thread::sleep_for(50ms);
      fsdp::leave_group(*context.process_group, "the data ran out");
      return;
    }
    const auto message =
        message_of<fsdp::PeerError>([&] { all_reduce(context, torch::ones({4}))->wait(); });
    expect_says(message, {"rank " + std::to_string(context.rank) + ": ", "all_reduce",
                          "rank 2 left the group: the data ran out"});
    const auto later =
        message_of<fsdp::PeerError>([&] { context.process_group->barrier()->wait(); });
    expect_says(later, {"rank 2 left the group: the data ran out"});
    ++caught;
  });
  EXPECT_EQ(caught.load(), 3);
  EXPECT_LT(steady_clock::now() - start, 10s);
}

TEST(ProcessGroup, WhatARankPostedBeforeItLeftIsStillDone) {
  std::atomic<bool> has_left = false;
  run(3, [&](RankContext& context) {
    const auto tensor = torch::full({100}, context.rank + 1.0);
    if (context.rank == 1) {
      auto work = all_reduce(context, tensor);
      auto transfer = send(context, torch::full({4}, 9.0), 0);
      fsdp::leave_group(*context.process_group, "done");
      has_left = true;
      work->wait();
      expect_equal(tensor, torch::full({100}, 6.0), "all_reduce", 1);
      transfer->wait();
      return;
    }
    while (!has_left) {
      std::this_thread::sleep_for(1ms);
    }
    all_reduce(context, tensor)->wait();
    expect_equal(tensor, torch::full({100}, 6.0), "all_reduce", context.rank);
    if (context.rank == 0) {
      const auto received = torch::zeros({4});
      receive(context, received, 1)->wait();
      expect_equal(received, torch::full({4}, 9.0), "receive", 0);
      EXPECT_THROW(receive(context, received, 1)->wait(), fsdp::PeerError);
    }
    // What needs only the others still works.
    if (context.rank == 0) {
      send(context, tensor, 2)->wait();
    } else {
      receive(context, torch::zeros({100}), 0)->wait();
    }
  });
}

TEST(ProcessGroup, AReceiveFromARankThatLeavesEnds) {
  on_threads(2, 60s, [&](RankContext& context) {
    if (context.rank == 0) {
      const auto message =
          message_of<fsdp::PeerError>([&] { receive(context, torch::zeros({4}), 1)->wait(); });
      expect_says(message, {"recv", "rank 1 left the group: bye"});
    } else {
      std::this_thread::sleep_for(50ms);
      fsdp::leave_group(*context.process_group, "bye");
    }
  });
}

TEST(ProcessGroup, DestroyingShuttingDownAndAbortingABackendEndTheOthersWaits) {
  for (const std::string way : {"destroy", "shut down", "abort"}) {
    auto group = fsdp::make_in_process_group(2, {60s, "test"});
    std::jthread other([&] {
      const auto message = message_of<fsdp::PeerError>([&] { group[0]->barrier()->wait(); });
      expect_says(message, {"rank 1"});
    });
    std::this_thread::sleep_for(30ms);
    if (way == "destroy") {
      group[1].reset();
    } else if (way == "shut down") {
      group[1]->shutdown();
    } else {
      group[1]->abort();
    }
  }
}

TEST(ProcessGroup, AWorkOutlivesItsBackend) {
  auto group = fsdp::make_in_process_group(2, {60s, "test"});
  const auto first = torch::ones({3});
  const auto second = torch::ones({3});
  auto first_work = all_reduce({0, 2, group[0]}, first);
  auto second_work = all_reduce({1, 2, group[1]}, second);
  group.clear();
  first_work->wait();
  second_work->wait();
  expect_equal(first, torch::full({3}, 2.0), "all_reduce", 0);
  expect_equal(second, torch::full({3}, 2.0), "all_reduce", 1);
}

// ---- run_ranks
// -----------------------------------------------------------------------------------

TEST(RunRanks, RunsEveryRankOnceOnAThreadOfItsOwn) {
  for (const int world_size : kWorldSizes) {
    std::mutex mutex;
    std::vector<int> ranks;
    std::vector<std::thread::id> threads;
    run(world_size, [&](RankContext& context) {
      const std::lock_guard lock(mutex);
      EXPECT_EQ(context.world_size, world_size);
      EXPECT_EQ(context.process_group->getRank(), context.rank);
      EXPECT_EQ(context.process_group->getSize(), world_size);
      ranks.push_back(context.rank);
      threads.push_back(std::this_thread::get_id());
    });
    std::sort(ranks.begin(), ranks.end());
    std::vector<int> want(world_size);
    std::iota(want.begin(), want.end(), 0);
    EXPECT_EQ(ranks, want);
    EXPECT_EQ(std::count(threads.begin(), threads.end(), std::this_thread::get_id()), 0);
  }
}

TEST(RunRanks, SetsTheIntraOpThreadsOfTheRanksAndOfNobodyElse) {
  const int before = at::get_num_threads();
  for (const int threads : {1, 3}) {
    auto options = quick_options();
    options.intra_op_threads = threads;
    fsdp::run_ranks(
        2, [&](RankContext&) { EXPECT_EQ(at::get_num_threads(), threads); }, options);
    EXPECT_EQ(at::get_num_threads(), before);
    std::jthread([&] { EXPECT_EQ(at::get_num_threads(), before); });
  }
}

TEST(RunRanks, RunsBackwardOnTheRanksOwnThread) {
  run(2, [](RankContext&) {
    EXPECT_FALSE(c10::AutogradState::get_tls_state().get_multithreading_enabled());
    std::thread::id hook_thread;
    const auto leaf = torch::ones({2}, torch::requires_grad());
    auto product = leaf * 2;
    product.register_hook([&](const Tensor&) { hook_thread = std::this_thread::get_id(); });
    product.sum().backward();
    EXPECT_EQ(hook_thread, std::this_thread::get_id());
  });
}

struct OwnError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Where in a step the rank fails: the others are at that time before, in or between collectives.
TEST(RunRanks, ARankThatThrowsEndsTheOthersAndIsTheOneReported) {
  for (const int world_size : {2, 5, 16}) {
    for (int culprit = 0; culprit < world_size; culprit += 3) {
      for (int round = 0; round < 3; ++round) {
        std::atomic<int> echoes = 0;
        const auto start = steady_clock::now();
        const auto message = message_of<fsdp::ShardingError>([&] {
          run(world_size, [&](RankContext& context) {
            const auto tensor = torch::ones({100});
            try {
              for (int i = 0; i < 3; ++i) {
                if (context.rank == culprit && i == round) {
                  auto pending = all_reduce(context, tensor);
                  throw fsdp::ShardingError("no such shard");
                }
                all_reduce(context, tensor)->wait();
              }
              context.process_group->barrier()->wait();
            } catch (const fsdp::PeerError& error) {
              expect_says(error.what(),
                          {"rank " + std::to_string(culprit) + " left the group: no such shard"});
              ++echoes;
              throw;
            }
          });
        });
        EXPECT_EQ(message, "rank " + std::to_string(culprit) + ": no such shard");
        EXPECT_EQ(echoes.load(), world_size - 1);
        EXPECT_LT(steady_clock::now() - start, 10s);
      }
    }
  }
}

TEST(RunRanks, ARankThatReturnsEarlyEndsTheOthers) {
  const auto start = steady_clock::now();
  const auto message = message_of<fsdp::PeerError>([] {
    run(3, [](RankContext& context) {
      context.process_group->barrier()->wait();
      if (context.rank != 1) {
        all_reduce(context, torch::ones({4}))->wait();
      }
    });
  });
  expect_says(message, {"rank 1 left the group: its function returned", "all_reduce"});
  EXPECT_LT(steady_clock::now() - start, 10s);
}

TEST(RunRanks, ReturningFromTheLastCollectiveEarlyDisturbsNobody) {
  for (int round = 0; round < 200; ++round) {
    run(4, [&](RankContext& context) {
      const auto tensor = torch::full({10}, context.rank + 1.0);
      auto work = all_reduce(context, tensor);
      if (context.rank != round % 4) {
        work->wait();
        expect_equal(tensor, torch::full({10}, 10.0), "all_reduce", context.rank);
      }
    });
  }
}

TEST(RunRanks, KeepsTheTypeAndNamesTheRank) {
  const auto fails_with = [](const auto& error) {
    return [error] {
      run(3, [&](RankContext& context) {
        if (context.rank == 2) {
          throw error;
        }
        context.process_group->barrier()->wait();
      });
    };
  };
  EXPECT_EQ(message_of<fsdp::UsageError>(fails_with(fsdp::UsageError("bad"))), "rank 2: bad");
  EXPECT_EQ(message_of<fsdp::MismatchError>(fails_with(fsdp::MismatchError("bad"))), "rank 2: bad");
  EXPECT_EQ(message_of<fsdp::TimeoutError>(fails_with(fsdp::TimeoutError("bad"))), "rank 2: bad");
  EXPECT_EQ(message_of<fsdp::NonFiniteError>(fails_with(fsdp::NonFiniteError("x"))), "rank 2: x");
  EXPECT_EQ(message_of<fsdp::Error>(fails_with(fsdp::Error("bad"))), "rank 2: bad");
  EXPECT_EQ(message_of<std::invalid_argument>(fails_with(std::invalid_argument("bad"))),
            "rank 2: bad");
  EXPECT_EQ(message_of<fsdp::UsageError>(fails_with(fsdp::UsageError("rank 2 is wrong"))),
            "rank 2 is wrong");
  EXPECT_EQ(message_of<fsdp::UsageError>(fails_with(fsdp::UsageError("not rank 21"))),
            "rank 2: not rank 21");
  // A type of the caller's own, which may carry more than text, comes as it is.
  EXPECT_EQ(message_of<OwnError>(fails_with(OwnError("mine"))), "mine");
  EXPECT_THROW(fails_with(7)(), int);
}

TEST(RunRanks, KeepsErrorsOfTheTensorLibrary) {
  const auto message = message_of<c10::IndexError>([] {
    run(2, [](RankContext& context) {
      if (context.rank == 1) {
        torch::ones({2}).select(0, 5);
      }
      context.process_group->barrier()->wait();
    });
  });
  expect_says(message, {"rank 1", "out of range"});
}

TEST(RunRanks, AnErrorIsReportedInPreferenceToItsEchoesEvenIfTheyComeFirst) {
  std::atomic<int> echoes = 0;
  const auto message = message_of<std::logic_error>([&] {
    run(3, [&](RankContext& context) {
      if (context.rank == 0) {
        fsdp::leave_group(*context.process_group, "about to fail");
        while (echoes < 2) {
          std::this_thread::sleep_for(1ms);
        }
        std::this_thread::sleep_for(20ms);
        throw std::logic_error("the cause");
      }
      try {
        context.process_group->barrier()->wait();
      } catch (const fsdp::PeerError&) {
        ++echoes;
        throw;
      }
    });
  });
  EXPECT_EQ(message, "rank 0: the cause");
}

TEST(RunRanks, OfTwoErrorsTheFirstIsReported) {
  const auto message = message_of<std::runtime_error>([&] {
    run(3, [&](RankContext& context) {
      if (context.rank == 1) {
        throw std::runtime_error("first");
      }
      try {
        context.process_group->barrier()->wait();
      } catch (const fsdp::PeerError&) {
        throw std::runtime_error("second");
      }
    });
  });
  EXPECT_EQ(message, "rank 1: first");
}

TEST(RunRanks, AFaultOfManyRanksEndsEachOfThem) {
  std::atomic<int> ended = 0;
  EXPECT_THROW(run(64,
                   [&](RankContext& context) {
                     const auto tensor = torch::ones({10});
                     try {
                       for (int i = 0; i < 10; ++i) {
                         all_reduce(context, tensor)->wait();
                         if (i == 5 && context.rank % 7 == 3) {
                           throw fsdp::NonFiniteError("NaN");
                         }
                       }
                     } catch (...) {
                       ++ended;
                       throw;
                     }
                   }),
               fsdp::NonFiniteError);
  EXPECT_EQ(ended.load(), 64);
}

}  // namespace
