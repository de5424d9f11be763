// The shardproof command.

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "conformance/checkpoint_check.h"
#include "conformance/claims.h"
#include "conformance/cleanup.h"
#include "conformance/default_corpus.h"
#include "conformance/environment.h"
#include "conformance/exit_codes.h"
#include "conformance/python_reference.h"
#include "conformance/report_folder.h"
#include "conformance/session.h"
#include "conformance/trace_io.h"
#include "fault_injection/catalogue.h"
#include "fsdp/errors.h"
#include "fsdp/init.h"
#include "reference/wording.h"

namespace shardproof {
namespace {

constexpr const char* kExamples = R"(
Examples:
  shardproof run                                 the main job: a transformer on real text, 4 ranks, 20 steps
  shardproof run --world 8 --optimizer sgd --momentum 0.9
  shardproof run --corpus book.txt --report out  your own text; results in out/
  shardproof run --fault flipped_bit             a planted fault: ends 1 and names the place
  shardproof run --scenario scenario.json        everything from a file; options change single fields
  torchrun --no-python --nproc_per_node=8 shardproof run      a process for each rank
  shardproof claims --report out                 what is said of sharded training, measured; out/claims.html

Variables: SHARDPROOF_PYTHON, as --python; SHARDPROOF_PYTHON_REFERENCE, where reference/python/reference.py is if the
sources were moved; TMPDIR, a folder for temporary files.

Started as several processes (torchrun --no-python, mpirun, srun, ci/launch), each is a rank: the number of ranks is
the launcher's, rank 0 compares and reports, and all end with its code.

Exit codes: 0 all checks held; 1 a check failed; 2 wrong usage or input; 70 the harness itself broke; 124 timed out.
)";

struct RunArguments {
  std::string scenario_file;
  std::vector<std::string> corpus;
  std::string weights;
  std::string report;
  std::string fault;
  std::string python;
  std::string backend_library;
  bool no_python = false;
  bool free_running = false;
  bool print_scenario = false;
  bool quiet = false;
  int timeout = 300;
};

/// Refuses a text that is no number of the type, in our own words and before CLI11 sees it, which
/// wraps -1 to the largest number and cuts what is too large.
template <typename T>
void refuse_other_than(CLI::Option* option) {
  option->check([option](const std::string& text) {
    T number{};
    const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number);
    if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size()) {
      throw fsdp::UsageError(
          fmt::format("{} is {}; wanted: {} ({})", option->get_name(), text,
                      std::is_floating_point_v<T> ? "a number that a double can hold"
                      : std::is_signed_v<T>       ? "a whole number"
                                                  : "a whole number from 0 to 2^64 - 1",
                      option->get_description()));
    }
    return std::string();
  });
}

/// Adds an option that changes one field of the scenario. What is given on the command line wins
/// over --scenario, whichever comes first, so the changes are applied after the file is read.
class ScenarioOptions {
 public:
  explicit ScenarioOptions(CLI::App& app) : app_(app) {}

  /// The heading in the help that later options stand under.
  void group(std::string name) { group_ = std::move(name); }

  template <typename T>
  void add(const std::string& names, T Scenario::*field, const std::string& help) {
    add_with(
        names, [field](Scenario& scenario) -> T& { return scenario.*field; }, help);
  }
  template <typename Access>
  void add_with(const std::string& names, Access access, const std::string& help) {
    using T = std::remove_reference_t<decltype(access(defaults_))>;
    auto value = std::make_shared<T>(access(defaults_));
    CLI::Option* option = nullptr;
    if constexpr (std::is_same_v<T, bool>) {
      option = app_.add_flag(names, *value, help);
    } else {
      option = app_.add_option(names, *value, help);
    }
    option->group(group_);
    if constexpr (!std::is_same_v<T, std::vector<std::int64_t>> &&
                  !std::is_same_v<T, std::vector<std::string>>) {
      option->capture_default_str();
    }
    if constexpr (std::is_arithmetic_v<T> && !std::is_same_v<T, bool>) {
      refuse_other_than<T>(option);
    } else if constexpr (std::is_same_v<T, std::vector<std::int64_t>>) {
      refuse_other_than<std::int64_t>(option);
    }
    changes_.push_back([option, value, access](Scenario& scenario) {
      if (option->count() > 0) {
        access(scenario) = *value;
      }
    });
  }
  /// Whether the option is given on the command line.
  bool names(const std::string& option) const { return app_.count(option) > 0; }
  void apply(Scenario& scenario) const {
    for (const auto& change : changes_) {
      change(scenario);
    }
  }

