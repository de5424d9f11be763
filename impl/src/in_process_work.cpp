#include "in_process_work.h"

#include <utility>

namespace fsdp::in_process {

InProcessWork::InProcessWork(Place place, int rank, c10d::OpType operation, at::Device device,
                             std::vector<at::Tensor> results, std::chrono::milliseconds timeout)
    : c10d::Work(rank, operation),
      place_(std::move(place)),
      device_(device),
      results_(std::move(results)),
      timeout_(timeout),
      posted_at_(std::chrono::steady_clock::now()) {}

InProcessWork::~InProcessWork() {
  place_.rendezvous->help(*place_.exchange, place_.caller);
}

bool InProcessWork::isCompleted() {
  auto& exchange = *place_.exchange;
  place_.rendezvous->expire_if_due(exchange, place_.caller, posted_at_, timeout_);
  place_.rendezvous->help(exchange, place_.caller);
  return exchange.is_over();
}

bool InProcessWork::isSuccess() const {
  return place_.exchange->state() == Exchange::State::kDone;
}

std::exception_ptr InProcessWork::exception() const {
  try {
    place_.rendezvous->throw_if_failed(*place_.exchange, place_.caller);
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

bool InProcessWork::wait(std::chrono::milliseconds timeout) {
  place_.rendezvous->wait(*place_.exchange, place_.caller,
                          timeout > kNoTimeout ? timeout : timeout_);
  synchronize();
  return true;
}

void InProcessWork::synchronize() {
  if (isSuccess()) {
    place_.rendezvous->order_current_stream_after(*place_.exchange, device_);
  }
}

}  // namespace fsdp::in_process
