"""The loss-scale map that `python -m bench.scales` stores: read, judged and told.

A map says, for each precision, what a range of loss scales does to the gradients of a training.
Nothing here imports torch, pandas or numpy; only the figure imports matplotlib.
"""

from __future__ import annotations

import csv
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

from bench.errors import UsageError
from bench.precision import PRECISIONS, is_dynamic
from bench.report.model import NOTHING, Cell, Head, Table
from bench.text import Explained

MAP, GRADIENTS, TRAININGS = "scales.json", "gradients.csv", "trainings.csv"
"""The files of a map: what was asked for and what ran it; counts of gradient values; losses."""

VERSION = 1
"""Of these files; a reader refuses another."""

TOLERANCE = 0.01
"""A scale is large enough where at most this share of the gradient values is lost beyond what the
best scale that does not overflow loses. It is a choice: half the values of a layer may lie below
the range of fp16 without harm (Micikevicius et al. 2018, arXiv:1710.03740, figure 3), so the loss
after the same steps stands beside it."""

LAYER_TOLERANCE = 0.5
"""A scale is large enough only where no layer loses more than this share of its values beyond what
it loses at its best scale: over all layers, a large one hides a small one that loses everything.
Half may be lost without harm (Micikevicius et al. 2018, figure 3)."""

HEADROOM = 8
"""At the recommended scale, gradients this many times as large as any seen would not overflow.

"Train With Mixed Precision" (NVIDIA, Choosing A Scaling Factor) asks that the factor times the
largest gradient stay below 65504, and Micikevicius et al. 2018 (section 3.2) see no harm in a large
one that does not overflow. Only some steps of one seed are seen here: within 30 steps on CIFAR-10
the largest gradient of dpn-small (batch size 32) varies by a factor of 2.2. Two more powers of two
are left for what was not seen."""


class Fate(StrEnum):
    """What becomes of a value that is scaled and rounded."""

    ZERO = "zero"  # it was zero before
    FLUSHED = "flushed"  # it was not, and is now
    SUBNORMAL = "subnormal"  # kept, with fewer digits than the format has
    NORMAL = "normal"
    OVERFLOWED = "overflowed"  # beyond the largest finite value, or inf or NaN before


class Kind(StrEnum):
    """Which gradients of a layer.

    ``OUTPUT`` is what the layer's backward pass begins with, the gradient of the loss by the
    layer's output; ``WEIGHT`` is what it leaves in the layer's parameters.
    """

    OUTPUT = "output"
    WEIGHT = "weight"


class Way(Explained):
    """Where the figures come from."""

    ROUNDED = (
        "rounded",
        "The gradients were computed in fp32, then scaled and rounded once to the format. Rounding "
        "in the forward pass, inside a layer's backward pass and from one layer to the next is not "
        "counted. The trainings compute in fp32 and round the gradients of each layer's output and "
        "weights. Under autocast (fp16-amp, bf16-amp), the weight "
        "gradients of convolutions, linear and recurrent layers, attention and PReLU are rounded, "
        "judged by the class of the module; those of other modules stay in fp32.",
    )
    TRAINED = (
        "trained",
        "The gradients are those that the precision itself computed, at each scale, from the "
        "weights of the fp32 training. A value counts as flushed where it is zero here and not in "
        "fp32. This includes values that ReLU sets to zero here and not in fp32; they are the same "
        "at every scale. After an overflow, inf and NaN spread to other layers and are counted "
        "there too.",
    )


@dataclass(frozen=True)
class Tally:
    """How many values met each fate."""

    zero: int = 0
    flushed: int = 0
    subnormal: int = 0
    normal: int = 0
    overflowed: int = 0

    def __add__(self, other: Tally) -> Tally:
        """Both together."""
        return Tally(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Tally)))

    def share(self, fate: Fate) -> float:
        """Of the values that are not zero by themselves, those of a fate; 0 where there are none.

        Zeros are left out because no scale changes them, and ReLU makes many.
        """
        values = self.flushed + self.subnormal + self.normal + self.overflowed
        count: int = getattr(self, fate.value)
        return count / values if values else 0.0


@dataclass(frozen=True)
class Gradients:
    """The values of one kind of gradient of one layer, at one step (from 1) and one scale."""

    step: int
    scale: float
    layer: str
    kind: Kind
    tally: Tally


