#pragma once
// An exact sum of squares. The square of every finite floating-point number is a binary integer
// times a power of two, so a wide enough fixed-point number holds any sum of them without rounding.
// Hence the gradient norm depends neither on the order of the elements, nor on how they are grouped
// into tensors, shards and ranks, nor on the backend that adds the ranks' parts: integer addition
// is associative. (The idea of a superaccumulator: Kulisch and Miranker, 1981; the small one of R.
// Neal, "Fast exact summation using small and large superaccumulators", arXiv:1505.05571.)

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

namespace fsdp {

class ExactSquareSum {
 public:
  /// Words of the fixed-point number (base 2^32, least significant first), then the number of NaNs,
  /// then of infinities.
  static constexpr int kDigits = 136;
  static constexpr int kWords = kDigits + 2;

  /// Adds the squares of all elements: any shape and strides, float64, float32, bfloat16 or
  /// float16, on any device. Throws UsageError for other dtypes.
  void add(const at::Tensor& values);
  /// Adds |value|^p for all elements instead: each is converted to float64 and raised by the C
  /// library's pow (not for p = 1), and the results are added without rounding. p must be positive
  /// and finite.
  void add_powers(const at::Tensor& values, double p);

  /// int64 [kWords] on the CPU. Summing such tensors elementwise, over up to 2^31 ranks, merges the
  /// sums.
  at::Tensor words() const;
  static ExactSquareSum from_words(const at::Tensor& words);

  /// The sum rounded to float64 once, to nearest and ties to even. NaN if a NaN was added, else
  /// infinity if an infinity was added or the sum exceeds the range of float64.
  double value() const;

 private:
  void add_float(const float* values, std::int64_t count);
  void add_double(const double* values, std::int64_t count);
  void add_on_device(const at::Tensor& values);
  void add_at(unsigned __int128 value, int exponent);
  void carry();

  // Each digit is kept below 2^63 by carrying often enough.
  std::array<std::uint64_t, kDigits> digits_{};
  std::int64_t nans_ = 0;
  std::int64_t infinities_ = 0;
};

}  // namespace fsdp
