"""Probes of batch sizes say nothing of speed."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

from bench.case import Case
from bench.report.document import build
from bench.study.sweeps import read_sweep
from tests.planted.records import GIB, make_record, measured
from tests.planted.results import read_report, tell
from tests.planted.sweeps import (
    PROBES,
    Folders,
)


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
