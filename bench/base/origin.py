"""Origins of the rows of a sweep: the executors, as data, and published figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ExecutorKind:
    """An executor as ``module:class``, and what must be known about it before it is loaded."""

    place: str
    about: str = ""  # what it does, for the help of --executor
    here: bool = True  # its lanes are on this machine: they are known before it starts, and a run
    # can be asked after each epoch whether to go on; else it finds a place for each case itself


EXECUTORS: dict[str, ExecutorKind] = {
    "subprocess": ExecutorKind(
        "bench.workers.executors.subprocess:SubprocessExecutor", "on this machine"
    ),
    "ray": ExecutorKind(
        "bench.workers.executors.ray:RayExecutor", "on the nodes of a Ray cluster", here=False
    ),
}

OF_OTHERS = {"published": "published", "bare loop": "measured"}
"""Executors named by rows of results/reference, not used by sweeps, and their origins."""

LABELS: dict[str, str] = {
    "unknown": "not known to be measured",
    "published": "published figures",
}
"""Labels of rows that were not measured."""


def describe_origin(executors: Iterable[str]) -> Iterator[str]:
    """Yield a sentence if this version knows none of the executors of the rows."""
    names = [*dict.fromkeys(executors)]
    if names and not {*names} & {*EXECUTORS, *OF_OTHERS}:
        yield (
            f"Nothing here is known to be measured: these rows came from the {', '.join(names)} "
            "executor, which this version does not know."
        )
