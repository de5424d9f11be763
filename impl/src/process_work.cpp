#include "process_work.h"

#include <utility>

namespace fsdp::processes {

ProcessWork::ProcessWork(Place place, int rank, c10d::OpType operation, at::Device device,
                         std::vector<at::Tensor> results, std::chrono::milliseconds timeout)
    : c10d::Work(rank, operation),
      place_(std::move(place)),
      device_(device),
      results_(std::move(results)),
      timeout_(timeout),
      posted_at_(std::chrono::steady_clock::now()) {}

bool ProcessWork::isCompleted() {
  auto& exchange = *place_.exchange;
  place_.hub->expire_if_due(exchange, place_.caller, posted_at_, timeout_);
  return exchange.is_over();
}

bool ProcessWork::isSuccess() const {
  return place_.exchange->state() == Exchange::State::kDone;
}

std::exception_ptr ProcessWork::exception() const {
  try {
    place_.hub->throw_if_failed(*place_.exchange, place_.caller);
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

bool ProcessWork::wait(std::chrono::milliseconds timeout) {
  place_.hub->wait(*place_.exchange, place_.caller, timeout > kNoTimeout ? timeout : timeout_);
  synchronize();
  return true;
}

void ProcessWork::synchronize() {
  if (isSuccess() && !device_.is_cpu()) {
    in_process::order_current_stream_after(device_, place_.exchange->done_events());
  }
}

}  // namespace fsdp::processes
