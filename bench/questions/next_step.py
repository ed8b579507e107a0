"""What to do next: one command, made of the one that the sweep ran."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.limits import MIN_REPEATS
from bench.questions.halving import confirm
from bench.questions.notices import list_asked, list_failed
from bench.record import REPEATED, Status
from bench.render.model import NextStep
from bench.study.gaps import describe_gaps
from bench.study.summaries import find_wide
from bench.study.sweeps import Sweep

if TYPE_CHECKING:
    import pandas as pd

SWEEP, WHY, COMPARE, REPORT = (
    ["python", "-m", f"bench.{name}"] for name in ("sweep", "why", "compare", "report")
)

UNSURE = ("shared", "noisy", "trend", "unknown")
"""Doubts that more repeats may settle."""


def choose_next(sweeps: Sequence[Sweep], cases: pd.DataFrame) -> NextStep | None:
    """The step that would help most; None where there is nothing to be done.

    Args:
        cases: of `bench.study.summaries.summarize`, those that are shown.
    """
    for rule in RULES:
        for sweep in sweeps:
            if found := rule(sweep, cases[cases["sweep"] == sweep.name]):
                return found
    folders = [_name_folder(sweep) for sweep in sweeps]
    if len(folders) == 2:
        return _step("compare the two case by case", [*COMPARE, *folders])
    page = ["--format", "html", "-o", "report.html"]
    return _step("see all of it as a page with figures", [*REPORT, *folders, *page])


def _step(why: str, words: Sequence[str]) -> NextStep:
    return NextStep(why, shlex.join(words))


def _name_folder(sweep: Sweep) -> str:
    """The folder or file of a sweep, from where one is, if that is above it."""
    path = sweep.file.parent if sweep.command or sweep.plan else sweep.file
    near = os.path.relpath(path)
    return str(path.resolve()) if near.startswith(os.pardir) else near


def _change(sweep: Sweep, without: Sequence[str] = (), **flags: Sequence[str]) -> list[str]:
    """The sweep's last command with other values of some flags; empty where none is known."""
    lines = sweep.command.splitlines()
    try:
        words = shlex.split(lines[-1]) if lines else []
    except ValueError:  # somebody edited it
        return []
    if words[: len(SWEEP)] != SWEEP:
        return []
    new = {"--out": [_name_folder(sweep)]} | {f"--{name}": list(v) for name, v in flags.items()}
    new = {flag: values for flag, values in new.items() if flag not in without}
    kept, dropped = [], False
    for word in words:
        if word.startswith("--"):
            dropped = word.partition("=")[0] in (*new, *without)
        if not dropped:
            kept.append(word)
    return [*kept, *(word for flag, values in new.items() for word in (flag, *values))]


def _confirm(sweep: Sweep, cases: pd.DataFrame) -> NextStep | None:
    if sweep.halving is None:
        return None
    found = confirm(sweep.records, sweep.read_epochs(), sweep.halving, Path(_name_folder(sweep)))
    why = "run the best trial again, on seeds that did not choose it"
    return NextStep(why, found[0]) if found else None


def _measure(sweep: Sweep, cases: pd.DataFrame) -> NextStep | None:
    if len(cases) and (cases["kind"] == "published").all():
        return _step("measure the same cases here", [*SWEEP, "--preset", "rtx-titan"])
    words = _change(sweep, ["--executor", "--out"])
    fake = len(cases) and cases["fake"].all() and words
    return _step("measure, instead of making figures up", words) if fake else None


def _finish(sweep: Sweep, cases: pd.DataFrame) -> NextStep | None:
    shard = sweep.plan and sweep.plan.shard
    left = cases["status"].isin(list(REPEATED)).any() or (not shard and any(describe_gaps(sweep)))
    words = _change(sweep)
    return _step("run what is missing", words) if left and words else None


def _retry(sweep: Sweep, cases: pd.DataFrame) -> NextStep | None:
    asked = list_asked(list_failed(cases))
    words = _change(sweep, retry=asked)
    return _step("run again what failed", words) if asked and words else None


def _fit(sweep: Sweep, cases: pd.DataFrame) -> NextStep | None:
    full = cases["epoch_time_s"].isna().all() and (cases["status"] == Status.OOM.value).any()
    words = _change(sweep, **{"batch-size": ["auto"]})
    return _step("look for the largest batch that fits", words) if full and words else None


def _repeat(sweep: Sweep, cases: pd.DataFrame) -> NextStep | None:
    timed = cases[cases["epoch_time_s"].notna()]
    few = len(timed) and timed["repeats"].min() < MIN_REPEATS
    words = _change(sweep, repeats=[str(MIN_REPEATS)])
    return _step("tell differences from chance by repeats", words) if few and words else None


def _settle(sweep: Sweep, cases: pd.DataFrame) -> NextStep | None:
    unsure = cases[list(UNSURE)].any(axis=None) or find_wide(cases).any()
    if not unsure:
        return None
    words = _change(sweep, repeats=[str(max(5, 2 * int(cases["repeats"].max()) + 1))])
    return _step("measure better what spreads, on an idle machine", words) if words else None


def _explain(sweep: Sweep, cases: pd.DataFrame) -> NextStep | None:
    profiled = cases[cases["profiled_step_s"].notna()]
    told = "fp32" in set(profiled["precision"]) and profiled["precision"].nunique() > 1
    return _step("see where the time goes", [*WHY, _name_folder(sweep)]) if told else None


def _complete(sweep: Sweep, cases: pd.DataFrame) -> NextStep | None:
    said = {
        name: [value]
        for name, value, needed in (
            ("fraction", "1", (cases["fraction"] < 1).any()),
            ("steps", "none", (cases["steps"] != "").any()),
            ("until", "none", (cases["until"] != "").any()),
        )
        if needed
    }
    words = _change(sweep, **said) if said and cases["extrapolated"].any() else []
    return _step("measure whole epochs", words) if words else None


Rule = Callable[[Sweep, "pd.DataFrame"], "NextStep | None"]

RULES: tuple[Rule, ...] = (
    _confirm, _measure, _finish, _retry, _fit, _repeat, _settle, _explain, _complete
)  # fmt: skip
"""What may have to be done to a sweep, given the cases of it that are shown; most urgent first."""
