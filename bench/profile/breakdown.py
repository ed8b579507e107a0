"""The time of a step, divided among kinds of work and waits, and what limits each of them; and the
most that one step can gain on another.

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
from functools import cached_property
from operator import itemgetter

from bench.base.limits import STEADY
from bench.base.text import ESTIMATE
from bench.profile.kernels import CONVERSIONS
from bench.profile.step import Bound, StepWork, Wait, find_limit, find_rate
from bench.schema.record import WorkRow, read_kernels
from bench.schema.work import COMPUTING, WorkKind

DOMINANT = 2 / 3  # share of a step from which one bound is its verdict
LISTED = 0.1  # share of a step from which a bound is named in a mixed verdict

OVERLAPPING = (
    {WorkKind.GROUPED},
    {WorkKind.GROUPED, WorkKind.CONVOLUTION, WorkKind.CONVOLUTION_1X1},
    set(WorkKind),
)
"""Sets of kinds whose kernels may overlap; each is used only if those before do not suffice. cuDNN
runs fp32's grouped convolutions on several streams. On an H100 (cuDNN 9.19), the kernels of DPN-92
add up to 518 ms within 437 ms at batch size 512, and to 176 within 117 at 128. In tf32, fp16 and
bf16 none overlap, and normalisation, additions and the rest take as long as under fp32."""


@dataclass(frozen=True)
class TimedWork:
    """Operations, with their time in a step that is not profiled. ``flops`` and ``traffic`` are the
    FLOP/s and bytes/s that they reached; None if not counted, or if beyond the card's data sheet:
    then the data come from a cache, or the time is wrong."""

    row: WorkRow
    time_s: float
    bound: Bound | None  # what limits them; None if not known
    flops: float | None = None
    traffic: float | None = None
    layout_s: float = 0.0  # part of it: kernels that change the layout of factors


@dataclass(frozen=True)
class Breakdown:
    """A step's time, divided; operations and parts are sorted, longest first. What limits them is
    found when it is first asked for. ``left_over_s`` is the step's time less its parts: kernels
    that no operation launched. It is negative if kernels alone took longer than the step."""

    step: StepWork
    times: tuple[tuple[WorkRow, float], ...]  # of its operations, in s
    parts: Mapping[str, float]  # the time of each `bench.schema.work.WorkKind` and `Wait`, in s
    left_over_s: float
    estimated: bool  # kernels overlapped, and how they shared the time was not measured

    @cached_property
    def rows(self) -> tuple[TimedWork, ...]:
        """Its operations, with what limits each."""
        return tuple(_time(row, time_s, self.step) for row, time_s in self.times)

    @cached_property
    def bounds(self) -> dict[Bound, float]:
        """The known shares of the step by what limits it, largest first."""
        limited: list[tuple[Bound, float]] = []
        for timed in self.rows:
            if timed.bound is not None:  # a change of layout only moves bytes
                limited.append((timed.bound, timed.time_s - timed.layout_s))
                limited.append((Bound.MEMORY, timed.layout_s))
        limited += [(bound, self.parts.get(wait, 0.0)) for wait, bound in _WAITS.items()]
        sums: dict[Bound, float] = {}
        for bound, time_s in limited:
            sums[bound] = sums.get(bound, 0.0) + time_s
        largest = sorted(sums.items(), key=itemgetter(1), reverse=True)
        return {bound: time_s / self.step.step_s for bound, time_s in largest if time_s > 0}

    @property
    def bound(self) -> Bound | None:
        """The bound of at least `DOMINANT` of the step; None if there is none."""
        return next((bound for bound, share in self.bounds.items() if share >= DOMINANT), None)

    @property
    def verdict(self) -> str:
        """The bounds of the step as text, with percentages; empty if not known."""
        mark = ESTIMATE if self.estimated else ""
        if (bound := self.bound) is not None:
            return f"{bound}-bound ({mark}{100 * self.bounds[bound]:.0f} %)"
        listed = [(f"{b}-bound", share) for b, share in self.bounds.items() if share >= LISTED]
        if not listed:
            return ""
        unknown = 1 - sum(self.bounds.values())
        listed += [("not known", unknown)] if unknown >= LISTED else []
        shares = (f"{mark}{100 * share:.0f} % {what}" for what, share in listed)
        return f"mixed ({', '.join(shares)})"


_WAITS = {
    Wait.INPUT: Bound.LOADER,
    Wait.SYNCHRONISATION: Bound.SYNCHRONISATION,
    Wait.IDLE: Bound.LAUNCH,
}
"""What limits the time of each wait."""


def divide(step: StepWork) -> Breakdown | None:
    """Divide a step's time among kinds of work and waits; None without a profile."""
    profile = step.profile
    if profile is None or profile.step_s <= 0:
        return None
    stretch = step.step_s / profile.step_s if step.device == "cpu" else 1.0
    busy = profile.busy_s * stretch
    shares = _estimate_shares(step.work, profile.busy_s)
    times = [
        (row, stretch * own * shares.get(row.kind, 1.0))
        for row in step.work
        if (own := row.time_s if row.exclusive_s is None else row.exclusive_s)
    ]
    times.sort(key=itemgetter(1), reverse=True)
    parts: dict[str, float] = {}
    for row, time_s in times:
        parts[row.kind] = parts.get(row.kind, 0.0) + time_s
    # the time beyond the kernels is divided in proportion to the profile's gaps
    idle_s, known = max(step.step_s - busy, 0.0), profile.input_wait_s + profile.sync_wait_s
    gaps = max(profile.step_s - profile.busy_s, known)
    scale = idle_s / gaps if gaps > 0 else 0.0
    parts |= {
        Wait.INPUT: profile.input_wait_s * scale,
        Wait.SYNCHRONISATION: profile.sync_wait_s * scale,
        Wait.IDLE: idle_s - known * scale,
    }
    longest = sorted(parts.items(), key=itemgetter(1), reverse=True)
    parts = {name: time_s for name, time_s in longest if time_s > 0}
    return Breakdown(
        step,
        tuple(times),
        parts,
        step.step_s - sum(parts.values()),
        # on an H100 kernels of one stream overlap by up to 0.035 % of the time of a kind
        any(share < 1 - 5e-4 for share in shares.values()),
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


def _time(row: WorkRow, time_s: float, step: StepWork) -> TimedWork:
    limits = find_rate(row.format, step.peaks, step.arithmetic), step.peaks.copy
    reached = [amount / time_s if amount else None for amount in (row.flop, row.bytes)]
    flops, traffic = (
        None if rate is None or (limit is not None and rate > limit) else rate
        for rate, limit in zip(reached, limits, strict=True)
    )
    layout_s = 0.0
    if row.kind in COMPUTING and row.time_s:  # its kernels in `CONVERSIONS`, as far as named
        named = read_kernels(row.kernels)
        spent = sum(k.time_s for k in named if any(part in k.name for part in CONVERSIONS))
        layout_s = time_s * min(spent / row.time_s, 1.0)
    bound = _find_bound(row, time_s - layout_s, step)
    return TimedWork(row, time_s, bound, flops, traffic, 0.0 if bound is Bound.LAUNCH else layout_s)


def _find_bound(row: WorkRow, time_s: float, step: StepWork) -> Bound | None:
    """Return what limits a row that takes ``time_s`` of the step. Making a batch is limited by the
    loader, and an exchange by the other processes. Products that take far longer than their memory
    traffic and their start are limited by how they compute, such as without tensor cores. Work that
    was not counted, such as a kernel that compilation fused, is judged by its time per call and its
    kind. torch does not report the FLOP of recurrent layers, so their bound is not known."""
    if row.kind == WorkKind.INPUT:
        return Bound.LOADER
    if row.kind == WorkKind.EXCHANGE:
        return Bound.EXCHANGE
    if row.kind == WorkKind.RECURRENT and not row.flop:
        return None
    computes, start_s = row.kind in COMPUTING, step.rates.call_s
    start_s = None if start_s is None else row.calls * start_s
    if row.bytes is not None:
        found = find_limit(row, step.rates, step.arithmetic)
        if found is None:
            return None
        least_s, bound = found
        if start_s is not None and least_s < start_s:
            least_s, bound = start_s, Bound.LAUNCH
        return Bound.COMPUTE if computes and time_s > 2 * least_s else bound
    if start_s is None or row.kind == WorkKind.OTHER:
        return None
    if time_s < start_s:
        return Bound.LAUNCH
    return Bound.COMPUTE if computes else Bound.MEMORY


# ------------------------------------------------------------------------------------------ changes


@dataclass(frozen=True)
class Change:
    """The time of one part in A's step and in B's."""

    name: str  # a `bench.schema.work.WorkKind`, a `Wait`, or `LEFT_OVER`
    before_s: float
    after_s: float

    @property
    def change_s(self) -> float:
        return self.after_s - self.before_s


LEFT_OVER = "left_over"  # the name of the change that no kind of work or wait explains


def list_changes(a: Breakdown, b: Breakdown) -> Iterator[Change]:
    """Yield the kinds of work and waits, those that changed most first, then what is left over."""
    names = dict.fromkeys((*a.parts, *b.parts))
    found = [Change(name, a.parts.get(name, 0.0), b.parts.get(name, 0.0)) for name in names]
    yield from sorted(found, key=lambda change: -abs(change.change_s))
    yield Change(LEFT_OVER, a.left_over_s, b.left_over_s)


def name_part(name: str) -> str:
    """Name a kind of work, a wait or what is left over."""
    if name == LEFT_OVER:
        return "left over"
    return Wait(name).meaning if name in list(Wait) else WorkKind(name).meaning


# ------------------------------------------------------------------------------------------ ceiling
#
# The most that one step can gain on another.
#
# The ratio of two least times is not a bound, as step A takes longer than its least time. So the
# most that B can gain on A is A's measured time over the least time of B's work.


@dataclass(frozen=True)
class Ceiling:
    """The most that B can gain on A, which "at most" always means for a pair. ``least_s`` is the
    time of B's counted work at the machine's measured rates; an operation that a cache made faster
    has its measured time in it."""

    speedup: float  # A's measured time over B's least time
    least_s: float
    memory: float  # the share of memory traffic in that time


def find_ceiling(
    before: StepWork, after: StepWork, compiled: bool, breakdown: Breakdown
) -> Ceiling | None:
    """Return the most that the second step can gain on the first, of which only the time is used.
    None if the second is compiled (it moves less than was counted), or if its work was not counted,
    needs a rate that was not measured, or would take longer than the step: then rates were measured
    too low, for example beside another program. ``breakdown`` is of the second."""
    times = {id(timed.row): timed.time_s for timed in breakdown.rows}
    shares, whole = dict.fromkeys((Bound.COMPUTE, Bound.MEMORY), 0.0), 0.0
    for row in after.work:
        if row.bytes is not None:
            if compiled or (found := find_limit(row, after.rates, after.arithmetic)) is None:
                return None
            floor, limit = found
            whole += floor
            # inputs may still be in a cache, and some algorithms do less than is counted
            shares[limit] += min(floor, times.get(id(row), floor))
    least = sum(shares.values())
    if not least or whole > after.step_s * (1 + STEADY):
        return None
    return Ceiling(before.step_s / min(least, after.step_s), least, shares[Bound.MEMORY] / least)
