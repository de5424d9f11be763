#include "conformance/session.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <future>
#include <nlohmann/json.hpp>
#include <random>

#include "conformance/comparison.h"
#include "conformance/environment.h"
#include "conformance/fsdp_subject.h"
#include "conformance/python_reference.h"
#include "conformance/rank_messages.h"
#include "conformance/scratch_folder.h"
#include "conformance/trace_io.h"
#include "conformance/training_guards.h"
#include "reference/data.h"
#include "reference/models.h"
#include "reference/trainer.h"

namespace shardproof {
namespace {

/// The scenario with its corpus replaced by a copy, so that all programs and ranks train on the
/// same bytes even if somebody edits the files meanwhile.
Scenario with_frozen_corpus(Scenario scenario, const std::filesystem::path& scratch) {
  const Dataset data(scenario);
  if (data.corpus() == nullptr) {
    return scenario;
  }
  const auto copy = scratch / "corpus";
  std::ofstream out(copy, std::ios::binary);
  out << *data.corpus();
  out.close();
  if (!out) {
    throw FileError(fmt::format(
        "{}: cannot write a copy of the corpus; make room, or set TMPDIR to another folder",
        copy.string()));
  }
  scenario.data.corpus = {copy.string()};
  return scenario;
}

std::map<std::string, torch::Tensor> starting_weights(const SessionOptions& options) {
  auto weights = options.weights.empty() ? initial_parameters(options.scenario)
                                         : read_safetensors(options.weights).tensors;
  // Loading into a model checks names, shapes, dtypes and that every value is finite.
  try {
    auto model = make_model(options.scenario);
    load_parameters(*model, weights);
  } catch (const ScenarioError& error) {
    if (options.weights.empty()) {
      throw;
    }
    throw ScenarioError(fmt::format("{}: {}", options.weights.string(), error.what()));
  }
  return weights;
}

/// Why the whole batch on one device says nothing about a sharded run, or "".
std::string why_no_whole_batch(const Scenario& scenario) {
  if (scenario.model.dropout > 0) {
    return "each rank draws its own dropout masks";
  }
  const auto& precision = scenario.precision;
  for (const auto& dtype : {scenario.dtype, parameter_dtype(scenario), reduce_dtype(scenario),
                            precision.output, precision.buffer}) {
    if (dtype == "bfloat16" || dtype == "float16") {
      return fmt::format(
          "something is computed in {}, whose roundings are too large for the bounds", dtype);
    }
    if (!dtype.empty() && dtype != scenario.dtype) {
      return fmt::format("something is computed in {} and the rest in {}", dtype, scenario.dtype);
    }
  }
  if (scenario.loss_scale > 0) {
    return "whether a step is left out for its scaled gradient depends on how the sums are rounded";
  }
  return "";
}

/// The references that a scenario allows, and what each computes at a step.
class References {
 public:
  References(const SessionOptions& options, const Scenario& scenario,
             const std::map<std::string, torch::Tensor>& weights,
             const std::filesystem::path& scratch, std::vector<std::string>& notes)
      : scenario_(scenario), lockstep_(options.lockstep) {
    replay_ = std::make_unique<ReferenceTrainer>(scenario_, ReferenceMode::replay, weights);
    if (options.python) {
      PythonReference::Options python;
      python.python = options.python_executable;
      python.work_folder = scratch;
      python.timeout = options.timeout;
      python_ = std::make_unique<PythonReference>(scenario_, weights, python);
    } else {
      notes.push_back(
          "python: left out as asked; the C++ replay was not held to an independent reference");
    }
    auto reason = why_no_whole_batch(scenario_);
    if (reason.empty() && !lockstep_) {
      reason = "their bounds hold for one step from the subject's own state";
    }
    if (reason.empty() && scenario_.dtype == "float64") {
      reason = "there is no wider dtype to derive a bound from";
    }
    if (!reason.empty()) {
      notes.push_back("whole, float64: not applicable, since " + reason);
    } else {
      whole_ = std::make_unique<ReferenceTrainer>(scenario_, ReferenceMode::whole, weights);
      float64_ = std::make_unique<ReferenceTrainer>(scenario_, ReferenceMode::float64, weights);
    }
  }

