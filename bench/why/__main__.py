"""`python -m bench.why`: why a case is faster or slower than another, and not faster still.

The two differ in one axis: by default each precision is explained against fp32. `bench.diagnosis`
describes the rules. A sweep needs ``--profile`` for it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.errors import UsageError, nearest
from bench.flags import Parser, add_filters, run_command, writable

if TYPE_CHECKING:
    import pandas as pd

    from bench.why.tables import Answer

FORMATS = ("text", "md", "json")


def build_parser() -> Parser:
    """The command line."""
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
        help="what the two cases differ in, and its two values, such as --axis precision fp16 "
        "bf16-amp (default: precision, each against fp32)",
    )
    add("--from", dest="before", metavar="A", help="its value before (default: each; fp32)")
    add("--to", dest="after", metavar="B", help="its value after (default: each other)")
    add_filters(parser, "batch_size=512")
    add("--format", default="text", metavar="FORMAT", help="text, md or json (default: text)")
    add("--full", action="store_true", help="print all rows and evidence, as the other formats do")
    add("-o", "--output", type=Path, metavar="FILE", help="write to a file, not to the terminal")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Explain the pairs of a sweep.

    Returns:
        0, or 2 for a usage error.
    """
    return run_command(lambda given: _run(build_parser().parse(given)), argv)


def _run(options: argparse.Namespace) -> int:
    if options.format not in FORMATS:
        raise UsageError(f"--format {options.format!r}: {nearest(options.format, list(FORMATS))}")
    answer = _explain(options)
    from bench.render.text import WIDTH
    from bench.why import tables

    width = shutil.get_terminal_size((WIDTH, 0)).columns
    document = tables.FORMATS[options.format](answer, width, options.full)
    if options.output is None:
        sys.stdout.write(document)
        return 0
    with writable("-o", options.output):
        options.output.write_text(document, encoding="utf-8")
    return 0


def _explain(options: argparse.Namespace) -> Answer:
    from bench.case import AXES, format_value, parse_value
    from bench.questions.material import label_machines
    from bench.questions.notes import describe_constants
    from bench.questions.notices import warn
    from bench.questions.profiles import doubt_profiles, explain_pairs, read_steps
    from bench.study.axes import find_varying
    from bench.study.filters import parse_filter, parse_name, select
    from bench.study.summaries import latest, read, summarize
    from bench.study.sweeps import read_sweeps
    from bench.why.tables import Answer

    axis = parse_name("--axis", options.axis[0], list(AXES))
    ends = _take_ends(options)
    before, after = (
        None if text is None else format_value(parse_value(axis, text, flag))
        for flag, text in ends.items()
    )
    if before is not None and before == after:
        given = " ".join(f"{flag} {text}" for flag, text in ends.items())
        raise UsageError(f"{given}: give two different values")
    sweeps = read_sweeps([options.sweep])
    records = read(sweeps)
    rows = latest(records)
    everything, where = summarize(rows), [parse_filter(text) for text in options.where]
    cases = select(everything, where)
    steps = read_steps(rows, sweeps)
    profiled = cases[
        cases["cell"].isin([cell for cell, one in steps.items() if one.step.profile is not None])
    ]
    if not len(profiled):
        raise UsageError(
            f"{options.sweep}: no case has a profile; add --profile and run the same command again"
        )
    _check_values(options.sweep, axis, (before, after), profiled)
    machines = label_machines(cases)
    found = explain_pairs(steps, cases, machines, axis, before, after, everything)
    if not found:
        raise UsageError(_explain_none(options, axis, profiled))
    shown = (steps[cell] for cell in profiled["cell"])
    notices = [*warn(select(records, where), cases, records), *doubt_profiles(shown)]
    doubts = [notice for notice in notices if not notice.good]
    return Answer(found, list(describe_constants(cases, find_varying(cases))), doubts)


def _take_ends(options: argparse.Namespace) -> dict[str, str | None]:
    """The two values that are asked for, by the flag of each.

    Raises:
        UsageError: --axis has one value or more than two, or they are given twice.
    """
    name, *values = options.axis
    ends = {"--from": options.before, "--to": options.after}
    if not values:
        return ends
    if len(values) != 2 or any(ends.values()):
        raise UsageError(
            f"--axis {' '.join(options.axis)}: give a name and two values, as in --axis precision "
            f"fp16 bf16-amp, or --axis {name} with --from and --to"
        )
    return dict(zip(ends, values, strict=True))


def _list_values(cases: pd.DataFrame, axis: str) -> list[str]:
    from bench.case import format_value
    from bench.study.axes import order_values

    return [format_value(value) or "none" for value in order_values(axis, cases[axis])]


def _check_values(sweep: Path, axis: str, ends: Sequence[str | None], cases: pd.DataFrame) -> None:
    """Refuse values that no profiled case has.

    Raises:
        UsageError: it names those that are there.
    """
    held = _list_values(cases, axis)
    for flag, end in zip(("--from", "--to"), ends, strict=True):
        if end is not None and (end or "none") not in held:
            raise UsageError(
                f"{flag} {end or 'none'}: no profiled case of {sweep} has this {axis}; "
                f"there is {', '.join(held)}"
            )


def _explain_none(options: argparse.Namespace, axis: str, cases: pd.DataFrame) -> str:
    from bench.case import AXES

    held = _list_values(cases, axis)
    varying = [name for name in AXES if cases[name].nunique() > 1]
    if len(held) > 1:
        return (
            f"{options.sweep}: no two profiled cases differ in {axis} alone; "
            f"{', '.join(varying)} vary"
        )
    others = f"; try --axis {' or --axis '.join(varying)}" if varying else ""
    return f"{options.sweep}: {axis} is {held[0]} in all profiled cases{others}"


if __name__ == "__main__":
    sys.exit(main())
