"""What helps where a row is doubted: of several ways, those that such a row can take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.limits import BUSY_CORES
from bench.rules import takes
from bench.text import capitalize

if TYPE_CHECKING:
    from bench.study.runs import Result, Run

Fits = Callable[["Run | Result"], bool]


@dataclass(frozen=True)
class Way:
    """A way to help, such as ``a larger --fraction``: for rows whose training takes its flags, and
    that ``fits``."""

    text: str
    fits: Fits = lambda row: True

    def is_open(self, row: Run | Result) -> bool:
        return takes(row.case, self.text) and self.fits(row)


@dataclass(frozen=True)
class Remedy:
    """A sentence on what helps: ``lead``, the ``ways`` that a row can take, and ``end``; without
    any of them, ``otherwise``."""

    lead: str
    ways: tuple[Way, ...]
    otherwise: str = ""
    end: str = "."

    def advise(self, rows: Iterable[Run | Result]) -> str:
        """Return the sentence for these rows; both where only some can take a way."""
        return " ".join(self._write([*rows]))

    def _write(self, rows: list[Run | Result]) -> Iterator[str]:
        taken = [list_open(self.ways, row) for row in rows]
        ways = [way.text for way in self.ways if any(way.text in some for some in taken)]
        if ways:
            ends = [", ".join(ways[:-1]), ways[-1]]
            yield capitalize(f"{self.lead} {' or '.join(filter(None, ends))}{self.end}".strip())
        if self.otherwise and not all(taken):
            yield self.otherwise


def say(text: str) -> Remedy:
    """Return a remedy for any row of its doubt."""
    return Remedy("", (), text)


def _can_measure_more(row: Run | Result) -> bool:
    return row.case.fraction < 1


def _is_cut(row: Run | Result) -> bool:
    return row.case.steps is not None


def _may_have_company(row: Run | Result) -> bool:
    """Return whether other programs were seen, or nobody looked for them."""
    quiet = row.other_cores <= BUSY_CORES and not row.neighbours_computing > 0
    return not quiet


def list_open(ways: Iterable[Way], row: Run | Result) -> list[str]:
    """Return the ways that a row can take."""
    return [way.text for way in ways if way.is_open(row)]


LONGER = (Way("a larger --fraction", _can_measure_more), Way("a larger --steps", _is_cut))

QUIETER = Remedy(
    "", (Way("close other programs,", _may_have_company), Way("use --repeats 5 or more"))
)
"""The remedy for noise: the range of five runs holds the median of five more in 83 % of sweeps."""

SPARE_HOST = (
    Way("a larger --batch-size"),
    Way("--cuda-graphs on"),
    Way("--compile", lambda row: not row.case.compiled),
)
