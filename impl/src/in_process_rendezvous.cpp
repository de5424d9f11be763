#include "in_process_rendezvous.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <thread>
#include <utility>

#include "in_process_portion.h"

namespace fsdp::in_process {
namespace {

using State = Exchange::State;
using std::chrono::milliseconds;

constexpr int kEveryRank = -1;

// Far enough away for any wait, and near enough that adding it to the clock cannot overflow.
constexpr milliseconds kLongestTimeout = std::chrono::hours(24 * 365);

int core_count() {
  static const int count = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  return count;
}

// Looks again for a few microseconds before the thread goes to sleep, which costs more than most
// collectives of a few kilobytes. It does not yield: where other programs want the core too, they
// would keep it for milliseconds.
void spin_while(const Exchange& exchange, State state, int rounds) {
  for (int round = 0; round < rounds && exchange.state() == state; ++round) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

}  // namespace

Exchange::Exchange(int callers, std::uint64_t sequence, bool is_transfer)
    : sequence_(sequence),
      is_transfer_(is_transfer),
      calls_(callers),
      call_events_(callers),
      has_arrived_(callers),
      missing_(callers),
      portions_(is_transfer ? 1 : callers),
      claimed_(portions_) {}

void Exchange::add(int caller, Call call, EventPtr event) {
  calls_[caller] = std::move(call);
  call_events_[caller] = std::move(event);
  has_arrived_[caller] = true;
  --missing_;
}

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
    return find_mismatch(calls_, arrived());
  }
  return is_complete() ? find_transfer_mismatch(calls_[0], calls_[1]) : std::string();
}

bool Exchange::do_all_unclaimed(int preferred) {
  bool was_last = do_if_unclaimed(std::min(preferred, portions_ - 1));
  while (next_unclaimed_.load(std::memory_order_relaxed) < portions_) {
    const int portion = next_unclaimed_.fetch_add(1, std::memory_order_relaxed);
    was_last = (portion < portions_ && do_if_unclaimed(portion)) || was_last;
  }
  return was_last;
}

bool Exchange::do_if_unclaimed(int portion) {
  if (claimed_[portion].exchange(true, std::memory_order_relaxed)) {
    return false;
  }
  try {
    carry_out(portion);
  } catch (...) {
    note_first_error(std::current_exception());
  }
  return done_portions_.fetch_add(1, std::memory_order_acq_rel) + 1 == portions_;
}

void Exchange::carry_out(int portion) {
  if (!calls_[0].device().is_cpu()) {
    carry_out_on_device(portion);
  } else if (is_transfer_) {
    carry_out_transfer(calls_[0], calls_[1]);
  } else {
    carry_out_portion(calls_, portion);
  }
}

// The ranks' tensors may be on several devices, and a copy between two uses a stream of each. So
// all of this thread's streams start after all the calls, and all of them have to be done.
void Exchange::carry_out_on_device(int portion) {
  std::vector<at::Device> devices;
  for (const auto& call : calls_) {
    if (std::find(devices.begin(), devices.end(), call.device()) == devices.end()) {
      devices.push_back(call.device());
    }
    note_use_on_current_stream(call);
  }
  for (const auto device : devices) {
    in_process::order_current_stream_after(device, call_events_);
  }
  if (is_transfer_) {
    carry_out_transfer(calls_[0], calls_[1]);
  } else {
    carry_out_portion(calls_, portion);
  }
  const std::lock_guard lock(results_mutex_);
  for (const auto device : devices) {
    done_events_.push_back(record_current_stream(device));
  }
}

void Exchange::note_first_error(std::exception_ptr error) {
  const std::lock_guard lock(results_mutex_);
  if (first_error_ == nullptr) {
    first_error_ = std::move(error);
  }
}

Rendezvous::Rendezvous(int world_size, std::string name)
    : world_size_(world_size), name_(std::move(name)), posted_(world_size, 0) {}

ExchangePtr Rendezvous::post(Call call) {
  const int rank = call.rank;
  auto event = record_current_stream(call.device());
  const std::lock_guard lock(mutex_);
  const auto sequence = posted_[rank]++;
  if (const auto failure = failure_of_collective(sequence)) {
    failure->raise(where(call, sequence));
  }
  if (sequence - first_open_ == open_.size()) {
    open_.push_back(std::make_shared<Exchange>(world_size_, sequence, /*is_transfer=*/false));
  }
  auto exchange = open_[sequence - first_open_];
  exchange->add(rank, std::move(call), std::move(event));
  if (exchange->is_complete()) {
    // Each rank posts in order, so whatever is complete is the oldest.
    open_.pop_front();
    ++first_open_;
    settle(*exchange);
  }
  return exchange;
}

