// The main job when each rank is started by itself: rank 0 collects and compares, the others train
// and send. Ranks here are threads that know of each other only what processes would.

#include <fsdp/errors.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <future>
#include <mutex>

#include "conformance/fsdp_subject.h"
#include "conformance/rank_messages.h"
#include "conformance/rank_trace.h"
#include "conformance/session.h"
#include "conformance/suites/temporary_folder.h"
#include "conformance/trace_io.h"
#include "fault_injection/catalogue.h"
#include "reference/models.h"

namespace shardproof {
namespace {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

Scenario small(int world_size) {
  Scenario scenario;
  scenario.model.layers = 2;
  scenario.model.width = 16;
  scenario.model.heads = 2;
  scenario.model.context = 8;
  scenario.data.kind = "synthetic";
  scenario.world_size = world_size;
  scenario.batch = 2;
  scenario.steps = 3;
  scenario.max_norm = 0.1;
  scenario.optimizer.lr = 0.01;
  return scenario;
}

SessionOptions session(const Scenario& scenario) {
  SessionOptions options;
  options.scenario = scenario;
  options.python = false;
  options.timeout = std::chrono::seconds(60);
  return options;
}

/// Runs `body` for every rank on a thread with its part of a group. What each threw, "" for none.
std::vector<std::string> on_ranks_apart(int world_size,
                                        const std::function<void(fsdp::BackendPtr)>& body) {
  fsdp::InProcessOptions group;
  group.timeout = std::chrono::seconds(60);
  std::vector<std::future<std::string>> ranks;
  for (auto& backend : fsdp::make_in_process_group(world_size, group)) {
    ranks.push_back(std::async(std::launch::async, [&body, backend = std::move(backend)]() mutable {
      try {
        body(std::move(backend));
      } catch (const std::exception& error) {
        return std::string(error.what());
      }
      return std::string();
    }));
  }
  std::vector<std::string> errors;
  for (auto& rank : ranks) {
    errors.push_back(rank.get());
  }
  return errors;
}

struct Ended {
  RunSummary summary;
  std::vector<int> codes;  // of the ranks other than 0
};

/// The main job with each rank by itself. `change` may make a rank's options other than they are.
Ended run_apart(const SessionOptions& options, std::vector<std::string>& errors,
                const std::function<void(int rank, SessionOptions&)>& change = {}) {
  Ended ended;
  std::mutex mutex;
  errors = on_ranks_apart(options.scenario.world_size, [&](fsdp::BackendPtr group) {
    auto own = options;
    own.process_group = group;
    if (change) {
      change(group->getRank(), own);
    }
    if (group->getRank() == 0) {
      auto summary = run_session(own);
      const std::lock_guard lock(mutex);
      ended.summary = std::move(summary);
    } else {
      const int code = follow_session(own);
      const std::lock_guard lock(mutex);
      ended.codes.push_back(code);
    }
  });
  return ended;
}

TEST(RanksApart, GiveTheSameVerdictsAsThreads) {
  for (const int world_size : {1, 2, 3, 5}) {
    auto options = session(small(world_size));
    const auto together = run_session(options);
    std::vector<std::string> errors;
    const auto apart = run_apart(options, errors);
    EXPECT_THAT(errors, Each(""));
    EXPECT_EQ(apart.summary.outcome, Outcome::passed);
    EXPECT_EQ(apart.summary.trace_digest, together.trace_digest);
    EXPECT_EQ(apart.codes, std::vector<int>(world_size - 1, 0));
    ASSERT_EQ(apart.summary.rows.size(), together.rows.size());
    for (std::size_t i = 0; i < together.rows.size(); ++i) {
      EXPECT_EQ(apart.summary.rows[i].tensors, together.rows[i].tensors) << i;
      EXPECT_EQ(apart.summary.rows[i].worst_ulp, together.rows[i].worst_ulp) << i;
    }
  }
}

TEST(RanksApart, AFaultIsCaughtAndItsStrikesOnEveryRankAreKnown) {
  auto options = session(small(3));
  options.fault = find_fault("local_norm_clipping");
  const auto together = run_session(options);
  options.conclude = [](const RunSummary& summary) {
    return summary.outcome == Outcome::failed ? 41 : 0;
  };
  std::vector<std::string> errors;
  const auto apart = run_apart(options, errors);
  EXPECT_THAT(errors, Each(""));
  EXPECT_THAT(apart.codes, testing::ElementsAre(41, 41));
  ASSERT_EQ(apart.summary.strikes.size(), together.strikes.size());
  for (std::size_t i = 0; i < together.strikes.size(); ++i) {
    EXPECT_EQ(apart.summary.strikes[i].rank, together.strikes[i].rank);
    EXPECT_EQ(apart.summary.strikes[i].step, together.strikes[i].step);
    EXPECT_EQ(apart.summary.strikes[i].name, together.strikes[i].name);
  }
  EXPECT_EQ(apart.summary.first_divergence.rank, together.first_divergence.rank);
  EXPECT_EQ(apart.summary.first_divergence.name, together.first_divergence.name);
}

struct OtherJob {
  std::string name;
  std::function<void(SessionOptions&, const std::filesystem::path& folder)> change;
  std::string field;
};

void PrintTo(const OtherJob& job, std::ostream* out) {
  *out << job.name;
}

class AnotherJob : public testing::TestWithParam<OtherJob> {};

TEST_P(AnotherJob, OnOneRankIsRefusedOnEveryRankAndNamed) {
  const TemporaryFolder folder;
  auto options = session(small(3));
  options.scenario.data.kind = "bytes";
  options.scenario.data.corpus = {(folder.path() / "text").string()};
  std::ofstream(folder.path() / "text") << std::string(4000, 'a') << "b";
  std::ofstream(folder.path() / "other") << std::string(4000, 'a') << "c";
  auto weights = initial_parameters(options.scenario);
  weights.begin()->second.mutable_data_ptr<float>()[0] += 1;
  write_safetensors(folder.path() / "weights", {weights, {}});
  std::vector<std::string> errors;
  run_apart(options, errors, [&](int rank, SessionOptions& own) {
    if (rank == 2) {
      GetParam().change(own, folder.path());
    }
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("rank 2: " + GetParam().field + " is "),
                                 HasSubstr("wanted: the same command and the same files"))));
}

INSTANTIATE_TEST_SUITE_P(
    Each, AnotherJob,
    testing::Values(
        OtherJob{"learning_rate", [](auto& own, const auto&) { own.scenario.optimizer.lr = 0.5; },
                 "/optimizer/lr"},
        OtherJob{"seed", [](auto& own, const auto&) { own.scenario.seed = 5; }, "/seed"},
        OtherJob{"corpus",
                 [](auto& own, const auto& folder) {
                   own.scenario.data.corpus = {(folder / "other").string()};
                 },
                 "/data/corpus"},
        OtherJob{"weights", [](auto& own, const auto& folder) { own.weights = folder / "weights"; },
                 "/weights"},
        OtherJob{"fault", [](auto& own, const auto&) { own.fault = find_fault("flipped_bit"); },
                 "/fault"}),
    [](const auto& info) { return info.param.name; });

TEST(RanksApart, WorldSizeAndBackendMustBeThoseOfTheGroup) {
  std::vector<std::string> errors;
  run_apart(session(small(2)), errors,
            [](int, SessionOptions& own) { own.scenario.world_size = 3; });
  EXPECT_THAT(errors, testing::Contains(
                          HasSubstr("world_size is 3; wanted: 2, the number of ranks started")));
  run_apart(session(small(2)), errors,
            [](int, SessionOptions& own) { own.scenario.backend = "store"; });
  EXPECT_THAT(errors, testing::Contains(HasSubstr("backend is \"store\"; wanted: \"in_process\"")));
}

TEST(RanksApart, WhatOneRankThrowsEndsAllOfThemAndIsTold) {
  const auto scenario = small(3);
  const auto weights = initial_parameters(scenario);
  for (const int bad : {0, 1, 2}) {
    const auto errors = on_ranks_apart(3, [&](fsdp::BackendPtr group) {
      FsdpSubject::Options options;
      options.process_group = group;
      options.before_step = [bad](int rank, int step) {
        if (rank == bad && step == 1) {
          throw fsdp::NonFiniteError("planted");
        }
      };
      if (group->getRank() != 0) {
        FsdpSubject::follow(scenario, weights, options);
        return;
      }
      FsdpSubject subject(scenario, weights, options);
      while (subject.next()) {
      }
    });
    EXPECT_THAT(errors,
                Each(AllOf(HasSubstr("planted"), HasSubstr("rank " + std::to_string(bad)))));
  }
}

TEST(RanksApart, AReaderThatStopsEarlyEndsTheOthers) {
  const auto scenario = small(2);
  const auto weights = initial_parameters(scenario);
  const auto errors = on_ranks_apart(2, [&](fsdp::BackendPtr group) {
    FsdpSubject::Options options;
    options.process_group = group;
    if (group->getRank() != 0) {
      FsdpSubject::follow(scenario, weights, options);
      return;
    }
    FsdpSubject subject(scenario, weights, options);
    subject.next();
  });
  EXPECT_THAT(errors, testing::ElementsAre(
                          "", AllOf(HasSubstr("rank 0 left"), HasSubstr("the reader stopped"))));
}

TEST(RanksApart, MessagesOfAnyLengthArrive) {
  const auto errors = on_ranks_apart(3, [](fsdp::BackendPtr group) {
    const RankMessages messages(group);
    for (const std::size_t length : {0, 1, 1000}) {
      const auto text_of = [&](int rank) {
        return std::string(rank * length, static_cast<char>('a' + rank)) + std::string(1, '\0');
      };
      const std::vector<std::string> all = {text_of(0), text_of(1), text_of(2)};
      EXPECT_EQ(messages.exchange(text_of(messages.rank())), all);
      EXPECT_EQ(messages.gather_on_first(text_of(messages.rank())),
                messages.rank() == 0 ? all : std::vector<std::string>());
      EXPECT_EQ(messages.from_first(text_of(messages.rank() + 1)), text_of(1));
    }
    EXPECT_EQ(messages.exchange(""), std::vector<std::string>(3));
  });
  EXPECT_THAT(errors, Each(""));
}

RankTrace some_trace(int rank) {
  RankTrace trace;
  TraceTensor tensor;
  tensor.quantity = Quantity::gradient;
  tensor.name = "layers.0.weight";
  tensor.shape = {2, 3};
  tensor.placement = Placement::sharded;
  tensor.pieces.push_back({rank, 3 * rank, torch::arange(3, torch::kBFloat16) + rank});
  trace.tensors.push_back(tensor);
  tensor.quantity = Quantity::parameter;
  tensor.pieces.front().values = torch::empty({0}, torch::kDouble);
  trace.tensors.push_back(tensor);
  trace.strikes.push_back({4, rank, Quantity::gradient, "x", -1});
  return trace;
}

TEST(RankTrace, IsTheSameAfterItsWayAsBytes) {
  const auto trace = some_trace(1);
  const auto back = unpack(pack(trace));
  ASSERT_EQ(back.tensors.size(), trace.tensors.size());
  for (std::size_t i = 0; i < trace.tensors.size(); ++i) {
    const auto& want = trace.tensors[i];
    const auto& got = back.tensors[i];
    EXPECT_EQ(got.quantity, want.quantity);
    EXPECT_EQ(got.name, want.name);
    EXPECT_EQ(got.shape, want.shape);
    EXPECT_EQ(got.placement, want.placement);
    ASSERT_EQ(got.pieces.size(), 1u);
    EXPECT_EQ(got.pieces[0].rank, want.pieces[0].rank);
    EXPECT_EQ(got.pieces[0].offset, want.pieces[0].offset);
    EXPECT_EQ(got.pieces[0].values.scalar_type(), want.pieces[0].values.scalar_type());
    EXPECT_TRUE(torch::equal(got.pieces[0].values, want.pieces[0].values));
  }
  ASSERT_EQ(back.strikes.size(), 1u);
  EXPECT_EQ(back.strikes[0].step, 4);
  EXPECT_EQ(back.strikes[0].rank, 1);
  EXPECT_EQ(back.strikes[0].name, "x");
  EXPECT_EQ(back.strikes[0].element, -1);
}

TEST(RankTrace, CutShortIsRefused) {
  const auto bytes = pack(some_trace(0));
  EXPECT_THROW(unpack(bytes.substr(0, bytes.size() - 1)), TraceError);
  EXPECT_THROW(unpack(bytes.substr(0, 20)), TraceError);
  EXPECT_THROW(unpack(""), TraceError);
}

TEST(RankTrace, RanksWithOtherTensorsAreNamed) {
  const auto message = [](const std::function<void(RankTrace&)>& change) -> std::string {
    std::vector<RankTrace> ranks = {some_trace(0), some_trace(1)};
    change(ranks[1]);
    try {
      join(7, std::move(ranks));
    } catch (const TraceError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message([](RankTrace&) {}), "");
  EXPECT_THAT(message([](RankTrace& t) { t.tensors.pop_back(); }),
              AllOf(HasSubstr("rank 1: in step 7"), HasSubstr("number 1 is nothing")));
  EXPECT_THAT(message([](RankTrace& t) { t.tensors[0].name = "bias"; }),
              HasSubstr("gradient 'bias' of sizes [2, 3], sharded, and rank 0's is gradient "
                        "'layers.0.weight'"));
  EXPECT_THAT(message([](RankTrace& t) { t.tensors[1].shape = {3, 2}; }), HasSubstr("[3, 2]"));
  EXPECT_THAT(message([](RankTrace& t) { std::swap(t.tensors[0], t.tensors[1]); }),
              HasSubstr("number 0 is parameter"));
}

}  // namespace
}  // namespace shardproof
