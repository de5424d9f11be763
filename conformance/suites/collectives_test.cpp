// What is asked of every backend, asked of every backend: each collective in every dtype, size and
// world size against values worked out from scratch; the same bits as in_process; and every way to
// get out of step ends each rank with the error that says who and what.
//
// A test starts its ranks as processes of this same program, which then runs one of the bodies
// below instead of the tests: the ranks of "store" directly, those of "mpi" by that MPI's mpirun.
// Those of "in_process" are threads.

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
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

// In one piece, whatever other ranks write to the same place.
void say(const std::string& line) {
  const auto text = line + "\n";
  [[maybe_unused]] const auto written = ::write(STDOUT_FILENO, text.data(), text.size());
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
      say(table_.text());
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

fsdp::BackendPtr make_group(const std::string& backend);

// ---- The same bits as in_process ----------------------------------------------------------------

// Numbers whose sum depends on the order in which they are added.
const RegisterBody kSameBits("same_bits", [](Rank& rank) {
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16}) {
    for (const std::int64_t numel : {3, 1000, 70000}) {
      for (const auto reduction : {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT}) {
        const auto input_of = [&](int other) {
          auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + other);
          auto values = torch::randn({numel * rank.size}, generator, torch::kDouble);
          return (values * torch::randn({numel * rank.size}, generator, torch::kDouble).exp())
              .to(dtype);
        };
        const auto compute = [&](Rank& each) {
          const auto shared = input_of(each.rank);
          const auto piece = torch::zeros({numel}, dtype);
          const auto rooted = input_of(each.rank);
          auto first = all_reduce(each.group, shared, reduction);
          auto second = reduce_scatter(each, piece, input_of(each.rank), reduction);
          auto third = reduce(each, rooted, each.size - 1, reduction);
          first->wait();
          second->wait();
          third->wait();
          return torch::cat({shared, piece, rooted});
        };
        Tensor want;
        fsdp::run_ranks(rank.size, [&](fsdp::RankContext& context) {
          Rank thread(context.process_group, "in_process");
          const auto result = compute(thread);
          if (context.rank == rank.rank) {
            want = result;
          }
        });
        rank.check(same_bits(compute(rank), want),
                   name_of(reduction) + " of " + std::to_string(numel) + " " +
                       c10::toString(dtype) + " differs from in_process");
      }
    }
  }
});

// ---- Memory, asynchrony, groups -----------------------------------------------------------------

const RegisterBody kOverlaps("overlaps", [](Rank& rank) {
  const int me = rank.rank;
  const int size = rank.size;
  // Small enough to travel with the call, and not.
  for (const std::int64_t numel : {100, 30000}) {
    const auto of = [&](int other, std::int64_t count) {
      return make(count, torch::kFloat, [=](auto i) { return value(other, i, 1); });
    };
    const auto next = (me + 1) % size;
    Tensors every;
    Tensors exchanged;
    Tensor sum = torch::zeros({numel * size});
    for (int other = 0; other < size; ++other) {
      every.push_back(of(other, numel));
      sum += of(other, numel * size);
      exchanged.push_back(pieces_of(of(other, numel * size), size)[me]);
    }
    for (const int place : {me, next}) {
      const auto gathered = torch::full({numel * size}, -1.0);
      const auto input = gathered.narrow(0, place * numel, numel);
      input.copy_(every[me]);
      all_gather(rank, gathered, input)->wait();
      rank.check(same_bits(gathered, torch::cat(every)), "all_gather from its own output");

      const auto scattered = of(me, numel * size);
      const auto output = scattered.narrow(0, place * numel, numel);
      reduce_scatter(rank, output, scattered)->wait();
      rank.check(same_bits(output, pieces_of(sum, size)[me]), "reduce_scatter into its own input");
    }
    const auto both = of(me, numel * size);
    all_to_all(rank, both, both)->wait();
    rank.check(same_bits(both, torch::cat(exchanged)), "all_to_all in place");

    // Uneven: rank s gives rank d s + d rows of `numel`.
    std::vector<std::int64_t> sizes;
    Tensors given;
    Tensors wanted;
    for (int other = 0; other < size; ++other) {
      sizes.push_back(me + other);
      given.push_back(torch::full({me + other, numel}, 10.0 * me + other));
      wanted.push_back(torch::full({other + me, numel}, 10.0 * other + me));
    }
    const auto taken = torch::full_like(torch::cat(wanted), -1);
    all_to_all(rank, taken, torch::cat(given), sizes, sizes)->wait();
    rank.check(same_bits(taken, torch::cat(wanted)), "all_to_all with uneven sizes");

    Tensors whole;
    Tensors pieces;
    Tensors shared;
    for (const std::int64_t count : {std::int64_t{5}, std::int64_t{0}, numel}) {
      whole.push_back(torch::zeros({count * size}));
      pieces.push_back(torch::full({count}, me + 1.0));
      shared.push_back(torch::full({count}, me + 1.0));
    }
    rank.group->allgather_into_tensor_coalesced(whole, pieces)->wait();
    rank.group->reduce_scatter_tensor_coalesced(pieces, whole)->wait();
    rank.group->allreduce_coalesced(shared)->wait();
    for (std::size_t i = 0; i < whole.size(); ++i) {
      const auto count = pieces[i].numel();
      rank.check(
          same_bits(whole[i], torch::arange(1, size + 1, torch::kFloat).repeat_interleave(count)),
          "coalesced all_gather");
      rank.check(same_bits(pieces[i], torch::full({count}, size * (me + 1.0))),
                 "coalesced reduce_scatter");
      rank.check(same_bits(shared[i], torch::full({count}, size * (size + 1) / 2.0)),
                 "coalesced all_reduce");
    }
  }
});

