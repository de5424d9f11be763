#include "conformance/rank_messages.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

namespace shardproof {
namespace {

/// The text at the start of a tensor of bytes, [size].
at::Tensor packed(const std::string& text, std::int64_t size, at::Device device) {
  auto bytes = at::zeros({size}, at::kByte);
  std::memcpy(bytes.data_ptr(), text.data(), text.size());
  return bytes.to(device);
}

std::string unpacked(const at::Tensor& bytes, std::int64_t size) {
  const auto on_cpu = bytes.cpu();
  return {static_cast<const char*>(on_cpu.const_data_ptr()), static_cast<std::size_t>(size)};
}

}  // namespace

RankMessages::RankMessages(fsdp::BackendPtr group, at::Device device)
    : group_(std::move(group)), device_(device) {}

std::vector<std::int64_t> RankMessages::sizes(const std::string& mine) const {
  auto own = at::full({1}, static_cast<std::int64_t>(mine.size()), at::kLong).to(device_);
  auto all = at::zeros({size()}, own.options());
  group_->_allgather_base(all, own)->wait();
  all = all.cpu();
  const auto* begin = all.const_data_ptr<std::int64_t>();
  return {begin, begin + size()};
}

std::vector<std::string> RankMessages::exchange(const std::string& mine) const {
  const auto lengths = sizes(mine);
  const auto longest = *std::max_element(lengths.begin(), lengths.end());
  auto own = packed(mine, longest, device_);
  auto all = at::empty({size() * longest}, own.options());
  group_->_allgather_base(all, own)->wait();
  std::vector<std::string> texts;
  for (int rank = 0; rank < size(); ++rank) {
    texts.push_back(unpacked(all.narrow(0, rank * longest, longest), lengths[rank]));
  }
  return texts;
}

std::vector<std::string> RankMessages::gather_on_first(const std::string& mine) const {
  const auto lengths = sizes(mine);
  const auto longest = *std::max_element(lengths.begin(), lengths.end());
  std::vector<at::Tensor> own = {packed(mine, longest, device_)};
  std::vector<std::vector<at::Tensor>> all(rank() == 0 ? 1 : 0);
  if (rank() == 0) {
    for (int each = 0; each < size(); ++each) {
      all[0].push_back(at::empty({longest}, own[0].options()));
    }
  }
  c10d::GatherOptions to_first;
  to_first.rootRank = 0;
  group_->gather(all, own, to_first)->wait();
  std::vector<std::string> texts;
  for (std::size_t each = 0; rank() == 0 && each < lengths.size(); ++each) {
    texts.push_back(unpacked(all[0][each], lengths[each]));
  }
  return texts;
}

std::string RankMessages::from_first(const std::string& mine) const {
  const auto length = sizes(rank() == 0 ? mine : std::string())[0];
  std::vector<at::Tensor> bytes = {packed(rank() == 0 ? mine : std::string(), length, device_)};
  c10d::BroadcastOptions from;
  from.rootRank = 0;
  group_->broadcast(bytes, from)->wait();
  return unpacked(bytes[0], length);
}

}  // namespace shardproof
