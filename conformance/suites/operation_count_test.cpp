// The count of floating-point operations, held to closed forms that are written out by hand.

#include "conformance/operation_count.h"

#include <fsdp/activation_checkpoint.h>
#include <fsdp/process_group.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>

#include "reference/models.h"

namespace shardproof {
namespace {

using testing::ElementsAre;
using testing::Pair;
using torch::Tensor;

Tensor values(at::IntArrayRef sizes) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  return torch::randn(sizes, generator);
}
Tensor variable(at::IntArrayRef sizes) {
  return values(sizes).requires_grad_();
}

TEST(OperationCount, ALinearLayerIsOneProductForwardAndTwoBackward) {
  torch::nn::Linear linear(5, 7);
  const auto x = variable({3, 5});
  OperationCount count;
  const auto y = linear(x);
  EXPECT_EQ(count.operations(Phase::forward), 2 * 3 * 5 * 7);
  y.sum().backward();
  EXPECT_EQ(count.operations(Phase::forward), 2 * 3 * 5 * 7);
  EXPECT_EQ(count.operations(Phase::backward), 2 * (2 * 3 * 5 * 7));
  EXPECT_EQ(count.operations(Phase::recomputation), 0);
  EXPECT_EQ(count.operations(), 3 * (2 * 3 * 5 * 7));
}

TEST(OperationCount, AnInputThatNeedsNoGradientSavesOneOfTheTwoBackward) {
  torch::nn::Linear linear(5, 7);
  const auto x = values({3, 5});
  OperationCount count;
  linear(x).sum().backward();
  EXPECT_EQ(count.operations(Phase::backward), 2 * 3 * 5 * 7);
}

TEST(OperationCount, AnOperatorAndTheOneThatItCallsCountOnce) {
  const auto a = values({2, 3, 4});
  const auto b = values({2, 4, 5});
  const auto one = 2 * 3 * 4 * 5;
  OperationCount count;
  // Calls addmm_ for each of the two pairs.
  at::addbmm(values({3, 5}), a, b);
  EXPECT_EQ(count.operations(), 2 * one);
  EXPECT_EQ(count.calls(Phase::forward).at("aten::addmm_"), 2)
      << "addbmm is written otherwise now; find another operator that calls a counted one";
  EXPECT_THAT(count.by_operator(), ElementsAre(Pair("aten::addbmm", 2 * one)));
  count.reset();
  // Calls addmv.
  at::mv(a[0], b[0].select(1, 0).contiguous());
  EXPECT_EQ(count.operations(), 2 * 3 * 4);
  count.reset();
  // linear, matmul and einsum are others in the end.
  at::linear(values({2, 3, 4}), values({5, 4}), values({5}));
  EXPECT_EQ(count.operations(), 2 * one);
  EXPECT_EQ(count.calls(Phase::forward).at("aten::linear"), 1);
  count.reset();
  at::matmul(a, b);
  at::einsum("bik,bkj->bij", {a, b});
  EXPECT_EQ(count.operations(), 2 * 2 * one);
}

TEST(OperationCount, EachKindOfProductIsTwoOperationsPerTerm) {
  const auto count_of = [](const std::function<void()>& body) {
    OperationCount count;
    body();
    return count.operations();
  };
  const auto a = values({3, 4});
  const auto b = values({4, 5});
  const auto c = values({3, 5});
  EXPECT_EQ(count_of([&] { a.mm(b); }), 2 * 3 * 4 * 5);
  EXPECT_EQ(count_of([&] { c.addmm(a, b); }), 2 * 3 * 4 * 5);
  EXPECT_EQ(count_of([&] { c.clone().addmm_(a, b); }), 2 * 3 * 4 * 5);
  EXPECT_EQ(count_of([&] {
              auto out = torch::empty({3, 5});
              at::mm_out(out, a, b);
            }),
            2 * 3 * 4 * 5);
  EXPECT_EQ(count_of([&] { values({2, 3, 4}).bmm(values({2, 4, 5})); }), 2 * 2 * 3 * 4 * 5);
  EXPECT_EQ(count_of([&] {
              values({2, 3, 5}).baddbmm(values({2, 3, 4}), values({2, 4, 5}));
            }),
            2 * 2 * 3 * 4 * 5);
  EXPECT_EQ(count_of([&] { values({3}).addmv(a, values({4})); }), 2 * 3 * 4);
  EXPECT_EQ(count_of([&] { values({6}).dot(values({6})); }), 2 * 6);
  EXPECT_EQ(count_of([&] { torch::gelu(a * 3).softmax(1).sum(); }), 0);
}

TEST(OperationCount, AConvolutionIsTwoOperationsPerOutputAndWeightThatItMeets) {
  // [2, 4, 9, 8] with 6 filters of 4 / 2 channels by 3 x 3, stride 2, padding 1: outputs of 5 x 4.
  const auto x = variable({2, 4, 9, 8});
  const auto weight = variable({6, 2, 3, 3});
  const std::int64_t one = 2 * (2 * 6 * 5 * 4) * (2 * 3 * 3);
  OperationCount count;
  const auto y = at::conv2d(x, weight, {}, 2, 1, 1, 2);
  ASSERT_EQ(y.sizes(), (std::vector<std::int64_t>{2, 6, 5, 4}));
  EXPECT_EQ(count.operations(Phase::forward), one);
  y.sum().backward();
  EXPECT_EQ(count.operations(Phase::backward), 2 * one);
  count.reset();
  // Its transpose: [2, 6, 5, 4] to 4 channels; each input meets 2 channels by 3 x 3.
  at::conv_transpose2d(values({2, 6, 5, 4}), weight.detach(), {}, 2, 1, 0, 2);
  EXPECT_EQ(count.operations(), 2 * (2 * 6 * 5 * 4) * (2 * 3 * 3));
}

TEST(OperationCount, AttentionAsOneOperatorIsItsTwoProductsAndFiveBackward) {
  const std::int64_t batch = 2, heads = 3, times = 5, width = 8;
  const std::int64_t one = 2 * batch * heads * times * times * width;
  const auto query = variable({batch, heads, times, width});
  const auto key = variable({batch, heads, times, width});
  const auto value = variable({batch, heads, times, width});
  OperationCount count;
  const auto out = at::scaled_dot_product_attention(query, key, value, {}, 0, /*is_causal=*/true);
  EXPECT_EQ(count.operations(Phase::forward), 2 * one);
  ASSERT_EQ(count.calls(Phase::forward).count("aten::_scaled_dot_product_flash_attention_for_cpu"),
            1u)
      << "attention is composite here";
  out.sum().backward();
  EXPECT_EQ(count.operations(Phase::backward), 5 * one);
}

/// Operations of one block of the reference's transformer, forward: qkv [C, 3C], scores, weighted
/// values, output [C, C], up [C, 4C], down [4C, C].
std::int64_t block_operations(std::int64_t tokens, std::int64_t time, std::int64_t width) {
  const auto qkv = 2 * tokens * width * 3 * width;
  const auto attention = 2 * (2 * tokens * time * width);  // heads times width per head is width
  const auto output = 2 * tokens * width * width;
  const auto mlp = 2 * (2 * tokens * width * 4 * width);
  return qkv + attention + output + mlp;
}

Scenario small_transformer(std::int64_t layers) {
  Scenario scenario;
  scenario.model.layers = layers;
  scenario.model.width = 12;
  scenario.model.heads = 3;
  scenario.model.context = 7;
  return scenario;
}

TEST(OperationCount, AnMlpAndATransformerAreTheSumsOfTheirLayersForwardAndTwiceThatBackward) {
  Scenario mlp;
  mlp.model = {};
  mlp.model.kind = "mlp";
  mlp.model.sizes = {6, 10, 4};
  auto network = make_model(mlp);
  load_parameters(*network, initial_parameters(mlp));
  {
    OperationCount count;
    network->loss(network(values({5, 6})), values({5, 4})).backward();
    EXPECT_EQ(count.operations(Phase::forward), 2 * 5 * 6 * 10 + 2 * 5 * 10 * 4);
    // The first layer's input needs no gradient.
    EXPECT_EQ(count.operations(Phase::backward), 2 * 5 * 6 * 10 + 2 * (2 * 5 * 10 * 4));
  }
  const auto scenario = small_transformer(3);
  auto transformer = make_model(scenario);
  load_parameters(*transformer, initial_parameters(scenario));
  const auto tokens = torch::arange(2 * 7).view({2, 7});
  const auto want = 3 * block_operations(2 * 7, 7, 12) + 2 * 14 * 12 * 256;
  OperationCount count;
  const auto loss = transformer->loss(transformer(tokens), tokens);
  EXPECT_EQ(count.operations(Phase::forward), want);
  loss.backward();
  EXPECT_EQ(count.operations(Phase::backward), 2 * want);
  EXPECT_EQ(count.operations(), 3 * want);
}

TEST(OperationCount, ACheckpointedBlockRunsAgainInBackwardAndThatIsAPhaseOfItsOwn) {
  const auto block = block_operations(2 * 7, 7, 12);
  // early_stop ends within the last product, which is not made then: what it needs is there.
  const auto down = 2 * 14 * 48 * 12;
  const auto head = 2 * 14 * 12 * 256;
  for (const bool early_stop : {false, true}) {
    const auto scenario = small_transformer(2);
    auto transformer = make_model(scenario);
    load_parameters(*transformer, initial_parameters(scenario));
    fsdp::RecomputationOptions options;
    options.early_stop = early_stop;
    for (const auto& layer : transformer->layers()) {
      fsdp::checkpoint_module(*layer.module, options);
    }
    const auto tokens = torch::arange(2 * 7).view({2, 7});
    OperationCount count;
    transformer->loss(transformer(tokens), tokens).backward();
    EXPECT_EQ(count.operations(Phase::forward), 2 * block + head);
    EXPECT_EQ(count.operations(Phase::recomputation), 2 * (block - (early_stop ? down : 0)))
        << early_stop;
    EXPECT_EQ(count.operations(Phase::backward), 2 * (2 * block + head));
    // A product that was begun and ended by the exception is no call either.
    const int products = early_stop ? 3 : 4;
    EXPECT_EQ(count.calls(Phase::recomputation).at("aten::addmm"), 2 * products) << early_stop;
  }
}

TEST(OperationCount, EachThreadCountsItsOwn) {
  fsdp::run_ranks(3, [](fsdp::RankContext& context) {
    OperationCount count;
    for (int i = 0; i <= context.rank; ++i) {
      variable({2, 3}).mm(variable({3, 4})).sum().backward();
    }
    EXPECT_EQ(count.operations(Phase::forward), (context.rank + 1) * 2 * 2 * 3 * 4);
    EXPECT_EQ(count.operations(Phase::backward), (context.rank + 1) * 2 * (2 * 2 * 3 * 4));
  });
}

TEST(OperationCount, ACountEndsWithItsScopeAndASecondIsRefused) {
  {
    OperationCount count;
    EXPECT_THROW(OperationCount(), fsdp::UsageError);
    values({2, 3}).mm(values({3, 4}));
    EXPECT_EQ(count.operations(), 48);
  }
  OperationCount count;
  EXPECT_EQ(count.operations(), 0);
  values({2, 3}).mm(values({3, 4}));
  EXPECT_EQ(count.operations(), 48);
}

}  // namespace
}  // namespace shardproof
