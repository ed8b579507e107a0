"""The report, free of any format: what it says first, its warnings, and its tables. Built once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.attempts import number_groups
from bench.case import AXES, Case, Value, format_value
from bench.conditions import STEADY
from bench.precision import PRECISIONS
from bench.record import MEASURED, Status
from bench.report import derive
from bench.report.derive import DOUBTS, GIB, MEMORY, QUANTITIES, RSS, Quantity, is_number
from bench.report.notices import Notice, warn
from bench.report.spread import CONFIDENCE, Spread
from bench.verdict import MIN_REPEATS

if TYPE_CHECKING:
    import pandas as pd

    from bench.report.sweeps import Sweep

MOST_SECTIONS = 8
"""Groups of tables in one report; more would not be read."""

MOST_ROWS = 60
"""Rows of one table."""

ENOUGH_ROWS = 400
"""Once the tables hold this many rows, further groups are left out."""

ESTIMATE = "≈"
"""Stands before each number that was extrapolated to a whole epoch."""

NOTHING = "–"


@dataclass(frozen=True)
class Cell:
    """What stands in one place of a table: text for people, the number behind it for machines."""

    text: str
    value: float | str | None = None


@dataclass(frozen=True)
class Head:
    """A column's head. Numbers stand to the right; ``better`` is lower, higher or empty."""

    name: str
    label: str
    help: str = ""
    number: bool = True
    better: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under heads, a title above and, below, what must never part from the numbers."""

    name: str
    title: str
    heads: tuple[Head, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """Tables whose cases agree on all axes but precision, loss scale and batch size."""

    title: str
    cases: pd.DataFrame
    tables: tuple[Table, ...]


@dataclass(frozen=True)
class Answer:
    """Two sentences on one machine."""

    about: str
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """All a renderer needs."""

    title: str
    sweeps: Sequence[Sweep]
    reference: Sweep | None
    records: pd.DataFrame
    cases: pd.DataFrame
    machines: dict[tuple[str, str], str]
    answers: tuple[Answer, ...]
    warnings: tuple[Notice, ...]
    sections: tuple[Section, ...]
    left_out: str
    environments: Table
    home: Path

    @property
    def tables(self) -> list[Table]:
        """The tables of all sections, in order."""
        return [table for section in self.sections for table in section.tables]


def build(
    sweeps: Sequence[Sweep], reference: Sweep | None = None, home: Path | None = None
) -> Report:
    """Derive everything once and lay it out.

    Args:
        reference: published figures to stand beside the cases that have one.
        home: the folder the document is for; links start there.
    """
    records = derive.read(sweeps)
    cases = derive.summarize(derive.latest(records))
    published = derive.latest(derive.read([reference])) if reference else records.head(0)
    cases = derive.set_beside(cases, derive.summarize(published))
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
    pairs = derive.list_machines(cases)
    names = [machine for _, machine in pairs]
    return {
        (sweep, machine): machine if names.count(machine) == 1 else f"{machine} · {sweep}"
        for sweep, machine in pairs
    }


# ------------------------------------------------------------------------------- cells and columns

Row = Any  # a row of the frame of cases, by name


def iterate(frame: pd.DataFrame) -> Iterator[Row]:
    """The rows of a frame, each with its cells as attributes."""
    return frame.itertuples(index=False)


def quantity_cell(quantity: Quantity, row: Row, prefix: str = "") -> Cell:
    """Write one number of a case, with its unit, the ends of its spread and an estimate's mark."""
    value = getattr(row, prefix + quantity.name)
    if not is_number(value):
        return Cell(NOTHING)
    text = quantity.write(value)
    if not prefix and quantity.spread:
        text += _write_spread(quantity, row, value)
    if not prefix and is_estimate(quantity, row):
        text = f"{ESTIMATE}{text}"
    return Cell(quantity.add_unit(text), value)


def _write_spread(quantity: Quantity, row: Row, value: float) -> str:
    """The ends of a number's spread: of repeats in parentheses, within one run in brackets."""
    low, high = (getattr(row, f"{quantity.name}_{end}", math.nan) for end in ("low", "high"))
    if not (is_number(low) and is_number(high)):
        return ""
    ends = quantity.write_ends(low, high, value)
    opened, closed = "[]" if row.spread == Spread.WITHIN.value else "()"
    return f" {opened}{ends}{closed}" if ends else ""


def is_estimate(quantity: Quantity, row: Row) -> bool:
    """Whether this number of a case was extrapolated."""
    return bool(row.fraction < 1 and quantity.whole)


