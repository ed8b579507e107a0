"""The answer of a search for advice: what to train with, how sure that is, what was not tried."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from bench.advise.settings import list_changes
from bench.advise.standing import (
    LEARN_PART,
    LEARN_SEEDS,
    LEAST_PROMISE,
    MOST_REPEATS,
    UNLIMITED,
    Standing,
    choose,
    learn,
)
from bench.axis import Value
from bench.case import AXES, Case, format_value
from bench.flags import join_flags, split_flags
from bench.limits import NEAR, STEADY
from bench.questions.halving import spell_case
from bench.record import REFUSED, RELIABLE
from bench.study.axes import name_setting
from bench.study.doubts import DOUBTS
from bench.study.runs import read_runs
from bench.study.sweeps import read_sweep
from bench.text import count, name_first, write_percent, write_seconds

MORE = 2
"""Multiple of the budget to propose if the budget was too small."""

_OF_SHORT_RUNS = ("trend", "unknown", "few")
"""Doubts that runs of a few seconds always have; the answer shows their spread anyway."""


def name(setting: Case, now: Case) -> str:
    """Name a setting by its precision, batch size and what else it changes of the present one."""
    axes = dict.fromkeys(["precision", "batch_size", *list_changes(setting, now)])
    values = {axis: format_value(getattr(setting, axis)) or "none" for axis in axes}
    return ", ".join(name_setting(axis, text) for axis, text in values.items())


def describe_progress(standing: Standing, left_s: float) -> str:
    """Return a line for after a run: what would be advised, and what is left of the budget."""
    said, now, advised = [], standing.now, standing.advised
    if advised is not None and now in standing.values:
        gain = "" if advised == now else f", {_compare(standing, advised, now)} now"
        said.append(f"so far: {name(advised, now)}{gain}")
    said.append(f"{write_seconds(left_s)} left" if left_s > 0 else "nothing left of the budget")
    return "; ".join(said)


def _compare(standing: Standing, setting: Case, other: Case) -> str:
    """Return ``3.10× (2.90 to 3.31) as fast as``, or ``78 % (75 to 80) of the memory of``."""
    aim, ends = standing.space.aim, standing.compare(setting, other)
    if aim in ("", "time"):
        value, high, low = (f"{1 / end:.2f}" for end in ends)
        value, what = f"{value}×", "as fast as"
    else:
        value, low, high = (f"{100 * end:.0f}" for end in ends)
        value, what = f"{value} %", f"of the {aim} of"
    return f"{value} {what}" if low == high else f"{value} ({low} to {high}) {what}"


@dataclass(frozen=True)
class Answer:
    """The outcome of a search."""

    standing: Standing
    tried: Mapping[str, Sequence[Value]]  # the candidate values of each lever
    left_out: Mapping[str, str]  # values that are not candidates, and why
    command: str  # continues the search, with the budget that was given
    budget_s: float  # as given
    folder: Path | None = None  # where the runs are
    stopped: int = 0  # the signal that stopped it before the budget was used; 0 for none

    @property
    def now(self) -> Case:
        return self.standing.now

    @property
    def advised(self) -> Case | None:
        """The setting to train with; None if fewer than two settings were measured."""
        return self.standing.advised if len(self.standing.values) > 1 else None

    @cached_property
    def pending(self) -> Case | None:
        """The first run that another budget would be used for; None if none would help."""
        return choose(self.standing, UNLIMITED)

    @property
    def next_command(self) -> str:
        """The command that continues the search, with the budget that it should have."""
        minutes = math.ceil(self.budget_s * (1 if self.stopped else MORE) / 60)
        words = shlex.split(self.command)
        return shlex.join([*words[:3], *join_flags(words[3:], ["--budget", f"{minutes}m"])])

    def _keep(self, *flags: str) -> list[str]:
        """Return the words of some flags of the command."""
        given = split_flags(shlex.split(self.command)[3:])
        return [word for flag in flags for word in given.get(flag, ())]

    # ------------------------------------------------------------------ as sentences

    def write(self) -> Iterator[str]:
        """Yield the lines of the answer, the most important first."""
        advised = self.advised
        if advised is None:
            yield self._explain_nothing()
        else:
            yield self._recommend(advised)
            yield from filter(None, self._support(advised))
        if unsure := "; ".join(self._list_unsure(advised)):
            ended = "" if self.pending else f" No setting is repeated over {MOST_REPEATS} times."
            yield f"Not certain: {unsure}.{ended}"
        if refused := "; ".join(self._list_refused()):
            yield f"Not advised: {refused}."
        if untried := "; ".join(self._list_untried()):
            yield f"Not tried: {untried}."
        if self.pending:
            yield f"Next: {self.next_command}"

    def _explain_nothing(self) -> str:
        standing, known = self.standing, self.standing.known
        if standing.values:
            why = f"only {name(next(iter(standing.values)), self.now)} was measured"
        elif any(result.time_s for result in known):
            why = f"the {standing.space.aim} of an epoch is not measured on this machine; python "
            why += "-m bench.doctor says why"
        elif known and all(result.status in REFUSED for result in known):
            limited = self.now.memory_limit is not None
            mend = "a larger --memory-limit" if limited else "--batch-size with smaller values"
            why = f"no setting fits in memory; give {mend}"
        else:
            why = "no setting could be measured"
        return f"No advice: {why}."

    def _recommend(self, advised: Case) -> str:
        """Say what to train with, and what that gains over the present setting."""
        standing, now = self.standing, self.now
        of = f", of {len(standing.values)} settings measured"
        if advised == now:
            return f"Stay with {name(now, now)}{of}."
        said = f"Train with {name(advised, now)}{of}"
        if now not in standing.values:
            return f"{said}; what you have now ({name(now, now)}) could not be."
        said += f": {_compare(standing, advised, now)} what you have now ({name(now, now)})"
        _, low, high = standing.compare(advised, now)
        said += ", which may be chance" * (low < 1 < high)
        share = self._share_of_memory(advised)
        if share is not None and standing.space.aim != "memory":
            said += f", with {100 * share:.0f} % of its memory"
        return f"{said}."

    def _support(self, advised: Case) -> Iterator[str]:
        yield self._explain_rule(advised)
        if self.now in self.standing.diverged:
            yield "The loss of what you have now became inf or NaN; lower its --lr."
        if advised != self.now:
            command = ["python", "-m", "bench.sweep", *self._keep("--data-dir")]
            yield f"Measure it whole: {shlex.join([*command, *spell_case(advised)])}"
            yield self._describe_learning(advised)
        if advised.batch_size != self.now.batch_size:
            yield self._describe_batch(advised)
        if doubts := self._count_doubts(advised):
            said = ", ".join(f"{number:,} {remark}" for remark, number in doubts.items())
            report = shlex.join(["python", "-m", "bench.report", str(self.folder)])
            yield f"Doubts about the runs compared: {said}; {report} says what helps."

    def _explain_rule(self, advised: Case) -> str:
        """Say why the lowest of what was measured is not advised, or that it is the present one."""
        standing, lowest = self.standing, self.standing.allowed[0]
        than = f"{name(lowest, self.now)}, {_compare(standing, lowest, advised)} it"
        if lowest == advised:
            aim = standing.space.aim
            better = "is faster" if aim in ("", "time") else f"needs less {aim}"
            return f"No other {better}." if advised == self.now else ""
        if lowest.batch_size == advised.batch_size:
            return f"It changes less than {than}: no more than chance or {write_percent(STEADY)}."
        near = f"within {write_percent(NEAR)} of the lowest time"
        told = "" if lowest == self.now else f", that of {than}"
        return f"It has the smallest batch {near}{told}."

    def _share_of_memory(self, advised: Case) -> float | None:
        here, there = (
            [r.used_bytes for r in self.standing.known if r.setting == s and r.used_bytes]
            for s in (advised, self.now)
        )
        return median(here) / median(there) if here and there else None

    def _count_doubts(self, advised: Case) -> dict[str, int]:
        """Count the runs that the advice rests on, of the advised setting, the present one and the
        lowest, with each doubt that keeps a case from being called the fastest, by its remark."""
        standing = self.standing
        compared = {advised, self.now, standing.allowed[0]} & standing.values.keys()
        ids = {run.record_id for setting in compared for run in standing.list_runs(setting)} - {""}
        runs = read_runs([read_sweep(self.folder)]) if self.folder and ids else []
        runs = [run for run in runs if run.record_id in ids]
        fatal = [d for d in DOUBTS.values() if d.fatal and d.name not in _OF_SHORT_RUNS]
        found = Counter({doubt.remark: sum(map(doubt.find, runs)) for doubt in fatal})
        return dict(+found)

    def _describe_learning(self, advised: Case) -> str:
        standing, twin = self.standing, self.standing.keep_batch_size(advised)
        if twin == self.now:
            return ""
        if not standing.space.judged:
            return (
                "Whether it learns as well is not known: synthetic images teach nothing; give "
                "--data-dir with images."
            )
        at = f"over {write_percent(LEARN_PART)} of an epoch at batch size {twin.batch_size}"
        if standing.count_seeds(advised) >= LEARN_SEEDS:
            return f"Its training loss {at}: {standing.judge_learning(advised).sentence()}."
        needed_s = LEARN_SEEDS * sum(standing.predict_s(learn(s)) for s in (twin, self.now))
        return (
            f"Whether it learns as well was not compared: {LEARN_SEEDS} seeds of both {at} take "
            f"about {write_seconds(needed_s)}."
        )

    def _describe_batch(self, advised: Case) -> str:
        """Warn that another batch size changes learning, which is not judged here."""
        words = self._keep("--model", "--workload", "--dataset", "--data-dir", "--device")
        words += ["--batch-size", str(self.now.batch_size), str(advised.batch_size)]
        fewer = "fewer" if advised.batch_size > self.now.batch_size else "more"
        return (
            f"Batches of {advised.batch_size} take {fewer} steps an epoch, and may need another "
            f"learning rate: python -m bench.search {shlex.join(words)} compares them."
        )

    def _list_unsure(self, advised: Case | None) -> Iterator[str]:
        """Yield what may belong in the place of the advised setting."""
        standing, best = self.standing, self.standing.best
        if advised is None or best is None:
            return
        rivals = [s for s in (best, *standing.list_rivals()) if s != advised]
        for rival in rivals[:3]:
            gain = standing.mean(advised) - standing.mean(rival)
            most = math.expm1(gain + standing.find_luck(rival, advised))
            may = f"better, by up to {100 * most:.0f} %"
            if not standing.space.aim and rival.batch_size != best.batch_size:
                smaller = rival.batch_size < best.batch_size
                near = f"{write_percent(NEAR)} of the lowest time"
                may = f"within {near}" if smaller else f"faster by more than {write_percent(NEAR)}"
            yield f"{name(rival, self.now)} may be {may}"
        if len(rivals) > 3:
            yield f"and {len(rivals) - 3} more"

    def _list_refused(self) -> Iterator[str]:
        """Yield the settings that did not run, are unreliable or learn worse, and why."""
        found: dict[str, dict[str, None]] = {}
        for result in self.standing.known:
            if result.setting in self.standing.diverged:
                why = "the loss became inf or NaN"
            elif result.status in RELIABLE:
                continue
            elif result.status in REFUSED:
                why = "did not fit in memory"
            else:
                why = result.reason or result.status.value
            found.setdefault(why, {})[name(result.setting, self.now)] = None
        for setting, worse in self.standing.rejected.items():
            why = f"learns worse: {worse.explain()}"
            found.setdefault(why, {})[name(setting, self.now)] = None
        yield from (f"{name_first([*names], 3, '; ')} ({why})" for why, names in found.items())

    def _list_untried(self) -> Iterator[str]:
        """Yield lever values that no run had, with the reason, and how many combinations."""
        standing, by = self.standing, dict[str, list[str]]()
        for axis, values in self.tried.items():
            seen = {getattr(setting, axis) for setting in standing.tried}
            for value in values:
                having = [s for s in standing.space.settings if getattr(s, axis) == value]
                if having and value not in seen:
                    said = name_setting(axis, format_value(value))
                    by.setdefault(self._excuse(having), []).append(said)
        yield from (f"{what} ({why})" for what, why in self.left_out.items())
        yield from (f"{', '.join(said)} ({why})" for why, said in by.items())
        if left := len(standing.space.settings) - len(standing.tried):
            yield f"{left} of {count(len(standing.space.settings), 'combination')}"

    def _excuse(self, settings: Sequence[Case]) -> str:
        standing = self.standing
        if not any(map(standing.fits, settings)):
            return "not expected to fit in memory"
        if standing.best and max(standing.promises[s] for s in settings) < LEAST_PROMISE:
            return "little is expected of it"
        return "no time"

    # ------------------------------------------------------------------ as data

    def describe(self) -> dict[str, Any]:
        """Return it for JSON: times in s, ratios of what is minimised, shares as fractions."""
        advised, now, standing = self.advised, self.now, self.standing
        changes = advised is not None and advised != now and now in standing.values
        ratio = standing.compare(advised, now) if advised and changes else (None, None, None)
        times = [run.time_s or 0.0 for run in standing.list_runs(advised)] if advised else []
        learnt = None
        if advised is not None and standing.keep_batch_size(advised) != now:
            learnt = standing.judge_learning(advised).verdict.value
        return {
            "setting": advised and {axis: format_value(getattr(advised, axis)) for axis in AXES},
            "now": {axis: format_value(getattr(now, axis)) for axis in AXES},
            "for": standing.space.aim,
            **dict(zip(("ratio", "ratio_low", "ratio_high"), ratio, strict=True)),
            "epoch_time_s": median(times) if times else None,
            "memory_share": advised and self._share_of_memory(advised),
            "learning": learnt,
            "doubts": self._count_doubts(advised) if advised else {},
            "complete": self.pending is None,
            "sentences": list(self.write()),
            "next": self.next_command if self.pending else None,
        }
