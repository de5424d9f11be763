#pragma once
// Why collectives could not complete, in the words that every rank is told.

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "in_process_call.h"

namespace fsdp::in_process {

/// It is told to every rank that made or makes one of the calls.
struct Failure {
  enum class Kind { kMismatch, kTimeout, kPeerLeft, kWorkFailed };
  Kind kind;
  std::string message;
  std::exception_ptr cause;  // what kWorkFailed rethrows

  /// Throws the exception of this kind; `where` says who called what.
  [[noreturn]] void raise(const std::string& where) const;
};
using FailurePtr = std::shared_ptr<const Failure>;

FailurePtr make_failure(Failure::Kind kind, std::string message);

/// `mismatch` is what `find_mismatch` said.
FailurePtr mismatch_failure(const std::string& mismatch);

/// `call` waited for `missing` in vain. `mismatch` says how those that did come differ, or nothing.
FailurePtr timeout_failure(const Call& call, std::uint64_t sequence,
                           const std::vector<int>& missing, std::chrono::milliseconds timeout,
                           const std::string& mismatch, const char* omission = "did not arrive");

FailurePtr left_failure(int rank, const std::string& reason);
FailurePtr abort_failure(int rank);

/// Who called what in which group. Sends and receives have no sequence number.
std::string where(const Call& call, std::uint64_t sequence, const std::string& group);

}  // namespace fsdp::in_process
