"""What a training script says of itself, one line a step: `step` and `epoch`.

Within `bench.sweep --command` they write to a file that the sweep reads; anywhere else they do
nothing. This module imports neither torch nor anything else that the script has not imported.
"""

from __future__ import annotations

import atexit
import gc
import json
import operator
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import prod
from operator import itemgetter
from time import monotonic
from typing import Any, NamedTuple

FILE = "BENCH_STEPS"
"""Environment variable: the file that a sweep reads the steps of a script from."""

LOST = "bench: the sweep is told of no more steps"
"""What the output of a script says, with the reason, where the steps cannot be told."""

SAMPLED = 2
"""The step whose operations are counted, from 0: one of the warm-up, and the first is odd."""


class _Mark(NamedTuple):
    """A boundary between steps: the time.monotonic() of the call, and an event on the GPU of this
    index."""

    moment: float
    event: Any = None
    device: int = -1


class _Teller:
    """Writes a line of JSON a step, once its time and loss are known, without waiting for the
    device: of processes that train together the first one, and of others the one that was first.
    Each leaves a file of its own beside it, by its pid, so that they can be counted, with the UUID
    of its GPU.

    ``["who", {…}]`` is the process, and again where another GPU is used. ``["step", moment,
    seconds, items, loss]``: time.monotonic() when the script had taken it, and null for what is not
    known. ``["epoch", {…}]`` is the end of an epoch with what was found then, and ``["work", {…}]``
    the work of a step. Nothing but what the script gives wrong ends its training: where the file
    cannot be written, `LOST` is printed, and no more is told.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: int | None = None  # open once there is a step
        self._silent = False
        self._device = -1  # the GPU that trains; -1 for none, which has no events
        self._began: _Mark | None = None  # the boundary before the next step
        self._waiting: deque[tuple[_Mark | None, _Mark, int | None, Any]] = deque()
        self._steps = 0
        self._sample: Any = None

    def step(self, items: int | None, loss: Any) -> None:
        count = None if items is None else _read_items(items)
        if loss is not None:
            _refuse_loss(loss)
        with self._guard():
            self._step(count, loss)

    def _step(self, items: int | None, loss: Any) -> None:
        if self._file is None and not self._silent:
            self._open(loss)
        if self._file is None:
            return
        if self._sample is not None:
            self._end_sample()
        if (device := _find_gpu(loss, self._device)) != self._device:
            self._device = device
            self._write("who", self._describe())
        number = None if loss is None else _take_loss(loss)
        now = _mark(self._device)
        self._waiting.append((self._began, now, items, number))
        self._began = now
        self._tell()
        self._steps += 1
        if self._steps == SAMPLED and "torch" in sys.modules:
            self._begin_sample()
            self._began = _mark(self._device)

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
        with self._guard():
            if self._file is not None:
                self._tell(wait=True)
                self._write("epoch", values)
                self._began = _mark(self._device)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the user's training goes on
            self._file, self._silent = None, True
            self._waiting.clear()
            with suppress(Exception):
                if self._sample is not None:
                    self._sample.end()
            with suppress(Exception):
                print(f"{LOST}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    def _open(self, loss: Any) -> None:
        self._silent = _read_group()[0] != 0
        self._device = _find_gpu(loss, self._device)
        own = os.open(f"{self._path}.{os.getpid()}", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.write(own, (self._name_card() or "").encode())
        finally:
            os.close(own)
        if self._silent:
            return
        try:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            self._silent = True
        else:
            self._write("who", self._describe())
            atexit.register(self._finish)

    def _describe(self) -> dict[str, Any]:
        """Return which process this is, among how many that take other items, whether torch knows
        their number, and which GPU it trains on."""
        _, processes, known = _read_group()
        card = self._name_card()
        return {"pid": os.getpid(), "processes": processes, "known": known, "card": card}

    def _name_card(self) -> str | None:
        if self._device < 0:
            return None
        properties = sys.modules["torch"].cuda.get_device_properties(self._device)
        return f"GPU-{properties.uuid}" if hasattr(properties, "uuid") else None

    def _finish(self) -> None:
        with self._guard():
            if self._file is not None:
                self._tell(wait=True)

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
            if began and began.event is not None and began.device == now.device:
                took = float(began.event.elapsed_time(now.event)) / 1e3
            self._write("step", now.moment, took, items, None if loss is None else float(loss))

    def _write(self, *told: Any) -> None:
        assert self._file is not None
        os.write(self._file, f"{json.dumps(told)}\n".encode())

    def _begin_sample(self) -> None:
        try:
            from bench.training.counting import Sample

            self._sample = Sample()
            self._sample.begin()
        except Exception as error:  # the user's training goes on
            self._fail_sample(error)

    def _end_sample(self) -> None:
        sample, self._sample = self._sample, None
        try:
            self._write("work", sample.end(self._device))
        except Exception as error:  # such as that of a step that another thread ends
            self._fail_sample(error)

    def _fail_sample(self, error: Exception) -> None:
        self._sample = None
        why = f"no operations were counted: {type(error).__name__}: {error}"
        self._write("work", {"failure": why})


def _read_group() -> tuple[int, int, bool]:
    """Return this process's rank, how many processes take items of their own, and whether torch
    says so: a variable may be left over from another program."""
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        rank, size = distributed.get_rank(), distributed.get_world_size()
        return rank, max(1, size // _count_sharing()), True
    size = os.environ.get("WORLD_SIZE", "")
    return 0, int(size) if size.isdecimal() and int(size) else 1, False


_SHARING = ("tp", "tensor", "cp", "context", "sp", "sequence", "pp", "pipeline", "pipe", "stage")
"""Names of the dimensions of a mesh whose processes work on the same items."""


def _count_sharing() -> int:
    """Return how many processes work on the same items, as tensor-parallel ones do, by what knows
    of it: Megatron or DeepSpeed, or the named dimensions of torch's largest DeviceMesh."""
    world = sys.modules["torch.distributed"].get_world_size()
    for module, function in (
        ("megatron.core.parallel_state", "get_data_parallel_world_size"),
        ("deepspeed.utils.groups", "_get_data_parallel_world_size"),
    ):
        with suppress(Exception):  # it is there, and not in use
            if module in sys.modules:
                return int(world // getattr(sys.modules[module], function)())
    meshes = sys.modules.get("torch.distributed.device_mesh")
    found = [one for one in gc.get_objects() if meshes and type(one) is meshes.DeviceMesh]
    named = [(one.size(), one) for one in found if one.mesh_dim_names]
    if not named:
        return 1
    _, largest = max(named, key=itemgetter(0))
    sizes = zip(largest.mesh_dim_names, largest.shape, strict=True)
    return prod(size for name, size in sizes if name.lower().strip("_0123456789") in _SHARING)


def _find_gpu(loss: Any, before: int) -> int:
    """Return the index of the GPU that trains: that of the loss, or the one that holds this
    process's tensors; the current one, if several do. -1 is none: an idle GPU times nothing."""
    if getattr(loss, "is_cuda", False):
        return int(loss.get_device())
    torch = sys.modules.get("torch")
    if before >= 0 or torch is None or not torch.cuda.is_initialized():
        return before
    held = [i for i in range(torch.cuda.device_count()) if torch.cuda.memory_allocated(i)]
    current = int(torch.cuda.current_device())
    return current if current in held or not held[:1] else held[0]


def _mark(device: int) -> _Mark:
    if device < 0:
        return _Mark(monotonic())
    cuda = sys.modules["torch"].cuda
    event = cuda.Event(enable_timing=True)
    event.record(cuda.current_stream(device))
    return _Mark(monotonic(), event, device)


def _refuse_loss(loss: Any) -> None:
    if not getattr(loss, "is_cuda", False) or loss.numel() != 1:
        _read_number("step(loss=…)", loss)


def _take_loss(loss: Any) -> Any:
    """Return a number, or where a GPU will have written it once the step has ended: its event is on
    the same GPU."""
    if not getattr(loss, "is_cuda", False):
        return float(loss.detach() if hasattr(loss, "detach") else loss)
    slot = sys.modules["torch"].empty((), device="cpu", pin_memory=True)
    return slot.copy_(loss.detach().reshape(()), non_blocking=True)


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
