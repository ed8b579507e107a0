"""The least time of counted work, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.diagnosis.step import Bound, Rates, find_bound, find_limit, find_rate
from bench.record import WorkRow

RATES = Rates({"float32": 1e12, "tfloat32": 4e12, "float16": 10e12, "float8": 20e12}, 1e9, 1e-6)


def find_floor(row: WorkRow, rates: Rates, arithmetic: str) -> float | None:
    found = find_limit(row, rates, arithmetic)
    return found and found[0]


def row(
    flop: float | None, bytes: float | None, calls: int = 1, format: str = "float32"
) -> WorkRow:
    return WorkRow("matmul", "mm", format, calls, flop, bytes)


def test_a_floor_is_the_longer_of_arithmetic_and_traffic() -> None:
    assert find_floor(row(2e9, 1e6), RATES, "float32") == pytest.approx(2e-3)
    assert find_floor(row(2e9, 5e6), RATES, "float32") == pytest.approx(5e-3)
    assert find_floor(row(2e9, 0, format="float16"), RATES, "float32") == pytest.approx(2e-4)
    # of a format without a rate of its own, traffic alone
    assert find_floor(row(0, 3e6, format="int64"), RATES, "float32") == pytest.approx(3e-3)


def test_products_of_float32_run_in_the_arithmetic_that_is_on() -> None:
    assert find_floor(row(2e9, 0), RATES, "tfloat32") == pytest.approx(5e-4)
    assert find_rate("float16", RATES, "tfloat32") == 10e12
    assert find_rate("float8_e4m3fn", RATES, "float32") == 20e12
    assert find_rate("int64", RATES, "float32") is None


def test_a_convolution_runs_at_what_convolutions_or_products_reach() -> None:
    rates = replace(RATES, convolutions={"float16": 20e12, "bfloat16": 3e12, "float32": 0.5e12})
    for format, rate in {"float16": 20e12, "bfloat16": 3e12, "float32": 1e12}.items():
        convolution = replace(row(2e9, 0, format=format), kind="grouped_convolution")
        assert find_floor(convolution, rates, "float32") == pytest.approx(2e9 / rate)
    assert find_floor(row(2e9, 0, format="float16"), rates, "float32") == pytest.approx(2e-4)
    assert find_rate("bfloat16", rates, "float32") is None
    # one that is emulated is as slow as convolutions, however fast products are
    slow = replace(RATES, convolutions={"float16": 5e9, "float32": 1e12})
    assert find_rate("float16", slow, "float32", "convolution") == 5e9


@pytest.mark.parametrize(
    ("work", "bound"),
    [
        (row(2e9, 1e6), Bound.COMPUTE),
        (row(2e9, 5e6, calls=6000), Bound.LAUNCH),  # 0.8 µs of work a call
        (row(2e9, 5e6, calls=4000), Bound.MEMORY),
        (row(0, 0), Bound.LAUNCH),
    ],
)
def test_the_bound_of_a_row(work: WorkRow, bound: Bound) -> None:
    assert find_bound(work, RATES, "float32") is bound


@pytest.mark.parametrize(
    ("work", "rates"),
    [
        (row(None, None), RATES),  # seen by the profiler alone
        (row(0, 1e6), replace(RATES, copy=None)),
    ],
)
def test_a_floor_needs_counts_and_rates(work: WorkRow, rates: Rates) -> None:
    assert find_floor(work, rates, "float32") is None
    assert find_bound(work, rates, "float32") is None


@given(
    st.floats(0, 1e15), st.floats(0, 1e12), st.integers(1, 10**6), st.sampled_from(["float32", ""])
)
def test_a_faster_machine_has_no_higher_floor(
    flop: float, bytes: float, calls: int, format: str
) -> None:
    work = row(flop, bytes, calls, format)
    slow = find_floor(work, RATES, "float32")
    fast = find_floor(work, replace(RATES, copy=2e9), "tfloat32")
    assert (slow is None) == (fast is None) == bool(flop and not format)
    if slow is not None and fast is not None:
        assert slow / 4 <= fast <= slow
