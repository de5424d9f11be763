#pragma once
// Where the ranks of an in_process group meet: it collects their calls, tells them when all have
// arrived or why that will not happen, and shares the work out among whoever waits.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "collective_failure.h"
#include "in_process_call.h"
#include "in_process_device.h"

namespace fsdp::in_process {

/// One collective call by all ranks, or one send and its receive.
///
/// The calls are collected under the rendezvous's mutex. Once all are there nothing of them changes
/// any more, and the portions of the work are claimed by counting up, without a lock.
class Exchange {
 public:
  enum class State { kCollecting, kReady, kDone, kFailed };

  /// `sequence` counts a group's collectives from 0. A pair of send and receive has none.
  Exchange(int callers, std::uint64_t sequence, bool is_transfer);

  State state() const { return state_.load(std::memory_order_acquire); }
  bool is_over() const { return state() >= State::kDone; }
  std::uint64_t sequence() const { return sequence_; }

 private:
  friend class Rendezvous;

  void add(int caller, Call call, EventPtr event);
  bool is_complete() const { return missing_ == 0; }
  std::vector<int> arrived() const;
  std::vector<int> missing_ranks() const;
  std::string mismatch() const;
  void set_state(State state) { state_.store(state, std::memory_order_release); }

  // Both return true to the one thread that did the last portion.
  bool do_all_unclaimed(int preferred);
  bool do_if_unclaimed(int portion);
  void carry_out(int portion);
  void carry_out_on_device(int portion);
  void note_first_error(std::exception_ptr error);

  const std::uint64_t sequence_;
  const bool is_transfer_;   // then caller 0 is the sender and caller 1 the receiver
  std::vector<Call> calls_;  // by caller, which in a collective is the rank
  std::vector<EventPtr> call_events_;
  std::vector<bool> has_arrived_;
  int missing_;

  const int portions_;
  std::vector<std::atomic<bool>> claimed_;
  std::atomic<int> next_unclaimed_ = 0;
  std::atomic<int> done_portions_ = 0;
  std::mutex results_mutex_;  // guards the two below
  std::vector<EventPtr> done_events_;
  std::exception_ptr first_error_;

  std::atomic<State> state_ = State::kCollecting;
  FailurePtr failure_;
  std::condition_variable changed_;
  int sleepers_ = 0;
};
using ExchangePtr = std::shared_ptr<Exchange>;

class Rendezvous {
 public:
  Rendezvous(int world_size, std::string name);

  /// The calling rank's next collective. Throws if the group is already known to be unable to do
  /// it.
  ExchangePtr post(Call call);

  /// A send or receive. It meets the oldest unmatched one of the other side with its tag.
  ExchangePtr post_transfer(Call call);

  /// Returns when the exchange is done, helping with its work; throws if it fails, and breaks the
  /// group if some rank has not arrived within `timeout`. `caller` is the caller's number in it.
  void wait(Exchange& exchange, int caller, std::chrono::milliseconds timeout);

  /// Does whatever work of the exchange can be done, without waiting for anybody.
  void help(Exchange& exchange, int caller);

  /// Breaks the group if the exchange has been waiting for a rank since `timeout`.
  void expire_if_due(Exchange& exchange, int caller,
                     std::chrono::steady_clock::time_point posted_at,
                     std::chrono::milliseconds timeout);

  /// Throws what `wait` would, if the exchange has failed.
  void throw_if_failed(const Exchange& exchange, int caller) const;

  /// This thread's current stream of `device` goes on only after the work of the exchange.
  void order_current_stream_after(Exchange& exchange, at::Device device) const;

  /// The rank will post nothing more.
  void leave(int rank, const std::string& reason);

  /// Fails everything for which not all have arrived, now and later.
  void abort(int rank);

  /// The meeting place of some of the ranks: the same one for all that ask with the same list, each
  /// for the n-th time. Who left this group has left that one too.
  std::shared_ptr<Rendezvous> split(const std::vector<int>& ranks, int rank);

  /// How many collectives this rank has posted.
  std::uint64_t posted(int rank) const;

 private:
  // From this collective on (and for transfers with this rank, or with any if it is kEveryRank) the
  // group is broken.
  struct Breach {
    std::uint64_t from_sequence;
    int rank;
    FailurePtr failure;
  };
  using Channel = std::tuple<int, int, int>;  // sender, receiver, tag

  void settle(Exchange& exchange);
  void finish(Exchange& exchange);
  void fail(Exchange& exchange, const FailurePtr& failure);
  void fail_collectives_from(std::uint64_t sequence, const FailurePtr& failure);
  void fail_transfers(int missing_rank, const FailurePtr& failure);
  void break_group(const FailurePtr& failure);
  void expire(Exchange& exchange, int caller, std::chrono::milliseconds timeout);
  FailurePtr failure_of_collective(std::uint64_t sequence) const;
  FailurePtr failure_of_transfer(int rank, int peer) const;
  ExchangePtr take_counterpart(const Channel& channel, int caller);
  std::string where(const Call& call, std::uint64_t sequence) const {
    return in_process::where(call, sequence, name_);
  }

  const int world_size_;
  const std::string name_;
  mutable std::mutex mutex_;
  std::vector<std::uint64_t> posted_;  // collectives by rank
  std::deque<ExchangePtr> open_;       // collectives for which not all have arrived
  std::uint64_t first_open_ = 0;       // the sequence number of open_[0]
  std::map<Channel, std::deque<ExchangePtr>> open_transfers_;
  std::vector<Breach> breaches_;  // in the order of their happening

  struct Part {
    std::vector<int> ranks;
    std::vector<bool> has_asked;  // by place in `ranks`
    std::weak_ptr<Rendezvous> rendezvous;
    std::shared_ptr<Rendezvous> kept;  // until all have asked
  };
  std::vector<Part> parts_;
};

}  // namespace fsdp::in_process
