"""Every derived quantity, once: functions of records, and how each is written.

A frame of records goes through three steps::

    read()       rows of several sweeps, each with its machine, quantities and doubts
    latest()     the attempt that counts of each run; sentinels left out
    summarize()  one row a case: medians over repeats, then what needs a partner (speed-up, …)

Everything is vectorised: 100,000 records take about a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

from bench.attempts import keep_latest, number_groups
from bench.case import AXES
from bench.conditions import BUSY_CORES, STEADY
from bench.gpu import EFFECTS
from bench.peaks import peak_flops
from bench.precision import PRECISIONS, Arithmetic
from bench.record import COLUMNS, COMPARABLE, MEASURED, Status
from bench.report.spread import CONFIDENCE, ENOUGH, Spread, choose_depth, find_coverage, find_ends

if TYPE_CHECKING:
    import pandas as pd

    from bench.report.sweeps import Sweep

GIB = 2**30

# ------------------------------------------------------------------------------------- quantities


@dataclass(frozen=True)
class Quantity:
    """A number of a case: how it is derived, named and written.

    ``derive`` takes a frame of records and returns one number a row, in SI units, NaN for none; it
    is None where the number needs another case too (see `summarize`). People read it over
    ``scale``, in ``unit``, to so many ``decimals`` or to four digits. ``whole`` numbers speak of a
    whole epoch, and are estimates where only a fraction of one was measured. A ``rate`` is over a
    time or an energy; its median over repeats is that of its inverse, so that it agrees with the
    time in the same row, also for an even number of repeats. ``spread`` is whether tables show how
    far repeats lie apart; files hold it for all.
    """

    name: str
    label: str
    unit: str
    help: str
    better: str  # lower or higher
    derive: Callable[[pd.DataFrame], pd.Series] | None
    scale: float = 1
    decimals: int | None = None
    whole: bool = False
    rate: bool = False
    spread: bool = True

    def write(self, value: float) -> str:
        """Write a value without its unit."""
        shown = value / self.scale
        return write_number(shown) if self.decimals is None else f"{shown:.{self.decimals}f}"

    def write_ends(self, low: float, high: float, value: float) -> str:
        """Write the ends of a spread to as many decimals as the value; nothing if all look alike.

        >>> QUANTITIES["epoch_time_s"].write_ends(76.56, 90.351, 88.8)
        '76.56–90.35'
        """
        decimals = len(self.write(value).partition(".")[2])
        ends = [f"{end / self.scale:,.{decimals}f}" for end in (low, high)]
        alike = ends[0] == ends[1] == f"{value / self.scale:,.{decimals}f}"
        return "" if alike else "–".join(ends)

    def add_unit(self, text: str) -> str:
        """Put the unit behind an already written number."""
        return f"{text}{self.unit}" if self.unit == "×" else f"{text} {self.unit}".rstrip()


def write_number(value: float) -> str:
    """Four significant digits, thousands grouped, never an exponent below a billion.

    >>> write_number(12345.6), write_number(33.1449), write_number(0.01234567)
    ('12,346', '33.14', '0.01235')
    """
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3e}"
    digits = 3 - math.floor(math.log10(abs(value))) if value else 1
    return f"{value:.{min(digits, 6)}f}"


def _column(name: str) -> Callable[[pd.DataFrame], pd.Series]:
    return lambda records: records[name].astype(float)


def throughput(records: pd.DataFrame) -> pd.Series:
    """Images of an epoch over its time."""
    return records["images_per_s"].fillna(records["train_images"] / records["epoch_time_s"])


def energy_per_epoch(records: pd.DataFrame) -> pd.Series:
    """Energy of the measured images, scaled to an epoch's."""
    return records["energy_j"] * records["train_images"] / _positive(records["measured_images"])


def images_per_joule(records: pd.DataFrame) -> pd.Series:
    """Measured images over their energy."""
    return records["measured_images"] / _positive(records["energy_j"])


