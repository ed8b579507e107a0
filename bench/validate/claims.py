"""What a results folder claims, and whether its contents, read once for all claims, bear it out;
and what it discloses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.case import Case, list_varying
from bench.diagnosis.step import RATES
from bench.environment.host import hash_commit
from bench.errors import UsageError
from bench.gpu.peaks import list_peaks
from bench.limits import leave_out_first
from bench.origin import EXECUTORS
from bench.precision import Arithmetic, find_formats
from bench.record import COMPARABLE, MEASURED, Status, Step, WorkRow
from bench.store.reader import read_beside
from bench.store.rows import group
from bench.study.runs import Run, list_runs
from bench.study.sweeps import Sweep, read_sweep
from bench.text import count, name_first
from bench.workloads import IMAGES

KNOWN_FAULTS = "known-faults.txt"


@dataclass(frozen=True)
class Row:
    """A measured row: its name within the folder, its run, and its rows of the ``steps`` and
    ``work`` tables. Its cells are given by column, None for empty numbers."""

    name: str
    run: Run
    steps: Sequence[Step]
    work: Sequence[WorkRow]

    @property
    def case(self) -> Case:
        return self.run.case

    def __getitem__(self, column: str) -> Any:
        value = getattr(self.run, column)
        return None if value != value else value

    def has(self, *columns: str) -> bool:
        return all(self[column] is not None for column in columns)


@dataclass(frozen=True)
class Evidence:
    """The tables and plans of a folder, and its records as they are written."""

    sweep: Sweep
    runs: list[Run]
    steps: dict[str, list[Step]]

    @cached_property
    def own(self) -> list[Run]:
        """The records that this harness measured. Others, such as published ones, are read but make
        no claim about how they were measured."""
        return [run for run in self.runs if run.executor in EXECUTORS]

    @cached_property
    def rows(self) -> list[Row]:
        """The own rows whose status says that they were measured, without inferred ones."""
        axes, rows = list_varying([run.case for run in self.runs]), []
        for run in self.own:
            if run.status in MEASURED and not run.inferred:
                which = f", repeat {run.repeat}" if run.repeat > 1 else ""
                name = f"{run.case.label(axes)}{which}{', sentinel' if run.sentinel else ''}"
                work = self.sweep.work.get(run.record_id, ())
                rows.append(Row(name, run, self.steps.get(run.record_id, ()), work))
        return rows


# ------------------------------------------------------------------------------------------- claims
#
# The claims that the rows of a folder make, and how each is checked.
#
# Bounds are physical (a data sheet, the power limit, the memory of the card) or computed by the
# harness itself from the steps and work stored with the rows. Results that are consistent with all
# of them pass: a folder made up as a whole, or times that were all scaled alike and stay below the
# data sheet.


EXACT = 1e-6
"""Relative tolerance within which two figures of one computation are equal."""

CLOCKS = 5e-3
"""Relative tolerance of the clocks of epoch and steps; committed folders agree within 2.1e-3."""

CIFAR10 = {"dataset_fingerprint": "d519226402145e1e", "train_images": 50_000, "test_images": 10_000}
"""Hash of CIFAR-10's pixels and labels, in any layout, and its numbers of images."""

FLOP_PER_IMAGE: dict[Any, int] = {("dpn92", None, None): 12_250_994_688}
"""FLOP of this harness's networks, by model, --input and --classes; equal everywhere."""


@dataclass(frozen=True)
class Claim:
    """A claim: ``shows`` is true if ``find`` yields nothing. It can only be checked if a row
    measured by this harness has one of the columns in ``of``; without ``of``, always."""

    name: str
    shows: str
    find: Callable[[Evidence], Iterator[str]]
    of: tuple[str, ...] = ()

    def is_empty(self, evidence: Evidence) -> bool:
        held = (row[column] for row in evidence.rows for column in self.of)
        return bool(self.of) and not any(value not in (None, "") for value in held)


def _differ(one: float, other: float, within: float) -> bool:
    return not math.isclose(one, other, rel_tol=within, abs_tol=1e-12)


def _of_rows(find: Callable[[Row], Iterator[str]]) -> Callable[[Evidence], Iterator[str]]:
    """Make a claim about each row by itself; its faults start with the name of the row."""
    return lambda evidence: (f"{row.name}: {fault}" for row in evidence.rows for fault in find(row))


