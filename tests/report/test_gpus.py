"""Scaling over GPUs: lines, efficiency, exposed communication, stragglers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.questions.report_data import gather
from bench.study.sweeps import read_sweep
from tests.planted.records import write_sweep
from tests.planted.sweeps import make_gpus_records


def test_floating_point_work_is_that_of_each_gpu(tmp_path: Path) -> None:
    made = []
    for gpus in (1, 4):
        for record, *rest in make_gpus_records("fp32", 512, gpus):
            record.measurement.flop_per_image = 1e9
            made.append((record, *rest))
    one, four = gather([read_sweep(write_sweep(tmp_path / "sweep", made))]).results
    assert four.achieved_flops == pytest.approx(one.achieved_flops)


def test_a_straggler_may_be_any_of_the_processes(tmp_path: Path) -> None:
    made = [
        (*rest, [replace(row, rank=rank) for rank, row in enumerate(reversed(ranks))])
        for *rest, ranks in make_gpus_records("fp32", 64, 4, late=0.5)
    ]
    found = read_sweep(write_sweep(tmp_path / "sweep", made)).read_stragglers()
    assert [*found.values()] == pytest.approx([0.5] * len(made), abs=0.01)
