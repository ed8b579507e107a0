"""A case holds the settings of one row of the results: every field is an axis.

An axis is described once, as a field of `Case`. That field gives the command-line flag, the preset
key, the CSV column and the asv parameter, and everything else in `bench.schema.axis.Axis`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from hashlib import sha256
from itertools import chain
from operator import attrgetter
from typing import Any

from bench.base.errors import UsageError
from bench.base.text import parse_bytes
from bench.networks.data import DATASETS
from bench.networks.data.batches import Share
from bench.networks.data.synthetic import MOST_CLASSES
from bench.networks.freezing import NONE, parse_freeze
from bench.networks.models import parse_model
from bench.networks.weights import parse_start
from bench.networks.workloads import IMAGES, OWN, parse_workload
from bench.schema.axis import (
    COMPILES,
    DYNAMICS,
    GRAD_COMPRESSIONS,
    LOADERS,
    OWN_GRAPHS,
    PARALLELS,
    Axis,
    Trait,
    Value,
    axis_flag,
    describe_axis,
    is_own,
    name_axis,
    name_column,
    one_of,
    or_none,
    order_limit,
    order_recompute,
    order_scale,
    parse_batch_size,
    parse_compile,
    parse_input,
    parse_loss_scale,
    parse_lr_warmup,
    parse_memory_limit,
    parse_number,
    parse_recompute,
    parse_switch,
    parse_until,
    parse_whole,
)
from bench.schema.command import (
    OUT,
    fill_places,
    list_places,
    parse_command,
    parse_vary,
    quote_value,
    read_vary,
    write_vary,
)
from bench.schema.optimization import LR_SCALINGS, OPTIMIZERS, SCHEDULES
from bench.schema.precision import FP8_RECIPES, OPT_LEVELS, PRECISIONS

DEVICES = ("cuda", "cpu")


LEARNING, RATE, DATA, DRAWS, FIT, PROOF, WORK, FLOP, FIRST, KERNELS, RECIPE = Trait

_learning = partial(describe_axis, affects=(LEARNING, RATE))
_synthetic = partial(describe_axis, affects=(LEARNING, DATA, FIT, PROOF, WORK, FLOP, FIRST))


@dataclass(frozen=True)
class Case:
    """The settings of one measurement, hashable. `loss_scale` is None if the precision scales no
    loss, and `opt_level` if apex.amp does not train.

    The axes of a user's own placeholders stand in ``vary`` together; each is an attribute by the
    name that `bench.schema.axis.own_axis` gives it: text, or None where the case has none of it.
    """

    # fmt: off
    model: str = describe_axis("dpn92", parse_model,
        "network, by name, or package.module:factory", common=True, plain=True,
        affects=(LEARNING, FIT, PROOF, WORK, FLOP, FIRST))
    dataset: str = describe_axis("cifar10", one_of([*DATASETS, OWN]), "images to train on",
        common=True, plain=True, affects=(LEARNING, DATA, FIT, PROOF, WORK, FLOP, FIRST))
    precision: str = describe_axis("fp32", one_of(PRECISIONS),
        "number formats; bench.sweep --list describes them", common=True, plain=True,
        order=[*PRECISIONS].index, from_default=True)
    loss_scale: float | str | None = describe_axis(None, parse_loss_scale,
        "a number, or a rule of bench.sweep --list (default: 128, or dynamic)",
        common=True, affects=(LEARNING, FIT, WORK), order=order_scale, decided_by="precision")
    opt_level: str | None = describe_axis(None, or_none(one_of([*OPT_LEVELS, "none"])),
        "opt level of apex.amp, O0 to O3, for fp16-apex (default: O2)",
        order=lambda level: level or "", decided_by="precision")
    fp8_recipe: str = describe_axis("tensorwise", one_of(FP8_RECIPES),
        "how torchao scales tensors in fp8; bench.sweep --list describes them",
        order=[*FP8_RECIPES].index, decided_by="precision")
    batch_size: int = describe_axis(128, parse_batch_size,
        "items (images) per step of the optimizer", common=True, affects=(LEARNING, FIT, FIRST))
    accumulate: int = describe_axis(1, parse_whole("a number of micro-batches"),
        "micro-batches that a batch is divided into; their gradients are summed",
        affects=(DRAWS, FIT, WORK, FIRST))
    memory_limit: str | None = describe_axis(None, parse_memory_limit,
        "memory that the process may use, such as 21GiB, as on a smaller GPU (default: none)",
        affects=(FIT, PROOF, RECIPE), from_default=True,
        order=lambda limit: order_limit(limit and parse_bytes(limit)))
    power_limit: int | None = describe_axis(None, or_none(parse_whole("a power limit in W")),
        "W that each GPU may draw, set for a case by root and then put back (default: what the GPU "
        "has)", affects=(KERNELS, RECIPE), from_default=True, order=order_limit)
    lr: float = describe_axis(OPTIMIZERS["sgd"].lr, parse_number("a learning rate", 0),
        "learning rate (default: that of the optimizer in bench.sweep --list)",
        common=True, affects=(LEARNING, RATE), decided_by="optimizer")
    optimizer: str = describe_axis("sgd", one_of([*OPTIMIZERS, OWN]),
        "one of bench.sweep --list (default: sgd; of a GPT adamw)",
        common=True,
        affects=(LEARNING, RATE, FIT, WORK))
    lr_scaling: str = _learning("none", one_of(LR_SCALINGS),
        "multiply the learning rate by batch size over --base-batch, or by its square root")
    base_batch: int = _learning(128, parse_whole("a batch size"),
        "batch size that the learning rate is given for", decided_by="lr_scaling")
    lr_warmup: str = _learning("0", parse_lr_warmup,
        "steps, or percent of all steps, over which the learning rate rises to its value",
        order=lambda text: (text.endswith("%"), float(text.removesuffix("%"))))
    schedule: str = _learning("constant", one_of(SCHEDULES),
        "learning-rate schedule; bench.sweep --list describes them")
    clip_grad: float | None = describe_axis(None, or_none(parse_number("a norm of gradients", 0)),
        "scale the gradients of a step, unscaled by the loss scale, down to this norm where theirs "
        "is larger (default: none)", affects=(LEARNING, WORK), order=order_limit, from_default=True)
    epochs: int = _learning(1, parse_whole("a number of epochs"), "epochs to train, each measured",
        common=True)
    fraction: float = describe_axis(1.0, parse_number("a fraction", 0, 1),
        "part of the epoch to measure; the rest is extrapolated", common=True, affects=())
    steps: int | None = describe_axis(None, or_none(parse_whole("a number of steps")),
        "measure this many steps at most, after one of each batch shape", common=True, affects=(),
        order=order_limit)
    until: float | None = describe_axis(None, parse_until,
        "end a case once its epoch time is known within this share, such as 1%: the 95 % interval "
        "of its steps, drift included (default: measure all that --fraction and --steps allow)",
        affects=())
    evaluate: bool = describe_axis(False, parse_switch,
        "measure loss and accuracy on the test images too", affects=())
    checkpoint: bool = describe_axis(False, parse_switch,
        "save the training after each epoch: the last and the best are kept, and an interrupted "
        "case resumes", affects=())
    profile: bool = describe_axis(False, parse_switch,
        "run a few more steps under torch's profiler, to see where their time goes", common=True,
        affects=())
    cudnn_benchmark: bool = describe_axis(False, parse_switch,
        "let cuDNN time its algorithms during warm-up", affects=(FIT, PROOF))
    compile: str = describe_axis("off", parse_compile,
        "mode of torch.compile; bench.sweep --list describes them", common=True,
        affects=(FIT, PROOF, KERNELS), order=[*COMPILES].index)
    dynamic: str = describe_axis("off", one_of(DYNAMICS),
        "with --compile, shapes of a batch that code is compiled for; bench.sweep --list describes "
        "them", affects=(FIT, PROOF, KERNELS), order=[*DYNAMICS].index, decided_by="compile")
    cuda_graphs: bool = describe_axis(False, parse_switch,
        "capture a whole training step as a CUDA graph during warm-up, and replay it",
        affects=(FIT, PROOF, WORK, KERNELS))
    recompute: str = describe_axis("none", parse_recompute,
        "activations that the backward pass computes again, to save memory; bench.sweep --list "
        "describes them", affects=(FIT, WORK, KERNELS), from_default=True, order=order_recompute)
    channels_last: bool = describe_axis(False, parse_switch, "NHWC memory layout",
        affects=(FIT, PROOF, WORK, KERNELS))
    freeze: str = describe_axis(NONE, parse_freeze,
        "weights that are not trained: backbone, bn, or layers by name; bench.sweep --list "
        "describes them", affects=(LEARNING, FIT, PROOF, WORK, FLOP, FIRST), from_default=True)
    start: str | None = describe_axis(None, parse_start,
        "file of weights to start from, .safetensors or written by torch.save (default: none)",
        affects=(LEARNING, PROOF, WORK, FIRST), from_default=True)
    workload: str = describe_axis(IMAGES, parse_workload,
        "what to train, package.module:factory, with its own network, data and loss (default: "
        "--model on the images of --dataset)", common=True,
        affects=(LEARNING, FIT, PROOF, WORK, FLOP, FIRST))
    command: str | None = describe_axis(None, or_none(parse_command),
        "a script of your own instead, such as 'python train.py -b {batch_size}'", common=True,
        affects=(LEARNING, FIT, PROOF, WORK, FLOP, FIRST), from_default=True)
    vary: str | None = describe_axis(None, or_none(parse_vary),
        "a placeholder of your own in --command, and its values: --vary depth 12 24; once for each",
        affects=(LEARNING, FIT, PROOF, WORK, FLOP, FIRST))
    items: int | None = describe_axis(None, or_none(parse_whole("a number of items")),
        "items that a step of a --command is of, in each of its processes (default: what the "
        "script tells, or its {batch_size})", affects=())
    input: str | None = _synthetic(None, parse_input,
        "shape of synthetic images, such as 3x224x224 (default: the dataset's, 3x32x32)")
    classes: int | None = _synthetic(None,
        or_none(parse_whole("a number of classes", 2, MOST_CLASSES)),
        "classes of synthetic images, such as 1000 (default: the dataset's, 10)")
    length: int | None = _synthetic(None, or_none(parse_whole("a length", 1, 2**20)),
        "tokens, or other units, of each sequence, of --model gpt-small or a --workload of "
        "sequences (default: its own)", order=order_limit)
    loader: str = describe_axis("device", one_of(LOADERS),
        "where batches are made: on the device from data that stay there, or by torch's DataLoader "
        "on the CPU", affects=(DRAWS, FIT, WORK))
    workers: int = describe_axis(0, parse_whole("a number of workers", least=0),
        "worker processes of --loader torch; 0, torch's default, loads in the training process",
        affects=(FIT,), decided_by="loader")
    parallel: str = describe_axis("none", one_of(PARALLELS),
        "train one network on several GPUs; bench.sweep --list describes how",
        from_default=True)
    world_size: int = describe_axis(1, parse_whole("a number of GPUs"),
        "GPUs (on a CPU, processes) that train together; --batch-size is that of each",
        affects=(LEARNING, FIT, PROOF, WORK, FIRST), decided_by="parallel")
    grad_compression: str = describe_axis("none", one_of(GRAD_COMPRESSIONS),
        "with --parallel ddp or fsdp, the number format in which gradients are exchanged (default: "
        "their own)", affects=(FIT, PROOF, WORK, RECIPE), from_default=True, decided_by="parallel")
    sync_bn: bool = describe_axis(False, parse_switch,
        "with --parallel ddp, BatchNorm over the batches of all GPUs",
        affects=(FIT, PROOF, WORK, FIRST, RECIPE), decided_by="parallel")
    seed: int = describe_axis(0, parse_whole("a seed", 0, 2**31 - 1),
        "seed of weights, order and augmentation", affects=())
    device: str = describe_axis("cuda", one_of(DEVICES),
        "where to train: cuda or cpu (default: cuda if there is one)", common=True, plain=True)
    # fmt: on

    def __getattr__(self, name: str) -> str | None:
        if not is_own(name):
            raise AttributeError(name)
        return read_vary(self.vary).get(name)

    @property
    def compiled(self) -> bool:
        return self.compile != Case.compile

    @property
    def any_shape(self) -> bool | None:
        """Return what torch.compile takes as its ``dynamic``."""
        return {"off": False, "on": True}.get(self.dynamic)

    @property
    def grouped(self) -> bool:
        """Return whether a group of processes trains the network, each on a GPU of its own."""
        return self.parallel in ("ddp", "fsdp")

    @property
    def autotuned(self) -> bool:
        """Return whether warm-up times several ways to compute what a step computes."""
        return self.cudnn_benchmark or self.compile == "max-autotune"

    @property
    def own_graphs(self) -> bool:
        """Return whether torch.compile launches the network's kernels with its own CUDA graphs."""
        return self.compile in OWN_GRAPHS and self.device == "cuda"

    def label(self, axes: Iterable[str] | None = None) -> str:
        """Return a readable name by ``axes``, or `NAMING_AXES`: ``fp16 · loss scale 128 · batch
        size 512``.

        With several GPUs, ``batch_size`` is per GPU, so the global batch is named too.
        """
        named = list(axes or NAMING_AXES)
        if self.command is not None:  # the others are not what its script trains with
            placed = {"model", "command", "device", "memory_limit", "steps"}
            placed |= {*list_places(self.command)}
            named = [name for name in named if is_own(name) or name in placed]
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


