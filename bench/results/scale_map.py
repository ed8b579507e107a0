"""The loss-scale map that `python -m bench.scales` measures: its parts, judged, and
its file.

A map says, for each precision, what a range of loss scales does to the gradients of a training.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

from bench.base.errors import UsageError
from bench.base.plain import read_value
from bench.base.text import replace_file
from bench.schema.precision import PRECISIONS

TOLERANCE = 0.01
"""A scale is large enough if it loses at most this share of the gradient values beyond the share
lost at the best scale that does not overflow. This is a choice: half the values of a layer may lie
below the range of fp16 without harm (Micikevicius et al. 2018, arXiv:1710.03740, figure 3), so the
training loss after the same steps is shown beside it."""

LAYER_TOLERANCE = 0.5
"""A scale is large enough only if no layer loses more than this share of its values beyond the
share lost at its best scale: over all layers, a large layer hides a small one that loses
everything. Half may be lost without harm (Micikevicius et al. 2018, figure 3)."""

HEADROOM = 8
"""At the recommended scale, gradients this many times the largest seen would not overflow.

"Train With Mixed Precision" (NVIDIA, Choosing A Scaling Factor) asks that the factor times the
largest gradient stay below 65504, and Micikevicius et al. 2018 (section 3.2) see no harm in a large
one that does not overflow. Only some steps of one seed are observed here: within 30 steps on
CIFAR-10 the largest gradient of dpn-small (batch size 32) varies by a factor of 2.2. Two more
powers of two are left for the rest."""


class Fate(StrEnum):
    ZERO = "zero"  # was zero before rounding
    FLUSHED = "flushed"  # became zero
    SUBNORMAL = "subnormal"  # kept, with fewer digits than the format has
    NORMAL = "normal"
    OVERFLOWED = "overflowed"  # beyond the largest finite value, or inf or NaN before


class GradientKind(StrEnum):
    """Which gradients of a layer: ``OUTPUT`` is the gradient of the loss with respect to the
    layer's output, where its backward pass begins; ``WEIGHT`` is that of its parameters."""

    OUTPUT = "output"
    WEIGHT = "weight"


HOW = (
    "The gradients were computed in fp32, then scaled and rounded once to the format. Rounding in "
    "the forward pass, inside a layer's backward pass and from one layer to the next is not "
    "counted. The trainings compute in the precision itself on a GPU, and in fp32 with gradients "
    "rounded so on a CPU. Under autocast (fp16-amp, bf16-amp), the weight gradients of "
    "convolutions, linear and recurrent layers, attention and PReLU are rounded, judged by the "
    "class of the module; those of other modules stay in fp32."
)
"""How a map is made, in words."""


@dataclass(frozen=True)
class Tally:
    zero: int = 0
    flushed: int = 0
    subnormal: int = 0
    normal: int = 0
    overflowed: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Tally)))

    def share(self, fate: Fate) -> float:
        """Return the share of a fate among the values that are not zero by themselves; 0 if there
        are none. No scale changes zeros, and ReLU makes many."""
        values = self.flushed + self.subnormal + self.normal + self.overflowed
        count: int = getattr(self, fate.value)
        return count / values if values else 0.0


@dataclass(frozen=True)
class Gradients:
    """The values of one kind of gradient of one layer, at one step (from 1) and one scale."""

    step: int
    scale: float
    layer: str
    kind: GradientKind
    tally: Tally


@dataclass(frozen=True)
class ScaledTraining:
    """A training from the same start and with the same batches as all others of its case.

    Attributes:
        setting: a loss scale as a flag spells it; empty for fp32, the reference of the others.
        losses: one per step; NaN where it was not finite.
        overflowed: for each step, whether its gradients overflowed.
    """

    setting: str
    losses: tuple[float, ...]
    scales: tuple[float, ...]
    overflowed: tuple[bool, ...]


