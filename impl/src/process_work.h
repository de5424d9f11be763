#pragma once
// The handle of one call by this process's rank.

#include <chrono>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "process_hub.h"

namespace fsdp::processes {

class ProcessWork : public c10d::Work {
 public:
  /// `caller` is the rank's number in the exchange.
  struct Place {
    HubPtr hub;
    GroupPtr group;
    ExchangePtr exchange;
    int caller;
  };
  ProcessWork(Place place, int rank, c10d::OpType operation, at::Device device,
              std::vector<at::Tensor> results, std::chrono::milliseconds timeout);

  /// The timeout counts from the call here, from its own start in `wait`.
  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  /// The tensors that the call fills.
  std::vector<at::Tensor> result() override { return results_; }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override;
  void blockCurrentStream() override { synchronize(); }
  void abort() override { place_.hub->abort(place_.group); }
  std::uint64_t getSequencenumber() const override { return place_.exchange->sequence(); }

 private:
  Place place_;
  at::Device device_;
  std::vector<at::Tensor> results_;
  std::chrono::milliseconds timeout_;
  std::chrono::steady_clock::time_point posted_at_;
};

}  // namespace fsdp::processes
