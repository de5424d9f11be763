#pragma once
// Backends from shared libraries: a vendor's own, and the project's MPI ones. The library has one C
// function, and needs nothing of this project but this header.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace fsdp {

/// Goes up when BackendRequest changes.
inline constexpr std::uint32_t kBackendLibraryVersion = 1;

/// What the library is told. Everything in it lives until the function returns.
struct BackendRequest {
  std::uint32_t version = kBackendLibraryVersion;
  std::uint32_t size = sizeof(BackendRequest);
  std::int32_t rank = 0;
  std::int32_t world_size = 1;
  std::int32_t local_rank = 0;  // which of this node's devices is this rank's
  std::int64_t timeout_ms = 0;  // how long a rank waits in one collective for the others
  /// Shared by the ranks, for the library to exchange addresses in; keys are its own (prefixed).
  /// Null where the launcher brings its own way to meet (MPI).
  c10d::Store* store = nullptr;
};

/// Loads the library and lets it make a backend. For programs; a library does not need it.
///
/// Throws UsageError that names the rank and the file: it is not there, is no library or lacks
/// something it needs, has no fsdp_make_backend, returned null (with what it wrote), let an
/// exception through, or made a backend of another rank or world size than asked for.
c10::intrusive_ptr<c10d::Backend> load_backend_library(const std::filesystem::path& library,
                                                       const BackendRequest& request);

}  // namespace fsdp

extern "C" {

/// The name to look for: "fsdp_make_backend".
///
/// Returns a backend with one reference that the caller takes over (c10::intrusive_ptr::release()),
/// or null after writing at most `error_size` bytes of why not, with a final 0, to `error`. Called
/// once per process and group; the library is never unloaded. It must have been built against the
/// libtorch that the program runs with.
c10d::Backend* fsdp_make_backend(const fsdp::BackendRequest* request, char* error,
                                 std::size_t error_size);
using FsdpMakeBackend = decltype(&fsdp_make_backend);
}