const RegisterBody kAsynchrony("asynchrony", [](Rank& rank) {
  const int me = rank.rank;
  const int size = rank.size;
  const auto sum_of_ranks = size * (size - 1) / 2.0;
  // Many at once, of several groups, waited for in another order on each rank. Every other one is
  // too large to travel with the call.
  const auto other_group = rank.group->split(
      nullptr,
      [&] {
        std::vector<int> reversed;
        for (int other = size - 1; other >= 0; --other) {
          reversed.push_back(other);
        }
        return reversed;
      }(),
      nullptr);
  rank.check(other_group->getRank() == size - 1 - me, "its place in a group in another order");
  std::vector<WorkPtr> works;
  Tensors tensors;
  constexpr int kCount = 60;
  for (int i = 0; i < kCount; ++i) {
    tensors.push_back(torch::full({i % 2 == 0 ? 17 : 20000}, 1.0 * i + me));
    works.push_back(all_reduce(i % 3 == 0 ? other_group : rank.group, tensors.back()));
  }
  for (int i = 0; i < kCount; ++i) {
    const int which = me % 2 == 0 ? i : kCount - 1 - i;
    works[which]->wait();
    rank.check(tensors[which].eq(1.0 * which * size + sum_of_ranks).all().item<bool>(),
               "all_reduce number " + std::to_string(which) + " of many on their way");
  }

  // Nothing stalls while a rank is busy with other things.
  rank.group->barrier()->wait();
  const auto start = steady_clock::now();
  const auto large = torch::full({2000000}, 1.0 * me);
  auto work = all_reduce(rank.group, large);
  if (me == 0) {
    std::this_thread::sleep_for(4s);
    rank.check(work->isCompleted() && work->isSuccess(), "an all_reduce went on while it computed");
  } else {
    work->wait();
    rank.check(steady_clock::now() - start < 3s, "an all_reduce waited for a rank that computes");
  }
  work->wait();
  rank.check(large.eq(sum_of_ranks).all().item<bool>(), "all_reduce of a large tensor");

  rank.group->barrier()->wait();

  // By polling alone, and not before all have come.
  if (me == 0) {
    auto polled = rank.group->barrier();
    std::this_thread::sleep_for(50ms);
    rank.check(size == 1 || !polled->isCompleted(), "a barrier was over before all had come");
    receive(rank, large, 0, 5);  // to be met by the next line
    send(rank, large, 0, 5)->wait();
    all_reduce(rank.group, large);  // dropped, and done all the same
    while (!polled->isCompleted()) {
      std::this_thread::sleep_for(1ms);
    }
    rank.check(polled->isSuccess() && polled->exception() == nullptr, "a polled barrier");
  } else {
    std::this_thread::sleep_for(200ms);
    rank.group->barrier()->wait();
    all_reduce(rank.group, large);
  }
  const auto last = torch::ones({3});
  all_reduce(rank.group, last)->wait();
  const auto kept = torch::ones({6});
  auto gathered = torch::zeros({6 * size});
  auto final_work = all_gather(rank, gathered, kept);
  final_work->wait();
  rank.check(kept.use_count() == 1, "an input is let go when the collective is done");
  rank.check(final_work->result().size() == 1 && final_work->result()[0].is_same(gathered),
             "the result is the output");
});

const RegisterBody kMesh("mesh", [](Rank& rank) {
  const auto mesh = fsdp::make_device_mesh(rank.group, 2);
  const int shards = rank.size / 2;
  const int replica = rank.rank / shards;
  for (int round = 0; round < 20; ++round) {
    const auto row = torch::full({round % 2 == 0 ? 8 : 9000}, rank.rank + 1.0);
    const auto column = row.clone();
    // Started in another order on every other rank: they are groups of their own.
    WorkPtr first;
    WorkPtr second;
    if (rank.rank % 2 == 0) {
      first = all_reduce(mesh.shard, row);
      second = all_reduce(mesh.replicate, column);
    } else {
      second = all_reduce(mesh.replicate, column);
      first = all_reduce(mesh.shard, row);
    }
    first->wait();
    second->wait();
    double row_sum = 0;
    for (int j = 0; j < shards; ++j) {
      row_sum += replica * shards + j + 1.0;
    }
    const double column_sum = 2.0 * (rank.rank % shards + 1) + shards;
    rank.check(row.eq(row_sum).all().item<bool>(), "all_reduce over the shards");
    rank.check(column.eq(column_sum).all().item<bool>(), "all_reduce over the replicas");
  }
});

const RegisterBody kTransfers("transfers", [](Rank& rank) {
  // To the last rank from each of the others: with tag 7 first 10 r + 1 then 10 r + 2, with tag 8
  // 10 r + 3. They are received in another order than they were sent in.
  const int last = rank.size - 1;
  for (const std::int64_t numel : {3, 50000}) {
    if (rank.rank < last) {
      const double base = 10.0 * rank.rank;
      std::vector<WorkPtr> works = {send(rank, torch::full({numel}, base + 1), last, 7),
                                    send(rank, torch::full({numel}, base + 2), last, 7),
                                    send(rank, torch::full({numel}, base + 3), last, 8)};
      for (const auto& work : works) {
        work->wait();
      }
      continue;
    }
    for (int sender = last - 1; sender >= 0; --sender) {
      Tensors taken = {torch::zeros({numel}), torch::zeros({numel}), torch::zeros({numel})};
      receive(rank, taken[2], sender, 8)->wait();
      receive(rank, taken[0], sender, 7)->wait();
      receive(rank, taken[1], sender, 7)->wait();
      for (int i = 0; i < 3; ++i) {
        rank.check(same_bits(taken[i], torch::full({numel}, 10.0 * sender + 1 + i)),
                   "transfer " + std::to_string(i) + " from rank " + std::to_string(sender));
      }
    }
  }
});

// ---- Ranks that do not agree, do not come, or leave ---------------------------------------------

