"""Single table cells of cases: numbers, ends of intervals, outcomes, remarks, names."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from bench.axis import Value
from bench.case import AXES, Case
from bench.record import MEASURED, Status
from bench.render.model import NOTHING, Cell
from bench.study.axes import MACHINE, Machines
from bench.study.doubts import DOUBTS
from bench.study.quantities import is_number
from bench.study.spread import Spread
from bench.text import ESTIMATE as ESTIMATE
from bench.text import write_number

if TYPE_CHECKING:
    import pandas as pd


class _Row:
    __slots__ = ("_at", "_read")

    def __init__(self, read: Callable[[str], list[Any]], at: int) -> None:
        self._read, self._at = read, at

    def __getattr__(self, name: str) -> Any:
        return self._read(name)[self._at]


Row = Any  # a row of the frame of cases, its cells as attributes


def iterate(frame: pd.DataFrame) -> Iterator[Row]:
    """Return the rows of a frame, with their cells as attributes. Only the columns that are used
    are read: `pandas.DataFrame.itertuples` takes 22 ms for two rows of 229 columns, most of which
    no table shows."""

    @cache
    def read(name: str) -> list[Any]:
        if name not in frame:
            raise AttributeError(name)
        cells: list[Any] = frame[name].tolist()
        return cells

    return (_Row(read, at) for at in range(len(frame)))


def take_first(frame: pd.DataFrame) -> Row:
    """Return the first row of a frame that has one, as `iterate` gives it."""
    return next(iterate(frame.head(1)))


def mark_part(*rows: Row) -> str:
    """Return the mark of an estimate if one of these cases measured less than an epoch."""
    return ESTIMATE if any(row.part < 1 for row in rows) else ""


def number_cell(
    value: float | None, write: Callable[[float], str] = write_number, estimated: bool = False
) -> Cell:
    """Return the cell of a number that is not a quantity of a case, with the mark of an estimate;
    `NOTHING` if there is no number."""
    if value is None or not is_number(value):
        return Cell(NOTHING)
    return Cell(f"{ESTIMATE * estimated}{write(value)}", value, estimated)


def whole_cell(number: int | None, sign: bool = False) -> Cell:
    """Return the cell of a whole number. With ``sign``, a positive number has a ``+``."""
    if number is None:
        return Cell(NOTHING)
    return Cell(f"{number:+d}" if sign and number else str(number), number)


def write_tenths(share: float) -> str:
    """Write a share in per cent with one decimal, without the % sign: 0.0312 as ``3.1``."""
    text = f"{100 * share:.1f}"
    return text if float(text) else "0.0"  # and not -0.0


def write_ends(
    ends: Iterable[float | None] | None, write: Callable[[float], str], between: str = "–"
) -> str | None:
    """Write the two ends of an interval; None if they are not known, as None or NaN."""
    known = [end for end in ends or () if end is not None and not math.isnan(end)]
    return between.join(map(write, known)) if len(known) == 2 else None


def write_signed(value: float, decimals: int) -> str:
    """Write a difference with its sign, or without one if it rounds to zero."""
    text = f"{value:+.{decimals}f}"
    return text if float(text) else text[1:]


def write_ratio(value: float) -> str:
    """Write a ratio with two decimals, or two significant digits below a tenth."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def name_spread(cases: pd.DataFrame) -> str:
    """Return the suffix of the times' column head, which names the kind of their spread."""
    kinds = cases.loc[cases["spread"] != Spread.NONE.value, "spread"].unique().tolist()
    if len(kinds) > 1:
        return ", spread"
    words = {
        Spread.WITHIN.value: " [within the run]",
        Spread.RANGE.value: ", range",
        Spread.PREDICTION.value: ", interval",
    }
    return words[kinds[0]] if kinds else ""


def outcome(status: str, inferred: bool = False) -> str:
    """Name an outcome without a time: out of memory in words, others by their status."""
    names = {Status.OOM.value: "out of memory", Status.OOM_SUSPECTED.value: "out of memory?"}
    return names.get(status, status) + (" (inferred)" if inferred else "")


TIMED = {status.value for status in MEASURED}
"""Outcomes that carry an epoch time, as the frame spells them."""


def remarks(row: Row, but: Iterable[str] = ()) -> str:
    """Return what a reader must know before believing a row, except the doubts in ``but``."""
    said = [d.remark for d in DOUBTS.values() if d.name not in but and getattr(row, d.name)]
    if row.runs > row.repeats:
        said.append(f"{row.repeats} of {row.runs} runs")
    if row.apart:
        said.append(row.apart)
    return ", ".join(said)


def name_place(row: Row, axes: Collection[str], machines: Machines) -> str:
    """Name a case as `name_case`, after its machine if that is among the axes."""
    where = [machines[row.sweep, row.machine]] if MACHINE in axes else []
    return " · ".join([*where, name_case(row, axes)])


def name_case(row: Row, axes: Iterable[str]) -> str:
    """Return the `Case.label` of a row of the frame of cases, by those of some axes that a `Case`
    has. The frame's values are spelled as in CSV, so no `Case` is parsed for it."""
    values: dict[str, Value] = {}
    for name in (name for name in axes if name in AXES):
        value = getattr(row, name)
        values[name] = None if value == "" else value
    return Case(**values).label(values)  # type: ignore[arg-type]
