"""The harness beside a bare loop; tests/test_asv.py measures a pair for real."""

from __future__ import annotations

from typing import Any

from pytest_for_tests import Capture, Patch

from benchmarks import overhead


def test_the_turns_alternate(monkeypatch: Patch, capsys: Capture) -> None:
    """Whichever goes first may find a cooler machine."""
    order: list[str] = []

    def measure(side: str, seconds: float) -> Any:
        def measure(case: dict[str, Any]) -> dict[str, Any]:
            order.append(side)
            return {"seconds": seconds * len(order), "images": 8, "tensors": 100}

        return measure

    monkeypatch.setattr(overhead, "measure_bare", measure("bare", 1.0))
    monkeypatch.setattr(overhead, "measure_harness", measure("harness", 1.5))
    found = overhead.compare(overhead.read_case([]))
    assert order == ["bare", "harness", "harness", "bare", "bare", "harness"]
    assert found == 1.5 * 6 / 5
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "tensors: harness / bare = 1.0000 (1.0000 to 1.0000, pairs: 3)",
        "seconds: harness / bare = 1.8000 (1.1250 to 3.0000, pairs: 3)",
    ]
