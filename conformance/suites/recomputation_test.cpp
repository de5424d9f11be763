// Functions that run again in backward: the same gradients to the bit, whatever the function takes,
// gives, draws and writes; what is kept; and every way in which a second run may be another.

#include <ATen/autocast_mode.h>
#include <fsdp/activation_checkpoint.h>
#include <fsdp/observer.h>
#include <fsdp/process_group.h>
#include <fsdp/random.h>
#include <fsdp/recomputation.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

namespace fsdp {
namespace {

using testing::HasSubstr;
using torch::Tensor;

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         std::memcmp(a.contiguous().const_data_ptr(), b.contiguous().const_data_ptr(),
                     a.nbytes()) == 0;
}

Tensor random_tensor(at::IntArrayRef sizes, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return torch::randn(sizes, generator);
}

Tensor leaf(at::IntArrayRef sizes, std::uint64_t seed) {
  return random_tensor(sizes, seed).requires_grad_();
}

std::string message_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const RecomputationError& error) {
    return error.what();
  }
  return "no RecomputationError";
}

RecomputationOptions checking_values() {
  RecomputationOptions options;
  options.check = RecomputationCheck::values;
  return options;
}

using Pair = std::tuple<Tensor, Tensor>;

/// Two layers, and how often they ran.
struct Net {
  explicit Net(at::ScalarType dtype = at::kFloat)
      : first(random_tensor({6, 5}, 1).to(dtype).requires_grad_()),
        second(random_tensor({3, 6}, 2).to(dtype).requires_grad_()) {}

  Tensor operator()(const Tensor& x) {
    ++runs;
    return torch::linear(torch::tanh(torch::linear(torch::gelu(x), first)), second);
  }
  std::vector<Tensor> gradients() const { return {first.grad(), second.grad()}; }

  Tensor first;
  Tensor second;
  int runs = 0;
};

/// Gradients of the net's weights and of its input, stored or recomputed.
std::vector<Tensor> gradients_of(at::ScalarType dtype,
                                 const std::function<Tensor(Net&, const Tensor&)>& run,
                                 int* runs = nullptr) {
  Net net(dtype);
  const auto x = random_tensor({4, 5}, 3).to(dtype).requires_grad_();
  run(net, x).square().sum().backward();
  if (runs != nullptr) {
    *runs = net.runs;
  }
  return {net.first.grad(), net.second.grad(), x.grad()};
}

void expect_same(const std::vector<Tensor>& got, const std::vector<Tensor>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_TRUE(want[i].defined() && got[i].defined()) << i;
    EXPECT_TRUE(same_bits(got[i], want[i])) << "number " << i;
    EXPECT_GT(want[i].abs().sum().item<double>(), 0) << "number " << i << " shows nothing";
  }
}

class EachDtype : public testing::TestWithParam<at::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(Recomputation, EachDtype,
                         testing::Values(at::kFloat, at::kDouble, at::kBFloat16, at::kHalf),
                         [](const auto& info) { return c10::toString(info.param); });

TEST_P(EachDtype, GradientsAreThoseOfStoringAndTheFunctionRunsTwice) {
  const auto want = gradients_of(GetParam(), [](Net& net, const Tensor& x) { return net(x); });
  int runs = 0;
  const auto got = gradients_of(
      GetParam(),
      [](Net& net, const Tensor& x) {
        return checkpoint(
            checking_values(), [&net](const Tensor& y) { return net(y); }, x);
      },
      &runs);
  expect_same(got, want);
  EXPECT_EQ(runs, 2);
}

TEST(Recomputation, WithoutGradModeTheFunctionRunsOnceAndKeepsNothing) {
  Net net;
  const torch::NoGradGuard no_grad;
  const auto y = checkpoint([&net](const Tensor& x) { return net(x); }, random_tensor({4, 5}, 3));
  EXPECT_FALSE(y.requires_grad());
  EXPECT_EQ(net.runs, 1);
}

TEST(Recomputation, AResultThatNobodyRunsBackwardOverIsNotRecomputed) {
  Net net;
  checkpoint([&net](const Tensor& x) { return net(x); }, leaf({4, 5}, 3));
  EXPECT_EQ(net.runs, 1);
}

TEST(Recomputation, WhatLiesBetweenInputAndOutputIsNotKept) {
  for (const bool recomputes : {false, true}) {
    c10::weak_intrusive_ptr<c10::StorageImpl> between(c10::intrusive_ptr<c10::StorageImpl>{});
    const auto weight = leaf({5, 5}, 1);
    const auto function = [&between, &weight](const Tensor& x) {
      const auto hidden = torch::tanh(torch::linear(x, weight));
      between = hidden.storage().getWeakStorageImpl();
      return torch::linear(hidden, weight);
    };
    const auto x = leaf({4, 5}, 3);
    const auto y = recomputes ? checkpoint(function, x) : function(x);
    EXPECT_EQ(between.expired(), recomputes);
    y.sum().backward();
    EXPECT_TRUE(between.expired());
  }
}

TEST(Recomputation, RecomputedTensorsLiveNoLongerThanTheBackwardPass) {
  c10::weak_intrusive_ptr<c10::StorageImpl> between(c10::intrusive_ptr<c10::StorageImpl>{});
  const auto weight = leaf({5, 5}, 1);
  const auto x = leaf({4, 5}, 3);
  const auto y = checkpoint(
      [&](const Tensor& z) {
        const auto hidden = torch::tanh(torch::linear(z, weight));
        between = hidden.storage().getWeakStorageImpl();
        return torch::linear(torch::sin(hidden), weight);
      },
      x);
  // Only a part of the graph runs: the gradient of the weight asks for some tensors only.
  torch::autograd::grad({y.sum()}, {weight}, {}, /*retain_graph=*/true);
  EXPECT_TRUE(between.expired());
}

