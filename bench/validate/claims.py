"""What a results folder claims, and whether its contents bear it out; and what it discloses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.base.errors import UsageError
from bench.base.limits import find_ends, leave_out_first, summarize_steps
from bench.base.origin import EXECUTORS
from bench.base.text import GIB, count, name_first, read_time
from bench.machine.host import hash_commit
from bench.machine.peaks import find_peak, list_peaks
from bench.networks.workloads import IMAGES
from bench.profile.rates import RATES
from bench.results.store.rows import group
from bench.results.study.comparable import list_mixed, refuse_alone
from bench.results.study.runs import Run, link_runs, list_runs
from bench.results.study.sweeps import SweepFolder
from bench.schema.case import AXES, SAME_QUESTION, Case
from bench.schema.precision import BITS, Arithmetic, find_formats
from bench.schema.record import COMPARABLE, Status, read_missing
from bench.validate.evidence import Evidence, EvidenceRow, read_evidence

KNOWN_FAULTS = "known-faults.txt"
"""A file beside the folders, of whoever publishes them: lines ``FOLDER: check: reason`` accept a
fault. One in a folder accepts nothing: it would excuse itself."""


# ------------------------------------------------------------------------------------------- claims
#
# The claims that the rows of a folder make, and how each is checked.
#
# Bounds are physical (a data sheet, the power limit, the memory of the card) or computed by the
# harness itself from the steps and work stored with the rows. Results that are consistent with all
# of them pass; docs/results.md lists what they cannot tell.


EXACT = 1e-6
"""Relative tolerance within which two figures of one computation are equal."""

CLOCKS = 5e-3
"""Relative tolerance of the clocks of epoch and steps; committed folders agree within 2.1e-3."""

WATCHES_S = 60.0
"""How far the clocks of two machines that write to a folder may differ, or one be set back."""

MOST_BUSY = 1.1
"""The kernels of a profiled step take at most this share of a median step. On an H100 and an H200
they take 0.53 to 0.993 of it."""

POWER = 0.2
"""Two runs of a case that take the same time, within `STEADY_TIME`, differ by less than this share
in power: committed ones by at most 6 %, of which parts of 2 s read too little."""

STEADY_TIME, LEAST_POWER_S = 0.05, 1.0
"""See `POWER`; a power over fewer seconds is not compared."""

SOLD = (0.88, 1.02)
"""A card's memory, as the driver tells it, over what is sold in GiB: a T4 has 14.6 of 16."""

CIFAR10 = {"dataset_fingerprint": "d519226402145e1e", "train_images": 50_000, "test_images": 10_000}
"""Hash of CIFAR-10's pixels and labels, in any layout, and its numbers of images."""

FLOP_PER_IMAGE: dict[Any, int] = {("dpn92", None, None): 12_250_994_688}
"""FLOP of this harness's networks, by model, --input and --classes; equal everywhere."""

_tell_question = attrgetter(*(name for name in AXES if name not in SAME_QUESTION))


@dataclass(frozen=True)
class Need:
    """What a claim is checked by: a row that has it, and how that is called."""

    words: str
    met: Callable[[EvidenceRow], bool]


@dataclass(frozen=True)
class Claim:
    """A claim: ``shows`` is true if ``find`` yields nothing. It can only be checked if a row
    measured by this harness meets its ``need``; without one, always."""

    name: str
    shows: str
    find: Callable[[Evidence], Iterator[str]]
    need: Need | None = None


def _differ(one: float, other: float, within: float) -> bool:
    return not math.isclose(one, other, rel_tol=within, abs_tol=1e-12)


def _of_rows(find: Callable[[EvidenceRow], Iterator[str]]) -> Callable[[Evidence], Iterator[str]]:
    """Make a claim about each row by itself; its faults start with the name of the row."""
    return lambda evidence: (f"{row.name}: {fault}" for row in evidence.rows for fault in find(row))


def find_unknown_code(evidence: Evidence) -> Iterator[str]:
    for commit, code in dict.fromkeys((run.commit, run.code) for run in evidence.own):
        name, _, edited = commit.partition("+")
        if not name:
            yield "rows do not say which commit measured them"
        elif edited:
            yield f"measured by {commit}: the code was edited after that commit"
        elif (known := hash_commit(name)) and known != code:
            yield f"commit {name} has the code {known}, and the rows {code}"


