"""The data of a scenario: a pure function of (seed, step, micro-batch, rank, sample). The page that
defines it is reference/README.md."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from errors import InputError
from scenario import ModelSpec, Scenario

UInt64s = NDArray[np.uint64]

# What a counter stream is for: the first counter after the seed.
_BYTES, _TOKENS, _INPUT, _TARGET = 1, 2, 3, 4


def _mix(z: UInt64s) -> UInt64s:
    """The finalizer of SplitMix64. Arrays of uint64 wrap around silently, as is wanted."""
    z = z ^ (z >> np.uint64(30))
    z = z * np.uint64(0xBF58476D1CE4E5B9)
    z = z ^ (z >> np.uint64(27))
    z = z * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def hash_counters(seed: int, *counters: int | UInt64s) -> UInt64s:
    """One hash for each combination of counters; arrays among them are broadcast."""
    # One-dimensional, because numpy warns of the overflow of its scalars but not of arrays.
    value = _mix(np.array([seed], dtype=np.uint64))
    for counter in counters:
        summand = np.atleast_1d(np.asarray(counter, dtype=np.uint64))
        value = _mix(value ^ (summand + np.uint64(0x9E3779B97F4A7C15)))
    return value


class Dataset:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._corpus = np.zeros(0, dtype=np.uint8)
        if scenario.data.kind == "bytes":
            self._corpus = _read_corpus(scenario)

    def batch(self, step: int, micro_batch: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and target of one rank, each [batch, ...]."""
        scenario = self._scenario
        samples = np.arange(scenario.batch, dtype=np.uint64)
        if scenario.model.kind != "transformer":
            inputs, outputs = _sizes(scenario.model)
            counters = (step, micro_batch, rank, samples[:, None])
            return (
                self._real_numbers(_INPUT, counters, inputs),
                self._real_numbers(_TARGET, counters, outputs),
            )
        context = scenario.model.context
        if scenario.data.kind == "bytes":
            hashes = hash_counters(scenario.seed, _BYTES, step, micro_batch, rank, samples)
            starts = hashes % np.uint64(len(self._corpus) - context)
            window = starts[:, None] + np.arange(context + 1, dtype=np.uint64)
            tokens = self._corpus[window].astype(np.int64)
        else:
            positions = np.arange(context + 1, dtype=np.uint64)
            hashes = hash_counters(
                scenario.seed, _TOKENS, step, micro_batch, rank, samples[:, None], positions
            )
            tokens = (hashes % np.uint64(scenario.model.vocabulary)).astype(np.int64)
        tokens = torch.from_numpy(tokens)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _real_numbers(self, stream: int, counters: tuple, size: int) -> torch.Tensor:
        """Multiples of 1/1024 in [-1, 1): exact in every dtype but bfloat16, which rounds them."""
        elements = np.arange(size, dtype=np.uint64)
        hashes = hash_counters(self._scenario.seed, stream, *counters, elements)
        numbers = ((hashes >> np.uint64(53)).astype(np.int64) - 1024) / 1024
        return torch.from_numpy(numbers).to(self._scenario.torch_dtype)


def _sizes(model: ModelSpec) -> tuple[int, int]:
    """Of input and target."""
    if model.kind == "mlp":
        return model.sizes[0], model.sizes[-1]
    return model.quirk_width, model.quirk_width


def _read_corpus(scenario: Scenario) -> NDArray[np.uint8]:
    parts = []
    for name in scenario.data.corpus:
        try:
            with open(name, "rb") as file:
                parts.append(file.read())
        except OSError as error:
            raise InputError(f"cannot read the corpus file {name}: {error.strerror}") from error
    corpus = np.frombuffer(b"".join(parts), dtype=np.uint8)
    if len(corpus) <= scenario.model.context:
        raise InputError(
            f"the corpus ({', '.join(scenario.data.corpus)}) has {len(corpus)} bytes; "
            f"wanted: more than model.context, {scenario.model.context}"
        )
    return corpus