TEST(Recomputation, StopsAtTheLastTensorThatIsNeededOrRunsToTheEnd) {
  for (const bool early_stop : {true, false}) {
    int after = 0;
    RecomputationOptions options;
    options.early_stop = early_stop;
    const auto x = leaf({4, 5}, 3);
    checkpoint(
        options,
        [&after](const Tensor& y) {
          auto z = torch::sigmoid(y);
          z = z.mul(z);
          ++after;  // nothing below needs a value
          return z + 1;
        },
        x)
        .sum()
        .backward();
    EXPECT_EQ(after, early_stop ? 1 : 2);
    const auto s = torch::sigmoid(x.detach());
    EXPECT_TRUE(torch::allclose(x.grad(), 2 * s * s * (1 - s)));
  }
}

TEST(Recomputation, TakesAndGivesSeveralThingsOfWhichSomeAreNoTensors) {
  using Extras = std::vector<std::optional<Tensor>>;
  const auto function = [](const Tensor& x, double factor, const std::string& word,
                           const Extras& extras, const Tensor& undefined, const Tensor& index) {
    EXPECT_EQ(word, "word");
    EXPECT_FALSE(undefined.defined());
    EXPECT_FALSE(extras[1].has_value());
    auto y = torch::tanh(x * factor) * *extras[0];
    return std::tuple<Tensor, std::vector<Tensor>, int>(y.index_select(0, index),
                                                        {torch::sin(y), torch::ones({2})}, 7);
  };
  std::vector<std::vector<Tensor>> gradients;
  for (const bool recomputes : {false, true}) {
    const auto x = leaf({4, 5}, 3);
    const auto extra = leaf({5}, 4);
    const auto plain = random_tensor({5}, 9);
    const Extras extras = {extra, std::nullopt, plain};
    const auto index = torch::tensor({2, 0, 2}, torch::kInt64);
    auto [selected, others, number] = recomputes
                                          ? checkpoint(checking_values(), function, x, 0.5,
                                                       std::string("word"), extras, Tensor(), index)
                                          : function(x, 0.5, "word", extras, Tensor(), index);
    EXPECT_EQ(number, 7);
    EXPECT_FALSE(others[1].requires_grad());
    (selected.square().sum() + others[0].sum()).backward();
    gradients.push_back({x.grad(), extra.grad()});
    EXPECT_FALSE(plain.grad().defined());
  }
  expect_same(gradients[1], gradients[0]);
}

TEST(Recomputation, AnInputThatNeedsNoGradientStillLeavesTheWeightsTheirs) {
  std::vector<std::vector<Tensor>> gradients;
  for (const bool recomputes : {false, true}) {
    Net net;
    const auto x = random_tensor({4, 5}, 3);
    const auto y = recomputes ? checkpoint([&net](const Tensor& z) { return net(z); }, x) : net(x);
    y.sum().backward();
    gradients.push_back(net.gradients());
  }
  expect_same(gradients[1], gradients[0]);
}

// ---- Random numbers ---------------------------------------------------------------------------

/// Where a function may draw from.
const std::map<std::string, std::function<Tensor(const Tensor&)>>& droppers() {
  static const std::map<std::string, std::function<Tensor(const Tensor&)>> all = {
      {"rank_generator", [](const Tensor& x) { return Dropout(0.5)(x); }},
      {"default_generator", [](const Tensor& x) { return torch::dropout(x, 0.5, true); }},
      {"both", [](const Tensor& x) { return torch::dropout(Dropout(0.25)(x), 0.25, true); }},
  };
  return all;
}

class EachGenerator : public testing::TestWithParam<std::string> {
 protected:
  /// Gradients of two regions, each with dropout twice; draws between them, as a training loop
  /// does.
  static std::vector<Tensor> gradients(const std::optional<RecomputationOptions>& options) {
    const auto& drop = droppers().at(GetParam());
    seed_rank_generator(5, 0);
    torch::manual_seed(6);
    Net net;
    const auto x = leaf({4, 5}, 3);
    const std::function<Tensor(const Tensor&)> region = [&](const Tensor& y) {
      return drop(torch::linear(torch::tanh(drop(torch::linear(y, net.first))), net.first.t()));
    };
    auto y = x;
    for (int i = 0; i < 2; ++i) {
      y = options ? checkpoint(*options, region, y) : region(y);
      y = y + 0.01 * torch::randn({4, 5}) + 0.01 * torch::randn({4, 5}, rank_generator());
    }
    const auto loss = y.square().sum();
    torch::randn({3});
    torch::randn({3}, rank_generator());
    loss.backward();
    // What is drawn after backward must not depend on it either.
    return {x.grad(), net.first.grad(), torch::randn({3}), torch::randn({3}, rank_generator())};
  }
};
INSTANTIATE_TEST_SUITE_P(Recomputation, EachGenerator, testing::ValuesIn([] {
                           std::vector<std::string> names;
                           for (const auto& [name, drop] : droppers()) {
                             names.push_back(name);
                           }
                           return names;
                         }()),
                         [](const auto& info) { return info.param; });

TEST_P(EachGenerator, DropsTheSameElementsAgainAndDrawsGoOnAsIfNothingHadBeen) {
  expect_same(gradients(checking_values()), gradients({}));
}

TEST_P(EachGenerator, WithoutItsStateTheMaskIsAnotherAndTheCheckSaysSo) {
  auto options = checking_values();
  options.preserve_rng_state = false;
  options.name = "the region";
  const auto message = message_of([&] { gradients(options); });
  EXPECT_THAT(message, HasSubstr("checkpointed region 'the region'"));
  EXPECT_THAT(message, HasSubstr("is another when recomputed: element "));
  EXPECT_THAT(message, HasSubstr("aten::"));
}

// ---- Autocast ---------------------------------------------------------------------------------

