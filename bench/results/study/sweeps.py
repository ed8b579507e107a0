"""Sweeps read from disk for a report, and the published reference."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bench.base.errors import UsageError
from bench.base.text import count, name_first
from bench.results.store.reader import find_records, read_beside, read_config, read_rows
from bench.results.store.rows import SHARD, PlannedRuns, Row, leave_out_known, read_history
from bench.results.store.table import RECORDS
from bench.schema.case import list_varying
from bench.schema.goals import FREE_MARGIN, Halving, read_goal, read_halving
from bench.schema.preset import ADVICE
from bench.schema.record import REPEATED, EpochRow, RankRow, WorkRow

REFERENCE = Path(__file__).parents[3] / "results" / "reference" / "rtx-titan-2019.csv"
"""The published figures; only a checkout has them, not an installed package."""

_NAMED = 4  # missing runs or shards named in a message


@dataclass(frozen=True)
class SweepFolder:
    """One sweep: the rows of its records, and data from the files beside them.

    Attributes:
        step: resolution, in images, of the search for the largest batch; None if not known.
        margin: share of memory that the recommended batch should leave free.
        halving: the search for the best settings, if its runs are trials of one.
        path: its folder, a folder of its shards, or a records file by itself.
        plans: the plan of its last command, or of each of its shards.
        advised: whether its runs are those of a search for advice.
    """

    name: str
    path: Path
    rows: Sequence[Row]
    command: str = ""
    step: int | None = None
    margin: float = FREE_MARGIN
    halving: Halving | None = None
    plans: Sequence[PlannedRuns] = ()
    advised: bool = False

    @property
    def maker(self) -> str:
        """The command that wrote its rows last, such as ``advise``."""
        found = re.match(r"python -m bench\.(\w+)", self.command.rpartition("\n")[2])
        return found[1] if found else "sweep"

    @cached_property
    def gaps(self) -> list[tuple[str, str]]:
        """What is missing, each with a sentence on how to fix it; computed once."""
        return [*self._find_lost_shards(), *self._find_lost_runs()]

    def _find_lost_shards(self) -> Iterator[tuple[str, str]]:
        shards = [plan.shard for plan in self.plans if plan.shard]
        of = shards[0].of if shards else 0
        if lost := [f"shard {n}/{of}" for n in range(1, of + 1) if (n, of) not in shards]:
            yield (
                f"{self.name} is without {name_first(lost, _NAMED, '; ')}.",
                "Run what is missing with --out beside the others, and give the folder that holds "
                "all.",
            )

    def _find_lost_runs(self) -> Iterator[tuple[str, str]]:
        """A row of any environment counts; only the sweep itself reruns those of another one."""
        planned = [*dict.fromkeys(run for plan in self.plans for run in plan.runs)]
        history = read_history(self.rows)
        poor = {(row.case, row.repeat, row.sentinel) for row in self.rows if row.truncated}
        left = [
            run
            for run in leave_out_known(planned, history)
            # the notice "No result" reports other runs that did not end
            if (run not in history or (run[2] and history[run].status in REPEATED))
            and run not in poor
        ]
        if not left:
            return
        axes = list_varying({case for case, _, _ in [*planned, *history]})
        lost = [
            f"{case.label(axes)}, {'drift check' if sentinel else f'repeat {repeat}'}"
            for case, repeat, sentinel in left
        ]
        yield (
            f"{self.name} has no row of {len(left):,} of the {count(len(planned), 'run')} that its "
            f"last command planned ({name_first(lost, _NAMED, '; ')}).",
            "Run the last command of the sweep again, unless it still runs.",
        )

    @cached_property
    def epochs(self) -> dict[str, list[EpochRow]]:
        """The epochs of each record that trained several; read once."""
        return read_beside(self.path, EpochRow)

    @cached_property
    def work(self) -> dict[str, list[WorkRow]]:
        """The work of a step, by record; read once."""
        return read_beside(self.path, WorkRow)

    @cached_property
    def ranks(self) -> dict[str, list[RankRow]]:
        """The processes of each record that several trained, by record; read once."""
        return read_beside(self.path, RankRow)


def read_sweep(path: Path, name: str = "") -> SweepFolder:
    """Read a sweep from its folder, from those of its shards, or from a records file. Raises
    UsageError: there are no records, or they cannot be read."""
    files = find_records(path)
    configs = [read_config(file.parent) if file.name == RECORDS else {} for file in files]
    config = configs[0]
    command = config.get("command")
    step, margin = read_goal(config["search"]) if "search" in config else (None, FREE_MARGIN)
    return SweepFolder(
        name or _name(path),
        path.parent if path.name == RECORDS else path,
        read_rows(path),
        command if isinstance(command, str) else "",
        step,
        margin,
        read_halving(config["halving"]) if "halving" in config else None,
        [*map(PlannedRuns.of, configs)],
        config.get("preset") == ADVICE,
    )


def read_sweeps(
    paths: Sequence[Path], leave_out: Callable[[UsageError], object] | None = None
) -> list[SweepFolder]:
    """Read several sweeps; those with equal folder names get their parents' names too. Several
    shards in a folder are read as one sweep, with all that are there. Errors go to ``leave_out``,
    if given, and their sweeps are skipped. Raises UsageError: as `read_sweep`."""
    paths = [path.resolve() for path in paths]
    shards = {path for path in paths if SHARD in read_config(path)}
    parents = Counter(path.parent for path in shards if not (path.parent / RECORDS).is_file())
    paths = [path.parent if parents[path.parent] > 1 else path for path in paths]
    paths = list(dict.fromkeys(paths))
    names = [_name(path) for path in paths]
    sweeps = []
    for path, name in zip(paths, names, strict=True):
        try:
            unique = name if names.count(name) == 1 else f"{path.parent.name}/{name}"
            sweeps.append(read_sweep(path, unique))
        except UsageError as error:
            if leave_out is None:
                raise
            leave_out(error)
    return sweeps


def _name(path: Path) -> str:
    path = path.resolve()
    return (path.parent if path.name == RECORDS else path).name.removesuffix(".csv")
