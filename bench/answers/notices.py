"""What to know before believing the numbers of a report: what ran its cases, warnings, most serious
first, and the step that helps most.

A warning says what was found, in how many runs, and which flag or command helps.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

from bench.answers.advice import propose
from bench.answers.halving import confirm
from bench.answers.render.table import (
    NextStep,
    Notice,
    Prominence,
    name_case,
    name_outcome,
)
from bench.answers.scaling import BatchSearch
from bench.base.limits import MIN_REPEATS, STEADY
from bench.base.origin import LABELS
from bench.base.text import ESTIMATE, GIB, capitalize, join_words, name_first, write_range
from bench.networks.workloads import IMAGES
from bench.results.store.rows import group, latest
from bench.results.study.axes import MACHINE, ORDER, list_naming_axes
from bench.results.study.comparable import (
    list_conditions,
    list_mixed,
    refuse_alone,
    refuse_together,
)
from bench.results.study.quantities import MEMORY_MEASURES, is_number
from bench.results.study.remedies import QUIETER
from bench.results.study.runs import Result, Run
from bench.results.study.sweeps import SweepFolder
from bench.results.study.warnings import SAID_BELOW, WARNINGS
from bench.schema.case import find_axis, list_axes
from bench.schema.command import ask_for_seed
from bench.schema.flags import ABSENT, change_flags
from bench.schema.record import MEASURED, REPEATED, Status

ENVIRONMENT = {
    "driver": "driver",
    "torch": "torch",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
    "python": "Python",
    "cpu": "CPU",
    "commit": "commit",
    "device": "device",
}
"""Columns of records that say what ran them, and their labels."""

MOST_OUTCOMES = 8  # reasons of cases without a result that a report names

_Results = Sequence[Result]


# -------------------------------------------------------------------------------- what was measured


def describe_subject(
    title: str, cases: _Results, varying: Collection[str], machines: Iterable[str]
) -> str:
    """Return one line on what was measured: the sweep, what ran it, what all cases share."""
    if not cases:
        return title
    timed = [case for case in cases if is_number(case.epoch_time_s)]
    measured = [case.part for case in timed if case.part < 1]
    part = write_range(measured, lambda share: f"{100 * share:.3g}") if measured else ""
    whole = "whole epochs, " * (len(measured) < len(timed))
    versions = name_values(cases, "torch", 2)
    parts = (
        name_first([*dict.fromkeys(machines)], 2),
        *_name_kinds(cases),
        part and f"{whole}{ESTIMATE} from {part} % of an epoch",
        _name_same(cases, varying),
        versions and f"torch {versions}",
    )
    return f"{title}: {' · '.join(filter(None, parts))}"


def _name_kinds(cases: _Results) -> list[str]:
    return [LABELS[kind] for kind in dict.fromkeys(c.kind for c in cases) if kind in LABELS]


def describe_constants(cases: _Results, varying: Collection[str]) -> Iterator[str]:
    """Yield a sentence on what all cases have in common, and one on each machine that ran them."""
    if cases and (same := _name_same(cases, varying)):
        yield f"All cases: {same}."
    for part in group(cases, attrgetter("ran_on")):
        constants = [part[0].machine]
        values = {name: name_values(part, name, 4) for name in ENVIRONMENT}
        constants += [
            f"{ENVIRONMENT[name]} {value}"
            for name, value in values.items()
            if value not in ("", part[0].machine)  # a CPU is the machine itself
        ]
        yield ", ".join([*constants, *_name_kinds(part)]) + "."


def _name_same(cases: _Results, varying: Collection[str]) -> str:
    """Name the settings that all cases share; of most axes only if they are not the default."""
    first = cases[0]
    same = [n for n in ("model", "dataset", "precision", "batch_size") if n not in varying]
    same += [
        name
        for name in list_axes(cases, ORDER)
        if name not in (MACHINE, *same, *varying, "command")
        and getattr(first, name) != find_axis(name).default
        and len({getattr(case, name) for case in cases}) == 1
    ]
    return name_case(first, same)


def name_values(cases: _Results, name: str, most: int | None) -> str:
    """Return the first ``most`` distinct values of a column, in order: ``12.4 or 12.8``."""
    values = dict.fromkeys(getattr(case, name) for case in cases)
    known = [value for value in values if value == value and value != ""]
    return " or ".join(map(str, known[:most]))


def write_notes(cases: _Results, varying: Collection[str]) -> Iterator[str]:
    """Yield why cases failed, which model counts what, and what the memory is of."""
    axes, lines = list_naming_axes(varying), dict[str, dict[str, None]]()
    for row in (case for case in cases if case.reason and case.status != Status.OK):
        # the row says that memory ran out, but not what that was inferred from
        if row.status != Status.OOM or row.inferred:
            ended = f"{name_outcome(row)}: {row.reason}"
            lines.setdefault(ended, {})[name_case(row, axes) or row.model] = None
    for ended, named in list(lines.items())[:MOST_OUTCOMES]:
        yield f"{name_first([*named], 3, '; ')}: {ended}"
    # each row of a command says of what its time is
    ours = (case for case in cases if case.command is None)
    counted = dict.fromkeys((case.unit or IMAGES, case.model) for case in ours)
    if len({unit for unit, _ in counted}) > 1:
        yield f"Items are {', '.join(f'{unit} of {model}' for unit, model in counted)}."
    sized = [case for case in cases if is_number(case.memory_bytes)]
    for measure in dict.fromkeys(c.memory_measure for c in sized if c.kind == "measured"):
        yield f"Memory: peak of {MEMORY_MEASURES[measure]}."
    yield from _name_holder([case for case in sized if case.kind == "measured"], axes)
    if any(case.kind == "published" for case in sized):
        yield "Memory of published figures: of the whole card, as published."


_HOLDERS = {
    "weights_bytes": "its weights hold",
    "gradients_bytes": "its gradients hold",
    "optimizer_bytes": "its optimizer holds",
    "activations_bytes": "its activations, workspaces and data hold",
}
_MUCH = 0.25  # of the memory of a case


def _name_holder(sized: _Results, axes: Sequence[str]) -> Iterator[str]:
    """Yield what holds most of the memory of the case with most, if it is much of it."""
    for case in sorted(sized, key=attrgetter("memory_bytes"))[-1:]:
        known = {name: getattr(case, name) for name in _HOLDERS}
        sizes = {name: size for name, size in known.items() if is_number(size)}
        most = max(sizes, key=sizes.__getitem__, default="")
        if most and sizes[most] >= _MUCH * case.memory_bytes:
            name, of = name_case(case, axes) or case.model, case.memory_bytes / GIB
            yield f"Most memory, {name}: {_HOLDERS[most]} {sizes[most] / GIB:.2f} of {of:.2f} GiB."


# ----------------------------------------------------------------------------------------- warnings


def warn(
    every: Sequence[Run],
    results: Sequence[Result],
    everything: Sequence[Run] = (),
    sweeps: Sequence[SweepFolder] = (),
    spoken: Mapping[bool, Collection[int]] | None = None,
) -> list[Notice]:
    """Return all warnings, most serious first: on ``every`` run and the ``results`` of those that
    count, on drift in ``everything``, all runs of their sweeps (``every`` by default), and on what
    ``sweeps`` lack. A first screen has the warnings of the cells ``spoken``, by whether these are
    fatal; all if None."""
    runs = latest(every)
    warned: dict[bool, list[Notice]] = {True: [], False: []}
    for warning in WARNINGS.values():
        if hit := [run for run in runs if getattr(run, warning.name)]:
            prominent = spoken is None or any(run.cell in spoken[warning.fatal] for run in hit)
            prominent |= warning.name == "unmet"  # it was asked for, of whatever case
            level = (
                Prominence.TABLE
                if prominent and warning.name not in SAID_BELOW
                else Prominence.DETAIL
            )
            texts = warning.warn(hit), warning.fix.advise(hit), _count(hit, runs)
            warned[warning.fatal].append(
                Notice(capitalize(warning.label(hit)), *texts, level=level)
            )
    spread = []
    if wide := [result for result in results if result.scatter > STEADY]:
        several = sum(result.repeats > 1 for result in results)
        found = (
            f"The times of {len(wide):,} of the {several:,} cases with repeats spread by more than"
        )
        found += f" ±{100 * STEADY:.0f} %; they are marked noisy."
        spread.append(Notice("Spread", found, QUIETER.advise(wide)))
    return [
        *(Notice("Incomplete", *gap) for sweep in sweeps for gap in sweep.gaps),
        *_describe_failures(runs),
        *_describe_conditions(runs),
        *warned[True],
        *_describe_overwritten(runs),
        *spread,
        *_describe_drift(everything or every),
        *_describe_mixtures(runs),
        *_describe_rates(runs),
        *warned[False],
    ]


def _describe_overwritten(runs: Sequence[Run]) -> Iterator[Notice]:
    """Warn of files of the user's that several runs wrote."""
    for part in group(runs, attrgetter("sweep")):
        wrote = Counter(name for run in part for name in run.wrote.split("; ") if name)
        if several := [name for name, times in wrote.items() if times > 1]:
            found = (
                f"Several runs of {part[0].sweep} wrote {name_first(several, 3)}, so that only the "
                "last one's is kept, and nothing of what was there before."
            )
            fix = "Put {out} in --command, a folder that each run has for itself."
            yield Notice(f"Overwritten: {name_first(several, 2)}", found, fix)


