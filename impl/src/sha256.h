#pragma once
// SHA-256 (FIPS 180-4), the checksum that `sha256sum` prints.

#include <array>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace fsdp {

class Sha256 {
 public:
  void add(std::string_view bytes);
  /// The digest of everything added, in hexadecimal. Nothing can be added after.
  std::string hex();

 private:
  static constexpr std::size_t kBlockBytes = 64;
  void add_block(const unsigned char* block);

  std::array<std::uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<unsigned char, kBlockBytes> pending_{};
  std::size_t pending_bytes_ = 0;
  std::uint64_t bytes_ = 0;
};

std::string sha256_of(std::string_view bytes);
/// Reads the file in pieces. Throws FileError.
std::string sha256_of_file(const std::filesystem::path& path);

}  // namespace fsdp
