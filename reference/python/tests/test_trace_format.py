"""The example on the page that describes traces writes one that keeps every rule of that page, and
so does the program."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from errors import InputError
from scenario import QUIRKS, scenario_from_json
from traces import STATE_FORMAT, read_state

PAGE = Path(__file__).resolve().parents[3] / "conformance" / "trace-format.md"
QUANTITIES = [
    "output",
    "loss",
    "mean_loss",
    "gradient",
    "total_norm",
    "clipped_gradient",
    "parameter",
    "optimizer_state",
]


def check_trace(folder: Path) -> int:
    """Asserts every rule of the page; returns the number of steps."""
    trace = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
    assert trace.keys() == {"format", "producer", "scenario", "steps"}
    assert trace["format"] == "shardproof.trace/1"
    assert trace["producer"]
    scenario = scenario_from_json(trace["scenario"])
    names = [f"step-{step:05d}.safetensors" for step in range(trace["steps"])]
    assert sorted(file.name for file in folder.iterdir()) == [*names, "trace.json"]
    for step, name in enumerate(names):
        with safe_open(folder / name, "pt") as file:
            metadata = file.metadata()
            tensors = {key: file.get_tensor(key) for key in file.keys()}
        assert metadata["format"] == "shardproof.trace/1"
        assert metadata["step"] == str(step)
        described = json.loads(metadata["tensors"])
        identities = [(each["quantity"], each["name"]) for each in described]
        assert len(set(identities)) == len(identities)
        order = [QUANTITIES.index(quantity) for quantity, _ in identities]
        assert order == sorted(order)
        for each in described:
            check_tensor(each, tensors, scenario.world_size)
        assert not tensors, "tensors that belong to no piece"
    return trace["steps"]


def check_tensor(described: dict[str, Any], tensors: dict[str, torch.Tensor], ranks: int) -> None:
    assert described.keys() == {"quantity", "name", "shape", "placement", "pieces"}
    pieces, shape = described["pieces"], described["shape"]
    values = [tensors.pop(piece["key"]) for piece in pieces]
    (dtype,) = {value.dtype for value in values}
    assert dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    expected_ranks = [-1] if described["placement"] == "single" else list(range(ranks))
    assert [piece["rank"] for piece in pieces] == expected_ranks
    if described["placement"] == "sharded":
        reached = 0
        for piece, value in zip(pieces, values, strict=True):
            assert value.dim() == 1
            assert piece["offset"] == reached
            reached += value.numel()
        assert reached == math.prod(shape)
    else:
        assert described["placement"] in ("per_rank", "replicated", "single")
        assert all(piece["offset"] == 0 for piece in pieces)
        assert all(list(value.shape) == shape for value in values)


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> Path:
    """The folder that the page's example writes."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    folder = tmp_path_factory.mktemp("example")
    (folder / "example.py").write_text(code, encoding="utf-8")
    subprocess.run(
        [sys.executable, "-W", "error", "example.py"], cwd=folder, check=True, timeout=120
    )
    return folder / "my-run"


def test_the_example_of_the_page_keeps_its_rules(example):
    assert check_trace(example) == 2


def test_the_example_traces_what_the_page_lists(example):
    with safe_open(example / "step-00001.safetensors", "pt") as file:
        described = json.loads(file.metadata()["tensors"])
        weights = torch.cat(
            [file.get_tensor(f"parameter/layers.0.linear.weight/rank{r}") for r in (0, 1)]
        )
    parameters = ["layers.0.linear.bias", "layers.0.linear.weight"]
    assert [(each["quantity"], each["name"]) for each in described] == [
        ("output", "layers.0@m0"),
        ("output", "model@m0"),
        ("loss", "loss"),
        *(("gradient", name) for name in parameters),
        ("total_norm", "total_norm"),
        *(("clipped_gradient", name) for name in parameters),
        *(("parameter", name) for name in parameters),
    ]
    assert (weights != 1).all()  # it trained


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mlp", {}),
        ("transformer", {}),
        ("transformer", {"dtype": "float16", "loss_scale": 8, "model__tied": True}),
        ("mlp", {"dtype": "bfloat16", "precision": {"output": "float32"}, "norm_type": "inf"}),
        ("quirks", {"model__quirks": list(QUIRKS), "precision": {"parameter": "bfloat16"}}),
    ],
)
def test_the_program_keeps_the_rules_of_the_page(make_run, kind, changes):
    run = make_run(kind, world_size=3, micro_batches=2, **changes)
    assert run.inside("out") == (0, [])
    assert check_trace(run.folder / "out") == 3


def test_the_page_lists_every_quantity():
    page = PAGE.read_text(encoding="utf-8")
    for quantity in QUANTITIES:
        assert f"`{quantity}`" in page


@pytest.mark.parametrize("taken", ["4", "-1", "two", "1.0"])
def test_a_state_counts_the_steps_that_the_optimizer_took(tmp_path, taken):
    file = tmp_path / "state.safetensors"
    metadata = {"format": STATE_FORMAT, "steps_done": "3"}
    save_file({"parameter/w": torch.ones(1)}, file, metadata)
    assert read_state(file).steps_done == 3
    save_file({"parameter/w": torch.ones(1)}, file, metadata | {"optimizer_steps": "1"})
    assert read_state(file).steps_done == 1
    save_file({"parameter/w": torch.ones(1)}, file, metadata | {"optimizer_steps": taken})
    with pytest.raises(InputError, match="optimizer_steps is"):
        read_state(file)
