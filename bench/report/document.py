"""The report, free of any format: its tables. Built once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.case import AXES, BARE, SAME_QUESTION, Case
from bench.diagnosis.explanation import Explanation
from bench.precision import PRECISIONS
from bench.questions.answers import answer
from bench.questions.batch_sizes import find_families, find_searches
from bench.questions.batch_tables import tabulate_batches
from bench.questions.breakdowns import (
    Divided,
    divide_cases,
    tabulate_breakdowns,
    tabulate_operations,
)
from bench.questions.changes import (
    tabulate_effects,
    tabulate_learning,
    tabulate_parts,
    tabulate_prices,
)
from bench.questions.checkpoints import tabulate_checkpoints
from bench.questions.effects import Effect, find_effects
from bench.questions.epochs import collect_epochs, tabulate_epochs
from bench.questions.gpus import Line, find_lines, tabulate_gpus
from bench.questions.halving import tabulate_halving
from bench.questions.lanes import tabulate_lanes
from bench.questions.learning import judge_learning
from bench.questions.loading import find_loaded, tabulate_loaded
from bench.questions.loss_scales import scale_map_tables, summarize_scale_map
from bench.questions.next_step import choose_next
from bench.questions.notes import describe_constants, describe_subject, list_values, write_notes
from bench.questions.notices import warn
from bench.questions.profiles import Profiled, doubt_profiles, explain_pairs, read_steps
from bench.questions.reasons import (
    choose_pairs,
    tabulate_explained,
    tabulate_pairs,
    tabulate_possible,
)
from bench.questions.startup import find_parts, find_prices, find_start
from bench.record import Status
from bench.render.cells import (
    TIMED,
    Row,
    iterate,
    name_spread,
    number_cell,
    outcome,
    published_time_cell,
    quantity_cell,
    remarks,
    time_cell,
    whole_cell,
)
from bench.render.model import MOST_SECTIONS, NOTHING, Cell, Document, Head, Level, Table
from bench.render.units import count_table_in, find_units
from bench.scale_map import ScaleMap, read_scale_map
from bench.store.attempts import number_groups
from bench.study import axes, summaries
from bench.study.axes import (
    MACHINE,
    Machines,
    list_naming_axes,
    name_axis,
    name_value,
    sort_cases,
)
from bench.study.doubts import DOUBTS, list_below
from bench.study.estimate import LOSS, take_readings, take_seeds
from bench.study.filters import Filter, select
from bench.study.quantities import QUANTITIES
from bench.text import GIB, count, name_first, say_left_out

if TYPE_CHECKING:
    import pandas as pd

from bench.study.sweeps import Sweep

FEW_AXES = 3
"""Up to so many columns of axes, the overview has room for what is saved as well."""

MOST_ROWS = 400
"""Rows of one table; more would not be read."""


HEADINGS = (MACHINE, "model", "dataset", "start")
"""Axes that are said above their rows, where others tell these apart: a path of 60 characters in a
column left no room for loss and memory at 100."""


@dataclass(frozen=True)
class Report(Document):
    """A document on sweeps, and what its figures and its files of numbers are made from.

    Attributes:
        records: of `summaries.read`, those that ``--where`` asks for.
        cases: of `summaries.summarize`, in the order of the overview.
        axes: those in which the cases differ, in the order of the overview's columns.
        explanations: each precision against fp32, of the cases with profiles.
        lines: cases on one GPU and on several, of weak and of strong scaling.
        scale_maps: those that `bench.scales` stored in the folders of the sweeps.
        home: the folder that it is for; links start there.
    """

    sweeps: Sequence[Sweep]
    reference: Sweep | None
    records: pd.DataFrame
    cases: pd.DataFrame
    machines: dict[tuple[str, str], str]
    axes: tuple[str, ...]
    effects: tuple[Effect, ...]
    explanations: tuple[Explanation, ...]
    environments: Table
    scale_maps: tuple[ScaleMap, ...]
    lines: tuple[Line, ...]
    home: Path


def build(
    sweeps: Sequence[Sweep],
    reference: Sweep | None = None,
    home: Path | None = None,
    where: Sequence[Filter] = (),
    by: str = "",
) -> Report:
    """Derive everything once and lay it out.

    Args:
        reference: published figures to stand beside the cases that have one.
        home: the folder the document is for; links start there.
        where: which cases it is about; all of them by default.
        by: the axis by which the overview is grouped, if it varies.
    """
    import pandas as pd

    everything = summaries.read(sweeps)
    rows = summaries.latest(everything)
    cases = summaries.summarize(rows)
    published = summaries.latest(summaries.read([reference])) if reference else rows.head(0)
    cases = summaries.set_beside(cases, summaries.summarize(published))
    steps, tried = read_steps(rows, sweeps), cases
    cases, records = select(cases, where), select(everything, where)
    rows = rows[rows["cell"].isin(cases["cell"])]
    probes = records[records["probe"].astype(bool)]
    machines = label_machines(pd.concat([p[list(summaries.SOURCE)] for p in (cases, probes)]))
    varying = axes.find_varying(cases)
    order = _order_columns(cases, varying, by)
    cases = sort_cases(cases, order).reset_index(drop=True)
    cases = cases.join(find_start(rows), on="cell")
    losses = take_seeds(take_readings(LOSS, rows))
    cases["losses"] = cases["cell"].map(lambda cell: losses.get(cell, {}))
    effects = find_effects(rows, cases, machines)
    searches = find_searches(records, sweeps)
    families = find_families(cases, probes, searches)
    lines = find_lines(rows, cases)
    divided, named = divide_cases(steps, cases), list_naming_axes(varying)
    pairs = explain_pairs(steps, cases, machines, tried=tried)
    tables = [
        _tabulate_cases(cases, order, by, machines),
        *tabulate_effects(effects, cases),
        *tabulate_learning(list(judge_learning(rows, cases, effects, losses))),
        *tabulate_prices(cases, list(find_prices(rows, cases, effects))),
        *tabulate_parts(find_parts(rows), machines),
        *tabulate_breakdowns(divided, named, machines),
        *tabulate_possible(steps, cases, effects, machines),
        *tabulate_pairs(pairs),
        *tabulate_explained(choose_pairs(pairs)),
        *tabulate_operations(_put_first(divided, steps, pairs), named, machines),
        *tabulate_batches(families, cases, searches, machines, list_below(cases)),
        *tabulate_gpus(lines, cases, machines),
        *tabulate_loaded(find_loaded(rows, cases), cases, machines),
        *tabulate_epochs(cases, collect_epochs(rows, cases, sweeps), order, machines),
        *tabulate_checkpoints(rows, cases, order, machines),
        *tabulate_lanes(everything),
        *_tabulate_machines(cases, order, machines),
        *_tabulate_published(cases, machines),
    ]
    for sweep in sweeps:
        if sweep.halving:
            tables += tabulate_halving(sweep.records, sweep.read_epochs(), sweep.halving)
    scale_maps = [read_scale_map(sweep.file.parent) for sweep in sweeps]
    for scales in filter(None, scale_maps):
        tables += _tabulate_scales(scales)
    shown = (steps[cell] for cell in cases["cell"] if cell in steps)
    notices = [*warn(records, cases, everything, sweeps), *doubt_profiles(shown)]
    units, title = find_units(cases), name_first([sweep.name for sweep in sweeps], 3)
    return Report(
        title=title,
        subject=describe_subject(title, cases, varying, machines),
        sweeps=sweeps,
        reference=reference,
        records=records,
        cases=cases,
        machines=machines,
        axes=varying,
        constants=tuple(describe_constants(cases, varying)),
        answers=tuple(answer(cases, machines, varying, probes, families, effects)),
        warnings=tuple(notice for notice in notices if not notice.good),
        effects=tuple(effects),
        explanations=tuple(pairs),
        tables=tuple(count_table_in(table, units) for table in tables if table.rows),
        notes=(
            *write_notes(cases, varying),
            *(f"{notice.label}: {notice.text}" for notice in notices if notice.good),
        ),
        outcomes=_count_outcomes(cases),
        next_step=choose_next(sweeps, cases),
        environments=_environments(cases, machines),
        scale_maps=tuple(filter(None, scale_maps)),
        lines=tuple(lines),
        home=home or Path.cwd(),
    )


def _put_first(
    divided: Sequence[Divided],
    steps: Mapping[int, Profiled],
    pairs: Sequence[Explanation],
) -> list[Divided]:
    """The cases of the pairs that are explained in full before all others, else as they were."""
    wanted = {side.case for pair in choose_pairs(pairs) for side in (pair.a, pair.b)}
    return sorted(divided, key=lambda one: steps[one.row.cell].case not in wanted)


def label_machines(cases: pd.DataFrame) -> dict[tuple[str, str], str]:
    """Name each (sweep, machine) for people: the machine, and its sweep where two share a name."""
    pairs = summaries.list_machines(cases)
    names = [machine for _, machine in pairs]
    return {
        (sweep, machine): machine if names.count(machine) == 1 else f"{machine} · {sweep}"
        for sweep, machine in pairs
    }


# --------------------------------------------------------------------------------------- overview


@dataclass(frozen=True)
class Part:
    """A column of a table of cases: its head, and how a case fills it."""

    head: Head
    cell: Callable[[Row], Cell]
    optional: bool = False  # left out where it would be empty


def _quantity_part(
    name: str, label: str = "", optional: bool = True, prefix: str = "", keep: int = 9
) -> Part:
    q = QUANTITIES[name]
    head = Head(prefix + name, _add_unit(label or q.label, q.unit), q.help, True, q.better, keep)
    return Part(head, lambda row: quantity_cell(q, row, prefix), optional)


def _add_unit(label: str, unit: str) -> str:
    return f"{label} ({unit})" if unit not in ("", "×") else label


def _axis_part(axis: str, machines: Machines) -> Part:
    # on the command line the help of an axis says images, and means items
    told = "where it ran" if axis == MACHINE else AXES[axis].metadata["help"]
    help = told.replace("images", "items")
    number = axis in axes.NUMBERS

    def cell(row: Row) -> Cell:
        if axis == "fp8_recipe" and not PRECISIONS[row.precision].float8:
            return Cell(NOTHING)
        value = (row.sweep, row.machine) if axis == MACHINE else getattr(row, axis)
        text = name_value(axis, value, machines)
        return Cell(text, text if axis == MACHINE else value)  # type: ignore[arg-type]

    return Part(Head(axis, name_axis(axis), help, number, wrap=axis in (MACHINE, "model")), cell)


_GLOBAL_BATCH = Part(
    Head("global_batch", "global batch", "items of a step of the optimizer, of all GPUs together"),
    lambda row: whole_cell(int(row.batch_size * row.world_size)),
)


def _order_columns(cases: pd.DataFrame, varying: Sequence[str], by: str) -> tuple[str, ...]:
    """The axes that have a column, the one that groups first.

    How much was measured has one only where nothing else tells two cases apart.
    """
    order = [*([by] if by in varying else []), *(name for name in varying if name != by)]
    for name in SAME_QUESTION:
        axes_shown = [axis for axis in order if axis != MACHINE]
        equal = [*summaries.SOURCE, *axes_shown, "environment", "kind"]
        alike = number_groups(cases, equal)
        if (cases[name].groupby(alike).nunique() > 1).any():
            order.append(name)
    return tuple(order)


def _tabulate_cases(
    cases: pd.DataFrame,
    order: Sequence[str],
    by: str,
    machines: Machines,
) -> Table:
    """One row a case, one column an axis that varies."""
    word = "synthetic " if (cases["dataset"] == "synthetic").all() else ""
    time = QUANTITIES["epoch_time_s"]
    label = _add_unit(time.label, time.unit) + name_spread(cases)
    seconds = cases["start_time_s"]
    slow = len(seconds.dropna()) and seconds.max() > max(2 * seconds.min(), seconds.min() + 1)
    headings, below = _choose_headings(cases, order, by), list_below(cases)
    cases = sort_cases(cases, headings)
    columns = [axis for axis in order if axis not in headings] or ["precision", "batch_size"]
    parts = [
        *(_axis_part(axis, machines) for axis in columns),
        *([_GLOBAL_BATCH] if "world_size" in columns else []),
        Part(Head(time.name, label, time.help, True, time.better), time_cell),
        _quantity_part("images_per_s", keep=5),
        _quantity_part("speedup", "speed-up over fp32", keep=7),
        _quantity_part("memory_bytes", keep=8),
        *(
            [_quantity_part("memory_saved", keep=2), _quantity_part("tensors_saved", keep=1)]
            if len(columns) <= FEW_AXES
            else []  # the effects say it, and the page is full
        ),
        _quantity_part("train_loss", f"{word}loss", keep=8),
        _quantity_part("train_accuracy", f"{word}accuracy", keep=3),
        _quantity_part("test_accuracy", f"{word}test accuracy", keep=6),
        _quantity_part("overflow_steps", keep=6),
        _quantity_part("energy_per_epoch_j", keep=4),
        Part(
            Head("start_time_s", "start-up (s)", "set-up, and the slowest first steps of all "
                 "repeats", True, "lower", 3),
            lambda row: number_cell(row.start_time_s if slow else math.nan),
            optional=True,
        ),
        Part(
            Head("remarks", "remarks", "what to know before believing the row", False, wrap=True),
            lambda row: Cell(remarks(row, below)),
            optional=True,
        ),
    ]  # fmt: skip
    table = _lay_out("overview", f"Overview: {count(len(cases), 'case')}", parts, cases)
    shown = cases.head(MOST_ROWS)
    groups = _find_groups(shown, order, headings, machines)
    return replace(table, groups=groups, level=Level.TABLE)


def _choose_headings(cases: pd.DataFrame, order: Sequence[str], by: str) -> tuple[str, ...]:
    """The axes that are said once above their rows: what is asked for, machines, networks, files.

    One axis at least is left for the columns.
    """
    if by in order:
        return (by,)
    headings = [axis for axis in order if axis in HEADINGS][: len(order) - 1]
    # what is the same in all cases under each heading is a part of it
    places = [axes.rank(cases, axis) for axis in headings]
    for axis in order if headings else ():
        alike = axis in headings or axes.rank(cases, axis).groupby(places).nunique().max() == 1
        if alike and axis not in headings and axis not in ("precision", "batch_size"):
            headings.append(axis)
    return tuple(headings)


def _find_groups(
    cases: pd.DataFrame, order: Sequence[str], headings: Sequence[str], machines: Machines
) -> dict[int, str]:
    """Where groups of rows begin, and their headings.

    Without headings, groups agree on as many of the leading axes as leave them three rows each.
    """
    if headings:
        return _find_starts(cases, headings, machines)
    found: dict[int, str] = {}
    for depth in range(1, len(order)):
        starts = _find_starts(cases, order[:depth], machines)
        if depth > 1 and len(cases) < 3 * len(starts):
            break
        found = starts
    return {start: "" for start in found if start}


def _find_starts(cases: pd.DataFrame, leading: Sequence[str], machines: Machines) -> dict[int, str]:
    """The rows at which ``leading`` axes change, and their values there."""
    columns = [axes.take_values(cases, axis).tolist() for axis in leading]
    keys = list(zip(*columns, strict=True))
    return {
        i: " · ".join(
            _name_heading(axis, value, machines) for axis, value in zip(leading, key, strict=True)
        )
        for i, key in enumerate(keys)
        if i == 0 or key != keys[i - 1]
    }


def _name_heading(axis: str, value: Any, machines: Machines) -> str:
    text = name_value(axis, value, machines)
    return text if axis in (MACHINE, *BARE) else f"{name_axis(axis)} {text}"


def _lay_out(name: str, title: str, parts: Sequence[Part], rows: pd.DataFrame) -> Table:
    """Fill a table; optional columns without any value are left out."""
    cut = rows.head(MOST_ROWS)
    cells = tuple(tuple(part.cell(row) for part in parts) for row in iterate(cut))
    left = len(rows) - len(cut)
    more = f"{say_left_out(left, 'row')}; --where chooses, and --format csv has them all."
    heads = tuple(part.head for part in parts)
    table = Table(name, title, heads, cells, (more,) if left else ())
    required = [part.head.name for part in parts if not part.optional]
    return table.drop_empty((NOTHING, "", "0"), but=required)


# ---------------------------------------------------------------------------- beside other figures


def _tabulate_machines(
    cases: pd.DataFrame, order: Sequence[str], machines: Machines
) -> Iterator[Table]:
    """One row a case that several machines ran, one column of epoch times a machine."""
    rest = [axis for axis in order if axis != MACHINE]
    if len(machines) < 2 or not rest:
        return
    below = list_below(cases)
    lines: dict[tuple[Any, ...], dict[tuple[str, str], Cell]] = {}
    # only what several machines ran, and no more rows than are shown
    question = number_groups(cases, rest)
    places = number_groups(cases, summaries.SOURCE).groupby(question).transform("nunique")
    shared = cases[places > 1]
    for row in iterate(sort_cases(shared, rest)):
        key = tuple(getattr(row, axis) for axis in rest)
        if key not in lines and len(lines) == MOST_ROWS:
            break
        line = lines.setdefault(key, {})
        cell = time_cell(row, spread=False)
        if row.status in TIMED and (said := remarks(row, below)):
            cell = Cell(f"{cell.text} ({said})", cell.value)
        # two environments of one machine: which of them is meant, nobody can say
        line[row.sweep, row.machine] = (
            cell if (row.sweep, row.machine) not in line else Cell("several")
        )
    heads = (
        *(_axis_part(axis, machines).head for axis in rest),
        *(Head(f"machine{i}", label) for i, label in enumerate(machines.values(), 1)),
    )
    rows = tuple(
        (
            *(Cell(name_value(a, v, machines), v) for a, v in zip(rest, key, strict=True)),
            *(line.get(pair, Cell(NOTHING)) for pair in machines),
        )
        for key, line in lines.items()
    )
    yield Table("machines", "Epoch time (s) side by side", heads, rows, ())


def _tabulate_published(cases: pd.DataFrame, machines: Machines) -> Iterator[Table]:
    """The cases that were published too, beside those figures."""
    beside = cases[(cases["published_status"] != "") & (cases["device"] == "cuda")]
    for axis in ("compile", "cuda_graphs", "channels_last"):  # unknown in 2019
        beside = beside[beside[axis] == getattr(Case, axis)]
    if not len(beside):
        return
    order = [axis for axis in axes.ORDER if axis in ("precision", "loss_scale", "batch_size")]
    several = [axis for axis in axes.find_varying(beside) if axis not in order]
    headings = [axis for axis in several if axis in HEADINGS]
    columns = [*order, *(axis for axis in several if axis not in headings)]
    beside = sort_cases(beside, [*headings, *columns])
    time = QUANTITIES["epoch_time_s"]
    parts = [
        *(_axis_part(axis, machines) for axis in columns),
        Part(Head(time.name, "epoch time (s)", time.help, True, time.better), time_cell),
        Part(
            Head("published_epoch_time_s", "2019 epoch time (s)", "published for the RTX Titan"),
            published_time_cell,
        ),
        _quantity_part("speedup", "speed-up over fp32"),
        _quantity_part("speedup", "2019 speed-up", True, "published_"),
        _quantity_part("memory_bytes", keep=7),
        _quantity_part("memory_bytes", "2019 memory", True, "published_", keep=7),
        _quantity_part("memory_saved", keep=6),
        _quantity_part("memory_saved", "2019 memory saved", True, "published_", keep=6),
        Part(
            Head("remarks", "remarks", "whether the GPU waits for the host", False),
            lambda row: Cell(DOUBTS["host_bound"].remark * row.host_bound),
            optional=True,
        ),
    ]
    table = _lay_out("rtx-titan", "Beside the published RTX Titan of 2019", parts, beside)
    note = (
        "2019: PyTorch 1.0, CUDA 10.0, cuDNN 7.4.2; each the cold first epoch of a process, with "
        "autotuning in it; single runs; memory as published, not over a baseline. The epochs "
        "beside them are timed warm."
    )
    shown = beside.head(MOST_ROWS)
    starts = _find_starts(shown, headings, machines) if headings else {}
    lines = _find_starts(shown, [*headings, "precision"], machines)
    groups = {start: "" for start in lines if start} | starts
    yield replace(table, notes=(*table.notes, note), groups=groups)


def _tabulate_scales(scales: ScaleMap) -> Iterator[Table]:
    """What loss scales do to gradients; the sentences on it stand above its other notes."""
    windows, *others = scale_map_tables(scales)
    yield replace(windows, notes=(*summarize_scale_map(scales).splitlines(), *windows.notes))
    yield from others


# ------------------------------------------------------------------------------------------- rest


def _count_outcomes(cases: pd.DataFrame) -> str:
    """How many cases and runs there are, and how the cases ended, most frequent first."""
    ends = [
        outcome(str(status), inferred=bool(inferred))
        for status, inferred in zip(cases["status"], cases["inferred"], strict=True)
    ]
    counts = {end: ends.count(end) for end in dict.fromkeys(ends)}
    ordered = sorted(counts.items(), key=lambda pair: (pair[0] != Status.OK.value, -pair[1]))
    said = ", ".join(f"{number:,} {end}" for end, number in ordered)
    runs = int(cases["runs"].sum()) if len(cases) else 0
    return f"{count(len(cases), 'case')} in {count(runs, 'run')}: {said or 'none'}."


def _environments(cases: pd.DataFrame, machines: Machines) -> Table:
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
    parts = [
        cases.loc[(cases["sweep"] == sweep) & (cases["machine"] == machine), list(names)]
        for sweep, machine in pairs
    ]
    rows = []
    for name, label in names.items():
        cells = []
        for part in parts:
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
