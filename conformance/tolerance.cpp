// How much a run may differ from another, and why.
//
// Exact. The replay and the Python reference do every operation that sharded training is defined to
// do, in the same order (reference/README.md); there is nothing to allow.
//
// Bounded. The full-batch run and the float64 run compute the same real numbers by other sums. What
// a correct run may differ by is then a matter of its own rounding errors, and the trusted run
// shows how large those are: it starts from the same state as the float64 run, so its distance from
// it is its error, no more and no less. Bounds that follow from the number of terms alone (gamma(n)
// sum|x|, Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 4.2) are of no use for a
// whole backward pass: they grow with the product over its layers, and real errors are many
// thousand times smaller because roundings cancel (Higham and Mary, SIAM J. Sci. Comput. 41, 2019).
//
//   gradient     |subject - float64| <= K max( max_j |trusted_j - float64_j|, r rms(terms) ) +
//   4u|float64_i|
//
//     The maximum runs over the elements of the tensor; r is the relative error of all gradients
//     pooled, so that a tensor of one element, whose error may happen to be nil, is judged by its
//     peers; the terms are the ranks' own gradients, mean over ranks of |g_r|, because errors are
//     as large as the terms are, however much these cancel. The subject's errors are sums of as
//     many roundings of as large terms as the trusted run's, hence of the same distribution. For a
//     normal distribution the largest of n draws is between 0.7 and 5.3 standard deviations for n
//     from 1 to 10^7, and its own spread less than one: a factor K of 8 between two such maxima
//     needs a deviation of more than 5 standard deviations even for n = 1, where r rms stands in
//     for the standard deviation. Measured shares of the bound are in the table at the end.
//   mean_loss    K max( |trusted - float64|, r |loss| ) + 8u |loss|: the loss is the forward half
//   of
//     the gradients' computation, so its relative error is less than theirs.
//   total_norm   By the triangle inequality the norm moves by no more than the norm of the
//   gradients'
//     error: K |trusted - float64|_p + 4u norm. For p < 1, where it does not hold, |a + b|_p^p <=
//     |a|_p^p + |b|_p^p does: with V = |float64|_p^p and E = K^p |trusted - float64|_p^p, the norm
//     moves by no more than (V + E)^(1/p) - V^(1/p).
//   clipped_gradient  c = min(1, max_norm / (norm + 1e-6)) over the interval of the norm, times the
//     gradient over its interval: dc (|g| + dg) + c dg + 4u |c g|.
//   parameter, optimizer_state   One step of the optimizer from the same state is a function of one
//     number per element, the clipped gradient. Its range over [g - dg, g + dg] is what may be
//     allowed, plus the roundings of the formula itself, counted one by one:
//       exp_avg          (1-b1) dg + 4u (b1 |m| + (1-b1)|g|)
//       exp_avg_sq       (1-b2) (2|g| dg + dg^2) + 6u v'
//       momentum_buffer  dg + 4u (|mu b| + |g| + |wd p|)
//       parameter, sgd   lr times the bound of the buffer (or of the gradient), and 2u |p'|
//       parameter, adamw the update's largest distance from its value at g, over the ends of the
//                        interval, 0 if it lies inside (at v = 0 the update is a step there), and
//                        the one point where the update's derivative vanishes, g = (1-b1) v b2 / (m
//                        b1 (1-b2)); plus 4u |p| + 14u |update| + the error of m' carried through.
//     In the first steps of AdamW a gradient of the size of its own error allows an update of
//     either sign, up to 2 lr: nothing sharper is true. Such elements are few, and the exact
//     references see them.
//
// Here u is the sum of the unit roundoffs of the two evaluations compared. Another run than float64
// is given its own distance from float64 on top, by the triangle inequality (comparison.cpp).
//
// What these bounds cannot see: an error below K times the largest rounding error of its tensor,
// wherever in the tensor it is; one element of AdamW's parameters where the gradient is all
// rounding.
//
// Share of the bound that correct runs used, 99 % of the steps and the most of all, over 54
// scenarios (mlp and transformer; sgd, sgd with momentum, adamw; 2, 3 and 8 ranks; clipped and not;
// float32) of 21 seeds and 5 steps. "independent" is a full-batch run held to float64, the replay
// being the trusted run; the replay itself is at 1/K there.
//
//                      replay against whole   independent against float64
//   mean_loss             0.10   0.18            0.08   0.11
//   gradient              0.28   0.42            0.37   0.75
//   total_norm            0.12   0.22            0.12   0.23
//   clipped_gradient      0.27   0.41            0.35   0.70
//   optimizer_state       0.30   0.38            0.39   0.46
//   parameter             0.64   0.66            0.53   0.55
//
// The parameters' share is that of roundings which are counted one by one, so it is near 1/2 and
// cannot pass 1. With the full-batch run as the trusted one the share reached 1.5, for a bias of
// one element whose terms cancel: it does not know the terms. So the trusted run must be the
// replay.

