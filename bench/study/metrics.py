"""What is judged of a case: columns, the words for their verdicts, and how a ratio is shown.

Lower is always better. A verdict is on after / before; of a time people are shown the speed
instead, before / after: above 1 is faster.
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
    """What is compared: a column, how it is named and written.

    Attributes:
        name: the column's, unless ``error_of`` has it.
        error_of: a column of accuracies, fractions of 1, where what is compared is 1 minus these.
        lower: the verdict where B is below A; ``higher`` where it is above.
        scale: base units in a ``unit``, for people.
        deterministic: may repeat to the last digit, and is then judged exactly. An allocator
            serves the same requests with the same bytes. NVML counts in steps of 2 MiB, which hide
            a spread smaller than that; against a margin of 2 % they matter below 100 MiB.
        seeded: depends on the seed, and is judged over seeds.
        speed: what changes it is shown as a speed.
        timed: depends on what else the machine did, and is in doubt where that was much.
        diverged: is a measurement even where the loss became inf or NaN. Loss is not, nor is
            energy: arithmetic on NaN toggles fewer transistors.
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
        """What is compared of a cell of that column."""
        return 1 - cell if self.error_of else float(cell)

    def show(self, ratio: Ratio) -> Ratio:
        """A ratio after / before, as people and files are shown it."""
        return ratio.invert() if self.speed else ratio

    def lay_out(self, ratio: Ratio) -> dict[str, Any]:
        """What JSON says of a ratio after / before: of a time the ``speed`` in its place."""
        shown = self.show(ratio)
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