@dataclass(frozen=True)
class ScaledTraining:
    """A training from the same start and with the same batches as all others of its case.

    Attributes:
        setting: a loss scale as a flag spells it; empty for fp32, which the others stand beside.
        losses: one a step; NaN where it was not finite.
        scales: the loss scale of each step.
        overflowed: whether the step's gradients did.
    """

    setting: str
    losses: tuple[float, ...]
    scales: tuple[float, ...]
    overflowed: tuple[bool, ...]

    @property
    def overflows(self) -> int:
        """Steps whose gradients overflowed; under a dynamic scale these were skipped."""
        return sum(self.overflowed)

    @property
    def first_overflow(self) -> int | None:
        """The first such step, from 1."""
        return next((i for i, bad in enumerate(self.overflowed, 1) if bad), None)


@dataclass(frozen=True)
class Overflow:
    """The first overflow at a scale: the step, from 1, and where the largest value was."""

    step: int
    where: str = ""


@dataclass(frozen=True)
class ScaleCase:
    """One precision, model and batch size: what each scale did.

    Attributes:
        steps: of the fp32 training that was looked at, and of each training.
        at: the steps, from 1, at which gradients were counted.
        layers: from the network's input to its output.
        scales: rising.
        overflows: the first overflow of each scale that had one.
        peaks: the largest gradient of each step in the fp32 training, unscaled; NaN if not finite.
        limit: the value from which on the format overflows, such as 65520.
    """

    model: str
    dataset: str
    precision: str
    batch_size: int
    lr: float
    seed: int
    device: str
    way: Way
    steps: int
    at: tuple[int, ...]
    layers: tuple[str, ...]
    scales: tuple[float, ...]
    overflows: Mapping[float, Overflow]
    peaks: tuple[float, ...]
    limit: float
    gradients: tuple[Gradients, ...] = field(repr=False)
    trainings: tuple[ScaledTraining, ...] = field(repr=False)

    @property
    def diverged(self) -> int | None:
        """The first step, from 1, at which the fp32 training itself was not finite."""
        fp32 = self.training("")
        steps = zip_longest(fp32.losses if fp32 else (), self.peaks, fillvalue=0.0)
        return next(
            (i for i, pair in enumerate(steps, 1) if not all(map(math.isfinite, pair))), None
        )

    @property
    def label(self) -> str:
        """For people: ``fp16, dpn-small, batch size 128``."""
        images = ", synthetic images" if self.dataset == "synthetic" else ""
        return f"{self.precision}, {self.model}, batch size {self.batch_size}{images}"

    @cached_property
    def _totals(self) -> Mapping[tuple[float, Kind, int], Tally]:
        totals: dict[tuple[float, Kind, int], Tally] = defaultdict(Tally)
        for row in self.gradients:
            totals[row.scale, row.kind, row.step] += row.tally
        return totals

    def share(self, fate: Fate, scale: float, kind: Kind) -> float:
        """Share of the values of all layers, at the step where it is largest."""
        return max(
            (
                tally.share(fate)
                for (s, k, _), tally in self._totals.items()
                if (s, k) == (scale, kind)
            ),
            default=0.0,
        )

    def lost(self, scale: float) -> float:
        """Share of the values flushed to zero, of the kind and step where it is largest."""
        return max(self.share(Fate.FLUSHED, scale, kind) for kind in Kind)

    def subnormal(self, scale: float) -> float:
        """Share of the values that lose digits, of the kind and step where it is largest."""
        return max(self.share(Fate.SUBNORMAL, scale, kind) for kind in Kind)

    def by_layer(self, fate: Fate, kind: Kind) -> Mapping[tuple[str, float], float]:
        """Share of each layer's values, by layer and scale, at the step where it is largest."""
        shares: dict[tuple[str, float], float] = {}
        for row in self.gradients:
            if row.kind is kind:
                key = row.layer, row.scale
                shares[key] = max(shares.get(key, 0.0), row.tally.share(fate))
        return shares

    def training(self, setting: str) -> ScaledTraining | None:
        """The training under a setting, if there was one."""
        return next((t for t in self.trainings if t.setting == setting), None)


@dataclass(frozen=True)
class ScaleMap:
    """What a folder holds."""

    folder: Path
    command: str
    started_at: str
    tolerance: float
    environment: Mapping[str, Any]
    cases: tuple[ScaleCase, ...]


