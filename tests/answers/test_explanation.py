"""What limits a step and why one is not faster, of steps made by hand whose truth is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.answers.explanation import (
    CURES,
    Cause,
    Explanation,
    StepSide,
    describe,
    explain,
    list_cures,
)
from bench.profile.breakdown import LEFT_OVER, Ceiling
from bench.profile.kernels import shorten_kernel
from bench.profile.rates import Rates, find_emulated, find_halves
from bench.profile.step import Bound, Profile, StepWork, Wait
from bench.results.verdict import Ratio
from bench.schema.case import Case
from bench.schema.record import KernelTime, WorkRow, write_kernels
from bench.schema.work import WorkKind
from tests.planted.steps import CPU_RATES, RATES, divided, make_row, make_side, make_step

PRODUCTS = make_row(WorkKind.MATMUL, "mm", 10.0, flop=0.45e12, bytes=1e9)
TRAFFIC = make_row(WorkKind.ELEMENTWISE, "relu", 10.0, bytes=36e9)
TINY = make_row(WorkKind.ELEMENTWISE, "add", 10.0, calls=2000, bytes=1e6)


@pytest.mark.parametrize(
    ("step", "bound"),
    [
        (make_step(10.5, [PRODUCTS]), Bound.COMPUTE),
        (make_step(10.5, [TRAFFIC]), Bound.MEMORY),
        (make_step(10.5, [TINY]), Bound.LAUNCH),
        (make_step(50.0, [PRODUCTS]), Bound.LAUNCH),
        (make_step(50.0, [PRODUCTS], input_wait=80.0), Bound.LOADER),
        (make_step(10.5, [make_row(WorkKind.INPUT, "index", 10.0, bytes=1e9)]), Bound.LOADER),
        # a kernel that compilation made of several operations was not counted
        (make_step(10.5, [replace(TRAFFIC, flop=None, bytes=None)]), Bound.MEMORY),
    ],
)
def test_a_step_is_limited_by_what_most_of_it_is(step: StepWork, bound: Bound) -> None:
    breakdown = divided(step)
    assert breakdown.bound is bound
    share = breakdown.bounds[bound]
    assert breakdown.verdict == f"{bound.value}-bound ({100 * share:.0f} %)"
    assert share > 0.75


SEVERAL = [replace(TRAFFIC, time_s=6e-3), replace(PRODUCTS, time_s=2e-3)]


@pytest.mark.parametrize(
    ("step", "verdict"),
    [
        (make_step(10.0, SEVERAL),
         "mixed (60 % memory-bound, 20 % compute-bound, 20 % launch-bound)"),
        # without measured rates there are shares of waits alone
        (make_step(20.0, [TRAFFIC], rates=Rates()), "mixed (50 % launch-bound, 50 % not known)"),
        # of recurrent layers torch does not tell the FLOP
        (make_step(12.0, [make_row(WorkKind.RECURRENT, "_cudnn_rnn", 10.0, bytes=36e9)]),
         "mixed (17 % launch-bound, 83 % not known)"),
    ],
)  # fmt: skip
def test_a_step_limited_by_several_things_lists_their_shares(step: StepWork, verdict: str) -> None:
    breakdown = divided(step)
    assert breakdown.bound is None
    assert breakdown.verdict == verdict


@pytest.mark.parametrize(
    ("step", "parts"),
    [
        # the profiler doubled the gaps: half of what it saw of waiting for batches is left
        (make_step(14.0, [TRAFFIC], profiled_ms=18.0, input_wait=6.0),
         {WorkKind.ELEMENTWISE: 10, Wait.INPUT: 3, Wait.IDLE: 1}),
        # on a CPU all is stretched alike
        (make_step(10.0, [TRAFFIC], device="cpu", profiled_ms=12.5),
         {WorkKind.ELEMENTWISE: 8, Wait.IDLE: 2}),
        # kernels that take longer than the step are left over
        (StepWork(9e-3, [TRAFFIC], RATES, "cuda", profile=Profile(12e-3, 10e-3)),
         {WorkKind.ELEMENTWISE: 10, LEFT_OVER: -1}),
    ],
)  # fmt: skip
def test_the_time_of_a_step_is_divided_as_the_profile_says(
    step: StepWork, parts: dict[str, float]
) -> None:
    breakdown = divided(step)
    found = {name: 1e3 * time_s for name, time_s in breakdown.parts.items()}
    found |= {LEFT_OVER: 1e3 * breakdown.left_over_s}
    assert found == pytest.approx({LEFT_OVER: 0, **parts})


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
    **after_is: Any,
) -> Explanation:
    """Explain a pair of steps, each of rows and so many ms idle."""
    sides: list[StepSide] = []
    waits = {name: after_is.pop(name) for name in ("input_wait", "sync_wait") if name in after_is}
    for rows, ms, name in zip((before, after), idle, precisions, strict=True):
        busy = 1e3 * sum(row.time_s or 0 for row in rows)
        more: dict[str, Any] = {"rates": rates} if rates else {}
        more |= waits if sides else {"arithmetic": arithmetic}
        step = make_step(busy + ms, rows, device=device, profiled_ms=busy + ms, **more)
        clocks = {"sm_clock_mhz": 1980.0} if not sides else {"sm_clock_mhz": 1980.0, **after_is}
        sides.append(make_side(name, step, **clocks))
    a, b = sides
    return explain(a, b, 128, Ratio(a.step.step_s / b.step.step_s))


def write(found: Explanation) -> str:
    return " ".join(describe(found))


MM32 = make_row(WorkKind.MATMUL, "mm", 12.0, flop=0.6e12, bytes=1e8, **FP32)  # at 50 TFLOP/s
MM16 = make_row(WorkKind.MATMUL, "mm", 1.0, flop=0.6e12, bytes=5e7, **FP16)  # at 600 TFLOP/s
RELU32 = make_row(WorkKind.ELEMENTWISE, "relu", 8.0, bytes=32e9, **FP32)
RELU16 = make_row(WorkKind.ELEMENTWISE, "relu", 4.0, bytes=16e9, **FP16)
NORM16 = make_row(WorkKind.NORMALISATION, "cudnn_batch_norm", 5.0, bytes=16e9, **FP16)
NATIVE = make_row(WorkKind.NORMALISATION, "native_batch_norm", 16.0, bytes=16e9, format="bfloat16")
GROUPS = "3×3, 32 groups of 24→24"
CONV32 = make_row(WorkKind.GROUPED, GROUPS, 12.0, flop=0.12e12, bytes=1e9, **FP32)
CONV16 = make_row(WorkKind.GROUPED, GROUPS, 9.0, flop=0.12e12, bytes=0.5e9, **FP16)
SOFTMAX = make_row(WorkKind.ELEMENTWISE, "_softmax", 6.0, bytes=24e9, **FP32)
CAST = make_row(WorkKind.CAST, "_to_copy", 5.0, bytes=20e9, format="float32→float16", calls=160)
TURN = make_row(WorkKind.LAYOUT, "clone", 5.0, bytes=20e9, **FP16)
SMALL32 = make_row(WorkKind.MATMUL, "mm", 12.0, flop=0.3e12, bytes=1e8, **FP32)
SMALL16 = make_row(WorkKind.MATMUL, "mm", 6.0, flop=0.3e12, bytes=5e7, **FP16)

ALLREDUCE = make_row(WorkKind.EXCHANGE, "all_reduce", 7.0)

# a cause, what it has of the second step in ms, and the evidence
PLANTED: dict[str, tuple[Explanation, Cause, float, str]] = {
    "memory": (compare([MM32, RELU32], [MM16, RELU16]), Cause.MEMORY, 4.0,
        "most in relu 4 ms.",
    ),
    # 16 GB at 4 TB/s are 4 ms
    "below copies": (
        compare([MM16, NORM16], [MM16, NATIVE], precisions=("fp16", "bf16-amp")),
        Cause.BELOW_COPY, 12.0,
        "most in native_batch_norm 12 ms at 1 TB/s; this machine reaches 4 TB/s.",
    ),
    "arithmetic": (compare([MM32], [MM16]), Cause.ARITHMETIC, 1.0,
        "most in mm 1 ms at 600 TFLOP/s; this machine reaches 600 TFLOP/s.",
    ),
    "casts": (compare([MM32], [MM16, CAST]), Cause.ADDED, 5.0,
        "most in _to_copy float32→float16 5 ms.",
    ),
    "layout": (compare([MM32], [MM16, TURN]), Cause.LAYOUT, 5.0,
        "most in clone 5 ms.",
    ),
    "launches": (compare([MM32], [MM16], idle=(1.0, 7.0)), Cause.LAUNCH, 7.0,
        "between operations 7 ms.",
    ),
    "tiny operations": (compare([MM32, TINY], [MM16, TINY]), Cause.LAUNCH, 10.0,
        "most in add 10 ms.",
    ),
    "loader": (compare([MM32], [MM16], idle=(0.0, 9.0), input_wait=9.0), Cause.LOADER, 9.0,
        "waiting for a batch 9 ms.",
    ),
    "exchange": (compare([MM32], [MM16, ALLREDUCE]), Cause.EXCHANGE, 7.0,
        "most in all_reduce 7 ms.",
    ),
    "synchronisation": (
        compare([MM32], [MM16], idle=(0.0, 9.0), sync_wait=9.0), Cause.SYNCHRONISATION, 9.0,
        "after the program waited for the device 9 ms.",
    ),
    "retries": (
        compare([MM32], [MM16], idle=(0.0, 9.0), alloc_retries=12), Cause.MEMORY_LIMIT, 9.0,
        "12 allocations were retried after freeing memory.",
    ),
    "kept in fp32": (compare([MM32, SOFTMAX], [MM16, SOFTMAX]), Cause.FLOAT32, 6.0,
        "most in _softmax 6 ms.",
    ),
    # 0.12 TFLOP at 600 TFLOP/s are 0.2 ms
    "no tensor cores": (
        compare([MM32, CONV32], [MM16, CONV16]), Cause.NO_TENSOR_CORES, 9.0 - 0.2,
        "most in grouped convolution 3×3, 32 groups of 24→24 8.8 ms at 13.3 TFLOP/s; "
        "this machine reaches 600 TFLOP/s.",
    ),
    "small products": (compare([SMALL32], [SMALL16]), Cause.PRODUCTS, 6.0 - 0.5,
        "most in mm 5.5 ms at 50 TFLOP/s; this machine reaches 600 TFLOP/s.",
    ),
    # a tenth of the clock is gone: 1 ms of 10 is due to that, the rest is due to a small product
    "clocks": (
        compare([replace(SMALL32, time_s=60e-3)], [replace(SMALL16, time_s=10e-3)],
                sm_clock_mhz=1782.0),
        Cause.CLOCKS, 1.0,
        "the SM clock sank from 1,980 to 1,782 MHz; nvidia-smi -q -d POWER,CLOCK shows the "
        "limit; most in mm 1 ms.",
    ),
    "emulated": (
        compare([make_row(WorkKind.MATMUL, "mm", 10.0, flop=2e9, bytes=1e6, **FP32)],
                [make_row(WorkKind.MATMUL, "mm", 1000.0, flop=2e9, bytes=5e5, **FP16)],
                device="cpu"),
        Cause.EMULATED, 1000.0,
        "most in mm 1,000 ms at 2 GFLOP/s; this machine reaches 2 GFLOP/s.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_is_named_with_its_time(name: str) -> None:
    found, cause, ms, evidence = PLANTED[name]
    (reason,) = [reason for reason in found.reasons if reason.cause is cause]
    assert reason.after_s == pytest.approx(ms / 1e3, rel=1e-6)
    assert reason.evidence == evidence
    assert name == "clocks" or found.reasons[0] is reason
    assert cause.meaning in write(found) or name == "clocks"
    assert reason.evidence
    assert found.unexplained_s == (0.0, 0.0)


def test_every_cause_is_planted_and_has_its_cure() -> None:
    assert {cause for _, cause, *_ in PLANTED.values()} == set(Cause) == set(CURES)


# ---------------------------------------------------------------------------------------- kernels

DIRECT = "void cudnn::cnn::conv2d_grouped_direct_kernel<false, true, __half, float>(int, float)"
TENSOR = "sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tensor16x8x16_kernel"


def run_by(row: WorkRow, *kernels: str) -> WorkRow:
    """A row whose kernels took equal parts of its time."""
    time_s = (row.time_s or 0) / len(kernels)
    times = [KernelTime(shorten_kernel(name), time_s) for name in kernels]
    return replace(row, kernels=write_kernels(times))


def test_what_changes_the_layout_of_a_convolution_is_no_slow_product() -> None:
    """cuDNN's own kernels for that, a third of the row: they move bytes, and multiply nothing."""
    turned = run_by(CONV16, TENSOR, TENSOR, "void cudnn::ops::nchwToNhwcKernel<__half>(int)")
    found = compare([MM32, CONV32], [MM16, turned])
    after = {reason.cause: reason.after_s for reason in found.reasons}
    assert after[Cause.LAYOUT] == pytest.approx(3e-3)
    assert after[Cause.PRODUCTS] == pytest.approx(6e-3 - 0.2e-3)
    (layout,) = [reason for reason in found.reasons if reason.cause is Cause.LAYOUT]
    assert f"most in grouped convolution {GROUPS} 3 ms" in layout.evidence


