"""Remedies for a cause, with the speed-up measured in the same sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from bench.axis import Value
from bench.case import AXES, Case, axis_flag, format_value
from bench.diagnosis.explanation import Advice, Alternatives, Cause
from bench.grid import go_together


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
                Advice(_write_flag(option.axis, value), speedup)
                for value, speedup in measured.items()
                if option.better(old, value)
            ]
            if not tried and any(
                speedup > 1 and option.better(value, old) for value, speedup in measured.items()
            ):
                continue  # what was measured says the contrary
            best = max(tried, key=lambda one: one.speedup or 0.0, default=None)
            yield best or Advice(option.flag)


_VALUES: tuple[Value, ...] = (True, False, None, "default", "device", "fp32", "fp16")
"""Values that an option may prefer."""


def _write_flag(axis: str, value: Value) -> str:
    return f"{axis_flag(axis)} {format_value(value) or 'none'}"
