"""The loss-scale map: its arithmetic is exact, and planted windows are found."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bench.answers.render.table import Table
from bench.results.scale_map import (
    HEADROOM,
    MAP,
    Fate,
    GradientKind,
    Gradients,
    ScaleCase,
    ScaledTraining,
    ScaleMap,
    Tally,
    find_window,
    read_scale_map,
    write_map,
)
from bench.scales import session
from bench.scales.__main__ import main
from bench.scales.document import (
    SCALES,
    summarize_scale_map,
    tabulate_scale_map,
)
from bench.scales.gradients import (
    GRADIENT_KINDS,
    LIMITS,
    GradientCounter,
    attach,
    list_kept,
    round_gradients,
)
from tests.asked_for_tests import ask_once
from tests.pytest_for_tests import Capture, Patch
from tests.scales_for_tests import BATCH, answer, dataset, network

FORMATS = {"fp16": (torch.float16, 11, -14), "bf16": (torch.bfloat16, 8, -126)}
"""Significant bits with the leading one, and the exponent of the smallest normal number."""


def exact_fate(value: float, scale: float, format: str) -> Fate:
    """By rounding the exact product to a multiple of its last digit; Python rounds ties to even."""
    dtype, digits, least = FORMATS[format]
    if not math.isfinite(value):
        return Fate.OVERFLOWED
    x = abs(Fraction(value)) * Fraction(scale)
    if x == 0:
        return Fate.ZERO
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > x
    last = Fraction(2) ** (max(exponent, least) - digits + 1)
    rounded = round(x / last) * last
    if rounded == 0:
        return Fate.FLUSHED
    if rounded > Fraction(torch.finfo(dtype).max):
        return Fate.OVERFLOWED
    return Fate.SUBNORMAL if rounded < Fraction(2) ** least else Fate.NORMAL


def count(values: Tensor, format: str, scale: float) -> Tally:
    """The fates of ``values``, as the map counts them."""
    counter = GradientCounter(1, FORMATS[format][0], [scale], 1, [1], torch.device("cpu"))
    counter.step = 1
    counter(0, GradientKind.OUTPUT, values)
    return Tally(*counter.fates[0, 0, 0, 0].tolist())


def only(fates: Tally) -> Fate:
    (fate,) = (fate for fate in Fate if getattr(fates, fate.value))
    return fate


# ------------------------------------------------------------------------------------- arithmetic

UP, DOWN = math.inf, -math.inf


def after(value: float, towards: float = UP) -> float:
    """The next float32 number."""
    return float(np.nextafter(np.float32(value), np.float32(towards)))


@pytest.mark.parametrize(
    ("format", "value", "fate"),
    [
        ("fp16", 0.0, Fate.ZERO),
        ("fp16", 2.0**-25, Fate.FLUSHED),  # a tie, to even
        ("fp16", after(2.0**-25), Fate.SUBNORMAL),
        ("fp16", after(2.0**-14 - 2.0**-25, DOWN), Fate.SUBNORMAL),
        ("fp16", 2.0**-14 - 2.0**-25, Fate.NORMAL),  # a tie, and 2^-14 is even
        ("fp16", 65520.0, Fate.OVERFLOWED),  # a tie, and the largest is odd
        ("fp16", math.inf, Fate.OVERFLOWED),
        ("fp16", math.nan, Fate.OVERFLOWED),
        ("bf16", (2 - 2**-8) * 2.0**127, Fate.OVERFLOWED),
    ],
)
def test_the_edges_of_every_format(format: str, value: float, fate: Fate) -> None:
    assert only(count(torch.tensor([value, -value]), format, 1.0)) is fate
    if math.isfinite(value):
        assert (value >= LIMITS[FORMATS[format][0]]) is (fate is Fate.OVERFLOWED)
    scaled = torch.tensor([value * 2.0**-8])
    # the same at another scale, unless float32 cannot hold the unscaled value
    if float(scaled) * 2.0**8 == value:
        assert only(count(scaled, format, 256.0)) is fate


numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
near = st.builds(
    lambda sign, digits, exponent: sign * math.ldexp(digits, exponent - 23),
    st.sampled_from([1.0, -1.0]),
    # near a tie of a format as often as not
    st.integers(2**23, 2**24 - 1) | st.sampled_from([2**23, 2**23 + 1, 2**24 - 1, 15 * 2**20]),
    st.integers(-40, 20),
)
scales = st.integers(0, 24).map(lambda k: 2.0**k) | st.floats(2.0**-6, 2.0**24, width=32)


@given(st.lists(numbers | near, min_size=1, max_size=20), st.sampled_from([*FORMATS]), scales)
def test_fates_are_those_of_exact_rounding(values: list[float], name: str, scale: float) -> None:
    expected = [exact_fate(v, scale, name) for v in values]
    counted = count(torch.tensor(values), name, scale)
    assert counted == Tally(*map(expected.count, Fate))


def test_which_weights_gradients_stay_in_fp32() -> None:
    assert list_kept(nn.BatchNorm2d(4), "fp16") == [True]
    assert list_kept(nn.LayerNorm(4), "fp16-amp") == [True]
    assert list_kept(nn.LayerNorm(4), "fp16") == [False]
    assert list_kept(nn.Linear(1, 1), "bf16-amp") == [False]


# ------------------------------------------------------------------------------------ planted nets


def test_a_planted_window_is_found() -> None:
    """0.1 / 4 x 2^-20 is below 2^-25 and twice that is not; 0.9 x 2^-20 x 2^37 is above 65520."""
    case = answer()
    assert case.layers == ("head",)
    assert case.share(Fate.FLUSHED, 1.0, GradientKind.OUTPUT) == 0.9
    assert case.share(Fate.FLUSHED, 1.0, GradientKind.WEIGHT) == 0.0
    assert case.lost(1.0) == 0.9
    assert case.lost(2.0) == 0.0
    window = find_window(case)
    assert (window.low, window.high) == (2.0, 2.0**36)
    # 8 x 0.9 x 2^-20 x 2^33 fits, and twice that does not
    assert HEADROOM == 8
    assert window.use == 2.0**33
    assert min(case.overflows) == 2.0**37
    assert case.overflows[2.0**37] == 1
    # of the outputs 0.9 / 4 x 2^-20 overflows two powers of two later
    assert case.share(Fate.OVERFLOWED, 2.0**38, GradientKind.OUTPUT) == 0.0
    assert case.share(Fate.OVERFLOWED, 2.0**39, GradientKind.OUTPUT) == 0.1
    assert case.peaks == pytest.approx([0.9 * 2.0**-20] * 3, rel=1e-3)
    counted = sum(sum(vars(g.tally).values()) for g in case.gradients)
    assert counted == (BATCH * 10 + 20) * len(case.scales) * len(case.at)
    summary = summarize_scale_map(make_map(case))
    assert "use 2^33: scales from 2 to 2^36 are safe" in summary


def test_a_scale_that_overflows_in_its_own_training_is_not_recommended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trained in fp16, as on a GPU. Between the network's output and its loss a gradient is 2^20
    times what any layer has: fp16 overflows there from a scale of 2^19, which no rounding shows."""

    class Real(session.Session):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.real = True

    monkeypatch.setattr(session, "Session", Real)
    case = answer()
    assert find_window(case).use == 2.0**18
    overflowed = {one.setting: any(one.overflowed) for one in case.trainings}
    tried = [2.0**33, 2.0**30, 2.0**27, 2.0**24, 2.0**21]
    assert [*overflowed] == ["", "1", "128", *(f"{t:.0f}" for t in tried), "262144", "dynamic"]
    assert [one for one in overflowed if overflowed[one]] == [f"{t:.0f}" for t in tried]