#include "conformance/tolerance.h"

#include <fmt/format.h>

#include <torch/torch.h>
#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "reference/models.h"

namespace shardproof {
namespace {

// K above.
constexpr double kErrorFactor = 8;
constexpr double kGradientUlps = 4;
constexpr double kLossUlps = 8;
constexpr double kNormUlps = 4;

bool is_exact(std::string_view reference) {
  return reference == "replay" || reference == "python";
}

at::Tensor as_float64(const at::Tensor& tensor) {
  return tensor.to(at::kCPU, at::kDouble).contiguous();
}

/// A tensor of a trace, whole.
at::Tensor whole(const StepTrace& trace, Quantity quantity, const std::string& name) {
  const TraceTensor* found = trace.find(quantity, name);
  if (found == nullptr) {
    throw TraceError(fmt::format("step {}: the bound of {} \"{}\" needs a run that has it",
                                 trace.step, to_string(quantity), name));
  }
  return assemble(*found).contiguous();
}

/// Calls f with a pointer to the values, without a copy for the dtypes that matter.
template <typename F>
auto with_values(const at::Tensor& tensor, F f) {
  const at::Tensor plain = tensor.contiguous();
  if (plain.scalar_type() == at::kFloat) {
    return f(plain.const_data_ptr<float>());
  }
  return f(as_float64(plain).const_data_ptr<double>());
}

/// Sums over the elements that are finite in both runs.
struct ErrorSums {
  double error_squares = 0;
  double value_squares = 0;
  double largest_error = 0;
  std::int64_t count = 0;

  void operator+=(const ErrorSums& other) {
    error_squares += other.error_squares;
    value_squares += other.value_squares;
    largest_error = std::max(largest_error, other.largest_error);
    count += other.count;
  }
  double root_mean_square() const {
    return count > 0 ? std::sqrt(value_squares / static_cast<double>(count)) : 0;
  }
};

template <typename T>
ErrorSums error_sums(const T* trusted, const double* float64, std::int64_t numel) {
  ErrorSums sums;
  for (std::int64_t i = 0; i < numel; ++i) {
    const double error = std::fabs(static_cast<double>(trusted[i]) - float64[i]);
    if (error <= std::numeric_limits<double>::max()) {  // neither NaN nor infinite
      sums.error_squares += error * error;
      sums.value_squares += float64[i] * float64[i];
      sums.largest_error = std::max(sums.largest_error, error);
      ++sums.count;
    }
  }
  return sums;
}

ErrorSums error_sums(const at::Tensor& trusted, const at::Tensor& float64) {
  if (trusted.sizes() != float64.sizes()) {
    throw TraceError("the trusted run and the float64 run have tensors of different shapes");
  }
  const at::Tensor exact = as_float64(float64);
  return with_values(trusted, [&](const auto* values) {
    return error_sums(values, exact.const_data_ptr<double>(), exact.numel());
  });
}

/// p-norms of a run's errors and of the float64 run's values, over the elements that are finite in
/// both.
class NormSums {
 public:
  explicit NormSums(double p) : p_(p) {}

  void add(const at::Tensor& trusted, const at::Tensor& float64) {
    const at::Tensor exact = as_float64(float64);
    const auto* values = exact.const_data_ptr<double>();
    with_values(trusted, [&](const auto* narrow) {
      for (std::int64_t i = 0; i < exact.numel(); ++i) {
        const double error = std::fabs(static_cast<double>(narrow[i]) - values[i]);
        if (error <= std::numeric_limits<double>::max()) {
          add(errors_, error);
          add(values_, std::fabs(values[i]));
        }
      }
    });
  }
  double norm() const { return root(values_); }
  /// How far the norm of a run may be whose errors are `factor` times as large.
  double error(double factor) const {
    if (p_ >= 1) {
      return factor * root(errors_);
    }
    return root(values_ + std::pow(factor, p_) * errors_) - root(values_);
  }

