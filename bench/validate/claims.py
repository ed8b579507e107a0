"""What a results folder claims, and whether its contents, read once for all claims, bear it out;
and private data in it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from functools import cached_property
from itertools import chain, combinations, pairwise
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.axis import Trait
from bench.case import Case, list_affecting, list_varying
from bench.diagnosis.step import RATES
from bench.environment.host import hash_commit
from bench.errors import UsageError
from bench.gpu.peaks import list_peaks
from bench.limits import SLOWED, leave_out_first
from bench.origin import EXECUTORS, find_origin
from bench.precision import Arithmetic, find_formats
from bench.record import (
    COMPARABLE,
    MEASURED,
    REPEATED,
    EpochRow,
    Measurement,
    RankRow,
    Status,
    Step,
    WorkRow,
    read_missing,
)
from bench.store.reader import find_records, read_beside
from bench.store.rows import group, read_history
from bench.store.table import RECORDS
from bench.study.quantities import is_number
from bench.study.runs import Run, list_runs
from bench.study.sweeps import Sweep, read_sweep
from bench.text import count, name_first
from bench.workloads import IMAGES
from bench.yardstick import read_tries

KNOWN_FAULTS = "known-faults.txt"

OWN = tuple(EXECUTORS)
"""Executors whose rows are measured by this harness."""


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
    """The tables and plans of a folder. Rows of executors other than this harness's, such as
    published ones, are read but make no claim about how they were measured."""

    sweep: Sweep
    steps: dict[str, list[Step]]

    @cached_property
    def runs(self) -> list[Run]:
        """All records, as they are written."""
        return list_runs(self.sweep.rows)

    @cached_property
    def own(self) -> list[Run]:
        """The records that this harness measured."""
        return [run for run in self.runs if run.executor in OWN]

    @cached_property
    def rows(self) -> list[Row]:
        """The rows whose status says that they were measured, without inferred ones."""
        axes, rows = list_varying([run.case for run in self.runs]), []
        for run in self.runs:
            if run.status in MEASURED and not run.inferred:
                which = f", repeat {run.repeat}" if run.repeat > 1 else ""
                name = f"{run.case.label(axes)}{which}{', sentinel' if run.sentinel else ''}"
                work = self.sweep.work.get(run.record_id, ())
                rows.append(Row(name, run, self.steps.get(run.record_id, ()), work))
        return rows

    def group(self, *columns: str) -> Iterator[list[Row]]:
        """Yield the rows that agree on these columns, as lists of two or more."""
        groups = group(self.rows, lambda row: tuple(row[column] for column in columns))
        return (rows for rows in groups if len(rows) > 1)


def read_evidence(folder: Path, sweep: Sweep | None = None) -> Evidence:
    """Read a folder, or a records file alone; ``sweep`` if it was read already. Raises UsageError:
    a file is not as it was written; gives the wrong line and column."""
    sweep = sweep or read_sweep(folder)
    if not sweep.rows:
        raise UsageError(f"{sweep.path} has no rows")
    return Evidence(sweep, read_beside(sweep.path, Step))


def read_known_faults(folder: Path) -> dict[str, str]:
    """Return why faults are kept, by claim, from lines of ``known-faults.txt`` such as ``code:
    measured before the last commit; times are not concerned``. Raises UsageError."""
    try:
        lines = (folder / KNOWN_FAULTS).read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    faults = {}
    for line in filter(str.strip, lines):
        name, colon, reason = line.partition(": ")
        if not colon:
            raise UsageError(f"{folder / KNOWN_FAULTS}: {line!r} is not 'check: reason'")
        faults[name] = reason
    return faults


_PATH = re.compile(r"(?<![\w.:/~-])/[\w.-]+(?:/[\w.@+-]+)+")
"""An absolute path of two or more parts that is not part of a URL."""

_PUBLIC = ("/proc/", "/sys/", "/dev/", "/usr/")
_MOST = 3


def list_disclosed(folder: Path, runs: Sequence[Run]) -> Iterator[str]:
    """Yield what identifies a machine or a person: host, GPU and environment variables of the
    records, and paths in the folder's text files."""
    for column, what in (
        ("host", "the host name"),
        ("gpu_uuid", "the UUID of the GPU"),
        ("variables", "environment variables"),
    ):
        if found := sorted({getattr(run, column) for run in runs} - {""}):
            yield f"{what} {name_first(found, _MOST)}"
    folders = [file.parent for file in find_records(folder)] if folder.is_dir() else []
    for file in sorted(file for place in folders for file in place.iterdir()) or [folder]:
        if file.suffix not in (".json", ".txt", ".log", ".html") and file.name != RECORDS:
            continue
        found = _PATH.findall(file.read_text(encoding="utf-8", errors="replace"))
        if paths := sorted({path for path in found if not path.startswith(_PUBLIC)}):
            yield f"paths in {file.name}: {name_first(paths, _MOST)}"


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

