"""The search for advice, as a source of runs for a lane; its folder may hold earlier runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING

from bench.advise.answer import Answer, describe_progress, describe_start
from bench.advise.belief import guess
from bench.advise.options import Question
from bench.advise.policy import Budget, choose
from bench.advise.space import (
    expect,
    expect_start,
    find_room,
    list_levers,
    list_settings,
    name_levers,
    read_scale,
    refuse,
)
from bench.advise.standing import NOISE, Aim, Result, Space, Standing, Trial, read_trial, strip
from bench.case import Case
from bench.data import SYNTHETIC
from bench.record import REPEATED, Outcome, Record, Status, flatten
from bench.store.rows import Row, keep_latest
from bench.sweep.display import Display
from bench.sweep.folder import read_past, write_config
from bench.sweep.loop import Loop, open_loop
from bench.sweep.options import Plan
from bench.sweep.schedule import Losses
from bench.text import read_time
from bench.wall.records import read_peak
from bench.worker.messages import Job, Lane

if TYPE_CHECKING:
    pass

MIN_STEPS = 6
"""Steps below which no error of their mean is computed."""


def find_advice(asked: Question, until: float) -> Answer:
    """Search until ``until``, by `time.monotonic`, and return what was found."""
    axes = asked.options.axes
    with open_loop(asked.options, Plan([asked.now])) as loop:
        inputs = loop.inputs
        now = strip(inputs.plan.cases[0])
        items = inputs.data(now).train_images
        fixed = {name: axes[name] for name in name_levers(now) if name in axes}
        fixed |= {name: values for name, values in axes.items() if len(values) > 1}
        if asked.goal == "memory":  # the smallest batch takes least
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
        asked.goal,
        {name: values for name, values in levers.items() if len(values) > 1},
        left_out,
        loop.resume,
        asked.budget_s,
        loop.out,
        asked.price,
        items,
        loop.stopped,
    )


class Advisor:
    """Source of runs: hands out what `bench.advise.policy.choose` asks for, one run at a time.

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
        self._losses = Losses()
        self.known = self._read(rows)
        self._open: Trial | None = None
        self._begun = False
        self._chosen: list[Trial | None] = []  # the next trial, once `_choose` has found it
        self._made: Space | None = None
        self.standing = Standing(self.known, self.space)

    @property
    def space(self) -> Space:
        """The candidates and what is expected of them, which improves once rates are measured."""
        settings, inputs, exact = self._settings, self.loop.inputs, self._asked.goal == "memory"
        now, prior = settings[0], expect(settings, inputs)
        if not prior and now.device == "cuda":
            prior = [guess(setting) for setting in settings]
        if not prior or exact:
            prior = [0.0 for _ in settings]
        if self._made is None or prior != self._made.prior:
            self._made = Space(
                now,
                settings,
                prior,
                room_bytes=self._room_bytes,
                judged=now.dataset != SYNTHETIC,
                margin=self._asked.margin,
                noise=0.0 if exact else NOISE,
                start_s=expect_start,
                epoch_s=lambda setting: self.loop.inputs.predict(setting),
                classes=inputs.data(now).classes or None,
                items=inputs.data(now).train_images,
            )
        return self._made

    @property
    def left(self) -> bool:
        return self._open is None and self._choose() is not None

    def _choose(self) -> Trial | None:
        """Return the next trial; cached, as `left` and `take` both ask for it in each run."""
        if not self._chosen:
            budget = Budget(self._asked.budget_s, self._until - monotonic())
            self._chosen = [choose(self.standing, budget)]
        return self._chosen[0]

    def take(self, lane: Lane, idle: Sequence[Lane]) -> Job | None:
        # measures the rates that predict the length of the first run
        self.loop.rate(lane, self._settings[0].device)
        if self._open is not None or (trial := self._choose()) is None:
            return None
        if not self._begun:
            bounds_s = self._asked.budget_s, self._asked.options.timeout_s
            self.loop.display.say(describe_start(self.standing, trial, *bounds_s))
        self._open, self._chosen, self._begun = trial, [], True
        case = self.standing.find_case(trial)
        self._attempts[case, trial.repeat] += 1
        return Job(case, repeat=trial.repeat, attempt=self._attempts[case, trial.repeat])

    def settle(self, job: Job, record: Record, outcome: Outcome) -> None:
        """Learn from a run. A lost run is repeated, as often as `Losses` allows."""
        trial, self._open = self._open, None
        assert trial is not None
        lost = record.status is Status.LOST and self._losses.allow(trial, outcome)
        if lost or record.status is Status.INTERRUPTED:
            return
        self.known.append(self._read_result(trial, Row(flatten(record))))
        self.standing = Standing(self.known, self.space)
        self.loop.display.say(f"    {describe_progress(self.standing, self._until - monotonic())}")

    def _read(self, rows: Sequence[Row]) -> list[Result]:
        """Return the results of earlier runs of the candidate settings."""
        allowed, found = set(self._settings), []
        again = REPEATED | set(self.loop.options.retry)
        for row in keep_latest(row for row in rows if row.is_repeat):
            self._attempts[row.case, row.repeat] = row.attempt
            trial = read_trial(row.case, row.repeat)
            if row.status not in again and trial.setting in allowed:
                found.append(self._read_result(trial, row))
        return found

    def _read_result(self, trial: Trial, row: Row) -> Result:
        number = row.number
        used = number("peak_device_bytes") or number("peak_process_bytes")
        time_s, measured_s, energy = map(number, ("epoch_time_s", "measured_time_s", "energy_j"))
        whole = energy * time_s / measured_s if energy and time_s and measured_s else None
        items, supplied = number("train_images"), number("loader_samples_per_s")
        values = {"time": time_s, "memory": used, "energy": whole}
        return Result(
            trial,
            row.status,
            took_s=read_time(row.finished_at) - read_time(row.started_at),
            start_s=(number("setup_time_s") or 0.0) + (number("warmup_time_s") or 0.0),
            trained_s=measured_s or 0.0,
            time_s=time_s,
            error=_find_error(number),
            value=values.get(self._asked.goal, time_s),
            used_bytes=used,
            room_bytes=read_peak(row),
            loading_s=items / supplied if items and supplied else None,
            seed=row.run_seed,
            loss=number("train_loss") if trial.aim is Aim.LEARN else None,
            reason=row.reason,
            record_id=row.record_id,
        )


def _find_error(number: Callable[[str], float | None]) -> float | None:
    """Return half the 95 % interval of a row's mean step, over the median step; None below
    `MIN_STEPS`. The standard deviation is the larger estimate of two, for a normal distribution: by
    the median absolute deviation and by the 95th percentile. The row's own interval is for the rest
    of its epoch, with drift, which settings measured one after the other share."""
    names = ("step_time_mad_s", "step_time_p95_s", "step_time_median_s", "measured_steps")
    spread, slow, middle, steps = map(number, names)
    if spread is None or slow is None or not middle or not steps or steps < MIN_STEPS:
        return None
    return 1.96 * max(1.4826 * spread, (slow - middle) / 1.645) / middle / math.sqrt(steps)