TEST(Recomputation, RunsAgainUnderTheAutocastOfItsFirstRun) {
  struct Autocast {
    explicit Autocast(bool on) : before(at::autocast::is_autocast_enabled(at::kCPU)) {
      at::autocast::set_autocast_enabled(at::kCPU, on);
    }
    ~Autocast() {
      at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, before);
    }
    bool before;
  };
  for (const bool in_forward : {true, false}) {
    std::vector<std::vector<Tensor>> gradients;
    for (const bool recomputes : {false, true}) {
      Net net;
      const auto x = leaf({4, 5}, 3);
      Tensor y;
      {
        const Autocast autocast(in_forward);
        y = recomputes ? checkpoint(
                             checking_values(), [&net](const Tensor& z) { return net(z); }, x)
                       : net(x);
      }
      EXPECT_EQ(y.scalar_type(), in_forward ? at::kBFloat16 : at::kFloat);
      const auto loss = y.to(at::kFloat).square().sum();
      {
        const Autocast autocast(!in_forward);
        loss.backward();
        EXPECT_EQ(at::autocast::is_autocast_enabled(at::kCPU), !in_forward);
      }
      gradients.push_back(net.gradients());
    }
    expect_same(gradients[1], gradients[0]);
  }
}

// ---- Nesting, and graphs that are used more than once ------------------------------------------

TEST(Recomputation, RegionsWithinRegionsRunAsOftenAsTheirDepthSays) {
  std::vector<std::vector<Tensor>> gradients;
  for (const int depth : {0, 1, 2, 3}) {
    Net net;
    std::vector<int> runs(4, 0);
    std::function<Tensor(const Tensor&, int)> region = [&](const Tensor& x, int level) -> Tensor {
      ++runs[level];
      if (level == depth) {
        return torch::tanh(net(torch::sin(x)));
      }
      const auto inner = [&region, level](const Tensor& y) { return region(y, level + 1); };
      return torch::cos(checkpoint(checking_values(), inner, torch::gelu(x)));
    };
    const auto x = leaf({4, 5}, 3);
    // The functions of all levels but the innermost do the same in every run.
    auto y = region(x, 0);
    y.sum().backward();
    for (int level = 1; level <= depth; ++level) {
      // Once forward, once for each of the regions around it, once for its own.
      EXPECT_EQ(runs[level], level + 1) << "level " << level << " of " << depth;
    }
    gradients.push_back({x.grad(), net.first.grad()});
  }
  // Against the same arithmetic without any region.
  for (const int depth : {1, 2, 3}) {
    Net net;
    const auto x = leaf({4, 5}, 3);
    auto z = x.view_as(x);
    for (int level = 0; level < depth; ++level) {
      z = torch::gelu(z);
    }
    z = torch::tanh(net(torch::sin(z)));
    for (int level = 0; level < depth; ++level) {
      z = torch::cos(z);
    }
    z.sum().backward();
    expect_same(gradients[static_cast<std::size_t>(depth)], {x.grad(), net.first.grad()});
  }
}

TEST(Recomputation, AnInnerRegionsInputIsNotKeptByTheOuter) {
  c10::weak_intrusive_ptr<c10::StorageImpl> between(c10::intrusive_ptr<c10::StorageImpl>{});
  const auto x = leaf({4, 5}, 3);
  const auto y = checkpoint(
      [&](const Tensor& z) {
        const auto hidden = torch::sin(z);
        between = hidden.storage().getWeakStorageImpl();
        return checkpoint([](const Tensor& h) { return torch::tanh(torch::exp(h)); }, hidden);
      },
      x);
  EXPECT_TRUE(between.expired());
  y.sum().backward();
  const auto e = torch::exp(torch::sin(x.detach()));
  EXPECT_TRUE(
      torch::allclose(x.grad(), (1 - torch::tanh(e).square()) * e * torch::cos(x.detach())));
}

TEST(Recomputation, BackwardMayRunTwiceAndRecomputesEachTime) {
  Net net;
  const auto x = leaf({4, 5}, 3);
  const auto loss = checkpoint(
                        checking_values(), [&net](const Tensor& z) { return net(z); }, x)
                        .square()
                        .sum();
  loss.backward({}, /*retain_graph=*/true);
  const auto once = net.first.grad().clone();
  loss.backward();
  EXPECT_TRUE(same_bits(net.first.grad(), once + once));
  EXPECT_EQ(net.runs, 3);
}

TEST(Recomputation, ABackwardOfABackwardRecomputesToo) {
  std::vector<std::vector<Tensor>> gradients;
  for (const bool recomputes : {false, true}) {
    Net net;
    const auto x = leaf({4, 5}, 3);
    const auto y = recomputes ? checkpoint([&net](const Tensor& z) { return net(z); }, x) : net(x);
    const auto slope = torch::autograd::grad({y.square().sum()}, {x}, {}, /*retain_graph=*/true,
                                             /*create_graph=*/true)[0];
    slope.square().sum().backward();
    gradients.push_back({x.grad(), net.first.grad(), net.second.grad()});
  }
  expect_same(gradients[1], gradients[0]);
}

TEST(Recomputation, AFunctionMayRunBackwardItself) {
  std::vector<std::vector<Tensor>> gradients;
  for (const bool recomputes : {false, true}) {
    Net net;
    const auto x = leaf({4, 5}, 3);
    const auto function = [&net](const Tensor& z) {
      const auto inner = net(z);
      // A gradient penalty: the slope is part of the function.
      const auto slope = torch::autograd::grad({inner.square().sum()}, {z}, {},
                                               /*retain_graph=*/true, /*create_graph=*/true)[0];
      return inner.sum() + slope.square().sum();
    };
    (recomputes ? checkpoint(checking_values(), function, x) : function(x)).backward();
    gradients.push_back({x.grad(), net.first.grad(), net.second.grad()});
  }
  expect_same(gradients[1], gradients[0]);
}

