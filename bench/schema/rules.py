"""The rules of axes, from top to bottom: where each applies, which settings go together in a case,
and which batches its data can be divided into."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from bench.base.errors import UsageError
from bench.base.text import count
from bench.networks.data import SYNTHETIC
from bench.networks.models import LENGTHS, USUAL_LRS
from bench.networks.workloads import COMMAND, IMAGES, OWN
from bench.schema.axis import OWN_GRAPHS, Value, axis_flag, is_own, read_budget, refuse_scale
from bench.schema.case import (
    AXES,
    FOLLOWS,
    PARTS,
    SAME_QUESTION,
    SYNTHETIC_AXES,
    Case,
    default_lr,
    divide_items,
    fill_command,
    format_value,
    micro_batch,
    whole_batch,
)
from bench.schema.command import BESIDE_COMMAND, list_places, name_command
from bench.schema.optimization import OFFLOADED, OPTIMIZERS, UNFUSED, count_warmup_steps
from bench.schema.precision import POLICIES, PRECISIONS

_SCALING, _APEX, _FLOAT8 = (
    f"--precision {' or '.join(p.name for p in PRECISIONS.values() if getattr(p, what))}"
    for what in ("scales_loss", "apex", "float8")
)

Lack = tuple[tuple[str, ...], str, str]
"""Axes that do not apply to a case, why, and the flag with which they would."""

_APPLY: tuple[tuple[Callable[[Case], bool], Lack], ...] = (
    (
        lambda case: PRECISIONS[case.precision].scales_loss,
        (("loss_scale",), "none of the precisions measured scales a loss", _SCALING),
    ),
    (
        lambda case: PRECISIONS[case.precision].apex,
        (("opt_level",), "none of the precisions measured is trained by apex", _APEX),
    ),
    (
        lambda case: PRECISIONS[case.precision].float8,
        (("fp8_recipe",), "none of the precisions measured rounds to fp8", _FLOAT8),
    ),
    (
        lambda case: case.workload == IMAGES,
        (SYNTHETIC_AXES, "a workload brings its own images", f"--workload {IMAGES}"),
    ),
    (
        lambda case: case.workload != IMAGES,
        (("length",), "images are no sequences", "--model gpt-small, or a --workload of sequences"),
    ),
    (
        lambda case: case.dataset == SYNTHETIC,
        (SYNTHETIC_AXES, "it is for synthetic images", f"--dataset {SYNTHETIC}"),
    ),
    (
        lambda case: case.lr_scaling != "none",
        (("base_batch",), "no learning rate is scaled by it", "--lr-scaling linear or sqrt"),
    ),
    (
        lambda case: case.compiled,
        (FOLLOWS["compile"], "nothing is compiled", "--compile on"),
    ),
    (
        lambda case: case.loader != "device",
        (("workers",), "the device makes all batches", "--loader torch"),
    ),
    (
        lambda case: case.parallel != "none",
        (FOLLOWS["parallel"], "it is of training on several GPUs", "--parallel ddp"),
    ),
    (
        lambda case: case.grouped,
        (("grad_compression", "sync_bn"), "it is of a process per GPU", "--parallel ddp"),
    ),
    (
        lambda case: case.command is not None,
        (("items",), "the harness knows its own", "--command 'python train.py …'"),
    ),
)
"""Where axes apply that do not apply everywhere."""


def list_lacks(case: Case) -> list[Lack]:
    """Return the axes that do not apply to a case."""
    return [lack for has, lack in _APPLY if not has(case)]


def applies(axis: str, case: Case) -> bool:
    if is_own(axis):
        return getattr(case, axis) is not None
    return not any(axis in axes for axes, *_ in list_lacks(case))


_OF_GPUS = ("cuda_graphs", "cudnn_benchmark", "sync_bn")
"""Axes that do nothing on a CPU, or cannot be."""

_FLAG = re.compile(r"--([a-z][a-z-]*)(?: ([\w.]+))?")


def takes(case: Case, advice: str) -> bool:
    """Return whether a case can have what advice on it says: the axis of each flag in it, with the
    value after the flag if that is one and is not what the case has.

    >>> takes(settle({"device": "cpu"}), "--cuda-graphs on"), takes(settle({}), "a larger --lr")
    (False, True)
    """
    return all(_takes(case, flag.replace("-", "_"), word) for flag, word in _FLAG.findall(advice))


def _takes(case: Case, axis: str, word: str) -> bool:
    if axis not in AXES:
        return True
    if case.command is not None:
        return axis in BESIDE_COMMAND or axis in list_places(case.command)
    if case.workload != IMAGES and axis in ("model", "dataset"):
        return False
    if not applies(axis, case) or (axis in _OF_GPUS and case.device == "cpu"):
        return False
    try:
        value = AXES[axis].parse(word)
    except ValueError:  # a word of the sentence
        return True
    # how it was measured can be left out
    plain = {name: AXES[name].default for name in SAME_QUESTION}
    return value != getattr(case, axis) and go_together(replace(case, **plain | {axis: value}))


def settle(settings: Mapping[str, Any]) -> Case:
    """Return the case with these settings, by axis, each where it applies. What is not given, or
    does not apply, has its default.

    A workload has its own name as model, and one of the harness's own is trained on synthetic
    sequences, by AdamW unless an optimizer is given; what a command has no placeholder for is its
    own choice.
    """
    case = Case(**settings)
    if case.workload == IMAGES and case.model in LENGTHS:
        case = replace(case, workload=case.model)
    if case.command is not None:
        kept = {*BESIDE_COMMAND, *list_places(case.command)}
        own: dict[str, Any] = {"precision": OWN, "batch_size": 0, "optimizer": OWN}
        own["model"] = name_command(case.command)
        changes = {name: own.get(name, AXES[name].default) for name in AXES if name not in kept}
        return replace(case, **changes | {"workload": COMMAND, "dataset": OWN})
    usual: dict[str, Any] = {"loss_scale": PRECISIONS[case.precision].default_loss_scale}
    built_in = case.workload in LENGTHS
    if built_in:
        usual |= {"length": LENGTHS[case.workload], "optimizer": "adamw"}
    optimizer = settings.get("optimizer") or usual.get("optimizer", case.optimizer)
    usual["lr"] = default_lr(optimizer)
    if optimizer == "adamw":
        usual["lr"] = USUAL_LRS.get(case.workload, usual["lr"])
    changes = {name: value for name, value in usual.items() if settings.get(name) is None}
    changes |= {name: AXES[name].default for axes, *_ in list_lacks(case) for name in axes}
    if case.workload != IMAGES:
        changes |= {"model": case.workload, "dataset": SYNTHETIC if built_in else OWN}
    return replace(case, **changes)


_UNMEASURED = "is not measured"
_UNPROVEN = "is not proven to train the same: that takes GPUs"
_SENT = "cannot be: it sends gradients to the host before they are unscaled, clipped or averaged"
_APEXES, _FLOAT8S = (
    tuple(p.name for p in PRECISIONS.values() if getattr(p, what)) for what in ("apex", "float8")
)
Values = tuple[Value, ...] | None  # None: any but the default

_ONE_NETWORK = ("accumulate", "compile", "memory_limit", "recompute")
"""Axes of a network that trains whole, which is not copied to other GPUs in each step."""

_APART: tuple[tuple[str, Values, str, Values, str], ...] = (
    ("accumulate", None, "cuda_graphs", (True,), _UNMEASURED),
    ("checkpoint", None, "parallel", None, "cannot be: a checkpoint is of one process"),
    ("checkpoint", None, "cuda_graphs", (True,), _UNMEASURED),
    (
        *("profile", None, "parallel", None),
        "cannot be: a profile is of one process, and does not show what it waits for",
    ),
    ("profile", None, "cuda_graphs", (True,), _UNMEASURED),
    ("cuda_graphs", None, "compile", OWN_GRAPHS, _UNMEASURED),
    ("cuda_graphs", None, "precision", (*_APEXES, *_FLOAT8S), _UNMEASURED),
    ("parallel", None, "cuda_graphs", (True,), _UNMEASURED),
    ("parallel", ("dp",), "device", ("cpu",), "cannot be: torch's DataParallel needs GPUs"),
    *(("parallel", ("dp",), name, None, _UNMEASURED) for name in _ONE_NETWORK),
    (
        # torch keeps what cuDNN found by thread (pull request 103939), and DataParallel starts new
        # threads for each forward pass
        *("parallel", ("dp",), "cudnn_benchmark", (True,)),
        "would time cuDNN's algorithms again in every step",
    ),
    ("parallel", ("fsdp", "dp"), "precision", _FLOAT8S, _UNPROVEN),
    ("parallel", ("fsdp",), "compile", OWN_GRAPHS, _UNPROVEN),
    ("parallel", ("fsdp",), "sync_bn", (True,), _UNPROVEN),
    (
        *("parallel", ("fsdp",), "optimizer", ("adafactor",)),
        "cannot be: torch's fails on weights that are sharded",
    ),
    (
        *("parallel", ("fsdp",), "optimizer", ("muon",)),
        "is not measured: its step exchanges weights too, which is not counted",
    ),
    (
        # all but those proven by tests/training/test_sharding.py, or with a reason of their own
        *("parallel", ("fsdp",), "optimizer"),
        tuple({*OPTIMIZERS} - {"sgd", "adam", "adamw", "adafactor", "muon", OFFLOADED}),
        _UNMEASURED,
    ),
    ("recompute", None, "cuda_graphs", (True,), _UNMEASURED),
    ("recompute", None, "precision", _APEXES, _UNMEASURED),
    ("recompute", None, "sync_bn", (True,), _UNMEASURED),
    *(("epochs", None, name, None, "is of whole epochs") for name in PARTS),
    ("loader", ("torch",), "model", tuple(LENGTHS), "cannot be: its texts are drawn on the device"),
    ("dataset", (OWN,), "workload", (IMAGES,), "is that of a --workload of your own"),
    ("optimizer", (OWN,), "workload", (IMAGES,), "is that of a --workload of your own"),
    (
        *("precision", ("fp16-pure",), "optimizer", tuple({*OPTIMIZERS} - {"sgd"})),
        "diverges: squares of gradients flush to zero in fp16",
    ),
    (
        *("precision", ("fp16-pure",), "loss_scale", tuple(POLICIES)),
        "cannot be: torch's GradScaler unscales no fp16 gradients",
    ),
    ("precision", _APEXES, "optimizer", None, "cannot be: apex trains with SGD only"),
    ("precision", _APEXES, "parallel", None, "cannot be: apex trains on one GPU"),
    ("schedule", ("onecycle",), "lr_warmup", None, "has two warm-ups"),
    ("cuda_graphs", None, "device", ("cpu",), "cannot be: a CPU has none"),
    (
        *("cuda_graphs", None, "loss_scale", tuple(POLICIES)),
        "cannot be, because that scale is kept on the host",
    ),
    (
        *("cuda_graphs", None, "optimizer", (OWN, *UNFUSED)),
        "cannot be: torch captures fused steps",
    ),
    *(
        (*("optimizer", (OFFLOADED,), axis, values), _SENT)
        for axis, values in (
            ("precision", tuple(n for n, p in PRECISIONS.items() if p.casts or p.scales_loss)),
            ("clip_grad", None),
            ("parallel", None),
        )
    ),
    ("sync_bn", None, "device", ("cpu",), "needs GPUs, as torch's SyncBatchNorm does"),
)
"""Values of two axes that do not go together, and why."""


def check(case: Case) -> None:
    """Refuse settings that do not go together. What a command makes of its placeholders is its own
    matter. Raises UsageError: it says what to give instead, or to leave out."""
    if case.power_limit is not None and case.device == "cpu":
        raise UsageError("--power-limit is of a GPU; give --device cuda, or leave it out")
    if case.command is not None:
        fill_command(case)
        if case.profile and case.steps is None:
            raise UsageError(
                "--profile is of steps of a --command after the measured ones, of which --steps "
                "says how many: give --steps 40, or leave out --profile"
            )
    elif why := next(_list_conflicts(case), ""):
        raise UsageError(why)


def go_together(case: Case) -> bool:
    """Return whether the settings of a case go together, as all of a command do that has words for
    them."""
    return case.command is not None or not any(_list_conflicts(case))


def _list_conflicts(case: Case) -> Iterator[str]:
    # the number needed for micro-batches of one size always works
    made = -(-case.batch_size // micro_batch(case))
    if made != case.accumulate:
        yield (
            f"a batch of {case.batch_size} cannot be computed in {case.accumulate} micro-batches, "
            f"all but the last of one size; give --accumulate {made}"
        )
    if isinstance(case.loss_scale, float) and (why := refuse_scale(case.loss_scale)):
        yield f"--loss-scale {format_value(case.loss_scale)}: {why}"
    if case.precision == OWN:
        yield f"--precision {OWN} is that of a --command; give another, or leave it out"
    if case.accumulate > 1 and case.own_graphs:  # pytorch issue 169545
        yield (
            f"--accumulate {case.accumulate} with --compile {case.compile} fails in torch: its "
            "graphs write over the gradients that are summed; give --compile default"
        )
    if read_budget(case.recompute) is not None and not case.compiled:
        yield (
            f"--recompute {case.recompute} is a budget of torch.compile; give --compile too, or "
            "--recompute blocks"
        )
    if case.workload == COMMAND:
        yield f"--workload {COMMAND} is that of a --command; give --command 'python train.py …'"
    for axis, values, other, others, why in _APART:
        if _is_among(case, axis, values) and _is_among(case, other, others):
            one, two = (f"{axis_flag(n)} {format_value(getattr(case, n))}" for n in (axis, other))
            yield f"{one} with {two} {why}; leave out one"


def _is_among(case: Case, axis: str, values: Values) -> bool:
    value = getattr(case, axis)
    return value != AXES[axis].default if values is None else value in values


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
        fewer = "a lower --world-size" if train_images else "a lower --length"
        fix = f"use at most {most}" if most else f"give {fewer}"
        raise UsageError(f"{batch} is above the dataset's {train_images} {item}s; {fix}")
    if why := _find_apart(case, train_images):
        raise UsageError(f"{batch} leaves {why}; give another")
    if batchnorm and (why := _find_uneven(case, train_images)):
        raise UsageError(f"{batch} leaves {why}; give another")
    steps = math.ceil(train_images / whole_batch(case))
    count_warmup_steps(case.lr_warmup, case.epochs * steps)


def _find_apart(case: Case, train_images: int) -> str:
    """Return which batch some processes compute in other steps than others, where each waits for
    all in the forward pass too: at each SyncBatchNorm, or block of sharded weights. Else empty."""
    flag = "--sync-bn" if case.sync_bn else "--parallel fsdp"
    last = divide_items(case, train_images % whole_batch(case))
    counts = {math.ceil(items / micro_batch(case)) for items in last}
    if not (case.sync_bn or case.parallel == "fsdp") or len(counts) == 1:
        return ""
    item = "image" if case.workload == IMAGES else "item"
    return (
        f"a last batch of {count(sum(last), item)}, which not all of them compute in as many "
        f"micro-batches, and {flag} needs that"
    )


def _find_uneven(case: Case, train_images: int) -> str:
    """Return what of the batches of a GPU BatchNorm cannot take; empty if it can take all."""
    item = "image" if case.workload == IMAGES else "item"
    last, size = divide_items(case, train_images % whole_batch(case)), micro_batch(case)
    if case.sync_bn and case.world_size > 1:
        return ""
    for items, what in ((case.batch_size, "batch"), *((items, "last batch") for items in last)):
        if items == 1:
            return f"a {what} of one {item}, and BatchNorm needs two"
        if items and (size == 1 or items % size == 1):
            return f"a micro-batch of one {item}, and BatchNorm needs two"
    return ""
