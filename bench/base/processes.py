"""This process and its children, which never outlive it: signals, memory, CPU time; and the cores
that it may use, and who else uses them."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from bench.base.limits import BUSY_CORES


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` dies, whatever it is doing."""
    _control(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before the call


def adopt_orphans() -> None:
    """Become the parent of what a child leaves behind, to find it."""
    _control(_SET_CHILD_SUBREAPER, 1)


def end_children(but: int = 0) -> set[int]:
    """Send SIGKILL to the children of this process, which has one thread and adopts orphans, all
    ``but`` one, and forget those that have ended. Return the ids of those that there were. What
    they leave is among its children the next time."""
    try:
        file = Path(f"/proc/self/task/{os.getpid()}/children")
        left = {*map(int, file.read_text("ascii").split())}  # 20 µs
    except OSError:  # a kernel without it
        left = {*list_children(os.getpid(), recursive=False)}
    for pid in left - {but}:
        with suppress(PermissionError):  # of another user
            os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return left


_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_control = ctypes.CDLL(None).prctl


forked = False
"""Whether this process was forked by `bench.workers.server`: it is no script's."""


def stand_for(module: str) -> None:
    """Let this process, if `bench.workers.server` forked it, look as if the file of ``module`` was
    its script: a module may read its own source from ``sys.argv[0]``, or look for what lies beside
    it."""
    if not forked:
        return
    with suppress(ImportError, ValueError):
        if (found := find_spec(module)) and (file := found.origin):
            sys.argv[:] = [file]
            main = sys.modules["__main__"]
            main.__file__ = file
            # of this name, multiprocessing does not import the script again in what it spawns
            main.__spec__ = ModuleSpec("__main__", None, origin=file)


def leave(status: int) -> NoReturn:
    """End this process as `multiprocessing` ends one: without tearing down imported modules.

    Both functions are private to the standard library, and were run with Python 3.11, 3.12, 3.13
    and 3.14. Tearing down took a report 0.2 of its 1.6 CPU s, and a process with torch 0.4 to 0.9,
    more in a fork, which copies each page that it writes to.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError, OSError):  # the user's code may have closed it
            stream.flush()
    os._exit(status)


@contextmanager
def stop_signals(kill: Callable[[], None]) -> Iterator[Callable[[], int]]:
    """Turn the first Ctrl-C, SIGTERM or SIGHUP into a clean stop, and the second into an immediate
    exit after ``kill``. Yields a function that returns the number of the signal received, or 0: in
    another thread than the main one always 0, as there the signals are the program's."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    received, received_at = 0, -math.inf

    def stop(number: int, _: object) -> None:
        nonlocal received, received_at
        if received:
            kill()
            if announce:
                os.write(2, b"\n")  # below the live lines
            os._exit(128 + number)
        received, received_at = number, time.monotonic()
        notice = "stopping: what is done is kept; again to stop at once"
        if announce:
            announce(notice)
            return
        try:
            # an interrupted print() cannot be entered again
            os.write(2, f"\n{notice}\n".encode())
        except OSError:
            discard_output()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        numbers.append(signal.SIGHUP)

    def go_on(*_: object) -> None:
        global _stops
        # right after the signal that ends a command, timeout of coreutils sends this one
        _stops += time.monotonic() > received_at + 1

    before = {number: signal.signal(number, stop) for number in numbers}
    before[signal.SIGCONT] = signal.signal(signal.SIGCONT, go_on)
    try:
        yield lambda: received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_stops = 0

announce: Callable[[str], None] | None = None
"""Takes the notice of a signal where live lines have the terminal, see `bench.base.progress`."""


def describe_pause(since: tuple[int, float] | None = None) -> tuple[tuple[int, float], str]:
    """Return how often a sweep of this process was stopped and went on so far, and for how many
    seconds the machine has slept; and what of both happened ``since`` an earlier call, in words."""
    slept_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    now, pauses = (_stops, slept_s), list[str]()
    stops, before_s = since or now
    if now[0] > stops:
        pauses.append("the sweep was stopped and went on, as by Ctrl-Z")
    if slept_s > before_s + 1:
        pauses.append(f"the machine slept for {slept_s - before_s:.0f} s")
    return now, " and ".join(pauses)


def discard_output() -> None:
    """Let what is printed from now on go nowhere: the terminal was closed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


class TemporaryFolder(TemporaryDirectory[str]):
    """A temporary folder, ``bench_KIND_…``, which is locked as long as the process lives that made
    it, so that `remove_left` knows it."""

    def __init__(self, kind: str) -> None:
        super().__init__(prefix=f"bench_{kind}_", ignore_cleanup_errors=True)
        self._locked = os.open(self.name, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._locked, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def cleanup(self) -> None:
        """Remove it."""
        super().cleanup()
        with suppress(OSError):
            os.close(self._locked)


def remove_left() -> None:
    """Remove the temporary folders of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob("bench_*_*"):
        with suppress(OSError), ExitStack() as opened:
            if time.time() - folder.stat().st_mtime < _LOCKED_S:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            opened.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


_LOCKED_S = 60.0  # within which one that was made is locked


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


def provide_modules(folder: Path) -> None:
    """Have this process, and those that it starts, find the modules of a folder first."""
    place, given = str(folder.absolute()), os.environ.get("PYTHONPATH")
    if place not in sys.path:
        sys.path.insert(0, place)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [place, given]))


