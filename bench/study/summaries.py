"""Runs and results as frames, for the questions that still read those.

read()       rows of several sweeps, each with its machine, quantities and doubts
latest()     the last attempt at each run; sentinels and probes left out
summarize()  one row per case: medians over repeats, then comparisons with fp32 (speed-up, …)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.case import AXES
from bench.record import COMPARABLE
from bench.store.attempts import ASKED, keep_cases, keep_latest
from bench.study.doubts import DOUBTS
from bench.study.quantities import QUANTITIES, STORED
from bench.study.results import make_results
from bench.study.runs import read_runs

if TYPE_CHECKING:
    import pandas as pd

    from bench.study.sweeps import Sweep


SOURCE = ("sweep", "machine")

_BOTH: dict[str, type | None] = {
    **dict.fromkeys((q.name for q in STORED), float),
    **dict.fromkeys(DOUBTS, bool),
}
_OF_RUNS = _BOTH | {
    **dict.fromkeys(("run", "sweep", "machine", "kind", "memory_measure"), object),
    **dict.fromkeys((ASKED, "environment", "cell"), int),
    **dict.fromkeys(("part", "busy_step_s", "straggle"), float),
    # those that a run which ended too early is told
    **dict.fromkeys((*COMPARABLE, "cpu"), object),
    **dict.fromkeys(("gpu_memory_bytes", "train_images"), None),
}
_OF_RESULTS = _BOTH | {
    **dict.fromkeys((q.name for q in QUANTITIES.values() if q.paired), float),
    **dict.fromkeys((f"{q.name}_{end}" for q in STORED for end in ("low", "high")), float),
    **dict.fromkeys(("base_fraction", "coverage", "start_time_s"), float),
    **dict.fromkeys(("repeats", "seeds", "runs"), int),
    **dict.fromkeys(("result", "spread", "apart"), object),
    "wide": bool,
}


def list_equal(free: Collection[str] = ()) -> list[str]:
    """Return the columns in which cases agree that differ only in the axes ``free``."""
    return [*SOURCE, *(name for name in AXES if name not in free), "environment", "kind"]


def read(sweeps: Sequence[Sweep]) -> pd.DataFrame:
    """Join sweeps into one frame, one row per record: its columns, ``run``, and what is derived of
    it (`_OF_RUNS`)."""
    import pandas as pd

    records = pd.concat([sweep.records for sweep in sweeps], ignore_index=True)
    return _add(records, read_runs(sweeps), "run", _OF_RUNS)


def latest(records: pd.DataFrame) -> pd.DataFrame:
    """Keep the last attempt at each run, without sentinels and probes."""
    return keep_latest(keep_cases(records))


def summarize(rows: pd.DataFrame) -> pd.DataFrame:
    """Summarize the rows of `latest`: one row per case and machine, in the order they first ran:
    ``result``, what it says (`_OF_RESULTS`), and the columns of the first of its runs."""
    results = make_results(rows["run"].tolist())
    places = {id(run): place for place, run in enumerate(rows["run"])}
    first = rows.iloc[[places[id(result.first)] for result in results]]
    return _add(first.reset_index(drop=True), results, "result", _OF_RESULTS)


def _add(
    frame: pd.DataFrame, items: Sequence[Any], name: str, kinds: Mapping[str, type | None]
) -> pd.DataFrame:
    """Add runs or results to a frame, as the column ``name``, and their attributes of ``kinds``.

    All text is then in one block of objects: masking a few rows takes a third of the time, indexing
    a column a tenth. Column names too: Arrow's take three times as long.
    """
    import numpy as np
    import pandas as pd

    added = {
        column: np.array([*items] if column == name else [getattr(i, column) for i in items], kind)
        for column, kind in kinds.items()
    }
    every = pd.concat([frame.drop(columns=[*added], errors="ignore"), pd.DataFrame(added)], axis=1)
    texts: pd.DataFrame = every.select_dtypes("str")
    objects = pd.DataFrame(texts.to_numpy(), texts.index, texts.columns, dtype=object)
    joined = pd.concat([objects, every.select_dtypes(exclude="str")], axis=1).copy()
    joined.columns = joined.columns.astype(object)
    return joined


MATCH = ("model", "dataset", "precision", "batch_size", "loss_scale")
"""Columns that must be equal for a published case to be shown beside a measured one."""

BESIDE = ("status", "epoch_time_s", "images_per_s", "speedup", "memory_bytes", "memory_saved")


def join_published(cases: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """Add ``published_NAME`` for each of `BESIDE`; empty where nothing was published, and for cases
    that are published themselves. ``published`` are the cases of the reference sweep."""
    theirs = published[published["dataset"] != "synthetic"]
    theirs = theirs[[*MATCH, *BESIDE]].drop_duplicates(list(MATCH))
    theirs = theirs.rename(columns={name: f"published_{name}" for name in BESIDE})
    matched = cases.merge(theirs, on=list(MATCH), how="left").set_axis(cases.index)
    for name in BESIDE:
        matched[f"published_{name}"] = matched[f"published_{name}"].mask(
            cases["kind"] == "published"
        )
    matched["published_status"] = matched["published_status"].fillna("")
    return matched


def list_machines(frame: pd.DataFrame) -> list[tuple[str, str]]:
    """Return the distinct (sweep, machine) pairs of a frame, in order."""
    return list(dict.fromkeys(zip(frame["sweep"], frame["machine"], strict=True)))
