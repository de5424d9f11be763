// Checkpoints: every rank writes what it holds, any number of ranks reads it.

#include <ATen/ATen.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <mutex>
#include <nlohmann/json.hpp>
#include <system_error>
#include <tuple>

#include "checkpoint_index.h"
#include "fsdp/errors.h"
#include "fsdp/random.h"
#include "fsdp/safetensors.h"
#include "fsdp/state.h"
#include "sha256.h"

namespace fsdp {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

[[noreturn]] void fail(const fs::path& path, const std::string& what) {
  throw FileError(fmt::format("{}: {}", path.string(), what));
}

[[noreturn]] void fail_errno(const fs::path& path, const std::string& what) {
  fail(path, fmt::format("{}: {}", what, std::generic_category().message(errno)));
}

// ---- The folder ---------------------------------------------------------------------------------

struct Folder {
  explicit Folder(const fs::path& path) : final_path(fs::absolute(path).lexically_normal()) {
    if (!final_path.has_filename()) {
      final_path = final_path.parent_path();  // a slash at the end
    }
    partial = final_path.parent_path() / fmt::format(".{}.partial", final_path.filename().string());
  }
  fs::path final_path;
  fs::path partial;
};

bool is_checkpoint(const fs::path& folder) {
  std::error_code ignored;
  return fs::exists(folder / kIndexName, ignored) && fs::exists(folder / kSumsName, ignored);
}

void make_partial(const Folder& folder) {
  std::error_code error;
  const auto status = fs::symlink_status(folder.final_path, error);
  const bool free = status.type() == fs::file_type::not_found ||
                    (fs::is_directory(status) &&
                     (fs::is_empty(folder.final_path, error) || is_checkpoint(folder.final_path)));
  if (!free) {
    fail(folder.final_path,
         "exists and is not a checkpoint; wanted: a folder that is not there "
         "yet, or a checkpoint to be replaced");
  }
  fs::create_directories(folder.final_path.parent_path(), error);
  // What a run that was killed left behind.
  fs::remove_all(folder.partial, error);
  if (!fs::create_directory(folder.partial, error)) {
    fail(folder.final_path,
         fmt::format("cannot be written: {} cannot be made: {}", folder.partial.string(),
                     error ? error.message() : "it is there already"));
  }
}

void sync_folder(const fs::path& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool failed = file < 0 || ::fsync(file) != 0;
  const int error = errno;
  if (file >= 0) {
    ::close(file);
  }
  // Some network file systems do not sync folders, and need not.
  if (failed && error != EINVAL) {
    errno = error;
    fail_errno(path, "cannot be synced to the disk");
  }
}

void put_in_place(const Folder& folder) {
  sync_folder(folder.partial);
  if (::rename(folder.partial.c_str(), folder.final_path.c_str()) != 0) {
    if (errno != ENOTEMPTY && errno != EEXIST) {
      fail_errno(folder.final_path, "cannot be written");
    }
    // There is a checkpoint already. The exchange is atomic, so at no time there is none.
    if (::renameat2(AT_FDCWD, folder.partial.c_str(), AT_FDCWD, folder.final_path.c_str(),
                    RENAME_EXCHANGE) != 0) {
      fail_errno(folder.final_path,
                 "the checkpoint that is there cannot be replaced; save under another name");
    }
    std::error_code ignored;
    fs::remove_all(folder.partial, ignored);
  }
  sync_folder(folder.final_path.parent_path());
}

// ---- Saving -------------------------------------------------------------------------------------

at::Tensor generator_state() {
  const std::lock_guard lock(rank_generator().mutex());
  return rank_generator().get_state();
}

/// A tensor to be saved, of which this rank has a piece.
struct Entry {
  std::string key;
  const ModelTensor* tensor;  // says which elements
  at::Tensor values;
};

std::vector<Entry> entries_of(const Model& model, const torch::optim::Optimizer* optimizer,
                              const OptimizerView& view,
                              const std::map<std::size_t, StateShape>& states) {
  std::vector<Entry> entries;
  for (const auto& tensor : model.tensors) {
    entries.push_back({kModelPrefix + tensor.name(), &tensor, tensor.tensor.detach()});
  }
  for (const auto& [index, shape] : states) {
    const auto& parameter = model.tensors[index];
    for (const auto& key : shape.tensors) {
      entries.push_back({fmt::format("{}{}/{}", kOptimizerPrefix, key, parameter.name()),
                         &parameter, state_piece(*optimizer, *view.kind, parameter, key)});
    }
  }
  return entries;
}

std::string digest_of(const at::Tensor& tensor) {
  const auto here = tensor.detach().cpu().contiguous();
  return sha256_of({static_cast<const char*>(here.const_data_ptr()), here.nbytes()});
}

/// Whether this rank writes each entry.
std::vector<bool> choose_written(const Ranks& ranks, const std::vector<Entry>& entries) {
  const auto digests = ranks.all_or_none([&] {
    std::string mine;
    for (const auto& entry : entries) {
      mine += entry.tensor->is_replicated() ? digest_of(entry.values) : "";
    }
    return mine;
  });
  const auto& first = digests.front();
  const auto& mine = digests[ranks.rank()];
  const std::size_t length = digest_of(at::empty({0})).size();
  std::vector<bool> written;
  std::size_t position = 0;
  for (const auto& entry : entries) {
    if (entry.tensor->is_replicated()) {
      written.push_back(ranks.rank() == 0 ||
                        mine.compare(position, length, first, position, length) != 0);
      position += length;
    } else {
      written.push_back(entry.tensor->is_primary && entry.tensor->numel > 0);
    }
  }
  return written;
}

/// Writes this rank's file and says what is in it: [bytes, SHA-256, the numbers of the entries].
std::string write_rank_file(const Folder& folder, const Ranks& ranks,
                            const std::vector<Entry>& entries, const std::vector<bool>& written) {
  SafetensorsFile file;
  file.tensors[kGeneratorKey] = generator_state();
  json numbers = json::array();
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (written[i]) {
      file.tensors[entries[i].key] = entries[i].values;
      numbers.push_back({i, entries[i].tensor->begin, entries[i].tensor->numel});
    }
  }
  const auto path = folder.partial / rank_file_name(ranks.rank());
  std::string digest;
  write_safetensors(path, file, {.sync = true, .sha256 = &digest});
  return json{fs::file_size(path), digest, numbers}.dump();
}

