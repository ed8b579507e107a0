"""Steps under torch's profiler, of a user's script too.

A script's process loads this with the torch and the Python that it has, see `bench.workers.script`.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from bench.base.processes import pause_collection
from bench.schema.work import STEPS_REGION


class Recording:
    """Some steps under torch's profiler, whose trace is written to ``file``: `start`, a step, which
    includes the profiler's start, `begin`, the steps, `end`. All in one thread."""

    def __init__(self, device: torch.device, file: Path) -> None:
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._device, self._open = device, ExitStack()
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
            on_trace_ready=lambda found: found.export_chrome_trace(str(file)),
            record_shapes=True,
        )

    def start(self) -> None:
        self._open.enter_context(self._profiler)

    def begin(self) -> None:
        self._synchronize()
        self._profiler.step()
        self._open.callback(self._synchronize)
        self._open.enter_context(record_function(STEPS_REGION))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def end(self) -> None:
        """Write the trace; where it has not begun, none."""
        with pause_collection():  # it would scan all events again and again
            self._open.close()
