"""The quantities of a case, how each is derived, named and written; and the metrics by which two
are compared.

Of a metric lower is always better. A verdict is on after / before. Times are displayed as a
speed-up instead, before / after: above 1 is faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

from bench.base.limits import VARIES
from bench.base.text import GIB, write_number
from bench.results.store.rows import Row
from bench.results.verdict import Ratio, Verdict

_SCALES = {
    "%": 0.01,
    "ms": 1e-3,
    "GiB": GIB,
    "MiB": 2**20,
    "MiB a step": 2**20,
    "GB/s": 1e9,
    "TFLOP/s": 1e12,
}
"""SI units in a displayed unit; any other unit has a scale of 1."""


@dataclass(frozen=True)
class Quantity:
    """A quantity of a case: how it is derived, named and written.

    ``derive`` takes a run and returns a number in SI units, NaN for none; without it, the run has
    an attribute of that name. A ``paired`` quantity needs another case too, see
    `bench.results.study.runs`. It is displayed in ``unit``, with ``decimals`` or to four digits. A
    ``whole`` quantity is of a whole epoch, and an estimate if only a part was measured. A ``rate``
    is over a time or an energy; its median over repeats is computed from its inverse, so that it
    agrees with the time in the same row, also for an even number of repeats. Tables show the
    spread of repeats where it is at least ``spread``, a share of the value, and a ``learnt``
    quantity is shown for whole epochs only, see `bench.answers.notices`; files hold both for all.
    """

    name: str
    label: str
    unit: str
    better: str  # lower or higher
    help: str
    derive: Callable[[Row], float] | None = None
    decimals: int | None = None
    whole: bool = False
    rate: bool = False
    spread: float = 0.0
    learnt: bool = False
    paired: bool = False

    @property
    def scale(self) -> float:
        return _SCALES.get(self.unit, 1)

    @property
    def title(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label

    def write(self, value: float) -> str:
        shown = value / self.scale
        if self.decimals is None:
            return write_number(shown)
        return f"{round(shown, self.decimals) + 0.0:.{self.decimals}f}"  # 0.0, not -0.0

    def write_ends(self, low: float, high: float, value: float) -> str:
        """Write the ends of a spread to as many decimals as the value; empty if all look equal.

        >>> QUANTITIES["epoch_time_s"].write_ends(76.56, 90.351, 88.8)
        '76.56–90.35'
        """
        decimals = len(self.write(value).partition(".")[2])
        *ends, middle = (f"{one / self.scale:,.{decimals}f}" for one in (low, high, value))
        return "" if {*ends} == {middle} else "–".join(ends)


MEMORY_MEASURES: dict[str, str] = {
    "peak_device_bytes": "the device over its baseline (NVML)",
    "peak_process_bytes": "the process (NVML, or what it holds on a CPU)",
    "peak_reserved_bytes": "torch's allocator",
    "peak_allocated_bytes": "tensors",
}
"""Measures of ``memory_bytes``, best first: all rows of a machine take the first that it has."""


def over(a: float, b: float) -> float:
    """Return a / b; NaN where b is not above zero."""
    return a / b if b > 0 else math.nan


def _find_wire_rate(run: Row) -> float:
    """Return the bytes/s that rings send from each GPU, over the time of a step.

    An all-reduce sends 2 (N - 1) / N of the gradients (Patarasuk and Yuan, Bandwidth optimal
    all-reduce algorithms for clusters of workstations, 2009), as nccl-tests counts its bus
    bandwidth; a reduce-scatter of them, and a gathering of weights, half of that.
    """
    whole = run.wire_bytes + (run.gathered_bytes if run.parallel == "fsdp" else run.wire_bytes)
    sent = whole * (run.world_size - 1) / run.world_size
    return over(sent, run.sync_step_s) if sent > 0 else math.nan


_ALL = (
    Quantity("epoch_time_s", "epoch time", "s", "lower", "the training of an epoch", whole=True),
    Quantity("images_per_s", "images/s", "", "higher", "images of an epoch over its time",
             whole=True, rate=True, spread=math.inf),  # the time shows it
    Quantity("sequences_per_s", "sequences/s", "", "higher",
             "sequences of --length of an epoch over its time",
             lambda r: math.nan if r.length is None else over(r.images_per_s, r.length),
             whole=True, rate=True, spread=math.inf),
    Quantity("speedup", "speed-up", "×", "higher",
             "epoch time of fp32 at the same batch size over this one's",
             decimals=2, whole=True, paired=True),
    Quantity("memory_bytes", "memory", "GiB", "lower", "peak of the epoch",
             lambda r: getattr(r, r.memory_measure) if r.memory_measure else math.nan,
             # an allocator repeats its peak; the column would waste space
             decimals=2, spread=VARIES),
    Quantity("memory_saved", "memory saved", "%", "higher",
             "share of fp32's memory at the same batch size not needed; what every precision "
             "needs alike, such as the CUDA context and the dataset, is in both",
             decimals=1, paired=True),
    Quantity("peak_allocated_bytes", "tensors", "GiB", "lower",
             "peak of torch's tensors in the epoch, those of the dataset among them",
             decimals=2),
    Quantity("weights_bytes", "weights", "GiB", "lower", "parameters and buffers", decimals=2),
    Quantity("gradients_bytes", "gradients held", "GiB", "lower",
             "gradients when the optimizer takes a step", decimals=2),
    Quantity("optimizer_bytes", "optimizer", "GiB", "lower",
             "state of the optimizer, and masters of the weights", decimals=2),
    Quantity("activations_bytes", "activations", "GiB", "lower",
             "the rest of the peak of tensors: activations, workspaces, data",
             lambda r: r.peak_allocated_bytes - r.weights_bytes - r.gradients_bytes
             - r.optimizer_bytes, decimals=2),
    Quantity("cached_bytes", "cached", "GiB", "lower",
             "what torch's allocator holds at its peak beyond the tensors of theirs",
             lambda r: r.peak_reserved_bytes - r.peak_allocated_bytes, decimals=2),
    Quantity("train_loss", "loss", "", "lower", "mean cross-entropy over the measured steps",
             decimals=3, learnt=True),
    Quantity("train_accuracy", "accuracy", "%", "higher",
             "images predicted right over the measured steps",
             decimals=1, spread=math.inf, learnt=True),  # the loss shows its spread
    Quantity("test_loss", "test loss", "", "lower", "mean cross-entropy over the test images",
             decimals=3, learnt=True),
    Quantity("test_accuracy", "test accuracy", "%", "higher", "test images predicted right",
             decimals=1, learnt=True),
    Quantity("overflow_steps", "overflows", "", "lower",
             "steps with inf or NaN in the scaled gradients", decimals=0),
    Quantity("energy_per_epoch_j", "energy", "J", "lower", "energy of one epoch",
             lambda r: over(r.energy_j * r.train_images, r.measured_images), whole=True),
    Quantity("images_per_j", "efficiency", "images/J", "higher",
             "measured images over their energy",
             lambda r: over(r.measured_images, r.energy_j), rate=True),
    # values above the data sheet of the card are left out, here and below
    Quantity("achieved_flops", "achieved", "TFLOP/s", "higher",
             "FLOP per image, forward and backward, times images/s; of each GPU",
             lambda r: math.nan if r.of_peaks > 1 else r.flops, whole=True, rate=True),
    Quantity("mfu", "MFU", "%", "higher",
             "model FLOP/s utilization: achieved FLOP/s over the dense peak of the card's data "
             "sheet, in the arithmetic that ran",
             lambda r: math.nan if r.of_peaks > 1 else r.of_peaks,
             decimals=1, whole=True, rate=True),
    Quantity("measured_share", "of measured", "%", "higher",
             "achieved FLOP/s over those of a large matrix product in the arithmetic that ran, "
             "measured on this device before its cases",
             lambda r: math.nan if r.of_measured > 1 else r.of_measured,
             decimals=1, whole=True, rate=True),
    Quantity("traffic", "memory traffic", "GB/s", "higher",
             "what the operations of a step read and write, not compiled, over the time of a "
             "step",
             lambda r: math.nan if r.of_bandwidth > 1 else r.moved, rate=True),
    Quantity("copy_share", "of a copy", "%", "higher",
             "memory traffic over that of a large copy, measured on this device before its "
             "cases",
             lambda r: r.of_copy, decimals=1, rate=True),
    Quantity("fp8_flop_share", "FLOP in fp8", "%", "higher",
             "share of the network's FLOP that the layers converted to fp8 are",
             decimals=1, spread=math.inf),  # repeats convert the same layers
    Quantity("recomputed_share", "FLOP again", "%", "lower",
             "FLOP that --recompute lets the backward pass compute a second time, over those of "
             "forward and backward, which alone count as achieved",
             lambda r: over(r.recomputed_flop_per_image, r.flop_per_image),
             decimals=1, spread=math.inf),  # repeats compute the same again
    Quantity("step_time_median_s", "median step", "ms", "lower", "median step of the epoch"),
    Quantity("busy_share", "GPU busy", "%", "higher",
             "time in which kernels ran, of a profiled step, over a step that is not profiled",
             lambda r: over(r.busy_step_s, r.step_time_median_s), decimals=0),
    Quantity("step_noise", "step noise", "%", "lower",
             "median absolute deviation of step times over their median",
             lambda r: over(r.step_time_mad_s, r.step_time_median_s), decimals=1),
    Quantity("loader_first_batch_s", "first batch", "s", "lower",
             "start of the epoch to the first batch of torch's DataLoader", spread=math.inf),
    Quantity("loader_samples_per_s", "loader alone", "items/s", "higher",
             "what torch's DataLoader supplies while nothing is trained",
             rate=True, spread=math.inf),
    Quantity("setup_time_s", "set-up", "s", "lower", "process start to the first step"),
    Quantity("warmup_time_s", "warm-up", "s", "lower", "steps thrown away before the epoch"),
    Quantity("recompilations", "compiled again", "", "lower",
             "how often torch.compile compiled again, as for another shape of batch or weight",
             decimals=0),
    Quantity("exposed_s", "exposed communication", "ms", "lower",
             "what the exchange between processes adds to a step; noise may make it negative",
             lambda r: r.sync_step_s - r.no_sync_step_s if r.world_size > 1 else math.nan,
             decimals=2),
    Quantity("exposed_error_s", "exposed communication, ±", "ms", "lower",
             "half of the 95 % interval of exposed communication, within a run", decimals=2),
    Quantity("exposed_share", "exposed share", "%", "lower",
             "what the exchange between processes adds to a step, over that step",
             lambda r: over(r.exposed_s, r.sync_step_s), decimals=1),
    Quantity("wire_bytes", "gradients", "MiB a step", "lower",
             "gradients that each process hands over to be averaged, of a step",
             spread=math.inf),  # they repeat
    Quantity("gathered_bytes", "weights gathered", "MiB a step", "lower",
             "weights that each process of --parallel fsdp gathers, of a step", spread=math.inf),
    Quantity("wire_rate", "on the wire", "GB/s", "higher",
             "what a ring of processes sends from each of gradients and weights, over the time of "
             "a step",
             _find_wire_rate, rate=True),
)  # fmt: skip

QUANTITIES: dict[str, Quantity] = {quantity.name: quantity for quantity in _ALL}

STORED = tuple(quantity for quantity in _ALL if not quantity.paired)
"""Quantities that a record has by itself."""


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    # an abstract class alone takes five times as long
    return isinstance(value, (float, int, Real)) and math.isfinite(value)


@dataclass(frozen=True)
class Metric:
    """A metric that is compared: its column, and how it is named and written.

    Attributes:
        name: the name of the column, unless ``error_of`` is given.
        error_of: a column of accuracies as fractions of 1; 1 minus these is compared.
        lower: the verdict if B is below A; ``higher`` if it is above.
        scale: base units in the displayed ``unit``.
        deterministic: may repeat to the last digit, and is then judged exactly. An allocator
            serves the same requests with the same bytes. NVML counts in steps of 2 MiB, which hide
            a smaller spread; with a margin of 2 % this matters below 100 MiB.
        seeded: depends on the seed, and is judged over seeds.
        speedup: its ratios are shown as a speed-up, before / after.
        timed: depends on other load of the machine, and has a warning if there was much.
        diverged: is valid even if the loss became inf or NaN. Loss is not, nor is energy:
            arithmetic on NaN toggles fewer transistors.
    """

    name: str
    label: str
    lower: str
    higher: str
    unit: str = ""
    scale: float = 1
    deterministic: bool = False
    seeded: bool = False
    speedup: bool = False
    timed: bool = False
    diverged: bool = False
    error_of: str = ""

    def show(self, ratio: Ratio) -> Ratio:
        """Return a ratio after / before as displayed: for a time, the speed-up."""
        return ratio.invert() if self.speedup else ratio

    def lay_out(self, ratio: Ratio) -> dict[str, Any]:
        """Return a ratio after / before for JSON; a time has a ``speedup`` instead of a ``ratio``,
        a loss that is not above zero a ``difference``, after - before."""
        shown, apart = self.show(ratio), ratio.difference
        what = "difference" if apart else "speedup" if self.speedup else "ratio"
        value, low, high = apart or (shown.value, shown.low, shown.high)
        kept = {name: getattr(ratio, name) for name in ("p", "p_adjusted", "exact", "lack")}
        return {what: value, f"{what}_low": low, f"{what}_high": high, **kept}

    def word(self, verdict: Verdict) -> str:
        words = {Verdict.LOWER: self.lower, Verdict.HIGHER: self.higher}
        return words.get(verdict, verdict.value)


_time = partial(
    Metric, lower="faster", higher="slower", unit="s", speedup=True, timed=True, diverged=True
)
_memory = partial(
    Metric, lower="less", higher="more", unit="GiB", scale=GIB, deterministic=True, diverged=True
)
_loss = partial(Metric, lower="lower", higher="higher", seeded=True)
_error = partial(_loss, unit="%", scale=0.01)

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        _time("epoch_time_s", "epoch time"),
        _time("step_time_median_s", "median step time"),
        _time("eval_time_s", "evaluation time"),
        _time("warmup_time_s", "warm-up time"),
        *(_memory(column, f"peak memory of {what}") for column, what in MEMORY_MEASURES.items()),
        _loss("train_loss", "training loss"),
        _loss("test_loss", "test loss"),
        _error("train_top1_error", "training top-1 error", error_of="train_accuracy"),
        _error("test_top1_error", "test top-1 error", error_of="test_accuracy"),
        Metric("energy_j", "energy of the measured steps", "less", "more", "J", timed=True),
    )
}
