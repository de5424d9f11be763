#include "bounded_store.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace fsdp {

using std::chrono::milliseconds;

struct BoundedThread::State {
  struct Task {
    std::function<void()> body;
    std::exception_ptr thrown;
    bool done = false;
  };
  std::mutex mutex;
  std::condition_variable changed;
  std::shared_ptr<Task> task;  // the one that is being done; null when idle
  bool stuck = false;          // a task missed its deadline
  bool ending = false;

  void work() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return task != nullptr || ending; });
      if (task == nullptr) {
        return;
      }
      const auto mine = task;
      lock.unlock();
      try {
        mine->body();
      } catch (...) {
        mine->thrown = std::current_exception();
      }
      mine->body = nullptr;
      lock.lock();
      mine->done = true;
      task = nullptr;
      changed.notify_all();
    }
  }
};

// Detached, because a thread that is stuck cannot be joined; it owns what it uses.
BoundedThread::BoundedThread() : state_(std::make_shared<State>()) {
  std::thread([state = state_] { state->work(); }).detach();
}

BoundedThread::~BoundedThread() {
  const std::scoped_lock lock(state_->mutex);
  state_->ending = true;
  state_->changed.notify_all();
}

bool BoundedThread::run(std::function<void()> body, milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::unique_lock lock(state_->mutex);
  const auto is_free = [&] { return state_->task == nullptr || state_->stuck; };
  if (!state_->changed.wait_until(lock, deadline, is_free) || state_->stuck) {
    return false;
  }
  const auto task = std::make_shared<State::Task>();
  task->body = std::move(body);
  state_->task = task;
  state_->changed.notify_all();
  if (!state_->changed.wait_until(lock, deadline, [&] { return task->done; })) {
    state_->stuck = true;
    state_->changed.notify_all();
    return false;
  }
  if (task->thrown) {
    std::rethrow_exception(task->thrown);
  }
  return true;
}

namespace {

// What a server that is only slow may take beyond the timeout that it was told.
constexpr milliseconds kSlack{500};

using Bytes = std::vector<std::uint8_t>;
using Keys = std::vector<std::string>;

/// Connections that nobody uses, for the next clone(). TCPStore asks the name service for its peer
/// at each new connection, which may take seconds, and a group made anew wants one each time.
struct IdleConnections {
  std::mutex mutex;
  std::vector<StorePtr> stores;

  StorePtr take() {
    const std::scoped_lock lock(mutex);
    if (stores.empty()) {
      return nullptr;
    }
    auto store = std::move(stores.back());
    stores.pop_back();
    return store;
  }
  void put(StorePtr store) {
    const std::scoped_lock lock(mutex);
    stores.push_back(std::move(store));
  }
};

class BoundedStore : public c10d::Store {
 private:
  template <typename Body>
  auto call(const char* operation, Body body) {
    return call(operation, std::move(body), timeout_);
  }

  /// `body` owns its arguments and the task owns the store and the result: both may outlive us.
  template <typename Body>
  auto call(const char* operation, Body body, milliseconds timeout) {
    using Result = std::invoke_result_t<Body, c10d::Store&>;
    if constexpr (std::is_void_v<Result>) {
      finish(
          operation, [store = inner_, body] { body(*store); }, timeout);
    } else {
      const auto result = std::make_shared<std::optional<Result>>();
      finish(
          operation, [store = inner_, body, result] { result->emplace(body(*store)); }, timeout);
      return std::move(**result);
    }
  }

  void finish(const char* operation, std::function<void()> task, milliseconds timeout) {
    // What a call that failed left on its way cannot be told, so the connection is not used again.
    bool answered = false;
    try {
      answered = thread_.run(std::move(task), timeout + kSlack);
    } catch (...) {
      has_failed_ = true;
      throw;
    }
    if (!answered) {
      has_failed_ = true;
      C10_THROW_ERROR(DistStoreError,
                      c10::str("the store's server did not answer ", operation, " within ",
                               timeout.count(), " ms (is its process stopped?)"));
    }
  }

