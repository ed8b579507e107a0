"""Axes: the description of each, given once at its field of `bench.schema.case.Case`, and
parsers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from bench.base.errors import nearest
from bench.base.text import parse_bytes, read_number, read_percent, read_whole, write_bytes
from bench.networks.data.synthetic import parse_shape
from bench.schema.precision import POLICIES

Value = str | int | float | bool | None


class Trait(StrEnum):
    """A property that an axis may affect.

    - learning: loss and accuracy. They are compared at the end of an epoch: before that, a larger
      batch has taken fewer steps, and a loss describes only the first steps. Cases that differ in
      any other axis, such as the precision, may be compared after equal steps.
    - rate: the learning rate of each step.
    - data: the images; losses on different ones cannot be compared. A workload brings its own.
    - draws: the data of a user's workload: each micro-batch is drawn separately, and a DataLoader
      uses a dataset instead.
    - fit: the largest batch that fits in memory.
    - proof: that of a precision, on single layers: no loss, optimizer or loader is involved.
    - work: the work of a step, counted operation by operation, without loader workers.
    - flop: FLOP per image.
    - first: the loss of the first step, before anything is learned. It depends on what BatchNorm
      normalises together, and on the running statistics of frozen layers.
    - kernels: how fast the same step is computed. The references were measured at the axis's
      default, and do not apply to cases with another value.
    - recipe: what compared cards must also agree on, besides everything that affects learning.
    """

    LEARNING = "learning"
    RATE = "rate"
    DATA = "data"
    DRAWS = "draws"
    FIT = "fit"
    PROOF = "proof"
    WORK = "work"
    FLOP = "flop"
    FIRST = "first"
    KERNELS = "kernels"
    RECIPE = "recipe"


@dataclass(frozen=True)
class Axis:
    """The description of an axis.

    By default an axis does not affect learning, and findings about a case, such as the largest
    batch that fits, do not apply to a case with another value.
    """

    default: Any
    parse: Callable[[str], Value]  # for flags, presets and CSV; its ValueError says what is right
    help: str
    common: bool = False  # ``--help`` shows its flag; else only ``--help-all`` does
    plain: bool = False  # its values are clear without its name
    order: Callable[[Any], Any] | None = None  # sort key of its values; numbers need none
    from_default: bool = False  # its default is the baseline of other values; else the first is
    decided_by: str = ""  # another axis: only some values of that have it, or set its default
    affects: tuple[Trait, ...] = (Trait.FIT, Trait.PROOF, Trait.WORK)  # what it affects


def axis_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def own_axis(name: str) -> str:
    """Return the axis of a user's own placeholder, named as the command has it.

    >>> own_axis("my_clip"), name_axis("{my_clip}"), name_axis("clip_grad")
    ('{my_clip}', 'my_clip', 'clip grad')
    """
    return f"{{{name}}}"


def is_own(axis: str) -> bool:
    return axis.startswith("{")


def name_column(axis: str) -> str:
    """Return the name of an axis in files and on command lines."""
    return axis.strip("{}")


def name_axis(axis: str) -> str:
    """Return the name of an axis as people read it."""
    return name_column(axis) if is_own(axis) else axis.replace("_", " ")


def describe_axis(default: Value, parse: Callable[[str], Value], help: str, **about: Any) -> Any:
    """Make a field of `bench.schema.case.Case` that describes an axis; ``about`` are fields of
    `Axis`."""
    return field(default=default, metadata={"axis": Axis(default, parse, help, **about)})


# ---------------------------------------------------------------------------------- reading values


PARTED = re.compile(r"[\w.:^%+-]+(?:,[\w.:^%+-]*)+")
"""Values parted by commas, where a flag takes them parted by spaces."""


LOADERS = ("device", "torch")
"""What makes the batches: see `bench.networks.data.batches` and `bench.networks.data.loader`."""

COMPILES = {
    "off": "every operation by itself, as the network is written",
    "default": "operations that follow each other are fused; 'on' is another name for it",
    "reduce-overhead": "as default, and on a GPU all kernels of a pass start at once (CUDA graphs)",
    "max-autotune": "as reduce-overhead, and products run in the fastest of several kernels",
}
"""How torch.compile treats the network: its modes, and ``off``."""

DYNAMICS = {
    "off": "compiled for each batch shape by itself",
    "on": "compiled once, for any shape, by code that may be slower",
    "auto": "for the first shape, and at the second again for any, as torch does unless it is told",
}
"""For which shapes of a batch torch.compile compiles."""

OWN_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes of `COMPILES` in which torch.compile makes CUDA graphs itself."""

RECOMPUTES = {
    "none": "all of them are kept",
    "budget:F": "with --compile: the cheapest, until a share F of their memory is kept",
    "blocks": "those of the blocks that the network repeats, such as a transformer's layers",
    "full": "those of all parts of the network that have layers of their own, of blocks too",
}
"""Which activations the backward pass computes again, from none to all."""

PARALLELS = {
    "none": "one GPU",
    "ddp": "a process per GPU, gradients averaged by torch's DistributedDataParallel",
    "fsdp": "a process per GPU, each with a share of weights, gradients and optimizer state "
    "(torch's fully_shard)",
    "dp": "one process for all GPUs, the first of which gathers all outputs: torch's DataParallel",
}
"""How several GPUs train one network."""

GRAD_COMPRESSIONS = ("none", "fp16", "bf16")
"""Number formats in which gradients are exchanged; ``none`` keeps that of the gradients."""


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(nearest(text, list(names)))
        return text

    return parse


