"""The comparison runs from end to end; what it measures is not looked at. SHARDPROOF_TRAIN_STEP_TIME
names the program built from train_step_time.cpp."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPARE = Path(__file__).resolve().parent / "compare.py"
SMALL = {
    "model": {"layers": 2, "width": 16, "heads": 2, "context": 8, "vocabulary": 32},
    "data": {"kind": "synthetic"},
    "batch": 2,
}


def compare(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = os.environ["SHARDPROOF_TRAIN_STEP_TIME"]
    command = [sys.executable, "-B", COMPARE, "--program", program, *arguments]
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=240
    )


def test_two_steps_on_two_ranks_print_every_row(tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.json"
    scenario.write_text(json.dumps(SMALL))
    output = tmp_path / "peers.json"
    short = ("--scenario", scenario, "--world-sizes", 2, "--steps", 2, "--rounds", 1)
    done = compare(*short, "--warm-up", 1, "--output", output)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    names = ["Shardproof", "PyTorch FSDP2", "PyTorch FSDP1", "PyTorch DDP"]
    shown = [line for line in done.stdout.splitlines() if line.startswith("    2  ")]
    assert [line[7:22].strip() for line in shown] == names
    document = json.loads(output.read_text())
    assert [row["way"] for row in document["rows"]] == ["shardproof", "fsdp2", "fsdp1", "ddp"]
    for row in document["rows"]:
        assert len(row["seconds"]) == 2 and min(row["seconds"]) > 0
        assert row["quartiles"][0] <= row["median"] <= row["quartiles"][1]
        assert row["parameters"] == 7_744
        # All start from the same weights, and differ by rounding only.
        assert row["loss"] == pytest.approx(document["rows"][0]["loss"], rel=1e-4)
    assert document["rows"][0]["ours_over_it"] == 1


def test_a_scenario_that_the_peers_would_not_follow_is_refused(tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.json"
    scenario.write_text(json.dumps({**SMALL, "micro_batches": 2}))
    done = compare("--scenario", scenario, "--world-sizes", 1, "--steps", 1, "--rounds", 1)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 2
    assert "one micro-batch" in done.stderr
