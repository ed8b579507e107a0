"""The rates of a device: measured now, in a process by `bench.training.device_rates`, or read from
a sweep's folder, for which they are measured once."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from bench.base.errors import UsageError
from bench.base.limits import FAR
from bench.base.processes import choose_threads
from bench.base.text import read_clock
from bench.machine.host import THREADS
from bench.machine.peaks import list_peaks
from bench.profile.rates import CALL, RATES, SAME_DEVICE, DeviceRates, Tries, read_tries, write_rate
from bench.results.store.reader import read_rows
from bench.results.store.table import RECORDS
from bench.schema.case import DEVICES
from bench.schema.record import COMPARABLE
from bench.workers.examination import Machine, Platform
from bench.workers.server import EndedError, MessageError, call

RATES_VARIABLE = "BENCH_RATES_S"

_DEFAULT_S = {"cuda": 0.2, "cpu": 0.1}
_START_S = 120.0  # to load torch and CUDA's libraries from a slow disk
_SLOWEST = 250  # times the seconds per rate: seven rates or more, and emulated products are slow


def choose_seconds(device: str) -> float:
    """Return how long the tries of each rate may take together, in s; 0 to measure none. Raises
    UsageError: the variable `RATES_VARIABLE` is not a number of seconds."""
    text = os.environ.get(RATES_VARIABLE, "")
    try:
        seconds = float(text) if text else _DEFAULT_S[device]
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 60:
        raise UsageError(
            f"{RATES_VARIABLE}={text}: give seconds for each rate, from 0 to 60; 0: none"
        )
    return seconds


def measure_rates(
    device: str, seconds: float, variables: Mapping[str, str] | None = None
) -> DeviceRates:
    """Measure the rates of ``device`` ("cuda" or "cpu"), which nothing else may use, in a fresh
    process.

    Args:
        seconds: about how long the tries of each rate take together.
        variables: environment variables that choose the GPU.
    """
    limit_s = _START_S + _SLOWEST * seconds
    place = "bench.training.device_rates:answer"
    try:
        found: DeviceRates = call(place, device, seconds, timeout_s=limit_s, variables=variables)
    except TimeoutError:
        return DeviceRates(reasons={"rates": f"not measured within {limit_s:.0f} s"})
    except (EndedError, MessageError) as error:
        return DeviceRates(reasons={"rates": str(error)})
    return replace(found, measured_at=read_clock())


def measure_machine(machine: Machine) -> Machine:
    """Measure the rates of the device that torch can use, a GPU if possible; of a CPU with the
    threads that a sweep would take now. Raises UsageError: as `choose_seconds`."""
    usable = [name for name, platform in machine.devices.items() if not platform.error]
    device = min(usable, key=DEVICES.index, default=None)
    if device is None or not (seconds := choose_seconds(device)):
        return machine
    number = find_threads(machine) if device == "cpu" else None
    variables = {THREADS[0]: str(number)} if number else None
    return replace(machine, device_rates={device: measure_rates(device, seconds, variables)})


def find_threads(machine: Machine) -> int | None:
    """Return how many threads a sweep would choose on the CPU of a machine as it was examined; None
    for torch's default or the user's number."""
    if {*THREADS} & {*machine.variables}:
        return None
    cpu = machine.cpu
    cores = min(cpu.cores, cpu.quota.cores) if cpu.quota else cpu.cores
    return choose_threads(cores, cpu.others + cpu.steal * cpu.cores, cpu.cores)


def describe_rates(device_rates: DeviceRates, gpu: str | None) -> str:
    """Describe the rates, each with its share of the data sheet's, if known, and its clock. Rates
    above the data sheet's are left out: `check_rates` reports them.

    The clock alone: NVML's power is the mean of the last second, and a try takes 25 ms. An H200
    reported 182 W in products, and 417 W in the smallest operation after them.
    """
    peaks, parts = list_peaks(gpu or ""), []
    for column, name in {**RATES, CALL: "the smallest operation"}.items():
        rate, peak = device_rates.rates.get(column, 0.0), peaks.get(column)
        if 0 < rate <= (peak or math.inf):
            share = f"{100 * rate / peak:.0f} % of the data sheet's" if peak else ""
            beside = ", ".join(filter(None, (share, _write_clock(device_rates, column))))
            parts.append(f"{name} {write_rate(column, rate)}{f' ({beside})' if beside else ''}")
    return "; ".join(parts)


def _write_clock(device_rates: DeviceRates, column: str) -> str:
    clock = device_rates.tries.get(column, Tries(1)).clock_mhz
    return f"{clock:.0f} MHz" if clock else ""


def check_rates(device_rates: DeviceRates, gpu: str | None) -> Iterator[tuple[str, str]]:
    """Yield the warnings about the rates of a GPU of that name, or of a CPU, each with a command
    that helps."""
    for column, peak in list_peaks(gpu or "").items():
        share = device_rates.rates.get(column, peak) / peak
        if FAR <= share <= 1:
            continue
        clock = _write_clock(device_rates, column)
        what = f"{RATES[column]} reach {100 * share:.0f} % of the data sheet's"
        what += f" at {clock}" if clock else ""
        if share < FAR:
            fix = "nvidia-smi -q -d PERFORMANCE,CLOCK,POWER shows what slows the card down"
            yield what, fix
        else:
            yield f"{what}: that rate is not used", "measure again: python -m bench.doctor"


_SAME_STATE = (
    *(*SAME_DEVICE, "gpu_uuid", "host"),
    *(name for name, owners in COMPARABLE.items() if "device" in owners),
)
"""Columns in which a row must agree with a device for its rates to stand for it."""


def read_rates(platform: Platform, folder: Path) -> DeviceRates:
    """Return the rates in a sweep's folder; none if no row has any of the same device with the same
    versions."""
    if not (folder / RECORDS).is_file():
        return DeviceRates()
    now = asdict(platform.environment)
    for row in reversed(read_rows(folder)):
        alike = all((getattr(row, name) or None) == now[name] for name in _SAME_STATE)
        if alike and row.number("rate_copy") is not None:
            known = {name: row.number(name) for name in (*RATES, CALL)}
            rates = {name: rate for name, rate in known.items() if rate is not None}
            return DeviceRates(rates, tries=read_tries(row.rate_tries), measured_at=row.rates_at)
    return DeviceRates()
