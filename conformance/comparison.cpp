#include "conformance/comparison.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <torch/torch.h>
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "conformance/float_format.h"
#include "conformance/tolerance.h"
#include "conformance/trace_io.h"
#include "reference/models.h"

namespace shardproof {
namespace {

// ---- What is compared with what -----------------------------------------------------------------

/// A rank's contiguous elements and the wanted ones they must equal.
struct Run {
  int rank = kNoRank;
  std::int64_t offset = 0;  // of the first element, in the whole tensor
  std::int64_t count = 0;
  at::Tensor got;
  at::Tensor want;  // the whole tensor

  const char* got_data() const { return static_cast<const char*>(got.const_data_ptr()); }
  const char* want_data() const {
    return static_cast<const char*>(want.const_data_ptr()) + offset * want.element_size();
  }
  bool is_equal() const {
    return count == 0 || std::memcmp(got_data(), want_data(),
                                     static_cast<std::size_t>(count * got.element_size())) == 0;
  }
};

std::string shape_name(at::IntArrayRef shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

/// Whether exactly the ranks 0 to world_size - 1 hold a piece, in order; what is wrong, or "".
std::string fault_of_ranks(const TraceTensor& tensor, int world_size) {
  if (tensor.placement == Placement::single) {
    return tensor.pieces.size() == 1
               ? ""
               : fmt::format("a single tensor has {} pieces", tensor.pieces.size());
  }
  for (std::size_t i = 0; i < tensor.pieces.size(); ++i) {
    if (tensor.pieces[i].rank != static_cast<int>(i)) {
      return fmt::format("the piece of rank {} is missing; in its place stands that of {}", i,
                         holder_name(tensor.pieces[i].rank));
    }
  }
  if (tensor.pieces.size() != static_cast<std::size_t>(world_size)) {
    return fmt::format("{} ranks hold a piece, the world size is {}", tensor.pieces.size(),
                       world_size);
  }
  return "";
}

std::string fault_of_values(const TraceTensor& tensor, at::ScalarType dtype) {
  for (const Piece& piece : tensor.pieces) {
    if (!piece.values.defined()) {
      return fmt::format("{} holds no values", holder_name(piece.rank));
    }
    if (piece.values.scalar_type() != dtype) {
      return fmt::format("{} holds dtype {} where {} is wanted", holder_name(piece.rank),
                         c10::toString(piece.values.scalar_type()), c10::toString(dtype));
    }
    if (tensor.placement != Placement::sharded &&
        piece.values.sizes() != at::IntArrayRef(tensor.shape)) {
      return fmt::format("{} holds shape {} where {} is wanted", holder_name(piece.rank),
                         shape_name(piece.values.sizes()), shape_name(tensor.shape));
    }
  }
  return "";
}

/// Whether the sharded pieces of the ranks [first, first + ranks) hold every one of `count`
/// elements once; what is wrong, or "".
std::string fault_of_tiling(const TraceTensor& tensor, int first, int ranks, std::int64_t count) {
  std::vector<const Piece*> pieces;
  for (const Piece& piece : tensor.pieces) {
    if (piece.values.numel() > 0 && piece.rank >= first && piece.rank < first + ranks) {
      pieces.push_back(&piece);
    }
  }
  std::stable_sort(pieces.begin(), pieces.end(),
                   [](const Piece* a, const Piece* b) { return a->offset < b->offset; });
  std::int64_t covered = 0;
  for (const Piece* piece : pieces) {
    const std::int64_t end = piece->offset + piece->values.numel();
    if (piece->offset < covered) {
      return fmt::format(
          "the piece of rank {} holds elements [{}, {}) and overlaps others, which "
          "hold [0, {})",
          piece->rank, piece->offset, end, covered);
    }
    if (piece->offset > covered) {
      return fmt::format("no rank holds elements [{}, {})", covered, piece->offset);
    }
    covered = end;
  }
  if (covered != count) {
    return fmt::format("the pieces hold elements [0, {}) where there are {}", covered, count);
  }
  return "";
}

/// The same of each replica's ranks.
std::string fault_of_tiling(const TraceTensor& tensor, const Layout& layout, std::int64_t count) {
  for (int replica = 0; replica < layout.replicas; ++replica) {
    const int first = replica * layout.shards;
    const auto fault = fault_of_tiling(tensor, first, layout.shards, count);
    if (!fault.empty()) {
      return layout.replicas == 1 ? fault
                                  : fmt::format("of replica {}, which is ranks {} to {}: {}",
                                                replica, first, first + layout.shards - 1, fault);
    }
  }
  return "";
}

std::int64_t numel_of(const TraceTensor& tensor) {
  return c10::multiply_integers(tensor.shape);
}

std::string fault_of_structure(const TraceTensor& got, const TraceTensor& want,
                               const Layout& layout, at::ScalarType dtype) {
  const int world_size = layout.replicas * layout.shards;
  if (got.shape != want.shape) {
    return fmt::format("its shape is {} where {} is wanted", shape_name(got.shape),
                       shape_name(want.shape));
  }
  if (!is_comparable(dtype)) {
    return fmt::format("values of dtype {} cannot be compared", c10::toString(dtype));
  }
  std::string fault = fault_of_ranks(got, world_size);
  if (fault.empty()) {
    fault = fault_of_values(got, dtype);
  }
  if (fault.empty() && got.placement == Placement::sharded) {
    fault = fault_of_tiling(got, layout, numel_of(got));
  }
  if (fault.empty() && want.placement == Placement::per_rank) {
    if (got.placement != Placement::per_rank) {
      fault =
          fmt::format("it is {} where each rank's own value is wanted", to_string(got.placement));
    } else if (fault = fault_of_ranks(want, world_size); !fault.empty()) {
      fault = "of the reference's: " + fault;
    }
  }
  return fault;
}

/// Pairs structurally sound tensors.
std::vector<Run> pair_up(const TraceTensor& got, const TraceTensor& want) {
  const bool own_values = want.placement == Placement::per_rank;
  const at::Tensor whole = own_values ? at::Tensor() : plain(assemble(want));
  std::vector<Run> runs;
  for (std::size_t i = 0; i < got.pieces.size(); ++i) {
    const Piece& piece = got.pieces[i];
    Run run;
    run.rank = piece.rank;
    run.offset = got.placement == Placement::sharded ? piece.offset : 0;
    run.count = piece.values.numel();
    run.got = plain(piece.values);
    run.want = own_values ? plain(want.pieces[i].values) : whole;
    runs.push_back(std::move(run));
  }
  return runs;
}

// ---- Comparing ----------------------------------------------------------------------------------

/// What was found in a tensor: how many elements were outside the rule, and the worst one.
struct Findings {
  std::int64_t elements = 0;
  std::int64_t differing = 0;
  const Run* run = nullptr;
  std::int64_t position = 0;  // in the run
  std::uint64_t ulp = 0;
  double allowed = 0;
  double ratio = 0;

  /// What stands for a tensor all of whose elements are equal.
  void start_with(const std::vector<Run>& runs) {
    for (const Run& candidate : runs) {
      elements += candidate.count;
      if (run == nullptr && candidate.count > 0) {
        run = &candidate;
      }
    }
  }
};

template <typename F>
void compare_bits(F, const Run& run, Findings& findings) {
  using Bits = typename F::Bits;
  const auto* got = reinterpret_cast<const Bits*>(run.got_data());
  const auto* want = reinterpret_cast<const Bits*>(run.want_data());
  for (std::int64_t i = 0; i < run.count; ++i) {
    if (got[i] == want[i]) {
      continue;
    }
    ++findings.differing;
    if (const std::uint64_t ulp = F::distance(got[i], want[i]); ulp > findings.ulp) {
      findings.ulp = ulp;
      findings.run = &run;
      findings.position = i;
    }
  }
}

Findings compare_exactly(const std::vector<Run>& runs) {
  Findings findings;
  findings.start_with(runs);
  for (const Run& run : runs) {
    if (!run.is_equal()) {
      with_format(run.got.scalar_type(),
                  [&](auto format, auto) { compare_bits(format, run, findings); });
    }
  }
  return findings;
}

/// Share of the bound that a difference uses. Only the same NaN-ness or infinity will do where the
/// wanted value is not finite, and nothing that is not finite where it is.
double share_of_bound(double got, double want, double allowed) {
  if (!std::isfinite(want)) {
    const bool same = std::isnan(want) ? std::isnan(got) : got == want;
    return same ? 0 : std::numeric_limits<double>::infinity();
  }
  const double difference = std::fabs(got - want);
  if (difference == 0) {
    return 0;
  }
  const double share = difference / allowed;
  return std::isnan(share) ? std::numeric_limits<double>::infinity() : share;
}

template <typename T, typename W>
void compare_within(const T* got, const W* want, const double* allowed, const Run& run,
                    Findings& findings) {
  for (std::int64_t i = 0; i < run.count; ++i) {
    const auto value = static_cast<double>(got[i]);
    const auto wanted = static_cast<double>(want[i]);
    // The common case without a division; false for a NaN anywhere.
    if (std::fabs(value - wanted) <= std::min(findings.ratio, 1.0) * allowed[i]) {
      continue;
    }
    const double share = share_of_bound(value, wanted, allowed[i]);
    findings.differing += share <= 1 ? 0 : 1;
    if (share > findings.ratio) {
      findings.ratio = share;
      findings.allowed = allowed[i];
      findings.run = &run;
      findings.position = i;
    }
  }
}

/// `allowed` is float64, of the shape of the whole tensor.
Findings compare_bounded(const std::vector<Run>& runs, const at::Tensor& allowed) {
  Findings findings;
  findings.start_with(runs);
  for (const Run& run : runs) {
    with_format(run.got.scalar_type(), [&]<typename T>(auto, const T*) {
      with_format(run.want.scalar_type(), [&]<typename W>(auto, const W*) {
        compare_within(run.got.const_data_ptr<T>(), run.want.const_data_ptr<W>() + run.offset,
                       allowed.const_data_ptr<double>() + run.offset, run, findings);
      });
    });
  }
  return findings;
}

/// Adds |want - centre| to each element of `allowed`; all have one shape, `centre` is float64.
void add_distance(const at::Tensor& want, const at::Tensor& centre, const at::Tensor& allowed) {
  with_format(want.scalar_type(), [&]<typename W>(auto, const W*) {
    const W* from = want.const_data_ptr<W>();
    const auto* to = centre.const_data_ptr<double>();
    auto* bound = allowed.mutable_data_ptr<double>();
    for (std::int64_t i = 0; i < allowed.numel(); ++i) {
      bound[i] += std::fabs(static_cast<double>(from[i]) - to[i]);
    }
  });
}

// ---- Layout -------------------------------------------------------------------------------------

// How many places with the right first value are looked at: a tensor of zeros has as many as
// elements.
constexpr int kMaxCandidates = 256;

/// Where in the wanted tensor the run's values stand, as a shift from where they should; only if at
/// least half of the run lies there, and all of what does agrees.
template <typename Bits>
std::optional<std::int64_t> find_shift(const Bits* got, const Run& run) {
  const auto* want = reinterpret_cast<const Bits*>(run.want.const_data_ptr());
  const std::int64_t whole = run.want.numel();
  const std::int64_t anchor = run.count / 2;
  int candidates = 0;
  for (const Bits* at = want; candidates < kMaxCandidates; ++at, ++candidates) {
    at = std::find(at, want + whole, got[anchor]);
    if (at == want + whole) {
      break;
    }
    const std::int64_t begin = at - want - anchor;  // where the run would begin
    const std::int64_t from = std::max<std::int64_t>(begin, 0);
    const std::int64_t to = std::min(begin + run.count, whole);
    const bool agrees = 2 * (to - from) >= run.count && to - from >= 2 &&
                        std::memcmp(got + (from - begin), want + from,
                                    static_cast<std::size_t>(to - from) * sizeof(Bits)) == 0;
    if (agrees) {
      return begin - run.offset;
    }
  }
  return std::nullopt;
}

/// Whether all elements are the same number, so that a shift could not be seen.
template <typename Bits>
bool is_constant(const Bits* values, std::int64_t count) {
  return std::all_of(values, values + count, [&](Bits value) { return value == values[0]; });
}

/// The same for any order of the same values, and, but for chance, only then.
template <typename Bits>
std::uint64_t unordered_digest(const Bits* values, std::int64_t count) {
  std::uint64_t sum = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint64_t mixed = values[i] * 0x9E37'79B9'7F4A'7C15ULL;
    mixed ^= mixed >> 29;
    sum += mixed * 0xBF58'476D'1CE4'E5B9ULL;
  }
  return sum;
}

std::string describe_shift(const Run& run, std::int64_t shift, const std::vector<Run>& runs) {
  const std::int64_t begin = run.offset + shift;
  for (const Run& other : runs) {
    if (other.rank != run.rank && other.offset == begin && other.count == run.count) {
      return fmt::format("rank {}'s piece is rank {}'s: the values are those of elements [{}, {})",
                         run.rank, other.rank, begin, begin + run.count);
    }
  }
  return fmt::format("{} holds elements [{}, {}), but the values are those of elements [{}, {})",
                     holder_name(run.rank), run.offset, run.offset + run.count,
                     std::max<std::int64_t>(begin, 0),
                     std::min(begin + run.count, run.want.numel()));
}

template <typename Bits>
std::string describe_layout(const std::vector<Run>& runs, bool own_values) {
  const auto got = [](const Run& run) { return reinterpret_cast<const Bits*>(run.got_data()); };
  for (const Run& run : runs) {
    if (run.is_equal() || is_constant(got(run), run.count)) {
      continue;
    }
    for (const Run& other : runs) {
      if (own_values && other.rank != run.rank && other.count == run.count &&
          std::memcmp(got(run), other.want_data(),
                      static_cast<std::size_t>(run.count) * sizeof(Bits)) == 0) {
        return fmt::format("rank {}'s values are those of rank {}", run.rank, other.rank);
      }
    }
    if (const auto shift = find_shift(got(run), run)) {
      return describe_shift(run, *shift, runs);
    }
  }
  std::uint64_t got_digest = 0;
  std::uint64_t want_digest = 0;
  for (const Run& run : runs) {
    got_digest += unordered_digest(got(run), run.count);
    want_digest += unordered_digest(reinterpret_cast<const Bits*>(run.want_data()), run.count);
  }
  return got_digest == want_digest ? "the values are the wanted ones in another order" : "";
}

/// Tells a layout error from a value error: where the values that are seen would belong, or "".
std::string layout_message(const std::vector<Run>& runs, bool own_values) {
  const bool is_scalar =
      std::all_of(runs.begin(), runs.end(), [](const Run& run) { return run.want.numel() < 2; });
  if (runs.empty() || (is_scalar && !own_values)) {
    return "";
  }
  return with_format(runs.front().got.scalar_type(), [&](auto format, auto) {
    return describe_layout<typename decltype(format)::Bits>(runs, own_values);
  });
}

// ---- Verdicts -----------------------------------------------------------------------------------

std::vector<std::int64_t> index_of(std::int64_t element, const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> index(shape.size());
  for (std::size_t d = shape.size(); d-- > 0;) {
    index[d] = element % shape[d];
    element /= shape[d];
  }
  return index;
}

void write_down(const Findings& findings, const std::vector<std::int64_t>& shape,
                Verdict& verdict) {
  verdict.elements = findings.elements;
  verdict.differing = findings.differing;
  verdict.outcome = findings.differing == 0 ? Outcome::passed : Outcome::failed;
  verdict.allowed = findings.allowed;
  verdict.worst_ratio = findings.ratio;
  verdict.ulp = findings.ulp;
  if (findings.run == nullptr) {
    return;
  }
  const Run& run = *findings.run;
  verdict.rank = run.rank;
  verdict.element = run.offset + findings.position;
  verdict.index = index_of(verdict.element, shape);
  verdict.got = value_at(run.got_data(), findings.position, run.got.scalar_type());
  verdict.want = value_at(run.want_data(), findings.position, run.want.scalar_type());
}

/// One step of one reference.
class StepComparison {
 public:
  StepComparison(const Scenario& scenario, const StepTrace& subject, const Expectation& expectation)
      : scenario_(scenario), subject_(subject), expectation_(expectation) {
    for (const TraceTensor& tensor : expectation.want->tensors) {
      wanted_[{tensor.quantity, tensor.name}] = &tensor;
      wanted_quantities_.insert(tensor.quantity);
    }
  }