 private:
  CLI::App& app_;
  std::string group_;
  Scenario defaults_;
  std::vector<std::function<void(Scenario&)>> changes_;
};

void add_model_options(ScenarioOptions& options) {
  options.group("Scenario: model and data");
  options.add_with(
      "--model", [](Scenario& s) -> std::string& { return s.model.kind; },
      "transformer, mlp or quirks");
  options.add_with(
      "--layers", [](Scenario& s) -> std::int64_t& { return s.model.layers; },
      "transformer: blocks");
  options.add_with(
      "--width", [](Scenario& s) -> std::int64_t& { return s.model.width; }, "transformer: width");
  options.add_with(
      "--heads", [](Scenario& s) -> std::int64_t& { return s.model.heads; },
      "transformer: attention heads; divides the width");
  options.add_with(
      "--context", [](Scenario& s) -> std::int64_t& { return s.model.context; },
      "transformer: tokens in a sample");
  options.add_with(
      "--vocabulary", [](Scenario& s) -> std::int64_t& { return s.model.vocabulary; },
      "transformer: token values; at least 256 for text");
  options.add_with(
      "--tied", [](Scenario& s) -> bool& { return s.model.tied; },
      "transformer: the output layer's weight is the token embedding's");
  options.add_with(
      "--sizes", [](Scenario& s) -> std::vector<std::int64_t>& { return s.model.sizes; },
      "mlp: layer sizes from input to output");
  options.add_with(
      "--depth", [](Scenario& s) -> std::int64_t& { return s.model.depth; }, "quirks: layers");
  options.add_with(
      "--quirk-width", [](Scenario& s) -> std::int64_t& { return s.model.quirk_width; },
      "quirks: width");
  options.add_with(
      "--quirks", [](Scenario& s) -> std::vector<std::string>& { return s.model.quirks; },
      fmt::format("quirks: any of {}", fmt::join(quirk_names(), " ")));
  options.add_with(
      "--dropout", [](Scenario& s) -> double& { return s.model.dropout; },
      "probability that an element is dropped");
  options.add_with(
      "--data", [](Scenario& s) -> std::string& { return s.data.kind; },
      "bytes (of the corpus) or synthetic");
  options.add("--seed", &Scenario::seed, "of weights, data and dropout");
  options.add("--batch", &Scenario::batch, "samples per rank and micro-batch");
}

void add_training_options(ScenarioOptions& options) {
  options.group("Scenario: optimizer and clipping");
  options.add_with(
      "--optimizer", [](Scenario& s) -> std::string& { return s.optimizer.kind; }, "adamw or sgd");
  options.add_with(
      "--lr", [](Scenario& s) -> double& { return s.optimizer.lr; }, "learning rate");
  options.add_with(
      "--momentum", [](Scenario& s) -> double& { return s.optimizer.momentum; }, "sgd: momentum");
  options.add_with(
      "--beta1", [](Scenario& s) -> double& { return s.optimizer.beta1; }, "adamw");
  options.add_with(
      "--beta2", [](Scenario& s) -> double& { return s.optimizer.beta2; }, "adamw");
  options.add_with(
      "--eps", [](Scenario& s) -> double& { return s.optimizer.eps; }, "adamw");
  options.add_with(
      "--weight-decay", [](Scenario& s) -> double& { return s.optimizer.weight_decay; },
      "weight decay");
  options.add("--max-norm", &Scenario::max_norm, "gradient clipping; 0 for none");
  options.add("--norm-type", &Scenario::norm_type, "p of the gradients' norm, above 0; or inf");
  options.add("--steps", &Scenario::steps, "optimizer steps");
}