def find_environments(evidence: Evidence) -> Iterator[str]:
    columns = [name for name, owners in COMPARABLE.items() if "device" in owners]
    for column, values, rows in list_mixed(evidence.own, columns):
        listed = name_first(values, 3)
        yield f"{column} is not the same in all rows of {rows[0].device}: {listed}"
    planned = evidence.config.get("environment")
    here = all(EXECUTORS[run.executor].here for run in evidence.own)
    for runs in group(evidence.own, attrgetter("device")):
        stated = planned.get(runs[0].device) if here and isinstance(planned, dict) else None
        if not isinstance(stated, dict):
            continue
        for column in columns:
            found = [*filter(None, dict.fromkeys(getattr(run, column) for run in runs))]
            if (value := stated.get(column)) and found and str(value) not in found:
                yield f"{column} is {name_first(found, 3)} in the rows, and {value} in config.json"


_TOLD = (
    "epoch_time_s",
    "measured_time_s",
    "images_per_s",
    "step_time_median_s",
    "peak_process_bytes",
    "peak_device_bytes",
    "energy_j",
    "mean_power_w",
    "train_loss",
)
"""Columns that every row which ended well tells, or in ``missing`` the reason why it does not."""


def _tells(row: EvidenceRow, name: str) -> bool:
    if name == "train_loss":  # a script may tell that of some steps alone
        return row.has(name) or row.case.command is not None
    return row.has(name) and bool(row[name] > 0)


def find_gaps(evidence: Evidence) -> Iterator[str]:
    """Rows that the last plan, other rows or other tables know of, and figures without a reason."""
    sweep, known = evidence.sweep, {run.record_id for run in evidence.runs}
    yield from (f"{gap} {fix}" for gap, fix in sweep.gaps)
    tables = {"steps": {*evidence.steps}, "epochs": {*sweep.epochs}, "work": {*sweep.work}}
    for table, ids in tables.items():
        if lost := ids - known:
            yield (
                f"{table}.csv has {count(len(lost), 'run')} that records.csv lacks "
                f"({name_first(sorted(lost), 3)}): a row was taken out, or the machine went down "
                "before it was written"
            )
    for run in evidence.own:
        lost = {*read_missing(run.shared, ("proof", "flop", "work")).values()} - known
        if lost:
            yield f"{evidence.name(run)}: uses what row {', '.join(sorted(lost))} found, not there"
    for row in evidence.rows:
        why = read_missing(row["missing"]) if row["status"] == Status.OK else _TOLD
        if untold := [name for name in _TOLD if name not in why and not _tells(row, name)]:
            yield f"{row.name}: tells no {name_first(untold, 3)}, nor why"
    if any(plan.shard for plan in sweep.plans):
        return  # repeats may be in another shard
    for runs in group((run for run in evidence.own if not run.sentinel), _tell_question):
        repeats = {run.repeat for run in runs}
        skipped = (repeat for repeat in range(1, max(repeats)) if repeat not in repeats)
        if first := [*islice(skipped, 4)]:
            numbers = ", ".join(map(str, first))
            yield f"{evidence.name(runs[-1])}: there is no repeat {numbers}"


def find_disorder(evidence: Evidence) -> Iterator[str]:
    """Times of day: each run lasts as long as its phases, and rows were written as runs ended."""
    phases = ("setup_time_s", "warmup_time_s", "measured_time_s")
    last: Run | None = None
    for run in evidence.own:
        name, start, end = evidence.name(run), read_time(run.started_at), read_time(run.finished_at)
        if run.inferred:
            continue
        if not start or not end:
            yield f"{name}: does not say when it started and ended"
            continue
        inside = sum(time for phase in phases if (time := getattr(run, phase)) == time)
        if run.resumed_epochs > 0:  # an earlier process trained a part
            inside = 0.0
        if end - start < (1 - CLOCKS) * inside - 1:
            yield f"{name}: ran for {end - start:.4g} s, and its phases took {inside:.4g} s"
        if read_time(run.rates_at) > start + WATCHES_S:
            yield f"{name}: started at {run.started_at}, before the rates of its machine were known"
        if last is not None and len(evidence.sweep.plans) == 1:
            before = read_time(last.finished_at)
            alone = not (run.lane or last.lane) and not run.lanes_beside > 0
            if end < before - WATCHES_S or (alone and start < before - WATCHES_S):
                yield (
                    f"{name}: ran from {run.started_at} to {run.finished_at}, and the row above "
                    f"it ended at {last.finished_at}"
                )
        last = run


