// A backend as a vendor writes one: a shared library with one C function, that needs libtorch and
// fsdp/backend_library.h and nothing else of the project. This one works over the store that the
// ranks meet in: every rank lays its bytes down under a key of its own, and reads the others'. Sums
// are in rank order, in the tensor's dtype. Each call is done when it returns.
//
//   fsdp::InitOptions options;
//   options.backend_library = "libfsdp_backend_plugin.so";
//   fsdp::init_process_group(options);

#include <ATen/ATen.h>
#include <fsdp/backend_library.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Bytes = std::vector<std::uint8_t>;

// TCPStore refuses values of more than 8 MiB.
constexpr std::int64_t kLargestValue = std::int64_t{4} << 20;

class DoneWork : public c10d::Work {
 public:
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
  void synchronize() override {}
};

class StoreBackend : public c10d::Backend {
 public:
  StoreBackend(StorePtr store, int rank, int size, std::chrono::milliseconds timeout)
      : c10d::Backend(rank, size), store_(std::move(store)), timeout_(timeout) {}

  const std::string getBackendName() const override { return "example_plugin"; }
  void shutdown() override { is_shut_down_ = true; }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& /*options*/) override {
    require(output.numel() == input.numel() * size_,
            "an all-gather whose output is not one input "
            "for each rank");
    const auto pieces = exchange(input);
    for (int rank = 0; rank < size_; ++rank) {
      output.view(-1).narrow(0, rank * input.numel(), input.numel()).copy_(pieces[rank]);
    }
    return done();
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    require(input.numel() == output.numel() * size_,
            "a reduce-scatter whose input is not one "
            "output for each rank");
    const auto sum = reduce_in_order(exchange(input), options.reduceOp);
    output.view(-1).copy_(sum.narrow(0, rank_ * output.numel(), output.numel()));
    return done();
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    require(tensors.size() == 1, "an all-reduce of several tensors");
    tensors[0].view(-1).copy_(reduce_in_order(exchange(tensors[0]), options.reduceOp));
    return done();
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    require(tensors.size() == 1, "a broadcast of several tensors");
    require(options.rootRank >= 0 && options.rootRank < size_, "a root that does not exist");
    tensors[0].view(-1).copy_(exchange(tensors[0]).at(options.rootRank));
    return done();
  }

  WorkPtr barrier(const c10d::BarrierOptions& /*options*/) override {
    exchange(at::zeros({1}, at::kByte));
    return done();
  }

 private:
  static WorkPtr done() { return c10::make_intrusive<DoneWork>(); }

  void require(bool condition, const char* seen) const {
    if (!condition) {
      throw std::invalid_argument("rank " + std::to_string(rank_) + ": example_plugin: " + seen +
                                  " is not supported");
    }
  }

  /// What every rank brought, flat, in rank order.
  Tensors exchange(const at::Tensor& mine) {
    require(!is_shut_down_, "a collective after shutdown()");
    require(mine.is_contiguous() && mine.is_cpu(), "a tensor that is not dense on the CPU");
    const auto call = std::to_string(number_++);
    const auto bytes = static_cast<std::int64_t>(mine.nbytes());
    const auto* data = static_cast<const std::uint8_t*>(mine.const_data_ptr());
    std::vector<std::string> keys;
    for (std::int64_t at = 0; at == 0 || at < bytes; at += kLargestValue) {
      const auto key = call + "/" + std::to_string(at) + "/";
      const auto size = std::min(kLargestValue, bytes - at);
      store_->set(key + std::to_string(rank_), Bytes(data + at, data + at + size));
      keys.push_back(key);
    }
    Tensors pieces;
    for (int rank = 0; rank < size_; ++rank) {
      pieces.push_back(fetch(keys, rank, mine));
    }
    remove_when_all_have_read(call, keys);
    return pieces;
  }

  at::Tensor fetch(const std::vector<std::string>& keys, int rank, const at::Tensor& like) {
    auto piece = at::empty({like.numel()}, like.options());
    auto* data = static_cast<std::uint8_t*>(piece.data_ptr());
    auto left = static_cast<std::int64_t>(piece.nbytes());
    for (const auto& prefix : keys) {
      const auto value = wait_for(prefix + std::to_string(rank), rank);
      require(static_cast<std::int64_t>(value.size()) == std::min(left, kLargestValue),
              "a call in which ranks bring different sizes");
      std::memcpy(data, value.data(), value.size());
      data += value.size();
      left -= static_cast<std::int64_t>(value.size());
    }
    return piece;
  }

  Bytes wait_for(const std::string& key, int rank) {
    try {
      store_->wait({key}, timeout_);
      return store_->get(key);
    } catch (const c10::Error& error) {
      const std::string text = error.what_without_backtrace();
      throw std::runtime_error("rank " + std::to_string(rank_) +
                               ": example_plugin: nothing came from rank " + std::to_string(rank) +
                               " (" + text.substr(0, text.find('\n')) +
                               "); wanted: its part of the collective; see how it ended");
    }
  }

  void remove_when_all_have_read(const std::string& call, const std::vector<std::string>& keys) {
    if (store_->add(call + "/read", 1) != size_) {
      return;
    }
    for (const auto& key : keys) {
      for (int rank = 0; rank < size_; ++rank) {
        store_->deleteKey(key + std::to_string(rank));
      }
    }
    store_->deleteKey(call + "/read");
  }

  at::Tensor reduce_in_order(const Tensors& pieces, const c10d::ReduceOp& reduction) const {
    auto result = pieces.at(0);
    for (int rank = 1; rank < size_; ++rank) {
      switch (reduction.op_) {
        case c10d::ReduceOp::SUM:
        case c10d::ReduceOp::AVG:
          result.add_(pieces[rank]);
          break;
        case c10d::ReduceOp::MIN:
          result = at::minimum(result, pieces[rank]);
          break;
        case c10d::ReduceOp::MAX:
          result = at::maximum(result, pieces[rank]);
          break;
        default:
          require(false, "this reduction");
      }
    }
    return reduction.op_ == c10d::ReduceOp::AVG ? result.div_(size_) : result;
  }

  StorePtr store_;
  std::chrono::milliseconds timeout_;
  std::uint64_t number_ = 0;
  bool is_shut_down_ = false;
};

c10d::Backend* make(const fsdp::BackendRequest& request) {
  if (request.version != fsdp::kBackendLibraryVersion || request.size != sizeof(request)) {
    throw std::runtime_error("built for version " + std::to_string(fsdp::kBackendLibraryVersion) +
                             " of fsdp/backend_library.h, called with version " +
                             std::to_string(request.version) + "; build it again");
  }
  if (request.store == nullptr) {
    throw std::runtime_error("called without a store, which it works over");
  }
  // A connection of its own: waiting in it does not keep the program's waiting.
  return c10::make_intrusive<StoreBackend>(request.store->clone(), request.rank, request.world_size,
                                           std::chrono::milliseconds(request.timeout_ms))
      .release();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) c10d::Backend* fsdp_make_backend(
    const fsdp::BackendRequest* request, char* error, std::size_t error_size) {
  try {
    return make(*request);
  } catch (const std::exception& problem) {
    std::snprintf(error, error_size, "%s", problem.what());
    return nullptr;
  }
}
