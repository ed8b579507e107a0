"""Machines that the doctor examined, or that were made up, in ``recordings/``."""

from __future__ import annotations

import json
from pathlib import Path

from bench.environment.machine import Machine
from bench.plain import read_value

RECORDINGS = Path(__file__).parent / "recordings"


def read_machine(file: Path) -> Machine:
    """Read the facts in what ``python -m bench.doctor --json`` printed."""
    machine: Machine = read_value(Machine, json.loads(file.read_text())["facts"])
    return machine
