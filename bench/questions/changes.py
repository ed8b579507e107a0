"""What each change does, all else equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from bench.case import AXES
from bench.limits import MIN_REPEATS, STEADY
from bench.questions.effects import Effect
from bench.questions.material import Material
from bench.render.cells import ESTIMATE, iterate, name_case, write_ratio, write_signed
from bench.render.model import NOTHING, Cell
from bench.render.section import Column, Section, Sheet, set_off
from bench.study import axes
from bench.study.axes import name_axis
from bench.study.estimate import TIME, Estimate
from bench.verdict import MIN_SEEDS, Verdict

if TYPE_CHECKING:
    import pandas as pd

MOST_ROWS = 100
"""Changes that are shown."""

MIXED = "mixed"
"""The verdict on a change that makes some cases faster and others not."""


def _tell_effects(found: Material) -> Iterator[Sheet]:
    effects = found.effects
    columns: list[Column[Effect]] = [
        Column("change", "change", "what changes, all else equal", _write_change,
               wrap=True),
        Column("speed", "speed", "epoch time before over after, geometric mean",
               _of_time(_write_speed), better="higher"),
        Column("verdict", "verdict", f"against a margin of {100 * STEADY:.0f} %",
               _of_time(lambda effect, time:
                        MIXED if time.mixed else TIME.word(time.ratio.judge(STEADY))),
               number=False),
        Column("interval", "95 % interval", "of the speed over these pairs",
               _of_time(lambda effect, time: _write_ends(time.ratio.low, time.ratio.high)), keep=8),
        Column("range", "range of pairs", "speed of the pairs",
               _of_time(lambda effect, time: _write_ends(time.lowest, time.highest)
                        if time.pairs > 1 else None), keep=7),
        Column("pairs", "pairs", "how many pairs of cases differ in that alone", _write_pairs,
               keep=8),
        Column("over", "over", "the settings at which it is compared", lambda effect: effect.over,
               keep=8, wrap=True),
        Column("memory", "memory", "change of the peak",
               lambda effect: _write_percent(effect, effect.memory), better="lower", keep=6),
        Column("energy", "energy", "change of an epoch's",
               lambda effect: _write_percent(effect, effect.energy, ESTIMATE * effect.estimated),
               better="lower", keep=4),
        Column("loss", "loss", "difference of the training loss", _write_loss, better="lower",
               keep=5),
        Column("doubts", "remarks", "what speaks against a case of these",
               lambda effect: ", ".join([*effect.doubts, *_tell_ends(effect.time, found.cases)]),
               keep=8, wrap=True),
    ]  # fmt: skip
    starts = set_off(effects, lambda effect: effect.axis)
    yield Sheet(
        "What each change does, all else equal",
        columns,
        effects,
        _note_effects(effects),
        starts if len(starts) < len(effects) else {},
        most=MOST_ROWS,
        file="--format json",
        empty=("", NOTHING, TIME.word(Verdict.NONE)),
    )


def _of_time(
    say: Callable[[Effect, Estimate], Cell | str | None],
) -> Callable[[Effect], Cell | str | None]:
    """What there is to say of a change of the epoch time, if that has one."""

    def write(effect: Effect) -> Cell | str | None:
        known = effect.time is not None and effect.time.ratio.value
        return say(effect, effect.time) if effect.time is not None and known else None

    return write


def _write_change(effect: Effect) -> Cell:
    change = f"{name_axis(effect.axis)}: {effect.before} → {effect.after}"
    return Cell(change, change)


def _write_speed(effect: Effect, time: Estimate) -> Cell:
    speed = 1 / (time.ratio.value or 1)
    return Cell(f"{ESTIMATE * effect.estimated}{write_ratio(speed)}×", speed)


def _write_ends(low: float | None, high: float | None) -> str | None:
    """The ends of a ratio of times, as those of a speed."""
    if low is None or high is None:
        return None
    return f"{write_ratio(1 / high)}–{write_ratio(1 / low)}"


def _count_pairs(effect: Effect) -> int:
    return effect.time.pairs if effect.time else len(effect.pairs)


def _write_pairs(effect: Effect) -> Cell:
    pairs, every = _count_pairs(effect), len(effect.pairs)
    return Cell(f"{pairs} of {every}" if pairs < every else str(pairs), pairs)


def _tell_pairs(effect: Effect, estimate: Estimate) -> str:
    """How many of the pairs a number is of, where these are not those of the row."""
    same = estimate.pairs == _count_pairs(effect)
    return "" if same else f" ({estimate.pairs} of {len(effect.pairs)})"


def _write_percent(effect: Effect, estimate: Estimate | None, mark: str = "") -> Cell | None:
    if estimate is None or estimate.ratio.value is None:
        return None
    change = estimate.ratio.value - 1
    return Cell(f"{mark}{write_signed(100 * change, 1)} %{_tell_pairs(effect, estimate)}", change)


def _write_loss(effect: Effect) -> Cell | None:
    if (loss := effect.loss) is None:
        return None
    reach = f" ±{loss.reach:.3f}" if loss.reach is not None else ""
    text = f"{write_signed(loss.difference, 3)}{reach}{_tell_pairs(effect, loss)}"
    return Cell(text, loss.difference)


def _tell_ends(time: Estimate | None, cases: pd.DataFrame) -> Iterator[str]:
    """Name the pairs between which a mixed effect lies: ``1.00× at fp32, 1.11× at bf16-amp``."""
    if time is None or not time.mixed:
        return
    after = cases[cases["cell"].isin([b for _, b in time.cells])]
    named = [axis for axis in axes.find_varying(after) if axis in AXES]
    rows = {row.cell: row for row in iterate(after[after["cell"].isin(time.ends)])}
    fast, slow = time.ends
    for ratio, cell in ((time.highest, slow), (time.lowest, fast)):
        place = name_case(rows[cell], named) or "the other machine"
        yield f"{write_ratio(1 / ratio)}× at {place}"


def _note_effects(effects: Sequence[Effect]) -> Iterator[str]:
    """How to read the table, and what is missing for a verdict."""
    yield (
        "Speed: epoch time before the change over that after it, geometric mean over the pairs of "
        "cases that differ in it alone. Precisions are compared at their default loss scale, or "
        "the commonest."
    )
    if any(effect.over for effect in effects):
        yield (
            "Over: at which settings, where changes of one kind differ in them. Changes from one "
            "value are compared at those that all of them have."
        )
    fewer = [e for e in effects if e.axis in AXES and e.time and e.time.pairs < len(e.pairs)]
    if fewer and not fewer[0].apart:
        both = f"{fewer[0].axis}={fewer[0].before},{fewer[0].after}"
        yield f"--where {both} compares these two at all that both have."
    if any(effect.apart for effect in effects):
        yield (
            "Changes from one value that are over different settings have none in common; do not "
            "rank them."
        )
    times = [effect.time for effect in effects if effect.time]
    if any(time.ratio.p is not None for time in times):
        yield (
            "Interval: 95 %, of the mean over these pairs (Welch). Verdict: against a margin of "
            f"{100 * STEADY:.0f} %, p adjusted for all changes by Holm. python -m bench.compare "
            "RESULTS --axis AXIS BEFORE AFTER judges each pair, by the ratio of times after over "
            "before."
        )
    if any(time.mixed for time in times):
        yield "Mixed: pairs differ in their verdicts; the remarks name the two ends."
    if any(
        time.ratio.value is not None and time.ratio.p is None and not time.ratio.exact
        for time in times
    ):
        yield f"A verdict needs {MIN_REPEATS} repeats of each case; use --repeats {MIN_REPEATS}."
    losses = [effect.loss for effect in effects if effect.loss]
    if any(loss.reach is None for loss in losses):
        yield (
            f"A difference of loss without ± rests on fewer than {MIN_SEEDS} seeds and may be "
            f"chance; use --repeats {MIN_SEEDS}."
        )


EFFECTS = Section("effects", "What does each change do?", _tell_effects)
