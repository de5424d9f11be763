#!/usr/bin/env python3
"""What torch.nn.utils.clip_grad_norm_ does to a model that PyTorch itself has sharded: FSDP1 with flat
and with original parameters, and FSDP2. Every rank has the same data, so that the averaged gradients
are those of one device. Answers with one line of JSON:

    {"torch": "2.11.0", "max_norm": 0.5,
     "worlds": [{"world": 2, "single": 1.9, "ways": [
         {"way": "fsdp1_flat", "clip": "plain", "elements": 408, "tensors": 3,
          "returned": [1.2, 1.4],      by rank: what the call returned, on this rank
          "whole": [1.2, 1.4],         by rank: the same; of a DTensor its full_tensor()
          "after": 0.7}, ...]}]}       norm of the whole clipped gradient

Trouble is one line {"error": "a sentence"} and exit code 70. All ranks are processes of this one's
process group, on gloo; nothing but JSON goes to stdout."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

MAX_NORM = 0.5
SIZES = (16, 24, 16, 8)
WAYS = ("fsdp1_flat", "fsdp1_orig", "fsdp2")
# Of the ranks' rendezvous and collectives; the caller's deadline ends all sooner or later anyway.
SECONDS = 120


def _make_model(seed: int) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in zip(SIZES, SIZES[1:], strict=False):
        layers.append(nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh()))
    return nn.Sequential(*layers)


def _gradients(model: Any, seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed + 1)
    data = torch.randn(8, SIZES[0], generator=generator)
    target = 4 * torch.randn(8, SIZES[-1], generator=generator)
    (model(data) - target).pow(2).sum(1).mean().backward()


def _shard(model: Any, way: str, world: int) -> Any:
    import torch

    if way == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import CustomPolicy

    layers = set(model)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=CustomPolicy(lambda module: module in layers),
        device_id=torch.device("cpu"),
        use_orig_params=way == "fsdp1_orig",
    )


def _local(tensor: Any) -> Any:
    """This rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _measure(way: str, clip: str, world: int, seed: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch import nn

    model = _shard(_make_model(seed), way, world)
    _gradients(model, seed)
    if clip == "plain":
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    else:
        norm = model.clip_grad_norm_(MAX_NORM)
    returned = float(_local(norm))
    whole = float(norm.full_tensor()) if hasattr(norm, "full_tensor") else returned
    pieces = [_local(p.grad) for p in model.parameters() if p.grad is not None]
    square = torch.tensor([sum(float(piece.double().square().sum()) for piece in pieces)])
    square = square.double()
    dist.all_reduce(square)
    rows: list[Any] = [None] * world
    dist.all_gather_object(rows, (returned, whole, sum(p.numel() for p in pieces), len(pieces)))
    return {
        "way": way,
        "clip": clip,
        "returned": [row[0] for row in rows],
        "whole": [row[1] for row in rows],
        "elements": max(row[2] for row in rows),
        "tensors": max(row[3] for row in rows),
        "after": float(square.sqrt()),
    }


def _run_rank(rank: int, world: int, seed: int, folder: str) -> None:
    import datetime

    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting{world}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=SECONDS),
    )
    ways = []
    for way in WAYS:
        for clip in ("plain", "own") if way != "fsdp2" else ("plain",):
            ways.append(_measure(way, clip, world, seed))
    if rank == 0:
        single = _make_model(seed)
        _gradients(single, seed)
        norm = float(nn.utils.clip_grad_norm_(single.parameters(), MAX_NORM))
        answer = {"world": world, "single": norm, "ways": ways}
        Path(folder, f"world{world}.json").write_text(json.dumps(answer))
    _leave_together(rank, world, folder)


def _leave_together(rank: int, world: int, folder: str) -> None:
    """Ends this process when every rank has all it came for, without taking the group down: gloo's
    own end now and then aborts ("terminate called without an active exception")."""
    Path(folder, f"done{world}.{rank}").touch()
    deadline = time.monotonic() + SECONDS
    while not all(Path(folder, f"done{world}.{other}").exists() for other in range(world)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {rank}: the others are not done within {SECONDS} s")
        time.sleep(0.01)
    os._exit(0)


def measure(worlds: list[int], seed: int, folder: str) -> dict[str, Any]:
    import torch
    import torch.multiprocessing as mp

    answers = []
    for world in worlds:
        mp.spawn(_run_rank, args=(world, seed, folder), nprocs=world, join=True)
        answers.append(json.loads(Path(folder, f"world{world}.json").read_text()))
    return {"torch": torch.__version__, "max_norm": MAX_NORM, "worlds": answers}


def main() -> int:
    parser = argparse.ArgumentParser(description="Clipping in PyTorch's own FSDP, measured.")
    parser.add_argument("--world", type=int, action="append", required=True, help="2 or more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--scratch", required=True, help="folder for files, which the caller removes"
    )
    arguments = parser.parse_args()
    # Whatever torch or gloo print goes to stderr.
    answer_fd = os.dup(1)
    os.dup2(2, 1)
    try:
        answer: dict[str, Any] = measure(arguments.world, arguments.seed, arguments.scratch)
        code = 0
    except Exception as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        code = 70
    os.write(answer_fd, (json.dumps(answer) + "\n").encode())
    return code


if __name__ == "__main__":
    sys.exit(main())
