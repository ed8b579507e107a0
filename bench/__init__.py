"""Measure what precision, batch size and loss scale do to time, memory and learning on this GPU.

In a script that `bench.sweep --command` runs, `step` and `epoch` say what it does. In Python,
`sweep` measures and `read` reads what was measured; `Workload`, `Images`, `Loss` and `Network` are
what a training of one's own is made of. The rest of the package is loaded when they are asked for.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bench.workers.script import epoch, step

if TYPE_CHECKING:
    from bench.api import Sweep, read, sweep
    from bench.networks.workloads import Images, Loss, Network, Workload

__all__ = ["Images", "Loss", "Network", "Sweep", "Workload", "epoch", "read", "step", "sweep"]


class CallablePackage(ModuleType):
    """A package with the name of a function: calling it calls that one of `bench.api`."""

    def __call__(self, *given: Any, **settings: Any) -> Any:
        """Measure every combination of some settings; see `bench.api.sweep`."""
        from bench import api

        return getattr(api, self.__name__.rpartition(".")[2])(*given, **settings)


def __getattr__(name: str) -> Any:
    if name == "sweep":
        return import_module("bench.sweep")
    if name in ("Sweep", "read"):
        return getattr(import_module("bench.api"), name)
    if name in ("Images", "Loss", "Network", "Workload"):
        return getattr(import_module("bench.networks.workloads"), name)
    if name == "__version__":
        return import_module("bench.base.installation").find_version("precision-bench")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
