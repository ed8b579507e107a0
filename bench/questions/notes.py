"""Notes below a table: outcomes, hardware, dataset, epoch, memory, spread and seeds."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from bench.axis import Trait
from bench.case import AXES, Case, list_affecting
from bench.data.sources import FOLDERS
from bench.interval import CONFIDENCE
from bench.origin import LABELS
from bench.record import Status
from bench.render.cells import iterate, name_case, outcome, take_first
from bench.render.units import describe_units
from bench.study import summaries
from bench.study.axes import ORDER, Machines, list_naming_axes
from bench.study.quantities import MEMORY, is_number
from bench.study.spread import Spread
from bench.text import ESTIMATE, GIB, name_first, write_range
from bench.workloads import OWN

if TYPE_CHECKING:
    import pandas as pd

ENVIRONMENT = {
    "gpu_memory_bytes": "GPU memory",
    "gpu_uuid": "GPU UUID",
    "capability": "compute capability",
    "driver": "driver",
    "cpu": "CPU",
    "torch": "torch",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
    "python": "Python",
    "os": "operating system",
    "host": "host",
    "bench": "harness",
    "commit": "commit",
    "dataset_source": "dataset layout",
    "dataset_fingerprint": "dataset fingerprint",
    "flags": "flags",
}
"""Columns of records that say what ran them, and their labels."""


def describe_subject(
    title: str, cases: pd.DataFrame, varying: Collection[str], machines: Machines
) -> str:
    """Return one line on what was measured: the sweep, what ran it, what all cases share."""
    if not len(cases):
        return title
    part, versions = _name_part(cases), name_values(cases, "torch", 2)
    said = (
        name_first(list(dict.fromkeys(machines.values())), 2),
        *_name_kinds(cases),
        part and f"{'whole epochs, ' * _has_whole(cases)}{ESTIMATE} from {part} of an epoch",
        *_list_same(cases, varying),
        versions and f"torch {versions}",
    )
    return f"{title}: {' · '.join(filter(None, said))}"


def _name_kinds(cases: pd.DataFrame) -> list[str]:
    return [LABELS[kind] for kind in cases["kind"].unique() if kind in LABELS]


def describe_constants(cases: pd.DataFrame, varying: Collection[str]) -> Iterator[str]:
    """Yield a sentence on what all cases have in common, and one on each machine that ran them."""
    if not len(cases):
        return
    if said := _list_same(cases, varying):
        yield f"All cases: {' · '.join(said)}."
    for (_, machine), part in cases.groupby(list(summaries.SOURCE), sort=False):
        yield _describe_machine(str(machine), part)


def _list_same(cases: pd.DataFrame, varying: Collection[str]) -> list[str]:
    """Return the settings that all cases share; of most axes only if they are not the default."""
    first = take_first(cases)
    same = [n for n in ("model", "dataset", "precision", "batch_size") if n not in varying]
    others = [
        name
        for name in ORDER
        if name in AXES
        and name not in (*same, *varying, "loss_scale")
        and getattr(first, name) != getattr(Case, name)
        and cases[name].nunique() == 1
    ]
    scales = "" if "loss_scale" in varying else _name_scales(cases)
    return [said for said in (name_case(first, [*same, *others]), scales) if said]


def _name_scales(cases: pd.DataFrame) -> str:
    pairs = dict.fromkeys(zip(cases["precision"], cases["loss_scale"], strict=True))
    of = " ({})" if len(pairs) > 1 else ""
    names = [f"{scale}{of.format(precision)}" for precision, scale in pairs if scale != ""]
    return f"loss scale {', '.join(names)}" if names else ""


def _describe_machine(machine: str, rows: pd.DataFrame) -> str:
    bytes = rows["gpu_memory_bytes"].dropna()
    size = len(bytes) and (rows["device"] != "cpu").any()
    said = [f"{machine} ({bytes.iloc[0] / GIB:.1f} GiB)" if size else machine]
    for name in ("driver", "torch", "cuda", "cudnn", "device"):
        if values := name_values(rows, name, 4):
            said.append(f"{ENVIRONMENT.get(name, name)} {values}")
    return ", ".join([*said, *_name_kinds(rows)]) + "."


def name_values(rows: pd.DataFrame, name: str, most: int | None = None) -> str:
    """Return the first ``most`` distinct values of a column, in order: ``12.4 or 12.8``."""
    values = [v for v in rows[name].dropna().unique() if v != ""]
    return " or ".join(f"{v:,.0f}" if is_number(v) else str(v) for v in values[:most])


def write_notes(cases: pd.DataFrame, varying: Collection[str]) -> Iterator[str]:
    """Yield what the numbers cannot be read without: why cases failed, and what the epoch, the
    brackets, the data and the memory are of."""
    if not len(cases):
        return
    yield from _outcomes(cases, varying)
    yield " ".join(_dataset_notes(cases))
    yield " ".join(_epoch_notes(cases))
    yield " ".join(_repeats_notes(cases))
    if memory := " ".join(_memory_notes(cases)):
        yield memory


def _outcomes(rows: pd.DataFrame, varying: Collection[str]) -> Iterator[str]:
    told = rows[(rows["reason"] != "") & (rows["status"] != Status.OK.value)]
    # the row says that memory ran out, but not what that was inferred from
    told = told[(told["status"] != Status.OOM.value) | told["inferred"].astype(bool)]
    axes = list_naming_axes(varying)
    lines: dict[str, dict[str, None]] = {}
    for row in iterate(told):
        ended = f"{outcome(row.status, inferred=bool(row.inferred))}: {row.reason}"
        lines.setdefault(ended, {})[name_case(row, axes)] = None
    for ended, cases in list(lines.items())[:8]:
        more = " cases" if len(cases) > 3 else ""
        yield f"{name_first([*cases], 3, '; ')}{more}: {ended}"
    if len(lines) > 8:
        yield f"{len(lines) - 8} more outcomes have reasons; --format csv has a column of them."


def _dataset_notes(rows: pd.DataFrame) -> Iterator[str]:
    unknown = "an unknown number of"
    for (dataset, shape, classes), part in rows.groupby([*list_affecting(Trait.DATA)], sort=False):
        images = name_values(part, "train_images") or unknown
        if dataset == "synthetic":
            shown = f"{shape}, " * bool(shape) + f"{classes} classes, " * bool(classes)
            yield (
                f"Dataset: synthetic, {shown}{images} seeded images that can be learnt; loss and "
                "accuracy say nothing about real images."
            )
        elif dataset != OWN:
            name = {"cifar10": "CIFAR-10"}.get(str(dataset), str(dataset))
            if (part["dataset_source"] == FOLDERS).any():  # any are accepted, unchecked
                counted = name_values(part, "dataset_classes")
                name = f"{counted} class folders".lstrip() + f" (read as --dataset {dataset})"
            yield f"Dataset: {name}, {images} training images."
    for (model, unit), part in rows[rows["dataset"] == OWN].groupby(["model", "unit"], sort=False):
        number = name_values(part, "train_images") or unknown
        yield f"Data: that of {model}, {number} {unit} an epoch."
    if told := describe_units(rows):
        yield told


def _take_timed(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the cases with a time; if there are none, all: interrupted ones measured nothing."""
    timed = cases["epoch_time_s"].notna()
    return cases[timed] if timed.any() else cases


