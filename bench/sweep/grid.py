"""The runs of a sweep, in the order of the plan, less those that need not be run."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import islice, takewhile

from bench.case import Case
from bench.record import Outcome, Record, Status
from bench.store.rows import LatestAttempt, Run, is_known
from bench.sweep.loop import Loop
from bench.sweep.schedule import Losses, OomSkips
from bench.worker import Job, Lane

_FAILED = (Status.ERROR, Status.KILLED, Status.TIMEOUT, Status.LOST)


class Grid:
    """A source of planned runs; a lost run is run again next, as a new attempt.

    Args:
        before: the latest recorded attempt at each run.
        skips: batch sizes that ran out of memory.
        times: epoch times of earlier runs, in s, by which repeats are left out.
    """

    def __init__(
        self,
        loop: Loop,
        runs: Sequence[Run],
        before: Mapping[Run, LatestAttempt],
        skips: OomSkips,
        times: Mapping[Case, Sequence[float]],
    ) -> None:
        self.loop = loop
        self.ended = Counter[Status]()
        self._runs, self.asked = deque(runs), len(runs)  # how many are to be made
        self._attempts = Counter({run: past.attempt for run, past in before.items()})
        self._skips = skips
        self._times = {case: list(of) for case, of in times.items()}
        self._losses = Losses()
        self._ran = Counter[tuple[Case, str]]()  # how often a case ran on a lane
        self.running = 0  # runs that were taken and have not ended
        # the lane of each run, for its sentinel; on several GPUs, the lane of the first
        self._lanes = {run: _name_first(past.lane) for run, past in before.items()}

    @property
    def left(self) -> bool:
        return bool(self._runs)

    @property
    def waiting(self) -> int:
        return self.asked - self.ended.total()

    @property
    def measured(self) -> bool:
        """Whether any run ended without failure."""
        return any(status not in _FAILED for status in self.ended)

    def take(self, lane: Lane, idle: Sequence[Lane]) -> Job | None:
        """Return the next run. A sentinel comes last, if possible on the lane of its first run."""
        if not self._runs:
            return None
        run = self._choose(lane)
        case, repeat, sentinel = run
        if sentinel:
            home = self._lanes.get((case, repeat, False), lane.name)
            if self.running or (home != lane.name and home in [free.name for free in idle]):
                return None
        self._runs.remove(run)
        self._ran[case, lane.name] += 1
        self.running += 1
        self._lanes[run] = lane.name
        self._attempts[run] += 1
        smaller = self._skips.blocks(case)
        return Job(
            case, repeat=repeat, sentinel=sentinel, attempt=self._attempts[run], smaller=smaller
        )

    def _choose(self, lane: Lane) -> Run:
        """Choose the next run: of the same repeat, the case that ran least often on this lane.

        If cases were assigned in turn, each would have the same GPU in all its repeats whenever the
        number of cases divides evenly, and a slower GPU would look like the effect of a setting.
        """
        _, repeat, sentinel = self._runs[0]
        # with 10,000 cases, it is not worth looking at all of them
        near = islice(self._runs, 2 * len(self.loop.lanes))
        alike = takewhile(lambda run: run[1:] == (repeat, sentinel), near)

        return min(alike, key=lambda run: self._ran[run[0], lane.name])

    def settle(self, job: Job, record: Record, outcome: Outcome) -> None:
        """Learn from an outcome. A lost run comes next again, as often as `Losses` allows."""
        self.running -= 1
        if (time := record.measurement.epoch_time_s) and record.status is Status.OK:
            times = self._times.setdefault(case := job.run[0], [])
            times.append(time)
            if is_known(case, times):
                kept = deque(r for r in self._runs if r[0] != case or r[1] == 1)
                self.asked -= len(self._runs) - len(kept)
                self.loop.display.leave_out(len(self._runs) - len(kept))
                self._runs = kept
        if job.smaller is None:
            self._skips.note(record.case, record.status)
        if record.status is Status.LOST and self._losses.allow(job.run, outcome):
            self._ran[record.case, self._lanes[job.run]] -= 1  # it does not count for that lane
            self._runs.appendleft(job.run)
        else:
            self.ended[record.status] += 1
        self._lanes[job.run] = _name_first(record.lane)


def _name_first(lane: str) -> str:
    return lane.partition("+")[0]
