#include "conformance/trace_io.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fsdp/strict_json.h>

#include <cerrno>
#include <charconv>
#include <fstream>
#include <iterator>
#include <set>
#include <system_error>
#include <utility>

#include "reference/wording.h"

namespace shardproof {
namespace {

namespace fs = std::filesystem;
using fsdp::checked_numel;
using fsdp::parse_json;
using nlohmann::json;
using Field = fsdp::JsonField;

constexpr std::string_view kTraceFormat = "shardproof.trace/1";
constexpr std::string_view kStateFormat = "shardproof.state/1";
// Steps and states can be made again, so a run does not wait for the disk.
constexpr fsdp::WriteOptions kUnsynced{.sync = false};

[[noreturn]] void fail(const fs::path& path, const std::string& what) {
  throw FileError(fmt::format("{}: {}", path.string(), what));
}

std::string read_text(const fs::path& path) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) {
    fail(path, error ? error.message() : "is not a file");
  }
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file) {
    fail(path, "cannot be read: " + std::generic_category().message(errno));
  }
  return text;
}

const std::string& metadata_value(const fs::path& path, const SafetensorsFile& file,
                                  const std::string& key) {
  const auto found = file.metadata.find(key);
  if (found == file.metadata.end()) {
    fail(path, fmt::format("metadata: \"{}\" is missing", key));
  }
  return found->second;
}

void check_format(const fs::path& path, const std::string& seen, std::string_view wanted) {
  if (seen != wanted) {
    fail(path, fmt::format("format \"{}\" where \"{}\" was expected: make the file again with the "
                           "program that wrote it, in the version that belongs to this one "
                           "(conformance/trace-format.md describes the format)",
                           seen, wanted));
  }
}

void check_format(const fs::path& path, const SafetensorsFile& file, std::string_view wanted) {
  const auto found = file.metadata.find("format");
  check_format(path, found == file.metadata.end() ? "" : found->second, wanted);
}

std::int64_t metadata_count(const fs::path& path, const SafetensorsFile& file,
                            const std::string& key) {
  const std::string& text = metadata_value(path, file, key);
  std::int64_t value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) {
    fail(path,
         fmt::format("metadata: \"{}\" is \"{}\" where a whole number was expected", key, text));
  }
  return value;
}

// ---- Steps --------------------------------------------------------------------------------------

Placement placement_from(const Field& field) {
  const std::string name = field.text();
  for (const Placement placement :
       {Placement::per_rank, Placement::replicated, Placement::sharded, Placement::single}) {
    if (name == to_string(placement)) {
      return placement;
    }
  }
  field.wrong("per_rank, replicated, sharded or single");
}

Quantity quantity_from(const Field& field) {
  try {
    return quantity_from_string(field.text());
  } catch (const std::invalid_argument&) {
    field.wrong("a quantity");
  }
}

std::string piece_key(const TraceTensor& tensor, const Piece& piece) {
  const std::string holder =
      piece.rank == kNoRank ? std::string("whole") : fmt::format("rank{}", piece.rank);
  return fmt::format("{}/{}/{}", to_string(tensor.quantity), tensor.name, holder);
}

/// What is wrong with a piece, or "".
std::string fault_of(const TraceTensor& tensor, const Piece& piece) {
  if (!piece.values.defined()) {
    return "has no values";
  }
  if ((piece.rank == kNoRank) != (tensor.placement == Placement::single) || piece.rank < kNoRank) {
    return fmt::format("has rank {}, which does not fit placement {}", piece.rank,
                       to_string(tensor.placement));
  }
  if (tensor.placement != Placement::sharded) {
    if (piece.values.sizes() != at::IntArrayRef(tensor.shape) || piece.offset != 0) {
      return fmt::format("has shape [{}] and offset {} where shape [{}] and offset 0 were expected",
                         fmt::join(piece.values.sizes(), ", "), piece.offset,
                         fmt::join(tensor.shape, ", "));
    }
    return "";
  }
  const std::int64_t numel = checked_numel(tensor.shape);
  if (piece.values.dim() != 1 || piece.offset < 0 || piece.offset > numel ||
      piece.values.numel() > numel - piece.offset) {
    return fmt::format("has shape [{}] and offset {}, which is no run of the {} elements",
                       fmt::join(piece.values.sizes(), ", "), piece.offset, numel);
  }
  return "";
}

