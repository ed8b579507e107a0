"""What the numbers of a report cannot be read without: hardware, data, epoch and spread."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

from bench.axis import Trait
from bench.case import AXES, Case, list_affecting
from bench.interval import CONFIDENCE
from bench.origin import LABELS
from bench.record import Status
from bench.render.section import Column, Section, Sheet
from bench.render.table import NOTHING, describe_units, name_case, outcome
from bench.store.rows import group
from bench.study.axes import ORDER, Machines, list_naming_axes
from bench.study.quantities import MEMORY, is_number
from bench.study.runs import SOURCE, Result, Spread
from bench.text import ESTIMATE, GIB, name_first, write_range
from bench.workloads import OWN

if TYPE_CHECKING:
    from bench.questions.report_data import ReportData

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

Results = Sequence[Result]


def describe_subject(
    title: str, cases: Results, varying: Collection[str], machines: Machines
) -> str:
    """Return one line on what was measured: the sweep, what ran it, what all cases share."""
    if not cases:
        return title
    part, versions = _name_part(cases), name_values(cases, "torch", 2)
    whole = any(case.part == 1 for case in _take_timed(cases))
    said = (
        name_first(list(dict.fromkeys(machines.values())), 2),
        *_name_kinds(cases),
        part and f"{'whole epochs, ' * whole}{ESTIMATE} from {part} of an epoch",
        *_list_same(cases, varying),
        versions and f"torch {versions}",
    )
    return f"{title}: {' · '.join(filter(None, said))}"


def _name_kinds(cases: Results) -> list[str]:
    return [LABELS[kind] for kind in dict.fromkeys(c.kind for c in cases) if kind in LABELS]


def describe_constants(cases: Results, varying: Collection[str]) -> Iterator[str]:
    """Yield a sentence on what all cases have in common, and one on each machine that ran them."""
    if not cases:
        return
    if said := _list_same(cases, varying):
        yield f"All cases: {' · '.join(said)}."
    for part in group(cases, attrgetter(*SOURCE)):
        yield _describe_machine(part)


def _list_same(cases: Results, varying: Collection[str]) -> list[str]:
    """Return the settings that all cases share; of most axes only if they are not the default."""
    first = cases[0]
    same = [n for n in ("model", "dataset", "precision", "batch_size") if n not in varying]
    others = [
        name
        for name in ORDER
        if name in AXES
        and name not in (*same, *varying, "loss_scale", "command")
        and getattr(first, name) != getattr(Case, name)
        and len({getattr(case, name) for case in cases}) == 1
    ]
    scales = "" if "loss_scale" in varying else _name_scales(cases)
    return [said for said in (name_case(first, [*same, *others]), scales) if said]


def _name_scales(cases: Results) -> str:
    pairs = dict.fromkeys((case.precision, case.loss_scale) for case in cases)
    of = " ({})" if len(pairs) > 1 else ""
    names = [f"{scale}{of.format(precision)}" for precision, scale in pairs if scale != ""]
    return f"loss scale {', '.join(names)}" if names else ""


def _describe_machine(cases: Results) -> str:
    machine = cases[0].machine
    bytes = [case.gpu_memory_bytes for case in cases if is_number(case.gpu_memory_bytes)]
    size = bytes and any(case.device != "cpu" for case in cases)
    said = [f"{machine} ({bytes[0] / GIB:.1f} GiB)" if size else machine]
    for name in ("driver", "torch", "cuda", "cudnn", "device"):
        if values := name_values(cases, name, 4):
            said.append(f"{ENVIRONMENT.get(name, name)} {values}")
    return ", ".join([*said, *_name_kinds(cases)]) + "."


def name_values(cases: Results, name: str, most: int | None = None) -> str:
    """Return the first ``most`` distinct values of a column, in order: ``12.4 or 12.8``."""
    values = dict.fromkeys(getattr(case, name) for case in cases)
    known = [value for value in values if value == value and value != ""]
    return " or ".join(f"{v:,.0f}" if is_number(v) else str(v) for v in known[:most])


def write_notes(cases: Results, varying: Collection[str]) -> Iterator[str]:
    """Yield why cases failed, and what the epoch, the brackets, the data and the memory are of."""
    if not cases:
        return
    yield from _outcomes(cases, varying)
    notes = (_dataset_notes(cases), _epoch_notes(cases), _repeats_notes(cases))
    yield from (" ".join(told) for told in notes)
    if memory := " ".join(_memory_notes(cases)):
        yield memory


def _outcomes(cases: Results, varying: Collection[str]) -> Iterator[str]:
    axes = list_naming_axes(varying)
    lines: dict[str, dict[str, None]] = {}
    for row in (case for case in cases if case.reason and case.status != Status.OK):
        # the row says that memory ran out, but not what that was inferred from
        if row.status != Status.OOM or row.inferred:
            ended = f"{outcome(row.status, inferred=bool(row.inferred))}: {row.reason}"
            lines.setdefault(ended, {})[name_case(row, axes)] = None
    for ended, named in list(lines.items())[:8]:
        more = " cases" if len(named) > 3 else ""
        yield f"{name_first([*named], 3, '; ')}{more}: {ended}"
    if len(lines) > 8:
        yield f"{len(lines) - 8} more outcomes have reasons; --format csv has a column of them."


def _dataset_notes(cases: Results) -> Iterator[str]:
    unknown = "an unknown number of"
    for part in group(cases, attrgetter(*list_affecting(Trait.DATA))):
        dataset, shape, classes = (getattr(part[0], n) for n in list_affecting(Trait.DATA))
        images = name_values(part, "train_images") or unknown
        if dataset == "synthetic":
            shown = f"{shape}, " * bool(shape) + f"{classes} classes, " * bool(classes)
            yield (
                f"Dataset: synthetic, {shown}{images} seeded images that can be learnt; loss and "
                "accuracy say nothing about real images."
            )
        elif dataset != OWN:
            name = {"cifar10": "CIFAR-10"}.get(str(dataset), str(dataset))
            yield f"Dataset: {name}, {images} training images."
    own = [case for case in cases if case.dataset == OWN and case.command == ""]
    for part in group(own, attrgetter("model", "unit")):
        number = name_values(part, "train_images") or unknown
        yield f"Data: that of {part[0].model}, {number} {part[0].unit} an epoch."
    if told := describe_units(cases):
        yield told


def _take_timed(cases: Results) -> Results:
    """Return the cases with a time; if there are none, all: interrupted ones measured nothing."""
    return [case for case in cases if is_number(case.epoch_time_s)] or cases


def _name_part(cases: Results) -> str:
    """Return how much of an epoch was measured: ``5 to 20 %``; empty if all epochs were whole."""
    parts = [case.part for case in _take_timed(cases) if case.part < 1]
    return f"{write_range(parts, lambda part: f'{100 * part:.3g}')} %" if parts else ""


def _epoch_notes(cases: Results) -> Iterator[str]:
    part, cases = _name_part(cases), _take_timed(cases)
    if part:
        only = "Of some cases only" if any(case.part == 1 for case in cases) else "Only"
        yield (
            f"{ESTIMATE} {only} {part} of an epoch was measured: figures marked {ESTIMATE} are "
            "extrapolated to a whole epoch."
        )
    elif all(case.kind == "published" for case in cases):
        yield "Epochs: whole, each the cold first of a process."
    else:
        yield "Epochs: whole, timed warm."
        if max(case.epochs for case in cases) > 1:
            yield (
                "Of cases of several epochs the time is the mean epoch's, and loss and accuracy "
                "are of the last; epochs.csv has each."
            )


def _repeats_notes(cases: Results) -> Iterator[str]:
    timed = [case for case in cases if is_number(case.epoch_time_s)]
    if not timed:
        yield "Nothing was timed."
    for part in group(timed, lambda case: case.spread):
        kind, runs = part[0].spread, f"{write_range(case.repeats for case in part)} runs"
        if kind == Spread.NONE:
            yield (
                "Single runs: their spread is unknown."
                if len(part) == len(timed)
                else "Rows with a single number are single runs."
            )
        elif kind == Spread.WITHIN:
            yield (
                f"Single runs; in brackets the {100 * CONFIDENCE:.0f} % interval of the epoch, "
                "within this run, from its own steps, and not narrower than --until. It does not "
                "predict the next run; --repeats 5 does."
            )
        else:
            yield f"Medians of {runs}; in parentheses the lowest and the highest of them."


def _memory_notes(cases: Results) -> Iterator[str]:
    said = {}
    for case in (case for case in cases if is_number(case.memory_bytes)):
        if case.device == "cpu":
            said[case.device] = "Memory: peak of the process, on a CPU."
        elif case.kind == "published":
            said[case.kind] = "Memory: as published, not over a baseline."
        else:
            measure = str(case.memory_measure)
            said[measure] = f"Memory: peak of {MEMORY[measure]}."
    yield from said.values()


def tabulate_environment(found: ReportData) -> Iterator[Sheet]:
    parts = group(found.results, attrgetter(*SOURCE))

    def write(name: str, part: Results) -> str:
        if name == "gpu_memory_bytes":
            sizes = dict.fromkeys(case.gpu_memory_bytes for case in part)
            return " or ".join([f"{b / GIB:.1f} GiB" for b in sizes if is_number(b)][:4])
        return name_values(part, name, 4)

    rows: list[tuple[Any, ...]] = [
        (label, *(write(name, part) or NOTHING for part in parts))
        for name, label in ENVIRONMENT.items()
    ]
    yield Sheet(
        "Environment",
        [
            Column("what", "", "", itemgetter(0), number=False),
            *(Column(f"m{i}", found.machines[part[0].sweep, part[0].machine], "",
                     itemgetter(i + 1), number=False)
              for i, part in enumerate(parts)),
        ],
        [row for row in rows if any(said != NOTHING for said in row[1:])],
        empty=(),
    )  # fmt: skip


MACHINES = Section("environment", "What ran the cases?", tabulate_environment)