TEST(Recomputation, GraphHooksRunOnce) {
  int calls = 0;
  const auto x = leaf({4, 5}, 3);
  const auto y = checkpoint(
      [](const Tensor& z) {
        auto hidden = torch::sin(z);
        return torch::exp(hidden);
      },
      x);
  y.register_hook([&calls](const Tensor&) { ++calls; });
  x.register_hook([&calls](const Tensor&) { ++calls; });
  y.sum().backward();
  EXPECT_EQ(calls, 2);
}

// ---- Second runs that are not like the first ---------------------------------------------------

TEST(Recomputation, AnInputThatWasChangedInPlaceIsNamed) {
  const auto x = leaf({4, 5}, 3);
  const auto input = x * 1;
  const auto y = checkpoint(
      [](const Tensor&, const Tensor& z) { return torch::exp(torch::sin(z)); }, x, input);
  {
    const torch::NoGradGuard no_grad;
    input.add_(1);
  }
  const auto message = message_of([&] { y.sum().backward(); });
  EXPECT_THAT(message, HasSubstr("input 1 (Float of shape [4, 5] on cpu) was changed in place"));
}

TEST(Recomputation, StopsAtTheLastTensorThatSomebodyMayStillNeed) {
  int after = 0;
  auto results = checkpoint(
      [&after](const Tensor& z) {
        const auto a = torch::tanh(z);
        ++after;
        return Pair(a, torch::exp(torch::sin(z)));
      },
      leaf({4, 5}, 3));
  std::get<1>(results).reset();  // and with it the graph of what came after `a`
  std::get<0>(results).sum().backward();
  EXPECT_EQ(after, 1);
}

TEST(Recomputation, OnAnotherThreadDrawsFromTheGeneratorOfTheFirstRun) {
  std::vector<std::vector<Tensor>> gradients;
  for (const bool elsewhere : {false, true}) {
    seed_rank_generator(5, 0);
    const auto x = leaf({4, 5}, 3);
    const auto y = checkpoint(
        checking_values(), [](const Tensor& z) { return torch::exp(Dropout(0.5)(torch::sin(z))); },
        x);
    const auto backward = [&] { y.sum().backward(); };
    if (elsewhere) {
      std::thread(backward).join();
    } else {
      backward();
    }
    gradients.push_back({x.grad()});
  }
  expect_same(gradients[1], gradients[0]);
}

TEST(Recomputation, LeavesTheGeneratorThatRanksShareAlone) {
  std::vector<std::string> messages(2);
  run_ranks(2, [&](RankContext& context) {
    const auto y = checkpoint(
        checking_values(),
        [](const Tensor& z) { return torch::exp(torch::dropout(torch::sin(z), 0.5, true)); },
        leaf({40, 5}, 3));
    messages[static_cast<std::size_t>(context.rank)] = message_of([&] { y.sum().backward(); });
  });
  for (const auto& message : messages) {
    EXPECT_THAT(message, HasSubstr("is another when recomputed"));
  }
}

TEST(Recomputation, AWeightThatChangedBetweenTheRunsIsSeen) {
  Net net;
  const auto y = checkpoint(
      checking_values(), [&net](const Tensor& x) { return net(x); }, leaf({4, 5}, 3));
  {
    const torch::NoGradGuard no_grad;
    net.second.add_(1);
  }
  EXPECT_THAT(message_of([&] { y.sum().backward(); }), HasSubstr("is another when recomputed"));
}

TEST(Recomputation, WhatBackwardDoesNotAskForIsForgottenAtItsEnd) {
  c10::weak_intrusive_ptr<c10::StorageImpl> other(c10::intrusive_ptr<c10::StorageImpl>{});
  const auto [first, second] = checkpoint(
      [&other](const Tensor& z) {
        const auto exponential = torch::exp(torch::cos(z));
        other = exponential.storage().getWeakStorageImpl();
        return Pair(torch::tanh(torch::sin(z)), exponential);
      },
      leaf({4, 5}, 3));
  first.sum().backward();
  EXPECT_TRUE(other.expired());
}

TEST(Recomputation, ARunToTheEndThatSavesFewerTensorsIsAnErrorAlsoIfNobodyNeedsThem) {
  RecomputationOptions options;
  options.early_stop = false;
  bool again = false;
  const auto [first, second] = checkpoint(
      options,
      [&again](const Tensor& z) {
        const auto a = torch::tanh(z);
        return Pair(a, std::exchange(again, true) ? z : torch::exp(z));
      },
      leaf({4, 5}, 3));
  EXPECT_THAT(message_of([&, &a = first] { a.sum().backward(); }),
              HasSubstr("its first run saved 2 tensors, and its second 1; wanted: "));
}

/// Passes its input on, and calls a function when backward comes by.
struct Probe : torch::autograd::Function<Probe> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        const std::function<void()>* on_backward) {
    context->saved_data["on_backward"] = reinterpret_cast<std::int64_t>(on_backward);
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    (*reinterpret_cast<const std::function<void()>*>(context->saved_data["on_backward"].toInt()))();
    return {gradients[0], Tensor()};
  }
};

TEST(Recomputation, ARecomputedTensorGoesAsSoonAsItIsUsed) {
  c10::weak_intrusive_ptr<c10::StorageImpl> later(c10::intrusive_ptr<c10::StorageImpl>{});
  int calls = 0;
  const std::function<void()> look = [&] {
    ++calls;
    EXPECT_TRUE(later.expired());
  };
  const auto y = checkpoint(
      [&](const Tensor& z) {
        const auto exponential = torch::exp(Probe::apply(torch::sin(z), &look));
        later = exponential.storage().getWeakStorageImpl();
        return exponential.neg();
      },
      leaf({4, 5}, 3));
  // The graph stays, so that it is not the end of a node that frees what it saved.
  y.sum().backward({}, /*retain_graph=*/true);
  EXPECT_EQ(calls, 1);
}