# ------------------------------------------------------------------------------------------ judged


@dataclass(frozen=True)
class Window:
    """The scales that are safe, and the one to use.

    Attributes:
        low: the smallest safe scale; None where no scale is safe, ``high`` and ``use`` too.
        high: the largest.
        ceiling: the smallest scale that overflowed; None where none did.
        best: the share of values lost at the best scale that did not overflow.
        use: the recommended scale.
        narrow: whether ``use`` leaves less than `HEADROOM`.
        needed: whether a loss scale is needed at all.
        enough: the largest share that a safe scale may lose.
        starved: of each scale at which a layer loses too much, that layer and its share lost.
    """

    low: float | None = None
    high: float | None = None
    ceiling: float | None = None
    best: float = 0.0
    use: float | None = None
    narrow: bool = False
    needed: bool = True
    enough: float = 0.0
    starved: Mapping[float, tuple[str, float]] = field(default_factory=dict)


def find_window(case: ScaleCase, tolerance: float = TOLERANCE) -> Window:
    """The safe window of scales.

    The rule: a scale is safe where neither it nor any smaller one overflowed in any step that was
    looked at, and where neither it nor any larger one below the overflow loses too much: more than
    ``tolerance`` beyond the least share lost, or `LAYER_TOLERANCE` of one layer's gradients of a
    kind beyond the least share that these lose. To be used is the largest safe scale at which the
    largest gradient would not overflow if it were `HEADROOM` times as large, and which is at least
    as far below any scale that overflowed. Where no safe scale leaves that room, it is the largest
    up to the window's geometric middle. No scale is needed where the precision has none and a
    scale of 1 is safe. Of a training that diverges in fp32 nothing is known.
    """
    ceiling = min(case.overflows, default=None)
    held = [s for s in case.scales if ceiling is None or s < ceiling]
    if not held or case.diverged:
        return Window(ceiling=ceiling)
    best = min(map(case.lost, held))
    enough, starved = best + tolerance, _find_starved(case, held)
    safe: list[float] = []
    for scale in reversed(held):
        if case.lost(scale) > enough or scale in starved:
            # where the largest loses more, what is below it may be better; in the rounded way the
            # share lost only falls
            if safe:
                break
            continue
        safe.insert(0, scale)
    if not safe:  # in the trained way, where each scale starves a layer of its own
        return Window(ceiling=ceiling, best=best, enough=enough, starved=starved)
    largest = max(case.peaks, default=math.nan)
    roomy = [
        s
        for s in safe
        if s * HEADROOM * largest < case.limit and (ceiling is None or s * HEADROOM <= ceiling)
    ]
    middle = math.sqrt(safe[0] * safe[-1])
    use = roomy[-1] if roomy else max(s for s in safe if s <= middle)
    precision = PRECISIONS.get(case.precision)
    needed = (precision is None or precision.scales_loss) or not safe[0] <= 1 <= safe[-1]
    return Window(safe[0], safe[-1], ceiling, best, use, not roomy, needed, enough, starved)


def _find_starved(case: ScaleCase, held: Sequence[float]) -> dict[float, tuple[str, float]]:
    """The layer that loses most beyond its best, of each scale where that is too much."""
    starved: dict[float, tuple[str, float]] = {}
    most = dict.fromkeys(held, LAYER_TOLERANCE)
    for kind in Kind:
        lost = case.by_layer(Fate.FLUSHED, kind)
        # the weights' gradients of some stay in fp32
        known = [layer for layer in case.layers if any((layer, s) in lost for s in held)]
        for layer in known:
            shares = {s: lost.get((layer, s), 0.0) for s in held}
            best = min(shares.values())
            for scale, share in shares.items():
                if share - best > most[scale]:
                    most[scale], starved[scale] = share - best, (layer, share)
    return starved


# -------------------------------------------------------------------------------------------- told


def write_scale(scale: float) -> str:
    """A scale for people: ``128``, ``2^16``.

    >>> write_scale(128.0), write_scale(65536.0), write_scale(0.5), write_scale(3e4)
    ('128', '2^16', '0.5', '30000')
    """
    mantissa, exponent = math.frexp(scale)
    if mantissa == 0.5 and exponent > 10:
        return f"2^{exponent - 1}"
    return repr(scale).removesuffix(".0")


