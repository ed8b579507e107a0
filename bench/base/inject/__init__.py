"""What is put into the processes of a user's command: `sitecustomize`, which Python imports when it
starts, and which writes the files that they open to a listing.

The same is watched in a process of the harness that imports a user's network.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from ast import literal_eval
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.base.inject.sitecustomize import HOOK, LISTING, SINCE, Watch

_HERE = str(Path(__file__).parent)


Files = Mapping[str, str]
"""A hash of the content of each file, by its path from the current folder if it lies in it."""


@dataclass
class Seen:
    """What the processes of a case did with the user's files, by their names.

    ``files`` are those that it was made of. ``read`` are those that were changed since the folder
    was begun, with the time of it in ns, and ``wrote`` those that the case wrote, but for empty
    ones and those that it added to, of which nothing is lost. ``found`` are
    columns of an `Environment` that the case's own process determined anew.
    """

    files: dict[str, str] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)
    wrote: list[str] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Opened:
    """A file that a process opened, or put elsewhere: ``how`` is ``read``, ``wrote``, ``added`` to
    its end as to a log, or ``runs``, which Python ran as a script. ``changed_ns`` and
    ``size`` are as they were then, ``content`` a hash of it; empty for what is no text of a
    program's."""

    how: str
    path: Path
    changed_ns: int = 0
    size: int = 0
    content: str = ""


def arm(
    environment: Mapping[str, str], listing: Path, since_ns: int, hook: str = ""
) -> dict[str, str]:
    """Return the variables to set beside ``environment`` for a command whose processes list the
    files that they open in ``listing``; of those that are no text, only what was changed after
    ``since_ns``, and the first hundred others. ``hook`` is the path of a module whose ``arm`` they
    call once they have torch."""
    path = os.pathsep.join(filter(None, [_HERE, environment.get("PYTHONPATH")]))
    variables = {LISTING: str(listing.absolute()), SINCE: str(since_ns), HOOK: hook}
    return {"PYTHONPATH": path} | variables


_SETS_PATH = re.compile(r"(?<![\w$])PYTHONPATH=")


def keep_armed(words: Sequence[str]) -> list[str]:
    """Return the words of a command with what is put into its processes also where it sets
    ``PYTHONPATH`` itself, by ``env`` or in ``sh -c '…'``."""
    first = f"PYTHONPATH={_HERE}{os.pathsep}"
    quoted = f"PYTHONPATH={shlex.quote(_HERE)}{os.pathsep}"
    return [
        word.replace("PYTHONPATH=", first, 1)
        if word.startswith("PYTHONPATH=")
        else _SETS_PATH.sub(lambda _: quoted, word)
        for word in words
    ]


@dataclass(frozen=True)
class Uncaught:
    """An error that ended a process: the name of its class, its message, and the Python."""

    name: str
    message: str
    python: str = field(default="", compare=False)


Listed = tuple[Any, ...]
"""A line of a listing: what it is of, and what is told of that."""

_OF_PROCESSES = ("began", "raised", "hook", "versions")


def read_listing(listing: Path) -> list[Listed]:
    """Return what the processes of a command have listed, in order; of one that is no Python, or
    that `python -I` or `-E` starts, there is nothing."""
    with suppress(OSError):
        return parse_listing(listing.read_text("ascii", "replace").splitlines())
    return []


def parse_listing(lines: Iterable[str]) -> list[Listed]:
    found = list[Listed]()
    for line in list(lines):
        with suppress(ValueError, SyntaxError, TypeError):  # cut off, as on a full disk
            found.append(tuple(literal_eval(line)))
    return found


def find_opened(entries: Iterable[Listed]) -> list[Opened]:
    return [Opened(how, Path(at), *more) for how, at, *more in entries if how not in _OF_PROCESSES]


def find_uncaught(entries: Iterable[Listed]) -> Uncaught | None:
    """Return the error that ended the last of a command's programs in Python; None if none did, or
    if another program in Python began since, as where a shell goes on.

    Only programs that no other one in Python started count: what it makes of the end of its own is
    its matter.
    """
    last, begun = None, dict[int, str]()
    for how, pid, *more in entries:
        if how not in ("began", "raised"):
            continue
        parent, name, message = more
        alone = parent not in begun
        if how == "began":
            begun[int(pid)] = message
        if alone:
            python = begun.get(int(pid), "")
            last = Uncaught(name, message, python) if how == "raised" else None
    return last


def find_happened(entries: Iterable[Listed]) -> dict[str, Any]:
    """Return what is known of a command's processes, see `bench.workers.hook.Happening`:
    ``began`` if any was Python, and ``failed`` with the reason why nothing could be seen."""
    began: dict[str, Any] = dict.fromkeys(how for how, *_ in entries if how == "began")
    return began | {one[3]: one[4] for one in entries if one[0] == "hook"}


VERSIONS = ("python", "torch", "cuda", "cudnn")
"""Columns of an `Environment` that are those of a command, where it has another Python."""


def find_versions(entries: Iterable[Listed], pid: int | None) -> dict[str, str | None]:
    """Return `VERSIONS` as a command's process ``pid`` has them, or else the last that imported
    torch; None of what is not known, as where none did."""
    versions = {int(one[1]): one[2:] for one in entries if one[0] == "versions"}
    last = next(reversed(versions.values()), (None,) * len(VERSIONS))
    return dict(zip(VERSIONS, versions.get(pid or 0, last), strict=True))


def watch() -> list[str]:
    """Return a list of the files that this process opens from now on, for `parse_listing`."""
    lines: list[str] = []
    sys.addaudithook(Watch(lines.append).see)
    return lines
