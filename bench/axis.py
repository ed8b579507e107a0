"""Axes: the description of each, given once at its field of `bench.case.Case`, and parsers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from bench.data.synthetic import MOST_CLASSES, parse_shape
from bench.errors import nearest
from bench.precision import OPT_LEVELS, POLICIES, is_dynamic
from bench.text import parse_bytes, write_bytes

Value = str | int | float | bool | None


class Trait(StrEnum):
    """A property that an axis may affect."""

    LEARNING = "learning"
    """Loss and accuracy. They are compared at the end of an epoch: before that, a larger batch has
    taken fewer steps, and a loss describes only the first steps. Cases that differ in any other
    axis, such as the precision, may be compared after equal steps."""
    RATE = "rate"
    """The learning rate of each step."""
    DATA = "data"
    """The images: losses on different ones cannot be compared. A workload brings its own."""
    DRAWS = "draws"
    """The data of a user's workload: each micro-batch is drawn separately, and a DataLoader uses a
    dataset instead."""
    FIT = "fit"
    """The largest batch that fits in memory."""
    PROOF = "proof"
    """The proof of a precision, on single layers: no loss, optimizer or loader is involved."""
    WORK = "work"
    """The work of a step, counted operation by operation, without loader workers."""
    FLOP = "flop"
    """FLOP per image."""
    PART = "part"
    """How much of an epoch is measured."""
    FIRST = "first"
    """The loss of the first step, before anything is learned. It depends on what BatchNorm
    normalises together, and on the running statistics of frozen layers."""
    KERNELS = "kernels"
    """How fast the same step is computed. The references were measured at the axis's default, and
    do not apply to cases with another value."""
    RECIPE = "recipe"
    """What compared cards must also agree on, besides everything that affects learning."""


@dataclass(frozen=True)
class Condition:
    """A condition that a case must meet for an axis to apply to it."""

    holds: Callable[[Any], bool]
    decided: str  # the axis it is about; if a flag sets that, a preset's values need not apply
    lack: str  # the message if an axis is given and no case meets this
    mend: str  # the flag to add then


@dataclass(frozen=True)
class Conflict:
    """A combination with other settings that an axis does not allow in a case."""

    holds: Callable[[Any], bool]
    why: str  # the message, with what to give instead; may use {case.NAME}


@dataclass(frozen=True)
class Axis:
    """The description of an axis.

    By default an axis does not affect learning, and findings about a case, such as the largest
    batch that fits, do not apply to a case with another value.
    """

    default: Any
    parse: Callable[[str], Value]  # for flags, presets and CSV; its ValueError says what is right
    help: str
    quiet: bool = False  # not part of a case's name at its default
    switch: bool = False  # "off" is a value and "on" is accepted; implied by a default of False
    common: bool = False  # ``--help`` shows its flag; else only ``--help-all`` does
    named: bool = False  # part of a case's name even where it does not vary
    plain: bool = False  # its values are clear without its name
    number: bool = False  # its values are numbers; implied by a default that is one
    legacy: tuple[str, ...] = ()  # values kept only for comparison
    affects: tuple[Trait, ...] = (Trait.FIT, Trait.PROOF, Trait.WORK)  # what it affects
    measuring: bool = False  # says how a case was measured; never distinguishes two questions
    spread: bool = False  # varied to see a spread, not for its effect
    prepares: str = ""  # what it does before the first epoch, to make all epochs shorter
    follows: str = ""  # the axis whose values decide whether it exists; may change with that
    kept: bool = False  # compared cases must agree on it although it follows another
    applies: tuple[Condition, ...] = ()  # it applies where all hold; else a grid keeps its default
    fill: Callable[[Any], Value] | None = None  # its value in a case that gives none
    baseline: bool = False  # its default is the baseline; else its first value is
    order: Callable[[str], Any] | None = None  # sort key for CSV spellings; else numeric or as run
    # values of other axes with which a non-default value of this one is not measured
    beside: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    conflicts: tuple[Conflict, ...] = ()  # other combinations that are refused, with the reason
    absent: Mapping[str, str] = field(default_factory=dict)  # commands without its flag, and why
    name: str = ""

    def holds(self, case: Any) -> bool:
        """Return whether the axis applies to ``case``."""
        return all(rule.holds(case) for rule in self.applies)


def axis_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def describe_axis(default: Value, parse: Callable[[str], Value], help: str, **about: Any) -> Any:
    """Make a field of `bench.case.Case` that describes an axis; ``about`` are fields of `Axis`."""
    about["switch"] = about.get("switch", False) or default is False
    about["number"] = about.get("number", False) or type(default) in (int, float)
    return field(default=default, metadata={"axis": Axis(default, parse, help, **about)})


# ---------------------------------------------------------------------------------- reading values


LOADERS = ("device", "torch")
"""What makes the batches: see `bench.data.batches` and `bench.data.loader`."""

COMPILES = {
    "off": "every operation by itself, as the network is written",
    "default": "operations that follow each other are fused; 'on' is another name for it",
    "reduce-overhead": "as default, and on a GPU all kernels of a pass start at once (CUDA graphs)",
    "max-autotune": "as reduce-overhead, and products run in the fastest of several kernels",
}
"""How torch.compile treats the network: its modes, and ``off``."""

OWN_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes of `COMPILES` in which torch.compile makes CUDA graphs itself."""