void add_precision_options(ScenarioOptions& options) {
  options.group("Scenario: precision (float32, float64, bfloat16, float16)");
  options.add("--dtype", &Scenario::dtype, "of the parameters that are kept and optimised");
  options.add_with(
      "--param-dtype", [](Scenario& s) -> std::string& { return s.precision.parameter; },
      "of forward and backward; default: as --dtype");
  options.add_with(
      "--reduce-dtype", [](Scenario& s) -> std::string& { return s.precision.reduce; },
      "of gradients while they are summed over ranks; default: as --param-dtype");
  options.add_with(
      "--output-dtype", [](Scenario& s) -> std::string& { return s.precision.output; },
      "that the model's output is cast to; default: no cast");
  options.add_with(
      "--buffer-dtype", [](Scenario& s) -> std::string& { return s.precision.buffer; },
      "of floating-point buffers; default: as --dtype");
  options.add_with(
      "--exempt-norms", [](Scenario& s) -> bool& { return s.precision.exempt_norms; },
      "transformer: LayerNorms compute in --dtype");
  options.add("--loss-scale", &Scenario::loss_scale,
              "factor of the loss before backward; steps that overflow are left out; 0 for none");
}

void add_sharding_options(ScenarioOptions& options) {
  options.group("Scenario: sharding");
  options.add("--world,--world-size", &Scenario::world_size, "ranks, 1 to 512");
  options.add("--strategy", &Scenario::strategy,
              "full_shard, shard_grad_op, no_shard, hybrid_shard or hybrid_shard_zero2");
  options.add("--replicas", &Scenario::replicas,
              "hybrids: groups of ranks that each hold the whole model; divides the ranks");
  options.add("--wrap", &Scenario::wrap, "layer (each layer is a unit) or model (one unit)");
  options.add("--micro-batches", &Scenario::micro_batches, "gradient accumulation");
  options.add("--accumulation", &Scenario::accumulation,
              "gradients are reduced after each micro-batch (each) or the last (last); hybrids "
              "may wait with the replicas only (last_all_reduce)");
  options.add_with(
      "--divide-pre", [](Scenario& s) -> double& { return s.divide.pre; },
      "gradients are divided by it before the sum over ranks; 0: automatic");
  options.add_with(
      "--divide-post", [](Scenario& s) -> double& { return s.divide.post; },
      "and by it after the sum; 0: automatic");
  options.add_with(
      "--reshard", [](Scenario& s) -> int& { return s.schedule.reshard_after_forward; },
      "after forward: 0 keep, 1 free, g > 1 keep within groups of g ranks; -1: as the strategy");
  options.add_with(
      "--forward-prefetch", [](Scenario& s) -> int& { return s.schedule.forward_prefetch; },
      "units gathered ahead in forward, 0 to 8");
  options.add_with(
      "--backward-prefetch",
      [](Scenario& s) -> std::string& { return s.schedule.backward_prefetch; },
      "pre, post or none");
  options.add_with(
      "--limit-gathers", [](Scenario& s) -> int& { return s.schedule.limit_gathers; },
      "gathers under way at once; 0 for no limit");
  options.add_with(
      "--checkpointing", [](Scenario& s) -> std::string& { return s.checkpointing.layers; },
      "activations that backward recomputes: none, all (layers), alternate, or segments of layers");
  options.add_with(
      "--checkpointing-order", [](Scenario& s) -> std::string& { return s.checkpointing.order; },
      "inside the layer's unit, or around it");
  options.add_with(
      "--early-stop,!--no-early-stop",
      [](Scenario& s) -> bool& { return s.checkpointing.early_stop; },
      "a second run ends at the last tensor that is needed (default), or goes to its end");
  options.add("--construction", &Scenario::construction,
              "plain, meta (made without storage) or sync (only rank 0 has the weights)");
  options.add("--backend", &Scenario::backend,
              "in_process (ranks are threads); under a launcher store, mpi or nccl, default: what "
              "fits");
  options.add("--device", &Scenario::device, "cpu");
}

void add_scenario_options(ScenarioOptions& options) {
  add_model_options(options);
  add_training_options(options);
  add_precision_options(options);
  add_sharding_options(options);
}

