"""What a device can do now: products in each number format, a copy, the start of an operation.

Each rate is the best of several short tries. On an H100 a second of large products drew 723 W at
1365 MHz, where training runs at 1980 MHz, and three such seconds within an hour gave 652, 670 and
636 TFLOP/s. So the tries of all rates take turns, and a GPU rests after each as long as it took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from multiprocessing.connection import Connection

import torch
import torch.nn.functional as F
from psutil import virtual_memory

from bench.base.text import first_line
from bench.machine.gpus import Depth, Device
from bench.machine.nvml import open_device
from bench.profile.rates import CALL, DeviceRates, Tries
from bench.schema.precision import PRECISIONS, Arithmetic
from bench.training.formats import set_flags
from bench.training.timing import StepClock, find_accelerator, synchronize

PRODUCT_ROWS = {"cuda": (1024, 2048, 4096, 8192), "cpu": (128, 256, 512, 1024, 2048, 4096, 8192)}
"""Rows of square matrices. The largest fill every GPU: their product takes 1.4 ms at 800
TFLOP/s."""

_IMAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Batch sizes of a convolution."""

COPIED_BYTES = {"cuda": 2**30, "cpu": 2**28}
"""Maximum size of the copy. It touches twice as much memory: more than the 50 MB cache of a GPU or
the 400 MB of a CPU."""

TRIES = {"cuda": 8, "cpu": 24}
"""Tries per rate. A busy CPU is given to a program for about 3 ms at a time, so tries of 12 ms
would all share it with other programs."""

FEWEST_TRIES = 3
"""Minimum tries of a task that takes more than all its time, such as an emulated product."""


@dataclass(frozen=True)
class Task:
    """An action to repeat; ``amount`` is its work per call: FLOP, bytes or operations."""

    action: Callable[[], object]
    amount: float
    precision: str = "fp32"  # whose flags are set


@dataclass(frozen=True)
class Rate:
    """A rate to measure, by the column of its record. ``make`` returns the task of a size, and each
    of ``sizes`` takes ``growth`` times as long as the one before."""

    column: str
    make: Callable[[int], Task]
    sizes: Sequence[int] = (1,)
    growth: int = 1

    def fit(self, device: torch.device, try_s: float) -> tuple[Task, int]:
        """Return the task of the largest size that fits into a try, and its repeats. Raises
        RuntimeError, NotImplementedError or AttributeError: the device or the torch build does not
        support it."""
        for size in self.sizes:
            task = self.make(size)
            time_task(task, device, 1)  # the first call chooses an algorithm and allocates memory
            times = [time_task(task, device, 1)[0]]
            # the best of a few: on a busy machine one was 300 times longer
            while len(times) < 3 and sum(times) < try_s:
                times.append(time_task(task, device, 1)[0])
            if min(times) * self.growth > try_s:
                break
        return task, max(1, int(try_s / min(times)))


def measure(device: torch.device, seconds: float, card: Device | None = None) -> DeviceRates:
    """Measure all rates of the device, which must be idle, including emulated arithmetics. The
    tries of each rate take about ``seconds``; of slow tasks, a few longer tries are made. The clock
    of ``card`` is read during each try."""
    found, try_s = DeviceRates(), seconds / TRIES[device.type]
    tasks = []
    for rate in list_rates(device):
        try:
            tasks.append((rate.column, *rate.fit(device, try_s)))
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            found.reasons[rate.column] = first_line(error)
    spent = [0.0] * len(tasks)
    for turn in range(TRIES[device.type]):
        for index, (column, task, repeats) in enumerate(tasks):
            if spent[index] > seconds and turn >= FEWEST_TRIES:
                continue
            time_s, clock_mhz = time_task(task, device, repeats, card)
            spent[index] += time_s * repeats
            best = found.tries.get(column)
            if best is None or task.amount / time_s > found.rates[column]:
                found.rates[column] = task.amount / time_s
                best = Tries(0, clock_mhz)
            found.tries[column] = replace(best, number=turn + 1)
            time.sleep(0.0 if device.type == "cpu" else try_s)
    if CALL in found.rates:
        found.rates[CALL] = 1 / found.rates[CALL]
    return found


def list_rates(device: torch.device) -> list[Rate]:
    formats = list_arithmetics(device)
    products = PRODUCT_ROWS[device.type]
    rates = [Rate(f"rate_{a}", partial(make_product, a, device), products, 8) for a in formats]
    for arithmetic, (window, channels) in product(formats, WINDOWS.items()):
        if device.type == "cpu":
            make = partial(make_convolution, arithmetic, device, window, channels)
            rates.append(Rate(f"rate_conv_{arithmetic}", make, _IMAGES, 2))
    return [
        *rates,
        Rate("rate_copy", partial(make_copy, device)),
        Rate(CALL, lambda _: Task(torch.ones((), device=device).neg_, 1.0)),
    ]


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


def make_copy(device: torch.device, _: int = 1) -> Task:
    """Make a copy too large for caches, of at most a sixteenth of the free memory."""
    accelerator = find_accelerator(device)
    free = accelerator.mem_get_info(device)[0] if accelerator else virtual_memory().available
    size = min(COPIED_BYTES[device.type], free // 16)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return Task(lambda: target.copy_(source), 2.0 * source.nbytes)


def time_task(
    task: Task, device: torch.device, repeats: int, card: Device | None = None
) -> tuple[float, int | None]:
    """Return the mean time of ``repeats`` runs, in s, and the SM clock of ``card`` in MHz, from the
    last reading that ended before they did; None without one. Its power is not read: NVML's is the
    mean of a second, in which other tries ran."""
    clock, clock_mhz = StepClock(device), None
    set_flags(PRECISIONS[task.precision])
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


def answer(connection: Connection, name: str, seconds: float) -> None:
    """Send the rates of a device, in a process of its own."""
    device, card = torch.device(name), None
    if device.type == "cuda":
        uuid = torch.cuda.get_device_properties(device).uuid
        card = open_device(f"GPU-{uuid}")
    connection.send(measure(device, seconds, card))
