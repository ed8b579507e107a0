"""Fixtures of the report's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.planted.sweeps import CARDS, Folders


@pytest.fixture(scope="session")
def fake_cards(planted: Folders) -> list[Path]:
    """Three sweeps of three cards, in which every outcome occurs."""
    return [planted[f"card-{number}"] for number, _ in enumerate(CARDS, 1)]


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command line: exit code, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        from bench.report.__main__ import main

        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run
