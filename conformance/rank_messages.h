#pragma once
// Texts that the ranks of a process group send each other: what they are about to train, and what
// came of it.

#include <fsdp/process_group.h>

#include <string>
#include <vector>

namespace shardproof {

/// Every rank of the group calls the same of these in the same order. Errors are those of the
/// group's collectives.
class RankMessages {
 public:
  /// `device`: where the group's collectives want tensors.
  explicit RankMessages(fsdp::BackendPtr group, at::Device device = at::kCPU);
  int rank() const { return group_->getRank(); }
  int size() const { return group_->getSize(); }

  /// What every rank says, in rank order, on every rank.
  std::vector<std::string> exchange(const std::string& mine) const;
  /// What every rank says, in rank order, on rank 0; nothing on the others.
  std::vector<std::string> gather_on_first(const std::string& mine) const;
  /// What rank 0 says, on every rank.
  std::string from_first(const std::string& mine) const;

 private:
  std::vector<std::int64_t> sizes(const std::string& mine) const;

  fsdp::BackendPtr group_;
  at::Device device_;
};

}  // namespace shardproof
