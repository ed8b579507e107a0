"""The figures tracked of a case: how each is read from a record, once, for runs and imports."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
"""One record by column, as `bench.results.store.reader.read_records` types it: NaN for an empty
number."""

STATUSES = (
    "ok",
    "diverged",
    "invalid",
    "unsupported",
    "oom_suspected",
    "oom",
    "timeout",
    "killed",
    "interrupted",
    "error",
    "died",
    "lost",
)
"""The status number is a place in this list: append only; `DIED` is a sweep without a record."""

DIED = "died"

MEASURED = ("ok", "diverged")
ABSENT = ("invalid", "unsupported", "oom_suspected", "oom")
"""Answers that are no figure: shown as n/a. What is in neither list is a failure of the run."""

MEMORY = ("peak_device_bytes", "peak_process_bytes", "peak_reserved_bytes")
"""Where peak memory is read, best first: NVML's where there is a GPU, else the resident set."""


@dataclass(frozen=True)
class Figure:
    """One asv benchmark, ``track_NAME``. Lower is better for every one: asv knows no other way.

    ``read`` returns NaN where the record has no such figure. Raise ``version`` when it begins to
    read something else; asv then drops the history.
    """

    name: str
    pretty_name: str
    unit: str
    help: str
    read: Callable[[Row], float]
    version: str = "1"

    def value(self, row: Row) -> float | None:
        """As asv stores it: a number, NaN for not available, None for a run that failed."""
        status = row["status"]
        if self.name == "status":
            return STATUSES.index(status)
        if status in ABSENT:
            return math.nan
        if status not in MEASURED:
            return None
        # asv publish falls over an infinity, for the whole site
        value = float(self.read(row))
        return value if math.isfinite(value) else math.nan


def _peak_memory(row: Row) -> float:
    return next((row[name] for name in MEMORY if not math.isnan(row[name])), math.nan)


def _energy(row: Row) -> float:
    # of a whole epoch, extrapolated like epoch_time_s where only part of one was measured
    return float(row["energy_j"] * row["epoch_time_s"] / row["measured_time_s"])


FIGURES = (
    Figure(
        "epoch_time",
        "Epoch time",
        "seconds",
        "One warm epoch, extrapolated where the preset measures part of one.",
        lambda row: row["epoch_time_s"],
    ),
    Figure(
        "peak_memory",
        "Peak memory",
        "bytes",
        "Peak of the epoch: the device over its baseline (NVML); on a CPU the resident set.",
        _peak_memory,
    ),
    Figure(
        "train_loss",
        "Train loss",
        "nats",
        "Mean cross-entropy over the measured steps.",
        lambda row: row["train_loss"],
    ),
    Figure(
        "top1_error",
        "Top-1 error",
        "%",
        "Images predicted wrong, of those in the measured steps.",
        lambda row: 100 * (1 - row["train_accuracy"]),
    ),
    Figure("energy", "Energy", "joules", "Energy of one epoch, where the card says.", _energy),
    Figure(
        "status",
        "Status",
        "unit",
        "How the case ended: "
        + ", ".join(f"{number} {status}" for number, status in enumerate(STATUSES)),
        lambda row: math.nan,
    ),
)
