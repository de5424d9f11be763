#include "conformance/clipping_peers.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/wait.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "conformance/python_process.h"
#include "conformance/tolerance.h"

namespace shardproof {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::size_t kStderrLines = 20;

/// The program's one run.
class Peers {
 public:
  explicit Peers(const PeerOptions& options) : scratch_({}) {
    const fs::path program = options.program.empty() ? fs::path(SHARDPROOF_SOURCE_FOLDER) /
                                                           "reference/python/clipping_peers.py"
                                                     : options.program;
    const auto asked = options.python.empty() ? default_python() : options.python;
    const auto python = find_executable(asked);
    if (!python) {
      refuse(fmt::format("there is no program {}{}", asked.string(),
                         asked.has_parent_path() ? "" : " in PATH"));
    }
    std::error_code ignored;
    if (!fs::is_regular_file(program, ignored)) {
      fail(fmt::format("there is no file {}", shown(program.string())),
           "the program that runs PyTorch's FSDP",
           "Run the build that belongs to these sources, or go without with --no-python");
    }
    command_ = {python->string(), program.string(),        "--seed", std::to_string(options.seed),
                "--scratch",      scratch_.path().string()};
    for (const int world_size : options.world_sizes) {
      command_.insert(command_.end(), {"--world", std::to_string(world_size)});
    }
    try {
      child_.emplace(command_, stderr_file());
    } catch (const PythonReferenceError& error) {
      refuse(fmt::format("{} could not be started: {}", asked.string(), error.what()));
    }
  }

  json answer(std::chrono::seconds timeout) {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    const std::string wanted = "one line of JSON";
    std::string line;
    switch (child_->receive(line, deadline)) {
      case Child::Received::line:
        break;
      case Child::Received::timeout:
        child_.reset();
        throw PythonReferenceTimeout(
            message(fmt::format("no answer within {} s", timeout.count()), wanted,
                    "Allow more time (--timeout), or go without with --no-python"));
      case Child::Received::too_long:
        fail(fmt::format("an answer without an end: {}", shown(line)), wanted, kCure);
      case Child::Received::end: {
        const auto status =
            child_->wait(std::chrono::steady_clock::now() + std::chrono::seconds(1));
        fail(fmt::format("{} without an answer",
                         status ? describe_end(*status) : "it closed its stdout"),
             wanted, kCure);
      }
    }
    auto parsed = json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!parsed.is_object()) {
      fail(fmt::format("it answered {}", shown(line)), wanted, kCure);
    }
    if (parsed.contains("error")) {
      const auto& error = parsed["error"];
      const auto sentence = error.is_string() ? error.get<std::string>() : error.dump();
      if (sentence.starts_with("ModuleNotFoundError")) {
        refuse(sentence);
      }
      fail(sentence, wanted, kCure);
    }
    return parsed;
  }

  [[noreturn]] void fail(const std::string& seen, std::string_view wanted, std::string_view cure) {
    child_.reset();
    throw PythonReferenceError(message(seen, wanted, cure));
  }

  static constexpr std::string_view kCure =
      "What it wrote to stderr says why; --no-python goes without";

 private:
  fs::path stderr_file() const { return scratch_.path() / "stderr.txt"; }
  std::string message(const std::string& seen, std::string_view wanted,
                      std::string_view cure) const {
    const auto written = last_lines(stderr_file(), kStderrLines);
    return fmt::format(
        "the program that runs PyTorch's FSDP failed: {}; wanted: {}. {}.\nIt was run as: {}\n{}",
        seen, wanted, cure, fmt::join(command_, " "),
        written.empty() ? "It wrote nothing to stderr."
                        : fmt::format("The end of its stderr:\n{}", written));
  }
  [[noreturn]] void refuse(const std::string& seen) {
    child_.reset();
    throw PythonUnusable(
        fmt::format("PyTorch's FSDP cannot be run: {}; wanted: a Python that has torch with gloo. "
                    "Name one with "
                    "--python or SHARDPROOF_PYTHON, or go without with --no-python",
                    seen));
  }

  PythonFolder scratch_;
  std::vector<std::string> command_;
  std::optional<Child> child_;
};

PeerClipping read_answer(const json& answer) {
  PeerClipping peers;
  peers.torch = answer.at("torch").get<std::string>();
  peers.max_norm = answer.at("max_norm").get<double>();
  for (const auto& world : answer.at("worlds")) {
    PeerWorld& read = peers.worlds.emplace_back();
    read.world_size = world.at("world").get<int>();
    read.single = world.at("single").get<double>();
    for (const auto& way : world.at("ways")) {
      read.ways.push_back({way.at("way").get<std::string>(), way.at("clip").get<std::string>(),
                           way.at("returned").get<std::vector<double>>(),
                           way.at("elements").get<std::int64_t>(),
                           way.at("tensors").get<std::int64_t>(), way.at("after").get<double>()});
    }
  }
  return peers;
}

void check_way(const PeerClipping& peers, const PeerWorld& world, const PeerWay& way,
               std::vector<Check>& checks) {
  const auto add = [&](std::string_view behaviour, bool held, std::string message) {
    checks.push_back({fmt::format("claims.clipping.{}.float32.w{}.{}_{}", behaviour,
                                  world.world_size, way.way, way.clip),
                      held, std::move(message)});
  };
  // Both runs sum the gradient of a batch and the squares, each in its own order.
  const double bound =
      2 * gamma(way.elements * world.world_size + way.tensors + world.world_size + 4,
                unit_roundoff(at::kFloat));
  const auto is_near = [&](double got, double want) {
    return std::fabs(got - want) <= bound * want;
  };
  const auto figures =
      fmt::format("returned {:.7g} by rank, on one device {:.7g}; allowed {:.2g} of it",
                  fmt::join(way.returned, ", "), world.single, bound);
  if (way.clip == "plain" && way.way != "fsdp2") {
    double square = 0;
    bool is_below = true;
    for (const double norm : way.returned) {
      square += norm * norm;
      is_below = is_below && norm < world.single * (1 - bound);
    }
    add("pytorch_plain_is_local", is_below && is_near(std::sqrt(square), world.single),
        fmt::format("{}; sqrt(sum of local^2) {:.7g}", figures, std::sqrt(square)));
    add("pytorch_plain_leaves_too_much", way.after > peers.max_norm * (1 + bound),
        fmt::format("the clipped gradient has norm {:.7g}, max_norm is {:g}", way.after,
                    peers.max_norm));
  } else {
    add("pytorch_is_global",
        std::all_of(way.returned.begin(), way.returned.end(),
                    [&](double norm) { return is_near(norm, world.single); }),
        figures);
    add("pytorch_clips_to_max_norm", is_near(way.after, peers.max_norm),
        fmt::format("the clipped gradient has norm {:.7g}, max_norm is {:g}", way.after,
                    peers.max_norm));
  }
}

}  // namespace

PeerClipping run_clipping_peers(const PeerOptions& options) {
  Peers run(options);
  const auto answer = run.answer(options.timeout);
  try {
    return read_answer(answer);
  } catch (const json::exception& error) {
    run.fail(fmt::format("it answered {}", shown(answer.dump())),
             "the fields that clipping_peers.py describes", Peers::kCure);
  }
}

std::vector<Check> check_peers(const PeerClipping& peers) {
  std::vector<Check> checks;
  for (const auto& world : peers.worlds) {
    for (const auto& way : world.ways) {
      check_way(peers, world, way, checks);
    }
  }
  return checks;
}

}  // namespace shardproof
