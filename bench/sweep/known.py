"""What earlier rows of a folder found, which later cases need not find again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
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
)
from bench.store.reader import read_beside, read_rows
from bench.text import clean
from bench.work import add_items

SHARED: dict[str, tuple[str, ...]] = {
    str(Trait.PROOF): (*PROVEN, "proof_notes", "flags"),
    str(Trait.FLOP): ("flop_per_image",),
    str(Trait.WORK): (),
}
"""What later cases take from a row instead of finding it again, with the columns of each part: the
proof of a precision, FLOP per image, and the work of a step, which is linear in the items of a
micro-batch."""

_FOUND = {"arithmetic", "conv_error", "matmul_error", "flop_per_image"}
"""Columns of these parts that are not empty in a row that found them."""

_MACHINE = (*COMPARABLE, "gpu_uuid", "torch_threads", "train_images")
"""Columns of an environment that every part is assumed to depend on."""

Found = dict[tuple[str, ...], tuple[Mapping[str, Any], int, list[WorkRow]]]
"""By part and all that it depends on: the cells of the first row that found it, the items in its
micro-batch, and its work."""


def _make_key(part: str, case: Case, machine: Mapping[str, Any]) -> tuple[str, ...]:
    axes = {name: getattr(case, name) for name in list_affecting(Trait(part))}
    if part == Trait.PROOF:
        axes["images"] = count_probed(case)
    if part == Trait.WORK and isinstance(case.loss_scale, float):
        axes["loss_scale"] = "static"
    if part != Trait.FLOP and PRECISIONS[case.precision].float8:
        # which of its layers are converted depends on the sizes of all micro-batches
        axes |= {"batch_size": case.batch_size, "accumulate": case.accumulate}
    values = [*axes.values(), *(machine[name] for name in _MACHINE)]
    return (part, *(format_value(clean(v) if isinstance(v, str) else v) for v in values))


def _learn(found: Found, case: Case, cells: Mapping[str, Any], work: Sequence[WorkRow]) -> None:
    """Keep the parts that a row found itself; the first row with a key counts."""
    if cells["status"] != Status.OK or find_origin(cells["executor"]) != "measured":
        return
    taken = read_missing(cells["shared"] or "", SHARED)
    for part, names in SHARED.items():
        key = _make_key(part, case, cells)
        if part in taken or key in found or any(cells[name] is None for name in _FOUND & {*names}):
            continue
        # rows without bytes were only timed
        rows = [row for row in work if row.bytes is not None] if part == Trait.WORK else []
        if part != Trait.WORK or (rows and all(row.bytes_per_item is not None for row in rows)):
            found[key] = cells, micro_batch(case), rows


class Known:
    """What the rows of a folder found, earlier ones included, which are read on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def recall(self, case: Case, environment: Environment) -> KnownResults:
        """Return what earlier rows of the folder found that a case need not find again."""
        known, items = KnownResults(), micro_batch(case)
        for part, names in SHARED.items():
            first = self._found.get(_make_key(part, case, vars(environment)))
            # a model that was not examined may be another one; one item is not counted
            if not (first and environment.model_parameters) or (part == Trait.WORK and items == 1):
                continue
            cells, there, rows = first
            missing = read_missing(cells["missing"] or "")
            known.sources[part] = cells["record_id"]
            known.values.update((name, cells[name]) for name in names)
            known.missing.update((name, missing[name]) for name in names if name in missing)
            untimed = (replace(row, time_s=None, exclusive_s=None, kernels="") for row in rows)
            known.work.extend(add_items(row, items - there) for row in untimed)
        return known

    def learn(self, record: Record, work: Sequence[WorkRow]) -> None:
        _learn(self._found, record.case, flatten(record), work)

    @cached_property
    def _found(self) -> Found:
        """What the rows of the folder found, earlier ones included; read on first use."""
        found: Found = {}
        with suppress(UsageError):  # an unreadable file counts as empty
            rows, work = read_rows(self._folder), read_beside(self._folder, WorkRow)
            for row in rows:
                if row.status is Status.OK:
                    cells = {
                        name: None if v == "" or v != v else v for name, v in vars(row).items()
                    }
                    _learn(found, row.case, cells, work.get(row.record_id, ()))
        return found
