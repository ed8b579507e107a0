"""A step divided where kernels ran side by side, and rates that the card cannot have reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.profile.rates import Rates
from bench.profile.step import Profile, StepWork, Wait, find_rate
from bench.schema.record import WorkRow
from bench.schema.work import WorkKind
from tests.planted.steps import RATES, divided, make_row

H100 = "NVIDIA H100 80GB HBM3"
PEAKS = Rates({"float32": 67e12, "float16": 989.5e12}, 3.35e12)

NORM = make_row(WorkKind.NORMALISATION, "cudnn_batch_norm", 20.0, bytes=40e9)
ADD = make_row(WorkKind.ELEMENTWISE, "add", 20.0, bytes=60e9)
DENSE = make_row(WorkKind.CONVOLUTION_1X1, "1×1, 64→256", 60.0, flop=0.8e12, bytes=10e9)
GROUPED = make_row(WorkKind.GROUPED, "3×3, 32 groups of 3→3", 41.3, flop=0.1e12, bytes=10e9)
OVERLAPPED = [NORM, ADD, DENSE, GROUPED]
"""Kernels of 141.3 ms in 111.3: those of the grouped convolutions ran on several streams."""

MEASURED = [
    replace(row, exclusive_s=own_ms / 1e3)
    for row, own_ms in zip(OVERLAPPED, (19.0, 18.0, 60.0, 14.3), strict=True)
]
"""The same, with what a profile measured of each row's own time."""


def make_step(ms: float, rows: Sequence[WorkRow], busy_ms: float, **values: Any) -> StepWork:
    """A step on a GPU whose kernels take all of it but 2 ms under the profiler."""
    profile = Profile((busy_ms + 2) / 1e3, busy_ms / 1e3)
    return StepWork(ms / 1e3, rows, RATES, "cuda", profile=profile, **{"peaks": PEAKS, **values})


@pytest.mark.parametrize(
    ("rows", "busy", "expected", "estimated"),
    [
        # each has the time that a profile measured as its own
        (MEASURED, 111.3, (19, 18, 60, 14.3), False),
        # without that only what can overlap is less, and it is an estimate
        (OVERLAPPED, 111.3, (20, 20, 60, 11.3), True),
        # one stream: nothing is estimated where kernels touch by a moment that no digit shows
        (OVERLAPPED, 141.29, (20, 20, 60, 41.29), False),
        # more overlaps than the grouped convolutions are: all convolutions may have
        (OVERLAPPED, 90.65, (20, 20, 30, 20.65), True),
        # or than convolutions are, as where gradients are exchanged meanwhile
        (OVERLAPPED, 35.325, (5, 5, 15, 10.325), True),
    ],
)
def test_what_overlaps_is_taken_from_the_likeliest_kinds(
    rows: list[WorkRow], busy: float, expected: tuple[float, ...], estimated: bool
) -> None:
    breakdown = divided(make_step(busy + 2, rows, busy))
    own = {timed.row.operation: 1e3 * timed.time_s for timed in breakdown.rows}
    assert [own[row.operation] for row in rows] == pytest.approx(expected)
    parts = {name: 1e3 * time_s for name, time_s in breakdown.parts.items()}
    kinds = [row.kind for row in rows]
    assert parts == pytest.approx({**dict(zip(kinds, expected, strict=True)), Wait.IDLE: 2})
    assert breakdown.left_over_s == pytest.approx(0)
    assert breakdown.estimated is estimated
    assert ("≈" in breakdown.verdict) is estimated


@given(
    st.lists(
        st.tuples(st.sampled_from(list(WorkKind)), st.floats(1e-6, 1.0)), min_size=1, max_size=8
    ),
    st.floats(0.01, 1.0),
)
def test_operations_add_up_to_the_time_in_which_any_ran(
    drawn: list[tuple[WorkKind, float]], share: float
) -> None:
    rows = [make_row(kind, f"{i}", 1e3 * time_s) for i, (kind, time_s) in enumerate(drawn)]
    busy = share * sum(time_s for _, time_s in drawn)
    breakdown = divided(make_step(1e3 * busy, rows, 1e3 * busy))
    assert sum(timed.time_s for timed in breakdown.rows) == pytest.approx(busy)
    assert all(timed.time_s >= 0 for timed in breakdown.rows)


# -------------------------------------------------------------------------------- beyond the card


def test_no_rate_above_the_data_sheet_is_told() -> None:
    """bf16-amp's relu at batch size 128 had 3.42 TB/s of an H100: a part of it was in its cache."""
    cached = make_row(WorkKind.ELEMENTWISE, "relu", 1.0, bytes=3.42e9)
    wrong = make_row(WorkKind.MATMUL, "mm", 1.0, format="float16", flop=0.99e12, bytes=1e9)
    sound = make_row(WorkKind.MATMUL, "addmm", 1.0, format="float16", flop=0.98e12, bytes=3.3e9)
    breakdown = divided(make_step(4.0, [cached, wrong, sound], 3.0))
    rows = {timed.row.operation: timed for timed in breakdown.rows}
    assert rows["relu"].traffic is None
    assert (rows["mm"].flops, rows["mm"].traffic) == (None, 1e12)
    assert rows["addmm"].flops == pytest.approx(0.98e15)
    assert rows["addmm"].traffic == pytest.approx(3.3e12)
    # nothing is known of another card, or of a CPU
    assert divided(make_step(4.0, [cached], 3.0, peaks=Rates())).rows[0].traffic == 3.42e12


def test_a_product_runs_at_the_rate_of_its_arithmetic() -> None:
    rates = Rates({"float32": 1e12, "tfloat32": 4e12, "float8": 20e12}, 1e9, 1e-6)
    assert find_rate("float32", rates, "tfloat32") == 4e12
    assert find_rate("float8_e4m3fn", rates, "float32") == 20e12
    assert find_rate("int64", rates, "float32") is None
    # a convolution at the faster of its own and a product's, or at its own where it is emulated
    mixed = replace(rates, convolutions={"float32": 0.5e12, "bfloat16": 3e12})
    assert find_rate("float32", mixed, "float32", "convolution") == 1e12
    assert find_rate("bfloat16", mixed, "float32", "grouped_convolution") == 3e12
    assert find_rate("bfloat16", mixed, "float32") is None
    slow = replace(rates, convolutions={"float32": 1e12, "float8": 5e9})
    assert find_rate("float8", slow, "float32", "convolution") == 5e9
