"""Recomputing activations (activation checkpointing): what a forward pass made is not kept for the
backward pass, but computed again in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from bench.base.errors import UsageError
from bench.networks.modules import find_batchnorm
from bench.schema.axis import read_budget


@dataclass(frozen=True)
class Recompute:
    """What of a network is computed again: a value of ``--recompute``, and the names that a
    workload gives its ``blocks``, empty for those that `find_blocks` finds."""

    setting: str
    blocks: str = ""

    def apply(self, model: nn.Module) -> str:
        """Let each backward pass of ``model`` compute again what this says, from outside: the
        network keeps its modules, weights and names. Return a note for the reader.

        A budget is a switch of torch.compile in this process. Raises UsageError: as `find`.
        """
        if (budget := read_budget(self.setting)) is not None:
            import torch._functorch.config as compiler

            compiler.activation_memory_budget = budget
        parts = self.find(model)
        for part in parts:
            norms = [module for module in part.modules() if isinstance(module, _NormBase)]
            part.forward = partial(_run, part.forward, norms)
        return f"computed again in the backward pass: {count_kinds(parts)}" if parts else ""

    def find(self, model: nn.Module) -> list[nn.Module]:
        """Return the parts of ``model`` of which only the inputs are kept: its blocks and, for
        ``full``, also those beside them that have layers of their own. Of a single layer, keeping
        its input saves nothing. Raises UsageError: it has none, or BatchNorm that was scripted."""
        if self.setting not in ("blocks", "full"):
            return []
        parts = list_blocks(model, self.blocks)
        if self.setting == "full":
            parts = [*_list_parts(model, {*parts})]
        if not parts:
            other = "full" if any(True for _ in _list_parts(model, set())) else "none"
            raise UsageError(
                f"--recompute {self.setting}: the network repeats no blocks in a list of its own; "
                f"name them in a workload's blocks, such as 'layers.*', or give --recompute {other}"
            )
        if any(map(find_batchnorm, chain.from_iterable(part.modules() for part in parts))):
            raise UsageError(
                f"--recompute {self.setting}: BatchNorm that is scripted or traced would count "
                "each batch twice; return the network as it is written"
            )
        return parts


def count_kinds(parts: Sequence[nn.Module]) -> str:
    """Say how many parts there are of each class."""
    kinds = Counter(_find_kind(part).__name__ for part in parts)
    return ", ".join(f"{n} {kind}" for kind, n in kinds.items())


def _find_kind(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, of which torch's fully_shard has made another."""
    kind, *rest = type(module).__mro__
    return rest[1] if kind.__name__ == f"FSDP{rest[1].__name__}" else kind


def list_blocks(model: nn.Module, names: str) -> list[nn.Module]:
    """Return the blocks of a network: those of which a name matches one of comma-separated
    ``names``, such as ``layers.*``, else those of `find_blocks`. Raises UsageError: no part has
    such a name."""
    if not names:
        return find_blocks(model)
    patterns = [name.strip() for name in names.split(",")]
    named = [
        module
        for name, module in model.named_modules()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
    if not named:
        raise UsageError(f"blocks of the workload: no part of the network is named {names!r}")
    return _keep_outermost(named)


_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that a network repeats: modules in lists, each with layers of its own, of
    the classes of which one list holds two or more. Of blocks within others, those of which a list
    holds the most are taken. Plain lists are blocks only where nothing else is, since the stages
    of many networks are lists of their blocks."""
    listed = [
        [child for child in module.children() if any(True for _ in child.children())]
        for module in model.modules()
        if isinstance(module, _LISTS)
    ]
    most: Counter[type[nn.Module]] = Counter()
    for each in listed:
        most |= Counter(map(_find_kind, each))
    found, inside = set[nn.Module](), set[nn.Module]()
    for kind, n in sorted(most.items(), key=lambda one: (one[0] in _LISTS, -one[1])):
        if n < 2 or (kind in _LISTS and found):
            continue
        every = _keep_outermost([m for each in listed for m in each if _find_kind(m) is kind])
        apart = [m for m in every if inside.isdisjoint(m.modules())]
        found.update(apart)
        inside.update(part for m in apart for part in m.modules())
    return [module for module in model.modules() if module in found]


def _keep_outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    inner = {part for module in modules for part in module.modules() if part is not module}
    return [module for module in dict.fromkeys(modules) if module not in inner]


def _list_parts(model: nn.Module, blocks: set[nn.Module]) -> Iterator[nn.Module]:
    for child in model.children():
        modules = {*child.modules()}
        if child in blocks:
            yield child
        elif modules & blocks or isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _list_parts(child, blocks)  # such a list is not called itself
        elif len(modules) > 1:
            yield child


def _run(forward: Callable[..., Any], norms: list[_NormBase], /, *inputs: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **named)
    if torch.compiler.is_compiling():  # a compiled graph updates statistics once
        return checkpoint(forward, *inputs, use_reentrant=False, **named)
    contexts = partial(_make_contexts, norms)
    return checkpoint(partial(forward, **named), *inputs, use_reentrant=False, context_fn=contexts)


def _make_contexts(norms: list[_NormBase]) -> tuple[Any, Any]:
    return nullcontext(), _keep_statistics(norms)


@contextmanager
def _keep_statistics(norms: list[_NormBase]) -> Iterator[None]:
    """Leave the running statistics as they are: they have seen the batch in the forward pass.

    With a momentum of 0 they are kept, and the same tensors are saved as before, which torch's
    checkpoint checks; without running statistics, fewer would be."""
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, tracked) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, tracked
