"""Half-widths of confidence intervals: Student's t, and Welch's for independent means."""

from __future__ import annotations

import math
from collections.abc import Sequence

CONFIDENCE = 0.95
"""Confidence level of intervals; a test's significance level is the rest."""


def find_quantile(freedom: float, confidence: float = CONFIDENCE) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + confidence) / 2))


def find_freedom(parts: Sequence[tuple[float, int]]) -> float:
    """Return the degrees of freedom of a sum of independent means (Welch 1947, Satterthwaite).
    ``parts`` are pairs of variance and number of readings; not all variances are 0."""
    shares = [variance / number for variance, number in parts]
    # relative to the largest: squares of tiny variances would underflow
    shares = [share / max(shares) for share in shares]
    squares = (s**2 / (number - 1) for s, (_, number) in zip(shares, parts, strict=True))
    return sum(shares) ** 2 / sum(squares)


def find_half_width(parts: Sequence[tuple[float, int]], confidence: float = CONFIDENCE) -> float:
    """Return the half-width of the interval of a sum or difference of independent means, with
    ``parts`` as in `find_freedom`; 0 if nothing varies."""
    error = math.sqrt(sum(variance / number for variance, number in parts))
    return find_quantile(find_freedom(parts), confidence) * error if error else 0.0
