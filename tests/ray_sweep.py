"""`python tests/ray_sweep.py …`: a sweep on a Ray cluster whose cases last a moment each.

The tasks are real: started and lost as any others. Only nothing asks torch what the nodes are.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ray_for_tests import MARK

from bench.environment.examination import DeviceAnswer, ProcessAnswer
from bench.environment.host import describe_host
from bench.executors import Event
from bench.executors.ray import RayExecutor
from bench.executors.subprocess import SubprocessExecutor
from bench.fingerprint import Fingerprint, parse_request
from bench.record import Measurement, Outcome, Status
from bench.worker.messages import Job, Lane

CASE_S = 0.3

BEGUN = "begun-"
"""What a file in the cluster's folder is called that a task's process touches as a case begins."""


class BriefExecutor(SubprocessExecutor):
    """Waits instead of training."""

    def examine(
        self, lane: Lane, devices: Sequence[str], models: Sequence[str], *_: Any
    ) -> ProcessAnswer:
        """Answer at once: each process of a task would have torch imported, for 4 s of a core."""
        facts = {parse_request(name).subject: Fingerprint("0", "0", "0") for name in models}
        found = {name: DeviceAnswer({}) for name in devices}
        return ProcessAnswer(models=facts, devices=found, host=describe_host())

    def run(
        self, job: Job, on_event: Callable[[Event], None], stopping: Callable[[], bool]
    ) -> Outcome:
        """Leave word that a case has begun, then wait."""
        if MARK in os.environ:
            (Path(os.environ[MARK]) / f"{BEGUN}{os.getpid()}").touch()
        time.sleep(CASE_S)
        return Outcome(Status.OK, measurement=Measurement(epoch_time_s=CASE_S))


if __name__ == "__main__":
    from bench.sweep.__main__ import main

    RayExecutor.executor = "ray_sweep:BriefExecutor"
    sys.exit(main(sys.argv[1:]))
