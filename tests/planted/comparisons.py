"""Pairs of small sweeps, each of which a comparison has one thing to say of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from bench.case import Case
from bench.record import Environment, Record, Status
from tests.planted.records import make_record

CASE = Case(dataset="synthetic", device="cpu")
SMALL = replace(CASE, batch_size=64)
FP16 = replace(CASE, precision="fp16", loss_scale=128.0)
BF16 = replace(CASE, precision="bf16-amp")
APEX = replace(CASE, precision="fp16-apex", loss_scale=128.0)
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
    told = {"environment": HERE, "epoch_time_s": epoch_time_s, **values}
    name = f"{case.slug()}-{repeat}-{values.get('attempt', 1)}-{values.get('sentinel')}"
    return make_record(case, **{"record_id": name, **told, "repeat": repeat})


def rows(case: Case, **values: Any) -> list[Record]:
    """A row of each repeat: of values in a sequence each repeat has its own."""
    each = {name: told for name, told in values.items() if isinstance(told, list | tuple)}
    own = zip(*each.values(), strict=True)
    common = {"epoch_time_s": None, **values}
    return [
        record(case, i, **common | dict(zip(each, told, strict=True)))
        for i, told in enumerate(own, 1)
    ]


def runs(case: Case, times: Iterable[float], **values: Any) -> list[Record]:
    """A row of each time."""
    return rows(case, epoch_time_s=[*times], **values)


def losses(values: Sequence[float], seeds: Sequence[int]) -> list[Record]:
    """A row of each training loss and seed."""
    return rows(CASE, run_seed=seeds, train_loss=values, peak_device_bytes=2**30)


def with_losses(
    case: Case, losses: Sequence[float], seeds: Sequence[int] = tuple(range(9))
) -> list[Record]:
    """The same with the error of a test."""
    accuracies = [1 - loss / 4 for loss in losses]
    return rows(case, run_seed=seeds[: len(losses)], train_loss=losses, test_accuracy=accuracies,
                epoch_time_s=1.0)  # fmt: skip


def measured(**values: Any) -> list[Record]:
    """Runs under known conditions, with other values of some."""
    common = {"power_limit_w": 700.0, "sm_clock_mhz": 1980.0, "memory_clock_mhz": 3201.0}
    common |= {"step_time_first_s": 0.1, "step_time_last_s": 0.1, "measured_steps": 390}
    common |= {"warmup_steps": 40, "warmup_steady": True}
    return runs(CASE, BASE, environment=CARD, **{**common, **values})


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
        about: what is to be seen.
        command: the arguments of `bench.compare`; the sweeps have their names.
        finds: what is found, as tests/test_comparisons.py tells it.
        sweeps: the rows of each.
    """

    about: str
    command: str
    finds: str
    sweeps: Mapping[str, Sequence[Record]]


def plant(about: str, command: str, finds: str, **sweeps: Iterable[Record]) -> Comparison:
    """A comparison of sweeps."""
    return Comparison(about, command, finds, {name: list(rows) for name, rows in sweeps.items()})


def both(gpu: str, a: Sequence[float], b: Sequence[float]) -> list[Record]:
    """fp32 and bf16-amp on a GPU."""
    other = [replace(row, case=BF16, record_id=f"b{row.record_id}") for row in on(gpu, b)]
    return on(gpu, a) + other


def end(statuses: str) -> list[Record]:
    """Runs that ended so, with all that is compared."""
    ended = [Status(status) for status in statuses.split()]
    return runs(CASE, BASE, status=ended, energy_j=BASE, train_loss=2.0, peak_device_bytes=2**30)


