#include "mpi_transport.h"

#include <algorithm>
#include <cstring>

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

}  // namespace

MpiTransport::MpiTransport(std::chrono::milliseconds patience)
    : world_(MpiWorld::get()), group_(world_.next_group()), patience_(patience) {}

MpiTransport::~MpiTransport() {
  const std::lock_guard lock(world_.mutex());
  for (const auto& active : active_) {
    for (const auto piece : active.pieces) {
      world_.keep_alive(piece, active.memory.owner);
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
