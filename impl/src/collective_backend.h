#pragma once
// The part of a process group that all of this library's backends have in common: it checks a
// rank's call by itself and puts it into the form in which the ranks' calls meet
// (in_process_call.h), so that every backend takes and refuses the same calls with the same
// messages. What becomes of a call that is in order is the derived class's matter.

#include <chrono>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "in_process_call.h"

namespace fsdp {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class CollectiveBackend : public c10d::Backend {
 public:
  CollectiveBackend(int rank, int world_size, std::chrono::milliseconds timeout)
      : c10d::Backend(rank, world_size), timeout_(timeout) {}

  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  // Every rank counts from 0, so there is nothing to agree on.
  void setSequenceNumberForGroup() override {}
  void shutdown() override { leave("it shut down"); }
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& options) override;

  /// See `leave_group`.
  virtual void leave(const std::string& reason) = 0;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<std::int64_t>& output_sizes,
                        std::vector<std::int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int receiver, int tag) override;
  WorkPtr recv(Tensors& tensors, int sender, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

 protected:
  using Call = in_process::Call;
  using Operation = in_process::Operation;
  using Slots = in_process::Slots;
  using Transfer = in_process::Transfer;

  /// Takes part in the collective. `timeout` is positive.
  virtual WorkPtr post(in_process::Call call, c10d::OpType type,
                       std::chrono::milliseconds timeout) = 0;
  /// The group of these ranks, which are different, exist, and have this one at `place`.
  virtual c10::intrusive_ptr<c10d::Backend> split_into(const std::vector<int>& ranks,
                                                       int place) = 0;
  std::chrono::milliseconds timeout() const { return timeout_; }

 private:
  Call make_call(Operation operation) const;
  Call make_rooted_call(Operation operation, std::int64_t root) const;
  Call make_reducing_call(Operation operation, const c10d::ReduceOp& reduction) const;
  Transfer make_transfer(const Call& call, Slots from, Slots to, std::int64_t numel) const;
  Transfer gathering(const Call& call, const at::Tensor& input, const at::Tensor& output) const;
  Transfer scattering(const Call& call, const at::Tensor& input, const at::Tensor& output) const;

  [[noreturn]] void refuse(const Call& call, const std::string& problem) const;
  void check_tensor(const Call& call, const at::Tensor& tensor) const;
  void check_alike(const Call& call, const Transfer& transfer) const;
  void check_slots(const Call& call, const Slots& slots, std::int64_t numel) const;
  void check_count(const Call& call, const char* what, std::size_t seen, std::size_t wanted) const;
  void check_flat(const Call& call, const at::Tensor& part, const at::Tensor& whole) const;
  void check_reduction(const Call& call) const;
  Slots cut(const Call& call, const at::Tensor& tensor,
            const std::vector<std::int64_t>& sizes) const;

  WorkPtr submit(Call call, c10d::OpType type, std::chrono::milliseconds timeout);
  WorkPtr exchange_with(Operation operation, Tensors& tensors, int peer, int tag,
                        c10d::OpType type);

  std::chrono::milliseconds timeout_;
};

/// What the call fills, in the order of its transfers.
Tensors results_of(const in_process::Call& call);

}  // namespace fsdp