/// Throws TraceError if a piece does not fit its tensor.
void check_pieces(const TraceTensor& tensor) {
  const std::string what = fmt::format("{} \"{}\"", to_string(tensor.quantity), tensor.name);
  if (checked_numel(tensor.shape) < 0) {
    throw TraceError(what + ": the shape overflows");
  }
  if (tensor.pieces.empty()) {
    throw TraceError(what + ": has no pieces");
  }
  for (std::size_t i = 0; i < tensor.pieces.size(); ++i) {
    const Piece& piece = tensor.pieces[i];
    if (const std::string fault = fault_of(tensor, piece); !fault.empty()) {
      throw TraceError(fmt::format("{}: piece {} {}", what, i, fault));
    }
    if (i > 0 && piece.rank <= tensor.pieces[i - 1].rank) {
      throw TraceError(
          fmt::format("{}: the piece of rank {} follows that of rank {}; each rank has "
                      "one piece, in rank order",
                      what, piece.rank, tensor.pieces[i - 1].rank));
    }
  }
}

json describe_tensor(const TraceTensor& tensor) {
  json pieces = json::array();
  for (const Piece& piece : tensor.pieces) {
    pieces.push_back(
        {{"rank", piece.rank}, {"offset", piece.offset}, {"key", piece_key(tensor, piece)}});
  }
  return {{"quantity", to_string(tensor.quantity)},
          {"name", tensor.name},
          {"shape", tensor.shape},
          {"placement", to_string(tensor.placement)},
          {"pieces", std::move(pieces)}};
}

/// Takes the piece's values out of the file, so that what is left over at the end belongs to
/// nobody.
Piece take_piece(const fs::path& path, SafetensorsFile& file, const Field& field) {
  Piece piece;
  const std::int64_t rank = field.at("rank").integer(kNoRank);
  if (rank > INT32_MAX) {
    field.at("rank").wrong("a rank");
  }
  piece.rank = static_cast<int>(rank);
  piece.offset = field.at("offset").integer(0);
  const std::string key = field.at("key").text();
  const auto found = file.tensors.find(key);
  if (found == file.tensors.end()) {
    fail(path, fmt::format("{}: the file has no tensor \"{}\", or another piece has it already",
                           field.place(), key));
  }
  piece.values = std::move(found->second);
  file.tensors.erase(found);
  return piece;
}

TraceTensor take_tensor(const fs::path& path, SafetensorsFile& file, const Field& field) {
  TraceTensor tensor;
  tensor.quantity = quantity_from(field.at("quantity"));
  tensor.name = field.at("name").text();
  tensor.shape = field.at("shape").sizes();
  tensor.placement = placement_from(field.at("placement"));
  for (const Field& piece : field.at("pieces").items()) {
    tensor.pieces.push_back(take_piece(path, file, piece));
  }
  try {
    check_pieces(tensor);
  } catch (const TraceError& error) {
    fail(path, fmt::format("{}: {}", field.place(), error.what()));
  }
  return tensor;
}

std::string step_file_name(int step) {
  return fmt::format("step-{:05}.safetensors", step);
}

bool is_step_file_name(const std::string& name) {
  return name.starts_with("step-") && name.ends_with(".safetensors");
}

}  // namespace

std::string_view to_string(Placement placement) {
  switch (placement) {
    case Placement::per_rank:
      return "per_rank";
    case Placement::replicated:
      return "replicated";
    case Placement::sharded:
      return "sharded";
    case Placement::single:
      return "single";
  }
  return "unknown";
}

void write_step(const fs::path& path, const StepTrace& step) {
  SafetensorsFile file;
  json tensors = json::array();
  for (const TraceTensor& tensor : step.tensors) {
    check_pieces(tensor);
    for (const Piece& piece : tensor.pieces) {
      if (!file.tensors.emplace(piece_key(tensor, piece), piece.values).second) {
        throw TraceError(fmt::format("step {} has two tensors {} \"{}\"", step.step,
                                     to_string(tensor.quantity), tensor.name));
      }
    }
    tensors.push_back(describe_tensor(tensor));
  }
  file.metadata = {{"format", std::string(kTraceFormat)},
                   {"step", std::to_string(step.step)},
                   {"tensors", tensors.dump(-1, ' ', false, json::error_handler_t::replace)}};
  write_safetensors(path, file, kUnsynced);
}

StepTrace read_step(const fs::path& path) {
  SafetensorsFile file = read_safetensors(path);
  check_format(path, file, kTraceFormat);
  const std::int64_t step = metadata_count(path, file, "step");
  if (step > INT32_MAX) {
    fail(path, fmt::format("metadata: step {} is too large", step));
  }
  const json tensors = parse_json(path, "metadata: tensors", metadata_value(path, file, "tensors"));
  StepTrace result;
  result.step = static_cast<int>(step);
  std::set<std::pair<Quantity, std::string>> seen;
  for (const Field& field : Field(path, "metadata: tensors", tensors).items()) {
    TraceTensor tensor = take_tensor(path, file, field);
    if (!seen.emplace(tensor.quantity, tensor.name).second) {
      fail(path, fmt::format("{}: {} \"{}\" occurs twice", field.place(),
                             to_string(tensor.quantity), tensor.name));
    }
    result.tensors.push_back(std::move(tensor));
  }
  if (!file.tensors.empty()) {
    fail(path, fmt::format("tensor \"{}\" belongs to no piece listed in the metadata",
                           file.tensors.begin()->first));
  }
  return result;
}

