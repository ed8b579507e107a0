"""Traces of a profiler, made by hand, and the time of each kind of work in them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.profile.kernels import Vocabulary, label_kernel
from bench.profile.timeline import (
    Timeline,
    Trace,
    build_trace,
    divide_overlaps,
    name_region,
    read_trace,
    summarize,
)
from bench.schema.work import STEPS_REGION, Label, WorkKind
from bench.training.counting import read_vocabulary

MAIN, BACKWARD = 1, 2
US = 1e-6


@pytest.fixture(scope="module")
def words() -> Vocabulary:
    return read_vocabulary()


class Recorder:
    """Writes the events of a trace as Kineto does: times in µs, an operator's id on its kernels."""

    def __init__(self, end: float | None = None) -> None:
        """Of steps that end at this moment; of none without one."""
        self.events: list[dict[str, Any]] = []
        self._ids = 0
        if end is not None:
            self.region(STEPS_REGION, 0, end)

    def _add(self, cat: str, name: str, start: float, end: float, tid: int, **args: Any) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid}
        self.events.append({**event, "ts": start, "dur": end - start, "args": args})

    def region(self, name: str, start: float, end: float, tid: int = MAIN) -> None:
        self._add("user_annotation", name, start, end, tid)

    def part(self, part: WorkKind | None, start: float, end: float) -> None:
        self.region(name_region(part), start, end)

    def operator(
        self,
        name: str,
        start: float,
        end: float,
        *,
        shapes: Sequence[Any] = (),
        types: Sequence[str] = ("float",),
        strides: Sequence[Any] = (),
        inputs: Sequence[str] = (),
        tid: int = MAIN,
    ) -> int:
        self._ids += 1
        known = {"Input Dims": shapes, "Input type": types, "Input Strides": strides}
        known |= {"Concrete Inputs": inputs, "External id": self._ids}
        self._add("cpu_op", name, start, end, tid, **known)
        return self._ids

    def call(self, name: str, start: float, end: float, correlation: int = 0) -> None:
        self._add("cuda_runtime", name, start, end, MAIN, correlation=correlation)

    def kernel(
        self,
        name: str,
        start: float,
        end: float,
        operator: int = 0,
        *,
        stream: int = 7,
        cat: str = "kernel",
        correlation: int = 0,
    ) -> None:
        known = {"External id": operator, "correlation": correlation, "stream": stream}
        self._add(cat, name, start, end, stream, **known)

    def read(self, words: Vocabulary, steps: int = 1, device: str = "cuda") -> Timeline:
        return summarize(build_trace(self.events), steps, words, device)


def seconds(line: Timeline) -> dict[WorkKind, float]:
    """µs of each kind."""
    kinds: dict[WorkKind, float] = {}
    for label, timed in line.work.items():
        kinds[label.kind] = kinds.get(label.kind, 0) + round(timed.time_s / US, 3)
    return kinds


def us(value: float) -> float:
    return round(value / US, 3)


CONVOLUTION: dict[str, Any] = {
    "shapes": [[2, 64, 8, 8], [32, 2, 3, 3], []],
    "types": ["c10::Half", "c10::Half", ""],
    "inputs": ["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "32"],
}


def test_a_kernel_is_of_the_operation_that_launched_it(words: Vocabulary) -> None:
    """The outermost that is no wrapper: the one that a count sees too."""
    trace = Recorder(100)
    trace.operator("aten::conv2d", 1, 20, **CONVOLUTION)
    trace.operator("aten::convolution", 2, 19, **CONVOLUTION)
    inner = trace.operator("aten::cudnn_convolution", 3, 18)
    trace.kernel("sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc", 30, 70, inner)
    trace.kernel("void cudnn::ops::nchwToNhwcKernel<__half>", 20, 30, inner)
    line = trace.read(words)
    (label,) = line.work
    assert label == Label(WorkKind.GROUPED, "3×3, 32 groups of 2→1", "float16")
    assert (line.work[label].calls, us(line.work[label].time_s)) == (1, 50)
    assert us(line.busy_s) == 50


def test_each_instant_belongs_in_equal_parts_to_the_kernels_that_run_in_it(
    words: Vocabulary,
) -> None:
    """Grouped convolutions on two streams, and a normalisation that runs by itself."""
    trace = Recorder(200)
    grouped = trace.operator("aten::convolution", 1, 9, **CONVOLUTION)
    trace.kernel("wgrad2d_grouped_direct_kernel", 10, 50, grouped, stream=7)
    trace.kernel("wgrad2d_grouped_direct_kernel", 20, 60, grouped, stream=8)
    normalised = trace.operator("aten::cudnn_batch_norm", 60, 62)
    trace.kernel("void cudnn::bn_fw_tr_1C11_singleread_spec<float>(int)", 70, 90, normalised)
    summed = trace.operator("aten::add", 85, 86)
    trace.kernel("elementwise", 85, 95, summed, stream=8)
    line = trace.read(words)
    found = {label.kind: (us(one.time_s), us(one.exclusive_s)) for label, one in line.work.items()}
    assert found == {
        WorkKind.GROUPED: (80, 50),
        WorkKind.NORMALISATION: (20, 15 + 2.5),
        WorkKind.ELEMENTWISE: (10, 2.5 + 5),
    }
    assert us(line.busy_s) == 50 + 25


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=30))
def test_the_shares_of_overlapping_spans_add_up_to_their_union(drawn: list[Any]) -> None:
    """In exact arithmetic, and each is that of a count instant by instant."""
    spans: Any = [(Fraction(start, 7), Fraction(start + length, 7)) for start, length in drawn]
    shares: list[Any] = divide_overlaps(spans)
    edges = sorted({moment for span in spans for moment in span})
    instants = [
        (a, b, sum(start <= a and b <= end for start, end in spans)) for a, b in pairwise(edges)
    ]
    assert sum(shares) == sum(b - a for a, b, running in instants if running)
    assert shares == [
        sum((b - a) / running for a, b, running in instants if start <= a and b <= end)
        for start, end in spans
    ]