 private:
  void add(double& sum, double magnitude) const {
    sum = std::isinf(p_) ? std::max(sum, magnitude) : sum + std::pow(magnitude, p_);
  }
  double root(double sum) const { return std::isinf(p_) ? sum : std::pow(sum, 1 / p_); }

  double p_;
  double errors_ = 0;
  double values_ = 0;
};

/// Of the terms that were added up, if it is known and finite, else of the sums.
double root_mean_square_of_terms(const ErrorSums& sums, const at::Tensor& magnitude) {
  const double of_values = sums.root_mean_square();
  if (!magnitude.defined() || magnitude.numel() == 0) {
    return of_values;
  }
  const double squares = with_values(magnitude, [&](const auto* terms) {
    double sum = 0;
    for (std::int64_t i = 0; i < magnitude.numel(); ++i) {
      sum += static_cast<double>(terms[i]) * static_cast<double>(terms[i]);
    }
    return sum;
  });
  const double of_terms = std::sqrt(squares / static_cast<double>(magnitude.numel()));
  return std::isfinite(of_terms) ? std::max(of_values, of_terms) : of_values;
}

/// K times what a run's error in a tensor may be taken to be.
double error_bound(const ErrorSums& sums, double relative_error, const at::Tensor& magnitude) {
  return kErrorFactor *
         std::max(sums.largest_error, relative_error * root_mean_square_of_terms(sums, magnitude));
}

double relative(const ErrorSums& sums) {
  return sums.value_squares > 0 ? std::sqrt(sums.error_squares / sums.value_squares) : 0;
}

/// Fills a float64 tensor of the shape of `like` with bound(i), in one pass.
template <typename Bound>
at::Tensor elementwise(const at::Tensor& like, Bound bound) {
  at::Tensor result = torch::empty(like.sizes(), torch::kDouble);
  auto* out = result.mutable_data_ptr<double>();
  const std::int64_t count = result.numel();
  for (std::int64_t i = 0; i < count; ++i) {
    out[i] = bound(i);
  }
  return result;
}

at::Tensor scalar(double value) {
  return torch::full({}, value, torch::kDouble);
}

const double* values(const at::Tensor& tensor) {
  return tensor.const_data_ptr<double>();
}

/// AdamW's update of one element as a function of its gradient (reference/README.md, "Optimizers").
/// The parameter becomes decayed - update.
struct AdamwUpdate {
  double beta1, beta2, eps;
  double step_size;     // lr / (1 - beta1^t)
  double square_scale;  // 1 / (1 - beta2^t)

  AdamwUpdate(const OptimizerSpec& spec, std::int64_t step)
      : beta1(spec.beta1),
        beta2(spec.beta2),
        eps(spec.eps),
        step_size(spec.lr / (1 - std::pow(spec.beta1, static_cast<double>(step)))),
        square_scale(1 / (1 - std::pow(spec.beta2, static_cast<double>(step)))) {}

  double denominator(double v, double g) const {
    return std::sqrt((beta2 * v + (1 - beta2) * g * g) * square_scale) + eps;
  }
  double numerator(double m, double g) const { return step_size * (beta1 * m + (1 - beta1) * g); }
  double operator()(double m, double v, double g) const {
    return numerator(m, g) / denominator(v, g);
  }
  /// Whether the derivative with respect to g vanishes between low and high: it is
  /// (1-beta1) beta2 v - beta1 m (1-beta2) g times something positive. (eps is left out: it shifts
  /// the point, and next to it the function is flat.)
  bool turns_between(double m, double v, double low, double high) const {
    const double constant = (1 - beta1) * beta2 * v;
    const double slope = beta1 * m * (1 - beta2);
    return (constant - slope * low) * (constant - slope * high) < 0;
  }
  double turning_point(double m, double v) const {
    return (1 - beta1) * beta2 * v / (beta1 * m * (1 - beta2));
  }

