"""The sums over ranks, held to rational arithmetic that is rounded where the page says so."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from conftest import small_scenario
from exact import SlowReduction, nearest, wide_of

from reduction import Reduction
from scenario import DTYPES, Scenario


def reduced(scenario: Scenario, gradients: list[list[float | None]]) -> float | None:
    """Of one element, gradients[micro_batch][rank]; None where there is no gradient."""
    reduction = Reduction(scenario)
    for ranks in gradients:
        reduction.add_micro_batch(
            [
                {} if g is None else {"w": torch.tensor([g], dtype=scenario.parameter_dtype)}
                for g in ranks
            ]
        )
    result = reduction.result()
    if not result:
        return None
    assert result["w"].dtype == scenario.torch_dtype
    return result["w"].item()


LAYOUTS = [
    ("full_shard", 5, 1, (1, 5)),
    ("shard_grad_op", 3, 1, (1, 3)),
    ("no_shard", 5, 1, (5, 1)),
    ("hybrid_shard", 6, 2, (2, 3)),
    ("hybrid_shard_zero2", 6, 3, (3, 2)),
    ("hybrid_shard", 4, 1, (1, 4)),
    ("hybrid_shard_zero2", 4, 4, (4, 1)),
    ("full_shard", 1, 1, (1, 1)),
]


@pytest.mark.parametrize(("strategy", "world", "replicas", "layout"), LAYOUTS)
def test_the_layout_is_that_of_the_strategy(strategy, world, replicas, layout):
    scenario = small_scenario(strategy=strategy, world_size=world, replicas=replicas)
    assert scenario.layout == layout


@pytest.mark.parametrize("accumulation", ["each", "last", "last_all_reduce"])
@pytest.mark.parametrize(("strategy", "world", "replicas", "layout"), LAYOUTS)
@pytest.mark.parametrize(
    ("dtype", "parameter", "reduce"),
    [
        ("float32", "", ""),
        ("float64", "", ""),
        ("bfloat16", "", ""),
        ("float16", "", ""),
        ("float32", "bfloat16", ""),
        ("float32", "bfloat16", "float32"),
        ("float32", "float32", "bfloat16"),
        ("float32", "float16", ""),
        ("bfloat16", "bfloat16", "float32"),
        ("float64", "float32", "float16"),
    ],
)
def test_sums_are_those_of_rational_numbers(
    strategy, world, replicas, layout, accumulation, dtype, parameter, reduce
):
    if accumulation == "last_all_reduce" and not strategy.startswith("hybrid"):
        return
    scenario = small_scenario(
        strategy=strategy,
        world_size=world,
        replicas=replicas,
        micro_batches=3,
        accumulation=accumulation,
        dtype=dtype,
        precision={"parameter": parameter, "reduce": reduce},
    )
    pre, post = (1, world) if scenario.reduce_dtype != torch.float16 else scenario.divisors
    slow = SlowReduction(scenario.reduce_dtype, scenario.torch_dtype, *layout, pre, post)
    generator = torch.Generator().manual_seed(world)
    values = torch.randn(40, 3, world, generator=generator, dtype=torch.float64)
    for element in values.to(scenario.parameter_dtype).double().tolist():
        assert reduced(scenario, element) == slow(accumulation, element)


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_the_ways_to_accumulate_differ(reduce):
    # What the test above asserts of each would else be empty.
    values = torch.randn(30, 3, 6, generator=torch.Generator().manual_seed(0)).tolist()
    results = [
        [
            reduced(
                small_scenario(
                    strategy=strategy,
                    world_size=6,
                    replicas=replicas,
                    micro_batches=3,
                    accumulation=accumulation,
                    precision={"reduce": reduce},
                ),
                element,
            )
            for element in values
        ]
        for strategy, replicas, accumulation in [
            ("full_shard", 1, "each"),
            ("full_shard", 1, "last"),
            ("hybrid_shard", 2, "each"),
            ("hybrid_shard", 2, "last"),
            ("hybrid_shard", 2, "last_all_reduce"),
        ]
    ]
    for one, other in itertools.combinations(results, 2):
        assert one != other


@pytest.mark.parametrize(
    ("world", "divisors"),
    [
        (1, (1, 1)),
        (2, (2, 1)),
        (3, (2, 1.5)),
        (4, (2, 2)),
        (6, (4, 1.5)),
        (8, (4, 2)),
        (12, (4, 3)),
        (16, (4, 4)),
        (512, (32, 16)),
    ],
)
def test_float16_is_divided_by_half_before_and_half_after(world, divisors):
    assert small_scenario(world_size=world, dtype="float16").divisors == divisors
    assert small_scenario(world_size=world, precision={"reduce": "float16"}).divisors == divisors
    assert small_scenario(world_size=world, precision={"parameter": "float16"}).divisors == divisors
    for wide in ({"reduce": "float32"}, {"reduce": "bfloat16"}):
        assert small_scenario(world_size=world, dtype="float16", precision=wide).divisors == (
            1,
            world,
        )


@pytest.mark.parametrize(
    ("strategy", "replicas"), [("full_shard", 1), ("no_shard", 1), ("hybrid_shard", 2)]
)
@pytest.mark.parametrize(
    ("divide", "large", "small"),
    [
        ({}, 30000, 2.0**-23),
        ({"pre": 2, "post": 2}, 30000, 2.0**-23),
        ({"pre": 1, "post": 4}, math.inf, 2.0**-23),  # the sum, 120000, is above float16's largest
        ({"post": 4}, math.inf, 2.0**-23),
        ({"pre": 4, "post": 1}, 30000, 0),  # a fourth of it is below float16's smallest
    ],
)
def test_float16_overflows_or_underflows_when_divided_at_one_side_only(
    strategy, replicas, divide, large, small
):
    scenario = small_scenario(
        strategy=strategy,
        replicas=replicas,
        world_size=4,
        dtype="float16",
        divide=divide,
    )
    assert reduced(scenario, [[30000.0] * 4]) == large
    assert reduced(scenario, [[2.0**-23] * 4]) == small


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(("pre", "post"), [(3, 7), (0.75, 1), (1, 10), (0, 0.3)])
def test_factors_may_be_any_numbers_and_divide_truly(dtype, pre, post):
    scenario = small_scenario(world_size=2, dtype=dtype, divide={"pre": pre, "post": post})
    kept = scenario.torch_dtype
    wide = wide_of(kept)  # a factor is not rounded to 16 bits
    slow = SlowReduction(kept, kept, 1, 2, nearest(pre or 1, wide), nearest(post, wide))
    values = torch.randn(100, 1, 2, generator=torch.Generator().manual_seed(0)).to(kept)
    for element in values.tolist():
        assert reduced(scenario, element) == slow("each", element)


ONE, SMALL = 1.0, 2.0**-9  # their sum needs more digits than bfloat16 has


@pytest.mark.parametrize("stage", ["shards", "replicas"])
@pytest.mark.parametrize("accumulation", ["each", "last", "last_all_reduce"])
def test_float32_reduction_holds_at_both_stages(stage, accumulation):
    scenario = small_scenario(
        strategy="hybrid_shard",
        world_size=4,
        replicas=2,
        micro_batches=2,
        accumulation=accumulation,
        precision={"parameter": "bfloat16", "reduce": "float32"},
        divide={"post": 1},
    )
    ranks = [ONE, SMALL, 0.0, 0.0] if stage == "shards" else [ONE, 0.0, SMALL, 0.0]
    assert reduced(scenario, [ranks, [0.0] * 4]) == 1.001953125


@pytest.mark.parametrize(
    ("strategy", "replicas", "total"),
    [
        ("full_shard", 1, 1.0078125),  # 1 + 3/512, rounded once; 1 if after each addition
        ("no_shard", 1, 1.0078125),
        ("hybrid_shard", 2, 1.0),  # 1 + 1/512 is 1, then 1 + 2/512, a tie, is 1
    ],
)
def test_bfloat16_is_summed_in_float32_and_rounded_once_a_stage(strategy, replicas, total):
    scenario = small_scenario(
        strategy=strategy,
        world_size=4,
        replicas=replicas,
        dtype="bfloat16",
        divide={"post": 1},
    )
    assert reduced(scenario, [[ONE, SMALL, SMALL, SMALL]]) == total


def test_whole_gradients_are_added_up_in_the_reduction_dtype():
    # 1 + 1/512 is lost in bfloat16 at each of the three additions, and kept in float32.
    for reduce, total in (("bfloat16", 1.0), ("float32", 1 + 3 / 512)):
        scenario = small_scenario(
            world_size=1,
            micro_batches=4,
            accumulation="last",
            precision={"parameter": "bfloat16", "reduce": reduce},
        )
        assert reduced(scenario, [[ONE], [SMALL], [SMALL], [SMALL]]) == total


def test_micro_batches_reduced_each_are_added_up_in_the_dtype_that_is_kept():
    for dtype, total in (("bfloat16", 1.0), ("float32", 1 + 3 / 512)):
        scenario = small_scenario(
            world_size=1, micro_batches=4, dtype=dtype, precision={"reduce": "float32"}
        )
        assert reduced(scenario, [[ONE], [SMALL], [SMALL], [SMALL]]) == total


@pytest.mark.parametrize("accumulation", ["each", "last", "last_all_reduce"])
def test_a_missing_gradient_is_zero_unless_all_are_missing(accumulation):
    scenario = small_scenario(
        strategy="hybrid_shard",
        world_size=4,
        replicas=2,
        micro_batches=2,
        accumulation=accumulation,
    )
    nothing = [None] * 4
    assert reduced(scenario, [nothing, nothing]) is None
    assert reduced(scenario, [[None, None, None, 8.0], nothing]) == 2
    assert reduced(scenario, [nothing, [8.0, None, None, None]]) == 2
    assert reduced(scenario, [[None, 8.0, None, None], [4.0, None, None, 12.0]]) == 6


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_negative_zero_stays_one(strategy, dtype):
    # Sums that began with zero would lose the sign.
    scenario = small_scenario(strategy=strategy, world_size=3, micro_batches=2, dtype=dtype)
    result = reduced(scenario, [[-0.0] * 3] * 2)
    assert result == 0 and math.copysign(1, result) == -1


def test_the_gradients_of_different_parameters_do_not_mix():
    scenario = small_scenario(world_size=2, micro_batches=2)
    reduction = Reduction(scenario)
    for scale in (1, 10):
        reduction.add_micro_batch(
            [
                {"a": torch.tensor([1.0 * scale, 2.0]), "b": torch.tensor(4.0 * scale)},
                {"b": torch.tensor(8.0 * scale), "a": torch.tensor([3.0 * scale, 4.0])},
            ]
        )
    result = reduction.result()
    assert result["a"].tolist() == [22, 6] and result["b"].item() == 66
