"""What older schemas said otherwise: how their rows fill the columns that came later.

A column that is not here is empty in an older row, or has its axis's default. A value that has
another spelling since is in `RESPELLED`, and a part of one in `CORRECTED`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

# Schema 1 told who shared a card or a CPU in sentences of its notes and reasons alone. These are
# its words, frozen; nothing writes them for a reader to search any more.
_COMPUTED, _DRAWS, _LATE = "card was shared", "drives a display", "came after the epoch"
_OTHERS = re.compile(r"the CPU was shared: others used ([0-9.]+) cores")


def _told(sentence: str, unless: tuple[str, ...] = ()) -> Callable[[str, str, str, str], str]:
    """Count the neighbours of a row that says ``sentence``, or says nothing of ``unless``. Where
    several were listed, the sentences did not always tell which was meant: then all are."""

    def count(neighbours: str, notes: str, reason: str, missing: str) -> str:
        said = notes + reason
        if "neighbours: " in missing:
            return ""
        told = sentence in said or (unless and not any(other in said for other in unless))
        return str(len(re.findall(r"\bpid [0-9]+", neighbours)) if told else 0)

    return count


_SAID = ("neighbours", "notes", "reason", "missing")

RESPELLED = {"compile": {"on": "default"}}
"""By column, values that had another spelling before: until schema 8 the network was compiled in
one mode, or not."""

CORRECTED: dict[str, Callable[[str], str]] = {"cpu": partial(re.sub, ", 1 cores$", ", 1 core")}

MIGRATIONS: dict[str, tuple[tuple[str, ...], Callable[..., str]]] = {
    # schema 2
    "run_seed": (("seed",), lambda seed: seed),
    "neighbours_computing": (_SAID, _told(_COMPUTED, unless=(_DRAWS, _LATE))),
    "neighbours_drawing": (_SAID, _told(_DRAWS)),
    "neighbours_late": (_SAID, _told(_LATE)),
    "other_cores": (("notes",), lambda notes: "".join(_OTHERS.findall(notes)[:1])),
    # schema 4
    "probe": (("sentinel",), lambda sentinel: "off"),
}
"""By column, those that it is filled from, and how, of cells as text as it stands in the file."""
