"""Summaries of records: one row per case.

A frame of records goes through three steps::

    read()       rows of several sweeps, each with its machine, quantities and doubts
    latest()     the last attempt at each run; sentinels and probes left out
    summarize()  one row per case: medians over repeats, then comparisons with fp32 (speed-up, …)

Everything is vectorised: 100,000 records take about a second.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.case import AXES, SAME_QUESTION, free_axes
from bench.interval import CONFIDENCE
from bench.limits import STEADY
from bench.origin import find_origin
from bench.record import COMPARABLE, MEASURED, MODEL_PARTS, RELIABLE, Status
from bench.store.attempts import ASKED, FEW, keep, keep_cases, keep_latest, number_groups
from bench.study.columns import Columns, fill, find_least, known, leave_out, positive
from bench.study.doubts import DOUBTS, LEAST_KNOWN
from bench.study.quantities import MEMORY, STORED
from bench.study.spread import ENOUGH, Spread, choose_depth, find_coverage, find_middle

if TYPE_CHECKING:
    import pandas as pd

    from bench.study.columns import Array
    from bench.study.sweeps import Sweep


SOURCE = ("sweep", "machine")


def list_equal(free: Collection[str] = ()) -> list[str]:
    """Return the columns in which cases agree that differ only in the axes ``free``."""
    return [*SOURCE, *(name for name in AXES if name not in free), "environment", "kind"]


def read(sweeps: Sequence[Sweep]) -> pd.DataFrame:
    """Join sweeps into one frame, one row per record, with its quantities and doubts.

    Added to the columns of `COLUMNS`: ``sweep``, ``machine`` (the GPU, or the CPU), ``kind``
    (`find_origin`), ``environment`` (numbers rows that agree on `COMPARABLE`), ``part`` (share of
    an epoch that was measured; the rest is extrapolated), ``busy_step_s`` (`find_busy`),
    ``straggle`` (see `Sweep.read_stragglers`), ``unaffected`` (see `Sweep.read_unaffected`),
    ``asked`` (a number for its case), ``memory_measure``, each of `STORED` and each of `DOUBTS`.
    """
    import numpy as np
    import pandas as pd

    # for one sweep, and below, this copies nothing: three copies of 100,000 records took 0.5 GB
    records = pd.concat(
        [
            sweep.records.assign(
                sweep=sweep.name,
                unaffected=_look_up(sweep.records["record_id"], sweep.read_unaffected()),
                straggle=sweep.records["record_id"].map(sweep.read_stragglers()).astype(float),
            )
            for sweep in sweeps
        ],
        ignore_index=True,
    )
    _fill_environment(records)
    records[ASKED] = number_groups(records, AXES)
    added: dict[str, Array] = {}
    r = Columns(records, added)
    added |= {
        "machine": np.where(
            r.device != "cpu",
            r.gpu.map(lambda name: name or "unknown GPU", object),
            r.cpu.map(lambda name: name or "CPU", object),
        ),
        "kind": r.executor.map(find_origin, object),
        "environment": number_groups(records, COMPARABLE).to_numpy(),
        "part": measure_part(records, SOURCE[:1]),
        "busy_step_s": find_busy(records, SOURCE[:1]),
    }
    added["memory_measure"] = choose_memory(r)
    with np.errstate(all="ignore"):
        derived = {q.name: q.take(r) for q in STORED}
        derived |= {doubt.name: doubt.find(r) for doubt in DOUBTS.values()}
    # unchanged columns are left in place
    for name, values in derived.items():
        if name not in records:
            added[name] = values
        elif values is not getattr(r, name):
            records[name] = values
    every = pd.concat([records, pd.DataFrame(added)], axis=1)
    return join_texts(every) if len(every) < FEW else every


def _look_up(records: pd.Series, found: Mapping[str, str]) -> list[str]:
    return [found.get(record, "") for record in records]


def join_texts(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with all text in one block of objects: masking a few rows then takes a third
    of the time, indexing a column a tenth. Column names too: Arrow's take three times as long."""
    import pandas as pd

    texts: pd.DataFrame = frame.select_dtypes("str")
    objects = pd.DataFrame(texts.to_numpy(), texts.index, texts.columns, dtype=object)
    joined = pd.concat([objects, frame.select_dtypes(exclude="str")], axis=1).copy()
    joined.columns = joined.columns.astype(object)
    return joined