def write_share(share: float, limit: float = 0.0) -> str:
    """A share in per cent; what is not quite 0 or 100 is not written so.

    Args:
        limit: what is above this is written with as many digits as it takes to show it.

    >>> write_share(0.0), write_share(1e-7), write_share(0.0312), write_share(0.99999)
    ('0 %', '< 0.01 %', '3.1 %', '> 99.9 %')
    >>> write_share(0.0104), write_share(0.0104, 0.01)
    ('1 %', '1.04 %')
    """
    if 0 < share < 1e-4:
        return "< 0.01 %"
    if 0.999 < share < 1:
        return "> 99.9 %"
    digits = 2 if share < 0.01 else 1
    while share > limit and float(f"{100 * share:.{digits}f}") <= 100 * limit and digits < 6:
        digits += 1
    return f"{100 * share:.{digits}f}".rstrip("0").rstrip(".") + " %"


def summarize_scale_map(scales: ScaleMap) -> str:
    """A sentence or a few for each case, one case a line."""
    return "\n".join(_summarize(case, scales.tolerance) for case in scales.cases)


def _summarize(case: ScaleCase, tolerance: float) -> str:
    window, told = find_window(case, tolerance), []
    if case.diverged:
        return (
            f"{case.label}: training in fp32 itself diverged at step {case.diverged}, so nothing "
            "can be said of loss scales: use a smaller --lr."
        )
    if window.low is None or window.high is None or window.use is None:
        told.append(
            f"no scale is safe: {write_scale(case.scales[0])}, the smallest one tried, overflows "
            f"at {_overflow(case, case.scales[0])}; try smaller scales with --scales, or use "
            "bf16-amp"
            if case.scales[0] in case.overflows
            else f"no scale is safe: {_tell_lost(case, window, case.scales[0])}; try others with "
            "--scales, or use bf16-amp"
        )
        return f"{case.label}: {told[0]}."
    span = (
        f"scales from {write_scale(window.low)} to {write_scale(window.high)} are"
        if window.low < window.high
        else f"of those tried only the scale {write_scale(window.low)} is"
    )
    told.append(
        f"{span} safe: no overflow {_tell_seen(case)}, and at most "
        f"{write_share(case.lost(window.low))} of the gradient values are flushed to zero"
    )
    if not window.needed:
        told.append("No loss scale is needed")
    elif window.narrow:
        told.append(
            f"Use {write_scale(window.use)}; the window is narrow, so prefer a dynamic scale"
        )
    else:
        told.append(f"Use {write_scale(window.use)}")
    if window.needed and 1.0 in case.scales and case.subnormal(1.0) > case.subnormal(window.use):
        told.append(
            f"At {write_scale(window.use)}, {write_share(case.subnormal(window.use))} of the "
            "values are subnormal (kept with fewer digits); without a loss scale, "
            f"{write_share(case.subnormal(1.0))} are"
        )
    below = [s for s in case.scales if s < window.low]
    shown = [s for s in dict.fromkeys((*below[:1], 128.0, *below[-1:])) if s in below]
    losing = [_tell_lost(case, window, s) for s in sorted(shown)]
    told += [text[0].upper() + text[1:] for text in losing]
    if window.ceiling is not None:
        told.append(f"Scale {write_scale(window.ceiling)} overflows at {_overflow(case)}")
    return f"{case.label}: " + ". ".join(told) + "."


def _tell_lost(case: ScaleCase, window: Window, scale: float) -> str:
    """What a scale loses; of one layer, where that alone is too much."""
    lost = case.lost(scale)
    if lost <= window.enough and scale in window.starved:
        layer, share = window.starved[scale]
        return f"at scale {write_scale(scale)}, layer {layer} loses {write_share(share)}"
    return f"scale {write_scale(scale)} flushes {write_share(lost, window.enough)}"


def _tell_seen(case: ScaleCase) -> str:
    """The steps at which every scale was looked at for an overflow."""
    trained = {t.scales[0] for t in case.trainings if t.setting and not is_dynamic(t.setting)}
    if case.way is Way.ROUNDED or trained.issuperset(case.scales):
        return f"in {case.steps} steps"
    return f"at {_name_steps(case.at)}"


def _name_steps(steps: Sequence[int]) -> str:
    """For people: ``step 1``, ``steps 1, 5 and 20``."""
    *most, last = map(str, steps)
    return f"steps {', '.join(most)} and {last}" if most else f"step {last}"