  /// The largest |update(subject) - update(g)| for a subject whose gradient is within dg of g, and
  /// whose formula rounds as tolerance.cpp counts.
  double bound(double m, double v, double g, double dg, double u) const {
    const double low = g - dg;
    const double high = g + dg;
    const double denominator_low = denominator(v, low);
    const double denominator_high = denominator(v, high);
    const double at_centre = (*this)(m, v, g);
    double range = std::max(std::fabs(numerator(m, low) / denominator_low - at_centre),
                            std::fabs(numerator(m, high) / denominator_high - at_centre));
    if (turns_between(m, v, low, high)) {
      range = std::max(range, std::fabs((*this)(m, v, turning_point(m, v)) - at_centre));
    }
    double least_denominator = std::min(denominator_low, denominator_high);
    if (low < 0 && high > 0) {
      range = std::max(range, std::fabs((*this)(m, v, 0) - at_centre));
      least_denominator = denominator(v, 0);
    }
    const double terms = beta1 * std::fabs(m) + (1 - beta1) * (std::fabs(g) + dg);
    return range +
           u * (14 * (std::fabs(at_centre) + range) + 4 * step_size * terms / least_denominator);
  }
};

}  // namespace

Rule rule_for(const Scenario& /*scenario*/, std::string_view reference, Quantity quantity) {
  if (reference == "stored") {
    return {RuleKind::exact, "the second run of a region does what its first did"};
  }
  if (is_exact(reference)) {
    return {RuleKind::exact, "the reference does the same operations in the same order"};
  }
  const std::string error = fmt::format(
      "{} x the trusted run's own rounding error, its distance from float64", kErrorFactor);
  switch (quantity) {
    case Quantity::mean_loss:
    case Quantity::total_norm:
      return {RuleKind::bounded, error};
    case Quantity::gradient:
      return {RuleKind::bounded, error + ", in this tensor"};
    case Quantity::clipped_gradient:
      return {RuleKind::bounded, "the bounds of gradient and norm carried through the clip factor"};
    case Quantity::parameter:
    case Quantity::optimizer_state:
      return {RuleKind::bounded,
              "the bound of the clipped gradient carried through the optimizer's formula"};
    case Quantity::output:
    case Quantity::loss:
    case Quantity::saved_activation:
    case Quantity::recomputed_activation:
      break;
  }
  return {RuleKind::exact, "no bound is known for this quantity"};
}

double unit_roundoff(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return 0x1p-53;
    case at::kFloat:
      return 0x1p-24;
    case at::kHalf:
      return 0x1p-11;
    case at::kBFloat16:
      return 0x1p-8;
    default:
      throw std::invalid_argument(
          fmt::format("unit_roundoff: {} is no floating dtype", c10::toString(dtype)));
  }
}

double gamma(std::int64_t n, double u) {
  const double nu = static_cast<double>(n) * u;
  return nu < 1 ? nu / (1 - nu) : std::numeric_limits<double>::infinity();
}

at::Tensor sum_bound(const at::Tensor& magnitude, int world_size, at::ScalarType dtype) {
  return as_float64(magnitude) * (2 * gamma(world_size, unit_roundoff(dtype)));
}

at::Tensor rounding_bound(const at::Tensor& trusted, const at::Tensor& float64,
                          double quantity_relative_error, const at::Tensor& magnitude) {
  const double error =
      error_bound(error_sums(trusted, float64), quantity_relative_error, magnitude);
  const double ulps = kGradientUlps * unit_roundoff(trusted.scalar_type());
  const at::Tensor exact = as_float64(float64);
  return elementwise(
      exact, [&, g = values(exact)](std::int64_t i) { return error + ulps * std::fabs(g[i]); });
}

double relative_error(const StepTrace& trusted, const StepTrace& float64, Quantity quantity) {
  ErrorSums sums;
  for (const TraceTensor& tensor : float64.tensors) {
    if (tensor.quantity == quantity) {
      sums += error_sums(whole(trusted, quantity, tensor.name), assemble(tensor));
    }
  }
  return relative(sums);
}

double mean_loss_of(const StepTrace& trace) {
  if (const TraceTensor* mean = trace.find(Quantity::mean_loss, "mean_loss")) {
    return as_float64(assemble(*mean)).item<double>();
  }
  const TraceTensor* losses = trace.find(Quantity::loss, "loss");
  if (losses == nullptr || losses->pieces.empty()) {
    throw TraceError(fmt::format("step {} has no loss", trace.step));
  }
  double sum = 0;
  std::int64_t count = 0;
  for (const Piece& piece : losses->pieces) {
    const at::Tensor loss = as_float64(piece.values);
    for (std::int64_t i = 0; i < loss.numel(); ++i) {
      sum += values(loss)[i];
    }
    count += loss.numel();
  }
  return sum / static_cast<double>(count);
}

