"""What the tests share: the modules on the path, small scenarios, and ways to run the program."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

PROGRAM = Path(__file__).resolve().parents[1] / "reference.py"
sys.path.insert(0, str(PROGRAM.parent))

from models import make_model  # noqa: E402
from scenario import Scenario, scenario_from_json  # noqa: E402

torch.set_num_threads(1)

SMALL_TRANSFORMER = {
    "kind": "transformer",
    "layers": 2,
    "width": 16,
    "heads": 2,
    "context": 8,
    "vocabulary": 32,
}
SMALL_MLP = {"kind": "mlp", "sizes": [12, 20, 7]}
QUIRKS_MODEL = {"kind": "quirks"}  # its defaults are small
MODELS = {"mlp": SMALL_MLP, "transformer": SMALL_TRANSFORMER, "quirks": QUIRKS_MODEL}


def small_document(kind: str = "mlp", **changes: Any) -> dict[str, Any]:
    """A scenario's JSON. Changes are given by path, with two underscores for the dot."""
    document: dict[str, Any] = {
        "model": dict(MODELS[kind]),
        "data": {"kind": "synthetic"},
        "optimizer": {"kind": "adamw", "lr": 0.01},
        "seed": 7,
        "world_size": 2,
        "batch": 3,
        "steps": 3,
        "max_norm": 0.5,
    }
    for path, value in changes.items():
        section, _, name = path.rpartition("__")
        (document[section] if section else document)[name] = value
    return document


def small_scenario(kind: str = "mlp", **changes: Any) -> Scenario:
    return scenario_from_json(small_document(kind, **changes))


SGD = {"kind": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def weights_of(scenario: Scenario, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    weights = {}
    for name, parameter in make_model(scenario).named_parameters():
        value = parameter.detach().to(scenario.torch_dtype)
        # Not the usual zeros and ones: a bias that is forgotten has to show.
        weights[name] = (value + 0.1 * torch.randn_like(value)).contiguous()
    return weights


class Run:
    """Files for one run of the program, and the run."""

    def __init__(self, folder: Path, document: dict[str, Any]) -> None:
        self.folder = folder
        self.document = document
        self.scenario_file = folder / "scenario.json"
        self.initial_file = folder / "initial.safetensors"
        self.scenario_file.write_text(json.dumps(document), encoding="utf-8")
        save_file(weights_of(scenario_from_json(document)), self.initial_file)

    def arguments(self, output: str, *more: str) -> list[str]:
        return [
            *("--scenario", str(self.scenario_file)),
            *("--initial", str(self.initial_file)),
            *("--output", str(self.folder / output)),
            *more,
        ]

    def inside(self, output: str, *more: str, orders: str = "") -> tuple[int, list[Any]]:
        """Exit code and answers of a run within this process."""
        from reference import main

        answers = io.StringIO()
        code = main(self.arguments(output, *more), io.StringIO(orders), answers)
        return code, [json.loads(line) for line in answers.getvalue().splitlines()]

    def start(self, output: str, *more: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-B", str(PROGRAM), *self.arguments(output, *more)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    return lambda kind="mlp", **changes: Run(tmp_path, small_document(kind, **changes))
