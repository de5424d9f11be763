// What is asked of every backend, asked of every backend: each collective in every dtype, size and
// world size against values worked out from scratch; the same bits as in_process; and every way to
// get out of step ends each rank with the error that says who and what.
//
// A test starts its ranks as processes of this same program, which then runs one of the bodies
// below instead of the tests: the ranks of "store" directly, those of "mpi" by that MPI's mpirun.
// Those of "in_process" are threads.

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "conformance/suites/rank_processes.h"
#include "fsdp/backend_library.h"
#include "fsdp/errors.h"
#include "fsdp/process_group.h"
#include "fsdp/store_group.h"

namespace {

using namespace std::chrono_literals;
using c10d::ReduceOp;
using shardproof::Ended;
using shardproof::RankProcesses;
using std::chrono::milliseconds;
using std::chrono::steady_clock;
using torch::Tensor;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// ---- A rank, and what it has to say -------------------------------------------------------------

/// One rank of a body. What it checks that does not hold is written down and makes it fail.
class Rank {
 public:
  Rank(fsdp::BackendPtr group, std::string backend)
      : group(std::move(group)),
        rank(this->group->getRank()),
        size(this->group->getSize()),
        backend(std::move(backend)) {}

  void check(bool holds, const std::string& what) {
    if (!holds) {
      problems.push_back("rank " + std::to_string(rank) + ": " + what);
    }
  }

  fsdp::BackendPtr group;
  const int rank;
  const int size;
  const std::string backend;  // "in_process", "store", "openmpi", "mpich"
  std::vector<std::string> problems;
};

using Body = std::function<void(Rank&)>;

std::map<std::string, Body>& bodies() {
  static std::map<std::string, Body> all;
  return all;
}

struct RegisterBody {
  RegisterBody(const char* name, Body body) { bodies()[name] = std::move(body); }
};

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

int number(const char* name) {
  const auto text = variable(name);
  return text.empty() ? -1 : std::stoi(text);
}

// ---- The collectives, with values for arguments -------------------------------------------------

WorkPtr all_gather(Rank& rank, Tensor output, Tensor input) {
  return rank.group->_allgather_base(output, input);
}

WorkPtr all_gather_list(Rank& rank, Tensors outputs, Tensor input) {
  std::vector<Tensors> lists = {std::move(outputs)};
  Tensors inputs = {std::move(input)};
  return rank.group->allgather(lists, inputs);
}

WorkPtr reduce_scatter(Rank& rank, Tensor output, Tensor input,
                       ReduceOp::RedOpType reduction = ReduceOp::SUM) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = reduction;
  return rank.group->_reduce_scatter_base(output, input, options);
}

WorkPtr reduce_scatter_list(Rank& rank, Tensor output, Tensors inputs,
                            ReduceOp::RedOpType reduction) {
  Tensors outputs = {std::move(output)};
  std::vector<Tensors> lists = {std::move(inputs)};
  c10d::ReduceScatterOptions options;
  options.reduceOp = reduction;
  return rank.group->reduce_scatter(outputs, lists, options);
}

WorkPtr all_reduce(const fsdp::BackendPtr& group, Tensor tensor,
                   ReduceOp::RedOpType reduction = ReduceOp::SUM) {
  Tensors tensors = {std::move(tensor)};
  c10d::AllreduceOptions options;
  options.reduceOp = reduction;
  return group->allreduce(tensors, options);
}