def test_the_window_of_a_workload_is_that_of_its_gradients() -> None:
    """It has neither classes nor a count of what was right."""
    rows = answer("Rows", dataset="own", workload="scales_for_tests:Rows")
    images = answer()
    assert find_window(rows) == find_window(images)
    assert rows.gradients == images.gradients
    assert [training.setting for training in rows.trainings] == [
        "", "1", "128", "8589934592", "dynamic",
    ]  # fmt: skip
    assert "fp16, scales_for_tests:Rows, batch size 4: " in summarize_scale_map(make_map(rows))


def test_what_a_workload_keeps_in_fp32_is_not_rounded() -> None:
    model = nn.Sequential(nn.Sequential(nn.LayerNorm(4)), nn.Linear(4, 4))
    assert list_kept(model, "fp16") == [False, False]
    for keeps in (lambda m: isinstance(m, nn.LayerNorm), lambda m: m is model[0]):
        assert list_kept(model, "fp16", keeps) == [True, False]
    look, value = round_gradients([True, False], torch.float16), torch.tensor([1 + 2.0**-20])
    assert look(0, GradientKind.WEIGHT, value) is None
    assert look(1, GradientKind.WEIGHT, value) == 1.0


def test_the_trace_of_a_dynamic_scale() -> None:
    """0.9 x 8 overflows at 2^16, 2^15 and 2^14, and not at 2^13: three steps are skipped."""
    case = answer("large_gradients", steps=5)
    training = case.training("dynamic")
    assert training.scales == (2.0**16, 2.0**15, 2.0**14, 2.0**13, 2.0**13)
    assert training.overflowed == (True, True, True, False, False)
    row = tabulate(make_map(case))[1].rows[-1]
    assert row[-1].text == "3"