// A group of all ranks that may be broken without harm to the others.
fsdp::BackendPtr part_of(Rank& rank, milliseconds timeout = 30s) {
  std::vector<int> everyone;
  for (int other = 0; other < rank.size; ++other) {
    everyone.push_back(other);
  }
  auto part = rank.group->split(nullptr, everyone, nullptr);
  part->setTimeout(timeout);
  return part;
}

template <typename E>
void expect_error(Rank& rank, const std::string& what, const std::vector<std::string>& says,
                  const std::function<WorkPtr()>& call) {
  std::string message;
  try {
    call()->wait();
    rank.check(false, what + ": no error");
    return;
  } catch (const E& error) {
    message = error.what();
  } catch (const std::exception& error) {
    rank.check(false, what + ": another error: " + error.what());
    return;
  }
  for (const auto& part : says) {
    rank.check(message.find(part) != std::string::npos,
               what + ": wanted \"" + part + "\" in \"" + message + "\"");
  }
}

const RegisterBody kMismatches("mismatches", [](Rank& rank) {
  struct Kind {
    std::string name;
    std::function<WorkPtr(Rank&)> odd_one;  // what rank 1 calls
    std::string says;
  };
  const auto large = 50000;
  // The others call all_reduce(sum, Float, 4 elements) for unit.a.
  const std::vector<Kind> kinds = {
      {"operation", [](Rank& r) { return broadcast(r, torch::ones({4}), 0); },
       "rank 1 called broadcast(Float, 4 elements, root 0)"},
      {"no tensor", [](Rank& r) { return r.group->barrier(); }, "rank 1 called barrier()"},
      {"dtype", [](Rank& r) { return all_reduce(r.group, torch::ones({4}, torch::kHalf)); },
       "rank 1 called all_reduce(sum, Half, 4 elements)"},
      {"size", [](Rank& r) { return all_reduce(r.group, torch::ones({5})); },
       "rank 1 called all_reduce(sum, Float, 5 elements)"},
      {"a large size", [=](Rank& r) { return all_reduce(r.group, torch::ones({large})); },
       "rank 1 called all_reduce(sum, Float, 50000 elements)"},
      {"reduction", [](Rank& r) { return all_reduce(r.group, torch::ones({4}), ReduceOp::AVG); },
       "rank 1 called all_reduce(mean, Float, 4 elements)"},
      {"label",
       [](Rank& r) {
         const fsdp::CollectiveLabel label("unit.b");
         return all_reduce(r.group, torch::ones({4}));
       },
       "rank 1 called all_reduce(sum, Float, 4 elements) for unit.b"},
  };
  for (const auto& kind : kinds) {
    Rank part(part_of(rank), rank.backend);
    const auto tensor = torch::full({4}, rank.rank + 1.0);
    expect_error<fsdp::MismatchError>(rank, kind.name,
                                      {kind.says, "rank " + std::to_string(rank.rank) + ":",
                                       "all_reduce(sum, Float, 4 elements) for unit.a"},
                                      [&] {
                                        const fsdp::CollectiveLabel label("unit.a");
                                        return rank.rank == 1 ? kind.odd_one(part)
                                                              : all_reduce(part.group, tensor);
                                      });
    rank.check(same_bits(tensor, torch::full({4}, rank.rank + 1.0)),
               kind.name + ": the tensor was changed");
    expect_error<fsdp::MismatchError>(rank, kind.name + ", again", {kind.says},
                                      [&] { return part.group->barrier(); });
  }
  {
    // Two collectives of the same size for different units, in another order.
    Rank part(part_of(rank), rank.backend);
    expect_error<fsdp::MismatchError>(rank, "order", {"for unit.a", "for unit.b"}, [&] {
      std::vector<WorkPtr> works;
      for (const auto* unit :
           {rank.rank == 1 ? "unit.b" : "unit.a", rank.rank == 1 ? "unit.a" : "unit.b"}) {
        const fsdp::CollectiveLabel label(unit);
        works.push_back(all_reduce(part.group, torch::ones({4})));
      }
      return works.front();
    });
  }
  {
    Rank part(part_of(rank), rank.backend);
    expect_error<fsdp::MismatchError>(
        rank, "root", {"rank 1 called broadcast(Float, 2 elements, root 1)", "root 0)"},
        [&] { return broadcast(part, torch::ones({2}), rank.rank == 1 ? 1 : 0); });
  }
  if (rank.rank < 2) {
    Rank pair(rank.group->split(nullptr, {0, 1}, nullptr), rank.backend);
    expect_error<fsdp::MismatchError>(
        rank, "split sizes", {"rank 0 gives rank 1 2 elements", "rank 1 takes 1"}, [&] {
          return rank.rank == 0
                     ? all_to_all(pair, torch::ones({3}), torch::ones({3}), {1, 2}, {1, 2})
                     : all_to_all(pair, torch::ones({4}), torch::ones({4}), {1, 3}, {2, 2});
        });
    Rank other(rank.group->split(nullptr, {0, 1}, nullptr), rank.backend);
    expect_error<fsdp::MismatchError>(rank, "transfer",
                                      {"rank 0 called send(Float, 3 elements, to rank 1, tag 0)",
                                       "rank 1 called recv(Float, 4 elements, from rank 0, tag 0)"},
                                      [&] {
                                        return rank.rank == 0 ? send(other, torch::ones({3}), 1)
                                                              : receive(other, torch::ones({4}), 0);
                                      });
  }
  // The group that all this was split from still works.
  const auto tensor = torch::ones({2});
  all_reduce(rank.group, tensor)->wait();
  rank.check(tensor.eq(rank.size).all().item<bool>(), "all_reduce in the whole group");
});