def _count(hit: Sequence[Run], runs: Sequence[Run]) -> str:
    if len(hit) == len(runs):
        return f"all {len(runs):,} runs" if len(runs) > 1 else "the only run"
    return f"{len(hit):,} of {len(runs):,} runs"


def _describe_failures(runs: Sequence[Run]) -> Iterator[Notice]:
    if failed := [run for run in runs if run.status not in _ENDED]:
        ends = Counter(run.status.replace("_", " ") for run in failed).most_common()
        asked = " ".join(list_asked(failed))
        fix = f"Run them again with --retry {asked}." if asked else ""
        kinds = ", ".join(f"{n:,} {end}" for end, n in ends)
        fix = fix or "The same command runs them again."
        first = next((run for run in failed if run.reason), None)
        if first is not None:  # a log is beside the records
            log = f" ({first.log} in its folder)" if first.log else ""
            fix = f"The first: {first.reason}{log}. {fix}"
        yield Notice("No result", f"{kinds}.", fix, _count(failed, runs))


_ENDED = {*MEASURED, Status.OOM, Status.UNSUPPORTED}


def list_asked(runs: Iterable[Run | Result]) -> list[str]:
    """Return the outcomes that are run again only by ``--retry``."""
    ends = dict.fromkeys(run.status for run in runs)
    return [status for status in ends if status not in _ENDED | REPEATED]


