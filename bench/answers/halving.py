"""A search for the best settings: its trials, what each rung decided, and what it cost."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from bench.answers.render.table import Column, Section, Sheet, axis_column, name_outcome
from bench.base.text import count
from bench.networks.workloads import IMAGES
from bench.results.store.rows import Row, keep_latest
from bench.results.study.comparable import take_last
from bench.results.study.quantities import QUANTITIES
from bench.schema.axis import is_own, name_column
from bench.schema.case import (
    AXES,
    Case,
    find_axis,
    format_value,
    knows_epochs,
    list_axes,
    spell_flag,
)
from bench.schema.command import BESIDE_COMMAND, list_places
from bench.schema.goals import Halving
from bench.schema.record import MEASURED, EpochRow, Status

CONFIRMED = 3
"""Trials that are worth repeating: the best, and those that may be better with another seed."""

Epochs = Mapping[str, Sequence[EpochRow]]
"""The epochs of each record that trained several."""

REPEATS = 5  # runs of each of them: seeds differ by more than most settings near the best do


@dataclass(frozen=True)
class Trial:
    """One trial, as recorded."""

    number: int  # from 1, in the order in which trials were drawn
    row: Row
    curve: tuple[float, ...]  # the metric by epoch, NaN where it was no number
    ended: bool  # before it had trained all its epochs

    @property
    def last(self) -> float:
        return self.curve[-1] if self.curve else math.nan

    @property
    def whole(self) -> bool:
        """Whether it trained all its epochs and learnt something."""
        return not self.ended and math.isfinite(self.last)


def find_trials(rows: Iterable[Row], epochs: Epochs, halving: Halving) -> list[Trial]:
    """Return the trials in the rows of a folder, with the epochs of each record: those that trained
    longest first, and the best of these first; those without a number last. Rows of another torch
    or GPU than the last (``--mix``) are not ranked with these, and left out."""
    numbers = {frozenset(settings.items()): i for i, settings in enumerate(halving.trials, 1)}
    names = _list_searched(halving)
    trials: dict[int, Trial] = {}
    for row in take_last(_list_rows(rows))[0]:
        if knows_epochs(row.case) and row.epochs != halving.epochs:
            continue
        settings = frozenset((name, format_value(getattr(row.case, name))) for name in names)
        if (number := numbers.get(settings)) is not None:
            trained = sorted(epochs.get(row.record_id, ()), key=attrgetter("epoch"))
            values = (getattr(epoch, halving.metric) for epoch in trained)
            curve = tuple(math.nan if value is None else value for value in values)
            # a command that decides itself is ended after as many epochs as are asked for
            ended = row.truncated and len(curve) < halving.epochs
            trials[number] = Trial(number, row, curve, ended)
    found = [trials[number] for number in sorted(trials)]
    learnt = [trial for trial in found if math.isfinite(trial.last)]
    learnt.sort(key=attrgetter("last"), reverse=halving.higher)
    learnt.sort(key=lambda trial: -len(trial.curve))
    return [*learnt, *(trial for trial in found if not math.isfinite(trial.last))]


def _list_rows(rows: Iterable[Row]) -> list[Row]:
    return keep_latest(row for row in rows if row.is_repeat and row.repeat == 1)


def _list_searched(halving: Halving) -> list[str]:
    trial = next(iter(halving.trials), {})
    return [name for name in trial if name in AXES or is_own(name)]


def _describe(trial: Trial) -> str:
    row = trial.row
    if row.status not in MEASURED:
        return name_outcome(row)
    words = [] if row.status is Status.OK else [row.status.value]
    words += [f"ended after {count(len(trial.curve), 'epoch')}"] if trial.ended else []
    return ", ".join(words) or "whole"


def summarize(trials: Sequence[Trial], halving: Halving) -> Iterator[str]:
    """Yield the best trial, and what the search cost."""
    quantity = QUANTITIES[halving.metric]
    if best := next((trial for trial in trials if trial.whole), None):
        value = f"{quantity.write(best.last)} {quantity.unit}".rstrip()
        named = best.row.case.label(halving.trials[0])
        yield f"Best: {named}, {quantity.label} {value} after {count(len(best.curve), 'epoch')}."
    else:
        yield "No trial has trained all its epochs."
        return
    spent, longest = sum(len(trial.curve) for trial in trials), _find_longest(trials, halving)
    whole = len(trials) * longest
    if spent < whole:
        yield (
            f"{spent:,} epochs were trained where {count(len(trials), 'whole trial')} take "
            f"{whole:,} ({100 * spent / whole:.0f} %)."
        )


def _find_longest(trials: Sequence[Trial], halving: Halving) -> int:
    """Return the epochs of a whole trial: of a command that decides itself they may be fewer."""
    return max((len(trial.curve) for trial in trials if trial.whole), default=halving.epochs)


def tabulate_trials(
    rows: Sequence[Row],
    epochs: Epochs,
    halving: Halving,
    how: str = "`python -m bench.search` prints the commands that confirm the best.",
) -> Iterator[Sheet]:
    """Yield the table of trials, in the order of `find_trials`, with a sentence on ``how`` to
    confirm the best."""
    trials, quantity = find_trials(rows, epochs, halving), QUANTITIES[halving.metric]
    axes, longest = _list_searched(halving), _find_longest(trials, halving)
    unlike = ""
    if differing := "; ".join(take_last(_list_rows(rows))[1]):
        unlike = f"Earlier trials are left out, which cannot be ranked with these: {differing}."

    def take_metric(n: int, trial: Trial) -> float | None:
        known = len(trial.curve) >= n and math.isfinite(trial.curve[n - 1])
        return trial.curve[n - 1] if known else None

    columns: list[Column[Trial]] = [
        Column("trial", "trial", "in the order in which they were drawn",
               lambda trial: trial.number),
        *(axis_column(name, attrgetter("row")) for name in axes),
        Column("epochs", "epochs", f"trained, of {longest}",
               lambda trial: len(trial.curve)),
        *(
            Column(f"{halving.metric}_{n}", f"after {n}", quantity.help,
                   partial(take_metric, n), write=quantity.write, better=quantity.better)
            for n in (*(rung for rung in halving.rungs if rung < longest), longest)
        ),
        Column("outcome", "outcome", "how the trial ended", _describe, wrap=True),
    ]  # fmt: skip
    note = (
        "Each trial is one run of one seed: the order of trials that lie close together is chance. "
        "A trial that was ended early might have become the best."
    )
    yield Sheet(
        f"Search: {len(trials)} of {count(len(halving.trials), 'trial')}, those that trained "
        f"longest first, and of them the best by {quantity.title}",
        columns,
        trials,
        [" ".join(filter(None, [unlike, note, how]))],
        words=summarize(trials, halving),
        empty=(),
    )


def lay_out_search(
    rows: Sequence[Row], epochs: Epochs, halving: Halving, out: Path
) -> dict[str, Any]:
    """Return for JSON the trials in the order of `find_trials`, with the metric by epoch, and how
    to confirm the best."""
    names = _list_searched(halving)
    return {
        "metric": halving.metric,
        "better": "higher" if halving.higher else "lower",
        "epochs": halving.epochs,
        "rungs": halving.rungs,
        "drawn": len(halving.trials),
        "left_out": take_last(_list_rows(rows))[1],
        "trials": [
            {
                "trial": trial.number,
                "settings": {name_column(n): getattr(trial.row.case, n) for n in names},
                "status": trial.row.status,
                "reason": trial.row.reason,
                "ended_early": trial.ended,
                "values": trial.curve,
            }
            for trial in find_trials(rows, epochs, halving)
        ],
        "confirm": confirm(rows, epochs, halving, out),
    }


def confirm(rows: Iterable[Row], epochs: Epochs, halving: Halving, out: Path) -> list[str]:
    """Return the commands that run the best trials again with other seeds, as the result of the
    seed that chose one is biased in its favour, and report on them."""
    best = [t for t in find_trials(rows, epochs, halving) if t.whole][:CONFIRMED]
    if not best:
        return []
    folder = out.with_name(f"{out.name}-best")
    ends = ["--repeats", str(REPEATS), "--out", str(folder)]
    cases = [trial.row.case for trial in best]
    again = [replace(case, seed=(case.seed + 1) % 2**31) for case in cases]
    commands = [["bench.sweep", *spell_case(case), *ends] for case in again]
    commands.append(["bench.report", str(folder)])
    return [shlex.join(["python", "-m", *words]) for words in commands]


_ALWAYS = (
    *("model", "dataset", "precision", "batch_size"),
    *("lr", "optimizer", "cudnn_benchmark", "device"),
)
"""Axes whose flags are always given, as presets of `bench.sweep` may set other values."""


def spell_case(case: Case) -> list[str]:
    """Return the flags with which `bench.sweep` runs ``case`` again."""
    words = []
    axes, placed = list_axes([case]), list_places(case.command or "")
    if case.command is not None:
        given = {*BESIDE_COMMAND, *placed}
        axes = [name for name in axes if is_own(name) or name in given]
    for name in axes:
        value = getattr(case, name)
        brought = name in ("model", "dataset") and case.workload != IMAGES
        usual = value == find_axis(name).default and name not in (*_ALWAYS, *placed)
        if not (brought or usual or value is None):
            words += spell_flag(name, value)
    return words


SEARCH = Section(
    "search",
    "Which settings are the best?",
    lambda found: (
        replace(sheet, words=())  # which are the answer
        for sweep in found.sweeps
        if sweep.halving
        for sheet in tabulate_trials(sweep.rows, sweep.epochs, sweep.halving)
    ),
)
