// The comparison finds what is wrong and says where; it lets through what is right; and the bounds
// are narrow enough for the first and wide enough for the second.

#include "conformance/comparison.h"

#include <gtest/gtest.h>

#include <torch/torch.h>
#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>

#include "conformance/tolerance.h"
#include "conformance/training_guards.h"
#include "reference/trainer.h"

namespace shardproof {
namespace {

constexpr std::uint64_t kFurthest = std::numeric_limits<std::uint64_t>::max();
const float kNan = std::numeric_limits<float>::quiet_NaN();

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TraceTensor single(Quantity quantity, const std::string& name, const at::Tensor& values) {
  return {quantity, name, values.sizes().vec(), Placement::single, {{kNoRank, 0, values.clone()}},
          {}};
}

TraceTensor replicated(Quantity quantity, const std::string& name, const at::Tensor& values,
                       int ranks, Placement placement = Placement::replicated) {
  TraceTensor tensor{quantity, name, values.sizes().vec(), placement, {}, {}};
  for (int rank = 0; rank < ranks; ++rank) {
    tensor.pieces.push_back({rank, 0, values.clone()});
  }
  return tensor;
}

/// Runs of the given lengths, in rank order.
TraceTensor sharded(Quantity quantity, const std::string& name, const at::Tensor& values,
                    const std::vector<std::int64_t>& lengths) {
  TraceTensor tensor{quantity, name, values.sizes().vec(), Placement::sharded, {}, {}};
  std::int64_t offset = 0;
  for (const std::int64_t length : lengths) {
    tensor.pieces.push_back({static_cast<int>(tensor.pieces.size()), offset,
                             values.flatten().slice(0, offset, offset + length).clone()});
    offset += length;
  }
  return tensor;
}

Scenario small_scenario(int world_size = 3) {
  Scenario scenario;
  scenario.model.kind = "mlp";
  scenario.data.kind = "synthetic";
  scenario.world_size = world_size;
  return scenario;
}

std::vector<Verdict> compare(const StepTrace& subject, const StepTrace& want, int world_size = 3,
                             const std::string& reference = "replay") {
  Expectation expectation;
  expectation.reference = reference;
  expectation.want = &want;
  return compare_step(small_scenario(world_size), subject, expectation);
}

/// Compares two traces of one tensor each.
Verdict compare_one(const TraceTensor& got, const TraceTensor& want, int world_size = 3) {
  StepTrace subject;
  subject.step = 7;
  subject.tensors = {got};
  StepTrace reference;
  reference.step = 7;
  reference.tensors = {want};
  const std::vector<Verdict> verdicts = compare(subject, reference, world_size);
  EXPECT_EQ(verdicts.size(), 1U);
  return verdicts.at(0);
}

at::Tensor numbers(std::vector<std::int64_t> shape) {
  return torch::arange(1, c10::multiply_integers(shape) + 1, torch::kFloat).view(shape);
}

void flip_lowest_bit(const at::Tensor& values, std::int64_t element) {
  auto* data = values.mutable_data_ptr<float>();
  data[element] = std::bit_cast<float>(std::bit_cast<std::uint32_t>(data[element]) ^ 1U);
}

// ---- Distance -----------------------------------------------------------------------------------

TEST(UlpDistance, IsZeroForEqualBitsAndOneForNeighbours) {
  EXPECT_EQ(ulp_distance(1.5, 1.5, at::kFloat), 0U);
  EXPECT_EQ(ulp_distance(1.0, std::nextafter(1.0F, 2.0F), at::kFloat), 1U);
  EXPECT_EQ(ulp_distance(1.0, std::nextafter(1.0, 0.0), at::kDouble), 1U);
  // Between two powers of two lie as many float32 values as the significand has patterns.
  EXPECT_EQ(ulp_distance(1.0, 2.0, at::kFloat), 1U << 23);
  EXPECT_EQ(ulp_distance(2.0, 1.0, at::kFloat), 1U << 23);
  EXPECT_EQ(ulp_distance(1.0, 2.0, at::kDouble), std::uint64_t{1} << 52);
}

TEST(UlpDistance, CountsThroughZeroWithBothZeros) {
  const double least = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(ulp_distance(0.0, -0.0, at::kFloat), 1U);
  EXPECT_EQ(ulp_distance(0.0, least, at::kFloat), 1U);
  EXPECT_EQ(ulp_distance(-0.0, -least, at::kFloat), 1U);
  EXPECT_EQ(ulp_distance(-least, least, at::kFloat), 3U);
  // The smallest normal number is 2^23 times the least.
  EXPECT_EQ(ulp_distance(0.0, std::numeric_limits<float>::min(), at::kFloat), 1U << 23);
}

TEST(UlpDistance, GoesFromTheLargestNumberToInfinityInOneStep) {
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(ulp_distance(std::numeric_limits<float>::max(), infinity, at::kFloat), 1U);
  EXPECT_EQ(ulp_distance(infinity, infinity, at::kFloat), 0U);
  // All 2^31 - 2^23 + 1 patterns from +0 to infinity, and as many below.
  EXPECT_EQ(ulp_distance(-infinity, infinity, at::kFloat), 2U * 0x7F800000U + 1U);
}

TEST(UlpDistance, IsTheLargestNumberFromANanToANumber) {
  for (const auto dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16}) {
    EXPECT_EQ(ulp_distance(NAN, 1.0, dtype), kFurthest);
    EXPECT_EQ(ulp_distance(INFINITY, NAN, dtype), kFurthest);
    EXPECT_EQ(ulp_distance(NAN, NAN, dtype), 0U);
  }
}

TEST(UlpDistance, KnowsTheShortFormats) {
  // bfloat16 has 7, half 10 bits after the point.
  EXPECT_EQ(ulp_distance(1.0, 1.0 + 0x1p-7, at::kBFloat16), 1U);
  EXPECT_EQ(ulp_distance(1.0, 1.0 + 0x1p-10, at::kHalf), 1U);
  EXPECT_EQ(ulp_distance(1.0, 2.0, at::kBFloat16), 128U);
  EXPECT_EQ(ulp_distance(65504.0, INFINITY, at::kHalf), 1U);
  EXPECT_EQ(ulp_distance(0.0, 0x1p-24, at::kHalf), 1U);
}

TEST(UlpDistance, RefusesDtypesThatAreNotFloating) {
  EXPECT_THROW(ulp_distance(1, 2, at::kInt), std::invalid_argument);
}

// ---- Placement ----------------------------------------------------------------------------------

TEST(Comparison, EqualTensorsOfEveryPlacementPass) {
  const at::Tensor values = numbers({4, 5});
  const TraceTensor want = single(Quantity::gradient, "w", values);
  EXPECT_EQ(compare_one(want, want).outcome, Outcome::passed);
  EXPECT_EQ(compare_one(replicated(Quantity::gradient, "w", values, 3), want).outcome,
            Outcome::passed);
  EXPECT_EQ(compare_one(sharded(Quantity::gradient, "w", values, {7, 7, 6}), want).outcome,
            Outcome::passed);
  EXPECT_EQ(compare_one(sharded(Quantity::gradient, "w", values, {20, 0, 0}), want).outcome,
            Outcome::passed);
  EXPECT_EQ(compare_one(sharded(Quantity::gradient, "w", values, {7, 7, 6}),
                        sharded(Quantity::gradient, "w", values, {10, 5, 5}))
                .outcome,
            Outcome::passed);
}

Scenario hybrid_scenario() {
  Scenario scenario = small_scenario(4);
  scenario.strategy = "hybrid_shard";
  scenario.replicas = 2;
  return scenario;
}

/// Pieces of the given runs of the values.
TraceTensor runs_of(const at::Tensor& values,
                    const std::vector<std::pair<std::int64_t, std::int64_t>>& runs) {
  TraceTensor tensor{Quantity::gradient, "w", values.sizes().vec(), Placement::sharded, {}, {}};
  for (const auto& [begin, end] : runs) {
    tensor.pieces.push_back({static_cast<int>(tensor.pieces.size()), begin,
                             values.flatten().slice(0, begin, end).clone()});
  }
  return tensor;
}

Verdict compare_hybrid(const TraceTensor& got, const at::Tensor& values) {
  StepTrace subject;
  subject.tensors = {got};
  StepTrace reference;
  reference.tensors = {single(Quantity::gradient, "w", values)};
  Expectation expectation;
  expectation.reference = "replay";
  expectation.want = &reference;
  return compare_step(hybrid_scenario(), subject, expectation).at(0);
}

TEST(Comparison, EveryReplicaTilesTheTensorAndIsCompared) {
  const at::Tensor values = numbers({9});
  TraceTensor got = runs_of(values, {{0, 5}, {5, 9}, {0, 5}, {5, 9}});
  EXPECT_EQ(compare_hybrid(got, values).outcome, Outcome::passed);
  EXPECT_EQ(compare_hybrid(got, values).elements, 18);
  // Replicas may cut differently.
  EXPECT_EQ(compare_hybrid(runs_of(values, {{0, 5}, {5, 9}, {0, 2}, {2, 9}}), values).outcome,
            Outcome::passed);
  flip_lowest_bit(got.pieces[2].values, 3);
  const Verdict verdict = compare_hybrid(got, values);
  EXPECT_EQ(verdict.outcome, Outcome::failed);
  EXPECT_EQ(verdict.rank, 2);
  EXPECT_EQ(verdict.element, 3);

  for (const auto& runs :
       {std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 5}, {5, 9}, {0, 5}, {6, 9}},
        {{0, 3}, {3, 5}, {5, 7}, {7, 9}}}) {
    EXPECT_EQ(compare_hybrid(runs_of(values, runs), values).outcome, Outcome::failed);
  }
  const auto gap = compare_hybrid(runs_of(values, {{0, 5}, {5, 9}, {0, 5}, {6, 9}}), values);
  EXPECT_TRUE(contains(gap.message,
                       "of replica 1, which is ranks 2 to 3: no rank holds elements "
                       "[5, 6)"))
      << gap.message;
  // Without replicas two ranks with the same run overlap.
  const auto doubled = compare_one(runs_of(values, {{0, 9}, {0, 9}, {0, 0}}),
                                   single(Quantity::gradient, "w", values));
  EXPECT_TRUE(contains(doubled.message, "overlaps")) << doubled.message;
}

