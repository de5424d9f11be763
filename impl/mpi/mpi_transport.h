#pragma once
// A transport over MPI.

#include <deque>
#include <map>
#include <utility>

#include "mpi_world.h"
#include "transport.h"

namespace fsdp::processes {

class MpiTransport : public Transport {
 public:
  /// `patience` is how long the process's exit may take after a failure.
  /// FSDP_MPI_REDUCTION=native makes MPI reduce (MPI_Iallreduce, MPI_Ireduce_scatter_block,
  /// MPI_Ireduce), in an order of its own; unset or rank_order, we do, in rank order. Throws
  /// UsageError if it is anything else, or not the same on every rank.
  explicit MpiTransport(std::chrono::milliseconds patience);
  ~MpiTransport() override;

  std::string name() const override { return "mpi"; }
  void post(int peer, BytesPtr message) override;
  RequestPtr send(int peer, Lane lane, Stretch from) override;
  RequestPtr receive(int peer, Lane lane, Stretch to) override;
  void cancel(const RequestPtr& request) override;
  bool progress(Receiver& receiver) override;
  bool is_flushed() const override;
  bool reduces_natively() const override { return is_native_; }
  std::string why_not_native(c10d::ReduceOp::RedOpType reduction, c10::ScalarType dtype,
                             std::int64_t numel) const override;
  void prepare(std::uint64_t group, const std::vector<int>& members) override {
    world_.make_communicator(group, members);
  }
  RequestPtr reduce(std::uint64_t group, NativeReduction reduction) override;
  void close(bool has_failed) override;

 private:
  using ChannelKey = std::pair<int, Lane>;
  // What MPI sends or fills at present: a stretch in pieces.
  struct Active {
    std::vector<MPI_Request> pieces;
    Stretch memory;
    RequestPtr request;
    bool is_receive = false;
    Stretch result;  // of a reduction
  };
  struct Wanted {
    Stretch to;
    RequestPtr request;
  };
  // What one rank sends this one in a lane.
  struct Channel {
    std::deque<Wanted> wanted;
    std::deque<int> announced;  // tags
  };

  void match(const ChannelKey& key);
  void start(int peer, int tag, Active active);
  bool test_active();
  bool read_setting() const;

  MpiWorld& world_;
  const std::uint32_t group_;
  const std::chrono::milliseconds patience_;
  const bool is_native_;
  std::vector<Active> active_;
  std::map<ChannelKey, Channel> channels_;
};

}  // namespace fsdp::processes