const RegisterBody kMissing("missing", [](Rank& rank) {
  {
    Rank part(part_of(rank, 400ms), rank.backend);
    part.group->barrier()->wait();
    if (rank.rank == 1) {
      std::this_thread::sleep_for(1200ms);
    }
    const auto start = steady_clock::now();
    expect_error<fsdp::TimeoutError>(
        rank, "a rank that comes too late",
        {"all_reduce(sum, Float, 4 elements)", "number 1", "rank 1 did not arrive within 400 ms"},
        [&] { return all_reduce(part.group, torch::ones({4})); });
    rank.check(steady_clock::now() - start < 1s, "the timeout took too long");
    expect_error<fsdp::TimeoutError>(rank, "after a timeout", {"rank 1 did not arrive"},
                                     [&] { return part.group->barrier(); });
  }
  {
    Rank part(part_of(rank, 400ms), rank.backend);
    if (rank.rank == 0) {
      expect_error<fsdp::TimeoutError>(
          rank, "recv without a send",
          {"recv(Float, 4 elements, from rank 2, tag 0)", "rank 2 did not arrive"},
          [&] { return receive(part, torch::ones({4}), 2); });
    } else {
      expect_error<fsdp::TimeoutError>(rank, "a timeout of another rank's recv",
                                       {"rank 2 did not arrive"}, [&] {
                                         std::this_thread::sleep_for(800ms);
                                         return part.group->barrier();
                                       });
    }
  }
  {
    Rank part(part_of(rank), rank.backend);
    if (rank.rank == 0) {
      auto work = part.group->barrier();
      expect_error<fsdp::TimeoutError>(rank, "the timeout of a wait", {"within 150 ms"},
                                       [&]() -> WorkPtr {
                                         work->wait(150ms);
                                         return work;
                                       });
      rank.check(!work->isSuccess() && work->exception() != nullptr, "a failed work says so");
    }
  }
  rank.group->barrier()->wait();
});

const RegisterBody kLeaving("leaving", [](Rank& rank) {
  {
    Rank part(part_of(rank), rank.backend);
    part.group->barrier()->wait();
    const auto tensor = torch::full({100}, rank.rank + 1.0);
    if (rank.rank == 2) {
      // What a rank posted before it left is still done, large or small.
      auto work = all_reduce(part.group, tensor);
      auto transfer = send(part, torch::full({4}, 9.0), 0);
      auto long_transfer = send(part, torch::full({60000}, 8.0), 0, 1);
      fsdp::leave_group(*part.group, "the data ran out");
      fsdp::leave_group(*part.group, "only the first reason counts");
      expect_error<fsdp::PeerError>(rank, "a call after leaving", {"rank 2 left the group"},
                                    [&] { return part.group->barrier(); });
      work->wait();
      transfer->wait();
      long_transfer->wait();
    } else {
      std::this_thread::sleep_for(100ms);
      all_reduce(part.group, tensor)->wait();
      if (rank.rank == 0) {
        const auto taken = torch::zeros({4});
        const auto large = torch::zeros({60000});
        receive(part, taken, 2)->wait();
        receive(part, large, 2, 1)->wait();
        rank.check(taken.eq(9.0).all().item<bool>() && large.eq(8.0).all().item<bool>(),
                   "what was sent before leaving");
        expect_error<fsdp::PeerError>(rank, "recv from a rank that left", {"rank 2 left the group"},
                                      [&] { return receive(part, taken, 2); });
      }
      expect_error<fsdp::PeerError>(rank, "a collective without the rank that left",
                                    {"rank " + std::to_string(rank.rank) + ": ", "all_reduce",
                                     "rank 2 left the group: the data ran out"},
                                    [&] { return all_reduce(part.group, tensor); });
      // What needs only the others still works.
      if (rank.rank == 0) {
        send(part, tensor, 1)->wait();
      } else if (rank.rank == 1) {
        receive(part, tensor, 0)->wait();
      }
    }
    rank.check(tensor[0].item<float>() == rank.size * (rank.size + 1) / 2.0F,
               "all_reduce of a rank that left after it");
  }
  {
    // Who leaves a group leaves those that were split from it, before or after.
    const auto part = part_of(rank);
    Rank inner(part, rank.backend);
    const auto before = part_of(inner);
    rank.group->barrier()->wait();
    if (rank.rank == 1) {
      fsdp::leave_group(*part, "enough");
    }
    rank.group->barrier()->wait();
    const auto after = part_of(inner);
    for (const auto& group : {before, after}) {
      expect_error<fsdp::PeerError>(rank, "a group split from the one that was left",
                                    {"rank 1 left the group: enough"},
                                    [&] { return group->barrier(); });
    }
  }
  {
    // A group that is destroyed is left, and one that is aborted is broken for all.
    auto part = part_of(rank);
    const auto other = part_of(rank);
    part->barrier()->wait();
    if (rank.rank == 0) {
      part.reset();
      other->abort();
    } else {
      expect_error<fsdp::PeerError>(rank, "a destroyed group", {"rank 0 left the group"},
                                    [&] { return part->barrier(); });
      expect_error<fsdp::PeerError>(rank, "an aborted group", {"rank 0 aborted the group"},
                                    [&] { return other->barrier(); });
    }
  }
  rank.group->barrier()->wait();
});

// Rank 1 goes in one of several ways while the others are in a collective. They say what they saw.
const RegisterBody kGoing("going", [](Rank& rank) {
  const auto way = variable("SHARDPROOF_WAY");
  rank.group->barrier()->wait();
  const auto tensor = torch::ones({way == "stop_in_data" ? 4000000 : 4});
  if (rank.rank == 1) {
    if (way == "kill") {
      ::raise(SIGKILL);
    } else if (way == "stop") {
      ::raise(SIGSTOP);
    } else if (way == "stop_in_data") {
      auto work = all_reduce(rank.group, tensor);
      std::this_thread::sleep_for(3ms);
      ::raise(SIGSTOP);
    } else if (way == "throw") {
      throw std::runtime_error("out of patience");
    }
    return;
  }
  try {
    for (int i = 0; i < 1000; ++i) {
      all_reduce(rank.group, tensor)->wait();
    }
    say("rank " + std::to_string(rank.rank) + " saw nothing");
  } catch (const fsdp::TimeoutError& error) {
    say(std::string("TimeoutError ") + error.what());
  } catch (const fsdp::PeerError& error) {
    say(std::string("PeerError ") + error.what());
  } catch (const std::exception& error) {
    say(std::string("another error: ") + error.what());
  }
});