def _overflow(case: ScaleCase, scale: float | None = None) -> str:
    first = case.overflows[min(case.overflows) if scale is None else scale]
    return f"step {first.step}" + (f" ({first.where})" if first.where else "")


def scale_map_tables(scales: ScaleMap) -> list[Table]:
    """The windows, then for each case its scales, its trainings and its layers that lose most."""
    tables = [_tabulate_windows(scales)]
    for number, case in enumerate(scales.cases, 1):
        name = f"-{number}" if len(scales.cases) > 1 else ""
        tables += [
            _tabulate_scales(case, find_window(case, scales.tolerance), name),
            _tabulate_trainings(case, name),
            _tabulate_layers(case, find_window(case, scales.tolerance), name),
        ]
    return tables


def _scale_cell(scale: float | None) -> Cell:
    return Cell(NOTHING) if scale is None else Cell(write_scale(scale), scale)


def _share_cell(share: float) -> Cell:
    return Cell(write_share(share), share)


def _tabulate_windows(scales: ScaleMap) -> Table:
    heads = (
        Head("precision", "precision", "number format", False),
        Head("model", "model", "network", False, wrap=True),
        Head("batch_size", "batch size", "images per step"),
        Head("low", "safe from", "smallest safe scale"),
        Head("high", "safe to", "largest safe scale"),
        Head("use", "use", "recommended scale"),
        Head("lost", "flushed at that scale", "share of gradient values rounded to zero", keep=4),
        Head("lost_at_1", "flushed at scale 1", "the same without a loss scale", keep=3),
        Head("ceiling", "overflows from", "smallest scale tried that overflowed", keep=5),
    )
    rows = []
    for case in scales.cases:
        window = find_window(case, scales.tolerance)
        lost = Cell(NOTHING) if window.use is None else _share_cell(case.lost(window.use))
        alone = _share_cell(case.lost(1.0)) if 1.0 in case.scales else Cell(NOTHING)
        rows.append(
            (
                Cell(case.precision),
                Cell(case.model),
                Cell(str(case.batch_size), case.batch_size),
                _scale_cell(window.low),
                _scale_cell(window.high),
                _scale_cell(window.use) if window.needed else Cell("none needed"),
                lost,
                alone,
                _scale_cell(window.ceiling),
            )
        )
    notes = [
        "Flushed: rounded to zero. Safe: this scale and all smaller ones never overflow, and it "
        f"flushes at most {write_share(scales.tolerance)} more of the values than the best scale, "
        f"and of no single layer more than {write_share(LAYER_TOLERANCE)} beyond its best scale. "
        f"Use: the largest safe scale at which gradients {HEADROOM} times as large would still "
        "not overflow.",
        *dict.fromkeys(case.way.meaning for case in scales.cases),
    ]
    return Table("scales", "Safe loss scales", heads, tuple(rows), tuple(notes))


def _judge(case: ScaleCase, window: Window, scale: float) -> str:
    if case.diverged:
        return "fp32 itself diverged"
    if window.ceiling is not None and scale >= window.ceiling:
        return "overflows" if scale in case.overflows else "above an overflow"
    if window.low is None or window.high is None or not window.low <= scale <= window.high:
        lost = case.lost(scale)
        if lost <= window.enough and scale in window.starved:
            return f"layer {window.starved[scale][0]} loses too much"
        # the column beside it may round to the tolerance
        exact = write_share(lost, window.enough)
        return "flushes too much" + (f": {exact}" if exact != write_share(lost) else "")
    return "safe, use this" if scale == window.use and window.needed else "safe"


