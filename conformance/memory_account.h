#pragma once
// An exact count of the bytes of CPU tensors: what was asked of libtorch's CPU allocator and not
// given back, now and at the most. It knows nothing of pages, of memory that malloc keeps, or of
// what other threads do, so it is the same in every run. What kernels take from elsewhere (a BLAS's
// own buffers) and what C++ objects take (the graph itself) is not in it.

#include <atomic>
#include <cstdint>
#include <memory>

namespace shardproof {

/// Counts for whoever holds it: a rank, a part of a program.
///
/// A block belongs to the account of the thread that allocated it, for life: it is taken off that
/// account when it is freed, whichever thread frees it and whether the account is still open there.
class MemoryAccount {
 public:
  /// The first account of a process puts a counting allocator in front of libtorch's CPU allocator,
  /// for good (c10::SetCPUAllocator); threads without an account pass through it uncounted. Make
  /// the first before threads that allocate are started. Throws fsdp::UsageError if another
  /// allocator is set with a higher priority, or one that cannot free by address (raw_deleter).
  MemoryAccount();

  /// Bytes now, in blocks that were allocated for this account.
  std::int64_t held() const { return count_->held; }
  /// The most that was held since the account was made, or since the last reset_peak().
  std::int64_t peak() const { return count_->peak; }
  /// Blocks that were allocated, ever. Those of no bytes do not count.
  std::int64_t blocks() const { return count_->blocks; }
  /// Lets the peak begin at what is held now.
  void reset_peak() { count_->peak = count_->held.load(); }

 private:
  friend class MemoryScope;
  friend class CountingAllocator;
  /// Outlives the account while there are blocks.
  struct Count {
    std::atomic<std::int64_t> held = 0;
    std::atomic<std::int64_t> peak = 0;
    std::atomic<std::int64_t> blocks = 0;
  };
  std::shared_ptr<Count> count_;
};

/// While it lives, what this thread allocates goes to the account. The innermost scope counts.
class MemoryScope {
 public:
  explicit MemoryScope(MemoryAccount& account);
  ~MemoryScope();
  MemoryScope(const MemoryScope&) = delete;
  MemoryScope& operator=(const MemoryScope&) = delete;

 private:
  std::shared_ptr<MemoryAccount::Count> previous_;
};

}  // namespace shardproof
