"""A case holds the settings of one row of the results: every field is an axis.

An axis is described once, as a field of `Case`. That field gives the command-line flag, the preset
key, the CSV column and the asv parameter, and everything else in `bench.axis.Axis`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial
from hashlib import sha256
from operator import attrgetter
from typing import Any

from bench.axis import (
    COMPILES,
    GRAD_COMPRESSIONS,
    LOADERS,
    OWN_GRAPHS,
    PARALLELS,
    Axis,
    Condition,
    Conflict,
    Trait,
    Value,
    describe_axis,
    one_of,
    or_none,
    parse_batch_size,
    parse_classes,
    parse_compile,
    parse_input,
    parse_loss_scale,
    parse_lr_warmup,
    parse_memory_limit,
    parse_number,
    parse_opt_level,
    parse_seed,
    parse_steps,
    parse_switch,
    parse_until,
    parse_whole,
)
from bench.command import (
    fill_places,
    list_places,
    parse_command,
    parse_vary,
    read_vary,
)
from bench.data import DATASETS, SYNTHETIC
from bench.data.batches import Share
from bench.errors import UsageError
from bench.models import parse_model
from bench.models.freezing import NONE, parse_freeze
from bench.models.weights import parse_start
from bench.optimization import LR_SCALINGS, OPTIMIZERS, SCHEDULES
from bench.precision import FP8_RECIPES, PRECISIONS, is_dynamic
from bench.text import parse_bytes
from bench.workloads import COMMAND, IMAGES, OWN, parse_workload

DEVICES = ("cuda", "cpu")


def order_scale(text: str) -> tuple[float, str]:
    """Return a sort key for loss scales as CSV spells them: none, numbers ascending, dynamic."""
    try:
        return float(text or 0), ""
    except ValueError:
        return math.inf, text


def _need(attribute: str, lack: str) -> Condition:
    """Return the condition that the precision has an attribute."""
    names = [name for name, kind in PRECISIONS.items() if getattr(kind, attribute)]
    return Condition(
        lambda case: bool(getattr(PRECISIONS[case.precision], attribute)),
        "precision",
        f"none of the precisions measured {lack}",
        f"--precision {' or '.join(names)}",
    )


LEARNING, RATE, DATA, DRAWS, FIT, PROOF, WORK, FLOP, PART, FIRST, KERNELS, RECIPE = Trait


def _on_cpu(case: Any) -> bool:
    return bool(case.device == "cpu")


# fmt: off
_SCALES = _need("scales_loss", "scales a loss")
_LOADS = Condition(lambda case: case.loader != "device",
    "loader", "the device makes all batches", "--loader torch")
_IS_OURS = Condition(lambda case: case.workload == IMAGES,
    "workload", "a workload brings its own images", f"--workload {IMAGES}")
_IS_SYNTHETIC = Condition(lambda case: case.dataset == SYNTHETIC,
    "dataset", "it is for synthetic images", f"--dataset {SYNTHETIC}")
_IS_SCALED = Condition(lambda case: case.lr_scaling != "none",
    "lr_scaling", "no learning rate is scaled by it", "--lr-scaling linear or sqrt")
_TRAINS_TOGETHER = Condition(lambda case: case.parallel != "none",
    "parallel", "it is of training on several GPUs", "--parallel ddp")
_IS_DDP = Condition(lambda case: case.parallel == "ddp",
    "parallel", "it is of DistributedDataParallel", "--parallel ddp")

_FEW_STEPS = {"check": "it trains a few steps of whole batches, made on the device, all at --lr, "
    "of a whole network from scratch"}
_WHOLE_EPOCHS = {"search": "trials train whole epochs"}
_HOW_MUCH = {"advise": "it decides how much is measured"}
_OUR_IMAGES = "its images are of 3x32x32 or a --workload's, unlike those of bench.sweep"

_OF_SWEEPS = dict.fromkeys(("check", "search", "advise", "fit", "scales"),
    "only bench.sweep runs a command")

_later = partial(describe_axis, quiet=True)
_learning = partial(_later, affects=(LEARNING, RATE), absent=_FEW_STEPS)
_part = partial(describe_axis, measuring=True, affects=(PART,),
    absent=_FEW_STEPS | _HOW_MUCH | _WHOLE_EPOCHS)
_measuring = partial(describe_axis, measuring=True, affects=(), absent=_FEW_STEPS | _HOW_MUCH)
_synthetic = partial(describe_axis,
    affects=(LEARNING, DATA, FIT, PROOF, WORK, FLOP, FIRST),
    applies=(_IS_OURS, _IS_SYNTHETIC), absent=dict.fromkeys(("check", "scales"), _OUR_IMAGES))
_loading = partial(_later, follows="loader", applies=(_LOADS,), affects=(FIT,), absent=_FEW_STEPS)
_parallel = partial(_later, follows="parallel", applies=(_TRAINS_TOGETHER, _IS_DDP),
    absent={"search": "each trial trains on one GPU",
    "advise": "it advises on training on one GPU"})
# fmt: on


@dataclass(frozen=True)
class Case:
    """The settings of one measurement, hashable. `loss_scale` is None if the precision scales no
    loss, and `opt_level` if apex.amp does not train."""

    # fmt: off
    model: str = describe_axis("dpn92", parse_model,
        "network, by name, package.module:factory or timm:NAME", common=True, plain=True,
        affects=(LEARNING, FIT, PROOF, WORK, FLOP, FIRST))
    dataset: str = describe_axis("cifar10", one_of([*DATASETS, OWN]), "images to train on",
        common=True, plain=True, affects=(LEARNING, DATA, FIT, PROOF, WORK, FLOP, FIRST),
        conflicts=(Conflict(lambda case: case.dataset == OWN and case.workload == IMAGES,
            f"--dataset {OWN} is that of a --workload; give one, or another dataset"),))
    precision: str = describe_axis("fp32", one_of(PRECISIONS),
        "number formats; bench.sweep --list describes them", common=True, named=True, plain=True,
        baseline=True, order=list(PRECISIONS).index,
        conflicts=(Conflict(lambda case: case.precision == OWN,
            f"--precision {OWN} is that of a --command; give another, or leave it out"),
            Conflict(lambda case: case.precision == "fp16-pure" and case.optimizer == "adamw",
                "--precision fp16-pure with --optimizer adamw diverges: squares of gradients flush "
                "to zero in fp16; give --optimizer sgd, or --precision bf16-pure"),
            Conflict(lambda case: case.precision == "fp16-pure" and is_dynamic(case.loss_scale),
                "--precision fp16-pure with --loss-scale {case.loss_scale}: torch's GradScaler "
                "unscales no fp16 gradients; give a number, such as 128")))
    loss_scale: float | str | None = describe_axis(None, parse_loss_scale,
        "a number, or a rule of bench.sweep --list (default: 128, or dynamic)",
        common=True, named=True, number=True, affects=(LEARNING, FIT, WORK), follows="precision",
        applies=(_SCALES,),
        fill=lambda case: PRECISIONS[case.precision].default_loss_scale, order=order_scale)
    opt_level: str | None = describe_axis(None, parse_opt_level,
        "opt level of apex.amp, O0 to O3, for fp16-apex (default: none, its FP16_Optimizer)",
        follows="precision", applies=(_need("apex", "is trained by apex"),), order=str)
    fp8_recipe: str = _later("tensorwise", one_of(FP8_RECIPES),
        "how torchao scales tensors in fp8; bench.sweep --list describes them",
        follows="precision", applies=(_need("float8", "rounds to fp8"),),
        order=list(FP8_RECIPES).index)
    batch_size: int = describe_axis(128, parse_batch_size,
        "items (images) per step of the optimizer", common=True, named=True,
        affects=(LEARNING, FIT, FIRST))
    accumulate: int = _later(1, parse_whole("a number of micro-batches"),
        "micro-batches that a batch is divided into; their gradients are summed",
        affects=(DRAWS, FIT, WORK, FIRST), beside={"parallel": ("dp",), "cuda_graphs": (True,)},
        conflicts=(Conflict(  # pytorch issue 169545
            lambda case: case.accumulate > 1 and case.compile in OWN_GRAPHS and not _on_cpu(case),
            "--accumulate {case.accumulate} with --compile {case.compile} fails in torch: its "
            "graphs write over the gradients that are summed; give --compile default"),),
        absent=_FEW_STEPS)
    memory_limit: str | None = describe_axis(None, parse_memory_limit,
        "memory that the process may use, such as 21GiB, as on a smaller GPU (default: none)",
        affects=(FIT, PROOF, RECIPE), baseline=True,
        order=lambda text: parse_bytes(text) if text else math.inf,
        beside={"parallel": ("dp",)}, absent=_FEW_STEPS)
    lr: float = describe_axis(OPTIMIZERS["sgd"].lr, parse_number("a learning rate", 0),
        "learning rate (default: "
        + ", ".join(f"{kind.lr:g} for {name}" for name, kind in OPTIMIZERS.items()) + ")",
        common=True, affects=(LEARNING, RATE), follows="optimizer",
        fill=lambda case: default_lr(case.optimizer))
    optimizer: str = _later("sgd", one_of([*OPTIMIZERS, OWN]),
        "one of bench.sweep --list (default: sgd, or a --workload's own)", common=True,
        affects=(LEARNING, RATE, FIT, WORK), conflicts=(
            Conflict(lambda case: case.optimizer == OWN and case.workload == IMAGES,
                f"--optimizer {OWN} is that of a --workload; give one, or leave it out"),
            Conflict(lambda case: case.optimizer != "sgd" and PRECISIONS[case.precision].apex,
                "--precision {case.precision} trains with SGD only; give --optimizer sgd")))
    lr_scaling: str = _learning("none", one_of(LR_SCALINGS),
        "multiply the learning rate by batch size over --base-batch, or by its square root")
    base_batch: int = _learning(128, parse_whole("a batch size"),
        "batch size that the learning rate is given for", follows="lr_scaling",
        applies=(_IS_SCALED,))
    lr_warmup: str = _learning("0", parse_lr_warmup,
        "steps, or percent of all steps, over which the learning rate rises to its value",
        order=lambda text: (text.endswith("%"), float(text.removesuffix("%"))))
    schedule: str = _learning("constant", one_of(SCHEDULES),
        "learning-rate schedule; bench.sweep --list describes them",
        conflicts=(Conflict(lambda case: case.schedule == "onecycle" and case.lr_warmup != "0",
            "--schedule onecycle has its own warm-up; leave out --lr-warmup"),))
    clip_grad: float | None = _later(None, or_none(parse_number("a norm of gradients", 0)),
        "scale the gradients of a step, unscaled by the loss scale, down to this norm where theirs "
        "is larger (default: none)",
        affects=(LEARNING, WORK), baseline=True, order=lambda text: float(text or math.inf),
        absent={"check": "a clipped step would hide a summed loss, which it looks for"})
    epochs: int = _learning(1, parse_whole("a number of epochs"), "epochs to train, each measured",
        common=True, absent=_FEW_STEPS | _HOW_MUCH)
    fraction: float = _part(1.0, parse_number("a fraction", 0, 1),
        "part of the epoch to measure; the rest is extrapolated", common=True)
    steps: int | None = _part(None, parse_steps,
        "measure this many steps at most, after one of each batch shape", common=True,
        order=lambda text: int(text) if text else math.inf)
    until: float | None = _part(None, parse_until,
        "end a case once its epoch time is known within this share, such as 1%: the 95 % interval "
        "of its steps, drift included (default: measure all that --fraction and --steps allow)",
        beside={"parallel": ("ddp",)})
    evaluate: bool = _measuring(False, parse_switch,
        "measure loss and accuracy on the test images too")
    checkpoint: bool = _later(False, parse_switch,
        "save the training after each epoch: the last and the best are kept, and an interrupted "
        "case resumes", affects=(),
        beside={"parallel": ("ddp", "dp"), "cuda_graphs": (True,)},
        absent=_HOW_MUCH | {"search": "a trial that was interrupted begins anew"})
    profile: bool = _measuring(False, parse_switch,
        "run a few more steps under torch's profiler, to see where their time goes",
        quiet=True, common=True,
        beside={"parallel": ("ddp", "dp"), "cuda_graphs": (True,)},
        absent=_FEW_STEPS | _HOW_MUCH
        | {"search": "bench.sweep profiles the settings that were found"})
    cudnn_benchmark: bool = describe_axis(False, parse_switch,
        "let cuDNN time its algorithms during warm-up", affects=(FIT, PROOF), prepares="autotuning")
    compile: str = describe_axis("off", parse_compile,
        "mode of torch.compile; bench.sweep --list describes them", quiet=True,
        switch=True, common=True, affects=(FIT, PROOF, KERNELS), order=list(COMPILES).index,
        prepares="compiling", beside={"parallel": ("dp",)})
    cuda_graphs: bool = describe_axis(False, parse_switch,
        "capture a whole training step as a CUDA graph during warm-up, and replay it",
        affects=(FIT, PROOF, WORK, KERNELS), prepares="capturing",
        absent=_FEW_STEPS, beside={"compile": OWN_GRAPHS,
            "precision": tuple(p.name for p in PRECISIONS.values() if p.apex or p.float8)},
        conflicts=(
            Conflict(lambda case: case.cuda_graphs and _on_cpu(case),
                "--cuda-graphs with --device cpu cannot be: a CPU has none; leave it out"),
            Conflict(lambda case: case.cuda_graphs and is_dynamic(case.loss_scale),
                "--cuda-graphs with --loss-scale {case.loss_scale} cannot be, because that scale "
                "is kept on the host; give one such as 128"),
            Conflict(lambda case: case.cuda_graphs and case.optimizer in (OWN, "lars"),
                "--cuda-graphs with --optimizer {case.optimizer} cannot be: torch captures fused "
                "steps; give sgd or adamw")))
    channels_last: bool = describe_axis(False, parse_switch, "NHWC memory layout",
        affects=(FIT, PROOF, WORK, KERNELS))
    freeze: str = _later(NONE, parse_freeze,
        "weights that are not trained: backbone, bn, or layers by name; bench.sweep --list "
        "describes them",
        affects=(LEARNING, FIT, PROOF, WORK, FLOP, FIRST), baseline=True, absent=_FEW_STEPS)
    start: str | None = _later(None, parse_start,
        "file of weights to start from, .safetensors or written by torch.save (default: none)",
        affects=(LEARNING, PROOF, WORK, FIRST), baseline=True, absent=_FEW_STEPS)
    workload: str = _later(IMAGES, parse_workload,
        "what to train, package.module:factory, with its own network, data and loss (default: "
        "--model on the images of --dataset)", common=True,
        affects=(LEARNING, FIT, PROOF, WORK, FLOP, FIRST),
        conflicts=(Conflict(lambda case: case.workload == COMMAND,
            f"--workload {COMMAND} is that of a --command; give --command 'python train.py …'"),))
    command: str | None = _later(None, or_none(parse_command),
        "a script of your own instead, such as 'python train.py -b {batch_size}'", common=True,
        baseline=True, affects=(LEARNING, FIT, PROOF, WORK, FLOP, FIRST), absent=_OF_SWEEPS)
    vary: str | None = _later(None, or_none(parse_vary),
        "a placeholder of your own in --command, and its values: --vary lr 0.1 0.2; once for each",
        plain=True, baseline=True, order=str,
        affects=(LEARNING, FIT, PROOF, WORK, FLOP, FIRST), absent=_OF_SWEEPS)
    input: str | None = _synthetic(None, parse_input,
        "shape of synthetic images, such as 3x224x224 (default: the dataset's, 3x32x32)")
    classes: int | None = _synthetic(None, parse_classes,
        "classes of synthetic images, such as 1000 (default: the dataset's, 10)")
    loader: str = _loading("device", one_of(LOADERS),
        "where batches are made: on the device from data that stay there, or by torch's DataLoader "
        "on the CPU", follows="", applies=(), affects=(DRAWS, FIT, WORK))
    workers: int = _loading(0, parse_whole("a number of workers", least=0),
        "worker processes of --loader torch; 0, torch's default, loads in the training process")
    parallel: str = _parallel("none", one_of(PARALLELS),
        "train one network on several GPUs; bench.sweep --list describes how", follows="",
        applies=(), legacy=("dp",), baseline=True,
        beside={"cuda_graphs": (True,)},
        conflicts=(
            Conflict(lambda case: case.parallel == "dp" and _on_cpu(case),
                "--parallel dp needs GPUs; on a CPU, --parallel ddp trains in processes"),
            Conflict(lambda case: case.parallel != "none" and PRECISIONS[case.precision].apex,
                "--precision {case.precision} trains on one GPU; leave out --parallel "
                "{case.parallel}"),
            Conflict(lambda case: case.parallel == "dp" and PRECISIONS[case.precision].float8,
                "--precision fp8 with --parallel dp is not measured; give --parallel ddp")))
    world_size: int = _parallel(1, parse_whole("a number of GPUs"),
        "GPUs (on a CPU, processes) that train together; --batch-size is that of each",
        applies=(_TRAINS_TOGETHER,), affects=(LEARNING, FIT, PROOF, WORK, FIRST), kept=True)
    grad_compression: str = _parallel("none", one_of(GRAD_COMPRESSIONS),
        "with --parallel ddp, the number format in which gradients are exchanged (default: their "
        "own)", baseline=True, affects=(FIT, PROOF, WORK, RECIPE))
    sync_bn: bool = _parallel(False, parse_switch,
        "with --parallel ddp, BatchNorm over the batches of all GPUs",
        affects=(FIT, PROOF, WORK, FIRST, RECIPE), conflicts=(
            Conflict(lambda case: case.sync_bn and _on_cpu(case),
                "--sync-bn needs GPUs, as torch's SyncBatchNorm does; leave it out"),))
    seed: int = describe_axis(0, parse_seed, "seed of weights, order and augmentation", affects=(),
        spread=True)
    device: str = describe_axis("cuda", one_of(DEVICES),
        "where to train: cuda or cpu (default: cuda if there is one)", common=True, plain=True)
    # fmt: on

    @cached_property
    def _hash(self) -> int:
        return hash(list_values(self))  # 3 µs, and a sweep looks each of its runs up ten times

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Case], tuple[Value, ...]]:
        return Case, list_values(self)  # without the hash, which differs in another process

    @property
    def compiled(self) -> bool:
        return self.compile != Case.compile

    @property
    def own_graphs(self) -> bool:
        """Return whether torch.compile launches the network's kernels with its own CUDA graphs."""
        return self.compile in OWN_GRAPHS and self.device == "cuda"

    def label(self, axes: Iterable[str] | None = None) -> str:
        """Return a readable name by ``axes``, or `NAMED`: ``fp16 · loss scale 128 · batch size
        512``.

        With several GPUs, ``batch_size`` is per GPU, so the global batch is named too.
        """
        named = list(axes or NAMED)
        words = [_name_value(name, getattr(self, name)) for name in named]
        if self.command is not None and not any(words):
            words = [self.model]
        if self.world_size > 1 and {"batch_size", "world_size"} <= {*named}:
            words.append(f"global batch {whole_batch(self)}")
        return " · ".join(text for text in words if text is not None)

    def slug(self) -> str:
        """Return a name for files: readable, unique, ASCII."""
        readable = f"{self.precision}-b{self.batch_size}"
        if self.loss_scale is not None:
            readable += f"-s{format_value(self.loss_scale)}"
        key = repr([*zip(AXES, map(format_value, list_values(self)), strict=True)])
        return f"{readable}-{sha256(key.encode()).hexdigest()[:8]}"


