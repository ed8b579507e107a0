"""What each card does in each precision: at one setting that all have, and at its own fastest.

Rows are compared only within a group: of the same network, data and recipe, of one torch major and
of one version of the code that measures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING

from bench.axis import Trait
from bench.case import AXES, SAME_QUESTION, list_affecting
from bench.diagnosis.explanation import Explanation
from bench.precision import PRECISIONS
from bench.questions.effects import Effect, judge_changes
from bench.questions.families import Bounds, find_bounds
from bench.questions.material import Material
from bench.questions.notes import KINDS
from bench.questions.profiles import explain_pairs
from bench.record import RELIABLE
from bench.render.cells import Row, iterate, take_first
from bench.store.attempts import number_groups
from bench.study import doubts
from bench.study.axes import MACHINE, keep_main, name_axis, name_setting, name_value
from bench.study.estimate import TIME
from bench.study.pairs import find_changes
from bench.verdict import adjust

if TYPE_CHECKING:
    import pandas as pd

BASELINES = ("fp32", "tf32")
"""What each precision is compared with, on the same card."""

RECIPE = (
    *(
        name
        for name in list_affecting(Trait.LEARNING)
        if name != "batch_size" and AXES[name].follows != "precision"
    ),
    "memory_limit",
)
"""Axes in which cards that are compared agree: what is trained, and how it learns."""

LEVERS = tuple(
    name
    for name, axis in AXES.items()
    if name not in (*RECIPE, *SAME_QUESTION, "precision", "batch_size", "device")
    and axis.follows != "precision"
    and not axis.spread
)
"""Axes that make a step faster or slower, and leave the recipe as it is."""

CODE = 7  # digits of a hash that are shown


@dataclass(frozen=True)
class Entry:
    """A card in one precision.

    Attributes:
        setting: a case at the batch size and levers that most cards and precisions of its group
            have.
        equal: its own case there; None where it has none.
        base: of the same setting on this card, the cases of `BASELINES`.
        best: its fastest case at any batch size and with any of `LEVERS`.
        bounds: between which batch sizes its memory ends.
        why: why it is not faster, from a profile at the largest batch size that has one.
    """

    card: str
    precision: str
    setting: Row
    equal: Row | None
    base: Mapping[str, Row]
    best: Row | None
    bounds: Bounds
    why: Explanation | None


@dataclass(frozen=True)
class Group:
    """Cards that may be compared, the fastest first.

    Attributes:
        traits: what they agree on, by what that is called.
        cases: of all cards, one row a case, with the ``card`` of each.
    """

    traits: Mapping[str, str]
    entries: Sequence[Entry]
    cases: pd.DataFrame
    rows: pd.DataFrame

    @property
    def setting(self) -> Row:
        """A case at the batch size and levers at which all are compared."""
        return self.entries[0].setting

    @property
    def cards(self) -> list[str]:
        return list(dict.fromkeys(entry.card for entry in self.entries))

    def tell_apart(self, other: Group) -> list[str]:
        """In what it differs from another: ``lr 0.1, not 0.01``."""
        return [
            f"{name} {value}, not {other.traits[name]}".strip()
            for name, value in self.traits.items()
            if value != other.traits[name]
        ]

    @cached_property
    def duels(self) -> list[tuple[str, Effect]]:
        """Each card against each slower one, in each precision over the cases that both have. The
        times' evidence is adjusted over all of them."""
        # as cards, not as folders: two of one card are one side
        cases = self.cases.assign(sweep=self.cases["card"], machine=self.cases["card"])
        cases = cases[cases["status"].isin(RELIABLE)]
        machines = {(card, card): card for card in self.cards}
        duels = []
        for precision in order_precisions(cases):
            part = cases[cases["precision"] == precision]
            changes = [
                change
                for fast, slow in combinations(self.cards, 2)
                for change in find_changes(MACHINE, part, machines, against=(slow, slow))
                if change.after == fast
            ]
            found = judge_changes(changes, part, self.rows, machines)
            duels += [(precision, effect) for effect in found if effect.time]
        times = [effect.time for _, effect in duels if effect.time]
        adjusted = iter(adjust([time.ratio.p for time in times if time.ratio.p is not None]))
        return [(precision, _adjust(effect, adjusted)) for precision, effect in duels]


def _adjust(effect: Effect, adjusted: Iterator[float]) -> Effect:
    """The same effect, where its time was tested with the next p of these."""
    time = effect.time
    if time is None or time.ratio.p is None:
        return effect
    ratio = replace(time.ratio, p_adjusted=next(adjusted))
    return replace(effect, estimates=effect.estimates | {TIME.name: replace(time, ratio=ratio)})


def order_precisions(cases: pd.DataFrame) -> list[str]:
    """Those of some cases, in the order of `PRECISIONS`."""
    held = set(cases["precision"])
    return [name for name in PRECISIONS if name in held]


