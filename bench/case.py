"""A case holds the settings of one row of the results: every field is an axis.

An axis is described once, as a field of `Case`. That field gives the command-line flag, the preset
key, the CSV column and the asv parameter.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from functools import cached_property, partial
from hashlib import sha256
from itertools import product
from operator import attrgetter
from typing import Any

from bench.data import DATASETS, SYNTHETIC
from bench.data.batches import Share
from bench.data.synthetic import MOST_CLASSES, parse_shape
from bench.errors import UsageError, nearest
from bench.models import parse_model
from bench.models.freezing import NONE, parse_freeze
from bench.models.weights import parse_start
from bench.optimization import LR_SCALINGS, OPTIMIZERS, SCHEDULES, count_warmup_steps
from bench.precision import FP8_RECIPES, OPT_LEVELS, POLICIES, PRECISIONS, is_dynamic
from bench.text import parse_bytes, write_bytes
from bench.workloads import IMAGES, OWN, parse_workload

Value = str | int | float | bool | None


def _one_of(names: Iterable[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(nearest(text, list(names)))
        return text

    return parse


def _batch_size(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ValueError(
            "a batch size is a whole number of at least 1, auto, or a range of powers of two such "
            "as 32..1024 or 32..auto"
        )
    return value


AUTO = "auto"
"""The batch size that is yet to be found: the largest that fits, less a margin."""

_RANGE = re.compile(r"([0-9]{1,9})\.\.([0-9]{1,9}|auto)")


def _batch_range(low: int, high: str) -> list[Value]:
    """The powers of two of ``32..1024``; ``32..auto`` stays as it is."""
    if low < 1 or low & (low - 1):
        raise ValueError("a range is of powers of two and starts with one, such as 32..1024")
    if high == AUTO:
        return [f"{low}..{AUTO}"]
    if int(high) < low:
        raise ValueError("a range goes upwards, such as 32..1024")
    return list(_double(low, int(high)))


def _double(low: int, high: int) -> Iterator[int]:
    while low <= high:
        yield low
        low *= 2


def fill_auto(text: str, largest: int, recommended: int) -> list[int]:
    """The batch sizes that ``auto`` or ``32..auto`` stands for once the largest is known.

    >>> fill_auto("auto", 600, 560), fill_auto("128..auto", 600, 560)
    ([560], [128, 256, 512, 560])
    """
    low, dots, _ = text.rpartition("..")
    return sorted({*(_double(int(low), largest) if dots else ()), recommended})


def parse_number(what: str, low: float, high: float = math.inf) -> Callable[[str], float]:
    """Make the parser of an axis whose values are numbers above ``low``, at most ``high``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (low < value <= high and math.isfinite(value)):
            bound = f"above {low:g}" + (f" and at most {high:g}" if math.isfinite(high) else "")
            raise ValueError(f"{what} is a finite number {bound}")
        return value

    return parse


def _loss_scale(text: str) -> float | str:
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


def _opt_level(text: str) -> str | None:
    return None if text == "none" else _one_of([*OPT_LEVELS, "none"])(text)


def _switch(text: str) -> bool:
    switches = {"on": True, "true": True, "off": False, "false": False}
    if text.lower() not in switches:
        raise ValueError("a boolean value is 'on' or 'off'")
    return switches[text.lower()]


def _compile(text: str) -> str:
    also = {"on": "default", "true": "default", "false": "off"}
    return _one_of(COMPILES)(also.get(text.lower(), text))


