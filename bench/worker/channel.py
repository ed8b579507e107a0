"""The worker's side of the messages to its parent; steps are reported without waiting."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from bench.processes import read_peak_memory
from bench.record import EpochRow
from bench.worker.messages import END, EpochEnded, Message, Phase, PhaseEntered, StepTaken, encode

if TYPE_CHECKING:
    import torch


_REPORT_EVERY_S = 0.2


class Channel:
    """The worker's end of the conversation with its parent. Without a parent, it says nothing;
    ``judged``, the parent is asked after each epoch if there is to be another."""

    def __init__(self, descriptor: int | None = None, judged: bool = False) -> None:
        self._out = None if descriptor is None else os.fdopen(descriptor, "wb", buffering=0)
        self._judged = judged

    def send(self, message: Message) -> None:
        if self._out:
            line = encode(message)
            while line:  # a pipe takes part of a long one
                line = line[self._out.write(line) :]

    def enter(self, phase: Phase, epoch: int = 0) -> None:
        if self._out:
            self.send(PhaseEntered(phase, epoch))
            sys.stdin.readline()

    def ask(self, row: EpochRow) -> bool:
        """Say what an epoch came to; whether another is to follow."""
        if not (self._out and self._judged):
            return True
        self.send(EpochEnded(row))
        return sys.stdin.readline() != END.decode()


class Reporter:
    """Reports step and running loss without stopping the device: the loss is copied to pinned
    memory behind the step that made it, and read once it is there."""

    def __init__(self, channel: Channel, device: torch.device, phase: Phase, steps: int) -> None:
        self._channel, self._phase, self._steps = channel, phase, steps
        self._cuda = device.type == "cuda"
        self._due = time.perf_counter()
        self._pending: tuple[int, torch.Tensor, torch.cuda.Event] | None = None

    def __call__(self, index: int, loss: torch.Tensor) -> None:
        if self._pending is not None:
            step, copy, event = self._pending
            if event.query():
                self._send(step, float(copy))
                self._pending = None
        elif time.perf_counter() >= self._due:
            if self._cuda:
                self._pending = self._copy(index, loss)
            else:
                self._send(index, float(loss))

    def _copy(self, index: int, loss: torch.Tensor) -> tuple[int, torch.Tensor, torch.cuda.Event]:
        import torch

        copy = torch.empty((), pin_memory=True)
        copy.copy_(loss, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return index, copy, event

    def _send(self, step: int, loss: float) -> None:
        memory = read_memory(self._cuda)
        self._channel.send(StepTaken(self._phase, step, self._steps, loss, memory))
        self._due = time.perf_counter() + _REPORT_EVERY_S


def read_memory(cuda: bool) -> int:
    """What the allocator holds, or on a CPU what the process held at most."""
    if cuda:
        import torch

        return torch.cuda.memory_reserved()
    return read_peak_memory()
