"""The suggested next step: one command, derived from the one that the sweep ran."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.axis import Trait
from bench.case import AXES, Case, axis_flag, format_value, list_affecting, spell_value
from bench.errors import UsageError
from bench.flags import Parser, add_axes, join_flags, read_axes, split_flags
from bench.grid import AUTO
from bench.limits import MIN_REPEATS
from bench.origin import EXECUTORS, are_mixed, find_origin
from bench.preset import default_preset, load_preset
from bench.questions.families import Search
from bench.questions.halving import confirm
from bench.questions.notices import list_asked, list_failed
from bench.record import REPEATED, Status
from bench.render.model import NextStep
from bench.store.runs import read_cases
from bench.study.axes import find_default
from bench.study.summaries import find_wide
from bench.study.sweeps import Sweep
from bench.workloads import IMAGES, OWN

if TYPE_CHECKING:
    import pandas as pd

SWEEP, SEARCH, FIT, WHY, COMPARE, REPORT, VALIDATE = (
    ["python", "-m", f"bench.{name}"]
    for name in ("sweep", "search", "fit", "why", "compare", "report", "validate")
)

OF_FIT = ("--step", "--margin", "--probes", "--json")  # flags that bench.sweep does not have

UNSURE = ("contended", "noisy", "trend", "unknown")  # doubts that more repeats may settle


def choose_next(
    sweeps: Sequence[Sweep], cases: pd.DataFrame, searches: Sequence[Search] = ()
) -> NextStep | None:
    """Return the step that would help most, by the cases that are shown or, without any, by the
    searches for the largest batch; None if nothing has been recorded or planned."""
    asked = (
        _suggest(
            sweep,
            cases[cases["sweep"] == sweep.name],
            [search for search in searches if search.sweep == sweep.name],
        )
        for sweep in sweeps
    )
    for suggested in zip(*asked, strict=True):
        for why, words in suggested:
            if words:
                return NextStep(why, shlex.join(words))
    folders = [name_folder(sweep) for sweep in sweeps]
    executors = chain.from_iterable(sweep.records["executor"].unique() for sweep in sweeps)
    if len(folders) == 2 and not are_mixed(executors):
        return NextStep("compare the two case by case", shlex.join([*COMPARE, *folders]))
    if not any(len(sweep.records) for sweep in sweeps):
        return None
    page = [*REPORT, *folders, "--format", "html", "-o", "report.html"]
    return NextStep("see all of it as a page with figures", shlex.join(page))


def _suggest(
    sweep: Sweep, cases: pd.DataFrame, searches: Sequence[Search]
) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the possible next steps for a sweep, most urgent first: the reason, and the words of a
    command, none if it is not needed. ``cases`` are those that are shown; ``searches`` look for
    largest batches."""
    commands = _list_commands(sweep)
    *_, last = [[], *(words for words in commands if searches or not _runs(words, FIT))]
    fit = last if _runs(last, FIT) else []
    if not _runs(last, SWEEP):
        last = [*SWEEP, *fit[len(FIT) :]] if fit else []
    origins = {*map(find_origin, sweep.records["executor"].unique())}

    def change(needed: Any, without: Sequence[str] = (), **flags: Sequence[str]) -> Sequence[str]:
        return _change(sweep, last, [*OF_FIT, *without], **flags) if needed else []

    best: list[str] = []
    if sweep.halving is not None and origins <= {"measured"}:
        folder = Path(name_folder(sweep))
        best = confirm(sweep.records, sweep.read_epochs(), sweep.halving, folder)
    words = shlex.split(best[0]) if best else []
    yield "run the best trial again, with other seeds", words
    published = len(cases) and (cases["kind"] == "published").all()
    words = [*SWEEP, "--preset", "rtx-titan"] if published else []
    yield "measure the same cases here", words
    going = any(search.wall.ending is None for search in searches)
    found = [search.family for search in searches if search.wall.recommended]
    # if several commands searched, no single sweep has the settings of all
    once = sum(_runs(words, FIT) for words in commands) == 1
    auto = _choose_auto(found) if found and once else {}
    fake = cases["fake"].all() if len(cases) else auto and origins == {"fake"}
    others = ["--executor", "--out"]
    yield "measure, instead of making figures up", change(fake, others, **auto)
    drawn = commands[-1] if sweep.halving and origins == {"fake"} and commands else []
    drawn = drawn if _runs(drawn, SEARCH) else []
    yield "search by measuring, instead of making figures up", _change(sweep, drawn, others)
    words = _change(sweep, fit, ["--probes"]) if going else []
    yield "continue the search for the largest batch", words
    yield "time training at the batch sizes that were found", change(auto, **auto)
    whole = not (sweep.plan and sweep.plan.shard)
    cut = cases[cases["status"].isin(list(REPEATED))]
    gaps = whole and sweep.gaps
    words = _choose_command(sweep, cases[:0] if gaps else cut) if gaps or len(cut) else []
    yield "run what is missing", _change(sweep, words)
    failed = list_failed(cases)
    asked = list_asked(failed)
    words = _choose_command(sweep, failed[failed["status"].isin(asked)]) if asked else []
    yield "run again what failed", _change(sweep, words, retry=asked)
    timed = cases[cases["epoch_time_s"].notna()]
    full = not len(timed) and (cases["status"] == Status.OOM.value).any()
    yield "look for the largest batch that fits", change(full, batch_size=["auto"])
    few = len(timed) and timed["repeats"].min() < MIN_REPEATS
    yield "repeat, to see which differences are real", change(few, repeats=[str(MIN_REPEATS)])
    unsure = cases[cases[list(UNSURE)].any(axis=1) | find_wide(cases)]
    most = max(5, 2 * int(cases["repeats"].max()) + 1) if len(unsure) else 0
    words = (_choose_command(sweep, unsure) or last) if len(unsure) else []
    words = _change(sweep, words, OF_FIT, repeats=[str(most)])
    yield "measure noisy cases better, on an idle machine", words
    profiled = set(cases.loc[cases["profiled_step_s"].notna(), "precision"])
    told = "fp32" in profiled and len(profiled) > 1
    yield "see where the time goes", [*WHY, name_folder(sweep)] if told else []
    flags = {
        name: [spell_value(AXES[name].default)]
        for name in list_affecting(Trait.PART)
        if (cases[name] != find_default(name)).any()
    }
    yield "measure whole epochs", change(flags and cases["extrapolated"].any(), **flags)


