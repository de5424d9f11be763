"""The program: what it writes, what it answers, and how it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import PROGRAM, SGD
from safetensors import safe_open
from safetensors.torch import save_file

from scenario import QUIRKS
from traces import STATE_FORMAT, read_tensors

TORCH = ".".join(torch.__version__.split(".")[:2])
END = json.dumps({"end": True}) + "\n"


def order(step: int, state: Path | None = None) -> str:
    return json.dumps({"step": step, "state": None if state is None else str(state)}) + "\n"


def write_state_after(step_file: Path, state_file: Path) -> None:
    """The state after a step, from the step's file."""
    tensors, metadata = read_tensors(step_file)
    state = {
        key.removesuffix("/whole"): value
        for key, value in tensors.items()
        if key.startswith(("parameter/", "optimizer_state/"))
    }
    steps_done = str(int(metadata["step"]) + 1)
    save_file(state, state_file, {"format": STATE_FORMAT, "steps_done": steps_done})


def assert_same_files(one: Path, other: Path) -> None:
    tensors, metadata = read_tensors(one)
    others, other_metadata = read_tensors(other)
    assert metadata == other_metadata
    assert tensors.keys() == others.keys()
    for key, value in tensors.items():
        assert value.dtype == others[key].dtype, key
        assert torch.equal(value, others[key]), key


def test_a_run_by_itself_writes_every_step_and_then_trace_json(make_run):
    run = make_run("transformer")
    code, answers = run.inside("out")
    assert (code, answers) == (0, [])
    out = run.folder / "out"
    assert sorted(file.name for file in out.iterdir()) == [
        *(f"step-{step:05d}.safetensors" for step in range(3)),
        "trace.json",
    ]
    trace = json.loads((out / "trace.json").read_text())
    assert trace["format"] == "shardproof.trace/1"
    assert trace["steps"] == 3
    assert "torch" in trace["producer"]
    assert trace["scenario"]["model"]["width"] == 16
    with safe_open(out / "step-00001.safetensors", "pt") as file:
        metadata = file.metadata()
        keys = set(file.keys())
    assert metadata["format"] == "shardproof.trace/1"
    assert metadata["step"] == "1"
    listed = [p["key"] for tensor in json.loads(metadata["tensors"]) for p in tensor["pieces"]]
    assert len(listed) == len(keys) and set(listed) == keys


def test_steps_can_be_fewer_than_the_scenarios(make_run):
    run = make_run()
    assert run.inside("out", "--steps", "1") == (0, [])
    assert json.loads((run.folder / "out" / "trace.json").read_text())["steps"] == 1
    assert not (run.folder / "out" / "step-00001.safetensors").exists()


def test_two_runs_are_equal_to_the_bit(make_run):
    run = make_run("transformer", model__dropout=0.1)
    assert run.inside("one") == run.inside("two") == (0, [])
    for step in range(3):
        name = f"step-{step:05d}.safetensors"
        assert_same_files(run.folder / "one" / name, run.folder / "two" / name)


# Its eps is above 0 in float16 too.
ADAMW = {"kind": "adamw", "lr": 0.01, "eps": 1e-4}


@pytest.mark.parametrize("optimizer", [ADAMW, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("transformer", {"model__dropout": 0.1}),
        ("transformer", {"model__dropout": 0.1, "dtype": "bfloat16"}),
        ("quirks", {"model__quirks": list(QUIRKS), "dtype": "float16", "loss_scale": 2.0**14}),
        ("quirks", {"model__quirks": ["unused"], "precision": {"parameter": "bfloat16"}}),
    ],
)
def test_lockstep_from_its_own_states_is_the_run_by_itself(make_run, kind, changes, optimizer):
    run = make_run(kind, micro_batches=2, optimizer=optimizer, **changes)
    assert run.inside("free")[0] == 0
    free = [run.folder / "free" / f"step-{step:05d}.safetensors" for step in range(3)]
    states = [run.folder / f"state-{step}" for step in range(3)]
    for step_file, state in zip(free, states, strict=True):
        write_state_after(step_file, state)

    orders = order(0) + order(1, states[0]) + order(2, states[1]) + END
    code, answers = run.inside("led", "--lockstep", orders=orders)
    assert code == 0
    assert answers[0] == {"ready": True, "torch": torch.__version__}
    led = [run.folder / "led" / file.name for file in free]
    assert answers[1:] == [{"step": k, "file": str(file)} for k, file in enumerate(led)]
    for one, other in zip(free, led, strict=True):
        assert_same_files(one, other)

    code, _ = run.inside("own", "--lockstep", orders=order(0) + order(1) + order(2) + END)
    assert code == 0
    for file in free:
        assert_same_files(file, run.folder / "own" / file.name)