# ---------------------------------------------------------------------------------- on the device


def test_hooks_change_nothing() -> None:
    torch.manual_seed(0)
    model, x = network(), torch.randn(BATCH, 3, 32, 32)
    seen: list[int] = []

    def find_gradients() -> list[Tensor]:
        return [*torch.autograd.grad(model(x).sum(), model.parameters(), materialize_grads=True)]

    before = find_gradients()
    attach(model, lambda layer, *_: seen.append(layer))  # type: ignore[func-returns-value]
    assert all(map(torch.equal, before, find_gradients()))
    assert {*seen} == {0, 1, 2}
    assert len(seen) == 3 + 6, "one pass: three outputs, six parameters"


# ------------------------------------------------------------------------------------------- rules


def make_case(
    lost: Sequence[int] = (500, 20, 5, 0, 0), overflows: Sequence[int] = (4,), **settings: Any
) -> ScaleCase:
    """Scales 1, 2, 4, 8, 16 that lose so many of 1,000 values; those at some places overflow."""
    scales = tuple(2.0**k for k in range(len(lost)))
    gradients = tuple(
        Gradients(1, s, "conv", kind, Tally(7, n, 0, 1000 - n))
        for s, n in zip(scales, lost, strict=True)
        for kind in GRADIENT_KINDS
    )
    case = ScaleCase(
        model="dpn-small", dataset="synthetic", precision="fp16", batch_size=128, lr=0.01, seed=0,
        device="cpu", steps=2, at=(1,), layers=("conv",), scales=scales,
        overflows={scales[i]: 1 for i in overflows},
        peaks=(0.5, 2.0**-20), limit=65520.0,
        gradients=gradients,
        trainings=(
            ScaledTraining("", (2.0, 1.5), (1.0, 1.0), (False, False)),
            ScaledTraining("16", (2.0, math.nan), (16.0, 16.0), (True, False)),
        ),
    )  # fmt: skip
    return replace(case, **settings)


def tabulate(scales: ScaleMap) -> list[Table]:
    return list(SCALES.lay_out(tabulate_scale_map(scales)))


def make_map(*cases: ScaleCase, folder: Path = Path("map")) -> ScaleMap:
    return ScaleMap(folder, "python -m bench.scales", "2026-11-21T00:00:00+00:00", 0.01, {}, cases)


