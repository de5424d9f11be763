#include "mpi_transport.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>

#include "fsdp/errors.h"
#include "reduce_kernels.h"

namespace fsdp::processes {
namespace {

// MPI counts in an int.
constexpr std::size_t kMaxPiece = std::size_t{1} << 30;

// The head of every message. A stretch is announced by a message with the tag under which it comes,
// for MPI's tags are too few to hold a lane.
struct Head {
  std::int32_t announced_tag = 0;  // 0: this is a message for the receiver
  Lane lane;
};

// MPI_DATATYPE_NULL if it has none.
MPI_Datatype type_of(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kFloat:
      return MPI_FLOAT;
    case c10::kDouble:
      return MPI_DOUBLE;
    case c10::kByte:
      return MPI_UINT8_T;
    case c10::kChar:
      return MPI_INT8_T;
    case c10::kShort:
      return MPI_INT16_T;
    case c10::kInt:
      return MPI_INT32_T;
    case c10::kLong:
      return MPI_INT64_T;
    case c10::kUInt16:
      return MPI_UINT16_T;
    case c10::kUInt32:
      return MPI_UINT32_T;
    case c10::kUInt64:
      return MPI_UINT64_T;
    case c10::kBool:
      return MPI_C_BOOL;
    default:
      return MPI_DATATYPE_NULL;
  }
}

// For bool, sum and max are "or", product and min are "and".
MPI_Op operation_of(c10d::ReduceOp::RedOpType reduction, c10::ScalarType dtype) {
  const bool is_bool = dtype == c10::kBool;
  switch (reduction) {
    case c10d::ReduceOp::PRODUCT:
      return is_bool ? MPI_LAND : MPI_PROD;
    case c10d::ReduceOp::MIN:
      return is_bool ? MPI_LAND : MPI_MIN;
    case c10d::ReduceOp::MAX:
      return is_bool ? MPI_LOR : MPI_MAX;
    default:
      return is_bool ? MPI_LOR : MPI_SUM;
  }
}

}  // namespace

MpiTransport::MpiTransport(std::chrono::milliseconds patience)
    : world_(MpiWorld::get()),
      group_(world_.next_group()),
      patience_(patience),
      is_native_(read_setting()) {
  if (is_native_) {
    std::vector<int> everyone(world_.size());
    std::iota(everyone.begin(), everyone.end(), 0);
    world_.make_communicator(0, everyone);
  }
}

bool MpiTransport::read_setting() const {
  const char* text = std::getenv("FSDP_MPI_REDUCTION");
  const std::string setting = text == nullptr || *text == '\0' ? "rank_order" : text;
  // 2 is a setting that does not exist, so that all ranks hear of it.
  const int mine = setting == "native" ? 1 : (setting == "rank_order" ? 0 : 2);
  int lowest = mine;
  int highest = mine;
  {
    const std::lock_guard lock(world_.mutex());
    check_mpi(MPI_Allreduce(&mine, &lowest, 1, MPI_INT, MPI_MIN, world_.communicator()),
              "MPI_Allreduce");
    check_mpi(MPI_Allreduce(&mine, &highest, 1, MPI_INT, MPI_MAX, world_.communicator()),
              "MPI_Allreduce");
  }
  if (mine == 2) {
    throw UsageError(
        fmt::format("rank {}: FSDP_MPI_REDUCTION is \"{}\"; wanted: rank_order, native, "
                    "or nothing",
                    world_.rank(), setting));
  }
  if (lowest != highest) {
    throw UsageError(
        fmt::format("rank {}: FSDP_MPI_REDUCTION is {} here and something else on "
                    "another rank; give all ranks the same",
                    world_.rank(), setting));
  }
  if (mine == 1) {
    world_.require_multiple_threads();
  }
  return mine == 1;
}

std::string MpiTransport::why_not_native(c10d::ReduceOp::RedOpType reduction, c10::ScalarType dtype,
                                         std::int64_t numel) const {
  if (type_of(dtype) == MPI_DATATYPE_NULL) {
    return fmt::format(
        "no native {} of {}: MPI has no such type. Unset FSDP_MPI_REDUCTION, or "
        "reduce in another dtype",
        in_process::reduction_name(reduction), c10::toString(dtype));
  }
  if (numel > std::numeric_limits<int>::max()) {
    return fmt::format(
        "no native {} of {} elements: MPI counts up to {}. Unset FSDP_MPI_REDUCTION, "
        "or reduce in pieces",
        in_process::reduction_name(reduction), numel, std::numeric_limits<int>::max());
  }
  return {};
}

RequestPtr MpiTransport::reduce(std::uint64_t group, NativeReduction reduction) {
  using Kind = NativeReduction::Kind;
  const std::lock_guard lock(world_.mutex());
  const auto type = type_of(reduction.dtype);
  const auto operation = operation_of(reduction.reduction, reduction.dtype);
  const auto communicator = world_.communicator_of(group);
  const auto count = static_cast<int>(reduction.numel);
  MPI_Request piece = MPI_REQUEST_NULL;
  if (reduction.kind == Kind::kAllReduce) {
    check_mpi(MPI_Iallreduce(MPI_IN_PLACE, reduction.to.data, count, type, operation, communicator,
                             &piece),
              "MPI_Iallreduce");
  } else if (reduction.kind == Kind::kReduceScatter) {
    check_mpi(MPI_Ireduce_scatter_block(reduction.from.data, reduction.to.data, count, type,
                                        operation, communicator, &piece),
              "MPI_Ireduce_scatter_block");
  } else {
    check_mpi(MPI_Ireduce(reduction.from.data, reduction.to.data, count, type, operation,
                          reduction.root, communicator, &piece),
              "MPI_Ireduce");
  }
  Active active;
  active.pieces.push_back(piece);
  active.memory = std::move(reduction.from);
  active.result = std::move(reduction.to);
  active.request = std::make_shared<Request>();
  active_.push_back(std::move(active));
  return active_.back().request;
}

