"""The answer of a search for advice: what to train with, how sure that is, what was not tried."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from bench.advise.evidence import Evidence
from bench.advise.policy import LEAST_PROMISE, MOST_REPEATS, UNLIMITED, choose
from bench.advise.standing import (
    LEARN_PART,
    LEARN_SEEDS,
    LEAST_STEPS,
    PRICED,
    WARMUP_STEPS,
    Aim,
    Result,
    Standing,
    Trial,
    list_changes,
)
from bench.axis import Value
from bench.case import AXES, Case, fill_value, format_value
from bench.flags import join_flags, split_flags
from bench.limits import STEADY
from bench.record import REFUSED, RELIABLE, Status
from bench.study.axes import name_setting
from bench.text import count, name_first, write_percent, write_seconds
from bench.verdict import UNCHECKED, Claim, Ratio, Verdict
from bench.workloads import IMAGES

MORE = 2
"""Multiple of the budget to propose if the budget was too small."""

_FIRST = ("precision", "batch_size")


def name(setting: Case, now: Case) -> str:
    """Name a setting by its precision, batch size and the other axes that differ from the present
    setting, except those that merely follow from a changed axis."""
    changed = [axis for axis in AXES if getattr(setting, axis) != getattr(now, axis)]
    others = [
        axis
        for axis in changed
        if axis not in _FIRST
        and (
            AXES[axis].follows not in changed or getattr(setting, axis) != fill_value(axis, setting)
        )
    ]
    return ", ".join(_say(axis, getattr(setting, axis)) for axis in (*_FIRST, *others))


def _say(axis: str, value: Value) -> str:
    if axis == "compile":
        said = {"off": "not compiled", "default": "compiled"}
        return said.get(str(value), f"compiled ({value})")
    if isinstance(value, bool):
        return f"{'' if value else 'without '}{axis.replace('_', '-')}"
    return name_setting(axis, format_value(value) or "none")


@dataclass(frozen=True)
class Answer:
    """The outcome of a search."""

    standing: Standing
    goal: str  # of `bench.advise.standing.GOALS`
    tried: Mapping[str, Sequence[Value]]  # the candidate values of each lever
    left_out: Mapping[str, str]  # values that are not candidates, and why
    command: str  # continues the search, with the budget that was given
    budget_s: float  # as given
    folder: Path | None = None  # where the runs are
    price: float | None = None  # per hour
    items: int = 0  # per epoch
    stopped: int = 0  # the signal that stopped it before the budget was used; 0 for none

    @property
    def now(self) -> Case:
        return self.standing.now

    @property
    def advised(self) -> Case | None:
        """The setting to train with; None if fewer than two settings were measured."""
        return self.standing.advised if len(self.standing.values) > 1 else None

    @cached_property
    def _evidence(self) -> Evidence | None:
        return Evidence(self.folder, self.standing.known) if self.folder else None

    @cached_property
    def pending(self) -> Trial | None:
        """The first run that another budget would be used for; None if none would help."""
        return choose(self.standing, UNLIMITED)

    @property
    def next_command(self) -> str:
        """The command that continues the search, with the budget that it should have."""
        minutes = math.ceil(self.budget_s * (1 if self.stopped else MORE) / 60)
        python, flags = self.command.split()[:3], shlex.split(self.command)[3:]
        return shlex.join([*python, *join_flags(flags, ["--budget", f"{minutes}m"])])

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
            ended = f"No setting is repeated more than {MOST_REPEATS} times."
            yield " ".join([f"Not certain: {unsure}.", *([] if self.pending else [ended])])
        for title, lines in self._list_refused().items():
            yield f"{title}: {'; '.join(lines)}."
        if untried := "; ".join(self._list_untried()):
            yield f"Not tried: {untried}."
        if self.pending:
            yield f"Next: {self.next_command}"

    def _explain_nothing(self) -> str:
        if any(result.time_s for result in self.standing.known) and not self.standing.values:
            return (
                f"No advice: the {self.goal} of an epoch is not measured on this machine; python "
                "-m bench.doctor says why."
            )
        if self.now in self.standing.values:
            return f"No advice: only what you have now ({name(self.now, self.now)}) was measured."
        if self.standing.values:
            measured = name(next(iter(self.standing.values)), self.now)
            return f"No advice: only {measured} could be measured."
        reasons = [r.reason for r in self.standing.known if r.status in REFUSED]
        if reasons and len(reasons) == len(self.standing.known):
            limited = self.now.memory_limit is not None
            mend = "a larger --memory-limit" if limited else "--batch-size with smaller values"
            return f"No advice: no setting fits in memory; give {mend}. The last {reasons[-1]}."
        if self.stopped and not self.standing.known:
            return "No advice: it was stopped before the first run had ended."
        return "No advice: no setting could be measured."

    def _recommend(self, advised: Case) -> str:
        if advised == self.now:
            said = [f"Stay with {name(advised, advised)}: {self._describe_others()}"]
        else:
            said = [f"Train with {name(advised, self.now)}: {self._describe_gain(advised)}"]
            share = self._share_of_memory(advised)
            if share and self.goal != "memory":
                less = f"{write_percent(round(share, 2))} of the memory"
                said.append(less if share < 1.5 else f"{_digits(share)} the memory")
            said += filter(None, [self._describe_baseline(advised)])
        if self.price:
            bought = self.items * 3600 / self._find_time(advised) / self.price
            what = "images" if advised.workload == IMAGES else "items"
            said.append(f"{bought:,.0f} {what} for a price of 1")
        return f"{', '.join(said)}."

    def _describe_gain(self, advised: Case) -> str:
        present = f"what you have now ({name(self.now, self.now)})"
        if self.now not in self.standing.values:
            return f"the best that was measured; {present} could not be"
        tried = f", the best of {count(len(self.standing.values), 'setting')} measured"
        return f"{self._describe_ratio(advised, self.now)} {present}{tried}"

    def _describe_ratio(self, setting: Case, other: Case) -> str:
        """``3.1× (2.9 to 3.3) as fast as``, or ``about 3.1× (from 1 run each) as fast as``."""
        ratio = self.standing.compare(setting, other)
        timed = self.goal in _TIMED
        write = _digits if timed else _write_part
        shown = ratio.invert() if timed else ratio
        end = "as fast as" if timed else f"of the {self.goal} of"
        said = f"{write(shown.value or 1.0)}{_interval(shown, write)}"
        if shown.low is not None:
            return f"{said} {end}"
        runs = min(len(self.standing.values[s]) for s in (setting, other))
        return f"about {said} (from {count(runs, 'run')} each) {end}"

    def _describe_baseline(self, advised: Case) -> str:
        """Return the gain over the best fp32 setting; empty if that is the present setting."""
        plain = next((s for s in self.standing.allowed if s.precision == "fp32"), self.now)
        if advised.precision == "fp32" or plain == self.now:
            return ""
        return f"{self._describe_ratio(advised, plain)} the best fp32 ({name(plain, self.now)})"

    def _describe_others(self) -> str:
        """Explain why none of the other settings is advised."""
        others = len(self.standing.values) - 1
        best = self.standing.best
        ratio = self.standing.compare(best) if best not in (None, self.now) else Ratio(1.0)
        if best is None or ratio.value is None or ratio.value >= 1:
            if others == 1:
                return "the one other setting measured is not shown to be better"
            return f"none of the {others:,} other settings measured is shown to be better"
        which = f"best of the {others:,} other settings" if others > 1 else "one other setting"
        said = f"the {which} measured, {name(best, self.now)}, has {_write_gain(ratio)} the "
        said += _SPEED[self.goal]
        if self.standing.judge(best) is Verdict.SAME:
            return f"{said}, which is a difference below {write_percent(STEADY)}"
        if ratio.low is None:
            return f"{said}, and there were too few runs to tell that from chance"
        return f"{said}, which may be chance"

    def _support(self, advised: Case) -> Iterator[str]:
        if self.now in self.standing.diverged:
            yield "The loss of what you have now became inf or NaN; lower its --lr."
        if advised != self.now:
            yield self._describe_learning(advised)
            yield self._describe_batch(advised)
            yield self._describe_compiling(advised)
        if self._evidence:
            yield self._evidence.describe_limits(advised)
            yield self._describe_doubts(advised)

    def _list_compared(self, advised: Case) -> list[Result]:
        """List the runs that the advice rests on: those of the advised setting, of the present one,
        and of the best one, which may not be certain to be better."""
        settings = dict.fromkeys([advised, self.now, self.standing.best or advised])
        measured = [s for s in settings if s in self.standing.values]
        return [run for setting in measured for run in self.standing.list_fine(setting)]

    def _describe_doubts(self, advised: Case) -> str:
        if not (doubts := self._count_doubts(advised)):
            return ""
        said = ", ".join(f"{number:,} {remark}" for remark, number in doubts.items())
        compared = len(self._list_compared(advised))
        runs = f"{compared:,} runs that were" if compared > 1 else "run that was"
        report = shlex.join(["python", "-m", "bench.report", str(self.folder)])
        return f"Doubts about the {runs} compared: {said}; {report} says what helps."

    def _count_doubts(self, advised: Case) -> dict[str, int]:
        compared = self._list_compared(advised)
        return self._evidence.count_doubts(compared) if self._evidence else {}

    def _share_of_memory(self, advised: Case) -> float | None:
        here, there = (
            [r.used_bytes for r in self.standing.known if r.trial.setting == s and r.used_bytes]
            for s in (advised, self.now)
        )
        return median(here) / median(there) if here and there else None

    def _find_time(self, setting: Case) -> float:
        return median([r.time_s or 0.0 for r in self.standing.list_fine(setting)])

    def _describe_learning(self, advised: Case) -> str:
        space, twin = self.standing.space, self.standing.keep_batch_size(advised)
        if twin == self.now:
            return ""
        if not space.judged:
            return (
                "Whether it learns as well is not known: synthetic images teach nothing; give "
                "--data-dir with images."
            )
        found = self.standing.judge_learning(advised)
        at = f"{write_percent(LEARN_PART)} of an epoch at learning rate {format_value(twin.lr)}"
        if twin.batch_size != advised.batch_size:
            at += f" and batch size {twin.batch_size}"
        if found.verdict is Claim.EQUIVALENT:
            doubt = f"; {UNCHECKED}" if space.classes is None else ""
            return (
                "It learns as well: the training loss is equivalent within "
                f"{write_percent(space.margin)} ({count(found.seeds, 'seed')}, {at}{doubt})."
            )
        if found.verdict is Claim.BETTER:
            return f"It learns better: the training loss is lower ({found.explain()}; {at})."
        if self.standing.count_seeds(advised) >= LEARN_SEEDS:
            why = found.lack or found.explain()
            return f"Whether it learns as well is not certain after {at}: {why}."
        trials = [Trial(s, Aim.LEARN) for s in (twin, self.now)]
        needed = LEARN_SEEDS * sum(map(self.standing.predict_s, trials))
        return (
            f"Whether it learns as well was not compared: {LEARN_SEEDS} seeds of both, {at}, take "
            f"about {write_seconds(needed)}."
        )

    def _describe_batch(self, advised: Case) -> str:
        """Warn that another batch size changes learning, which is not judged here."""
        if advised.batch_size == self.now.batch_size:
            return ""
        given = split_flags(shlex.split(self.command)[3:])
        flags = ("--model", "--workload", "--dataset", "--data-dir", "--device")
        words = [word for flag in flags for word in given.get(flag, ())]
        words += ["--batch-size", str(self.now.batch_size), str(advised.batch_size)]
        fewer = "fewer" if advised.batch_size > self.now.batch_size else "more"
        return (
            f"Batches of {advised.batch_size} take {fewer} steps an epoch, and may need another "
            f"learning rate: python -m bench.search {shlex.join(words)} compares them."
        )

    def _describe_compiling(self, advised: Case) -> str:
        """Say after how many epochs compiling pays off, compared with not compiling."""
        plain = [s for s in self.standing.values if list_changes(s, advised) == ["compile"]]
        plain = [s for s in plain if not s.compiled]
        if not advised.compiled or not plain:
            return ""
        starts = [*map(self.standing.find_start, (advised, plain[0]))]
        gain = self._find_time(plain[0]) - self._find_time(advised)
        if gain <= 0 or starts[0] <= starts[1]:
            return ""
        later = write_seconds(starts[0] - starts[1])
        if self.standing.find_possible_gain(plain[0], advised) > 0:  # the gain is not certain
            return f"Compiling takes {later} at the start."
        pays = count(math.ceil((starts[0] - starts[1]) / gain), "epoch")
        return f"Compiling takes {later} at the start and pays after {pays}."

    def _list_unsure(self, advised: Case | None) -> Iterator[str]:
        """Yield the settings that may be better still, and changes that were not compared alone."""
        if advised is None or advised not in self.standing.values:
            return
        rivals = self.standing.list_rivals(advised)
        for rival in rivals[:3]:
            most = math.exp(self.standing.find_possible_gain(rival, advised))
            runs = min(len(self.standing.values[s]) for s in (rival, advised))
            by = (
                f"by up to {write_percent(round(most - 1, 2))}"
                if most < 2
                else f"by how much is not known from {count(runs, 'run')}"
            )
            yield f"{name(rival, self.now)} may be better, {by}"
        if len(rivals) > 3:
            yield f"and {len(rivals) - 3} more"
        for axis in list_changes(advised, self.now):
            changed = [s for s in self.standing.values if list_changes(s, advised) == [axis]]
            if not any(getattr(s, axis) == getattr(self.now, axis) for s in changed):
                yield f"{_say(axis, getattr(advised, axis))} was not compared by itself"

    def _list_refused(self) -> dict[str, list[str]]:
        """Group the settings that did not run, are unreliable or learn worse, by a title."""
        said: dict[str, dict[str, list[str]]] = {}
        for result in self.standing.known:
            if result.status in RELIABLE and result.trial.setting not in self.standing.diverged:
                continue
            if result.status in REFUSED:
                title, why = "Did not fit in memory", ""
            elif result.status is Status.DIVERGED:
                title, why = "Did not train", "the loss became inf or NaN"
            elif result.status is Status.INVALID:
                title, why = "Not to be relied on", result.reason
            else:
                title, why = "Did not run", result.reason or result.status.value
            who = said.setdefault(title, {}).setdefault(why, [])
            who += [n for n in [name(result.trial.setting, self.now)] if n not in who]
        found = {
            title: [
                name_first(who, 3, "; ") + (f" ({why})" if why else "") for why, who in by.items()
            ]
            for title, by in said.items()
        }
        for setting, worse in self.standing.rejected.items():
            line = f"{name(setting, self.now)} ({worse.explain()})"
            found.setdefault("Learns worse, and is not advised", []).append(line)
        return found

    def _list_untried(self) -> Iterator[str]:
        """Yield lever values that no run had, with the reason, and how many combinations."""
        if not self.standing.known:
            return
        yield from (f"{what} ({why})" for what, why in self.left_out.items())
        for axis, values in self.tried.items():
            seen = {getattr(s, axis) for s in self.standing.tried}
            by: dict[str, list[str]] = {}
            for value in values:
                if value in seen or str(value) in self.left_out:
                    continue
                having = [s for s in self.standing.space.settings if getattr(s, axis) == value]
                by.setdefault(self._excuse(having), []).append(_say(axis, value))
            yield from (f"{', '.join(said)} ({why})" for why, said in by.items())
        settings = len(self.standing.space.settings)
        if left := settings - len(self.standing.tried):
            yield f"{left} of {count(settings, 'combination')}"

    def _excuse(self, settings: Sequence[Case]) -> str:
        if not settings:
            return "it does not go with the other settings"
        if not any(map(self.standing.fits, settings)):
            return "it is not expected to fit in memory"
        if (best := self.standing.best) is not None:
            gains = self.standing.belief.expect_gain(self.standing.mean(best))
            places = self.standing.space.places
            if max(gains[places[s]] for s in settings) < LEAST_PROMISE:
                return "little is expected of it"
        return "stopped" if self.stopped else "no time"

    # ------------------------------------------------------------------ as data

    def describe(self) -> dict[str, Any]:
        """Return it for JSON: times in s, ratios of what is minimised, shares as fractions."""
        advised, ratio, learning = self.advised, Ratio(), None
        both = self.now in self.standing.values and advised in self.standing.values
        if advised not in (None, self.now) and both:
            ratio = self.standing.compare(advised or self.now)
        if advised is not None and self.standing.keep_batch_size(advised) != self.now:
            learning = self.standing.judge_learning(advised).verdict.value
        return {
            "setting": _describe(advised),
            "now": _describe(self.now),
            "for": self.goal,
            "ratio": ratio.value,
            "ratio_low": ratio.low,
            "ratio_high": ratio.high,
            "runs": len(self.standing.values.get(advised or self.now, ())),
            "epoch_time_s": advised and self._find_time(advised),
            "memory_share": advised and self._share_of_memory(advised),
            "learning": learning,
            "doubts": self._count_doubts(advised) if advised else {},
            "complete": self.pending is None,
            "sentences": list(self.write()),
            "next": self.next_command if self.pending else None,
        }


_TIMED = ("time", PRICED)
_SPEED = {"time": "speed", PRICED: "speed", "memory": "images a byte", "energy": "images a joule"}


def _describe(setting: Case | None) -> dict[str, str] | None:
    if setting is None:
        return None
    return {axis: format_value(getattr(setting, axis)) for axis in AXES}


def _digits(value: float) -> str:
    return f"{value:.2f}×" if value < 2 else f"{value:.1f}×"


def _write_part(value: float) -> str:
    return write_percent(round(value, 3))


def _interval(ratio: Ratio, write: Any) -> str:
    if ratio.low is None or ratio.high is None or ratio.exact:
        return ""
    low, high = (write(end).rstrip("× %") for end in (ratio.low, ratio.high))
    return f" ({low} to {high})"


def _write_gain(ratio: Ratio) -> str:
    gain = ratio.invert()
    return f"{_digits(gain.value or 1.0)}{_interval(gain, _digits)}"


def describe_start(standing: Standing, trial: Trial, budget_s: float, timeout_s: float) -> str:
    """Return a line for before the first run: how long it takes, if known, and what limits all
    runs."""
    takes = write_seconds(standing.predict_s(trial))
    if any(result.time_s for result in standing.known):
        takes = f"about {takes}"
    elif standing.space.epoch_s(trial.setting):  # by the machine's rates: a lower bound
        takes += " or more"
    else:
        takes = f"its start and {WARMUP_STEPS + LEAST_STEPS} steps or more, of unknown length"
    return (
        f"the first run takes {takes}, and each of its phases at most --timeout "
        f"({write_seconds(timeout_s)}); no other begins that does not fit in --budget "
        f"({write_seconds(budget_s)})"
    )


def describe_progress(standing: Standing, left_s: float) -> str:
    """Return a line for after a run: the best setting so far, and what is left of the budget."""
    said, now, best = [], standing.now, standing.best
    if best is not None and now in standing.values:
        # as the answer has it: the belief by which it is the best may be far from its runs
        ratio = standing.compare(best) if best != now else Ratio(1.0)
        said.append(f"best so far: {name(best, now)}, {_write_gain(ratio)}")
    said.append(f"{write_seconds(left_s)} left" if left_s > 0 else "nothing left of the budget")
    return "; ".join(said)
