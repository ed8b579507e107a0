"""Warnings about the numbers of a report, most serious first, and the step that helps most.

Each notice says what was found, in how many runs, and which flag or command helps. Drift is judged
by sentinels, reruns of the first case of a sweep at its end, against other runs of the same case.
"""

from __future__ import annotations

import math
import os
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.diagnosis.step import (
    RATES,
    SAME_DEVICE,
    are_other_cpus,
    find_halves,
    find_losses,
    write_losses,
)
from bench.interval import find_quantile
from bench.limits import MIN_REPEATS, STEADY
from bench.questions.batch_sizes import Search
from bench.questions.halving import confirm
from bench.record import COMPARABLE, MEASURED, REPEATED, EpochRow, Status
from bench.render.table import Level, NextStep, Notice
from bench.store.reader import read_beside
from bench.store.rows import group, latest
from bench.study.doubts import DOUBTS, QUIETER, SAID_BELOW
from bench.study.runs import Result, Run
from bench.study.sweeps import Sweep
from bench.text import capitalize, name_first, write_range


def warn(
    every: Sequence[Run],
    results: Sequence[Result],
    everything: Sequence[Run] = (),
    sweeps: Sequence[Sweep] = (),
    across: bool = True,
    spoken: Mapping[bool, Collection[int]] | None = None,
) -> list[Notice]:
    """Return all warnings, most serious first: on ``every`` run and the ``results`` of those that
    count, on drift in ``everything``, all runs of their sweeps (``every`` by default), on what
    ``sweeps`` lack, and if ``across``, on what differs between the sweeps. A first screen has
    the doubts of the cells ``spoken``, by whether these are fatal; all if None."""
    runs = latest(every)
    doubted: dict[bool, list[Notice]] = {True: [], False: []}
    for doubt in DOUBTS.values():
        if hit := [run for run in runs if getattr(run, doubt.name)]:
            told = spoken is None or any(run.cell in spoken[doubt.fatal] for run in hit)
            told |= doubt.name == "unmet"  # it was asked for, of whatever case
            level = Level.TABLE if told and doubt.name not in SAID_BELOW else Level.DETAIL
            said = doubt.warn(hit), doubt.fix, _count(hit, runs)
            doubted[doubt.fatal].append(Notice(capitalize(doubt.remark), *said, level=level))
    drifts = find_drifts(everything or every)
    return [
        *(Notice("Incomplete", *gap) for sweep in sweeps for gap in sweep.gaps),
        *_describe_failures(runs),
        *doubted[True],
        *_describe_spread(results),
        *(_describe_drift(*where, found) for where, found in drifts.items()),
        *_describe_slowdowns(runs),
        *_describe_mixtures(runs, across),
        *doubted[False],
        *_describe_determinism(results),
    ]


def _count(hit: Sequence[Run], runs: Sequence[Run]) -> str:
    if len(hit) == len(runs):
        return f"all {len(runs):,} runs" if len(runs) > 1 else "the only run"
    sweeps, every = ({run.sweep: None for run in some} for some in (hit, runs))
    where = f" ({name_first([*sweeps], 4)})" if len(sweeps) < len(every) else ""
    return f"{len(hit):,} of {len(runs):,} runs{where}"


def _describe_failures(runs: Sequence[Run]) -> Iterator[Notice]:
    if failed := [run for run in runs if run.status not in _ENDED]:
        ends = Counter(run.status.replace("_", " ") for run in failed).most_common()
        asked = " ".join(list_asked(failed))
        mend = f"Run them again with --retry {asked}." if asked else ""
        mend = mend or "The same command runs them again."
        kinds = ", ".join(f"{n:,} {end}" for end, n in ends)
        yield Notice("No result", f"{kinds}.", mend, _count(failed, runs))


_ENDED = {*MEASURED, Status.OOM, Status.UNSUPPORTED}


def list_asked(runs: Iterable[Run | Result]) -> list[str]:
    """Return the outcomes that are run again only by ``--retry``."""
    ends = dict.fromkeys(run.status for run in runs)
    return [status for status in ends if status not in _ENDED | REPEATED]


