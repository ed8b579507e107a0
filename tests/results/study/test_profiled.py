"""Which of the processes that train together the others wait for."""

from __future__ import annotations

import pytest

from bench.results.study.profiled import find_straggler
from bench.schema.record import RankRow

STEP_S = 0.02


def make_repeats(*repeats: list[float]) -> list[list[RankRow]]:
    """Repeats of what each process computes in a step, in ms."""
    return [
        [
            RankRow(rank, None, None, None, computing_s=time_ms / 1e3, waits_in="all_reduce")
            for rank, time_ms in enumerate(times)
        ]
        for times in repeats
    ]


def test_it_is_the_one_that_computes_longest_in_all_repeats() -> None:
    found = find_straggler(
        make_repeats([10, 13, 8, 9], [10.1, 13, 8, 9.1], [10, 13.1, 8, 9]), STEP_S
    )
    assert found is not None
    assert (found.rank, found.waits_in) == (1, "all_reduce")
    assert found.longer_s == pytest.approx(4e-3, rel=0.02)  # than the median of the others


@pytest.mark.parametrize(
    "repeats",
    [
        ([10, 12], [10, 10.1], [10, 12]),  # noise
        ([10, 12], [12, 10], [10, 12]),
        ([10, 10.3], [10, 10.3], [10, 10.3]),  # as long, within 2 % of a step
        ([10, 13, 13], [10, 13, 13.1], [10, 13.1, 13]),  # two, of which neither waits for the other
        ([10, 12], [10, 12, 12], [10, 12]),  # not as many
    ],
)
def test_it_is_said_only_where_it_is_known(repeats: tuple[list[float], ...]) -> None:
    assert find_straggler(make_repeats(*repeats), STEP_S) is None
