"""The README: every command in it runs, and what it lists is what the code says.

Run with UPDATE_README=1 to write the generated parts anew.
"""

from __future__ import annotations

import csv
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.case import AXES, Case, format_value
from bench.flags import axis_flag
from bench.record import Status

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
COMMANDS = [
    line.partition("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README.read_text(), re.DOTALL)
    for line in block.splitlines()
    if line.partition("#")[0].strip()
]
MEASURED = "cpu-epyc-20261120"  # the sweep whose table the README shows


def generate() -> dict[str, str]:
    """The parts of the README that follow from the code and the records, by their marks."""
    axes = "\n| axis | default | |\n|---|---|---|\n" + "".join(
        f"| `{axis_flag(name)}` | {format_value(getattr(Case, name)) or '–'} "
        f"| {axis.metadata['help']} |\n"
        for name, axis in AXES.items()
    )
    statuses = "\n" + "".join(f"- `{s}`: {s.meaning}\n" for s in Status)
    return {
        "axes": axes,
        "statuses": statuses,
        "table": report(f"results/{MEASURED}"),
        "2019": report("results/reference/rtx-titan-2019.csv"),
    }


def report(sweep: str) -> str:
    """A sweep's report in Markdown, without its title: the README has headings of its own."""
    command = [sys.executable, "-m", "bench.report", sweep, "--format", "md"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return "\n" + done.stdout.partition("\n")[2].lstrip()


@pytest.mark.parametrize("mark", ["axes", "statuses", "table", "2019"])
def test_generated_parts_are_current(mark: str) -> None:
    text, part = README.read_text(), generate()[mark]
    pattern = re.compile(f"(<!-- {mark} -->)(.*?)(<!-- /{mark} -->)", re.DOTALL)
    found = pattern.search(text)
    assert found, f"the README has no place for {mark}"
    if os.environ.get("UPDATE_README"):
        README.write_text(pattern.sub(lambda m: m[1] + part + m[3], text))
        return
    assert found[2] == part, "run the tests with UPDATE_README=1"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, cifar10: Path) -> Path:
    """A folder with the repository's files in it, real images in data/, and no results but ours."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("bench", "benchmarks", "tests", "Makefile", "pyproject.toml", "constraints.txt"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("README.md", "LICENSE", "asv.conf.json"):
        shutil.copy(ROOT / name, folder)
    # the README's name for a model of the reader's own
    (folder / "your_package").mkdir()
    (folder / "your_package" / "your_module.py").write_text(
        "from torch import nn\n"
        "def factory(): return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))\n"
    )
    (folder / "results").mkdir()
    (folder / "results" / "reference").symlink_to(ROOT / "results" / "reference")
    (folder / "data").symlink_to(cifar10)
    for name in ("before", "after"):
        subprocess.run(
            [*fake_sweep(["--out", f"results/{name}", "--repeats", "3"])], cwd=folder, check=True
        )
        scatter_times(folder / "results" / name / "records.csv")
    return folder


def scatter_times(records: Path) -> None:
    """Give the fake's equal repeats a spread of 0.1 %, without which none could be judged."""
    with records.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["epoch_time_s"] = str(float(row["epoch_time_s"]) * (1 + int(row["repeat"]) / 1000))
    with records.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def fake_sweep(arguments: list[str]) -> list[str]:
    python = [sys.executable, "-m", "bench.sweep"]
    return [*python, "--preset", "quick", "--executor", "fake", *arguments]


# What stands in for the hours a command would take, or for what a test must not do; any other
# command runs as it is written.
STAND_INS = {
    "make sweep": (
        "make -o .venv/ready sweep BIN=python "
        "ARGS='--preset quick --precision fp32 --batch-size 64 --fraction 0.001 --repeats 1 "
        "--out results/one'"
    ),
    "make test": "make -o .venv/ready --dry-run test",
    "pip install": "pip install --dry-run --no-deps --no-build-isolation -e .",
}


def stand_in(command: str) -> str:
    for start, other in STAND_INS.items():
        if command.startswith(start):
            return other
    if "bench.sweep" in command and "--list" not in command:
        return f"{command} --executor fake"
    return command


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str, checkout: Path) -> None:
    if command.startswith("asv ") or command == "make publish":
        # these need a history of commits, which is made and run there
        name = "bench.publish" if command == "make publish" else f'"{command.split()[1]}"'
        assert name in (ROOT / "tests" / "test_asv_site.py").read_text()
        return
    words = shlex.split(stand_in(command))
    if words[0] in ("python", "pip"):
        words[:1] = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "pip"]
    words = [word.replace("BIN=python", f"BIN={sys.executable}") for word in words]
    done = subprocess.run(words, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout or "-o" in words or "--figures" in words


def test_there_are_commands_to_test() -> None:
    assert {"make sweep", "make test"} < set(COMMANDS)
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
        assert (ROOT / target).exists(), target
