// The default process group: which backend, how it is made, and its end.

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "fsdp/backend_library.h"
#include "fsdp/checking.h"
#include "fsdp/errors.h"
#include "fsdp/init.h"
#include "fsdp/store_group.h"
#include "gpu.h"
#include "launch_environment.h"
#include "rendezvous.h"

namespace fsdp {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

struct DefaultGroup {
  LaunchEnvironment environment;
  BackendPtr backend;
  StorePtr store;  // of this generation; null where the ranks met without one
  RollCall roll_call;
  milliseconds timeout{};
};

struct Registry {
  std::mutex mutex;
  std::optional<DefaultGroup> group;
  bool had_one = false;
  int generation = 0;
  // Kept from one generation to the next: a rank that comes back early must not meet a server that
  // is about to end.
  StorePtr connection;
  std::string connected_to;
};

// Never destroyed: what a program left running must not be torn down after main, in whatever order.
Registry& registry() {
  static auto* const the_registry = new Registry;
  return *the_registry;
}

[[noreturn]] void refuse(const LaunchEnvironment& environment, const std::string& text) {
  throw UsageError(
      fmt::format("rank {}: init_process_group: {}", environment.placement.rank, text));
}

// ---- Which backend ----

bool is_mpi_launcher(const std::string& launcher) {
  return launcher == "openmpi" || launcher == "mpich";
}

/// Which MPI the launcher's variables belong to; "" if they do not tell.
std::string mpi_flavour(const LaunchEnvironment& environment) {
  if (is_mpi_launcher(environment.placement.launcher)) {
    return environment.placement.launcher;
  }
  // srun speaks PMIx to Open MPI and PMI2 to MPICH (srun --mpi=...).
  if (environment.placement.launcher == "slurm") {
    if (std::getenv("PMIX_RANK") != nullptr) {
      return "openmpi";
    }
    if (std::getenv("PMI_RANK") != nullptr) {
      return "mpich";
    }
  }
  return "";
}

struct FoundLibrary {
  fs::path path;      // "" if there is none
  std::string tried;  // for messages
};

FoundLibrary find_mpi_library(const std::string& flavour) {
  const auto name = fmt::format("libfsdp_mpi_{}.so", flavour);
  std::vector<fs::path> folders;
  if (const auto* folder = std::getenv("FSDP_BACKEND_PATH"); folder != nullptr && *folder != 0) {
    folders.emplace_back(folder);
  }
  std::error_code ignored;
  folders.push_back(fs::read_symlink("/proc/self/exe", ignored).parent_path());
  FoundLibrary found;
  for (const auto& folder : folders) {
    const auto path = folder / name;
    if (fs::exists(path, ignored)) {
      return {path, ""};
    }
    found.tried += (found.tried.empty() ? "" : ", ") + path.string();
  }
  return found;
}

std::string pick_backend(const LaunchEnvironment& environment) {
  if (gpus() != nullptr && gpus()->make_nccl != nullptr && gpus()->count() > 0) {
    return "nccl";
  }
  const auto& place = environment.placement;
  if (!is_mpi_launcher(place.launcher)) {
    return place.launcher == "none" ? "in_process" : "store";
  }
  const auto library = find_mpi_library(place.launcher);
  if (!library.path.empty()) {
    return "mpi";
  }
  if (place.master_addr.empty() || place.master_port == 0) {
    refuse(
        environment,
        fmt::format("no backend for {}: there is none of {}; wanted: this program's MPI library; "
                    "name its folder in FSDP_BACKEND_PATH, or set MASTER_ADDR and MASTER_PORT "
                    "for the store backend",
                    place.launcher, library.tried));
  }
  return "store";
}

std::string choose_backend(const LaunchEnvironment& environment, const InitOptions& options) {
  if (!options.backend_library.empty()) {
    if (!options.backend.empty()) {
      refuse(environment, fmt::format("both backend '{}' and the backend library {} are asked for; "
                                      "wanted: one of them",
                                      options.backend, options.backend_library.string()));
    }
    return "library";
  }
  if (options.backend.empty()) {
    return pick_backend(environment);
  }
  for (const auto* known : {"nccl", "mpi", "store", "in_process"}) {
    if (options.backend == known) {
      return known;
    }
  }
  refuse(environment,
         fmt::format("backend '{}'; wanted: nccl, mpi, store or in_process, \"\" to let "
                     "it be picked, or a backend_library",
                     options.backend));
}

// ---- Making it ----

bool read_checking(const LaunchEnvironment& environment) {
  const auto* value = std::getenv("FSDP_CHECK_COLLECTIVES");
  const std::string text = value == nullptr ? "0" : value;
  if (text != "0" && text != "1") {
    refuse(
        environment,
        fmt::format("FSDP_CHECK_COLLECTIVES is '{}'; wanted: 1 to check, 0 or unset not to", text));
  }
  return text == "1";
}

/// The store of this generation. torchrun's agent keeps its store when it starts ranks again, so
/// the keys of every start are kept apart, too.
StorePtr open_generation(Registry& all, const LaunchEnvironment& environment, int generation,
                         milliseconds timeout) {
  const auto& place = environment.placement;
  const auto target = fmt::format("{}:{} rank {} agent {}", place.master_addr, place.master_port,
                                  place.rank, environment.agent_store);
  if (all.connection == nullptr || all.connected_to != target) {
    all.connection = nullptr;
    all.connection = connect_store(environment, timeout);
    all.connected_to = target;
  }
  all.connection->setTimeout(timeout);
  return c10::make_intrusive<c10d::PrefixStore>(
      fmt::format("fsdp/{}/{}/{}", environment.run_id, environment.restart_count, generation),
      all.connection);
}

BackendPtr make_from_library(const DefaultGroup& group, const fs::path& library,
                             const StorePtr& store) {
  const auto& place = group.environment.placement;
  BackendRequest request;
  request.rank = place.rank;
  request.world_size = place.world_size;
  request.local_rank = place.local_rank;
  request.timeout_ms = group.timeout.count();
  request.store = store.get();
  return load_backend_library(library, request);
}

BackendPtr make_mpi(const DefaultGroup& group) {
  const auto flavour = mpi_flavour(group.environment);
  if (flavour.empty()) {
    refuse(group.environment,
           fmt::format("backend 'mpi', but the program was started by '{}'; wanted: mpirun of Open "
                       "MPI or MPICH, or srun --mpi=pmix or --mpi=pmi2",
                       group.environment.placement.launcher));
  }
  const auto library = find_mpi_library(flavour);
  if (library.path.empty()) {
    refuse(
        group.environment,
        fmt::format("backend 'mpi': there is none of {}; wanted: this program's MPI library; name "
                    "its folder in FSDP_BACKEND_PATH",
                    library.tried));
  }
  return make_from_library(group, library.path, nullptr);
}

BackendPtr make_alone(const DefaultGroup& group) {
  const auto size = group.environment.placement.world_size;
  if (size != 1) {
    refuse(group.environment,
           fmt::format("backend 'in_process' for {} processes; wanted: nccl, mpi or store, since "
                       "in_process ranks are threads of one process (run_ranks)",
                       size));
  }
  InProcessOptions options;
  options.timeout = group.timeout;
  return make_in_process_group(1, options).front();
}

const Gpus& gpus_for_nccl(const LaunchEnvironment& environment) {
  if (gpus() == nullptr) {
    refuse(environment,
           "backend 'nccl', but this program was built without CUDA; wanted: one that links "
           "fsdp::cuda, or backend mpi or store");
  }
  if (gpus()->make_nccl == nullptr) {
    refuse(
        environment,
        "backend 'nccl', but fsdp::cuda was built without NCCL's header; wanted: one built where "
        "nccl.h is found, or backend mpi or store");
  }
  if (gpus()->count() == 0) {
    refuse(
        environment,
        "backend 'nccl', but this process sees no GPU; wanted: one for each rank; see nvidia-smi "
        "and CUDA_VISIBLE_DEVICES, or use backend mpi or store");
  }
  set_device(environment.placement.local_rank);
  return *gpus();
}

BackendPtr make_backend(const std::string& backend, const DefaultGroup& group,
                        const InitOptions& options, const StorePtr& store) {
  const auto& place = group.environment.placement;
  if (backend == "in_process") {
    return make_alone(group);
  }
  if (backend == "mpi") {
    return make_mpi(group);
  }
  if (backend == "library") {
    return make_from_library(group, options.backend_library, store);
  }
  if (backend == "nccl") {
    return gpus_for_nccl(group.environment)
        .make_nccl(store, place.rank, place.world_size, place.local_rank, group.timeout);
  }
  StoreGroupOptions store_options;
  store_options.timeout = group.timeout;
  store_options.name = "world";
  return make_store_group(store, place.rank, place.world_size, store_options);
}

void announce(const DefaultGroup& group, const std::string& backend, const InitOptions& options) {
  const auto& place = group.environment.placement;
  if (place.rank == 0) {
    fmt::print(stderr, "fsdp: backend {}, {} rank{}, started by {}\n",
               backend == "library" ? options.backend_library.string() : backend, place.world_size,
               place.world_size == 1 ? "" : "s",
               place.launcher == "none" ? "no launcher" : place.launcher);
  }
}

/// After an error: a rank that serves the store stays until the others have seen theirs.
void leave_quietly(const DefaultGroup& group) {
  if (group.store == nullptr) {
    return;
  }
  try {
    leave(group.store, group.roll_call, std::min(group.timeout, milliseconds(10000)));
  } catch (const Error&) {
    // What went wrong first is what counts.
  }
}

DefaultGroup make_group(Registry& all, const InitOptions& options, int generation) {
  DefaultGroup group;
  group.environment = read_launch_environment(process_environment);
  group.timeout = options.timeout;
  const auto& environment = group.environment;
  const auto& place = environment.placement;
  if (options.timeout <= milliseconds::zero()) {
    refuse(environment,
           fmt::format("a timeout of {} ms; wanted: more than 0", options.timeout.count()));
  }
  const auto backend = choose_backend(environment, options);
  const bool checking = read_checking(environment);
  if (backend == "nccl") {
    gpus_for_nccl(environment);  // before the others are kept waiting
  }
  StorePtr backends_store;
  if (backend != "in_process" && backend != "mpi") {
    group.store = open_generation(all, environment, generation, options.timeout);
    group.roll_call = {place.rank, place.world_size,
                       fmt::format("backend={} checking={}", backend, checking ? 1 : 0),
                       environment.one_node_assumed, environment.agent_store};
    meet(group.store, group.roll_call, options.timeout);
    backends_store = c10::make_intrusive<c10d::PrefixStore>("backend", group.store);
  }
  try {
    group.backend = make_backend(backend, group, options, backends_store);
  } catch (...) {
    leave_quietly(group);
    throw;
  }
  if (checking) {
    group.backend = check_collectives(group.backend);
  }
  announce(group, backend, options);
  return group;
}

DefaultGroup& the_group(Registry& all, const char* wanted_for) {
  if (!all.group) {
    throw UsageError(fmt::format(
        "rank (none): {}: there is no default process group, {}; wanted: a call between "
        "init_process_group() and destroy_process_group()",
        wanted_for,
        all.had_one ? "it was destroyed" : "init_process_group() was never called or failed"));
  }
  return *all.group;
}

}  // namespace

