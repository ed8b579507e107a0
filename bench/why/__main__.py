"""`python -m bench.why`: why a case is faster or slower than another, and not faster still.

The two differ in one axis: by default each precision is explained against fp32. `bench.diagnosis`
describes the rules. A sweep needs ``--profile`` for it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.errors import UsageError, choose
from bench.flags import Parser, add_filters, command, write_document
from bench.processes import leave

if TYPE_CHECKING:
    from bench.why.tables import Answer


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


def _run(argv: Sequence[str]) -> int:
    options = build_parser().parse(argv)
    from bench.why.tables import FORMATS

    render = choose("--format", options.format, FORMATS)
    write_document(render(_explain(options), options.full), options.output)
    return 0


def _explain(options: argparse.Namespace) -> Answer:
    from bench.case import AXES, format_value, parse_value
    from bench.questions.material import label_machines
    from bench.questions.notes import describe_constants
    from bench.questions.notices import warn
    from bench.questions.profiles import doubt_profiles, explain_pairs, read_steps
    from bench.study.axes import find_varying, order_values
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
    held = [format_value(v) or "none" for v in order_values(axis, profiled[axis])]
    for flag, end in zip(ends, (before, after), strict=True):
        if end is not None and (end or "none") not in held:
            raise UsageError(
                f"{flag} {end or 'none'}: no profiled case of {options.sweep} has this {axis}; "
                f"there is {', '.join(held)}"
            )
    machines = label_machines(cases)
    found = explain_pairs(steps, cases, machines, axis, before, after, everything)
    if not found:
        varying = [name for name in AXES if profiled[name].nunique() > 1]
        if len(held) > 1:
            raise UsageError(
                f"{options.sweep}: no two profiled cases differ in {axis} alone; "
                f"{', '.join(varying)} vary"
            )
        others = f"; try --axis {' or --axis '.join(varying)}" if varying else ""
        raise UsageError(f"{options.sweep}: {axis} is {held[0]} in all profiled cases{others}")
    shown = (steps[cell] for cell in profiled["cell"])
    notices = [*warn(select(records, where), cases, records), *doubt_profiles(shown)]
    doubts = [notice for notice in notices if not notice.good]
    return Answer(found, list(describe_constants(cases, find_varying(cases))), doubts)


def _take_ends(options: argparse.Namespace) -> dict[str, str | None]:
    """The two values that are asked for, by the flag of each. Raises UsageError: --axis has one
    value or more than two, or they are given twice."""
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


main = command(_run)  # explain the pairs of a sweep


if __name__ == "__main__":
    leave(main())
