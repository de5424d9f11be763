#include "conformance/trace_io.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <torch/torch.h>
#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <tuple>
#include <utility>

#include "reference/wording.h"

namespace shardproof {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

static_assert(
    std::endian::native == std::endian::little,
    "safetensors files are little-endian, and are read and written as they lie in memory");

constexpr std::string_view kTraceFormat = "shardproof.trace/1";
constexpr std::string_view kStateFormat = "shardproof.state/1";
constexpr std::string_view kMetadataKey = "__metadata__";
constexpr std::int64_t kLengthBytes = 8;
// The limit that the safetensors library itself sets, so that a corrupt length cannot ask for the
// machine's memory (https://github.com/huggingface/safetensors, "Format").
constexpr std::int64_t kMaxHeaderBytes = 100'000'000;
constexpr int kMaxJsonDepth = 32;

[[noreturn]] void fail(const fs::path& path, const std::string& what) {
  throw FileError(fmt::format("{}: {}", path.string(), what));
}

std::string errno_text() {
  return std::generic_category().message(errno);
}

// ---- JSON, strictly -----------------------------------------------------------------------------

/// Parses JSON, refusing what nlohmann-json would let pass: a key that occurs twice (it keeps the
/// last) and nesting without end.
json parse_json(const fs::path& path, std::string_view place, std::string_view text) {
  std::vector<std::set<std::string>> keys_of_open_objects;
  const json::parser_callback_t check = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth > kMaxJsonDepth) {
      fail(path, fmt::format("{}: nested deeper than {} levels", place, kMaxJsonDepth));
    }
    if (event == json::parse_event_t::object_start) {
      keys_of_open_objects.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      keys_of_open_objects.pop_back();
    } else if (event == json::parse_event_t::key) {
      if (!keys_of_open_objects.back().insert(parsed.get<std::string>()).second) {
        fail(path, fmt::format("{}: key {} occurs twice", place, parsed.dump()));
      }
    }
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), check);
  } catch (const json::parse_error& error) {
    fail(path, fmt::format("{}: not valid JSON at byte {}: {}", place, error.byte,
                           json_reason(error)));
  } catch (const json::exception& error) {  // a number that is too large; this error has no place
    fail(path, fmt::format("{}: {}", place, json_reason(error)));
  }
}

std::string brief(const json& value) {
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  return text.size() <= 60 ? text : text.substr(0, 57) + "...";
}

/// A JSON value with the place it stands at, so that every complaint names file and place.
class Field {
 public:
  Field(const fs::path& path, std::string place, const json& value)
      : path_(path), place_(std::move(place)), value_(value) {}

  Field at(const std::string& key) const {
    if (!value_.is_object()) {
      wrong("an object");
    }
    const auto found = value_.find(key);
    if (found == value_.end()) {
      fail(path_, fmt::format("{}: \"{}\" is missing", place_, key));
    }
    return {path_, fmt::format("{}.{}", place_, key), *found};
  }
  std::vector<Field> items() const {
    if (!value_.is_array()) {
      wrong("an array");
    }
    std::vector<Field> fields;
    for (std::size_t i = 0; i < value_.size(); ++i) {
      fields.emplace_back(path_, fmt::format("{}[{}]", place_, i), value_[i]);
    }
    return fields;
  }
  std::string text() const {
    if (!value_.is_string()) {
      wrong("a string");
    }
    return value_.get<std::string>();
  }
  /// An integer from `least` to the largest int64.
  std::int64_t integer(std::int64_t least) const {
    const bool fits = value_.is_number_integer() &&
                      !(value_.is_number_unsigned() &&
                        value_.get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX)) &&
                      value_.get<std::int64_t>() >= least;
    if (!fits) {
      wrong(fmt::format("an integer of at least {}", least));
    }
    return value_.get<std::int64_t>();
  }
  std::vector<std::int64_t> sizes() const {
    std::vector<std::int64_t> result;
    for (const Field& item : items()) {
      result.push_back(item.integer(0));
    }
    return result;
  }
  const json& value() const { return value_; }
  [[noreturn]] void wrong(const std::string& wanted) const {
    fail(path_, fmt::format("{}: {} where {} was expected", place_, brief(value_), wanted));
  }
  const std::string& place() const { return place_; }

 private:
  const fs::path& path_;
  std::string place_;
  const json& value_;
};

