"""Predictions for settings that were not measured, from those that were.

A Gaussian process over the logarithm of the quantity to minimise, such as an epoch's time, with
fixed parameters (C. E. Rasmussen, C. K. I. Williams, Gaussian Processes for Machine Learning, 2006,
algorithm 2.1). Settings are as similar as their levers: each lever has an effect of its own, and
each pair of levers one beyond these, so that a gain that needs two levers together is not excluded
in advance.
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
"""Prior standard deviation of each lever's effect on the logarithm; `OTHER` for the rest. For
DPN-92 on an H100 and an H200, fp32 → fp16 gave 3.3×, compiling 1.6×, channels-last 0.8×, batch size
128 → 512 1.1× in fp32 and 1.5× in fp16."""

OTHER = 0.15

TOGETHER = 0.5
"""Effect of two levers beyond their own effects, as a share of the smaller one."""

OCTAVES = 2.0
"""Batch sizes this many doublings apart have a correlation of 1/e."""

HALF = 0.7
"""Correlation of different precisions that use tensor cores: 16-bit and 8-bit formats, and tf32."""


GUESSES = {"float16": -0.8, "bfloat16": -0.7, "float8": -0.7, "tfloat32": -0.5}
"""Expected effect of a precision on the logarithm of the time, on a card where nothing was counted:
less than DPN-92 gained on an H100 (-1.2, -1.0 and -0.65), as smaller networks gain less."""

OCTAVE = -0.05
"""Expected effect of doubling the batch size: almost none in fp32, more in 16 bits."""

COMPILED = -0.2
"""Expected effect of compiling: DPN-92 in fp16 on an H200 gained -0.48."""


ALL_LOADING, LEAST_TRAINING = 0.9, 0.05
"""Shares of an epoch: from which loading hides training, and the least that training takes."""


def guess(setting: Case) -> float:
    """Return a guess of the logarithm of a setting's time on a GPU, up to a constant."""
    precision = PRECISIONS[setting.precision].arithmetic
    return (
        GUESSES.get(precision, 0.0)
        + OCTAVE * math.log2(setting.batch_size)
        + COMPILED * setting.compiled
    )


@dataclass(frozen=True)
class Belief:
    """The expected logarithm of each setting, and its standard deviation."""

    mean: NDArray[np.float64]
    error: NDArray[np.float64]

    def expect_gain(self, best: float) -> NDArray[np.float64]:
        """Return the expected improvement of each setting over ``best``, where a worse one counts
        as 0 (D. R. Jones et al., Efficient global optimization, 1998, equation 15)."""
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
    """Return the prior with data loading added, once the first setting was measured with torch's
    loader: its epoch takes ``time_s``, and an epoch of loading alone ``loading_s``.

    Workers share the loading and overlap it with training; without workers, the two alternate.
    """
    workers = settings[0].workers
    alone_s = loading_s * max(1, workers)
    training_s = time_s - loading_s if workers == 0 else time_s
    if workers and loading_s > ALL_LOADING * time_s:
        training_s = time_s / 2  # hidden by the loading, so it may take any shorter time
    found = []
    for setting, expected in zip(settings, prior, strict=True):
        step_s = max(training_s, LEAST_TRAINING * time_s) * math.exp(expected - prior[0])
        many = setting.workers
        found.append(math.log(max(step_s, alone_s / many) if many else step_s + alone_s))
    return found


def relate(settings: Sequence[Case]) -> NDArray[np.float64]:
    """Return the covariance of the settings' logarithms, without what all have in common; shape
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
    """Predict all settings, of which at least one was measured.

    Args:
        covariance: of `relate`, shape (settings, settings).
        prior: the logarithm expected of each before any measurement, up to a constant; shape
            (settings,).
        seen: the measured logarithm and its standard error, by the setting's index.
    """
    import numpy as np

    places, known = list(seen), np.array(list(seen.values()))
    expected = np.asarray(prior, dtype=float)
    # what all have in common, such as the machine's speed, is unknown in advance
    common = 10.0**2
    among = covariance[np.ix_(places, places)] + common + np.diag(known[:, 1] ** 2)
    across = covariance[:, places] + common
    weights = np.linalg.solve(among, across.T).T
    mean = expected + weights @ (known[:, 0] - expected[places])
    left = np.diag(covariance) + common - np.einsum("ij,ij->i", weights, across)
    return Belief(mean, np.sqrt(np.maximum(left, 1e-12)))


def _compare(values: Sequence[object], axis: str) -> NDArray[np.float64]:
    """Return how similar the values of a lever are, 0 to 1; shape (settings, settings)."""
    import numpy as np

    alike: NDArray[np.float64]
    # counts that divide the work: their ratio matters, not their difference
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
