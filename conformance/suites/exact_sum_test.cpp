// The exact sum of squares that the gradient norm is made of.

#include <fsdp/errors.h>
#include <fsdp/exact_sum.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <random>

namespace fsdp {
namespace {

double sum_of(const at::Tensor& values) {
  ExactSquareSum sum;
  sum.add(values);
  return sum.value();
}

TEST(ExactSquareSum, OfNothingIsZero) {
  EXPECT_EQ(ExactSquareSum().value(), 0.0);
  EXPECT_EQ(sum_of(torch::empty({0})), 0.0);
  EXPECT_EQ(sum_of(torch::zeros({7})), 0.0);
}

TEST(ExactSquareSum, OfThreeAndFourIsTwentyFiveInEveryDtype) {
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16}) {
    EXPECT_EQ(sum_of(torch::tensor({3.0, -4.0}, dtype)), 25.0) << dtype;
  }
}

TEST(ExactSquareSum, KeepsSmallSquaresBesideLargeOnes) {
  // 2^60 + 2^20 * 2^-20 = 2^60 + 1 is not a float64, but 2^60 + 512 is; a running float64 sum loses
  // every one of them, since half a unit in the last place of 2^60 is 128.
  auto values = torch::full({(1 << 20) + 1}, 0.0, torch::kFloat);
  values.fill_(std::ldexp(1.0, -10));                                // squares 2^-20
  values[0] = std::ldexp(1.0, 30);                                   // square 2^60
  EXPECT_EQ(sum_of(values), std::ldexp(1.0, 60));                    // + 1 rounds away
  values.fill_(std::ldexp(1.0, -5) * std::sqrt(0.5) * 0 + 0.03125);  // squares 2^-10: together 1024
  values[0] = std::ldexp(1.0, 30);
  EXPECT_EQ(sum_of(values), std::ldexp(1.0, 60) + 1024);
}

TEST(ExactSquareSum, RoundsToNearestAndTiesToEven) {
  // 2^53 + 1 is halfway between 2^53 and 2^53 + 2: even is 2^53. A further 2^-40 breaks the tie
  // upwards.
  const auto two_53 = std::vector<double>(2, std::ldexp(1.0, 26));  // 2 * 2^52
  auto values = torch::tensor({two_53[0], two_53[1], 1.0}, torch::kFloat);
  EXPECT_EQ(sum_of(values), std::ldexp(1.0, 53));
  values = torch::tensor({two_53[0], two_53[1], 1.0, std::ldexp(1.0, -20)}, torch::kFloat);
  EXPECT_EQ(sum_of(values), std::ldexp(1.0, 53) + 2);
}

TEST(ExactSquareSum, IsTheSameInAnyOrderAndAnyGrouping) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  // Magnitudes over 80 binades, so that every order of float64 additions would round differently.
  const auto exponents = torch::rand({100003}, generator).mul(80).sub(40);
  const auto values = torch::randn({100003}, generator) * torch::exp2(exponents);
  const double whole = sum_of(values);
  EXPECT_EQ(sum_of(values.flip(0)), whole);
  for (const int parts : {2, 3, 7, 64}) {
    auto words = torch::zeros({ExactSquareSum::kWords}, torch::kLong);
    for (const auto& part : values.tensor_split(parts)) {
      ExactSquareSum sum;
      sum.add(part);
      words += sum.words();
    }
    EXPECT_EQ(ExactSquareSum::from_words(words).value(), whole) << parts << " parts";
  }
  const double naive = values.to(torch::kDouble).square().sum().item<double>();
  EXPECT_NEAR(whole / naive, 1.0, 1e-12);
}

TEST(ExactSquareSum, AgreesWithIntegerArithmetic) {
  // Integers below 2^12: squares and sums are exact in int64.
  const auto integers = torch::randint(-4095, 4096, {1 << 18}, torch::kLong);
  const auto expected = integers.square().sum().item<std::int64_t>();
  EXPECT_EQ(sum_of(integers.to(torch::kFloat)), static_cast<double>(expected));
  EXPECT_EQ(sum_of(integers.to(torch::kDouble)), static_cast<double>(expected));
}

TEST(ExactSquareSum, HoldsTheSmallestAndTheLargestNumbers) {
  const float smallest = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(sum_of(torch::tensor({smallest})), std::ldexp(1.0, -298));
  const float largest = std::numeric_limits<float>::max();
  EXPECT_EQ(sum_of(torch::tensor({largest})), static_cast<double>(largest) * largest);
  // The square of a float64 below 2^-537 is not a normal number: 2^-1074 is the least that can be
  // told from zero.
  EXPECT_EQ(sum_of(torch::tensor({std::ldexp(1.0, -537)}, torch::kDouble)), std::ldexp(1.0, -1074));
  EXPECT_EQ(sum_of(torch::tensor({std::ldexp(1.0, -600)}, torch::kDouble)), 0.0);
  // Many squares too small to be float64 numbers make one that is: 2^20 * 2^-1084 = 2^-1064.
  EXPECT_EQ(sum_of(torch::full({1 << 20}, std::ldexp(1.0, -542), torch::kDouble)),
            std::ldexp(1.0, -1064));
  EXPECT_EQ(sum_of(torch::tensor({1e200, 1.0}, torch::kDouble)),
            std::numeric_limits<double>::infinity());
}

TEST(ExactSquareSum, TellsNanFromInfinityWhateverTheOrder) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16}) {
    EXPECT_TRUE(std::isnan(sum_of(torch::tensor({1.0f, nan, infinity}).to(dtype)))) << dtype;
    EXPECT_EQ(sum_of(torch::tensor({1.0f, -infinity}).to(dtype)),
              std::numeric_limits<double>::infinity())
        << dtype;
  }
}

TEST(ExactSquareSum, ReadsStridedTensors) {
  const auto values = torch::arange(12, torch::kFloat).view({3, 4});
  EXPECT_EQ(sum_of(values.t()), 506.0);  // sum of squares 0..11 = 11 * 12 * 23 / 6
  EXPECT_EQ(sum_of(values.select(1, 0)), 0.0 + 16 + 64);
}

TEST(ExactSquareSum, DoesNotOverflowItsIntermediateSums) {
  // The largest mantissa, 2^24 - 1, in more elements than a block has: 3 * 2^16 * (2^24 - 1)^2.
  const std::int64_t count = 3 << 16;
  const double mantissa = (1 << 24) - 1;
  const auto square = static_cast<std::uint64_t>(mantissa * mantissa);
  const auto expected = static_cast<unsigned __int128>(square) * count;
  EXPECT_EQ(sum_of(torch::full({count}, mantissa, torch::kFloat)), static_cast<double>(expected));
}

TEST(ExactSquareSum, RefusesIntegers) {
  EXPECT_THROW(sum_of(torch::ones({2}, torch::kLong)), UsageError);
  EXPECT_THROW(ExactSquareSum::from_words(torch::zeros({3}, torch::kLong)), UsageError);
}

}  // namespace
}  // namespace fsdp