def test_a_state_that_is_put_in_place_is_what_the_step_starts_from(make_run):
    run = make_run()
    assert run.inside("free", "--steps", "1")[0] == 0
    state = run.folder / "state"
    write_state_after(run.folder / "free" / "step-00000.safetensors", state)
    tensors, metadata = read_tensors(state)
    tensors["parameter/layers.0.linear.bias"] += 1
    save_file(tensors, state, metadata)
    orders = order(0) + order(1, state) + END
    assert run.inside("led", "--lockstep", orders=orders)[0] == 0
    assert run.inside("own", "--lockstep", orders=order(0) + order(1) + END)[0] == 0
    name, key = "step-00001.safetensors", "output/layers.0@m0/rank0"
    led, _ = read_tensors(run.folder / "led" / name)
    own, _ = read_tensors(run.folder / "own" / name)
    assert (led[key] != own[key]).any()


def test_the_peer_optimizer_differs_by_roundings_only(make_run):
    run = make_run("transformer")
    assert run.inside("out", "--peer-optimizer") == (0, [])
    assert run.inside("plain") == (0, [])
    differences = []
    for step in range(3):
        name = f"step-{step:05d}.safetensors"
        tensors, metadata = read_tensors(run.folder / "out" / name)
        differences.append(float(metadata.pop("peer_optimizer_max_relative_difference")))
        plain, plain_metadata = read_tensors(run.folder / "plain" / name)
        assert metadata == plain_metadata  # looking does not disturb
        assert all(torch.equal(value, plain[key]) for key, value in tensors.items())
    # Some 1e-7: a few units of float32's roundoff, 6e-8.
    assert 0 < max(differences) < 5e-7


def test_files_have_the_mode_of_new_files(make_run):
    run = make_run()
    run.inside("out", "--steps", "1")
    other = run.folder / "other"
    other.write_text("")
    modes = {f.stat().st_mode for f in (*(run.folder / "out").iterdir(), other)}
    assert len(modes) == 1


# ---- Trouble ------------------------------------------------------------------------------------


def failed(result: tuple[int, list], code: int, *parts: str, unusable_python: bool = False) -> None:
    assert result[0] == code
    error = result[1][-1]
    assert error.pop("unusable_python", False) is unusable_python
    assert error.keys() == {"error"}
    for part in parts:
        assert part in error["error"]


def test_bad_arguments_are_named(make_run):
    run = make_run()
    failed(run.inside("out", "--colour"), 2, "--colour", "usage:")
    failed(run.inside("out", "--steps", "0"), 2, "--steps is 0; wanted: at least 1")
    failed(run.inside("out", "--steps", "1", "--lockstep"), 2, "--steps has no meaning")
    failed(run.inside("out", "--scratch", "x"), 2, "--scratch has no meaning")


def test_bad_input_files_are_named(make_run):
    run = make_run(dtype="float32")
    run.initial_file.write_bytes(run.initial_file.read_bytes()[:-5])
    failed(run.inside("out"), 2, "initial.safetensors")
    run.initial_file.unlink()
    failed(run.inside("out"), 2, "initial.safetensors")
    run.scenario_file.write_text('{"colour": 1}')
    failed(run.inside("out"), 2, "scenario.json", "colour is no field")
    assert not (run.folder / "out").exists()


def test_an_output_folder_in_use_is_refused(make_run):
    run = make_run()
    (run.folder / "out").mkdir()
    (run.folder / "out" / "precious").write_text("")
    failed(run.inside("out"), 2, "is not empty")
    (run.folder / "file").write_text("")
    failed(run.inside("file"), 2, "cannot make the output folder")