def _choose_auto(found: Sequence[Case]) -> dict[str, Sequence[str]]:
    """Return flags that train the found cases at their batch sizes. Precision and dataset are those
    that fit chose, if its command gave none; a workload brings its own data."""
    chosen = [name for name in ("precision", "dataset") if getattr(found[0], name) != OWN]
    flags: dict[str, Sequence[str]]
    flags = {n: list(dict.fromkeys(str(getattr(case, n)) for case in found)) for n in chosen}
    return flags | {"batch_size": [AUTO]}


def name_folder(sweep: Sweep) -> str:
    """Return the folder or file of a sweep, relative to the working directory if it lies in it."""
    path = sweep.file.parent if sweep.command or sweep.plan else sweep.file
    near = os.path.relpath(path)
    return str(path.resolve()) if near.startswith(os.pardir) else near


def _list_commands(sweep: Sweep) -> list[list[str]]:
    """Return the words of the sweep's commands, the latest last; none for one edited by hand."""
    commands = []
    for line in sweep.command.splitlines():
        try:
            words = shlex.split(line)
        except ValueError:
            words = []
        flagged = all(word.startswith("--") for word in words[len(SWEEP) :][:1])
        commands.append(words if flagged else [])
    return commands


def _runs(words: Sequence[str], *modules: Sequence[str]) -> bool:
    return words[: len(SWEEP)] in modules