def outcome(status: str, reason: str = "", inferred: bool = False) -> str:
    """Name an outcome that brought no time; out of memory by its meaning, others by name."""
    names = {Status.OOM.value: "out of memory", Status.OOM_SUSPECTED.value: "out of memory?"}
    return names.get(status, status) + (" (inferred)" if inferred else "")


def _time_cell(row: Row) -> Cell:
    if row.status in _MEASURED:
        return quantity_cell(QUANTITIES["epoch_time_s"], row)
    return Cell(outcome(row.status, row.reason, bool(row.inferred)), row.status)


def _published_time_cell(row: Row) -> Cell:
    if row.published_status and row.published_status not in _MEASURED:
        return Cell(outcome(row.published_status), row.published_status)
    return quantity_cell(QUANTITIES["epoch_time_s"], row, "published_")


_MEASURED = {status.value for status in MEASURED}


def remarks(row: Row, but: Iterable[str] = ()) -> str:
    """What a reader must know of this row before believing it."""
    said = [d.remark for d in DOUBTS.values() if d.name not in but and getattr(row, d.name)]
    if row.runs > row.repeats:
        said.append(f"{row.repeats} of {row.runs} runs")
    return ", ".join(said)


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
            _time_cell,
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
            _published_time_cell,
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
    notes = list(_notes(cut))
    if len(rows) > len(cut):
        notes.append(f"{len(rows) - len(cut)} more rows are left out; --format csv has them all.")
    return Table(
        name,
        title,
        tuple(parts[i].head for i in kept),
        tuple(tuple(line[i] for i in kept) for line in cells),
        tuple(notes),
    )


# ---------------------------------------------------------------------------------- below a table


def _notes(rows: pd.DataFrame) -> Iterator[str]:
    """What must never part from a table's numbers: outcomes, hardware, dataset, epoch, memory."""
    yield from _outcomes(rows)
    yield from _noted(rows)
    for (_, machine), part in rows.groupby(list(derive.SOURCE), sort=False):
        yield describe_machine(str(machine), part)
    yield " ".join(
        [
            _dataset_note(rows),
            _epoch_note(rows),
            *_repeats_notes(rows),
            *_seeds_notes(rows),
            *_memory_notes(rows),
        ]
    )
    if (rows["published_status"] != "").any():
        yield (
            "2019: the published RTX Titan figures (PyTorch 1.0, CUDA 10.0, cuDNN 7.4.2), each the "
            "cold first epoch of a process, with autotuning in it; single runs; memory as "
            "published, not over a baseline. The epochs of this table are timed warm."
        )


def _outcomes(rows: pd.DataFrame) -> Iterator[str]:
    told = rows[(rows["reason"] != "") & (rows["status"] != Status.OK.value)]
    # that memory ran out is said in its row; what it was concluded from is not
    told = told[(told["status"] != Status.OOM.value) | told["inferred"].astype(bool)]
    lines = dict.fromkeys(
        f"{name_case(row, ('precision', 'loss_scale', 'batch_size'))}: "
        f"{outcome(row.status, inferred=bool(row.inferred))}: {row.reason}"
        for row in iterate(told)
    )
    yield from list(lines)[:8]
    if len(lines) > 8:
        yield f"{len(lines) - 8} more outcomes have reasons; --format csv has them all."


def _noted(rows: pd.DataFrame) -> Iterator[str]:
    counts = rows.loc[rows["notes"] != "", "notes"].value_counts(sort=False)
    for text, count in list(counts.items())[:3]:
        share = "Every row" if count == len(rows) else f"{count} of {len(rows)} rows"
        yield f"{share}: {text}."
    if len(counts) > 3:
        yield f"{len(counts) - 3} more notes; the records have them all."


def _values(rows: pd.DataFrame, name: str) -> list[str]:
    cells = rows[name].dropna()
    return [f"{v:,.0f}" if is_number(v) else str(v) for v in cells.unique() if v != ""]


def describe_machine(machine: str, rows: pd.DataFrame) -> str:
    """Hardware and versions of some rows of one machine, as one line."""
    said = [machine]
    bytes = rows["gpu_memory_bytes"].dropna()
    if len(bytes) and (rows["device"] == "cuda").any():
        said[0] += f" ({bytes.iloc[0] / GIB:.1f} GiB)"
    for label, name in (
        ("driver", "driver"),
        ("torch", "torch"),
        ("CUDA", "cuda"),
        ("cuDNN", "cudnn"),
        ("device", "device"),
    ):
        if values := _values(rows, name):
            said.append(f"{label} {' or '.join(values[:4])}")
    kinds = {"fake": "not measured (fake executor)", "published": "published figures"}
    said += [kinds[kind] for kind in rows["kind"].unique() if kind in kinds]
    return ", ".join(said) + "."


