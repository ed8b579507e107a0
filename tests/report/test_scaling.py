"""What is said of batch sizes: found exactly where it was planted, and not where nothing is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.case import Case
from bench.limits import NEAR
from bench.questions.batch_sizes import (
    Knee,
    Shape,
    Speed,
    find_cliffs,
    find_knee,
)
from bench.record import Status
from bench.render.model import Table
from bench.report.document import SECTIONS, Report, build
from bench.report.figures import SKETCHES
from bench.report.html import render
from bench.study.sweeps import read_sweeps
from bench.workloads import OWN
from tests.planted.records import GIB, make_record, measured, write_sweep
from tests.planted.sweeps import (
    PROBES,
    Folders,
    make_card,
)

MIB = 2**20


def list_planted(speeds: dict[int, float]) -> list[Speed]:
    return [Speed(size, value, value, value) for size, value in speeds.items()]


def read(*folders: Path) -> Report:
    return build(read_sweeps(folders))


@pytest.fixture(scope="module")
def scaling(planted: Folders) -> Report:
    return read(planted["scaling"])


def tabulate(report: Report, name: str) -> Table:
    (table,) = next(section for section in SECTIONS if section.name == name).tabulate(report)
    return table


def take(report: Report, name: str) -> list[tuple[str, pd.DataFrame]]:
    """The panels of a figure that have data: title, data."""
    sketch = next(sketch for sketch in SKETCHES if sketch.name == name)
    return [(title, data) for title, data in sketch.take(report) if len(data)]


# ------------------------------------------------------------------------------------------ knees


@pytest.mark.parametrize(
    ("speeds", "knee"),
    [
        ({32: 50, 64: 90, 128: 95, 256: 100}, Knee(Shape.KNEE, 128, 256)),
        ({32: 50, 64: 85, 128: 90.5, 256: 100}, Knee(Shape.RISING, 256, 256)),
        ({32: 50, 64: 85, 128: 90.5, 256: 100, 512: 99}, Knee(Shape.KNEE, 256, 256)),
        ({32: 96, 64: 100, 128: 98}, Knee(Shape.BELOW, 32, 64)),
        ({32: 100, 64: 80, 128: 60}, Knee(Shape.BELOW, 32, 32)),
        # close to each other none is a tenth over its neighbour; half of the largest tells
        ({224: 84, 240: 86, 256: 90, 480: 98, 512: 104}, Knee(Shape.RISING, 512, 512)),
        # a dip before the largest does not make images/s rise that were as many before it
        ({32: 50, 64: 98, 128: 60, 256: 100}, Knee(Shape.KNEE, 64, 256)),
        ({32: 50, 64: 100}, None),
    ],
)
def test_knee(speeds: dict[int, float], knee: Knee | None) -> None:
    assert find_knee(list_planted(speeds)) == knee


def test_half_of_the_largest_is_between_batch_sizes_that_ran() -> None:
    """At 256, half way from 128 to 512 in doublings, images/s are interpolated."""
    risen = {128: 80, 512: 100}
    knee = find_knee(list_planted({32: 40, 64: 60, **risen}))
    assert knee == Knee(Shape.RISING, 512, 512)
    # 90.5 at half: within a tenth, so that the largest is not better than half of it
    knee = find_knee(list_planted({32: 40, 64: 60, 224: 90.4, 288: 90.6, 512: 99.5}))
    assert knee == Knee(Shape.KNEE, 288, 512)


@given(st.lists(st.floats(1, 1e6), min_size=3, max_size=12))
def test_nothing_before_a_knee_is_as_fast(values: list[float]) -> None:
    speeds = [Speed(2**place, value, value, value) for place, value in enumerate(values, 3)]
    knee = find_knee(speeds)
    assert knee is not None
    enough = max(values) / (1 + NEAR)
    for speed in speeds:
        if speed.batch_size < knee.batch_size:
            assert speed.images_per_s < enough
        if speed.batch_size == knee.batch_size:
            assert speed.images_per_s >= enough


# ----------------------------------------------------------------------------------------- cliffs


def tell_cliffs(speeds: Sequence[Speed]) -> list[tuple[int, int, float, str]]:
    return [
        (c.before.batch_size, c.after.batch_size, round(c.lost, 3), c.misalignment)
        for c in find_cliffs(speeds)
    ]


def test_cliffs() -> None:
    planted = {32: 50, 64: 100, 65: 89, 72: 80, 128: 120, 192: 108, 200: 97, 256: 97}
    assert tell_cliffs(list_planted(planted)) == [
        (64, 65, 0.11, "65 is no multiple of 8"),
        (65, 72, 0.101, ""),
        (192, 200, 0.102, "200 is no multiple of 64"),
    ]
    assert tell_cliffs(list_planted({64: 100, 128: 80}))[0][3] == ""
    assert not tell_cliffs(list_planted({64: 100, 128: 90, 256: 100}))


def test_a_drop_within_the_spread_is_no_cliff() -> None:
    before, after = Speed(64, 100, 95, 105), Speed(65, 85, 80, 94)
    assert find_cliffs([before, after])
    assert not find_cliffs([before, replace(after, high=95.0)])
    assert not find_cliffs([replace(before, low=94.0), after])


# ----------------------------------------------------------------------------------------- memory


def test_nothing_is_predicted_beyond_what_did_not_fit(tmp_path: Path) -> None:
    """The line ends at 520, but 512 failed."""
    end = GIB + 16 * MIB * 524
    card = {**make_card("NVIDIA RTX 6000 Ada"), "gpu_memory_bytes": end}
    rows = [
        make_record(Case(batch_size=size), **{**card, **measured(50.0, GIB + 16 * MIB * size)})
        for size in (64, 128, 256)
    ]
    lost = make_record(Case(batch_size=512), status=Status.OOM, **card)
    table = tabulate(read(write_sweep(tmp_path / "s", [*rows, lost])), "batches")
    ((*_, measured_cell),) = table.rows
    assert measured_cell.text == "256 fits, 512 does not"


# ----------------------------------------------------------------------------------------- probes


def test_probes_say_nothing_of_speed(scaling: Report, planted: Folders) -> None:
    """Their epoch times are absurd; nothing but the wall and the memory may know them."""
    probed = read(planted["probed"])
    assert len(probed.runs) == len(scaling.runs) + len(PROBES)
    tell = attrgetter("record_id", "epoch_time_s", "repeats", "runs")
    assert [*map(tell, probed.results)] == [*map(tell, scaling.results)]
    assert (probed.outcomes, probed.varying) == (scaling.outcomes, scaling.varying)
    assert probed.warnings == scaling.warnings
    assert [e.time for e in probed.effects] == [e.time for e in scaling.effects]
    for name in ("overview", "effects"):
        assert tabulate(probed, name).rows == tabulate(scaling, name).rows
    ((_, before),), ((_, after),) = take(scaling, "images-per-s"), take(probed, "images-per-s")
    pd.testing.assert_frame_equal(before, after)


# -------------------------------------------------------------------------- units and accumulation


def test_a_page_counts_in_the_unit_everywhere(tmp_path: Path) -> None:
    """Also in what its columns mean, and in the figures that it has no data for."""
    case = Case(batch_size=256, dataset=OWN, model="m:f", workload="m:f")
    rows = [make_record(case, **measured(50.0, GIB), unit="tokens")]
    page = render(read(write_sweep(tmp_path / "s", rows)))
    undrawn, meaning = page.split("Not drawn")[1].split("</p>")[0], page.split('id="meaning"')[1]
    assert "Tokens per second" in undrawn
    assert "<dt>tokens/s" in meaning
    assert "images/s" not in page
    assert "Images per second" not in page