StepBounds::StepBounds(const Scenario& scenario, const StepTrace& trusted, const StepTrace& float64,
                       const TrainingState& start)
    : scenario_(scenario), float64_(float64), start_(start) {
  u_ = unit_roundoff(dtype_named(scenario.dtype)) + unit_roundoff(at::kDouble);

  std::map<std::string, ErrorSums> sums;
  ErrorSums pooled;
  NormSums norms(scenario.norm_type);
  for (const TraceTensor& tensor : float64.tensors) {
    if (tensor.quantity == Quantity::gradient) {
      const at::Tensor of_trusted = whole(trusted, Quantity::gradient, tensor.name);
      sums[tensor.name] = error_sums(of_trusted, assemble(tensor));
      pooled += sums[tensor.name];
      norms.add(of_trusted, assemble(tensor));
    }
  }
  const double relative_error = relative(pooled);
  for (const auto& [name, own] : sums) {
    gradient_errors_[name] =
        error_bound(own, relative_error, trusted.find(Quantity::gradient, name)->magnitude);
  }

  const double loss = mean_loss_of(float64);
  loss_ = kErrorFactor *
              std::max(std::fabs(mean_loss_of(trusted) - loss), relative_error * std::fabs(loss)) +
          kLossUlps * u_ * std::fabs(loss);

  const double norm = norms.norm();
  norm_ = norms.error(kErrorFactor) + kNormUlps * u_ * norm;

  if (scenario.max_norm > 0) {
    const auto factor = [&](double of_norm) {
      return std::min(1.0, scenario.max_norm / (std::max(of_norm, 0.0) + 1e-6));
    };
    clip_ = factor(norm);
    clip_error_ = std::max(factor(norm - norm_) - clip_, clip_ - factor(norm + norm_)) +
                  kNormUlps * u_ * clip_;
  }
}

at::Tensor StepBounds::centre(Quantity quantity, const std::string& name) const {
  return as_float64(whole(float64_, quantity, name));
}

at::Tensor StepBounds::begun(const std::string& name) const {
  const auto found = start_.parameters.find(name);
  if (found == start_.parameters.end() ||
      found->second.sizes() != whole(float64_, Quantity::parameter, name).sizes()) {
    throw TraceError(fmt::format(
        "the state before the step has no parameter \"{}\" of the float64 run's shape", name));
  }
  return found->second.contiguous();
}

at::Tensor StepBounds::begun(const std::string& kind, const std::string& name) const {
  const at::Tensor weights = begun(name);
  const auto found = start_.optimizer_state.find(kind + "/" + name);
  if (found == start_.optimizer_state.end()) {
    return torch::zeros_like(weights);
  }
  if (found->second.sizes() != weights.sizes()) {
    throw TraceError(
        fmt::format("the state before the step has \"{}/{}\" in another shape than "
                    "the parameter",
                    kind, name));
  }
  return found->second.contiguous();
}

at::Tensor StepBounds::allowed(Quantity quantity, const std::string& name) const {
  const auto from_value = [&](const Affine& bound) {
    const at::Tensor value = centre(quantity, name);
    return elementwise(value, [&, x = values(value)](std::int64_t i) { return bound(x[i]); });
  };
  switch (quantity) {
    case Quantity::mean_loss:
      return scalar(loss_);
    case Quantity::gradient:
      return from_value(gradient(name));
    case Quantity::total_norm:
      return scalar(norm_);
    case Quantity::clipped_gradient:
      return from_value(clipped_gradient(name));
    case Quantity::parameter:
      if (float64_.find(Quantity::gradient, name) == nullptr) {
        // Frozen or unused: it stays where it was, in every dtype.
        return torch::zeros_like(centre(quantity, name));
      }
      return scenario_.optimizer.kind == "sgd" ? sgd_parameter(name) : adamw_parameter(name);
    case Quantity::optimizer_state: {
      const std::size_t slash = name.find('/');
      if (slash == std::string::npos) {
        throw TraceError(fmt::format("optimizer state \"{}\" is not named KIND/PARAMETER", name));
      }
      return optimizer_state(name.substr(0, slash), name.substr(slash + 1));
    }
    case Quantity::output:
    case Quantity::loss:
    case Quantity::saved_activation:
    case Quantity::recomputed_activation:
      break;
  }
  throw TraceError(fmt::format("no bound is known for {} \"{}\"", to_string(quantity), name));
}

