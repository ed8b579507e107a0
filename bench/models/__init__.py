"""Networks by name. A name is a registry entry or anybody's own ``package.module:factory``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.errors import UsageError, nearest

if TYPE_CHECKING:
    from torch import nn

MODELS: dict[str, str] = {
    "dpn92": "bench.models.dpn:dpn92",
    "dpn26": "bench.models.dpn:dpn26",
    "dpn-small": "bench.models.dpn:dpn_small",
}


def parse_model(text: str) -> str:
    """Check a model's name without importing it.

    Raises:
        ValueError: neither a registered name nor of the form ``package.module:factory``.
    """
    module, colon, factory = text.partition(":")
    if text in MODELS or (
        colon and factory.isidentifier() and all(p.isidentifier() for p in module.split("."))
    ):
        return text
    raise ValueError(f"{nearest(text, list(MODELS))} (or package.module:factory for your own)")


def check_model(name: str) -> None:
    """Check that the module of a user's own model is there, without running its factory.

    Raises:
        UsageError: it is not.
    """
    from importlib.util import find_spec

    module = MODELS.get(name, name).partition(":")[0]
    try:
        found = find_spec(module)
    except (ImportError, ValueError) as error:
        raise UsageError(f"--model {name!r}: {error}; give package.module:factory") from error
    if found is None:
        raise UsageError(f"--model {name!r}: there is no module {module!r} on Python's path")


def build_model(name: str) -> nn.Module:
    """Build the network ``name``: (N, 3, 32, 32) float images to (N, classes) logits.

    Raises:
        UsageError: the module cannot be imported, has no such factory, or that factory
            does not return an ``nn.Module``.
    """
    from importlib import import_module

    from torch import nn

    module_name, _, factory_name = MODELS.get(name, name).partition(":")
    try:
        factory = getattr(import_module(module_name), factory_name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"model {name!r} cannot be loaded: {error}") from error
    model = factory()
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model {name!r} returned {type(model).__name__}; a factory returns a torch.nn.Module"
        )
    return model
