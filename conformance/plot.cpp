#include "conformance/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "conformance/html.h"

namespace shardproof {
namespace {

constexpr double kWidth = 640;
constexpr double kLeft = 76;
constexpr double kRight = 16;
constexpr double kTop = 34;
constexpr double kPlotHeight = 250;
constexpr double kBelow = 46;  // tick labels and the axis label
constexpr double kLegendLine = 18;
constexpr int kMostTicks = 9;

// Okabe and Ito's colours, which differ for the colour-blind and show on white and on black; each
// with a mark of its own for paper without colour.
constexpr std::array<const char*, 6> kColours = {"#0072b2", "#d55e00", "#009e73",
                                                 "#cc79a7", "#b8860b", "#56b4e9"};

/// A scaled axis: values to places between 0 and 1.
class Axis {
 public:
  Axis(const PlotAxis& axis, double low, double high) : scale_(axis.scale) {
    if (!(low <= high)) {  // no points
      low = scale_ == AxisScale::linear ? 0 : 1;
      high = scale_ == AxisScale::log2 ? 2 : 10;
    }
    low_ = place_of(low);
    high_ = place_of(high);
    if (scale_ == AxisScale::linear) {
      // A flat line in the middle; else a little room.
      const double room = low_ < high_ ? 0.04 * (high_ - low_) : std::max(std::fabs(low_), 1.0);
      const bool touches_zero = low_ >= 0 && low_ - room <= 0;
      low_ = touches_zero ? 0 : low_ - room;
      high_ += room;
    } else {
      const double room = low_ < high_ ? 0.04 * (high_ - low_) : 0.5;
      low_ -= room;
      high_ += room;
    }
  }

  bool has(double value) const {
    return std::isfinite(value) && (scale_ == AxisScale::linear || value > 0);
  }
  double at(double value) const { return (place_of(value) - low_) / (high_ - low_); }

  std::vector<double> ticks() const {
    std::vector<double> ticks;
    if (scale_ == AxisScale::linear) {
      const double step = nice_step();
      for (double k = std::ceil(low_ / step); k * step <= high_; ++k) {
        ticks.push_back(k == 0 ? 0 : k * step);
      }
      return ticks;
    }
    const double first = std::ceil(low_);
    const double last = std::floor(high_);
    if (scale_ == AxisScale::log10 && last - first < 1) {
      // Less than two powers of ten: 1, 2 and 5 of each.
      for (double power = std::floor(low_); power <= last + 1; ++power) {
        for (const double digit : {1.0, 2.0, 5.0}) {
          const double tick = digit * std::pow(10, power);
          if (place_of(tick) >= low_ && place_of(tick) <= high_) {
            ticks.push_back(tick);
          }
        }
      }
      return ticks;
    }
    const double step = std::max(1.0, std::ceil((last - first) / kMostTicks));
    for (double power = first; power <= last; power += step) {
      ticks.push_back(std::pow(scale_ == AxisScale::log2 ? 2.0 : 10.0, power));
    }
    return ticks;
  }

 private:
  double place_of(double value) const {
    switch (scale_) {
      case AxisScale::log2:
        return std::log2(value);
      case AxisScale::log10:
        return std::log10(value);
      case AxisScale::linear:
        break;
    }
    return value;
  }
  double nice_step() const {
    const double rough = (high_ - low_) / (kMostTicks - 3);
    const double power = std::pow(10, std::floor(std::log10(rough)));
    for (const double digit : {1.0, 2.0, 5.0}) {
      if (digit * power >= rough) {
        return digit * power;
      }
    }
    return 10 * power;
  }

