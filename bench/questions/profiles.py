"""Profiled cases of sweeps, as `bench.diagnosis` takes them, and explanations of their pairs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from statistics import fmean, geometric_mean
from typing import TYPE_CHECKING

from bench.case import Case, format_value, free_axes, spell_value
from bench.diagnosis.breakdown import Breakdown, divide
from bench.diagnosis.explanation import Explanation, Side, explain
from bench.diagnosis.step import PROFILED, Profile, Step, take_rates
from bench.gpu.peaks import list_peaks
from bench.precision import Arithmetic, find_formats
from bench.record import RELIABLE, WorkRow, read_kernels, write_kernels
from bench.render.table import name_case
from bench.study.axes import MACHINE, Machines, find_varying, name_setting
from bench.study.pairs import find_changes
from bench.study.runs import Result, Run
from bench.verdict import compare

if TYPE_CHECKING:
    from bench.study.sweeps import Sweep

STEP = "step_time_median_s"


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
    def case(self) -> Case:
        return self.run.case

    @cached_property
    def step(self) -> Step:
        """The step, which takes the geometric mean of the repeats' median steps."""
        run, case = self.run, self.case
        peaks = list_peaks(run.gpu) if case.device == "cuda" else {}
        # products of float32 were rounded as the probe found, else as asked
        asked = find_formats(case.precision, case.opt_level).arithmetic
        is_tf32 = Arithmetic.TFLOAT32 in (asked, *run.arithmetic.split("/"))
        spent = (run.number(name) or 0.0 for name in PROFILED)
        return Step(
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


def read_steps(results: Iterable[Result], sweeps: Sequence[Sweep]) -> dict[int, Profiled]:
    """Return, by cell, the step of each case whose work was counted."""
    work = {(sweep.name, record): part for sweep in sweeps for record, part in sweep.work.items()}
    steps = {}
    for result in results if work else ():
        stepped = (run for run in result.every if run.status in RELIABLE)
        repeats = [run for run in stepped if not math.isnan(getattr(run, STEP))]
        step = choose_repeat([(run, work.get((run.sweep, run.record_id), ())) for run in repeats])
        if step:
            steps[result.cell] = step
    return steps


def choose_repeat(repeats: Sequence[tuple[Run, Sequence[WorkRow]]]) -> Profiled | None:
    """Return a case by its runs with a time, each with its work; None if no work was counted."""
    known = [(run, work) for run, work in repeats if work]
    if not known:
        return None
    profiled = [
        (run, work)
        for run, work in known
        if run.profiled_step_s > 0 and any(row.time_s is not None for row in work)
    ]
    ranked = sorted(profiled, key=lambda repeat: repeat[0].profiled_step_s) or known[:1]
    run, work = ranked[(len(ranked) - 1) // 2]
    times = tuple(float(getattr(run, STEP)) for run, _ in repeats)
    clocks, retries = (
        [value for run, _ in repeats if (value := run.number(name)) is not None]
        for name in ("sm_clock_mhz", "alloc_retries")
    )
    clock = fmean(clocks) if clocks else None
    return Profiled(run, work, bool(profiled), times, clock, int(max(retries, default=0)))


def explain_pairs(
    steps: Mapping[int, Profiled],
    results: Sequence[Result],
    machines: Machines,
    axis: str = "precision",
    ends: tuple[str, str] | None = None,
) -> list[Explanation]:
    """Explain each pair of profiled cases of `bench.study.pairs.find_changes` on one machine.
    ``ends`` are the values before and after the change as CSV spells them; None is any."""
    known = {cell for cell, one in steps.items() if one.profiled}
    if not (profiled := [result for result in results if result.cell in known]):
        return []
    common = _name_common(profiled, axis, machines)
    pairs = list(_find_pairs(profiled, axis, ends, machines))
    sides = []
    for a, b in ((steps[one], steps[two]) for one, two in pairs):
        factor = b.case.batch_size / a.case.batch_size
        sides.append((make_side(axis, a, factor), make_side(axis, b)))
    ratios = compare([(b.times, a.times) for a, b in sides])
    return [
        explain(a, b, b.case.batch_size, ratio, common[two])
        for (_, two), (a, b), ratio in zip(pairs, sides, ratios, strict=True)
    ]


def _find_pairs(
    results: Sequence[Result], axis: str, ends: tuple[str, str] | None, machines: Machines
) -> Iterator[tuple[int, int]]:
    """Yield the cells before and after the change."""

    def spell(result: Result) -> str:
        return format_value(getattr(result, axis))

    asked = [result for result in results if ends is None or spell(result) in ends]
    for change in find_changes(axis, asked, machines):
        for pair in change.pairs:
            yield pair.cells if ends is None or spell(pair.a) == ends[0] else pair.cells[::-1]


def make_side(axis: str, one: Profiled, factor: float = 1.0) -> Side:
    """Return a profiled case as a side of a pair, scaled to ``factor`` times its items. Raises
    ValueError: it has no profile."""
    step = scale_step(one.step, factor)
    breakdown = one.breakdown if step is one.step else divide(step)
    if breakdown is None:
        raise ValueError(f"{one.case.label()} has no profile")
    return Side(
        name_setting(axis, spell_value(getattr(one.case, axis))),
        one.case,
        step,
        breakdown,
        find_formats(one.case.precision, one.case.opt_level).arithmetic,
        tuple(time * factor for time in one.times),
        one.sm_clock_mhz,
        one.alloc_retries,
    )


def scale_step(step: Step, factor: float) -> Step:
    """Return a step with ``factor`` times the work, as several steps have."""
    if factor == 1:
        return step

    def scale(row: WorkRow) -> WorkRow:
        amounts = {name: getattr(row, name) for name in ("flop", "bytes", "time_s", "exclusive_s")}
        scaled = {name: value and value * factor for name, value in amounts.items()}
        kernels = [replace(k, time_s=k.time_s * factor) for k in read_kernels(row.kernels)]
        calls = round(row.calls * factor)
        return replace(row, calls=calls, kernels=write_kernels(kernels), **scaled)

    profile = step.profile and Profile(
        *(getattr(step.profile, field.name) * factor for field in fields(Profile))
    )
    work = [scale(row) for row in step.work]
    return replace(step, step_s=step.step_s * factor, work=work, profile=profile)


def _name_common(results: Sequence[Result], axis: str, machines: Machines) -> dict[int, str]:
    free, varying = free_axes(axis), find_varying(results)
    names = [n for n in ("model", *varying, "batch_size") if n not in free]
    if axis != "precision":
        names.insert(1, "precision")

    def name(result: Result) -> str:
        where = [machines[result.sweep, result.machine]] if MACHINE in varying else []
        return " · ".join([name_case(result, dict.fromkeys(names)), *where])

    return {result.cell: name(result) for result in results}