@dataclass(frozen=True)
class ScaleCase:
    """One precision, model and batch size: what each scale did.

    Attributes:
        steps: number of steps of the observed fp32 training, and of each training.
        at: the steps, from 1, at which gradients were counted.
        layers: from the network's input to its output.
        scales: ascending.
        overflows: the first step, from 1, at which each scale overflowed that did.
        peaks: the largest gradient of each step in the fp32 training, unscaled; NaN if not finite.
        limit: the smallest value that overflows in the format, such as 65520.
    """

    model: str
    dataset: str
    precision: str
    batch_size: int
    lr: float
    seed: int
    device: str
    steps: int
    at: tuple[int, ...]
    layers: tuple[str, ...]
    scales: tuple[float, ...]
    overflows: Mapping[float, int]
    peaks: tuple[float, ...]
    limit: float
    gradients: tuple[Gradients, ...] = field(default=(), repr=False)
    trainings: tuple[ScaledTraining, ...] = field(default=(), repr=False)

    @property
    def diverged(self) -> int | None:
        """Return the first step, from 1, at which the fp32 training itself was not finite."""
        fp32 = self.training("")
        steps = zip_longest(fp32.losses if fp32 else (), self.peaks, fillvalue=0.0)
        return next(
            (i for i, pair in enumerate(steps, 1) if not all(map(math.isfinite, pair))), None
        )

    @property
    def label(self) -> str:
        images = ", synthetic images" if self.dataset == "synthetic" else ""
        return f"{self.precision}, {self.model}, batch size {self.batch_size}{images}"

    @cached_property
    def _totals(self) -> Mapping[tuple[float, GradientKind, int], Tally]:
        totals: dict[tuple[float, GradientKind, int], Tally] = defaultdict(Tally)
        for row in self.gradients:
            totals[row.scale, row.kind, row.step] += row.tally
        return totals

    def share(self, fate: Fate, scale: float, kind: GradientKind) -> float:
        """Return the share of values of all layers, at the step where it is largest."""
        totals = self._totals.items()
        tallies = (tally for (s, k, _), tally in totals if (s, k) == (scale, kind))
        return max((tally.share(fate) for tally in tallies), default=0.0)

    def lost(self, scale: float) -> float:
        return max(self.share(Fate.FLUSHED, scale, kind) for kind in GradientKind)

    def training(self, setting: str) -> ScaledTraining | None:
        return next((t for t in self.trainings if t.setting == setting), None)


@dataclass(frozen=True)
class ScaleMap:
    folder: Path
    command: str
    started_at: str
    tolerance: float
    environment: Mapping[str, Any]
    cases: tuple[ScaleCase, ...]


@dataclass(frozen=True)
class Window:
    """The safe scales, and the recommended one.

    Attributes:
        low, high: the smallest and largest safe scale; like ``use``, None if none is safe.
        use: the recommended scale.
        narrow: whether it leaves less than `HEADROOM`.
        needed: whether a loss scale is needed at all.
        verdicts: what the rule makes of each scale, in words.
    """

    low: float | None = None
    high: float | None = None
    use: float | None = None
    narrow: bool = False
    needed: bool = True
    verdicts: Mapping[float, str] = field(default_factory=dict)


SAFE = "safe"