def _fill_environment(records: pd.DataFrame) -> None:
    """Fill in what rows that ended too early lack of their environment, if unique in the sweep."""
    lost = records["torch"] == ""
    if lost.nunique() < 2:  # as in every sweep but those that failed early
        return
    also = {"gpu_memory_bytes": ("device",), "cpu": ("device",), "train_images": ("dataset",)}
    for name, axes in {**COMPARABLE, **also}.items():
        empty = lost & (records[name].isna() | (records[name] == ""))
        for values, cells in records[~lost].groupby(["sweep", *axes])[name]:
            if cells.nunique() == 1:
                same = (records[["sweep", *axes]] == list(values)).all(axis=1)
                records.loc[empty & same, name] = cells.iloc[0]


def measure_part(records: pd.DataFrame, where: Sequence[str] = ()) -> Array:
    """Return the share of an epoch that a case measures, equal in all its rows: its fraction, or
    less with ``--steps`` or ``--until``, where each run measures as much as it needs. ``where``
    names columns besides the axes that tell cases apart."""
    import numpy as np

    r = Columns(records)
    share = np.minimum(fill(r.measured_steps / positive(r.steps_per_epoch), 1.0), r.fraction)
    part = np.where((r.steps == "") & (r.until == ""), r.fraction, share)
    # a run that failed has no steps: it takes the part of its repeats
    return find_least(part, number_groups(records, [*where, *AXES]).to_numpy())


def find_busy(records: pd.DataFrame, where: Sequence[str] = ()) -> Array:
    """Return the kernel time of a step on a GPU, in s, from the run's own profile or from one of
    the same case and environment that measured another part of an epoch, which does not affect it.
    NaN without a profile and on a CPU. ``where`` names columns besides the axes that tell cases
    apart."""
    import numpy as np

    r = Columns(records)
    elsewhere = r.device != "cuda"
    own = leave_out(r.busy_s, elsewhere)
    if not known(own).any():  # as on every CPU
        return own
    equal = [*where, *(name for name in AXES if name not in SAME_QUESTION), *COMPARABLE]
    least = find_least(fill(own, np.inf), number_groups(records, equal).to_numpy())
    return fill(own, leave_out(least, elsewhere | np.isinf(least)))


def choose_memory(r: Columns) -> Array:
    """Return the column of `MEMORY` that each row's memory is read from: the first with a value in
    any row of the same machine and kind."""
    import numpy as np

    chosen = np.full(len(r), "", object)
    for kind in r.kind.distinct:
        mine = r.kind == kind
        for name in reversed(MEMORY):
            chosen[mine & r.machine.any_of(mine & known(getattr(r, name)))] = name
    return chosen


def latest(records: pd.DataFrame) -> pd.DataFrame:
    """Keep the last attempt at each run, without sentinels and probes.

    Added is ``cell``, a number for each case on its machine, which its repeats share. Repeats under
    different `COMPARABLE` environments are separate cases.
    """
    rows = keep_latest(keep_cases(records))
    return rows.assign(cell=number_groups(rows, list_equal()))


# a case has the best-ranked status of its repeats: the one that tells most about its time
_RANK = {
    status.value: rank
    for rank, status in enumerate(
        (Status.OK, Status.DIVERGED, Status.INVALID, Status.OOM, Status.OOM_SUSPECTED)
    )
}


def summarize(rows: pd.DataFrame) -> pd.DataFrame:
    """Summarize the rows of `latest`: one row per case and machine, in the order they first ran.

    Numbers are medians over the repeats that ended with the status of the case. ``NAME_low`` and
    ``NAME_high`` are the ends of their spread, which ``spread`` and ``coverage`` describe (see
    `bench.study.spread`); ``repeats`` and ``seeds`` are their numbers of repeats and seeds, and
    ``runs`` is the number of all runs.
    """
    import numpy as np
    import pandas as pd

    r = Columns(rows)
    rank = r.status.map(lambda status: _RANK.get(status, len(_RANK)))
    counts = rank == find_least(rank, r.cell)
    kept = keep(rows, pd.Series(counts, rows.index))
    k = Columns(kept)
    group, cells = pd.factorize(k.cell)
    every = pd.Index(cells).get_indexer(r.cell)
    found: dict[str, Array] = {
        # over all runs: a run that diverged is reported
        **{name: np.bincount(every, getattr(r, name)) > 0 for name in DOUBTS},
        "repeats": np.bincount(group),
        "seeds": np.bincount(group[~number_groups(kept, ["cell", "run_seed"]).duplicated()]),
        "runs": np.bincount(every),
    }
    timed = k.status.find(lambda status: status in MEASURED)
    for q in STORED:
        values = getattr(k, q.name)
        if q.name in ("epoch_time_s", "images_per_s"):
            values = leave_out(values, ~timed)
        middle, low, high = find_middle(values, group)
        if q.rate:
            middle = 1 / find_middle(1 / positive(values), group)[0]
        found |= {q.name: middle, f"{q.name}_low": low, f"{q.name}_high": high}
    places = np.unique(group, return_index=True)[1]
    first = kept[[name for name in kept if name not in found]].iloc[places].reset_index(drop=True)
    with np.errstate(all="ignore"):
        found |= _say_spread(Columns(first), found)
        found["noisy"] |= find_wide(found)
        found |= _pair(first, found)
    found["apart"] = _tell_apart(first).to_numpy()
    return join_texts(pd.concat([first, pd.DataFrame(found)], axis=1))


