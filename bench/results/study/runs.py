"""Records as runs, with what is derived of each as attributes, and what the runs of a case on one
machine come to, beside fp32 with all else equal."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from enum import IntEnum, StrEnum
from functools import cached_property
from operator import attrgetter
from statistics import median
from typing import Any

from bench.base.limits import STEADY, VARIES
from bench.base.origin import EXECUTORS, OF_OTHERS
from bench.machine.host import drop_harmless
from bench.machine.peaks import list_peaks
from bench.profile.rates import COPY, RATES
from bench.results.store.rows import Row, fill_unknown, group
from bench.results.study.comparable import (
    Period,
    find_period,
    find_unfit,
    list_mixed,
    refuse_base,
    refuse_pair,
    restate,
    take_alike,
    tell_but,
    tell_known,
)
from bench.results.study.quantities import (
    MEMORY_MEASURES,
    METRICS,
    QUANTITIES,
    STORED,
    Metric,
    Quantity,
    over,
)
from bench.results.study.sweeps import SweepFolder
from bench.results.study.warnings import LEAST_KNOWN, WARNINGS
from bench.schema.case import AXES, SAME_QUESTION, Case, free_axes
from bench.schema.precision import Arithmetic, find_formats
from bench.schema.record import COMPARABLE, MEASURED, REFUSED, RELIABLE, Status

SOURCE = ("sweep", "machine")


class Run(Row):
    """A record: its cells by name, each of `QUANTITIES` that it has by itself, and `WARNINGS`. An
    unknown number is NaN, unknown text is empty.

    Attributes:
        sweep: the name of its sweep.
        timed: whether it has an epoch time.
        kind: measured, published or unknown.
        machine: the GPU, or the CPU; ``ran_on`` also names the sweep if several sweeps ran on one
            of that name, unless it was the same GPU, with the same versions of everything, and of
            rows of one sweep what they should agree on and do not, such as ``torch 2.13``.
        asked: a number for its case; ``environment`` for rows that agree on `COMPARABLE`, and
            ``cell`` for runs of one case on one machine that agree on both.
        part: the share of an epoch that was measured, equal in all runs of a case: its fraction,
            or less with ``--steps`` or ``--until``. The rest is extrapolated. With ``--steps``
            it is not known (``part_known``), and the fraction, if none measured a step.
        busy_step_s: kernel time of a step on a GPU, in s: from its own profile, or from one of the
            same case and environment that measured another part, which does not affect it.
        memory_measure: the one of `MEMORY_MEASURES` that its memory is read from: the first that
        any run of
            the same machine and kind has.
        memory_varies: whether the memory of its case's repeats differs by more than `VARIES`.
        period: what its time is of, see `bench.results.study.comparable`.
        steps_apart, items_apart: why it is not compared, see `find_unfit`; empty if it can be.
        epoch_images: what its script told of as an epoch, or the images of the data.
        repeats: how many runs its case has.
        faster_than_rates: how many times a rate measured with its own a step computed at, by number
            format; these rates are not known.
    """

    faster_than_rates: Mapping[str, float] = {}
    steps_apart: str = ""
    items_apart: str = ""
    memory_varies: bool = False
    repeats: int = 1
    epoch_time_s: float
    sweep: str
    timed: bool
    kind: str
    machine: str
    ran_on: str
    asked: int
    environment: int
    cell: int
    part: float
    part_known: bool
    epoch_images: float
    busy_step_s: float
    memory_measure: str
    images_per_s: float

    def __init__(self, cells: dict[str, Any]) -> None:
        super().__init__(cells)
        for name in ("epoch_time_s", "train_images", "dataset_classes"):
            if getattr(self, name) <= 0:  # no run has none: a file was edited, see bench.validate
                setattr(self, name, math.nan)
        self.timed = bool(self.epoch_time_s == self.epoch_time_s)
        known = "measured" if self.executor in EXECUTORS else "unknown"
        self.kind = OF_OTHERS.get(self.executor, known)
        self.machine = self.cpu or "CPU" if self.device == "cpu" else self.gpu or "unknown GPU"
        self.epoch_images = self.train_images
        if math.isnan(self.images_per_s):
            self.images_per_s = over(self.train_images, self.epoch_time_s)

    def __getattr__(self, name: str) -> Any:
        """Derive a quantity, a warning or one of `_REACHED`, once."""
        if name in WARNINGS:
            value: Any = WARNINGS[name].find(self)
        elif name in QUANTITIES and (derive := QUANTITIES[name].derive):
            value = derive(self)
        elif name in _REACHED:
            vars(self).update(zip(_REACHED, reach(self), strict=True))
            value = vars(self)[name]
        else:
            return super().__getattr__(name)
        vars(self)[name] = value
        return value

    @cached_property
    def period(self) -> Period:
        return find_period(self)

    @property
    def used_gpus(self) -> int:
        """How many GPUs trained; 1 for a CPU, which all processes share."""
        if self.device == "cpu":
            return 1
        return int(self.gpus if self.gpus > 0 else self.world_size)

    @property
    def gpu_power_limit_w(self) -> float:
        """The power limit of each of its GPUs, which are stored together."""
        return float(self.power_limit_w / self.used_gpus)

    @property
    def tells_no_epoch(self) -> bool:
        """Whether it is a command that tells of no epoch, so that no part of one is measured."""
        return self.command is not None and math.isnan(self.steps_per_epoch)

    @property
    def learnt_whole(self) -> bool:
        """Whether what it learnt is that of a whole epoch; a command may not tell of any."""
        if self.command is None:
            return self.part >= 1
        return bool(not self.tells_no_epoch and self.measured_images >= self.epoch_images)


_REACHED = ("flops", "moved", "of_peaks", "of_bandwidth", "of_measured", "of_copy")
"""What `reach` returns of a run."""


def reach(run: Run) -> tuple[float, ...]:
    """Return how fast a run computed and moved data; NaN for each that is not known.

    - flops: FLOP/s, of an image, forward and backward, times the images/s of each GPU, of a command
      those that it was seen on, or of all processes of a CPU;
    - moved: memory traffic in bytes/s, of a step as if nothing were fused, over the median step, of
      all processes of a CPU;
    - of_peaks, of_bandwidth: these over the card's data sheet; impossible shares above 1 are kept;
    - of_measured: flops over the rate of a large matrix product or convolution, whichever is
      higher, measured on this device. A rate above the data sheet is left out;
    - of_copy: moved over the bytes/s that a large copy reads and writes on this device. Compiled
      code has none: it moves less than is counted, so that its share may exceed 1.

    If several arithmetics were found (``tfloat32/float32``), the first one counts: that of the
    forward pass of the network's most expensive layer. If a share of the FLOP ran in fp8 and the
    rest in bf16, the combined rate is 1 / (share / fp8 + (1 - share) / bf16).
    """
    flops = float(run.flop_per_image * run.images_per_s / run.used_gpus)
    beside = run.world_size if run.device == "cpu" else 1  # which share one memory
    moved = over(run.step_bytes * beside, run.step_time_median_s)
    sheet = list_peaks(run.gpu) if run.device == "cuda" else {}
    measured: dict[str, float] = {}
    for column in RATES:
        rate = getattr(run, column)
        if rate == rate and rate <= sheet.get(column, math.inf):
            name = column.replace("rate_conv_", "rate_")
            measured[name] = max(rate, measured.get(name, 0.0))
    ran, shares = _find_arithmetic(run), []
    for rates in (sheet, measured):
        rate = rates.get(f"rate_{ran}", math.nan)
        if ran == Arithmetic.FLOAT8:
            rest = over(1 - run.fp8_flop_share, rates.get("rate_bfloat16", math.nan))
            rate = over(1, over(run.fp8_flop_share, rate) + rest)
        shares.append(over(flops, rate))
    copy = measured.get(COPY, math.nan) if run.compile == Case.compile else math.nan
    bandwidth = sheet.get(COPY, math.nan)
    return flops, moved, shares[0], over(moved, bandwidth), shares[1], over(moved, copy)


def _find_arithmetic(run: Run) -> str:
    label = find_formats(run.precision, run.opt_level).arithmetic
    return str(run.arithmetic.partition("/")[0] or label)


MOST_SHARE = 2.25
"""Times a measured rate of products that a step may seem to compute at: by Winograd's algorithm of
2 by 2 outputs a convolution of 3 by 3 takes so many times fewer (arXiv 1509.09308, section 4.1)."""


def _refuse_rates(runs: Iterable[Run]) -> None:
    """Take rates that a step was faster than for not known, in all runs that have them: other
    programs ran while they were measured. 0.088 GFLOP/s were stored where 99 are right."""
    for alike in group(runs, lambda r: (r.sweep, r.machine, *(str(getattr(r, n)) for n in RATES))):
        faster: dict[str, float] = {}
        for run in alike:
            if run.status in RELIABLE and (share := reach(run)[4]) > MOST_SHARE:
                ran = _find_arithmetic(run)
                faster[ran] = max(share, faster.get(ran, 0.0))
        for run in alike if faster else ():
            unknown = (f"rate_{conv}{ran}" for ran in faster for conv in ("", "conv_"))
            vars(run).update(dict.fromkeys(unknown, math.nan), faster_than_rates=faster)


def read_runs(sweeps: Sequence[SweepFolder]) -> list[Run]:
    """Read the runs of sweeps, a run a record, with all that is derived of them."""
    runs: list[Run] = []
    for sweep in sweeps:
        cells = [
            {**vars(row), "sweep": sweep.name, "variables": drop_harmless(row.variables)}
            for row in sweep.rows
        ]
        _fill_environment(cells)
        own = [*map(Run, cells)]
        # in several environments, a run that ended before reading its own takes that of its case
        for alike in group(own, attrgetter("axes")) if any(run.torch == "" for run in own) else ():
            for run, environment in zip(alike, fill_unknown(alike), strict=True):
                vars(run).update(zip(COMPARABLE, environment, strict=True))
        runs += own
    # rows of one GPU stand together if they agree on what else belongs to a device
    for run, name in zip(
        runs, name_machines(runs, lambda r: (r.gpu_uuid, _tell_device(r))), strict=True
    ):
        run.ran_on = name
    # what two versions of torch ran, or of a network, stands apart like what two machines ran; a
    # run that ended before it read its own takes that of the next
    for column, values, alike in list_mixed(runs, COMPARABLE, "ran_on", "kind"):
        value = values[-1]
        for run in reversed(alike):
            value = tell_known(run, column) or value
            run.ran_on += f" · {column.replace('_', ' ')} {value}"
    return link_runs(runs)


_tell_device = attrgetter(*(name for name, of in COMPARABLE.items() if "device" in of))


def name_machines(rows: Sequence[Any], tell: Callable[[Any], Hashable]) -> list[str]:
    """Return the name of the machine of each run or result, with that of a sweep where several are
    of one name. ``tell`` tells GPUs apart; a CPU has no number by which it is known again."""
    homes: dict[str, dict[Hashable, str]] = defaultdict(dict)
    keys = [tell(row) if row.gpu_uuid else row.sweep for row in rows]
    where = [
        (row.machine, homes[row.machine].setdefault(key, row.sweep))
        for row, key in zip(rows, keys, strict=True)
    ]
    several = {machine for machine, of in homes.items() if len({*of.values()}) > 1}
    return [f"{name} · {home}" if name in several else name for name, home in where]


def list_runs(rows: Iterable[Row]) -> list[Run]:
    """Return rows as runs, without what only several of them together tell."""
    return [Run({**vars(row)}) for row in rows]


def _fill_environment(rows: Sequence[dict[str, Any]]) -> None:
    """Fill in what runs that ended too early lack of their environment, if unique in the sweep."""
    also = {"gpu_memory_bytes": ("device",), "cpu": ("device",), "train_images": ("dataset",)}
    lost, whole = (
        [row for row in rows if (row["torch"] == "") is lacks] for lacks in (True, False)
    )
    for name, axes in {**COMPARABLE, **also}.items() if lost else ():
        found: dict[tuple[Any, ...], set[Any]] = defaultdict(set)
        for row in whole:
            if row[name] == row[name]:
                found[tuple(row[axis] for axis in axes)].add(row[name])
        for row in lost:
            values = found[tuple(row[axis] for axis in axes)]
            if (row[name] == "" or row[name] != row[name]) and len(values) == 1:
                (row[name],) = values


def link_runs(runs: list[Run]) -> list[Run]:
    """Set what only several runs together tell, and return them."""
    cases, environments, cells = (dict[Hashable, int]() for _ in range(3))
    # a value of a user's own placeholder may be a Python with its torch, as others are a setting
    chosen = [name for name, owners in COMPARABLE.items() if "vary" in owners]
    tell, tell_chosen = attrgetter(*COMPARABLE.keys() - {*chosen}), attrgetter(*chosen)
    versions: dict[Hashable, dict[Hashable, int]] = defaultdict(dict)
    for run in runs:
        run.asked = cases.setdefault(run.axes, len(cases))
        there = versions[run.command, run.vary]
        place = tell(run), there.setdefault(tell_chosen(run), len(there))
        run.environment = environments.setdefault(place, len(environments))
        where = (run.sweep, run.machine, run.kind, run.asked, run.environment)
        run.cell = cells.setdefault(where, len(cells))
    find_unfit(runs)
    _refuse_rates(runs)
    restate(runs)
    for alike in group(runs, lambda run: (run.sweep, run.asked)):
        # a run that failed has no steps: it takes the part of its repeats
        part = min(map(_measure_part, alike))
        counted = any(r.steps is None or r.measured_steps == r.measured_steps for r in alike)
        for run in alike:
            run.part, run.part_known = part, counted
    same = (name for name in AXES if name not in SAME_QUESTION)
    for alike in group(runs, attrgetter("sweep", "environment", *same)):
        own = [run.busy_s if run.device == "cuda" else math.nan for run in alike]
        least = min((busy for busy in own if busy == busy), default=math.nan)
        for run, busy in zip(alike, own, strict=True):
            run.busy_step_s = busy if busy == busy else least
    for alike in group(runs, lambda run: (run.machine, run.kind)):
        known = (
            n for n in MEMORY_MEASURES if any(getattr(run, n) == getattr(run, n) for run in alike)
        )
        measure = next(known, "")
        for run in alike:
            run.memory_measure = measure
    for alike in group(runs, lambda run: run.cell):
        ended = [run for run in alike if run.memory_measure and run.status in RELIABLE]
        _, low, high = find_middle(getattr(run, run.memory_measure) for run in ended)
        for run in alike:
            run.memory_varies = high > (1 + VARIES) * low  # False where an end is not known
            run.repeats = len(alike)
    return runs


def _measure_part(run: Run) -> float:
    if run.command is not None:
        share = over(run.measured_images, run.train_images)
        return 1.0 if math.isnan(share) else min(1.0, share)
    share = over(run.measured_steps, run.steps_per_epoch)
    return min(1.0 if math.isnan(share) else share, float(run.fraction))


# ------------------------------------------------------------------------------------------ results


# a case has the first of these that its repeats have: the one that tells most about its time
_RANKED = (Status.OK, Status.DIVERGED, Status.INVALID, Status.OOM, Status.OOM_SUSPECTED)


_ENDS = {name: q for q in STORED for name in (q.name, f"{q.name}_low", f"{q.name}_high")}


class Trust(IntEnum):
    """How far the time of a case may be believed, the least first.

    - none: it did not end well, or an executor that is not known told it;
    - warned: it has no time, or one that a warning forbids to rely on: it is shown with a mark, and
      may be recommended for its memory or energy alone;
    - trusted: it may be called the fastest, and be recommended.
    """

    NONE = 0
    WARNED = 1
    TRUSTED = 2


class Result:
    """A case on one machine, in one environment.

    Each of `STORED` is the median over the runs that ended with the status of the case. The ends of
    its spread are ``NAME_low`` and ``NAME_high``, which ``spread`` describes, a `Spread`. Each of
    `WARNINGS` is of any of its runs. Other attributes, such as axes, are those of the first of its
    runs that count.

    Attributes:
        every: all its runs, of which there are ``runs``; ``repeats`` count, with ``seeds`` seeds.
        scatter: half the width of the spread of repeats, as a share of the time; NaN for one.
        trust: how far its time may be believed; `refuse_base` says whether others may be compared
            with it.
        base: the case in fp32 that this one is compared with, by ``speedup`` and ``memory_saved``.
    """

    base: Result | None = None
    speedup = math.nan
    memory_saved = math.nan

    def __init__(self, every: Sequence[Run]) -> None:
        statuses = {run.status for run in every}
        best = next(({status} for status in _RANKED if status in statuses), statuses)
        self.counted = take_alike([run for run in every if run.status in best])
        self.every, self.first = every, self.counted[0]
        vars(self).update(zip(AXES, self.first.axes, strict=True))  # which every question asks for
        self.repeats, self.runs = len(self.counted), len(every)
        self.seeds = len({run.run_seed for run in self.counted})
        half = (self.epoch_time_s_high - self.epoch_time_s_low) / 2
        self.scatter = over(half, self.epoch_time_s)
        self.spread = Spread.RANGE.value if self.repeats > 1 else Spread.NONE.value
        low, high = self.first.epoch_time_low_s, self.first.epoch_time_high_s
        # too wide an interval is left out: the warning ``unknown`` reports it
        if self.repeats == 1 and (high - low) / 2 <= LEAST_KNOWN * self.epoch_time_s:
            self.spread = Spread.WITHIN.value
            images = self.images_per_s * self.epoch_time_s
            vars(self).update(epoch_time_s_low=low, epoch_time_s_high=high)
            vars(self).update(
                images_per_s_low=over(images, high), images_per_s_high=over(images, low)
            )
        vars(self).update(noisy=self.noisy or self.scatter > STEADY)
        self.trust = self._judge()

    def _judge(self) -> Trust:
        if self.status != Status.OK or self.kind == "unknown":
            return Trust.NONE
        forbid = (name for name, warning in WARNINGS.items() if warning.forbids(self.repeats))
        warned = any(getattr(self, name) for name in forbid)
        timed = self.epoch_time_s == self.epoch_time_s
        return Trust.TRUSTED if timed and not warned else Trust.WARNED

    def __getattr__(self, name: str) -> Any:
        """Find what its runs come to, once: a quantity and its ends, a warning, or what all
        share."""
        if name in _ENDS:
            self._summarize(_ENDS[name])
        elif name in WARNINGS:  # a run that diverged is reported
            vars(self)[name] = any(getattr(run, name) for run in self.every)
        else:
            vars(self)[name] = getattr(self.first, name)
        return vars(self)[name]

    def _summarize(self, q: Quantity) -> None:
        untold = set() if self.status in MEASURED else {"epoch_time_s", "images_per_s"}
        if self.status not in MEASURED | REFUSED:
            untold.add("memory_bytes")  # what it held until it failed is no peak
        values = [] if q.name in untold else [getattr(run, q.name) for run in self.counted]
        middle, low, high = find_middle(values)
        if q.rate:
            middle = 1 / find_middle(1 / value for value in values if value > 0)[0]
        vars(self).update({q.name: middle, f"{q.name}_low": low, f"{q.name}_high": high})

    @cached_property
    def times(self) -> list[float]:
        """The epoch times of its usable repeats, in s."""
        return [time for _, time in list_readings(METRICS["epoch_time_s"], self.every)]

    @property
    def trusted(self) -> bool:
        return self.trust is Trust.TRUSTED

    @property
    def start_time_s(self) -> float:
        """The seconds of set-up and first steps, with the first steps of the slowest repeat. The
        rest of the warm-up is left out: it goes on until steps are steady, however long that takes.
        Runs without first steps, as published ones, have the whole warm-up instead."""
        runs = [run for run in self.every if run.status in RELIABLE]
        firsts = [(run.first_steps_time_s, run.warmup_time_s, 0.0) for run in runs]
        least = (next(time for time in known if time == time) for known in firsts)
        return find_middle(run.setup_time_s for run in runs)[0] + max(least, default=math.nan)


def make_results(runs: Sequence[Run]) -> list[Result]:
    """Return the results of the runs that count, in the order in which they first ran."""
    place = {id(run): number for number, run in enumerate(runs)}
    results = [*map(Result, group(runs, lambda run: run.cell))]
    results.sort(key=lambda result: place[id(result.first)])
    free = {*free_axes("precision"), *SAME_QUESTION}
    sound = [result for result in results if result.status in RELIABLE]
    tell = tell_but(free)
    for alike in group(sound, lambda result: tell(result.first)):
        # of those that differ only in how they were measured, the one that measured most, profiled
        # or not as the other if there is such a one
        plain = [r for r in alike if r.precision == "fp32"]
        plain.sort(key=lambda r: (refuse_base(r) != "", -r.part))
        for other in (r for r in alike if plain and r.precision != "fp32"):
            base = next((r for r in plain if r.profile == other.profile), plain[0])
            other.base = base
            if not refuse_base(base) and not refuse_pair(base, other):
                other.speedup = over(base.epoch_time_s, other.epoch_time_s)
            other.memory_saved = 1 - over(other.memory_bytes, base.memory_bytes)
    return results


class Spread(StrEnum):
    """The meaning of the two ends beside a median."""

    NONE = "none"
    WITHIN = "within the run"
    RANGE = "range"


def find_middle(values: Iterable[float]) -> tuple[float, float, float]:
    """Return median, lowest and highest of the known values; the ends of a single one are NaN."""
    known = [value for value in values if value == value]
    if len(known) < 2:
        return (known[0] if known else math.nan), math.nan, math.nan
    return median(known), min(known), max(known)


def differ_in_memory(one: Result, other: Result) -> bool:
    """Return whether two cases are known to differ in memory: by more than `STEADY`, and by more
    than repeats of one of them do."""
    low, high = sorted((one, other), key=lambda row: row.memory_bytes)
    ends = [(low.memory_bytes_high, low.memory_bytes), (high.memory_bytes_low, high.memory_bytes)]
    most, least = (end if end == end else value for end, value in ends)
    return bool(high.memory_bytes > (1 + STEADY) * low.memory_bytes and least > most)


def list_readings(metric: Metric, runs: Iterable[Run]) -> list[tuple[int, float]]:
    """Return the seed of each usable run that has a value, and that value; of an accuracy 1 minus
    it."""
    counted = RELIABLE if metric.diverged else {Status.OK}
    usable = take_alike([run for run in runs if run.status in counted])
    values = [(run.run_seed, getattr(run, metric.error_of or metric.name)) for run in usable]
    return [(seed, 1 - v if metric.error_of else float(v)) for seed, v in values if v == v]