WorkPtr broadcast(Rank& rank, Tensor tensor, int root) {
  Tensors tensors = {std::move(tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  return rank.group->broadcast(tensors, options);
}

WorkPtr reduce(Rank& rank, Tensor tensor, int root, ReduceOp::RedOpType reduction) {
  Tensors tensors = {std::move(tensor)};
  c10d::ReduceOptions options;
  options.rootRank = root;
  options.reduceOp = reduction;
  return rank.group->reduce(tensors, options);
}

WorkPtr gather(Rank& rank, Tensors outputs, Tensor input, int root) {
  std::vector<Tensors> lists;
  if (rank.rank == root) {
    lists.push_back(std::move(outputs));
  }
  Tensors inputs = {std::move(input)};
  c10d::GatherOptions options;
  options.rootRank = root;
  return rank.group->gather(lists, inputs, options);
}

WorkPtr scatter(Rank& rank, Tensor output, Tensors inputs, int root) {
  std::vector<Tensors> lists;
  if (rank.rank == root) {
    lists.push_back(std::move(inputs));
  }
  Tensors outputs = {std::move(output)};
  c10d::ScatterOptions options;
  options.rootRank = root;
  return rank.group->scatter(outputs, lists, options);
}

WorkPtr all_to_all(Rank& rank, Tensor output, Tensor input,
                   std::vector<std::int64_t> output_sizes = {},
                   std::vector<std::int64_t> input_sizes = {}) {
  return rank.group->alltoall_base(output, input, output_sizes, input_sizes);
}

WorkPtr send(Rank& rank, Tensor tensor, int receiver, int tag = 0) {
  Tensors tensors = {std::move(tensor)};
  return rank.group->send(tensors, receiver, tag);
}

WorkPtr receive(Rank& rank, Tensor tensor, int sender, int tag = 0) {
  Tensors tensors = {std::move(tensor)};
  return rank.group->recv(tensors, sender, tag);
}

Tensors pieces_of(const Tensor& flat, int count) {
  const auto numel = flat.numel() / count;
  Tensors pieces;
  for (int i = 0; i < count; ++i) {
    pieces.push_back(flat.narrow(0, i * numel, numel));
  }
  return pieces;
}

// ---- Values -------------------------------------------------------------------------------------

const std::vector<torch::ScalarType> kDtypes = {
    torch::kFloat,  torch::kDouble, torch::kHalf, torch::kBFloat16, torch::kByte,
    torch::kChar,   torch::kShort,  torch::kInt,  torch::kLong,     torch::kUInt16,
    torch::kUInt32, torch::kUInt64, torch::kBool};
const std::vector<ReduceOp::RedOpType> kReductions = {
    ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX};
// Of one rank's piece: none, one, odd, padded to 64 bytes in every dtype, and more than a message
// and a part of a reduction hold.
const std::vector<std::int64_t> kSizes = {0, 1, 7, 64, 9001};

std::string name_of(ReduceOp::RedOpType reduction) {
  static const std::vector<std::string> names = {"sum", "mean",        "product",    "min",
                                                 "max", "bitwise and", "bitwise or", "bitwise xor"};
  return names.at(reduction);
}

// Small whole numbers that depend on the rank, the element and the case, so that sums are exact in
// every dtype and whatever is stale, misplaced or not written shows.
std::int64_t value(int rank, std::int64_t element, int salt) {
  return (3 * rank + 2 * element + element / 7 * rank + salt) % 5;
}

// For products: all but one rank have a 1, so that they stay small.
std::int64_t factor(int rank, std::int64_t element, int salt, int size) {
  return (element + salt) % size == rank ? 1 + (element + salt) % 3 : 1;
}

// What rank `rank` puts into a reduction.
std::int64_t term(int rank, std::int64_t element, int salt, int size, ReduceOp::RedOpType reduction,
                  torch::ScalarType dtype) {
  const auto number = reduction == ReduceOp::PRODUCT ? factor(rank, element, salt, size)
                                                     : value(rank, element, salt);
  // As a bool nearly every sum would be true and nearly every product false.
  return dtype == torch::kBool ? static_cast<std::int64_t>(number == 1) : number;
}

// From the terms of all ranks. Whole numbers, but for the mean.
double reduced(std::int64_t element, int salt, int size, ReduceOp::RedOpType reduction,
               torch::ScalarType dtype) {
  std::int64_t result = term(0, element, salt, size, reduction, dtype);
  for (int rank = 1; rank < size; ++rank) {
    const auto next = term(rank, element, salt, size, reduction, dtype);
    if (reduction == ReduceOp::PRODUCT) {
      result *= next;
    } else if (reduction == ReduceOp::MIN) {
      result = std::min(result, next);
    } else if (reduction == ReduceOp::MAX) {
      result = std::max(result, next);
    } else {
      result += next;
    }
  }
  if (dtype == torch::kBool) {
    return result == 0 ? 0 : 1;
  }
  if (reduction != ReduceOp::AVG) {
    return static_cast<double>(result);
  }
  // Divided in the dtype in which it was added up, and rounded to the tensor's by who asks.
  return dtype == torch::kDouble
             ? static_cast<double>(result) / size
             : static_cast<double>(static_cast<float>(result) / static_cast<float>(size));
}

Tensor make(std::int64_t numel, torch::ScalarType dtype,
            const std::function<double(std::int64_t)>& element) {
  const auto wide = torch::empty({numel}, torch::kDouble);
  auto* data = wide.data_ptr<double>();
  for (std::int64_t i = 0; i < numel; ++i) {
    data[i] = element(i);
  }
  return dtype == torch::kBool ? wide != 0 : wide.to(torch::kDouble).to(dtype);
}

bool same_bits(const Tensor& a, const Tensor& b) {
  const auto bytes = [](const Tensor& tensor) {
    return tensor.contiguous().view({-1}).view(torch::kByte);
  };
  return a.scalar_type() == b.scalar_type() && a.numel() == b.numel() &&
         (a.numel() == 0 || torch::equal(bytes(a), bytes(b)));
}

// A tensor in the middle of a larger one, whose other elements must stay as they are.
class Guarded {
 public:
  explicit Guarded(const Tensor& values) : numel_(values.numel()) {
    whole_ = torch::full({numel_ + 2 * kGuards}, 77, torch::kLong).to(values.scalar_type());
    tensor().copy_(values);
  }
  Guarded(std::int64_t numel, torch::ScalarType dtype)
      : Guarded(torch::full({numel}, 55, torch::kLong).to(dtype)) {}
  Tensor tensor() const { return whole_.narrow(0, kGuards, numel_); }
  bool is_intact() const {
    const auto guard = torch::full({kGuards}, 77, torch::kLong).to(whole_.scalar_type());
    return same_bits(whole_.narrow(0, 0, kGuards), guard) &&
           same_bits(whole_.narrow(0, kGuards + numel_, kGuards), guard);
  }

 private:
  static constexpr std::int64_t kGuards = 3;
  std::int64_t numel_;
  Tensor whole_;
};

// ---- Every cell ---------------------------------------------------------------------------------

/// Counts the cells of operation x dtype x size, and says what is wrong in one.
class Table {
 public:
  explicit Table(Rank& rank) : rank_(rank) {}

  void checked(const std::string& operation, torch::ScalarType dtype, std::int64_t numel,
               const Tensor& got, const Tensor& want, const std::vector<Guarded>& memory) {
    bool holds = same_bits(got, want);
    for (const auto& guarded : memory) {
      holds = holds && guarded.is_intact();
    }
    ++rows_[operation].exact;
    rank_.check(holds, operation + " of " + c10::toString(dtype) + ", " + std::to_string(numel) +
                           " elements, world size " + std::to_string(rank_.size) +
                           (same_bits(got, want) ? ": memory beside the tensor was written"
                                                 : ": wrong values"));
  }

  void refused(const std::string& operation, const std::string& reduction, torch::ScalarType dtype,
               const std::function<WorkPtr()>& call) {
    std::string message = "no error";
    try {
      call()->wait();
    } catch (const fsdp::UsageError& error) {
      message = error.what();
    } catch (const std::exception& error) {
      message = std::string("another error: ") + error.what();
    }
    ++rows_[operation].refused;
    rank_.check(message.find(reduction) != std::string::npos &&
                    message.find(c10::toString(dtype)) != std::string::npos &&
                    message.find("rank " + std::to_string(rank_.rank)) == 0,
                operation + ": " + reduction + " of " + c10::toString(dtype) +
                    " was to be refused by name, and ended with: " + message);
  }

  std::string text() const {
    std::ostringstream text;
    text << "cells of " << rank_.backend << ", world size " << rank_.size << "\n";
    int exact = 0;
    int refused = 0;
    for (const auto& [operation, row] : rows_) {
      text << "  " << operation << std::string(28 - operation.size(), ' ') << row.exact
           << " exact, " << row.refused << " refused\n";
      exact += row.exact;
      refused += row.refused;
    }
    text << "  all" << std::string(25, ' ') << exact << " exact, " << refused << " refused\n";
    return text.str();
  }

 private:
  struct Row {
    int exact = 0;
    int refused = 0;
  };
  Rank& rank_;
  std::map<std::string, Row> rows_;
};

// A cell whose collective is on its way.
struct Pending {
  WorkPtr work;
  std::function<void()> verify;
};

// All sizes of a dtype are on their way at the same time.
void finish(std::vector<Pending>& pending) {
  for (const auto& each : pending) {
    each.work->wait();
    each.verify();
  }
  pending.clear();
}

class Cells {
 public:
  explicit Cells(Rank& rank) : rank_(rank), table_(rank) {}

  void run() {
    for (const auto dtype : kDtypes) {
      for (const auto numel : kSizes) {
        move(dtype, numel);
      }
      finish(pending_);
      for (const auto reduction : kReductions) {
        if (reduction == ReduceOp::AVG && !c10::isFloatingType(dtype)) {
          refuse(dtype, reduction);
          continue;
        }
        for (const auto numel : kSizes) {
          reduce_all(dtype, numel, reduction);
        }
        finish(pending_);
      }
    }
    for (const auto reduction : {ReduceOp::BAND, ReduceOp::BOR, ReduceOp::BXOR}) {
      refuse(torch::kInt, reduction);
    }
    for (const auto dtype : {torch::kComplexFloat, torch::kFloat8_e4m3fn, torch::kFloat8_e5m2}) {
      refuse(dtype, ReduceOp::SUM);
    }
    if (rank_.rank == 0) {
      std::cout << table_.text() << std::flush;
    }
  }

 private:
  void add(const std::string& operation, WorkPtr work, torch::ScalarType dtype, std::int64_t numel,
           Tensor got, Tensor want, std::vector<Guarded> memory) {
    pending_.push_back({std::move(work),
                        [=, this] { table_.checked(operation, dtype, numel, got, want, memory); }});
  }

  void move(torch::ScalarType dtype, std::int64_t numel) {
    const int me = rank_.rank;
    const int size = rank_.size;
    const int salt = ++salt_;
    const int root = salt % size;
    const auto of = [=](int rank) {
      return make(numel, dtype,
                  [=](auto i) { return value(rank, i, salt) % 2 + value(rank, i, 0); });
    };
    const auto whole = [=](int rank) {
      return make(numel * size, dtype, [=](auto i) { return value(rank, i, salt); });
    };
    Tensors every;
    for (int rank = 0; rank < size; ++rank) {
      every.push_back(of(rank));
    }
    const auto together = torch::cat(every);
    {
      const Guarded input(every[me]);
      const Guarded output(numel * size, dtype);
      add("all_gather", all_gather(rank_, output.tensor(), input.tensor()), dtype, numel,
          output.tensor(), together, {input, output});
    }
    {
      const Guarded input(every[me]);
      const Guarded output(numel * size, dtype);
      add("all_gather (list)",
          all_gather_list(rank_, pieces_of(output.tensor(), size), input.tensor()), dtype, numel,
          output.tensor(), together, {input, output});
    }
    {
      const Guarded tensor(every[me]);
      add("broadcast", broadcast(rank_, tensor.tensor(), root), dtype, numel, tensor.tensor(),
          every[root], {tensor});
    }
    {
      const Guarded input(every[me]);
      const Guarded output(numel * size, dtype);
      const auto before = output.tensor().clone();
      add("gather", gather(rank_, pieces_of(output.tensor(), size), input.tensor(), root), dtype,
          numel, output.tensor(), me == root ? together : before, {input, output});
    }
    {
      const Guarded input(whole(me));
      const Guarded output(numel, dtype);
      add("scatter", scatter(rank_, output.tensor(), pieces_of(input.tensor(), size), root), dtype,
          numel, output.tensor(), pieces_of(whole(root), size)[me], {input, output});
    }
    {
      const Guarded input(whole(me));
      const Guarded output(numel * size, dtype);
      Tensors wanted;
      for (int rank = 0; rank < size; ++rank) {
        wanted.push_back(pieces_of(whole(rank), size)[me]);
      }
      add("all_to_all", all_to_all(rank_, output.tensor(), input.tensor()), dtype, numel,
          output.tensor(), torch::cat(wanted), {input, output});
    }
    if (size > 1) {
      const int next = (me + 1) % size;
      const int previous = (me + size - 1) % size;
      const Guarded given(every[me]);
      const Guarded taken(numel, dtype);
      add("send", send(rank_, given.tensor(), next, salt), dtype, numel, given.tensor(), every[me],
          {given});
      add("recv", receive(rank_, taken.tensor(), previous, salt), dtype, numel, taken.tensor(),
          every[previous], {taken});
    }
  }

  void reduce_all(torch::ScalarType dtype, std::int64_t numel, ReduceOp::RedOpType reduction) {
    const int me = rank_.rank;
    const int size = rank_.size;
    const int salt = ++salt_;
    const int root = salt % size;
    const auto mine = [=](std::int64_t count) {
      return make(count, dtype, [=](auto i) { return term(me, i, salt, size, reduction, dtype); });
    };
    const auto wanted = [=](std::int64_t count) {
      return make(count, dtype, [=](auto i) { return reduced(i, salt, size, reduction, dtype); });
    };
    const auto name = [&](const char* operation) {
      return std::string(operation) + " " + name_of(reduction);
    };
    {
      const Guarded tensor(mine(numel));
      add(name("all_reduce"), all_reduce(rank_.group, tensor.tensor(), reduction), dtype, numel,
          tensor.tensor(), wanted(numel), {tensor});
    }
    {
      const Guarded tensor(mine(numel));
      add(name("reduce"), reduce(rank_, tensor.tensor(), root, reduction), dtype, numel,
          tensor.tensor(), me == root ? wanted(numel) : mine(numel), {tensor});
    }
    {
      const Guarded input(mine(numel * size));
      const Guarded output(numel, dtype);
      add(name("reduce_scatter"), reduce_scatter(rank_, output.tensor(), input.tensor(), reduction),
          dtype, numel, output.tensor(), pieces_of(wanted(numel * size), size)[me],
          {input, output});
    }
    {
      const Guarded input(mine(numel * size));
      const Guarded output(numel, dtype);
      add(name("reduce_scatter"),
          reduce_scatter_list(rank_, output.tensor(), pieces_of(input.tensor(), size), reduction),
          dtype, numel, output.tensor(), pieces_of(wanted(numel * size), size)[me],
          {input, output});
    }
  }

  void refuse(torch::ScalarType dtype, ReduceOp::RedOpType reduction) {
    const auto tensor = [&](std::int64_t numel) {
      return torch::zeros({numel}, torch::kByte).to(torch::kFloat).to(dtype);
    };
    table_.refused("all_reduce " + name_of(reduction), name_of(reduction), dtype,
                   [&] { return all_reduce(rank_.group, tensor(4), reduction); });
    table_.refused("reduce " + name_of(reduction), name_of(reduction), dtype,
                   [&] { return reduce(rank_, tensor(4), 0, reduction); });
    table_.refused("reduce_scatter " + name_of(reduction), name_of(reduction), dtype, [&] {
      return reduce_scatter(rank_, tensor(4), tensor(4 * rank_.size), reduction);
    });
  }

  Rank& rank_;
  Table table_;
  std::vector<Pending> pending_;
  int salt_ = 0;
};

const RegisterBody kCells("cells", [](Rank& rank) { Cells(rank).run(); });

// 16 MB, and not a multiple of anything.
const RegisterBody kLarge("large", [](Rank& rank) {
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kLong}) {
    const auto width = static_cast<std::int64_t>(c10::elementSize(dtype));
    const std::int64_t piece = (16 * 1024 * 1024 / width / rank.size) - 3;
    const auto whole = piece * rank.size;
    // Up to 7 + size, which every dtype holds exactly, also when five of them are added.
    const auto base = torch::arange(whole, torch::kLong).remainder(8);
    const auto mine = (base + rank.rank).to(dtype);
    const auto sum = (base * rank.size + rank.size * (rank.size - 1) / 2).to(dtype);
    const auto name = std::string(" of 16 MB of ") + c10::toString(dtype);

    const auto tensor = mine.clone();
    const auto output = torch::zeros({piece}, dtype);
    const auto gathered = torch::zeros({whole}, dtype);
    auto first = all_reduce(rank.group, tensor);
    auto second = reduce_scatter(rank, output, mine);
    auto third = all_gather(rank, gathered, mine.narrow(0, rank.rank * piece, piece));
    third->wait();
    second->wait();
    first->wait();
    rank.check(same_bits(tensor, sum), "all_reduce" + name);
    rank.check(same_bits(output, sum.narrow(0, rank.rank * piece, piece)), "reduce_scatter" + name);
    Tensors wanted;
    for (int other = 0; other < rank.size; ++other) {
      wanted.push_back((base.narrow(0, other * piece, piece) + other).to(dtype));
    }
    rank.check(same_bits(gathered, torch::cat(wanted)), "all_gather" + name);

    const auto shared = rank.rank == rank.size - 1 ? mine.clone() : torch::zeros({whole}, dtype);
    broadcast(rank, shared, rank.size - 1)->wait();
    rank.check(same_bits(shared, (base + rank.size - 1).to(dtype)), "broadcast" + name);
    if (rank.size > 1) {
      const auto taken = torch::zeros({whole}, dtype);
      auto sending = send(rank, mine, (rank.rank + 1) % rank.size);
      const int from = (rank.rank + rank.size - 1) % rank.size;
      receive(rank, taken, from)->wait();
      sending->wait();
      rank.check(same_bits(taken, (base + from).to(dtype)), "recv" + name);
    }
  }
});

