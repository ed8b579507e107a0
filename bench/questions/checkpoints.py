"""What checkpoints take: bytes, seconds, and whether training goes on from them bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bench.questions.material import Material
from bench.record import read_missing
from bench.render.cells import TIMED, Row, case_column, iterate, quantity_column
from bench.render.model import Cell
from bench.render.section import Column, Section, Sheet

if TYPE_CHECKING:
    import pandas as pd

COSTS = ("checkpoint_bytes", "checkpoint_save_s", "checkpoint_share", "checkpoint_load_s")

EXACT, DIFFERS, UNKNOWN = "exact", "differs", "not known"


def _judge(runs: pd.DataFrame) -> str:
    """Whether a resume was exact in all runs of a case, as far as it could be told."""
    if (runs["resume_difference"] != "").any():
        return DIFFERS
    return EXACT if runs["resume_exact"].astype(bool).any() else UNKNOWN


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
            missing = (read_missing(str(text)) for text in runs[row.cell]["missing"])
            told = (of_run.get("resume_exact", "") for of_run in missing)
            why = next(filter(None, told), "the run did not come so far")
            known = f"Whether resumed steps are the same is not known ({why})"
            reasons.setdefault(known, []).append(row.precision)
    for reason, names in reasons.items():
        yield f"{reason}: {', '.join(dict.fromkeys(names))}."


def _tell_checkpoints(found: Material) -> Iterator[Sheet]:
    cases = found.cases
    kept = cases[cases["checkpoint"].astype(bool) & cases["status"].isin(TIMED)]
    of_these = found.rows[found.rows["cell"].isin(kept["cell"])]
    runs = {int(cell): part for cell, part in of_these.groupby("cell")}  # type: ignore[arg-type]
    verdicts = {cell: _judge(runs[cell]) for cell in kept["cell"]}
    axes = [axis for axis in found.order if axis != "checkpoint"] or ["precision", "batch_size"]
    columns: list[Column[Row]] = [
        case_column(axes, found.machines),
        *map(quantity_column, COSTS),
        Column("resume", "resume", "the next steps after it and without it",
               lambda row: Cell(verdicts[row.cell], verdicts[row.cell]), number=False),
    ]  # fmt: skip
    notes = _describe(kept, verdicts, runs)
    yield Sheet("Checkpoints", columns, list(iterate(kept)), notes, empty=())


CHECKPOINTS = Section(
    "checkpoints", "What does a checkpoint cost, and is a resume exact?", _tell_checkpoints
)
