"""What checkpoints take: bytes, seconds, and whether training goes on from them bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bench.record import read_missing
from bench.render.cells import TIMED, iterate, name_place, quantity_cell, quantity_head
from bench.render.model import Cell, Head, Table
from bench.study.axes import Machines
from bench.study.quantities import QUANTITIES
from bench.text import say_left_out

if TYPE_CHECKING:
    import pandas as pd

MOST_ROWS = 40
"""Rows of the table; more would not be read."""

COSTS = ("checkpoint_bytes", "checkpoint_save_s", "checkpoint_share", "checkpoint_load_s")

EXACT, DIFFERS, UNKNOWN = "exact", "differs", "not known"


def _judge(runs: pd.DataFrame) -> str:
    """Whether a resume was exact in all runs of a case, as far as it could be told."""
    if (runs["resume_difference"] != "").any():
        return DIFFERS
    return EXACT if runs["resume_exact"].astype(bool).any() else UNKNOWN


def _quote_missing(runs: pd.DataFrame) -> str:
    """Why it is not known, as the first run that says so has it."""
    reasons = (read_missing(str(text)).get("resume_exact", "") for text in runs["missing"])
    return next(filter(None, reasons), "")


def tabulate_checkpoints(
    rows: pd.DataFrame, cases: pd.DataFrame, axes: Sequence[str], machines: Machines
) -> Iterator[Table]:
    """One row for each case with ``--checkpoint``, in the order of the overview.

    Args:
        rows: the runs that count, of `summaries.latest`.
        cases: the same summarized and sorted.
        axes: those that tell the cases apart.
    """
    kept = cases[cases["checkpoint"].astype(bool) & cases["status"].isin(TIMED)]
    if not len(kept):
        return
    runs = {int(cell): part for cell, part in rows.groupby("cell")}  # type: ignore[arg-type]
    verdicts = {row.cell: _judge(runs[row.cell]) for row in iterate(kept)}
    heads = (
        Head("case", "case", "the settings that tell it apart", False, wrap=True),
        *(quantity_head(QUANTITIES[name]) for name in COSTS),
        Head("resume", "resume", "the next steps after it and without it", False),
    )
    shown = [axis for axis in axes if axis != "checkpoint"] or ["precision", "batch_size"]
    lines = [
        (
            Cell(name_place(row, shown, machines)),
            *(quantity_cell(QUANTITIES[name], row) for name in COSTS),
            Cell(verdicts[row.cell], verdicts[row.cell]),
        )
        for row in iterate(kept.head(MOST_ROWS))
    ]
    notes = list(_describe(kept, verdicts, runs))
    if len(kept) > MOST_ROWS:
        more = len(kept) - MOST_ROWS
        notes.append(f"{say_left_out(more, 'row')}; --where chooses.")
    yield Table("checkpoints", "Checkpoints", heads, tuple(lines), tuple(notes))


def _describe(
    kept: pd.DataFrame, verdicts: dict[int, str], runs: dict[int, pd.DataFrame]
) -> Iterator[str]:
    """Say of each precision whether a resume is exact: in all of its cases, or not."""
    found = kept["cell"].map(verdicts).groupby(kept["precision"], sort=False).agg(set)
    exact = [str(name) for name, said in found.items() if said == {EXACT}]
    if exact:
        yield (
            "Training resumed in a new network takes the same next steps, bit for bit (weights, "
            f"master weights, optimizer, loss scale, random numbers, data): {', '.join(exact)}."
        )
    reasons: dict[str, list[str]] = {}
    for row in iterate(kept):
        if verdicts[row.cell] == DIFFERS:
            first = next(filter(None, runs[row.cell]["resume_difference"]))
            reasons.setdefault(f"Resumed steps differ, first in {first}", []).append(row.precision)
        elif verdicts[row.cell] == UNKNOWN:
            why = _quote_missing(runs[row.cell]) or "the run did not come so far"
            known = f"Whether resumed steps are the same is not known ({why})"
            reasons.setdefault(known, []).append(row.precision)
    for reason, names in reasons.items():
        yield f"{reason}: {', '.join(dict.fromkeys(names))}."