def supposes_items(case: Case) -> bool:
    """Return whether a step of a command is taken to be of its batch size, if it says no other."""
    placed = case.command is not None and "batch_size" in list_places(case.command)
    return placed and case.items is None


def knows_epochs(case: Case) -> bool:
    """Return whether it is known how many epochs a case trains: a command without ``{epochs}``
    decides that itself."""
    return case.command is None or "epochs" in list_places(case.command)


AXES: dict[str, Axis] = {f.name: f.metadata["axis"] for f in fields(Case)}


def find_axis(name: str) -> Axis:
    """Return the description of an axis; those of a user's own placeholders share one."""
    return AXES["vary" if is_own(name) else name]


def list_axes(cases: Iterable[Any], among: Iterable[str] = AXES) -> list[str]:
    """Return the axes that cases, runs or results have, of ``among``: in place of ``vary`` those of
    the user's own placeholders."""
    own = [name for text in dict.fromkeys(case.vary for case in cases) for name in read_vary(text)]
    names = ([name] if name != "vary" else dict.fromkeys(own) for name in among)
    return [*chain.from_iterable(names)]


def lay_out(case: Case) -> dict[str, Any]:
    """Return the settings of a case by the names that files give its axes."""
    return {name_column(name): getattr(case, name) for name in list_axes([case])}


