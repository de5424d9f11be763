// Reads launchers' variables. The rules, and which launcher wins, are in init.h.

#include "launch_environment.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <vector>

#include "fsdp/errors.h"

namespace fsdp {
namespace {

constexpr std::int64_t kMaxRanks = std::numeric_limits<int>::max();
constexpr std::int64_t kMaxPort = 65535;

class Reader {
 public:
  explicit Reader(const EnvironmentLookup& lookup) : lookup_(lookup) {}

  bool has(const char* name) const { return lookup_(name) != nullptr; }
  bool has_any(std::initializer_list<const char*> names) const {
    for (const auto* name : names) {
      if (has(name)) {
        return true;
      }
    }
    return false;
  }

  /// Names every variable of the launcher's set that is missing.
  void need(const char* whose, std::initializer_list<const char*> names) const {
    std::vector<std::string> missing;
    std::vector<std::string> there;
    for (const auto* name : names) {
      if (has(name)) {
        there.push_back(fmt::format("{}={}", name, lookup_(name)));
      } else {
        missing.emplace_back(name);
      }
    }
    if (!missing.empty()) {
      throw UsageError(fmt::format(
          "{}: {} {} missing, though {} set; wanted: all of {}'s variables or none; start the "
          "program by the launcher, set what is missing, or unset the rest",
          who(), fmt::join(missing, ", "), missing.size() == 1 ? "is" : "are",
          there.empty()
              ? "others of its set are"
              : fmt::format("{} {}", fmt::join(there, ", "), there.size() == 1 ? "is" : "are"),
          whose));
    }
  }

  std::string text(const char* name) const {
    const std::string value = lookup_(name);
    if (value.empty()) {
      refuse(name, "a value");
    }
    return value;
  }

  std::int64_t number(const char* name, std::int64_t least, std::int64_t most,
                      const std::string& wanted) const {
    const std::string value = lookup_(name);
    std::int64_t number = 0;
    const auto* end = value.data() + value.size();
    const auto parsed = std::from_chars(value.data(), end, number);
    if (value.empty() || parsed.ec != std::errc() || parsed.ptr != end || number < least ||
        number > most) {
      refuse(name, wanted);
    }
    return number;
  }

  /// Reads the four numbers of a launcher's set.
  void place(const char* rank, const char* size, const char* local_rank, const char* local_size,
             Placement& place) {
    place.world_size = static_cast<int>(number(size, 1, kMaxRanks, "a whole number from 1"));
    place.rank =
        static_cast<int>(number(rank, 0, place.world_size - 1,
                                fmt::format("a whole number from 0 to {}, since {}={}",
                                            place.world_size - 1, size, place.world_size)));
    rank_ = place.rank;
    if (local_size == nullptr) {
      return;
    }
    place.local_world_size =
        static_cast<int>(number(local_size, 1, place.world_size,
                                fmt::format("a whole number from 1 to {}, since {}={}",
                                            place.world_size, size, place.world_size)));
    read_local_rank(local_rank, local_size, place);
  }

  void read_local_rank(const char* local_rank, const char* local_size, Placement& place) const {
    place.local_rank = static_cast<int>(
        number(local_rank, 0, place.local_world_size - 1,
               fmt::format("a whole number from 0 to {}, since {}={}", place.local_world_size - 1,
                           local_size, place.local_world_size)));
  }

  void read_master(Placement& place) const {
    if (has("MASTER_ADDR")) {
      place.master_addr = text("MASTER_ADDR");
    }
    if (has("MASTER_PORT")) {
      place.master_port =
          static_cast<int>(number("MASTER_PORT", 1, kMaxPort, "a port from 1 to 65535"));
    }
  }

  [[noreturn]] void refuse(const char* name, const std::string& wanted) const {
    throw UsageError(
        fmt::format("{}: {} is '{}'; wanted: {}; set it right or start the program by "
                    "torchrun, mpirun or srun, which set it",
                    who(), name, lookup_(name), wanted));
  }

  std::string who() const {
    return rank_ < 0 ? std::string("rank (not known yet)") : fmt::format("rank {}", rank_);
  }

