"""`python -m bench.compare A B`: what changed from sweep A, the baseline, to sweep B.

Cases are matched by all their axes. Of each run the latest attempt counts; sentinels do not. Every
metric is better when lower. How a verdict is reached stands in `bench.verdict`.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import verdict
from bench.case import AXES, Case
from bench.errors import UsageError, nearest
from bench.flags import Parser, run_command
from bench.record import COMPARABLE, Environment, Status
from bench.report.derive import GIB, MEMORY, write_number
from bench.report.tables import NOTHING, Cell, Head, Table
from bench.store import clean, read_cases, read_records
from bench.verdict import Ratio, Verdict

if TYPE_CHECKING:
    import pandas as pd

# ---------------------------------------------------------------------------------------- metrics


@dataclass(frozen=True)
class Metric:
    """A column that is compared: how it is named and written.

    Attributes:
        lower: the verdict where B is below A; ``higher`` where it is above.
        scale: base units in a ``unit``, for people.
        deterministic: may repeat to the last digit, and is then judged exactly. An allocator
            serves the same requests with the same bytes, and a seeded epoch of deterministic
            kernels ends in the same loss. NVML counts in steps of 2 MiB, which hide a spread
            smaller than that; against a margin of 2 % they matter below 100 MiB.
        diverged: is a measurement even where the loss became inf or NaN. Loss is not, nor is
            energy: arithmetic on NaN toggles fewer transistors.
    """

    column: str
    label: str
    lower: str
    higher: str
    unit: str = ""
    scale: float = 1
    deterministic: bool = False
    diverged: bool = False

    def word(self, verdict: Verdict) -> str:
        """Name a verdict on this metric."""
        words = {Verdict.LOWER: self.lower, Verdict.HIGHER: self.higher}
        return words.get(verdict, verdict.value)


def _time(column: str, label: str) -> Metric:
    return Metric(column, label, "faster", "slower", "s", diverged=True)


def _memory(column: str, label: str) -> Metric:
    return Metric(column, label, "less", "more", "GiB", GIB, deterministic=True, diverged=True)


def _loss(column: str, label: str) -> Metric:
    return Metric(column, label, "lower", "higher", deterministic=True)


METRICS: dict[str, Metric] = {
    metric.column: metric
    for metric in (
        _time("epoch_time_s", "epoch time"),
        _time("step_time_median_s", "median step time"),
        _time("eval_time_s", "evaluation time"),
        _time("warmup_time_s", "warm-up time"),
        *(_memory(column, f"peak memory of {what}") for column, what in MEMORY.items()),
        _loss("train_loss", "training loss"),
        _loss("test_loss", "test loss"),
        Metric("energy_j", "energy of the measured steps", "less", "more", "J"),
    )
}

OUTCOME_FINDINGS = {
    "broken": "ends worse in B: a repeat fails or diverges where none did",
    "missing": "in A, not in B",
    "unjudged": "measured on both sides, but no verdict",
}
"""What --fail-on takes beside the verdicts on metrics."""


def choose_metrics(a: Side, b: Side) -> list[Metric]:
    """Time, loss, energy, and the first measure of memory that both sides have."""
    memory = next((c for c in MEMORY if a.has(c) and b.has(c)), next(iter(MEMORY)))
    return [METRICS[c] for c in ("epoch_time_s", memory, "train_loss", "energy_j")]


# ------------------------------------------------------------------------------------------ sides


@dataclass(frozen=True)
class Side:
    """One sweep: the latest attempt at each of its runs, sentinels left out."""

    name: str
    path: Path
    records: pd.DataFrame

    @cached_property
    def rows(self) -> dict[Case, list[int]]:
        """Positions of each case's runs among the records."""
        rows: dict[Case, list[int]] = {}
        for position, case in enumerate(self.records["case"]):
            rows.setdefault(case, []).append(position)
        return rows

    @cached_property
    def _columns(self) -> dict[str, list[Any]]:
        names = (*METRICS, "status", "inferred", "executor")
        return {name: self.records[name].tolist() for name in names}

    def has(self, column: str) -> bool:
        """Whether any run has a value of ``column``."""
        return bool(self.records[column].notna().any())

    def values(self, case: Case, metric: Metric) -> list[float]:
        """What the case's runs measured, one value a repeat that has one."""
        values, statuses = self._columns[metric.column], self._columns["status"]
        counted = {Status.OK, Status.DIVERGED} if metric.diverged else {Status.OK}
        rows = [i for i in self.rows.get(case, []) if statuses[i] in counted]
        return [float(values[i]) for i in rows if values[i] == values[i]]  # NaN is empty

    def outcomes(self, case: Case) -> dict[str, int]:
        """How many of the case's runs ended in each way."""
        statuses, inferred = self._columns["status"], self._columns["inferred"]
        rows = self.rows.get(case, [])
        return dict(Counter(statuses[i] + " (inferred)" * inferred[i] for i in rows))

    def severities(self, case: Case) -> list[int]:
        """Of the case's runs, best first: 0 is ok, 1 diverged, 2 not to be used."""
        order = {Status.OK: 0, Status.DIVERGED: 1}
        return sorted(order.get(self._columns["status"][i], 2) for i in self.rows.get(case, []))

    def executors(self, case: Case) -> set[str]:
        """What ran the case."""
        return {self._columns["executor"][i] for i in self.rows.get(case, [])}

    def environment(self, name: str) -> list[str]:
        """The distinct values of an environment column; none where all are empty."""
        column = self.records[name]
        return [write_plain(value) for value in column[column.notna() & (column != "")].unique()]


