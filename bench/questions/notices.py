"""What to know before believing the numbers of a report, most serious first.

Each notice says what was found, in how many runs, and which flag or command helps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from bench.diagnosis.rates import RATES, SAME_DEVICE, find_losses, write_losses
from bench.limits import STEADY
from bench.record import COMPARABLE, MEASURED, REPEATED, Status
from bench.render.model import Notice
from bench.store.attempts import find_unknown
from bench.study.doubts import DOUBTS
from bench.study.drift import Drift, Steadiness, find_drifts, write_moment
from bench.study.gaps import describe_gaps
from bench.study.summaries import find_wide, latest
from bench.study.sweeps import Sweep
from bench.text import name_first

if TYPE_CHECKING:
    import pandas as pd


def warn(
    records: pd.DataFrame,
    cases: pd.DataFrame,
    everything: pd.DataFrame | None = None,
    sweeps: Sequence[Sweep] = (),
) -> list[Notice]:
    """All there is to warn of, most serious first.

    Args:
        records: of `read`.
        cases: the same, of `summarize`.
        everything: all records of their sweeps, in which a drift shows; by default, ``records``.
        sweeps: that they are of, of which some may not be complete.
    """
    rows = latest(records)
    notices = []
    for doubt in DOUBTS.values():
        doubted = rows[doubt.name]
        if doubted.any():  # most are not, and a row has 250 columns
            hit = rows[doubted]
            said = doubt.detail(hit) if doubt.detail else ""
            detail = f" ({said})" if said else ""
            label = doubt.remark[0].upper() + doubt.remark[1:]
            text = f"{_count(hit, rows)}. {doubt.warning}{detail}. {doubt.advise(hit)}"
            notices.append(Notice(label, text))
    wide = find_wide(cases)
    if wide.any():
        text = (
            f"The times of {wide.sum():,} of the {(cases['repeats'] > 1).sum():,} cases with "
            f"repeats spread by more than ±{100 * STEADY:.0f} %; these cases are marked noisy. "
            "Close other programs, or use --repeats 5 or more."
        )
        notices.append(Notice("Spread", text))
    notices += _determinism(cases)
    ended = [*(s.value for s in MEASURED), Status.OOM.value, Status.UNSUPPORTED.value]
    failed = rows[~rows["status"].isin(ended)]
    if len(failed):
        ends = failed["status"].str.replace("_", " ").value_counts()
        kinds = ", ".join(f"{n:,} {end}" for end, n in ends.items())
        asked = [s for s in dict.fromkeys(failed["status"]) if s not in REPEATED]
        mend = f"Run them again with --retry {' '.join(asked)}" if asked else ""
        mend = mend or "The same command runs them again"
        text = f"{_count(failed, rows)}: {kinds}. {mend}."
        notices.append(Notice("No result", text))
    notices += [Notice("Incomplete", text) for sweep in sweeps for text in describe_gaps(sweep)]
    drifts = find_drifts(records if everything is None else everything)
    notices += [_describe_drift(*where, found) for where, found in drifts.items()]
    notices += _describe_slowdowns(rows)
    return notices + [Notice("Mixed environments", text) for text in _mixtures(rows)]


def _determinism(cases: pd.DataFrame) -> list[Notice]:
    """What repeats of one seed say: whether the same training ends in the same loss."""
    same = cases[(cases["repeats"] > 1) & (cases["seeds"] == 1) & cases["train_loss"].notna()]
    same = same[same["kind"] == "measured"]
    if not len(same):
        return []
    apart = same["train_loss_high"] - same["train_loss_low"]
    equal = int((apart == 0).sum())
    low, high = same["repeats"].min(), same["repeats"].max()
    runs = f"{low}" if low == high else f"{low} to {high}"
    text = (
        f"{runs} runs of one seed end with the same loss to the last digit in {equal:,} of "
        f"{len(same):,} cases"
    )
    if equal < len(same):
        text += f"; in the others they differ by up to {apart.max():.2g}"
    return [
        Notice(
            "Determinism",
            f"{text}. To see how much the loss depends on the seed, leave out --same-seed.",
        )
    ]


def _describe_drift(sweep: str, machine: str, found: Sequence[Drift]) -> Notice:
    """Say the worst of a sweep's drifts, and of how many."""
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
    if worst.steadiness is Steadiness.DRIFTED:
        text += f", more than the runs' own spread explains (±{100 * worst.margin:.1f} %)"
        text += ". Run the sweep again on an idle machine, into a new --out"
    elif math.isinf(worst.margin):
        text += "; one run does not show how far runs spread. Use --repeats 5"
    elif worst.steadiness is Steadiness.UNKNOWN:
        # beyond 100 % it would allow for times below zero
        explained = f"up to ±{100 * worst.margin:.1f} %" if worst.margin < 1 else "any change"
        text += f"; the spread of the runs themselves may explain {explained}"
        text += ". Close other programs, or use --repeats 5 or more"
    good = worst.steadiness is Steadiness.STEADY
    return Notice(worst.steadiness.value, f"{text}.{several}", good)


