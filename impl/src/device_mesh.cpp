// Groups that are cut out of another one, and the labels of collectives.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "fsdp/errors.h"
#include "fsdp/process_group.h"

// This thread's label. By this name the program and the backends that it loads from shared
// libraries, which contain this code too, find the same one (impl/CMakeLists.txt has the program
// export it).
extern "C" std::string_view* fsdp_current_label() {
  thread_local std::string_view label;
  return &label;
}

namespace fsdp {

CollectiveLabel::CollectiveLabel(std::string_view text)
    : previous_(std::exchange(*fsdp_current_label(), text)) {}
CollectiveLabel::~CollectiveLabel() {
  *fsdp_current_label() = previous_;
}
std::string_view CollectiveLabel::current() {
  return *fsdp_current_label();
}

BackendPtr split_group(const BackendPtr& world, const std::vector<int>& ranks) {
  if (world == nullptr) {
    throw UsageError("split_group: the group to split is null; wanted: a process group");
  }
  const auto rank = world->getRank();
  if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) {
    throw UsageError(
        fmt::format("rank {}: split_group: the list [{}] leaves this rank out; wanted: "
                    "a list with it, or no call",
                    rank, fmt::join(ranks, ", ")));
  }
  std::vector<int> everyone(world->getSize());
  std::iota(everyone.begin(), everyone.end(), 0);
  if (ranks == everyone) {
    return world;
  }
  if (!world->supportsSplitting()) {
    throw UsageError(
        fmt::format("rank {}: the process group '{}' cannot be split; wanted: one whose "
                    "backend has split(), or give the groups by themselves",
                    rank, world->getBackendName()));
  }
  return world->split(nullptr, ranks, nullptr);
}

DeviceMesh make_device_mesh(const BackendPtr& world, int replicas) {
  if (world == nullptr) {
    throw UsageError("make_device_mesh: the group is null; wanted: a process group");
  }
  const auto size = world->getSize();
  const auto rank = world->getRank();
  if (replicas < 1 || size % replicas != 0) {
    throw UsageError(
        fmt::format("rank {}: make_device_mesh: {} replicas of {} ranks; wanted: a "
                    "number from 1 that divides the number of ranks",
                    rank, replicas, size));
  }
  const auto shards = size / replicas;
  std::vector<int> row(shards);
  std::iota(row.begin(), row.end(), rank / shards * shards);
  std::vector<int> column;
  for (int replica = 0; replica < replicas; ++replica) {
    column.push_back(replica * shards + rank % shards);
  }
  DeviceMesh mesh;
  mesh.shard = split_group(world, row);
  mesh.replicate = split_group(world, column);
  return mesh;
}

}  // namespace fsdp
