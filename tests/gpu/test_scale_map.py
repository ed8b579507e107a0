"""On a card: the map of loss scales as trained there, without a wait for the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scales_for_tests import answer, ask_of, dataset, network

from bench.precision import PRECISIONS
from bench.scale_map import Fate, Kind, Way, find_window
from bench.scales.formats import FORMATS, Cells
from bench.scales.gradients import Comparison, Counter, attach, find_layers
from bench.training.loop import Training

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("precision", ["fp16", "fp16-amp"])
def test_a_planted_window_is_found_as_trained(precision: str) -> None:
    question = ask_of(
        "small_gradients",
        device="cuda",
        way=Way.TRAINED,
        precisions=(precision,),
        scales=tuple(2.0**k for k in range(21)),
        train=("524288", "dynamic"),
    )
    case = answer(question)
    assert case.share(Fate.FLUSHED, 1.0, Kind.OUTPUT) == 0.9
    window = find_window(case)
    assert (window.low, window.high, min(case.overflows)) == (2.0, 2.0**18, 2.0**19)


def test_a_planted_window_is_found_by_rounding() -> None:
    case = answer(ask_of("small_gradients", device="cuda"))
    window = find_window(case)
    assert (window.low, window.high, min(case.overflows)) == (2.0, 2.0**36, 2.0**37)


def test_both_ways_agree_but_for_rounding() -> None:
    scales = (1.0, 128.0, 2.0**20)
    question = ask_of("network", device="cuda", at=(1,), steps=1, scales=scales)
    rounded, trained = (
        answer(replace(question, way=way), dataset(1)) for way in (Way.ROUNDED, Way.TRAINED)
    )
    for scale in (1.0, 128.0):
        for kind in Kind:
            assert trained.share(Fate.FLUSHED, scale, kind) == pytest.approx(
                rounded.share(Fate.FLUSHED, scale, kind), abs=0.02
            )


def test_the_device_is_never_waited_for() -> None:
    """CUDA itself says so where a step synchronises."""
    model = network()
    layers = len(find_layers(model))
    training = Training(model, PRECISIONS["fp32"], CUDA, lr=0.01, loss_scale=128.0)
    counter = Counter(layers, Cells([*FORMATS], [1.0, 2.0**16]), 2, [1, 2], CUDA)
    comparison = Comparison(layers, 1, FORMATS["fp16"], CUDA)
    x, y = torch.randn(8, 3, 32, 32, device=CUDA), torch.zeros(8, dtype=torch.int64, device=CUDA)
    attach(training.model, counter)
    end = attach(training.model, comparison.remember)
    counter.step = 1
    training.step((x, y))
    end()
    attach(training.model, comparison.look)
    comparison.begin()
    counter.step = 2
    torch.cuda.set_sync_debug_mode("error")
    try:
        training.step((x, y))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(counter.counts.sum()) > 0
    assert int(comparison.fates.sum()) > 0