// ---- Shapes and dtypes --------------------------------------------------------------------------

struct DtypeName {
  const char* name;
  at::ScalarType dtype;
};
constexpr std::array kDtypes = {
    DtypeName{"F64", at::kDouble},    DtypeName{"F32", at::kFloat}, DtypeName{"F16", at::kHalf},
    DtypeName{"BF16", at::kBFloat16}, DtypeName{"I64", at::kLong},  DtypeName{"I32", at::kInt},
    DtypeName{"I16", at::kShort},     DtypeName{"I8", at::kChar},   DtypeName{"U8", at::kByte},
    DtypeName{"BOOL", at::kBool},
};

at::ScalarType dtype_from_name(const Field& field) {
  const std::string name = field.text();
  for (const DtypeName& known : kDtypes) {
    if (name == known.name) {
      return known.dtype;
    }
  }
  field.wrong("a dtype of F64 F32 F16 BF16 I64 I32 I16 I8 U8 BOOL");
}

const char* dtype_name(const fs::path& path, const std::string& key, at::ScalarType dtype) {
  for (const DtypeName& known : kDtypes) {
    if (dtype == known.dtype) {
      return known.name;
    }
  }
  fail(path, fmt::format("tensor \"{}\" has dtype {}, which this format does not hold", key,
                         c10::toString(dtype)));
}

/// The product of the sizes; -1 if it, or a stride of a tensor of these sizes, overflows.
std::int64_t checked_numel(const std::vector<std::int64_t>& sizes) {
  std::int64_t numel = 1;
  std::int64_t stride = 1;
  for (const std::int64_t size : sizes) {
    if (__builtin_mul_overflow(stride, std::max<std::int64_t>(size, 1), &stride)) {
      return -1;
    }
    numel *= size;  // at most stride
  }
  return numel;
}

// ---- Safetensors --------------------------------------------------------------------------------

struct Entry {
  std::string name;
  at::ScalarType dtype{};
  std::vector<std::int64_t> shape;
  std::int64_t begin = 0;  // in the data, which follows the header
  std::int64_t end = 0;
};

Entry parse_entry(const fs::path& path, const std::string& name, const Field& field) {
  Entry entry;
  entry.name = name;
  entry.dtype = dtype_from_name(field.at("dtype"));
  entry.shape = field.at("shape").sizes();
  const std::vector<std::int64_t> offsets = field.at("data_offsets").sizes();
  if (offsets.size() != 2 || offsets[0] > offsets[1]) {
    field.at("data_offsets").wrong("[begin, end] with begin <= end");
  }
  if (field.value().size() != 3) {
    field.wrong("an object of dtype, shape and data_offsets only");
  }
  entry.begin = offsets[0];
  entry.end = offsets[1];

  const std::int64_t numel = checked_numel(entry.shape);
  const auto element = static_cast<std::int64_t>(c10::elementSize(entry.dtype));
  std::int64_t bytes = 0;
  if (numel < 0 || __builtin_mul_overflow(numel, element, &bytes)) {
    fail(path, fmt::format("{}: the shape overflows", field.place()));
  }
  if (bytes != entry.end - entry.begin) {
    fail(path, fmt::format("{}: shape and dtype need {} bytes, data_offsets span {}", field.place(),
                           bytes, entry.end - entry.begin));
  }
  return entry;
}

