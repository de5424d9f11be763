"""Times a training step of this library beside PyTorch's FSDP2, FSDP1 and DDP (gloo), on this machine.
ci/peers builds what is needed and calls this.

All train the main job's transformer (or --scenario) with AdamW and clipping on synthetic data, one
thread a rank. The ways take turns, round by round, so that a machine that slows down slows all alike;
each turn is a fresh start with a warm-up that is not counted. A step is timed from the moment when all
ranks are ready to the moment when all are done. Ranks of this library are threads, those of PyTorch
are processes. Nothing is judged: times depend on the machine.

Exit codes: 0 all were timed; 2 wrong usage; 70 one of them broke; 77 this PyTorch cannot take part."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2] / "reference/python"))

from errors import InputError  # noqa: E402
from scenario import (  # noqa: E402
    Scenario,
    load_scenario,
    scenario_from_json,
    scenario_to_json,
)

OURS = "shardproof"
NAMES = {
    OURS: "Shardproof",
    "fsdp2": "PyTorch FSDP2",
    "fsdp1": "PyTorch FSDP1",
    "ddp": "PyTorch DDP",
}
SCHEMA = "shardproof.peers/1"


class Broken(Exception):
    """One of those compared did not come to its end."""


@dataclass
class Row:
    way: str
    world_size: int
    parameters: int = 0
    loss: float = 0.0
    seconds: list[float] = field(default_factory=list)

    def median(self) -> float:
        return statistics.median(self.seconds)

    def quartiles(self) -> tuple[float, float]:
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high


def missing() -> str:
    """Why PyTorch cannot take part here, or nothing."""
    if not torch.distributed.is_available():
        return f"torch {torch.__version__} was built without torch.distributed"
    if not torch.distributed.is_gloo_available():
        return f"torch {torch.__version__} was built without gloo"
    return ""


def commands(arguments: argparse.Namespace, way: str, world_size: int, folder: Path) -> list[list]:
    """One a process."""
    task = [folder / "scenario.json", arguments.warm_up, folder / "weights"]
    if way == OURS:  # comes first, and writes the weights
        return [[arguments.program, *task]]
    meeting_point = folder / "meeting_point"
    meeting_point.unlink(missing_ok=True)
    peer = [sys.executable, "-B", HERE / "peer.py", way, *task]
    return [[*peer, rank, meeting_point] for rank in range(world_size)]


def take_turn(calls: list[list], timeout: float) -> dict[str, Any]:
    """Runs the processes side by side; what the first one printed."""
    # One thread a rank also where a library reads this instead of being told.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    processes = []
    outputs = []
    try:
        for call in calls:
            outputs.append((tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")))
            process = subprocess.Popen(
                [str(part) for part in call],
                stdout=outputs[-1][0],
                stderr=outputs[-1][1],
                env=environment,
            )
            processes.append(process)
        for process in processes:
            process.wait(timeout)
    except subprocess.TimeoutExpired as error:
        raise Broken(f"{' '.join(error.cmd)} did not end within {timeout:g} s") from error
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    texts = [[_content(file) for file in pair] for pair in outputs]
    for call, process, (_, errors) in zip(calls, processes, texts):
        if process.returncode == 2:  # our program refuses the scenario
            raise InputError(errors.strip())
        if process.returncode != 0:
            shown = " ".join(str(part) for part in call)
            raise Broken(f"{shown} ended with {process.returncode}:\n{errors}")
    return json.loads(texts[0][0])


def _content(file: Any) -> str:
    file.seek(0)
    with file:
        return file.read()


def measure(arguments: argparse.Namespace, scenario: Scenario) -> list[Row]:
    rows = [Row(way, world) for world in arguments.world_sizes for way in NAMES]
    steps = -(-arguments.steps // arguments.rounds)
    with tempfile.TemporaryDirectory(prefix="shardproof-peers-") as name:
        folder = Path(name)
        for number in range(arguments.rounds):
            for row in rows:
                print(
                    f"round {number + 1} of {arguments.rounds}: {NAMES[row.way]}, "
                    f"{row.world_size} ranks",
                    file=sys.stderr,
                    flush=True,
                )
                turn = dataclasses.replace(scenario, world_size=row.world_size, steps=steps)
                (folder / "scenario.json").write_text(json.dumps(scenario_to_json(turn)))
                calls = commands(arguments, row.way, row.world_size, folder)
                timing = take_turn(calls, arguments.timeout)
                row.parameters, row.loss = timing["parameters"], timing["loss"]
                row.seconds += timing["seconds"]
    require_same_training(rows)
    return rows


def require_same_training(rows: list[Row]) -> None:
    """Times say something only if all did the same work."""
    for row in rows:
        ours = rows_of_ours(rows)[row.world_size]
        if row.parameters != ours.parameters or not math.isclose(row.loss, ours.loss, rel_tol=1e-2):
            raise Broken(
                f"{NAMES[row.way]} on {row.world_size} ranks trained {row.parameters:,} parameters "
                f"to a loss of {row.loss:.6f}; wanted: as Shardproof, {ours.parameters:,} and "
                f"{ours.loss:.6f}"
            )


def rows_of_ours(rows: list[Row]) -> dict[int, Row]:
    """By world size."""
    return {row.world_size: row for row in rows if row.way == OURS}


def table(rows: list[Row]) -> str:
    lines = [
        "ranks  implementation   steps  median step     quartiles          ours / it",
        "-" * 73,
    ]
    for row in rows:
        ours = rows_of_ours(rows)[row.world_size]
        low, high = row.quartiles()
        lines.append(
            f"{row.world_size:5}  {NAMES[row.way]:15}  {len(row.seconds):5}"
            f"  {1e3 * row.median():8.1f} ms  {1e3 * low:8.1f} -{1e3 * high:8.1f} ms"
            f"  {ours.median() / row.median():9.2f}"
        )
    return "\n".join(lines)


def document(arguments: argparse.Namespace, scenario: Scenario, rows: list[Row]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "system": platform.platform(),
            "load_at_end": os.getloadavg()[0],
        },
        "torch": torch.__version__,
        "rounds": arguments.rounds,
        "warm_up_steps": arguments.warm_up,
        "scenario": {
            name: value
            for name, value in scenario_to_json(scenario).items()
            if name not in ("world_size", "steps")  # stand in the rows
        },
        "rows": [
            {
                **dataclasses.asdict(row),
                "median": row.median(),
                "quartiles": row.quartiles(),
                "ours_over_it": rows_of_ours(rows)[row.world_size].median() / row.median(),
            }
            for row in rows
        ],
    }


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ci/peers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--program", type=Path, required=True, help="train_step_time, built")
    parser.add_argument("--scenario", type=Path, help="another model, batch or optimizer, as JSON")
    parser.add_argument("--world-sizes", type=positive, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--steps", type=positive, default=25, help="timed steps of each (25)")
    parser.add_argument("--rounds", type=positive, default=5, help="turns of each (5)")
    parser.add_argument("--warm-up", type=positive, default=3, help="steps before, each turn (3)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one turn (600)")
    parser.add_argument("--output", type=Path, help="write everything measured there, as JSON")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    reason = missing()
    if reason:
        print(f"ci/peers: skipped: {reason}", file=sys.stderr)
        return 77
    try:
        scenario = (
            load_scenario(arguments.scenario)
            if arguments.scenario
            else scenario_from_json({"data": {"kind": "synthetic"}})
        )
        rows = measure(arguments, scenario)
    except InputError as error:
        print(f"ci/peers: {error}", file=sys.stderr)
        return 2
    except Broken as error:
        print(f"ci/peers: {error}", file=sys.stderr)
        return 70
    print(table(rows))
    print(
        f"{rows[0].parameters:,} parameters, batch {scenario.batch} a rank, one thread a rank; "
        f"torch {torch.__version__}, {len(os.sched_getaffinity(0))} cores. Times are this machine's."
    )
    if arguments.output:
        text = json.dumps(document(arguments, scenario, rows), indent=1)
        arguments.output.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
