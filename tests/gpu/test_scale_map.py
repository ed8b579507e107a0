"""On a card: the map of loss scales there, without a wait for the device."""

from __future__ import annotations

import pytest
import torch

from bench.results.scale_map import find_window
from tests.scales_for_tests import answer

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


def test_a_planted_window_is_found_by_rounding_and_by_trainings_of_fp16() -> None:
    """Between the network's output and its loss a gradient is 2^20 times what any layer has, so
    that fp16 overflows there first, from a scale of 2^19: no rounding of a layer's shows it."""
    case = answer(device="cuda")
    window = find_window(case)
    assert (window.low, window.use, min(case.overflows)) == (2.0, 2.0**18, 2.0**21)
    for scale in ("128", "262144"):
        assert not any(case.training(scale).overflowed)
    assert all(case.training(str(2**21)).overflowed)