RULE = 2e-3
"""Relative tolerance of an epoch by its steps: a change of that rule once moved epochs by 8e-4."""

POWER = 0.01
"""Relative tolerance of the mean power, which covers the time between two readings: up to 0.6 %
longer than epochs of 2 s and more on an H100."""

READING_S = 0.05
"""Maximum time between an epoch and the readings around it; up to 23 ms on an H200."""

CLOCKS = 5e-3
"""Relative tolerance of the clocks of epoch and steps; committed folders agree within 2.1e-3."""

WAIT_S = 0.03
"""Maximum time of an epoch outside its steps, in s, besides a wait as long as the longest that its
steps show. It is 0.1 ms on an EPYC with other programs on both cores, but the last step's message
wakes the parent, which may take the core for a few time slices of 4 ms."""

OVER_LIMIT = 1.05
"""Maximum mean power over the limit: cards regulate with a delay; an H100 stayed below it."""

ALIKE = 0.02
"""Relative tolerance of the first step's loss at equal weights; precisions moved it by 0.4 %."""

FORWARD_ERROR: dict[Arithmetic, tuple[float, float]] = {
    Arithmetic.FLOAT32: (0.0, 2e-5),
    Arithmetic.TFLOAT32: (1.8e-4, 8e-3),
    Arithmetic.FLOAT16: (1.8e-4, 8e-3),
    Arithmetic.BFLOAT16: (1.7e-3, 8e-3),
    Arithmetic.FLOAT8: (1.7e-3, 0.1),
}
"""Minimum and maximum error of an arithmetic, over all the ways that `bench.training.arithmetic`
derives."""

CIFAR10 = {"dataset_fingerprint": "d519226402145e1e", "train_images": 50_000, "test_images": 10_000}
"""Hash of CIFAR-10's pixels and labels, in any layout, and its numbers of images."""

FLOP_PER_IMAGE = {("dpn92", "", ""): 12_250_994_688}
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
        if not self.of:
            return False
        own = [row for row in evidence.rows if row["executor"] in OWN]
        return not any(row[column] not in (None, "") for row in own for column in self.of)


def _differ(one: float, other: float, within: float) -> bool:
    return not math.isclose(one, other, rel_tol=within, abs_tol=1e-12)


def _of_rows(find: Callable[[Row], Iterator[str]]) -> Callable[[Evidence], Iterator[str]]:
    """Make a claim about each row by itself; its faults start with the name of the row."""
    return lambda evidence: (
        f"{row.name}: {fault}"
        for row in evidence.rows
        if row["executor"] in OWN
        for fault in find(row)
    )


def find_orphans(evidence: Evidence) -> Iterator[str]:
    ids = Counter(run.record_id for run in evidence.runs)
    yield from (f"several rows have the record_id {name}" for name, n in ids.items() if n > 1)
    path = evidence.sweep.path
    beside: dict[str, Iterable[str]] = {
        "steps": evidence.steps,
        "work": evidence.sweep.work,
        "epochs": read_beside(path, EpochRow),
        "ranks": read_beside(path, RankRow),
    }
    for name, records in beside.items():
        if strange := {*records} - {*ids}:
            yield f"{name}.csv has rows of {count(len(strange), 'record')} that records.csv lacks"


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
    for column in ("gpu_uuid", "power_limit_w"):
        several = any(len(list_values(r, column)) > 1 for r in group(own, attrgetter("host")))
        if several and not any(run.world_size > 1 for run in own):
            yield f"{column} changed between the rows of one host"


