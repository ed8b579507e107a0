"""The runs of planted sweeps, and what they come to."""

from __future__ import annotations

from bench.study.results import Result, make_results
from bench.study.runs import Run, latest, read_runs
from bench.study.sweeps import Sweep


def read_results(*sweeps: Sweep) -> tuple[list[Run], list[Result]]:
    """All runs of sweeps, and the results of those that count."""
    runs = read_runs(sweeps)
    return runs, make_results(latest(runs))
