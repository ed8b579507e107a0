"""A search for the best settings: its trials, what each of its rungs decided, what it cost."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.case import AXES, Case, axis_flag, format_value, spell_value
from bench.halving import Halving, Settings
from bench.record import MEASURED, Status
from bench.render.cells import outcome
from bench.render.model import NOTHING, Cell, Head, Level, Table
from bench.store.attempts import keep_latest
from bench.store.reader import read_cases
from bench.study.quantities import QUANTITIES
from bench.text import count
from bench.workloads import IMAGES

if TYPE_CHECKING:
    import pandas as pd

MOST_ROWS = 40
"""Rows of the table of trials; more would not be read."""

CONFIRMED = 3
"""Trials that are worth repeats: the best, and those that may be better by another seed."""

REPEATS = 5
"""Runs of each of them: seeds differ by more than most settings near the best do."""


@dataclass(frozen=True)
class Trial:
    """One trial as its record has it.

    Attributes:
        number: from 1, in the order in which trials were drawn.
        curve: the metric by epoch; NaN where it was no number.
    """

    number: int
    case: Case
    status: Status
    reason: str
    inferred: bool
    truncated: bool
    curve: tuple[float, ...]

    @property
    def last(self) -> float:
        """The metric of its last epoch; NaN where there is none."""
        return self.curve[-1] if self.curve else math.nan

    @property
    def whole(self) -> bool:
        """Whether it trained all its epochs and learnt something."""
        return bool(self.curve) and not self.truncated and math.isfinite(self.last)


def find_trials(records: pd.DataFrame, epochs: pd.DataFrame, halving: Halving) -> list[Trial]:
    """The trials that a folder holds: those that trained longest first, the best of them first.

    Args:
        records: of `bench.store.reader.read_records`.
        epochs: of the same folder.
    """
    numbers = {_key(settings): i for i, settings in enumerate(halving.trials, 1)}
    names = list(halving.trials[0]) if halving.trials else []
    mine = (records["repeat"] == 1) & (records["epochs"] == halving.epochs)
    mine &= ~records["sentinel"].astype(bool) & ~records["probe"].astype(bool)
    rows = keep_latest(records[mine & (records["anchor"] == "")])
    curves = {
        str(record): tuple(part.sort_values("epoch")[halving.metric])
        for record, part in epochs.groupby("record_id")
    }
    trials: dict[int, Trial] = {}
    for case, row in zip(read_cases(rows), rows.to_dict("records"), strict=True):
        settings = {name: format_value(getattr(case, name)) for name in names if name in AXES}
        if (number := numbers.get(_key(settings))) is not None:
            status, truncated = Status(row["status"]), not math.isnan(row["truncated_after"])
            curve = curves.get(row["record_id"], ())
            inferred = bool(row["inferred"])
            trials[number] = Trial(number, case, status, row["reason"], inferred, truncated, curve)
    sign = -1 if halving.higher else 1

    def place(trial: Trial) -> tuple[float, float, int]:
        known = math.isfinite(trial.last)
        return (
            -len(trial.curve) if known else 1,
            sign * trial.last if known else 0.0,
            trial.number,
        )

    return sorted(trials.values(), key=place)


def _key(settings: Settings) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(settings.items()))


def tabulate_halving(
    records: pd.DataFrame, epochs: pd.DataFrame, halving: Halving
) -> Iterator[Table]:
    """The trials in the order of `find_trials`, and the rungs; nothing where no trial has ended."""
    trials = find_trials(records, epochs, halving)
    if not trials:
        return
    yield _tabulate_trials(trials, halving)
    yield _tabulate_rungs(trials, halving)


def _tabulate_trials(trials: Sequence[Trial], halving: Halving) -> Table:
    quantity = QUANTITIES[halving.metric]
    axes = [name for name in AXES if name in halving.trials[0]]
    places = [*halving.rungs, halving.epochs]
    heads = (
        Head("trial", "trial", "in the order in which they were drawn"),
        *(Head(name, name.replace("_", " "), AXES[name].metadata["help"]) for name in axes),
        Head("epochs", "epochs", f"trained, of {halving.epochs}"),
        *(
            Head(f"{halving.metric}_{n}", f"after {n}", quantity.help, better=quantity.better)
            for n in places
        ),
        Head("outcome", "outcome", "how the trial ended", False, wrap=True),
    )
    lines = tuple(
        (
            Cell(str(trial.number), trial.number),
            *(Cell(format_value(getattr(trial.case, name)) or NOTHING) for name in axes),
            Cell(str(len(trial.curve)), len(trial.curve)),
            *(_write_metric(halving, trial, n) for n in places),
            Cell(_describe(trial)),
        )
        for trial in trials[:MOST_ROWS]
    )
    left = len(trials) - len(lines)
    more = [f"{count(left, 'more trial')} left out; records.csv has them all."] if left else []
    title = (
        f"Search: {len(trials)} of {count(len(halving.trials), 'trial')}, those that trained "
        f"longest first, and of them the best by {quantity.title}"
    )
    return Table(
        "search",
        title,
        heads,
        lines,
        (
            "Each trial is one run of one seed: the order of trials that lie close together is "
            "chance. An early lead need not last either: a trial that ended early might have "
            "overtaken. `python -m bench.search` prints the commands that confirm the best.",
            *more,
        ),
        words=tuple(_summarize(trials, halving)),
        level=Level.ANSWER,
    )


def _write_metric(halving: Halving, trial: Trial, epochs: int) -> Cell:
    if len(trial.curve) < epochs or not math.isfinite(value := trial.curve[epochs - 1]):
        return Cell(NOTHING)
    return Cell(QUANTITIES[halving.metric].write(value), value)


def _describe(trial: Trial) -> str:
    if trial.status not in MEASURED:
        return outcome(trial.status.value, trial.reason, trial.inferred)
    words = [] if trial.status is Status.OK else [trial.status.value]
    words += [f"ended after {count(len(trial.curve), 'epoch')}"] if trial.truncated else []
    return ", ".join(words) or "whole"


def _summarize(trials: Sequence[Trial], halving: Halving) -> Iterator[str]:
    quantity = QUANTITIES[halving.metric]
    best = next((trial for trial in trials if trial.whole), None)
    if best is None:
        yield "No trial has trained all its epochs yet."
    else:
        value = quantity.add_unit(quantity.write(best.last))
        named = best.case.label(halving.trials[0])
        yield f"Best: {named}, {quantity.label} {value} after {count(halving.epochs, 'epoch')}."
    spent = sum(len(trial.curve) for trial in trials)
    whole = len(trials) * halving.epochs
    yield f"{spent:,} epochs were trained where {count(len(trials), 'whole trial')} take {whole:,}"
    if halving.combinations and halving.combinations > len(trials):
        grid = halving.combinations * halving.epochs
        yield f"and the whole grid of {halving.combinations:,} combinations takes {grid:,}."
    else:
        yield f"({100 * spent / whole:.0f} %)."


def _tabulate_rungs(trials: Sequence[Trial], halving: Halving) -> Table:
    """What was decided at each rung: who came there, who went on, and between which values."""
    quantity = QUANTITIES[halving.metric]
    better = quantity.better
    heads = (
        Head("rung", "rung (epochs)", "after which trials were compared"),
        Head("reached", "reached", "trials that trained as long"),
        Head("went_on", "went on", "of them"),
        Head("best", f"best {quantity.title}", "of those that reached it", better=better),
        Head("worst_on", "worst that went on", "of those that went on", better=better),
        Head("best_ended", "best that ended", "of those that were ended there", better=better),
    )
    pick, drop = (max, min) if halving.higher else (min, max)

    def write(values: list[float], choose: object) -> Cell:
        known = [value for value in values if math.isfinite(value)]
        if not known:
            return Cell(NOTHING)
        value = pick(known) if choose is pick else drop(known)
        return Cell(quantity.write(value), value)

    lines = []
    for rung in halving.rungs:
        there = [trial for trial in trials if len(trial.curve) >= rung]
        on = [trial.curve[rung - 1] for trial in there if len(trial.curve) > rung]
        ended = [trial.curve[rung - 1] for trial in there if len(trial.curve) == rung]
        lines.append(
            (
                Cell(str(rung), rung),
                Cell(str(len(there)), len(there)),
                Cell(str(len(on)), len(on)),
                write([*on, *ended], pick),
                write(on, drop),
                write(ended, pick),
            )
        )
    note = (
        f"A trial goes on where it is no worse than the {_name_bar(halving)} of those that came to "
        "the rung before it; the first always does. So the worst that went on may be worse than "
        "the best that ended later."
    )
    return Table("rungs", "What the rungs decided", heads, tuple(lines), (note,))


def _name_bar(halving: Halving) -> str:
    return f"best {100 / halving.reduction:.3g} %"


def confirm(records: pd.DataFrame, epochs: pd.DataFrame, halving: Halving, out: Path) -> list[str]:
    """The commands that run the best trials again on other seeds, and the report on them."""
    best = [t for t in find_trials(records, epochs, halving) if t.whole][:CONFIRMED]
    if not best:
        return []
    folder = out.with_name(f"{out.name}-best")
    commands = [
        shlex.join(
            [
                *("python", "-m", "bench.sweep"),
                *spell_case(trial.case),
                *("--repeats", str(REPEATS), "--out", str(folder)),
            ]
        )
        for trial in best
    ]
    return [*commands, shlex.join(["python", "-m", "bench.report", str(folder)])]


_ALWAYS = ("model", "dataset", "precision", "batch_size", "lr", "device")
"""Axes that the presets of `bench.sweep` may set otherwise."""


def spell_case(case: Case) -> list[str]:
    """The flags by which `bench.sweep` runs ``case`` again, with the next seed.

    The seed that chose it would flatter it.
    """
    words = []
    for name, axis in AXES.items():
        value = getattr(case, name)
        brought = name in ("model", "dataset") and case.workload != IMAGES
        if name == "seed":
            words += [axis_flag(name), str((case.seed + 1) % 2**31)]
        elif not brought and value is not None and (value != axis.default or name in _ALWAYS):
            words += [axis_flag(name), spell_value(value)]
    return words