ExchangePtr Rendezvous::post_transfer(Call call) {
  const int rank = call.rank;
  auto event = record_current_stream(call.device());
  const bool sends = call.operation == Operation::kSend;
  const int peer = call.root;
  const int caller = sends ? 0 : 1;
  const Channel channel(sends ? rank : peer, sends ? peer : rank, call.tag);

  const std::lock_guard lock(mutex_);
  // What a rank sent before it left can still be received.
  auto exchange = take_counterpart(channel, caller);
  if (exchange == nullptr) {
    if (const auto failure = failure_of_transfer(rank, peer)) {
      failure->raise(where(call, 0));
    }
    exchange = std::make_shared<Exchange>(2, 0, /*is_transfer=*/true);
    open_transfers_[channel].push_back(exchange);
  }
  exchange->add(caller, std::move(call), std::move(event));
  if (exchange->is_complete()) {
    settle(*exchange);
  }
  return exchange;
}

// The oldest exchange in which only `caller` is missing, or null.
ExchangePtr Rendezvous::take_counterpart(const Channel& channel, int caller) {
  const auto entry = open_transfers_.find(channel);
  if (entry == open_transfers_.end() || entry->second.front()->has_arrived_[caller]) {
    return nullptr;
  }
  auto exchange = entry->second.front();
  entry->second.pop_front();
  if (entry->second.empty()) {
    open_transfers_.erase(entry);
  }
  return exchange;
}

// All have arrived: the work can begin, if their calls match.
void Rendezvous::settle(Exchange& exchange) {
  const auto mismatch = exchange.mismatch();
  if (!mismatch.empty()) {
    const auto failure = mismatch_failure(mismatch);
    fail(exchange, failure);
    break_group(failure);
    return;
  }
  exchange.set_state(State::kReady);
  // Only as many are woken as there are cores to work on; the last caller itself may be busy with
  // other things before it waits, so there is always one.
  const int helpers = std::min(exchange.sleepers_, core_count());
  for (int i = 0; i < helpers; ++i) {
    exchange.changed_.notify_one();
  }
}

void Rendezvous::wait(Exchange& exchange, int caller, milliseconds timeout) {
  if (exchange.state() == State::kCollecting) {
    // With fewer cores than ranks, a rank that spins may keep from its core the one it waits for.
    spin_while(exchange, State::kCollecting, world_size_ <= core_count() ? 300 : 0);
    std::unique_lock lock(mutex_);
    ++exchange.sleepers_;
    const bool has_changed =
        exchange.changed_.wait_for(lock, std::min(timeout, kLongestTimeout),
                                   [&] { return exchange.state() != State::kCollecting; });
    --exchange.sleepers_;
    if (!has_changed) {
      expire(exchange, caller, timeout);
    }
  }
  help(exchange, caller);
  if (!exchange.is_over()) {
    spin_while(exchange, State::kReady, 100);
    std::unique_lock lock(mutex_);
    exchange.changed_.wait(lock, [&] { return exchange.is_over(); });
  }
  throw_if_failed(exchange, caller);
}

void Rendezvous::help(Exchange& exchange, int caller) {
  if (exchange.state() == State::kReady && exchange.do_all_unclaimed(caller)) {
    finish(exchange);
  }
}

// The last portion is done, and nobody looks at the calls any more.
void Rendezvous::finish(Exchange& exchange) {
  if (exchange.first_error_ == nullptr) {
    // Before the others are told, so that they find their tensors' memory theirs alone.
    std::vector<Call>().swap(exchange.calls_);
    {
      const std::lock_guard lock(mutex_);
      exchange.set_state(State::kDone);
    }
    exchange.changed_.notify_all();
    return;
  }
  const auto failure = std::make_shared<const Failure>(
      Failure{Failure::Kind::kWorkFailed, {}, exchange.first_error_});
  const std::lock_guard lock(mutex_);
  fail(exchange, failure);
  break_group(failure);
}

void Rendezvous::expire_if_due(Exchange& exchange, int caller,
                               std::chrono::steady_clock::time_point posted_at,
                               milliseconds timeout) {
  if (exchange.state() != State::kCollecting ||
      std::chrono::steady_clock::now() - posted_at < timeout) {
    return;
  }
  const std::lock_guard lock(mutex_);
  if (exchange.state() == State::kCollecting) {
    expire(exchange, caller, timeout);
  }
}

void Rendezvous::expire(Exchange& exchange, int caller, milliseconds timeout) {
  break_group(timeout_failure(exchange.calls_[caller], exchange.sequence(),
                              exchange.missing_ranks(), timeout, exchange.mismatch()));
}

