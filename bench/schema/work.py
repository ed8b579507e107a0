"""The kinds of work in a training step, and how much of each there is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from bench.base.text import Explained

_T = TypeVar("_T")


class WorkKind(Explained):
    """A kind of work, by the operation; the last four, by the part of the step that it ran in."""

    CONVOLUTION_1X1 = "convolution_1x1", "1×1 convolutions"
    CONVOLUTION = "convolution", "k×k convolutions"
    GROUPED = "grouped_convolution", "grouped convolutions"
    MATMUL = "matmul", "matrix products"
    ATTENTION = "attention", "attention"
    RECURRENT = "recurrent", "recurrent layers"
    NORMALISATION = "normalisation", "normalisation"
    ELEMENTWISE = "elementwise", "elementwise operations"
    REDUCTION = "reduction", "reductions and pooling"
    CAST = "cast", "casts to another number format"
    COPY = "copy", "copies and fills"
    LAYOUT = "layout", "layout changes"
    CONCATENATION = "concatenation", "concatenation and slicing"
    INDEXING = "indexing", "embeddings and indexing"
    EXCHANGE = "exchange", "exchange between processes"
    OTHER = "other", "other operations"
    INPUT = "input", "input pipeline"
    LOSS = "loss", "loss"
    OPTIMIZER = "optimizer", "optimizer and master weights"
    LOSS_SCALING = "loss_scaling", "loss scaling"


COMPUTING = frozenset(
    {
        WorkKind.CONVOLUTION_1X1,
        WorkKind.CONVOLUTION,
        WorkKind.GROUPED,
        WorkKind.MATMUL,
        WorkKind.ATTENTION,
    }
)
"""Kinds that multiply and add; all others mostly move memory."""


@dataclass(frozen=True)
class Label:
    """What identifies operations of a step: those with the same label are counted together.

    ``operation`` is the name, or for a convolution its window, groups and channels; ``format`` is
    the number format of the first input, by torch's name, or the two of a cast:
    ``float32→bfloat16``. Neither depends on the batch size.
    """

    kind: WorkKind
    operation: str
    format: str = ""


@dataclass
class Work:
    """How much of one kind a step does.

    ``bytes`` counts, for each operation, each element that it reads or writes once: the minimum
    that separate operations move, as if no cache kept anything between them. ``flop_per_item`` and
    ``bytes_per_item`` are what another item in each micro-batch adds; None if unknown.
    """

    calls: int = 0
    flop: float = 0.0
    bytes: float = 0.0
    flop_per_item: float | None = None
    bytes_per_item: float | None = None

    def add(self, other: Work) -> None:
        self.calls += other.calls
        self.flop += other.flop
        self.bytes += other.bytes


def add_items(work: _T, items: int) -> _T:
    """Return a `Work`, or a row of it, with ``items`` more (or fewer) items per micro-batch; its
    values per item must be known."""
    one: Any = work
    flop, bytes = items * one.flop_per_item, items * one.bytes_per_item
    more: _T = replace(one, flop=one.flop + flop, bytes=one.bytes + bytes)
    return more


ANY_CONVOLUTION = frozenset(
    [
        "convolution",
        "convolution_overrideable",
        "_convolution",
        "cudnn_convolution",
        "mkldnn_convolution",
        "_slow_conv2d_forward",
        "thnn_conv2d",
        "miopen_convolution",
        "convolution_backward",
    ]
)
MOVES = frozenset({"_to_copy", "to", "copy", "clone", "contiguous", "_foreach_copy"})


def base_name(name: str) -> str:
    """Return an operation's name without namespace, overload and in-place mark.

    >>> base_name("aten.add_.Tensor"), base_name("aten::_to_copy"), base_name("aten._foreach_mul_")
    ('add', '_to_copy', '_foreach_mul')
    """
    plain = name.replace("::", ".").split(".")[1 if "." in name or "::" in name else 0]
    return plain.rstrip("_") if not plain.startswith("__") else plain


def find_part(region: str) -> WorkKind | None:
    """Return the part of a step whose region torch itself marks by this name, in any training: an
    optimizer's step, or a DataLoader's next batch; None for another region."""
    return _MARKED.get(region.partition("#")[0])


_MARKED = {"Optimizer.step": WorkKind.OPTIMIZER, "enumerate(DataLoader)": WorkKind.INPUT}


STEPS_REGION = "bench::steps"
"""The region of a trace that holds all steps and nothing else."""

NETWORK_REGION = "bench::network"
"""The region of what is the network's within that of another part."""


def place_kind(kind: WorkKind, part: WorkKind | None) -> WorkKind:
    """Return the kind of an operation within a part of the step: that part. A network may run
    inside its loss, though, so products and convolutions there keep their kind."""
    return kind if part is None or (part is WorkKind.LOSS and kind in COMPUTING) else part


def read_groups(name: str, args: Sequence[Any]) -> int:
    """Return the groups of a convolution, by its `base_name` and its arguments in order."""
    places = {"convolution_backward": 9, "cudnn_convolution": 5, "mkldnn_convolution": 6}
    at = places.get(name, 8)
    return int(args[at]) if len(args) > at else 1


def label_convolution(weight: Sequence[int], groups: int, format: str) -> Label:
    """Return the label of a convolution, by the shape of its weights and its groups.

    >>> label_convolution((96, 3, 3, 3), 32, "float32").operation
    '3×3, 32 groups of 3→3'
    """
    outputs, inputs, *window = weight
    shape = "×".join(map(str, window))
    if groups > 1:
        name = f"{shape}, {groups} groups of {inputs}→{outputs // groups}"
        return Label(WorkKind.GROUPED, name, format)
    kind = WorkKind.CONVOLUTION_1X1 if math.prod(window) == 1 else WorkKind.CONVOLUTION
    return Label(kind, f"{shape}, {inputs}→{outputs}", format)
