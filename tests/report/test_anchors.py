"""Anchors: what lanes change in each other, and whether they are equally fast."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.anchors import (
    ALONE,
    BUSY,
    CLOSE,
    AnchorVerdict,
    LaneReading,
    Pace,
    Session,
    compare,
    find_sessions,
    judge_lanes,
    read_pace,
)
from bench.case import Case
from bench.record import Record, Status
from bench.study import summaries
from bench.study.sweeps import Sweep, read_sweep
from bench.sweep.anchors import compare_alone, compare_busy
from tests.planted.records import make_record, measured, write_sweep

CASE = Case(precision="fp32", device="cpu", dataset="synthetic", model="dpn-small")
SHORT = Case(precision="fp32", device="cpu", dataset="synthetic", model="dpn-small", steps=30)


def anchor(lane: str, kind: str, step_s: float, attempt: int = 1, noise: float = 0.002) -> Record:
    record = make_record(
        SHORT,
        anchor=kind,
        lane=lane,
        attempt=attempt,
        cpu="Some CPU, 1 core",
        **measured(10, 1),
        step_time_median_s=step_s,
        step_time_mad_s=noise * step_s,
        measured_steps=30,
        session=f"start {attempt}",
    )
    record.record_id = f"{kind}-{lane}-{attempt}"
    return record


def run(lane: str, repeat: int, beside: int = 1, start: int = 1) -> Record:
    return make_record(
        CASE, lane=lane, lanes_beside=beside, repeat=repeat, cpu="Some CPU, 1 core",
        session=f"start {start}", **measured(10, 1),
    )  # fmt: skip


def sweep_of(folder: Path, records: list[Record]) -> Sweep:
    return read_sweep(write_sweep(folder, records))


def session(alone: float, busy: float, close: float, attempt: int = 1) -> Iterator[list[Record]]:
    """The anchors of two lanes, of which the second does not change; before and after the runs."""
    yield [
        anchor("a", ALONE, alone, attempt),
        anchor("b", ALONE, 0.1, attempt),
        anchor("a", BUSY, busy, attempt),
        anchor("b", BUSY, 0.1, attempt),
    ]
    yield [anchor("b", CLOSE, 0.1, attempt), anchor("a", CLOSE, close, attempt)]


# ------------------------------------------------------------------------------------- arithmetic


def time_noisy_steps(rng: random.Random, step_s: float) -> Pace:
    """The pace of an anchor whose steps vary by 3 %."""
    steps = [rng.gauss(step_s, 0.03 * step_s) for _ in range(31)]
    middle = median(steps)
    pace = read_pace(middle, median(abs(step - middle) for step in steps), len(steps))
    assert pace is not None
    return pace


def test_the_error_of_a_median_is_that_of_many_medians() -> None:
    """95 of 100 medians of noisy steps lie as near to the truth as each says of itself."""
    rng, tries = random.Random(1), 1000
    paces = [time_noisy_steps(rng, 0.1) for _ in range(tries)]
    inside = sum(abs(pace.step_s - 0.1) <= pace.error * pace.step_s for pace in paces)
    assert 0.91 < inside / tries < 0.97


@pytest.mark.parametrize(
    "cells",
    [
        (None, 0.1, 30),
        (0.1, None, 30),
        (0.1, 0.1, None),
        (math.nan, 0.1, 30),
        (0.1, math.nan, 30),
        (0.0, 0.0, 30),
        (0.1, 0.0, 1),
    ],
)
def test_too_little_is_no_pace(cells: tuple[float | None, ...]) -> None:
    assert read_pace(*cells) is None
    assert compare(read_pace(*cells), Pace(0.1, 0.0)) is None


@given(st.floats(1e-4, 10), st.floats(1e-4, 10), st.floats(0, 0.5), st.floats(0, 0.5))
def test_a_change_is_different_alike_or_unknown(
    now: float, before: float, e1: float, e2: float
) -> None:
    change = compare(Pace(now, e1), Pace(before, e2))
    assert change is not None
    assert change.share == pytest.approx(now / before - 1)
    sure = abs(change.share) + change.margin <= 0.02
    told = abs(change.share) > 0.02 and abs(change.share) > change.margin
    assert change.verdict is (
        AnchorVerdict.DIFFERENT if told else AnchorVerdict.ALIKE if sure else AnchorVerdict.UNKNOWN
    )
    assert change.slower == (told and now > before)


@pytest.mark.parametrize(
    ("alone", "busy", "close", "verdict"),
    [
        (100, 108, 120, AnchorVerdict.UNKNOWN),  # beside the same lanes it grew: the lane drifts
        (100, 108, 108, AnchorVerdict.DIFFERENT),
        (100, 110, 106, AnchorVerdict.DIFFERENT),  # most of it stays
        (100, 110, 100, AnchorVerdict.UNKNOWN),  # beside the same lanes, at the end it was gone
        (100, 110, 98, AnchorVerdict.UNKNOWN),
        (100, 95, 100, AnchorVerdict.UNKNOWN),
        (100, 95, 89, AnchorVerdict.UNKNOWN),
        (100, 101, 101, AnchorVerdict.ALIKE),
        (100, 101, 120, AnchorVerdict.UNKNOWN),
        (100, 101, 98, AnchorVerdict.UNKNOWN),
    ],
)
def test_what_changes_beside_the_same_lanes_is_no_interference(
    alone: float, busy: float, close: float, verdict: AnchorVerdict
) -> None:
    """All lanes are busy at the end as well."""
    lane = LaneReading("a", "", {ALONE: Pace(alone, 0), BUSY: Pace(busy, 0), CLOSE: Pace(close, 0)})
    assert lane.interference is not None
    assert lane.interference.share == pytest.approx(busy / alone - 1)
    assert lane.interference.verdict is verdict
    assert lane.drift is not None
    assert lane.drift.share == pytest.approx(close / busy - 1)


@pytest.mark.parametrize(
    ("busy", "close", "least", "most"),
    [
        (0.105, 0.110, 0, 0.05),  # as much drift before as after: no lane is slowed by others
        (0.105, 0.100, 0, 0.05),  # gone beside the same lanes
        (0.110, 0.110, 0.99, 1),
    ],
)
def test_drift_is_seldom_called_interference(
    busy: float, close: float, least: float, most: float
) -> None:
    """In 2.5 of 100 lanes, as an interval of 95 % has it on one side."""
    rng, tries, slowed = random.Random(2), 1000, 0
    for _ in range(tries):
        times = {ALONE: 0.1, BUSY: busy, CLOSE: close}
        paces = {kind: time_noisy_steps(rng, step_s) for kind, step_s in times.items()}
        interference = LaneReading("a", "", paces).interference
        assert interference is not None
        slowed += interference.slower
    assert least <= slowed / tries <= most


@pytest.mark.parametrize("busy", [0.103, 0.1005])
def test_the_interval_is_at_least_that_of_the_two_anchors(busy: float) -> None:
    """The closing anchor, however exact, makes the busy one no more exact."""
    paces = {ALONE: Pace(0.1, 0.002), BUSY: Pace(busy, 0.05), CLOSE: Pace(busy, 0.002)}
    found = LaneReading("a", "", paces).interference
    assert found is not None
    assert found.margin >= 0.05
    assert found.verdict is AnchorVerdict.UNKNOWN


def test_lanes_that_took_turns_have_drift_and_no_interference() -> None:
    lane = LaneReading("a", "", {ALONE: Pace(0.1, 0), CLOSE: Pace(0.12, 0)})
    assert lane.interference is None
    assert lane.drift is not None
    assert lane.drift.share == pytest.approx(0.2)


def test_the_spread_is_of_the_slowest_over_the_fastest() -> None:
    lanes = [LaneReading(n, "", {ALONE: Pace(s, 0)}) for n, s in (("a", 2), ("b", 3), ("c", 2.5))]
    spread = Session("", tuple(lanes)).spread
    assert spread is not None
    assert spread.share == pytest.approx(0.5)
    assert Session("", tuple(lanes[:1])).spread is None


@pytest.mark.parametrize(("lanes", "noise"), [(2, 0.03), (4, 0.08), (8, 0.05), (8, 0.03)])
def test_equal_lanes_are_called_unequal_in_5_of_100_cases_at_most(lanes: int, noise: float) -> None:
    """With the interval of a pair, 8 lanes whose steps vary by 5 % were so in 48 of 100."""
    import numpy as np

    rounds = 1000
    steps = np.random.default_rng(1).normal(0.1, noise * 0.1, (rounds, lanes, 30))
    middles = np.median(steps, axis=2)
    mads = np.median(abs(steps - middles[:, :, None]), axis=2)
    different = 0
    for medians, deviations in zip(middles.tolist(), mads.tolist(), strict=True):
        paces = [read_pace(*cells, 30) for cells in zip(medians, deviations, strict=True)]
        spread = Session(
            "",
            tuple(LaneReading(str(n), "", {ALONE: pace}) for n, pace in enumerate(paces) if pace),
        ).spread
        assert spread is not None
        different += spread.verdict is AnchorVerdict.DIFFERENT
    assert different / rounds < 0.05


def test_lanes_that_are_unequal_are_found_among_many() -> None:
    """7 equal ones and one that is 10 % slower, whose steps vary by 3 %."""
    paces = {str(n): read_pace(0.1, 0.002, 30) for n in range(7)} | {
        "7": read_pace(0.11, 0.002, 30)
    }
    lanes = [LaneReading(name, "", {ALONE: pace}) for name, pace in paces.items() if pace]
    spread = Session("", tuple(lanes)).spread
    assert spread is not None
    assert spread.verdict is AnchorVerdict.DIFFERENT


# ----------------------------------------------------------------------------------- doubts, table


def test_a_lane_that_was_slowed_says_by_how_much(tmp_path: Path) -> None:
    """The rows of a lane that was not, or that ran alone, do not."""
    opening, closing = session(0.1, 0.11, 0.11)
    rows = [run("a", 1), run("b", 2), run("a", 3, beside=0)]
    frame = summaries.read([sweep_of(tmp_path, [*opening, *rows, *closing])])
    assert not frame.loc[frame["anchor"] != "", "disturbed"].any()
    cases = summaries.latest(frame)
    assert len(cases) == 3, "anchors are in no table of cases"
    assert cases["disturbed"].tolist() == [True, False, False]
    assert cases["interference"].iloc[0] == pytest.approx(0.1)


def test_each_start_of_a_sweep_has_its_own_anchors(tmp_path: Path) -> None:
    """A start without anchors is judged by none, and one that ended while they ran by its own.

    The rows of two machines that were merged lie between each other.
    """
    first, end = session(0.1, 0.11, 0.11)
    torn, _ = session(0.1, 0.11, 0.11, attempt=2)
    fourth, over = session(0.1, 0.1, 0.1, attempt=4)
    records = [
        *first, run("a", 1), run("a", 2, start=4), *end, *torn[:2], run("a", 3, start=3), *fourth,
        run("a", 4, start=4), run("a", 5), *over,
    ]  # fmt: skip
    sweep = sweep_of(tmp_path, records)
    cases = sweep.records[sweep.records["anchor"] == ""]
    doubted = judge_lanes(sweep.records)["interference"][cases.index].notna()
    assert dict(zip(cases["repeat"], doubted, strict=True)) == {
        1: True, 2: False, 3: False, 4: False, 5: True
    }  # fmt: skip
    found = find_sessions(sweep.records)
    assert list(found) == ["start 1", "start 2", "start 4"]
    assert [set(lane.paces) for lane in found["start 2"].lanes] == [{ALONE}] * 2


def test_an_anchor_for_which_a_lane_had_no_memory_is_compared_with_no_other(
    tmp_path: Path,
) -> None:
    """The next has a smaller batch, and of its two steps alone others disturbed one."""
    opening, closing = session(0.1, 0.11, 0.11)
    large = [anchor(lane, ALONE, 0.05) for lane in "ab"]
    for record in large:
        record.case = replace(SHORT, batch_size=2 * SHORT.batch_size)
        record.record_id += "-large"
    large[1].status = Status.OOM
    opening[0].measurement.other_cores = 0.9
    sweep = sweep_of(tmp_path, [*large, *opening, run("a", 1), *closing])
    (found,) = find_sessions(sweep.records).values()
    assert [set(lane.paces) for lane in found.lanes] == [{BUSY, CLOSE}, {ALONE, BUSY, CLOSE}]


@pytest.mark.parametrize("kind", ["failed", "disturbed"])
def test_an_anchor_that_failed_or_was_disturbed_says_nothing(kind: str, tmp_path: Path) -> None:
    opening, closing = session(0.1, 0.15, 0.15)
    if kind == "failed":
        opening[0].status = Status.OOM
    else:
        opening[0].measurement.other_cores = 0.9
    frame = summaries.read([sweep_of(tmp_path, [*opening, run("a", 1), *closing])])
    assert not frame[["disturbed", "unequal"]].any(axis=None)


def test_an_anchor_that_others_disturbed_is_told_while_the_sweep_runs() -> None:
    opening, _ = session(0.1, 0.15, 0.15)
    opening[0].measurement.other_cores = 0.9
    alone, busy = ({r.lane: r for r in opening if r.anchor == kind} for kind in (ALONE, BUSY))
    (said,) = compare_alone(alone)
    assert said.endswith("not known whether they are equally fast; other programs computed beside "
                         "the anchors; end them")  # fmt: skip
    of_a, of_b = compare_busy(alone, busy)
    assert of_a.startswith("a: not known what the other lanes change; other programs computed")
    assert of_b.startswith("b: a step takes 1.000 × as long")
