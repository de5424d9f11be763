"""Holds the README to the project: usage `check_readme.py SOURCE_FOLDER SHARDPROOF_COMMAND`.

- the C++ block is the example that is built and run by the tests, to the letter;
- every link and picture leads to a file;
- every option named in the text is one that the command knows;
- each console block is run again, and ends with the exit code and the lines it shows. Digits may differ, since bits and
  times depend on the machine; words may not.
"""

import re
import subprocess
import sys
from pathlib import Path

source, command = Path(sys.argv[1]), sys.argv[2]
text = (source / "README.md").read_text()
problems = []


def wordy(line: str) -> str:
    """The line without what may differ from machine to machine: numbers, and how wide they make a column."""
    line = re.sub(r"0x[0-9a-f.]+p[-+]?\d+|[-+]?\d[\d,.]*(e[-+]?\d+)?", "#", line)
    return re.sub(r"[\s-]+", " ", line).strip()


def run(arguments: list[str]) -> tuple[int, str]:
    done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=900)
    return done.returncode, done.stdout


def check_console(block: str) -> None:
    shown_code = 0
    lines = block.strip().splitlines()
    called = lines.pop(0)
    assert called.startswith("$ ci/run"), called
    if len(lines) > 1 and lines[-2] == "$ echo $?":
        shown_code = int(lines[-1])
        lines = lines[:-2]
    code, output = run(called.split()[2:] or ["run"])
    if code != shown_code:
        problems.append(f"`{called}` ended with {code}, the README shows {shown_code}:\n{output}")
    real = {wordy(line) for line in output.splitlines()}
    missing = []
    for line in lines:
        if line != "[...]" and wordy(line) not in real:
            missing.append(line)
    if missing:
        problems.append(f"`{called}` does not print:\n" + "\n".join(missing) + f"\nbut:\n{output}")


blocks = re.findall(r"```(\w+)\n(.*?)```", text, flags=re.DOTALL)
kinds = [kind for kind, _ in blocks]
if kinds.count("cpp") != 1 or kinds.count("console") < 2:
    problems.append(
        f"the README has blocks {kinds}; wanted: one cpp block and at least two console blocks"
    )
for kind, block in blocks:
    if (
        kind == "cpp"
        and block.strip() != (source / "impl/examples/quickstart.cpp").read_text().strip()
    ):
        problems.append("the C++ block is not impl/examples/quickstart.cpp")
    if kind == "console":
        check_console(block)
    if kind == "sh":
        for program in re.findall(r"^(ci/\w+)", block, flags=re.MULTILINE):
            if not (source / program).is_file():
                problems.append(f"there is no {program}")

prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
for target in re.findall(r"\]\(([^)]+)\)", prose):
    if not (source / target).is_file():
        problems.append(f"a link leads to {target}, which is not there")
help_text = "".join(run([name, "--help"])[1] for name in ("run", "checkpoint-check", "claims"))
for option in set(
    re.findall(r"(?<![\w-])--[a-z][a-z-]+", re.sub(r"cmake .*?--preset cpu`|`cmake.*?`", "", prose))
):
    if option not in help_text:
        problems.append(f"the command has no option {option}")
for path in re.findall(r"`((?:impl|reference|conformance|fault_injection|ci)/[\w./]*)`", prose):
    if not (source / path).exists():
        problems.append(f"there is no {path}")

print("\n\n".join(problems) or "the README holds")
sys.exit(1 if problems else 0)