TEST(Comparison, WhatOnlyOneSideHasFailsWithTheReason) {
  StepTrace both;
  both.tensors = {single(Quantity::gradient, "w", numbers({2})),
                  single(Quantity::parameter, "w", numbers({2})),
                  single(Quantity::optimizer_state, "exp_avg/w", numbers({2}))};
  StepTrace frozen = both;
  frozen.tensors = {both.tensors[1]};
  const std::vector<Verdict> more = compare(both, frozen);
  ASSERT_EQ(more.size(), 3U);
  EXPECT_EQ(more[1].outcome, Outcome::passed);
  EXPECT_EQ(more[0].message,
            "the subject has it, the reference does not; a parameter that is frozen, or that no "
            "rank's loss depends on, has no gradient");
  EXPECT_TRUE(contains(more[2].message, "never had a gradient has no optimizer state"));
  const std::vector<Verdict> fewer = compare(frozen, both);
  ASSERT_EQ(fewer.size(), 3U);
  EXPECT_EQ(std::count_if(fewer.begin(), fewer.end(),
                          [](const Verdict& verdict) {
                            return verdict.message == "the reference has it, the subject does not";
                          }),
            2);
}

TEST(Comparison, APassedVerdictSaysWhatWasCompared) {
  const at::Tensor values = numbers({4, 5});
  const Verdict verdict = compare_one(replicated(Quantity::total_norm, "w", values, 3),
                                      single(Quantity::total_norm, "w", values));
  EXPECT_EQ(verdict.check, "fsdp.equivalence.total_norm.float32.w3.mlp_adamw_replay");
  EXPECT_EQ(verdict.reference, "replay");
  EXPECT_EQ(verdict.step, 7);
  EXPECT_EQ(verdict.elements, 60) << "every rank's own copy counts";
  EXPECT_EQ(verdict.differing, 0);
  EXPECT_EQ(verdict.ulp, 0U);
  EXPECT_EQ(verdict.rule, RuleKind::exact);
  EXPECT_EQ(verdict.message, "");
}

TEST(Comparison, OneFlippedBitInAShardIsFoundAndNamed) {
  const at::Tensor values = numbers({4, 5});
  const TraceTensor want = single(Quantity::gradient, "w", values);
  for (std::int64_t element = 0; element < 20; ++element) {
    TraceTensor got = sharded(Quantity::gradient, "w", values, {7, 0, 13});
    const int rank = element < 7 ? 0 : 2;
    flip_lowest_bit(got.pieces[static_cast<std::size_t>(rank)].values,
                    element < 7 ? element : element - 7);
    const Verdict verdict = compare_one(got, want);
    EXPECT_EQ(verdict.outcome, Outcome::failed);
    EXPECT_EQ(verdict.rank, rank);
    EXPECT_EQ(verdict.element, element);
    EXPECT_EQ(verdict.index, (std::vector<std::int64_t>{element / 5, element % 5}));
    EXPECT_EQ(verdict.want, static_cast<double>(element + 1));
    // The lowest bit of an integer below 2^24 was zero, so flipping it went up by one ULP.
    EXPECT_EQ(verdict.got, std::nextafter(static_cast<float>(element + 1), 1e9F));
    EXPECT_EQ(verdict.ulp, 1U);
    EXPECT_EQ(verdict.differing, 1);
    EXPECT_EQ(verdict.allowed, 0.0);
    EXPECT_EQ(verdict.message, "") << "a value error is not taken for a layout error";
  }
}

TEST(Comparison, OneRanksCopyThatDiffersIsFoundAndNamed) {
  const at::Tensor values = numbers({6});
  TraceTensor got = replicated(Quantity::total_norm, "total_norm", values, 3);
  flip_lowest_bit(got.pieces[1].values, 4);
  const Verdict verdict = compare_one(got, single(Quantity::total_norm, "total_norm", values));
  EXPECT_EQ(verdict.outcome, Outcome::failed);
  EXPECT_EQ(verdict.rank, 1);
  EXPECT_EQ(verdict.element, 4);
}

TEST(Comparison, EachRanksOwnValueIsHeldToThatRanks) {
  TraceTensor want = replicated(Quantity::loss, "loss", numbers({2}), 3, Placement::per_rank);
  want.pieces[1].values.mul_(2);
  want.pieces[2].values.mul_(3);
  EXPECT_EQ(compare_one(want, want).outcome, Outcome::passed);
  TraceTensor got = want;
  got.pieces[2].values = want.pieces[1].values;
  const Verdict verdict = compare_one(got, want);
  EXPECT_EQ(verdict.outcome, Outcome::failed);
  EXPECT_EQ(verdict.rank, 2);
  EXPECT_TRUE(contains(verdict.message, "rank 2's values are those of rank 1")) << verdict.message;
}

TEST(Comparison, TheWorstElementIsTheFarthestNotTheFirst) {
  const at::Tensor values = numbers({9});
  TraceTensor got = sharded(Quantity::gradient, "w", values, {3, 3, 3});
  flip_lowest_bit(got.pieces[0].values, 0);
  got.pieces[2].values[1] = 80.0F;
  const Verdict verdict = compare_one(got, single(Quantity::gradient, "w", values));
  EXPECT_EQ(verdict.differing, 2);
  EXPECT_EQ(verdict.rank, 2);
  EXPECT_EQ(verdict.element, 7);
  EXPECT_EQ(verdict.got, 80.0);
}

TEST(Comparison, AScalarHasAnEmptyIndex) {
  const Verdict verdict = compare_one(single(Quantity::total_norm, "n", torch::tensor(2.0F)),
                                      single(Quantity::total_norm, "n", torch::tensor(1.0F)));
  EXPECT_EQ(verdict.element, 0);
  EXPECT_TRUE(verdict.index.empty());
}

TEST(Comparison, ZerosOfEitherSignDiffer) {
  const Verdict verdict = compare_one(single(Quantity::gradient, "w", torch::tensor({1.0F, -0.0F})),
                                      single(Quantity::gradient, "w", torch::tensor({1.0F, 0.0F})));
  EXPECT_EQ(verdict.outcome, Outcome::failed);
  EXPECT_EQ(verdict.ulp, 1U);
}

