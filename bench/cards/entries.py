"""The results of each card in each precision: at a common setting, and at its own fastest.

Cards are compared only within a group: with the same network and data, and the same torch major
version. The rate of learning, its schedule and the optimizer may differ: they change a step by half
a millisecond at most, and what is learnt is not compared here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import NamedTuple

import pandas as pd

from bench.axis import Trait, Value
from bench.case import AXES, FOLLOWS, SAME_QUESTION, UNTIMED, format_value, list_affecting
from bench.diagnosis.explanation import Explanation
from bench.origin import LABELS
from bench.precision import PRECISIONS
from bench.questions.families import Bounds, find_bounds
from bench.questions.profiles import explain_pairs
from bench.questions.report_data import ReportData
from bench.record import MODEL_PARTS, RELIABLE
from bench.render.cells import Row, iterate, take_first
from bench.store.attempts import number_groups
from bench.study.axes import find_default, keep_main, name_axis, name_setting, name_value
from bench.verdict.ratio import Ratio, compare

BASELINES = ("fp32", "tf32")
"""The precisions with which each one is compared, on the same card."""

RECIPE = (
    *(
        name
        for name in list_affecting(Trait.LEARNING)
        if name not in ("batch_size", *UNTIMED) and AXES[name].follows != "precision"
    ),
    *list_affecting(Trait.RECIPE),
)
"""Axes in which compared cards agree: what is trained, and in what."""

LEVERS = tuple(
    name
    for name, axis in AXES.items()
    if name not in (*RECIPE, *UNTIMED, *SAME_QUESTION, "precision", "batch_size", "device")
    and axis.follows != "precision"
    and not axis.spread
)
"""Axes that change the speed of a step, but not the recipe."""

DATA = {"dataset_fingerprint": "images", "train_images": "number of images"} | {
    name: what for name, what in MODEL_PARTS.items() if name != "model_source"
}
"""Columns in which compared cards agree, as far as they are known, and what each describes."""

CODE = 7  # digits of a hash that are shown


@dataclass(frozen=True)
class Entry:
    """A card in one precision."""

    card: str
    precision: str
    setting: Row  # a case at the batch size and levers at which its group is compared
    equal: Row | None  # its own case there, if it has one
    base: Mapping[str, Row]  # this card's cases there that it is compared with, by precision
    over: Mapping[str, Ratio]  # how many times as fast it is, by the same precisions
    # its fastest case at any batch size and with any of `LEVERS`, without a fatal doubt if there is
    # such a case; None if none was timed
    best: Row | None
    fp32: Row | None  # the same for fp32 on this card
    over_fp32: Ratio | None  # how many times as fast ``best`` is as ``fp32``
    bounds: Bounds  # the largest batch that fits, the smallest that fails
    why: Explanation | None  # why it is not faster, from a profile at its largest batch size


class CardPair(NamedTuple):
    """A card compared with a slower one in a precision, at a setting that both have; ``speed`` is
    how many times as fast it is."""

    precision: str
    fast: Row
    slow: Row
    speed: Ratio


@dataclass(frozen=True)
class Group:
    """Cards that may be compared, the fastest first; ``traits`` are what they share, by its
    name."""

    traits: Mapping[str, str]
    entries: Sequence[Entry]
    pairs: Sequence[CardPair]
    of_card: Mapping[str, Row]  # any case of each card, to say what ran it

    @property
    def setting(self) -> Row:
        return self.entries[0].setting

    @property
    def cards(self) -> list[str]:
        return list(dict.fromkeys(entry.card for entry in self.entries))

    def tell_apart(self, other: Group) -> list[str]:
        """List how it differs from another group: ``lr 0.1, not 0.01``."""
        told: list[str] = []
        unknown: list[str] = []
        for name, value in self.traits.items():
            theirs = other.traits[name]
            if value != theirs and name in DATA.values():  # a hash says no more than that
                (told if value and theirs else unknown).append(f"other {name}")
            elif value != theirs:
                told.append(f"{name} {value}, not {theirs}".strip())
        return told or [f"perhaps {what}" for what in unknown]


def find_groups(found: ReportData) -> list[Group]:
    """Group cards that may be compared. Measured groups come first, then published and unknown
    ones; in each, those with a sound time, then with most cards and precisions."""
    cases = _describe_cases(found.cases)
    cards = cases[["sweep", "machine", "card"]].drop_duplicates(["sweep", "machine"])
    probes = found.probes.merge(cards, on=["sweep", "machine"])
    numbers = number_groups(cases, [*RECIPE, *DATA, "torch_major", "kind"])
    groups = []
    for _, part in cases.groupby(numbers, sort=False):
        if part["status"].isin(RELIABLE).any():
            groups.append(_make_group(found, part, probes))
    order = ["measured", *reversed(LABELS)]
    return sorted(groups, key=lambda group: (
        order.index(next(iter(group.of_card.values())).kind),
        not any(rate_card(entry)[0] for entry in group.entries),
        -len(group.cards),
        -len(group.entries),
    ))  # fmt: skip


def _describe_cases(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the cases with their ``card`` and the columns that define groups. A missing value is
    filled in if its folder has only one."""
    where = number_groups(cases, ["sweep", "machine", "model", "dataset", "input", "classes"])
    filled = {}
    for name in ("gpu_uuid", "torch", "code", *DATA):
        known = cases[name].mask((cases[name] == "") | cases[name].isna())
        alike = known.groupby(where)
        only = alike.transform("first").mask(alike.transform("nunique") > 1)
        filled[name] = known.fillna(only).fillna("").astype(str)
    cases = cases.assign(**filled)
    return cases.assign(
        card=_name_cards(cases),
        torch_major=cases["torch"].str.partition(".")[0],
        doubted=[not result.trusted for result in cases["result"]],
    )


