"""Fixtures of the report's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.planted.sweeps import make_fake_cards, make_profiled, make_quick, make_switches


@pytest.fixture(scope="session")
def fake_cards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of `make_fake_cards`."""
    return make_fake_cards(tmp_path_factory.mktemp("fake"))


@pytest.fixture(scope="session")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `make_quick`."""
    return make_quick(tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="session")
def switches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `make_switches`."""
    return make_switches(tmp_path_factory.mktemp("switches"))


@pytest.fixture(scope="session")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `make_profiled`."""
    return make_profiled(tmp_path_factory.mktemp("profiled"))


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command line: exit code, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        from bench.report.__main__ import main

        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run
