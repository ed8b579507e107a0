"""The lanes of a sweep at work: a thread for each, and the main thread, which assigns cases.

Only the main thread starts cases, writes records, shows progress and handles signals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread

from bench.errors import StoreError
from bench.executors import Event, Executor, Job, Lane
from bench.record import Outcome, Record
from bench.sweep.loop import Source, Ticket
from bench.text import read_clock

_POLL_S = 0.5  # between checks whether the sweep was stopped


_Inbox = SimpleQueue[Job | None]  # of a lane's thread; None ends it


@dataclass(eq=False)
class _Running:
    ticket: Ticket
    lane: Lane  # that took the ticket
    place: Lane  # that the case runs on, which may have more GPUs
    started_at: str
    beside: int = 0

    @property
    def wide(self) -> bool:
        return self.ticket.run[0].world_size > 1


class Crew:
    """The lanes at work; a context manager that ends what still runs.

    Args:
        stopped: returns the number of the signal that asks to stop, or 0.
    """

    _source: Source

    def __init__(
        self, executor: Executor, lanes: Iterable[Lane], stopped: Callable[[], int]
    ) -> None:
        self._executor, self._stopped = executor, stopped
        self._idle = deque(lanes)
        self._running = dict[str, _Running]()
        self._held: tuple[Lane, Ticket] | None = None
        self._inboxes = dict[str, _Inbox]()
        self._said = SimpleQueue[tuple[str, Event | Outcome | BaseException]]()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        """Record cases that have ended, as far as they can be written. Then end the threads and,
        after an error, the cases that still run."""
        with suppress(Empty):
            while True:
                name, said = self._said.get_nowait()
                if isinstance(said, Outcome):
                    with suppress(StoreError):
                        self._record(name, said)
        if self._running:
            self._executor.kill()
        for inbox in self._inboxes.values():
            inbox.put(None)

    def work(self, source: Source) -> None:
        """Run everything in ``source``; if stopped, what is left stays there. Raises StoreError: a
        record could not be written."""
        self._source = source
        while True:
            if not self._stopped():
                self._assign()
            if self._running:
                self._hear()
            elif self._stopped() or not (source.left or self._held):
                self._held = None
                return

    def _assign(self) -> None:
        """Start the next cases on idle lanes, as far as they may run at once."""
        if self._held and not self._running:
            held, self._held = self._held, None
            self._start(*held)
        for lane in list(self._idle):
            while self._held is None and not any(one.wide for one in self._running.values()):
                ticket = self._source.take(lane, list(self._idle))
                if ticket is None:
                    break
                if ticket.run[0].world_size > 1 and self._running:
                    # it needs GPUs that others use; nothing starts before it
                    self._held = (lane, ticket)
                elif self._start(lane, ticket):
                    break

    def _start(self, lane: Lane, ticket: Ticket) -> bool:
        """Start a ticket. Return False if it had its outcome at once."""
        loop, device = self._source.loop, ticket.run[0].device
        if not self._running:
            # while nothing runs, measuring rates disturbs no case, nor is it disturbed
            for free in self._idle:
                if not self._stopped():
                    loop.rate(free, device)
        loop.rate(lane, device)
        started_at = read_clock()
        job = loop.begin(ticket, lane)
        if isinstance(job, Outcome):
            self._source.settle(ticket, loop.finish(ticket, lane, job, started_at), job)
            return False
        assert lane.name not in self._running
        self._idle.remove(lane)
        self._running[lane.name] = _Running(ticket, lane, job.lane, started_at)
        for one in self._running.values():
            one.beside = max(one.beside, len(self._running) - 1)
        if lane.name not in self._inboxes:
            inbox = self._inboxes[lane.name] = _Inbox()
            Thread(target=self._run, args=(lane.name, inbox), daemon=True).start()
        self._inboxes[lane.name].put(job)
        return True

    def _hear(self) -> None:
        """Handle the next message of a lane: the progress or the outcome of a case."""
        try:
            name, said = self._said.get(timeout=_POLL_S)
        except Empty:
            return
        if isinstance(said, BaseException):
            raise said
        one = self._running[name]
        if not isinstance(said, Outcome):
            self._source.loop.display.show(said, name)
            return
        record = self._record(name, said)
        self._idle.append(one.lane)
        self._source.settle(one.ticket, record, said)

    def _record(self, name: str, outcome: Outcome) -> Record:
        one = self._running.pop(name)
        finish = self._source.loop.finish
        return finish(one.ticket, one.lane, outcome, one.started_at, one.place, one.beside)

    def _run(self, name: str, inbox: _Inbox) -> None:
        """Run the jobs of a lane, in a thread that outlives its workers: they die with it."""

        def is_stopping() -> bool:
            return bool(self._stopped())

        def hear(event: Event) -> None:
            self._said.put((name, event))

        while (job := inbox.get()) is not None:
            said: Outcome | BaseException
            try:
                said = self._executor.run(job, hear, is_stopping)
            except BaseException as error:
                said = error
            self._said.put((name, said))