def _name_cards(cases: pd.DataFrame) -> list[str]:
    """Return the name of each case's card. One physical GPU is one card, and so are GPUs of one
    name in a folder, as in its report; other cards of one name get their folder's name appended."""
    owner = cases["gpu_uuid"].mask(cases["gpu_uuid"] == "", cases["sweep"])
    held: dict[str, dict[str, str]] = {}
    for machine, one, sweep in zip(cases["machine"], owner, cases["sweep"], strict=True):
        held.setdefault(machine, {}).setdefault(one, sweep)
    return [
        f"{machine} · {held[machine][one]}" if len({*held[machine].values()}) > 1 else machine
        for machine, one in zip(cases["machine"], owner, strict=True)
    ]


def _make_group(found: ReportData, cases: pd.DataFrame, probes: pd.DataFrame) -> Group:
    first = take_first(cases[cases["status"].isin(RELIABLE)])
    traits = {name_axis(name): name_value(name, getattr(first, name), {}) for name in RECIPE}
    traits |= {what: getattr(first, name) for name, what in DATA.items()}
    traits["torch"] = first.torch_major or "unknown"
    traits[""] = LABELS.get(first.kind, first.kind)
    for name in RECIPE:
        probes = probes[probes[name] == getattr(first, name)]
    # a card's first case is used: without doubts, with most of an epoch and most repeats
    timed = cases[cases["status"].isin(RELIABLE)].sort_values(
        ["doubted", "part", "repeats", "seed", "started_at"],
        ascending=[True, False, False, True, False],
        kind="stable",
    )
    timed = keep_main(timed, number_groups(timed, ["card", "batch_size", *LEVERS]))
    setting = _choose_setting(timed)
    usual = take_first(setting)
    entries: list[Entry] = []
    for card in dict.fromkeys(cases["card"]):
        rows = (frame[frame["card"] == card] for frame in (cases, timed, setting, probes))
        entries += _list_entries(found, card, usual, *rows)
    speeds = {card: max(rate_card(e) for e in entries if e.card == card)
              for card in {e.card for e in entries}}  # fmt: skip
    entries.sort(key=lambda entry: speeds[entry.card], reverse=True)
    of_card = {row.card: row for row in iterate(timed.iloc[::-1])}
    pairs = _judge_card_pairs(
        list(dict.fromkeys(e.card for e in entries)), timed, usual, found.times
    )
    return Group(traits, entries, pairs, of_card)


def rate_card(entry: Entry) -> tuple[bool, float]:
    """Return the sort key of a card: images per second at its fastest; doubted ones come last."""
    best = entry.best
    return (False, 0.0) if best is None else (not best.doubted, float(best.images_per_s))


def _choose_setting(timed: pd.DataFrame) -> pd.DataFrame:
    """Return the cases at the batch size and levers that most cards have. Of several settings
    choose the one with most undoubted precisions, then the plainest, then the largest batch."""

    def rate(part: pd.DataFrame) -> tuple[int, ...]:
        sure = part[~part["doubted"]]
        numbers = (len(p.drop_duplicates(["card", "precision"])) for p in (sure, part))
        row = take_first(part)
        return part["card"].nunique(), *numbers, -len(list_levers(row)), int(row.batch_size)

    numbers = number_groups(timed, ["batch_size", *LEVERS])
    return max((part for _, part in timed.groupby(numbers, sort=False)), key=rate)


def list_levers(row: Row, usual: Row | None = None) -> list[str]:
    """List the levers of a case that are not at their defaults, or not as in a ``usual`` case."""
    return name_unusual(row, {
        name: getattr(usual, name) if usual else find_default(name) for name in LEVERS
    })  # fmt: skip


