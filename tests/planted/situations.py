"""Small sweeps, each of which a report has one thing to say of, and the parts that say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean
from typing import Any

from bench import anchors
from bench.case import Case
from bench.record import BESIDE, EpochRow, Record, Status
from bench.workloads import OWN
from tests.planted.records import GIB, Row, make_record, measured, ran
from tests.planted.sweeps import (
    LINES,
    PROBES,
    list_scaling,
    make_card,
    make_gpus_records,
    make_probe,
    make_scaled_case,
    time_step,
)

FP32, FP16 = Case(), Case(precision="fp16", loss_scale=128.0)
AMP = Case(precision="fp16-amp", loss_scale="dynamic")
COMPILED = replace(FP32, compile="default")
THREE = (100, 101, 99)
HALF = (50, 51, 49)


@dataclass(frozen=True)
class Situation:
    """A sweep in which there is one thing to see.

    Attributes:
        about: what is to be seen.
        rows: the records of the sweep.
        parts: what of the report is kept: names of sections; ``answers``, ``doubts`` and ``notes``;
            or ``numbers``, which are those behind the effects.
        config: what the sweep's ``config.json`` has, if it has one.
    """

    about: str
    rows: Sequence[Row]
    parts: tuple[str, ...]
    config: Mapping[str, Any] | None = None


def plant(about: str, parts: str, *rows: Sequence[Row], **config: Any) -> Situation:
    """A situation of several runs of cases."""
    return Situation(about, list(chain(*rows)), tuple(parts.split()), config or None)


def at(batch: int, *cases: Case) -> list[Case]:
    """Cases with another batch size."""
    return [replace(case, batch_size=batch) for case in cases]


def learn(case: Case, losses: Mapping[int, float] | Sequence[float], **values: Any) -> list[Record]:
    """A run of each seed, with its loss; of the repeats of one where values have a run_seed."""
    seeds = losses if isinstance(losses, Mapping) else dict(enumerate(losses))
    rows = ran(case, [100 + i for i in range(len(seeds))], **values)
    for row, (seed, loss) in zip(rows, seeds.items(), strict=True):
        row.measurement.train_loss, row.run_seed = loss, values.get("run_seed", seed)
    return rows


def some_steps(case: Case, steps: int, of: int, time_s: float, **values: Any) -> list[Record]:
    """A run of so many steps of an epoch."""
    counts = {"measured_steps": min(steps, of), "steps_per_epoch": of}
    return ran(replace(case, steps=steps), (time_s,), **counts, **values)


def start(case: Case, times: Sequence[float], firsts: Sequence[float]) -> list[Record]:
    """Runs that start in 2 s, and warm up in 2 s and their first steps."""
    rows = ran(case, times, setup_time_s=2.0)
    for row, first in zip(rows, firsts, strict=True):
        row.measurement.first_steps_time_s = first
        row.measurement.warmup_time_s = 2.0 + first
    return rows


def change(rows: list[Record], number: int, **values: Any) -> list[Record]:
    """The same, with other measurements of one of them."""
    for name, value in values.items():
        setattr(rows[number].measurement, name, value)
    return rows


LOST = {"gpu": "A card", "torch": "2.13"}
FEW = {"train_loss": 2.2}
WAITS = {"step_time_median_s": 0.045, "busy_s": 0.034, "profiled_step_s": 0.087}
BUSY = {"step_time_median_s": 0.1, "busy_s": 0.098, "profiled_step_s": 0.11}
LEARNT = {"train_loss": 2.5, "train_accuracy": 0.31, "test_accuracy": 0.33}
TIMED = {128: (100, 50), 256: (90, 30), 512: (80, 25)}
ALL_TIMED = [
    ran(case, (time,), 8, energy_j=float(time))
    for batch, both in TIMED.items()
    for case, time in zip(at(batch, FP32, FP16), both, strict=True)
]
"""fp16 is 2.00, 3.00 and 3.20 times as fast."""

PARTS_OF_EPOCH = [*at(128, FP32, FP16), *at(256, FP32, FP16), *at(512, FP32)]
PARTS_OF_EPOCH.append(replace(FP16, batch_size=256, loss_scale=64.0))

EFFECTS = {
    "geometric mean": plant(
        "fp16 is 2 and 3 times as fast at two batch sizes: sqrt(6) in the geometric mean.",
        "effects numbers",
        ran(FP32, (100,), 8), ran(replace(FP32, batch_size=256), (90,), 16),
        ran(FP16, (50,), 4), ran(replace(FP16, batch_size=256), (30,), 4),
    ),
    "no pair": plant(
        "Cases that differ in two things are no pair.",
        "overview effects", ran(FP32, (100,)), ran(replace(FP16, compile="default"), (50,)),
    ),
    "part and whole": plant(
        "How much was measured keeps no pair apart; losses of different parts are not compared.",
        "effects",
        ran(replace(FP32, fraction=0.1), (100,), **FEW), ran(FP16, (50,), train_loss=2.0),
    ),
    "main loss scale": plant(
        "Precisions are compared at their default loss scale: twice as fast, not ten times.",
        "effects",
        ran(FP32, (100,)), ran(replace(FP16, loss_scale=64.0), (10,)), ran(FP16, (50,)),
    ),
    "what with what": plant(
        "Precisions with fp32, numbers with the next below, dynamic scales last, switches with "
        "off.",
        "effects",
        *(ran(case, (100,)) for case in (
            Case(precision="bf16"), Case(precision="tf32"), FP32, *at(512, FP32), *at(256, FP32),
            COMPILED, *(replace(FP16, loss_scale=s) for s in ("dynamic", 256.0, 128.0)),
        )),
    ),
    "next below": plant(
        "One network at 64 and 256, the other at 128 and 512: two steps, a pair each.",
        "effects",
        *(ran(Case(model=model, batch_size=batch), (time,)) for model, batch, time in (
            ("dpn92", 64, 100), ("dpn92", 256, 80), ("dpn26", 128, 100), ("dpn26", 512, 80),
        )),
    ),
    "failed": plant(
        "What failed is in no pair.",
        "effects",
        ran(FP32, (100,)), ran(FP16, (50,), status=Status.INVALID, reason="throttled"),
    ),
    "diverged": plant(
        "The loss of what diverged is not compared; its time is, with a remark.",
        "effects",
        ran(FP32, (100,), train_loss=2.0), ran(FP16, (50,), status=Status.DIVERGED, train_loss=9.0),
    ),
    "one seed": plant(
        "Three repeats of one seed are one reading: +0.100, and no verdict.",
        "effects numbers",
        learn(FP32, (2.0, 2.1, 2.2), run_seed=0),
        learn(FP16, (2.1, 2.21, 2.29), run_seed=0),
    ),
    "exact losses": plant(
        "Losses that are equal in each seed are exact, and no wide interval.",
        "effects numbers",
        *(learn(replace(FP32, channels_last=last), (2.0, 2.4, 2.8)) for last in (False, True)),
    ),
    "common seeds": plant(
        "Each batch size shows next to no difference; a seed that only fp32 ran is far off.",
        "effects matched",
        learn(at(128, FP32)[0], (2.000, 2.100, 2.200)), learn(at(128, FP16)[0], (1.998, 2.098)),
        learn(at(256, FP32)[0], (2.300, 2.350, 2.600)), learn(at(256, FP16)[0], (2.300,)),
    ),
    "seeds of pairs": plant(
        "No seed is in all four cases; each pair has one of its own: +0.150.",
        "effects",
        learn(at(128, FP32)[0], {0: 2.0, 1: 9.0}), learn(at(128, FP16)[0], {0: 2.1}),
        learn(at(256, FP32)[0], {7: 2.5, 1: 8.0}), learn(at(256, FP16)[0], {7: 2.7}),
    ),
    "mixed": plant(
        "Channels-last brings nothing in fp32 and 1.11× in fp16: no mean hides that.",
        "effects",
        *(ran(replace(case, channels_last=last), times) for case, factor in ((FP32, 1), (FP16, 0.9))
          for last, times in ((False, (100, 100.1, 99.9)),
                              (True, [factor * t for t in (100.05, 100.1, 99.9)]))),
    ),
    "another torch": plant(
        "Cases under another torch are no pair.",
        "effects", ran(FP32, (100,)), ran(FP16, (50,), torch="2.12"),
    ),
    "which machine": plant(
        "Where a card ran a case in two environments, it is open which is meant.",
        "effects",
        ran(FP32, (200,), torch="2.12"), ran(FP32, (100,), attempt=2),
        ran(FP32, (100,), gpu="B card"),
    ),
    "published beside measured": plant(
        "Published figures are in no mean with measured ones: 2.00×, of one pair.",
        "effects",
        ran(FP32, (100,)), ran(FP16, (50,)),
        *(ran(case, (time,), executor="published", gpu="Old card")
          for case, time in zip(at(256, FP32, FP16), (200, 150), strict=True)),
    ),
    "published alone": plant(
        "By themselves they are compared with each other: 1.33×.",
        "effects",
        *(ran(case, (time,), executor="published", gpu="Old card")
          for case, time in zip(at(256, FP32, FP16), (200, 150), strict=True)),
    ),
    "equal parts": plant(
        "fp32 ran whole and in part, fp16 in part: the parts are compared, with their losses.",
        "effects",
        ran(FP32, (110,), train_loss=1.5),
        ran(replace(FP32, fraction=0.1), (100,), **FEW),
        ran(replace(FP16, fraction=0.1), (50,), train_loss=2.1),
    ),
    "unequal steps": plant(
        "20 steps at batch size 256 are of twice as many images as at 128; no loss is compared.",
        "effects",
        some_steps(FP32, 20, 400, 100, **FEW),
        some_steps(at(256, FP32)[0], 20, 200, 50, train_loss=2.0),
    ),
    "equal images": plant(
        "10 steps at 256 are of as many images as 20 at 128: 2.50×; but what a batch size does to "
        "the loss is not told before the end of an epoch.",
        "effects",
        some_steps(FP32, 20, 400, 100, **FEW),
        some_steps(at(256, FP32)[0], 20, 200, 50, train_loss=2.0),
        some_steps(at(256, FP32)[0], 10, 200, 40, train_loss=2.1),
    ),
    "whole epochs first": plant(
        "Cases that differ in steps alone are no two environments: whole epochs are compared.",
        "effects",
        ran(FP32, (100,), train_loss=1.5), some_steps(FP32, 20, 400, 90, **FEW),
        ran(FP16, (50,), train_loss=1.4), some_steps(FP16, 20, 400, 45, train_loss=2.0),
    ),
    "some repeats": plant(
        "Pairs with repeats are judged without the others: faster, over 1 of 2.",
        "effects",
        ran(FP32, THREE), ran(FP16, HALF),
        *(ran(case, (90, 90)) for case in at(256, FP32, FP16)),
    ),
    "energy of a part": plant(
        "A tenth of an epoch takes a tenth of the energy: half of it; a meter that repeats to the "
        "last digit was not read again. Memory that repeats is exact.",
        "effects numbers",
        ran(FP32, THREE, 8, energy_j=1000.0, measured_images=50000),
        ran(replace(FP16, fraction=0.1), HALF, 4, energy_j=50.0, measured_images=5000),
    ),
    "batch sizes of all": plant(
        "fp16 at three batch sizes is slower in the mean than fp16-amp at one, and faster at that.",
        "answers effects", *ALL_TIMED, ran(at(256, AMP)[0], (31,)),
    ),
    "batch sizes of one": plant(
        "Where all ran the same, nothing has to be said of it: 2.68× over three.",
        "effects", *ALL_TIMED,
    ),
    "nothing in common": plant(
        "Precisions without a batch size in common are not ranked.",
        "answers effects",
        *(ran(case, (time,)) for case, time in zip(
            (*at(128, FP32, FP16), *at(512, FP32, AMP)), (90, 30, 80, 20), strict=True)),
    ),
    "cut short": plant(
        "Three repeats of fp16 at two batch sizes, of fp16-amp at one: both are judged at that.",
        "effects",
        ran(FP32, THREE), ran(at(256, FP32)[0], THREE), ran(FP16, HALF),
        ran(at(256, FP16)[0], [t / 2 for t in HALF]), ran(AMP, HALF), ran(at(256, AMP)[0], (20,)),
    ),
    "ends of a number": plant(
        "fp32 ends at 256, so that the last step is of fp16 alone.",
        "effects",
        *(ran(case, (100,))
          for case in (*at(128, FP32, FP16), *at(256, FP32, FP16), *at(512, FP16))),
    ),
    "doubts of a pair": plant(
        "At 128 all are noisy; precisions are compared at 256, and have no doubt.",
        "effects",
        *(ran(case, (100,), warmup_steady=case.batch_size == 256)
          for case in (*at(128, FP32, FP16), *at(256, FP32, FP16, AMP))),
    ),
    "main of each group": plant(
        "The default scale where it ran, else the lowest; no skipped overflows; no opt level: fp16 "
        "2.00× over two, fp16-apex 4.00×.",
        "effects",
        *(ran(case, (time,)) for case, time in (
            (FP32, 100), (at(256, FP32)[0], 100), (replace(FP16, skip_overflow=True), 10),
            (FP16, 50), (replace(FP16, batch_size=256, loss_scale=512.0), 10),
            (replace(FP16, batch_size=256, loss_scale=64.0), 50),
            (Case(precision="fp16-apex", loss_scale=128.0, opt_level="O1"), 10),
            (Case(precision="fp16-apex", loss_scale=128.0), 25),
        )),
    ),
    "before the end of an epoch": plant(
        "No accuracy, and no loss by batch size or loss scale; precisions at equal steps are told.",
        "overview effects matched notes",
        *(ran(replace(case, fraction=0.2), (100,), **LEARNT) for case in PARTS_OF_EPOCH),
    ),
    "of whole epochs": plant(
        "All of it is shown.",
        "overview effects matched notes", *(ran(case, (100,), **LEARNT) for case in PARTS_OF_EPOCH),
    ),
    "host-bound": plant(
        "The GPU runs kernels for 34 of 45 ms at batch size 128: said beside each speed-up.",
        "answers overview effects",
        ran(FP32, (100,), **BUSY), ran(FP16, (45,), **WAITS),
        ran(at(512, FP32)[0], (100,), **BUSY), ran(at(512, FP16)[0], (60,)),
    ),
    "host not profiled": plant(
        "Without a profile nobody knows.",
        "answers effects",
        *(ran(case, (time,)) for case, time in zip(
            (*at(128, FP32, FP16), *at(512, FP32, FP16)), (100, 45, 100, 60), strict=True)),
    ),
}  # fmt: skip

GROWN = {batch: (1.0 + batch / 1000) for batch in (128, 256)}
FIVE = [1 + 0.1 * seed for seed in range(5)]
SEEDS = (1.0, 1.1, 1.2, 1.3)

LEARNING = {
    "four verdicts": plant(
        "Over two batch sizes and five seeds, which differ by far more than the margin: as good, "
        "10 % worse, 10 % better, and 5 % to and fro.",
        "learning",
        *(
            learn(Case(precision=name, batch_size=batch), [
                base * seed * factor * (1 + wobble * (-1) ** i) for i, seed in enumerate(FIVE)
            ], test_accuracy=0.5)
            for name, factor, wobble in (("fp32", 1.0, 0.0), ("tf32", 1.0, 0.001),
                                         ("fp16", 1.1, 0.001), ("bf16", 0.9, 0.001),
                                         ("bf16-amp", 1.0, 0.05))
            for batch, base in GROWN.items()
        ),
    ),
    "not in every case": plant(
        "Ten per cent worse at one batch size and better at the other is no equivalence.",
        "learning",
        learn(FP32, SEEDS), learn(at(256, FP32)[0], SEEDS),
        learn(FP16, [1.1 * x for x in SEEDS]), learn(at(256, FP16)[0], [x / 1.1 for x in SEEDS]),
    ),
    "guessing": plant(
        "Equal losses of guessing show nothing.",
        "learning", *(learn(case, (2.309, 2.304, 2.311)) for case in (FP32, FP16)),
    ),
    "a few steps": plant(
        "After 5 % of an epoch.",
        "learning",
        *(learn(replace(case, steps=20), SEEDS, measured_steps=20, steps_per_epoch=400)
          for case in (FP32, FP16)),
    ),
    "more steps than there are": plant(
        "A whole epoch: no remark.",
        "learning",
        *(learn(replace(case, steps=500), SEEDS, measured_steps=400, steps_per_epoch=400)
          for case in (FP32, FP16)),
    ),
    "diverged": plant(
        "What diverged is not left out in silence: 1 of 2 pairs.",
        "learning",
        learn(FP32, SEEDS[:3]), learn(FP16, SEEDS[:3]), learn(at(256, FP32)[0], SEEDS[:3]),
        learn(at(256, FP16)[0], SEEDS[:3], status=Status.DIVERGED, reason="the loss became NaN"),
    ),
    "one seed": plant(
        "One seed says nothing of learning.",
        "learning", *(ran(case, (100,), train_loss=2.0) for case in (FP32, FP16)),
    ),
}  # fmt: skip

OFF, ON = (20.1, 20, 19.9), (16.1, 16, 15.9)

STARTING = {
    "parts": plant(
        "The median of each part over all runs that say it, and of their sum; fp16 is as an older "
        "harness left it.",
        "beside",
        change(change(ran(FP32, OFF, **dict.fromkeys(BESIDE, 0.25)), 1, imports_s=2.0), 2,
               imports_s=4.0),
        ran(FP16, (10.0,)),
    ),
    "compiling": plant(
        "30 s more at the start, 4 s less an epoch: 8 epochs; with a cache 2 s more: one. The slow "
        "start of one repeat is noise. Of fp16 it never pays.",
        "start-up",
        start(FP32, OFF, (1, 1, 1)), change(start(COMPILED, ON, (3, 31, 3)), 2, setup_time_s=9.0),
        start(FP16, (20,), (1,)), start(replace(FP16, compile="default"), (21,), (31,)),
    ),
    "range of epochs": plant(
        "Times that differ give the fewest epochs and the most; those that may be equal nothing.",
        "start-up",
        start(FP32, (21, 20, 19), (1, 1, 1)), start(COMPILED, (16.6, 16, 15.4), (31, 3, 3)),
        start(FP16, (21, 20, 19), (1, 1, 1)),
        start(replace(FP16, compile="default"), (20.9, 19.9, 18.9), (31, 3, 3)),
    ),
    "modes": plant(
        "Each mode is priced against none; autotuning and capturing find nothing in a cache.",
        "start-up",
        start(FP32, OFF, (1, 1, 1)), start(COMPILED, ON, (31, 3, 3)),
        start(replace(FP32, compile="max-autotune"), ON, (31, 3, 3)),
        start(replace(FP32, cuda_graphs=True), (10.1, 10, 9.9), (3, 3, 3)),
    ),
}  # fmt: skip

FAST = {"slow": ran(FP32, (200, 201, 199), 10), "fast": ran(FP16, (100, 100.5, 99.5), 6)}
SHARED = {"neighbours_computing": 1}
AT_BEST = ran(Case(precision="bf16-amp", batch_size=256), (57, 57.1, 56.9), 8)
AT_WORST = ran(at(256, FP32)[0], (148, 148.1, 147.9), 10)
SMALL = at(64, FP32)[0]
DOUBTED = [ran(Case(batch_size=64 + i), (50 + i,), 6, **SHARED) for i in range(5)]
CLOSE = ran(FP16, (100, 100.5, 99), 6)

ANSWERS = {
    "trusted": plant(
        "The fastest that can be trusted, and what was faster.",
        "answers",
        *FAST.values(), ran(Case(precision="bf16"), (50,), 6, **SHARED),
    ),
    "none trusted": plant(
        "Every case has a warning.", "answers", ran(Case(precision="bf16"), (50,), 6, **SHARED),
    ),
    "fastest": plant("All can be trusted.", "answers", *FAST.values()),
    "baseline doubted": plant(
        "The fp32 times have warnings.",
        "answers",
        change(ran(FP32, (200, 201, 199), 10), 0, warmup_steady=False), FAST["fast"],
    ),
    "no baseline": plant("There is no fp32 case to compare with.", "answers", FAST["fast"]),
    "single runs": plant(
        "Nothing is called the fastest.", "answers", ran(FP32, (200,), 10), ran(FP16, (100,), 6),
    ),
    "two runs": plant(
        "Of two equal cases both runs of one are below both of the other one time in three: none "
        "is the fastest.",
        "answers", ran(FP32, (200, 201), 10), ran(FP16, (100, 100.5), 6),
    ),
    "slow baseline": plant(
        "2.60× at a batch size at which fp32 is far from its best, 1.56× over its best.",
        "answers", AT_BEST, AT_WORST, ran(SMALL, (89, 89.1, 88.9), 5),
    ),
    "baseline at its best": plant(
        "fp32 is at its best there: said once.",
        "answers", AT_BEST, AT_WORST, ran(SMALL, (150, 150.1, 149.9), 5),
    ),
    "slow baseline doubted": plant(
        "That fp32 time has a warning; the other has not.",
        "answers",
        AT_BEST, ran(at(256, FP32)[0], (148, 148.1, 147.9), 10, **SHARED),
        ran(SMALL, (89, 89.1, 88.9), 5),
    ),
    "all baselines doubted": plant(
        "No fp32 time is without a warning.",
        "answers", AT_BEST, ran(at(256, FP32)[0], (148, 148.1, 147.9), 10, **SHARED),
    ),
    "five doubted": plant(
        "Three are named, and two more cases counted.",
        "answers", *DOUBTED, ran(FP32, (60, 60.1, 59.9), 6),
    ),
    "four doubted": plant(
        "A single one more is named.",
        "answers", *DOUBTED[:4], ran(FP32, (60, 60.1, 59.9), 6),
    ),
    "overlap": plant(
        "Runs that overlap are not told apart.",
        "answers",
        CLOSE, ran(Case(precision="bf16"), (101, 103, 99.8), 6),
        ran(at(256, FP32)[0], (101, 102, 103), 6),
    ),
    "noisy rival": plant(
        "What is noisy is no slower for certain.",
        "answers", CLOSE, ran(Case(precision="tf32"), (103, 130, 90), 6),
    ),
    "single rival": plant(
        "A single run is taken to have the spread of the fastest case: 101.5 s is within it.",
        "answers", ran(FP16, (100, 101, 98), 6), ran(Case(precision="bf16"), (101.5,), 6),
    ),
    "slower rival": plant(
        "104 s is not.",
        "answers", ran(FP16, (100, 101, 98), 6), ran(Case(precision="bf16"), (104,), 6),
    ),
    "no time": plant(
        "No case was timed.",
        "answers", [make_record(FP32, **LOST, status=Status.ERROR, reason="boom")],
    ),
}  # fmt: skip

LOSSES_OF_THREE = ran(FP16, (88.8, 76.6, 90.4), 6)
for number, loss in enumerate((2.05, 2.04, 2.11)):
    change(LOSSES_OF_THREE, number, train_loss=loss)
PART = Case(fraction=0.1)
WITHIN = {"epoch_time_low_s": 29.8, "epoch_time_high_s": 31.2, "train_loss": 2.0}

OVERVIEW = {
    "a column an axis": plant(
        "A column for what varies; what is the same is said once, above; fractions have a mark.",
        "constants overview",
        *(ran(replace(FP16, compile=mode, channels_last=last, cudnn_benchmark=True, fraction=part),
              (100,))
          for mode, last, part in (("off", False, 0.1), ("default", False, 0.2), ("off", True, 0.3),
                                   ("default", True, 1.0))),
    ),
    "fractions": plant(
        "Where nothing else tells rows apart, the fraction has a column.",
        "overview", ran(FP32, (100,)), ran(replace(FP32, fraction=0.5), (99,)),
    ),
    "edited network": plant(
        "The same case of an edited network, added with --mix: both are named.",
        "overview",
        *([make_record(FP32, model_source=source, **{**measured(time, 5), "torch": "2.13"})]
          for source, time in (("821e784d0000", 10), ("d97f8d210000", 30))),
    ),
    "two versions": plant(
        "The same case on two versions of torch.",
        "overview",
        *([make_record(FP32, torch=torch, **measured(time, 5))]
          for torch, time in (("2.12", 10), ("2.13", 30))),
    ),
    "three runs": plant("A median stands with its range.", "overview notes", LOSSES_OF_THREE),
    "five runs": plant(
        "From five on the ends are an interval with its coverage.",
        "overview notes", ran(FP16, (90, 91, 92, 93, 94), 6),
    ),
    "within a run": plant(
        "An interval within a run.", "overview notes", ran(PART, (30.5,), 6, **WITHIN),
    ),
    "within and between": plant(
        "An interval within a run, and a range of two.",
        "overview notes", ran(PART, (30.5,), 6, **WITHIN), ran(at(256, FP32)[0], (9, 10), 6),
    ),
    "memory saved": plant(
        "Of all memory and of the tensors: 40 % each.",
        "overview notes", ran(FP32, (200,), 10), ran(FP16, (100,), 6),
    ),
    "memory on a cpu": plant(
        "Python, torch and the dataset are in it.",
        "notes",
        *(ran(replace(case, device="cpu"), (time,), gib)
          for case, time, gib in ((FP32, 200, 10), (FP16, 100, 6))),
    ),
    "class folders": plant(
        "Class folders are not the archive; accuracy on synthetic images is called synthetic.",
        "overview notes",
        ran(FP32, (10,), dataset_source="folders", train_images=300, train_accuracy=0.3),
        ran(Case(dataset="synthetic"), (9,), train_accuracy=0.3),
    ),
    "machines": plant(
        "Two cards stand side by side.",
        "machines",
        ran(FP32, (200,)), ran(FP16, (100,)), ran(FP32, (20,), gpu="B card"),
        ran(FP16, (10,), gpu="B card"),
    ),
    "file of weights": plant(
        "A file of weights is said above its rows, and has no column.",
        "overview",
        *([make_record(Case(freeze=freeze, start=start), epoch_time_s=9.0, train_loss=2.0)]
          for freeze in ("none", "backbone")
          for start in (None, "/a/sweep/with/checkpoints/fp32-b128-2ad912a4-1/best.pt")),
    ),
}  # fmt: skip

MIB = 2**20
ADA = {**make_card("NVIDIA RTX 6000 Ada"), "gpu_memory_bytes": 24 * GIB}


def line(
    model: str, sizes: Sequence[int], bend: float = 0, axes: Mapping[str, Any] = {}, **values: Any
) -> list[Record]:
    """Batch sizes whose memory is 1 GiB and 16 MiB an image, on 24 GiB; the largest misses."""
    return [
        make_record(
            Case(model=f"m:{model}", batch_size=size, **axes),
            **{**ADA, **measured(50.0, (GIB + 16 * MIB * size) * (1 + bend * (size == sizes[-1])))},
            **values,
        )
        for size in sizes
    ]


def once(case: Case, time_s: float = 50.0, gib: float = 1, **values: Any) -> Record:
    """One run of a case on a machine that nobody names."""
    return make_record(case, **measured(time_s, gib * GIB), **values)


def end(case: Case, **values: Any) -> Record:
    """A run that did not fit."""
    return make_record(case, **{"status": Status.OOM, **values})


def ends(model: str, tops: Mapping[str, tuple[int, int | None]]) -> list[Record]:
    """Precisions timed once at 64 and at a largest batch, with the batch that does not fit."""
    rows = []
    for precision, (top, fails) in tops.items():
        case = Case(model=f"m:{model}", precision=precision)
        for size in (64, top):
            values = measured(50.0 - size / 100, GIB + 16 * MIB * size, train_loss=2.0)
            values = {**make_card("NVIDIA RTX 6000 Ada"), **values}
            rows.append(make_record(replace(case, batch_size=size), **values))
        if fails:
            rows.append(end(replace(case, batch_size=fails)))
    return rows


def search(largest: int) -> list[Record]:
    """A search of bf16 of `ends` that ends at a batch size."""

    def probe(size: int, status: Status = Status.OK, steps: int = 4) -> Record:
        values = measured(1.0, GIB + 16 * MIB * size) if status is Status.OK else {}
        case = Case(model="m:a", precision="bf16", batch_size=size, steps=steps)
        card = {**make_card("NVIDIA RTX 6000 Ada"), **values}
        card["gpu_memory_bytes"] = GIB + 16 * MIB * (largest + 4)
        return make_record(case, probe=True, status=status, **card)

    first = [probe(32), probe(96), probe(largest), probe(largest + 8, Status.OOM)]
    return [*first, probe(largest, steps=16)]


KNOWN, OPEN = {"fp32": (256, 512), "bf16": (512, 1024)}, {"fp32": (256, 512), "bf16": (512, None)}
FULL = make_probe("fp32", 1184, retries=2)
FULL.measurement.peak_device_bytes = 40 * GIB
TALL = make_scaled_case("fp32", 1128)
CARD_48 = {**make_card("NVIDIA RTX 6000 Ada"), "gpu_memory_bytes": 48 * GIB}
FEW_STEPS = {"measured_steps": 20, "steps_per_epoch": 200, "train_loss": 2.0}
PRECISIONS = ("fp32", "bf16")
BY_BATCH = "walls batch-speed batch-memory matched largest accumulation"
TEXTS = {"dataset": OWN, "model": "m:f", "workload": "m:f"}
HALVES = [once(Case(precision=name, batch_size=size, steps=20), time, **FEW_STEPS)
          for name, time in (("fp32", 50.0), ("bf16", 25.0)) for size in (64, 128)]  # fmt: skip
AT_64 = [once(Case(precision=name, batch_size=64), time, train_loss=2.0)
         for name, time in (("fp32", 60.0), ("bf16", 20.0))]  # fmt: skip


def counted(precision: str, size: int, loss: float, steps: int | None = 20) -> Record:
    """A run of an epoch, or of so many steps of one."""
    counts = {"measured_steps": 20, "steps_per_epoch": 50_000 // size} if steps else {}
    case = Case(precision=precision, batch_size=size, steps=steps)
    return once(case, train_loss=loss, **counts)


BATCHES = {
    "noise": plant(
        "Noise is no cliff.", "batch-speed", list(list_scaling(noise=0.25)),
    ),
    "single runs": plant(
        "Of single runs it is said that they may be chance.",
        "batch-speed", list(list_scaling(repeats=1)),
    ),
    "lines": plant(
        "Memory is predicted up to where it ends: (24 - 1) GiB / 16 MiB = 1472. Two sizes are no "
        "line. The line is judged by what it would have said of the largest: a bend of 6 % misses "
        "by 5.7 %, and nothing is predicted.",
        "batch-memory",
        line("far", (64, 128, 256)), line("near", (64, 128, 256, 1000)), line("two", (64, 128)),
        line("limited", (64, 128, 400), axes={"memory_limit": "12GiB"}),
        line("bent", (64, 128, 256, 512), bend=0.3), line("judged", (64, 128, 256, 512), bend=0.06),
    ),
    "what was measured": plant(
        "What was measured overrules the line, which ends at 1472: a batch of 1200 that does not "
        "fit, and one of 1600 that does; 1440 and 1480 are near enough.",
        "batch-memory",
        *(line(name, (64, 256, 1024)) for name in ("at1200", "at1440", "at1600", "at1480")),
        [end(Case(model=f"m:at{size}", batch_size=size), **ADA) for size in (1200, 1440)],
        [make_record(Case(model=f"m:at{size}", batch_size=size),
                     **{**ADA, **measured(50.0, 20 * GIB), "alloc_retries": 3})
         for size in (1600, 1480)],
    ),
    "what did not fit": plant(
        "Nothing is predicted beyond what did not fit, whatever the line says.",
        "batch-memory",
        line("fits", (64, 128, 256)), line("ends", (64, 128, 256)),
        [end(Case(model="m:ends", batch_size=512), **ADA)],
    ),
    "available": plant(
        "What others left is available, by the measure memory is read in: 24, 21, 24 GiB.",
        "batch-memory",
        line("alone", (64, 128, 256)),
        line("shared", (64, 128, 256), baseline_device_bytes=3 * GIB),
        line("context", (64, 128, 256), context_bytes=GIB // 2),
    ),
    "allocator": plant(
        "Torch's allocator does not hold the context of CUDA: 23.5 GiB.",
        "batch-memory",
        [change([row], 0, peak_device_bytes=None, context_bytes=GIB // 2)[0]
         for row in line("alone", (64, 128, 256))],
    ),
    "same case": plant(
        "A probe of the very same case supersedes no run, and is no drift: 40.20 s in 3 runs.",
        "overview doubts",
        [once(Case(batch_size=64, device="cpu"), 40 + 0.1 * r, repeat=r) for r in (1, 2, 3)],
        [once(Case(batch_size=64, device="cpu"), 40.2, sentinel=True),
         once(Case(batch_size=64, device="cpu"), 1.0, probe=True, attempt=7)],
    ),
    "other learning": plant(
        "How large a batch fits does not depend on the schedule: the search ran without it.",
        "batch-memory",
        [make_record(make_scaled_case("fp32", size, schedule="cosine", evaluate=True, epochs=3),
                     **{**CARD_48, **measured(50.0, LINES["fp32"][0] + LINES["fp32"][1] * size)})
         for size in (32, 64, 128)],
        PROBES,
    ),
    "retries": plant(
        "What made the allocator retry is not on the line: it misses by nothing.",
        "batch-memory", list(list_scaling()), [FULL],
    ),
    "known ends": plant(
        "Only precisions whose end is known are at their largest; of others it is said why not.",
        "answers matched largest",
        ends("some", {**KNOWN, "tf32": (512, 1032), "bf16-amp": (512, None)}),
        ends("alone", OPEN), ends("same", {"fp32": (256, 512), "bf16": (256, 512)}),
        ends("none", {"fp32": (256, None), "bf16": (512, None)}),
    ),
    "near the largest": plant(
        "512 is 90 % of 568, and stands for it.", "walls largest", ends("a", OPEN), search(568),
    ),
    "below the largest": plant(
        "512 is less than 90 % of 576.", "walls matched largest", ends("a", OPEN), search(576),
    ),
    "recommended": plant(
        "512 is what a margin of 10 % recommends, and stands for the largest.",
        "walls largest", ends("a", OPEN), search(576), search={"step": 8, "margin": 0.1},
    ),
    "retried": plant(
        "A case that retried lowers what is recommended: 1120.",
        "walls",
        list(list_scaling()), PROBES,
        [make_record(TALL, **measured(40.0, 40 * GIB, alloc_retries=2))],
    ),
    "diverged": plant(
        "What diverged fitted, but its time is not that of a training: 1024 is the largest timed.",
        "matched largest",
        list(list_scaling()),
        [make_record(make_scaled_case("fp32", 1536), status=Status.DIVERGED,
                     **measured(30.0, 40 * GIB))],
    ),
    "unequal parts": plant(
        "In 20 steps 512 trains on twice as many images: no loss is compared.",
        "answers largest",
        [counted("fp32", 256, 2.256), counted("fp32", 128, 2.128), counted("bf16", 256, 2.256),
         counted("bf16", 512, 2.512), end(Case(batch_size=512, steps=20)),
         end(Case(precision="bf16", batch_size=1024, steps=20))],
    ),
    "a few steps": plant("A few steps are an estimate.", "matched", HALVES),
    "whole beside steps": plant("Whole epochs stand for them.", "matched", HALVES, AT_64),
    "losses of steps": plant(
        "At 256 both trained 20 steps; at 128 one of them trained the whole epoch.",
        "matched",
        [counted("fp32", 128, 1.5, None), counted("bf16", 128, 2.0), counted("fp32", 256, 2.1),
         counted("bf16", 256, 2.2)],
    ),
    "all fits": plant(
        "Where everything fits, the largest that ran is nobody's largest.",
        "answers",
        [once(Case(precision="fp32", batch_size=size)) for size in (64, 128)],
        [once(Case(precision="bf16", batch_size=size)) for size in (64, 128, 256)],
    ),
    "nothing but the overview": plant(
        "Without losses there is only the speed-up over fp32, which the overview has.",
        "matched",
        [once(Case(precision=name, batch_size=size)) for name in PRECISIONS for size in (64, 128)],
    ),
    "another baseline": plant(
        "Over tf32 it has not.",
        "matched",
        [once(Case(precision=name, batch_size=size)) for name in ("tf32", "bf16")
         for size in (64, 128)],
    ),
    "one batch size": plant(
        "Nothing appears unless the batch size varies.",
        BY_BATCH, [once(Case(precision=name, batch_size=64)) for name in PRECISIONS],
    ),
    "two batch sizes": plant(
        "Nor of two of one precision.",
        BY_BATCH, [once(Case(batch_size=size)) for size in (64, 128)],
    ),
    "limits": plant(
        "A largest batch belongs to its limit.",
        "answers overview",
        [once(Case(batch_size=size, memory_limit=limit)) if size <= fits
         else end(Case(batch_size=size, memory_limit=limit))
         for limit, fits in ((None, 512), ("9GiB", 256), ("21GiB", 512))
         for size in (256, 512, 1024)],
    ),
    "micro-batches": plant(
        "They stand beside the plain batch: +10 % time, -60 % memory; they do not make 1000 fit.",
        "answers accumulation",
        [once(Case(batch_size=256), 50.0, 10, train_loss=2.0),
         once(Case(batch_size=256, accumulate=4), 55.0, 4, train_loss=2.1),
         once(Case(batch_size=1000, accumulate=3), 52.0, 14, train_loss=2.3),
         end(Case(batch_size=1000))],
    ),
    "micro-batches of texts": plant(
        "They are other texts, so no loss is compared; a batch is of texts, not of tokens.",
        "accumulation effects",
        [once(Case(batch_size=256, accumulate=parts, **TEXTS), 50.0 + parts, train_loss=2.0,
              unit="tokens") for parts in (1, 4)],
    ),
    "many batch sizes": plant(
        "A table too long ends between batch sizes: 39 of 45 rows.",
        "accumulation",
        [once(Case(batch_size=128 * size, accumulate=parts)) for size in range(1, 16)
         for parts in (1, 2, 4)],
    ),
}  # fmt: skip


def beside(rows: list[Any], others: int = 3) -> list[Any]:
    """The same, beside other lanes."""
    for row, *_ in rows:
        row.lanes_beside = others
    return rows


def slow(rows: list[Any], factor: float) -> list[Any]:
    """The same, with longer epochs."""
    for row, *_ in rows:
        row.measurement.epoch_time_s *= factor
    return rows


def exchange(rows: list[Any], added: Sequence[float], error: float) -> list[Any]:
    """The same, with steps of 0.1 s without exchange, and longer ones with it."""
    for (row, *_), more in zip(rows, added, strict=True):
        row.measurement.sync_step_s, row.measurement.no_sync_step_s = 0.1 + more, 0.1
        row.measurement.exposed_error_s = error
    return rows


run = make_gpus_records
DDP = {"parallel": "ddp"}
LINES_AND_TAX = "scaling scaling-tax"

GPUS = {
    "on a cpu": plant(
        "There they are processes, and a straggler is no matter of cards.",
        f"{LINES_AND_TAX} doubts",
        run("fp32", 64, 1, device="cpu"), run("fp32", 64, 2, late=0.5, device="cpu"),
        run("fp16", 64, 1, device="cpu"), run("fp16", 64, 2, device="cpu"),
    ),
    "two processes": plant(
        "The slower is held against the other: 1.5 × 1.001, +50.1 %.",
        "scaling", run("fp32", 64, 2, late=0.5),
    ),
    "single runs": plant(
        "They have no interval.",
        LINES_AND_TAX, *(run(name, 64, gpus, 1) for name in ("fp32", "fp16") for gpus in (1, 4)),
    ),
    "uncertain tax": plant(
        "On two GPUs with a large batch all of the exchange is hidden behind the backward pass.",
        LINES_AND_TAX, *(run(name, 512, gpus) for name in ("fp32", "fp16") for gpus in (1, 2)),
    ),
    "ddp on one": plant(
        "Without --parallel none, DDP on one GPU is the base.",
        "scaling", run("fp32", 64, 1, **DDP), run("fp32", 64, 4),
    ),
    "none before ddp": plant(
        "With it, what DDP itself costs is seen.",
        "scaling effects", run("fp32", 64, 1, **DDP), run("fp32", 64, 1), run("fp32", 64, 4),
    ),
    "a base beside others": plant(
        "A base that ran alone comes before one that did not.",
        "scaling", beside(run("fp32", 64, 1)), run("fp32", 64, 1, **DDP), run("fp32", 64, 4),
    ),
    **{
        f"bases of a tax {slowed}": plant(
            "Of one precision --parallel none ran beside others: the tax is over DDP on one GPU.",
            LINES_AND_TAX,
            *(run(name, 64, gpus, **DDP) for name in ("fp32", "fp16") for gpus in (1, 8)),
            *(slow(beside(run(name, 64, 1)), 2) if name == slowed else run(name, 64, 1)
              for name in ("fp32", "fp16")),
        )
        for slowed in ("fp32", "fp16")
    },
    "no other base": plant(
        "A base that ran beside others is doubted.",
        "scaling doubts", beside(run("fp32", 64, 1)), run("fp32", 64, 2),
    ),
    "one beside others": plant(
        "Lanes beside are no doubt where nothing runs on several.",
        "scaling doubts", beside(run("fp32", 64, 1)),
    ),
    "noise of an exchange": plant(
        "4 ± 1 ms is above noise; 1 ± 4 ms and -1 ± 4 ms are not. One process exchanges nothing.",
        "scaling",
        *(exchange(run(name, 64, gpus, 1, **DDP), [added], error)
          for name, added, error in (("fp32", 0.004, 0.001), ("fp16", 0.001, 0.004),
                                     ("bf16-amp", -0.001, 0.004))
          for gpus in (1, 2)),
    ),
    "noise between runs": plant(
        "What differs between runs counts where it is more than each says: 5 ± 4 ms.",
        "scaling", exchange(run("fp32", 64, 2), (0.001, 0.005, 0.009), 0.001),
    ),
    **{
        f"above twice one in {repeats}": plant(
            "Two GPUs are 2 % below twice one; of fp16, whose one was slowed by 10 %, above.",
            "scaling",
            run("fp32", 512, 1, repeats), run("fp32", 512, 2, repeats),
            slow(run("fp16", 512, 1, repeats), 1.1), run("fp16", 512, 2, repeats),
        )
        for repeats in (1, 3)
    },
    "strong above twice one": plant(
        "Each table explains its own remarks: here strong scaling alone.",
        "scaling",
        run("fp32", 512, 1), run("fp32", 512, 2),
        slow(run("fp32", 256, 2),
             0.4 * time_step("fp32", 512, 1)[0] / time_step("fp32", 256, 2)[0]),
    ),
    "ddp on one above one": plant(
        "DDP on one GPU is not more GPUs.",
        "scaling",
        slow(run("fp32", 64, 1), 1.5), run("fp32", 64, 1, **DDP), run("fp32", 64, 4),
    ),
    "without one": plant("Without one GPU there is no speed-up.", "scaling", run("fp32", 64, 4)),
    "other lines": plant(
        "Another learning rate, compressed gradients, another way: each a line of its own.",
        "scaling",
        run("fp32", 64, 1), run("fp32", 64, 1, lr=0.1), run("fp32", 64, 4),
        run("fp32", 64, 4, grad_compression="fp16"), run("fp32", 64, 4, parallel="dp"),
    ),
    "failed": plant(
        "What failed is on no line.",
        LINES_AND_TAX, run("fp32", 64, 1),
        [(replace(row[0], status=Status.ERROR), *row[1:]) for row in run("fp32", 64, 8)],
    ),
    "links": plant(
        "Links that differ are told; within each case they are alike.",
        "scaling doubts",
        run("fp32", 64, 1), run("fp32", 64, 2, links="NV18"), run("fp32", 64, 4, links="SYS"),
    ),
}  # fmt: skip

TRAINED = Case(epochs=3, evaluate=True, precision="bf16-amp")


def trained(case: Case, times: Sequence[float], repeat: int = 1, **values: Any) -> list[Any]:
    """A run of some epochs, whose losses fall by a tenth from each to the next."""
    record = make_record(case, repeat=repeat, **{**measured(fmean(times), GIB), **values})
    rows = [
        EpochRow(i, time, 2 - i / 10, 0.25 + i / 8, 1.5 - i / 10, 0.5 + i / 8, 1.0)
        for i, time in enumerate(times)
    ]
    return [(record, [], rows)]


def forget(rows: list[Any]) -> list[Any]:
    """The same without evaluation, and without one training loss."""
    for epoch in rows[0][2]:
        epoch.test_loss = epoch.test_accuracy = epoch.eval_time_s = None
    rows[0][2][1].train_loss = None
    return rows


LONG = replace(TRAINED, epochs=4)

EPOCHS = {
    "three": plant(
        "Each epoch has a row under its case.",
        "epochs notes",
        trained(TRAINED, [10, 10.1, 10.1]), trained(at(256, TRAINED)[0], [8, 8, 8]),
    ),
    "trends": plant(
        "A trend above what counts as steady is said; noise is none.",
        "epochs",
        trained(LONG, [10, 10.5, 11, 11.5]), trained(at(256, LONG)[0], [8, 7.4, 7.1, 6.5]),
        trained(at(512, LONG)[0], [8, 9.5, 7.9, 9]),
    ),
    "two": plant("Two are no trend.", "epochs", trained(replace(TRAINED, epochs=2), [10, 20])),
    "many": plant(
        "A table too long ends between cases: 30 of 45 rows.",
        "epochs",
        *(trained(replace(TRAINED, epochs=15, batch_size=size), [10] * 15)
          for size in (64, 128, 256)),
    ),
    "repeats": plant(
        "Repeats are shown by their median: 10.10, 10, 10; what diverged is not of them.",
        "epochs",
        *(trained(TRAINED, [t, 10, 10], repeat) for repeat, t in enumerate([10, 10.1, 99], 1)),
        trained(TRAINED, [1, 1, 1], 4, status=Status.DIVERGED),
    ),
    "without evaluation": plant(
        "Its columns are left out; what was not measured is a dash.",
        "epochs", forget(trained(TRAINED, [10, 10, 10])),
    ),
    "one": plant(
        "One epoch is in the overview alone.",
        "overview epochs notes", [once(replace(TRAINED, epochs=1), 10)],
    ),
    "short energy": plant(
        "Each epoch has two ends at which the sensor is read: 3 s in three epochs are short.",
        "doubts", trained(TRAINED, [1, 1, 1], energy_j=100.0, measured_time_s=3.0),
    ),
    "long energy": plant(
        "6 s are not.",
        "doubts", trained(TRAINED, [1, 1, 1], energy_j=100.0, measured_time_s=6.0),
    ),
}  # fmt: skip


def checkpointed(precision: str, repeat: int = 1, **values: Any) -> list[Record]:
    """A run that saved and loaded a checkpoint."""
    costs = {"checkpoint_bytes": 3 * MIB, "checkpoint_save_s": 0.5, "checkpoint_load_s": 0.25}
    case = Case(precision=precision, checkpoint=True)
    return [once(case, 10.0, repeat=repeat, **{**costs, "resume_exact": True, **values})]


CHECKPOINTS = {
    "costs": plant(
        "Each case has what its checkpoint takes; resumes are exact, not known, or differ.",
        "checkpoints doubts",
        checkpointed("fp32"), checkpointed("fp32", 2, checkpoint_save_s=0.7),
        checkpointed("bf16", checkpoint_bytes=2 * MIB),
        checkpointed("tf32", resume_exact=None, missing="resume_exact: this device does not repeat "
                     "a step bitwise; energy_j: this is a CPU"),
        checkpointed("bf16-amp"),
        checkpointed("bf16-amp", 2, resume_exact=False, resume_difference="loss of step 2"),
    ),
    "none": plant("Without checkpoints there is no table.", "checkpoints", [once(FP32, 10.0)]),
}  # fmt: skip

BY_TORCH = replace(FP16, loader="torch", workers=2)
OWN_DATA = {"dataset": OWN, "workload": "m:f", "model": "m:f"}


def loaded(case: Case, ratio: float = 1.0, **values: Any) -> list[Record]:
    """Five runs of a case on a CPU of four cores, at so many times the time of no loader."""
    found = {"loader_first_batch_s": 0.5, "loader_samples_per_s": 3000.0}
    found = {} if case.loader == "device" else found
    return [
        once(case, ratio * time_s, repeat=number, cpu="X, 4 cores", **found, **values)
        for number, time_s in enumerate((30.0, 30.1, 29.9, 30.05, 29.95), 1)
    ]


LOADING = {
    "workers": plant(
        "The share is what the device does not take: 75, 50, 0.1 and -25 % of it; the loader no "
        "longer matters from 4 on. More workers than cores are doubted. A case died, and others "
        "differ in something else.",
        "loading doubts",
        loaded(FP16),
        *(loaded(replace(BY_TORCH, workers=n), ratio)
          for n, ratio in ((0, 4.0), (2, 2.0), (4, 1.001), (5, 0.8))),
        [make_record(replace(BY_TORCH, workers=8), status=Status.KILLED, cpu="X, 4 cores",
                     reason="a DataLoader worker died")],
        *(loaded(case, 3.0) for case in (replace(BY_TORCH, lr=0.5), at(64, FP16)[0],
                                         replace(BY_TORCH, compile="default"))),
    ),
    "no pair": plant(
        "Cases that differ in more are no pair.",
        "loading", loaded(FP16), loaded(at(64, BY_TORCH)[0]),
    ),
    "own data": plant(
        "Losses of a user's own data are not compared between loaders: 1 of 2 pairs.",
        "effects",
        *(learn(case, [2 + n / 9 for n in range(3)])
          for case in (FP16, BY_TORCH, replace(FP16, **OWN_DATA), replace(BY_TORCH, **OWN_DATA))),
    ),
    **{
        f"{steps} steps of {parts}": plant(
            f"Four workers prepare eight micro-batches ahead: {'half' if enough else 'more'}.",
            "doubts",
            loaded(replace(BY_TORCH, workers=4, accumulate=parts), measured_steps=steps,
                   steps_per_epoch=100),
        )
        for parts, steps, enough in ((1, 15, False), (1, 16, True), (2, 7, False), (2, 8, True))
    },
    "all steps": plant(
        "A whole epoch is what it is.",
        "doubts", loaded(replace(BY_TORCH, workers=4), measured_steps=15, steps_per_epoch=15),
    ),
}  # fmt: skip


def close(time_s: float, hour: int, attempt: int = 1) -> list[Record]:
    """The first case again, at the end of a command."""
    values = {"sentinel": True, "attempt": attempt}
    return ran(FP32, (time_s,), started_at=f"2026-11-20T{hour:02}:00:00.000Z", **values)


CALM = (100, 100.1, 99.9)
CUT = make_record(at(8, FP32)[0], **LOST, status=Status.INTERRUPTED)
FAST_FIRST = [*ran(FP32, (100, 100.4, 99.8)), *close(86, 12)]

NOTICES = {
    "lucky sentinel": plant(
        "It equals the first run to the last digit; the other runs do not: nothing is steady.",
        "doubts", ran(FP32, (100, 88, 108)), close(100, 12),
    ),
    "only run": plant("Of a single run nothing is known.", "doubts", ran(FP32, (100,)),
                      close(100, 12)),
    "steady": plant(
        "Steady within 2 %.", "doubts", ran(FP32, (100, 100.3, 99.8, 100.1, 100)), close(100.2, 12),
    ),
    "fast first": plant("It drifted by 14 %.", "doubts", FAST_FIRST),
    "fast first and more": plant(
        "Drift is not forgotten when values are added to a sweep.",
        "doubts", FAST_FIRST, ran(at(256, FP32)[0], (50,)), close(94.4, 14, 2),
    ),
    "against the one before": plant(
        "Each is within 2 % of the runs, but the second is 3 % above the first.",
        "doubts", ran(FP32, CALM), close(98.5, 12), close(101.5, 14, 2),
    ),
    "spread of all": plant(
        "A spread of more than all is not said in numbers.",
        "doubts", ran(FP32, (31.9, 30.4, 78.7)), close(91.5, 12),
    ),
    "repeats of a seed": plant(
        "They are a check of determinism: the same to the last digit in one of two cases.",
        "doubts",
        *(learn(case, losses, run_seed=0)
          for case, losses in ((FP32, (2.05, 2.05, 2.05)),
                               (at(256, FP32)[0], (2.05, 2.05012, 2.05)))),
    ),
    "three seeds": plant("Losses of three seeds are none.", "doubts", learn(FP32, [2.05] * 3)),
    "same command": plant(
        "What the same command runs again needs no flag.",
        "doubts",
        ran(FP32, (1, 1, 1)), [CUT, replace(CUT, case=at(16, FP32)[0], status=Status.LOST)],
    ),
    "failed": plant(
        "What failed needs one.",
        "doubts",
        ran(FP32, (1, 1, 1)), [CUT, replace(CUT, case=at(32, FP32)[0], status=Status.ERROR)],
    ),
}  # fmt: skip

SHORT = Case(precision="fp32", device="cpu", dataset="synthetic", model="dpn-small", steps=30)


def anchor(lane: str, kind: str, step_s: float) -> Record:
    """The short case that a lane runs to be compared."""
    values = {"step_time_median_s": step_s, "step_time_mad_s": 0.002 * step_s, "measured_steps": 30}
    return once(SHORT, 10, anchor=kind, lane=lane, session="start 1", cpu="Some CPU, 1 cores",
                record_id=f"{kind}-{lane}", **values)  # fmt: skip


def on_lane(lane: str, repeat: int, others: int = 1) -> Record:
    """A run on a lane, beside others."""
    return once(replace(SHORT, steps=None), 10, lane=lane, lanes_beside=others, repeat=repeat,
                cpu="Some CPU, 1 cores", session="start 1")  # fmt: skip


def between(alone: float, busy: float, *rows: Record, **values: Any) -> list[Record]:
    """Rows between the anchors of two lanes, of which the second does not change."""
    first = change([anchor("a", anchors.ALONE, alone)], 0, **values)
    first += [
        anchor("b", anchors.ALONE, 0.1),
        anchor("a", anchors.BUSY, busy),
        anchor("b", anchors.BUSY, 0.1),
    ]
    return [*first, *rows, anchor("b", anchors.CLOSE, 0.1), anchor("a", anchors.CLOSE, busy)]


LANES = {
    "slowed": plant(
        "Rows beside others are doubted where their lane was slowed, by 10 %: 1 of 3 runs.",
        "overview lanes doubts",
        between(0.1, 0.11, on_lane("a", 1), on_lane("b", 2), on_lane("a", 3, 0)),
    ),
    "unequal": plant(
        "One lane is 20 % slower than the other, whatever runs.",
        "lanes doubts", between(0.12, 0.12, on_lane("a", 1), on_lane("b", 2)),
    ),
    "disturbed anchor": plant(
        "An anchor that others disturbed says nothing, and is left out.",
        "lanes doubts", between(0.1, 0.15, on_lane("a", 1), other_cores=0.9),
    ),
    "one lane": plant("A sweep of one lane has no such table.", "lanes", [on_lane("a", 1, 0)]),
}  # fmt: skip

SITUATIONS: dict[str, dict[str, Situation]] = {
    "effects": EFFECTS,
    "learning": LEARNING,
    "starting": STARTING,
    "answers": ANSWERS,
    "overview": OVERVIEW,
    "batches": BATCHES,
    "gpus": GPUS,
    "epochs": EPOCHS,
    "checkpoints": CHECKPOINTS,
    "loading": LOADING,
    "notices": NOTICES,
    "lanes": LANES,
}
"""By topic and name."""
