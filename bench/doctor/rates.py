"""The rates of a device: measured now, in a process by `bench.training.yardstick`, and before, in
the rows of sweeps."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from bench.diagnosis.step import (
    CALL,
    CONVOLUTION_COLUMNS,
    COPY,
    RATE_COLUMNS,
    RATES,
    SAME_DEVICE,
    are_other_cpus,
    find_halves,
    find_losses,
    write_losses,
    write_rate,
)
from bench.environment.machine import Machine, Platform
from bench.errors import UsageError
from bench.gpu.peaks import list_peaks
from bench.limits import FAR
from bench.record import COMPARABLE
from bench.run.process import EndedError, MessageError, call
from bench.store.reader import read_rows
from bench.store.rows import Row, group
from bench.store.table import RECORDS
from bench.text import read_clock
from bench.yardstick import Tries, Yardstick, read_tries

SECONDS = "BENCH_YARDSTICK_S"

_DEFAULT_S = {"cuda": 0.2, "cpu": 0.1}
_START_S = 120.0  # to load torch and CUDA's libraries from a slow disk
_SLOWEST = 250  # times the seconds per rate: seven rates or more, and emulated products are slow


def choose_seconds(device: str) -> float:
    """Return how long the tries of each rate may take together, in s; 0 to measure none. Raises
    UsageError: the variable `SECONDS` is not a number of seconds."""
    text = os.environ.get(SECONDS, "")
    try:
        seconds = float(text) if text else _DEFAULT_S[device]
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 60:
        raise UsageError(f"{SECONDS}={text}: give seconds for each rate, from 0 to 60; 0: none")
    return seconds


def measure_rates(
    device: str, seconds: float, variables: Mapping[str, str] | None = None
) -> Yardstick:
    """Measure the rates of ``device`` ("cuda" or "cpu"), which nothing else may use, in a fresh
    process.

    Args:
        seconds: about how long the tries of each rate take together.
        variables: environment variables that choose the GPU.
    """
    limit_s = _START_S + _SLOWEST * seconds
    place = "bench.training.yardstick:answer"
    try:
        found: Yardstick = call(place, device, seconds, timeout_s=limit_s, variables=variables)
    except TimeoutError:
        return Yardstick(reasons={"rates": f"not measured within {limit_s:.0f} s"})
    except (EndedError, MessageError) as error:
        return Yardstick(reasons={"rates": str(error)})
    return replace(found, measured_at=read_clock())


def describe_rates(yardstick: Yardstick, gpu: str | None) -> str:
    """Describe the rates, each with its share of the data sheet's, if known, and its clock. Rates
    above the data sheet's are left out: `check_rates` reports them."""
    peaks = list_peaks(gpu or "")
    known = {c: rate for c, rate in yardstick.rates.items() if 0 < rate <= peaks.get(c, math.inf)}

    def write(column: str) -> str:
        clock = _write_clock(yardstick.tries.get(column, Tries(1)))
        beside = [clock] if clock else []
        if column in peaks:
            beside.insert(0, f"{100 * known[column] / peaks[column]:.0f} % of the data sheet's")
        return write_rate(column, known[column]) + (f" ({', '.join(beside)})" if beside else "")

    said = []
    for what, columns in _TOLD.items():
        parts = [f"{name} {write(c)}".strip() for name, c in columns.items() if c in known]
        said += [f"{what} {', '.join(parts)}"] if parts else []
    return "; ".join(said)


_TOLD = {
    "large products": RATE_COLUMNS,
    "convolutions": CONVOLUTION_COLUMNS,
    "large copies": {"": COPY},
    "the smallest operation": {"": CALL},
}
"""Columns by number format, or by an empty name."""


def _write_clock(tries: Tries) -> str:
    """Describe only the clock: NVML's power is the mean of the last second, and a try takes 25 ms.
    An H200 reported 182 W in products, and 417 W in the smallest operation after them."""
    return f"{tries.clock_mhz:.0f} MHz" if tries.clock_mhz else ""


def write_rate_warnings(yardstick: Yardstick, gpu: str | None) -> list[str]:
    """Return `check_rates` as warnings, a line each."""
    return [f"warning: {what}; {fix}" for what, fix in check_rates(yardstick, gpu)]


def check_rates(yardstick: Yardstick, gpu: str | None) -> Iterator[tuple[str, str]]:
    """Yield the doubts about the rates of a GPU of that name, or of a CPU, each with a command that
    helps."""
    for column, peak in list_peaks(gpu or "").items():
        share = yardstick.rates.get(column, peak) / peak
        if FAR <= share <= 1:
            continue
        tries = yardstick.tries.get(column, Tries(1))
        at = _write_clock(tries)
        best = f"in the best of {tries.number} tries{f', at {at}' if at else ''}"
        if share < FAR:
            yield (
                f"{RATES[column]} reach {100 * share:.0f} % of the data sheet's, {best}",
                "nvidia-smi -q -d PERFORMANCE,CLOCK,POWER shows what slows the card down",
            )
        else:
            yield (
                f"{RATES[column]} would be above the data sheet's, {best}: that rate is not used",
                "nvidia-smi -q -d CLOCK shows a clock above the boost of the data sheet; if there "
                "is none, measure again",
            )


# ---------------------------------------------------------------------------------- measured before


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


def measure_machine(machine: Machine) -> Machine:
    """Measure the rates of the device. Raises UsageError: `SECONDS` is not a
    number of seconds."""
    device = machine.device
    if device is None or not (seconds := choose_seconds(device)):
        return machine
    earlier = read_earlier(machine.devices[device], Path(machine.results))
    found = measure_rates(device, seconds)
    slower = describe_slowdown(found.rates, earlier)
    return replace(machine, yardsticks={device: found}, slower=slower)
