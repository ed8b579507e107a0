"""Starting workers: forked from a server of `bench.worker.server`, or as new Python processes.

This process never imports torch, so the server is another process. There is one for each set of
`InheritedState`: properties that a process has from its start and that cannot be changed later. A
command that starts other commands one after another can lend them a server.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO

from bench.processes import LENT, command_module
from bench.text import last_line
from bench.worker.server import REFUSED, STALE

LATE = (
    "BENCH_*",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
)
"""Environment variables that are read when they are used, and so may differ between a server and
its workers. All others may be read when Python starts or torch is imported: if one differs, another
server is used. `OMP_NUM_THREADS` and `PYTORCH_ALLOC_CONF` are read when their library is loaded."""

_ANSWER_S = 120.0  # the first worker waits until torch is imported, perhaps from a slow disk


def _start_cold(descriptor: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return _start([str(descriptor), str(os.getpid())], [descriptor], environment)


def _start(
    arguments: Sequence[str],
    descriptors: Sequence[int],
    environment: Mapping[str, str],
    folder: str | None = None,
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command_module("bench.worker", *arguments),
        # a server gets pipes too: Python checks the kind of its streams when it starts
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=descriptors,
        start_new_session=True,
        env=environment,
        cwd=folder,
    )


@dataclass(frozen=True)
class InheritedState:
    """Properties that a process has from its start: environment, folder, cores and niceness. The
    OpenMP library counts the cores when it is loaded."""

    environment: frozenset[tuple[str, str]]
    folder: str
    cores: frozenset[int]
    niceness: int

    @classmethod
    def take(cls, environment: Mapping[str, str], folder: str = "") -> InheritedState:
        """Return those of a process that this thread starts with ``environment`` in ``folder``."""
        fixed = frozenset(
            (name, value)
            for name, value in environment.items()
            if not any(fnmatchcase(name, late) for late in LATE)
        )
        cores, niceness = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)
        return cls(fixed, folder or str(Path.cwd()), frozenset(cores), niceness)

    @property
    def name(self) -> str:
        """A hash of them, the same in every process."""
        told = (sorted(self.environment), self.folder, sorted(self.cores), self.niceness)
        return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


class UnfitError(Exception):
    """A server cannot fork a worker; if ``stale``, a new server could."""

    def __init__(self, why: str, stale: bool = False) -> None:
        super().__init__(why)
        self.stale = stale


class Server:
    """A running `bench.worker.server`, whose environment may differ from its workers'. They end
    with this object, or with this process, and so does a server that this process started."""

    def __init__(self, control: socket.socket, process: subprocess.Popen[bytes] | None) -> None:
        self._control, self._said = control, deque[bytes](maxlen=16)
        self._hearing: threading.Thread | None = None
        if process is not None:
            heard = (process.stdout, self._said)
            self._hearing = threading.Thread(target=_hear, args=heard, daemon=True)
            self._hearing.start()
        self.close = weakref.finalize(self, _end, control, process)

    @classmethod
    def start(
        cls, environment: Mapping[str, str], folder: str | None = None, *lent: socket.socket
    ) -> Server:
        """Start a server in this or another folder; clients of ``lent`` may send requests too."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            numbers = [one.fileno() for one in (theirs, *lent)]
            return cls(ours, _start(["serve", *map(str, numbers)], numbers, environment, folder))

    @classmethod
    def borrow(cls, around: InheritedState) -> Server | None:
        """Return the server with these surroundings that is lent to this process; None if none."""
        place = Path(os.environ.get(LENT, "").partition(" ")[2])
        if place.name != around.name:
            return None
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            control.connect(str(place))
        except OSError:  # the server has ended
            control.close()
            return None
        return cls(control, None)

    def fork(self, descriptor: int, environment: Mapping[str, str]) -> Forked:
        """Fork a worker that writes messages to ``descriptor``. Raises UnfitError: that is not
        possible; it says why. Raises OSError: there is no process or memory to spare just now."""
        stdin, ours = os.pipe()
        theirs, output = os.pipe()
        told, tell = os.pipe()
        try:
            given = [stdin, output, descriptor, tell]
            socket.send_fds(self._control, [json.dumps(dict(environment)).encode()], given)
        except OSError as error:  # the server has ended
            for one in (ours, theirs, told):
                os.close(one)
            raise UnfitError(self._describe_end(), stale=True) from error
        finally:
            for one in (stdin, output, tell):
                os.close(one)
        forked = Forked(self, os.fdopen(ours, "wb"), os.fdopen(theirs, "rb"), told)
        answer = forked.hear(_ANSWER_S)
        if answer is not None and answer.isdecimal():
            forked.pid = int(answer)
            return forked
        forked.release()
        if answer is None:
            raise UnfitError(f"no answer within {_ANSWER_S:g} s")
        if answer.startswith(REFUSED):
            number = int(answer.removeprefix(REFUSED))
            raise OSError(number, os.strerror(number))
        raise UnfitError(answer or self._describe_end(), stale=answer in ("", STALE))

    def _describe_end(self) -> str:
        if self._hearing is None:
            return "it ended"
        self._hearing.join(1.0)  # its last output may still be on the way
        return f"it ended: {last_line(b''.join(self._said).decode(errors='replace'))}"


