"""Optimizers, with the state that a trace shows: "KIND/NAME" to tensor. A parameter has none before
the first step in which it has a gradient; without a gradient neither it nor its state moves."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor, nn

from errors import InputError
from scenario import OptimizerSpec

NamedTensors = dict[str, Tensor]


class Optimizer:
    # The kinds of state kept for each parameter.
    kinds: tuple[str, ...] = ()

    def __init__(
        self,
        spec: OptimizerSpec,
        parameters: dict[str, nn.Parameter],
        never_used: Collection[str] = (),
    ) -> None:
        """The parameters are those that are trained; some of them may get no gradient ever."""
        self.spec = spec
        self.parameters = parameters
        self.steps_done = 0
        self._never_used = never_used

    def step(self, gradients: NamedTensors) -> None:
        raise NotImplementedError

    def state(self) -> NamedTensors:
        raise NotImplementedError

    def load_state(self, steps_done: int, state: NamedTensors) -> None:
        """Either no tensors at all, before the first step, or one of each kind and parameter. Those
        that never get a gradient have none, or all the same one of each kind."""
        wanted = {
            f"{kind}/{name}"
            for name in self.parameters
            for kind in self.kinds
            if name not in self._never_used or any(f"{each}/{name}" in state for each in self.kinds)
        }
        if state or steps_done > 0:
            for key in sorted(wanted ^ state.keys()):
                fault = "lacks the" if key in wanted else "has an unknown"
                raise InputError(f"the state {fault} tensor optimizer_state/{key}")
        for key, value in state.items():
            parameter = self.parameters[key.split("/", 1)[1]]
            if value.shape != parameter.shape or value.dtype != parameter.dtype:
                raise InputError(
                    f"the state's tensor optimizer_state/{key} is {described(value)}; "
                    f"wanted: {described(parameter)}"
                )
        self.steps_done = steps_done
        # In the order in which they are made, not in that of a file.
        self._put_state(
            {
                f"{kind}/{name}": state[f"{kind}/{name}"].to(parameter.device, copy=True)
                for name, parameter in self.parameters.items()
                for kind in self.kinds
                if f"{kind}/{name}" in state
            }
        )

    def _put_state(self, state: NamedTensors) -> None:
        raise NotImplementedError


def multiply_(tensor: Tensor, number: float) -> Tensor:
    """In place, as libtorch's C++ mul_(Scalar) does it, which rounds the number to the tensor's dtype
    first. That of Python does not, if the dtype has 16 bits."""
    return tensor.mul_(torch.tensor(number, dtype=torch.float64).to(tensor.dtype))


class Sgd(Optimizer):
    """The formula of reference/README.md, written out. Up to multiply_ it is torch.optim.SGD."""

    def __init__(
        self,
        spec: OptimizerSpec,
        parameters: dict[str, nn.Parameter],
        never_used: Collection[str] = (),
    ) -> None:
        super().__init__(spec, parameters, never_used)
        self.kinds = ("momentum_buffer",) if spec.momentum != 0 else ()
        self._buffers: NamedTensors = {}

    @torch.no_grad()
    def step(self, gradients: NamedTensors) -> None:
        spec = self.spec
        self.steps_done += 1
        for name, parameter in self.parameters.items():
            gradient = gradients.get(name)
            if gradient is None:
                continue
            if spec.weight_decay != 0:
                gradient = gradient.add(parameter, alpha=spec.weight_decay)
            if spec.momentum != 0:
                if name in self._buffers:
                    multiply_(self._buffers[name], spec.momentum).add_(gradient)
                else:
                    self._buffers[name] = gradient.clone()
                gradient = self._buffers[name]
            parameter.add_(gradient, alpha=-spec.lr)

    def state(self) -> NamedTensors:
        return {
            f"momentum_buffer/{name}": self._buffers[name]
            for name in self.parameters
            if name in self._buffers
        }

    def _put_state(self, state: NamedTensors) -> None:
        self._buffers = {key.split("/", 1)[1]: value for key, value in state.items()}


class AdamW(Optimizer):
    """The formula of reference/README.md, written out. It is not torch.optim.AdamW, because that
    one averages with lerp_, m + (1 - beta1) * (g - m), where libtorch's C++ class multiplies and
    adds, beta1 * m + (1 - beta1) * g: equal numbers, but other roundings. PeerAdamW measures how
    far apart the two are."""

    kinds = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        spec: OptimizerSpec,
        parameters: dict[str, nn.Parameter],
        never_used: Collection[str] = (),
    ) -> None:
        super().__init__(spec, parameters, never_used)
        self._state: NamedTensors = {}
        # Each parameter counts the steps in which it had a gradient.
        self._counts: dict[str, int] = {}

    @torch.no_grad()
    def step(self, gradients: NamedTensors) -> None:
        spec = self.spec
        self.steps_done += 1
        for name, parameter in self.parameters.items():
            gradient = gradients.get(name)
            if gradient is None:
                continue
            for kind in self.kinds:
                self._state.setdefault(f"{kind}/{name}", torch.zeros_like(parameter))
            exp_avg = self._state[f"exp_avg/{name}"]
            exp_avg_sq = self._state[f"exp_avg_sq/{name}"]
            count = self._counts[name] = self._counts.get(name, 0) + 1
            correction1 = 1 - spec.beta1**count
            correction2 = 1 - spec.beta2**count
            if spec.weight_decay != 0:
                multiply_(parameter, 1 - spec.lr * spec.weight_decay)
            multiply_(exp_avg, spec.beta1).add_(gradient, alpha=1 - spec.beta1)
            multiply_(exp_avg_sq, spec.beta2).addcmul_(gradient, gradient, value=1 - spec.beta2)
            denominator = (exp_avg_sq.sqrt() / math.sqrt(correction2)).add_(spec.eps)
            parameter.addcdiv_(exp_avg, denominator, value=-spec.lr / correction1)

    def state(self) -> NamedTensors:
        return {
            key: self._state[key]
            for key in (f"{kind}/{name}" for name in self.parameters for kind in self.kinds)
            if key in self._state
        }

    def count(self, name: str) -> int:
        return self._counts.get(name, 0)

    def _put_state(self, state: NamedTensors) -> None:
        self._state = state
        self._counts = {key.split("/", 1)[1]: self.steps_done for key in state}


def make_optimizer(
    spec: OptimizerSpec,
    parameters: dict[str, nn.Parameter],
    never_used: Collection[str] = (),
) -> Optimizer:
    return (Sgd if spec.kind == "sgd" else AdamW)(spec, parameters, never_used)


class PeerAdamW:
    """torch.optim.AdamW from the state that an AdamW has now, to be compared a step later."""

    def __init__(self, optimizer: AdamW) -> None:
        self._ours = optimizer
        self._parameters = {
            name: parameter.detach().clone() for name, parameter in optimizer.parameters.items()
        }
        spec = optimizer.spec
        self._adamw = torch.optim.AdamW(
            self._parameters.values(),
            lr=spec.lr,
            betas=(spec.beta1, spec.beta2),
            eps=spec.eps,
            weight_decay=spec.weight_decay,
            foreach=False,
            fused=False,
        )
        state = optimizer.state()
        for name, parameter in self._parameters.items():
            if optimizer.count(name) > 0:
                self._adamw.state[parameter] = {
                    "step": torch.tensor(float(optimizer.count(name))),
                    **{kind: state[f"{kind}/{name}"].clone() for kind in optimizer.kinds},
                }

    def difference_after(self, gradients: NamedTensors) -> float:
        """Takes the step that the other has taken, and returns the largest difference between the
        two, over parameters and averages, relative to the largest element of the same tensor. (One
        element may be near zero by cancellation, so an elementwise ratio would say little.)"""
        for name, parameter in self._parameters.items():
            parameter.grad = gradients[name].clone() if name in gradients else None
        self._adamw.step()
        largest = 0.0
        for name, parameter in self._parameters.items():
            pairs = [(self._ours.parameters[name], parameter)]
            for kind, theirs in self._adamw.state.get(parameter, {}).items():
                if kind in self._ours.kinds:
                    pairs.append((self._ours.state()[f"{kind}/{name}"], theirs))
            for ours, theirs in pairs:
                size = float(theirs.abs().max())
                difference = float((ours.detach() - theirs).abs().max())
                if math.isnan(difference):
                    return math.inf
                if difference > 0:
                    largest = max(largest, difference / size if size > 0 else math.inf)
        return largest


def described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
