#include "fsdp/safetensors.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <system_error>
#include <tuple>
#include <utility>

#include "fsdp/errors.h"
#include "fsdp/strict_json.h"
#include "sha256.h"

namespace fsdp {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

static_assert(
    std::endian::native == std::endian::little,
    "safetensors files are little-endian, and are read and written as they lie in memory");

constexpr std::string_view kMetadataKey = "__metadata__";
constexpr std::int64_t kLengthBytes = 8;
// The limit that the safetensors library itself sets, so that a corrupt length cannot ask for the
// machine's memory (https://github.com/huggingface/safetensors, "Format").
constexpr std::int64_t kMaxHeaderBytes = 100'000'000;

[[noreturn]] void fail(const fs::path& path, const std::string& what) {
  throw FileError(fmt::format("{}: {}", path.string(), what));
}

std::string errno_text() {
  return std::generic_category().message(errno);
}

struct DtypeName {
  std::string_view name;
  at::ScalarType dtype;
};
constexpr std::array kDtypes = {
    DtypeName{"F64", at::kDouble},    DtypeName{"F32", at::kFloat}, DtypeName{"F16", at::kHalf},
    DtypeName{"BF16", at::kBFloat16}, DtypeName{"I64", at::kLong},  DtypeName{"I32", at::kInt},
    DtypeName{"I16", at::kShort},     DtypeName{"I8", at::kChar},   DtypeName{"U8", at::kByte},
    DtypeName{"BOOL", at::kBool},
};

SafetensorsEntry parse_entry(const JsonField& field) {
  SafetensorsEntry entry;
  const JsonField dtype = field.at("dtype");
  const auto known = dtype_from_safetensors(dtype.text());
  if (!known) {
    dtype.wrong("a dtype of F64 F32 F16 BF16 I64 I32 I16 I8 U8 BOOL");
  }
  entry.dtype = *known;
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
    field.fail("the shape overflows");
  }
  if (bytes != entry.end - entry.begin) {
    field.fail(fmt::format("shape and dtype need {} bytes, data_offsets span {}", bytes,
                           entry.end - entry.begin));
  }
  return entry;
}

/// Requires that the tensors' bytes lie end to end from 0 to the end of the file.
void check_tiling(const fs::path& path, const std::map<std::string, SafetensorsEntry>& entries,
                  std::int64_t data_bytes) {
  std::vector<std::tuple<std::int64_t, std::int64_t, const std::string*>> spans;
  for (const auto& [name, entry] : entries) {
    spans.emplace_back(entry.begin, entry.end, &name);
  }
  std::sort(spans.begin(), spans.end());
  std::int64_t covered = 0;
  for (const auto& [begin, end, name] : spans) {
    if (begin != covered) {
      fail(path, fmt::format("header: tensor \"{}\" begins at byte {} of the data, {} at byte {}",
                             *name, begin,
                             begin < covered ? "inside the one before, which ends"
                                             : "leaving a gap after the one before, which ends",
                             covered));
    }
    covered = end;
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

void check_bools(const fs::path& path, const std::string& name, const at::Tensor& tensor,
                 std::int64_t first) {
  const auto* bytes = static_cast<const std::uint8_t*>(tensor.const_data_ptr());
  const auto* end = bytes + tensor.numel();
  const auto* wrong = std::find_if(bytes, end, [](std::uint8_t byte) { return byte > 1; });
  if (wrong != end) {
    fail(path, fmt::format("data of tensor \"{}\": byte {} is {}, a BOOL is 0 or 1", name,
                           first + (wrong - bytes), *wrong));
  }
}

std::string_view bytes_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

/// What went wrong, or "".
std::string write_all(int file, std::string_view bytes) {
  while (!bytes.empty()) {
    const ::ssize_t written = ::write(file, bytes.data(), bytes.size());
    if (written >= 0) {
      bytes.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno != EINTR) {
      return errno_text();
    }
  }
  return "";
}

}  // namespace

std::string_view safetensors_dtype(at::ScalarType dtype) {
  for (const DtypeName& known : kDtypes) {
    if (dtype == known.dtype) {
      return known.name;
    }
  }
  return "";
}

std::optional<at::ScalarType> dtype_from_safetensors(std::string_view name) {
  for (const DtypeName& known : kDtypes) {
    if (name == known.name) {
      return known.dtype;
    }
  }
  return std::nullopt;
}

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

SafetensorsReader::SafetensorsReader(fs::path path) : path_(std::move(path)) {
  std::error_code error;
  if (!fs::is_regular_file(path_, error)) {
    fail(path_, error ? error.message() : "is not a file");
  }
  bytes_ = static_cast<std::int64_t>(fs::file_size(path_, error));
  file_ = error ? -1 : ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (file_ < 0) {
    fail(path_, "cannot be opened for reading: " + (error ? error.message() : errno_text()));
  }
  try {
    read_header();
  } catch (...) {
    ::close(file_);
    throw;
  }
}

SafetensorsReader::~SafetensorsReader() {
  ::close(file_);
}

void SafetensorsReader::read_bytes(void* data, std::int64_t bytes, std::int64_t offset,
                                   const std::string& what) const {
  std::int64_t done = 0;
  while (done < bytes) {
    const ::ssize_t got = ::pread(file_, static_cast<char*>(data) + done,
                                  static_cast<std::size_t>(bytes - done), offset + done);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got <= 0) {
      fail(path_, fmt::format("{}: {} of {} bytes could be read{}", what, done, bytes,
                              got < 0 ? ": " + errno_text() : ""));
    }
    done += got;
  }
}

