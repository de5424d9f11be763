"""Steps in mixed and in narrow precision, put together from plain functions and from rational sums."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from conftest import SGD, small_scenario, weights_of
from exact import SlowReduction, nearest, scaled
from plain import RankResult

from errors import InputError
from models import make_model
from traces import State, StepTrace
from trainer import Trainer


def first_step(scenario) -> StepTrace:
    return Trainer(scenario, weights_of(scenario)).step(0)


def values(trace: StepTrace, quantity: str) -> dict[str, torch.Tensor]:
    return {t.name: t.pieces[0].values for t in trace.tensors if t.quantity == quantity}


def assert_same(got: torch.Tensor, want: torch.Tensor, what: object) -> None:
    assert got.dtype == want.dtype, what
    assert torch.equal(got, want), what


def assert_step(trace: StepTrace, scenario, weights) -> None:
    """Outputs, losses and gradients of a step from the weights it began with."""
    world, micro_batches = scenario.world_size, scenario.micro_batches
    results = [
        [RankResult(scenario, weights, trace.step, m, r) for r in range(world)]
        for m in range(micro_batches)
    ]
    recorded = [t.name for t in trace.tensors if t.quantity == "output"]
    assert recorded == [
        f"{name}@m{m}" for m, ranks in enumerate(results) for name in ranks[0].outputs
    ]
    for rank in range(world):
        losses = torch.stack([ranks[rank].loss.detach() for ranks in results])
        assert_same(trace.values("loss", "loss", rank), losses, "loss")
        for m, ranks in enumerate(results):
            for name, value in ranks[rank].outputs.items():
                assert_same(trace.values("output", f"{name}@m{m}", rank), value, name)
    gradients = values(trace, "gradient")
    assert list(gradients) == [n for n in reversed(weights) if n in results[0][0].gradients]
    slow = SlowReduction(
        scenario.reduce_dtype, scenario.torch_dtype, *scenario.layout, *scenario.divisors
    )
    for name, gradient in gradients.items():
        assert gradient.dtype == scenario.torch_dtype
        flat = torch.stack(
            [torch.stack([rank.gradients[name].flatten() for rank in ranks]) for ranks in results]
        )
        # Some elements of each are enough: rational numbers take their time.
        for index in range(0, flat.shape[-1], max(1, flat.shape[-1] // 6)):
            parts = flat[..., index].double().tolist()
            want = slow(scenario.accumulation, parts)
            if scenario.loss_scale > 0:
                inverse = nearest(1 / scenario.loss_scale, torch.float32)
                want = scaled(want, Fraction(inverse), scenario.torch_dtype)
            assert gradient.flatten()[index].item() == want, (name, index)


PRECISIONS = [
    ("float32", {}),
    ("bfloat16", {}),
    ("float16", {}),
    ("float32", {"parameter": "bfloat16"}),
    ("float32", {"parameter": "bfloat16", "reduce": "float32"}),
    ("float32", {"parameter": "float16", "reduce": "float16", "output": "float32"}),
    ("float32", {"reduce": "bfloat16"}),
    ("float64", {"parameter": "float32", "reduce": "float64", "output": "bfloat16"}),
    ("bfloat16", {"parameter": "float32", "reduce": "float32"}),
    ("float32", {"parameter": "bfloat16", "exempt_norms": True}),
    ("float32", {"parameter": "float16", "reduce": "float32", "exempt_norms": True}),
    ("float64", {"parameter": "bfloat16", "reduce": "float32", "exempt_norms": True}),
]


@pytest.mark.parametrize("kind", ["mlp", "transformer", "quirks"])
@pytest.mark.parametrize(("dtype", "precision"), PRECISIONS)
def test_a_step_is_the_plain_functions_and_the_rational_sums(kind, dtype, precision):
    if kind != "transformer":
        precision = {name: value for name, value in precision.items() if name != "exempt_norms"}
    changes = {"model__quirks": ["scalar", "buffer"]} if kind == "quirks" else {}
    scenario = small_scenario(
        kind, dtype=dtype, precision=precision, micro_batches=2, world_size=3, **changes
    )
    trace = first_step(scenario)
    assert_step(trace, scenario, weights_of(scenario))
    assert {v.dtype for v in values(trace, "parameter").values()} == {scenario.torch_dtype}
    assert {v.dtype for v in values(trace, "optimizer_state").values()} == {scenario.torch_dtype}
    assert values(trace, "total_norm")["total_norm"].dtype == scenario.torch_dtype


@pytest.mark.parametrize("optimizer", [{"kind": "adamw", "lr": 0.01}, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize(
    ("strategy", "replicas", "accumulation"),
    [
        ("full_shard", 1, "each"),
        ("full_shard", 1, "last"),
        ("no_shard", 1, "last"),
        ("hybrid_shard", 2, "each"),
        ("hybrid_shard_zero2", 2, "last"),
        ("hybrid_shard", 2, "last_all_reduce"),
        ("hybrid_shard_zero2", 1, "last_all_reduce"),
    ],
)
def test_every_way_to_accumulate_at_the_first_and_the_second_step(
    strategy, replicas, accumulation, optimizer
):
    scenario = small_scenario(
        "mlp",
        strategy=strategy,
        world_size=4,
        replicas=replicas,
        accumulation=accumulation,
        optimizer=optimizer,
        micro_batches=3,
        precision={"parameter": "bfloat16", "reduce": "float32"},
    )
    weights = weights_of(scenario)
    trainer = Trainer(scenario, weights)
    for step in range(2):
        trace = trainer.step(step)
        losses = [trace.values("loss", "loss", rank).tolist() for rank in range(4)]
        assert len({tuple(each) for each in losses}) == 4  # the ranks are unequal
        assert_step(trace, scenario, weights)
        moved = values(trace, "parameter")
        assert any(not torch.equal(moved[name], weights[name]) for name in weights)
        weights = moved


def test_what_is_optimised_keeps_the_digits_that_the_model_does_not_see():
    scenario = small_scenario("mlp", precision={"parameter": "bfloat16"}, max_norm=0)
    weights = weights_of(scenario)
    after = values(first_step(scenario), "parameter")
    name = "layers.0.linear.weight"
    assert not torch.equal(after[name].bfloat16().float(), after[name])
    assert (after[name] - weights[name]).abs().max() < 0.011  # AdamW's first step is the rate


def test_exempt_norms_compute_with_all_their_digits():
    precision = {"parameter": "bfloat16", "exempt_norms": True}
    model = make_model(small_scenario("transformer", precision=precision))
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    for name, dtype in dtypes.items():
        assert dtype == (torch.float32 if "norm" in name else torch.bfloat16), name
    norm = model.blocks[0].norm1
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.nn.init.normal_(norm.weight, 1, 0.1)
    expected = torch.nn.functional.layer_norm(x.float(), (16,), norm.weight, norm.bias, 1e-5)
    assert_same(norm(x), expected.bfloat16(), "norm")
    # In bfloat16 it would be another.
    narrow = torch.nn.functional.layer_norm(
        x, (16,), norm.weight.bfloat16(), norm.bias.bfloat16(), 1e-5
    )
    assert not torch.equal(norm(x), narrow)


@pytest.mark.parametrize(
    ("dtype", "precision", "through"),
    [
        ("float32", {}, [torch.float32]),
        ("float32", {"buffer": "bfloat16"}, [torch.bfloat16, torch.float32]),
        ("bfloat16", {"parameter": "float32", "buffer": "float32"}, [torch.bfloat16]),
        ("float32", {"parameter": "bfloat16"}, [torch.float32, torch.bfloat16]),
        ("float64", {"parameter": "float64", "buffer": "float16"}, [torch.float16]),
    ],
)
def test_buffers_are_rounded_to_their_dtype(dtype, precision, through):
    width = 600  # 257/64 needs nine bits, bfloat16 has eight
    scenario = small_scenario(
        "quirks",
        dtype=dtype,
        precision=precision,
        model__quirks=["buffer"],
        model__depth=1,
        model__quirk_width=width,
    )
    model = make_model(scenario)
    with torch.no_grad():
        model.layers[0].linear.weight.zero_()
        model.layers[0].linear.bias.zero_()
    output = model(torch.zeros(1, width, dtype=scenario.parameter_dtype))[0]
    expected = [(k + 1) / 64 for k in range(width)]
    for each in through:
        expected = [nearest(value, each) for value in expected]
    assert output.tolist() == expected
    assert model.layers[0].shift.dtype == scenario.buffer_dtype
    assert model.calls.dtype == torch.int64 and model.calls.item() == 1


# ---- Loss scaling -------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [3, 1024, 0.6875])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_scaled_gradients_are_multiplied_by_a_float32_number(scale, dtype):
    scenario = small_scenario(
        "quirks",
        dtype=dtype,
        loss_scale=scale,
        micro_batches=3,
        model__quirks=["scalar"],
    )
    assert_step(first_step(scenario), scenario, weights_of(scenario))


def test_float16_gradients_that_vanish_are_kept_by_scaling():
    def smallest(scale: float) -> float:
        scenario = small_scenario(
            "mlp",
            precision={"parameter": "float16", "output": "float32", "reduce": "float32"},
            loss_scale=scale,
            world_size=1,
            batch=64,
        )
        weights = {name: value * 1e-6 for name, value in weights_of(scenario).items()}
        trace = Trainer(scenario, weights).step(0)
        gradient = trace.values("gradient", "layers.0.linear.weight")
        return gradient.abs().max().item()

    assert smallest(0) == 0 and 0 < smallest(2**20) < 2.0**-24


def overflowing(scenario) -> dict[str, torch.Tensor]:
    """Weights with which the loss and its gradients are not finite."""
    weights = weights_of(scenario)
    weights["layers.1.linear.bias"][0] = 1e30
    return weights


@pytest.mark.parametrize("optimizer", [{"kind": "adamw", "lr": 0.01}, SGD], ids=["adamw", "sgd"])
def test_a_step_with_a_gradient_that_is_not_finite_is_neither_taken_nor_counted(optimizer):
    scenario = small_scenario("mlp", loss_scale=2.0**100, optimizer=optimizer)
    bad, good = overflowing(scenario), weights_of(scenario)
    trainer = Trainer(scenario, bad)
    skipped = trainer.step(0)
    assert not all(g.isfinite().all() for g in values(skipped, "gradient").values())
    assert not values(skipped, "total_norm")["total_norm"].isfinite()
    for name, value in values(skipped, "parameter").items():
        assert_same(value, bad[name], name)
    assert values(skipped, "optimizer_state") == {}
    assert trainer.steps_done == 0

    # The step after it has the data of its own number, and is the optimizer's first.
    trainer.set_state(State(0, good, {}))
    first = trainer.step(1)
    assert_step(first, scenario, good)
    assert trainer.steps_done == 1
    clipped = values(first, "clipped_gradient")
    for name, value in values(first, "parameter").items():
        g = clipped[name].double()
        if optimizer is SGD:
            want = good[name].double() * (1 - 0.1 * 0.01) - 0.1 * g
        else:
            want = good[name].double() * (1 - 0.01 * 0.01) - 0.01 * g / (g.abs() + 1e-8)
        torch.testing.assert_close(value.double(), want, rtol=1e-6, atol=1e-7)

    # A skipped step leaves the state alone, and the next one goes on from it.
    state = values(first, "optimizer_state")
    trainer.set_state(State(1, bad, state))
    again = trainer.step(2)
    assert trainer.steps_done == 1
    with pytest.raises(InputError, match="asked for step 4, .* wanted: step 3, or another state"):
        trainer.step(4)
    for name, value in values(again, "optimizer_state").items():
        assert_same(value, state[name], name)
    trainer.set_state(State(1, good, state))
    with pytest.raises(InputError, match="asked for step 0, .* wanted: step 1 or later"):
        trainer.step(0)
    second = trainer.step(3)
    assert trainer.steps_done == 2
    if optimizer is not SGD:
        g = values(second, "clipped_gradient")["layers.0.linear.bias"].double()
        m = 0.9 * state["exp_avg/layers.0.linear.bias"].double() + 0.1 * g
        v = 0.999 * state["exp_avg_sq/layers.0.linear.bias"].double() + 0.001 * g * g
        step = 0.01 * (m / (1 - 0.9**2)) / ((v / (1 - 0.999**2)).sqrt() + 1e-8)
        want = good["layers.0.linear.bias"].double() * (1 - 0.01 * 0.01) - step
        got = values(second, "parameter")["layers.0.linear.bias"]
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-7)


def test_one_element_of_one_parameter_is_enough_to_skip():
    # The loss is finite, and so are all gradients but those of the last layer's weight.
    scenario = small_scenario("mlp", loss_scale=2.0, precision={"parameter": "float16"})
    weights = {name: torch.zeros_like(value) for name, value in weights_of(scenario).items()}
    weights["layers.0.linear.bias"][3] = 60000.0
    weights["layers.1.linear.bias"][:] = 200.0
    trainer = Trainer(scenario, weights)
    trace = trainer.step(0)
    finite = {name: bool(g.isfinite().all()) for name, g in values(trace, "gradient").items()}
    assert finite == {
        "layers.1.linear.bias": True,
        "layers.1.linear.weight": False,
        "layers.0.linear.bias": True,
        "layers.0.linear.weight": True,
    }
    assert values(trace, "parameter")["layers.1.linear.bias"].eq(200).all()
    assert trainer.steps_done == 0


def test_without_scaling_nothing_is_skipped():
    scenario = small_scenario("mlp")
    weights = overflowing(scenario)
    weights["layers.1.linear.weight"][0, 0] = 1e25
    trainer = Trainer(scenario, weights)
    trace = trainer.step(0)
    assert trainer.steps_done == 1
    assert values(trace, "parameter")["layers.0.linear.weight"].isnan().any()
    assert not math.isfinite(values(trace, "total_norm")["total_norm"])
