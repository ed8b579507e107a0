"""What figures draw: which cases are on a line, and which runs a curve is of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from bench.case import Case
from bench.record import Record
from bench.report.document import Report, build
from bench.report.html import HELD, list_panels
from bench.study.sweeps import read_sweeps
from tests.planted.records import GIB, ROOT, Row, make_record, measured, write_sweep
from tests.planted.sweeps import Folders, make_card

Run = Callable[..., tuple[int, str, str]]


def make(case: Case, time_s: float = 30, memory: float = GIB, **values: Any) -> Record:
    """A case that an H200 trained."""
    return make_record(case, **{**make_card("NVIDIA H200"), **measured(time_s, memory), **values})


def report_on(folder: Path, rows: Iterable[Row]) -> Report:
    return build(read_sweeps([write_sweep(folder / "s", rows)]))


@pytest.fixture(scope="module")
def foreign(planted: Folders) -> Report:
    """A card on which a case did not fit, one diverged and one was throttled."""
    return build(read_sweeps([planted["foreign"]]))


def test_what_is_invalid_is_not_drawn(foreign: Report) -> None:
    """What diverged is: its time holds."""
    sizes = {case.batch_size for case in list_panels(foreign)[0][1]}
    assert sizes & {129, 130} == {129}


def test_a_line_holds_cases_that_differ_only_in_batch_size(planted: Folders) -> None:
    tuned = build(read_sweeps([planted["tuned"]]))
    ((title, cases),) = list_panels(tuned)
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
    """Though there are fewer of them; but a single batch size is no line."""
    for sizes, parts in (((64, 128), 1), ((64,), 2)):
        cases = [Case(batch_size=size) for size in sizes]
        cases += [Case(batch_size=size, accumulate=2) for size in (64, 128, 256)]
        ((_, held),) = list_panels(report_on(tmp_path / str(parts), map(make, cases)))
        assert {case.accumulate for case in held} == {parts}


def test_files_are_written_and_say_what_they_show(
    planted: Folders, tmp_path: Path, report: Run
) -> None:
    code, _, _ = report(planted["quick"], "--figures", tmp_path / "f", "-o", tmp_path / "r.txt")
    assert code == 0
    text = (tmp_path / "f" / "images-per-s.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert "ynthetic images" in re.sub(r"(<[^>]*>|\s)+", " ", text)
    with Image.open(tmp_path / "f" / "images-per-s.png") as picture:
        assert picture.width > 600