def _say_spread(first: Columns, found: Mapping[str, Array]) -> dict[str, Array]:
    import numpy as np

    repeats, time = found["repeats"], found["epoch_time_s"]
    low, high = first.epoch_time_low_s, first.epoch_time_high_s
    # too wide an interval is left out: the doubt ``unknown`` reports it
    single = (repeats == 1) & ((high - low) / 2 <= LEAST_KNOWN * time)
    images = found["images_per_s"] * time
    ends = {
        "epoch_time_s_low": low,
        "epoch_time_s_high": high,
        "images_per_s_low": images / positive(high),
        "images_per_s_high": images / positive(low),
    }
    spread = np.full(len(time), Spread.NONE.value, object)
    for which, kind in (
        (single, Spread.WITHIN),
        (repeats > 1, Spread.RANGE),
        (repeats >= ENOUGH, Spread.PREDICTION),
    ):
        spread[which] = kind.value
    coverage = np.where(single, CONFIDENCE, math.nan)
    for number in np.unique(repeats[repeats >= ENOUGH]).tolist():
        coverage[repeats == number] = find_coverage(number, choose_depth(number))
    return {
        **{name: np.where(single, own, found[name]) for name, own in ends.items()},
        "spread": spread,
        "coverage": coverage,
    }


def find_wide(cases: Mapping[str, Array] | pd.DataFrame) -> Any:
    """Return which cases' repeats spread by more than ±`STEADY` (half the width of the spread)."""
    half = (cases["epoch_time_s_high"] - cases["epoch_time_s_low"]) / 2
    return (cases["repeats"] > 1) & (half / cases["epoch_time_s"] > STEADY)


def _pair(first: pd.DataFrame, found: Mapping[str, Array]) -> dict[str, Array]:
    """Compare each case with fp32 on the same machine with all else equal."""
    import numpy as np

    free = (*free_axes("precision"), *SAME_QUESTION)
    partner = number_groups(first, list_equal(free)).to_numpy()
    f = Columns(first)
    sound, plain = f.status.find(lambda status: status in RELIABLE), f.precision == "fp32"
    # of fp32 cases that differ only in how they were measured, the one that measured most
    places = np.flatnonzero(sound & plain)
    places = places[np.argsort(-f.part[places], kind="stable")][::-1]
    profiled = f.profile.astype(int)
    base = np.full((len(first), 2), -1)  # by number of the group; the last one written stays
    base[partner[places], profiled[places]] = places
    # a profiled case is compared with a profiled one, if there is one
    at, other = base[partner, profiled], sound & ~plain
    at = np.where(at < 0, base[partner, 1 - profiled], at)

    def find_base(values: Array) -> Array:
        return leave_out(values[at], at < 0)

    bytes, tensors = found["memory_bytes"], found["peak_allocated_bytes"]
    pairs = {
        "speedup": find_base(found["epoch_time_s"]) / positive(found["epoch_time_s"]),
        "memory_saved": 1 - bytes / positive(find_base(bytes)),
        "tensors_saved": 1 - tensors / positive(find_base(tensors)),
    }
    return {
        "base_fraction": fill(find_base(f.part), 1.0),
        **{name: leave_out(values, ~other) for name, values in pairs.items()},
    }


def _tell_apart(cases: pd.DataFrame) -> pd.Series:
    import pandas as pd

    cell = number_groups(cases, [*SOURCE, *AXES, "kind"])
    alike = cell.duplicated(keep=False)
    apart = pd.Series("", cases.index)
    if not alike.any():  # as in every sweep without --mix
        return apart
    said = alike & False
    for name in COMPARABLE:
        varies = alike & (cases[name].groupby(cell).transform("nunique") > 1)
        if name in MODEL_PARTS:  # one of its parts is enough
            varies, said = varies & ~said, said | varies
        what, most = ("network", 8) if name in MODEL_PARTS else (name.replace("_", " "), 40)
        apart = apart.mask(varies, apart + f", {what} " + cases[name].astype(str).str[:most])
    return apart.str.removeprefix(", ")


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
