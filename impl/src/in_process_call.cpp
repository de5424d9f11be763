#include "in_process_call.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "reduce_kernels.h"

namespace fsdp::in_process {
namespace {

// How many items a message lists before it says how many more there are.
constexpr std::size_t kMaxListed = 8;

std::string join_some(const std::vector<std::string>& items, const char* separator) {
  const std::vector<std::string> listed(items.begin(),
                                        items.begin() + std::min(items.size(), kMaxListed));
  auto text = fmt::format("{}", fmt::join(listed, separator));
  if (items.size() > kMaxListed) {
    text += fmt::format("{}and {} more", separator, items.size() - kMaxListed);
  }
  return text;
}

std::string describe_transfer(const Transfer& transfer) {
  if (transfer.numel < 0) {
    return c10::toString(transfer.dtype);
  }
  return fmt::format("{}, {} element{}", c10::toString(transfer.dtype), transfer.numel,
                     transfer.numel == 1 ? "" : "s");
}

bool have_same_signature(const Call& a, const Call& b) {
  const auto same_transfer = [](const Transfer& x, const Transfer& y) {
    return x.dtype == y.dtype && x.numel == y.numel;
  };
  return a.operation == b.operation && a.reduction == b.reduction && a.root == b.root &&
         a.label == b.label && a.device().type() == b.device().type() &&
         std::equal(a.transfers.begin(), a.transfers.end(), b.transfers.begin(), b.transfers.end(),
                    same_transfer);
}

// Ranks whose calls are the same, in the order of their first rank.
struct Party {
  int first = 0;
  std::vector<int> ranks;
};

std::vector<Party> group_by_signature(const std::vector<Call>& calls,
                                      const std::vector<int>& ranks) {
  std::vector<Party> parties;
  for (const int rank : ranks) {
    const auto same = [&](const Party& party) {
      return have_same_signature(calls[party.first], calls[rank]);
    };
    auto party = std::find_if(parties.begin(), parties.end(), same);
    if (party == parties.end()) {
      party = parties.insert(parties.end(), Party{rank, {}});
    }
    party->ranks.push_back(rank);
  }
  return parties;
}

std::string describe_parties(const std::vector<Call>& calls, std::vector<Party> parties) {
  std::stable_sort(parties.begin(), parties.end(),
                   [](const Party& a, const Party& b) { return a.ranks.size() < b.ranks.size(); });
  std::vector<std::string> lines;
  for (const auto& party : parties) {
    lines.push_back(
        fmt::format("{} called {}", describe_ranks(party.ranks), describe(calls[party.first])));
  }
  return join_some(lines, "; ");
}

std::string find_split_mismatch(const std::vector<Call>& calls, const std::vector<int>& ranks) {
  for (const int sender : ranks) {
    for (const int receiver : ranks) {
      const auto given = calls[sender].transfers[0].from[receiver].numel;
      const auto taken = calls[receiver].transfers[0].to[sender].numel;
      if (given != taken) {
        return fmt::format("in all_to_all rank {} gives rank {} {} elements, and rank {} takes {}",
                           sender, receiver, given, receiver, taken);
      }
    }
  }
  return {};
}

// A stretch of memory that a call reads (gives) or writes (takes).
struct Range {
  const char* begin;
  const char* end;
  bool is_written;
};

void add_range(std::vector<Range>& ranges, const Slice& slice, bool is_written) {
  if (slice.numel > 0) {
    ranges.push_back({slice.data(), slice.data() + slice.nbytes(), is_written});
  }
}

// The slot of `slots` that holds what `rank` gives to itself.
int own_slot(const Slots& slots, int rank) {
  return slots.size() == 1 ? 0 : rank;
}

bool is_own_slot_in_place(const Transfer& transfer, int rank) {
  if (transfer.from.size() == 0 || transfer.to.size() == 0) {
    return false;
  }
  const auto from = transfer.from[own_slot(transfer.from, rank)];
  const auto to = transfer.to[own_slot(transfer.to, rank)];
  return from.data() == to.data() && from.nbytes() == to.nbytes();
}

std::vector<Range> tensor_ranges(const Call& call) {
  std::vector<Range> ranges;
  for (const auto& transfer : call.transfers) {
    for (const auto& tensor : transfer.from.tensors()) {
      add_range(ranges, {&tensor, 0, tensor.numel()}, false);
    }
    for (const auto& tensor : transfer.to.tensors()) {
      add_range(ranges, {&tensor, 0, tensor.numel()}, true);
    }
  }
  return ranges;
}

// What is left of it slot by slot, without the own slots that are given and taken in place.
std::vector<Range> slot_ranges_at_risk(const Call& call) {
  std::vector<Range> ranges;
  for (const auto& transfer : call.transfers) {
    const bool in_place = is_own_slot_in_place(transfer, call.rank);
    const auto add = [&](const Slots& slots, bool is_written) {
      for (int slot = 0; slot < slots.size(); ++slot) {
        if (!in_place || slot != own_slot(slots, call.rank)) {
          add_range(ranges, slots[slot], is_written);
        }
      }
    };
    add(transfer.from, false);
    add(transfer.to, true);
  }
  return ranges;
}

bool reads_what_it_writes(std::vector<Range> ranges) {
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.begin < b.begin; });
  const char* read_up_to = nullptr;
  const char* written_up_to = nullptr;
  for (const auto& range : ranges) {
    if (range.begin < (range.is_written ? read_up_to : written_up_to)) {
      return true;
    }
    auto& up_to = range.is_written ? written_up_to : read_up_to;
    up_to = std::max(up_to, range.end);
  }
  return false;
}

}  // namespace

