"""What a sweep does with the lanes of one class of hardware, in a folder of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.case import Case
from bench.record import Status
from bench.store.plans import collect_times, leave_out_known, plan_runs
from bench.store.runs import Run, read_history
from bench.sweep.anchors import choose_anchors
from bench.sweep.folder import (
    CLASS,
    describe_config,
    read_past,
    refuse_other_part,
    refuse_other_seeds,
)
from bench.sweep.grid import Grid
from bench.sweep.hardware import Hardware, find_widest
from bench.sweep.loop import Loop
from bench.sweep.options import Options, Plan, plan_cases
from bench.sweep.preflight import leave_out_batches
from bench.sweep.probing import Searches
from bench.sweep.schedule import OomSkips, Pace, remaining_runs
from bench.text import read_time
from bench.wall.answer import Wall
from bench.wall.search import MARGIN, STEP


class Part:
    """The full grid on one class of hardware: what its folder holds already, and what is to be run.

    Raises UsageError: as `refuse_other_part` and `read_past`.
    """

    def __init__(self, loop: Loop, hardware: Hardware, asked: Plan, options: Options) -> None:
        store = loop.store
        self.loop, self.asked, self.options, self.cases = loop, asked, options, asked.cases
        self._earlier = store.read_config() | ({CLASS: hardware.folder} if hardware.folder else {})
        refuse_other_part(store.folder, self._earlier, options.shard)
        every = [*asked.cases, *asked.unsized]
        # the rows that new ones can be compared with, and all
        self._comparable, frame = read_past(store.folder, every, options, hardware.inputs)
        loop.widest = find_widest(frame)
        anchors = frame[frame["anchor"] != ""]
        self.anchored = Counter(zip(anchors["anchor"], anchors["lane"], strict=True))
        # the last attempts at all runs, and those of them that count
        self.before = self._done = read_history(frame)
        if len(self._comparable) < len(frame):
            self._done = read_history(self._comparable)
        self.plan = list[Run]()
        self.runs = list[Run]()
        self.walls: dict[Case, Wall] = {}
        self.write_config()

    @property
    def folder(self) -> Path:
        return self.loop.store.folder

    def search(self) -> Searches:
        return Searches(self.loop, self.asked.families, self._comparable)

    def fill_in(self, walls: dict[Case, Wall]) -> None:
        """Take what the searches found as batch sizes of its cases."""
        self.walls, inputs = walls, self.loop.inputs
        planned = plan_cases(self.options, walls, inputs.settle).cases
        self.cases, left_out = leave_out_batches(planned, inputs)
        self.loop.notes += left_out
        self.write_config()

    def write_config(self) -> None:
        search = {"step": STEP, "margin": MARGIN} if self.asked.families else None
        inputs = self.loop.inputs
        config = describe_config(self.cases, self.options, inputs, self._earlier, search)
        if config != self.loop.store.read_config():
            self.loop.store.write_config(config)

    def plan_runs(self) -> None:
        """Decide what is to be run; a UsageError as of `refuse_other_seeds`."""
        if not self.options.repeats_given and not self._list_remaining(plan_runs(self.cases, 1)):
            self.limit_repeats(self.read_pace())
        self.plan = plan_runs(self.cases, self.options.repeats)
        refuse_other_seeds(self.folder, self.plan, self._done, self.options.same_seed)
        self.runs = self._list_remaining(self.plan)
        self.loop.planned = list(dict.fromkeys(case for case, _, _ in self.runs))

    def read_pace(self) -> Pace:
        """How long the first runs took that are there."""
        rows = self._comparable
        rows = rows[(rows["repeat"] == 1) & ~rows["sentinel"] & ~rows["probe"] & ~rows["inferred"]]
        rows = rows[(rows["anchor"] == "") & (rows["status"] != str(Status.LOST))]
        times = zip(rows["started_at"], rows["finished_at"], strict=True)
        seconds = [read_time(ended) - read_time(begun) for begun, ended in times]
        return Pace(len(self.cases), len(self.loop.lanes), seconds)

    def limit_repeats(self, pace: Pace) -> int:
        """Leave out the repeats that would take too long; how often each case is to run."""
        wanted = self.options.repeats
        if (fits := pace.fit(wanted)) < wanted:
            self.loop.notes.append(pace.describe(wanted))
            self.options = replace(self.options, repeats=fits)
            self.write_config()
        return fits

    def make_grid(self) -> Grid:
        left = set(self.runs)
        known = {run: past for run, past in self._done.items() if run not in left}
        skips = None if self.options.no_skip else OomSkips(known)
        grid = Grid(self.loop, self.runs, self.before, skips, collect_times(self._done))
        if not self.options.repeats_given and self.options.repeats > 1:
            grid.limit_repeats(self.read_pace(), self._limit_while_running)
        return grid

    def _limit_while_running(self, pace: Pace) -> int:
        fits = self.limit_repeats(pace)
        self.loop.say_notes()
        return fits

    def _list_remaining(self, plan: Sequence[Run]) -> list[Run]:
        plan = leave_out_known(plan, self._done)
        return remaining_runs(plan, self._done, self.options.retry, self.options.no_skip)

    def choose_anchors(self) -> list[Case]:
        """The anchors that may be made of the sweep's cases that can run here, the best first."""
        return choose_anchors([case for case in self.cases if not self.loop.refuse(case)])
