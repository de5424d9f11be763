#include "mpi_world.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "fsdp/errors.h"

namespace fsdp::processes {
namespace {

constexpr int kMessageTag = 0;

// As many stretches may be on their way from one rank to another. MPI promises tags up to 32767.
constexpr int kMostTags = 1 << 20;

// What the program would return if the harness broke.
constexpr int kAbortCode = 70;

}  // namespace

void check_mpi(int code, const char* function) {
  if (code == MPI_SUCCESS) {
    return;
  }
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  throw Error(fmt::format("{} failed: {}", function,
                          std::string(text.data(), static_cast<std::size_t>(length))));
}

MpiWorld& MpiWorld::get() {
  // Never destroyed: MPI may use its memory until the process ends.
  static auto* const world = new MpiWorld;
  return *world;
}

MpiWorld::MpiWorld() {
  int is_initialized = 0;
  int is_finalized = 0;
  check_mpi(MPI_Initialized(&is_initialized), "MPI_Initialized");
  check_mpi(MPI_Finalized(&is_finalized), "MPI_Finalized");
  if (is_finalized != 0) {
    throw UsageError(
        "MPI was ended by the program (MPI_Finalize), and cannot be started again; make "
        "the group before that");
  }
  int level = MPI_THREAD_SINGLE;
  if (is_initialized != 0) {
    check_mpi(MPI_Query_thread(&level), "MPI_Query_thread");
    if (level < MPI_THREAD_MULTIPLE) {
      throw UsageError(
          "MPI was started by the program without MPI_THREAD_MULTIPLE; start it by "
          "MPI_Init_thread with that level, or let the group start it");
    }
  } else {
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
    // The program's exit is the one moment after which nobody can want another group.
    std::atexit([] { MpiWorld::get().end(); });
    if (level < MPI_THREAD_SERIALIZED) {
      throw UsageError(
          "this MPI cannot be used by threads (MPI_THREAD_SERIALIZED); use one that can");
    }
  }
  level_ = level;
  check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &communicator_), "MPI_Comm_dup");
  check_mpi(MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_mpi(MPI_Comm_rank(communicator_, &rank_), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(communicator_, &size_), "MPI_Comm_size");
  int* bound = nullptr;
  int has_bound = 0;
  check_mpi(MPI_Comm_get_attr(communicator_, MPI_TAG_UB, static_cast<void*>(&bound), &has_bound),
            "MPI_Comm_get_attr");
  last_tag_ = std::min(has_bound != 0 ? *bound : 32767, kMostTags);
  receiving_.resize(size_);
  tags_.resize(size_);
}

// At the program's exit, if we started MPI.
void MpiWorld::end() {
  int is_finalized = 0;
  MPI_Finalized(&is_finalized);
  if (is_finalized != 0) {
    return;
  }
  std::mutex mutex;
  std::condition_variable done;
  bool is_done = false;
  std::thread watchdog;
  if (patience_.count() > 0) {
    // MPI_Finalize waits for every rank, and one that is stopped would never come.
    watchdog = std::thread([&] {
      std::unique_lock lock(mutex);
      if (!done.wait_for(lock, patience_, [&] { return is_done; })) {
        std::fprintf(
            stderr,
            "rank %d: MPI_Finalize did not return within %lld ms after a failure; aborting "
            "all ranks\n",
            rank_, static_cast<long long>(patience_.count()));
        MPI_Abort(MPI_COMM_WORLD, kAbortCode);
        ::_exit(kAbortCode);
      }
    });
  }
  take_the_last_messages();
  MPI_Finalize();
  {
    const std::lock_guard lock(mutex);
    is_done = true;
  }
  done.notify_all();
  if (watchdog.joinable()) {
    watchdog.join();
  }
}

// Once all ranks have come here, nobody sends anything any more. Some MPIs warn of messages that
// nobody has taken.
void MpiWorld::take_the_last_messages() {
  const std::lock_guard lock(mutex_);
  MPI_Request all_here = MPI_REQUEST_NULL;
  if (MPI_Ibarrier(communicator_, &all_here) != MPI_SUCCESS) {
    return;
  }
  try {
    int is_done = 0;
    while (is_done == 0) {
      if (!progress()) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      check_mpi(MPI_Test(&all_here, &is_done, MPI_STATUS_IGNORE), "MPI_Test");
    }
    while (progress()) {
    }
  } catch (const Error& error) {
    std::fprintf(stderr, "rank %d: at the end of MPI: %s\n", rank_, error.what());
  }
}

std::uint32_t MpiWorld::next_group() {
  const std::lock_guard lock(mutex_);
  return groups_++;
}

void MpiWorld::send(int peer, std::uint32_t group, const Bytes& message) {
  auto bytes = std::make_shared<Bytes>(sizeof(group) + message.size());
  std::memcpy(bytes->data(), &group, sizeof(group));
  std::copy(message.begin(), message.end(), bytes->begin() + sizeof(group));
  Sending sending{group, MPI_REQUEST_NULL, bytes};
  check_mpi(MPI_Isend(bytes->data(), static_cast<int>(bytes->size()), MPI_BYTE, peer, kMessageTag,
                      communicator_, &sending.request),
            "MPI_Isend");
  sending_.push_back(std::move(sending));
}