def find_window(case: ScaleCase, tolerance: float = TOLERANCE) -> Window:
    """Find the window of safe scales.

    Safe are the highest consecutive scales that lose little enough, below the smallest scale that
    overflowed in any observed step: a scale may lose at most ``tolerance`` beyond the least share
    lost, and no layer's gradients of a kind more than `LAYER_TOLERANCE` beyond their least share
    lost. The recommended scale is the largest safe one at which gradients `HEADROOM` times the
    largest would not overflow, and which is at least that factor below any scale that overflowed.
    If no safe scale leaves that room, it is the largest up to the geometric middle of the window.
    No scale is needed if the precision scales no loss and a scale of 1 is safe. If fp32 diverges,
    nothing is known.
    """
    if case.diverged:
        return Window(verdicts=dict.fromkeys(case.scales, "fp32 itself diverged"))
    ceiling = min(case.overflows, default=math.inf)
    verdicts = dict.fromkeys(case.scales, "overflows")
    finite = [s for s in case.scales if s < ceiling]
    enough = min(map(case.lost, finite), default=0.0) + tolerance
    starved = _find_starved(case, finite)
    safe: list[float] = []
    for scale in reversed(finite):
        if case.lost(scale) > enough:
            verdicts[scale] = "flushes too much"
        elif scale in starved:
            verdicts[scale] = f"layer {starved[scale]} loses too much"
        elif safe and safe[0] != case.scales[case.scales.index(scale) + 1]:
            # with rounding alone, the share lost only falls as the scale grows
            verdicts[scale] = "below one that loses too much"
        else:
            verdicts[scale] = SAFE
            safe.insert(0, scale)
    if not safe:
        return Window(verdicts=verdicts)
    largest = max(case.peaks, default=math.nan)
    roomy = [s for s in safe if s * HEADROOM * largest < case.limit and s * HEADROOM <= ceiling]
    middle = math.sqrt(safe[0] * safe[-1])
    use = roomy[-1] if roomy else max(s for s in safe if s <= middle)
    precision = PRECISIONS.get(case.precision)
    needed = (precision is None or precision.scales_loss) or not safe[0] <= 1 <= safe[-1]
    return Window(safe[0], safe[-1], use, not roomy, needed, verdicts)


def _find_starved(case: ScaleCase, scales: Sequence[float]) -> dict[float, str]:
    """Return, for each scale that starves a layer, the one losing most beyond its best scale."""
    lost: dict[tuple[str, GradientKind], dict[float, float]] = {}
    for row in case.gradients:
        # by the step that loses most; what is not counted at a scale is not lost there
        shares = lost.setdefault((row.layer, row.kind), dict.fromkeys(scales, 0.0))
        if row.scale in shares:
            shares[row.scale] = max(shares[row.scale], row.tally.share(Fate.FLUSHED))
    starved: dict[float, str] = {}
    most = dict.fromkeys(scales, LAYER_TOLERANCE)
    for (layer, _), shares in lost.items():
        best = min(shares.values(), default=0.0)
        for scale, share in shares.items():
            if share - best > most[scale]:
                most[scale], starved[scale] = share - best, layer
    return starved


# ------------------------------------------------------------------------------------------ on disk


MAP = "scales.json"
"""The file of a map: what was asked for, where it ran, counts of gradient values, and losses.
Counts and trainings are rows, of the fields of their classes; what is no number is ``NaN``."""

VERSION = 3
"""The version of this file; a reader refuses any other."""


def read_scale_map(folder: Path) -> ScaleMap | None:
    """Read a map; None if the folder holds none. Raises UsageError: it cannot be read."""
    if not (folder / MAP).is_file():
        return None
    try:
        document = json.loads((folder / MAP).read_text(encoding="utf-8"))
        if (version := document.pop("version")) != VERSION:
            raise ValueError(f"version {version}, this reads {VERSION}")
        cases = read_value(tuple[ScaleCase, ...], document.pop("cases"))
        return ScaleMap(folder, cases=cases, **document)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{folder}: {MAP} is not as bench.scales writes it ({type(error).__name__}: {error}); "
            "run bench.scales again"
        ) from error


def write_map(scales: ScaleMap) -> None:
    """Write all cases measured so far; the file is replaced whole. Raises UsageError: the folder
    cannot be written."""
    document = {"version": VERSION, **vars(scales)}
    del document["folder"]
    document["cases"] = [{f.name: getattr(c, f.name) for f in fields(c)} for c in scales.cases]
    try:
        scales.folder.mkdir(parents=True, exist_ok=True)
        replace_file(scales.folder / MAP, json.dumps(document, default=astuple) + "\n")
    except OSError as error:
        raise UsageError(f"--out {scales.folder}: {error.strerror}; choose another") from error