  /// All references train the step, at the same time; then the subject's step is held to each.
  std::vector<Verdict> judge(const StepTrace& subject, const TrainingState& before) {
    const int step = subject.step;
    const bool follow = lockstep_ && step > 0;  // at the start all have the same weights
    const auto train = [&](std::unique_ptr<ReferenceTrainer>& trainer) {
      return std::async(std::launch::async, [&trainer, &before, follow, step]() -> StepTrace {
        if (trainer == nullptr) {
          return {};
        }
        if (follow) {
          trainer->set_state(before);
        }
        return trainer->step(step);
      });
    };
    auto replay = train(replay_);
    auto whole = train(whole_);
    auto float64 = train(float64_);
    auto python = std::async(std::launch::async, [&]() -> StepTrace {
      return python_ == nullptr ? StepTrace{} : python_->step(step, follow ? &before : nullptr);
    });
    const auto replayed = replay.get();
    const auto wholed = whole.get();
    const auto wide = float64.get();
    const auto pythoned = python.get();

    std::vector<Verdict> verdicts;
    const auto hold = [&](const char* name, const StepTrace& want) {
      if (want.tensors.empty()) {
        return;
      }
      Expectation expectation;
      expectation.reference = name;
      expectation.want = &want;
      expectation.trusted = &replayed;
      expectation.float64 = &wide;
      expectation.start = &before;
      auto more = compare_step(scenario_, subject, expectation);
      std::move(more.begin(), more.end(), std::back_inserter(verdicts));
    };
    hold("replay", replayed);
    hold("python", pythoned);
    hold("whole", wholed);
    hold("float64", wide);
    auto more = compare_recomputation(scenario_, subject);
    std::move(more.begin(), more.end(), std::back_inserter(verdicts));
    return verdicts;
  }

  void finish() {
    if (python_) {
      python_->finish();
    }
  }

 private:
  const Scenario scenario_;
  bool lockstep_;
  std::unique_ptr<ReferenceTrainer> replay_;
  std::unique_ptr<ReferenceTrainer> whole_;
  std::unique_ptr<ReferenceTrainer> float64_;
  std::unique_ptr<PythonReference> python_;
};

/// How far the subject and the whole batch on one device part when neither is set back: reported,
/// not judged.
class FreeRun {
 public:
  FreeRun(const Scenario& scenario, const std::map<std::string, torch::Tensor>& weights)
      : trainer_(scenario, ReferenceMode::whole, weights) {}
  void step(int step) { last_ = trainer_.step(step); }
  std::string distance_from(const StepTrace& subject) const {
    double difference = 0;
    double size = 0;
    for (const auto& tensor : subject.tensors) {
      if (tensor.quantity != Quantity::parameter) {
        continue;
      }
      const auto* want = last_.find(tensor.quantity, tensor.name);
      if (want == nullptr) {
        continue;
      }
      const auto expected = assemble(*want).to(torch::kDouble);
      difference += (assemble(tensor).to(torch::kDouble) - expected).square().sum().item<double>();
      size += expected.square().sum().item<double>();
    }
    return fmt::format(
        "free-running for {} steps, parameters differ from the whole batch on one device by {:.2e} "
        "of their norm "
        "(reported, not judged)",
        subject.step + 1, std::sqrt(difference / size));
  }