/// Requires that the tensors' bytes lie end to end from 0 to the end of the file, in this order.
void check_tiling(const fs::path& path, const std::vector<Entry>& entries,
                  std::int64_t data_bytes) {
  std::int64_t covered = 0;
  for (const Entry& entry : entries) {
    if (entry.begin != covered) {
      fail(path,
           fmt::format("header: tensor \"{}\" begins at byte {} of the data, {} at byte {}",
                       entry.name, entry.begin,
                       entry.begin < covered ? "inside the one before, which ends"
                                             : "leaving a gap after the one before, which ends",
                       covered));
    }
    covered = entry.end;
  }
  if (covered > data_bytes) {
    fail(path, fmt::format("truncated: the header describes {} bytes of data, the file has {}",
                           covered, data_bytes));
  }
  if (covered < data_bytes) {
    fail(path, fmt::format("{} bytes follow the last tensor's data, which ends at byte {} of it",
                           data_bytes - covered, covered));
  }
}

/// Reads forwards through a file whose size is known, and never past it.
class InputFile {
 public:
  explicit InputFile(const fs::path& path) : path_(path) {
    std::error_code error;
    if (!fs::is_regular_file(path, error)) {
      fail(path, error ? error.message() : "is not a file");
    }
    bytes_ = static_cast<std::int64_t>(fs::file_size(path, error));
    stream_.open(path, std::ios::binary);
    if (error || !stream_) {
      fail(path, "cannot be opened for reading: " + (error ? error.message() : errno_text()));
    }
  }
  std::int64_t bytes() const { return bytes_; }
  void read(void* data, std::int64_t bytes, std::string_view what) {
    stream_.read(static_cast<char*>(data), bytes);
    if (stream_.gcount() != bytes) {
      fail(path_, fmt::format("{}: {} of {} bytes could be read", what, stream_.gcount(), bytes));
    }
  }

 private:
  fs::path path_;
  std::ifstream stream_;
  std::int64_t bytes_ = 0;
};

std::string read_text(const fs::path& path) {
  InputFile file(path);
  std::string text(static_cast<std::size_t>(file.bytes()), '\0');
  file.read(text.data(), file.bytes(), "text");
  return text;
}

json read_header(const fs::path& path, InputFile& file, std::int64_t& data_bytes) {
  if (file.bytes() < kLengthBytes) {
    fail(path, fmt::format("truncated: {} bytes, where a safetensors file begins with {} that hold "
                           "the length of its header",
                           file.bytes(), kLengthBytes));
  }
  std::uint64_t length = 0;
  file.read(&length, kLengthBytes, "header length");
  if (length > static_cast<std::uint64_t>(kMaxHeaderBytes)) {
    fail(path, fmt::format("the first 8 bytes say that the header has {} bytes, more than the {} "
                           "allowed: this is not a safetensors file",
                           length, kMaxHeaderBytes));
  }
  const auto header_bytes = static_cast<std::int64_t>(length);
  data_bytes = file.bytes() - kLengthBytes - header_bytes;
  if (data_bytes < 0) {
    fail(path, fmt::format("truncated: the header should have {} bytes, the file has {} after its "
                           "length",
                           header_bytes, file.bytes() - kLengthBytes));
  }
  std::string text(length, '\0');
  file.read(text.data(), header_bytes, "header");
  if (text.empty() || text.front() != '{') {
    fail(path, "header: does not begin with '{': this is not a safetensors file");
  }
  return parse_json(path, "header", text);
}

at::Tensor read_tensor(const fs::path& path, InputFile& file, const Entry& entry) {
  const at::Tensor tensor = torch::empty(entry.shape, torch::dtype(entry.dtype));
  file.read(tensor.data_ptr(), entry.end - entry.begin,
            fmt::format("data of tensor \"{}\"", entry.name));
  if (entry.dtype == at::kBool) {
    const auto* bytes = static_cast<const std::uint8_t*>(tensor.data_ptr());
    const auto* wrong =
        std::find_if(bytes, bytes + tensor.numel(), [](std::uint8_t byte) { return byte > 1; });
    if (wrong != bytes + tensor.numel()) {
      fail(path, fmt::format("data of tensor \"{}\": byte {} is {}, a BOOL is 0 or 1", entry.name,
                             wrong - bytes, *wrong));
    }
  }
  return tensor;
}

std::string_view bytes_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.data_ptr()), tensor.nbytes()};
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

