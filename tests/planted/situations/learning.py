"""Whether precisions learn as well, and what compiling costs."""

from __future__ import annotations

from dataclasses import replace

from bench.case import Case
from bench.record import Status
from tests.planted.records import ran
from tests.planted.situations.situation import (
    COMPILED,
    FP16,
    FP32,
    SEEDS,
    at,
    change,
    learn,
    plant,
    start,
)

GROWN = {batch: (1.0 + batch / 1000) for batch in (128, 256)}
FIVE = [1 + 0.1 * seed for seed in range(5)]

LEARNING = {
    "four verdicts": plant(
        "Over two batch sizes and five seeds, which differ by far more than the margin: as good, "
        "10 % worse, 10 % better, and 5 % to and fro.",
        "effects",
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
        "effects",
        learn(FP32, SEEDS), learn(at(256, FP32)[0], SEEDS),
        learn(FP16, [1.1 * x for x in SEEDS]), learn(at(256, FP16)[0], [x / 1.1 for x in SEEDS]),
    ),
    "guessing": plant(
        "Equal losses of guessing show nothing.",
        "effects", *(learn(case, (2.309, 2.304, 2.311)) for case in (FP32, FP16)),
    ),
    "a loss of any kind": plant(
        "A workload's 6.0 may be well learnt, as of a vocabulary.",
        "effects", *(learn(replace(case, workload="mine:made"), (6.0, 6.01, 5.99))
                      for case in (FP32, FP16)),
    ),
    "a few steps": plant(
        "After 5 % of an epoch.",
        "effects",
        *(learn(replace(case, steps=20), SEEDS, measured_steps=20, steps_per_epoch=400)
          for case in (FP32, FP16)),
    ),
    "diverged": plant(
        "What diverged is not left out in silence: 1 of 2 pairs.",
        "effects",
        learn(FP32, SEEDS[:3]), learn(FP16, SEEDS[:3]), learn(at(256, FP32)[0], SEEDS[:3]),
        learn(at(256, FP16)[0], SEEDS[:3], status=Status.DIVERGED, reason="the loss became NaN"),
    ),
    "one seed": plant(
        "One seed says nothing of learning.",
        "effects", *(ran(case, (100,), train_loss=2.0) for case in (FP32, FP16)),
    ),
}  # fmt: skip

OFF, ON = (20.1, 20, 19.9), (16.1, 16, 15.9)

STARTING = {
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
