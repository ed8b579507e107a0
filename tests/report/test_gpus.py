"""Scaling over GPUs: lines, efficiency, exposed communication, stragglers, precision's tax."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.case import Case
from bench.questions.gpus import Line, list_links
from bench.questions.report_data import gather
from bench.questions.scaling_tax import Tax, find_taxes
from bench.report.document import Report, build
from bench.report.figures.groups import view_report
from bench.report.figures.sketches import SKETCHES
from bench.study.sweeps import read_sweep
from tests.planted.records import write_sweep
from tests.planted.sweeps import Folders, make_gpus_records


@pytest.fixture(scope="module")
def whole(planted: Folders) -> Report:
    return build([read_sweep(planted["gpus"])])


def take_line(made: Report, precision: str, strong: bool) -> Line:
    (line,) = (
        line
        for line in made.lines
        if line.strong is strong and line.points[0].row.precision == precision
    )
    return line


# -------------------------------------------------------------------------------------------- tax


def test_the_interval_of_a_tax_covers_as_often_as_it_says() -> None:
    """95 of 100: four sets of five times whose logarithms are normal, with a true tax of 10 %."""
    import numpy as np

    from bench.questions.scaling_tax import _judge

    draw, covered, rounds = np.random.default_rng(1), 0, 1000
    for _ in range(rounds):
        sets = [
            np.exp(draw.normal(math.log(mean), spread, 5)).tolist()
            for mean, spread in ((8.0, 0.01), (4.0, 0.02), (1.0, 0.01), (0.5 / 0.9, 0.03))
        ]
        share, ends = _judge((sets[0], sets[1]), (sets[2], sets[3]))
        assert ends
        assert ends[0] < share < ends[1]
        covered += ends[0] <= 0.1 <= ends[1]
    assert 0.935 < covered / rounds < 0.97


@given(st.lists(st.sampled_from(["NV18", "NV4", "SYS", "PHB", "level 35"]), max_size=28))
def test_links_are_read_as_they_are_written(kinds: list[str]) -> None:
    text = ", ".join(f"{n}-{n + 1} {kind}" for n, kind in enumerate(kinds))
    assert list_links(text) == sorted(set(kinds))


# ------------------------------------------------------------------------ the rest of the report


def test_names_have_the_global_batch() -> None:
    case = Case(batch_size=64, parallel="ddp", world_size=8)
    axes = ["precision", "batch_size", "parallel", "world_size"]
    assert case.label(axes).endswith("parallel ddp · world size 8 · global batch 512")
    assert "global" not in case.label(["precision", "world_size"])
    assert "global" not in Case(batch_size=64).label(axes)
    assert Case(parallel="dp", world_size=2).label(["parallel"]) == "parallel dp (legacy)"


def test_floating_point_work_is_that_of_each_gpu(tmp_path: Path) -> None:
    made = []
    for gpus in (1, 4):
        for record, *rest in make_gpus_records("fp32", 512, gpus):
            record.measurement.flop_per_image = 1e9
            made.append((record, *rest))
    cases = gather([read_sweep(write_sweep(tmp_path / "sweep", made))]).cases
    one, four = cases["achieved_flops"]
    assert four == pytest.approx(one)


def test_a_straggler_may_be_any_of_the_processes(tmp_path: Path) -> None:
    made = [
        (*rest, [replace(row, rank=rank) for rank, row in enumerate(reversed(ranks))])
        for *rest, ranks in make_gpus_records("fp32", 64, 4, late=0.5)
    ]
    found = read_sweep(write_sweep(tmp_path / "sweep", made)).read_stragglers()
    assert [*found.values()] == pytest.approx([0.5] * len(made), abs=0.01)


def test_figures_show_lines_and_taxes(whole: Report) -> None:
    view = view_report(whole)
    found = {
        sketch.name: list(sketch.take(view)) for sketch in SKETCHES if "scaling" in sketch.name
    }
    assert [title for title, _ in found["gpu-scaling"]] == [
        "weak: batch size 64 on each GPU · ddp",
        "strong: global batch 512 · ddp",
    ]
    for strong, (_, data) in enumerate(found["gpu-scaling"]):
        for precision, part in data.groupby("precision"):
            line = take_line(whole, str(precision), bool(strong))
            wanted = {1: 1.0} | {point.gpus: point.speedup for point in line.points}
            assert dict(zip(part["GPUs"], part["speed-up over one (×)"], strict=True)) == wanted
    for tax, (_, data) in zip(_firsts(find_taxes(whole.lines)), found["scaling-tax"], strict=True):
        part = data[data["precision"] == tax.line.points[0].row.precision]
        assert dict(zip(part["GPUs"], part.iloc[:, 2], strict=True)) == tax.speedups


def _firsts(taxes: list[Tax]) -> list[Tax]:
    """Of weak and of strong scaling, the first tax."""
    return list({tax.line.strong: tax for tax in reversed(taxes)}.values())[::-1]