Scenario scenario_of(const RunArguments& arguments, const ScenarioOptions& options,
                     const fsdp::Placement& placement) {
  Scenario scenario;
  if (!arguments.scenario_file.empty()) {
    scenario = load_scenario(arguments.scenario_file);
  } else if (placement.launcher != "none") {
    scenario.world_size = placement.world_size;
  }
  options.apply(scenario);
  if (!arguments.corpus.empty()) {
    scenario.data.corpus = expand_corpus(arguments.corpus);
  }
  // The others read numbers, so text is only the default of the transformer.
  if (scenario.model.kind != "transformer" && scenario.data.kind == "bytes" &&
      arguments.corpus.empty() && !options.names("--data")) {
    scenario.data.kind = "synthetic";
  }
  if (scenario.data.kind == "bytes" && scenario.data.corpus.empty()) {
    scenario.data.corpus = default_corpus();
  }
  validate(scenario);
  return scenario;
}

void print_progress(int step, int steps, std::int64_t failed) {
  const bool terminal = isatty(STDERR_FILENO) != 0;
  std::cerr << (terminal ? "\r" : "") << "step " << step + 1 << "/" << steps
            << (failed == 0 ? ": all checks held" : fmt::format(": {} checks failed", failed))
            << (terminal && step + 1 < steps ? "   " : "\n") << std::flush;
}

int complain(int code, const std::string& message) {
  const auto whole = uninterrupted();  // no word more once a signal ends the program
  std::cerr << "shardproof: " << message << "\n";
  return code;
}

void print_scenario(const Scenario& scenario) {
  for (const auto& path : scenario.data.corpus) {
    if (!is_utf8(path)) {
      throw fsdp::UsageError(fmt::format(
          "data.corpus has the file {}, whose name is not UTF-8; wanted: another name, because a "
          "scenario is JSON",
          path));
    }
  }
  std::cout << to_json(scenario).dump(2) << "\n";
}

/// Tells the user how the run ended; returns the code for it.
int conclude(const SessionOptions& options, const RunSummary& summary) {
  print_table(std::cout, summary);
  if (options.fault != nullptr) {
    std::cout << "planted: " << describe_strikes(summary) << "\n";
  }
  if (!options.report.empty()) {
    std::cout << "report: " << (options.report / "report.html").string() << "\n";
  }
  std::cout.flush();
  if (!std::cout) {
    return complain(kExitBroken,
                    "cannot write the table to standard output; nobody has seen the verdict");
  }
  // A guard that failed has seen nothing of the fault.
  if (!summary.has_divergence && options.fault != nullptr) {
    return complain(kExitBroken,
                    fmt::format("the fault '{}' struck and no check saw it", options.fault->name));
  }
  return summary.outcome == Outcome::passed ? kExitHeld : kExitFailed;
}

/// Ends the process group when the run does, if there is one.
class ProcessGroup {
 public:
  /// Joins the ranks that a launcher has started, if any. Then `scenario` is of their backend.
  ProcessGroup(const RunArguments& arguments, const ScenarioOptions& options,
               const fsdp::Placement& placement, Scenario& scenario) {
    fsdp::InitOptions init;
    init.backend = options.names("--backend") ? scenario.backend : "";
    init.backend_library = arguments.backend_library;
    init.timeout = std::chrono::seconds(arguments.timeout);
    const bool is_asked_for =
        !init.backend_library.empty() || (!init.backend.empty() && init.backend != "in_process");
    if (placement.launcher == "none") {
      if (is_asked_for) {
        throw fsdp::UsageError(fmt::format(
            "--backend{} {}: nothing has started this program as several ranks; wanted: torchrun "
            "--no-python --nproc_per_node=N, mpirun -n N, srun or ci/launch before the command, or "
            "--backend in_process",
            arguments.backend_library.empty() ? "" : "-library",
            arguments.backend_library.empty() ? init.backend : arguments.backend_library));
      }
      return;
    }
    group_ = fsdp::init_process_group(init);
    scenario.backend = group_->getBackendName();
  }
  /// After an error too, so that the others can still read what it was; there it's the error that
  /// counts.
  ~ProcessGroup() {
    try {
      destroy();
    } catch (const std::exception& error) {
      complain(kExitBroken, error.what());
    }
  }
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;
  void destroy() {
    if (group_ != nullptr) {
      group_.reset();
      fsdp::destroy_process_group();
    }
  }
  const fsdp::BackendPtr& get() const { return group_; }

 private:
  fsdp::BackendPtr group_;
};

std::vector<std::string> fault_names() {
  std::vector<std::string> names;
  for (const auto& fault : fault_catalogue()) {
    names.push_back(fault.name);
  }
  return names;
}