def name_precision(row: Row) -> str:
    """Name the precision of a case, with those of its options that are not at their defaults."""
    usual = {name: find_default(name) for name in FOLLOWS["precision"]}
    usual["loss_scale"] = format_value(PRECISIONS[row.precision].default_loss_scale)
    return " · ".join([row.precision, *name_unusual(row, usual)])


def name_unusual(row: Row, usual: Mapping[str, Value]) -> list[str]:
    """List the axes in which a case differs from ``usual``, each with its value."""
    return [
        name_setting(name, name_value(name, getattr(row, name), {}))
        for name, value in usual.items()
        if getattr(row, name) != value
    ]


def _list_entries(
    found: ReportData,
    card: str,
    usual: Row,
    cases: pd.DataFrame,
    timed: pd.DataFrame,
    setting: pd.DataFrame,
    probes: pd.DataFrame,
) -> Iterator[Entry]:
    """Yield a card's entries; ``timed`` cases have a time, ``setting`` are those at the setting."""
    equal = {row.precision: row for row in iterate(setting.drop_duplicates("precision"))}
    alone = timed.drop_duplicates(["precision", "batch_size", *LEVERS])
    alone = alone.sort_values(["doubted", "epoch_time_s"], kind="stable")
    best = {row.precision: row for row in iterate(alone.drop_duplicates("precision"))}
    pairs = [(base, name) for base, name in product(BASELINES, PRECISIONS)
             if base in equal and name in equal
             and name not in BASELINES[: BASELINES.index(base) + 1]]  # fmt: skip
    ratios = _judge([(equal[base], equal[name]) for base, name in pairs], found.times)
    over = dict(zip(pairs, ratios, strict=True))
    explained = explain_pairs(
        found.steps, cases["result"].tolist(), found.machines, tried=found.tried
    )
    explained.sort(key=lambda why: why.b.case.batch_size)
    whys = {why.b.case.precision: why for why in explained}
    plain = []
    for frame in (cases, probes):
        for name in LEVERS:
            frame = frame[frame[name] == getattr(usual, name)]
        plain += list(iterate(frame))
    held = {*cases["precision"]}
    others = [name for name in best if name != "fp32" and "fp32" in best]
    judged = _judge([(best["fp32"], best[name]) for name in others], found.times)
    over_fp32 = dict(zip(others, judged, strict=True))
    for precision in (name for name in PRECISIONS if name in held):
        bases = [base for base in BASELINES if (base, precision) in over]
        yield Entry(
            card,
            precision,
            usual,
            equal.get(precision),
            {base: equal[base] for base in bases},
            {base: over[base, precision] for base in bases},
            best.get(precision),
            best.get("fp32"),
            over_fp32.get(precision),
            find_bounds([row for row in plain if row.precision == precision]),
            whys.get(precision),
        )


def _judge(pairs: Sequence[tuple[Row, Row]], times: Mapping[int, Sequence[float]]) -> list[Ratio]:
    """Return how many times as fast the second case of each pair is, judged as one family."""
    return [ratio.invert() for ratio in compare([(times[a.cell], times[b.cell]) for a, b in pairs])]


def _judge_card_pairs(
    cards: Sequence[str], timed: pd.DataFrame, usual: Row, times: Mapping[int, Sequence[float]]
) -> list[CardPair]:
    """Compare each card with each slower one in each precision, judged as one family: at the
    group's setting, or else at the plainest and largest that both have; with equal parts of an
    epoch, if there are any, and with most repeats of both."""
    lines: dict[tuple[str, str], dict[tuple[object, ...], list[Row]]] = {}
    for row in iterate(timed):
        key = tuple(getattr(row, name) for name in ("batch_size", *LEVERS))
        lines.setdefault((row.precision, row.card), {}).setdefault(key, []).append(row)
    here = tuple(getattr(usual, name) for name in ("batch_size", *LEVERS))
    pairs: list[tuple[Row, Row]] = []
    for precision in PRECISIONS:
        for fast, slow in combinations(cards, 2):
            ours, theirs = (lines.get((precision, card), {}) for card in (fast, slow))
            keys = [key for key in ours if key in theirs]
            if not keys:
                continue
            key = max(keys, key=lambda key: (
                key == here, -len(list_levers(ours[key][0])), ours[key][0].batch_size
            ))  # fmt: skip
            pairs.append(max(product(theirs[key], ours[key]), key=lambda ends: (
                ends[0].part == ends[1].part, min(r.repeats for r in ends), ends[0].part
            )))  # fmt: skip
    judged = _judge(pairs, times)
    return [
        CardPair(after.precision, after, before, speed)
        for (before, after), speed in zip(pairs, judged, strict=True)
    ]
