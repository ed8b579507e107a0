"""Origins of the rows of a sweep: the executors, as data, and published figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from bench.errors import UsageError


@dataclass(frozen=True)
class Kind:
    """An executor as ``module:class``, and what must be known about it before it is loaded."""

    place: str
    about: str = ""  # what it does, for the help of --executor
    trains: bool = True  # if not, nothing is inspected or measured: its rows are no measurements
    here: bool = True  # its lanes are on this machine: they are known before it starts, and a run
    # can be asked after each epoch whether to go on; else --address says where they are


EXECUTORS: dict[str, Kind] = {
    "subprocess": Kind("bench.executors.subprocess:SubprocessExecutor", "on this machine"),
    "ray": Kind(
        "bench.executors.ray.executor:RayExecutor", "on the nodes of a Ray cluster", here=False
    ),
    "fake": Kind(
        "bench.executors.fake:FakeExecutor", "makes up figures, to try the harness", trains=False
    ),
}

Origin = Literal["measured", "fake", "published", "unknown"]

OF_OTHERS: dict[str, Origin] = {"published": "published", "bare loop": "measured"}
"""Executors named by rows of results/reference, not used by sweeps, and their origins."""

LABELS: dict[str, str] = {
    "fake": "made up",
    "unknown": "not known to be measured",
    "published": "published figures",
}
"""Labels of rows that were not measured."""

OPENINGS: dict[Origin, str] = {
    "fake": "Nothing here was measured: these rows came from the {} executor.",
    "unknown": (
        "Nothing here is known to be measured: these rows came from the {} executor, which this "
        "version does not know."
    ),
}
"""The opening line if no row was measured, by the origin of an executor's rows."""


def find_origin(executor: str) -> Origin:
    """Return the origin of rows by their column ``executor``."""
    if executor in EXECUTORS:
        return "measured" if EXECUTORS[executor].trains else "fake"
    return OF_OTHERS.get(executor, "unknown")


def describe_origin(executors: Iterable[str]) -> Iterator[str]:
    """Yield a sentence on each executor of the rows, if none of them measured anything."""
    distinct = dict.fromkeys(executors)
    if all(find_origin(executor) in OPENINGS for executor in distinct):
        yield from (OPENINGS[find_origin(executor)].format(executor) for executor in distinct)


REAL: tuple[Origin, ...] = ("measured", "published")


def are_mixed(executors: Iterable[str]) -> bool:
    """Return whether made-up rows are mixed with real ones. Rows of unknown origin may be beside
    both, and are labelled."""
    origins = {*map(find_origin, executors)}
    return "fake" in origins and not origins.isdisjoint(REAL)


def refuse_mixture(having: Iterable[tuple[str, str]], mend: str) -> None:
    """Refuse rows that `are_mixed`. ``having`` are pairs of who has rows, with its verb, and of
    their executor. Raises UsageError: it names both, and says how to ``mend`` that."""
    pairs = list(having)
    if not are_mixed(executor for _, executor in pairs):
        return
    first = {find_origin(executor): (who, executor) for who, executor in reversed(pairs)}
    real = next(origin for origin in REAL if origin in first)
    who, executor = first["fake"]
    raise UsageError(
        f"{who} rows of --executor {executor}, which nothing measured, and {first[real][0]} "
        f"{real} ones; {mend}"
    )