def _dataset_note(rows: pd.DataFrame) -> str:
    said = []
    for dataset, part in rows.groupby("dataset", sort=False):
        images = " or ".join(_values(part, "train_images")) or "an unknown number of"
        if dataset == "synthetic":
            said.append(
                f"Dataset: synthetic, {images} seeded images that can be learnt; loss and accuracy "
                "are synthetic and say nothing about CIFAR-10."
            )
        else:
            name = {"cifar10": "CIFAR-10"}.get(str(dataset), str(dataset))
            # anybody's class folders are taken as CIFAR-10; whether they are is for them to say
            source = " from class folders" if (part["dataset_source"] == "folders").any() else ""
            said.append(f"Dataset: {name}{source}, {images} training images.")
    return " ".join(said)


def _epoch_note(rows: pd.DataFrame) -> str:
    fractions = sorted(rows.loc[rows["fraction"] < 1, "fraction"].unique())
    if not fractions:
        cold = (rows["kind"] == "published").all()
        return (
            "Epochs: whole, each the cold first of a process."
            if cold
            else "Epochs: whole, timed warm."
        )
    part = " or ".join(f"{100 * f:.4g} %" for f in fractions)
    return (
        f"{ESTIMATE} Only {part} of an epoch was measured: what is marked {ESTIMATE} is "
        "extrapolated to a whole one; loss and accuracy are over the measured part."
    )


def _repeats_notes(rows: pd.DataFrame) -> Iterator[str]:
    rows = rows[rows["epoch_time_s"].notna()]
    if not len(rows):
        yield "Nothing was timed."
    for kind, part in rows.groupby("spread", sort=False):
        low, high = part["repeats"].min(), part["repeats"].max()
        runs = f"{low} runs" if low == high else f"{low} to {high} runs"
        if kind == Spread.NONE:
            yield (
                "Single runs: their spread is unknown."
                if len(part) == len(rows)
                else "Rows with one number alone are single runs."
            )
        elif kind == Spread.WITHIN:
            yield (
                f"Single runs; in brackets the {100 * CONFIDENCE:.0f} % interval of the epoch, "
                "within this run, from its own steps. It does not say how the next run will be: "
                "--repeats 5 does."
            )
        elif kind == Spread.RANGE:
            yield f"Medians of {runs}; in parentheses the lowest and the highest of them."
        else:
            shares = sorted({math.floor(100 * share) for share in part["coverage"]})
            share = " to ".join(f"{s}" for s in dict.fromkeys((shares[0], shares[-1])))
            yield (
                f"Medians of {runs}; in parentheses a prediction interval: the median of as many "
                f"more runs under the same conditions falls inside in {share} of 100 cases, "
                "however times are distributed."
            )


def _seeds_notes(rows: pd.DataFrame) -> Iterator[str]:
    seeds = rows.loc[rows["train_loss"].notna(), "seeds"]
    if not len(seeds):
        return
    low, high = seeds.min(), seeds.max()
    if high == 1:
        yield "Loss and accuracy: one seed."
    else:
        yield f"Loss and accuracy: medians over {low if low == high else f'{low} to {high}'} seeds."


def _memory_notes(rows: pd.DataFrame) -> Iterator[str]:
    rows = rows[rows["memory_bytes"].notna()]
    said = {}
    for (device, kind, name), _ in rows.groupby(["device", "kind", "memory_measure"], sort=False):
        if device == "cpu":
            said[RSS] = "Memory: peak resident set (RSS) of the process, on a CPU."
        elif kind == "published":
            said[kind] = "Memory: as published, not over a baseline."
        else:
            said[str(name)] = f"Memory: peak of {MEMORY[str(name)]}."
    yield from said.values()
    if rows["memory_saved"].notna().any():
        on_cpu, names = (rows["device"] == "cpu").any(), rows["memory_measure"].unique()
        needed = [ON_CPU] if on_cpu else [SHARED_MEMORY[name] for name in names]
        shared = " or ".join(dict.fromkeys(needed))
        tensors = rows["tensors_saved"].notna().any()
        beside = "; tensors saved is of torch's tensors alone" if tensors else ""
        yield f"Memory saved is of all of that, {shared} included{beside}."