def find_unknown_code(evidence: Evidence) -> Iterator[str]:
    for commit, code in dict.fromkeys((run.commit, run.code) for run in evidence.own):
        name, _, edited = commit.partition("+")
        known = hash_commit(name) if name else None
        if not name:
            yield "rows do not say which commit measured them"
        elif edited:
            yield f"measured by {commit}: the code was edited after that commit"
        elif known and known != code:
            yield f"commit {name} has the code {known}, and the rows {code}"


def find_environments(evidence: Evidence) -> Iterator[str]:
    own = evidence.own

    def list_values(runs: Sequence[Run], column: str) -> list[str]:
        # a row that was cut off before its worker could look has no value
        values = dict.fromkeys(getattr(run, column) for run in runs)
        return [str(value) for value in values if value == value and value != ""]

    for column in (name for name, owners in COMPARABLE.items() if owners == ("device",)):
        for runs in sorted(group(own, attrgetter("device")), key=lambda runs: runs[0].device):
            if len(found := list_values(runs, column)) > 1:
                told = name_first(found, 3)
                yield f"{column} is not the same in all rows of {runs[0].device}: {told}"


def find_gaps(evidence: Evidence) -> Iterator[str]:
    return (f"{told} {mend}" for told, mend in evidence.sweep.gaps)


def find_wrong_rates(row: Row) -> Iterator[str]:
    for column, peak in list_peaks(row["gpu"]).items():
        if column in RATES and row.has(column) and row[column] > peak:
            yield f"{column} is {row[column]:.4g}, and the card's data sheet says {peak:.4g}"


def find_wrong_speed(row: Row) -> Iterator[str]:
    flops, moved = row.run.of_peaks, row.run.of_bandwidth
    if flops > 1:
        yield f"{flops:.3g} times the FLOP/s that {row['gpu']} does"
    if moved > 1 and row.case.compile == Case.compile:
        yield f"{moved:.3g} times the bytes/s of {row['gpu']}'s memory"


def find_wrong_energy(row: Row) -> Iterator[str]:
    if not row.has("energy_j", "measured_time_s"):
        return
    power_w = row["energy_j"] / row["measured_time_s"]
    # readings are up to 23 ms before and after an epoch of an H200, and 0.6 % of one of an H100
    share = max(0.01, 0.05 / row["measured_time_s"])
    if row.has("mean_power_w") and _differ(power_w, row["mean_power_w"], share):
        mean_w = row["mean_power_w"]
        yield f"its energy over its time is {power_w:.4g} W, its mean power {mean_w:.4g} W"
    limit_w = (row["power_limit_w"] or math.inf) * row.case.world_size
    if power_w > 1.05 * limit_w:  # cards regulate with a delay; an H100 stayed below it
        yield f"{power_w:.0f} W on average, and the limit was {limit_w:.0f} W"


def find_wrong_memory(row: Row) -> Iterator[str]:
    parts = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_process_bytes")
    inside = [(part, row[part]) for part in parts if row.has(part)]
    if row["device"] == "cuda":
        inside += [("gpu_memory_bytes", row["gpu_memory_bytes"] or math.inf)]
        for (small, few), (large, many) in pairwise(inside):
            if few > many:
                yield f"{small} is {few:.4g}, more than {large}, {many:.4g}"
    in_use = (row["peak_device_bytes"] or 0) + (row["baseline_device_bytes"] or 0)
    if in_use > (row["gpu_memory_bytes"] or math.inf):
        yield f"{in_use:.4g} bytes of the device were in use, more than it has"


def find_wrong_steps(row: Row) -> Iterator[str]:
    steps = row.steps
    if not len(steps):
        if row.has("measured_steps"):
            yield "steps.csv has none of its steps"
        return
    times, images = _list_times(row), sum(step.images for step in steps)
    if len(steps) != row["measured_steps"] or images != row["measured_images"]:
        yield (
            f"steps.csv has {len(steps)} steps of {images} images, the row {row['measured_steps']} "
            f"of {row['measured_images']}"
        )
    elif not adds_up(times, row["measured_time_s"], row.case.epochs):
        yield f"its steps take {sum(times):.4g} s, and together {row['measured_time_s']:.4g} s"
    if row.has("step_time_median_s") and _differ(row["step_time_median_s"], median(times), EXACT):
        yield f"step_time_median_s is {row['step_time_median_s']:.4g}, not {median(times):.4g}"


