"""What is said first, and beside the numbers of the overview."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.case import Case
from bench.record import Status
from tests.planted.records import make_record, measured, ran
from tests.planted.situations.situation import (
    COMPILED,
    FP16,
    FP32,
    LOST,
    SHARED,
    at,
    change,
    learn,
    plant,
)

FAST = {"slow": ran(FP32, (200, 201, 199), 10), "fast": ran(FP16, (100, 100.5, 99.5), 6)}
AT_BEST = ran(Case(precision="bf16-amp", batch_size=256), (57, 57.1, 56.9), 8)
AT_WORST = ran(at(256, FP32)[0], (148, 148.1, 147.9), 10)
BF16 = Case(precision="bf16-amp")
SMALL = at(64, FP32)[0]
WAITING = {"busy_s": 0.034, "step_time_median_s": 0.045}
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
    "no baseline": plant("There is no fp32 case to compare with.", "answers", FAST["fast"]),
    "single runs": plant(
        "Nothing is called the fastest.", "answers", ran(FP32, (200,), 10), ran(FP16, (100,), 6),
    ),
    "single runs on a busy cpu": plant(
        "They may differ threefold by chance: no ratio.",
        "answers", *(ran(replace(case, device="cpu"), (time,), 6, other_cores=cores)
          for case, time, cores in ((FP32, 200, 1.0), (BF16, 66, 0.0))),
    ),
    "several loss scales": plant(
        "Which one is compared is said.",
        "answers", ran(FP32, (200, 201, 199), 10),
        *(ran(replace(FP16, loss_scale=scale), (time, time + 1, time - 1), 6)
          for scale, time in ((64.0, 90.0), (128.0, 100.0))),
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
    "slow baseline doubted": plant(
        "That fp32 time has a warning; the other has not.",
        "answers",
        AT_BEST, ran(at(256, FP32)[0], (148, 148.1, 147.9), 10, **SHARED),
        ran(SMALL, (89, 89.1, 88.9), 5),
    ),
    "outlier": plant(
        "One of three runs took ten times as long: tables have medians, by which nothing changed.",
        "answers", ran(FP32, (100, 101, 1000), 6), CLOSE,
    ),
    "single rival": plant(
        "A single run is taken to have the spread of the fastest case: 101.5 s is within it.",
        "answers", ran(FP16, (100, 101, 98), 6), ran(Case(precision="bf16"), (101.5,), 6),
    ),
    "not known to be measured": plant(
        "Rows of an executor that this version does not know may be anything.",
        "answers doubts", *(ran(at(size, FP16)[0], (size,), 6, executor="x") for size in (64, 128)),
    ),
    "batch sizes": plant(
        "A smaller batch waits for the program; larger ones save little, and learn less.",
        "answers",
        *(ran(replace(FP16, batch_size=size, evaluate=True), (time, time + 0.1, time - 0.1), gib,
              test_accuracy=accuracy, **waits)
          for size, time, gib, accuracy, waits in (
              (128, 20.0, 5, 0.48, WAITING), (256, 12.0, 8, 0.43, {}), (512, 11.5, 14, 0.40, {}),
              (640, 11.3, 18, 0.36, {}))),
    ),
    "seeds": plant(
        "With seeds on both sides there is a verdict on what is learnt.",
        "answers", learn(FP32, [1.80, 1.81, 1.82]),
        learn(replace(FP16, cudnn_benchmark=True), [1.80, 1.81, 1.82]),
        learn(FP16, [1.8004, 1.8105, 1.8196]),
    ),
    "switches": plant(
        "What else varied, and what it costs.",
        "answers", ran(COMPILED, (50, 51, 49), 6), ran(FP32, (80, 81, 79), 6),
        ran(replace(COMPILED, accumulate=4), (60, 61, 59), 3),
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

BASELINES: dict[str, list[tuple[dict[str, Any], float, dict[str, Any]]]] = {
    # name: axes, time and values of the fp32 cases that are there
    "none_another_card": [({}, 200, {"gpu": "Another card"})],
    "none_another_torch": [({}, 200, {"torch": "2.12"})],
    "none_another_driver": [({}, 200, {"driver": "999"})],
    "none_unknown": [({}, 200, {"executor": "x"})],
    "none_invalid": [({}, 200, {"status": Status.INVALID, "reason": "throttled"})],
    "none_failed": [({}, 200, {"status": Status.OOM, "epoch_time_s": None, "images_per_s": None})],
    "none_another_batch": [({"batch_size": 256}, 200, {})],
    "none_lr": [({"lr": 0.1}, 200, {})],
    "none_cudnn": [({"cudnn_benchmark": True}, 200, {})],
    "none_compile": [({"compile": "default"}, 200, {})],
    "none_layout": [({"channels_last": True}, 200, {})],
    "none_seed": [({"seed": 1}, 200, {})],
    "none_dataset": [({"dataset": "synthetic"}, 200, {})],
    "of_the_larger_part": [({"fraction": 0.1}, 300, {}),
                           ({"fraction": 0.5, "evaluate": True}, 200, {})],
    "of_the_same": [({}, 200, {})],
}  # fmt: skip
SPED_UP = [
    row
    for name, cases in BASELINES.items()
    for row in (
        *(
            row
            for axes, time, values in cases
            for row in ran(Case(model=f"m:{name}", **axes), (time,), **values)
        ),
        *ran(replace(FP16, model=f"m:{name}"), (80,)),
    )
]
SPED_UP += ran(Case(model="m:of_a_diverged"), (200,))
SPED_UP += ran(replace(FP16, model="m:of_a_diverged"), (80,), status=Status.DIVERGED)

OVERVIEW = {
    "a column an axis": plant(
        "A column for what varies; what is the same is said once, above; fractions have a mark.",
        "constants overview",
        *(ran(replace(FP16, compile=mode, channels_last=last, cudnn_benchmark=True, fraction=part),
              (100,))
          for mode, last, part in (("off", False, 0.1), ("default", False, 0.2), ("off", True, 0.3),
                                   ("default", True, 1.0))),
    ),
    "speed-ups": plant(
        "fp16 is 2.50 times as fast as fp32 where they are of the same, and nothing where not.",
        "overview", SPED_UP,
    ),
    "profiled again": plant(
        "A speed-up of profiled cases is over the profiled one.",
        "overview",
        ran(FP32, (100,), 10), ran(FP16, (50,), 6),
        ran(replace(FP32, profile=True), (90,), 10), ran(replace(FP16, profile=True), (40,), 6),
        ran(replace(FP16, profile=True, batch_size=256), (30,), 6), ran(at(256, FP32)[0], (60,), 6),
    ),
    "edited network": plant(
        "The same case of an edited network, added with --mix: both are named.",
        "overview",
        *([make_record(FP32, model_source=source, **{**measured(time, 5), "torch": "2.13"})]
          for source, time in (("821e784d0000", 10), ("d97f8d210000", 30))),
    ),
    "three runs": plant("A median stands with its range.", "overview notes", LOSSES_OF_THREE),
    "five runs": plant(
        "From five on the ends are an interval with its coverage.",
        "overview notes", ran(FP16, (90, 91, 92, 93, 94), 6),
    ),
    "within a run": plant(
        "An interval within a run.", "overview notes", ran(PART, (30.5,), 6, **WITHIN),
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
    "file of weights": plant(
        "A file of weights is said above its rows, and has no column.",
        "overview",
        *([make_record(Case(freeze=freeze, start=start), epoch_time_s=9.0, train_loss=2.0)]
          for freeze in ("none", "backbone")
          for start in (None, "/a/sweep/with/checkpoints/fp32-b128-2ad912a4-1/best.pt")),
    ),
}  # fmt: skip
