"""Which records a report is about: sweeps from disk, and the published one to hold them against."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.errors import UsageError
from bench.halving import Halving, read_halving
from bench.limits import find_ends
from bench.record import STEP_COLUMNS
from bench.store.cells import RECORDS, STEPS
from bench.store.plans import Plan, read_own_plan, read_plans
from bench.store.reader import (
    read_config,
    read_epochs,
    read_ranks,
    read_records,
    read_steps,
    read_work,
    records_file,
)
from bench.study.gaps import describe_gaps
from bench.wall.records import read_goal
from bench.wall.search import MARGIN
from bench.work import Kind

if TYPE_CHECKING:
    import pandas as pd

REFERENCE = Path(__file__).parents[2] / "results" / "reference" / "rtx-titan-2019.csv"
"""The published figures, in a checkout; an installed package has none."""


@dataclass(frozen=True)
class Sweep:
    """One sweep: its records, and what stands beside them.

    Attributes:
        step: images to which the largest batch was searched; None where it is not known.
        margin: share of memory that the recommended batch was to leave free.
        halving: the search for the best settings that its trials are of, if there was one.
        plan: what its own sweep planned, by its last command; None where it was only joined, and
            for a records file by itself.
        joined: what was planned by the sweeps that were joined in its folder, where it is known.
    """

    name: str
    file: Path
    records: pd.DataFrame
    command: str = ""
    step: int | None = None
    margin: float = MARGIN
    halving: Halving | None = None
    plan: Plan | None = None
    joined: Sequence[Plan] = ()

    def read_steps(self, most_bytes: float = math.inf) -> pd.DataFrame:
        """The steps of its records, the columns of `STEP_COLUMNS`; none if the file is larger."""
        file = self.file.with_name(STEPS)
        if file.is_file() and file.stat().st_size > most_bytes:
            import pandas as pd

            return pd.DataFrame({name: [] for name in STEP_COLUMNS})
        return read_steps(self.file)

    def read_epochs(self) -> pd.DataFrame:
        """The epochs of its records that have several, the columns of `EPOCH_COLUMNS`."""
        return read_epochs(self.file)

    @cached_property
    def gaps(self) -> list[tuple[str, str]]:
        """What of its plan has no row, as sentences, and what mends each; looked for once."""
        return [*describe_gaps(self.name, self.records, self.plan, self.joined)]

    @cached_property
    def work(self) -> pd.DataFrame:
        """The work of a step of its records, the columns of `WORK_COLUMNS`; read once."""
        return read_work(self.file)

    def read_unnamed(self) -> dict[str, float]:
        """The share of a profiled step's operations that no kind of work names, by record."""
        if not len(work := self.work):
            return {}
        times = work[work["time_s"].notna()].groupby("record_id")["time_s"].sum()
        other = work[work["kind"] == Kind.OTHER.value].groupby("record_id")["time_s"].sum()
        shares = (other / times[times > 0]).dropna()
        return {str(record): float(share) for record, share in shares.items()}

    def read_stragglers(self) -> dict[str, float]:
        """How much longer the slowest process of a record worked than the median of the others."""
        found: dict[str, float] = {}
        if not (self.records["world_size"] > 1).any():  # only these have any
            return found
        ranks = read_ranks(self.file).dropna(subset=["work_s"])
        for record, work in ranks.groupby("record_id")["work_s"]:
            *others, slowest = sorted(work)
            if others and median(others) > 0:
                found[str(record)] = slowest / median(others) - 1
        return found


MOST_STEP_BYTES = 100_000_000
"""Steps files above this are not read for a report: pandas would need ten times as much memory."""

MEDIANS = 7
"""The schema from which the steps at both ends of an epoch are medians. Before, they were means, of
which one slow step made a trend."""


def mend_ends(records: pd.DataFrame, file: Path) -> pd.DataFrame:
    """Records of older schemas, the ends of their epochs as newer ones have them.

    Args:
        records: of `read_records`, from ``file``; its steps stand beside it.
    """
    ends, steps = ["step_time_first_s", "step_time_last_s"], file.with_name(STEPS)
    old = records.loc[(records["schema"] < MEDIANS) & records[ends[0]].notna(), "record_id"]
    if not (len(old) and steps.is_file() and steps.stat().st_size <= MOST_STEP_BYTES):
        return records
    every = read_steps(file).dropna(subset="time_s")
    every = every[every["record_id"].isin(old)]
    full = every[every["images"] == every.groupby("record_id")["images"].transform("max")]
    times = full.groupby("record_id")["time_s"].apply(lambda part: find_ends(part.tolist()))
    found = times.dropna().to_dict()
    at, mended = records["record_id"].isin(found), records.copy()
    mended.loc[at, ends] = [found[record] for record in records.loc[at, "record_id"]]
    return mended


def read_sweep(path: Path, name: str = "") -> Sweep:
    """Read a sweep from its folder, or from a records file. Raises UsageError: there are no
    records, or they are not records."""
    file = records_file(path)
    records, config = read_records(file), read_config(file.parent)
    records = mend_ends(records, file)
    command = config.get("command")
    return Sweep(
        name or _name(path),
        file,
        records,
        command if isinstance(command, str) else "",
        *read_goal(config.get("search")),
        read_halving(config.get("halving")),
        *_recall_plans(file, config),
    )


def _recall_plans(file: Path, config: Mapping[str, Any]) -> tuple[Plan | None, tuple[Plan, ...]]:
    if file.name != RECORDS:
        return None, ()
    own = read_own_plan(file.parent, config)
    try:
        return own, tuple(read_plans(file.parent).values())
    except UsageError:  # somebody edited it, which bench.merge refuses
        return own, ()


def read_sweeps(
    paths: Sequence[Path], leave_out: Callable[[UsageError], object] | None = None
) -> list[Sweep]:
    """Read several sweeps; those whose folders have one name keep their parents' names too. Why one
    cannot be read is told to ``leave_out``. Raises UsageError: without that, as `read_sweep`."""
    paths = list(dict.fromkeys(path.resolve() for path in paths))
    names = [_name(path) for path in paths]
    sweeps = []
    for path, name in zip(paths, names, strict=True):
        try:
            told = name if names.count(name) == 1 else f"{path.parent.name}/{name}"
            sweeps.append(read_sweep(path, told))
        except UsageError as error:
            if leave_out is None:
                raise
            leave_out(error)
    return sweeps


def list_results(folder: Path) -> list[Path]:
    """The records of a folder of sweeps, the newest first, and of its ``reference``."""
    sweeps = sorted(folder.glob(f"*/{RECORDS}"), key=lambda file: -file.stat().st_mtime)
    reference = sorted((folder / "reference").glob("*.csv"))
    # a curve belongs to the file that it is named after
    return [*sweeps, *(file for file in reference if not file.stem.endswith("-curve"))]


def _name(path: Path) -> str:
    path = path.resolve()
    return (path.parent if path.name == RECORDS else path).name.removesuffix(".csv")
