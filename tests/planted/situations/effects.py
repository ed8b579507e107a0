"""What changes do."""

from __future__ import annotations

from dataclasses import replace

from bench.case import Case
from bench.record import Status
from tests.planted.records import ran
from tests.planted.situations.situation import (
    AMP,
    COMPILED,
    FP16,
    FP32,
    HALF,
    THREE,
    at,
    learn,
    plant,
    some_steps,
)

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
    "doubts of a pair": plant(
        "At 128 all are noisy; precisions are compared at 256, and have no doubt.",
        "effects",
        *(ran(case, (100,), warmup_steady=case.batch_size == 256)
          for case in (*at(128, FP32, FP16), *at(256, FP32, FP16, AMP))),
    ),
    "main of each group": plant(
        "The default scale where it ran, else the lowest; no opt level: fp16 2.00× over two, "
        "fp16-apex 4.00×.",
        "effects",
        *(ran(case, (time,)) for case, time in (
            (FP32, 100), (at(256, FP32)[0], 100),
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
    "host-bound": plant(
        "The GPU runs kernels for 34 of 45 ms at batch size 128: said beside each speed-up.",
        "answers overview effects",
        ran(FP32, (100,), **BUSY), ran(FP16, (45,), **WAITS),
        ran(at(512, FP32)[0], (100,), **BUSY), ran(at(512, FP16)[0], (60,)),
    ),
}  # fmt: skip
