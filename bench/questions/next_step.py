"""The suggested next step: what to add to the sweep's command, or a command that reads its folder.

No command of a sweep is put together anew: its preset may have other cases by now.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.limits import MIN_REPEATS
from bench.questions.batch_sizes import Search
from bench.questions.halving import confirm
from bench.questions.notices import list_asked
from bench.record import REPEATED
from bench.render.model import NextStep
from bench.study.results import Result
from bench.study.sweeps import Sweep


def choose_next(
    sweeps: Sequence[Sweep], results: Sequence[Result], searches: Sequence[Search] = ()
) -> NextStep | None:
    """Return the step that would help most, by the cases that are shown or, without any, by the
    searches for the largest batch; None if nothing has been recorded or planned."""
    return next(_suggest(sweeps, results, searches), None)


def _suggest(
    sweeps: Sequence[Sweep], results: Sequence[Result], searches: Sequence[Search]
) -> Iterator[NextStep]:
    folders = [name_folder(sweep) for sweep in sweeps]
    if any(search.wall.ending is None for search in searches):
        yield NextStep("run the same command again, which continues the search")
    if any(search.wall.recommended for search in searches):
        yield NextStep(
            "bench.sweep with the same flags and --batch-size auto times training at the batch "
            "sizes that were found"
        )
    for sweep in sweeps:
        mine = [result for result in results if result.sweep == sweep.name]
        gaps = sweep.gaps and not any(plan.shard for plan in sweep.plans)
        if gaps or any(result.status in REPEATED for result in mine):
            yield NextStep("run the same command again, which runs what is missing")
        if asked := list_asked(mine):
            flag = f"--retry {' '.join(asked)}"
            yield NextStep(f"the same command with {flag} runs again what failed")
        if sweep.halving is not None:
            folder = Path(name_folder(sweep))
            best = confirm(sweep.records, sweep.read_epochs(), sweep.halving, folder)
            yield from (NextStep("run the best trial again, with other seeds", b) for b in best[:1])
    executors = [name for sweep in sweeps for name in sweep.records["executor"].unique()]
    if len(folders) == 2:
        yield NextStep(
            "compare the two case by case", f"python -m bench.compare {shlex.join(folders)}"
        )
    if any(r.repeats < MIN_REPEATS for r in results if not math.isnan(r.epoch_time_s)):
        yield NextStep(
            f"the same command with --repeats {MIN_REPEATS} shows which differences are real"
        )
    profiled = {r.precision for r in results if not math.isnan(r.profiled_step_s)}
    if {"fp32"} < profiled:
        yield NextStep("see where the time goes", f"python -m bench.why {shlex.join(folders[:1])}")
    if executors:
        page = f"python -m bench.report {shlex.join(folders)} --format html -o report.html"
        yield NextStep("see all of it as a page with figures", page)


def name_folder(sweep: Sweep) -> str:
    """Return the folder or file of a sweep, relative to the working directory if it lies in it."""
    near = os.path.relpath(sweep.path)
    return str(sweep.path.resolve()) if near.startswith(os.pardir) else near
