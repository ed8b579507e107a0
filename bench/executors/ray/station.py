"""The remote end of a lane, held by an actor on a node of a cluster.

It runs the ordinary executor on a thread of its own. Nothing here imports ray.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.environment.source import hash_code
from bench.environment.variables import find_variables
from bench.executors import Event, Executor, Job, Settings, load_executor
from bench.gpu.cards import Card, find_cards
from bench.gpu.nvml import find_neighbours
from bench.record import Outcome, Status
from bench.scratch import Scratch

_TELL_EVERY_S = 0.2
HEARTBEAT_S = 5.0
"""The longest time that a station is silent while it runs a case, in s."""


@dataclass(frozen=True)
class Place:
    """The place of a station: its GPU as NVML knows it, None on a CPU, and the conditions that a
    measurement depends on.

    Ray's own GPU type does not distinguish cards of 40 GB and 80 GB. ``niceness`` is the priority
    of the workers, ``code`` the hash of the harness's source there and ``neighbours`` the processes
    that use the card.
    """

    card: Card | None
    niceness: int
    code: str
    neighbours: str = ""


@dataclass(frozen=True)
class Report:
    """A station's report on its running case; the last one has the outcome. ``log`` is the worker's
    output since the last report, ``trace`` the content of a profile's trace file."""

    events: list[Event] = field(default_factory=list)
    log: bytes = b""
    trace: bytes = b""
    outcome: Outcome | None = None


class Station:
    """A runner of one case at a time on the node, which also answers questions about the node.

    ``executor`` is the ``package.module:Class`` that runs the cases, and ``folder`` the one in
    which the sweep was started, used if it exists here too. ``variables`` are the sweep's
    environment variables that change results. Others of that kind are removed: Ray sets
    OMP_NUM_THREADS=1, and a worker would inherit it.
    """

    def __init__(
        self, executor: str, settings: Settings, folder: str, variables: Mapping[str, str]
    ) -> None:
        with suppress(OSError):
            os.chdir(folder)
        for name in find_variables():
            del os.environ[name]
        os.environ.update(variables)
        self._executor: Executor = load_executor(executor, settings)
        # the thread that starts a worker must outlive it
        self._thread = ThreadPoolExecutor(1)
        self._stopped: set[int] = set()

    def describe(self) -> Place:
        """Return the place of this station, after giving workers normal priority if permitted."""
        cards, _ = find_cards()  # Ray has set CUDA_VISIBLE_DEVICES
        niceness = self._thread.submit(_raise_priority).result()
        others = find_neighbours(cards[0].uuid) if cards else ()
        neighbours = ", ".join(str(other) for other in others or () if not other.display)
        return Place(next(iter(cards), None), niceness, hash_code(), neighbours)

    def watch(self) -> None:
        """Never return: the caller learns when this process ends."""
        threading.Event().wait()

    def ask(self, question: str, *arguments: Any) -> Any:
        """Call the method ``question`` of the executor: examine, prepare, rate or gather."""
        return self._thread.submit(getattr(self._executor, question), *arguments).result()

    def run(self, number: int, job: Job) -> Iterator[Report]:
        """Run the case of ``job`` and report on it, at least every `HEARTBEAT_S`. Its log and trace
        are sent in the reports, not kept here. `stop` names the run by ``number``."""
        if job.checkpoints and not job.checkpoints.parent.parent.is_dir():
            reason = (
                f"{job.checkpoints.parent.parent} is not there on {socket.gethostname()}; for "
                "--checkpoint, put --out on a file system that all nodes share"
            )
            yield Report(outcome=Outcome(Status.UNSUPPORTED, reason))
            return
        with Scratch("lane") as folder:
            log, trace = Path(folder, "log"), job.trace and Path(folder, job.trace.name)
            log.touch()
            here = replace(job, log=log, trace=trace)
            events: queue.SimpleQueue[Event] = queue.SimpleQueue()

            ending = self._thread.submit(
                self._executor.run, here, events.put, lambda: number in self._stopped
            )
            with log.open("rb") as printed:
                for due in _beat(ending):
                    report = Report([*_drain(events)], printed.read())
                    if due or report != Report():
                        yield report
                kept = trace.read_bytes() if trace and trace.exists() else b""
                yield Report([*_drain(events)], printed.read(), kept, ending.result())

    def stop(self, number: int) -> None:
        """Have a run end soon as `interrupted`, even if it has not begun."""
        self._stopped.add(number)

    def kill(self) -> None:
        self._executor.kill()


def _beat(ending: Future[Outcome]) -> Iterator[bool]:
    """Yield every 0.2 s whether a heartbeat is due, until ``ending`` is done."""
    beats = 0
    while not wait([ending], _TELL_EVERY_S).done:
        beats += 1
        yield beats % round(HEARTBEAT_S / _TELL_EVERY_S) == 0


def _drain(events: queue.SimpleQueue[Event]) -> Iterator[Event]:
    with suppress(queue.Empty):
        while True:
            yield events.get_nowait()


def _raise_priority() -> int:
    """Give this thread and the processes it starts normal priority; return the resulting niceness.
    Ray starts its processes at a niceness of 15 by default, and only some users may lower it. The
    priority belongs to the thread."""
    if os.getpriority(os.PRIO_PROCESS, 0) > 0:
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
    return os.getpriority(os.PRIO_PROCESS, 0)
