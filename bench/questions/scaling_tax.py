"""How much of its speed-up over fp32 each precision keeps when several GPUs train one network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from statistics import fmean, variance
from typing import TYPE_CHECKING

from bench.case import FOLLOWS, Case
from bench.interval import find_half_width
from bench.limits import MIN_REPEATS
from bench.precision import PRECISIONS
from bench.questions.gpus import Line, Point, name_devices, name_line
from bench.render.cells import name_place, write_ends, write_ratio, write_tenths
from bench.render.section import Column, Section, Sheet, join, quantity_column

if TYPE_CHECKING:
    from bench.questions.report_data import ReportData


@dataclass(frozen=True)
class Tax:
    """The speed-up of a precision over fp32, all else equal, on one GPU and on more."""

    line: Line
    speedups: Mapping[int, float]  # by the number of GPUs
    share: float  # part of the speed-up on one GPU that is lost on the most; negative if it grew
    ends: tuple[float, float] | None  # the 95 % interval of the share; None with too few repeats

    @property
    def most(self) -> Point:
        return self.line.by_gpus[max(self.speedups)]


def find_taxes(lines: Sequence[Line]) -> list[Tax]:
    """Return the tax of each precision that ran, like fp32, on one GPU and on a larger number."""
    plain = {line.place: line for line in lines if line.precision == Case.precision}
    found = []
    for line in lines:
        other = plain.get(line.place)
        if other is None or other is line:
            continue
        # the two bases may differ in kind, where one of them ran beside other lanes
        theirs, ours = (
            {point.row.parallel: point for point in one.all if point.gpus == 1}
            for one in (other, line)
        )
        ones = [(theirs[kind], one) for kind, one in ours.items() if kind in theirs]
        if not ones:
            continue
        one = min(ones, key=lambda pair: any(point.row.beside for point in pair))
        pairs = {1: (one[0].times, one[1].times)} | {
            gpus: (other.by_gpus[gpus].times, line.by_gpus[gpus].times)
            for gpus in sorted(line.by_gpus)
            if gpus > 1 and gpus in other.by_gpus
        }
        if len(pairs) > 1 and all(min(map(len, pair)) for pair in pairs.values()):
            speedups = {gpus: math.exp(_lead(pair)) for gpus, pair in pairs.items()}
            found.append(Tax(line, speedups, *_judge(pairs[1], pairs[max(pairs)])))
    return found


_Pair = tuple[Sequence[float], Sequence[float]]


def _lead(pair: _Pair) -> float:
    before, after = (fmean(map(math.log, times)) for times in pair)
    return before - after


def _judge(one: _Pair, most: _Pair) -> tuple[float, tuple[float, float] | None]:
    """Return the share of a lead that is lost, and its 95 % interval (Welch's, of four sets)."""
    shift = _lead(most) - _lead(one)
    sets = [[math.log(time) for time in times] for pair in (one, most) for times in pair]
    parts = [(variance(logs), len(logs)) for logs in sets if len(logs) >= MIN_REPEATS]
    if len(parts) < len(sets) or not (reach := find_half_width(parts)):
        return 1 - math.exp(shift), None
    return 1 - math.exp(shift), (1 - math.exp(shift + reach), 1 - math.exp(shift - reach))


def _tabulate_taxes(found: ReportData) -> Iterator[Sheet]:
    order = list(PRECISIONS)
    taxes = find_taxes(found.lines)
    taxes.sort(key=lambda tax: (tax.line.place, order.index(tax.line.precision)))
    what = name_devices([point for tax in taxes for point in tax.line.all])
    shown = ["precision", *(name for name in FOLLOWS["precision"] if name in found.named)]
    quantity = partial(quantity_column, take=lambda tax: tax.most.row, spread=False, keep=6)

    def lead(gpus: int) -> Column[Tax]:
        return Column(f"over_fp32_{gpus}", f"over fp32 on {gpus} (×)",
                      f"speed-up over fp32 on as many {what}", lambda tax: tax.speedups.get(gpus),
                      write=write_ratio, better="higher")  # fmt: skip

    columns: list[Column[Tax]] = [
        Column("precision", "precision", "and what follows from it",
               lambda tax: name_place(tax.most.row, shown, {}), number=False),
        *(lead(n) for n in sorted({gpus for tax in taxes for gpus in tax.speedups})),
        Column("tax", "scaling tax (%)", "part of the speed-up on one that is lost on the most",
               lambda tax: tax.share, write=write_tenths, better="lower", always=True),
        Column("tax_interval", "95 % interval", "of the tax",
               lambda tax: write_ends(tax.ends, write_tenths, " to "), keep=7),
        quantity("wire_bytes"),
        quantity("exposed_share"),
    ]  # fmt: skip
    rows, groups = join(
        (name_line(part[0].line, found.named, found.machines, but="precision"), part)
        for part in (list(part) for _, part in groupby(taxes, lambda tax: tax.line.place))
    )
    title = f"Precision's scaling tax: the speed-up over fp32 by the number of {what}"
    yield Sheet(title, columns, rows, _explain_taxes(rows), groups)


def _explain_taxes(taxes: Sequence[Tax]) -> Iterator[str]:
    yield (
        "A faster step leaves less time to exchange gradients in. Under autocast (fp16-amp, "
        "bf16-amp) gradients stay in fp32, so that as many bytes are exchanged as in fp32; fp16 "
        "and bf16 halve them, as does --grad-compression. In NVIDIA's own figures "
        "(DeepLearningExamples, ResNet-50 v1.5), 8 A100 are 7.72 times as fast as one in TF32 and "
        "6.72 times in mixed precision: a tax of 13 %."
    )
    unsure = [tax for tax in taxes if tax.ends and tax.ends[0] <= 0 <= tax.ends[1]]
    if unsure:
        names = dict.fromkeys(tax.line.precision for tax in unsure)
        yield (
            f"Whether there is a tax is not certain for {', '.join(names)}: the interval has 0 in "
            "it; --repeats 5 narrows it."
        )
    if any(tax.ends is None for tax in taxes):
        yield f"An interval needs {MIN_REPEATS} runs of each of the four cases; use --repeats 5."


TAX = Section(
    "scaling-tax", "What of its speed-up does each precision lose there?", _tabulate_taxes
)
