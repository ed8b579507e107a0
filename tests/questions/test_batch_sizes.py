"""What is said of batch sizes: which are as fast, and the largest that fits."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest

from bench.case import Case
from bench.record import Record
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

MEMORY: dict[str, tuple[list[Record], list[str]]] = {
    "a search without the schedule": (
        list_searched(), ["fp32 | 1184 fits, 1192 does not"],
    ),
    "what made the allocator retry fits": (
        [*list_scaling(), FULL],
        [
            "fp32 | 1184 fits, 2048 does not",
            "fp16 | 2048 fits, 4096 does not",
        ],
    ),
}  # fmt: skip
"""Rows, and what fits in each precision."""


@pytest.mark.parametrize("name", MEMORY)
def test_what_fits(name: str, tmp_path: Path) -> None:
    rows, expected = MEMORY[name]
    columns = "precision model wall"
    assert tell(read_report(tmp_path, rows), "batches", columns) == expected


def test_the_smallest_batch_that_is_as_fast(tmp_path: Path) -> None:
    report = read_report(tmp_path, list_scaling())
    assert tell(report, "batches", "precision enough best") == [
        "fp32 | 128 | 1,010 at 512",
        "fp16 | 2048 | 4,000 at 2048",
    ]


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
