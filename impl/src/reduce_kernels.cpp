#include "reduce_kernels.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

namespace fsdp::in_process {
namespace {

using RedOpType = c10d::ReduceOp::RedOpType;

// The accumulator of a block stays in the first-level cache while the sources stream past it.
constexpr std::int64_t kBlock = 2048;

template <typename T>
constexpr bool kIsReducedPrecision =
    std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>;

template <typename T>
using Accumulator = std::conditional_t<kIsReducedPrecision<T>, float, T>;

// Integers wrap around. In C++ only unsigned ones may; and what is narrower than an int would be
// promoted to a signed one first, so the arithmetic is done in 64 unsigned bits.
template <typename A, typename Operator>
A arithmetic(A a, A b, Operator apply) {
  if constexpr (std::is_integral_v<A>) {
    return static_cast<A>(apply(static_cast<std::uint64_t>(a), static_cast<std::uint64_t>(b)));
  } else {
    return apply(a, b);
  }
}

struct Sum {
  template <typename A>
  static A combine(A a, A b) {
    return arithmetic(a, b, [](auto x, auto y) { return x + y; });
  }
};

struct Product {
  template <typename A>
  static A combine(A a, A b) {
    return arithmetic(a, b, [](auto x, auto y) { return x * y; });
  }
};

// `b != b` holds for NaN only. A NaN in `a` stays because every comparison with it is false.
struct Min {
  template <typename A>
  static A combine(A a, A b) {
    return (b < a) | (b != b) ? b : a;
  }
};

struct Max {
  template <typename A>
  static A combine(A a, A b) {
    return (b > a) | (b != b) ? b : a;
  }
};

// Calls body(i) for i in [0, numel). A full block has a trip count that the compiler knows, which
// is what it wants at -O2 to use vector instructions.
template <typename Body>
void for_each_in_block(std::int64_t numel, Body body) {
  if (numel == kBlock) {
    for (std::int64_t i = 0; i < kBlock; ++i) {
      body(i);
    }
  } else {
    for (std::int64_t i = 0; i < numel; ++i) {
      body(i);
    }
  }
}

template <typename T>
void load(Accumulator<T>* __restrict accumulator, const T* __restrict source, std::int64_t numel) {
  for_each_in_block(
      numel, [=](std::int64_t i) { accumulator[i] = static_cast<Accumulator<T>>(source[i]); });
}

template <typename Combiner, typename T>
void combine(Accumulator<T>* __restrict accumulator, const T* __restrict source,
             std::int64_t numel) {
  for_each_in_block(numel, [=](std::int64_t i) {
    accumulator[i] = Combiner::combine(accumulator[i], static_cast<Accumulator<T>>(source[i]));
  });
}

template <typename A>
void divide(A* accumulator, A divisor, std::int64_t numel) {
  for_each_in_block(numel, [=](std::int64_t i) { accumulator[i] = accumulator[i] / divisor; });
}

template <typename T>
void store(T* __restrict target, const Accumulator<T>* __restrict accumulator, std::int64_t numel) {
  if constexpr (kIsReducedPrecision<T>) {
    for_each_in_block(numel, [=](std::int64_t i) { target[i] = static_cast<T>(accumulator[i]); });
  } else {
    std::memcpy(target, accumulator, static_cast<std::size_t>(numel) * sizeof(T));
  }
}

// One pass over memory: a block is read from every source before any target of it is written, which
// is also why a target may be a source.
template <typename Combiner, typename T>
void reduce(std::span<const void* const> sources, std::span<void* const> targets,
            std::int64_t numel, bool mean) {
  std::array<Accumulator<T>, kBlock> accumulator;
  for (std::int64_t begin = 0; begin < numel; begin += kBlock) {
    const auto count = std::min(kBlock, numel - begin);
    load<T>(accumulator.data(), static_cast<const T*>(sources[0]) + begin, count);
    for (const void* source : sources.subspan(1)) {
      combine<Combiner, T>(accumulator.data(), static_cast<const T*>(source) + begin, count);
    }
    if constexpr (std::is_floating_point_v<Accumulator<T>>) {
      if (mean) {
        divide(accumulator.data(), static_cast<Accumulator<T>>(sources.size()), count);
      }
    }
    for (void* target : targets) {
      store<T>(static_cast<T*>(target) + begin, accumulator.data(), count);
    }
  }
}

template <typename T>
void reduce(RedOpType reduction, std::span<const void* const> sources,
            std::span<void* const> targets, std::int64_t numel) {
  switch (reduction) {
    case RedOpType::PRODUCT:
      return reduce<Product, T>(sources, targets, numel, false);
    case RedOpType::MIN:
      return reduce<Min, T>(sources, targets, numel, false);
    case RedOpType::MAX:
      return reduce<Max, T>(sources, targets, numel, false);
    default:
      return reduce<Sum, T>(sources, targets, numel, reduction == RedOpType::AVG);
  }
}

// On bytes that hold 0 or 1, "or" is the maximum and "and" the minimum.
RedOpType as_byte_reduction(RedOpType reduction) {
  return reduction == RedOpType::SUM || reduction == RedOpType::MAX ? RedOpType::MAX
                                                                    : RedOpType::MIN;
}

}  // namespace

const char* reduction_name(RedOpType reduction) {
  switch (reduction) {
    case RedOpType::SUM:
      return "sum";
    case RedOpType::AVG:
      return "mean";
    case RedOpType::PRODUCT:
      return "product";
    case RedOpType::MIN:
      return "min";
    case RedOpType::MAX:
      return "max";
    case RedOpType::BAND:
      return "bitwise and";
    case RedOpType::BOR:
      return "bitwise or";
    case RedOpType::BXOR:
      return "bitwise xor";
    case RedOpType::PREMUL_SUM:
      return "pre-multiplied sum";
    case RedOpType::UNUSED:
      break;
  }
  return "unknown reduction";
}

bool is_reducible(RedOpType reduction, c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kFloat:
    case c10::kDouble:
    case c10::kHalf:
    case c10::kBFloat16:
      return reduction <= RedOpType::MAX;
    case c10::kBool:
    case c10::kByte:
    case c10::kChar:
    case c10::kShort:
    case c10::kInt:
    case c10::kLong:
    case c10::kUInt16:
    case c10::kUInt32:
    case c10::kUInt64:
      return reduction <= RedOpType::MAX && reduction != RedOpType::AVG;
    default:
      return false;
  }
}

