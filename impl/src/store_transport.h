#pragma once
// A transport over any c10d::Store.

#include <deque>
#include <map>
#include <utility>

#include "store_mailbox.h"
#include "transport.h"

namespace fsdp::processes {

class StoreTransport : public Transport {
 public:
  StoreTransport(c10::intrusive_ptr<c10d::Store> store, const std::string& prefix, int rank,
                 int world_size);

  std::string name() const override { return "store"; }
  void post(int peer, BytesPtr message) override;
  RequestPtr send(int peer, Lane lane, Stretch from) override;
  RequestPtr receive(int peer, Lane lane, Stretch to) override;
  void cancel(const RequestPtr& request) override;
  bool progress(Receiver& receiver) override;
  bool is_flushed() const override { return outgoing_.empty(); }
  void close(bool has_failed) override;

 private:
  // A message, or if that is null a stretch of which `done` bytes have been sent.
  struct Outgoing {
    int peer = 0;
    BytesPtr message;
    Lane lane;
    Stretch from;
    std::size_t done = 0;
    RequestPtr request;
  };
  struct Incoming {
    Stretch to;
    std::size_t done = 0;
    RequestPtr request;
  };
  // What one rank sends this one in a lane.
  struct Channel {
    std::deque<Incoming> wanted;
    std::deque<Bytes> early;  // bytes that nobody has asked for yet
  };
  using ChannelKey = std::pair<int, Lane>;

  bool put_some();
  void accept(const Bytes& message, Receiver& receiver);
  void fill(const ChannelKey& key);

  const int rank_;
  const int world_size_;
  StoreMailbox mailbox_;
  std::deque<Outgoing> outgoing_;
  std::map<ChannelKey, Channel> channels_;
};

}  // namespace fsdp::processes
