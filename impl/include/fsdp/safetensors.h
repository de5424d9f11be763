#pragma once
// Files in the safetensors format (https://github.com/huggingface/safetensors, "Format"): an 8-byte
// length, a JSON header, the tensors' bytes end to end. Python reads and writes them with the
// safetensors package. Reading trusts nothing: every length and offset is checked against the file
// before it is used.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp {

struct SafetensorsFile {
  std::map<std::string, at::Tensor> tensors;
  std::map<std::string, std::string> metadata;
};

/// Reads the whole file onto the CPU. FileError if it is damaged.
SafetensorsFile read_safetensors(const std::filesystem::path& path);

struct SafetensorsEntry {
  at::ScalarType dtype{};
  std::vector<std::int64_t> shape;
  std::int64_t begin = 0;  // bytes within the data, which follow the header
  std::int64_t end = 0;
};

/// Reads single tensors, or ranges of them, of a file that is kept open. The constructor reads and
/// checks the header only. Throws FileError.
class SafetensorsReader {
 public:
  explicit SafetensorsReader(std::filesystem::path path);
  ~SafetensorsReader();
  SafetensorsReader(const SafetensorsReader&) = delete;
  SafetensorsReader& operator=(const SafetensorsReader&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::int64_t bytes() const { return bytes_; }
  const std::map<std::string, SafetensorsEntry>& entries() const { return entries_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  /// The whole tensor, in its shape, on the CPU.
  at::Tensor read(const std::string& name) const;
  /// [numel]: the elements from `begin` on of the flattened tensor.
  at::Tensor read(const std::string& name, std::int64_t begin, std::int64_t numel) const;

 private:
  void read_header();
  void read_bytes(void* data, std::int64_t bytes, std::int64_t offset,
                  const std::string& what) const;
  const SafetensorsEntry& entry(const std::string& name) const;

  std::filesystem::path path_;
  int file_ = -1;
  std::int64_t bytes_ = 0;
  std::int64_t data_offset_ = 0;
  std::map<std::string, SafetensorsEntry> entries_;
  std::map<std::string, std::string> metadata_;
};

struct WriteOptions {
  /// Waits until the file is on the disk, so that it survives a power cut.
  bool sync = true;
  /// Where to put the SHA-256 of the file, in hexadecimal; null: it is not computed.
  std::string* sha256 = nullptr;
};

/// Writes beside and renames, so that a reader never sees half a file; on failure (disk full)
/// nothing is left behind, what `path` named before is untouched, and a FileError is thrown.
/// Tensors: any device and strides; dtypes F64 F32 F16 BF16 I64 I32 I16 I8 U8 BOOL.
void write_safetensors(const std::filesystem::path& path, const SafetensorsFile& file,
                       const WriteOptions& options = {});

/// Writes the parts one after another, in the same way.
void write_file(const std::filesystem::path& path, const std::vector<std::string_view>& parts,
                const WriteOptions& options = {});

/// What the format calls a dtype ("BF16"); "" if it has no name for it.
std::string_view safetensors_dtype(at::ScalarType dtype);
std::optional<at::ScalarType> dtype_from_safetensors(std::string_view name);

/// The product of the sizes; -1 if it, or a stride of a tensor of these sizes, overflows.
std::int64_t checked_numel(const std::vector<std::int64_t>& sizes);

}  // namespace fsdp
