"""What a sweep does with the lanes of one class of hardware, in a folder of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.case import Case
from bench.record import Status
from bench.store.plans import collect_times, leave_out_known, plan_runs
from bench.store.reader import Past, Run, read_history
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

if TYPE_CHECKING:
    import pandas as pd


@dataclass(eq=False)
class Part:
    """The full grid on one class of hardware: what is there already, and what is to be run.

    ``comparable`` are the rows in the folder that new ones can be compared with, ``before`` the
    last attempts at all runs that it holds and ``done`` those that count.
    """

    loop: Loop
    asked: Plan
    options: Options
    comparable: pd.DataFrame
    before: Mapping[Run, Past]
    done: Mapping[Run, Past]
    earlier: Mapping[str, Any]
    anchored: Mapping[tuple[str, str], int]
    cases: list[Case]
    plan: list[Run] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    walls: dict[Case, Wall] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.loop.store.folder

    def search(self) -> Searches:
        return Searches(self.loop, self.asked.families, self.comparable)

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
        config = describe_config(self.cases, self.options, inputs, self.earlier, search)
        if config != self.loop.store.read_config():
            self.loop.store.write_config(config)

    def plan_runs(self) -> None:
        """Decide what is to be run; a UsageError as of `refuse_other_seeds`."""
        if not self.options.repeats_given and not self._list_remaining(plan_runs(self.cases, 1)):
            self.limit_repeats(self.read_pace())
        self.plan = plan_runs(self.cases, self.options.repeats)
        refuse_other_seeds(self.folder, self.plan, self.done, self.options.same_seed)
        self.runs = self._list_remaining(self.plan)
        self.loop.planned = list(dict.fromkeys(case for case, _, _ in self.runs))

    def read_pace(self) -> Pace:
        """How long the first runs took that are there."""
        rows = self.comparable
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
        known = {run: past for run, past in self.done.items() if run not in left}
        skips = None if self.options.no_skip else OomSkips(known)
        grid = Grid(self.loop, self.runs, self.before, skips, collect_times(self.done))
        if not self.options.repeats_given and self.options.repeats > 1:
            grid.limit_repeats(self.read_pace(), self._limit_while_running)
        return grid

    def _limit_while_running(self, pace: Pace) -> int:
        fits = self.limit_repeats(pace)
        self.loop.say_notes()
        return fits

    def _list_remaining(self, plan: Sequence[Run]) -> list[Run]:
        plan = leave_out_known(plan, self.done)
        return remaining_runs(plan, self.done, self.options.retry, self.options.no_skip)

    def choose_anchors(self) -> list[Case]:
        """The anchors that may be made of the sweep's cases that can run here, the best first."""
        return choose_anchors([case for case in self.cases if not self.loop.refuse(case)])


def open_part(loop: Loop, hardware: Hardware, asked: Plan, options: Options) -> Part:
    """See what the folder of a class of hardware holds; a UsageError as of `read_past`."""
    store, inputs = loop.store, hardware.inputs
    earlier = store.read_config() | ({CLASS: hardware.folder} if hardware.folder else {})
    refuse_other_part(store.folder, earlier, options.shard)
    comparable, frame = read_past(store.folder, [*asked.cases, *asked.unsized], options, inputs)
    loop.widest = find_widest(frame)
    anchors = frame[frame["anchor"] != ""]
    before = read_history(frame)
    part = Part(
        loop=loop,
        asked=asked,
        options=options,
        comparable=comparable,
        before=before,
        done=before if len(comparable) == len(frame) else read_history(comparable),
        earlier=earlier,
        anchored=Counter(zip(anchors["anchor"], anchors["lane"], strict=True)),
        cases=asked.cases,
    )
    part.write_config()
    return part