def fragmentation(records: pd.DataFrame) -> pd.Series:
    """Share of the allocator's peak that no tensor used at theirs: 1 - allocated / reserved."""
    return 1 - records["peak_allocated_bytes"] / _positive(records["peak_reserved_bytes"])


def achieved_flops(records: pd.DataFrame) -> pd.Series:
    """FLOP an image takes forward and backward, times images/s."""
    return records["flop_per_image"] * throughput(records)


def peak_share(records: pd.DataFrame) -> pd.Series:
    """Achieved FLOP/s over the card's peak in the arithmetic that ran.

    Where several were found (``tfloat32/float32``), in the first: that of the forward pass of the
    network's most expensive layer.
    """
    import pandas as pd

    ran = records["arithmetic"].where(
        records["arithmetic"] != "",
        records["precision"].map({name: p.arithmetic for name, p in PRECISIONS.items()}),
    )
    ran = ran.astype(str).map(lambda names: names.partition("/")[0])
    pairs = list(zip(records["gpu"], ran, strict=True))
    peaks = {pair: peak_flops(*pair) if pair[0] else None for pair in set(pairs)}
    peak = pd.Series([peaks[pair] or math.nan for pair in pairs], records.index, dtype=float)
    return achieved_flops(records) / peak


def step_noise(records: pd.DataFrame) -> pd.Series:
    """Median absolute deviation of step times over their median."""
    return records["step_time_mad_s"] / _positive(records["step_time_median_s"])


def _positive(values: pd.Series) -> pd.Series:
    return values.where(values > 0)


MEMORY: dict[str, str] = {
    "peak_device_bytes": "the device over its baseline (NVML)",
    "peak_process_bytes": "the process (NVML, or its resident set on a CPU)",
    "peak_reserved_bytes": "torch's allocator",
    "peak_allocated_bytes": "tensors",
}
"""What ``memory_bytes`` may be, best first: a machine's rows all take the first it has."""

RSS = "resident set of the process, on a CPU"


def choose_memory(records: pd.DataFrame) -> pd.Series:
    """The column of `MEMORY` each row's memory is read from: the first its machine has filled."""
    import pandas as pd

    chosen = pd.Series("", index=records.index)
    for name in MEMORY:
        filled = records[name].notna().groupby(records["machine"]).transform("any")
        chosen = chosen.mask((chosen == "") & filled, name)
    return chosen


def memory(records: pd.DataFrame) -> pd.Series:
    """Peak memory of the epoch, by the measure of `choose_memory`."""
    import pandas as pd

    bytes = pd.Series(math.nan, index=records.index)
    for name in MEMORY:
        bytes = bytes.mask(records["memory_measure"] == name, records[name].astype(float))
    return bytes


