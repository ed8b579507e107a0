"""What helps where a row has a warning: of several ways, those that such a row can take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.base.limits import BUSY_CORES
from bench.base.text import capitalize
from bench.schema.rules import takes


@dataclass(frozen=True)
class Way:
    """A way to help, such as ``a larger --fraction``: for rows, runs or results, whose training
    takes its flags, and that ``fits``."""

    text: str
    fits: Callable[[Any], bool] = lambda row: True


@dataclass(frozen=True)
class Remedy:
    """A sentence on what helps: ``lead``, the ``ways`` that a row can take, and ``end``; without
    any of them, ``otherwise``."""

    lead: str
    ways: tuple[Way, ...]
    otherwise: str = ""
    end: str = "."

    def advise(self, rows: Iterable[Any]) -> str:
        """Return the sentence for these rows; both where only some can take a way."""
        taken, sentences = [list_open(self.ways, row) for row in rows], []
        if ways := [way.text for way in self.ways if any(way.text in some for some in taken)]:
            sentences.append(self._offer(ways))
        if self.otherwise and not all(taken):
            sentences.append(self.otherwise)
        return " ".join(sentences)

    def describe(self) -> str:
        """Return all that may help, whatever the row."""
        offer = self._offer([way.text for way in self.ways]) if self.ways else ""
        return f"{offer} {self.otherwise}".strip()

    def _offer(self, ways: Sequence[str]) -> str:
        choices = " or ".join(filter(None, (", ".join(ways[:-1]), ways[-1].rstrip(","))))
        return capitalize(f"{self.lead} {choices}{self.end}".strip())


def say(text: str) -> Remedy:
    """Return a remedy for any row of its warning."""
    return Remedy("", (), text)


def _may_have_company(row: Any) -> bool:
    """Return whether other programs were seen, or nobody looked for them."""
    quiet = row.other_cores <= BUSY_CORES and not row.neighbours_computing > 0
    return not quiet


def list_open(ways: Iterable[Way], row: Any) -> list[str]:
    """Return the ways that a row can take."""
    return [way.text for way in ways if takes(row.case, way.text) and way.fits(row)]


LONGER = (
    Way("a larger --fraction", lambda row: row.case.fraction < 1),
    Way("a larger --steps", lambda row: row.case.steps is not None),
)

_ENOUGH = 5

QUIETER = Remedy(
    "",
    (
        Way("close other programs,", _may_have_company),
        Way(f"use --repeats {_ENOUGH} or more", lambda row: row.repeats < _ENOUGH),
    ),
    "Rely on the interval over the repeats.",
)
"""The remedy for noise: the range of five runs holds the median of five more in 83 % of sweeps."""

SPARE_HOST = (
    Way("a larger --batch-size"),
    Way("--cuda-graphs on"),
    Way("--compile", lambda row: not row.case.compiled),
)
