"""What limits a step and why one is not faster, of steps made by hand whose truth is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.case import Case
from bench.diagnosis.breakdown import Breakdown, divide
from bench.diagnosis.explanation import LEFT_OVER, Cause, Explanation, Side
from bench.diagnosis.reasons import CURES, explain
from bench.diagnosis.sentences import describe
from bench.diagnosis.step import Bound, Profile, Rates, Step, Wait
from bench.record import WorkRow
from bench.report.model import NOTHING
from bench.report.why import tabulate_reasons
from bench.verdict import Ratio
from bench.work import Kind
from tests.steps_for_tests import CPU_RATES, RATES, make_row, make_side, make_step

PRODUCTS = make_row(Kind.MATMUL, "mm", 10.0, flop=0.45e12, bytes=1e9)
TRAFFIC = make_row(Kind.ELEMENTWISE, "relu", 10.0, bytes=36e9)
TINY = make_row(Kind.ELEMENTWISE, "add", 10.0, calls=2000, bytes=1e6)


def divided(step: Step) -> Breakdown:
    breakdown = divide(step)
    assert breakdown is not None
    return breakdown


@pytest.mark.parametrize(
    ("step", "bound"),
    [
        (make_step(10.5, [PRODUCTS]), Bound.COMPUTE),
        (make_step(10.5, [TRAFFIC]), Bound.MEMORY),
        (make_step(10.5, [TINY]), Bound.LAUNCH),
        (make_step(50.0, [PRODUCTS]), Bound.LAUNCH),
        (make_step(50.0, [PRODUCTS], input_wait=80.0), Bound.LOADER),
        (make_step(50.0, [PRODUCTS], sync_wait=80.0), Bound.SYNCHRONISATION),
        (make_step(10.5, [make_row(Kind.INPUT, "index", 10.0, bytes=1e9)]), Bound.LOADER),
        # a kernel that compilation made of several operations was not counted
        (make_step(10.5, [replace(TRAFFIC, flop=None, bytes=None)]), Bound.MEMORY),
        (make_step(10.5, [replace(PRODUCTS, flop=None, bytes=None)]), Bound.COMPUTE),
        (make_step(10.5, [replace(TINY, calls=5000, flop=None, bytes=None)]), Bound.LAUNCH),
    ],
)
def test_a_step_is_limited_by_what_most_of_it_is(step: Step, bound: Bound) -> None:
    breakdown = divided(step)
    assert breakdown.bound is bound
    share = breakdown.bounds[bound]
    assert breakdown.verdict == f"{bound.value}-bound ({100 * share:.0f} %)"
    assert share > 0.75


def test_a_step_limited_by_several_things_lists_their_shares() -> None:
    rows = [replace(TRAFFIC, time_s=6e-3), replace(PRODUCTS, time_s=2e-3)]
    breakdown = divided(make_step(10.0, rows))
    assert breakdown.bound is None
    assert breakdown.verdict == "mixed (60 % memory-bound, 20 % compute-bound, 20 % launch-bound)"


def test_a_step_without_measured_rates_has_shares_of_waits_alone() -> None:
    step = make_step(20.0, [TRAFFIC], rates=Rates())
    assert divided(step).bounds == {Bound.LAUNCH: pytest.approx(0.5)}
    assert divided(step).verdict == "mixed (50 % launch-bound, 50 % not known)"
    assert divided(make_step(10.0, [TRAFFIC], rates=Rates())).verdict == ""


def test_without_a_profile_there_is_no_breakdown() -> None:
    assert divide(Step(1.0, [TRAFFIC], RATES, "cuda")) is None


def test_idle_time_of_a_gpu_is_that_of_the_step_without_a_profiler() -> None:
    """The profiler doubled the gaps: half of what it saw of waiting for batches is left."""
    step = make_step(14.0, [TRAFFIC], profiled_ms=18.0, input_wait=6.0)
    breakdown = divided(step)
    assert breakdown.find_time(Kind.ELEMENTWISE) == pytest.approx(10e-3)
    assert breakdown.find_time(Wait.INPUT) == pytest.approx(3e-3)
    assert breakdown.find_time(Wait.IDLE) == pytest.approx(1e-3)


def test_on_a_cpu_all_is_stretched_alike() -> None:
    step = make_step(10.0, [TRAFFIC], device="cpu", profiled_ms=12.5)
    breakdown = divided(step)
    assert breakdown.find_time(Kind.ELEMENTWISE) == pytest.approx(8e-3)
    assert breakdown.find_time(Wait.IDLE) == pytest.approx(2e-3)
    assert breakdown.left_over_s == pytest.approx(0.0)


def test_overlapping_kernels_share_the_time_in_which_any_ran() -> None:
    profile = Profile(14e-3, 12e-3)
    step = Step(14e-3, [TRAFFIC, PRODUCTS], RATES, "cuda", profile=profile)
    breakdown = divided(step)
    assert breakdown.find_time(Kind.ELEMENTWISE) == pytest.approx(6e-3)
    assert breakdown.find_time(Wait.IDLE) == pytest.approx(2e-3)


def test_kernels_that_take_longer_than_the_step_are_left_over() -> None:
    step = Step(9e-3, [TRAFFIC], RATES, "cuda", profile=Profile(12e-3, 10e-3))
    assert divided(step).left_over_s == pytest.approx(-1e-3)
    assert divided(step).find_time(Wait.IDLE) == 0


# ---------------------------------------------------------------------------------------- reasons

FP32 = {"format": "float32"}
FP16 = {"format": "float16"}


def compare(
    before: Sequence[WorkRow],
    after: Sequence[WorkRow],
    *,
    idle: tuple[float, float] = (0.0, 0.0),
    precisions: tuple[str, str] = ("fp32", "fp16"),
    arithmetic: str = "float32",
    device: str = "cuda",
    rates: Rates | None = None,
    **after_is: object,
) -> Explanation:
    """Explain a pair of steps, each of rows and so many ms idle."""
    sides: list[Side] = []
    waits = {name: after_is.pop(name) for name in ("input_wait", "sync_wait") if name in after_is}
    for rows, ms, name in zip((before, after), idle, precisions, strict=True):
        busy = 1e3 * sum(row.time_s or 0 for row in rows)
        more = {"rates": rates} if rates else {}
        if not sides:
            more["arithmetic"] = arithmetic
        else:
            more |= waits
        step = make_step(busy + ms, rows, device=device, profiled_ms=busy + ms, **more)
        clocks = {"sm_clock_mhz": 1980.0} if not sides else {"sm_clock_mhz": 1980.0, **after_is}
        sides.append(make_side(name, step, **clocks))
    a, b = sides
    return explain("precision", a, b, 128, Ratio(a.step.step_s / b.step.step_s))


MM32 = make_row(Kind.MATMUL, "mm", 12.0, flop=0.6e12, bytes=1e8, **FP32)  # at 50 TFLOP/s
MM16 = make_row(Kind.MATMUL, "mm", 1.0, flop=0.6e12, bytes=5e7, **FP16)  # at 600 TFLOP/s
RELU32 = make_row(Kind.ELEMENTWISE, "relu", 8.0, bytes=32e9, **FP32)
RELU16 = make_row(Kind.ELEMENTWISE, "relu", 4.0, bytes=16e9, **FP16)
GROUPS = "3×3, 32 groups of 3→3"
CONV32 = make_row(Kind.GROUPED, GROUPS, 12.0, flop=0.12e12, bytes=1e9, **FP32)
CONV16 = make_row(Kind.GROUPED, GROUPS, 9.0, flop=0.12e12, bytes=0.5e9, **FP16)
SOFTMAX = make_row(Kind.ELEMENTWISE, "_softmax", 6.0, bytes=24e9, **FP32)
CAST = make_row(Kind.CAST, "_to_copy", 5.0, bytes=20e9, format="float32→float16", calls=160)
TURN = make_row(Kind.LAYOUT, "clone", 5.0, bytes=20e9, **FP16)
SMALL32 = make_row(Kind.MATMUL, "mm", 12.0, flop=0.3e12, bytes=1e8, **FP32)
SMALL16 = make_row(Kind.MATMUL, "mm", 6.0, flop=0.3e12, bytes=5e7, **FP16)

# of each case what is hoped is 12×, by the rates of RATES
PLANTED: dict[str, tuple[Explanation, Cause, float]] = {
    "memory": (compare([MM32, RELU32], [MM16, RELU16]), Cause.MEMORY, 4.0 - 8 / 12),
    "casts": (compare([MM32], [MM16, CAST]), Cause.ADDED, 5.0),
    "layout": (compare([MM32], [MM16, TURN]), Cause.LAYOUT, 5.0),
    "launches": (compare([MM32], [MM16], idle=(1.0, 7.0)), Cause.LAUNCH, 7.0 - 1 / 12),
    "tiny operations": (compare([MM32, TINY], [MM16, TINY]), Cause.LAUNCH, 10 - 10 / 12),
    "loader": (compare([MM32], [MM16], idle=(0.0, 9.0), input_wait=9.0), Cause.LOADER, 9.0),
    "synchronisation": (
        compare([MM32], [MM16], idle=(0.0, 9.0), sync_wait=9.0), Cause.SYNCHRONISATION, 9.0,
    ),
    "retries": (
        compare([MM32], [MM16], idle=(0.0, 9.0), alloc_retries=12), Cause.MEMORY_LIMIT, 9.0,
    ),
    "kept in fp32": (compare([MM32, SOFTMAX], [MM16, SOFTMAX]), Cause.FLOAT32, 6 - 6 / 12),
    "no tensor cores": (
        compare([MM32, CONV32], [MM16, CONV16]), Cause.NO_TENSOR_CORES, 9.0 - 12 / 12,
    ),
    "small products": (compare([SMALL32], [SMALL16]), Cause.PRODUCTS, 6.0 - 12 / 12),
    # a tenth of the clock is gone: 1 ms of 10 is due to that, the rest is due to a small product
    "clocks": (
        compare([replace(SMALL32, time_s=60e-3)], [replace(SMALL16, time_s=10e-3)],
                sm_clock_mhz=1782.0),
        Cause.CLOCKS, 1.0,
    ),
    "tf32": (
        compare([replace(MM32, time_s=1.5e-3)], [MM16], precisions=("tf32", "fp16"),
                arithmetic="tfloat32"),
        # TF32 promises fp16 no more than its bits do: twice, and not twelve times
        Cause.TF32, 1.5 / 2 - 1.5 / 12,
    ),
    "emulated": (
        compare([make_row(Kind.MATMUL, "mm", 10.0, flop=2e9, bytes=1e6, **FP32)],
                [make_row(Kind.MATMUL, "mm", 1000.0, flop=2e9, bytes=5e5, **FP16)], device="cpu"),
        Cause.EMULATED, 1000.0 - 10 / 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_is_named_with_its_share(name: str) -> None:
    found, cause, ms = PLANTED[name]
    (reason,) = [reason for reason in found.reasons if reason.cause is cause]
    assert reason.time_s == pytest.approx(ms / 1e3, rel=1e-6)
    assert reason.share == pytest.approx(ms / 1e3 / found.gap_s, abs=0.05)
    assert name == "clocks" or found.reasons[0] is reason
    assert reason.evidence
    assert found.unexplained_s == pytest.approx(0.0, abs=1e-9)


def test_every_cause_is_planted_and_has_its_cure() -> None:
    assert {cause for _, cause, _ in PLANTED.values()} == set(Cause) == set(CURES)


def test_a_convolution_at_the_rate_of_tensor_cores_used_them_whatever_its_kernel_is() -> None:
    fast = replace(CONV16, time_s=2e-3)  # 60 TFLOP/s, above float32's 50
    found = compare([MM32, CONV32], [MM16, fast])
    assert [r.cause for r in found.reasons if r.time_s > 0] == [Cause.PRODUCTS]


def test_evidence_names_the_convolution_with_its_groups_and_rates() -> None:
    found, *_ = PLANTED["no tensor cores"]
    evidence = found.reasons[0].evidence
    assert "convolution 3×3, 32 groups of 3→3 at 13.3 TFLOP/s" in evidence
    assert "600 TFLOP/s in float16" in evidence
    assert "50.0 TFLOP/s in float32" in evidence


def test_memory_bound_operations_say_what_their_bytes_allow() -> None:
    found, *_ = PLANTED["memory"]
    assert "can gain 2×, and gained 2×" in found.reasons[0].evidence
    # 16 GB of traffic at 4 TB/s and 1 ms of products, of 20 ms
    assert found.ceiling == pytest.approx(20 / 5)
    assert found.hoped == pytest.approx(12)
    # compiled, it moves less than the operations that were counted
    compiled = replace(found.b, case=replace(found.b.case, compile=True))
    assert explain("compile", found.a, compiled, 128, found.speedup).ceiling is None


def test_an_option_that_the_case_has_already_is_not_advised() -> None:
    found, *_ = PLANTED["memory"]
    assert "--compile on" in found.reasons[0].option
    a, b = found.a, replace(found.b, case=Case(precision="fp16", compile=True))
    again = explain("precision", a, b, 128, found.speedup)
    assert "--compile" not in again.reasons[0].option


def test_an_option_that_the_sweep_tried_comes_with_what_it_measured() -> None:
    found, *_ = PLANTED["launches"]
    tried = {"compile": {True: 1.5}, "batch_size": {64: 0.6, 512: 1.8}}
    again = explain("precision", found.a, found.b, 128, found.speedup, tried)
    (launch,) = [reason for reason in again.reasons if reason.cause is Cause.LAUNCH]
    assert {(trial.flag, trial.speedup) for trial in launch.tried} == {
        ("--compile on", 1.5),
        ("--batch-size 512", 1.8),
    }
    assert "1.80× as fast with --batch-size 512" in " ".join(describe(again))


def test_an_axis_that_promises_nothing_is_explained_by_all_of_its_difference() -> None:
    found = compare([MM32, RELU32], [MM32, replace(RELU32, time_s=3e-3)], precisions=("fp32",) * 2)
    again = explain("compile", found.a, found.b, 128, found.speedup)
    assert again.hoped is None
    assert again.gap_s == pytest.approx(-5e-3)
    assert [(r.cause, r.share) for r in again.reasons] == [(Cause.MEMORY, pytest.approx(1))]
    assert "100 % elementwise operations (8 → 3 ms)" in " ".join(describe(again))


def test_fused_operations_are_set_against_those_of_their_kind() -> None:
    """Compilation gives operations other names; one that is gone has no time left."""
    fused = make_row(Kind.ELEMENTWISE, "triton_poi_fused_add_relu", 3.0, flop=None, bytes=None)
    found = compare([RELU32, TRAFFIC, TURN], [fused], precisions=("fp32", "fp32"))
    again = explain("compile", found.a, found.b, 128, found.speedup)
    times = {reason.cause: reason.time_s for reason in again.reasons}
    assert times[Cause.MEMORY] == pytest.approx(3e-3 - 18e-3)
    assert times[Cause.LAYOUT] == pytest.approx(-5e-3)
    assert again.unexplained_s == pytest.approx(0)


def test_what_compilation_put_into_other_kernels_has_neither_rate_nor_ceiling() -> None:
    """What was counted moves more than what runs: held against its time it would be too fast."""
    fused = make_row(Kind.NORMALISATION, "triton_red_fused_bn_relu", 3.0, flop=None, bytes=None)
    gone = make_row(Kind.NORMALISATION, "native_batch_norm", None, bytes=64e9)
    kept = make_row(Kind.NORMALISATION, "native_layer_norm", 2.0, bytes=4e9)
    step = make_step(6.0, [fused, gone, kept])
    (part,) = [part for part in divided(step).parts if part.name == Kind.NORMALISATION]
    assert (part.time_s, part.counted_s, part.bytes) == pytest.approx((5e-3, 2e-3, 4e9))
    case = Case(precision="fp32", compile=True)
    before = make_side("fp32", make_step(18.0, [replace(gone, time_s=16e-3)]))
    found = explain("compile", before, make_side("fp32", step, case=case), 128, Ratio(3.0))
    assert found.ceiling is None


def test_what_limits_recurrent_layers_is_not_known() -> None:
    row = make_row(Kind.RECURRENT, "_cudnn_rnn", 10.0, bytes=36e9)
    assert divided(make_step(10.5, [row])).bounds.keys() == {Bound.LAUNCH}


def test_a_format_as_fast_as_was_hoped_says_so() -> None:
    words = " ".join(describe(compare([MM32], [MM16])))
    assert "as fast as was hoped" in words
    assert "12.00×" in words


def test_a_format_faster_than_was_hoped_says_by_how_much() -> None:
    quick = replace(MM16, time_s=0.5e-3)
    words = " ".join(describe(compare([MM32], [quick])))
    assert "faster than that promises, by" in words
    assert "within" not in words


def test_shares_of_a_gap_within_noise_are_not_told() -> None:
    """Two reasons of the same size, one against the other, would be thousands of percent."""
    slower, quicker = replace(MM32, time_s=14.99e-3), replace(RELU32, time_s=5e-3)
    found = compare([MM32, RELU32], [slower, quicker], precisions=("fp32", "fp32"))
    again = explain("compile", found.a, found.b, 128, found.speedup)
    assert abs(again.reasons[0].share) > 10
    table = tabulate_reasons("reasons", again)
    assert {row[1].text for row in table.rows} == {NOTHING}
    assert "the same time, within 2 %" in " ".join(table.words)
    # what gained is not advised against
    assert [("Try" in note) for note in table.notes] == [r.time_s > 0 for r in again.reasons]
    # one of them alone is a gain, and its shares are told
    found = compare([MM32, RELU32], [MM32, quicker], precisions=("fp32", "fp32"))
    table = tabulate_reasons("reasons", explain("compile", found.a, found.b, 128, found.speedup))
    assert table.heads[1].label == "of the gain (%)"
    assert table.rows[0][1].text == "100"


def test_a_cast_is_named_by_its_formats() -> None:
    back = replace(CAST, format="float16→float32")
    (found,) = [
        reason
        for reason in compare([MM32], [MM16, CAST, back]).reasons
        if reason.cause is Cause.ADDED
    ]
    assert "_to_copy float32→float16 (0 → 5 ms)" in found.evidence
    assert "_to_copy float16→float32 (0 → 5 ms)" in found.evidence


def test_without_rates_a_format_promises_what_its_bits_do() -> None:
    found = compare([MM32, CAST], [MM16, CAST], rates=Rates())
    assert found.hoped == pytest.approx(2)
    assert found.ceiling is None
    assert found.unexplained_s == pytest.approx(1e-3 - 6e-3)  # products: no rate to hold against


def test_operations_that_no_kind_names_are_not_explained() -> None:
    strange = make_row(Kind.OTHER, "mystery", 4.0, flop=None, bytes=None, **FP16)
    found = compare([MM32], [MM16, strange])
    assert found.unexplained_s == pytest.approx(4e-3)
    assert "Nothing explains the gap of 4 ms" in " ".join(describe(found))


# ------------------------------------------------------------------------------------- properties

KINDS = st.sampled_from(list(Kind))
TIMES = st.none() | st.floats(1e-7, 0.1)
AMOUNTS = st.none() | st.floats(0, 1e13)


@st.composite
def rows(draw: st.DrawFn) -> list[WorkRow]:
    return [
        WorkRow(
            draw(KINDS),
            draw(st.sampled_from(["one", "two", "three"])),
            draw(st.sampled_from(["float32", "float16", "float32→float16"])),
            draw(st.integers(0, 5000)),
            flop,
            None if flop is None else draw(st.floats(0, 1e11)),
            draw(TIMES),
        )
        for flop in draw(st.lists(AMOUNTS, min_size=1, max_size=12))
    ]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    wall = draw(st.floats(1e-4, 1.0))
    share = st.floats(0, 1)
    busy = wall * draw(share)
    gaps = wall - busy
    waits = draw(share) * gaps
    profile = Profile(wall, busy, waits, (gaps - waits) * draw(share))
    device = draw(st.sampled_from(["cpu", "cuda"]))
    rates = draw(st.sampled_from([RATES, CPU_RATES, Rates()]))
    return Step(draw(st.floats(1e-4, 1.0)), draw(rows()), rates, device, profile=profile)


@given(steps())
def test_parts_add_up_to_the_step(step: Step) -> None:
    breakdown = divided(step)
    parts = sum(part.time_s for part in breakdown.parts)
    assert parts + breakdown.left_over_s == pytest.approx(step.step_s)
    assert all(part.time_s >= 0 for part in breakdown.parts)
    known = sum(breakdown.bounds.values()) * step.step_s
    assert known <= parts * (1 + 1e-9)
    assert all(sum(p.bounds.values()) <= p.time_s * (1 + 1e-9) for p in breakdown.parts)


@given(
    steps(),
    steps(),
    st.sampled_from(["fp32", "tf32", "fp16", "bf16-amp", "fp8"]),
    st.sampled_from(["precision", "compile"]),
)
def test_changes_add_up_to_the_difference_and_reasons_to_the_gap(
    before: Step, after: Step, precision: str, axis: str
) -> None:
    a, b = make_side("fp32", before), make_side(precision, after, sm_clock_mhz=1000.0)
    a = replace(a, sm_clock_mhz=2000.0)
    found = explain(axis, a, b, 128, Ratio(1.0))
    difference = after.step_s - before.step_s
    largest = before.step_s + after.step_s
    assert sum(c.change_s for c in found.changes) == pytest.approx(difference, abs=1e-6 * largest)
    assert found.changes[-1].name == LEFT_OVER
    explained = sum(reason.time_s for reason in found.reasons)
    assert explained + found.unexplained_s == pytest.approx(found.gap_s, abs=1e-6 * largest)
    assert found.gap_s == pytest.approx(after.step_s - before.step_s / (found.hoped or 1))
    assert all(describe(found))
