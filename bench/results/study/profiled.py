"""Profiled cases of sweeps, each with its step as `bench.profile` takes it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, geometric_mean

from bench.machine.peaks import list_peaks
from bench.profile.breakdown import Breakdown, divide
from bench.profile.rates import take_rates
from bench.profile.step import PROFILED, Profile, StepWork
from bench.results.study.runs import Result, Run
from bench.results.study.sweeps import SweepFolder
from bench.schema.precision import Arithmetic, find_formats
from bench.schema.record import RELIABLE, WorkRow


@dataclass(frozen=True, eq=False)
class Profiled:
    """A case whose work was counted; its step is made when it is first asked for."""

    run: Run  # the repeat that tells: the one of the median profiled step, as a mean would hold the
    # pauses of all; or the first if none was profiled
    work: Sequence[WorkRow]  # of that run
    profiled: bool  # whether its operations have times
    times: tuple[float, ...]  # of the repeats' median steps, in s
    sm_clock_mhz: float | None  # the mean over the repeats; None if unknown
    alloc_retries: int  # the maximum over the repeats

    @property
    def items(self) -> int:
        """How many items the step is of; 0 if a command does not tell."""
        return int(self.run.number("step_items") or self.run.case.batch_size)

    @cached_property
    def step(self) -> StepWork:
        """The step, which takes the geometric mean of the repeats' median steps."""
        run, case = self.run, self.run.case
        peaks = list_peaks(run.gpu) if case.device == "cuda" else {}
        # products of float32 were rounded as the probe found, else as asked
        asked = find_formats(case.precision, case.opt_level).arithmetic
        is_tf32 = Arithmetic.TFLOAT32 in (asked, *run.arithmetic.split("/"))
        spent = (run.number(name) or 0.0 for name in PROFILED)
        return StepWork(
            geometric_mean(self.times),
            [*self.work],
            take_rates(vars(run), peaks),
            case.device,
            Arithmetic.TFLOAT32 if is_tf32 else Arithmetic.FLOAT32,
            Profile(*spent) if self.profiled else None,
            take_rates(peaks),
        )

    @cached_property
    def breakdown(self) -> Breakdown | None:
        return divide(self.step)


def read_steps(results: Iterable[Result], sweeps: Sequence[SweepFolder]) -> dict[int, Profiled]:
    """Return, by cell, the step of each case whose work was counted."""
    work = {(sweep.name, record): part for sweep in sweeps for record, part in sweep.work.items()}
    steps = {}
    for result in results if work else ():
        stepped = (run for run in result.every if run.status in RELIABLE)
        repeats = [run for run in stepped if not math.isnan(run.step_time_median_s)]
        counted = [run for run in repeats if (run.sweep, run.record_id) in work]
        if not counted:
            continue
        profiled = [
            run
            for run in counted
            if run.profiled_step_s > 0
            and any(row.time_s is not None for row in work[run.sweep, run.record_id])
        ]
        ranked = sorted(profiled, key=lambda run: run.profiled_step_s) or counted[:1]
        run = ranked[(len(ranked) - 1) // 2]
        clocks, retries = (
            [value for run in repeats if (value := run.number(name)) is not None]
            for name in ("sm_clock_mhz", "alloc_retries")
        )
        steps[result.cell] = Profiled(
            run,
            work[run.sweep, run.record_id],
            bool(profiled),
            tuple(float(run.step_time_median_s) for run in repeats),
            fmean(clocks) if clocks else None,
            int(max(retries, default=0)),
        )
    return steps
