"""What a device could do when it was measured before, and whether it can do less now."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.diagnosis.rates import CALL, RATES, SAME_DEVICE, find_losses, write_losses
from bench.errors import UsageError
from bench.record import Environment
from bench.store.cells import RECORDS
from bench.store.reader import read_records

if TYPE_CHECKING:
    import pandas as pd

MOST_SWEEPS = 20
"""Earlier sweeps whose rates are looked at, the newest: to read one takes some 50 ms."""


def describe_slowdown(environment: Environment, folder: Path) -> list[str]:
    """A line where the device is slower than in an earlier sweep of this folder; else none.

    Args:
        environment: with the rates measured now.
        folder: with a folder for each sweep, as ``results`` is.
    """
    worst, where = dict[str, float](), ""
    for file in _find_newest(folder):
        try:
            frame = read_records(file)
        except UsageError:  # of a newer version, or torn
            continue
        for row in _find_alike(frame, environment):
            losses = find_losses(asdict(environment), row)
            if losses and max(losses.values()) > max(worst.values(), default=0.0):
                worst, where = losses, f"{file.parent} ({row['started_at'][:10]})"
    if not worst:
        return []
    return [
        f"warning: {environment.gpu or environment.cpu} gives less than in {where}: "
        f"{write_losses(worst)}; python -m bench.doctor names what else uses it, or holds it back"
    ]


FRESH_S = 3600.0
"""A sweep that goes on within this time of its last case takes the rates that it has."""


def recall_rates(environment: Environment, folder: Path) -> dict[str, float]:
    """The rates of this device in a sweep's folder, by column, if its last row is fresh."""
    if not (folder / RECORDS).is_file():
        return {}
    frame = read_records(folder)
    rows = _find_alike(frame[frame["gpu_uuid"] == (environment.gpu_uuid or "")], environment)
    if not rows or _find_age(rows[-1]["finished_at"]) > FRESH_S:
        return {}
    found = {name: rows[-1][name] for name in (*RATES, CALL)}
    return {name: float(rate) for name, rate in found.items() if not math.isnan(rate)}


def _find_age(moment: str) -> float:
    """Seconds since a UTC time of a record; none of them is of the future."""
    try:
        then = datetime.fromisoformat(moment)
    except ValueError:
        return math.inf
    return (datetime.now(UTC) - then).total_seconds() if then.tzinfo else math.inf


def _find_alike(frame: pd.DataFrame, environment: Environment) -> list[dict[Any, Any]]:
    """One row for each time that the same device was measured, the latest of that time."""
    frame = frame.drop_duplicates([*SAME_DEVICE, *RATES], keep="last")
    now = asdict(environment)
    rows = frame[frame["rate_copy"].notna()].to_dict("records")
    return [row for row in rows if all((row[n] or None) == now[n] for n in SAME_DEVICE)]


def _find_newest(folder: Path) -> list[Path]:
    files = []
    for file in folder.glob(f"*/{RECORDS}"):
        with suppress(OSError):
            files.append((file.stat().st_mtime, file))
    return [file for _, file in sorted(files, reverse=True)[:MOST_SWEEPS]]