@pytest.mark.parametrize(
    ("lost", "overflows", "window"),
    [
        ((500, 20, 5, 0, 0), (4,), (4.0, 8.0, 4.0, True)),
        ((500, 500, 0, 0, 0, 0, 0), (6,), (4.0, 32.0, 8.0, False)),
        ((500, 500, 500, 500, 500), (4,), (1.0, 8.0, 2.0, False)),  # none is better than another
        ((500, 11, 0), (), (4.0, 4.0, 4.0, False)),
        ((500, 0, 0, 0), (2,), (2.0, 2.0, 2.0, True)),  # 8 has not been seen to overflow
        ((500, 0, 0), (0, 1, 2), (None, None, None, False)),
        ((0, 500, 0), (), (4.0, 4.0, 4.0, False)),  # no gap: 1 is below one that loses too much
    ],
)
def test_the_rule_of_the_window(
    lost: Sequence[int], overflows: Sequence[int], window: tuple[float | None, ...]
) -> None:
    found = find_window(case := make_case(lost, overflows))
    assert (found.low, found.high, found.use, found.narrow) == window
    line = "no scale is safe; try others with --scales, or use bf16-amp."
    if found.use is not None:
        narrow = ", or rather a dynamic scale, as the window is narrow" if found.narrow else ""
        line = f"use {found.use:g}{narrow}: scales from {found.low:g} to {found.high:g} are safe."
    assert summarize_scale_map(make_map(case)).endswith(f": {line}")


def test_of_several_steps_the_one_that_loses_most_counts() -> None:
    case = make_case((500, 0), ())
    calm = tuple(replace(g, step=2, tally=Tally(normal=1000)) for g in case.gradients)
    both = replace(case, at=(1, 2), gradients=case.gradients + calm)
    assert both.lost(1.0) == case.lost(1.0) > 0


def test_a_gradient_that_is_no_number_overflows_every_scale() -> None:
    case = answer("network", dataset(1), lr=1e30, steps=4, scales=(1.0, 128.0))
    assert case.diverged == 2
    assert case.overflows == {1.0: 2, 128.0: 2}


# ------------------------------------------------------------------------------------------ stored


