"""`python -m bench.compare`: what changed from sweep A, the baseline, to sweep B.

With ``--axis``, it compares two values of one axis instead: within one sweep, or one value from
each of two. Cases are matched by all other axes but those that say how a case was measured and,
where a side ran one case on several GPUs or with several versions, by what ran them. Of each run
the latest attempt counts; drift checks do not.
A time is shown as a speed-up, above 1 is faster; every other metric is better when lower.
`bench.results.verdict` describes how a verdict is reached.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.answers.money import add_prices, read_prices
from bench.base.errors import UsageError, choose
from bench.base.limits import MIN_REPEATS
from bench.base.processes import leave
from bench.compare.comparison import (
    OUTCOME_FINDINGS,
    check_gate,
    choose_metrics,
    compare,
    describe_gate,
    read_side,
    refuse_other_models,
    take_values,
)
from bench.results.store.reader import name_newest
from bench.results.study.axes import parse_change
from bench.results.study.quantities import METRICS
from bench.results.verdict import MIN_SEEDS
from bench.schema.flags import (
    Parser,
    add_output,
    choose_format,
    command,
    parse_percent,
    write_document,
)


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m bench.compare",
        suggest=name_newest,
        description="Compare two sweeps, or two values of one axis, case by case: which differences"
        " are real, and how large are they?",
        epilog="A margin of 2% means a ratio above 1.02 or below 1/1.02. A verdict needs "
        f"{MIN_REPEATS} repeats on each side; for a loss or an error, {MIN_SEEDS} seeds. "
        "Each repeat has its own seed, unless the sweep ran with --same-seed. "
        "Return code: 0; 1 if --fail-on found something or could not judge any case; 2 for a "
        "usage error.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("a", metavar="A", type=Path, help="the baseline: a sweep's folder or its records file")
    add("b", metavar="B", type=Path, nargs="?", help="the candidate; not needed with --axis")
    add(
        "--axis",
        nargs="+",
        metavar=("NAME", "VALUE"),
        help="compare two values of an axis: --axis precision fp32 bf16-amp takes both from A, or "
        "the first from A and the second from B. The values may be left out where there are only "
        "two",
    )
    add(
        "--margin",
        metavar="P%",
        default="2%",
        help="smallest difference that matters (default: 2%%)",
    )
    add(
        "--equivalence-margin",
        metavar="P%",
        help="largest difference of a loss or an error that is called equivalent "
        "(default: --margin)",
    )
    add(
        "--metric",
        nargs="+",
        action="extend",
        metavar="NAME",
        help=f"what to compare: {', '.join(METRICS)} (default: time, memory, training loss, "
        "energy and test error, as far as measured)",
    )
    add_output(parser, "text, md or json")
    add(
        "--fail-on",
        action="append",
        default=[],
        metavar="WORD[:P%]",
        help="return 1 if a case is slower, more, higher, … by more than P%% (default: --margin), "
        "or on " + "; ".join(f"{word} ({meaning})" for word, meaning in OUTCOME_FINDINGS.items()),
    )
    add_prices(parser)
    add("--mix", action="store_true", help="compare cases even if their networks differ")
    return parser


@command
def main(argv: Sequence[str]) -> int:
    """Compare two sweeps, or two values of an axis. Return 1 if a --fail-on found something or
    could not judge any case."""
    options = build_parser().parse(argv)
    from bench.compare.document import FORMATS

    render = choose_format(options, FORMATS)
    margin = parse_percent(f"--margin {options.margin!r}", options.margin)
    wide = options.equivalence_margin
    equal = margin if wide is None else parse_percent(f"--equivalence-margin {wide!r}", wide)
    named = [choose("--metric", text, METRICS) for text in dict.fromkeys(options.metric or [])]
    asked = parse_change(options.axis) if options.axis else None
    tariff = read_prices(options)
    a, b = read_side("A", options.a), read_side("B", options.b) if options.b else None
    if asked:
        a, b = take_values(a, b, *asked)
    if b is None:
        raise UsageError(f"{a.path}: name a second sweep, or --axis NAME and two of its values")
    axis = asked[0] if asked else ""
    if tariff:
        tariff.refuse_unknown((*a.runs, *b.runs))
    comparison = compare(a, b, named or choose_metrics(a, b), axis, margin, equal)
    comparison = replace(comparison, tariff=tariff)
    if not options.mix:
        refuse_other_models(comparison)
    gates = [check_gate(comparison, text) for text in dict.fromkeys(options.fail_on)]
    write_document(render(comparison, gates), options.output)
    for gate in gates:
        for line in describe_gate(gate):
            print(line, file=sys.stderr)
    return int(not all(gate.passed for gate in gates))


if __name__ == "__main__":
    leave(main())