TEST(Recomputation, ATensorThatIsOverwrittenAfterItWasSavedIsAnErrorAsWithoutARegion) {
  const auto function = [](const Tensor& z) {
    auto hidden = torch::exp(z);  // its gradient needs its result
    hidden.add_(1);
    return torch::sin(hidden).sum();
  };
  const auto x = leaf({4, 5}, 3);
  EXPECT_THROW(function(x).backward(), c10::Error);
  const auto y = checkpoint(function, x);
  EXPECT_THAT(message_of([&] { y.backward(); }),
              HasSubstr("saved tensor 0 (Float of shape [4, 5] on cpu) was changed in place"));
}

struct Doubled : torch::autograd::Function<Doubled> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x) {
    const auto result = torch::exp(x);
    context->save_for_backward({x, result});
    return result * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    EXPECT_TRUE(saved[0].exp().equal(saved[1]));
    return {gradients[0] * saved[1] * 2};
  }
};

TEST(Recomputation, WhatAFunctionOfOnesOwnSavesIsRecomputedToo) {
  std::vector<std::vector<Tensor>> gradients;
  for (const bool recomputes : {false, true}) {
    const auto x = leaf({4, 5}, 3);
    const auto function = [](const Tensor& z) { return Doubled::apply(torch::sin(z)); };
    (recomputes ? checkpoint(checking_values(), function, x) : function(x)).sum().backward();
    gradients.push_back({x.grad()});
  }
  expect_same(gradients[1], gradients[0]);
}

struct Change {
  std::string name;
  std::function<Tensor(const Tensor& x, bool again)> function;
  std::string message;
};

class EachChange : public testing::TestWithParam<Change> {};
INSTANTIATE_TEST_SUITE_P(
    Recomputation, EachChange,
    testing::Values(
        Change{"shape",
               [](const Tensor& x, bool again) {
                 return torch::sin(again ? x.narrow(0, 0, 2) : x).exp().sum();
               },
               "saved tensor 0 (aten::sin) was Float of shape [4, 5] on cpu and is Float of shape "
               "[2, 5] on cpu when recomputed"},
        Change{"dtype",
               [](const Tensor& x, bool again) {
                 return torch::sin(x.to(again ? at::kBFloat16 : at::kFloat)).exp().sum();
               },
               "was Float of shape [4, 5] on cpu and is BFloat16 of shape [4, 5] on cpu"},
        Change{
            "value",
            [](const Tensor& x, bool again) { return torch::sin(x + (again ? 1 : 0)).exp().sum(); },
            "saved tensor 0 (aten::sin) is another when recomputed: element 0 of [4, 5] was "},
        Change{"fewer",
               [](const Tensor& x, bool again) {
                 const auto y = torch::sin(x);
                 return again ? y.sum() : y.exp().sum();
               },
               "saved fewer tensors than its first"},
        Change{"more",
               [](const Tensor& x, bool again) {
                 const auto y = torch::sin(x);
                 return again ? y.exp().sum() : y.sum();
               },
               "its first run saved 1 tensors, and its second saves more: Float of shape [4, 5]"}),
    [](const auto& info) { return info.param.name; });

TEST_P(EachChange, IsAnErrorThatSaysWhichTensorAndWhatItWas) {
  auto options = checking_values();
  options.early_stop = GetParam().name != "more";
  bool again = false;
  const auto x = leaf({4, 5}, 3);
  const auto y = checkpoint(
      options,
      [&again](const Tensor& z) { return GetParam().function(z, std::exchange(again, true)); }, x);
  EXPECT_THAT(message_of([&] { y.backward(); }), HasSubstr(GetParam().message));
  EXPECT_FALSE(is_recomputing());
}

TEST(Recomputation, ByDefaultAnotherShapeIsAnErrorAndAnotherValueIsNot) {
  const auto run = [](const Change& change, RecomputationCheck check) {
    RecomputationOptions options;
    options.check = check;
    bool again = false;
    const auto x = leaf({4, 5}, 3);
    checkpoint(
        options,
        [&again, &change](const Tensor& z) {
          return change.function(z, std::exchange(again, true));
        },
        x)
        .backward();
  };
  const Change value{
      "", [](const Tensor& x, bool again) { return torch::sin(x + (again ? 1 : 0)).sum(); }, ""};
  const Change dtype{"",
                     [](const Tensor& x, bool again) {
                       return torch::sin(x.to(again ? at::kDouble : at::kFloat)).sum();
                     },
                     ""};
  EXPECT_NO_THROW(run(value, RecomputationOptions().check));
  EXPECT_THROW(run(dtype, RecomputationOptions().check), RecomputationError);
  EXPECT_NO_THROW(run(dtype, RecomputationCheck::none));
}

TEST(Recomputation, AFunctionThatThrowsTheSecondTimeLeavesEverythingAsItWas) {
  bool again = false;
  bool throws = true;
  Net net;
  c10::weak_intrusive_ptr<c10::StorageImpl> half_way(c10::intrusive_ptr<c10::StorageImpl>{});
  const auto x = leaf({4, 5}, 3);
  const auto y = checkpoint(
      [&](const Tensor& z) {
        auto hidden = Dropout(0.5)(torch::dropout(torch::tanh(net(z)), 0.5, true));
        half_way = hidden.storage().getWeakStorageImpl();
        hidden = torch::sin(hidden);
        if (std::exchange(again, true) && throws) {
          throw std::runtime_error("planted in the second run");
        }
        return torch::exp(hidden);
      },
      x);
  const auto ours = rank_generator().get_state();
  const auto libtorchs = at::globalContext().defaultGenerator(at::kCPU).get_state();
  std::string message;
  try {
    y.sum().backward({}, /*retain_graph=*/true);
  } catch (const std::runtime_error& error) {
    message = error.what();
  }
  EXPECT_THAT(message, HasSubstr("planted in the second run"));
  EXPECT_FALSE(is_recomputing());
  EXPECT_TRUE(half_way.expired());
  EXPECT_FALSE(net.first.grad().defined());
  EXPECT_TRUE(same_bits(rank_generator().get_state(), ours));
  EXPECT_TRUE(same_bits(at::globalContext().defaultGenerator(at::kCPU).get_state(), libtorchs));
  // The graph is as good as before.
  throws = false;
  y.sum().backward();
  EXPECT_TRUE(net.first.grad().defined());
}