// All-reduces until there is an error, and says which.
const RegisterBody kUntilError("until_error", [](Rank& rank) {
  const auto start = steady_clock::now();
  std::string seen = "nothing";
  try {
    for (int i = 0; steady_clock::now() - start < 30s; ++i) {
      all_reduce(rank.group, torch::ones({100}))->wait();
      if (i == 10) {
        say("under way");
      }
    }
  } catch (const fsdp::TimeoutError& error) {
    seen = std::string("TimeoutError ") + error.what();
  } catch (const fsdp::PeerError& error) {
    seen = std::string("PeerError ") + error.what();
  } catch (const std::exception& error) {
    seen = std::string("another error: ") + error.what();
  }
  say("saw " + seen);
});

// MPI adds up itself. Whole numbers have the same sum in any order; others are held to a bound.
const RegisterBody kNative("native", [](Rank& rank) {
  int salt = 0;
  int exact = 0;
  int refused = 0;
  for (const auto dtype : kDtypes) {
    for (const auto reduction : kReductions) {
      if (reduction == ReduceOp::AVG && !c10::isFloatingType(dtype)) {
        continue;
      }
      for (const auto numel : kSizes) {
        ++salt;
        const auto mine = [&](std::int64_t count) {
          return make(count, dtype, [&](auto i) {
            return term(rank.rank, i, salt, rank.size, reduction, dtype);
          });
        };
        const auto wanted = make(numel * rank.size, dtype, [&](auto i) {
          return reduced(i, salt, rank.size, reduction, dtype);
        });
        const auto what =
            " " + name_of(reduction) + " of " + std::to_string(numel) + " " + c10::toString(dtype);
        const auto shared = mine(numel);
        const auto piece = torch::zeros({numel}, torch::kLong).to(dtype);
        const auto rooted = mine(numel);
        if (c10::isReducedFloatingType(dtype)) {
          expect_error<fsdp::UsageError>(
              rank, "native" + what,
              {"rank " + std::to_string(rank.rank) + ": all_reduce", "no native",
               name_of(reduction), c10::toString(dtype), "FSDP_MPI_REDUCTION"},
              [&] { return all_reduce(rank.group, shared, reduction); });
          ++refused;
          continue;
        }
        auto first = all_reduce(rank.group, shared, reduction);
        auto second = reduce_scatter(rank, piece, mine(numel * rank.size), reduction);
        auto third = reduce(rank, rooted, 1, reduction);
        first->wait();
        second->wait();
        third->wait();
        rank.check(same_bits(shared, wanted.narrow(0, 0, numel)), "all_reduce" + what);
        rank.check(same_bits(piece, pieces_of(wanted, rank.size)[rank.rank]),
                   "reduce_scatter" + what);
        rank.check(same_bits(rooted, rank.rank == 1 ? wanted.narrow(0, 0, numel) : mine(numel)),
                   "reduce" + what);
        exact += 3;
      }
    }
  }
  say("native cells: " + std::to_string(exact) + " exact, " + std::to_string(refused) + " refused");
  // |computed - exact| <= (n - 1) u sum |x_i| / (1 - (n - 1) u) for a sum of n terms in any order.
  auto sum = torch::zeros({50000}, torch::kDouble);
  auto size = torch::zeros({50000}, torch::kDouble);
  Tensor mine;
  for (int other = 0; other < rank.size; ++other) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(other);
    const auto values = torch::randn({50000}, generator, torch::kFloat);
    sum += values.to(torch::kDouble);
    size += values.to(torch::kDouble).abs();
    mine = other == rank.rank ? values : mine;
  }
  const double unit = (rank.size - 1) * std::ldexp(1.0, -24);
  all_reduce(rank.group, mine)->wait();
  rank.check(((mine.to(torch::kDouble) - sum).abs() <= unit / (1 - unit) * size).all().item<bool>(),
             "a native sum is outside its bound");
});

