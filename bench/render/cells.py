"""Single cells of tables: numbers, ends of intervals, outcomes, remarks, names."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from bench.axis import Value
from bench.case import AXES, Case
from bench.record import Status
from bench.render.model import NOTHING, Cell
from bench.study.axes import MACHINE, Machines
from bench.study.doubts import DOUBTS
from bench.study.quantities import is_number
from bench.study.results import Spread
from bench.text import ESTIMATE as ESTIMATE
from bench.text import write_number

if TYPE_CHECKING:
    pass

Row = Any  # a run or a result, its cells and quantities as attributes


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


def name_spread(cases: Iterable[Row]) -> str:
    """Return the suffix of the times' column head, which names the kind of their spread."""
    kinds = {case.spread for case in cases} - {Spread.NONE.value}
    words = {
        Spread.WITHIN.value: " [within the run]",
        Spread.RANGE.value: ", range",
        Spread.PREDICTION.value: ", interval",
    }
    return ", spread" if len(kinds) > 1 else words[kinds.pop()] if kinds else ""


def outcome(status: str, inferred: bool = False) -> str:
    """Name an outcome without a time: out of memory in words, others by their status."""
    names = {Status.OOM.value: "out of memory", Status.OOM_SUSPECTED.value: "out of memory?"}
    return names.get(status, status) + (" (inferred)" if inferred else "")


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
    """Return the `Case.label` of a run or a result, by those of some axes that a `Case` has. Their
    values are spelled as in CSV, so no `Case` is parsed for it."""
    values: dict[str, Value] = {}
    for name in (name for name in axes if name in AXES):
        value = getattr(row, name)
        values[name] = None if value == "" else value
    return Case(**values).label(values)  # type: ignore[arg-type]