 private:
  const EnvironmentLookup& lookup_;
  int rank_ = -1;
};

LaunchEnvironment read_explicit(Reader& reader) {
  reader.need("torchrun and env://", {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"});
  LaunchEnvironment found;
  auto& place = found.placement;
  place.launcher = reader.has("TORCHELASTIC_RUN_ID") ? "torchrun" : "environment";
  if (reader.has_any({"LOCAL_RANK", "LOCAL_WORLD_SIZE"})) {
    reader.need("torchrun and env://", {"LOCAL_RANK", "LOCAL_WORLD_SIZE"});
    reader.place("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", place);
  } else {
    reader.place("RANK", "WORLD_SIZE", nullptr, nullptr, place);
    place.local_rank = place.rank;
    place.local_world_size = place.world_size;
    found.one_node_assumed = true;
  }
  if (reader.has("TORCHELASTIC_USE_AGENT_STORE")) {
    const auto value = reader.text("TORCHELASTIC_USE_AGENT_STORE");
    if (value != "True" && value != "False") {
      reader.refuse("TORCHELASTIC_USE_AGENT_STORE", "True or False");
    }
    found.agent_store = value == "True";
  }
  if (reader.has("TORCHELASTIC_RUN_ID")) {
    found.run_id = reader.text("TORCHELASTIC_RUN_ID");
  }
  if (reader.has("TORCHELASTIC_RESTART_COUNT")) {
    found.restart_count =
        reader.number("TORCHELASTIC_RESTART_COUNT", 0, kMaxRanks, "a whole number from 0");
  }
  return found;
}

LaunchEnvironment read_openmpi(Reader& reader) {
  reader.need("Open MPI", {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                           "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"});
  LaunchEnvironment found;
  found.placement.launcher = "openmpi";
  reader.place("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
               "OMPI_COMM_WORLD_LOCAL_SIZE", found.placement);
  return found;
}

LaunchEnvironment read_hydra(Reader& reader) {
  reader.need("MPICH", {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"});
  LaunchEnvironment found;
  found.placement.launcher = "mpich";
  reader.place("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", found.placement);
  return found;
}

LaunchEnvironment read_slurm(Reader& reader) {
  const auto* tasks = reader.has("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  reader.need("a Slurm step",
              {"SLURM_PROCID", tasks, "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID",
               "SLURM_STEP_ID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"});
  constexpr std::int64_t kMaxId = std::numeric_limits<std::uint32_t>::max();
  LaunchEnvironment found;
  auto& place = found.placement;
  place.launcher = "slurm";
  reader.place("SLURM_PROCID", tasks, nullptr, nullptr, place);
  const auto node = reader.number("SLURM_NODEID", 0, kMaxRanks, "a whole number from 0");
  place.local_world_size =
      tasks_on_node(reader.text("SLURM_STEP_TASKS_PER_NODE"), static_cast<int>(node));
  if (place.local_world_size < 1 || place.local_world_size > place.world_size) {
    reader.refuse("SLURM_STEP_TASKS_PER_NODE",
                  fmt::format("a list like 4(x2),3 that has a node of number {} and {} tasks", node,
                              place.world_size));
  }
  reader.read_local_rank("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", place);
  place.master_addr = first_host(reader.text("SLURM_STEP_NODELIST"));
  if (place.master_addr.empty()) {
    reader.refuse("SLURM_STEP_NODELIST", "a node list like n[003-010,12],m7");
  }
  const auto job = reader.number("SLURM_JOB_ID", 0, kMaxId, "a whole number from 0");
  const auto step = reader.number("SLURM_STEP_ID", 0, kMaxId, "a whole number from 0");
  // Below the range that Linux hands out to clients (from 32768), and clear of PyTorch's 29500.
  place.master_port = static_cast<int>(15000 + (31 * job + step) % 14000);
  return found;
}

LaunchEnvironment read_whichever(Reader& reader) {
  if (reader.has_any({"RANK", "WORLD_SIZE"})) {
    return read_explicit(reader);
  }
  const bool is_step = reader.has("SLURM_STEP_ID") && reader.has("SLURM_PROCID");
  const bool openmpi = reader.has_any({"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                                       "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"});
  // srun's pmi2 sets PMI_RANK and PMI_SIZE too, but not the local ones.
  const bool hydra = reader.has_any({"MPI_LOCALRANKID", "MPI_LOCALNRANKS"}) ||
                     (!is_step && reader.has_any({"PMI_RANK", "PMI_SIZE"}));
  if (openmpi && hydra) {
    throw UsageError(
        "rank (not known): the variables of two launchers are set, Open MPI's OMPI_COMM_WORLD_* "
        "and "
        "MPICH's PMI_* or MPI_LOCAL*; wanted: one; unset the outer one's (env -u NAME) or set "
        "RANK and WORLD_SIZE, which win");
  }
  if (openmpi) {
    return read_openmpi(reader);
  }
  if (hydra) {
    return read_hydra(reader);
  }
  if (is_step) {
    return read_slurm(reader);
  }
  if (reader.has_any({"LOCAL_RANK", "LOCAL_WORLD_SIZE"})) {
    reader.need("torchrun and env://", {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
                                        "LOCAL_RANK", "LOCAL_WORLD_SIZE"});
  }
  return {};
}

}  // namespace

LaunchEnvironment read_launch_environment(const EnvironmentLookup& lookup) {
  Reader reader(lookup);
  auto found = read_whichever(reader);
  if (found.placement.launcher != "none") {
    reader.read_master(found.placement);
  }
  return found;
}

const char* process_environment(const char* name) {
  return std::getenv(name);
}

std::string first_host(const std::string& node_list) {
  std::string host;
  for (std::size_t at = 0; at < node_list.size() && node_list[at] != ',';) {
    if (node_list[at] != '[') {
      host += node_list[at++];
      continue;
    }
    const auto close = node_list.find(']', at);
    const auto first = node_list.find_first_of(",-]", at + 1);
    if (close == std::string::npos || first == at + 1) {
      return "";
    }
    host += node_list.substr(at + 1, first - at - 1);
    at = close + 1;
  }
  return host.find_first_of("] \t") == std::string::npos ? host : "";
}

int tasks_on_node(const std::string& tasks_per_node, int node) {
  const auto* at = tasks_per_node.data();
  const auto* const end = at + tasks_per_node.size();
  while (at != end) {
    int tasks = 0;
    int nodes = 1;
    auto parsed = std::from_chars(at, end, tasks);
    if (parsed.ec != std::errc()) {
      return -1;
    }
    at = parsed.ptr;
    if (end - at > 2 && at[0] == '(' && at[1] == 'x') {
      parsed = std::from_chars(at + 2, end, nodes);
      if (parsed.ec != std::errc() || parsed.ptr == end || *parsed.ptr != ')') {
        return -1;
      }
      at = parsed.ptr + 1;
    }
    if (node < nodes) {
      return tasks;
    }
    node -= nodes;
    if (at != end && *at++ != ',') {
      return -1;
    }
  }
  return -1;
}

Placement read_placement() {
  return read_placement(process_environment);
}

Placement read_placement(const EnvironmentLookup& lookup) {
  return read_launch_environment(lookup).placement;
}

}  // namespace fsdp