def find_gaps(evidence: Evidence) -> Iterator[str]:
    yield from (f"{told} {mend}" for told, mend in evidence.sweep.gaps)
    attempts = {(run.case, run.repeat, run.sentinel, run.attempt) for run in evidence.runs}
    axes = list_varying([run.case for run in evidence.runs])
    for (case, repeat, sentinel), past in read_history(evidence.sweep.rows).items():
        began = (case, repeat, sentinel, past.attempt) in attempts
        # a sentinel that was cut off is among the gaps above
        if past.status in REPEATED and began and not sentinel:
            which = f", repeat {repeat}" if repeat > 1 else ""
            yield f"{case.label(axes)}{which}: {past.status}, and not run again since"
    for row in evidence.rows:
        run, attempt = (row.case, row["repeat"], row["sentinel"]), row["attempt"]
        if attempt > 1 and not any((*run, before) in attempts for before in range(1, attempt)):
            yield f"{row.name}: attempt {attempt} has no row of the one before it"


def find_wrong_outcomes(evidence: Evidence) -> Iterator[str]:
    for executor in dict.fromkeys(run.executor for run in evidence.runs):
        if find_origin(executor) == "unknown":
            yield f"some rows come from the {executor} executor, which this version does not know"
    for row in evidence.rows:
        if not row.has("epoch_time_s"):
            yield f"{row.name}: {row['status']}, but it has no epoch time"
        if row["status"] == Status.OK and row["reason"]:
            yield f"{row.name}: ok, but a reason stands beside it: {row['reason']}"
        finite = row.has("train_loss") and not row.has("first_bad_step")
        told = "train_loss" not in read_missing(row["missing"])  # by a command, which need not
        if row["executor"] in OWN and told and (row["status"] == Status.OK) > finite:
            yield f"{row.name}: ok, but its loss was not finite"
    for run in evidence.runs:
        if run.status != Status.OK and not run.reason:
            yield f"a row ended as {run.status} without a reason"


_SIGNED = ("train_loss", "test_loss")
"""Columns that may be below zero: a likelihood's loss is."""


def find_negative(row: Row) -> Iterator[str]:
    """Find figures below zero that cannot be: they are kept as they were read, and not believed."""
    for f in fields(Measurement):
        if f.name not in _SIGNED and row.has(f.name) and is_number(row[f.name]) and row[f.name] < 0:
            yield f"{f.name} is {row[f.name]:g}"


def find_emptied(row: Row) -> Iterator[str]:
    """Find columns that doubts need and that are empty without a reason."""
    needed = ["warmup_steps", "measured_steps", "measured_time_s", "step_time_median_s"]
    if row["device"] == "cuda":
        needed += ["peak_device_bytes", "energy_j", "power_limit_w", "sm_clock_mhz"]
        needed += ["temperature_c", "neighbours_computing", "gpu_memory_bytes"]
    reasons = read_missing(row["missing"])
    for column in needed:
        if not row.has(column) and column not in reasons:
            yield f"{column} is empty, and missing does not say why"
    if row["flags"] and not row["arithmetic"] and "arithmetic" not in reasons:
        yield "the proof of its arithmetic is gone, and missing does not say why"


def find_wrong_moments(evidence: Evidence) -> Iterator[str]:
    before: tuple[datetime, str] | None = None
    own = [row for row in evidence.rows if row["executor"] in OWN]
    for row in sorted(own, key=lambda row: str(row["started_at"])):
        start, end = (datetime.fromisoformat(row[c]) for c in ("started_at", "finished_at"))
        parts = ("setup_time_s", "warmup_time_s", "measured_time_s", "eval_time_s")
        spent, passed = sum(row[part] or 0.0 for part in parts), (end - start).total_seconds()
        if spent > passed + 1:
            yield f"{row.name}: its phases take {spent:.1f} s, and it took {passed:.1f} s"
        if before and start < before[0] and not row["lanes_beside"] and not row["lane"]:
            yield f"{row.name} began before {before[1]} had ended, on the same machine"
        before = max(before or (end, row.name), (end, row.name))


def find_copies(evidence: Evidence) -> Iterator[str]:
    for one, other in combinations(evidence.rows, 2):
        if one.has("measured_time_s") and one["measured_time_s"] == other["measured_time_s"]:
            yield f"{one.name} and {other.name} took the same time to the last digit"