void check_tiling(const std::string& key, const IndexedTensor& tensor) {
  std::int64_t covered = 0;
  for (const auto& piece : tensor.pieces) {
    if (piece.begin != covered) {
      throw StateError(fmt::format(
          "{}: elements {} to {} are held by {}; wanted: one rank that saves each. Are the process "
          "groups of the model below the one that was given?",
          key, std::min(covered, piece.begin), std::max(covered, piece.begin),
          piece.begin < covered ? "several ranks" : "no rank"));
    }
    covered += piece.numel;
  }
  if (covered != checked_numel(tensor.info.shape)) {
    throw StateError(
        fmt::format("{}: elements from {} on are held by no rank; wanted: all ranks of "
                    "the model, as the process group",
                    key, covered));
  }
}

/// Puts together what the ranks say they wrote.
CheckpointIndex index_of(const std::vector<Entry>& entries, const std::vector<std::string>& reports,
                         Checksums& sums) {
  CheckpointIndex index;
  index.world_size = static_cast<int>(reports.size());
  for (const auto& entry : entries) {
    index.tensors[entry.key].info = {entry.values.scalar_type(), entry.tensor->sizes};
  }
  for (int rank = 0; rank < index.world_size; ++rank) {
    const auto report = json::parse(reports[rank]);
    index.file_bytes.push_back(report[0].get<std::int64_t>());
    sums[rank_file_name(rank)] = report[1].get<std::string>();
    for (const auto& number : report[2]) {
      const auto& entry = entries.at(number[0].get<std::size_t>());
      auto& tensor = index.tensors.at(entry.key);
      if (entry.tensor->is_replicated() && rank > 0) {
        tensor.own.push_back(rank);
      } else {
        tensor.pieces.push_back(
            {rank, number[1].get<std::int64_t>(), number[2].get<std::int64_t>()});
      }
    }
  }
  for (auto& [key, tensor] : index.tensors) {
    std::sort(tensor.pieces.begin(), tensor.pieces.end(), [](const auto& a, const auto& b) {
      return std::tie(a.begin, a.file) < std::tie(b.begin, b.file);
    });
    check_tiling(key, tensor);
  }
  return index;
}

SavedOptimizer header_of(const Model& model, const OptimizerView& view,
                         const std::map<std::size_t, StateShape>& states) {
  SavedOptimizer saved{std::string(view.kind->type), view.groups, {}};
  for (const auto& [index, shape] : states) {
    saved.counts[model.tensors[index].name()] = shape.counts;
  }
  return saved;
}