// ---- Backends and their ranks -------------------------------------------------------------------

struct MpiLibrary {
  std::string launcher;
  std::string library;
};

// Those that were found when this was built.
std::map<std::string, MpiLibrary> mpi_libraries() {
  std::map<std::string, MpiLibrary> found;
#ifdef SHARDPROOF_OPENMPI_LIBRARY
  found["openmpi"] = {SHARDPROOF_OPENMPI_LAUNCHER, SHARDPROOF_OPENMPI_LIBRARY};
#endif
#ifdef SHARDPROOF_MPICH_LIBRARY
  found["mpich"] = {SHARDPROOF_MPICH_LAUNCHER, SHARDPROOF_MPICH_LIBRARY};
#endif
  return found;
}

std::vector<std::string> all_backends() {
  std::vector<std::string> names = {"in_process", "store"};
  for (const auto& [name, library] : mpi_libraries()) {
    names.push_back(name);
  }
  return names;
}

milliseconds group_timeout() {
  const int timeout = number("SHARDPROOF_TIMEOUT_MS");
  return timeout > 0 ? milliseconds(timeout) : milliseconds(60s);
}

fsdp::BackendPtr make_group(const std::string& backend) {
  if (backend == "store") {
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(number("SHARDPROOF_PORT"));
    options.timeout = 20s;
    return fsdp::make_store_group(c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options),
                                  number("SHARDPROOF_RANK"), number("SHARDPROOF_SIZE"),
                                  {group_timeout(), "world"});
  }
  const auto path = mpi_libraries().at(backend).library;
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw std::runtime_error(::dlerror());
  }
  const auto make = reinterpret_cast<FsdpMakeBackend>(::dlsym(library, "fsdp_make_backend"));
  fsdp::BackendRequest request;
  const bool is_openmpi = backend == "openmpi";
  request.rank = number(is_openmpi ? "OMPI_COMM_WORLD_RANK" : "PMI_RANK");
  request.world_size = number(is_openmpi ? "OMPI_COMM_WORLD_SIZE" : "PMI_SIZE");
  request.timeout_ms = group_timeout().count();
  std::string problem(1024, '\0');
  auto* made = make(&request, problem.data(), problem.size());
  if (made == nullptr) {
    throw std::runtime_error(problem.c_str());
  }
  return c10::intrusive_ptr<c10d::Backend>::reclaim(made);
}

