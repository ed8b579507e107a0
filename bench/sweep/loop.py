"""The loop of a sweep, which asks a source for the next run of each free lane, and tells it its
record.

The main thread assigns runs, writes records, shows progress and handles signals; each run has a
thread, in which its worker is listened to.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Protocol
from uuid import uuid4

from bench.base.errors import StoreError, UnsupportedError, UsageError
from bench.base.inject import Seen
from bench.base.processes import stop_signals
from bench.base.progress import watch
from bench.base.text import name_first, read_clock, read_time
from bench.profile.rates import DeviceRates
from bench.results.store.reader import find_shards, read_beside, read_there
from bench.results.store.rows import PlannedRun, Row
from bench.results.store.table import CHECKPOINTS, LOGS, OUTPUTS, TRACES
from bench.results.store.writer import Store
from bench.schema.case import Case, list_values
from bench.schema.precision import PRECISIONS
from bench.schema.record import (
    Measurement,
    Outcome,
    Record,
    Status,
    WorkRow,
    flatten,
    read_missing,
    write_missing,
)
from bench.sweep.display import Display
from bench.sweep.folder import KeptRun, Known, find_unlike, refuse_mixing, write_config
from bench.sweep.options import Options, Plan
from bench.sweep.preflight import Settled, settle, warn_of_emulation
from bench.sweep.versions import Left
from bench.workers.examination import Platform
from bench.workers.executors import CaseEvent
from bench.workers.job import Job, Lane
from bench.workers.rating import check_rates, choose_seconds, describe_rates, read_rates

MOST_LOST = 3
"""After this many losses of a run's machine, the sweep gives the run up."""

MOST_LEFT = 50
"""Files that a row names at most of those that its command wrote."""

_POLL_S = 0.5  # between checks whether the sweep was stopped


class CaseSource(Protocol):
    """Decides what runs next on the lanes of a loop."""

    @property
    def left(self) -> bool:
        """Whether anything is left to start."""

    def take(self, lane: Lane, idle: Sequence[Lane]) -> Job | None:
        """Return what ``lane`` is to run next, or None. ``idle`` are all free lanes."""

    def settle(self, job: Job, record: Record, outcome: Outcome) -> None:
        """Learn how a run ended."""


@contextmanager
def open_loop(options: Options, asked: Plan) -> Iterator[Loop]:
    """Settle a plan, and lock its folder. From then on a signal stops the loop. Raises UsageError:
    as `settle`, or the folder holds those of shards, whose rows a report would no longer read
    beside its own."""
    with settle(asked, options) as settled, ExitStack() as stack:
        if shards := find_shards(out := settled.out):
            raise UsageError(f"--out {out}: holds {shards[0].name}; choose another folder")
        store = stack.enter_context(Store(out))
        yield Loop(settled, store, stack.enter_context(stop_signals(settled.executor.kill)))


