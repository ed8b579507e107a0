from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
from made_up import REFERENCE, ROOT
from PIL import Image

from bench.precision import PRECISIONS
from bench.report import figures
from bench.report.model import Report
from bench.report.sweeps import read_sweep, read_sweeps
from bench.report.tables import build

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def cards(fake_cards: list[Path]) -> Report:
    return build(read_sweeps(fake_cards), read_sweep(REFERENCE))


def take(report: Report, name: str) -> pd.DataFrame:
    sketch = next(sketch for sketch in figures.SKETCHES if sketch.name == name)
    return sketch.take(next(iter(figures.group_cases(report))))


def test_every_precision_has_a_colour_and_a_marker() -> None:
    assert set(figures.COLOURS) == set(figures._MARKERS) == set(PRECISIONS)


@pytest.mark.slow
def test_a_new_precision_needs_one_entry(quick: Path) -> None:
    """Registered where the others are, before anything is drawn; then reported with a figure."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from bench.precision import PRECISIONS, Precision\n"
        "for name in ('fp8', 'fp4', 'int8', 'mx6', 'posit'):\n"
        "    PRECISIONS[name] = Precision(name, 'a new one')\n"
        "from bench.report import figures, html\n"
        "from bench.report.sweeps import read_sweeps\n"
        "from bench.report.tables import build\n"
        "sweep, = read_sweeps([Path(sys.argv[1])])\n"
        "sweep.records.loc[sweep.records['precision'] == 'bf16-amp', 'precision'] = 'fp8'\n"
        "report = build([sweep])\n"
        'assert any("fp8" in panel.alt for figure in figures.draw_figures(report)\n'
        "           for panel in figure.panels)\n"
        "assert '--fp8:' in html.render(report)\n"
        "assert len(set(figures.COLOURS.values())) > 6\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(quick)], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_colours_have_contrast_on_both_papers() -> None:
    """4.5 : 1, by WCAG 2's formula."""
    for light, dark in figures._PALETTE:
        assert (luminance("#ffffff") + 0.05) / (luminance(light) + 0.05) >= 4.5
        assert (luminance(dark) + 0.05) / (luminance("#12161b") + 0.05) >= 4.5


@pytest.mark.slow
def test_memory_marks_what_ran_out_at_the_cards_size(cards: Report) -> None:
    groups = list(figures.group_cases(cards))
    data = figures.take_memory(groups[1])
    assert groups[1].title.startswith("NVIDIA RTX 6000 Ada")
    lost = data[data["outcome"] == "out of memory"]
    assert {("fp32", 1024), ("fp32", 2048)} <= set(
        zip(lost["precision"], lost["batch size"], strict=True)
    )
    assert lost["memory (GiB)"].unique() == pytest.approx([51_527_024_640 / 2**30])


def test_the_front_holds_what_nothing_else_beats(cards: Report) -> None:
    data = take(cards, "time-memory")
    for _, row in data.iterrows():
        beaten = (
            (data["epoch time (s)"] <= row["epoch time (s)"])
            & (data["memory (GiB)"] <= row["memory (GiB)"])
            & (
                (data["epoch time (s)"] < row["epoch time (s)"])
                | (data["memory (GiB)"] < row["memory (GiB)"])
            )
        ).any()
        assert (row["front"] == "yes") == (not beaten)


def test_a_curve_is_a_mean_over_images() -> None:
    steps = pd.DataFrame(
        {"images": [100, 300], "loss": [2.0, 1.0], "correct": [10, 150], "time_s": [1.0, 1.0]}
    )
    curve = figures.thin_steps(steps, 800, points=1)
    assert curve.iloc[0].tolist() == [50.0, 1.25, 40.0]


def test_curves_have_the_published_ones_beside(cards: Report) -> None:
    data = take(cards, "loss-curve")
    published = data[data["run"] == "2019"]
    assert set(published["precision"]) == {"fp32", "fp16"}
    assert published[published["precision"] == "fp32"]["loss"].iloc[0] == pytest.approx(2.436)


def test_invalid_cases_are_not_drawn(cards: Report) -> None:
    data = take(cards, "epoch-time")
    assert 130 not in set(data["batch size"])  # invalid
    assert 129 in set(data["batch size"])  # diverged: its time holds


@pytest.mark.slow
def test_files_are_written_and_say_what_they_show(quick: Path, tmp_path: Path, report: Run) -> None:
    code, _, _ = report(quick, "--figures", tmp_path / "f", "-o", tmp_path / "r.txt")
    assert code == 0
    names = {path.stem for path in (tmp_path / "f").iterdir()}
    assert {"epoch-time", "memory", "speed-up", "loss-curve", "step-time"} <= names
    for path in (tmp_path / "f").glob("*.svg"):
        text = path.read_text(encoding="utf-8")
        ElementTree.fromstring(text)
        assert "synthetic images" in re.sub(r"\s+", " ", text)
        with Image.open(path.with_suffix(".png")) as picture:
            assert picture.width > 600


@pytest.mark.slow
def test_inlined_drawings_bring_no_colour_of_their_own(quick: Path) -> None:
    report = build(read_sweeps([quick]))
    for figure in figures.draw_figures(report):
        for panel in figure.panels:
            svg = figures.inline(panel)
            assert not re.search(r"#[0-9a-f]{6}\b(?!\")", re.sub(r'href="#\w+"', "", svg)), (
                figure.name
            )
            assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", svg)
