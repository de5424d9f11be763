// The roll call. Each rank takes a number and lays down a record under it; rank 0 reads the records
// in the order of their numbers, until all ranks are there or something is wrong, and writes the
// verdict, which the others wait for.

#include "rendezvous.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
#include <vector>

#include "fsdp/errors.h"

namespace fsdp {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr const char* kArrivals = "arrivals";
constexpr const char* kVerdict = "verdict";
constexpr const char* kHeard = "heard";  // how many ranks have read the verdict
constexpr const char* kLeft = "left";
constexpr const char* kAllLeft = "all_left";
constexpr const char* kAllHere = "all here, ";
/// How long a rank whose end would end the store stays to let the others read a bad verdict.
constexpr milliseconds kLinger{2000};

std::string arrival_key(std::int64_t number) {
  return fmt::format("arrival/{}", number);
}
std::string left_key(int rank) {
  return fmt::format("left/{}", rank);
}

struct Record {
  int rank = 0;
  int world_size = 1;
  std::string settings;
  std::string host;
  int process = 0;
  bool one_node_assumed = false;

  std::string where() const { return fmt::format("process {} on host {}", process, host); }
};

Record own_record(const RollCall& mine) {
  char host[256] = "unknown";
  ::gethostname(host, sizeof host - 1);
  return {mine.rank, mine.world_size, mine.settings, host, ::getpid(), mine.one_node_assumed};
}

std::string to_text(const Record& record) {
  return nlohmann::json{{"rank", record.rank},         {"world_size", record.world_size},
                        {"settings", record.settings}, {"host", record.host},
                        {"process", record.process},   {"one_node", record.one_node_assumed}}
      .dump();
}

Record to_record(const std::string& text) {
  const auto json = nlohmann::json::parse(text);
  return {json.at("rank"), json.at("world_size"), json.at("settings"),
          json.at("host"), json.at("process"),    json.at("one_node")};
}

milliseconds until(Clock::time_point deadline) {
  return std::max(milliseconds(1),
                  std::chrono::duration_cast<milliseconds>(deadline - Clock::now()));
}

/// Runs a call to the store; if the server is gone, says so with the rank.
template <typename Body>
auto with_store(int rank, const char* doing, const Body& body) {
  try {
    return body();
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    throw PeerError(fmt::format(
        "rank {}: the store's server went away or stopped while this rank {} ({}); it is rank 0's "
        "process, or torchrun's agent: see how that ended",
        rank, doing, text.substr(0, text.find('\n'))));
  }
}

/// Whether the key came in time. Short waits, because a server that dies is noticed between them.
bool wait_for(c10d::Store& store, const std::string& key, Clock::time_point deadline) {
  const auto start = Clock::now();
  while (!store.check({key})) {
    const auto now = Clock::now();
    if (now >= deadline) {
      return false;
    }
    // At most a tenth is added to a wait, and hundreds of ranks do not drown the server.
    const auto waited = std::chrono::duration_cast<milliseconds>(now - start);
    std::this_thread::sleep_for(
        std::min(std::clamp(waited / 10, milliseconds(1), milliseconds(50)), until(deadline)));
  }
  return true;
}

std::vector<int> missing_of(const std::vector<Record>& arrived, int world_size) {
  std::vector<bool> here(world_size);
  for (const auto& record : arrived) {
    if (record.rank < world_size) {
      here[record.rank] = true;
    }
  }
  std::vector<int> missing;
  for (int rank = 0; rank < world_size; ++rank) {
    if (!here[rank]) {
      missing.push_back(rank);
    }
  }
  return missing;
}

std::string missing_text(const std::vector<Record>& arrived, int world_size, milliseconds timeout) {
  const auto missing = missing_of(arrived, world_size);
  const bool one = missing.size() == 1;
  return fmt::format(
      "rank{} {} of {} did not arrive within {} ms; wanted: all ranks; see whether {} "
      "started with the same MASTER_ADDR and MASTER_PORT (a node missing?), and how {} ended",
      one ? "" : "s", fmt::join(missing, ", "), world_size, timeout.count(),
      one ? "it was" : "they were", one ? "it" : "they");
}

/// What is wrong with the last of these; nothing if all is well.
std::optional<std::string> problem_with_last(const std::vector<Record>& arrived) {
  const auto& last = arrived.back();
  const auto& first = arrived.front();
  if (last.world_size != first.world_size) {
    return fmt::format(
        "world sizes differ: rank {} ({}) has WORLD_SIZE={}, rank {} ({}) has WORLD_SIZE={}; "
        "wanted: the same on all ranks; start all of them with one",
        first.rank, first.where(), first.world_size, last.rank, last.where(), last.world_size);
  }
  for (std::size_t i = 0; i + 1 < arrived.size(); ++i) {
    if (arrived[i].rank == last.rank) {
      return fmt::format(
          "rank {0} is given twice: RANK={0} in {1} and in {2}; wanted: each rank from 0 to "
          "{3} once; give each process its own RANK (two jobs with one MASTER_PORT look the "
          "same)",
          last.rank, arrived[i].where(), last.where(), last.world_size - 1);
    }
  }
  if (last.settings != first.settings) {
    return fmt::format(
        "settings differ: rank {} ({}) has {}, rank {} ({}) has {}; wanted: the same on all ranks; "
        "name the backend, and set FSDP_CHECK_COLLECTIVES alike everywhere",
        first.rank, first.where(), first.settings, last.rank, last.where(), last.settings);
  }
  if (last.one_node_assumed && last.host != first.host) {
    return fmt::format(
        "LOCAL_RANK and LOCAL_WORLD_SIZE are not set, and the ranks are on several hosts: rank {} "
        "on {}, rank {} on {}; wanted: both set on every rank; set them, or use torchrun",
        first.rank, first.host, last.rank, last.host);
  }
  return std::nullopt;
}

struct Judgement {
  std::string text;
  bool good = false;
  bool late = false;       // ranks are missing
  int others_to_hear = 0;  // before the store may end
};

/// Rank 0: reads the records as they come, and says what is to be said to all.
Judgement judge(c10d::Store& store, const RollCall& mine, Clock::time_point deadline,
                milliseconds timeout) {
  std::vector<Record> arrived;
  while (static_cast<int>(arrived.size()) < mine.world_size) {
    const auto key = arrival_key(static_cast<std::int64_t>(arrived.size()) + 1);
    if (!wait_for(store, key, deadline)) {
      return {missing_text(arrived, mine.world_size, timeout), false, true,
              static_cast<int>(arrived.size()) - 1};
    }
    arrived.push_back(to_record(store.get_to_str(key)));
    if (const auto problem = problem_with_last(arrived)) {
      return {*problem, false, false, mine.world_size - 1};  // the rest may be on its way
    }
  }
  return {fmt::format("{}{}", kAllHere, mine.world_size), true};
}

/// Lets the others read the verdict before the store ends with this process.
void linger(c10d::Store& store, int others) {
  const auto deadline = Clock::now() + kLinger;
  while (store.add(kHeard, 0) < others && Clock::now() < deadline) {
    std::this_thread::sleep_for(milliseconds(20));
  }
}

/// What a rank that waited in vain for the verdict can still find out.
std::vector<Record> records_there(c10d::Store& store) {
  std::vector<Record> records;
  const auto arrivals = store.add(kArrivals, 0);
  for (std::int64_t number = 1; number <= arrivals; ++number) {
    if (store.check({arrival_key(number)})) {
      records.push_back(to_record(store.get_to_str(arrival_key(number))));
    }
  }
  return records;
}

/// The first thing that is wrong with records in the order of their arrival.
std::optional<std::string> problem_of(const std::vector<Record>& records) {
  std::vector<Record> arrived;
  for (const auto& record : records) {
    arrived.push_back(record);
    if (auto problem = problem_with_last(arrived)) {
      return problem;
    }
  }
  return std::nullopt;
}

void remove_keys(c10d::Store& store, const RollCall& mine) {
  for (int number = 1; number <= mine.world_size; ++number) {
    store.deleteKey(arrival_key(number));
    store.deleteKey(left_key(number - 1));
  }
  for (const auto* key : {kArrivals, kVerdict, kHeard, kLeft, kAllLeft}) {
    store.deleteKey(key);
  }
}

}  // namespace