ON_CPU = "Python, torch and the dataset"
SHARED_MEMORY = {
    "peak_device_bytes": "the CUDA context and the dataset",
    "peak_process_bytes": "the CUDA context and the dataset",
    "peak_reserved_bytes": "the dataset and unused blocks",
    "peak_allocated_bytes": "the dataset",
}
"""What every precision needs alike, by a column of `MEMORY`; on a CPU, `ON_CPU`."""


# --------------------------------------------------------------------------------------- sections


def _sections(
    cases: pd.DataFrame, machines: dict[tuple[str, str], str]
) -> tuple[list[Section], str]:
    """Tables of the largest groups of cases that agree on `SETTINGS`, in the order they ran."""
    if not len(cases):
        return [], ""
    settings = number_groups(cases, derive.SETTINGS)
    sizes = settings.value_counts()
    kept = sorted(sizes.index[:MOST_SECTIONS])
    varying = [name for name in derive.SETTINGS if cases[name].nunique() > 1]
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


def name_case(row: Row, axes: Iterable[str]) -> str:
    """`Case.label` of a row of the frame of cases, by some axes.

    The frame's values are spelled as CSV spells them, so no `Case` is parsed for it.
    """
    values: dict[str, Value] = {}
    for name in axes:
        value = getattr(row, name)
        values[name] = None if value == "" else value
    return Case(**values).label(values)  # type: ignore[arg-type]


def _section_tables(
    cases: pd.DataFrame, title: str, machines: dict[tuple[str, str], str]
) -> Iterator[Table]:
    machines = {pair: machines[pair] for pair in derive.list_machines(cases)}
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
    measured = rows[rows["status"].isin(_MEASURED)]
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
        cell = _time_cell(row)
        if row.status in _MEASURED and (said := remarks(row, under)):
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
    return Table("machines", f"{title}: epoch time side by side", heads, rows, tuple(_notes(cases)))


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
            values = _values(part, name)
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


# ---------------------------------------------------------------------------------------- answers


def answer(cases: pd.DataFrame, machines: dict[tuple[str, str], str]) -> Iterator[Answer]:
    """Per machine and workload: the fastest case to be trusted, and the largest batch that fits."""
    settings = ["model", "dataset"]
    several = (cases["model"].nunique() > 1) or (cases["dataset"].nunique() > 1)
    for pair in list(machines)[:MOST_SECTIONS]:
        theirs = cases[(cases["sweep"] == pair[0]) & (cases["machine"] == pair[1])]
        for (model, dataset), rows in list(theirs.groupby(settings, sort=False))[:MOST_SECTIONS]:
            about = machines[pair] + (f", {model} on {dataset}" if several else "")
            yield Answer(about, (_fastest(rows), _largest(rows)))


def _fastest(cases: pd.DataFrame) -> str:
    """Name the lowest time, and claim no more of it than its runs allow."""
    timed = cases[cases["epoch_time_s"].notna()].sort_values("epoch_time_s", kind="stable")
    trusted = derive.trusted(timed)
    good, doubted = timed[trusted], timed[~trusted]
    if (cases["kind"] == "fake").all():
        return "Nothing here was measured: these rows came from the fake executor."
    if not len(timed):
        return "No case was timed."
    axes = [name for name in derive.SETTINGS[2:] if cases[name].nunique() > 1]
    named = ("precision", "loss_scale", "batch_size", *axes)
    if not len(good):
        return (
            "Every case has a doubt, so none is called the fastest. Lowest: "
            f"{_name_doubted(doubted, named)}."
        )
    row = next(iterate(good))
    rivals = _find_rivals(row, timed)
    faster = doubted[doubted["epoch_time_s"] < row.epoch_time_s]
    few = row.repeats < MIN_REPEATS
    claim = "Lowest median" if few or rivals else "Fastest"
    if row.repeats == 1:
        claim = "Lowest single time"
    among = " of the rows without doubts" if len(faster) else ""
    part = f", extrapolated from {100 * row.fraction:.4g} % of one" if row.fraction < 1 else ""
    said = (
        f"{claim}{among}: {name_case(row, named)}, "
        f"{quantity_cell(QUANTITIES['epoch_time_s'], row).text} an epoch "
        f"({quantity_cell(QUANTITIES['images_per_s'], row).text} images/s{part})"
        f"{_against_fp32(row, timed)}"
    )
    if row.repeats == 1:
        said += f". These are single runs; use --repeats {MIN_REPEATS} to compare"
    elif rivals:
        names = _list_some([name_case(rival, named) for rival in rivals])
        said += (
            f". Its runs overlap with those of {names}: they cannot be told apart; use --repeats "
            f"{2 * row.repeats + 1} to compare"
        )
    elif few:
        # two of two equal cases lie apart in one comparison of three
        said += f". Two runs are too few to tell cases apart; use --repeats {MIN_REPEATS}"
    if len(faster):
        said += f". Faster but doubted: {_name_doubted(faster, named)}"
    return f"{said}."


