"""The report, free of any format: its tables. Built once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.diagnosis.explanation import Explanation
from bench.questions.answers import answer
from bench.questions.batch_tables import ACCUMULATION, GROWTH, LARGEST, MATCHED, SPEEDS, WALLS
from bench.questions.breakdowns import BREAKDOWNS, OPERATIONS
from bench.questions.changes import EFFECTS
from bench.questions.checkpoints import CHECKPOINTS
from bench.questions.effects import Effect
from bench.questions.epochs import EPOCHS
from bench.questions.gpus import SCALING, TAX
from bench.questions.halving import RUNGS, SEARCH
from bench.questions.lanes import LANES
from bench.questions.learning import LEARNING
from bench.questions.lines import Line
from bench.questions.loading import LOADING
from bench.questions.loss_scales import SCALES
from bench.questions.material import gather
from bench.questions.next_step import choose_next
from bench.questions.notes import describe_constants, describe_subject, write_notes
from bench.questions.notices import warn
from bench.questions.overview import (
    ENVIRONMENT,
    MACHINES,
    OVERVIEW,
    PUBLISHED,
    tell_environment,
)
from bench.questions.profiles import doubt_profiles
from bench.questions.reasons import EXPLAINED, PAIRS, POSSIBLE
from bench.questions.startup import PARTS, PRICES
from bench.record import Status
from bench.render.cells import outcome
from bench.render.model import Document, Table
from bench.render.section import Section
from bench.render.units import count_table_in, find_units
from bench.scale_map import ScaleMap
from bench.study.filters import Filter
from bench.study.sweeps import Sweep
from bench.text import count, name_first

if TYPE_CHECKING:
    import pandas as pd

SECTIONS: tuple[Section, ...] = (
    OVERVIEW,
    EFFECTS,
    LEARNING,
    PRICES,
    PARTS,
    BREAKDOWNS,
    POSSIBLE,
    PAIRS,
    EXPLAINED,
    OPERATIONS,
    WALLS,
    SPEEDS,
    GROWTH,
    MATCHED,
    LARGEST,
    ACCUMULATION,
    SCALING,
    TAX,
    LOADING,
    EPOCHS,
    CHECKPOINTS,
    LANES,
    MACHINES,
    PUBLISHED,
    SEARCH,
    RUNGS,
    SCALES,
)
"""In the order in which they are read."""


@dataclass(frozen=True)
class Report(Document):
    """A document on sweeps, and what its figures and its files of numbers are made from.

    Attributes:
        records: of `summaries.read`, those that ``--where`` asks for.
        cases: of `summaries.summarize`, in the order of the overview.
        axes: those in which the cases differ, in the order of the overview's columns.
        explanations: each precision against fp32, of the cases with profiles.
        lines: cases on one GPU and on several, of weak and of strong scaling.
        scale_maps: those that `bench.scales` stored in the folders of the sweeps.
        home: the folder that it is for; links start there.
    """

    sweeps: Sequence[Sweep]
    reference: Sweep | None
    records: pd.DataFrame
    cases: pd.DataFrame
    machines: Mapping[tuple[str, str], str]
    axes: tuple[str, ...]
    effects: tuple[Effect, ...]
    explanations: tuple[Explanation, ...]
    environments: Table
    scale_maps: tuple[ScaleMap, ...]
    lines: tuple[Line, ...]
    home: Path


def build(
    sweeps: Sequence[Sweep],
    reference: Sweep | None = None,
    home: Path | None = None,
    where: Sequence[Filter] = (),
    by: str = "",
) -> Report:
    """Derive everything once and lay it out, as `gather` takes it.

    Args:
        home: the folder the document is for; links start there.

    Raises:
        UsageError: ``where`` leaves nothing.
    """
    found = gather(sweeps, reference, where, by)
    cases, units = found.cases, find_units(found.cases)
    tables = [table for section in SECTIONS for table in section.tabulate(found)]
    shown = (found.steps[cell] for cell in cases["cell"] if cell in found.steps)
    notices = [
        *warn(found.records, cases, found.everything, sweeps),
        *doubt_profiles(shown),
    ]
    title = name_first([sweep.name for sweep in sweeps], 3)
    return Report(
        title=title,
        subject=describe_subject(title, cases, found.varying, found.machines),
        sweeps=sweeps,
        reference=reference,
        records=found.records,
        cases=cases,
        machines=found.machines,
        axes=found.varying,
        constants=tuple(describe_constants(cases, found.varying)),
        answers=tuple(answer(found)),
        warnings=tuple(notice for notice in notices if not notice.good),
        effects=tuple(found.effects),
        explanations=tuple(found.pairs),
        tables=tuple(count_table_in(table, units) for table in tables),
        notes=(
            *write_notes(cases, found.varying),
            *(notice.line for notice in notices if notice.good),
        ),
        outcomes=_count_outcomes(cases),
        next_step=choose_next(sweeps, cases),
        environments=ENVIRONMENT.fill(tell_environment(found)),
        scale_maps=found.scale_maps,
        lines=tuple(found.lines),
        home=home or Path.cwd(),
    )


def _count_outcomes(cases: pd.DataFrame) -> str:
    """How many cases and runs there are, and how the cases ended, most frequent first."""
    ends = zip(cases["status"], cases["inferred"], strict=True)
    counts = Counter(outcome(str(status), inferred=bool(inferred)) for status, inferred in ends)
    ordered = sorted(counts.items(), key=lambda pair: (pair[0] != Status.OK.value, -pair[1]))
    said = ", ".join(f"{number:,} {end}" for end, number in ordered)
    runs = int(cases["runs"].sum()) if len(cases) else 0
    return f"{count(len(cases), 'case')} in {count(runs, 'run')}: {said or 'none'}."