def _tabulate_scales(case: ScaleCase, window: Window, name: str) -> Table:
    heads = (
        Head("scale", "scale", "loss scale"),
        Head("output_lost", "outputs flushed", "share rounded to zero", better="lower"),
        Head("output_subnormal", "outputs subnormal", "share kept with fewer digits", keep=5),
        Head("output_overflowed", "outputs overflow", "share beyond the largest value", keep=7),
        Head("weight_lost", "weights flushed", "share rounded to zero", better="lower"),
        Head("weight_subnormal", "weights subnormal", "share kept with fewer digits", keep=3),
        Head("weight_overflowed", "weights overflow", "share beyond the largest value", keep=7),
        Head("first_overflow", "first overflow", "step, from 1", keep=4),
        Head("judgement", "verdict", "what the rule makes of it", False, wrap=True),
    )
    fates = (Fate.FLUSHED, Fate.SUBNORMAL, Fate.OVERFLOWED)
    rows = []
    for scale in case.scales:
        first = case.overflows.get(scale)
        rows.append(
            (
                _scale_cell(scale),
                *(_share_cell(case.share(f, scale, k)) for k in Kind for f in fates),
                Cell(NOTHING) if first is None else Cell(f"step {first.step}", first.step),
                Cell(_judge(case, window, scale)),
            )
        )
    most = " Each share is that of the step where it is largest." if len(case.at) > 1 else ""
    notes = [
        "Share of the gradient values of all layers' outputs and of all layers' weights, at "
        f"{_name_steps(case.at)}. Values that are zero before scaling are left out.{most}",
        "Flushed: rounded to zero. Subnormal: kept with fewer digits. Overflow: beyond the largest "
        f"finite value; checked {_tell_seen(case)}. What a network keeps in fp32, such as "
        "BatchNorm's parameters, is not rounded.",
    ]
    return Table(
        f"scales-gradients{name}", f"Gradients by loss scale: {case.label}", heads, tuple(rows),
        tuple(notes),
    )  # fmt: skip


def _describe_trace(training: ScaledTraining) -> str:
    """Where the scale changed: ``2^16, 2^15 from step 2``."""
    told, before = [], None
    for step, scale in enumerate(training.scales, 1):
        if scale != before:
            told.append(write_scale(scale) + (f" from step {step}" if step > 1 else ""))
        before = scale
    shown = told if len(told) <= 5 else [*told[:3], "…", told[-1]]
    return ", ".join(shown)


def _name_setting(setting: str) -> str:
    try:
        return write_scale(float(setting))
    except ValueError:
        return setting or "none, in fp32"


def _tabulate_trainings(case: ScaleCase, name: str) -> Table:
    heads = (
        Head("setting", "loss scale", "static, or the rule of a dynamic one", False),
        Head("loss", f"loss at step {case.steps}", "of that step's batch", better="lower"),
        Head("difference", "minus fp32", "difference of that loss from the one in fp32", keep=6),
        Head("overflows", "steps with overflow", "skipped under a dynamic scale", keep=5),
        Head("first", "first overflow", "step, from 1", keep=4),
        Head("trace", "scale during training", "where it changed", False, wrap=True),
    )
    fp32 = case.training("")
    rows = []
    for training in case.trainings:
        loss = training.losses[-1]
        difference = loss - fp32.losses[-1] if fp32 else math.nan
        first = training.first_overflow
        rows.append(
            (
                Cell(_name_setting(training.setting)),
                Cell(f"{loss:.4f}", loss) if math.isfinite(loss) else Cell("not finite"),
                Cell(f"{difference:+.4f}", difference)
                if training.setting and math.isfinite(difference)
                else Cell(NOTHING),
                Cell(str(training.overflows), training.overflows),
                Cell(NOTHING) if first is None else Cell(f"step {first}", first),
                Cell(_describe_trace(training) if training.setting else NOTHING),
            )
        )
    notes = (
        "All trainings start from the same weights and use the same batches. A static scale skips "
        "no step: after an overflow the weights are inf or NaN.",
    )
    return Table(
        f"scales-trainings{name}", f"Training by loss scale: {case.label}", heads, tuple(rows),
        notes,
    )  # fmt: skip


MOST_LAYERS = 8
"""Layers that the table names; the CSV file has all."""


def _tabulate_layers(case: ScaleCase, window: Window, name: str) -> Table:
    shown = [s for s in dict.fromkeys((1.0, 128.0, window.use)) if s in case.scales]
    if not shown:
        shown = [case.scales[0]]
    heads = (
        Head("layer", "layer", "its name in the network", False),
        Head("kind", "gradient", "of the layer's output or its weights", False),
        *(
            Head(
                f"lost_{s:g}",
                f"flushed at {write_scale(s)}",
                "rounded to zero",
                keep=9 if s == shown[-1] else 4,
            )
            for s in shown
        ),
    )
    lost = {kind: case.by_layer(Fate.FLUSHED, kind) for kind in Kind}
    pairs = [
        (layer, kind) for layer in case.layers for kind in Kind if (layer, shown[0]) in lost[kind]
    ]
    worst = sorted(
        pairs, key=lambda pair: [lost[pair[1]][pair[0], s] for s in reversed(shown)], reverse=True
    )[:MOST_LAYERS]
    rows = tuple(
        (Cell(layer), Cell(kind.value), *(_share_cell(lost[kind][layer, s]) for s in shown))
        for layer, kind in worst
    )
    notes = (
        f"The {len(rows)} of {len(pairs)} gradients with the largest shares in the last column; "
        f"equal ones are sorted by the column before it. {GRADIENTS} has all.",
    )
    return Table(
        f"scales-layers{name}", f"Layers with the most values flushed to zero: {case.label}",
        heads, rows, notes,
    )  # fmt: skip