def write_plain(value: object) -> str:
    """Write an environment's value; a whole number without ``.0``."""
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def read_side(name: str, path: Path) -> Side:
    """Read one side of the comparison.

    Raises:
        UsageError: it has no records, or they cannot be read.
    """
    records = read_records(path)
    records = records[~records["sentinel"]]
    if not len(records):
        raise UsageError(f"{path}: no record there yet; compare sweeps that have run")
    cases: Any = read_cases(records)
    latest = records.assign(case=cases).sort_values("attempt", kind="stable")
    latest = latest.drop_duplicates(["case", "repeat"], keep="last").sort_index()
    return Side(name, path, latest)


# ------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class Finding:
    """One metric of one case on both sides."""

    case: Case
    a: list[float]
    b: list[float]
    ratio: Ratio


@dataclass(frozen=True)
class Comparison:
    """All that is said of two sweeps, before it is judged against a margin."""

    a: Side
    b: Side
    metrics: dict[Metric, list[Finding]]

    @property
    def matched(self) -> list[Case]:
        """Cases on both sides, in the order of A."""
        return [case for case in self.a.rows if case in self.b.rows]

    def only_in(self, side: Side) -> list[Case]:
        """Cases on one side alone."""
        other = self.b if side is self.a else self.a
        return [case for case in side.rows if case not in other.rows]

    def environment(self) -> Iterator[tuple[str, bool, list[str], list[str]]]:
        """What ran them and differs: column, whether it must agree, A's and B's values.

        Those that must agree come first, also where each side mixes the same values.
        """
        names = [field.name for field in fields(Environment)]
        for name in sorted(names, key=lambda name: name not in COMPARABLE):
            a, b = self.a.environment(name), self.b.environment(name)
            if set(a) != set(b) or (name in COMPARABLE and len(a) > 1):
                yield name, name in COMPARABLE, a, b

    def change(self, case: Case) -> str:
        """How a matched case's outcome changed: broken, mended, changed, or empty for not."""
        a, b = self.a.severities(case), self.b.severities(case)
        if b[0] > a[0] or b[-1] > a[-1]:
            return "broken"
        if b[0] < a[0] or b[-1] < a[-1]:
            return "mended"
        same = set(self.a.outcomes(case)) == set(self.b.outcomes(case))
        return "" if same else "changed"

    def label(self, case: Case) -> str:
        """Name a case by the axes that tell it from the others."""
        return case.label(self.telling)

    @cached_property
    def telling(self) -> list[str]:
        """Axes that vary, or that name a case anywhere."""
        cases = {*self.a.rows, *self.b.rows}
        named = ("precision", "loss_scale", "batch_size")
        return [n for n in AXES if n in named or len({getattr(c, n) for c in cases}) > 1]


def compare(a: Side, b: Side, metrics: Sequence[Metric]) -> Comparison:
    """Compare two sweeps case by case; each metric's cases are one family."""
    compared = {}
    cases = [case for case in a.rows if case in b.rows]
    for metric in metrics:
        pairs = [(case, a.values(case, metric), b.values(case, metric)) for case in cases]
        pairs = [pair for pair in pairs if pair[1] or pair[2]]
        ratios = verdict.compare([(x, y) for _, x, y in pairs], metric.deterministic)
        compared[metric] = [Finding(*p, ratio=r) for p, r in zip(pairs, ratios, strict=True)]
    return Comparison(a, b, compared)


# ------------------------------------------------------------------------------------------ gates


@dataclass(frozen=True)
class Gate:
    """A finding that --fail-on turns into return code 1, and how large it must be."""

    text: str
    word: str
    margin: float


