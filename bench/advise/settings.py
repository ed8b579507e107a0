"""The candidate settings of a search for advice, and what is expected of those not measured yet.

The expectation is a Gaussian process over the logarithm of the quantity to minimise, such as an
epoch's time, with fixed parameters (C. E. Rasmussen, C. K. I. Williams, Gaussian Processes for
Machine Learning, 2006, algorithm 2.1). Settings are as similar as their levers: each lever has an
effect of its own, and each pair of levers one beyond these, so that a gain that needs two levers
together is not excluded in advance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING

from bench.axis import Value
from bench.case import AXES, FOLLOWS, SAME_QUESTION, Case
from bench.cores import count_cores
from bench.errors import UsageError
from bench.grid import grid
from bench.precision import PRECISIONS, Arithmetic
from bench.scale_map import find_window, read_scale_map
from bench.sweep.preflight import Inputs
from bench.text import parse_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LEVERS: dict[str, dict[str, Sequence[Value]]] = {
    "cuda": {
        "precision": ("fp32", "tf32", "fp16", "fp16-amp", "bf16", "bf16-amp"),
        "compile": ("off", "default", "reduce-overhead"),
        "cuda_graphs": (False, True),
        "channels_last": (False, True),
        "cudnn_benchmark": (False, True),
    },
    "cpu": {
        "precision": ("fp32", "bf16-amp"),
        "compile": ("off", "default"),
        "channels_last": (False, True),
    },
}
"""Values that are tried by default: what people change without changing the network. fp16 has its
default static loss scale. max-autotune is left out, as it takes minutes to compile."""

LESS, MORE = 4, 32
"""Batch sizes from the present one over ``LESS`` to ``MORE`` times it are tried, if they fit."""

FEWEST_STEPS = 8
"""Fewest steps of an epoch; with fewer, a larger batch would be all of the data."""


def strip(case: Case) -> Case:
    """Return the setting that a case measures, without how it was measured."""
    return replace(case, **{name: getattr(Case, name) for name in SAME_QUESTION})


def list_changes(setting: Case, other: Case) -> list[str]:
    """List the axes in which two settings differ, except those that follow from others."""
    axes = [name for name in AXES if getattr(setting, name) != getattr(other, name)]
    led = {name for axis in axes for name in FOLLOWS.get(axis, ())}
    return [name for name in axes if name not in led]


def find_room(now: Case, inputs: Inputs) -> float:
    """Return the bytes that training may use: a limit, the card's memory, or half of what a CPU has
    available, as other programs need some."""
    import psutil

    if now.memory_limit:
        return parse_bytes(now.memory_limit)
    card = inputs.platforms[now.device].environment.gpu_memory_bytes
    return card or psutil.virtual_memory().available / 2


def name_levers(now: Case) -> list[str]:
    """Return the axes whose values are tried if no flag fixes them."""
    return [*LEVERS[now.device], "batch_size", *(["workers"] if now.loader == "torch" else [])]


def list_levers(
    now: Case, given: Mapping[str, Sequence[Value]], items: int
) -> dict[str, list[Value]]:
    """Return the values of each lever to try, the present one first.

    Args:
        given: the values that flags give.
        items: the number of training items of an epoch.
    """
    tried: dict[str, Sequence[Value]] = dict(LEVERS[now.device])
    sizes = [now.batch_size]
    while sizes[-1] * 2 <= min(MORE * now.batch_size, items // FEWEST_STEPS):
        sizes.append(sizes[-1] * 2)
    least = max(1, now.batch_size // LESS)
    smaller = [now.batch_size >> n for n in range(1, 8) if now.batch_size >> n >= least]
    tried["batch_size"] = [*sizes, *smaller]
    if "workers" in name_levers(now):
        cores = math.ceil(count_cores())
        tried["workers"] = sorted({0, 1, 2, 4, 8, cores} & {*range(cores + 1)})
    tried |= given
    return {
        name: list(dict.fromkeys([getattr(now, name), *values])) for name, values in tried.items()
    }


def list_settings(
    now: Case,
    levers: Mapping[str, Sequence[Value]],
    given: Mapping[str, Sequence[Value]],
    inputs: Inputs,
) -> list[Case]:
    """List all combinations of levers that are valid and fit the data, the present setting first,
    except those that `refuse` excludes on this machine.

    Args:
        given: the values of axes that flags give, and the loss scale from a scale map.
    """
    kept = {now: None}
    for values in product(*levers.values()):
        try:
            setting = make_setting(now, dict(zip(levers, values, strict=True)), given)
            inputs.check_batches(setting)
        except UsageError:
            continue
        if not refuse(setting, now, inputs, given.get("precision", ())):
            kept[setting] = None
    return list(kept)


def make_setting(
    now: Case, changes: Mapping[str, Value], given: Mapping[str, Sequence[Value]] = {}
) -> Case:
    """Return the present setting with some levers changed, and the defaults that follow from them,
    by `grid`. Raises UsageError: they cannot be combined."""
    fixed = {name: getattr(now, name) for name in AXES}
    if changes.get("precision", now.precision) != now.precision:
        for name in FOLLOWS["precision"]:
            del fixed[name]
            if name in given:
                fixed[name] = given[name][0]
    chosen = {name: [value] for name, value in (fixed | dict(changes)).items()}
    (setting,) = grid(chosen, asked=())
    return strip(setting)


def read_scale(folder: Path, now: Case) -> list[Value]:
    """Return the loss scale for fp16, as a list, from the network's map that `bench.scales` left in
    a folder; empty if there is none. Raises UsageError: the map cannot be read."""
    found = read_scale_map(folder)
    cases = [case for case in found.cases if case.model == now.model] if found else []
    return [use for case in cases if case.precision == "fp16" and (use := find_window(case).use)]


def refuse(setting: Case, now: Case, inputs: Inputs, asked: Sequence[Value]) -> str:
    """Return why a setting is not tried on this machine; empty if it may be tried. An emulated
    precision is tried only if flags ask for it."""
    if setting.precision == now.precision:
        return ""
    why = inputs.refuse(setting)
    if why or setting.precision in asked:
        return why
    emulated = inputs.platforms[setting.device].find_emulation(PRECISIONS[setting.precision])
    return emulated and f"{emulated}; --precision {now.precision} {setting.precision} tries it"


# ------------------------------------------------------------------ before any measurement

STARTS = {"cuda": (10.0, 40.0), "cpu": (4.0, 20.0)}
"""Expected seconds of a run beside its steps, and those that compiling adds: an H100 took 9 to 13 s
to start; an H200 took 75 s to compile DPN-92, and less for a smaller network."""

TRUST = 0.6
"""Share of the predicted logarithm that was measured: for fp16, the least times of DPN-92's
operations predict 6.6× on an H100, and 3.3× were measured."""

GUESSES = {"float16": -0.8, "bfloat16": -0.7, "float8": -0.7, "tfloat32": -0.5}
"""Expected effect of a precision on the logarithm of the time, on a card where nothing was counted:
less than DPN-92 gained on an H100 (-1.2, -1.0 and -0.65), as smaller networks gain less."""

OCTAVE = -0.05
"""Expected effect of doubling the batch size: almost none in fp32, more in 16 bits."""

COMPILED = -0.2
"""Expected effect of compiling: DPN-92 in fp16 on an H200 gained -0.48."""


def expect_start(setting: Case) -> float:
    """Return the expected seconds of a run beside its steps."""
    start, compiling = STARTS[setting.device]
    return start + compiling * setting.compiled


def expect(settings: Sequence[Case], inputs: Inputs) -> list[float]:
    """Return the expected logarithm of each setting's epoch time, up to a constant: by counts and
    rates, or where the device or the network was not measured, of a GPU by `guess`."""
    found: dict[tuple[str, int], float | None] = {}
    for setting in settings:
        told = setting.precision, setting.batch_size
        if told not in found:
            found[told] = inputs.predict(setting)
    if None in found.values():
        return [guess(setting) if setting.device == "cuda" else 0.0 for setting in settings]
    return [TRUST * math.log(found[s.precision, s.batch_size] or 1.0) for s in settings]


def guess(setting: Case) -> float:
    precision = PRECISIONS[setting.precision].arithmetic
    octaves = math.log2(setting.batch_size)
    return GUESSES.get(precision, 0.0) + OCTAVE * octaves + COMPILED * setting.compiled


# ------------------------------------------------------------------ after some

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


@dataclass(frozen=True)
class Belief:
    """The expected logarithm of each setting, and its standard deviation."""

    mean: NDArray[np.float64]
    error: NDArray[np.float64]

    def expect_gain(self, bars: Sequence[float]) -> NDArray[np.float64]:
        """Return how far below its bar each setting is expected to be, where above it counts as 0
        (D. R. Jones et al., Efficient global optimization, 1998, equation 15)."""
        import numpy as np
        from scipy.special import ndtr

        less = np.asarray(bars) - self.mean
        z = less / self.error
        density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
        gain: NDArray[np.float64] = less * ndtr(z) + self.error * density
        return gain


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
