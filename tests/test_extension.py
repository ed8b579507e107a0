"""What CONTRIBUTING promises: a new thing is said in one place, and reaches the page from there.

Each is added to a copy of the package, in the place that CONTRIBUTING names and nowhere else.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
RUN_ALL = """
import contextlib, importlib.util, io, json, sys
from tests.fake_executor import known
told = []
for command in sys.argv[1:]:
    name, *words = command.split()
    place = importlib.util.find_spec(name)
    main = ".__main__" if place.submodule_search_locations else ""
    module = importlib.import_module(name + main)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with known():
                code = module.main(words)
        except SystemExit as end:
            code = end.code
    told.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(told))
"""


class Copy:
    """A copy of the package, to be extended, and its commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # with what Python compiled, which is good as long as a file has the time of its source
        shutil.copytree(ROOT / "bench", folder / "bench")

    def insert(self, file: str, before: str, line: str) -> None:
        """Put a line before the first one that starts with ``before``."""
        path = self.folder / "bench" / file
        lines = path.read_text().splitlines(keepends=True)
        at = next(i for i, text in enumerate(lines) if text.startswith(before))
        lines.insert(at, line + "\n")
        path.write_text("".join(lines))

    def replace(self, file: str, old: str, new: str) -> None:
        path = self.folder / "bench" / file
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))

    def run(self, *commands: str, refused: bool = False) -> list[str]:
        """Run commands of the copy, in one process; what each prints, or says where all are to
        refuse."""
        environment = {
            **os.environ,
            "PYTHONPATH": f"{self.folder}:{ROOT}:{TESTS}",
            "COLUMNS": "200",
        }
        where = {"cwd": self.folder, "env": environment}
        command = [sys.executable, "-c", RUN_ALL, *commands]
        done = subprocess.run(command, **where, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        answers = json.loads(done.stdout)
        assert [code for code, _, _ in answers] == [2 * refused] * len(commands), answers
        return [errors if refused else printed for _, printed, errors in answers]

    def records(self, sweep: str) -> list[dict[str, str]]:
        with (self.folder / sweep / "records.csv").open() as file:
            return list(csv.DictReader(file))


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


FAKED = "--executor fake --device cpu --dataset synthetic --out"
FAKE = f"bench.sweep {FAKED} out"


ROUNDING = """
    rounding: str = describe_axis("even", one_of(("odd", "even", "up")), "how halves are rounded",
        affects=(LEARNING, FIT, FLOP, FIRST), order=("odd", "even", "up").index, from_default=True,
        decided_by="precision")"""
DRIFTS = """
    if case.rounding == "up" and case.epochs > 9:
        yield f"--rounding {case.rounding} drifts over {case.epochs} epochs"
"""


def test_an_axis_and_one_of_some_cases(copy: Copy) -> None:
    """What is said where CONTRIBUTING names a place holds everywhere."""
    about = '0.9, parse_number("a momentum", 0), "SGD momentum"'
    momentum = f"    momentum: float = describe_axis({about}, affects=(LEARNING,))"
    copy.insert("schema/case.py", "    device: str", momentum + ROUNDING)
    copy.replace("schema/rules.py", '("loss_scale",), "none', '("loss_scale", "rounding"), "none')
    copy.insert("schema/rules.py", "    if case.workload == COMMAND", DRIFTS)
    row = '    ("rounding", None, "checkpoint", (True,), _UNMEASURED),'
    copy.insert("schema/rules.py", '    ("accumulate", None, "cuda', row)
    axes = "--batch-size 64 --rounding up even odd"
    lacks, beside, drifts, fit = copy.run(
        f"{FAKE} --precision fp32 {axes}",
        f"{FAKE} --precision fp32 fp16 {axes} --checkpoint",
        f"{FAKE} --precision fp32 fp16 {axes} --epochs 10",
        "bench.fit --momentum 0.5",
        refused=True,
    )
    assert "error: --rounding is given, but none of the precisions measured scales a loss" in lacks
    assert "--rounding up with --checkpoint on is not measured; leave out one" in beside
    assert "error: --rounding up drifts over 10 epochs" in drifts
    assert "--momentum: bench.fit does not take it, because it chooses what its runs" in fit
    own = "[[grid]]\nprecision = 'fp16'\nrounding = 'odd'\nmomentum = 0.25\n"
    (copy.folder / "mine.toml").write_text(own)
    some = "--precision fp32 fp16 --rounding even up"
    commands = {
        "help": "bench.sweep --help-all",
        "sweep": f"{FAKE}put --precision fp32 --batch-size 64 --momentum 0.5 0.9",
        "page": "bench.report output --format html",
        "text": f"{FAKE} --precision fp32 fp16 {axes} --fraction 0.1 --repeats 1",
        "full": "bench.report out --full",
        "plan": "bench.sweep --config mine.toml --dry-run",
        "rounding": "bench.compare out --axis rounding even up",
        "precision": "bench.compare out --axis precision fp32 fp16",
        "fit": f"bench.fit {FAKED} fits {some} --memory-limit 1GiB --step 499 --format json",
        "search": f"bench.search {FAKED} found {some} --lr 0.1 --batch-size 64 --loss-scale 128",
        "advise": f"bench.advise {FAKED} advice {some} --batch-size 64 --compile off "
        "--channels-last off",
        "up": f"{FAKE}-up --precision fp32 fp16 --batch-size 64 --rounding up",
        "cards": "bench.cards out out-up output --full",
        "export": "bench.export out-up --to tensorboard",
    }
    outputs = dict(zip(commands, copy.run(*commands.values()), strict=True))
    ran = [(row["precision"], row["rounding"]) for row in copy.records("out")]
    assert sorted({*ran}) == [("fp16", "even"), ("fp16", "odd"), ("fp16", "up"), ("fp32", "even")]
    rows = re.findall(r"^ +(odd|even|up) ", outputs["text"], re.MULTILINE)
    assert {*rows} == {"odd", "even", "up"}
    assert re.findall(r"rounding: (.*?) +≈1.00× +1 +0.0 %$", outputs["full"], re.MULTILINE) == [
        *("even → odd", "even → up")  # with no losses, which matter to it, of a part of an epoch
    ]
    assert "--momentum" in outputs["help"]
    assert [row["momentum"] for row in copy.records("output")] == ["0.5", "0.9"]
    assert re.search(r"^ momentum .*\n ─+\n +0.5 .*\n +0.9 ", outputs["sweep"], re.MULTILINE)
    assert ">momentum</th>" in outputs["page"]
    assert "rounding odd" in outputs["plan"]
    assert "--momentum 0.25" in outputs["plan"]
    for side in (outputs["rounding"], outputs["precision"]):
        assert "in out: 1 case with both values of" in side
        assert re.search(r" is 1\.00 times as fast as .*, with no verdict", side)
    each = [("fp32", "even"), ("fp16", "even"), ("fp16", "up")]
    assert [
        (found["case"]["precision"], found["case"]["rounding"])
        for found in json.loads(outputs["fit"])["searches"]
    ] == each
    trials = re.findall(r"^ +\d +(fp\d+) .* (even|up) .* whole", outputs["search"], re.MULTILINE)
    assert sorted(trials) == sorted(each)
    assert outputs["search"].count(" --rounding up ") == 1
    assert "Stay with fp32, batch size 64, of " in outputs["advise"]
    cards = " ".join(outputs["cards"].split())
    assert {*re.findall(r"fp16 · rounding (\w+)", cards)} == {"up"}  # of out it is the default
    assert "momentum 0.5, not 0.9" in cards
    (exported,) = copy.folder.glob("trackers/tensorboard/*fp16*/*")
    assert b"rounding" in exported.read_bytes()