def _find_rivals(row: Row, timed: pd.DataFrame) -> list[Row]:
    """Slower cases, doubted or not, whose spread reaches that of ``row``; none of a single run."""
    if row.repeats == 1:
        return []
    low = timed["epoch_time_s_low"].fillna(timed["epoch_time_s"])
    near = (timed["epoch_time_s"] >= row.epoch_time_s) & (low <= row.epoch_time_s_high)
    return [rival for rival in iterate(timed[near]) if rival.record_id != row.record_id]


def _name_doubted(rows: pd.DataFrame, axes: Iterable[str]) -> str:
    names = [
        f"{name_case(row, axes)}, {_write_time(row)}: {remarks(row, _NOT_FATAL)}"
        for row in iterate(rows)
    ]
    return _list_some(names, "; ")


_NOT_FATAL = tuple(doubt.name for doubt in DOUBTS.values() if not doubt.fatal)


def _write_time(row: Row) -> str:
    time = QUANTITIES["epoch_time_s"]
    mark = ESTIMATE if is_estimate(time, row) else ""
    return mark + time.add_unit(time.write(row.epoch_time_s))


def _list_some(names: Sequence[str], between: str = ", ") -> str:
    more = [f"and {len(names) - 3} more cases"] if len(names) > 4 else names[3:]
    return between.join([*names[:3], *more])


def _against_fp32(row: Row, timed: pd.DataFrame) -> str:
    """Compare the fastest case with fp32 at its batch size, and with the fastest fp32.

    A speed-up at one batch size alone would flatter where fp32 is slow at just that one.

    Args:
        timed: all cases with a time, fastest first.
    """
    trusted = derive.trusted(timed)
    if row.precision == "fp32":
        others = trusted & (timed["precision"] != "fp32")
        return "; no other precision was faster" if others.any() else ""
    same = timed["precision"] == "fp32"
    for name in (*derive.SOURCE, *derive.SETTINGS, "environment", "kind"):
        same &= timed[name] == getattr(row, name)
    if not same.any():
        return "; there is no fp32 case with the same settings to compare it with"
    about = ESTIMATE if row.fraction < 1 else ""
    doubt = "" if (trusted & same).any() else " (the fp32 times are in doubt)"
    # one in doubt is named only where none is better
    best = next(iterate(timed[same & trusted] if (same & trusted).any() else timed[same]))
    speedup = best.epoch_time_s / row.epoch_time_s
    at_best = (
        f", {about}{speedup:.2f}× as fast as fp32 at its fastest (batch size {best.batch_size})"
    )
    if not is_number(row.speedup):
        return at_best + doubt
    saved = ""
    if is_number(row.memory_saved):
        less = "less" if row.memory_saved >= 0 else "more"
        saved = f" with {100 * abs(row.memory_saved):.0f} % {less} memory"
    said = f", {about}{row.speedup:.2f}× as fast as fp32 at that batch size{saved}"
    if not doubt and not (trusted & same & (timed["batch_size"] == row.batch_size)).any():
        said += " (that fp32 time is in doubt)"
    return said + (at_best if row.speedup > speedup * (1 + STEADY) else "") + doubt


def _largest(cases: pd.DataFrame) -> str:
    said = []
    for precision in PRECISIONS:
        rows = cases[cases["precision"] == precision]
        fits = rows.loc[rows["status"].isin(_MEASURED), "batch_size"]
        full = rows.loc[rows["status"].isin([Status.OOM.value, Status.OOM_SUSPECTED.value])]
        if len(fits):
            beyond = full.loc[full["batch_size"] > fits.max(), "batch_size"]
            limit = f"{fits.max()} ({beyond.min()} does not)"
            said.append(f"{precision} {limit if len(beyond) else f'at least {fits.max()}'}")
        elif len(full):
            said.append(f"{precision} none (not even {full['batch_size'].min()})")
    if not said:
        return "No batch size is known to fit."
    fake = " (not measured)" if (cases["kind"] == "fake").all() else ""
    return f"Largest batch size that fits{fake}: {', '.join(said)}."