def _whole(what: str, least: int = 1, most: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        whole = text.isascii() and text.isdigit() and len(text) < 10
        if not (whole and int(text) >= least and (most is None or int(text) <= most)):
            bound = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise ValueError(f"{what} is a whole number {bound}")
        return int(text)

    return parse


def _steps(text: str) -> int | None:
    return None if text == "none" else _whole("a number of steps")(text)


def _until(text: str) -> float | None:
    if text == "none":
        return None
    number, unit = (text[:-1], 100.0) if text.endswith("%") else (text, 1.0)
    try:
        return parse_number("", 0, 0.5 * unit)(number) / unit
    except ValueError:
        raise ValueError("how certain a time is to be is a share such as 1%, or 'none'") from None


LEAST_LIMIT = 64 * 2**20
"""Bytes; no process that imports torch is smaller."""


def _memory_limit(text: str) -> str | None:
    if text == "none":
        return None
    number = parse_bytes(text)
    if number < LEAST_LIMIT:
        raise ValueError(f"a memory limit is at least {write_bytes(LEAST_LIMIT)}, or 'none'")
    # 0.8GiB is 858993459.2 bytes, which nobody would recognise
    return write_bytes(number if number % 10**6 == 0 else number - number % 2**20)


def _input(text: str) -> str | None:
    return None if text == "none" else "x".join(map(str, parse_shape(text)))


def _classes(text: str) -> int | None:
    return None if text == "none" else _whole("a number of classes", 2, MOST_CLASSES)(text)


def _lr_warmup(text: str) -> str:
    if text.isascii() and text.isdigit() and len(text) < 10:
        return str(int(text))
    try:
        share = float(text.removesuffix("%")) if text.endswith("%") else math.nan
    except ValueError:
        share = math.nan
    if not 0 <= share <= 100:
        raise ValueError("a warm-up is a number of steps, or a part of them such as 5%")
    return f"{share:.12g}%" if share else "0"


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) < 2**31):
        raise ValueError("a seed is a whole number from 0 to 2147483647")
    return int(text)


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

LEGACY = ("dp",)
"""Of these, the ones that only stand beside the others for comparison; reports say so."""

GRAD_COMPRESSIONS = ("none", "fp16", "bf16")
"""The number formats that gradients are exchanged in; ``none`` is that of the gradients."""

WORKER_SETTINGS = ("persistent_workers", "prefetch")
"""Axes that only a case with ``workers`` has."""


def describe_axis(
    default: Value,
    parse: Callable[[str], Value],
    help: str,
    since: int = 1,
    quiet: bool = False,
    switch: bool = False,
    common: bool = False,
) -> Any:
    """Describe an axis.

    Args:
        since: the schema of records that brought it.
        quiet: a case is not named by it where it has its default.
        switch: of its values one is ``off``, and ``on`` is understood; all that are off or on are.
        common: ``--help`` shows its flag; else ``--help-all`` alone does.
    """
    metadata = {"parse": parse, "help": help, "since": since, "quiet": quiet, "common": common}
    metadata["switch"] = switch or default is False
    return field(default=default, metadata=metadata)


_later = partial(describe_axis, since=4, quiet=True)