def parse_gate(text: str, margin: float) -> Gate:
    """Read ``slower:5%`` or, against the comparison's own margin, ``slower``.

    Raises:
        UsageError: the word names no finding, or the percentage is none.
    """
    word, colon, percent = text.partition(":")
    verdicts = list(dict.fromkeys(w for m in METRICS.values() for w in (m.lower, m.higher)))
    if word not in verdicts and word not in OUTCOME_FINDINGS:
        raise UsageError(f"--fail-on {text!r}: {nearest(word, [*verdicts, *OUTCOME_FINDINGS])}")
    if not colon:
        return Gate(text, word, margin)
    if word in OUTCOME_FINDINGS:
        raise UsageError(f"--fail-on {text!r}: {word!r} takes no percentage; leave {percent!r} out")
    return Gate(text, word, parse_percent(f"--fail-on {text!r}", percent))


def parse_percent(where: str, text: str) -> float:
    """Read ``2%`` as 0.02.

    Raises:
        UsageError: it is not a percentage from 0 to 1000, or lacks its sign.
    """
    number, sign, rest = text.strip().partition("%")
    try:
        value = float(number) if sign and not rest and number.isascii() else -1.0
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1000:
        raise UsageError(f"{where}: a margin is a percentage from 0 to 1000 %, such as 2%")
    return value / 100


def find(comparison: Comparison, gate: Gate) -> Iterator[str]:
    """Name, one line each, the cases that a gate does not let pass."""
    if gate.word == "broken":
        for case in comparison.matched:
            if comparison.change(case) == "broken":
                yield (
                    f"{comparison.label(case)}: {write_outcomes(comparison.a.outcomes(case))} in "
                    f"A, {write_outcomes(comparison.b.outcomes(case))} in B"
                )
    elif gate.word == "missing":
        for case in comparison.only_in(comparison.a):
            yield f"{comparison.label(case)}: in A, not in B"
    for metric, findings in comparison.metrics.items():
        for finding in findings:
            judged = finding.ratio.judge(gate.margin)
            unjudged = judged is Verdict.NONE and finding.a and finding.b
            if metric.word(judged) == gate.word or (unjudged and gate.word == "unjudged"):
                what = finding.ratio.lack or f"{write_number(finding.ratio.value or 0)}×"
                yield f"{comparison.label(finding.case)}: {metric.label}: {what}"


def cannot_judge(comparison: Comparison, gate: Gate) -> bool:
    """Whether a gate on a metric had no verdict at all to look at, and so passes for nothing."""
    if gate.word in OUTCOME_FINDINGS:
        return False
    return not any(
        finding.ratio.judge(gate.margin) is not Verdict.NONE
        for metric, findings in comparison.metrics.items()
        if gate.word in (metric.lower, metric.higher)
        for finding in findings
    )


# ----------------------------------------------------------------------------------------- tables


def printable(text: str) -> str:
    """Drop what would act on a terminal or turn the reading direction around."""
    return text if text.isprintable() else "".join(c for c in clean(text) if c.isprintable())


def write_outcomes(outcomes: Mapping[str, int]) -> str:
    """Write how runs ended: ``ok ×4, oom``."""
    return ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in outcomes.items())


def _cells(*texts: str) -> tuple[Cell, ...]:
    return tuple(Cell(printable(text)) for text in texts)


def _heads(*labels: str, numbers: Sequence[str] = ()) -> tuple[Head, ...]:
    return tuple(Head(label, label, number=label in numbers) for label in labels)


def introduce(comparison: Comparison, margin: float) -> Iterator[str]:
    """What is compared, and how to read it."""
    for side in (comparison.a, comparison.b):
        role = "baseline" if side is comparison.a else "candidate"
        yield printable(
            f"{side.name} ({role}): {side.path}, {len(side.records)} runs of {len(side.rows)} cases"
        )
    cases = comparison.matched
    if cases:
        shared = cases[0].label(name for name in AXES if name not in comparison.telling)
        yield printable(f"{len(cases)} cases in both, all of them {shared}")
    else:
        yield f"no case in both: {_why_unmatched(comparison)}"
    if not any(comparison.environment()):
        yield "no recorded difference in what ran them"
    empty = [metric.column for metric, found in comparison.metrics.items() if not found]
    if cases and empty:
        yield f"not compared, as no run has a value: {', '.join(empty)}"
    limit = 1 + margin
    yield (
        f"B/A is of geometric means, with Welch's 95 % interval; p is Holm's over a table's cases; "
        f"the margin of {write_percent(margin)} ends at {1 / limit:.4g} and {limit:.4g}"
    )