def test_tensor_cores_are_told_by_the_name_of_the_kernel_and_not_by_its_rate() -> None:
    slow = run_by(CONV16, TENSOR)  # at 13 TFLOP/s, below float32's 50
    quick = run_by(replace(CONV16, time_s=2e-3), DIRECT)  # at 60
    for row, cause in ((slow, Cause.PRODUCTS), (quick, Cause.NO_TENSOR_CORES)):
        found = compare([MM32, CONV32], [MM16, row])
        assert found.reasons[0].cause is cause
    assert "most runs in conv2d_grouped_direct_kernel" in found.reasons[0].evidence
    # without names the rate decides
    assert compare([MM32, CONV32], [MM16, replace(CONV16, time_s=2e-3)]).reasons[0].cause is (
        Cause.PRODUCTS
    )


# ---------------------------------------------------------------------------------------- ceiling


def test_a_step_gains_at_most_its_measured_time_over_the_least_of_the_other() -> None:
    found, *_ = PLANTED["memory"]
    # 16 GB of traffic at 4 TB/s and 1 ms of products, of 20 ms
    assert found.ceiling == Ceiling(pytest.approx(4.0), pytest.approx(5e-3), pytest.approx(0.8))
    assert "At most 4.00× is possible without fusing" in write(found)
    # a step before that falls short of its own least time can be gained on by more
    slow = compare([replace(MM32, time_s=22e-3), RELU32], [MM16, RELU16])
    assert slow.ceiling.speedup == pytest.approx(30 / 5)
    # compiled, it moves less than the operations that were counted
    compiled = replace(found.b, case=replace(found.b.case, compile="default"))
    assert explain(found.a, compiled, 128, found.speedup).ceiling is None
    unknown = compare([MM32, RELU32], [MM16, RELU16], rates=replace(RATES, copy=None))
    assert unknown.ceiling is None
    assert "How much is possible is not known, since rates of this machine" in write(unknown)