@dataclass(frozen=True)
class Case:
    """The settings of one measurement, hashable. `loss_scale` is None where the precision scales no
    loss, `opt_level` where apex.amp does not train."""

    model: str = describe_axis(
        "dpn92", parse_model, "network, by name, package.module:factory or timm:NAME", common=True
    )
    dataset: str = describe_axis(
        "cifar10", _one_of([*DATASETS, OWN]), "images to train on", common=True
    )
    precision: str = describe_axis(
        "fp32", _one_of(PRECISIONS), "number formats; --list describes them", common=True
    )
    loss_scale: float | str | None = describe_axis(
        None,
        _loss_scale,
        "static loss scale, or a dynamic one of --list (default: 128 for fp16)",
        common=True,
    )
    skip_overflow: bool = describe_axis(
        False, _switch, "with a static loss scale, skip steps whose gradients overflow"
    )
    opt_level: str | None = describe_axis(
        None,
        _opt_level,
        "opt level of apex.amp, O0 to O3, for fp16-apex (default: none, its FP16_Optimizer)",
        since=3,
    )
    fp8_recipe: str = _later(
        "tensorwise",
        _one_of(FP8_RECIPES),
        "how torchao scales what fp8 rounds; --list describes them",
    )
    batch_size: int = describe_axis(
        128, _batch_size, "items (images) per step of the optimizer", common=True
    )
    accumulate: int = _later(
        1,
        _whole("a number of micro-batches"),
        "micro-batches that a batch is computed in, their gradients summed",
    )
    memory_limit: str | None = describe_axis(
        None,
        _memory_limit,
        "memory that the process may use, such as 21GiB, as on a smaller GPU (default: none)",
        since=4,
    )
    lr: float = describe_axis(
        OPTIMIZERS["sgd"].lr,
        parse_number("a learning rate", 0),
        "learning rate (default: "
        + ", ".join(f"{kind.lr:g} for {name}" for name, kind in OPTIMIZERS.items())
        + ")",
        common=True,
    )
    optimizer: str = _later(
        "sgd",
        _one_of([*OPTIMIZERS, OWN]),
        "what steps the weights, see --list (default: sgd, or a --workload's own)",
        common=True,
    )
    lr_scaling: str = _later(
        "none",
        _one_of(LR_SCALINGS),
        "multiply the learning rate by batch size over --base-batch, or by its root",
    )
    base_batch: int = _later(
        128, _whole("a batch size"), "batch size that the learning rate is given for"
    )
    lr_warmup: str = _later(
        "0",
        _lr_warmup,
        "steps, or percent of all steps, over which the learning rate rises to its value",
    )
    schedule: str = _later(
        "constant", _one_of(SCHEDULES), "how the learning rate goes on; --list describes them"
    )
    epochs: int = _later(
        1, _whole("a number of epochs"), "epochs to train, each measured", common=True
    )
    fraction: float = describe_axis(
        1.0,
        parse_number("a fraction", 0, 1),
        "part of the epoch to measure; the rest is extrapolated",
        common=True,
    )
    steps: int | None = describe_axis(
        None,
        _steps,
        "measure this many steps at most, after one of each batch shape",
        since=4,
        common=True,
    )
    until: float | None = describe_axis(
        None,
        _until,
        "end a case once its epoch time is known within this share, such as 1%: the 95 % interval "
        "of its steps, drift included (default: measure all that --fraction and --steps allow)",
        since=7,
    )
    evaluate: bool = describe_axis(
        False, _switch, "measure loss and accuracy on the test images too"
    )
    checkpoint: bool = _later(
        False,
        _switch,
        "measure what a checkpoint takes and whether training goes on from it bit for bit; with "
        "several --epochs, keep the last and the best",
    )
    profile: bool = _later(
        False,
        _switch,
        "see by a few steps under torch's profiler where their time goes",
        common=True,
    )
    cudnn_benchmark: bool = describe_axis(
        False, _switch, "let cuDNN time its algorithms during warm-up"
    )
    compile: str = describe_axis(
        "off",
        _compile,
        "torch.compile the network during warm-up, in a mode of --list",
        quiet=True,
        switch=True,
        common=True,
    )
    cuda_graphs: bool = describe_axis(
        False,
        _switch,
        "capture a whole training step as a CUDA graph during warm-up, and replay it",
        since=8,
    )
    channels_last: bool = describe_axis(False, _switch, "NHWC memory layout")
    freeze: str = _later(
        NONE,
        parse_freeze,
        "weights that are not trained: backbone, bn, or layers by name; --list describes them",
    )
    start: str | None = _later(
        None,
        parse_start,
        "file of the weights to start from, .safetensors or of torch.save (default: none)",
    )
    workload: str = _later(
        IMAGES,
        parse_workload,
        "what to train, package.module:factory; it brings its network, data and loss (default: "
        "--model on the images of --dataset)",
        common=True,
    )
    input: str | None = describe_axis(
        None,
        _input,
        "shape of synthetic images, such as 3x224x224 (default: the dataset's, 3x32x32)",
        since=4,
    )
    classes: int | None = describe_axis(
        None,
        _classes,
        "classes of synthetic images, such as 1000 (default: the dataset's, 10)",
        since=4,
    )
    loader: str = _later(
        "device",
        _one_of(LOADERS),
        "where batches are made: on the device from data that stay there, or by torch's DataLoader "
        "on the CPU",
    )
    workers: int = _later(
        0,
        _whole("a number of workers", least=0),
        "processes of --loader torch; 0 loads within the training process, as torch does by "
        "default",
    )
    pin_memory: bool = _later(
        False,
        _switch,
        "with --loader torch, copy batches to the GPU from page-locked memory, without waiting",
    )
    persistent_workers: bool = _later(False, _switch, "keep --workers from one epoch to the next")
    prefetch: int = _later(
        2,
        _whole("a number of batches"),
        "batches (or micro-batches) that each of --workers prepares ahead",
    )
    parallel: str = _later(
        "none",
        _one_of(PARALLELS),
        "train one network on several GPUs; --list describes how",
        since=5,
    )
    world_size: int = _later(
        1,
        _whole("a number of GPUs"),
        "GPUs (on a CPU, processes) that train together; --batch-size is that of each",
        since=5,
    )
    grad_compression: str = _later(
        "none",
        _one_of(GRAD_COMPRESSIONS),
        "with --parallel ddp, the number format that gradients are exchanged in (default: their "
        "own)",
        since=5,
    )
    bucket_mb: int = _later(
        25,
        _whole("a size of buckets"),
        "with --parallel ddp, MiB of gradients that are exchanged at once",
        since=5,
    )
    sync_bn: bool = _later(
        False, _switch, "with --parallel ddp, BatchNorm over the batches of all GPUs", since=5
    )
    seed: int = describe_axis(0, _seed, "seed of weights, order and augmentation")
    device: str = describe_axis(
        "cuda",
        _one_of(("cuda", "cpu")),
        "where to train (default: cuda if there is a GPU)",
        common=True,
    )

    @cached_property
    def _hash(self) -> int:
        return hash(list_values(self))  # 3 µs, and a sweep looks each of its runs up ten times

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Case], tuple[Value, ...]]:
        return Case, list_values(self)  # without the hash, which another process has otherwise

    @property
    def compiled(self) -> bool:
        return self.compile != Case.compile

    def label(self, axes: Iterable[str] | None = None) -> str:
        """Name the case for people by ``axes``, or `NAMED`: ``fp16 · loss scale 128 · batch size
        512``.

        Of several GPUs, whose ``batch_size`` is that of each, the batch of all is named too.
        """
        named = list(axes or NAMED)
        words = [_name_value(name, getattr(self, name)) for name in named]
        if self.world_size > 1 and {"batch_size", "world_size"} <= {*named}:
            words.append(f"global batch {whole_batch(self)}")
        return " · ".join(text for text in words if text is not None)

    def slug(self) -> str:
        """Name the case for files: readable, unique, ASCII."""
        readable = f"{self.precision}-b{self.batch_size}"
        if self.loss_scale is not None:
            readable += f"-s{format_value(self.loss_scale)}"
        key = repr([(axis.name, format_value(getattr(self, axis.name))) for axis in AXES.values()])
        return f"{readable}-{sha256(key.encode()).hexdigest()[:8]}"


