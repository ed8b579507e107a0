"""The worker of a case, or several that train one network, run as if they were one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

from bench.cores import share_cores, usable_cpus
from bench.errors import UnsupportedError
from bench.record import MEASURED, REFUSED, Outcome
from bench.run.process import Process
from bench.scratch import Scratch
from bench.worker.messages import GO_ON, EpochEnded, Job, Message, PhaseEntered, Rendezvous

_POLL_S = 0.1
_GRACE_S = 3.0
"""How long the other workers may take to report their end once one has failed, in s."""

_MARGIN_S = 60.0
"""How much longer processes wait for each other than a phase may take, in s, so that the phase's
deadline comes first, which has their stacks written."""


def find_gpus(job: Job) -> tuple[str, ...]:
    """Return the GPUs of a job of several processes by rank, none on a CPU. Raises
    UnsupportedError: its lane has too few."""
    if job.case.device == "cpu":
        return ()
    gpus = job.lane.gpus or tuple(filter(None, [job.gpu_uuid]))
    if len(gpus) < job.case.world_size:
        raise UnsupportedError(
            f"--world-size {job.case.world_size} takes as many GPUs of one machine, and "
            f"{len(gpus)} can be had here"
        )
    return gpus[: job.case.world_size]


class Worker(Process):
    """The process of a case, or one of several."""

    failed_rank = ""
    """Prefix of the reason why it ended, if it is one of several."""
    pids = ()

    def __init__(
        self,
        job: Job,
        variables: Mapping[str, str],
        rendezvous: Rendezvous | None = None,
        cold: bool = False,
    ) -> None:
        given = replace(
            job,
            checkpoints=job.checkpoints and job.checkpoints.absolute(),
            trace=job.trace and job.trace.absolute(),
            enough=None,
            judged=job.enough is not None,
            rendezvous=rendezvous,
            asked_at=time.monotonic(),
        )
        super().__init__(
            "bench.worker.case:work",
            given,
            variables={**job.lane.variables, **variables},
            cores=job.lane.cores,
            log=job.log,
            cold=cold,
        )


class Ranks:
    """The workers of one case that trains in several processes, with the methods of a `Worker`.

    The first worker measures like the only worker of a case. All enter each phase together. The
    case ends as the first worker does, once all have ended. If any fails, the case ends as that one
    does: out of memory takes precedence, and a failure because peers were gone counts least.

    Each worker has one of the lane's GPUs, or a share of its cores; ``timeout_s`` is how long a
    phase may take. Raises UnsupportedError: the lane has too few GPUs.
    """

    def __init__(
        self,
        job: Job,
        variables: Mapping[str, str],
        timeout_s: float,
        cold: bool = False,
    ) -> None:
        self._log, self._failed, self._deciding = job.log, False, 0
        self.failed_rank = ""
        self._readers: list[Thread] = []
        size, gpus = job.case.world_size, find_gpus(job)
        # with GPUs, the system chooses the cores, as it does for a single GPU
        cores = [()] * size if gpus else share_cores(job.lane.cores or usable_cpus(), size)
        self._folder = Scratch("ranks")
        self._workers: list[Worker] = []
        self._heard: SimpleQueue[tuple[int, Message | Exception | None]] = SimpleQueue()
        # all run on this machine, whatever its host name resolves to
        given = {"GLOO_SOCKET_IFNAME": "lo", **variables}
        for name in given.keys() & os.environ.keys() - variables.keys():
            del given[name]
        try:
            for rank in range(size):
                lane = replace(job.lane, gpus=job.lane.gpus[rank : rank + 1], cores=cores[rank])
                store = str(Path(self._folder.name) / "store")
                rendezvous = Rendezvous(rank, size, store, list(gpus), timeout_s + _MARGIN_S)
                placed = replace(job, gpu_uuid=gpus[rank] if gpus else None, lane=lane)
                self._workers.append(Worker(placed, given, rendezvous, cold))
        except BaseException:
            self.end(patiently=False)
            raise
        self.note = self._workers[0].note
        self.pids = [worker.pid for worker in self._workers]
        self.pid = self.pids[0]
        self._readers = [
            Thread(target=self._read, args=(rank, worker), daemon=True)
            for rank, worker in enumerate(self._workers)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, rank: int, worker: Worker) -> None:
        try:
            for message in worker.messages():
                if message is not None:
                    self._heard.put((rank, message))
        except Exception as error:  # raised again by `messages`
            self._heard.put((rank, error))
        self._heard.put((rank, None))

    def messages(self) -> Iterator[Message | None]:
        """Yield the first worker's messages, a phase once all have announced it, and None at least
        every 0.1 s. Raises MessageError: a worker sent what is no message."""
        waiting: dict[int, PhaseEntered | EpochEnded] = {}
        ends: dict[int, Outcome | None] = {}  # None for a worker that ended without a message
        decided: float | None = None
        while len(ends) < len(self._workers) and (decided is None or time.monotonic() < decided):
            try:
                rank, message = self._heard.get(timeout=_POLL_S)
            except Empty:
                yield None
                continue
            if isinstance(message, Exception):
                raise message
            if isinstance(message, PhaseEntered | EpochEnded):
                waiting[rank] = message
                if len(waiting) == len(self._workers):
                    yield waiting[0]
                    waiting.clear()
            elif isinstance(message, Outcome) and message.follows:
                if not rank:
                    yield message
            elif isinstance(message, Outcome) or message is None:
                end = ends.setdefault(rank, message)
                if decided is None and (end is None or end.status not in MEASURED):
                    self._failed, decided = True, time.monotonic() + _GRACE_S
            elif not rank:
                yield message
            yield None
        rank = min(ends, key=lambda rank: _weigh(ends[rank]))
        self._deciding = rank
        if self._failed and len(self._workers) > 1:
            self.failed_rank = f"rank {rank}: "
        if (end := ends[rank]) is not None:
            yield replace(end, reason=self.failed_rank + end.reason) if self._failed else ends[0]

    def send(self, content: str = GO_ON) -> None:
        for worker in self._workers:
            worker.send(content)

    def dump_stacks(self) -> str:
        found = []
        for rank, worker in enumerate(self._workers):
            with suppress(OSError), (self._log or Path(os.devnull)).open("a") as log:
                log.write(f"[stacks of rank {rank}]\n")
            found.append(worker.dump_stacks())
        return "".join(found)

    def kill(self) -> None:
        for worker in self._workers:
            worker.kill()

    def end(self, patiently: bool) -> int:
        """Let the workers end by themselves if ``patiently`` (after a failure, only the one that
        decided how the case ended); then SIGKILL all. Return the deciding worker's return code."""
        awaited = [self._deciding] if self._failed else range(len(self._readers))
        until = time.monotonic() + _GRACE_S
        for rank in awaited if patiently else ():
            self._workers[rank].wait(max(0.0, until - time.monotonic()))
        self.kill()
        # readers end before their pipes are closed, as the descriptors may be reused
        for reader in self._readers:
            reader.join()
        codes = [worker.end(patiently=True) for worker in self._workers]
        self._folder.cleanup()
        return codes[self._deciding] if codes else 0


def _weigh(end: Outcome | None) -> int:
    if end is None:
        return 1
    if end.status in MEASURED:
        return 3
    if end.peer:
        return 2
    return 0 if end.status in REFUSED else 1
