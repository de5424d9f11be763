"""The norm that clipping uses: the p-th root of the exact sum of p-th powers. Because the sum is
exact, it depends neither on the order of the elements nor on how they are grouped into shards."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LIMB_BITS = 27
_LIMB_MASK = np.uint64((1 << _LIMB_BITS) - 1)
# bincount adds in float64, which is exact below 2^53: so many limbs of 27 bits fit.
_CHUNK = 1 << 16
# frexp's exponents of float64 lie in [-1073, 1024].
_LOWEST_EXPONENT = -1073
_EXPONENTS = 1024 - _LOWEST_EXPONENT + 1


def exact_norm(tensors: Iterable[Tensor], p: float = 2.0) -> Tensor:
    """A scalar of the tensors' dtype: the sum is rounded to float64 once, its root to the dtype as
    torch converts it."""
    tensors = list(tensors)
    dtype = tensors[0].dtype
    arrays = [each.detach().reshape(-1).cpu().double().numpy() for each in tensors]
    joined = np.concatenate(arrays)
    if not np.isfinite(joined).all():
        return torch.tensor(math.nan if np.isnan(joined).any() else math.inf, dtype=dtype)
    return torch.tensor(_finite_norm(joined, p), dtype=torch.float64).to(dtype)


def _finite_norm(values: NDArray[np.float64], p: float) -> float:
    if p == 2:
        return math.sqrt(exact_sum_of_squares(values))
    magnitudes = np.abs(values)
    if p == math.inf:
        return float(magnitudes.max(initial=0.0))
    if p == 1:
        return _exact_sum(magnitudes.tolist())
    # Python's pow is that of the C library; numpy has one of its own, which rounds otherwise.
    return _power(_exact_sum([_power(each, p) for each in magnitudes.tolist()]), 1 / p)


def _power(base: float, exponent: float) -> float:
    try:
        return math.pow(base, exponent)
    except OverflowError:
        return math.inf


def _exact_sum(summands: list[float]) -> float:
    """Of numbers that are not negative: the real sum, rounded once."""
    try:
        return math.fsum(summands)
    except OverflowError:
        return math.inf


def exact_sum_of_squares(values: NDArray[np.float64]) -> float:
    """The real sum of squares of finite numbers, rounded to float64 once; infinite if it overflows.

    Every number is m * 2^(e - 53) with an integer m below 2^53. With m = a * 2^27 + b, its square
    is made of the integers a*a, 2*a*b and b*b. Their sums are kept by exponent, in 27-bit limbs,
    and joined at the end in Python's integers."""
    # Row i holds the sum of limbs that stand for 2^(27 i) * 2^(2 (e - 53)); column: exponent e.
    limbs = [[0] * _EXPONENTS for _ in range(4)]
    for start in range(0, len(values), _CHUNK):
        _add_squares(values[start : start + _CHUNK], limbs)
    total = 0
    for row, sums in enumerate(limbs):
        for column, limb_sum in enumerate(sums):
            # All exponents are counted from the lowest, so that the total is an integer.
            total += limb_sum << (_LIMB_BITS * row + 2 * column)
    # What a one in column 0 of row 0 stands for is 2^-scale.
    scale = 2 * (53 - _LOWEST_EXPONENT)
    try:
        return total / (1 << scale)  # Python divides integers with one correct rounding.
    except OverflowError:
        return math.inf


def _add_squares(values: NDArray[np.float64], limbs: list[list[int]]) -> None:
    mantissas, exponents = np.frexp(values)
    columns = exponents.astype(np.int64) - _LOWEST_EXPONENT
    lowest = int(columns.min())
    columns -= lowest
    m = np.ldexp(np.abs(mantissas), 53).astype(np.uint64)
    a, b = m >> np.uint64(_LIMB_BITS), m & _LIMB_MASK
    for row, product in ((0, b * b), (1, (a * b) << np.uint64(1)), (2, a * a)):
        for up, limb in ((0, product & _LIMB_MASK), (1, product >> np.uint64(_LIMB_BITS))):
            sums = np.bincount(columns, weights=limb)
            for column in np.flatnonzero(sums):
                limbs[row + up][lowest + column] += int(sums[column])
