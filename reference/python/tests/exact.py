"""Rounding by rational numbers: a second way to what torch's arithmetic gives, operation by operation."""

from __future__ import annotations

import math
from fractions import Fraction

import torch

# Bits of the significand, and the exponents of the smallest normal and of the largest number.
FORMATS = {
    torch.float64: (53, -1022, 1023),
    torch.float32: (24, -126, 127),
    torch.bfloat16: (8, -126, 127),
    torch.float16: (11, -14, 15),
}


def nearest(value: Fraction | float, dtype: torch.dtype) -> float:
    """The number of the dtype nearest to a finite value, to even between two."""
    bits, lowest, highest = FORMATS[dtype]
    value = Fraction(value)
    if value == 0:
        return 0.0
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, lowest) - bits + 1)
    result = round(value / unit) * unit  # of halves, Python takes the even one
    if abs(result) >= Fraction(2) ** (highest + 1):
        return math.copysign(math.inf, value)
    return float(result)


def sum_in(dtype: torch.dtype, summands: list[float]) -> float:
    """In order, each addition in the dtype that sums of this dtype are made in, rounded at the end."""
    if len(summands) == 1:
        return summands[0]
    total = summands[0]
    for each in summands[1:]:
        total = nearest(Fraction(total) + Fraction(each), wide_of(dtype))
    return nearest(total, dtype)


def scaled(value: float, factor: Fraction, dtype: torch.dtype) -> float:
    """Times a number that is not of the dtype: with one of 16 bits, that is done in float32."""
    return nearest(nearest(Fraction(value) * factor, wide_of(dtype)), dtype)


def wide_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if FORMATS[dtype][0] < 24 else dtype


def quotient(value: float, divisor: float, dtype: torch.dtype) -> float:
    return scaled(value, 1 / Fraction(divisor), dtype)


class SlowReduction:
    """The page's formulas for one element: gradients[micro_batch][rank] to the step's gradient."""

    def __init__(self, reduce, kept, replicas, shards, pre, post):
        self.reduce, self.kept = reduce, kept
        self.replicas, self.shards = replicas, shards
        self.pre, self.post = pre, post

    def over_shards(self, ranks: list[float]) -> list[float]:
        x = [quotient(each, self.pre, self.reduce) for each in ranks]
        return [
            sum_in(self.reduce, x[i * self.shards : (i + 1) * self.shards])
            for i in range(self.replicas)
        ]

    def over_replicas(self, sums: list[float]) -> float:
        t = quotient(sum_in(self.reduce, sums), self.post, self.reduce)
        return nearest(t, self.kept)

    def __call__(self, accumulation: str, gradients: list[list[float]]) -> float:
        cast = [[nearest(g, self.reduce) for g in ranks] for ranks in gradients]
        if accumulation == "each":
            each = [self.over_replicas(self.over_shards(ranks)) for ranks in cast]
            return running(each, self.kept)
        if accumulation == "last":
            whole = [running(list(of_rank), self.reduce) for of_rank in zip(*cast, strict=True)]
            return self.over_replicas(self.over_shards(whole))
        sums = [self.over_shards(ranks) for ranks in cast]
        kept = [running(list(of_replica), self.reduce) for of_replica in zip(*sums, strict=True)]
        return self.over_replicas(kept)


def running(summands: list[float], dtype: torch.dtype) -> float:
    """Every addition rounded, as add_ does it."""
    total = summands[0]
    for each in summands[1:]:
        total = nearest(Fraction(total) + Fraction(each), dtype)
    return total