TEST(Comparison, ANanDiffersFromANumberAndFromAnotherNan) {
  const TraceTensor number = single(Quantity::gradient, "w", torch::tensor({1.0F, 2.0F}));
  const TraceTensor nan = single(Quantity::gradient, "w", torch::tensor({1.0F, kNan}));
  const TraceTensor other_nan =
      single(Quantity::gradient, "w", torch::tensor({1.0F, std::bit_cast<float>(0x7FC00001U)}));
  EXPECT_EQ(compare_one(nan, number).ulp, kFurthest);
  EXPECT_EQ(compare_one(number, nan).ulp, kFurthest);
  EXPECT_EQ(compare_one(nan, nan).outcome, Outcome::passed);
  EXPECT_EQ(compare_one(other_nan, nan).outcome, Outcome::failed);
}

TEST(Comparison, ShortFormatsAreComparedByTheirOwnBits) {
  for (const auto dtype : {at::kHalf, at::kBFloat16, at::kDouble}) {
    const at::Tensor want = torch::ones({4}, dtype);
    at::Tensor got = want.clone();
    static_cast<std::uint8_t*>(got.data_ptr())[2 * got.element_size()] ^= 1;
    const Verdict verdict =
        compare_one(single(Quantity::gradient, "w", got), single(Quantity::gradient, "w", want));
    EXPECT_EQ(verdict.ulp, 1U);
    EXPECT_EQ(verdict.element, 2);
  }
}

TEST(Comparison, ATensorThatIsNotContiguousIsReadByItsElements) {
  const at::Tensor values = numbers({4, 5});
  TraceTensor got = single(Quantity::gradient, "w", values);
  got.pieces[0].values = values.t().contiguous().t();
  ASSERT_FALSE(got.pieces[0].values.is_contiguous());
  EXPECT_EQ(compare_one(got, single(Quantity::gradient, "w", values)).outcome, Outcome::passed);
}

// ---- Malformed traces ---------------------------------------------------------------------------

void expect_message(const Verdict& verdict, const std::string& part) {
  EXPECT_EQ(verdict.outcome, Outcome::failed);
  EXPECT_TRUE(contains(verdict.message, part)) << verdict.message;
}

TEST(Comparison, PiecesThatOverlapOrLeaveAGapFail) {
  const at::Tensor values = numbers({9});
  const TraceTensor want = single(Quantity::gradient, "w", values);
  const TraceTensor sound = sharded(Quantity::gradient, "w", values, {3, 3, 3});
  TraceTensor got = sound;
  got.pieces[1].offset = 2;
  expect_message(compare_one(got, want),
                 "rank 1 holds elements [2, 5) and overlaps others, which hold [0, 3)");
  got = sound;
  got.pieces[1].values = got.pieces[1].values.slice(0, 0, 2);
  expect_message(compare_one(got, want), "no rank holds elements [5, 6)");
  got = sound;
  got.pieces[2].values = got.pieces[2].values.slice(0, 0, 2);
  expect_message(compare_one(got, want), "[0, 8) where there are 9");
  got = sound;
  got.pieces[0].offset = -1;
  expect_message(compare_one(got, want), "overlaps");
}

TEST(Comparison, ARankWithoutItsPieceFails) {
  const at::Tensor values = numbers({9});
  const TraceTensor want = single(Quantity::gradient, "w", values);
  TraceTensor got = replicated(Quantity::gradient, "w", values, 3);
  got.pieces.erase(got.pieces.begin() + 1);
  expect_message(compare_one(got, want), "piece of rank 1 is missing");
  got.pieces.pop_back();
  expect_message(compare_one(got, want), "1 ranks hold a piece, the world size is 3");
  got.pieces.clear();
  expect_message(compare_one(got, want), "0 ranks");
}

TEST(Comparison, AnotherShapeOrDtypeFails) {
  const TraceTensor want = single(Quantity::gradient, "w", numbers({2, 3}));
  expect_message(compare_one(single(Quantity::gradient, "w", numbers({3, 2})), want),
                 "[3, 2] where [2, 3]");
  expect_message(
      compare_one(single(Quantity::gradient, "w", numbers({2, 3}).to(at::kDouble)), want),
      "dtype Double where Float");
  TraceTensor got = replicated(Quantity::gradient, "w", numbers({2, 3}), 3);
  got.pieces[2].values = numbers({6});
  expect_message(compare_one(got, want), "rank 2 holds shape [6]");
  got.pieces[2].values = at::Tensor();
  expect_message(compare_one(got, want), "rank 2 holds no values");
}

TEST(Comparison, ATensorMissingOnEitherSideFails) {
  const TraceTensor a = single(Quantity::gradient, "a", numbers({2}));
  const TraceTensor b = single(Quantity::gradient, "b", numbers({2}));
  StepTrace both;
  both.tensors = {a, b};
  StepTrace one;
  one.tensors = {a};
  for (const bool subject_has_more : {true, false}) {
    const std::vector<Verdict> verdicts =
        compare(subject_has_more ? both : one, subject_has_more ? one : both);
    ASSERT_EQ(verdicts.size(), 2U);
    EXPECT_EQ(verdicts[0].outcome, Outcome::passed);
    EXPECT_EQ(verdicts[1].name, "b");
    expect_message(verdicts[1], subject_has_more ? "the subject has it, the reference does not"
                                                 : "the reference has it, the subject does not");
  }
}

TEST(Comparison, ATensorThatIsThereTwiceFails) {
  StepTrace subject;
  subject.tensors = {single(Quantity::gradient, "a", numbers({2})),
                     single(Quantity::gradient, "a", numbers({2}))};
  StepTrace want;
  want.tensors = {subject.tensors[0]};
  const std::vector<Verdict> verdicts = compare(subject, want);
  ASSERT_EQ(verdicts.size(), 2U);
  expect_message(verdicts[1], "twice");
}

// ---- Layout -------------------------------------------------------------------------------------

TEST(Comparison, TwoRanksPiecesInEachOthersPlaceAreRecognised) {
  const at::Tensor values = numbers({12});
  TraceTensor got = sharded(Quantity::gradient, "w", values, {4, 4, 4});
  std::swap(got.pieces[1].values, got.pieces[2].values);
  expect_message(compare_one(got, single(Quantity::gradient, "w", values)),
                 "rank 1's piece is rank 2's: the values are those of elements [8, 12)");
}

TEST(Comparison, AShiftedPieceIsRecognisedAlsoWhenItRunsOverTheEnd) {
  const at::Tensor values = numbers({12});
  TraceTensor got = sharded(Quantity::gradient, "w", values, {4, 4, 4});
  got.pieces[1].values = values.slice(0, 5, 9).clone();
  expect_message(compare_one(got, single(Quantity::gradient, "w", values)),
                 "rank 1 holds elements [4, 8), but the values are those of elements [5, 9)");
  // One element of the next parameter has come in at the end.
  got = sharded(Quantity::gradient, "w", values, {4, 4, 4});
  got.pieces[2].values = torch::cat({values.slice(0, 9, 12), torch::tensor({-5.0F})});
  expect_message(compare_one(got, single(Quantity::gradient, "w", values)),
                 "the values are those of elements [9, 12)");
}

TEST(Comparison, ATransposedTensorIsRecognisedAsAPermutation) {
  const at::Tensor values = numbers({4, 4});
  expect_message(compare_one(single(Quantity::gradient, "w", values.t().contiguous()),
                             single(Quantity::gradient, "w", values)),
                 "the wanted ones in another order");
}

TEST(Comparison, ConstantsAndZerosAreNotTakenForAShift) {
  // A shard of zeros where ones are wanted: there are zeros elsewhere, but they did not come from
  // there.
  at::Tensor values = torch::zeros({12});
  values.slice(0, 4, 8).fill_(1);
  TraceTensor got = sharded(Quantity::gradient, "w", values, {4, 4, 4});
  got.pieces[1].values.zero_();
  const Verdict verdict = compare_one(got, single(Quantity::gradient, "w", values));
  EXPECT_EQ(verdict.outcome, Outcome::failed);
  EXPECT_EQ(verdict.differing, 4);
  EXPECT_EQ(verdict.message, "");
}

// ---- Order --------------------------------------------------------------------------------------

Verdict verdict_at(int step, Quantity quantity, const std::string& name,
                   Outcome outcome = Outcome::failed) {
  Verdict verdict;
  verdict.step = step;
  verdict.quantity = quantity;
  verdict.name = name;
  verdict.outcome = outcome;
  return verdict;
}

