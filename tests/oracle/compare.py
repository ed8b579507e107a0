"""Compare two dumps: which numbers changed, which went and which came."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Leaf = str | float | bool | None

TOLERANCE = 1e-9
"""Share by which two numbers may differ: a sum in another order is the same number."""

_WORDS = """
text title subject constants answers notes words about shows label remedy question outcomes columns
reason faults help path folder next_step command unit level heads evidence advice sentence
"""
WORDS = frozenset(_WORDS.split())
"""Keys of JSON with text for people, which may change: numbers and verdicts may not."""

NAMES = ("name", "axis", "before", "after", "label", "metric", "column", "cause", "folder")
"""Keys that say which element of a list one is, so that another that went moves no other."""


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Leaf]]:
    """Yield each leaf of a JSON value with its path. Elements of a list are named by their `NAMES`
    where they have some; equal names are counted.

    >>> dict(flatten({"tables": [{"name": "steps", "rows": [1, 2]}]}))
    {'/tables/steps/name': 'steps', '/tables/steps/rows/0': 1, '/tables/steps/rows/1': 2}
    """
    if isinstance(value, dict):
        if "heads" in value and "rows" in value:  # a table: its columns are named
            names = [head["name"] for head in value["heads"]]
            rows = [dict(zip(names, row, strict=True)) for row in value["rows"]]
            value = {**value, "rows": rows}
        for key, part in value.items():
            if key not in WORDS:
                yield from flatten(part, f"{path}/{key}")
    elif isinstance(value, list):
        seen: Counter[str] = Counter()
        for index, part in enumerate(value):
            name = str(index)
            if isinstance(part, dict) and (own := [k for k in NAMES if k in part]):
                told = (part[key] for key in own if not isinstance(part[key], dict))
                # of a folder its name: each commit has a place of its own
                name = " ".join(str(one).rpartition("/")[2] for one in told)
                seen[name] += 1
                name += f" #{seen[name]}" if seen[name] > 1 else ""
            yield from flatten(part, f"{path}/{name}")
    else:
        yield path, value


def read_table(text: str) -> Iterator[tuple[str, Leaf]]:
    """Yield each cell of a CSV with its case and column."""
    seen: Counter[str] = Counter()
    for row in csv.DictReader(io.StringIO(text)):
        name = " ".join(row[axis] for axis in ("model", "precision", "loss_scale", "batch_size"))
        seen[name] += 1
        for column, cell in row.items():
            if column != "reason":
                yield f"/{name} #{seen[name]}/{column}", cell


def read_answer(question: str, text: str) -> dict[str, Leaf]:
    """Return the leaves of one answer of `dump`. The cases of a report's JSON are those of its
    CSV, and are compared there."""
    if question.startswith("report csv"):
        return dict(read_table(text))
    value = json.loads(text)
    if isinstance(value, dict):
        value.pop("cases", None)
    return dict(flatten(value))


def are_equal(a: Leaf, b: Leaf, exact: bool = False) -> bool:
    """Return whether two leaves are the same number, but for `TOLERANCE` unless ``exact``, or the
    same text."""
    if exact:
        return a == b
    try:
        return math.isclose(float(a or 0), float(b or 0), rel_tol=TOLERANCE) and (
            (a in (None, "")) == (b in (None, ""))
        )
    except ValueError:
        return a == b


@dataclass
class Comparison:
    """What differs between two dumps, each as ``question: /path``."""

    compared: int = 0
    changed: list[tuple[str, Leaf, Leaf]] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)


Answers = Mapping[str, Mapping[str, Leaf]]
"""What was answered to each question: the leaves by their paths."""


def compare(old: Answers, new: Answers, exact: bool = False) -> Comparison:
    """Compare the answers of two commits; trainings are compared ``exact``, bit for bit."""
    found = Comparison()
    found.gone += [f"{name}: /" for name in old if name not in new]
    found.new += [f"{name}: /" for name in new if name not in old]
    for name in old.keys() & new.keys():
        a, b = old[name], new[name]
        found.gone += [f"{name}: {path}" for path in a.keys() - b.keys()]
        found.new += [f"{name}: {path}" for path in b.keys() - a.keys()]
        for path in a.keys() & b.keys():
            found.compared += 1
            if not are_equal(a[path], b[path], exact):
                found.changed.append((f"{name}: {path}", a[path], b[path]))
    return found


def count_kinds(paths: list[str]) -> Iterator[str]:
    """Yield a line for each question, with how many paths of its answers there are, most first."""
    kinds = Counter(path.partition(": ")[0] for path in paths)
    yield from (f"  {number:7,} {kind}" for kind, number in kinds.most_common())


def write(found: Comparison, most: int = 40) -> Iterator[str]:
    """Yield the lines of a comparison: first what must not be."""
    yield f"{found.compared:,} values compared, {len(found.changed):,} changed"
    yield from count_kinds([path for path, _, _ in found.changed])
    for path, a, b in sorted(found.changed, key=str)[:most]:
        yield f"    {path}: {a!r} -> {b!r}"
    if len(found.changed) > most:
        yield f"    and {len(found.changed) - most:,} more"
    yield f"{len(found.gone):,} values went:"
    yield from count_kinds(found.gone)
    yield f"{len(found.new):,} values came:"
    yield from count_kinds(found.new)
