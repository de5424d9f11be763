// check_collectives over in_process ranks: every kind of difference is named on every rank, and
// equal calls pass through unchanged. in_process compares calls by itself, so what is asked for
// here is the checker's own text.

#include <fsdp/checking.h>
#include <fsdp/errors.h>
#include <fsdp/recording.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace fsdp {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;
using Body = std::function<void(const BackendPtr& group, int rank)>;

/// What each rank of a checked group of three says of a mismatch; "" if nothing.
std::vector<std::string> mismatches(const Body& body) {
  std::vector<std::string> said(3);
  RunRanksOptions options;
  options.group.timeout = std::chrono::seconds(20);
  run_ranks(
      3,
      [&](RankContext& rank) {
        try {
          body(check_collectives(rank.process_group), rank.rank);
        } catch (const MismatchError& error) {
          said[rank.rank] = error.what();
        }
      },
      options);
  return said;
}

void all_reduce(const BackendPtr& group, at::Tensor tensor,
                c10d::ReduceOp op = c10d::ReduceOp::SUM) {
  Tensors tensors{std::move(tensor)};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  group->allreduce(tensors, options)->wait();
}

void all_gather(const BackendPtr& group, at::Tensor mine) {
  auto all = at::empty({mine.numel() * group->getSize()}, mine.options());
  group->_allgather_base(all, mine, {})->wait();
}

void broadcast(const BackendPtr& group, int root) {
  Tensors tensors{at::zeros({4})};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  group->broadcast(tensors, options)->wait();
}

struct Difference {
  const char* name;
  Body body;                // rank 1 differs
  std::string others_call;  // and what the others say they call
  std::string rank_1_calls;
};

const std::vector<Difference> kDifferences = {
    {"Operation",
     [](const BackendPtr& group, int rank) {
       rank == 1 ? all_gather(group, at::zeros({4})) : all_reduce(group, at::zeros({4}));
     },
     "call 0: all_reduce of 4 Float, sum", "call 0: all_gather of 4 Float"},
    {"Size",
     [](const BackendPtr& group, int rank) { all_gather(group, at::zeros({rank == 1 ? 5 : 4})); },
     "all_gather of 4 Float", "all_gather of 5 Float"},
    {"Dtype",
     [](const BackendPtr& group, int rank) {
       all_gather(group, at::zeros({4}, rank == 1 ? at::kInt : at::kFloat));  // as many bytes
     },
     "all_gather of 4 Float", "all_gather of 4 Int"},
    {"Reduction",
     [](const BackendPtr& group, int rank) {
       all_reduce(group, at::zeros({4}), rank == 1 ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM);
     },
     "Float, sum", "Float, avg"},
    {"Root", [](const BackendPtr& group, int rank) { broadcast(group, rank == 1 ? 2 : 0); },
     "broadcast of 4 Float, root 0", "broadcast of 4 Float, root 2"},
    {"LabelOfEqualSizes",
     [](const BackendPtr& group, int rank) {
       const CollectiveLabel label(rank == 1 ? "unit 'b'" : "unit 'a'");
       all_gather(group, at::zeros({4}));
     },
     "all_gather of 4 Float, for unit 'a'", "all_gather of 4 Float, for unit 'b'"},
    {"EndOfALongLabel",
     [](const BackendPtr& group, int rank) {
       std::string text(301, 'x');
       text.back() = rank == 1 ? 'b' : 'a';
       const CollectiveLabel label(text);
       all_gather(group, at::zeros({4}));
     },
     "xxx... (301 bytes", "xxx... (301 bytes"},
    {"Order",
     [](const BackendPtr& group, int rank) {
       if (rank == 1) {
         group->barrier({})->wait();
         all_reduce(group, at::zeros({4}));
       } else {
         all_reduce(group, at::zeros({4}));
         group->barrier({})->wait();
       }
     },
     "call 0: all_reduce", "call 0: barrier"},
    {"NumberOfTensors",
     [](const BackendPtr& group, int rank) {
       Tensors tensors{at::zeros({rank == 1 ? 4 : 2})};
       if (rank != 1) {
         tensors.push_back(at::zeros({2}));
       }
       group->allreduce_coalesced(tensors, {})->wait();
     },
     "4 Float in 2 tensors", "4 Float, sum"},
};

