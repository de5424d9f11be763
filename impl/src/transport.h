#pragma once
// What the process groups of processes need of whatever carries their bytes: messages between two
// ranks, in order, and stretches of memory that are sent and filled without a copy where that is
// possible. Nothing here waits; whoever uses it calls `progress` again and again.

#include <c10/core/ScalarType.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

namespace fsdp::processes {

using Bytes = std::vector<std::uint8_t>;
using BytesPtr = std::shared_ptr<const Bytes>;

/// Tells apart what two ranks send each other at the same time. Within a lane the order counts.
struct Lane {
  std::uint64_t group = 0;
  std::uint64_t number = 0;  // of the collective, or of the transfer between the two
  std::uint32_t phase = 0;

  auto operator<=>(const Lane&) const = default;
};

/// Memory that is sent or filled. `owner` keeps it alive for as long as the transport may touch it.
struct Stretch {
  char* data = nullptr;
  std::size_t size = 0;
  std::shared_ptr<const void> owner;
};

/// A stretch on its way.
class Request {
 public:
  bool is_done() const { return done_; }
  void finish() { done_ = true; }

 private:
  bool done_ = false;
};
using RequestPtr = std::shared_ptr<Request>;

/// A sum (or minimum, ...) that the transport itself works out, in an order of its own.
struct NativeReduction {
  enum class Kind { kAllReduce, kReduceScatter, kReduce };
  Kind kind = Kind::kAllReduce;
  c10d::ReduceOp::RedOpType reduction = c10d::ReduceOp::SUM;  // a mean is asked for as a sum
  c10::ScalarType dtype = c10::kFloat;
  int root = 0;
  std::int64_t numel = 0;  // of the result
  Stretch from;            // of all ranks' results in a reduce-scatter
  Stretch to;              // on a rank that has no result, nothing
};

/// All functions but `name`, `reduces_natively`, `why_not_native` and `prepare` are called by one
/// thread. They throw an fsdp::Error if the transport is
/// broken for good; it is then only destroyed.
class Transport {
 public:
  class Receiver {
   public:
    virtual ~Receiver() = default;
    virtual void on_message(int peer, Bytes message) = 0;
  };

  Transport() = default;
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  /// "store", "mpi".
  virtual std::string name() const = 0;
  /// The messages from one rank to another arrive in the order in which they were posted.
  virtual void post(int peer, BytesPtr message) = 0;
  /// The k-th stretch of a lane meets the k-th of the other side, which has the same size.
  virtual RequestPtr send(int peer, Lane lane, Stretch from) = 0;
  virtual RequestPtr receive(int peer, Lane lane, Stretch to) = 0;
  /// Nobody will ask for this request any more. The owner of its memory is let go as soon as the
  /// transport can do without it.
  virtual void cancel(const RequestPtr& request) = 0;
  /// Moves things on, and hands over what has arrived. Returns whether anything happened.
  virtual bool progress(Receiver& receiver) = 0;
  /// Whether all that was posted and sent is out of this process's hands.
  virtual bool is_flushed() const = 0;
  /// Whether reductions are to be the transport's own.
  virtual bool reduces_natively() const { return false; }
  /// Why it cannot do this one; nothing if it can.
  virtual std::string why_not_native(c10d::ReduceOp::RedOpType, c10::ScalarType,
                                     std::int64_t /*numel*/) const {
    return {};
  }
  /// All ranks in `members` call this, for a group that will reduce natively.
  virtual void prepare(std::uint64_t /*group*/, const std::vector<int>& /*members*/) {}
  virtual RequestPtr reduce(std::uint64_t /*group*/, NativeReduction) { return nullptr; }
  /// Called once at the end, if the transport is not broken: nobody expects anything of this rank.
  /// If a group has failed, other ranks may not come so far.
  virtual void close(bool /*has_failed*/) {}
};

}  // namespace fsdp::processes
