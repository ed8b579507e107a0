"""A search for the best settings: its trials, what each of its rungs decided, what it cost."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from bench.case import AXES, Case, axis_flag, format_value, spell_value
from bench.halving import Halving, Settings
from bench.questions.material import Material
from bench.record import MEASURED, Status
from bench.render.cells import outcome
from bench.render.model import Cell, Level
from bench.render.section import Column, Section, Sheet
from bench.store.attempts import keep_latest
from bench.store.reader import read_cases
from bench.study.axes import name_axis
from bench.study.quantities import QUANTITIES
from bench.text import count
from bench.workloads import IMAGES

if TYPE_CHECKING:
    import pandas as pd

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


def _describe(trial: Trial) -> str:
    if trial.status not in MEASURED:
        return outcome(trial.status.value, trial.inferred)
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


def tell_trials(records: pd.DataFrame, epochs: pd.DataFrame, halving: Halving) -> Iterator[Sheet]:
    """The trials, in the order of `find_trials`."""
    trials, quantity = find_trials(records, epochs, halving), QUANTITIES[halving.metric]
    axes = [name for name in AXES if trials and name in halving.trials[0]]

    def write_axis(name: str, trial: Trial) -> str | None:
        return format_value(getattr(trial.case, name)) or None

    def write_metric(n: int, trial: Trial) -> Cell | None:
        known = len(trial.curve) >= n and math.isfinite(trial.curve[n - 1])
        return Cell(quantity.write(trial.curve[n - 1]), trial.curve[n - 1]) if known else None

    columns: list[Column[Trial]] = [
        Column("trial", "trial", "in the order in which they were drawn",
               lambda trial: trial.number),
        *(
            Column(name, name_axis(name), AXES[name].help,
                   partial(write_axis, name))
            for name in axes
        ),
        Column("epochs", "epochs", f"trained, of {halving.epochs}",
               lambda trial: len(trial.curve)),
        *(
            Column(f"{halving.metric}_{n}", f"after {n}", quantity.help,
                   partial(write_metric, n), better=quantity.better)
            for n in (*halving.rungs, halving.epochs)
        ),
        Column("outcome", "outcome", "how the trial ended", _describe, wrap=True),
    ]  # fmt: skip
    yield Sheet(
        f"Search: {len(trials)} of {count(len(halving.trials), 'trial')}, those that trained "
        f"longest first, and of them the best by {quantity.title}",
        columns,
        trials,
        (
            "Each trial is one run of one seed: the order of trials that lie close together is "
            "chance. An early lead need not last either: a trial that ended early might have "
            "overtaken. `python -m bench.search` prints the commands that confirm the best.",
        ),
        words=_summarize(trials, halving),
        file="records.csv",
        empty=(),
    )


def tell_rungs(records: pd.DataFrame, epochs: pd.DataFrame, halving: Halving) -> Iterator[Sheet]:
    """What was decided at each rung: who came there, who went on, and between which values."""
    trials, quantity = find_trials(records, epochs, halving), QUANTITIES[halving.metric]
    pick, drop = (max, min) if halving.higher else (min, max)

    def list_values(rung: int, *, on: bool) -> list[float]:
        """The metric of those that came to a rung, and went on or did not."""
        there = [trial for trial in trials if len(trial.curve) >= rung]
        return [trial.curve[rung - 1] for trial in there if (len(trial.curve) > rung) is on]

    def write(choose: Callable[[list[float]], float], values: Iterable[float]) -> Cell | None:
        known = [value for value in values if math.isfinite(value)]
        return Cell(quantity.write(choose(known)), choose(known)) if known else None

    better = quantity.better
    columns: list[Column[int]] = [
        Column("rung", "rung (epochs)", "after which trials were compared", lambda rung: rung),
        Column("reached", "reached", "trials that trained as long",
               lambda rung: sum(len(trial.curve) >= rung for trial in trials)),
        Column("went_on", "went on", "of them", lambda rung: len(list_values(rung, on=True))),
        Column("best", f"best {quantity.title}", "of those that reached it", lambda rung: write(
            pick, [*list_values(rung, on=True), *list_values(rung, on=False)]), better=better),
        Column("worst_on", "worst that went on", "of those that went on",
               lambda rung: write(drop, list_values(rung, on=True)), better=better),
        Column("best_ended", "best that ended", "of those that were ended there",
               lambda rung: write(pick, list_values(rung, on=False)), better=better),
    ]  # fmt: skip
    note = (
        f"A trial goes on where it is no worse than the best {100 / halving.reduction:.3g} % of "
        "those that came to the rung before it; the first always does. So the worst that went on "
        "may be worse than the best that ended later."
    )
    rungs = halving.rungs if trials else ()
    yield Sheet("What the rungs decided", columns, rungs, [note], empty=())


def _of_each(tell: Callable[..., Iterator[Sheet]]) -> Callable[[Material], Iterator[Sheet]]:
    """What is told of each search that a report is about."""
    return lambda found: chain.from_iterable(
        tell(sweep.records, sweep.read_epochs(), sweep.halving)
        for sweep in found.sweeps
        if sweep.halving
    )


SEARCH = Section("search", "Which settings are the best?", _of_each(tell_trials), Level.ANSWER)

RUNGS = Section("rungs", "What decided which trials went on?", _of_each(tell_rungs))


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