def _choose_command(sweep: Sweep, cases: pd.DataFrame) -> list[str]:
    """Return the command that asks for ``cases``: the last one, if its plan has one of them or
    there are none; else, as only the last plan is kept, the one of the others whose flags fit them
    best. Empty if no command is known."""
    commands = [words for words in _list_commands(sweep) if _runs(words, SWEEP, SEARCH)]
    wanted = read_cases(cases)
    planned = (sweep.plan and sweep.plan.list_cases()) or []
    if not commands or not wanted or not {*planned}.isdisjoint(wanted):
        return commands[-1] if commands else []
    others = commands[:-1] if planned and commands[1:] else commands
    return max(reversed(others), key=lambda words: _count_fitting(words, wanted))


def _count_fitting(words: Sequence[str], cases: Sequence[Case]) -> tuple[int, int]:
    """Return how many ``cases`` a command's flags allow, and how many of their settings it
    names."""
    parser = Parser()
    add_axes(parser, "")
    try:
        axes = read_axes(parser.parse_known_args(words[len(SWEEP) :])[0])
    except UsageError:  # a search draws from ranges of its own
        axes = {}
    if any(isinstance(size, str) for size in axes.get("batch_size", ())):  # auto, any number
        del axes["batch_size"]
    named = [
        [getattr(case, name) in values for name, values in axes.items() if AXES[name].holds(case)]
        for case in cases
    ]
    fitting = [one for one in named if all(one)]
    return len(fitting), sum(map(len, fitting))


def _change(
    sweep: Sweep, words: Sequence[str], without: Sequence[str] = (), **flags: Sequence[str]
) -> list[str]:
    """Return a command of the sweep with other values of some flags; empty for no words."""
    if not words:
        return []
    module, asked = words[: len(SWEEP)], words[len(SWEEP) :]
    executor = split_flags(asked).get("--executor", ["subprocess"])[-1].rpartition("=")[2]
    if executor not in EXECUTORS:  # this version does not know it
        without = [*without, "--executor"]
    if not (sweep.plan and sweep.plan.shard):
        without = [*without, "--shard"]  # joined shards are run again as a whole
    new = {"--out": [name_folder(sweep)]} | {axis_flag(name): list(v) for name, v in flags.items()}
    if _runs(words, SWEEP):
        same: dict[str, list[str]] = {"--same-seed": []} if _share_seeds(sweep) else {}
        new = _pin_axes(sweep, asked) | new | same  # a folder refuses repeats of another seed
    given = [word for flag, values in new.items() for word in (flag, *values)]
    flagged = split_flags(join_flags(asked, given))
    kept = (values for flag, values in flagged.items() if flag not in without)
    return [*module, *chain.from_iterable(kept)]


def _share_seeds(sweep: Sweep) -> bool:
    """Return whether there are repeats, all with the seed of their case."""
    again = sweep.records[sweep.records["repeat"] > 1]
    return bool(len(again) and (again["run_seed"] == again["seed"]).all())


def _pin_axes(sweep: Sweep, asked: Sequence[str]) -> dict[str, list[str]]:
    """Return flags for axes with one value in all cases of a sweep, if the preset that made the
    cases has other values by now: the same command would make other cases."""
    given = split_flags(asked)
    rows = sweep.records[sweep.records["anchor"] == ""]
    cases = (sweep.plan and sweep.plan.list_cases()) or read_cases(rows)
    if "--config" in given or not cases:
        return {}
    device = "cuda" if any(case.device == "cuda" for case in cases) else "cpu"
    try:
        preset = load_preset(given.get("--preset", [default_preset(device)])[-1].rpartition("=")[2])
    except UsageError:  # of another version
        return {}
    pinned, case = {}, cases[0]
    free = {"batch_size", *list_affecting(Trait.PART)}
    free |= {"model", "dataset"} if case.workload != IMAGES else set()
    for name in [name for name in AXES if name not in free]:
        now = {format_value(value) for block in preset.grids for value in block.get(name, ())}
        (value, *others) = dict.fromkeys(getattr(case, name) for case in cases)
        other = now and format_value(value) not in now and AXES[name].holds(case)
        if other and not others and axis_flag(name) not in given:
            pinned[axis_flag(name)] = [spell_value(value)]
    return pinned
