"""What a training script says of itself, one line a step: `step` and `epoch`.

Within `bench.sweep --command` they write to a file that the sweep reads; anywhere else they do
nothing. This module imports neither torch nor anything else that the script has not imported.
"""

from __future__ import annotations

import atexit
import json
import operator
import os
import sys
from collections import deque
from time import monotonic
from typing import Any, NamedTuple

FILE = "BENCH_STEPS"
"""Environment variable: the file that a sweep reads the steps of a script from."""

SAMPLED = 2
"""The step whose operations are counted, from 0: one of the warm-up, and the first is odd."""


class _Mark(NamedTuple):
    """A boundary between steps: the time.monotonic() of the call, and an event on a GPU."""

    moment: float
    event: Any


class _Teller:
    """Writes a line of JSON a step, once its time and loss are known, without waiting for the
    device: of processes that train together the first one, and of others the one that was first.

    ``["step", moment, seconds, items, loss]``: time.monotonic() when the script had taken it, and
    null for what is not known. ``["epoch", {…}]`` is the end of an epoch with what was found then,
    and ``["work", {…}]`` the work of a step.
    """

    def __init__(self, path: str) -> None:
        self._path, self._processes = path, 1
        self._file: int | None = None  # open once there is a step
        self._silent = False
        self._began: _Mark | None = None  # the boundary before the next step
        self._waiting: deque[tuple[_Mark | None, _Mark, int | None, Any]] = deque()
        self._steps = 0
        self._sample: Any = None

    def step(self, items: int | None, loss: Any) -> None:
        if self._file is None and not self._silent:
            self._open()
        if self._file is None:
            return
        # what each process counts is of as many as train together
        count = None if items is None else _read_items(items) * self._processes
        if self._sample is not None:
            self._end_sample()
        number = None if loss is None else _take_loss(loss)
        now = _mark()
        self._waiting.append((self._began, now, count, number))
        self._began = now
        self._tell()
        self._steps += 1
        if self._steps == SAMPLED and "torch" in sys.modules:
            self._begin_sample()
            self._began = _mark()

    def epoch(self, loss: Any, accuracy: Any) -> None:
        told = {"loss": loss, "accuracy": accuracy}
        values = {
            name: None if value is None else _read_number(f"epoch({name}=…)", value)
            for name, value in told.items()
        }
        share = values["accuracy"]
        if share is not None and not 0 <= share <= 1:
            raise ValueError(
                f"bench.epoch(accuracy=…) takes a fraction from 0 to 1, and this is {share:g}"
            )
        if self._file is None:
            return
        self._tell(wait=True)
        self._write("epoch", values)
        self._began = _mark()

    def _open(self) -> None:
        rank = int(os.environ.get("RANK", "0"))
        self._processes = int(os.environ.get("WORLD_SIZE", "1"))
        distributed = sys.modules.get("torch.distributed")
        if distributed and distributed.is_available() and distributed.is_initialized():
            rank, self._processes = distributed.get_rank(), distributed.get_world_size()
        self._silent = rank != 0
        if self._silent:
            return
        try:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            atexit.register(self._tell, wait=True)
        except FileExistsError:
            self._silent = True

    def _tell(self, wait: bool = False) -> None:
        """Write the steps that the device has finished, or all, for which it waits."""
        while self._waiting:
            began, now, items, loss = self._waiting[0]
            if wait and now.event is not None:
                now.event.synchronize()
            elif now.event is not None and not now.event.query():
                return
            self._waiting.popleft()
            took = None if began is None else now.moment - began.moment
            if began is not None and began.event is not None and now.event is not None:
                took = float(began.event.elapsed_time(now.event)) / 1e3
            self._write("step", now.moment, took, items, None if loss is None else float(loss))

    def _write(self, *told: Any) -> None:
        assert self._file is not None
        os.write(self._file, f"{json.dumps(told)}\n".encode())

    def _begin_sample(self) -> None:
        try:
            from bench.training.counting import Sample

            sample = Sample()
            sample.begin()
            self._sample = sample
        except Exception as error:  # the user's training goes on
            self._fail_sample(error)

    def _end_sample(self) -> None:
        sample, self._sample = self._sample, None
        try:
            self._write("work", sample.end() | {"processes": self._processes})
        except Exception as error:  # such as that of a step that another thread ends
            self._fail_sample(error)

    def _fail_sample(self, error: Exception) -> None:
        why = f"no operations were counted: {type(error).__name__}: {error}"
        self._write("work", {"failure": why})


def _mark() -> _Mark:
    event, torch = None, sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
    return _Mark(monotonic(), event)


def _take_loss(loss: Any) -> Any:
    """Return a number, or where a GPU will have written it once the step has ended."""
    if not hasattr(loss, "detach") or loss.numel() != 1 or not loss.is_cuda:
        return _read_number("step(loss=…)", loss)
    torch = sys.modules["torch"]
    slot = torch.empty((), device="cpu", pin_memory=True)
    # the event of this step is on the current device, and says nothing of another's copies
    here = loss.get_device() == torch.cuda.current_device()
    return slot.copy_(loss.detach().reshape(()), non_blocking=here)


def _read_items(items: Any) -> int:
    number = operator.index(items) if hasattr(items, "__index__") else 0
    if number < 1:
        raise ValueError(
            "bench.step(items=…) takes a whole number of at least 1, such as len(x), and this is "
            f"{items!r:.60}"
        )
    return number


def _read_number(of: str, value: Any) -> float:
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise TypeError(
            f"bench.{of} takes a number or a tensor of one element, and this is a "
            f"{type(value).__name__}{shape}"
        ) from None


_path = os.environ.get(FILE, "")
_teller = _Teller(_path) if _path else None


def step(items: int | None = None, loss: Any = None) -> None:
    """Say that a training step has ended: call it once a step, after the optimizer's.

    In a sweep each step is timed from call to call, on a GPU by events of the current stream; no
    call waits for the device. Elsewhere it returns at once.

    Args:
        items: how many items the step was of, such as ``len(x)`` or tokens; under torchrun those of
            this process.
        loss: the step's loss, a number or a tensor of one element; it is read after the step.

    Raises ValueError or TypeError in a sweep: one of them is something else.
    """
    if _teller is not None:
        _teller.step(items, loss)


def epoch(loss: Any = None, accuracy: Any = None) -> None:
    """Say that an epoch, and its evaluation if there is one, has ended.

    What lies between its last step and this call is not counted in any step.

    Args:
        loss: what the evaluation found; a number or a tensor of one element.
        accuracy: its accuracy, as a fraction from 0 to 1.

    Raises ValueError or TypeError in a sweep: one of them is something else.
    """
    if _teller is not None:
        _teller.epoch(loss, accuracy)
