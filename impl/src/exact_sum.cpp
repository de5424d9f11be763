#include "fsdp/exact_sum.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "fsdp/errors.h"

namespace fsdp {
namespace {

// The digit 0 weighs 2^kLowest, the square of the smallest float64.
constexpr int kLowest = -2148;
constexpr std::uint64_t kDigitMask = 0xFFFFFFFF;

constexpr int kFloatExponents = 256;
constexpr int kFloatMantissaBits = 23;
// A float is mantissa * 2^(exponent - kFloatBias) with a 24-bit mantissa; its square has 48 bits,
// so this many fit into 64.
constexpr int kFloatBias = 150;
constexpr std::int64_t kFloatBlock = std::int64_t{1} << 16;
constexpr int kLanes = 4;

constexpr int kDoubleMantissaBits = 52;
constexpr int kDoubleBias = 1075;

}  // namespace

void ExactSquareSum::add_at(unsigned __int128 value, int exponent) {
  const int position = exponent - kLowest;
  int digit = position / 32;
  const int shift = position % 32;
  // The shifted value may have more than 128 bits, so its lowest digit is taken off first.
  digits_[digit++] += static_cast<std::uint64_t>(value << shift) & kDigitMask;
  for (auto rest = value >> (32 - shift); rest != 0; rest >>= 32) {
    digits_[digit++] += static_cast<std::uint64_t>(rest) & kDigitMask;
  }
}

void ExactSquareSum::carry() {
  for (int i = 0; i + 1 < kDigits; ++i) {
    digits_[i + 1] += digits_[i] >> 32;
    digits_[i] &= kDigitMask;
  }
}

void ExactSquareSum::add_float(const float* values, std::int64_t count) {
  // One 64-bit sum per exponent, in a few lanes so that neighbouring elements of the same exponent
  // do not wait for each other.
  static_assert(kFloatBlock / kLanes * ((std::uint64_t{1} << 48) - 1) <
                std::numeric_limits<std::uint64_t>::max() / kLanes);
  std::array<std::array<std::uint64_t, kFloatExponents>, kLanes> sums;
  for (std::int64_t begin = 0; begin < count; begin += kFloatBlock) {
    const std::int64_t end = std::min(count, begin + kFloatBlock);
    for (auto& lane : sums) {
      lane.fill(0);
    }
    const auto accumulate = [&](int lane, float value) {
      const auto bits = std::bit_cast<std::uint32_t>(value);
      const std::uint32_t exponent = (bits >> kFloatMantissaBits) & 0xFF;
      const std::uint64_t fraction = bits & 0x7FFFFF;
      const std::uint64_t mantissa =
          fraction | (std::uint64_t{exponent != 0} << kFloatMantissaBits);
      sums[lane][exponent] += mantissa * mantissa;
    };
    std::int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        accumulate(lane, values[i + lane]);
      }
    }
    for (; i < end; ++i) {
      accumulate(0, values[i]);
    }
    std::uint64_t special = 0;
    for (const auto& lane : sums) {
      special |= lane[kFloatExponents - 1];
    }
    if (special != 0) {
      for (i = begin; i < end; ++i) {
        nans_ += std::isnan(values[i]);
        infinities_ += std::isinf(values[i]);
      }
    }
    for (int exponent = 0; exponent < kFloatExponents - 1; ++exponent) {
      std::uint64_t sum = 0;
      for (const auto& lane : sums) {
        sum += lane[exponent];
      }
      if (sum != 0) {
        add_at(sum, 2 * (std::max(exponent, 1) - kFloatBias));
      }
    }
    carry();
  }
}