def provide_home() -> None:
    """Set HOME where it is missing, since MLflow, W&B and others ask for it where they are
    imported, and fail: to the user's own, or to a temporary one for a user without an entry in
    passwd, as a container's numeric one."""
    try:
        os.environ.setdefault("HOME", str(Path.home()))
    except RuntimeError:
        home = Path(tempfile.gettempdir(), f"precision-bench-{os.getuid()}")
        with suppress(OSError):
            home.mkdir(mode=0o700, exist_ok=True)
            os.environ["HOME"] = str(home)


def name_signal(number: int) -> str:
    """Return the name of a signal, such as ``SIGKILL``; ``signal 99`` for one that has none."""
    return signal.Signals(number).name if number in [*signal.Signals] else f"signal {number}"


def list_children(pid: int, recursive: bool = True) -> list[int]:
    """Return the ids of all descendants of process ``pid``, or only of its children; none if it
    has ended."""
    import psutil

    with suppress(Exception):  # it reads other processes, which may be anything
        return [child.pid for child in psutil.Process(pid).children(recursive)]
    return []


def name_processes(pids: Iterable[int]) -> dict[int, str]:
    """Return what each of these processes runs, by its id; of those that have not ended."""
    names = dict[int, str]()
    for pid in pids:
        with suppress(OSError):
            status = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
            name, _, rest = status.partition("(")[2].rpartition(")")
            if not rest.startswith(" Z"):
                names[pid] = name
    return names


def list_stopped(pids: Iterable[int]) -> list[int]:
    """Return which of these processes and their descendants are stopped, by a signal or a
    debugger."""
    import psutil

    stopped = []
    for pid in dict.fromkeys(one for root in pids for one in (root, *list_children(root))):
        with suppress(Exception):  # it has ended, or is not to be read
            status = psutil.Process(pid).status()
            if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                stopped.append(pid)
    return stopped


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