def test_what_a_cache_made_faster_than_copies_has_its_own_time_in_the_bound() -> None:
    cached = make_row(WorkKind.ELEMENTWISE, "relu", 0.8, bytes=4e9, **FP16)
    found = compare([RELU32], [cached], idle=(0.0, 1.0))
    # 8 ms of 32 GB at 4 TB/s, and 0.8 of 4, which take 1.8 with the start
    assert found.ceiling.speedup == pytest.approx(10)


@pytest.mark.parametrize(
    ("row", "rates"),
    [
        (replace(MM16, time_s=0.5e-3), RATES),
        # float32 fell to 0.1 GFLOP/s beside another program
        (replace(MM32, time_s=20e-3), replace(RATES, products={"float32": 1e8, "float16": 6e14})),
    ],
)
def test_what_beats_the_measured_rates_has_no_bound(row: WorkRow, rates: Rates) -> None:
    found = compare([MM32, RELU32], [row], rates=rates)
    assert found.ceiling is None
    assert "measured too low: python -m bench.doctor" in write(found)


@pytest.mark.parametrize(
    ("kind", "cause", "reach"),
    [
        (WorkKind.CONVOLUTION_1X1, Cause.PRODUCTS, "machine reaches 300"),
        (WorkKind.MATMUL, Cause.EMULATED, "machine reaches 1.3"),
    ],
)
def test_convolutions_on_a_cpu_are_judged_by_what_convolutions_reach(
    kind: WorkKind, cause: Cause, reach: str
) -> None:
    convolutions = {"float32": 100e9, "bfloat16": 300e9}
    rates = Rates({"float32": 141e9, "bfloat16": 1.3e9}, 11e9, 2e-6, convolutions)
    before, after = (
        make_row(kind, "1×1, 64→64", time, flop=2e9, bytes=1e7, format=format)
        for time, format in ((30.0, "float32"), (2000.0, "bfloat16"))
    )
    found = compare([before], [after], device="cpu", rates=rates, precisions=("fp32", "bf16-amp"))
    assert found.reasons[0].cause is cause
    assert reach in found.reasons[0].evidence