def find_copies(evidence: Evidence) -> Iterator[str]:
    """Two runs take the same times, to the last digit, only where one is a copy, and learn the same
    from images only where they have the same seed."""
    rows = [row for row in evidence.rows if len(row.steps) >= 3]
    for same in group(rows, lambda row: tuple(row.times)):
        for row in same[1:]:
            yield f"{row.name}: its steps took the same times as those of {same[0].name}"
    rows = [row for row in rows if row["workload"] == IMAGES and row.case.command is None]
    for same in group(rows, lambda row: tuple(step.loss for step in row.steps)):
        for row in same[1:]:
            if row["run_seed"] != same[0]["run_seed"] and row.steps[0].loss is not None:
                yield f"{row.name}: its losses are those of {same[0].name}, of another seed"


def find_unlike(evidence: Evidence) -> Iterator[str]:
    """Rows of a command that are not what their setting says, or not what its repeats are."""
    for runs in group(link_runs(list_runs(evidence.own)), attrgetter("cell")):
        for why in dict.fromkeys(filter(None, map(refuse_alone, runs))):
            yield f"{runs[0].case.label()}: {why}"


def find_wrong_rates(row: EvidenceRow) -> Iterator[str]:
    for column, peak in list_peaks(row["gpu"]).items():
        if column in RATES and row.has(column) and row[column] > peak:
            yield f"{column} is {row[column]:.4g}, and the card's data sheet says {peak:.4g}"


def find_wrong_card(row: EvidenceRow) -> Iterator[str]:
    if (sheet := find_peak(row["gpu"])) is None:
        return
    if row.has("capability") and row["capability"] != sheet.capability:
        yield f"{row['gpu']} has compute capability {sheet.capability}, not {row['capability']}"
    if sheet.memory and row.has("gpu_memory_bytes") and row["mig"] != "on":
        share = row["gpu_memory_bytes"] / GIB / sheet.memory
        if not SOLD[0] <= share <= SOLD[1]:
            yield (
                f"{row['gpu']} has {sheet.memory} GiB of memory, and the row "
                f"{row['gpu_memory_bytes'] / GIB:.1f}"
            )
    for column in ("sm_clock_mhz", "sm_clock_first_mhz", "sm_clock_last_mhz"):
        if sheet.clock and row.has(column) and row[column] > (1 + CLOCKS) * sheet.clock:
            yield f"{column} is {row[column]:.0f}, and {row['gpu']} runs at {sheet.clock} at most"


def find_wrong_speed(row: EvidenceRow) -> Iterator[str]:
    flops, moved = row.run.of_peaks, row.run.of_bandwidth
    if flops > 1:
        yield f"{flops:.3g} times the FLOP/s that {row['gpu']} does"
    if moved > 1 and row.case.compile == Case.compile:
        yield f"{moved:.3g} times the bytes/s of {row['gpu']}'s memory"


def find_wrong_energy(row: EvidenceRow) -> Iterator[str]:
    if not row.has("energy_j") or not row["measured_time_s"]:
        return
    power_w = row["energy_j"] / row["measured_time_s"]
    # readings are up to 23 ms before and after an epoch of an H200, and 0.6 % of one of an H100
    share = max(0.01, 0.05 / row["measured_time_s"])
    if row.has("mean_power_w") and _differ(power_w, row["mean_power_w"], share):
        mean_w = row["mean_power_w"]
        yield f"its energy over its time is {power_w:.4g} W, its mean power {mean_w:.4g} W"
    limit_w = row["power_limit_w"] or math.inf  # of all its GPUs, as `Monitors` sums them
    if power_w > 1.05 * limit_w:  # cards regulate with a delay; an H100 stayed below it
        yield f"{power_w:.0f} W on average, and the limit was {limit_w:.0f} W"


