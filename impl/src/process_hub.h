#pragma once
// Where the calls of one process's rank meet those of the ranks in other processes. Each rank tells
// the others what it calls; when all have called, and their calls match, they exchange the data and
// each works out its own result. A thread of the hub's own does this, so that nothing stalls while
// the program computes.
//
// The rules are those of the in_process group (in_process_rendezvous.h): what matches, what is told
// to whom when a rank is missing, leaves, or calls something else.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "collective_failure.h"
#include "in_process_call.h"
#include "message.h"
#include "process_plan.h"
#include "process_staging.h"
#include "transport.h"

namespace fsdp::processes {

class Hub;
struct Group;
using GroupPtr = std::shared_ptr<Group>;

/// One collective, or one send and its receive, as this rank sees it.
class Exchange {
 public:
  enum class State { kCollecting, kMoving, kDone, kFailed };

  State state() const { return state_.load(std::memory_order_acquire); }
  bool is_over() const { return state() >= State::kDone; }
  /// Counts a group's collectives from 0.
  std::uint64_t sequence() const { return is_transfer_ ? 0 : number_; }
  const std::vector<in_process::EventPtr>& done_events() const { return done_events_; }

 private:
  friend class Hub;

  Exchange(GroupPtr group, int callers, std::uint64_t number, bool is_transfer)
      : group_(std::move(group)),
        number_(number),
        is_transfer_(is_transfer),
        calls_(callers),
        has_arrived_(callers),
        is_posted_(callers),
        missing_(callers),
        payloads_(callers),
        staging_(callers) {}

  std::vector<int> arrived() const;
  std::vector<int> missing_ranks() const;
  std::string mismatch() const;
  int caller_of(int rank) const;
  bool is_announced() const;

  const GroupPtr group_;
  std::uint64_t number_;
  const bool is_transfer_;  // then caller 0 is the sender and caller 1 the receiver

  // Guarded by the hub's mutex until all have arrived; after that only the hub's thread changes it.
  std::vector<in_process::Call> calls_;  // by caller, which in a collective is the rank
  std::vector<bool> has_arrived_;
  std::vector<bool> is_posted_;  // which of the callers are this rank
  int missing_;
  std::vector<Bytes> payloads_;

  // Guarded by the hub's mutex.
  std::atomic<State> state_ = State::kCollecting;
  in_process::FailurePtr failure_;
  std::vector<int> awaited_;                 // ranks that owe data, or have yet to take some
  std::map<int, std::vector<int>> answers_;  // for whom others wait, once this rank has asked

  // Of the hub's thread.
  std::vector<std::unique_ptr<Staging>> staging_;  // by caller, if it is this rank
  int announced_ = 0;                              // of this rank's calls
  std::unique_ptr<Plan> plan_;
  int phase_ = 0;
  std::vector<std::pair<int, RequestPtr>> requests_;
  std::vector<in_process::EventPtr> done_events_;
};
using ExchangePtr = std::shared_ptr<Exchange>;

/// Some of the ranks, in an order of their own.
struct Group {
  // From this collective on (and for transfers with this rank, or with any if it is kEveryRank) the
  // group is broken.
  struct Breach {
    std::uint64_t from_sequence;
    int rank;
    in_process::FailurePtr failure;
  };
  using Channel = std::tuple<int, int, int>;  // sender, receiver, tag

  std::uint64_t id = 0;
  std::string name;
  std::vector<int> ranks;  // of the world, by place in this group
  int rank = 0;            // this rank's place
  GroupPtr parent;         // null for the world

  // Guarded by the hub's mutex.
  std::uint64_t posted = 0;      // collectives by this rank
  std::deque<ExchangePtr> open;  // collectives for which not all have arrived
  std::uint64_t first_open = 0;  // the sequence number of open[0]
  std::map<Channel, std::deque<ExchangePtr>> open_transfers;
  std::vector<std::uint64_t> sent;  // by receiver
  std::vector<Breach> breaches;     // in the order of their happening
  std::map<std::vector<int>, std::uint64_t> splits;

  bool has_left(int member) const;
};

class Hub : public Transport::Receiver, public std::enable_shared_from_this<Hub> {
 public:
  /// The thread starts with the first call of a collective.
  Hub(std::unique_ptr<Transport> transport, int rank, int world_size, const std::string& name);
  ~Hub() override;

  const GroupPtr& world() const { return world_; }
  const std::string& transport_name() const { return transport_name_; }

  /// The calling rank's next collective, send or receive. Throws if the group is already known to
  /// be unable to do it.
  ExchangePtr post(const GroupPtr& group, in_process::Call call);

  /// Returns when the exchange is done; throws if it fails, and breaks the group if it is not over
  /// within `timeout`. `caller` is the caller's number in it.
  void wait(Exchange& exchange, int caller, std::chrono::milliseconds timeout);

  /// Breaks the group if the exchange has not been over since `timeout`.
  void expire_if_due(Exchange& exchange, int caller,
                     std::chrono::steady_clock::time_point posted_at,
                     std::chrono::milliseconds timeout);