void reduce_in_order(RedOpType reduction, c10::ScalarType dtype,
                     std::span<const void* const> sources, std::span<void* const> targets,
                     std::int64_t numel) {
  switch (dtype) {
    case c10::kFloat:
      return reduce<float>(reduction, sources, targets, numel);
    case c10::kDouble:
      return reduce<double>(reduction, sources, targets, numel);
    case c10::kHalf:
      return reduce<c10::Half>(reduction, sources, targets, numel);
    case c10::kBFloat16:
      return reduce<c10::BFloat16>(reduction, sources, targets, numel);
    case c10::kBool:
      return reduce<std::uint8_t>(as_byte_reduction(reduction), sources, targets, numel);
    case c10::kByte:
      return reduce<std::uint8_t>(reduction, sources, targets, numel);
    case c10::kChar:
      return reduce<std::int8_t>(reduction, sources, targets, numel);
    case c10::kShort:
      return reduce<std::int16_t>(reduction, sources, targets, numel);
    case c10::kInt:
      return reduce<std::int32_t>(reduction, sources, targets, numel);
    case c10::kLong:
      return reduce<std::int64_t>(reduction, sources, targets, numel);
    case c10::kUInt16:
      return reduce<std::uint16_t>(reduction, sources, targets, numel);
    case c10::kUInt32:
      return reduce<std::uint32_t>(reduction, sources, targets, numel);
    case c10::kUInt64:
      return reduce<std::uint64_t>(reduction, sources, targets, numel);
    default:
      TORCH_INTERNAL_ASSERT(false, "no reduction of ", c10::toString(dtype));
  }
}

}  // namespace fsdp::in_process