BackendPtr init_process_group(const InitOptions& options) {
  auto& all = registry();
  const std::scoped_lock lock(all.mutex);
  if (all.group) {
    throw UsageError(
        fmt::format("rank {}: init_process_group: there is a default process group already; "
                    "wanted: one call, or destroy_process_group() before the next",
                    all.group->environment.placement.rank));
  }
  // One that fails counts too: it failed on all ranks, and left keys behind.
  const auto generation = all.generation++;
  all.group = make_group(all, options, generation);
  all.had_one = true;
  return all.group->backend;
}

bool is_initialized() {
  auto& all = registry();
  const std::scoped_lock lock(all.mutex);
  return all.group.has_value();
}

BackendPtr default_process_group() {
  auto& all = registry();
  const std::scoped_lock lock(all.mutex);
  return the_group(all, "default_process_group").backend;
}

const Placement& placement() {
  auto& all = registry();
  const std::scoped_lock lock(all.mutex);
  return the_group(all, "placement").environment.placement;
}

int rank() {
  return placement().rank;
}
int world_size() {
  return placement().world_size;
}
int local_rank() {
  return placement().local_rank;
}
int local_world_size() {
  return placement().local_world_size;
}

void set_device(int local_rank) {
  const auto* const device = gpus();
  const int count = device == nullptr ? 0 : device->count();
  const bool too_large = count > 0 && local_rank >= count;
  if (local_rank < 0 || too_large) {
    throw UsageError(fmt::format(
        "local rank {0}: set_device({0}): {1}; wanted: {2}", local_rank,
        too_large ? fmt::format("this node has {} GPU{} that this process sees", count,
                                count == 1 ? "" : "s")
                  : std::string("a negative number"),
        too_large ? "a GPU for each rank of the node; start no more ranks than GPUs on a node, or "
                    "see CUDA_VISIBLE_DEVICES"
                  : "a local rank, from 0"));
  }
  if (count > 0) {
    device->select(local_rank);
  }
}

void destroy_process_group() {
  auto& all = registry();
  const std::scoped_lock lock(all.mutex);
  the_group(all, "destroy_process_group");
  const auto group = std::move(*all.group);
  all.group.reset();  // whatever happens below
  std::exception_ptr thrown;
  try {
    group.backend->shutdown();
  } catch (...) {
    thrown = std::current_exception();  // the others are told all the same
  }
  if (group.store != nullptr) {
    leave(group.store, group.roll_call, group.timeout);
  }
  if (thrown) {
    std::rethrow_exception(thrown);
  }
}

}  // namespace fsdp
