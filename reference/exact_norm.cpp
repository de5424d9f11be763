// The norm that clipping uses. The library under test has an implementation of its own; this one
// shares nothing with it.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>

#include "reference/trainer.h"

namespace shardproof {
namespace {

// An unsigned integer of 128 bits is no part of C++, but of every compiler that builds libtorch.
__extension__ typedef unsigned __int128 Wide;

/// A sum of magnitudes, or of squares, of finite float64 numbers, held as one big integer in units
/// of the square of the smallest such number, 2^-1074. It is long enough that no sum of fewer than
/// 2^64 squares overflows, so that addition never rounds.
class ExactSum {
 public:
  void add_square(double value) {
    const Parts parts(value);
    add_at(static_cast<Wide>(parts.significand) * parts.significand, 2 * parts.exponent);
  }
  void add_magnitude(double value) {
    const Parts parts(value);
    add_at(parts.significand, parts.exponent - kSmallest);
  }

  /// Rounded to nearest, ties to even; infinity if it is too large for a float64.
  double rounded() const {
    int top = kBits - 1;
    while (top >= 0 && !bit(top)) {
      --top;
    }
    // The last bit that the result can hold: 53 from the top, but none below the smallest float64.
    const int last = std::max(top - (kDigits - 1), -kSmallest);
    std::uint64_t significand = 0;
    for (int i = top; i >= last; --i) {
      significand = 2 * significand + (bit(i) ? 1 : 0);
    }
    const bool half = bit(last - 1);
    bool beyond_half = false;
    for (int i = last - 2; i >= 0 && !beyond_half; --i) {
      beyond_half = bit(i);
    }
    if (half && (beyond_half || significand % 2 == 1)) {
      ++significand;
    }
    return std::ldexp(static_cast<double>(significand), last + 2 * kSmallest);
  }

 private:
  static constexpr int kDigits = std::numeric_limits<double>::digits;
  static constexpr int kSmallest = -1074;  // exponent of the smallest positive float64
  static constexpr int kLargest = 1024;    // every finite float64 is below 2 to this
  static constexpr int kBits = 2 * (kLargest - kSmallest) + 64;

  /// |value| = significand * 2^(exponent + kSmallest), all integers, so that its square is one too.
  struct Parts {
    explicit Parts(double value) {
      // Subnormal numbers have the exponent field 0, no leading 1, and the scale of the field 1.
      const auto bits = std::bit_cast<std::uint64_t>(value);
      const auto field = static_cast<int>(bits >> (kDigits - 1) & 0x7FF);
      const std::uint64_t leading = field == 0 ? 0 : std::uint64_t{1} << (kDigits - 1);
      significand = (bits & ((std::uint64_t{1} << (kDigits - 1)) - 1)) | leading;
      exponent = std::max(field, 1) - 1;
    }
    std::uint64_t significand;
    int exponent;
  };

  void add_at(Wide square, int position) {
    const int offset = position % 64;
    auto limb = static_cast<std::size_t>(position / 64);
    // Up to 106 bits, moved by up to 63, stand in three limbs.
    const auto low = static_cast<std::uint64_t>(square);
    const auto high = static_cast<std::uint64_t>(square >> 64);
    const Wide lower = static_cast<Wide>(low) << offset;
    const Wide upper = (static_cast<Wide>(high) << offset) + (lower >> 64);
    const std::array<std::uint64_t, 3> parts = {static_cast<std::uint64_t>(lower),
                                                static_cast<std::uint64_t>(upper),
                                                static_cast<std::uint64_t>(upper >> 64)};
    std::uint64_t carry = 0;
    for (std::size_t i = 0; i < parts.size() || carry != 0; ++i, ++limb) {
      const Wide sum = static_cast<Wide>(limbs_[limb]) + (i < parts.size() ? parts[i] : 0) + carry;
      limbs_[limb] = static_cast<std::uint64_t>(sum);
      carry = static_cast<std::uint64_t>(sum >> 64);
    }
  }

  bool bit(int i) const {
    return i >= 0 && (limbs_[static_cast<std::size_t>(i / 64)] >> (i % 64) & 1) != 0;
  }

  // Two more than the bits need, for the upper parts of the largest squares.
  std::array<std::uint64_t, kBits / 64 + 3> limbs_{};
};

/// What the elements come to, one after another.
class PowerNorm {
 public:
  explicit PowerNorm(double p) : p_(p) {}

  void add(double value) {
    has_nan_ = has_nan_ || std::isnan(value);
    const double magnitude = std::fabs(value);
    if (p_ == 2 && std::isfinite(value)) {
      sum_.add_square(value);
    } else if (std::isinf(p_)) {
      largest_ = std::max(largest_, magnitude);
    } else {
      const double power = p_ == 1 || p_ == 2 ? magnitude : std::pow(magnitude, p_);
      if (std::isfinite(power)) {
        sum_.add_magnitude(power);
      } else {
        has_infinity_ = true;
      }
    }
  }

  double value() const {
    if (has_nan_) {
      return std::numeric_limits<double>::quiet_NaN();
    }
    if (has_infinity_) {
      return std::numeric_limits<double>::infinity();
    }
    if (std::isinf(p_)) {
      return largest_;
    }
    const double sum = sum_.rounded();
    return p_ == 1 ? sum : p_ == 2 ? std::sqrt(sum) : std::pow(sum, 1 / p_);
  }

 private:
  double p_;
  ExactSum sum_;
  double largest_ = 0;
  bool has_nan_ = false;
  bool has_infinity_ = false;
};

/// A float32 that a 16-bit dtype rounds to what it would round the value to, which is not negative.
/// libtorch casts to 16 bits through float32, which would round twice: a value between two float32
/// goes to the one whose last bit is odd, which is never halfway between two 16-bit numbers (Boldo
/// and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
double odd_float(double value) {
  auto narrow = static_cast<float>(value);
  if (std::isfinite(value) && static_cast<double>(narrow) != value) {
    if (narrow > value) {
      narrow = std::nextafter(narrow, 0.0F);
    }
    narrow = std::bit_cast<float>(std::bit_cast<std::uint32_t>(narrow) | 1U);
  }
  return narrow;
}

}  // namespace

torch::Tensor exact_norm(const std::vector<torch::Tensor>& tensors, double p) {
  if (!(p > 0)) {
    throw std::invalid_argument(
        fmt::format("exact_norm: p is {}; wanted: a number above 0, or infinity", p));
  }
  if (tensors.empty()) {
    return torch::zeros({}, torch::kFloat32);
  }
  const auto dtype = tensors.front().scalar_type();
  PowerNorm norm(p);
  for (const auto& tensor : tensors) {
    if (tensor.scalar_type() != dtype) {
      throw std::invalid_argument(fmt::format("exact_norm: tensors of dtype {} and {}; wanted: one",
                                              c10::toString(dtype),
                                              c10::toString(tensor.scalar_type())));
    }
    const auto values = tensor.detach().to(torch::kCPU, torch::kFloat64).contiguous();
    const auto* value = values.const_data_ptr<double>();
    for (std::int64_t i = 0; i < values.numel(); ++i) {
      norm.add(value[i]);
    }
  }
  const bool is_short = dtype == torch::kBFloat16 || dtype == torch::kFloat16;
  const double value = is_short ? odd_float(norm.value()) : norm.value();
  return torch::full({}, value, torch::kFloat64).to(tensors.front().options());
}

}  // namespace shardproof
