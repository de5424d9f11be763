#pragma once
// The one MPI of a process: who started it and who ends it, and a communicator of our own, so that
// neither we nor the program see the other's messages.

#include <mpi.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "transport.h"

namespace fsdp::processes {

/// Throws an fsdp::Error with MPI's own words if `code` is not success.
void check_mpi(int code, const char* function);

/// Many groups may follow each other, or be there at the same time; each has a number, the same on
/// every rank, that its messages bear.
///
/// All calls of MPI are made with `mutex` held, so that MPI needs no more than
/// MPI_THREAD_SERIALIZED where the program does not use MPI itself.
class MpiWorld {
 public:
  /// Starts MPI if the program has not. MPI is ended when the process exits, and by whoever started
  /// it. Throws UsageError if MPI cannot be used from several threads.
  static MpiWorld& get();

  int rank() const { return rank_; }
  int size() const { return size_; }
  MPI_Comm communicator() const { return communicator_; }
  std::mutex& mutex() { return mutex_; }

  /// The number of this process's next group.
  std::uint32_t next_group();

  // With the mutex held.
  /// The next message for this group, with its sender; false if none has come.
  bool take(std::uint32_t group, int& sender, Bytes& message);
  void send(int peer, std::uint32_t group, const Bytes& message);
  bool has_unsent(std::uint32_t group) const;
  /// Moves messages on. Returns whether anything happened.
  bool progress();
  /// A tag for a stretch that goes to this rank, different from those that are on their way.
  int next_tag(int peer);
  /// The group ends. What it still has on its way, MPI may still read and write.
  void forget(std::uint32_t group);
  void keep_alive(MPI_Request request, std::shared_ptr<const void> memory);

  /// For the collectives of MPI's own of this group, which have to be apart from others'. All ranks
  /// in `members` call this; the mutex is not held. It is made once and kept, for groups that
  /// follow each other have the same numbers.
  void make_communicator(std::uint64_t group, const std::vector<int>& members);
  MPI_Comm communicator_of(std::uint64_t group) const { return native_.at(group); }
  /// Throws UsageError if MPI cannot be used by several threads at once.
  void require_multiple_threads() const;

  /// Ranks may be missing from now on: if MPI does not end within `patience`, it is aborted.
  void expect_trouble(std::chrono::milliseconds patience);

 private:
  struct Sending {
    std::uint32_t group;
    MPI_Request request;
    std::shared_ptr<Bytes> bytes;
  };
  struct Receiving {
    MPI_Request request = MPI_REQUEST_NULL;
    Bytes bytes;
    bool is_done = false;
  };
  struct Arrived {
    int sender;
    Bytes message;
  };
  struct Kept {
    MPI_Request request;
    std::shared_ptr<const void> memory;
  };

  MpiWorld();
  void end();
  void take_the_last_messages();
  void deliver(int sender);

  std::mutex mutex_;
  MPI_Comm communicator_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 1;
  int last_tag_ = 0;
  std::uint32_t groups_ = 0;
  std::uint32_t forgotten_ = 0;  // all groups before this number have ended
  std::vector<Sending> sending_;
  std::vector<std::deque<std::unique_ptr<Receiving>>> receiving_;  // by sender
  std::map<std::uint32_t, std::deque<Arrived>> arrived_;           // by group
  std::vector<int> tags_;                                          // by receiver
  std::vector<Kept> kept_;
  std::map<std::uint64_t, MPI_Comm> native_;
  int level_ = MPI_THREAD_SINGLE;
  std::chrono::milliseconds patience_{};  // none: as long as it takes
};

}  // namespace fsdp::processes
