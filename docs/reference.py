"""The tables of the reference pages, made from the code; `tests/test_readme.py` writes them into
the pages and holds them."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout

from bench.__main__ import COMMANDS, read_line
from bench.base.limits import MIN_REPEATS
from bench.base.text import capitalize
from bench.results.store.table import TABLES
from bench.results.study.quantities import QUANTITIES
from bench.results.study.warnings import WARNINGS, WarningRule
from bench.schema.axis import axis_flag
from bench.schema.case import AXES, format_value
from bench.schema.record import ColumnInfo, Status
from bench.sweep.__main__ import print_registries

UNITS = {
    r"_per_s$": "1/s",
    r"^rate_copy$": "bytes/s",
    r"^rate_": "FLOP/s",
    r"_s$": "s",
    r"bytes": "bytes",
    r"_j$": "J",
    r"_w$": "W",
    r"_mhz$": "MHz",
    r"_c$": "°C",
    r"^flop|flop_per": "FLOP",
}
"""The units that the ends of columns' names stand for."""


def mark_flags(text: str) -> str:
    return re.sub(r"(?<![\w`-])--[a-z][\w-]*", lambda flag: f"`{flag[0]}`", text)


def tabulate(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    cells = (" | ".join(map(mark_flags, line)) for line in lines)
    return "\n" + "".join(f"| {line} |\n" for line in cells)


def write_axes() -> str:
    rows = (
        (f"`{axis_flag(name)}`", format_value(axis.default) or "–", axis.help)
        for name, axis in AXES.items()
    )
    table = tabulate(("setting", "default", "meaning"), rows)
    return table.replace("bench.sweep `--list`", "[the list](#values)")


def write_values() -> str:
    """What `bench.sweep --list` prints, a table for each setting."""
    with redirect_stdout(io.StringIO()) as printed:
        print_registries()
    parts = []
    for title, lines in re.findall(r"(?m)^(\S.*):\n((?:  .*\n)+)", printed.getvalue()):
        rows = (line.split(maxsplit=1) for line in lines.splitlines())
        table = tabulate(("value", "meaning"), ((f"`{name}`", what) for name, what in rows))
        parts.append(f"\n### {mark_flags(capitalize(title))}\n{table}")
    return "".join(parts)


def name_unit(column: ColumnInfo) -> str:
    """The unit of a column of numbers; else what its cells are."""
    words = {str: "text", bool: "on or off", int: "whole number", float: "number"}
    units = (unit for ending, unit in UNITS.items() if re.search(ending, column.name))
    return (column.type is not str and next(units, "")) or words[column.type]


def write_columns(table: str) -> str:
    """The columns of a file, without those that are axes."""
    columns = (c for c in TABLES[table].values() if c.name not in AXES or table != "records.csv")
    rows = ((f"`{c.name}`", name_unit(c), c.help) for c in columns)
    return tabulate(("column", "unit", "meaning"), rows)


def write_quantities() -> str:
    rows = (
        (f"`{q.name}`", q.label, q.unit or "–", f"{q.help}; {q.better} is better")
        for q in QUANTITIES.values()
    )
    return tabulate(("name in CSV and JSON", "in tables", "shown in", "meaning"), rows)


def write_warnings() -> str:
    return "".join(
        f"\n### {capitalize(rule.remark)}\n\n{mark_flags(rule.warning)}.{say_effect(rule)}\n\n"
        f"*What helps*: {mark_flags(rule.fix.describe())}\n"
        for rule in WARNINGS.values()
    )


def say_effect(rule: WarningRule) -> str:
    if rule.forbids(MIN_REPEATS):
        return " Such a row is not recommended."
    return f" With fewer than {MIN_REPEATS} runs it is not recommended." if rule.fatal else ""


def write_statuses() -> str:
    return tabulate(("outcome", "meaning"), ((f"`{s}`", s.meaning) for s in Status))


PAGES = {
    "advise": "advise.md",
    "sweep": "sweep.md",
    "search": "learning.md#which-settings-learn-best",
    "fit": "batch-size.md",
    "scales": "learning.md#which-loss-scale-is-safe",
    "card": "card.md",
    "report": "results.md",
    "compare": "results.md#is-the-difference-real",
    "why": "why.md",
    "cards": "card.md#which-card-is-faster",
    "validate": "card.md#check-a-folder-before-it-is-shared",
    "doctor": "card.md#check-the-machine",
    "check": "learning.md",
    "export": "results.md#in-tensorboard-weights-biases-or-mlflow",
    "publish": "card.md#one-folder-to-publish",
}
"""Where each command is explained."""


def write_commands() -> str:
    parts = []
    for purpose, names in COMMANDS.items():
        rows = ((f"[`{name}`]({PAGES[name]})", read_line(name)) for name in names)
        parts.append(f"\n## {purpose}\n{tabulate(('command', 'what it does'), rows)}")
    return "".join(parts)
