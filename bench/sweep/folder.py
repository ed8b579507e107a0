"""The results folder of a sweep: whether its rows can be compared with new ones, its configuration,
the folders of its checkpoints, and what its cases share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from bench.base.errors import UsageError
from bench.base.text import clean, name_first, replace_file
from bench.results.store.reader import read_config
from bench.results.store.rows import SHARD, SOURCES, Row, Shard
from bench.results.store.table import BEST, LAST
from bench.results.store.writer import Store
from bench.results.study.comparable import list_unlike
from bench.schema.axis import Trait
from bench.schema.case import (
    AXES,
    Case,
    count_probed,
    format_value,
    list_affecting,
    micro_batch,
    spell_cases,
)
from bench.schema.precision import PRECISIONS
from bench.schema.record import (
    COMPARABLE,
    MEASURED,
    MODEL_PARTS,
    PROVEN,
    Environment,
    KnownResults,
    Record,
    Status,
    WorkRow,
    read_missing,
)
from bench.schema.work import add_items
from bench.sweep.inputs import Inputs, name_data
from bench.sweep.options import Options
from bench.workers.fingerprint import name_source

# Keys that stay whatever is measured next: the ``step`` and ``margin`` of the last search for the
# largest batch, the shard, the rules and trials of a search for the best settings, and the files of
# what was trained.
_KEPT = ("search", SHARD, "halving", SOURCES)


def refuse_mixing(out: Path, differing: Collection[str]) -> None:
    """Refuse rows that differ, see `find_unlike`."""
    if differing:
        raise UsageError(
            f"--out {out}: has rows that would not be comparable: {'; '.join(differing)}; "
            "choose another --out, or add to them with --mix"
        )


def find_unlike(
    rows: Sequence[Row], inputs: Inputs, cases: Sequence[Case], columns: Iterable[str] = COMPARABLE
) -> tuple[set[int], Collection[str]]:
    """Return the ids of the rows that those of ``cases`` cannot be compared with, and how ``rows``
    differ in these ``columns``, one line for each value; of devices that are known here."""
    unlike, differing = set[int](), dict[str, None]()
    known = [case for case in cases if case.device in inputs.platforms]
    # one case of each environment
    each = {(name_data(c), c.device, name_source(c), c.model, c.start): c for c in known}
    for case in each.values():
        environment = inputs.describe(case)
        examined = case.command is not None or inputs.find_model(case) is not None
        asked = [name for name in columns if examined or name not in MODEL_PARTS]
        for name, now, others in list_unlike(rows, case, environment, asked):
            unlike.update(map(id, others))
            for before in dict.fromkeys(getattr(row, name) for row in others):
                differing[_describe_difference(name, before, now, inputs, case)] = None
    return unlike, differing.keys()


def _describe_difference(name: str, before: str, now: str, inputs: Inputs, case: Case) -> str:
    if name == "model_source":
        changed = inputs.versions.list_changed(case, before)
        if changed:
            return f"{name_first(changed, 4)} changed since: {name} was {before}"
    return f"{name} was {before or 'none'}, now {now or 'none'}"


def refuse_other_part(out: Path, config: Mapping[str, Any], shard: Shard | None) -> None:
    """Refuse a folder whose configuration names another part of a sweep."""
    there, now = str(config.get(SHARD, "")), str(shard or "")
    if config and there != now:
        content = f"shard {there}" if there else "a sweep that is not split into shards"
        fix = "choose a folder for each shard" if now else "choose another folder"
        raise UsageError(f"--out {out}: holds {content}; {fix}")


def write_config(
    store: Store,
    inputs: Inputs,
    options: Options,
    cases: Sequence[Case] | None = None,
    **keys: Any,
) -> None:
    """Write the configuration of a folder: commands, cases, environments, datasets, and the keys of
    `_KEPT` that are among ``keys`` or were there. Without ``cases``, because a command chooses them
    as it goes, the cases already there stay."""
    before = read_config(store.folder)
    earlier = str(before.get("command", "")).splitlines()
    commands = [command for command in earlier if command != options.invocation]
    planned = {"repeats": options.repeats, **spell_cases(cases or [])}
    if cases is None:
        planned |= {name: before[name] for name in planned if name in before}
    kept = before | {SOURCES: inputs.versions.sources} | keys
    if options.shard:
        kept[SHARD] = str(options.shard)
    config = {
        "command": "\n".join([*commands, options.invocation]),
        "preset": options.preset.name,
        **planned,
        "environment": {
            device: {
                name: one for name, one in asdict(platform.environment).items() if one is not None
            }
            for device, platform in inputs.platforms.items()
        },
        "datasets": {
            name: {k: v for k, v in asdict(info).items() if k != "folder"}
            for name, info in inputs.datasets.items()
        },
        **{name: kept[name] for name in _KEPT if kept.get(name)},
    }
    if config != before:
        store.write_config(config)


# -------------------------------------------------------------------------------------- checkpoints


_ENDED = "record_id"
"""A file beside the checkpoints of a run that has its row, with the row's ``record_id``. Without
it, the checkpoints are of an interrupted run, and are resumed."""


@dataclass(frozen=True)
class KeptRun:
    """A run that may keep checkpoints in ``folder``, which the worker makes; ``run_name`` is its
    repeat, or marks the drift check."""

    folder: Path
    run_name: str

    def open(self) -> None:
        """Remove the files of a run that has ended, so that it starts anew."""
        if (self.folder / _ENDED).exists():
            with suppress(OSError):
                for name in (LAST, BEST, _ENDED):
                    (self.folder / name).unlink(missing_ok=True)

    def identify(self, case: Case, environment: Environment) -> dict[str, str]:
        """Return what a checkpoint must agree on to be resumed, so that rows stay comparable."""
        return {
            **{name: format_value(getattr(case, name)) for name in AXES},
            "run": self.run_name,
            **{name: clean(getattr(environment, name) or "") for name in COMPARABLE},
        }

    def finish(self, record: Record) -> None:
        """Mark the run as ended if its record has a measurement."""
        with suppress(OSError):
            if record.status in MEASURED and self.folder.is_dir():
                replace_file(self.folder / _ENDED, record.record_id + "\n")
            self.folder.parent.rmdir()  # if no run keeps anything


# ----------------------------------------------------------------------------- what cases share


SHARED: dict[str, tuple[str, ...]] = {
    str(Trait.PROOF): (*PROVEN, "proof_notes", "flags"),
    str(Trait.FLOP): ("flop_per_image",),
    str(Trait.WORK): (),
}
"""What later cases take from a row instead of finding it again, with the columns of each part: the
proof of a precision, FLOP per image, and the work of a step, which is linear in the items of a
micro-batch."""

# Columns of these parts that are not empty in a record that found them.
_FOUND = {"arithmetic", "conv_error", "matmul_error", "flop_per_image"}

# Columns of an environment that every part is assumed to depend on.
_MACHINE = (*COMPARABLE, "gpu_uuid", "torch_threads", "train_images")


@dataclass(frozen=True)
class _Found:
    """A record that found some parts: the columns of all parts, the reasons of empty ones, and the
    counted work of its step."""

    record_id: str
    case: Case
    values: Mapping[str, Any]
    missing: Mapping[str, str]
    work: Sequence[WorkRow]


_PART_COLUMNS = tuple(dict.fromkeys(chain.from_iterable(SHARED.values())))


class Known:
    """What a folder's cases found so far, which later ones need not find again."""

    def __init__(self) -> None:
        # the first record with a part, by all that the part depends on
        self._found: dict[tuple[Any, ...], _Found] = {}

    def recall(self, case: Case, environment: Environment) -> KnownResults:
        """Return what earlier cases found that this one need not find again."""
        known, items = KnownResults(), micro_batch(case)
        for part, names in SHARED.items():
            first = self._found.get(_make_key(part, case, environment))
            # a model that was not examined may be another one; one item is not counted
            if not (first and environment.model_parameters) or (part == Trait.WORK and items == 1):
                continue
            known.sources[part] = first.record_id
            known.values.update((name, first.values[name]) for name in names)
            known.missing.update((n, first.missing[n]) for n in names if n in first.missing)
            if part == Trait.WORK:
                more = items - micro_batch(first.case)
                untimed = (
                    replace(w, time_s=None, exclusive_s=None, kernels="") for w in first.work
                )
                known.work.extend(add_items(row, more) for row in untimed)
        return known

    def learn(self, record: Record, work: Sequence[WorkRow]) -> None:
        """Keep the parts that a case found itself; the first record with a key counts."""
        if record.status is Status.OK:
            self._keep(record.record_id, record.case, record.environment, record.measurement, work)

    def read(self, rows: Iterable[Row], work: Mapping[str, Sequence[WorkRow]]) -> None:
        """Keep the parts that the rows of a folder found, with their ``work`` by record."""
        for row in rows:
            if row.status is Status.OK:
                self._keep(row.record_id, row.case, row, row, work.get(row.record_id, ()))

    def _keep(
        self, record_id: str, case: Case, machine: Any, m: Any, work: Sequence[WorkRow]
    ) -> None:
        """Keep what one has found whose columns ``machine`` and ``m`` have."""
        values = {name: _read(m, name) for name in _PART_COLUMNS}
        missing = read_missing(_read(m, "missing") or "")
        taken = read_missing(_read(m, "shared") or "", SHARED)
        counted = [row for row in work if row.bytes is not None]  # the others were only timed
        whole = bool(counted) and all(row.bytes_per_item is not None for row in counted)
        found = _Found(record_id, case, values, missing, counted)
        for part, names in SHARED.items():
            lacks = any(values[name] is None for name in _FOUND & {*names})
            if part not in taken and not lacks and (part != Trait.WORK or whole):
                self._found.setdefault(_make_key(part, case, machine), found)


def _read(owner: Any, name: str) -> Any:
    """Return a column of a record or of a row, None where it is empty."""
    value = getattr(owner, name)
    return None if value == "" or value != value else value


def _make_key(part: str, case: Case, machine: Any) -> tuple[Any, ...]:
    axes = {name: getattr(case, name) for name in list_affecting(Trait(part))}
    if part == Trait.PROOF:
        axes["images"] = count_probed(case)
    if part == Trait.WORK and isinstance(case.loss_scale, float):
        axes["loss_scale"] = "static"
    if part != Trait.FLOP and PRECISIONS[case.precision].float8:
        # which of its layers are converted depends on the sizes of all micro-batches
        axes |= {"batch_size": case.batch_size, "accumulate": case.accumulate}
    about = (_read(machine, name) for name in _MACHINE)
    # a row has the text of a cell
    return (part, *axes.values(), *(clean(one) if isinstance(one, str) else one for one in about))