def _list_times(row: Row) -> list[float]:
    return [step.time_s or 0.0 for step in row.steps]


def adds_up(times: Sequence[float], measured_s: float, epochs: int = 1) -> bool:
    """Return whether epochs of these steps may take so long together: as long as the steps by
    `CLOCKS`, and longer by what the process may wait before the first or after the last of each."""
    whole = sum(times)
    # 0.1 ms on an EPYC with other programs on both cores, but the last step's message wakes the
    # parent, which may take the core for a few time slices of 4 ms
    wait = epochs * (0.03 + max(times) - median(times))
    return -CLOCKS * whole <= measured_s - whole <= CLOCKS * whole + wait


def find_wrong_epochs(row: Row) -> Iterator[str]:
    if not row.has("epoch_time_s", "train_images"):
        return
    if row.case.command is not None:  # its steps are its own, and may be unlike
        return
    per_step = row.case.batch_size * row.case.world_size
    whole = row["measured_images"] is None or row["measured_images"] >= row["train_images"]
    times = _list_times(row)
    # batches that a loader prepared ahead are left out of the mean as well
    if times and not whole and row.case.loader == "device":
        left = row["train_images"] / per_step - len(times)
        right = row["measured_time_s"] + left * fmean(leave_out_first(times))
        if _differ(row["epoch_time_s"], right, 2e-3):  # a change of that rule moved them by 8e-4
            yield f"its epoch takes {row['epoch_time_s']:.5g} s, and {right:.5g} by its steps"


def find_wrong_learning(row: Row) -> Iterator[str]:
    steps = row.steps
    several = row.case.epochs > 1 or row.case.command is not None  # whose warm-up learns too
    if not len(steps) or several or row["status"] != Status.OK:
        return
    images = sum(step.images for step in steps)
    loss = sum(step.loss * step.images for step in steps if step.loss is not None) / images
    if row.has("train_loss") and _differ(row["train_loss"], loss, 1e-5):
        yield f"its loss is {row['train_loss']:.4f}, and {loss:.4f} by its steps"
    if row.has("train_accuracy") and None not in (hits := [step.correct for step in steps]):
        share = sum(hit or 0 for hit in hits) / images
        if _differ(row["train_accuracy"], share, 1e-5):
            yield f"its accuracy is {row['train_accuracy']:.4f}, and {share:.4f} by its steps"


def find_wrong_work(row: Row) -> Iterator[str]:
    right = FLOP_PER_IMAGE.get((row.case.model, row.case.input, row.case.classes))
    if right and row.has("flop_per_image") and _differ(row["flop_per_image"], right, EXACT):
        yield f"{row['flop_per_image']:.5g} FLOP an image, not {right:.5g}"
    sums = (("flop_per_image", "flop", row.case.batch_size), ("step_bytes", "bytes", 1))
    for column, name, items in sums if row.case.command is None else ():
        listed = sum(getattr(part, name) or 0.0 for part in row.work)
        if row.has(column) and listed and _differ(row[column] * items, listed, EXACT):
            yield f"{column} is not what its operations in work.csv add up to"


def find_wrong_proofs(row: Row) -> Iterator[str]:
    label = find_formats(row.case.precision, row.case.opt_level).arithmetic
    # some layers may round less than the precision says, as cuDNN's grouped ones in tf32
    ran = row["arithmetic"].split("/")
    if ran[0] and not {label, Arithmetic.UNCLEAR} & {*ran} and row["status"] == Status.OK:
        yield f"{row.case.precision} rounds to {label}, and what ran is {row['arithmetic']}"


def find_wrong_data(row: Row) -> Iterator[str]:
    if row.case.dataset == "cifar10" and not row.case.input and row["workload"] == IMAGES:
        for column, right in CIFAR10.items():
            if row.has(column) and row[column] != right:
                yield f"{column} is {row[column]}, and CIFAR-10's is {right}"