_SHARES = re.compile(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB$", re.MULTILINE)


def read_memory_share(pid: int) -> int | None:
    """Return the bytes of `read_held_memory`, of each page only the share that is one process's of
    all that have it: of a forked process it is a small part. None where the system does not tell.
    It takes 10 ms for a process of 1 GiB. Raises OSError: there is no such process."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii")
    except (FileNotFoundError, PermissionError):
        return None
    shares = _SHARES.findall(text)
    return 1024 * sum(map(int, shares)) if shares else None


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


# ------------------------------------------------------------------------------------------ cores


def usable_cpus() -> Sequence[int]:
    return sorted(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Quota:
    """The CPU time that control groups allow, in cores, and the file that sets it."""

    cores: float
    file: str


RAISE_QUOTA = "docker run --cpus, limits.cpu of a pod, or CPUQuota of a systemd unit"


def read_quota(
    process: Path = Path("/proc/self"), top: Path = Path("/sys/fs/cgroup")
) -> Quota | None:
    """Return the smallest quota of this process's control groups, of version 2 or 1, and of those
    above them; None if there is none."""
    found: list[Quota] = []
    with suppress(OSError):
        for line in (process / "cgroup").read_text("utf-8", "replace").splitlines():
            _, kinds, group = line.split(":", 2)
            home, files = top, ["cpu.max"]
            if kinds:  # version 1, a tree for some kinds each
                home, files = top / "cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
            if kinds and "cpu" not in kinds.split(","):
                continue
            # a container may see its own group as the top, under its name of outside
            inner = home / group.strip("/")
            for folder in (inner, *(at for at in inner.parents if at.is_relative_to(home))):
                with suppress(OSError, ValueError):  # "max 100000" without a quota
                    text = " ".join((folder / file).read_text("ascii") for file in files)
                    quota, period = map(int, text.split())
                    if quota > 0:  # -1 without one
                        found.append(Quota(quota / period, str(folder / files[0])))
    return min(found, key=lambda quota: quota.cores, default=None)


def count_cores() -> float:
    """Return how many cores this process may use: those that it is held to, or fewer by a quota."""
    quota = read_quota()
    cores = len(usable_cpus())
    return cores if quota is None else min(cores, quota.cores)


def choose_threads(cores: float, others: float, usable: int) -> int | None:
    """Return how many threads an operation is to take on a CPU: as many as of its ``cores``, a
    quota applied, ``others`` leave free, and at least one. None is torch's default: all ``usable``.

    The threads of an operation wait for each other by spinning: beside one busy process on two
    cores a step of dpn-small (batch 32) took 0.5 to 0.9 s with two threads and 0.18 s with one; on
    idle cores 0.10 s and 0.16 s.

    >>> choose_threads(2, 1.9, 2), choose_threads(4, 1.3, 4), choose_threads(4, 0.1, 4)
    (1, 2, None)
    """
    number = max(1, int(cores - others + BUSY_CORES))  # daemons of an idle machine use some
    return number if number < usable else None


def spell_cpu(name: str, cores: float) -> str:
    """Format a CPU and how many of its cores may be used, as in records.

    >>> spell_cpu("AMD EPYC", 2), spell_cpu("AMD EPYC", 1), spell_cpu("AMD EPYC", 0.3)
    ('AMD EPYC, 2 cores', 'AMD EPYC, 1 core', 'AMD EPYC, 0.3 cores')
    """
    return f"{name}, {cores:g} core{'s' if cores != 1 else ''}"


def share_cores(cores: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """Return the cores of each of ``size`` processes: equal shares, or one shared by several.

    >>> share_cores([0, 1, 2, 3, 4], 2), share_cores([0, 1], 3)
    ([(0, 1), (2, 3)], [(0,), (1,), (0,)])
    """
    each = len(cores) // size
    if not each:
        return [(cores[rank % len(cores)],) for rank in range(size)]
    return [tuple(cores[rank * each : (rank + 1) * each]) for rank in range(size)]


def read_governor(folder: Path = Path("/sys/devices/system/cpu")) -> str | None:
    """Return the frequency governors of the usable CPUs, joined by a comma; None if unknown."""
    files = (folder / f"cpu{cpu}" / "cpufreq" / "scaling_governor" for cpu in usable_cpus())
    return ", ".join(sorted({file.read_text().strip() for file in files if file.exists()})) or None


def read_core_times() -> tuple[float, float]:
    """Return for how many seconds the usable cores have been busy so far, and for how many other
    guests of the hypervisor had them. Work on other cores is not counted."""
    import psutil

    cpus, busy, stolen = psutil.cpu_times(percpu=True), 0.0, 0.0
    for times in (cpus[index]._asdict() for index in usable_cpus() if index < len(cpus)):
        stolen += times.pop("steal", 0.0)
        # the kernel counts a guest's time in user and nice too
        unused = ("idle", "iowait", "guest", "guest_nice")
        busy += sum(spent for kind, spent in times.items() if kind not in unused)
    return busy, stolen


class OtherWork:
    """The use of this process's cores by others while it works."""

    def __init__(
        self, busy: float = 0.0, own: float = 0.0, wall: float = 0.0, stolen: float = 0.0
    ) -> None:
        """Continue from these sums, in core seconds and wall seconds; ``stolen`` is a part of
        ``busy``. This process and its descendants are not others."""
        self.sums = busy, own, wall, stolen
        self.on, self.quota = usable_cpus(), read_quota()

    @classmethod
    def add(cls, ranks: Sequence[OtherWork]) -> OtherWork:
        """Combine ranks that run side by side and so are not others to each other. Cores that
        several of them share count once; wall time is that of the first."""
        cores = {tuple(one.on): one.sums for one in ranks}
        busy, stolen = (sum(sums[at] for sums in cores.values()) for at in (0, 3))
        added = cls(busy, sum(one.sums[1] for one in ranks), ranks[0].sums[2], stolen)
        added.on = sorted({core for on in cores for core in on})
        return added

    def start(self) -> None:
        self._started = self._read()

    def stop(self) -> None:
        """Count what happened since `start`."""
        busy, own, wall, stolen = (
            so_far + now - before
            for so_far, before, now in zip(self.sums, self._started, self._read(), strict=True)
        )
        self.sums = busy, own, wall, stolen

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count what happens in the block; may be entered again."""
        self.start()
        yield
        self.stop()

    def cores(self, guests: bool = True) -> float:
        """Return the mean number of cores used by others, including other ``guests`` by default.
        Cores beyond a quota are theirs: what they compute there takes nothing from this process."""
        busy, own, wall, stolen = self.sums
        used = max(0.0, busy - own - (0.0 if guests else stolen)) / wall if wall else 0.0
        beyond = max(0.0, len(self.on) - self.quota.cores) if self.quota else 0.0
        return max(0.0, used - beyond)

    def stolen(self) -> float:
        """Return the share of the cores that other guests of the hypervisor had."""
        _, _, wall, stolen = self.sums
        return min(1.0, stolen / (wall * len(self.on))) if wall else 0.0

    def _read(self) -> tuple[float, float, float, float]:
        busy, stolen = read_core_times()
        # the processes that this one starts, such as a DataLoader's workers, are not others
        return busy + stolen, read_cpu_time(), time.monotonic(), stolen