def _describe_spread(results: Sequence[Result]) -> Iterator[Notice]:
    if wide := sum(result.wide for result in results):
        several = sum(result.repeats > 1 for result in results)
        yield Notice(
            "Spread",
            f"The times of {wide:,} of the {several:,} cases with repeats spread by more than "
            f"±{100 * STEADY:.0f} %; these cases are marked noisy.",
            QUIETER,
        )


def _describe_drift(sweep: str, machine: str, found: Sequence[Drift]) -> Notice:
    order = list(Steadiness)
    worst = min(found, key=lambda drift: (order.index(drift.steadiness), -abs(drift.change)))
    moments = len({drift.started_at for drift in found})
    percent = f"{100 * abs(worst.change):.1f}"
    longer = f"{percent} % {'longer' if worst.change > 0 else 'less'} than"
    several = f" This is the largest change of {moments} such runs." if moments > 1 else ""
    text = (
        f"The first case of {sweep}, run again at the end on {machine} "
        f"({write_moment(worst.started_at)}), took "
        f"{longer if float(percent) else 'as long as'} {worst.against}"
    )
    mend = QUIETER
    if worst.steadiness is Steadiness.STEADY:
        mend = ""
    elif worst.steadiness is Steadiness.DRIFTED:
        text += f", more than the runs' own spread explains (±{100 * worst.margin:.1f} %)"
        mend = "Run the sweep again on an idle machine, into a new --out."
    elif math.isinf(worst.margin):
        text += "; one run does not show how far runs spread"
        mend = "Use --repeats 5."
    else:
        # a margin above 100 % would allow times below zero
        explained = f"up to ±{100 * worst.margin:.1f} %" if worst.margin < 1 else "any change"
        text += f"; the spread of the runs themselves may explain {explained}"
    return Notice(worst.steadiness.value, f"{text}.{several}", mend, good=not mend)


def _describe_slowdowns(runs: Sequence[Run]) -> Iterator[Notice]:
    """Warn of devices that were measured slower at one time than at another, each at its worst."""

    def tell(run: Run, *names: str) -> tuple[str, ...]:
        return tuple(str(getattr(run, name)) for name in names)  # no number is equal to itself

    rated = [run for run in runs if {*tell(run, *RATES)} != {"nan"}]
    for here in group(rated, lambda run: tell(run, *SAME_DEVICE, "lane")):
        times = [vars(first) for first, *_ in group(here, lambda run: tell(run, "sweep", *RATES))]
        pairs = [
            (find_losses(now, before), now, before)
            for now in times
            for before in times
            if not are_other_cpus(find_halves(now), find_halves(before))
        ]
        losses, now, before = max(pairs, key=lambda pair: max(pair[0].values(), default=0.0))
        if losses:
            then, later = (
                f"{row['sweep']} ({write_moment(row['started_at'])})" for row in (before, now)
            )
            other = "" if now["gpu"] else ", or it was another CPU of this name"
            yield Notice(
                "Slower device",
                f"{now['gpu'] or now['cpu']} gave less in {later} than in {then}: "
                f"{write_losses(losses)}. What else used it, its clocks or its power limit is "
                f"between them{other}.",
                "Run the slower one again, into a new --out.",
            )


def _describe_mixtures(runs: Sequence[Run], across: bool) -> Iterator[Notice]:
    label = "Mixed environments"
    mixed = {part[0].sweep: _differ(part) for part in group(runs, lambda run: run.sweep)}
    for sweep, told in mixed.items():
        if told:
            text = (
                f"The rows of {sweep} were measured in different environments, and are compared "
                f"only within one: {'; '.join(told.values())}."
            )
            yield Notice(label, text, "Use a new --out for each.")
    if across and len(mixed) > 1 and not any(mixed.values()):
        # sweeps are expected to differ in their GPUs
        said = [text for name, text in _differ(runs).items() if name != "gpu"]
        text = f"The sweeps differ in {'; '.join(said)}."
        mend = "python -m bench.compare judges two of them case by case."
        yield from [Notice(label, text, mend)] if said else []