class Forked:
    """A process forked by a server, with the part of `subprocess.Popen` that a `Worker` uses."""

    pid = 0

    def __init__(self, server: Server, stdin: IO[bytes], stdout: IO[bytes], told: int) -> None:
        self._server = server  # keeps it alive as long as its workers
        self.stdin, self.stdout = stdin, stdout
        self.returncode: int | None = None
        self._told, self._buffer = told, b""

    def hear(self, seconds: float | None) -> str | None:
        """Return the server's next line; empty if the server has ended, None after a timeout."""
        until = None if seconds is None else time.monotonic() + seconds
        said = select.poll()
        said.register(self._told, select.POLLIN)
        while b"\n" not in self._buffer:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not said.poll(None if left is None else 1000 * left):
                return None
            if not (data := os.read(self._told, 1 << 12)):
                return ""
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if (line := self.hear(timeout)) is None:
                raise subprocess.TimeoutExpired("bench.worker", timeout or 0.0)
            # if its server has ended, the kernel has killed it
            self.returncode = int(line) if line else -signal.SIGKILL
            os.close(self._told)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def release(self) -> None:
        """Close the descriptors for a worker that was never forked."""
        os.close(self._told)
        self.stdin.close()
        self.stdout.close()


Process = subprocess.Popen[bytes] | Forked


class Servers:
    """A starter of workers: with a server for each `InheritedState`, or, if ``cold``, each worker
    as a new Python process."""

    def __init__(self, cold: bool) -> None:
        self.cold = cold or sys.platform != "linux"
        self._running: dict[InheritedState, Server] = {}
        self._unfit: dict[InheritedState, str] = {}
        self._lock = threading.Lock()

    def launch(self, environment: Mapping[str, str]) -> tuple[Process, str, int]:
        """Start a worker. Return it, why it was started cold if it should not have been, and the
        descriptor to read its messages from."""
        reader, writer = os.pipe()
        try:
            return *self._launch(writer, environment), reader
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)

    def _launch(self, descriptor: int, environment: Mapping[str, str]) -> tuple[Process, str]:
        if self.cold:
            return _start_cold(descriptor, environment), ""
        around = InheritedState.take(environment)
        for fresh in (False, True):
            with self._lock:
                if around in self._unfit:
                    break
                server = self._find(around, environment, fresh)
            try:
                return server.fork(descriptor, environment), ""
            except UnfitError as error:
                with self._lock:
                    if self._running.get(around) is server:
                        del self._running[around]
                    if fresh or not error.stale:
                        self._unfit[around] = str(error)
        why = f"the worker was started cold, because of its server: {self._unfit[around]}"
        return _start_cold(descriptor, environment), why

    def prepare(self, environment: Mapping[str, str]) -> None:
        """Start the server of a worker that this thread is about to launch."""
        if not self.cold:
            with self._lock:
                self._find(InheritedState.take(environment), environment)

    def close(self) -> None:
        for server in self._running.values():
            server.close()
        self._running.clear()

    def _find(
        self, around: InheritedState, environment: Mapping[str, str], fresh: bool = False
    ) -> Server:
        if around not in self._running:
            # servers with another environment are needed no more; they end with their last worker
            self._running = {
                other: server
                for other, server in self._running.items()
                if (other.environment, other.folder) == (around.environment, around.folder)
            }
            borrowed = None if fresh else Server.borrow(around)
            self._running[around] = borrowed or Server.start(environment)
        return self._running[around]


@contextmanager
def lend_server(environment: Mapping[str, str], folder: Path) -> Iterator[dict[str, str]]:
    """Run a server for the workers of commands that are started with ``environment`` in ``folder``.
    Yield the variable that lends it to them. It saves each the import of torch, 2 to 5 s."""
    if sys.platform != "linux":
        yield {}
        return
    name = InheritedState.take(environment, str(folder.resolve())).name
    with tempfile.TemporaryDirectory(prefix="bench-workers-") as place:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as lent:
            lent.bind(f"{place}/{name}")
            lent.listen()
            server = Server.start(environment, str(folder), lent)
        try:
            yield {LENT: f"{os.getpid()} {place}/{name}"}
        finally:
            server.close()


def _hear(stream: IO[bytes], said: deque[bytes]) -> None:
    with stream:
        while data := os.read(stream.fileno(), 1 << 16):
            said.append(data)


def _end(control: socket.socket, process: subprocess.Popen[bytes] | None) -> None:
    control.close()
    if process is not None:
        process.kill()
        process.wait()
        process.stdin.close()  # type: ignore[union-attr]