QUANTITIES: dict[str, Quantity] = {
    q.name: q
    for q in (
        Quantity(
            "epoch_time_s",
            "epoch time",
            "s",
            "one training epoch",
            "lower",
            _column("epoch_time_s"),
            whole=True,
        ),
        Quantity(
            "images_per_s",
            "images/s",
            "",
            "images of an epoch over its time",
            "higher",
            throughput,
            whole=True,
            rate=True,
            spread=False,  # the time shows it
        ),
        Quantity(
            "speedup",
            "speed-up",
            "×",
            "epoch time of fp32 at the same batch size over this one's",
            "higher",
            None,
            decimals=2,
            whole=True,
        ),
        Quantity(
            "memory_bytes",
            "memory",
            "GiB",
            "peak of the epoch",
            "lower",
            memory,
            scale=GIB,
            decimals=2,
        ),
        Quantity(
            "memory_saved",
            "memory saved",
            "%",
            "share of fp32's memory at the same batch size not needed; what every precision needs "
            "alike, such as the CUDA context and the dataset, is in both",
            "higher",
            None,
            scale=0.01,
            decimals=1,
        ),
        Quantity(
            "peak_allocated_bytes",
            "tensors",
            "GiB",
            "peak of torch's tensors in the epoch, those of the dataset among them",
            "lower",
            _column("peak_allocated_bytes"),
            scale=GIB,
            decimals=2,
        ),
        Quantity(
            "tensors_saved",
            "tensors saved",
            "%",
            "share of the bytes of fp32's tensors at the same batch size not needed",
            "higher",
            None,
            scale=0.01,
            decimals=1,
        ),
        Quantity(
            "train_loss",
            "loss",
            "",
            "mean cross-entropy over the measured steps",
            "lower",
            _column("train_loss"),
            decimals=3,
        ),
        Quantity(
            "train_accuracy",
            "accuracy",
            "%",
            "images predicted right over the measured steps",
            "higher",
            _column("train_accuracy"),
            scale=0.01,
            decimals=1,
            spread=False,  # the loss shows it
        ),
        Quantity(
            "test_loss",
            "test loss",
            "",
            "mean cross-entropy over the test images",
            "lower",
            _column("test_loss"),
            decimals=3,
        ),
        Quantity(
            "test_accuracy",
            "test accuracy",
            "%",
            "test images predicted right",
            "higher",
            _column("test_accuracy"),
            scale=0.01,
            decimals=1,
        ),
        Quantity(
            "overflow_steps",
            "overflows",
            "",
            "steps with inf or NaN in the scaled gradients",
            "lower",
            _column("overflow_steps"),
            decimals=0,
        ),
        Quantity(
            "energy_per_epoch_j",
            "energy",
            "J",
            "energy of one epoch",
            "lower",
            energy_per_epoch,
            whole=True,
        ),
        Quantity(
            "images_per_j",
            "efficiency",
            "images/J",
            "measured images over their energy",
            "higher",
            images_per_joule,
            rate=True,
        ),
        Quantity(
            "achieved_flops",
            "achieved",
            "TFLOP/s",
            "FLOP of an image, forward and backward, times images/s",
            "higher",
            achieved_flops,
            scale=1e12,
            whole=True,
            rate=True,
        ),
        Quantity(
            "peak_share",
            "of peak",
            "%",
            "achieved FLOP/s over the card's peak in the arithmetic that ran",
            "higher",
            peak_share,
            scale=0.01,
            decimals=1,
            whole=True,
            rate=True,
        ),
        Quantity(
            "fragmentation",
            "fragmentation",
            "%",
            "share of the allocator's peak that no tensor used at theirs",
            "lower",
            fragmentation,
            scale=0.01,
            decimals=1,
        ),
        Quantity(
            "step_time_median_s",
            "median step",
            "ms",
            "median step of the epoch",
            "lower",
            _column("step_time_median_s"),
            scale=1e-3,
        ),
        Quantity(
            "step_noise",
            "step noise",
            "%",
            "median absolute deviation of step times over their median",
            "lower",
            step_noise,
            scale=0.01,
            decimals=1,
        ),
        Quantity(
            "setup_time_s",
            "set-up",
            "s",
            "process start to the first step",
            "lower",
            _column("setup_time_s"),
        ),
        Quantity(
            "warmup_time_s",
            "warm-up",
            "s",
            "steps thrown away before the epoch",
            "lower",
            _column("warmup_time_s"),
        ),
    )
}

# ----------------------------------------------------------------------------------------- doubts

NOISY_STEPS = 0.05
"""Step times whose MAD is above this share of their median are called noisy."""

FEW_STEPS = 4
"""Below this many measured steps their spread says nothing."""

SHORT_ENERGY_S = 2.0
"""Below this many seconds an energy is doubted: NVML's readings are 0.1 s apart, and the power of
the moments before and after is in the first and the last."""


_SLOWED, _CAPPED = (
    "|".join(name for name, effect in EFFECTS.items() if effect == wanted)
    for wanted in ("slowed", "capped")
)


