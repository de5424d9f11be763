#include "sha256.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <system_error>
#include <vector>

#include "fsdp/errors.h"

namespace fsdp {
namespace {

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::array<std::uint32_t, 64> kRoundConstants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

std::uint32_t big_endian(const unsigned char* bytes) {
  return std::uint32_t{bytes[0]} << 24 | std::uint32_t{bytes[1]} << 16 |
         std::uint32_t{bytes[2]} << 8 | std::uint32_t{bytes[3]};
}

}  // namespace

void Sha256::add_block(const unsigned char* block) {
  std::array<std::uint32_t, 64> words{};
  for (std::size_t i = 0; i < 16; ++i) {
    words[i] = big_endian(block + 4 * i);
  }
  for (std::size_t i = 16; i < 64; ++i) {
    const auto before = words[i - 15];
    const auto last = words[i - 2];
    const auto mixed_before = std::rotr(before, 7) ^ std::rotr(before, 18) ^ (before >> 3);
    const auto mixed_last = std::rotr(last, 17) ^ std::rotr(last, 19) ^ (last >> 10);
    words[i] = words[i - 16] + mixed_before + words[i - 7] + mixed_last;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (std::size_t i = 0; i < 64; ++i) {
    const auto sum_e = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const auto choice = (e & f) ^ (~e & g);
    const auto first = h + sum_e + choice + kRoundConstants[i] + words[i];
    const auto sum_a = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const auto majority = (a & b) ^ (a & c) ^ (b & c);
    h = g;
    g = f;
    f = e;
    e = d + first;
    d = c;
    c = b;
    b = a;
    a = first + sum_a + majority;
  }
  const std::array<std::uint32_t, 8> after = {a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < after.size(); ++i) {
    state_[i] += after[i];
  }
}

void Sha256::add(std::string_view bytes) {
  bytes_ += bytes.size();
  const auto* data = reinterpret_cast<const unsigned char*>(bytes.data());
  std::size_t left = bytes.size();
  if (pending_bytes_ > 0) {
    const auto taken = std::min(left, kBlockBytes - pending_bytes_);
    std::memcpy(pending_.data() + pending_bytes_, data, taken);
    pending_bytes_ += taken;
    data += taken;
    left -= taken;
    if (pending_bytes_ < kBlockBytes) {
      return;
    }
    add_block(pending_.data());
    pending_bytes_ = 0;
  }
  for (; left >= kBlockBytes; data += kBlockBytes, left -= kBlockBytes) {
    add_block(data);
  }
  if (left > 0) {
    std::memcpy(pending_.data(), data, left);
    pending_bytes_ = left;
  }
}

std::string Sha256::hex() {
  const std::uint64_t bits = bytes_ * 8;
  std::string padding(1, '\x80');
  padding.resize(1 + (2 * kBlockBytes - 9 - pending_bytes_) % kBlockBytes, '\0');
  for (int shift = 56; shift >= 0; shift -= 8) {
    padding += static_cast<char>(bits >> shift);
  }
  add(padding);
  std::string digest;
  for (const auto word : state_) {
    digest += fmt::format("{:08x}", word);
  }
  return digest;
}

std::string sha256_of(std::string_view bytes) {
  Sha256 sha256;
  sha256.add(bytes);
  return sha256.hex();
}

std::string sha256_of_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  Sha256 sha256;
  std::vector<char> buffer(1 << 20);
  while (file) {
    file.read(buffer.data(), static_cast<std::streamsize>(buffer.size()));
    sha256.add({buffer.data(), static_cast<std::size_t>(file.gcount())});
  }
  if (!file.eof()) {
    throw FileError(fmt::format("{}: cannot be read: {}", path.string(),
                                std::generic_category().message(errno)));
  }
  return sha256.hex();
}

}  // namespace fsdp
