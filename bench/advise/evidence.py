"""What the rows of runs show beyond their times: what limits a setting, which are doubted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from bench.advise.standing import Result, strip
from bench.case import Case
from bench.diagnosis.sentences import name_part
from bench.questions.profiles import STEP, choose_repeat
from bench.record import RELIABLE
from bench.study.doubts import DOUBTS
from bench.study.runs import list_runs, read_runs
from bench.study.sweeps import Sweep, read_sweep

MOST_PARTS, LEAST_PART = 3, 0.05
"""The most parts of a step to name, and the least share of the step for a part to be named."""

_OF_SHORT_RUNS = ("trend", "unknown", "few")
"""Doubts that runs of a few seconds always have; the answer shows their spread anyway."""


class Evidence:
    """The rows of ``results`` in a folder, without its other runs."""

    def __init__(self, folder: Path, results: Collection[Result]) -> None:
        self._folder, self._ids = folder, {result.record_id for result in results}

    @cached_property
    def _sweep(self) -> Sweep:
        sweep = read_sweep(self._folder)
        return replace(sweep, rows=[row for row in sweep.rows if row.record_id in self._ids])

    def describe_limits(self, setting: Case) -> str:
        """Say what the steps of a setting spend most time on; empty if none was profiled."""
        rows = (row for row in self._sweep.rows if row.profile and row.status in RELIABLE)
        work = self._sweep.work
        for run in list_runs(row for row in rows if row.number(STEP) is not None):
            mine = strip(run.case) == setting
            step = choose_repeat([(run, work.get(run.record_id, ()))]) if mine else None
            if step and (divided := step.breakdown):
                times = {part.name: divided.find_time(part.name) for part in divided.parts}
                shares = {part: time / divided.step_s for part, time in times.items()}
                most = sorted(shares.items(), key=lambda part: -part[1])[:MOST_PARTS]
                named = [
                    f"{name_part(n)} {100 * share:.0f} %" for n, share in most if share > LEAST_PART
                ]
                return f"Why not more: of its step, {', '.join(named)}." if named else ""
        return ""

    def count_doubts(self, results: Collection[Result]) -> dict[str, int]:
        """Count the runs with each doubt that keeps a case from being called the fastest, by the
        remark that reports show beside a row."""
        ids = {result.record_id for result in results}
        runs = [run for run in read_runs([self._sweep]) if run.record_id in ids]
        fatal = [d for d in DOUBTS.values() if d.fatal and d.name not in _OF_SHORT_RUNS]
        found = {doubt.remark: sum(map(doubt.find, runs)) for doubt in fatal}
        return {remark: number for remark, number in found.items() if number}