def _shared(records: pd.DataFrame) -> pd.Series:
    """Whether others computed where the case trained, on the card or on the CPU.

    A desktop, or who came after the epoch, did not.
    """
    return (records["neighbours_computing"] > 0) | (records["other_cores"] > BUSY_CORES)


def _quarter_noise(records: pd.DataFrame) -> pd.Series:
    """How far the means of two quarters of the steps lie apart by their noise alone, as a share.

    Two standard errors of a difference of two means; a normal distribution's standard deviation is
    1.4826 times its median absolute deviation.
    """
    quarter = _positive(records["measured_steps"].astype(float)) / 4
    return (2 * 1.4826 * step_noise(records) * (2 / quarter) ** 0.5).fillna(0.0)


@dataclass(frozen=True)
class Trend:
    """Something that may change from the first quarter of an epoch to the last.

    ``most`` is how much of it is believed, a share of the first quarter where it is ``relative``;
    what ``noise`` explains is believed on top.
    """

    label: str
    first: str
    last: str
    most: float
    noise: Callable[[pd.DataFrame], pd.Series] | None = None
    relative: bool = True
    unit: str = ""
    signs: tuple[int, ...] = (1, -1)  # a rise is doubted, a fall, or either

    def measure(self, records: pd.DataFrame) -> pd.Series:
        """Change from the first quarter to the last; NaN where either is unknown."""
        first, last = records[self.first].astype(float), records[self.last].astype(float)
        return last / _positive(first) - 1 if self.relative else last - first

    def find(self, records: pd.DataFrame) -> pd.Series:
        """Which rows changed by more than is believed."""
        change = self.measure(records)
        believed = self.most + (self.noise(records) if self.noise else 0.0)
        beyond = [sign * change > believed for sign in self.signs]
        return beyond[0] | beyond[-1]

    def describe(self, records: pd.DataFrame) -> str:
        """Say the largest change among the rows that changed too much; empty if none did."""
        change = self.measure(records)[self.find(records)]
        if not len(change):
            return ""
        largest = max(change.tolist(), key=abs)
        word = "rose" if largest > 0 else "fell"
        size = f"{100 * abs(largest):.1f} %" if self.relative else f"{abs(largest):.0f} {self.unit}"
        return f"{self.label} {word} by {'up to ' if len(change) > 1 else ''}{size}"


TRENDS = (
    Trend("step times", "step_time_first_s", "step_time_last_s", STEADY, _quarter_noise),
    Trend("the SM clock", "sm_clock_first_mhz", "sm_clock_last_mhz", STEADY, signs=(-1,)),
)
"""What is to be the same at both ends of an epoch, and how much change is believed."""

WARMING = (
    Trend(
        "the temperature",
        "temperature_first_c",
        "temperature_last_c",
        5.0,
        relative=False,
        unit="°C",
        signs=(1,),
    ),
)
"""What foretells a change: clocks sink as a card warms."""


def _follow(trends: Sequence[Trend]) -> Callable[[pd.DataFrame], pd.Series]:
    def find(records: pd.DataFrame) -> pd.Series:
        found = trends[0].find(records)
        for trend in trends[1:]:
            found |= trend.find(records)
        return found

    return find


def _describe(trends: Sequence[Trend]) -> Callable[[pd.DataFrame], str]:
    return lambda rows: "; ".join(filter(None, (trend.describe(rows) for trend in trends)))


def _unclear(records: pd.DataFrame) -> pd.Series:
    found = records["arithmetic"].astype(str).str.split("/")
    return found.map(lambda names: Arithmetic.UNCLEAR in names).astype(bool)


def _quote(column: str) -> Callable[[pd.DataFrame], str]:
    """Say the texts of a column, for display."""

    def quote(rows: pd.DataFrame) -> str:
        said = [text for text in rows[column].unique() if text]
        more = f"; and {len(said) - 3:,} other reasons" if len(said) > 3 else ""
        return "; ".join(said[:3]) + more

    return quote


