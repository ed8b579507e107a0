"""What a device can do now: products in each number format, a copy, the start of an operation.

`python -m bench.training.yardstick cuda 0.2` spends about so many seconds on each and prints JSON:
the fields of `bench.yardstick.Yardstick`. A third argument, JSON too, has rates by column; what
falls short of one is measured again.

Each rate is the best of several short tries. On an H100 a second of large products drew 723 W at
1365 MHz, where training runs at 1980 MHz, and three such seconds within an hour gave 652, 670 and
636 TFLOP/s. So the tries of all rates take turns, and a GPU rests after each as long as it took.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from psutil import virtual_memory

from bench.gpu.device import Depth, Device, Reading
from bench.gpu.nvml import open_device
from bench.gpu.peaks import list_peaks
from bench.limits import FAR, SLOWED
from bench.precision import PRECISIONS, Arithmetic, set_flags
from bench.processes import leave
from bench.text import first_line
from bench.training.timing import StepClock, find_accelerator, synchronize
from bench.yardstick import Collapse, Tries, Yardstick

PRODUCT_ROWS = {"cuda": (1024, 2048, 4096, 8192), "cpu": (128, 256, 512, 1024, 2048, 4096, 8192)}
"""Rows of square matrices. The largest fill every GPU: their product takes 1.4 ms at 800
TFLOP/s."""

IMAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Batch sizes of a convolution."""

COPIED_BYTES = {"cuda": 2**30, "cpu": 2**28}
"""Maximum size of the copy. It touches twice as much memory: more than the 50 MB cache of a GPU or
the 400 MB of a CPU."""

TRIES = {"cuda": 8, "cpu": 24}
"""Tries per rate, made again if the rate is lower than expected. A busy CPU is given to a program
for about 3 ms at a time, so tries of 12 ms would all share it with other programs."""

FEWEST_TRIES = 3
"""Minimum tries of a task that exceeds its time even once, such as an emulated product."""

COLLAPSED = 0.75
"""If all threads together reach less than this share of the rate of one thread, they wait for each
other. Two threads that share a core's vector units reach about the rate of one."""

FAMILIES = {
    "rate_float32": frozenset(f"rate_{arithmetic}" for arithmetic in Arithmetic),
    "rate_conv_float32": frozenset(f"rate_conv_{arithmetic}" for arithmetic in Arithmetic),
}
"""Columns also measured with a single thread, and the columns that are invalid if it collapses."""


@dataclass(frozen=True)
class Task:
    """An action to repeat; ``amount`` is its work per call: FLOP, bytes or operations."""

    action: Callable[[], object]
    amount: float
    precision: str = "fp32"  # whose flags are set


@dataclass
class Meter:
    """Measures one rate, a column of a record, by tries of about ``try_s`` seconds.

    ``make`` returns the task of a size. The largest of ``sizes`` that fits into a try is used; each
    size takes ``growth`` times as long as the one before. ``alone`` means a single thread. ``card``
    is read during each try.
    """

    column: str
    make: Callable[[int], Task]
    device: torch.device
    try_s: float
    sizes: Sequence[int] = (1,)
    growth: int = 1
    alone: bool = False
    card: Device | None = None

    rate = 0.0
    _task: Task | None = field(default=None, init=False)
    _repeats = 1
    _number = 0
    _reading = Reading(0)
    _least_s = math.inf  # of a try

    @property
    def slow(self) -> bool:
        return self._least_s > 2 * self.try_s

    @property
    def tries(self) -> Tries:
        return Tries(self._number, self._reading.sm_clock_mhz, self._reading.power_w)

    def attempt(self) -> None:
        """Make one try; the first one chooses the size before. Raises RuntimeError,
        NotImplementedError or AttributeError: the device or the torch build does not support it."""
        with use_threads(1 if self.alone else torch.get_num_threads()):
            self._task = self._task or self._fit()
            set_flags(PRECISIONS[self._task.precision])
            time_s, reading = time_task(self._task, self.device, self._repeats, self.card)
        self._number += 1
        self._least_s = min(self._least_s, time_s * self._repeats)
        if (rate := self._task.amount / time_s) > self.rate:
            self.rate, self._reading = rate, reading

    def renew(self) -> None:
        """Choose the size again at the next try: a slow moment leads to a small size."""
        self._task, self._least_s = None, math.inf

    def _fit(self) -> Task:
        first, *larger = self.sizes
        task = self.make(first)
        once_s = self._estimate(task)
        for size in larger:
            if once_s * self.growth > self.try_s:
                break
            try:
                task = self.make(size)
            except torch.OutOfMemoryError:
                break
            once_s = self._estimate(task)
        self._repeats = max(1, int(self.try_s / once_s))
        return task

    def _estimate(self, task: Task) -> float:
        """Return the minimum of a few times, in s: on a busy machine one was 300 times longer."""
        set_flags(PRECISIONS[task.precision])
        task.action()  # the first call chooses an algorithm and allocates memory
        times = [time_task(task, self.device, 1)[0]]
        while len(times) < 3 and sum(times) < self.try_s:
            times.append(time_task(task, self.device, 1)[0])
        return min(times)


