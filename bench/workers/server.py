"""A process of its own for each case, model, device and rate, forked from one that has torch.

Starting Python and importing torch takes longer than everything else in a short case. A server
does it once for all that are forked from it. This process never imports torch, nor does the server
a user's module.

A process shares with its server, and so with earlier and later ones, the imported modules, the
layout of the address space, and Python's hash seed for strings. Everything else is its own: memory
is copied on write, and it has its own session, streams, environment, signals, limits, threads,
device context and random numbers; what it may look at of itself, as its script, is as if it had
been started as one.

Nothing outlives what it was started for. Above the server is its keeper, a process without torch. A
process dies with its server, and the server with its keeper; what one of them leaves behind, in a
session of its own too, becomes the keeper's child, which ends it. The keeper ends all when its
server ends, or the process that started it, however that ends: no other holds the other end of the
socket that requests come by. Then it puts back the power limits that this process had set.

Before it does anything else, each process makes sure that its server has a single thread and no
driver of a GPU open, and that the files it imported are unchanged.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing.util
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn

from bench.base import processes
from bench.base.processes import (
    adopt_orphans,
    die_with_parent,
    end_children,
    hold_to,
    leave,
    pause_collection,
    remove_left,
    stand_for,
    usable_cpus,
)
from bench.base.text import last_line
from bench.machine.power import restore_limits

MODULES = (
    "bench.networks.dpn",
    "bench.training.trial",
    "bench.training.device_rates",
    "bench.workers.measurement",
    "psutil",
    "scipy.special",  # for the confidence interval of an epoch's time: 0.15 s
    "torch._dynamo",  # imported by the first optimizer: takes as long as torch itself
)
"""What a server imports, with all that they import."""

LATE = (
    "BENCH_*",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
)
"""Environment variables that are read when they are used, and so may differ between a server and
its processes. All others may be read when Python starts or torch is imported: if one differs,
another server is used. `OMP_NUM_THREADS` and `PYTORCH_ALLOC_CONF` are read when their library is
loaded."""

_ANSWER_S = 120.0  # the first process waits until torch is imported, perhaps from a slow disk
_POLL_S = 0.1
_END_S = 0.005
_GRACE_S = 3.0
_STACK = b"most recent call first"  # how faulthandler begins a stack
_DUMPED_S = 5.0  # the longest wait for stacks: on a busy machine 0.5 s was too short
_LOG_BYTES = 1_000_000  # kept of the start and of the end of a process's output


class MessageError(ValueError):
    """What was read is not a message: a user's code may have written it."""


class EndedError(Exception):
    """A process ended and sent nothing; the last line of its output."""


