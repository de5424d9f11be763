#pragma once
// A c10d::Store that keeps its timeout. TCPStore waits for its server's answers without end: a
// server that is stopped, or no store at all, would hang a rank for good (seen with libtorch 2.11:
// the constructor, add, get, check and wait). Here each call is made on a thread of its own, and
// given up when its time is over.

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace fsdp {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// A thread that does one task after another, each with a deadline. A task that misses it keeps the
/// thread; the caller goes on, and further tasks are refused at once.
class BoundedThread {
 public:
  BoundedThread();
  ~BoundedThread();
  BoundedThread(const BoundedThread&) = delete;
  BoundedThread& operator=(const BoundedThread&) = delete;
  /// Whether the task ended in time; throws what it throws. A task that did not may still be
  /// running when the caller is long gone, so it must own all that it uses.
  bool run(std::function<void()> task, std::chrono::milliseconds timeout);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

/// `inner`, where each call fails after `inner`'s timeout, or the one given to wait(), and a
/// little. What it throws then is what a store throws for a key that does not come:
/// c10::DistStoreError.
StorePtr make_bounded_store(StorePtr inner);

}  // namespace fsdp