void ExactSquareSum::add_double(const double* values, std::int64_t count) {
  // Every addition raises a digit by less than 2^32.
  constexpr std::int64_t kBlock = std::int64_t{1} << 30;
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const std::int64_t end = std::min(count, begin + kBlock);
    for (std::int64_t i = begin; i < end; ++i) {
      if (!std::isfinite(values[i])) {
        nans_ += std::isnan(values[i]);
        infinities_ += std::isinf(values[i]);
        continue;
      }
      const auto bits = std::bit_cast<std::uint64_t>(values[i]);
      const int exponent = static_cast<int>((bits >> kDoubleMantissaBits) & 0x7FF);
      const std::uint64_t mantissa = (bits & ((std::uint64_t{1} << kDoubleMantissaBits) - 1)) |
                                     (std::uint64_t{exponent != 0} << kDoubleMantissaBits);
      const auto square = static_cast<unsigned __int128>(mantissa) * mantissa;
      if (square != 0) {
        add_at(square, 2 * (std::max(exponent, 1) - kDoubleBias));
      }
    }
    carry();
  }
}

void ExactSquareSum::add_on_device(const at::Tensor& values) {
  // The same per-exponent sums by integer tensor operations, which give the same result in any
  // order. Squares are split into two halves of 24 bits so that 2^39 of them fit into an int64.
  constexpr std::int64_t kChunk = std::int64_t{1} << 22;
  const auto flat = values.reshape({-1});
  const auto options = flat.options().dtype(at::kLong);
  auto low = at::zeros({kFloatExponents}, options);
  auto high = at::zeros({kFloatExponents}, options);
  for (std::int64_t begin = 0; begin < flat.numel(); begin += kChunk) {
    const auto bits = flat.narrow(0, begin, std::min(kChunk, flat.numel() - begin))
                          .to(at::kFloat)
                          .view(at::kInt)
                          .to(at::kLong);
    const auto exponent = bits.bitwise_right_shift(kFloatMantissaBits).bitwise_and(0xFF);
    const auto mantissa =
        bits.bitwise_and(0x7FFFFF) + exponent.ne(0).to(at::kLong) * (1 << kFloatMantissaBits);
    const auto square = mantissa * mantissa;
    low.scatter_add_(0, exponent, square.bitwise_and(0xFFFFFF));
    high.scatter_add_(0, exponent, square.bitwise_right_shift(24));
  }
  low = low.cpu();
  high = high.cpu();
  if (low[kFloatExponents - 1].item<std::int64_t>() != 0 ||
      high[kFloatExponents - 1].item<std::int64_t>() != 0) {
    nans_ += flat.isnan().sum().item<std::int64_t>();
    infinities_ += flat.isinf().sum().item<std::int64_t>();
  }
  for (int exponent = 0; exponent < kFloatExponents - 1; ++exponent) {
    const int weight = 2 * (std::max(exponent, 1) - kFloatBias);
    add_at(static_cast<std::uint64_t>(low.data_ptr<std::int64_t>()[exponent]), weight);
    add_at(static_cast<std::uint64_t>(high.data_ptr<std::int64_t>()[exponent]), weight + 24);
  }
  carry();
}

void ExactSquareSum::add(const at::Tensor& values) {
  const auto dtype = values.scalar_type();
  const bool narrow = dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
  if (!narrow && dtype != at::kDouble) {
    throw UsageError(
        fmt::format("ExactSquareSum: dtype {}; wanted: float64, float32, bfloat16 or float16",
                    c10::toString(dtype)));
  }
  if (values.numel() == 0) {
    return;
  }
  const auto detached = values.detach();
  if (narrow && !detached.is_cpu()) {
    add_on_device(detached);
  } else if (narrow) {
    // Every value of the narrow dtypes is a float.
    const auto floats = detached.to(at::kFloat).contiguous();
    add_float(floats.data_ptr<float>(), floats.numel());
  } else {
    const auto doubles = detached.cpu().contiguous();
    add_double(doubles.data_ptr<double>(), doubles.numel());
  }
}

