"""Scaling over GPUs, and probes of batch sizes, which say nothing of speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.schema.case import Case
from tests.planted.records import GIB, Row, make_record, measured
from tests.planted.results import read_report, tell
from tests.planted.sweeps import make_gpus_records


def test_a_probe_of_the_very_same_case_is_no_run_and_no_drift(tmp_path: Path) -> None:
    case = Case(batch_size=64, device="cpu")
    rows = [make_record(case, repeat=n, **measured(40 + n / 10, GIB)) for n in (1, 2, 3)]
    rows.append(make_record(case, sentinel=True, **measured(40.2, GIB)))
    rows.append(make_record(case, probe=True, attempt=7, **measured(1.0, GIB)))
    report = read_report(tmp_path, rows)
    assert tell(report, "overview", "epoch_time_s") == ["40.20 (40.10–40.30)"]
    assert not report.warnings


run = make_gpus_records
DDP = {"parallel": "ddp"}


def beside(rows: list[Any], others: int = 3) -> list[Any]:
    """The same, beside other lanes."""
    for row, *_ in rows:
        row.lanes_beside = others
    return rows


def slow(rows: list[Any], *factors: float) -> list[Any]:
    """The same, with longer epochs."""
    for (row, *_), factor in zip(rows, factors, strict=True):
        row.measurement.epoch_time_s *= factor
    return rows


def exchange(rows: list[Any], added: Sequence[float], error: float) -> list[Any]:
    """The same, with steps of 0.1 s without exchange, and longer ones with it."""
    for (row, *_), more in zip(rows, added, strict=True):
        row.measurement.sync_step_s, row.measurement.no_sync_step_s = 0.1 + more, 0.1
        row.measurement.exposed_error_s = error
    return rows


SCALED: dict[str, tuple[Sequence[Row], list[str]]] = {
    "without --parallel none, DDP on one": (
        [*run("fp32", 64, 1, **DDP), *run("fp32", 64, 4)],
        ["1", "4 | 4.00 | 100.0 | 99.5 to 100.5"],
    ),
    "one beside others where there is no other": (
        [*beside(run("fp32", 64, 1)), *run("fp32", 64, 2)],
        ["1 | beside other lanes", "2 | 2.00 | 100.0 | 99.5 to 100.5"],
    ),
    "two GPUs above twice one within the noise": (
        [*slow(run("fp16", 512, 1), 0.95, 1.05, 1.15), *run("fp16", 512, 2)],
        ["1 | noisy", "2 | 2.10 | 105.0 | 79.3 to 139.1"],
    ),
    "each learning rate, compression and way by itself": (
        [*run("fp32", 64, 1), *run("fp32", 64, 1, lr=0.1), *run("fp32", 64, 4),
         *run("fp32", 64, 4, grad_compression="fp16")],
        2 * ["1", "4 | 4.00 | 100.0 | 99.5 to 100.5"],
    ),
}  # fmt: skip
"""Rows, and of each point of a line its GPUs, speed-up, efficiency and remarks."""

EXCHANGED: dict[str, tuple[Sequence[Row], list[str]]] = {
    "an error within the runs": (
        [row for name, added, error in (("fp32", 0.004, 0.001), ("bf16-amp", -0.001, 0.004))
         for gpus in (1, 2) for row in exchange(run(name, 64, gpus, 1, **DDP), [added], error)],
        ["1", "2 | 4.00 ± 1.00 | 3.8", "1", "2 | -1.00 ± 4.00 | -1.0"],
    ),
    "a larger one between them": (
        exchange(run("fp32", 64, 2), (0.001, 0.005, 0.009), 0.001), ["2 | 5.00 ± 4.00 | 4.8"],
    ),
}  # fmt: skip
"""Rows, and of each what exchange is exposed, and remarks."""


@pytest.mark.parametrize("name", SCALED)
def test_what_several_are_compared_with(name: str, tmp_path: Path) -> None:
    rows, expected = SCALED[name]
    columns = "world_size gpu_speedup gpu_efficiency gpu_interval remarks"
    assert tell(read_report(tmp_path, rows), "scaling", columns) == expected


@pytest.mark.parametrize("name", EXCHANGED)
def test_what_is_exchanged_beside_the_step(name: str, tmp_path: Path) -> None:
    rows, expected = EXCHANGED[name]
    columns = "world_size exposed_s exposed_share remarks"
    assert tell(read_report(tmp_path, rows), "scaling", columns) == expected


def test_floating_point_work_is_that_of_each_gpu(tmp_path: Path) -> None:
    made = []
    for gpus in (1, 4):
        for record, *rest in run("fp32", 512, gpus):
            record.measurement.flop_per_image = 1e9
            made.append((record, *rest))
    one, four = read_report(tmp_path, made).results
    assert four.achieved_flops == pytest.approx(one.achieved_flops)
