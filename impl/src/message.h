#pragma once
// The messages by which the ranks of a process group tell each other what they call, and when they
// can go on no longer.

#include <cstdint>
#include <variant>

#include "collective_failure.h"
#include "in_process_call.h"
#include "transport.h"

namespace fsdp::processes {

/// A rank's call. The tensors stay where they are; small ones travel along as the payload.
struct CallMessage {
  std::uint64_t group = 0;
  std::uint64_t number = 0;  // of the collective, or of the transfer between the two
  in_process::Call call;
  Bytes payload;
};

/// From the collective `from_sequence` on, and for sends and receives with `rank`, the group does
/// not work any more.
struct BreachMessage {
  std::uint64_t group = 0;
  std::uint64_t from_sequence = 0;
  int rank = 0;  // who left, or kEveryRank
  in_process::Failure::Kind kind = in_process::Failure::Kind::kPeerLeft;
  std::string text;
};

inline constexpr int kEveryRank = -1;

/// Asks, when a collective whose calls are all there does not come to its end, for whom the
/// receiver waits in it; or answers. So a rank that waits for another itself is not taken for the
/// culprit.
struct StuckMessage {
  std::uint64_t group = 0;
  std::uint64_t number = 0;
  int rank = 0;  // who asks or answers
  bool is_answer = false;
  std::vector<int> awaited;
};

using Message = std::variant<CallMessage, BreachMessage, StuckMessage>;

Bytes encode(const CallMessage& message);
Bytes encode(const BreachMessage& message);
Bytes encode(const StuckMessage& message);

/// `sender` is the rank of the world that the message came from.
Message decode(const Bytes& bytes, int sender);

/// The number of the group that messages are about.
std::uint64_t group_of(const Message& message);

}  // namespace fsdp::processes
