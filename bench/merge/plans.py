"""What the sweeps of joined folders planned, which the folder that they are joined in remembers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench.case import AXES, Case, Value, parse_value
from bench.errors import UsageError
from bench.store.reader import Run
from bench.sweep.schedule import plan_runs
from bench.sweep.shards import KEY
from bench.text import replace_file

MARK = "merged.json"
"""The file by which a folder is known to be of `bench.merge`: what was joined there."""

MERGED = "merged"
"""The key of a configuration that `bench.merge` wrote, whose cases no sweep planned together."""


@dataclass(frozen=True)
class Plan:
    """What a folder's sweep planned.

    Attributes:
        shard: as ``--shard`` takes it; empty for none.
        cases: each as `bench.sweep.preflight.describe_config` writes it; None where not known.
        searched: whether a search planned them, which ends the poorer ones early.
    """

    shard: str = ""
    cases: Sequence[Mapping[str, str]] | None = None
    repeats: int = 1
    searched: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Plan:
        """What a folder's configuration tells."""
        return cls(
            str(config.get(KEY, "")),
            config.get("cases"),
            config.get("repeats", 1),
            "halving" in config,
        )

    def list_runs(self) -> list[Run]:
        """The runs that were planned; none where it is not known."""
        return plan_runs([_read_case(texts) for texts in self.cases or ()], self.repeats)


def _read_case(texts: Mapping[str, str]) -> Case:
    return Case(**{name: _read_value(name, texts[name]) for name in AXES if name in texts})  # type: ignore[arg-type]


@cache
def _read_value(name: str, text: str) -> Value:
    return None if text == "" else parse_value(name, text, name)


def read_plans(folder: Path) -> dict[str, Plan]:
    """The plans of the folders that were joined in ``folder``, by their paths; empty for none.

    Raises:
        UsageError: the file that has them was edited.
    """
    file = folder / MARK
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return {}
    try:
        return {name: Plan(**told) for name, told in json.loads(text)["folders"].items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UsageError(
            f"{file}: it is not as bench.merge wrote it; restore it, or merge into a new folder"
        ) from None


def write_plans(folder: Path, plans: Mapping[str, Plan]) -> None:
    """Write what `read_plans` reads."""
    told = {name: asdict(plan) for name, plan in sorted(plans.items())}
    replace_file(folder / MARK, json.dumps({"folders": told}) + "\n")