@pytest.mark.parametrize(
    ("share", "cpu", "gpu"),
    [(0.03, False, False), (0.5, None, False), (1.05, None, False), (1.3, True, True)],
)
def test_a_format_is_emulated_by_one_rule(share: float, cpu: bool | None, gpu: bool) -> None:
    """Of a CPU between those with instructions and those without it is not known, and not told."""
    for device, known in (("cpu", cpu), ("cuda", gpu)):
        rates = Rates({"float32": 100e9, "bfloat16": share * 100e9}, 11e9, 2e-6)
        before, after = (
            make_row(WorkKind.MATMUL, "mm", 2000.0, flop=2e9, bytes=1e7, format=format)
            for format in ("float32", "bfloat16")
        )
        precisions = ("fp32", "bf16-amp")
        found = compare([before], [after], device=device, rates=rates, precisions=precisions)
        causes = {reason.cause for reason in found.reasons}
        row = {"rate_float32": 100e9, "rate_bfloat16": share * 100e9}
        row |= {"gpu": "A card"} if device == "cuda" else {}
        assert (Cause.EMULATED in causes) is (known is False)
        assert bool(find_emulated("bfloat16", row, convolves=True)) is (known is False)
        halves = {} if device == "cuda" or known is None else {"bfloat16": known}
        assert find_halves(row) == halves


