"""What is expected of settings that were not measured, by those that were.

A Gaussian process over the logarithm of what is to be small, such as an epoch's time, with fixed
parameters (C. E. Rasmussen, C. K. I. Williams, Gaussian Processes for Machine Learning, 2006,
algorithm 2.1). Two settings are held to be alike as far as their levers are: each lever has an
effect of its own, and each pair of levers one beyond these, so that a gain that only two together
bring can be seen and is not excluded before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from bench.case import AXES, FOLLOWS, Case
from bench.precision import PRECISIONS, Arithmetic

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

EFFECTS = {
    "precision": 0.45,
    "compile": 0.4,
    "cuda_graphs": 0.25,
    "batch_size": 0.25,
    "channels_last": 0.25,
    "workers": 0.3,
    "cudnn_benchmark": 0.1,
}
"""About how large the effect of a lever is, as a standard deviation of the logarithm: of DPN-92 on
an H100 and an H200, fp32 → fp16 gave 3.3×, compiling 1.6×, channels-last 0.8×, batch size 128 → 512
1.1× in fp32 and 1.5× in fp16. For other levers, `OTHER`."""

OTHER = 0.15

TOGETHER = 0.5
"""The effect of two levers beyond those of each, as a part of the smaller of the two."""

OCTAVES = 2.0
"""Batch sizes so many doublings apart are alike by 1/e."""

HALF = 0.7
"""How alike precisions are that compute in 16 bits, in tf32 or in 8: all by the tensor cores."""


GUESSES = {"float16": -0.8, "bfloat16": -0.7, "float8": -0.7, "tfloat32": -0.5}
"""What a precision is expected to do to the logarithm of a time on a card where nothing was
counted: less than DPN-92 gained on an H100, -1.2, -1.0 and -0.65, as a smaller network does."""

OCTAVE = -0.05
"""What twice the batch size is expected to do: nearly nothing in fp32, and more in 16 bits."""

COMPILED = -0.2
"""What compiling is expected to do: DPN-92 in fp16 on an H200 gained -0.48."""


ALL_LOADING, LEAST_TRAINING = 0.9, 0.05
"""Shares of an epoch: from which loading hides the training, and what training takes at least."""


def guess(setting: Case) -> float:
    """The logarithm of a time on a GPU, but for a constant, where nothing is known of it."""
    precision = PRECISIONS[setting.precision].arithmetic
    return (
        GUESSES.get(precision, 0.0)
        + OCTAVE * math.log2(setting.batch_size)
        + COMPILED * setting.compiled
    )


@dataclass(frozen=True)
class Belief:
    """Of each of some settings the expected logarithm and its standard deviation."""

    mean: NDArray[np.float64]
    error: NDArray[np.float64]

    def expect_gain(self, best: float) -> NDArray[np.float64]:
        """By how much each is expected to be below ``best``, those that are above counting 0:
        D. R. Jones et al., Efficient global optimization, 1998, equation 15."""
        import numpy as np
        from scipy.special import ndtr

        less = best - self.mean
        z = less / self.error
        density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
        gain: NDArray[np.float64] = less * ndtr(z) + self.error * density
        return gain


def add_loading(
    prior: Sequence[float], settings: Sequence[Case], time_s: float, loading_s: float
) -> list[float]:
    """What is expected of settings once the first of them was measured with torch's loader, which
    takes ``loading_s`` where nothing is trained, and its epoch ``time_s``.

    Workers divide the loading and do it beside the training; without any, one comes after the
    other.
    """
    workers = settings[0].workers
    alone_s = loading_s * max(1, workers)
    training_s = time_s - loading_s if workers == 0 else time_s
    if workers and loading_s > ALL_LOADING * time_s:
        training_s = time_s / 2  # hidden behind the loading, so that it may be anything below
    found = []
    for setting, expected in zip(settings, prior, strict=True):
        step_s = max(training_s, LEAST_TRAINING * time_s) * math.exp(expected - prior[0])
        many = setting.workers
        found.append(math.log(max(step_s, alone_s / many) if many else step_s + alone_s))
    return found


def relate(settings: Sequence[Case]) -> NDArray[np.float64]:
    """The covariance of the logarithms of settings, but for what all have in common; shape
    (settings, settings)."""
    import numpy as np

    varying = [name for name in AXES if len({getattr(s, name) for s in settings}) > 1]
    levers = [name for name in varying if name not in FOLLOWS["precision"]]
    alike = {name: _compare([getattr(s, name) for s in settings], name) for name in levers}
    sizes = {name: EFFECTS.get(name, OTHER) for name in levers}
    covariance = np.zeros((len(settings), len(settings)))
    for name in levers:
        covariance += sizes[name] ** 2 * alike[name]
    for one, two in combinations(levers, 2):
        both = TOGETHER * min(sizes[one], sizes[two])
        covariance += both**2 * alike[one] * alike[two]
    return covariance


def believe(
    covariance: NDArray[np.float64],
    prior: Sequence[float],
    seen: Mapping[int, tuple[float, float]],
) -> Belief:
    """What to expect of settings, of which at least one was measured.

    Args:
        covariance: of `relate`, shape (settings, settings).
        prior: the logarithm that is expected of each before anything was measured, but for a
            constant; shape (settings,).
        seen: by its place the logarithm that was measured, and its standard error.
    """
    import numpy as np

    places, known = list(seen), np.array(list(seen.values()))
    expected = np.asarray(prior, dtype=float)
    # what all have in common, such as how fast the machine is, is not known before
    common = 10.0**2
    among = covariance[np.ix_(places, places)] + common + np.diag(known[:, 1] ** 2)
    across = covariance[:, places] + common
    weights = np.linalg.solve(among, across.T).T
    mean = expected + weights @ (known[:, 0] - expected[places])
    left = np.diag(covariance) + common - np.einsum("ij,ij->i", weights, across)
    return Belief(mean, np.sqrt(np.maximum(left, 1e-12)))


def _compare(values: Sequence[object], axis: str) -> NDArray[np.float64]:
    """How alike the values of a lever are, 0 to 1; shape (settings, settings)."""
    import numpy as np

    alike: NDArray[np.float64]
    # numbers by which work is divided: what counts is how many times as many
    if axis in ("batch_size", "workers", "accumulate"):
        octave = np.log2(np.array([1 + float(str(v)) for v in values]))
        alike = np.exp(-np.abs(octave[:, None] - octave[None]) / OCTAVES)
        return alike
    kinds = list(dict.fromkeys(values))
    code = np.array([kinds.index(value) for value in values])
    alike = np.asarray(code[:, None] == code[None], dtype=float)
    if axis == "precision":
        fast = np.array([PRECISIONS[str(v)].arithmetic is not Arithmetic.FLOAT32 for v in values])
        np.maximum(alike, HALF * np.outer(fast, fast), out=alike)
    return alike