def spell_flag(axis: str, value: Value) -> list[str]:
    """Return the words with which a command line gives one value of an axis.

    >>> spell_flag("batch_size", 8), spell_flag("{depth}", "12")
    (['--batch-size', '8'], ['--vary', 'depth', '12'])
    """
    if is_own(axis):
        return ["--vary", name_column(axis), quote_value(str(value))]
    return [axis_flag(axis), spell_value(value)]


def change_axes(case: Case, values: Mapping[str, Any]) -> Case:
    """Return ``case`` with other values of some axes; None takes away an own one.

    >>> change_axes(Case(vary="depth=12 clip=1"), {"{depth}": None, "lr": 1.0}).vary
    'clip=1'
    """
    own = {name: value for name, value in values.items() if is_own(name)}
    others = {name: value for name, value in values.items() if name not in own}
    if own:
        others["vary"] = write_vary({**read_vary(case.vary), **own})
    return replace(case, **others)


list_values: Callable[[Case], tuple[Value, ...]] = attrgetter(*AXES)
"""The values of all axes of a case, in the order of `AXES`."""

make_case: Callable[..., Case] = cache(Case)
"""Return the case with these values of all axes, in the order of `AXES`; equal values give the same
object. With equal but distinct cases, finding 10,000 runs in a dict took 0.1 s more."""

