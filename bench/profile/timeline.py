"""Analysis of where the time of training steps goes, from a trace exported by torch.profiler.

On a GPU, the time of an operation is that of the kernels it launched, and waiting is time in which
no kernel runs. Where kernels overlap, each instant is divided equally among those that run: besides
its plain time an operation has this exclusive time, and exclusive times add up to the time in which
any kernel ran. On a CPU, the time of an operation includes everything it called; the operators of
one thread run one after another, so both times are equal. Kernel durations are reliable under the
profiler; the host time between them is stretched.
"""

from __future__ import annotations

import gzip
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.profile.kernels import Vocabulary, is_fused, label_fused, label_kernel, shorten_kernel
from bench.schema.work import (
    ANY_CONVOLUTION,
    MOVES,
    NETWORK_REGION,
    STEPS_REGION,
    Label,
    WorkKind,
    base_name,
    find_part,
    label_convolution,
    place_kind,
    read_groups,
)

_MARK = "bench::"

_INDUCTORS = "## Call CompiledFxGraph "
"""How the name of a region begins that runs code of torch.compile's Inductor."""

_EXCHANGES = ("gloo:", "mpi:")
"""How the names of regions begin in which a thread of torch's exchanges between processes."""

_FUNCTIONS = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
"""The functions of torch.distributed, as which those threads name them, by their operators."""

_WAITS = frozenset(
    f"cuda{name}"
    for name in ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize", "Memcpy")
) | {"cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize"}
"""Calls that return to the host once the GPU has finished its queued work."""


def name_region(part: WorkKind | None) -> str:
    """Return the name of a part's region in a trace; of the network's region for None."""
    return f"{_MARK}{part}" if part else NETWORK_REGION


@dataclass(eq=False)
class TraceEvent:
    """One event of a trace: times in s, the thread that it ran on, and its arguments."""

    name: str
    start: float
    end: float
    thread: tuple[Any, Any] = (0, 0)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    parent: TraceEvent | None = None
    children: list[TraceEvent] = field(default_factory=list)

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Trace:
    """The events of a trace: operators, GPU kernels, calls of the GPU runtime, and regions."""

    operators: Sequence[TraceEvent] = ()
    kernels: Sequence[TraceEvent] = ()
    calls: Sequence[TraceEvent] = ()
    regions: Sequence[TraceEvent] = ()


@dataclass
class TimedOperations:
    """How often operations of a label ran in a step, and for how many seconds.

    Attributes:
        time_s: total duration of their kernels.
        exclusive_s: the same, with each instant divided among the kernels that run then.
        kernels: ``time_s`` split by kernel, named by `shorten_kernel`; empty on a CPU.
    """

    calls: float = 0.0
    time_s: float = 0.0
    exclusive_s: float = 0.0
    kernels: dict[str, float] = field(default_factory=dict)

    def add(self, other: TimedOperations) -> None:
        self.calls += other.calls
        self.time_s += other.time_s
        self.exclusive_s += other.exclusive_s
        for name, time_s in other.kernels.items():
            self.kernels[name] = self.kernels.get(name, 0.0) + time_s

    def scale(self, factor: float) -> TimedOperations:
        kernels = {name: time_s * factor for name, time_s in self.kernels.items()}
        return TimedOperations(
            self.calls * factor, self.time_s * factor, self.exclusive_s * factor, kernels
        )


@dataclass(frozen=True)
class Timeline:
    """A profiled step, the mean of several: times in s, as in `bench.profile.step.Profile`.
    ``work`` holds the time of each label; exclusive times add up to ``busy_s``. ``exchange_s`` is
    the time in which the process did nothing but exchange with others, or wait for them."""

    steps: int
    step_s: float
    busy_s: float
    input_wait_s: float
    sync_wait_s: float
    work: dict[Label, TimedOperations]
    exchange_s: float = 0.0


