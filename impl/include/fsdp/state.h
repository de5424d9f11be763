#pragma once
// Saving and loading: the state of a sharded model and its optimizer, whole in memory, whole in a
// file that PyTorch reads, or as a checkpoint in which every rank writes what it holds.
//
//   fsdp::save_checkpoint("step-100", *model, &optimizer);      // every rank
//   fsdp::load_checkpoint("step-100", *model, &optimizer);      // at any number of ranks
//   fsdp::write_full_state("model.safetensors", *model);        // safetensors.torch.load_file
//
// Names are those of the plain model. A tensor that the model has under several names (tied
// weights) is saved once, under the first; loading takes any of its names. Parameters that no unit
// has, and buffers, count as the same on all ranks: rank 0's are saved (see save_checkpoint).
//
// Every rank must call these functions with the same arguments, outside of forward and backward.
// They check first, on all ranks, and change something only when all ranks agreed. If one rank
// fails, all throw what the first of them found; its message names the rank, the file and the place
// in it. Whatever is wrong, the model, the optimizer and what is on the disk stay as they were.
// Errors: FileError (a file is missing, damaged, foreign, of another version, cannot be written),
// StateError (names, shapes, dtypes or parameter groups do not fit; a parameter is whole at the
// moment), UsageError (an option is missing, an optimizer of a type that is not known), and
// those of the process group.

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "fsdp/process_group.h"

namespace fsdp {

using StateDict = std::map<std::string, at::Tensor>;

struct StateOptions {
  /// All ranks that train the model. Not needed where all parameters are sharded over one group,
  /// which is then taken, nor for a model that is not sharded.
  BackendPtr process_group;
  /// Only rank 0 gets the result, the others an empty one.
  bool rank0_only = false;
  /// The result is on the CPU. Tensors are gathered one by one, so that no more than the largest is
  /// whole on a device.
  bool cpu_offload = false;
};

struct LoadStateOptions {
  /// As in StateOptions.
  BackendPtr process_group;
  /// The state is taken from rank 0; what the other ranks give is not looked at.
  bool broadcast_from_rank0 = false;
  /// The state must have exactly the tensors of the model. Otherwise those that it lacks stay as
  /// they are, and those that the model lacks are ignored.
  bool strict = true;
};

/// Copies of all parameters and buffers, whole.
StateDict full_state_dict(torch::nn::Module& module, const StateOptions& options = {});
/// Takes whole parameters and buffers, of the model's shapes and dtypes, on any device.
void load_full_state_dict(torch::nn::Module& module, const StateDict& state,
                          const LoadStateOptions& options = {});

/// The state of an optimizer by the names of the parameters.
struct OptimizerState {
  struct Group {
    /// By PyTorch's names ("lr", "weight_decay"); betas are "beta1" and "beta2", flags 0 or 1.
    std::map<std::string, double> options;
    std::vector<std::string> parameters;
  };
  std::string type;  // "SGD", "Adam", "AdamW", "Adagrad" or "RMSprop"
  std::vector<Group> groups;
  /// By parameter, then by PyTorch's name: "step" is an int64 scalar, others ("exp_avg",
  /// "momentum_buffer") are whole, in the parameter's shape and dtype. Parameters that were never
  /// stepped are not there.
  std::map<std::string, std::map<std::string, at::Tensor>> state;
};

/// Works for torch::optim::SGD, Adam, AdamW, Adagrad and RMSprop over parameters of `module`.
OptimizerState full_optimizer_state(torch::nn::Module& module,
                                    const torch::optim::Optimizer& optimizer,
                                    const StateOptions& options = {});
/// State and options go where the names say, whatever the order. Each group of the optimizer must
/// be a group of the state: the same names, together.
void load_full_optimizer_state(torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                               const OptimizerState& state, const LoadStateOptions& options = {});

/// Writes the full state as one safetensors file, by rank 0. `safetensors.torch.load_file` reads
/// it, `load_model` also where weights are tied.
void write_full_state(const std::filesystem::path& path, torch::nn::Module& module,
                      BackendPtr process_group = nullptr);
/// Loads a safetensors file of whole tensors, whoever wrote it. Each rank reads only its share,
/// unless broadcast_from_rank0.
void load_full_state(const std::filesystem::path& path, torch::nn::Module& module,
                     const LoadStateOptions& options = {});

/// A file as torch.save writes it, that torch.load(weights_only=True) reads: a dictionary of
/// tensors. For one rank to call. FileError.
void save_torch(const std::filesystem::path& path, const StateDict& state);
/// Reads what torch.save wrote of a dictionary of tensors, such as model.state_dict(), onto the
/// CPU. Runs no code from the file. FileError if it holds anything else. As in PyTorch, no checksum
/// protects the tensors' bytes.
StateDict load_torch(const std::filesystem::path& path);

struct CheckpointOptions {
  /// As in StateOptions.
  BackendPtr process_group;
  /// Saved with the checkpoint: rank 0's. UTF-8.
  std::map<std::string, std::string> metadata;
};

/// Writes a folder: one safetensors file per rank with the elements it holds, `index.json`
/// (describes which file holds which elements of which tensor), and `SHA256SUMS` (as sha256sum
/// writes it). It is made under a hidden name beside and renamed when all ranks are done and
/// everything is on the disk; a checkpoint that is there already is replaced, anything else is not.
/// If a rank fails, nothing is left. Saved are parameters, buffers, the optimizer's state, options
/// and step counts, each rank's random generator (random.h), and a rank's own version of a buffer
/// that differs from rank 0's. All ranks must see the same file system. `optimizer` may be null.
void save_checkpoint(const std::filesystem::path& folder, torch::nn::Module& module,
                     const torch::optim::Optimizer* optimizer,
                     const CheckpointOptions& options = {});

struct LoadedCheckpoint {
  int world_size = 1;  // of the run that saved it
  std::map<std::string, std::string> metadata;
  /// The number of ranks is the same, so each rank also got its random generator and its own
  /// version of buffers back, and training goes on as if it had not been interrupted. Otherwise
  /// generators stay as they are, and buffers are those of rank 0.
  bool same_world_size = false;
};

/// Loads a checkpoint at any number of ranks. Each rank reads the ranges that it needs; every file
/// is held to its checksum by one of them. Needs memory for a second copy of the rank's share until
/// it returns. `optimizer` may be null, then its state is left out.
LoadedCheckpoint load_checkpoint(const std::filesystem::path& folder, torch::nn::Module& module,
                                 torch::optim::Optimizer* optimizer,
                                 BackendPtr process_group = nullptr);

}  // namespace fsdp
