#pragma once
// Adds up (or takes the minimum, maximum, product, mean of) the same stretch of several buffers in
// host memory, in the order in which the buffers are given.

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <span>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace fsdp::in_process {

/// "sum", "mean", "product", "min", "max", and the names of the ones that are refused.
const char* reduction_name(c10d::ReduceOp::RedOpType reduction);

/// Whether `reduce_in_order` takes this combination: sum, product, min, max of Float, Double, Half,
/// BFloat16, every signed and unsigned integer, and bool; mean of the floating-point ones.
bool is_reducible(c10d::ReduceOp::RedOpType reduction, c10::ScalarType dtype);

/// Each target[i] = (((source0[i] + source1[i]) + source2[i]) + ...) for i in [0, numel), or min,
/// max, product; the mean is that sum divided by the number of sources. Half and BFloat16 are
/// accumulated in float and rounded once; other dtypes in themselves, integers modulo 2^bits. For
/// bool, sum and max are "or", product and min are "and". NaN wins over any number in min and max.
/// A target may be one of the sources; otherwise they do not overlap. Wants `is_reducible`.
void reduce_in_order(c10d::ReduceOp::RedOpType reduction, c10::ScalarType dtype,
                     std::span<const void* const> sources, std::span<void* const> targets,
                     std::int64_t numel);

}  // namespace fsdp::in_process
