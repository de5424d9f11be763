#pragma once
// A straight line through points by least squares, with a confidence interval for its slope.

#include <utility>
#include <vector>

namespace shardproof {

struct LineFit {
  double slope = 0;
  double intercept = 0;
  /// The slope's 95 % interval is slope +- this: t(0.975; n - 2) s / sqrt(sum (x - mean x)^2), with
  /// s^2 = sum of squared residuals / (n - 2). It takes residuals for independent and normal. Those
  /// of counted figures are neither: they are the curve's bend away from a line, so the interval
  /// says how far a power law fits, not what another measurement would give.
  double half_width = 0;
};
/// Throws std::invalid_argument for fewer than three points, or if all have the same x.
LineFit fit_line(const std::vector<std::pair<double, double>>& points);
/// The exponent p of y = c x^p: the line through (ln x, ln y).
LineFit fit_power(const std::vector<std::pair<double, double>>& points);

/// The value that a variable of Student's t distribution with so many degrees of freedom exceeds
/// with probability 0.025.
double student_t_975(int degrees);

}  // namespace shardproof
