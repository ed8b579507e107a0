"""Whether the work of a step ran in the number format that its label says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bench.precision import LEAST_LABELLED, Precision, list_formats
from bench.work import COMPUTING, Label, Work, share_formats

if TYPE_CHECKING:
    from torch import nn


def judge_formats(
    work: Mapping[Label, Work], precision: Precision, model: nn.Module | None = None
) -> tuple[float | None, str]:
    """Return the share of a step's FLOP in the format of a precision, and what ran instead if that
    is less than `LEAST_LABELLED`; empty otherwise. The share is None if nothing was multiplied.
    ``work`` is that of the step: what its operations read, whatever the network, or the code that
    runs it, made of the precision. A weight of ``model`` that has another format is named."""
    shares = share_formats(work)
    if not shares:
        return None, ""
    formats = list_formats(precision)
    labelled = sum(shares.get(name, 0.0) for name in formats)
    if labelled >= LEAST_LABELLED:
        return labelled, ""
    ran = next(name for name in shares if name not in formats)
    weight = _find_weight(model, ran) if model is not None and ran != precision.weights else ""
    where = weight or _find_operation(work, ran)
    return labelled, f"{100 * shares[ran]:.0f} % of the FLOP of a step ran in {ran} ({where})"


def _find_weight(model: nn.Module, format: str) -> str:
    """Name the first weight that has the format; empty without one."""
    for name, weight in model.named_parameters():
        if str(weight.dtype) == f"torch.{format}":
            return f"the weight {name} is {format}"
    return ""


def _find_operation(work: Mapping[Label, Work], format: str) -> str:
    """Name the operation that does most of the FLOP in a format: its inputs were cast to it."""
    those = {
        label: one.flop
        for label, one in work.items()
        if label.format == format and label.kind in COMPUTING
    }
    most = max(those, key=lambda label: those[label])
    return f"most of it in {most.kind.meaning}: {most.operation}"
