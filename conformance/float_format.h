#pragma once
// Tensors as the bits that they are.

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>

namespace shardproof {

/// The distance of a NaN from a number.
inline constexpr std::uint64_t kFurthest = std::numeric_limits<std::uint64_t>::max();

/// A floating format as the integers that its bit patterns are.
template <typename Integer, Integer kInfinityBits>
struct Format {
  using Bits = Integer;
  static constexpr Bits kInfinity = kInfinityBits;
  static constexpr Bits kSign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));

  static bool is_nan(Bits bits) { return static_cast<Bits>(bits & ~kSign) > kInfinity; }
  /// Increases with the value; -0 is just below +0.
  static Bits rank(Bits bits) {
    return (bits & kSign) != 0 ? static_cast<Bits>(~bits) : static_cast<Bits>(bits | kSign);
  }
  static std::uint64_t distance(Bits a, Bits b) {
    if (is_nan(a) != is_nan(b)) {
      return kFurthest;
    }
    const Bits low = std::min(rank(a), rank(b));
    const Bits high = std::max(rank(a), rank(b));
    return static_cast<std::uint64_t>(high) - low;
  }
};
using Float64 = Format<std::uint64_t, 0x7FF0'0000'0000'0000>;
using Float32 = Format<std::uint32_t, 0x7F80'0000>;
using Float16 = Format<std::uint16_t, 0x7C00>;
using BFloat16 = Format<std::uint16_t, 0x7F80>;

inline bool is_comparable(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kHalf ||
         dtype == at::kBFloat16;
}

/// Calls f with the format of a comparable dtype and a null pointer to its element type.
template <typename F>
auto with_format(at::ScalarType dtype, F f) {
  switch (dtype) {
    case at::kDouble:
      return f(Float64(), static_cast<const double*>(nullptr));
    case at::kFloat:
      return f(Float32(), static_cast<const float*>(nullptr));
    case at::kHalf:
      return f(Float16(), static_cast<const c10::Half*>(nullptr));
    case at::kBFloat16:
      return f(BFloat16(), static_cast<const c10::BFloat16*>(nullptr));
    default:
      throw std::invalid_argument(
          fmt::format("values of dtype {} cannot be compared", c10::toString(dtype)));
  }
}

inline double value_at(const void* values, std::int64_t i, at::ScalarType dtype) {
  return with_format(dtype, [&]<typename T>(auto, const T*) {
    return static_cast<double>(static_cast<const T*>(values)[i]);
  });
}

inline at::Tensor plain(const at::Tensor& tensor) {
  return tensor.detach().to(at::kCPU).contiguous();
}

}  // namespace shardproof
