"""The search for advice, as a source of runs for a lane; its folder may hold earlier runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import monotonic

from bench.advise.answer import Answer, describe_progress
from bench.advise.settings import (
    expect,
    find_room,
    list_levers,
    list_settings,
    name_levers,
    read_scale,
    refuse,
    strip,
)
from bench.advise.standing import Budget, Result, Space, Standing, choose
from bench.case import Case
from bench.data import SYNTHETIC
from bench.record import REPEATED, Outcome, Record, Status, flatten
from bench.store.rows import Row, keep_latest
from bench.sweep.display import Display
from bench.sweep.folder import read_past, write_config
from bench.sweep.loop import Loop, open_loop
from bench.sweep.options import Options, Plan
from bench.sweep.schedule import Losses
from bench.text import read_time
from bench.wall import read_peak
from bench.worker.messages import Job, Lane


@dataclass(frozen=True)
class Question:
    """A command line, parsed and checked."""

    now: Case  # the setting that is used now
    options: Options
    aim: str  # of `bench.questions.settings.AIMS`; empty for the rule of choice
    budget_s: float
    margin: float
    write: Callable[[Answer], str]


def find_advice(asked: Question, until: float) -> Answer:
    """Search until ``until``, by `time.monotonic`, and return what was found."""
    axes = asked.options.axes
    with open_loop(asked.options, Plan([asked.now])) as loop:
        inputs = loop.inputs
        now = strip(inputs.plan.cases[0])
        items = inputs.data(now).train_images
        fixed = {name: axes[name] for name in name_levers(now) if name in axes}
        fixed |= {name: values for name, values in axes.items() if len(values) > 1}
        if asked.aim == "memory":  # the smallest batch takes least
            fixed.setdefault("batch_size", [now.batch_size])
        levers = list_levers(now, fixed, items)
        scale = read_scale(loop.out, now)
        said = {"loss_scale": scale} if scale else {}
        settings = list_settings(now, levers, {**said, **axes}, inputs)
        asked_for = axes.get("precision", ())
        left_out = {
            str(value): why
            for value in levers.get("precision", ())
            if (why := refuse(replace(now, precision=str(value)), now, inputs, asked_for))
        }
        loop.lock()
        comparable, _ = read_past(loop, settings)
        write_config(loop)
        advisor = Advisor(loop, settings, comparable, asked, until)
        known, what = len(advisor.known), "the best setting"
        with Display(loop.out, None, known, [*levers], what) as display:
            loop.show_on(display)
            loop.work(advisor)
    return Answer(
        advisor.standing,
        {name: values for name, values in levers.items() if len(values) > 1},
        left_out,
        loop.resume,
        asked.budget_s,
        loop.out,
        loop.stopped,
    )


class Advisor:
    """Source of runs: hands out what `bench.advise.standing.choose` asks for, one run at a time.

    Args:
        settings: the candidates, the present setting first.
        rows: those of the folder that new ones can be compared with.
        until: the time.monotonic() at which the budget ends.
    """

    def __init__(
        self,
        loop: Loop,
        settings: Sequence[Case],
        rows: Sequence[Row],
        asked: Question,
        until: float,
    ) -> None:
        self.loop, self._settings, self._asked, self._until = loop, settings, asked, until
        self._room_bytes = find_room(settings[0], loop.inputs)
        self._attempts = Counter[tuple[Case, int]]()
        self._repeats = Counter[Case]()
        self._losses = Losses()
        self.known = self._read(rows)
        self._open = False
        self._made: Space | None = None
        self.standing = Standing(self.known, self.space)

    @property
    def space(self) -> Space:
        """The candidates and what is expected of them, which improves once rates are measured."""
        settings, inputs, aim = self._settings, self.loop.inputs, self._asked.aim
        now = settings[0]
        prior = [0.0 for _ in settings] if aim == "memory" else expect(settings, inputs)
        if self._made is None or prior != self._made.prior:
            self._made = Space(
                settings,
                prior,
                aim,
                room_bytes=self._room_bytes,
                judged=now.dataset != SYNTHETIC,
                margin=self._asked.margin,
                epoch_s=lambda setting: self.loop.inputs.predict(setting),
                classes=inputs.data(now).classes or None,
                items=inputs.data(now).train_images,
            )
        return self._made

    @property
    def left(self) -> bool:
        return not self._open and self._choose() is not None

    def _choose(self) -> Case | None:
        return choose(self.standing, Budget(self._asked.budget_s, self._until - monotonic()))

    def take(self, lane: Lane, idle: Sequence[Lane]) -> Job | None:
        # measures the rates that predict the length of the first run
        self.loop.rate(lane, self._settings[0].device)
        if self._open or (case := self._choose()) is None:
            return None
        self._open = True
        repeat = self._repeats[case] + 1
        self._attempts[case, repeat] += 1
        return Job(case, repeat=repeat, attempt=self._attempts[case, repeat])

    def settle(self, job: Job, record: Record, outcome: Outcome) -> None:
        """Learn from a run. A lost run is repeated, as often as `Losses` allows."""
        self._open = False
        lost = record.status is Status.LOST and self._losses.allow((job.case, job.repeat), outcome)
        if lost or record.status is Status.INTERRUPTED:
            return
        self.known.append(self._read_result(job.case, job.repeat, Row(flatten(record))))
        self.standing = Standing(self.known, self.space)
        self.loop.display.say(f"    {describe_progress(self.standing, self._until - monotonic())}")

    def _read(self, rows: Sequence[Row]) -> list[Result]:
        """Return the results of earlier runs of the candidate settings."""
        allowed, found = set(self._settings), []
        again = REPEATED | set(self.loop.options.retry)
        for row in keep_latest(row for row in rows if row.is_repeat):
            self._attempts[row.case, row.repeat] = row.attempt
            if row.status not in again and strip(row.case) in allowed:
                found.append(self._read_result(row.case, row.repeat, row))
        return found

    def _read_result(self, case: Case, repeat: int, row: Row) -> Result:
        self._repeats[case] = max(repeat, self._repeats[case])
        number = row.number
        used = number("peak_device_bytes") or number("peak_process_bytes")
        time_s, measured_s, energy = map(number, ("epoch_time_s", "measured_time_s", "energy_j"))
        whole = energy * time_s / measured_s if energy and time_s and measured_s else None
        values = {"time": time_s, "memory": used, "energy": whole}
        return Result(
            case,
            row.status,
            took_s=read_time(row.finished_at) - read_time(row.started_at),
            trained_s=measured_s or 0.0,
            time_s=time_s,
            value=values.get(self._asked.aim, time_s),
            used_bytes=used,
            room_bytes=read_peak(row),
            seed=row.run_seed,
            loss=number("train_loss"),
            reason=row.reason,
            record_id=row.record_id,
        )
