"""The rules of axes, from top to bottom: where each applies, which settings go together in a case,
and which batches its data can be divided into."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from bench.axis import OWN_GRAPHS, Value, axis_flag
from bench.case import (
    AXES,
    FOLLOWS,
    PARTS,
    SHAPE,
    Case,
    default_lr,
    divide_items,
    fill_command,
    format_value,
    micro_batch,
    whole_batch,
)
from bench.command import BESIDE_COMMAND, list_places, name_command
from bench.data import SYNTHETIC
from bench.errors import UsageError
from bench.optimization import count_warmup_steps
from bench.precision import PRECISIONS, is_dynamic
from bench.text import join_words
from bench.workloads import COMMAND, IMAGES, OWN

_SCALING, _APEX, _FLOAT8 = (
    f"--precision {' or '.join(p.name for p in PRECISIONS.values() if getattr(p, what))}"
    for what in ("scales_loss", "apex", "float8")
)
_OF_DDP = ("grad_compression", "sync_bn")


def list_lacks(case: Case) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yield the axes that do not apply to a case, why, and the flag with which they would."""
    precision = PRECISIONS[case.precision]
    if not precision.scales_loss:
        yield ("loss_scale",), "none of the precisions measured scales a loss", _SCALING
    if not precision.apex:
        yield ("opt_level",), "none of the precisions measured is trained by apex", _APEX
    if not precision.float8:
        yield ("fp8_recipe",), "none of the precisions measured rounds to fp8", _FLOAT8
    if case.workload != IMAGES:
        yield SHAPE, "a workload brings its own images", f"--workload {IMAGES}"
    if case.dataset != SYNTHETIC:
        yield SHAPE, "it is for synthetic images", f"--dataset {SYNTHETIC}"
    if case.lr_scaling == "none":
        yield ("base_batch",), "no learning rate is scaled by it", "--lr-scaling linear or sqrt"
    if case.loader == "device":
        yield ("workers",), "the device makes all batches", "--loader torch"
    if case.parallel == "none":
        yield FOLLOWS["parallel"], "it is of training on several GPUs", "--parallel ddp"
    if case.parallel != "ddp":
        yield _OF_DDP, "it is of DistributedDataParallel", "--parallel ddp"


def applies(axis: str, case: Case) -> bool:
    return not any(axis in axes for axes, _, _ in list_lacks(case))


def fill_value(axis: str, case: Case) -> Value:
    """Return the value of an axis that applies to ``case`` and has no value given."""
    if axis == "loss_scale":
        return PRECISIONS[case.precision].default_loss_scale
    if axis == "lr":
        return default_lr(case.optimizer)
    return AXES[axis].default  # type: ignore[no-any-return]


def settle(settings: Mapping[str, Any]) -> Case:
    """Return the case with these settings, by axis, each where it applies. What is not given, or
    does not apply, has its default.

    A user's workload has its own name as model; what a command has no placeholder for is its own
    choice.
    """
    case = Case(**settings)
    if case.command is not None:
        kept = {*BESIDE_COMMAND, *(place.name for place in list_places(case.command))}
        own: dict[str, Any] = {"precision": OWN, "batch_size": 0, "optimizer": OWN}
        own["model"] = name_command(case.command)
        changes = {name: own.get(name, AXES[name].default) for name in AXES if name not in kept}
        return replace(case, **changes | {"workload": COMMAND, "dataset": OWN})
    filled = [name for name in ("loss_scale", "lr") if settings.get(name) is None]
    changes = {name: fill_value(name, case) for name in filled}
    changes |= {name: AXES[name].default for axes, _, _ in list_lacks(case) for name in axes}
    if case.workload != IMAGES:
        changes |= {"model": case.workload, "dataset": OWN}
    return replace(case, **changes)


