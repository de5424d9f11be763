#pragma once
// Messages to ranks by way of a c10d::Store: each rank has an inbox to which all others add, and
// which it alone empties. Nothing here waits for another rank.

#include <cstdint>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "transport.h"

namespace fsdp::processes {

class StoreMailbox {
 public:
  /// `prefix` is that of all its keys, and of nothing else.
  StoreMailbox(c10::intrusive_ptr<c10d::Store> store, std::string prefix, int rank, int world_size);

  void put(int receiver, const Bytes& message);
  /// What has come for this rank, at most `most` messages, in the order in which they were put.
  std::vector<Bytes> take(int most);
  /// This rank neither puts nor takes any more. The last one to say so removes what is left.
  void close();

 private:
  std::string inbox(int rank) const;
  std::string numbered(int rank, std::int64_t number) const;
  void remove_all();

  c10::intrusive_ptr<c10d::Store> store_;
  const std::string prefix_;
  const int rank_;
  const int world_size_;
  bool has_queues_ = true;
  std::int64_t next_ = 1;  // without queues, the number of the next message of this rank's inbox
};

}  // namespace fsdp::processes