def test_gaps_are_told_apart(words: Vocabulary) -> None:
    """For want of a batch, after the program had waited for the GPU, and neither."""
    trace = Recorder(1000)
    add = trace.operator("aten::add", 1, 2)
    trace.kernel("k", 0, 100, add)
    trace.part(WorkKind.INPUT, 90, 300)  # of which the GPU waits for 200
    trace.kernel("k", 310, 400, add)  # 10 more until the first launch
    trace.operator("aten::item", 320, 420)
    trace.call("cudaStreamSynchronize", 330, 405)  # returns after the kernel's end
    trace.kernel("k", 450, 500, add)  # 50 after the wait
    trace.kernel("k", 520, 1000, add)  # 20 more to launch
    line = trace.read(words)
    assert us(line.busy_s) == 100 + 90 + 50 + 480
    assert us(line.input_wait_s) == 200
    assert us(line.sync_wait_s) == 50
    assert us(line.step_s - line.busy_s - line.input_wait_s - line.sync_wait_s) == 30


def test_gaps_between_kernels_that_were_launched_before_a_wait_are_none_of_its(
    words: Vocabulary,
) -> None:
    """The host launches all of a step, then waits for it: only what follows is for the wait."""
    trace = Recorder(200)
    add = trace.operator("aten::add", 1, 2)
    for start in (10, 40, 70):
        trace.kernel("k", start, start + 20, add)
    trace.call("cudaStreamSynchronize", 15, 95)
    trace.kernel("k", 110, 200, add)
    line = trace.read(words)
    assert us(line.sync_wait_s) == 20  # from 90 to 110, not 30 to 40 and 60 to 70
    assert us(line.step_s - line.busy_s) == 10 + 10 + 10 + 20


def test_steps_are_averaged_and_what_runs_on_counts(words: Vocabulary) -> None:
    """The host is ahead: the last kernels end after it has left the last step."""
    trace = Recorder(40)
    for start in (10, 60):
        trace.kernel("k", start, start + 40, trace.operator("aten::relu", start - 9, start - 8))
    line = trace.read(words, steps=2)
    assert (us(line.step_s), us(line.busy_s)) == (50, 40)
    (timed,) = line.work.values()
    assert (timed.calls, us(timed.time_s)) == (1, 40)


def test_parts_of_the_step_hold_on_every_thread(words: Vocabulary) -> None:
    """The backward pass has a thread of its own; where it is in the step, its time tells."""
    trace = Recorder(1000)
    trace.part(WorkKind.LOSS, 0, 100)
    trace.part(None, 10, 60)
    trace.part(WorkKind.OPTIMIZER, 500, 600)
    trace.part(WorkKind.LOSS_SCALING, 520, 530)
    places = {WorkKind.LOSS: 70, WorkKind.OPTIMIZER: 510, WorkKind.LOSS_SCALING: 522}
    for at, tid in [(20, MAIN), *((at, MAIN) for at in places.values()), (300, BACKWARD)]:
        mul = trace.operator("aten::mul", at, at + 2, tid=tid)
        trace.kernel("k", at + 5, at + 6, mul)
    assert seconds(trace.read(words)) == {WorkKind.ELEMENTWISE: 2, **dict.fromkeys(places, 1)}


