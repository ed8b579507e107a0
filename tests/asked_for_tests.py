"""One process that is asked about the networks of a test file, for all its commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bench.environment.examination import ProcessAnswer, ask


def ask_once(*subjects: str) -> Callable[..., ProcessAnswer]:
    """What is found of the CPU and of ``subjects``, as `bench.environment.examination` would say
    it; KeyError for anything else."""
    whole = ask(["cpu"], subjects)

    def ask_again(devices: object, models: list[str]) -> ProcessAnswer:
        assert devices == ["cpu"]
        return replace(whole, models={name: whole.models[name] for name in models})

    return ask_again
