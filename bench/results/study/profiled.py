"""Profiled cases of sweeps, each with its step as `bench.profile` takes it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, geometric_mean, median, stdev

from bench.base.limits import STEADY, find_quantile
from bench.machine.peaks import list_peaks
from bench.profile.breakdown import Breakdown, divide
from bench.profile.rates import take_rates
from bench.profile.step import PROFILED, Profile, StepWork
from bench.results.study.runs import Result, Run
from bench.results.study.sweeps import SweepFolder
from bench.schema.precision import Arithmetic, find_formats
from bench.schema.record import RELIABLE, RankRow, WorkRow


@dataclass(frozen=True)
class Straggler:
    """A process that computes ``longer_s`` more of a step than the median of the others, which wait
    for it, most in the exchange ``waits_in``."""

    rank: int
    longer_s: float
    waits_in: str


def find_straggler(repeats: Sequence[Sequence[RankRow]], step_s: float) -> Straggler | None:
    """Return the process that the others wait for, by the profiles of all in each repeat, whose
    step takes ``step_s``.

    On those that wait exchanges take longer, so that only the rest of a step tells which one it is:
    the process whose rest is longest. It has to be longer than that of the next one by more than
    `STEADY` of a step, with 99 % confidence, since any of them may be the longest by chance. A
    repeat is one reading: what else a machine does lasts as long as the profile of one.
    """
    if len({len(rows) for rows in repeats}) != 1:
        return None
    times = [[row.computing_s or 0.0 for row in rows] for rows in repeats]
    means = [fmean(own) for own in zip(*times, strict=True)]
    late, second, *_ = sorted(range(len(means)), key=means.__getitem__, reverse=True)
    longer = [own[late] - own[second] for own in times]
    error = find_quantile(len(longer) - 1, 0.99) * stdev(longer) / math.sqrt(len(longer))
    if fmean(longer) - error <= STEADY * step_s:
        return None
    others = [mean for rank, mean in enumerate(means) if rank != late]
    waits = [row.waits_in for rows in repeats for row in rows if row.rank != late and row.waits_in]
    waits_in = max(waits, key=waits.count, default="")
    return Straggler(late, means[late] - median(others), waits_in)


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
    straggler: Straggler | None = None  # the process that the others wait for, if there is one

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
    ranks = {(sweep.name, record): part for sweep in sweeps for record, part in sweep.ranks.items()}
    steps = {}
    for result in results if work else ():
        stepped = (run for run in result.every if run.status in RELIABLE)
        repeats = [run for run in stepped if run.step_time_median_s > 0]
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
            _find_late(profiled, ranks),
        )
    return steps


def _find_late(
    runs: Sequence[Run], ranks: Mapping[tuple[str, str], Sequence[RankRow]]
) -> Straggler | None:
    """Return the process of a command that the others wait for, its time as without a profiler."""
    processes = (ranks.get((run.sweep, run.record_id), ()) for run in runs)
    known = [rows for rows in processes if rows and all(row.computing_s for row in rows)]
    if len(known) < 2:
        return None
    profiled_s = fmean(run.profiled_step_s for run in runs)
    found = find_straggler(known, profiled_s)
    if found is None or runs[0].case.device != "cpu":
        return found
    step_s = fmean(run.step_time_median_s for run in runs)
    return replace(found, longer_s=found.longer_s * step_s / profiled_s)
