"""From records to one row a case.

A frame of records goes through three steps::

    read()       rows of several sweeps, each with its machine, quantities and doubts
    latest()     the attempt that counts of each run; sentinels and probes left out
    summarize()  one row a case: medians over repeats, then what needs a partner (speed-up, …)

Everything is vectorised: 100,000 records take about a second.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from bench.anchors import judge_lanes
from bench.case import AXES, SAME_QUESTION, free_axes
from bench.interval import CONFIDENCE
from bench.limits import STEADY
from bench.record import COMPARABLE, MEASURED, MODEL_PARTS, RELIABLE, Status
from bench.store.attempts import ASKED, keep, keep_cases, keep_latest, number_groups
from bench.study.doubts import DOUBTS, LEAST_KNOWN
from bench.study.quantities import (
    ALSO_FILLED,
    QUANTITIES,
    choose_memory,
    compare_with_card,
    positive,
    take_median,
)
from bench.study.spread import ENOUGH, Spread, choose_depth, find_coverage, find_ends

if TYPE_CHECKING:
    import pandas as pd

    from bench.study.sweeps import Sweep


SOURCE = ("sweep", "machine")


def list_equal(free: Collection[str] = ()) -> list[str]:
    """The columns in which cases agree that differ in no axes but ``free``."""
    return [*SOURCE, *(name for name in AXES if name not in free), "environment", "kind"]


def read(sweeps: Sequence[Sweep]) -> pd.DataFrame:
    """Join sweeps into one frame, one row a record, with what can be said of each row alone.

    Added to the columns of `COLUMNS`: ``sweep``, ``machine`` (the GPU, or the CPU), ``kind``
    (measured, fake or published), ``environment`` (a number: rows that agree on `COMPARABLE`),
    ``part`` (of an epoch that was measured; the rest is extrapolated), ``unnamed_share`` (of a
    profiled step that no kind of work names), ``straggle`` (of its slowest process), those of
    `judge_lanes`, ``asked`` (a number of its case), ``memory_measure``, those of
    `compare_with_card`, each of `QUANTITIES` that has a ``derive`` and each of `DOUBTS`.
    """
    import pandas as pd

    # of one sweep, and below, this copies nothing: three copies of 100,000 records took 0.5 GB
    records = pd.concat(
        [
            sweep.records.assign(
                sweep=sweep.name,
                unnamed_share=sweep.records["record_id"].map(sweep.read_unnamed()).astype(float),
                **judge_lanes(sweep.records),
                straggle=sweep.records["record_id"].map(sweep.read_stragglers()).astype(float),
            )
            for sweep in sweeps
        ],
        ignore_index=True,
    )
    _fill_environment(records)
    records[ASKED] = number_groups(records, AXES)
    kinds = {"fake": "fake", "published": "published"}
    added: dict[str, pd.Series] = {
        "machine": _machine(records),
        "kind": records["executor"].map(kinds).fillna("measured"),
        "environment": number_groups(records, COMPARABLE),
        "part": measure_part(records, SOURCE[:1]),
    }
    records = pd.concat([records, pd.DataFrame(added)], axis=1)
    records = records.assign(memory_measure=choose_memory(records), **compare_with_card(records))
    derived = {q.name: q.derive(records) for q in QUANTITIES.values() if q.derive}
    derived |= {doubt.name: doubt.find(records) for doubt in DOUBTS.values()}
    known = {name: derived.pop(name) for name in [*derived] if name in records}
    return pd.concat([records.assign(**known), pd.DataFrame(derived)], axis=1)


def _fill_environment(records: pd.DataFrame) -> None:
    """Give rows that ended before they knew their environment their sweep's, where it has one."""
    lost = records["torch"] == ""
    if not lost.any():
        return
    also = {name: (axis,) for name, axis in ALSO_FILLED.items()}
    for name, axes in {**COMPARABLE, **also}.items():
        empty = lost & (records[name].isna() | (records[name] == ""))
        known = records[~lost].groupby(["sweep", *axes])[name]
        for values, cells in known:
            if cells.nunique() == 1:
                same = (records[["sweep", *axes]] == list(values)).all(axis=1)
                records.loc[empty & same, name] = cells.iloc[0]


