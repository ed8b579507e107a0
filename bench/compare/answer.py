"""The conclusions of a comparison: a sentence per metric, with warnings and advice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from bench.case import AXES, FOLLOWS, SAME_QUESTION, spell_value
from bench.compare.comparison import STOPPED, Comparison, MetricPair
from bench.compare.tables import Margins, list_differences, write_spoilt
from bench.compare.values import explain_unmatched, list_left_out
from bench.limits import MIN_REPEATS
from bench.origin import describe_origin
from bench.study.axes import name_axis
from bench.study.metrics import Metric
from bench.text import capitalize, count, name_first, write_percent, write_range
from bench.verdict.ratio import Verdict
from bench.verdict.seeds import MIN_SEEDS

MOST_REPEATS = 50
"""Most repeats that are advised: more take a day, in which a machine drifts."""

QUIETER = "Close other programs and run again, with a new --out; or use more --repeats"
"""The remedy for times that were disturbed."""


def warn_of_origin(comparison: Comparison) -> Iterator[str]:
    """Yield the opening lines if neither side was measured."""
    both = (comparison.a, comparison.b)
    return describe_origin(executor for side in both for executor in side.environment("executor"))


def conclude(comparison: Comparison, margin: float) -> Iterator[str]:
    """Yield a sentence per metric measured on both sides, and per kind of changed outcome."""
    for metric, findings in comparison.metrics.items():
        known = [finding for finding in findings if finding.a and finding.b]
        if known and not (comparison.apart and metric.seeded):
            yield f"{capitalize(metric.label)}: {_sum_up(metric, known, margin)}."
    changes: dict[str, list[str]] = {}
    for match in comparison.matched:
        if change := comparison.change(match):
            ended = " → ".join(end.ended for end in comparison.ends(match))
            said = f"{comparison.label(match)} ({ended})"
            changes.setdefault(change, []).append(said)
    for change, labels in changes.items():
        yield f"{capitalize(change)}: {name_first(labels, 3, '; ')}."


def _sum_up(metric: Metric, findings: Sequence[MetricPair], margin: float) -> str:
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
    """Write the range of the cases' ratios as displayed; for one case, with its interval."""
    ratios = [metric.show(finding.ratio) for finding in findings]
    values = [ratio.value for ratio in ratios if ratio.value is not None]
    if not values:
        return ""
    text = write_range(values, _write_digits)
    text += " times as fast" if metric.speed else " times as much"
    if apart := [f.ratio.difference for f in findings if f.ratio.difference]:
        low, high = (end(value for value, *_ in apart) for end in (min, max))
        return f"by {low:+.3g}" + f" to {high:+.3g}" * (low < high)
    (first, *others) = ratios
    if others or first.exact or first.low is None or first.high is None:
        return text
    return f"{text}; 95 %: {_write_digits(first.low)} to {_write_digits(first.high)}"


def _write_digits(value: float) -> str:
    # keep trailing zeros: they show the precision of a ratio such as 1.00
    return f"{value:#.3g}".rstrip(".")


def advise(comparison: Comparison, margin: float) -> str:
    """Return how to get the missing verdicts; empty if none is missing."""
    if any(comparison.change(match) == STOPPED for match in comparison.matched):
        return "Next: give the commands of the sweeps again, which run what was stopped."
    known = [
        (metric.seeded, finding, finding.ratio.judge(margin))
        for metric, findings in comparison.metrics.items()
        for finding in findings
        if finding.a and finding.b
    ]
    # if there are enough repeats but no verdict, more of them do not help
    few = [
        (seeded, finding)
        for seeded, finding, verdict in known
        if verdict is Verdict.NONE and _is_short(finding, seeded)
    ]
    if not all(seeded for seeded, _ in few):
        both = "the sweep" if comparison.axis else "both"
        return f"Next: run {both} again with --repeats {MIN_REPEATS}, and compare again."
    if any(_share_seeds(finding) for _, finding in few):
        return (
            f"Next: a loss needs {MIN_SEEDS} seeds a side, and these repeats have fewer; run both "
            f"again with --repeats {MIN_SEEDS}, into a new --out and without --same-seed."
        )
    if few:
        return f"Next: a loss needs {MIN_SEEDS} seeds a side; run both with --repeats {MIN_SEEDS}."
    unsure = [
        (finding.ratio, min(len(finding.a), len(finding.b)))
        for _, finding, verdict in known
        if verdict is Verdict.AMBIGUOUS
    ]
    if not unsure:
        return ""
    most = max(repeats for _, repeats in unsure)
    needed = max(ratio.estimate_repeats(margin, repeats) for ratio, repeats in unsure)
    if needed > max(MOST_REPEATS, most):
        return (
            f"Next: {MOST_REPEATS} repeats would not decide what is not certain; measure on an "
            "idle machine, or give a larger --margin."
        )
    return f"Next: --repeats {max(math.ceil(needed), most + 2)} may decide what is not certain."


def _is_short(finding: MetricPair, seeded: bool) -> bool:
    """Return whether a side has fewer repeats, or seeds if ``seeded``, than a verdict needs."""
    if not seeded:
        return min(len(finding.a), len(finding.b)) < MIN_REPEATS
    a, b = finding.seeded
    return min(len(a), len(b), len(a.keys() & b.keys()) or MIN_SEEDS) < MIN_SEEDS


