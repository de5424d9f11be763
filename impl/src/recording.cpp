#include "fsdp/recording.h"

#include <fmt/format.h>

#include <utility>

#include "fsdp/errors.h"
#include "wrapping_backend.h"

namespace fsdp {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

std::string name_of(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return "sum";
    case c10d::ReduceOp::AVG:
      return "avg";
    case c10d::ReduceOp::MIN:
      return "min";
    case c10d::ReduceOp::MAX:
      return "max";
    case c10d::ReduceOp::PRODUCT:
      return "product";
    default:
      return "other";
  }
}

class RecordingBackend : public WrappingBackend {
 public:
  RecordingBackend(BackendPtr inner, std::string name, std::shared_ptr<CollectiveLog> log)
      : WrappingBackend(std::move(inner)), name_(std::move(name)), log_(std::move(log)) {}

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    add("all_gather", output, "");
    return inner_->_allgather_base(output, input, options);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    add("reduce_scatter", input, name_of(options.reduceOp));
    return inner_->_reduce_scatter_base(output, input, options);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    add("all_reduce", tensors.at(0), name_of(options.reduceOp));
    return inner_->allreduce(tensors, options);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    add("broadcast", tensors.at(0), "");
    return inner_->broadcast(tensors, options);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    log_->push_back({name_, "barrier", std::string(CollectiveLabel::current()), {}, 0, ""});
    return inner_->barrier(options);
  }

 private:
  void add(const char* operation, const at::Tensor& tensor, std::string reduction) {
    log_->push_back({name_, operation, std::string(CollectiveLabel::current()),
                     tensor.scalar_type(), tensor.numel(), std::move(reduction)});
  }

  std::string name_;
  std::shared_ptr<CollectiveLog> log_;
};

}  // namespace

std::string describe(const RecordedCollective& collective) {
  return fmt::format("{} {} {}{}{} {}{}", collective.operation, collective.group,
                     collective.reduction, collective.reduction.empty() ? "" : " ",
                     c10::toString(collective.dtype), collective.numel,
                     collective.label.empty() ? std::string() : " for " + collective.label);
}

BackendPtr record_collectives(BackendPtr group, std::string name,
                              std::shared_ptr<CollectiveLog> log) {
  if (group == nullptr || log == nullptr) {
    throw UsageError("record_collectives: the group or the log is null; wanted: both");
  }
  return c10::make_intrusive<RecordingBackend>(std::move(group), std::move(name), std::move(log));
}

}  // namespace fsdp