void Rendezvous::throw_if_failed(const Exchange& exchange, int caller) const {
  if (exchange.state() != State::kFailed) {
    return;
  }
  exchange.failure_->raise(where(exchange.calls_[caller], exchange.sequence()));
}

void Rendezvous::order_current_stream_after(Exchange& exchange, at::Device device) const {
  if (!device.is_cpu()) {
    in_process::order_current_stream_after(device, exchange.done_events_);
  }
}

void Rendezvous::leave(int rank, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  const auto left_before = [&](const Breach& breach) { return breach.rank == rank; };
  if (std::any_of(breaches_.begin(), breaches_.end(), left_before)) {
    return;
  }
  const auto failure = left_failure(rank, reason);
  breaches_.push_back({posted_[rank], rank, failure});
  fail_collectives_from(posted_[rank], failure);
  fail_transfers(rank, failure);
  for (const auto& part : parts_) {
    const auto place = std::find(part.ranks.begin(), part.ranks.end(), rank);
    const auto rendezvous = part.rendezvous.lock();
    if (place != part.ranks.end() && rendezvous != nullptr) {
      rendezvous->leave(static_cast<int>(place - part.ranks.begin()), reason);
    }
  }
}

std::shared_ptr<Rendezvous> Rendezvous::split(const std::vector<int>& ranks, int rank) {
  const std::lock_guard lock(mutex_);
  std::erase_if(parts_, [](const Part& part) { return part.rendezvous.expired(); });
  const auto place =
      static_cast<std::size_t>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
  auto part = std::find_if(parts_.begin(), parts_.end(), [&](const Part& each) {
    return each.ranks == ranks && !each.has_asked[place];
  });
  if (part == parts_.end()) {
    auto rendezvous = std::make_shared<Rendezvous>(
        static_cast<int>(ranks.size()), fmt::format("{}, {}", name_, describe_ranks(ranks)));
    for (const auto& breach : breaches_) {
      const auto gone = std::find(ranks.begin(), ranks.end(), breach.rank);
      if (gone != ranks.end()) {
        rendezvous->leave(static_cast<int>(gone - ranks.begin()), breach.failure->message);
      }
    }
    part = parts_.insert(parts_.end(),
                         {ranks, std::vector<bool>(ranks.size()), rendezvous, rendezvous});
  }
  part->has_asked[place] = true;
  auto result = part->rendezvous.lock();
  if (std::find(part->has_asked.begin(), part->has_asked.end(), false) == part->has_asked.end()) {
    part->kept.reset();
  }
  return result;
}

void Rendezvous::abort(int rank) {
  const std::lock_guard lock(mutex_);
  break_group(abort_failure(rank));
}

std::uint64_t Rendezvous::posted(int rank) const {
  const std::lock_guard lock(mutex_);
  return posted_[rank];
}

void Rendezvous::break_group(const FailurePtr& failure) {
  breaches_.push_back({first_open_, kEveryRank, failure});
  fail_collectives_from(first_open_, failure);
  fail_transfers(kEveryRank, failure);
}

void Rendezvous::fail(Exchange& exchange, const FailurePtr& failure) {
  exchange.failure_ = failure;
  exchange.set_state(State::kFailed);
  exchange.changed_.notify_all();
}

void Rendezvous::fail_collectives_from(std::uint64_t sequence, const FailurePtr& failure) {
  while (first_open_ + open_.size() > sequence) {
    fail(*open_.back(), failure);
    open_.pop_back();
  }
}

void Rendezvous::fail_transfers(int missing_rank, const FailurePtr& failure) {
  for (auto& [channel, exchanges] : open_transfers_) {
    std::erase_if(exchanges, [&](const ExchangePtr& exchange) {
      const bool concerned =
          missing_rank == kEveryRank || exchange->missing_ranks().front() == missing_rank;
      if (concerned) {
        fail(*exchange, failure);
      }
      return concerned;
    });
  }
  std::erase_if(open_transfers_, [](const auto& entry) { return entry.second.empty(); });
}

FailurePtr Rendezvous::failure_of_collective(std::uint64_t sequence) const {
  for (const auto& breach : breaches_) {
    if (breach.from_sequence <= sequence) {
      return breach.failure;
    }
  }
  return nullptr;
}

FailurePtr Rendezvous::failure_of_transfer(int rank, int peer) const {
  for (const auto& breach : breaches_) {
    if (breach.rank == kEveryRank || breach.rank == rank || breach.rank == peer) {
      return breach.failure;
    }
  }
  return nullptr;
}

}  // namespace fsdp::in_process
