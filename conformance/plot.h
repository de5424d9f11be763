#pragma once
// A small line plot as SVG: for pages that must be readable in an archive, on paper and on a dark
// screen. The same plot gives the same bytes.

#include <string>
#include <utility>
#include <vector>

namespace shardproof {

enum class AxisScale {
  linear,
  log2,   // ticks at powers of two: world sizes
  log10,  // ticks at powers of ten
};

struct PlotAxis {
  std::string label;  // plain text
  AxisScale scale = AxisScale::linear;
};

struct PlotSeries {
  std::string name;  // for the legend, plain text
  std::vector<std::pair<double, double>> points;
  bool has_line = true;
  bool has_marks = true;
  bool is_dashed = false;  // for predictions
};

struct Plot {
  std::string title;
  PlotAxis x;
  PlotAxis y;
  std::vector<PlotSeries> series;
};

/// One <svg> element, to stand in a page. Text and axes take the page's colour. Points that are not
/// finite, or not positive on a logarithmic axis, are left out, and the line is broken there.
std::string render_svg(const Plot& plot);

}  // namespace shardproof
