"""What a search for advice came to: what to train with, how sure that is, what was not tried."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bench import verdict
from bench.advise.advisor import PRICED
from bench.advise.limits import tell_limits
from bench.advise.policy import LEAST_GAIN, Aim, Result, Standing, Trial, list_changes
from bench.case import AXES, Case, Value, format_value
from bench.limits import MIN_REPEATS, STEADY
from bench.record import REFUSED, RELIABLE
from bench.study.axes import name_setting
from bench.text import count, name_first, write_percent, write_seconds
from bench.verdict import Claim, Ratio, Verdict

MORE = 2
"""The budget that is proposed where one was too small, as a multiple of it."""


def name(setting: Case, now: Case) -> str:
    """Name a setting by its precision, batch size and what else differs from the present one."""
    return ", ".join(_say(axis, getattr(setting, axis)) for axis in _list_named(setting, now))


def _list_named(setting: Case, now: Case) -> list[str]:
    others = [axis for axis in list_changes(setting, now) if axis not in _FIRST]
    return [*_FIRST, *others]


_FIRST = ("precision", "batch_size")
_TIMED = ("time", PRICED)


def _say(axis: str, value: Value) -> str:
    if axis == "compile":
        said = {"off": "not compiled", "default": "compiled"}
        return said.get(str(value), f"compiled ({value})")
    if isinstance(value, bool):
        return f"{axis.replace('_', '-')}" if value else f"without {axis.replace('_', '-')}"
    return name_setting(axis, format_value(value) or "none")


@dataclass(frozen=True)
class Answer:
    """What is known, and what it comes to.

    Attributes:
        goal: what advice was for, one of `bench.advise.advisor.GOALS`.
        tried: the values of each lever that were to be tried.
        left_out: values of levers that were not, and why.
        command: that goes on, without its budget.
        budget_s: that was given.
        folder: where the runs are.
        price: of an hour, if it was given.
        items: of an epoch.
    """

    standing: Standing
    goal: str
    tried: Mapping[str, Sequence[Value]]
    left_out: Mapping[str, str]
    command: str
    budget_s: float
    folder: Path | None = None
    price: float | None = None
    items: int = 0

    @property
    def now(self) -> Case:
        return self.standing.space.now

    @cached_property
    def best(self) -> Case | None:
        """What to train with: the present setting, where nothing is seen to be better."""
        best = self.standing.best
        if best is None or best == self.now or self.now not in self.standing.values:
            return best
        return self.now if self._judge(best) in (Verdict.SAME, Verdict.HIGHER) else best

    def _judge(self, setting: Case) -> Verdict:
        ratio = self.compare(setting, self.now)
        if ratio.low is not None:
            return ratio.judge(STEADY)
        gain = self.standing.mean(self.now) - self.standing.mean(setting)
        unsure = 2 * math.hypot(self.standing.error(setting), self.standing.error(self.now))
        return Verdict.LOWER if gain > max(unsure, STEADY) else Verdict.SAME

    def compare(self, setting: Case, other: Case) -> Ratio:
        """What a setting needs over what another does, with its interval where repeats have one."""
        a, b = ([math.exp(log) for log in self.standing.values[s]] for s in (other, setting))
        return verdict.compare([(a, b)])[0]

    # ------------------------------------------------------------------ as sentences

    def write(self) -> Iterator[str]:
        """The answer, a line a thought, the most important first."""
        best = self.best
        if best is None:
            yield from self._write_nothing()
            return
        yield self._recommend(best)
        if learning := self._tell_learning(best):
            yield learning
        if compiled := self._tell_compiling(best):
            yield compiled
        if self.folder and (limits := tell_limits(self.folder, best)):
            yield limits
        if unsure := "; ".join(self._list_unsure(best)):
            yield f"Not certain: {unsure}."
        if untried := "; ".join(self._list_untried()):
            yield f"Not tried: {untried}."
        if failed := "; ".join(self._list_failed()):
            yield f"Did not run: {failed}."

    def _write_nothing(self) -> Iterator[str]:
        failed = "; ".join(self._list_failed())
        yield f"No setting was measured{': ' + failed if failed else ''}."

    def _recommend(self, best: Case) -> str:
        where = name(best, best if best == self.now else self.now)
        if best == self.now:
            return f"Stay with {where}: {self._tell_rivals()}."
        parts = [self._tell_gain(best)]
        if self.goal != "memory" and (share := self._share_of_memory(best)):
            parts.append(
                f"{write_percent(round(share, 2))} of the memory"
                if share < 1.5
                else f"{_digits(share)} times the memory"
            )
        if against := self._tell_baseline(best):
            parts.append(against)
        if self.price and (time_s := self._find_time(best)):
            bought = self.items * 3600 / time_s / self.price
            parts.append(f"{bought:,.0f} images for a price of 1")
        return f"Train with {where}: {', '.join(parts)}."

    def _tell_gain(self, best: Case) -> str:
        present = f"what you have now ({name(self.now, self.now)})"
        if self.now not in self.standing.values:
            return f"{present} could not be measured"
        ratio = self.compare(best, self.now).invert()
        value = ratio.value or 1.0
        if self.goal in _TIMED:
            said = f"{_digits(value)}×{_interval(ratio)} as fast as {present}"
        else:
            said = f"{write_percent(round(1 / value, 3))} of the {self.goal} of {present}"
        runs = min(len(self.standing.values[s]) for s in (best, self.now))
        return said if ratio.low is not None else f"about {said}, from {count(runs, 'run')} each"

    def _tell_baseline(self, best: Case) -> str:
        """The gain over fp32 at its own best batch size, where that is not the present one."""
        plain = [s for s in self.standing.allowed if s.precision == "fp32"]
        if self.goal not in _TIMED or best.precision == "fp32" or not plain or plain[0] == self.now:
            return ""
        value = math.exp(self.standing.mean(plain[0]) - self.standing.mean(best))
        return f"{_digits(value)}× as fast as the fastest fp32 ({name(plain[0], self.now)})"

    def _tell_rivals(self) -> str:
        others = [s for s in self.standing.allowed if s != self.now]
        if not others:
            return "nothing else was measured"
        value = math.exp(self.standing.mean(self.now) - self.standing.mean(others[0]))
        said = f"of {count(len(others), 'other setting')} measured, the best"
        gain = "as fast" if self.goal in _TIMED else f"the {self.goal}"
        return (
            f"{said} is {name(others[0], self.now)}, {_digits(value)}× {gain}, which is not more "
            "than runs differ by"
            if value > 1
            else f"none of {count(len(others), 'other setting')} measured is better"
        )

    def _share_of_memory(self, best: Case) -> float | None:
        used = [self._find_memory(s) for s in (best, self.now)]
        return used[0] / used[1] if used[0] and used[1] else None

    def _find_memory(self, setting: Case) -> float | None:
        runs = [r.used_bytes for r in self._runs(setting) if r.used_bytes]
        return max(runs, default=None)

    def _runs(self, setting: Case) -> list[Result]:
        return [r for r in self.standing.known if r.trial.setting == setting]

    def _tell_learning(self, best: Case) -> str:
        space = self.standing.space
        if best == self.now:
            return ""
        if not space.judged:
            return (
                "Whether it learns as well is not known: synthetic images teach nothing; give "
                "--data-dir with images."
            )
        found, part = self.standing.compare(best), self.standing.choose_part(best)
        at = f"learning rate {format_value(best.lr)}"
        if best.batch_size != self.now.batch_size:
            at += ", the same for both batch sizes"
        over = "whole epochs" if part == 1 else f"{write_percent(part)} of an epoch"
        if found.verdict is Claim.EQUIVALENT:
            within = write_percent(space.margin)
            return (
                f"It learns as well: the training loss is equivalent within {within} over {over} "
                f"({count(found.seeds, 'seed')}, {at})."
            )
        if found.verdict is Claim.BETTER:
            return f"It learns better: the training loss is lower over {over} ({at})."
        if found.lack == verdict.GUESSING:
            return f"Whether it learns as well is not known: after {over}, {found.lack}."
        needed = self._predict_learning(best)
        seeds = f" ({count(found.seeds, 'seed')} so far)" if found.seeds else ""
        return (
            f"Whether it learns as well is not certain{seeds}: to compare {over} of "
            f"{MIN_REPEATS} seeds takes about {write_seconds(needed)} ({at})."
        )

    def _predict_learning(self, best: Case) -> float:
        part = self.standing.choose_part(best)
        trials = (Trial(s, Aim.LEARN, 1, part) for s in (best, self.now))
        return MIN_REPEATS * sum(map(self.standing.predict_s, trials))

    def _tell_compiling(self, best: Case) -> str:
        """After how many epochs compiling has paid for itself."""
        if not best.compiled or self.now.compiled or self.goal not in _TIMED:
            return ""
        start = [self.standing.start_s(s) for s in (best, self.now)]
        gain = math.exp(self.standing.mean(self.now)) - math.exp(self.standing.mean(best))
        if gain <= 0 or start[0] <= start[1]:
            return ""
        epochs = math.ceil((start[0] - start[1]) / gain)
        later = write_seconds(start[0] - start[1])
        return f"It starts {later} later and pays after {count(epochs, 'epoch')}."

    def _list_unsure(self, best: Case) -> Iterator[str]:
        """What may be as good, and what was looked at once."""
        for rival in [s for s in self.standing.rivals if s != best][:3]:
            most = math.exp(self.standing.find_lead(rival))
            yield f"{name(rival, self.now)} may be up to {_digits(most)}× as good"
        for axis in list_changes(best, self.now):
            without = [s for s in self.standing.values if list_changes(s, best) == [axis]]
            if not without and axis not in _FIRST:
                yield f"{_say(axis, getattr(best, axis))} (not compared by itself)"

    def _list_untried(self) -> Iterator[str]:
        """Values of levers that no run had, with the reason."""
        yield from (f"{what} ({why})" for what, why in self.left_out.items())
        ran = {r.trial.setting for r in self.standing.known}
        belief = self.standing.belief if self.standing.values else None
        for axis, values in self.tried.items():
            seen = {getattr(s, axis) for s in ran}
            missing = [v for v in values if v not in seen and str(v) not in self.left_out]
            by: dict[str, list[str]] = {}
            for value in missing:
                having = [s for s in self.standing.space.settings if getattr(s, axis) == value]
                by.setdefault(self._excuse(having, belief), []).append(_say(axis, value))
            yield from (f"{', '.join(said)} ({why})" for why, said in by.items())

    def _excuse(self, settings: Sequence[Case], belief: Any) -> str:
        if not settings:
            return "it does not go with the other settings"
        if not any(map(self.standing.fits, settings)):
            return "it would not fit in memory"
        best = self.standing.best
        if belief is not None and best is not None:
            gains = belief.expect_gain(self.standing.mean(best))
            places = self.standing.space.places
            most = max(gains[places[s]] for s in settings)
            if most < LEAST_GAIN:
                return "little is expected of it"
        return "no time"

    def _list_failed(self) -> Iterator[str]:
        bad = [r for r in self.standing.known if r.status not in RELIABLE]
        by: dict[str, list[str]] = {}
        for result in bad:
            why = "out of memory" if result.status in REFUSED else result.status.value
            by.setdefault(why, []).append(name(result.trial.setting, self.now))
        yield from (f"{name_first(who, 3, '; ')}: {why}" for why, who in by.items())
        for setting, found in self.standing.rejected.items():
            yield f"{name(setting, self.now)} learns worse: {found.explain()}"

    @property
    def sure(self) -> bool:
        """Whether more of a budget would change nothing that is said."""
        best = self.best
        if best is None:
            return False
        settled = [s for s in self.standing.rivals if s != best] == []
        learnt = best == self.now or not self.standing.space.judged
        return settled and (learnt or self.standing.compare(best).verdict is not Claim.UNCLEAR)

    @property
    def next_command(self) -> str:
        return f"{self.command} --budget {_write_budget(MORE * self.budget_s)}"

    # ------------------------------------------------------------------ as data

    def describe(self) -> dict[str, Any]:
        """The same as JSON: times in s, memory in bytes, shares as fractions."""
        best = self.best
        ratio = None
        if best is not None and self.now in self.standing.values:
            ratio = self.compare(best, self.now).invert()
        return {
            "setting": _describe(best),
            "now": _describe(self.now),
            "for": self.goal,
            "ratio": ratio and ratio.value,
            "ratio_low": ratio and ratio.low,
            "ratio_high": ratio and ratio.high,
            "runs": {"setting": self._count(best), "now": self._count(self.now)},
            "epoch_time_s": best and self._find_time(best),
            "memory_share": best and self._share_of_memory(best),
            "learning": None
            if best in (None, self.now) or not self.standing.space.judged
            else self.standing.compare(best).verdict.value,
            "certain": self.sure,
            "sentences": list(self.write()),
            "next": None if self.sure else self.next_command,
        }

    def _count(self, setting: Case | None) -> int:
        return len(self.standing.values.get(setting, ())) if setting else 0

    def _find_time(self, setting: Case) -> float | None:
        times = [r.time_s for r in self._runs(setting) if r.time_s]
        return min(times, default=None)


def _describe(setting: Case | None) -> dict[str, str] | None:
    if setting is None:
        return None
    return {axis: format_value(getattr(setting, axis)) for axis in AXES}


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 2 else f"{value:.1f}"


def _interval(ratio: Ratio) -> str:
    if ratio.low is None or ratio.high is None:
        return ""
    return f" ({_digits(ratio.low)} to {_digits(ratio.high)})"


def _write_budget(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    return f"{minutes}m"


def describe_result(standing: Standing, result: Result, left_s: float) -> str:
    """A line on one run: what it showed, what is believed now, and what is left of the budget."""
    now, best = standing.space.now, standing.best
    said = []
    if best is not None and now in standing.values:
        gain = math.exp(standing.mean(now) - standing.mean(best))
        said.append(f"best so far: {name(best, now)}, {_digits(gain)}×")
    said.append(f"{write_seconds(left_s)} left" if left_s > 0 else "nothing left of the budget")
    return "; ".join(said)
