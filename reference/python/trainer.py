"""Trains on one device what the ranks of a sharded run train together: each rank's micro-batch one
after another, and the gradients combined in rank order. The exact sequence of operations is in
reference/README.md, under "Gradients (replay)" to "Optimizers".

The parameters that are kept and optimised are in the scenario's dtype. What computes is a model of its
own, in the dtype of mixed precision, which gets their values before each step."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict

import torch
from torch import Tensor, nn

from data import Dataset
from errors import InputError, UnusablePython
from models import make_model
from norm import exact_norm
from optimizers import PeerAdamW, described, make_optimizer
from reduction import Reduction
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
        # All that is optimised is contiguous, whatever the leaf is: in 16 bits add_ with alpha rounds
        # once or twice, depending on the layout.
        self._parameters = {
            name: nn.Parameter(
                torch.empty(leaf.shape, dtype=scenario.torch_dtype, device=self._device),
                requires_grad=leaf.requires_grad,
            )
            for name, leaf in self._model.named_parameters()
        }
        self._load_parameters(initial)
        for name, value in initial.items():
            if not torch.isfinite(value).all():
                raise InputError(f"the initial weight {name} has an element that is not finite")
        trained = {name: p for name, p in self._parameters.items() if p.requires_grad}
        self._optimizer = make_optimizer(scenario.optimizer, trained, self._model.never_used())
        self._next_step: int | None = 0
        self._generators = [
            # The seed is an unsigned 64-bit number, and the sum wraps around.
            torch.Generator("cpu").manual_seed((scenario.seed + rank) % 2**64)
            for rank in range(scenario.world_size)
        ]
        self._outputs: dict[str, list[Tensor]] = defaultdict(list)
        self._micro_batch = 0
        self._forward = 0
        # How often each module has been called in this forward.
        self._calls: Counter[str] = Counter()
        for name, module in (*self._model.layers_by_name().items(), ("model", self._model)):
            module.register_forward_hook(self._recorder(name))

    @property
    def steps_done(self) -> int:
        """The steps that the optimizer took; with loss scaling it skips some."""
        return self._optimizer.steps_done

    def set_state(self, state: State) -> None:
        """Puts parameters and optimizer state in place of its own. The ranks' generators go on.
        Values that are not finite are taken as they are, to compare what follows from them too."""
        self._load_parameters(state.parameters)
        self._optimizer.load_state(state.steps_done, state.optimizer_state)
        # How many steps were skipped before it a state does not say.
        self._next_step = None if self._scenario.loss_scale > 0 else state.steps_done

    def step(self, step: int) -> StepTrace:
        if step < self.steps_done or self._next_step not in (None, step):
            wanted = f"{self.steps_done} or later" if self._next_step is None else self._next_step
            raise InputError(
                f"asked for step {step}, but the state has {self.steps_done} steps done; "
                f"wanted: step {wanted}, or another state"
            )
        trace = StepTrace(step)
        self._outputs.clear()
        losses, gradients = self._reduced_gradients(step)
        for name, values in self._outputs.items():
            trace.tensors.append(TraceTensor.per_rank("output", name, values))
        trace.tensors.append(TraceTensor.per_rank("loss", "loss", losses))
        for name in reversed(gradients):
            trace.tensors.append(TraceTensor.single("gradient", name, gradients[name]))

        skipped = self._scenario.loss_scale > 0 and not all(
            bool(gradient.isfinite().all()) for gradient in gradients.values()
        )
        norm = exact_norm(gradients.values(), self._scenario.norm_type)
        trace.tensors.append(TraceTensor.single("total_norm", "total_norm", norm))
        if self._scenario.max_norm > 0:
            clip(gradients, norm, self._scenario.max_norm)
        for name in reversed(gradients):
            trace.tensors.append(TraceTensor.single("clipped_gradient", name, gradients[name]))

        if not skipped:
            self._optimize(gradients, trace)
        self._next_step = step + 1
        for name, parameter in self._parameters.items():
            trace.tensors.append(TraceTensor.single("parameter", name, parameter))
        for name, value in self._optimizer.state().items():
            trace.tensors.append(TraceTensor.single("optimizer_state", name, value))
        return trace

    def _optimize(self, gradients: dict[str, Tensor], trace: StepTrace) -> None:
        peer = PeerAdamW(self._optimizer) if self._peer_optimizer else None
        self._optimizer.step(gradients)
        if peer:
            difference = peer.difference_after(gradients)
            trace.notes["peer_optimizer_max_relative_difference"] = repr(difference)

    def _reduced_gradients(self, step: int) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Each rank's losses [micro_batches], and the gradient of every parameter that has one."""
        scenario = self._scenario
        self._fill_model()
        losses: list[list[Tensor]] = [[] for _ in range(scenario.world_size)]
        reduction = Reduction(scenario)
        for micro_batch in range(scenario.micro_batches):
            self._micro_batch = micro_batch
            ranks = []
            for rank in range(scenario.world_size):
                loss, gradients = self._rank_gradients(step, micro_batch, rank)
                losses[rank].append(loss)
                ranks.append(gradients)
            reduction.add_micro_batch(ranks)
        reduced = reduction.result()
        if scenario.loss_scale > 0:
            inverse = torch.tensor(1.0 / scenario.loss_scale, dtype=torch.float32).item()
            for gradient in reduced.values():
                gradient.mul_(inverse)
        # In the order of the parameters.
        gradients = {
            name: reduced[name].contiguous() for name in self._parameters if name in reduced
        }
        return [kept(torch.stack(each)) for each in losses], gradients

    @torch.no_grad()
    def _fill_model(self) -> None:
        for name, leaf in self._model.named_parameters():
            leaf.copy_(self._parameters[name])

    def _rank_gradients(
        self, step: int, micro_batch: int, rank: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Of the parameters that have one, in the leaf's dtype."""
        self._model.zero_grad(set_to_none=True)
        self._model.set_generator(self._generators[rank])
        loss = self._loss(*self._data.batch(step, micro_batch, rank))
        divided = loss if self._scenario.micro_batches == 1 else loss / self._scenario.micro_batches
        scale = self._scenario.loss_scale
        (divided * scale if scale > 0 else divided).backward()
        gradients = {
            name: leaf.grad
            for name, leaf in self._model.named_parameters()
            if leaf.grad is not None
        }
        # The next rank must not add to these.
        self._model.zero_grad(set_to_none=True)
        return loss.detach(), gradients

    def _loss(self, input: Tensor, target: Tensor) -> Tensor:
        input, target = input.to(self._device), target.to(self._device)
        if input.is_floating_point():
            input = input.to(self._scenario.parameter_dtype)
        losses = []
        for self._forward, each in enumerate(self._model.forward_inputs(input)):
            self._calls.clear()
            output = self._model(each)
            fitting = target.to(output.dtype) if target.is_floating_point() else target
            losses.append(self._model.loss(output, fitting))
        return losses[0] if len(losses) == 1 else losses[0] + losses[1]

    def _recorder(self, name: str):
        def record(module: nn.Module, inputs: tuple, output: Tensor | tuple) -> None:
            forward = f"#{self._forward + 1}" if self._forward > 0 else ""
            # Of a layer that the model calls more than once.
            call = f"+{self._calls[name]}" if self._calls[name] > 0 else ""
            self._calls[name] += 1
            values = output[0] if isinstance(output, tuple) else output
            self._outputs[f"{name}{forward}{call}@m{self._micro_batch}"].append(kept(values))

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
