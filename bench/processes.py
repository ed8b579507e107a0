"""Processes that this one starts: that none outlives it, and what CPU time they take."""

from __future__ import annotations

import atexit
import gc
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from bench.text import last_line

LENT = "BENCH_WORKERS"
"""Environment variable: the process that lends this one a server, and the server's socket, whose
name is that of the surroundings."""


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` dies, whatever it is doing; Linux only."""
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # it died before it could be asked for
            os._exit(1)


def leave(status: int) -> NoReturn:
    """End this process as `multiprocessing` ends one: what is imported is not taken apart.

    That took a report 0.2 of its 1.6 CPU s, and a process with torch 0.4 to 0.9, more in a fork,
    which copies each page that it writes to.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextmanager
def stop_signals(kill: Callable[[], None]) -> Iterator[Callable[[], int]]:
    """Turn the first Ctrl-C or SIGTERM into a clean stop, and the second into an immediate one,
    after ``kill``; yields a function that returns the number of the signal that came, 0 before."""
    received = 0

    def stop(number: int, _: object) -> None:
        nonlocal received
        if received:
            kill()
            if os.isatty(2):
                os.write(2, b"\x1b[?25h\n")  # the live line hides the cursor
            os._exit(128 + number)
        received = number
        # print() may have been interrupted half way and cannot be entered twice
        os.write(2, b"\nstopping: what is done is kept; again to stop at once\n")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def hold_to(cores: Collection[int]) -> Iterator[None]:
    """Have the processes that this thread starts run on ``cores`` alone; none for no change.

    A process inherits the affinity of the thread that starts it, which on Linux is its own. A
    ``preexec_fn`` could deadlock in a process of several threads.
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


def run_module(
    name: str, *arguments: str, timeout_s: float, variables: Mapping[str, str] | None = None
) -> tuple[str, str | None]:
    """Run a module in a process of its own, which Ctrl-C does not reach: it is the caller's.

    ``variables`` are set besides those of this process. Returns what it printed, and the last line
    of its errors; None for that where ``timeout_s`` ran out.
    """
    command = [sys.executable, "-m", name, *arguments]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            start_new_session=True,
            env={**os.environ, **(variables or {})},
        )
    except subprocess.TimeoutExpired as late:  # its output is bytes, whatever was asked for
        said = late.stdout or b""
        return said.decode(errors="replace") if isinstance(said, bytes) else said, None
    return done.stdout, last_line(done.stderr)


def list_children(pid: int) -> list[int]:
    """The ids of all that process ``pid`` started and what that started; none if it has ended."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


_HELD = re.compile(r"^Rss(?:Anon|Shmem):\s+(\d+) kB$", re.MULTILINE)
_RESIDENT = re.compile(r"^VmRSS:\s+(\d+) kB$", re.MULTILINE)


def read_held_memory(pid: int) -> int:
    """The bytes of memory that a process holds, without the pages of files that it has mapped.

    The kernel takes back pages of files, such as torch's code and the images as they were read,
    whenever others need memory. With them a worker of 1012 MiB read 865 once that had happened, and
    a batch that needs more than its limit of 1 GiB trained.

    It is the resident set where the system does not tell them apart, as other systems than Linux.
    Raises OSError, or psutil.Error elsewhere than on Linux: there is no such process.
    """
    if sys.platform != "linux":
        import psutil

        return int(psutil.Process(pid).memory_info().rss)
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * sum(map(int, _HELD.findall(status) or _RESIDENT.findall(status)))


def read_peak_memory() -> int:
    """About the most that this process held: the peak of its resident set, less files as of now."""
    import resource

    import psutil

    files = psutil.Process().memory_info().rss - read_held_memory(os.getpid())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - files


def find_lender() -> int | None:
    """The process that lends this one a server, where one does: the workers are under that."""
    pid = os.environ.get(LENT, "").partition(" ")[0]
    return int(pid) if pid else None


def read_cpu_time(pid: int | None = None) -> float:
    """CPU seconds of this process, or another, and of all that it started, whether they ended or
    not. Raises psutil.NoSuchProcess: there is no such process."""
    import psutil

    total, root = 0.0, psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            if process is root:
                raise
            continue
        total += times.user + times.system
        # of its own children only those that ended; the others are in this list
        total += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return total


@contextmanager
def pause_collection() -> Iterator[None]:
    """Leave the garbage collector off while what is to stay is imported and built.

    It would go through all of it time and again: torch and what its optimizers import took 4.4 CPU
    s with it and 3.6 s without.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