void meet(const StorePtr& store, const RollCall& mine, milliseconds timeout) {
  // Rank 0 gives up a little before the others, so that they can read which ranks are missing.
  const auto start = Clock::now();
  const auto deadline = start + timeout;
  const auto early = start + timeout - std::min(timeout / 10, milliseconds(2000));
  bool late = false;
  const auto verdict = with_store(mine.rank, "was waiting for the others", [&]() -> std::string {
    store->set(arrival_key(store->add(kArrivals, 1)), to_text(own_record(mine)));
    if (mine.rank == 0) {
      const auto judgement = judge(*store, mine, early, timeout);
      late = judgement.late;
      store->set(kVerdict, (late ? "late " : "said ") + judgement.text);
      if (mine.serves_store() && !judgement.good) {
        linger(*store, judgement.others_to_hear);
      }
      return judgement.text;
    }
    if (!wait_for(*store, kVerdict, deadline)) {
      late = true;
      return missing_text(records_there(*store), mine.world_size, timeout);
    }
    const auto said = store->get_to_str(kVerdict);
    store->add(kHeard, 1);
    late = said.rfind("late ", 0) == 0;
    return said.substr(5);
  });
  if (late) {
    throw TimeoutError(fmt::format("rank {}: {}", mine.rank, verdict));
  }
  if (verdict.rfind(kAllHere, 0) != 0) {
    throw UsageError(fmt::format("rank {}: {}", mine.rank, verdict));
  }
  // Who came after rank 0 had all that it wanted is not known to it.
  const auto extra = with_store(mine.rank, "was waiting for the others", [&] {
    return store->add(kArrivals, 0) > mine.world_size ? problem_of(records_there(*store))
                                                      : std::nullopt;
  });
  if (extra) {
    throw UsageError(fmt::format("rank {}: {}", mine.rank, *extra));
  }
}

void leave(const StorePtr& store, const RollCall& mine, milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  with_store(mine.rank, "was leaving the group", [&] {
    store->set(left_key(mine.rank), "");
    if (store->add(kLeft, 1) == mine.world_size) {
      // Where rank 0 serves the store it waits for this, and removes the keys itself.
      store->set(kAllLeft, "");
      if (mine.agent_store) {
        remove_keys(*store, mine);
      }
    }
  });
  if (mine.serves_store()) {
    const auto all = with_store(mine.rank, "was waiting for the others to leave",
                                [&] { return wait_for(*store, kAllLeft, deadline); });
    if (!all) {
      std::vector<int> missing;
      for (int rank = 0; rank < mine.world_size; ++rank) {
        if (!store->check({left_key(rank)})) {
          missing.push_back(rank);
        }
      }
      throw TimeoutError(fmt::format(
          "rank {}: destroy_process_group: rank{} {} did not come to it within {} ms; wanted: a "
          "call on every rank; see how {} ended",
          mine.rank, missing.size() == 1 ? "" : "s", fmt::join(missing, ", "), timeout.count(),
          missing.size() == 1 ? "it" : "they"));
    }
    remove_keys(*store, mine);
  }
}

}  // namespace fsdp
