"""Epochs and loaders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from bench.case import Case
from bench.record import EpochRow, Record, Status
from bench.workloads import OWN
from tests.planted.records import GIB, make_record, measured
from tests.planted.situations.situation import FP16, at, learn, once, plant

TRAINED = Case(epochs=3, evaluate=True, precision="bf16-amp")


def trained(case: Case, times: Sequence[float], repeat: int = 1, **values: Any) -> list[Any]:
    """A run of some epochs, whose losses fall by a tenth from each to the next."""
    record = make_record(case, repeat=repeat, **{**measured(fmean(times), GIB), **values})
    rows = [
        EpochRow(i, time, 2 - i / 10, 0.25 + i / 8, 1.5 - i / 10, 0.5 + i / 8, 1.0)
        for i, time in enumerate(times)
    ]
    return [(record, [], rows)]


EPOCHS = {
    "short energy": plant(
        "Each epoch has two ends at which the sensor is read: 3 s in three epochs are short.",
        "doubts", trained(TRAINED, [1, 1, 1], energy_j=100.0, measured_time_s=3.0),
    ),
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
        [make_record(replace(BY_TORCH, workers=3), status=Status.KILLED, cpu="X, 4 cores",
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
        for parts, steps, enough in ((1, 15, False), (2, 8, True))
    },
}  # fmt: skip
