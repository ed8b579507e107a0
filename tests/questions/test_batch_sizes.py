"""What is said of batch sizes: found exactly where it was planted, and not where nothing is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.case import Case
from bench.limits import NEAR
from bench.questions.batch_sizes import Knee, Shape, Speed, find_cliffs, find_knee
from bench.record import Record, Status
from bench.report.document import build
from bench.study.sweeps import read_sweep
from tests.planted.records import GIB, MIB, make_record, measured
from tests.planted.results import read_report, tell
from tests.planted.sweeps import (
    PROBES,
    Folders,
    list_scaling,
    make_card,
    make_probe,
    make_scaled_case,
)

ADA = {**make_card("NVIDIA RTX 6000 Ada"), "gpu_memory_bytes": 24 * GIB}


def line(
    name: str, sizes: Sequence[int], bend: float = 0, axes: Mapping[str, Any] = {}, **values: Any
) -> list[Record]:
    """Batch sizes whose memory is 1 GiB and 16 MiB an image, on 24 GiB; the largest misses."""
    return [
        make_record(
            Case(model=f"m:{name}", batch_size=size, **axes),
            **ADA
            | measured(50.0, (GIB + 16 * MIB * size) * (1 + bend * (size == sizes[-1])))
            | values,
        )
        for size in sizes
    ]


def end(name: str, size: int) -> Record:
    """A batch that does not fit."""
    return make_record(Case(model=f"m:{name}", batch_size=size), **ADA, status=Status.OOM)


def retry(name: str, size: int) -> Record:
    """A batch that fits once the allocator freed its cache."""
    values = {**ADA, **measured(50.0, 20 * GIB), "alloc_retries": 3}
    return make_record(Case(model=f"m:{name}", batch_size=size), **values)


def list_searched() -> list[Record]:
    """Cases with a schedule, beside a search that ran without it."""
    full = {**make_card("NVIDIA RTX 6000 Ada"), "gpu_memory_bytes": 48 * GIB}
    trained = [
        make_record(
            make_scaled_case("fp32", size, schedule="cosine", evaluate=True, epochs=3),
            **{**full, **measured(50.0, 1.5 * GIB + 40 * MIB * size)},
        )
        for size in (32, 64, 128)
    ]
    return [*trained, *PROBES]


FULL = make_probe("fp32", 1184, retries=2)
FULL.measurement.peak_device_bytes = 40 * GIB
TALL = make_scaled_case("fp32", 1128)
UPPER = (64, 128, 256, 1000)

MEMORY: dict[str, tuple[list[Record], list[str]]] = {
    # (24 - 1) GiB / 16 MiB = 1472, of which at most twice the largest that ran is predicted
    "up to where the memory ends": (
        [*line("far", (64, 128, 256)), *line("near", UPPER), *line("two", (64, 128)),
         *line("limited", (64, 128, 400), axes={"memory_limit": "12GiB"})],
        [
            "fp32 | m:far | 1.00 | 16.00 | 0.0 | 512 or more",
            "fp32 | m:near | 1.00 | 16.00 | 0.0 | 1472",
            "fp32 | m:limited | 1.00 | 16.00 | 0.0 | 704",
        ],
    ),
    "a line that bends": (
        [*line("bent", (64, 128, 256, 512), bend=0.3), *line("judged", UPPER, bend=0.06)],
        ["fp32 | m:bent | 0.18 | 22.39 | 23.1", "fp32 | m:judged | 0.84 | 17.16 | 5.7"],
    ),
    "what was measured overrules the line, where it is not near": (
        [*(row for name in ("at1200", "at1440", "at1600", "at1480")
           for row in line(name, (64, 256, 1024))),
         end("at1200", 1200), end("at1440", 1440), retry("at1600", 1600), retry("at1480", 1480)],
        [
            "fp32 | m:at1200 | 1.00 | 16.00 | 0.0 | does not hold | 1024 fits, 1200 does not",
            "fp32 | m:at1440 | 1.00 | 16.00 | 0.0 | 1472 | 1024 fits, 1440 does not",
            "fp32 | m:at1600 | 1.00 | 16.00 | 0.0 | does not hold",
            "fp32 | m:at1480 | 1.00 | 16.00 | 0.0 | 1472",
        ],
    ),
    "what others left": (
        [*line("alone", UPPER), *line("shared", UPPER, baseline_device_bytes=3 * GIB)],
        [
            "fp32 | m:alone | 1.00 | 16.00 | 0.0 | 1472",
            "fp32 | m:shared | 1.00 | 16.00 | 0.0 | 1280",
        ],
    ),
    "by the allocator, which does not hold the context": (
        line("context", UPPER, peak_device_bytes=None, context_bytes=GIB),
        ["fp32 | 0.95 | 15.20 | 0.0 | 1480"],
    ),
    "a search without the schedule": (
        list_searched(), ["fp32 | 1.50 | 40.00 | 0.0 | 1184 fits, 1192 does not"],
    ),
    "what made the allocator retry is not on the line": (
        [*list_scaling(), FULL],
        [
            "fp32 | 1.50 | 40.00 | 0.0 | 1184 | 1184 fits, 2048 does not",
            "fp16 | 1.25 | 22.00 | 0.0 | 2176 | 2048 fits, 4096 does not",
        ],
    ),
}  # fmt: skip
"""Rows, and of each line its name, fixed and per item, miss, what is predicted and measured."""


@pytest.mark.parametrize("name", MEMORY)
def test_memory_is_predicted_as_far_as_it_is_known(name: str, tmp_path: Path) -> None:
    rows, expected = MEMORY[name]
    columns = "precision model fixed image miss largest wall"
    assert tell(read_report(tmp_path, rows), "batches", columns) == expected


def test_a_case_that_retried_lowers_what_is_recommended(tmp_path: Path) -> None:
    tall = make_record(TALL, **measured(40.0, 40 * GIB, alloc_retries=2))
    report = read_report(tmp_path, [*list_scaling(), *PROBES, tall])
    assert tell(report, "walls", "largest refused thrashes recommended") == [
        "1184 | 1192 | 1128 | 1120"
    ]


# ------------------------------------------------------------------------------- knees and cliffs


def list_planted(speeds: dict[int, float]) -> list[Speed]:
    return [Speed(size, value, value, value) for size, value in speeds.items()]


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


# ----------------------------------------------------------------------------------------- probes


def test_probes_say_nothing_of_speed(planted: Folders) -> None:
    """Their epoch times are absurd; nothing but the wall and the memory may know them."""
    scaling, probed = (build([read_sweep(planted[name])]) for name in ("scaling", "probed"))
    assert len(probed.runs) == len(scaling.runs) + len(PROBES)
    seen = attrgetter("record_id", "epoch_time_s", "repeats", "runs")
    assert [*map(seen, probed.results)] == [*map(seen, scaling.results)]
    assert (probed.outcomes, probed.varying) == (scaling.outcomes, scaling.varying)
    assert probed.warnings == scaling.warnings
    assert [e.time for e in probed.effects] == [e.time for e in scaling.effects]


def test_a_probe_of_the_very_same_case_is_no_run_and_no_drift(tmp_path: Path) -> None:
    case = Case(batch_size=64, device="cpu")
    rows = [make_record(case, repeat=n, **measured(40 + n / 10, GIB)) for n in (1, 2, 3)]
    rows.append(make_record(case, sentinel=True, **measured(40.2, GIB)))
    rows.append(make_record(case, probe=True, attempt=7, **measured(1.0, GIB)))
    report = read_report(tmp_path, rows)
    assert tell(report, "overview", "epoch_time_s") == ["40.20 (40.10–40.30)"]
    assert not report.warnings