TEST(Recomputation, AFunctionThatThrowsTheFirstTimeLeavesNoContextBehind) {
  EXPECT_THROW(checkpoint([](const Tensor&) -> Tensor { throw std::runtime_error("planted"); },
                          leaf({2}, 1)),
               std::runtime_error);
  // What is saved now belongs to no region.
  const auto x = leaf({4}, 3);
  torch::exp(x).sum().backward();
  EXPECT_TRUE(same_bits(x.grad(), torch::exp(x.detach())));
}

// ---- Looking -----------------------------------------------------------------------------------

TEST(Recomputation, EverySavedTensorIsShownBesideItsRecomputation) {
  std::vector<std::string> seen;
  RecomputationOptions options;
  options.name = "the region";
  options.on_recomputed = [&seen](const RecomputedActivation& activation) {
    EXPECT_EQ(activation.region, "the region");
    EXPECT_TRUE(same_bits(activation.stored, activation.recomputed));
    seen.push_back(std::to_string(activation.index) + " " + activation.operation);
  };
  const auto weight = leaf({6, 5}, 1);
  checkpoint(
      options,
      [&weight](const Tensor& x) {
        return torch::tanh(torch::mm(torch::gelu(x), weight.t())).sum();
      },
      leaf({4, 5}, 3))
      .backward();
  EXPECT_THAT(seen,
              testing::ElementsAre("0 aten::gelu", "1 aten::mm", "2 aten::mm", "3 aten::tanh"));
}

TEST(Recomputation, AReportSaysWhetherAFunctionIsFitForIt) {
  Net net;
  const auto good = check_recomputation(
      {}, [&net](const Tensor& x) { return net(x); }, leaf({4, 5}, 3));
  EXPECT_TRUE(good.is_equal()) << good.error;
  EXPECT_GE(good.tensors, 6);
  // gelu's input and tanh's output, at the least.
  EXPECT_GE(good.bytes, (4 * 5 + 4 * 6) * 4);

  // A counter that the function keeps to itself.
  int calls = 0;
  const auto bad = check_recomputation(
      {},
      [&calls](const Tensor& x) {
        return torch::exp(torch::sin(x) * static_cast<double>(++calls));
      },
      leaf({4, 5}, 3));
  EXPECT_FALSE(bad.is_equal());
  ASSERT_FALSE(bad.differences.empty());
  EXPECT_EQ(bad.differences.front().operation, "aten::exp");
  EXPECT_EQ(bad.differences.front().elements, 20);
  EXPECT_THAT(bad.differences.front().what, HasSubstr("element 0 of [4, 5] was "));

  const auto none = check_recomputation(
      {}, [](const Tensor& x) { return x.detach() + 1; }, leaf({2}, 1));
  EXPECT_FALSE(none.is_equal());
  EXPECT_THAT(none.error, HasSubstr("nothing is recomputed"));
}

TEST(Recomputation, AnObserverMayPutAnotherTensorInPlace) {
  // What planted faults rely on: the input, the generator's state, and what backward is given.
  struct Swap : Observer {
    explicit Swap(Point where) : point(where) {}
    void observe(const Observation& seen) override {
      if (seen.point == point) {
        EXPECT_EQ(seen.unit, "the region");
        ++times;
        seen.tensor = point == Point::recomputation_generator
                          ? at::make_generator<at::CPUGeneratorImpl>(99).get_state()
                          : seen.tensor + 1;
      }
    }
    Point point;
    int times = 0;
  };
  for (const auto point :
       {Point::recomputation_input, Point::recomputation_generator, Point::recomputed_activation}) {
    auto options = checking_values();
    options.name = "the region";
    const auto x = leaf({4, 5}, 3);
    const auto y = checkpoint(
        options, [](const Tensor& z) { return torch::exp(Dropout(0.5)(torch::sin(z))).sum(); }, x);
    Swap swap(point);
    const ObserverScope scope(&swap);
    EXPECT_THAT(message_of([&] { y.backward(); }), HasSubstr("is another when recomputed"))
        << to_string(point);
    EXPECT_GT(swap.times, 0) << to_string(point);
    EXPECT_FALSE(same_bits(x.detach(), x.detach() + 1));
  }
}

// ---- Several layers ----------------------------------------------------------------------------

TEST(Recomputation, SegmentsGiveTheGradientsOfAPlainStackAndRunAllButTheLastTwice) {
  constexpr int kLayers = 7;
  std::vector<Tensor> weights;
  for (int i = 0; i < kLayers; ++i) {
    weights.push_back(leaf({5, 5}, 20 + static_cast<std::uint64_t>(i)));
  }
  const auto run = [&](std::size_t segments, std::vector<int>& runs) {
    runs.assign(kLayers, 0);
    std::vector<LayerFunction> layers;
    for (int i = 0; i < kLayers; ++i) {
      weights[i].mutable_grad() = Tensor();
      layers.emplace_back([&, i](const Tensor& x) {
        ++runs[i];
        return torch::tanh(torch::linear(x, weights[i]));
      });
    }
    const auto x = leaf({4, 5}, 3);
    auto y = x;
    if (segments == 0) {
      for (const auto& layer : layers) {
        y = layer(y);
      }
    } else {
      y = checkpoint_sequential(layers, segments, x, checking_values());
    }
    y.square().sum().backward();
    std::vector<Tensor> gradients = {x.grad()};
    for (const auto& weight : weights) {
      gradients.push_back(weight.grad());
    }
    return gradients;
  };
  std::vector<int> runs;
  const auto want = run(0, runs);
  for (const std::size_t segments : {1, 2, 3, 7}) {
    expect_same(run(segments, runs), want);
    int twice = 0;
    for (const int count : runs) {
      twice += count == 2 ? 1 : 0;
    }
    // Segments have 7/s layers, rounded down or up, the larger ones last.
    const std::map<std::size_t, int> expected = {{1, 0}, {2, 3}, {3, 4}, {7, 6}};
    EXPECT_EQ(twice, expected.at(segments)) << segments << " segments";
  }
  EXPECT_THROW(checkpoint_sequential({}, 1, leaf({1}, 1)), UsageError);
  EXPECT_THROW(checkpoint_sequential({[](const Tensor& x) { return x; }}, 0, leaf({1}, 1)),
               UsageError);
  EXPECT_THROW(checkpoint_sequential({[](const Tensor& x) { return x; }}, 2, leaf({1}, 1)),
               UsageError);
}

