"""A process that has imported torch and the harness, and forks workers on request.

Starting Python and importing torch takes longer than everything else in a short case. The server
does it once, for all the workers that it forks.

A worker shares with its server, and so with earlier and later workers, the imported modules, the
layout of the address space, and Python's hash seed for strings. Everything else is its own. Memory
is copied on write, so nothing that a worker does there reaches the server or another worker. A
worker has its own session and process group, standard streams, environment, signals, limits,
threads, device context and random numbers. It dies with the server, and the server dies with the
process that started it, however that ends: that process holds the only other end of a socket.

The server itself computes nothing, draws no random number, has a single thread and opens no GPU.
Before each fork it checks this, and that the files it imported are unchanged; if not, it says so
and forks nothing more. It never imports a user's module.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from bench.processes import die_with_parent, pause_collection

MODULES = (
    "bench.models.dpn",
    "bench.worker.measurement",
    "psutil",
    "scipy.special",  # for the confidence interval of an epoch's time: 0.15 s
    "torch._dynamo",  # imported by the first optimizer: takes as long as torch itself
)
"""Modules that are imported, with all that they import, before a worker knows its case."""

STALE = "stale"
"""The server's answer if a file that it imported has changed."""

REFUSED = "errno "
"""The server's answer, with a number, if the system has no process or memory to spare just now."""

_DEVICES = ("/dev/nvidia", "/dev/dxg", "/dev/kfd", "/dev/dri/render")
_REQUEST_BYTES = 1 << 20


@dataclass(frozen=True)
class WorkerStart:
    """Where a worker writes its messages, and when it started, in s."""

    descriptor: int
    began: float


@dataclass(frozen=True)
class _Child:
    pid: int
    told: int  # descriptor to write its return code to
    asker: int  # descriptor of the connection that requested it


def preload() -> None:
    """Import `MODULES`, and have the garbage collector ignore their objects from then on."""
    with pause_collection():
        for name in MODULES:
            import_module(name)
        gc.freeze()


def serve(
    descriptor: int, lent: int | None = None, *, inherited: Mapping[str, str]
) -> WorkerStart | None:
    """Fork a worker for each request on the socket ``descriptor``, until its other end is closed.
    Return a `WorkerStart` in each worker, and None in the server at its end. Processes that connect
    to the socket ``lent`` may send requests too; their workers end with their connection.

    A request is one message: an environment as JSON, and file descriptors for the worker's standard
    input, its output, its messages, and the server's answers. The answer is a line with the
    worker's process id, and another once it has ended: its return code, negative for a signal. If
    no worker can be forked, it is `STALE` or the reason, which are permanent, or `REFUSED`.
    ``inherited`` is the environment before anything was imported.
    """
    _end_threads()
    with selectors.DefaultSelector() as selector:
        return _Server(descriptor, lent, selector).serve(inherited)


