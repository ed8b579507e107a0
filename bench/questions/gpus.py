"""How speed goes with the number of GPUs, and what each precision keeps of its speed-up there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

from bench.case import AXES, FOLLOWS, Case, format_value
from bench.limits import MIN_REPEATS
from bench.precision import PRECISIONS
from bench.questions.lines import Line, Point, Tax, find_taxes
from bench.questions.material import Material
from bench.render.cells import (
    mark_part,
    name_place,
    name_spread,
    quantity_cell,
    quantity_column,
    remarks,
    time_cell,
    write_ratio,
)
from bench.render.model import Cell
from bench.render.section import Column, Section, Sheet, join
from bench.study.axes import Machines, name_value
from bench.study.doubts import DOUBTS, list_links, name_links
from bench.study.quantities import QUANTITIES, is_number

MOST_ROWS = 60
"""Rows of one of these tables; more would not be read."""

_Place = tuple[Point, Line]


def _tell_scaling(found: Material) -> Iterator[Sheet]:
    both = [[line for line in found.lines if line.strong is strong] for strong in (False, True)]
    for lines in filter(None, both):
        again = bool(both[0]) and lines is both[1]  # what the first says of both is not repeated
        yield _tell_lines(lines, found, again)


def name_line(line: Line, named: Sequence[str], machines: Machines, but: str = "") -> str:
    """Name what all points of a line share."""
    first = line.points[-1].row
    axes = [n for n in named if n not in ("world_size", "parallel", but)]
    if line.strong:
        axes = [name for name in axes if name != "batch_size"]
    words = [name_place(first, axes, machines)] if axes else []
    if line.strong:
        words.append(f"global batch {first.global_batch}")
    elif "batch_size" in axes:
        words[0] += " on each GPU" if first.device == "cuda" else " in each process"
    words.append(name_value("parallel", first.parallel, machines))
    return " · ".join(filter(None, words))


def _name_base(line: Line) -> str:
    """What the points of a line are compared with."""
    if line.base is None:
        return "nothing: add --parallel none, which measures one"
    if line.base.row.parallel == Case.parallel:
        return "--parallel none"
    return f"--parallel {name_value('parallel', line.base.row.parallel, {})} --world-size 1"


def _tell_lines(lines: Sequence[Line], found: Material, again: bool) -> Sheet:
    strong, on_gpus = lines[0].strong, any(p.row.device == "cuda" for p in lines[0].all)
    what = "GPUs" if on_gpus else "processes"
    time, exposed, late = (QUANTITIES[n] for n in ("epoch_time_s", "exposed_s", "straggle"))
    several_bases = len({_name_base(line) for line in lines}) > 1
    several_ways = len({point.row.parallel for line in lines for point in line.all}) > 1

    def write(place: _Place, value: float, text: str) -> Cell | None:
        if math.isnan(value):
            return None
        point, line = place
        rows = [point.row, *([line.base.row] if line.base else [])]
        return Cell(mark_part(*rows) + text, value)

    def write_exposed(place: _Place) -> Cell:
        cell, error = quantity_cell(exposed, place[0].row, spread=False), place[0].exposed_error_s
        if not (is_number(cell.value) and is_number(error)):
            return cell
        return replace(cell, text=f"{cell.text} ± {exposed.write(error)}")

    def write_slowest(place: _Place) -> Cell | None:
        point, late_by = place[0], place[0].row.straggle
        if point.slowest is None or math.isnan(late_by):
            return None
        return Cell(f"{point.slowest}, +{late.write(late_by)} %", float(late_by))

    def explain(places: Sequence[_Place]) -> Iterator[str]:
        return _explain_lines(list({id(line): line for _, line in places}.values()), what, again)

    quantity = partial(quantity_column, take=lambda place: place[0].row, spread=False)
    columns: list[Column[_Place]] = [
        Column("world_size", what, "that train one network together", lambda at: at[0].gpus,
               always=True),
        Column("parallel", "parallel", "how they do",
               lambda at: Cell(name_value("parallel", at[0].row.parallel, {}), at[0].row.parallel)
               if several_ways else None, number=False, keep=8),
        Column("batch_size", "batch size", "of each", lambda at: int(at[0].row.batch_size)),
        Column("global_batch", "global batch", "of all together, a step of the optimizer",
               lambda at: int(at[0].row.global_batch)),
        Column(time.name, time.title + name_spread(found.cases), "of the slowest process",
               lambda at: time_cell(at[0].row), better=time.better),
        quantity("images_per_s"),
        Column("gpu_speedup", "speed-up (×)", "images/s over those of one",
               lambda at: write(at, at[0].speedup, write_ratio(at[0].speedup)),
               better="higher", always=True),
        Column("gpu_efficiency", "efficiency (%)", "speed-up over their number",
               lambda at: write(at, at[0].efficiency, _write_percent(at[0].efficiency)),
               better="higher", always=True),
        Column("gpu_interval", "95 % interval", "of the efficiency",
               lambda at: _write_ends(at[0].ends), keep=7),
        replace(quantity("exposed_s", keep=6), say=write_exposed),
        quantity("exposed_share", keep=6),
        quantity("wire_bytes", keep=6),
        quantity("wire_rate", keep=6),
        Column("slowest", "longest work", "the process that works longest before gradients are "
               "exchanged, and how much longer than the others' median", write_slowest, keep=5),
        Column("remarks", "remarks", "what to know before believing the row",
               lambda at: ", ".join(filter(None, [remarks(at[0].row, found.below),
                                                  *_list_remarks(*at)])),
               wrap=True),
    ]  # fmt: skip
    rows, groups = join(
        (
            name_line(line, found.named, found.machines)
            + (f" (against {_name_base(line)})" if several_bases else ""),
            [(point, line) for point in line.all],
        )
        for line in lines
    )
    kind = "strong" if strong else "weak"
    held = "the global batch stays" if strong else "the batch of each stays"
    return Sheet(
        f"Scaling over {what}: {kind}, {held}", columns, rows, explain, groups,
        name=f"{kind}-scaling", most=MOST_ROWS,
    )  # fmt: skip


def _list_remarks(point: Point, line: Line) -> Iterator[str]:
    """What to know of a point that its case alone does not tell."""
    if line.base and line.base.row.beside and not (point is line.base or point.row.beside):
        yield f"against one {DOUBTS['beside'].remark}"
    if point.beyond:
        yield "above 100 %"
    if point.hidden:
        yield "exchange not above noise"


def _write_percent(share: float) -> str:
    text = f"{100 * share:.1f}"
    return text if float(text) else "0.0"  # and not -0.0


def _write_ends(ends: tuple[float, float] | None) -> str | None:
    return " to ".join(map(_write_percent, ends)) if ends else None


def _explain_lines(lines: Sequence[Line], what: str, again: bool) -> Iterator[str]:
    strong = lines[0].strong
    one = "GPU" if what == "GPUs" else "process"
    rows = [point.row for line in lines for point in line.all]
    grows = (
        f"the batch of each {one} shrinks as their number grows"
        if strong
        else f"the global batch grows with the number of {what}, and an epoch has fewer steps"
    )
    yield f"{'Strong' if strong else 'Weak'} scaling: {grows}."
    bases = {_name_base(line) for line in lines}
    if len(bases) == 1:
        yield f"Each is compared with {bases.pop()}."
    if any(point.beyond for line in lines for point in line.points):
        yield (
            f"Above 100 %: more {what} do not make each of them faster. The case on one was "
            "slowed, or smaller batches take less time an item, as they may where the global batch "
            "stays. Look at its remarks, and run both again on an idle machine with --repeats 5."
        )
    if again:
        return
    yield (
        f"Efficiency is the speed-up over the number of {what}. An epoch is as long as that of the "
        "slowest process."
    )
    if rows[0].device == "cpu":
        yield (
            "One process uses all cores of the CPU, and several share them: where N processes are "
            "as fast as one, their efficiency is 1/N, and nothing is lost."
        )
    if any(not math.isnan(row.exposed_s) for row in rows):
        yield (
            "Exposed communication is what the exchange of gradients adds to a step: a step with "
            "it less one without, measured after the epoch, ± half of its 95 % interval within a "
            "run, or of the range of the runs where that is wider. Not above noise: none at all is "
            "within that. What goes on beside the backward pass adds nothing. "
            "On the wire: what a ring all-reduce sends from each, 2 (N - 1) / N of the gradients, "
            "over the time of a step."
        )
    links = {
        point.gpus: kinds
        for line in lines
        for point in line.points
        if (kinds := list_links(str(point.row.links)))
    }
    if len({tuple(kinds) for kinds in links.values()}) > 1:
        doubt = DOUBTS["unlike_links"]
        yield (
            f"The GPUs of different numbers are not linked alike ({name_links(links)}), so that a "
            f"drop may be that of a slower link. {doubt.fix}"
        )
    if any(row.parallel in AXES["parallel"].legacy for row in rows):
        yield "dp is torch's DataParallel, which torch itself advises against; use --parallel ddp."


SCALING = Section("scaling", "How much faster do several train one network?", _tell_scaling)


def _tell_taxes(found: Material) -> Iterator[Sheet]:

    def place(tax: Tax) -> tuple[bool, int]:
        return tax.line.strong, tax.line.group

    def write_lead(gpus: int, tax: Tax) -> Cell | None:
        speedup = tax.speedups.get(gpus)
        return None if speedup is None else Cell(write_ratio(speedup), speedup)

    order = list(PRECISIONS)
    taxes = sorted(
        find_taxes(found.lines),
        key=lambda tax: (*place(tax), order.index(tax.line.points[0].row.precision)),
    )
    on_gpus = any(point.row.device == "cuda" for tax in taxes for point in tax.line.all)
    what = "GPUs" if on_gpus else "processes"
    shown = ["precision", *(name for name in FOLLOWS["precision"] if name in found.named)]
    quantity = partial(quantity_column, take=lambda tax: tax.most.row, spread=False, keep=6)
    columns: list[Column[Tax]] = [
        Column("precision", "precision", "and what follows from it",
               lambda tax: name_place(tax.most.row, shown, {}), number=False),
        *(
            Column(f"over_fp32_{n}", f"over fp32 on {n} (×)", f"speed-up over fp32 on as many "
                   f"{what}", partial(write_lead, n), better="higher")
            for n in sorted({gpus for tax in taxes for gpus in tax.speedups})
        ),
        Column("tax", "scaling tax (%)", "part of the speed-up on one that is lost on the most",
               lambda tax: Cell(_write_percent(tax.share), tax.share), better="lower", always=True),
        Column("tax_interval", "95 % interval", "of the tax", lambda tax: _write_ends(tax.ends),
               keep=7),
        quantity("wire_bytes"),
        quantity("exposed_share"),
    ]  # fmt: skip
    rows, groups = join(
        (name_line(part[0].line, found.named, found.machines, but="precision"), part)
        for part in (list(part) for _, part in groupby(taxes, place))
    )
    title = f"Precision's scaling tax: the speed-up over fp32 by the number of {what}"
    yield Sheet(title, columns, rows, _explain_taxes, groups, most=MOST_ROWS)


def _explain_taxes(taxes: Sequence[Tax]) -> Iterator[str]:
    yield (
        "A faster step leaves less time to exchange gradients in. Under autocast (fp16-amp, "
        "bf16-amp) gradients stay in fp32, so that as many bytes are exchanged as in fp32; fp16 "
        "and bf16 halve them, as does --grad-compression. In NVIDIA's own figures "
        "(DeepLearningExamples, ResNet-50 v1.5), 8 A100 are 7.72 times as fast as one in TF32 and "
        "6.72 times in mixed precision: a tax of 13 %."
    )
    unsure = [tax for tax in taxes if tax.ends and tax.ends[0] <= 0 <= tax.ends[1]]
    if unsure:
        names = dict.fromkeys(format_value(tax.line.points[0].row.precision) for tax in unsure)
        yield (
            f"Whether there is a tax is not certain for {', '.join(names)}: the interval has 0 in "
            "it; --repeats 5 narrows it."
        )
    if any(tax.ends is None for tax in taxes):
        yield f"An interval needs {MIN_REPEATS} runs of each of the four cases; use --repeats 5."


TAX = Section("scaling-tax", "What of its speed-up does each precision lose there?", _tell_taxes)
