"""`python tests/ray_sweep.py …`: a sweep on a Ray cluster whose cases last a moment each.

The lanes are real: started and lost as any others. Only nothing asks torch what they are.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.environment.asking import DeviceAnswer, ProcessAnswer
from bench.environment.host import describe_host
from bench.executors import Event, Job, Lane
from bench.executors.ray.caretaker import MARK
from bench.executors.ray.executor import RayExecutor
from bench.executors.subprocess import SubprocessExecutor
from bench.fingerprint import Fingerprint, parse_request
from bench.record import Measurement, Outcome, Status
from bench.worker.messages import PhaseEntered

CASE_S = 0.3

BEGUN = "begun-"
"""What a file in the cluster's folder is called that an actor touches when a case of it begins."""


class BriefExecutor(SubprocessExecutor):
    """Waits instead of training, unless it is stopped."""

    def examine(
        self, lane: Lane, devices: Sequence[str], models: Sequence[str], *_: Any
    ) -> ProcessAnswer:
        """Answer at once: each lane that starts would import torch, for 4 s of a core."""
        facts = {parse_request(name).subject: Fingerprint("0", "0", "0") for name in models}
        found = {name: DeviceAnswer({}) for name in devices}
        return ProcessAnswer(models=facts, devices=found, host=describe_host())

    def run(
        self, job: Job, on_event: Callable[[Event], None], stopping: Callable[[], bool]
    ) -> Outcome:
        """Announce a phase, leave word that a case has begun, then wait."""
        on_event(PhaseEntered("epoch"))
        (Path(os.environ[MARK]) / f"{BEGUN}{os.getpid()}").touch()
        until = time.monotonic() + CASE_S
        while time.monotonic() < until:
            if stopping():
                return Outcome(Status.INTERRUPTED, "the sweep was stopped")
            time.sleep(0.02)
        return Outcome(Status.OK, measurement=Measurement(epoch_time_s=CASE_S))


if __name__ == "__main__":
    from bench.sweep.__main__ import main

    RayExecutor.stations = "ray_sweep:BriefExecutor"
    sys.exit(main(sys.argv[1:]))
