"""The result of a search, from its probes alone: the wall, and the batch size to use."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from bench.wall.search import MARGIN, Ending, Goal, MemoryLine, Probe, SearchState, decide


@dataclass(frozen=True)
class Wall:
    """The result for cases that differ only in the batch size; memory in bytes, margin as a share.

    ``largest`` is the largest batch size that trained, ``smallest_failing`` the smallest above it
    that did not; sizes between the two are not known. From ``thrashes_from``, a batch trains only
    by freeing the allocator's cache, in a probe or in a whole epoch. ``recommended`` is predicted
    to leave ``margin`` of the memory free; it is at most the size that a longer run confirmed, and
    below ``thrashes_from``. ``predicted`` is the first prediction of the wall, ``line`` the memory
    of batches near it. ``probes`` counts runs, including failed ones; ``ending`` is None while the
    search has not ended.
    """

    largest: int | None
    smallest_failing: int | None
    thrashes_from: int | None
    recommended: int | None
    predicted: int | None
    line: MemoryLine | None
    available_bytes: float | None
    margin: float
    probes: int
    ending: Ending | None

    @property
    def confirmed(self) -> bool:
        """Whether the search ended with a longer run that confirmed the largest batch."""
        return self.ending in (Ending.FOUND, Ending.NO_WALL)

    @property
    def off(self) -> int | None:
        """Images by which the first prediction exceeded the largest batch that trains; None if no
        wall was found."""
        if self.predicted is None or self.largest is None or self.smallest_failing is None:
            return None
        return self.predicted - self.largest


def conclude(
    probes: Sequence[Probe], goal: Goal, margin: float = MARGIN, retried: Collection[int] = ()
) -> Wall:
    """Derive the wall from the probes, in the order they were made. ``retried`` are batch sizes at
    which the allocator retried in whole epochs."""
    standing = SearchState(probes, goal)
    asked = decide(probes, goal)
    of_probes = (p.batch_size for p in probes if p.trained and p.alloc_retries)
    thrashes_from = min([*of_probes, *retried], default=None)
    return Wall(
        largest=standing.largest,
        smallest_failing=standing.smallest_refused,
        thrashes_from=thrashes_from,
        recommended=_recommend(standing, goal, margin, thrashes_from),
        predicted=_predict_first(probes, goal),
        line=standing.line,
        available_bytes=goal.available_bytes,
        margin=margin,
        probes=len(probes),
        ending=asked if isinstance(asked, Ending) else None,
    )


def _recommend(
    standing: SearchState, goal: Goal, margin: float, thrashes_from: int | None
) -> int | None:
    confirmed, available = standing.confirmed, goal.available_bytes
    if confirmed is None:
        return None

    def leaves_margin(size: int) -> bool:
        if available is None or not standing.points:
            return size <= (1 - margin) * confirmed
        used = standing.line.predict(size) if standing.line else standing.points.get(size)
        return used is not None and used <= (1 - margin) * available

    sizes = (n for n in goal.sizes if n <= confirmed and n < (thrashes_from or n + 1))
    return max(filter(leaves_margin, sizes), default=None)


def _predict_first(probes: Sequence[Probe], goal: Goal) -> int | None:
    """Return the first prediction of the wall: as soon as two batch sizes had trained."""
    for count in range(2, len(probes) + 1):
        wall = SearchState(probes[:count], goal).predict_wall()
        if wall is not None:
            return max((size for size in goal.sizes if size <= wall), default=0)
    return None
