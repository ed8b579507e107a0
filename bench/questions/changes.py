"""The tables of changes: what each does, whether it learns as well, what it costs at the start."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from bench.case import AXES
from bench.limits import MIN_REPEATS, STEADY
from bench.questions.effects import Effect
from bench.questions.learning import MARGIN, Lesson
from bench.questions.startup import PREPARING, Price
from bench.record import BESIDE, COLUMNS
from bench.render.cells import (
    ESTIMATE,
    Row,
    iterate,
    name_case,
    number_cell,
    whole_cell,
    write_ratio,
)
from bench.render.model import NOTHING, Cell, Head, Table
from bench.study import axes
from bench.study.axes import MACHINE, Machines, name_axis
from bench.study.estimate import TIME, Estimate
from bench.text import count, write_number
from bench.verdict import MIN_SEEDS, Verdict

if TYPE_CHECKING:
    import pandas as pd

MOST_EFFECTS = 100
"""Changes that are shown; --format json has them all."""

MOST_PRICES = 16
"""Pairs of cases of which the costs of starting up are shown."""


# ---------------------------------------------------------------------------------------- effects


def tabulate_effects(effects: Sequence[Effect], cases: pd.DataFrame) -> Iterator[Table]:
    """One row a change of one axis.

    Args:
        cases: by whose ``cell`` the effects name them.
    """
    if not effects:
        return
    heads = (
        Head("change", "change", "what changes, all else equal", False, wrap=True),
        Head("speed", "speed", "epoch time before over after, geometric mean", better="higher"),
        Head("verdict", "verdict", f"against a margin of {100 * STEADY:.0f} %", False),
        Head("interval", "95 % interval", "of the speed over these pairs", keep=8),
        Head("range", "range of pairs", "speed of the pairs", keep=7),
        Head("pairs", "pairs", "how many pairs of cases differ in that alone", keep=8),
        Head("over", "over", "the settings at which it is compared", False, keep=8, wrap=True),
        Head("memory", "memory", "change of the peak", better="lower", keep=6),
        Head("energy", "energy", "change of an epoch's", better="lower", keep=4),
        Head("loss", "loss", "difference of the training loss", better="lower", keep=5),
        Head("doubts", "remarks", "what speaks against a case of these", False, keep=8, wrap=True),
    )
    rows = tuple(_write_effect(effect, cases) for effect in effects)
    starts = [i for i in range(1, len(effects)) if effects[i].axis != effects[i - 1].axis]
    several = len(starts) + 1 < len(effects)
    table = Table(
        "effects",
        "What each change does, all else equal",
        heads,
        rows,
        tuple(_note_effects(effects)),
        {start: "" for start in starts if several and start < MOST_EFFECTS},
    ).drop_empty(("", NOTHING, TIME.word(Verdict.NONE)))
    yield replace(table, rows=table.rows[:MOST_EFFECTS])


def _write_effect(effect: Effect, cases: pd.DataFrame) -> tuple[Cell, ...]:
    mark = ESTIMATE if effect.estimated else ""
    time, every = effect.time, len(effect.pairs)
    pairs = time.pairs if time else every

    def tell_pairs(estimate: Estimate | None) -> str:
        """How many of the pairs a number is of, where these are not those of the row."""
        return f" ({estimate.pairs} of {every})" if estimate and estimate.pairs != pairs else ""

    change = f"{name_axis(effect.axis)}: {effect.before} → {effect.after}"
    remarks = [*effect.doubts, *([_tell_ends(time, cases)] if time and time.mixed else [])]
    return (
        Cell(change, change),
        *(_write_speed(time, mark) if time and time.ratio.value else [Cell(NOTHING)] * 4),
        Cell(f"{pairs} of {every}" if pairs < every else str(pairs), pairs),
        Cell(effect.over),
        _write_percent(effect.memory, tell_pairs(effect.memory)),
        _write_percent(effect.energy, tell_pairs(effect.energy), mark),
        _write_difference(effect.loss, tell_pairs(effect.loss)),
        Cell(", ".join(remarks)),
    )


def _write_speed(time: Estimate, mark: str) -> Iterator[Cell]:
    ratio = time.ratio
    assert ratio.value is not None
    yield Cell(f"{mark}{write_ratio(1 / ratio.value)}×", 1 / ratio.value)
    yield Cell(MIXED if time.mixed else TIME.word(ratio.judge(STEADY)))
    if ratio.low is None or ratio.high is None:
        yield Cell(NOTHING)
    else:
        yield Cell(f"{write_ratio(1 / ratio.high)}–{write_ratio(1 / ratio.low)}")
    several = time.pairs > 1
    ends = f"{write_ratio(1 / time.highest)}–{write_ratio(1 / time.lowest)}"
    yield Cell(ends if several else NOTHING)


MIXED = "mixed"
"""The verdict on a change that makes some cases faster and others not."""


def _tell_ends(time: Estimate, cases: pd.DataFrame) -> str:
    """Name the pairs between which the effect lies: ``1.00× at fp32, 1.11× at bf16-amp``."""
    after = cases[cases["cell"].isin([b for _, b in time.cells])]
    named = [axis for axis in axes.find_varying(after) if axis in AXES]
    rows = {row.cell: row for row in iterate(after[after["cell"].isin(time.ends)])}
    fast, slow = time.ends
    said = [
        f"{write_ratio(1 / ratio)}× at {name_case(rows[cell], named) or 'the other machine'}"
        for ratio, cell in ((time.highest, slow), (time.lowest, fast))
    ]
    return ", ".join(said)


def _write_percent(estimate: Estimate | None, of: str, mark: str = "") -> Cell:
    if estimate is None or estimate.ratio.value is None:
        return Cell(NOTHING)
    change = estimate.ratio.value - 1
    return Cell(f"{mark}{_sign(100 * change, 1)} %{of}", change)


def _write_difference(estimate: Estimate | None, of: str) -> Cell:
    if estimate is None:
        return Cell(NOTHING)
    reach = f" ±{estimate.reach:.3f}" if estimate.reach is not None else ""
    return Cell(f"{_sign(estimate.difference, 3)}{reach}{of}", estimate.difference)


def _sign(value: float, decimals: int) -> str:
    """Write a difference with its sign; what rounds to zero has none."""
    text = f"{value:+.{decimals}f}"
    return text if float(text) else text[1:]


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
    if len(effects) > MOST_EFFECTS:
        left = len(effects) - MOST_EFFECTS
        yield f"{left:,} more changes are left out; --where chooses, and --format json has them."
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


def tabulate_learning(lessons: Sequence[Lesson]) -> Iterator[Table]:
    """Whether each precision learns as well as the one before it; nothing, if no seeds tell."""
    told = [lesson for lesson in lessons if lesson.equivalence.seeds > 1]
    if not told:
        return
    heads = (
        Head("change", "change", "which precision is compared with which", False, wrap=True),
        Head("metric", "metric", "what is compared", False),
        Head("verdict", "verdict", f"at a margin of {100 * MARGIN:.0f} %", False),
        Head("ratio", "ratio", "after over before, over seeds", keep=8),
        Head("interval", "90 % interval", "of the ratio", keep=8),
        Head("seeds", "seeds", "that were compared", keep=8),
        Head("needed", "seeds needed", "for a verdict, probably", keep=7),
        Head("pairs", "pairs", "pairs of cases with this reading, of all", keep=6),
        Head("remarks", "remarks", "what to know before believing it", False, wrap=True),
    )
    yield Table(
        "learning",
        f"Does it learn as well? Equivalence within {100 * MARGIN:.0f} %",
        heads,
        tuple(tuple(_write_lesson(lesson)) for lesson in told),
        (
            "Equivalent: two one-sided tests at 5 % rule out a difference beyond the margin; worse "
            "or better: the difference is beyond it. Holm over all rows of a metric. Losses are "
            "compared seed by seed, each the mean over all pairs of the change.",
        ),
    ).drop_empty()


def _write_lesson(lesson: Lesson) -> Iterator[Cell]:
    found = lesson.equivalence
    yield Cell(f"{lesson.effect.before} → {lesson.effect.after}")
    yield Cell(lesson.metric.label)
    yield Cell(found.verdict.value)
    yield Cell(f"{found.ratio:.4f}", found.ratio) if found.ratio is not None else Cell(NOTHING)
    known = found.low is not None and found.high is not None
    yield Cell(f"{found.low:.4f}–{found.high:.4f}" if known else NOTHING)
    yield Cell(str(found.seeds), found.seeds)
    yield Cell(str(found.seeds_needed or NOTHING), found.seeds_needed)
    yield Cell(f"{lesson.pairs} of {lesson.of}" if lesson.pairs < lesson.of else "")
    yield Cell(", ".join(lesson.remarks))


# --------------------------------------------------------------------------------------- start-up


def tabulate_prices(cases: pd.DataFrame, prices: Sequence[Price]) -> Iterator[Table]:
    """One row a pair of cases of which one prepares more."""
    if not prices:
        return
    by_cell = {row.cell: row for row in iterate(cases)}
    pairs = cases[cases["cell"].isin([price.on for price in prices])]
    named = ["precision", *(axis for axis in axes.find_varying(pairs) if axis != "precision")]
    heads = (
        Head("switch", "switch", "what is switched on", False),
        Head("case", "case", "in which case", False, wrap=True),
        Head("off", "start-up without (s)", "set-up and first steps without it", keep=7),
        Head("on", "start-up with (s)", "set-up and first steps with it", keep=7),
        Head("cached", "cached (s)", "the same of a repeat that found compiled code", keep=6),
        Head("saved", "saved per epoch (s)", "how much shorter an epoch is"),
        Head("epochs", "pays off after", "whole epochs until it has paid off", better="lower"),
        Head("again", "cached, after", "whole epochs where compiled code is found", keep=6),
    )
    shown = prices[:MOST_PRICES]
    rows = tuple(
        (
            Cell(_name_switch(price)),
            Cell(name_case(by_cell[price.on], [axis for axis in named if axis != price.axis])),
            number_cell(price.start_off),
            number_cell(price.start_on),
            Cell(NOTHING) if price.start_cached is None else number_cell(price.start_cached),
            Cell(mark + write_number(price.saved), price.saved),
            _write_epochs(price, price.epochs, price.ends, mark),
            Cell(NOTHING)
            if price.epochs_cached is None
            else _write_epochs(price, price.epochs_cached, None, mark),
        )
        for price in shown
        for mark in [_mark(price, by_cell)]
    )
    found = [what for axis, what in PREPARING.items() if any(p.axis == axis for p in prices)]
    what = " and ".join(filter(None, (", ".join(found[:-1]), found[-1])))
    yield Table(
        "start-up",
        f"What {what} costs before the first epoch, and when it pays off",
        heads,
        rows,
        (
            "Start-up: set-up and the first step of each batch shape, where compiling, autotuning "
            "and capturing happen; of these the slowest repeat, because later ones find compiled "
            "code in a cache. Cached: with those of the fastest repeat.",
            *_note_prices(prices),
        ),
    ).drop_empty()


def _name_switch(price: Price) -> str:
    """What is switched on: ``cudnn benchmark``, ``compile default``."""
    return " ".join([name_axis(price.axis), *([price.value] if price.value != "on" else [])])


def tabulate_parts(parts: pd.DataFrame, machines: Machines) -> Iterator[Table]:
    """One row a machine, one column a part of the time beside training.

    Args:
        parts: of `startup.find_parts`.
    """
    if not len(parts):
        return
    heads = (
        Head(MACHINE, "machine", "where the runs were", False, wrap=True),
        Head("runs", "runs", "how many"),
        *(Head(name, label, COLUMNS[name].help, better="lower") for name, label in BESIDE.items()),
        Head("all", "all of these", "the median of their sum", better="lower"),
    )
    rows = tuple(
        (
            Cell(machines[sweep, machine]),
            whole_cell(int(row["runs"])),
            *(Cell(f"{row[name]:.2f}", row[name]) for name in [*BESIDE, "all"]),
        )
        for (sweep, machine), row in zip(parts.index, parts.to_dict("records"), strict=True)
    )
    title = "Seconds of a run beside warm-up and training (median)"
    table = Table("beside", title, heads, rows, ())
    yield table if len(rows) > 1 else table.take(range(1, len(heads)))


def _note_prices(prices: Sequence[Price]) -> Iterator[str]:
    """What all pairs say together, and how sure it is."""
    if any(price.ends is None for price in prices):
        yield (
            f"Without {MIN_REPEATS} repeats of both cases the saving may be chance; use --repeats "
            f"{MIN_REPEATS}."
        )
    elif any(_is_unclear(price) for price in prices):
        yield "Cannot tell: the 95 % interval of the times includes no saving; use more --repeats."
    if len(prices) <= MOST_PRICES:
        return
    for switch in dict.fromkeys(map(_name_switch, prices)):
        epochs = sorted(price.epochs for price in prices if _name_switch(price) == switch)
        low, middle, high = epochs[0], epochs[len(epochs) // 2], epochs[-1]
        said = ["never" if math.isinf(e) else f"{e:,.0f}" for e in (low, middle, high)]
        yield (
            f"Epochs until {switch} pays off, over all {len(epochs):,} pairs: "
            f"{said[0]} at best, {said[1]} in the median, {said[2]} at worst."
        )
    yield f"{len(prices) - MOST_PRICES:,} more pairs are left out; --where chooses."


def _is_unclear(price: Price) -> bool:
    """Whether the epochs with and without may be equally long."""
    ratio = price.ratio
    known = ratio.low is not None and ratio.high is not None
    return known and ratio.low <= 1 <= ratio.high  # type: ignore[operator]


def _mark(price: Price, by_cell: dict[int, Row]) -> str:
    """What stands before a number of this pair that was extrapolated."""
    return ESTIMATE if min(by_cell[price.off].part, by_cell[price.on].part) < 1 else ""


def _write_epochs(price: Price, epochs: float, ends: tuple[float, float] | None, mark: str) -> Cell:
    if _is_unclear(price):
        return Cell("cannot tell")
    if math.isinf(epochs):
        return Cell("never")
    if epochs == 0:
        return Cell("at once", 0)
    text = mark + count(int(epochs), "epoch")
    if ends is not None and ends[0] != ends[1]:
        low, high = (f"{end:,.0f}" if math.isfinite(end) else "never" for end in ends)
        text += f" ({low}–{high})"
    return Cell(text, epochs)
