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

/// A sum of squares of finite float64 numbers, held as one big integer in units of the square of
/// the smallest such number, 2^-1074. It is long enough that no sum of fewer than 2^64 squares
/// overflows, so that addition never rounds.
class SumOfSquares {
 public:
  void add(double value) {
    // value = significand * 2^(exponent + kSmallest), all integers, so that its square is one too.
    // Subnormal numbers have the exponent field 0, no leading 1, and the scale of the field 1.
    const auto bits = std::bit_cast<std::uint64_t>(value);
    const auto field = static_cast<int>(bits >> (kDigits - 1) & 0x7FF);
    const std::uint64_t leading = field == 0 ? 0 : std::uint64_t{1} << (kDigits - 1);
    const std::uint64_t significand = (bits & ((std::uint64_t{1} << (kDigits - 1)) - 1)) | leading;
    const int exponent = std::max(field, 1) - 1;
    add_at(static_cast<Wide>(significand) * significand, 2 * exponent);
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

}  // namespace

torch::Tensor exact_norm(const std::vector<torch::Tensor>& tensors) {
  if (tensors.empty()) {
    return torch::zeros({}, torch::kFloat32);
  }
  const auto dtype = tensors.front().scalar_type();
  SumOfSquares sum;
  bool has_infinity = false;
  bool has_nan = false;
  for (const auto& tensor : tensors) {
    if (tensor.scalar_type() != dtype) {
      throw std::invalid_argument(fmt::format("exact_norm: tensors of dtype {} and {}; wanted: one",
                                              c10::toString(dtype),
                                              c10::toString(tensor.scalar_type())));
    }
    const auto values = tensor.detach().to(torch::kCPU, torch::kFloat64).contiguous();
    const auto* value = values.const_data_ptr<double>();
    for (std::int64_t i = 0; i < values.numel(); ++i) {
      if (std::isfinite(value[i])) {
        sum.add(value[i]);
      } else {
        has_nan = has_nan || std::isnan(value[i]);
        has_infinity = true;
      }
    }
  }
  double norm = std::sqrt(sum.rounded());
  if (has_nan) {
    norm = std::numeric_limits<double>::quiet_NaN();
  } else if (has_infinity) {
    norm = std::numeric_limits<double>::infinity();
  }
  return torch::full({}, norm, torch::kFloat64).to(tensors.front().options());
}

}  // namespace shardproof
