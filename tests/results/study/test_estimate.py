"""What a change comes to over its pairs, and what the seeds of two cases do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.base.limits import MIN_REPEATS, STEADY
from bench.results.study.estimate import (
    ENERGY,
    LOSS,
    MEMORY_METRIC,
    TIME,
    Estimate,
    average_seeds,
    estimate,
    list_means,
    list_shifts,
    share_seeds,
    take_seeds,
)
from bench.results.study.pairs import find_changes
from bench.results.study.quantities import Metric
from bench.results.study.sweeps import read_sweep
from bench.results.verdict import Ratio
from bench.schema.record import Record, Status
from tests.planted.records import FP16, FP32, learn, ran, write_sweep
from tests.planted.results import read_results
from tests.planted.scripts import script, untold

NAN = math.nan


def test_a_shift_is_of_logarithms_or_of_signed_losses_in_their_unit() -> None:
    """The unit is the larger of the two means without signs."""
    one, other = (
        {0: (1.0, 0.0), 1: (3.0, math.log(3))},
        {0: (2.0, math.log(2)), 1: (6.0, math.log(6))},
    )
    assert list_shifts([one], [other]) == pytest.approx([math.log(2)])
    before = [{0: (-1.0, NAN)}, {0: (2.0, math.log(2))}]
    after = [{0: (1.0, 0.0)}, {0: (5.0, math.log(5))}]
    assert list_shifts(before, after) == pytest.approx([2 / 3, 3 / 3])
    # their means are above zero, and some of their repeats are not
    assert list_shifts([{0: (1.0, NAN)}], [{0: (3.0, math.log(3))}]) == [2.0]


def seeds(*names: int) -> dict[int, tuple[float, float]]:
    return {seed: (float(seed + 1), math.log(seed + 1)) for seed in names}


def test_readings_are_of_the_seeds_that_all_ran_else_both_of_a_pair_else_any() -> None:
    cells = {1: seeds(0, 1, 2), 2: seeds(1, 2), 3: seeds(2, 3), 4: seeds(2), 5: seeds(9)}
    every = share_seeds([(1, 2), (3, 4)], cells)
    assert every == ([seeds(2), seeds(2)], [seeds(2), seeds(2)])
    both = share_seeds([(1, 2), (5, 5)], cells)
    assert both == ([seeds(1, 2), seeds(9)], [seeds(1, 2), seeds(9)])
    assert share_seeds([(1, 5)], cells) == ([seeds(0, 1, 2)], [seeds(9)])


def test_a_mean_over_cells_is_geometric_unless_a_value_is_not_above_zero() -> None:
    means = average_seeds([seeds(0, 1), {1: (8.0, math.log(8)), 2: (1.0, 0.0)}])
    assert means == {1: (5.0, pytest.approx(math.log(4)))}
    assert average_seeds([]) == {}
    assert list_means(means) == [{1: [pytest.approx(4)]}]
    assert list_means(means, {1: (-1.0, NAN)}) == [{1: [5.0]}, {1: [-1.0]}]


@pytest.mark.parametrize(
    ("ends", "each", "apart"),
    [
        # outside of the interval of their mean, by more than what is steady
        ((0.9, 1.1), (0.91, 1.0, 1.09), False),
        ((0.9, 1.1), (0.9 / (1 + 1.01 * STEADY), 1.0), True),
        ((0.9, 1.1), (0.9 / (1 + 0.99 * STEADY), 1.0), False),
        ((0.9, 1.1), (1.0, 1.1 * (1 + 1.01 * STEADY)), True),
        ((0.9, 1.1), (1.0, 1.1 * (1 + 0.99 * STEADY)), False),
        # without an interval, from each other
        ((None, None), (1.0, (1 + 1.01 * STEADY) ** 2), True),
        ((None, None), (1.0, (1 + 0.99 * STEADY) ** 2), False),
    ],
)
def test_pairs_are_apart_outside_of_the_interval_of_their_mean(
    ends: tuple[float | None, float | None], each: tuple[float, ...], apart: bool
) -> None:
    found = Estimate(Ratio(1.0, *ends), ((1, 2),) * len(each), each=each)
    assert (found.apart, found.pairs) == (apart, len(each))


# ------------------------------------------------------------------------------- of planted sweeps


def estimate_change(
    folder: Path, metric: Metric, axis: str, rows: Sequence[Record]
) -> list[Estimate | None]:
    _, results = read_results(read_sweep(write_sweep(folder / metric.name, rows)))
    return estimate(metric, [*find_changes(axis, results)], results)


def test_times_are_of_as_many_items_and_memory_is_not_scaled(tmp_path: Path) -> None:
    """An epoch of 50,000 images in 100 s is as fast as one of 10,000 in 20 s."""
    few = replace(FP32, dataset="synthetic")
    rows = [*ran(FP32, (100, 101, 99)), *ran(few, (20, 20.2, 19.8), 2, train_images=10_000)]
    (time,) = estimate_change(tmp_path, TIME, "dataset", rows)
    (memory,) = estimate_change(tmp_path, MEMORY_METRIC, "dataset", rows)
    assert time is not None
    assert memory is not None
    assert (time.ratio.value, memory.ratio.value) == pytest.approx((1.0, 0.5))
    assert (time.ratio.exact, memory.ratio.exact) == (False, True), "bytes repeat"
    # where times say nothing of each other, memory still does
    rows = [*untold(script(), [0.5] * 3), *untold(script(32), [0.6] * 3, peak_device_bytes=9)]
    assert estimate_change(tmp_path / "runs", TIME, "batch_size", rows) == [None]
    (memory,) = estimate_change(tmp_path / "runs", MEMORY_METRIC, "batch_size", rows)
    assert memory is not None
    assert memory.ratio.value
    assert math.isfinite(memory.ratio.value)


@pytest.mark.parametrize(("energy_j", "has_ratio"), [(50.0, True), (0.0, False)])
def test_of_a_reading_that_is_not_above_zero_there_is_no_ratio(
    energy_j: float, has_ratio: bool, tmp_path: Path
) -> None:
    rows = [*ran(FP32, (100,), energy_j=100.0), *ran(FP16, (50,), energy_j=energy_j)]
    (found,) = estimate_change(tmp_path, ENERGY, "precision", rows)
    assert (found is not None) == has_ratio


@pytest.mark.parametrize(("seeds", "estimated"), [(MIN_REPEATS, True), (MIN_REPEATS - 1, False)])
def test_what_a_part_of_an_epoch_taught_is_told_over_enough_seeds(
    seeds: int, estimated: bool, tmp_path: Path
) -> None:
    cases = [replace(case, fraction=0.1) for case in (FP32, FP16)]
    rows = [row for case in cases for row in learn(case, [2.0, 2.1, 2.2][:seeds])]
    (found,) = estimate_change(tmp_path, LOSS, "precision", rows)
    assert (found is not None) == estimated
    whole = [row for case in (FP32, FP16) for row in learn(case, [2.0])]
    (found,) = estimate_change(tmp_path / "whole", LOSS, "precision", whole)
    assert found is not None
    assert found.ratio.value == 1.0


@pytest.mark.parametrize(
    ("small", "large", "mixed"),
    [
        ((0.94, 0.94), (0.94, 0.94), False),
        ((0.94, 0.94), (1.06, 1.06), True),  # faster here, slower there
        ((0.94, 0.94), (1.0, 1.0), True),  # and as fast
        ((0.94, 0.94), (0.8, 1.2), False),  # that cannot be told
    ],
)
def test_a_change_is_mixed_where_its_pairs_have_other_verdicts(
    small: tuple[float, float], large: tuple[float, float], mixed: bool, tmp_path: Path
) -> None:
    rows: list[Record] = []
    for case, (low, high) in ((FP16, small), (replace(FP16, batch_size=256), large)):
        rows += ran(replace(case, precision="fp32", loss_scale=None), (99.9, 100, 100.1))
        rows += ran(case, (100 * low - 0.1, 50 * (low + high), 100 * high + 0.1))
    (found,) = estimate_change(tmp_path, TIME, "precision", rows)
    assert found is not None
    assert found.mixed is mixed


def test_seeds_have_the_mean_of_their_repeats_and_of_logarithms_where_there_are_any() -> None:
    def result(cell: int, *losses: tuple[int, float]) -> Any:
        runs = [
            SimpleNamespace(status=Status.OK, timed=False, run_seed=seed, train_loss=loss)
            for seed, loss in losses
        ]
        return SimpleNamespace(cell=cell, every=runs)

    found = take_seeds(
        LOSS,
        [
            result(1, (0, 1.0), (0, 4.0), (7, 3.0)),
            result(3, (0, 0.0), (0, 2.0), (1, -1.0)),
            result(4),
            result(5, (2, NAN), (1, 8.0), (0, 0.5)),
        ],
    )
    assert {cell: {*seeds} for cell, seeds in found.items()} == {1: {0, 7}, 3: {0, 1}, 5: {0, 1}}
    assert found[1] == {0: (2.5, pytest.approx(math.log(2))), 7: (3.0, math.log(3))}
    assert found[3][0] == (1.0, math.log(2))  # of those that have one
    assert found[3][1][0] == -1.0
    assert math.isnan(found[3][1][1])
    assert found[5] == {0: (0.5, math.log(0.5)), 1: (8.0, math.log(8))}
