"""The current rates of a device, measured in a subprocess by `bench.training.yardstick`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace

from bench.diagnosis.step import CALL, CONVOLUTION_COLUMNS, COPY, RATE_COLUMNS, RATES, write_rate
from bench.errors import UsageError
from bench.gpu.peaks import list_peaks
from bench.limits import FAR
from bench.run.process import EndedError, MessageError, call
from bench.text import read_clock
from bench.yardstick import Tries, Yardstick

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
