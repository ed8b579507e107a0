"""What is said of planted and committed sweeps, compared whole with what was kept.

UPDATE_SNAPSHOTS=1 writes it anew; read the diff.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len

from bench.advise.__main__ import build_parser as build_advise
from bench.answers.render.documents import render_latex, render_markdown
from bench.answers.render.table import name_outcome
from bench.answers.render.terminal import WIDTH, render
from bench.base.text import capitalize
from bench.compare.__main__ import build_parser as build_compare
from bench.compare.__main__ import main as compare_sweeps
from bench.report.__main__ import build_parser as build_report
from bench.report.document import Report, build
from bench.results.store.rows import Row
from bench.results.study.sweeps import REFERENCE, read_sweeps
from bench.results.study.warnings import WARNINGS
from bench.schema.record import Status
from bench.sweep.options import build_parser as build_sweep
from bench.why import main as explain
from tests.planted.comparisons import COMPARISONS
from tests.planted.records import ROOT, list_committed
from tests.planted.sweeps import Folders
from tests.pytest_for_tests import Capture, Patch

GOLDEN = Path(__file__).with_name("golden")
RESULTS = {folder.name: folder for folder in list_committed("records.csv")}
LAB = REFERENCE.with_name("h200-lab.csv")  # measured, but not by this harness
JARGON = re.compile(r"welch|holm|tost|\bknee|\brung|sentinel", re.IGNORECASE)


def keep(name: str, text: str) -> None:
    """Hold a text against the file that has it."""
    file = GOLDEN / name.replace(" ", "-")
    if os.environ.get("UPDATE_SNAPSHOTS"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    kept = file.read_text(encoding="utf-8") if file.exists() else ""
    assert text == kept, (
        f"{file.name} is another: run the tests with UPDATE_SNAPSHOTS=1, and read the diff"
    )


COMPARED = ("everything", "axis", "conditions", "equivalence", "one side")
"""Planted comparisons of which the text is kept."""


@pytest.mark.parametrize("name", COMPARED)
def test_comparison(name: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    planted = COMPARISONS[name]
    planted.write(tmp_path)
    code = compare_sweeps(planted.command.split())
    out, err = capsys.readouterr()
    rc = f"{err}rc {code}\n" if code else ""
    keep(f"compare/{name}.text", out + rc)


WHY = {
    "batch-size-512": "--where batch_size=512",
    "batch-size-128-fp16": "--where batch_size=128 --axis precision fp32 fp16",
    "fp16-bf16-amp": "--axis precision fp16 bf16-amp --where batch_size=512 --full",
}


@pytest.mark.parametrize("name", WHY)
def test_why(name: str, monkeypatch: Patch, capsys: Capture) -> None:
    """Of the committed profiles of an H100."""
    monkeypatch.chdir(ROOT)
    folder = RESULTS["nvidia-h100-80gb-hbm3-20261122-113040"].relative_to(ROOT)
    assert explain([str(folder), *WHY[name].split()]) == 0
    keep(f"why/{name}.txt", f"$ python -m bench.why {WHY[name]}\n{capsys.readouterr().out}")


# ------------------------------------------------------------------------------- whole reports

REPORTS: dict[str, tuple[tuple[str, ...], str]] = {
    "tuned": (("tuned",), "text screen"),
    "warned": (("warned",), "text"),
    "drifted": (("drifted",), "text screen"),
    "scripts": (("scripts",), "text screen"),
    "quick": (("quick",), "screen md latex"),
    "reference": ((), "text screen"),
    "h200-lab": ((), "screen"),
    "fit": (("fit",), "text screen"),
    "fit-and-scaling": (("fit", "scaling"), "screen"),
    "profiled": (("profiled",), "text screen"),
    "gpus": (("gpus",), "text screen"),
    "powered": (("powered",), "text screen"),
    **dict.fromkeys(RESULTS, ((), "screen")),
}
"""The planted sweeps of each, or none of a committed one, and the formats that are kept of it."""


@pytest.fixture(scope="module")
def reports(planted: Folders) -> Callable[[str], Report]:
    """Of each name its report, made once, in the folder that its commands start from."""
    made: dict[str, Report] = {}

    def make(name: str) -> Report:
        if name not in made:
            committed = {**RESULTS, "reference": REFERENCE, LAB.stem: LAB}
            folders = [planted[part] for part in REPORTS[name][0]] or [committed[name]]
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(ROOT if name in {**RESULTS, LAB.stem: LAB} else folders[0].parent)
                asked = [path.relative_to(Path.cwd()) for path in folders]
                made[name] = build(read_sweeps(asked))
                _ = made[name].next_step  # which names the folder from here
        return made[name]

    return make


FORMATS: dict[str, Callable[[Report], str]] = {
    "text": lambda report: render(report, full=True),
    "screen": render,
    "md": render_markdown,
    "latex": render_latex,
}


@pytest.mark.parametrize("name", REPORTS)
def test_report(name: str, reports: Callable[[str], Report]) -> None:
    for format in REPORTS[name][1].split():
        keep(f"reports/{name}.{format}", FORMATS[format](reports(name)))


@pytest.mark.parametrize("name", REPORTS)
def test_every_screen_fits(name: str, reports: Callable[[str], Report], monkeypatch: Patch) -> None:
    for width in ("40", ""):
        monkeypatch.setenv("COLUMNS", width)
        text = render(reports(name))
        lines = [line for line in text.splitlines() if not line.startswith("  python -m ")]
        assert max(map(cell_len, lines)) <= int(width or WIDTH)
        assert not JARGON.search(text)
        assert "--full" in text


# ------------------------------------------------------------------------------ all of it is shown


def read_kept(pattern: str) -> str:
    """All texts of some names, each in one line."""
    texts = (file.read_text(encoding="utf-8") for file in sorted(GOLDEN.glob(pattern)))
    return "\n".join(" ".join(text.split()) for text in texts)


def test_every_text_is_compared() -> None:
    formats = {f"compare/{name}": "text" for name in COMPARED}
    formats |= {f"reports/{name}": of for name, (_, of) in REPORTS.items()}
    names = {f"{name}.{format}" for name, of in formats.items() for format in of.split()}
    names |= {f"why/{name}.txt" for name in WHY}
    names.add("cards/oddities.md")  # of tests/commands/test_cards.py
    files = {str(path.relative_to(GOLDEN)) for path in GOLDEN.rglob("*.*")}
    assert files == {name.replace(" ", "-") for name in names}
    assert len(files) <= 60


def test_every_warning_and_notice_is_shown() -> None:
    text = " ".join(read_kept("reports/*.text").split())
    labels = [capitalize(warning.remark) for warning in WARNINGS.values() if not warning.telling]
    labels += ["--evaluate failed: ValueError: no luck", "Other steps: repeats took 60, 0 and 0"]
    labels += ["Steps of 64 items: its batch size is 256"]
    labels += ["No result", "Spread", "Mixed environments", "Drift of -14.0 %"]
    labels += ["Rates too low", "Other conditions"]
    missing = [label for label in labels if f"! {label}: " not in text]
    assert missing == [], "plant a row that has it in tests/planted/warnings.py"


def test_every_outcome_is_shown() -> None:
    text = read_kept("reports/warned.text").rpartition(" cases in ")[2]
    ends = [name_outcome(Row({"status": status, "inferred": False})) for status in Status]
    assert [end for end in ends if f" 1 {end}" not in text] == ["ok"]


PARSERS = (build_sweep, build_report, build_compare, build_advise)


def test_every_flag_that_is_named_exists() -> None:
    """In the warnings, and in the step that helps most."""
    text = read_kept("reports/*.text") + read_kept("reports/*.screen")
    text = re.sub("--command '.*?'", "", text)  # the flags of a script of one's own
    known = {flag for build in PARSERS for flag in build()._option_string_actions}
    named = {*re.findall(r"--[a-z][-a-z]+", text)}
    assert named - known == set()
    assert len(named) > 20
