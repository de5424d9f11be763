#include "ranks.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <cstring>

#include "fsdp/errors.h"

namespace fsdp {
namespace {

// The first letter of what a rank says in all_or_none.
enum class Outcome : char { value = 'v', file = 'f', state = 's', usage = 'u', other = 'e' };

std::string outcome_of(const std::function<std::string()>& body) {
  const auto say = [](Outcome outcome, const std::string& text) {
    return static_cast<char>(outcome) + text;
  };
  try {
    return say(Outcome::value, body());
  } catch (const PeerError&) {
    throw;  // there is nobody left to tell
  } catch (const FileError& error) {
    return say(Outcome::file, error.what());
  } catch (const StateError& error) {
    return say(Outcome::state, error.what());
  } catch (const UsageError& error) {
    return say(Outcome::usage, error.what());
  } catch (const c10::Error& error) {
    return say(Outcome::other, error.what_without_backtrace());
  } catch (const std::exception& error) {
    return say(Outcome::other, error.what());
  }
}

[[noreturn]] void throw_outcome(Outcome outcome, const std::string& message) {
  switch (outcome) {
    case Outcome::file:
      throw FileError(message);
    case Outcome::state:
      throw StateError(message);
    case Outcome::usage:
      throw UsageError(message);
    default:
      throw Error(message);
  }
}

}  // namespace

at::Device collective_device(const BackendPtr& group, at::Device device) {
  // NCCL moves device memory only; shards that are kept on the CPU travel by way of a device.
  if (device.is_cpu() && group != nullptr && group->getBackendName() == "nccl") {
    return c10::impl::VirtualGuardImpl(at::kCUDA).getDevice();
  }
  return device;
}

c10::intrusive_ptr<c10d::Work> start_broadcast(const BackendPtr& group, const at::Tensor& tensor,
                                               int root) {
  std::vector<at::Tensor> tensors = {tensor};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  return group->broadcast(tensors, options);
}

Ranks::Ranks(BackendPtr group, at::Device device)
    : group_(std::move(group)), device_(collective_device(group_, device)) {}

std::vector<std::string> Ranks::exchange(const std::string& mine) const {
  if (size() == 1) {
    return {mine};
  }
  auto length = at::full({1}, static_cast<std::int64_t>(mine.size()), at::kLong).to(device_);
  auto lengths = at::empty({size()}, length.options());
  group_->_allgather_base(lengths, length)->wait();
  lengths = lengths.cpu();
  const auto* bytes = lengths.const_data_ptr<std::int64_t>();

  // Texts may be of very different lengths, and most of the time all but one are short: one
  // broadcast for each that is not empty, instead of an all-gather padded to the longest.
  std::vector<at::Tensor> texts;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (int root = 0; root < size(); ++root) {
    texts.push_back(at::empty({bytes[root]}, at::kByte));
    if (root == rank() && !mine.empty()) {
      std::memcpy(texts.back().mutable_data_ptr(), mine.data(), mine.size());
    }
    texts.back() = texts.back().to(device_);
    if (bytes[root] > 0) {
      works.push_back(start_broadcast(group_, texts.back(), root));
    }
  }
  for (const auto& work : works) {
    work->wait();
  }
  std::vector<std::string> said;
  for (const auto& text : texts) {
    const auto here = text.cpu();
    said.emplace_back(static_cast<const char*>(here.const_data_ptr()), here.nbytes());
  }
  return said;
}

std::vector<std::string> Ranks::all_or_none(const std::function<std::string()>& body) const {
  auto said = exchange(outcome_of(body));
  for (std::size_t i = 0; i < said.size(); ++i) {
    const auto outcome = static_cast<Outcome>(said[i].front());
    said[i].erase(0, 1);
    if (outcome != Outcome::value) {
      throw_outcome(outcome, fmt::format("rank {}: {}", i, said[i]));
    }
  }
  return said;
}

void Ranks::broadcast(const at::Tensor& tensor, int root) const {
  if (size() > 1 && tensor.numel() > 0) {
    start_broadcast(group_, tensor, root)->wait();
  }
}

}  // namespace fsdp