FOLLOWS: dict[str, tuple[str, ...]] = {
    one.decided_by: tuple(name for name in AXES if AXES[name].decided_by == one.decided_by)
    for one in AXES.values()
    if one.decided_by
}
"""Axes that another one decides, by that one: they may change together with it."""

PARTS = ("fraction", "steps", "until")
"""Axes that say how much of an epoch is measured."""

SAME_QUESTION = (*PARTS, "evaluate", "profile")
"""Axes that say how a case was measured; they never distinguish two questions."""

SYNTHETIC_AXES = ("input", "classes")
"""Axes of synthetic images alone."""

NAMING_AXES = ("precision", "loss_scale", "batch_size")
"""The axes that name a case even where they do not vary."""

_AT_DEFAULT = ("model", "dataset", "precision", "batch_size", "lr", "fraction", "seed", "device")
"""Axes that are named at their defaults too, where they are named; others only say more."""

SWITCHES = (*(name for name, axis in AXES.items() if axis.default is False), "compile")
"""Axes whose flags need no value: ``--evaluate`` is ``--evaluate on``."""


def list_affecting(trait: Trait) -> tuple[str, ...]:
    """Return the axes that affect ``trait``."""
    return tuple(name for name, axis in AXES.items() if trait in axis.affects)


UNFITTED = tuple(name for name in AXES if name not in list_affecting(Trait.FIT))
"""Axes that do not change which batches fit in memory."""

