#include "store_mailbox.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <utility>

namespace fsdp::processes {
namespace {

std::vector<std::uint8_t> as_value(std::int64_t number) {
  const auto text = fmt::format("{}", number);
  return {text.begin(), text.end()};
}

std::int64_t as_number(const std::vector<std::uint8_t>& value) {
  return std::stoll(std::string(value.begin(), value.end()));
}

}  // namespace

StoreMailbox::StoreMailbox(c10::intrusive_ptr<c10d::Store> store, std::string prefix, int rank,
                           int world_size)
    : store_(std::move(store)), prefix_(std::move(prefix)), rank_(rank), world_size_(world_size) {
  try {
    store_->queueLen(inbox(rank_));
  } catch (const c10::NotImplementedError&) {
    has_queues_ = false;
  }
}

std::string StoreMailbox::inbox(int rank) const {
  return fmt::format("{}to/{}", prefix_, rank);
}

std::string StoreMailbox::numbered(int rank, std::int64_t number) const {
  return fmt::format("{}/{}", inbox(rank), number);
}

void StoreMailbox::put(int receiver, const Bytes& message) {
  if (has_queues_) {
    store_->queuePush(inbox(receiver), message);
    return;
  }
  const auto number = store_->add(inbox(receiver), 1);
  store_->set(numbered(receiver, number), message);
}

std::vector<Bytes> StoreMailbox::take(int most) {
  std::vector<Bytes> messages;
  if (has_queues_) {
    const auto count = std::min<std::int64_t>(store_->queueLen(inbox(rank_)), most);
    for (std::int64_t i = 0; i < count; ++i) {
      messages.push_back(store_->queuePop(inbox(rank_), /*block=*/false));
    }
    return messages;
  }
  while (static_cast<int>(messages.size()) < most && store_->check({numbered(rank_, next_)})) {
    messages.push_back(store_->get(numbered(rank_, next_)));
    store_->deleteKey(numbered(rank_, next_));
    ++next_;
  }
  return messages;
}

void StoreMailbox::close() {
  if (!has_queues_) {
    store_->set(fmt::format("{}read/{}", prefix_, rank_), as_value(next_));
  }
  if (store_->add(prefix_ + "closed", 1) == world_size_) {
    remove_all();
  }
}

// Those that closed earlier may have been told things after that.
void StoreMailbox::remove_all() {
  for (int rank = 0; rank < world_size_; ++rank) {
    if (has_queues_) {
      for (auto count = store_->queueLen(inbox(rank)); count > 0; --count) {
        store_->queuePop(inbox(rank), /*block=*/false);
      }
      continue;
    }
    const auto read = fmt::format("{}read/{}", prefix_, rank);
    const auto end = store_->add(inbox(rank), 0);
    for (auto number = as_number(store_->get(read)); number <= end; ++number) {
      store_->deleteKey(numbered(rank, number));
    }
    store_->deleteKey(read);
    store_->deleteKey(inbox(rank));
  }
  store_->deleteKey(prefix_ + "closed");
}

}  // namespace fsdp::processes
