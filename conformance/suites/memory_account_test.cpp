// The account of memory, held to allocations of known size.

#include "conformance/memory_account.h"

#include <c10/core/CPUAllocator.h>
#include <fsdp/process_group.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <barrier>
#include <thread>
#include <vector>

namespace shardproof {
namespace {

using torch::Tensor;

TEST(MemoryAccount, CountsWhatIsHeldAndTheMostThatWas) {
  MemoryAccount account;
  const MemoryScope scope(account);
  EXPECT_EQ(account.held(), 0);
  auto a = torch::empty({10});  // float32
  EXPECT_EQ(account.held(), 40);
  {
    const auto b = torch::empty({3, 5}, torch::kDouble);
    const auto view = b.view({15});
    EXPECT_EQ(account.held(), 160);
  }
  EXPECT_EQ(account.held(), 40);
  EXPECT_EQ(account.peak(), 160);
  EXPECT_EQ(account.blocks(), 2);
  account.reset_peak();
  EXPECT_EQ(account.peak(), 40);
  a.reset();
  EXPECT_EQ(account.held(), 0);
  EXPECT_EQ(account.peak(), 40);
}

TEST(MemoryAccount, SizesThatAreNoMultipleOfAnythingAreCountedAsAsked) {
  MemoryAccount account;
  const MemoryScope scope(account);
  std::vector<Tensor> kept;
  std::int64_t want = 0;
  for (const std::int64_t size : {1, 7, 63, 64, 65, 4097, 1 << 20, 0}) {
    kept.push_back(torch::empty({size}, torch::kByte));
    want += size;
    EXPECT_EQ(account.held(), want);
  }
  EXPECT_EQ(account.blocks(), 7);
}

TEST(MemoryAccount, AStorageThatGrowsOrIsEmptiedIsCountedAnew) {
  MemoryAccount account;
  const MemoryScope scope(account);
  auto a = torch::empty({4}, torch::kByte);
  a.resize_({100});
  EXPECT_EQ(account.held(), 100);
  EXPECT_EQ(account.peak(), 104);  // both, while it is copied
  a.storage().unsafeGetStorageImpl()->set_nbytes(0);
  a.storage().set_data_ptr_noswap(c10::GetCPUAllocator()->allocate(0));
  EXPECT_EQ(account.held(), 0);
}

TEST(MemoryAccount, ABlockIsTakenOffTheAccountThatAllocatedItWhicheverThreadFreesIt) {
  MemoryAccount mine;
  MemoryAccount other;
  Tensor a;
  {
    const MemoryScope scope(mine);
    a = torch::empty({100}, torch::kByte);
  }
  std::thread([&] {
    const MemoryScope scope(other);
    const auto b = torch::empty({30}, torch::kByte);
    EXPECT_EQ(mine.held(), 100);
    a.reset();
    EXPECT_EQ(mine.held(), 0);
    EXPECT_EQ(other.held(), 30);
  }).join();
  EXPECT_EQ(other.held(), 0);
  EXPECT_EQ(mine.peak(), 100);
  EXPECT_EQ(other.peak(), 30);
}

TEST(MemoryAccount, ABlockThatIsFreedByItsAddressAloneIsTakenOffToo) {
  // As oneDNN's kernels do with their scratch memory.
  MemoryAccount account;
  auto* const allocator = c10::GetCPUAllocator();
  void* uncounted = allocator->raw_allocate(50);
  const MemoryScope scope(account);
  void* counted = allocator->raw_allocate(100);
  EXPECT_EQ(account.held(), 100);
  allocator->raw_deallocate(uncounted);
  EXPECT_EQ(account.held(), 100);
  allocator->raw_deallocate(counted);
  EXPECT_EQ(account.held(), 0);
  const auto x = torch::ones({14, 48});
  const auto before = account.held();
  torch::gelu(x);
  EXPECT_EQ(account.held(), before);
}

TEST(MemoryAccount, BlocksMayOutliveTheirAccount) {
  Tensor a;
  {
    MemoryAccount account;
    const MemoryScope scope(account);
    a = torch::ones({5});
  }
  EXPECT_EQ(a.sum().item<float>(), 5);
}

TEST(MemoryAccount, TheInnermostScopeCountsAndOutsideOfScopesNothingDoes) {
  MemoryAccount outer;
  MemoryAccount inner;
  std::vector<Tensor> kept;
  const auto take = [&](std::int64_t bytes) {
    kept.push_back(torch::empty({bytes}, torch::kByte));
  };
  {
    const MemoryScope one(outer);
    take(1);
    {
      const MemoryScope two(inner);
      take(10);
    }
    take(100);
  }
  take(1000);
  EXPECT_EQ(outer.held(), 101);
  EXPECT_EQ(inner.held(), 10);
}

TEST(MemoryAccount, EachRankHasItsOwnAndWhatAGraphSavesIsInIt) {
  const MemoryAccount first;  // before there are other threads
  std::barrier all(4);        // so that the scopes are open at the same time
  fsdp::run_ranks(4, [&all](fsdp::RankContext& context) {
    const std::int64_t n = 8 * (context.rank + 1);
    const auto x = torch::ones({n}).requires_grad_();
    MemoryAccount account;
    const MemoryScope scope(account);
    all.arrive_and_wait();
    {
      // tanh keeps its result, which is the one tensor that is left.
      auto y = x.tanh();
      EXPECT_EQ(account.held(), 4 * n);
      y = y.tanh();
      EXPECT_EQ(account.held(), 2 * 4 * n);
      y.backward(torch::ones({n}));
    }
    // The gradient.
    EXPECT_EQ(account.held(), 4 * n);
    all.arrive_and_wait();
  });
}

}  // namespace
}  // namespace shardproof
