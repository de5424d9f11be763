"""SGD is torch's own and held to its formula; AdamW is written out and held to torch's own."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import small_scenario, weights_of
from torch import nn

from errors import InputError
from optimizers import PeerAdamW, make_optimizer
from scenario import OptimizerSpec


def parameters_of(dtype: str = "float32") -> dict[str, nn.Parameter]:
    weights = weights_of(small_scenario("mlp", dtype=dtype))
    return {name: nn.Parameter(value) for name, value in weights.items()}


def gradients_of(parameters: dict[str, nn.Parameter], step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) * 0.1
        for name, p in parameters.items()
    }


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sgd_is_its_formula_bit_for_bit(momentum, weight_decay, dtype):
    parameters = parameters_of(dtype)
    expected = {name: p.detach().clone() for name, p in parameters.items()}
    buffers: dict[str, torch.Tensor] = {}
    spec = OptimizerSpec("sgd", lr=0.1, momentum=momentum, weight_decay=weight_decay)
    optimizer = make_optimizer(spec, parameters)
    for step in range(4):
        gradients = gradients_of(parameters, step)
        for name, p in expected.items():
            g = gradients[name]
            if weight_decay != 0:
                g = g.add(p, alpha=weight_decay)
            if momentum != 0:
                if step == 0:
                    buffers[name] = g.clone()
                else:
                    buffers[name].mul_(momentum).add_(g)
                g = buffers[name]
            p.add_(g, alpha=-0.1)
        optimizer.step(gradients)
        for name, p in parameters.items():
            assert torch.equal(p, expected[name]), (step, name)
        state = optimizer.state()
        assert state.keys() == {f"momentum_buffer/{name}" for name in buffers}
        for name, buffer in buffers.items():
            assert torch.equal(state[f"momentum_buffer/{name}"], buffer)


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_adamw_is_its_formula(weight_decay):
    parameters = parameters_of("float64")
    p = {name: value.detach().clone() for name, value in parameters.items()}
    m = {name: torch.zeros_like(value) for name, value in p.items()}
    v = {name: torch.zeros_like(value) for name, value in p.items()}
    spec = OptimizerSpec("adamw", lr=0.02, weight_decay=weight_decay)
    optimizer = make_optimizer(spec, parameters)
    for step in range(5):
        gradients = gradients_of(parameters, step)
        optimizer.step(gradients)
        for name, g in gradients.items():
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g * g
            first = m[name] / (1 - 0.9 ** (step + 1))
            second = v[name] / (1 - 0.999 ** (step + 1))
            p[name] = p[name] - 0.02 * weight_decay * p[name]
            p[name] = p[name] - 0.02 * first / (second.sqrt() + 1e-8)
            torch.testing.assert_close(parameters[name].data, p[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    # Two or three roundings apart: the unit roundoffs are 6e-8 and 1.1e-16.
    ("dtype", "least", "most"),
    [("float32", 1e-9, 3e-7), ("float64", 1e-18, 5e-16)],
)
def test_adamw_differs_from_torchs_own_by_roundings_only(dtype, least, most):
    parameters = parameters_of(dtype)
    optimizer = make_optimizer(OptimizerSpec("adamw", lr=0.01), parameters)
    differences = []
    for step in range(20):
        gradients = gradients_of(parameters, step)
        peer = PeerAdamW(optimizer)
        optimizer.step(gradients)
        differences.append(peer.difference_after(gradients))
    # If they were equal, writing AdamW out would be for nothing.
    assert least < max(differences) < most


@pytest.mark.parametrize("wrong", ["beta", "decay", "correction"])
def test_a_wrong_adamw_is_far_from_torchs_own(wrong):
    parameters = parameters_of()
    spec = OptimizerSpec("adamw", lr=0.01)
    optimizer = make_optimizer(spec, parameters)
    gradients = gradients_of(parameters, 0)
    peer = PeerAdamW(optimizer)
    if wrong == "beta":
        optimizer.spec = OptimizerSpec("adamw", lr=0.01, beta1=0.9001)
    elif wrong == "decay":
        optimizer.spec = OptimizerSpec("adamw", lr=0.01, weight_decay=0.02)
    else:
        optimizer.steps_done = 1
    optimizer.step(gradients)
    assert peer.difference_after(gradients) > 1e-5


def test_a_nan_is_a_difference():
    parameters = parameters_of()
    optimizer = make_optimizer(OptimizerSpec("adamw"), parameters)
    peer = PeerAdamW(optimizer)
    gradients = gradients_of(parameters, 0)
    optimizer.step(gradients)
    next(iter(parameters.values())).data.view(-1)[0] = math.nan
    assert not peer.difference_after(gradients) < 1


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_loaded_state_goes_on_as_if_it_had_not_been_saved(kind):
    spec = OptimizerSpec(kind, lr=0.1, momentum=0.9 if kind == "sgd" else 0)
    unbroken = parameters_of()
    optimizer = make_optimizer(spec, unbroken)
    for step in range(3):
        optimizer.step(gradients_of(unbroken, step))
    saved = {name: value.clone() for name, value in optimizer.state().items()}
    resumed = {name: nn.Parameter(p.detach().clone()) for name, p in unbroken.items()}
    other = make_optimizer(spec, resumed)
    other.step(gradients_of(resumed, 77))  # has a state of its own, which must not survive
    for name, p in resumed.items():
        p.data.copy_(unbroken[name].data)
    other.load_state(3, saved)
    for step in range(3, 5):
        optimizer.step(gradients_of(unbroken, step))
        other.step(gradients_of(resumed, step))
    for name, p in resumed.items():
        assert torch.equal(p, unbroken[name]), name
    for name, value in other.state().items():
        assert torch.equal(value, optimizer.state()[name]), name


def test_a_state_that_does_not_fit_is_refused():
    parameters = parameters_of()
    optimizer = make_optimizer(OptimizerSpec("adamw"), parameters)
    optimizer.step(gradients_of(parameters, 0))
    state = dict(optimizer.state())
    key = "exp_avg/layers.0.linear.bias"

    def refused(message: str, steps_done: int = 1, **changes: torch.Tensor | None) -> None:
        changed = {k: v for k, v in {**state, **changes}.items() if v is not None}
        with pytest.raises(InputError, match=message):
            optimizer.load_state(steps_done, changed)

    refused(f"lacks the tensor optimizer_state/{key}", **{key: None})
    refused("unknown tensor optimizer_state/momentum_buffer/x", **{"momentum_buffer/x": state[key]})
    refused(r"float32\[19\]; wanted: float32\[20\]", **{key: state[key][:-1]})
    refused(r"float64\[20\]; wanted: float32\[20\]", **{key: state[key].double()})
    with pytest.raises(InputError, match="lacks"):
        optimizer.load_state(1, {})
    optimizer.load_state(0, {})  # before the first step there is none
    assert optimizer.state() == {}
