#include "store_transport.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "fsdp/errors.h"

namespace fsdp::processes {
namespace {

// A TCPStore (with libuv, the default) cuts the connection of a client that sends more than 8 MB in
// one value. A quarter of that keeps the server's answers to the other ranks short, and is large
// enough that the cost of a message does not show.
constexpr std::size_t kMaxChunk = 2 * 1024 * 1024;

// How much is put into the store before looking whether something has come.
constexpr std::size_t kMaxPutAtOnce = kMaxChunk;
constexpr int kMaxTakenAtOnce = 64;

// The head of every message in the store.
struct Head {
  std::int32_t sender = 0;
  std::int32_t is_data = 0;
  Lane lane;
};

Bytes with_head(const Head& head, const void* data, std::size_t size) {
  Bytes bytes(sizeof(Head) + size);
  std::memcpy(bytes.data(), &head, sizeof(Head));
  if (size > 0) {
    std::memcpy(bytes.data() + sizeof(Head), data, size);
  }
  return bytes;
}

}  // namespace

StoreTransport::StoreTransport(c10::intrusive_ptr<c10d::Store> store, const std::string& prefix,
                               int rank, int world_size)
    : rank_(rank), world_size_(world_size), mailbox_(std::move(store), prefix, rank, world_size) {}

void StoreTransport::post(int peer, BytesPtr message) {
  Outgoing outgoing;
  outgoing.peer = peer;
  outgoing.message = std::move(message);
  outgoing_.push_back(std::move(outgoing));
}

RequestPtr StoreTransport::send(int peer, Lane lane, Stretch from) {
  Outgoing outgoing;
  outgoing.peer = peer;
  outgoing.lane = lane;
  outgoing.from = std::move(from);
  outgoing.request = std::make_shared<Request>();
  outgoing_.push_back(std::move(outgoing));
  return outgoing_.back().request;
}

RequestPtr StoreTransport::receive(int peer, Lane lane, Stretch to) {
  auto request = std::make_shared<Request>();
  const ChannelKey key(peer, lane);
  channels_[key].wanted.push_back({std::move(to), 0, request});
  fill(key);
  return request;
}

void StoreTransport::cancel(const RequestPtr& request) {
  std::erase_if(outgoing_, [&](const Outgoing& each) { return each.request == request; });
  // With all of its lane, for the bytes of what came after it would be put into the wrong place.
  std::erase_if(channels_, [&](const auto& entry) {
    const auto& wanted = entry.second.wanted;
    return std::any_of(wanted.begin(), wanted.end(),
                       [&](const Incoming& each) { return each.request == request; });
  });
}

bool StoreTransport::progress(Receiver& receiver) {
  if (world_size_ == 1) {
    return false;
  }
  try {
    const bool has_put = put_some();
    const auto messages = mailbox_.take(kMaxTakenAtOnce);
    for (const auto& message : messages) {
      accept(message, receiver);
    }
    return has_put || !messages.empty();
  } catch (const c10::Error& error) {
    throw Error(
        fmt::format("the store does not answer any more ({}). Has the process that holds "
                    "it ended?",
                    error.what_without_backtrace()));
  }
}

bool StoreTransport::put_some() {
  std::size_t put = 0;
  while (!outgoing_.empty() && put < kMaxPutAtOnce) {
    auto& outgoing = outgoing_.front();
    if (outgoing.message != nullptr) {
      mailbox_.put(outgoing.peer,
                   with_head({rank_, 0, {}}, outgoing.message->data(), outgoing.message->size()));
      put += outgoing.message->size() + 1;
      outgoing_.pop_front();
      continue;
    }
    const auto chunk = std::min(kMaxChunk, outgoing.from.size - outgoing.done);
    mailbox_.put(outgoing.peer,
                 with_head({rank_, 1, outgoing.lane}, outgoing.from.data + outgoing.done, chunk));
    outgoing.done += chunk;
    put += chunk;
    if (outgoing.done == outgoing.from.size) {
      outgoing.request->finish();
      outgoing_.pop_front();
    }
  }
  return put > 0;
}

void StoreTransport::accept(const Bytes& message, Receiver& receiver) {
  Head head;
  if (message.size() < sizeof(Head)) {
    throw Error(
        fmt::format("a message of {} bytes in the store; wanted {} or more. Does something "
                    "else use the same keys?",
                    message.size(), sizeof(Head)));
  }
  std::memcpy(&head, message.data(), sizeof(Head));
  Bytes rest(message.begin() + sizeof(Head), message.end());
  if (head.is_data == 0) {
    receiver.on_message(head.sender, std::move(rest));
    return;
  }
  const ChannelKey key(head.sender, head.lane);
  channels_[key].early.push_back(std::move(rest));
  fill(key);
}

// Puts the bytes that have come where they are wanted.
void StoreTransport::fill(const ChannelKey& key) {
  auto& [wanted, early] = channels_[key];
  while (!wanted.empty() && !early.empty()) {
    auto& first = wanted.front();
    auto& bytes = early.front();
    const auto size = std::min(first.to.size - first.done, bytes.size());
    std::memcpy(first.to.data + first.done, bytes.data(), size);
    first.done += size;
    if (size == bytes.size()) {
      early.pop_front();
    } else {
      bytes.erase(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
    }
    if (first.done == first.to.size) {
      first.request->finish();
      wanted.pop_front();
    }
  }
  if (wanted.empty() && early.empty()) {
    channels_.erase(key);
  }
}

void StoreTransport::close(bool /*has_failed*/) {
  if (world_size_ > 1) {
    mailbox_.close();
  }
}

}  // namespace fsdp::processes