int run(const RunArguments& arguments, const ScenarioOptions& scenario_options) {
  const auto placement = fsdp::read_placement();
  SessionOptions options;
  options.scenario = scenario_of(arguments, scenario_options, placement);
  if (arguments.print_scenario) {
    print_scenario(options.scenario);
    return kExitHeld;
  }
  if (!arguments.fault.empty()) {
    options.fault = find_fault(arguments.fault);
    if (options.fault == nullptr) {
      throw fsdp::UsageError(
          fmt::format("--fault {}: there is none of that name; wanted one of: {}", arguments.fault,
                      fmt::join(fault_names(), ", ")));
    }
  }
  options.weights = arguments.weights;
  options.report = arguments.report;
  options.python = !arguments.no_python;
  options.python_executable = arguments.python;
  options.lockstep = !arguments.free_running;
  options.timeout = std::chrono::seconds(arguments.timeout);
  ProcessGroup group(arguments, scenario_options, placement, options.scenario);
  options.process_group = group.get();
  if (placement.rank > 0) {
    const int code = follow_session(options);
    options.process_group.reset();
    group.destroy();
    return code;
  }
  if (!arguments.quiet) {
    std::cerr << fmt::format("{}: {} steps on {} ranks, held to a single device\n",
                             dotted_name(options.scenario), options.scenario.steps,
                             options.scenario.world_size);
    options.progress = print_progress;
  }
  int code = kExitHeld;
  options.conclude = [&](const RunSummary& summary) { return code = conclude(options, summary); };
  run_session(options);
  options.process_group.reset();
  group.destroy();
  return code;
}

constexpr const char* kClaimsExamples = R"(
Examples:
  shardproof claims --report out                       everything; out/claims.html and out/claims.json
  shardproof claims --report out --section clipping --quick --no-python

Exit codes: 0 all checks held; 1 a check failed; 2 wrong usage or input; 70 the harness itself broke; 124 timed out.
)";

struct ClaimsArguments {
  std::string report;
  std::vector<std::string> sections;
  std::string python;
  std::uint64_t seed = 0;
  bool quick = false;
  bool no_python = false;
  bool quiet = false;
  int timeout = 300;
};

void add_claims_options(CLI::App& app, ClaimsArguments& arguments) {
  std::string sections;
  for (const auto& section : claims_sections()) {
    sections += fmt::format("{}{} ({})", sections.empty() ? "" : ", ", section.id, section.summary);
  }
  app.add_option("--report", arguments.report, "folder for claims.html and claims.json; required");
  app.add_option("--section", arguments.sections, "only this; may be given again: " + sections)
      ->allow_extra_args(false);
  app.add_flag("--quick", arguments.quick, "fewer worlds and steps, to see that all works");
  refuse_other_than<std::uint64_t>(
      app.add_option("--seed", arguments.seed, "of weights, data and gradients")
          ->capture_default_str());
  app.add_option("--python", arguments.python,
                 "interpreter that has torch; default: $SHARDPROOF_PYTHON, else the one found when "
                 "this was built");
  app.add_flag("--no-python", arguments.no_python, "leave out what needs PyTorch itself");
  app.add_flag("--quiet", arguments.quiet, "no progress");
  refuse_other_than<int>(app.add_option("--timeout", arguments.timeout,
                                        "seconds that a collective or the Python program may take, "
                                        "1 to 86400")
                             ->capture_default_str());
  for (const char* flag : {"--quick", "--no-python", "--quiet"}) {
    app.get_option(flag)->disable_flag_override();
  }
}

