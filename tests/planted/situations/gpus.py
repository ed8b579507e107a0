"""Several GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.record import Status
from tests.planted.situations.situation import plant
from tests.planted.sweeps import (
    make_gpus_records,
)


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

GPUS = {
    "on a cpu": plant(
        "There they are processes, and a straggler is no matter of cards.",
        "scaling doubts",
        run("fp32", 64, 1, device="cpu"), run("fp32", 64, 2, late=0.5, device="cpu"),
        run("fp16", 64, 1, device="cpu"), run("fp16", 64, 2, device="cpu"),
    ),
    "two processes": plant(
        "The slower is held against the other: 1.5 × 1.001, +50.1 %.",
        "scaling", run("fp32", 64, 2, late=0.5),
    ),
    "hidden exchange": plant(
        "On two GPUs with a large batch all of the exchange is hidden behind the backward pass.",
        "scaling", *(run(name, 512, gpus) for name in ("fp32", "fp16") for gpus in (1, 2)),
    ),
    "ddp on one": plant(
        "Without --parallel none, DDP on one GPU is the base.",
        "scaling", run("fp32", 64, 1, **DDP), run("fp32", 64, 4),
    ),
    "a base beside others": plant(
        "A base that ran alone comes before one that did not.",
        "scaling", beside(run("fp32", 64, 1)), run("fp32", 64, 1, **DDP), run("fp32", 64, 4),
    ),
    "no other base": plant(
        "A base that ran beside others is doubted.",
        "scaling doubts", beside(run("fp32", 64, 1)), run("fp32", 64, 2),
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
    "other lines": plant(
        "Another learning rate, compressed gradients, another way: each a line of its own.",
        "scaling",
        run("fp32", 64, 1), run("fp32", 64, 1, lr=0.1), run("fp32", 64, 4),
        run("fp32", 64, 4, grad_compression="fp16"), run("fp32", 64, 4, parallel="dp"),
    ),
    "failed": plant(
        "What failed is on no line.",
        "scaling", run("fp32", 64, 1),
        [(replace(row[0], status=Status.ERROR), *row[1:]) for row in run("fp32", 64, 8)],
    ),
    "links": plant(
        "Links that differ are told; within each case they are alike.",
        "scaling doubts",
        run("fp32", 64, 1), run("fp32", 64, 2, links="NV18"), run("fp32", 64, 4, links="SYS"),
    ),
}  # fmt: skip
