#include "in_process_portion.h"

#include <algorithm>
#include <cstring>

#include "in_process_device.h"
#include "reduce_kernels.h"

namespace fsdp::in_process {
namespace {

// all_reduce and reduce are cut no finer than this, lest small results be handled in crumbs and
// neighbouring portions write to one cache line.
constexpr std::int64_t kGrain = 1024;

void copy(const Slice& from, const Slice& to) {
  if (to.numel == 0) {
    return;
  }
  if (!to.tensor->is_cpu()) {
    copy_on_device(from, to);
  } else if (from.data() != to.data()) {
    std::memcpy(to.data(), from.data(), static_cast<std::size_t>(to.nbytes()));
  }
}

void reduce(c10d::ReduceOp::RedOpType reduction, const std::vector<Slice>& sources,
            const std::vector<Slice>& targets) {
  const auto& first = targets[0];
  if (first.numel == 0) {
    return;
  }
  if (!first.tensor->is_cpu()) {
    return reduce_on_device(reduction, sources, targets);
  }
  std::vector<const void*> source_pointers;
  for (const auto& source : sources) {
    source_pointers.push_back(source.data());
  }
  std::vector<void*> target_pointers;
  for (const auto& target : targets) {
    target_pointers.push_back(target.data());
  }
  reduce_in_order(reduction, first.tensor->scalar_type(), source_pointers, target_pointers,
                  first.numel);
}

// An even part of a tensor, of which there are `parts`.
Slice part_of(const Slice& whole, int part, int parts) {
  const auto even = (whole.numel + parts - 1) / parts;
  const auto length = (even + kGrain - 1) / kGrain * kGrain;
  const auto begin = std::min(part * length, whole.numel);
  const auto end = std::min(begin + length, whole.numel);
  return {whole.tensor, whole.offset + begin, end - begin};
}

class Portion {
 public:
  // `transfer` says which of the calls' transfers this is about.
  Portion(const std::vector<Call>& calls, int rank, std::size_t transfer)
      : calls_(calls), rank_(rank), transfer_(transfer) {}

  void carry_out() const {
    const auto root = calls_[0].root;
    switch (calls_[0].operation) {
      case Operation::kAllGather:
        return gather();
      case Operation::kGather:
        return rank_ == root ? gather() : void();
      case Operation::kBroadcast:
        return rank_ == root ? void() : copy(from(root, 0), to(rank_, 0));
      case Operation::kScatter:
        return copy(from(root, rank_), to(rank_, 0));
      case Operation::kAllToAll:
        return exchange();
      case Operation::kReduceScatter:
        return reduce(calls_[0].reduction, sources(rank_), {to(rank_, 0)});
      case Operation::kAllReduce:
        return reduce_part(0, world_size());
      case Operation::kReduce:
        return reduce_part(root, root + 1);
      case Operation::kBarrier:
      case Operation::kSend:
      case Operation::kReceive:
        return;
    }
  }

 private:
  int world_size() const { return static_cast<int>(calls_.size()); }
  Slice from(int rank, int slot) const { return calls_[rank].transfers[transfer_].from[slot]; }
  Slice to(int rank, int slot) const { return calls_[rank].transfers[transfer_].to[slot]; }

  std::vector<Slice> sources(int slot) const {
    std::vector<Slice> slices;
    for (int rank = 0; rank < world_size(); ++rank) {
      slices.push_back(from(rank, slot));
    }
    return slices;
  }

  void gather() const {
    for (int source = 0; source < world_size(); ++source) {
      copy(from(source, 0), to(rank_, source));
    }
  }

  void exchange() const {
    for (int source = 0; source < world_size(); ++source) {
      copy(from(source, rank_), to(rank_, source));
    }
  }

  // This portion's part of the one result, for the ranks in [first, last).
  void reduce_part(int first, int last) const {
    if (part_of(from(0, 0), rank_, world_size()).numel == 0) {
      return;
    }
    auto slices = sources(0);
    for (auto& slice : slices) {
      slice = part_of(slice, rank_, world_size());
    }
    std::vector<Slice> targets;
    for (int rank = first; rank < last; ++rank) {
      targets.push_back(part_of(to(rank, 0), rank_, world_size()));
    }
    reduce(calls_[0].reduction, slices, targets);
  }

  const std::vector<Call>& calls_;
  int rank_;
  std::size_t transfer_;
};

}  // namespace

void carry_out_portion(const std::vector<Call>& calls, int portion) {
  for (std::size_t transfer = 0; transfer < calls[0].transfers.size(); ++transfer) {
    Portion(calls, portion, transfer).carry_out();
  }
}

void carry_out_transfer(const Call& send, const Call& receive) {
  copy(send.transfers[0].from[0], receive.transfers[0].to[0]);
}

}  // namespace fsdp::in_process