def read_trace(file: Path) -> Trace:
    """Read a trace, gzipped or not, and link each operator to its caller. Raises ValueError: the
    file is not a trace of torch.profiler."""
    raw = file.read_bytes()
    content = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw, strict=False)
    try:
        return build_trace(content["traceEvents"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is no trace of torch.profiler") from error


def build_trace(events: Iterable[Mapping[str, Any]]) -> Trace:
    """Sort the events of a trace, given as in its JSON, into a `Trace`."""
    operators, kernels, calls, regions = [list[TraceEvent]() for _ in range(4)]
    places = {
        "cpu_op": operators,
        "user_annotation": regions,
        **dict.fromkeys(("kernel", "gpu_memcpy", "gpu_memset"), kernels),
        **dict.fromkeys(("cuda_runtime", "cuda_driver"), calls),
    }
    for raw in events:
        if raw.get("ph") != "X" or raw.get("cat") not in places:
            continue
        start = float(raw["ts"]) / 1e6
        places[raw["cat"]].append(
            TraceEvent(
                str(raw["name"]),
                start,
                start + float(raw.get("dur", 0)) / 1e6,
                (raw.get("pid"), raw.get("tid")),
                raw.get("args") or {},
            )
        )
    operators.sort(key=lambda e: (e.start, -e.end))
    _link(operators)
    return Trace(operators, kernels, calls, regions)


def _link(operators: Iterable[TraceEvent]) -> None:
    """Link each operator to its caller: the innermost operator around it on its thread."""
    around: dict[tuple[Any, Any], list[TraceEvent]] = {}
    for event in operators:
        stack = around.setdefault(event.thread, [])
        while stack and stack[-1].end <= event.start:
            stack.pop()
        if stack:
            event.parent = stack[-1]
            stack[-1].children.append(event)
        stack.append(event)


def summarize(trace: Trace, steps: int, vocabulary: Vocabulary, device: str) -> Timeline:
    """Return the mean of the ``steps`` in the region `STEPS_REGION` of a trace, whose parts of a
    step are regions named by `name_region`; ``device`` is cuda or cpu. Raises ValueError: the trace
    has no such region, no kernel of a GPU, or nothing of what was compiled for a CPU."""
    window = next((e for e in trace.regions if e.name == STEPS_REGION), None)
    if window is None:
        raise ValueError(f"the trace has no region {STEPS_REGION}")
    view = _View(trace, vocabulary, window)
    found = _read_cpu(view) if device == "cpu" else _read_gpu(view)
    return Timeline(
        steps,
        found.step_s / steps,
        found.busy_s / steps,
        found.input_wait_s / steps,
        found.sync_wait_s / steps,
        {label: timed.scale(1 / steps) for label, timed in found.work.items()},
        found.exchange_s / steps,
    )


class _View:
    def __init__(self, trace: Trace, vocabulary: Vocabulary, window: TraceEvent) -> None:
        self.trace, self.vocabulary, self.window = trace, vocabulary, window
        # the parts of a step run on the training thread
        marked = [
            e
            for e in trace.regions
            if e.name.startswith(_MARK) or find_part(e.name)
            if e is not window and e.thread == window.thread
            if window.start <= e.start < window.end
        ]
        # torch 2.1 gives no duration to the last one where it is still open
        last = max(marked, key=lambda e: e.start, default=window)
        last.end = last.end if last.duration else window.end
        marked = [e for e in marked if e.duration]
        inputs = [(e.start, e.end) for e in marked if _read_part(e.name) is WorkKind.INPUT]
        self.inputs = _unite(inputs)
        self._changes, self._parts = _lay_out(marked)

    def label(self, event: TraceEvent) -> Label:
        if is_fused(event.name):
            found = label_fused(event.name, self.vocabulary)
        else:
            found = label_operator(event, self.vocabulary)
        return self.place(found, event.start)

    def place(self, label: Label, moment: float) -> Label:
        """Return ``label`` with the kind of the part of the step that it ran in at ``moment``. Only
        the time decides, so that this holds for the backward pass too."""
        at = bisect_right(self._changes, moment)
        return replace(label, kind=place_kind(label.kind, self._parts[at - 1] if at else None))

    def works(self, event: TraceEvent) -> bool:
        """Return whether an operator does work itself, unlike wrappers, autograd nodes and
        regions."""
        if is_fused(event.name):
            return True
        space, colons, _ = event.name.partition("::")
        if not colons or space in ("autograd", "torch", "profiler", "bench") or " " in event.name:
            return False
        return not self.vocabulary.wraps(event.name)

    def find_owner(self, event: TraceEvent | None) -> TraceEvent | None:
        """Return the outermost operator that does work around ``event``, itself included."""
        owner = None
        while event is not None:
            if self.works(event):
                owner = event
            event = event.parent
        return owner


def _read_cpu(view: _View) -> Timeline:
    """Read the operators of the training thread, each with the time of all it called."""
    window = view.window
    compiled = any(e.name.startswith(_INDUCTORS) for e in view.trace.regions)
    if compiled and not any(is_fused(e.name) for e in view.trace.operators):
        # its time would be taken for that between operations
        raise ValueError(
            "what torch.compile has fused is in no profile of a CPU, unless "
            "TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE=1 is set"
        )
    work: dict[Label, TimedOperations] = {}
    spans = []
    for event in view.trace.operators:
        inside = window.start <= event.start < window.end and event.thread == window.thread
        if not inside or view.find_owner(event) is not event:
            continue
        if view.vocabulary.free(base_name(event.name)):
            continue  # its time is overhead of the program, not of moving an element
        label = view.label(event)
        timed = TimedOperations(1, event.duration, event.duration)
        work.setdefault(label, TimedOperations()).add(timed)
        spans.append((event.start, event.end))
    waiting = _length(view.inputs) - _overlap(view.inputs, spans)
    _add_exchanges(view, spans, work)
    busy = sum(timed.time_s for timed in work.values())
    exchange = sum(work[label].time_s for label in work if label.kind is WorkKind.EXCHANGE)
    return Timeline(1, window.duration, busy, waiting, 0.0, work, exchange)


def _add_exchanges(view: _View, spans: list[Span], work: dict[Label, TimedOperations]) -> None:
    """Add the time in which other threads exchange with other processes, and no operator runs."""
    for event in view.trace.regions:
        if not event.name.startswith(_EXCHANGES):
            continue
        span = max(event.start, view.window.start), min(event.end, view.window.end)
        if span[0] < span[1]:
            alone_s = span[1] - span[0] - _overlap([span], _unite(spans))
            label = Label(WorkKind.EXCHANGE, event.name.partition(":")[2])
            work.setdefault(label, TimedOperations()).add(TimedOperations(1, alone_s, alone_s))
            spans.append(span)


def _read_gpu(view: _View) -> Timeline:
    """Assign each kernel to the operator that launched it, and classify the gaps between them."""
    trace, window = view.trace, view.window
    kernels = [e for e in trace.kernels if e.start >= window.start]
    if not kernels:
        raise ValueError("the profiler saw no kernel; it needs CUPTI, and the right to use it")
    operators = {e.arguments.get("External id"): e for e in trace.operators}
    launches = {e.arguments.get("correlation"): e for e in trace.calls}
    work: dict[Label, TimedOperations] = {}
    owners: dict[Label, set[int]] = {}
    spans = [(e.start, e.end) for e in kernels]
    for kernel, exclusive_s in zip(kernels, divide_overlaps(spans), strict=True):
        launch = launches.get(kernel.arguments.get("correlation"))
        owner = view.find_owner(operators.get(kernel.arguments.get("External id")))
        if owner is not None and not is_fused(kernel.name):
            label = view.label(owner)
            owners.setdefault(label, set()).add(id(owner))
        else:
            named = label_kernel(kernel.name, view.vocabulary)
            label = view.place(named, launch.start) if launch else named
        took = kernel.duration
        timed = TimedOperations(1, took, exclusive_s, {shorten_kernel(kernel.name): took})
        work.setdefault(label, TimedOperations()).add(timed)
    for label, called in owners.items():
        work[label].calls = len(called)  # an operation may take several kernels
    busy = _unite(spans)
    end = max(window.end, busy[-1][1])
    gaps = _complement(busy, window.start, end)
    waits = sorted((e.end, e.start) for e in trace.calls if e.name in _WAITS)
    wanting = _overlap(gaps, view.inputs)
    drained = [gap for gap in gaps if _ends_within(waits, gap)]
    waiting = _length(drained) - _overlap(drained, view.inputs)
    theirs, ours = (
        _unite(
            span
            for span, kernel in zip(spans, kernels, strict=True)
            if ("nccl" in kernel.name) is exchanges
        )
        for exchanges in (True, False)
    )
    exchange = _length(theirs) - _overlap(theirs, ours)
    return Timeline(1, end - window.start, _length(busy), wanting, waiting, work, exchange)


def _ends_within(waits: Sequence[tuple[float, float]], gap: Span) -> bool:
    """Return whether the host waited until nothing ran, so that the GPU waits for its next launch.
    ``waits`` are sorted pairs of end and start.

    A gap that ends before the wait does was not caused by it: the work that followed was queued.
    """
    first = bisect_left(waits, (gap[0], -math.inf))
    last = bisect_right(waits, (gap[1], math.inf))
    return any(start < gap[0] for _, start in waits[first:last])


# number formats by their names in a trace: dtypes of tensors, and of scalar arguments
_FORMATS = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e5m2": "float8_e5m2",
    "long int": "int64",
    "long": "int64",
    "long long": "int64",
    "int": "int32",
    "short": "int16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "bool": "bool",
}


def label_operator(event: TraceEvent, vocabulary: Vocabulary) -> Label:
    """Return an operator's label by name, shapes and formats; no format for lists of tensors."""
    name, known = base_name(event.name), event.arguments
    formats = _read_formats(event)
    first = next(iter([f for f in formats if "float" in f] or formats), "")
    if name in ANY_CONVOLUTION:
        shapes = known.get("Input Dims") or []
        at = 2 if name.endswith("backward") else 1
        if len(shapes) > at and len(shapes[at]) > 2:
            groups = read_groups(name, known.get("Concrete Inputs") or [])
            return label_convolution(shapes[at], groups, first)
    if name in MOVES:
        return _label_move(event, name, first)
    return Label(vocabulary.kind(name), _FUNCTIONS.get(name, name), first)


def _read_formats(event: TraceEvent) -> list[str]:
    types = event.arguments.get("Input type") or []
    return [_FORMATS[t] for t in types if t in _FORMATS]


def _label_move(event: TraceEvent, name: str, format: str) -> Label:
    """Return whether a copy casts, changes the layout or does neither, by the copies it makes."""
    for copy in (e for e in _walk(event) if base_name(e.name) == "copy"):
        to, source = [*_read_formats(copy), "", ""][:2]
        if to and source and to != source:
            return Label(WorkKind.CAST, name, f"{source}→{to}")
        shapes, strides = (copy.arguments.get(f"Input {key}") or [] for key in ("Dims", "Strides"))
        if len(strides) > 1 and strides[0] != strides[1] and math.prod(shapes[0]) > 1:
            return Label(WorkKind.LAYOUT, name, format)
    return Label(WorkKind.COPY, name, format)


def _walk(event: TraceEvent) -> Iterator[TraceEvent]:
    yield event
    for child in event.children:
        yield from _walk(child)


Span = tuple[float, float]


def divide_overlaps(spans: Sequence[Span]) -> list[float]:
    """Return the exclusive length of each span: an instant in several spans is divided equally.

    The shares add up to the length of the union. A clock that runs at rate 1/k while k spans are
    open advances by a span's share from its start to its end, so this takes O(n log n) time.

    >>> divide_overlaps([(0.0, 3.0), (1.0, 2.0)])
    [2.5, 0.5]
    """
    edges = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    clock: dict[float, float] = {}
    now: float = 0
    before: float = 0
    running = 0
    for moment, change in edges:
        if running > 0:
            now += (moment - before) / running
        clock[moment] = now
        before, running = moment, running + change
    return [clock[end] - clock[start] for start, end in spans]


def _unite(spans: Iterable[Span]) -> list[Span]:
    """Return the spans in order, with overlapping ones merged."""
    united: list[Span] = []
    for start, end in sorted(spans):
        if united and start <= united[-1][1]:
            united[-1] = (united[-1][0], max(end, united[-1][1]))
        else:
            united.append((start, end))
    return united


def _complement(spans: Sequence[Span], start: float, end: float) -> list[Span]:
    """Return the gaps that merged spans leave between ``start`` and ``end``."""
    edges = [start, *(t for span in spans for t in span), end]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [(a, b) for a, b in pairs if b > a]


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def _overlap(a: Sequence[Span], b: Sequence[Span]) -> float:
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return total


def _lay_out(regions: Iterable[TraceEvent]) -> tuple[list[float], list[WorkKind | None]]:
    """Return the moments at which the innermost region changes, and the part from each on."""
    edges = sorted(
        [(e.start, 1, -e.end, e) for e in regions] + [(e.end, 0, -e.start, e) for e in regions],
        key=lambda edge: edge[:3],
    )
    open_: list[TraceEvent] = []
    moments: list[float] = []
    parts: list[WorkKind | None] = []
    for moment, begins, _, event in edges:
        if begins:
            open_.append(event)
        else:
            open_.remove(event)
        moments.append(moment)
        parts.append(_read_part(open_[-1].name) if open_ else None)
    return moments, parts


def _read_part(region: str) -> WorkKind | None:
    """Return the part of a step that a region is of; None for the network."""
    if region == NETWORK_REGION:
        return None
    return find_part(region) or WorkKind(region.removeprefix(_MARK))