AXES: dict[str, Axis] = {f.name: replace(f.metadata["axis"], name=f.name) for f in fields(Case)}

list_values: Callable[[Case], tuple[Value, ...]] = attrgetter(*AXES)
"""The values of all axes of a case, in the order of `AXES`."""

make_case: Callable[..., Case] = cache(Case)
"""Return the case with these values of all axes, in the order of `AXES`; equal values give the same
object. With equal but distinct cases, finding 10,000 runs in a dict took 0.1 s more."""

FOLLOWS: dict[str, tuple[str, ...]] = {
    leader: tuple(name for name, axis in AXES.items() if axis.follows == leader)
    for leader in AXES
    if any(axis.follows == leader for axis in AXES.values())
}
"""Axes that only some values of another axis have: they may change together with it."""

SAME_QUESTION = tuple(name for name, axis in AXES.items() if axis.measuring)
"""Axes that say how a case was measured; they never distinguish two questions."""

NAMED = tuple(name for name, axis in AXES.items() if axis.named)
"""The axes that name a case even where they do not vary."""


def list_affecting(trait: Trait) -> tuple[str, ...]:
    """Return the axes that affect ``trait``."""
    return tuple(name for name, axis in AXES.items() if trait in axis.affects)


UNTIMED = (*list_affecting(Trait.RATE), "seed")
"""Axes that change no step's work, but for the optimizer's: 0.4 to 0.55 ms of 62 to 417 on an H200.
Times are compared where two cases differ in them; what is learnt is not."""