const char* operation_name(Operation operation) {
  switch (operation) {
    case Operation::kAllGather:
      return "all_gather";
    case Operation::kReduceScatter:
      return "reduce_scatter";
    case Operation::kAllReduce:
      return "all_reduce";
    case Operation::kBroadcast:
      return "broadcast";
    case Operation::kReduce:
      return "reduce";
    case Operation::kGather:
      return "gather";
    case Operation::kScatter:
      return "scatter";
    case Operation::kAllToAll:
      return "all_to_all";
    case Operation::kBarrier:
      return "barrier";
    case Operation::kSend:
      return "send";
    case Operation::kReceive:
      return "recv";
  }
  return "unknown operation";
}

char* Slice::data() const {
  // Who may write here is settled when the call is checked; a const pointer would only move the
  // cast.
  const auto* base = static_cast<const char*>(tensor->const_data_ptr());
  return const_cast<char*>(base) + offset * tensor->element_size();
}

Slots Slots::whole(at::Tensor tensor) {
  return list({std::move(tensor)});
}

Slots Slots::list(std::vector<at::Tensor> tensors) {
  Slots slots;
  slots.tensors_ = std::move(tensors);
  return slots;
}

Slots Slots::equal(at::Tensor tensor, int count) {
  Slots slots;
  slots.tensors_ = {std::move(tensor)};
  slots.equal_slots_ = count;
  return slots;
}

Slots Slots::split(at::Tensor tensor, const std::vector<std::int64_t>& sizes) {
  Slots slots;
  slots.tensors_ = {std::move(tensor)};
  std::int64_t end = 0;
  for (const auto size : sizes) {
    slots.ends_.push_back(end += size);
  }
  return slots;
}

int Slots::size() const {
  if (equal_slots_ > 0) {
    return equal_slots_;
  }
  return static_cast<int>(ends_.empty() ? tensors_.size() : ends_.size());
}

Slice Slots::operator[](int slot) const {
  if (equal_slots_ > 0) {
    const auto numel = tensors_[0].numel() / equal_slots_;
    return {&tensors_[0], slot * numel, numel};
  }
  if (ends_.empty()) {
    return {&tensors_[slot], 0, tensors_[slot].numel()};
  }
  const auto begin = slot == 0 ? 0 : ends_[slot - 1];
  return {&tensors_[0], begin, ends_[slot] - begin};
}

Slots Slots::clone() const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto copy = *this;
  for (auto& tensor : copy.tensors_) {
    tensor = tensor.clone();
  }
  return copy;
}

Slots Slots::with(std::vector<at::Tensor> tensors) const {
  auto slots = *this;
  slots.tensors_ = std::move(tensors);
  return slots;
}

at::Device Call::device() const {
  if (stated_device.has_value()) {
    return *stated_device;
  }
  for (const auto& transfer : transfers) {
    for (const auto* slots : {&transfer.from, &transfer.to}) {
      if (!slots->tensors().empty()) {
        return slots->tensors().front().device();
      }
    }
  }
  return at::kCPU;
}

std::string describe(const Call& call) {
  std::vector<std::string> arguments;
  if (call.reduction != c10d::ReduceOp::UNUSED) {
    arguments.emplace_back(reduction_name(call.reduction));
  }
  for (const auto& transfer : call.transfers) {
    arguments.push_back(describe_transfer(transfer));
  }
  if (call.device().type() != at::kCPU) {
    arguments.push_back(c10::DeviceTypeName(call.device().type(), /*lower_case=*/true));
  }
  if (call.is_transfer()) {
    arguments.push_back(fmt::format("{} rank {}, tag {}",
                                    call.operation == Operation::kSend ? "to" : "from", call.root,
                                    call.tag));
  } else if (call.root >= 0) {
    arguments.push_back(fmt::format("root {}", call.root));
  }
  return fmt::format("{}({}){}", operation_name(call.operation), join_some(arguments, ", "),
                     call.label.empty() ? std::string() : fmt::format(" for {}", call.label));
}

std::string describe_ranks(const std::vector<int>& ranks) {
  std::vector<std::string> runs;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) {
      ++last;
    }
    runs.push_back(last == i ? fmt::format("{}", ranks[i])
                             : fmt::format("{}-{}", ranks[i], ranks[last]));
    i = last + 1;
  }
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", join_some(runs, ", "));
}

std::string find_mismatch(const std::vector<Call>& calls, const std::vector<int>& ranks) {
  const auto parties = group_by_signature(calls, ranks);
  if (parties.size() > 1) {
    return describe_parties(calls, parties);
  }
  const bool has_splits = calls[ranks[0]].operation == Operation::kAllToAll;
  return has_splits ? find_split_mismatch(calls, ranks) : std::string();
}

std::string find_transfer_mismatch(const Call& send, const Call& receive) {
  const auto& given = send.transfers[0];
  const auto& taken = receive.transfers[0];
  if (given.dtype == taken.dtype && given.numel == taken.numel &&
      send.device().type() == receive.device().type()) {
    return {};
  }
  return fmt::format("rank {} called {}; rank {} called {}", send.rank, describe(send),
                     receive.rank, describe(receive));
}

void separate_overlapping_memory(Call& call) {
  // Nearly always the tensors are apart as a whole, and there is no need to look at hundreds of
  // slots.
  if (!reads_what_it_writes(tensor_ranges(call)) ||
      !reads_what_it_writes(slot_ranges_at_risk(call))) {
    return;
  }
  for (auto& transfer : call.transfers) {
    transfer.from = transfer.from.clone();
  }
}

}  // namespace fsdp::in_process
