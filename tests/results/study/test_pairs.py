"""Which cases stand in a pair: of one sweep by an axis, and of two sides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.base.errors import UsageError
from bench.results.store.rows import latest
from bench.results.study.comparable import Period
from bench.results.study.pairs import (
    Changed,
    Matches,
    Pair,
    find_changes,
    match,
    select_common,
)
from bench.results.study.runs import read_runs
from bench.results.study.sweeps import read_sweep
from bench.schema.case import Case
from bench.schema.record import Record, Status
from tests.planted.records import FP16, FP32, at, ran, write_sweep
from tests.planted.results import read_results
from tests.planted.scripts import counted, script


def one(case: Case, time_s: float, **values: Any) -> list[Record]:
    """A run of a case; its identifier tells it from others of the case in its sweep."""
    (row,) = ran(case, (time_s,), **values)
    row.record_id = f"{row.record_id}-{time_s:g}"
    return [row]


def test_a_change_is_from_the_default_wherever_it_ran_and_else_from_what_ran_first(
    tmp_path: Path,
) -> None:
    """Of what is frozen; of a schedule the first value is the one to start from."""

    def list_changes(name: str, axis: str, *cases: Case) -> list[tuple[str, str, float, float]]:
        rows = [row for time, case in enumerate(cases, 1) for row in ran(case, (time,))]
        _, results = read_results(read_sweep(write_sweep(tmp_path / name, rows)))
        return [
            (change.before, change.after, pair.a.epoch_time_s, pair.b.epoch_time_s)
            for change in find_changes(axis, results)
            for pair in change.pairs
        ]

    bn, backbone = replace(FP32, freeze="bn"), replace(FP32, freeze="backbone")
    frozen = list_changes("default", "freeze", bn, FP32, backbone)
    assert frozen == [("none", "bn", 2, 1), ("none", "backbone", 2, 3)]
    assert list_changes("without", "freeze", bn, backbone) == [("bn", "backbone", 1, 2)]
    rules = [replace(FP32, schedule=name) for name in ("cosine", "constant", "linear")]
    assert [change[:2] for change in list_changes("first", "schedule", *rules)] == [
        ("cosine", "constant"),
        ("cosine", "linear"),
    ]


def test_cases_of_one_card_in_two_folders_are_compared_where_neither_has_both(
    tmp_path: Path,
) -> None:
    card, (wide32, wide16) = {"gpu_uuid": "GPU-1"}, at(256, FP32, FP16)
    folders = {
        "a": [*one(FP32, 10, **card), *one(FP16, 5, **card), *one(wide32, 20, **card)],
        "b": [*one(FP16, 6, **card), *one(wide16, 8, **card)],
    }
    sweeps = [read_sweep(write_sweep(tmp_path / name, rows)) for name, rows in folders.items()]
    (change,) = find_changes("precision", read_results(*sweeps)[1])
    assert [(p.a.epoch_time_s, p.b.epoch_time_s) for p in change.pairs] == [(10, 5), (20, 8)]


def test_a_number_of_ones_own_is_compared_with_the_next_lower_one(tmp_path: Path) -> None:
    rows = [
        row
        for number, text in enumerate(("rate=128", "rate=32", "rate=256"), 1)
        for row in counted(script(8, vary=text), [number])
    ]
    _, results = read_results(read_sweep(write_sweep(tmp_path / "sweep", rows)))
    changes = [(change.before, change.after) for change in find_changes("{rate}", results)]
    assert changes == [("32", "128"), ("128", "256")]


# -------------------------------------------------------------------------------- the same settings


def make_changes(keys: Sequence[Sequence[int]], before: Sequence[str]) -> list[Changed]:
    """A change of one axis for each of ``before``, with pairs at settings ``keys``; the cells of a
    pair say of which change and setting it is."""

    def pair(change: int, key: int) -> Any:
        a, b = 100 * change + 2 * key, 100 * change + 2 * key + 1
        return Pair(SimpleNamespace(cell=a), SimpleNamespace(cell=b), key, same_loss=True)  # type: ignore[arg-type]

    return [
        Changed("precision", one, str(number), [pair(number, key) for key in at])
        for number, (at, one) in enumerate(zip(keys, before, strict=True))
    ]


def list_cells(changes: Sequence[Changed]) -> list[int]:
    return [cell for change in changes for pair in change.pairs for cell in pair.cells]


CHOSEN: dict[str, tuple[str, list[set[int]], list[set[int]], list[set[int]]]] = {
    # the value that each change is from, its settings, those with enough repeats, those selected
    "what all have": ("aa", [{1, 2, 3}, {2, 3, 4}], [set(), set()], [{2, 3}, {2, 3}]),
    "of another value there is no need": ("ab", [{1, 2}, {2, 3}], [set(), set()], [{1, 2}, {2, 3}]),
    "nothing is shared": ("aa", [{1, 2}, {3}], [set(), set()], [{1, 2}, {3}]),
    "nothing is shared, and one has repeats": ("aa", [{1, 2}, {3}], [{2}, set()], [{2}, {3}]),
    "one shared has repeats in both": (
        "aa", [{1, 2, 3}, {1, 2}], [{2, 3}, {1, 2}], [{2}, {2}]),
    "only one change has repeats": ("aa", [{1, 2}, {1, 2}], [{1}, set()], [{1}, {1}]),
    "each has repeats elsewhere": ("aa", [{1, 2}, {1, 2}], [{1}, {2}], [{1, 2}, {1, 2}]),
    "what has repeats is not shared": ("aa", [{1, 2, 3}, {1, 2}], [{3}, set()], [{1, 2}, {1, 2}]),
    "a change without pairs holds none up": ("aa", [set(), {1, 2}], [set(), {1}], [set(), {1}]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOSEN)
def test_changes_from_one_value_are_told_at_the_settings_that_all_have(name: str) -> None:
    before, keys, sure, chosen = CHOSEN[name]
    changes = make_changes([sorted(one) for one in keys], before)
    cells = list_cells(changes)
    often = {c for c in cells if c % 100 // 2 in sure[c // 100]}
    found = select_common(changes, lambda pair: True, {*cells}, often)
    assert [{a % 100 // 2 for a, _ in pairs} for pairs in found] == chosen


def test_a_pair_needs_both_values_enough_repeats_of_both_and_a_metric_that_fits() -> None:
    """Cells 2 and 3 are the first pair, 4 and 5 the second, 6 and 7 the third."""
    (changes, first, second, third) = (make_changes([[1, 2, 3]], "a"), (2, 3), (4, 5), (6, 7))
    every = {*list_cells(changes)}
    assert select_common(changes, lambda pair: True, every, set()) == [(first, second, third)]
    assert select_common(changes, lambda pair: True, every - {3}, set()) == [(second, third)]
    assert select_common(changes, lambda pair: pair.key != 2, every, set()) == [(first, third)]
    assert select_common(changes, lambda pair: True, every, {2, 4, 5}) == [(second,)]
    assert select_common(changes, lambda pair: False, every, every) == [()]


# --------------------------------------------------------------------------------------- two sides


def match_rows(
    folder: Path, a: Sequence[Record], b: Sequence[Record], axis: str = "", apart: str = ""
) -> tuple[Matches, dict[int, float]]:
    """The matches of two sides, and of each cell its epoch time, by which the rows of a test are
    told apart."""
    sweeps = [read_sweep(write_sweep(folder / name, rows)) for name, rows in (("a", a), ("b", b))]
    counted = latest(read_runs(sweeps))
    sides = [[run for run in counted if run.sweep == sweep.name] for sweep in sweeps]
    firsts = [[*{run.cell: run for run in reversed(side)}.values()][::-1] for side in sides]
    times = {run.cell: run.epoch_time_s for side in firsts for run in side}
    return match(firsts[0], firsts[1], axis, apart.split()), times


WIDE = replace(FP32, batch_size=256)
TENTH, FIFTH, CUT = (replace(FP32, fraction=0.1), replace(FP32, fraction=0.2),
                     replace(FP32, until=0.01))  # fmt: skip
SGD, ADAMW = FP32, replace(FP32, optimizer="adamw", lr=3e-4)
Rows = list[Record]
OLD, NEW = {"torch": "2.12"}, {"torch": "2.13"}


def cut(time_s: float, steps: int, case: Case = CUT) -> Rows:
    """A run that ended after so many of 400 steps."""
    return one(case, time_s, measured_steps=steps, steps_per_epoch=400)


MATCHED: dict[str, tuple[Rows, Rows, str, list[tuple[float, float]], list[list[float]]]] = {
    # the rows of two sides, the axis that is compared and axes apart, matched times, times alone
    "by all axes, in the order of the first side": (
        [*one(WIDE, 1), *one(FP32, 2), *one(FP16, 3)],
        [*one(FP32, 4), *one(WIDE, 5), *one(replace(WIDE, lr=3.0), 6)],
        "", [(1, 5), (2, 4)], [[3], [6]]),
    "but for the compared one": (
        [*one(FP32, 1), *one(WIDE, 2)], [*one(replace(WIDE, compile="default"), 3)],
        "compile", [(2, 3)], [[1], []]),
    "and what follows from it": (
        [*one(FP32, 1)],
        [*one(FP16, 2), *one(replace(FP16, loss_scale=1024.0), 3)],
        "precision", [(1, 2)], [[], []]),
    "of what else follows from it at a value that both have": (
        [*one(SGD, 1), *one(replace(SGD, lr=0.1), 2)],
        [*one(replace(SGD, optimizer="adamw", lr=0.1), 3), *one(ADAMW, 4)],
        "optimizer", [(2, 3)], [[1], [4]]),
    "or without one at the usual values, whichever ran last": (
        [*one(SGD, 1)], [*one(ADAMW, 2), *one(replace(ADAMW, lr=0.3), 3)],
        "optimizer", [(1, 2)], [[], []]),
    "a loss scale, which no other axis follows": (
        [*one(FP16, 1)], [*one(replace(FP16, loss_scale=64.0), 2)],
        "loss_scale", [(1, 2)], [[], []]),
    "and those of a recipe": (
        [*one(FP32, 1)], [*one(replace(WIDE, lr=3.0), 2)],
        " batch_size lr", [(1, 2)], [[], []]),
    "equal parts": (
        [*one(TENTH, 1), *one(FIFTH, 2)], [*one(FIFTH, 3), *one(FP32, 4)],
        "", [(2, 3)], [[], []]),
    "each of two equal parts": (
        [*one(TENTH, 1), *one(FIFTH, 2)], [*one(FIFTH, 3), *one(TENTH, 4)],
        "", [(1, 4), (2, 3)], [[], []]),
    "an equal part with equal settings, before one with others": (
        [*one(replace(TENTH, profile=True), 1), *one(TENTH, 2)], [*one(TENTH, 3)],
        "", [(2, 3)], [[], []]),
    "an equal part with other settings": (
        [*one(replace(TENTH, profile=True), 1)], [*one(TENTH, 3), *one(FP32, 4)],
        "", [(1, 3)], [[], []]),
    "equal settings that ended elsewhere": (
        [*cut(1, 20), *one(TENTH, 2)], [*cut(3, 30), *one(FIFTH, 4)],
        "", [(1, 3)], [[], []]),
    "no part is equal: the largest": (
        [*one(TENTH, 1), *one(FIFTH, 2)], [*one(replace(FP32, fraction=0.3), 3), *one(FP32, 4)],
        "", [(2, 4)], [[], []]),
    "no part is equal: the largest of an equal fraction": (
        [*cut(1, 20), *one(FIFTH, 2)],
        [*cut(3, 30, replace(CUT, until=0.02)), *one(TENTH, 4)],
        "", [(1, 3)], [[], []]),
    "environments by what varies and is shared": (
        [*one(FP32, 1, **OLD), *one(FP32, 2, **NEW)],
        [*one(FP32, 3, **NEW), *one(FP32, 4, **OLD)],
        "", [(1, 4), (2, 3)], [[], []]),
    "an environment of one side alone": (
        [*one(FP32, 1, **OLD), *one(FP32, 2, **NEW)], [*one(FP32, 3, **NEW)],
        "", [(2, 3)], [[1], []]),
    "environments of which none is shared": (
        [*one(FP32, 1, **OLD), *one(FP32, 2, **NEW)], [*one(FP32, 3, torch="2.14")],
        "", [], [[1, 2], [3]]),
    "environments by what is shared, whatever else varies": (
        [*one(FP32, 1, **OLD, driver="1"), *one(FP32, 2, **NEW, driver="2")],
        [*one(FP32, 3, torch="2.14", driver="1")],
        "", [(1, 3)], [[2], []]),
    "one environment each, which are what is compared": (
        [*one(FP32, 1, **OLD)], [*one(FP32, 2, **NEW)], "", [(1, 2)], [[], []]),
    "what a side measured of it in another environment is alone": (
        [*one(FP32, 1, **OLD), *one(TENTH, 2, **OLD)],
        [*one(FP32, 3, **OLD), *one(FP32, 4, **NEW)],
        "", [(1, 3)], [[], [4]]),
    "a side that is empty": ([*one(FP32, 1)], [*one(WIDE, 2)], "", [], [[1], [2]]),
}  # fmt: skip


@pytest.mark.parametrize("name", MATCHED)
def test_cases_of_two_sides_are_matched(name: str, tmp_path: Path) -> None:
    a, b, axes, pairs, alone = MATCHED[name]
    axis, _, apart = axes.partition(" ")
    found, times = match_rows(tmp_path, a, b, axis, apart)
    assert [(times[pair.a], times[pair.b]) for pair in found.pairs] == pairs
    assert [[times[cell] for cell in side] for side in found.alone] == alone


def test_none_stands_for_cases_of_which_none_is_usual(tmp_path: Path) -> None:
    """A time on one GPU is held against neither of two others without saying which."""
    ddp = [one(replace(FP32, parallel="ddp", world_size=n), 10 / n) for n in (2, 4)]
    why = r"--axis parallel: cases with parallel ddp differ in world size too \(2 and 4\), of which"
    with pytest.raises(UsageError, match=why):
        match_rows(tmp_path, one(FP32, 10), [*ddp[0], *ddp[1]], "parallel")


def test_matches_stand_in_the_order_of_the_first_side(tmp_path: Path) -> None:
    """Which is that of the last attempts: a case that failed first was run again last."""
    a = [*one(FP32, 1, status=Status.ERROR), *one(WIDE, 2), *one(FP32, 3, attempt=2)]
    found, times = match_rows(tmp_path, a, [*one(FP32, 4), *one(WIDE, 5)])
    assert [(times[pair.a], times[pair.b]) for pair in found.pairs] == [(2, 5), (3, 4)]
    assert [pair.a for pair in found.pairs] != sorted(pair.a for pair in found.pairs)


def test_what_tells_environments_apart_is_told(tmp_path: Path) -> None:
    a = [*one(FP32, 1, **OLD, driver="1"), *one(FP32, 2, **NEW, driver="1"), *one(WIDE, 3, **NEW)]
    b = [*one(FP32, 4, **NEW, driver="1"), *one(WIDE, 5, **OLD)]
    found, times = match_rows(tmp_path, a, b)
    environments = {times[pair.a]: pair.environment for pair in found.pairs}
    assert environments == {2: (("torch", "2.13"),), 3: ()}


def test_a_pair_tells_its_factor_and_whether_it_is_estimated() -> None:
    def side(number: float, what: str = "items", part: float = 1.0) -> Any:
        return SimpleNamespace(timed=True, period=Period(what, number, whole=True), part=part)

    assert Pair(side(60), side(30), 0, True).factor == 2.0
    assert Pair(side(60), side(30, "steps"), 0, True).factor != 2.0
    assert math.isnan(Pair(side(60), side(30, "steps"), 0, True).factor)
    parts = product((1.0, 0.5), repeat=2)
    flags = [Pair(side(1, part=x), side(1, part=y), 0, True).estimated for x, y in parts]
    assert flags == [False, True, True, True]
