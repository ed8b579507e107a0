"""The kinds of work that a training step consists of, and how much of each there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.text import Explained


class Kind(Explained):
    """A kind of work. What decides is the operation; of the last four, where in the step it ran."""

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
    OTHER = "other", "other operations"
    INPUT = "input", "input pipeline"
    LOSS = "loss", "loss"
    OPTIMIZER = "optimizer", "optimizer and master weights"
    LOSS_SCALING = "loss_scaling", "loss scaling"


COMPUTING = frozenset(
    {Kind.CONVOLUTION_1X1, Kind.CONVOLUTION, Kind.GROUPED, Kind.MATMUL, Kind.ATTENTION}
)
"""Kinds that multiply and add; all others do little else than move memory."""


@dataclass(frozen=True)
class Label:
    """What tells operations of a step apart: those with the same label are counted together.

    ``operation`` is the name of one, or for a convolution its window, groups and channels;
    ``format`` is the number format of what it reads first, by torch's name for it, or the two of a
    cast: ``float32→bfloat16``. Neither depends on the batch size.
    """

    kind: Kind
    operation: str
    format: str = ""


@dataclass
class Work:
    """How much of one kind a step does.

    ``bytes`` counts, for each operation, every element that it reads and every one that it writes
    once: the least that separate operations move, as if nothing stayed in a cache between them.
    """

    calls: int = 0
    flop: float = 0.0
    bytes: float = 0.0

    def add(self, other: Work) -> None:
        """Add other work of the same kind."""
        self.calls += other.calls
        self.flop += other.flop
        self.bytes += other.bytes


def sum_kinds(work: Mapping[Label, Work]) -> dict[Kind, Work]:
    """All work of each kind."""
    kinds: dict[Kind, Work] = {}
    for label, one in work.items():
        kinds.setdefault(label.kind, Work()).add(one)
    return kinds