def find_unlike_power(evidence: Evidence) -> Iterator[str]:
    """Faults of `find_wrong_energy`, and runs of one case, as fast as each other, of which one took
    much less power. Which of the two is wrong cannot be told."""
    yield from _of_rows(find_wrong_energy)(evidence)
    needed = ("mean_power_w", "step_time_median_s", "measured_time_s")
    rows = [row for row in evidence.rows if row.has(*needed) and not row["lanes_beside"]]
    rows = [row for row in rows if row["measured_time_s"] >= LEAST_POWER_S]
    for alike in group(rows, lambda row: (_tell_question(row.run), row["power_limit_w"])):
        least = min(alike, key=lambda row: row["mean_power_w"])
        for row in alike:
            one, other = least["mean_power_w"], row["mean_power_w"]
            times = (least["step_time_median_s"], row["step_time_median_s"])
            if one < (1 - POWER) * other and not _differ(*times, STEADY_TIME):
                yield (
                    f"{least.name}: its mean power is {one:.4g} W, and {other:.4g} W where the "
                    f"same case ran as fast ({_tell_apart(row, least)})"
                )
                break


def _tell_apart(row: EvidenceRow, other: EvidenceRow) -> str:
    started = f"started at {row['started_at']}"
    return started if row.name == other.name else f"{row.name}, {started}"


def find_wrong_memory(row: EvidenceRow) -> Iterator[str]:
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
    # what others held before may have gone since, so that only both together hold the process
    columns = ("peak_device_bytes", "peak_process_bytes", "baseline_device_bytes")
    if row["device"] == "cuda" and row.has(*columns) and row["peak_process_bytes"] > in_use:
        yield (
            f"peak_device_bytes is {row['peak_device_bytes']:.4g}, and the process alone held "
            f"{row['peak_process_bytes']:.4g}"
        )


def find_wrong_steps(row: EvidenceRow) -> Iterator[str]:
    steps, times = row.steps, row.times
    if not len(steps):
        if row.has("measured_steps"):
            yield "steps.csv has none of its steps"
        return
    images = sum(step.images for step in steps)
    if not row.has("measured_time_s"):
        yield "measured_time_s is empty, and steps.csv has its steps"
        return
    if len(steps) != row["measured_steps"] or images != row["measured_images"]:
        yield (
            f"steps.csv has {len(steps)} steps of {images} images, the row {row['measured_steps']} "
            f"of {row['measured_images']}"
        )
    elif not adds_up(times, row["measured_time_s"], row.case.epochs):
        yield f"its steps take {sum(times):.4g} s, and together {row['measured_time_s']:.4g} s"
    right = summarize_steps(times)
    if row.case.command is None:
        size = max(step.images for step in steps)
        full = [time for time, step in zip(times, steps, strict=True) if step.images == size]
        if ends := find_ends(full):
            right |= {"step_time_first_s": ends[0], "step_time_last_s": ends[1]}
        batch = row.case.batch_size * row.case.world_size
        if row["workload"] == IMAGES and size != min(batch, row["train_images"] or batch):
            yield f"its steps are of {size} images, and its batches of {batch}"
    for column, value in right.items():
        if row.has(column) and _differ(row[column], value, EXACT):
            yield f"{column} is {row[column]:.8g}, not {value:.8g}"


def adds_up(times: Sequence[float], measured_s: float, epochs: int) -> bool:
    """Return whether epochs of these steps may take so long together: as long as the steps by
    `CLOCKS`, and longer by what the process may wait before the first or after the last of each."""
    whole = sum(times)
    # 0.1 ms on an EPYC with other programs on both cores, but the last step's message wakes the
    # parent, which may take the core for a few time slices of 4 ms
    wait = epochs * (0.03 + max(times) - median(times))
    return -CLOCKS * whole <= measured_s - whole <= CLOCKS * whole + wait