_UNMEASURED: tuple[tuple[str, str, tuple[Value, ...]], ...] = (
    ("accumulate", "parallel", ("dp",)),
    ("accumulate", "cuda_graphs", (True,)),
    ("memory_limit", "parallel", ("dp",)),
    ("until", "parallel", ("ddp",)),
    ("checkpoint", "parallel", ("ddp", "dp")),
    ("checkpoint", "cuda_graphs", (True,)),
    ("profile", "parallel", ("ddp", "dp")),
    ("profile", "cuda_graphs", (True,)),
    ("compile", "parallel", ("dp",)),
    ("cuda_graphs", "compile", OWN_GRAPHS),
    ("cuda_graphs", "precision", tuple(p.name for p in PRECISIONS.values() if p.apex or p.float8)),
    ("parallel", "cuda_graphs", (True,)),
)
"""Axes that are not measured, but at their defaults, with some values of another."""


def check(case: Case) -> None:
    """Refuse settings that do not go together. What a command makes of its placeholders is its own
    matter. Raises UsageError: it says what to give instead, or to leave out."""
    if case.command is not None:
        fill_command(case)
    elif why := next(_list_conflicts(case), ""):
        raise UsageError(why)


def go_together(case: Case) -> bool:
    """Return whether `check` takes a case that is not a command's."""
    return not any(_list_conflicts(case))


