"""Grids of cases: their expansion, and checks of settings, batch sizes and the data they need."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from bench.axis import BATCH_SIZES, Trait, Value, axis_flag, parse_whole
from bench.case import (
    AXES,
    Case,
    divide_items,
    fill_command,
    format_value,
    list_affecting,
    list_values,
    make_case,
    micro_batch,
    parse_value,
    whole_batch,
)
from bench.command import BESIDE_COMMAND, list_places, name_command, read_vary, refuse_places
from bench.errors import UsageError
from bench.models import is_command, name_module
from bench.optimization import count_warmup_steps
from bench.text import join_words
from bench.workloads import COMMAND, IMAGES, OWN

AUTO = "auto"
"""The batch size to be found: the largest that fits, less a margin."""

_RANGE = re.compile(r"([0-9]{1,9})\.\.([0-9]{1,9}|auto)")


def _double(low: int, high: int) -> Iterator[int]:
    while low <= high:
        yield low
        low *= 2


def fill_auto(text: str, largest: int, recommended: int) -> list[int]:
    """Return the batch sizes that ``auto`` or ``32..auto`` stands for once the largest is known.

    >>> fill_auto("auto", 600, 560), fill_auto("128..auto", 600, 560)
    ([560], [128, 256, 512, 560])
    """
    low, dots, _ = text.rpartition("..")
    return sorted({*(_double(int(low), largest) if dots else ()), recommended})


def parse_values(name: str, value: object, where: str) -> list[Value]:
    """Parse what a flag or preset gives for axis ``name``: a value, or for batch sizes several.

    ``32..1024`` gives the powers of two between; ``auto`` and ``32..auto`` are kept, to be found
    later. Raises UsageError as `parse_value` does.
    """
    if name == "batch_size" and value == AUTO:
        return [AUTO]
    if name == "batch_size" and (found := _RANGE.fullmatch(str(value))):
        low, high = int(found[1]), found[2]
        if low < 1 or low & (low - 1):
            right = "a range is of powers of two and starts with one, such as 32..1024"
            raise UsageError(f"{where} {value!r}: {right}")
        if high == AUTO:
            return [f"{low}..{AUTO}"]
        if int(high) < low:
            raise UsageError(f"{where} {value!r}: a range goes upwards, such as 32..1024")
        return list(_double(low, int(high)))
    if name == "batch_size" and str(value) == "0":
        raise UsageError(f"{where} '0': {BATCH_SIZES}")
    if name == "model" and is_command(str(value)):
        raise UsageError(f"{where} {value!r}: {name_module(str(value)) or 'give a network'}")
    return [parse_value(name, value, where)]


MICRO_BATCH = "micro_batch"
"""A key of `grid` besides the axes: the most images of a micro-batch, which sets `accumulate`."""

parse_micro_batch = parse_whole("a micro-batch")


def refuse_auto(family: Case, text: str) -> list[int]:
    """Refuse ``auto`` in a command that does not look for the largest batch. Raises UsageError:
    always."""
    raise UsageError(
        f"--batch-size {text}: only bench.sweep looks for the largest batch; give a number, such "
        "as one that bench.fit recommends"
    )


def grid(
    *blocks: Mapping[str, Sequence[Value]],
    find: Callable[[Case, str], Sequence[int]] = refuse_auto,
    asked: Collection[str] | None = None,
) -> list[Case]:
    """Return every combination of the axes of each block, in order, without duplicates; the batch
    size varies fastest.

    An axis that does not apply (`Axis.applies`) is at its default; one without a value gets that of
    `fill_value`. A user's workload has no image axes, and its own name as model.

    ``blocks`` map axes, and `MICRO_BATCH`, to values. ``find`` gets the other settings and ``auto``
    or ``32..auto``, and returns the batch sizes. ``asked`` are the axes, by default all of the
    blocks, that must apply to some case if any of their values is not the default. Raises
    UsageError: settings do not go together, or an axis that is asked for applies to no case.
    """
    families: list[Case] = []

    def note(family: Case, text: str) -> Sequence[int]:
        families.append(family)
        return find(family, text)

    cases = list(dict.fromkeys(case for block in blocks for case in _expand(block, note)))
    for name, axis in AXES.items():
        given = {value for block in blocks for value in block.get(name, ())} - {axis.default}
        if not given or (asked is not None and name not in asked):
            continue
        having: Sequence[Case] = [*cases, *families]
        if any(case.command is not None for case in having):
            continue  # what applies there is the command's own matter
        for rule in axis.applies:
            having = [case for case in having if rule.holds(case)]
            if not having:
                raise UsageError(f"{axis_flag(name)} is given, but {rule.lack}; add {rule.mend}")
    return cases


def _expand(
    axes: Mapping[str, Sequence[Value]], find: Callable[[Case, str], Sequence[int]]
) -> Iterator[Case]:
    axes = dict(axes)
    micro: Any = axes.pop(MICRO_BATCH, [None])
    if micro != [None] and "accumulate" in axes:
        raise UsageError("--micro-batch and --accumulate are both given; use one")
    chosen: Sequence[Any] = axes.pop("batch_size", [])
    if any(text is not None for text in axes.get("command", ())):
        _refuse_for_command(axes, chosen)
        chosen = chosen or [0]
    chosen = chosen or [Case.batch_size]
    names = list(AXES)
    order = sorted(axes, key=names.index)
    at_size, at_made = names.index("batch_size"), names.index("accumulate")
    for limit, *values in product(micro, *(axes[name] for name in order)):
        family = _settle(dict(zip(order, values, strict=True)))
        checked, settled = set[int](), [*list_values(family)]
        for size in chosen:
            sizes = [size]
            if isinstance(size, str):
                if limit is not None:
                    raise UsageError(
                        f"--batch-size {size} and --micro-batch are both given: in micro-batches "
                        "of one size every batch fits; give batch sizes as numbers"
                    )
                least = replace(family, batch_size=Case.batch_size * family.accumulate)
                check_axes(least)
                found = find(least, size)
                sizes = [n for n in found if go_together(replace(least, batch_size=n))]
            for number in sizes:
                made = family.accumulate if limit is None else -(-number // limit)
                settled[at_size], settled[at_made] = number, made
                case = make_case(*settled)
                check_division(case)
                if made not in checked:  # saves most checks of 10,000 cases
                    check_settings(case)
                    checked.add(made)
                yield case


def _settle(settings: Mapping[str, Any]) -> Case:
    """Return the case with these settings, each where it applies."""
    case = Case(**settings)
    if case.command is not None:
        return _settle_command(case)
    if case.workload != IMAGES:
        ours = {name: AXES[name].default for name in list_affecting(Trait.DATA)}
        case = replace(case, **ours | {"model": case.workload, "dataset": OWN})
    for name, axis in AXES.items():
        value = getattr(case, name)
        if not axis.holds(case):
            value = axis.default
        elif axis.fill and settings.get(name) is None:
            value = axis.fill(case)
        if value != getattr(case, name):
            case = replace(case, **{name: value})
    return case


def _refuse_for_command(axes: Mapping[str, Sequence[Any]], sizes: Sequence[Any]) -> None:
    """Refuse settings that a command has no placeholder for. Raises UsageError."""
    given = [*axes, *["batch_size"] * bool(sizes)]
    for command in axes["command"]:
        if command is None:
            raise UsageError("--command none beside a command: give them in sweeps of their own")
        for vary in axes.get("vary", [None]):
            if why := refuse_places(command, given, [*read_vary(vary)], [*AXES]):
                raise UsageError(f"--command: {why}")
    if any(isinstance(size, str) for size in sizes):
        raise UsageError(
            "--batch-size auto: the largest batch is looked for in steps of the harness's own, and "
            "a command takes as many as it likes; give numbers, such as 32..1024"
        )


def _settle_command(case: Case) -> Case:
    """Return a command's case: what it has no placeholder for is its own choice."""
    assert case.command is not None
    placed = {place.name for place in list_places(case.command)}
    own: dict[str, Any] = {"precision": OWN, "batch_size": 0, "optimizer": OWN}
    settled = {
        name: own.get(name, axis.default)
        for name, axis in AXES.items()
        if name not in (*BESIDE_COMMAND, *placed)
    }
    settled |= {"workload": COMMAND, "dataset": OWN}
    if "model" not in placed:
        settled["model"] = name_command(case.command)
    return replace(case, **settled)


