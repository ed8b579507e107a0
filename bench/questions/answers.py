"""Opening sentences of a report: what each change does, the fastest case, the largest batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from statistics import geometric_mean
from typing import TYPE_CHECKING

from bench.case import AXES, SAME_QUESTION, format_value, free_axes
from bench.limits import MIN_REPEATS, STEADY
from bench.origin import LABELS
from bench.questions.effects import Effect
from bench.questions.families import Family, find_bounds
from bench.questions.report_data import ReportData
from bench.questions.rivals import Match, list_contests
from bench.record import REFUSED, Status
from bench.render.cells import (
    TIMED,
    Row,
    iterate,
    mark_part,
    name_case,
    remarks,
    take_first,
    write_ends,
    write_ratio,
)
from bench.render.model import Answer
from bench.render.section import write_quantity
from bench.store.attempts import number_groups
from bench.study import doubts, summaries
from bench.study.axes import find_varying, list_naming_axes, name_axis, order_values
from bench.study.doubts import DOUBTS
from bench.study.estimate import Estimate
from bench.study.quantities import QUANTITIES, is_number
from bench.text import ESTIMATE
from bench.verdict.ratio import Verdict
from bench.workloads import IMAGES, OWN

if TYPE_CHECKING:
    import pandas as pd

MOST_EFFECTS = 6  # most changes that the sentences name
UNEVEN = 1.1  # a mean over cases that differ by more than this factor is given with their range

_PLACE = (*summaries.SOURCE, "model", "dataset")

_NOT_FATAL = tuple(name for name, doubt in DOUBTS.items() if not doubt.fatal and name != "foreign")


def answer(found: ReportData) -> Iterator[Answer]:
    """Yield what changes do in all cases; per machine and workload the fastest and largest
    batch."""
    summary = [
        *found.origin,
        *(_summarize_effects(found) if _has_switch(found) else ()),
        *_describe_repeats(found.cases),
    ]
    answers = list(_answer_each(found))
    if len(answers) == 1:
        (only,) = answers
        yield replace(only, sentences=(*summary, *only.sentences))
        return
    if summary:
        yield Answer("Overall", tuple(summary))
    yield from answers


def _answer_each(found: ReportData) -> Iterator[Answer]:
    named = [name for name in found.named if name not in ("model", "dataset")]
    measured, probed = (
        dict(list(part.groupby(list(_PLACE), sort=False))) for part in (found.cases, found.probes)
    )
    places = list(dict.fromkeys([*measured, *probed]))
    several = len({place[2:] for place in places}) > 1
    for pair in found.machines:
        for place in [place for place in places if place[:2] == pair]:
            model, dataset = place[2:]
            rows = measured.get(place, found.cases.head(0))
            searched = probed.get(place, found.probes.head(0))
            going = any(s.wall.ending is None for s in found.searches if s[:2] == pair)
            here = [f for f in found.families if attrgetter(*_PLACE)(f.first) == place]
            said = (
                *_describe_fastest(rows, named),
                _describe_largest(rows, searched, named, going),
                _compare_largest(here),
            )
            data = "" if dataset == OWN else f" on {dataset}"
            about = found.machines[pair] + (f", {model}{data}" if several else "")
            yield Answer(about, tuple(filter(None, said)))


def _describe_repeats(cases: pd.DataFrame) -> Iterator[str]:
    timed = cases[cases["epoch_time_s"].notna() & (cases["kind"] == "measured")]
    few = timed["repeats"] < MIN_REPEATS
    if len(timed) > 1 and few.any():
        single = timed.loc[few, "repeats"].max() == 1
        runs = "Single runs" if single else f"Fewer than {MIN_REPEATS} runs"
        which = "all cases" if few.all() else f"{few.sum():,} of {len(timed):,} cases"
        yield f"{runs} in {which}, so small differences may be chance; use --repeats {MIN_REPEATS}."


def _has_switch(found: ReportData) -> bool:
    """Return whether `_summarize_effects` has anything to say: to find effects may take seconds."""
    return "precision" in found.varying or any(
        "off" in map(format_value, set(found.cases[axis].tolist()))
        for axis in found.varying
        if axis in AXES
    )


def _summarize_effects(found: ReportData) -> Iterator[str]:
    """Yield one sentence on precisions and one on switches; none on what was not varied."""
    asked = [e for e in found.effects if e.time and (e.axis == "precision" or e.before == "off")]
    shown = asked[:MOST_EFFECTS]
    for precisions in (True, False):
        part = [effect for effect in shown if (effect.axis == "precision") is precisions]
        told, memory = [], " memory"
        for effect in part:
            said = effect is not part[0] and effect.before == part[0].before
            after = effect.memory.ratio.value if effect.memory else None
            saved = _describe_saved(math.nan if after is None else 1 - after, memory)
            memory = "" if saved else memory
            told.append(_describe_effect(effect, found.cases, said, saved))
        at = {e.over: None for e in part if e.axis == "precision" and e.over and not e.apart}
        where = f" ({'; '.join(at)})" if at else ""
        if told:
            yield f"All else equal{where}, {'; '.join(told)}."
    if any(effect.apart for effect in shown):
        yield "They have no settings in common, and are not to be ranked."


def _describe_effect(effect: Effect, cases: pd.DataFrame, said: bool, saved: str) -> str:
    """Return ``fp16 trains 3.34 times as fast as fp32 (95 %: 3.20 to 3.47) with 38 % less memory``;
    only ``fp16 3.34 times`` if the text before it ``said`` the baseline."""
    time, mode = effect.time, "" if effect.after == "on" else f" {effect.after}"
    precision = effect.axis == "precision"
    assert time is not None
    change = f"with {name_axis(effect.axis)}{mode}"
    if precision:
        change = _name_precision(effect.after, cases, [cell for _, cell in time.cells])
    if time.ratio.value is None:
        return f"{change}: {time.ratio.lack}"
    compared = cases[cases["cell"].isin([c for pair in time.cells for c in pair])]
    if any(map(_is_chance, iterate(compared))):
        return f"{change}: {_NO_RATIO}"
    times = f"{ESTIMATE * effect.estimated}{write_ratio(1 / time.ratio.value)} times"
    if said:
        text = f"{change} {times}"
    elif precision:
        text = f"{change} trains {times} as fast as {effect.before}"
    else:
        text = f"{change} training is {times} as fast as without it"
    if beside := "; ".join(_qualify(time, compared)):
        text += f" ({beside})"
    where = f" at {effect.over}" if effect.apart else ""
    return f"{text}{saved}{where}{_describe_least_busy(compared)}"


def _is_chance(row: Row) -> bool:
    """Return whether the time is of a single run on a CPU that others used: on two cores such runs
    made bf16-amp 3.05 times as fast as fp32, later 0.64 times, and three on idle ones 1.49."""
    return bool(row.device == "cpu" and row.repeats == 1 and row.contended)


_NO_RATIO = "single runs on a CPU that other programs use give no ratio"


def _name_precision(precision: str, cases: pd.DataFrame, cells: Sequence[int]) -> str:
    """Name a precision, with the loss scale of the compared ``cells`` if it was run with several
    there."""
    compared = cases[cases["cell"].isin(cells)]
    there = cases["batch_size"].isin(compared["batch_size"]) & (cases["precision"] == precision)
    scales = {*map(format_value, compared["loss_scale"])}
    several = len({*map(format_value, cases.loc[there, "loss_scale"])}) > 1
    return f"{precision} (loss scale {', '.join(scales)})" if several else precision


def _qualify(time: Estimate, compared: pd.DataFrame) -> Iterator[str]:
    """Yield how certain a mean speed is and how far its cases differ; also the speed by the medians
    in the tables, which few outliers do not move, if it is clearly another one."""
    verdict, speed = time.ratio.judge(STEADY), time.ratio.invert()
    uneven = time.highest > UNEVEN * time.lowest
    if time.mixed:
        if not uneven:
            yield "not alike in all cases"
    elif verdict is Verdict.SAME:
        yield "the same"
    elif ends := write_ends((speed.low, speed.high), write_ratio, " to "):
        yield f"95 %: {ends}{', not certain' if verdict is Verdict.AMBIGUOUS else ''}"
    if uneven:
        slow, fast = (write_ratio(1 / ratio) for ratio in (time.highest, time.lowest))
        yield f"case by case {slow} to {fast}"
    medians = dict(zip(compared["cell"], compared["epoch_time_s"], strict=True))
    by_medians = geometric_mean(medians[a] / medians[b] for a, b in time.cells)
    assert speed.value is not None
    if not 1 / UNEVEN <= by_medians / speed.value <= UNEVEN:
        yield f"by medians {write_ratio(by_medians)}"
    trusted = {*compared.loc[doubts.trusted(compared), "cell"]}
    fatal = [doubt for doubt in DOUBTS.values() if doubt.fatal]
    why = ", ".join(doubt.remark for doubt in fatal if compared[doubt.name].any())
    if why and not any(trusted.issuperset(pair) for pair in time.cells):
        yield f"in doubt: {why}"


def _describe_saved(saved: float, memory: str = " memory") -> str:
    """Return ``with 38 % less memory``; empty if the change is below half a per cent."""
    if not is_number(saved) or abs(saved) < 0.005:
        return ""
    return f" with {100 * abs(saved):.0f} % {'less' if saved >= 0 else 'more'}{memory}"


def _describe_least_busy(compared: pd.DataFrame) -> str:
    waiting = compared[compared["host_bound"]].sort_values("busy_share")
    if not len(waiting):
        return ""
    row, named = take_first(waiting), list_naming_axes(find_varying(compared))
    return f" ({name_case(row, named)} is host-bound: {_describe_busy(row)})"


def _describe_busy(row: Row) -> str:
    return f"GPU busy for {write_quantity(QUANTITIES['busy_share'], row)} of a step"


def _describe_fastest(cases: pd.DataFrame, named: Sequence[str]) -> Iterator[str]:
    """Name the fastest case of a network and dataset on a machine, as far as its runs allow."""
    if not len(cases):
        return
    timed = cases[cases["epoch_time_s"].notna()]
    timed = timed.assign(trusted=doubts.trusted(timed))
    # of a setting measured in several ways, keep the largest part of an epoch, then most repeats
    best_known = timed.sort_values(["trusted", "part", "repeats"], ascending=False, kind="stable")
    settings = [name for name in AXES if name not in SAME_QUESTION]
    repeated = number_groups(best_known, ["environment", "kind", *settings]).duplicated()
    timed = timed.drop(best_known.index[repeated]).sort_values("epoch_time_s", kind="stable")
    rows = list(iterate(timed))
    row = next((row for row in rows if row.trusted), None)
    if row is None:
        yield (
            "Every case has a warning, so none is called the fastest. Lowest time: "
            f"{_name_doubted(rows[:1], named)}."
            if rows
            else "No case was timed."
        )
        return
    rivals = _find_rivals(row, rows)
    faster = [other for other in rows if other.epoch_time_s < row.epoch_time_s]
    claim = "Fastest"
    if row.repeats < MIN_REPEATS or rivals:
        claim = "Lowest time" if row.repeats == 1 else "Lowest median"
    among = " of the rows without warnings" if faster else ""
    yield (
        f"{claim}{among}: {name_case(row, named)}, "
        f"{write_quantity(QUANTITIES['epoch_time_s'], row)} an epoch "
        f"({write_quantity(QUANTITIES['images_per_s'], row)} {row.unit or IMAGES}/s)"
        f"{_against_fp32(row, rows)}"
        f"{f', host-bound: {_describe_busy(row)}' if row.host_bound else ''}."
    )
    if rivals:
        names = _list_some([name_case(rival, named) for rival in rivals])
        yield (
            f"Its runs overlap with those of {names}, so the difference is not certain; use "
            f"--repeats {2 * row.repeats + 1} to compare."
        )
    if faster:
        yield f"Faster, but with warnings: {_name_doubted(faster, named)}."


def _find_rivals(row: Row, timed: Sequence[Row]) -> list[Row]:
    """Return the slower cases, doubted or not, whose spread overlaps that of ``row``; none if it is
    a single run. Cases with too few runs to show a spread get the relative spread of ``row``."""
    if row.repeats == 1:
        return []

    def reaches(other: Row) -> bool:
        low = other.epoch_time_s_low
        low = low if is_number(low) else other.epoch_time_s
        if other.repeats < MIN_REPEATS:
            low = min(low, other.epoch_time_s * row.epoch_time_s_low / row.epoch_time_s)
        return bool(other.epoch_time_s >= row.epoch_time_s and low <= row.epoch_time_s_high)

    alike = [other for other in timed if other is not row and other.kind == row.kind]
    return [other for other in alike if reaches(other)]


def _name_doubted(rows: Sequence[Row], axes: Iterable[str]) -> str:
    time = QUANTITIES["epoch_time_s"]
    names = [
        f"{name_case(row, axes)}, {write_quantity(time, row, spread=False)}: "
        f"{remarks(row, _NOT_FATAL)}"
        for row in rows
    ]
    return _list_some(names, "; ")


def _list_some(names: Sequence[str], between: str = ", ") -> str:
    more = [f"and {len(names) - 3} more cases"] if len(names) > 4 else names[3:]
    return between.join([*names[:3], *more])


def _against_fp32(row: Row, timed: Sequence[Row]) -> str:
    """Compare the fastest case with fp32 at its batch size, and with the fastest fp32: a speed-up
    at one batch size alone is misleading where fp32 is slow at just that size. ``timed`` are the
    cases with a time, fastest first."""
    if row.precision == "fp32":
        other = any(one.trusted and one.precision != "fp32" for one in timed)
        return "; no other precision was faster" if other else ""
    free = (*free_axes("precision"), *SAME_QUESTION, "batch_size")
    settings = [name for name in AXES if name not in free]
    key = attrgetter("environment", *settings)
    fp32 = [one for one in timed if one.precision == "fp32" and one.kind == row.kind]
    if any(map(_is_chance, fp32)):
        return f"; of fp32, {_NO_RATIO}"
    same = [one for one in fp32 if key(one) == key(row)]
    about = mark_part(row)
    said = ""
    if is_number(row.speedup):  # also where --where leaves its fp32 case out
        said = f", {about}{row.speedup:.2f} times as fast as fp32 at that batch size"
        said += _describe_saved(row.memory_saved)
    if not same and said:
        return f"{said} (that fp32 case is left out here)"
    if not fp32 and any(is_number(one.speedup) for one in timed):
        return "; the fp32 cases are left out here"
    if not same:
        return _against_other_fp32(row, fp32, ["batch_size", *settings])
    sure = [one for one in same if one.trusted]
    doubt = "" if sure else " (the fp32 times have warnings)"
    best = (sure or same)[0]  # one in doubt is named only where none is better
    speedup = best.epoch_time_s / row.epoch_time_s
    at_best = (
        f", {about}{speedup:.2f} times as fast as fp32 at its fastest "
        f"(batch size {best.batch_size})"
    )
    if not said:
        return at_best + doubt
    if sure and row.batch_size not in {one.batch_size for one in sure}:
        said += " (that fp32 time has a warning)"
    return said + (at_best if row.speedup > speedup * (1 + STEADY) else "") + doubt


def _against_other_fp32(row: Row, others: Sequence[Row], names: Sequence[str]) -> str:
    if not others:
        return "; there is no fp32 case here to compare it with"

    def list_unlike(other: Row) -> list[str]:
        return [name for name in names if getattr(other, name) != getattr(row, name)]

    # the most similar case; of several, one without a warning
    other = min(others, key=lambda other: (len(list_unlike(other)), not other.trusted))
    doubt = "" if other.trusted else " (that fp32 time has a warning)"
    differs = (f"{name_axis(n)} {format_value(getattr(other, n))}" for n in list_unlike(other))
    what = ", ".join(differs) or "other versions"
    speedup = f"{mark_part(row, other)}{other.epoch_time_s / row.epoch_time_s:.2f}"
    return f", {speedup} times as fast as the nearest fp32 case ({what}){doubt}"


def _describe_largest(
    cases: pd.DataFrame, probes: pd.DataFrame, named: Sequence[str], going: bool
) -> str:
    """Name the largest batch that fits each precision; if none ran out of memory, say that all fit
    (so far, while a search is still ``going``). Only cases with the fewest micro-batches count, as
    micro-batches take less memory."""
    import pandas as pd

    columns = ["precision", "status", "batch_size", "memory_limit", "accumulate", "kind"]
    columns = list(dict.fromkeys([*columns, *named]))
    ended = pd.concat([part[columns] for part in (cases, probes)])
    ended = ended[ended["accumulate"] == ended["accumulate"].min()]
    unknown = f" ({LABELS['unknown']})" if (ended["kind"] == "unknown").all() else ""
    if not ended["status"].isin(REFUSED).any():
        fits = ended.loc[ended["status"].isin(TIMED), "batch_size"]
        several = fits.nunique() > 1 and ended["batch_size"].max() == fits.max()
        if not several:
            return ""
        silent = [f"{name_case(row, named)} ({row.status})" for row in _list_silent(ended, named)]
        but = f", but this is not known of {_list_some(silent, '; ')}" if silent else ""
        going_on = ", and the search for the largest has not ended" if going else ""
        tried = " that was tried" if going else ""
        ran = order_values("precision", ended["precision"])
        tops = ended.loc[ended["batch_size"] == fits.max(), "precision"].unique()
        those = f" ({', '.join(p for p in ran if p in tops)})" if len(tops) < len(ran) else ""
        return f"Every batch size{tried} fits{unknown}, up to {fits.max()}{those}{but}{going_on}."
    limits = order_values("memory_limit", ended["memory_limit"])
    said = []
    for limit in limits:
        under = f" under {limit}" if limit else " without a limit"
        largest = ", ".join(_list_largest(ended[ended["memory_limit"] == limit]))
        said.append(f"{under if len(limits) > 1 else ''}: {largest}")
    return f"Largest batch size that fits{unknown}{';'.join(said)}."


def _list_silent(ended: pd.DataFrame, named: Sequence[str]) -> Iterator[Row]:
    """Yield the rows that do not show whether they fit, unless a batch at least as large fits."""
    settings = [name for name in named if name != "batch_size"]
    for _, alike in ended.groupby(settings, sort=False, dropna=False):
        fits = alike.loc[alike["status"].isin(TIMED), "batch_size"].max()
        silent = ~alike["status"].isin([*TIMED, Status.UNSUPPORTED.value])
        # if none fits, the maximum is NaN, and every comparison with it is false
        yield from iterate(alike[silent & ~(alike["batch_size"] <= fits)])


def _list_largest(ended: pd.DataFrame) -> Iterator[str]:
    for precision in order_values("precision", ended["precision"]):
        fits, fails = find_bounds([*iterate(ended[ended["precision"] == precision])])
        if fits:
            yield f"{precision} {f'{fits} ({fails} does not)' if fails else f'at least {fits}'}"
        elif fails:
            yield f"{precision} none (not even {fails})"


def _compare_largest(families: Sequence[Family]) -> str:
    """Compare precisions, each at its own largest batch and at equal ones. Empty if fewer than two
    largest batches are known, if all are equal, or if several settings ran, which the tables
    compare."""
    contests = list(list_contests(families))
    if len(contests) != 1 or not contests[0].ends or families[0].first.kind == "unknown":
        return ""
    (_, first), *others = contests[0].ends
    if any(_is_chance(row) for _, row in contests[0].ends):
        return ""
    shown = [(f, row) for f, row in others if row.batch_size != first.batch_size][:MOST_EFFECTS]
    said = "; ".join(_contrast_largest(Match(first, row), family) for family, row in shown)
    return f"Each at its largest batch that was timed, {said}." if said else ""


def _contrast_largest(largest: Match, family: Family) -> str:
    """Return ``fp16 (512) is 1.52 times as fast as fp32 (256), and 1.45 times with both at 256``;
    ``family`` is that of the second case."""
    before, after = largest
    said = (
        f"{after.precision} ({after.batch_size}) is {mark_part(*largest)}"
        f"{write_ratio(largest.speed)} times as fast as {before.precision} ({before.batch_size})"
    )
    if is_number(largest.loss) and after.dataset != "synthetic":
        apart = f"{abs(largest.loss):.3f}"
        higher = "higher" if largest.loss > 0 else "lower"
        said += ", with the same loss" if apart == "0.000" else f", with a loss {higher} by {apart}"
    for row in family.ended:
        equal = Match(before, row)
        if row.batch_size == before.batch_size and is_number(equal.speed):
            times = f"{mark_part(*equal)}{write_ratio(equal.speed)} times"
            said += f", and {times} with both at {before.batch_size}"
    return said