@dataclass(frozen=True)
class Doubt:
    """A reason not to take a row at its word.

    ``fatal`` ones keep a case from being called the fastest; ``fix`` is a sentence with the flag or
    command that helps, and ``detail`` says more of the rows that have it.
    """

    name: str
    remark: str  # beside the row
    warning: str  # at the top
    fix: str
    find: Callable[[pd.DataFrame], pd.Series]
    fatal: bool = True
    detail: Callable[[pd.DataFrame], str] | None = None


DOUBTS: dict[str, Doubt] = {
    d.name: d
    for d in (
        Doubt(
            "fake",
            "not measured",
            "They come from the fake executor and are no measurements",
            "Leave out --executor fake to measure.",
            lambda r: r["executor"] == "fake",
        ),
        Doubt(
            "invalid",
            "invalid",
            "Measured, but not to be believed",
            "Remove the cause and run them again with --retry invalid.",
            lambda r: r["status"] == Status.INVALID.value,
            detail=_quote("reason"),
        ),
        Doubt(
            "diverged",
            "diverged",
            "The loss became inf or NaN; speed and memory still hold",
            "Use a lower --lr or, for an fp16 precision, --loss-scale dynamic.",
            lambda r: r["status"] == Status.DIVERGED.value,
        ),
        Doubt(
            "throttled",
            "throttled",
            "The card lowered its clocks to protect itself",
            "Cool the card; nvidia-smi -q -d PERFORMANCE,TEMPERATURE shows the reasons.",
            lambda r: r["throttle_during"].str.contains(_SLOWED, regex=True),
            detail=_quote("throttle_during"),
        ),
        Doubt(
            "capped",
            "power cap",
            "The card ran at its power limit, and its times depend on that limit",
            "Compare only with runs at the same limit, which nvidia-smi -q -d POWER shows.",
            lambda r: r["throttle_during"].str.contains(_CAPPED, regex=True),
            fatal=False,
        ),
        Doubt(
            "shared",
            "shared",
            "Others used the card, or the CPU that trained",
            "Close other programs, or use --repeats 5.",
            _shared,
            detail=_quote("neighbours"),
        ),
        Doubt(
            "noisy",
            "noisy",
            "Step times never grew steady in warm-up, or vary by more than "
            f"{100 * NOISY_STEPS:.0f} % around their median",
            "Close other programs, or use --repeats 5.",
            lambda r: (
                (~r["warmup_steady"].astype(bool) & r["warmup_steps"].notna())
                | (step_noise(r) > NOISY_STEPS)
            ),
        ),
        Doubt(
            "trend",
            "trend",
            "The epoch did not end as it began",
            "Use a larger --fraction, or --repeats 5.",
            _follow(TRENDS),
            detail=_describe(TRENDS),
        ),
        Doubt(
            "warming",
            "warming",
            "The card was not yet as warm as it gets, and clocks sink as it warms",
            "Use a larger --fraction, or --repeats 5.",
            _follow(WARMING),
            fatal=False,
            detail=_describe(WARMING),
        ),
        Doubt(
            "few",
            "few steps",
            f"Fewer than {FEW_STEPS} steps were measured, too few to tell their noise",
            "Use a larger --fraction.",
            lambda r: (r["measured_steps"] < FEW_STEPS) & (r["fraction"] < 1),
        ),
        Doubt(
            "unclear",
            "unclear arithmetic",
            "The rounding that was probed lies between those of two number formats",
            "See proof_layer and the columns ending in _error in the records; with "
            "--cudnn-benchmark on or off cuDNN chooses other algorithms.",
            _unclear,
            fatal=False,
        ),
        Doubt(
            "unproven",
            "arithmetic not probed",
            "The numeric probe failed, so nothing but the label says what ran",
            "See missing in the records for its reason; a smaller --batch-size leaves it memory.",
            # flags are read back right before it
            lambda r: (r["flags"] != "") & (r["arithmetic"] == ""),
            fatal=False,
        ),
        Doubt(
            "energy",
            "short energy",
            f"Energy was measured over less than {SHORT_ENERGY_S:.0f} s, where the moments before "
            "and after count",
            "Use a larger --fraction.",
            lambda r: r["energy_j"].notna() & (r["measured_time_s"] < SHORT_ENERGY_S),
            fatal=False,
        ),
        Doubt(
            "extrapolated",
            "extrapolated",
            "Only part of an epoch was measured; what is marked ≈ is an estimate",
            "Use --fraction 1 to measure whole epochs.",
            lambda r: (r["fraction"] < 1) & r["epoch_time_s"].notna(),
            fatal=False,
        ),
        Doubt(
            "synthetic",
            "synthetic images",
            "Loss and accuracy say nothing about CIFAR-10",
            "Use --dataset cifar10 to train on it.",
            lambda r: (r["dataset"] == "synthetic") & r["epoch_time_s"].notna(),
            fatal=False,
        ),
        Doubt(
            "published",
            "published",
            "Not measured by this harness: each is the cold first epoch of a process, where a "
            "sweep times a warm one",
            "python -m bench.sweep --preset rtx-titan measures the same cases here.",
            lambda r: r["executor"] == "published",
            fatal=False,
        ),
    )
}