  AxisScale scale_;
  double low_ = 0;
  double high_ = 1;
};

Axis axis_of(const Plot& plot, const PlotAxis& axis, double std::pair<double, double>::*part) {
  double low = std::numeric_limits<double>::infinity();
  double high = -low;
  for (const auto& series : plot.series) {
    for (const auto& point : series.points) {
      const double value = point.*part;
      if (std::isfinite(value) && (axis.scale == AxisScale::linear || value > 0)) {
        low = std::min(low, value);
        high = std::max(high, value);
      }
    }
  }
  return {axis, low, high};
}

std::string tick_text(double value) {
  return fmt::format("{:.4g}", value);
}

std::string mark(std::size_t series, double x, double y) {
  const auto* colour = kColours[series % kColours.size()];
  switch (series % 4) {
    case 0:
      return fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.5\" fill=\"{}\"/>", x, y,
                         colour);
    case 1:
      return fmt::format(
          "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"6.4\" height=\"6.4\" fill=\"{}\"/>", x - 3.2,
          y - 3.2, colour);
    case 2:
      return fmt::format("<path d=\"M{:.1f} {:.1f}l4.2 7.4h-8.4z\" fill=\"{}\"/>", x, y - 4.6,
                         colour);
    default:
      return fmt::format("<path d=\"M{:.1f} {:.1f}l4.5 4.5l-4.5 4.5l-4.5 -4.5z\" fill=\"{}\"/>", x,
                         y - 4.5, colour);
  }
}

std::string line_style(const PlotSeries& series, std::size_t number) {
  return fmt::format("fill=\"none\" stroke=\"{}\" stroke-width=\"1.6\"{}",
                     kColours[number % kColours.size()],
                     series.is_dashed ? " stroke-dasharray=\"6 4\"" : "");
}

/// Text in the colour of the page.
std::string text_at(double x, double y, std::string_view anchor, std::string_view text,
                    std::string_view more = "") {
  return fmt::format(
      "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" fill=\"currentColor\"{}>{}</text>\n", x,
      y, anchor, more, escaped(text));
}

}  // namespace

std::string render_svg(const Plot& plot) {
  const double inner = kWidth - kLeft - kRight;
  const double bottom = kTop + kPlotHeight;
  const double height = bottom + kBelow + kLegendLine * static_cast<double>(plot.series.size());
  const Axis x_axis = axis_of(plot, plot.x, &std::pair<double, double>::first);
  const Axis y_axis = axis_of(plot, plot.y, &std::pair<double, double>::second);
  const auto x_at = [&](double x) { return kLeft + inner * x_axis.at(x); };
  const auto y_at = [&](double y) { return bottom - kPlotHeight * y_axis.at(y); };

  std::string svg = fmt::format(
      "<svg viewBox=\"0 0 {:.0f} {:.0f}\" width=\"{:.0f}\" role=\"img\" font-family=\"sans-serif\" "
      "font-size=\"12\">\n<title>{}</title>\n",
      kWidth, height, kWidth, escaped(plot.title));
  svg += text_at(kLeft, 18, "start", plot.title, " font-weight=\"600\"");
  for (const double tick : y_axis.ticks()) {
    svg += fmt::format(
        "<path d=\"M{:.1f} {:.1f}h{:.1f}\" stroke=\"currentColor\" stroke-opacity=\"0.15\"/>\n",
        kLeft, y_at(tick), inner);
    svg += text_at(kLeft - 7, y_at(tick) + 4, "end", tick_text(tick));
  }
  for (const double tick : x_axis.ticks()) {
    svg +=
        fmt::format("<path d=\"M{:.1f} {:.1f}v5\" stroke=\"currentColor\"/>\n", x_at(tick), bottom);
    svg += text_at(x_at(tick), bottom + 18, "middle", tick_text(tick));
  }
  svg += fmt::format(
      "<path d=\"M{:.1f} {:.1f}V{:.1f}H{:.1f}\" fill=\"none\" stroke=\"currentColor\"/>\n", kLeft,
      kTop, bottom, kLeft + inner);
  svg += text_at(kLeft + inner / 2, bottom + 36, "middle", plot.x.label);
  svg += text_at(16, kTop + kPlotHeight / 2, "middle", plot.y.label,
                 fmt::format(" transform=\"rotate(-90 16 {:.1f})\"", kTop + kPlotHeight / 2));

  for (std::size_t i = 0; i < plot.series.size(); ++i) {
    const auto& series = plot.series[i];
    std::string path;
    std::string marks;
    bool is_broken = true;
    for (const auto& [x, y] : series.points) {
      if (!x_axis.has(x) || !y_axis.has(y)) {
        is_broken = true;
        continue;
      }
      path += fmt::format("{}{:.1f} {:.1f}", is_broken ? "M" : "L", x_at(x), y_at(y));
      marks += mark(i, x_at(x), y_at(y)) + "\n";
      is_broken = false;
    }
    if (series.has_line && !path.empty()) {
      svg += fmt::format("<path d=\"{}\" {}/>\n", path, line_style(series, i));
    }
    if (series.has_marks) {
      svg += marks;
    }
    const double y = bottom + kBelow + kLegendLine * static_cast<double>(i) + 8;
    if (series.has_line) {
      svg += fmt::format("<path d=\"M{:.1f} {:.1f}h28\" {}/>\n", kLeft, y, line_style(series, i));
    }
    if (series.has_marks) {
      svg += mark(i, kLeft + 14, y) + "\n";
    }
    svg += text_at(kLeft + 36, y + 4, "start", series.name);
  }
  return svg + "</svg>\n";
}

}  // namespace shardproof