MpiTransport::~MpiTransport() {
  const std::lock_guard lock(world_.mutex());
  for (const auto& active : active_) {
    for (const auto piece : active.pieces) {
      world_.keep_alive(
          piece, std::make_shared<std::pair<Stretch, Stretch>>(active.memory, active.result));
    }
  }
  world_.forget(group_);
}

void MpiTransport::post(int peer, BytesPtr message) {
  const std::lock_guard lock(world_.mutex());
  const Head head;
  Bytes bytes(sizeof(head) + message->size());
  std::memcpy(bytes.data(), &head, sizeof(head));
  std::copy(message->begin(), message->end(), bytes.begin() + sizeof(head));
  world_.send(peer, group_, bytes);
}

RequestPtr MpiTransport::send(int peer, Lane lane, Stretch from) {
  const std::lock_guard lock(world_.mutex());
  const Head head{world_.next_tag(peer), lane};
  Bytes bytes(sizeof(head));
  std::memcpy(bytes.data(), &head, sizeof(head));
  world_.send(peer, group_, bytes);
  Active active;
  active.memory = std::move(from);
  active.request = std::make_shared<Request>();
  auto request = active.request;
  start(peer, head.announced_tag, std::move(active));
  return request;
}

RequestPtr MpiTransport::receive(int peer, Lane lane, Stretch to) {
  const std::lock_guard lock(world_.mutex());
  auto request = std::make_shared<Request>();
  const ChannelKey key(peer, lane);
  channels_[key].wanted.push_back({std::move(to), request});
  match(key);
  return request;
}

void MpiTransport::match(const ChannelKey& key) {
  auto& [wanted, announced] = channels_[key];
  while (!wanted.empty() && !announced.empty()) {
    Active active;
    active.memory = std::move(wanted.front().to);
    active.request = std::move(wanted.front().request);
    active.is_receive = true;
    const int tag = announced.front();
    wanted.pop_front();
    announced.pop_front();
    start(key.first, tag, std::move(active));
  }
  if (wanted.empty() && announced.empty()) {
    channels_.erase(key);
  }
}

void MpiTransport::start(int peer, int tag, Active active) {
  for (std::size_t begin = 0; begin < active.memory.size; begin += kMaxPiece) {
    const auto size = static_cast<int>(std::min(kMaxPiece, active.memory.size - begin));
    auto* data = active.memory.data + begin;
    MPI_Request piece = MPI_REQUEST_NULL;
    if (active.is_receive) {
      check_mpi(MPI_Irecv(data, size, MPI_BYTE, peer, tag, world_.communicator(), &piece),
                "MPI_Irecv");
    } else {
      check_mpi(MPI_Isend(data, size, MPI_BYTE, peer, tag, world_.communicator(), &piece),
                "MPI_Isend");
    }
    active.pieces.push_back(piece);
  }
  active_.push_back(std::move(active));
}

void MpiTransport::cancel(const RequestPtr& request) {
  const std::lock_guard lock(world_.mutex());
  std::erase_if(channels_, [&](const auto& entry) {
    const auto& wanted = entry.second.wanted;
    return std::any_of(wanted.begin(), wanted.end(),
                       [&](const Wanted& each) { return each.request == request; });
  });
  for (auto& active : active_) {
    // A send cannot be taken back reliably: its memory is kept until MPI is done with it.
    if (active.request == request && active.is_receive) {
      for (auto& piece : active.pieces) {
        if (piece != MPI_REQUEST_NULL) {
          check_mpi(MPI_Cancel(&piece), "MPI_Cancel");
        }
      }
    }
  }
}

bool MpiTransport::progress(Receiver& receiver) {
  bool did_something = false;
  {
    const std::lock_guard lock(world_.mutex());
    did_something = world_.progress();
    did_something = test_active() || did_something;
  }
  while (true) {
    int sender = 0;
    Bytes bytes;
    Head head;
    {
      const std::lock_guard lock(world_.mutex());
      if (!world_.take(group_, sender, bytes)) {
        return did_something;
      }
      did_something = true;
      std::memcpy(&head, bytes.data(), sizeof(head));
      if (head.announced_tag != 0) {
        const ChannelKey key(sender, head.lane);
        channels_[key].announced.push_back(head.announced_tag);
        match(key);
        continue;
      }
    }
    receiver.on_message(sender, Bytes(bytes.begin() + sizeof(head), bytes.end()));
  }
}

bool MpiTransport::test_active() {
  const auto done = std::erase_if(active_, [](Active& active) {
    int is_done = 0;
    check_mpi(MPI_Testall(static_cast<int>(active.pieces.size()), active.pieces.data(), &is_done,
                          MPI_STATUSES_IGNORE),
              "MPI_Testall");
    if (is_done != 0) {
      active.request->finish();
    }
    return is_done != 0;
  });
  return done > 0;
}

bool MpiTransport::is_flushed() const {
  const std::lock_guard lock(world_.mutex());
  return !world_.has_unsent(group_);
}

void MpiTransport::close(bool has_failed) {
  if (has_failed) {
    world_.expect_trouble(patience_);
  }
}

}  // namespace fsdp::processes