def write_percent(fraction: float) -> str:
    """Write 0.02 as ``2 %``."""
    return f"{100 * fraction:.4g} %"


def _why_unmatched(comparison: Comparison) -> str:
    """The axes on which two sweeps share no value, which is why no case is in both."""
    parted = [
        name
        for name in AXES
        if not {getattr(case, name) for case in comparison.a.rows}
        & {getattr(case, name) for case in comparison.b.rows}
    ]
    return f"they share no value of {', '.join(parted)}" if parted else "no combination is shared"


def tabulate(comparison: Comparison, margin: float) -> Iterator[Table]:
    """All tables, in the order a reader needs them: what differs underneath comes first."""
    environment = tuple(
        _cells(name, " or ".join(a) or NOTHING, " or ".join(b) or NOTHING, "yes" * agree)
        for name, agree, a, b in comparison.environment()
    )
    if environment:
        heads = _heads("what", "A", "B", "must agree")
        yield Table("environment", "What ran them differs", heads, environment, ())
    outcomes = tuple(_outcome_rows(comparison))
    if outcomes:
        heads = _heads("case", "A", "B", "change")
        yield Table("outcomes", "Cases that did not all end well", heads, outcomes, ())
    for metric, findings in comparison.metrics.items():
        if findings:
            yield _metric_table(comparison, metric, findings, margin)
    for side in (comparison.a, comparison.b):
        alone = tuple(_cells(comparison.label(case)) for case in comparison.only_in(side))
        if alone:
            yield Table(f"only-{side.name}", f"Only in {side.name}", _heads("case"), alone, ())


def _outcome_rows(comparison: Comparison) -> Iterator[tuple[Cell, ...]]:
    for case in comparison.matched:
        a, b = comparison.a.outcomes(case), comparison.b.outcomes(case)
        if {*a, *b} != {Status.OK}:
            yield _cells(
                comparison.label(case),
                write_outcomes(a),
                write_outcomes(b),
                comparison.change(case),
            )


def _metric_table(
    comparison: Comparison, metric: Metric, findings: Sequence[Finding], margin: float
) -> Table:
    counts = Counter(finding.ratio.judge(margin) for finding in findings)
    summary = ", ".join(f"{counts[v]} {metric.word(v)}" for v in Verdict if v in counts)
    unit = f" in {metric.unit}" if metric.unit else ""
    numbers = ("A", "B", "B/A", "95 % interval", "p", "runs")
    return Table(
        metric.column,
        f"{metric.label[0].upper()}{metric.label[1:]}{unit}: {summary}",
        _heads("case", *numbers, "verdict", "remarks", numbers=numbers),
        tuple(
            _cells(
                comparison.label(finding.case),
                _write_mean(finding.a, metric),
                _write_mean(finding.b, metric),
                *_write_ratio(finding.ratio),
                f"{len(finding.a)}, {len(finding.b)}",
                metric.word(finding.ratio.judge(margin)),
                "; ".join(remarks(comparison, metric, finding, margin)),
            )
            for finding in findings
        ),
        (),
    )


def _write_mean(values: Sequence[float], metric: Metric) -> str:
    from statistics import geometric_mean

    if not values:
        return NOTHING
    mean = geometric_mean(values) if min(values) > 0 else sum(values) / len(values)
    return write_number(mean / metric.scale)


def _write_ratio(ratio: Ratio) -> tuple[str, str, str]:
    if ratio.value is None:
        return NOTHING, NOTHING, NOTHING
    value = write_number(ratio.value)
    if ratio.exact:
        return value, "exact", NOTHING
    if ratio.low is None or ratio.high is None or ratio.p_adjusted is None:
        return value, NOTHING, NOTHING
    p = "<0.001" if ratio.p_adjusted < 0.001 else f"{ratio.p_adjusted:.3f}"
    return value, f"{write_number(ratio.low)} to {write_number(ratio.high)}", p


def remarks(
    comparison: Comparison, metric: Metric, finding: Finding, margin: float
) -> Iterator[str]:
    """What a reader must know of a finding before believing it."""
    case = finding.case
    if case.fraction < 1:
        yield "extrapolated" if metric.column == "epoch_time_s" else "part of an epoch"
    if case.dataset == "synthetic":
        yield "synthetic"
    for kind in ("fake", "published"):
        where = [s.name for s in (comparison.a, comparison.b) if kind in s.executors(case)]
        if where:
            yield kind if len(where) == 2 else f"{kind} in {where[0]}"
    for side, values in ((comparison.a, finding.a), (comparison.b, finding.b)):
        outcomes = side.outcomes(case)
        if set(outcomes) != {Status.OK}:
            yield f"{side.name} {write_outcomes(outcomes)}"
        elif len(values) < outcomes[Status.OK]:
            yield f"{side.name} lacks {outcomes[Status.OK] - len(values)} of its values"
    if why := finding.ratio.explain(margin):
        yield why


