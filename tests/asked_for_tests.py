"""One process that is asked about the networks of a test file, for all its commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bench.networks.workloads import OWN
from bench.schema.case import Case
from bench.workers.examination import Machine, examine
from bench.workers.fingerprint import Request


def read(subject: str) -> Case:
    """A case of a network, or of a workload that is told by
    `bench.workers.fingerprint.name_subject`."""
    name = subject.removeprefix("workload:")
    return Case(name) if name == subject else Case(name, OWN, workload=name)


def ask_once(*subjects: str) -> Callable[..., Machine]:
    """What is found of the CPU and of ``subjects``, as `bench.workers.examination.examine` would
    say it; KeyError for anything else."""
    whole = examine(["cpu"], [Request(read(subject)) for subject in subjects])

    def ask_again(devices: object, models: list[Request]) -> Machine:
        assert devices == ["cpu"]
        return replace(whole, models={one.subject: whole.models[one.subject] for one in models})

    return ask_again
