"""Remedies for a cause, with the speed-up measured in the same sweep, or in a reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from bench.axis import Trait, Value
from bench.case import AXES, Case, axis_flag, format_value, list_affecting
from bench.diagnosis.explanation import Advice, Alternatives, Cause
from bench.grid import go_together
from bench.precision import PRECISIONS


@dataclass(frozen=True)
class Option:
    """A change of one axis that may remedy a cause."""

    axis: str  # the axis that it changes
    flag: str  # as advice shows it
    better: Callable[[Value, Value], bool]  # whether the second value may remedy the first


def _turn(to: bool) -> Callable[[Value, Value], bool]:
    return lambda old, new: new is to and old is not to


def _is_more(old: Value, new: Value) -> bool:
    return isinstance(old, int) and isinstance(new, int) and new > old


LARGER = Option("batch_size", "a larger --batch-size", _is_more)
SMALLER = Option("batch_size", "a smaller --batch-size", lambda old, new: _is_more(new, old))
COMPILE = Option("compile", "--compile default", lambda old, new: old == Case.compile != new)
GRAPHS = Option("cuda_graphs", "--cuda-graphs on", _turn(True))
TUNED = Option("cudnn_benchmark", "--cudnn-benchmark on", _turn(True))
NHWC, NCHW = (
    Option("channels_last", f"--channels-last {'on' if to else 'off'}", _turn(to))
    for to in (True, False)
)
ON_DEVICE = Option("loader", "--loader device", lambda old, new: new == "device" != old)
WORKERS = Option("workers", "more --workers", _is_more)
NO_LIMIT = Option("memory_limit", "no --memory-limit", lambda old, new: new is None is not old)
FP32 = Option("precision", "--precision fp32", lambda old, new: new == "fp32" != old)
HALF = Option("precision", "--precision fp16", lambda old, new: (old, new) == ("fp16-amp", "fp16"))

CURES: dict[Cause, tuple[Option | str, ...]] = {
    Cause.MEMORY: (COMPILE,),  # fused operations move less
    Cause.BELOW_COPY: (),
    Cause.ARITHMETIC: (),
    Cause.PRODUCTS: (LARGER, TUNED),
    Cause.NO_TENSOR_CORES: (NHWC,),
    Cause.EMULATED: (FP32,),
    Cause.FLOAT32: (HALF,),
    Cause.ADDED: (COMPILE, HALF),
    Cause.LAYOUT: (NHWC, NCHW),
    Cause.LAUNCH: (LARGER, COMPILE, GRAPHS),
    Cause.SYNCHRONISATION: (
        "reading losses (.item(), .cpu(), print) once an epoch, not each step",
    ),
    Cause.MEMORY_LIMIT: (SMALLER, NO_LIMIT),
    Cause.LOADER: (WORKERS, ON_DEVICE),
    Cause.CLOCKS: (),
}
"""The remedies of every cause: options of this harness, or other advice."""

_ABSENT_AXES: dict[str, Callable[[Case], bool]] = {
    "cudnn_benchmark": lambda case: case.device == "cpu",
    "cuda_graphs": lambda case: not go_together(replace(case, cuda_graphs=True, profile=False)),
}
"""Axes that have no effect in some cases."""


@dataclass(frozen=True)
class Lever:
    """The effect of changing one setting in `REFERENCE`, as the two epoch times in s."""

    axis: str
    before: Value
    after: Value
    precision: str
    batch_size: int
    seconds: tuple[float, float]


REFERENCE = "results/reference/h200-lab.csv"
REFERENCE_GPU, REFERENCE_MODEL = "NVIDIA H200", "dpn92"
LEVERS = (
    Lever("compile", "off", "default", "fp16", 512, (11.0, 6.79)),
    Lever("channels_last", False, True, "fp16-amp", 512, (11.05, 13.98)),
    Lever("channels_last", False, True, "tf32", 512, (18.44, 20.08)),
    Lever("cudnn_benchmark", False, True, "fp16", 512, (11.57, 11.0)),
    Lever("batch_size", 128, 512, "fp16", 512, (20.14, 11.0)),
    Lever("batch_size", 128, 512, "fp32", 512, (41.73, 36.81)),
    Lever("batch_size", 512, 2048, "fp32", 2048, (36.81, 35.65)),
    Lever("batch_size", 128, 2048, "fp32", 2048, (41.73, 35.65)),
)
"""All pairs of successful cases in `REFERENCE` that differ in one setting that an `Option` changes.
All were measured with ``--cudnn-benchmark on``, except for the pair that differs in it."""


def advise(cause: Cause, case: Case, alternatives: Alternatives) -> Iterator[Advice]:
    """Yield remedies for a cause in a case, with the measured speed-ups."""
    for option in CURES[cause]:
        if isinstance(option, str):
            yield Advice(option)
            continue
        old = getattr(case, option.axis)
        absent = _ABSENT_AXES.get(option.axis, lambda _: False)(case)
        # a number can always be larger or smaller
        open_ = type(old) is int or any(option.better(old, value) for value in _VALUES)
        if AXES[option.axis].holds(case) and not absent and open_:
            measured = alternatives.get(option.axis, {})
            tried = [
                Advice(_write_flag(option.axis, value), speedup, "in this sweep")
                for value, speedup in measured.items()
                if option.better(old, value)
            ]
            if not tried and any(
                speedup > 1 and option.better(value, old) for value, speedup in measured.items()
            ):
                continue  # what was measured says the contrary
            best = max(tried, key=lambda one: one.speedup or 0.0, default=None)
            yield best or _find_lever(option, case) or Advice(option.flag)


_VALUES: tuple[Value, ...] = (True, False, None, "default", "device", "fp32", "fp16")
"""Values that an option may prefer."""


def _find_lever(option: Option, case: Case) -> Advice | None:
    """Return what the reference measured for an option, for its case most similar to ``case``."""
    if (case.device, case.model) != ("cuda", REFERENCE_MODEL):
        return None
    others = {*list_affecting(Trait.KERNELS)} - {option.axis}
    old = getattr(case, option.axis)
    alike = [
        lever
        for lever in LEVERS
        if (lever.axis, lever.before) == (option.axis, old) and option.better(old, lever.after)
    ]
    if not alike or any(getattr(case, name) != getattr(Case, name) for name in others):
        return None
    ours = PRECISIONS[case.precision]

    def differ(lever: Lever) -> tuple[bool, bool, int]:
        theirs = PRECISIONS[lever.precision]
        other = theirs.arithmetic is not ours.arithmetic
        return theirs is not ours, other, abs(lever.batch_size - case.batch_size)

    nearest = min(alike, key=differ)
    before, after = nearest.seconds
    flag = _write_flag(nearest.axis, nearest.after)
    against = "against " if option.axis == "batch_size" else ""
    size = nearest.before if against else nearest.batch_size
    about = f"{nearest.precision}, {against}batch size {size}"
    if option.axis != "cudnn_benchmark" and not case.cudnn_benchmark:
        about += ", both with --cudnn-benchmark on"
    return Advice(flag, before / after, f"on an {REFERENCE_GPU} ({REFERENCE})", about)


def _write_flag(axis: str, value: Value) -> str:
    return f"{axis_flag(axis)} {format_value(value) or 'none'}"
