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
from textwrap import fill

import pytest

from bench.card.folder import FIGURE, Card, find_published
from bench.card.phases import PUBLISHED
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
CPU_SWEEP = "cpu-epyc-20261120"  # whose table the README shows until a GPU has been measured
PICTURE = "Images per second by batch size, per precision"


def find_measured(results: Path) -> Card | None:
    """The card whose table the README shows: the newest that is whole enough; or none yet."""
    return find_published(results, PUBLISHED)


def write_axes() -> str:
    return "\n| axis | default | |\n|---|---|---|\n" + "".join(
        f"| `{axis_flag(name)}` | {format_value(getattr(Case, name)) or '–'} "
        f"| {axis.metadata['help']} |\n"
        for name, axis in AXES.items()
    )


def write_statuses() -> str:
    return "\n" + "".join(f"- `{s}`: {s.meaning}\n" for s in Status)


def write_source(card: Card | None) -> str:
    """Say what the table is of."""
    if card is None:
        text = (
            "What `python -m bench.report` says of a sweep, here of real CIFAR-10 on a CPU with "
            f"two cores ([records](results/{CPU_SWEEP}/records.csv)). No GPU sweep is published "
            "here yet: the first person with a card gets its table from the same command, with "
            "the RTX Titan's figures of 2019 beside each case that has one. This one was measured "
            "on a virtual machine that others share, and the report says what that did to it."
        )
    else:
        images = "real CIFAR-10" if card.identity["dataset"] == "cifar10" else "synthetic images"
        folder = f"results/{card.folder.name}"
        text = (
            f"What `make card` measured on {card.identity['gpu']}, with {images}, on "
            f"{card.started_at[:10]} ([records]({folder}/records.csv), [every phase of "
            f"it]({folder}/card.json)), as `python -m bench.report` says it, with the RTX Titan's "
            "figures of 2019 beside each case that has one."
        )
    return "\n" + fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def write_picture(card: Card | None) -> str:
    if card is not None and not (card.folder / FIGURE).is_file():
        return "\n"
    return f"\n![{PICTURE}](results/{card.folder.name if card else CPU_SWEEP}/{FIGURE})\n"


MEASURED = {
    "source": write_source,
    "table": lambda card: report(f"results/{card.folder.name if card else CPU_SWEEP}"),
    "picture": write_picture,
}
"""The parts that follow from the chosen sweep, by their marks."""

PARTS = {
    "axes": write_axes,
    "statuses": write_statuses,
    "2019": lambda: report("results/reference/rtx-titan-2019.csv"),
}
"""The parts that follow from the code and the published records."""


def report(sweep: str) -> str:
    """A sweep's report in Markdown, without its title: the README has headings of its own."""
    command = [sys.executable, "-m", "bench.report", sweep, "--format", "md"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return "\n" + done.stdout.partition("\n")[2].lstrip()


@pytest.mark.parametrize("mark", PARTS)
def test_generated_parts_are_current(mark: str) -> None:
    check_part(mark, PARTS[mark]())


@pytest.mark.parametrize("mark", MEASURED)
def test_measured_parts_are_current(mark: str) -> None:
    """`make card` runs this with UPDATE_README=1."""
    check_part(mark, MEASURED[mark](find_measured(ROOT / "results")))


def check_part(mark: str, part: str) -> None:
    """Hold a part of the README against what it should be, or write it anew."""
    text = README.read_text()
    pattern = re.compile(f"(<!-- {mark} -->)(.*?)(<!-- /{mark} -->)", re.DOTALL)
    found = pattern.search(text)
    assert found, f"the README has no place for {mark}"
    if os.environ.get("UPDATE_README"):
        README.write_text(pattern.sub(lambda m: m[1] + part + m[3], text))
        return
    assert found[2] == part, "run the tests with UPDATE_README=1"


def test_the_parts_of_a_card_name_its_folder(tmp_path: Path) -> None:
    identity = {"gpu": "NVIDIA H200", "dataset": "cifar10"}
    card = Card(tmp_path / "nvidia-h200", False, identity, started_at="2026-11-21T12:00:00")
    assert "NVIDIA H200, with real CIFAR-10, on 2026-11-21" in write_source(card)
    assert "](results/nvidia-h200/records.csv)" in write_source(card)
    assert write_picture(card) == "\n", "no link to a picture that is not there"
    card.folder.mkdir()
    (card.folder / FIGURE).touch()
    assert write_picture(card) == f"\n![{PICTURE}](results/nvidia-h200/{FIGURE})\n"
    assert CPU_SWEEP not in write_source(card) + write_picture(card)
    assert CPU_SWEEP in write_source(None)
    assert CPU_SWEEP in write_picture(None)


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
    # tests/test_card.py rehearses it for real; the doctor may rightly find this machine busy
    "make card": "make -o .venv/ready --dry-run card",
    "python -m bench.doctor": "python -m bench.doctor --from tests/recordings/healthy.json",
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