_RAN = ("started_at",)  # set in each row that this harness measured
_TIMED, _FLOP = ("epoch_time_s",), ("flop_per_image",)
_PEAKS = ("peak_device_bytes", "peak_process_bytes", "peak_reserved_bytes", "peak_allocated_bytes")

CLAIMS = (
    Claim("code", "the code is a commit's, unedited", find_unknown_code, _RAN),
    Claim("environment", "all rows are of one machine and one software", find_environments),
    Claim("plan", "every planned run ended, and none was cut off", find_gaps, _RAN),
    Claim("rates", "the machine's rates are possible", _of_rows(find_wrong_rates), tuple(RATES)),
    Claim("speed", "no step is faster than the card can be", _of_rows(find_wrong_speed), ("gpu",)),
    Claim(
        "energy",
        "energy is power times time, within the limit",
        _of_rows(find_wrong_energy),
        ("energy_j",),
    ),
    Claim("memory", "memory fits in memory", _of_rows(find_wrong_memory), _PEAKS),
    Claim("steps", "the steps add up to the row", _of_rows(find_wrong_steps), ("measured_steps",)),
    Claim("epoch", "the epoch agrees with its steps", _of_rows(find_wrong_epochs), _TIMED),
    Claim(
        "learning",
        "loss and accuracy agree with the steps",
        _of_rows(find_wrong_learning),
        ("train_loss",),
    ),
    Claim("work", "FLOP and bytes are the network's", _of_rows(find_wrong_work), _FLOP),
    Claim(
        "proof",
        "the arithmetic is that of the precision",
        _of_rows(find_wrong_proofs),
        ("arithmetic",),
    ),
    Claim(
        "data",
        "the images are those that the rows name",
        _of_rows(find_wrong_data),
        ("dataset_fingerprint",),
    ),
)


# ------------------------------------------------------------------------------------ the verdict

OK, NOTHING, KNOWN, FAULT = "ok", "none", "known", "FAULT"
"""The results of a check; `NOTHING` if a folder has no data for it."""


def validate(folder: Path) -> dict[str, Any]:
    """Check one folder.

    Returns:
        ``folder``, ``subject``, what it ``gives_away`` and ``checks``, each with its ``name``,
        ``result`` (ok, none, known or FAULT), what it ``shows``, its ``faults`` and, if they are
        known, the ``reason``. Files that cannot be read are the one fault of a single check,
        ``schema``.
    """
    file = folder / KNOWN_FAULTS
    schema = {"name": "schema", "shows": "every file is as the harness wrote it"}
    try:
        sweep = read_sweep(folder)
        evidence = Evidence(sweep, list_runs(sweep.rows), read_beside(sweep.path, Step))
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        known = {name: reason for name, _, reason in (line.partition(": ") for line in lines)}
        if strange := known.keys() - {claim.name for claim in CLAIMS}:
            raise UsageError(f"{file}: there is no check {', '.join(strange)}")
        if not sweep.rows:
            raise UsageError(f"{sweep.path} has no rows")
    except UsageError as error:
        fault = {**schema, "result": FAULT, "faults": [str(error)]}
        return {"folder": str(folder), "subject": "", "checks": [fault], "gives_away": []}
    checks: list[dict[str, Any]] = [{**schema, "result": OK, "faults": []}]
    for claim in CLAIMS:
        found = {"name": claim.name, "shows": claim.shows, "faults": [*claim.find(evidence)]}
        passed = NOTHING if claim.is_empty(evidence) else OK
        found["result"] = FAULT if found["faults"] else passed
        if claim.name in known:
            found["reason"] = known[claim.name]
            if found["faults"]:
                found["result"] = KNOWN
            else:
                found["result"] = FAULT
                found["faults"] = [f"{KNOWN_FAULTS} names it, and it has no fault; take it out"]
        checks.append(found)
    first = evidence.runs[0]
    own = "" if evidence.own else "; not measured by this harness"
    return {
        "folder": str(folder),
        "subject": f"{count(len(evidence.runs), 'row')}, {first.machine}, torch {first.torch}{own}",
        "checks": checks,
        "gives_away": [
            f"{column} {name_first(held, 3)}"
            for column in ("host", "gpu_uuid", "variables")
            if (held := sorted({getattr(run, column) for run in evidence.runs} - {""}))
        ],
    }
