#include "process_backend.h"

#include <utility>

#include "collective_backend.h"
#include "process_hub.h"
#include "process_work.h"

namespace fsdp {
namespace {

using in_process::Call;
using in_process::Operation;
using processes::GroupPtr;
using processes::HubPtr;
using std::chrono::milliseconds;

class ProcessBackend : public CollectiveBackend {
 public:
  ProcessBackend(HubPtr hub, GroupPtr group, milliseconds timeout)
      : CollectiveBackend(group->rank, static_cast<int>(group->ranks.size()), timeout),
        hub_(std::move(hub)),
        group_(std::move(group)) {}
  ~ProcessBackend() override {
    hub_->leave(group_, "its backend was destroyed");
    if (group_ == hub_->world()) {
      hub_->close(timeout());
    }
  }

  const std::string getBackendName() const override { return hub_->transport_name(); }
  std::uint64_t getSequenceNumberForGroup() override { return hub_->posted(*group_); }
  void abort() override { hub_->abort(group_); }
  void leave(const std::string& reason) override { hub_->leave(group_, reason); }

 protected:
  WorkPtr post(Call call, c10d::OpType type, milliseconds timeout) override {
    auto results = results_of(call);
    const auto device = call.device();
    const int caller =
        call.is_transfer() ? (call.operation == Operation::kSend ? 0 : 1) : getRank();
    auto exchange = hub_->post(group_, std::move(call));
    return c10::make_intrusive<processes::ProcessWork>(
        processes::ProcessWork::Place{hub_, group_, std::move(exchange), caller}, getRank(), type,
        device, std::move(results), timeout);
  }

  BackendPtr split_into(const std::vector<int>& ranks, int place) override {
    auto part = c10::make_intrusive<ProcessBackend>(hub_, hub_->split(group_, ranks, place),
                                                    this->timeout());
    if (hub_->reduces_natively()) {
      // What follows waits for all of them without end, so they must be known to be there.
      part->barrier({})->wait();
      hub_->prepare(*part->group_);
    }
    return part;
  }

 private:
  HubPtr hub_;
  GroupPtr group_;
};

}  // namespace

BackendPtr make_process_backend(std::unique_ptr<processes::Transport> transport, int rank,
                                int world_size, milliseconds timeout, const std::string& name) {
  auto hub = std::make_shared<processes::Hub>(std::move(transport), rank, world_size, name);
  const auto world = hub->world();
  return c10::make_intrusive<ProcessBackend>(std::move(hub), world, timeout);
}

}  // namespace fsdp
