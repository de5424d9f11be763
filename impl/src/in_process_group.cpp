// The in_process backend: posts the calls of ranks that are threads where they meet
// (in_process_rendezvous.h).

#include <fmt/format.h>

#include <utility>

#include "collective_backend.h"
#include "fsdp/errors.h"
#include "fsdp/process_group.h"
#include "in_process_rendezvous.h"
#include "in_process_work.h"

namespace fsdp {
namespace {

using in_process::Call;
using in_process::Operation;
using in_process::Rendezvous;
using std::chrono::milliseconds;

class InProcessBackend : public CollectiveBackend {
 public:
  InProcessBackend(int rank, int world_size, std::shared_ptr<Rendezvous> rendezvous,
                   milliseconds timeout)
      : CollectiveBackend(rank, world_size, timeout), rendezvous_(std::move(rendezvous)) {}
  ~InProcessBackend() override { rendezvous_->leave(rank_, "its backend was destroyed"); }

  const std::string getBackendName() const override { return "in_process"; }
  std::uint64_t getSequenceNumberForGroup() override { return rendezvous_->posted(rank_); }
  void abort() override { rendezvous_->abort(rank_); }
  void leave(const std::string& reason) override { rendezvous_->leave(rank_, reason); }

 protected:
  WorkPtr post(Call call, c10d::OpType type, milliseconds timeout) override;
  BackendPtr split_into(const std::vector<int>& ranks, int place) override {
    return c10::make_intrusive<InProcessBackend>(place, static_cast<int>(ranks.size()),
                                                 rendezvous_->split(ranks, rank_), this->timeout());
  }

 private:
  std::shared_ptr<Rendezvous> rendezvous_;
};

WorkPtr InProcessBackend::post(Call call, c10d::OpType type, milliseconds timeout) {
  auto results = results_of(call);
  const auto device = call.device();
  const bool is_transfer = call.is_transfer();
  const int caller = is_transfer ? (call.operation == Operation::kSend ? 0 : 1) : rank_;
  auto exchange = is_transfer ? rendezvous_->post_transfer(std::move(call))
                              : rendezvous_->post(std::move(call));
  return c10::make_intrusive<in_process::InProcessWork>(
      in_process::InProcessWork::Place{rendezvous_, std::move(exchange), caller}, rank_, type,
      device, std::move(results), timeout);
}

}  // namespace

std::vector<BackendPtr> make_in_process_group(int world_size, InProcessOptions options) {
  if (world_size < 1 || world_size > kMaxInProcessRanks) {
    throw UsageError(fmt::format("an in_process group of {} ranks; wanted 1 to {}", world_size,
                                 kMaxInProcessRanks));
  }
  if (options.timeout <= kNoTimeout) {
    throw UsageError(fmt::format("an in_process group with a timeout of {} ms; wanted more than 0",
                                 options.timeout.count()));
  }
  const auto rendezvous = std::make_shared<Rendezvous>(world_size, options.name);
  std::vector<BackendPtr> backends;
  for (int rank = 0; rank < world_size; ++rank) {
    backends.push_back(
        c10::make_intrusive<InProcessBackend>(rank, world_size, rendezvous, options.timeout));
  }
  return backends;
}

}  // namespace fsdp
