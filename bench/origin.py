"""What the rows of a sweep come from: the executors, as data, and figures that were published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
        "bench.executors.fake:FakeExecutor", "makes figures up, to try the harness", trains=False
    ),
}

Origin = Literal["measured", "fake", "published"]


def find_origin(executor: str) -> Origin:
    """Where rows come from, by what their column ``executor`` has."""
    if executor == "published":
        return "published"
    return "fake" if executor in EXECUTORS and not EXECUTORS[executor].trains else "measured"