  std::vector<Verdict> run() {
    std::set<Key> seen;
    for (const TraceTensor& got : subject_.tensors) {
      const Key key{got.quantity, got.name};
      if (!seen.insert(key).second) {
        add_fault(got.quantity, got.name, "the subject has it twice");
        continue;
      }
      const auto want = wanted_.find(key);
      if (want != wanted_.end() && got.quantity != Quantity::mean_loss) {
        add(compare(got, *want->second));
      } else if (want == wanted_.end() && must_be_known(got.quantity)) {
        add_fault(got.quantity, got.name,
                  "the subject has it, the reference does not" + hint_at_absence(got.quantity));
      }
      // Right after the losses that it is the mean of.
      if (got.quantity == Quantity::loss) {
        add_mean_loss();
      }
    }
    for (const TraceTensor& want : expectation_.want->tensors) {
      if (want.quantity == Quantity::mean_loss) {
        add_mean_loss();
      } else if (!seen.contains({want.quantity, want.name})) {
        add_fault(want.quantity, want.name, "the reference has it, the subject does not");
      }
    }
    return std::move(verdicts_);
  }

 private:
  using Key = std::pair<Quantity, std::string>;

  /// A reference that does everything the subject does knows every tensor; the others only those of
  /// the quantities that they produce.
  bool must_be_known(Quantity quantity) const {
    // What is recomputed is held to what was saved.
    if (quantity == Quantity::mean_loss || quantity == Quantity::saved_activation ||
        quantity == Quantity::recomputed_activation) {
      return quantity == Quantity::recomputed_activation && expectation_.reference == "stored";
    }
    return expectation_.reference == "replay" || expectation_.reference == "python" ||
           wanted_quantities_.contains(quantity);
  }