void save(const Folder& folder, const Model& model, const torch::optim::Optimizer* optimizer,
          const CheckpointOptions& options) {
  const auto& ranks = model.ranks;
  OptimizerView view;
  ranks.all_or_none([&] {
    if (optimizer != nullptr) {
      view = view_optimizer(*optimizer, model.tensors);
    }
    if (ranks.rank() == 0) {
      make_partial(folder);
    }
    return "";
  });
  std::map<std::size_t, StateShape> states;
  if (optimizer != nullptr) {
    states = agree_on_states(model, *optimizer, view);
  }
  const auto entries = entries_of(model, optimizer, view, states);
  const auto written = choose_written(ranks, entries);
  const auto reports =
      ranks.all_or_none([&] { return write_rank_file(folder, ranks, entries, written); });
  ranks.all_or_none([&] {
    if (ranks.rank() == 0) {
      Checksums sums;
      auto index = index_of(entries, reports, sums);
      if (optimizer != nullptr) {
        index.optimizer = header_of(model, view, states);
      }
      index.metadata = options.metadata;
      write_index(folder.partial, index, std::move(sums));
      put_in_place(folder);
    }
    return "";
  });
}

// ---- Loading ------------------------------------------------------------------------------------

/// The ranks' files, opened when they are first needed.
class RankFiles {
 public:
  RankFiles(fs::path folder, const ReadIndex& read) : folder_(std::move(folder)), read_(read) {
    readers_.resize(read.index.world_size);
  }

  SafetensorsReader& operator[](int rank) {
    auto& reader = readers_.at(rank);
    if (reader == nullptr) {
      auto opened = std::make_unique<SafetensorsReader>(path(rank));
      check_bytes(rank, opened->bytes());
      reader = std::move(opened);
    }
    return *reader;
  }

  /// Holds a file to its size and checksum.
  void verify(int rank) const {
    std::error_code error;
    if (!fs::is_regular_file(path(rank), error)) {
      fail(path(rank),
           fmt::format("{}; wanted: the file of rank {} of {}. Was the checkpoint copied whole?",
                       error ? error.message() : "is not a file", rank, readers_.size()));
    }
    check_bytes(rank, static_cast<std::int64_t>(fs::file_size(path(rank))));
    const auto seen = sha256_of_file(path(rank));
    const auto& wanted = read_.sums.at(rank_file_name(rank));
    if (seen != wanted) {
      fail(path(rank), fmt::format("damaged, or of another checkpoint: its SHA-256 is {}; wanted: "
                                   "{}, as in {}",
                                   seen, wanted, kSumsName));
    }
  }

  const CheckpointIndex& index() const { return read_.index; }

 private:
  fs::path path(int rank) const { return folder_ / rank_file_name(rank); }
  void check_bytes(int rank, std::int64_t bytes) const {
    if (bytes != read_.index.file_bytes[rank]) {
      fail(path(rank), fmt::format("has {} bytes; wanted: {}, as in {}: truncated, or of another "
                                   "checkpoint",
                                   bytes, read_.index.file_bytes[rank], kIndexName));
    }
  }

  fs::path folder_;
  const ReadIndex& read_;
  std::vector<std::unique_ptr<SafetensorsReader>> readers_;
};

/// The model's or the optimizer's tensors of a checkpoint.
class CheckpointSource : public TensorSource {
 public:
  /// `rank` is that of the saving run whose own versions are wanted; -1 for none.
  CheckpointSource(RankFiles& files, std::string origin, std::string prefix, int rank)
      : files_(files), prefix_(std::move(prefix)), rank_(rank) {
    origin_ = std::move(origin);
    for (const auto& [key, tensor] : files.index().tensors) {
      if (key.starts_with(prefix_)) {
        tensors_[key.substr(prefix_.size())] = tensor.info;
      }
    }
  }

  at::Tensor read(const std::string& name, std::int64_t begin, std::int64_t numel) override {
    const auto key = prefix_ + name;
    const auto& tensor = files_.index().tensors.at(key);
    if (std::find(tensor.own.begin(), tensor.own.end(), rank_) != tensor.own.end()) {
      return read_piece(key, tensor, {rank_, 0, checked_numel(tensor.info.shape)}, begin, numel);
    }
    std::vector<at::Tensor> parts;
    for (const auto& piece : tensor.pieces) {
      const auto first = std::max(begin, piece.begin);
      const auto last = std::min(begin + numel, piece.begin + piece.numel);
      if (first < last) {
        parts.push_back(read_piece(key, tensor, piece, first, last - first));
      }
    }
    return parts.empty()       ? at::empty({0}, tensor.info.dtype)
           : parts.size() == 1 ? parts.front()
                               : at::cat(parts);
  }

 private:
  at::Tensor read_piece(const std::string& key, const IndexedTensor& tensor,
                        const IndexedTensor::Piece& piece, std::int64_t begin, std::int64_t numel) {
    auto& file = files_[piece.file];
    const auto entry = file.entries().find(key);
    if (entry == file.entries().end() || entry->second.dtype != tensor.info.dtype ||
        checked_numel(entry->second.shape) != piece.numel) {
      fail(file.path(),
           fmt::format(
               "tensor \"{}\" is not there or has another dtype or size; wanted: {} elements "
               "of {}, as in {}",
               key, piece.numel, safetensors_dtype(tensor.info.dtype), kIndexName));
    }
    return file.read(key, begin - piece.begin, numel);
  }

