"""Trains on one device what the ranks of a sharded run train together: each rank's micro-batch one
after another, and the gradients combined in rank order. The exact sequence of operations is in
reference/README.md, under "Gradients (replay)" to "Optimizers"."""

from __future__ import annotations

import sys
from collections import defaultdict

import torch
from torch import Tensor, nn

from data import Dataset
from errors import InputError, UnusablePython
from models import make_model
from norm import exact_norm
from optimizers import PeerAdamW, described, make_optimizer
from scenario import Scenario
from traces import State, StepTrace, TraceTensor, kept


class Trainer:
    def __init__(
        self, scenario: Scenario, initial: dict[str, Tensor], peer_optimizer: bool = False
    ) -> None:
        self._device = usable_device(scenario.device)
        if scenario.model.dropout > 0 and self._device.type != "cpu":
            raise InputError(
                f'model.dropout is {scenario.model.dropout} on device "{scenario.device}"; '
                'wanted: 0, or device "cpu", where the ranks\' generators are'
            )
        if peer_optimizer and scenario.optimizer.kind != "adamw":
            raise InputError("--peer-optimizer is about AdamW; the scenario's optimizer is another")
        self._scenario = scenario
        self._peer_optimizer = peer_optimizer
        self._data = Dataset(scenario)
        self._model = make_model(scenario).to(self._device)
        self._parameters: dict[str, nn.Parameter] = dict(self._model.named_parameters())
        self._load_parameters(initial)
        for name, value in initial.items():
            if not torch.isfinite(value).all():
                raise InputError(f"the initial weight {name} has an element that is not finite")
        self._optimizer = make_optimizer(scenario.optimizer, self._parameters)
        self._generators = [
            # The seed is an unsigned 64-bit number, and the sum wraps around.
            torch.Generator("cpu").manual_seed((scenario.seed + rank) % 2**64)
            for rank in range(scenario.world_size)
        ]
        self._outputs: dict[str, list[Tensor]] = defaultdict(list)
        self._micro_batch = 0
        for name, module in (*self._model.layers_by_name().items(), ("model", self._model)):
            module.register_forward_hook(self._recorder(name))

    @property
    def steps_done(self) -> int:
        return self._optimizer.steps_done

    def set_state(self, state: State) -> None:
        """Puts parameters and optimizer state in place of its own. The ranks' generators go on.
        Values that are not finite are taken as they are, to compare what follows from them too."""
        self._load_parameters(state.parameters)
        self._optimizer.load_state(state.steps_done, state.optimizer_state)

    def step(self, step: int) -> StepTrace:
        if step != self.steps_done:
            raise InputError(
                f"asked for step {step}, but the state has {self.steps_done} steps done; "
                f"wanted: step {self.steps_done}, or a state with {step} steps done"
            )
        trace = StepTrace(step)
        self._outputs.clear()
        losses, gradients = self._reduced_gradients(step)
        for name, values in self._outputs.items():
            trace.tensors.append(TraceTensor.per_rank("output", name, values))
        trace.tensors.append(TraceTensor.per_rank("loss", "loss", losses))
        for name in reversed(gradients):
            trace.tensors.append(TraceTensor.single("gradient", name, gradients[name]))

        norm = exact_norm(gradients.values())
        trace.tensors.append(TraceTensor.single("total_norm", "total_norm", norm))
        if self._scenario.max_norm > 0:
            clip(gradients, norm, self._scenario.max_norm)
        for name in reversed(gradients):
            trace.tensors.append(TraceTensor.single("clipped_gradient", name, gradients[name]))

        peer = PeerAdamW(self._optimizer) if self._peer_optimizer else None
        self._optimizer.step(gradients)
        if peer:
            difference = peer.difference_after(gradients)
            trace.notes["peer_optimizer_max_relative_difference"] = repr(difference)
        for name, parameter in self._parameters.items():
            trace.tensors.append(TraceTensor.single("parameter", name, parameter))
        for name, value in self._optimizer.state().items():
            trace.tensors.append(TraceTensor.single("optimizer_state", name, value))
        return trace

    def _reduced_gradients(self, step: int) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Each rank's losses [micro_batches], and the gradient of every parameter."""
        scenario = self._scenario
        losses: list[list[Tensor]] = [[] for _ in range(scenario.world_size)]
        total: dict[str, Tensor] = {}
        for micro_batch in range(scenario.micro_batches):
            self._micro_batch = micro_batch
            reduced: dict[str, Tensor] = {}
            for rank in range(scenario.world_size):
                loss, gradients = self._rank_gradients(step, micro_batch, rank)
                losses[rank].append(loss)
                add_up(reduced, gradients)
            for gradient in reduced.values():
                gradient.div_(scenario.world_size)
            add_up(total, reduced)
        return [kept(torch.stack(each)) for each in losses], total

    def _rank_gradients(
        self, step: int, micro_batch: int, rank: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        self._model.zero_grad(set_to_none=True)
        self._model.set_generator(self._generators[rank])
        input, target = self._data.batch(step, micro_batch, rank)
        output = self._model(input.to(self._device))
        loss = self._model.loss(output, target.to(self._device))
        micro_batches = self._scenario.micro_batches
        (loss if micro_batches == 1 else loss / micro_batches).backward()
        gradients = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in self._parameters.items()
        }
        # The next rank must not add to these.
        self._model.zero_grad(set_to_none=True)
        return loss.detach(), gradients

    def _recorder(self, name: str):
        def record(module: nn.Module, inputs: tuple, output: Tensor) -> None:
            self._outputs[f"{name}@m{self._micro_batch}"].append(kept(output))

        return record

    @torch.no_grad()
    def _load_parameters(self, values: dict[str, Tensor]) -> None:
        for name in sorted(self._parameters.keys() ^ values.keys()):
            fault = "missing" if name in self._parameters else "unknown"
            raise InputError(
                f"the weights have a tensor too few or too many: {name} is {fault}; wanted: "
                f"{', '.join(self._parameters)}"
            )
        for name, parameter in self._parameters.items():
            value = values[name]
            if value.shape != parameter.shape or value.dtype != parameter.dtype:
                raise InputError(
                    f"the weight {name} is {described(value)}; wanted: {described(parameter)}"
                )
        for name, parameter in self._parameters.items():
            parameter.copy_(values[name])


@torch.no_grad()
def add_up(total: dict[str, Tensor], summand: dict[str, Tensor]) -> None:
    """Adds in place. The first summand is taken itself, not added to zeros: 0 + -0 would be +0."""
    for name, value in summand.items():
        if name in total:
            total[name].add_(value)
        else:
            total[name] = value


@torch.no_grad()
def clip(gradients: dict[str, Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiplies in place, also when the coefficient is 1."""
    coefficient = torch.full_like(norm, max_norm).div_(norm + 1e-6).clamp(max=1)
    for gradient in gradients.values():
        gradient.mul_(coefficient.to(gradient.device))


def usable_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f'device is "{name}", which torch cannot use here: {reason}') from error
    return device


def check_torch(wanted: str | None) -> None:
    """Refuses another torch than the one asked for, by its first two numbers: kernels change from
    one version to the next, and with them the bits."""
    if wanted is None:
        return
    found = torch.__version__
    if found.split("+")[0].split(".")[:2] != wanted.split("+")[0].split(".")[:2]:
        raise UnusablePython(
            f"{sys.executable} has torch {found}; wanted: {wanted}. Install it there (pip install "
            f"'torch=={wanted}.*'), or name a Python that has it with --python or SHARDPROOF_PYTHON"
        )
