"""Which attempt at a run counts: the last one under each environment.

Said once, for whoever reads records: resume, report, compare and the import into asv.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from bench.case import AXES
from bench.record import COMPARABLE

if TYPE_CHECKING:
    import pandas as pd


def number_groups(frame: pd.DataFrame, names: Iterable[str]) -> pd.Series:
    """Number the rows so that two have one number exactly where they agree on ``names``."""
    import numpy as np
    import pandas as pd

    codes = np.zeros(len(frame), dtype=np.int64)
    for name in names:
        levels, uniques = pd.factorize(frame[name], use_na_sentinel=False)
        codes = codes * (len(uniques) + 1) + levels
        # renumbered each time: the product of all axes may not fit 64 bits
        codes = pd.factorize(codes)[0].astype(np.int64)
    return pd.Series(codes, index=frame.index)


def keep_latest(records: pd.DataFrame) -> pd.DataFrame:
    """The rows that count: of each run, the last attempt under each environment.

    A run is a case, a repeat and whether it is the sentinel; two environments are one where they
    agree on `COMPARABLE`. Rows that another GPU or another torch measured (``--mix``) are no
    attempts at the same run.

    Args:
        records: of `bench.store.read_records`; where several sweeps stand under each other, their
            column ``sweep`` tells them apart.

    Returns:
        Some of the rows, in their order.
    """
    where = ["sweep"] if "sweep" in records else []
    rows = records.sort_values("attempt", kind="stable")
    run = number_groups(rows, [*where, *AXES, "repeat", "sentinel", *COMPARABLE])
    return rows[~run.duplicated(keep="last")].sort_index()
