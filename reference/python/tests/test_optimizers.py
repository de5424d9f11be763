"""Both optimizers are written out, and held to their formulas and to torch's own."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import small_scenario, weights_of
from exact import nearest
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


def rounded(number: float, like: torch.Tensor) -> float:
    """As C++'s mul_ takes a number."""
    return nearest(number, like.dtype)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
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
                    buffers[name].mul_(rounded(momentum, p)).add_(g)
                g = buffers[name]
            p.add_(g, alpha=-0.1)
        optimizer.step(gradients)
        for name, p in parameters.items():
            assert torch.equal(p, expected[name]), (step, name)
        state = optimizer.state()
        assert state.keys() == {f"momentum_buffer/{name}" for name in buffers}
        for name, buffer in buffers.items():
            assert torch.equal(state[f"momentum_buffer/{name}"], buffer)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torchs_own_bit_for_bit(momentum, dtype):
    parameters, theirs = parameters_of(dtype), parameters_of(dtype)
    optimizer = make_optimizer(OptimizerSpec("sgd", 0.1, momentum, weight_decay=0.01), parameters)
    sgd = torch.optim.SGD(theirs.values(), lr=0.1, momentum=momentum, weight_decay=0.01)
    for step in range(4):
        gradients = gradients_of(parameters, step)
        optimizer.step(gradients)
        for name, p in theirs.items():
            p.grad = gradients[name]
        sgd.step()
        for name, p in parameters.items():
            assert torch.equal(p, theirs[name]), (step, name)


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


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_adamw_is_its_formula_bit_for_bit(weight_decay, dtype):
    parameters = parameters_of(dtype)
    expected = {name: p.detach().clone() for name, p in parameters.items()}
    averages = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in expected.items()}
    spec = OptimizerSpec("adamw", lr=0.02, eps=1e-4, weight_decay=weight_decay)
    optimizer = make_optimizer(spec, parameters)
    for t in range(1, 5):
        gradients = gradients_of(parameters, t)
        optimizer.step(gradients)
        for name, p in expected.items():
            g, (m, v) = gradients[name], averages[name]
            if weight_decay != 0:
                p *= rounded(1 - 0.02 * weight_decay, p)
            m *= rounded(0.9, p)
            m.add_(g, alpha=1 - 0.9)
            v *= rounded(0.999, p)
            v.addcmul_(g, g, value=1 - 0.999)
            denominator = v.sqrt() / math.sqrt(1 - 0.999**t)
            denominator += 1e-4
            p.addcdiv_(m, denominator, value=-0.02 / (1 - 0.9**t))
            assert torch.equal(parameters[name], p), (t, name)
            assert torch.equal(optimizer.state()[f"exp_avg/{name}"], m), (t, name)
            assert torch.equal(optimizer.state()[f"exp_avg_sq/{name}"], v), (t, name)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_gradients_stay_as_they_were_handed_in(kind):
    spec = OptimizerSpec(kind, lr=0.1, momentum=0.9 if kind == "sgd" else 0, weight_decay=0)
    parameters = parameters_of()
    optimizer = make_optimizer(spec, parameters)
    handed_in = [gradients_of(parameters, step) for step in range(3)]
    for gradients in handed_in:
        optimizer.step(gradients)
    for step, gradients in enumerate(handed_in):
        for name, expected in gradients_of(parameters, step).items():
            assert torch.equal(gradients[name], expected)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_parameter_without_gradient_is_left_alone_and_its_steps_are_not_counted(kind):
    spec = OptimizerSpec(kind, lr=0.1, momentum=0.9 if kind == "sgd" else 0, weight_decay=0.1)
    parameters = parameters_of()
    late, *others = parameters
    start = parameters[late].detach().clone()
    optimizer = make_optimizer(spec, parameters, never_used=[late])
    for step in range(3):
        gradients = gradients_of(parameters, step)
        optimizer.step({name: gradients[name] for name in others})
        assert torch.equal(parameters[late], start)
        assert {key.split("/")[1] for key in optimizer.state()} == set(others)
    saved = {key: value.clone() for key, value in optimizer.state().items()}
    # What comes late is the first step of that parameter, and in the order of the parameters.
    alone = {late: nn.Parameter(start.clone())}
    first = make_optimizer(spec, alone)
    for step in range(2):
        gradients = gradients_of(parameters, step)
        optimizer.step(gradients)
        first.step({late: gradients[late]})
        assert torch.equal(parameters[late], alone[late])
    names = [key.split("/")[1] for key in optimizer.state()]
    assert names == [name for name in parameters for _ in optimizer.kinds]
    # A state without it is a state from before; one without another parameter is not.
    optimizer.load_state(3, saved)
    assert optimizer.state().keys() == saved.keys()
    with pytest.raises(InputError, match="lacks the tensor"):
        optimizer.load_state(3, {k: v for k, v in saved.items() if not k.endswith(others[0])})
    key = f"{optimizer.kinds[0]}/{late}"
    optimizer.load_state(
        3, saved | {f"{k}/{late}": torch.zeros_like(start) for k in optimizer.kinds}
    )
    assert key in optimizer.state()
    if len(optimizer.kinds) == 2:
        with pytest.raises(InputError, match=f"lacks the tensor optimizer_state/exp_avg_sq/{late}"):
            optimizer.load_state(3, saved | {key: torch.zeros_like(start)})


def test_the_peer_takes_no_step_where_there_is_no_gradient():
    parameters = parameters_of()
    absent = next(iter(parameters))
    optimizer = make_optimizer(OptimizerSpec("adamw", lr=0.01), parameters)
    for step in range(4):
        gradients = gradients_of(parameters, step)
        if step != 2:  # it misses a step, and counts one less from then on
            del gradients[absent]
        peer = PeerAdamW(optimizer)
        optimizer.step(gradients)
        assert peer.difference_after(gradients) < 3e-7


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
        fresh = {
            f"{k}/{n}": torch.zeros_like(p) for n, p in parameters.items() for k in optimizer.kinds
        }
        optimizer.load_state(1, fresh)
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