class Process:
    """A process that calls ``place``, a ``package.module:function``, with its end of a `Pipe` and
    ``arguments``. What the function returns is the return code; None is 0.

    It runs on ``cores`` (empty for those of this process), with the environment ``variables``
    added. The first and the last megabyte of its output are kept in the file ``log``. With ``cold``
    it imports all by itself, as a new Python process; ``note`` says why it does without having been
    asked to. Raises OSError: there is no process or memory to spare just now.
    """

    def __init__(
        self,
        place: str,
        *arguments: Any,
        variables: Mapping[str, str] | None = None,
        cores: Sequence[int] = (),
        log: Path | None = None,
        cold: bool = False,
    ) -> None:
        self.note = ""
        self._code: int | None = None
        self._recent = bytearray()  # the end of its output
        environment = {**os.environ, **(variables or {})}
        with hold_to(cores):
            self._start(_Task(place, environment, sys.path, str(Path.cwd())), cold)
        about = (self._output, log, self._recent)
        self._log = threading.Thread(target=_keep_log, args=about, daemon=True)
        self._log.start()
        self.send(arguments)

    def _start(self, task: _Task, cold: bool) -> None:
        server = None
        for _ in range(0 if cold else 2):  # another one if it has ended, or a file has changed
            server = _find_server(task, instead_of=server)
            if not (why := server.unfit or self._fork(server, task)):
                return
            if server.unfit:
                break
        if server:
            server.unfit = why
            self.note = f"the worker was started cold, because of its server: {why}"
        if why := self._fork(_Server(task, warm=False), task):
            raise OSError(f"no process can be started: {why}")

    def _fork(self, server: _Server, task: _Task) -> str:
        """Fork it from a server. Return why that is not possible; empty if it is."""
        self.connection, theirs = Pipe()
        self._output, output = Pipe(duplex=False)
        self._status, status = Pipe(duplex=False)  # its id, and then its return code
        self._server = server  # which lives as long as its processes
        why = "it ended"
        with suppress(EOFError, OSError):
            with theirs, output, status:
                given = [one.fileno() for one in (theirs, output, status)]
                socket.send_fds(server.requests, [b"?"], given)
            self.connection.send(task)
            if wait([self._status], _ANSWER_S):
                self.pid = self._status.recv()
                why = self.connection.recv()
            else:
                why = f"no answer within {_ANSWER_S:g} s"
        if why:
            self._close()
            self._output.close()
        return why

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.end(patiently=False)

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return what it sends next. Raises TimeoutError; EndedError: it ended instead, even if a
        child of it holds the pipe open; and MessageError."""
        if not wait([self.connection, self._status], timeout_s):
            raise TimeoutError
        if self.connection.poll():
            try:
                return self.connection.recv()
            except (EOFError, OSError):  # it ended, perhaps in the middle of a message
                pass
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                raise MessageError(f"the worker sent what is no message: {why}") from error
        self._log.join(_GRACE_S)
        raise EndedError(last_line(self._recent.decode(errors="replace")))

    def send(self, content: object) -> None:
        with suppress(OSError):  # it has ended
            self.connection.send(content)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return its return code, negative for a signal; None if it runs on."""
        if self._code is None and wait([self._status], timeout_s):
            try:
                self._code = self._status.recv()
            except (OSError, EOFError):  # its server has ended, and the kernel it
                self._code = -signal.SIGKILL
        return self._code

    def dump_stacks(self) -> None:
        """Have the stacks of all its threads written to the log."""
        begin, until = len(self._recent), time.monotonic() + _DUMPED_S
        self._signal(signal.SIGUSR1)
        while _STACK not in self._recent[begin:] and time.monotonic() < until:
            time.sleep(0.5)
        time.sleep(0.5)  # on a busy machine 0.1 s was too short

    def kill(self) -> None:
        """End it and its process group at once."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self, patiently: bool) -> int:
        """Let it end by itself if ``patiently``, else send SIGTERM; then SIGKILL its group. Return
        its return code, negative for a signal."""
        if not patiently:
            self._signal(signal.SIGTERM)
        self.wait(_GRACE_S)
        self.kill()
        code = self.wait()
        self._close()
        self._log.join(_GRACE_S)
        assert code is not None
        return code

    def _close(self) -> None:
        self.connection.close()
        self._status.close()

    def _signal(self, number: int) -> None:
        if self.wait(0) is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def call(place: str, *arguments: Any, timeout_s: float, **settings: Any) -> Any:
    """Return the first that a `Process` sends, and end it. Raises as `Process.receive`."""
    with Process(place, *arguments, **settings) as process:
        return process.receive(timeout_s)


def _keep_log(stream: Connection, path: Path | None, recent: bytearray) -> None:
    """Keep the first and the last megabyte of a process's output, the last in ``recent``.

    If the log cannot be written, reading goes on; otherwise the process would block for ever."""
    written = beyond = 0
    with stream, ExitStack() as opened:
        log: IO[bytes] | None = None
        while data := os.read(stream.fileno(), 1 << 16):
            recent += data
            del recent[:-_LOG_BYTES]
            if written >= _LOG_BYTES:
                beyond += len(data)
                continue
            written += len(data)
            with suppress(OSError):
                # opened at the first output: without any, no log; each attempt appends to it
                log = log or opened.enter_context((path or Path(os.devnull)).open("ab", 0))
                log.write(data)
        if log and beyond:
            with suppress(OSError):
                log.write(b"\n[%d bytes left out]\n" % max(0, beyond - len(recent)))
                log.write(recent[-beyond:])


# ------------------------------------------------------------------------------------- its server


class _Server:
    """A running server; if ``warm``, of processes that find all of `MODULES` imported. It ends with
    this object, and with it all that is forked from it."""

    unfit = ""  # why nothing is to be forked from it

    def __init__(self, task: _Task, warm: bool) -> None:
        remove_left()
        self.requests, theirs = socket.socketpair()
        code = f"import sys; sys.path[:] = {task.path}; from bench.workers.server import serve; "
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, *_list_flags(), "-c", f"{code}serve{(theirs.fileno(), warm)}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=task.environment,
                cwd=task.folder,
            )
        self._close = weakref.finalize(self, _end, self.process, self.requests)


def _list_flags() -> list[str]:
    """Return the options that this Python was started with, such as ``-O``. The function is private
    to the standard library, and was run with Python 3.11, 3.12, 3.13 and 3.14."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


