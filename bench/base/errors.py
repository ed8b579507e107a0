"""Exceptions whose messages are shown to the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


class UsageError(Exception):
    """Something the user asked for cannot be done.

    The message is one line: what is wrong, then what would be right. Command lines print it after
    ``error:`` on standard error and end with return code 2, before anything is trained. Several at
    once are several arguments.
    """

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class UnsupportedError(Exception):
    """This machine lacks what a case needs; the case's row says so, and the sweep goes on.

    The message is one line: what is lacking, then what to do.
    """


class StoreError(Exception):
    """A row could not be written. The rows before it are intact, and the command returns 1."""


def nearest(word: str, right: list[str], otherwise: str = "") -> str:
    """Return a hint for a misspelt ``word``: the nearest of ``right``, else ``otherwise``, else
    all.

    >>> nearest("fp61", ["fp32", "fp16"]), nearest("FP32", ["fp32"])
    ("did you mean 'fp16'?", "did you mean 'fp32'?")
    """
    from difflib import get_close_matches

    known = {name.casefold(): name for name in right}
    # difflib takes quadratic time, and a file may hold a key of a megabyte; 0.6 takes gpu for cpu
    for close in get_close_matches(word[:100].casefold(), known, n=1, cutoff=0.7):
        return f"did you mean {known[close]!r}?"
    return otherwise or "right values: " + ", ".join(right)


def choose(flag: str, name: str, right: Mapping[str, T]) -> T:
    """Return the value of a flag by its name. Raises UsageError: the name is not in ``right``."""
    if name not in right:
        raise UsageError(f"{flag} {name!r}: {nearest(name, list(right))}")
    return right[name]
