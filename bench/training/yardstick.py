"""What a device can do now: products in each number format, a copy, the start of an operation.

Each rate is the best of several short tries. On an H100 a second of large products drew 723 W at
1365 MHz, where training runs at 1980 MHz, and three such seconds within an hour gave 652, 670 and
636 TFLOP/s. So the tries of all rates take turns, and a GPU rests after each as long as it took.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.nn.functional as F
from psutil import virtual_memory

from bench.gpu import Depth, Device
from bench.gpu.nvml import open_device
from bench.precision import PRECISIONS, Arithmetic, set_flags
from bench.text import first_line
from bench.training.timing import StepClock, find_accelerator, synchronize
from bench.yardstick import Tries, Yardstick

PRODUCT_ROWS = {"cuda": (1024, 2048, 4096, 8192), "cpu": (128, 256, 512, 1024, 2048, 4096, 8192)}
"""Rows of square matrices. The largest fill every GPU: their product takes 1.4 ms at 800
TFLOP/s."""

IMAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Batch sizes of a convolution."""

COPIED_BYTES = {"cuda": 2**30, "cpu": 2**28}
"""Maximum size of the copy. It touches twice as much memory: more than the 50 MB cache of a GPU or
the 400 MB of a CPU."""

TRIES = {"cuda": 8, "cpu": 24}
"""Tries per rate. A busy CPU is given to a program for about 3 ms at a time, so tries of 12 ms
would all share it with other programs."""

FEWEST_TRIES = 3
"""Minimum tries of a task that exceeds its time even once, such as an emulated product."""


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
    size takes ``growth`` times as long as the one before. The clock of ``card`` is read meanwhile.
    """

    column: str
    make: Callable[[int], Task]
    device: torch.device
    try_s: float
    sizes: Sequence[int] = (1,)
    growth: int = 1
    card: Device | None = None

    rate = 0.0
    _task: Task | None = field(default=None, init=False)
    _repeats = 1
    _number = 0
    _clock_mhz: int | None = field(default=None, init=False)
    _least_s = math.inf  # of a try

    @property
    def slow(self) -> bool:
        return self._least_s > 2 * self.try_s

    @property
    def tries(self) -> Tries:
        return Tries(self._number, self._clock_mhz)

    def attempt(self) -> None:
        """Make one try; the first one chooses the size before. Raises RuntimeError,
        NotImplementedError or AttributeError: the device or the torch build does not support it."""
        self._task = self._task or self._fit()
        set_flags(PRECISIONS[self._task.precision])
        time_s, clock_mhz = time_task(self._task, self.device, self._repeats, self.card)
        self._number += 1
        self._least_s = min(self._least_s, time_s * self._repeats)
        if (rate := self._task.amount / time_s) > self.rate:
            self.rate, self._clock_mhz = rate, clock_mhz

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


def measure(device: torch.device, seconds: float, card: Device | None = None) -> Yardstick:
    """Measure all rates of the device, which must be idle, including emulated arithmetics. The
    tries of each rate take about ``seconds``; of slow tasks, a few longer tries are made. The clock
    of ``card`` is read during each try."""
    tries = TRIES[device.type]
    found, try_s = Yardstick(), seconds / tries
    meters = list_meters(device, try_s, card)
    rest_s = 0.0 if device.type == "cpu" else try_s
    for turn in range(tries):
        for meter in meters:
            if meter.column in found.reasons or (meter.slow and turn % (tries // FEWEST_TRIES)):
                continue  # slow tasks try now and then: they may be slow for a moment only
            try:
                meter.attempt()
            except (RuntimeError, NotImplementedError, AttributeError) as error:
                found.reasons[meter.column] = first_line(error)
            time.sleep(rest_s)
    best: dict[str, Meter] = {}
    for meter in meters:
        if meter.rate >= best.get(meter.column, meter).rate:
            best[meter.column] = meter
    for name, meter in best.items():
        if name not in found.reasons:
            found.rates[name] = 1 / meter.rate if name == "call_time_s" else meter.rate
            found.tries[name] = meter.tries
    return found


def list_meters(device: torch.device, try_s: float, card: Device | None = None) -> list[Meter]:
    meters = []

    def add(column: str, make: Callable[[int], Task], **settings: Any) -> None:
        meters.append(Meter(column, make, device, try_s, card=card, **settings))

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
) -> tuple[float, int | None]:
    """Return the mean time of ``repeats`` runs, in s, and the SM clock of ``card`` in MHz, from the
    last reading that ended before they did; None without one. Its power is not read: NVML's is the
    mean of a second, in which other tries ran."""
    clock, clock_mhz = StepClock(device), None
    synchronize(device)
    clock.tick()
    for _ in range(repeats):
        task.action()
    clock.tick()
    # all is launched, so readings of some milliseconds do not delay a GPU
    while card and not clock.read_ended():
        reading = card.read(Depth.SLOW)[-1]
        clock_mhz = clock_mhz if clock.read_ended() else reading.sm_clock_mhz
    synchronize(device)
    (time_s,) = clock.read()
    return time_s / repeats, clock_mhz


def answer(told: Connection, name: str, seconds: float) -> None:
    """Send the rates of a device, in a process of its own."""
    device, card = torch.device(name), None
    if device.type == "cuda":
        uuid = torch.cuda.get_device_properties(device).uuid
        card = open_device(f"GPU-{uuid}")
    told.send(measure(device, seconds, card))