void SafetensorsReader::read_header() {
  if (bytes_ < kLengthBytes) {
    fail(path_, fmt::format("truncated: {} bytes, where a safetensors file begins with {} that "
                            "hold the length of its header",
                            bytes_, kLengthBytes));
  }
  std::uint64_t length = 0;
  read_bytes(&length, kLengthBytes, 0, "header length");
  if (length > static_cast<std::uint64_t>(kMaxHeaderBytes)) {
    fail(path_, fmt::format("the first 8 bytes say that the header has {} bytes, more than the {} "
                            "allowed: this is not a safetensors file",
                            length, kMaxHeaderBytes));
  }
  const auto header_bytes = static_cast<std::int64_t>(length);
  data_offset_ = kLengthBytes + header_bytes;
  if (data_offset_ > bytes_) {
    fail(path_, fmt::format("truncated: the header should have {} bytes, the file has {} after its "
                            "length",
                            header_bytes, bytes_ - kLengthBytes));
  }
  std::string text(length, '\0');
  read_bytes(text.data(), header_bytes, kLengthBytes, "header");
  if (text.empty() || text.front() != '{') {
    fail(path_, "header: does not begin with '{': this is not a safetensors file");
  }
  const json header = parse_json(path_, "header", text);
  for (const auto& [name, value] : header.items()) {
    const JsonField field(path_, fmt::format("header: \"{}\"", name), value);
    if (name == kMetadataKey) {
      for (const auto& [key, member] : field.members()) {
        metadata_[key] = member.text();
      }
    } else {
      entries_[name] = parse_entry(field);
    }
  }
  check_tiling(path_, entries_, bytes_ - data_offset_);
}

const SafetensorsEntry& SafetensorsReader::entry(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) {
    fail(path_, fmt::format("the file has no tensor \"{}\"", name));
  }
  return found->second;
}

at::Tensor SafetensorsReader::read(const std::string& name) const {
  const auto& wanted = entry(name);
  return read(name, 0, checked_numel(wanted.shape)).view(wanted.shape);
}

at::Tensor SafetensorsReader::read(const std::string& name, std::int64_t begin,
                                   std::int64_t numel) const {
  const auto& wanted = entry(name);
  const std::int64_t whole = checked_numel(wanted.shape);
  if (begin < 0 || numel < 0 || begin > whole || numel > whole - begin) {
    fail(path_, fmt::format("tensor \"{}\" has {} elements; {} from element {} on were asked for",
                            name, whole, numel, begin));
  }
  const auto element = static_cast<std::int64_t>(c10::elementSize(wanted.dtype));
  at::Tensor tensor = at::empty({numel}, at::TensorOptions(wanted.dtype));
  read_bytes(tensor.mutable_data_ptr(), numel * element,
             data_offset_ + wanted.begin + begin * element,
             fmt::format("data of tensor \"{}\"", name));
  if (wanted.dtype == at::kBool) {
    check_bools(path_, name, tensor, begin);
  }
  return tensor;
}

SafetensorsFile read_safetensors(const fs::path& path) {
  const SafetensorsReader reader(path);
  SafetensorsFile result;
  result.metadata = reader.metadata();
  for (const auto& [name, entry] : reader.entries()) {
    result.tensors[name] = reader.read(name);
  }
  return result;
}

void write_file(const fs::path& path, const std::vector<std::string_view>& parts,
                const WriteOptions& options) {
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
  Sha256 sha256;
  for (std::size_t i = 0; i < parts.size() && problem.empty(); ++i) {
    problem = write_all(file, parts[i]);
    if (options.sha256 != nullptr) {
      sha256.add(parts[i]);
    }
  }
  if (options.sync && problem.empty() && ::fsync(file) != 0) {
    problem = errno_text();
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
  if (options.sha256 != nullptr) {
    *options.sha256 = sha256.hex();
  }
}

void write_safetensors(const fs::path& path, const SafetensorsFile& file,
                       const WriteOptions& options) {
  struct Item {
    const std::string* name;
    std::string_view dtype;
    at::Tensor values;
  };
  std::vector<Item> items;
  for (const auto& [name, tensor] : file.tensors) {
    if (name == kMetadataKey || !tensor.defined()) {
      fail(path, fmt::format("tensor \"{}\" {}", name,
                             tensor.defined() ? "has a name that is reserved" : "is undefined"));
    }
    const auto dtype = safetensors_dtype(tensor.scalar_type());
    if (dtype.empty()) {
      fail(path, fmt::format("tensor \"{}\" has dtype {}, which this format does not hold", name,
                             c10::toString(tensor.scalar_type())));
    }
    items.push_back({&name, dtype, tensor.detach().to(at::kCPU).contiguous()});
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
    header[*item.name] = {{"dtype", item.dtype},
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
  write_file(path, parts, options);
}

}  // namespace fsdp
