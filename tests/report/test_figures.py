"""What the figure draws: which cases are on a line, and the files it is written to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

from PIL import Image

from bench.case import Case
from bench.report.document import build
from bench.report.html import HELD, list_panels
from bench.study.sweeps import read_sweeps
from tests.planted.records import ROOT, ran
from tests.planted.results import read_report
from tests.planted.sweeps import Folders

Run = Callable[..., tuple[int, str, str]]


def test_what_diverged_is_drawn_and_what_is_invalid_is_not(planted: Folders) -> None:
    ((_, cases),) = list_panels(build(read_sweeps([planted["foreign"]])))
    assert {case.batch_size for case in cases} & {129, 130} == {129}


def test_a_line_holds_cases_that_differ_only_in_batch_size(planted: Folders) -> None:
    ((title, cases),) = list_panels(build(read_sweeps([planted["tuned"]])))
    assert "compile off · channels last off" in title
    for name in (*HELD, "model", "dataset", "device"):
        assert len({getattr(case, name) for case in cases}) == 1, name
    places = [(case.precision, case.batch_size) for case in cases]
    assert len({*places}) == len(places)


def test_the_baseline_is_what_most_cases_have() -> None:
    """The H200's cases mostly have cuDNN's autotuning on, which is not the default."""
    report = build(read_sweeps([ROOT / "results" / "reference" / "h200-lab.csv"]))
    ((title, cases),) = list_panels(report)
    assert "cudnn benchmark on · compile off · channels last off" in title
    speeds = {c.batch_size: round(c.images_per_s, 1) for c in cases if c.precision == "fp16"}
    assert speeds == {128: 2482.0, 512: 4544.0}


def test_the_baseline_is_whole_batches(tmp_path: Path) -> None:
    """Though there are fewer of them."""
    cases = [Case(batch_size=size) for size in (64, 128)]
    cases += [Case(batch_size=size, accumulate=2) for size in (64, 128, 256)]
    rows = [row for case in cases for row in ran(case, (30,))]
    ((_, held),) = list_panels(read_report(tmp_path, rows))
    assert {case.accumulate for case in held} == {1}


def test_files_are_written(planted: Folders, tmp_path: Path, report: Run) -> None:
    code, _, _ = report(planted["quick"], "--figures", tmp_path / "f", "-o", tmp_path / "r.txt")
    assert code == 0
    ElementTree.parse(tmp_path / "f" / "images-per-s.svg")
    with Image.open(tmp_path / "f" / "images-per-s.png") as picture:
        assert picture.width > 600