BATCH_SIZES = (
    "a batch size is a whole number of at least 1, auto, or a range of powers of two such as "
    "32..1024 or 32..auto"
)


def parse_number(what: str, low: float, high: float = math.inf) -> Callable[[str], float]:
    """Return a parser of numbers above ``low`` and up to ``high``."""

    def parse(text: str) -> float:
        if low < (value := read_number(text)) <= high:
            return value
        bound = f"above {low:g}" + (f" and at most {high:g}" if math.isfinite(high) else "")
        raise ValueError(f"{what} is a finite number {bound}")

    return parse


def or_none(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text == "none" else parse(text)


def read_scale(text: str) -> float:
    """Read a loss scale, perhaps a power as maps of scales name it. Raises ValueError: it is not
    above 0 and finite.

    >>> read_scale("128"), read_scale("2^15"), read_scale("2**-3")
    (128.0, 32768.0, 0.125)
    """
    base, sign, exponent = text.replace("**", "^").partition("^")
    with suppress(OverflowError):
        scale = math.pow(float(base), int(exponent)) if sign else float(base)
        if 0 < scale < math.inf:
            return scale
    raise ValueError("it is not above 0 and finite")


def refuse_scale(scale: float) -> str:
    """Return why a loss is not multiplied by a number; empty if it is. float32, which it is then
    in, has it among its normal numbers if its exponent is from -126 to 127 (IEEE 754, binary32):
    1e40 is infinite there, and 1e-50 zero."""
    normal = 2.0**-126 <= scale <= 2.0**127
    return "" if normal else "a loss scale is from 2^-126 to 2^127, which is what float32 holds"


def order_scale(scale: Value) -> tuple[float, str]:
    """Return a sort key for loss scales: none, numbers ascending, dynamic."""
    return (math.inf, scale) if isinstance(scale, str) else (scale or 0.0, "")


def order_limit(limit: float | None) -> float:
    """Return a sort key for limits: numbers ascending, then none."""
    return limit or math.inf


def parse_loss_scale(text: str) -> float | str:
    if text in POLICIES:
        return text
    if text == "none":
        return 1.0
    with suppress(ValueError):
        return read_scale(text)
    names = ", ".join(map(repr, POLICIES))
    raise ValueError(f"a loss scale is a finite number above 0, {names}, or 'none' (a scale of 1)")


def parse_switch(text: str) -> bool:
    switches = {"on": True, "true": True, "off": False, "false": False}
    if text.lower() not in switches:
        raise ValueError("a boolean value is 'on' or 'off'")
    return switches[text.lower()]


def parse_compile(text: str) -> str:
    also = {"on": "default", "true": "default", "false": "off"}
    return one_of(COMPILES)(also.get(text.lower(), text))


def read_budget(recompute: str) -> float | None:
    """Return the share of activations' memory that a value of ``--recompute`` lets torch.compile
    keep; None where it does not say. Raises ValueError: it is no number.

    >>> read_budget("budget:0.5"), read_budget("blocks")
    (0.5, None)
    """
    word, _, share = recompute.partition(":")
    return float(share) if word == "budget" else None


def parse_recompute(text: str) -> str:
    plain = [name for name in RECOMPUTES if ":" not in name]
    with suppress(ValueError):
        if (budget := read_budget(text)) is not None and 0 <= budget < 1:
            return f"budget:{budget:.12g}"
        return one_of(plain)(text)
    raise ValueError(
        f"what is computed again is {', '.join(plain)} or budget:F, with F from 0 to below 1"
    )


def order_recompute(value: str) -> tuple[int, float]:
    """Return a sort key for values of ``--recompute``: by how much is computed again."""
    budget = read_budget(value)
    return [*RECOMPUTES].index(value if budget is None else "budget:F"), -(budget or 0)


def parse_whole(
    what: str, least: int = 1, most: int | None = None, right: str = ""
) -> Callable[[str], int]:
    """Return a parser of whole numbers; ``right`` replaces the message of its ValueError."""

    def parse(text: str) -> int:
        if (number := read_whole(text, least, most)) is None:
            bound = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise ValueError(right or f"{what} is a whole number {bound}")
        return number

    return parse


parse_batch_size = parse_whole("", 0, 10**12, BATCH_SIZES)  # a command chooses 0


@or_none
def parse_until(text: str) -> float:
    if 0 < (share := (read_percent if "%" in text else read_number)(text)) <= 0.5:
        return share
    raise ValueError("how certain a time is to be is a share such as 1%, at most 50%, or 'none'")


LEAST_LIMIT = 64 * 2**20
"""Minimum memory limit in bytes; any process that imports torch needs more."""


@or_none
def parse_memory_limit(text: str) -> str:
    number = parse_bytes(text)
    if number < LEAST_LIMIT:
        raise ValueError(f"a memory limit is at least {write_bytes(LEAST_LIMIT)}, or 'none'")
    # 0.8GiB is 858993459.2 bytes, which nobody would recognise
    return write_bytes(number if number % 10**6 == 0 else number - number % 2**20)


parse_input = or_none(lambda text: "x".join(map(str, parse_shape(text))))


def parse_lr_warmup(text: str) -> str:
    if (steps := read_whole(text, 0)) is not None:
        return str(steps)
    if 0 <= (share := 100 * read_percent(text)) <= 100:
        return f"{share:.12g}%" if share else "0"
    raise ValueError("a warm-up is a number of steps, or a part of them such as 5%")