  /// Throws what `wait` would, if the exchange has failed.
  void throw_if_failed(const Exchange& exchange, int caller) const;

  void leave(const GroupPtr& group, const std::string& reason);
  void abort(const GroupPtr& group);
  GroupPtr split(const GroupPtr& group, const std::vector<int>& ranks, int place);
  std::uint64_t posted(const Group& group) const;
  bool reduces_natively() const { return transport_->reduces_natively(); }
  /// All ranks of the group call this, once each of them has made it.
  void prepare(const Group& group) { transport_->prepare(group.id, group.ranks); }

  /// After `leave`: finishes what this rank has posted, for at most `timeout`, and ends the thread.
  void close(std::chrono::milliseconds timeout);

 private:
  // What the program asks of the hub's thread, in order.
  struct Order {
    ExchangePtr announce;  // tell the others of this call
    int caller = 0;
    int peer = 0;  // or, if that is null, give this message to this rank of the world
    BytesPtr message;
  };
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;

  // With the mutex held.
  void add(const ExchangePtr& exchange, int caller, in_process::Call call);
  ExchangePtr collective(const GroupPtr& group, std::uint64_t sequence);
  ExchangePtr post_collective(const GroupPtr& group, in_process::Call call);
  ExchangePtr post_transfer(const GroupPtr& group, in_process::Call call);
  ExchangePtr take_counterpart(Group& group, const Group::Channel& channel, int caller);
  void order_announcement(const ExchangePtr& exchange, int caller);
  void settle(const ExchangePtr& exchange);
  void fail(Exchange& exchange, const in_process::FailurePtr& failure);
  void fail_collectives_from(Group& group, std::uint64_t sequence,
                             const in_process::FailurePtr& failure);
  void fail_transfers(Group& group, int missing_rank, const in_process::FailurePtr& failure);
  void apply(Group& group, const Group::Breach& breach);
  void break_group(Exchange& exchange, const in_process::FailurePtr& failure);
  void break_group(Group& group, std::uint64_t from_sequence,
                   const in_process::FailurePtr& failure);
  void leave_alone(Group& group, const std::string& reason);
  void apply_to_parts(const Group& group, int place, const in_process::FailurePtr& failure);
  void tell_others(const Group& group, const Group::Breach& breach);
  void expire(Lock& lock, Exchange& exchange, int caller, std::chrono::milliseconds timeout);
  std::vector<int> find_culprits(Lock& lock, Exchange& exchange, std::chrono::milliseconds timeout);
  void send(const Group& group, int member, BytesPtr message);
  void handle(const GroupPtr& group, Message message);
  void handle_call(const GroupPtr& group, CallMessage message);
  void handle_breach(const GroupPtr& group, const BreachMessage& message);
  void handle_stuck(const GroupPtr& group, const StuckMessage& message);
  bool has_unfinished() const;
  void start_thread();
  in_process::FailurePtr failure_of_collective(const Group& group, std::uint64_t sequence) const;
  in_process::FailurePtr failure_of_transfer(const Group& group, int rank, int peer) const;
  std::string where(const Exchange& exchange, int caller) const;

  // On the hub's thread.
  void run();
  void run_until_closed();
  void rest(Lock& lock, Clock::time_point last_event);
  bool carry_out_orders();
  bool announce(Exchange& exchange, int caller);
  bool start_ready();
  bool advance_moving();
  void start_phase(Exchange& exchange);
  Plan plan_of(const Exchange& exchange, int caller) const;
  void check_native(const in_process::Call& call) const;
  bool advance(const ExchangePtr& exchange);
  void finish(Exchange& exchange);
  void break_all(const std::string& problem);
  void on_message(int peer, Bytes bytes) override;

  std::unique_ptr<Transport> transport_;
  const std::string transport_name_;
  const int world_rank_;
  GroupPtr world_;

  mutable std::mutex mutex_;
  std::condition_variable over_;    // an exchange is over, or the thread has ended
  std::condition_variable orders_;  // there is something to do for the thread
  std::map<std::uint64_t, std::weak_ptr<Group>> groups_;
  // Messages for groups that this rank has not made yet.
  std::map<std::uint64_t, std::deque<Message>> early_;
  std::deque<Order> order_queue_;
  std::deque<ExchangePtr> ready_;
  std::vector<ExchangePtr> unfinished_;  // posted by this rank and not over
  bool is_closing_ = false;
  std::chrono::milliseconds flush_time_{};  // for the last messages, once it is closing
  bool has_ended_ = false;
  in_process::FailurePtr broken_;  // if the transport is
  bool has_failed_ = false;        // a group was broken, by other means than by being left

  std::vector<ExchangePtr> moving_;  // of the thread
  // Since when the thread has been inside the transport, in ticks of the clock; 0 if it is not.
  std::atomic<Clock::rep> inside_since_ = 0;
  std::thread thread_;
};
using HubPtr = std::shared_ptr<Hub>;

}  // namespace fsdp::processes
