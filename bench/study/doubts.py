"""Reasons to doubt a row, each computed from typed columns."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING

from bench.case import Case
from bench.data.loader import PREFETCH
from bench.gpu.nvml import EFFECTS
from bench.limits import STEADY, STRAGGLES, is_shared
from bench.origin import find_origin
from bench.precision import (
    EMULATE_FP8,
    MOSTLY_LABELLED,
    PRECISIONS,
    Arithmetic,
    is_dynamic,
)
from bench.record import Status
from bench.study.columns import Columns, fill, known, positive
from bench.text import write_seconds

if TYPE_CHECKING:
    import pandas as pd

    from bench.study.columns import Array

NOISY_STEPS = 0.05
"""Step times are called noisy if their MAD is above this share of their median."""

FEW_STEPS = 4
"""With fewer measured steps than this, their spread says nothing."""

MOST_SKIPPED = 0.1
"""Skipping more than this share of the steps is reported: a dynamic scale that has settled skips
one in two thousand."""

SHORT_ENERGY_S = 2.0
"""An energy measured over fewer seconds is doubted: NVML's readings are 0.1 s apart, the first and
the last include power from before and after, and a card draws less power before it is warm. On an
H200, parts of 1.6 to 2.4 s drew 1 to 5 % less power than whole epochs, parts of 7.5 s and more at
most 1 %."""

LEAST_BUSY = 0.9
"""A GPU that runs kernels for less than this share of a step waits for the host. DPN-92 on an H100:
0.95 to 0.99 at batch sizes that fill it, 0.69 and 0.75 at batch size 128 in half precision."""

_SPARE_HOST = "a larger --batch-size, --cuda-graphs on or --compile"

LEAST_KNOWN = 0.5
"""An epoch time is not known if half its 95 % interval is larger than this share of it."""


@dataclass(frozen=True)
class Trend:
    """Something that may change from the first quarter of an epoch to the last.

    ``most`` is the largest change that raises no doubt, as a share of the first quarter; ``noise``
    returns what is tolerated on top of it.
    """

    label: str
    first: str
    last: str
    most: float
    noise: Callable[[Columns], Array] | None = None
    signs: tuple[int, ...] = (1, -1)  # doubt a rise (1), a fall (-1) or both

    def measure(self, r: Columns) -> Array:
        """Return the change from the first quarter to the last; NaN where either is unknown."""
        first, last = getattr(r, self.first), getattr(r, self.last)
        change: Array = last / positive(first) - 1
        return change

    def find(self, r: Columns) -> Array:
        """Return which rows changed by more than is tolerated."""
        change = self.measure(r)
        believed = self.most + (self.noise(r) if self.noise else 0.0)
        return reduce(or_, (sign * change > believed for sign in self.signs))

    def describe(self, r: Columns) -> str:
        """Describe the largest change among the rows that changed too much; empty if none did."""
        change = self.measure(r)[self.find(r)]
        if not len(change):
            return ""
        largest = max(change.tolist(), key=abs)
        alike = (change > 0).all() or (change < 0).all()
        word = ("rose" if largest > 0 else "fell") if alike else "changed"
        most = "up to " if len(change) > 1 else ""
        return f"{self.label} {word} by {most}{100 * abs(largest):.1f} %"


def _quarter_noise(r: Columns) -> Array:
    """Return the difference of the medians of two quarters of the steps due to noise, as a share.

    It is two standard errors of the difference of two medians. For a normal distribution, the
    standard error of a median is 1.2533 times that of a mean, and the standard deviation is 1.4826
    times the median absolute deviation.
    """
    quarter = positive(r.measured_steps) / 4
    return fill(2 * 1.2533 * 1.4826 * r.step_noise * (2 / quarter) ** 0.5, 0.0)


TRENDS = (
    Trend("step times", "step_time_first_s", "step_time_last_s", STEADY, _quarter_noise),
    Trend("the SM clock", "sm_clock_first_mhz", "sm_clock_last_mhz", STEADY, signs=(-1,)),
)
"""Quantities that should be equal at both ends of an epoch, with the change that is tolerated."""


def _meets(effect: str) -> Callable[[Columns], Array]:
    """Return a function that finds rows with a throttle reason of this effect."""
    reasons = "|".join(name for name, its in EFFECTS.items() if its == effect)
    return lambda r: r.throttle_during.find(partial(re.search, reasons))


def _in_fp8(r: Columns) -> Array:
    float8: Array = r.precision.find(lambda name: PRECISIONS[name].float8)
    return float8 & known(r.epoch_time_s)


def _measure_error(r: Columns) -> Array:
    """Return half the 95 % interval of the epoch time within the run, as a share of it."""
    error: Array = (r.epoch_time_high_s - r.epoch_time_low_s) / 2 / positive(r.epoch_time_s)
    return error


def _is_skipping(r: Columns) -> Array:
    share = r.overflow_steps / positive(r.measured_steps)
    skipping: Array = r.loss_scale.find(is_dynamic) & (share > MOST_SKIPPED)
    return skipping


def _is_beyond(r: Columns) -> Array:
    """Find rows with more FLOP/s or bytes/s than the card's data sheet allows. Bytes of compiled
    code are ignored: it moves less than is counted."""
    moved: Array = (r.of_bandwidth > 1) & (r.compile == Case.compile)
    return moved | (r.of_peaks > 1)


def _is_short(r: Columns) -> Array:
    """Find parts of an epoch of too few steps to estimate noise; a run that ``--until`` ended has
    measured its own."""
    short: Array = (r.measured_steps < FEW_STEPS) & (r.part < 1) & ~r.ended
    return short


def _is_ahead(r: Columns) -> Array:
    """Find parts of an epoch most of which may have used batches that the DataLoader's workers had
    prepared before: an epoch may wait longer for it."""
    ahead = 2 * r.workers * PREFETCH / r.accumulate
    found: Array = (r.measured_steps < r.steps_per_epoch) & (r.measured_steps < ahead)
    return found


def _describe_unknown_time(r: Columns) -> str:
    """Describe the least certain row, and the lower bound of its epoch time if it was profiled."""
    errors = fill(fill(r.epoch_time_error, _measure_error(r)), -1.0)  # -1 where none is known
    worst, floor = max(zip(errors, r.busy_epoch, strict=True))
    if worst < 0:
        return f"down to {r.measured_steps.min():.0f} steps"
    said = f"±{100 * worst:.2g} %" if worst < 1 else "not known within 100 %"
    return f"{said}; the GPU's kernels alone take {write_seconds(floor)}" if floor > 0 else said


def _quote(column: str) -> Callable[[Columns], str]:

    def quote(r: Columns) -> str:
        said = [text for text in getattr(r, column).distinct if text]
        more = f"; and {len(said) - 3:,} other reasons" if len(said) > 3 else ""
        return "; ".join(said[:3]) + more

    return quote


def _name_longer(r: Columns, whole: str = "--epochs") -> str:
    """Name the flags that make these rows measure longer, such as ``a larger --steps or --epochs``.
    ``whole`` is the flag for rows that measured whole epochs; empty for none."""
    said = {
        "--fraction": (~r.cut_by_steps & ~r.ended & (r.part < 1)).any(),
        "--steps": r.cut_by_steps.any(),
        whole: (r.part == 1).any(),
    }
    larger = " or ".join(flag for flag, needed in said.items() if flag and needed)
    smaller = "a smaller --until" if r.ended.any() else ""
    return " or ".join(filter(None, [larger and f"a larger {larger}", smaller]))


def _measure_longer(before: str, after: str, repeats: bool = False) -> Callable[[Columns], str]:
    return lambda r: f"{before} {_name_longer(r)}{', or ' + _repeat(r) if repeats else ''}{after}"


def _measure_more(r: Columns) -> str:
    fewer = ", fewer --workers" if _is_ahead(r).any() else ""
    return f"Use {_name_longer(r)}{fewer}, or close other programs."


def name_repeats(most: float) -> str:
    """Advise more repeats than the ``most`` of any case, to show the spread of runs."""
    return f"--repeats {2 * int(most) + 1 if most >= 5 else 5} or more"


def _repeat(r: Columns) -> str:
    return name_repeats(r.repeat.max())


def _close_others(r: Columns) -> str:
    return f"Close other programs, or use {_repeat(r)}."


def _lengthen_for_energy(r: Columns) -> str:
    # no more epochs: the sensor is read at both ends of each, so each would be as short
    longer = _name_longer(r, whole="")
    whole = f"{_repeat(r)}, which show the error of whole epochs" * bool((r.part == 1).any())
    return f"Use {', or '.join(filter(None, [longer, whole]))}."


def _find_straggler(r: Columns) -> str:
    shown = "See its rank in ranks.csv; python -m bench.doctor shows what else uses the"
    if not (r.device == "cuda").any():
        return f"{shown} CPU."
    return (
        f"{shown} GPUs and the CPU, and nvidia-smi -q -d PERFORMANCE,TEMPERATURE whether one of "
        "them is slowed."
    )


def _steady(r: Columns) -> str:
    """Advise how to make step times vary less; steps that wait for the host vary with it."""
    if r.host_bound.all():
        return f"Use {_SPARE_HOST}."
    waiting = f"; where a step waits for the host, {_SPARE_HOST}" if r.host_bound.any() else ""
    return f"Close other programs, or use {_repeat(r)}{waiting}."


def _use_setting(r: Columns) -> str:
    return (
        f"{' and '.join(r.unaffected.distinct)} changed no loss: see whether the network, its loss "
        "and its optimizer use it; that of a --workload is given the lr in build_optimizer."
    )


def _list_unknown(r: Columns) -> str:
    return " and ".join(name for name in r.executor.distinct if find_origin(name) == "unknown")


def _describe_foreign(r: Columns) -> str:
    said = []
    if (r.kind == "published").any():
        said.append(
            "Of what was published, each is the cold first epoch of a process, while a sweep times "
            "a warm one"
        )
    if unknown := _list_unknown(r):
        what = "These rows" if not said else "Others"
        said.append(f"{what} come from the {unknown} executor, which this version does not know")
    return ". ".join(said)


def _mend_foreign(r: Columns) -> str:
    said = []
    if (r.kind == "published").any():
        said.append("python -m bench.sweep --preset rtx-titan measures the same cases here.")
    if unknown := _list_unknown(r):
        said.append(
            f"Read them with the version that wrote them, or measure without --executor {unknown}."
        )
    return " ".join(said)


def _use_cifar10(r: Columns) -> str:
    given = [f"--{name}" for name in ("input", "classes") if any(getattr(r, name).distinct)]
    without = f" without {' and '.join(given)}" if given else ""
    return f"Use --dataset cifar10{without} to train on them."


def _measure_whole(r: Columns) -> str:
    said = {
        "--fraction 1": (r.fraction < 1).any(),
        "--steps none": r.cut_by_steps.any(),
        "--until none": r.ended.any(),
    }
    flags = " and ".join(flag for flag, needed in said.items() if needed)
    return f"Use {flags} to measure whole epochs."


@dataclass(frozen=True)
class Doubt:
    """A reason to doubt a row.

    A ``fatal`` doubt keeps a case from being called the fastest. ``fix`` is a sentence with the
    flag or command that helps, or writes one for the doubted rows; ``detail`` adds their details.
    """

    name: str
    remark: str  # beside the row
    warning: str | Callable[[Columns], str]  # at the top
    fix: str | Callable[[Columns], str]
    find: Callable[[Columns], Array]
    fatal: bool = True
    detail: Callable[[Columns], str] = lambda r: ""

    def advise(self, rows: pd.DataFrame) -> str:
        """Return how to fix the measurement of these rows, all of which have this doubt."""
        return _say(self.fix, rows)

    def warn(self, rows: pd.DataFrame) -> str:
        """Return the warning about these rows, with its details."""
        detail = self.detail(Columns(rows))
        return f"{_say(self.warning, rows)}{f' ({detail})' if detail else ''}."


def _say(text: str | Callable[[Columns], str], rows: pd.DataFrame) -> str:
    return text if isinstance(text, str) else text(Columns(rows))


_ALL = (
    Doubt("invalid", "invalid",
          "The measurement failed a check and cannot be trusted",
          "Remove the cause, then run them again with --retry invalid.",
          lambda r: r.status == Status.INVALID, detail=_quote("reason")),
    Doubt("emulated", "emulated",
          "fp8 was emulated on a CPU, so time and memory say nothing about a GPU",
          f"Measure --precision fp8 on a GPU, without {EMULATE_FP8}.",
          lambda r: _in_fp8(r) & (r.device == "cpu")),
    Doubt("diverged", "diverged",
          "The loss became inf or NaN; time and memory are still valid",
          "Use a lower --lr or, for a static loss scale, --loss-scale dynamic.",
          lambda r: r.status == Status.DIVERGED),
    Doubt("throttled", "throttled",
          "The GPU lowered its clocks to protect itself",
          "Improve the cooling (nvidia-smi -q -d PERFORMANCE,TEMPERATURE shows the reason), then "
          "run them again with --retry invalid.",
          _meets("slowed"), detail=_quote("throttle_during")),
    Doubt("capped", "power cap",
          "The GPU ran at its power limit, so its times depend on that limit",
          "Compare only with runs at the same limit, which nvidia-smi -q -d POWER shows.",
          _meets("capped"), fatal=False),
    # only processes that computed during the epoch count: no desktop, none that came later
    Doubt("contended", "shared",
          "Another program used the device or the cores of the run",
          _close_others,
          lambda r: is_shared(r.neighbours_computing, r.other_cores), detail=_quote("neighbours")),
    Doubt("beside", "beside other lanes",
          "Cases ran beside other lanes, with which they share power, cooling and the CPU: alone "
          "they may take less time, and a speed-up over one of them may be too high",
          "Use --lanes 1 with another --out: it runs one case at a time.",
          lambda r: r.lanes_beside > 0, fatal=False),
    Doubt("noisy", "noisy",
          "Step times did not settle during warm-up, or vary by more than "
          f"{100 * NOISY_STEPS:.0f} % around their median",
          _steady,
          lambda r: (~r.warmup_steady & known(r.warmup_steps)) | (r.step_noise > NOISY_STEPS)),
    Doubt("trend", "trend",
          "Speed changed between the first and the last quarter of the measured steps",
          _measure_longer("Use", ".", repeats=True),
          lambda r: reduce(or_, (trend.find(r) for trend in TRENDS)),
          detail=lambda r: "; ".join(filter(None, (trend.describe(r) for trend in TRENDS)))),
    Doubt("unknown", "epoch not known",
          "The measured steps are too few, vary too much, or used batches that a loader had "
          "prepared before, to know the time of an epoch as well as --until asks, or within "
          f"{100 * LEAST_KNOWN:.0f} %",
          _measure_more,
          lambda r: r.missed | (_measure_error(r) > LEAST_KNOWN) | _is_short(r) | _is_ahead(r),
          detail=_describe_unknown_time),
    Doubt("host_bound", "host-bound",
          f"The GPU ran kernels for less than {100 * LEAST_BUSY:.0f} % of a step and waited "
          "for the host, so these times say little about the GPU",
          f"Use {_SPARE_HOST}; python -m bench.why shows what it waited for.",
          lambda r: r.busy_share < LEAST_BUSY, fatal=False,
          detail=lambda r: f"down to {100 * r.busy_share.min():.0f} %"),
    Doubt("unclear", "unclear arithmetic",
          "Which arithmetic ran is not certain: the numeric probe failed, or found a rounding "
          "error between those of two number formats, or the network ran a part of its FLOP in "
          "another format than the label's",
          "The columns missing, proof_layer, *_error and labelled_flop_share of the records show "
          "why; a smaller --batch-size leaves memory for the probe, and with --cudnn-benchmark on "
          "or off cuDNN may choose another algorithm.",
          # flags are read back right before the probe
          lambda r: r.arithmetic.find(lambda names: Arithmetic.UNCLEAR in names.split("/"))
          | ((r.flags != "") & (r.arithmetic == ""))
          | (r.labelled_flop_share < MOSTLY_LABELLED), fatal=False),
    Doubt("skipped", "steps skipped",
          f"More than {100 * MOST_SKIPPED:.0f} % of the steps were skipped because their "
          "gradients overflowed, so that less was learnt",
          _measure_longer("Use a smaller static --loss-scale, or", ": a dynamic scale settles."),
          _is_skipping, fatal=False),
    Doubt("without_effect", "no effect",
          "With another value of a setting, and the same seed, all losses were the same to the "
          "last digit, so it had no effect",
          _use_setting, lambda r: r.unaffected != "", fatal=False, detail=_quote("unaffected")),
    Doubt("straggling", "straggler",
          f"One of the processes worked more than {100 * STRAGGLES:.0f} % longer than the "
          "median of the others, and all waited for it",
          _find_straggler,
          lambda r: r.straggle > STRAGGLES, fatal=False),
    Doubt("beyond", "beyond the data sheet",
          "More FLOP or bytes a second than the data sheet of the card allows, which are left "
          "out: the data come from a cache, or the times are wrong",
          "Use a larger --batch-size, and check the times: python -m benchmarks.overhead "
          "measures a case beside a bare loop.",
          _is_beyond, fatal=False),
    Doubt("energy", "short energy",
          f"Energy was measured over less than {SHORT_ENERGY_S:.0f} s, too short for the "
          "sensor, and for the card to become as warm as in an epoch",
          _lengthen_for_energy,
          # per epoch: the sensor is read at both ends of each
          lambda r: known(r.energy_j) & (r.measured_time_s < SHORT_ENERGY_S * r.epochs),
          fatal=False),
    Doubt("extrapolated", "extrapolated",
          "Only part of an epoch was measured; figures of whole ones, marked ≈, are extrapolated",
          _measure_whole,
          lambda r: (r.part < 1) & known(r.epoch_time_s), fatal=False),
    Doubt("synthetic", "synthetic images",
          "Loss and accuracy say nothing about real images",
          _use_cifar10,
          lambda r: (r.dataset == "synthetic") & known(r.epoch_time_s), fatal=False),
    Doubt("foreign", "not measured by this harness", _describe_foreign, _mend_foreign,
          lambda r: r.kind != "measured", fatal=False),
)  # fmt: skip

DOUBTS: dict[str, Doubt] = {doubt.name: doubt for doubt in _ALL}

SAID_BELOW = ("extrapolated", "synthetic", "foreign")
"""Doubts that are reported below the tables or marked at each number, not beside each row."""


def list_below(cases: pd.DataFrame) -> list[str]:
    """Return the doubts that are reported below the tables for these cases. Some rows of an unknown
    executor among others are marked each."""
    marked = (cases["kind"] == "unknown").any() and not cases["foreign"].all()
    return [name for name in SAID_BELOW if not (marked and name == "foreign")]


def trusted(cases: pd.DataFrame) -> pd.Series:
    """Return which cases ended well, have an epoch time, come from an executor that is known, and
    raise no fatal doubt."""
    doubted = cases[[doubt.name for doubt in DOUBTS.values() if doubt.fatal]].any(axis=1)
    doubted |= cases["kind"] == "unknown"
    return (cases["status"] == Status.OK.value) & ~doubted & cases["epoch_time_s"].notna()