  /// Why the reference may have no such tensor.
  static std::string hint_at_absence(Quantity quantity) {
    if (quantity == Quantity::gradient || quantity == Quantity::clipped_gradient) {
      return "; a parameter that is frozen, or that no rank's loss depends on, has no gradient";
    }
    if (quantity == Quantity::optimizer_state) {
      return "; a parameter that never had a gradient has no optimizer state";
    }
    return "";
  }

  Verdict begin(Quantity quantity, const std::string& name) const {
    const Rule rule = rule_for(scenario_, expectation_.reference, quantity);
    Verdict verdict;
    verdict.check =
        check_name(scenario_, "equivalence", to_string(quantity), expectation_.reference);
    verdict.reference = expectation_.reference;
    verdict.step = subject_.step;
    verdict.quantity = quantity;
    verdict.name = name;
    verdict.rule = rule.kind;
    verdict.rule_source = rule.source;
    return verdict;
  }

  void add(Verdict verdict) { verdicts_.push_back(std::move(verdict)); }

  void add_fault(Quantity quantity, const std::string& name, const std::string& message) {
    Verdict verdict = begin(quantity, name);
    verdict.outcome = Outcome::failed;
    verdict.message = message;
    add(std::move(verdict));
  }

  at::ScalarType scenario_dtype() const { return dtype_named(scenario_.dtype); }