def find_wrong_epochs(row: EvidenceRow) -> Iterator[str]:
    if not row.has("epoch_time_s", "measured_time_s", "train_images"):
        return
    time_s, images = row["epoch_time_s"], row["train_images"]
    if row.has("images_per_s") and _differ(row["images_per_s"] * time_s, images, EXACT):
        yield (
            f"{row['images_per_s']:.5g} images/s for {time_s:.5g} s are "
            f"{row['images_per_s'] * time_s:.5g} images, and an epoch has {images}"
        )
    ends = ("epoch_time_low_s", "epoch_time_high_s")
    if row.has(*ends) and not row[ends[0]] <= time_s <= row[ends[1]]:
        yield f"its epoch takes {time_s:.5g} s, outside its interval"
    seen, number = row["measured_images"] or images, len(row.times)
    if row.case.command is not None:  # whose steps may be of other numbers of items
        steps, whole_s = images / seen * number, row["measured_time_s"] * images / seen
    else:
        steps = images / (row.case.batch_size * row.case.world_size)
        whole_s = row["measured_time_s"] / row.epochs
        yield from _compare_setting(row)
    if seen >= images:
        if _differ(time_s, whole_s, EXACT):
            yield f"its epoch takes {time_s:.5g} s, and was measured in {whole_s:.5g} s"
    # batches that a loader prepared ahead are left out of the mean as well
    elif number and row.case.loader == "device":
        right = row["measured_time_s"] + (steps - number) * fmean(leave_out_first(row.times))
        if _differ(time_s, right, 2e-3):  # a change of that rule moved them by 8e-4
            yield f"its epoch takes {time_s:.5g} s, and {right:.5g} by its steps"


def _compare_setting(row: EvidenceRow) -> Iterator[str]:
    """As many steps are measured as ``--fraction`` and ``--steps`` say; ``--until``, at most."""
    if not row.has("measured_steps", "steps_per_epoch"):
        return
    case, measured = row.case, row["measured_steps"]
    part = math.ceil(case.fraction * row["steps_per_epoch"])
    asked = row.epochs * min(part, case.steps or part)
    if measured > asked or (measured < asked and case.until is None):
        yield f"{measured:,.0f} steps were measured, and its setting says {asked:,}"


def find_wrong_learning(evidence: Evidence) -> Iterator[str]:
    yield from _of_rows(_compare_steps)(evidence)
    for row in evidence.rows:
        for last in evidence.sweep.epochs.get(row.run.record_id, ())[-1:]:
            for name in ("train_loss", "train_accuracy", "test_loss", "test_accuracy"):
                shown, right = row[name], getattr(last, name)
                if shown is not None and right is not None and _differ(shown, right, EXACT):
                    yield f"{row.name}: {name} is {shown:.4f}, and {right:.4f} in epochs.csv"


def _compare_steps(row: EvidenceRow) -> Iterator[str]:
    steps = row.steps
    several = row.case.epochs > 1 or row.case.command is not None  # whose warm-up learns too
    images = sum(step.images for step in steps)
    if not images or several or row["status"] != Status.OK:
        return
    loss = sum(step.loss * step.images for step in steps if step.loss is not None) / images
    if row.has("train_loss") and _differ(row["train_loss"], loss, 1e-5):
        yield f"its loss is {row['train_loss']:.4f}, and {loss:.4f} by its steps"
    if row.has("train_accuracy") and None not in (hits := [step.correct for step in steps]):
        share = sum(hit or 0 for hit in hits) / images
        if _differ(row["train_accuracy"], share, 1e-5):
            yield f"its accuracy is {row['train_accuracy']:.4f}, and {share:.4f} by its steps"


def find_wrong_work(row: EvidenceRow) -> Iterator[str]:
    right = FLOP_PER_IMAGE.get((row.case.model, row.case.input, row.case.classes))
    if right and row.has("flop_per_image") and _differ(row["flop_per_image"], right, EXACT):
        yield f"{row['flop_per_image']:.5g} FLOP an image, not {right:.5g}"
    sums = (("flop_per_image", "flop", row.case.batch_size), ("step_bytes", "bytes", 1))
    for column, name, items in sums if row.case.command is None else ():
        listed = sum(getattr(part, name) or 0.0 for part in row.work)
        again = row["recomputed_flop_per_image"] or 0.0 if name == "flop" else 0.0
        if row.has(column) and listed and _differ((row[column] + again) * items, listed, EXACT):
            yield f"{column} is not what its operations in work.csv add up to"


