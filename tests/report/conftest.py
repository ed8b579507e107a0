"""Fixtures of the report's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command line: exit code, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        from bench.report.__main__ import main

        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run