TEST(FirstDivergence, IsTheEarliestStepThenTheFirstQuantityThenTheFirstInTheTrace) {
  std::vector<Verdict> verdicts = {
      verdict_at(2, Quantity::output, "late"), verdict_at(1, Quantity::parameter, "p"),
      verdict_at(1, Quantity::gradient, "passed", Outcome::passed),
      verdict_at(1, Quantity::gradient, "z"), verdict_at(1, Quantity::gradient, "a")};
  ASSERT_NE(first_divergence(verdicts), nullptr);
  EXPECT_EQ(first_divergence(verdicts)->name, "z");
  verdicts.push_back(verdict_at(0, Quantity::optimizer_state, "earliest"));
  EXPECT_EQ(first_divergence(verdicts)->name, "earliest");
}

TEST(FirstDivergence, IsATensorBeforeAGuardAndNullWhenNothingFailed) {
  Verdict guard = verdict_at(0, Quantity::output, "guard");
  guard.rule = RuleKind::guard;
  EXPECT_EQ(first_divergence({guard, verdict_at(5, Quantity::parameter, "p")})->name, "p");
  EXPECT_EQ(first_divergence({guard})->name, "guard");
  EXPECT_EQ(first_divergence({verdict_at(0, Quantity::loss, "l", Outcome::passed)}), nullptr);
  EXPECT_EQ(first_divergence({}), nullptr);
}

// ---- Tolerances ---------------------------------------------------------------------------------

TEST(Tolerance, RoundoffAndGammaHaveTheirTextbookValues) {
  EXPECT_EQ(unit_roundoff(at::kDouble), 0x1p-53);
  EXPECT_EQ(unit_roundoff(at::kFloat), 0x1p-24);
  EXPECT_EQ(unit_roundoff(at::kHalf), 0x1p-11);
  EXPECT_EQ(unit_roundoff(at::kBFloat16), 0x1p-8);
  EXPECT_THROW(unit_roundoff(at::kLong), std::invalid_argument);
  // Higham 2002, lemma 3.1: n u / (1 - n u).
  EXPECT_EQ(gamma(0, 0x1p-24), 0.0);
  EXPECT_DOUBLE_EQ(gamma(1, 0x1p-8), 1.0 / 255);
  EXPECT_DOUBLE_EQ(gamma(128, 0x1p-8), 1.0);
  EXPECT_EQ(gamma(256, 0x1p-8), std::numeric_limits<double>::infinity());
}

TEST(Tolerance, SumsInAnyOrderStayWithinTheirBound) {
  torch::manual_seed(1);
  for (const int ranks : {2, 3, 8, 64}) {
    const at::Tensor terms =
        torch::randn({ranks, 500}) * torch::exp2(torch::randint(-10, 10, {ranks, 1}));
    at::Tensor forwards = torch::zeros({500});
    at::Tensor backwards = torch::zeros({500});
    for (int i = 0; i < ranks; ++i) {
      forwards += terms[i];
      backwards += terms[ranks - 1 - i];
    }
    const at::Tensor difference = (forwards / ranks - backwards / ranks).abs().to(at::kDouble);
    const at::Tensor bound = sum_bound(terms.abs().mean(0), ranks, at::kFloat);
    EXPECT_TRUE((difference <= bound).all().item<bool>());
    // And the bound is no licence: it is far below the terms themselves.
    EXPECT_LT((bound / terms.abs().mean(0)).max().item<double>(), 2e-5);
  }
}

TEST(Tolerance, ExactReferencesAllowNothingAndTheOthersHaveABoundForEachQuantityTheyProduce) {
  for (const auto quantity :
       {Quantity::output, Quantity::loss, Quantity::gradient, Quantity::total_norm,
        Quantity::clipped_gradient, Quantity::parameter, Quantity::optimizer_state}) {
    EXPECT_EQ(rule_for(small_scenario(), "replay", quantity).kind, RuleKind::exact);
    EXPECT_EQ(rule_for(small_scenario(), "python", quantity).kind, RuleKind::exact);
    EXPECT_NE(rule_for(small_scenario(), "replay", quantity).source, "");
  }
  for (const auto quantity :
       {Quantity::mean_loss, Quantity::gradient, Quantity::total_norm, Quantity::clipped_gradient,
        Quantity::parameter, Quantity::optimizer_state}) {
    EXPECT_EQ(rule_for(small_scenario(), "whole", quantity).kind, RuleKind::bounded);
    EXPECT_EQ(rule_for(small_scenario(), "float64", quantity).kind, RuleKind::bounded);
  }
}

/// The three references of a scenario, in lockstep with the replay.
class References {
 public:
  explicit References(const Scenario& asked)
      : scenario(asked),
        replay_(asked, ReferenceMode::replay, initial_parameters(asked)),
        whole_(asked, ReferenceMode::whole, initial_parameters(asked)),
        float64_(asked, ReferenceMode::float64, initial_parameters(asked)) {
    after_.parameters = initial_parameters(asked);
  }

  void step() {
    start = after_;
    if (start.steps_done > 0) {
      whole_.set_state(start);
      float64_.set_state(start);
    }
    const auto index = static_cast<int>(start.steps_done);
    replay = replay_.step(index);
    whole = whole_.step(index);
    float64 = float64_.step(index);
    after_ = state_after(replay);
  }

  std::vector<Verdict> compare(const StepTrace& subject, const std::string& reference) const {
    Expectation expectation;
    expectation.reference = reference;
    expectation.want = reference == "whole" ? &whole : &float64;
    expectation.trusted = &replay;
    expectation.float64 = &float64;
    expectation.start = &start;
    return compare_step(scenario, subject, expectation);
  }

  Scenario scenario;
  TrainingState start;
  StepTrace replay, whole, float64;

 private:
  ReferenceTrainer replay_, whole_, float64_;
  TrainingState after_;
};

std::int64_t failures(const std::vector<Verdict>& verdicts) {
  return std::count_if(verdicts.begin(), verdicts.end(),
                       [](const Verdict& verdict) { return verdict.outcome == Outcome::failed; });
}

Scenario bounded_scenario(const std::string& optimizer, const std::string& dtype, double max_norm) {
  Scenario scenario = small_scenario(3);
  scenario.model.sizes = {12, 24, 24, 6};
  scenario.optimizer.kind = optimizer;
  scenario.optimizer.momentum = optimizer == "sgd" ? 0.9 : 0;
  scenario.optimizer.lr = optimizer == "sgd" ? 0.1 : 1e-3;
  scenario.dtype = dtype;
  scenario.max_norm = max_norm;
  scenario.seed = 11;
  return scenario;
}

class Bounds : public ::testing::TestWithParam<std::tuple<const char*, const char*, double>> {
 protected:
  Scenario scenario() const {
    return bounded_scenario(std::get<0>(GetParam()), std::get<1>(GetParam()),
                            std::get<2>(GetParam()));
  }
};

TEST_P(Bounds, LetCorrectRunsThrough) {
  References references(scenario());
  for (int step = 0; step < 4; ++step) {
    references.step();
    for (const char* reference : {"whole", "float64"}) {
      for (const Verdict& verdict : references.compare(references.replay, reference)) {
        EXPECT_EQ(verdict.outcome, Outcome::passed) << describe(verdict);
      }
    }
    // Another correct program of the same dtype, which sums in another order.
    StepTrace other = references.whole;
    other.tensors.push_back(*references.replay.find(Quantity::loss, "loss"));
    EXPECT_EQ(failures(references.compare(other, "float64")), 0);
  }
}

/// Every tensor of a quantity must be caught when `damage` is done to it, and no other may be
/// blamed.
void expect_caught(const References& references, Quantity quantity,
                   const std::function<void(at::Tensor&)>& damage) {
  for (const TraceTensor& tensor : references.replay.tensors) {
    if (tensor.quantity != quantity) {
      continue;
    }
    StepTrace damaged = references.replay;
    for (TraceTensor& target : damaged.tensors) {
      if (target.quantity == quantity && target.name == tensor.name) {
        at::Tensor values = target.pieces[0].values.clone();
        damage(values);
        target.pieces[0].values = values;
      }
    }
    for (const char* reference : {"whole", "float64"}) {
      const std::vector<Verdict> verdicts = references.compare(damaged, reference);
      EXPECT_EQ(failures(verdicts), 1)
          << reference << ' ' << to_string(quantity) << ' ' << tensor.name;
      const Verdict* first = first_divergence(verdicts);
      ASSERT_NE(first, nullptr);
      EXPECT_EQ(first->quantity, quantity);
      EXPECT_EQ(first->name, tensor.name);
      EXPECT_GT(first->worst_ratio, 1.0);
    }
  }
}

