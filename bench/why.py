"""`python -m bench.why`: why a case is faster or slower than another, and not faster still.

The two differ in one axis: by default each precision is explained against fp32. `bench.profile`
describes the rules. A sweep needs ``--profile`` for it.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.base.errors import UsageError
from bench.base.plain import dump_document
from bench.base.processes import leave
from bench.base.text import name_first
from bench.results.store.reader import name_newest
from bench.results.study.axes import COMPARED, refuse_unknown
from bench.schema.axis import Value, name_column
from bench.schema.case import lay_out, spell_value
from bench.schema.flags import (
    Parser,
    add_filters,
    add_output,
    choose_format,
    command,
    write_document,
)

if TYPE_CHECKING:
    from bench.answers.explanation import Explanation, StepSide
    from bench.answers.render.table import Notice
    from bench.results.study.axes import Filter


@dataclass(frozen=True)
class Explanations:
    """The explained pairs, what they were measured on, and warnings about them."""

    explanations: Sequence[Explanation]
    conditions: Sequence[str]
    warnings: Sequence[Notice]


def explain(sweep: Path, axis: str, ends: Sequence[Value], where: Sequence[Filter]) -> Explanations:
    """Explain the pairs of a sweep that differ in ``axis`` alone. ``ends`` are its values before
    and after; without them, any. Raises UsageError: there is no such pair, or none was
    profiled."""
    from bench.answers.notices import describe_constants, warn
    from bench.answers.render.table import name_case
    from bench.answers.step_time import explain_pairs
    from bench.results.store.rows import latest
    from bench.results.study.axes import find_varying, select, take_value
    from bench.results.study.profiled import read_steps
    from bench.results.study.runs import make_results, read_runs
    from bench.results.study.sweeps import read_sweeps

    sweeps = read_sweeps([sweep])
    runs = read_runs(sweeps)
    results = select(make_results(latest(runs)), where)
    refuse_unknown("--axis", axis, results, COMPARED)
    steps = read_steps(results, sweeps)
    profiled = [r for r in results if r.cell in steps and steps[r.cell].profiled]
    asked = [r for r in results if not ends or take_value(r, axis) in ends]
    unfit = [r for r in asked if r.reason and r not in profiled]
    names = find_varying(results)
    reasons = [f"{name_case(r, names) or 'the case'} is {r.status}: {r.reason}" for r in unfit]
    why = f": {name_first(reasons, 2, '; ')}" if reasons else ""
    if not profiled:
        raise UsageError(
            f"{sweep}: no case that is asked for has a profile{why}; run its command again with "
            "--profile on and a new --out, or ask for other cases"
        )
    found = explain_pairs(steps, results, axis, ends)
    if not found:
        change = " ".join([name_column(axis), *map(spell_value, ends)])
        raise UsageError(
            f"{sweep}: no two profiled cases differ in {change} alone{why}; "
            "ask for other values, or for another --axis"
        )
    warnings = warn(select(runs, where), results, runs)
    return Explanations(found, list(describe_constants(results, names)), warnings)


def render_text(answer: Explanations, full: bool = False) -> str:
    """Render each pair for a terminal: a summary, the reasons, and the changes between the two
    steps; with ``full``, the evidence."""
    from bench.answers.render import terminal
    from bench.answers.step_time import CAUSES, tabulate_explained

    console = terminal.make_plain(shutil.get_terminal_size((terminal.WIDTH, 0)).columns)
    for line in answer.conditions:
        terminal.draw_text(line, console)
    for table in CAUSES.lay_out(tabulate_explained(answer.explanations)):
        console.print()
        terminal.draw_table(table, console, brief=not full)
    console.print()
    lines = [notice.line for notice in answer.warnings]
    if not full:
        lines = terminal.list_warnings(answer.warnings)
        lines.append(f"{terminal.MORE} shows the evidence and all warnings.")
    for line in lines:
        terminal.draw_text(line, console)
    return console.export_text()


def render_json(answer: Explanations, full: bool = True) -> str:
    """Render every figure, in SI units."""
    content = {
        "conditions": list(answer.conditions),
        "warnings": [notice.line for notice in answer.warnings],
        "explanations": [_lay_out(found) for found in answer.explanations],
    }
    return dump_document("why", 2, content)


def _lay_out(found: Explanation) -> dict[str, Any]:
    from bench.answers.explanation import describe

    return {
        "a": _lay_out_side(found.a),
        "b": _lay_out_side(found.b),
        "items": found.items,
        "speedup": found.speedup.value,
        "speedup_low": found.speedup.low,
        "speedup_high": found.speedup.high,
        "ceiling": found.ceiling,
        "changes": found.changes,
        "reasons": [{**asdict(reason), "share": found.share(reason)} for reason in found.reasons],
        "unexplained_s": found.unexplained_s,
        "sentences": [*describe(found)],
    }


def _lay_out_side(side: StepSide) -> dict[str, Any]:
    return {
        "name": side.name,
        "case": lay_out(side.case),
        "step_s": side.step.step_s,
        "verdict": side.breakdown.verdict,
        "parts": side.breakdown.parts,
        "left_over_s": side.breakdown.left_over_s,
        "estimated": side.breakdown.estimated,
        "straggler": side.straggler,
    }


_FORMATS = {"text": render_text, "json": render_json}


@command
def main(argv: Sequence[str]) -> int:
    """Explain the pairs of a sweep; return 0, or 2 for a usage error."""
    parser = Parser(
        prog="python -m bench.why",
        suggest=name_newest,
        description="Explain, from the profiles of a sweep, why a case is faster or slower than "
        "another, and not faster still.",
        epilog="The sweep has to have run with --profile.",
    )
    add = parser.add_argument
    add("sweep", type=Path, metavar="SWEEP", help="a sweep's folder or records file")
    add(
        "--axis",
        nargs="+",
        default=["precision"],
        metavar=("NAME", "A B"),
        help="the setting that differs, and its values before and after, such as --axis precision "
        "fp16 bf16-amp (default: precision, each against fp32)",
    )
    add_filters(parser, "batch_size=512")
    add("--full", action="store_true", help="print all rows and evidence")
    add_output(parser, "text or json")
    options = parser.parse(argv)
    from bench.results.study.axes import parse_change, parse_filter

    render = choose_format(options, _FORMATS)
    axis, values = parse_change(options.axis)
    answer = explain(options.sweep, axis, values, [parse_filter(text) for text in options.where])
    write_document(render(answer, options.full), options.output)
    return 0


if __name__ == "__main__":
    leave(main())
