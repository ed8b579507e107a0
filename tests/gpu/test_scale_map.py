"""On a card: the map of loss scales there, without a wait for the device."""

from __future__ import annotations

import pytest
import torch

from bench.results.scale_map import find_window
from tests.scales_for_tests import answer

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


def test_a_planted_window_is_found_by_rounding() -> None:
    """And the trainings are those of fp16 itself, in which 128 holds."""
    case = answer(device="cuda")
    window = find_window(case)
    assert (window.low, window.high, min(case.overflows)) == (2.0, 2.0**36, 2.0**37)
    assert not any(case.training("128").overflowed)
