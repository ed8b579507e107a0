"""`python -m bench.why`: why a case is faster or slower than another, and not faster still.

The two differ in one axis: by default each precision is explained against fp32. `bench.diagnosis`
describes the rules. A sweep needs ``--profile`` for it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.case import AXES, format_value, parse_value
from bench.errors import UsageError, choose
from bench.flags import Parser, add_filters, add_output, command, write_document
from bench.processes import leave


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
    from bench.why.answer import explain
    from bench.why.tables import FORMATS

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
