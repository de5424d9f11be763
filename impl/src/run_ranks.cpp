// Runs a function once per rank, on a thread each, and finds the exception that started the
// trouble.

#include <ATen/Parallel.h>
#include <c10/core/AutogradState.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <cctype>
#include <exception>
#include <limits>
#include <mutex>
#include <optional>
#include <thread>
#include <typeinfo>

#include "fsdp/errors.h"
#include "fsdp/process_group.h"
#include "fsdp/random.h"
#include "rank_thread.h"

namespace fsdp {
namespace {

// Whether the text says "rank 3" and not only "rank 31".
bool names_rank(const std::string& text, int rank) {
  const auto name = fmt::format("rank {}", rank);
  for (auto at = text.find(name); at != std::string::npos; at = text.find(name, at + 1)) {
    const auto end = at + name.size();
    if (end == text.size() || std::isdigit(static_cast<unsigned char>(text[end])) == 0) {
      return true;
    }
  }
  return false;
}

// An exception of exactly type E is thrown again as an E with the new message. A type derived from
// it, which may carry more than a message, is not.
template <typename E>
void rethrow_if_exactly(const std::exception& error, const std::string& message) {
  if (typeid(error) == typeid(E)) {
    throw E(message);
  }
}

template <typename... Errors>
void rethrow_if_one_of(const std::exception& error, const std::string& message) {
  (rethrow_if_exactly<Errors>(error, message), ...);
}

[[noreturn]] void rethrow_naming_rank(const std::exception_ptr& exception, int rank) {
  try {
    std::rethrow_exception(exception);
  } catch (c10::Error& error) {
    if (!names_rank(error.what_without_backtrace(), rank)) {
      error.add_context(fmt::format("rank {}", rank));
    }
    throw;
  } catch (const std::exception& error) {
    if (!names_rank(error.what(), rank)) {
      rethrow_if_one_of<Error, UsageError, ShardingError, MismatchError, PeerError, TimeoutError,
                        NonFiniteError, FileError, StateError, std::runtime_error, std::logic_error,
                        std::invalid_argument, std::domain_error, std::length_error,
                        std::out_of_range, std::range_error, std::overflow_error,
                        std::underflow_error>(error,
                                              fmt::format("rank {}: {}", rank, error.what()));
    }
    throw;
  }
}

// Keeps the exception to tell the caller of. PeerErrors are told to ranks because another rank
// left, so any other exception, even a later one, is nearer to the cause.
class Cause {
 public:
  void note(int rank, std::exception_ptr exception, bool is_peer_error) {
    const std::lock_guard lock(mutex_);
    auto& first = is_peer_error ? first_peer_error_ : first_;
    if (!first.has_value()) {
      first = Noted{rank, std::move(exception)};
    }
  }

  void rethrow_if_any() const {
    for (const auto* noted : {&first_, &first_peer_error_}) {
      if (noted->has_value()) {
        rethrow_naming_rank((*noted)->exception, (*noted)->rank);
      }
    }
  }

 private:
  struct Noted {
    int rank;
    std::exception_ptr exception;
  };
  std::mutex mutex_;
  std::optional<Noted> first_;
  std::optional<Noted> first_peer_error_;
};

// A rank's number of intra-op threads is its thread's own, but libtorch also keeps the last number
// that was set, for threads that set none. This puts that back.
class IntraOpThreadsGuard {
 public:
  IntraOpThreadsGuard() : previous_(at::get_num_threads()) {}
  ~IntraOpThreadsGuard() { at::set_num_threads(previous_); }
  IntraOpThreadsGuard(const IntraOpThreadsGuard&) = delete;
  IntraOpThreadsGuard& operator=(const IntraOpThreadsGuard&) = delete;

 private:
  int previous_;
};

// The thread belongs to somebody else, who finds its autograd as it was.
class AutogradGuard {
 public:
  AutogradGuard() : previous_(c10::AutogradState::get_tls_state()) {}
  ~AutogradGuard() { c10::AutogradState::set_tls_state(previous_); }
  AutogradGuard(const AutogradGuard&) = delete;
  AutogradGuard& operator=(const AutogradGuard&) = delete;