// ---- Modules -----------------------------------------------------------------------------------

struct BlockImpl : Module<BlockImpl> {
  explicit BlockImpl(int width = 5, double dropout = 0)
      : linear(register_module("linear", torch::nn::Linear(width, width))),
        drop(register_module("drop", Dropout(dropout))) {
    const torch::NoGradGuard no_grad;
    linear->weight.copy_(random_tensor({width, width}, 4));
    linear->bias.copy_(random_tensor({width}, 5));
  }
  Tensor forward(const Tensor& x) {
    ++runs;
    return x + drop(torch::gelu(linear(x)));
  }
  torch::nn::Linear linear;
  Dropout drop;
  int runs = 0;
};
FSDP_MODULE(Block);

TEST(CheckpointWrapper, MakesAModulesForwardARegion) {
  std::vector<std::vector<Tensor>> gradients;
  for (const bool recomputes : {false, true}) {
    seed_rank_generator(5, 0);
    Block block(5, 0.5);
    if (recomputes) {
      checkpoint_wrapper(block, checking_values());
    }
    const auto x = leaf({4, 5}, 3);
    block(x).square().sum().backward();
    EXPECT_EQ(block->runs, recomputes ? 2 : 1);
    gradients.push_back({x.grad(), block->linear->weight.grad(), block->linear->bias.grad()});
  }
  expect_same(gradients[1], gradients[0]);
}

TEST(CheckpointWrapper, WrapsAPlainModuleAndKeepsItsNames) {
  torch::nn::Linear linear(5, 5);
  auto wrapped = checkpoint_wrapper(linear);
  auto plain = leaf({4, 5}, 3);
  wrapped(plain).square().sum().backward();
  EXPECT_EQ(plain_name(wrapped->named_parameters().begin()->key()), "weight");
  const auto x = leaf({4, 5}, 3);
  torch::linear(x, linear->weight.detach(), linear->bias.detach()).square().sum().backward();
  expect_same({plain.grad()}, {x.grad()});
}

TEST(CheckpointWrapper, WorksInASequentialAndInAnyOrderOfItsElements) {
  std::vector<std::vector<Tensor>> gradients;
  std::vector<int> runs;
  for (const bool recomputes : {false, true}) {
    Block first;
    Block second;
    torch::nn::Sequential layers(first, torch::nn::Tanh(), second);
    if (recomputes) {
      checkpoint_wrapper(first);
      checkpoint_wrapper(second);
    }
    const auto x = leaf({4, 5}, 3);
    layers->forward(x).square().sum().backward();
    runs.push_back(first->runs + second->runs);
    gradients.push_back({x.grad(), first->linear->weight.grad(), second->linear->weight.grad()});
  }
  expect_same(gradients[1], gradients[0]);
  EXPECT_THAT(runs, testing::ElementsAre(2, 4));
}

struct NetworkImpl : Module<NetworkImpl> {
  NetworkImpl() {
    for (int i = 0; i < 4; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block()));
    }
    head = register_module("head", wrap(torch::nn::Linear(5, 3)));
  }
  Tensor forward(Tensor x) {
    for (auto& block : blocks) {
      x = block(x);
    }
    return head(x);
  }
  std::vector<Block> blocks;
  Wrapped<torch::nn::LinearImpl> head{nullptr};
};
FSDP_MODULE(Network);

bool is_block(const torch::nn::Module& module) {
  return dynamic_cast<const BlockImpl*>(&module) != nullptr;
}

TEST(ApplyActivationCheckpointing, PicksModulesByTheFunctionAndTellsTheirNames) {
  Network all;
  EXPECT_THAT(apply_activation_checkpointing(all, is_block),
              testing::ElementsAre("block0", "block1", "block2", "block3"));
  Network some;
  EXPECT_THAT(apply_activation_checkpointing(some, every(3, is_block)),
              testing::ElementsAre("block0", "block3"));
  Network whole;
  EXPECT_THAT(apply_activation_checkpointing(
                  whole, [](const auto& module) { return module.name().ends_with("NetworkImpl"); }),
              testing::ElementsAre(""));
  // What is picked may be what a wrapper wraps.
  Network head;
  EXPECT_THAT(apply_activation_checkpointing(head,
                                             [](const auto& module) {
                                               return dynamic_cast<const torch::nn::LinearImpl*>(
                                                          &module) != nullptr &&
                                                      module.parameters()[0].size(0) == 3;
                                             }),
              testing::ElementsAre("head"));
  const auto x = leaf({4, 5}, 3);
  for (auto* network : {&all, &some, &whole, &head}) {
    (*network)(x).sum().backward();
  }
  EXPECT_THAT(std::vector<int>({all->blocks[0]->runs, all->blocks[1]->runs}),
              testing::ElementsAre(2, 2));
  EXPECT_THAT(std::vector<int>({some->blocks[0]->runs, some->blocks[1]->runs}),
              testing::ElementsAre(2, 1));
  EXPECT_THAT(std::vector<int>({whole->blocks[0]->runs, head->blocks[0]->runs}),
              testing::ElementsAre(2, 1));
}