# -------------------------------------------------------------------------------------------- read


def read_scale_map(folder: Path) -> ScaleMap | None:
    """Read a map; None where the folder holds none.

    Raises:
        UsageError: it holds one that cannot be read, naming the file.
    """
    file = folder / MAP
    if not file.is_file():
        return None
    try:
        head = json.loads(file.read_text(encoding="utf-8"))
        if head["version"] != VERSION:
            raise UsageError(
                f"{file}: version {head['version']}, this reads {VERSION}; run bench.scales again"
            )
        file = folder / GRADIENTS
        gradients = {n: _read_gradients(rows) for n, rows in _read_rows(file).items()}
        file = folder / TRAININGS
        trainings = {n: _read_trainings(rows) for n, rows in _read_rows(file).items()}
        file = folder / MAP
        return ScaleMap(
            folder,
            head["command"],
            head["started_at"],
            head["tolerance"],
            head["environment"],
            tuple(
                _read_case(case, gradients.get(str(number), ()), trainings.get(str(number), ()))
                for number, case in enumerate(head["cases"], 1)
            ),
        )
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}; give a folder of bench.scales") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{file} is not as bench.scales writes it ({type(error).__name__}: {error}); "
            "run bench.scales again"
        ) from error


Row = dict[str, str]


def _read_rows(file: Path) -> dict[str, list[Row]]:
    """By case, as the first column numbers them."""
    groups: dict[str, list[Row]] = defaultdict(list)
    with file.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines, strict=True):
            groups[row["case"]].append(row)
    return groups


def _read_gradients(rows: Sequence[Row]) -> tuple[Gradients, ...]:
    return tuple(
        Gradients(
            int(row["step"]),
            float(row["scale"]),
            row["layer"],
            Kind(row["gradient"]),
            Tally(*(int(row[f.name]) for f in fields(Tally))),
        )
        for row in rows
    )


def _read_trainings(rows: Sequence[Row]) -> tuple[ScaledTraining, ...]:
    settings: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        settings[row["loss_scale"]].append(row)
    return tuple(
        ScaledTraining(
            setting,
            tuple(float(row["loss"] or "nan") for row in steps),
            tuple(float(row["scale"]) for row in steps),
            tuple(row["overflowed"] == "on" for row in steps),
        )
        for setting, steps in settings.items()
    )


def _read_case(
    head: Mapping[str, Any],
    gradients: tuple[Gradients, ...],
    trainings: tuple[ScaledTraining, ...],
) -> ScaleCase:
    parsed = {
        "way": Way(head["way"]),
        "at": tuple(head["at"]),
        "layers": tuple(head["layers"]),
        "scales": tuple(head["scales"]),
        "overflows": {float(s): Overflow(**first) for s, first in head["overflows"].items()},
        "peaks": tuple(math.nan if peak is None else peak for peak in head["peaks"]),
    }
    return ScaleCase(**{**head, **parsed}, gradients=gradients, trainings=trainings)


# ------------------------------------------------------------------------------------------- drawn

INK, OVERFLOW, ABSENT = "#15181c", "#a8195c", "#d9dce1"
LEAST = 0.01
"""Per cent: the lowest end of the colours."""
MOST_PANELS = 4
"""Cases of one figure."""


def draw_scale_map(scales: ScaleMap) -> str:
    """The map as SVG: a row of panels a case, layers by scales."""
    return _draw(scales, "svg").decode()


def rasterize_scale_map(scales: ScaleMap) -> bytes:
    """The same as PNG."""
    return _draw(scales, "png")


