"""A search for advice: its budget, and the command that goes on with it."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

from bench.base.errors import UsageError
from bench.schema.flags import change_flags, split_flags

BUDGET = "10m"

_MORE = 2
"""Multiple of the budget to propose if the budget was too small."""


def parse_budget(flag: str, text: str) -> float:
    """Parse ``90s``, ``10m`` or ``1h`` as s. Raises UsageError: it is not a time above 0."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)\s*(s|m|min|h)", text.strip())
    seconds = float(found[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600}[found[2]] if found else 0.0
    if not seconds:
        raise UsageError(f"{flag} {text[:40]!r}: give a time above 0, such as 90s, 10m or 1h")
    return seconds


def propose(
    command: str, folder: Path, *, longer: bool = True, anew: bool, least_s: float = 0.0
) -> str:
    """Return the command that goes on with a search in its folder, with the budget that it should
    have, of at least ``least_s`` if it is to be ``longer``, or begins one ``anew`` in a folder
    beside it, since runs with a warning stay in theirs."""
    flags = split_flags(shlex.split(command)[3:])
    given = flags.get("--budget", [BUDGET])[-1].rpartition("=")[2]
    budget_s = parse_budget("--budget", given)
    if longer:
        budget_s = max(_MORE * budget_s, least_s)
    minutes = math.ceil(budget_s / 60)
    out = folder.with_name(f"{folder.name}-again") if anew else folder
    return change_flags(command, ["--out", str(out), "--budget", f"{minutes}m"])