_servers: dict[tuple[frozenset[tuple[str, str]], frozenset[int]], _Server] = {}
_finding = threading.Lock()


def _find_server(task: _Task, instead_of: _Server | None) -> _Server:
    """Return the server of a task: one for each set of variables that are not read late, and of
    cores, which OpenMP counts when it is loaded."""
    early = frozenset(
        (name, value)
        for name, value in task.environment.items()
        if not any(fnmatchcase(name, late) for late in LATE)
    )
    key = early, frozenset(usable_cpus())
    with _finding:
        found = _servers.get(key)
        if found is None or found is instead_of:
            for other in [other for other in _servers if other[0] != early]:
                del _servers[other]  # it ends with its last process
            found = _servers[key] = _Server(task, warm=True)
    return found


def _end(process: subprocess.Popen[bytes], requests: socket.socket) -> None:
    requests.close()
    try:
        process.wait(_GRACE_S)  # it ends everything beneath it, and then itself
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# ---------------------------------------------------------------------- in the server, and beneath

_inherited: Mapping[str, str] = {}  # the environment before anything was imported
_imported: Mapping[str, tuple[int, int]] = {}
_keeper = _server = 0  # their ids

DRIVERS = ("/dev/nvidia", "/dev/dxg", "/dev/kfd")
"""How the names of files begin that a process has open once it uses a GPU: NVIDIA's on Linux and
under WSL, and AMD's."""


def preload() -> None:
    """Import `MODULES`, and have the garbage collector ignore their objects from then on."""
    with pause_collection():
        for name in MODULES:
            import_module(name)
        gc.freeze()


def serve(number: int, warm: bool) -> NoReturn:
    """Fork the server, and be its keeper until it ends, or the other end of the socket of this
    ``number`` is closed: then end everything."""
    global _keeper
    _keeper, starter = os.getpid(), os.getppid()
    adopt_orphans()
    if not (server := os.fork()):
        die_with_parent(_keeper)
        _fork_on_request(socket.socket(fileno=number), warm)
    closed = select.poll()
    closed.register(number, 0)  # for its end alone, and not for requests
    while server in end_children(but=server) and not closed.poll(1000 * _POLL_S):
        pass
    until = time.monotonic() + _GRACE_S
    while end_children() and time.monotonic() < until:
        time.sleep(_END_S)
    restore_limits(of=starter, wait_s=_GRACE_S)
    os._exit(0)