def test_a_copy_is_what_it_does(words: Vocabulary) -> None:
    trace = Recorder(1000)
    plain, last = [[2, 3, 4, 4]] * 2, [[48, 16, 4, 1], [48, 1, 12, 3]]

    def copy(name: str, at: int, types: list[str], strides: list[list[int]]) -> None:
        trace.operator("aten::to", at, at + 9)
        trace.operator(name, at + 1, at + 8, types=types[1:])
        inner = trace.operator(
            "aten::copy_", at + 2, at + 7, types=types, shapes=plain, strides=strides
        )
        trace.kernel("elementwise", at + 10, at + 20, inner)

    copy("aten::_to_copy", 0, ["c10::BFloat16", "float"], [last[0], last[0]])
    copy("aten::_to_copy", 100, ["float", "float"], last)
    copy("aten::clone", 200, ["float", "float"], [last[0], last[0]])
    trace.kernel("Memcpy HtoD (Pageable -> Device)", 300, 310, cat="gpu_memcpy")
    trace.kernel("Memset (Device)", 320, 321, cat="gpu_memset")
    assert list(trace.read(words).work) == [
        Label(WorkKind.CAST, "_to_copy", "float32→bfloat16"),
        Label(WorkKind.LAYOUT, "_to_copy", "float32"),
        Label(WorkKind.COPY, "clone", "float32"),
        Label(WorkKind.COPY, "Memcpy HtoD"),
        Label(WorkKind.COPY, "Memset"),
    ]


@pytest.mark.parametrize(
    ("name", "kind", "operation"),
    [
        ("triton_poi_fused_add_relu_3", WorkKind.ELEMENTWISE, "add + relu"),
        (
            "triton_red_fused__native_batch_norm_legit_functional_add_relu_12",
            WorkKind.NORMALISATION,
            "_native_batch_norm_legit + add + relu",
        ),
        ("graph_0_cpp_fused__to_copy_0", WorkKind.CAST, "_to_copy"),
        ("triton_poi_fused_nobody_knows_1", WorkKind.OTHER, "nobody_knows_1"),
    ],
)
def test_a_fused_kernel_is_of_the_operations_in_its_name(
    name: str, kind: WorkKind, operation: str, words: Vocabulary
) -> None:
    assert label_kernel(name, words) == Label(kind, operation)


def test_operators_of_a_cpu_take_what_they_call_with_them(words: Vocabulary) -> None:
    trace = Recorder(100)
    trace.part(WorkKind.INPUT, 0, 30)  # 10 of work, 20 asleep
    trace.operator("aten::mul", 5, 15)
    trace.operator("aten::linear", 30, 60)
    trace.operator("aten::t", 31, 33)
    trace.operator("aten::addmm", 36, 60)  # ends as the next begins, in floats too
    trace.operator("aten::copy_", 40, 44)
    trace.operator("autograd::engine::evaluate_function: CatBackward0", 60, 90)
    trace.operator("CatBackward0", 61, 89)
    trace.operator("aten::slice_backward", 62, 80)
    trace.operator("aten::zeros", 63, 70)
    trace.operator("aten::slice", 81, 85)
    trace.operator("aten::sum", 20, 90, tid=BACKWARD)  # a loader's thread
    line = trace.read(words, device="cpu")
    assert seconds(line) == {WorkKind.INPUT: 10, WorkKind.MATMUL: 24, WorkKind.CONCATENATION: 18}
    assert all(one.exclusive_s == one.time_s for one in line.work.values())
    assert not any(one.kernels for one in line.work.values())
    assert (us(line.step_s), us(line.busy_s), us(line.input_wait_s)) == (100, 52, 20)


def test_time_in_fused_code_is_not_taken_for_idle(words: Vocabulary) -> None:
    trace = Recorder(100)
    trace.region("## Call CompiledFxGraph fs3mlsg ##", 0, 90)
    trace.operator("aten::addmm", 10, 20)
    with pytest.raises(ValueError, match="TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE=1 is set"):
        trace.read(words, device="cpu")
    trace.operator("graph_0_cpp_fused_native_layer_norm_relu_0", 30, 80)
    line = trace.read(words, device="cpu")
    assert seconds(line) == {WorkKind.MATMUL: 10, WorkKind.NORMALISATION: 50}