# ---------------------------------------------------------------------------------------- records

FREE = ("precision", "loss_scale", "batch_size")
"""The axes the tables run over."""

SETTINGS = tuple(name for name in AXES if name not in FREE)
"""The axes that rows of one table agree on."""

SOURCE = ("sweep", "machine")


def read(sweeps: Sequence[Sweep]) -> pd.DataFrame:
    """Lay sweeps under each other, one row a record, with what can be said of each row alone.

    Added to the columns of `COLUMNS`: ``sweep``, ``machine`` (the GPU, or the CPU), ``kind``
    (measured, fake or published), ``environment`` (a number: rows that agree on `COMPARABLE`),
    ``memory_measure``, each of `QUANTITIES` that has a ``derive`` and each of `DOUBTS`.
    """
    import pandas as pd

    records = pd.concat(
        [sweep.records.assign(sweep=sweep.name) for sweep in sweeps], ignore_index=True
    )
    _fill_environment(records)
    kinds = {"fake": "fake", "published": "published"}
    added: dict[str, pd.Series] = {
        "machine": _machine(records),
        "kind": records["executor"].map(kinds).fillna("measured"),
        "environment": number_groups(records, COMPARABLE),
    }
    records = records.assign(**added)
    records["memory_measure"] = choose_memory(records)
    derived = {q.name: q.derive(records) for q in QUANTITIES.values() if q.derive}
    return records.assign(**derived, **{d.name: d.find(records) for d in DOUBTS.values()})


def _fill_environment(records: pd.DataFrame) -> None:
    """Give rows that ended before they knew their environment their sweep's, where it has one."""
    lost = records["torch"] == ""
    if not lost.any():
        return
    for name, axis in {**COMPARABLE, **_ALSO_FILLED}.items():
        empty = lost & (records[name].isna() | (records[name] == ""))
        known = records[~lost].groupby(["sweep", axis])[name]
        for (sweep, value), cells in known:
            if cells.nunique() == 1:
                same = (records["sweep"] == sweep) & (records[axis] == value)
                records.loc[empty & same, name] = cells.iloc[0]


_ALSO_FILLED = {"gpu_memory_bytes": "device", "cpu": "device", "train_images": "dataset"}


def _machine(records: pd.DataFrame) -> pd.Series:
    cpu = records["cpu"].where(records["cpu"] != "", "CPU")
    gpu = records["gpu"].where(records["gpu"] != "", "unknown GPU")
    return gpu.where(records["device"] == "cuda", cpu)


def latest(records: pd.DataFrame) -> pd.DataFrame:
    """The rows that count: the last attempt at each run; no sentinels."""
    return keep_latest(records[~records["sentinel"].astype(bool)])


