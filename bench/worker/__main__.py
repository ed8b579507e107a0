"""One case in one process: `python -m bench.worker`, started by an executor.

The worker reads its assignment from standard input and writes `bench.worker.messages` to the file
descriptor that it names. At each phase it waits for a line on standard input, so that the parent
can take readings of the card at the boundary. What it prints otherwise is its log.
"""

from __future__ import annotations

import faulthandler
import gc
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from bench.case import Case
from bench.errors import UnsupportedError, UsageError
from bench.failure import Fault, classify
from bench.processes import die_with_parent
from bench.record import Status
from bench.worker.channel import Channel
from bench.worker.limit import lift_host_limit
from bench.worker.measurement import Findings, measure
from bench.worker.messages import (
    Finished,
    decode_assignment,
)


def read_free_share(case: Case) -> float | None:
    """Free share of the device memory that this process may use, for `classify`; None on a CPU.

    Of the card's and of the cap that a memory limit sets, the smaller. It is 0 once torch's
    allocator has refused anything: a cuDNN that is refused its workspace for each of its algorithms
    says only that it found none, and what it had taken for others is free again by then.
    """
    torch = sys.modules.get("torch")
    if case.device != "cuda" or torch is None:
        return None
    with suppress(Exception):  # after a sticky CUDA error the device answers nothing
        if torch.cuda.memory_stats().get("num_ooms", 0):  # which asks the allocator alone
            return 0.0
        free, total = torch.cuda.mem_get_info()
        cap = torch.cuda.get_per_process_memory_fraction() * total
        return float(min(free / total, (cap - torch.cuda.memory_reserved()) / cap))
    return None


def conclude(found: Findings) -> tuple[Status, str]:
    """The outcome of a measured case and its reason: not to be believed comes before diverged."""
    m, reasons = found.measurement, [str(found.contradiction)] if found.contradiction else []
    if m.first_bad_step is not None:
        where = f"step {m.first_bad_step} of {m.measured_steps}"
        reasons.append(f"the loss was inf or NaN from {where}")
    status = Status.DIVERGED if reasons else Status.OK
    return (Status.INVALID if found.contradiction else status), "; ".join(reasons)


def finish(found: Findings, follows: Sequence[str] = ()) -> Finished:
    """The message that ends a measured case.

    Args:
        follows: columns that are still to be filled, where another such message may come.
    """
    status, reason = conclude(found)
    return Finished(
        status,
        reason,
        measurement=found.measurement,
        missing=found.missing,
        steps=found.steps,
        epochs=found.epochs,
        work=found.work,
        ranks=found.ranks,
        follows=list(follows),
    )


def describe_error(error: BaseException) -> tuple[list[str], str]:
    """The classes of an exception and its text, for `classify`.

    Where a worker of a DataLoader died, torch may say by which signal in the cause alone.
    """
    kinds = [kind.__name__ for kind in type(error).__mro__]
    return kinds, str(error.__cause__ if "DataLoader worker" in str(error.__cause__) else error)


def _report_failure(channel: Channel, case: Case, error: BaseException) -> None:
    """Send what ended the case; its traceback goes to the log."""
    import traceback

    if case.memory_limit is not None:
        lift_host_limit()
    traceback.print_exception(error)
    if isinstance(error, UsageError):
        fault = Fault(Status.ERROR, str(error))
    elif isinstance(error, UnsupportedError):
        fault = Fault(Status.UNSUPPORTED, str(error))
    else:
        fault = classify(*describe_error(error), read_free_share(case), case)
    channel.send(Finished(fault.status, fault.reason, fault.transient, peer=fault.peer))


def main() -> int:
    """Read an assignment, measure its case, say how it ended."""
    faulthandler.enable()
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    given = decode_assignment(sys.stdin.readline())
    die_with_parent(given.parent)
    channel = Channel(given.descriptor, given.judged)
    try:
        found = measure(
            given.case,
            given.folder,
            channel,
            given.started,
            given.gpu_uuid,
            given.checkpoints,
            given.identity,
            given.trace,
            lambda found, columns: channel.send(finish(found, columns)),
            given.seat,
        )
    except BaseException as error:
        _report_failure(channel, given.case, error)
        return 1
    channel.send(finish(found))
    return 0


if __name__ == "__main__":
    status = main()
    gc.freeze()  # else all of torch is gone through once more before the process ends: 0.4 s
    sys.exit(status)
