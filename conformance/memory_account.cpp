#include "conformance/memory_account.h"

#include <c10/core/CPUAllocator.h>
#include <fsdp/errors.h>

#include <array>
#include <cstring>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace shardproof {

/// In front of libtorch's own: it hands on what it is asked for, and notes who asked. Blocks are
/// known by their address, since some kernels (oneDNN's) free by nothing else.
class CountingAllocator : public c10::Allocator {
 public:
  using CountPtr = std::shared_ptr<MemoryAccount::Count>;

  /// Puts the one of this process in its place, and returns it.
  static CountingAllocator& install() {
    // Never destroyed: storages remember it, to grow, and blocks may outlive everything.
    static auto* const counting = [] {
      auto* const inner = c10::GetCPUAllocator();
      if (inner->raw_deleter() == nullptr) {
        throw fsdp::UsageError(
            "MemoryAccount: the CPU allocator that is set cannot free a block by its address; "
            "wanted: libtorch's own, or one with a raw_deleter");
      }
      auto* const made = new CountingAllocator(*inner);
      c10::SetCPUAllocator(made, /*priority=*/1);
      if (c10::GetCPUAllocator() != made) {
        throw fsdp::UsageError(
            "MemoryAccount: the CPU allocator that is set has a priority above 1, so that nothing "
            "would be counted; wanted: one of priority 0 or 1");
      }
      return made;
    }();
    return *counting;
  }

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
    auto* const address = data.get();
    {
      auto& part = part_of(address);
      const std::lock_guard lock(part.mutex);
      part.blocks.emplace(address, Block{size, count});
    }
    data.release_context();
    return {address, address, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
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
    std::int64_t bytes;
    CountPtr count;
  };
  /// So that threads seldom wait for each other.
  struct Part {
    std::mutex mutex;
    std::unordered_map<void*, Block> blocks;
  };

  explicit CountingAllocator(c10::Allocator& inner) : inner_(inner) {}

  Part& part_of(void* address) {
    return parts_[std::hash<std::uintptr_t>()(reinterpret_cast<std::uintptr_t>(address) / 64) %
                  parts_.size()];
  }
  static void release(void* address) {
    auto& self = install();
    {
      // Before the address can be given to somebody else.
      auto& part = self.part_of(address);
      const std::lock_guard lock(part.mutex);
      const auto found = part.blocks.find(address);
      if (found != part.blocks.end()) {
        found->second.count->held -= found->second.bytes;
        part.blocks.erase(found);
      }
    }
    self.inner_.raw_deleter()(address);
  }

  c10::Allocator& inner_;
  std::array<Part, 64> parts_;
};

MemoryAccount::MemoryAccount() : count_(std::make_shared<Count>()) {
  CountingAllocator::install();
}

MemoryScope::MemoryScope(MemoryAccount& account)
    : previous_(std::exchange(CountingAllocator::current(), account.count_)) {}

MemoryScope::~MemoryScope() {
  CountingAllocator::current() = std::move(previous_);
}

}  // namespace shardproof