TEST(ApplyActivationCheckpointing, RefusesWhatItCannotDoAndChangesNothingThen) {
  Network network;
  try {
    apply_activation_checkpointing(network, [](const auto& module) {
      return is_block(module) || (dynamic_cast<const torch::nn::LinearImpl*>(&module) != nullptr &&
                                  module.parameters()[0].size(0) == 5);
    });
    FAIL() << "nothing was thrown";
  } catch (const ShardingError& error) {
    EXPECT_THAT(error.what(), HasSubstr("module 'block0.linear' of type torch::nn::LinearImpl has "
                                        "no hooks"));
  }
  EXPECT_EQ(network->blocks[0]->activation_checkpoint(), nullptr);
  EXPECT_THROW(apply_activation_checkpointing(network, [](const auto&) { return false; }),
               UsageError);
  apply_activation_checkpointing(network, is_block);
  EXPECT_THROW(apply_activation_checkpointing(network, is_block), UsageError);
  EXPECT_THROW(checkpoint_wrapper(network->blocks[0]), UsageError);
  EXPECT_THROW(every(0, is_block), UsageError);
}

TEST(ApplyActivationCheckpointing, AModuleWithinAModuleMayBothBeRegions) {
  std::vector<std::vector<Tensor>> gradients;
  for (const bool recomputes : {false, true}) {
    torch::manual_seed(3);
    Network network;
    if (recomputes) {
      apply_activation_checkpointing(
          network,
          [](const auto& module) {
            return is_block(module) || module.name().ends_with("NetworkImpl");
          },
          checking_values());
    }
    const auto x = leaf({4, 5}, 3);
    network(x).square().sum().backward();
    gradients.push_back({x.grad(), network->blocks[0]->linear->weight.grad()});
    // Forward, for the network's second run, and for the block's own; the last block's second run
    // of the network may end it early, but has begun.
    EXPECT_EQ(network->blocks[0]->runs, recomputes ? 3 : 1);
  }
  expect_same(gradients[1], gradients[0]);
}

struct NormedImpl : Module<NormedImpl> {
  NormedImpl()
      : norm(register_module("norm", torch::nn::BatchNorm1d(5))),
        calls(register_buffer("calls", torch::zeros({}, torch::kInt64))) {}
  Tensor forward(const Tensor& x) {
    calls.add_(1);
    // Depends on the buffer, so that the second run must see the value that the first one saw.
    return torch::exp(norm(x) * calls.to(at::kFloat));
  }
  torch::nn::BatchNorm1d norm;
  Tensor calls;
};
FSDP_MODULE(Normed);

TEST(CheckpointWrapper, BuffersThatForwardWritesAreCountedOnceAndReadAsBefore) {
  std::vector<std::vector<Tensor>> results;
  for (const bool recomputes : {false, true}) {
    Normed module;
    if (recomputes) {
      checkpoint_wrapper(module, checking_values());
    }
    const auto x = leaf({4, 5}, 3);
    // Two forwards before backward, so that each needs its own values.
    const auto y = module(x).sum() + module(x * 0.5).sum();
    y.backward();
    EXPECT_EQ(module->calls.item<int>(), 2);
    EXPECT_EQ(module->norm->num_batches_tracked.item<int>(), 2);
    results.push_back({x.grad(), module->norm->running_mean, module->norm->running_var,
                       module->norm->weight.grad()});
  }
  expect_same(results[1], results[0]);
}

TEST(CheckpointWrapper, ABufferThatIsSetBackIsStillWhatAnotherGraphSaved) {
  Normed module;
  checkpoint_wrapper(module);
  const auto y = (module(leaf({4, 5}, 3)) * module->norm->running_var).sum();
  y.backward({}, /*retain_graph=*/true);
  EXPECT_NO_THROW(y.backward());
}

TEST(ApplyActivationCheckpointing, AModuleUnderTwoNamesIsOneRegion) {
  Network network;
  network->register_module("again", network->blocks[1]);
  EXPECT_THAT(apply_activation_checkpointing(network, is_block),
              testing::ElementsAre("block0", "block1", "block2", "block3"));
}

TEST(CheckpointWrapper, HooksOutsideTheRegionRunOnceAndChildrensTwice) {
  struct Count : ForwardHook {
    void pre_forward(torch::nn::Module&, const std::vector<Tensor*>&) override { ++before; }
    void post_forward(torch::nn::Module&, const std::vector<Tensor*>&) override { ++after; }
    void forward_failed(torch::nn::Module&) noexcept override { ++failed; }
    int before = 0;
    int after = 0;
    int failed = 0;
  };
  Network network;
  const auto earlier = std::make_shared<Count>();
  const auto later = std::make_shared<Count>();
  const auto child = std::make_shared<Count>();
  network->add_forward_hook(earlier);
  checkpoint_wrapper(network);
  network->add_forward_hook(later);
  network->blocks[0]->add_forward_hook(child);
  network(leaf({4, 5}, 3)).sum().backward();
  EXPECT_EQ(earlier->before * 10 + earlier->after, 11);
  EXPECT_EQ(later->before * 10 + later->after, 11);
  EXPECT_EQ(child->before * 10 + child->after, 22);
  EXPECT_EQ(earlier->failed + later->failed + child->failed, 0);
  network->remove_forward_hook(earlier.get());
  network(leaf({4, 5}, 3)).sum().backward();
  EXPECT_EQ(earlier->before, 1);
  EXPECT_EQ(later->before * 10 + later->after, 22);
}

TEST(CheckpointWrapper, ACloneOfARegionIsAPlainModule) {
  Block block;
  checkpoint_wrapper(block);
  const BlockImpl copy = *block;
  EXPECT_EQ(copy.activation_checkpoint(), nullptr);
}

}  // namespace
}  // namespace fsdp