def test_tf32_in_the_baseline_is_told_and_its_rate_is_not_float32s() -> None:
    found = compare([replace(SMALL32, time_s=4e-3)], [SMALL16], arithmetic="tfloat32")
    assert "fp32 rounded its products to TF32" in write(found)
    tf32 = compare([MM32], [replace(SMALL32, time_s=4e-3)], precisions=("fp32", "tf32"))
    b = replace(tf32.b, step=replace(tf32.b.step, arithmetic="tfloat32"))
    reasons = {one.cause: one for one in explain(tf32.a, b, 128, tf32.speedup).reasons}
    reason = reasons[Cause.PRODUCTS]
    assert "this machine reaches 400 TFLOP/s" in reason.evidence


def test_a_step_that_is_slower_by_noise_is_no_loss() -> None:
    found = compare([MM16], [replace(MM16, time_s=1.01e-3)], precisions=("fp16", "fp16"))
    assert not found.lost
    assert "The two steps take the same time, within 2 %." in write(found)


def test_only_what_the_case_can_have_and_has_not_is_advised() -> None:
    assert list_cures(Cause.MEMORY, Case()) == ("--compile default",)
    assert list_cures(Cause.MEMORY, Case(compile="default")) == ()
    assert "--cuda-graphs on" not in list_cures(Cause.LAUNCH, Case(device="cpu"))


