"""Child processes: they never outlive this one, and their CPU time and memory are measured."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import NoReturn


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` dies, whatever it is doing."""
    _control(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before the call


def adopt_orphans() -> None:
    """Become the parent of what a child leaves behind, to find it."""
    _control(_SET_CHILD_SUBREAPER, 1)


_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_control = ctypes.CDLL(None).prctl


def leave(status: int) -> NoReturn:
    """End this process as `multiprocessing` ends one: without tearing down imported modules.

    That took a report 0.2 of its 1.6 CPU s, and a process with torch 0.4 to 0.9, more in a fork,
    which copies each page that it writes to.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError, OSError):  # the user's code may have closed it
            stream.flush()
    os._exit(status)


@contextmanager
def stop_signals(kill: Callable[[], None]) -> Iterator[Callable[[], int]]:
    """Turn the first Ctrl-C or SIGTERM into a clean stop, and the second into an immediate exit
    after ``kill``. Yields a function that returns the number of the signal received, or 0."""
    received = 0

    def stop(number: int, _: object) -> None:
        nonlocal received
        if received:
            kill()
            if os.isatty(2):
                os.write(2, b"\x1b[?25h\n")  # the live line hides the cursor
            os._exit(128 + number)
        received = number
        # an interrupted print() cannot be entered again
        os.write(2, b"\nstopping: what is done is kept; again to stop at once\n")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def hold_to(cores: Collection[int]) -> Iterator[None]:
    """Run the processes that this thread starts on ``cores`` only; empty for no change.

    A process inherits the affinity of the thread that starts it, which on Linux is set per thread.
    A ``preexec_fn`` could deadlock in a process with several threads.
    """
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def provide_home() -> None:
    """Give a user without a home, as a container's numeric one without HOME and an entry in passwd,
    a temporary one: MLflow, W&B and others ask for it where they are imported, and fail."""
    try:
        Path.home()
    except RuntimeError:
        home = Path(tempfile.gettempdir(), f"gpu-precision-bench-{os.getuid()}")
        with suppress(OSError):
            home.mkdir(mode=0o700, exist_ok=True)
            os.environ["HOME"] = str(home)


@contextmanager
def keep_output() -> Iterator[None]:
    """Send to standard error what is printed in the block, by a user's code or what it starts, so
    that standard output has the answer alone."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(own, 1)
        os.close(own)


def name_signal(number: int) -> str:
    """Return the name of a signal, such as ``SIGKILL``; ``signal 99`` for one that has none."""
    return signal.Signals(number).name if number in [*signal.Signals] else f"signal {number}"


def list_children(pid: int) -> list[int]:
    """Return the ids of all descendants of process ``pid``; none if it has ended."""
    import psutil

    with suppress(Exception):  # it reads other processes, which may be anything
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


_HELD = re.compile(r"^Rss(?:Anon|Shmem):\s+(\d+) kB$", re.MULTILINE)
_RESIDENT = re.compile(r"^VmRSS:\s+(\d+) kB$", re.MULTILINE)
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


def read_held_memory(pid: int) -> int:
    """Return the bytes of memory that a process holds, without pages of mapped files, or its
    resident set where the system does not tell them apart. Raises OSError: there is no such
    process.

    The kernel reclaims pages of files, such as torch's code and images that were read, whenever
    others need memory. Counting them, a worker of 1012 MiB read 865 after that, and a batch that
    needs more than its limit of 1 GiB trained.
    """
    status = Path(f"/proc/{pid}/status").read_text("utf-8", "replace")  # it has a name
    return 1024 * sum(map(int, _HELD.findall(status) or _RESIDENT.findall(status)))


def read_peak_memory() -> int:
    """Return about the peak memory held by this program: the peak resident set less the current
    pages of files."""
    status = Path("/proc/self/status").read_text("utf-8", "replace")
    peak, resident = (sum(map(int, kind.findall(status))) for kind in (_PEAK, _RESIDENT))
    files = resident * 1024 - read_held_memory(os.getpid())
    return peak * 1024 - files


def read_cpu_time() -> float:
    """Return the CPU seconds of this process and of all its descendants, ended or not; of those
    that can be read."""
    import psutil

    total = 0.0
    for pid in (os.getpid(), *list_children(os.getpid())):
        with suppress(Exception):  # it has ended, or is not to be read
            # its own, and of its children that ended; the others are in this list
            total += sum(psutil.Process(pid).cpu_times()[:4])
    return total


@contextmanager
def pause_collection() -> Iterator[None]:
    """Turn the garbage collector off while long-lived objects are imported and built.

    It would scan all of them again and again: torch and what its optimizers import took 4.4 CPU s
    with it and 3.6 s without.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
