"""The answer of a search for advice: what to train with, how sure that is, what was not tried."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.advise.findings import Findings, list_changes
from bench.case import Case, format_value
from bench.flags import join_flags
from bench.limits import NEAR
from bench.questions.halving import spell_case
from bench.record import Status
from bench.study.axes import name_setting
from bench.text import name_first, write_percent, write_seconds
from bench.verdict import compare
from bench.wall import read_peak

MORE = 2
"""Multiple of the budget to propose if the budget was too small."""

SEEDS = 5
"""Seeds by which to compare what two settings learn."""


def name(setting: Case, now: Case) -> str:
    """Name a setting by its precision, batch size and what else it changes of the present one."""
    axes = dict.fromkeys(["precision", "batch_size", *list_changes(setting, now)])
    values = {axis: format_value(getattr(setting, axis)) or "none" for axis in axes}
    return ", ".join(name_setting(axis, text) for axis, text in values.items())


def describe_progress(findings: Findings, left_s: float) -> str:
    """Return a line for after a run: what would be advised, and what is left of the budget."""
    advised = findings.advised
    said = f"so far: {name(advised, findings.now)}; " if advised else ""
    return said + (f"{write_seconds(left_s)} left" if left_s > 0 else "nothing left of the budget")


def propose(command: str, budget_s: float, stopped: int) -> str:
    """Return the command that continues a search, with the budget that it should have."""
    minutes = math.ceil(budget_s * (1 if stopped else MORE) / 60)
    words = shlex.split(command)
    return shlex.join([*words[:3], *join_flags(words[3:], ["--budget", f"{minutes}m"])])


@dataclass(frozen=True)
class Answer:
    """The outcome of a search."""

    findings: Findings
    left_out: Mapping[str, str]  # precisions that are not tried, and why
    folder: Path  # where the runs are
    resume: str  # the command that continues; empty if nothing is left to run
    stopped: int = 0  # the signal that stopped it before the budget was used; 0 for none

    @property
    def advised(self) -> Case | None:
        """The setting to train with; None if fewer than two settings were measured."""
        return self.findings.advised if len(self.findings.times) > 1 else None

    def write(self) -> Iterator[str]:
        """Yield the lines of the answer, the most important first."""
        findings, advised = self.findings, self.advised
        if advised is None:
            yield (
                f"No advice: {len(findings.times)} settings were measured, and it takes two; "
                f"python -m bench.report {shlex.quote(str(self.folder))} says why."
            )
        else:
            yield self._recommend(advised)
            lowest = min(findings.times, key=lambda setting: median(findings.times[setting]))
            if lowest != advised:
                yield (
                    f"The lowest time is that of {name(lowest, findings.now)}, "
                    f"{self._compare(lowest, advised)} it: the smallest batch within "
                    f"{write_percent(NEAR)} is advised, and of equals what changes least."
                )
        if failed := "; ".join(self._list_failed()):
            yield f"Did not train: {failed}."
        if untried := "; ".join(self._list_untried()):
            yield f"Not tried: {untried}."
        if advised not in (None, findings.now):
            yield "Does it learn as well? Train both whole, over several seeds, and see:"
            yield from (f"  {command}" for command in self._list_commands(advised))
        if self.resume:
            yield f"Next: {self.resume}"

    def _recommend(self, advised: Case) -> str:
        """Say what to train with, and what that gains over the present setting."""
        now, times = self.findings.now, self.findings.times
        of = f"of {len(times)} settings measured"
        if advised == now:
            return f"Stay with {name(now, now)}, {of}."
        said = f"Train with {name(advised, now)}, {of}"
        if now not in times:
            return f"{said}; what you have now ({name(now, now)}) could not be."
        here, there = (self._find_memory(setting) for setting in (advised, now))
        share = f", with {100 * here / there:.0f} % of its memory" if here and there else ""
        gain = self._compare(advised, now)
        return f"{said}: {gain} what you have now ({name(now, now)}){share}."

    def _compare(self, setting: Case, other: Case) -> str:
        """Return ``3.10× (2.90 to 3.31) as fast as``; without an interval if there are too few
        repeats."""
        times = self.findings.times
        (ratio,) = compare([(times[setting], times[other])])
        ends = ""
        if ratio.low is not None and ratio.high is not None:
            chance = ", which may be chance," * (ratio.low < 1 < ratio.high)
            ends = f" ({ratio.low:.2f} to {ratio.high:.2f}{chance})".replace(",)", ")")
        return f"{median(times[other]) / median(times[setting]):.2f}×{ends} as fast as"

    def _find_memory(self, setting: Case) -> float | None:
        peaks = [read_peak(row) for row in self.findings.runs[setting]]
        return max((peak for peak in peaks if peak), default=None)

    def _list_failed(self) -> Iterator[str]:
        """Yield the settings that did not train, by how they ended."""
        found: dict[str, list[str]] = {}
        for setting, rows in self.findings.runs.items():
            if rows[-1].status is not Status.OK:
                why = f"{rows[-1].status}: {rows[-1].reason}"
                found.setdefault(why, []).append(name(setting, self.findings.now))
        yield from (f"{name_first(names, 3, '; ')} ({why})" for why, names in found.items())

    def _list_untried(self) -> Iterator[str]:
        """Yield what could not be tried, with the reason, and values of levers that no run had."""
        yield from (f"{what} ({why})" for what, why in self.left_out.items())
        for axis, values in self.findings.levers.items():
            seen = {str(getattr(setting, axis)) for setting in self.findings.runs}
            left = [v for v in values if str(v) not in {*seen, *self.left_out}]
            yield from (name_setting(axis, format_value(value)) for value in left)

    def _list_commands(self, advised: Case) -> Iterator[str]:
        folder = str(self.folder.with_name(f"{self.folder.name}-whole"))
        for setting in (self.findings.now, advised):
            how = ["--evaluate", "--repeats", str(SEEDS), "--out", folder]
            yield shlex.join(["python", "-m", "bench.sweep", *spell_case(setting), *how])
        yield shlex.join(["python", "-m", "bench.report", folder])
