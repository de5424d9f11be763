"""The exact norm, held to math.fsum and to fractions."""

from __future__ import annotations

import math
import time
from fractions import Fraction

import numpy as np
import pytest
import torch
from exact import nearest, wide_of

from norm import exact_norm, exact_sum_of_squares


def by_fsum(values: np.ndarray) -> float:
    # Squares of float32 numbers are exact in float64, and fsum rounds their exact sum once.
    return math.fsum(float(value) ** 2 for value in values.astype(np.float64))


def by_fractions(values: np.ndarray) -> float:
    total = sum((Fraction(float(value)) ** 2 for value in values), Fraction(0))
    return total.numerator / total.denominator


@pytest.mark.parametrize("seed", range(20))
def test_float32_sums_equal_fsum(seed):
    generator = np.random.default_rng(seed)
    # Magnitudes from subnormal to nearly the largest: a rounded partial sum would not survive.
    scales = 2.0 ** generator.uniform(-60 - 5 * seed, 5 * seed, size=3000)
    values = (generator.standard_normal(3000) * scales).astype(np.float32)
    assert exact_sum_of_squares(values.astype(np.float64)) == by_fsum(values)


@pytest.mark.parametrize("seed", range(20))
def test_float64_sums_equal_fractions(seed):
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(300) * 2.0 ** generator.uniform(-25 * seed, 20 * seed, 300)
    assert exact_sum_of_squares(values) == by_fractions(values)


@pytest.mark.parametrize(
    "values",
    [
        [],
        [0.0, -0.0],
        [5e-324],  # its square is below every float64
        [
            1.5e-162,
            1.5e-162,
        ],  # each square rounds to nothing or to the smallest, their sum does not
        [2.0**-537] * 3,
        [9e153, 9e153],
        [1.0, 2.0**-27],  # halfway between two float64, to even
        [1.0, 2.0**-27, 2.0**-500],  # and just above halfway
        [3.0, 2.0**-26 * 1.5, -(2.0**-80)],
        [math.nextafter(2, 1)] * 5,
    ],
)
def test_hard_float64_sums_equal_fractions(values):
    array = np.array(values, dtype=np.float64)
    assert exact_sum_of_squares(array) == by_fractions(array)


def test_a_sum_above_the_largest_float64_is_infinite():
    assert exact_sum_of_squares(np.array([1e200])) == math.inf
    largest_root = math.sqrt(math.nextafter(math.inf, 0))
    assert math.isfinite(exact_sum_of_squares(np.array([math.nextafter(largest_root, 0)])))


def test_many_equal_numbers_cross_the_chunks_exactly():
    values = np.full(200_001, math.nextafter(2, 1))
    exact = Fraction(math.nextafter(2, 1)) ** 2 * len(values)
    assert exact_sum_of_squares(values) == exact.numerator / exact.denominator


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_depends_neither_on_order_nor_on_grouping(dtype):
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(10_000, generator=generator, dtype=dtype).exp()
    norm = exact_norm([values])
    assert norm.dtype == dtype and norm.shape == ()
    shuffled = values[torch.randperm(10_000, generator=generator)]
    assert exact_norm([shuffled]) == norm
    assert exact_norm([values[:17], values[17:17], values[17:].reshape(-1, 1)]) == norm
    assert norm.item() == pytest.approx(values.double().norm().item(), rel=1e-6)


def test_the_root_is_rounded_to_float32_once():
    values = torch.tensor([3.0, 4.0, 2.0**-20])
    expected = np.float32(math.sqrt(by_fsum(values.numpy())))
    assert exact_norm([values]).item() == expected


@pytest.mark.parametrize(
    ("values", "norm"),
    [
        ([1.0, math.inf], math.inf),
        ([-math.inf], math.inf),
        ([math.inf, math.nan], math.nan),
        ([3e38, 3e38, 3e38], math.inf),  # the float32 norm overflows, the float64 sum does not
        ([0.0], 0.0),
    ],
)
def test_norms_that_are_not_finite_and_zero(values, norm):
    assert exact_norm([torch.tensor(values)]).item() == pytest.approx(norm, nan_ok=True)


def test_three_million_elements_take_less_than_a_second():
    values = torch.randn(3_300_000)
    exact_norm([values])
    start = time.process_time()  # of this process: the machine may be busy
    exact_norm([values])
    assert time.process_time() - start < 1