def test_what_is_written_is_read(tmp_path: Path) -> None:
    diverged = make_case(precision="bf16", peaks=(0.5, math.nan))
    scales = make_map(make_case(), diverged, folder=tmp_path)
    write_map(scales)
    found = read_scale_map(tmp_path)
    assert found is not None
    # NaN is unequal to itself
    assert repr(found) == repr(scales)
    assert found.cases[0].gradients == scales.cases[0].gradients
    assert repr(found.cases[1].trainings) == repr(scales.cases[1].trainings)
    assert read_scale_map(tmp_path / "elsewhere") is None


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"version": 2, "cases": []}'])
def test_a_broken_map_is_refused_in_a_line(tmp_path: Path, capsys: Capture, text: str) -> None:
    write_map(make_map(make_case(), folder=tmp_path))
    (tmp_path / MAP).write_text(text)
    assert main(["--show", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path}: {MAP} is not as bench.scales writes it (")
    assert error.endswith("); run bench.scales again\n")
    assert len(error.splitlines()) == 1


# ----------------------------------------------------------------------------------------- command


@pytest.fixture(scope="module")
def answers() -> Callable[..., object]:
    return ask_once("scales_for_tests:network", "dpn-small")


@pytest.fixture
def asked(answers: Callable[..., object], monkeypatch: Patch) -> None:
    """The command does not start a process to ask."""
    monkeypatch.setattr("bench.sweep.preflight.examine", answers)


@pytest.mark.slow
@pytest.mark.usefixtures("asked")
def test_the_command_makes_a_map_and_shows_it(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "map"
    flags = [
        *("--dataset", "synthetic", "--model", "scales_for_tests:network", "--device", "cpu"),
        *("--batch-size", "8", "--precision", "fp16", "bf16", "--steps", "5"),
        *("--scales", "1", "100", "2^10", "2^24"),
    ]
    assert main([*flags, "--out", str(out)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert [p.name for p in out.iterdir()] == [MAP]
    scales = read_scale_map(out)
    assert [case.precision for case in scales.cases] == ["fp16", "bf16"]
    assert " ".join(summarize_scale_map(scales).split()) in output
    assert scales.environment["torch"] == torch.__version__
    case = scales.cases[0]
    assert case.scales == (1.0, 100.0, 1024.0, 2.0**24)
    use = find_window(case).use
    assert [t.setting for t in case.trainings] == ["", "1", "128", f"{use:g}", "dynamic"]
    assert "no loss scale is needed" in output
    assert "computed in fp32, then scaled and rounded" in output

    assert main(["--show", str(out)]) == 0
    assert " ".join(capsys.readouterr().out.split()) in output
    assert main([*flags, "--out", str(out)]) == 2
    assert "already; choose another" in capsys.readouterr().err


# ------------------------------------------------------------------------------- the worst layer


def make_layers(*shares: tuple[Tally, ...], **settings: Any) -> ScaleCase:
    """Scales 1, 2, 4, ..., and of each layer the tally of its outputs' gradients at each."""
    scales = tuple(2.0**k for k in range(len(shares[0])))
    names = ("stem", "head", "pool")[: len(shares)]
    gradients = tuple(
        Gradients(1, scale, name, GradientKind.OUTPUT, tally)
        for name, tallies in zip(names, shares, strict=True)
        for scale, tally in zip(scales, tallies, strict=True)
    )
    trainings = (ScaledTraining("", (2.0,), (1.0,), (False,)),)
    case = make_case([0] * len(scales), (), layers=names, gradients=gradients, trainings=trainings)
    return replace(case, **settings)


def test_a_small_layer_that_loses_everything_is_not_hidden() -> None:
    """Of ten million values of the stem none are lost, so 50,000 are half a per cent."""
    stem, dead, alive = Tally(normal=10**7), Tally(flushed=50_000), Tally(normal=50_000)
    case = make_layers((stem,) * 3, (dead, dead, alive))
    assert case.lost(1.0) < 0.01
    window = find_window(case)
    assert (window.low, window.high) == (4.0, 4.0)
    assert "use 4: scales from 4 to 4 are safe" in summarize_scale_map(make_map(case))
    judged = [row[-1].text for row in tabulate(make_map(case))[0].rows]
    assert judged == ["layer head loses too much", "layer head loses too much", "safe, use this"]


def test_half_of_a_layer_may_be_lost_beyond_its_best() -> None:
    stem, best = Tally(normal=10**7), Tally(flushed=300, normal=700)
    half, more = Tally(flushed=800, normal=200), Tally(flushed=801, normal=199)
    assert find_window(make_layers((stem,) * 2, (half, best))).low == 1.0
    assert find_window(make_layers((stem,) * 2, (more, best))).low == 2.0
    # the layer that is named is the one that loses most beyond its best, not most of all
    other = Tally(flushed=900, normal=100)
    case = make_layers((stem,) * 2, (more, best), (other, other))
    assert find_window(case).verdicts[1.0] == "layer head loses too much"


# --------------------------------------------------------------------------------- fp32 diverges


@pytest.mark.parametrize(
    "change",
    [
        {"trainings": (ScaledTraining("", (2.0, math.nan), (1.0, 1.0), (False, False)),)},
        {"peaks": (0.5, math.inf)},
    ],
)
def test_a_training_that_diverges_in_fp32_says_nothing_of_scales(change: dict[str, Any]) -> None:
    case = make_case((0, 0), (0, 1), **change)
    summary = summarize_scale_map(make_map(case))
    assert "training in fp32 itself diverged at step 2" in summary
    assert "use a smaller --lr." in summary
    # nor where it held at the steps that were looked at
    finite = replace(case, overflows={})
    assert find_window(finite).use is None
    judged = [row[-1].text for row in tabulate(make_map(finite))[0].rows]
    assert judged == ["fp32 itself diverged"] * 2