TEST_P(Bounds, CatchAGradientThatIsOffByOneTenThousandth) {
  References references(scenario());
  for (int step = 0; step < 2; ++step) {
    references.step();
    expect_caught(references, Quantity::gradient, [](at::Tensor& values) { values.mul_(1.0001); });
    expect_caught(references, Quantity::clipped_gradient,
                  [](at::Tensor& values) { values.mul_(1.0001); });
    expect_caught(references, Quantity::total_norm,
                  [](at::Tensor& values) { values.mul_(1.0001); });
  }
}

TEST_P(Bounds, CatchASumInsteadOfAMean) {
  References references(scenario());
  references.step();
  const int ranks = references.scenario.world_size;
  expect_caught(references, Quantity::gradient, [&](at::Tensor& values) { values.mul_(ranks); });
  expect_caught(references, Quantity::optimizer_state,
                [&](at::Tensor& values) { values.mul_(ranks); });
}

TEST_P(Bounds, CatchAnOptimizerThatIsOffByOneThousandth) {
  References references(scenario());
  for (int step = 0; step < 2; ++step) {
    references.step();
    expect_caught(references, Quantity::optimizer_state,
                  [](at::Tensor& values) { values.mul_(1.001); });
    for (const TraceTensor& tensor : references.replay.tensors) {
      if (tensor.quantity == Quantity::parameter) {
        const at::Tensor before = references.start.parameters.at(tensor.name);
        const at::Tensor moved = before + (tensor.pieces[0].values - before) * 1.001;
        StepTrace damaged = references.replay;
        for (TraceTensor& target : damaged.tensors) {
          if (target.quantity == Quantity::parameter && target.name == tensor.name) {
            target.pieces[0].values = moved;
          }
        }
        for (const char* reference : {"whole", "float64"}) {
          EXPECT_EQ(failures(references.compare(damaged, reference)), 1) << tensor.name;
        }
      }
    }
  }
}

TEST_P(Bounds, CatchOneRanksDataLeftOut) {
  // The gradient of ranks 0 and 1 alone, which is what a run of two ranks computes.
  References references(scenario());
  Scenario two = scenario();
  two.world_size = 2;
  References fewer(two);
  references.step();
  fewer.step();
  for (const TraceTensor& tensor : fewer.replay.tensors) {
    if (tensor.quantity == Quantity::gradient || tensor.quantity == Quantity::total_norm) {
      StepTrace damaged = references.replay;
      for (TraceTensor& target : damaged.tensors) {
        if (target.quantity == tensor.quantity && target.name == tensor.name) {
          target.pieces[0].values = tensor.pieces[0].values;
        }
      }
      for (const char* reference : {"whole", "float64"}) {
        EXPECT_EQ(failures(references.compare(damaged, reference)), 1) << tensor.name;
      }
    }
  }
}

TEST_P(Bounds, CatchAParameterThatWasNotUpdatedOrNotDecayed) {
  References references(scenario());
  references.step();
  references.step();
  for (const TraceTensor& tensor : references.replay.tensors) {
    if (tensor.quantity == Quantity::parameter) {
      StepTrace damaged = references.replay;
      for (TraceTensor& target : damaged.tensors) {
        if (target.quantity == Quantity::parameter && target.name == tensor.name) {
          target.pieces[0].values = references.start.parameters.at(tensor.name);
        }
      }
      EXPECT_EQ(failures(references.compare(damaged, "float64")), 1) << tensor.name;
    }
  }
}

TEST_P(Bounds, CatchANanAndAnInfinityInEveryQuantity) {
  References references(scenario());
  references.step();
  for (const double value : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
    for (const auto quantity :
         {Quantity::gradient, Quantity::total_norm, Quantity::clipped_gradient, Quantity::parameter,
          Quantity::optimizer_state}) {
      expect_caught(references, quantity,
                    [&](at::Tensor& values) { values.view({-1})[0] = value; });
    }
  }
}

/// Scenarios of full precision that the bounds must fit too.
std::vector<Scenario> wider_scenarios() {
  std::vector<Scenario> scenarios;
  for (const double p : {0.5, 1.0, 2.5, std::numeric_limits<double>::infinity()}) {
    Scenario scenario = bounded_scenario("adamw", "float32", 0.05);
    scenario.norm_type = p;
    scenarios.push_back(scenario);
  }
  for (const char* accumulation : {"each", "last", "last_all_reduce"}) {
    Scenario scenario = bounded_scenario("sgd", "float32", 0.1);
    scenario.world_size = 6;
    scenario.strategy = "hybrid_shard";
    scenario.replicas = 3;
    scenario.micro_batches = 3;
    scenario.accumulation = accumulation;
    scenarios.push_back(scenario);
    scenario.divide = {3, 0.7};
    scenarios.push_back(scenario);
  }
  for (const char* optimizer : {"sgd", "adamw"}) {
    Scenario scenario = bounded_scenario(optimizer, "float32", 0.1);
    scenario.model = ModelSpec();
    scenario.model.kind = "quirks";
    scenario.model.quirks = quirk_names();
    scenarios.push_back(scenario);
    scenario.model = ModelSpec();
    scenario.model.layers = 2;
    scenario.model.width = 16;
    scenario.model.heads = 2;
    scenario.model.context = 8;
    scenario.model.tied = true;
    scenarios.push_back(scenario);
  }
  return scenarios;
}

TEST(BoundedComparison, LetsCorrectRunsOfEveryNormSumAndQuirkThrough) {
  for (const Scenario& scenario : wider_scenarios()) {
    References references(scenario);
    // Another correct program: it sums in another order.
    Scenario flat = scenario;
    flat.strategy = "full_shard";
    flat.replicas = 1;
    flat.accumulation = "each";
    ReferenceTrainer other(flat, ReferenceMode::replay, initial_parameters(flat));
    for (int step = 0; step < 4; ++step) {
      references.step();
      if (step > 0) {
        other.set_state(references.start);
      }
      for (const StepTrace& subject : {references.replay, other.step(step)}) {
        for (const char* reference : {"whole", "float64"}) {
          for (const Verdict& verdict : references.compare(subject, reference)) {
            EXPECT_EQ(verdict.outcome, Outcome::passed)
                << dotted_name(scenario) << ": " << describe(verdict);
          }
        }
      }
    }
  }
}

TEST(BoundedComparison, CatchesWrongNormsAndMovedFrozenParameters) {
  for (const Scenario& scenario : wider_scenarios()) {
    References references(scenario);
    references.step();
    // Below p = 1 the triangle inequality does not hold, and errors count with their roots.
    const double factor = scenario.norm_type < 1 ? 1.05 : 1.0002;
    for (const auto quantity : {Quantity::total_norm, Quantity::clipped_gradient}) {
      expect_caught(references, quantity, [&](at::Tensor& values) { values.mul_(factor); });
    }
    for (const TraceTensor& tensor : references.replay.tensors) {
      if (tensor.quantity != Quantity::parameter ||
          references.replay.find(Quantity::gradient, tensor.name) != nullptr) {
        continue;
      }
      StepTrace damaged = references.replay;
      for (TraceTensor& target : damaged.tensors) {
        if (target.quantity == Quantity::parameter && target.name == tensor.name) {
          target.pieces[0].values = tensor.pieces[0].values.clone();
          flip_lowest_bit(target.pieces[0].values, 0);
        }
      }
      for (const char* reference : {"whole", "float64"}) {
        EXPECT_EQ(failures(references.compare(damaged, reference)), 1) << tensor.name;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, Bounds,
                         ::testing::Values(std::tuple("sgd", "float32", 0.0),
                                           std::tuple("sgd", "float32", 0.1),
                                           std::tuple("adamw", "float32", 0.1),
                                           std::tuple("sgd", "float64", 0.1),
                                           std::tuple("adamw", "float64", 0.0)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param)) + "_" +
                                  std::get<1>(info.param) +
                                  (std::get<2>(info.param) > 0 ? "_clipped" : "");
                         });

TEST(BoundedComparison, LeavesTheTracesAsTheyWere) {
  References references(bounded_scenario("adamw", "float64", 0.1));
  references.step();
  const auto bits = [&] {
    std::vector<at::Tensor> copies;
    for (const StepTrace* trace : {&references.replay, &references.whole, &references.float64}) {
      for (const TraceTensor& tensor : trace->tensors) {
        copies.push_back(tensor.pieces[0].values.clone());
        if (tensor.magnitude.defined()) {
          copies.push_back(tensor.magnitude.clone());
        }
      }
    }
    return copies;
  };
  const std::vector<at::Tensor> before = bits();
  references.compare(references.replay, "whole");
  references.compare(references.replay, "float64");
  const std::vector<at::Tensor> after = bits();
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(before[i].equal(after[i])) << i;
  }
}

