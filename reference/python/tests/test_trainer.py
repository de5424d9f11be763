"""One step, put together by hand from the page."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import SGD, small_scenario, weights_of
from exact import nearest

from data import Dataset
from errors import InputError
from models import make_model
from norm import exact_norm
from scenario import QUIRKS
from traces import State, StepTrace
from trainer import Trainer, clip


def trained(scenario, steps: int = 1) -> list[StepTrace]:
    trainer = Trainer(scenario, weights_of(scenario))
    return [trainer.step(step) for step in range(steps)]


def rank_gradients(scenario, micro_batch, rank, generator=None, divide=True):
    """Loss, and gradients of one rank's micro-batch by themselves."""
    model = make_model(scenario)
    model.load_state_dict(weights_of(scenario))
    if generator is not None:
        model.set_generator(generator)
    input, target = Dataset(scenario).batch(0, micro_batch, rank)
    loss = model.loss(model(input), target)
    (loss / scenario.micro_batches if divide else loss).backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_gradients_are_summed_in_rank_order_divided_and_accumulated(kind):
    scenario = small_scenario(kind, world_size=3, micro_batches=2)
    (trace,) = trained(scenario)
    parts = [
        [rank_gradients(scenario, micro_batch, rank) for rank in range(3)] for micro_batch in (0, 1)
    ]
    for name in weights_of(scenario):
        sums = [((row[0][1][name] + row[1][1][name]) + row[2][1][name]) / 3 for row in parts]
        assert torch.equal(trace.values("gradient", name), sums[0] + sums[1]), name
    for rank in range(3):
        losses = [parts[micro_batch][rank][0] for micro_batch in (0, 1)]
        assert trace.values("loss", "loss", rank).tolist() == losses


def test_the_order_of_the_ranks_counts():
    # What the test above asserts would be empty if addition were associative here.
    scenario = small_scenario("mlp", world_size=3)
    parts = [rank_gradients(scenario, 0, rank)[1] for rank in range(3)]
    name = "layers.0.linear.weight"
    forward = (parts[0][name] + parts[1][name]) + parts[2][name]
    backward = (parts[2][name] + parts[1][name]) + parts[0][name]
    assert not torch.equal(forward, backward)


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_the_replay_is_the_whole_batch_but_for_rounding(kind):
    scenario = small_scenario(kind, world_size=3, micro_batches=2, dtype="float64")
    (trace,) = trained(scenario)
    model = make_model(scenario)
    model.load_state_dict(weights_of(scenario))
    batches = [Dataset(scenario).batch(0, m, r) for m in (0, 1) for r in range(3)]
    input, target = (torch.cat(parts) for parts in zip(*batches, strict=True))
    model.loss(model(input), target).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            trace.values("gradient", name), parameter.grad, rtol=1e-11, atol=1e-14
        )


def test_each_rank_draws_dropout_from_its_own_generator_seeded_once():
    scenario = small_scenario("mlp", model__dropout=0.5, micro_batches=2, world_size=2)
    first, second = trained(scenario, steps=2)
    generators = [torch.Generator().manual_seed(7 + rank) for rank in range(2)]
    for micro_batch in (0, 1):
        for rank, generator in enumerate(generators):
            loss, _ = rank_gradients(scenario, micro_batch, rank, generator)
            assert first.values("loss", "loss", rank)[micro_batch].item() == loss
    # The second step goes on drawing where the first stopped.
    model = make_model(scenario)
    model.load_state_dict({n: first.values("parameter", n) for n in weights_of(scenario)})
    model.set_generator(generators[0])
    input, target = Dataset(scenario).batch(1, 0, 0)
    loss = model.loss(model(input), target)
    assert second.values("loss", "loss", 0)[0].item() == loss.item()


def test_seed_and_rank_wrap_around():
    scenario = small_scenario("mlp", seed=2**64 - 1, model__dropout=0.5)
    (trace,) = trained(scenario)
    loss, _ = rank_gradients(scenario, 0, 1, torch.Generator().manual_seed(0))
    assert trace.values("loss", "loss", 1)[0].item() == loss


