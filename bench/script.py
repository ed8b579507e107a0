"""What a training script says of itself, one line a step: `step` and `epoch`.

Within `bench.sweep --command` they write to a file that the sweep reads; anywhere else they do
nothing. This module imports neither torch nor anything else that the script has not imported.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections import deque
from importlib.util import find_spec
from time import monotonic, perf_counter
from typing import Any

FILE = "BENCH_STEPS"
"""Environment variable: the file that a sweep reads the steps of a script from."""

_SAMPLED = 2  # the step whose operations are counted, from 0: a warm-up step, and the first is odd
_SLOTS = 1024  # losses on their way from a GPU


class _Teller:
    """Writes a line a step, once its time and loss are known, without waiting for the device.

    ``s MOMENT SECONDS ITEMS LOSS`` is a step: time.monotonic() when the script had taken it, its
    duration, its items, and its loss; ``-`` for what is not known. ``e`` is the end of an epoch and
    ``w`` the work of a step, both with JSON.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        # what each process counts is of as many as torchrun started
        self._processes = int(os.environ.get("WORLD_SIZE", "1"))
        self._cuda: Any = None
        self._began: Any = None  # the boundary before the next step: an event, or perf_counter()
        self._waiting: deque[tuple[float, Any, Any, int | None, Any]] = deque()
        self._losses: Any = None
        self._steps = 0
        self._sample: Any = None
        atexit.register(self.close)

    def step(self, items: int | None, loss: Any) -> None:
        if items is not None:
            items = int(items) * self._processes
        if self._sample is not None:
            self._end_sample()
        cuda = self._find_cuda()
        number: Any = None if loss is None else self._take_loss(loss, cuda)
        now = self._mark(cuda)
        self._waiting.append((monotonic(), self._began, now, items, number))
        self._began = now
        self._tell()
        self._steps += 1
        if self._steps == _SAMPLED:
            self._begin_sample()
            self._began = self._mark(cuda)

    def epoch(self, loss: Any, accuracy: Any) -> None:
        told = {"loss": loss, "accuracy": accuracy}
        values = {name: None if value is None else float(value) for name, value in told.items()}
        cuda = self._find_cuda()
        while self._waiting:
            self._tell(wait=True)
        self._write(f"e {json.dumps(values)}")
        self._began = self._mark(cuda)

    def close(self) -> None:
        while self._waiting:
            self._tell(wait=True)

    def _find_cuda(self) -> Any:
        torch = sys.modules.get("torch")
        if self._cuda is None and torch is not None and torch.cuda.is_initialized():
            self._cuda, self._began = torch.cuda, None
            self._losses = torch.empty(_SLOTS, pin_memory=True)
        return self._cuda

    def _mark(self, cuda: Any) -> Any:
        if cuda is None:
            return perf_counter()
        event = cuda.Event(enable_timing=True)
        event.record()
        return event

    def _take_loss(self, loss: Any, cuda: Any) -> Any:
        if not hasattr(loss, "detach"):
            return float(loss)
        if loss.numel() != 1:
            raise TypeError("bench.step(loss=…) takes a number, or a tensor of one element")
        if not loss.is_cuda:
            return float(loss.detach())
        if len(self._waiting) >= _SLOTS:
            self._tell(wait=True)
        slot = self._losses[self._steps % _SLOTS]
        slot.copy_(loss.detach().reshape(()), non_blocking=True)
        return slot

    def _tell(self, wait: bool = False) -> None:
        """Write the steps that the device has finished, or at least the first with ``wait``."""
        while self._waiting:
            moment, began, now, items, loss = self._waiting[0]
            if not isinstance(now, float):
                if wait:
                    now.synchronize()
                elif not now.query():
                    return
            self._waiting.popleft()
            wait = False
            took = "-" if began is None else _measure(began, now)
            number = "-" if loss is None else float(loss)
            self._write(f"s {moment} {took} {'-' if items is None else items} {number}")

    def _write(self, line: str) -> None:
        os.write(self._file, f"{line}\n".encode())

    def _begin_sample(self) -> None:
        if "torch" not in sys.modules:
            return
        ours = find_spec("bench")  # it imports nothing, and a bench.py may train where it does
        if ours is None or ours.origin != __file__.replace("script.py", "__init__.py"):
            why = "a bench.py beside the script hides the harness, which counts operations"
            self._write(f"w {json.dumps({'failure': why})}")
            return
        try:
            from bench.training.sample import Sample

            sample = Sample()
            sample.begin()
            self._sample = sample
        except Exception as error:  # the user's training goes on
            self._write(f"w {json.dumps({'failure': f'{type(error).__name__}: {error}'})}")

    def _end_sample(self) -> None:
        self._write(f"w {json.dumps(self._sample.end())}")
        self._sample = None


def _measure(began: Any, now: Any) -> float:
    if isinstance(now, float):
        return float(now - began)
    return float(began.elapsed_time(now)) / 1e3


_path = os.environ.get(FILE, "")
# of several processes that train together, the first one speaks
_teller = _Teller(_path) if _path and os.environ.get("RANK", "0") == "0" else None


def step(items: int | None = None, loss: Any = None) -> None:
    """Say that a training step has ended: call it once a step, after the optimizer's.

    In a sweep each step is timed from call to call, on a GPU by events of the current stream; no
    call waits for the device. Elsewhere it returns at once.

    Args:
        items: how many items the step was of, such as ``len(x)`` or tokens; under torchrun those of
            this process.
        loss: the step's loss, a number or a tensor of one element; it is read after the step.

    Raises TypeError in a sweep: the loss has several elements.
    """
    if _teller is not None:
        _teller.step(items, loss)


def epoch(loss: Any = None, accuracy: Any = None) -> None:
    """Say that an epoch, and its evaluation if there is one, has ended.

    What lies between its last step and this call is not counted in any step.

    Args:
        loss: what the evaluation found; a number or a tensor of one element.
        accuracy: its accuracy, as a fraction from 0 to 1.
    """
    if _teller is not None:
        _teller.epoch(loss, accuracy)