 private:
  ReferenceTrainer trainer_;
  StepTrace last_;
};

void refuse_what_is_not_here(const Scenario& scenario, const fsdp::BackendPtr& group) {
  const auto backend = group == nullptr ? std::string("in_process") : group->getBackendName();
  if (scenario.backend != backend) {
    throw ScenarioError(fmt::format("backend is \"{}\"; wanted: \"{}\", {}", scenario.backend,
                                    backend,
                                    group == nullptr ? "the only one without a launcher"
                                                     : "which the ranks have been started with"));
  }
  if (group != nullptr && group->getSize() != scenario.world_size) {
    throw ScenarioError(fmt::format("world_size is {}; wanted: {}, the number of ranks started",
                                    scenario.world_size, group->getSize()));
  }
  if (scenario.device != "cpu") {
    throw ScenarioError(fmt::format("device is \"{}\"; wanted: \"cpu\", the only one in this build",
                                    scenario.device));
  }
  // libtorch's optimizers add with a factor (Tensor::add_ with alpha), which rounds 16-bit numbers
  // once in the vectorised part of a tensor and twice in the rest, so that what a shard's last
  // elements get depends on how the parameter was cut.
  const bool is_narrow = scenario.dtype == "bfloat16" || scenario.dtype == "float16";
  if (is_narrow && layout_of(scenario).shards > 1) {
    throw ScenarioError(fmt::format(
        "dtype is \"{}\" with {} shards; wanted: float32 or float64 (and \"{}\" as "
        "precision.parameter), or one shard: an optimizer's sums of 16-bit numbers depend on where "
        "a shard ends, so that no sharded run can equal one device",
        scenario.dtype, layout_of(scenario).shards, scenario.dtype));
  }
}

/// Numbers that the dtype cannot hold would be rounded to infinity or zero on the way.
void refuse_what_the_dtype_cannot_hold(const Scenario& scenario) {
  double largest = 1e18;
  double smallest = 1e-18;
  if (scenario.dtype == "float64") {
    largest = 1e150;
    smallest = 1e-150;
  } else if (scenario.dtype == "float16") {  // from 2^-24 to 65504
    largest = 250;
    smallest = 2.5e-4;
  }
  const auto check = [&](const char* field, double value) {
    if (value != 0 && (value > largest || value < smallest)) {
      throw ScenarioError(fmt::format(
          "{} is {}; wanted with {}: 0, or from {} to {}, so that it and its square can be held",
          field, value, scenario.dtype, smallest, largest));
    }
  };
  check("divide.pre", scenario.divide.pre);
  check("divide.post", scenario.divide.post);
  check("max_norm", scenario.max_norm);
  check("optimizer.lr", scenario.optimizer.lr);
  check("optimizer.eps", scenario.optimizer.eps);
  check("optimizer.weight_decay", scenario.optimizer.weight_decay);
}

void refuse_non_finite_losses(const StepTrace& subject) {
  for (const auto& tensor : subject.tensors) {
    if (tensor.quantity != Quantity::loss) {
      continue;
    }
    for (const auto& piece : tensor.pieces) {
      if (!torch::isfinite(piece.values).all().item<bool>()) {
        throw fsdp::NonFiniteError(
            fmt::format("rank {}: the loss of step {} is {}; wanted: a finite number. Lower the "
                        "learning rate (--lr), or look "
                        "at the initial weights",
                        piece.rank, subject.step, piece.values[0].item<double>()));
      }
    }
  }
}

/// A digest of bytes to tell different inputs apart by, eight bytes at a time with the mixer of the
/// data's generator; not for security.
class Digest {
 public:
  void add(std::string_view bytes) {
    for (std::size_t at = 0; at < bytes.size(); at += sizeof(std::uint64_t)) {
      std::uint64_t word = 0;
      std::memcpy(&word, bytes.data() + at, std::min(sizeof(word), bytes.size() - at));
      value_ = hash_counters(value_, {word});
    }
    value_ = hash_counters(value_, {bytes.size()});
  }
  std::string text() const { return fmt::format("{:016x}", value_); }

