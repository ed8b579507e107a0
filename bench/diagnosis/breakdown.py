"""The time of a step, divided among kinds of work and waits, and what limits each of them.

A profiler slows a step down, so a step's time is always taken without it; the profile only says how
to divide that time. On a CPU, operators and the gaps between them are scaled alike. On a GPU,
kernels keep their times, and the rest of the step is idle; it is divided among kinds of waits in
proportion to the profile's gaps. Where kernels overlap, each instant is shared equally among those
that ran in it, as the profile measured. An older profile has only their total overlap:
this is subtracted from the kinds that can overlap, and the result is an estimate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from bench.diagnosis.rates import find_bound, find_floor, find_rate
from bench.diagnosis.step import Bound, Part, Step, Wait
from bench.kernels import CONVERSIONS
from bench.record import WorkRow, read_kernels
from bench.text import ESTIMATE
from bench.work import COMPUTING, Kind

DOMINANT = 2 / 3  # share of a step from which one bound is its verdict
LISTED = 0.1  # share of a step from which a bound is named in a mixed verdict

FAR = 2.0
"""Products that take longer than their memory traffic by this factor are not limited by it."""

UNSEEN = 5e-4
"""A time reduced by less than this share is no estimate: it is written to three digits. On an H100
kernels of one stream overlap by 1 to 6 µs a step, up to 0.035 % of the grouped convolutions'
time."""

OVERLAPPING = (
    {Kind.GROUPED},
    {Kind.GROUPED, Kind.CONVOLUTION, Kind.CONVOLUTION_1X1},
    set(Kind),
)
"""Sets of kinds whose kernels may overlap; each is used only if those before do not suffice. cuDNN
runs fp32's grouped convolutions on several streams. On an H100 (cuDNN 9.19), the kernels of DPN-92
add up to 518 ms within 437 ms at batch size 512, and to 176 within 117 at 128. In tf32, fp16 and
bf16 none overlap, and normalisation, additions and the rest take as long as under fp32."""

BOUNDS = {
    Wait.INPUT: Bound.LOADER,
    Wait.SYNCHRONISATION: Bound.SYNCHRONISATION,
    Wait.IDLE: Bound.LAUNCH,
}
"""The bound of each kind of time in which nothing was computed."""


@dataclass(frozen=True)
class Timed:
    """Operations, with their time in a step that is not profiled. ``flops`` and ``traffic`` are the
    FLOP/s and bytes/s that they reached; None if not counted, or if ``beyond`` the card's data
    sheet."""

    row: WorkRow
    time_s: float
    bound: Bound | None  # what limits them; None if not known
    estimated: bool = False  # this time is a share that no profile measured
    flops: float | None = None
    traffic: float | None = None
    beyond: bool = False
    layout_s: float = 0.0  # part of it: kernels that change the layout of factors


@dataclass(frozen=True)
class Breakdown:
    """A step's time, divided; operations and parts are sorted, longest first. ``left_over_s`` is
    the step's time less its parts: kernels that no operation launched. It is negative if kernels
    alone took longer than the step."""

    step_s: float  # a median step, not profiled
    rows: tuple[Timed, ...]  # its operations
    parts: tuple[Part, ...]  # kinds of work and waits
    left_over_s: float
    bounds: Mapping[Bound, float]  # known shares of the step, largest first

    @property
    def bound(self) -> Bound | None:
        """The bound of at least `DOMINANT` of the step; None if there is none."""
        return next((bound for bound, share in self.bounds.items() if share >= DOMINANT), None)

    @property
    def verdict(self) -> str:
        """The bounds of the step as text, with percentages; empty if not known."""
        mark = ESTIMATE if self.estimates else ""
        if (bound := self.bound) is not None:
            return f"{bound}-bound ({mark}{100 * self.bounds[bound]:.0f} %)"
        listed = [(f"{b}-bound", share) for b, share in self.bounds.items() if share >= LISTED]
        if not listed:
            return ""
        unknown = 1 - sum(self.bounds.values())
        listed += [("not known", unknown)] if unknown >= LISTED else []
        shares = (f"{mark}{100 * share:.0f} % {what}" for what, share in listed)
        return f"mixed ({', '.join(shares)})"

    @property
    def estimates(self) -> set[str]:
        return {part.name for part in self.parts if part.estimated}

    def find_time(self, name: str) -> float:
        """Return the time of a part in s; 0 if there is no such part."""
        return sum(part.time_s for part in self.parts if part.name == name)


def divide(step: Step) -> Breakdown | None:
    """Divide a step's time among kinds of work and waits; None without a profile."""
    profile = step.profile
    if profile is None or profile.step_s <= 0:
        return None
    stretch = step.step_s / profile.step_s if step.device == "cpu" else 1.0
    busy = profile.busy_s * stretch
    shares = _estimate_shares(step.work, profile.busy_s)
    rows = tuple(
        _time(row, stretch * own, shares.get(row.kind, 1.0), step)
        for row in step.work
        if (own := row.time_s if row.exclusive_s is None else row.exclusive_s)
    )
    # the time beyond the kernels is divided in proportion to the profile's gaps
    idle_s, known = max(step.step_s - busy, 0.0), profile.input_wait_s + profile.sync_wait_s
    gaps = max(profile.step_s - profile.busy_s, known)
    scale = idle_s / gaps if gaps > 0 else 0.0
    waits = {
        Wait.INPUT: profile.input_wait_s * scale,
        Wait.SYNCHRONISATION: profile.sync_wait_s * scale,
        Wait.IDLE: idle_s - known * scale,
    }
    found = [*_sum_kinds(step, rows)]
    found += [Part(w, s, bounds={BOUNDS[w]: s}) for w, s in waits.items() if s > 0]
    parts = tuple(sorted(found, key=lambda part: -part.time_s))
    bounds = _sum((bound, time) for part in parts for bound, time in part.bounds.items())
    return Breakdown(
        step.step_s,
        tuple(sorted(rows, key=lambda timed: -timed.time_s)),
        parts,
        step.step_s - sum(part.time_s for part in parts),
        {bound: time / step.step_s for bound, time in bounds.items()},
    )