  Verdict compare(const TraceTensor& got, const TraceTensor& want) {
    Verdict verdict = begin(got.quantity, got.name);
    const bool exact = verdict.rule == RuleKind::exact;
    try {
      if (want.pieces.empty() || !want.pieces.front().values.defined()) {
        throw TraceError("the reference's tensor has no values");
      }
      const at::ScalarType dtype =
          exact ? want.pieces.front().values.scalar_type() : scenario_dtype();
      if (std::string fault = fault_of_structure(got, want, layout_of(scenario_), dtype);
          !fault.empty()) {
        throw TraceError(fault);
      }
      const std::vector<Run> runs = pair_up(got, want);
      if (exact) {
        write_down(compare_exactly(runs), got.shape, verdict);
        if (verdict.outcome == Outcome::failed) {
          verdict.message = layout_message(runs, want.placement == Placement::per_rank);
        }
      } else {
        compare_with_bound(runs, got, verdict);
      }
    } catch (const TraceError& error) {
      verdict.outcome = Outcome::failed;
      verdict.message = error.what();
    }
    return verdict;
  }

  void compare_with_bound(const std::vector<Run>& runs, const TraceTensor& got, Verdict& verdict) {
    const at::Tensor bound = allowed(got.quantity, got.name, runs.front().want);
    write_down(compare_bounded(runs, bound), got.shape, verdict);
    verdict.ulp = ulp_distance(verdict.got, verdict.want, scenario_dtype());
  }

