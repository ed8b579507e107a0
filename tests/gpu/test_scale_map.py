"""On a card: the map of loss scales there, without a wait for the device."""

from __future__ import annotations

import pytest
import torch
from scales_for_tests import answer, network

from bench.precision import PRECISIONS
from bench.scale_map import find_window
from bench.scales.gradients import Counter, attach, find_layers
from bench.training.loop import Training

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


def test_a_planted_window_is_found_by_rounding() -> None:
    """And the trainings are those of fp16 itself, in which 128 holds."""
    case = answer(device="cuda")
    window = find_window(case)
    assert (window.low, window.high, min(case.overflows)) == (2.0, 2.0**36, 2.0**37)
    assert not any(case.training("128").overflowed)


def test_the_device_is_never_waited_for() -> None:
    """CUDA itself says so where a step synchronises."""
    model = network()
    training = Training(model, PRECISIONS["fp32"], CUDA, lr=0.01, loss_scale=128.0)
    counter = Counter(len(find_layers(model)), torch.float16, [1.0, 2.0**16], 1, [1], CUDA)
    x, y = torch.randn(8, 3, 32, 32, device=CUDA), torch.zeros(8, dtype=torch.int64, device=CUDA)
    attach(training.model, counter)
    counter.step = 1
    torch.cuda.set_sync_debug_mode("error")
    try:
        training.step((x, y))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(counter.fates.sum()) > 0
