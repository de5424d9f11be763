#include "process_hub.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "fsdp/errors.h"

namespace fsdp::processes {
namespace {

using in_process::Call;
using in_process::Failure;
using in_process::FailurePtr;
using in_process::Operation;
using in_process::Slice;
using State = Exchange::State;
using std::chrono::milliseconds;

// What goes to one rank travels with the call itself up to this size: one message instead of
// several, at the price of a copy.
constexpr std::int64_t kMaxPayload = 32 * 1024;

// Far enough away for any wait, and near enough that adding it to the clock cannot overflow.
constexpr milliseconds kLongestTimeout = std::chrono::hours(24 * 365);

// How long the end waits, at most, for the transport to hand over the last messages: they tell
// others, which may be gone themselves, that this rank leaves.
constexpr milliseconds kLongestFlush = std::chrono::seconds(5);

// What the thread needs beside that to come to its end on a busy machine.
constexpr milliseconds kThreadEnd = std::chrono::seconds(1);

// How often a hub whose rank waits for nothing looks for messages.
constexpr milliseconds kIdleRest = milliseconds(100);

std::int64_t bytes_of(const std::vector<Slice>& slices) {
  std::int64_t bytes = 0;
  for (const auto& slice : slices) {
    bytes += slice.nbytes();
  }
  return bytes;
}

Bytes gather(const std::vector<Slice>& slices) {
  Bytes bytes(static_cast<std::size_t>(bytes_of(slices)));
  auto* at = bytes.data();
  for (const auto& slice : slices) {
    std::memcpy(at, slice.data(), slice.nbytes());
    at += slice.nbytes();
  }
  return bytes;
}

void scatter(const Bytes& bytes, const std::vector<Slice>& slices) {
  TORCH_INTERNAL_ASSERT(static_cast<std::int64_t>(bytes.size()) == bytes_of(slices),
                        "a payload of ", bytes.size(), " bytes where ", bytes_of(slices),
                        " were agreed on");
  const auto* at = bytes.data();
  for (const auto& slice : slices) {
    std::memcpy(slice.data(), at, slice.nbytes());
    at += slice.nbytes();
  }
}

// The same on every rank that makes the group, and different for every group.
std::uint64_t group_id(std::uint64_t parent, const std::vector<int>& ranks, std::uint64_t nth) {
  std::uint64_t hash = 14695981039346656037ULL;  // FNV-1a
  const auto mix = [&](std::uint64_t value) {
    for (int byte = 0; byte < 8; ++byte) {
      hash = (hash ^ ((value >> (8 * byte)) & 0xff)) * 1099511628211ULL;
    }
  };
  mix(parent);
  mix(nth);
  for (const int rank : ranks) {
    mix(static_cast<std::uint64_t>(rank));
  }
  return hash;
}

int caller_number(const Call& call) {
  return call.is_transfer() ? (call.operation == Operation::kSend ? 0 : 1) : call.rank;
}

}  // namespace

std::vector<int> Exchange::arrived() const {
  std::vector<int> callers;
  for (int caller = 0; caller < static_cast<int>(calls_.size()); ++caller) {
    if (has_arrived_[caller]) {
      callers.push_back(caller);
    }
  }
  return callers;
}

std::vector<int> Exchange::missing_ranks() const {
  if (missing_ == 0) {
    return awaited_;
  }
  if (is_transfer_) {
    return {calls_[has_arrived_[0] ? 0 : 1].root};
  }
  std::vector<int> ranks;
  for (int rank = 0; rank < static_cast<int>(calls_.size()); ++rank) {
    if (!has_arrived_[rank]) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

// Of those that have arrived, of which there is at least one.
std::string Exchange::mismatch() const {
  if (!is_transfer_) {
    return in_process::find_mismatch(calls_, arrived());
  }
  return missing_ == 0 ? in_process::find_transfer_mismatch(calls_[0], calls_[1]) : std::string();
}

int Exchange::caller_of(int rank) const {
  return is_transfer_ ? (calls_[0].rank == rank ? 0 : 1) : rank;
}

bool Exchange::is_announced() const {
  return announced_ == std::count(is_posted_.begin(), is_posted_.end(), true);
}

bool Group::has_left(int member) const {
  return std::any_of(breaches.begin(), breaches.end(),
                     [&](const Breach& breach) { return breach.rank == member; });
}

Hub::Hub(std::unique_ptr<Transport> transport, int rank, int world_size, const std::string& name)
    : transport_(std::move(transport)),
      transport_name_(transport_->name()),
      world_rank_(rank),
      world_(std::make_shared<Group>()) {
  world_->name = name;
  world_->ranks.resize(world_size);
  std::iota(world_->ranks.begin(), world_->ranks.end(), 0);
  world_->rank = rank;
  world_->sent.resize(world_size);
  groups_[world_->id] = world_;
}

Hub::~Hub() {
  if (thread_.joinable()) {
    thread_.detach();  // the thread itself lets go of the hub last, or it is stuck
  }
}

// ---- Calls of this rank -------------------------------------------------------------------------

void Hub::check_native(const Call& call) const {
  if (call.reduction == c10d::ReduceOp::UNUSED || !transport_->reduces_natively()) {
    return;
  }
  for (const auto& transfer : call.transfers) {
    const auto problem = transport_->why_not_native(call.reduction, transfer.dtype, transfer.numel);
    if (!problem.empty()) {
      throw UsageError(fmt::format("rank {}: {}: {}", call.rank,
                                   in_process::operation_name(call.operation), problem));
    }
  }
}

ExchangePtr Hub::post(const GroupPtr& group, Call call) {
  check_native(call);
  std::unique_ptr<Staging> staging;
  if (!call.device().is_cpu()) {
    staging = std::make_unique<Staging>(call);
  }
  const int caller = caller_number(call);
  const std::lock_guard lock(mutex_);
  auto exchange = call.is_transfer() ? post_transfer(group, std::move(call))
                                     : post_collective(group, std::move(call));
  exchange->staging_[caller] = std::move(staging);
  exchange->is_posted_[caller] = true;
  start_thread();
  if (!exchange->is_over()) {
    unfinished_.push_back(exchange);
  }
  order_announcement(exchange, caller);
  if (exchange->missing_ == 0) {
    settle(exchange);
  }
  orders_.notify_one();
  return exchange;
}

ExchangePtr Hub::post_collective(const GroupPtr& group, Call call) {
  const auto sequence = group->posted++;
  if (const auto failure = failure_of_collective(*group, sequence)) {
    failure->raise(in_process::where(call, sequence, group->name));
  }
  auto exchange = collective(group, sequence);
  add(exchange, group->rank, std::move(call));
  return exchange;
}

ExchangePtr Hub::post_transfer(const GroupPtr& group, Call call) {
  const bool sends = call.operation == Operation::kSend;
  const int peer = call.root;
  const int caller = sends ? 0 : 1;
  const Group::Channel channel(sends ? group->rank : peer, sends ? peer : group->rank, call.tag);
  // What a rank sent before it left can still be received.
  auto exchange = take_counterpart(*group, channel, caller);
  if (exchange == nullptr) {
    if (const auto failure = failure_of_transfer(*group, group->rank, peer)) {
      failure->raise(in_process::where(call, 0, group->name));
    }
    exchange = ExchangePtr(new Exchange(group, 2, 0, /*is_transfer=*/true));
    group->open_transfers[channel].push_back(exchange);
  }
  if (sends) {
    exchange->number_ = group->sent[peer]++;
  }
  add(exchange, caller, std::move(call));
  return exchange;
}

void Hub::add(const ExchangePtr& exchange, int caller, Call call) {
  exchange->calls_[caller] = std::move(call);
  exchange->has_arrived_[caller] = true;
  --exchange->missing_;
}

ExchangePtr Hub::collective(const GroupPtr& group, std::uint64_t sequence) {
  while (sequence - group->first_open >= group->open.size()) {
    group->open.push_back(
        ExchangePtr(new Exchange(group, static_cast<int>(group->ranks.size()),
                                 group->first_open + group->open.size(), /*is_transfer=*/false)));
  }
  return group->open[sequence - group->first_open];
}

// The oldest transfer in which only `caller` is missing, or null.
ExchangePtr Hub::take_counterpart(Group& group, const Group::Channel& channel, int caller) {
  const auto entry = group.open_transfers.find(channel);
  if (entry == group.open_transfers.end() || entry->second.front()->has_arrived_[caller]) {
    return nullptr;
  }
  auto exchange = entry->second.front();
  entry->second.pop_front();
  if (entry->second.empty()) {
    group.open_transfers.erase(entry);
  }
  return exchange;
}

void Hub::order_announcement(const ExchangePtr& exchange, int caller) {
  Order order;
  order.announce = exchange;
  order.caller = caller;
  order_queue_.push_back(std::move(order));
}

// All have arrived: the data can move, if their calls match.
void Hub::settle(const ExchangePtr& exchange) {
  auto& group = *exchange->group_;
  if (!exchange->is_transfer_) {
    // Each rank posts in order, so whatever is complete is the oldest.
    group.open.pop_front();
    ++group.first_open;
  }
  const auto mismatch = exchange->mismatch();
  if (!mismatch.empty()) {
    break_group(*exchange, in_process::mismatch_failure(mismatch));
    return;
  }
  exchange->state_.store(State::kMoving, std::memory_order_release);
  ready_.push_back(exchange);
}

void Hub::wait(Exchange& exchange, int caller, milliseconds timeout) {
  {
    Lock lock(mutex_);
    if (!over_.wait_for(lock, std::min(timeout, kLongestTimeout),
                        [&] { return exchange.is_over(); })) {
      expire(lock, exchange, caller, timeout);
    }
  }
  throw_if_failed(exchange, caller);
}

void Hub::expire_if_due(Exchange& exchange, int caller, Clock::time_point posted_at,
                        milliseconds timeout) {
  if (exchange.is_over() || Clock::now() - posted_at < timeout) {
    return;
  }
  Lock lock(mutex_);
  if (!exchange.is_over()) {
    expire(lock, exchange, caller, timeout);
  }
}

void Hub::expire(Lock& lock, Exchange& exchange, int caller, milliseconds timeout) {
  const bool is_moving = exchange.missing_ == 0;
  auto culprits = is_moving ? find_culprits(lock, exchange, timeout) : exchange.missing_ranks();
  if (exchange.is_over()) {
    return;
  }
  auto failure = in_process::timeout_failure(
      exchange.calls_[caller], exchange.sequence(), culprits, timeout,
      is_moving ? std::string() : exchange.mismatch(),
      is_moving ? "called it, but did not send or take all data" : "did not arrive");
  const auto since = inside_since_.load();
  const auto inside = Clock::now().time_since_epoch() - Clock::duration(since);
  if (since != 0 && inside > timeout / 2) {
    failure = in_process::make_failure(
        failure->kind,
        fmt::format("{} The {} itself has not answered for {} ms.", failure->message,
                    transport_name_, std::chrono::duration_cast<milliseconds>(inside).count()));
  }
  break_group(exchange, failure);
}

// All have called, and yet it does not end. A rank for which this one waits may itself wait for
// another, so all are asked; those that say so are not the culprits, and those that say nothing
// are.
std::vector<int> Hub::find_culprits(Lock& lock, Exchange& exchange, milliseconds timeout) {
  constexpr milliseconds kLongestAsking = milliseconds(500);
  const auto& group = *exchange.group_;
  std::vector<int> others;
  for (int member = 0; member < static_cast<int>(group.ranks.size()); ++member) {
    if (member != group.rank) {
      others.push_back(member);
    }
  }
  if (!exchange.is_transfer_) {
    StuckMessage question;
    question.group = group.id;
    question.number = exchange.number_;
    question.rank = group.rank;
    const auto bytes = std::make_shared<const Bytes>(encode(question));
    for (const int member : others) {
      send(group, member, bytes);
    }
    over_.wait_for(lock, std::min(timeout / 4, kLongestAsking),
                   [&] { return exchange.is_over() || exchange.answers_.size() == others.size(); });
  }
  auto frontier = exchange.awaited_.empty() ? others : exchange.awaited_;
  const auto first = frontier;
  std::set<int> seen(frontier.begin(), frontier.end());
  std::vector<int> culprits;
  while (!frontier.empty()) {
    const int member = frontier.back();
    frontier.pop_back();
    const auto answer = exchange.answers_.find(member);
    if (answer == exchange.answers_.end()) {
      culprits.push_back(member);
      continue;
    }
    for (const int next : answer->second) {
      if (next != group.rank && seen.insert(next).second) {
        frontier.push_back(next);
      }
    }
  }
  std::sort(culprits.begin(), culprits.end());
  return culprits.empty() ? first : culprits;
}

void Hub::throw_if_failed(const Exchange& exchange, int caller) const {
  if (exchange.state() == State::kFailed) {
    exchange.failure_->raise(where(exchange, caller));
  }
}

std::string Hub::where(const Exchange& exchange, int caller) const {
  return in_process::where(exchange.calls_[caller], exchange.sequence(), exchange.group_->name);
}

std::uint64_t Hub::posted(const Group& group) const {
  const std::lock_guard lock(mutex_);
  return group.posted;
}

// ---- Ways to end --------------------------------------------------------------------------------

void Hub::fail(Exchange& exchange, const FailurePtr& failure) {
  if (exchange.is_over()) {
    return;
  }
  exchange.failure_ = failure;
  exchange.state_.store(State::kFailed, std::memory_order_release);
  std::erase_if(unfinished_, [&](const ExchangePtr& each) { return each.get() == &exchange; });
  over_.notify_all();
  orders_.notify_one();
}

void Hub::fail_collectives_from(Group& group, std::uint64_t sequence, const FailurePtr& failure) {
  while (!group.open.empty() && group.first_open + group.open.size() > sequence) {
    fail(*group.open.back(), failure);
    group.open.pop_back();
  }
}

void Hub::fail_transfers(Group& group, int missing_rank, const FailurePtr& failure) {
  for (auto& [channel, exchanges] : group.open_transfers) {
    std::erase_if(exchanges, [&](const ExchangePtr& exchange) {
      const bool concerned =
          missing_rank == kEveryRank || exchange->missing_ranks().front() == missing_rank;
      if (concerned) {
        fail(*exchange, failure);
      }
      return concerned;
    });
  }
  std::erase_if(group.open_transfers, [](const auto& entry) { return entry.second.empty(); });
}

void Hub::apply(Group& group, const Group::Breach& breach) {
  group.breaches.push_back(breach);
  fail_collectives_from(group, breach.from_sequence, breach.failure);
  fail_transfers(group, breach.rank, breach.failure);
  if (breach.rank != kEveryRank) {
    return;
  }
  has_failed_ = true;
  // Whoever broke the group sends no more data of these either. Transfers that both sides have
  // called still come to their end, unless somebody is stuck.
  const auto kind = breach.failure->kind;
  const bool is_stuck =
      kind == Failure::Kind::kTimeout || kind == Failure::Kind::kWorkFailed || broken_ != nullptr;
  const auto unfinished = unfinished_;
  for (const auto& exchange : unfinished) {
    const bool concerned =
        exchange->is_transfer_ ? is_stuck : exchange->number_ >= breach.from_sequence;
    if (exchange->group_.get() == &group && concerned) {
      fail(*exchange, breach.failure);
    }
  }
}

// This exchange cannot be done.
void Hub::break_group(Exchange& exchange, const FailurePtr& failure) {
  auto& group = *exchange.group_;
  // It may be in none of the lists that `apply` looks at.
  fail(exchange, failure);
  break_group(
      group,
      exchange.is_transfer_ ? group.first_open : std::min(group.first_open, exchange.number_),
      failure);
}

void Hub::break_group(Group& group, std::uint64_t from_sequence, const FailurePtr& failure) {
  const Group::Breach breach{from_sequence, kEveryRank, failure};
  apply(group, breach);
  tell_others(group, breach);
}

void Hub::tell_others(const Group& group, const Group::Breach& breach) {
  BreachMessage message;
  message.group = group.id;
  message.from_sequence = breach.from_sequence;
  message.rank = breach.rank;
  message.kind = breach.failure->kind;
  message.text = breach.failure->message;
  if (message.kind == Failure::Kind::kWorkFailed) {
    message.text = "the work failed on another rank";
  }
  const auto bytes = std::make_shared<const Bytes>(encode(message));
  for (int member = 0; member < static_cast<int>(group.ranks.size()); ++member) {
    if (member != group.rank && !group.has_left(member)) {
      send(group, member, bytes);
    }
  }
}

void Hub::send(const Group& group, int member, BytesPtr message) {
  Order order;
  order.peer = group.ranks[member];
  order.message = std::move(message);
  order_queue_.push_back(std::move(order));
  orders_.notify_one();
}

void Hub::leave(const GroupPtr& group, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (group->has_left(group->rank)) {
    return;
  }
  // Who leaves a group leaves those that were split from it. They come first, so that the others
  // know how far this rank came in each when they hear that it is gone for good.
  for (const auto& [id, weak] : groups_) {
    const auto part = weak.lock();
    for (auto above = part == nullptr ? nullptr : part->parent; above != nullptr;
         above = above->parent) {
      if (above == group) {
        leave_alone(*part, reason);
        break;
      }
    }
  }
  leave_alone(*group, reason);
}

void Hub::leave_alone(Group& group, const std::string& reason) {
  if (group.has_left(group.rank)) {
    return;
  }
  const Group::Breach breach{group.posted, group.rank,
                             in_process::left_failure(group.rank, reason)};
  apply(group, breach);
  tell_others(group, breach);
}

void Hub::abort(const GroupPtr& group) {
  const std::lock_guard lock(mutex_);
  break_group(*group, group->first_open, in_process::abort_failure(group->rank));
}

GroupPtr Hub::split(const GroupPtr& group, const std::vector<int>& ranks, int place) {
  const std::lock_guard lock(mutex_);
  auto part = std::make_shared<Group>();
  part->id = group_id(group->id, ranks, group->splits[ranks]++);
  part->name = fmt::format("{}, {}", group->name, in_process::describe_ranks(ranks));
  for (const int rank : ranks) {
    part->ranks.push_back(group->ranks[rank]);
  }
  part->rank = place;
  part->parent = group;
  part->sent.resize(ranks.size());
  std::erase_if(groups_, [](const auto& entry) { return entry.second.expired(); });
  if (const auto entry = groups_.find(part->id);
      entry != groups_.end() && entry->second.lock() != nullptr) {
    throw Error(
        fmt::format("rank {}: the groups \"{}\" and \"{}\" got the same number; make one "
                    "of them with its ranks in another order",
                    group->rank, part->name, entry->second.lock()->name));
  }
  groups_[part->id] = part;
  if (const auto entry = early_.find(part->id); entry != early_.end()) {
    auto messages = std::move(entry->second);
    early_.erase(entry);
    for (auto& message : messages) {
      handle(part, std::move(message));
    }
  }
  for (const auto& breach : std::vector<Group::Breach>(group->breaches)) {
    apply_to_parts(*group, breach.rank, breach.failure);
  }
  return part;
}

// A member of `group` that left it takes part in no collective of the groups split from it but
// those that it has announced.
void Hub::apply_to_parts(const Group& group, int place, const FailurePtr& failure) {
  if (place == kEveryRank) {
    return;
  }
  const int world_rank = group.ranks[place];
  for (const auto& [id, weak] : groups_) {
    const auto part = weak.lock();
    if (part == nullptr || part->parent.get() != &group) {
      continue;
    }
    const auto member = std::find(part->ranks.begin(), part->ranks.end(), world_rank);
    const auto number = static_cast<int>(member - part->ranks.begin());
    if (member == part->ranks.end() || part->has_left(number)) {
      continue;
    }
    // It may have come as far as its last call here, and no further.
    std::uint64_t from = part->first_open;
    for (const auto& exchange : part->open) {
      from += exchange->has_arrived_[number] ? 1 : 0;
    }
    apply(*part, {from, number, failure});
    apply_to_parts(*part, number, failure);
  }
}

FailurePtr Hub::failure_of_collective(const Group& group, std::uint64_t sequence) const {
  if (broken_ != nullptr) {
    return broken_;
  }
  for (const auto& breach : group.breaches) {
    if (breach.from_sequence <= sequence) {
      return breach.failure;
    }
  }
  return nullptr;
}

FailurePtr Hub::failure_of_transfer(const Group& group, int rank, int peer) const {
  if (broken_ != nullptr) {
    return broken_;
  }
  for (const auto& breach : group.breaches) {
    if (breach.rank == kEveryRank || breach.rank == rank || breach.rank == peer) {
      return breach.failure;
    }
  }
  return nullptr;
}

void Hub::start_thread() {
  if (!thread_.joinable() && !has_ended_) {
    thread_ = std::thread([self = shared_from_this()] { self->run(); });
  }
}

bool Hub::has_unfinished() const {
  return !unfinished_.empty();
}

void Hub::close(milliseconds timeout) {
  Lock lock(mutex_);
  const auto is_idle = [&] { return !has_unfinished() || has_ended_; };
  if (!over_.wait_for(lock, std::min(timeout, kLongestTimeout), is_idle)) {
    const auto late = unfinished_;
    for (const auto& exchange : late) {
      int caller = 0;
      while (!exchange->is_posted_[caller]) {
        ++caller;
      }
      expire(lock, *exchange, caller, timeout);
    }
  }
  is_closing_ = true;
  flush_time_ = std::min(timeout / 4, kLongestFlush);
  if (world_->ranks.size() > 1) {
    start_thread();
  }
  if (!thread_.joinable()) {
    return;
  }
  orders_.notify_one();
  // A thread that is stuck in the transport is left to itself: it owns all that it uses.
  const auto longest = std::min(flush_time_ + kThreadEnd, std::max(timeout, milliseconds(1)));
  const bool has_ended = over_.wait_for(lock, longest, [&] { return has_ended_; });
  lock.unlock();
  if (has_ended) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

// ---- The hub's thread ---------------------------------------------------------------------------

void Hub::run() {
  try {
    run_until_closed();
  } catch (const c10::Error& error) {
    break_all(error.what_without_backtrace());
  } catch (const std::exception& error) {
    break_all(error.what());
  }
  moving_.clear();
  const std::lock_guard lock(mutex_);
  order_queue_.clear();
  ready_.clear();
  has_ended_ = true;
  over_.notify_all();
}

void Hub::run_until_closed() {
  auto last_event = Clock::now();
  Clock::time_point flush_until;
  while (true) {
    bool is_busy = carry_out_orders();
    inside_since_ = Clock::now().time_since_epoch().count();
    is_busy = transport_->progress(*this) || is_busy;
    inside_since_ = 0;
    is_busy = start_ready() || is_busy;
    is_busy = advance_moving() || is_busy;
    const auto now = Clock::now();
    if (is_busy) {
      last_event = now;
      continue;
    }
    Lock lock(mutex_);
    if (is_closing_ && order_queue_.empty() && moving_.empty()) {
      if (flush_until == Clock::time_point()) {
        flush_until = now + flush_time_;
      }
      if (transport_->is_flushed() || now >= flush_until) {
        const bool has_failed = has_failed_;
        lock.unlock();
        transport_->close(has_failed);
        return;
      }
    }
    rest(lock, last_event);
  }
}

// The longer nothing has happened, the longer the pause: an eighth of that time. So looking costs
// little where ranks wait for long, and delays nothing by more than that eighth.
void Hub::rest(Lock& lock, Clock::time_point last_event) {
  using std::chrono::microseconds;
  constexpr auto kShortest = microseconds(20);
  constexpr auto kLongest = milliseconds(5);
  const auto has_work = [&] { return !order_queue_.empty() || !ready_.empty(); };
  const bool waits = has_unfinished() || is_closing_ || !moving_.empty();
  if (!waits) {
    orders_.wait_for(lock, kIdleRest, [&] { return has_work() || is_closing_; });
    return;
  }
  const auto pause = (Clock::now() - last_event) / 8;
  if (pause < kShortest) {
    lock.unlock();
    std::this_thread::yield();
    return;
  }
  orders_.wait_for(lock, std::min<Clock::duration>(pause, kLongest), has_work);
}

bool Hub::carry_out_orders() {
  bool did_something = false;
  while (true) {
    Order order;
    {
      const std::lock_guard lock(mutex_);
      if (order_queue_.empty()) {
        return did_something;
      }
      order = order_queue_.front();
    }
    if (order.announce == nullptr) {
      transport_->post(order.peer, order.message);
    } else if (!announce(*order.announce, order.caller)) {
      return did_something;  // later orders have to wait, for the others rely on the order
    }
    did_something = true;
    const std::lock_guard lock(mutex_);
    order_queue_.pop_front();
  }
}

// Tells the others what this rank calls. False if what it gives is not in host memory yet.
bool Hub::announce(Exchange& exchange, int caller) {
  if (exchange.state() == State::kFailed) {
    return true;
  }
  const auto& staging = exchange.staging_[caller];
  if (staging != nullptr && !staging->is_ready()) {
    return false;
  }
  ++exchange.announced_;
  const auto& group = *exchange.group_;
  const auto& call = exchange.calls_[caller];
  const auto plan = plan_of(exchange, caller);
  for (int member = 0; member < static_cast<int>(group.ranks.size()); ++member) {
    if (member == group.rank || (exchange.is_transfer_ && member != call.root)) {
      continue;
    }
    CallMessage message;
    message.group = group.id;
    message.number = exchange.number_;
    message.call = call;
    const auto slices = plan.outgoing(0, member);
    if (bytes_of(slices) <= kMaxPayload) {
      message.payload = gather(slices);
    }
    transport_->post(group.ranks[member], std::make_shared<const Bytes>(encode(message)));
  }
  return true;
}

bool Hub::start_ready() {
  bool did_something = false;
  while (true) {
    ExchangePtr exchange;
    {
      const std::lock_guard lock(mutex_);
      // What this rank gives must be in host memory before it is sent.
      if (ready_.empty() ||
          (!ready_.front()->is_announced() && ready_.front()->state() != State::kFailed)) {
        return did_something;
      }
      exchange = ready_.front();
      ready_.pop_front();
    }
    moving_.push_back(exchange);
    start_phase(*exchange);
    did_something = true;
  }
}

void Hub::start_phase(Exchange& exchange) {
  const auto& group = *exchange.group_;
  if (exchange.is_transfer_ && exchange.calls_[0].root == group.rank &&
      exchange.calls_[1].root == group.rank) {
    return;  // from this rank to itself
  }
  const int caller = exchange.is_transfer_ ? (exchange.is_posted_[0] ? 0 : 1) : group.rank;
  if (exchange.plan_ == nullptr) {
    exchange.plan_ = std::make_unique<Plan>(plan_of(exchange, caller));
  }
  auto& plan = *exchange.plan_;
  const int phase = exchange.phase_;
  const Lane lane{group.id, exchange.number_,
                  static_cast<std::uint32_t>(exchange.is_transfer_ ? 2 : phase)};
  if (phase == 0) {
    for (auto& reduction : plan.native()) {
      exchange.requests_.emplace_back(group.rank,
                                      transport_->reduce(group.id, std::move(reduction)));
    }
  }
  // Neighbours first: if every rank began with rank 0, that one would be a bottleneck.
  const int size = static_cast<int>(group.ranks.size());
  for (int step = 1; step < size; ++step) {
    const int from = (group.rank + size - step) % size;
    const auto slices = plan.incoming(phase, from);
    if (phase == 0 && bytes_of(slices) <= kMaxPayload) {
      if (!slices.empty()) {
        scatter(exchange.payloads_[exchange.caller_of(from)], slices);
      }
      continue;
    }
    for (const auto& slice : slices) {
      exchange.requests_.emplace_back(
          from, transport_->receive(group.ranks[from], lane,
                                    {slice.data(), static_cast<std::size_t>(slice.nbytes()),
                                     std::make_shared<at::Tensor>(*slice.tensor)}));
    }
  }
  for (int step = 1; step < size; ++step) {
    const int to = (group.rank + step) % size;
    const auto slices = plan.outgoing(phase, to);
    if (phase == 0 && bytes_of(slices) <= kMaxPayload) {
      continue;
    }
    for (const auto& slice : slices) {
      exchange.requests_.emplace_back(
          to, transport_->send(group.ranks[to], lane,
                               {slice.data(), static_cast<std::size_t>(slice.nbytes()),
                                std::make_shared<at::Tensor>(*slice.tensor)}));
    }
  }
}

Plan Hub::plan_of(const Exchange& exchange, int caller) const {
  return {exchange.calls_[caller], static_cast<int>(exchange.group_->ranks.size()),
          transport_->reduces_natively()};
}

bool Hub::advance_moving() {
  bool did_something = false;
  std::erase_if(moving_, [&](const ExchangePtr& exchange) {
    if (exchange->state() == State::kFailed) {
      for (const auto& [peer, request] : exchange->requests_) {
        transport_->cancel(request);
      }
      exchange->requests_.clear();
      did_something = true;
      return true;
    }
    const bool is_over = advance(exchange);
    did_something = did_something || is_over;
    return is_over;
  });
  return did_something;
}

// Returns whether the exchange is over.
bool Hub::advance(const ExchangePtr& exchange) {
  const auto done =
      std::erase_if(exchange->requests_, [](const auto& entry) { return entry.second->is_done(); });
  if (!exchange->requests_.empty()) {
    if (done > 0 || exchange->awaited_.empty()) {
      std::set<int> awaited;
      for (const auto& [peer, request] : exchange->requests_) {
        awaited.insert(peer);
      }
      const std::lock_guard lock(mutex_);
      exchange->awaited_.assign(awaited.begin(), awaited.end());
    }
    return false;
  }
  try {
    if (exchange->plan_ != nullptr) {
      exchange->plan_->finish(exchange->phase_);
      if (++exchange->phase_ < exchange->plan_->phases()) {
        start_phase(*exchange);
        return advance(exchange);
      }
    } else {
      const auto& from = exchange->calls_[0].transfers[0].from[0];
      const auto& to = exchange->calls_[1].transfers[0].to[0];
      if (to.numel > 0 && from.data() != to.data()) {
        std::memcpy(to.data(), from.data(), to.nbytes());
      }
    }
    finish(*exchange);
  } catch (...) {
    const auto failure = std::make_shared<const Failure>(
        Failure{Failure::Kind::kWorkFailed, {}, std::current_exception()});
    const std::lock_guard lock(mutex_);
    break_group(*exchange, failure);
  }
  return true;
}

void Hub::finish(Exchange& exchange) {
  for (auto& staging : exchange.staging_) {
    if (staging != nullptr) {
      exchange.done_events_.push_back(staging->copy_back());
      staging.reset();
    }
  }
  exchange.plan_.reset();
  const std::lock_guard lock(mutex_);
  if (exchange.is_over()) {
    return;  // the program lost patience
  }
  // Before the program is told, so that it finds its tensors' memory its own.
  for (auto& call : exchange.calls_) {
    call.transfers.clear();
  }
  exchange.payloads_.clear();
  exchange.state_.store(State::kDone, std::memory_order_release);
  std::erase_if(unfinished_, [&](const ExchangePtr& each) { return each.get() == &exchange; });
  over_.notify_all();
}

void Hub::break_all(const std::string& problem) {
  const std::lock_guard lock(mutex_);
  broken_ = in_process::make_failure(
      Failure::Kind::kPeerLeft,
      fmt::format("rank {} lost its connection to the others: {}", world_rank_, problem));
  for (const auto& [id, weak] : groups_) {
    if (const auto group = weak.lock()) {
      apply(*group, {0, kEveryRank, broken_});
    }
  }
}

// ---- What the others say ------------------------------------------------------------------------

void Hub::on_message(int peer, Bytes bytes) {
  auto message = decode(bytes, peer);
  const std::lock_guard lock(mutex_);
  const auto entry = groups_.find(group_of(message));
  if (entry == groups_.end()) {
    early_[group_of(message)].push_back(std::move(message));
  } else if (const auto group = entry->second.lock()) {
    handle(group, std::move(message));
  }
}

void Hub::handle(const GroupPtr& group, Message message) {
  if (auto* call = std::get_if<CallMessage>(&message)) {
    handle_call(group, std::move(*call));
  } else if (const auto* stuck = std::get_if<StuckMessage>(&message)) {
    handle_stuck(group, *stuck);
  } else {
    handle_breach(group, std::get<BreachMessage>(message));
  }
}

void Hub::handle_call(const GroupPtr& group, CallMessage message) {
  auto call = std::move(message.call);
  const int caller = caller_number(call);
  ExchangePtr exchange;
  if (call.is_transfer()) {
    const bool sends = caller == 0;
    const Group::Channel channel(sends ? call.rank : group->rank, sends ? group->rank : call.rank,
                                 call.tag);
    exchange = take_counterpart(*group, channel, caller);
    if (exchange == nullptr) {
      if (failure_of_transfer(*group, group->rank, call.rank) != nullptr) {
        return;
      }
      exchange = ExchangePtr(new Exchange(group, 2, 0, /*is_transfer=*/true));
      group->open_transfers[channel].push_back(exchange);
    }
    if (sends) {
      exchange->number_ = message.number;
    }
  } else {
    if (message.number < group->first_open ||
        failure_of_collective(*group, message.number) != nullptr) {
      return;
    }
    exchange = collective(group, message.number);
  }
  add(exchange, caller, std::move(call));
  exchange->payloads_[caller] = std::move(message.payload);
  if (exchange->missing_ == 0) {
    settle(exchange);
  }
}

void Hub::handle_breach(const GroupPtr& group, const BreachMessage& message) {
  const auto failure = in_process::make_failure(message.kind, message.text);
  apply(*group, {message.from_sequence, message.rank, failure});
  apply_to_parts(*group, message.rank, failure);
}

void Hub::handle_stuck(const GroupPtr& group, const StuckMessage& message) {
  const auto entry =
      std::find_if(unfinished_.begin(), unfinished_.end(), [&](const ExchangePtr& exchange) {
        return exchange->group_ == group && !exchange->is_transfer_ &&
               exchange->number_ == message.number;
      });
  if (message.is_answer) {
    if (entry != unfinished_.end()) {
      (*entry)->answers_[message.rank] = message.awaited;
      over_.notify_all();
    }
    return;
  }
  StuckMessage answer;
  answer.group = group->id;
  answer.number = message.number;
  answer.rank = group->rank;
  answer.is_answer = true;
  if (entry != unfinished_.end()) {
    answer.awaited = (*entry)->missing_ranks();
  }
  send(*group, message.rank, std::make_shared<const Bytes>(encode(answer)));
}

}  // namespace fsdp::processes
