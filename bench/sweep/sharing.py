"""Results in the rows of a folder that later cases reuse, instead of finding them again.

Three parts are shared, each among cases that agree on everything it depends on: the proof of a
precision, FLOP per image, and the work of a step, which is linear in the items of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.axis import Trait
from bench.case import Case, count_probed, format_value, list_affecting, micro_batch
from bench.errors import UsageError
from bench.origin import find_origin
from bench.precision import PRECISIONS
from bench.record import (
    COMPARABLE,
    PROVEN,
    Environment,
    KnownResults,
    Record,
    Status,
    WorkRow,
    flatten,
    read_missing,
    read_sources,
)
from bench.store.cells import RECORDS
from bench.store.reader import list_work, read_records, read_work
from bench.store.runs import read_cases
from bench.text import clean
from bench.work import add_items

PROOF, FLOP, WORK = map(str, (Trait.PROOF, Trait.FLOP, Trait.WORK))

_SIZES = ("batch_size", "accumulate")  # see `_make_key`

_AXES = {part: list_affecting(Trait(part)) for part in (PROOF, WORK, FLOP)}
"""The axes that each part depends on."""

_MACHINE = (*COMPARABLE, "gpu_uuid", "torch_threads", "train_images")
"""Columns of an environment that every part is assumed to depend on."""

_COLUMNS = {PROOF: (*PROVEN, "proof_notes", "flags"), FLOP: ("flop_per_image",), WORK: ()}
"""The columns of each part."""

_NEEDED = {PROOF: ("arithmetic", "conv_error", "matmul_error"), FLOP: ("flop_per_image",), WORK: ()}
"""Columns of a part that are not empty in a row that found it."""

_Key = tuple[str, ...]


@dataclass(frozen=True)
class _Found:
    """A part as a record found it; ``items`` is the number of items in its micro-batch."""

    record_id: str
    values: dict[str, Any]
    missing: dict[str, str]
    items: int
    work: list[WorkRow]


class Sharing:
    """Shareable results in one folder's records, earlier ones included; read on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[_Key, _Found] | None = None

    def recall(self, case: Case, environment: Environment) -> KnownResults:
        """Return what is known about a case that is to run in ``environment``."""
        known, columns = KnownResults(), asdict(environment)
        if not environment.model_parameters:  # not examined, so it may be another model
            return known
        for part in _COLUMNS:
            found = self._recall().get(_make_key(part, case, columns))
            if found is None or (part == WORK and micro_batch(case) == 1):  # not counted for 1
                continue
            more = micro_batch(case) - found.items
            known.work.extend(add_items(row, more) for row in found.work)
            known.sources[part] = found.record_id
            known.values.update(found.values)
            known.missing.update(found.missing)
        return known

    def learn(self, record: Record, work: Sequence[WorkRow]) -> None:
        self._learn(self._recall(), record.case, flatten(record), lambda: work)

    def _recall(self) -> dict[_Key, _Found]:
        if self._found is None:
            self._found = {}
            if (self._folder / RECORDS).is_file():
                with suppress(UsageError):  # an unreadable file counts as empty
                    self._read(self._found)
        return self._found

    def _read(self, found: dict[_Key, _Found]) -> None:
        frame = read_records(self._folder)
        frame = frame[frame["status"] == str(Status.OK)]
        table = read_work(self._folder)
        parts = dict(iter(table.groupby("record_id", sort=False)))
        for case, row in zip(read_cases(frame), frame.to_dict("records"), strict=True):
            cells = {str(name): _empty(value) for name, value in row.items()}
            part = parts.get(cells["record_id"], table[:0])
            self._learn(found, case, cells, partial(list_work, part))

    @staticmethod
    def _learn(
        found: dict[_Key, _Found],
        case: Case,
        cells: Mapping[str, Any],
        work: Callable[[], Sequence[WorkRow]],
    ) -> None:
        """Keep the parts that a row found itself; the first row with a key counts."""
        if cells["status"] != Status.OK or find_origin(cells["executor"]) != "measured":
            return
        given, reasons = read_sources(cells["shared"] or ""), read_missing(cells["missing"] or "")
        for part, names in _COLUMNS.items():
            if part in given or (key := _make_key(part, case, cells)) in found:
                continue
            rows = _find_line(work()) if part == WORK else []
            if any(cells[name] is None for name in _NEEDED[part]) or (part == WORK and not rows):
                continue
            values = {name: cells[name] for name in names}
            missing = {name: why for name, why in reasons.items() if name in names}
            found[key] = _Found(cells["record_id"], values, missing, micro_batch(case), rows)


def _make_key(part: str, case: Case, machine: Mapping[str, Any]) -> _Key:
    """Return the key of a part: what it depends on. Cases with the same key share the part."""
    axes = {name: getattr(case, name) for name in _AXES[part]}
    if part == PROOF:
        axes["images"] = count_probed(case)
    if part == WORK and isinstance(case.loss_scale, float):
        axes["loss_scale"] = "static"
    if part != FLOP and PRECISIONS[case.precision].float8:
        # which of its layers are converted depends on the sizes of all micro-batches
        axes |= {name: getattr(case, name) for name in _SIZES}
    cells = map(format_value, axes.values())
    return (part, *cells, *(_spell(machine[name]) for name in _MACHINE))


def _spell(value: Any) -> str:
    return format_value(clean(value) if isinstance(value, str) else value)


def _empty(cell: Any) -> Any:
    """Convert a cell of a table to its value in a record: None if it is empty."""
    return None if cell == "" or cell != cell else cell


def _find_line(rows: Sequence[WorkRow]) -> list[WorkRow]:
    """Return the counted rows if they tell the work of micro-batches of any size, else nothing."""
    counted = [
        replace(row, time_s=None, exclusive_s=None, kernels="")
        for row in rows
        if row.bytes is not None  # others were only timed
    ]
    return counted if all(row.bytes_per_item is not None for row in counted) else []
