"""`python -m bench.why`: why a case is faster or slower than another, and not faster still.

The two differ in one axis: by default each precision is explained against fp32. `bench.diagnosis`
describes the rules. A sweep needs ``--profile`` for it.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.case import AXES, format_value, parse_value
from bench.errors import UsageError, choose
from bench.flags import Parser, add_filters, add_output, command, write_document
from bench.processes import leave

if TYPE_CHECKING:
    from bench.diagnosis.explanation import Explanation, Side
    from bench.render.section import Sheet
    from bench.render.table import Notice
    from bench.study.axes import Filter

MOST_ROWS = 5  # most rows of a table without --full


@dataclass(frozen=True)
class Answer:
    """The explained pairs, what they were measured on, and doubts about them."""

    explanations: Sequence[Explanation]
    conditions: Sequence[str]
    doubts: Sequence[Notice]


def explain(
    sweep: Path, axis: str, ends: Mapping[str, str | None], where: Sequence[Filter]
) -> Answer:
    """Explain the pairs of a sweep that differ in ``axis`` alone. ``ends`` are its values before
    and after as text, by flag; None is any. Raises UsageError: there is no such pair, or none was
    profiled."""
    from bench.questions.notes import describe_constants
    from bench.questions.notices import warn
    from bench.questions.profiles import explain_pairs, read_steps
    from bench.questions.report_data import label_machines
    from bench.store.rows import latest
    from bench.study.axes import find_varying, order_values, select
    from bench.study.runs import make_results, read_runs
    from bench.study.sweeps import read_sweeps

    sweeps = read_sweeps([sweep])
    runs = read_runs(sweeps)
    tried = make_results(latest(runs))
    results = select(tried, where)
    steps = read_steps(tried, sweeps)
    known = {cell for cell, one in steps.items() if one.profiled}
    profiled = [result for result in results if result.cell in known]
    if not profiled:
        raise UsageError(
            f"{sweep}: no case that is asked for has a profile; run its command again with "
            "--profile on and a new --out, or ask for other cases"
        )
    values = order_values(axis, (getattr(result, axis) for result in profiled))
    held = [format_value(value) or "none" for value in values]
    for flag, end in ends.items():
        if end is not None and (end or "none") not in held:
            raise UsageError(
                f"{flag} {end or 'none'}: no profiled case of {sweep} has this {axis}; "
                f"there is {', '.join(held)}"
            )
    machines, (before, after) = label_machines(results), ends.values()
    found = explain_pairs(steps, results, machines, axis, before, after, tried)
    if not found:
        varying = [name for name in AXES if len({getattr(r, name) for r in profiled}) > 1]
        if len(held) > 1:
            raise UsageError(
                f"{sweep}: no two profiled cases differ in {axis} alone; {', '.join(varying)} vary"
            )
        others = f"; try --axis {' or --axis '.join(varying)}" if varying else ""
        raise UsageError(f"{sweep}: {axis} is {held[0]} in all profiled cases{others}")
    notices = warn(select(runs, where), results, runs)
    doubts = [notice for notice in notices if not notice.good]
    return Answer(found, list(describe_constants(results, find_varying(results))), doubts)


def render_text(answer: Answer, full: bool = False) -> str:
    """Render each pair for a terminal: a summary, the reasons, and the changes between the two
    steps; with ``full``, all rows and all evidence."""
    from bench.questions.step_time import CAUSES, tabulate_explained
    from bench.render import text
    from bench.text import count

    width = shutil.get_terminal_size((text.WIDTH, 0)).columns
    console = text.make_plain(width)
    for line in answer.conditions:
        console.print(line, markup=False, highlight=False)
    tabulate = tabulate_explained if full else _tabulate_short
    for table in CAUSES.lay_out(tabulate(answer.explanations)):
        console.print()
        text.draw_table(table, console, brief=not full)
    if answer.doubts:
        console.print()
    if full:
        said = [notice.line for notice in answer.doubts]
    else:
        groups = text.group_doubts(answer.doubts)[: text.DOUBTS]
        said = [text.join_doubts(notices) for notices in groups]
        said.append(
            f"{text.MORE} shows all rows, the evidence and {count(len(answer.doubts), 'doubt')}."
        )
    for line in said:
        text.draw_text(line, console)
    return text.read_plain(console)


def _tabulate_short(explanations: Sequence[Explanation]) -> Iterator[Sheet]:
    """Like `tabulate_explained`, with few rows, and sentences that no row or title repeats."""
    from bench.diagnosis.explanation import describe
    from bench.questions.step_time import (
        ESTIMATED,
        name_pair,
        tabulate_changes,
        tabulate_reasons,
    )

    said: set[str] = set()
    for why in explanations:
        words = describe(replace(why, about=""), True)
        words += [ESTIMATED] if any(change.estimated for change in why.changes) else []
        words = [word for word in words if word not in said]
        said.update(words)
        sheet = tabulate_reasons("reasons", why, MOST_ROWS)
        yield replace(sheet, title=name_pair(why), words=words)
        yield replace(tabulate_changes("changes", why, MOST_ROWS), title="By part of the step")


def render_markdown(answer: Answer, full: bool = True) -> str:
    """Render each pair as GitHub-flavoured Markdown, to paste."""
    from bench.questions.step_time import CAUSES, tabulate_explained
    from bench.render.documents import escape, table_lines

    lines = [*(f"- {escape(line)}" for line in answer.conditions), ""]
    for table in CAUSES.lay_out(tabulate_explained(answer.explanations)):
        lines += table_lines(table)
    lines += [f"> {escape(said.line)}\n" for said in answer.doubts]
    return "\n".join(lines).rstrip() + "\n"


def render_json(answer: Answer, full: bool = True) -> str:
    """Render every figure, in SI units."""
    document = {
        "conditions": list(answer.conditions),
        "doubts": [notice.line for notice in answer.doubts],
        "explanations": [_lay_out(found) for found in answer.explanations],
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def _take(one: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(one, name) for name in names}


def _lay_out(found: Explanation) -> dict[str, Any]:
    from bench.diagnosis.explanation import describe

    estimated = ("before_estimated", "after_estimated")
    return {
        **_take(found, "axis", "about", "items"),
        "a": _lay_out_side(found.a),
        "b": _lay_out_side(found.b),
        "speedup": found.speedup.value,
        **_take(found.speedup, "low", "high", "lack"),
        "ceiling": found.ceiling and asdict(found.ceiling),
        "beaten": found.violation and asdict(found.violation),
        "changes": [_take(c, "name", "before_s", "after_s", *estimated) for c in found.changes],
        "reasons": [
            {
                "cause": reason.name,
                **_take(reason, "before_s", "after_s", "evidence"),
                "advice": [asdict(advice) for advice in reason.advice],
                **_take(reason, *estimated),
                "share": found.share(reason),
            }
            for reason in found.reasons
        ],
        "unexplained_s": found.unexplained_s,
        "words": describe(found),
    }


def _lay_out_side(side: Side) -> dict[str, Any]:
    told = ("name", "time_s", "estimated", "calls", "flop", "bytes", "floor_s")
    return {
        "name": side.name,
        "case": asdict(side.case),
        "step_s": side.step.step_s,
        "verdict": side.breakdown.verdict,
        "bounds": dict(side.breakdown.bounds),
        "parts": [_take(part, *told) for part in side.breakdown.parts],
        "left_over_s": side.breakdown.left_over_s,
    }


FORMATS = {"text": render_text, "md": render_markdown, "json": render_json}


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m bench.why",
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
        help="the setting that differs, and its two values, such as --axis precision fp16 "
        "bf16-amp (default: precision, each against fp32)",
    )
    add(
        "--from",
        dest="before",
        metavar="A",
        help="its value before (default: all; fp32 for precision)",
    )
    add("--to", dest="after", metavar="B", help="its value after (default: all others)")
    add_filters(parser, "batch_size=512")
    add("--format", default="text", metavar="FORMAT", help="text, md or json (default: text)")
    add("--full", action="store_true", help="print all rows and evidence, as the other formats do")
    add_output(parser)
    return parser


@command
def main(argv: Sequence[str]) -> int:
    """Explain the pairs of a sweep; return 0, or 2 for a usage error."""
    options = build_parser().parse(argv)
    from bench.study.axes import parse_filter, parse_name

    render = choose("--format", options.format, FORMATS)
    axis = parse_name("--axis", options.axis[0], list(AXES))
    ends = _read_ends(axis, options)
    answer = explain(options.sweep, axis, ends, [parse_filter(text) for text in options.where])
    write_document(render(answer, options.full), options.output)
    return 0


def _read_ends(axis: str, options: argparse.Namespace) -> dict[str, str | None]:
    """Return the two requested values by flag. Raises UsageError: --axis has one value or more than
    two, or the values are given twice or are the same."""
    name, *values = options.axis
    texts = values or [options.before, options.after]
    if len(values) == 2 and (options.before or options.after):
        raise UsageError(f"--axis {' '.join(options.axis)} has both values; leave out --from, --to")
    if values and len(values) != 2:
        raise UsageError(
            f"--axis {' '.join(options.axis)}: give a name and two values, as in --axis precision "
            f"fp16 bf16-amp, or --axis {name} with --from and --to"
        )
    ends = {
        flag: None if text is None else format_value(parse_value(axis, text, flag))
        for flag, text in zip(("--from", "--to"), texts, strict=True)
    }
    if None not in ends.values() and ends["--from"] == ends["--to"]:
        raise UsageError(f"--from {texts[0]} --to {texts[1]}: give two different values")
    return ends


if __name__ == "__main__":
    leave(main())
