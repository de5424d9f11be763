#pragma once
// The ranks that save or load together: what one of them cannot do, none does.

#include <functional>
#include <string>
#include <vector>

#include "fsdp/process_group.h"

namespace fsdp {

/// Where the group's collectives want tensors that live on `device`.
at::Device collective_device(const BackendPtr& group, at::Device device);

c10::intrusive_ptr<c10d::Work> start_broadcast(const BackendPtr& group, const at::Tensor& tensor,
                                               int root);

class Ranks {
 public:
  /// A null group is one rank alone.
  Ranks(BackendPtr group, at::Device device);
  int rank() const { return group_ == nullptr ? 0 : group_->getRank(); }
  int size() const { return group_ == nullptr ? 1 : group_->getSize(); }
  at::Device device() const { return device_; }

  /// What every rank says, in rank order.
  std::vector<std::string> exchange(const std::string& mine) const;
  /// What `body` returns on every rank. If it throws on some, every rank throws what the first of
  /// them threw, with its type if it is one of the library's.
  std::vector<std::string> all_or_none(const std::function<std::string()>& body) const;
  void broadcast(const at::Tensor& tensor, int root) const;

 private:
  BackendPtr group_;
  at::Device device_;
};

}  // namespace fsdp
