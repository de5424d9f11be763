#include "fsdp/observer.h"

#include <utility>

namespace fsdp {
namespace {
thread_local Observer* current = nullptr;
}  // namespace

std::string_view to_string(Point point) {
  switch (point) {
    case Point::unsharded_parameters:
      return "unsharded_parameters";
    case Point::unreduced_gradient:
      return "unreduced_gradient";
    case Point::gradient_divide_factor:
      return "gradient_divide_factor";
    case Point::sharded_gradient:
      return "sharded_gradient";
    case Point::local_square_sum:
      return "local_square_sum";
    case Point::global_square_sum:
      return "global_square_sum";
    case Point::total_norm:
      return "total_norm";
    case Point::clip_coefficient:
      return "clip_coefficient";
    case Point::recomputation_input:
      return "recomputation_input";
    case Point::recomputation_generator:
      return "recomputation_generator";
    case Point::recomputed_activation:
      return "recomputed_activation";
  }
  return "unknown";
}

Observer* set_observer(Observer* observer) {
  return std::exchange(current, observer);
}
Observer* observer() {
  return current;
}

}  // namespace fsdp