void write_state(const fs::path& path, const TrainingState& state) {
  SafetensorsFile file;
  for (const auto& [name, values] : state.parameters) {
    file.tensors["parameter/" + name] = values;
  }
  for (const auto& [name, values] : state.optimizer_state) {
    file.tensors["optimizer_state/" + name] = values;
  }
  file.metadata = {{"format", std::string(kStateFormat)},
                   {"steps_done", std::to_string(state.steps_done)},
                   {"optimizer_steps", std::to_string(state.optimizer_steps())}};
  write_safetensors(path, file, kUnsynced);
}

TrainingState read_state(const fs::path& path) {
  SafetensorsFile file = read_safetensors(path);
  check_format(path, file, kStateFormat);
  TrainingState state;
  state.steps_done = metadata_count(path, file, "steps_done");
  if (file.metadata.count("optimizer_steps") > 0) {
    const auto taken = metadata_count(path, file, "optimizer_steps");
    if (taken > state.steps_done) {
      fail(path,
           fmt::format("metadata: optimizer_steps is {}; wanted: at most steps_done, which is "
                       "{}",
                       taken, state.steps_done));
    }
    state.left_out = state.steps_done - taken;
  }
  for (auto& [key, values] : file.tensors) {
    const std::size_t slash = key.find('/');
    const std::string kind = key.substr(0, slash);
    const std::string name = slash == std::string::npos ? "" : key.substr(slash + 1);
    if (!name.empty() && kind == "parameter") {
      state.parameters[name] = values;
    } else if (!name.empty() && kind == "optimizer_state") {
      state.optimizer_state[name] = values;
    } else {
      fail(path, fmt::format(
                     "tensor \"{}\" is neither parameter/NAME nor optimizer_state/KIND/NAME", key));
    }
  }
  return state;
}

TraceWriter::TraceWriter(fs::path folder, const Scenario& scenario, std::string producer)
    : folder_(std::move(folder)), scenario_(scenario), producer_(std::move(producer)) {
  std::error_code error;
  fs::create_directories(folder_, error);
  if (error || !fs::is_directory(folder_, error)) {
    fail(folder_, "the folder cannot be made: " + (error ? error.message() : "it is a file"));
  }
  // trace.json goes first: from then on the folder is a run that did not end.
  fs::remove(folder_ / "trace.json", error);
  std::vector<fs::path> stale;
  for (fs::directory_iterator entry(folder_, error), end; !error && entry != end;
       entry.increment(error)) {
    if (is_step_file_name(entry->path().filename().string())) {
      stale.push_back(entry->path());
    }
  }
  for (const fs::path& path : stale) {
    fs::remove(path, error);
  }
}

void TraceWriter::add(const StepTrace& step) {
  if (step.step != steps_) {
    throw TraceError(fmt::format("step {} was added to the trace {} where step {} comes next",
                                 step.step, folder_.string(), steps_));
  }
  write_step(folder_ / step_file_name(step.step), step);
  ++steps_;
}

void TraceWriter::finish() {
  const json trace = {{"format", kTraceFormat},
                      {"producer", producer_},
                      {"scenario", to_json(scenario_)},
                      {"steps", steps_}};
  const std::string text = trace.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
  write_file(folder_ / "trace.json", {text});
}

TraceReader::TraceReader(fs::path folder) : folder_(std::move(folder)) {
  const fs::path path = folder_ / "trace.json";
  std::error_code error;
  if (!fs::exists(path, error)) {
    fail(path,
         "there is no such file: the folder holds no trace, or the run that wrote it did not "
         "end; run it again");
  }
  const json trace = parse_json(path, "trace", read_text(path));
  const Field root(path, "trace", trace);
  check_format(path, root.at("format").text(), kTraceFormat);
  const std::int64_t steps = root.at("steps").integer(0);
  if (steps > INT32_MAX) {
    root.at("steps").wrong("a number of steps");
  }
  steps_ = static_cast<int>(steps);
  try {
    scenario_ = scenario_from_json(root.at("scenario").value());
  } catch (const ScenarioError& problem) {
    fail(path, fmt::format("scenario: {}", problem.what()));
  }
}

StepTrace TraceReader::step(int index) const {
  if (index < 0 || index >= steps_) {
    throw TraceError(fmt::format("step {} was asked of the trace {}, which has {}", index,
                                 folder_.string(), steps_));
  }
  const fs::path path = folder_ / step_file_name(index);
  StepTrace result = read_step(path);
  if (result.step != index) {
    fail(path, fmt::format("metadata: step is {} where {} was expected", result.step, index));
  }
  return result;
}

}  // namespace shardproof
