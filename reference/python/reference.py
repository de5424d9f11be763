#!/usr/bin/env python3
"""The Python reference: trains a scenario in plain PyTorch, on one device, as reference/README.md
prescribes it, and writes what it computed as a trace. It shares no code with the C++ reference, and
the two agree to the bit.

    reference.py --scenario S.json --initial W.safetensors --output DIR [--steps N]
        trains by itself and writes the trace (conformance/trace-format.md) into DIR.

    reference.py --scenario S.json --initial W.safetensors --output DIR --lockstep
        says {"ready": true, "torch": "2.11.0"}, then obeys one JSON line after another from stdin:
        {"step": 3, "state": "PATH"}  puts the state in place (null: keeps its own), trains step 3,
                                      and answers {"step": 3, "file": "PATH"}
        {"end": true}                 writes trace.json and exits.

Only such lines go to stdout; everything else goes to stderr. Any trouble is one line
{"error": "a sentence"} and exit code 2 (what was handed in is wrong) or 70 (anything else); with
"unusable_python": true if another Python may do."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO

from errors import EXIT_SOFTWARE, EXIT_USAGE, EnvironmentTrouble, InputError, UnusablePython


class Abandoned(Exception):
    """Whoever gave the orders is gone."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} ({self.format_usage().strip()})")


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="reference.py", description="Single-device training in plain PyTorch, as a trace."
    )
    parser.add_argument("--scenario", type=Path, required=True, help="JSON file")
    parser.add_argument("--initial", type=Path, required=True, help="weights, a safetensors file")
    parser.add_argument("--output", type=Path, required=True, help="folder, new or empty")
    parser.add_argument("--steps", type=int, help="instead of the scenario's number of steps")
    parser.add_argument("--lockstep", action="store_true", help="obey orders from stdin")
    parser.add_argument("--torch-version", help='for example "2.11": refuse any other torch')
    parser.add_argument(
        "--peer-optimizer",
        action="store_true",
        help="run torch.optim.AdamW beside and record how far it differs",
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        help="with --lockstep: a folder to remove if the orders stop before the end",
    )
    options = parser.parse_args(arguments)
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps is {options.steps}; wanted: at least 1")
    if options.lockstep and options.steps is not None:
        parser.error("--steps has no meaning with --lockstep")
    if options.scratch and not options.lockstep:
        parser.error("--scratch has no meaning without --lockstep")
    return options


def main(arguments: list[str], orders: TextIO, answers: TextIO) -> int:
    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    scratch: Path | None = None
    more: dict[str, Any] = {}
    try:
        options = parse_arguments(arguments)
        scratch = options.scratch
        run(options, orders, answer)
        return 0
    except Abandoned as trouble:
        # The end of stdin and SIGTERM announce the same death: the second must not stop the removal.
        try:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        finally:
            if scratch:
                shutil.rmtree(scratch, ignore_errors=True)
        sentence, code = str(trouble), EXIT_SOFTWARE
    except InputError as trouble:
        sentence, code = str(trouble), EXIT_USAGE
    except UnusablePython as trouble:
        sentence, code = str(trouble), EXIT_SOFTWARE
        more = {"unusable_python": True}
    except EnvironmentTrouble as trouble:
        sentence, code = str(trouble), EXIT_SOFTWARE
    except Exception as trouble:  # whatever it is, the caller must get an answer
        import traceback

        traceback.print_exc()
        sentence, code = f"{type(trouble).__name__}: {trouble}", EXIT_SOFTWARE
    print(f"reference.py: {sentence}", file=sys.stderr)
    with contextlib.suppress(OSError):  # nobody may listen any more; stderr has it
        answer({"error": sentence, **more})
    return code


def run(options: argparse.Namespace, orders: TextIO, answer: Any) -> None:
    try:
        import torch

        # To say what is missing before anything is done.
        import numpy  # noqa: F401
        import safetensors  # noqa: F401
    except ImportError as error:
        raise UnusablePython(
            f"{sys.executable} cannot import {error.name or 'a package'} ({error}). Install torch, "
            "numpy and safetensors there, or name a Python that has them with --python or "
            "SHARDPROOF_PYTHON"
        ) from error

    from scenario import load_scenario, scenario_to_json
    from traces import read_state, read_tensors, write_step, write_trace_json
    from trainer import Trainer, check_torch

    check_torch(options.torch_version)
    torch.set_num_threads(1)  # kernels split sums over threads, and so the bits depend on them
    scenario = load_scenario(options.scenario)
    initial, _ = read_tensors(options.initial)
    trainer = Trainer(scenario, initial, options.peer_optimizer)
    folder = prepare_output(options.output)

    if options.lockstep:
        answer({"ready": True, "torch": torch.__version__})
        requests = read_orders(orders)
    else:
        steps = options.steps or scenario.steps
        requests = iter([(step, None) for step in range(steps)])
    steps_written = 0
    for step, state in requests:
        if state is not None:
            trainer.set_state(read_state(state))
        path = write_step(folder, trainer.step(step))
        steps_written += 1
        if options.lockstep:
            answer({"step": step, "file": str(path)})
    producer = f"reference.py, torch {torch.__version__}"
    write_trace_json(folder, scenario_to_json(scenario), producer, steps_written)


def read_orders(orders: TextIO) -> Iterator[tuple[int, Path | None]]:
    """Steps to train, with the path of the state to start from, until the end is ordered."""
    for line in orders:
        try:
            order = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"the order {line.strip()!r} is not JSON: {error.msg}") from error
        if order == {"end": True}:
            return
        if not isinstance(order, dict) or order.keys() != {"step", "state"}:
            raise InputError(
                f"the order is {line.strip()}; "
                'wanted: {"step": k, "state": PATH or null} or {"end": true}'
            )
        step, state = order["step"], order["state"]
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise InputError(f"the order's step is {json.dumps(step)}; wanted: 0, 1, 2, ...")
        if state is not None and not isinstance(state, str):
            raise InputError(f"the order's state is {json.dumps(state)}; wanted: a path or null")
        yield step, None if state is None else Path(state)
    raise Abandoned('stdin ended before the order {"end": true}')


def prepare_output(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError(f"the output folder {folder} is not empty; wanted: a new one")
    except OSError as error:
        raise InputError(f"cannot make the output folder {folder}: {error.strerror}") from error
    return folder


def _raise_abandoned(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Abandoned("ended by SIGTERM")


if __name__ == "__main__":
    # That the parent died is announced by SIGTERM or by the end of stdin; either way the scratch
    # folder is to be removed.
    signal.signal(signal.SIGTERM, _raise_abandoned)
    # What a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.exit(main(sys.argv[1:], sys.stdin, answers))
