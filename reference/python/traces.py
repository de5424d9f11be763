"""Traces, states and weights on disk. The format is described in conformance/trace-format.md."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from errors import EnvironmentTrouble, InputError

TRACE_FORMAT = "shardproof.trace/1"
STATE_FORMAT = "shardproof.state/1"
NO_RANK = -1

# What the system gives to a new file; it can only be asked by setting it.
_UMASK = os.umask(0)
os.umask(_UMASK)
_FILE_MODE = 0o666 & ~_UMASK


@dataclass
class Piece:
    rank: int
    values: Tensor
    offset: int = 0


@dataclass
class TraceTensor:
    quantity: str
    name: str
    placement: str  # per_rank, replicated, sharded, single
    pieces: list[Piece]

    @staticmethod
    def single(quantity: str, name: str, values: Tensor) -> TraceTensor:
        return TraceTensor(quantity, name, "single", [Piece(NO_RANK, kept(values))])

    @staticmethod
    def per_rank(quantity: str, name: str, values: list[Tensor]) -> TraceTensor:
        pieces = [Piece(rank, value) for rank, value in enumerate(values)]
        return TraceTensor(quantity, name, "per_rank", pieces)


@dataclass
class StepTrace:
    step: int
    tensors: list[TraceTensor] = field(default_factory=list)
    # Further strings for the file's metadata.
    notes: dict[str, str] = field(default_factory=dict)

    def values(self, quantity: str, name: str, piece: int = 0) -> Tensor:
        for tensor in self.tensors:
            if (tensor.quantity, tensor.name) == (quantity, name):
                return tensor.pieces[piece].values
        raise KeyError(f"{quantity} {name}")


@dataclass
class State:
    # The steps that the optimizer took. With loss scaling it skips some.
    steps_done: int
    parameters: dict[str, Tensor]
    optimizer_state: dict[str, Tensor]


def kept(values: Tensor) -> Tensor:
    """A contiguous CPU copy that nothing else writes to."""
    return values.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def step_file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:05d}.safetensors"


def write_step(folder: Path, trace: StepTrace) -> Path:
    tensors: dict[str, Tensor] = {}
    described: list[dict[str, Any]] = []
    for tensor in trace.tensors:
        pieces = []
        for piece in tensor.pieces:
            holder = "whole" if piece.rank == NO_RANK else f"rank{piece.rank}"
            key = f"{tensor.quantity}/{tensor.name}/{holder}"
            if key in tensors:
                raise ValueError(f"the trace of step {trace.step} has two tensors {key}")
            tensors[key] = piece.values
            pieces.append({"rank": piece.rank, "offset": piece.offset, "key": key})
        described.append(
            {
                "quantity": tensor.quantity,
                "name": tensor.name,
                "shape": list(tensor.pieces[0].values.shape),
                "placement": tensor.placement,
                "pieces": pieces,
            }
        )
    metadata = {
        "format": TRACE_FORMAT,
        "step": str(trace.step),
        "tensors": json.dumps(described),
        **trace.notes,
    }
    path = step_file(folder, trace.step)
    with _replacing(path) as partial:
        try:
            save_file(tensors, partial, metadata=metadata)
            os.chmod(partial, _FILE_MODE)  # save_file makes files that only their owner can read
        except (OSError, SafetensorError) as error:
            raise EnvironmentTrouble(f"cannot write {path}: {error}") from error
    return path


def write_trace_json(folder: Path, scenario: dict[str, Any], producer: str, steps: int) -> None:
    document = {
        "format": TRACE_FORMAT,
        "producer": producer,
        "scenario": scenario,
        "steps": steps,
    }
    with _replacing(folder / "trace.json") as partial:
        partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of a safetensors file, and its metadata."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            return tensors, dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read {path} as a safetensors file: {error}") from error


def read_state(path: Path) -> State:
    tensors, metadata = read_tensors(path)
    found = metadata.get("format")
    if found != STATE_FORMAT:
        raise InputError(f"{path}: the metadata's format is {found!r}; wanted: {STATE_FORMAT!r}")
    steps_done = metadata.get("steps_done", "")
    if not (steps_done.isascii() and steps_done.isdigit()):
        raise InputError(f"{path}: steps_done is {steps_done!r}; wanted: a number of steps")
    # Those that the optimizer took, which are fewer where scaled gradients overflowed.
    taken = metadata.get("optimizer_steps", steps_done)
    if not (taken.isascii() and taken.isdigit() and int(taken) <= int(steps_done)):
        raise InputError(
            f"{path}: optimizer_steps is {taken!r}; wanted: a number of steps, at most {steps_done}"
        )
    state = State(int(taken), {}, {})
    for key, value in tensors.items():
        section, _, name = key.partition("/")
        if section == "parameter":
            state.parameters[name] = value
        elif section == "optimizer_state":
            state.optimizer_state[name] = value
        else:
            raise InputError(
                f"{path}: unknown tensor {key}; wanted: parameter/NAME, optimizer_state/KIND/NAME"
            )
    return state


class _replacing:
    """Gives a path beside the real one and renames at the end: nobody sees half a file, and a
    failure leaves nothing behind."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f".{path.name}.{os.getpid()}.partial")

    def __enter__(self) -> Path:
        return self._partial

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            if kind is None:
                os.replace(self._partial, self._path)
        finally:
            self._partial.unlink(missing_ok=True)
