"""Gates: findings for which ``--fail-on`` returns 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from bench.compare.comparison import Comparison, explain_unmatched
from bench.errors import UsageError, nearest
from bench.flags import parse_percent
from bench.study.quantities import METRICS
from bench.text import make_printable, write_number, write_percent
from bench.verdict import Verdict

OUTCOME_FINDINGS = {
    "broken": "a repeat fails or diverges in B where none did in A",
    "missing": "a case is in A and not in B",
    "unjudged": "a case was measured on both sides and has no verdict",
}
"""Words that --fail-on accepts besides the verdicts on metrics."""


@dataclass(frozen=True)
class Gate:
    """A finding for which --fail-on returns 1, and how large it must be."""

    text: str
    word: str
    margin: float


def parse_gate(text: str, margin: float) -> Gate:
    """Read ``slower:5%``, or ``slower`` with the margin of the comparison. Raises UsageError: the
    word is not a finding, or the percentage is not valid."""
    word, colon, percent = text.partition(":")
    verdicts = list(dict.fromkeys(w for m in METRICS.values() for w in (m.lower, m.higher)))
    if word not in verdicts and word not in OUTCOME_FINDINGS:
        raise UsageError(f"--fail-on {text!r}: {nearest(word, [*verdicts, *OUTCOME_FINDINGS])}")
    if not colon:
        return Gate(text, word, margin)
    if word in OUTCOME_FINDINGS:
        raise UsageError(f"--fail-on {text!r}: {word!r} takes no percentage; leave {percent!r} out")
    return Gate(text, word, parse_percent(f"--fail-on {text!r}", percent))


def _find(comparison: Comparison, gate: Gate) -> Iterator[str]:
    one, two = comparison.a.title, comparison.b.title
    if gate.word == "broken":
        for match in comparison.matched:
            if comparison.change(match) == "broken":
                a, b = comparison.ends(match)
                yield f"{comparison.label(match)}: {a.ended} in {one}, {b.ended} in {two}"
    elif gate.word == "missing":
        for label in comparison.label_alone(comparison.a):
            yield f"{label}: in {one}, not in {two}"
    for metric, findings in comparison.metrics.items():
        for finding in findings:
            judged = finding.ratio.judge(gate.margin)
            unjudged = judged is Verdict.NONE and finding.a and finding.b
            if metric.word(judged) == gate.word or (unjudged and gate.word == "unjudged"):
                shown = metric.show(finding.ratio).value or 0
                what = finding.ratio.lack or f"{'speed ' * metric.speed}{write_number(shown)}×"
                yield f"{comparison.label(finding.match)}: {metric.label}: {what}"


@dataclass(frozen=True)
class Result:
    """The result of a gate: its findings, and how many verdicts it checked (one for each case and
    metric), or for a gate on outcomes, how many cases."""

    gate: Gate
    failures: list[str]  # one line each
    judged: int
    unjudged: int  # measured, without a verdict or with an interval that rules nothing out
    why: dict[str, int]  # the count of each reason for these, most frequent first

    @property
    def passed(self) -> bool:
        """Whether it found nothing, and had something to check."""
        return bool(self.judged) and not self.failures


def pass_gate(comparison: Comparison, gate: Gate) -> Result:
    """Check a gate, and count what it could judge."""
    failures = list(_find(comparison, gate))
    if gate.word in OUTCOME_FINDINGS:
        checked = len(comparison.matched)
        if gate.word == "missing":
            checked, _ = comparison.count(comparison.a)
        why = {} if checked else {explain_unmatched(comparison): 0}
        return Result(gate, failures, checked, 0, why)
    ratios = [
        finding.ratio
        for metric, findings in comparison.metrics.items()
        if gate.word in (metric.lower, metric.higher)
        for finding in findings
    ]
    lacks = Counter(r.lack for r in ratios if r.judge(gate.margin) is Verdict.NONE)
    if wide := sum(r.rules_out_nothing(gate.margin) for r in ratios):
        limit = write_percent(gate.margin)
        lacks[f"the interval reaches beyond {limit} both ways; more repeats would decide"] = wide
    why = dict(lacks.most_common())
    if not ratios:
        columns = [m.name for m in comparison.metrics if gate.word in (m.lower, m.higher)]
        none = f"no run has a value of {' or '.join(columns)}"
        why = {none if comparison.matched else explain_unmatched(comparison): 0}
    unjudged = lacks.total()
    return Result(gate, failures, len(ratios) - unjudged, unjudged, why)


def describe_result(result: Result) -> Iterator[str]:
    """Yield lines on a gate that failed, or that could not judge all cases."""
    for line in result.failures:
        yield f"fail: {result.gate.text}: {make_printable(line)}"
    reasons = [f"{lack} ({n} times)" if n > 1 else lack for lack, n in result.why.items()]
    why = "; ".join(reasons[:3]) + (f"; and {len(reasons) - 3} more" if len(reasons) > 3 else "")
    if not result.judged:
        yield f"fail: {result.gate.text}: no case could be judged: {make_printable(why)}"
    elif result.unjudged:
        total = result.judged + result.unjudged
        yield (
            f"warning: --fail-on {result.gate.text}: {result.unjudged} of {total} cases could not "
            f"be judged: {make_printable(why)}"
        )
