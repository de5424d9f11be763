#pragma once
// The handle of one collective call by one rank of an in_process group.

#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "in_process_rendezvous.h"

namespace fsdp::in_process {

class InProcessWork : public c10d::Work {
 public:
  /// `caller` is the rank's number in the exchange.
  struct Place {
    std::shared_ptr<Rendezvous> rendezvous;
    ExchangePtr exchange;
    int caller;
  };
  InProcessWork(Place place, int rank, c10d::OpType operation, at::Device device,
                std::vector<at::Tensor> results, std::chrono::milliseconds timeout);
  /// A call that nobody waits for is carried out all the same.
  ~InProcessWork() override;

  /// Does what work there is to do. The timeout counts from the call here, from its own start in
  /// `wait`.
  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  /// The tensors that the call fills.
  std::vector<at::Tensor> result() override { return results_; }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override;
  void blockCurrentStream() override { synchronize(); }
  void abort() override { place_.rendezvous->abort(rank_); }
  std::uint64_t getSequencenumber() const override { return place_.exchange->sequence(); }

 private:
  Place place_;
  at::Device device_;
  std::vector<at::Tensor> results_;
  std::chrono::milliseconds timeout_;
  std::chrono::steady_clock::time_point posted_at_;
};

}  // namespace fsdp::in_process
