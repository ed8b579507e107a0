"""Finding the workers among processes."""

from __future__ import annotations

import time

import psutil


def is_worker(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("bench.worker")
    except psutil.Error:
        return False


def is_server(process: psutil.Process | None) -> bool:
    """Whether it is one that forks processes, or one of these."""
    return process is not None and "import serve; serve(" in " ".join(process.cmdline())


def find_workers(pid: int | None = None) -> list[psutil.Process]:
    """The workers that a process (default: this one) has started and that still run, in order."""
    children = psutil.Process(pid).children(recursive=True)
    workers = [p for p in children if is_worker(p) and p.status() != psutil.STATUS_ZOMBIE]
    return sorted(workers, key=lambda worker: (worker.create_time(), worker.pid))


def gone(pids: list[int], within_s: float = 10) -> bool:
    """Whether the processes end; one that waits to be reaped has ended."""

    def alive(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    end = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))