 private:
  c10::AutogradState previous_;
};

// Without this, glibc hands every large block back to the kernel when it is freed, and each step
// faults its gathered parameters, gradients and activations in again, page by page.
void keep_freed_memory() {
#ifdef __GLIBC__
  static const bool done = [] {
    // Blocks up to 1 GiB come from the heap.
    mallopt(M_MMAP_THRESHOLD, 1 << 30);
    mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
    return true;
  }();
  static_cast<void>(done);
#endif
}

// What a thread needs before it can be a rank.
void set_up_thread(int rank, const RunRanksOptions& options) {
  {
    // It also touches pools that all threads share.
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    at::set_num_threads(options.intra_op_threads);
  }
  auto autograd = c10::AutogradState::get_tls_state();
  autograd.set_multithreading_enabled(false);
  c10::AutogradState::set_tls_state(autograd);
  seed_rank_generator(options.seed, rank);
}

// Tells the caller first and then the other ranks, whose exceptions are echoes of this one.
void fail_rank(RankContext& context, Cause& cause, const std::string& reason, bool is_peer_error) {
  cause.note(context.rank, std::current_exception(), is_peer_error);
  leave_group(*context.process_group, reason);
}

void run_and_note(RankContext context, const std::function<void(RankContext&)>& body,
                  const RunRanksOptions& options, Cause& cause) {
  try {
    set_up_thread(context.rank, options);
    body(context);
    leave_group(*context.process_group, "its function returned");
  } catch (const PeerError& error) {
    fail_rank(context, cause, error.what(), /*is_peer_error=*/true);
  } catch (const c10::Error& error) {
    fail_rank(context, cause, error.what_without_backtrace(), /*is_peer_error=*/false);
  } catch (const std::exception& error) {
    fail_rank(context, cause, error.what(), /*is_peer_error=*/false);
  } catch (...) {
    fail_rank(context, cause, "it threw something that is not a std::exception",
              /*is_peer_error=*/false);
  }
}

void set_up_process(const RunRanksOptions& options) {
  if (options.keep_freed_memory) {
    keep_freed_memory();
  }
  if (options.intra_op_threads < 1) {
    throw UsageError(
        fmt::format("{} intra-op threads; wanted 1 or more", options.intra_op_threads));
  }
}

}  // namespace

void run_rank(const BackendPtr& group, const std::function<void(RankContext&)>& body,
              const RunRanksOptions& options) {
  if (group == nullptr) {
    throw UsageError("run_rank: the process group is null; wanted: this rank's part of one");
  }
  set_up_process(options);
  const IntraOpThreadsGuard threads;
  const AutogradGuard autograd;
  Cause cause;
  run_and_note({group->getRank(), group->getSize(), group}, body, options, cause);
  cause.rethrow_if_any();
}

void run_ranks(int world_size, const std::function<void(RankContext&)>& body,
               const RunRanksOptions& options) {
  set_up_process(options);
  const auto backends = make_in_process_group(world_size, options.group);
  const IntraOpThreadsGuard guard;
  Cause cause;
  std::vector<std::jthread> threads;
  threads.reserve(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    RankContext context{rank, world_size, backends[rank]};
    try {
      threads.emplace_back([&, context = std::move(context)] {
        set_shares_process(world_size > 1);
        run_and_note(context, body, options, cause);
      });
    } catch (const std::exception& error) {
      const auto problem = fmt::format(
          "no thread for rank {} of {} could be started: {}. Run fewer ranks or raise "
          "the limit on threads.",
          rank, world_size, error.what());
      cause.note(rank, std::make_exception_ptr(Error(problem)), /*is_peer_error=*/false);
      for (int missing = rank; missing < world_size; ++missing) {
        leave_group(*backends[missing], problem);
      }
      break;
    }
  }
  threads.clear();  // joins them
  cause.rethrow_if_any();
}

}  // namespace fsdp