def list_absent(command: str) -> dict[str, str]:
    """Return the axes that a command, such as ``check``, has no flag for, and why."""
    return {name: axis.absent[command] for name, axis in AXES.items() if command in axis.absent}


def fill_value(name: str, case: Any) -> Value:
    """Return the value of an axis in ``case`` if none is given."""
    fill = AXES[name].fill
    return fill(case) if fill else AXES[name].default  # type: ignore[no-any-return]


def default_lr(optimizer: str) -> float:
    """Return the default learning rate of ``optimizer``; SGD's for a workload's own."""
    return OPTIMIZERS[Case.optimizer if optimizer == OWN else optimizer].lr


def free_axes(axis: str) -> tuple[str, ...]:
    """Return the axes in which two cases may differ when ``axis`` is compared: it and its
    followers; none for the empty name."""
    return (axis, *FOLLOWS.get(axis, ())) if axis else ()


def main_loss_scale(precision: str, scales: Iterable[str]) -> str:
    """Return the loss scale that represents a precision: its default, or the commonest one.

    Ties go to the lowest of ``scales``, as spelled by `format_value`; dynamic ones come last.

    >>> main_loss_scale("fp16", ["64", "128", "64"]), main_loss_scale("fp16", ["64", "256", "64"])
    ('128', '64')
    """
    counts = Counter(scales)
    default = format_value(PRECISIONS[precision].default_loss_scale)
    return default if default in counts else min(counts, key=lambda t: (-counts[t], order_scale(t)))


