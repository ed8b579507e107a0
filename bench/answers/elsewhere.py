"""What other folders of `results/` have of a card, a network and its data."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from bench.results.store.reader import find_records, list_results, read_rows
from bench.results.store.rows import Row
from bench.results.study.runs import Result
from bench.results.study.sweeps import REFERENCE
from bench.schema.axis import Trait
from bench.schema.case import Case, list_affecting
from bench.schema.record import Status

_CARD = ("device", "world_size", "power_limit", "memory_limit")
_tell = attrgetter("model", *list_affecting(Trait.DATA), *_CARD)


class Elsewhere(NamedTuple):
    """An epoch that another folder has; ``where`` names it, and how it was measured."""

    where: str
    row: Row
    time_s: float


def find_fastest(like: Result, levers: Collection[str], but: Collection[Path]) -> Elsewhere | None:
    """Return the fastest epoch that other folders have of the card, network and data of a case,
    with any of some axes not at its default; None if none is faster than that case."""
    found = [
        one
        for one in _list_epochs(like, but)
        if any(getattr(one.row.case, axis) != getattr(Case, axis) for axis in levers)
    ]
    best = min(found, key=lambda one: one.time_s, default=None)
    return best if best and best.time_s < like.epoch_time_s else None


def _list_epochs(like: Result, but: Collection[Path]) -> Iterator[Elsewhere]:
    known = {path.resolve() for path in but}
    for path in list_results(REFERENCE.parents[1]):
        if path.resolve() in known or not _names(path, like.gpu):
            continue
        for row in read_rows(path):
            case, time_s = row.case, row.number("epoch_time_s")
            same = _tell(case) == _tell(like) and row.gpu == like.gpu
            if same and row.status is Status.OK and time_s:
                how = ", in a bare loop" * (row.executor == "bare loop")
                yield Elsewhere(path.name.removesuffix(".csv") + how, row, time_s)


def _names(path: Path, gpu: str) -> bool:
    """Return whether the records of a folder name a card, without reading them as rows."""
    return any(gpu.encode() in file.read_bytes() for file in find_records(path))