void write_file(const fs::path& path, const std::vector<std::string_view>& parts) {
  std::error_code status_error;
  if (fs::exists(path, status_error) && !fs::is_regular_file(path, status_error)) {
    // Renaming over a device or a folder would destroy it or fail late.
    fail(path, "cannot be written: it exists and is not a file");
  }
  const fs::path partial =
      path.parent_path() / fmt::format(".{}.partial-{}", path.filename().string(), ::getpid());
  const int file =
      ::open(partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666);
  if (file < 0) {
    fail(path, "cannot be written: " + errno_text());
  }
  std::string problem;
  for (std::string_view part : parts) {
    while (!part.empty() && problem.empty()) {
      const ::ssize_t written = ::write(file, part.data(), part.size());
      if (written >= 0) {
        part.remove_prefix(static_cast<std::size_t>(written));
      } else if (errno != EINTR) {
        problem = errno_text();
      }
    }
  }
  // Network file systems report a full disk only here.
  if (::close(file) != 0 && problem.empty()) {
    problem = errno_text();
  }
  if (problem.empty() && ::rename(partial.c_str(), path.c_str()) != 0) {
    problem = errno_text();
  }
  if (!problem.empty()) {
    ::unlink(partial.c_str());
    fail(path, "cannot be written: " + problem);
  }
}

SafetensorsFile read_safetensors(const fs::path& path) {
  InputFile file(path);
  std::int64_t data_bytes = 0;
  const json header = read_header(path, file, data_bytes);
  SafetensorsFile result;
  std::vector<Entry> entries;
  for (const auto& [name, value] : header.items()) {
    const Field field(path, fmt::format("header: \"{}\"", name), value);
    if (name == kMetadataKey) {
      if (!value.is_object()) {
        field.wrong("an object");
      }
      for (const auto& [key, text] : value.items()) {
        result.metadata[key] = field.at(key).text();
      }
    } else {
      entries.push_back(parse_entry(path, name, field));
    }
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
  });
  check_tiling(path, entries, data_bytes);
  for (const Entry& entry : entries) {
    result.tensors[entry.name] = read_tensor(path, file, entry);
  }
  return result;
}

void write_safetensors(const fs::path& path, const SafetensorsFile& file) {
  struct Item {
    const std::string* name;
    at::Tensor values;
  };
  std::vector<Item> items;
  for (const auto& [name, tensor] : file.tensors) {
    if (name == kMetadataKey || !tensor.defined()) {
      fail(path, fmt::format("tensor \"{}\" {}", name,
                             tensor.defined() ? "has a name that is reserved" : "is undefined"));
    }
    dtype_name(path, name, tensor.scalar_type());
    items.push_back({&name, tensor.detach().to(at::kCPU).contiguous()});
  }
  // The widest elements first, as the Python library does: then each tensor is aligned to its
  // elements.
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
    return a.values.element_size() > b.values.element_size();
  });

  json header = json::object();
  if (!file.metadata.empty()) {
    header[std::string(kMetadataKey)] = file.metadata;
  }
  std::uint64_t offset = 0;
  for (const Item& item : items) {
    const std::uint64_t end = offset + item.values.nbytes();
    header[*item.name] = {{"dtype", dtype_name(path, *item.name, item.values.scalar_type())},
                          {"shape", std::vector<std::int64_t>(item.values.sizes().vec())},
                          {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const json::exception& error) {
    fail(path, fmt::format("a name or a metadata value is not UTF-8: {}", json_reason(error)));
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const std::uint64_t length = text.size();

  std::vector<std::string_view> parts = {{reinterpret_cast<const char*>(&length), sizeof(length)},
                                         text};
  for (const Item& item : items) {
    parts.push_back(bytes_of(item.values));
  }
  write_file(path, parts);
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
  write_safetensors(path, file);
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
                   {"steps_done", std::to_string(state.steps_done)}};
  write_safetensors(path, file);
}

TrainingState read_state(const fs::path& path) {
  SafetensorsFile file = read_safetensors(path);
  check_format(path, file, kStateFormat);
  TrainingState state;
  state.steps_done = metadata_count(path, file, "steps_done");
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