def _list_conflicts(case: Case) -> Iterator[str]:
    precision, on_cpu = PRECISIONS[case.precision], case.device == "cpu"
    if case.accumulate > case.batch_size:
        yield (
            f"a batch of {case.batch_size} cannot be computed in {case.accumulate} micro-batches; "
            "lower --accumulate"
        )
    made = -(-case.batch_size // micro_batch(case))
    if made != case.accumulate:
        # the number needed for micro-batches of one size always works
        smaller = micro_batch(case) - 1
        works = [made, *([-(-case.batch_size // smaller)] if smaller > 1 else [])]
        yield (
            f"a batch of {case.batch_size} cannot be computed in {case.accumulate} micro-batches, "
            f"all but the last of one size; give --accumulate {' or '.join(map(str, works))}"
        )
    if case.epochs > 1 and any(getattr(case, name) != AXES[name].default for name in PARTS):
        flags = join_words([*map(axis_flag, PARTS)])
        yield f"--epochs {case.epochs} trains whole epochs; leave out {flags}"
    if case.dataset == OWN and case.workload == IMAGES:
        yield f"--dataset {OWN} is that of a --workload; give one, or another dataset"
    if case.precision == OWN:
        yield f"--precision {OWN} is that of a --command; give another, or leave it out"
    if case.precision == "fp16-pure" and case.optimizer == "adamw":
        yield (
            "--precision fp16-pure with --optimizer adamw diverges: squares of gradients flush to "
            "zero in fp16; give --optimizer sgd, or --precision bf16-pure"
        )
    if case.precision == "fp16-pure" and is_dynamic(case.loss_scale):
        yield (
            f"--precision fp16-pure with --loss-scale {case.loss_scale}: torch's GradScaler "
            "unscales no fp16 gradients; give a number, such as 128"
        )
    if case.accumulate > 1 and case.own_graphs:  # pytorch issue 169545
        yield (
            f"--accumulate {case.accumulate} with --compile {case.compile} fails in torch: its "
            "graphs write over the gradients that are summed; give --compile default"
        )
    if case.optimizer == OWN and case.workload == IMAGES:
        yield f"--optimizer {OWN} is that of a --workload; give one, or leave it out"
    if case.optimizer != "sgd" and precision.apex:
        yield f"--precision {case.precision} trains with SGD only; give --optimizer sgd"
    if case.schedule == "onecycle" and case.lr_warmup != "0":
        yield "--schedule onecycle has its own warm-up; leave out --lr-warmup"
    if case.cuda_graphs and on_cpu:
        yield "--cuda-graphs with --device cpu cannot be: a CPU has none; leave it out"
    if case.cuda_graphs and is_dynamic(case.loss_scale):
        yield (
            f"--cuda-graphs with --loss-scale {case.loss_scale} cannot be, because that scale is "
            "kept on the host; give one such as 128"
        )
    if case.cuda_graphs and case.optimizer in (OWN, "lars"):
        yield (
            f"--cuda-graphs with --optimizer {case.optimizer} cannot be: torch captures fused "
            "steps; give sgd or adamw"
        )
    if case.workload == COMMAND:
        yield f"--workload {COMMAND} is that of a --command; give --command 'python train.py …'"
    if case.parallel == "dp" and on_cpu:
        yield "--parallel dp needs GPUs; on a CPU, --parallel ddp trains in processes"
    if case.parallel != "none" and precision.apex:
        yield (
            f"--precision {case.precision} trains on one GPU; leave out --parallel {case.parallel}"
        )
    if case.parallel == "dp" and precision.float8:
        yield "--precision fp8 with --parallel dp is not measured; give --parallel ddp"
    if case.sync_bn and on_cpu:
        yield "--sync-bn needs GPUs, as torch's SyncBatchNorm does; leave it out"
    for axis, other, values in _UNMEASURED:
        value, held = getattr(case, axis), getattr(case, other)
        if value != AXES[axis].default and held in values:
            there = f"{axis_flag(other)} {format_value(held)}"
            yield (
                f"{axis_flag(axis)} {format_value(value)} with {there} is not measured; leave out "
                "one"
            )


def check_batches(case: Case, train_images: int, batchnorm: bool = True) -> None:
    """Refuse a batch size or warm-up that does not fit this number of training images, or items.

    A command makes its own batches. Raises UsageError: the batch is larger than the dataset; a
    batch, a micro-batch or a GPU's share of one holds one image, and there may be BatchNorm, which
    needs two; or the learning rate's warm-up is longer than the training.
    """
    if case.command is not None:
        return
    most = train_images // case.world_size
    item = "image" if case.workload == IMAGES else "item"
    batch = f"batch size {case.batch_size}"
    if case.world_size > 1:
        batch += f" on each of {case.world_size} {'GPUs' if case.device == 'cuda' else 'processes'}"
    if case.batch_size > most:
        raise UsageError(
            f"{batch} is above the dataset's {train_images} {item}s; use at most {most}"
        )
    if batchnorm and (why := _find_uneven(case, train_images)):
        near = (case.batch_size + sign * by for by in range(1, 100) for sign in (-1, 1))
        others = (replace(case, batch_size=n) for n in near if case.accumulate <= n <= most)
        for other in filter(go_together, others):
            if not _find_uneven(other, train_images):
                raise UsageError(f"{batch} leaves {why}; {other.batch_size} should work")
        raise UsageError(f"{batch} leaves {why}; give another")
    steps = math.ceil(train_images / whole_batch(case))
    count_warmup_steps(case.lr_warmup, case.epochs * steps)


def _find_uneven(case: Case, train_images: int) -> str:
    """Return what of the batches of a GPU BatchNorm cannot take; empty if it can take all."""
    item = "image" if case.workload == IMAGES else "item"
    last, size = divide_items(case, train_images % whole_batch(case)), micro_batch(case)
    if case.sync_bn and case.world_size > 1:
        # each SyncBatchNorm waits for the same layer on all other GPUs
        counts = {math.ceil(items / size) for items in last}
        if any(last) and (0 in last or len(counts) > 1):
            return (
                f"a last batch of {sum(last)} {item}s, which not all of them compute in as many "
                "micro-batches, and --sync-bn needs that"
            )
        return ""
    for items, what in ((case.batch_size, "batch"), *((items, "last batch") for items in last)):
        if items == 1:
            return f"a {what} of one {item}, and BatchNorm needs two"
        if items and (size == 1 or items % size == 1):
            return f"a micro-batch of one {item}, and BatchNorm needs two"
    return ""