// The group is destroyed with calls on their way, and made again: what follows is not disturbed.
const RegisterBody kAgain("again", [](Rank& rank) {
  auto backend = rank.backend;
  for (int round = 0; round < 10; ++round) {
    rank.group.reset();
    rank.group = make_group(backend);
    const auto tensor = torch::full({round % 2 == 0 ? 5 : 50000}, 1.0 * round + rank.rank);
    all_reduce(rank.group, tensor)->wait();
    rank.check(tensor.eq(rank.size * round + rank.size * (rank.size - 1) / 2.0).all().item<bool>(),
               "all_reduce of group " + std::to_string(round));
    all_reduce(rank.group, tensor);  // not waited for
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

// A process that holds a store, and nothing else.
int run_as_server() {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  say("port " + std::to_string(store->getPort()) + ".");
  std::this_thread::sleep_for(120s);
  return 0;
}

// What the process of a rank does instead of the tests.
int run_as_rank() {
  const auto backend = variable("SHARDPROOF_BACKEND");
  std::vector<std::string> problems;
  try {
    Rank rank(make_group(backend), backend);
    say("ready");
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
    say("problem: " + problem);
  }
  say(problems.empty() ? "all held" : "some did not hold");
  return problems.empty() ? 0 : 1;
}

std::string own_path() {
  return std::filesystem::read_symlink("/proc/self/exe").string();
}

int times_said(const std::string& output, const std::string& text) {
  int times = 0;
  for (auto at = output.find(text); at != std::string::npos; at = output.find(text, at + 1)) {
    ++times;
  }
  return times;
}

/// The ranks of one body, on a backend whose ranks are processes.
class Launch {
 public:
  Launch(const std::string& backend, int size, const std::string& body,
         RankProcesses::Variables variables = {})
      : size_(size) {
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

  /// Until every rank has its group. Connecting to a TCPStore looks addresses up, which takes
  /// seconds where no server answers.
  bool wait_until_ready(milliseconds timeout) {
    const auto deadline = steady_clock::now() + timeout;
    const auto ready = [&] {
      int count = 0;
      for (int i = 0; i < processes.count(); ++i) {
        count += times_said(processes.output(i), "ready\n");
      }
      return count == size_;
    };
    while (!ready() && steady_clock::now() < deadline) {
      std::this_thread::sleep_for(5ms);
    }
    return ready();
  }

  RankProcesses processes;
  c10::intrusive_ptr<c10d::TCPStore> store;

 private:
  int size_;
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
  int ranks_that_held = 0;
  for (const auto& each : ended) {
    EXPECT_FALSE(each.was_late) << each.output;
    EXPECT_EQ(each.exit_code, 0) << each.output;
    ranks_that_held += times_said(each.output, "all held");
  }
  EXPECT_EQ(ranks_that_held, size);
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

class OfFour : public testing::TestWithParam<std::string> {};

TEST_P(OfFour, SumsMeansAndProductsHaveTheBitsOfInProcess) {
  expect_all_held(GetParam(), 4, "same_bits");
}

TEST_P(OfFour, ResultsMayLieOverInputsAndPiecesMayBeUneven) {
  expect_all_held(GetParam(), 4, "overlaps");
}

TEST_P(OfFour, CollectivesGoOnWhileARankComputesAndMayBeWaitedForInAnyOrder) {
  expect_all_held(GetParam(), 4, "asynchrony");
}

TEST_P(OfFour, AMeshOfGroupsWorksInAnyOrder) {
  expect_all_held(GetParam(), 4, "mesh");
}

TEST_P(OfFour, SendsAndReceivesMatchBySenderAndTagInOrder) {
  expect_all_held(GetParam(), 4, "transfers");
}

TEST_P(OfFour, CallsThatDoNotMatchEndEveryRankWithAMismatchError) {
  expect_all_held(GetParam(), 4, "mismatches");
}

TEST_P(OfFour, ATimeoutNamesTheRanksThatAreMissing) {
  expect_all_held(GetParam(), 4, "missing");
}

TEST_P(OfFour, ARankThatLeavesEndsWhatNeedsItAndNothingElse) {
  expect_all_held(GetParam(), 4, "leaving");
}

INSTANTIATE_TEST_SUITE_P(Collectives, OfFour, testing::ValuesIn(all_backends()),
                         [](const auto& info) { return info.param; });

std::vector<std::string> process_backends() {
  auto names = all_backends();
  names.erase(names.begin());
  return names;
}

class OfProcesses : public testing::TestWithParam<std::string> {
 protected:
  static constexpr milliseconds kTimeout = 3s;

  // Every rank ends within twice the timeout, from when the first was ready, and none is left.
  std::string output_of_going(const std::string& way, const std::vector<int>& stopped = {}) {
    Launch launch(
        GetParam(), 4, "going",
        {{"SHARDPROOF_WAY", way}, {"SHARDPROOF_TIMEOUT_MS", std::to_string(kTimeout.count())}});
    EXPECT_TRUE(launch.wait_until_ready(60s));
    const bool is_store = GetParam() == "store";
    std::string output;
    // A stopped process ends when it is killed; under mpirun the others see to that.
    const auto ended = launch.processes.wait(2 * kTimeout);
    for (int i = 0; i < static_cast<int>(ended.size()); ++i) {
      const bool may_be_late =
          is_store && std::find(stopped.begin(), stopped.end(), i) != stopped.end();
      EXPECT_EQ(ended[i].was_late, may_be_late) << ended[i].output;
      output += ended[i].output;
    }
    // mpirun may end a moment before those that it killed.
    const auto deadline = steady_clock::now() + kTimeout / 2;
    while (!launch.processes.left_behind().empty() && steady_clock::now() < deadline) {
      std::this_thread::sleep_for(10ms);
    }
    EXPECT_EQ(launch.processes.left_behind(), std::vector<pid_t>()) << output;
    return output;
  }
};

TEST_P(OfProcesses, GroupsAreMadeAgainAfterTheyWereDestroyed) {
  expect_all_held(GetParam(), 3, "again");
}

TEST_P(OfProcesses, ARankThatIsKilledEndsTheOthersInTime) {
  const auto output = output_of_going("kill");
  if (GetParam() == "store") {
    EXPECT_EQ(times_said(output, "TimeoutError rank"), 3) << output;
    EXPECT_EQ(times_said(output, "rank 1 did not arrive within 3000 ms"), 3) << output;
  }
}

TEST_P(OfProcesses, ARankThatIsStoppedEndsTheOthersInTime) {
  const auto output = output_of_going("stop", {1});
  EXPECT_EQ(times_said(output, "TimeoutError rank"), 3) << output;
  EXPECT_EQ(times_said(output, "rank 1 did not arrive within 3000 ms"), 3) << output;
}

TEST_P(OfProcesses, ARankThatIsStoppedWhileItsDataMovesEndsTheOthersInTime) {
  const auto output = output_of_going("stop_in_data", {1});
  EXPECT_EQ(times_said(output, "TimeoutError rank"), 3) << output;
  // Whether the stopped rank's call came through is open.
  EXPECT_EQ(times_said(output, "timed out: rank 1 called it, but did not send or take all data") +
                times_said(output, "timed out: rank 1 did not arrive"),
            3)
      << output;
}

TEST_P(OfProcesses, ARankThatReturnsEarlyEndsTheOthers) {
  const auto output = output_of_going("return");
  EXPECT_EQ(times_said(output, "PeerError rank"), 3) << output;
  EXPECT_EQ(times_said(output, "rank 1 left the group: its backend was destroyed"), 3) << output;
}

TEST_P(OfProcesses, ARankThatThrowsEndsTheOthers) {
  const auto output = output_of_going("throw");
  EXPECT_EQ(times_said(output, "rank 1: it threw: out of patience"), 1) << output;
  if (GetParam() == "store") {  // mpirun may end the others before they can say anything
    EXPECT_EQ(times_said(output, "PeerError rank"), 3) << output;
  }
}

class OfMpi : public testing::TestWithParam<std::string> {
 protected:
  std::string output_with(const std::string& setting, const std::string& body, int exit_code) {
    Launch launch(GetParam(), 4, body, {{"FSDP_MPI_REDUCTION", setting}});
    const auto ended = launch.processes.wait(60s);
    EXPECT_FALSE(ended[0].was_late) << ended[0].output;
    EXPECT_EQ(ended[0].exit_code, exit_code) << ended[0].output;
    return ended[0].output;
  }
};

TEST_P(OfMpi, NativeReductionsAreExactOrWithinTheirBoundOrRefusedByName) {
  const auto output = output_with("native", "native", 0);
  EXPECT_EQ(times_said(output, "all held"), 4) << output;
  // 2 dtypes with 5 reductions and 9 with 4, of 5 sizes and 3 operations; 2 with 5 of 5 sizes.
  EXPECT_EQ(times_said(output, "native cells: 690 exact, 50 refused"), 4) << output;
}

TEST_P(OfMpi, NativeReductionsWorkInGroupsThatWereSplit) {
  EXPECT_EQ(times_said(output_with("native", "mesh", 0), "all held"), 4);
}

TEST_P(OfMpi, ASettingThatDoesNotExistIsRefused) {
  EXPECT_THAT(output_with("fast", "mesh", 1),
              testing::HasSubstr("FSDP_MPI_REDUCTION is \"fast\"; wanted: rank_order, native"));
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(OfMpi);
INSTANTIATE_TEST_SUITE_P(Collectives, OfMpi, testing::ValuesIn([] {
                           auto names = process_backends();
                           names.erase(names.begin());
                           return names;
                         }()),
                         [](const auto& info) { return info.param; });

INSTANTIATE_TEST_SUITE_P(Collectives, OfProcesses, testing::ValuesIn(process_backends()),
                         [](const auto& info) { return info.param; });

// ---- What only the store has --------------------------------------------------------------------

using StorePtr = c10::intrusive_ptr<c10d::Store>;

StorePtr serve(bool with_queues) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  options.useLibUV = with_queues;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

// The ranks as threads, each with a group of its own over the store.
std::vector<std::string> on_store(const StorePtr& store, int size, const Body& body,
                                  const fsdp::StoreGroupOptions& options = {60s, "world"}) {
  std::mutex mutex;
  std::vector<std::string> problems;
  std::vector<std::jthread> threads;
  for (int number = 0; number < size; ++number) {
    threads.emplace_back([&, number] {
      std::vector<std::string> found;
      try {
        Rank rank(fsdp::make_store_group(store, number, size, options), "store");
        body(rank);
        found = rank.problems;
      } catch (const std::exception& error) {
        found.push_back("rank " + std::to_string(number) + " threw: " + error.what());
      }
      const std::lock_guard lock(mutex);
      problems.insert(problems.end(), found.begin(), found.end());
    });
  }
  threads.clear();
  return problems;
}

const std::vector<std::string> kNone;

// Both ways of keeping messages in a store, and every kind of call and of ending.
TEST(StoreGroup, LeavesOneKeyForEachNameAndSizeBehind) {
  for (const bool with_queues : {true, false}) {
    const auto store = serve(with_queues);
    const auto before = store->getNumKeys();
    for (const auto* body : {"overlaps", "transfers", "mesh", "mismatches", "leaving"}) {
      EXPECT_EQ(on_store(store, 4, bodies().at(body)), kNone) << body;
      const auto keys = store->listKeys();
      EXPECT_EQ(store->getNumKeys(), before + 1)
          << body << ", with queues: " << with_queues << ", first key: " << keys.front();
      EXPECT_TRUE(store->check({"fsdp/world/4/joined"}));
      if (with_queues) {
        for (int group = 0; group < 8; ++group) {
          for (int rank = 0; rank < 4; ++rank) {
            const auto inbox =
                "fsdp/world/4/" + std::to_string(group) + "/to/" + std::to_string(rank);
            EXPECT_EQ(store->queueLen(inbox), 0) << inbox;
          }
        }
      }
    }
  }
}

TEST(StoreGroup, WorksOverStoresOfEveryKind) {
  const shardproof::TemporaryFolder folder;
  const auto file = (folder.path() / "store").string();
  const std::vector<std::pair<std::string, StorePtr>> stores = {
      {"TCPStore without queues", serve(false)},
      {"HashStore", c10::make_intrusive<c10d::HashStore>()},
      {"FileStore", c10::make_intrusive<c10d::FileStore>(file, 3)},
      {"PrefixStore", c10::make_intrusive<c10d::PrefixStore>("a prefix", serve(true))}};
  for (const auto& [name, store] : stores) {
    EXPECT_EQ(on_store(store, 3, bodies().at("transfers")), kNone) << name;
    EXPECT_EQ(on_store(store, 3, bodies().at("overlaps")), kNone) << name;
    EXPECT_EQ(on_store(store, 2, bodies().at("large")), kNone) << name;
  }
}

TEST(StoreGroup, GroupsOfOtherNamesAndSizesShareAStore) {
  const auto store = serve(true);
  std::vector<std::jthread> groups;
  std::atomic<int> good = 0;
  for (const int size : {2, 3, 4}) {
    groups.emplace_back([&, size] {
      const auto name = "group of " + std::to_string(size);
      good += on_store(store, size, bodies().at("overlaps"), {60s, name}).empty() ? 1 : 0;
    });
  }
  groups.clear();
  EXPECT_EQ(good.load(), 3);
}

template <typename E>
std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another error: ") + error.what();
  }
  return "no error";
}

TEST(StoreGroup, WrongArgumentsAreRefused) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto refused = [&](StorePtr given, int rank, int size, milliseconds timeout) {
    return message_of<fsdp::UsageError>([&] {
      fsdp::make_store_group(std::move(given), rank, size, {timeout, "world"});
    });
  };
  EXPECT_THAT(refused(nullptr, 0, 1, 1s), testing::HasSubstr("the store is null"));
  EXPECT_THAT(refused(store, 0, 0, 1s), testing::HasSubstr("0 ranks; wanted 1 or more"));
  EXPECT_THAT(refused(store, 2, 2, 1s), testing::HasSubstr("rank 2 of 2 does not exist"));
  EXPECT_THAT(refused(store, -1, 2, 1s), testing::HasSubstr("rank -1 of 2 does not exist"));
  EXPECT_THAT(refused(store, 0, 2, 0s), testing::HasSubstr("a timeout of 0 ms"));
  EXPECT_EQ(store->getNumKeys(), 0);
}

TEST(StoreGroup, RanksThatDoNotJoinAreNamed) {
  const auto store = serve(true);
  const auto join = [&](int rank, int size, const std::string& name, milliseconds timeout) {
    return message_of<fsdp::TimeoutError>([&] {
      fsdp::make_store_group(store, rank, size, {timeout, name});
    });
  };
  const auto start = steady_clock::now();
  EXPECT_THAT(join(1, 4, "a", 300ms),
              testing::HasSubstr("rank 1: ranks 0, 2-3 did not join group \"a\" of 4 ranks within "
                                 "300 ms"));
  EXPECT_LT(steady_clock::now() - start, 2s);
}

TEST(StoreGroup, ARankThatIsGivenTwiceAndSizesThatDifferAreRefused) {
  const auto store = serve(true);
  std::string first;
  std::string second;
  {
    const std::jthread other([&] {
      first = message_of<fsdp::TimeoutError>([&] {
        fsdp::make_store_group(store, 1, 3, {1s, "twice"});
      });
    });
    std::this_thread::sleep_for(200ms);
    second = message_of<fsdp::UsageError>([&] {
      fsdp::make_store_group(store, 1, 3, {1s, "twice"});
    });
  }
  EXPECT_THAT(first, testing::HasSubstr("ranks 0, 2 did not join"));
  EXPECT_THAT(second, testing::HasSubstr("another process is rank 1 of group \"twice\" too"));
  {
    const std::jthread other([&] {
      first = message_of<fsdp::UsageError>([&] {
        fsdp::make_store_group(store, 1, 8, {10s, "sizes"});
      });
    });
    second = message_of<fsdp::UsageError>([&] {
      fsdp::make_store_group(store, 0, 2, {10s, "sizes"});
    });
  }
  EXPECT_THAT(second, testing::HasSubstr("has 2 ranks here and 8 on rank 1"));
  EXPECT_THAT(first, testing::HasSubstr("has 8 ranks here and 2 on rank 0"));
}

class StoreServer : public testing::TestWithParam<int> {};

// The process that holds the store is not one of the ranks.
TEST_P(StoreServer, ThatGoesAwayEndsEveryRankInTime) {
  constexpr milliseconds kTimeout = 3s;
  RankProcesses processes;
  processes.start({own_path()}, {{"SHARDPROOF_BODY", "server"}});
  ASSERT_TRUE(processes.wait_for_output(0, ".", 30s));
  const auto said = processes.output(0);
  const auto port = said.substr(5, said.find('.') - 5);
  for (int rank = 0; rank < 3; ++rank) {
    processes.start({own_path()}, {{"SHARDPROOF_BODY", "until_error"},
                                   {"SHARDPROOF_BACKEND", "store"},
                                   {"SHARDPROOF_PORT", port},
                                   {"SHARDPROOF_RANK", std::to_string(rank)},
                                   {"SHARDPROOF_SIZE", "3"},
                                   {"SHARDPROOF_TIMEOUT_MS", std::to_string(kTimeout.count())}});
  }
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_TRUE(processes.wait_for_output(1 + rank, "under way", 60s));
  }
  ::kill(processes.pid(0), GetParam());
  const auto ended = processes.wait(2 * kTimeout);
  for (int rank = 0; rank < 3; ++rank) {
    const auto& each = ended[1 + rank];
    EXPECT_FALSE(each.was_late) << each.output;
    EXPECT_EQ(each.exit_code, 0) << each.output;
    if (GetParam() == SIGKILL) {
      EXPECT_THAT(each.output, testing::HasSubstr("saw PeerError"));
      EXPECT_THAT(each.output, testing::HasSubstr("the store does not answer any more"));
    } else {
      EXPECT_THAT(each.output, testing::HasSubstr("saw TimeoutError"));
      EXPECT_THAT(each.output, testing::HasSubstr("The store itself has not answered for"));
    }
  }
  EXPECT_EQ(processes.left_behind(), std::vector<pid_t>());
}

INSTANTIATE_TEST_SUITE_P(Signals, StoreServer, testing::Values(SIGKILL, SIGSTOP),
                         [](const auto& info) {
                           return info.param == SIGKILL ? "killed" : "stopped";
                         });

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  if (variable("SHARDPROOF_BODY") == "server") {
    return run_as_server();
  }
  if (!variable("SHARDPROOF_BODY").empty()) {
    return run_as_rank();
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
