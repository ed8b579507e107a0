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
    for why, rule in RULES.items():
        for sweep in sweeps:
            if words := rule(sweep, cases[cases["sweep"] == sweep.name]):
                return NextStep(why, shlex.join(words))
    folders = [_name_folder(sweep) for sweep in sweeps]
    if len(folders) == 2:
        return NextStep("compare the two case by case", shlex.join([*COMPARE, *folders]))
    page = [*REPORT, *folders, "--format", "html", "-o", "report.html"]
    return NextStep("see all of it as a page with figures", shlex.join(page))


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


def _confirm(sweep: Sweep, cases: pd.DataFrame) -> list[str]:
    if sweep.halving is None:
        return []
    found = confirm(sweep.records, sweep.read_epochs(), sweep.halving, Path(_name_folder(sweep)))
    return shlex.split(found[0]) if found else []


def _finish(sweep: Sweep, cases: pd.DataFrame) -> list[str]:
    shard = sweep.plan and sweep.plan.shard
    left = cases["status"].isin(list(REPEATED)).any() or (not shard and sweep.gaps)
    return _change(sweep) if left else []


def _retry(sweep: Sweep, cases: pd.DataFrame) -> list[str]:
    asked = list_asked(list_failed(cases))
    return _change(sweep, retry=asked) if asked else []


def _fit(sweep: Sweep, cases: pd.DataFrame) -> list[str]:
    full = cases["epoch_time_s"].isna().all() and (cases["status"] == Status.OOM.value).any()
    return _change(sweep, **{"batch-size": ["auto"]}) if full else []


def _repeat(sweep: Sweep, cases: pd.DataFrame) -> list[str]:
    timed = cases[cases["epoch_time_s"].notna()]
    few = len(timed) and timed["repeats"].min() < MIN_REPEATS
    return _change(sweep, repeats=[str(MIN_REPEATS)]) if few else []


def _settle(sweep: Sweep, cases: pd.DataFrame) -> list[str]:
    unsure = cases[list(UNSURE)].any(axis=None) or find_wide(cases).any()
    most = max(5, 2 * int(cases["repeats"].max()) + 1) if unsure else 0
    return _change(sweep, repeats=[str(most)]) if unsure else []


def _explain(sweep: Sweep, cases: pd.DataFrame) -> list[str]:
    profiled = cases[cases["profiled_step_s"].notna()]
    told = "fp32" in set(profiled["precision"]) and profiled["precision"].nunique() > 1
    return [*WHY, _name_folder(sweep)] if told else []


def _complete(sweep: Sweep, cases: pd.DataFrame) -> list[str]:
    said = {"fraction": ["1"]} if (cases["fraction"] < 1).any() else {}
    said |= {name: ["none"] for name in ("steps", "until") if (cases[name] != "").any()}
    return _change(sweep, **said) if said and cases["extrapolated"].any() else []


def _measure(sweep: Sweep, cases: pd.DataFrame) -> list[str]:
    published = len(cases) and (cases["kind"] == "published").all()
    return [*SWEEP, "--preset", "rtx-titan"] if published else []


def _replace_fake(sweep: Sweep, cases: pd.DataFrame) -> list[str]:
    fake = len(cases) and cases["fake"].all()
    return _change(sweep, ["--executor", "--out"]) if fake else []


RULES: dict[str, Callable[[Sweep, pd.DataFrame], Sequence[str]]] = {
    "run the best trial again, on seeds that did not choose it": _confirm,
    "measure the same cases here": _measure,
    "measure, instead of making figures up": _replace_fake,
    "run what is missing": _finish,
    "run again what failed": _retry,
    "look for the largest batch that fits": _fit,
    "tell differences from chance by repeats": _repeat,
    "measure better what spreads, on an idle machine": _settle,
    "see where the time goes": _explain,
    "measure whole epochs": _complete,
}
"""What may have to be done to a sweep, given the cases of it that are shown, as the words of a
command; none where it need not. Most urgent first."""