  RankFiles& files_;
  std::string prefix_;
  int rank_;
};

at::Tensor read_generator(const SafetensorsReader& file) {
  auto state = file.read(kGeneratorKey);
  const auto present = generator_state();
  if (state.scalar_type() != present.scalar_type() || state.sizes() != present.sizes()) {
    fail(file.path(),
         fmt::format("tensor \"{}\" has shape {} and dtype {}; wanted: {} and {}", kGeneratorKey,
                     shape_text(state.sizes()), c10::toString(state.scalar_type()),
                     shape_text(present.sizes()), c10::toString(present.scalar_type())));
  }
  return state;
}

/// All that this rank needs, read and held to the model before any of it is changed.
struct Loaded {
  std::vector<at::Tensor> model;
  OptimizerView view;
  OptimizerPlan plan;
  OptimizerPieces optimizer;
  at::Tensor generator;  // undefined at another number of ranks
};

Loaded read_all(const fs::path& folder, const ReadIndex& read, const Model& model,
                const torch::optim::Optimizer* optimizer) {
  const auto& index = read.index;
  const bool same_world_size = index.world_size == model.ranks.size();
  const int own_rank = same_world_size ? model.ranks.rank() : -1;
  const auto origin = (folder / kIndexName).string();
  RankFiles files(folder, read);
  Loaded loaded;

  CheckpointSource weights(files, origin, kModelPrefix, own_rank);
  const auto plan = plan_model(model.tensors, weights, /*strict=*/true);
  CheckpointSource states(files, origin, kOptimizerPrefix, own_rank);
  if (optimizer != nullptr) {
    if (!index.optimizer.has_value()) {
      throw StateError(
          fmt::format("{}: the checkpoint was saved without an optimizer; wanted: one "
                      "with it, or null for the optimizer",
                      origin));
    }
    loaded.view = view_optimizer(*optimizer, model.tensors);
    loaded.plan = plan_optimizer(model.tensors, loaded.view, *index.optimizer, states);
  }
  for (int rank = model.ranks.rank(); rank < index.world_size; rank += model.ranks.size()) {
    files.verify(rank);
  }
  loaded.model = read_model(model.tensors, plan, weights);
  loaded.optimizer = read_optimizer(model.tensors, loaded.plan, states);
  if (same_world_size) {
    loaded.generator = read_generator(files[own_rank]);
  }
  return loaded;
}

}  // namespace

void save_checkpoint(const fs::path& path, torch::nn::Module& module,
                     const torch::optim::Optimizer* optimizer, const CheckpointOptions& options) {
  const at::NoGradGuard no_grad;
  const Folder folder(path);
  const auto model = open_model(module, options.process_group, "save_checkpoint");
  try {
    save(folder, model, optimizer, options);
  } catch (...) {
    if (model.ranks.rank() == 0) {
      std::error_code ignored;
      fs::remove_all(folder.partial, ignored);
    }
    try {
      model.ranks.exchange("");  // so that on every rank nothing is left when it throws
    } catch (const std::exception&) {
      // The group is broken, which the first exception says better.
    }
    throw;
  }
}

LoadedCheckpoint load_checkpoint(const fs::path& folder, torch::nn::Module& module,
                                 torch::optim::Optimizer* optimizer, BackendPtr process_group) {
  const at::NoGradGuard no_grad;
  const auto model = open_model(module, process_group, "load_checkpoint");
  ReadIndex read;
  const auto digests = model.ranks.all_or_none([&] {
    read = read_index(folder);
    return read.digest;
  });
  for (std::size_t rank = 0; rank < digests.size(); ++rank) {
    if (digests[rank] != digests.front()) {
      throw FileError(
          fmt::format("rank {}: {}: this rank sees another checkpoint under this name than rank 0 "
                      "does; wanted: "
                      "one file system for all ranks",
                      rank, folder.string()));
    }
  }
  Loaded loaded;
  model.ranks.all_or_none([&] {
    loaded = read_all(folder, read, model, optimizer);
    return "";
  });

  write_model(model.tensors, loaded.model);
  if (optimizer != nullptr) {
    write_optimizer(*optimizer, model.tensors, loaded.view, *read.index.optimizer, loaded.plan,
                    loaded.optimizer);
  }
  if (loaded.generator.defined()) {
    const std::lock_guard lock(rank_generator().mutex());
    rank_generator().set_state(loaded.generator);
  }
  return {read.index.world_size, read.index.metadata, loaded.generator.defined()};
}

}  // namespace fsdp
