#include "conformance/memory_account.h"

#include <c10/core/CPUAllocator.h>
#include <fsdp/errors.h>

#include <cstring>
#include <mutex>
#include <utility>

namespace shardproof {

/// In front of libtorch's own: it hands on what it is asked for, and notes who asked.
class CountingAllocator : public c10::Allocator {
 public:
  using CountPtr = std::shared_ptr<MemoryAccount::Count>;

  explicit CountingAllocator(c10::Allocator& inner) : inner_(inner) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    auto data = inner_.allocate(bytes);
    const auto& count = current();
    if (bytes == 0 || count == nullptr) {
      return data;
    }
    const auto size = static_cast<std::int64_t>(bytes);
    const auto held = count->held += size;
    for (auto peak = count->peak.load();
         peak < held && !count->peak.compare_exchange_weak(peak, held);) {
    }
    ++count->blocks;
    auto block = std::make_unique<Block>(Block{std::move(data), size, count});
    auto* const address = block->data.get();
    return {address, block.release(), &release, c10::Device(c10::kCPU)};
  }
  /// Contexts are not the data, so nothing can be freed by its address alone.
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

  /// The account that this thread allocates for; null for none.
  static CountPtr& current() {
    thread_local CountPtr count;
    return count;
  }

 private:
  struct Block {
    c10::DataPtr data;
    std::int64_t bytes;
    CountPtr count;
  };
  static void release(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    block->count->held -= block->bytes;
  }

  c10::Allocator& inner_;
};

MemoryAccount::MemoryAccount() : count_(std::make_shared<Count>()) {
  static std::once_flag installed;
  std::call_once(installed, [] {
    // Never destroyed: storages remember it, to grow.
    auto* const counting = new CountingAllocator(*c10::GetCPUAllocator());
    c10::SetCPUAllocator(counting, /*priority=*/1);
    if (c10::GetCPUAllocator() != counting) {
      throw fsdp::UsageError(
          "MemoryAccount: the CPU allocator that is set has a priority above 1, so that nothing "
          "would be counted; wanted: one of priority 0 or 1");
    }
  });
}

MemoryScope::MemoryScope(MemoryAccount& account)
    : previous_(std::exchange(CountingAllocator::current(), account.count_)) {}

MemoryScope::~MemoryScope() {
  CountingAllocator::current() = std::move(previous_);
}

}  // namespace shardproof