def _share_seeds(finding: MetricPair) -> bool:
    """Return whether a side has enough repeats, but of too few seeds."""
    return any(
        len(seeds) < MIN_SEEDS <= len(readings)
        for seeds, readings in zip(finding.seeded, (finding.a, finding.b), strict=True)
    )


def describe(comparison: Comparison, margins: Margins) -> Iterator[str]:
    """Yield all lines before the tables: the verdicts, what is compared, and how to read it."""
    yield from warn_of_origin(comparison)
    told = list_differences(comparison, mandatory=True)
    yield from _warn_of_differences(comparison, [one for one in told if one[-1]])  # a table has all
    yield from _tell_apart(comparison)
    yield from conclude(comparison, margins.verdict)
    yield from introduce(comparison, margins)


def _warn_of_differences(
    comparison: Comparison, told: Iterable[tuple[str, str, str, bool]]
) -> Iterator[str]:
    """Warn of other differences between the sides, which may explain a verdict."""
    one, two = comparison.names
    differing = [f"{name} ({of_a} in {one}, {of_b} in {two})" for name, of_a, of_b, _ in told]
    if differing and comparison.matched:
        yield f"They differ: {name_first(differing, 2, '; ')}."


def _tell_apart(comparison: Comparison) -> Iterator[str]:
    """Say which axes of the recipe differ, of which cases were matched nevertheless."""
    if comparison.apart and comparison.matched:
        ends = [comparison.ends(match) for match in comparison.matched]
        told = []
        for axis in comparison.apart:
            a, b = (
                list(dict.fromkeys(spell_value(getattr(end[of].case, axis)) for end in ends))
                for of in (0, 1)
            )
            told.append(f"{name_axis(axis)} ({name_first(a, 2)} and {name_first(b, 2)})")
        yield f"They differ in {', '.join(told)}: what is learnt is not compared."


def introduce(comparison: Comparison, margins: Margins) -> Iterator[str]:
    """Yield what is compared, and how to read it."""
    for side, role in ((comparison.a, "baseline"), (comparison.b, "candidate")):
        cases, runs = comparison.count(side)
        said = f"{count(runs, 'run')} of {count(cases, 'case')}"
        yield f"{side.title} ({role}): {side.path}, {said}"
        for name in FOLLOWS.get(comparison.axis, ()):
            used, left = list_left_out(comparison, side, name)
            if used and left:
                yield (
                    f"{side.title}: only {name_axis(name)} {' or '.join(used)} is compared, "
                    f"{', '.join(left)} left out; --axis {name} compares one with another"
                )
    if matched := comparison.matched:
        both = f"with both values of {comparison.axis}" if comparison.axis else "in both"
        yield f"{count(len(matched), 'case')} {both}: {_write_common(comparison)}"
    else:
        yield f"no case in both: {explain_unmatched(comparison)}"
    if not any(list_differences(comparison)):
        yield "no recorded difference in their environments"
    if spoilt := list(write_spoilt(comparison, matched)):
        yield f"warning: do not rely on these times: {'; '.join(spoilt)}. {QUIETER}"
    empty = [metric.name for metric, found in comparison.metrics.items() if not found]
    if matched and empty:
        yield f"not compared, because no run has a value: {', '.join(empty)}"
    limit, (one, two) = 1 + margins.verdict, comparison.names
    yield (
        f"speed is the time of {one} over that of {two}: above 1 is faster; any other ratio is "
        f"{two} / {one}"
    )
    yield (
        "each has a 95 % interval; p is adjusted for the number of cases in a table (Holm); "
        f"the margin of {write_percent(margins.verdict)} is from {1 / limit:.4g} to {limit:.4g}"
    )


def _write_common(comparison: Comparison) -> str:
    hidden = {*comparison.telling, *comparison.free}
    ran = [end.case for match in comparison.matched for end in comparison.ends(match)]
    hidden |= {name for name in SAME_QUESTION if len({getattr(case, name) for case in ran}) > 1}
    return comparison.ask(ran[0]).label(name for name in AXES if name not in hidden)


def open_screen(comparison: Comparison, margins: Margins) -> Iterator[str]:
    """Yield the lines of the first screen: what is compared, the verdicts, advice and warnings."""
    a, b = comparison.a, comparison.b
    paths = "" if a.path == b.path else f" ({a.path}) and {b.title} ({b.path})"
    both = f"{a.title}{paths}" if paths else f"{a.title} and {b.title} in {a.path}"
    matched = comparison.matched
    yield from warn_of_origin(comparison)
    if not matched:
        yield f"{both}: no case in both: {explain_unmatched(comparison)}"
        return
    cases = count(len(matched), "case")
    yield f"{both}: {cases} in both, {_write_common(comparison)}."
    told = list_differences(comparison, mandatory=True)
    yield from (f"! {said}" for said in _warn_of_differences(comparison, told))
    yield from _tell_apart(comparison)
    yield from conclude(comparison, margins.verdict)
    if said := advise(comparison, margins.verdict):
        yield said
    if spoilt := list(write_spoilt(comparison, matched)):
        yield f"! Do not rely on these times: {name_first(spoilt, 2, '; ')}. {QUIETER}."
    alone = {side.title: len(comparison.alone(side)) for side in (a, b)}
    if any(alone.values()):
        told_alone = (f"{count(n, 'case')} only in {title}" for title, n in alone.items() if n)
        yield f"! Not compared: {', '.join(told_alone)}."
