"""Scaling over GPUs: lines, efficiency, exposed communication, stragglers, precision's tax."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from bench.questions.report_data import gather
from bench.study.sweeps import read_sweep
from tests.planted.records import write_sweep
from tests.planted.sweeps import make_gpus_records

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


# ------------------------------------------------------------------------ the rest of the report


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
