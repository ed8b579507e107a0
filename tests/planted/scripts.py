"""Rows of a user's command, as what it tells of its steps makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.schema.case import Case
from bench.schema.record import Record
from bench.schema.rules import settle
from tests.planted.records import ran

WARM = 10
"""Steps of the warm-up."""


def script(batch: int = 64, precision: str = "fp32", **axes: Any) -> Case:
    places = "--bs {batch_size} --dtype {precision} {rate}"
    given = {"batch_size": batch, "precision": precision, "device": "cuda", **axes}
    return settle({"command": f"python train.py {places}", **given})


def counted(
    case: Case, times: Sequence[float], steps: int = 60, items: int = 0, epoch: int = 0,
    **values: Any,
) -> list[Record]:  # fmt: skip
    """Repeats that count the items of their steps, each with the s of a step; with ``epoch`` they
    tell that one ends after as many steps."""
    size, every = items or case.batch_size, steps - WARM
    whole = epoch * size or 10_000
    found = []
    for number, time_s in enumerate(times, 1):
        columns = {
            "unit": "items",
            "step_items": size,
            "measured_steps": every,
            "measured_images": every * size,
            "measured_time_s": every * time_s,
            "steps_per_epoch": epoch or None,
            "warmup_steps": WARM,
            "images_per_s": size / time_s,
            "train_images": whole,
            "labelled_flop_share": 1.0,  # `bench.step` has the operations of a step counted
            **values,
        }
        found += ran(case, [time_s / size * whole], **columns)
        found[-1].repeat = number
        found[-1].record_id += f"-{number}"
    return found


def stepped(case: Case, times: Sequence[float]) -> list[Record]:
    """Repeats that tell steps without their items."""
    return counted(case, times, items=1, unit="steps", step_items=None)


def untold(case: Case, times: Sequence[float], **values: Any) -> list[Record]:
    """Repeats of which the time of a run is known."""
    nothing = {"measured_steps": None, "warmup_steps": None, "warmup_steady": None}
    return ran(case, times, unit="runs", train_images=1, measured_images=1, **nothing, **values)


def list_scripts() -> list[Record]:
    """A sweep of a script that told now this, now that, of what it did."""
    again = untold(script(), (0.5, 0.5))
    for repeat, row in enumerate(again, 2):
        row.repeat = repeat
    return [
        *counted(script(), [0.01]),
        *again,  # from the checkpoint of the first
        *counted(script(128), [0.016] * 3, epoch=30),
        *counted(script(256), [0.010] * 3, items=64),  # halved until it fitted
        *counted(script(precision="bf16"), [0.008] * 3),
        *untold(script(128, "bf16"), (0.55, 0.56, 0.54)),
        *stepped(script(256, "bf16"), [0.02] * 3),
    ]
