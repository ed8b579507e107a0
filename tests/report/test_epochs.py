"""The table of epochs, from sweeps written through the store."""

from __future__ import annotations

import pytest

from bench.limits import STEADY
from bench.questions.epochs import write_trend


@pytest.mark.parametrize(("change", "said"), [(STEADY, False), (-STEADY, False), (0.03, True)])
def test_what_counts_as_steady(change: float, said: bool) -> None:
    assert bool(write_trend(change)) is said