TEST(BoundedComparison, HoldsTheMeanLossToTheMeanOfEveryRanksLosses) {
  References references(bounded_scenario("sgd", "float32", 0));
  references.step();
  const auto mean_loss = [&](const StepTrace& subject) {
    for (const Verdict& verdict : references.compare(subject, "whole")) {
      if (verdict.quantity == Quantity::mean_loss) {
        return verdict;
      }
    }
    return Verdict();
  };
  EXPECT_EQ(mean_loss(references.replay).outcome, Outcome::passed);
  StepTrace damaged = references.replay;
  for (TraceTensor& tensor : damaged.tensors) {
    if (tensor.quantity == Quantity::loss) {
      tensor.pieces[1].values = tensor.pieces[1].values * 1.0001;
    }
  }
  EXPECT_EQ(mean_loss(damaged).outcome, Outcome::failed);
  std::erase_if(damaged.tensors,
                [](const TraceTensor& tensor) { return tensor.quantity == Quantity::loss; });
  expect_message(mean_loss(damaged), "no losses");
}

TEST(BoundedComparison, SkipsWhatTheReferenceDoesNotProduceAndMissesWhatTheSubjectDoesNot) {
  References references(bounded_scenario("sgd", "float32", 0));
  references.step();
  const std::vector<Verdict> verdicts = references.compare(references.replay, "float64");
  EXPECT_TRUE(std::none_of(verdicts.begin(), verdicts.end(), [](const Verdict& verdict) {
    return verdict.quantity == Quantity::output || verdict.quantity == Quantity::loss;
  }));
  StepTrace incomplete = references.replay;
  std::erase_if(incomplete.tensors,
                [](const TraceTensor& tensor) { return tensor.quantity == Quantity::total_norm; });
  const std::vector<Verdict> missing = references.compare(incomplete, "float64");
  ASSERT_EQ(failures(missing), 1);
  EXPECT_EQ(first_divergence(missing)->quantity, Quantity::total_norm);
}

TEST(BoundedComparison, FindsTheWorstElementOfAShard) {
  References references(bounded_scenario("sgd", "float32", 0));
  references.step();
  StepTrace damaged = references.replay;
  for (TraceTensor& tensor : damaged.tensors) {
    if (tensor.quantity == Quantity::gradient && tensor.name == "layers.1.linear.weight") {
      tensor = sharded(Quantity::gradient, tensor.name, tensor.pieces[0].values, {200, 200, 176});
      tensor.pieces[1].values[30] += 1.0;
      tensor.pieces[2].values[3] += 0.5;
    }
  }
  const std::vector<Verdict> verdicts = references.compare(damaged, "float64");
  const Verdict* first = first_divergence(verdicts);
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first->rank, 1);
  EXPECT_EQ(first->element, 230);
  EXPECT_EQ(first->index, (std::vector<std::int64_t>{9, 14}));
  EXPECT_EQ(first->differing, 2);
  EXPECT_GT(first->allowed, 0);
  EXPECT_NEAR(first->worst_ratio, 1 / first->allowed, 0.01 / first->allowed);
  EXPECT_GT(first->ulp, 1000U);
}

TEST(BoundedComparison, AllowsAReferenceItsOwnDistanceFromFloat64OnTop) {
  References references(bounded_scenario("sgd", "float32", 0));
  references.step();
  const std::string name = "layers.0.linear.weight";
  StepTrace damaged = references.replay;
  for (TraceTensor& tensor : damaged.tensors) {
    if (tensor.quantity == Quantity::gradient && tensor.name == name) {
      tensor.pieces[0].values = tensor.pieces[0].values.clone();
      tensor.pieces[0].values[3][4] += 1.0;
    }
  }
  const auto element = [&](const StepTrace& trace) {
    return trace.find(Quantity::gradient, name)
        ->pieces[0]
        .values[3][4]
        .to(at::kDouble)
        .item<double>();
  };
  const double own = std::fabs(element(references.whole) - element(references.float64));
  ASSERT_GT(own, 0);
  const std::vector<Verdict> by_whole = references.compare(damaged, "whole");
  const std::vector<Verdict> by_float64 = references.compare(damaged, "float64");
  ASSERT_NE(first_divergence(by_whole), nullptr);
  ASSERT_NE(first_divergence(by_float64), nullptr);
  const double more = first_divergence(by_whole)->allowed - first_divergence(by_float64)->allowed;
  EXPECT_NEAR(more, own, 1e-9 * own);
}

TEST(BoundedComparison, WithoutTheRunsThatTheBoundIsMadeOfIsACallersMistake) {
  References references(bounded_scenario("sgd", "float32", 0));
  references.step();
  Expectation expectation;
  expectation.reference = "whole";
  expectation.want = &references.whole;
  EXPECT_THROW(compare_step(references.scenario, references.replay, expectation),
               std::invalid_argument);
}

// ---- Guards -------------------------------------------------------------------------------------

/// A run of three ranks and two steps in which everything is as it should be.
std::vector<StepTrace> sound_run() {
  std::vector<StepTrace> steps;
  for (int step = 0; step < 2; ++step) {
    TraceTensor losses =
        replicated(Quantity::loss, "loss", torch::tensor({1.0F}), 3, Placement::per_rank);
    TraceTensor outputs =
        replicated(Quantity::output, "model@m0", numbers({2}), 3, Placement::per_rank);
    for (int rank = 0; rank < 3; ++rank) {
      losses.pieces[static_cast<std::size_t>(rank)].values.fill_(5.0 - step + 0.25 * rank);
      outputs.pieces[static_cast<std::size_t>(rank)].values.fill_(rank);
    }
    const at::Tensor gradient = torch::tensor({3.0F, 4.0F});
    const at::Tensor parameter = torch::tensor({1.0F, 2.0F}) - 0.1 * step;
    StepTrace trace;
    trace.step = step;
    trace.tensors = {outputs,
                     losses,
                     sharded(Quantity::gradient, "w", gradient, {1, 1, 0}),
                     replicated(Quantity::total_norm, "total_norm", torch::tensor(5.0F), 3),
                     sharded(Quantity::clipped_gradient, "w", gradient / 5, {1, 1, 0}),
                     sharded(Quantity::parameter, "w", parameter, {1, 1, 0}),
                     sharded(Quantity::optimizer_state, "exp_avg/w", gradient, {1, 1, 0})};
    steps.push_back(std::move(trace));
  }
  return steps;
}

TraceTensor& tensor_of(StepTrace& trace, Quantity quantity) {
  return *std::find_if(trace.tensors.begin(), trace.tensors.end(),
                       [&](const TraceTensor& tensor) { return tensor.quantity == quantity; });
}

std::vector<Verdict> guard_verdicts(const std::vector<StepTrace>& steps, double max_norm = 1) {
  Scenario scenario = small_scenario();
  scenario.steps = static_cast<int>(steps.size());
  scenario.max_norm = max_norm;
  TrainingGuards guards(scenario);
  for (const StepTrace& step : steps) {
    guards.observe(step);
  }
  return guards.verdicts();
}

const Verdict& named(const std::vector<Verdict>& verdicts, const std::string& name) {
  return *std::find_if(verdicts.begin(), verdicts.end(),
                       [&](const Verdict& verdict) { return verdict.name == name; });
}

/// Does something to a sound run, which only the named guard must notice.
Verdict only_failure(const std::string& name,
                     const std::function<void(std::vector<StepTrace>&)>& damage) {
  std::vector<StepTrace> steps = sound_run();
  damage(steps);
  const std::vector<Verdict> verdicts = guard_verdicts(steps);
  for (const Verdict& verdict : verdicts) {
    EXPECT_EQ(verdict.outcome == Outcome::failed, verdict.name == name) << describe(verdict);
  }
  return named(verdicts, name);
}

