"""A case in a process of its own, which an executor starts. What it prints is its log."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from bench.base.errors import UnsupportedError, UsageError
from bench.schema.case import Case
from bench.schema.failure import classify, find_place, list_kinds
from bench.schema.record import Outcome, Status
from bench.workers.job import Channel, Job
from bench.workers.limit import lift_host_limit
from bench.workers.server import preload


def work(connection: Connection, given: Job) -> int:
    """Measure a case, a user's command or a training of the harness, and send its outcome, whatever
    happens; return 0 if it has a measurement."""
    channel = Channel(connection)
    try:
        preload()
        if given.case.command is not None:
            from bench.workers.command import measure_command

            measure_command(given, channel)
        else:
            from bench.workers.measurement import measure  # imports torch

            measure(given, channel)
    except BaseException as error:
        _report_failure(channel, given.case, error)
        return 1
    return 0


def read_free_share(case: Case) -> float | None:
    """Return the free share of the memory this process may use, for `classify`; None on a CPU.

    It is the smaller of the free shares of the card and of the cap that a memory limit sets. It is
    0 once torch's allocator has refused an allocation: if cuDNN gets no workspace for any of its
    algorithms, it only reports that it found none, and has freed its other memory by then.
    """
    torch = sys.modules.get("torch")
    if case.device != "cuda" or torch is None:
        return None
    with suppress(Exception):  # after a sticky CUDA error the device answers nothing
        if torch.cuda.memory_stats().get("num_ooms", 0):  # asks only the allocator
            return 0.0
        free, total = torch.cuda.mem_get_info()
        cap = torch.cuda.get_per_process_memory_fraction() * total
        return float(min(free / total, (cap - torch.cuda.memory_reserved()) / cap))
    return None


def _report_failure(channel: Channel, case: Case, error: BaseException) -> None:
    import traceback

    # torch's handler raises for each DataLoader worker that dies, even during the lines below
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    lift_host_limit()
    traceback.print_exception(error)
    if isinstance(error, UsageError):
        outcome = Outcome(Status.ERROR, str(error))
    elif isinstance(error, UnsupportedError):
        outcome = Outcome(Status.UNSUPPORTED, str(error))
    else:
        outcome = classify(list_kinds(error), str(error), read_free_share(case), case)
        if outcome.status is Status.ERROR:
            outcome.reason += find_place(error)
    channel.send(outcome)
