"""What helps where a row has a warning: of several ways, those that such a row can take."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.base.limits import BUSY_CORES
from bench.base.text import capitalize, join_words
from bench.schema.axis import axis_flag
from bench.schema.flags import ABSENT
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


_OF_SWEEPS = ("repeats", "same_seed")
"""Flags of no axis that remedies name, and bench.sweep alone takes."""


def name_taker(advice: str, makers: Iterable[str]) -> str:
    """Return advice on rows and, for its flags that one of the commands that made them, such as
    ``advise``, does not take, which command does. Flags after the name of a command are its own.

    >>> name_taker("Use --repeats 5.", ["sweep", "advise"])
    'Use --repeats 5. For --repeats use python -m bench.sweep.'
    """
    own = re.split(r"\bbench\.", advice)[0]
    absent = [ABSENT[maker] for maker in makers if maker in ABSENT]
    lacks = {axis_flag(name) for names in absent for name in (*names, *_OF_SWEEPS)}
    flags = dict.fromkeys(re.findall(r"--[a-z][a-z-]*", own))
    missing = [flag for flag in flags if flag in lacks]
    return advice + (f" For {join_words(missing)} use python -m bench.sweep." if missing else "")


def _may_have_company(row: Any) -> bool:
    """Return whether other programs were seen, or nobody looked for them."""
    quiet = row.other_cores <= BUSY_CORES and not row.neighbours_computing > 0
    return not quiet


def list_open(ways: Iterable[Way], row: Any) -> list[str]:
    """Return the ways that a row can take."""
    return [way.text for way in ways if takes(row.case, way.text) and way.fits(row)]


def _find_limit(row: Any) -> str:
    """Return the flag that ended the measured steps of a row, or may have; empty for none, as of a
    whole epoch."""
    case, epoch = row.case, row.steps_per_epoch if row.steps_per_epoch > 0 else math.inf
    limits: dict[str, float] = {"--fraction": case.fraction * epoch} if case.fraction < 1 else {}
    limits |= {} if case.steps is None else {"--steps": case.steps}
    most = case.epochs * min(limits.values(), default=epoch)
    if case.until is not None and not row.measured_steps >= most:
        return "--until"
    return min(limits, key=limits.__getitem__, default="")


def is_whole(row: Any) -> bool:
    """Return whether a row of the harness's own training measured all of an epoch."""
    return row.case.command is None and not _find_limit(row)


LONGER = (
    Way(
        "a larger --fraction",
        lambda row: _find_limit(row) == "--fraction" and row.case.until is None,
    ),
    Way("a larger --steps", lambda row: _find_limit(row) == "--steps"),
    Way(
        "a larger --fraction without --until",
        lambda row: (
            row.case.until is not None and row.case.fraction < 1 and _find_limit(row) != "--steps"
        ),
    ),
    Way("no --until", lambda row: _find_limit(row) == "--until" and row.case.fraction == 1),
)
"""By a larger limit more is measured only where no other one is met before."""

_ENOUGH = 5

MORE_REPEATS = Way(f"use --repeats {_ENOUGH} or more", lambda row: row.repeats < _ENOUGH)

QUIETER = Remedy(
    "",
    (Way("close other programs,", _may_have_company), MORE_REPEATS),
    "Rely on the interval over the repeats.",
)
"""The remedy for noise: the range of five runs holds the median of five more in 83 % of sweeps."""

SPARE_HOST = (
    Way("a larger --batch-size"),
    Way("--cuda-graphs on"),
    Way("--compile", lambda row: not row.case.compiled),
)
