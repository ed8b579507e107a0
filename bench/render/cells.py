"""One cell of a table, from a case: numbers with their spread, outcomes, remarks, names."""

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


Row = Any  # a row of the frame of cases, by name


def iterate(frame: pd.DataFrame) -> Iterator[Row]:
    """The rows of a frame, each with its cells as attributes. Only the columns that are asked for
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
    """The first row of a frame that has one, as `iterate` gives it."""
    return next(iterate(frame.head(1)))


def mark_part(*rows: Row) -> str:
    """The mark of an estimate, where one of these cases measured less than an epoch."""
    return ESTIMATE if any(row.part < 1 for row in rows) else ""


def number_cell(
    value: float | None, write: Callable[[float], str] = write_number, estimated: bool = False
) -> Cell:
    """Write a number that is no quantity of a case, an estimate with its mark; nothing, if there is
    none."""
    if value is None or not is_number(value):
        return Cell(NOTHING)
    return Cell(f"{ESTIMATE * estimated}{write(value)}", value, estimated)


def whole_cell(number: int | None, sign: bool = False) -> Cell:
    """Write a whole number, with ``+`` before a gain where it is a difference."""
    if number is None:
        return Cell(NOTHING)
    return Cell(f"{number:+d}" if sign and number else str(number), number)


def write_tenths(share: float) -> str:
    """A share in tenths of a per cent, without the sign: 0.0312 as ``3.1``."""
    text = f"{100 * share:.1f}"
    return text if float(text) else "0.0"  # and not -0.0


def write_ends(
    ends: Iterable[float | None] | None, write: Callable[[float], str], between: str = "–"
) -> str | None:
    """The two ends of an interval; None where they are not known, as None or NaN."""
    known = [end for end in ends or () if end is not None and not math.isnan(end)]
    return between.join(map(write, known)) if len(known) == 2 else None


def write_signed(value: float, decimals: int) -> str:
    """Write a difference with its sign; what rounds to zero has none."""
    text = f"{value:+.{decimals}f}"
    return text if float(text) else text[1:]


def write_ratio(value: float) -> str:
    """Two decimals, or two digits below a tenth."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def name_spread(cases: pd.DataFrame) -> str:
    """What the head of the times says of the ends beside them."""
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
    """Name an outcome without a time; out of memory by its meaning, others by name."""
    names = {Status.OOM.value: "out of memory", Status.OOM_SUSPECTED.value: "out of memory?"}
    return names.get(status, status) + (" (inferred)" if inferred else "")


TIMED = {status.value for status in MEASURED}
"""Outcomes that carry an epoch time, as the frame spells them."""


def remarks(row: Row, but: Iterable[str] = ()) -> str:
    """What a reader must know of this row before believing it."""
    said = [d.remark for d in DOUBTS.values() if d.name not in but and getattr(row, d.name)]
    if row.runs > row.repeats:
        said.append(f"{row.repeats} of {row.runs} runs")
    if row.apart:
        said.append(row.apart)
    return ", ".join(said)


def name_place(row: Row, axes: Collection[str], machines: Machines) -> str:
    """`name_case`, behind the machine where that is among the axes."""
    where = [machines[row.sweep, row.machine]] if MACHINE in axes else []
    return " · ".join([*where, name_case(row, axes)])


def name_case(row: Row, axes: Iterable[str]) -> str:
    """`Case.label` of a row of the frame of cases, by some axes; those of no `Case` are left out.
    The frame's values are spelled as CSV spells them, so no `Case` is parsed for it."""
    values: dict[str, Value] = {}
    for name in (name for name in axes if name in AXES):
        value = getattr(row, name)
        values[name] = None if value == "" else value
    return Case(**values).label(values)  # type: ignore[arg-type]