TEST(TrainingGuards, PassForASoundRun) {
  for (const Verdict& verdict : guard_verdicts(sound_run())) {
    // Nothing is frozen in it.
    EXPECT_EQ(verdict.outcome, verdict.name == "frozen_parameters_stayed" ? Outcome::not_applicable
                                                                          : Outcome::passed)
        << describe(verdict);
    EXPECT_EQ(verdict.rule, RuleKind::guard);
    EXPECT_EQ(verdict.reference, "guard");
    EXPECT_EQ(verdict.check, "fsdp.guard." + verdict.name + ".float32.w3.mlp_adamw");
    EXPECT_NE(verdict.message, "");
  }
}

TEST(TrainingGuards, NoticeALossThatIsNotFinite) {
  expect_message(only_failure("losses_finite",
                              [](auto& steps) {
                                tensor_of(steps[1], Quantity::loss).pieces[2].values.fill_(kNan);
                              }),
                 "step 1, rank 2: nan");
}

TEST(TrainingGuards, NoticeALossThatNeverMoves) {
  expect_message(only_failure("losses_moved",
                              [](auto& steps) {
                                tensor_of(steps[1], Quantity::loss) =
                                    tensor_of(steps[0], Quantity::loss);
                              }),
                 "the mean loss is 5.25 in all 2 steps");
}

TEST(TrainingGuards, NoticeAGradientThatIsAlwaysZero) {
  const auto zero = [](Quantity quantity) {
    return [quantity](auto& steps) {
      for (StepTrace& step : steps) {
        for (Piece& piece : tensor_of(step, quantity).pieces) {
          piece.values.zero_();
        }
      }
    };
  };
  expect_message(only_failure("gradients_not_zero", zero(Quantity::gradient)),
                 "1 of 1 gradients were zero in all 2 steps: w");
}

TEST(TrainingGuards, AcceptAGradientThatIsZeroOnce) {
  std::vector<StepTrace> steps = sound_run();
  for (Piece& piece : tensor_of(steps[0], Quantity::gradient).pieces) {
    piece.values.zero_();
  }
  EXPECT_EQ(named(guard_verdicts(steps), "gradients_not_zero").outcome, Outcome::passed);
}

TEST(TrainingGuards, NoticeAParameterThatNeverMoves) {
  expect_message(only_failure("parameters_moved",
                              [](auto& steps) {
                                tensor_of(steps[1], Quantity::parameter) =
                                    tensor_of(steps[0], Quantity::parameter);
                              }),
                 "1 of 1 parameters are the same after each of 2 steps: w");
}

// ---- Recomputation ----------------------------------------------------------------------------

/// Two ranks' activations, saved and recomputed.
StepTrace recomputed_step(const at::Tensor& saved) {
  StepTrace trace;
  for (const auto quantity : {Quantity::saved_activation, Quantity::recomputed_activation}) {
    for (const auto* name : {"layers.0/0:aten::gelu@m0", "layers.1/0:aten::gelu@m0"}) {
      trace.tensors.push_back(replicated(quantity, name, saved, 2, Placement::per_rank));
    }
  }
  return trace;
}

Scenario recomputing_scenario() {
  auto scenario = small_scenario();
  scenario.world_size = 2;
  scenario.checkpointing.layers = "all";
  return scenario;
}

TEST(Recomputation, IsHeldToWhatTheSameRankSavedToTheBit) {
  const auto scenario = recomputing_scenario();
  auto trace = recomputed_step(torch::tensor({0.0F, 2.0F, 3.0F}));
  auto verdicts = compare_recomputation(scenario, trace);
  ASSERT_EQ(verdicts.size(), 2u);
  for (const auto& verdict : verdicts) {
    EXPECT_EQ(verdict.outcome, Outcome::passed) << verdict.message;
    EXPECT_EQ(verdict.rule, RuleKind::exact);
    EXPECT_EQ(verdict.reference, "stored");
    EXPECT_EQ(verdict.elements, 6);
  }
  trace.tensors[3].pieces[1].values = torch::tensor({-0.0F, 2.0F, 3.0F});
  verdicts = compare_recomputation(scenario, trace);
  EXPECT_EQ(verdicts[0].outcome, Outcome::passed);
  EXPECT_EQ(verdicts[1].outcome, Outcome::failed);
  EXPECT_EQ(verdicts[1].name, "layers.1/0:aten::gelu@m0");
  EXPECT_EQ(verdicts[1].rank, 1);
  EXPECT_EQ(verdicts[1].element, 0);
  EXPECT_EQ(verdicts[1].differing, 1);
}

TEST(Recomputation, ATensorThatIsMissingOnEitherSideFails) {
  const auto scenario = recomputing_scenario();
  for (const std::size_t missing : {0, 1, 2, 3}) {
    auto trace = recomputed_step(torch::tensor({1.0F}));
    trace.tensors.erase(trace.tensors.begin() + static_cast<std::ptrdiff_t>(missing));
    const auto verdicts = compare_recomputation(scenario, trace);
    EXPECT_EQ(std::count_if(verdicts.begin(), verdicts.end(),
                            [](const auto& each) { return each.outcome == Outcome::failed; }),
              1)
        << missing;
  }
}

TEST(Recomputation, NeedsNoOtherReferenceAndIsNothingWithoutRegions) {
  const auto scenario = recomputing_scenario();
  const auto trace = recomputed_step(torch::tensor({1.0F}));
  const StepTrace nothing;
  Expectation expectation;
  expectation.want = &nothing;
  for (const auto* reference : {"replay", "python", "whole"}) {
    expectation.reference = reference;
    EXPECT_TRUE(compare_step(scenario, trace, expectation).empty()) << reference;
  }
  EXPECT_TRUE(compare_recomputation(scenario, nothing).empty());
}

TEST(TrainingGuards, SeeWhetherEveryRegionRanAgainInEveryStep) {
  Scenario scenario;
  scenario.model.kind = "mlp";
  scenario.model.sizes = {4, 4, 4};
  scenario.data.kind = "synthetic";
  scenario.world_size = 2;
  scenario.steps = 2;
  scenario.checkpointing.layers = "all";
  const auto verdict_of = [&](const std::vector<std::size_t>& left_out) {
    TrainingGuards guards(scenario);
    for (int step = 0; step < 2; ++step) {
      auto trace = recomputed_step(torch::tensor({1.0F}));
      for (const auto* name : {"layers.0@m0", "layers.1@m0"}) {
        trace.tensors.push_back(
            replicated(Quantity::output, name, torch::tensor({1.0F}), 2, Placement::per_rank));
      }
      trace.step = step;
      if (step == 1) {
        for (const auto each : left_out) {
          trace.tensors.erase(trace.tensors.begin() + static_cast<std::ptrdiff_t>(each));
        }
      }
      guards.observe(trace);
    }
    return named(guards.verdicts(), "regions_ran_again");
  };
  EXPECT_EQ(verdict_of({}).outcome, Outcome::passed) << verdict_of({}).message;
  expect_message(verdict_of({3}), "nothing was recomputed of layers.1 at step 1");
  expect_message(verdict_of({2}), "nothing was recomputed of layers.0 at step 1");
  EXPECT_EQ(verdict_of({2}).outcome, Outcome::failed);
}

/// A run of a model with frozen and unused parameters, by the reference.
struct FrozenRun {
  FrozenRun() {
    scenario.model.kind = "quirks";
    scenario.model.quirks = {"frozen_bias", "unused"};
    scenario.data.kind = "synthetic";
    scenario.world_size = 2;
    scenario.steps = 2;
    scenario.max_norm = 0;
    start = initial_parameters(scenario);
    ReferenceTrainer trainer(scenario, ReferenceMode::replay, start);
    steps = {trainer.step(0), trainer.step(1)};
  }
  Verdict verdict(const std::string& name) const {
    TrainingGuards guards(scenario, start);
    for (const StepTrace& step : steps) {
      guards.observe(step);
    }
    return named(guards.verdicts(), name);
  }
  at::Tensor& parameter(std::size_t step, const std::string& name) {
    auto& tensors = steps[step].tensors;
    return std::find_if(tensors.begin(), tensors.end(),
                        [&](const TraceTensor& tensor) {
                          return tensor.quantity == Quantity::parameter && tensor.name == name;
                        })
        ->pieces[0]
        .values;
  }

