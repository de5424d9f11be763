#include "checkpoint_index.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <system_error>

#include "fsdp/errors.h"
#include "fsdp/safetensors.h"
#include "fsdp/strict_json.h"
#include "sha256.h"

namespace fsdp {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::string_view kFormat = "fsdp.checkpoint";
constexpr std::int64_t kVersion = 1;
constexpr std::size_t kDigestLength = 64;

[[noreturn]] void fail(const fs::path& path, const std::string& what) {
  throw FileError(fmt::format("{}: {}", path.string(), what));
}

std::string read_text(const fs::path& path) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) {
    fail(path, fmt::format("{}; wanted: a file of a checkpoint. Is this the folder of one, and was "
                           "it copied whole?",
                           error ? error.message() : "is not a file"));
  }
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file) {
    fail(path, "cannot be read: " + std::generic_category().message(errno));
  }
  return text;
}

json to_json(const IndexedTensor& tensor) {
  json pieces = json::array();
  for (const auto& piece : tensor.pieces) {
    pieces.push_back({{"file", piece.file}, {"begin", piece.begin}, {"numel", piece.numel}});
  }
  return {{"dtype", safetensors_dtype(tensor.info.dtype)},
          {"shape", tensor.info.shape},
          {"pieces", std::move(pieces)},
          {"own", tensor.own}};
}

json to_json(const std::optional<SavedOptimizer>& optimizer) {
  if (!optimizer.has_value()) {
    return nullptr;
  }
  json groups = json::array();
  for (const auto& group : optimizer->groups) {
    groups.push_back({{"options", group.options}, {"parameters", group.parameters}});
  }
  return {{"type", optimizer->type}, {"groups", std::move(groups)}, {"counts", optimizer->counts}};
}

json to_json(const CheckpointIndex& index) {
  json files = json::array();
  for (int rank = 0; rank < index.world_size; ++rank) {
    files.push_back({{"name", rank_file_name(rank)}, {"bytes", index.file_bytes[rank]}});
  }
  json tensors = json::object();
  for (const auto& [key, tensor] : index.tensors) {
    tensors[key] = to_json(tensor);
  }
  return {{"format", kFormat},
          {"version", kVersion},
          {"world_size", index.world_size},
          {"files", std::move(files)},
          {"tensors", std::move(tensors)},
          {"optimizer", to_json(index.optimizer)},
          {"metadata", index.metadata}};
}

/// "HASH  NAME" line by line.
Checksums parse_sums(const fs::path& path, const std::string& text) {
  Checksums sums;
  std::size_t begin = 0;
  for (int line = 1; begin < text.size(); ++line) {
    const auto end = text.find('\n', begin);
    const auto content = text.substr(begin, end - begin);
    const bool hexadecimal = content.find_first_not_of("0123456789abcdef") == kDigestLength;
    if (end == std::string::npos || !hexadecimal || content.substr(kDigestLength, 2) != "  " ||
        !sums.emplace(content.substr(kDigestLength + 2), content.substr(0, kDigestLength)).second) {
      fail(path, fmt::format("line {}: \"{}\"; wanted: a SHA-256, two spaces and the name of a "
                             "file, once for each",
                             line, content.substr(0, 100)));
    }
    begin = end + 1;
  }
  return sums;
}

int file_number(const JsonField& field, int world_size) {
  const auto number = field.integer(0);
  if (number >= world_size) {
    field.wrong(fmt::format("a file of 0 to {}", world_size - 1));
  }
  return static_cast<int>(number);
}

IndexedTensor parse_tensor(const JsonField& field, int world_size) {
  IndexedTensor tensor;
  const auto dtype = field.at("dtype");
  const auto known = dtype_from_safetensors(dtype.text());
  if (!known) {
    dtype.wrong("a dtype of safetensors");
  }
  tensor.info = {*known, field.at("shape").sizes()};
  const auto numel = checked_numel(tensor.info.shape);
  if (numel < 0) {
    field.at("shape").wrong("a shape that does not overflow");
  }
  std::int64_t covered = 0;
  for (const auto& item : field.at("pieces").items()) {
    IndexedTensor::Piece piece{file_number(item.at("file"), world_size),
                               item.at("begin").integer(0), item.at("numel").integer(0)};
    if (piece.begin != covered || piece.numel > numel - covered) {
      item.wrong(fmt::format("a piece from element {} on, to {} at most", covered, numel));
    }
    covered += piece.numel;
    tensor.pieces.push_back(piece);
  }
  if (covered != numel) {
    field.at("pieces").fail(fmt::format(
        "the pieces end at element {}; wanted: {}, the end of the tensor", covered, numel));
  }
  for (const auto& item : field.at("own").items()) {
    tensor.own.push_back(file_number(item, world_size));
  }
  return tensor;
}

