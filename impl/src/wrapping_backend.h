#pragma once
// What decorators of a backend have in common: all that isn't a collective is passed on.

#include <utility>

#include "fsdp/process_group.h"

namespace fsdp {

class WrappingBackend : public c10d::Backend {
 public:
  explicit WrappingBackend(BackendPtr inner)
      : c10d::Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  Backend& inner() const { return *inner_; }

  const std::string getBackendName() const override { return inner_->getBackendName(); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return inner_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { inner_->setSequenceNumberForGroup(); }
  std::uint64_t getSequenceNumberForGroup() override { return inner_->getSequenceNumberForGroup(); }
  void waitForPendingWorks() override { inner_->waitForPendingWorks(); }
  void eagerConnectSingleDevice(at::Device device) override {
    inner_->eagerConnectSingleDevice(device);
  }
  c10d::ErrorType getError() override { return inner_->getError(); }
  void abort() override { inner_->abort(); }
  void shutdown() override { inner_->shutdown(); }
  bool supportsSplitting() const override { return inner_->supportsSplitting(); }
  BackendPtr split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                   const c10::intrusive_ptr<Options>& options) override {
    return inner_->split(store, ranks, options);
  }

 protected:
  BackendPtr inner_;
};

}  // namespace fsdp
