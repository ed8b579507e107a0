"""Warnings about the numbers of a report, most serious first.

Each notice says what was found, in how many runs, and which flag or command helps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from bench.diagnosis.rates import (
    RATES,
    SAME_DEVICE,
    are_other_cpus,
    find_halves,
    find_losses,
    write_losses,
)
from bench.limits import STEADY
from bench.record import COMPARABLE, MEASURED, REPEATED, Status
from bench.render.model import Level, Notice
from bench.store.attempts import find_unknown
from bench.study.doubts import DOUBTS, Doubt, list_below, name_repeats
from bench.study.drift import Drift, Steadiness, find_drifts, write_moment
from bench.study.summaries import latest
from bench.study.sweeps import Sweep
from bench.text import capitalize, name_first, write_range

if TYPE_CHECKING:
    import pandas as pd


def warn(
    records: pd.DataFrame,
    cases: pd.DataFrame,
    everything: pd.DataFrame | None = None,
    sweeps: Sequence[Sweep] = (),
    across: bool = True,
    spoken: Mapping[bool, Collection[int]] | None = None,
) -> list[Notice]:
    """Return all warnings, most serious first: on ``records`` of `read` and their ``cases``, on
    drift in ``everything``, all records of their sweeps (``records`` by default), on what
    ``sweeps`` lack, and if ``across``, on what differs between the sweeps. A first screen has
    the doubts of the cells ``spoken``, by whether these are fatal; all if None."""
    rows = latest(records)
    below = list_below(cases)
    doubted: dict[bool, list[Notice]] = {True: [], False: []}
    for doubt in DOUBTS.values():
        if rows[doubt.name].any():  # few doubts apply, and a row has 250 columns
            told = rows if spoken is None else rows[rows["cell"].isin(spoken[doubt.fatal])]
            silent = doubt.name in below or not told[doubt.name].any()
            doubted[doubt.fatal].append(_describe_doubt(doubt, rows, silent))
    drifts = find_drifts(records if everything is None else everything)
    quieter = f"Close other programs, or use {name_repeats(cases['repeats'].max())}."
    return [
        *(Notice("Incomplete", *gap) for sweep in sweeps for gap in sweep.gaps),
        *_describe_failures(rows),
        *doubted[True],
        *_describe_spread(cases, quieter),
        *(_describe_drift(*where, found, quieter) for where, found in drifts.items()),
        *_describe_slowdowns(rows),
        *_describe_mixtures(rows, across),
        *doubted[False],
        *_describe_determinism(cases),
    ]


def _describe_doubt(doubt: Doubt, rows: pd.DataFrame, silent: bool) -> Notice:
    hit = rows[rows[doubt.name]]
    return Notice(
        capitalize(doubt.remark),
        doubt.warn(hit["run"].tolist()),
        doubt.advise(hit["run"].tolist()),
        _count(hit, rows),
        level=Level.DETAIL if silent else Level.TABLE,
    )


def _count(hit: pd.DataFrame, rows: pd.DataFrame) -> str:
    if len(hit) == len(rows):
        return f"all {len(rows):,} runs" if len(rows) > 1 else "the only run"
    sweeps = list(dict.fromkeys(hit["sweep"]))
    where = f" ({name_first(sweeps, 4)})" if len(sweeps) < rows["sweep"].nunique() else ""
    return f"{len(hit):,} of {len(rows):,} runs{where}"


def _describe_failures(rows: pd.DataFrame) -> Iterator[Notice]:
    failed = list_failed(rows)
    if len(failed):
        ends = failed["status"].str.replace("_", " ").value_counts()
        kinds = ", ".join(f"{n:,} {end}" for end, n in ends.items())
        asked = " ".join(list_asked(failed))
        mend = f"Run them again with --retry {asked}." if asked else ""
        mend = mend or "The same command runs them again."
        yield Notice("No result", f"{kinds}.", mend, _count(failed, rows))


def list_failed(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that ended neither measured, out of memory nor unsupported."""
    ended = [*(s.value for s in MEASURED), Status.OOM.value, Status.UNSUPPORTED.value]
    return rows[~rows["status"].isin(ended)]


def list_asked(failed: pd.DataFrame) -> list[str]:
    """Return the outcomes that are run again only by ``--retry``."""
    return [status for status in dict.fromkeys(failed["status"]) if status not in REPEATED]


def _describe_spread(cases: pd.DataFrame, quieter: str) -> Iterator[Notice]:
    if wide := int(cases["wide"].sum()):
        several = int((cases["repeats"] > 1).sum())
        yield Notice(
            "Spread",
            f"The times of {wide:,} of the {several:,} cases with repeats spread by more than "
            f"±{100 * STEADY:.0f} %; these cases are marked noisy.",
            quieter,
        )


