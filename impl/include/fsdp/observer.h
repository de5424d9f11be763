#pragma once
// Observation points: named places inside the library where an observer sees a tensor just made,
// and may change it. A trace recorder reads there; a fault injector writes there. When nobody
// observes, a point costs one null check.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp {

enum class Point {
  unsharded_parameters,    // flat, after the all-gather: [padded]
  unreduced_gradient,      // flat, before the reduce-scatter: [padded]
  gradient_divide_factor,  // scalar float64 on the CPU: what the sum over ranks is divided by
  sharded_gradient,        // this rank's shard, reduced and divided, before it is added to earlier
                           // micro-batches': [padded / shards]
  local_square_sum,        // words of the ExactSquareSum of this rank's shards
  global_square_sum,       // the same after the all-reduce
  total_norm,              // scalar
  clip_coefficient,        // scalar, clamped to 1
  // Of a checkpointed region that runs again (recomputation.h). The observer may put another tensor
  // in place of these. `unit` is the name of the region, and `rank` is not known.
  recomputation_input,      // a tensor that the function is given again
  recomputation_generator,  // uint8, the state of a random generator: of the rank's first
  recomputed_activation,    // a tensor that backward needs
};
std::string_view to_string(Point point);

/// Where a parameter lies in its unit's flat parameter.
struct FlatSlot {
  std::string name;  // as in the plain model
  std::vector<std::int64_t> sizes;
  std::int64_t numel = 0;
  std::int64_t offset = 0;  // elements from the start of the flat parameter
};

struct Observation {
  Point point{};
  std::string_view unit;  // the unit's name, "" for the root; empty for norms
  int rank = 0;
  int world_size = 1;
  at::Tensor& tensor;                            // may be written in place
  const std::vector<FlatSlot>* slots = nullptr;  // of the unit; null for norms
  int shard = 0;  // which of `shards` chunks of the flat parameter this rank holds
  int shards = 1;
  bool in_backward = false;  // a backward pass is running
};

class Observer {
 public:
  virtual ~Observer() = default;
  virtual void observe(const Observation& observation) = 0;
};

/// The observer of this thread's rank; nullptr for none. Returns the one before.
Observer* set_observer(Observer* observer);
Observer* observer();

/// Sets an observer for a scope.
class ObserverScope {
 public:
  explicit ObserverScope(Observer* observer) : previous_(set_observer(observer)) {}
  ~ObserverScope() { set_observer(previous_); }
  ObserverScope(const ObserverScope&) = delete;
  ObserverScope& operator=(const ObserverScope&) = delete;

 private:
  Observer* previous_;
};

}  // namespace fsdp