def measure_part(records: pd.DataFrame, where: Sequence[str] = ()) -> pd.Series:
    """The part of an epoch that a case measures: its fraction, or less with ``--steps``.

    With ``--until`` a run measures less too, and each as much as it needs.

    Args:
        records: any rows; all of one case have the same part.
        where: columns beside the axes that tell cases apart.
    """
    share = records["measured_steps"] / positive(records["steps_per_epoch"])
    part = records["fraction"].where(
        (records["steps"] == "") & (records["until"] == ""),
        share.fillna(1.0).clip(upper=records["fraction"]),
    )
    # a run that failed has no steps: it is of the case that its repeats measured
    return part.groupby(number_groups(records, [*where, *AXES])).transform("min")


def _machine(records: pd.DataFrame) -> pd.Series:
    cpu = records["cpu"].where(records["cpu"] != "", "CPU")
    gpu = records["gpu"].where(records["gpu"] != "", "unknown GPU")
    return gpu.where(records["device"] == "cuda", cpu)


def latest(records: pd.DataFrame) -> pd.DataFrame:
    """The rows that count: the last attempt at each run; no sentinels, no probes.

    Added is ``cell``, a number for each case on its machine: its repeats share it. Repeats under
    different `COMPARABLE` environments are cases of their own.
    """
    rows = keep_latest(keep_cases(records))
    return rows.assign(cell=number_groups(rows, list_equal()))


# the outcome a case with repeats is known by: what tells most about its time
_RANK = {
    status.value: rank
    for rank, status in enumerate(
        (Status.OK, Status.DIVERGED, Status.INVALID, Status.OOM, Status.OOM_SUSPECTED)
    )
}