AXES: dict[str, Field[Any]] = {axis.name: axis for axis in fields(Case)}

list_values: Callable[[Case], tuple[Value, ...]] = attrgetter(*AXES)
"""The values of all axes of a case, in the order of `AXES`."""

FOLLOWS: dict[str, tuple[str, ...]] = {
    "precision": ("loss_scale", "skip_overflow", "opt_level", "fp8_recipe"),
    "optimizer": ("lr",),
    "lr_scaling": ("base_batch",),
    "loader": ("workers", "pin_memory", "persistent_workers", "prefetch"),
    "parallel": ("world_size", "grad_compression", "bucket_mb", "sync_bn"),
}
"""Axes that only some values of another axis have: where that one changes, so may these."""

SAME_QUESTION = ("fraction", "steps", "until", "evaluate", "profile")
"""Axes that say how a case was measured; they never tell two questions apart."""

RECIPE = (
    *("model", "dataset", "workload", "input", "classes", "freeze", "start"),
    *("batch_size", "world_size", "loss_scale", "skip_overflow"),
    *("optimizer", "lr", "lr_scaling", "base_batch", "lr_warmup", "schedule", "epochs"),
)
"""Axes that choose what is learnt, and how. What they do to loss and accuracy shows at the end of
an epoch: before, a larger batch has taken fewer steps, and a loss tells of the first steps. All
others, such as precisions, are to leave learning as it is, and may be compared after equal
steps."""

BARE = ("model", "dataset", "precision", "device")
"""Axes whose values speak for themselves."""

NAMED = ("precision", "loss_scale", "batch_size")
"""The axes that name a case even where they do not vary."""


def axis_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def find_leader(axis: str) -> str:
    return next((leader for leader, followers in FOLLOWS.items() if axis in followers), "")


def free_axes(axis: str) -> tuple[str, ...]:
    """The axes in which two cases may differ that differ in ``axis``: it, and what follows; none
    for the empty name."""
    return (axis, *FOLLOWS.get(axis, ())) if axis else ()