def _describe_drift(sweep: str, machine: str, found: Sequence[Drift], quieter: str) -> Notice:
    order = list(Steadiness)
    worst = min(found, key=lambda drift: (order.index(drift.steadiness), -abs(drift.change)))
    moments = len({drift.started_at for drift in found})
    percent = f"{100 * abs(worst.change):.1f}"
    longer = f"{percent} % {'longer' if worst.change > 0 else 'less'} than"
    several = f" This is the largest change of {moments} such runs." if moments > 1 else ""
    text = (
        f"The first case of {sweep}, run again at the end on {machine} "
        f"({write_moment(worst.started_at)}), took "
        f"{longer if float(percent) else 'as long as'} {worst.against}"
    )
    mend = quieter
    if worst.steadiness is Steadiness.STEADY:
        mend = ""
    elif worst.steadiness is Steadiness.DRIFTED:
        text += f", more than the runs' own spread explains (±{100 * worst.margin:.1f} %)"
        mend = "Run the sweep again on an idle machine, into a new --out."
    elif math.isinf(worst.margin):
        text += "; one run does not show how far runs spread"
        mend = "Use --repeats 5."
    else:
        # a margin above 100 % would allow times below zero
        explained = f"up to ±{100 * worst.margin:.1f} %" if worst.margin < 1 else "any change"
        text += f"; the spread of the runs themselves may explain {explained}"
    return Notice(worst.steadiness.value, f"{text}.{several}", mend, good=not mend)


def _describe_slowdowns(rows: pd.DataFrame) -> Iterator[Notice]:
    """Warn of devices that were measured slower at one time than at another, each at its worst."""
    rated = rows[rows[list(RATES)].notna().any(axis=1)]
    for _, here in rated.groupby([*SAME_DEVICE, "lane"], dropna=False, sort=False):
        told = here[["sweep", "started_at", "gpu", "cpu", *RATES]]
        times = told.drop_duplicates(["sweep", *RATES]).to_dict("records")
        pairs = [
            (find_losses(now, before), now, before)
            for now in times
            for before in times
            if not are_other_cpus(find_halves(now), find_halves(before))
        ]
        losses, now, before = max(pairs, key=lambda pair: max(pair[0].values(), default=0.0))
        if losses:
            then, later = (
                f"{row['sweep']} ({write_moment(row['started_at'])})" for row in (before, now)
            )
            other = "" if now["gpu"] else ", or it was another CPU of this name"
            yield Notice(
                "Slower device",
                f"{now['gpu'] or now['cpu']} gave less in {later} than in {then}: "
                f"{write_losses(losses)}. What else used it, its clocks or its power limit is "
                f"between them{other}.",
                "Run the slower one again, into a new --out.",
            )


def _describe_mixtures(rows: pd.DataFrame, across: bool) -> Iterator[Notice]:
    label = "Mixed environments"
    rows = rows[["sweep", *COMPARABLE, *{axis for of in COMPARABLE.values() for axis in of}]]
    mixed = {str(sweep): _differ(part) for sweep, part in rows.groupby("sweep", sort=False)}
    for sweep, told in mixed.items():
        if told:
            text = (
                f"The rows of {sweep} were measured in different environments, and are compared "
                f"only within one: {'; '.join(told.values())}."
            )
            yield Notice(label, text, "Use a new --out for each.")
    if across and len(mixed) > 1 and not any(mixed.values()):
        # sweeps are expected to differ in their GPUs
        said = [text for name, text in _differ(rows).items() if name != "gpu"]
        text = f"The sweeps differ in {'; '.join(said)}."
        mend = "python -m bench.compare judges two of them case by case."
        yield from [Notice(label, text, mend)] if said else []


def _differ(rows: pd.DataFrame) -> dict[str, str]:
    said = {}
    for name, axes in COMPARABLE.items():
        if rows[name].nunique() < 2:
            continue
        known = rows[~find_unknown(rows, name)]
        different = known.groupby(list(axes))[name].transform("nunique") > 1
        if different.any():
            values = [value or "none" for value in known.loc[different, name].unique()[:4]]
            said[name] = f"{name.replace('_', ' ')} {' or '.join(values)}"
    return said


def _describe_determinism(cases: pd.DataFrame) -> Iterator[Notice]:
    same = cases[(cases["repeats"] > 1) & (cases["seeds"] == 1) & cases["train_loss"].notna()]
    same = same[same["kind"] == "measured"]
    if not len(same):
        return
    apart = same["train_loss_high"] - same["train_loss_low"]
    equal = int((apart == 0).sum())
    text = (
        f"{write_range(same['repeats'])} runs of one seed end with the same loss to the last "
        f"digit in {equal:,} of {len(same):,} cases"
    )
    if equal < len(same):
        text += f"; in the others they differ by up to {apart.max():.2g}"
    mend = (
        "To see how much the loss depends on the seed, run into a new --out, without --same-seed."
    )
    yield Notice("Determinism", f"{text}.", mend, good=equal == len(same))
