"""Freezing the weights of a network that ``--freeze`` names.

A BatchNorm layer whose weights are frozen runs in evaluation mode, so that its running statistics
do not change either. Other layers train as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from bench.base.errors import UsageError, nearest
from bench.networks.modules import calls_batchnorm, find_batchnorm, is_batchnorm

if TYPE_CHECKING:
    from torch import Tensor, nn

NONE, BACKBONE, BATCHNORM = "none", "backbone", "bn"

FREEZES: dict[str, str] = {
    NONE: "nothing; all weights are trained",
    BACKBONE: "all but the head, the layer that gives the outputs",
    BATCHNORM: "all BatchNorm layers",
    "PATTERN": "layers or weights by name, such as layer1 or 'stages.*' or '*.bias'",
}
"""Values of ``--freeze``; several can be given, separated by commas, except `NONE`."""


def parse_freeze(text: str) -> str:
    """Check a value of ``--freeze`` without knowing the network. Raises ValueError: it is neither
    `NONE` nor names separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    if parts == [NONE]:
        return NONE
    if NONE in parts or not all(part.isprintable() and part.split() == [part] for part in parts):
        raise ValueError(
            f"give {NONE}, {BACKBONE}, {BATCHNORM} or names of layers or weights, such as layer1 "
            "or '*.bias', separated by commas"
        )
    return ",".join(parts)


def freeze(
    model: nn.Module, setting: str, find_head: Callable[[nn.Module], nn.Module]
) -> list[nn.Module]:
    """Freeze the weights named by ``setting``, from `parse_freeze`; put frozen BatchNorm layers in
    evaluation mode, which ``model.train()`` ends, and return these layers.

    A pattern selects weights by their own name or by the name of a layer that contains them. Frozen
    weights require no gradient. Weights frozen by the network's own code stay frozen. ``find_head``
    returns the layer that `BACKBONE` leaves trainable. Raises UsageError: a part of the setting
    freezes nothing, nothing is left to train, or a BatchNorm layer was traced as it trains.
    """
    if setting == NONE:
        return []
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    chosen = {part: _choose(model, part, tensors, find_head) for part in setting.split(",")}
    every = set().union(*chosen.values())
    for parameter in model.parameters():
        if id(parameter) in every:
            parameter.requires_grad_(False)
    layers = [
        layer
        for layer in _list_batchnorm(model)
        if _hold(layer) & every and not any(p.requires_grad for p in layer.parameters())
    ]
    for part, ids in chosen.items():
        if not ids & (trained | _hold(*layers)):
            there = [BACKBONE, BATCHNORM, *dict(model.named_modules()), *tensors]
            there = [name for name in there if name != part]
            hint = nearest(part.rstrip(".*"), there, f"it has {', '.join(list(tensors)[:9])}, …")
            raise UsageError(f"--freeze {part}: nothing that trains has this name; {hint}")
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(f"--freeze {setting}: nothing is left to train; freeze less")
    for layer in layers:
        layer.eval()
        if any(find_batchnorm(layer)):
            raise UsageError(
                f"--freeze {setting}: a BatchNorm layer was traced as it trains, and a trace keeps "
                "that; return the network as it is written, or by torch.jit.script"
            )
    return layers


def _choose(
    model: nn.Module,
    part: str,
    tensors: Mapping[str, Tensor],
    find_head: Callable[[nn.Module], nn.Module],
) -> set[int]:
    if part == BACKBONE:
        return {id(tensor) for tensor in tensors.values()} - _hold(find_head(model))
    if part == BATCHNORM:
        return _hold(*_list_batchnorm(model))
    return {
        id(tensor)
        for name, tensor in tensors.items()
        if fnmatchcase(name, part) or fnmatchcase(name, f"{part}.*")
    }


def normalises_batches(model: nn.Module, still: Sequence[nn.Module] = ()) -> bool:
    """Return whether a BatchNorm layer of torch's normalises by the batch, which then needs two
    items. Layers in evaluation mode (``still``, from `freeze`) use running statistics instead, if
    they have them."""
    return any(
        layer not in still or getattr(layer, "running_mean", None) is None
        for layer in filter(calls_batchnorm, model.modules())
    )


def _list_batchnorm(model: nn.Module) -> list[nn.Module]:
    return list(filter(is_batchnorm, model.modules()))


def _hold(*layers: nn.Module) -> set[int]:
    return {id(t) for layer in layers for t in (*layer.parameters(), *layer.buffers())}
