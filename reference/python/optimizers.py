"""Optimizers, with the state that a trace shows: "KIND/NAME" to tensor, none before a step."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from errors import InputError
from scenario import OptimizerSpec

NamedTensors = dict[str, Tensor]


class Optimizer:
    # The kinds of state kept for each parameter.
    kinds: tuple[str, ...] = ()

    def __init__(self, spec: OptimizerSpec, parameters: dict[str, nn.Parameter]) -> None:
        self.spec = spec
        self.parameters = parameters
        self.steps_done = 0

    def step(self, gradients: NamedTensors) -> None:
        raise NotImplementedError

    def state(self) -> NamedTensors:
        raise NotImplementedError

    def load_state(self, steps_done: int, state: NamedTensors) -> None:
        """Either no tensors at all, before the first step, or one of each kind and parameter."""
        wanted = {f"{kind}/{name}" for name in self.parameters for kind in self.kinds}
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
                if state
            }
        )

    def _put_state(self, state: NamedTensors) -> None:
        raise NotImplementedError


class Sgd(Optimizer):
    """torch.optim.SGD itself."""

    def __init__(self, spec: OptimizerSpec, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__(spec, parameters)
        self.kinds = ("momentum_buffer",) if spec.momentum != 0 else ()
        self._sgd = torch.optim.SGD(
            parameters.values(),
            lr=spec.lr,
            momentum=spec.momentum,
            weight_decay=spec.weight_decay,
            foreach=False,
            fused=False,
        )

    def step(self, gradients: NamedTensors) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name]
        self._sgd.step()
        self._sgd.zero_grad(set_to_none=True)
        self.steps_done += 1

    def state(self) -> NamedTensors:
        if self.steps_done == 0:
            return {}
        return {
            f"{kind}/{name}": self._sgd.state[parameter][kind]
            for name, parameter in self.parameters.items()
            for kind in self.kinds
        }

    def _put_state(self, state: NamedTensors) -> None:
        self._sgd.state.clear()
        for key, value in state.items():
            kind, name = key.split("/", 1)
            self._sgd.state[self.parameters[name]][kind] = value


class AdamW(Optimizer):
    """The formula of reference/README.md, written out. It is not torch.optim.AdamW, because that
    one averages with lerp_, m + (1 - beta1) * (g - m), where libtorch's C++ class multiplies and
    adds, beta1 * m + (1 - beta1) * g: equal numbers, but other roundings. PeerAdamW measures how
    far apart the two are."""

    kinds = ("exp_avg", "exp_avg_sq")

    def __init__(self, spec: OptimizerSpec, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__(spec, parameters)
        self._state: NamedTensors = {}

    @torch.no_grad()
    def step(self, gradients: NamedTensors) -> None:
        spec = self.spec
        self.steps_done += 1
        correction1 = 1 - spec.beta1**self.steps_done
        correction2 = 1 - spec.beta2**self.steps_done
        for name, parameter in self.parameters.items():
            gradient = gradients[name]
            for kind in self.kinds:
                self._state.setdefault(f"{kind}/{name}", torch.zeros_like(parameter))
            exp_avg = self._state[f"exp_avg/{name}"]
            exp_avg_sq = self._state[f"exp_avg_sq/{name}"]
            if spec.weight_decay != 0:
                parameter.mul_(1 - spec.lr * spec.weight_decay)
            exp_avg.mul_(spec.beta1).add_(gradient, alpha=1 - spec.beta1)
            exp_avg_sq.mul_(spec.beta2).addcmul_(gradient, gradient, value=1 - spec.beta2)
            denominator = (exp_avg_sq.sqrt() / math.sqrt(correction2)).add_(spec.eps)
            parameter.addcdiv_(exp_avg, denominator, value=-spec.lr / correction1)

    def state(self) -> NamedTensors:
        return self._state

    def _put_state(self, state: NamedTensors) -> None:
        self._state = state


def make_optimizer(spec: OptimizerSpec, parameters: dict[str, nn.Parameter]) -> Optimizer:
    return (Sgd if spec.kind == "sgd" else AdamW)(spec, parameters)


class PeerAdamW:
    """torch.optim.AdamW from the state that an AdamW has now, to be compared a step later."""

    def __init__(self, optimizer: Optimizer) -> None:
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
        for name, parameter in self._parameters.items() if state else ():
            self._adamw.state[parameter] = {
                "step": torch.tensor(float(optimizer.steps_done)),
                **{kind: state[f"{kind}/{name}"].clone() for kind in optimizer.kinds},
            }

    def difference_after(self, gradients: NamedTensors) -> float:
        """Takes the step that the other has taken, and returns the largest difference between the
        two, over parameters and averages, relative to the largest element of the same tensor. (One
        element may be near zero by cancellation, so an elementwise ratio would say little.)"""
        for name, parameter in self._parameters.items():
            parameter.grad = gradients[name].clone()
        self._adamw.step()
        largest = 0.0
        for name, parameter in self._parameters.items():
            pairs = [(self._ours.parameters[name], parameter)]
            for kind in self._ours.kinds:
                pairs.append(
                    (self._ours.state()[f"{kind}/{name}"], self._adamw.state[parameter][kind])
                )
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
