"""The cases as one CSV table, a row per case, for spreadsheets and programs; and the same as JSON,
with the tables, answers and warnings.

Numbers are in SI units, as the column names say; every row names its hardware and software.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.answers.render.table import Cell, Table
from bench.base.plain import dump_document
from bench.report.document import Report
from bench.results.store.table import write_lines
from bench.results.study.axes import read_own
from bench.results.study.comparable import Period
from bench.results.study.quantities import QUANTITIES, is_number
from bench.results.study.runs import Result, Spread
from bench.results.study.warnings import WARNINGS
from bench.schema.axis import name_column
from bench.schema.case import list_axes
from bench.schema.record import COLUMNS

WHERE = (
    "gpu",
    "gpu_memory_bytes",
    "driver",
    "torch",
    "cuda",
    "cudnn",
    "cpu",
    "train_images",
    "unit",
)


def list_columns(report: Report) -> list[str]:
    numbers = [
        n
        for q in QUANTITIES.values()
        for n in ([q.name] if q.paired else [q.name, f"{q.name}_low", f"{q.name}_high"])
    ]
    outcome = ["status", "reason", "inferred", "repeats", "runs", "seeds", "kind", "memory_measure"]
    spread = ["period", "spread", "start_time_s"]
    axes, cost = list_axes(report.results), ["cost"] * (report.tariff is not None)
    return ["sweep", "machine", *axes, *outcome, *spread, *numbers, *cost, *WARNINGS, *WHERE]


def write_csv(report: Report) -> str:
    names = list_columns(report)
    rows = ([_find_value(report, row, name) for name in names] for row in report.results)
    return write_lines([_name(names).values(), *rows]).decode()


def _find_value(report: Report, row: Result, name: str) -> Any:
    if name == "cost" and report.tariff:
        return report.tariff.find_cost(row).value
    return getattr(row, name)


def _name(columns: Sequence[str]) -> dict[str, str]:
    """Return what each column is called. An own axis of an older sweep may have the name of another
    column, which keeps it."""
    shown = {name: name_column(name) for name in columns}
    return {name: name if new in shown else new for name, new in shown.items()}


def describe_columns() -> dict[str, str]:
    """Describe the columns of a file of cases, by name."""
    return {
        "period": "what an epoch time is of: an epoch, as many items or steps, or a run",
        "spread": "what the columns _low and _high are: " + ", ".join(Spread),
        "seeds": "how many seeds the repeats had",
        "cost": "of an epoch, by --price and --kwh",
        "start_time_s": "set-up, and the slowest first steps of all repeats, in s",
        **{q.name: q.help for q in QUANTITIES.values()},
        **{name: column.help for name, column in COLUMNS.items() if column.help},
    }


def write_json(report: Report) -> str:
    """Return the report as JSON; empty cells are null, and nothing is rounded."""
    names = list_columns(report)
    own = read_own(report.results)
    described = describe_columns()
    content = {
        "title": report.title,
        "subject": report.subject,
        "axes": [*map(name_column, report.varying)],
        "constants": report.constants,
        "answers": report.answers,
        "next_step": report.next_step,
        "warnings": list_warnings(report),
        "tables": [_table(table) for table in report.tables],
        "notes": report.notes,
        "outcomes": report.outcomes,
        "columns": {name: described[name] for name in names if name in described},
        "cases": [
            {
                shown: _value(own.get(name, {}).get(value, value))
                for name, shown in _name(names).items()
                for value in [_find_value(report, row, name)]
            }
            for row in report.results
        ],
    }
    return dump_document("report", 1, content)


def list_warnings(report: Report) -> list[dict[str, str]]:
    return [_take(warning, "label", "text", "remedy") for warning in report.warnings]


def _take(one: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(one, name) for name in names}


def _table(table: Table) -> dict[str, Any]:
    def write(cell: Cell) -> dict[str, Any]:
        marks = {"estimated": cell.estimated, "recommended": cell.chosen}
        known = {name: True for name, applies in marks.items() if applies}
        return {"text": cell.text, "value": _value(cell.value), **known}

    return {
        **_take(table, "name", "question"),
        "level": table.level.name.lower(),
        **_take(table, "title", "words"),
        "heads": table.heads,
        "groups": {str(row): heading for row, heading in table.groups.items()},
        "rows": [[write(cell) for cell in row] for row in table.rows],
        "notes": table.notes,
    }


def _value(value: Any) -> Any:
    """Return text, a switch or a finite number; None for anything else, such as NaN."""
    if isinstance(value, (str, bool)):
        return value
    if isinstance(value, Period):
        return str(value)
    if not is_number(value):
        return None
    return int(value) if float(value).is_integer() and abs(value) < 2**53 else float(value)
