// The shared library that makes process groups over one implementation of MPI, by the function that
// fsdp/backend_library.h describes.

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>

#include "fsdp/backend_library.h"
#include "fsdp/errors.h"
#include "mpi_transport.h"
#include "process_backend.h"

namespace {

using std::chrono::milliseconds;

// How long the process's exit may take after a failure: a quarter of the timeout, and at most this.
constexpr milliseconds kLongestPatience = std::chrono::seconds(10);

void check_request(const fsdp::BackendRequest& request) {
  if (request.version != fsdp::kBackendLibraryVersion ||
      request.size < sizeof(fsdp::BackendRequest)) {
    throw fsdp::UsageError(fmt::format(
        "the request has version {} and {} bytes; wanted version {} and {} bytes. Build the "
        "program "
        "and this library from the same sources",
        request.version, request.size, fsdp::kBackendLibraryVersion, sizeof(fsdp::BackendRequest)));
  }
  if (request.timeout_ms <= 0) {
    throw fsdp::UsageError(fmt::format("rank {}: a timeout of {} ms; wanted more than 0",
                                       request.rank, request.timeout_ms));
  }
}

c10d::Backend* make_backend(const fsdp::BackendRequest& request) {
  check_request(request);
  const milliseconds timeout(request.timeout_ms);
  const auto& world = fsdp::processes::MpiWorld::get();
  if (request.rank != world.rank() || request.world_size != world.size()) {
    throw fsdp::UsageError(fmt::format(
        "rank {} of {} was asked for, but to MPI this process is rank {} of {}; was it started by "
        "the mpirun of this MPI, and are RANK and WORLD_SIZE left to it?",
        request.rank, request.world_size, world.rank(), world.size()));
  }
  return fsdp::make_process_backend(std::make_unique<fsdp::processes::MpiTransport>(
                                        std::min(timeout / 4, kLongestPatience)),
                                    request.rank, request.world_size, timeout, "world")
      .release();
}

}  // namespace

extern "C" c10d::Backend* fsdp_make_backend(const fsdp::BackendRequest* request, char* error,
                                            std::size_t error_size) {
  const auto say = [&](const char* problem) {
    if (error_size > 0) {
      std::snprintf(error, error_size, "%s", problem);
    }
    return nullptr;
  };
  try {
    return make_backend(*request);
  } catch (const c10::Error& problem) {
    return say(problem.what_without_backtrace());
  } catch (const std::exception& problem) {
    return say(problem.what());
  } catch (...) {
    return say("an exception that is not a std::exception");
  }
}