PARALLELS = {
    "none": "one GPU",
    "ddp": "a process per GPU, gradients averaged by torch's DistributedDataParallel",
    "dp": "legacy: one process for all GPUs, torch's DataParallel",
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


def parse_batch_size(text: str) -> int:
    with suppress(ValueError):
        if (value := int(text)) >= 0:  # 0 is that of a command that chooses it
            return value
    raise ValueError(BATCH_SIZES)


def parse_number(what: str, low: float, high: float = math.inf) -> Callable[[str], float]:
    """Return a parser of numbers above ``low`` and up to ``high``."""

    def parse(text: str) -> float:
        with suppress(ValueError):
            if low < (value := float(text)) <= high and math.isfinite(value):
                return value
        bound = f"above {low:g}" + (f" and at most {high:g}" if math.isfinite(high) else "")
        raise ValueError(f"{what} is a finite number {bound}")

    return parse


def parse_loss_scale(text: str) -> float | str:
    if is_dynamic(text):
        return text
    if text == "none":
        return 1.0
    try:
        return parse_number("", 0)(text)
    except ValueError:
        raise ValueError(
            "a loss scale is a finite number above 0, "
            f"{', '.join(map(repr, POLICIES))}, or 'none' (a scale of 1)"
        ) from None


def or_none(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text == "none" else parse(text)


parse_opt_level = or_none(one_of([*OPT_LEVELS, "none"]))


def parse_switch(text: str) -> bool:
    switches = {"on": True, "true": True, "off": False, "false": False}
    if text.lower() not in switches:
        raise ValueError("a boolean value is 'on' or 'off'")
    return switches[text.lower()]


def parse_compile(text: str) -> str:
    also = {"on": "default", "true": "default", "false": "off"}
    return one_of(COMPILES)(also.get(text.lower(), text))


def parse_whole(what: str, least: int = 1, most: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        whole = text.isascii() and text.isdigit() and len(text) < 10
        if not (whole and int(text) >= least and (most is None or int(text) <= most)):
            bound = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise ValueError(f"{what} is a whole number {bound}")
        return int(text)

    return parse


parse_steps = or_none(parse_whole("a number of steps"))


@or_none
def parse_until(text: str) -> float:
    number, unit = (text[:-1], 100.0) if text.endswith("%") else (text, 1.0)
    try:
        return parse_number("", 0, 0.5 * unit)(number) / unit
    except ValueError:
        raise ValueError(
            "how certain a time is to be is a share such as 1%, at most 50%, or 'none'"
        ) from None


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
parse_classes = or_none(parse_whole("a number of classes", 2, MOST_CLASSES))


def parse_lr_warmup(text: str) -> str:
    if text.isascii() and text.isdigit() and len(text) < 10:
        return str(int(text))
    with suppress(ValueError):
        if text.endswith("%") and 0 <= (share := float(text.removesuffix("%"))) <= 100:
            return f"{share:.12g}%" if share else "0"
    raise ValueError("a warm-up is a number of steps, or a part of them such as 5%")


def parse_seed(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) < 2**31):
        raise ValueError("a seed is a whole number from 0 to 2147483647")
    return int(text)
