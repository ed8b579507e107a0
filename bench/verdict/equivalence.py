"""Tests of whether a difference beyond a margin can be ruled out.

"Not significantly different" does not show this: too few seeds never show a difference. There are
four verdicts:

- equivalent: two one-sided tests at 5 % reject both a ratio above the margin and one below it
  (TOST, Schuirmann 1987), so that the 90 % interval lies within the margin;
- worse, better: the 95 % interval lies beyond the margin;
- cannot tell: neither.

The true ratio lies in exactly one of three regions (below the margin, within it, above it), so the
three tests together err in at most 5 % of cases (Goeman, Solari & Stijnen 2010, Statistics in
Medicine 29). Several cases, such as several precisions, are one family: Holm's adjustment is
applied to the claims "equivalent" and, separately, to "worse" and "better", so that any false claim
of either kind has a probability of at most 5 %. The intervals are not adjusted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from bench.text import write_percent
from bench.verdict.difference import (
    SIDES,
    Difference,
    adjust,
    exp,
    find_freedoms,
    find_interval,
)
from bench.verdict.seeds import (
    GUESSING,
    MIN_SEEDS,
    Seeded,
    are_equal,
    average_repeats,
    scale_seeds,
    subtract_seeds,
)

ERROR = 0.05
"""Error probability of a single claim of equivalence, and of all claims of a family."""


class Claim(Enum):
    """Verdicts of a test of equivalence of B against A; lower is better."""

    EQUIVALENT = "equivalent"
    BETTER = "better"
    WORSE = "worse"
    UNCLEAR = "cannot tell"


@dataclass(frozen=True)
class Equivalence:
    """Result of testing whether a loss or an error of B differs from A's by more than the margin.

    Attributes:
        margin: a fraction: 0.02 is a ratio from 1/1.02 to 1.02.
        ratio: ratio B/A of geometric means over seeds; None if there is none.
        low, high: its 90 % interval, not adjusted; None with too few seeds.
        p: p-value of the two one-sided tests for a ratio within the margin, adjusted by Holm.
        seeds: number of seeds compared, of the side with fewer.
        paired: whether sides were compared seed by seed.
        lack: why no verdict is possible; empty if one is.
        unit: 0, or of sides without a ratio the unit of their difference: ``ratio`` and its ends
            are e to the power of the difference over it, as in `bench.verdict.ratio.Ratio`.
    """

    verdict: Claim
    margin: float
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    seeds: int = 0
    paired: bool = False
    lack: str = ""
    unit: float = 0.0

    def sentence(self) -> str:
        return f"{self.verdict.value}: {self.explain()}"

    def explain(self) -> str:
        margin = f"the margin of {write_percent(self.margin)}"
        if self.ratio is None:
            return self.lack
        if self.low is None or self.high is None:
            return f"{self._name(self.ratio)}; {self.lack}{self._advise()}"
        count = f"{self.seeds} {'paired ' * self.paired}seeds"
        low, high = self.write(self.low), self.write(self.high)
        found = f"{self._name(self.ratio)}, {low} to {high} over {count}"
        if self.verdict is Claim.EQUIVALENT:
            return f"{found}, within {margin}"
        if self.verdict is not Claim.UNCLEAR:
            return f"{found}, beyond {margin}"
        limit, where = 1 + self.margin, "reaches beyond {}"
        if 1 / limit <= self.low and self.high <= limit:
            where = "within {}, but may be chance among all the cases"
        elif self.low > limit or self.high < 1 / limit:
            where = "beyond {}, but may be chance"
        return f"{found}, {where.format(margin)}{self._advise()}"

    def write(self, ratio: float) -> str:
        """Write a ratio, or the difference that it stands for, with its sign."""
        return f"{self.unit * math.log(ratio):+.4g}" if self.unit else f"{ratio:.4f}"

    def _name(self, ratio: float) -> str:
        return f"{'difference' if self.unit else 'ratio'} {self.write(ratio)}"

    def _advise(self) -> str:
        if self.seeds < MIN_SEEDS:
            return f"; sweep with --repeats {MIN_SEEDS} or more, each repeat has its own seed"
        return "; more seeds narrow it" * (not self.lack)


def withdraw(found: Equivalence, lack: str) -> Equivalence:
    """Keep the ratio, but replace the verdict by the reason ``lack``."""
    none: dict[str, Any] = dict.fromkeys(("low", "high", "p"))
    return replace(found, verdict=Claim.UNCLEAR, lack=lack, **none)


def withdraw_if_guessing(found: Equivalence, guessing: Sequence[bool]) -> Equivalence:
    """Withdraw a verdict on networks that guess, unless it is that only one of them learnt.
    ``guessing`` is whether the loss of each side, if known, is still that of guessing."""
    differs = found.verdict in (Claim.BETTER, Claim.WORSE)
    if not any(guessing) or (differs and not all(guessing)):
        return found
    return withdraw(found, GUESSING)


def judge_equivalence(a: Mapping[int, float], b: Mapping[int, float], margin: float) -> Equivalence:
    """Test whether B's loss or error is equivalent to A's. Each side has a positive reading per
    seed. ``margin`` is a fraction: 0.02 is a ratio from 1/1.02 to 1.02."""
    pair = ({s: [v] for s, v in a.items()}, {s: [v] for s, v in b.items()})
    return judge_equivalences([pair], margin)[0]


def judge_equivalences(
    family: Sequence[Seeded], margin: float, names: tuple[str, str] = SIDES
) -> list[Equivalence]:
    """Test each case of a family for equivalence, in order, adjusted over the family; see the
    module. Seeds are averaged, paired and counted as in `compare_seeds`."""
    limit = math.log1p(margin)
    unclear = Equivalence(Claim.UNCLEAR, margin)
    results: list[Equivalence] = []
    tested: dict[int, Difference] = {}
    for index, pair in enumerate(family):
        a, b, unit = scale_seeds(*map(average_repeats, pair))
        case = subtract_seeds(a, b, names)
        if isinstance(case, str):
            results.append(replace(unclear, lack=case))
            continue
        seeds, value = min(case.a.number, case.b.number), exp(case.shift)
        result = replace(unclear, ratio=value, seeds=seeds, paired=bool(case.pairs), unit=unit)
        if (equal := are_equal(a, b)) or (case.pairs >= MIN_SEEDS and not case.error):
            value, seeds = 1.0 if equal else value, len(a.keys() & b.keys())
            claim = _place(case.shift, limit)
            result = Equivalence(
                claim, margin, value, value, value, seeds=seeds, paired=True, unit=unit
            )
        elif result.seeds < MIN_SEEDS:
            few = f"{result.seeds} seed{'s' * (result.seeds > 1)}, needs {MIN_SEEDS}"
            result = replace(result, lack=few)
        elif case.error:
            tested[index] = case
            low, high = find_interval(case, 1 - 2 * ERROR)
            result = replace(result, low=low, high=high)
        else:
            result = replace(result, lack="seeds without any spread are not independent readings")
        results.append(result)
    within, beyond = _test_equivalence(list(tested.values()), limit)
    claims = [
        _place(case.shift, limit) if min(p_within, p_beyond) < ERROR else Claim.UNCLEAR
        for case, p_within, p_beyond in zip(tested.values(), within, beyond, strict=True)
    ]
    for index, claim, p in zip(tested, claims, within, strict=True):
        results[index] = replace(results[index], verdict=claim, p=p)
    return results


def _place(shift: float, limit: float) -> Claim:
    """Return the claim for the region in which a difference of logarithms lies."""
    if abs(shift) <= limit:
        return Claim.EQUIVALENT
    return Claim.WORSE if shift > 0 else Claim.BETTER


def _test_equivalence(cases: Sequence[Difference], limit: float) -> tuple[list[float], list[float]]:
    """Return Holm's p-values for the claims that a case is within the limit, and beyond it."""
    from scipy.special import stdtr

    within, beyond = [], []
    for case, freedom in zip(cases, find_freedoms(cases), strict=True):
        inside = (limit - abs(case.shift)) / case.error
        within.append(float(stdtr(freedom, -inside)))  # the larger p of the two tests
        beyond.append(min(1.0, 2 * float(stdtr(freedom, inside))))
    return adjust(within), adjust(beyond)
