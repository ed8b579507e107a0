"""Metrics that cases are compared by: columns, words for verdicts, and how a ratio is shown.

Lower is always better. A verdict is on after / before. Times are displayed as a speed instead,
before / after: above 1 is faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.study.quantities import MEMORY
from bench.text import GIB
from bench.verdict.ratio import Ratio, Verdict


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
        speed: its ratios are shown as a speed.
        timed: depends on other load of the machine, and is in doubt if there was much.
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
    speed: bool = False
    timed: bool = False
    diverged: bool = False
    error_of: str = ""

    @property
    def column(self) -> str:
        return self.error_of or self.name

    def read(self, cell: float) -> float:
        """Return the compared value of a cell of `column`."""
        return 1 - cell if self.error_of else float(cell)

    def show(self, ratio: Ratio) -> Ratio:
        """Return a ratio after / before as displayed: for a time, the speed."""
        return ratio.invert() if self.speed else ratio

    def lay_out(self, ratio: Ratio) -> dict[str, Any]:
        """Return a ratio after / before for JSON; a time has a ``speed`` instead of a ``ratio``, a
        loss that is not above zero a ``difference``, after - before."""
        shown = self.show(ratio)
        if ratio.difference:
            value, low, high = ratio.difference
            kept = {name: getattr(ratio, name) for name in ("p", "p_adjusted", "exact", "lack")}
            return {"difference": value, "low": low, "high": high, **kept}
        return {
            "speed" if self.speed else "ratio": shown.value,
            "low": shown.low,
            "high": shown.high,
            "p": ratio.p,
            "p_adjusted": ratio.p_adjusted,
            "exact": ratio.exact,
            "lack": ratio.lack,
        }

    def word(self, verdict: Verdict) -> str:
        words = {Verdict.LOWER: self.lower, Verdict.HIGHER: self.higher}
        return words.get(verdict, verdict.value)


_time = partial(
    Metric, lower="faster", higher="slower", unit="s", speed=True, timed=True, diverged=True
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
        *(_memory(column, f"peak memory of {what}") for column, what in MEMORY.items()),
        _loss("train_loss", "training loss"),
        _loss("test_loss", "test loss"),
        _error("train_top1_error", "training top-1 error", error_of="train_accuracy"),
        _error("test_top1_error", "test top-1 error", error_of="test_accuracy"),
        Metric("energy_j", "energy of the measured steps", "less", "more", "J", timed=True),
    )
}
