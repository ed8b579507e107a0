"""The search for the largest batch of each family of cases; every probe is a record."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bench.base.progress import EVERY_S
from bench.base.text import count, write_seconds
from bench.results.store.rows import Row
from bench.schema.case import Case, list_varying
from bench.schema.grid import AUTO
from bench.schema.record import Outcome, Record, flatten
from bench.sweep.display import Display
from bench.sweep.largest_batch import (
    USUAL,
    Ending,
    LargestBatch,
    ProbedFamily,
    make_probe,
    read_trials,
)
from bench.sweep.loop import Loop, open_loop
from bench.sweep.options import Options, Plan, plan_cases
from bench.workers.job import Job, Lane


class Searches:
    """The searches for the largest batch of each family, with one probe at a time. They continue
    from the probes in ``rows``, those that new ones can be compared with.

    Args:
        step: resolution of the search, in images.
        margin: share of memory that the recommended batches leave free.
        announced: whether each search says what it found as it ends.
    """

    def __init__(
        self,
        loop: Loop,
        families: Sequence[Case],
        rows: Sequence[Row],
        step: int,
        margin: float,
        announced: bool = True,
    ) -> None:
        self.loop, self._announced = loop, announced
        self.largest_batches: dict[Case, LargestBatch] = {}
        self._step, self._margin = step, margin
        known = [row for row in rows if row.status not in loop.options.retry]
        trials = {trial.family: trial for trial in read_trials(known)}
        self.axes = list_varying(families, but="batch_size")
        # the searches that have not ended, and the families of the probes that run
        self._left = {family: trials.get(family) or ProbedFamily(family) for family in families}
        self._running: dict[Case, Case] = {}
        self._began, self._probed = time.monotonic(), set[Case]()  # families, since then
        self.known = sum(len(trial.rows) for trial in self._left.values())

    @property
    def left(self) -> bool:
        """Whether any unfinished search has no running probe."""
        return len(self._running) < len(self._left)

    def take(self, lane: Lane, idle: Sequence[Lane]) -> Job | None:
        """Return the next probe of the first family that has none running."""
        for family in [f for f in self._left if f not in self._running.values()]:
            if asked := self._build(self._left[family]).asked:
                probe = make_probe(family, asked.batch_size, asked.long)
                self._running[probe] = family
                return Job(probe, probe=True)
            self.conclude(family)
        return None

    def settle(self, job: Job, record: Record, outcome: Outcome) -> None:
        """Learn from a probe. A family whose probe is lost again and again is given up."""
        family = self._running.pop(job.case)
        self._left[family].add(Row(flatten(record)))
        self._probed.add(family)
        if self.loop.gives_up(job):
            self.conclude(family)

    def conclude(self, family: Case) -> None:
        """End a search; its largest batch is incomplete if it was stopped."""
        found = self.largest_batches[family] = self._build(self._left.pop(family))
        words = [describe_largest_batch(found)] if self._announced else []
        if (left_s := self._estimate_left()) > EVERY_S:
            others = f"{count(len(self._left), 'other setting')} if they take as long"
            words.append(f"about {write_seconds(left_s)} left for {others}")
        if words:
            self.loop.display.say(f"{family.label(self.axes)}: {'; '.join(words)}")

    def _estimate_left(self) -> float:
        """Return how long the other searches take, in s; 0 if that is not known."""
        ended = len(self._probed - self._left.keys())
        if not ended or self.loop.stopped:
            return 0.0
        return len(self._left) * (time.monotonic() - self._began) / ended

    def _build(self, trial: ProbedFamily) -> LargestBatch:
        inputs = self.loop.inputs
        images, batchnorm = inputs.data(trial.family).train_images, inputs.has_batchnorm
        goal = trial.aim(images, self._step, batchnorm(trial.family))
        return LargestBatch(trial.probes, goal, self._margin)

    def find_largest_batches(self) -> dict[Case, LargestBatch]:
        """Find the largest batch of each family, until stopped."""
        families, loop = [*self._left], self.loop
        axes = [*self.axes, "batch_size", "steps"]
        what = f"the largest batch of {count(len(families), 'setting')}"
        with Display(loop.out, None, self.known, axes, what) as display:
            loop.show_on(display)
            if len(families) > 1:
                loop.say(
                    [f"each by about {USUAL} probes; how long all take is told after the first"]
                )
            loop.work(self)
            for family in [*self._left]:
                self.conclude(family)
        return {family: self.largest_batches[family] for family in families}


def find_largest(
    options: Options, step: int, margin: float
) -> tuple[dict[Case, LargestBatch], Loop]:
    """Find the largest batch of each family, in --out or a new folder. Return the largest_batches
    by family, and the loop, which may have been stopped."""
    plan = Plan(searched=[(family, AUTO) for family in plan_cases(options).families])
    with open_loop(options, plan) as loop:
        families = loop.inputs.plan.families
        comparable = loop.find_comparable(families)
        loop.write_config(search={"step": step, "margin": margin})
        searches = Searches(loop, families, comparable, step, margin, announced=False)
        return searches.find_largest_batches(), loop


_TOLD_WHY = (Ending.GAVE_UP, Ending.FAILS, Ending.NOTHING_FITS, Ending.NO_STEPS)


def describe_largest_batch(found: LargestBatch) -> str:
    words = [f"batch size {found.largest} trains"] if found.largest else []
    if found.smallest_failing is not None:
        words.append(f"{'' if words else 'batch size '}{found.smallest_failing} does not")
    if found.confirmed:
        words += [Ending.EVERY_SIZE.meaning] * (found.ending is Ending.EVERY_SIZE)
        words.append(
            f"{found.recommended or 'none'} leaves {100 * found.margin:g} % of memory free"
        )
    else:
        words.append(found.ending.meaning if found.ending else "the search has not ended")
        if found.failed and found.ending in _TOLD_WHY:
            words[-1] += f" ({found.failed})"
        alone = "raise --memory-limit" in found.failed  # no batch is small enough
        if found.ending is Ending.NOTHING_FITS and (found.smallest_failing or 0) > 1 and not alone:
            words.append("bench.fit --step 1 looks for smaller ones")
    if found.thrashes_from:
        words.append(f"from {found.thrashes_from} on the allocator retries")
    if line := found.line:
        fixed, each = line.fixed_bytes / 2**20, line.bytes_per_image / 2**20
        words.append(f"memory is {fixed:,.0f} MiB and {each:.3g} an item")
    return ", ".join(words) + f" ({count(found.probes, 'probe')})"