def go_together(case: Case) -> bool:
    try:
        check_axes(case)
    except UsageError:
        return False
    return True


def check_axes(case: Case) -> None:
    """Refuse settings that do not go together. Raises UsageError: it says what to leave out."""
    check_division(case)
    check_settings(case)


def check_division(case: Case) -> None:
    """Refuse a batch that cannot be divided into equal micro-batches. Raises UsageError."""
    if case.command is not None:
        return
    if case.accumulate > case.batch_size:
        raise UsageError(
            f"a batch of {case.batch_size} cannot be computed in {case.accumulate} micro-batches; "
            "lower --accumulate"
        )
    made = -(-case.batch_size // micro_batch(case))
    if made != case.accumulate:
        # the number needed for micro-batches of one size always works
        smaller = micro_batch(case) - 1
        works = [made, *([-(-case.batch_size // smaller)] if smaller > 1 else [])]
        raise UsageError(
            f"a batch of {case.batch_size} cannot be computed in {case.accumulate} micro-batches, "
            f"all but the last of one size; give --accumulate {' or '.join(map(str, works))}"
        )


def check_settings(case: Case) -> None:
    """Refuse settings that do not go together at any batch size. What a command makes of its
    placeholders is its own matter. Raises UsageError."""
    if case.command is not None:
        fill_command(case)
        return
    if why := next(_find_conflicts(case), ""):
        raise UsageError(why)


def _find_conflicts(case: Case) -> Iterator[str]:
    parts = list_affecting(Trait.PART)
    if case.epochs > 1 and any(getattr(case, name) != AXES[name].default for name in parts):
        flags = join_words([*map(axis_flag, parts)])
        yield f"--epochs {case.epochs} trains whole epochs; leave out {flags}"
    for name, axis in AXES.items():
        if axis.applies and (value := getattr(case, name)) != axis.default:
            flag = axis_flag(name)
            for rule in (rule for rule in axis.applies if not rule.holds(case)):
                text = f"{flag} {format_value(value)}: {rule.lack}"
                yield f"{text}; give {rule.mend}, or leave out {flag}"
    for axis in AXES.values():
        for conflict in axis.conflicts:
            if conflict.holds(case):
                yield conflict.why.format(case=case)
    for name, axis in AXES.items():
        for other, values in axis.beside.items():
            if getattr(case, name) != axis.default and (held := getattr(case, other)) in values:
                text = f"{axis_flag(name)} {format_value(getattr(case, name))}"
                there = f"{axis_flag(other)} {format_value(held)}"
                yield f"{text} with {there} is not measured; leave out one"


def check_batches(case: Case, train_images: int, batchnorm: bool = True) -> None:
    """Refuse a batch size or warm-up that does not fit this number of training images, or items.

    A command makes its own batches. Raises UsageError: the batch is larger than the dataset; a
    batch, a micro-batch or a GPU's share of one holds one image, and there may be BatchNorm, which
    needs two; or the learning rate's warm-up is longer than the training.
    """
    if case.command is not None:
        return
    item = "image" if case.workload == IMAGES else "item"
    whole = whole_batch(case)
    if case.world_size > 1:
        if why := _refuse_shares(case, train_images, batchnorm):
            near = (case.batch_size + sign * by for by in range(1, 100) for sign in (-1, 1))
            others = (replace(case, batch_size=n) for n in near if n >= case.accumulate)
            for other in filter(go_together, others):
                if not _refuse_shares(other, train_images, batchnorm):
                    raise UsageError(f"{why}; {other.batch_size} should work")
            raise UsageError(why)
        count_warmup_steps(case.lr_warmup, case.epochs * math.ceil(train_images / whole))
        return
    if case.batch_size > train_images:
        raise UsageError(
            f"batch size {case.batch_size} is above the dataset's {train_images} {item}s; "
            f"use at most {train_images}"
        )
    last, size = train_images % case.batch_size, micro_batch(case)
    if batchnorm and case.batch_size == 1:
        raise UsageError(
            f"batch size 1 is one {item}, and BatchNorm needs two; use at least 2, or a network "
            "without BatchNorm"
        )
    if batchnorm and last == 1:
        raise UsageError(
            f"batch size {case.batch_size} leaves a last batch of one {item} of {train_images}, "
            f"and BatchNorm needs two; {case.batch_size - 1} or {case.batch_size + 1} should work"
        )
    for items, what in ((case.batch_size, "batch"), (last, "last batch")):
        if batchnorm and items and (size == 1 or items % size == 1):
            raise UsageError(
                f"--accumulate {case.accumulate} leaves a micro-batch of one {item} in a {what} of "
                f"{items}, and BatchNorm needs two; choose another number"
            )
    count_warmup_steps(case.lr_warmup, case.epochs * math.ceil(train_images / case.batch_size))


def _refuse_shares(case: Case, train_images: int, batchnorm: bool) -> str:
    """Return why the images cannot be divided over several GPUs; empty if they can."""
    item = "image" if case.workload == IMAGES else "item"
    where = "GPUs" if case.device == "cuda" else "processes"
    whole = whole_batch(case)
    each = f"batch size {case.batch_size} on each of {case.world_size} {where}"
    if whole > train_images:
        return (
            f"{each} is {whole} {item}s a step, above the dataset's {train_images}; use at most "
            f"{train_images // case.world_size}"
        )
    last, size = divide_items(case, train_images % whole), micro_batch(case)
    if not batchnorm:
        return ""
    if case.sync_bn:
        # each SyncBatchNorm waits for the same layer on all other GPUs
        counts = {math.ceil(items / size) for items in last}
        if any(last) and (0 in last or len(counts) > 1):
            return (
                f"{each} leaves a last batch of {sum(last)} {item}s, which not all of them compute "
                "in as many micro-batches, and --sync-bn needs that"
            )
        return ""
    for items in (case.batch_size, *last):
        if items and (items == 1 or size == 1 or items % size == 1):
            part = "micro-batch" if case.accumulate > 1 and items > 1 else "batch"
            return f"{each} leaves one of them a {part} of one {item}, and BatchNorm needs two"
    return ""