def find_wrong_profiles(evidence: Evidence) -> Iterator[str]:
    """Kernels that take longer than the step that they are of, by its profile, by their own times,
    or by the median step of any run of the same case."""
    for row in evidence.rows:
        if not row.has("busy_s", "profiled_step_s"):
            continue
        waits = sum(row[name] or 0.0 for name in ("busy_s", "input_wait_s", "sync_wait_s"))
        if waits > (1 + EXACT) * row["profiled_step_s"]:
            yield (
                f"{row.name}: its kernels and waits take {waits:.4g} s of a profiled step of "
                f"{row['profiled_step_s']:.4g} s"
            )
        apart = [part.exclusive_s for part in row.work if part.exclusive_s is not None]
        if apart and _differ(sum(apart), row["busy_s"], CLOCKS):
            yield (
                f"{row.name}: busy_s is {row['busy_s']:.4g}, and {sum(apart):.4g} by its "
                "operations in work.csv"
            )
    for alike in group(evidence.rows, lambda row: _tell_question(row.run)):
        busy = [row["busy_s"] for row in alike if row["device"] == "cuda" and row.has("busy_s")]
        for row in alike if busy else ():
            step_s = row["step_time_median_s"]
            if step_s and min(busy) > MOST_BUSY * step_s:
                yield (
                    f"{row.name}: a step takes {step_s:.4g} s, and its kernels alone take "
                    f"{min(busy):.4g} s"
                )


def find_wrong_proofs(row: EvidenceRow) -> Iterator[str]:
    label, precision = find_formats(row.case.precision, row.case.opt_level).arithmetic, row.case
    # some layers may round less than the precision says, as cuDNN's grouped ones in tf32
    ran = row["arithmetic"].split("/")
    if not ran[0] or row["status"] != Status.OK:
        return
    known = {str(one): BITS.get(one, BITS[label]) for one in Arithmetic}
    coarser = [name for name in ran if known.get(name, 0) < BITS[label]]  # or unheard of
    if coarser or not {label, Arithmetic.UNCLEAR} & {*ran}:
        yield f"{precision.precision} rounds to {label}, and what ran is {row['arithmetic']}"
    full = label in (Arithmetic.FLOAT32, Arithmetic.TFLOAT32)
    if row["device"] != "cuda" or precision.command is not None or row["switched_within"]:
        return
    mode = "tf32" if label is Arithmetic.TFLOAT32 else "ieee"
    for flag in row["flags"].split() if full else ():
        name, _, value = flag.partition("=")
        if name in ("matmul", "conv") and value != mode:
            yield f"{precision.precision} sets {name}={mode}, and the worker read {flag}"


def find_wrong_data(row: EvidenceRow) -> Iterator[str]:
    if row.case.dataset == "cifar10" and not row.case.input and row["workload"] == IMAGES:
        for column, right in CIFAR10.items():
            if row.has(column) and row[column] != right:
                yield f"{column} is {row[column]}, and CIFAR-10's is {right}"


def _any(words: str, *columns: str) -> Need:
    return Need(words, lambda row: any(map(row.has, columns)))


_SHEET = Need("a card whose data sheet is known", lambda row: find_peak(row["gpu"]) is not None)
_PEAKS = ("peak_device_bytes", "peak_process_bytes", "peak_reserved_bytes", "peak_allocated_bytes")
_RAN = _any("times of day", "started_at")  # set in each row that this harness measured

CLAIMS = (
    Claim("code", "the code is a commit's, unedited", find_unknown_code, _RAN),
    Claim("environment", "all rows are of one machine and one software", find_environments),
    Claim("plan", "every planned run ended, and none was cut off or left out", find_gaps, _RAN),
    Claim("order", "runs follow each other, each as long as its phases", find_disorder, _RAN),
    Claim(
        "copies",
        "no run is a copy of another",
        find_copies,
        Need("steps", lambda row: len(row.steps) > 0),
    ),
    Claim(
        "rates",
        "the machine's rates are possible",
        _of_rows(find_wrong_rates),
        Need(f"rates of {_SHEET.words}", lambda row: _SHEET.met(row) and any(map(row.has, RATES))),
    ),
    Claim("card", "memory and clocks are those of the card", _of_rows(find_wrong_card), _SHEET),
    Claim("speed", "no step is faster than its card can be", _of_rows(find_wrong_speed), _SHEET),
    Claim(
        "energy",
        "energy is power times time, within the limit",
        find_unlike_power,
        _any("energy", "energy_j"),
    ),
    Claim(
        "memory",
        "memory fits in memory",
        _of_rows(find_wrong_memory),
        _any("memory", *_PEAKS),
    ),
    Claim(
        "steps",
        "the steps add up to the row",
        _of_rows(find_wrong_steps),
        _any("steps", "measured_steps"),
    ),
    Claim(
        "epoch",
        "the epoch agrees with its setting, and with what was measured of it",
        lambda evidence: chain(_of_rows(find_wrong_epochs)(evidence), find_unlike(evidence)),
        _any("times", "epoch_time_s"),
    ),
    Claim(
        "learning",
        "loss and accuracy agree with the steps",
        find_wrong_learning,
        _any("a loss", "train_loss"),
    ),
    Claim(
        "work",
        "FLOP and bytes are the network's",
        _of_rows(find_wrong_work),
        _any("counted FLOP", "flop_per_image"),
    ),
    Claim(
        "profile",
        "the kernels of a step fit into it",
        find_wrong_profiles,
        _any("a profile", "busy_s"),
    ),
    Claim(
        "proof",
        "the arithmetic is that of the precision",
        _of_rows(find_wrong_proofs),
        _any("a probe of its arithmetic", "arithmetic"),
    ),
    Claim(
        "data",
        "the images are those that the rows name",
        _of_rows(find_wrong_data),
        _any("a hash of its data", "dataset_fingerprint"),
    ),
)