  /// The bound on the distance from `want`: that from the float64 run, and want's own from it.
  at::Tensor allowed(Quantity quantity, const std::string& name, const at::Tensor& want) {
    const at::Tensor bound = bounds().allowed(quantity, name);
    if (bound.sizes() != want.sizes()) {
      throw TraceError("the float64 run has it in another shape");
    }
    if (expectation_.want == expectation_.float64) {
      return bound;
    }
    const at::Tensor centre =
        quantity == Quantity::mean_loss
            ? torch::full({}, mean_loss_of(*expectation_.float64), at::kDouble)
            : plain(assemble(*expectation_.float64->find(quantity, name))).to(at::kDouble);
    add_distance(want, centre, bound);
    return bound;
  }

  const StepBounds& bounds() {
    if (!bounds_) {
      if (expectation_.trusted == nullptr || expectation_.float64 == nullptr ||
          expectation_.start == nullptr) {
        throw std::invalid_argument(
            fmt::format("compare_step: reference \"{}\" is held to a bound, which needs `trusted`, "
                        "`float64` and `start` in the expectation",
                        expectation_.reference));
      }
      bounds_.emplace(scenario_, *expectation_.trusted, *expectation_.float64, *expectation_.start);
    }
    return *bounds_;
  }

  /// Once, if the reference has a mean loss.
  void add_mean_loss() {
    if (has_mean_loss_ || !wanted_quantities_.contains(Quantity::mean_loss)) {
      return;
    }
    has_mean_loss_ = true;
    Verdict verdict = begin(Quantity::mean_loss, "mean_loss");
    try {
      Run run;
      run.count = 1;
      run.got = torch::full({}, mean_of_ranks(), at::kDouble);
      run.want = torch::full({}, mean_loss_of(*expectation_.want), at::kDouble);
      const std::vector<Run> runs = {run};
      if (verdict.rule == RuleKind::exact) {
        write_down(compare_exactly(runs), {}, verdict);
      } else {
        write_down(compare_bounded(runs, allowed(Quantity::mean_loss, "mean_loss", run.want)), {},
                   verdict);
        verdict.ulp = ulp_distance(verdict.got, verdict.want, scenario_dtype());
      }
    } catch (const TraceError& error) {
      verdict.outcome = Outcome::failed;
      verdict.message = error.what();
    }
    add(std::move(verdict));
  }

