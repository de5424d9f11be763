"""One rank of a training run with one of PyTorch's own ways to train in parallel, on gloo and CPUs.
compare.py starts as many of these as there are ranks. Rank 0 prints the line of JSON that
train_step_time.cpp describes; what is timed is the same."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "reference/python"))

from data import Dataset  # noqa: E402
from models import Model, make_model  # noqa: E402
from scenario import Scenario, load_scenario  # noqa: E402

# What a way makes of a model: what to call, whose parameters to train, and how to clip.
Parallel = tuple[Callable[[Tensor], Tensor], nn.Module, Callable[[float], Tensor]]


def fsdp2(model: Model, scenario: Scenario) -> Parallel:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (scenario.world_size,))
    for layer in _units(model, scenario):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, model, lambda limit: nn.utils.clip_grad_norm_(model.parameters(), limit)


def fsdp1(model: Model, scenario: Scenario) -> Parallel:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import CustomPolicy

    units = set(_units(model, scenario))
    policy = CustomPolicy(lambda module: module in units)
    sharded = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu")
    )
    return sharded, sharded, sharded.clip_grad_norm_


def ddp(model: Model, scenario: Scenario) -> Parallel:
    replicated = nn.parallel.DistributedDataParallel(model)
    return replicated, model, lambda limit: nn.utils.clip_grad_norm_(model.parameters(), limit)


WAYS = {"fsdp2": fsdp2, "fsdp1": fsdp1, "ddp": ddp}


def _units(model: Model, scenario: Scenario) -> list[nn.Module]:
    return list(model.layers_by_name().values()) if scenario.wrap == "layer" else []


def time_rank(
    way: str, scenario: Scenario, weights: Path, rank: int, warm_up: int
) -> dict[str, object]:
    model = make_model(scenario)
    # The file is our own program's, and names a type that weights_only does not know.
    model.load_state_dict(torch.load(weights, weights_only=False))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    call, owner, clip = WAYS[way](model, scenario)
    settings = scenario.optimizer
    optimizer = torch.optim.AdamW(
        owner.parameters(),
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    data = Dataset(scenario)
    seconds = []
    for step in range(warm_up + scenario.steps):
        ids, target = data.batch(step, 0, rank)
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = model.loss(call(ids), target)
        loss.backward()
        clip(scenario.max_norm)
        optimizer.step()
        dist.barrier()
        passed = time.perf_counter() - start
        if step >= warm_up:
            seconds.append(passed)
    return {"parameters": parameters, "loss": loss.item(), "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("scenario", type=Path)
    parser.add_argument("warm_up", type=int)
    parser.add_argument("weights", type=Path, help="as train_step_time wrote them")
    parser.add_argument("rank", type=int)
    parser.add_argument("meeting_point", type=Path, help="a file that does not exist yet")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    scenario = load_scenario(arguments.scenario)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{arguments.meeting_point}",
        rank=arguments.rank,
        world_size=scenario.world_size,
    )
    timing = time_rank(
        arguments.way, scenario, arguments.weights, arguments.rank, arguments.warm_up
    )
    if arguments.rank == 0:
        print(json.dumps(timing), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
