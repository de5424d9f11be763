"""How the gradients of all ranks' micro-batches become the gradient of a step: over the shards of each
replica, then over the replicas, each time in rank order."""

from __future__ import annotations

import torch
from torch import Tensor

from scenario import Scenario

NamedTensors = dict[str, Tensor]

# What narrow numbers are summed in. A sum is rounded once, at its end.
_SUM_DTYPES = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


@torch.no_grad()
def add_up(total: NamedTensors, summand: NamedTensors) -> None:
    """Adds in place. The first summand is taken itself, not added to zeros: 0 + -0 would be +0."""
    for name, value in summand.items():
        if name in total:
            total[name].add_(value)
        else:
            total[name] = value


@torch.no_grad()
def summed(parts: list[NamedTensors]) -> NamedTensors:
    """In the order of the parts, for each name that is in one of them; where it is missing it counts
    as zero."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _sum([part.get(name) for part in parts]) for name in names}


def _sum(summands: list[Tensor | None]) -> Tensor:
    example = next(each for each in summands if each is not None)
    if len(summands) == 1:
        return example
    zeros = torch.zeros_like(example)
    first, *others = (zeros if each is None else each for each in summands)
    total = first.to(_SUM_DTYPES.get(example.dtype, example.dtype), copy=True)
    for each in others:
        total.add_(each.to(total.dtype))
    return total.to(example.dtype)


class Reduction:
    """Of one step. What is handed in is used up."""

    def __init__(self, scenario: Scenario) -> None:
        self._accumulation = scenario.accumulation
        self._dtype = scenario.torch_dtype
        self._reduce_dtype = scenario.reduce_dtype
        self._replicas, self._shards = scenario.layout
        self._pre, self._post = scenario.divisors
        # Sums over micro-batches: of each rank, of each replica, or of all.
        self._of_ranks: list[NamedTensors] = [{} for _ in range(scenario.world_size)]
        self._of_replicas: list[NamedTensors] = [{} for _ in range(self._replicas)]
        self._total: NamedTensors = {}

    @torch.no_grad()
    def add_micro_batch(self, ranks: list[NamedTensors]) -> None:
        """The gradients of every rank, without those of parameters that have none."""
        ranks = [{name: g.to(self._reduce_dtype) for name, g in each.items()} for each in ranks]
        if self._accumulation == "last":
            for total, gradients in zip(self._of_ranks, ranks, strict=True):
                add_up(total, gradients)
            return
        replicas = self._over_shards(ranks)
        if self._accumulation == "last_all_reduce":
            for total, gradients in zip(self._of_replicas, replicas, strict=True):
                add_up(total, gradients)
            return
        add_up(self._total, self._over_replicas(replicas))

    def result(self) -> NamedTensors:
        if self._accumulation == "last":
            return self._over_replicas(self._over_shards(self._of_ranks))
        if self._accumulation == "last_all_reduce":
            return self._over_replicas(self._of_replicas)
        return self._total

    @torch.no_grad()
    def _over_shards(self, ranks: list[NamedTensors]) -> list[NamedTensors]:
        if self._pre != 1:
            for gradients in ranks:
                for gradient in gradients.values():
                    gradient.div_(self._pre)
        starts = range(0, len(ranks), self._shards)
        return [summed(ranks[start : start + self._shards]) for start in starts]

    @torch.no_grad()
    def _over_replicas(self, replicas: list[NamedTensors]) -> NamedTensors:
        total = summed(replicas)
        if self._post != 1:
            for gradient in total.values():
                gradient.div_(self._post)
        return {name: gradient.to(self._dtype) for name, gradient in total.items()}
