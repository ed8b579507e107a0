"""What a device could do when it was measured before: in the rows of sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from bench.diagnosis.step import (
    CALL,
    RATES,
    SAME_DEVICE,
    are_other_cpus,
    find_halves,
    find_losses,
    write_losses,
)
from bench.environment.machine import Platform
from bench.errors import UsageError
from bench.record import COMPARABLE
from bench.store.reader import read_rows
from bench.store.rows import Row, group
from bench.store.table import RECORDS
from bench.yardstick import Yardstick, read_tries

MOST_SWEEPS = 20
"""The most earlier sweeps whose rates are read, newest first: reading one takes about 50 ms."""

_SAME_STATE = tuple(
    dict.fromkeys(
        [
            *SAME_DEVICE,
            *("gpu_uuid", "host"),
            *(name for name, owners in COMPARABLE.items() if owners == ("device",)),
        ]
    )
)
"""Columns in which a row must agree with a device for its rates to stand for it."""


@dataclass(frozen=True)
class EarlierMeasurement:
    folder: Path
    day: str
    row: Mapping[Any, Any]


def read_earlier(platform: Platform, folder: Path) -> list[EarlierMeasurement]:
    """Return the earlier measurements of a device in the sweeps of a folder such as ``results``."""
    files = []
    for file in folder.glob(f"*/{RECORDS}"):
        with suppress(OSError):
            files.append((file.stat().st_mtime, file))
    found = []
    for _, file in sorted(files, reverse=True)[:MOST_SWEEPS]:
        try:
            rows = read_rows(file)
        except UsageError:  # of a newer version, or torn
            continue
        alike = _find_alike(rows, platform, SAME_DEVICE)
        found += [EarlierMeasurement(file.parent, row["started_at"][:10], row) for row in alike]
    return found


def describe_slowdown(rates: Mapping[str, Any], earlier: Sequence[EarlierMeasurement]) -> str:
    """Describe by how much rates are below the earlier sweep with the largest loss; empty if none
    is. A CPU is only known to have the same name and not to differ in its half precisions."""
    lost = [(losses, one) for one in earlier if (losses := find_losses(rates, one.row))]
    if not lost:
        return ""
    losses, one = max(lost, key=lambda pair: max(pair[0].values()))
    what = "" if one.row["gpu"] else "a CPU of this name "
    return f"less than {what}in {one.folder} ({one.day}): {write_losses(losses)}"


def read_rates(platform: Platform, folder: Path) -> Yardstick:
    """Return the rates in a sweep's folder, which are measured once; none if no row has any of the
    same device with the same versions."""
    if not (folder / RECORDS).is_file():
        return Yardstick()
    rows = _find_alike(read_rows(folder), platform, _SAME_STATE)
    if not rows:
        return Yardstick()
    row = rows[-1]
    known = {name: float(row[name]) for name in (*RATES, CALL) if row[name] == row[name]}
    return Yardstick(known, tries=read_tries(row["rate_tries"]), measured_at=row["rates_at"])


def _find_alike(
    rows: Sequence[Row], platform: Platform, columns: Sequence[str]
) -> list[dict[str, Any]]:
    """Return a row for each time that a device was measured that agrees in these columns, the
    latest of that time."""
    now, halves = asdict(platform.environment), platform.halves
    rated = (row for row in rows if row.number("rate_copy") is not None)
    times = group(rated, attrgetter("rates_at", *columns))
    latest = [vars(row) for *_, row in times]
    alike = [row for row in latest if all((row[n] or None) == now[n] for n in columns)]
    return [row for row in alike if not are_other_cpus(halves, find_halves(row))]