SavedOptimizer parse_optimizer(const JsonField& field) {
  SavedOptimizer optimizer;
  optimizer.type = field.at("type").text();
  for (const auto& item : field.at("groups").items()) {
    auto& group = optimizer.groups.emplace_back();
    for (const auto& [name, value] : item.at("options").members()) {
      group.options[name] = value.number();
    }
    for (const auto& name : item.at("parameters").items()) {
      group.parameters.push_back(name.text());
    }
  }
  for (const auto& [name, counts] : field.at("counts").members()) {
    auto& known = optimizer.counts[name];
    for (const auto& [key, value] : counts.members()) {
      known[key] = value.integer(0);
    }
  }
  return optimizer;
}

CheckpointIndex parse_index(const JsonField& root) {
  const auto format = root.at("format");
  if (!format.value().is_string() || format.text() != kFormat) {
    format.wrong(fmt::format("\"{}\"", kFormat));
  }
  const auto version = root.at("version");
  if (version.integer(0) != kVersion) {
    version.wrong(
        fmt::format("version {}, the one that this library reads and writes; load it with "
                    "the library that wrote it, and write a full state",
                    kVersion));
  }
  CheckpointIndex index;
  const auto world_size = root.at("world_size");
  const auto files = root.at("files").items();
  if (world_size.integer(1) != static_cast<std::int64_t>(files.size())) {
    world_size.wrong(fmt::format("{}, the number of files", files.size()));
  }
  index.world_size = static_cast<int>(files.size());
  for (int rank = 0; rank < index.world_size; ++rank) {
    const auto name = files[rank].at("name");
    if (name.text() != rank_file_name(rank)) {
      name.wrong(rank_file_name(rank));
    }
    index.file_bytes.push_back(files[rank].at("bytes").integer(0));
  }
  for (const auto& [key, tensor] : root.at("tensors").members()) {
    if (!key.starts_with(kModelPrefix) && !key.starts_with(kOptimizerPrefix)) {
      tensor.fail("neither model/NAME nor optimizer/KEY/NAME");
    }
    index.tensors[key] = parse_tensor(tensor, index.world_size);
  }
  if (const auto optimizer = root.at("optimizer"); !optimizer.is_null()) {
    index.optimizer = parse_optimizer(optimizer);
  }
  for (const auto& [key, value] : root.at("metadata").members()) {
    index.metadata[key] = value.text();
  }
  return index;
}

}  // namespace

std::string rank_file_name(int rank) {
  return fmt::format("rank-{:05}.safetensors", rank);
}

void write_index(const fs::path& folder, const CheckpointIndex& index, Checksums sums) {
  std::string text;
  try {
    text = to_json(index).dump(1) + "\n";
  } catch (const json::exception& error) {
    fail(folder / kIndexName,
         fmt::format("a name or a metadata value is not UTF-8: {}", json_reason(error)));
  }
  write_file(folder / kIndexName, {text}, {.sync = true, .sha256 = &sums[kIndexName]});
  std::string lines;
  for (const auto& [name, digest] : sums) {
    lines += fmt::format("{}  {}\n", digest, name);
  }
  write_file(folder / kSumsName, {lines});
}

ReadIndex read_index(const fs::path& folder) {
  const auto sums_path = folder / kSumsName;
  const auto index_path = folder / kIndexName;
  ReadIndex result;
  const auto sums_text = read_text(sums_path);
  result.digest = sha256_of(sums_text);
  result.sums = parse_sums(sums_path, sums_text);

  const auto text = read_text(index_path);
  const auto recorded = result.sums.find(kIndexName);
  if (recorded == result.sums.end()) {
    fail(sums_path, fmt::format("has no line for {}", kIndexName));
  }
  if (const auto seen = sha256_of(text); seen != recorded->second) {
    fail(index_path, fmt::format("damaged: its SHA-256 is {}; wanted: {}, as in {}", seen,
                                 recorded->second, kSumsName));
  }
  const auto root = parse_json(index_path, "index", text);
  result.index = parse_index({index_path, "index", root});
  for (int rank = 0; rank < result.index.world_size; ++rank) {
    if (!result.sums.contains(rank_file_name(rank))) {
      fail(sums_path, fmt::format("has no line for {}", rank_file_name(rank)));
    }
  }
  return result;
}

}  // namespace fsdp