def find_wrong_rates(evidence: Evidence) -> Iterator[str]:
    for row in evidence.rows:
        peaks = list_peaks(row["gpu"])
        for column in RATES:
            if row.has(column) and row[column] > peaks.get(column, math.inf):
                yield (
                    f"{row.name}: {column} is {row[column]:.4g}, and the data sheet of "
                    f"{row['gpu']} says {peaks[column]:.4g}"
                )
    for rows in evidence.group("gpu_uuid", "host", "device", "rates_at"):
        for column in RATES:
            found = [row[column] for row in rows if row.has(column)]
            if found and rows[0]["device"] == "cuda" and max(found) > (1 + SLOWED) * min(found):
                yield f"{column} is from {min(found):.4g} to {max(found):.4g} on one machine"


def find_wrong_clocks(row: Row) -> Iterator[str]:
    ends = [row[c] for c in ("sm_clock_first_mhz", "sm_clock_last_mhz") if row.has(c)]
    if row.has("sm_clock_mhz") and len(ends) == 2:
        low, high = 0.7 * min(ends), 1.3 * max(ends)
        if not low <= row["sm_clock_mhz"] <= high:
            yield (
                f"its median SM clock is {row['sm_clock_mhz']:.0f} MHz, and at both ends of the "
                f"epoch it was {ends[0]:.0f} and {ends[1]:.0f}"
            )
    peaks = list_peaks(row["gpu"])
    for column, tries in read_tries(row["rate_tries"]).items():
        if row.has(column, "sm_clock_mhz") and tries.clock_mhz and column in peaks:
            # at half the clock a card reaches at most half of its peak at boost, plus what the
            # clock was above that: 1980 for 1830 MHz on an H100
            share = 1.25 * tries.clock_mhz / max(row["sm_clock_mhz"], tries.clock_mhz)
            if column != "rate_copy" and row[column] > share * peaks[column]:
                yield f"{column} is {row[column]:.4g} at {tries.clock_mhz:.0f} MHz"


def find_wrong_speed(evidence: Evidence) -> Iterator[str]:
    for row in (row for row in evidence.rows if row["executor"] in OWN):
        flops, moved = row.run.of_peaks, row.run.of_bandwidth
        if flops > 1:
            yield f"{row.name}: {flops:.3g} times the FLOP/s that {row['gpu']} does"
        if moved > 1 and row.case.compile == Case.compile:
            yield f"{row.name}: {moved:.3g} times the bytes/s of {row['gpu']}'s memory"


def find_wrong_energy(row: Row) -> Iterator[str]:
    if not row.has("energy_j", "measured_time_s"):
        return
    power_w = row["energy_j"] / row["measured_time_s"]
    share = max(POWER, READING_S / row["measured_time_s"])
    if row.has("mean_power_w") and _differ(power_w, row["mean_power_w"], share):
        mean_w = row["mean_power_w"]
        yield f"its energy over its time is {power_w:.4g} W, its mean power {mean_w:.4g} W"
    limit_w = (row["power_limit_w"] or math.inf) * row.case.world_size
    if power_w > OVER_LIMIT * limit_w:
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
    if (told := re.search(r"\b(\d+)GB\b", row["gpu"])) and row.has("gpu_memory_bytes"):
        has, named = row["gpu_memory_bytes"], float(told[1])
        if not 0.9e9 * named <= has <= 1.1 * 2**30 * named:
            yield f"{row['gpu']} has {has:.4g} bytes of memory"


def find_wrong_steps(row: Row) -> Iterator[str]:
    steps = row.steps
    if not len(steps):
        if row.has("measured_steps"):
            yield "steps.csv has none of its steps"
        return
    times, images = _list_times(row), sum(step.images for step in steps)
    if len(steps) != row["measured_steps"] or images != row["measured_images"]:
        held = [row[name] for name in ("measured_steps", "measured_images")]
        told = ["an unknown number" if number is None else f"{number:.0f}" for number in held]
        yield (
            f"steps.csv has {len(steps)} steps of {images} images, the row {told[0]} of {told[1]}"
        )
    elif not adds_up(times, row["measured_time_s"], row.case.epochs):
        yield f"its steps take {sum(times):.4g} s, and together {row['measured_time_s']:.4g} s"
    middle = median(times)
    for column, right in (
        ("step_time_median_s", middle),
        ("step_time_mad_s", median(abs(time - middle) for time in times)),
        ("step_time_max_s", max(times)),
    ):
        if row.has(column) and _differ(row[column], right, EXACT):
            yield f"{column} is {row[column]:.4g}, and {right:.4g} by its steps"