void ExactSquareSum::add_powers(const at::Tensor& values, double p) {
  if (!at::isFloatingType(values.scalar_type())) {
    throw UsageError(fmt::format("ExactSquareSum: dtype {}; wanted: a floating-point dtype",
                                 c10::toString(values.scalar_type())));
  }
  if (!(p > 0) || std::isinf(p)) {
    throw UsageError(
        fmt::format("ExactSquareSum: the power {}; wanted: a positive finite number", p));
  }
  const auto doubles = values.detach().cpu().to(at::kDouble).contiguous();
  const auto* data = doubles.const_data_ptr<double>();
  // Every addition raises a digit by less than 2^32.
  constexpr std::int64_t kBlock = std::int64_t{1} << 30;
  for (std::int64_t i = 0; i < doubles.numel(); ++i) {
    const double size = std::abs(data[i]);
    const double power = p == 1 ? size : std::pow(size, p);
    if (!std::isfinite(power)) {
      nans_ += std::isnan(power);
      infinities_ += std::isinf(power);
    } else if (power > 0) {
      const auto bits = std::bit_cast<std::uint64_t>(power);
      const int exponent = static_cast<int>((bits >> kDoubleMantissaBits) & 0x7FF);
      const std::uint64_t mantissa = (bits & ((std::uint64_t{1} << kDoubleMantissaBits) - 1)) |
                                     (std::uint64_t{exponent != 0} << kDoubleMantissaBits);
      add_at(mantissa, std::max(exponent, 1) - kDoubleBias);
    }
    if ((i + 1) % kBlock == 0) {
      carry();
    }
  }
  carry();
}

at::Tensor ExactSquareSum::words() const {
  auto words = at::empty({kWords}, at::kLong);
  auto* out = words.data_ptr<std::int64_t>();
  for (int i = 0; i < kDigits; ++i) {
    out[i] = static_cast<std::int64_t>(digits_[i]);
  }
  out[kDigits] = nans_;
  out[kDigits + 1] = infinities_;
  return words;
}

ExactSquareSum ExactSquareSum::from_words(const at::Tensor& words) {
  if (words.scalar_type() != at::kLong || words.numel() != kWords) {
    throw UsageError(fmt::format("ExactSquareSum: words are {} of {}; wanted: {} of int64",
                                 words.numel(), c10::toString(words.scalar_type()), kWords));
  }
  const auto local = words.cpu().contiguous();
  const auto* in = local.data_ptr<std::int64_t>();
  ExactSquareSum sum;
  for (int i = 0; i < kDigits; ++i) {
    sum.digits_[i] = static_cast<std::uint64_t>(in[i]);
  }
  sum.nans_ = in[kDigits];
  sum.infinities_ = in[kDigits + 1];
  sum.carry();
  return sum;
}

double ExactSquareSum::value() const {
  if (nans_ > 0) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  if (infinities_ > 0) {
    return std::numeric_limits<double>::infinity();
  }
  ExactSquareSum carried = *this;
  carried.carry();
  const auto& digits = carried.digits_;
  int top = kDigits - 1;
  while (top >= 0 && digits[top] == 0) {
    --top;
  }
  if (top < 0) {
    return 0;
  }
  // Positions are bits above 2^kLowest.
  const auto bit = [&digits](int position) {
    return position >= 0 && ((digits[position / 32] >> (position % 32)) & 1) != 0;
  };
  const int highest = 32 * top + std::bit_width(digits[top]) - 1;
  // The last bit that the result can hold: 53 significant bits, but none below the smallest
  // subnormal.
  const int last = std::max(highest - kDoubleMantissaBits, -1074 - kLowest);
  std::uint64_t mantissa = 0;
  for (int position = highest; position >= last; --position) {
    mantissa = 2 * mantissa + bit(position);
  }
  bool below = false;
  for (int position = last - 2; position >= 0 && !below; --position) {
    below = bit(position);
  }
  if (bit(last - 1) && (below || (mantissa & 1) != 0)) {
    ++mantissa;
  }
  return std::ldexp(static_cast<double>(mantissa), last + kLowest);
}

}  // namespace fsdp
