"""An axis: what is said of it, once, at its field of `bench.case.Case`; how values are read."""

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
    """What an axis may matter to."""

    LEARNING = "learning"
    """Loss and accuracy. They show at the end of an epoch: before, a larger batch has taken fewer
    steps, and a loss tells of the first steps. Cases that differ in any other axis, such as the
    precision, may be compared after equal steps."""
    RATE = "rate"
    """The learning rate of each step."""
    DATA = "data"
    """The images, without which losses cannot be compared. A workload brings its own."""
    DRAWS = "draws"
    """The data of a user's workload: micro-batches are drawn each by itself, and a DataLoader has a
    dataset instead."""
    FIT = "fit"
    """How large a batch fits in memory."""
    PROOF = "proof"
    """The proof of a precision: layers by themselves, without a loss, an optimizer or a loader."""
    WORK = "work"
    """The work of a step, counted operation by operation, without the workers of a loader."""
    FLOP = "flop"
    """FLOP per image."""
    PART = "part"
    """How much of an epoch is measured."""
    FIRST = "first"
    """The loss of the first step, before anything is learned. It is of what BatchNorm normalises
    together, and of frozen layers by their running statistics."""
    KERNELS = "kernels"
    """How fast the same step is computed. The references were measured at its default, and say
    nothing of cases with another value."""
    RECIPE = "recipe"
    """What else cards agree in that are compared, beside all that matters to learning."""


@dataclass(frozen=True)
class Condition:
    """What must hold of a case for an axis to apply to it."""

    holds: Callable[[Any], bool]
    decided: str  # the axis that decides it: where a flag gives that, a preset's own is not missed
    lack: str  # what is said where an axis is given and no case has it
    mend: str  # the flag to add then


@dataclass(frozen=True)
class Conflict:
    """What an axis cannot be together with in a case."""

    holds: Callable[[Any], bool]
    why: str  # and what to give instead; the values of the case are {case.NAME}


@dataclass(frozen=True)
class Axis:
    """What is said of an axis.

    By default it is to leave learning as it is, and what was found of a case, such as the largest
    batch that fits, says nothing of a case with another value.
    """

    default: Any
    parse: Callable[[str], Value]  # of flags, presets and CSV; a ValueError says what is right
    help: str
    since: int = 1  # the schema of records that brought it
    quiet: bool = False  # a case is not named by it where it has its default
    switch: bool = False  # one value is "off", and "on" is understood; so are all off or on
    common: bool = False  # ``--help`` shows its flag; else ``--help-all`` alone does
    named: bool = False  # a case is named by it even where it does not vary
    plain: bool = False  # its values speak for themselves, without its name
    number: bool = False  # its values are numbers, as they are where the default is one
    legacy: tuple[str, ...] = ()  # values that only stand beside others for comparison
    affects: tuple[Trait, ...] = (Trait.FIT, Trait.PROOF, Trait.WORK)  # what it matters to
    measuring: bool = False  # it says how a case was measured, and tells no two questions apart
    spread: bool = False  # it is varied to see a spread, not for what it does
    prepares: str = ""  # what it does before the first epoch, so that all are shorter
    follows: str = ""  # the axis of which only some values have it: it may change with that
    kept: bool = False  # though it follows, it is a question too: what is compared agrees in it
    applies: tuple[Condition, ...] = ()  # where all hold; else a grid leaves it at its default
    fill: Callable[[Any], Value] | None = None  # the value in a case where none is given
    baseline: bool = False  # its default is what others are compared with; else the first value is
    order: Callable[[str], Any] | None = None  # sorts values, as CSV; else numbers, or as they ran
    anchored: bool = True  # an anchor has it as its case does, not its default
    # values of other axes that it is not measured with, where it is not at its default
    beside: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    conflicts: tuple[Conflict, ...] = ()  # what else it cannot be with, each for a reason
    absent: Mapping[str, str] = field(default_factory=dict)  # commands without its flag, and why
    name: str = ""

    def holds(self, case: Any) -> bool:
        """Whether it applies to a case."""
        return all(rule.holds(case) for rule in self.applies)


def describe_axis(default: Value, parse: Callable[[str], Value], help: str, **about: Any) -> Any:
    """Describe an axis by what `Axis` has of it: a field of `bench.case.Case`."""
    about["switch"] = about.get("switch", False) or default is False
    about["number"] = about.get("number", False) or type(default) in (int, float)
    return field(default=default, metadata={"axis": Axis(default, parse, help, **about)})


# ---------------------------------------------------------------------------------- reading values


LOADERS = ("device", "torch")
"""What makes the batches: see `bench.data.batches` and `bench.data.loader`."""

COMPILES = {
    "off": "every operation by itself, as the network is written",
    "default": "operations that follow each other are fused; 'on' is another name for it",
    "reduce-overhead": "and on a GPU all kernels of a pass are started at once, by CUDA graphs",
    "max-autotune": "and products run in the fastest of several kernels, timed in the warm-up",
}
"""How torch.compile treats the network: its modes, and ``off``."""

OWN_GRAPHS = ("reduce-overhead", "max-autotune")
"""Of these, the modes in which torch.compile makes CUDA graphs itself."""

PARALLELS = {
    "none": "one GPU",
    "ddp": "a process per GPU, gradients averaged by torch's DistributedDataParallel",
    "dp": "legacy: one process for all GPUs, torch's DataParallel",
}
"""How several GPUs train one network."""

GRAD_COMPRESSIONS = ("none", "fp16", "bf16")
"""The number formats that gradients are exchanged in; ``none`` is that of the gradients."""


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(nearest(text, list(names)))
        return text

    return parse


def parse_batch_size(text: str) -> int:
    with suppress(ValueError):
        if (value := int(text)) >= 1:
            return value
    raise ValueError(
        "a batch size is a whole number of at least 1, auto, or a range of powers of two such as "
        "32..1024 or 32..auto"
    )


def parse_number(what: str, low: float, high: float = math.inf) -> Callable[[str], float]:
    """Make the parser of an axis whose values are numbers above ``low``, at most ``high``."""

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
        raise ValueError("how certain a time is to be is a share such as 1%, or 'none'") from None


LEAST_LIMIT = 64 * 2**20
"""Bytes; no process that imports torch is smaller."""


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
