// The connection to the store: name, port, listener, each with an error of its own.

#include <fcntl.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "fsdp/errors.h"
#include "rendezvous.h"

namespace fsdp {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kRetryDelay{100};
/// A host that swallows packets is tried again after this.
constexpr milliseconds kConnectPatience{5000};

struct Address {
  std::string host;
  int port = 0;
  std::string text() const { return fmt::format("MASTER_ADDR={} MASTER_PORT={}", host, port); }
};

milliseconds until(Clock::time_point deadline) {
  return std::max(milliseconds(1),
                  std::chrono::duration_cast<milliseconds>(deadline - Clock::now()));
}

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

struct Resolved {
  int error = EAI_AGAIN;
  AddressList list{nullptr, freeaddrinfo};
};

/// Name services have timeouts of their own, which may be longer.
Resolved resolve(BoundedThread& thread, const Address& address, Clock::time_point deadline) {
  const auto found = std::make_shared<Resolved>();
  const auto look_up = [found, address] {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* list = nullptr;
    found->error =
        getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &list);
    if (found->error == 0) {
      found->list.reset(list);
    }
  };
  if (!thread.run(look_up, until(deadline))) {
    return {};
  }
  return std::move(*found);
}

/// A socket, closed at the end of the scope.
class Socket {
 public:
  explicit Socket(int file) : file_(file) {}
  Socket(Socket&& other) noexcept : file_(std::exchange(other.file_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(file_, other.file_);
    return *this;
  }
  ~Socket() {
    if (file_ >= 0) {
      ::close(file_);
    }
  }
  int file() const { return file_; }

 private:
  int file_;
};

struct Try {
  Socket connection;
  int error = 0;  // errno; 0 if it is connected
};

Try try_to_connect(const addrinfo& address, milliseconds patience) {
  Socket connection(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (connection.file() < 0) {
    return {std::move(connection), errno};
  }
  int error = ::connect(connection.file(), address.ai_addr, address.ai_addrlen) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    pollfd entry{connection.file(), POLLOUT, 0};
    if (::poll(&entry, 1, static_cast<int>(patience.count())) <= 0) {
      error = ETIMEDOUT;
    } else {
      socklen_t size = sizeof error;
      ::getsockopt(connection.file(), SOL_SOCKET, SO_ERROR, &error, &size);
    }
  }
  return {std::move(connection), error};
}

/// Returns once somebody listens, with a connection to keep until the store has its own: a
/// connection that ends before TCPStore's server has accepted it can hold that server up for 5 s
/// (seen with libtorch 2.11: it asks the name service for a peer it cannot name). TCPStore's own
/// tries would print a page each.
Socket wait_for_listener(const Address& address, int rank, Clock::time_point deadline,
                         milliseconds timeout) {
  BoundedThread thread;
  int seen = 0;          // errno
  int lookup_error = 0;  // getaddrinfo's
  do {
    const auto found = resolve(thread, address, deadline);
    lookup_error = found.error;
    for (const auto* at = found.list.get(); at != nullptr; at = at->ai_next) {
      auto tried = try_to_connect(*at, std::min(until(deadline), kConnectPatience));
      if (tried.error == 0) {
        return std::move(tried.connection);
      }
      seen = tried.error;
    }
    std::this_thread::sleep_for(std::min(kRetryDelay, until(deadline)));
  } while (Clock::now() < deadline);
  if (lookup_error != 0) {
    throw UsageError(fmt::format(
        "rank {}: MASTER_ADDR is '{}', which no name service knew for {} ms ({}); wanted: the host "
        "name or address of rank 0's node; correct it, or add the host to /etc/hosts or DNS",
        rank, address.host, timeout.count(), gai_strerror(lookup_error)));
  }
  throw TimeoutError(
      fmt::format("rank {}: nobody listened at {} within {} ms (last try: {}); wanted: rank 0 or "
                  "torchrun's agent there; see whether rank 0 was started and did not end, that "
                  "all ranks have the same address and port, and that no firewall is between",
                  rank, address.text(), timeout.count(), std::strerror(seen)));
}

/// A port that another process listens at, on any of this host's addresses.
[[noreturn]] void refuse_port(const Address& address, const std::string& reason) {
  throw UsageError(fmt::format(
      "rank 0: cannot listen at {}: {}; wanted: a free port on rank 0's node; choose another "
      "MASTER_PORT on all ranks, or end the program that has it (another job, or a second process "
      "with RANK=0)",
      address.text(), reason));
}

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

/// TCPStore's constructor, with an end to its patience.
StorePtr open_store(const Address& address, bool serve, int rank, milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(address.port);
  options.isServer = serve;
  options.waitWorkers = false;
  options.timeout = timeout;
  const auto opened = std::make_shared<StorePtr>();
  const auto open = [opened, host = address.host, options] {
    *opened = c10::make_intrusive<c10d::TCPStore>(host, options);
  };
  BoundedThread thread;
  std::string reason = "it does not answer";
  try {
    if (thread.run(open, timeout)) {
      return make_bounded_store(*opened);
    }
  } catch (const c10::Error& error) {
    reason = first_line(error.what_without_backtrace());
    if (reason.find("EADDRINUSE") != std::string::npos) {
      refuse_port(address, "another process listens there");
    }
    if (serve && reason.find("failed to listen") != std::string::npos) {
      refuse_port(address, reason);
    }
  }
  throw TimeoutError(fmt::format(
      "rank {}: what listens at {} is no store that this program can use ({}); wanted: rank 0 or "
      "torchrun's agent; choose a port that no other program has, and see that rank 0's process is "
      "not stopped",
      rank, address.text(), reason));
}

}  // namespace

StorePtr connect_store(const LaunchEnvironment& environment, milliseconds timeout) {
  const auto& place = environment.placement;
  const Address address{place.master_addr, place.master_port};
  if (address.host.empty() || address.port == 0) {
    throw UsageError(fmt::format(
        "rank {}: {}{}{} not set, and {} does not tell where the ranks meet; wanted: the address "
        "of "
        "rank 0's node and a free port on it, the same on all ranks; pass them along (mpirun -x "
        "NAME=VALUE for Open MPI, -genv NAME VALUE for MPICH)",
        place.rank, address.host.empty() ? "MASTER_ADDR" : "",
        address.host.empty() && address.port == 0 ? " and " : "",
        address.port == 0 ? "MASTER_PORT" : "", place.launcher));
  }
  const auto deadline = Clock::now() + timeout;
  const bool serve = place.rank == 0 && !environment.agent_store;
  Socket listener_is_there(-1);
  if (!serve) {
    listener_is_there = wait_for_listener(address, place.rank, deadline, timeout);
  }
  const auto store = open_store(address, serve, place.rank, until(deadline));
  store->setTimeout(timeout);
  return store;
}

}  // namespace fsdp