// What the process of a rank does instead of the tests.
int run_as_rank() {
  const auto backend = variable("SHARDPROOF_BACKEND");
  std::vector<std::string> problems;
  try {
    Rank rank(make_group(backend), backend);
    std::cout << "ready\n" << std::flush;
    try {
      bodies().at(variable("SHARDPROOF_BODY"))(rank);
    } catch (const std::exception& error) {
      rank.check(false, std::string("it threw: ") + error.what());
    }
    problems = rank.problems;
  } catch (const std::exception& error) {
    problems.push_back(error.what());
  }
  for (const auto& problem : problems) {
    std::cout << "problem: " << problem << "\n";
  }
  std::cout << (problems.empty() ? "all held\n" : "some did not hold\n") << std::flush;
  return problems.empty() ? 0 : 1;
}

std::string own_path() {
  return std::filesystem::read_symlink("/proc/self/exe").string();
}

/// The ranks of one body, on a backend whose ranks are processes.
class Launch {
 public:
  Launch(const std::string& backend, int size, const std::string& body,
         RankProcesses::Variables variables = {}) {
    variables["SHARDPROOF_BACKEND"] = backend;
    variables["SHARDPROOF_BODY"] = body;
    variables["OMP_NUM_THREADS"] = "1";
    if (backend == "store") {
      c10d::TCPStoreOptions options;
      options.port = 0;
      options.isServer = true;
      options.waitWorkers = false;
      store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
      variables["SHARDPROOF_PORT"] = std::to_string(store->getPort());
      variables["SHARDPROOF_SIZE"] = std::to_string(size);
      for (int rank = 0; rank < size; ++rank) {
        variables["SHARDPROOF_RANK"] = std::to_string(rank);
        processes.start({own_path()}, variables);
      }
      return;
    }
    std::vector<std::string> command = {mpi_libraries().at(backend).launcher, "-n",
                                        std::to_string(size)};
    if (backend == "openmpi") {
      command.insert(command.end(), {"--allow-run-as-root", "--oversubscribe"});
    }
    command.push_back(own_path());
    processes.start(command, variables);
  }

