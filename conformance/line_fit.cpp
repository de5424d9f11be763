#include "conformance/line_fit.h"

#include <cmath>
#include <numbers>
#include <stdexcept>

namespace shardproof {
namespace {

/// P(0 <= t <= limit), by Simpson's rule over t = sqrt(degrees) tan(angle), whose density in the
/// angle is a power of its cosine.
double central_half(int degrees, double limit) {
  const double end = std::atan(limit / std::sqrt(degrees));
  const auto density = [degrees](double angle) { return std::pow(std::cos(angle), degrees - 1); };
  constexpr int kSteps = 2000;
  double sum = density(0) + density(end);
  for (int i = 1; i < kSteps; ++i) {
    sum += density(end * i / kSteps) * (i % 2 == 1 ? 4 : 2);
  }
  const double scale = std::exp(std::lgamma((degrees + 1) / 2.0) - std::lgamma(degrees / 2.0)) /
                       std::sqrt(std::numbers::pi);
  return scale * sum * end / kSteps / 3;
}

}  // namespace

double student_t_975(int degrees) {
  double low = 0;
  double high = 1000;
  for (int i = 0; i < 100; ++i) {
    const double middle = (low + high) / 2;
    (central_half(degrees, middle) < 0.475 ? low : high) = middle;
  }
  return low;
}

LineFit fit_line(const std::vector<std::pair<double, double>>& points) {
  if (points.size() < 3) {
    throw std::invalid_argument("fit_line: fewer than three points leave no residual to judge by");
  }
  const auto n = static_cast<double>(points.size());
  double mean_x = 0;
  double mean_y = 0;
  for (const auto& [x, y] : points) {
    mean_x += x / n;
    mean_y += y / n;
  }
  double xx = 0;
  double xy = 0;
  for (const auto& [x, y] : points) {
    xx += (x - mean_x) * (x - mean_x);
    xy += (x - mean_x) * (y - mean_y);
  }
  if (xx == 0) {
    throw std::invalid_argument("fit_line: all points have the same x");
  }
  LineFit fit;
  fit.slope = xy / xx;
  fit.intercept = mean_y - fit.slope * mean_x;
  double residuals = 0;
  for (const auto& [x, y] : points) {
    residuals += std::pow(y - fit.intercept - fit.slope * x, 2);
  }
  const int degrees = static_cast<int>(points.size()) - 2;
  fit.half_width = student_t_975(degrees) * std::sqrt(residuals / degrees / xx);
  return fit;
}

LineFit fit_power(const std::vector<std::pair<double, double>>& points) {
  std::vector<std::pair<double, double>> logs;
  for (const auto& [x, y] : points) {
    logs.emplace_back(std::log(x), std::log(y));
  }
  return fit_line(logs);
}

}  // namespace shardproof