  /// Of every rank's own losses, never of a number that the subject reduced by itself.
  double mean_of_ranks() const {
    const TraceTensor* losses = subject_.find(Quantity::loss, "loss");
    if (losses == nullptr) {
      throw TraceError("the subject has no losses");
    }
    if (losses->placement != Placement::single) {
      if (std::string fault = fault_of_ranks(*losses, scenario_.world_size); !fault.empty()) {
        throw TraceError("of the losses: " + fault);
      }
    }
    StepTrace only_losses;
    only_losses.step = subject_.step;
    only_losses.tensors = {*losses};
    return mean_loss_of(only_losses);
  }

  const Scenario& scenario_;
  const StepTrace& subject_;
  const Expectation& expectation_;
  std::map<Key, const TraceTensor*> wanted_;
  std::set<Quantity> wanted_quantities_;
  std::optional<StepBounds> bounds_;
  std::vector<Verdict> verdicts_;
  bool has_mean_loss_ = false;
};

}  // namespace

std::uint64_t ulp_distance(double a, double b, at::ScalarType dtype) {
  return with_format(dtype, [&]<typename F, typename T>(F, const T*) {
    return F::distance(std::bit_cast<typename F::Bits>(static_cast<T>(a)),
                       std::bit_cast<typename F::Bits>(static_cast<T>(b)));
  });
}

std::vector<Verdict> compare_step(const Scenario& scenario, const StepTrace& subject,
                                  const Expectation& expectation) {
  if (expectation.want == nullptr) {
    throw std::invalid_argument("compare_step: the expectation has no trace");
  }
  return StepComparison(scenario, subject, expectation).run();
}

std::vector<Verdict> compare_recomputation(const Scenario& scenario, const StepTrace& subject) {
  StepTrace saved;
  saved.step = subject.step;
  for (const TraceTensor& tensor : subject.tensors) {
    if (tensor.quantity == Quantity::saved_activation) {
      saved.tensors.push_back(tensor);
      saved.tensors.back().quantity = Quantity::recomputed_activation;
    }
  }
  Expectation expectation;
  expectation.reference = "stored";
  expectation.want = &saved;
  return StepComparison(scenario, subject, expectation).run();
}

const Verdict* first_divergence(const std::vector<Verdict>& verdicts) {
  const auto when = [](const Verdict& verdict) {
    // Guards are about the whole run, and come after what is wrong in a step.
    return std::tuple(verdict.rule == RuleKind::guard, verdict.step, verdict.quantity);
  };
  const Verdict* first = nullptr;
  for (const Verdict& verdict : verdicts) {
    if (verdict.outcome == Outcome::failed && (first == nullptr || when(verdict) < when(*first))) {
      first = &verdict;
    }
  }
  return first;
}

}  // namespace shardproof