class Differences : public testing::TestWithParam<Difference> {};

TEST_P(Differences, AreNamedOnEveryRank) {
  const auto said = mismatches(GetParam().body);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_THAT(
        said[rank],
        AllOf(HasSubstr("rank " + std::to_string(rank) + ": the ranks' collectives do not match"),
              HasSubstr("rank 1 differs: ranks 0, 2: "), HasSubstr(GetParam().others_call),
              HasSubstr("rank 1: call 0: "), HasSubstr(GetParam().rank_1_calls)));
  }
}
INSTANTIATE_TEST_SUITE_P(CheckCollectives, Differences, testing::ValuesIn(kDifferences),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(CheckCollectives, LetsEqualCallsThroughUnchanged) {
  const auto said = mismatches([](const BackendPtr& group, int rank) {
    EXPECT_EQ(group->getBackendName(), "in_process");
    auto mine = at::full({2}, rank, at::kFloat);
    auto all = at::empty({6});
    group->_allgather_base(all, mine, {})->wait();
    EXPECT_TRUE(at::equal(all, at::tensor({0, 0, 1, 1, 2, 2}, at::kFloat)));
    auto piece = at::empty({2});
    group->_reduce_scatter_base(piece, all, {})->wait();
    EXPECT_TRUE(at::equal(piece, at::full({2}, 3.0 * rank)));
    Tensors sum{at::full({3}, rank, at::kLong)};
    group->allreduce(sum, {})->wait();
    EXPECT_TRUE(at::equal(sum[0], at::full({3}, 3, at::kLong)));
    // Uneven pieces are no difference in an all-to-all: rank r sends r + 1 rows to each.
    std::vector<std::int64_t> sends(3, rank + 1);
    std::vector<std::int64_t> receives{1, 2, 3};
    auto out = at::full({3 * (rank + 1)}, rank, at::kFloat);
    auto in = at::empty({6});
    group->alltoall_base(in, out, receives, sends, {})->wait();
    EXPECT_TRUE(at::equal(in, at::tensor({0, 1, 1, 2, 2, 2}, at::kFloat)));
    group->barrier({})->wait();
    EXPECT_EQ(group->getSequenceNumberForGroup(), 5U);
  });
  EXPECT_EQ(said, std::vector<std::string>(3)) << testing::PrintToString(said);
}

TEST(CheckCollectives, ComparesInGroupsThatWereSplitOff) {
  const auto said = mismatches([](const BackendPtr& group, int rank) {
    if (rank == 2) {
      return;
    }
    const auto pair = group->split(nullptr, {0, 1}, nullptr);
    all_reduce(pair, at::zeros({4}));
    all_gather(pair, at::zeros({rank == 1 ? 7 : 6}));
  });
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_THAT(said[rank], AllOf(HasSubstr("rank 1 differs"), HasSubstr("call 1: all_gather of 6"),
                                  HasSubstr("call 1: all_gather of 7")));
  }
}

TEST(CheckCollectives, FailsForEverAfterAMismatch) {
  const auto said = mismatches([](const BackendPtr& group, int rank) {
    EXPECT_THROW(all_gather(group, at::zeros({rank == 1 ? 5 : 4})), MismatchError);
    all_gather(group, at::zeros({4}));
  });
  EXPECT_THAT(said[0], HasSubstr("rank 1 differs"));
}

TEST(CheckCollectives, LeavingReachesTheGroupInside) {
  std::string told;
  run_ranks(2, [&](RankContext& context) {
    const auto log = std::make_shared<CollectiveLog>();
    const auto group = check_collectives(record_collectives(context.process_group, "inner", log));
    if (context.rank == 1) {
      leave_group(*group, "planted");
      return;
    }
    try {
      group->barrier({})->wait();
    } catch (const PeerError& error) {
      told = error.what();
    }
  });
  EXPECT_THAT(told, AllOf(HasSubstr("rank 1 left"), HasSubstr("planted")));
}

TEST(CheckCollectives, RefusesANullGroup) {
  EXPECT_THROW(check_collectives(nullptr), UsageError);
}

}  // namespace
}  // namespace fsdp
