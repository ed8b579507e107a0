"""One case in one process: `python -m bench.worker DESCRIPTOR PARENT`, started by an executor.

The worker reads its assignment from standard input and writes `bench.worker.messages` to the file
descriptor, or is asked what `python -m bench.environment` is, and answers there. It dies with the
process PARENT. At each phase it waits for a line on standard input, so that the parent can take
readings of the card at the boundary. What it prints otherwise is its log.

`python -m bench.worker serve DESCRIPTOR [DESCRIPTOR]` is the server that workers are forked from.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from bench.case import Case
from bench.environment.response import respond
from bench.errors import UnsupportedError, UsageError
from bench.failure import Fault, classify, list_kinds
from bench.processes import die_with_parent, leave, take_input
from bench.record import Status
from bench.worker import BEGAN
from bench.worker.limit import lift_host_limit
from bench.worker.messages import Assignment, Channel, Finished, decode_order
from bench.worker.server import WorkerStart, preload, serve


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
    if case.memory_limit is not None:
        lift_host_limit()
    traceback.print_exception(error)
    if isinstance(error, UsageError):
        fault = Fault(Status.ERROR, str(error))
    elif isinstance(error, UnsupportedError):
        fault = Fault(Status.UNSUPPORTED, str(error))
    else:
        fault = classify(list_kinds(error), str(error), read_free_share(case), case)
    channel.send(Finished(fault.status, fault.reason, fault.transient, peer=fault.peer))


def main(arguments: Sequence[str]) -> int:
    """Run a worker or the worker server; each worker that the server forks also returns here."""
    if arguments[0] == "serve":
        inherited = dict(os.environ)
        preload()
        birth = serve(*map(int, arguments[1:]), inherited=inherited)
        if birth is None:
            os._exit(0)
        return work(birth)
    die_with_parent(int(arguments[1]))
    listen_for_stacks()
    preload()
    return work(WorkerStart(int(arguments[0]), BEGAN))


def listen_for_stacks() -> None:
    """Print the stacks of all threads on a crash, and when the parent sends SIGUSR1."""
    faulthandler.enable()
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, all_threads=True)


def run_case(given: Assignment, channel: Channel, began: float) -> None:
    """Measure what an assignment asks for: a user's command, or a training of the harness."""
    if given.case.command is not None:
        from bench.worker.command import measure_command

        measure_command(given, channel)
        return
    from bench.worker.measurement import measure  # imports torch

    measure(given, channel, began)


def work(birth: WorkerStart) -> int:
    listen_for_stacks()
    orders = take_input()
    given = decode_order(orders.readline())
    if isinstance(given, list):
        with os.fdopen(birth.descriptor, "w") as answers:
            respond(given, answers, orders)
        return 0
    channel = Channel(birth.descriptor, given.judged, orders)
    try:
        run_case(given, channel, birth.began)
    except BaseException as error:
        _report_failure(channel, given.case, error)
        return 1
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