def _list_times(row: Row) -> list[float]:
    return [step.time_s or 0.0 for step in row.steps]


def _none_as_nan(value: float | None) -> float:
    return math.nan if value is None else value


def adds_up(times: Sequence[float], measured_s: float, epochs: int = 1) -> bool:
    """Return whether epochs of these steps may take so long together: as long as the steps by
    `CLOCKS`, and longer by what the process may wait before the first or after the last of each."""
    whole = sum(times)
    wait = epochs * (WAIT_S + max(times) - median(times))
    return -CLOCKS * whole <= measured_s - whole <= CLOCKS * whole + wait


def find_wrong_epochs(row: Row) -> Iterator[str]:
    if not row.has("epoch_time_s", "train_images"):
        return
    if row.case.command is not None:  # its steps are its own, and may be unlike
        return
    per_step = row.case.batch_size * row.case.world_size
    if row.has("steps_per_epoch") and row["steps_per_epoch"] != math.ceil(
        row["train_images"] / per_step
    ):
        yield f"{row['steps_per_epoch']:.0f} steps of {per_step} are no epoch"
    if row.has("images_per_s"):
        images = row["images_per_s"] * row["epoch_time_s"]
        if _differ(images, row["train_images"], EXACT):
            yield f"images_per_s is not {row['train_images']:,.0f} images over its epoch time"
    low, high = (row[f"epoch_time_{end}_s"] for end in ("low", "high"))
    if low and high and not low <= row["epoch_time_s"] <= high:
        yield "its epoch time lies outside its own interval"
    whole = row["measured_images"] is None or row["measured_images"] >= row["train_images"]
    times = _list_times(row)
    # batches that a loader prepared ahead are left out of the mean as well
    if times and not whole and row.case.loader == "device":
        left = row["train_images"] / per_step - len(times)
        right = row["measured_time_s"] + left * fmean(leave_out_first(times))
        if _differ(row["epoch_time_s"], right, RULE):
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


def find_odd_curves(evidence: Evidence) -> Iterator[str]:
    """Find first-step losses that differ between rows with the same weights and images."""
    same = ("dataset_fingerprint", "model_parameters", "run_seed", *list_affecting(Trait.FIRST))
    of_images = (rows for rows in evidence.group(*same) if rows[0]["workload"] == IMAGES)
    drawn = evidence.group(*same, *list_affecting(Trait.DRAWS))
    of_others = (rows for rows in drawn if rows[0]["workload"] != IMAGES)
    for rows in chain(of_images, of_others):
        # a command draws its weights and its data as it likes
        own = [row for row in rows if row["executor"] in OWN and row.case.command is None]
        firsts = [(row.name, _none_as_nan(row.steps[0].loss)) for row in own if row.steps]
        if len(firsts) > 1:
            usual = median(loss for _, loss in firsts)
            for name, loss in firsts:
                if _differ(loss, usual, ALIKE):
                    yield (
                        f"{name}: the loss of its first step is {loss:.3f}, where the same weights "
                        f"and images gave {usual:.3f}"
                    )


def find_wrong_work(evidence: Evidence) -> Iterator[str]:
    for row in evidence.rows:
        right = FLOP_PER_IMAGE.get((row.case.model, row.case.input or "", row["classes"] or ""))
        if right and row.has("flop_per_image") and _differ(row["flop_per_image"], right, EXACT):
            yield f"{row.name}: {row['flop_per_image']:.5g} FLOP an image, not {right:.5g}"
        for column, name, items in (
            (
                ("flop_per_image", "flop", row.case.batch_size),
                ("step_bytes", "bytes", 1),
            )
            if row.case.command is None
            else ()
        ):
            listed = sum(getattr(part, name) or 0.0 for part in row.work)
            if row.has(column) and listed and _differ(row[column] * items, listed, EXACT):
                yield f"{row.name}: {column} is not what its operations in work.csv add up to"
    # the shape is an axis, and the parameters show the number of classes of a dataset
    axes = [name for name in list_affecting(Trait.FLOP) if name not in ("dataset", "workload")]
    for rows in evidence.group("model_parameters", *axes):
        found = {row["flop_per_image"] for row in rows if row.has("flop_per_image")}
        if len(found) > 1:
            yield f"{rows[0]['model']}: {name_first([f'{f:.5g}' for f in found], 3)} FLOP an image"