def test_what_may_help_a_command_is_in_its_script_or_a_placeholder() -> None:
    def find_cures(command: str, row: WorkRow) -> set[str]:
        side = make_side("bf16", make_step(50.0, [row]))
        case = Case(command=command, workload="command", device="cuda")
        found = explain(side, replace(side, case=case), 0, Ratio(1.0))
        assert "by median steps: 50" in (words := " ".join(describe(found)))
        assert ("its operations were not counted" in words) == (row.bytes is None)
        return {cure for reason in found.reasons for cure in reason.cures}

    ways = {
        "a larger batch",
        "torch.compile(model)",
        'torch.compile(model, mode="reduce-overhead")',
    }
    assert find_cures("python t.py", TRAFFIC) == ways
    own = find_cures("python t.py -b {batch_size}", TRAFFIC)
    assert own == ways - {"a larger batch"} | {"a larger --batch-size"}
    compiled = replace(TRAFFIC, flop=None, bytes=None)
    assert find_cures("python t.py", compiled) == {"a larger batch"}


# ------------------------------------------------------------------------------------- properties

KINDS, OPERATIONS = st.sampled_from(list(WorkKind)), st.sampled_from(["one", "two", "three"])
TIMES = st.none() | st.floats(1e-7, 0.1)
AMOUNTS = st.none() | st.floats(0, 1e13)


@st.composite
def rows(draw: st.DrawFn, formats: Sequence[str]) -> list[WorkRow]:
    found = []
    for flop in draw(st.lists(AMOUNTS, min_size=1, max_size=12)):
        about = draw(st.tuples(KINDS, OPERATIONS, st.sampled_from(formats), st.integers(0, 5000)))
        moved = None if flop is None else draw(st.floats(0, 1e11))
        found.append(WorkRow(*about, flop, moved, draw(TIMES)))
    return found


@st.composite
def steps(
    draw: st.DrawFn, formats: Sequence[str] = ("float32", "float16", "float32→float16")
) -> StepWork:
    largest_batch = draw(st.floats(1e-4, 1.0))
    share = st.floats(0, 1)
    busy = largest_batch * draw(share)
    gaps = largest_batch - busy
    waits = draw(share) * gaps
    profile = Profile(largest_batch, busy, waits, (gaps - waits) * draw(share))
    device = draw(st.sampled_from(["cpu", "cuda"]))
    rates = draw(st.sampled_from([RATES, CPU_RATES, Rates()]))
    return StepWork(draw(st.floats(1e-4, 1.0)), draw(rows(formats)), rates, device, profile=profile)


@given(steps())
def test_parts_add_up_to_the_step(step: StepWork) -> None:
    breakdown = divided(step)
    assert sum(breakdown.parts.values()) + breakdown.left_over_s == pytest.approx(step.step_s)
    assert all(time_s >= 0 for time_s in breakdown.parts.values())
    known = sum(breakdown.bounds.values()) * step.step_s
    assert known <= sum(breakdown.parts.values()) * (1 + 1e-9)


@given(
    steps(),
    steps(),
    st.sampled_from(["fp32", "tf32", "fp16", "bf16-amp", "fp8"]),
)
def test_changes_add_up_to_the_difference_and_reasons_to_the_steps(
    before: StepWork, after: StepWork, precision: str
) -> None:
    a, b = make_side("fp32", before), make_side(precision, after, sm_clock_mhz=1000.0)
    a = replace(a, sm_clock_mhz=2000.0)
    found = explain(a, b, 128, Ratio(1.0))
    difference = after.step_s - before.step_s
    largest = before.step_s + after.step_s
    assert sum(c.change_s for c in found.changes) == pytest.approx(difference, abs=1e-6 * largest)
    assert found.changes[-1].name == LEFT_OVER
    for step, side, left in zip(
        (before, after), ("before_s", "after_s"), found.unexplained_s, strict=True
    ):
        explained = sum(getattr(reason, side) for reason in found.reasons)
        assert explained + left == pytest.approx(step.step_s, abs=1e-6 * largest)
    assert all(describe(found))