# ---- Other norms, and 16 bits -------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def by_hand(values: list[float], p: float, dtype: torch.dtype) -> float:
    if p == math.inf:
        return max(abs(value) for value in values)
    exact = sum((Fraction(abs(value) ** p) for value in values), Fraction(0))
    total = exact.numerator / exact.denominator
    return converted(math.sqrt(total) if p == 2 else total ** (1 / p), dtype)


def converted(value: float, dtype: torch.dtype) -> float:
    """From float64; to 16 bits torch goes by way of float32."""
    return nearest(nearest(value, wide_of(dtype)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 2.5, 0.5, 7.25, math.inf])
def test_norms_are_those_of_rational_sums(p, dtype):
    generator = torch.Generator().manual_seed(int(min(p, 100) * 4))
    for spread in (0, 1, 3):
        values = torch.randn(200, generator=generator, dtype=torch.float64)
        values = (values * (spread * torch.randn(200, generator=generator).double()).exp()).to(
            dtype
        )
        norm = exact_norm([values[:50], values[50:].view(2, -1)], p)
        assert norm.dtype == dtype and norm.shape == ()
        powers = values.double().tolist()
        if p == 2:  # the square of a float64 number is not one
            exact = sum((Fraction(value) ** 2 for value in powers), Fraction(0))
            assert norm.item() == converted(math.sqrt(exact.numerator / exact.denominator), dtype)
        else:
            assert norm.item() == by_hand(powers, p, dtype)


def test_norms_of_known_numbers():
    values = torch.tensor([3.0, -4.0])
    norms = {p: exact_norm([values], p).item() for p in (1, 2, 3, 2.5, math.inf)}
    third = float(np.float32(91 ** (1 / 3)))
    half = float(np.float32((9 * math.sqrt(3) + 32) ** 0.4))
    assert norms == {1: 7, 2: 5, 3: third, 2.5: half, math.inf: 4}


@pytest.mark.parametrize("p", [1.0, 3.0, 2.5])
def test_sums_of_powers_depend_neither_on_order_nor_on_grouping(p):
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(5000, generator=generator, dtype=torch.float64).exp().pow(8)
    norm = exact_norm([values], p)
    shuffled = values[torch.randperm(5000, generator=generator)]
    assert exact_norm([shuffled], p) == norm
    assert exact_norm([values[:17], values[17:17], values[17:].reshape(-1, 1)], p) == norm
    assert norm.item() == pytest.approx(torch.linalg.vector_norm(values, p).item())


def test_large_and_small_numbers_are_not_lost_among_each_other():
    # Added one after another in float64, each of the small ones would vanish.
    values = torch.tensor([1.0, *[2.0**-54] * 8], dtype=torch.float64)
    assert exact_norm([values], 1).item() == 1 + 2.0**-51


@pytest.mark.parametrize("p", [1.0, 3.0, 2.5, math.inf])
def test_other_norms_that_are_not_finite_and_zero(p):
    for values, norm in (
        ([1.0, math.inf], math.inf),
        ([1.0, -math.inf], math.inf),
        ([math.inf, math.nan], math.nan),
        ([math.nan, 1.0], math.nan),
        ([0.0, -0.0], 0.0),
    ):
        assert exact_norm([torch.tensor(values)], p).item() == pytest.approx(norm, nan_ok=True)


def test_powers_and_sums_above_the_largest_float64_are_infinite():
    huge = torch.tensor([1e200, 1.0], dtype=torch.float64)
    assert exact_norm([huge], 3).item() == math.inf
    assert exact_norm([huge], math.inf).item() == 1e200
    largest = torch.full((2,), 1.7e308, dtype=torch.float64)
    assert exact_norm([largest], 1).item() == math.inf
    assert exact_norm([torch.tensor([1e-200, 0.0], dtype=torch.float64)], 3).item() == 0
    many = torch.full((4,), 30000.0, dtype=torch.float16)
    assert exact_norm([many], 1).item() == math.inf  # 120000 is above float16's largest
    assert exact_norm([many], 2).item() == 60000


def test_a_large_p_is_not_infinity():
    values = torch.tensor([1.0] * 1000)
    assert exact_norm([values], 200).item() == np.float32(1000 ** (1 / 200)) > 1
