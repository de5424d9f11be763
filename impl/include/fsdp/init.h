#pragma once
// How a rank finds its place, and the default process group of a program that a launcher starts as
// several processes: torchrun, mpirun, srun, or plain environment variables.
//
//   fsdp::init_process_group();
//   fsdp::set_device(fsdp::local_rank());
//   ... fsdp::default_process_group() ...
//   fsdp::destroy_process_group();

#include <chrono>
#include <filesystem>
#include <functional>
#include <string>

#include "fsdp/process_group.h"

namespace fsdp {

struct InitOptions {
  /// "nccl", "mpi", "store" or "in_process"; "" picks (see init_process_group).
  std::string backend;
  /// A shared library that makes the backend (see backend_library.h), instead of `backend`.
  std::filesystem::path backend_library;
  /// How long a rank waits for the others: here, in destroy_process_group, and in one collective.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

/// A rank's place.
struct Placement {
  int rank = 0;  // [0, world_size)
  int world_size = 1;
  int local_rank = 0;  // among the ranks of this node, [0, local_world_size)
  int local_world_size = 1;
  std::string master_addr;  // where rank 0, or torchrun's agent, serves the store; "": not told
  int master_port = 0;      // 0: not told
  std::string launcher = "none";  // "torchrun", "environment", "openmpi", "mpich", "slurm", "none"
};

/// Looks up an environment variable; null if it is not set.
using EnvironmentLookup = std::function<const char*(const char* name)>;

/// Reads this rank's place from the environment. The first of these that is there is taken, whole:
///
/// 1. RANK or WORLD_SIZE, as torchrun and PyTorch's env:// set them: then RANK, WORLD_SIZE,
///    MASTER_ADDR and MASTER_PORT are needed. Explicit variables win over every other launcher's.
///    LOCAL_RANK and LOCAL_WORLD_SIZE come together; without both, all ranks are taken to be on one
///    node, and init_process_group refuses ranks on several. The launcher is "torchrun" if
///    TORCHELASTIC_RUN_ID is set, else "environment".
/// 2. Open MPI's OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE.
/// 3. Hydra's (MPICH, Intel MPI) PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS. Those of 2
/// and
///    3 together are refused: which mpirun is the inner one cannot be told.
/// 4. A Slurm step's (srun): SLURM_STEP_ID, SLURM_JOB_ID, SLURM_PROCID, SLURM_LOCALID,
/// SLURM_NODEID,
///    SLURM_STEP_NUM_TASKS (or SLURM_NTASKS), SLURM_STEP_TASKS_PER_NODE, SLURM_STEP_NODELIST. After
///    2 and 3, because an mpirun inside a Slurm job sees Slurm's variables too. The master address
///    is the first host of the node list, the port 15000 + (31 * job id + step id) mod 14000. A
///    batch script itself, which is no step, is 5.
/// 5. Nothing: one rank, "none".
///
/// In 2 to 4 MASTER_ADDR and MASTER_PORT are taken where they are set. LOCAL_RANK or
/// LOCAL_WORLD_SIZE alone, with no launcher, is refused.
///
/// Throws UsageError, naming the variable, what it is and what it should be: one of the set is
/// missing (all of them are named), empty, no whole number or out of range; rank >= world size;
/// local rank >= local world size; local world size > world size; a port outside [1, 65535].
Placement read_placement();
Placement read_placement(const EnvironmentLookup& lookup);

/// Makes the default group of this process, and returns it. Collective: every rank calls it, with
/// the same backend and timeout.
///
/// The backend, if none is asked for: "nccl" if the program was built with CUDA and NCCL and sees a
/// GPU; else under mpirun "mpi" if its library is found, in the folder that FSDP_BACKEND_PATH names
/// or beside the program (libfsdp_mpi_openmpi.so or libfsdp_mpi_mpich.so); else "in_process" for
/// one rank without launcher, and "store" for the rest. Rank 0 says on stderr which it is.
///
/// All but "in_process" and "mpi" meet through a TCPStore at MASTER_ADDR:MASTER_PORT. Rank 0 serves
/// it, or with TORCHELASTIC_USE_AGENT_STORE torchrun's agent does. There the ranks compare world
/// sizes, backends and ranks. FSDP_CHECK_COLLECTIVES=1 wraps the group in check_collectives
/// (checking.h).
///
/// Throws within the timeout, on every rank that is reached: UsageError for what read_placement
/// refuses; a group that is already there; an unknown backend, or one that this program lacks; a
/// master address that no name service knows; a port that is taken; ranks that differ in world size
/// or backend; a rank given twice. TimeoutError for ranks that did not arrive (they are named) and
/// a master that nobody listens at. PeerError if the store's server went away.
BackendPtr init_process_group(const InitOptions& options = {});

bool is_initialized();

/// The default group and this rank's place in it. Throw UsageError before init_process_group and
/// after destroy_process_group.
BackendPtr default_process_group();
const Placement& placement();
int rank();
int world_size();
int local_rank();
int local_world_size();

/// Makes GPU `local_rank` this thread's device, in programs that link fsdp::cuda and see a GPU;
/// otherwise only checks. Throws UsageError if `local_rank` is negative, or there are GPUs, but no
/// more than that.
void set_device(int local_rank);

/// Shuts the default group down. Collective, but only rank 0 waits for the others, and only where
/// it serves the store. A later init_process_group makes a new group; the connection to the store,
/// and rank 0's server, are kept for it until the process ends.
///
/// After an error it should be called, too, before the process ends: rank 0 then stays until the
/// others have read what they wait for.
///
/// Throws UsageError if there is no group, TimeoutError if a rank did not come here in time (it is
/// named), PeerError if the store's server went away. The group is gone all the same.
void destroy_process_group();

}  // namespace fsdp
