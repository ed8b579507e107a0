"""What a device can do now: products in each number format, a copy, the start of an operation.

`python -m bench.training.yardstick cuda 1` measures each for about a second and prints JSON: the
columns of `bench.record.Environment`, and why any of them could not be measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from bench.precision import PRECISIONS, Arithmetic, set_flags
from bench.text import first_line
from bench.training.timing import synchronize

LARGEST = 8192
"""Rows of the largest matrix: its product fills every GPU, and takes 1.4 ms of one that does 800
TFLOP/s."""

COPIED_BYTES = {"cuda": 2**30, "cpu": 2**29}
"""The largest copy: several times the caches, of which a GPU has 50 MB and a CPU up to 400."""

_BLOCKS = 16  # readings; of the last half the median is taken, once clocks have settled


@dataclass(frozen=True)
class Task:
    """Something to do again and again; ``amount`` is what once does: FLOP, bytes or operations."""

    action: Callable[[], object]
    amount: float


def measure(device: torch.device, seconds: float) -> tuple[dict[str, float], dict[str, str]]:
    """Measure all that the device has, an arithmetic that it only emulates too.

    Args:
        device: that nothing else uses.
        seconds: that each may take; one that takes longer is done a few times all the same.

    Returns:
        Columns of a record, and why any of them has no value.
    """
    rates: dict[str, float] = {}
    reasons: dict[str, str] = {}
    tasks: dict[str, Callable[[], float]] = {
        f"rate_{arithmetic}": partial(_measure_product, arithmetic, device, seconds)
        for arithmetic in list_arithmetics(device)
    }
    tasks["rate_copy"] = lambda: _find_rate(make_copy(device), device, seconds)
    tasks["call_time_s"] = lambda: 1 / _find_rate(make_call(device), device, seconds)
    for column, find in tasks.items():
        try:
            rates[column] = find()
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            reasons[column] = first_line(error)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rates, reasons


def list_arithmetics(device: torch.device) -> list[Arithmetic]:
    """The number formats whose products the device computes, emulated ones too."""
    formats = [Arithmetic.FLOAT32, Arithmetic.FLOAT16, Arithmetic.BFLOAT16]
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        for name in ("tf32", "fp8"):
            if capability >= PRECISIONS[name].min_capability:
                formats.append(PRECISIONS[name].arithmetic)
    return formats


def make_product(arithmetic: Arithmetic, device: torch.device, size: int) -> Task:
    """A product of two square matrices of ``size`` rows."""
    set_flags(PRECISIONS["tf32" if arithmetic is Arithmetic.TFLOAT32 else "fp32"])
    half = {Arithmetic.FLOAT16: torch.float16, Arithmetic.BFLOAT16: torch.bfloat16}
    dtype = half.get(arithmetic, torch.float32)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    if arithmetic is not Arithmetic.FLOAT8:
        out = torch.empty_like(a)
        return Task(lambda: torch.mm(a, b, out=out), 2.0 * size**3)
    one = torch.ones((), device=device)
    a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()  # it takes b by columns
    # as torchao's tensorwise recipe has it for the forward pass and the gradients of inputs
    return Task(
        lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True),
        2.0 * size**3,
    )


def make_copy(device: torch.device) -> Task:
    """A copy that no cache holds, of at most a sixteenth of the free memory."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_bytes()
    size = min(COPIED_BYTES[device.type], free // 16)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return Task(lambda: target.copy_(source), 2.0 * source.nbytes)


def make_call(device: torch.device) -> Task:
    """The smallest operation: on one number, which a GPU computes while the next is launched."""
    number = torch.ones((), device=device)
    return Task(number.neg_, 1.0)


def _measure_product(arithmetic: Arithmetic, device: torch.device, seconds: float) -> float:
    """FLOP/s of the largest product that leaves time for some repetitions."""
    size = 1024 if device.type == "cuda" else 128
    task = make_product(arithmetic, device, size)
    # a product of twice the rows takes eight times as long: at most ``seconds``
    while size < LARGEST and _estimate(task, device) < seconds / 8:
        size *= 2
        try:
            task = make_product(arithmetic, device, size)
        except torch.OutOfMemoryError:
            break
    return _find_rate(task, device, seconds)


def _find_rate(task: Task, device: torch.device, seconds: float) -> float:
    """How much of its amount a second: the median of the last half of what ``seconds`` allow."""
    repeats = max(1, int(seconds / _BLOCKS / _estimate(task, device)))
    end = time.perf_counter() + seconds
    readings = [_time(task, device, repeats)]
    while time.perf_counter() < end:
        readings.append(_time(task, device, repeats))
    return task.amount / median(readings[len(readings) // 2 :])


def _estimate(task: Task, device: torch.device) -> float:
    """The least of three times, in s: on a busy machine one of them was 300 times the others."""
    task.action()  # the first chooses an algorithm and takes memory
    return min(_time(task, device, 1) for _ in range(3))


def _time(task: Task, device: torch.device, repeats: int) -> float:
    """Seconds of doing it once, of several one after the other."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        task.action()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def _free_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _main(arguments: Sequence[str]) -> None:
    name, seconds = arguments
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library may print
    rates, reasons = measure(torch.device(name), float(seconds))
    print(json.dumps({"rates": rates, "reasons": reasons}), file=answers, flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