def _draw(scales: ScaleMap, format: str) -> bytes:
    import io

    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: Any = {
        "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture everywhere
        "font.size": 9,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "text.parse_math": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "scales",
    }
    cases = scales.cases[:MOST_PANELS]
    heights = [min(max(2.6, 0.17 * len(case.layers) + 1.3), 9.0) for case in cases]
    file = io.BytesIO()
    with mpl.rc_context(style):
        canvas = Figure(figsize=(10, sum(heights)), layout="constrained")
        parts = canvas.subfigures(len(cases), 1, height_ratios=heights, squeeze=False)
        for part, case in zip(parts[:, 0], cases, strict=True):
            _draw_case(part, case, find_window(case, scales.tolerance))
        metadata = {"Date": None} if format == "svg" else None
        canvas.savefig(file, format=format, dpi=130, metadata=metadata, facecolor="white")
    return file.getvalue()


def _draw_case(part: Any, case: ScaleCase, window: Window) -> None:
    import seaborn as sns
    from matplotlib.colors import ListedColormap, LogNorm
    from matplotlib.patches import Patch

    span = f"safe scales {_scale_cell(window.low).text} to {_scale_cell(window.high).text}"
    use = f"use {_scale_cell(window.use).text} (▼)" if window.needed else "none needed"
    part.suptitle(
        f"{case.label}: {span if window.use else 'no scale is safe'}"
        f"{', ' + use if window.use else ''}\nColours: {_name_steps(case.at)}. "
        f"Between the dashed lines: the safe scales (overflows checked {_tell_seen(case)}).",
        fontsize=10, x=0.01, ha="left",
    )  # fmt: skip
    axes = part.subplots(1, len(Kind), sharey=True)
    for ax, kind in zip(axes, Kind, strict=True):
        lost = case.by_layer(Fate.FLUSHED, kind)
        over = case.by_layer(Fate.OVERFLOWED, kind)
        # on a logarithmic scale, whose lowest colour stands for none at all too
        grid = [
            [max(100 * lost.get((n, s), math.nan), LEAST) for s in case.scales] for n in case.layers
        ]
        fits = [[not over.get((n, s), 0.0) for s in case.scales] for n in case.layers]
        sns.heatmap(
            grid, ax=ax, norm=LogNorm(LEAST, 100), cmap="Blues", cbar=kind is Kind.WEIGHT,
            cbar_kws={"label": "values flushed to zero (%)", "format": "%g"}, rasterized=True,
        )  # fmt: skip
        if not all(map(all, fits)):
            sns.heatmap(
                [[1.0] * len(row) for row in fits], ax=ax, mask=_mask(fits),
                cmap=ListedColormap([OVERFLOW]), cbar=False, rasterized=True,
            )  # fmt: skip
        _mark_window(ax, case.scales, window)
        ax.set_facecolor(ABSENT)
        every = math.ceil(len(case.layers) / 45)
        shown = range(0, len(case.layers), every)
        ax.set_yticks([i + 0.5 for i in shown], [case.layers[i] for i in shown], fontsize=8)
        apart = math.ceil(len(case.scales) / 13)
        columns = range(0, len(case.scales), apart)
        ax.set_xticks(
            [i + 0.5 for i in columns], [write_scale(case.scales[i]) for i in columns],
            rotation=60, fontsize=8,
        )  # fmt: skip
        ax.set_xlabel("loss scale")
        ax.set_title(f"gradients of {kind.value}s", fontsize=9, pad=14)
    axes[0].set_ylabel("layer, from input to output")
    patches = (
        Patch(color=OVERFLOW, label="some values overflow"),
        Patch(color=ABSENT, label="stays in fp32"),
    )
    part.legend(handles=patches, fontsize=8.5, loc="outside lower left", ncols=2, frameon=False)


def _mask(rows: Sequence[Sequence[bool]]) -> Any:
    import numpy as np

    return np.array(rows, dtype=bool)


def _mark_window(ax: Any, scales: Sequence[float], window: Window) -> None:
    """Lines around the safe scales, and a mark over the one to use."""
    if window.low is None or window.high is None or window.use is None:
        return
    for edge in (scales.index(window.low), scales.index(window.high) + 1):
        ax.axvline(edge, color=INK, linewidth=1.4, linestyle=(0, (4, 2)), clip_on=False)
    if window.needed:
        ax.annotate("▼", (scales.index(window.use) + 0.5, 1.0), xycoords=("data", "axes fraction"),
                    ha="center", va="bottom", fontsize=9)  # fmt: skip