def _describe_drift(every: Sequence[Run]) -> Iterator[Notice]:
    """Warn of drift checks, reruns of the first case of a sweep at its end, that took longer or
    less than all of its runs by more than `STEADY`. Only runs on the same lane and GPU are
    compared, and only if both or neither ran beside other lanes, and their times are of the same: a
    slower card is no drift."""
    tell = attrgetter("cell", "lane", "gpu_uuid", "beside", "period")
    times: dict[Any, list[float]] = {}
    drift_checks = [run for run in every if run.sentinel and run.timed and run.status in MEASURED]
    first = latest(every) if drift_checks else []
    for run in (run for run in first if run.timed and run.status in MEASURED):
        times.setdefault(tell(run), []).append(run.epoch_time_s)
    for run in drift_checks:
        if (repeats := times.get(tell(run))) and not (
            min(repeats) / (1 + STEADY) <= run.epoch_time_s <= max(repeats) * (1 + STEADY)
        ):
            change = 100 * (run.epoch_time_s / median(repeats) - 1)
            found = (
                f"The first case of {run.sweep}, run again at the end on {run.machine}, took "
                f"{abs(change):.1f} % {'longer' if change > 0 else 'less'} than before."
            )
            yield Notice(
                f"Drift of {change:+.1f} %",
                found,
                "Run the sweep again on an idle machine, with a new --out.",
            )


def _describe_mixtures(runs: Sequence[Run]) -> Iterator[Notice]:
    for part in group(runs, lambda run: run.sweep):
        mixed = dict[str, str]()
        for name, values, _ in list_mixed(part):
            difference = f"{name.replace('_', ' ')} {name_first(values, 3, ' or ')}"
            mixed.setdefault(name, difference)
        if mixed:
            found = (
                f"The rows of {part[0].sweep} were measured in different environments: "
                f"{'; '.join(mixed.values())}. Rows of each stand apart, like those of another "
                "machine, and nothing is chosen from several."
            )
            yield Notice("Mixed environments", found, "Use a new --out for each.")


def _describe_conditions(runs: Sequence[Run]) -> Iterator[Notice]:
    found: dict[str, dict[str, str]] = {}
    for name, values, alike in list_conditions(runs):
        if what := _CONDITIONS.get(name):
            differing = f"{what} ({name_first(values, 3, ' or ')})"
            found.setdefault(alike[0].ran_on, {}).setdefault(name, differing)
    for where, conditions in found.items():
        hold = "; --power-limit holds a limit" * ("power_limit_w" in conditions)
        yield Notice(
            "Other conditions",
            f"Rows of {where} differ in {join_words([*conditions.values()])}, which no setting "
            "chose: between these, a difference in time may be of that.",
            f"Measure all of them under one, with a new --out{hold}.",
        )


# rows of another kind stand apart, and those beside lanes have a warning of their own
_CONDITIONS = {
    "gpu_uuid": "which GPU ran them",
    "power_limit_w": "the power limit in W",
    "ecc": "ECC",
    "mig": "MIG mode",
    "cpu_governor": "the CPU's governor",
    "torch_threads": "torch's threads",
}