bool MpiWorld::has_unsent(std::uint32_t group) const {
  return std::any_of(sending_.begin(), sending_.end(),
                     [&](const Sending& each) { return each.group == group; });
}

bool MpiWorld::take(std::uint32_t group, int& sender, Bytes& message) {
  const auto entry = arrived_.find(group);
  if (entry == arrived_.end() || entry->second.empty()) {
    return false;
  }
  sender = entry->second.front().sender;
  message = std::move(entry->second.front().message);
  entry->second.pop_front();
  return true;
}

bool MpiWorld::progress() {
  bool did_something = false;
  while (true) {
    int has_come = 0;
    MPI_Message matched;
    MPI_Status status;
    check_mpi(MPI_Improbe(MPI_ANY_SOURCE, kMessageTag, communicator_, &has_come, &matched, &status),
              "MPI_Improbe");
    if (has_come == 0) {
      break;
    }
    int size = 0;
    check_mpi(MPI_Get_count(&status, MPI_BYTE, &size), "MPI_Get_count");
    auto receiving = std::make_unique<Receiving>();
    receiving->bytes.resize(size);
    check_mpi(MPI_Imrecv(receiving->bytes.data(), size, MPI_BYTE, &matched, &receiving->request),
              "MPI_Imrecv");
    receiving_[status.MPI_SOURCE].push_back(std::move(receiving));
    did_something = true;
  }
  for (int sender = 0; sender < size_; ++sender) {
    auto& queue = receiving_[sender];
    // In order: a short message may be complete before a long one that came first.
    while (!queue.empty()) {
      int is_done = 0;
      check_mpi(MPI_Test(&queue.front()->request, &is_done, MPI_STATUS_IGNORE), "MPI_Test");
      if (is_done == 0) {
        break;
      }
      deliver(sender);
      did_something = true;
    }
  }
  const auto test = [](MPI_Request& request) {
    int is_done = 0;
    check_mpi(MPI_Test(&request, &is_done, MPI_STATUS_IGNORE), "MPI_Test");
    return is_done != 0;
  };
  did_something = std::erase_if(sending_, [&](Sending& each) { return test(each.request); }) > 0 ||
                  did_something;
  std::erase_if(kept_, [&](Kept& each) { return test(each.request); });
  return did_something;
}

void MpiWorld::deliver(int sender) {
  const auto bytes = std::move(receiving_[sender].front()->bytes);
  receiving_[sender].pop_front();
  std::uint32_t group = 0;
  std::memcpy(&group, bytes.data(), sizeof(group));
  // A group that ended here may still be told that another rank left it.
  const bool is_forgotten = group < groups_ && !arrived_.contains(group);
  if (group < forgotten_ && is_forgotten) {
    return;
  }
  arrived_[group].push_back({sender, Bytes(bytes.begin() + sizeof(group), bytes.end())});
}

int MpiWorld::next_tag(int peer) {
  return 1 + tags_[peer]++ % last_tag_;
}

void MpiWorld::forget(std::uint32_t group) {
  arrived_.erase(group);
  forgotten_ = std::max(forgotten_, group + 1);
  for (auto& sending : sending_) {
    if (sending.group == group) {
      kept_.push_back({sending.request, sending.bytes});
    }
  }
  std::erase_if(sending_, [&](const Sending& each) { return each.group == group; });
}

void MpiWorld::keep_alive(MPI_Request request, std::shared_ptr<const void> memory) {
  kept_.push_back({request, std::move(memory)});
}

void MpiWorld::require_multiple_threads() const {
  if (level_ < MPI_THREAD_MULTIPLE) {
    throw UsageError(
        "FSDP_MPI_REDUCTION=native wants an MPI with MPI_THREAD_MULTIPLE; use one, or "
        "leave the variable out");
  }
}

void MpiWorld::make_communicator(std::uint64_t group, const std::vector<int>& members) {
  {
    const std::lock_guard lock(mutex_);
    if (native_.contains(group)) {
      return;
    }
  }
  MPI_Group all = MPI_GROUP_NULL;
  MPI_Group some = MPI_GROUP_NULL;
  MPI_Comm made = MPI_COMM_NULL;
  check_mpi(MPI_Comm_group(communicator_, &all), "MPI_Comm_group");
  check_mpi(MPI_Group_incl(all, static_cast<int>(members.size()), members.data(), &some),
            "MPI_Group_incl");
  check_mpi(MPI_Comm_create_group(communicator_, some, static_cast<int>(group % 32749), &made),
            "MPI_Comm_create_group");
  check_mpi(MPI_Comm_set_errhandler(made, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_mpi(MPI_Group_free(&some), "MPI_Group_free");
  check_mpi(MPI_Group_free(&all), "MPI_Group_free");
  const std::lock_guard lock(mutex_);
  native_[group] = made;
}

void MpiWorld::expect_trouble(std::chrono::milliseconds patience) {
  const std::lock_guard lock(mutex_);
  patience_ = std::max(patience, std::chrono::milliseconds(1));
}

}  // namespace fsdp::processes