 private:
  std::uint64_t value_ = 0;
};

void add(Digest& digest, const torch::Tensor& tensor) {
  const auto whole = tensor.cpu().contiguous();
  digest.add({static_cast<const char*>(whole.const_data_ptr()), whole.nbytes()});
}

/// Names, places and values of a step.
void add(Digest& digest, const StepTrace& trace) {
  for (const auto& tensor : trace.tensors) {
    digest.add(fmt::format("{} {} {}", trace.step, to_string(tensor.quantity), tensor.name));
    for (const auto& piece : tensor.pieces) {
      digest.add(fmt::format("{} {} {}", piece.rank, piece.offset,
                             c10::toString(piece.values.scalar_type())));
      add(digest, piece.values);
    }
  }
}

std::string digest_of(const std::map<std::string, torch::Tensor>& tensors) {
  Digest digest;
  for (const auto& [name, tensor] : tensors) {
    digest.add(name);
    add(digest, tensor);
  }
  return digest.text();
}

/// All that decides what a rank computes.
nlohmann::json job_of(const SessionOptions& options, const Scenario& scenario,
                      const std::map<std::string, torch::Tensor>& weights) {
  auto job = to_json(scenario);
  const Dataset data(scenario);
  if (const auto* corpus = data.corpus()) {
    Digest digest;
    digest.add(*corpus);
    job["data"]["corpus"] = fmt::format("{} bytes, {}", corpus->size(), digest.text());
  }
  job["weights"] = digest_of(weights);
  job["fault"] = options.fault == nullptr ? "" : options.fault->name;
  job["libtorch"] = TORCH_VERSION;
  return job;
}

/// Every rank must be about to train the same.
void agree_on_job(const RankMessages& messages, const nlohmann::json& job) {
  const auto jobs = messages.exchange(job.dump());
  const auto first = nlohmann::json::parse(jobs.front());
  for (std::size_t rank = 1; rank < jobs.size(); ++rank) {
    const auto other = nlohmann::json::parse(jobs[rank]);
    const auto difference = nlohmann::json::diff(first, other);
    if (difference.empty()) {
      continue;
    }
    const nlohmann::json::json_pointer field(difference[0]["path"].get<std::string>());
    const auto value = [&](const nlohmann::json& whole) {
      return whole.contains(field) ? whole[field].dump() : std::string("nothing");
    };
    throw fsdp::UsageError(
        fmt::format("rank {}: {} is {}, and rank 0's is {}; wanted: the same command and the same "
                    "files on every rank",
                    rank, field.to_string(), value(other), value(first)));
  }
}

/// What a rank starts from.
struct Start {
  Start(const SessionOptions& options, const std::filesystem::path& scratch)
      : scenario(with_frozen_corpus(options.scenario, scratch)),
        weights(starting_weights(options)) {
    if (options.process_group != nullptr) {
      agree_on_job(RankMessages(options.process_group), job_of(options, scenario, weights));
    }
  }
  const Scenario scenario;
  const std::map<std::string, torch::Tensor> weights;
};

void check(const SessionOptions& options) {
  validate(options.scenario);
  refuse_what_is_not_here(options.scenario, options.process_group);
  refuse_what_the_dtype_cannot_hold(options.scenario);
}

FsdpSubject::Options subject_options_of(const SessionOptions& options) {
  FsdpSubject::Options subject;
  subject.fault = options.fault;
  subject.strikes = std::make_shared<StrikeLog>();
  subject.timeout = options.timeout;
  subject.process_group = options.process_group;
  return subject;
}

/// What stops this rank is told to the others, which would otherwise wait for it in vain.
template <typename Body>
auto telling_the_others(const fsdp::BackendPtr& group, Body body) {
  try {
    return body();
  } catch (const std::exception& error) {
    if (group != nullptr) {
      fsdp::leave_group(*group, error.what());
    }
    throw;
  }
}

RunSummary run_first_rank(const SessionOptions& options) {
  const auto started = std::chrono::steady_clock::now();
  check(options);
  RunSummary summary;
  summary.scenario = options.scenario;
  summary.environment = describe_environment();
  summary.fault = options.fault == nullptr ? "" : options.fault->name;

  std::optional<ReportWriter> report;
  if (!options.report.empty()) {
    report.emplace(options.report);
  }
  const ScratchFolder scratch;
  const Start start(options, scratch.path());
  const auto& scenario = start.scenario;
  const auto& weights = start.weights;
  References references(options, scenario, weights, scratch.path(), summary.notes);
  std::optional<FreeRun> free_run;
  if (options.lockstep && options.fault == nullptr && why_no_whole_batch(scenario).empty()) {
    free_run.emplace(scenario, weights);
  }
  const auto subject_options = subject_options_of(options);
  FsdpSubject subject(scenario, weights, subject_options);
  TrainingGuards guards(scenario, weights);

  std::vector<Verdict> verdicts;
  TrainingState before;
  before.parameters = weights;
  std::int64_t failed = 0;
  std::int64_t left_out = 0;
  Digest digest;
  while (auto trace = subject.next()) {
    add(digest, *trace);
    refuse_non_finite_losses(*trace);
    auto free_step = std::async(std::launch::async, [&] {
      if (free_run) {
        free_run->step(trace->step);
      }
    });
    auto judged = references.judge(*trace, before);
    free_step.get();
    guards.observe(*trace);
    for (auto& verdict : judged) {
      failed += verdict.outcome == Outcome::failed;
      if (report) {
        report->add(verdict);
      }
      verdicts.push_back(std::move(verdict));
    }
    if (options.progress) {
      options.progress(trace->step, options.scenario.steps, failed);
    }
    if (free_run && trace->step + 1 == options.scenario.steps) {
      summary.notes.push_back(free_run->distance_from(*trace));
    }
    left_out += scenario.loss_scale > 0 && has_non_finite_gradient(*trace) ? 1 : 0;
    before = state_after(*trace, left_out);
  }
  references.finish();
  if (left_out > 0) {
    summary.notes.push_back(fmt::format(
        "{} of {} steps were left out by the optimizer, because a scaled gradient was not finite",
        left_out, options.scenario.steps));
  }

  summary.trace_digest = digest.text();
  summary.strikes = subject_options.strikes->strikes();
  if (options.fault != nullptr && summary.strikes.empty()) {
    throw fsdp::UsageError(
        fmt::format("fault '{}' found nothing to change in this scenario ({}); wanted: a scenario "
                    "in which it can strike, {}",
                    options.fault->name, dotted_name(options.scenario),
                    options.fault->needs.empty()
                        ? "for example more than one shard, and a norm_type other than inf"
                        : options.fault->needs));
  }

  summary.guards = guards.verdicts();
  for (const auto& guard : summary.guards) {
    failed += guard.outcome == Outcome::failed;
    if (report) {
      report->add(guard);
    }
  }
  summary.rows = summarise(verdicts);
  if (const auto* first = first_divergence(verdicts)) {
    summary.has_divergence = true;
    summary.first_divergence = *first;
  }
  summary.outcome = failed > 0 ? Outcome::failed : Outcome::passed;
  summary.seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  if (report) {
    report->finish(summary);
  }
  const int conclusion = options.conclude ? options.conclude(summary) : failed > 0 ? 1 : 0;
  if (options.process_group != nullptr) {
    subject.conclude(conclusion);
  }
  return summary;
}

}  // namespace

RunSummary run_session(const SessionOptions& options) {
  return telling_the_others(options.process_group, [&] { return run_first_rank(options); });
}

int follow_session(const SessionOptions& options) {
  return telling_the_others(options.process_group, [&] {
    check(options);
    const ScratchFolder scratch;
    const Start start(options, scratch.path());
    return FsdpSubject::follow(start.scenario, start.weights, subject_options_of(options));
  });
}

}  // namespace shardproof