def _describe_slowdowns(rows: pd.DataFrame) -> list[Notice]:
    """Devices that were measured to do less at one time than at another, each at its worst."""
    rated = rows[rows[list(RATES)].notna().any(axis=1)]
    notices = []
    # how lanes differ from each other, their anchors tell
    for _, here in rated.groupby([*SAME_DEVICE, "lane"], dropna=False, sort=False):
        told = here[["sweep", "started_at", "gpu", "cpu", *RATES]]
        times = told.drop_duplicates(["sweep", *RATES]).to_dict("records")
        pairs = [(find_losses(now, before), now, before) for now in times for before in times]
        losses, now, before = max(pairs, key=lambda pair: max(pair[0].values(), default=0.0))
        if losses:
            then, later = (
                f"{row['sweep']} ({write_moment(row['started_at'])})" for row in (before, now)
            )
            text = (
                f"{now['gpu'] or now['cpu']} gave less in {later} than in {then}: "
                f"{write_losses(losses)}. What else used it, its clocks or its power limit is "
                "between them; run the slower one again, into a new --out."
            )
            notices.append(Notice("Slower device", text))
    return notices


def _count(hit: pd.DataFrame, rows: pd.DataFrame) -> str:
    if len(hit) == len(rows):
        return f"all {len(rows):,} runs" if len(rows) > 1 else "the only run"
    where = f" ({_list(hit['sweep'])})" if hit["sweep"].nunique() < rows["sweep"].nunique() else ""
    return f"{len(hit):,} of {len(rows):,} runs{where}"


def _list(values: Iterable[str]) -> str:
    return name_first(list(dict.fromkeys(values)), 4)


def _mixtures(rows: pd.DataFrame) -> list[str]:
    warnings = []
    for sweep, part in rows.groupby("sweep", sort=False):
        mixed = _differences(part)
        if mixed:
            said = "; ".join(mixed.values())
            warnings.append(
                f"The rows of {sweep} differ in what ran them, and are compared only where this "
                f"agrees: {said}. Use a new --out for each."
            )
    if rows["sweep"].nunique() > 1:
        mixed = _differences(rows)
        mixed.pop("gpu", None)  # that is what they are for
        if mixed and not warnings:
            warnings.append(
                f"The sweeps differ in {'; '.join(mixed.values())}. python -m bench.compare judges "
                "two of them case by case."
            )
    return warnings


def _differences(rows: pd.DataFrame) -> dict[str, str]:
    """The columns of `COMPARABLE` in which rows differ, and their values for people."""
    said = {}
    for name, axes in COMPARABLE.items():
        known = rows[~find_unknown(rows, name)]
        different = known.groupby(list(axes))[name].transform("nunique") > 1
        if different.any():
            cells = known.loc[different, name]
            values = [value or "none" for value in cells.unique()[:4]]
            said[name] = f"{name.replace('_', ' ')} {' or '.join(values)}"
    return said