UNTIMED = (*list_affecting(Trait.RATE), "seed")
"""Axes that change no step's work, but for the optimizer's: between those that are fused 0.4 to
0.55 ms of 62 to 417 on an H200. `bench.schema.optimization.UNFUSED` are compared by the axis alone.
Times are compared where two cases differ in them; what is learnt is not."""


def default_lr(optimizer: str) -> float:
    """Return the default learning rate of ``optimizer``; SGD's for a workload's own."""
    return OPTIMIZERS[Case.optimizer if optimizer == OWN else optimizer].lr


def free_axes(axis: str) -> tuple[str, ...]:
    """Return the axes in which two cases may differ when ``axis`` is compared: it and its
    followers; none for the empty name."""
    return (axis, *FOLLOWS.get(axis, ())) if axis else ()


def list_varying(cases: Iterable[Case], but: str = "") -> list[str]:
    """Return the axes to name each of ``cases`` by, without ``but``: `NAMING_AXES` and any that
    vary. A workload is named by its model."""
    distinct = {*cases}
    names = list_axes(distinct)
    columns = zip(names, zip(*map(attrgetter(*names), distinct), strict=True), strict=False)
    varying = {name for name, values in columns if len(set(values)) > 1}
    return [n for n in names if n in {*varying, *NAMING_AXES} and n not in ("workload", but)]


def _name_value(name: str, value: Value) -> str | None:
    if value == find_axis(name).default and name not in _AT_DEFAULT:
        return None
    if name == "workload" or value == OWN or (name == "batch_size" and value == 0):
        return None  # a workload is named by its model
    words = name_axis(name)
    if value is True:
        return words
    text = format_value(value)
    return text if find_axis(name).plain else f"{words} {text}"


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
    shared, naming = dict[str, str](), dict[str, Iterable[str]]()
    for name, column in zip(AXES, zip(*map(list_values, cases), strict=True), strict=False):
        texts = {value: format_value(value) for value in {*column}}
        if len(texts) > 1 or name in NAMING_AXES:
            naming[name] = map(texts.__getitem__, column)
        else:
            (shared[name],) = texts.values()
    rows = zip(*naming.values(), strict=True)
    return {"settings": shared, "cases": [dict(zip(naming, row, strict=True)) for row in rows]}


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
    if is_own(name):
        return text
    default: Value = AXES[name].default
    if text and text == format_value(default):
        return default  # as most cells of records and plans
    try:
        return AXES[name].parse(text)
    except ValueError as error:
        raise UsageError(f"{where} {text[:60]!r}: {error}") from None


def fill_command(case: Case, out: str = OUT) -> str:
    """Return the command of a case with its settings in it, and ``out``, a folder of its own.
    Raises UsageError: it gives no word for one of them."""
    assert case.command is not None
    own = {OUT: out, **{name_axis(axis): text for axis, text in read_vary(case.vary).items()}}
    named = dict.fromkeys(list_places(case.command))
    values = {
        name: own[name] if name in own else spell_value(getattr(case, name)) for name in named
    }

    def spell(name: str, text: str) -> str:
        if name in own:
            return text
        with suppress(ValueError):  # a value that no row can have needs no word
            return spell_value(AXES[name].parse(text))
        return text

    try:
        return fill_places(case.command, values, spell)
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
    if case.parallel == "dp":  # as torch.chunk
        size = -(-items // case.world_size)
        return [min(size, max(0, items - i * size)) for i in range(case.world_size)]
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