def _name_part(cases: pd.DataFrame) -> str:
    """Return how much of an epoch was measured: ``5 to 20 %``; empty if all epochs were whole."""
    cases = _take_timed(cases)
    parts = cases.loc[cases["part"] < 1, "part"].unique()
    return f"{write_range(parts, lambda part: f'{100 * part:.3g}')} %" if len(parts) else ""


def _has_whole(cases: pd.DataFrame) -> bool:
    return bool((_take_timed(cases)["part"] == 1).any())


def _epoch_notes(rows: pd.DataFrame) -> Iterator[str]:
    part, rows = _name_part(rows), _take_timed(rows)
    if part:
        only = "Of some cases only" if _has_whole(rows) else "Only"
        yield (
            f"{ESTIMATE} {only} {part} of an epoch was measured: figures marked {ESTIMATE} are "
            "extrapolated to a whole epoch."
        )
    elif (rows["kind"] == "published").all():
        yield "Epochs: whole, each the cold first of a process."
    else:
        yield "Epochs: whole, timed warm."
        if rows["epochs"].max() > 1:
            yield (
                "Of cases of several epochs the time is the mean epoch's, and loss and accuracy "
                "are of the last."
            )


def _repeats_notes(rows: pd.DataFrame) -> Iterator[str]:
    rows = rows[rows["epoch_time_s"].notna()]
    if not len(rows):
        yield "Nothing was timed."
    for kind, part in rows.groupby("spread", sort=False):
        runs = f"{write_range(part['repeats'])} runs"
        if kind == Spread.NONE:
            yield (
                "Single runs: their spread is unknown."
                if len(part) == len(rows)
                else "Rows with a single number are single runs."
            )
        elif kind == Spread.WITHIN:
            yield (
                f"Single runs; in brackets the {100 * CONFIDENCE:.0f} % interval of the epoch, "
                "within this run, from its own steps, and not narrower than --until. It does not "
                "predict the next run; --repeats 5 does."
            )
        elif kind == Spread.RANGE:
            yield f"Medians of {runs}; in parentheses the lowest and the highest of them."
        else:
            share = write_range(part["coverage"], lambda share: str(math.floor(100 * share)))
            yield (
                f"Medians of {runs}; in parentheses a prediction interval: the median of as many "
                f"more runs under the same conditions falls inside it in {share} of 100 cases, "
                "whatever the distribution of times."
            )


def _memory_notes(rows: pd.DataFrame) -> Iterator[str]:
    rows = rows[rows["memory_bytes"].notna()]
    said = {}
    measures = rows[["device", "kind", "memory_measure"]].drop_duplicates()
    for device, kind, name in measures.itertuples(index=False):
        if device == "cpu":
            said[device] = "Memory: peak of the process, on a CPU."
        elif kind == "published":
            said[kind] = "Memory: as published, not over a baseline."
        else:
            said[str(name)] = f"Memory: peak of {MEMORY[str(name)]}."
    yield from said.values()
