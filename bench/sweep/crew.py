"""The lanes of a sweep at work: a thread for each, and the main thread, which assigns cases.

Only the main thread starts cases, writes records, shows progress and handles signals.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread

from bench.errors import StoreError
from bench.executors import Event, Executor, Job, Lane, ShortageError
from bench.record import Outcome, Record, Status
from bench.sweep.gate import Gate
from bench.sweep.loop import Loop, Source, Ticket
from bench.text import read_clock

WAIT_S = 60.0
"""Seconds that a sweep waits for a lane to join once all are lost. A case waits as long for lost
lanes that it needs, counted from when the lanes last changed."""

_POLL_S = 0.5  # between checks for lanes that joined


_Inbox = SimpleQueue[tuple[Job, Ticket] | None]  # of a lane's thread; None ends it


@dataclass(eq=False)
class _Running:
    source: Source
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
    """The lanes of one or several loops; a context manager that ends what still runs.

    Args:
        stopped: returns the number of the signal that asks to stop, or 0.
        most: how many lanes may run a case at once; 0 for all.
        admit: returns the loop for a lane that joined late, or None to refuse the lane.
    """

    def __init__(
        self,
        executor: Executor,
        stopped: Callable[[], int],
        most: int = 0,
        admit: Callable[[Lane], Loop | None] = lambda lane: None,
    ) -> None:
        self._executor, self._stopped, self._most = executor, stopped, most
        self._admit = admit
        self._idle = dict[Loop, deque[Lane]]()
        self._lost = dict[Lane, Loop]()
        self._running = dict[str, _Running]()
        self._held: tuple[Source, Lane, Ticket] | None = None
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

    def add(self, loop: Loop, lane: Lane) -> None:
        """Add a lane to a loop, unless the lane already works."""
        own = self._idle.setdefault(loop, deque())
        idle = {other.name for lanes in self._idle.values() for other in lanes}
        if lane.name not in idle | self._running.keys():
            own.append(lane)

    def count(self, loop: Loop) -> int:
        return len(self._idle[loop]) + sum(r.source.loop is loop for r in self._running.values())

    def list_idle(self, loop: Loop) -> list[Lane]:
        return list(self._idle[loop])

    def work(self, sources: Sequence[Source], most: int = 0) -> None:
        """Run everything in ``sources``, one for each loop, with at most ``most`` cases at once.

        Ends early when stopped, or when all lanes are lost and none joins within `WAIT_S`; what is
        left then stays in the sources. Raises StoreError: a record could not be written.
        """
        alive = time.monotonic()
        while True:
            self._join()
            if not self._stopped():
                self._assign(sources, most or self._most or math.inf)
            waiting = [s for s in sources if s.left or (self._held and self._held[0] is s)]
            if self._running or any(self._idle[source.loop] for source in waiting):
                alive = time.monotonic()
            if self._running:
                self._hear()
                continue
            if self._stopped() or not waiting:
                self._held = None
                return
            if time.monotonic() - alive > WAIT_S and not self._held:
                for source in waiting:
                    folder = source.loop.store.folder
                    source.loop.say([f"warning: no lane is left for {folder}, and none joined"])
                return
            time.sleep(0.1)

    def _assign(self, sources: Sequence[Source], most: float) -> None:
        """Start the next cases on idle lanes, as far as they may run at once."""
        if self._held and not self._running:
            self._start_held(*self._held, sources)
        for source in sources:
            for lane in list(self._idle[source.loop]):
                while self._held is None and len(self._running) < most:
                    if any(one.wide for one in self._running.values()):
                        break
                    ticket = source.take(lane, list(self._idle[source.loop]))
                    if ticket is None:
                        break
                    if ticket.run[0].world_size > 1 and self._running:
                        # it needs GPUs that others use; nothing starts before it
                        self._held = (source, lane, ticket)
                    elif self._start(source, lane, ticket, sources):
                        break

    def _start_held(
        self, source: Source, lane: Lane, ticket: Ticket, sources: Sequence[Source]
    ) -> None:
        """Start the held ticket, on another lane if its own was lost meanwhile."""
        loop, idle = source.loop, self._idle[source.loop]
        if idle:
            self._held = None
            self._start(source, lane if lane in idle else idle[0], ticket, sources)
        elif self._has_waited():
            self._held = None
            lost = Outcome(Status.LOST, f"lane {lane.name} is gone", awaited=True)
            loop.display.begin(*ticket.run, lane.name)
            source.settle(ticket, loop.finish(ticket, lane, lost, read_clock()), lost)

    def _has_waited(self) -> bool:
        """Return whether the lanes last changed so long ago that no lane is expected soon."""
        return time.monotonic() - self._changed > WAIT_S

    def _start(self, source: Source, lane: Lane, ticket: Ticket, sources: Sequence[Source]) -> bool:
        """Start a ticket, or hold it. Return False if it had its outcome at once."""
        loop, device = source.loop, ticket.run[0].device
        if not self._running:
            # while nothing runs, measuring rates disturbs no case, nor is it disturbed
            for other in sources:
                for free in self._idle[other.loop] if other.left or other is source else ():
                    if not self._stopped():
                        other.loop.rate(free, device)
        loop.rate(lane, device)
        started_at = read_clock()
        job: Job | Outcome
        try:
            job = loop.begin(ticket, lane)
        except ShortageError as error:
            if not self._short:  # what it lacks may have been lost just now, unnoticed
                self._short, self._changed = True, time.monotonic()
            if not self._has_waited():
                self._held = (source, lane, ticket)
                return True
            job = Outcome(Status.LOST, str(error), awaited=True)
        if isinstance(job, Outcome):
            source.settle(ticket, loop.finish(ticket, lane, job, started_at), job)
            return False
        assert lane.name not in self._running
        self._idle[loop].remove(lane)
        one = self._running[lane.name] = _Running(source, ticket, lane, job.lane, started_at)
        self._short &= not one.wide
        for one in self._running.values():
            one.beside = max(one.beside, len(self._running) - 1)
        if lane.name not in self._inboxes:
            inbox = self._inboxes[lane.name] = _Inbox()
            Thread(target=self._run, args=(lane.name, inbox), daemon=True).start()
        self._inboxes[lane.name].put((job, ticket))
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
            one.source.loop.display.show(said, name)
            return
        record, loop = self._record(name, said), one.source.loop
        self._idle[loop].append(one.lane)
        if said.status is Status.LOST:
            # the place may already be known as lost
            lanes = [*self._idle[loop], *self._lost]
            self._lose(next((i for i in lanes if i.name == one.place.name), one.lane))
        if one.gone:
            self._lose(one.lane)
        one.source.settle(one.ticket, record, said)

    def _record(self, name: str, outcome: Outcome) -> Record:
        one = self._running.pop(name)
        finish = one.source.loop.finish
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
            loop = self._lost.pop(lane, None) or self._admit(lane)
            if loop is not None:
                self._changed = now
                self.add(loop, lane)

    def _lose(self, lane: Lane) -> None:
        """Start nothing on a lane until it rejoins; a case that runs on it may still end."""
        one = self._running.get(lane.name)
        if one and one.lane == lane:
            one.gone = True
        for loop, idle in self._idle.items():
            if lane in idle:
                idle.remove(lane)
                self._lost[lane], self._changed = loop, time.monotonic()

    def _run(self, name: str, inbox: _Inbox) -> None:
        """Run the jobs of a lane, in a thread that outlives its workers: they die with it."""

        def is_stopping() -> bool:
            return bool(self._stopped())

        while (given := inbox.get()) is not None:
            job, ticket = given

            def hear(event: Event, gate: Gate | None = ticket.gate) -> None:
                self._said.put((name, event))
                if gate:
                    gate.enter(name, event, is_stopping)

            said: Outcome | BaseException
            try:
                said = self._executor.run(job, hear, is_stopping)
            except BaseException as error:
                said = error
            if ticket.gate:
                ticket.gate.leave(name)
            self._said.put((name, said))