def _describe_rates(runs: Sequence[Run]) -> Iterator[Notice]:
    for part in group((run for run in runs if run.faster_than_rates), attrgetter("sweep")):
        first, faster = part[0], part[0].faster_than_rates
        times = [f"{share:,.1f} times the rate of {ran}" for ran, share in faster.items()]
        found = (
            f"Steps of {first.sweep} computed at {join_words(times)} products, as measured on "
            f"{first.machine} before its cases: other programs ran then. Shares of such a rate are "
            "not shown."
        )
        yield Notice("Rates too low", found, "Measure again on an idle machine, with a new --out.")


# ------------------------------------------------------------------------------------- what helps


def choose_next(
    sweeps: Sequence[SweepFolder], results: Sequence[Result], searches: Sequence[BatchSearch]
) -> NextStep | None:
    """Return the step that would help most, by the cases that are shown or, without any, by the
    searches for the largest batch; None if nothing has been recorded or planned."""
    gaps = any(sweep.gaps and not any(plan.shard for plan in sweep.plans) for sweep in sweeps)
    gaps |= any(search.largest_batch.ending is None for search in searches)
    if gaps or any(result.status in REPEATED for result in results):
        again = "run the same command again, which runs what is missing"
        return NextStep(again, _repeat(sweeps))
    if any(search.largest_batch.recommended for search in searches):
        return NextStep(
            "bench.sweep with the same flags and --batch-size auto times training at the batch "
            "sizes that were found"
        )
    if asked := list_asked(run for result in results for run in result.every):
        flag = ["--retry", *asked]
        again = f"the same command with {shlex.join(flag)} runs again what failed"
        again = f"once what failed is mended, {again}" if Status.ERROR in asked else again
        return NextStep(again, _repeat(sweeps, flag))
    for sweep in sweeps:
        folder = Path(_name_folder(sweep))
        if sweep.halving and (best := confirm(sweep.rows, sweep.epochs, sweep.halving, folder)):
            seed = ask_for_seed(sweep.rows[0].command)
            return NextStep(f"run the best trial again, with other seeds{seed}", best[0])
    if results and all(result.kind == "published" for result in results):
        return None  # nobody has the machine
    folders = shlex.join(map(_name_folder, sweeps))
    if len(sweeps) == 2:
        return NextStep("compare the two case by case", f"python -m bench.compare {folders}")
    timed = [result for result in results if is_number(result.epoch_time_s)]
    # a search for advice decides on repeats itself
    for sweep in (sweep for sweep in sweeps if sweep.advised and sweep.command):
        anew = not any(result.trusted for result in timed)
        how = "search anew, with other programs closed" if anew else "measure more settings"
        folder, last = Path(_name_folder(sweep)), sweep.command.splitlines()[-1]
        return NextStep(f"{how}, and with a longer budget", propose(last, folder, anew=anew))
    apart = (refuse_together(alike) for alike in group(timed, attrgetter("sweep", "model")))
    if any(map(refuse_alone, timed)) or any(apart):
        return NextStep("fix what keeps times from being compared, and measure with a new --out")
    repeatable = all(sweep.maker not in ABSENT for sweep in sweeps)
    if repeatable and any(result.runs < MIN_REPEATS for result in timed):
        shown = "which differences are real" if len(timed) > 1 else "how far its time repeats"
        flag = ["--repeats", str(MIN_REPEATS)]
        again = f"the same command with {shlex.join(flag)} shows {shown}"
        return NextStep(again, _repeat(sweeps, flag))
    if {"fp32"} < {r.precision for r in results if is_number(r.profiled_step_s)}:
        return NextStep("see where the time goes", f"python -m bench.why {folders}")
    if timed and 2 * sum(result.trusted for result in timed) <= len(timed):
        return NextStep("do what the first warning says, and measure again with a new --out")
    if any(sweep.rows for sweep in sweeps):
        page = f"python -m bench.report {folders} -o report.html"
        return NextStep("see all of it as a page with a figure", page)
    return None


def _repeat(sweeps: Sequence[SweepFolder], flags: Sequence[str] = ()) -> str:
    """Return the command that ran the only sweep, with its folder and these flags; empty if there
    are several, or shards, or if it took several commands or one that somebody edited."""
    commands = [line for sweep in sweeps for line in sweep.command.splitlines()]
    if len(commands) == len(sweeps) == 1 and not any(plan.shard for plan in sweeps[0].plans):
        with suppress(ValueError):
            return change_flags(commands[0], ["--out", _name_folder(sweeps[0]), *flags])
    return ""


def _name_folder(sweep: SweepFolder) -> str:
    """Return the folder or file of a sweep, relative to the working directory if it lies in it."""
    near = os.path.relpath(sweep.path)
    return str(sweep.path.resolve()) if near.startswith(os.pardir) else near