def find_groups(found: Material) -> list[Group]:
    """The cards of some sweeps in groups that may be compared, those with most entries first and
    published figures last."""
    import pandas as pd

    cases = found.cases.assign(card=_name_cards(found.cases))
    cases = cases.assign(
        torch_major=cases["torch"].str.partition(".")[0],
        # two that do not know their code may have any
        measured_by=cases["code"].mask(cases["code"] == "", "unknown (" + cases["sweep"] + ")"),
    )
    probes = found.probes.merge(
        cases[["sweep", "machine", "card"]].drop_duplicates(), on=["sweep", "machine"]
    )
    key = [*RECIPE, "torch_major", "measured_by", "kind"]
    groups = []
    for _, part in cases.groupby(number_groups(cases, key), sort=False):
        if part["epoch_time_s"].notna().any():
            first = take_first(part)
            same = pd.Series(True, probes.index)
            for name in RECIPE:
                same &= probes[name] == getattr(first, name)
            groups.append(_make_group(found, part, probes[same]))
    published = KINDS["published"]
    return sorted(
        groups,
        key=lambda group: (group.traits[""] == published, -len(group.entries)),
    )


def _name_cards(cases: pd.DataFrame) -> pd.Series:
    """The card of each case, for people. Folders of one physical GPU are one card; where several
    have one name, each has its first folder's behind it."""
    owner = cases["gpu_uuid"].mask(cases["gpu_uuid"] == "", cases["sweep"])
    held: dict[str, dict[str, str]] = {}
    for machine, one, sweep in zip(cases["machine"], owner, cases["sweep"], strict=True):
        held.setdefault(machine, {}).setdefault(one, sweep)
    return cases["machine"].where(
        cases["machine"].map(lambda machine: len(held[machine]) == 1),
        cases["machine"]
        + " · "
        + [held[m][one] for m, one in zip(cases["machine"], owner, strict=True)],
    )


def _make_group(found: Material, cases: pd.DataFrame, probes: pd.DataFrame) -> Group:
    first = take_first(cases)
    traits = {name_axis(name): name_value(name, getattr(first, name), {}) for name in RECIPE}
    traits["torch"] = first.torch_major or "unknown"
    code = str(first.measured_by)
    traits["code"] = code[:CODE] if first.code else code
    traits[""] = KINDS.get(first.kind, first.kind)
    # of folders of one card that have one case, the one that measured most of it
    order = cases.sort_values(["part", "repeats", "started_at"], ascending=False, kind="stable")
    asked = number_groups(order, [name for name in ("card", *AXES) if name not in SAME_QUESTION])
    kept = order[~asked.duplicated()].sort_index()
    kept = keep_main(kept, number_groups(kept, ["card", "batch_size", *LEVERS]))
    timed = kept[kept["epoch_time_s"].notna()]
    timed = timed.assign(doubted=~doubts.trusted(timed)).sort_values(
        ["doubted", "epoch_time_s"], kind="stable"
    )
    equal = _choose_setting(timed)
    entries = [
        entry
        for card, part in kept.groupby("card", sort=False)
        for entry in _list_entries(found, str(card), part, timed, equal, probes)
    ]
    speeds = {
        card: max(e.best.images_per_s for e in entries if e.card == card and e.best is not None)
        for card in {e.card for e in entries if e.best is not None}
    }
    entries.sort(key=lambda entry: -speeds.get(entry.card, 0.0))
    return Group(traits, entries, kept, found.rows)


def _choose_setting(timed: pd.DataFrame) -> pd.DataFrame:
    """The cases at the batch size and levers that most cards and precisions have: of several such
    settings the plainest, of these the largest batch."""
    numbers = number_groups(timed, ["batch_size", *LEVERS])

    def rate(part: pd.DataFrame) -> tuple[int, int, int]:
        row = take_first(part)
        changed = sum(getattr(row, name) != _spell_default(name) for name in LEVERS)
        return len(part.drop_duplicates(["card", "precision"])), -changed, int(row.batch_size)

    return max((part for _, part in timed.groupby(numbers, sort=False)), key=rate)


def _spell_default(name: str) -> object:
    """The default of an axis as the frame of cases has it."""
    default = AXES[name].default
    return "" if default is None else default


def list_levers(row: Row, usual: Row | None = None) -> list[str]:
    """The levers of a case that are not at their defaults, or not as in a ``usual`` case."""
    return [
        name_setting(name, name_value(name, getattr(row, name), {}))
        for name in LEVERS
        if getattr(row, name) != (getattr(usual, name) if usual else _spell_default(name))
    ]


def _list_entries(
    found: Material,
    card: str,
    cases: pd.DataFrame,
    timed: pd.DataFrame,
    equal: pd.DataFrame,
    probes: pd.DataFrame,
) -> Iterator[Entry]:
    def take(frame: pd.DataFrame) -> dict[str, Row]:
        mine = frame[frame["card"] == card]
        return {row.precision: row for row in iterate(mine.drop_duplicates("precision"))}

    at_equal, fastest = take(equal), take(timed)
    base = {name: at_equal[name] for name in BASELINES if name in at_equal}
    explained = explain_pairs(found.steps, cases, found.machines, tried=found.tried)
    whys = {
        why.b.case.precision: why
        for why in sorted(explained, key=lambda why: why.b.case.batch_size)
    }
    for precision in order_precisions(cases):
        plain = [
            row
            for frame in (cases, probes[probes["card"] == card])
            for row in iterate(frame[frame["precision"] == precision])
            if row.accumulate == 1
        ]
        yield Entry(
            card,
            precision,
            take_first(equal),
            at_equal.get(precision),
            base,
            fastest.get(precision),
            find_bounds(plain),
            whys.get(precision),
        )
