"""Which attempt at a run counts: the last one under each environment.

Defined once for all code that reads records: resume, report, compare and the import into asv.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from bench.case import AXES
from bench.record import COMPARABLE

if TYPE_CHECKING:
    import pandas as pd


_LARGEST = 2**62  # the product of all axes' levels may be larger, and overflow 64 bits

ASKED = "asked"
"""An optional column that numbers the cases: comparing it is quicker than comparing 50 axes."""

FEW = 1000
"""Rows up to which looking at each cell is faster than numbering the cells."""

FEWEST = 200
"""Rows up to which comparing whole rows is faster than looking up columns one by one."""


def number_groups(frame: pd.DataFrame, names: Iterable[str]) -> pd.Series:
    """Number the rows: two have the same number exactly if they agree on ``names``."""
    import numpy as np
    import pandas as pd

    names = [*names]
    if ASKED in frame and {*AXES} <= {*names}:
        names = [ASKED, *(name for name in names if name not in AXES)]
    if len(frame) < FEWEST and len(names) > 2:
        cells = frame[names].to_numpy(object, copy=True)
        cells[cells != cells] = None  # NaN is not equal to NaN
        seen: dict[tuple[object, ...], int] = {}
        numbers = [seen.setdefault(row, len(seen)) for row in map(tuple, cells.tolist())]
        return pd.Series(numbers, frame.index, np.int64)
    codes, levels = np.zeros(len(frame), dtype=np.int64), 1
    for name in names:
        column = frame[name]
        quick = column.dtype == object or len(column) < FEW
        if quick and len(set(column.tolist())) < 2:  # as most axes of most sweeps
            continue
        places, uniques = pd.factorize(column, use_na_sentinel=False)
        if len(uniques) < 2:
            continue
        if levels * len(uniques) > _LARGEST:
            codes, found = pd.factorize(codes)
            levels = len(found)
        codes, levels = codes * len(uniques) + places, levels * len(uniques)
    codes = pd.factorize(codes)[0].astype(np.int64)
    return pd.Series(codes, index=frame.index)


def keep_cases(records: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that measure a whole case: no sentinels, probes or truncated trials.

    A probe trains a few steps to see whether a batch fits; its time says nothing. A search ends the
    trials of poor settings early: a loss after two epochs is not that of a case of nine.
    """
    return keep(records, find_repeats(records) & ~find_truncated(records))


def find_repeats(records: pd.DataFrame) -> pd.Series:
    """Return which rows are repeats of their case: no sentinels or probes."""
    return ~(records["sentinel"].astype(bool) | records["probe"].astype(bool))


def keep(rows: pd.DataFrame, which: pd.Series) -> pd.DataFrame:
    """Return the rows ``which``, not copied if they are all: copying 100,000 takes 0.1 s."""
    return rows.copy(deep=False) if which.all() else rows[which]


def find_truncated(records: pd.DataFrame) -> pd.Series:
    """Return which rows are trials that a search ended before the last epoch of their case."""
    return records["truncated_after"].notna()


def find_unknown(rows: pd.DataFrame, name: str) -> pd.Series:
    """Return which rows do not know a column of `COMPARABLE`. Empty ``variables`` are known in rows
    that know their torch: no environment variable was set."""
    unknown = rows[name] == ""
    return unknown & (rows["torch"] == "") if name == "variables" else unknown


def fill_unknown(rows: pd.DataFrame, group: pd.Series) -> pd.DataFrame:
    """Return the columns of `COMPARABLE`, with unknown cells filled from the row's ``group``
    number.

    A run that fails early may not know its torch, card or network, which does not make it an
    environment of its own. Such a cell takes the value of the next row of the group that has one,
    else of the last row before, in the order in which the rows were made.
    """
    import pandas as pd

    columns = {}
    for name in COMPARABLE:
        cells, unknown = rows[name], find_unknown(rows, name)
        if unknown.any() and not unknown.all():
            known = cells.mask(unknown).groupby(group)
            cells = known.bfill().fillna(known.ffill()).fillna("")
        columns[name] = cells
    return pd.DataFrame(columns, index=rows.index)


def keep_latest(records: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that count, in their order: each run's last attempt under each environment.

    A run is a case, a repeat and whether it is the sentinel or a probe; in frames of several sweeps
    also the ``sweep``. Two environments are the same if they agree on `COMPARABLE`, as far as both
    are known. Rows of another GPU or another torch (``--mix``) are not attempts at
    the same run.
    """
    where = ["sweep"] if "sweep" in records else []
    which = [*where, *AXES, "repeat", "sentinel", "probe"]
    needed = {*which, *COMPARABLE, "attempt", ASKED}
    rows = records[[name for name in records if name in needed]]
    run = number_groups(rows, which)
    if not run.duplicated().any():
        return records.copy(deep=False)
    rows = rows.sort_values("attempt", kind="stable")
    run = run[rows.index]
    attempts = fill_unknown(rows, run).assign(run=run)
    group = number_groups(attempts, attempts.columns)
    return keep(records, ~group.duplicated(keep="last").reindex(records.index))


def find_mixed(rows: pd.DataFrame) -> list[str]:
    """Return the columns of `COMPARABLE` in which `keep_latest` rows of one case differ: it would
    be wrong to pool them."""
    if rows.empty:
        return []
    case = number_groups(rows, AXES)
    environment = fill_unknown(rows, case)
    varies = environment.groupby(case).nunique().gt(1).any()
    return [name for name in COMPARABLE if varies[name]]