StepBounds::Affine StepBounds::gradient(const std::string& name) const {
  const auto found = gradient_errors_.find(name);
  if (found == gradient_errors_.end()) {
    throw TraceError(fmt::format("the float64 run has no gradient of \"{}\"", name));
  }
  return {found->second, kGradientUlps * u_};
}

// dc (|g| + dg) + c dg + u |c g|, written as a function of the clipped gradient c g.
StepBounds::Affine StepBounds::clipped_gradient(const std::string& name) const {
  const Affine unclipped = gradient(name);
  const double reach = clip_ + clip_error_;
  return {reach * unclipped.constant, (clip_error_ + reach * unclipped.slope) / clip_ + u_};
}

at::Tensor StepBounds::optimizer_state(const std::string& kind, const std::string& name) const {
  const OptimizerSpec& spec = scenario_.optimizer;
  const at::Tensor gradients = centre(Quantity::clipped_gradient, name);
  const at::Tensor before = begun(kind, name);
  const auto* g = values(gradients);
  const Affine error = clipped_gradient(name);
  return with_values(before, [&](const auto* s) {
    if (kind == "exp_avg") {
      const double share = 1 - spec.beta1;
      return elementwise(gradients, [&](std::int64_t i) {
        const double dg = error(g[i]);
        return share * dg +
               4 * u_ * (spec.beta1 * std::fabs(s[i]) + share * (std::fabs(g[i]) + dg));
      });
    }
    if (kind == "exp_avg_sq") {
      const double share = 1 - spec.beta2;
      return elementwise(gradients, [&](std::int64_t i) {
        const double dg = error(g[i]);
        const double largest = std::fabs(g[i]) + dg;
        return share * (2 * std::fabs(g[i]) + dg) * dg +
               6 * u_ * (spec.beta2 * s[i] + share * largest * largest);
      });
    }
    if (kind == "momentum_buffer") {
      const at::Tensor weights = as_float64(begun(name));
      return elementwise(gradients, [&, p = values(weights)](std::int64_t i) {
        const double dg = error(g[i]);
        return dg + 4 * u_ *
                        (std::fabs(spec.momentum * s[i]) + std::fabs(g[i]) + dg +
                         std::fabs(spec.weight_decay * p[i]));
      });
    }
    throw TraceError(fmt::format("no bound is known for optimizer state \"{}/{}\"", kind, name));
  });
}

at::Tensor StepBounds::sgd_parameter(const std::string& name) const {
  const double lr = scenario_.optimizer.lr;
  const at::Tensor before = begun(name);
  const at::Tensor after = centre(Quantity::parameter, name);
  // Without momentum the buffer is the decayed gradient, which has the same bound.
  const at::Tensor buffer_error = optimizer_state("momentum_buffer", name);
  return with_values(before, [&](const auto* p) {
    return elementwise(after, [&, q = values(after), db = values(buffer_error)](std::int64_t i) {
      const double update = std::fabs(q[i] - p[i]);
      const double largest = std::max(std::fabs(static_cast<double>(p[i])), std::fabs(q[i]));
      return lr * db[i] + u_ * (2 * largest + 4 * update);
    });
  });
}

at::Tensor StepBounds::adamw_parameter(const std::string& name) const {
  const AdamwUpdate update(scenario_.optimizer, start_.optimizer_steps() + 1);
  const Affine error = clipped_gradient(name);
  const at::Tensor gradients = centre(Quantity::clipped_gradient, name);
  const at::Tensor before = begun(name);
  const at::Tensor first_moment = begun("exp_avg", name);
  const at::Tensor second_moment = begun("exp_avg_sq", name);
  return with_values(before, [&](const auto* p) {
    return with_values(first_moment, [&](const auto* m) {
      return with_values(second_moment, [&](const auto* v) {
        return elementwise(gradients, [&, g = values(gradients)](std::int64_t i) {
          return 4 * u_ * std::fabs(p[i]) + update.bound(m[i], v[i], g[i], error(g[i]), u_);
        });
      });
    });
  });
}

}  // namespace shardproof