# ---------------------------------------------------------------------------------------- formats


def render_text(comparison: Comparison, margin: float, gates: Sequence[Gate]) -> str:
    """The comparison as aligned columns."""
    lines = list(introduce(comparison, margin))
    for table in tabulate(comparison, margin):
        lines += ["", table.title, *_align(table)]
    return "\n".join(lines) + "\n"


def _align(table: Table) -> Iterator[str]:
    rows = [[head.label for head in table.heads]]
    rows += [[cell.text for cell in row] for row in table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            text.rjust(width) if head.number else text.ljust(width)
            for text, width, head in zip(row, widths, table.heads, strict=True)
        )
        yield ("  " + "  ".join(cells)).rstrip()


def render_markdown(comparison: Comparison, margin: float, gates: Sequence[Gate]) -> str:
    """The comparison as GitHub-flavoured Markdown, to paste."""
    from bench.report.markdown import escape, table_lines

    lines = [*(f"- {escape(line)}" for line in introduce(comparison, margin)), ""]
    for table in tabulate(comparison, margin):
        lines += table_lines(table)
    return "\n".join(lines).rstrip() + "\n"


def render_json(comparison: Comparison, margin: float, gates: Sequence[Gate]) -> str:
    """The comparison with all raw values, for machines; SI units."""
    document = {
        **{
            side.name.lower(): {"path": str(side.path), "runs": len(side.records)}
            for side in (comparison.a, comparison.b)
        },
        "margin": margin,
        "confidence": verdict.CONFIDENCE,
        "environment": [
            {"name": name, "must_agree": agree, "a": a, "b": b}
            for name, agree, a, b in comparison.environment()
        ],
        "outcomes": [
            {
                "case": asdict(case),
                "a": comparison.a.outcomes(case),
                "b": comparison.b.outcomes(case),
                "change": comparison.change(case),
            }
            for case in comparison.matched
        ],
        "metrics": {
            metric.column: [
                {
                    "case": asdict(finding.case),
                    "a": finding.a,
                    "b": finding.b,
                    "n_a": len(finding.a),
                    "n_b": len(finding.b),
                    "ratio": finding.ratio.value,
                    "low": finding.ratio.low,
                    "high": finding.ratio.high,
                    "p": finding.ratio.p,
                    "p_adjusted": finding.ratio.p_adjusted,
                    "exact": finding.ratio.exact,
                    "verdict": metric.word(finding.ratio.judge(margin)),
                    "remarks": list(remarks(comparison, metric, finding, margin)),
                }
                for finding in findings
            ]
            for metric, findings in comparison.metrics.items()
        },
        "only_in_a": [asdict(case) for case in comparison.only_in(comparison.a)],
        "only_in_b": [asdict(case) for case in comparison.only_in(comparison.b)],
        "failures": {gate.text: list(find(comparison, gate)) for gate in gates},
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


FORMATS = {"text": render_text, "md": render_markdown, "json": render_json}

# ------------------------------------------------------------------------------------ command line


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(
        prog="python -m bench.compare",
        description="Say what changed from sweep A, the baseline, to sweep B, and how sure it is.",
        epilog="a margin of 2% is a ratio above 1.02 or below 1/1.02; a verdict needs "
        f"{verdict.MIN_REPEATS} repeats a side. Return code: 0; 1 where --fail-on found something; "
        "2 for a usage error.",
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
        metavar="COLUMN",
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
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two sweeps.

    Returns:
        0; 1 where a --fail-on found something; 2 for a usage error.
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
    _write(FORMATS[options.format](comparison, margin, gates), options.output)
    failed = False
    for gate in gates:
        for line in find(comparison, gate):
            failed = True
            print(f"fail: {gate.text}: {printable(line)}", file=sys.stderr)
        if cannot_judge(comparison, gate):
            print(
                f"warning: --fail-on {gate.text}: no case could be judged "
                "(--fail-on unjudged fails on that)",
                file=sys.stderr,
            )
    return int(failed)


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
    fitting = [m.column for m in METRICS.values() if gate.word in (m.lower, m.higher)]
    if fitting and not any(metric.column in fitting for metric in metrics):
        raise UsageError(
            f"--fail-on {gate.text}: no metric compared can be {gate.word}; "
            f"add --metric {' or '.join(fitting)}"
        )


if __name__ == "__main__":
    sys.exit(main())