# ------------------------------------------------------------------------------------ the verdict

OK, _NOTHING, KNOWN, FAULT = "ok", "none", "known", "FAULT"
"""The results of a check; `_NOTHING` if a folder has no data for it."""


def read_known(sweep: SweepFolder) -> tuple[Path, dict[str, str]]:
    """Return the file `KNOWN_FAULTS` beside a folder, and what it accepts there: the reason of each
    check. Raises UsageError: it names a check that there is not."""
    place = sweep.path.resolve()
    file = place.parent / KNOWN_FAULTS
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    excuses = (line.split(": ", 2) for line in lines if line.startswith(f"{place.name}: "))
    known = {name: reason for _, name, reason in (part for part in excuses if len(part) == 3)}
    if strange := known.keys() - {claim.name for claim in CLAIMS}:
        raise UsageError(f"{file}: there is no check {', '.join(strange)}")
    return file, known


def validate(folder: Path) -> dict[str, Any]:
    """Check one folder.

    Returns:
        ``folder``, ``subject``, what it ``discloses`` and ``checks``, each with its ``name``,
        ``result`` (ok, none, known or FAULT), what it ``shows``, its ``faults`` and, if they are
        known, the ``reason``; without data for it, what it ``lacks``. ``ignored_known_faults`` is
        a file in the folder that would accept faults, and does not. Files that cannot be read are
        the one fault of a single check, ``schema``.
    """
    schema = {"name": "schema", "shows": "every file is as the harness wrote it"}
    own = folder / KNOWN_FAULTS
    about = {"folder": str(folder), "ignored_known_faults": str(own) if own.is_file() else ""}
    try:
        evidence = read_evidence(folder)
        file, known = read_known(evidence.sweep)
        if not evidence.runs:
            raise UsageError(f"{evidence.sweep.path} has no rows")
    except UsageError as error:
        fault = {**schema, "result": FAULT, "faults": [str(error)]}
        return {**about, "subject": "", "checks": [fault], "discloses": []}
    checks: list[dict[str, Any]] = [{**schema, "result": OK, "faults": []}]
    for claim in CLAIMS:
        found = {"name": claim.name, "shows": claim.shows, "faults": [*claim.find(evidence)]}
        found["result"] = FAULT if found["faults"] else OK
        need = None if found["faults"] else claim.need
        if need and not any(map(need.met, evidence.rows)):
            found |= {"result": _NOTHING, "lacks": need.words}
        if claim.name in known:
            found["reason"] = f"{known[claim.name]} ({file.name} beside the folder)"
            if found["faults"]:
                found["result"] = KNOWN
            else:
                found["result"] = FAULT
                found["faults"] = [f"{file} names it, and it has no fault; take it out"]
        checks.append(found)
    first = evidence.runs[0]
    foreign = "" if evidence.own else "; not measured by this harness"
    rows = count(len(evidence.runs), "row")
    torch = f", torch {first.torch}" if first.torch else ""  # a command may have none
    return {
        **about,
        "subject": f"{rows}, {first.machine}{torch}{foreign}",
        "checks": checks,
        "discloses": [
            f"{column} {name_first(values, 3)}"
            for column in ("host", "gpu_uuid", "variables")
            if (values := sorted({getattr(run, column) for run in evidence.runs} - {""}))
        ],
    }