class _Server:
    """The connections that may send requests, by descriptor, and their workers, by pidfd."""

    def __init__(
        self, descriptor: int, lent: int | None, selector: selectors.DefaultSelector
    ) -> None:
        self._imported, self._selector = _look_at_files(), selector
        self._control = socket.socket(fileno=descriptor)
        self._listener = None if lent is None else socket.socket(fileno=lent)
        self._asking, self._children = dict[int, socket.socket](), dict[int, _Child]()
        for one in filter(None, (self._control, self._listener)):
            self._hear(one)

    def serve(self, inherited: Mapping[str, str]) -> WorkerStart | None:
        while True:
            for key, _ in self._selector.select():
                if child := self._children.pop(key.fd, None):
                    self._reap(key.fd, child)
                elif (asker := self._asking[key.fd]) is self._listener:
                    self._hear(asker.accept()[0])
                else:
                    request, given, _, _ = socket.recv_fds(asker, _REQUEST_BYTES, 4)
                    if not request and asker is self._control:
                        if self._listener is not None:
                            _remove(Path(self._listener.getsockname()))
                        return None
                    if not request:
                        self._leave(key.fd)
                    elif birth := self._fork(key.fd, request, given, inherited):
                        return birth

    def _hear(self, asker: socket.socket) -> None:
        self._asking[asker.fileno()] = asker
        self._selector.register(asker, selectors.EVENT_READ)

    def _reap(self, watched: int, child: _Child) -> None:
        """Send a worker's return code to whoever requested it."""
        self._selector.unregister(watched)
        os.close(watched)
        _, status = os.waitpid(child.pid, 0)
        _answer(child.told, str(os.waitstatus_to_exitcode(status)))
        os.close(child.told)

    def _leave(self, number: int) -> None:
        """End the workers of a connection that has closed."""
        self._selector.unregister(number)
        self._asking.pop(number).close()
        for child in self._children.values():
            if child.asker == number:
                os.kill(child.pid, signal.SIGKILL)

    def _fork(
        self, asker: int, request: bytes, given: list[int], inherited: Mapping[str, str]
    ) -> WorkerStart | None:
        """Fork a worker if possible, and answer the request; return its `WorkerStart` in it."""
        told, server, pid = given.pop(), os.getpid(), None
        answer = _refuse(self._imported)
        if not answer:
            try:
                pid = os.fork()
                answer = str(pid)
            except OSError as error:
                answer = f"{REFUSED}{error.errno}"
        if pid == 0:
            began = time.monotonic()
            die_with_parent(server)
            for connection in self._asking.values():
                connection.close()
            theirs = (child.told for child in self._children.values())
            for one in (told, *self._children, *theirs):
                os.close(one)
            _adopt(json.loads(request), inherited)
            return WorkerStart(_settle(given), began)
        _answer(told, answer)
        if pid is None:
            os.close(told)
        else:
            watched = os.pidfd_open(pid)
            self._children[watched] = _Child(pid, told, asker)
            self._selector.register(watched, selectors.EVENT_READ)
        for one in given:
            os.close(one)
        return None


def _remove(place: Path) -> None:
    """Remove a socket and its folder, in case the process that made them was killed."""
    with suppress(OSError):
        place.unlink()
        place.parent.rmdir()


def _adopt(environment: Mapping[str, str], inherited: Mapping[str, str]) -> None:
    """Set the environment of a new Python process, and keep what imports have changed in it."""
    for name in inherited.keys() - environment.keys():
        os.environ.pop(name, None)
    for name, value in environment.items():
        if inherited.get(name) != value:
            os.environ[name] = value


def _settle(given: list[int]) -> int:
    import numpy as np

    os.setsid()
    stdin, output, messages = given
    for stream, place in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(stream, place)
    os.close(stdin)
    os.close(output)
    np.random.seed()  # Python's own reseeds itself; torch's starts the same in every process
    return messages


def _answer(descriptor: int, line: str) -> None:
    with suppress(BrokenPipeError):  # the requester has ended
        os.write(descriptor, f"{line}\n".encode())


def _end_threads() -> None:
    """Have libraries end the threads that they started on import. OpenBLAS, which comes with numpy,
    does so before a fork, and starts them again when it needs them."""
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)


def _refuse(imported: dict[str, tuple[int, int]]) -> str:
    """Return why this process cannot fork a worker; empty if it can."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:  # noqa: PTH208
        return f"it has {threads} threads"
    for place in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(place.readlink()).startswith(_DEVICES):
                return f"it has opened {place.readlink()}"
    if sys.modules["torch"].cuda.is_initialized():
        return "it has initialised CUDA"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:  # some containers forbid it
        return f"it cannot watch a process: {error.strerror}"
    return "" if _look_at_files() == imported else STALE


def _look_at_files() -> dict[str, tuple[int, int]]:
    found = {}
    for module in list(sys.modules.values()):
        if file := getattr(module, "__file__", None):
            with suppress(OSError):
                stat = os.stat(file)  # noqa: PTH116  (of 2,000 files in 5 ms)
                found[file] = (stat.st_mtime_ns, stat.st_size)
    return found
