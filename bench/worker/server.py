"""A process that has imported torch and the harness, and forks a worker whenever it is asked to.

To start Python and to import torch takes longer than all else that a short case needs. The server
has done it once; what it forks goes on from there.

A worker shares with its server, and so with the workers before and after it: the modules as they
were imported, the layout of the address space, and the seed by which Python hashes strings. All
else is its own. What it writes to memory is copied first, so that nothing it does there reaches the
server or another worker. It has its session and process group, standard streams, environment,
signals, limits, threads, device context and random numbers. It dies with the server, and the server
dies with the process that started it, however that ends: it holds the only other end of a socket.

The server itself computes nothing, draws no random number, has no thread beside the first, and
opens no GPU. Before each fork it looks whether that is so, and whether the files that it imported
are still as they were; if not, it says so and forks nothing more. It never imports a user's module.
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
    "scipy.special",  # for the interval of an epoch's time: 0.15 s
    "torch._dynamo",  # which the first optimizer imports: as long as torch itself
)
"""What is imported before a worker knows its case, with all that these import."""

STALE = "stale"
"""What the server answers where a file that it imported was changed."""

REFUSED = "errno "
"""What it answers where the system has no process or memory to spare just now, and a number."""

_DEVICES = ("/dev/nvidia", "/dev/dxg", "/dev/kfd", "/dev/dri/render")
_REQUEST_BYTES = 1 << 20


@dataclass(frozen=True)
class Birth:
    """What a worker has from the start: where to write messages, and when it began, in s."""

    descriptor: int
    began: float


@dataclass(frozen=True)
class _Child:
    pid: int
    told: int  # where to say how it ended
    asker: int  # who asked for it


def preload() -> None:
    """Import `MODULES`, and have the garbage collector pass over them from then on."""
    with pause_collection():
        for name in MODULES:
            import_module(name)
        gc.freeze()


def serve(
    descriptor: int, lent: int | None = None, *, inherited: Mapping[str, str]
) -> Birth | None:
    """Fork a worker for each request on the socket ``descriptor``, until its other end is closed;
    what each worker starts with, and in the server None, at its end. Whoever connects to the socket
    ``lent`` may ask too, and with that connection the workers asked for by it end.

    A request is one message: an environment as JSON, and file descriptors: the worker's standard
    input, its output, where it writes messages, and where the server answers. The answer is a line:
    the worker's process id, and another once it has ended: its return code, negative for a signal.
    Or it is `STALE` or why no worker can be forked, and that stays so; or `REFUSED`. ``inherited``
    is the environment before anything was imported.
    """
    _end_threads()
    with selectors.DefaultSelector() as selector:
        return _Server(descriptor, lent, selector).serve(inherited)


class _Server:
    """The connections of those who may ask, and the workers that they asked for, each by the
    descriptor that tells of it."""

    def __init__(
        self, descriptor: int, lent: int | None, selector: selectors.DefaultSelector
    ) -> None:
        self._imported, self._selector = _look_at_files(), selector
        self._control = socket.socket(fileno=descriptor)
        self._listener = None if lent is None else socket.socket(fileno=lent)
        self._asking, self._children = dict[int, socket.socket](), dict[int, _Child]()
        for one in filter(None, (self._control, self._listener)):
            self._hear(one)

    def serve(self, inherited: Mapping[str, str]) -> Birth | None:
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
        """Tell how a worker ended."""
        self._selector.unregister(watched)
        os.close(watched)
        _, status = os.waitpid(child.pid, 0)
        _tell(child.told, str(os.waitstatus_to_exitcode(status)))
        os.close(child.told)

    def _leave(self, number: int) -> None:
        """End what was asked for by who is gone."""
        self._selector.unregister(number)
        self._asking.pop(number).close()
        for child in self._children.values():
            if child.asker == number:
                os.kill(child.pid, signal.SIGKILL)

    def _fork(
        self, asker: int, request: bytes, given: list[int], inherited: Mapping[str, str]
    ) -> Birth | None:
        """Fork a worker, where that may be, and answer who asked; in it, what it starts with."""
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
            return Birth(_settle(given), began)
        _tell(told, answer)
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
    """Remove a socket and its folder, which who made them could not when it was killed."""
    with suppress(OSError):
        place.unlink()
        place.parent.rmdir()


def _adopt(environment: Mapping[str, str], inherited: Mapping[str, str]) -> None:
    """Have the environment that a new Python would have, with what imports have changed in it."""
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
    np.random.seed()  # as Python's own generator does; torch's starts the same in every process
    return messages


def _tell(descriptor: int, line: str) -> None:
    with suppress(BrokenPipeError):  # who asked has ended
        os.write(descriptor, f"{line}\n".encode())


def _end_threads() -> None:
    """Have libraries end the threads that they started as they were imported. OpenBLAS, which numpy
    brings, does so before a fork, and starts them again where it needs them."""
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)


def _refuse(imported: dict[str, tuple[int, int]]) -> str:
    """Why this process can fork no worker; empty where it can."""
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
    except OSError as error:  # some containers keep it from their processes
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
