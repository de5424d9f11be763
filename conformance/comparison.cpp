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

#include "conformance/tolerance.h"
#include "conformance/trace_io.h"

namespace shardproof {
namespace {

constexpr std::uint64_t kFurthest = std::numeric_limits<std::uint64_t>::max();

// ---- Bits ---------------------------------------------------------------------------------------

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

bool is_comparable(at::ScalarType dtype) {
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

double value_at(const void* values, std::int64_t i, at::ScalarType dtype) {
  return with_format(dtype, [&]<typename T>(auto, const T*) {
    return static_cast<double>(static_cast<const T*>(values)[i]);
  });
}

at::Tensor plain(const at::Tensor& tensor) {
  return tensor.detach().to(at::kCPU).contiguous();
}

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

std::string holder_name(int rank) {
  return rank == kNoRank ? std::string("the single device") : fmt::format("rank {}", rank);
}

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

/// Whether sharded pieces hold every one of `count` elements once; what is wrong, or "".
std::string fault_of_tiling(const TraceTensor& tensor, std::int64_t count) {
  std::vector<const Piece*> pieces;
  for (const Piece& piece : tensor.pieces) {
    if (piece.values.numel() > 0) {
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

std::int64_t numel_of(const TraceTensor& tensor) {
  return c10::multiply_integers(tensor.shape);
}

std::string fault_of_structure(const TraceTensor& got, const TraceTensor& want, int world_size,
                               at::ScalarType dtype) {
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
    fault = fault_of_tiling(got, numel_of(got));
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

std::string check_name(const Scenario& scenario, std::string_view area, std::string_view behaviour,
                       std::string_view variant) {
  std::string name = fmt::format("fsdp.{}.{}.{}.w{}.{}_{}{}{}", area, behaviour, scenario.dtype,
                                 scenario.world_size, scenario.model.kind, scenario.optimizer.kind,
                                 variant.empty() ? "" : "_", variant);
  for (char& c : name) {
    if (!((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.')) {
      c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : '_';
    }
  }
  return name;
}

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
        add_fault(got.quantity, got.name, "the subject has it, the reference does not");
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
    if (quantity == Quantity::mean_loss) {
      return false;
    }
    return expectation_.reference == "replay" || expectation_.reference == "python" ||
           wanted_quantities_.contains(quantity);
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

  at::ScalarType scenario_dtype() const {
    return scenario_.dtype == "float64" ? at::kDouble : at::kFloat;
  }

  Verdict compare(const TraceTensor& got, const TraceTensor& want) {
    Verdict verdict = begin(got.quantity, got.name);
    const bool exact = verdict.rule == RuleKind::exact;
    try {
      if (want.pieces.empty() || !want.pieces.front().values.defined()) {
        throw TraceError("the reference's tensor has no values");
      }
      const at::ScalarType dtype =
          exact ? want.pieces.front().values.scalar_type() : scenario_dtype();
      if (std::string fault = fault_of_structure(got, want, scenario_.world_size, dtype);
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

// ---- Guards -------------------------------------------------------------------------------------

namespace {

/// Of a tensor's bytes; equal for equal bytes.
std::uint64_t digest(const at::Tensor& tensor, std::uint64_t seed) {
  const at::Tensor values = plain(tensor);
  const auto* bytes = static_cast<const char*>(values.const_data_ptr());
  std::size_t left = values.nbytes();
  std::uint64_t hash = seed ^ left;
  while (left > 0) {
    std::uint64_t word = 0;
    const std::size_t taken = std::min(left, sizeof(word));
    std::memcpy(&word, bytes, taken);
    hash = std::rotl(hash ^ word, 29) * 0x9E37'79B9'7F4A'7C15ULL;
    bytes += taken;
    left -= taken;
  }
  return hash ^ (hash >> 32);
}

bool has_nonzero(const at::Tensor& tensor) {
  const at::Tensor values = plain(tensor);
  return with_format(values.scalar_type(), [&]<typename T>(auto, const T*) {
    const T* data = values.const_data_ptr<T>();
    return std::any_of(data, data + values.numel(),
                       [](T value) { return !(static_cast<float>(value) == 0.0F); });
  });
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  // An empty tensor has no address, which memcmp must not be given.
  return a.nbytes() == b.nbytes() &&
         (a.nbytes() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

bool same_values(const TraceTensor& a, const TraceTensor& b) {
  if (a.pieces.size() != b.pieces.size()) {
    return false;
  }
  for (std::size_t i = 0; i < a.pieces.size(); ++i) {
    if (!same_bits(plain(a.pieces[i].values), plain(b.pieces[i].values))) {
      return false;
    }
  }
  return true;
}

/// "a, b, c and 4 more".
std::string listed(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 3;
  if (names.size() <= kShown) {
    return fmt::format("{}", fmt::join(names, ", "));
  }
  return fmt::format("{} and {} more", fmt::join(names.begin(), names.begin() + kShown, ", "),
                     names.size() - kShown);
}

}  // namespace

struct TrainingGuards::Impl {
  explicit Impl(const Scenario& asked) : scenario(asked) {}

  Scenario scenario;
  int steps = 0;
  int last_step = -1;
  std::vector<double> losses;                 // the mean at each step
  std::string first_nonfinite;                // where a loss was not finite
  std::vector<std::uint64_t> rank_histories;  // digests of each rank's losses and outputs
  std::vector<double> last_rank_losses;
  std::map<std::string, bool> gradient_seen;  // whether it was ever not zero
  std::map<std::string, std::uint64_t> first_parameters;
  std::map<std::string, bool> parameter_moved;
  double least_norm = std::numeric_limits<double>::infinity();
  double largest_norm = -std::numeric_limits<double>::infinity();
  bool has_clipped = false;
  std::set<std::string> first_tensors;
  std::string irregularity;           // the first step that lacks something
  std::set<std::string> not_by_rank;  // quantities of which only one copy was recorded

  void observe(const StepTrace& trace) {
    observe_steps(trace);
    for (const TraceTensor& tensor : trace.tensors) {
      observe(tensor, trace);
    }
    ++steps;
    last_step = trace.step;
  }

  void observe(const TraceTensor& tensor, const StepTrace& trace) {
    if (tensor.placement == Placement::single && tensor.quantity != Quantity::mean_loss) {
      not_by_rank.insert(std::string(to_string(tensor.quantity)));
    }
    switch (tensor.quantity) {
      case Quantity::loss:
        observe_loss(tensor, trace.step);
        break;
      case Quantity::output:
        // The layers' outputs would say no more.
        if (tensor.name.starts_with("model@")) {
          observe_ranks(tensor);
        }
        break;
      case Quantity::gradient:
        observe_gradient(tensor, trace);
        break;
      case Quantity::total_norm:
        observe_norm(tensor);
        break;
      case Quantity::parameter:
        observe_parameter(tensor);
        break;
      default:
        break;
    }
  }

  void observe_steps(const StepTrace& trace) {
    if (irregularity.empty() && trace.step != last_step + 1) {
      irregularity = fmt::format("step {} follows step {}", trace.step, last_step);
    }
    std::set<std::string> tensors;
    std::set<Quantity> quantities;
    for (const TraceTensor& tensor : trace.tensors) {
      tensors.insert(fmt::format("{} \"{}\"", to_string(tensor.quantity), tensor.name));
      quantities.insert(tensor.quantity);
    }
    if (irregularity.empty()) {
      irregularity = missing_quantity(trace.step, quantities);
    }
    if (steps == 0) {
      first_tensors = std::move(tensors);
    } else if (irregularity.empty() && tensors != first_tensors) {
      std::vector<std::string> changed;
      std::set_symmetric_difference(tensors.begin(), tensors.end(), first_tensors.begin(),
                                    first_tensors.end(), std::back_inserter(changed));
      irregularity = fmt::format("step {} and the first step do not have the same tensors: {}",
                                 trace.step, listed(changed));
    }
  }

  std::string missing_quantity(int step, const std::set<Quantity>& seen) const {
    std::vector<Quantity> required = {Quantity::output,           Quantity::loss,
                                      Quantity::gradient,         Quantity::total_norm,
                                      Quantity::clipped_gradient, Quantity::parameter};
    if (scenario.optimizer.kind != "sgd" || scenario.optimizer.momentum != 0) {
      required.push_back(Quantity::optimizer_state);
    }
    for (const Quantity quantity : required) {
      if (!seen.contains(quantity)) {
        return fmt::format("step {} has no {}", step, to_string(quantity));
      }
    }
    return "";
  }

  void observe_loss(const TraceTensor& tensor, int step) {
    observe_ranks(tensor);
    last_rank_losses.clear();
    double sum = 0;
    for (const Piece& piece : tensor.pieces) {
      const double loss = piece.values.to(at::kDouble).mean().item<double>();
      if (first_nonfinite.empty() && !std::isfinite(loss)) {
        first_nonfinite = fmt::format("step {}, {}: {}", step, holder_name(piece.rank), loss);
      }
      last_rank_losses.push_back(loss);
      sum += loss;
    }
    losses.push_back(sum / static_cast<double>(tensor.pieces.size()));
  }

  void observe_ranks(const TraceTensor& tensor) {
    rank_histories.resize(std::max(rank_histories.size(), tensor.pieces.size()));
    for (std::size_t i = 0; i < tensor.pieces.size(); ++i) {
      rank_histories[i] = digest(tensor.pieces[i].values, rank_histories[i]);
    }
  }

  void observe_gradient(const TraceTensor& gradient, const StepTrace& trace) {
    bool& seen = gradient_seen[gradient.name];
    for (const Piece& piece : gradient.pieces) {
      seen = seen || has_nonzero(piece.values);
    }
    if (!has_clipped && scenario.max_norm > 0) {
      const TraceTensor* clipped = trace.find(Quantity::clipped_gradient, gradient.name);
      has_clipped = clipped != nullptr && !same_values(gradient, *clipped);
    }
  }

  void observe_norm(const TraceTensor& tensor) {
    for (const Piece& piece : tensor.pieces) {
      const double norm = piece.values.to(at::kDouble).max().item<double>();
      least_norm = std::min(least_norm, norm);
      largest_norm = std::max(largest_norm, norm);
    }
  }

  void observe_parameter(const TraceTensor& tensor) {
    std::uint64_t hash = 0;
    for (const Piece& piece : tensor.pieces) {
      hash = digest(piece.values, hash);
    }
    const auto [first, is_new] = first_parameters.emplace(tensor.name, hash);
    bool& moved = parameter_moved[tensor.name];
    moved = moved || (!is_new && first->second != hash);
  }

  Verdict verdict(std::string_view name, Quantity quantity, Outcome outcome,
                  std::string message) const {
    Verdict result;
    result.check = check_name(scenario, "guard", name, "");
    result.reference = "guard";
    result.step = std::max(last_step, 0);
    result.quantity = quantity;
    result.name = name;
    result.rule = RuleKind::guard;
    result.rule_source = "without it the other checks could not have failed";
    result.outcome = outcome;
    result.message = std::move(message);
    return result;
  }

  static Outcome passed_if(bool condition) { return condition ? Outcome::passed : Outcome::failed; }

  Verdict losses_finite() const {
    if (losses.empty()) {
      return verdict("losses_finite", Quantity::loss, Outcome::failed, "no loss was seen");
    }
    return verdict("losses_finite", Quantity::loss, passed_if(first_nonfinite.empty()),
                   first_nonfinite.empty()
                       ? fmt::format("the mean loss is finite in all {} steps, {} at the last",
                                     losses.size(), losses.back())
                       : "a loss is not finite: " + first_nonfinite);
  }

  Verdict losses_moved() const {
    if (losses.size() < 2) {
      return verdict("losses_moved", Quantity::loss, Outcome::not_applicable,
                     fmt::format("{} steps; it takes two", losses.size()));
    }
    const auto [least, largest] = std::minmax_element(losses.begin(), losses.end());
    return verdict(
        "losses_moved", Quantity::loss, passed_if(*least != *largest),
        *least != *largest
            ? fmt::format("the mean loss went from {} to {}", losses.front(), losses.back())
            : fmt::format("the mean loss is {} in all {} steps", losses.front(), losses.size()));
  }

  Verdict gradients_not_zero() const {
    std::vector<std::string> zero;
    for (const auto& [name, seen] : gradient_seen) {
      if (!seen) {
        zero.push_back(name);
      }
    }
    if (gradient_seen.empty()) {
      return verdict("gradients_not_zero", Quantity::gradient, Outcome::failed,
                     "no gradient was seen");
    }
    return verdict(
        "gradients_not_zero", Quantity::gradient, passed_if(zero.empty()),
        zero.empty()
            ? fmt::format("each of {} gradients was not zero at least once", gradient_seen.size())
            : fmt::format("{} of {} gradients were zero in all {} steps: {}", zero.size(),
                          gradient_seen.size(), steps, listed(zero)));
  }

  Verdict parameters_moved() const {
    if (steps < 2) {
      return verdict("parameters_moved", Quantity::parameter, Outcome::not_applicable,
                     fmt::format("{} steps; it takes two", steps));
    }
    std::vector<std::string> still;
    for (const auto& [name, moved] : parameter_moved) {
      if (!moved) {
        still.push_back(name);
      }
    }
    if (parameter_moved.empty()) {
      return verdict("parameters_moved", Quantity::parameter, Outcome::failed,
                     "no parameter was seen");
    }
    return verdict("parameters_moved", Quantity::parameter, passed_if(still.empty()),
                   still.empty()
                       ? fmt::format("each of {} parameters changed", parameter_moved.size())
                       : fmt::format("{} of {} parameters are the same after each of {} steps: {}",
                                     still.size(), parameter_moved.size(), steps, listed(still)));
  }

  Verdict clipping_bit() const {
    if (scenario.max_norm == 0) {
      return verdict("clipping_bit", Quantity::clipped_gradient, Outcome::not_applicable,
                     "no clipping was asked for");
    }
    const std::string seen = fmt::format("norms from {} to {}, max_norm {}", least_norm,
                                         largest_norm, scenario.max_norm);
    return verdict("clipping_bit", Quantity::clipped_gradient, passed_if(has_clipped),
                   has_clipped ? "gradients were clipped: " + seen
                               : "clipping was asked for and never exercised, every clipped "
                                 "gradient equals the gradient: " +
                                     seen);
  }

  Verdict ranks_had_different_data() const {
    constexpr std::string_view kName = "ranks_had_different_data";
    if (scenario.world_size == 1) {
      return verdict(kName, Quantity::loss, Outcome::not_applicable, "there is one rank");
    }
    if (rank_histories.size() != static_cast<std::size_t>(scenario.world_size)) {
      return verdict(kName, Quantity::loss, Outcome::failed,
                     fmt::format("{} ranks' losses were seen, the world size is {}",
                                 rank_histories.size(), scenario.world_size));
    }
    std::map<std::uint64_t, std::size_t> first_with;
    for (std::size_t rank = 0; rank < rank_histories.size(); ++rank) {
      const auto [other, is_new] = first_with.emplace(rank_histories[rank], rank);
      if (!is_new) {
        return verdict(
            kName, Quantity::loss, Outcome::failed,
            fmt::format(
                "ranks {} and {} have the same losses and outputs in all {} steps, {} at the last",
                other->second, rank, steps,
                rank < last_rank_losses.size() ? last_rank_losses[rank] : NAN));
      }
    }
    return verdict(
        kName, Quantity::loss, Outcome::passed,
        fmt::format("no two of {} ranks have the same losses and outputs", rank_histories.size()));
  }

  Verdict every_step_complete() const {
    std::string problem = irregularity;
    if (problem.empty() && steps != scenario.steps) {
      problem = fmt::format("{} steps were seen, the scenario has {}", steps, scenario.steps);
    }
    return verdict("every_step_complete", Quantity::output, passed_if(problem.empty()),
                   problem.empty() ? fmt::format("each of {} steps has the same {} tensors", steps,
                                                 first_tensors.size())
                                   : problem);
  }

  Verdict every_rank_recorded() const {
    constexpr std::string_view kName = "every_rank_recorded";
    if (scenario.world_size == 1) {
      return verdict(kName, Quantity::parameter, Outcome::not_applicable, "there is one rank");
    }
    return verdict(
        kName, Quantity::parameter, passed_if(not_by_rank.empty() && steps > 0),
        not_by_rank.empty()
            ? fmt::format("every tensor says which of {} ranks holds what", scenario.world_size)
            : fmt::format(
                  "one copy stands for all {} ranks, so the others were not compared, of: {}",
                  scenario.world_size, fmt::join(not_by_rank, ", ")));
  }
};

TrainingGuards::TrainingGuards(const Scenario& scenario)
    : impl_(std::make_unique<Impl>(scenario)) {}
TrainingGuards::~TrainingGuards() = default;

void TrainingGuards::observe(const StepTrace& subject) {
  impl_->observe(subject);
}

std::vector<Verdict> TrainingGuards::verdicts() const {
  return {impl_->losses_finite(),       impl_->losses_moved(),
          impl_->gradients_not_zero(),  impl_->parameters_moved(),
          impl_->clipping_bit(),        impl_->ranks_had_different_data(),
          impl_->every_rank_recorded(), impl_->every_step_complete()};
}

}  // namespace shardproof
