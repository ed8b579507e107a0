"""The migration of older schemas: how their rows fill the columns that were added later.

A column that is not here is empty in an older row, or has its axis's default. Values whose spelling
has changed are in `RESPELLED`, and parts of values in `CORRECTED`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

# Schema 1 reported who shared a card or a CPU only in sentences of its notes and reasons. These
# are its words, which must not change; nothing writes them any more.
_COMPUTED, _DRAWS, _LATE = "card was shared", "drives a display", "came after the epoch"
_OTHERS = re.compile(r"the CPU was shared: others used ([0-9.]+) cores")


def _told(sentence: str, unless: tuple[str, ...] = ()) -> Callable[[str, str, str, str], str]:
    """Return a function that counts the neighbours of a row with ``sentence``, or with none of
    ``unless``. If several are listed, all count: the sentences did not always say which."""

    def count(neighbours: str, notes: str, reason: str, missing: str) -> str:
        said = notes + reason
        if "neighbours: " in missing:
            return ""
        told = sentence in said or (unless and not any(other in said for other in unless))
        return str(len(re.findall(r"\bpid [0-9]+", neighbours)) if told else 0)

    return count


_SAID = ("neighbours", "notes", "reason", "missing")


RESPELLED = {"compile": {"on": "default"}}
"""Old spellings of values, by column: until schema 8 the network had only one compile mode."""

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
"""By column: the columns that it is filled from, and the function of their cells, as text."""
