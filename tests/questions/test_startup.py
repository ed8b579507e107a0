"""After how many epochs a slower start has paid off, in numbers known by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.case import Case
from bench.record import Record
from tests.planted.records import FP16, FP32, ran
from tests.planted.results import read_report, tell

COMPILED = replace(FP32, compile="default")
OFF, ON, ONCE = (20.1, 20, 19.9), (16.1, 16, 15.9), (1, 1, 1)


def start(case: Case, times: Sequence[float], firsts: Sequence[float]) -> list[Record]:
    """Runs that start in 2 s, and warm up in 2 s and their first steps."""
    rows = ran(case, times, setup_time_s=2.0)
    for row, first in zip(rows, firsts, strict=True):
        row.measurement.first_steps_time_s = first
        row.measurement.warmup_time_s = 2.0 + first
    return rows


def late(rows: list[Record]) -> list[Record]:
    """The same, the last of which took long to start."""
    rows[-1].measurement.setup_time_s = 9.0
    return rows


PAID: dict[str, tuple[list[Record], list[str]]] = {
    "the slowest first steps, of which later repeats find the code in a cache": (
        [*start(FP32, OFF, ONCE), *late(start(COMPILED, ON, (3, 31, 3)))],
        ["compile default | 3.000 | 33.00 | 4.000 | 8 epochs"],
    ),
    "never": (
        [*start(FP16, (20,), (1,)), *start(replace(FP16, compile="default"), (21,), (31,))],
        ["compile default | 3.000 | 33.00 | -1.000 | never"],
    ),
}  # fmt: skip
"""Rows, and of each switch its start without and with it, what it saves, and when it has paid."""


@pytest.mark.parametrize("name", PAID)
def test_when_a_switch_has_paid_off(name: str, tmp_path: Path) -> None:
    rows, expected = PAID[name]
    said = tell(read_report(tmp_path, rows), "start-up", "switch off on saved epochs")
    assert said == expected