def noisy(case: Case, last: bool, environment: Environment) -> list[Record]:
    """Runs of which everything is doubted."""
    parts = range(1, 1 + len(BASE))
    return runs(
        at(case, channels_last=last),
        [time * (1 + i / 7) for i, time in zip(parts, BASE, strict=True)],
        environment=environment,
        train_loss=[2 + i / 9 for i in parts],
        test_accuracy=[i / 9 for i in parts],
        other_cores=3.0,
        warmup_steps=4,
        warmup_steady=False,
    )


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
ATTIC = replace(HERE, host="attic", torch="2.9.1", train_images=40000)
LEVELS = [at(APEX, opt_level=level) for level in ("O2", "O1")]
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
        "Something of everything.",
        "a b",
        "epoch_time_s: slower 0.926 (5:5), no verdict 1 (1:1), no verdict (5:0); differ: "
        "torch!; outcomes: broken; only in: a 1",
        a=runs(CASE, BASE) + runs(SMALL, BASE[:1]) + runs(FP16, BASE) + runs(FULL, BASE),
        b=[*runs(CASE, SLOWER, environment=replace(HERE, torch="2.9.1")), *runs(SMALL, BASE[:1]),
           *(record(FULL, i, None, status=Status.OOM, inferred=i > 1) for i in range(1, 4))],
    ),
    "higher": plant("Each metric has its words: slower, more, higher.", "a b",
        "epoch_time_s: slower 0.909 (3:3); peak_process_bytes: more 1.1 (3:3); train_loss: "
        "higher 1.1 (3:3); energy_j: more 1.1 (3:3); train_loss: worse over 3",
        **WORDS),
    "errors": plant(
        "Accuracies are compared as errors: half, lower.",
        "a b --metric train_top1_error",
        "train_top1_error: lower 0.5 (3:3); train_top1_error: better over 3",
        a=rows(CASE, train_accuracy=[0.20, 0.21, 0.19]),
        b=rows(CASE, train_accuracy=[0.60, 0.61, 0.59]),
    ),
    "attempts": plant(
        "Latest attempts count and sentinels do not: 5 runs of 20 s.",
        "a a",
        "epoch_time_s: same 1 (5:5)",
        a=[record(CASE, 1, 20.0, attempt=2), *runs(CASE, BASE)[1:],
           record(CASE, 2, 99.0, sentinel=True), record(CASE, 1, None, status=Status.ERROR)],
    ),
    "zero": plant(
        "Of a zero there is no ratio; one of A's values is missing.",
        "a b",
        "energy_j: no verdict (3:3)",
        a=rows(CASE, energy_j=[5, 6, 7, None]),
        b=rows(CASE, energy_j=[5, 0, 7]),
    ),
    "a seed of one side": plant(
        "B was interrupted before its third seed, which is far off: the first two are equal, and "
        "the means are theirs.",
        "a b --metric train_loss",
        "train_loss: no verdict 1 (3:2); train_loss: cannot tell over 2",
        a=losses([2.0, 2.1, 1.0], [0, 1, 2]), b=losses([2.0, 2.1], [0, 1]),
    ),
    "conditions": plant(
        "All conditions differ; those that spoil times are warned of.",
        "a b",
        "epoch_time_s: same 1 (5:5); spoilt: throttled in B, contended in B, noisy in B, trend "
        "in B; differ: power_limit_w, sm_clock_mhz, memory_clock_mhz",
        a=measured(),
        b=measured(power_limit_w=350.0, sm_clock_mhz=1935.0, memory_clock_mhz=2619.0,
                   throttle_during="hardware thermal slowdown", neighbours_computing=1,
                   other_cores=0.5, warmup_steady=False, step_time_last_s=0.104),
    ),
    "alike": plant(
        "Clocks within 1 %, an idle neighbour, a voltage, a tenth of a core, a profile on one side "
        "are no difference.",
        "a b",
        "epoch_time_s: same 1 (5:5)",
        a=measured(**ALIKE),
        b=measured(**{**ALIKE, "sm_clock_mhz": 1965.0, "memory_clock_mhz": 3202.0,
                      "other_cores": 0.1, "throttle_during": "voltage reliability",
                      "busy_s": 0.07, "step_time_median_s": 0.1}),
    ),
    "clocks of others": plant(
        "Another precision runs at another clock: that is no difference of the machine.",
        "a b",
        "epoch_time_s: same 1 (5:5); only in: b 1",
        a=measured(),
        b=measured() + [replace(row, case=FP16) for row in measured(sm_clock_mhz=1400.0)],
    ),
    "one of two cards": plant(
        "Runs of one case on two cards are not pooled: compared with its own, same.",
        "a b",
        "epoch_time_s: same 1 (5:5); differ: gpu!; only in: a 1",
        a=MIXED, b=on("X", BASE),
    ),
    "neither card": plant(
        "None has an equal, and the gate could judge nothing.",
        "a b --fail-on slower",
        "differ: gpu!; only in: a 2, b 1; slower failed: 0 judged, 0 not; rc 1",
        a=MIXED, b=on("Z", BASE),
    ),
    "newer driver": plant(
        "What varies beside the GPU does not part its cases.",
        "a b",
        "epoch_time_s: same 1 (5:5); differ: gpu!, driver!; only in: a 1",
        a=on("X", BASE, driver="1") + on("Y", TWICE, driver="2"),
        b=on("X", BASE, driver="3"),
    ),
    "two drivers": plant(
        "Two drivers of one GPU are two environments, and neither is B's.",
        "a b",
        "differ: driver!; only in: a 2, b 1",
        a=on("X", BASE, driver="1") + on("X", TWICE, driver="2"),
        b=on("X", BASE, driver="3"),
    ),
    "unknown machine": plant(
        "A run that failed before it knew its machine is of no other: fixed.",
        "a b",
        "epoch_time_s: same 1 (4:5); outcomes: fixed",
        a=[*on("X", BASE[:4]), record(CASE, 5, None, status=Status.ERROR,
                                      environment=Environment())],
        b=on("X", BASE),
    ),
    "diverged": plant(
        "What diverged counts for time and memory alone.",
        "a b",
        "epoch_time_s: same 1 (5:5); peak_device_bytes: same 1 (5:5); train_loss: no verdict "
        "(5:0); energy_j: no verdict (5:0); outcomes: broken",
        a=end("ok ok ok ok ok"), b=end("diverged diverged diverged diverged diverged"),
    ),
    "invalid": plant(
        "What is invalid counts for nothing.",
        "a b",
        "epoch_time_s: no verdict (5:0); peak_device_bytes: no verdict (5:0); train_loss: no "
        "verdict (5:0); energy_j: no verdict (5:0); outcomes: broken",
        a=end("ok ok ok ok ok"), b=end("invalid invalid invalid invalid invalid"),
    ),
    "one side": plant(
        "Cases on one side are listed, and fail a gate.",
        "a b --fail-on missing",
        "epoch_time_s: same 1 (5:5); only in: a 1, b 1; missing failed: 2 judged, 0 not; rc 1",
        a=runs(CASE, BASE) + runs(SMALL, BASE), b=runs(CASE, BASE) + runs(FP16, BASE),
    ),
    "no common case": plant(
        "The axis that parts them is named.", "a b",
        "epoch_time_s: same 1 (5:5)",
        a=runs(CASE, BASE),
        b=runs(at(CASE, lr=0.1), BASE),
    ),
    "environments": plant(
        "Differing ones come first, and what must agree before the rest.",
        "a b",
        "epoch_time_s: no verdict 2 (5:1); differ: torch!, host, train_images; only in: b 1",
        a=runs(CASE, BASE), b=[*runs(CASE, BASE[:3], environment=ATTIC), record(CASE, 4)],
    ),
    "an edited network": plant(
        "Of one network, with --mix, two are.",
        "a b --mix",
        "epoch_time_s: same 1 (4:5); differ: model_source!; only in: a 1",
        **{
            name: [
                replace(row, environment=replace(HERE, model_source=source))
                for row, source in zip(runs(CASE, BASE), sources, strict=True)
            ]
            for name, sources in (("a", "cbbbb"), ("b", "bbbbb"))
        },
    ),
    "not known": plant("An executor that this version does not have may have measured or not.",
                       "a b",
        "epoch_time_s: same 1 (5:5); origin: unknown",
        a=runs(CASE, BASE, executor="x"), b=runs(CASE, BASE, executor="x")),
    "equal to the last digit": plant(
        "There are enough repeats: more of them are not asked for.", "a b",
        "epoch_time_s: no verdict 1 (3:3)",
        a=runs(CASE, [1.0] * 3), b=runs(CASE, [1.0] * 3),
    ),
    "axis": plant(
        "Two values of an axis within a sweep: 1.25× and the same; one case has no partner.",
        "a --axis precision fp32 bf16-amp",
        "axis: precision; epoch_time_s: faster 1.25 (5:5), same 1 (5:5); only in: b 1",
        a=[*runs(CASE, BASE), *runs(BF16, FASTER), *runs(SMALL, BASE), *runs(AT_64, BASE),
           *runs(at(BF16, batch_size=32), BASE), *runs(FP16, TWICE)],
    ),
    "axis over two sweeps": plant(
        "The first value is of A, the second of B.",
        "a b --axis precision fp32 bf16-amp",
        "axis: precision; epoch_time_s: faster 1.25 (5:5)",
        a=[*runs(CASE, BASE), *runs(FP16, BASE)], b=[*runs(BF16, FASTER), *runs(CASE, TWICE)],
    ),
    "main loss scale": plant(
        "Of several loss scales the main one is compared: the default where it was run.",
        "a --axis precision fp32 fp16",
        "axis: precision; epoch_time_s: slower 0.0781 (5:5), faster 1.25 (5:5)",
        a=[*runs(CASE, BASE), *runs(SMALL, BASE),
           *runs(at(FP16, loss_scale=64.0), [*BASE, *BASE, *BASE]),
           *runs(FP16, [12.8 * t for t in BASE]),
           *runs(at(FP16, loss_scale=256.0, batch_size=64), FASTER)],
    ),
    "opt levels": plant(
        "Of fp16-apex the runs without an opt level stand for it; the others are named.",
        "a --axis precision fp32 fp16-apex",
        "axis: precision; epoch_time_s: same 1 (5:5)",
        a=[*runs(CASE, BASE), *runs(LEVELS[0], FASTER), *runs(APEX, BASE),
           *runs(LEVELS[1], FASTER)],
    ),
    "a fraction": plant(
        "It need not match for times, but for losses and energy.",
        "a --axis precision",
        "axis: precision; epoch_time_s: faster 1.25 (5:5); peak_process_bytes: same 1 (5:5); "
        "train_loss: no verdict (5:5); energy_j: no verdict (5:5)",
        a=[*measured_on(CASE, 1.0, BASE), *measured_on(BF16, 0.25, FASTER)],
    ),
    "equal fractions": plant(
        "They are matched first, and then all is compared.",
        "a --axis precision",
        "axis: precision; epoch_time_s: faster 1.25 (5:5); peak_process_bytes: same 1 (5:5); "
        "train_loss: same 1 (5:5); energy_j: less 0.8 (5:5); train_loss: equivalent over 5; "
        "only in: a 1",
        a=[*measured_on(CASE, 1.0, BASE), *measured_on(CASE, 0.25, BASE),
           *measured_on(BF16, 0.25, FASTER)],
    ),
    "equal images": plant(
        "40 steps at batch size 64 are of as many images as 20 at 128; what was learnt by then is "
        "no effect of the batch size.",
        "a --axis batch_size 128 64",
        "axis: batch_size; epoch_time_s: same 1 (5:5); peak_process_bytes: same 1 (5:5); "
        "train_loss: no verdict (5:5); energy_j: same 1 (5:5); only in: a 1, b 1",
        a=[*STEPS, *trained(SMALL, 20, 800, BASE), *trained(SMALL, 40, 800, BASE)],
    ),
    "unequal images": plant(
        "None is equal: those that were asked for alike, whose losses are not compared.",
        "a --axis batch_size 128 64",
        "axis: batch_size; epoch_time_s: same 1 (5:5); peak_process_bytes: same 1 (5:5); "
        "train_loss: no verdict (5:5); energy_j: no verdict (5:5); only in: a 1",
        a=[*STEPS, *trained(SMALL, 20, 800, BASE)],
    ),
    "each number of steps": plant(
        "Whole epochs, a few steps, and more steps than there are, each with its like; of 30 one "
        "side ran out of memory.",
        "a --axis precision",
        "axis: precision; epoch_time_s: faster 1.25 (5:5) ×3, no verdict (5:0); "
        "peak_process_bytes: same 1 (5:5) ×3, no verdict (5:0); train_loss: same 1 (5:5) ×3, no "
        "verdict (5:0); energy_j: less 0.8 (5:5) ×3, no verdict (5:0); train_loss: equivalent "
        "over 5 ×3; outcomes: broken",
        a=[*chain.from_iterable(
            (*measured_on(case, 1.0, times), *trained(case, 20, 400, times),
             *trained(case, 500, 400, times))
            for case, times in ((CASE, BASE), (BF16, FASTER))),
           *trained(at(CASE, steps=30), 30, 400, BASE),
           record(at(BF16, steps=30), 1, None, status=Status.OOM)],
    ),
    "machines": plant(
        "Values run on several machines are matched by machine: faster, slower.",
        "a --axis precision",
        "axis: precision; epoch_time_s: faster 1.25 (5:5), slower 0.5 (5:5); differ: gpu!",
        a=both("X", BASE, FASTER) + both("Y", TWICE, tuple(4 * t for t in BASE)),
    ),
    "nothing but the axis": plant(
        "They share no batch size.",
        "a --axis precision",
        "axis: precision; only in: a 1, b 1",
        a=[*runs(CASE, BASE), *runs(AT_64, BASE)],
    ),
    "equivalence": plant(
        "Of losses and errors: equivalent, worse, cannot tell, and what would.",
        "a --axis precision",
        "axis: precision; epoch_time_s: no verdict 1 (5:5) ×3; train_loss: same 1 (5:5), higher "
        "1.1 (5:5), ambiguous 1.02 (5:5); test_top1_error: same 1 (5:5), higher 1.1 (5:5), "
        "ambiguous 1.02 (5:5); train_loss: equivalent over 5, worse over 5, cannot tell over 5; "
        "test_top1_error: equivalent over 5, worse over 5, cannot tell over 5",
        a=EQUALLY_FAR,
    ),
    "guessing": plant(
        "ln 10 is 2.303: equal losses of networks that guess show nothing; a network that learnt "
        "against one that guesses is a finding all the same.",
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
    "equivalence of a seed": plant(
        "One seed cannot show it; five would.",
        "a --axis precision --metric train_loss",
        "axis: precision; train_loss: no verdict 1 (5:5); train_loss: cannot tell over 1",
        a=[*with_losses(CASE, LOSSES, [0] * 5), *with_losses(BF16, LOSSES, [0] * 5)],
    ),
    "gate of wild times": plant(
        "0.45, from 0.02 to 8.6, is no proof that nothing became 5 % slower.",
        "a b --fail-on slower:5%",
        "epoch_time_s: ambiguous 1.98 (3:3); slower:5% failed: 0 judged, 1 not; rc 1",
        a=runs(CASE, [30.0, 600.0, 330.0]), b=runs(CASE, [65.0, 37.0, 318.0]),
    ),
    "gate of some": plant(
        "It says how many cases it could not judge.",
        "a a --fail-on slower",
        "epoch_time_s: same 1 (5:5), no verdict 1 (1:1) ×2; slower passed: 1 judged, 2 not",
        a=[*runs(CASE, BASE), *runs(SMALL, BASE[:1]), *runs(at(CASE, batch_size=32), BASE[:1])],
    ),
    "every table": plant(
        "Every kind of table and line: environments, conditions, losses, equivalence, spoilt ones.",
        "a --axis channels_last",
        "axis: channels_last; epoch_time_s: ambiguous 1 (5:5) ×3; train_loss: no verdict 1 "
        "(5:5) ×3; test_top1_error: no verdict 1 (5:5) ×3; train_loss: cannot tell over 5 ×3; "
        "test_top1_error: cannot tell over 5 ×3; spoilt: contended in off, noisy in off, "
        "contended in on, noisy in on; differ: gpu!, torch!",
        a=[row for case in (CASE, at(SMALL, compile="default"), at(BF16, model="a.networks:large"))
           for last in (False, True)
           for row in noisy(case, last, replace(HERE, gpu="NVIDIA GeForce RTX 4090 Laptop GPU",
                                                torch="2.11.0+cu130") if last else HERE)],
    ),
}  # fmt: skip
"""By name."""
