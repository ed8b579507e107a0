"""What a report says first: the fastest case to trust, and the largest batch that fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from bench.limits import MIN_REPEATS, STEADY
from bench.precision import PRECISIONS
from bench.record import Status
from bench.report import doubts, summaries
from bench.report.cells import (
    ESTIMATE,
    TIMED,
    Row,
    is_estimate,
    iterate,
    name_case,
    quantity_cell,
    remarks,
)
from bench.report.doubts import DOUBTS
from bench.report.model import MOST_SECTIONS, Answer
from bench.report.quantities import QUANTITIES, is_number

if TYPE_CHECKING:
    import pandas as pd


def answer(cases: pd.DataFrame, machines: dict[tuple[str, str], str]) -> Iterator[Answer]:
    """Per machine and workload: the fastest case to be trusted, and the largest batch that fits."""
    settings = ["model", "dataset"]
    several = (cases["model"].nunique() > 1) or (cases["dataset"].nunique() > 1)
    for pair in list(machines)[:MOST_SECTIONS]:
        theirs = cases[(cases["sweep"] == pair[0]) & (cases["machine"] == pair[1])]
        for (model, dataset), rows in list(theirs.groupby(settings, sort=False))[:MOST_SECTIONS]:
            about = machines[pair] + (f", {model} on {dataset}" if several else "")
            yield Answer(about, (_fastest(rows), _largest(rows)))


def _fastest(cases: pd.DataFrame) -> str:
    """Name the lowest time, and claim no more of it than its runs allow."""
    timed = cases[cases["epoch_time_s"].notna()].sort_values("epoch_time_s", kind="stable")
    trusted = doubts.trusted(timed)
    good, doubted = timed[trusted], timed[~trusted]
    if (cases["kind"] == "fake").all():
        return "Nothing here was measured: these rows came from the fake executor."
    if not len(timed):
        return "No case was timed."
    axes = [name for name in summaries.SETTINGS[2:] if cases[name].nunique() > 1]
    named = ("precision", "loss_scale", "batch_size", *axes)
    if not len(good):
        return (
            "Every case has a doubt, so none is called the fastest. Lowest: "
            f"{_name_doubted(doubted, named)}."
        )
    row = next(iterate(good))
    rivals = _find_rivals(row, timed)
    faster = doubted[doubted["epoch_time_s"] < row.epoch_time_s]
    few = row.repeats < MIN_REPEATS
    claim = "Lowest median" if few or rivals else "Fastest"
    if row.repeats == 1:
        claim = "Lowest single time"
    among = " of the rows without doubts" if len(faster) else ""
    part = f", extrapolated from {100 * row.fraction:.4g} % of one" if row.fraction < 1 else ""
    said = (
        f"{claim}{among}: {name_case(row, named)}, "
        f"{quantity_cell(QUANTITIES['epoch_time_s'], row).text} an epoch "
        f"({quantity_cell(QUANTITIES['images_per_s'], row).text} images/s{part})"
        f"{_against_fp32(row, timed)}"
    )
    if row.repeats == 1:
        said += f". These are single runs; use --repeats {MIN_REPEATS} to compare"
    elif rivals:
        names = _list_some([name_case(rival, named) for rival in rivals])
        said += (
            f". Its runs overlap with those of {names}: they cannot be told apart; use --repeats "
            f"{2 * row.repeats + 1} to compare"
        )
    elif few:
        # two of two equal cases lie apart in one comparison of three
        said += f". Two runs are too few to tell cases apart; use --repeats {MIN_REPEATS}"
    if len(faster):
        said += f". Faster but doubted: {_name_doubted(faster, named)}"
    return f"{said}."


def _find_rivals(row: Row, timed: pd.DataFrame) -> list[Row]:
    """Slower cases, doubted or not, whose spread reaches that of ``row``; none of a single run.

    A case of too few runs to show a spread is taken to have that of ``row``.
    """
    if row.repeats == 1:
        return []
    low = timed["epoch_time_s_low"].fillna(timed["epoch_time_s"])
    alike = timed["epoch_time_s"] * row.epoch_time_s_low / row.epoch_time_s
    low = low.mask(timed["repeats"] < MIN_REPEATS, low.clip(upper=alike))
    near = (timed["epoch_time_s"] >= row.epoch_time_s) & (low <= row.epoch_time_s_high)
    return [rival for rival in iterate(timed[near]) if rival.record_id != row.record_id]


def _name_doubted(rows: pd.DataFrame, axes: Iterable[str]) -> str:
    names = [
        f"{name_case(row, axes)}, {_write_time(row)}: {remarks(row, _NOT_FATAL)}"
        for row in iterate(rows)
    ]
    return _list_some(names, "; ")


_NOT_FATAL = tuple(doubt.name for doubt in DOUBTS.values() if not doubt.fatal)


def _write_time(row: Row) -> str:
    time = QUANTITIES["epoch_time_s"]
    mark = ESTIMATE if is_estimate(time, row) else ""
    return mark + time.add_unit(time.write(row.epoch_time_s))


def _list_some(names: Sequence[str], between: str = ", ") -> str:
    more = [f"and {len(names) - 3} more cases"] if len(names) > 4 else names[3:]
    return between.join([*names[:3], *more])


def _against_fp32(row: Row, timed: pd.DataFrame) -> str:
    """Compare the fastest case with fp32 at its batch size, and with the fastest fp32.

    A speed-up at one batch size alone would flatter where fp32 is slow at just that one.

    Args:
        timed: all cases with a time, fastest first.
    """
    trusted = doubts.trusted(timed)
    if row.precision == "fp32":
        others = trusted & (timed["precision"] != "fp32")
        return "; no other precision was faster" if others.any() else ""
    same = timed["precision"] == "fp32"
    for name in (*summaries.SOURCE, *summaries.SETTINGS, "environment", "kind"):
        same &= timed[name] == getattr(row, name)
    if not same.any():
        return "; there is no fp32 case with the same settings to compare it with"
    about = ESTIMATE if row.fraction < 1 else ""
    doubt = "" if (trusted & same).any() else " (the fp32 times are in doubt)"
    # one in doubt is named only where none is better
    best = next(iterate(timed[same & trusted] if (same & trusted).any() else timed[same]))
    speedup = best.epoch_time_s / row.epoch_time_s
    at_best = (
        f", {about}{speedup:.2f}× as fast as fp32 at its fastest (batch size {best.batch_size})"
    )
    if not is_number(row.speedup):
        return at_best + doubt
    saved = ""
    if is_number(row.memory_saved):
        less = "less" if row.memory_saved >= 0 else "more"
        saved = f" with {100 * abs(row.memory_saved):.0f} % {less} memory"
    said = f", {about}{row.speedup:.2f}× as fast as fp32 at that batch size{saved}"
    if not doubt and not (trusted & same & (timed["batch_size"] == row.batch_size)).any():
        said += " (that fp32 time is in doubt)"
    return said + (at_best if row.speedup > speedup * (1 + STEADY) else "") + doubt


def _largest(cases: pd.DataFrame) -> str:
    said = []
    for precision in PRECISIONS:
        rows = cases[cases["precision"] == precision]
        fits = rows.loc[rows["status"].isin(TIMED), "batch_size"]
        full = rows.loc[rows["status"].isin([Status.OOM.value, Status.OOM_SUSPECTED.value])]
        if len(fits):
            beyond = full.loc[full["batch_size"] > fits.max(), "batch_size"]
            limit = f"{fits.max()} ({beyond.min()} does not)"
            said.append(f"{precision} {limit if len(beyond) else f'at least {fits.max()}'}")
        elif len(full):
            said.append(f"{precision} none (not even {full['batch_size'].min()})")
    if not said:
        return "No batch size is known to fit."
    fake = " (not measured)" if (cases["kind"] == "fake").all() else ""
    return f"Largest batch size that fits{fake}: {', '.join(said)}."
