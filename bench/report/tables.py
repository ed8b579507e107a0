"""The report, free of any format: its tables. Built once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.case import AXES, format_value
from bench.precision import PRECISIONS
from bench.report import summaries
from bench.report.answers import answer
from bench.report.cells import (
    TIMED,
    Row,
    iterate,
    name_case,
    published_time_cell,
    quantity_cell,
    remarks,
    time_cell,
)
from bench.report.doubts import DOUBTS
from bench.report.model import MOST_SECTIONS, NOTHING, Cell, Head, Report, Section, Table
from bench.report.notes import list_values, write_notes
from bench.report.notices import warn
from bench.report.quantities import GIB, QUANTITIES
from bench.report.spread import Spread
from bench.store.attempts import number_groups

if TYPE_CHECKING:
    import pandas as pd

    from bench.report.sweeps import Sweep


MOST_ROWS = 60
"""Rows of one table."""

ENOUGH_ROWS = 400
"""Once the tables hold this many rows, further groups are left out."""


def build(
    sweeps: Sequence[Sweep], reference: Sweep | None = None, home: Path | None = None
) -> Report:
    """Derive everything once and lay it out.

    Args:
        reference: published figures to stand beside the cases that have one.
        home: the folder the document is for; links start there.
    """
    records = summaries.read(sweeps)
    cases = summaries.summarize(summaries.latest(records))
    published = summaries.latest(summaries.read([reference])) if reference else records.head(0)
    cases = summaries.set_beside(cases, summaries.summarize(published))
    machines = label_machines(cases)
    sections, left_out = _sections(cases, machines)
    return Report(
        title=_title(sweeps),
        sweeps=sweeps,
        reference=reference,
        records=records,
        cases=cases,
        machines=machines,
        answers=tuple(answer(cases, machines)),
        warnings=tuple(warn(records, cases)),
        sections=tuple(sections),
        left_out=left_out,
        environments=_environments(cases, machines),
        home=home or Path.cwd(),
    )


def _title(sweeps: Sequence[Sweep]) -> str:
    names = [sweep.name for sweep in sweeps]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def label_machines(cases: pd.DataFrame) -> dict[tuple[str, str], str]:
    """Name each (sweep, machine) for people: the machine, and its sweep where two share a name."""
    pairs = summaries.list_machines(cases)
    names = [machine for _, machine in pairs]
    return {
        (sweep, machine): machine if names.count(machine) == 1 else f"{machine} · {sweep}"
        for sweep, machine in pairs
    }


_UNDER = ("extrapolated", "synthetic", "published")


@dataclass(frozen=True)
class Part:
    """A column of the tables: its head, and how a case fills it."""

    head: Head
    cell: Callable[[Row], Cell]
    optional: bool = False  # left out where it would be empty


def _quantity_part(name: str, label: str = "", optional: bool = False, prefix: str = "") -> Part:
    q = QUANTITIES[name]
    head = Head(prefix + name, label or q.label, q.help, True, q.better)
    return Part(head, lambda row: quantity_cell(q, row, prefix), optional)


def _axis_part(name: str) -> Part:
    def cell(row: Row) -> Cell:
        value = getattr(row, name)
        return Cell(format_value(value) or "none", value)

    number = name in ("batch_size", "loss_scale")
    return Part(Head(name, name.replace("_", " "), AXES[name].metadata["help"], number), cell)


def _parts(
    lead: Part, machines: dict[tuple[str, str], str], cases: pd.DataFrame, under: Iterable[str]
) -> list[Part]:
    word = "synthetic " if (cases["dataset"] == "synthetic").any() else ""
    machine = Part(
        Head("machine", "machine", "where it ran", False),
        lambda row: Cell(machines[row.sweep, row.machine]),
    )
    time = QUANTITIES["epoch_time_s"]
    return [
        lead,
        *([machine] if len(machines) > 1 else []),
        Part(
            Head(time.name, time.label + _name_spread(cases), time.help, True, time.better),
            time_cell,
        ),
        _quantity_part("images_per_s"),
        _quantity_part("speedup", "speed-up over fp32", optional=True),
        _quantity_part("memory_bytes"),
        _quantity_part("memory_saved", optional=True),
        _quantity_part("tensors_saved", optional=True),
        _quantity_part("train_loss", f"{word}loss", optional=True),
        _quantity_part("train_accuracy", f"{word}accuracy", optional=True),
        _quantity_part("test_accuracy", f"{word}test accuracy", optional=True),
        _quantity_part("overflow_steps", optional=True),
        Part(
            Head("remarks", "remarks", "what to know before believing the row", False),
            lambda row: Cell(remarks(row, under)),
            optional=True,
        ),
        Part(
            Head("published_epoch_time_s", "2019 epoch time", "published for the RTX Titan"),
            published_time_cell,
            optional=True,
        ),
        _quantity_part("speedup", "2019 speed-up", True, "published_"),
        _quantity_part("memory_bytes", "2019 memory", True, "published_"),
        _quantity_part("memory_saved", "2019 memory saved", True, "published_"),
    ]


def _name_spread(cases: pd.DataFrame) -> str:
    """What the head of the times says of the ends beside them."""
    kinds = cases.loc[cases["spread"] != Spread.NONE.value, "spread"].unique().tolist()
    if len(kinds) > 1:
        return " (spread)"
    words = {
        Spread.WITHIN.value: " [within the run]",
        Spread.RANGE.value: " (range)",
        Spread.PREDICTION.value: " (interval)",
    }
    return words[kinds[0]] if kinds else ""


def _table(name: str, title: str, parts: Sequence[Part], rows: pd.DataFrame) -> Table:
    cut = rows.head(MOST_ROWS)
    cells = [[part.cell(row) for part in parts] for row in iterate(cut)]
    kept = [
        i
        for i, part in enumerate(parts)
        if not part.optional or any(line[i].text not in (NOTHING, "", "0") for line in cells)
    ]
    notes = list(write_notes(cut))
    if len(rows) > len(cut):
        notes.append(f"{len(rows) - len(cut)} more rows are left out; --format csv has them all.")
    return Table(
        name,
        title,
        tuple(parts[i].head for i in kept),
        tuple(tuple(line[i] for i in kept) for line in cells),
        tuple(notes),
    )


def _sections(
    cases: pd.DataFrame, machines: dict[tuple[str, str], str]
) -> tuple[list[Section], str]:
    """Tables of the largest groups of cases that agree on `SETTINGS`, in the order they ran."""
    if not len(cases):
        return [], ""
    settings = number_groups(cases, summaries.SETTINGS)
    sizes = settings.value_counts()
    kept = sorted(sizes.index[:MOST_SECTIONS])
    varying = [name for name in summaries.SETTINGS if cases[name].nunique() > 1]
    sections: list[Section] = []
    for number in kept:
        if sum(len(table.rows) for section in sections for table in section.tables) > ENOUGH_ROWS:
            break
        part = cases[settings == number]
        title = name_case(next(iterate(part)), _telling(varying))
        if part["fake"].all():
            title += " (not measured)"
        sections.append(Section(title, part, tuple(_section_tables(part, title, machines))))
    left = len(sizes) - len(sections)
    cases_left = len(cases) - sum(len(section.cases) for section in sections)
    return sections, (
        f"{left:,} more settings with {cases_left:,} cases are left out here; "
        "--format csv has them."
        if left
        else ""
    )


def _telling(varying: Iterable[str]) -> list[str]:
    """Axes a section is named by: model and dataset always, the others where they vary."""
    return list(dict.fromkeys(["model", "dataset", *varying]))


def _section_tables(
    cases: pd.DataFrame, title: str, machines: dict[tuple[str, str], str]
) -> Iterator[Table]:
    machines = {pair: machines[pair] for pair in summaries.list_machines(cases)}
    # said under the table, or marked at each number; beside each row they would be noise
    under = [name for name in DOUBTS if name in _UNDER or (name == "fake" and cases[name].all())]
    by_batch = _parts(_axis_part("batch_size"), machines, cases, under)
    by_scale = _parts(_axis_part("loss_scale"), machines, cases, under)
    order = {pair: i for i, pair in enumerate(machines)}
    place = [order[pair] for pair in zip(cases["sweep"], cases["machine"], strict=True)]
    cases = cases.assign(_place=place)
    for precision in PRECISIONS:
        rows = cases[cases["precision"] == precision]
        if not len(rows):
            continue
        scale = main_loss_scale(precision, rows["loss_scale"])
        shown = rows[rows["loss_scale"] == scale].sort_values(["batch_size", "_place"])
        name = f"{precision}{name_scale(scale)}"
        yield _table(precision, f"{title}: {name}, by batch size", by_batch, shown)
        rest = rows[rows["loss_scale"] != scale]
        if len(rest):
            batch = loss_scale_batch(rows)
            same = rows[rows["batch_size"] == batch]
            same = same.assign(_scale=same["loss_scale"].map(_scale_order))
            yield _table(
                f"{precision}-scale",
                f"{title}: {precision} by loss scale, batch size {batch}",
                by_scale,
                same.sort_values(["_scale", "_place"]),
            )
    if len(machines) > 1:
        yield _side_by_side(cases, title, machines, under)


def main_loss_scale(precision: str, scales: pd.Series) -> str:
    """The loss scale whose cases are tabled by batch size: the default, or the commonest."""
    default = format_value(PRECISIONS[precision].default_loss_scale)
    return default if (scales == default).any() else str(scales.mode().iloc[0])


def loss_scale_batch(rows: pd.DataFrame) -> int:
    """The largest batch size at which several loss scales were measured, else the largest."""
    measured = rows[rows["status"].isin(TIMED)]
    measured = measured if len(measured) else rows
    scales = measured.groupby("batch_size")["loss_scale"].nunique()
    several = scales[scales > 1]
    return int((several if len(several) else scales).index.max())


def name_scale(scale: str) -> str:
    """How a title speaks of a loss scale: `` at static loss scale 128``; nothing for none."""
    if not scale:
        return ""
    return " with a dynamic loss scale" if scale == "dynamic" else f" at static loss scale {scale}"


def _scale_order(scale: str) -> float:
    try:
        return float(scale)
    except ValueError:
        return math.inf


def _side_by_side(
    cases: pd.DataFrame,
    title: str,
    machines: dict[tuple[str, str], str],
    under: Iterable[str],
) -> Table:
    """One row a case, one column of epoch times a machine."""
    precisions = list(PRECISIONS)
    cases = cases.assign(
        _order=cases["precision"].map(precisions.index),
        _scale=cases["loss_scale"].map(_scale_order),
    ).sort_values(["_order", "_scale", "batch_size"])
    lines: dict[tuple[Any, ...], dict[tuple[str, str], Cell]] = {}
    for row in iterate(cases):
        line = lines.setdefault((row.precision, row.loss_scale, row.batch_size), {})
        cell = time_cell(row)
        if row.status in TIMED and (said := remarks(row, under)):
            cell = Cell(f"{cell.text} ({said})", cell.value)
        line[row.sweep, row.machine] = cell
    shown = dict(list(lines.items())[:MOST_ROWS])
    heads = (
        Head("precision", "precision", "", False),
        Head("loss_scale", "loss scale"),
        Head("batch_size", "batch size"),
        *(Head(f"machine{i}", label) for i, label in enumerate(machines.values(), 1)),
    )
    rows = tuple(
        (
            Cell(precision),
            Cell(scale or NOTHING),
            Cell(str(batch), batch),
            *(line.get(pair, Cell(NOTHING)) for pair in machines),
        )
        for (precision, scale, batch), line in shown.items()
    )
    notes = tuple(write_notes(cases))
    return Table("machines", f"{title}: epoch time side by side", heads, rows, notes)


def _environments(cases: pd.DataFrame, machines: dict[tuple[str, str], str]) -> Table:
    names = {
        "gpu_memory_bytes": "GPU memory",
        "gpu_uuid": "GPU UUID",
        "capability": "compute capability",
        "driver": "driver",
        "cpu": "CPU",
        "torch": "torch",
        "cuda": "CUDA",
        "cudnn": "cuDNN",
        "python": "Python",
        "os": "operating system",
        "host": "host",
        "bench": "harness",
        "commit": "commit",
        "dataset_source": "dataset layout",
        "dataset_fingerprint": "dataset fingerprint",
        "flags": "flags",
    }
    pairs = list(machines)[:MOST_SECTIONS]
    rows = []
    for name, label in names.items():
        cells = []
        for sweep, machine in pairs:
            part = cases[(cases["sweep"] == sweep) & (cases["machine"] == machine)]
            values = list_values(part, name)
            if name == "gpu_memory_bytes":
                values = [f"{b / GIB:.1f} GiB" for b in part[name].dropna().unique()]
            cells.append(Cell(" or ".join(values[:4]) or NOTHING))
        if any(cell.text != NOTHING for cell in cells):
            rows.append((Cell(label), *cells))
    heads = (
        Head("what", "", "", False),
        *(Head(f"m{i}", machines[p], "", False) for i, p in enumerate(pairs)),
    )
    return Table("environment", "Environment", heads, tuple(rows), ())