def _differ(runs: Sequence[Run]) -> dict[str, str]:
    said = {}
    for name, axes in COMPARABLE.items():
        held: dict[tuple[object, ...], dict[str, None]] = {}
        for run in runs:
            if value := getattr(run, name) or ("none" if name == "variables" and run.torch else ""):
                held.setdefault(tuple(getattr(run, axis) for axis in axes), {})[value] = None
        if several := [values for values in held.values() if len(values) > 1]:
            values = list(dict.fromkeys(chain.from_iterable(several)))
            said[name] = f"{name.replace('_', ' ')} {' or '.join(values[:4])}"
    return said


def _describe_determinism(results: Sequence[Result]) -> Iterator[Notice]:
    own = (result for result in results if result.kind == "measured")
    again = (result for result in own if result.repeats > 1 == result.seeds)
    if not (same := [result for result in again if not math.isnan(result.train_loss)]):
        return
    apart = [result.train_loss_high - result.train_loss_low for result in same]
    equal = apart.count(0)
    text = (
        f"{write_range(result.repeats for result in same)} runs of one seed end with the same loss "
        f"to the last digit in {equal:,} of {len(same):,} cases"
    )
    if equal < len(same):
        most = max(apart, key=lambda one: (one == one, one))
        text += f"; in the others they differ by up to {most:.2g}"
    mend = (
        "To see how much the loss depends on the seed, run into a new --out, without --same-seed."
    )
    yield Notice("Determinism", f"{text}.", mend, good=equal == len(same))


class Steadiness(StrEnum):
    """Verdicts on a machine from a sentinel, most serious first."""

    DRIFTED = "Drift"
    UNKNOWN = "Drift not known"
    STEADY = f"Steady within {100 * STEADY:.0f} %"


@dataclass(frozen=True)
class Drift:
    """One sentinel ``against`` other runs of its case. ``change`` is its time over theirs, minus 1.
    ``margin`` is half its 95 % interval, infinite if too few runs show the spread. Both are
    shares."""

    started_at: str
    against: str
    change: float
    margin: float

    @property
    def steadiness(self) -> Steadiness:
        if abs(self.change) > max(self.margin, STEADY):
            return Steadiness.DRIFTED
        if abs(self.change) + self.margin <= STEADY:
            return Steadiness.STEADY
        return Steadiness.UNKNOWN


def find_drifts(every: Sequence[Run]) -> dict[tuple[str, str], list[Drift]]:
    """Compare each sentinel with all runs of its case and with the previous sentinel.

    The result is by (sweep, machine), in the order of the runs. A resumed sweep has a sentinel at
    the end of each session, and keeps them all.

    Only runs on the same lane and GPU are compared, and only if both or neither ran beside other
    lanes: a slower card, or interference between lanes, is no drift. The spread is pooled over the
    runs of all lanes, each around its own mean; the interval is Student's prediction interval for
    one more reading from the same normal distribution (ISO 16269-8).
    """
    if not any(run.sentinel for run in every):
        return {}
    counting = {*map(id, latest(every))}  # whether timed or not
    timed = [run for run in every if run.status in MEASURED and run.timed]
    runs: dict[Any, dict[Any, list[float]]] = {}  # by case and by conditions
    for run in timed:
        if id(run) in counting:
            runs.setdefault(run.cell, {}).setdefault(_tell_conditions(run), []).append(
                run.epoch_time_s
            )
    drifts: dict[tuple[str, str], list[Drift]] = {}
    earlier: dict[Any, Run] = {}
    for run in (run for run in timed if run.sentinel):
        found: list[Drift] = []
        known, place, time = runs.get(run.cell, {}), _tell_conditions(run), run.epoch_time_s
        spread, freedom = _pool([*known.values()])
        if times := known.get(place):
            many = f"the median of its {len(times)} runs" if len(times) > 1 else "its only run"
            middle = median(times)
            margin = _margin(spread, freedom, 1 + 1 / len(times))
            found.append(Drift(run.started_at, many, time / middle - 1, margin / middle))
        if last := earlier.get((run.cell, place)):
            margin = _margin(spread, freedom, 2) / last.epoch_time_s
            against = f"the one of {write_moment(last.started_at)}"
            found.append(Drift(run.started_at, against, time / last.epoch_time_s - 1, margin))
        earlier[run.cell, place] = run
        if found:
            drifts.setdefault((run.sweep, run.machine), []).extend(found)
    return drifts