def test_an_exchange_takes_the_time_in_which_nothing_is_computed(words: Vocabulary) -> None:
    on_a_cpu, on_a_gpu = Recorder(100), Recorder(100)
    on_a_cpu.operator("aten::mm", 0, 30)
    on_a_cpu.operator("c10d::allreduce_", 30, 34)
    for start, end, other in ((31, 60, 3), (33, 70, 4), (95, 130, 3)):  # the next step's begins
        on_a_cpu.region("gloo:all_reduce", start, end, tid=other)
    on_a_cpu.operator("aten::mm", 40, 50)
    line = on_a_cpu.read(words, device="cpu")
    assert seconds(line) == {WorkKind.MATMUL: 40, WorkKind.EXCHANGE: 4 + 6 + 10 + 10 + 5}
    assert {one.operation for one in line.work if one.kind is WorkKind.EXCHANGE} == {"all_reduce"}
    assert (us(line.exchange_s), us(line.busy_s)) == (35, 75)
    on_a_gpu.kernel("sm90_gemm", 0, 50)
    for start, end, stream in ((30, 70, 8), (60, 80, 9)):
        on_a_gpu.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", start, end, stream=stream)
    line = on_a_gpu.read(words)
    assert (us(line.exchange_s), us(line.busy_s)) == (30, 80)
    assert seconds(line)[WorkKind.EXCHANGE] == 60


def test_parts_that_torch_marks_are_those_of_any_training(words: Vocabulary) -> None:
    trace = Recorder(100)
    trace.region("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 30)
    trace.operator("aten::mul", 5, 15)
    trace.operator("aten::mul", 40, 50)
    trace.region("Optimizer.step#SGD.step", 60, 90)
    trace.operator("aten::mul", 65, 75)
    trace.region("own", 60, 100)  # a region of the script
    line = trace.read(words, device="cpu")
    parts = (WorkKind.INPUT, WorkKind.ELEMENTWISE, WorkKind.OPTIMIZER)
    assert seconds(line) == dict.fromkeys(parts, 10)
    assert us(line.input_wait_s) == 20


def test_a_region_without_a_duration_is_open_if_it_is_the_last(words: Vocabulary) -> None:
    trace = Recorder(100)  # as torch 2.1 writes it
    trace.region("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 0)
    trace.operator("aten::mul", 5, 15)
    trace.region("Optimizer.step#SGD.step", 60, 60)
    trace.operator("aten::mul", 65, 75)
    parts = (WorkKind.ELEMENTWISE, WorkKind.OPTIMIZER)
    assert seconds(trace.read(words, device="cpu")) == dict.fromkeys(parts, 10)


def test_what_is_no_trace_is_refused(tmp_path: Path, words: Vocabulary) -> None:
    file = tmp_path / "trace.json"
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"trace\.json is no trace"):
        read_trace(file)
    with pytest.raises(ValueError, match="no region"):
        summarize(Trace(), 1, words, "cuda")
    with pytest.raises(ValueError, match="saw no kernel; it needs CUPTI, and the right to use it"):
        Recorder(100).read(words)


H100 = Path(__file__).parents[1] / "recordings" / "h100-dpn-small-fp16.json.gz"


def test_a_recorded_step_of_an_h100_is_told_apart(words: Vocabulary) -> None:
    """dpn-small in fp16 at batch size 64, ten steps, torch 2.11."""
    line = summarize(read_trace(H100), 10, words, "cuda")
    events = json.loads(gzip.decompress(H100.read_bytes()))["traceEvents"]
    (steps,) = [
        e for e in events if e.get("name") == "bench::steps" and e["cat"] == "user_annotation"
    ]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    # all of one stream, so that their times add up
    took = sum(e["dur"] for e in kernels if e["ts"] >= steps["ts"]) / 1e6 / 10
    assert line.busy_s == pytest.approx(took, rel=1e-6)
    assert sum(timed.exclusive_s for timed in line.work.values()) == pytest.approx(took)
    assert sum(sum(t.kernels.values()) for t in line.work.values()) == pytest.approx(took)
    assert line.step_s == pytest.approx(steps["dur"] / 1e6 / 10, rel=0.05)
    kinds = {label.kind for label in line.work}
    assert WorkKind.OTHER not in kinds
    assert {
        WorkKind.GROUPED,
        WorkKind.NORMALISATION,
        WorkKind.OPTIMIZER,
        WorkKind.LOSS_SCALING,
    } < kinds
    # 2019's recipe casts its images, and the loss back to float32
    assert (
        sum(timed.calls for label, timed in line.work.items() if label.kind is WorkKind.CAST) == 3
    )