 public:
  BoundedStore(StorePtr inner, std::shared_ptr<IdleConnections> idle, bool goes_back)
      : c10d::Store(inner->getTimeout()),
        inner_(std::move(inner)),
        idle_(std::move(idle)),
        goes_back_(goes_back) {}
  ~BoundedStore() override {
    if (goes_back_ && !has_failed_) {
      idle_->put(std::move(inner_));
    }
  }

  StorePtr clone() override {
    auto connection = idle_->take();
    if (connection == nullptr) {
      connection = call("clone", [](auto& store) { return store.clone(); });
    }
    auto copy = c10::make_intrusive<BoundedStore>(std::move(connection), idle_, true);
    copy->setTimeout(timeout_);
    return copy;
  }
  void setTimeout(const milliseconds& timeout) override {
    timeout_ = timeout;
    call("setTimeout", [timeout](auto& store) { store.setTimeout(timeout); });
  }
  using c10d::Store::set;
  void set(const std::string& key, const Bytes& value) override {
    call("set", [key, value](auto& store) { store.set(key, value); });
  }
  using c10d::Store::compareSet;
  Bytes compareSet(const std::string& key, const Bytes& current, const Bytes& wanted) override {
    return call("compareSet", [key, current, wanted](auto& store) {
      return store.compareSet(key, current, wanted);
    });
  }
  Bytes get(const std::string& key) override {
    return call("get", [key](auto& store) { return store.get(key); });
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    return call("add", [key, value](auto& store) { return store.add(key, value); });
  }
  bool deleteKey(const std::string& key) override {
    return call("deleteKey", [key](auto& store) { return store.deleteKey(key); });
  }
  bool check(const Keys& keys) override {
    return call("check", [keys](auto& store) { return store.check(keys); });
  }
  std::int64_t getNumKeys() override {
    return call("getNumKeys", [](auto& store) { return store.getNumKeys(); });
  }
  void wait(const Keys& keys) override { wait(keys, timeout_); }
  void wait(const Keys& keys, const milliseconds& timeout) override {
    call(
        "wait", [keys, timeout](auto& store) { store.wait(keys, timeout); }, timeout);
  }
  void append(const std::string& key, const Bytes& value) override {
    call("append", [key, value](auto& store) { store.append(key, value); });
  }
  std::vector<Bytes> multiGet(const Keys& keys) override {
    return call("multiGet", [keys](auto& store) { return store.multiGet(keys); });
  }
  void multiSet(const Keys& keys, const std::vector<Bytes>& values) override {
    call("multiSet", [keys, values](auto& store) { store.multiSet(keys, values); });
  }
  bool hasExtendedApi() const override { return inner_->hasExtendedApi(); }
  void queuePush(const std::string& key, const Bytes& value) override {
    call("queuePush", [key, value](auto& store) { store.queuePush(key, value); });
  }
  Bytes queuePop(const std::string& key, bool block) override {
    return call("queuePop", [key, block](auto& store) { return store.queuePop(key, block); });
  }
  std::int64_t queueLen(const std::string& key) override {
    return call("queueLen", [key](auto& store) { return store.queueLen(key); });
  }
  Keys listKeys() override {
    return call("listKeys", [](auto& store) { return store.listKeys(); });
  }

 private:
  StorePtr inner_;
  std::shared_ptr<IdleConnections> idle_;
  bool goes_back_;  // to the idle ones, when we end
  std::atomic<bool> has_failed_ = false;
  BoundedThread thread_;
};

}  // namespace

StorePtr make_bounded_store(StorePtr inner) {
  return c10::make_intrusive<BoundedStore>(std::move(inner), std::make_shared<IdleConnections>(),
                                           /*goes_back=*/false);
}

}  // namespace fsdp
