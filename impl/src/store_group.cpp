#include "fsdp/store_group.h"

#include <fmt/format.h>

#include <thread>
#include <utility>

#include "collective_failure.h"
#include "fsdp/errors.h"
#include "process_backend.h"
#include "store_transport.h"

namespace fsdp {
namespace {

using std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

void check_arguments(const StorePtr& store, int rank, int world_size,
                     const StoreGroupOptions& options) {
  if (store == nullptr) {
    throw UsageError(
        fmt::format("rank {}: make_store_group: the store is null; wanted: one that "
                    "all ranks share",
                    rank));
  }
  if (world_size < 1) {
    throw UsageError(
        fmt::format("rank {}: make_store_group: {} ranks; wanted 1 or more", rank, world_size));
  }
  if (rank < 0 || rank >= world_size) {
    throw UsageError(
        fmt::format("make_store_group: rank {} of {} does not exist; wanted is one in "
                    "[0, {})",
                    rank, world_size, world_size));
  }
  if (options.timeout <= milliseconds::zero()) {
    throw UsageError(
        fmt::format("rank {}: make_store_group: a timeout of {} ms; wanted more than "
                    "0",
                    rank, options.timeout.count()));
  }
}

// The meeting of the ranks that make a group: it gives the group keys of its own.
class Joining {
 public:
  Joining(StorePtr store, int rank, int world_size, const StoreGroupOptions& options)
      : store_(std::move(store)),
        rank_(rank),
        world_size_(world_size),
        options_(options),
        name_(fmt::format("fsdp/{}/", options.name)) {
    store_->set(size_key(rank_), fmt::format("{}", world_size_));
  }
  Joining(const Joining&) = delete;
  Joining& operator=(const Joining&) = delete;

  /// Returns when all are there, with the prefix of the group's keys.
  std::string join() {
    // No rank gets to its next group of this name and size before all have come to this one.
    const auto sized = fmt::format("{}{}/", name_, world_size_);
    const auto number = (store_->add(sized + "joined", 1) - 1) / world_size_;
    prefix_ = fmt::format("{}{}/", sized, number);
    if (store_->add(here(rank_), 1) != 1) {
      throw UsageError(
          fmt::format("rank {}: another process is rank {} of group \"{}\" too; give "
                      "each process a rank of its own",
                      rank_, rank_, options_.name));
    }
    wait_for_others();
    // Not after an error: the others are to find the same one.
    store_->deleteKey(size_key(rank_));
    if (store_->add(prefix_ + "seen", 1) == world_size_) {
      remove_keys();
    }
    return prefix_;
  }

 private:
  using Clock = std::chrono::steady_clock;

  std::string here(int rank) const { return fmt::format("{}here/{}", prefix_, rank); }
  // What a rank that is joining just now was told.
  std::string size_key(int rank) const { return fmt::format("{}size/{}", name_, rank); }

  void wait_for_others() {
    std::vector<std::string> keys;
    for (int rank = 0; rank < world_size_; ++rank) {
      keys.push_back(here(rank));
    }
    const auto start = Clock::now();
    auto pause = std::chrono::microseconds(200);
    while (!store_->check(keys)) {
      const auto waited = Clock::now() - start;
      // A rank that was a little slower in joining the group before this one is no reason to worry.
      if (waited > std::min<Clock::duration>(options_.timeout, std::chrono::seconds(1))) {
        compare_sizes();
      }
      if (waited >= options_.timeout) {
        throw TimeoutError(fmt::format(
            "rank {}: {} did not join group \"{}\" of {} ranks within {} ms. Were they started, "
            "with the same store and the same world size?",
            rank_, in_process::describe_ranks(missing()), options_.name, world_size_,
            options_.timeout.count()));
      }
      std::this_thread::sleep_for(pause);
      pause = std::min<std::chrono::microseconds>(pause * 2, milliseconds(20));
    }
  }

  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (int rank = 0; rank < world_size_; ++rank) {
      if (!store_->check({here(rank)})) {
        ranks.push_back(rank);
      }
    }
    return ranks;
  }

  void compare_sizes() const {
    for (const int rank : missing()) {
      if (!store_->check({size_key(rank)})) {
        continue;
      }
      std::string told;
      try {
        // It may have joined, and removed the key, since.
        const c10d::StoreTimeoutGuard guard(*store_, milliseconds(200));
        told = store_->get_to_str(size_key(rank));
      } catch (const c10::DistStoreError&) {
        continue;
      }
      if (told != fmt::format("{}", world_size_)) {
        throw UsageError(
            fmt::format("rank {}: group \"{}\" has {} ranks here and {} on rank {}; "
                        "give all processes the same world size",
                        rank_, options_.name, world_size_, told, rank));
      }
    }
  }

  // Everybody has seen that all are there.
  void remove_keys() {
    for (int rank = 0; rank < world_size_; ++rank) {
      store_->deleteKey(here(rank));
    }
    store_->deleteKey(prefix_ + "seen");
  }

  StorePtr store_;
  const int rank_;
  const int world_size_;
  const StoreGroupOptions& options_;
  const std::string name_;
  std::string prefix_;
};

}  // namespace

BackendPtr make_store_group(StorePtr store, int rank, int world_size, StoreGroupOptions options) {
  check_arguments(store, rank, world_size, options);
  std::string prefix;
  auto own = store->clone();
  own->setTimeout(options.timeout);
  if (world_size > 1) {
    prefix = Joining(own, rank, world_size, options).join();
  }
  return make_process_backend(
      std::make_unique<processes::StoreTransport>(std::move(own), prefix, rank, world_size), rank,
      world_size, options.timeout, options.name);
}

}  // namespace fsdp