  Scenario scenario;
  std::map<std::string, at::Tensor> start;
  std::vector<StepTrace> steps;
};

TEST(TrainingGuards, AcceptFrozenAndUnusedParametersThatStay) {
  const FrozenRun run;
  EXPECT_EQ(run.verdict("parameters_moved").outcome, Outcome::passed);
  EXPECT_EQ(run.verdict("parameters_moved").message, "each of 3 parameters changed");
  EXPECT_EQ(run.verdict("gradients_not_zero").outcome, Outcome::passed);
  EXPECT_EQ(run.verdict("frozen_parameters_stayed").outcome, Outcome::passed);
  // Three biases and spares, and the layer that never runs.
  EXPECT_EQ(run.verdict("frozen_parameters_stayed").message,
            "each of 9 parameters that are frozen or have no gradient stayed");
}

TEST(TrainingGuards, NoticeAFrozenOrUnusedParameterThatMoves) {
  for (const char* name : {"layers.1.linear.bias", "layers.0.spare", "spare_layer.linear.weight"}) {
    FrozenRun at_once;
    for (const std::size_t step : {0, 1}) {
      at::Tensor& values = at_once.parameter(step, name);
      values = values * 1.5;  // the same in both steps: only the start tells
    }
    expect_message(at_once.verdict("frozen_parameters_stayed"), name);
    FrozenRun later;
    at::Tensor& values = later.parameter(1, name);
    values = values * 1.5;
    expect_message(later.verdict("frozen_parameters_stayed"), "1 of 9 parameters");
  }
  FrozenRun trained;
  trained.steps[1].tensors.push_back(
      single(Quantity::gradient, "layers.1.linear.bias", torch::zeros({8})));
  expect_message(trained.verdict("frozen_parameters_stayed"),
                 "layers.1.linear.bias (it has a gradient)");
}

TEST(TrainingGuards, AcceptAStepThatWasLeftOut) {
  FrozenRun run;
  run.scenario.loss_scale = 1024;
  run.scenario.max_norm = 1;
  tensor_of(run.steps[0], Quantity::gradient).pieces[0].values.fill_(INFINITY);
  tensor_of(run.steps[0], Quantity::clipped_gradient).pieces[0].values.fill_(NAN);
  // The first step did nothing: no optimizer state yet, and the weights are those of the start.
  std::erase_if(run.steps[0].tensors, [](const TraceTensor& tensor) {
    return tensor.quantity == Quantity::optimizer_state;
  });
  for (TraceTensor& tensor : run.steps[0].tensors) {
    if (tensor.quantity == Quantity::parameter) {
      tensor.pieces[0].values = run.start.at(tensor.name);
    }
  }
  EXPECT_EQ(run.verdict("every_step_complete").outcome, Outcome::passed)
      << run.verdict("every_step_complete").message;
  EXPECT_EQ(run.verdict("parameters_moved").outcome, Outcome::passed);
  // Infinity times 0 is no clipping that bit.
  EXPECT_EQ(run.verdict("clipping_bit").outcome, Outcome::failed);
  // And without a loss scale such a step is not left out.
  run.scenario.loss_scale = 0;
  expect_message(run.verdict("every_step_complete"), "step 0 has no optimizer_state");
}

TEST(TrainingGuards, NoticeAClipThatNeverBites) {
  expect_message(
      only_failure("clipping_bit",
                   [](auto& steps) {
                     for (StepTrace& step : steps) {
                       tensor_of(step, Quantity::clipped_gradient).pieces =
                           tensor_of(step, Quantity::gradient).pieces;
                     }
                   }),
      "never exercised, every clipped gradient equals the gradient: norms from 5 to 5, max_norm 1");
  EXPECT_EQ(named(guard_verdicts(sound_run(), 0), "clipping_bit").outcome, Outcome::not_applicable);
}

TEST(TrainingGuards, NoticeTwoRanksWithTheSameData) {
  expect_message(only_failure("ranks_had_different_data",
                              [](auto& steps) {
                                for (StepTrace& step : steps) {
                                  for (const auto quantity : {Quantity::loss, Quantity::output}) {
                                    tensor_of(step, quantity).pieces[2].values =
                                        tensor_of(step, quantity).pieces[0].values.clone();
                                  }
                                }
                              }),
                 "ranks 0 and 2 have the same losses and outputs in all 2 steps");
}

TEST(TrainingGuards, AcceptLossesThatAgreeOnceByChance) {
  for (const std::size_t step : {0, 1}) {
    std::vector<StepTrace> steps = sound_run();
    const TraceTensor& losses = tensor_of(steps[step], Quantity::loss);
    losses.pieces[2].values.copy_(losses.pieces[0].values);
    EXPECT_EQ(named(guard_verdicts(steps), "ranks_had_different_data").outcome, Outcome::passed);
  }
}

TEST(TrainingGuards, NoticeOneCopyThatStandsForAllRanks) {
  expect_message(
      only_failure("every_rank_recorded",
                   [](auto& steps) {
                     tensor_of(steps[1], Quantity::total_norm) =
                         single(Quantity::total_norm, "total_norm", torch::tensor(5.0F));
                   }),
      "one copy stands for all 3 ranks, so the others were not compared, of: total_norm");
}

TEST(TrainingGuards, NoticeAStepThatLacksAQuantityATensorOrIsNotThere) {
  expect_message(only_failure("every_step_complete",
                              [](auto& steps) {
                                std::erase_if(steps[1].tensors, [](const TraceTensor& tensor) {
                                  return tensor.quantity == Quantity::optimizer_state;
                                });
                              }),
                 "step 1 has no optimizer_state");
  expect_message(
      only_failure(
          "every_step_complete",
          [](auto& steps) {
            steps[1].tensors.push_back(sharded(Quantity::gradient, "v", numbers({2}), {1, 1, 0}));
          }),
      "gradient \"v\"");
  expect_message(only_failure("every_step_complete", [](auto& steps) { steps[1].step = 2; }),
                 "step 2 follows step 0");
  Scenario scenario = small_scenario();
  scenario.steps = 3;
  TrainingGuards guards(scenario);
  for (const StepTrace& step : sound_run()) {
    guards.observe(step);
  }
  expect_message(named(guards.verdicts(), "every_step_complete"),
                 "2 steps were seen, the scenario has 3");
}

TEST(TrainingGuards, SayWhatOneStepCannotShow) {
  const std::vector<Verdict> verdicts = guard_verdicts({sound_run()[0]});
  EXPECT_EQ(named(verdicts, "losses_moved").outcome, Outcome::not_applicable);
  EXPECT_EQ(named(verdicts, "parameters_moved").outcome, Outcome::not_applicable);
  EXPECT_EQ(named(verdicts, "clipping_bit").outcome, Outcome::passed);
  EXPECT_EQ(named(verdicts, "every_step_complete").outcome, Outcome::passed);
}

TEST(TrainingGuards, PassForNoRunThatDidNotHappen) {
  const std::vector<Verdict> verdicts = guard_verdicts({});
  for (const Verdict& verdict : verdicts) {
    if (verdict.name != "every_step_complete") {
      EXPECT_NE(verdict.outcome, Outcome::passed) << describe(verdict);
    }
  }
}

TEST(TrainingGuards, HaveNothingToSayAboutRanksWhenThereIsOne) {
  Scenario scenario = small_scenario(1);
  TrainingGuards guards(scenario);
  EXPECT_EQ(named(guards.verdicts(), "ranks_had_different_data").outcome, Outcome::not_applicable);
  EXPECT_EQ(named(guards.verdicts(), "every_rank_recorded").outcome, Outcome::not_applicable);
}

TEST(TrainingGuards, AreSilentOnTheReferenceItself) {
  Scenario scenario = bounded_scenario("adamw", "float32", 0.1);
  scenario.steps = 3;
  References references(scenario);
  TrainingGuards guards(scenario);
  for (int step = 0; step < 3; ++step) {
    references.step();
    guards.observe(references.replay);
  }
  for (const Verdict& verdict : guards.verdicts()) {
    // The reference is one device and has one copy of everything: that guard is right to speak.
    EXPECT_EQ(verdict.outcome == Outcome::failed, verdict.name == "every_rank_recorded")
        << describe(verdict);
  }
}

}  // namespace
}  // namespace shardproof
