#include "collective_failure.h"

#include <fmt/format.h>

#include <utility>

#include "fsdp/errors.h"

namespace fsdp::in_process {

void Failure::raise(const std::string& where) const {
  const auto text = fmt::format("{}: {}", where, message);
  switch (kind) {
    case Kind::kMismatch:
      throw MismatchError(text);
    case Kind::kTimeout:
      throw TimeoutError(text);
    case Kind::kPeerLeft:
      throw PeerError(text);
    case Kind::kWorkFailed:
      break;
  }
  if (cause == nullptr) {
    throw Error(text);
  }
  std::rethrow_exception(cause);
}

FailurePtr make_failure(Failure::Kind kind, std::string message) {
  return std::make_shared<const Failure>(Failure{kind, std::move(message), nullptr});
}

FailurePtr mismatch_failure(const std::string& mismatch) {
  return make_failure(
      Failure::Kind::kMismatch,
      fmt::format("the ranks' calls do not match: {}. Every rank must call the same collectives in "
                  "the same order, with the same sizes, dtypes, reduction and root.",
                  mismatch));
}

FailurePtr timeout_failure(const Call& call, std::uint64_t sequence,
                           const std::vector<int>& missing, std::chrono::milliseconds timeout,
                           const std::string& mismatch, const char* omission) {
  const auto number = call.is_transfer() ? std::string() : fmt::format(", number {},", sequence);
  return make_failure(
      Failure::Kind::kTimeout,
      fmt::format(
          "{}{} timed out: {} {} within {} ms.{} Find out what keeps {}, or "
          "raise the timeout.",
          describe(call), number, describe_ranks(missing), omission, timeout.count(),
          mismatch.empty() ? "" : fmt::format(" Those that did do not agree: {}.", mismatch),
          missing.size() == 1 ? "it" : "them"));
}

FailurePtr left_failure(int rank, const std::string& reason) {
  return make_failure(Failure::Kind::kPeerLeft,
                      fmt::format("rank {} left the group: {}", rank, reason));
}

FailurePtr abort_failure(int rank) {
  return make_failure(Failure::Kind::kPeerLeft, fmt::format("rank {} aborted the group", rank));
}

std::string where(const Call& call, std::uint64_t sequence, const std::string& group) {
  return fmt::format("rank {}: {}{} of group \"{}\"", call.rank, describe(call),
                     call.is_transfer() ? std::string() : fmt::format(", number {}", sequence),
                     group);
}

}  // namespace fsdp::in_process
