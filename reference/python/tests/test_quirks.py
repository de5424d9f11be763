"""Every quirk, alone and with the others, held to plain functions and to what it is about."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import SGD, small_scenario, weights_of
from plain import RankResult
from test_precision import assert_step, values

from models import make_model
from scenario import QUIRKS
from trainer import Trainer

COMBINATIONS = [
    [],
    *([each] for each in QUIRKS),
    *(list(pair) for pair in itertools.combinations(QUIRKS, 2)),
    list(QUIRKS),
]


@pytest.mark.parametrize("quirks", COMBINATIONS, ids=lambda quirks: "-".join(quirks) or "none")
def test_a_step_is_the_plain_function(quirks):
    narrow = {"parameter": "bfloat16", "buffer": "float16" if "buffer" in quirks else ""}
    depth = 3 if {"tied_across", "frozen_layer"} <= set(quirks) else 2
    for depth, precision in ((3, {}), (depth, narrow)):
        scenario = small_scenario(
            "quirks", model__quirks=quirks, model__depth=depth, precision=precision, micro_batches=2
        )
        weights = weights_of(scenario)
        trace = Trainer(scenario, weights).step(0)
        assert_step(trace, scenario, weights)
        for name, value in values(trace, "parameter").items():
            untouched = name not in values(trace, "gradient")
            assert torch.equal(value, weights[name]) == untouched, name


def test_one_layer_is_first_and_last():
    alone = [each for each in QUIRKS if each not in ("tied_across", "twice", "frozen_layer")]
    for quirks in ([], alone):
        scenario = small_scenario("quirks", model__quirks=quirks, model__depth=1)
        trace = Trainer(scenario, weights_of(scenario)).step(0)
        assert_step(trace, scenario, weights_of(scenario))


def listed(*quirks: str, depth: int = 3) -> list[tuple[str, tuple[int, ...]]]:
    model = make_model(small_scenario("quirks", model__quirks=list(quirks), model__depth=depth))
    return [(name, tuple(p.shape)) for name, p in model.named_parameters()]


def linear(i: int) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"layers.{i}.linear.weight", (8, 8)), (f"layers.{i}.linear.bias", (8,))]


def test_parameters_and_their_order():
    assert listed() == [*linear(0), *linear(1), *linear(2)]
    assert listed("tied_inside", "buffer", "twice", "frozen_bias") == listed()
    assert listed("tied_across") == [*linear(0), *linear(1), ("layers.2.linear.bias", (8,))]
    # A module's own parameters come before those of the modules within.
    assert listed("unused", "scalar", "tied_inside", depth=1) == [
        ("layers.0.gain", ()),
        ("layers.0.spare", (3,)),
        *linear(0),
        ("spare_layer.gain", ()),
        ("spare_layer.spare", (3,)),
        ("spare_layer.linear.weight", (8, 8)),
        ("spare_layer.linear.bias", (8,)),
    ]


def frozen(*quirks: str, depth: int = 3) -> set[str]:
    model = make_model(small_scenario("quirks", model__quirks=list(quirks), model__depth=depth))
    return {name for name, p in model.named_parameters() if not p.requires_grad}


def test_what_is_frozen():
    assert frozen(*(set(QUIRKS) - {"frozen_bias", "frozen_layer"})) == set()
    assert frozen("frozen_bias") == {f"layers.{i}.linear.bias" for i in range(3)}
    assert frozen("frozen_bias", "unused", depth=1) == {
        "layers.0.linear.bias",
        "spare_layer.linear.bias",
    }
    assert frozen("frozen_layer", "unused", "scalar") == {
        f"layers.1.{name}" for name in ("gain", "spare", "linear.weight", "linear.bias")
    }
    assert frozen("frozen_layer", depth=2) == {"layers.1.linear.weight", "layers.1.linear.bias"}


@pytest.mark.parametrize("optimizer", [{"kind": "adamw", "lr": 0.01}, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("precision", [{}, {"parameter": "bfloat16"}], ids=["plain", "mixed"])
def test_frozen_and_unused_parameters_never_move(optimizer, precision):
    scenario = small_scenario(
        "quirks",
        model__quirks=["frozen_bias", "frozen_layer", "unused", "scalar"],
        optimizer={**optimizer, "weight_decay": 0.1},
        precision=precision,
        micro_batches=2,
    )
    weights = weights_of(scenario)
    moving = {f"layers.{i}.{name}" for i in (0, 2) for name in ("gain", "linear.weight")}
    trainer = Trainer(scenario, weights)
    for step in range(3):
        trace = trainer.step(step)
        assert list(values(trace, "parameter")) == list(weights)
        for name, value in values(trace, "parameter").items():
            assert torch.equal(value, weights[name]) == (name not in moving), name
        assert set(values(trace, "gradient")) == moving
        assert set(values(trace, "clipped_gradient")) == moving
        assert {name.split("/")[1] for name in values(trace, "optimizer_state")} == moving


def test_a_transposed_weight_has_the_values_of_its_name_and_is_not_contiguous():
    scenario = small_scenario(
        "quirks", model__quirks=["transposed", "tied_inside", "tied_across"], dtype="float64"
    )
    model = make_model(scenario)
    for layer in model.layers:
        assert layer.linear.weight.stride() == (1, 8)
        assert layer.twin.weight is layer.linear.weight
    assert model.layers[2].linear.weight is model.layers[0].linear.weight
    assert model.layers[1].linear.weight is not model.layers[0].linear.weight


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_transposed_weight_changes_no_bits(dtype, kind):
    plain = ["tied_inside", "tied_across", "twice"]
    optimizer = {"kind": kind, "lr": 0.01, "weight_decay": 0.1}
    scenarios = [
        small_scenario("quirks", model__quirks=quirks, dtype=dtype, optimizer=optimizer)
        for quirks in (plain, [*plain, "transposed"])
    ]
    trainers = [Trainer(scenario, weights_of(scenarios[0])) for scenario in scenarios]
    for step in range(2):
        one, other = (trainer.step(step) for trainer in trainers)
        for a, b in zip(one.tensors, other.tensors, strict=True):
            assert (a.quantity, a.name) == (b.quantity, b.name)
            for x, y in zip(a.pieces, b.pieces, strict=True):
                assert x.values.allclose(y.values, rtol=0, atol=0, equal_nan=True), a.name


def test_a_tied_weight_gets_the_gradients_of_all_its_uses():
    scenario = small_scenario(
        "quirks",
        model__quirks=["tied_inside", "tied_across", "twice"],
        dtype="float64",
        world_size=1,
    )
    trace = Trainer(scenario, weights_of(scenario)).step(0)
    # By finite differences, which know nothing of how a weight is used.
    name = "layers.0.linear.weight"
    weights, losses = weights_of(scenario), []
    for sign in (1, -1):
        moved = weights[name].clone()
        moved[2, 5] += sign * 1e-5
        losses.append(RankResult(scenario, {**weights, name: moved}, 0, 0, 0).loss.item())
    difference = (losses[0] - losses[1]) / 2e-5
    assert trace.values("gradient", name)[2, 5].item() == pytest.approx(difference, rel=1e-6)


def test_recorded_names_of_second_calls_and_forwards():
    scenario = small_scenario(
        "quirks", model__quirks=["twice", "two_forwards", "tuple"], model__depth=2, micro_batches=2
    )
    trace = Trainer(scenario, weights_of(scenario)).step(0)
    assert [t.name for t in trace.tensors if t.quantity == "output"] == [
        f"{name}@m{m}"
        for m in (0, 1)
        for name in (
            "layers.0",
            "layers.0+1",
            "layers.1",
            "model",
            "layers.0#2",
            "layers.0#2+1",
            "layers.1#2",
            "model#2",
        )
    ]
    assert all(len(t.pieces) == 2 for t in trace.tensors if t.quantity == "output")
    # The second forward had half the input, so another output.
    first, second = (trace.values("output", f"model{n}@m0") for n in ("", "#2"))
    assert not torch.equal(first, second)


def test_forwards_are_counted():
    scenario = small_scenario("quirks", model__quirks=["buffer", "two_forwards"], micro_batches=3)
    trainer = Trainer(scenario, weights_of(scenario))
    trainer.step(0)
    assert trainer._model.calls.item() == 2 * 3 * 2


# ---- A transformer whose head is its embedding --------------------------------------------------


@pytest.mark.parametrize("precision", [{}, {"parameter": "bfloat16"}], ids=["plain", "mixed"])
def test_a_tied_head_is_the_embedding(precision):
    scenario = small_scenario("transformer", model__tied=True, precision=precision, world_size=3)
    model = make_model(scenario)
    assert model.head.weight is model.token_embedding.weight
    names = [name for name, _ in model.named_parameters()]
    untied = make_model(small_scenario("transformer"))
    assert [*names, "head.weight"] == [name for name, _ in untied.named_parameters()]
    weights = weights_of(scenario)
    trainer = Trainer(scenario, weights)
    for step in range(2):
        trace = trainer.step(step)
        assert_step(trace, scenario, weights)
        weights = values(trace, "parameter")