def _estimate_shares(work: Iterable[WorkRow], busy_s: float) -> dict[str, float]:
    """Estimate the exclusive share of each kind's time, for a profile with only the total overlap.
    Some kernel was running for ``busy_s``. Kinds without overlap are left out."""
    times: dict[str, float] = {}
    for row in work:
        if row.time_s and row.exclusive_s is None:
            times[row.kind] = times.get(row.kind, 0.0) + row.time_s
    twice = sum(times.values()) - busy_s
    for kinds in OVERLAPPING:
        whole = sum(time_s for kind, time_s in times.items() if kind in kinds)
        if 0 < twice < whole:
            return {kind: 1 - twice / whole for kind in times if kind in kinds}
    return {}


def _time(row: WorkRow, time_s: float, share: float, step: Step) -> Timed:
    time_s *= share
    limits = find_rate(row.format, step.peaks, step.arithmetic), step.peaks.copy
    reached = [amount / time_s if amount else None for amount in (row.flop, row.bytes)]
    flops, traffic = (
        None if rate is None or (limit is not None and rate > limit) else rate
        for rate, limit in zip(reached, limits, strict=True)
    )
    layout_s = time_s * _find_conversions(row)
    bound = _find_bound(row, time_s - layout_s, step)
    return Timed(
        row,
        time_s,
        bound,
        share < 1 - UNSEEN,
        flops,
        traffic,
        beyond=[flops, traffic] != reached,
        layout_s=0.0 if bound is Bound.LAUNCH else layout_s,
    )


def _find_conversions(row: WorkRow) -> float:
    """Return the share of a product's time in `CONVERSIONS`, as far as its kernels are named."""
    if row.kind not in COMPUTING or not row.time_s:
        return 0.0
    named = read_kernels(row.kernels)
    found = sum(k.time_s for k in named if any(part in k.name for part in CONVERSIONS))
    return min(found / row.time_s, 1.0)


def _sum_kinds(step: Step, rows: tuple[Timed, ...]) -> Iterator[Part]:
    for kind in Kind:
        if not (timed := [one for one in rows if one.row.kind == kind]):
            continue
        # counted work without a time is in other kernels, into which compilation fused it
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
            _sum(pair for one in timed for pair in _list_bounds(one)),
            sum(one.time_s for one in counted),
            any(one.estimated for one in timed),
        )


def _list_bounds(timed: Timed) -> Iterator[tuple[Bound, float]]:
    """Yield what limits an operation, with its time; a change of layout only moves bytes."""
    if timed.bound is not None:
        yield timed.bound, timed.time_s - timed.layout_s
        if timed.layout_s:
            yield Bound.MEMORY, timed.layout_s


def _sum(times: Iterable[tuple[Bound, float]]) -> dict[Bound, float]:
    sums: dict[Bound, float] = {}
    for bound, time_s in times:
        sums[bound] = sums.get(bound, 0.0) + time_s
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _find_bound(row: WorkRow, time_s: float, step: Step) -> Bound | None:
    """Return what limits a row that takes ``time_s`` of the step. Making a batch is limited by the
    loader. Products that take far longer than their memory traffic and their start are limited by
    how they compute, such as without tensor cores. Work that was not counted, such as a kernel that
    compilation fused, is judged by its time per call and its kind. torch does not report the FLOP
    of recurrent layers, so their bound is not known."""
    if row.kind == Kind.INPUT:
        return Bound.LOADER
    if row.kind == Kind.RECURRENT and not row.flop:
        return None
    if row.bytes is not None:
        bound = find_bound(row, step.rates, step.arithmetic)
        floor = find_floor(row, step.rates, step.arithmetic)
        if row.kind not in COMPUTING or floor is None:
            return bound
        least = max(floor, row.calls * (step.rates.call_s or 0.0))
        return Bound.COMPUTE if time_s > FAR * least else bound
    if step.rates.call_s is None or row.kind == Kind.OTHER:
        return None
    if time_s < row.calls * step.rates.call_s:
        return Bound.LAUNCH
    return Bound.COMPUTE if row.kind in COMPUTING else Bound.MEMORY
