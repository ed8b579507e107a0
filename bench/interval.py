"""Half of an interval, from a spread: Student's t, and Welch's of several independent means."""

from __future__ import annotations

import math
from collections.abc import Sequence

CONFIDENCE = 0.95
"""Of an interval; the rest is the error of a test."""


def find_quantile(freedom: float, confidence: float = CONFIDENCE) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + confidence) / 2))


def find_freedom(parts: Sequence[tuple[float, int]]) -> float:
    """Degrees of freedom of a sum of independent means (Welch 1947, Satterthwaite): of each, the
    variance of its readings and how many they are; not all variances are 0."""
    shares = [variance / number for variance, number in parts]
    # each over the largest: squares of tiny variances would vanish
    shares = [share / max(shares) for share in shares]
    squares = (s**2 / (number - 1) for s, (_, number) in zip(shares, parts, strict=True))
    return sum(shares) ** 2 / sum(squares)


def find_reach(parts: Sequence[tuple[float, int]], confidence: float = CONFIDENCE) -> float:
    """Half the interval of a sum or difference of independent means, as `find_freedom` takes them;
    0 where nothing varies."""
    error = math.sqrt(sum(variance / number for variance, number in parts))
    return find_quantile(find_freedom(parts), confidence) * error if error else 0.0