# the outcome a case with repeats is known by: what tells most about its time
_RANK = {
    status.value: rank
    for rank, status in enumerate(
        (Status.OK, Status.DIVERGED, Status.INVALID, Status.OOM, Status.OOM_SUSPECTED)
    )
}


def summarize(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a case on a machine, in the order they first ran.

    Numbers are medians over the repeats that ended as the case is said to have, ``NAME_low`` and
    ``NAME_high`` the ends of their spread, ``spread`` and ``coverage`` what these ends are (see
    `bench.report.spread`), ``repeats`` how many they are, ``runs`` how many there were and
    ``seeds`` how many seeds they had. Repeats under different `COMPARABLE` environments are cases
    of their own.
    """
    rows = rows.reset_index(drop=True)
    cell = number_groups(rows, [*SOURCE, *AXES, "environment", "kind"])
    rank = rows["status"].map(_RANK).fillna(len(_RANK))
    counts = rank == rank.groupby(cell).transform("min")
    runs = cell.value_counts()
    doubts = rows[list(DOUBTS)].groupby(cell).any()  # of every run: one that diverged is told
    rows, cell = rows[counts], cell[counts]
    names = [q.name for q in QUANTITIES.values() if q.derive]
    numbers = rows[names].astype(float)
    measured = rows["status"].isin([s.value for s in MEASURED])
    numbers["epoch_time_s"] = numbers["epoch_time_s"].where(measured)
    numbers["images_per_s"] = numbers["images_per_s"].where(measured)
    medians = _median(numbers, cell)
    low, high = find_ends(numbers, cell)
    repeats = cell.value_counts().rename("repeats")
    seeds = rows["run_seed"].groupby(cell).nunique().rename("seeds")
    first = rows[~cell.duplicated()].set_index(cell[~cell.duplicated()])
    cases = (
        first.drop(columns=[*names, *DOUBTS])
        .join(
            [
                medians,
                low.add_suffix("_low"),
                high.add_suffix("_high"),
                doubts,
                repeats,
                seeds,
                runs.rename("runs"),
            ]
        )
        .copy()
    )  # in one block again: columns are added below
    _say_spread(cases)
    cases["noisy"] |= find_wide(cases)
    return _pair(cases).reset_index(drop=True)


def _median(numbers: pd.DataFrame, cell: pd.Series) -> pd.DataFrame:
    """The median of each column in each cell; of a rate, over its inverse."""
    rates = [q.name for q in QUANTITIES.values() if q.rate]
    inverse = numbers.assign(**{name: 1 / _positive(numbers[name]) for name in rates})
    medians = inverse.groupby(cell).median()
    return medians.assign(**{name: 1 / medians[name] for name in rates})


def _say_spread(cases: pd.DataFrame) -> None:
    """Add what the ends of each case are; single runs have those their own steps allow."""
    repeats = cases["repeats"]
    single = (repeats == 1) & cases[["epoch_time_low_s", "epoch_time_high_s"]].notna().all(axis=1)
    single &= cases["epoch_time_s"].notna()
    ends = cases.loc[single, ["epoch_time_low_s", "epoch_time_high_s"]].astype(float)
    low, high = ends["epoch_time_low_s"], ends["epoch_time_high_s"]
    cases.loc[single, "epoch_time_s_low"], cases.loc[single, "epoch_time_s_high"] = low, high
    images = cases.loc[single, "images_per_s"] * cases.loc[single, "epoch_time_s"]
    cases.loc[single, "images_per_s_low"] = images / _positive(high)
    cases.loc[single, "images_per_s_high"] = images / _positive(low)
    cases["spread"] = Spread.NONE.value
    cases.loc[single, "spread"] = Spread.WITHIN.value
    cases.loc[repeats > 1, "spread"] = Spread.RANGE.value
    cases.loc[repeats >= ENOUGH, "spread"] = Spread.PREDICTION.value
    known = {n: find_coverage(n, choose_depth(n)) for n in repeats.unique() if n >= ENOUGH}
    cases["coverage"] = repeats.map(known).astype(float)
    cases.loc[single, "coverage"] = CONFIDENCE


def find_wide(cases: pd.DataFrame) -> pd.Series:
    """Which cases' repeats spread by more than ±`STEADY`: half the width of what is shown."""
    half = (cases["epoch_time_s_high"] - cases["epoch_time_s_low"]) / 2
    return (cases["repeats"] > 1) & (half / cases["epoch_time_s"] > STEADY)


def _pair(cases: pd.DataFrame) -> pd.DataFrame:
    """Set each case against fp32 on the same machine under the same settings and batch size."""
    partner = number_groups(cases, [*SOURCE, *SETTINGS, "batch_size", "environment", "kind"])
    sound = cases["status"].isin([Status.OK.value, Status.DIVERGED.value])
    base = cases[(cases["precision"] == "fp32") & sound].set_index(
        partner[(cases["precision"] == "fp32") & sound]
    )
    time, bytes, tensors = (
        base[name].reindex(partner).set_axis(cases.index)
        for name in ("epoch_time_s", "memory_bytes", "peak_allocated_bytes")
    )
    other = sound & (cases["precision"] != "fp32")
    return cases.assign(
        speedup=(time / _positive(cases["epoch_time_s"])).where(other),
        memory_saved=(1 - cases["memory_bytes"] / _positive(bytes)).where(other),
        tensors_saved=(1 - cases["peak_allocated_bytes"] / _positive(tensors)).where(other),
    )


MATCH = ("model", "dataset", "precision", "batch_size", "loss_scale")
"""What a case and a published one must agree on to stand beside each other."""

BESIDE = ("status", "epoch_time_s", "images_per_s", "speedup", "memory_bytes", "memory_saved")


def set_beside(cases: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """Add ``published_NAME`` for each of `BESIDE`, empty where nothing was published.

    Args:
        cases: of `summarize`; rows that are published themselves get nothing beside them.
        published: of `summarize`, of the reference sweep.
    """
    theirs = published[published["dataset"] != "synthetic"]
    theirs = theirs[[*MATCH, *BESIDE]].drop_duplicates(list(MATCH))
    theirs = theirs.rename(columns={name: f"published_{name}" for name in BESIDE})
    matched = cases.merge(theirs, on=list(MATCH), how="left").set_axis(cases.index)
    for name in BESIDE:
        matched[f"published_{name}"] = matched[f"published_{name}"].mask(
            cases["kind"] == "published"
        )
    matched["published_status"] = matched["published_status"].fillna("")
    return matched


def trusted(cases: pd.DataFrame) -> pd.Series:
    """Which cases ended well and raise no fatal doubt."""
    sound = cases["status"] == Status.OK.value
    for doubt in DOUBTS.values():
        if doubt.fatal:
            sound &= ~cases[doubt.name]
    return sound & cases["epoch_time_s"].notna()


def list_machines(frame: pd.DataFrame) -> list[tuple[str, str]]:
    """The (sweep, machine) pairs of a frame, in order."""
    return list(dict.fromkeys(zip(frame["sweep"], frame["machine"], strict=True)))


def describe_columns() -> dict[str, str]:
    """What each number of a case is, with its unit, for whoever reads them from a file."""
    described = {
        "spread": "what the columns _low and _high are: " + ", ".join(Spread),
        "coverage": "how often they hold what they are for: the median of as many more runs, or "
        "the whole epoch within the run",
        "seeds": "how many seeds the repeats had",
    }
    described.update({q.name: q.help for q in QUANTITIES.values()})
    described.update({name: column.help for name, column in COLUMNS.items() if column.help})
    return described


def is_number(value: Any) -> bool:
    """Whether a cell of a frame holds a finite number."""
    return isinstance(value, Real) and math.isfinite(value)
