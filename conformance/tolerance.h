#pragma once
// The one table of tolerances. No test and no suite writes a number of its own.

#include <ATen/core/Tensor.h>

#include <cmath>
#include <map>
#include <string>
#include <string_view>

#include "conformance/verdict.h"
#include "reference/scenario.h"
#include "reference/trace.h"

namespace shardproof {

struct Rule {
  RuleKind kind = RuleKind::exact;
  std::string source;  // the reason, in one line, shown with each verdict
};

/// Which rule a tensor is held to: a function of the reference, the quantity and the scenario only.
Rule rule_for(const Scenario& scenario, std::string_view reference, Quantity quantity);

/// Unit roundoff u of a floating dtype: 2^-53, 2^-24, 2^-11, 2^-8. Throws std::invalid_argument for
/// another dtype.
double unit_roundoff(at::ScalarType dtype);

/// gamma(n) = n u / (1 - n u), Higham 2002, lemma 3.1. Infinite if n u >= 1.
double gamma(std::int64_t n, double u);

/// Elementwise bound for a sum over `world_size` ranks in an unknown order, divided by a number:
/// gamma(world_size) * magnitude for each of the two sums that are compared. Float64.
at::Tensor sum_bound(const at::Tensor& magnitude, int world_size, at::ScalarType dtype);

/// Elementwise bound on |subject - float64| where both only differ by rounding, in float64 and of
/// the same shape: a multiple of the trusted run's own worst error in this tensor, or of
/// `quantity_relative_error` (see relative_error) times the root mean square of the terms if that
/// is more, and a few ULP of the element. The terms are `magnitude` (TraceTensor::magnitude) where
/// it is known, else the values. All are whole tensors.
at::Tensor rounding_bound(const at::Tensor& trusted, const at::Tensor& float64,
                          double quantity_relative_error, const at::Tensor& magnitude = {});

/// Root mean square error of all of the trusted run's tensors of a quantity, divided by their root
/// mean square. Elements that are not finite in either do not count; 0 if nothing else does.
double relative_error(const StepTrace& trusted, const StepTrace& float64, Quantity quantity);

/// What Quantity::mean_loss is: the trace's own, or else the mean in float64 of its losses over
/// ranks and micro-batches. Throws TraceError if the trace has neither.
double mean_loss_of(const StepTrace& trace);

/// The bounds of one step: how far a run in the scenario's dtype that starts from `start` may be
/// from the float64 run. Made once a step; the traces and the state must outlive it.
class StepBounds {
 public:
  StepBounds(const Scenario& scenario, const StepTrace& trusted, const StepTrace& float64,
             const TrainingState& start);
  /// Elementwise, float64, of the shape of the whole tensor. Throws TraceError if the tensors it is
  /// computed from are missing or of another shape.
  at::Tensor allowed(Quantity quantity, const std::string& name) const;

 private:
  /// A bound of the form constant + slope |value|.
  struct Affine {
    double constant = 0;
    double slope = 0;
    double operator()(double value) const { return constant + slope * std::fabs(value); }
  };

  Affine gradient(const std::string& name) const;
  Affine clipped_gradient(const std::string& name) const;
  at::Tensor optimizer_state(const std::string& kind, const std::string& name) const;
  at::Tensor sgd_parameter(const std::string& name) const;
  at::Tensor adamw_parameter(const std::string& name) const;
  /// A tensor of the float64 run, whole.
  at::Tensor centre(Quantity quantity, const std::string& name) const;
  /// The parameter that the step began with, and a part of the optimizer's state: zeros if it was
  /// empty.
  at::Tensor begun(const std::string& name) const;
  at::Tensor begun(const std::string& kind, const std::string& name) const;

  const Scenario& scenario_;
  const StepTrace& float64_;
  const TrainingState& start_;
  double u_ = 0;  // of the two evaluations that are compared, together
  std::map<std::string, double> gradient_errors_;  // K times the error of each tensor
  double loss_ = 0;
  double norm_ = 0;
  double clip_ = 1;        // the factor of the float64 run
  double clip_error_ = 0;  // how far the subject's may be from it
};

}  // namespace shardproof
