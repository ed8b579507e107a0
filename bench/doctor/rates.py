"""What a device can do now, measured in a process of its own by `bench.training.yardstick`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.diagnosis.floors import RATE_COLUMNS
from bench.diagnosis.rates import CALL, write_rate
from bench.errors import UsageError
from bench.gpu.peaks import peak_flops
from bench.processes import run_module

SECONDS = "BENCH_YARDSTICK_S"

_DEFAULT_S = {"cuda": 1.0, "cpu": 0.2}
_START_S = 120.0  # torch, and CUDA's libraries from a slow disk
_SLOWEST = 50  # times as long as asked: seven measurements, and products that are emulated


@dataclass(frozen=True)
class Yardstick:
    """What a device was measured to do: columns of `bench.record.Environment`.

    ``reasons`` says why any of them has no value; what the device does not have is in neither.
    """

    rates: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def choose_seconds(device: str) -> float:
    """How long each measurement may take, in s; 0 for none at all.

    Raises:
        UsageError: the variable `SECONDS` is not a number of seconds.
    """
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
    """Measure what ``device`` ("cuda" or "cpu") can do, in a fresh process.

    Args:
        device: that nothing else uses now.
        seconds: about how long each of the five to seven measurements takes.
        variables: environment variables that choose the GPU.
    """
    limit_s = _START_S + _SLOWEST * seconds
    said, why = run_module(
        "bench.training.yardstick",
        device,
        str(seconds),
        timeout_s=limit_s,
        variables=variables,
    )
    if why is None:
        return Yardstick(reasons={"rates": f"not measured within {limit_s:.0f} s"})
    try:
        return Yardstick(**json.loads(said))
    except (ValueError, TypeError):
        return Yardstick(reasons={"rates": why})


def describe_rates(yardstick: Yardstick, gpu: str | None) -> str:
    """The rates, each beside the data sheet's where that is known."""
    parts = []
    for format, column in RATE_COLUMNS.items():
        if rate := yardstick.rates.get(column):
            peak = peak_flops(gpu, format) if gpu else None
            of = f" ({100 * rate / peak:.0f} % of the data sheet's)" if peak else ""
            parts.append(f"{format} {write_rate(column, rate)}{of}")
    said = [f"large products {', '.join(parts)}"] if parts else []
    if rate := yardstick.rates.get("rate_copy"):
        said.append(f"large copies {write_rate('rate_copy', rate)}")
    if seconds := yardstick.rates.get(CALL):
        said.append(f"the smallest operation {write_rate(CALL, seconds)}")
    return "; ".join(said)