def find_wrong_proofs(row: Row) -> Iterator[str]:
    if not row["arithmetic"]:
        return
    label = find_formats(row.case.precision, row.case.opt_level).arithmetic
    # some layers may round less than the precision says, as cuDNN's grouped ones in tf32
    ran = row["arithmetic"].split("/")
    if label not in ran and row["status"] == Status.OK and Arithmetic.UNCLEAR not in ran:
        yield f"{row.case.precision} rounds to {label}, and what ran is {row['arithmetic']}"
    low, high = FORWARD_ERROR.get(Arithmetic(ran[0]), (0.0, math.inf))
    for column in ("conv_error", "matmul_error") if len(ran) == 1 else ():
        if row.has(column) and not low <= row[column] <= high:
            yield f"{column} is {row[column]:.2g}, which {ran[0]} does not leave"


def find_wrong_data(row: Row) -> Iterator[str]:
    if row.case.dataset == "cifar10" and not row.case.input and row["workload"] == IMAGES:
        for column, right in CIFAR10.items():
            if row.has(column) and row[column] != right:
                yield f"{column} is {row[column]}, and CIFAR-10's is {right}"


_RAN = ("started_at",)  # set in each row that this harness measured
_TIMED = ("epoch_time_s",)
_PEAKS = ("peak_device_bytes", "peak_process_bytes", "peak_reserved_bytes", "peak_allocated_bytes")

CLAIMS = (
    Claim("rows", "every row beside the records belongs to one of them", find_orphans),
    Claim("code", "the code is a commit's, unedited", find_unknown_code, _RAN),
    Claim("environment", "all rows are of one machine and one software", find_environments),
    Claim(
        "plan",
        "every planned run ended, and none was cut off",
        find_gaps,
        _RAN,
    ),
    Claim("outcome", "status, reason and figures of a row agree", find_wrong_outcomes),
    Claim("signs", "nothing that cannot be is below zero", _of_rows(find_negative), _TIMED),
    Claim(
        "doubts", "the columns that doubts are found by are filled", _of_rows(find_emptied), _TIMED
    ),
    Claim(
        "moments",
        "phases fit between start and end, and rows follow each other",
        find_wrong_moments,
        _RAN,
    ),
    Claim("copies", "no two rows have the same times", find_copies),
    Claim("rates", "the machine's rates are possible, and alike", find_wrong_rates, tuple(RATES)),
    Claim("clocks", "clocks and rates agree", _of_rows(find_wrong_clocks), ("sm_clock_mhz",)),
    Claim("speed", "no step is faster than the card can be", find_wrong_speed, ("gpu",)),
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
    Claim("curve", "the same start has the same loss", find_odd_curves, ("train_loss",)),
    Claim("work", "FLOP and bytes are the network's", find_wrong_work, ("flop_per_image",)),
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


def validate(folder: Path, sweep: Sweep | None = None) -> dict[str, Any]:
    """Check one folder; ``sweep`` if it was read already.

    Returns:
        ``folder``, ``subject``, what it ``gives_away`` and ``checks``, each with its ``name``,
        ``result`` (ok, none, known or FAULT), what it ``shows``, its ``faults`` and, if they are
        known, the ``reason``. Files that cannot be read are the one fault of a single check,
        ``schema``.
    """
    schema = {"name": "schema", "shows": "every file is as the harness wrote it"}
    try:
        known, evidence = read_known_faults(folder), read_evidence(folder, sweep)
        if strange := known.keys() - {claim.name for claim in CLAIMS}:
            raise UsageError(f"{folder / KNOWN_FAULTS}: there is no check {', '.join(strange)}")
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
    return {
        "folder": str(folder),
        "subject": _name_subject(evidence),
        "checks": checks,
        "gives_away": [*list_disclosed(folder, evidence.runs)],
    }


def _name_subject(evidence: Evidence) -> str:
    """Return what was measured, and on what: ``13 rows, NVIDIA H200, torch 2.11.0+cu130``."""
    first = evidence.runs[0]
    own = "" if evidence.own else "; not measured by this harness"
    return f"{count(len(evidence.runs), 'row')}, {first.machine}, torch {first.torch}{own}"