def list_varying(cases: Iterable[Case], but: str = "") -> list[str]:
    """Return the axes to name each of ``cases`` by, without ``but``: `NAMED` and any that vary. A
    workload is named by its model."""
    columns = zip(AXES, zip(*map(list_values, {*cases}), strict=True), strict=False)
    varying = {name for name, values in columns if len(set(values)) > 1}
    return [n for n in AXES if n in {*varying, *NAMED} and n not in ("workload", but)]


def _name_value(name: str, value: Value) -> str | None:
    quiet = AXES[name].quiet and value == AXES[name].default
    if value is None or value is False or quiet or (name == "batch_size" and value == 0):
        return None
    if name == "workload" or value == OWN:
        return None  # named by its model
    words = name.replace("_", " ")
    if value is True:
        return words
    text = mark_legacy(name, format_value(value))
    return text if AXES[name].plain else f"{words} {text}"


def mark_legacy(name: str, text: str) -> str:
    return f"{text} (legacy)" if text in AXES[name].legacy else text


def format_value(value: Value) -> str:
    """Write an axis value as flags, presets and CSV spell it; None is empty.

    >>> format_value(128.0), format_value(True), format_value(None)
    ('128', 'on', '')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    # all digits: a case read back from its row must equal the case that wrote it
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def spell_cases(cases: Iterable[Case]) -> dict[str, Any]:
    """Return what a configuration says about cases, as `format_value` writes it: the ``settings``
    that all share, and for each of the ``cases`` the axes that name it or vary."""
    shared, told = dict[str, str](), dict[str, Iterable[str]]()
    for name, column in zip(AXES, zip(*map(list_values, cases), strict=True), strict=False):
        texts = {value: format_value(value) for value in {*column}}
        if len(texts) > 1 or name in NAMED:
            told[name] = map(texts.__getitem__, column)
        else:
            (shared[name],) = texts.values()
    rows = zip(*told.values(), strict=True)
    return {"settings": shared, "cases": [dict(zip(told, row, strict=True)) for row in rows]}


def spell_value(value: Value) -> str:
    """Format an axis value as people and flags write it; None is ``none``.

    >>> spell_value("21GiB"), spell_value(None)
    ('21GiB', 'none')
    """
    return format_value(value) or "none"


def parse_value(name: str, value: object, where: str) -> Value:
    """Parse a value of axis ``name`` from a flag, preset or CSV cell. Raises UsageError: it is
    wrong; the message starts with ``where``, such as ``--batch-size``."""
    text = format_value(value) if isinstance(value, (bool, int, float)) else str(value)
    try:
        return AXES[name].parse(text)
    except ValueError as error:
        raise UsageError(f"{where} {text[:60]!r}: {error}") from None


def fill_command(case: Case) -> str:
    """Return the command of a case with its settings in it. Raises UsageError: it gives no word for
    one of them."""
    assert case.command is not None
    own = read_vary(case.vary)
    named = dict.fromkeys(place.name for place in list_places(case.command))
    values = {
        name: own[name] if name in own else spell_value(getattr(case, name)) for name in named
    }
    try:
        return fill_places(case.command, values)
    except ValueError as error:
        raise UsageError(f"--command: {error}") from None


def whole_batch(case: Case) -> int:
    """Return the items per optimizer step, over all GPUs."""
    return case.batch_size * case.world_size


def divide_items(case: Case, items: int) -> list[int]:
    """Return how many of the ``items`` of a step each GPU takes.

    >>> divide_items(Case(parallel="ddp", world_size=4), 5)
    [2, 1, 1, 1]
    """
    if case.parallel == "dp":  # divides like torch.chunk
        size = max(1, -(-items // case.world_size))
        return [len(range(items)[i * size : (i + 1) * size]) for i in range(case.world_size)]
    shares = (Share(rank, case.world_size) for rank in range(case.world_size))
    return [len(share.cut(range(items))) for share in shares]


def micro_batch(case: Case) -> int:
    """Return the images per micro-batch of a GPU's batch; the last one may hold fewer."""
    return -(-case.batch_size // case.accumulate)


MOST_PROBED = {"cuda": 128, "cpu": 16}
"""Maximum images that the proof runs a layer on, so that it is the same for all larger batches.

On a CPU (DPN of few channels, fp32 and bf16-amp) its errors were equal in every digit at batch
sizes from 16 to 256. In two sweeps of an H100 (DPN-92, five precisions) the errors of the forward
pass and the input gradient were equal from 128 to 640, and those of the weight gradient differed no
more than between runs. Only tf32 ran a part in float32 at 128 that it did not at 512: cuDNN chose a
finer kernel for the smaller batch.
"""


def count_probed(case: Case) -> int:
    """Return the number of images that the proof of a case runs a layer on."""
    return min(micro_batch(case), MOST_PROBED[case.device])


def list_micro_batches(case: Case, samples: int) -> list[int]:
    """Return the distinct sizes of micro-batches in an epoch of ``samples`` items.

    >>> list_micro_batches(Case(batch_size=100, accumulate=3), 450)
    [16, 32, 34]
    """
    size, rest = micro_batch(case), samples % whole_batch(case)
    batches = {case.batch_size, *divide_items(case, rest)}
    sizes = {n for items in batches for n in (min(items, size), items % size)}
    return sorted(sizes - {0})