def _tell_conditions(run: Run) -> tuple[str, str, bool]:
    return run.lane, run.gpu_uuid, run.lanes_beside > 0


def _pool(runs: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return the pooled standard deviation of runs, in s, and its degrees of freedom."""
    freedom = sum(len(times) - 1 for times in runs)
    means = [fmean(times) for times in runs]
    both = zip(runs, means, strict=True)
    squares = sum((time - mean) ** 2 for times, mean in both for time in times)
    return (math.sqrt(squares / freedom) if freedom else math.inf), freedom


def _margin(spread: float, freedom: int, variances: float) -> float:
    """Return half the 95 % interval, in s, of a change with ``variances`` times the variance."""
    return find_quantile(freedom) * spread * math.sqrt(variances) if freedom else math.inf


def write_moment(moment: str) -> str:
    """Write a UTC time to the minute: ``2026-11-20 17:52 UTC``."""
    return f"{moment[:16].replace('T', ' ')} UTC" if len(moment) > 10 else moment


def choose_next(
    sweeps: Sequence[Sweep], results: Sequence[Result], searches: Sequence[Search] = ()
) -> NextStep | None:
    """Return the step that would help most, by the cases that are shown or, without any, by the
    searches for the largest batch; None if nothing has been recorded or planned."""
    return next(_suggest(sweeps, results, searches), None)


def _suggest(
    sweeps: Sequence[Sweep], results: Sequence[Result], searches: Sequence[Search]
) -> Iterator[NextStep]:
    folders = [name_folder(sweep) for sweep in sweeps]
    if any(search.wall.ending is None for search in searches):
        yield NextStep("run the same command again, which continues the search")
    if any(search.wall.recommended for search in searches):
        yield NextStep(
            "bench.sweep with the same flags and --batch-size auto times training at the batch "
            "sizes that were found"
        )
    for sweep in sweeps:
        mine = [result for result in results if result.sweep == sweep.name]
        gaps = sweep.gaps and not any(plan.shard for plan in sweep.plans)
        if gaps or any(result.status in REPEATED for result in mine):
            yield NextStep("run the same command again, which runs what is missing")
        if asked := list_asked(mine):
            flag = f"--retry {' '.join(asked)}"
            yield NextStep(f"the same command with {flag} runs again what failed")
        if sweep.halving is not None:
            folder = Path(name_folder(sweep))
            best = confirm(sweep.rows, read_beside(sweep.path, EpochRow), sweep.halving, folder)
            yield from (NextStep("run the best trial again, with other seeds", b) for b in best[:1])
    if len(folders) == 2:
        yield NextStep(
            "compare the two case by case", f"python -m bench.compare {shlex.join(folders)}"
        )
    timed = [result for result in results if not math.isnan(result.epoch_time_s)]
    if timed and all(result.kind == "published" for result in timed):
        yield NextStep("measure these cases here", "python -m bench.sweep --preset rtx-titan")
    if any(result.repeats < MIN_REPEATS for result in timed):
        yield NextStep(
            f"the same command with --repeats {MIN_REPEATS} shows which differences are real"
        )
    profiled = {r.precision for r in results if not math.isnan(r.profiled_step_s)}
    if {"fp32"} < profiled:
        yield NextStep("see where the time goes", f"python -m bench.why {shlex.join(folders[:1])}")
    if any(sweep.rows for sweep in sweeps):
        page = f"python -m bench.report {shlex.join(folders)} --format html -o report.html"
        yield NextStep("see all of it as a page with figures", page)


def name_folder(sweep: Sweep) -> str:
    """Return the folder or file of a sweep, relative to the working directory if it lies in it."""
    near = os.path.relpath(sweep.path)
    return str(sweep.path.resolve()) if near.startswith(os.pardir) else near