def measure(
    device: torch.device,
    seconds: float,
    expected: Mapping[str, float] | None = None,
    card: Device | None = None,
) -> Yardstick:
    """Measure all rates of the device, which must be idle, including emulated arithmetics. The
    tries of each rate take about ``seconds``; of slow tasks, a few longer tries are made. A rate
    below its ``expected`` rate by column, or below half the data sheet's, is measured again.
    ``card`` is read during each try."""
    tries = TRIES[device.type]
    found, try_s = Yardstick(), seconds / tries
    meters = list_meters(device, try_s, card)
    take_turns = partial(_take_turns, tries, reasons=found.reasons)
    take_turns(meters, rest_s=0.0 if device.type == "cpu" else try_s)
    wanted = {name: rate * (1 - SLOWED) for name, rate in (expected or {}).items()}
    card_name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    for name, peak in list_peaks(card_name).items():
        wanted[name] = max(wanted.get(name, 0.0), FAR * peak)
    short = {name for name, one in _find_best(meters).items() if one.rate < wanted.get(name, 0.0)}
    short |= {column for name in _find_collapsed(meters) for column in FAMILIES[name]}
    again = [meter for meter in meters if meter.column in short]
    for meter in again:
        meter.renew()
    take_turns(again, rest_s=2 * try_s)
    collapsed = _find_collapsed(meters)
    for name, meter in _find_best(meters).items():
        if name in found.reasons:
            continue
        if family := next((one for one in collapsed if name in FAMILIES[one]), None):
            found.collapsed[name] = collapsed[family]
        else:
            found.rates[name] = 1 / meter.rate if name == "call_time_s" else meter.rate
            found.tries[name] = meter.tries
    return found


