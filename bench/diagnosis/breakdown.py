"""The time of a step, divided among kinds of work and waits, and what limits each of them.

A profiler slows a step down, so a step's time is always that of steps without it; the profile says
only how it is divided. On a CPU operators and what is between them are stretched alike. On a GPU
kernels take as long as ever, and what a step takes beyond them is idle; it is divided among the
reasons to wait as the profile's own gaps are. Where kernels overlap, each has its share of the time
in which any ran.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from bench.diagnosis.floors import find_bound, find_floor
from bench.diagnosis.step import Bound, Part, Profile, Step, Wait
from bench.record import WorkRow
from bench.work import COMPUTING, Kind

DOMINANT = 2 / 3
"""Share of a step from which one bound is its verdict."""

LISTED = 0.1
"""Share of a step from which a bound is named in a mixed verdict."""

FAR = 2.0
"""Products that take this many times what their memory traffic takes are not limited by it."""

BOUNDS = {
    Wait.INPUT: Bound.LOADER,
    Wait.SYNCHRONISATION: Bound.SYNCHRONISATION,
    Wait.IDLE: Bound.LAUNCH,
}
"""What limits the time in which nothing was computed."""


@dataclass(frozen=True)
class Timed:
    """Operations of a step, with the time that they have in a step that is not profiled.

    Attributes:
        bound: what limits them; None where it is not known.
    """

    row: WorkRow
    time_s: float
    bound: Bound | None


@dataclass(frozen=True)
class Breakdown:
    """A step's time, divided.

    Attributes:
        step_s: a median step, not profiled.
        rows: its operations, those that took longest first.
        parts: kinds of work and waits, those that took longest first.
        left_over_s: what ``parts`` lack of ``step_s``: kernels that no operation launched; below 0
            where kernels alone took longer than the step.
        bounds: share of the step by what limits it, largest first; what is not known is left out.
    """

    step_s: float
    rows: tuple[Timed, ...]
    parts: tuple[Part, ...]
    left_over_s: float
    bounds: Mapping[Bound, float]

    @property
    def bound(self) -> Bound | None:
        """What limits at least `DOMINANT` of the step; None where nothing does."""
        return next((bound for bound, share in self.bounds.items() if share >= DOMINANT), None)

    @property
    def verdict(self) -> str:
        """What limits the step, with figures; empty where that is not known."""
        if (bound := self.bound) is not None:
            return f"{bound}-bound ({100 * self.bounds[bound]:.0f} %)"
        listed = [(f"{b}-bound", share) for b, share in self.bounds.items() if share >= LISTED]
        if not listed:
            return ""
        unknown = 1 - sum(self.bounds.values())
        listed += [("not known", unknown)] if unknown >= LISTED else []
        return f"mixed ({', '.join(f'{100 * share:.0f} % {what}' for what, share in listed)})"

    def find_time(self, name: str) -> float:
        """The time of a part in s; 0 where there is none of it."""
        return sum(part.time_s for part in self.parts if part.name == name)


def divide(step: Step) -> Breakdown | None:
    """Divide a step's time among kinds of work and waits.

    Returns:
        None without a profile.
    """
    profile = step.profile
    if profile is None or profile.step_s <= 0:
        return None
    own = sum(row.time_s or 0.0 for row in step.work)
    stretch = step.step_s / profile.step_s if step.device == "cpu" else 1.0
    busy = profile.busy_s * stretch
    share = stretch * (min(1.0, profile.busy_s / own) if own else 1.0)
    rows = tuple(
        Timed(row, row.time_s * share, _find_bound(row, row.time_s * share, step))
        for row in step.work
        if row.time_s
    )
    waits = _divide_waits(max(step.step_s - busy, 0.0), profile)
    parts = tuple(sorted(_join(step, rows, waits), key=lambda part: -part.time_s))
    bounds = _sum((bound, time) for part in parts for bound, time in part.bounds.items())
    return Breakdown(
        step.step_s,
        tuple(sorted(rows, key=lambda timed: -timed.time_s)),
        parts,
        step.step_s - sum(part.time_s for part in parts),
        {bound: time / step.step_s for bound, time in bounds.items()},
    )


def _divide_waits(idle_s: float, profile: Profile) -> dict[Wait, float]:
    """Divide the time in which nothing was computed as the profile's gaps are."""
    known = profile.input_wait_s + profile.sync_wait_s
    gaps = max(profile.step_s - profile.busy_s, known)
    scale = idle_s / gaps if gaps > 0 else 0.0
    return {
        Wait.INPUT: profile.input_wait_s * scale,
        Wait.SYNCHRONISATION: profile.sync_wait_s * scale,
        Wait.IDLE: idle_s - known * scale,
    }


def _join(step: Step, rows: tuple[Timed, ...], waits: Mapping[Wait, float]) -> Iterator[Part]:
    for kind in Kind:
        timed = [one for one in rows if one.row.kind == kind]
        if not timed:
            continue
        # what was counted but has no time is elsewhere: compilation put it into other kernels
        counted = [one for one in timed if one.row.bytes is not None]
        work = [one.row for one in counted]
        floors = [find_floor(row, step.rates, step.arithmetic) for row in work]
        known = [floor for floor in floors if floor is not None]
        yield Part(
            kind,
            sum(one.time_s for one in timed),
            sum(one.row.calls for one in timed),
            sum(row.flop or 0.0 for row in work),
            sum(row.bytes or 0.0 for row in work),
            sum(known) if known else None,
            _sum((one.bound, one.time_s) for one in timed if one.bound is not None),
            sum(one.time_s for one in counted),
        )
    for wait, time_s in waits.items():
        if time_s > 0:
            yield Part(wait, time_s, bounds={BOUNDS[wait]: time_s})


def _sum(times: Iterable[tuple[Bound, float]]) -> dict[Bound, float]:
    """The time of each bound, largest first."""
    sums: dict[Bound, float] = {}
    for bound, time_s in times:
        sums[bound] = sums.get(bound, 0.0) + time_s
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _find_bound(row: WorkRow, time_s: float, step: Step) -> Bound | None:
    """What limits a row that takes ``time_s`` of the step.

    All that makes a batch is the loader's. Products that take far longer than their memory traffic
    are limited by how they compute, such as without tensor cores. What was not counted, as a kernel
    that compilation made of several operations is not, goes by its time a call and by its kind.
    Of recurrent layers torch does not tell the FLOP, so nothing is known of what limits them.
    """
    if row.kind == Kind.INPUT:
        return Bound.LOADER
    if row.kind == Kind.RECURRENT and not row.flop:
        return None
    if row.bytes is not None:
        bound = find_bound(row, step.rates, step.arithmetic)
        floor = find_floor(row, step.rates, step.arithmetic)
        far = row.kind in COMPUTING and floor is not None and time_s > FAR * floor
        return Bound.COMPUTE if bound is Bound.MEMORY and far else bound
    if step.rates.call_s is None or row.kind == Kind.OTHER:
        return None
    if time_s < row.calls * step.rates.call_s:
        return Bound.LAUNCH
    return Bound.COMPUTE if row.kind in COMPUTING else Bound.MEMORY