def _fork_on_request(requests: socket.socket, warm: bool) -> NoReturn:
    global _inherited, _imported, _server
    _inherited, _server, processes.forked = dict(os.environ), os.getpid(), True
    if warm:
        preload()
        # libraries end the threads that they started on import before a fork, and start them again
        # when they need them, as does OpenBLAS, which comes with numpy
        if not (pid := os.fork()):
            os._exit(0)
        os.waitpid(pid, 0)
        files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
        _imported = _look_at(filter(None, files))
    statuses: dict[int, Connection] = {}  # where the id and the return code of a process are told
    woken, waking = socket.socketpair()
    waking.setblocking(False)
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waking.fileno())
    while ready := wait([requests, woken]):
        if woken in ready:
            woken.recv(1 << 16)
            for pid in [*statuses]:
                if (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    with statuses.pop(pid) as status, suppress(OSError):
                        status.send(os.waitstatus_to_exitcode(ended[1]))
        if requests in ready:
            _, given, *_ = socket.recv_fds(requests, 1, 3)
            if not given:
                break  # nobody is left to ask
            for number in given:
                os.set_inheritable(number, False)
            ends: list[Connection] = [Connection(one) for one in given]
            connection, output, status = ends
            if not (pid := os.fork()):
                try:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, before)
                    for one in (requests, woken, waking):
                        one.close()
                    for pipe in (status, *statuses.values()):
                        pipe.close()
                    _become(connection, output)
                finally:
                    os._exit(1)
            connection.close()
            output.close()
            statuses[pid] = status
            with suppress(OSError):
                status.send(pid)
    os._exit(0)


def _refuse() -> str:
    """Return why this process should not have been forked from its server; empty if it may."""
    if not _imported:
        return ""
    for pid in (_server, _keeper):  # whose threads are those of before the server was forked
        if (threads := len(os.listdir(f"/proc/{pid}/task"))) > 1:  # noqa: PTH208
            return f"it has {threads} threads"
    # in a fork torch.cuda.is_initialized() is False whatever its parent did, and of a driver that
    # another library opened torch knows nothing
    for number in os.listdir(folder := f"/proc/{_server}/fd"):  # noqa: PTH208
        with suppress(OSError):
            if (file := os.readlink(f"{folder}/{number}")).startswith(DRIVERS):  # noqa: PTH115
                return f"it has a GPU's driver open ({file})"
    return "" if _look_at(_imported) == _imported else "a file that it imported has changed"


def _look_at(files: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return when each file was changed, and its size."""
    found = {}
    for file in files:
        with suppress(OSError):
            stat = os.stat(file)  # noqa: PTH116  (of 2,000 files in 5 ms)
            found[file] = (stat.st_mtime_ns, stat.st_size)
    return found


@dataclass(frozen=True)
class _Task:
    """What a new process is to call, and where."""

    place: str
    environment: dict[str, str]
    path: list[str]
    folder: str


def _become(connection: Connection, output: Connection) -> NoReturn:
    """Become the process of the task that comes first, in a fork of a server."""
    die_with_parent(_server)
    adopt_orphans()  # a daemon that it starts lives as long as it does
    task: _Task = connection.recv()
    why = _refuse()
    connection.send(why)
    if why:
        os._exit(1)
    os.setsid()
    with suppress(OSError):  # what `top` calls it, in 15 letters; on Linux
        name = task.place.partition(":")[0].rpartition(".")[2]
        Path("/proc/self/comm").write_text(f"bench.{name}")
    for name in _inherited.keys() - task.environment.keys():
        os.environ.pop(name, None)
    for name, value in task.environment.items():  # and keep what imports have changed
        if _inherited.get(name) != value:
            os.environ[name] = value
    sys.path[:] = task.path
    os.chdir(task.folder)
    with output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python's own reseeds itself; torch's is the same in each process
    _shorten_sockets()
    # the stacks of all threads are printed on a crash, and when the parent sends SIGUSR1
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    code = 1
    try:
        module, _, name = task.place.partition(":")
        sys.modules["__main__"] = ModuleType("__main__")
        stand_for(module)
        arguments = connection.recv()
        code = getattr(import_module(module), name)(connection, *arguments) or 0
    except BaseException:
        traceback.print_exc()
    leave(code)


def _shorten_sockets() -> None:
    """Have multiprocessing make its sockets in the temporary folder under a name that fits into an
    address, of at most 107 characters: with a longer one a DataLoader's worker failed to send a
    batch, and its process waited for that for ever."""
    if len(folder := tempfile.gettempdir()) > 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx"):
        number = os.open(folder, os.O_RDONLY)
        tempfile.tempdir = f"/proc/{os.getpid()}/fd/{number}"
        multiprocessing.util.get_temp_dir()  # and keep to it
        tempfile.tempdir = folder
