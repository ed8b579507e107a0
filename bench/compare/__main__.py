"""`python -m bench.compare A B`: what changed from sweep A, the baseline, to sweep B.

Cases are matched by all their axes and, where a side holds runs of one case on several GPUs or
under several versions, by what ran them too. Of each run the latest attempt counts; sentinels do
not. Every metric is better when lower. How a verdict is reached stands in `bench.verdict`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import verdict
from bench.compare.comparison import (
    choose_metrics,
    compare,
    read_side,
    refuse_other_models,
)
from bench.compare.gates import (
    OUTCOME_FINDINGS,
    Gate,
    describe_result,
    parse_gate,
    parse_percent,
    pass_gate,
)
from bench.compare.tables import FORMATS
from bench.errors import UsageError, nearest
from bench.flags import Parser, run_command
from bench.limits import MIN_REPEATS
from bench.report.metrics import METRICS, Metric


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(
        prog="python -m bench.compare",
        description="Say what changed from sweep A, the baseline, to sweep B, and how sure it is.",
        epilog="a margin of 2% is a ratio above 1.02 or below 1/1.02; a verdict needs "
        f"{MIN_REPEATS} repeats a side, and on a loss or an error {verdict.MIN_SEEDS} "
        "seeds, which repeats have unless swept with --same-seed. Return code: 0; 1 where "
        "--fail-on found something, or could judge no case; 2 for a usage error.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("a", metavar="A", type=Path, help="the baseline: a sweep's folder or records file")
    add("b", metavar="B", type=Path, help="the candidate")
    add("--margin", metavar="P%", default="2%", help="what difference matters (default: 2%%)")
    add(
        "--metric",
        nargs="+",
        action="extend",
        metavar="NAME",
        help=f"what to compare, of {', '.join(METRICS)} (default: time, memory, loss, energy)",
    )
    add("--format", default="text", metavar="FORMAT", help="text, md or json (default: text)")
    add("-o", "--output", type=Path, metavar="FILE", help="write there instead of on the terminal")
    add(
        "--fail-on",
        action="append",
        default=[],
        metavar="WORD[:P%]",
        help="return 1 where a verdict against P%% (default: the margin) is slower, more, …; or on "
        + "; ".join(f"{word} ({meaning})" for word, meaning in OUTCOME_FINDINGS.items()),
    )
    add("--mix", action="store_true", help="compare cases even where their networks differ")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two sweeps.

    Returns:
        0; 1 where a --fail-on found something or could judge no case; 2 for a usage error.
    """
    return run_command(_run, argv)


def _run(argv: Sequence[str]) -> int:
    options = build_parser().parse(argv)
    if options.format not in FORMATS:
        raise UsageError(f"--format {options.format!r}: {nearest(options.format, list(FORMATS))}")
    margin = parse_percent(f"--margin {options.margin!r}", options.margin)
    named = [_parse_metric(text) for text in dict.fromkeys(options.metric or [])]
    gates = [parse_gate(text, margin) for text in dict.fromkeys(options.fail_on)]
    a, b = read_side("A", options.a), read_side("B", options.b)
    metrics = named or choose_metrics(a, b)
    for gate in gates:
        _check_compared(gate, metrics)
    comparison = compare(a, b, metrics)
    if not options.mix:
        refuse_other_models(comparison)
    results = [pass_gate(comparison, gate) for gate in gates]
    _write(FORMATS[options.format](comparison, margin, results), options.output)
    for result in results:
        for line in describe_result(result):
            print(line, file=sys.stderr)
    return int(not all(result.passed for result in results))


def _write(document: str, output: Path | None) -> None:
    if output is None:
        try:
            sys.stdout.write(document)
            sys.stdout.flush()
        except BrokenPipeError:  # `| head`; the gates are still read
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    try:
        output.write_text(document, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"-o {output}: {error.strerror}; choose a place that can be written"
        ) from error


def _parse_metric(text: str) -> Metric:
    if text not in METRICS:
        raise UsageError(f"--metric {text!r}: {nearest(text, list(METRICS))}")
    return METRICS[text]


def _check_compared(gate: Gate, metrics: Sequence[Metric]) -> None:
    """Refuse a gate that no compared metric could ever trip.

    Raises:
        UsageError: it names the metrics that could.
    """
    fitting = [m.name for m in METRICS.values() if gate.word in (m.lower, m.higher)]
    if fitting and not any(metric.name in fitting for metric in metrics):
        raise UsageError(
            f"--fail-on {gate.text}: no metric compared can be {gate.word}; "
            f"add --metric {' or '.join(fitting)}"
        )


if __name__ == "__main__":
    sys.exit(main())