def _take_turns(
    tries: int, meters: Sequence[Meter], reasons: dict[str, str], rest_s: float
) -> None:
    for turn in range(tries):
        for meter in meters:
            if meter.column in reasons or (meter.slow and turn % (tries // FEWEST_TRIES)):
                continue  # slow tasks try now and then: they may be slow for a moment only
            try:
                meter.attempt()
            except (RuntimeError, NotImplementedError, AttributeError) as error:
                reasons[meter.column] = first_line(error)
            time.sleep(rest_s)


def _find_best(meters: Sequence[Meter]) -> dict[str, Meter]:
    """Return the meter with the highest rate of each column, without single-thread meters."""
    found: dict[str, Meter] = {}
    for meter in (meter for meter in meters if not meter.alone):
        if meter.rate >= found.get(meter.column, meter).rate:
            found[meter.column] = meter
    return found


def _find_collapsed(meters: Sequence[Meter]) -> dict[str, Collapse]:
    best = _find_best(meters)
    return {
        one.column: Collapse(best[one.column].rate, one.rate, torch.get_num_threads())
        for one in meters
        if one.alone and best[one.column].rate < COLLAPSED * one.rate
    }


def list_meters(device: torch.device, try_s: float, card: Device | None = None) -> list[Meter]:
    meters = []

    def add(column: str, make: Callable[[int], Task], **settings: Any) -> None:
        meters.append(Meter(column, make, device, try_s, card=card, **settings))
        if column in FAMILIES and device.type == "cpu" and torch.get_num_threads() > 1:
            meters.append(Meter(column, make, device, try_s, alone=True, **settings))

    formats = list_arithmetics(device)
    for arithmetic in formats:
        make = partial(make_product, arithmetic, device)
        add(f"rate_{arithmetic}", make, sizes=PRODUCT_ROWS[device.type], growth=8)
    for arithmetic in formats if device.type == "cpu" else ():
        for window, channels in WINDOWS.items():
            convolution = partial(make_convolution, arithmetic, device, window, channels)
            add(f"rate_conv_{arithmetic}", convolution, sizes=IMAGES, growth=2)
    add("rate_copy", lambda _: make_copy(device))
    add("call_time_s", lambda _: make_call(device))
    return meters


def list_arithmetics(device: torch.device) -> list[Arithmetic]:
    """Return the number formats in which the device computes products, emulated ones included."""
    formats = [Arithmetic.FLOAT32, Arithmetic.FLOAT16, Arithmetic.BFLOAT16]
    if device.type == "cuda" and torch.version.cuda:  # ROCm's capability is not CUDA's
        capability = torch.cuda.get_device_capability(device)
        for name in ("tf32", "fp8"):
            if capability >= PRECISIONS[name].min_capability:
                formats.append(PRECISIONS[name].arithmetic)
    return formats


_HALVES = {Arithmetic.FLOAT16: torch.float16, Arithmetic.BFLOAT16: torch.bfloat16}


def make_product(arithmetic: Arithmetic, device: torch.device, size: int) -> Task:
    precision = "tf32" if arithmetic is Arithmetic.TFLOAT32 else "fp32"
    dtype = _HALVES.get(arithmetic, torch.float32)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    if arithmetic is not Arithmetic.FLOAT8:
        out = torch.empty_like(a)
        return Task(lambda: torch.mm(a, b, out=out), 2.0 * size**3, precision)
    one = torch.ones((), device=device)
    a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()  # b must be column-major
    # as in torchao's tensorwise recipe for the forward pass and the gradients of inputs
    return Task(
        lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True),
        2.0 * size**3,
    )


WINDOWS = {3: 64, 1: 128}
"""Convolutions that represent all others on a CPU: kernel size, and channels in and out."""

_PIXELS = 16


def make_convolution(
    arithmetic: Arithmetic, device: torch.device, window: int, channels: int, images: int
) -> Task:
    """Make a convolution of images of 16 by 16 pixels, forward and both gradients."""
    dtype = _HALVES.get(arithmetic, torch.float32)
    x, grad = (
        torch.randn(images, channels, _PIXELS, _PIXELS, device=device).to(dtype) for _ in range(2)
    )
    weight = torch.randn(channels, channels, window, window, device=device).to(dtype)
    needed = [x.requires_grad_(), weight.requires_grad_()]
    return Task(
        lambda: torch.autograd.grad(F.conv2d(x, weight, padding=window // 2), needed, grad),
        3 * 2.0 * weight.numel() * images * _PIXELS**2,
    )


def make_copy(device: torch.device) -> Task:
    """Make a copy too large for caches, of at most a sixteenth of the free memory."""
    accelerator = find_accelerator(device)
    free = accelerator.mem_get_info(device)[0] if accelerator else virtual_memory().available
    size = min(COPIED_BYTES[device.type], free // 16)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return Task(lambda: target.copy_(source), 2.0 * source.nbytes)


def make_call(device: torch.device) -> Task:
    return Task(torch.ones((), device=device).neg_, 1.0)


def time_task(
    task: Task, device: torch.device, repeats: int, card: Device | None = None
) -> tuple[float, Reading]:
    """Return the mean time of ``repeats`` runs, in s, and the reading of ``card`` meanwhile."""
    clock = StepClock(device)
    synchronize(device)
    clock.tick()
    for _ in range(repeats):
        task.action()
    clock.tick()
    # a GPU has only begun by now: a reading of some milliseconds does not delay its events
    readings = card.read(Depth.SLOW) if card else ()
    synchronize(device)
    (time_s,) = clock.read()
    return time_s / repeats, readings[-1] if readings else Reading(0)


@contextmanager
def use_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if number == before:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _main(arguments: Sequence[str]) -> None:
    name, seconds, *expected = arguments
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library may print
    device, card = torch.device(name), None
    if device.type == "cuda":
        uuid = torch.cuda.get_device_properties(device).uuid
        card = open_device(f"GPU-{uuid}")
    found = measure(device, float(seconds), json.loads(expected[0]) if expected else {}, card)
    print(json.dumps(asdict(found)), file=answers, flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
    leave(0)