def main_loss_scale(precision: str, scales: Iterable[str]) -> str:
    """The loss scale that stands for a precision: its default, or the commonest of ``scales``.

    Of equally common ones, as `format_value` spells them, it is the lowest; dynamic ones come last.

    >>> main_loss_scale("fp16", ["64", "128", "64"]), main_loss_scale("fp16", ["64", "256", "64"])
    ('128', '64')
    """
    counts = Counter(scales)
    default = format_value(PRECISIONS[precision].default_loss_scale)
    return default if default in counts else min(counts, key=lambda t: (-counts[t], order_scale(t)))


def order_scale(text: str) -> tuple[float, str]:
    """A key that sorts loss scales as CSV spells them: none, numbers upwards, dynamic ones."""
    try:
        return float(text or 0), ""
    except ValueError:
        return math.inf, text


def telling_axes(cases: Iterable[Case], but: str = "") -> list[str]:
    """The axes to name each of ``cases`` by, without ``but``: `NAMED`, and whatever else varies
    among them. A workload is named by its model."""
    columns = zip(AXES, zip(*map(list_values, cases), strict=True), strict=False)
    varying = {name for name, values in columns if len(set(values)) > 1}
    return [n for n in AXES if n in {*varying, *NAMED} and n not in ("workload", but)]


def _name_value(name: str, value: Value) -> str | None:
    quiet = AXES[name].metadata["quiet"] and value == AXES[name].default
    if value is None or value is False or quiet:
        return None
    if name == "workload" or value == OWN:
        return None  # its model says it
    words = name.replace("_", " ")
    if value is True:
        return words
    if name == "parallel" and value in LEGACY:
        return f"{words} {value} (legacy)"
    return format_value(value) if name in BARE else f"{words} {format_value(value)}"