  RankProcesses processes;
  c10::intrusive_ptr<c10d::TCPStore> store;
};

void expect_all_held(const std::string& backend, int size, const std::string& body,
                     milliseconds timeout = 120s) {
  if (backend == "in_process") {
    std::mutex mutex;
    fsdp::RunRanksOptions options;
    options.group.timeout = 60s;
    fsdp::run_ranks(
        size,
        [&](fsdp::RankContext& context) {
          Rank rank(context.process_group, backend);
          bodies().at(body)(rank);
          const std::lock_guard lock(mutex);
          for (const auto& problem : rank.problems) {
            ADD_FAILURE() << problem;
          }
        },
        options);
    return;
  }
  Launch launch(backend, size, body);
  const auto ended = launch.processes.wait(timeout);
  for (const auto& each : ended) {
    EXPECT_FALSE(each.was_late) << each.output;
    EXPECT_EQ(each.exit_code, 0) << each.output;
    EXPECT_NE(each.output.find("all held"), std::string::npos) << each.output;
  }
  EXPECT_EQ(launch.processes.left_behind(), std::vector<pid_t>());
  if (const auto table = ended[0].output.find("cells of"); table != std::string::npos) {
    std::cout << ended[0].output.substr(table);
  }
}

// ---- The tests ----------------------------------------------------------------------------------

class EveryBackend : public testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  std::string backend() const { return std::get<0>(GetParam()); }
  int size() const { return std::get<1>(GetParam()); }
};

std::string name_of_case(const testing::TestParamInfo<std::tuple<std::string, int>>& info) {
  return std::get<0>(info.param) + "_w" + std::to_string(std::get<1>(info.param));
}

TEST_P(EveryBackend, EveryCollectiveIsExactInEveryDtypeAndSizeOrRefusedByName) {
  expect_all_held(backend(), size(), "cells");
}

TEST_P(EveryBackend, SixteenMegabytesAreRightToTheLastElement) {
  expect_all_held(backend(), size(), "large");
}

INSTANTIATE_TEST_SUITE_P(Collectives, EveryBackend,
                         testing::Combine(testing::ValuesIn(all_backends()),
                                          testing::Values(1, 2, 3, 4, 5)),
                         name_of_case);

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  if (!variable("SHARDPROOF_BODY").empty()) {
    return run_as_rank();
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
