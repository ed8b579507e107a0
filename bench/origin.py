"""What the rows of a sweep come from: the executors, as data, and figures that were published."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from bench.errors import UsageError


@dataclass(frozen=True)
class Kind:
    """An executor as ``module:class``, and what has to be known of it before it is loaded."""

    place: str
    about: str = ""  # what it does, for --executor's help
    trains: bool = True  # else nothing is looked at or measured, and its rows are no measurements
    here: bool = True  # its lanes are of this machine: before it starts, it can say which, and a
    # run can be asked after each epoch whether to go on; else --address says where they are


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
"""Executors that rows of results/reference name, which no sweep has, and what these came from."""

LABELS: dict[str, str] = {
    "fake": "made up",
    "unknown": "not known to be measured",
    "published": "published figures",
}
"""What rows that were not measured are called."""

OPENINGS: dict[Origin, str] = {
    "fake": "Nothing here was measured: these rows came from the {} executor.",
    "unknown": (
        "Nothing here is known to be measured: these rows came from the {} executor, which this "
        "version does not know."
    ),
}
"""What is said first where no row was measured, by where rows of an executor come from."""


def find_origin(executor: str) -> Origin:
    """Where rows come from, by what their column ``executor`` has."""
    if executor in EXECUTORS:
        return "measured" if EXECUTORS[executor].trains else "fake"
    return OF_OTHERS.get(executor, "unknown")


def tell_origin(executors: Iterable[str]) -> Iterator[str]:
    """A sentence on each of the executors that rows come from, where these measured nothing."""
    distinct = dict.fromkeys(executors)
    if all(find_origin(executor) in OPENINGS for executor in distinct):
        yield from (OPENINGS[find_origin(executor)].format(executor) for executor in distinct)


REAL: tuple[Origin, ...] = ("measured", "published")


def are_mixed(executors: Iterable[str]) -> bool:
    """Whether rows that were made up stand beside real ones. What is not known to be made up may
    stand beside both, and is told where it is."""
    origins = {*map(find_origin, executors)}
    return "fake" in origins and not origins.isdisjoint(REAL)


def refuse_mixture(having: Iterable[tuple[str, str]], mend: str) -> None:
    """Refuse what is `are_mixed`, by pairs of who has rows, with its verb, and of which executor.
    Raises UsageError: it names both, and says how to ``mend`` that."""
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
