"""What a comparison comes to: a sentence a metric, and what to know before believing it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.compare.comparison import Comparison, MetricPair
from bench.limits import MIN_REPEATS
from bench.study.metrics import Metric
from bench.text import capitalize, count, name_first, write_percent, write_range
from bench.verdict import MIN_SEEDS, Verdict


def conclude(comparison: Comparison, margin: float) -> Iterator[str]:
    """A sentence on each metric that was measured on both sides, and on what failed anew."""
    for metric, findings in comparison.metrics.items():
        known = [finding for finding in findings if finding.a and finding.b]
        if known:
            yield f"{capitalize(metric.label)}: {_sum_up(metric, known, margin)}."
    changes: dict[str, list[str]] = {}
    for match in comparison.matched:
        if change := comparison.change(match):
            said = f"{comparison.label(match)} ({' → '.join(comparison.ended(match))})"
            changes.setdefault(change, []).append(said)
    for change, labels in changes.items():
        yield f"{capitalize(change)}: {name_first(labels, 3, '; ')}."


def _sum_up(metric: Metric, findings: Sequence[MetricPair], margin: float) -> str:
    """How many cases have each verdict, and by how much they differ."""
    held: dict[Verdict, list[MetricPair]] = {}
    for finding in findings:
        held.setdefault(finding.ratio.judge(margin), []).append(finding)
    words = {
        Verdict.SAME: f"the same within {write_percent(margin)}",
        Verdict.AMBIGUOUS: "not certain",
        Verdict.NONE: "no verdict",
    }
    said = []
    for verdict in (v for v in Verdict if v in held):
        word = words.get(verdict) or metric.word(verdict)
        where = f" in {len(held[verdict])} of {count(len(findings), 'case')}"
        lacks = dict.fromkeys(f.ratio.lack for f in held[verdict] if not metric.seeded)
        why = ": " + name_first([*filter(None, lacks)], 2, "; ") if any(lacks) else ""
        size = _write_size(metric, held[verdict])
        said.append(word + where * (len(findings) > 1) + f" ({size})" * bool(size) + why)
    return ", ".join(said)


def _write_size(metric: Metric, findings: Sequence[MetricPair]) -> str:
    """The ratios of some cases, as the metric is shown: of one, its interval too."""
    ratios = [metric.show(finding.ratio) for finding in findings]
    values = [ratio.value for ratio in ratios if ratio.value is not None]
    if not values:
        return ""
    text = write_range(values, _write_digits)
    text += " times as fast" if metric.speed else " times as much"
    (first, *others) = ratios
    if others or first.exact or first.low is None or first.high is None:
        return text
    return f"{text}; 95 %: {_write_digits(first.low)} to {_write_digits(first.high)}"


def _write_digits(value: float) -> str:
    """Three of them, zeros too: by them a ratio of 1.00 is told from one of 1."""
    return f"{value:#.3g}".rstrip(".")


def advise(comparison: Comparison, margin: float) -> str:
    """What would give the verdicts that are missing; empty where none are."""
    judged = {
        metric: {finding.ratio.judge(margin) for finding in findings if finding.a and finding.b}
        for metric, findings in comparison.metrics.items()
    }
    unjudged = [metric for metric, verdicts in judged.items() if Verdict.NONE in verdicts]
    if any(not metric.seeded for metric in unjudged):
        return f"Next: run both again with --repeats {MIN_REPEATS}, and compare them again."
    if unjudged:
        return f"Next: a loss needs {MIN_SEEDS} seeds a side; run both with --repeats {MIN_SEEDS}."
    if any(Verdict.AMBIGUOUS in verdicts for verdicts in judged.values()):
        return "Next: more repeats (--repeats 10) decide what is not certain."
    return ""