def format_value(value: Value) -> str:
    """Write an axis value as flags, presets and CSV spell it; None is empty.

    >>> format_value(128.0), format_value(True), format_value(None)
    ('128', 'on', '')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    # every digit: a case read back from its row must be the case that wrote it
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def spell_cases(cases: Iterable[Case]) -> list[dict[str, str]]:
    """The axes of each case as `format_value` writes them: of each axis every value once."""
    columns = zip(*map(list_values, cases), strict=True)
    texts = [map({v: format_value(v) for v in {*held}}.__getitem__, held) for held in columns]
    return [dict(zip(AXES, row, strict=True)) for row in zip(*texts, strict=True)]


def spell_value(value: Value) -> str:
    """Write an axis value as people and flags say it; None is none.

    >>> spell_value("21GiB"), spell_value(None)
    ('21GiB', 'none')
    """
    return format_value(value) or "none"


def parse_value(name: str, value: object, where: str) -> Value:
    """Read one value of axis ``name`` from a flag, a preset or a CSV cell, which a UsageError calls
    ``where``, such as ``--batch-size``."""
    text = format_value(value) if isinstance(value, (bool, int, float)) else str(value)
    try:
        return AXES[name].metadata["parse"](text)  # type: ignore[no-any-return]
    except ValueError as error:
        raise UsageError(f"{where} {text[:60]!r}: {error}") from None


def parse_values(name: str, value: object, where: str) -> list[Value]:
    """Read what a flag or a preset gives for axis ``name``: a value, or for batch sizes several.

    ``32..1024`` is the powers of two between; ``auto`` and ``32..auto`` are left to be found.
    Raises UsageError as `parse_value`.
    """
    if name == "batch_size" and value == AUTO:
        return [AUTO]
    if name == "batch_size" and (found := _RANGE.fullmatch(str(value))):
        try:
            return _batch_range(int(found[1]), found[2])
        except ValueError as error:
            raise UsageError(f"{where} {value!r}: {error}") from None
    return [parse_value(name, value, where)]


MICRO_BATCH = "micro_batch"
"""A key of `grid` beside the axes: the most images of a micro-batch, which gives `accumulate`."""

parse_micro_batch = _whole("a micro-batch")


def refuse_auto(family: Case, text: str) -> list[int]:
    """What a command makes of ``auto`` that does not look for the largest batch. Raises UsageError:
    always."""
    raise UsageError(
        f"--batch-size {text}: only bench.sweep looks for the largest batch; give a number, such "
        "as one that bench.fit recommends"
    )


def grid(
    axes: Mapping[str, Sequence[Value]], find: Callable[[Case, str], Sequence[int]] = refuse_auto
) -> list[Case]:
    """Every combination of ``axes``, in order, the batch size varying fastest.

    A loss scale applies to the precisions that scale a loss, skipping overflows to static loss
    scales of ours, an opt level to apex, which itself decides what is skipped, and a recipe to fp8;
    the settings of torch's DataLoader apply to that loader, and some of them to its workers. Where
    they do not apply, a case is planned once. A user's workload has no images of ours, and its name
    for a model. Where no loss scale is given, each precision that needs one takes its own default,
    and so does each optimizer where no learning rate is.

    `MICRO_BATCH` may be among the axes. ``find`` is given the other settings and ``auto`` or
    ``32..auto``, and says which batch sizes are meant. Raises UsageError: settings do not go
    together.
    """
    axes = dict(axes)
    micro: Any = axes.pop(MICRO_BATCH, [None])
    if micro != [None] and "accumulate" in axes:
        raise UsageError("--micro-batch and --accumulate are both given; use one")
    order = sorted(axes, key=lambda name: (name == "batch_size", list(AXES).index(name)))
    cases: dict[Case, None] = {}
    for limit, *values in product(micro, *(axes[name] for name in order)):
        settings: dict[str, Any] = dict(zip(order, values, strict=True))
        precision = PRECISIONS[settings.get("precision", Case.precision)]
        if not precision.scales_loss:
            settings["loss_scale"] = None
        elif settings.get("loss_scale") is None:
            settings["loss_scale"] = precision.default_loss_scale
        if precision.apex or settings["loss_scale"] is None or is_dynamic(settings["loss_scale"]):
            settings["skip_overflow"] = False
        if not precision.apex:
            settings["opt_level"] = None
        if not precision.float8:
            settings["fp8_recipe"] = Case.fp8_recipe
        if "lr" not in axes:
            settings["lr"] = default_lr(settings.get("optimizer", Case.optimizer))
        if settings.get("workload", IMAGES) != IMAGES:
            settings |= {"model": settings["workload"], "dataset": OWN}
            settings |= {"input": None, "classes": None}
        if settings.get("lr_scaling", Case.lr_scaling) == "none":
            settings["base_batch"] = Case.base_batch
        unused: tuple[str, ...] = ()
        if settings.get("loader", Case.loader) == Case.loader:
            unused = FOLLOWS["loader"]
        elif not settings.get("workers", Case.workers):
            unused = WORKER_SETTINGS
        settings |= {name: getattr(Case, name) for name in unused}
        parallel = settings.get("parallel", Case.parallel)
        if parallel == Case.parallel and {*axes.get("parallel", ())} - {Case.parallel}:
            settings |= {name: getattr(Case, name) for name in FOLLOWS["parallel"]}
        elif parallel == "dp":
            only = [name for name in FOLLOWS["parallel"] if name != "world_size"]
            settings |= {name: getattr(Case, name) for name in only}
        sizes: Sequence[int] = [settings.pop("batch_size", Case.batch_size)]
        if isinstance(text := sizes[0], str):
            if limit is not None:
                raise UsageError(
                    f"--batch-size {text} and --micro-batch are both given: in micro-batches of "
                    "one size every batch fits; give batch sizes as numbers"
                )
            size = Case.batch_size * settings.get("accumulate", Case.accumulate)
            family = Case(**settings, batch_size=size)
            check_axes(family)
            sizes = [n for n in find(family, text) if go_together(replace(family, batch_size=n))]
        for size in sizes:
            if limit is not None:
                settings["accumulate"] = -(-size // limit)
            case = Case(**settings, batch_size=size)
            check_axes(case)
            cases[case] = None
    return list(cases)


def default_lr(optimizer: str) -> float:
    """The learning rate of ``optimizer`` where none is given; a workload's own takes SGD's."""
    return OPTIMIZERS[Case.optimizer if optimizer == OWN else optimizer].lr


def go_together(case: Case) -> bool:
    try:
        check_axes(case)
    except UsageError:
        return False
    return True


def check_axes(case: Case) -> None:
    """Refuse settings that do not go together. Raises UsageError: it says which, and what to leave
    out."""
    if case.accumulate > case.batch_size:
        raise UsageError(
            f"a batch of {case.batch_size} cannot be computed in {case.accumulate} micro-batches; "
            "lower --accumulate"
        )
    made = -(-case.batch_size // micro_batch(case))
    if made != case.accumulate:
        # as many as are needed for micro-batches of one size always come out
        smaller = micro_batch(case) - 1
        works = [made, *([-(-case.batch_size // smaller)] if smaller > 1 else [])]
        raise UsageError(
            f"a batch of {case.batch_size} cannot be computed in {case.accumulate} micro-batches, "
            f"all but the last of one size; give --accumulate {' or '.join(map(str, works))}"
        )
    cut = case.fraction < 1 or case.steps is not None or case.until is not None
    if case.epochs > 1 and cut:
        raise UsageError(
            f"--epochs {case.epochs} trains whole epochs; leave out --fraction, --steps and --until"
        )
    if case.dataset == OWN and case.workload == IMAGES:
        raise UsageError(f"--dataset {OWN} is that of a --workload; give one, or another dataset")
    for name in ("input", "classes"):
        if case.dataset != SYNTHETIC and (value := getattr(case, name)) is not None:
            raise UsageError(
                f"--{name} {value} is for synthetic images, not --dataset {case.dataset}; give "
                f"--dataset {SYNTHETIC}, or leave out --{name}"
            )
    if case.optimizer == OWN and case.workload == IMAGES:
        raise UsageError(f"--optimizer {OWN} is that of a --workload; give one, or leave it out")
    if case.schedule == "onecycle" and case.lr_warmup != "0":
        raise UsageError("--schedule onecycle has its own warm-up; leave out --lr-warmup")
    if case.parallel == Case.parallel:
        for flag, value in _list_given(case, FOLLOWS["parallel"]):
            raise UsageError(
                f"{flag} {value} is of training on several GPUs; give --parallel ddp, or leave out "
                f"{flag}"
            )
    elif case.parallel == "dp" and case.device == "cpu":
        raise UsageError("--parallel dp needs GPUs; on a CPU, --parallel ddp trains in processes")
    elif case.sync_bn and case.device == "cpu":
        raise UsageError("--sync-bn needs GPUs, as torch's SyncBatchNorm does; leave it out")
    elif PRECISIONS[case.precision].apex:
        raise UsageError(
            f"--precision {case.precision} trains on one GPU; leave out --parallel {case.parallel}"
        )
    elif PRECISIONS[case.precision].float8 and case.parallel == "dp":
        raise UsageError("--precision fp8 with --parallel dp is not measured; give --parallel ddp")
    else:
        for flag, value in _list_given(case, _ALONE[case.parallel]):
            raise UsageError(
                f"{flag} {value} with --parallel {case.parallel} is not measured; leave out one"
            )
    if case.accumulate > 1 and case.compile in OWN_GRAPHS and case.device != "cpu":
        raise UsageError(  # pytorch issue 169545
            f"--accumulate {case.accumulate} with --compile {case.compile} fails in torch: its "
            "graphs write over the gradients that are summed; give --compile default"
        )
    if case.cuda_graphs:
        _check_capture(case)
    if case.pin_memory and case.device == "cpu":
        raise UsageError(
            "--pin-memory is for copies to a GPU, and --device cpu makes none; leave it out"
        )
    if PRECISIONS[case.precision].apex and case.optimizer != "sgd":
        raise UsageError(f"--precision {case.precision} trains with SGD only; give --optimizer sgd")


def _check_capture(case: Case) -> None:
    """Refuse what a step that is captured as a CUDA graph cannot have. Raises UsageError: it says
    what."""
    precision = PRECISIONS[case.precision]
    given = [*_list_given(case, ("accumulate", "checkpoint", "profile", "parallel"))]
    if case.compile in OWN_GRAPHS:
        given.append(("--compile", case.compile))
    if precision.apex or precision.float8:
        given.append(("--precision", case.precision))
    why = "is not measured"
    if case.device == "cpu":
        given, why = [("--device", "cpu")], "cannot be: a CPU has none"
    elif is_dynamic(case.loss_scale):
        given = [("--loss-scale", str(case.loss_scale))]
        why = "cannot be, because that scale is kept on the host; give one such as 128"
    elif case.optimizer in (OWN, "lars"):
        given = [("--optimizer", case.optimizer)]
        why = "cannot be: torch captures fused steps; give sgd or adamw"
    if given:
        (flag, value), *_ = given
        raise UsageError(f"--cuda-graphs with {flag} {value} {why}")


_ALONE = {
    "ddp": ("checkpoint", "profile", "until"),
    "dp": ("checkpoint", "profile", "accumulate", "compile", "memory_limit"),
}
"""Axes that a way to train on several GPUs leaves at their defaults."""


def _list_given(case: Case, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        if (value := getattr(case, name)) != getattr(Case, name):
            yield axis_flag(name), format_value(value)


def whole_batch(case: Case) -> int:
    """Items of a step of the optimizer: those of all GPUs together."""
    return case.batch_size * case.world_size


def divide_items(case: Case, items: int) -> list[int]:
    """How many of the ``items`` of a step each GPU takes.

    >>> divide_items(Case(parallel="ddp", world_size=4), 5)
    [2, 1, 1, 1]
    """
    if case.parallel == "dp":  # which divides as torch.chunk does
        size = max(1, -(-items // case.world_size))
        return [len(range(items)[i * size : (i + 1) * size]) for i in range(case.world_size)]
    shares = (Share(rank, case.world_size) for rank in range(case.world_size))
    return [len(share.cut(range(items))) for share in shares]


def micro_batch(case: Case) -> int:
    """Images of each micro-batch but the last of a GPU's batch, which may hold fewer."""
    return -(-case.batch_size // case.accumulate)


MOST_PROBED = {"cuda": 128, "cpu": 16}
"""Images that the proof runs a layer on, at most: so it is the same for all larger batches.

On a CPU (DPN of few channels, fp32 and bf16-amp) its errors were the same in every digit at batch
sizes from 16 to 256. In two sweeps of an H100 (DPN-92, five precisions) those of the forward pass
and the input gradient were so from 128 to 640, and the weight gradient's differed no more than from
run to run. tf32 alone ran a part in float32 at 128 that it did not at 512: cuDNN took a finer
kernel for the smaller batch.
"""


def count_probed(case: Case) -> int:
    """Images that the proof of a case runs a layer on."""
    return min(micro_batch(case), MOST_PROBED[case.device])


def list_micro_batches(case: Case, samples: int) -> list[int]:
    """The sizes of the micro-batches in an epoch of so many items, each once.

    >>> list_micro_batches(Case(batch_size=100, accumulate=3), 450)
    [16, 32, 34]
    """
    size, rest = micro_batch(case), samples % whole_batch(case)
    batches = {case.batch_size, *divide_items(case, rest)}
    sizes = {n for items in batches for n in (min(items, size), items % size)}
    return sorted(sizes - {0})


def check_batches(case: Case, train_images: int, batchnorm: bool = True) -> None:
    """Refuse a batch size or a warm-up that does not fit the dataset.

    Args:
        train_images: of the dataset; for a workload, the items of its data.
        batchnorm: whether the network may have BatchNorm, which needs two images in a batch.

    Raises:
        UsageError: the batch is larger than the dataset, a batch or micro-batch, or what a GPU has
            of one, holds one image and there may be BatchNorm, or the learning rate's warm-up is
            longer than the training.
    """
    item = "image" if case.workload == IMAGES else "item"
    whole = whole_batch(case)
    if case.world_size > 1:
        if why := _refuse_shares(case, train_images, batchnorm):
            near = (case.batch_size + sign * by for by in range(1, 100) for sign in (-1, 1))
            works = (
                n
                for n in near
                if n >= case.accumulate
                and go_together(other := replace(case, batch_size=n))
                and not _refuse_shares(other, train_images, batchnorm)
            )
            advice = f"; {n} should work" if (n := next(works, 0)) else ""
            raise UsageError(f"{why}{advice}")
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
    """Why so many images cannot be divided over several GPUs; empty where they can."""
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
        # each of its layers waits for the same layer of all the others
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