def summarize(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a case on a machine, in the order they first ran.

    Numbers are medians over the repeats that ended as the case is said to have, ``NAME_low`` and
    ``NAME_high`` the ends of their spread, ``spread`` and ``coverage`` what these ends are (see
    `bench.study.spread`), ``repeats`` how many they are, ``runs`` how many there were and
    ``seeds`` how many seeds they had.

    Args:
        rows: of `latest`.
    """
    rows = rows.reset_index(drop=True)
    cell = rows["cell"]
    rank = rows["status"].map(_RANK).fillna(len(_RANK))
    counts = rank == rank.groupby(cell).transform("min")
    runs = cell.value_counts()
    doubts = rows[list(DOUBTS)].groupby(cell).any()  # of every run: one that diverged is told
    rows, cell = keep(rows, counts), cell[counts]
    names = [q.name for q in QUANTITIES.values() if q.derive]
    numbers = rows[names].astype(float)
    measured = rows["status"].isin([s.value for s in MEASURED])
    numbers["epoch_time_s"] = numbers["epoch_time_s"].where(measured)
    numbers["images_per_s"] = numbers["images_per_s"].where(measured)
    medians = take_median(numbers, cell)
    low, high = find_ends(numbers, cell)
    repeats = cell.value_counts().rename("repeats")
    seeds = rows["run_seed"].groupby(cell).nunique().rename("seeds")
    first = rows[~cell.duplicated()].set_index(cell[~cell.duplicated()])
    first = first.drop(columns=[*names, *DOUBTS])
    # as objects, all text is one block: of few cases, a mask then takes a tenth of the time
    cases = (
        first.astype(dict.fromkeys(first.columns[first.dtypes == "str"], object))
        .join(
            [
                medians,
                low.add_suffix("_low"),
                high.add_suffix("_high"),
                doubts,
                repeats,
                seeds,
                runs.rename("runs"),
            ]
        )
        .copy()
    )  # in one block again: columns are added below
    _say_spread(cases)
    _tell_apart(cases)
    cases["noisy"] |= find_wide(cases)
    return _pair(cases).reset_index(drop=True)


def _tell_apart(cases: pd.DataFrame) -> None:
    """Add ``apart``: what tells a case from those of the same axes that something else ran."""
    cell = number_groups(cases, [*SOURCE, *AXES, "kind"])
    alike = cell.duplicated(keep=False)
    cases["apart"] = ""
    if not alike.any():  # as in every sweep without --mix
        return
    said = alike & False
    for name in COMPARABLE:
        varies = alike & (cases[name].groupby(cell).transform("nunique") > 1)
        if name in MODEL_PARTS:  # one of its parts is enough
            varies, said = varies & ~said, said | varies
        what = "network" if name in MODEL_PARTS else name.replace("_", " ")
        text = what + " " + cases[name].astype(str).str.slice(0, 40 if what != "network" else 8)
        cases["apart"] = cases["apart"].mask(varies, cases["apart"] + ", " + text)
    cases["apart"] = cases["apart"].str.removeprefix(", ")


def _say_spread(cases: pd.DataFrame) -> None:
    """Add what the ends of each case are; single runs have those their own steps allow."""
    repeats = cases["repeats"]
    single = (repeats == 1) & cases[["epoch_time_low_s", "epoch_time_high_s"]].notna().all(axis=1)
    time, low, high = (
        cases[name].astype(float)
        for name in ("epoch_time_s", "epoch_time_low_s", "epoch_time_high_s")
    )
    # an interval from nothing to a multiple of the time says nothing; a doubt does
    single &= (high - low) / 2 <= LEAST_KNOWN * time
    low, high = low[single], high[single]
    cases.loc[single, "epoch_time_s_low"], cases.loc[single, "epoch_time_s_high"] = low, high
    images = cases.loc[single, "images_per_s"] * cases.loc[single, "epoch_time_s"]
    cases.loc[single, "images_per_s_low"] = images / positive(high)
    cases.loc[single, "images_per_s_high"] = images / positive(low)
    cases["spread"] = Spread.NONE.value
    cases.loc[single, "spread"] = Spread.WITHIN.value
    cases.loc[repeats > 1, "spread"] = Spread.RANGE.value
    cases.loc[repeats >= ENOUGH, "spread"] = Spread.PREDICTION.value
    known = {n: find_coverage(n, choose_depth(n)) for n in repeats.unique() if n >= ENOUGH}
    cases["coverage"] = repeats.map(known).astype(float)
    cases.loc[single, "coverage"] = CONFIDENCE


def find_wide(cases: pd.DataFrame) -> pd.Series:
    """Which cases' repeats spread by more than ±`STEADY`: half the width of what is shown."""
    half = (cases["epoch_time_s_high"] - cases["epoch_time_s_low"]) / 2
    return (cases["repeats"] > 1) & (half / cases["epoch_time_s"] > STEADY)


def _pair(cases: pd.DataFrame) -> pd.DataFrame:
    """Set each case against fp32 on the same machine with all else equal."""
    free = (*free_axes("precision"), *SAME_QUESTION)
    partner = number_groups(cases, list_equal(free))
    sound = cases["status"].isin(RELIABLE)
    # of fp32 cases that differ only in how they were measured, the one that measured most
    base = cases[(cases["precision"] == "fp32") & sound]
    base = base.sort_values("part", ascending=False, kind="stable")
    base = base.set_index(partner[base.index])
    base = base[~base.index.duplicated()]
    time, bytes, tensors = (
        base[name].reindex(partner).set_axis(cases.index)
        for name in ("epoch_time_s", "memory_bytes", "peak_allocated_bytes")
    )
    other = sound & (cases["precision"] != "fp32")
    return cases.assign(
        base_fraction=base["part"].reindex(partner).set_axis(cases.index).fillna(1.0),
        speedup=(time / positive(cases["epoch_time_s"])).where(other),
        memory_saved=(1 - cases["memory_bytes"] / positive(bytes)).where(other),
        tensors_saved=(1 - cases["peak_allocated_bytes"] / positive(tensors)).where(other),
    )


MATCH = ("model", "dataset", "precision", "batch_size", "loss_scale")
"""What a case and a published one must agree on to stand beside each other."""

BESIDE = ("status", "epoch_time_s", "images_per_s", "speedup", "memory_bytes", "memory_saved")


def set_beside(cases: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """Add ``published_NAME`` for each of `BESIDE`, empty where nothing was published.

    Args:
        cases: of `summarize`; rows that are published themselves get nothing beside them.
        published: of `summarize`, of the reference sweep.
    """
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
    """The (sweep, machine) pairs of a frame, in order."""
    return list(dict.fromkeys(zip(frame["sweep"], frame["machine"], strict=True)))
