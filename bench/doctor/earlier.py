"""What a device could do when it was measured before, and whether it can do less now."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.diagnosis.rates import CALL, RATES, SAME_DEVICE, find_losses, write_losses
from bench.doctor.kept import FRESH_S, find_age
from bench.errors import UsageError
from bench.record import Environment, Yardstick, read_tries
from bench.store.cells import RECORDS
from bench.store.reader import read_records

if TYPE_CHECKING:
    import pandas as pd

MOST_SWEEPS = 20
"""Earlier sweeps whose rates are looked at, the newest: to read one takes some 50 ms."""


@dataclass(frozen=True)
class Earlier:
    folder: Path
    day: str
    row: Mapping[Any, Any]


def read_earlier(environment: Environment, folder: Path) -> list[Earlier]:
    """The times at which a device was measured, in the sweeps of a folder, as ``results`` is."""
    files = []
    for file in folder.glob(f"*/{RECORDS}"):
        with suppress(OSError):
            files.append((file.stat().st_mtime, file))
    found = []
    for _, file in sorted(files, reverse=True)[:MOST_SWEEPS]:
        try:
            frame = read_records(file)
        except UsageError:  # of a newer version, or torn
            continue
        rows = _find_alike(frame, environment)
        found += [Earlier(file.parent, row["started_at"][:10], row) for row in rows]
    return found


def expect_rates(earlier: Sequence[Earlier]) -> dict[str, float]:
    """The best of each rate that was measured."""
    found: dict[str, float] = {}
    for name, rate in ((name, one.row[name]) for one in earlier for name in RATES):
        if not math.isnan(rate):
            found[name] = max(rate, found.get(name, 0.0))
    return found


def describe_slowdown(rates: Mapping[str, Any], earlier: Sequence[Earlier]) -> str:
    """Where the rates of a device are lower than at an earlier time, at its worst; or nothing."""
    lost = [(losses, one) for one in earlier if (losses := find_losses(rates, one.row))]
    if not lost:
        return ""
    losses, one = max(lost, key=lambda pair: max(pair[0].values()))
    return f"less than in {one.folder} ({one.day}): {write_losses(losses)}"


def recall_rates(environment: Environment, folder: Path) -> Yardstick:
    """What this device could do by a sweep's folder, if its last row is fresh and has products. So
    a sweep that goes on within an hour of its last case keeps its rates. Where products are
    missing, they could not be measured or had collapsed; that may have passed."""
    if not (folder / RECORDS).is_file():
        return Yardstick()
    frame = read_records(folder)
    rows = _find_alike(frame[frame["gpu_uuid"] == (environment.gpu_uuid or "")], environment)
    if not rows or find_age(rows[-1]["finished_at"]) > FRESH_S:
        return Yardstick()
    found = read_yardstick(rows[-1])
    return found if "rate_float32" in found.rates else Yardstick()


def read_yardstick(columns: Mapping[Any, Any]) -> Yardstick:
    """The rates in a record's columns, or in the fields of its `bench.record.Environment`."""
    rates = {name: columns[name] for name in (*RATES, CALL)}
    known = {n: float(rate) for n, rate in rates.items() if rate is not None and rate == rate}
    tries = read_tries(columns["rate_tries"] or "")
    return Yardstick(known, tries=tries, measured_at=columns["rates_at"] or "")


def _find_alike(frame: pd.DataFrame, environment: Environment) -> list[dict[Any, Any]]:
    """One row for each time that the same device was measured, the latest of that time."""
    frame = frame.drop_duplicates([*SAME_DEVICE, *RATES], keep="last")
    now = asdict(environment)
    rows = frame[frame["rate_copy"].notna()].to_dict("records")
    return [row for row in rows if all((row[n] or None) == now[n] for n in SAME_DEVICE)]
