"""Sweeps of which a comparison has one thing to say, and what it finds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.schema.case import Case
from bench.schema.record import Environment, Record, Status
from bench.schema.rules import settle
from tests.planted.records import make_record, write_sweep

CASE = Case(dataset="synthetic", device="cpu")
SMALL = replace(CASE, batch_size=64)
FP16 = replace(CASE, precision="fp16", loss_scale=128.0)
BF16 = replace(CASE, precision="bf16-amp")
HERE = Environment(torch="2.13.0", python="3.12.1", host="lab", train_images=50000)
CARD = replace(HERE, gpu="NVIDIA X", driver="580.1")

BASE = (20.0, 20.1, 19.9, 20.04, 19.96)
SLOWER = tuple(1.08 * t for t in BASE)
FASTER = tuple(0.8 * t for t in BASE)
TWICE = tuple(2 * t for t in BASE)


def at(case: Case, **axes: Any) -> Case:
    """The case with other values of some axes."""
    return replace(case, **axes)


def record(case: Case, repeat: int, epoch_time_s: float | None = 10.0, **values: Any) -> Record:
    """A row as a sweep writes it."""
    defaults = {"environment": HERE, "epoch_time_s": epoch_time_s, **values}
    name = f"{case.slug()}-{repeat}-{values.get('attempt', 1)}-{values.get('sentinel')}"
    return make_record(case, **{"record_id": name, **defaults, "repeat": repeat})


def rows(case: Case, **values: Any) -> list[Record]:
    """A row of each repeat: of values in a sequence each repeat has its own."""
    each = {name: value for name, value in values.items() if isinstance(value, list | tuple)}
    common = {"epoch_time_s": None, **values}
    return [
        record(case, i, **common | dict(zip(each, own, strict=True)))
        for i, own in enumerate(zip(*each.values(), strict=True), 1)
    ]


def runs(case: Case, times: Iterable[float], **values: Any) -> list[Record]:
    """A row of each time."""
    return rows(case, epoch_time_s=[*times], **values)


def with_losses(case: Case, losses: Sequence[float]) -> list[Record]:
    """A row of each training loss, with a seed and the error of a test."""
    accuracies, seeds = [1 - loss / 4 for loss in losses], [*range(len(losses))]
    return rows(case, run_seed=seeds, train_loss=losses, test_accuracy=accuracies,
                epoch_time_s=1.0)  # fmt: skip


ON_GPUS = settle({"command": "torchrun t.py {gpus}", "vary": "gpus=1", "device": "cuda"})


def measured(**values: Any) -> list[Record]:
    """Runs under known conditions, with other values of some."""
    common = {"power_limit_w": 700.0, "sm_clock_mhz": 1980.0, "memory_clock_mhz": 3201.0}
    common |= {"step_time_first_s": 0.1, "step_time_last_s": 0.1, "measured_steps": 390}
    common |= {"warmup_steps": 40, "warmup_steady": True}
    return runs(CASE, BASE, environment=CARD, **{**common, **values})


def at_limit(watts: float, **axes: Any) -> list[Record]:
    """Runs of a case at a power limit, in W, that all its GPUs have together."""
    return runs(at(CASE, device="cuda", **axes), BASE, environment=CARD, power_limit_w=watts)


def on(gpu: str, times: Iterable[float], attempt: int = 1, **environment: str) -> list[Record]:
    """Runs on a GPU."""
    here = replace(CARD, gpu=gpu, **environment)
    return [
        replace(row, record_id=f"{row.record_id}-{gpu}-{environment}")
        for row in runs(CASE, times, environment=here, attempt=attempt)
    ]


def measured_on(case: Case, fraction: float, times: Sequence[float]) -> list[Record]:
    """Runs of a part of an epoch, with all that is compared."""
    learnt = [2 + i / 100 for i, _ in enumerate(times, 1)]
    return runs(at(case, fraction=fraction), times, train_loss=learnt, energy_j=times,
                peak_process_bytes=2**30)  # fmt: skip


def trained(case: Case, steps: int, of: int, times: Sequence[float]) -> list[Record]:
    """Runs with --steps, of an epoch of so many."""
    rows = measured_on(at(case, steps=steps), case.fraction, times)
    for row in rows:
        row.measurement.measured_steps, row.measurement.steps_per_epoch = min(steps, of), of
    return rows


@dataclass(frozen=True)
class Comparison:
    """Sweeps, and what a comparison of them is asked.

    Attributes:
        command: the arguments of `bench.compare`; the sweeps have their names.
        finds: what is found, as tests/commands/test_compare.py tells it.
        sweeps: the rows of each.
    """

    command: str
    finds: str
    sweeps: Mapping[str, Sequence[Record]]

    def write(self, folder: Path) -> None:
        """Write each sweep into a folder of its name."""
        for name, rows in self.sweeps.items():
            write_sweep(folder / name, rows)


def plant(command: str, finds: str, **sweeps: Iterable[Record]) -> Comparison:
    """A comparison of sweeps."""
    return Comparison(command, finds, {name: list(rows) for name, rows in sweeps.items()})


def both(gpu: str, a: Sequence[float], b: Sequence[float]) -> list[Record]:
    """fp32 and bf16-amp on a GPU."""
    other = [replace(row, case=BF16, record_id=f"b{row.record_id}") for row in on(gpu, b)]
    return on(gpu, a) + other


JITTER = (1, 1.001, 0.999)
LOSSES = (2.00, 2.20, 1.90, 2.10, 2.05)
NEAR = [x * y for x, y in zip(LOSSES, (1.001, 1.004, 0.998, 1.000, 1.003), strict=True)]
GUESSING = [2.309, 2.310, 2.308]
WORDS = {
    name: rows(
        CASE, peak_process_bytes=int(2**30 * factor),
        **{column: [size * factor * x for x in JITTER]
           for column, size in (("epoch_time_s", 10), ("train_loss", 2), ("energy_j", 500))},
    )
    for name, factor in (("a", 1), ("b", 1.1))
}  # fmt: skip
FULL = at(CASE, batch_size=512)
MIXED = on("X", BASE) + on("Y", TWICE, attempt=2)
ALIKE = {"other_cores": 0.0, "neighbours_computing": 0}
STEPS = [*trained(CASE, 20, 400, BASE), *trained(CASE, 30, 400, BASE)]
AT_64 = at(BF16, batch_size=64)
EQUALLY_FAR = [
    *with_losses(CASE, LOSSES), *with_losses(BF16, NEAR), *with_losses(SMALL, LOSSES),
    *with_losses(AT_64, [1.1 * x for x in NEAR]), *with_losses(at(CASE, batch_size=32), LOSSES),
    *with_losses(at(BF16, batch_size=32), [1.018 * x for x in NEAR]),
]  # fmt: skip

COMPARISONS = {
    "everything": plant(
        "a b",
        "epoch_time_s: slower 0.926 (5:5), no verdict 1 (1:1), no verdict (5:0); differ: "
        "torch; outcomes: broken; only in: a 1",
        a=runs(CASE, BASE) + runs(SMALL, BASE[:1]) + runs(FP16, BASE) + runs(FULL, BASE),
        b=[*runs(CASE, SLOWER, environment=replace(HERE, torch="2.9.1")), *runs(SMALL, BASE[:1]),
           *(record(FULL, i, None, status=Status.OOM, inferred=i > 1) for i in range(1, 4))],
    ),
    "Each metric has its words: slower, more, higher": plant(
        "a b",
        "epoch_time_s: slower 0.909 (3:3); peak_process_bytes: more 1.1 (3:3); train_loss: "
        "higher 1.1 (3:3); energy_j: more 1.1 (3:3); train_loss: worse over 3",
        **WORDS,
    ),
    "Accuracies are compared as errors: half, lower": plant(
        "a b --metric train_top1_error",
        "train_top1_error: lower 0.5 (3:3); train_top1_error: better over 3",
        a=rows(CASE, train_accuracy=[0.20, 0.21, 0.19]),
        b=rows(CASE, train_accuracy=[0.60, 0.61, 0.59]),
    ),
    "Latest attempts count and drift checks do not: 5 runs of 20 s": plant(
        "a a",
        "epoch_time_s: same 1 (5:5)",
        a=[record(CASE, 1, 20.0, attempt=2), *runs(CASE, BASE)[1:],
           record(CASE, 2, 99.0, sentinel=True), record(CASE, 1, None, status=Status.ERROR)],
    ),
    "conditions": plant(
        "a b",
        "epoch_time_s: same 1 (5:5); spoilt: throttled in B, shared in B; "
        "differ: power_limit_w, sm_clock_mhz, memory_clock_mhz",
        a=measured(),
        b=measured(power_limit_w=350.0, sm_clock_mhz=1935.0, memory_clock_mhz=2619.0,
                   throttle_during="hardware thermal slowdown", neighbours_computing=1,
                   other_cores=0.5, warmup_steady=False, step_time_last_s=0.104),
    ),
    "Another card of its kind, beside other lanes, with other threads and from elsewhere": plant(
        "a b",
        "epoch_time_s: same 1 (5:5); differ: kind, gpu_uuid, cpu_governor, torch_threads, "
        "lanes_beside; origin: unknown",
        a=runs(CASE, BASE, environment=replace(CARD, gpu_uuid="GPU-1", torch_threads=8,
                                               cpu_governor="performance", ecc="on")),
        b=[replace(row, executor="loop")
           for row in runs(CASE, BASE, lanes_beside=1,
                           environment=replace(CARD, gpu_uuid="GPU-2", torch_threads=4,
                                               cpu_governor="powersave"))],
    ),
    "The limit of two GPUs is twice that of one: no other condition": plant(
        "a --axis world_size 2 4",
        "axis: world_size; epoch_time_s: same 1 (5:5)",
        a=[*at_limit(1400.0, parallel="ddp", world_size=2),
           *at_limit(2800.0, parallel="ddp", world_size=4)],
    ),
    "Nor is the limit that was asked for, of two that are compared": plant(
        "a --axis power_limit 700 500",
        "axis: power_limit; epoch_time_s: same 1 (5:5)",
        a=[*at_limit(700.0, power_limit=700), *at_limit(500.0, power_limit=500)],
    ),
    # three runs tell it, in their interval
    "noise of two runs": plant(
        "a b",
        "epoch_time_s: no verdict 0.998 (5:2); spoilt: noisy in B",
        a=measured(step_time_last_s=0.104),
        b=measured(step_time_last_s=0.104)[:2],
    ),
    "Clocks within 1 %, an idle neighbour, a voltage, a profile are no difference": plant(
        "a b",
        "epoch_time_s: same 1 (5:5)",
        a=measured(**ALIKE),
        b=measured(**{**ALIKE, "sm_clock_mhz": 1965.0, "memory_clock_mhz": 3202.0,
                      "other_cores": 0.1, "throttle_during": "voltage reliability",
                      "busy_s": 0.07, "step_time_median_s": 0.1}),
    ),
    "Runs of one case on two cards are not pooled: compared with its own, same": plant(
        "a b",
        "epoch_time_s: same 1 (5:5); differ: gpu; only in: a 1",
        a=MIXED, b=on("X", BASE),
    ),
    "Of two cards none is by chance the one that a third is compared with": plant(
        "a b",
        "differ: gpu; only in: a 2, b 1",
        a=MIXED, b=on("Z", BASE),
    ),
    "What diverged counts for time and memory alone": plant(
        "a b",
        "epoch_time_s: same 1 (5:5); peak_device_bytes: same 1 (5:5); train_loss: no verdict "
        "(5:0); energy_j: no verdict (5:0); outcomes: broken",
        **{name: runs(CASE, BASE, status=status, energy_j=BASE, train_loss=2.0,
                      peak_device_bytes=2**30)
           for name, status in (("a", Status.OK), ("b", Status.DIVERGED))},
    ),
    "one side": plant(
        "a b --fail-on missing",
        "epoch_time_s: same 1 (5:5); only in: a 1, b 1; missing failed: 2 judged, 0 not; rc 1",
        a=runs(CASE, BASE) + runs(SMALL, BASE), b=runs(CASE, BASE) + runs(FP16, BASE),
    ),
    "An executor that this version does not have may have measured or not": plant(
        "a b",
        "epoch_time_s: same 1 (5:5); origin: unknown",
        a=runs(CASE, BASE, executor="x"), b=runs(CASE, BASE, executor="x"),
    ),
    "axis": plant(
        "a --axis precision fp32 bf16-amp",
        "axis: precision; epoch_time_s: faster 1.25 (5:5), same 1 (5:5); only in: b 1",
        a=[*runs(CASE, BASE), *runs(BF16, FASTER), *runs(SMALL, BASE), *runs(AT_64, BASE),
           *runs(at(BF16, batch_size=32), BASE), *runs(FP16, TWICE)],
    ),
    "Two GPUs may take twice the power: of each the limit is the same": plant(
        "a --axis parallel none ddp",
        "axis: parallel; epoch_time_s: faster 1.25 (5:5); differ: world_size",
        a=[*at_limit(700.0), *runs(at(CASE, device="cuda", parallel="ddp", world_size=2), FASTER,
                                   environment=CARD, power_limit_w=1400.0)],
    ),
    "Nor is it of as many GPUs as a command was seen on": plant(
        "a --axis gpus 1 2",
        "axis: gpus; epoch_time_s: no verdict (5:5)",
        a=[*runs(ON_GPUS, BASE, power_limit_w=700.0),
           *runs(at(ON_GPUS, vary="gpus=2"), BASE, power_limit_w=1400.0, gpus=2)],
    ),
    "A fraction need not match for times, but for losses and energy": plant(
        "a --axis precision",
        "axis: precision; epoch_time_s: faster 1.25 (5:5); peak_process_bytes: same 1 (5:5); "
        "train_loss: no verdict (5:5); energy_j: no verdict (5:5)",
        a=[*measured_on(CASE, 1.0, BASE), *measured_on(BF16, 0.25, FASTER)],
    ),
    "Equal fractions are matched first": plant(
        "a --axis precision",
        "axis: precision; epoch_time_s: faster 1.25 (5:5); peak_process_bytes: same 1 (5:5); "
        "train_loss: same 1 (5:5); energy_j: less 0.8 (5:5); train_loss: equivalent over 5",
        a=[*measured_on(CASE, 1.0, BASE), *measured_on(CASE, 0.25, BASE),
           *measured_on(BF16, 0.25, FASTER)],
    ),
    "Of equal images neither, before the end of an epoch": plant(
        "a --axis batch_size 128 64",
        "axis: batch_size; epoch_time_s: same 1 (5:5); peak_process_bytes: same 1 (5:5); "
        "train_loss: no verdict (5:5); energy_j: same 1 (5:5)",
        a=[*STEPS, *trained(SMALL, 20, 800, BASE), *trained(SMALL, 40, 800, BASE)],
    ),
    "Values run on several machines are matched by machine: faster, slower": plant(
        "a --axis precision",
        "axis: precision; epoch_time_s: faster 1.25 (5:5), slower 0.5 (5:5)",
        a=both("X", BASE, FASTER) + both("Y", TWICE, tuple(4 * t for t in BASE)),
    ),
    "equivalence": plant(
        "a --axis precision",
        "axis: precision; epoch_time_s: no verdict 1 (5:5) ×3; train_loss: same 1 (5:5), higher "
        "1.1 (5:5), ambiguous 1.02 (5:5); test_top1_error: same 1 (5:5), higher 1.1 (5:5), "
        "ambiguous 1.02 (5:5); train_loss: equivalent over 5, worse over 5, cannot tell over 5; "
        "test_top1_error: equivalent over 5, worse over 5, cannot tell over 5",
        a=EQUALLY_FAR,
    ),
    "Equal losses of guessing, ln 10, show nothing": plant(
        "a --axis precision",
        "axis: precision; epoch_time_s: no verdict 1 (3:3) ×3; train_loss: no verdict 1 (3:3), "
        "higher 1.53 (3:3), same 1 (3:3); test_top1_error: no verdict 1 (3:3), higher 1.53 "
        "(3:3), same 1 (3:3); train_loss: cannot tell over 3, worse over 3, equivalent over 3; "
        "test_top1_error: cannot tell over 3, worse over 3, equivalent over 3",
        a=[*with_losses(CASE, GUESSING), *with_losses(BF16, GUESSING),
           *with_losses(SMALL, [x - 0.8 for x in GUESSING]), *with_losses(AT_64, GUESSING),
           *with_losses(at(CASE, batch_size=32), [x - 0.1 for x in GUESSING]),
           *with_losses(at(BF16, batch_size=32), [x - 0.1 for x in GUESSING])],
    ),
    "A wild time is no proof that nothing became slower": plant(
        "a b --fail-on slower:5%",
        "epoch_time_s: ambiguous 5.08 (3:3); slower:5% failed: 0 judged, 1 not; rc 1",
        a=runs(CASE, [30.0, 600.0, 330.0]), b=runs(CASE, [65.0, 37.0, 318.0]),
    ),
}  # fmt: skip
"""By name, or by what is to be seen."""
