"""Whether a device can do less now than it could in an earlier sweep."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from bench.diagnosis.rates import RATES, SAME_DEVICE, find_losses, write_losses
from bench.errors import UsageError
from bench.record import Environment
from bench.store.cells import RECORDS
from bench.store.reader import read_records

MOST_SWEEPS = 20
"""Earlier sweeps whose rates are looked at, the newest: to read one takes some 50 ms."""


def describe_slowdown(environment: Environment, folder: Path) -> list[str]:
    """A line where the device is slower than in an earlier sweep of this folder; else none.

    Args:
        environment: with the rates measured now.
        folder: with a folder for each sweep, as ``results`` is.
    """
    now, worst, where = asdict(environment), dict[str, float](), ""
    for file in _find_newest(folder):
        try:
            frame = read_records(file)
        except UsageError:  # of a newer version, or torn
            continue
        frame = frame.drop_duplicates([*SAME_DEVICE, *RATES])
        for row in frame.to_dict("records"):
            if all((row[name] or None) == now[name] for name in SAME_DEVICE):
                losses = find_losses(now, row)
                if losses and max(losses.values()) > max(worst.values(), default=0.0):
                    worst, where = losses, f"{file.parent} ({row['started_at'][:10]})"
    if not worst:
        return []
    return [
        f"warning: {environment.gpu or environment.cpu} gives less than in {where}: "
        f"{write_losses(worst)}; python -m bench.doctor names what else uses it, or holds it back"
    ]


def _find_newest(folder: Path) -> list[Path]:
    files = []
    for file in folder.glob(f"*/{RECORDS}"):
        with suppress(OSError):
            files.append((file.stat().st_mtime, file))
    return [file for _, file in sorted(files, reverse=True)[:MOST_SWEEPS]]
