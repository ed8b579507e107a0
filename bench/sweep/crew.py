"""The lanes of a sweep at work: a thread for each, and the main thread, which assigns cases.

Only the main thread starts cases, writes records, shows progress and handles signals.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread

from bench.errors import StoreError
from bench.executors import Event, Executor, Job, Lane, ShortageError
from bench.record import Outcome, Record, Status
from bench.sweep.loop import Source, Ticket
from bench.text import read_clock

WAIT_S = 60.0
"""Seconds that a sweep waits for a lane to join once all are lost. A case waits as long for lost
lanes that it needs, counted from when the lanes last changed."""

_POLL_S = 0.5  # between checks for lanes that joined


_Inbox = SimpleQueue[Job | None]  # of a lane's thread; None ends it


@dataclass(eq=False)
class _Running:
    ticket: Ticket
    lane: Lane  # that took the ticket
    place: Lane  # that the case runs on, which may have more GPUs
    started_at: str
    beside: int = 0
    gone: bool = False  # the lane was lost meanwhile

    @property
    def wide(self) -> bool:
        return self.ticket.run[0].world_size > 1


class Crew:
    """The lanes at work; a context manager that ends what still runs.

    Args:
        stopped: returns the number of the signal that asks to stop, or 0.
        admit: returns whether a lane that joined late is to work too.
    """

    _source: Source

    def __init__(
        self,
        executor: Executor,
        lanes: Iterable[Lane],
        stopped: Callable[[], int],
        admit: Callable[[Lane], bool] = lambda lane: False,
    ) -> None:
        self._executor, self._stopped, self._admit = executor, stopped, admit
        self._idle = deque(lanes)
        self._lost = set[Lane]()
        self._running = dict[str, _Running]()
        self._held: tuple[Lane, Ticket] | None = None
        self._inboxes = dict[str, _Inbox]()
        self._said = SimpleQueue[tuple[str, Event | Outcome | BaseException]]()
        self._looked = self._changed = time.monotonic()
        self._short = False  # whether a shortage arose since the last wide case began
        self._came: list[Lane] = []

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

    def add(self, lane: Lane) -> None:
        """Add a lane, unless it already works."""
        if lane.name not in {other.name for other in self._idle} | self._running.keys():
            self._idle.append(lane)

    def work(self, source: Source) -> None:
        """Run everything in ``source``.

        Ends early when stopped, or when all lanes are lost and none joins within `WAIT_S`; what is
        left then stays in the source. Raises StoreError: a record could not be written.
        """
        self._source, alive = source, time.monotonic()
        while True:
            self._join()
            if not self._stopped():
                self._assign()
            waiting = source.left or self._held
            if self._running or (waiting and self._idle):
                alive = time.monotonic()
            if self._running:
                self._hear()
                continue
            if self._stopped() or not waiting:
                self._held = None
                return
            if time.monotonic() - alive > WAIT_S and not self._held:
                folder = source.loop.store.folder
                source.loop.say([f"warning: no lane is left for {folder}, and none joined"])
                return
            time.sleep(0.1)

    def _assign(self) -> None:
        """Start the next cases on idle lanes, as far as they may run at once."""
        if self._held and not self._running:
            self._start_held(*self._held)
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

    def _start_held(self, lane: Lane, ticket: Ticket) -> None:
        """Start the held ticket, on another lane if its own was lost meanwhile."""
        source, loop = self._source, self._source.loop
        if self._idle:
            self._held = None
            self._start(lane if lane in self._idle else self._idle[0], ticket)
        elif self._has_waited():
            self._held = None
            lost = Outcome(Status.LOST, f"lane {lane.name} is gone", awaited=True)
            loop.display.begin(*ticket.run, lane.name)
            source.settle(ticket, loop.finish(ticket, lane, lost, read_clock()), lost)

    def _has_waited(self) -> bool:
        """Return whether the lanes last changed so long ago that no lane is expected soon."""
        return time.monotonic() - self._changed > WAIT_S

    def _start(self, lane: Lane, ticket: Ticket) -> bool:
        """Start a ticket, or hold it. Return False if it had its outcome at once."""
        loop, device = self._source.loop, ticket.run[0].device
        if not self._running:
            # while nothing runs, measuring rates disturbs no case, nor is it disturbed
            for free in self._idle:
                if not self._stopped():
                    loop.rate(free, device)
        loop.rate(lane, device)
        started_at = read_clock()
        job: Job | Outcome
        try:
            job = loop.begin(ticket, lane)
        except ShortageError as error:
            if not self._short:  # what it lacks may have been lost just now, unnoticed
                self._short, self._changed = True, time.monotonic()
            if not self._has_waited():
                self._held = (lane, ticket)
                return True
            job = Outcome(Status.LOST, str(error), awaited=True)
        if isinstance(job, Outcome):
            self._source.settle(ticket, loop.finish(ticket, lane, job, started_at), job)
            return False
        assert lane.name not in self._running
        self._idle.remove(lane)
        one = self._running[lane.name] = _Running(ticket, lane, job.lane, started_at)
        self._short &= not one.wide
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
        if said.status is Status.LOST:
            # the place may already be known as lost
            lanes = [*self._idle, *self._lost]
            self._lose(next((i for i in lanes if i.name == one.place.name), one.lane))
        if one.gone:
            self._lose(one.lane)
        self._source.settle(one.ticket, record, said)

    def _record(self, name: str, outcome: Outcome) -> Record:
        one = self._running.pop(name)
        finish = self._source.loop.finish
        return finish(one.ticket, one.lane, outcome, one.started_at, one.place, one.beside)

    def _join(self) -> None:
        """Add lanes that joined, and remove those that were lost, since the last check."""
        now = time.monotonic()
        if now - self._looked < _POLL_S:
            return
        self._looked = now
        for lane in self._executor.lose_lanes():
            self._came = [other for other in self._came if other != lane]
            self._lose(lane)
        self._came += self._executor.join_lanes()
        # a lane may be back before its case has ended as lost
        busy = {lane.name for one in self._running.values() for lane in (one.lane, one.place)}
        for lane in [lane for lane in self._came if lane.name not in busy]:
            self._came.remove(lane)
            # a lane of the same name, but with another GPU, is another lane
            if lane in self._lost or self._admit(lane):
                self._lost.discard(lane)
                self._changed = now
                self.add(lane)

    def _lose(self, lane: Lane) -> None:
        """Start nothing on a lane until it rejoins; a case that runs on it may still end."""
        one = self._running.get(lane.name)
        if one and one.lane == lane:
            one.gone = True
        if lane in self._idle:
            self._idle.remove(lane)
            self._lost.add(lane)
            self._changed = time.monotonic()

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
