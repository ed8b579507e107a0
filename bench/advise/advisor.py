"""The search for advice as a source of runs for a lane, and what a folder holds of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

from bench.advise.answer import describe_progress
from bench.advise.belief import guess
from bench.advise.policy import Budget, choose
from bench.advise.space import expect
from bench.advise.standing import NOISE, Aim, Result, Space, Standing, Trial, read_trial
from bench.case import Case
from bench.executors import Lane
from bench.record import REPEATED, Outcome, Record, Status, flatten
from bench.store.attempts import keep_latest
from bench.store.runs import read_cases
from bench.sweep.loop import Loop, Ticket
from bench.sweep.schedule import Losses
from bench.text import read_time
from bench.wall.records import read_peak

if TYPE_CHECKING:
    import pandas as pd

MIN_STEPS = 6
"""Steps below which nothing is said of their spread."""


class Advisor:
    """Deals out what `bench.advise.policy.choose` asks for, one run at a time.

    Args:
        settings: those that may be chosen, the present one first.
        frame: the rows of the folder that new ones can be compared with.
        budget_s: of wall time, which ends at the time.monotonic() ``until``.
        space: what `Space` has beside the settings and what is expected of them.
    """

    def __init__(
        self,
        loop: Loop,
        settings: Sequence[Case],
        frame: pd.DataFrame,
        goal: str,
        budget_s: float,
        until: float,
        **space: Any,
    ) -> None:
        self.loop, self._settings, self._goal = loop, settings, goal
        self._budget_s, self._until, self._space = budget_s, until, space
        self._attempts = Counter[tuple[Case, int]]()
        self._losses = Losses()
        self.known = self._read(frame)
        self._open: Trial | None = None
        self._chosen: list[Trial | None] = []  # what is next, once it is asked for
        self._made: Space | None = None
        self.standing = Standing(self.known, self.space)

    @property
    def space(self) -> Space:
        """What may be chosen, with what is expected of it by now: more, once rates are measured."""
        settings, exact = self._settings, self._goal == "memory"
        prior = expect(settings, self.loop.inputs)
        if not prior and settings[0].device == "cuda":
            prior = [guess(setting) for setting in settings]
        if not prior or exact:
            prior = [0.0 for _ in settings]
        if self._made is None or prior != self._made.prior:
            self._made = Space(
                settings[0],
                settings,
                prior,
                noise=0.0 if exact else NOISE,
                epoch_s=lambda setting: self.loop.inputs.predict(setting),
                **self._space,
            )
        return self._made

    @property
    def left(self) -> bool:
        return self._open is None and self._choose() is not None

    def _choose(self) -> Trial | None:
        """What is next: asked for twice a run, by `left` and `take`, and found once."""
        if not self._chosen:
            budget = Budget(self._budget_s, self._until - monotonic())
            self._chosen = [choose(self.standing, budget)]
        return self._chosen[0]

    def take(self, lane: Lane, idle: Sequence[Lane]) -> Ticket | None:
        # by these rates the length of the first run is told
        self.loop.rate(lane, self._settings[0].device)
        if self._open is not None or (trial := self._choose()) is None:
            return None
        self._open, self._chosen = trial, []
        run = (self.standing.find_case(trial), trial.repeat)
        self._attempts[run] += 1
        return Ticket((*run, False), self._attempts[run])

    def settle(self, ticket: Ticket, record: Record, outcome: Outcome) -> None:
        """Learn from a run; one that was lost is made again, but not for ever."""
        trial, self._open = self._open, None
        assert trial is not None
        lost = record.status is Status.LOST and self._losses.allow(trial, outcome)
        if lost or record.status is Status.INTERRUPTED:
            return
        self.known.append(self._read_result(trial, flatten(record)))
        self.standing = Standing(self.known, self.space)
        self.loop.display.say(f"    {describe_progress(self.standing, self._until - monotonic())}")

    def _read(self, frame: pd.DataFrame) -> list[Result]:
        """What earlier runs showed of the settings that may be chosen."""
        plain = frame[~frame["probe"] & ~frame["sentinel"] & (frame["anchor"] == "")]
        allowed, found = set(self._settings), []
        rows, again = keep_latest(plain), REPEATED | set(self.loop.options.retry)
        for case, row in zip(read_cases(rows), rows.to_dict("records"), strict=True):
            repeat = int(row["repeat"])
            self._attempts[case, repeat] = int(row["attempt"])
            trial = read_trial(case, repeat)
            if Status(row["status"]) not in again and trial.setting in allowed:
                found.append(self._read_result(trial, row))
        return found

    def _read_result(self, trial: Trial, row: Mapping[Any, Any]) -> Result:
        def number(name: str) -> float | None:
            value = row[name]
            return None if value in (None, "") or math.isnan(float(value)) else float(value)

        used = number("peak_device_bytes") or number("peak_process_bytes")
        time_s, measured_s, energy = map(number, ("epoch_time_s", "measured_time_s", "energy_j"))
        whole = energy * time_s / measured_s if energy and time_s and measured_s else None
        items, supplied = number("train_images"), number("loader_samples_per_s")
        values = {"time": time_s, "memory": used, "energy": whole}
        return Result(
            trial,
            Status(row["status"]),
            took_s=read_time(str(row["finished_at"])) - read_time(str(row["started_at"])),
            start_s=(number("setup_time_s") or 0.0) + (number("warmup_time_s") or 0.0),
            trained_s=measured_s or 0.0,
            time_s=time_s,
            error=_find_error(number),
            value=values.get(self._goal, time_s),
            used_bytes=used,
            room_bytes=read_peak(row),
            loading_s=items / supplied if items and supplied else None,
            seed=int(row["run_seed"]),
            loss=number("train_loss") if trial.aim is Aim.LEARN else None,
            reason=str(row["reason"]),
            record_id=str(row["record_id"]),
        )


def _find_error(number: Callable[[str], float | None]) -> float | None:
    """Half of the 95 % interval of a row's mean step, by the larger of two spreads, each as that of
    a normal distribution: the median absolute deviation, and how far the slowest twentieth begins.
    None below six steps. The row's own interval is one for the rest of its epoch, drift included,
    which settings that are measured one after the other share."""
    names = ("step_time_mad_s", "step_time_p95_s", "step_time_median_s", "measured_steps")
    spread, slow, middle, steps = map(number, names)
    if spread is None or slow is None or not middle or not steps or steps < MIN_STEPS:
        return None
    return 1.96 * max(1.4826 * spread, (slow - middle) / 1.645) / middle / math.sqrt(steps)