@pytest.mark.parametrize(("max_norm", "bites"), [(0.1, True), (1e6, False)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_clipping_scales_every_gradient_by_one_coefficient(max_norm, bites, dtype):
    scenario = small_scenario("mlp", max_norm=max_norm, dtype=dtype)
    (trace,) = trained(scenario)
    names = list(weights_of(scenario))
    gradients = [trace.values("gradient", name) for name in names]
    norm = trace.values("total_norm", "total_norm")
    assert torch.equal(norm, exact_norm(gradients))
    number = {"float32": np.float32, "float64": np.float64}[dtype]
    coefficient = min(number(max_norm) / (number(norm.item()) + number(1e-6)), number(1))
    assert (coefficient < 1) == bites
    for name, gradient in zip(names, gradients, strict=True):
        expected = gradient * torch.tensor(coefficient)
        assert torch.equal(trace.values("clipped_gradient", name), expected)


@pytest.mark.parametrize("norm_type", [1, 3, 2.5, "inf"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_clipping_is_by_the_norm_of_the_scenario(norm_type, dtype):
    scenario = small_scenario("mlp", norm_type=norm_type, max_norm=0.01, dtype=dtype)
    (trace,) = trained(scenario)
    names = list(weights_of(scenario))
    gradients = [trace.values("gradient", name) for name in names]
    norm = trace.values("total_norm", "total_norm")
    assert torch.equal(norm, exact_norm(gradients, float(norm_type)))
    joined = torch.cat([g.flatten().double() for g in gradients])
    assert norm.item() == pytest.approx(
        torch.linalg.vector_norm(joined, float(norm_type)).item(), rel=2**-8
    )
    kept = scenario.torch_dtype
    denominator = nearest(Fraction(norm.item()) + Fraction(1e-6), kept)
    coefficient = nearest(Fraction(nearest(0.01, kept)) / Fraction(denominator), kept)
    for name, gradient in zip(names, gradients, strict=True):
        clipped = trace.values("clipped_gradient", name).flatten().tolist()
        for got, each in zip(clipped, gradient.flatten().tolist(), strict=True):
            assert got == nearest(Fraction(each) * Fraction(coefficient), kept)


def test_without_clipping_the_norm_is_reported_and_gradients_are_left_alone():
    scenario = small_scenario("mlp", max_norm=0)
    (trace,) = trained(scenario)
    assert trace.values("total_norm", "total_norm").item() > 0
    for name in weights_of(scenario):
        gradient = trace.values("gradient", name)
        assert torch.equal(trace.values("clipped_gradient", name), gradient)


def test_a_clip_by_a_norm_that_is_not_finite_is_seen_in_the_gradients():
    gradients = {"w": torch.tensor([1.0, float("inf")])}
    clip(gradients, exact_norm(gradients.values()), 1.0)
    assert gradients["w"].tolist()[0] == 0 and gradients["w"].isnan()[1]


def test_a_trace_has_everything_in_execution_order():
    scenario = small_scenario("transformer", micro_batches=2)
    (trace,) = trained(scenario)
    names = list(weights_of(scenario))
    layers = ["blocks.0", "blocks.1", "model"]
    assert [(tensor.quantity, tensor.name) for tensor in trace.tensors] == [
        *(("output", f"{layer}@m{m}") for m in (0, 1) for layer in layers),
        ("loss", "loss"),
        *(("gradient", name) for name in reversed(names)),
        ("total_norm", "total_norm"),
        *(("clipped_gradient", name) for name in reversed(names)),
        *(("parameter", name) for name in names),
        *(("optimizer_state", f"{k}/{name}") for name in names for k in ("exp_avg", "exp_avg_sq")),
    ]
    assert [piece.rank for piece in trace.tensors[0].pieces] == [0, 1]
    assert trace.values("output", "model@m1", 1).shape == (3, 8, 32)


def test_outputs_are_those_of_the_layers():
    scenario = small_scenario("mlp")
    (trace,) = trained(scenario)
    model = make_model(scenario)
    model.load_state_dict(weights_of(scenario))
    for rank in range(2):
        input, _ = Dataset(scenario).batch(0, 0, rank)
        hidden = model.layers[0](input)
        assert torch.equal(trace.values("output", "layers.0@m0", rank), hidden)
        assert torch.equal(trace.values("output", "layers.1@m0", rank), model.layers[1](hidden))
        assert torch.equal(trace.values("output", "model@m0", rank), model(input))


@pytest.mark.parametrize("optimizer", [{"kind": "adamw", "lr": 0.01}, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("kind", ["mlp", "transformer", "quirks"])
def test_a_state_put_in_place_gives_the_step_that_its_own_would_give(kind, optimizer):
    changes = {"model__dropout": 0.1}
    if kind == "quirks":
        changes = {"model__quirks": list(QUIRKS), "precision": {"parameter": "bfloat16"}}
    scenario = small_scenario(kind, optimizer=optimizer, **changes)
    own = trained(scenario, steps=4)
    trainer = Trainer(scenario, weights_of(scenario))
    for step in range(4):
        if step > 0:
            trainer.set_state(state_after(own[step - 1]))
        trace = trainer.step(step)
        assert_equal(trace, own[step])


def state_after(trace: StepTrace) -> State:
    values = {(t.quantity, t.name): t.pieces[0].values for t in trace.tensors}
    return State(
        trace.step + 1,
        {name: v for (quantity, name), v in values.items() if quantity == "parameter"},
        {name: v for (quantity, name), v in values.items() if quantity == "optimizer_state"},
    )


def assert_equal(got: StepTrace, want: StepTrace) -> None:
    assert len(got.tensors) == len(want.tensors)
    for ours, theirs in zip(got.tensors, want.tensors, strict=True):
        assert (ours.quantity, ours.name) == (theirs.quantity, theirs.name)
        for a, b in zip(ours.pieces, theirs.pieces, strict=True):
            assert torch.equal(a.values, b.values), (got.step, ours.quantity, ours.name, a.rank)


def test_training_trains(tmp_path):
    file = tmp_path / "corpus"
    file.write_bytes(b"to be or not to be, that is the question. " * 20)
    data = {"kind": "bytes", "corpus": [str(file)]}
    scenario = small_scenario("transformer", model__vocabulary=256, data=data, max_norm=1.0)
    traces = trained(scenario, steps=40)
    losses = [trace.values("loss", "loss").item() for trace in traces]
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])


def test_weights_and_steps_that_do_not_fit_are_refused():
    scenario = small_scenario("mlp")
    good = weights_of(scenario)
    name = "layers.1.linear.bias"

    def refused(weights: dict[str, torch.Tensor], message: str) -> None:
        with pytest.raises(InputError, match=message):
            Trainer(scenario, weights)

    refused({k: v for k, v in good.items() if k != name}, f"{name} is missing")
    refused({**good, "extra": good[name]}, "extra is unknown")
    refused({**good, name: good[name][:-1]}, rf"{name} is float32\[6\]; wanted: float32\[7\]")
    refused({**good, name: good[name].double()}, rf"{name} is float64\[7\]; wanted: float32")
    for value in (float("nan"), float("inf")):
        bad = good[name].clone()
        bad[3] = value
        refused({**good, name: bad}, f"{name} has an element that is not finite")
    with pytest.raises(InputError, match="asked for step 1, but the state has 0 steps done"):
        Trainer(scenario, good).step(1)


def test_a_device_that_is_not_there_is_refused():
    for device in ("cuda:77", "toaster"):
        with pytest.raises(InputError, match=f'device is "{device}"'):
            Trainer(small_scenario("mlp", device=device), {})
