// Sharded training held to one device, in process, over world sizes, optimizers and shapes of
// model.

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>

#include "conformance/comparison.h"
#include "conformance/fsdp_subject.h"
#include "conformance/session.h"
#include "conformance/suites/equal_to_one_device.h"
#include "fsdp/errors.h"
#include "reference/models.h"

namespace shardproof {
namespace {

Scenario transformer(int world_size) {
  Scenario scenario;
  scenario.model.layers = 2;
  scenario.model.width = 32;
  scenario.model.heads = 4;
  scenario.model.context = 8;
  scenario.data.kind = "synthetic";
  scenario.world_size = world_size;
  scenario.batch = 2;
  scenario.steps = 3;
  scenario.max_norm = 0.1;
  scenario.optimizer.lr = 0.01;
  return scenario;
}

Scenario mlp(int world_size, std::vector<std::int64_t> sizes) {
  Scenario scenario = transformer(world_size);
  scenario.model = ModelSpec();
  scenario.model.kind = "mlp";
  scenario.model.sizes = std::move(sizes);
  return scenario;
}

void use_sgd(Scenario& scenario) {
  scenario.optimizer.kind = "sgd";
  scenario.optimizer.momentum = 0.9;
  scenario.optimizer.lr = 0.1;
}

class EachWorldSize : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Equivalence, EachWorldSize, testing::Values(1, 2, 3, 4, 5, 7, 8, 16),
                         [](const auto& info) { return "W" + std::to_string(info.param); });

TEST_P(EachWorldSize, ATransformerWithAdamWIsExact) {
  expect_equal_to_one_device(transformer(GetParam()));
}

TEST_P(EachWorldSize, ATransformerWithSgdAndMomentumIsExact) {
  auto scenario = transformer(GetParam());
  use_sgd(scenario);
  expect_equal_to_one_device(scenario);
}

TEST_P(EachWorldSize, TwoMicroBatchesAreExact) {
  auto scenario = transformer(GetParam());
  scenario.micro_batches = 2;
  expect_equal_to_one_device(scenario);
}

TEST_P(EachWorldSize, AModelAsOneUnitIsExact) {
  auto scenario = transformer(GetParam());
  scenario.wrap = "model";
  expect_equal_to_one_device(scenario);
}

TEST_P(EachWorldSize, DropoutIsExact) {
  auto scenario = transformer(GetParam());
  scenario.model.dropout = 0.25;
  expect_equal_to_one_device(scenario);
}

TEST_P(EachWorldSize, Float64IsExact) {
  auto scenario = transformer(GetParam());
  scenario.dtype = "float64";
  expect_equal_to_one_device(scenario);
}

TEST_P(EachWorldSize, AnMlpWhoseSizesDoNotDivideIsExact) {
  expect_equal_to_one_device(mlp(GetParam(), {5, 7, 3}));
}

TEST(Equivalence, SixtyFourRanksOfATinyModelAreExact) {
  auto scenario = mlp(64, {8, 16, 4});
  scenario.batch = 1;
  expect_equal_to_one_device(scenario);
}

TEST(Equivalence, FiveHundredAndTwelveRanksOfATinierModelAreExactWithMostShardsEmpty) {
  auto scenario = mlp(512, {3, 2});
  scenario.batch = 1;
  scenario.steps = 2;
  expect_equal_to_one_device(scenario);
}

TEST(Equivalence, WithoutClippingIsExact) {
  auto scenario = transformer(3);
  scenario.max_norm = 0;
  expect_equal_to_one_device(scenario);
}

TEST(Equivalence, FreeRunningStaysExact) {
  SessionOptions options;
  options.scenario = transformer(4);
  options.scenario.steps = 6;
  options.python = false;
  options.lockstep = false;
  const auto summary = run_session(options);
  for (const auto& row : summary.rows) {
    if (row.reference == "replay") {
      EXPECT_EQ(row.worst_ulp, 0u) << row.quantity;
      EXPECT_EQ(row.failed, 0) << row.quantity;
    }
  }
}

TEST(Equivalence, RepeatedRunsGiveTheSameBits) {
  const auto scenario = transformer(5);
  std::vector<at::Tensor> first;
  for (int repeat = 0; repeat < 3; ++repeat) {
    FsdpSubject subject(scenario, initial_parameters(scenario));
    std::size_t at = 0;
    while (const auto step = subject.next()) {
      for (const auto& tensor : step->tensors) {
        for (const auto& piece : tensor.pieces) {
          if (repeat == 0) {
            first.push_back(piece.values);
          } else {
            ASSERT_TRUE(torch::equal(first.at(at++), piece.values))
                << tensor.name << " in repeat " << repeat;
          }
        }
      }
    }
  }
  EXPECT_GT(first.size(), 100u);
}

/// What a run with this planted trouble ends with, and its message.
std::string message_of(const Scenario& scenario, FsdpSubject::Options options) {
  FsdpSubject subject(scenario, initial_parameters(scenario), std::move(options));
  try {
    while (subject.next()) {
    }
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

TEST(Trouble, ARankThatThrowsBetweenStepsEndsTheRunWithItsMessage) {
  FsdpSubject::Options options;
  options.before_step = [](int rank, int step) {
    if (rank == 2 && step == 1) {
      throw std::runtime_error("planted between steps");
    }
  };
  const auto message = message_of(transformer(4), options);
  EXPECT_NE(message.find("planted between steps"), std::string::npos) << message;
  EXPECT_NE(message.find("rank 2"), std::string::npos) << message;
}

TEST(Trouble, ARankThatThrowsInForwardEndsTheRunWithItsMessage) {
  FsdpSubject::Options options;
  options.in_forward = [](int rank, int step) {
    if (rank == 1 && step == 1) {
      throw std::runtime_error("planted in forward");
    }
  };
  const auto message = message_of(transformer(4), options);
  EXPECT_NE(message.find("planted in forward"), std::string::npos) << message;
  EXPECT_NE(message.find("rank 1"), std::string::npos) << message;
}

TEST(Trouble, ARankThatThrowsInACollectiveOfBackwardEndsTheRunWithItsMessage) {
  class Thrower : public StepObserver {
   public:
    void observe(const fsdp::Observation& seen) override {
      if (seen.rank == 3 && step() == 1 && seen.point == fsdp::Point::unreduced_gradient) {
        throw std::runtime_error("planted in backward");
      }
    }
  };
  Fault fault;
  fault.name = "thrower";
  fault.make_observer = [](const Scenario&, int) { return std::make_unique<Thrower>(); };
  FsdpSubject::Options options;
  options.fault = &fault;
  const auto message = message_of(transformer(4), options);
  EXPECT_NE(message.find("planted in backward"), std::string::npos) << message;
  EXPECT_NE(message.find("rank 3"), std::string::npos) << message;
}

TEST(Trouble, ARankThatHangsEndsTheOthersWithinTheTimeout) {
  FsdpSubject::Options options;
  options.timeout = std::chrono::milliseconds(300);
  options.before_step = [](int rank, int step) {
    if (rank == 1 && step == 1) {
      std::this_thread::sleep_for(std::chrono::seconds(2));
    }
  };
  const auto started = std::chrono::steady_clock::now();
  const auto message = message_of(transformer(3), options);
  EXPECT_NE(message.find("rank 1"), std::string::npos) << message;
  EXPECT_LT(std::chrono::steady_clock::now() - started, std::chrono::seconds(20));
}

TEST(Trouble, AReaderThatStopsEarlyEndsTheRanks) {
  auto scenario = transformer(8);
  scenario.steps = 1000;
  FsdpSubject subject(scenario, initial_parameters(scenario));
  EXPECT_TRUE(subject.next().has_value());
}

}  // namespace
}  // namespace shardproof
