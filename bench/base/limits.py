"""Thresholds from which a difference is reported, and half-widths of confidence intervals:
Student's t, and Welch's for independent means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

STEADY = 0.02
"""Times that differ by at most this share count as equal: the steps at the end of warm-up, and
repeats and the drift check against the median of their case."""

VARIES = 0.05
"""Memory of repeats that differs by more than this share of the lowest does not repeat. A GPU's
allocator repeats its peak. On a CPU the C library keeps what is freed for later: three runs of 60
steps of a small network, in one thread, held 276 to 313 MiB at most, and two of them 237 MiB each
where it gave back all blocks of 128 KiB and more (MALLOC_MMAP_THRESHOLD_)."""

NEAR = 0.1
"""An epoch within this share of the lowest time is near enough, and the smallest such batch is
recommended. On an H200 twice the batch saved 4 % of the time, took 1.7 times the memory and learnt
less in an epoch."""

LEAST_END = 5
"""Minimum steps at each end of an epoch to judge a trend by; a quarter of them if more."""


def leave_out_first(times: Sequence[float]) -> Sequence[float]:
    """Return all but the first tenth: after a reset, steps allocate memory on an idle device."""
    return times[math.ceil(len(times) / 10) :] or times


def find_ends(times: Sequence[float]) -> tuple[float, float] | None:
    """Return the level of full steps at both ends of an epoch: the medians of two quarters, in s.

    A mean would take isolated spikes for a trend: on an H100 four of forty steps took 1.3 to 1.5
    times as long as the others, which agreed within 0.1 %. The first tenth is left out. Returns
    None if there are so few steps that a single slow one would look like a trend.
    """
    level = leave_out_first(times)
    size = max(math.ceil(len(level) / 4), min(LEAST_END, len(level) // 2))
    return (median(level[:size]), median(level[-size:])) if size > 2 else None


def summarize_steps(times: Sequence[float]) -> dict[str, float]:
    """Return the columns of a record that sum up its steps, whose ``times`` are in s."""
    middle = median(times)
    return {
        "step_time_median_s": middle,
        "step_time_p95_s": sorted(times)[math.ceil(0.95 * len(times)) - 1],  # nearest-rank method
        "step_time_mad_s": median(abs(time - middle) for time in times),
        "step_time_max_s": max(times),
    }


BUSY_CORES = 0.15
"""CPU cores that others may use during an epoch on a CPU; idle daemons use fewer."""

LEAST_BUSY = 0.9
"""A GPU that runs kernels for less than this share of a step waits for the host. DPN-92 on an H100:
0.95 to 0.99 at batch sizes that fill it, 0.69 and 0.75 at batch size 128 in half precision."""


def waits_for_host(busy_s: float, step_s: float) -> bool:
    """Return whether a GPU whose kernels take ``busy_s`` of a step waits for the host; False where
    either is NaN."""
    return busy_s < LEAST_BUSY * step_s


LEAST_GAIN = 0.02
"""A network that guesses among equally frequent classes has a loss of ln(classes); one that learnt
has a loss lower by at least this share. For ten classes it is 0.046; `dpn-small` on CIFAR-10 gains
0.28 in 60 steps of batch 64 (three seeds: 0.24 to 0.28), and with its labels shuffled -0.04,
standard error 0.01."""

MIN_REPEATS = 3
"""Minimum repeats per side for a verdict. Two leave one degree of freedom: the interval spans 12.7
standard errors, too wide for any difference of practical interest."""

FAR = 0.5
"""A rate of products or copies below this share of the data sheet's is reported. An H100 reaches
0.64 to 0.76 of its FLOP/s, by number format, and 0.9 of its bandwidth."""


# ---------------------------------------------------------------------------------------- intervals


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
    squares = (s**2 / (number - 1) for s, (_, number) in zip(shares, parts))
    return sum(shares) ** 2 / sum(squares)


def find_half_width(parts: Sequence[tuple[float, int]]) -> float:
    """Return the half-width of the 95 % interval of a sum or difference of independent means, with
    ``parts`` as in `find_freedom`; 0 if nothing varies."""
    error = math.sqrt(sum(variance / number for variance, number in parts))
    return find_quantile(find_freedom(parts)) * error if error else 0.0