int claims(const ClaimsArguments& arguments) {
  if (const auto placement = fsdp::read_placement(); placement.launcher != "none") {
    throw fsdp::UsageError(
        fmt::format("rank {}: shardproof claims was started by {} as one of {} processes; wanted: "
                    "without a launcher, since its ranks are threads",
                    placement.rank, placement.launcher, placement.world_size));
  }
  if (arguments.report.empty()) {
    throw fsdp::UsageError(
        "--report is not given; wanted: a folder for claims.html and claims.json; see shardproof "
        "claims --help");
  }
  if (arguments.no_python && !arguments.python.empty()) {
    throw fsdp::UsageError("--python and --no-python contradict each other; wanted: one of them");
  }
  ClaimsOptions options;
  options.seed = arguments.seed;
  options.quick = arguments.quick;
  options.with_python = !arguments.no_python;
  options.python = arguments.python;
  options.timeout = std::chrono::seconds(arguments.timeout);
  if (!arguments.quiet) {
    options.progress = [](const std::string& part) { std::cerr << part << std::endl; };
  }
  // First, so that nobody waits for figures that cannot be written.
  ReportFolder folder(arguments.report, {"claims.json", "schema", "shardproof.claims/"});
  const auto report = measure_claims(arguments.sections, options);
  write_file(folder.partial() / "claims.html", {render_claims_html(report)});
  write_file(
      folder.partial() / "claims.json",
      {to_json(report).dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n"});
  folder.publish();
  print_claims(std::cout, report);
  std::cout << "report: " << (std::filesystem::path(arguments.report) / "claims.html").string()
            << "\n"
            << std::flush;
  if (!std::cout) {
    return complain(kExitBroken,
                    "cannot write the table to standard output; nobody has seen the verdict");
  }
  return report.failed() == 0 ? kExitHeld : kExitFailed;
}

/// The option that is likely to be meant, if any is.
std::string nearest_option(const std::string& word, const CLI::App& app) {
  std::string nearest;
  const auto letters = word.size() - word.find_first_not_of('-');
  auto least = std::clamp<std::size_t>(letters / 2, 1, 3);
  for (const auto* option : app.get_options()) {
    for (const auto& name : option->get_lnames()) {
      if (const auto distance = edit_distance("--" + name, word); distance <= least) {
        nearest = "--" + name;
        least = distance;
      }
    }
  }
  return nearest;
}

/// What is wrong with arguments of a command that are none of its options.
std::string describe_strangers(const std::vector<std::string>& strangers, const CLI::App& app) {
  for (const auto& stranger : strangers) {
    const auto name = stranger.substr(0, stranger.find('='));
    if (name.find_first_not_of('-') != std::string::npos && name.starts_with("-")) {
      const auto nearest = nearest_option(name, app);
      return fmt::format("there is no option {}{}", name,
                         nearest.empty() ? "" : fmt::format(", perhaps {} is meant", nearest));
    }
  }
  return fmt::format("\"{}\" belongs to no option", strangers.front());
}

constexpr const char* kCommands =
    "shardproof run, shardproof claims or shardproof checkpoint-check";

std::string describe_missing_command(const std::vector<std::string>& words) {
  if (words.empty()) {
    return fmt::format("no command is given; wanted: {}", kCommands);
  }
  if (words.front().starts_with("-")) {
    return fmt::format("{} stands where a command is wanted: shardproof run {} ...", words.front(),
                       words.front());
  }
  return fmt::format("there is no command {}; wanted: {}", words.front(), kCommands);
}

/// CLI11's complaint in our words.
std::string describe(const CLI::ParseError& error, const CLI::App& app) {
  const std::string complaint = error.what();
  for (const auto* option : app.get_options()) {
    const auto name = option->get_name();
    if (option->get_items_expected_max() == 0) {
      // Some versions name a flag without its dashes.
      if (complaint.starts_with(name + " ") || complaint.starts_with(name.substr(2) + " ")) {
        return name + " takes no value";
      }
    } else if (static_cast<int>(option->count()) > option->get_items_expected_max()) {
      return fmt::format("--{} is given {} times; wanted: once",
                         fmt::join(option->get_lnames(), " or --"), option->count());
    } else if (complaint.starts_with(name + ":") && option->count() == 0) {
      return fmt::format("{} has no value after it; wanted: a value ({})", name,
                         option->get_description());
    }
  }
  return complaint;
}

std::string described_faults() {
  std::string text = "\nFaults (--fault):\n";
  for (const auto& fault : fault_catalogue()) {
    text += fmt::format("  {:<28} {}{}\n", fault.name, fault.summary,
                        fault.needs.empty() ? "" : fmt::format("; needs {}", fault.needs));
  }
  return text;
}

/// A command of the program, and what it does once its options are read.
struct Command {
  CLI::App* app;
  std::function<int()> run;
};

void refuse_other_timeouts(int seconds) {
  if (seconds < 1 || seconds > 86400) {
    throw fsdp::UsageError(
        fmt::format("--timeout is {}; wanted: from 1 to 86400 seconds", seconds));
  }
}

Command add_run_command(CLI::App& app) {
  auto* run_command = app.add_subcommand(
      "run", "Train a scenario sharded and on one device, and compare every tensor of every step");
  run_command->footer(kExamples + described_faults());
  auto held = std::make_shared<RunArguments>();
  auto& arguments = *held;
  run_command->add_option("--scenario", arguments.scenario_file,
                          "JSON file (reference/scenario.schema.json)");
  run_command->add_option(
      "--corpus", arguments.corpus,
      "text files, or folders of them; default: this project's own sources and documents");
  run_command->add_option("--weights", arguments.weights,
                          "safetensors file to start from; default: made from the seed");
  run_command->add_option("--report", arguments.report,
                          "folder for results.jsonl, summary.json and report.html");
  run_command->add_option("--fault", arguments.fault,
                          fmt::format("plant a fault: {}", fmt::join(fault_names(), ", ")));
  run_command->add_option("--python", arguments.python,
                          "interpreter of the Python reference; default: $SHARDPROOF_PYTHON, else "
                          "the one found when this was built");
  run_command->add_option("--backend-library", arguments.backend_library,
                          "shared library of a backend (fsdp/backend_library.h); needs a launcher");
  run_command->add_flag("--no-python", arguments.no_python, "leave the Python reference out");
  run_command->add_flag("--free-running", arguments.free_running,
                        "do not set the references to the subject's state before each step");
  run_command->add_flag("--print-scenario", arguments.print_scenario,
                        "print the scenario as JSON and stop");
  run_command->add_flag("--quiet", arguments.quiet, "no progress");
  for (const char* flag : {"--no-python", "--free-running", "--print-scenario", "--quiet"}) {
    run_command->get_option(flag)->disable_flag_override();  // --quiet=no
  }
  refuse_other_than<int>(
      run_command
          ->add_option("--timeout", arguments.timeout,
                       "seconds that a collective or a step of the Python reference may take, 1 to "
                       "86400")
          ->capture_default_str());
  const auto scenario_options = std::make_shared<ScenarioOptions>(*run_command);
  add_scenario_options(*scenario_options);
  return {run_command, [held, scenario_options] {
            refuse_other_timeouts(held->timeout);
            return run(*held, *scenario_options);
          }};
}

Command add_claims_command(CLI::App& app) {
  auto* command = app.add_subcommand(
      "claims", "Measure what is said of sharded training, and write a page of verdicts");
  command->footer(kClaimsExamples);
  const auto held = std::make_shared<ClaimsArguments>();
  add_claims_options(*command, *held);
  return {command, [held] {
            refuse_other_timeouts(held->timeout);
            return claims(*held);
          }};
}

constexpr const char* kCheckExamples = R"(
Examples:
  shardproof checkpoint-check                       the layers of the default model
  shardproof checkpoint-check --dropout 0.1 --dtype bfloat16
  shardproof checkpoint-check --library libmine.so  modules of your own (fsdp/recomputation_library.h)

Exit codes: 0 every recomputed tensor has the bits of the stored one; 1 one has not, or a module cannot run again;
2 wrong usage or input; 70 the harness itself broke.
)";

struct CheckArguments {
  std::string library;
  std::vector<std::string> cases;
};

int check_regions(const CheckArguments& arguments, const ScenarioOptions& scenario_options) {
  at::set_num_threads(1);
  std::vector<CheckedRegion> regions;
  if (arguments.library.empty()) {
    if (!arguments.cases.empty()) {
      throw fsdp::UsageError("--case is given without --library; wanted: both, or neither");
    }
    Scenario scenario;
    scenario_options.apply(scenario);
    if (!scenario_options.names("--data")) {
      scenario.data.kind = "synthetic";
    }
    if (scenario.data.kind == "bytes") {
      scenario.data.corpus = default_corpus();
    }
    validate(scenario);
    regions = check_layers(scenario);
  } else {
    regions = check_library(arguments.library, arguments.cases);
  }
  print_regions(std::cout, regions);
  const auto failed = std::count_if(regions.begin(), regions.end(),
                                    [](const auto& region) { return !region.holds(); });
  std::cout << fmt::format("\n{}: {} of {} regions recompute what they stored, to the bit\n",
                           failed == 0 ? "PASSED" : "FAILED", regions.size() - failed,
                           regions.size());
  return failed == 0 ? kExitHeld : kExitFailed;
}

Command add_check_command(CLI::App& app) {
  auto* command = app.add_subcommand(
      "checkpoint-check",
      "Run modules, run them again as activation checkpointing does, and compare every saved "
      "tensor");
  command->footer(kCheckExamples);
  const auto held = std::make_shared<CheckArguments>();
  command->add_option("--library", held->library,
                      "shared library with modules of your own (fsdp/recomputation_library.h)");
  command->add_option("--case", held->cases, "only these of the library's");
  const auto scenario_options = std::make_shared<ScenarioOptions>(*command);
  add_model_options(*scenario_options);
  scenario_options->add("--dtype", &Scenario::dtype, "of parameters and activations");
  return {command, [held, scenario_options] { return check_regions(*held, *scenario_options); }};
}

/// The one that the words name, before they are known to be right; the first if they name none.
const Command& command_of(const std::vector<Command>& commands, int argc, char** argv) {
  for (const auto& each : commands) {
    if (std::any_of(argv + 1, argv + argc,
                    [&](const char* word) { return each.app->get_name() == word; })) {
      return each;
    }
  }
  return commands.front();
}

int command(int argc, char** argv) {
  CLI::App app("Proves that sharded training equals training on one device.", "shardproof");
  app.footer(kExamples);
  app.set_version_flag("--version", SHARDPROOF_VERSION);
  app.require_subcommand(0, 1);
  app.allow_extras();  // and so do the commands; they are refused below, in our own words
  const std::vector<Command> commands = {add_run_command(app), add_claims_command(app),
                                         add_check_command(app)};

  // CLI11 takes an empty value for one that was not given, so that an unset variable in a script
  // would silently turn an option off.
  for (int i = 1; i < argc; ++i) {
    if (*argv[i] == '\0') {
      return complain(
          kExitUsage,
          fmt::format("the value after {} is empty; wanted: a value, or leave the option out",
                      argv[i - 1]));
    }
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {
    return app.exit(success);
  } catch (const CLI::ParseError& error) {
    const auto& meant = command_of(commands, argc, argv);
    throw fsdp::UsageError(fmt::format("{}; see shardproof {} --help", describe(error, *meant.app),
                                       meant.app->get_name()));
  }
  const auto parsed = std::find_if(commands.begin(), commands.end(),
                                   [](const Command& each) { return each.app->parsed(); });
  if (parsed == commands.end() || !app.remaining().empty()) {
    throw fsdp::UsageError(describe_missing_command(app.remaining()) + "; see shardproof --help");
  }
  if (const auto strangers = parsed->app->remaining(); !strangers.empty()) {
    throw fsdp::UsageError(fmt::format("{}; see shardproof {} --help",
                                       describe_strangers(strangers, *parsed->app),
                                       parsed->app->get_name()));
  }
  return parsed->run();
}

int command_or_complaint(int argc, char** argv) {
  try {
    return command(argc, argv);
  } catch (const fsdp::TimeoutError& error) {
    return complain(kExitTimedOut, error.what());
  } catch (const PythonReferenceTimeout& error) {
    return complain(kExitTimedOut, error.what());
  } catch (const PythonUnusable& error) {
    return complain(kExitUsage, error.what());
  } catch (const fsdp::UsageError& error) {
    return complain(kExitUsage, error.what());
  } catch (const fsdp::NonFiniteError& error) {
    return complain(kExitUsage, error.what());
  } catch (const FileError& error) {
    return complain(kExitUsage, error.what());
  } catch (const std::exception& error) {
    return complain(kExitBroken, error.what());
  }
}

}  // namespace
}  // namespace shardproof

int main(int argc, char** argv) {
  // Before anything that may start a thread.
  shardproof::clean_up_when_signalled();
  // Kernels split sums over threads, so the number of threads decides bits: one, for the subject
  // and for every reference.
  at::set_num_threads(1);
  std::signal(SIGPIPE, SIG_IGN);
  const int code = shardproof::command_or_complaint(argc, argv);
  // Waits for the end if a signal is just bringing it about.
  const auto whole = shardproof::uninterrupted();
  return code;
}