class Loop:
    """The lanes of a command, with the devices of each, and the runs on them into one folder. Each
    record is written as soon as its run ends."""

    display: Display

    def __init__(self, settled: Settled, store: Store, stopped: Callable[[], int]) -> None:
        self.options, self.inputs = settled.options, settled.inputs
        self.lanes, self.out, self.store = settled.lanes, settled.out, store
        self.rows = read_there(store.folder)  # that were there
        self.planned: Sequence[Case] = ()  # what is to run, each case once
        self._executor, self._stopped = settled.executor, stopped
        self._notes = [*self.inputs.warnings, *store.set_aside]  # lines that are shown once
        self._known, self._left = Known(), Left(self.rows)
        begun = [read_time(row.started_at) for row in self.rows]
        self._since_ns = round(
            1e9 * min([*begun, time.time()])
        )  # when the folder's first run began
        self._rated: set[tuple[Lane, str]] = set()  # lane and device
        self._warned: set[str] = set()  # the warnings of `_tell_left`
        self._idle = deque(self.lanes)
        self._running: dict[Lane, _Running] = {}
        self._waiting: tuple[Lane, Job] | None = None  # it needs GPUs that others use
        self._attempts = Counter[_Run]()  # the last at each run
        for row in self.rows:
            run = row.axes, row.repeat, row.sentinel, row.probe
            self._attempts[run] = max(self._attempts[run], row.attempt)
        self._losses = Counter[_Run]()  # in this sweep
        self._messages = SimpleQueue[tuple[Lane, CaseEvent | Outcome | BaseException]]()

    @property
    def resume(self) -> str:
        """The command that resumes this one."""
        return self.options.resume(self.out)

    @property
    def stopped(self) -> int:
        """The number of the signal that stopped it, 0 for none."""
        return self._stopped()

    # ------------------------------------------------------------------------- its folder

    def find_comparable(self, cases: Sequence[Case]) -> list[Row]:
        """Return the rows that were there and that those of ``cases`` can be compared with, and
        know what they found. Raises UsageError: some rows are not comparable, and --mix is not
        given: the message says how they differ."""
        unlike, differing = find_unlike(self.rows, self.inputs, cases)
        if not self.options.mix:
            refuse_mixing(self.out, differing)
        self._known.read(self.rows, read_beside(self.out, WorkRow))
        return [row for row in self.rows if id(row) not in unlike]

    def write_config(self, cases: Sequence[Case] | None = None, **keys: Any) -> None:
        """Write the folder's configuration, see `bench.sweep.folder.write_config`."""
        write_config(self.store, self.inputs, self.options, cases, **keys)

    # ------------------------------------------------------------------------- what is shown

    def show_on(self, display: Display) -> None:
        """Show the notes, once, and then all runs on ``display``."""
        self.display = display
        self.say(self._notes)
        self._notes = []

    def say(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.display.say(line)

    # ------------------------------------------------------------------------------ the runs

    def work(self, source: CaseSource) -> None:
        """Run everything in ``source``; if stopped, what is left stays there. Raises StoreError: a
        record could not be written."""
        try:
            while True:
                if not self.stopped:
                    self._assign(source)
                if self._running:
                    self._hear(source)
                elif self.stopped or not (source.left or self._waiting):
                    return
        finally:
            self._waiting = None
            # what has ended is recorded, as far as it can be written; what runs on is ended
            with suppress(Empty):
                while True:
                    lane, message = self._messages.get_nowait()
                    if isinstance(message, Outcome):
                        with suppress(StoreError):
                            self._end(lane, message)
            if self._running:
                self._executor.kill()

    def _assign(self, source: CaseSource) -> None:
        """Start the next runs on idle lanes, as far as they may run at once."""
        if self._waiting and not self._running:
            waiting, self._waiting = self._waiting, None
            self._start(source, *waiting)
        for lane in list(self._idle):
            while self._waiting is None and not any(one.wide for one in self._running.values()):
                job = source.take(lane, list(self._idle))
                if job is None:
                    break
                if job.case.world_size > 1 and self._running:
                    self._waiting = (lane, job)  # nothing starts before it
                elif self._start(source, lane, job):
                    break

    def gives_up(self, job: Job) -> bool:
        """Return whether a run's machine was lost so often that it is not run again."""
        return self._losses[_tell_run(job)] >= MOST_LOST

    def _start(self, source: CaseSource, lane: Lane, job: Job) -> bool:
        """Start a run as a new attempt. Return False if it had its outcome at once."""
        self._attempts[run := _tell_run(job)] += 1
        job = replace(job, attempt=self._attempts[run])
        if not self._running:
            # while nothing runs, measuring rates disturbs no case, nor is it disturbed
            for free in self._idle:
                if not self.stopped:
                    self.rate(free, job.case.device)
        self.rate(lane, job.case.device)
        started_at = read_clock()
        self.display.start(job.case, job.repeat, job.sentinel, lane.name)
        placed = self._place(job, lane)
        if isinstance(placed, Outcome):
            source.settle(job, self._write(job, lane, lane, placed, started_at), placed)
            return False
        self._idle.remove(lane)
        self._running[lane] = _Running(job, placed.lane, started_at)
        for one in self._running.values():
            one.beside = max(one.beside, len(self._running) - 1)
        Thread(target=self._run, args=(lane, placed), daemon=True).start()
        return True

    def _run(self, lane: Lane, job: Job) -> None:
        message: Outcome | BaseException
        try:
            message = self._executor.run(
                job,
                lambda event: self._messages.put((lane, event)),
                lambda: bool(self.stopped) or time.monotonic() > job.until,
            )
            late = time.monotonic() > job.until and not self.stopped
            if late and message.status is Status.INTERRUPTED:
                message = replace(message, reason="the time for it was over")
        except BaseException as error:
            message = error
        self._messages.put((lane, message))

    def _hear(self, source: CaseSource) -> None:
        """Handle the next message of a lane: the progress or the outcome of a run."""
        try:
            lane, message = self._messages.get(timeout=_POLL_S)
        except Empty:
            return
        if isinstance(message, BaseException):
            raise message
        if not isinstance(message, Outcome):
            self.display.hear(message, lane.name)
            return
        job = self._running[lane].job
        record = self._end(lane, message)
        self._idle.append(lane)
        source.settle(job, record, message)

    def _end(self, lane: Lane, outcome: Outcome) -> Record:
        one = self._running.pop(lane)
        return self._write(one.job, lane, one.place, outcome, one.started_at, one.beside)

    def refuse(self, case: Case) -> str:
        """Return why a case is not to be run on these lanes; empty if it is."""
        if (reason := self.inputs.refuse(case)) or "precision" in self.options.axes:
            return reason
        reason = self.inputs.platforms[case.device].find_emulation(PRECISIONS[case.precision])
        return f"{reason}; --precision {case.precision} measures it anyway" if reason else ""

    def _place(self, job: Job, lane: Lane) -> Job | Outcome:
        """Return a job with all that its worker needs, or its outcome if nothing need be run."""
        case = job.case
        if job.smaller is not None:
            return Outcome(Status.OOM, f"batch size {job.smaller} already ran out of memory")
        if reason := self.refuse(case):
            return Outcome(Status.UNSUPPORTED, reason)
        platform, inputs = self.lanes[lane][case.device], self.inputs
        uuid = platform.environment.gpu_uuid
        # several GPUs are those of the kind that was examined
        own = lane
        if uuid and case.world_size > 1 and self.options.here:
            own = replace(lane, gpus=lane.gpus or (uuid,))
        try:
            place = self._executor.gather(own, case.device, case.world_size)
        except UnsupportedError as error:
            return Outcome(Status.UNSUPPORTED, str(error))
        seed, now = choose_seed(job.run, self.options.same_seed), inputs.describe(case, platform)
        placed = replace(
            job,
            case=case if seed == case.seed else replace(case, seed=seed),
            folder=inputs.data(case).folder,
            gpu_uuid=uuid,
            log=self.out / LOGS / f"{job.name}-{job.attempt}.log",
            trace=self._place_trace(job),
            outputs=(self.out / OUTPUTS / f"{job.name}-{job.attempt}").absolute(),
            files=inputs.versions.list_files(case),
            since_ns=self._since_ns,
            sees_steps=not self.options.no_steps,
            lane=place,
        )
        # a retry finds everything itself; and so does a case whose GPU is not known yet
        if job.attempt == 1 and self.options.here:
            placed = replace(placed, known=self._known.recall(case, now))
        if case.checkpoint and not job.probe:
            kept = self._keep_run(job)
            kept.open()
            placed = replace(placed, checkpoints=kept.folder, identity=kept.identify(case, now))
        return placed

    def _write(
        self,
        job: Job,
        lane: Lane,
        place: Lane,
        outcome: Outcome,
        started_at: str,
        beside: int = 0,
    ) -> Record:
        """Write and show the record of a run that has ended, which ``lane`` took and that ran on
        ``place``, possibly with more GPUs, while at most ``beside`` other lanes were busy."""
        case, log = job.case, f"{LOGS}/{job.name}-{job.attempt}.log"
        platform, at = self.lanes[lane][case.device], outcome.place
        if at and at.environment is not None:
            platform = Platform(at.environment, unrated=at.unrated)
        if platform.unrated:
            m = outcome.measurement
            m.missing = write_missing(read_missing(m.missing or "") | {**platform.unrated})
        finished_at, columns = read_clock(), dict[str, Any]()
        if (seen := outcome.seen) is not None:
            if case.command is not None:
                self._tell_left(seen, outcome.measurement)
                wrote, seen = seen.wrote, self._left.leave_aside(seen)
                self._left.add(wrote, started_at, finished_at)
            columns = self._settle_version(case, seen)
        environment = replace(self.inputs.describe(case, platform), **columns)
        if outcome.unit:  # which a command alone tells
            environment.unit, environment.train_images = outcome.unit, outcome.epoch_items
        record = Record(
            record_id=uuid4().hex[:16],
            case=case,
            repeat=job.repeat,
            run_seed=choose_seed(job.run, self.options.same_seed),
            sentinel=job.sentinel,
            probe=job.probe,
            lane=at.lane if at else place.name,
            lanes_beside=beside,
            attempt=job.attempt,
            status=outcome.status,
            reason=outcome.reason,
            inferred=job.smaller is not None,
            executor=self.options.executor,
            started_at=started_at,
            finished_at=finished_at,
            retries=outcome.retries,
            log=log if (self.out / log).exists() else "",
            measurement=outcome.measurement,
            environment=environment,
        )
        try:
            self.store.append(record, outcome.steps, outcome.epochs, outcome.work, outcome.ranks)
        except StoreError:
            # the disk may be full: print the measurement, so that it is not lost
            row = {name: v for name, v in flatten(record).items() if v not in (None, "")}
            self.display.say(f"not written: {row}")
            raise
        self._losses[_tell_run(job)] += record.status is Status.LOST
        self._known.learn(record, outcome.work)
        if case.checkpoint and not job.probe:
            self._keep_run(job).finish(record)
        self.display.conclude(record, lane.name)
        return record

    def _tell_left(self, seen: Seen, m: Measurement) -> None:
        """Tell in a row what a command left in the user's folders, and what of earlier runs it read
        there; and say so, once."""
        carried, overwritten = self._left.find_carried(seen), self._left.find_overwritten(seen)
        m.carried = "; ".join(carried[:MOST_LEFT]) or None
        m.wrote = "; ".join(seen.wrote[:MOST_LEFT]) or None
        lines = []
        if carried:
            lines.append(
                f"this run read {name_first(carried, 3)}, which an earlier run wrote: it may have "
                "gone on from there"
            )
        if overwritten:
            lines.append(
                f"runs overwrite {name_first(overwritten, 3)}, and what was there before the sweep"
            )
        for line in lines:
            if (kind := line[:9]) not in self._warned:
                self._warned.add(kind)
                fix = "{out} in --command is a folder that each run has for itself"
                self.display.say(f"warning: {line}; {fix}")

    def _settle_version(self, case: Case, seen: Seen) -> dict[str, Any]:
        """Return the columns of what a case was made of, and say so if it was not as expected: its
        files were edited while the sweep ran."""
        columns, edited, more = self.inputs.versions.settle(case, seen)
        if more:
            self.write_config()
        if edited:
            self.display.say(
                f"warning: {name_first(edited, 4)} changed while the sweep ran; this run and later "
                "ones are of another version, and are compared with none before; for all of one "
                "version start again with another --out"
            )
        return columns

    def _place_trace(self, job: Job) -> Path | None:
        if not (job.case.profile and self.options.trace):
            return None
        return self.out / TRACES / f"{job.name}-{job.attempt}.json.gz"

    def _keep_run(self, job: Job) -> KeptRun:
        return KeptRun(self.out / CHECKPOINTS / job.name, job.run_name)

    # ----------------------------------------------------------------------------- its rates

    def rate(self, lane: Lane, device: str) -> None:
        """Measure the rates of a lane before its first case, unless its folder has them, and warn
        of slow ones and of precisions that the device emulates. On a cluster each node measures its
        own."""
        if (lane, device) in self._rated:
            return
        first = all(device != other for _, other in self._rated)
        self._rated.add((lane, device))
        platforms = self.lanes[lane]
        if self.options.here and (seconds := choose_seconds(device)):
            platforms[device] = platforms[device].rate(self._find_rates(lane, device, seconds))
        if first:
            cases = [c for c in self.planned if c.device == device and not self.refuse(c)]
            self.say(warn_of_emulation(cases, platforms, self.inputs.models))

    def _find_rates(self, lane: Lane, device: str, seconds: float) -> DeviceRates:
        platform = self.lanes[lane][device]
        if (known := read_rates(platform, self.out)).rates:
            return known
        gpu = platform.environment.gpu
        name = " · ".join(filter(None, [lane.name, gpu or "the CPU"]))
        with watch(f"{name}: measuring what it can do now"):
            found = self._executor.rate(lane, device, seconds)
        self.display.say(f"{name}: {describe_rates(found, gpu) or 'not known'}")
        self.say(f"warning: {what}; {fix}" for what, fix in check_rates(found, gpu))
        return found


_Run = tuple[tuple[Any, ...], int, bool, bool]
"""The axes of a run's case, its repeat, and whether it is the drift check or a probe."""


def _tell_run(job: Job) -> _Run:
    return list_values(job.case), job.repeat, job.sentinel, job.probe


@dataclass
class _Running:
    job: Job  # as its source asked for it
    place: Lane  # that it runs on, which may have more GPUs than its lane
    started_at: str
    beside: int = 0

    @property
    def wide(self) -> bool:
        return self.job.case.world_size > 1


def choose_seed(run: PlannedRun, same_seed: bool) -> int:
    """Return the seed of a run: for repeat N the case's plus N - 1, or the case's for all repeats.

    The loss of one epoch differs more between seeds than most changes alter it, so repeats with the
    same seed would show no spread where there is one. The drift check repeats the first run.
    """
    case, repeat, _ = run
    return case.seed if same_seed else case.seed + repeat - 1