def test_another_torch_is_refused(make_run):
    run = make_run()
    result = run.inside("out", "--torch-version", "1.13")
    failed(result, 70, sys.executable, torch.__version__, "wanted: 1.13", unusable_python=True)
    assert run.inside("out", "--torch-version", TORCH, "--steps", "1") == (0, [])


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        ("nonsense\n", "is not JSON"),
        ("[1]\n", "wanted: {"),
        ('{"step": 0}\n', "wanted: {"),
        ('{"step": 0, "state": null, "colour": 1}\n', "wanted: {"),
        ('{"step": -1, "state": null}\n', "the order's step is -1"),
        ('{"step": true, "state": null}\n', "the order's step is true"),
        ('{"step": 0, "state": 5}\n', "the order's state is 5"),
        (order(1), "asked for step 1, but the state has 0 steps done"),
        (order(0) + order(0), "asked for step 0, but the state has 1 steps done"),
        (order(0, Path("/nowhere/state")), "/nowhere/state"),
    ],
)
def test_a_wrong_order_is_named(make_run, orders, message):
    run = make_run()
    result = run.inside("out", "--lockstep", orders=orders + END)
    failed(result, 2, message)
    assert not (run.folder / "out" / "trace.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "shardproof.state/9"}, "the metadata's format is 'shardproof.state/9'"),
        ({"steps_done": "many"}, "steps_done is 'many'"),
        ({"steps_done": "2"}, "asked for step 1, but the state has 2 steps done"),
        ({"rename": "gradient/x"}, "unknown tensor gradient/x"),
        ({"rename": "parameter/x"}, "x is unknown"),
        ({"rename": "optimizer_state/exp_avg/x"}, "unknown tensor optimizer_state/exp_avg/x"),
    ],
)
def test_a_wrong_state_is_named(make_run, change, message):
    run = make_run()
    assert run.inside("free", "--steps", "1")[0] == 0
    state = run.folder / "state"
    write_state_after(run.folder / "free" / "step-00000.safetensors", state)
    tensors, metadata = read_tensors(state)
    if "rename" in change:
        tensors[change["rename"]] = torch.zeros(1)
    else:
        metadata |= change
    save_file(tensors, state, metadata)
    orders = order(0) + order(1, state) + END
    failed(run.inside("led", "--lockstep", orders=orders), 2, message)


def test_a_full_disk_is_named_and_nothing_is_left_half_written(make_run, monkeypatch):
    run = make_run()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("traces.save_file", full)
    failed(run.inside("out"), 70, "cannot write", "step-00000.safetensors", "No space left")
    assert list((run.folder / "out").iterdir()) == []


def test_a_mistake_of_our_own_is_answered_too(make_run, monkeypatch, capsys):
    run = make_run()

    def broken(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr("trainer.Trainer.step", broken)
    failed(run.inside("out"), 70, "RuntimeError: broken")
    assert "Traceback" in capsys.readouterr().err


# ---- As a process -------------------------------------------------------------------------------


def test_the_process_speaks_json_only_and_exits_with_0(make_run):
    run = make_run()
    process = run.start("out", "--lockstep", "--torch-version", TORCH)
    stdout, stderr = process.communicate(order(0) + END, timeout=120)
    assert process.returncode == 0, stderr
    assert [sorted(json.loads(line)) for line in stdout.splitlines()] == [
        ["ready", "torch"],
        ["file", "step"],
    ]
    assert (run.folder / "out" / "trace.json").exists()


@pytest.mark.parametrize("ending", ["end of stdin", "SIGTERM"])
def test_orders_that_stop_remove_the_scratch_folder(make_run, ending):
    run = make_run()
    scratch = run.folder / "scratch"
    scratch.mkdir()
    process = run.start("scratch/out", "--lockstep", "--scratch", str(scratch))
    process.stdin.write(order(0))
    process.stdin.flush()
    assert "ready" in process.stdout.readline()
    assert "step-00000" in process.stdout.readline()
    if ending == "SIGTERM":
        process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 70
    assert ending.split()[-1] in json.loads(stdout)["error"]
    assert "Traceback" not in stderr
    assert not scratch.exists()


def test_a_missing_torch_is_named(make_run, tmp_path):
    run = make_run()
    # -S leaves site-packages out, so that there is no torch.
    process = subprocess.run(
        [sys.executable, "-S", "-B", str(PROGRAM), *run.arguments("out")],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    failed(
        (process.returncode, [json.loads(process.stdout)]),
        70,
        "cannot import torch",
        "--python or SHARDPROOF_PYTHON",
        unusable_python=True,
    )
